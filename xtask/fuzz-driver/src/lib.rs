//! A driver for fuzz targets that feeds them seeded random inputs: a smoke test on stable Rust, in
//! place of libFuzzer, which finds more.
//!
//! The binary that the macro makes takes `SEED RUNS ARTIFACTS [CORPUS...]`, or `--replay FILE`. An
//! input that makes the target panic, or that it is not done with for a minute, is written to the folder
//! ARTIFACTS. There is the current one, too, for when a signal ends the process.

mod smoke;

pub use arbitrary;
pub use smoke::drive;

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
