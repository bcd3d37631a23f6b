//! The state machine: it is told of calls and of the time, and says what is to happen.

use std::collections::VecDeque;

use quipu_nic::{Fate, QpState, Time};
use rand_core::RngCore;
use rand_pcg::Pcg64;

use crate::plan::{Fault, Filter, Inject, Plan, Process, Trigger};
use crate::record::{Record, Replay, Struck};
use crate::units::shown;
use crate::words::{self, Call, CmEvent, Errno, EventKind, Opcode};

/// How often one fault strikes at most in a [`tick`](Injector::tick): a process that is stopped for
/// minutes, by a debugger for one, is not to make up for all of them at once.
const MOST_AT_ONCE: u32 = 1000;

/// A queue pair, as filters know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpRef {
    /// Which one that the process created, from 1.
    pub nth: u32,
    /// Its number.
    pub num: u32,
    /// The queues of its sends and receives: which ones that the process created, from 1.
    pub cqs: [u32; 2],
    /// Whether its receives are of a shared queue.
    pub has_srq: bool,
}

/// A call of the program.
#[derive(Clone, Copy, Debug)]
pub struct Occasion {
    /// Which.
    pub call: Call,
    /// The operation of a send.
    pub opcode: Option<Opcode>,
    /// The bytes of a request's payload, or of the memory of a receive or region.
    pub bytes: Option<u64>,
    /// The state that a queue pair is to go to.
    pub state: Option<QpState>,
    /// The queue pair that it is about.
    pub qp: Option<QpRef>,
    /// The completion queue that it is about: which one that the process created, from 1.
    pub cq: Option<u32>,
    /// The identifier of a request.
    pub wr_id: Option<u64>,
}

impl Occasion {
    /// A call of which nothing more is known.
    #[must_use]
    pub const fn of(call: Call) -> Self {
        Self { call, opcode: None, bytes: None, state: None, qp: None, cq: None, wr_id: None }
    }

    /// The same, about a queue pair.
    #[must_use]
    pub const fn about(mut self, qp: Option<QpRef>) -> Self {
        self.qp = qp;
        self
    }

    /// The same, with so many bytes.
    #[must_use]
    pub const fn with_bytes(mut self, bytes: u64) -> Self {
        self.bytes = Some(bytes);
        self
    }
}

/// What is to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The request that is posted has this fate.
    Fate(Fate),
    /// The call is refused.
    Refuse(Errno),
    /// The peers of queue pairs are dead.
    DeadPeer,
    /// The port is down, for so many nanoseconds or for ever.
    PortDown(Option<u64>),
    /// The device is gone.
    DeviceRemoval,
    /// An event is raised; not [`CqErr`](EventKind::CqErr).
    Event(EventKind),
    /// Completion queues of queue pairs fail.
    CqErr {
        /// That of the sends.
        send: bool,
        /// That of the receives.
        recv: bool,
    },
    /// An event of rdma_cm comes, with this status.
    CmEvent(CmEvent, i32),
}

/// Something that the clock starts.
#[derive(Clone, Debug)]
pub struct Strike {
    /// What.
    pub effect: Effect,
    /// Which queue pairs it concerns.
    filter: Filter,
}

impl Strike {
    /// Whether it concerns some queue pairs, and not all that there is.
    #[must_use]
    pub fn is_choosy(&self) -> bool {
        !self.filter.qps.is_empty() || !self.filter.qp_nums.is_empty()
    }

    /// Whether it concerns this queue pair.
    #[must_use]
    pub fn concerns(&self, qp: &QpRef) -> bool {
        passes_qp(&self.filter, Some(qp), None)
    }
}

/// A fault of the plan, with what it has done so far.
struct Rule {
    fault: Fault,
    /// Its place in the plan, from 1.
    number: usize,
    rng: Pcg64,
    /// Operations that passed the filters, at whatever time: a log names them by this.
    passed: u64,
    /// Those of them that the schedule counts.
    matched: u64,
    struck: u64,
    /// When the clock starts it next.
    next: Option<Time>,
}

/// Decides for each call what becomes of it.
pub struct Injector {
    rules: Vec<Rule>,
    replay: Option<Replay>,
    /// When the device was opened.
    start: Time,
    /// The device is gone, which it can be once.
    removed: bool,
    injected: u64,
    records: VecDeque<Record>,
}

impl Injector {
    /// What `plan` has for `process`, from `now` on. With `replay`, exactly the faults of an earlier run.
    #[must_use]
    pub fn new(plan: &Plan, process: &Process<'_>, replay: Option<Replay>, now: Time) -> Self {
        let rules = plan.faults.iter().enumerate();
        let rules = rules.filter(|(_, fault)| fault.process.admits(process));
        let rule = |(index, fault): (usize, &Fault)| {
            let next = match fault.trigger {
                Trigger::Clock(after, _) => Some(now.after(after)),
                Trigger::Calls(_) => None,
            };
            // Each rule draws from a stream of its own: to change one leaves the others as they are.
            let rng = Pcg64::new(u128::from(plan.seed) << 1, index as u128 + 1);
            let fault = fault.clone();
            Rule { fault, number: index + 1, rng, passed: 0, matched: 0, struck: 0, next }
        };
        Self {
            rules: rules.map(rule).collect(),
            replay,
            start: now,
            removed: false,
            injected: 0,
            records: VecDeque::new(),
        }
    }

    /// Whether there is nothing for this process.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Whether the clock will start something.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.rules.iter().filter_map(|rule| rule.next).min()
    }

    /// The next fault that was injected and not told of yet.
    pub fn poll_record(&mut self) -> Option<Record> {
        self.records.pop_front()
    }

    /// Faults injected so far.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.injected
    }

    /// What each fault of the plan did, for its end: line, name, operations that matched, times injected.
    pub fn tallies(&self) -> impl Iterator<Item = (usize, Option<&str>, u64, u64)> {
        let rules = self.rules.iter();
        rules.map(|r| (r.fault.line, r.fault.name.as_deref(), r.matched, r.struck))
    }

    /// The program makes a call: what happens. Of several fates or refusals the first in the plan counts.
    pub fn call(&mut self, now: Time, occasion: &Occasion) -> Vec<Effect> {
        let mut effects = Vec::new();
        let mut decided = false;
        let elapsed = now.since(self.start);
        for rule in &mut self.rules {
            if !rule.meets(elapsed, occasion, self.replay.is_some()) {
                continue;
            }
            let (chosen, drawn_ns) = rule.decide(self.replay.as_ref());
            if !chosen {
                continue;
            }
            let effect = rule.effect(now, occasion, drawn_ns);
            if effect == Effect::DeviceRemoval && std::mem::replace(&mut self.removed, true) {
                continue;
            }
            let single =
                matches!(effect, Effect::Fate(_) | Effect::Refuse(_) | Effect::CmEvent(..));
            if single && std::mem::replace(&mut decided, true) {
                continue;
            }
            rule.struck += 1;
            self.injected += 1;
            let mut record = rule.record(self.injected, elapsed, drawn_ns);
            record.call = occasion.call.name().to_owned();
            record.opcode = occasion.opcode.map(|opcode| opcode.name().to_owned());
            record.qp = occasion.qp.map(|qp| qp.nth);
            record.qp_num = occasion.qp.map(|qp| qp.num);
            (record.wr_id, record.bytes) = (occasion.wr_id, occasion.bytes);
            self.records.push_back(record);
            effects.push(effect);
        }
        effects
    }

    /// What the clock has started by `now`. What has nothing to strike, as `finds_something` says, is not
    /// injected.
    pub fn tick(&mut self, now: Time, finds_something: impl Fn(&Strike) -> bool) -> Vec<Strike> {
        let mut strikes = Vec::new();
        let elapsed = now.since(self.start);
        for rule in &mut self.rules {
            let Trigger::Clock(_, period) = rule.fault.trigger else { continue };
            let mut left = MOST_AT_ONCE;
            while let Some(at) = rule.next.filter(|&at| at <= now) {
                rule.passed += 1;
                rule.matched += 1;
                // Of a period that was slept through, each time counts, up to so many.
                left -= 1;
                rule.next = period.map(|period| match left {
                    0 => at.after((now.since(at) / period + 1) * period),
                    _ => at.after(period),
                });
                let (chosen, drawn_ns) = rule.decide(self.replay.as_ref());
                let effect = rule.effect(now, &Occasion::of(Call::PollCq), drawn_ns);
                let strike = Strike { effect, filter: rule.fault.filter.clone() };
                let removal = effect == Effect::DeviceRemoval;
                let again = removal && self.removed;
                let strikes_now = chosen && !again && finds_something(&strike);
                if again || rule.struck + u64::from(strikes_now) >= rule.fault.schedule.count {
                    rule.next = None;
                }
                if strikes_now {
                    rule.struck += 1;
                    self.injected += 1;
                    self.removed |= removal;
                    strikes.push(strike);
                    self.records.push_back(rule.record(self.injected, elapsed, drawn_ns));
                }
            }
        }
        strikes
    }
}

fn passes_qp(filter: &Filter, qp: Option<&QpRef>, cq: Option<u32>) -> bool {
    let within = |list: &[u32], number: Option<u32>| {
        list.is_empty() || number.is_some_and(|number| list.contains(&number))
    };
    let completes_there = || match qp {
        Some(qp) => qp.cqs.iter().any(|cq| filter.cqs.contains(cq)),
        None => cq.is_some_and(|cq| filter.cqs.contains(&cq)),
    };
    within(&filter.qps, qp.map(|qp| qp.nth))
        && within(&filter.qp_nums, qp.map(|qp| qp.num))
        && (filter.cqs.is_empty() || completes_there())
}

impl Rule {
    /// Whether a call passes the filters; counts it if so. One that comes too early counts for a log that is
    /// repeated alone: when it comes differs from run to run.
    fn meets(&mut self, elapsed: u64, occasion: &Occasion, replays: bool) -> bool {
        let Fault { inject, trigger, filter, schedule, .. } = &self.fault;
        let called = matches!(trigger, Trigger::Calls(calls) if calls.contains(&occasion.call));
        if !called {
            return false;
        }
        let opcode = filter.opcodes.is_empty()
            || occasion.opcode.is_some_and(|opcode| filter.opcodes.contains(&opcode));
        let bytes = filter
            .bytes
            .as_ref()
            .is_none_or(|range| occasion.bytes.is_some_and(|bytes| range.contains(&bytes)));
        let state = filter.state.is_none() || filter.state == occasion.state;
        // An event of a shared queue needs one.
        let of_srq = matches!(inject, Inject::Event(event) if event.is_of_srq());
        let queue = !of_srq || occasion.qp.is_none_or(|qp| qp.has_srq);
        if !queue
            || !opcode
            || !bytes
            || !state
            || !passes_qp(filter, occasion.qp.as_ref(), occasion.cq)
        {
            return false;
        }
        let early = elapsed < schedule.after;
        self.passed += 1;
        self.matched += u64::from(!early);
        replays || !early
    }

    /// Whether the operation that was counted last is struck, and with which part of the jitter. What is
    /// drawn depends on the number of matches alone.
    fn decide(&mut self, replay: Option<&Replay>) -> (bool, Option<u64>) {
        let schedule = &self.fault.schedule;
        let (chance, share) = (self.rng.next_u64(), self.rng.next_u64());
        let jitter = match self.fault.inject {
            Inject::Delay { jitter, .. } | Inject::SlowPeer { jitter, .. } if jitter > 0 => {
                Some(((u128::from(share) * (u128::from(jitter) + 1)) >> 64) as u64)
            }
            _ => None,
        };
        if let Some(replay) = replay {
            return match replay.find(self.number, self.passed) {
                Some(Struck { drawn_ns }) => (true, drawn_ns),
                None => (false, None),
            };
        }
        let lucky = schedule.probability >= 1.0
            || ((chance >> 11) as f64 / (1u64 << 53) as f64) < schedule.probability;
        let in_turn = self.matched >= schedule.nth
            && (self.matched - schedule.nth).is_multiple_of(schedule.every);
        (in_turn && lucky && self.struck < schedule.count, jitter)
    }

    fn effect(&self, now: Time, occasion: &Occasion, drawn_ns: Option<u64>) -> Effect {
        let extra = drawn_ns.unwrap_or(0);
        match self.fault.inject {
            Inject::Completion(status) => Effect::Fate(Fate::Fail(status)),
            Inject::Delay { time, .. } => Effect::Fate(Fate::Late(time.saturating_add(extra))),
            Inject::SlowPeer { time, .. } => {
                Effect::Fate(Fate::From(now.after(time.saturating_add(extra))))
            }
            Inject::Rnr { times, time } if occasion.call == Call::PostSend => {
                Effect::Fate(Fate::Refused { times, wait_ns: time })
            }
            Inject::Rnr { times, time } => {
                Effect::Fate(Fate::From(now.after(time.saturating_mul(u64::from(times)))))
            }
            Inject::DeadPeer => Effect::DeadPeer,
            Inject::PortDown { time } => Effect::PortDown(time),
            Inject::DeviceRemoval => Effect::DeviceRemoval,
            Inject::Event(EventKind::CqErr) => self.fails_cqs(occasion),
            Inject::Event(event) => Effect::Event(event),
            Inject::CmEvent(event, status) => Effect::CmEvent(event, status),
            Inject::Refuse(errno) => Effect::Refuse(errno),
        }
    }

    /// Which completion queues fail: those that the plan names, or else those that an operation is about.
    fn fails_cqs(&self, occasion: &Occasion) -> Effect {
        let [send, recv] = match occasion.qp {
            Some(qp) if !self.fault.filter.cqs.is_empty() => {
                qp.cqs.map(|cq| self.fault.filter.cqs.contains(&cq))
            }
            _ => [occasion.call != Call::PostRecv, occasion.call != Call::PostSend],
        };
        Effect::CqErr { send, recv }
    }

    fn record(&self, fault: u64, time_ns: u64, drawn_ns: Option<u64>) -> Record {
        Record {
            fault,
            rule: self.number,
            line: self.fault.line,
            name: self.fault.name.clone(),
            passed: self.passed,
            matched: self.matched,
            time_ns,
            call: "clock".into(),
            opcode: None,
            qp: None,
            qp_num: None,
            wr_id: None,
            bytes: None,
            effect: self.told(drawn_ns.unwrap_or(0)),
            drawn_ns,
        }
    }

    /// What happens, for people.
    fn told(&self, extra: u64) -> String {
        match self.fault.inject {
            Inject::Completion(status) => format!("fails with {}", words::status_name(status)),
            Inject::Delay { time, .. } => {
                format!("completes {} late", shown(time.saturating_add(extra)))
            }
            Inject::SlowPeer { time, .. } => {
                format!("is executed {} late", shown(time.saturating_add(extra)))
            }
            Inject::Rnr { times, time } => {
                format!("finds no receive {times} times, {} each", shown(time))
            }
            Inject::DeadPeer => "the peer is dead".into(),
            Inject::PortDown { time: None } => "the port goes down".into(),
            Inject::PortDown { time: Some(time) } => {
                format!("the port goes down for {}", shown(time))
            }
            Inject::DeviceRemoval => "the device is removed".into(),
            Inject::Event(event) => format!("event {}", event.name()),
            Inject::CmEvent(event, status) => format!("event {}, status {status}", event.name()),
            Inject::Refuse(errno) => format!("refused with {}", errno.name),
        }
    }
}
