//! Child processes that cannot outlive a test: each leads a process group of its own, has a
//! deadline, and is killed with all its children when it is dropped.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};

/// How often a condition is looked at that nothing announces.
const LOOK: Duration = Duration::from_millis(2);

/// A running child.
pub(crate) struct Running {
    child: Child,
    output: Option<[JoinHandle<String>; 2]>,
    /// What it has written to standard output so far.
    said: Arc<Mutex<String>>,
    ended: Receiver<()>,
    status: Option<ExitStatus>,
}

/// What a child left behind.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Its status; `None` if it had to be killed because its time was over.
    pub(crate) status: Option<ExitStatus>,
    /// What it wrote to standard output.
    pub(crate) stdout: String,
    /// What it wrote to standard error.
    pub(crate) stderr: String,
}

impl Ended {
    /// Whether it ended by itself with status 0.
    pub(crate) fn success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// How it ended, in words.
    pub(crate) fn verdict(&self) -> String {
        match self.status {
            None => "did not end in time".into(),
            Some(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("ended with status {code}"),
                (None, Some(signal)) => format!("was ended by signal {signal}"),
                (None, None) => "ended".into(),
            },
        }
    }

    /// Both outputs, indented, for a report of a failure.
    pub(crate) fn text(&self, who: &str) -> String {
        let mut text = format!("  {who} {}\n", self.verdict());
        for (name, output) in [("out", &self.stdout), ("err", &self.stderr)] {
            for line in output.lines() {
                text += &format!("  {who} {name}| {line}\n");
            }
        }
        text
    }
}

impl Running {
    /// Starts a command in a process group of its own, with its outputs captured.
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        command.process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let (end, ended) = channel();
        let stdout = child.stdout.take().context("no standard output")?;
        let stderr = child.stderr.take().context("no standard error")?;
        // The output is at its end when every process that could write to it is gone.
        let said = Arc::<Mutex<String>>::default();
        let output = [
            thread::spawn({
                let (end, said) = (end.clone(), Arc::clone(&said));
                move || read_all(stdout, &said, &end)
            }),
            thread::spawn(move || read_all(stderr, &Mutex::default(), &end)),
        ];
        Ok(Self { child, output: Some(output), said, ended, status: None })
    }

    /// The process's number.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to standard output so far.
    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether that has a text in it.
    pub(crate) fn has_said(&self, text: &str) -> bool {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).contains(text)
    }

    /// Whether it has ended, without waiting.
    pub(crate) fn has_ended(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status.is_some()
    }

    /// Kills the process and everything it started.
    pub(crate) fn kill(&mut self) {
        // Its number cannot have been given to another process before it was waited for.
        if self.status.is_none()
            && let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
        {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    /// Waits until `deadline` at most, then kills.
    pub(crate) fn finish(mut self, deadline: Instant) -> Ended {
        // Both outputs end when the process does; that wakes us at once.
        for _ in 0..2 {
            let left = deadline.saturating_duration_since(Instant::now());
            let _ = self.ended.recv_timeout(left);
        }
        wait_until(deadline, || self.has_ended());
        let status = self.status;
        if status.is_none() {
            self.kill();
            self.status = self.child.wait().ok();
        }
        let [stdout, stderr] = self.output.take().map_or_else(Default::default, |output| {
            output.map(|thread| thread.join().unwrap_or_default())
        });
        Ended { status, stdout, stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// Reads to the end; adds to `so_far` what has come.
fn read_all(
    mut from: impl Read,
    so_far: &Mutex<String>,
    end: &std::sync::mpsc::Sender<()>,
) -> String {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(len) => {
                bytes.extend_from_slice(&buffer[..len]);
                let text = String::from_utf8_lossy(&buffer[..len]);
                so_far.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let _ = end.send(());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Looks at a condition until it holds or the time is over; whether it holds.
pub(crate) fn wait_until(deadline: Instant, mut condition: impl FnMut() -> bool) -> bool {
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(LOOK);
    }
}

/// Runs a command to its end within a time.
pub(crate) fn capture(command: Command, limit: Duration) -> Result<Ended> {
    Ok(Running::start(command)?.finish(Instant::now() + limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn outputs_and_status_are_captured() {
        let ended = capture(shell("echo a; echo b >&2; exit 3"), Duration::from_secs(20)).unwrap();
        assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("a\n", "b\n"));
        assert_eq!(ended.verdict(), "ended with status 3");
    }

    #[test]
    fn what_a_child_says_is_known_while_it_runs() {
        let running = Running::start(shell("echo ready; exec sleep 1000")).unwrap();
        assert!(
            wait_until(Instant::now() + Duration::from_secs(20), || running.has_said("ready\n"))
        );
        assert_eq!(running.said(), "ready\n");
    }

    #[test]
    fn a_child_and_its_children_are_killed_when_their_time_is_over() {
        let ended = capture(shell("sleep 1000 & sleep 1000"), Duration::ZERO).unwrap();
        assert!(!ended.success());
        assert_eq!(ended.verdict(), "did not end in time");
    }
}
