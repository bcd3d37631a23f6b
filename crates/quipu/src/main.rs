//! The `quipu` command.
#![forbid(unsafe_code)]

mod cmd;

use std::process::ExitCode;

fn main() -> ExitCode {
    cmd::main()
}
