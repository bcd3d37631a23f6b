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
    /// The queues of its sends and receives.
    cqs: [CqId; 2],
    srq: Option<SrqId>,
}

/// What a call is about.
#[derive(Clone, Copy, Debug)]
pub(crate) enum About {
    /// Nothing that a plan knows.
    Nothing,
    /// A queue pair.
    Qp(QpId),
    /// A completion queue.
    Cq(CqId),
    /// A shared receive queue.
    Srq(SrqId),
}

/// What is struck by something that is not about one request.
#[derive(Default)]
struct Targets {
    /// Queue pairs, in the order of their creation.
    qps: Vec<(QpId, Known)>,
    srqs: BTreeSet<SrqId>,
}

impl Targets {
    /// Those of a call.
    fn of_call(about: About, known: Option<Known>) -> Self {
        match (about, known) {
            (About::Qp(qp), Some(known)) => {
                Self { qps: vec![(qp, known)], srqs: known.srq.into_iter().collect() }
            }
            (About::Srq(srq), _) => Self { qps: Vec::new(), srqs: BTreeSet::from([srq]) },
            _ => Self::default(),
        }
    }

    /// Those of the clock: all that the plan lets pass, and shared receive queues that no queue pair names
    /// (XRC) as well, if it lets all pass.
    fn of_clock(strike: &Strike, known: &BTreeMap<QpId, Known>, srqs: &BTreeSet<SrqId>) -> Self {
        let all = known.iter().map(|(qp, known)| (*qp, *known));
        let mut qps: Vec<_> = all.filter(|(_, known)| strike.concerns(&known.shown)).collect();
        qps.sort_by_key(|(_, known)| known.shown.nth);
        let of_qps = || qps.iter().filter_map(|(_, known)| known.srq).collect();
        let srqs = if strike.is_choosy() { of_qps() } else { srqs.clone() };
        Self { qps, srqs }
    }

    /// Whether anything is there for an effect.
    fn suffice_for(&self, effect: Effect) -> bool {
        match effect {
            Effect::DeadPeer | Effect::CqErr { .. } => !self.qps.is_empty(),
            Effect::Event(kind) => !events(kind, self).is_empty(),
            _ => true,
        }
    }

    /// The completion queues of sends and receives, as is asked for.
    fn cqs(&self, wanted: [bool; 2]) -> BTreeSet<CqId> {
        let each = self.qps.iter().flat_map(|(_, known)| known.cqs.into_iter().zip(wanted));
        each.filter(|&(cq, wanted)| wanted && cq != CqId::NONE).map(|(cq, _)| cq).collect()
    }
}

/// A plan at work.
pub(crate) struct Faults {
    injector: Injector,
    log: FaultLog,
    qps: BTreeMap<QpId, Known>,
    cqs: HashMap<CqId, u32>,
    srqs: BTreeSet<SrqId>,
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
            srqs: BTreeSet::new(),
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
        let cqs = [init.send_cq, init.recv_cq];
        let cqs = cqs.map(|cq| if self.cqs.contains_key(&cq) { cq } else { CqId::NONE });
        self.qps.insert(id, Known { shown, cqs, srq: init.srq });
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

    /// Notes a shared receive queue.
    pub(crate) fn add_srq(&mut self, id: SrqId) {
        self.srqs.insert(id);
    }

    /// Forgets one.
    pub(crate) fn remove_srq(&mut self, id: SrqId) {
        self.srqs.remove(&id);
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
        mut about: About,
    ) -> Result<Option<Fate>, EngineError> {
        let now = self.now();
        if let About::Qp(qp) = about {
            about = self.events.openings.find(qp).map_or(About::Nothing, About::Qp);
        }
        let Some(faults) = &mut self.faults else { return Ok(None) };
        let call = occasion.call;
        let gone = !call.outlives_device();
        if faults.removed && gone {
            return Err(EngineError::Injected { call, errno: Errno::EIO });
        }
        let mut known = None;
        match about {
            About::Qp(qp) => known = faults.qps.get(&qp).copied(),
            About::Cq(cq) => occasion.cq = faults.cqs.get(&cq).copied(),
            About::Nothing | About::Srq(_) => {}
        }
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
                    self.carry_out_effect(now, effect, &Targets::of_call(about, known));
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

    /// The event that a plan has come in place of a call of rdma_cm, or beside it: one of its own, or what
    /// becomes of the call while the port is down.
    pub(crate) fn take_cm_event(&mut self, call: Call) -> Option<(CmEvent, i32)> {
        let faults = self.faults.as_mut()?;
        let in_vain = match call {
            Call::ResolveAddr => Some(CmEvent::AddrError),
            Call::Connect => Some(CmEvent::Unreachable),
            _ => None,
        };
        let in_vain = in_vain.filter(|_| faults.port_down_until.is_some());
        faults.cm_event.take().or(in_vain.map(|event| (event, event.status())))
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
        let Faults { injector, qps, srqs, .. } = &mut **faults;
        let strikes = injector
            .tick(now, |strike| Targets::of_clock(strike, qps, srqs).suffice_for(strike.effect));
        faults.write_log();
        for strike in strikes {
            let Some(faults) = &self.faults else { return };
            let targets = Targets::of_clock(&strike, &faults.qps, &faults.srqs);
            self.carry_out_effect(now, strike.effect, &targets);
        }
    }

    fn carry_out_effect(&mut self, now: Time, effect: Effect, targets: &Targets) {
        let Some(faults) = &mut self.faults else { return };
        match effect {
            Effect::Fate(_) | Effect::Refuse(_) | Effect::CmEvent(..) => {}
            Effect::DeadPeer => {
                for &(qp, _) in &targets.qps {
                    self.adapter.lose_peer(now, qp);
                }
            }
            Effect::PortDown(time) => {
                let until = time.map_or(Time::NEVER, |time| now.after(time));
                let was_up = faults.port_down_until.is_none();
                faults.port_down_until = faults.port_down_until.max(Some(until));
                for &qp in faults.qps.keys() {
                    self.adapter.cut_off(now, qp);
                }
                if was_up {
                    self.adapter.strike(now, AsyncEvent::PortErr);
                }
            }
            Effect::DeviceRemoval => {
                faults.removed = true;
                self.adapter.strike(now, AsyncEvent::DeviceFatal);
                if let Some(cm) = &mut self.cm {
                    cm.remove_device(now.0);
                }
            }
            Effect::CqErr { send, recv } => {
                for cq in targets.cqs([send, recv]) {
                    self.adapter.strike(now, AsyncEvent::CqErr(cq));
                }
            }
            Effect::Event(kind) => {
                for event in events(kind, targets) {
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
        let fate = self.consult(occasion, About::Qp(qp))?;
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
        let fate = self.consult(Occasion { wr_id: Some(wr_id), ..occasion }, About::Qp(qp))?;
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
        let fate = self.consult(Occasion { wr_id: Some(wr_id), ..occasion }, About::Srq(srq))?;
        let now = self.now();
        match fate {
            Some(fate) => self.adapter.post_srq_recv_fated(now, srq, wr_id, sges, fate)?,
            None => self.adapter.post_srq_recv(now, srq, wr_id, sges)?,
        }
        Ok(())
    }

    /// A receive is about to be posted to a work queue, of which nothing particular can become.
    ///
    /// # Errors
    ///
    /// The plan refuses it.
    #[cold]
    pub(crate) fn post_wq_recv_planned(
        &mut self,
        wr_id: u64,
        sges: &[Sge],
    ) -> Result<(), EngineError> {
        let occasion = Occasion::of(Call::PostWqRecv).with_bytes(total(sges));
        self.consult(Occasion { wr_id: Some(wr_id), ..occasion }, About::Nothing).map(drop)
    }
}

fn total(sges: &[Sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.len)).sum()
}

/// The events of a kind, each object's once.
fn events(kind: EventKind, targets: &Targets) -> Vec<AsyncEvent> {
    use AsyncEvent as E;
    let each = |event: fn(QpId) -> E| targets.qps.iter().map(|(qp, _)| event(*qp)).collect();
    let srqs = |event: fn(SrqId) -> E| targets.srqs.iter().map(|&srq| event(srq)).collect();
    match kind {
        EventKind::CqErr => targets.cqs([true; 2]).into_iter().map(E::CqErr).collect(),
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
        self.enter_at(Occasion::of(call), About::Nothing)
    }

    /// The same for a call about a completion queue.
    #[inline]
    pub(super) fn enter_for_cq(
        &self,
        call: Call,
        cq: CqId,
    ) -> Result<Guard<'_, Core>, EngineError> {
        self.enter_at(Occasion::of(call), About::Cq(cq))
    }

    /// The same for a call about a queue pair.
    #[inline]
    pub(super) fn enter_for_qp(
        &self,
        call: Call,
        qp: QpId,
        state: Option<QpState>,
    ) -> Result<Guard<'_, Core>, EngineError> {
        self.enter_at(Occasion { state, ..Occasion::of(call) }, About::Qp(qp))
    }

    #[inline]
    pub(super) fn enter_at(
        &self,
        occasion: Occasion,
        about: About,
    ) -> Result<Guard<'_, Core>, EngineError> {
        let mut core = self.enter()?;
        if core.faults.is_some() {
            core.consult(occasion, about)?;
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
