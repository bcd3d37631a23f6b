//! What is printed. std's macros panic where nobody reads any more, as behind `| head`; these have their names,
//! and are defined for all modules of the command.

use std::fmt;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::process::ExitCode;

use super::failure::Failure;

/// Prints to standard output. If that fails, the command ends with a [`Failure`]; one that nobody sees if the
/// reader has gone.
macro_rules! print {
    ($($text:tt)*) => { $crate::cmd::output::print(format_args!($($text)*)) };
}

/// As [`print!`], and ends the line.
macro_rules! println {
    ($($text:tt)*) => { print!("{}\n", format_args!($($text)*)) };
}

/// Prints to standard error, if anybody reads it.
macro_rules! eprint {
    ($($text:tt)*) => { $crate::cmd::output::eprint(format_args!($($text)*)) };
}

/// As [`eprint!`], and ends the line.
macro_rules! eprintln {
    ($($text:tt)*) => { eprint!("{}\n", format_args!($($text)*)) };
}

/// What `print!` does.
pub(crate) fn print(text: fmt::Arguments<'_>) {
    if let Err(error) = io::stdout().lock().write_fmt(text) {
        // Everything is undone on the way to `catch`, as for any other failure.
        resume_unwind(Box::new(Failure::from(error)));
    }
}

/// What `eprint!` does.
pub(crate) fn eprint(text: fmt::Arguments<'_>) {
    let _ = io::stderr().lock().write_fmt(text);
}

/// Carries out a command: also what cannot be printed is a failure of it.
pub(crate) fn catch(
    command: impl FnOnce() -> Result<ExitCode, Failure>,
) -> Result<ExitCode, Failure> {
    catch_unwind(AssertUnwindSafe(command)).unwrap_or_else(|payload| {
        match payload.downcast::<Failure>() {
            Ok(failure) => Err(*failure),
            Err(panic) => resume_unwind(panic),
        }
    })
}

/// Makes the folder of `--out`, before anything is measured.
pub(crate) fn make_folder(out: Option<&Path>) -> Result<(), Failure> {
    let Some(folder) = out else { return Ok(()) };
    std::fs::create_dir_all(folder).map_err(|error| {
        let what = format!("cannot write results into {}", folder.display());
        Failure::new(what, error, "give --out a folder that you may write to")
    })
}

/// Writes lines whose columns are as wide as their widest cell. The last column is not padded.
pub(crate) fn table(out: &mut impl Write, lines: &[Vec<String>]) -> io::Result<()> {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for line in lines {
        let padded = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let text = padded.collect::<Vec<_>>().join("  ");
        writeln!(out, "{}", text.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut out = Vec::new();
        let line = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        table(&mut out, &[line(["a", "bb"]), line(["ccc", "d"])]).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "a    bb\nccc  d\n");
    }
}
