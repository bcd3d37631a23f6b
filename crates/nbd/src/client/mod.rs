//! The client's end.

mod handshake;
mod replies;

use crate::export::{Export, Extent};
use crate::server::Want;
use crate::wire::{
    CHUNK_LEN, Command, CommandFlags, EXTENDED_CHUNK_LEN, Errno, OPTION_REPLY_LEN, ProtocolError,
    Request, SIMPLE_REPLY_LEN,
};
use replies::{Outstanding, Progress};

/// Longest data of a chunk that is no payload, in bytes: 64 Ki extents.
const MAX_CHUNK: u64 = 1 << 20;
/// Length of a server's greeting.
const GREETING_LEN: usize = 18;

/// What a client wants of the negotiation.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Handshake {
    /// The export; an empty name is the server's default.
    pub export: String,
    /// Ask for TLS, and go on without only if this is `false`.
    pub tls: bool,
    /// Ask for structured replies.
    pub structured: bool,
    /// Ask for extended headers, which imply structured replies.
    pub extended: bool,
    /// Ask for `base:allocation`.
    pub status: bool,
    /// List the exports, and end.
    pub list: bool,
}

impl Handshake {
    /// All that the protocol has, without TLS.
    #[must_use]
    pub fn new(export: &str) -> Self {
        Self {
            export: export.into(),
            tls: false,
            structured: true,
            extended: true,
            status: true,
            list: false,
        }
    }
}

/// What happened at the client.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ClientEvent {
    /// Begin TLS now, after all output was sent; then call [`Client::tls_started`].
    StartTls,
    /// The server lists an export.
    Listed {
        /// Its name.
        name: String,
        /// Its description.
        description: String,
    },
    /// The negotiation is over: requests may be made.
    Started(Export),
    /// About a request.
    Reply {
        /// The request.
        cookie: u64,
        /// What came.
        reply: Reply,
    },
    /// The session has ended in good order.
    Ended,
}

/// A part of the reply to a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Reply {
    /// A part of the data is zeros that did not go over the wire.
    Zeros {
        /// Where, from the beginning of the request's data.
        at: u64,
        /// How many bytes.
        length: u64,
    },
    /// The extents from the request's offset on.
    Extents(Vec<Extent>),
    /// The reply is complete.
    Done(Result<(), Errno>),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Greeting,
    OptionReply,
    OptionData {
        option: u32,
        kind: u32,
        length: u32,
    },
    /// What follows `EXPORT_NAME`.
    Legacy,
    Reply,
    /// The first bytes of a chunk's header were read as those of a simple reply.
    ChunkRest([u8; SIMPLE_REPLY_LEN]),
    ChunkData(Progress),
    Payload(Progress),
    Ended,
}

/// The client's end of one session.
#[derive(Debug)]
pub struct Client {
    wanted: Handshake,
    state: State,
    output: Vec<u8>,
    export: Export,
    no_zeroes: bool,
    structured: bool,
    extended: bool,
    /// The number of `base:allocation` at this server.
    context: Option<u32>,
    outstanding: Vec<Option<Outstanding>>,
    free: Vec<u32>,
    serial: u32,
}

impl Client {
    /// A session that has just begun: the server speaks first.
    #[must_use]
    pub fn new(wanted: Handshake) -> Self {
        Self {
            export: Export::new(&wanted.export, 0),
            wanted,
            state: State::Greeting,
            output: Vec::new(),
            no_zeroes: false,
            structured: false,
            extended: false,
            context: None,
            outstanding: Vec::new(),
            free: Vec::new(),
            serial: 0,
        }
    }

    /// What comes next.
    #[must_use]
    pub fn wants(&self) -> Want {
        match self.state {
            State::Greeting => Want::Bytes(GREETING_LEN),
            State::OptionReply => Want::Bytes(OPTION_REPLY_LEN),
            State::OptionData { length, .. } => Want::Bytes(length as usize),
            State::Legacy => Want::Bytes(if self.no_zeroes { 10 } else { 134 }),
            State::Reply if self.extended => Want::Bytes(EXTENDED_CHUNK_LEN),
            State::Reply => Want::Bytes(SIMPLE_REPLY_LEN),
            State::ChunkRest(_) => Want::Bytes(CHUNK_LEN - SIMPLE_REPLY_LEN),
            State::ChunkData(progress) => Want::Bytes(progress.data_length()),
            State::Payload(Progress { cookie, at, length, .. }) => {
                Want::Payload { cookie, at, length }
            }
            State::Ended => Want::Nothing,
        }
    }

    /// What is to be sent to the server. The caller takes it away.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// The export, from [`ClientEvent::Started`] on.
    #[must_use]
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// Whether [`Command::BlockStatus`] may be asked.
    #[must_use]
    pub fn has_status(&self) -> bool {
        self.context.is_some()
    }

    /// How many requests have no complete reply yet.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding.len() - self.free.len()
    }

    /// Takes exactly the bytes that [`Client::wants`] named.
    ///
    /// # Errors
    ///
    /// The server breaks the protocol or refuses the export; the session has ended.
    ///
    /// # Panics
    ///
    /// `bytes` has another length.
    pub fn input(&mut self, bytes: &[u8]) -> Result<Option<ClientEvent>, ProtocolError> {
        assert_eq!(self.wants(), Want::Bytes(bytes.len()), "the wrong number of bytes");
        let outcome = self.step(bytes);
        if outcome.is_err() {
            self.state = State::Ended;
        }
        outcome
    }

    fn step(&mut self, bytes: &[u8]) -> Result<Option<ClientEvent>, ProtocolError> {
        match self.state {
            State::Greeting => self.greeting(bytes),
            State::OptionReply => self.option_reply(bytes),
            State::OptionData { option, kind, .. } => {
                self.state = State::OptionReply;
                self.answered(option, kind, bytes)
            }
            State::Legacy => Ok(Some(self.legacy(bytes))),
            State::Reply => self.reply(bytes),
            State::ChunkRest(first) => {
                let mut header = [0; CHUNK_LEN];
                header[..SIMPLE_REPLY_LEN].copy_from_slice(&first);
                header[SIMPLE_REPLY_LEN..].copy_from_slice(bytes);
                self.chunk(&header)
            }
            State::ChunkData(progress) => self.chunk_data(progress, bytes),
            State::Payload(_) | State::Ended => unreachable!("no bytes are wanted"),
        }
    }

    /// Makes a request: its header is in the output. The caller sends the data of a write right after it.
    ///
    /// Offset and length have to lie within the export; a length of 4 GiB or more needs extended headers.
    /// Returns the cookie that names the request in events.
    pub fn request(
        &mut self,
        command: Command,
        flags: CommandFlags,
        offset: u64,
        length: u64,
    ) -> u64 {
        self.serial = self.serial.wrapping_add(1);
        let index = self.free.pop().unwrap_or_else(|| {
            self.outstanding.push(None);
            (self.outstanding.len() - 1) as u32
        });
        let cookie = u64::from(self.serial) << 32 | u64::from(index);
        self.outstanding[index as usize] = Some(Outstanding::new(cookie, command, offset, length));
        let carries = self.extended && command == Command::Write;
        let flags = if carries { flags | CommandFlags::PAYLOAD_LEN } else { flags };
        let request = Request { flags, kind: command.number(), cookie, offset, length };
        request.encode(self.extended, &mut self.output);
        cookie
    }

    /// Ends the session: the server carries out what was requested, and replies to nothing more.
    pub fn disconnect(&mut self) {
        let kind = Command::Disconnect.number();
        let request =
            Request { flags: CommandFlags::empty(), kind, cookie: 0, offset: 0, length: 0 };
        request.encode(self.extended, &mut self.output);
        self.state = State::Ended;
    }
}

#[cfg(test)]
mod tests;
