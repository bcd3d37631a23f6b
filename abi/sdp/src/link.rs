//! One connection: a queue pair, registered memory, and the protocol's state machine.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::time::Duration;

use quipu_cabi::Errno;
use quipu_host::connection::{Ece, Param, QpParams};
use quipu_host::nic::{
    Access, AddressVector, ChannelId, Completion, CqId, Gid, Payload, QpAttr, QpAttrMask as Mask,
    QpCap, QpId, QpInit, QpNum, QpState, QpType, Region, SendFlags, SendOp, SendWr, Sge, To,
    WcStatus,
};
use quipu_mem::{Segment, Vouched};
use quipu_observe::SdpEnds;
use quipu_sdp::{Config, Connection, Readable, Received, RemoteMemory, Reset, Segment as Filled};
use quipu_wire::sdp::{HEADER_LEN, MAX_HEADERS_LEN};

use crate::adapter::Adapter;
use crate::capture;
use crate::sys::errno_of;

/// Receive buffers, and bytes of each.
const BUFFERS: u16 = 64;
const BUFFER_SIZE: u32 = 32 << 10;
/// Send buffers. Small messages need none.
const SEND_BUFFERS: u16 = 16;
/// Send requests that may be under way.
const SENDS: u32 = 128;
/// Bytes of a message that are copied when it is posted.
const INLINE: usize = 256;
/// RDMA reads under way in each direction, as OFED asks for.
const READS: u8 = 4;
/// What the kind of a work request is, in the upper half of its number.
const RECEIVE: u64 = 0;
const SEND: u64 = 1;
const READ: u64 = 2;
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

/// A queue pair with posted receives, before and while it is connected.
pub(crate) struct Queue {
    pub(crate) adapter: &'static Adapter,
    qp: QpId,
    qpn: QpNum,
    pub(crate) cq: CqId,
    pub(crate) channel: ChannelId,
    /// Readable when a completion has come that was asked for.
    pub(crate) fd: RawFd,
    memory: Segment,
    region: Region,
}

impl Queue {
    pub(crate) fn new(adapter: &'static Adapter) -> Result<Self, Errno> {
        let engine = &adapter.engine;
        let failed = |error| errno_of(&error);
        let slots = usize::from(BUFFERS) + usize::from(SEND_BUFFERS);
        let memory = engine.allocate(slots * BUFFER_SIZE as usize).map_err(failed)?;
        let access = Access::LOCAL_WRITE;
        let region = engine.reg_segment(adapter.pd, &memory, None, access).map_err(failed)?;
        let undo_region = || drop(engine.dereg_mr(region.id));
        let (channel, fd) = engine.create_channel().map_err(|error| {
            undo_region();
            errno_of(&error)
        })?;
        let undo_channel = || {
            let _ = engine.destroy_channel(channel);
            undo_region();
        };
        let entries = u32::from(BUFFERS) + SENDS + 1;
        let made = engine.create_cq(adapter.context, entries, Some(channel), 0);
        let (cq, _) = made.map_err(|error| {
            undo_channel();
            errno_of(&error)
        })?;
        let cap = QpCap {
            max_send_wr: SENDS + 1,
            max_recv_wr: BUFFERS.into(),
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: INLINE as u32,
        };
        let init = QpInit {
            pd: adapter.pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            cap,
            qp_type: QpType::Rc,
            sq_sig_all: false,
        };
        let (qp, qpn, _) = engine.create_qp(adapter.context, &init).map_err(|error| {
            let _ = engine.destroy_cq(cq);
            undo_channel();
            errno_of(&error)
        })?;
        let queue = Self { adapter, qp, qpn, cq, channel, fd, memory, region };
        queue.prepare()?;
        Ok(queue)
    }

    /// Takes the queue pair to INIT and posts all receives.
    fn prepare(&self) -> Result<(), Errno> {
        let attr = QpAttr {
            state: QpState::Init,
            access: Access::REMOTE_READ,
            port_num: 1,
            ..QpAttr::default()
        };
        self.modify(&attr, Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS)?;
        (0..BUFFERS).try_for_each(|slot| self.post_receive(slot, BUFFER_SIZE))
    }

    fn modify(&self, attr: &QpAttr, mask: Mask) -> Result<(), Errno> {
        self.adapter.engine.modify_qp(self.qp, attr, mask).map_err(|error| errno_of(&error))
    }

    /// Connects it as connection management says.
    pub(crate) fn connect(&self, params: &QpParams) -> Result<(), Errno> {
        let av = AddressVector {
            dgid: Gid(params.path.dgid),
            sgid_index: params.path.sgid_index,
            traffic_class: params.path.traffic_class,
            hop_limit: 64,
            is_global: true,
            port_num: 1,
            ..AddressVector::default()
        };
        let attr = QpAttr {
            state: QpState::Rtr,
            path_mtu: params.path_mtu,
            dest_qp_num: params.dest_qpn,
            rq_psn: params.rq_psn,
            max_dest_rd_atomic: READS,
            min_rnr_timer: params.min_rnr_timer,
            av,
            timeout: params.timeout,
            retry_cnt: params.retry_count,
            rnr_retry: params.rnr_retry,
            sq_psn: params.sq_psn,
            max_rd_atomic: params.max_rd_atomic.min(READS),
            ..QpAttr::default()
        };
        let to_rtr = Mask::STATE | Mask::AV | Mask::PATH_MTU | Mask::DEST_QPN | Mask::RQ_PSN;
        self.modify(&attr, to_rtr | Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER)?;
        let to_rts = Mask::STATE | Mask::SQ_PSN | Mask::TIMEOUT | Mask::RETRY_CNT;
        let attr = QpAttr { state: QpState::Rts, ..attr };
        self.modify(&attr, to_rts | Mask::RNR_RETRY | Mask::MAX_QP_RD_ATOMIC)
    }

    /// What it says of itself to the peer's connection management.
    pub(crate) fn param(&self, private_data: &[u8]) -> Param {
        Param {
            private_data: private_data.to_vec(),
            responder_resources: READS,
            initiator_depth: READS,
            flow_control: true,
            retry_count: 5,
            rnr_retry_count: 7,
            srq: false,
            qpn: self.qpn.0,
            qkey: 0,
            ece: Ece::default(),
        }
    }

    fn sge(&self, slot: u16, len: u32) -> Sge {
        let addr = self.memory.addr() + self.offset(slot);
        Sge { addr: addr as u64, len, lkey: self.region.key }
    }

    fn offset(&self, slot: u16) -> usize {
        usize::from(slot) * BUFFER_SIZE as usize
    }

    fn post_receive(&self, slot: u16, size: u32) -> Result<(), Errno> {
        let (engine, id) = (&self.adapter.engine, RECEIVE << 32 | u64::from(slot));
        let posted = engine.post_recv(self.qp, id, &[self.sge(slot, size)]);
        posted.map_err(|error| errno_of(&error))
    }

    fn post(&self, id: u64, op: SendOp, payload: Payload<'_>) -> Result<(), Errno> {
        let inline = matches!(payload, Payload::Inline(_));
        let flags = if inline { SendFlags::INLINE } else { SendFlags::empty() };
        let flags = flags | SendFlags::SIGNALED;
        let wr = SendWr { wr_id: id, to: To::Peer, op, flags, payload };
        self.adapter.engine.post_send(self.qp, &wr).map_err(|error| errno_of(&error))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let engine = &self.adapter.engine;
        let _ = engine.destroy_qp(self.qp);
        let _ = engine.destroy_cq(self.cq);
        let _ = engine.destroy_channel(self.channel);
        let _ = engine.dereg_mr(self.region.id);
    }
}

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
            capture::message(ends, outgoing, head, payload);
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
