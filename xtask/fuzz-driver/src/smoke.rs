//! The runs, and the inputs for them.

use std::ffi::c_int;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{env, fs, io, process, thread};

/// The longest time that one input may take, on a machine that does other things as well.
const LONGEST: Duration = Duration::from_secs(60);
/// Longest input.
const MAX_LEN: usize = 4096;
/// Inputs kept to be changed a little.
const POOL: usize = 64;
/// Values at which arithmetic goes wrong.
const EDGES: [u8; 10] = [0, 1, 2, 3, 4, 0x40, 0x7f, 0x80, 0xfe, 0xff];

/// Runs the target as the command line says; the exit code.
pub fn drive(target: fn(&[u8])) -> c_int {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.as_slice() {
        [flag, file] if flag == "--replay" => match fs::read(file) {
            Ok(input) => {
                target(&input);
                println!("{file}: no panic");
                0
            }
            Err(error) => {
                eprintln!("{file}: {error}");
                2
            }
        },
        [seed, runs, artifacts, corpus @ ..] => match (seed.parse(), runs.parse()) {
            (Ok(seed), Ok(runs)) => smoke(target, seed, runs, Path::new(artifacts), corpus),
            _ => usage(),
        },
        _ => usage(),
    }
}

fn usage() -> c_int {
    eprintln!("usage: TARGET SEED RUNS ARTIFACTS [CORPUS...] | TARGET --replay FILE");
    2
}

pub(crate) fn smoke(
    target: fn(&[u8]),
    seed: u64,
    runs: u64,
    artifacts: &Path,
    corpus: &[String],
) -> c_int {
    let mut random = Random(seed);
    let (mut pool, mut record) = match (read_all(corpus), Record::new(artifacts, seed)) {
        (Ok(pool), Ok(record)) => (pool, record),
        (Err(error), _) => return complain("the corpus", &error),
        (_, Err(error)) => return complain("the folder of artifacts", &error),
    };
    let current = watch(seed, artifacts);
    for run in 0..runs {
        let input = match pool.get(run as usize) {
            Some(input) => input.clone(),
            None => random.input(&pool),
        };
        {
            let mut current = current.lock().unwrap_or_else(PoisonError::into_inner);
            current.run = run;
            current.input.clone_from(&input);
        }
        if let Err(error) = record.write(&input) {
            return complain("the current input", &error);
        }
        if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
            keep("panic", seed, run, artifacts, &input);
            return 1;
        }
        if pool.len() < POOL {
            pool.push(input);
        } else {
            let slot = random.below(POOL);
            pool[slot] = input;
        }
    }
    0
}

fn complain(what: &str, error: &io::Error) -> c_int {
    eprintln!("{what}: {error}");
    2
}

/// The files in folders.
fn read_all(folders: &[String]) -> io::Result<Vec<Vec<u8>>> {
    let mut inputs = Vec::new();
    for folder in folders {
        for entry in fs::read_dir(folder)? {
            inputs.push(fs::read(entry?.path())?);
        }
    }
    inputs.sort();
    Ok(inputs)
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

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn byte(&mut self) -> u8 {
        match self.below(3) {
            0 => EDGES[self.below(EDGES.len())],
            _ => self.next() as u8,
        }
    }

    fn input(&mut self, pool: &[Vec<u8>]) -> Vec<u8> {
        let mut input = match self.below(4) {
            0 => Vec::new(),
            _ if pool.is_empty() => Vec::new(),
            _ => pool[self.below(pool.len())].clone(),
        };
        if input.is_empty() {
            let limit = [16, 64, 256, MAX_LEN][self.below(4)];
            let len = self.below(limit);
            input.extend((0..len).map(|_| self.byte()));
        }
        for _ in 0..self.below(6) {
            self.mutate(&mut input, pool);
        }
        input.truncate(MAX_LEN);
        input
    }

    fn mutate(&mut self, input: &mut Vec<u8>, pool: &[Vec<u8>]) {
        let at = self.below(input.len());
        match self.below(6) {
            0 => input.truncate(at),
            1 => input.insert(at, self.byte()),
            2 if !input.is_empty() => input[at] ^= 1 << self.below(8),
            3 if !input.is_empty() => input[at] = self.byte(),
            4 if !input.is_empty() => drop(input.remove(at)),
            5 if !pool.is_empty() => {
                let other = &pool[self.below(pool.len())];
                let from = self.below(other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            _ => input.push(self.byte()),
        }
    }
}
