//! A driver for fuzz targets, in place of libFuzzer, on stable Rust: seeded random inputs for a smoke test,
//! or inputs that are guided by coverage where the target is instrumented.
//!
//! The binary that the macro makes takes `SEED RUNS ARTIFACTS [CORPUS...]`, `--replay FILE`, or
//! `--guided SEED RUNS SECONDS ARTIFACTS CORPUS`. An input that makes the target panic, or that takes it a
//! minute, is written to the folder ARTIFACTS. The current input is there, too, for when a signal ends the
//! process.

mod corpus;
mod coverage;
mod guided;
mod random;
mod record;
mod smoke;

use std::ffi::c_int;
use std::path::Path;
use std::{env, fs};

pub use arbitrary;

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
            Err(error) => record::complain(file, &error),
        },
        [flag, seed, runs, seconds, artifacts, corpus] if flag == "--guided" => {
            let (Ok(seed), Ok(runs), Ok(seconds)) = (seed.parse(), runs.parse(), seconds.parse())
            else {
                return usage();
            };
            let (artifacts, corpus) = (Path::new(artifacts), Path::new(corpus));
            guided::run(target, &guided::Campaign { seed, runs, seconds, artifacts, corpus })
        }
        [seed, runs, artifacts, corpora @ ..] => match (seed.parse(), runs.parse()) {
            (Ok(seed), Ok(runs)) => smoke::smoke(target, seed, runs, Path::new(artifacts), corpora),
            _ => usage(),
        },
        _ => usage(),
    }
}

fn usage() -> c_int {
    eprintln!(
        "usage: TARGET SEED RUNS ARTIFACTS [CORPUS...] | TARGET --guided SEED RUNS SECONDS ARTIFACTS CORPUS | \
         TARGET --replay FILE"
    );
    2
}

/// Makes the program that runs a target. As libfuzzer-sys has it, for bytes and for anything that
/// `arbitrary` can make of bytes.
#[macro_export]
macro_rules! fuzz_target {
    (|$data:ident| $body:expr) => {
        $crate::fuzz_target!(|$data: &[u8]| $body);
    };
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
