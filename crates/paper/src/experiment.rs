//! What an experiment gets and returns.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub use anyhow::Error;
use anyhow::{Context, Result, ensure};
use quipu_figure::Chart;

use crate::data::Figure;

/// What experiments may use.
pub struct Environment<'a> {
    /// The `quipu` command, which experiments start.
    pub quipu: PathBuf,
    /// A folder for temporary files.
    pub scratch: PathBuf,
    /// Take fewer samples: rough numbers within seconds.
    pub quick: bool,
    /// Called with a line of text when a step begins.
    pub progress: &'a mut dyn FnMut(&str),
}

impl Environment<'_> {
    /// Runs `quipu` with some arguments and returns its standard output, which must be JSON.
    ///
    /// # Errors
    ///
    /// The command cannot be started, fails (the error has the end of what it printed), or prints no JSON.
    pub fn quipu_json(&mut self, arguments: &[&str]) -> Result<serde_json::Value> {
        let output = self.quipu(&[], arguments)?;
        serde_json::from_slice(&output)
            .with_context(|| format!("quipu {} printed no JSON", arguments.join(" ")))
    }

    /// Runs `quipu` with some environment variables and arguments and returns its standard output.
    /// Lines of its standard error are progress.
    ///
    /// # Errors
    ///
    /// The command cannot be started, or fails: the error has the end of what it printed.
    pub fn quipu(&mut self, variables: &[(&str, &str)], arguments: &[&str]) -> Result<Vec<u8>> {
        let line = format!("quipu {}", arguments.join(" "));
        (self.progress)(&line);
        let mut child = Command::new(&self.quipu)
            .args(arguments)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", self.quipu.display()))?;
        let errors = child.stderr.take().context("there is no pipe")?;
        let reader = std::thread::spawn(move || child.wait_with_output());
        let mut last = VecDeque::new();
        // What it says meanwhile is its progress.
        for line in BufReader::new(errors).lines().map_while(Result::ok) {
            (self.progress)(&line);
            last.push_back(line);
            if last.len() > 5 {
                last.pop_front();
            }
        }
        let output = reader.join().map_err(|_| Error::msg("a thread has panicked"))??;
        let last: Vec<_> = last.into();
        ensure!(output.status.success(), "{line} failed ({}): {}", output.status, last.join("; "));
        Ok(output.stdout)
    }

    /// Writes a temporary file and returns its path.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    pub fn file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path: &Path = &self.scratch.join(name);
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path.to_owned())
    }
}

/// What came of an experiment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Our value for each fact, by its id. A fact without a value is reported as not measured.
    pub values: BTreeMap<String, f64>,
    /// Values of this machine for facts that are simulated and measured, by their ids.
    pub live: BTreeMap<String, f64>,
    /// Ids of facts whose values of this machine cannot be measured here; a note says why.
    pub skipped: BTreeSet<String>,
    /// Pictures, the first of which stands for the figure.
    pub charts: Vec<Chart>,
    /// Sentences for the reader: what was skipped, and why.
    pub notes: Vec<String>,
}

impl Measured {
    /// Sets our value of a fact.
    pub fn set(&mut self, fact: &str, value: f64) {
        self.values.insert(fact.to_owned(), value);
    }

    /// Sets this machine's value of a fact that is simulated, too.
    pub fn set_live(&mut self, fact: &str, value: f64) {
        self.live.insert(fact.to_owned(), value);
    }
}

/// The experiments of one paper.
pub trait Experiment {
    /// Measures or simulates a figure. Called once for each figure that the user asked for, so results that
    /// several figures need may be kept.
    ///
    /// # Errors
    ///
    /// The experiment cannot run here; the error says why and what to do.
    fn run(&mut self, figure: &Figure, environment: &mut Environment<'_>) -> Result<Measured>;
}
