//! A driver for fuzz targets that feeds them seeded random inputs: a smoke test on stable Rust, in
//! place of libFuzzer, which finds more.
//!
//! The binary that the macro makes takes `SEED RUNS ARTIFACTS [CORPUS...]`, or `--replay FILE`. An
//! input that makes the target panic, or that it is not done with for a minute, is written to the folder
//! ARTIFACTS.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{env, fs, process, thread};

pub use arbitrary;

/// Makes the program that runs a target. As libfuzzer-sys has it, for bytes and for anything that
/// `arbitrary` can make of bytes.
#[macro_export]
macro_rules! fuzz_target {
    (|$data:ident| $body:expr) => { $crate::fuzz_target!(|$data: &[u8]| $body); };
    (|$data:ident: &[u8]| $body:expr) => {
        fn __fuzz($data: &[u8]) {
            $body
        }
        #[unsafe(no_mangle)]
        extern "C" fn main() -> ::std::ffi::c_int {
            $crate::drive(__fuzz)
        }
    };
    (|$data:ident: $ty:ty| $body:expr) => {
        fn __fuzz(bytes: &[u8]) {
            use $crate::arbitrary::{Arbitrary, Unstructured};
            fn run($data: $ty) {
                $body
            }
            if let Ok(data) = <$ty as Arbitrary>::arbitrary_take_rest(Unstructured::new(bytes)) {
                run(data);
            }
        }
        #[unsafe(no_mangle)]
        extern "C" fn main() -> ::std::ffi::c_int {
            $crate::drive(__fuzz)
        }
    };
}

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

fn smoke(target: fn(&[u8]), seed: u64, runs: u64, artifacts: &Path, corpus: &[String]) -> c_int {
    let mut random = Random(seed);
    let mut pool: Vec<Vec<u8>> = corpus.iter().flat_map(fs::read_dir).flatten().flatten()
        .filter_map(|entry| fs::read(entry.path()).ok())
        .collect();
    pool.sort();
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
