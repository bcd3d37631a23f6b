//! The server's end: a thread for each client.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu::{
    Access, Completion, CompletionQueue, Connection, ConnectionRequest, Key, Listener,
    ProtectionDomain, RemoteMemory, Request, WcStatus,
};
use quipu_nbd::messages::{
    Job, MAX_MOVED, MESSAGE_HEADER, MessageServer, REPLY_HEADER, ServerStep, Terms, simple_reply,
};
use quipu_nbd::{Command, Errno, Export, ProtocolError, ServerOptions};

use super::super::disk::Placed;
use super::super::serve::{PATIENCE, Service, Trouble, errno};
use super::client::watch;
use super::memory::{Places, id, of_id};
use super::moves::{BUFFERS, Moves, Piece, READS};
use super::{TERMS, device, server_domain};

const RECEIVE: u32 = 0;
const REPLY: u32 = 1;
const PIECE: u32 = 2;
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

/// A request that waits for a place for its reply.
struct Waiting {
    step: ServerStep,
    data: Vec<u8>,
}

struct Client<'a> {
    service: &'a Service,
    engine: MessageServer,
    connection: Arc<Connection>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    receives: Places,
    replies: Places,
    moves: Moves,
    /// Memory for long data, from the first request with such data on.
    buffers: Option<Places>,
    /// Memory of the disk that pieces use in place of their buffers.
    placed: Vec<Option<Placed>>,
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
        let pd = server_domain()?;
        let credits = u32::from(TERMS.credits);
        let cq = device()?.completion_queue(2 * credits + BUFFERS as u32)?;
        // A peer has no right to any memory of the server.
        let qp = pd
            .queue_pair(&cq, &cq)
            .send_queue(credits + BUFFERS as u32, 1)
            .recv_queue(credits, 1)
            .reads_in_flight(READS as u8)
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
        let moves = Moves::new(credits);
        Ok(Self {
            service,
            engine,
            connection,
            cq,
            pd,
            receives,
            replies,
            moves,
            buffers: None,
            placed: (0..BUFFERS).map(|_| None).collect(),
            waiting: VecDeque::new(),
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
            // One piece at a time: on one host it has been moved when it is looked for next.
            self.begin_piece()?;
        }
        Ok(())
    }

    /// Waits for completions, unless a piece can be begun.
    fn poll(&self, out: &mut [Completion], begun: Instant) -> Result<usize, Trouble> {
        if self.has_piece() {
            return Ok(self.cq.poll(out)?);
        }
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
                self.advance()?;
            }
            (_, buffer) => self.moved(buffer)?,
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

    /// Carries out requests as long as there are places for their replies.
    fn advance(&mut self) -> Result<(), Trouble> {
        while self.replies.has_free() {
            let Some(Waiting { step, data }) = self.waiting.pop_front() else { break };
            let place = self.replies.take().expect("seen above");
            match step {
                ServerStep::Execute(job) if job.is_moved => {
                    if self.buffers.is_none() {
                        self.buffers = Some(Moves::buffers(&self.pd)?);
                    }
                    self.moves.add(job, place);
                }
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

    /// Whether a piece of long data can be begun.
    fn has_piece(&self) -> bool {
        self.moves.next().is_some() && self.buffers.as_ref().is_some_and(Places::has_free)
    }

    /// Begins the next piece of long data, if there is one and a buffer for it: reads it from the client's
    /// memory if it belongs to a write, or writes it there.
    fn begin_piece(&mut self) -> Result<(), Trouble> {
        let (Some(piece), Some(buffers)) = (self.moves.next(), &mut self.buffers) else {
            return Ok(());
        };
        let Some(buffer) = buffers.take() else { return Ok(()) };
        let Piece { job, at, len, place } = piece;
        let is_write = job.command == Command::Write;
        // On one host the adapter moves data best between memory that both processes map, as the buffers are.
        let placed = match self.connection.is_peer_mapped() {
            true => None,
            false => self.service.disk.placed(piece.offset(), len, is_write),
        };
        let memory = match &placed {
            Some(placed) => [placed.memory.sge(placed.at, placed.len)?],
            None => buffers.sge(buffer, len)?,
        };
        let remote = RemoteMemory {
            addr: job.memory.address + at as u64,
            len: len as u64,
            rkey: Key(job.memory.key),
        };
        let is_placed = placed.is_some();
        self.placed[buffer as usize] = placed;
        if is_write {
            self.moves.begun(piece, buffer);
            let fetch = Request::read(&memory, remote).id(id(PIECE, buffer));
            return Ok(self.connection.post_send(&fetch)?);
        }
        if !is_placed {
            let (memory, part) = buffers.part(buffer, 0, len);
            if let Err(error) = self.service.disk.read_to(piece.offset(), memory, part) {
                buffers.give_back(buffer);
                self.moves.give_up();
                return self.finish(job.request.cookie, Err(errno(&error)), place);
            }
        }
        self.moves.begun(piece, buffer);
        let data = Request::write(&memory, remote).id(id(PIECE, buffer));
        if !piece.is_last() {
            return Ok(self.connection.post_send(&data)?);
        }
        // The reply arrives after the data, because both go the same way in order.
        self.replies.write(place, 0, &simple_reply(job.request.cookie, Ok(())))?;
        let reply = self.replies.sge(place, REPLY_HEADER)?;
        let reply = Request::send(&reply).id(id(REPLY, place));
        Ok(self.connection.post_sends(&[data, reply]).map_err(|(_, error)| error)?)
    }

    /// A piece has been moved: if it belongs to a write, it goes to the disk.
    fn moved(&mut self, buffer: u32) -> Result<(), Trouble> {
        let buffers = self.buffers.as_mut().expect("it was used");
        buffers.give_back(buffer);
        let is_placed = self.placed[buffer as usize].take().is_some();
        let (piece, is_wanted) = self.moves.moved(buffer).expect("it was begun");
        if piece.job.command != Command::Write {
            return Ok(());
        }
        let mut result = Ok(());
        if is_wanted && !is_placed {
            let (memory, part) = buffers.part(buffer, 0, piece.len);
            let written = self.service.disk.write_from(piece.offset(), memory, part);
            result = written.map_err(|error| errno(&error));
        }
        let Some((job, mut result)) = self.moves.written(piece, result) else { return Ok(()) };
        if result.is_ok() {
            result = self.service.force(&job.request).map_err(|error| errno(&error));
        }
        self.finish(job.request.cookie, result, piece.place)
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
        let (memory, part) = self.replies.part(place, REPLY_HEADER, length);
        match self.service.disk.read_to(offset, memory, part) {
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
