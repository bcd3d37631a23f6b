//! The log: what was injected, for people and for machines, and how a log is repeated.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::plan::Plan;
use crate::units::shown;

/// One fault that was injected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its number in this process, from 1.
    pub fault: u64,
    /// Which `[[fault]]` of the plan, from 1, and where it stands there.
    pub rule: usize,
    /// Its line.
    pub line: usize,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Which of the operations that pass the rule's filters it was, from 1, those before its time with them:
    /// by this a log is repeated.
    pub passed: u64,
    /// Which of the operations that match the rule's filters it was, from 1; which time, for the clock's.
    pub matched: u64,
    /// Nanoseconds since the device was opened.
    pub time_ns: u64,
    /// The call, by its name, or `clock`.
    pub call: String,
    /// The operation of a send.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opcode: Option<String>,
    /// The queue pair: which one that the process created, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qp: Option<u32>,
    /// Its number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qp_num: Option<u32>,
    /// The request's identifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wr_id: Option<u64>,
    /// Its bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// What happened.
    pub effect: String,
    /// The time that was drawn for it, in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drawn_ns: Option<u64>,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fault {}: line {}", self.fault, self.line)?;
        if let Some(name) = &self.name {
            write!(f, " {name:?}")?;
        }
        write!(f, ", match {}, at {}: ", self.matched, shown(self.time_ns))?;
        match &self.opcode {
            Some(opcode) => write!(f, "{opcode}")?,
            None => write!(f, "{}", self.call)?,
        }
        if let Some(bytes) = self.bytes {
            write!(f, " of {bytes} bytes")?;
        }
        if let Some(wr_id) = self.wr_id {
            write!(f, ", wr_id {wr_id:#x}")?;
        }
        if let (Some(qp), Some(num)) = (self.qp, self.qp_num) {
            write!(f, ", queue pair {qp} ({num:#08x})")?;
        }
        write!(f, ": {}", self.effect)
    }
}

/// The first line of a log: what it was written with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The plan's file.
    pub plan: String,
    /// Its fingerprint.
    pub fingerprint: u64,
    /// Its seed.
    pub seed: u64,
    /// The process.
    pub pid: u32,
    /// Its program.
    pub program: String,
}

impl Header {
    /// That of a process that runs under `plan`.
    #[must_use]
    pub fn new(plan: &Plan, pid: u32, program: &str) -> Self {
        let (fingerprint, seed) = (plan.fingerprint, plan.seed);
        Self { plan: plan.file.clone(), fingerprint, seed, pid, program: program.to_owned() }
    }
}

/// A line of a log in JSON.
pub fn json(line: &impl Serialize) -> String {
    serde_json::to_string(line).unwrap_or_default()
}

/// Why a log cannot be repeated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {what}")]
pub struct ReplayError {
    /// The log.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

/// What an earlier run injected: by rule and operation, with the time that was drawn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replay {
    struck: BTreeMap<(usize, u64), Struck>,
}

/// What is known of a fault that is to be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Struck {
    pub(crate) drawn_ns: Option<u64>,
}

impl Replay {
    /// Reads a log that a process wrote under the same plan.
    ///
    /// # Errors
    /// It is no such log, or one of several processes.
    pub fn parse(text: &str, file: &str, plan: &Plan) -> Result<Self, ReplayError> {
        let error = |line: usize, what: &str| ReplayError {
            file: file.to_owned(),
            line,
            what: what.to_owned(),
        };
        let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
        let (_, first) = lines.next().ok_or_else(|| error(1, "the log is empty"))?;
        let header: Header =
            serde_json::from_str(first).map_err(|_| error(1, "this is no log of faults"))?;
        if header.fingerprint != plan.fingerprint {
            let what = format!("the log is of another plan, or {} was changed since", plan.file);
            return Err(error(1, &what));
        }
        let mut struck = BTreeMap::new();
        for (number, line) in lines {
            if serde_json::from_str::<Header>(line).is_ok() {
                let what = "the log is of several processes: write one each, with %p in its name";
                return Err(error(number, what));
            }
            let record: Record =
                serde_json::from_str(line).map_err(|_| error(number, "this is no fault"))?;
            let Record { rule, passed, drawn_ns, .. } = record;
            struck.insert((rule, passed), Struck { drawn_ns });
        }
        Ok(Self { struck })
    }

    /// What was done to operation number `passed` of those that pass the filters of rule number `rule`.
    pub(crate) fn find(&self, rule: usize, passed: u64) -> Option<Struck> {
        self.struck.get(&(rule, passed)).copied()
    }
}
