//! Completion scripts and manual pages, made from the description of the command line.

use std::io::{self, Write};
use std::path::PathBuf;
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
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(command.disable_help_subcommand(true), folder));
    written.map_err(|error| {
        let what = format!("cannot write into {}", folder.display());
        Failure::new(what, error, "choose a folder that you may write to")
    })?;
    Ok(ExitCode::SUCCESS)
}
