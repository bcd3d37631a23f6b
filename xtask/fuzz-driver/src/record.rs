//! What is kept of an input that a target fails with, and the watch over targets that never end.

use std::ffi::c_int;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fs, io, process, thread};

/// The longest time that one input may take, on a machine that does other things as well.
const LONGEST: Duration = Duration::from_secs(60);

/// Says what has failed; the exit code.
pub(crate) fn complain(what: &str, error: &io::Error) -> c_int {
    eprintln!("{what}: {error}");
    2
}

/// Has the current input in a file, and ends the program if a target is not done with it for long.
pub(crate) struct Guard {
    seed: u64,
    artifacts: PathBuf,
    record: Record,
    current: Arc<Mutex<Current>>,
}

impl Guard {
    pub(crate) fn new(artifacts: &Path, seed: u64) -> io::Result<Self> {
        let record = Record::new(artifacts, seed)?;
        let current = watch(seed, artifacts);
        Ok(Self { seed, artifacts: artifacts.to_owned(), record, current })
    }

    /// The target is given `input`.
    pub(crate) fn begin(&mut self, run: u64, input: &[u8]) -> io::Result<()> {
        {
            let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
            current.run = run;
            current.input.clear();
            current.input.extend_from_slice(input);
        }
        self.record.write(input)
    }

    /// The target has failed with `input`: writes it down.
    pub(crate) fn keep(&self, what: &str, input: &[u8]) {
        let run = self.current.lock().unwrap_or_else(PoisonError::into_inner).run;
        keep(what, self.seed, run, &self.artifacts, input);
    }
}

/// The file with the current input. It is all that is left of it when a signal ends the process; after other
/// ends it is removed.
struct Record {
    file: File,
    path: PathBuf,
    len: usize,
}

impl Record {
    fn new(artifacts: &Path, seed: u64) -> io::Result<Self> {
        fs::create_dir_all(artifacts)?;
        let path = artifacts.join(format!("seed-{seed}-current"));
        Ok(Self { file: File::create(&path)?, path, len: 0 })
    }

    fn write(&mut self, input: &[u8]) -> io::Result<()> {
        self.file.write_all_at(input, 0)?;
        if input.len() < self.len {
            self.file.set_len(input.len() as u64)?;
        }
        self.len = input.len();
        Ok(())
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Writes an input down, and says where.
fn keep(what: &str, seed: u64, run: u64, artifacts: &Path, input: &[u8]) {
    let file = artifacts.join(format!("seed-{seed}-run-{run}"));
    let _ = fs::create_dir_all(artifacts);
    let _ = fs::write(&file, input);
    eprintln!("{what} in run {run} of seed {seed}; the input is {}", file.display());
}

/// The input that the target is given.
#[derive(Default)]
struct Current {
    run: u64,
    input: Vec<u8>,
}

/// Ends the program with an error if a target is not done with one input for long: how it is told which.
fn watch(seed: u64, artifacts: &Path) -> Arc<Mutex<Current>> {
    let current = Arc::new(Mutex::new(Current::default()));
    let (watched, artifacts) = (Arc::clone(&current), artifacts.to_owned());
    thread::spawn(move || {
        let mut before = None;
        loop {
            {
                let now = watched.lock().unwrap_or_else(PoisonError::into_inner);
                if before == Some(now.run) {
                    keep("no end", seed, now.run, &artifacts, &now.input);
                    process::exit(1);
                }
                before = Some(now.run);
            }
            thread::sleep(LONGEST);
        }
    });
    current
}
