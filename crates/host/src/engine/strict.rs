//! The strict mode at work: tells the checker of the calls of the program, and gives out what it finds.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;

use quipu_cabi::{Hold, spared};
use quipu_nic::mem::{AccessError, Key};
use quipu_nic::{
    AhId, Completion, CqId, Fault, MrId, QpAttr, QpAttrMask, QpId, QpState, SendWr, Sge, SrqId,
    Time, Whose,
};
use quipu_strict::{Checker, End, Memory, Report, Wanted};

use super::core::Core;
use crate::config::{Config, StrictMode};
use crate::error::{EngineError, OpenError};
use crate::sys;

/// A checker, and where its reports go.
pub(crate) struct Strict {
    pub(crate) checker: Checker,
    mode: StrictMode,
    log: Option<File>,
    /// The keys of regions.
    keys: HashMap<MrId, u32>,
}

impl Strict {
    /// The strict mode, if `config` asks for it.
    ///
    /// # Errors
    ///
    /// Its log cannot be written.
    pub(crate) fn open(config: &Config) -> Result<Option<Box<Self>>, OpenError> {
        let Some(mode) = config.strict else { return Ok(None) };
        let log = config.strict_log.as_ref().map(|path| {
            let refused = |error| OpenError::StrictLog(format!("{}: {error}", path.display()));
            sys::log(path).map_err(refused)
        });
        let log = log.transpose()?;
        let checker = Checker::ignoring(config.strict_ignore.clone());
        Ok(Some(Box::new(Self { checker, mode, log, keys: HashMap::new() })))
    }

    /// Gives out what was found.
    pub(crate) fn give_out(&mut self) {
        while let Some(report) = self.checker.poll_report() {
            self.write(&report);
            if self.mode == StrictMode::Abort {
                std::process::abort();
            }
        }
    }

    fn write(&mut self, report: &Report) {
        let _hold = Hold::new();
        // A program goes on whose log cannot be written. What is written at once is not mixed with what
        // others write there.
        let _ = match &mut self.log {
            Some(file) => spared(|| file.write_all((report.json() + "\n").as_bytes())),
            None => std::io::stderr().write_all(format!("{report}\n").as_bytes()),
        };
    }

    /// Says at the end of the process what was found; whether that is to be its exit code.
    pub(crate) fn sum_up(&mut self) -> bool {
        let tally = self.checker.tally();
        let _ = std::io::stderr().write_all(format!("quipu: strict: {tally}\n").as_bytes());
        self.mode == StrictMode::Fail && tally.total() > 0
    }
}

/// The adapter's refusal in the outcome of a call; `None` if it was refused by somebody else.
fn judged(outcome: &Result<(), EngineError>) -> Option<Result<(), &Fault>> {
    match outcome {
        Ok(()) => Some(Ok(())),
        Err(EngineError::Fault(fault)) => Some(Err(fault)),
        Err(_) => None,
    }
}

impl Core {
    /// Begins to watch the program, if there is anything to watch it by.
    pub(crate) fn watch_by(&mut self, strict: Option<Box<Strict>>) {
        if strict.is_some() {
            self.adapter.watch_peers();
            self.adapter.watch_lent();
        }
        self.strict = strict;
        self.watched = self.strict.is_some() || self.faults.is_some();
    }

    /// Posts a send while faults are planned or the program is watched.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_send`](quipu_nic::Adapter::post_send), or what a plan says.
    #[cold]
    pub(crate) fn post_send_watched(
        &mut self,
        qp: QpId,
        wr: &SendWr<'_>,
    ) -> Result<(), EngineError> {
        let mut memory = Memory::Unknown;
        let mut errors = Vec::new();
        if let Some(strict) = &mut self.strict {
            if strict.checker.is_full_now(qp) {
                return Err(Fault::QueueFull.into());
            }
            let to_read = strict.checker.to_read(wr);
            memory = self.adapter.fingerprint(qp, to_read).map_or(memory, Memory::Source);
            if self.adapter.is_in_progress(qp, to_read) {
                strict.checker.sent_in_progress(qp, wr.wr_id);
            }
            let (sges, written) = strict.checker.to_access(wr);
            self.learn_keys(sges);
            errors = self.element_errors(Whose::Sends(qp), sges, written);
            if written {
                memory = self.lend(Whose::Sends(qp), sges);
            }
        }
        let outcome = if self.faults.is_some() {
            self.post_send_planned(qp, wr)
        } else {
            self.adapter.post_send(qp, wr).map_err(EngineError::from)
        };
        if let (Some(strict), Some(judged)) = (&mut self.strict, judged(&outcome)) {
            let sent = judged.is_ok();
            let place = self.adapter.last_place(qp);
            strict.checker.posted_send(qp, (wr, place), memory, &errors, judged);
            if sent {
                strict.checker.posted_where(qp, wr, self.adapter.config().datagram_mtu);
            }
            strict.give_out();
            self.ring_watched(qp);
        }
        outcome
    }

    /// Whether the strict mode takes a send queue for full where the adapter has room for one more behind
    /// `ahead` others.
    #[cold]
    pub(crate) fn is_full_strictly(&mut self, qp: QpId, ahead: u32) -> bool {
        self.strict.as_mut().is_some_and(|strict| strict.checker.is_full(qp, ahead))
    }

    /// Notes that one of several sends, which are posted all or not at all, was refused.
    #[cold]
    pub(crate) fn watch_refused(&mut self, qp: QpId, wr: &SendWr<'_>, fault: &Fault) {
        let Some(strict) = &mut self.strict else { return };
        strict.checker.refused_send(qp, wr.wr_id, fault);
        strict.give_out();
    }

    /// Rings at once, so that what happens to memory from now on is the program's doing.
    fn ring_watched(&mut self, qp: QpId) {
        let now = self.now();
        self.adapter.ring_doorbell(now, qp);
        self.settle_posts(now);
        self.adapter.renew_lent();
    }

    /// What is to be known of memory that the adapter is to write to.
    fn lend(&mut self, whose: Whose, sges: &[Sge]) -> Memory {
        self.adapter.lend(whose, sges).map_or(Memory::Unknown, Memory::Target)
    }

    /// Posts a receive while faults are planned or the program is watched.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_recv`](quipu_nic::Adapter::post_recv), or what a plan says.
    #[cold]
    pub(crate) fn post_recv_watched(
        &mut self,
        qp: QpId,
        wr_id: u64,
        sges: &[Sge],
    ) -> Result<(), EngineError> {
        self.learn_keys(sges);
        let errors = self.element_errors(Whose::Receives(qp), sges, true);
        let memory = self.lend(Whose::Receives(qp), sges);
        let outcome = if self.faults.is_some() {
            self.post_recv_planned(qp, wr_id, sges)
        } else {
            let now = self.now();
            self.adapter.post_recv(now, qp, wr_id, sges).map_err(EngineError::from)
        };
        if let (Some(strict), Some(judged)) = (&mut self.strict, judged(&outcome)) {
            strict.checker.posted_recv(qp, wr_id, (sges, &errors), memory, judged);
            strict.give_out();
        }
        outcome
    }

    /// Posts a receive to a shared queue while faults are planned or the program is watched.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_srq_recv`](quipu_nic::Adapter::post_srq_recv), or what a plan says.
    #[cold]
    pub(crate) fn post_srq_recv_watched(
        &mut self,
        srq: SrqId,
        wr_id: u64,
        sges: &[Sge],
    ) -> Result<(), EngineError> {
        self.learn_keys(sges);
        let errors = self.element_errors(Whose::Shared(srq), sges, true);
        let memory = self.lend(Whose::Shared(srq), sges);
        let outcome = if self.faults.is_some() {
            self.post_srq_recv_planned(srq, wr_id, sges)
        } else {
            let now = self.now();
            self.adapter.post_srq_recv(now, srq, wr_id, sges).map_err(EngineError::from)
        };
        if let (Some(strict), Some(judged)) = (&mut self.strict, judged(&outcome)) {
            strict.checker.posted_srq_recv(srq, wr_id, (sges, &errors), memory, judged);
            strict.give_out();
        }
        outcome
    }

    /// Notes that an address handle is destroyed.
    #[cold]
    pub(crate) fn watch_destroy_ah(&mut self, ah: AhId) {
        let Some(strict) = &mut self.strict else { return };
        strict.checker.ah_destroyed(ah);
        strict.give_out();
    }

    /// Notes how many bytes a call of rdma_cm is given for the peer, where there is room for `most`.
    #[cold]
    pub(crate) fn watch_private_data(&mut self, call: &str, len: usize, most: usize) {
        let Some(strict) = &mut self.strict else { return };
        strict.checker.private_data(call, len, most);
        strict.give_out();
    }

    /// What the adapter finds wrong with each element of a request, now that it is posted.
    fn element_errors(
        &self,
        whose: Whose,
        sges: &[Sge],
        written: bool,
    ) -> Vec<Option<AccessError>> {
        if self.strict.is_none() {
            return Vec::new();
        }
        sges.iter().map(|sge| self.adapter.element_error(whose, sge, written)).collect()
    }

    /// Regions that were made in other ways than by `ibv_reg_mr` are met first when they are used.
    fn learn_keys(&mut self, sges: &[Sge]) {
        let Some(strict) = &mut self.strict else { return };
        for sge in sges {
            if !strict.checker.knows(sge.lkey.0)
                && let Some(info) = self.adapter.region_of(sge.lkey)
            {
                strict.checker.registered(sge.lkey.0, info.iova, info.len);
            }
        }
    }

    /// Notes a registration, or its new shape.
    #[cold]
    pub(crate) fn watch_region(&mut self, mr: MrId) {
        let Some(strict) = &mut self.strict else { return };
        let Ok(info) = self.adapter.query_mr(mr) else { return };
        let key = info.key.0;
        if let Some(old) = strict.keys.insert(mr, key).filter(|&old| old != key) {
            let receives = self.adapter.receives_naming(Key(old));
            strict.checker.deregistered(old, End::Changed, &receives);
        }
        strict.checker.registered(key, info.iova, info.len);
        strict.give_out();
    }

    /// The receives that name a region, which are posted on when it has ended.
    #[cold]
    pub(crate) fn receives_into(&self, mr: MrId) -> Vec<(Whose, u64)> {
        let key = self.strict.as_ref().and_then(|strict| strict.keys.get(&mr));
        key.map_or_else(Vec::new, |&key| self.adapter.receives_naming(Key(key)))
    }

    /// Notes that a registration has ended, which those receives named.
    #[cold]
    pub(crate) fn watch_dereg(&mut self, mr: MrId, receives: &[(Whose, u64)]) {
        let Some(strict) = &mut self.strict else { return };
        if let Some(key) = strict.keys.remove(&mr) {
            strict.checker.deregistered(key, End::Deregistered, receives);
            strict.give_out();
        }
    }

    /// Changes a queue pair, and notes how that went.
    ///
    /// # Errors
    ///
    /// As [`Adapter::modify_qp`](quipu_nic::Adapter::modify_qp).
    pub(crate) fn watch_modify(
        &mut self,
        now: Time,
        qp: QpId,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Result<(), Fault> {
        let before = self.strict.as_ref().and_then(|_| self.adapter.query_qp(qp).ok());
        let outcome = self.adapter.modify_qp(now, qp, attr, mask);
        if let (Some(strict), Some(before)) = (&mut self.strict, before) {
            let from = before.attr.state;
            let to = if mask.contains(QpAttrMask::STATE) { attr.state } else { from };
            match &outcome {
                Ok(()) => strict.checker.qp_modified(qp, from, to),
                Err(fault) => strict.checker.modify_refused(qp, from, to, fault),
            }
            strict.give_out();
        }
        outcome
    }

    /// Notes that a queue pair is destroyed, which was in that state.
    #[cold]
    pub(crate) fn watch_destroy(&mut self, qp: QpId, state: QpState) {
        let Some(strict) = &mut self.strict else { return };
        strict.checker.qp_destroyed(qp, state);
        strict.give_out();
    }

    /// Notes that a shared receive queue is destroyed.
    #[cold]
    pub(crate) fn watch_destroy_srq(&mut self, srq: SrqId) {
        if let Some(strict) = &mut self.strict {
            strict.checker.srq_destroyed(srq);
        }
    }

    /// Notes that completions were polled, and looks for messages that found no receive.
    #[cold]
    pub(crate) fn watch_poll(&mut self, cq: CqId, completions: &[Completion]) {
        let Some(strict) = &mut self.strict else { return };
        for qp in self.adapter.take_starved() {
            strict.checker.starved(qp);
        }
        for qp in self.adapter.take_disturbed() {
            strict.checker.disturbed(qp);
        }
        for denied in self.adapter.take_denied() {
            strict.checker.denied(&denied);
        }
        let planned = self.faults.is_some();
        for completion in completions {
            for wanted in strict.checker.polled(cq, completion, planned) {
                let Wanted { request, sges, memory, len } = wanted;
                let change = match memory {
                    Memory::Unknown => None,
                    Memory::Source(was) => {
                        let now = self.adapter.fingerprint(request.qp, &sges);
                        now.filter(|&now| now != was).map(|_| None)
                    }
                    Memory::Target(loan) => self.adapter.give_back(loan, len).map(Some),
                };
                if let Some(byte) = change {
                    strict.checker.changed(request, byte);
                }
            }
        }
        strict.give_out();
        self.adapter.renew_lent();
    }

    /// Notes that a thread is about to sleep, after which the program alone changes memory.
    #[inline]
    pub(crate) fn watch_sleep(&mut self) {
        if self.strict.is_some() {
            self.adapter.renew_lent();
        }
    }
}

impl super::Engine {
    /// Says what the strict mode has found and a plan of faults has done, where a signal ends the process.
    /// Nothing if the engine stays occupied.
    pub fn sum_up(&self) {
        let Some(mut core) = self.enter_at_exit() else { return };
        if let Some(faults) = &mut core.faults {
            faults.sum_up();
        }
        core.watch_poll(CqId::NONE, &[]);
        if let Some(strict) = &mut core.strict {
            strict.sum_up();
        }
    }

    /// Says what the strict mode has found, at the end of the process; whether that is to be its exit
    /// code. Nothing if the engine stays occupied, as [`shutdown_flush`](Self::shutdown_flush).
    #[must_use]
    pub fn strict_verdict(&self) -> bool {
        let Some(mut core) = self.enter_at_exit() else { return false };
        // What is noticed since the program polled last.
        core.watch_poll(CqId::NONE, &[]);
        core.strict.as_mut().is_some_and(|strict| strict.sum_up())
    }
}
