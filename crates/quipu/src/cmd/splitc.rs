//! `quipu splitc`: compiles Split-C programs.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use quipu_splitc::driver::{self, DriverError};

use super::failure::Failure;
use super::libraries;

/// What to do.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    task: Task,
}

#[derive(clap::Subcommand)]
enum Task {
    /// Compile and link Split-C programs, as `cc` does with C programs.
    Cc(CcOptions),
}

/// The arguments of the compiler.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES, disable_help_flag = true, disable_version_flag = true)]
struct CcOptions {
    /// Files and options: `FILE.sc` is Split-C, other files and options are those of the system's C compiler.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENT"
    )]
    arguments: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  quipu splitc cc em3d.sc -o em3d              compile and link
  quipu spmd -n 8 -- ./em3d                    run on eight processes
  quipu splitc cc -O2 -Wall -c a.sc            an object file, a.o
  quipu splitc cc a.o b.sc util.c -o prog -lm
  quipu splitc cc --translate em3d.sc          print the C text

CC names the C compiler, `cc` by default. -o, -c, -I, -D, -U, -L and -l mean what they mean to it,
and all other options are handed to it. -E, -S and position-independent programs are not supported.

Exit codes: that of the C compiler, or 1 if the program cannot be translated, 2 if the options are
wrong, 125 if quipu cannot do it.

docs/split-c.md describes the language.";

/// Compiles.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let Task::Cc(options) = &options.task;
    let library = libraries::find_one(libraries::SPLITC)?;
    let folder = library.parent().unwrap_or(Path::new("/"));
    let failure = |error: DriverError| match error {
        DriverError::Program(error) => {
            eprintln!("{error}");
            Failure::new("cannot compile", "the program has an error", "")
        }
        DriverError::Usage(why) => Failure::new("cannot compile", why, "").with_code(2),
        error => Failure::new("cannot compile", error, "").with_code(125),
    };
    driver::run(&options.arguments, folder).map(ExitCode::from).map_err(failure)
}
