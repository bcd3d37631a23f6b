//! An adapter in a process of its own, to which the program at an end attaches.

use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use quipu_host::{Engine, Guests, Sharer};
use serde::{Deserialize, Serialize};

use super::queue_pair::open;
use crate::pair::Launcher;
use crate::sys::{self, Worker};

/// Looks for the end of such a process, and what is between two of them.
const LOOKS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(2);

/// What such a process is told.
#[derive(Serialize, Deserialize)]
struct Setup {
    name: String,
    link: String,
    address: IpAddr,
}

/// The process of an adapter, which ends when this is dropped.
pub(super) struct OwnProcess {
    child: Child,
    /// Closed to tell it that it is no longer needed.
    input: Option<ChildStdin>,
    name: String,
}

impl OwnProcess {
    /// Starts it in the network namespace of this thread, on another processor.
    ///
    /// # Errors
    ///
    /// It cannot be started, or cannot open the link.
    pub(super) fn start(
        launcher: &Launcher,
        cpu: usize,
        link: &str,
        address: IpAddr,
    ) -> Result<Self> {
        let name = format!("bench-{}-{}", std::process::id(), sys::thread_id());
        let mut program = Command::new(&launcher.program);
        program.args(&launcher.arguments);
        program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = sys::spawn(&mut program, Some(cpu)).context("starting an adapter")?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let mut this = Self { child, input, name: name.clone() };
        let setup = Setup { name, link: link.to_owned(), address };
        let line = serde_json::to_string(&setup)? + "\n";
        this.input.as_mut().context("no standard input")?.write_all(line.as_bytes())?;
        let output = BufReader::new(output.context("no standard output")?);
        let mut lines = output.lines().map_while(Result::ok);
        // Anyone who runs it may have a word to say before.
        let answer = lines.find_map(|line| serde_json::from_str::<Result<(), String>>(&line).ok());
        answer.context("the process of the adapter is gone")?.map_err(|why| anyhow!(why))?;
        Ok(this)
    }

    /// The link of programs that attach.
    pub(super) fn link(&self) -> String {
        format!("share:{}", self.name)
    }

    /// Its processor time.
    pub(super) fn worker(&self) -> Worker {
        Worker::Process(self.child.id())
    }
}

impl Drop for OwnProcess {
    fn drop(&mut self) {
        drop(self.input.take());
        for _ in 0..LOOKS {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(PAUSE);
        }
        sys::end(&mut self.child, 200);
    }
}

/// Shares an adapter until its standard input ends.
///
/// # Errors
///
/// Nobody says which, or it cannot be shared.
pub(crate) fn main() -> Result<()> {
    let mut lines = std::io::stdin().lock().lines();
    let first = lines.next().context("an adapter is started by `quipu bench`, not by hand")??;
    let shared = share(&serde_json::from_str(&first).context("what it is to share")?);
    let answer = shared.as_ref().map(drop).map_err(|error| format!("{error:#}"));
    println!("{}", serde_json::to_string(&answer)?);
    let _shared = shared?;
    lines.for_each(drop);
    Ok(())
}

fn share(setup: &Setup) -> Result<(Sharer, Arc<Engine>)> {
    let engine = open(&setup.link, setup.address)?;
    Ok((Sharer::start(&engine, &setup.name, &Guests::default())?, engine))
}
