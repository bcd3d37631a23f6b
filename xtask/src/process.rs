//! Child processes that cannot outlive a test: each leads a process group of its own, has a
//! deadline, and is killed with all its children when it is dropped.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};

/// For how long the outputs of what was killed may stay open.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How often a condition is looked at that nothing announces.
const LOOK: Duration = Duration::from_millis(2);

/// A running child.
pub(crate) struct Running {
    child: Child,
    /// What it has written so far, to standard output and standard error.
    said: [Arc<Mutex<Vec<u8>>>; 2],
    /// Tells of the end of each of the two.
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

    /// Whether it was killed, as its time was over or nobody wanted it any more.
    pub(crate) fn was_killed(&self) -> bool {
        self.status.is_none_or(|status| status.signal() == Some(Signal::KILL.as_raw()))
    }

    /// Whether a signal of its own making ended it, or, as shells say it, what it had started.
    pub(crate) fn crashed(&self) -> bool {
        !self.was_killed()
            && self.status.is_some_and(|status| status.code().is_none_or(|code| code > 128))
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
        let said = [collect(stdout, end.clone()), collect(stderr, end)];
        Ok(Self { child, said, ended, status: None })
    }

    /// The process's number.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to standard output so far.
    pub(crate) fn said(&self) -> String {
        text_of(&self.said[0])
    }

    /// Whether that has a text in it.
    pub(crate) fn has_said(&self, text: &str) -> bool {
        self.said().contains(text)
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
        let mut open = 2;
        while open > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if self.ended.recv_timeout(left).is_err() {
                break;
            }
            open -= 1;
        }
        // With an output open something runs that it has started, whether it has ended itself or not.
        if open == 0 {
            wait_until(deadline, || self.has_ended());
        }
        let status = self.status;
        if status.is_none() {
            self.kill();
            self.status = self.child.wait().ok();
        }
        for _ in 0..open {
            // What is not of its group lives on, and is not waited for.
            let _ = self.ended.recv_timeout(LAST_WORDS);
        }
        let [stdout, stderr] = self.said.each_ref().map(|said| text_of(said));
        Ended { status, stdout, stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// Has a thread read to the end; where what has come so far is found.
fn collect(mut from: impl Read + Send + 'static, end: Sender<()>) -> Arc<Mutex<Vec<u8>>> {
    let so_far = Arc::<Mutex<Vec<u8>>>::default();
    let said = Arc::clone(&so_far);
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => {
                    let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
                    said.extend_from_slice(&buffer[..len]);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        let _ = end.send(());
    });
    so_far
}

fn text_of(said: &Mutex<Vec<u8>>) -> String {
    String::from_utf8_lossy(&said.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
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
    fn a_crash_is_told_from_an_error_and_from_being_killed() {
        let of = |script| {
            let ended = capture(shell(script), Duration::from_secs(20)).unwrap();
            (ended.crashed(), ended.was_killed())
        };
        assert_eq!(of("exit 1"), (false, false));
        assert_eq!(of("kill -SEGV $$"), (true, false));
        assert_eq!(of("sh -c 'kill -ABRT $$'; exit $?"), (true, false));
        assert_eq!(of("kill -KILL $$"), (false, true));
        let late = capture(shell("exec sleep 1000"), Duration::ZERO).unwrap();
        assert_eq!((late.crashed(), late.was_killed()), (false, true));
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
        // One that leaves a child behind, which has its outputs, has not ended; and one that its group does
        // not know of is not waited for.
        for start in ["sleep 20 &", "setsid sleep 20 &"] {
            let begun = Instant::now();
            let ended = capture(shell(&format!("echo a; {start} exit 0")), Duration::from_secs(1));
            let ended = ended.unwrap();
            assert!(begun.elapsed() < Duration::from_secs(15));
            assert_eq!((ended.verdict().as_str(), &*ended.stdout), ("did not end in time", "a\n"));
        }
    }
}
