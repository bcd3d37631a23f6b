//! Faults on purpose: asks the plan what becomes of a call, and has the adapter do it.
//!
//! All of it is behind one pointer of the core, which is null unless there is a plan.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use quipu_fault::{
    Call, CmEvent, Effect, Errno, EventKind, Injector, Occasion, Opcode, Plan, Process, QpRef,
    Replay, Strike,
};
use quipu_nic::{
    AsyncEvent, CqId, Fate, Payload, QpId, QpInit, QpNum, QpState, SendWr, Sge, SrqId, Time,
};

use super::Engine;
use super::core::Core;
use crate::config::Config;
use crate::error::{EngineError, OpenError};
use crate::fault_log::FaultLog;
use crate::lock::Guard;

/// What the plan knows of a queue pair.
#[derive(Clone, Copy, Debug)]
struct Known {
    shown: QpRef,
    send_cq: CqId,
    srq: Option<SrqId>,
}

/// A plan at work.
pub(crate) struct Faults {
    injector: Injector,
    log: FaultLog,
    qps: BTreeMap<QpId, Known>,
    cqs: HashMap<CqId, u32>,
    qps_created: u32,
    cqs_created: u32,
    /// When the port comes up again, if it is down.
    port_down_until: Option<Time>,
    removed: bool,
    /// What becomes of the call of rdma_cm that is being made.
    cm_event: Option<(CmEvent, i32)>,
}

impl Faults {
    /// The plan that `config` names, if it has anything for this process.
    ///
    /// # Errors
    ///
    /// The plan, or the log that is to be repeated, cannot be read or makes no sense.
    pub(crate) fn open(config: &Config, now: Time) -> Result<Option<Box<Self>>, OpenError> {
        let Some(path) = &config.faults else { return Ok(None) };
        let plan = read(path)
            .and_then(|text| Plan::parse(&text, &path.display().to_string()).map_err(told))
            .map_err(OpenError::Faults)?;
        let replay = config.fault_replay.as_ref().map(|path| {
            let text = read(path)?;
            Replay::parse(&text, &path.display().to_string(), &plan).map_err(told)
        });
        let replay = replay.transpose().map_err(OpenError::Faults)?;
        let program = std::env::current_exe().unwrap_or_default();
        let program = program.file_name().unwrap_or_default().to_string_lossy();
        let process = Process { program: &program, env: &|name| std::env::var(name).ok() };
        let injector = Injector::new(&plan, &process, replay, now);
        if injector.is_empty() {
            tracing::debug!(plan = plan.file, program = %program, "no fault is for this process");
            return Ok(None);
        }
        let log = FaultLog::open(config.fault_log.as_deref(), &plan, &program)?;
        Ok(Some(Box::new(Self {
            injector,
            log,
            qps: BTreeMap::new(),
            cqs: HashMap::new(),
            qps_created: 0,
            cqs_created: 0,
            port_down_until: None,
            removed: false,
            cm_event: None,
        })))
    }

    /// When something must be done.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let up = self.port_down_until.filter(|&at| at != Time::NEVER);
        [self.injector.poll_timeout(), up].into_iter().flatten().min()
    }

    /// Notes a queue pair.
    pub(crate) fn add_qp(&mut self, id: QpId, num: QpNum, init: &QpInit) {
        self.qps_created += 1;
        let number = |cq| self.cqs.get(&cq).copied().unwrap_or(0);
        let cqs = [number(init.send_cq), number(init.recv_cq)];
        let has_srq = init.srq.is_some();
        let shown = QpRef { nth: self.qps_created, num: num.0, cqs, has_srq };
        self.qps.insert(id, Known { shown, send_cq: init.send_cq, srq: init.srq });
    }

    /// Forgets a queue pair.
    pub(crate) fn remove_qp(&mut self, id: QpId) {
        self.qps.remove(&id);
    }

    /// Notes a completion queue.
    pub(crate) fn add_cq(&mut self, id: CqId) {
        self.cqs_created += 1;
        self.cqs.insert(id, self.cqs_created);
    }

    /// Says at the end of the process what was done.
    pub(crate) fn sum_up(&mut self) {
        self.log.sum_up(&self.injector);
    }

    fn write_log(&mut self) {
        while let Some(record) = self.injector.poll_record() {
            self.log.write(&record);
        }
    }
}

fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn read(path: &std::path::Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

impl Core {
    /// Tells the plan of a call: the fate of what is posted by it, if it has one.
    ///
    /// # Errors
    ///
    /// The plan refuses the call, or the device is gone.
    #[cold]
    pub(crate) fn consult(
        &mut self,
        mut occasion: Occasion,
        qp: Option<QpId>,
    ) -> Result<Option<Fate>, EngineError> {
        let now = self.now();
        let qp = qp.and_then(|qp| self.events.openings.find(qp).ok());
        let Some(faults) = &mut self.faults else { return Ok(None) };
        let call = occasion.call;
        let gone = !call.outlives_device();
        if faults.removed && gone {
            return Err(EngineError::Injected { call, errno: Errno::EIO });
        }
        let known = qp.and_then(|qp| faults.qps.get(&qp)).copied();
        occasion.qp = known.map(|known| known.shown);
        let effects = faults.injector.call(now, &occasion);
        faults.write_log();
        let (mut outcome, mut struck) = (Ok(None), false);
        for effect in effects {
            match effect {
                Effect::Fate(fate) => outcome = Ok(Some(fate)),
                Effect::Refuse(errno) => outcome = Err(EngineError::Injected { call, errno }),
                Effect::CmEvent(event, status) => {
                    if let Some(faults) = &mut self.faults {
                        faults.cm_event = Some((event, status));
                    }
                }
                effect => {
                    let targets = qp.zip(known).into_iter().collect();
                    self.carry_out_effect(now, effect, targets);
                    struck = true;
                }
            }
        }
        if struck {
            self.settle(now);
            let removed = self.faults.as_ref().is_some_and(|faults| faults.removed);
            if removed && gone && outcome.is_ok() {
                outcome = Err(EngineError::Injected { call, errno: Errno::EIO });
            }
        }
        outcome
    }

    /// The event that a plan has come in place of a call of rdma_cm, or beside it.
    pub(crate) fn take_cm_event(&mut self) -> Option<(CmEvent, i32)> {
        self.faults.as_mut()?.cm_event.take()
    }

    /// Does what the clock has started.
    #[cold]
    pub(crate) fn run_faults(&mut self, now: Time) {
        let Some(faults) = &mut self.faults else { return };
        if faults.poll_timeout().is_none_or(|at| at > now) {
            return;
        }
        if faults.port_down_until.is_some_and(|at| at <= now) {
            faults.port_down_until = None;
            for &qp in faults.qps.keys() {
                self.adapter.restore(now, qp);
            }
            self.adapter.strike(now, AsyncEvent::PortActive);
        }
        let strikes = faults.injector.tick(now);
        faults.write_log();
        for strike in strikes {
            let targets = self.concerned(&strike);
            self.carry_out_effect(now, strike.effect, targets);
        }
    }

    /// The queue pairs that something concerns, in the order of their creation.
    fn concerned(&self, strike: &Strike) -> Vec<(QpId, Known)> {
        let Some(faults) = &self.faults else { return Vec::new() };
        let all = faults.qps.iter().map(|(id, known)| (*id, *known));
        let mut concerned: Vec<_> =
            all.filter(|(_, known)| strike.concerns(&known.shown)).collect();
        concerned.sort_by_key(|(_, known)| known.shown.nth);
        concerned
    }

    fn carry_out_effect(&mut self, now: Time, effect: Effect, targets: Vec<(QpId, Known)>) {
        let Some(faults) = &mut self.faults else { return };
        match effect {
            Effect::Fate(_) | Effect::Refuse(_) | Effect::CmEvent(..) => {}
            Effect::DeadPeer => {
                for (qp, _) in targets {
                    self.adapter.lose_peer(now, qp);
                }
            }
            Effect::PortDown(time) => {
                faults.port_down_until = Some(time.map_or(Time::NEVER, |time| now.after(time)));
                for &qp in faults.qps.keys() {
                    self.adapter.cut_off(now, qp);
                }
                self.adapter.strike(now, AsyncEvent::PortErr);
            }
            Effect::DeviceRemoval => {
                faults.removed = true;
                self.adapter.strike(now, AsyncEvent::DeviceFatal);
                if let Some(cm) = &mut self.cm {
                    cm.remove_device(now.0);
                }
            }
            Effect::Event(kind) => {
                for event in events(kind, &targets) {
                    self.adapter.strike(now, event);
                }
            }
        }
    }

    /// Posts a send under a plan.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_send`](quipu_nic::Adapter::post_send), or what the plan says.
    #[cold]
    pub(crate) fn post_send_planned(
        &mut self,
        qp: QpId,
        wr: &SendWr<'_>,
    ) -> Result<(), EngineError> {
        let bytes = match wr.payload {
            Payload::Sges(sges) => total(sges),
            Payload::Inline(bytes) => bytes.len() as u64,
        };
        let occasion = Occasion {
            opcode: Some(Opcode::from(&wr.op)),
            wr_id: Some(wr.wr_id),
            ..Occasion::of(Call::PostSend).with_bytes(bytes)
        };
        let fate = self.consult(occasion, Some(qp))?;
        let now = self.now();
        let cut = self.faults.as_ref().is_some_and(|faults| faults.port_down_until.is_some());
        if cut {
            self.adapter.cut_off(now, qp);
        }
        match fate {
            Some(fate) => self.adapter.post_send_fated(now, qp, wr, fate)?,
            None => self.adapter.post_send(qp, wr)?,
        }
        if cut {
            // The time of its retries begins.
            self.adapter.cut_off(now, qp);
        }
        Ok(())
    }

    /// Posts a receive under a plan.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_recv`](quipu_nic::Adapter::post_recv), or what the plan says.
    #[cold]
    pub(crate) fn post_recv_planned(
        &mut self,
        qp: QpId,
        wr_id: u64,
        sges: &[Sge],
    ) -> Result<(), EngineError> {
        let occasion = Occasion::of(Call::PostRecv).with_bytes(total(sges));
        let fate = self.consult(Occasion { wr_id: Some(wr_id), ..occasion }, Some(qp))?;
        let now = self.now();
        match fate {
            Some(fate) => self.adapter.post_recv_fated(now, qp, wr_id, sges, fate)?,
            None => self.adapter.post_recv(now, qp, wr_id, sges)?,
        }
        Ok(())
    }

    /// Posts a receive to a shared queue under a plan.
    ///
    /// # Errors
    ///
    /// As [`Adapter::post_srq_recv`](quipu_nic::Adapter::post_srq_recv), or what the plan says.
    #[cold]
    pub(crate) fn post_srq_recv_planned(
        &mut self,
        srq: SrqId,
        wr_id: u64,
        sges: &[Sge],
    ) -> Result<(), EngineError> {
        let occasion = Occasion::of(Call::PostSrqRecv).with_bytes(total(sges));
        let fate = self.consult(Occasion { wr_id: Some(wr_id), ..occasion }, None)?;
        match fate {
            Some(fate) => {
                let now = self.now();
                self.adapter.post_srq_recv_fated(now, srq, wr_id, sges, fate)?;
            }
            None => self.adapter.post_srq_recv(srq, wr_id, sges)?,
        }
        Ok(())
    }
}

fn total(sges: &[Sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.len)).sum()
}

/// The events of a kind, each object's once.
fn events(kind: EventKind, targets: &[(QpId, Known)]) -> Vec<AsyncEvent> {
    use AsyncEvent as E;
    let each = |event: fn(QpId) -> E| targets.iter().map(|(qp, _)| event(*qp)).collect();
    let srqs = |event: fn(SrqId) -> E| {
        let srqs: BTreeSet<SrqId> = targets.iter().filter_map(|(_, known)| known.srq).collect();
        srqs.into_iter().map(event).collect()
    };
    match kind {
        EventKind::CqErr => {
            let cqs: BTreeSet<CqId> = targets.iter().map(|(_, known)| known.send_cq).collect();
            cqs.into_iter().map(E::CqErr).collect()
        }
        EventKind::QpFatal => each(E::QpFatal),
        EventKind::QpReqErr => each(E::QpReqErr),
        EventKind::QpAccessErr => each(E::QpAccessErr),
        EventKind::CommEst => each(E::CommEst),
        EventKind::SqDrained => each(E::SqDrained),
        EventKind::PathMig => each(E::PathMig),
        EventKind::PathMigErr => each(E::PathMigErr),
        EventKind::QpLastWqeReached => each(E::QpLastWqeReached),
        EventKind::SrqErr => srqs(E::SrqErr),
        EventKind::SrqLimitReached => srqs(E::SrqLimitReached),
        EventKind::PortActive => vec![E::PortActive],
        EventKind::PortErr => vec![E::PortErr],
        EventKind::LidChange => vec![E::LidChange],
        EventKind::PkeyChange => vec![E::PkeyChange],
        EventKind::SmChange => vec![E::SmChange],
        EventKind::ClientReregister => vec![E::ClientReregister],
        EventKind::GidChange => vec![E::GidChange],
    }
}

impl Engine {
    /// Enters the engine for a call of the program, unless a plan of faults refuses it.
    #[inline]
    pub(super) fn enter_for(&self, call: Call) -> Result<Guard<'_, Core>, EngineError> {
        self.enter_at(Occasion::of(call), None)
    }

    /// The same for a call about a queue pair.
    #[inline]
    pub(super) fn enter_for_qp(
        &self,
        call: Call,
        qp: QpId,
        state: Option<QpState>,
    ) -> Result<Guard<'_, Core>, EngineError> {
        self.enter_at(Occasion { state, ..Occasion::of(call) }, Some(qp))
    }

    #[inline]
    pub(super) fn enter_at(
        &self,
        occasion: Occasion,
        qp: Option<QpId>,
    ) -> Result<Guard<'_, Core>, EngineError> {
        let mut core = self.enter()?;
        if core.faults.is_some() {
            core.consult(occasion, qp)?;
        }
        Ok(core)
    }

    /// Tells a plan of faults, if there is one, of a call that does nothing else in the engine.
    ///
    /// # Errors
    ///
    /// The plan refuses the call.
    pub fn note_call(&self, call: Call) -> Result<(), EngineError> {
        self.enter_for(call).map(drop)
    }

    /// Whether a plan of faults has taken the port down.
    pub(super) fn port_is_cut(&self) -> bool {
        let down = |core: &Core| core.faults.as_ref().is_some_and(|f| f.port_down_until.is_some());
        self.enter().is_ok_and(|core| down(&core))
    }
}
