//! The runs, and the inputs for them.

use std::ffi::c_int;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use super::corpus;
use super::random::Random;
use super::record::{Guard, complain};

/// Inputs kept to be changed a little.
const POOL: usize = 64;

/// Gives the target the inputs of the corpora, and others by chance, `runs` at least; the exit code.
pub(crate) fn smoke(
    target: fn(&[u8]),
    seed: u64,
    runs: u64,
    artifacts: &Path,
    corpora: &[String],
) -> c_int {
    let mut random = Random(seed);
    let (mut pool, mut guard) = match (read_all(corpora), Guard::new(artifacts, seed)) {
        (Ok(pool), Ok(guard)) => (pool, guard),
        (Err(error), _) => return complain("the corpus", &error),
        (_, Err(error)) => return complain("the folder of artifacts", &error),
    };
    let known = pool.len();
    // One more than the corpora have: a target may look back at them.
    for run in 0..runs.max(known as u64 + 1) {
        let input = match pool.get(run as usize) {
            Some(input) if (run as usize) < known => input.clone(),
            _ => random.input(&pool),
        };
        if let Err(error) = guard.begin(run, &input) {
            return complain("the current input", &error);
        }
        if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
            guard.keep("panic", &input);
            return 1;
        }
        if (run as usize) < known {
            continue;
        }
        if pool.len() < POOL {
            pool.push(input);
        } else {
            let slot = random.below(pool.len());
            pool[slot] = input;
        }
    }
    0
}

fn read_all(corpora: &[String]) -> io::Result<Vec<Vec<u8>>> {
    let all: io::Result<Vec<_>> = corpora.iter().map(|one| corpus::read(Path::new(one))).collect();
    Ok(all?.concat())
}
