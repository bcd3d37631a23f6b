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
    let name = command.get_name().to_owned();
    let written = fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(command.disable_help_subcommand(true), folder))
        .and_then(|()| keep_lines(folder, &name));
    written.map_err(|error| {
        let what = format!("cannot write into {}", folder.display());
        Failure::new(what, error, "choose a folder that you may write to")
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Goes over the pages of the command; others may be in the same folder.
fn keep_lines(folder: &Path, command: &str) -> io::Result<()> {
    for page in fs::read_dir(folder)? {
        let page = page?.path();
        if is_page_of(command, &page) {
            fs::write(&page, with_lines(&fs::read_to_string(&page)?))?;
        }
    }
    Ok(())
}

/// Whether a file is the page of the command, or of one of its subcommands.
fn is_page_of(command: &str, file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str());
    let rest = name.and_then(|name| name.strip_prefix(command)?.strip_suffix(".1"));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
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
    fn pages_of_others_are_left_alone() {
        let folder = std::env::temp_dir().join(format!("quipu-pages-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let page = b".SH EXTRA\r\n  caf\xe9";
        let [ours, below, other] =
            ["quipu.1", "quipu-run.1", "quipus.1"].map(|name| folder.join(name));
        for ours in [&ours, &below] {
            fs::write(ours, ".SH EXTRA\n  a").unwrap();
        }
        fs::write(&other, page).unwrap();
        keep_lines(&folder, "quipu").unwrap();
        for ours in [ours, below] {
            assert_eq!(fs::read_to_string(ours).unwrap(), ".SH EXTRA\n.nf\n  a\n");
        }
        assert_eq!(fs::read(&other).unwrap(), page);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_lines_of_examples_are_kept() {
        let page = ".SH OPTIONS\n  filled\n.SH EXTRA\nExamples:\n  a  # b\n  c\n\nText.\n  d\n.SH VERSION\n1\n";
        let expected = ".SH OPTIONS\n  filled\n.SH EXTRA\nExamples:\n.nf\n  a  # b\n  c\n.fi\n\nText.\n\
                        .nf\n  d\n.fi\n.SH VERSION\n1\n";
        assert_eq!(with_lines(page), expected);
    }
}
