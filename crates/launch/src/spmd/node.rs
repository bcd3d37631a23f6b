//! The ranks on one host: starts them, moves their bytes, sends signals, and reaps them.

use std::env;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use super::frame::{Message, Start, Stream};
use crate::sys::{self, Interest};

/// Bytes that are read from a descriptor before others have their turn.
const READ: usize = 64 * 1024;
/// Bytes of answers that a rank may leave unread.
const MAX_UNREAD: usize = 8 << 20;
/// Variables of other launchers, which ranks must not see.
const FOREIGN: [&str; 9] = [
    "PMI_PORT",
    "PMI_ID",
    "PMI_SPAWNED",
    "HYDI_CONTROL_FD",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "PMIX_NAMESPACE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
];

/// One rank.
#[derive(Debug)]
struct Rank {
    number: u32,
    child: Child,
    /// Whether it leads a process group of its own.
    group: bool,
    pmi: Option<UnixStream>,
    unsent: Vec<u8>,
    out: Option<File>,
    err: Option<File>,
    ended: bool,
}

/// All ranks of this host.
#[derive(Debug)]
pub(crate) struct Node {
    ranks: Vec<Rank>,
}

impl Node {
    /// Starts the ranks. After one that cannot be started, which `events` names, no other is.
    pub(crate) fn start(start: &Start, stdin: bool, events: &mut Vec<Message>) -> Self {
        let mut node = Self { ranks: Vec::new() };
        for number in start.first..start.first + start.count {
            match Rank::start(start, number, stdin && number == 0) {
                Ok(rank) => node.ranks.push(rank),
                Err(error) => {
                    let missing = error.kind() == ErrorKind::NotFound;
                    let program = String::from_utf8_lossy(&start.program[0]);
                    let why = format!("cannot start {program}: {error}");
                    let code = if missing { 127 } else { 126 };
                    events.push(Message::NotStarted { rank: number, code, why });
                    break;
                }
            }
        }
        node
    }

    /// Adds the descriptors that there is something to wait for.
    pub(crate) fn interests(&self, interests: &mut Vec<Interest>) {
        for rank in &self.ranks {
            let read = |fd: RawFd| Interest { fd, write: false, ready: false };
            if let Some(pmi) = &rank.pmi {
                let write = !rank.unsent.is_empty();
                interests.push(Interest { write, ..read(pmi.as_raw_fd()) });
            }
            for output in [&rank.out, &rank.err].into_iter().flatten() {
                interests.push(read(output.as_raw_fd()));
            }
        }
    }

    /// Reads and writes what is ready.
    pub(crate) fn progress(&mut self, ready: &[Interest], events: &mut Vec<Message>) {
        let is_ready = |fd: RawFd| ready.iter().any(|interest| interest.fd == fd && interest.ready);
        for rank in &mut self.ranks {
            if rank.pmi.as_ref().is_some_and(|pmi| is_ready(pmi.as_raw_fd())) {
                rank.flush();
                rank.read_pmi(events);
            }
            for stream in [Stream::Out, Stream::Err] {
                let file = if stream == Stream::Out { &rank.out } else { &rank.err };
                if file.as_ref().is_some_and(|file| is_ready(file.as_raw_fd())) {
                    rank.read_output(stream, events);
                }
            }
        }
    }

    /// Finds ranks that have ended.
    pub(crate) fn reap(&mut self, events: &mut Vec<Message>) {
        for rank in self.ranks.iter_mut().filter(|rank| !rank.ended) {
            let Ok(Some(status)) = rank.child.try_wait() else { continue };
            rank.ended = true;
            rank.read_pmi(events);
            // What it wrote comes before its end. A process that it left may still hold the other ends.
            while rank.read_output(Stream::Out, events) || rank.read_output(Stream::Err, events) {}
            events.push(Message::Exit { rank: rank.number, status: status.into_raw() });
        }
    }

    /// Sends bytes of PMI to a rank.
    pub(crate) fn send(&mut self, number: u32, bytes: &[u8]) {
        let found = self.ranks.iter_mut().find(|rank| rank.number == number);
        let Some(rank) = found.filter(|rank| rank.pmi.is_some()) else { return };
        rank.unsent.extend_from_slice(bytes);
        rank.flush();
        if rank.unsent.len() > MAX_UNREAD {
            // It asks and does not read.
            rank.pmi = None;
        }
    }

    /// Sends a signal to every rank that runs.
    pub(crate) fn signal(&mut self, signal: i32) {
        for rank in self.ranks.iter().filter(|rank| !rank.ended) {
            sys::kill(rank.child.id(), rank.group, signal);
        }
    }

    /// Whether a rank still runs.
    pub(crate) fn is_running(&self) -> bool {
        self.ranks.iter().any(|rank| !rank.ended)
    }
}

impl Rank {
    fn start(start: &Start, number: u32, stdin: bool) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let words: Vec<&OsStr> = start.program.iter().map(|word| OsStr::from_bytes(word)).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir(OsStr::from_bytes(&start.directory));
        for name in FOREIGN {
            command.env_remove(name);
        }
        for (name, value) in &start.variables {
            command.env(OsStr::from_bytes(name), OsStr::from_bytes(value));
        }
        let local = number - start.first;
        for (name, value) in [
            ("PMI_FD", theirs.as_raw_fd() as u32),
            ("PMI_RANK", number),
            ("PMI_SIZE", start.size),
            ("MPI_LOCALRANKID", local),
            ("MPI_LOCALNRANKS", start.count),
        ] {
            command.env(name, value.to_string());
        }
        command.stdin(if stdin { Stdio::inherit() } else { Stdio::null() });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        // A rank that reads the terminal has to be in its foreground group.
        let group = !(stdin && io::stdin().is_terminal());
        sys::prepare(&mut command, group);
        sys::set_inherited(theirs.as_fd(), true)?;
        let child = command.spawn();
        sys::set_inherited(theirs.as_fd(), false)?;
        let mut child = child?;
        ours.set_nonblocking(true)?;
        let out = child.stdout.take().map(|out| File::from(OwnedFd::from(out)));
        let err = child.stderr.take().map(|err| File::from(OwnedFd::from(err)));
        for file in [&out, &err].into_iter().flatten() {
            sys::set_nonblocking(file.as_fd())?;
        }
        let unsent = Vec::new();
        Ok(Self { number, child, group, pmi: Some(ours), unsent, out, err, ended: false })
    }

    /// Writes what the rank's socket takes.
    fn flush(&mut self) {
        let Some(pmi) = &mut self.pmi else { return };
        while !self.unsent.is_empty() {
            match pmi.write(&self.unsent) {
                Ok(len) => drop(self.unsent.drain(..len)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.unsent.clear(),
            }
        }
    }

    fn read_pmi(&mut self, events: &mut Vec<Message>) {
        let mut buffer = [0; 4096];
        while let Some(pmi) = &mut self.pmi {
            match pmi.read(&mut buffer) {
                Ok(0) => self.pmi = None,
                Ok(len) => {
                    let bytes = buffer[..len].to_vec();
                    events.push(Message::Pmi { rank: self.number, bytes });
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.pmi = None,
            }
        }
    }

    /// Reads a piece of output. Whether there was one.
    fn read_output(&mut self, stream: Stream, events: &mut Vec<Message>) -> bool {
        let place = if stream == Stream::Out { &mut self.out } else { &mut self.err };
        let Some(file) = place else { return false };
        let mut bytes = vec![0; READ];
        match file.read(&mut bytes) {
            Ok(0) => *place = None,
            Ok(len) => {
                bytes.truncate(len);
                events.push(Message::Output { rank: self.number, stream, bytes });
                return true;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => *place = None,
        }
        false
    }
}

impl Drop for Node {
    /// No rank outlives its launcher.
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        for rank in self.ranks.iter_mut().filter(|rank| !rank.ended) {
            let _ = rank.child.wait();
        }
    }
}

/// The working directory, for ranks that are to start there.
pub(crate) fn directory() -> io::Result<Vec<u8>> {
    Ok(env::current_dir()?.as_os_str().as_bytes().into())
}
