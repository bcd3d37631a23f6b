//! One connection: a queue pair and the protocol's state machine.

use std::net::SocketAddr;
use std::time::Duration;

use quipu_cabi::Errno;
use quipu_host::nic::{
    Access, Completion, Payload, QpAttr, QpAttrMask as Mask, QpState, Region, SendOp, Sge, WcStatus,
};
use quipu_mem::Vouched;
use quipu_observe::SdpEnds;
use quipu_sdp::{Config, Connection, Readable, Received, RemoteMemory, Reset, Segment as Filled};
use quipu_wire::sdp::{HEADER_LEN, MAX_HEADERS_LEN};

use crate::capture;
use crate::queue::{BUFFER_SIZE, BUFFERS, INLINE, Queue, READ, RECEIVE, SEND, SEND_BUFFERS, SENDS};

/// The longest time that a call polls for the end of a peer's read.
const MOST_READ_TIME: Duration = Duration::from_micros(500);
/// The slot of a send that has none.
const NO_SLOT: u16 = u16::MAX;

/// The sizes that this end tells its peer.
pub(crate) const CONFIG: Config = Config {
    buffers: BUFFERS,
    buffer_size: BUFFER_SIZE,
    max_buffer_size: BUFFER_SIZE,
    wanted_peer_size: BUFFER_SIZE,
    urgent_inline: false,
};

/// Bytes of the program that the peer may read.
struct Source {
    region: Region,
    len: usize,
}

/// A read of the peer's memory.
struct Reading {
    region: Region,
    len: u32,
    /// `None` while it is under way.
    succeeded: Option<bool>,
}

/// A connection that stands.
pub(crate) struct Link {
    pub(crate) queue: Queue,
    pub(crate) connection: Connection,
    free: Vec<u16>,
    under_way: u32,
    source: Option<Source>,
    reading: Option<Reading>,
    /// The queue pair is of no use any more.
    pub(crate) broken: bool,
    /// Where its messages are captured, whose connection it is.
    captured: Option<SdpEnds>,
}

impl Link {
    pub(crate) fn new(queue: Queue, connection: Connection) -> Self {
        let free = (BUFFERS..BUFFERS + SEND_BUFFERS).collect();
        Self {
            queue,
            connection,
            free,
            under_way: 0,
            source: None,
            reading: None,
            broken: false,
            captured: None,
        }
    }

    /// Captures its messages, if any are; `hello` and `hello_ack` have made the connection.
    pub(crate) fn capture(
        &mut self,
        (own, peer): (SocketAddr, SocketAddr),
        (initiator, peer_qpn): (bool, u32),
        (hello, hello_ack): (&[u8], &[u8]),
    ) {
        if capture::is_on() {
            let ends = SdpEnds { own, peer, own_qpn: self.queue.qpn.0, peer_qpn, initiator };
            capture::connected(&ends, hello, hello_ack);
            self.captured = Some(ends);
        }
    }

    /// Shows a message in the capture.
    fn show(&self, outgoing: bool, head: &[u8], payload: &[u8]) {
        if let Some(ends) = &self.captured {
            capture::message(ends, outgoing.then(|| self.queue.mark()), head, payload);
        }
    }

    /// The private data of a request.
    pub(crate) fn hello(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
        Connection::hello(&CONFIG, from, to).to_vec()
    }

    /// Takes in what has come, and sends what the protocol has to say; whether anything has come.
    pub(crate) fn progress(&mut self) -> bool {
        let mut any = false;
        let mut done = [Completion::default(); 16];
        loop {
            match self.queue.adapter.engine.poll_cq(self.queue.cq, &mut done) {
                Ok(0) => break,
                Ok(count) => {
                    any = true;
                    done[..count].iter().for_each(|completion| self.complete(completion));
                    if count < done.len() {
                        break;
                    }
                }
                Err(_) => {
                    self.broken = true;
                    break;
                }
            }
        }
        if let Some(at) = self.connection.poll_timeout() {
            let now = self.queue.adapter.now();
            if at <= now {
                self.connection.handle_timeout(now);
            }
        }
        self.pump();
        any
    }

    fn complete(&mut self, completion: &Completion) {
        let succeeded = completion.status == WcStatus::Success;
        self.broken |= !succeeded;
        let slot = completion.wr_id as u16;
        match completion.wr_id >> 32 {
            RECEIVE if succeeded => self.receive(slot, completion.byte_len),
            RECEIVE => {}
            READ => {
                if let Some(reading) = &mut self.reading {
                    reading.succeeded = Some(succeeded);
                }
            }
            _ => {
                self.under_way -= 1;
                if slot != NO_SLOT {
                    self.free.push(slot);
                }
            }
        }
    }

    fn receive(&mut self, slot: u16, len: u32) {
        let mut head = [0; MAX_HEADERS_LEN];
        let (at, len) = (self.queue.offset(slot), len as usize);
        let head = &mut head[..len.min(MAX_HEADERS_LEN)];
        let mut last = [0];
        let read = self.queue.memory.read(at, head);
        let read = read.and_then(|()| self.queue.memory.read(at + len.max(1) - 1, &mut last));
        if self.captured.is_some() {
            let mut whole = vec![0; len];
            if self.queue.memory.read(at, &mut whole).is_ok() {
                self.show(false, &whole, &[]);
            }
        }
        let received = Received { head, len, last: last[0] };
        let handled = self.connection.handle_message(slot, received);
        if read.is_err() || handled.is_err() {
            self.give_up();
        }
    }

    /// Posts receives, and sends control messages.
    fn pump(&mut self) {
        if self.broken {
            return;
        }
        let mut failed = false;
        while let Some((slot, size)) = self.connection.next_receive() {
            failed |= self.queue.post_receive(slot, size).is_err();
        }
        let mut out = [0; MAX_HEADERS_LEN];
        while self.under_way < SENDS
            && let Some(len) = self.connection.poll_control(self.queue.adapter.now(), &mut out)
        {
            self.show(true, &out[..len], &[]);
            failed |= !self.post_send(NO_SLOT, Payload::Inline(&out[..len]));
        }
        if failed {
            self.give_up();
        }
    }

    fn post_send(&mut self, slot: u16, payload: Payload<'_>) -> bool {
        self.under_way += 1;
        self.queue.post(SEND << 32 | u64::from(slot), SendOp::Send, payload).is_ok()
    }

    /// Ends the connection at once. Everything that is posted completes with an error.
    pub(crate) fn give_up(&mut self) {
        self.broken = true;
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        let _ = self.queue.modify(&attr, Mask::STATE);
    }

    /// Sends as many of the bytes as there are credits and buffers for, through buffers; how many.
    pub(crate) fn send(&mut self, bytes: &[u8], urgent: bool) -> usize {
        let mut sent = 0;
        while sent < bytes.len() && self.under_way < SENDS && !self.broken {
            let room = self.connection.data_room().min(BUFFER_SIZE - HEADER_LEN as u32) as usize;
            let rest = &bytes[sent..];
            let part = &rest[..rest.len().min(room)];
            if part.is_empty() || !self.send_part(part, urgent && part.len() == rest.len()) {
                break;
            }
            sent += part.len();
        }
        sent
    }

    /// Sends one message; false if there is no buffer for it.
    fn send_part(&mut self, part: &[u8], urgent: bool) -> bool {
        let mut message = [0; INLINE];
        let len = HEADER_LEN + part.len();
        let mut header = [0; HEADER_LEN];
        let posted = if len <= INLINE {
            self.connection.send_data(part.len() as u32, urgent, &mut header);
            self.show(true, &header, part);
            message[..HEADER_LEN].copy_from_slice(&header);
            message[HEADER_LEN..len].copy_from_slice(part);
            self.post_send(NO_SLOT, Payload::Inline(&message[..len]))
        } else {
            let Some(slot) = self.free.pop() else { return false };
            self.connection.send_data(part.len() as u32, urgent, &mut header);
            self.show(true, &header, part);
            let (memory, at) = (&self.queue.memory, self.queue.offset(slot));
            let written = memory.write(at, &header);
            let written = written.and_then(|()| memory.write(at + HEADER_LEN, part));
            let sge = [self.queue.sge(slot, len as u32)];
            written.is_ok() && self.post_send(slot, Payload::Sges(&sge))
        };
        if !posted {
            self.give_up();
        }
        true
    }

    /// Offers bytes of the program to the peer for reading; false if that cannot be now. The bytes must
    /// stay where they are until [`take_source_end`](Self::take_source_end) says so.
    pub(crate) fn advertise(&mut self, bytes: &[u8]) -> bool {
        if self.broken || self.under_way >= SENDS || !self.connection.may_advertise() {
            return false;
        }
        let Some(region) = self.register(bytes.as_ptr(), bytes.len(), Access::REMOTE_READ) else {
            return false;
        };
        let addr = bytes.as_ptr().expose_provenance();
        // What is left begins at a line of the cache.
        let inline = 64 - addr % 64;
        let mut message = [0; MAX_HEADERS_LEN + 64];
        let memory = RemoteMemory {
            addr: addr as u64,
            len: bytes.len() as u32,
            rkey: quipu_wire::Stag(region.key.0),
        };
        let now = self.queue.adapter.now();
        let at = self.connection.advertise(now, memory, inline as u32, &mut message);
        message[at..at + inline].copy_from_slice(&bytes[..inline]);
        self.source = Some(Source { region, len: bytes.len() });
        self.show(true, &message[..at + inline], &[]);
        if !self.post_send(NO_SLOT, Payload::Inline(&message[..at + inline])) {
            self.give_up();
        }
        true
    }

    /// How many of the advertised bytes the peer has, when it reads no more. Of a broken connection: at once.
    pub(crate) fn take_source_end(&mut self) -> Option<usize> {
        let end = self.connection.take_source_end();
        let taken = match end {
            Some(end) => end.taken as usize,
            None if self.broken || self.connection.reset().is_some() => 0,
            None => return None,
        };
        // From now on the peer cannot read there, whatever it does.
        if let Some(Source { region, .. }) = self.source.take() {
            let _ = self.queue.adapter.engine.dereg_mr(region.id);
        }
        Some(taken)
    }

    fn register(&self, at: *const u8, len: usize, access: Access) -> Option<Region> {
        let addr = at.expose_provenance();
        // SAFETY: the memory is the program's, which lends it for the call in which it is registered; the
        // region is gone before the call returns.
        let memory = unsafe { Vouched::new(addr, len as u64, addr as u64, access) };
        self.queue.adapter.engine.reg_mr(self.queue.adapter.pd, memory).ok()
    }

    /// Copies what lies in receive buffers to the program; how many bytes. Where they are left there, the
    /// next call finds them again.
    pub(crate) fn take(&mut self, out: &mut [u8]) -> usize {
        let mut taken = 0;
        while taken < out.len()
            && let Readable::Buffered(segment) = self.connection.readable()
            // The mark of an urgent byte is where a read ends.
            && (taken == 0 || !self.connection.is_at_mark())
        {
            let len = (segment.len as usize).min(out.len() - taken);
            self.copy(segment, &mut out[taken..taken + len]);
            self.connection.consume(len as u32);
            taken += len;
        }
        taken
    }

    /// The same, but leaves the bytes where they are.
    pub(crate) fn peek(&self, out: &mut [u8]) -> usize {
        let mut taken = 0;
        for index in 0.. {
            let Some((segment, is_marked)) = self.connection.peek(index) else { break };
            let len = (segment.len as usize).min(out.len() - taken);
            if len == 0 || taken > 0 && is_marked {
                break;
            }
            self.copy(segment, &mut out[taken..taken + len]);
            taken += len;
        }
        taken
    }

    fn copy(&self, segment: Filled, out: &mut [u8]) {
        let at = self.queue.offset(segment.slot) + segment.at as usize;
        // The state machine has checked the segment against what was received there.
        let copied = self.queue.memory.read(at, out);
        debug_assert!(copied.is_ok());
    }

    /// Begins to read the peer's memory into the program's; false if that cannot be.
    pub(crate) fn begin_read(&mut self, out: &mut [u8]) -> bool {
        if self.reading.is_some() || self.broken {
            return false;
        }
        let Readable::Remote(_) = self.connection.readable() else { return false };
        let most = u32::try_from(out.len()).unwrap_or(u32::MAX);
        let Some(region) = self.register(out.as_ptr(), out.len(), Access::LOCAL_WRITE) else {
            return false;
        };
        let Some(memory) = self.connection.begin_read(most) else {
            let _ = self.queue.adapter.engine.dereg_mr(region.id);
            return false;
        };
        let addr = out.as_ptr().expose_provenance() as u64;
        let sge = [Sge { addr, len: memory.len, lkey: region.key }];
        let op = SendOp::Read { addr: memory.addr, rkey: memory.rkey.0 };
        self.reading = Some(Reading { region, len: memory.len, succeeded: None });
        if self.queue.post(READ << 32, op, Payload::Sges(&sge)).is_err() {
            self.give_up();
            self.reading = Some(Reading { region, len: 0, succeeded: Some(false) });
        }
        true
    }

    /// Bytes of the read that was begun, once it is over: 0 if it failed.
    pub(crate) fn take_read(&mut self) -> Option<usize> {
        let succeeded = self.reading.as_ref()?.succeeded?;
        let reading = self.reading.take()?;
        let _ = self.queue.adapter.engine.dereg_mr(reading.region.id);
        if !succeeded {
            return Some(0);
        }
        self.connection.finish_read();
        self.pump();
        Some(reading.len as usize)
    }

    /// How long the peer may need to read what is advertised, if it reads 4 GB/s.
    pub(crate) fn read_time(&self) -> Duration {
        let len = self.source.as_ref().map_or(0, |source| source.len as u64);
        Duration::from_nanos(len / 4).min(MOST_READ_TIME)
    }

    /// Ends what is sent. The peer hears of it now, also while a thread sleeps at the connection.
    pub(crate) fn shut_write(&mut self) {
        self.connection.shut_write();
        self.pump();
    }

    /// Sends what the protocol has to say after a call.
    pub(crate) fn flush(&mut self) {
        self.pump();
    }

    /// Why a stream that has nothing more to read has ended in an error, if it has.
    pub(crate) fn failure(&self) -> Option<Errno> {
        match self.connection.reset() {
            Some(Reset::TimedOut) => Some(Errno::ETIMEDOUT),
            Some(_) => Some(Errno(libc::ECONNRESET)),
            None if self.broken && !self.connection.is_finished() => Some(Errno(libc::ECONNRESET)),
            None => None,
        }
    }

    /// Whether nothing is under way to the peer.
    pub(crate) fn is_idle(&self) -> bool {
        self.under_way == 0 || self.broken
    }

    /// Whether a small message could be sent now.
    pub(crate) fn is_writable(&self) -> bool {
        self.connection.data_room() > 0 && self.under_way < SENDS && !self.free.is_empty()
    }

    /// Asks for an event at the next completion.
    pub(crate) fn arm(&self) {
        let _ = self.queue.adapter.engine.req_notify_cq(self.queue.cq, false);
    }

    /// Takes the events that were asked for.
    pub(crate) fn take_events(&self) {
        let engine = &self.queue.adapter.engine;
        while engine.wait_channel_within(self.queue.channel, Some(Duration::ZERO)).is_ok() {}
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let engine = &self.queue.adapter.engine;
        if let Some(Source { region, .. }) = self.source.take() {
            let _ = engine.dereg_mr(region.id);
        }
        if let Some(Reading { region, .. }) = self.reading.take() {
            let _ = engine.dereg_mr(region.id);
        }
    }
}
