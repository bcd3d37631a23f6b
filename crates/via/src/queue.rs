//! Work queues: descriptors that wait, that the adapter has, and that are done.

use std::collections::VecDeque;

use crate::codes::Status;
use crate::descriptor::Request;

/// A descriptor that a program has posted.
#[derive(Clone, Debug)]
pub struct Posted {
    /// Its address in the program.
    pub descriptor: u64,
    /// Handle of the memory in which it lies.
    pub handle: u32,
    /// The operation's bits of its status.
    pub operation: Status,
    /// What it asks, or why that cannot be done.
    pub request: Result<Request, Status>,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// Errors, and bits of the operation if it is another than was posted.
    pub status: Status,
    /// Bytes transferred.
    pub len: u32,
    /// Immediate data of the peer.
    pub immediate: Option<u32>,
}

impl Ending {
    /// A failure that transferred nothing.
    pub fn failed(status: Status) -> Self {
        Self { status, len: 0, immediate: None }
    }
}

/// What is to be written into a descriptor that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its address in the program.
    pub descriptor: u64,
    /// Handle of the memory in which it lies.
    pub handle: u32,
    /// The status word.
    pub status: Status,
    /// Bytes transferred.
    pub len: u32,
    /// Immediate data of the peer.
    pub immediate: Option<u32>,
}

/// What is to be done next for a queue.
#[derive(Debug)]
pub enum Next<'a> {
    /// Give this to the adapter, then call [`WorkQueue::handed`].
    Hand(&'a Request),
    /// The oldest descriptor cannot be processed: complete it with this.
    Fail(Status),
    /// Nothing.
    Nothing,
}

/// The oldest descriptor of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// There is no descriptor.
    Empty,
    /// It is not done yet.
    NotDone,
    /// It succeeded; it has left the queue.
    Succeeded(u64),
    /// It failed; it has left the queue.
    Failed(u64),
}

/// Descriptors in the order in which they were posted.
#[derive(Debug, Default)]
pub struct WorkQueue {
    posted: VecDeque<Posted>,
    /// How many of those, the oldest, the adapter has.
    handed: usize,
    done: VecDeque<(u64, bool)>,
}

impl WorkQueue {
    /// Descriptors that the program has posted and not taken back.
    pub fn len(&self) -> usize {
        self.posted.len() + self.done.len()
    }

    /// Requests that the adapter has.
    pub fn in_adapter(&self) -> usize {
        self.handed
    }

    /// Whether the program has taken back all that it posted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a descriptor is done.
    pub fn is_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// The operation's bits of the oldest descriptor that is not done.
    pub fn operation(&self) -> Status {
        self.posted.front().map_or(Status::empty(), |posted| posted.operation)
    }

    /// Bytes that the oldest descriptor that is not done transfers.
    pub fn asked_len(&self) -> u32 {
        let request = self.posted.front().and_then(|posted| posted.request.as_ref().ok());
        request.map_or(0, |request| request.len)
    }

    /// Appends a descriptor.
    pub fn push(&mut self, posted: Posted) {
        self.posted.push_back(posted);
    }

    /// Takes a descriptor that is flushed at once. Nothing may be waiting in front of it.
    pub fn push_flushed(&mut self, posted: &Posted) -> Done {
        debug_assert!(self.posted.is_empty(), "what is older completes first");
        self.end(posted, Ending::failed(Status::FLUSHED))
    }

    /// What to do next, where the adapter holds at most `room` requests of this queue.
    pub fn next(&self, room: usize) -> Next<'_> {
        match self.posted.get(self.handed).map(|posted| &posted.request) {
            Some(Ok(request)) if self.handed < room => Next::Hand(request),
            // Those before it complete first.
            Some(Err(status)) if self.handed == 0 => Next::Fail(*status),
            _ => Next::Nothing,
        }
    }

    /// The adapter has taken what [`next`](Self::next) said.
    pub fn handed(&mut self) {
        self.handed += 1;
    }

    /// The oldest descriptor is done; none if there is none.
    pub fn complete(&mut self, ending: Ending) -> Option<Done> {
        let posted = self.posted.pop_front()?;
        self.handed = self.handed.saturating_sub(1);
        Some(self.end(&posted, ending))
    }

    /// All that is not done is flushed, oldest first.
    pub fn flush(&mut self) -> impl Iterator<Item = Done> + '_ {
        self.handed = 0;
        std::iter::from_fn(|| self.complete(Ending::failed(Status::FLUSHED)))
    }

    /// Takes the oldest descriptor from the queue if it is done.
    pub fn take(&mut self) -> Head {
        match self.done.pop_front() {
            Some((descriptor, false)) => Head::Succeeded(descriptor),
            Some((descriptor, true)) => Head::Failed(descriptor),
            None if self.posted.is_empty() => Head::Empty,
            None => Head::NotDone,
        }
    }

    fn end(&mut self, posted: &Posted, ending: Ending) -> Done {
        let Ending { status, len, immediate } = ending;
        let mut status = status | posted.operation | Status::DONE;
        if immediate.is_some() {
            status |= Status::IMMEDIATE;
        }
        self.done.push_back((posted.descriptor, status.is_error()));
        let Posted { descriptor, handle, .. } = *posted;
        Done { descriptor, handle, status, len, immediate }
    }
}
