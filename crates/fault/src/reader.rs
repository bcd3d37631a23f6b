//! Reads the faults of a plan, and says what is wrong with one, with its line, its key and what is allowed.

use std::fmt::Display;
use std::ops::Range;

use toml::Spanned;

use crate::plan::{Fault, Filter, Inject, PlanError, ProcessFilter, Schedule, Trigger};
use crate::raw::{Numbers, Quantity, RawFault, Words};
use crate::units;
use crate::words::{self, Call, CmEvent, Errno, EventKind, Opcode, Side};

/// The kinds of faults: name, the keys that say what, whether operations can be told apart by filters,
/// and how often they happen if nothing is said.
struct Kind {
    name: &'static str,
    keys: &'static [&'static str],
    count: u64,
}

const KINDS: [Kind; 10] = [
    Kind { name: "completion", keys: &["status", "side"], count: 1 },
    Kind { name: "delay", keys: &["time", "jitter", "side"], count: u64::MAX },
    Kind { name: "slow_peer", keys: &["time", "jitter"], count: u64::MAX },
    Kind { name: "dead_peer", keys: &["call", "state", "side"], count: 1 },
    Kind { name: "rnr", keys: &["times", "time", "side"], count: 1 },
    Kind { name: "port_down", keys: &["time", "call", "state", "side"], count: 1 },
    Kind { name: "device_removal", keys: &["call", "state", "side"], count: 1 },
    Kind { name: "event", keys: &["event", "call", "state", "side"], count: 1 },
    Kind { name: "cm_event", keys: &["event", "call", "errno"], count: 1 },
    Kind { name: "refuse", keys: &["call", "errno", "state"], count: 1 },
];

/// Keys that every fault may have.
const COMMON: [&str; 14] = [
    "name",
    "inject",
    "opcode",
    "bytes",
    "qp",
    "qp_num",
    "cq",
    "program",
    "env",
    "nth",
    "every",
    "probability",
    "after",
    "count",
];

/// A list of names for a message.
fn listed<T: Display>(names: impl IntoIterator<Item = T>) -> String {
    names.into_iter().map(|name| name.to_string()).collect::<Vec<_>>().join(", ")
}

/// Makes sense of one file.
pub(crate) struct Reader<'a> {
    text: &'a str,
    file: &'a str,
}

impl<'a> Reader<'a> {
    /// One for the text of the file of this name.
    pub(crate) fn new(text: &'a str, file: &'a str) -> Self {
        Self { text, file }
    }

    fn line(&self, at: usize) -> usize {
        1 + self.text.as_bytes()[..at.min(self.text.len())].iter().filter(|b| **b == b'\n').count()
    }

    /// What to say of what stands there.
    pub(crate) fn error(&self, at: Range<usize>, what: impl Into<String>) -> PlanError {
        let (file, line) = (self.file.to_owned(), self.line(at.start));
        PlanError { file, line, what: what.into().replace('\n', "; ") }
    }

    /// What to say where there is no value of the type that a key takes. The message names the key.
    pub(crate) fn misread(&self, at: Range<usize>, message: &str) -> PlanError {
        let line = self.text.lines().nth(self.line(at.start) - 1).unwrap_or_default();
        let key = line.split_once('=').map_or("", |(key, _)| key.trim());
        if line.trim_start().starts_with("[fault]") {
            return self.error(at, "a fault begins with [[fault]], in two brackets on each side");
        }
        let named = key.is_empty() || message.contains(key);
        self.error(at, if named { message.to_owned() } else { format!("{key}: {message}") })
    }

    /// A value that is one of some words.
    fn word<T>(
        &self,
        key: &str,
        value: &Spanned<String>,
        find: impl Fn(&str) -> Option<T>,
        all: impl Fn() -> String,
    ) -> Result<T, PlanError> {
        find(value.get_ref()).ok_or_else(|| {
            let what = format!("{key} = {:?} is none of: {}", value.get_ref(), all());
            self.error(value.span(), what)
        })
    }

    fn words<T>(
        &self,
        key: &str,
        value: Option<&Spanned<Words>>,
        find: impl Fn(&str) -> Option<T>,
        all: impl Fn() -> String,
    ) -> Result<Vec<T>, PlanError> {
        let span = value.map(Spanned::span).unwrap_or_default();
        let list = self.list(key, value, Words::into_vec)?;
        list.into_iter()
            .map(|text| self.word(key, &Spanned::new(span.clone(), text), &find, &all))
            .collect()
    }

    fn time(&self, key: &str, value: &Spanned<Quantity>) -> Result<u64, PlanError> {
        let (time, shown) = match value.get_ref() {
            Quantity::Text(text) => (units::time(text), format!("{text:?}")),
            Quantity::Number(number) => (None, number.to_string()),
        };
        time.ok_or_else(|| {
            let what = format!(
                "{key} = {shown} is no time: write a number and one of ns, us, ms, s, min, such as \
                 \"5ms\""
            );
            self.error(value.span(), what)
        })
    }

    /// A list, or one value, which must be there.
    fn list<L: Clone, T>(
        &self,
        key: &str,
        value: Option<&Spanned<L>>,
        into_vec: impl Fn(L) -> Vec<T>,
    ) -> Result<Vec<T>, PlanError> {
        let Some(value) = value else { return Ok(Vec::new()) };
        let list = into_vec(value.get_ref().clone());
        if list.is_empty() {
            let what = format!("{key} = [] names nothing: leave it out");
            return Err(self.error(value.span(), what));
        }
        Ok(list)
    }

    fn optional_time(
        &self,
        key: &str,
        value: Option<&Spanned<Quantity>>,
    ) -> Result<Option<u64>, PlanError> {
        value.map(|value| self.time(key, value)).transpose()
    }

    /// A value that the kind of fault cannot do without.
    fn needed<'v, T>(
        &self,
        place: &Range<usize>,
        kind: &str,
        key: &str,
        value: Option<&'v Spanned<T>>,
        example: &str,
    ) -> Result<&'v Spanned<T>, PlanError> {
        value.ok_or_else(|| {
            let what = format!("inject = {kind:?} needs {key}, such as {key} = {example}");
            self.error(place.clone(), what)
        })
    }

    pub(crate) fn fault(&self, raw: Spanned<RawFault>) -> Result<Fault, PlanError> {
        let (place, raw) = (raw.span(), raw.into_inner());
        let inject = raw.inject.as_ref().ok_or_else(|| {
            let what = "a [[fault]] needs inject, which is one of: ";
            self.error(place, what.to_owned() + &kinds())
        })?;
        let find = |text: &str| KINDS.iter().find(|kind| kind.name == text.trim());
        let kind = self.word("inject", inject, find, kinds)?;
        self.check_keys(&raw, kind)?;
        let place = inject.span();
        let side = match &raw.side {
            Some(side) => self.word("side", side, Side::named, || {
                listed(Side::ALL.iter().map(|side| side.name()))
            })?,
            None => Side::Send,
        };
        let what = self.what(&raw, kind, &place)?;
        let trigger = self.trigger(&raw, kind, &what, side, &place)?;
        let filter = self.filter(&raw)?;
        self.check_filter(&raw, &trigger, &what, side)?;
        let fault = Fault {
            line: self.line(place.start),
            name: raw.name.as_ref().map(|name| name.get_ref().clone()),
            inject: what,
            filter,
            schedule: self.schedule(&raw, kind, &trigger)?,
            trigger,
            process: ProcessFilter {
                programs: self.list("program", raw.program.as_ref(), Words::into_vec)?,
                env: raw.env.map(Spanned::into_inner).unwrap_or_default(),
            },
        };
        Ok(fault)
    }

    /// Refuses keys that mean nothing to this kind of fault.
    fn check_keys(&self, raw: &RawFault, kind: &Kind) -> Result<(), PlanError> {
        for (key, span) in raw.keys() {
            if !COMMON.contains(&key) && !kind.keys.contains(&key) {
                let what = format!(
                    "{key} means nothing with inject = {:?}, which takes: {}, and as all do: {}",
                    kind.name,
                    listed(kind.keys),
                    listed(COMMON.iter().filter(|key| **key != "inject")),
                );
                return Err(self.error(span, what));
            }
        }
        Ok(())
    }

    fn what(&self, raw: &RawFault, kind: &Kind, place: &Range<usize>) -> Result<Inject, PlanError> {
        let name = kind.name;
        let needed_time = || {
            let value = self.needed(place, name, "time", raw.time.as_ref(), "\"5ms\"")?;
            self.time("time", value)
        };
        let jitter = self.optional_time("jitter", raw.jitter.as_ref())?.unwrap_or(0);
        Ok(match name {
            "completion" => {
                let value =
                    self.needed(place, name, "status", raw.status.as_ref(), "\"retry_exc_err\"")?;
                let all = || listed(words::STATUSES.iter().map(|(name, _)| name));
                Inject::Completion(self.word("status", value, words::status, all)?)
            }
            "delay" => Inject::Delay { time: needed_time()?, jitter },
            "slow_peer" => Inject::SlowPeer { time: needed_time()?, jitter },
            "dead_peer" => Inject::DeadPeer,
            "rnr" => {
                let time = self.optional_time("time", raw.time.as_ref())?.unwrap_or(1_000_000);
                let times = raw.times.as_ref().map_or(1, |times| *times.get_ref());
                Inject::Rnr { times, time }
            }
            "port_down" => {
                Inject::PortDown { time: self.optional_time("time", raw.time.as_ref())? }
            }
            "device_removal" => Inject::DeviceRemoval,
            "event" => {
                let value =
                    self.needed(place, name, "event", raw.event.as_ref(), "\"gid_change\"")?;
                if value.get_ref().trim().to_ascii_lowercase().ends_with("device_fatal") {
                    let what = "for device_fatal write inject = \"device_removal\"";
                    return Err(self.error(value.span(), what));
                }
                let all = || listed(EventKind::ALL.iter().map(|event| event.name()));
                Inject::Event(self.word("event", value, EventKind::named, all)?)
            }
            "cm_event" => self.cm_event(raw, name, place)?,
            _ => {
                let value = self.needed(place, name, "errno", raw.errno.as_ref(), "\"ENOMEM\"")?;
                Inject::Refuse(self.errno(value)?)
            }
        })
    }

    fn errno(&self, value: &Spanned<String>) -> Result<Errno, PlanError> {
        let all = || listed(Errno::ALL.iter().map(|errno| errno.name));
        self.word("errno", value, Errno::named, all)
    }

    fn cm_event(
        &self,
        raw: &RawFault,
        name: &str,
        place: &Range<usize>,
    ) -> Result<Inject, PlanError> {
        let value = self.needed(place, name, "event", raw.event.as_ref(), "\"route_error\"")?;
        if value.get_ref().trim().to_ascii_lowercase().ends_with("device_removal") {
            let what = "for device_removal write inject = \"device_removal\"";
            return Err(self.error(value.span(), what));
        }
        let all = || listed(CmEvent::ALL.iter().map(|event| event.name()));
        let event = self.word("event", value, CmEvent::named, all)?;
        let errno = raw.errno.as_ref().map(|value| self.errno(value)).transpose()?;
        Ok(Inject::CmEvent(event, errno.map_or(event.status(), |errno| -errno.number)))
    }

    fn trigger(
        &self,
        raw: &RawFault,
        kind: &Kind,
        what: &Inject,
        side: Side,
        place: &Range<usize>,
    ) -> Result<Trigger, PlanError> {
        let all = || listed(Call::ALL.iter().map(|call| call.name()));
        let calls = self.words("call", raw.call.as_ref(), Call::named, all)?;
        if let (Some(call), Some(_)) = (&raw.call, &raw.side) {
            return Err(
                self.error(call.span(), "call and side cannot both be given: call says all")
            );
        }
        if let Inject::CmEvent(event, _) = what {
            return self.cm_trigger(raw, *event, calls);
        }
        if !calls.is_empty() {
            return Ok(Trigger::Calls(calls));
        }
        let posts = match side {
            Side::Send => vec![Call::PostSend],
            Side::Recv => receives(what),
        };
        match what {
            Inject::Refuse(_) => {
                let value =
                    self.needed(place, kind.name, "call", raw.call.as_ref(), "\"reg_mr\"")?;
                Err(self.error(value.span(), "call names nothing"))
            }
            Inject::DeadPeer
            | Inject::PortDown { .. }
            | Inject::DeviceRemoval
            | Inject::Event(_) => {
                let counts = matches!(&raw.every, Some(every)
                    if matches!(every.get_ref(), Quantity::Number(_)));
                let by_call = raw.side.is_some()
                    || raw.opcode.is_some()
                    || raw.bytes.is_some()
                    || raw.cq.is_some()
                    || raw.nth.is_some()
                    || raw.probability.is_some()
                    || counts;
                if by_call {
                    return Ok(Trigger::Calls(posts));
                }
                let value = self.needed(
                    place,
                    kind.name,
                    "a time or an operation",
                    raw.after.as_ref(),
                    "\"2s\" (write after = \"2s\", or nth = 100)",
                );
                let value = value.map_err(|mut error| {
                    error.what = format!(
                        "inject = {:?} needs to know when: after = \"2s\" for a time, or for an \
                         operation nth, every, probability, call, side, opcode or bytes",
                        kind.name
                    );
                    error
                })?;
                let after = self.time("after", value)?;
                let period = match raw.every.as_ref().map(|every| (every, every.get_ref())) {
                    Some((every, Quantity::Text(_))) => {
                        let period = self.time("every", every)?;
                        if period < 1_000_000 {
                            return Err(self.error(every.span(), "every is less than 1ms"));
                        }
                        Some(period)
                    }
                    _ => None,
                };
                Ok(Trigger::Clock(after, period))
            }
            _ => Ok(Trigger::Calls(posts)),
        }
    }

    /// At which calls an event of rdma_cm comes.
    fn cm_trigger(
        &self,
        raw: &RawFault,
        event: CmEvent,
        calls: Vec<Call>,
    ) -> Result<Trigger, PlanError> {
        match (&raw.call, calls.iter().find(|call| !event.calls().contains(call))) {
            (Some(value), Some(call)) => {
                let names = listed(event.calls().iter().map(|call| call.name()));
                let what =
                    format!("{} is no event of {}, but of: {names}", event.name(), call.name());
                Err(self.error(value.span(), what))
            }
            (Some(_), None) => Ok(Trigger::Calls(calls)),
            (None, _) => Ok(Trigger::Calls(event.calls()[..1].to_vec())),
        }
    }

    fn filter(&self, raw: &RawFault) -> Result<Filter, PlanError> {
        let all = || listed(Opcode::ALL.iter().map(|opcode| opcode.name()));
        let bytes = raw.bytes.as_ref().map(|value| {
            let range = match value.get_ref() {
                Quantity::Number(size) => Some(*size..=*size),
                Quantity::Text(text) => units::sizes(text),
            };
            range.ok_or_else(|| {
                let what = "bytes is a size or a range such as \"4K..64K\", \"4K..\" or \"..64K\"";
                self.error(value.span(), what)
            })
        });
        let numbers = |key, value: &Option<Spanned<Numbers>>| {
            self.list(key, value.as_ref(), Numbers::into_vec)
        };
        let (qps, cqs) = (numbers("qp", &raw.qp)?, numbers("cq", &raw.cq)?);
        for (key, value, list) in [("qp", &raw.qp, &qps), ("cq", &raw.cq, &cqs)] {
            if let Some(value) = value
                && list.contains(&0)
            {
                let what = format!("{key} counts from 1: the first one that the process creates");
                return Err(self.error(value.span(), what));
            }
        }
        let states = || listed(words::STATES.iter().map(|(name, _)| name));
        let state = raw.state.as_ref().map(|value| self.word("state", value, words::state, states));
        Ok(Filter {
            opcodes: self.words("opcode", raw.opcode.as_ref(), Opcode::named, all)?,
            bytes: bytes.transpose()?,
            qps,
            qp_nums: numbers("qp_num", &raw.qp_num)?,
            cqs,
            state: state.transpose()?,
        })
    }

    /// Refuses filters that nothing can pass.
    fn check_filter(
        &self,
        raw: &RawFault,
        trigger: &Trigger,
        what: &Inject,
        side: Side,
    ) -> Result<(), PlanError> {
        let calls: &[Call] = match trigger {
            Trigger::Calls(calls) => calls,
            Trigger::Clock(..) => &[],
        };
        if let Some(opcode) = &raw.opcode
            && !calls.contains(&Call::PostSend)
        {
            let what = match side {
                Side::Recv => "opcode is of a send: a receive does not know what will come for it",
                Side::Send => "opcode is of a send: it goes with call = \"post_send\"",
            };
            return Err(self.error(opcode.span(), what));
        }
        if let Some(state) = &raw.state
            && calls != [Call::ModifyQp]
        {
            return Err(self.error(state.span(), "state goes with call = \"modify_qp\""));
        }
        self.check_objects(raw, trigger, what)?;
        let (needs, fits): (_, fn(Call) -> bool) = match what {
            Inject::Event(event) if event.is_of_port() => return Ok(()),
            Inject::Event(event) if event.is_of_srq() => {
                ("a queue pair or a shared receive queue", Call::names_srq)
            }
            Inject::Event(_) | Inject::DeadPeer => ("a queue pair", Call::names_qp),
            _ => return Ok(()),
        };
        if let Some(call) = &raw.call
            && !calls.iter().all(|&call| fits(call))
        {
            let names = listed(Call::ALL.iter().filter(|&&call| fits(call)).map(|c| c.name()));
            let what = format!("this fault needs {needs}, and the call is about none: use {names}");
            return Err(self.error(call.span(), what));
        }
        Ok(())
    }

    /// Refuses filters by objects or sizes that nothing has which the fault happens at.
    fn check_objects(
        &self,
        raw: &RawFault,
        trigger: &Trigger,
        what: &Inject,
    ) -> Result<(), PlanError> {
        let of_all = match what {
            Inject::PortDown { .. } | Inject::DeviceRemoval => true,
            Inject::Event(event) => event.is_of_port(),
            _ => false,
        };
        let place = |value: &Option<Spanned<Numbers>>| value.as_ref().map(Spanned::span);
        let bytes = raw.bytes.as_ref().map(Spanned::span);
        let filters = [
            ("qp", place(&raw.qp), Call::names_qp as fn(Call) -> bool),
            ("qp_num", place(&raw.qp_num), Call::names_qp),
            ("cq", place(&raw.cq), Call::names_cq),
            ("bytes", bytes, Call::names_bytes),
        ];
        for (key, span, fits) in filters {
            let Some(span) = span else { continue };
            let what = match trigger {
                Trigger::Clock(..) if of_all => {
                    format!("{key} lets nothing pass: the clock strikes all queue pairs here")
                }
                Trigger::Calls(calls) if !calls.iter().any(|&call| fits(call)) => {
                    let names =
                        listed(Call::ALL.iter().filter(|&&call| fits(call)).map(|c| c.name()));
                    let calls = listed(calls.iter().map(|call| call.name()));
                    format!("{key} means nothing to {calls}, but to: {names}")
                }
                _ => continue,
            };
            return Err(self.error(span, what));
        }
        Ok(())
    }

    fn schedule(
        &self,
        raw: &RawFault,
        kind: &Kind,
        trigger: &Trigger,
    ) -> Result<Schedule, PlanError> {
        let positive = |key: &str, value: &Option<Spanned<u64>>| match value {
            Some(value) if *value.get_ref() == 0 => {
                Err(self.error(value.span(), format!("{key} counts from 1")))
            }
            Some(value) => Ok(Some(*value.get_ref())),
            None => Ok(None),
        };
        let (nth, count) = (positive("nth", &raw.nth)?, positive("count", &raw.count)?);
        let clock = matches!(trigger, Trigger::Clock(..));
        let every = match raw.every.as_ref().map(|every| (every.span(), every.get_ref())) {
            Some((span, Quantity::Number(0))) => {
                return Err(self.error(span, "every counts from 1"));
            }
            Some((span, Quantity::Text(_))) if !clock => {
                let what = "every is a number here; a time goes with faults that the clock starts";
                return Err(self.error(span, what));
            }
            Some((_, Quantity::Number(every))) => Some(*every),
            _ => None,
        };
        if let Some(value) = &raw.probability
            && !(0.0..=1.0).contains(value.get_ref())
        {
            return Err(self.error(value.span(), "probability is a number from 0 to 1"));
        }
        let often = raw.every.is_some() || raw.probability.is_some();
        Ok(Schedule {
            nth: nth.or(every).unwrap_or(1),
            every: every.unwrap_or(1),
            probability: raw.probability.as_ref().map_or(1.0, |value| *value.get_ref()),
            after: self.optional_time("after", raw.after.as_ref())?.unwrap_or(0),
            count: count.unwrap_or(if often { u64::MAX } else { kind.count }),
        })
    }
}

/// The names of all kinds.
fn kinds() -> String {
    listed(KINDS.iter().map(|kind| kind.name))
}

/// The receives that a fault strikes: one of a queue pair is not of a shared queue, and the other way round.
fn receives(what: &Inject) -> Vec<Call> {
    match what {
        Inject::Event(event) if event.is_of_srq() => vec![Call::PostSrqRecv],
        Inject::Event(event) if !event.is_of_port() => vec![Call::PostRecv],
        Inject::DeadPeer => vec![Call::PostRecv],
        _ => vec![Call::PostRecv, Call::PostSrqRecv],
    }
}
