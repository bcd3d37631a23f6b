//! The connections of an attached disk: made when they are needed, by a thread, because that takes time.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use quipu_nbd::schedule::Schedule;
use quipu_nbd::uri::Uri;
use quipu_nbd::{Export, TransmissionFlags};

use super::super::line::{self, Done, Job, Line, Memory, Progress};
use super::super::session::Trouble;

/// Connections at a time to a server whose connections see each other's writes.
const MOST: usize = 4;
/// Requests on each connection before there is another.
const BUSY: usize = 8;
/// Between two attempts to connect.
const RETRY: Duration = Duration::from_millis(100);

/// What to watch of a connection: events of poll(2).
pub(super) struct Watched {
    pub(super) number: u32,
    pub(super) fd: RawFd,
    pub(super) events: i16,
    /// It need not be waited for.
    pub(super) is_ready: bool,
}

type Outcome = Result<Box<dyn Line>, Trouble>;

/// The connections, each with a number of its own.
pub(super) struct Lines {
    uri: Uri,
    memory: Memory,
    export: Export,
    has_status: bool,
    lines: Vec<(u32, Box<dyn Line>)>,
    serial: u32,
    /// How many there may be.
    most: usize,
    /// Lost connections are made anew.
    is_patient: bool,
    /// What a thread is making, and the descriptor on which it says that it is ready.
    attempt: Option<Receiver<Outcome>>,
    /// When the next attempt may begin.
    next_attempt: Duration,
    wake: (UnixStream, UnixStream),
    /// The loss of all connections was reported.
    is_lost: bool,
}

impl Lines {
    /// With a first connection.
    pub(super) fn new(uri: &Uri, is_patient: bool) -> Result<Self, Trouble> {
        let memory = Memory::new(uri)?;
        let first = line::open(uri, &memory)?;
        let (export, has_status) = (first.export().clone(), first.has_status());
        // Readers need no promise about what other connections see.
        let safe = TransmissionFlags::READ_ONLY | TransmissionFlags::MULTI_CONN;
        let most = if export.flags.intersects(safe) { MOST } else { 1 };
        let wake = UnixStream::pair()?;
        wake.0.set_nonblocking(true)?;
        wake.1.set_nonblocking(true)?;
        Ok(Self {
            uri: uri.clone(),
            memory,
            export,
            has_status,
            lines: vec![(0, first)],
            serial: 0,
            most,
            is_patient,
            attempt: None,
            next_attempt: Duration::ZERO,
            wake,
            is_lost: false,
        })
    }

    /// The number of the first connection.
    pub(super) fn first(&self) -> u32 {
        0
    }

    /// The export, as the first connection found it.
    pub(super) fn export(&self) -> &Export {
        &self.export
    }

    /// What buffers for requests are made of.
    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Whether the server tells what is allocated.
    pub(super) fn has_status(&self) -> bool {
        self.has_status
    }

    /// Whether lost connections are made anew.
    pub(super) fn is_patient(&self) -> bool {
        self.is_patient
    }

    /// Readable when [`poll`](Self::poll) has something.
    pub(super) fn wake_fd(&self) -> RawFd {
        self.wake.0.as_raw_fd()
    }

    /// The numbers of all connections.
    pub(super) fn numbers(&self) -> Vec<u32> {
        self.lines.iter().map(|(number, _)| *number).collect()
    }

    /// The number of some connection.
    pub(super) fn any(&self) -> Option<u32> {
        self.lines.first().map(|(number, _)| *number)
    }

    /// What to watch while all are idle.
    ///
    /// # Errors
    ///
    /// A connection fails: its number.
    pub(super) fn watch(&mut self) -> Result<Vec<Watched>, (u32, Box<Trouble>)> {
        let watch = |(number, line): &mut (u32, Box<dyn Line>)| match line.watch() {
            Ok((fd, events)) => {
                Ok(Watched { number: *number, fd, events, is_ready: line.is_ready() })
            }
            Err(trouble) => Err((*number, Box::new(trouble))),
        };
        self.lines.iter_mut().map(watch).collect()
    }

    fn find(&mut self, number: u32) -> Option<&mut Box<dyn Line>> {
        self.lines.iter_mut().find(|(it, _)| *it == number).map(|(_, line)| line)
    }

    /// The connection with the fewest requests, if it has room for one more.
    pub(super) fn choose(&self, job: &Job) -> Option<u32> {
        let with_room = self.lines.iter().filter(|(_, line)| line.has_room(job));
        with_room.min_by_key(|(_, line)| line.outstanding()).map(|(number, _)| *number)
    }

    /// Makes a request. After an error [`remove`](Self::remove) returns it.
    pub(super) fn submit(&mut self, number: u32, id: u64, job: Job) -> Result<(), Trouble> {
        self.find(number).ok_or(Trouble::Closed)?.submit(id, job)
    }

    /// Sends what was requested, as far as it goes without waiting.
    pub(super) fn push(&mut self, number: u32) -> Result<(), Trouble> {
        self.find(number).map_or(Ok(()), |line| line.push())
    }

    /// Sends and receives what goes.
    pub(super) fn advance(
        &mut self,
        number: u32,
        is_ready: bool,
        done: &mut Vec<Done>,
    ) -> Result<Progress, Trouble> {
        match self.find(number) {
            Some(line) => line.advance(is_ready, done),
            None => Ok(Progress::Idle),
        }
    }

    /// Ends a connection; its requests without a reply.
    pub(super) fn remove(&mut self, number: u32, why: &str) -> Vec<(u64, Job)> {
        let Some(index) = self.lines.iter().position(|(it, _)| *it == number) else {
            return Vec::new();
        };
        let (_, mut line) = self.lines.swap_remove(index);
        let jobs = line.take_back();
        // Its end may wait for the peer.
        thread::spawn(move || drop(line));
        if self.lines.is_empty() {
            self.is_lost = true;
            eprintln!("the connection is lost: {why}");
        }
        jobs
    }

    /// What became of an attempt to connect, if one has ended: the connection's number, or there is none.
    pub(super) fn poll(&mut self) -> Option<Result<u32, ()>> {
        let outcome = self.attempt.as_ref()?.try_recv();
        let outcome = match outcome {
            Err(mpsc::TryRecvError::Empty) => return None,
            Err(mpsc::TryRecvError::Disconnected) => Err(Trouble::Closed),
            Ok(outcome) => outcome,
        };
        self.attempt = None;
        let _ = self.wake.0.read(&mut [0; 8]);
        let outcome = outcome.and_then(|line| {
            let same = line.export().size == self.export.size;
            if same { Ok(line) } else { Err(Trouble::Changed) }
        });
        match outcome {
            Ok(line) => {
                self.serial += 1;
                self.lines.push((self.serial, line));
                if std::mem::take(&mut self.is_lost) {
                    eprintln!("connected again");
                }
                Some(Ok(self.serial))
            }
            // The server takes no more than there are.
            Err(_) if !self.lines.is_empty() => {
                self.most = self.lines.len();
                None
            }
            Err(trouble) => {
                if !self.is_patient || matches!(trouble, Trouble::Changed) {
                    eprintln!("cannot connect again: {trouble}");
                }
                Some(Err(()))
            }
        }
    }

    /// Whether requests wait for a connection, or are too many for those that there are.
    fn is_needed(&self, schedule: &Schedule<Job>) -> bool {
        let busy = |(_, line): &(u32, Box<dyn Line>)| line.outstanding() >= BUSY;
        if self.lines.is_empty() {
            !schedule.is_empty()
        } else {
            self.lines.len() < self.most && self.lines.iter().all(busy)
        }
    }

    /// Begins to make a connection if one is needed.
    pub(super) fn connect(&mut self, now: Duration, schedule: &Schedule<Job>) {
        if self.attempt.is_some() || now < self.next_attempt || !self.is_needed(schedule) {
            return;
        }
        self.next_attempt = now + RETRY;
        let (sender, receiver) = mpsc::sync_channel(1);
        let (uri, memory) = (self.uri.clone(), self.memory.clone());
        let Ok(mut wake) = self.wake.1.try_clone() else { return };
        let attempt = move || {
            let _ = sender.send(line::open(&uri, &memory));
            let _ = wake.write(&[1]);
        };
        if thread::Builder::new().name("nbd connect".into()).spawn(attempt).is_ok() {
            self.attempt = Some(receiver);
        }
    }

    /// When the next attempt may begin, if requests wait for it.
    pub(super) fn retry_at(&self, schedule: &Schedule<Job>) -> Option<Duration> {
        (self.attempt.is_none() && self.is_needed(schedule)).then_some(self.next_attempt)
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        // A farewell, for which each waits a moment at most.
        let ends = self.lines.drain(..).map(|(_, line)| thread::spawn(move || drop(line)));
        for end in ends.collect::<Vec<_>>() {
            let _ = end.join();
        }
    }
}
