//! Numbers and headers of the protocol, as bytes (big-endian) and as values.

use bitflags::bitflags;

/// The first bytes of a server.
pub const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// The first bytes of an option, and the second word of a server.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The first bytes of the reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The first bytes of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The first bytes of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// The first bytes of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The first bytes of a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// The first bytes of a chunk with an extended header.
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// Lengths of headers in bytes.
pub const REQUEST_LEN: usize = 28;
/// Of an extended request.
pub const EXTENDED_REQUEST_LEN: usize = 32;
/// Of a simple reply.
pub const SIMPLE_REPLY_LEN: usize = 16;
/// Of a chunk.
pub const CHUNK_LEN: usize = 20;
/// Of a chunk with an extended header.
pub const EXTENDED_CHUNK_LEN: usize = 32;
/// Of an option without its data.
pub const OPTION_LEN: usize = 16;
/// Of an option's reply without its data.
pub const OPTION_REPLY_LEN: usize = 20;

/// Handshake flags of both ends: fixed newstyle.
pub const FIXED_NEWSTYLE: u16 = 1;
/// Handshake flags of both ends: no 124 zeros after `EXPORT_NAME`.
pub const NO_ZEROES: u16 = 2;

/// The metadata context that every server knows, and its number on the wire here.
pub const ALLOCATION: &str = "base:allocation";
/// The id of [`ALLOCATION`] in replies.
pub const ALLOCATION_ID: u32 = 1;

/// Options of the negotiation.
pub mod option {
    /// Choose an export, without an answer but its size and flags.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Begin TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and begin with it.
    pub const GO: u32 = 7;
    /// Reply to requests in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use headers with lengths of 64 bits.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options.
pub mod reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// A piece of information on an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The option is not known.
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    /// The server does not want to.
    pub const ERR_POLICY: u32 = 0x8000_0002;
    /// The option's data are wrong.
    pub const ERR_INVALID: u32 = 0x8000_0003;
    /// TLS has to come first.
    pub const ERR_TLS_REQD: u32 = 0x8000_0005;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    /// The option's data are too long.
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
}

/// Pieces of information on an export.
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// The name.
    pub const NAME: u16 = 1;
    /// The description.
    pub const DESCRIPTION: u16 = 2;
    /// Lengths of requests.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Kinds of chunks.
pub mod chunk {
    /// It is the last chunk of its reply.
    pub const DONE: u16 = 1;
    /// Nothing but the header.
    pub const NONE: u16 = 0;
    /// Data and their offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeros: offset and length.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents with lengths of 32 bits.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents with lengths of 64 bits.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// An error.
    pub const ERROR: u16 = 0x8001;
    /// An error at an offset.
    pub const ERROR_OFFSET: u16 = 0x8002;
}

bitflags! {
    /// What an export can do.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct TransmissionFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// Writes are refused.
        const READ_ONLY = 1 << 1;
        /// FLUSH is known.
        const FLUSH = 1 << 2;
        /// The flag FUA is known.
        const FUA = 1 << 3;
        /// It behaves like a rotating disk.
        const ROTATIONAL = 1 << 4;
        /// TRIM is known.
        const TRIM = 1 << 5;
        /// `WRITE_ZEROES` is known.
        const WRITE_ZEROES = 1 << 6;
        /// The flag DF (do not fragment a reply) is known.
        const DF = 1 << 7;
        /// Several connections see each other's flushed writes.
        const MULTI_CONN = 1 << 8;
        /// RESIZE is known.
        const RESIZE = 1 << 9;
        /// CACHE is known.
        const CACHE = 1 << 10;
        /// The flag `FAST_ZERO` is known.
        const FAST_ZERO = 1 << 11;
        /// `BLOCK_STATUS` may carry a payload.
        const BLOCK_STATUS_PAYLOAD = 1 << 12;
        const _ = !0;
    }

    /// Flags of a request.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct CommandFlags: u16 {
        /// The data are on stable storage before the reply.
        const FUA = 1 << 0;
        /// `WRITE_ZEROES`: do not make a hole.
        const NO_HOLE = 1 << 1;
        /// READ: one chunk.
        const DF = 1 << 2;
        /// `BLOCK_STATUS`: one extent.
        const REQ_ONE = 1 << 3;
        /// `WRITE_ZEROES`: fail rather than be slow.
        const FAST_ZERO = 1 << 4;
        /// Extended headers: the length is that of a payload.
        const PAYLOAD_LEN = 1 << 5;
        const _ = !0;
    }
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Command {
    /// Read.
    Read,
    /// Write.
    Write,
    /// End the session; there is no reply.
    Disconnect,
    /// Everything that was written is on stable storage before the reply.
    Flush,
    /// Discard.
    Trim,
    /// Read ahead.
    Cache,
    /// Write zeros without a payload.
    WriteZeroes,
    /// Ask for extents.
    BlockStatus,
}

impl Command {
    /// Its number on the wire.
    #[must_use]
    pub fn number(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::Cache => 5,
            Self::WriteZeroes => 6,
            Self::BlockStatus => 7,
        }
    }

    /// The command of a number, if there is one.
    #[must_use]
    pub fn of(number: u16) -> Option<Self> {
        let all = [
            Self::Read,
            Self::Write,
            Self::Disconnect,
            Self::Flush,
            Self::Trim,
            Self::Cache,
            Self::WriteZeroes,
            Self::BlockStatus,
        ];
        all.get(usize::from(number)).copied()
    }
}

/// Errors on the wire.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Errno(pub u32);

impl Errno {
    /// Not permitted.
    pub const PERM: Self = Self(1);
    /// Input or output error.
    pub const IO: Self = Self(5);
    /// No memory.
    pub const NOMEM: Self = Self(12);
    /// Invalid argument.
    pub const INVAL: Self = Self(22);
    /// No space.
    pub const NOSPC: Self = Self(28);
    /// Value too large.
    pub const OVERFLOW: Self = Self(75);
    /// Not supported.
    pub const NOTSUP: Self = Self(95);
    /// The server is shutting down.
    pub const SHUTDOWN: Self = Self(108);

    /// The number that goes over the wire for an error of this system: one of the eight that the protocol
    /// knows.
    #[must_use]
    pub fn of_system(errno: i32) -> Self {
        match errno {
            1 | 13 | 30 => Self::PERM,
            12 => Self::NOMEM,
            22 | 33 => Self::INVAL,
            27 | 28 | 122 => Self::NOSPC,
            75 => Self::OVERFLOW,
            95 => Self::NOTSUP,
            108 => Self::SHUTDOWN,
            _ => Self::IO,
        }
    }
}

/// What a peer did that the protocol forbids. The connection ends.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ProtocolError {
    /// Other bytes than the protocol has there.
    #[error(
        "the peer sent {found:#x} in place of {what}: it does not speak NBD, or the stream is damaged"
    )]
    Magic {
        /// What should have come.
        what: &'static str,
        /// What came.
        found: u64,
    },
    /// The peer does not know fixed newstyle negotiation.
    #[error(
        "the peer speaks the old protocol without fixed newstyle negotiation, which is not supported"
    )]
    Oldstyle,
    /// Flags that were not offered.
    #[error("the client set handshake flags {0:#x}, which were not offered")]
    HandshakeFlags(u32),
    /// More than this end takes.
    #[error("the peer announced {length} bytes for {what}; at most {limit} are accepted")]
    TooLong {
        /// Of what.
        what: &'static str,
        /// How long.
        length: u64,
        /// The limit.
        limit: u64,
    },
    /// A reply that nobody waits for.
    #[error("the server replied to cookie {0:#x}, which no request has")]
    Cookie(u64),
    /// A reply or chunk that does not fit its request.
    #[error("the server's reply to cookie {cookie:#x} is wrong: {why}")]
    Reply {
        /// The request.
        cookie: u64,
        /// What is wrong.
        why: &'static str,
    },
    /// An answer in the negotiation that does not fit its option.
    #[error("the server's answer to option {option} is wrong: {why}")]
    Option {
        /// The option.
        option: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// The server refused an option that the session needs.
    #[error("the server refused the export \"{export}\" (error {code:#x}): {text}")]
    Refused {
        /// The export.
        export: String,
        /// The error of the reply.
        code: u32,
        /// What the server says.
        text: String,
    },
    /// The export chosen by an old client is not there.
    #[error("the client asked for the export \"{0}\", which does not exist")]
    UnknownExport(String),
    /// A message over queue pairs that is not as it has to be.
    #[error("the peer sent a message that is wrong: {why}")]
    Message {
        /// What is wrong.
        why: &'static str,
    },
    /// Bytes came after the session had ended.
    #[error("bytes came after the session had ended")]
    Ended,
}

/// A request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Request {
    /// Flags.
    pub flags: CommandFlags,
    /// The number of the command, which may be one that this end does not know.
    pub kind: u16,
    /// The client's name for the request.
    pub cookie: u64,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

impl Request {
    /// Appends the header to `out`. A compact header has 32 bits for the length: callers make no longer
    /// requests with it.
    pub fn encode(&self, extended: bool, out: &mut Vec<u8>) {
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        out.extend(magic.to_be_bytes());
        out.extend(self.flags.bits().to_be_bytes());
        out.extend(self.kind.to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
        out.extend(self.offset.to_be_bytes());
        if extended {
            out.extend(self.length.to_be_bytes());
        } else {
            out.extend((self.length as u32).to_be_bytes());
        }
    }

    /// Reads a header of the given kind.
    ///
    /// # Errors
    ///
    /// The magic number is another.
    ///
    /// # Panics
    ///
    /// `bytes` is shorter than the header.
    pub fn decode(bytes: &[u8], extended: bool) -> Result<Self, ProtocolError> {
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let found = u32_at(bytes, 0);
        if found != magic {
            return Err(ProtocolError::Magic { what: "a request", found: found.into() });
        }
        Ok(Self {
            flags: CommandFlags::from_bits_retain(u16_at(bytes, 4)),
            kind: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset: u64_at(bytes, 16),
            length: if extended { u64_at(bytes, 24) } else { u32_at(bytes, 24).into() },
        })
    }

    /// The length of a header.
    #[must_use]
    pub fn len(extended: bool) -> usize {
        if extended { EXTENDED_REQUEST_LEN } else { REQUEST_LEN }
    }
}

/// The header of a chunk of a structured reply.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Chunk {
    /// Flags: [`chunk::DONE`].
    pub flags: u16,
    /// The kind.
    pub kind: u16,
    /// The request.
    pub cookie: u64,
    /// The offset of the request; extended headers have it.
    pub offset: u64,
    /// How many bytes follow.
    pub length: u64,
}

impl Chunk {
    /// Appends the header to `out`.
    pub fn encode(&self, extended: bool, out: &mut Vec<u8>) {
        let magic = if extended { EXTENDED_CHUNK_MAGIC } else { CHUNK_MAGIC };
        out.extend(magic.to_be_bytes());
        out.extend(self.flags.to_be_bytes());
        out.extend(self.kind.to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
        if extended {
            out.extend(self.offset.to_be_bytes());
            out.extend(self.length.to_be_bytes());
        } else {
            out.extend((self.length as u32).to_be_bytes());
        }
    }

    /// Reads the header after its magic number was checked.
    ///
    /// # Panics
    ///
    /// `bytes` is shorter than the header.
    #[must_use]
    pub fn decode(bytes: &[u8], extended: bool) -> Self {
        let (offset, length) = if extended {
            (u64_at(bytes, 16), u64_at(bytes, 24))
        } else {
            (0, u32_at(bytes, 16).into())
        };
        Self {
            flags: u16_at(bytes, 4),
            kind: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset,
            length,
        }
    }

    /// Whether it is the last of its reply.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.flags & chunk::DONE != 0
    }

    /// The length of a header.
    #[must_use]
    pub fn len(extended: bool) -> usize {
        if extended { EXTENDED_CHUNK_LEN } else { CHUNK_LEN }
    }
}

/// Two bytes at a place. Callers have checked the length.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

/// Four bytes at a place. Callers have checked the length.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// Eight bytes at a place. Callers have checked the length.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
