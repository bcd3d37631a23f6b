//! Failures on purpose: what a plan of faults has the adapter do, so that a program meets in a test what
//! hardware does to it once a year.
//!
//! Nobody draws anything here: whoever posts a request says what is to become of it (its [`Fate`]), and
//! whoever owns the adapter cuts queue pairs off or raises events. All of it goes the ways that real
//! failures go: a request fails in its turn, what is behind it is flushed, the peer is told what it would
//! be told. Where nothing of the kind is asked for, the only trace is a bit of a request's flags.

use quipu_inet as inet;
use quipu_mem::{Key, Sge};

use crate::adapter::{Adapter, Alarm, Hub};
use crate::connect;
use crate::datagram;
use crate::doorbell;
use crate::error::{Fault, Loss};
use crate::plain;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::qpip::{connections, udp};
use crate::receive;
use crate::requester;
use crate::transmit;
use crate::types::{
    AsyncEvent, Completion, CqId, QpId, QpState, SendFlags, SendOp, SendWr, SrqId, Time, WcStatus,
};

/// What is to become of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It fails with this status, in its turn. A receive fails when a message comes for it.
    Fail(WcStatus),
    /// It is executed as ever, but its completion shows up so many nanoseconds late, and those behind it
    /// in the same queue with it.
    Late(u64),
    /// It begins at this time at the earliest: a send that a slow peer is long about; a receive that is
    /// posted late, so that messages find none before.
    From(Time),
    /// The peer refuses a send so often for want of a receive, and asks for a pause of so many nanoseconds
    /// each time. Beyond `rnr_retry` refusals it fails as IBA 9.7.5.2.8 says. No receive has this fate.
    Refused {
        /// Refusals.
        times: u32,
        /// The pause after each.
        wait_ns: u64,
    },
}

/// Whether something keeps a queue pair from its peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Nothing does.
    #[default]
    Not,
    /// Nothing gets through for now.
    Off,
    /// The peer is dead to it.
    Dead,
}

impl SendFlags {
    /// A fate is noted for the request. Not among the flags that programs know.
    pub(crate) const FATED: Self = Self::from_bits_retain(1 << 31);
}

/// What a request that is about to begin meets.
pub(crate) enum Met {
    /// Nothing: it begins.
    Nothing,
    /// It waits.
    Wait,
    /// It fails.
    Failure(WcStatus),
}

/// Carries out the fate of the request at `sq.next`, if it has one.
#[inline]
pub(crate) fn meet<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, flags: SendFlags) -> Met {
    if flags.contains(SendFlags::FATED) { meet_noted(qp, hub) } else { Met::Nothing }
}

#[cold]
fn meet_noted<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) -> Met {
    let next = qp.sq.next;
    let Some(entry) = qp.fates.iter_mut().find(|(position, _)| *position == next) else {
        return Met::Nothing;
    };
    match &mut entry.1 {
        Fate::Late(_) => Met::Nothing,
        Fate::Fail(status) => Met::Failure(*status),
        Fate::From(at) if *at > hub.now => {
            let at = *at;
            hold(qp, hub, at);
            Met::Wait
        }
        Fate::Refused { times, wait_ns } if *times > 0 => {
            *times -= 1;
            let at = hub.now.after(*wait_ns);
            let tries = qp.requester.rnr_tries;
            if qp.attr.rnr_retry != 7 && tries >= qp.attr.rnr_retry {
                return Met::Failure(WcStatus::RnrRetryExcErr);
            }
            qp.requester.rnr_tries = tries.saturating_add(1);
            hold(qp, hub, at);
            Met::Wait
        }
        Fate::From(_) | Fate::Refused { .. } => {
            qp.fates.retain(|(position, _)| *position != next);
            Met::Nothing
        }
    }
}

/// Lets nothing begin before `at`.
fn hold<P>(qp: &mut Qp, hub: &mut Hub<P>, at: Time) {
    // A wait that the peer asked for ends with a word to the peer, which must not be forgotten.
    qp.requester.held |= qp.requester.rnr_until.is_none();
    qp.requester.rnr_until = Some(at);
    requester::set_alarm(qp, hub);
}

/// A wait is over: goes on, and says so to a peer that asked for it.
pub(crate) fn resume<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if qp.requester.cut != Cut::Not {
        qp.requester.rnr_until = Some(Time::NEVER);
        return;
    }
    qp.requester.rnr_until = None;
    let held = std::mem::take(&mut qp.requester.held);
    match &mut qp.path {
        Path::Stream(stream) if held => stream.make_ready(&mut hub.ready),
        Path::Stream(_) => receive::replies::resume(qp, hub),
        Path::Channel(_) => {
            receive::channel::run(qp, hub);
        }
        Path::Datagrams { .. } => datagram::kick(qp, hub),
        Path::Tcp(_) => transmit::frames::hand_over(qp, hub),
        Path::Udp(_) => udp::kick(qp, hub),
        _ => {}
    }
}

/// How late the completion of the request at `position` is to show up.
#[cold]
pub(crate) fn lateness(qp: &mut Qp, position: u32) -> u64 {
    let found = qp.fates.iter().position(|(place, _)| *place == position);
    match found.and_then(|index| qp.fates.remove(index)) {
        Some((_, Fate::Late(ns))) => ns,
        _ => 0,
    }
}

impl<P: Probe> Hub<P> {
    /// As [`complete`](Self::complete), with a completion that shows up `late_ns` later.
    #[cold]
    pub(crate) fn complete_late(
        &mut self,
        id: CqId,
        completion: Completion,
        solicited: bool,
        late_ns: u64,
    ) -> bool {
        if late_ns == 0 {
            return self.complete(id, completion, solicited);
        }
        let at = self.now.after(late_ns);
        let Some(cq) = self.cqs.get_mut(id) else { return true };
        if !cq.is_holding() {
            self.alarms.insert((at, Alarm::Late(id)));
        }
        cq.hold(at);
        self.complete(id, completion, solicited)
    }

    /// The completions that were to show up by now do.
    pub(crate) fn release_completions(&mut self, id: CqId) {
        let now = self.now;
        while let Some(pushed) = self.cqs.get_mut(id).and_then(|cq| cq.release(now)) {
            self.tell(id, pushed);
        }
        let Some(cq) = self.cqs.get(id) else { return };
        if let Some(next) = cq.held_until() {
            self.alarms.insert((next, Alarm::Late(id)));
        }
    }

    /// A completion queue that held completions back is no more.
    pub(crate) fn forget_held(&mut self, id: CqId) {
        if let Some(at) = self.cqs.get(id).and_then(|cq| cq.held_until()) {
            self.alarms.remove(&(at, Alarm::Late(id)));
        }
    }
}

impl<P: Probe> Adapter<P> {
    /// As [`post_send`](Self::post_send), with a request that something is to become of. One that the peer
    /// is to refuse for its key names a key that the peer cannot have, so that the peer itself refuses it.
    ///
    /// # Errors
    /// As `post_send`.
    pub fn post_send_fated(
        &mut self,
        now: Time,
        id: QpId,
        wr: &SendWr<'_>,
        fate: Fate,
    ) -> Result<(), Fault> {
        self.hub.now = now;
        let qp = self.qps.get_mut(id).ok_or(Fault::NoSuchObject)?;
        let length = doorbell::acceptable(qp, wr, self.hub.config.max_message)?;
        let to = doorbell::destination(qp, &self.hub, wr)?;
        let position = qp.sq.tail;
        let mut wr = *wr;
        let silent = !qp.sq_sig_all && !wr.flags.contains(SendFlags::SIGNALED);
        let has_key = length > 0 || matches!(wr.op, SendOp::Flush(_));
        let spoilt = fate == Fate::Fail(WcStatus::RemAccessErr) && has_key && hears_of(qp, &wr.op);
        if (matches!(fate, Fate::Late(_)) && silent) || (spoilt && spoil_key(&mut wr.op)) {
            return self.post_send(id, &wr);
        }
        if !doorbell::has_room(qp, &self.hub) {
            return Err(Fault::QueueFull);
        }
        wr.flags |= SendFlags::FATED;
        qp.sq.push(&wr, length);
        if let Some(to) = to {
            qp.sq.set_destination(to);
        }
        qp.requester.waiting_bytes += u64::from(length);
        qp.fates.push_back((position, fate));
        Ok(())
    }

    /// As [`post_recv`](Self::post_recv), with a request that something is to become of.
    ///
    /// # Errors
    /// As `post_recv`.
    pub fn post_recv_fated(
        &mut self,
        now: Time,
        id: QpId,
        wr_id: u64,
        sges: &[Sge],
        fate: Fate,
    ) -> Result<(), Fault> {
        let qp = self.qps.get_mut(id).ok_or(Fault::NoSuchObject)?;
        let fits = sges.len() <= qp.rq.max_sge();
        let room = doorbell::has_room_for_receives(qp, &self.hub) && fits;
        let is_tcp = matches!(qp.path, Path::Tcp(_));
        // The window says what is posted: a receive cannot be there and not be there.
        let plain = is_tcp && matches!(fate, Fate::From(_));
        let over = matches!(qp.state, QpState::Reset | QpState::Err);
        if !room || over || qp.srq.is_some() || plain {
            return self.post_recv(now, id, wr_id, sges);
        }
        qp.rq.push(wr_id, sges);
        qp.rq.doom_last(fate);
        self.hub.now = now;
        if is_tcp {
            receive::frames::posted(qp, &mut self.hub);
            return Ok(());
        }
        requester::set_alarm(qp, &mut self.hub);
        self.hub.nudged.push_back(id);
        self.serve_nudged();
        Ok(())
    }

    /// As [`post_srq_recv`](Self::post_srq_recv), with a request that something is to become of. One that is
    /// held back holds back those behind it, for all queue pairs of the queue.
    ///
    /// # Errors
    /// As `post_srq_recv`.
    pub fn post_srq_recv_fated(
        &mut self,
        now: Time,
        id: SrqId,
        wr_id: u64,
        sges: &[Sge],
        fate: Fate,
    ) -> Result<(), Fault> {
        let srq = self.hub.srqs.get_mut(id).ok_or(Fault::NoSuchObject)?;
        let held = matches!(fate, Fate::From(_));
        let room = srq.queue.len() < srq.queue.capacity() && sges.len() <= srq.queue.max_sge();
        if !room {
            return self.post_srq_recv(now, id, wr_id, sges);
        }
        let waited_for = !held && !srq.awaited_by.is_empty();
        srq.queue.push(wr_id, sges);
        srq.queue.doom_last(fate);
        self.hub.now = now;
        self.watch_shared(id);
        if waited_for {
            self.call_waiters(id);
        }
        Ok(())
    }

    /// Sets when receives of a shared queue that are held back are there.
    fn watch_shared(&mut self, id: SrqId) {
        let Some(srq) = self.hub.srqs.get(id) else { return };
        let (mut alarm, at) = (srq.alarm, srq.queue.opens_at());
        self.hub.set_alarm(&mut alarm, Alarm::Srq(id), at);
        if let Some(srq) = self.hub.srqs.get_mut(id) {
            srq.alarm = alarm;
        }
    }

    /// Receives of a shared queue that were held back until now are there.
    pub(crate) fn open_shared(&mut self, id: SrqId) {
        let now = self.hub.now;
        let Some(srq) = self.hub.srqs.get_mut(id) else { return };
        srq.alarm = None;
        srq.queue.open(now);
        self.watch_shared(id);
        self.call_waiters(id);
    }

    /// Nothing of a queue pair gets through to its peer any more: requests wait, and fail with
    /// [`WcStatus::RetryExcErr`] after the queue pair's own time (for ever, if it has none). To be called
    /// again when more was posted. What the peer asks is still answered.
    pub fn cut_off(&mut self, now: Time, id: QpId) {
        self.hub.now = now;
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        if !is_connected(qp) {
            return;
        }
        if qp.requester.cut == Cut::Not {
            qp.requester.cut = Cut::Off;
        }
        hold(qp, hub, Time::NEVER);
        connect::start_deadline(qp, hub);
    }

    /// Ends what [`cut_off`](Self::cut_off) began, for requests that have not failed by now.
    pub fn restore(&mut self, now: Time, id: QpId) {
        self.hub.now = now;
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        let stands = matches!(qp.path, Path::Stream(_) | Path::Channel(_));
        if qp.requester.cut != Cut::Off {
            return;
        }
        qp.requester.cut = Cut::Not;
        if stands {
            qp.requester.deadline = None;
        }
        resume(qp, hub);
        requester::set_alarm(qp, hub);
        if !stands && qp.may_receive() {
            self.begin_connection(id);
        }
    }

    /// The peer of a queue pair is dead to it, and it to the peer: the connection is gone, without a word.
    /// What is outstanding and what is still posted fails as [`cut_off`](Self::cut_off) says.
    pub fn lose_peer(&mut self, now: Time, id: QpId) {
        self.hub.now = now;
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        if !is_connected(qp) {
            return;
        }
        if let Path::Tcp(_) = qp.path {
            return connections::failed(qp, hub, inet::tcp::Failure::TimedOut);
        }
        if qp.qp_type.is_plain() {
            // It has no time after which it gives up: it ends with its stream, of which the program is told.
            return plain::lost(qp, hub, Loss::TimedOut);
        }
        connect::detach(qp, hub);
        qp.requester.reconnect_at = None;
        qp.requester.cut = Cut::Dead;
        self.cut_off(now, id);
    }

    /// Raises an event, with what goes with it: a queue pair that failed is in error (IBA 11.6.3.2), and so
    /// is every one whose completion queue or shared receive queue failed. One in RESET does nothing that
    /// could fail, and a completion queue fails once.
    pub fn strike(&mut self, now: Time, event: AsyncEvent) {
        self.hub.now = now;
        match event {
            AsyncEvent::QpFatal(id) | AsyncEvent::QpReqErr(id) | AsyncEvent::QpAccessErr(id) => {
                if let Some((qp, hub)) = self.qp_and_hub(id)
                    && qp.state != QpState::Reset
                {
                    requester::to_error(qp, hub, Some(event));
                }
            }
            AsyncEvent::CqErr(cq) => {
                match self.hub.cqs.get_mut(cq) {
                    Some(failing) if !failing.overran() => failing.fail(),
                    _ => return,
                }
                self.hub.raise(event);
                self.fail_all(true, |qp| qp.send_cq == cq || qp.recv_cq == cq);
            }
            AsyncEvent::SrqErr(srq) => {
                self.hub.raise(event);
                self.fail_all(true, |qp| qp.srq == Some(srq));
            }
            AsyncEvent::DeviceFatal => {
                self.hub.raise(event);
                self.fail_all(false, |_| true);
                self.fail_work_queues();
            }
            _ => self.hub.raise(event),
        }
    }

    /// Takes every queue pair of some kind to error, with an event of its own or without.
    fn fail_all(&mut self, told: bool, which: impl Fn(&Qp) -> bool) {
        for id in self.qps.keys() {
            if let Some((qp, hub)) = self.qp_and_hub(id)
                && which(qp)
                && qp.state != QpState::Reset
            {
                let event = told.then_some(AsyncEvent::QpFatal(id));
                requester::to_error(qp, hub, event);
            }
        }
    }
}

/// Whether a queue pair waits for what its peer says.
fn is_connected(qp: &Qp) -> bool {
    !matches!(qp.state, QpState::Reset | QpState::Err) && qp.qp_type.is_reliable()
}

/// Whether a request that the peer refuses fails with what the peer says: it waits for that.
fn hears_of(qp: &Qp, op: &SendOp) -> bool {
    qp.qp_type.is_reliable() && (!qp.qp_type.is_plain() || matches!(op, SendOp::Read { .. }))
}

/// Has a request name a key that no adapter gives out; `false` if it names none.
fn spoil_key(op: &mut SendOp) -> bool {
    match op {
        SendOp::Write { rkey, .. }
        | SendOp::WriteImm { rkey, .. }
        | SendOp::Read { rkey, .. }
        | SendOp::CompareSwap { rkey, .. }
        | SendOp::AtomicWrite { rkey, .. }
        | SendOp::FetchAdd { rkey, .. } => {
            *rkey = Key::NONE.0;
            true
        }
        SendOp::Flush(flush) => {
            flush.rkey = Key::NONE.0;
            true
        }
        _ => false,
    }
}
