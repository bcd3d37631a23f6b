//! Quipu's private data in MPA start-up: who wants to speak with whom, and how
//! (`specs/quipu-wire.md` 2).

use crate::WireError;
use crate::field::{array, need, put, u32_at};

/// The only version so far.
pub const VERSION: u8 = 1;
/// Length of a hello on the wire. With the four bytes of RFC 6581 it stays far below the 256 bytes
/// that some adapters allow.
pub const LEN: usize = 64;

const MAGIC: &[u8; 4] = b"QUIP";
const KIND_REQUEST: u8 = 1;
const KIND_ACCEPT: u8 = 2;
const KIND_REJECT: u8 = 3;
const MAX_24_BIT: u32 = 0x00ff_ffff;

/// Features offered or agreed on, a set of bits. What both ends offered is agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u32);

impl Features {
    /// Opcodes 0xC, 0xD and 0xF: Send with immediate data, acknowledgement, receiver not ready.
    pub const QUIPU: Features = Features(1 << 0);
    /// Opcodes 0x8 to 0xB of RFC 7306: immediate data and atomics.
    pub const RFC7306: Features = Features(1 << 1);
    /// Opcode 0xE: Flush.
    pub const FLUSH: Features = Features(1 << 2);
    /// All that this build offers.
    pub const ALL: Features = Features(Self::QUIPU.0 | Self::RFC7306.0 | Self::FLUSH.0);

    /// Whether every feature of `other` is in this set.
    pub const fn contains(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    /// The features in either set.
    pub const fn with(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }

    /// The features in both sets.
    pub const fn both(self, other: Features) -> Features {
        Features(self.0 & other.0)
    }
}

/// Why a responder refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// 1: the queue pair exists but is not yet ready to receive; try again.
    NotReady,
    /// 2: the queue pair is connected to, or expects, somebody else (QPN, GID or PSN differ).
    Mismatch,
    /// 3: there is no such queue pair.
    NoSuchQp,
    /// 4: no resources for one more connection now.
    Busy,
    /// 5: the responder does not speak this version of the hello.
    VersionUnsupported,
    /// A reason that a later version defined.
    Other(u8),
}

impl Reason {
    const fn code(self) -> u8 {
        match self {
            Reason::NotReady => 1,
            Reason::Mismatch => 2,
            Reason::NoSuchQp => 3,
            Reason::Busy => 4,
            Reason::VersionUnsupported => 5,
            Reason::Other(code) => code,
        }
    }

    const fn from_code(code: u8) -> Self {
        match code {
            1 => Reason::NotReady,
            2 => Reason::Mismatch,
            3 => Reason::NoSuchQp,
            4 => Reason::Busy,
            5 => Reason::VersionUnsupported,
            other => Reason::Other(other),
        }
    }
}

/// What a hello is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// In an MPA request.
    Request,
    /// In an MPA reply that accepts.
    Accept,
    /// In an MPA reply that rejects.
    Reject(Reason),
}

/// The transport service of the sender's queue pair, and the end of the connection that it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Service {
    /// 0: reliable connected.
    #[default]
    Rc,
    /// 1: unreliable connected.
    Uc,
    /// 2: the requester of an extended reliable connection.
    XrcRequester,
    /// 3: the responder of one.
    XrcResponder,
    /// A service that a later version defined.
    Other(u8),
}

impl Service {
    const fn code(self) -> u8 {
        match self {
            Service::Rc => 0,
            Service::Uc => 1,
            Service::XrcRequester => 2,
            Service::XrcResponder => 3,
            Service::Other(code) => code,
        }
    }

    const fn from_code(code: u8) -> Self {
        match code {
            0 => Service::Rc,
            1 => Service::Uc,
            2 => Service::XrcRequester,
            3 => Service::XrcResponder,
            other => Service::Other(other),
        }
    }

    /// What the other end of the connection must be.
    #[must_use]
    pub const fn counterpart(self) -> Self {
        match self {
            Service::XrcRequester => Service::XrcResponder,
            Service::XrcResponder => Service::XrcRequester,
            same => same,
        }
    }
}

/// The hello. Source and destination are meant from its sender, so that a reply has them exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Request, acceptance or refusal.
    pub kind: Kind,
    /// Path MTU code as in verbs, 1 (256 B) to 5 (4096 B); 0 if the sender has none.
    pub path_mtu: u8,
    /// Offered in a request, agreed on in an acceptance.
    pub features: Features,
    /// Queue pair number at the receiver of the hello, 24 bits.
    pub dest_qpn: u32,
    /// Queue pair number at its sender, 24 bits.
    pub source_qpn: u32,
    /// First PSN that the sender expects to receive, 24 bits.
    pub rq_psn: u32,
    /// First PSN that the sender would send, 24 bits.
    pub sq_psn: u32,
    /// Service of the sender's queue pair; without meaning in a refusal.
    pub service: Service,
    /// GID of the sender.
    pub source_gid: [u8; 16],
    /// GID of the receiver.
    pub dest_gid: [u8; 16],
}

impl Hello {
    /// Whether `private_data` begin as a hello of any version: otherwise the peer is a plain iWARP
    /// adapter.
    pub fn is_hello(private_data: &[u8]) -> bool {
        private_data.starts_with(MAGIC)
    }

    /// Reads a hello from private data (without the four bytes of RFC 6581). Bytes behind the 64
    /// and reserved fields are ignored.
    ///
    /// A hello of another version gives [`WireError::HelloVersion`], to be answered with
    /// [`Reason::VersionUnsupported`].
    pub fn parse(private_data: &[u8]) -> Result<Self, WireError> {
        if !Self::is_hello(private_data) {
            return Err(WireError::NotHello);
        }
        need(private_data, LEN)?;
        let bytes: [u8; LEN] = array(private_data, 0);
        if bytes[4] != VERSION {
            return Err(WireError::HelloVersion(bytes[4]));
        }
        let kind = match bytes[5] {
            KIND_REQUEST => Kind::Request,
            KIND_ACCEPT => Kind::Accept,
            KIND_REJECT => Kind::Reject(Reason::from_code(bytes[6])),
            _ => return Err(WireError::OutOfRange("kind")),
        };
        if bytes[7] > 5 {
            return Err(WireError::OutOfRange("path_mtu"));
        }
        let low24 = |at: usize, name: &'static str| match u32_at(&bytes, at) {
            value if value <= MAX_24_BIT => Ok(value),
            _ => Err(WireError::OutOfRange(name)),
        };
        Ok(Hello {
            kind,
            path_mtu: bytes[7],
            features: Features(u32_at(&bytes, 8)),
            dest_qpn: low24(12, "dest_qpn")?,
            source_qpn: low24(16, "source_qpn")?,
            rq_psn: low24(20, "rq_psn")?,
            sq_psn: low24(24, "sq_psn")?,
            service: Service::from_code(bytes[28]),
            source_gid: array(&bytes, 32),
            dest_gid: array(&bytes, 48),
        })
    }

    /// The hello as private data. Numbers of 24 bits are cut to them.
    pub fn to_bytes(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        put(&mut out, 0, *MAGIC);
        let (kind, reason) = match self.kind {
            Kind::Request => (KIND_REQUEST, 0),
            Kind::Accept => (KIND_ACCEPT, 0),
            Kind::Reject(reason) => (KIND_REJECT, reason.code()),
        };
        put(&mut out, 4, [VERSION, kind, reason, self.path_mtu]);
        put(&mut out, 8, self.features.0.to_be_bytes());
        put(&mut out, 12, (self.dest_qpn & MAX_24_BIT).to_be_bytes());
        put(&mut out, 16, (self.source_qpn & MAX_24_BIT).to_be_bytes());
        put(&mut out, 20, (self.rq_psn & MAX_24_BIT).to_be_bytes());
        put(&mut out, 24, (self.sq_psn & MAX_24_BIT).to_be_bytes());
        put(&mut out, 28, [self.service.code()]);
        put(&mut out, 32, self.source_gid);
        put(&mut out, 48, self.dest_gid);
        out
    }

    /// The answer to this hello: ends exchanged, with `kind` and the sender's own values; its service is
    /// the one that fits.
    pub fn answer(&self, kind: Kind, features: Features, rq_psn: u32, sq_psn: u32) -> Hello {
        Hello {
            kind,
            path_mtu: self.path_mtu,
            features: self.features.both(features),
            dest_qpn: self.source_qpn,
            source_qpn: self.dest_qpn,
            rq_psn,
            sq_psn,
            service: self.service.counterpart(),
            source_gid: self.dest_gid,
            dest_gid: self.source_gid,
        }
    }
}
