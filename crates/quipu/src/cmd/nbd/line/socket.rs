//! Over a byte stream.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};
use std::os::fd::RawFd;
use std::sync::Arc;

use quipu_nbd::uri::Uri;
use quipu_nbd::{ClientEvent, Errno, Export, Handshake, Reply, Want};

use super::super::session::{PATIENCE, Trouble};
use super::super::socket::Session;
use super::{Buffer, DEPTH, Data, Done, Job, Jobs, Line, POLLIN, POLLOUT, Progress, STEPS};

/// Pieces that one call sends.
const PIECES: usize = 16;

/// The connection.
pub(super) struct SocketLine {
    session: Session,
    jobs: Jobs,
    out: VecDeque<Piece>,
    /// The stream has taken bytes that it has not sent.
    has_unsent: bool,
    /// How much of the payload that comes is there, in bytes.
    filled: usize,
    /// More has come than was read, of which the descriptor need not tell.
    has_more: bool,
}

/// Bytes that are to be sent.
struct Piece {
    bytes: Arc<Buffer>,
    start: usize,
    end: usize,
}

impl Piece {
    fn new(bytes: Arc<Buffer>, start: usize, len: usize) -> Result<Self, Trouble> {
        let has = bytes.heap().is_some_and(|all| all.len() >= start + len);
        has.then(|| Self { bytes, start, end: start + len }).ok_or(Trouble::Closed)
    }

    fn bytes(&self) -> &[u8] {
        self.bytes.heap().map_or(&[], |bytes| &bytes[self.start..self.end])
    }
}

/// Whether a call had to wait; other errors are returned.
fn would_block<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

impl SocketLine {
    pub(super) fn open(uri: &Uri, wanted: Handshake) -> Result<Self, Trouble> {
        let mut session = Session::open(uri, wanted, PATIENCE)?;
        session.set_nonblocking()?;
        let (jobs, out) = (Jobs::new(), VecDeque::new());
        // Replies to the negotiation may have brought more.
        Ok(Self { session, jobs, out, has_unsent: false, filled: 0, has_more: true })
    }

    /// Sends as much as goes.
    fn send(&mut self) -> Result<(), Trouble> {
        while !self.out.is_empty() {
            let pieces = self.out.iter().take(PIECES);
            let slices: Vec<_> = pieces.map(|piece| IoSlice::new(piece.bytes())).collect();
            let sent = would_block(self.session.stream()?.socket().write_vectored(&slices))?;
            drop(slices);
            self.has_unsent = true;
            match sent {
                Some(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Some(count) => self.sent(count),
                None => return Ok(()),
            }
        }
        if self.has_unsent {
            self.has_unsent = would_block(self.session.stream()?.socket().flush())?.is_none();
        }
        Ok(())
    }

    fn sent(&mut self, mut count: usize) {
        while let Some(first) = self.out.front_mut() {
            let step = count.min(first.end - first.start);
            (first.start, count) = (first.start + step, count - step);
            if first.start < first.end {
                break;
            }
            self.out.pop_front();
        }
    }

    /// One step of what comes; `None` if nothing is there.
    fn step(&mut self) -> Result<Option<Option<ClientEvent>>, Trouble> {
        let (client, stream) = self.session.parts()?;
        match client.wants() {
            Want::Bytes(count) => match would_block(stream.take(count))? {
                Some(bytes) => Ok(Some(client.input(bytes.ok_or(Trouble::Closed)?)?)),
                None => Ok(None),
            },
            Want::Payload { cookie, at, length } => {
                let (_, job) = self.jobs.get_mut(&cookie).ok_or(Trouble::Closed)?;
                let Data::Read(data) = &mut job.data else { return Err(Trouble::Closed) };
                let (at, length) = (at as usize, length as usize);
                let data = data.heap_mut().ok_or(Trouble::Closed)?;
                let place = data.get_mut(at + self.filled..at + length).ok_or(Trouble::Closed)?;
                if !place.is_empty() {
                    match would_block(stream.fill_some(place))? {
                        Some(0) => return Err(Trouble::Closed),
                        Some(count) => self.filled += count,
                        None => return Ok(None),
                    }
                }
                if self.filled < length {
                    return Ok(Some(None));
                }
                self.filled = 0;
                Ok(Some(client.payload_done()?))
            }
            Want::Discard(_) | Want::Nothing => Err(Trouble::Closed),
        }
    }

    fn handle(&mut self, cookie: u64, reply: Reply, done: &mut Vec<Done>) -> Result<(), Trouble> {
        match reply {
            Reply::Done(result) => done.push(self.finish(cookie, result)?),
            Reply::Zeros { at, length } => {
                let (_, job) = self.jobs.get_mut(&cookie).ok_or(Trouble::Closed)?;
                let Data::Read(data) = &mut job.data else { return Err(Trouble::Closed) };
                let range = at as usize..(at + length) as usize;
                let data = data.heap_mut().ok_or(Trouble::Closed)?;
                data.get_mut(range).ok_or(Trouble::Closed)?.fill(0);
            }
            Reply::Extents(more) => {
                let (_, job) = self.jobs.get_mut(&cookie).ok_or(Trouble::Closed)?;
                job.data = Data::Extents(more);
            }
        }
        Ok(())
    }

    fn finish(&mut self, cookie: u64, result: Result<(), Errno>) -> Result<Done, Trouble> {
        let (id, job) = self.jobs.remove(&cookie).ok_or(Trouble::Closed)?;
        Ok(Done { id, job, result })
    }
}

impl Line for SocketLine {
    fn export(&self) -> &Export {
        self.session.export()
    }

    fn has_status(&self) -> bool {
        self.session.has_status()
    }

    fn outstanding(&self) -> usize {
        self.jobs.len()
    }

    fn has_room(&self, _job: &Job) -> bool {
        self.jobs.len() < DEPTH
    }

    fn submit(&mut self, id: u64, job: Job) -> Result<(), Trouble> {
        let client = self.session.client();
        let cookie = client.request(job.command, job.flags, job.offset, job.length);
        let header = std::mem::take(client.output());
        let len = header.len();
        let header = Piece::new(Arc::new(Buffer::Heap(header)), 0, len);
        let data = match &job.data {
            Data::Write(bytes, at) => Some(Piece::new(Arc::clone(bytes), *at, job.length as usize)),
            _ => None,
        };
        self.jobs.insert(cookie, (id, job));
        self.out.push_back(header?);
        self.out.extend(data.transpose()?);
        Ok(())
    }

    fn push(&mut self) -> Result<(), Trouble> {
        self.send()
    }

    fn advance(&mut self, is_ready: bool, done: &mut Vec<Done>) -> Result<Progress, Trouble> {
        if is_ready {
            self.session.stream()?.socket().take_event()?;
        } else if !std::mem::take(&mut self.has_more) {
            return Ok(Progress::Idle);
        }
        self.send()?;
        for _ in 0..STEPS {
            match self.step()? {
                Some(Some(ClientEvent::Reply { cookie, reply })) => {
                    self.handle(cookie, reply, done)?;
                }
                Some(_) => {}
                None => return Ok(Progress::Idle),
            }
        }
        self.has_more = true;
        Ok(Progress::More)
    }

    fn watch(&mut self) -> Result<(RawFd, i16), Trouble> {
        let waits = !self.out.is_empty() || self.has_unsent;
        let fd = self.session.stream()?.socket().watch()?;
        Ok((fd, if waits { POLLIN | POLLOUT } else { POLLIN }))
    }

    fn is_ready(&mut self) -> bool {
        let wants_room = !self.out.is_empty();
        self.session.stream().is_ok_and(|stream| stream.socket().is_ready(wants_room))
    }

    fn take_back(&mut self) -> Vec<(u64, Job)> {
        // No farewell in the midst of a request.
        self.session.abandon();
        self.jobs.drain().map(|(_, job)| job).collect()
    }
}

impl Drop for SocketLine {
    fn drop(&mut self) {
        if !self.out.is_empty() || self.has_unsent {
            self.session.abandon();
        }
    }
}
