//! What an experiment gets and returns.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

pub use anyhow::Error;
use anyhow::{Context, Result, ensure};
use quipu_figure::Chart;

use crate::data::Figure;

/// Lines of a command's standard error that the message of its failure has.
const KEPT_LINES: usize = 5;

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

    /// Runs `quipu` with some environment variables and arguments and returns its standard output. What it
    /// prints to standard error is progress.
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
        let mut stdout = child.stdout.take().context("no standard output")?;
        let output = thread::spawn(move || {
            let mut bytes = Vec::new();
            stdout.read_to_end(&mut bytes).map(|_| bytes)
        });
        let mut last = VecDeque::new();
        let mut errors = BufReader::new(child.stderr.take().context("no standard error")?);
        let mut bytes = Vec::new();
        while errors.read_until(b'\n', &mut bytes)? > 0 {
            let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            (self.progress)(&text);
            last.truncate(KEPT_LINES - 1);
            last.push_front(text);
            bytes.clear();
        }
        let status = child.wait()?;
        let end = last.into_iter().rev().collect::<Vec<_>>().join("; ");
        ensure!(status.success(), "{line} failed ({status}): {end}");
        output.join().ok().context("the reader of standard output failed")?.map_err(Error::from)
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
