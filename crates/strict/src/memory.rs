//! The memory of requests, which the adapter has until they are done.

use quipu_nic::mem::Loan;
use quipu_nic::{Completion, QpId, Sge, SrqId, WcOpcode, WcStatus};

use crate::checker::{Checker, named};
use crate::report::Kind;
use crate::trace::Trace;

/// Receives of a shared queue that are kept in mind.
const MOST_SHARED: usize = 1 << 16;

/// What is known of the memory of a request.
#[derive(Debug)]
pub enum Memory {
    /// Nothing that could be compared.
    Unknown,
    /// The adapter reads it, and what it looked like when the request was posted: its fingerprint.
    Source(u64),
    /// The adapter writes to it.
    Target(Loan),
}

/// A request that is done, and what is to be found out of its memory.
pub struct Wanted {
    /// Which request.
    pub request: Request,
    /// The elements that it names.
    pub sges: Vec<Sge>,
    /// What is known of them.
    pub memory: Memory,
    /// Of memory that the adapter writes to: so many bytes were.
    pub len: u64,
}

/// A request, for a report.
pub struct Request {
    /// The queue pair that has executed it.
    pub qp: QpId,
    pub(crate) what: &'static str,
    pub(crate) wr_id: u64,
    pub(crate) posted: Trace,
}

/// A receive that no polled completion has shown to be done.
pub(crate) struct Received {
    wr_id: u64,
    memory: Memory,
    posted: Trace,
}

impl Received {
    pub(crate) fn new(wr_id: u64, memory: Memory, posted: Trace) -> Self {
        Self { wr_id, memory, posted }
    }
}

impl Checker {
    /// Keeps a receive of a shared queue in mind, by the number that its completion will tell. Where that is
    /// not of one receive alone, nothing can be said of any.
    pub(crate) fn note_shared(&mut self, id: SrqId, received: Received) {
        let all = self.shared.entry(id).or_default();
        if let Some(other) = all.get_mut(&received.wr_id) {
            other.memory = Memory::Unknown;
        } else if matches!(received.memory, Memory::Target(_)) && all.len() < MOST_SHARED {
            all.insert(received.wr_id, received);
        }
    }

    /// The receive that a completion is of, with its memory, if that is to be looked at.
    pub(crate) fn received(&mut self, id: QpId, completion: &Completion) -> Option<Wanted> {
        let qp = self.qps.get_mut(&id)?;
        let received = match qp.srq {
            Some(srq) => self.shared.get_mut(&srq)?.remove(&completion.wr_id)?,
            None => qp.receives.pop_front()?,
        };
        if received.wr_id != completion.wr_id {
            // What was posted before this process was watched, or completes as a plan of faults says.
            qp.receives.clear();
            return None;
        }
        let filled = completion.status == WcStatus::Success && completion.opcode == WcOpcode::Recv;
        let Received { wr_id, memory, posted } = received;
        let len = u64::from(completion.byte_len);
        let request = Request { qp: id, what: "receive", wr_id, posted };
        filled.then(|| Wanted { request, sges: Vec::new(), memory, len })
    }

    /// The memory of a request was changed before its completion was polled; where the adapter writes to it,
    /// this byte of it was.
    pub fn changed(&mut self, request: Request, byte: Option<u64>) {
        let Request { qp, what, wr_id, posted } = request;
        let whose = format!("{what} {wr_id:#x} of {}", named(self.number_of(qp)));
        let (kind, memory) = match byte {
            None => (Kind::BufferChanged, format!("the payload of {whose}")),
            Some(byte) => (Kind::TargetChanged, format!("byte {byte} of the memory of {whose}")),
        };
        let what = format!("{memory} was changed before its completion was polled");
        self.report(kind, what, vec![("the request was posted here", posted)]);
    }
}
