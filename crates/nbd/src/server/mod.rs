//! The server's end.

mod options;
mod replies;

use crate::export::{Export, Extent};
use crate::wire::{
    Command, CommandFlags, Errno, FIXED_NEWSTYLE, NBD_MAGIC, NO_ZEROES, OPTION_LEN, OPTION_MAGIC,
    ProtocolError, Request, TransmissionFlags, u32_at, u64_at,
};
use crate::{MAX_OPTION, MAX_PAYLOAD};

/// More options than any client needs end the session.
const MOST_OPTIONS: u32 = 1000;

/// What a server offers.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Its exports; the first is the default one if none has an empty name.
    pub exports: Vec<Export>,
    /// Whether `STARTTLS` is offered.
    pub tls: bool,
    /// Whether nothing goes on without TLS. Implies `tls`.
    pub tls_required: bool,
    /// Whether structured replies are offered.
    pub structured: bool,
    /// Whether extended headers are offered. Implies `structured`.
    pub extended: bool,
}

impl ServerOptions {
    /// A server of one export, with all that the protocol has but TLS.
    #[must_use]
    pub fn new(export: Export) -> Self {
        Self {
            exports: vec![export],
            tls: false,
            tls_required: false,
            structured: true,
            extended: true,
        }
    }
}

/// What comes next from the peer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Want {
    /// So many bytes, for `input`.
    Bytes(usize),
    /// The payload of a request or reply: so many bytes, for the caller's buffer; then `payload_done`.
    Payload {
        /// The request.
        cookie: u64,
        /// Where its first byte belongs, from the beginning of the request's data.
        at: u64,
        /// How many.
        length: u64,
    },
    /// So many bytes that nobody wants; then `payload_done`.
    Discard(u64),
    /// Nothing: the session has ended.
    Nothing,
}

/// What happened at the server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ServerEvent {
    /// Begin TLS now, after all output was sent; then call [`Server::tls_started`].
    StartTls,
    /// The client has chosen an export, by its index.
    Started(usize),
    /// A request for the back end. The data of a write have been delivered by [`Want::Payload`].
    Request(Command, Request),
    /// The session has ended in good order. What was requested before is still carried out.
    Ended,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Flags,
    OptionHeader,
    OptionData { option: u32, length: u32 },
    Request,
    Payload { request: Request },
    Discard { length: u64 },
    Ended,
}

/// The server's end of one session.
#[derive(Debug)]
pub struct Server {
    options: ServerOptions,
    state: State,
    output: Vec<u8>,
    no_zeroes: bool,
    encrypted: bool,
    structured: bool,
    extended: bool,
    /// The export for which `base:allocation` was chosen.
    allocation_of: Option<usize>,
    taken: u32,
    export: Option<usize>,
}

impl Server {
    /// A session that has just begun; its greeting is in the output.
    #[must_use]
    pub fn new(options: ServerOptions) -> Self {
        let mut output = Vec::new();
        output.extend(NBD_MAGIC.to_be_bytes());
        output.extend(OPTION_MAGIC.to_be_bytes());
        output.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        Self {
            options,
            state: State::Flags,
            output,
            no_zeroes: false,
            encrypted: false,
            structured: false,
            extended: false,
            allocation_of: None,
            taken: 0,
            export: None,
        }
    }

    /// What comes next.
    #[must_use]
    pub fn wants(&self) -> Want {
        match self.state {
            State::Flags => Want::Bytes(4),
            State::OptionHeader => Want::Bytes(OPTION_LEN),
            State::OptionData { length, .. } => Want::Bytes(length as usize),
            State::Request => Want::Bytes(Request::len(self.extended)),
            State::Payload { request } => {
                Want::Payload { cookie: request.cookie, at: 0, length: request.length }
            }
            State::Discard { length } => Want::Discard(length),
            State::Ended => Want::Nothing,
        }
    }

    /// What is to be sent to the client. The caller takes it away.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// The export that the client has chosen.
    #[must_use]
    pub fn export(&self) -> Option<&Export> {
        self.export.map(|index| &self.options.exports[index])
    }

    /// Whether lengths in headers have 64 bits.
    #[must_use]
    pub fn is_extended(&self) -> bool {
        self.extended
    }

    /// TLS has begun: the negotiation goes on within it, and nothing that was agreed on before counts.
    pub fn tls_started(&mut self) {
        self.encrypted = true;
        (self.structured, self.extended, self.allocation_of) = (false, false, None);
    }

    /// Takes exactly the bytes that [`Server::wants`] named.
    ///
    /// # Errors
    ///
    /// The client breaks the protocol; the session has ended. Output that is left may still be sent.
    ///
    /// # Panics
    ///
    /// `bytes` has another length.
    pub fn input(&mut self, bytes: &[u8]) -> Result<Option<ServerEvent>, ProtocolError> {
        assert_eq!(self.wants(), Want::Bytes(bytes.len()), "the wrong number of bytes");
        let outcome = self.step(bytes);
        if outcome.is_err() {
            self.state = State::Ended;
        }
        outcome
    }

    fn step(&mut self, bytes: &[u8]) -> Result<Option<ServerEvent>, ProtocolError> {
        match self.state {
            State::Flags => self.flags(u32_at(bytes, 0)).map(|()| None),
            State::OptionHeader => self.option_header(bytes),
            State::OptionData { option, .. } => {
                self.state = State::OptionHeader;
                self.option(option, bytes)
            }
            State::Request => Ok(self.request(Request::decode(bytes, self.extended)?)),
            State::Payload { .. } | State::Discard { .. } | State::Ended => {
                unreachable!("no bytes")
            }
        }
    }

    fn flags(&mut self, flags: u32) -> Result<(), ProtocolError> {
        let offered = u32::from(FIXED_NEWSTYLE | NO_ZEROES);
        if flags & !offered != 0 {
            return Err(ProtocolError::HandshakeFlags(flags));
        }
        if flags & u32::from(FIXED_NEWSTYLE) == 0 {
            return Err(ProtocolError::Oldstyle);
        }
        self.no_zeroes = flags & u32::from(NO_ZEROES) != 0;
        self.state = State::OptionHeader;
        Ok(())
    }

    fn option_header(&mut self, bytes: &[u8]) -> Result<Option<ServerEvent>, ProtocolError> {
        let magic = u64_at(bytes, 0);
        if magic != OPTION_MAGIC {
            return Err(ProtocolError::Magic { what: "an option", found: magic });
        }
        let (option, length) = (u32_at(bytes, 8), u32_at(bytes, 12));
        self.taken += 1;
        if length > MAX_OPTION || self.taken > MOST_OPTIONS {
            let (length, limit) = (length.into(), MAX_OPTION.into());
            return Err(ProtocolError::TooLong { what: "an option", length, limit });
        }
        if length == 0 {
            return self.option(option, &[]);
        }
        self.state = State::OptionData { option, length };
        Ok(None)
    }

    /// A request came: it is checked, and goes to the back end or is refused.
    fn request(&mut self, request: Request) -> Option<ServerEvent> {
        let command = Command::of(request.kind);
        let carries = command == Some(Command::Write)
            || (self.extended && request.flags.contains(CommandFlags::PAYLOAD_LEN));
        match self.check(command, &request) {
            Ok(Command::Disconnect) => {
                self.state = State::Ended;
                Some(ServerEvent::Ended)
            }
            Ok(Command::Write) if request.length > 0 => {
                self.state = State::Payload { request };
                None
            }
            Ok(command) => Some(ServerEvent::Request(command, request)),
            Err(errno) => {
                self.reply_error(&request, errno);
                if carries && request.length > 0 {
                    self.state = if request.length > u64::from(MAX_PAYLOAD) {
                        // To read it all would keep the session busy for longer than it is worth.
                        State::Ended
                    } else {
                        State::Discard { length: request.length }
                    };
                }
                None
            }
        }
    }

    /// The payload that [`Server::wants`] named has been read.
    pub fn payload_done(&mut self) -> Option<ServerEvent> {
        let state = std::mem::replace(&mut self.state, State::Request);
        match state {
            State::Payload { request } => Some(ServerEvent::Request(Command::Write, request)),
            State::Discard { .. } => None,
            other => {
                self.state = other;
                None
            }
        }
    }

    /// Whether a request may go to the back end. Transports that move data in another way than after the
    /// header use this alone.
    ///
    /// # Errors
    ///
    /// The error to reply.
    pub fn check(&self, command: Option<Command>, request: &Request) -> Result<Command, Errno> {
        let command = command.ok_or(Errno::INVAL)?;
        let export = self.export().ok_or(Errno::INVAL)?;
        let can = |flag| if export.flags.contains(flag) { Ok(()) } else { Err(Errno::INVAL) };
        let known = CommandFlags::FUA
            | match command {
                Command::Read => CommandFlags::DF,
                Command::WriteZeroes => CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
                Command::BlockStatus => CommandFlags::REQ_ONE,
                Command::Write if self.extended => CommandFlags::PAYLOAD_LEN,
                _ => CommandFlags::empty(),
            };
        if !(request.flags - known).is_empty() {
            return Err(Errno::INVAL);
        }
        match command {
            Command::Disconnect => return Ok(command),
            Command::Flush => return can(TransmissionFlags::FLUSH).map(|()| command),
            Command::Trim => can(TransmissionFlags::TRIM)?,
            Command::Cache => can(TransmissionFlags::CACHE)?,
            Command::WriteZeroes => can(TransmissionFlags::WRITE_ZEROES)?,
            Command::BlockStatus if self.allocation_of != self.export => return Err(Errno::INVAL),
            Command::Read | Command::Write | Command::BlockStatus => {}
        }
        let writes = matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
        if writes && export.flags.contains(TransmissionFlags::READ_ONLY) {
            return Err(Errno::PERM);
        }
        let moves = matches!(command, Command::Read | Command::Write);
        if moves && request.length > u64::from(export.blocks.maximum) {
            return Err(Errno::OVERFLOW);
        }
        if !export.holds(request.offset, request.length) {
            return Err(if writes { Errno::NOSPC } else { Errno::INVAL });
        }
        let minimum = u64::from(export.blocks.minimum);
        if !request.offset.is_multiple_of(minimum) || !request.length.is_multiple_of(minimum) {
            return Err(Errno::INVAL);
        }
        if command == Command::BlockStatus && request.length == 0 {
            return Err(Errno::INVAL);
        }
        Ok(command)
    }
}

#[cfg(test)]
mod tests;
