//! The client's side of the negotiation.

use super::{Client, ClientEvent, State};
use crate::MAX_OPTION;
use crate::export::BlockSizes;
use crate::wire::{
    ALLOCATION, FIXED_NEWSTYLE, NBD_MAGIC, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    ProtocolError, TransmissionFlags, info, option, reply, u16_at, u32_at, u64_at,
};

/// Errors of option replies have this bit.
const ERROR: u32 = 1 << 31;

impl Client {
    pub(super) fn greeting(&mut self, bytes: &[u8]) -> Result<Option<ClientEvent>, ProtocolError> {
        let (first, second, flags) = (u64_at(bytes, 0), u64_at(bytes, 8), u16_at(bytes, 16));
        if first != NBD_MAGIC {
            return Err(ProtocolError::Magic { what: "a greeting", found: first });
        }
        if second != OPTION_MAGIC || flags & FIXED_NEWSTYLE == 0 {
            return Err(ProtocolError::Oldstyle);
        }
        self.no_zeroes = flags & NO_ZEROES != 0;
        let ours = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
        self.output.extend(ours.to_be_bytes());
        if self.wanted.tls {
            self.ask(option::STARTTLS, &[]);
        } else {
            self.negotiate();
        }
        Ok(None)
    }

    /// TLS has begun: the negotiation goes on within it.
    pub fn tls_started(&mut self) {
        self.negotiate();
    }

    fn negotiate(&mut self) {
        match () {
            () if self.wanted.list => self.ask(option::LIST, &[]),
            () if self.wanted.extended => self.ask(option::EXTENDED_HEADERS, &[]),
            () if self.wanted.structured => self.ask(option::STRUCTURED_REPLY, &[]),
            () => self.go(),
        }
    }

    fn ask(&mut self, number: u32, data: &[u8]) {
        self.output.extend(OPTION_MAGIC.to_be_bytes());
        self.output.extend(number.to_be_bytes());
        self.output.extend((data.len() as u32).to_be_bytes());
        self.output.extend(data);
        self.state = State::OptionReply;
    }

    fn export_name(&self) -> Vec<u8> {
        let mut data = (self.wanted.export.len() as u32).to_be_bytes().to_vec();
        data.extend(self.wanted.export.as_bytes());
        data
    }

    /// Asks for the metadata context, or for the export if there is none to ask for.
    fn ask_for_status(&mut self) {
        if !(self.wanted.status && self.structured) {
            return self.go();
        }
        let mut data = self.export_name();
        data.extend(1_u32.to_be_bytes());
        data.extend((ALLOCATION.len() as u32).to_be_bytes());
        data.extend(ALLOCATION.as_bytes());
        self.ask(option::SET_META_CONTEXT, &data);
    }

    fn go(&mut self) {
        let mut data = self.export_name();
        let wanted = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE];
        data.extend((wanted.len() as u16).to_be_bytes());
        for kind in wanted {
            data.extend(kind.to_be_bytes());
        }
        self.ask(option::GO, &data);
    }

    pub(super) fn option_reply(
        &mut self,
        bytes: &[u8],
    ) -> Result<Option<ClientEvent>, ProtocolError> {
        let magic = u64_at(bytes, 0);
        if magic != OPTION_REPLY_MAGIC {
            return Err(ProtocolError::Magic { what: "an option's reply", found: magic });
        }
        let (option, kind, length) = (u32_at(bytes, 8), u32_at(bytes, 12), u32_at(bytes, 16));
        if length > MAX_OPTION {
            let (length, limit) = (length.into(), MAX_OPTION.into());
            return Err(ProtocolError::TooLong { what: "an option's reply", length, limit });
        }
        if length == 0 {
            return self.answered(option, kind, &[]);
        }
        self.state = State::OptionData { option, kind, length };
        Ok(None)
    }

    /// A reply to an option is complete.
    pub(super) fn answered(
        &mut self,
        number: u32,
        kind: u32,
        data: &[u8],
    ) -> Result<Option<ClientEvent>, ProtocolError> {
        let wrong = |why| ProtocolError::Option { option: number, why };
        let refused = kind & ERROR != 0;
        match number {
            option::STARTTLS if kind == reply::ACK => return Ok(Some(ClientEvent::StartTls)),
            option::STARTTLS if refused => return Err(self.refused(kind, data)),
            option::LIST => return self.listed(kind, data),
            option::EXTENDED_HEADERS if kind == reply::ACK => {
                (self.extended, self.structured) = (true, true);
                self.ask_for_status();
            }
            option::EXTENDED_HEADERS if refused => self.ask(option::STRUCTURED_REPLY, &[]),
            option::STRUCTURED_REPLY => {
                self.structured = kind == reply::ACK;
                self.ask_for_status();
            }
            option::SET_META_CONTEXT if kind == reply::META_CONTEXT => {
                let id = data.get(..4).ok_or(wrong("it is too short"))?;
                if data[4..] == *ALLOCATION.as_bytes() {
                    self.context = Some(u32_at(id, 0));
                }
            }
            option::SET_META_CONTEXT => self.go(),
            option::GO if kind == reply::INFO => self.learn(data)?,
            option::GO if kind == reply::ACK => {
                if !self.export.flags.contains(TransmissionFlags::HAS_FLAGS) {
                    return Err(wrong("it ended without the export's size and flags"));
                }
                self.state = State::Reply;
                return Ok(Some(ClientEvent::Started(self.export.clone())));
            }
            option::GO if kind == reply::ERR_UNSUP => {
                let name = self.wanted.export.clone();
                self.ask(option::EXPORT_NAME, name.as_bytes());
                self.state = State::Legacy;
            }
            option::GO if refused => return Err(self.refused(kind, data)),
            _ => return Err(wrong("nobody asked for it")),
        }
        Ok(None)
    }

    fn refused(&self, code: u32, data: &[u8]) -> ProtocolError {
        let export = self.wanted.export.clone();
        let text = String::from_utf8_lossy(data).into_owned();
        ProtocolError::Refused { export, code, text }
    }

    fn listed(&mut self, kind: u32, data: &[u8]) -> Result<Option<ClientEvent>, ProtocolError> {
        let wrong = |why| ProtocolError::Option { option: option::LIST, why };
        match kind {
            reply::SERVER => {
                let length = data.get(..4).map(|length| u32_at(length, 0) as usize);
                let length = length.filter(|length| data.len() - 4 >= *length);
                let end = 4 + length.ok_or(wrong("lengths within it are wrong"))?;
                let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
                let (name, description) = (text(&data[4..end]), text(&data[end..]));
                Ok(Some(ClientEvent::Listed { name, description }))
            }
            reply::ACK => {
                self.ask(option::ABORT, &[]);
                self.state = State::Ended;
                Ok(Some(ClientEvent::Ended))
            }
            _ if kind & ERROR != 0 => Err(self.refused(kind, data)),
            _ => Err(wrong("nobody asked for it")),
        }
    }

    /// A piece of information on the export.
    fn learn(&mut self, data: &[u8]) -> Result<(), ProtocolError> {
        let wrong = |why| ProtocolError::Option { option: option::GO, why };
        let kind = u16_at(data.get(..2).ok_or(wrong("it is too short"))?, 0);
        let rest = &data[2..];
        let text = || String::from_utf8_lossy(rest).into_owned();
        match kind {
            info::EXPORT if rest.len() == 10 => {
                self.export.size = u64_at(rest, 0);
                self.export.flags = TransmissionFlags::from_bits_retain(u16_at(rest, 8))
                    | TransmissionFlags::HAS_FLAGS;
                if i64::try_from(self.export.size).is_err() {
                    return Err(wrong("the export's size has more than 63 bits"));
                }
            }
            info::EXPORT => return Err(wrong("size and flags have a wrong length")),
            info::NAME => self.export.name = text(),
            info::DESCRIPTION => self.export.description = text(),
            info::BLOCK_SIZE if rest.len() == 12 => {
                let blocks = BlockSizes {
                    minimum: u32_at(rest, 0),
                    preferred: u32_at(rest, 4),
                    maximum: u32_at(rest, 8),
                };
                let legal = blocks.minimum.is_power_of_two() && blocks.maximum >= blocks.minimum;
                if !legal {
                    return Err(wrong("the block sizes cannot be"));
                }
                self.export.blocks = blocks;
            }
            info::BLOCK_SIZE => return Err(wrong("the block sizes have a wrong length")),
            _ => {}
        }
        Ok(())
    }

    /// The answer to `EXPORT_NAME`.
    pub(super) fn legacy(&mut self, bytes: &[u8]) -> ClientEvent {
        self.export.size = u64_at(bytes, 0) & i64::MAX as u64;
        self.export.flags = TransmissionFlags::from_bits_retain(u16_at(bytes, 8));
        self.state = State::Reply;
        ClientEvent::Started(self.export.clone())
    }
}
