//! The words of the adapter: identifiers, work requests, completions, attributes.
//!
//! They carry InfiniBand's meanings (IBA volume 1, chapters 10 and 11) and the numeric values of the
//! verbs interface where there are any, so that a C facade maps them without tables.

mod work;

use std::net::{IpAddr, Ipv6Addr};

pub use quipu_mem::{Access, Sge};

pub use self::work::{
    BindMw, Completion, Flush, Payload, Placement, SendFlags, SendOp, SendWr, To, WcExtra,
    WcOpcode, WcStatus,
};
pub use crate::qpip::Source;

/// A point in time: nanoseconds since an origin that the world (host or simulator) chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// No time that comes.
    pub const NEVER: Self = Self(u64::MAX);

    /// The time `ns` nanoseconds later, saturating.
    #[must_use]
    pub const fn after(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }

    /// Nanoseconds from `earlier` to `self`, 0 if `earlier` lies later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// What a call that most often needs no time takes it from, if it does.
pub trait TimeSource {
    /// The time now; if it need not be `exact`, that of the last reading will do.
    fn time(self, exact: bool) -> Time;
}

/// A time that was read before.
impl TimeSource for Time {
    #[inline(always)]
    fn time(self, _exact: bool) -> Time {
        self
    }
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        ///
        /// An opaque handle: the index of a slot and its generation, so that a stale one is noticed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// Names nothing.
            pub const NONE: Self = Self(0);
        }

        impl crate::slab::Key for $name {
            fn from_bits(bits: u64) -> Self { Self(bits) }
            fn bits(self) -> u64 { self.0 }
        }
    )*};
}

ids! {
    /// A protection domain.
    PdId,
    /// A registered memory region.
    MrId,
    /// A memory window.
    MwId,
    /// A completion channel.
    ChannelId,
    /// A completion queue.
    CqId,
    /// A shared receive queue.
    SrqId,
    /// An XRC domain.
    XrcdId,
    /// A queue pair.
    QpId,
    /// A flow rule.
    FlowId,
    /// An indirection table of receive work queues.
    TableId,
    /// Counters of what flow rules match.
    CountersId,
    /// A connection in the making or made: one byte stream, or one channel of a link.
    ConnId,
    /// A same-host link to another engine.
    LinkId,
}

/// An address handle; an opaque handle too, of half the size: verbs programs see it as 32 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AhId(pub u32);

impl crate::slab::Key for AhId {
    const GENERATIONS: u32 = 0xffff;
    fn from_bits(bits: u64) -> Self {
        Self(((bits >> 32) as u32) << 16 | (bits as u32 & 0xffff))
    }
    fn bits(self) -> u64 {
        u64::from(self.0 >> 16) << 32 | u64::from(self.0 & 0xffff)
    }
}

/// A queue pair number, 24 bits: TCP port << 8 | index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QpNum(pub u32);

impl QpNum {
    /// The number of the `index`-th queue pair behind `port`.
    #[must_use]
    pub const fn new(port: u16, index: u8) -> Self {
        Self((port as u32) << 8 | index as u32)
    }

    /// The TCP port at which the owner of this queue pair listens.
    #[must_use]
    pub const fn port(self) -> u16 {
        (self.0 >> 8) as u16
    }
}

/// A global identifier: an IPv6 address, or an IPv4 address mapped into IPv6 as RoCE v2 does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub [u8; 16]);

impl From<IpAddr> for Gid {
    fn from(address: IpAddr) -> Self {
        Self(match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        })
    }
}

impl From<Gid> for IpAddr {
    fn from(gid: Gid) -> Self {
        Ipv6Addr::from(gid.0).to_canonical()
    }
}

/// How a queue pair carries messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpType {
    /// Reliable connected.
    Rc,
    /// Unreliable connected (IBA 9.8): what cannot be executed is dropped, and nobody is told.
    Uc,
    /// Unreliable datagrams: each message names whom it goes to, and is one datagram (IBA 9.8.3).
    Ud,
    /// The requester's end of an extended reliable connection (IBA annex A14).
    XrcSend,
    /// The responder's end of one: its receives are those of the shared receive queues of this domain.
    XrcRecv(XrcdId),
    /// Reliable connected, as an iWARP adapter does it: connection management hands over a byte stream
    /// ([`crate::Adoption`]) on which nothing but the RFCs is spoken. What that leaves out: immediate
    /// data, waiting for a receive, and the acknowledgement that a request was executed.
    Iwarp,
    /// Raw packets: each message is an Ethernet frame. What is received is what flow rules steer to it.
    RawPacket,
    /// Raw packets that are received by an indirection table of work queues; it sends nothing.
    Hashed(TableId),
    /// QPIP: sends and receives over a TCP connection, with nothing in between (`specs/qpip.md`).
    /// [`Adapter::tcp_connect`](crate::Adapter::tcp_connect) and its neighbours connect it.
    Tcp,
    /// QPIP: each message is a UDP datagram. [`Adapter::udp_bind`](crate::Adapter::udp_bind) binds it.
    Udp,
}

/// The states of a queue pair (IBA 10.3.1), with the values of `ibv_qp_state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum QpState {
    /// Created; nothing may be posted.
    #[default]
    Reset = 0,
    /// Receives may be posted; nothing is processed.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue drained or draining.
    Sqd = 4,
    /// Send queue error (unreliable services only).
    Sqe = 5,
    /// Error: everything is flushed.
    Err = 6,
}

/// The states of a receive work queue, with the values of `ibv_wq_state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum WqState {
    /// Created; nothing may be posted.
    #[default]
    Reset = 0,
    /// Receives are posted and filled.
    Ready = 1,
    /// Everything is flushed.
    Err = 2,
}

/// Limits of a queue pair's queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCap {
    /// Work requests the send queue holds.
    pub max_send_wr: u32,
    /// Work requests the receive queue holds.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of a send.
    pub max_send_sge: u32,
    /// Scatter/gather elements of a receive.
    pub max_recv_sge: u32,
    /// Bytes that a send may carry inline.
    pub max_inline_data: u32,
}

/// What a queue pair is created with.
#[derive(Clone, Copy, Debug)]
pub struct QpInit {
    /// Its protection domain. An XRC responder has none.
    pub pd: PdId,
    /// Where its sends complete; not looked at if it has none.
    pub send_cq: CqId,
    /// Where its receives complete; not looked at if it has none of its own.
    pub recv_cq: CqId,
    /// The shared receive queue that replaces its own. Only for services that have receives of their own.
    pub srq: Option<SrqId>,
    /// Sizes asked for; creation answers with sizes at least as large.
    pub cap: QpCap,
    /// The service.
    pub qp_type: QpType,
    /// Whether every send completes with a completion, as if signalled.
    pub sq_sig_all: bool,
}

/// Where a queue pair's peer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressVector {
    /// The peer's GID.
    pub dgid: Gid,
    /// Index into the own GID table: the address from which the peer is reached.
    pub sgid_index: u8,
    /// Service level.
    pub sl: u8,
    /// Traffic class, the IP header's DSCP and ECN bits.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Destination LID: on a port of InfiniBand where the peer is, unless a global route is given. Kept for
    /// `ibv_query_qp`.
    pub dlid: u16,
    /// Source path bits; kept.
    pub src_path_bits: u8,
    /// Static rate; kept.
    pub static_rate: u8,
    /// Whether a global route is given. A port of Ethernet needs one.
    pub is_global: bool,
    /// Port; 1.
    pub port_num: u8,
}

/// Attributes of a queue pair, as `ibv_qp_attr` has them. `modify_qp` takes those that the mask names.
#[derive(Clone, Copy, Debug, Default)]
pub struct QpAttr {
    /// The state to go to.
    pub state: QpState,
    /// The state that the caller believes the queue pair to be in.
    pub cur_state: QpState,
    /// Path MTU code 1..=5 (256 << (code - 1) bytes).
    pub path_mtu: u8,
    /// Migration state, kept.
    pub path_mig_state: u8,
    /// Q_Key (datagrams).
    pub qkey: u32,
    /// First packet sequence number expected.
    pub rq_psn: u32,
    /// First packet sequence number sent.
    pub sq_psn: u32,
    /// The peer's queue pair.
    pub dest_qp_num: u32,
    /// Remote operations that the peer may ask of this queue pair.
    pub access: Access,
    /// The peer.
    pub av: AddressVector,
    /// Alternate path, kept.
    pub alt_av: AddressVector,
    /// P_Key index; 0.
    pub pkey_index: u16,
    /// Alternate P_Key index, kept.
    pub alt_pkey_index: u16,
    /// Ask for `SqDrained` when SQD has drained.
    pub en_sqd_async_notify: bool,
    /// Whether SQD is still draining (query only).
    pub sq_draining: bool,
    /// Reads and atomics in flight as requester.
    pub max_rd_atomic: u8,
    /// Reads and atomics in flight as responder.
    pub max_dest_rd_atomic: u8,
    /// RNR timer code, 0..=31, that the peer is told to wait.
    pub min_rnr_timer: u8,
    /// Port; 1.
    pub port_num: u8,
    /// Local acknowledgement timeout code: 4.096 us << code, 0 for ever.
    pub timeout: u8,
    /// Retries before a dead peer is given up.
    pub retry_cnt: u8,
    /// Retries after RNR, 7 without end.
    pub rnr_retry: u8,
    /// Alternate path's port, kept.
    pub alt_port_num: u8,
    /// Alternate path's timeout, kept.
    pub alt_timeout: u8,
    /// Rate limit in kbit/s, kept.
    pub rate_limit: u32,
}

bitflags::bitflags! {
    /// Which attributes a `modify_qp` sets: the values of `ibv_qp_attr_mask`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct QpAttrMask: u32 {
        /// `state`
        const STATE = 1;
        /// `cur_state`
        const CUR_STATE = 1 << 1;
        /// `en_sqd_async_notify`
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// `access`
        const ACCESS_FLAGS = 1 << 3;
        /// `pkey_index`
        const PKEY_INDEX = 1 << 4;
        /// `port_num`
        const PORT = 1 << 5;
        /// `qkey`
        const QKEY = 1 << 6;
        /// `av`
        const AV = 1 << 7;
        /// `path_mtu`
        const PATH_MTU = 1 << 8;
        /// `timeout`
        const TIMEOUT = 1 << 9;
        /// `retry_cnt`
        const RETRY_CNT = 1 << 10;
        /// `rnr_retry`
        const RNR_RETRY = 1 << 11;
        /// `rq_psn`
        const RQ_PSN = 1 << 12;
        /// `max_rd_atomic`
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// `alt_av`
        const ALT_PATH = 1 << 14;
        /// `min_rnr_timer`
        const MIN_RNR_TIMER = 1 << 15;
        /// `sq_psn`
        const SQ_PSN = 1 << 16;
        /// `max_dest_rd_atomic`
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// `path_mig_state`
        const PATH_MIG_STATE = 1 << 18;
        /// The queue sizes (resizing is not offered).
        const CAP = 1 << 19;
        /// `dest_qp_num`
        const DEST_QPN = 1 << 20;
        /// `rate_limit`
        const RATE_LIMIT = 1 << 25;
    }
}

/// An asynchronous event about an object or the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AsyncEvent {
    /// A completion queue overran.
    CqErr(CqId),
    /// A queue pair failed.
    QpFatal(QpId),
    /// The peer asked something invalid of a queue pair.
    QpReqErr(QpId),
    /// The peer violated the rights of a queue pair.
    QpAccessErr(QpId),
    /// The first message came while the queue pair was in RTR.
    CommEst(QpId),
    /// SQD has drained.
    SqDrained(QpId),
    /// A shared receive queue failed.
    SrqErr(SrqId),
    /// A shared receive queue fell below its limit.
    SrqLimitReached(SrqId),
    /// The last work request of a queue pair's shared receive queue was consumed after it went to error.
    QpLastWqeReached(QpId),
    /// The port came up.
    PortActive,
    /// The port went down.
    PortErr,
    /// A queue pair has moved to its alternate path. The adapter has one path: only a plan of faults
    /// raises this and those below.
    PathMig(QpId),
    /// A queue pair could not move to its alternate path.
    PathMigErr(QpId),
    /// The device is gone for good.
    DeviceFatal,
    /// The port's LID was changed.
    LidChange,
    /// The port's P_Key table was changed.
    PkeyChange,
    /// The port has another subnet manager.
    SmChange,
    /// The subnet manager asks for all registrations anew.
    ClientReregister,
    /// The port's GID table was changed.
    GidChange,
}
