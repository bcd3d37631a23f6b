//! Programs that the benchmark starts, which end with it.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long a program may take to begin.
const PATIENCE: Duration = Duration::from_secs(20);

/// A program.
pub(super) struct Running(pub(super) Child);

impl Running {
    /// Waits for its end, for `limit` at most.
    pub(super) fn wait(&mut self, limit: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < limit && matches!(self.0.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command and its arguments.
pub(super) fn command(line: &[&str]) -> Command {
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).stdin(Stdio::null());
    command
}

/// Starts a program, and waits for the first line that it prints.
pub(super) fn start(mut command: Command) -> io::Result<(Running, String)> {
    let mut running = Running(command.stdout(Stdio::piped()).spawn()?);
    let mut line = String::new();
    // The pipe stays open: the program may print more.
    let output = running.0.stdout.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
    BufReader::new(output).read_line(&mut line)?;
    if line.is_empty() {
        return Err(io::Error::other(format!("{command:?} ended")));
    }
    Ok((running, line))
}

/// Starts a program, and waits for a file that it makes.
pub(super) fn start_until(mut command: Command, file: &Path) -> io::Result<Running> {
    let running = Running(command.stdout(Stdio::null()).spawn()?);
    let begun = Instant::now();
    while !file.exists() {
        if begun.elapsed() > PATIENCE {
            return Err(io::Error::other(format!("{command:?} did not begin")));
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(running)
}

/// Runs a program to its end and returns what it printed.
pub(super) fn run(line: &[&str]) -> io::Result<String> {
    let output = command(line).output()?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(io::Error::other(format!("{}: {text}", line.join(" "))));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a program is installed.
pub(super) fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<_> = std::env::split_paths(&path).collect();
    folders.extend(["/usr/sbin".into(), "/sbin".into()]);
    folders.iter().any(|folder| folder.join(program).exists())
}

/// A folder for the time of the benchmark.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> io::Result<Self> {
        let folder = std::env::temp_dir().join(format!("quipu-nbd-bench-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        Ok(Self(folder))
    }

    pub(super) fn path(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
