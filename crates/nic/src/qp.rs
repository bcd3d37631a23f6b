//! A queue pair: its queues, its attributes, and where its messages travel.

use std::collections::VecDeque;

use crate::channel::ChannelPath;
use crate::counters::{RequesterCounters, ResponderCounters};
use crate::error::Fault;
use crate::fate::{Cut, Fate};
use crate::qpip::path::TcpPath;
use crate::qpip::udp::UdpPath;
use crate::queue::{Receive, RecvQueue, SendQueue};
use crate::stream::StreamPath;
use crate::transmit::lanes::Turn;
use crate::types::{
    Access, ConnId, CqId, PdId, QpAttr, QpCap, QpId, QpInit, QpNum, QpState, QpType, SrqId, Time,
    WcStatus,
};

/// Where the messages of a queue pair travel.
pub(crate) enum Path {
    /// Nowhere yet: not connected, or no connection is wanted.
    None,
    /// A connection is being made.
    Pending(ConnId),
    /// Over a byte stream, as RDMAP messages.
    Stream(Box<StreamPath>),
    /// Through rings in memory shared with a peer on this host.
    Channel(Box<ChannelPath>),
    /// One datagram for each, to whomever they name.
    Datagrams {
        /// Whether it stands among those with something to send.
        listed: bool,
    },
    /// QPIP: segments of a TCP connection.
    Tcp(Box<TcpPath>),
    /// QPIP: UDP datagrams.
    Udp(UdpPath),
    /// It stood once, and the peer has left; a reliable connection does not come back.
    Lost,
}

/// The requester's half: what was asked of the peer, and what it has answered.
#[derive(Debug, Default)]
pub(crate) struct Requester {
    /// Requests whose transmission has begun, counted as `specs/quipu-wire.md` says.
    pub(crate) started: u32,
    /// Requests that the peer has executed.
    pub(crate) acked: u32,
    /// Reads and atomics in flight.
    pub(crate) reads: u32,
    /// 0 if no message of the request at `sq.next` is in the middle of its transmission; else one more
    /// than the bytes that are transmitted.
    pub(crate) offset: u32,
    /// RNR refusals in a row of the oldest request.
    pub(crate) rnr_tries: u8,
    /// When to try again after an RNR refusal.
    pub(crate) rnr_until: Option<Time>,
    /// That wait is one that the peer did not ask for (`fate`).
    pub(crate) held: bool,
    /// Whether nothing gets through to the peer, on purpose.
    pub(crate) cut: Cut,
    /// When to give up on a peer that cannot be reached.
    pub(crate) deadline: Option<Time>,
    /// Whether the deadline has passed while a stream stood whose peer has said nothing yet. If that stream
    /// ends too, requests fail.
    pub(crate) overdue: bool,
    /// Whether an unreliable peer could not be reached for so long that nothing waits for it any more.
    pub(crate) away: bool,
    /// When to try again to reach the peer, and how often that was done.
    pub(crate) reconnect_at: Option<Time>,
    pub(crate) attempts: u32,
    /// Requests from `sq.next` on that had been transmitted before an RNR refusal.
    pub(crate) redo: u32,
    /// The message of the request at `sq.next` that is due: a write with immediate data is two on a stream.
    pub(crate) stage: u32,
    /// The status that the request at `sq.next` fails with once those before it are complete.
    pub(crate) failing: Option<WcStatus>,
    /// Bytes that wait in the send queue.
    pub(crate) waiting_bytes: u64,
    pub(crate) counters: RequesterCounters,
}

/// The responder's half: what the peer asked, and how far it is served.
#[derive(Debug, Default)]
pub(crate) struct Responder {
    /// Requests executed.
    pub(crate) executed: u32,
    /// The receive that the current message is placed into.
    pub(crate) receive: Receive,
    /// Whether `receive` is in use. An unreliable message that is dropped leaves it to the next one.
    pub(crate) receiving: bool,
    /// Unreliable: whether what is left of the message in progress is dropped.
    pub(crate) dropping: bool,
    /// The same, of a write on a stream, which may be in progress beside a Send.
    pub(crate) dropping_write: bool,
    /// Whether something is held of writes that are placed out of order (`unordered`).
    pub(crate) holding: bool,
    /// Bytes of the write in progress; on a stream, also of one that an immediate may still tell of.
    pub(crate) write_len: u32,
    /// Whether that one is over.
    pub(crate) write_over: bool,
    /// Whether the event for the first message in RTR was raised.
    pub(crate) established: bool,
    pub(crate) counters: ResponderCounters,
}

/// What the end of a queue pair has still to show.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    /// The place and the status of the request that failed.
    pub(crate) verdict: Option<(u32, WcStatus)>,
    /// Whether the event of the last receive is due.
    pub(crate) last_wqe: bool,
    /// Whether it waits for a peer to be done with what requests refer to.
    pub(crate) postponed: bool,
}

/// A queue pair.
pub(crate) struct Qp {
    pub(crate) id: QpId,
    pub(crate) num: QpNum,
    pub(crate) qp_type: QpType,
    pub(crate) pd: PdId,
    /// That of its shared receive queue, if it has one: what receives are checked against.
    pub(crate) recv_pd: PdId,
    pub(crate) send_cq: CqId,
    pub(crate) recv_cq: CqId,
    pub(crate) srq: Option<SrqId>,
    pub(crate) cap: QpCap,
    pub(crate) sq_sig_all: bool,
    pub(crate) state: QpState,
    pub(crate) attr: QpAttr,
    pub(crate) sq: SendQueue,
    pub(crate) rq: RecvQueue,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
    pub(crate) path: Path,
    pub(crate) ending: Ending,
    /// What is to become of single requests of the send queue, by place.
    pub(crate) fates: VecDeque<(u32, Fate)>,
    /// The PSN that the peer of the connection said it expects first, if it said one.
    pub(crate) peer_rq_psn: Option<u32>,
    /// Whether `SqDrained` is still owed to the current stay in SQD.
    pub(crate) drain_owed: bool,
    /// Whether it stands in the adapter's list of timers, and for when.
    pub(crate) timer: Option<Time>,
    /// What it may transmit, where quality of service is configured.
    pub(crate) turn: Turn,
    /// Whether messages of its own to a group that it is attached to do not come back to it.
    pub(crate) is_spared_own: bool,
}

impl Path {
    /// That of a queue pair that was just created.
    fn first(qp_type: QpType, cap: QpCap) -> Self {
        match qp_type {
            QpType::Tcp => Self::Tcp(Box::new(TcpPath::new(cap.max_send_wr, cap.max_recv_wr))),
            QpType::Udp => Self::Udp(UdpPath::default()),
            _ if qp_type.is_of_datagrams() => Self::Datagrams { listed: false },
            _ => Self::None,
        }
    }
}

impl Qp {
    /// The work queues that a queue pair gets.
    ///
    /// # Errors
    /// There is no memory for them.
    pub(crate) fn queues(init: &QpInit, cap: QpCap) -> Result<(SendQueue, RecvQueue), Fault> {
        let recv_wr = if init.srq.is_some() { 0 } else { cap.max_recv_wr };
        let mut sq = SendQueue::new(cap.max_send_wr, cap.max_send_sge, cap.max_inline_data)?;
        if matches!(init.qp_type, QpType::Ud | QpType::Udp) {
            sq = sq.with_destinations()?;
        }
        Ok((sq, RecvQueue::new(recv_wr, cap.max_recv_sge)?))
    }

    /// That of a program, with its [`queues`](Self::queues).
    pub(crate) fn new(
        id: QpId,
        num: QpNum,
        init: &QpInit,
        recv_pd: PdId,
        cap: QpCap,
        (sq, rq): (SendQueue, RecvQueue),
    ) -> Self {
        Self {
            id,
            num,
            qp_type: init.qp_type,
            pd: init.pd,
            recv_pd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: init.srq,
            cap,
            sq_sig_all: init.sq_sig_all,
            state: QpState::Reset,
            attr: QpAttr::default(),
            sq,
            rq,
            requester: Requester::default(),
            responder: Responder::default(),
            path: Path::first(init.qp_type, cap),
            ending: Ending::default(),
            fates: VecDeque::new(),
            peer_rq_psn: None,
            drain_owed: false,
            timer: None,
            turn: Turn::default(),
            is_spared_own: false,
        }
    }

    /// The number by which the region table knows its protection domain.
    pub(crate) fn pd_number(&self) -> u32 {
        pd_number(self.pd)
    }

    /// The number by which the region table knows the protection domain of its receives.
    pub(crate) fn recv_pd_number(&self) -> u32 {
        pd_number(self.recv_pd)
    }

    /// What the peer may ask for. A responder without resources answers nothing (IBA 9.7).
    pub(crate) fn grants(&self) -> Access {
        match self.attr.max_dest_rd_atomic {
            0 => self.attr.access - (Access::REMOTE_READ | Access::REMOTE_ATOMIC),
            _ => self.attr.access,
        }
    }

    /// Whether the peer may ask for operations that need `right`.
    pub(crate) fn allows(&self, right: Access) -> bool {
        self.grants().contains(right)
    }

    /// Whether requests of the peer are served.
    pub(crate) fn may_receive(&self) -> bool {
        matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Nanoseconds until an unreachable peer is given up (IBA 9.7.6.1.3: the adapter may take up to four
    /// times the nominal timeout), `None` for never. An unreliable service has no timeout: it waits as long
    /// as a connection reasonably takes to be made.
    pub(crate) fn retry_time_ns(&self) -> Option<u64> {
        const UNRELIABLE_NS: u64 = 2_000_000_000;
        if !self.qp_type.is_reliable() {
            return Some(UNRELIABLE_NS);
        }
        self.repeat_time_ns().map(|nominal| 4 * nominal)
    }

    /// Nanoseconds for which a request is repeated to a peer that is known to have left, `None` for ever:
    /// once the nominal timeout for each time that it is sent. Nothing can come late.
    pub(crate) fn repeat_time_ns(&self) -> Option<u64> {
        const NOMINAL_NS: u64 = 4096;
        let times = u64::from(self.attr.retry_cnt) + 1;
        (self.attr.timeout != 0).then(|| (NOMINAL_NS << (self.attr.timeout & 31)) * times)
    }

    /// Nanoseconds until a peer is given up that has begun to say something and does not go on, at least
    /// `least_ns`. Without a timeout it is also what TCP itself takes at least to give up (RFC 9293 3.8.3:
    /// 100 seconds).
    pub(crate) fn patience_ns(&self, least_ns: u64) -> u64 {
        const OF_TCP_NS: u64 = 100_000_000_000;
        self.retry_time_ns().unwrap_or(OF_TCP_NS).max(least_ns)
    }
}

/// The number by which the region table knows a protection domain.
pub(crate) fn pd_number(pd: PdId) -> u32 {
    pd.0 as u32
}

/// Nanoseconds of an RNR timer code (IBA table 45); codes above 31 do not exist.
pub(crate) fn rnr_timer_ns(code: u8) -> u64 {
    const HUNDREDTHS_OF_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    u64::from(HUNDREDTHS_OF_MS[usize::from(code & 31)]) * 10_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_timers_are_those_of_the_specification() {
        assert_eq!(rnr_timer_ns(0), 655_360_000);
        assert_eq!(rnr_timer_ns(1), 10_000);
        assert_eq!(rnr_timer_ns(12), 640_000);
        assert_eq!(rnr_timer_ns(31), 491_520_000);
    }
}
