//! The negotiation: options and their replies.

use super::{Server, ServerEvent, State};
use crate::MAX_NAME;
use crate::export::Export;
use crate::wire::{
    ALLOCATION, ALLOCATION_ID, OPTION_REPLY_MAGIC, ProtocolError, TransmissionFlags, info, option,
    reply, u16_at, u32_at,
};

/// The data of INFO and GO.
struct Question<'a> {
    name: &'a str,
    wanted: Vec<u16>,
}

impl Server {
    /// An option is complete.
    pub(super) fn option(
        &mut self,
        number: u32,
        data: &[u8],
    ) -> Result<Option<ServerEvent>, ProtocolError> {
        let locked = self.options.tls_required && !self.encrypted;
        if locked && !matches!(number, option::STARTTLS | option::ABORT) {
            if number == option::EXPORT_NAME {
                return Err(ProtocolError::Option { option: number, why: "TLS has to come first" });
            }
            self.answer(number, reply::ERR_TLS_REQD, b"this server wants TLS first");
            return Ok(None);
        }
        match number {
            option::EXPORT_NAME => return self.export_name(data),
            option::ABORT => {
                self.answer(number, reply::ACK, &[]);
                self.state = State::Ended;
                return Ok(Some(ServerEvent::Ended));
            }
            option::STARTTLS => return Ok(self.start_tls(data)),
            option::LIST => self.list(data),
            option::INFO | option::GO => return Ok(self.describe(number, data)),
            option::STRUCTURED_REPLY => self.structured_reply(data),
            option::EXTENDED_HEADERS => self.extended_headers(data),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.contexts(number, data),
            _ => self.answer(number, reply::ERR_UNSUP, b"this option is not known"),
        }
        Ok(None)
    }

    fn answer(&mut self, option: u32, kind: u32, data: &[u8]) {
        self.output.extend(OPTION_REPLY_MAGIC.to_be_bytes());
        self.output.extend(option.to_be_bytes());
        self.output.extend(kind.to_be_bytes());
        self.output.extend((data.len() as u32).to_be_bytes());
        self.output.extend(data);
    }

    /// The export with a name; an empty one names the first.
    fn find(&self, name: &str) -> Option<usize> {
        let found = self.options.exports.iter().position(|export| export.name == name);
        found.or_else(|| (name.is_empty() && !self.options.exports.is_empty()).then_some(0))
    }

    fn begin(&mut self, index: usize) -> ServerEvent {
        if self.allocation_of != Some(index) {
            self.allocation_of = None;
        }
        self.export = Some(index);
        self.state = State::Request;
        ServerEvent::Started(index)
    }

    fn flags_of(&self, export: &Export) -> TransmissionFlags {
        let mut flags = export.flags;
        flags.set(TransmissionFlags::DF, self.structured && flags.contains(TransmissionFlags::DF));
        flags
    }

    fn export_name(&mut self, data: &[u8]) -> Result<Option<ServerEvent>, ProtocolError> {
        let name = String::from_utf8_lossy(data).into_owned();
        let index = self.find(&name).ok_or(ProtocolError::UnknownExport(name))?;
        let export = &self.options.exports[index];
        let (size, flags) = (export.size, self.flags_of(export));
        self.output.extend(size.to_be_bytes());
        self.output.extend(flags.bits().to_be_bytes());
        if !self.no_zeroes {
            self.output.extend([0; 124]);
        }
        Ok(Some(self.begin(index)))
    }

    fn start_tls(&mut self, data: &[u8]) -> Option<ServerEvent> {
        let number = option::STARTTLS;
        let offered = self.options.tls || self.options.tls_required;
        if !data.is_empty() || self.encrypted {
            self.answer(number, reply::ERR_INVALID, b"STARTTLS has no data and comes once");
            return None;
        }
        if !offered {
            self.answer(number, reply::ERR_POLICY, b"this server has no certificate");
            return None;
        }
        self.answer(number, reply::ACK, &[]);
        Some(ServerEvent::StartTls)
    }

    fn list(&mut self, data: &[u8]) {
        if !data.is_empty() {
            return self.answer(option::LIST, reply::ERR_INVALID, b"LIST has no data");
        }
        for index in 0..self.options.exports.len() {
            let export = &self.options.exports[index];
            let mut data = (export.name.len() as u32).to_be_bytes().to_vec();
            data.extend(export.name.as_bytes());
            data.extend(export.description.as_bytes());
            self.answer(option::LIST, reply::SERVER, &data);
        }
        self.answer(option::LIST, reply::ACK, &[]);
    }

    fn describe(&mut self, number: u32, data: &[u8]) -> Option<ServerEvent> {
        let Some(Question { name, wanted }) = question(data) else {
            self.answer(number, reply::ERR_INVALID, b"the lengths within the option are wrong");
            return None;
        };
        let Some(index) = self.find(name) else {
            self.answer(number, reply::ERR_UNKNOWN, b"there is no export of this name");
            return None;
        };
        let export = self.options.exports[index].clone();
        let mut pieces = vec![info::EXPORT.to_be_bytes().to_vec()];
        pieces[0].extend(export.size.to_be_bytes());
        pieces[0].extend(self.flags_of(&export).bits().to_be_bytes());
        for kind in wanted {
            let mut piece = kind.to_be_bytes().to_vec();
            match kind {
                info::NAME => piece.extend(export.name.as_bytes()),
                info::DESCRIPTION => piece.extend(export.description.as_bytes()),
                info::BLOCK_SIZE => {
                    let blocks = export.blocks;
                    for length in [blocks.minimum, blocks.preferred, blocks.maximum] {
                        piece.extend(length.to_be_bytes());
                    }
                }
                _ => continue,
            }
            pieces.push(piece);
        }
        for piece in &pieces {
            self.answer(number, reply::INFO, piece);
        }
        self.answer(number, reply::ACK, &[]);
        (number == option::GO).then(|| self.begin(index))
    }

    fn structured_reply(&mut self, data: &[u8]) {
        let number = option::STRUCTURED_REPLY;
        if !data.is_empty() {
            return self.answer(number, reply::ERR_INVALID, b"STRUCTURED_REPLY has no data");
        }
        if !(self.options.structured || self.options.extended) {
            return self.answer(number, reply::ERR_UNSUP, b"structured replies are switched off");
        }
        self.structured = true;
        self.answer(number, reply::ACK, &[]);
    }

    fn extended_headers(&mut self, data: &[u8]) {
        let number = option::EXTENDED_HEADERS;
        if !data.is_empty() {
            return self.answer(number, reply::ERR_INVALID, b"EXTENDED_HEADERS has no data");
        }
        if !self.options.extended {
            return self.answer(number, reply::ERR_UNSUP, b"extended headers are switched off");
        }
        (self.structured, self.extended) = (true, true);
        self.answer(number, reply::ACK, &[]);
    }

    fn contexts(&mut self, number: u32, data: &[u8]) {
        let chooses = number == option::SET_META_CONTEXT;
        if chooses {
            self.allocation_of = None;
        }
        if !self.structured {
            return self.answer(number, reply::ERR_INVALID, b"ask for structured replies first");
        }
        let Some((name, queries)) = context_queries(data) else {
            return self.answer(number, reply::ERR_INVALID, b"lengths within the option are wrong");
        };
        let Some(index) = self.find(name) else {
            return self.answer(number, reply::ERR_UNKNOWN, b"there is no export of this name");
        };
        let matches =
            |query: &&[u8]| **query == *ALLOCATION.as_bytes() || (!chooses && **query == *b"base:");
        if queries.iter().any(matches) || (!chooses && queries.is_empty()) {
            if chooses {
                self.allocation_of = Some(index);
            }
            // Listed contexts have no number.
            let id = if chooses { ALLOCATION_ID } else { 0 };
            let mut data = id.to_be_bytes().to_vec();
            data.extend(ALLOCATION.as_bytes());
            self.answer(number, reply::META_CONTEXT, &data);
        }
        self.answer(number, reply::ACK, &[]);
    }
}

/// A name with a length of 32 bits, and what follows it.
fn name(data: &[u8]) -> Option<(&str, &[u8])> {
    let length = u32_at(data.get(..4)?, 0) as usize;
    let name = data[4..].get(..length).filter(|name| name.len() <= MAX_NAME)?;
    Some((std::str::from_utf8(name).ok()?, &data[4 + length..]))
}

fn question(data: &[u8]) -> Option<Question<'_>> {
    let (name, rest) = name(data)?;
    let count = usize::from(u16_at(rest.get(..2)?, 0));
    let wanted = &rest[2..];
    (wanted.len() == count * 2).then(|| Question {
        name,
        wanted: wanted.chunks_exact(2).map(|kind| u16_at(kind, 0)).collect(),
    })
}

/// The export's name and the queries of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
fn context_queries(data: &[u8]) -> Option<(&str, Vec<&[u8]>)> {
    let (name, rest) = name(data)?;
    let count = u32_at(rest.get(..4)?, 0) as usize;
    let (mut rest, mut queries) = (&rest[4..], Vec::new());
    // Each query has at least four bytes, so the option's length bounds the loop.
    while !rest.is_empty() {
        let length = u32_at(rest.get(..4)?, 0) as usize;
        queries.push(rest[4..].get(..length)?);
        rest = &rest[4 + length..];
    }
    (queries.len() == count).then_some((name, queries))
}
