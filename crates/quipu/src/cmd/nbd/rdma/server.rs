//! The server's end: a thread for each client.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu::{
    Access, Completion, CompletionQueue, Connection, ConnectionRequest, Key, Listener,
    MemoryRegion, ProtectionDomain, RemoteMemory, Request, WcStatus,
};
use quipu_nbd::messages::{
    Job, MAX_MOVED, MESSAGE_HEADER, MessageServer, REPLY_HEADER, ServerStep, Terms, simple_reply,
};
use quipu_nbd::{Command, Errno, Export, ProtocolError, ServerOptions};

use super::super::serve::{PATIENCE, Service, Trouble, errno};
use super::client::watch;
use super::memory::{Places, id, of_id};
use super::{TERMS, device};

const RECEIVE: u32 = 0;
const REPLY: u32 = 1;
const FETCH: u32 = 2;
/// Buffers for long data, which a connection makes as it needs them.
const BUFFERS: u32 = 16;
/// Before a thread sleeps it polls for so long.
const SPIN: Duration = Duration::from_micros(30);
/// How long the other end may take for the end of a connection.
const LEAVE: Duration = Duration::from_secs(1);

/// What clients connect to.
pub(in crate::cmd::nbd) struct Door(Listener);

impl Door {
    /// Listens.
    pub(in crate::cmd::nbd) fn open(at: SocketAddr) -> Result<Self, quipu::Error> {
        Ok(Self(Listener::bind(&device()?, at)?))
    }

    /// Where it listens.
    pub(in crate::cmd::nbd) fn address(&self) -> Result<SocketAddr, quipu::Error> {
        self.0.address()
    }

    /// Waits for a client.
    pub(in crate::cmd::nbd) fn next(&self) -> Result<ConnectionRequest, quipu::Error> {
        self.0.next()
    }
}

/// Serves one client until it leaves.
pub(in crate::cmd::nbd) fn serve(
    service: &Service,
    request: ConnectionRequest,
) -> Result<(), Trouble> {
    let peer = match Terms::from_bytes(request.private_data()) {
        Ok(peer) => peer,
        Err(error) => {
            let _ = request.reject(error.to_string().as_bytes().get(..148).unwrap_or(b"not NBD"));
            return Err(error.into());
        }
    };
    let mut client = Client::accept(service, request, peer)?;
    let outcome = client.run();
    let _ = client.connection.disconnect();
    outcome
}

/// A request that waits for a place for its reply, or for a buffer.
struct Waiting {
    step: ServerStep,
    data: Vec<u8>,
}

/// Memory for long data, and the request that it is used for.
struct Buffer {
    memory: MemoryRegion,
    job: Option<(Job, u32)>,
}

struct Client<'a> {
    service: &'a Service,
    engine: MessageServer,
    connection: Arc<Connection>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    receives: Places,
    replies: Places,
    /// The buffer of each reply that is on its way.
    buffer_of: Vec<Option<u32>>,
    buffers: Vec<Buffer>,
    free: Vec<u32>,
    waiting: VecDeque<Waiting>,
    message: Vec<u8>,
    has_ended: bool,
}

impl<'a> Client<'a> {
    fn accept(
        service: &'a Service,
        request: ConnectionRequest,
        peer: Terms,
    ) -> Result<Self, Trouble> {
        let pd = device()?.protection_domain()?;
        let credits = u32::from(TERMS.credits);
        let cq = device()?.completion_queue(6 * credits)?;
        // A peer has no right to any memory of the server.
        let qp = pd
            .queue_pair(&cq, &cq)
            .send_queue(4 * credits, 1)
            .recv_queue(credits, 1)
            .remote_access(Access::empty())
            .build()?;
        let receives = Places::new(&pd, credits, TERMS.longest_message())?;
        let reply = REPLY_HEADER + peer.inline as usize;
        let replies = Places::new(&pd, credits, reply)?;
        for place in 0..credits {
            qp.post_recv(id(RECEIVE, place), &receives.whole(place)?)?;
        }
        let connection = Arc::new(request.accept(qp, &TERMS.to_bytes())?);
        watch(&connection);
        let mut export: Export = service.export.clone();
        export.blocks.maximum = export.blocks.maximum.min(MAX_MOVED);
        let engine = MessageServer::new(ServerOptions::new(export), TERMS, peer);
        let (buffers, free, waiting) = (Vec::new(), Vec::new(), VecDeque::new());
        let buffer_of = vec![None; credits as usize];
        Ok(Self {
            service,
            engine,
            connection,
            cq,
            pd,
            receives,
            replies,
            buffer_of,
            buffers,
            free,
            waiting,
            message: Vec::new(),
            has_ended: false,
        })
    }

    fn run(&mut self) -> Result<(), Trouble> {
        self.send_output()?;
        let begun = Instant::now();
        let mut out = [Completion::default(); 32];
        while !self.has_ended {
            let found = self.poll(&mut out, begun)?;
            for done in &out[..found] {
                match done.status {
                    WcStatus::Success => self.completed(done)?,
                    // The client has left, or its process has ended.
                    WcStatus::WrFlushErr => return Ok(()),
                    _ => return Err(quipu::Error::Work(*done).into()),
                }
            }
        }
        Ok(())
    }

    /// Waits for completions.
    fn poll(&self, out: &mut [Completion], begun: Instant) -> Result<usize, Trouble> {
        let spinning = Instant::now();
        loop {
            match self.cq.poll(out)? {
                0 if spinning.elapsed() < SPIN => std::hint::spin_loop(),
                0 => break,
                found => return Ok(found),
            }
        }
        if self.engine.export().is_some() {
            return Ok(self.cq.wait(out)?);
        }
        let left = PATIENCE.saturating_sub(begun.elapsed());
        match self.cq.wait_timeout(out, left)? {
            0 => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
            found => Ok(found),
        }
    }

    fn completed(&mut self, done: &Completion) -> Result<(), Trouble> {
        match of_id(done.wr_id) {
            (RECEIVE, place) => self.received(place, done.byte_len as usize)?,
            (REPLY, place) => {
                self.replies.give_back(place);
                self.free.extend(self.buffer_of[place as usize].take());
                self.advance()?;
            }
            (_, buffer) => self.fetched(buffer)?,
        }
        Ok(())
    }

    fn received(&mut self, place: u32, length: usize) -> Result<(), Trouble> {
        self.receives.read(place, length, &mut self.message)?;
        // Before the reply, which gives the client leave to send the next message.
        self.connection.post_recv(id(RECEIVE, place), &self.receives.whole(place)?)?;
        match self.engine.input(&self.message)? {
            ServerStep::Negotiate | ServerStep::Started(_) => self.send_output(),
            ServerStep::Ended => {
                self.has_ended = true;
                self.send_output()
            }
            step => {
                if self.waiting.len() >= usize::from(TERMS.credits) {
                    let why = "there are more requests than credits";
                    return Err(ProtocolError::Message { why }.into());
                }
                let data = std::mem::take(&mut self.message);
                self.waiting.push_back(Waiting { step, data });
                self.advance()
            }
        }
    }

    /// Sends what the negotiation has to say. The longest answer is far shorter than all places together.
    fn send_output(&mut self) -> Result<(), Trouble> {
        let bytes = std::mem::take(self.engine.output());
        let longest = REPLY_HEADER + self.engine.peer().inline as usize;
        let mut out = [Completion::default()];
        for piece in bytes.chunks(longest) {
            let deadline = Instant::now() + LEAVE;
            let place = loop {
                if let Some(place) = self.replies.take() {
                    break place;
                }
                let left = deadline.saturating_duration_since(Instant::now());
                if self.cq.wait_timeout(&mut out, left)? == 0 {
                    return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                }
                match of_id(out[0].wr_id) {
                    (REPLY, place) if out[0].status == WcStatus::Success => {
                        self.replies.give_back(place);
                    }
                    _ => {
                        let why = "it went on before the answer to its option";
                        return Err(ProtocolError::Message { why }.into());
                    }
                }
            };
            self.replies.write(place, 0, piece)?;
            self.reply(place, piece.len())?;
        }
        Ok(())
    }

    fn reply(&self, place: u32, length: usize) -> Result<(), Trouble> {
        let memory = self.replies.sge(place, length)?;
        Ok(self.connection.post_send(&Request::send(&memory).id(id(REPLY, place)))?)
    }

    /// Carries out requests as long as there are places for their replies and buffers for their data.
    fn advance(&mut self) -> Result<(), Trouble> {
        while let Some(first) = self.waiting.front() {
            let moved = matches!(first.step, ServerStep::Execute(Job { is_moved: true, .. }));
            if !self.replies.has_free() || (moved && !self.has_buffer()?) {
                break;
            }
            let place = self.replies.take().expect("seen above");
            let Waiting { step, data } = self.waiting.pop_front().expect("seen above");
            match step {
                ServerStep::Execute(job) if job.is_moved => self.begin_moved(job, place)?,
                ServerStep::Execute(job) => self.execute(&job, &data, place)?,
                ServerStep::Refuse(cookie, errno) => self.finish(cookie, Err(errno), place)?,
                _ => unreachable!("only requests wait"),
            }
            if self.message.capacity() == 0 {
                self.message = data;
            }
        }
        Ok(())
    }

    /// Whether there is a buffer; one is made as long as there are few.
    fn has_buffer(&mut self) -> Result<bool, Trouble> {
        if self.free.is_empty() && self.buffers.len() < BUFFERS as usize {
            let memory = self.pd.register(MAX_MOVED as usize, Access::LOCAL_WRITE)?;
            self.free.push(self.buffers.len() as u32);
            self.buffers.push(Buffer { memory, job: None });
        }
        Ok(!self.free.is_empty())
    }

    /// Reads the data of a write from the client's memory, or writes those of a read there.
    fn begin_moved(&mut self, job: Job, place: u32) -> Result<(), Trouble> {
        let index = self.free.pop().expect("there is one");
        let length = job.request.length as usize;
        let (addr, rkey) = (job.memory.address, Key(job.memory.key));
        let remote = RemoteMemory { addr, len: length as u64, rkey };
        let buffer = &mut self.buffers[index as usize];
        let memory = [buffer.memory.sge(0, length)?];
        if job.command == Command::Write {
            buffer.job = Some((job, place));
            let fetch = Request::read(&memory, remote).id(id(FETCH, index));
            return Ok(self.connection.post_send(&fetch)?);
        }
        let target = &buffer.memory;
        let outcome =
            self.service.disk.read_pieces(job.request.offset, length, &mut |at, bytes| {
                target.write(at, bytes).map_err(io::Error::other)
            });
        self.buffer_of[place as usize] = Some(index);
        let header = simple_reply(job.request.cookie, outcome.as_ref().map_err(errno).copied());
        self.replies.write(place, 0, &header)?;
        let reply = self.replies.sge(place, header.len())?;
        let reply = Request::send(&reply).id(id(REPLY, place));
        if outcome.is_err() {
            return Ok(self.connection.post_send(&reply)?);
        }
        // The reply arrives after the data, because both go the same way in order.
        let data = Request::write(&memory, remote).unsignaled();
        Ok(self.connection.post_sends(&[data, reply]).map_err(|(_, error)| error)?)
    }

    /// The data of a write are here.
    fn fetched(&mut self, index: u32) -> Result<(), Trouble> {
        let buffer = &mut self.buffers[index as usize];
        let (job, place) = buffer.job.take().expect("it was fetched for a request");
        let (source, disk) = (&buffer.memory, &self.service.disk);
        let (offset, length) = (job.request.offset, job.request.length as usize);
        let written = disk.write_pieces(offset, length, &mut |at, bytes| {
            source.read(at, bytes).map_err(io::Error::other)
        });
        let result = written.and_then(|()| self.service.force(&job.request));
        self.buffer_of[place as usize] = Some(index);
        self.finish(job.request.cookie, result.map_err(|error| errno(&error)), place)
    }

    /// Carries out a request whose data lie in messages.
    fn execute(&mut self, job: &Job, message: &[u8], place: u32) -> Result<(), Trouble> {
        let request = &job.request;
        match job.command {
            Command::Read => return self.read_short(job, place),
            Command::BlockStatus => {
                if let Ok(extents) = self.service.disk.extents(request.offset, request.length) {
                    let bytes = self.engine.reply_extents(request, &extents);
                    self.replies.write(place, 0, &bytes)?;
                    return self.reply(place, bytes.len());
                }
                return self.finish(request.cookie, Err(Errno::IO), place);
            }
            _ => {}
        }
        let data = message.get(MESSAGE_HEADER..).unwrap_or_default();
        let result = self.service.carry_out(job.command, request, data);
        self.finish(request.cookie, result.map_err(|error| errno(&error)), place)
    }

    fn read_short(&mut self, job: &Job, place: u32) -> Result<(), Trouble> {
        let (offset, length) = (job.request.offset, job.request.length as usize);
        let replies = &self.replies;
        let outcome = self.service.disk.read_pieces(offset, length, &mut |at, bytes| {
            replies.write(place, REPLY_HEADER + at, bytes).map_err(io::Error::other)
        });
        match outcome {
            Ok(()) => {
                self.replies.write(place, 0, &simple_reply(job.request.cookie, Ok(())))?;
                self.reply(place, REPLY_HEADER + length)
            }
            Err(error) => self.finish(job.request.cookie, Err(errno(&error)), place),
        }
    }

    fn finish(&self, cookie: u64, result: Result<(), Errno>, place: u32) -> Result<(), Trouble> {
        self.replies.write(place, 0, &simple_reply(cookie, result))?;
        self.reply(place, REPLY_HEADER)
    }
}
