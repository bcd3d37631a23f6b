//! Messages of the Sockets Direct Protocol (IBA volume 1, annex A4): the base header, the extended
//! header of each message, and Hello and HelloAck, which travel as private data of the connection's
//! REQ and REP.
//!
//! A message is one SEND: [`Header`] (16 bytes), an extended header that the message identifier (MID)
//! chooses, then payload. [`Message::parse`] reads all of it.

use std::net::IpAddr;

use crate::field::{array, exactly, need, put, u16_at, u32_at, u64_at};
use crate::{Stag, WireError};

/// Bytes of the base header (BSDH).
pub const HEADER_LEN: usize = 16;
/// Bytes of a Hello: all private data of a REQ.
pub const HELLO_LEN: usize = 92;
/// Bytes of a HelloAck: all private data of a REP.
pub const HELLO_ACK_LEN: usize = 196;
/// Most bytes that both headers of a message take together.
pub const MAX_HEADERS_LEN: usize = HEADER_LEN + 20;
/// The port space of SDP in connection management: a service ID is this << 16 + port.
pub const PORT_SPACE: u16 = 0x0001;
/// The version that this crate writes: major 2, minor 2, as OFED has it.
pub const VERSION: u8 = 0x22;

const MID_HELLO: u8 = 0x00;
const MID_HELLO_ACK: u8 = 0x01;

/// Flags of the base header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// The last byte of the payload is urgent (`OOB_PRES`; Data only, CA4-7).
    pub urgent_present: bool,
    /// An urgent byte is on its way (`OOB_PEND`).
    pub urgent_pending: bool,
    /// The sink would like pipelined mode (`REQ_PIPE`, CA4-8).
    pub wants_pipelined: bool,
}

impl Flags {
    const fn from_code(code: u8) -> Self {
        Self {
            urgent_present: code & 1 != 0,
            urgent_pending: code & 2 != 0,
            wants_pipelined: code & 4 != 0,
        }
    }

    const fn code(self) -> u8 {
        self.urgent_present as u8
            | (self.urgent_pending as u8) << 1
            | (self.wants_pipelined as u8) << 2
    }
}

/// The fields of the base header (BSDH) that every message has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Flags.
    pub flags: Flags,
    /// Receive buffers that the sender has posted now.
    pub bufs: u16,
    /// Number of this message; the first one after the Hello is 1.
    pub mseq: u32,
    /// Number of the last message that the sender has received.
    pub mseq_ack: u32,
}

/// Memory of one end that the other may read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes.
    pub len: u32,
    /// The key for it.
    pub rkey: Stag,
    /// Address of the first byte.
    pub addr: u64,
}

impl Memory {
    fn parse(bytes: &[u8]) -> Self {
        let (len, rkey) = (u32_at(bytes, 0), Stag(u32_at(bytes, 4)));
        Self { len, rkey, addr: u64_at(bytes, 8) }
    }

    fn emit(self, out: &mut [u8]) {
        put(out, 0, self.len.to_be_bytes());
        put(out, 4, self.rkey.0.to_be_bytes());
        put(out, 8, self.addr.to_be_bytes());
    }
}

/// How a direction of a connection moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Through receive buffers only.
    Buffered,
    /// Through receive buffers, or from one advertised buffer of the source.
    Combined,
    /// From and to several advertised buffers.
    Pipelined,
}

/// What a message says, with the extended header of its MID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// No more data follow from the sender.
    Disconnect,
    /// The connection is reset.
    Abort,
    /// Sink: send the rest of the source's buffer by Data.
    SendSm,
    /// Source: so many bytes were written into the oldest advertised buffer of the sink.
    WriteComplete(u32),
    /// Sink: so many bytes were read since the last report.
    ReadComplete(u32),
    /// The receiver must change the mode of a direction.
    ModeChange {
        /// Whether the direction is that in which the receiver of this message sends.
        of_receiver: bool,
        /// The mode from now on.
        mode: Mode,
    },
    /// Source: takes its advertisement back.
    SourceCancel,
    /// Sink: takes its advertisements back.
    SinkCancel,
    /// Source: agrees to [`Body::SinkCancel`].
    SinkCancelAck,
    /// Wishes that the peer posts receive buffers of this size.
    ChangeReceiveBuffers(u32),
    /// The size that the sender's receive buffers have from now on.
    ChangeReceiveBuffersAck(u32),
    /// The connection moves to another process, which has this service ID.
    Suspend(u64),
    /// Agrees to [`Body::Suspend`].
    SuspendAck,
    /// Sink: offers a buffer to write to.
    SinkAvail {
        /// The buffer.
        memory: Memory,
        /// Messages with payload that the sink has received so far: the offer is stale if more were sent.
        non_discards: u32,
    },
    /// Source: offers a buffer to read from. The payload is its beginning in combined mode.
    SrcAvail(Memory),
    /// Payload alone; without any, a credit update.
    Data,
}

impl Body {
    /// The message identifier.
    pub const fn mid(&self) -> u8 {
        match self {
            Self::Disconnect => 0x02,
            Self::Abort => 0x03,
            Self::SendSm => 0x04,
            Self::WriteComplete(_) => 0x05,
            Self::ReadComplete(_) => 0x06,
            Self::ModeChange { .. } => 0x07,
            Self::SourceCancel => 0x08,
            Self::SinkCancel => 0x09,
            Self::SinkCancelAck => 0x0a,
            Self::ChangeReceiveBuffers(_) => 0x0b,
            Self::ChangeReceiveBuffersAck(_) => 0x0c,
            Self::Suspend(_) => 0x0d,
            Self::SuspendAck => 0x0e,
            Self::SinkAvail { .. } => 0xfd,
            Self::SrcAvail(_) => 0xfe,
            Self::Data => 0xff,
        }
    }

    /// Bytes of the base header and the extended header.
    pub const fn headers_len(&self) -> usize {
        HEADER_LEN
            + match self {
                Self::WriteComplete(_) | Self::ReadComplete(_) | Self::ModeChange { .. } => 4,
                Self::ChangeReceiveBuffers(_) | Self::ChangeReceiveBuffersAck(_) => 4,
                Self::Suspend(_) => 8,
                Self::SinkAvail { .. } => 20,
                Self::SrcAvail(_) => 16,
                _ => 0,
            }
    }

    /// Whether payload may follow.
    pub const fn takes_payload(&self) -> bool {
        matches!(self, Self::Data | Self::SrcAvail(_) | Self::SinkAvail { .. })
    }

    fn parse(mid: u8, rest: &[u8]) -> Result<Self, WireError> {
        let word = || need(rest, 4).map(|()| u32_at(rest, 0));
        Ok(match mid {
            0x02 => Self::Disconnect,
            0x03 => Self::Abort,
            0x04 => Self::SendSm,
            0x05 => Self::WriteComplete(word()?),
            0x06 => Self::ReadComplete(word()?),
            0x07 => {
                let flags = (word()? >> 24) as u8;
                Self::ModeChange { of_receiver: flags & 0x80 != 0, mode: mode(flags)? }
            }
            0x08 => Self::SourceCancel,
            0x09 => Self::SinkCancel,
            0x0a => Self::SinkCancelAck,
            0x0b => Self::ChangeReceiveBuffers(word()?),
            0x0c => Self::ChangeReceiveBuffersAck(word()?),
            0x0d => Self::Suspend(need(rest, 8).map(|()| u64_at(rest, 0))?),
            0x0e => Self::SuspendAck,
            0xfd => {
                need(rest, 20)?;
                Self::SinkAvail { memory: Memory::parse(rest), non_discards: u32_at(rest, 16) }
            }
            0xfe => Self::SrcAvail(need(rest, 16).map(|()| Memory::parse(rest))?),
            0xff => Self::Data,
            _ => return Err(WireError::OutOfRange("MID")),
        })
    }

    fn emit(&self, out: &mut [u8]) {
        match *self {
            Self::WriteComplete(word)
            | Self::ReadComplete(word)
            | Self::ChangeReceiveBuffers(word)
            | Self::ChangeReceiveBuffersAck(word) => put(out, 0, word.to_be_bytes()),
            Self::ModeChange { of_receiver, mode } => {
                let code = match mode {
                    Mode::Buffered => 0,
                    Mode::Combined => 1 << 4,
                    Mode::Pipelined => 2 << 4,
                };
                put(out, 0, [u8::from(of_receiver) << 7 | code, 0, 0, 0]);
            }
            Self::Suspend(service) => put(out, 0, service.to_be_bytes()),
            Self::SinkAvail { memory, non_discards } => {
                memory.emit(out);
                put(out, 16, non_discards.to_be_bytes());
            }
            Self::SrcAvail(memory) => memory.emit(out),
            _ => {}
        }
    }
}

fn mode(flags: u8) -> Result<Mode, WireError> {
    match flags >> 4 & 7 {
        0 => Ok(Mode::Buffered),
        1 => Ok(Mode::Combined),
        2 => Ok(Mode::Pipelined),
        _ => Err(WireError::OutOfRange("mode")),
    }
}

/// A message as it lies in a receive buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// The base header.
    pub header: Header,
    /// What it says.
    pub body: Body,
    /// What follows the headers; empty unless [`Body::takes_payload`].
    pub payload: &'a [u8],
}

impl<'a> Message<'a> {
    /// Reads a message. `bytes` are those of one SEND.
    ///
    /// # Errors
    ///
    /// As [`Head::parse`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let Head { header, body, .. } = Head::parse(bytes, bytes.len())?;
        Ok(Self { header, body, payload: &bytes[body.headers_len()..] })
    }
}

/// The headers of a message, for a reader that leaves the payload where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The base header.
    pub header: Header,
    /// What it says.
    pub body: Body,
    /// Bytes of payload after the headers.
    pub payload_len: usize,
}

impl Head {
    /// Reads the headers of a message of `len` bytes, which begins with `bytes`: all of it, or at least
    /// [`MAX_HEADERS_LEN`].
    ///
    /// # Errors
    ///
    /// The length field is not that of the SEND, the MID is unknown, the extended header is not whole, an
    /// urgent byte is announced in a message that has none, or payload follows where none may.
    pub fn parse(bytes: &[u8], len: usize) -> Result<Self, WireError> {
        need(bytes, HEADER_LEN)?;
        if u32_at(bytes, 4) as usize != len {
            return Err(WireError::BadLength { need: u32_at(bytes, 4) as usize, have: len });
        }
        let body = Body::parse(bytes[0], &bytes[HEADER_LEN..])?;
        let header = Header {
            flags: Flags::from_code(bytes[1]),
            bufs: u16_at(bytes, 2),
            mseq: u32_at(bytes, 8),
            mseq_ack: u32_at(bytes, 12),
        };
        let payload_len = len - body.headers_len();
        if payload_len > 0 && !body.takes_payload() {
            return Err(WireError::OutOfRange("Len"));
        }
        if header.flags.urgent_present && (payload_len == 0 || body != Body::Data) {
            return Err(WireError::OutOfRange("OOB_PRES"));
        }
        Ok(Self { header, body, payload_len })
    }
}

/// Writes the headers of a message that has `payload` bytes after them to the front of `out`; how many
/// bytes they take.
///
/// # Panics
///
/// If `out` is shorter than [`Body::headers_len`].
pub fn emit_headers(header: &Header, body: &Body, payload: u32, out: &mut [u8]) -> usize {
    let len = body.headers_len();
    put(out, 0, [body.mid(), header.flags.code()]);
    put(out, 2, header.bufs.to_be_bytes());
    put(out, 4, (len as u32).saturating_add(payload).to_be_bytes());
    put(out, 8, header.mseq.to_be_bytes());
    put(out, 12, header.mseq_ack.to_be_bytes());
    body.emit(&mut out[HEADER_LEN..]);
    len
}

/// Hello: asks for a connection (the HH header).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Receive buffers that are posted.
    pub bufs: u16,
    /// Major version in the upper half, minor in the lower.
    pub version: u8,
    /// Whether the sender knows SENDs with invalidation.
    pub can_invalidate: bool,
    /// Advertised buffers that it takes at a time in each direction; at least 1.
    pub max_adverts: u8,
    /// The size that the peer's receive buffers should have.
    pub wanted_peer_size: u32,
    /// The size of its own receive buffers.
    pub local_size: u32,
    /// Its port.
    pub port: u16,
    /// Its address, of the same family as `destination`.
    pub source: IpAddr,
    /// Where it connects to.
    pub destination: IpAddr,
}

impl Hello {
    /// Reads the private data of a REQ.
    ///
    /// # Errors
    ///
    /// Not all of 92 bytes, another message, another major version than 2, no advertisement allowed, receive
    /// buffers too small for a header, or no IP address.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        check_private(bytes, HELLO_LEN, MID_HELLO)?;
        if bytes[19] == 0 {
            return Err(WireError::OutOfRange("MaxAdverts"));
        }
        let address = |at: usize| match bytes[17] >> 4 {
            4 => Ok(IpAddr::from(array::<4>(bytes, at + 12))),
            6 => Ok(IpAddr::from(array::<16>(bytes, at))),
            version => Err(WireError::IpVersion(version)),
        };
        Ok(Self {
            bufs: u16_at(bytes, 2),
            version: bytes[16],
            can_invalidate: bytes[17] & 1 != 0,
            max_adverts: bytes[19],
            wanted_peer_size: u32_at(bytes, 20),
            local_size: size(u32_at(bytes, 24), "LocalRcvSz")?,
            port: u16_at(bytes, 28),
            source: address(32)?,
            destination: address(48)?,
        })
    }

    /// The private data of the REQ. An IPv4 source with an IPv6 destination is mapped into IPv6, and the
    /// reverse.
    pub fn to_bytes(&self) -> [u8; HELLO_LEN] {
        let mut out = private(MID_HELLO, self.bufs);
        let is_v4 = self.source.is_ipv4() && self.destination.is_ipv4();
        let version = if is_v4 { 0x40 } else { 0x60 };
        put(&mut out, 16, [self.version, version | u8::from(self.can_invalidate), 0]);
        put(&mut out, 19, [self.max_adverts]);
        put(&mut out, 20, self.wanted_peer_size.to_be_bytes());
        put(&mut out, 24, self.local_size.to_be_bytes());
        put(&mut out, 28, self.port.to_be_bytes());
        for (at, address) in [(32, self.source), (48, self.destination)] {
            match address {
                IpAddr::V4(v4) if is_v4 => put(&mut out, at + 12, v4.octets()),
                IpAddr::V4(v4) => put(&mut out, at, v4.to_ipv6_mapped().octets()),
                IpAddr::V6(v6) => put(&mut out, at, v6.octets()),
            }
        }
        out
    }
}

/// HelloAck: accepts a connection (the HAH header).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloAck {
    /// Receive buffers that are posted.
    pub bufs: u16,
    /// Major version in the upper half, minor in the lower.
    pub version: u8,
    /// The size of the sender's receive buffers.
    pub size: u32,
}

impl HelloAck {
    /// Reads the private data of a REP.
    ///
    /// # Errors
    ///
    /// Not all of 196 bytes, another message, another major version than 2, or receive buffers too small for
    /// a header.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        check_private(bytes, HELLO_ACK_LEN, MID_HELLO_ACK)?;
        let size = size(u32_at(bytes, 20), "ActRcvSz")?;
        Ok(Self { bufs: u16_at(bytes, 2), version: bytes[16], size })
    }

    /// The private data of the REP.
    pub fn to_bytes(&self) -> [u8; HELLO_ACK_LEN] {
        let mut out = private(MID_HELLO_ACK, self.bufs);
        put(&mut out, 16, [self.version]);
        put(&mut out, 20, self.size.to_be_bytes());
        out
    }
}

/// Private data with the base header of a first message, of which `len` bytes are all.
fn private<const N: usize>(mid: u8, bufs: u16) -> [u8; N] {
    let mut out = [0; N];
    out[0] = mid;
    put(&mut out, 2, bufs.to_be_bytes());
    put(&mut out, 4, (N as u32).to_be_bytes());
    out
}

fn check_private(bytes: &[u8], len: usize, mid: u8) -> Result<(), WireError> {
    exactly(bytes, len)?;
    if u32_at(bytes, 4) as usize != len {
        return Err(WireError::OutOfRange("Len"));
    }
    if bytes[0] != mid {
        return Err(WireError::OutOfRange("MID"));
    }
    if bytes[16] >> 4 != VERSION >> 4 {
        return Err(WireError::HelloVersion(bytes[16]));
    }
    Ok(())
}

/// A size of receive buffers, in which at least a message of one byte must have room.
fn size(size: u32, name: &'static str) -> Result<u32, WireError> {
    if size as usize > MAX_HEADERS_LEN { Ok(size) } else { Err(WireError::OutOfRange(name)) }
}
