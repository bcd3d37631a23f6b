//! Work requests, and what becomes of them.

use std::net::SocketAddr;

use quipu_mem::{Access, Sge};

use super::{AhId, MrId, MwId, QpNum, Source};

bitflags::bitflags! {
    /// Flags of a send: the values of `ibv_send_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SendFlags: u32 {
        /// Wait for all earlier reads and atomics of this queue pair.
        const FENCE = 1;
        /// Complete with a completion.
        const SIGNALED = 2;
        /// Raise the peer's solicited event.
        const SOLICITED = 4;
        /// The payload was copied at posting time.
        const INLINE = 8;
    }
}

/// What a send work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// Into a receive of the peer.
    Send,
    /// The same, with 32 bits of immediate data (host order of the caller's choosing: carried as is).
    SendImm(u32),
    /// The same, invalidating a key of the peer.
    SendInv(u32),
    /// Into the peer's memory.
    Write {
        /// Address in the peer's region.
        addr: u64,
        /// The peer's key.
        rkey: u32,
    },
    /// The same, consuming a receive of the peer.
    WriteImm {
        /// Address in the peer's region.
        addr: u64,
        /// The peer's key.
        rkey: u32,
        /// Immediate data.
        imm: u32,
    },
    /// 8 bytes into the peer's memory, in one piece (`IBV_WR_ATOMIC_WRITE`).
    AtomicWrite {
        /// Address in the peer's region, 8-byte aligned.
        addr: u64,
        /// The peer's key.
        rkey: u32,
    },
    /// Out of the peer's memory.
    Read {
        /// Address in the peer's region.
        addr: u64,
        /// The peer's key.
        rkey: u32,
    },
    /// 64-bit compare and swap in the peer's memory; the original value comes back.
    CompareSwap {
        /// Address in the peer's region, 8-byte aligned.
        addr: u64,
        /// The peer's key.
        rkey: u32,
        /// Value to compare with.
        compare: u64,
        /// Value to store if equal.
        swap: u64,
    },
    /// 64-bit fetch and add in the peer's memory; the original value comes back.
    FetchAdd {
        /// Address in the peer's region, 8-byte aligned.
        addr: u64,
        /// The peer's key.
        rkey: u32,
        /// Value to add.
        add: u64,
    },
    /// Have what was written before be where others find it (`ibv_wr_flush`).
    Flush(Flush),
    /// Invalidate a key of one's own (a type 2 window).
    LocalInv {
        /// The key.
        key: u32,
    },
    /// Bind a memory window.
    BindMw(BindMw),
}

bitflags::bitflags! {
    /// Where a flush has what was written be: the values of `ibv_placement_type`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Placement: u8 {
        /// Where all of the peer's host sees it.
        const GLOBAL = 1;
        /// Where it outlives a loss of power. No memory here does: peers refuse it.
        const PERSISTENT = 2;
    }
}

/// What a flush is about (IBA A19.4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flush {
    /// Address in the peer's region.
    pub addr: u64,
    /// The peer's key.
    pub rkey: u32,
    /// Bytes from there on.
    pub len: u64,
    /// All of the region instead (`IBV_FLUSH_MR`).
    pub whole: bool,
    /// Not empty.
    pub placement: Placement,
}

impl Flush {
    /// The levels of `ibv_selectivity_level`.
    const RANGE: u8 = 0;
    const REGION: u8 = 1;

    /// With placement and level as numbers; `None` if they mean nothing.
    #[must_use]
    pub fn of(addr: u64, rkey: u32, len: u64, placement: u8, level: u8) -> Option<Self> {
        let placement =
            Placement::from_bits(placement).filter(|placement| !placement.is_empty())?;
        let whole = match level {
            Self::RANGE => false,
            Self::REGION => true,
            _ => return None,
        };
        Some(Self { addr, rkey, len, whole, placement })
    }

    /// The level as a number.
    pub(crate) fn level(self) -> u8 {
        if self.whole { Self::REGION } else { Self::RANGE }
    }

    /// The range; `None` if all of the region is meant.
    pub(crate) fn range(self) -> Option<(u64, u64)> {
        (!self.whole).then_some((self.addr, self.len))
    }
}

/// The binding of a memory window to a range of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindMw {
    /// The window.
    pub mw: MwId,
    /// The key that the window has afterwards.
    pub rkey: u32,
    /// The region. Not looked at if `len` is 0.
    pub mr: MrId,
    /// First byte, as an address of the region.
    pub addr: u64,
    /// Length in bytes, 0 to unbind.
    pub len: u64,
    /// Rights granted.
    pub access: Access,
}

/// Where the bytes of a send come from.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Registered memory, read while the request is in progress (for reads and atomics: written).
    Sges(&'a [Sge]),
    /// Bytes copied now.
    Inline(&'a [u8]),
}

impl Payload<'_> {
    /// Its bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Sges(sges) => quipu_mem::list_len(sges),
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }
}

/// Whom a send work request addresses, beyond what its queue pair is connected to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum To {
    /// The connected peer.
    #[default]
    Peer,
    /// A shared receive queue of the connected peer, by its number of 24 bits (XRC).
    Srq(u32),
    /// Whomever it names (datagrams).
    Datagram {
        /// The address, in the same protection domain as the queue pair.
        ah: AhId,
        /// The queue pair there, 24 bits.
        qpn: u32,
        /// Its Q_Key; with the uppermost bit set, the own one.
        qkey: u32,
    },
    /// Anyone who is at that address and port (UDP).
    Address(SocketAddr),
}

/// A send work request.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Handed back in the completion.
    pub wr_id: u64,
    /// Whom it addresses.
    pub to: To,
    /// What to do.
    pub op: SendOp,
    /// How.
    pub flags: SendFlags,
    /// With which bytes.
    pub payload: Payload<'a>,
}

/// Status of a completion: the values of `ibv_wc_status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WcStatus {
    /// Done.
    #[default]
    Success = 0,
    /// A receive was too small, or a request too long.
    LocLenErr = 1,
    /// The adapter failed.
    LocQpOpErr = 2,
    /// Local EE context error; not generated.
    LocEecOpErr = 3,
    /// A local key, range or right was wrong.
    LocProtErr = 4,
    /// Flushed when the queue pair went to error.
    WrFlushErr = 5,
    /// A window could not be bound.
    MwBindErr = 6,
    /// The peer answered nonsense.
    BadRespErr = 7,
    /// Invalid local access during a remote operation.
    LocAccessErr = 8,
    /// The peer refused the request as invalid.
    RemInvReqErr = 9,
    /// The peer refused the key, range or right.
    RemAccessErr = 10,
    /// The peer failed while it served the request.
    RemOpErr = 11,
    /// The peer did not acknowledge.
    RetryExcErr = 12,
    /// The peer had no receive for too long.
    RnrRetryExcErr = 13,
    /// A reliable datagram broke its domain; not generated, as those below but for plans of faults.
    LocRddViolErr = 14,
    /// A reliable datagram's read was invalid.
    RemInvRdReqErr = 15,
    /// The peer aborted.
    RemAbortErr = 16,
    /// A reliable datagram's context number was invalid.
    InvEecnErr = 17,
    /// A reliable datagram's context was in another state.
    InvEecStateErr = 18,
    /// Fatal.
    FatalErr = 19,
    /// No answer.
    RespTimeoutErr = 20,
    /// Anything else.
    GeneralErr = 21,
    /// A tag matching error.
    TmErr = 22,
    /// A tag matching rendezvous that software must complete.
    TmRndvIncomplete = 23,
}

/// What completed: the values of `ibv_wc_opcode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WcOpcode {
    /// A send.
    #[default]
    Send = 0,
    /// A write.
    RdmaWrite = 1,
    /// A read.
    RdmaRead = 2,
    /// A compare and swap.
    CompSwap = 3,
    /// A fetch and add.
    FetchAdd = 4,
    /// A window bound.
    BindMw = 5,
    /// A key invalidated.
    LocalInv = 6,
    /// A flush.
    Flush = 8,
    /// An atomic write.
    AtomicWrite = 9,
    /// A receive.
    Recv = 128,
    /// A receive consumed by a write with immediate data.
    RecvRdmaWithImm = 129,
}

impl WcOpcode {
    /// Whether it is of a receive.
    pub(crate) fn is_receive(self) -> bool {
        matches!(self, Self::Recv | Self::RecvRdmaWithImm)
    }
}

/// What a completion tells in addition to its bytes, mostly what came with a received message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WcExtra {
    /// Nothing.
    #[default]
    None,
    /// Immediate data, as the peer gave it.
    Imm(u32),
    /// The key that the peer invalidated.
    Invalidated(u32),
    /// Who sent the datagram (UDP).
    From(Source),
    /// Of a send that failed: its place among all that were posted to the queue pair, counted, wrapping.
    /// What was posted before it and completes only if signalled is done.
    Place(u32),
}

/// A completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// From the work request.
    pub wr_id: u64,
    /// How it went.
    pub status: WcStatus,
    /// What it was; meaningless unless the status is success.
    pub opcode: WcOpcode,
    /// What came with it.
    pub extra: WcExtra,
    /// Bytes received, read or swapped.
    pub byte_len: u32,
    /// The own queue pair.
    pub qp_num: QpNum,
    /// The peer's queue pair.
    pub src_qp: QpNum,
    /// Whether 40 bytes of route header stand in front of what was received (datagrams).
    pub grh: bool,
    /// Service level; of a datagram on Ethernet, the kind of route header: 9 for IPv6, 10 for IPv4. Adapters
    /// of RoCE v2 say it so, and UCX tells them apart by it.
    pub sl: u8,
    /// The LID of a datagram's sender, on a port of InfiniBand.
    pub slid: u16,
}
