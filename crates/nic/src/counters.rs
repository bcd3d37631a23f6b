//! What was done so far: of each queue pair, and of the adapter.

use crate::adapter::Adapter;
use crate::channel::Other;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::types::{Gid, QpNum, QpState, QpType, SendOp, WcStatus};

/// What a queue pair asked of its peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequesterCounters {
    /// Sends that are done.
    pub sends: u64,
    /// Writes that are done.
    pub writes: u64,
    /// Reads that are done.
    pub reads: u64,
    /// Atomics that are done.
    pub atomics: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Requests transmitted once more, after a refusal for lack of a receive.
    pub retransmitted: u64,
    /// Refusals for lack of a receive.
    pub rnr: u64,
    /// Requests that failed, those flushed aside.
    pub failed: u64,
}

/// What a queue pair did for its peer. Direct accesses of a peer on this host are not among it: nobody
/// here notices them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponderCounters {
    /// Receives that are done.
    pub receives: u64,
    /// Writes that were executed.
    pub writes: u64,
    /// Reads that were answered.
    pub reads: u64,
    /// Atomics that were executed.
    pub atomics: u64,
    /// Bytes received or written.
    pub bytes_in: u64,
    /// Bytes read.
    pub bytes_out: u64,
    /// Messages that met no receive.
    pub rnr: u64,
    /// Requests that were refused for good.
    pub refused: u64,
}

/// What a queue pair did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCounters {
    /// On behalf of this side.
    pub requester: RequesterCounters,
    /// On behalf of the peer.
    pub responder: ResponderCounters,
}

/// What the adapter did, in addition to what its queue pairs did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterCounters {
    /// Completions, those in error among them.
    pub completions: u64,
    /// Completions in error, by status.
    failures: [u64; Self::STATUSES],
    /// Doorbells rung.
    pub doorbells: u64,
    /// Queue pairs created so far.
    pub queue_pairs: u64,
    /// Changes of the attributes of queue pairs, and ends of them.
    pub changes: u64,
    /// What the queue pairs did that are destroyed.
    pub gone: QpCounters,
}

impl AdapterCounters {
    /// One more than the greatest number of a status that the adapter gives.
    pub const STATUSES: usize = 23;

    /// Counts a completion; nearly all are successes, which cost one addition.
    #[inline]
    pub(crate) fn count_completion(&mut self, status: WcStatus) {
        self.completions += 1;
        if status != WcStatus::Success {
            self.failures[(status as usize).min(Self::STATUSES - 1)] += 1;
        }
    }

    /// Completions of each status (by its number; those that have none here are the last).
    #[must_use]
    pub fn by_status(&self) -> [u64; Self::STATUSES] {
        let mut all = self.failures;
        all[WcStatus::Success as usize] = self.completions - self.failures.iter().sum::<u64>();
        all
    }
}

/// How the messages of a queue pair travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// Not connected.
    None,
    /// A connection is being made.
    Pending,
    /// Over a byte stream.
    Stream,
    /// Through memory shared with another engine of this host.
    Link,
    /// Within this adapter.
    Own,
    /// The connection is lost.
    Lost,
    /// Each message is a datagram.
    Datagrams,
}

/// A queue pair as a list of them shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpSummary {
    /// Its number.
    pub num: QpNum,
    /// Its service.
    pub qp_type: QpType,
    /// Its state.
    pub state: QpState,
    /// How it is connected.
    pub path: PathKind,
    /// Its peer's address; meaningful from RTR on.
    pub peer_gid: Gid,
    /// Its peer.
    pub peer: QpNum,
    /// Send requests posted and not done.
    pub send_queue: u32,
    /// Receive requests posted and not done, of a queue of its own.
    pub recv_queue: u32,
    /// What it did.
    pub counters: QpCounters,
}

impl RequesterCounters {
    /// Counts a request that is done.
    #[inline]
    pub(crate) fn count(&mut self, op: &SendOp, length: u32) {
        match op {
            SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => self.sends += 1,
            SendOp::Write { .. } | SendOp::WriteImm { .. } | SendOp::AtomicWrite { .. } => {
                self.writes += 1;
            }
            SendOp::Read { .. } => self.reads += 1,
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => self.atomics += 1,
            SendOp::Flush(_) | SendOp::LocalInv { .. } | SendOp::BindMw(_) => return,
        }
        self.bytes += u64::from(length);
    }
}

impl QpCounters {
    /// Adds those of another queue pair.
    pub fn add(&mut self, other: &Self) {
        let (to, from) = (&mut self.requester, &other.requester);
        to.sends += from.sends;
        to.writes += from.writes;
        to.reads += from.reads;
        to.atomics += from.atomics;
        to.bytes += from.bytes;
        to.retransmitted += from.retransmitted;
        to.rnr += from.rnr;
        to.failed += from.failed;
        let (to, from) = (&mut self.responder, &other.responder);
        to.receives += from.receives;
        to.writes += from.writes;
        to.reads += from.reads;
        to.atomics += from.atomics;
        to.bytes_in += from.bytes_in;
        to.bytes_out += from.bytes_out;
        to.rnr += from.rnr;
        to.refused += from.refused;
    }
}

impl Qp {
    /// What it did.
    pub(crate) fn counters(&self) -> QpCounters {
        QpCounters { requester: self.requester.counters, responder: self.responder.counters }
    }

    fn summary(&self) -> QpSummary {
        let path = match &self.path {
            Path::None => PathKind::None,
            Path::Pending(_) => PathKind::Pending,
            Path::Stream(_) => PathKind::Stream,
            Path::Channel(path) if matches!(path.other, Other::Own(_)) => PathKind::Own,
            Path::Channel(_) => PathKind::Link,
            Path::Lost => PathKind::Lost,
            Path::Datagrams { .. } | Path::Udp(_) => PathKind::Datagrams,
            Path::Tcp(path) if path.connection.is_none() => PathKind::None,
            Path::Tcp(_) if self.state == QpState::Rtr => PathKind::Pending,
            Path::Tcp(_) => PathKind::Stream,
        };
        QpSummary {
            num: self.num,
            qp_type: self.qp_type,
            state: self.state,
            path,
            peer_gid: self.attr.av.dgid,
            peer: QpNum(self.attr.dest_qp_num),
            send_queue: self.sq.tail.wrapping_sub(self.sq.head),
            recv_queue: self.rq.len(),
            counters: self.counters(),
        }
    }
}

impl<P: Probe> Adapter<P> {
    /// What the adapter did.
    #[must_use]
    pub fn counters(&self) -> &AdapterCounters {
        &self.hub.counters
    }

    /// Its queue pairs.
    pub fn queue_pairs(&self) -> impl Iterator<Item = QpSummary> + '_ {
        self.qps.iter().map(|(_, qp)| qp.summary())
    }
}
