//! The plan, checked. What is wrong with one is said with its line, its key and what is allowed.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use quipu_nic::{QpState, WcStatus};

use crate::raw::RawPlan;
use crate::reader::Reader;
use crate::words::{Call, CmEvent, Errno, EventKind, Opcode};

/// What is wrong with a plan, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {what}")]
pub struct PlanError {
    /// The file.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong, and what would be right.
    pub what: String,
}

/// What fails, where and when.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its file, as the user names it.
    pub file: String,
    /// What all draws follow from.
    pub seed: u64,
    /// The faults, in the order of the file.
    pub faults: Vec<Fault>,
    /// Tells plans apart: a log repeats only the plan that it was written with.
    pub fingerprint: u64,
}

/// One fault of a plan.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Its line in the file.
    pub line: usize,
    /// Its name, if it has one.
    pub name: Option<String>,
    /// What happens.
    pub inject: Inject,
    /// What it happens at.
    pub trigger: Trigger,
    /// To which of those.
    pub filter: Filter,
    /// When.
    pub schedule: Schedule,
    /// In which processes.
    pub process: ProcessFilter,
}

/// What happens. Times are nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inject {
    /// A request fails with this status.
    Completion(WcStatus),
    /// A completion shows up late.
    Delay {
        /// By so much at least.
        time: u64,
        /// And by so much more at most.
        jitter: u64,
    },
    /// A request is executed late.
    SlowPeer {
        /// By so much at least.
        time: u64,
        /// And by so much more at most.
        jitter: u64,
    },
    /// Nothing of a queue pair is acknowledged any more.
    DeadPeer,
    /// A message finds no receive.
    Rnr {
        /// So often.
        times: u32,
        /// With a pause each time.
        time: u64,
    },
    /// The port is down.
    PortDown {
        /// For so long, or for ever.
        time: Option<u64>,
    },
    /// The device is gone.
    DeviceRemoval,
    /// An asynchronous event.
    Event(EventKind),
    /// An event of rdma_cm, with this status.
    CmEvent(CmEvent, i32),
    /// A call is refused.
    Refuse(Errno),
}

/// What a fault happens at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// One of these calls.
    Calls(Vec<Call>),
    /// The clock, since the device was opened: at this time, and then with this period.
    Clock(u64, Option<u64>),
}

/// Which operations a fault concerns: those that all of this is true of.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// The operation is one of these; empty: any.
    pub opcodes: Vec<Opcode>,
    /// Its payload, or the memory of its receive or region, has so many bytes.
    pub bytes: Option<RangeInclusive<u64>>,
    /// Its queue pair is the nth that the process created, for one of these; empty: any.
    pub qps: Vec<u32>,
    /// Its queue pair has one of these numbers; empty: any.
    pub qp_nums: Vec<u32>,
    /// It completes to the nth queue that the process created, for one of these; empty: any.
    pub cqs: Vec<u32>,
    /// The state that a queue pair is to go to.
    pub state: Option<QpState>,
}

/// Which of the matching operations are struck.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The first one.
    pub nth: u64,
    /// From there on every so many.
    pub every: u64,
    /// And of those a share.
    pub probability: f64,
    /// None before this time since the device was opened, in nanoseconds. Earlier ones are not counted.
    pub after: u64,
    /// So many at most.
    pub count: u64,
}

/// In which processes a fault is.
#[derive(Clone, Debug, Default)]
pub struct ProcessFilter {
    pub(crate) programs: Vec<String>,
    pub(crate) env: BTreeMap<String, String>,
}

/// The process that a plan is for.
pub struct Process<'a> {
    /// The file name of its program.
    pub program: &'a str,
    /// Its variables.
    pub env: &'a dyn Fn(&str) -> Option<String>,
}

impl ProcessFilter {
    /// Whether the fault is in `process`.
    #[must_use]
    pub fn admits(&self, process: &Process<'_>) -> bool {
        let named =
            self.programs.is_empty() || self.programs.iter().any(|name| name == process.program);
        let set = |(name, value): (&String, &String)| (process.env)(name).as_ref() == Some(value);
        named && self.env.iter().all(set)
    }
}

impl Plan {
    /// Reads a plan; `file` is its name for messages.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn parse(text: &str, file: &str) -> Result<Self, PlanError> {
        let reader = Reader::new(text, file);
        let raw: RawPlan = toml::from_str(text).map_err(|error| {
            reader.misread(error.span().unwrap_or(0..0), error.message().trim())
        })?;
        if raw.fault.is_empty() {
            return Err(reader.error(0..0, "the plan has no [[fault]]"));
        }
        let faults = raw.fault.into_iter().map(|fault| reader.fault(fault));
        Ok(Self {
            file: file.to_owned(),
            seed: raw.seed,
            faults: faults.collect::<Result<_, _>>()?,
            fingerprint: fingerprint(text),
        })
    }
}

/// FNV-1a of the text.
fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
