//! Completion scripts and manual pages, made from the description of the command line.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;

use super::failure::Failure;

/// For which shell.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    /// The shell.
    shell: Shell,
}

const EXAMPLES: &str = "\
Examples:
  quipu completion bash > ~/.local/share/bash-completion/completions/quipu
  quipu completion zsh > ~/.zfunc/_quipu
  quipu completion fish > ~/.config/fish/completions/quipu.fish";

/// Where to.
#[derive(clap::Args)]
pub(crate) struct ManOptions {
    folder: PathBuf,
}

/// Prints the script.
pub(crate) fn run(options: &Options, mut command: Command) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut command, "quipu", &mut script);
    io::stdout().lock().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes one page for the command and one for each subcommand.
pub(crate) fn man_pages(options: &ManOptions, command: Command) -> Result<ExitCode, Failure> {
    let folder = &options.folder;
    let written = fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(command.disable_help_subcommand(true), folder))
        .and_then(|()| keep_lines(folder));
    written.map_err(|error| {
        let what = format!("cannot write into {}", folder.display());
        Failure::new(what, error, "choose a folder that you may write to")
    })?;
    Ok(ExitCode::SUCCESS)
}

fn keep_lines(folder: &Path) -> io::Result<()> {
    for page in fs::read_dir(folder)? {
        let page = page?.path();
        if page.extension().is_some_and(|extension| extension == "1") {
            fs::write(&page, with_lines(&fs::read_to_string(&page)?))?;
        }
    }
    Ok(())
}

/// A page in which the examples are shown as they are: man(1) would fill lines and stretch blanks.
fn with_lines(page: &str) -> String {
    let (mut out, mut in_examples, mut kept) = (String::new(), false, false);
    for line in page.lines() {
        if line.starts_with(".SH") {
            in_examples = line == ".SH EXTRA";
        }
        let keep = in_examples && line.starts_with(' ');
        if keep != kept {
            out.push_str(if keep { ".nf\n" } else { ".fi\n" });
            kept = keep;
        }
        out.push_str(line);
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_examples_are_kept() {
        let page = ".SH OPTIONS\n  filled\n.SH EXTRA\nExamples:\n  a  # b\n  c\n\nText.\n  d\n.SH VERSION\n1\n";
        let expected = ".SH OPTIONS\n  filled\n.SH EXTRA\nExamples:\n.nf\n  a  # b\n  c\n.fi\n\nText.\n\
                        .nf\n  d\n.fi\n.SH VERSION\n1\n";
        assert_eq!(with_lines(page), expected);
    }
}
