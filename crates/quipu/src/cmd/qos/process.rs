//! Processes of a measurement, which do what their standard input says, line by line.

use std::collections::VecDeque;
use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// What goes wrong while measuring.
pub(super) type Trouble = Box<dyn Error>;

/// The longest wait for a line.
const PATIENCE: Duration = Duration::from_secs(60);
/// Lines of its errors that are kept.
const KEPT: usize = 4;

/// A process of a measurement. Its input ends with this value, which ends the process.
pub(super) struct Process {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Arc<Mutex<VecDeque<String>>>,
}

/// Calls a function with each line, until there are no more.
fn each_line(from: impl Read + Send + 'static, mut took: impl FnMut(String) + Send + 'static) {
    thread::spawn(move || BufReader::new(from).lines().map_while(Result::ok).for_each(&mut took));
}

impl Process {
    /// Starts it.
    pub(super) fn start(mut command: Command) -> Result<Self, Trouble> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        let output = child.stdout.take().ok_or("no pipe")?;
        let stderr = child.stderr.take().ok_or("no pipe")?;
        let (sender, lines) = channel();
        each_line(output, move |line| {
            let _ = sender.send(line);
        });
        let errors = Arc::<Mutex<VecDeque<String>>>::default();
        let kept = Arc::clone(&errors);
        each_line(stderr, move |line| {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push_back(line);
            while kept.len() > KEPT {
                kept.pop_front();
            }
        });
        Ok(Self { child, input, lines, errors })
    }

    /// Its process number.
    pub(super) fn number(&self) -> u32 {
        self.child.id()
    }

    /// Writes a line to it.
    pub(super) fn tell(&mut self, line: &str) -> Result<(), Trouble> {
        let input = self.input.as_mut().ok_or("it has ended")?;
        input.write_all(line.as_bytes())?;
        Ok(input.flush()?)
    }

    /// Reads a line of it. The error has the last lines of its standard error.
    pub(super) fn line(&mut self) -> Result<String, Trouble> {
        self.line_within(PATIENCE)
    }

    /// As [`Self::line`], with the longest wait.
    pub(super) fn line_within(&mut self, patience: Duration) -> Result<String, Trouble> {
        let why = match self.lines.recv_timeout(patience) {
            Ok(line) => return Ok(line),
            Err(RecvTimeoutError::Timeout) => format!("it said nothing for {patience:?}"),
            Err(RecvTimeoutError::Disconnected) => "it has ended early".to_owned(),
        };
        // The rest of what it says may be on its way.
        thread::sleep(Duration::from_millis(50));
        let errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        let errors: Vec<&str> = errors.iter().map(String::as_str).collect();
        Err(format!("{why}: {}", errors.join("; ")).into())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.input = None;
        // It ends when its input does; one that hangs is ended.
        for _ in 0..100 {
            if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
