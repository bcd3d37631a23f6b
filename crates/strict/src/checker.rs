//! The books of what a program has made and posted, and what they tell.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use quipu_nic::{
    AhId, Completion, CqId, Fault, Payload, QpCap, QpId, QpInit, QpNum, QpState, SendFlags, SendOp,
    SendWr, Sge, SrqId, To, WcExtra, WcOpcode, WcStatus, Whose,
};

use crate::ignore::Ignored;
use crate::keys::Errors;
use crate::memory::{Memory, Received, Request, Wanted};
use crate::report::{Kind, Report, Tally};
use crate::trace::Trace;

/// So many reports of a kind are given in full; further ones are counted.
const FULL: u64 = 10;

/// A registration.
pub(crate) struct Region {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) made: Trace,
    pub(crate) ended: Option<Trace>,
}

/// A send that no polled completion has shown to be done.
struct Posted {
    wr_id: u64,
    /// Its place in the send queue, which a completion tells that it fails with.
    place: u32,
    signaled: bool,
    sges: Vec<Sge>,
    /// The key of the peer that it names.
    rkey: Option<u32>,
    memory: Memory,
    /// Where a datagram goes.
    ah: Option<AhId>,
    trace: Trace,
}

pub(crate) struct Qp {
    num: QpNum,
    cap: QpCap,
    send_cq: CqId,
    recv_cq: CqId,
    /// The queue of its receives, if it has none of its own.
    pub(crate) srq: Option<SrqId>,
    sq_sig_all: bool,
    sends: VecDeque<Posted>,
    /// How many sends have been found to have room, and are to be posted together.
    passed: u32,
    pub(crate) receives: VecDeque<Received>,
    made: Trace,
}

impl Qp {
    /// Sends are outstanding, and no completion will ever tell of one.
    fn signals_none(&self) -> bool {
        !self.sends.is_empty() && self.sends.iter().all(|posted| !posted.signaled)
    }

    fn is_full(&self, ahead: u32) -> bool {
        let count = self.sends.len() + ahead as usize;
        count >= self.cap.max_send_wr as usize && self.sends.iter().any(|posted| posted.signaled)
    }
}

struct Cq {
    cqe: u32,
    /// Completions that may still come, or wait to be polled.
    due: u32,
}

/// Keeps the books of one process.
#[derive(Default)]
pub struct Checker {
    pub(crate) regions: HashMap<u32, Region>,
    /// The keys of those that have ended, the oldest first.
    pub(crate) ended: VecDeque<u32>,
    pub(crate) qps: BTreeMap<QpId, Qp>,
    numbers: HashMap<QpNum, QpId>,
    cqs: HashMap<CqId, Cq>,
    /// Where a receive of a queue that names a key was posted last.
    pub(crate) receives: HashMap<(u32, Whose), Trace>,
    /// Receives of shared queues that lend memory, by their numbers.
    pub(crate) shared: HashMap<SrqId, HashMap<u64, Received>>,
    /// What was reported of an object, and is not again.
    told: HashSet<(Kind, u64)>,
    tally: Tally,
    ignored: Ignored,
    reports: VecDeque<Report>,
}

/// The payload that the adapter reads from memory for a request, and that is to stay as it is.
fn read_from<'a>(wr: &SendWr<'a>) -> &'a [Sge] {
    let sends = matches!(
        wr.op,
        SendOp::Send
            | SendOp::SendImm(_)
            | SendOp::SendInv(_)
            | SendOp::Write { .. }
            | SendOp::AtomicWrite { .. }
            | SendOp::WriteImm { .. }
    );
    match wr.payload {
        Payload::Sges(sges) if sends => sges,
        _ => &[],
    }
}

/// Whether the adapter writes to the memory that a request names.
fn writes_to(op: SendOp) -> bool {
    matches!(op, SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
}

/// The key of the peer that a request names.
fn rkey_of(op: SendOp) -> Option<u32> {
    match op {
        SendOp::Write { rkey, .. }
        | SendOp::WriteImm { rkey, .. }
        | SendOp::AtomicWrite { rkey, .. }
        | SendOp::Read { rkey, .. }
        | SendOp::CompareSwap { rkey, .. }
        | SendOp::FetchAdd { rkey, .. } => Some(rkey),
        SendOp::Flush(flush) => Some(flush.rkey),
        _ => None,
    }
}

/// Whether a request is done where a later one of its queue, or itself, has this completion. One that fails
/// may be signalled or not, and numbers repeat: only its place tells which it is.
fn is_reached(posted: &Posted, completion: &Completion) -> bool {
    match completion.extra {
        WcExtra::Place(place) => place.wrapping_sub(posted.place) as i32 >= 0,
        _ => true,
    }
}

/// A queue pair, for a report.
pub(crate) fn named(num: u32) -> String {
    format!("queue pair {num:#08x}")
}

impl Checker {
    /// A checker that reports everything but this.
    #[must_use]
    pub fn ignoring(ignored: Ignored) -> Self {
        Self { ignored, ..Self::default() }
    }

    /// The next report that was not given yet.
    pub fn poll_report(&mut self) -> Option<Report> {
        self.reports.pop_front()
    }

    /// How often each kind was found so far.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// The number of a queue pair, 0 if it is not known.
    pub(crate) fn number_of(&self, id: QpId) -> u32 {
        self.qps.get(&id).map_or(0, |qp| qp.num.0)
    }

    pub(crate) fn report(&mut self, kind: Kind, what: String, related: Vec<(&'static str, Trace)>) {
        let number = self.tally.total() + 1;
        let report = Report { number, kind, what, here: Trace::here(), related };
        if self.ignored.covers(&report) {
            self.tally.ignored += 1;
            return;
        }
        let count = self.tally.found.entry(kind).or_default();
        *count += 1;
        if *count <= FULL {
            self.reports.push_back(report);
        }
    }

    /// As [`report`](Self::report), once for an object.
    fn report_once(
        &mut self,
        kind: Kind,
        object: u64,
        what: String,
        related: Vec<(&'static str, Trace)>,
    ) {
        if self.told.insert((kind, object)) {
            self.report(kind, what, related);
        }
    }

    /// Whether anything was registered under `key`.
    #[must_use]
    pub fn knows(&self, key: u32) -> bool {
        self.regions.contains_key(&key)
    }

    /// Memory was registered under `key`: `addr` is the address by which requests name its first byte.
    pub fn registered(&mut self, key: u32, addr: u64, len: u64) {
        self.regions.insert(key, Region { addr, len, made: Trace::here(), ended: None });
    }

    /// The oldest outstanding send of each queue pair that names a key: the pair's number, the request, and
    /// where it was posted.
    pub(crate) fn sends_naming(&self, key: u32) -> Vec<(u32, u64, Trace)> {
        let names = |posted: &&Posted| posted.sges.iter().any(|sge| sge.lkey.0 == key);
        let oldest = self.qps.values().filter_map(|qp| Some((qp, qp.sends.iter().find(names)?)));
        oldest.map(|(qp, posted)| (qp.num.0, posted.wr_id, posted.trace.clone())).collect()
    }

    /// A completion queue was created, or got another size.
    pub fn cq_sized(&mut self, id: CqId, cqe: u32) {
        self.cqs.entry(id).and_modify(|cq| cq.cqe = cqe).or_insert(Cq { cqe, due: 0 });
    }

    /// A completion queue was destroyed.
    pub fn cq_destroyed(&mut self, id: CqId) {
        self.cqs.remove(&id);
    }

    /// A queue pair was created.
    pub fn qp_created(&mut self, id: QpId, num: QpNum, init: &QpInit, cap: QpCap) {
        self.numbers.insert(num, id);
        let qp = Qp {
            num,
            cap,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: init.srq,
            sq_sig_all: init.sq_sig_all,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            passed: 0,
            made: Trace::here(),
        };
        self.qps.insert(id, qp);
    }

    /// A queue pair is about to be destroyed, in a state.
    pub fn qp_destroyed(&mut self, id: QpId, state: QpState) {
        let Some(mut qp) = self.qps.remove(&id) else { return };
        self.numbers.remove(&qp.num);
        self.ended_with(Kind::DestroyedInUse, "destroyed", id, &mut qp, state);
    }

    /// A queue pair went from a state to another: in RESET nothing is posted any more.
    pub fn qp_modified(&mut self, id: QpId, from: QpState, to: QpState) {
        if to != QpState::Reset {
            return;
        }
        let Some(mut qp) = self.qps.remove(&id) else { return };
        self.ended_with(Kind::ResetInUse, "moved to RESET", id, &mut qp, from);
        self.qps.insert(id, qp);
    }

    /// All that was posted to a queue pair, which was in a state, is gone without completions.
    fn ended_with(&mut self, kind: Kind, how: &str, id: QpId, qp: &mut Qp, state: QpState) {
        self.forget_due(qp);
        self.receives.retain(|&(_, whose), _| whose != Whose::Receives(id));
        let busy = matches!(state, QpState::Rts | QpState::Sqd);
        if let Some(posted) = qp.sends.front().filter(|_| busy) {
            let (whose, count) = (named(qp.num.0), qp.sends.len());
            let what = format!("{whose} is {how} while {count} requests are outstanding");
            let related = vec![
                ("the oldest was posted here", posted.trace.clone()),
                ("created here", qp.made.clone()),
            ];
            self.report(kind, what, related);
        }
        qp.sends.clear();
        qp.receives.clear();
    }

    /// A shared receive queue was destroyed.
    pub fn srq_destroyed(&mut self, id: SrqId) {
        self.shared.remove(&id);
        self.receives.retain(|&(_, whose), _| whose != Whose::Shared(id));
    }

    /// A change of a queue pair was refused.
    pub fn modify_refused(&mut self, id: QpId, from: QpState, to: QpState, fault: &Fault) {
        let Fault::Transition(why) = fault else { return };
        let num = self.number_of(id);
        let what = format!("queue pair {num:#08x} from {from:?} to {to:?}: {why}");
        self.report(Kind::IllegalTransition, what, Vec::new());
    }

    fn forget_due(&mut self, qp: &Qp) {
        let signaled = qp.sends.iter().filter(|posted| posted.signaled).count() as u32;
        let receives = qp.receives.len() as u32;
        for (cq, count) in [(qp.send_cq, signaled), (qp.recv_cq, receives)] {
            if let Some(cq) = self.cqs.get_mut(&cq) {
                cq.due = cq.due.saturating_sub(count);
            }
        }
    }

    fn count_due(&mut self, id: CqId) {
        let Some(cq) = self.cqs.get_mut(&id) else { return };
        cq.due += 1;
        if cq.due > cq.cqe {
            let what = format!(
                "up to {} completions may arrive at a completion queue with {} requested entries",
                cq.due, cq.cqe
            );
            self.report_once(Kind::CqTooSmall, id.0, what, Vec::new());
        }
    }

    /// A send is about to be posted: the memory that the adapter will read for it.
    pub fn to_read<'a>(&self, wr: &SendWr<'a>) -> &'a [Sge] {
        read_from(wr)
    }

    /// The elements of a send that is about to be posted, and whether the adapter will write to them.
    pub fn to_access<'a>(&self, wr: &SendWr<'a>) -> (&'a [Sge], bool) {
        let sges = if let Payload::Sges(sges) = wr.payload { sges } else { &[] };
        (sges, writes_to(wr.op))
    }

    /// A send was posted, or refused. `memory` is what is known of the elements that
    /// [`to_read`](Self::to_read) names, or of those that [`to_access`](Self::to_access) says are written to;
    /// `errors` are of all that the latter names. `place` is the request's in the send queue.
    pub fn posted_send(
        &mut self,
        id: QpId,
        (wr, place): (&SendWr<'_>, u32),
        memory: Memory,
        errors: &Errors,
        outcome: Result<(), &Fault>,
    ) {
        if let Err(fault) = outcome {
            return self.refused_send(id, wr.wr_id, fault);
        }
        let Some(qp) = self.qps.get(&id) else { return };
        let (num, max) = (qp.num.0, qp.cap.max_send_wr);
        let (sges, _) = self.to_access(wr);
        self.check_keys("send", wr.wr_id, &named(num), sges, errors);
        let Some(qp) = self.qps.get_mut(&id) else { return };
        let signaled = qp.sq_sig_all || wr.flags.contains(SendFlags::SIGNALED);
        let posted = Posted {
            wr_id: wr.wr_id,
            place,
            signaled,
            sges: sges.to_vec(),
            rkey: rkey_of(wr.op),
            memory,
            ah: match wr.to {
                To::Datagram { ah, .. } => Some(ah),
                _ => None,
            },
            trace: Trace::here(),
        };
        qp.sends.push_back(posted);
        let (count, cq) = (qp.sends.len(), qp.send_cq);
        // A program that never polls must not fill the memory.
        if count > 2 * max as usize + 1 {
            qp.sends.pop_front();
        }
        if count > max as usize {
            self.overflows(id);
        }
        if signaled {
            self.count_due(cq);
        }
    }

    /// Whether a send queue has no room for one more behind `ahead` others until completions are polled. An
    /// adapter of software has room as soon as requests are done, and no program may count on that. Where
    /// nothing is signalled there is nothing to poll, which is a report and no matter of waiting.
    ///
    /// Those that have room are posted then, all of them, whatever those among them signal.
    #[must_use]
    pub fn is_full(&mut self, id: QpId, ahead: u32) -> bool {
        let Some(qp) = self.qps.get_mut(&id) else { return false };
        let full = qp.is_full(ahead);
        qp.passed = if full { 0 } else { ahead + 1 };
        full
    }

    /// The same of a send that is posted now, unless it has been found to have room.
    #[must_use]
    pub fn is_full_now(&mut self, id: QpId) -> bool {
        let Some(qp) = self.qps.get_mut(&id) else { return false };
        match qp.passed.checked_sub(1) {
            Some(left) => {
                qp.passed = left;
                false
            }
            None => qp.is_full(0),
        }
    }

    /// The send queue holds no more, or no more than the program has asked for.
    fn overflows(&mut self, id: QpId) {
        let Some(qp) = self.qps.get(&id) else { return };
        let (num, count, max) = (qp.num.0, qp.sends.len(), qp.cap.max_send_wr);
        let how = if qp.signals_none() { ", none of them signalled" } else { "" };
        let what = format!(
            "queue pair {num:#08x} has {count} requests outstanding{how}, and a send queue of {max}"
        );
        let related = vec![("created here", qp.made.clone())];
        self.report_once(Kind::SendQueueOverflow, id.0, what, related);
    }

    /// A send was refused.
    pub fn refused_send(&mut self, id: QpId, wr_id: u64, fault: &Fault) {
        let Some(qp) = self.qps.get_mut(&id) else { return };
        qp.passed = 0;
        if *fault == Fault::QueueFull && !qp.sends.is_empty() {
            // The cause is not this request. Who polls now, and posts again, does what ibv_post_send(3) says.
            if qp.signals_none() {
                self.overflows(id);
            }
            return;
        }
        let what = format!("send {wr_id:#x} of {}: {fault}", named(qp.num.0));
        self.report(Kind::RefusedPost, what, Vec::new());
    }

    /// A send was posted where at most `mtu` bytes fit a datagram.
    pub fn posted_where(&mut self, id: QpId, wr: &SendWr<'_>, mtu: u32) {
        let length = match wr.payload {
            Payload::Sges(sges) => sges.iter().map(|sge| u64::from(sge.len)).sum(),
            Payload::Inline(bytes) => bytes.len() as u64,
        };
        if !matches!(wr.to, To::Datagram { .. }) || length <= u64::from(mtu) {
            return;
        }
        let what = format!(
            "datagram {:#x} of {} has {length} bytes, more than the MTU of {mtu}",
            wr.wr_id,
            named(self.number_of(id))
        );
        self.report(Kind::DatagramTooLong, what, Vec::new());
    }

    /// A receive was posted, or refused; with what is wrong with its elements, and known of their memory.
    pub fn posted_recv(
        &mut self,
        id: QpId,
        wr_id: u64,
        (sges, errors): (&[Sge], &Errors),
        memory: Memory,
        outcome: Result<(), &Fault>,
    ) {
        let Some(qp) = self.qps.get_mut(&id) else { return };
        let num = qp.num.0;
        match outcome {
            Ok(()) => {}
            // Who posts until there is no more room does nothing wrong.
            Err(Fault::QueueFull) => return,
            Err(fault) => {
                let what = format!("receive {wr_id:#x} of queue pair {num:#08x}: {fault}");
                return self.report(Kind::RefusedPost, what, Vec::new());
            }
        }
        let here = Trace::here();
        qp.receives.push_back(Received::new(wr_id, memory, here.clone()));
        // As for sends.
        if qp.receives.len() > 2 * qp.cap.max_recv_wr as usize + 1 {
            qp.receives.pop_front();
        }
        let cq = qp.recv_cq;
        self.count_due(cq);
        self.note_receive(Whose::Receives(id), sges, &here);
        self.check_keys("receive", wr_id, &named(num), sges, errors);
    }

    /// The same, to a shared queue.
    pub fn posted_srq_recv(
        &mut self,
        id: SrqId,
        wr_id: u64,
        (sges, errors): (&[Sge], &Errors),
        memory: Memory,
        outcome: Result<(), &Fault>,
    ) {
        let whose = "a shared receive queue";
        match outcome {
            Ok(()) => {}
            Err(Fault::QueueFull) => return,
            Err(fault) => {
                let what = format!("receive {wr_id:#x} of {whose}: {fault}");
                return self.report(Kind::RefusedPost, what, Vec::new());
            }
        }
        // Its completion may go to any of the queue pairs' queues, so none is counted.
        let here = Trace::here();
        self.note_receive(Whose::Shared(id), sges, &here);
        self.note_shared(id, Received::new(wr_id, memory, here));
        self.check_keys("receive", wr_id, whose, sges, errors);
    }

    /// An address handle is destroyed.
    pub fn ah_destroyed(&mut self, ah: AhId) {
        let mut using = None;
        for qp in self.qps.values() {
            let found = qp.sends.iter().find(|posted| posted.ah == Some(ah));
            using = using.or(found.map(|posted| (qp.num.0, posted.wr_id, posted.trace.clone())));
        }
        if let Some((num, wr_id, trace)) = using {
            let what = format!(
                "an address handle is destroyed while send {wr_id:#x} of {} to it is outstanding",
                named(num)
            );
            self.report(Kind::AhInUse, what, vec![("the request was posted here", trace)]);
        }
    }

    /// A call of rdma_cm was given so many bytes for the peer, where InfiniBand has room for `most`.
    pub fn private_data(&mut self, call: &str, len: usize, most: usize) {
        if len > most {
            let what = format!("{call} has {len} bytes of private data, and the limit is {most}");
            self.report(Kind::PrivateData, what, Vec::new());
        }
    }

    /// A completion was polled: the requests whose memory is to be looked at, for which see
    /// [`changed`](Self::changed). `planned`: it may have failed on purpose.
    pub fn polled(&mut self, cq: CqId, completion: &Completion, planned: bool) -> Vec<Wanted> {
        if let Some(cq) = self.cqs.get_mut(&cq) {
            cq.due = cq.due.saturating_sub(1);
        }
        let mut wanted = Vec::new();
        let Some(&id) = self.numbers.get(&completion.qp_num) else { return wanted };
        let Some(qp) = self.qps.get_mut(&id) else { return wanted };
        if matches!(completion.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm) {
            wanted.extend(self.received(id, completion));
            return wanted;
        }
        let failed = completion.status != WcStatus::Success;
        let (mut refused, mut unbound) = (None, None);
        while let Some(posted) = qp.sends.pop_front_if(|posted| is_reached(posted, completion)) {
            let last = match completion.extra {
                WcExtra::Place(place) => posted.place == place,
                _ => posted.signaled && posted.wr_id == completion.wr_id,
            };
            if last && completion.status == WcStatus::RemAccessErr && !planned {
                refused = posted.rkey.map(|rkey| (rkey, posted.trace.clone()));
            }
            if last && completion.status == WcStatus::MwBindErr && !planned {
                unbound = Some(posted.trace.clone());
            }
            if !failed {
                let Posted { wr_id, sges, memory, trace, .. } = posted;
                let request = Request { qp: id, what: "send", wr_id, posted: trace };
                wanted.push(Wanted { request, sges, memory, len: u64::MAX });
            }
            if last {
                break;
            }
        }
        if let Some((rkey, trace)) = refused {
            self.refused(completion, rkey, trace);
        }
        if let Some(trace) = unbound {
            self.not_bound(completion, trace);
        }
        wanted
    }

    /// The program changed memory that a peer was in the middle of a write to, through a queue pair.
    pub fn disturbed(&mut self, id: QpId) {
        let num = self.number_of(id);
        let what = format!("memory was changed while the peer of {} was writing to it", named(num));
        self.unordered(id, what);
    }

    /// A send is about to be posted from memory that a peer is in the middle of a write to.
    pub fn sent_in_progress(&mut self, id: QpId, wr_id: u64) {
        let num = self.number_of(id);
        let what = format!(
            "send {wr_id:#x} of {} is posted from memory that a peer is still writing to",
            named(num)
        );
        self.unordered(id, what);
    }

    fn unordered(&mut self, id: QpId, what: String) {
        let made = self.qps.get(&id).map(|qp| ("created here", qp.made.clone()));
        self.report_once(Kind::WriteOrder, id.0, what, made.into_iter().collect());
    }

    /// A message for a queue pair found no receive.
    pub fn starved(&mut self, id: QpId) {
        let Some(qp) = self.qps.get(&id) else { return };
        let what = format!(
            "a message arrived for queue pair {:#08x}, which had no posted receive",
            qp.num.0
        );
        let made = qp.made.clone();
        self.report_once(Kind::MissingReceive, id.0, what, vec![("created here", made)]);
    }
}
