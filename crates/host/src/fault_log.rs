//! Where injected faults are told: to people on standard error, or to machines in a file of JSON lines.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use quipu_cabi::{Hold, spared};
use quipu_fault::{Header, Injector, Plan, Record, json};

use crate::error::OpenError;
use crate::sys;

/// So many of each `[[fault]]` are shown on standard error.
const SHOWN: u32 = 20;

/// The log of one process.
pub(crate) struct FaultLog {
    file: Option<File>,
    /// How many of each `[[fault]]` were shown.
    shown: HashMap<usize, u32>,
    /// The plan and its seed.
    plan: (String, u64),
}

impl FaultLog {
    /// A log into `path`, in whose name `%p` stands for the process, or else to standard error.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub(crate) fn open(path: Option<&Path>, plan: &Plan, program: &str) -> Result<Self, OpenError> {
        let pid = std::process::id();
        let file = path.map(|path| {
            let mut file = sys::log(path)?;
            let header = json(&Header::new(plan, pid, program)) + "\n";
            spared(|| file.write_all(header.as_bytes()))?;
            Ok(file)
        });
        let file = file.transpose().map_err(|error: std::io::Error| {
            let path = path.unwrap_or(Path::new("")).display().to_string();
            OpenError::FaultLog(format!("{path}: {error}"))
        })?;
        let plan = (plan.file.clone(), plan.seed);
        Ok(Self { file, shown: HashMap::new(), plan })
    }

    /// Writes one line.
    pub(crate) fn write(&mut self, record: &Record) {
        let _hold = Hold::new();
        // A program goes on whose log cannot be written.
        if let Some(file) = &mut self.file {
            // At once, so that it is not mixed with what others write there.
            let _ = spared(|| file.write_all((json(record) + "\n").as_bytes()));
            return;
        }
        let shown = self.shown.entry(record.rule).or_default();
        *shown += 1;
        let mut stderr = std::io::stderr();
        if *shown <= SHOWN {
            let _ = stderr.write_all(format!("quipu: {record}\n").as_bytes());
        }
        if *shown == SHOWN {
            let line = record.line;
            let _ = writeln!(
                stderr,
                "quipu: further faults of line {line} are not shown; QUIPU_FAULT_LOG=FILE has all"
            );
        }
    }

    /// Says what was done, and which faults of the plan never were.
    pub(crate) fn sum_up(&mut self, injector: &Injector) {
        let (file, seed) = &self.plan;
        let count = injector.injected();
        let faults = if count == 1 { "fault" } else { "faults" };
        let mut text = format!("quipu: {count} {faults} injected by {file}, seed {seed}\n");
        for (line, name, matched, _) in injector.tallies().filter(|tally| tally.3 == 0) {
            let name = name.map(|name| format!(" {name:?}")).unwrap_or_default();
            text += &format!(
                "quipu: line {line}{name} injected nothing; its filters met {matched} operations\n"
            );
        }
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}
