//! Queue pairs and connection management of the adapter, for the engine of Active Messages.

mod connections;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::RawFd;

use quipu_am::{
    ConnId, Event, Fabric, Hello, LaneAddress, Line, Local, Name, Pushed, Refusal, Remote, Status,
    Welcome,
};
use quipu_host::connection::{ChannelKey, IdKey, PortSpace};
use quipu_host::nic::{Access, Completion, QpState, Sge, WcStatus};

use super::lanes::Lanes;
use super::signaled::Signaled;
use super::sizes::Sizes;
use crate::cq::CompletionQueue;
use crate::device::{Device, ProtectionDomain};
use crate::error::Error;
use crate::memory::{MemoryRegion, RemoteMemory};
use crate::qp::QueuePair;
use crate::request::Request;
use crate::srq::SharedReceiveQueue;

/// `IBV_QPT_RC`
const RC: u8 = 2;
const BACKLOG: i32 = 1024;
/// Bytes that a send may have copied into the queue.
const INLINE: u32 = 1024;
/// Receive slots that are made at once.
const CHUNK: u32 = 64;
/// Marks the number of a receive.
const RECEIVE: u64 = 1 << 63;
/// Bytes of one piece of a long write or read.
const PIECE: u64 = 1 << 30;
/// Places of the table that remembers which connection a queue pair is of.
const REMEMBERED: usize = 64;
/// What a refusal of the engine begins with, in private data.
const REFUSAL: [u8; 2] = *b"AM";

/// A connection, or an attempt at one.
#[derive(Debug)]
struct Link {
    conn: ConnId,
    id: IdKey,
    hello: [u8; Hello::WIRE_LEN],
    qp: Option<QueuePair>,
}

#[derive(Debug)]
pub(super) struct HostFabric {
    device: Device,
    domain: ProtectionDomain,
    /// Completions of receives. Sends have a queue of their own: the adapter hands a message straight to a
    /// poll only of a queue that is not that of the sends.
    cq: CompletionQueue,
    send_cq: CompletionQueue,
    /// Posts that have asked for a completion which is not taken yet.
    signaled: Signaled,
    srq: SharedReceiveQueue,
    channel: ChannelKey,
    channel_fd: RawFd,
    /// And the endpoint that each is for, if it is for one.
    listeners: Vec<(IdKey, Option<u32>)>,
    sizes: Sizes,
    links: Vec<Option<Link>>,
    by_number: HashMap<u32, ConnId>,
    remembered: [(u32, ConnId); REMEMBERED],
    chunks: Vec<MemoryRegion>,
    buffers: MemoryRegion,
    /// Queue pairs of closed connections, until their completions are taken.
    dying: Vec<QueuePair>,
    /// Connections whose sends have failed. Messages that came before that may wait to be taken.
    failed: Vec<ConnId>,
    /// What happened in calls that cannot say so.
    later: VecDeque<Event>,
    pub(super) lanes: Lanes,
}

impl HostFabric {
    pub(super) fn new(device: &Device, sizes: Sizes) -> Result<Self, Error> {
        let domain = device.protection_domain()?;
        let limits = device.opened.engine.limits()?;
        let cq = device.completion_queue(sizes.receives.min(limits.max_cqe))?;
        let send_cq = device.completion_queue((2 * sizes.receives).min(limits.max_cqe))?;
        let srq = domain.shared_receive_queue(sizes.receives.min(limits.max_srq_wr), 1)?;
        let len = sizes.slot * sizes.send_buffers as usize;
        let buffers = domain.register(len, Access::LOCAL_WRITE)?;
        let (channel, channel_fd) = device.opened.engine.cm_create_channel()?;
        Ok(Self {
            device: device.clone(),
            domain,
            cq,
            send_cq,
            signaled: Signaled::default(),
            srq,
            channel,
            channel_fd,
            listeners: Vec::new(),
            sizes,
            links: Vec::new(),
            by_number: HashMap::new(),
            remembered: [(u32::MAX, ConnId::from_u64(u64::MAX)); REMEMBERED],
            chunks: Vec::new(),
            buffers,
            dying: Vec::new(),
            failed: Vec::new(),
            later: VecDeque::new(),
            lanes: Lanes::default(),
        })
    }

    pub(super) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    pub(super) fn queue(&self) -> &CompletionQueue {
        &self.cq
    }

    /// The completion queue of sends.
    pub(super) fn send_queue(&self) -> &CompletionQueue {
        &self.send_cq
    }

    /// Whether the completion queue of sends may have something that the engine waits for.
    #[inline]
    pub(super) fn awaits_sends(&self) -> bool {
        self.signaled.is_worth_a_poll()
    }

    /// Readable while connection management has something to say.
    pub(super) fn events_fd(&self) -> RawFd {
        self.channel_fd
    }

    /// Takes connections at another address; those for no endpoint by number are for `endpoint`.
    pub(super) fn listen(
        &mut self,
        at: SocketAddr,
        endpoint: Option<u32>,
    ) -> Result<SocketAddr, Error> {
        let engine = &self.device.opened.engine;
        let cookie = endpoint.map_or(u64::MAX, u64::from);
        let id = engine.cm_create_id(self.channel, PortSpace::Tcp, 0, cookie)?;
        self.listeners.push((id, endpoint));
        engine.cm_bind_addr(id, at)?;
        engine.cm_listen(id, BACKLOG)?;
        engine.cm_route(id)?.src.ok_or(Error::PlainIwarp)
    }

    /// Takes no more connections for an endpoint that is gone.
    pub(super) fn unlisten(&mut self, endpoint: u32) {
        let engine = &self.device.opened.engine;
        self.listeners.retain(|(id, of)| {
            let stays = *of != Some(endpoint);
            if !stays {
                let _ = engine.cm_destroy_id(*id);
            }
            stays
        });
    }

    fn link(&mut self, conn: ConnId) -> Option<&mut Link> {
        let link = self.links.get_mut(conn.index() as usize)?.as_mut()?;
        (link.conn == conn).then_some(link)
    }

    #[inline]
    fn queue_pair(&self, conn: ConnId) -> Option<&QueuePair> {
        let link = self.links.get(conn.index() as usize)?.as_ref()?;
        if link.conn == conn { link.qp.as_ref() } else { None }
    }

    fn add_link(&mut self, link: Link) {
        let at = link.conn.index() as usize;
        if at >= self.links.len() {
            self.links.resize_with(at + 1, || None);
        }
        self.links[at] = Some(link);
    }

    fn build(&mut self, conn: ConnId) -> Result<QueuePair, Error> {
        let qp = self
            .domain
            .queue_pair(&self.send_cq, &self.cq)
            .shared_receive_queue(&self.srq)
            .send_queue(self.sizes.sends, 1)
            .inline_data(INLINE)
            .build()?;
        self.by_number.insert(qp.number().0, conn);
        Ok(qp)
    }

    #[inline]
    fn conn_of(&mut self, number: u32) -> Option<ConnId> {
        let place = &mut self.remembered[(number ^ number >> 8) as usize % REMEMBERED];
        if place.0 != number {
            *place = (number, *self.by_number.get(&number)?);
        }
        Some(place.1)
    }

    /// What a completion means to the engine.
    #[inline]
    pub(super) fn event_of(&mut self, completion: &Completion) -> Option<Event> {
        let conn = self.conn_of(completion.qp_num.0);
        let is_receive = completion.wr_id & RECEIVE != 0;
        let slot = completion.wr_id as u32;
        if is_receive && completion.status == WcStatus::Success {
            return Some(Event::Received { conn, slot, len: completion.byte_len as usize });
        }
        if is_receive {
            self.later.push_back(Event::Unused { slot });
            return conn.map(|conn| Event::Failed { conn });
        }
        self.signaled.take(completion.wr_id);
        if completion.status != WcStatus::Success {
            self.failed.extend(conn);
            return None;
        }
        conn.map(|conn| Event::Done { conn, notify: completion.wr_id })
    }

    /// The completion queue of sends is about to be polled.
    #[inline]
    pub(super) fn note_poll_of_sends(&mut self) {
        self.signaled.note_poll();
    }

    /// There are no more messages of connections whose sends have failed: they end now.
    #[inline]
    pub(super) fn end_failed(&mut self) {
        if !self.failed.is_empty() {
            self.later.extend(self.failed.drain(..).map(|conn| Event::Failed { conn }));
        }
    }

    /// What happened in calls that could not say so.
    #[inline]
    pub(super) fn take_later(&mut self) -> Option<Event> {
        if self.later.is_empty() { None } else { self.later.pop_front() }
    }

    /// Destroys queue pairs of closed connections. To be called when no completions are left.
    pub(super) fn reap(&mut self) {
        for qp in self.dying.drain(..) {
            let number = qp.number().0;
            self.by_number.remove(&number);
            self.remembered[(number ^ number >> 8) as usize % REMEMBERED].0 = u32::MAX;
        }
        if self.links.iter().all(Option::is_none) {
            self.signaled.forget();
        }
    }

    /// Notes connections whose queue pairs have failed. One that waits for nothing but a reply has
    /// no request that would complete with an error.
    pub(super) fn find_failed(&mut self) {
        for link in self.links.iter().flatten() {
            let Some(qp) = &link.qp else { continue };
            if matches!(qp.state(), Ok(QpState::Err | QpState::Sqe)) {
                self.failed.push(link.conn);
            }
        }
    }

    pub(super) fn has_dying(&self) -> bool {
        !self.dying.is_empty()
    }

    fn sge(&self, slot: u32) -> Option<Sge> {
        let chunk = self.chunks.get((slot / CHUNK) as usize)?;
        chunk.sge((slot % CHUNK) as usize * self.sizes.slot, self.sizes.slot).ok()
    }

    /// The address of a byte of a receive slot.
    pub(super) fn address_of(&self, slot: u32, at: u32) -> u64 {
        self.sge(slot).map_or(0, |sge| sge.addr + u64::from(at))
    }

    /// Counts posts that ask for a completion; whether they were made.
    #[inline]
    fn count<const N: usize>(&mut self, posted: bool, numbers: [Option<u64>; N]) -> bool {
        if posted {
            numbers.into_iter().flatten().for_each(|number| self.signaled.add(number));
        }
        posted
    }

    /// Posts in pieces, of which the last one asks for a completion if `notify` is given.
    fn post_long(
        &self,
        conn: ConnId,
        local: Local,
        remote: Remote,
        notify: Option<u64>,
        make: impl for<'a> Fn(&'a [Sge], RemoteMemory) -> Request<'a>,
    ) -> bool {
        let Some(qp) = self.queue_pair(conn) else { return false };
        let mut done = 0;
        while done < local.len {
            let len = (local.len - done).min(PIECE);
            let lkey = quipu_host::nic::Key(local.key);
            let sges = [Sge { addr: local.addr.wrapping_add(done), len: len as u32, lkey }];
            let rkey = quipu_host::nic::Key(remote.key);
            let to = RemoteMemory { addr: remote.addr.wrapping_add(done), len, rkey };
            done += len;
            let mut request = make(&sges, to);
            request = match notify {
                Some(number) if done == local.len => request.id(number),
                _ => request.unsignaled(),
            };
            if qp.post_send(&request).is_err() {
                return false;
            }
        }
        true
    }
}

/// A request that is reported by that number, or not at all.
#[inline]
fn reported(request: Request<'_>, number: Option<u64>) -> Request<'_> {
    match number {
        Some(number) => request.id(number),
        None => request.unsignaled(),
    }
}

impl Fabric for HostFabric {
    fn connect(&mut self, conn: ConnId, to: &Name, hello: &Hello) {
        let engine = &self.device.opened.engine;
        let Ok(id) = engine.cm_create_id(self.channel, PortSpace::Tcp, RC, conn.to_u64()) else {
            return self.later.push_back(Event::Refused { conn, why: Refusal::Absent });
        };
        let resolves = engine.cm_resolve_addr(id, None, to.port).is_ok();
        self.add_link(Link { conn, id, hello: hello.to_bytes(), qp: None });
        if !resolves {
            self.abandon(conn);
            self.later.push_back(Event::Refused { conn, why: Refusal::Absent });
        }
    }

    fn accept(&mut self, incoming: u64, conn: ConnId, welcome: &Welcome) -> bool {
        let id = IdKey(incoming);
        if self.bring_up(id, conn, welcome).is_ok() {
            return true;
        }
        if self.link(conn).is_none() {
            let _ = self.device.opened.engine.cm_destroy_id(id);
        }
        false
    }

    fn reject(&mut self, incoming: u64, why: Status) {
        let engine = &self.device.opened.engine;
        let said = [REFUSAL[0], REFUSAL[1], why as u8];
        let consumer = quipu_host::connection::Refusal::Consumer;
        let _ = engine.cm_reject(IdKey(incoming), consumer, &said);
        let _ = engine.cm_destroy_id(IdKey(incoming));
    }

    fn close(&mut self, conn: ConnId) {
        self.lanes.close(conn);
        self.abandon(conn);
    }

    #[inline]
    fn send(&mut self, conn: ConnId, bytes: &[u8], notify: Option<u64>) -> bool {
        let Some(qp) = self.queue_pair(conn) else { return false };
        let posted = qp.post_send(&reported(Request::send_inline(bytes), notify)).is_ok();
        self.count(posted, [notify])
    }

    fn send_buffer(&mut self, conn: ConnId, buffer: u32, len: usize, notify: u64) -> bool {
        let Some(qp) = self.queue_pair(conn) else { return false };
        let Ok(sge) = self.buffers.sge(buffer as usize * self.sizes.slot, len) else {
            return false;
        };
        let posted = qp.post_send(&Request::send(&[sge]).id(notify)).is_ok();
        self.count(posted, [Some(notify)])
    }

    fn write(&mut self, conn: ConnId, from: Local, to: Remote, notify: Option<u64>) -> bool {
        let posted = self.post_long(conn, from, to, notify, |sges, to| Request::write(sges, to));
        self.count(posted, [notify])
    }

    #[inline]
    fn write_and_send(
        &mut self,
        conn: ConnId,
        from: Local,
        to: Remote,
        notify: Option<u64>,
        (bytes, sent): (&[u8], Option<u64>),
    ) -> bool {
        if from.len > PIECE {
            return self.write(conn, from, to, notify) && self.send(conn, bytes, sent);
        }
        let Some(qp) = self.queue_pair(conn) else { return false };
        let lkey = quipu_host::nic::Key(from.key);
        let sges = [Sge { addr: from.addr, len: from.len as u32, lkey }];
        let rkey = quipu_host::nic::Key(to.key);
        let to = RemoteMemory { addr: to.addr, len: from.len, rkey };
        let requests = [
            reported(Request::write(&sges, to), notify),
            reported(Request::send_inline(bytes), sent),
        ];
        let posted = qp.post_sends(&requests).is_ok();
        self.count(posted, [notify, sent])
    }

    fn probe(&mut self, conn: ConnId, notify: u64) -> bool {
        let Some(qp) = self.queue_pair(conn) else { return false };
        // A write of no bytes needs no key (IBA 9.4.4), and the peer's adapter acknowledges it.
        let to = RemoteMemory { addr: 0, len: 0, rkey: quipu_host::nic::Key(0) };
        let posted = qp.post_send(&Request::write(&[], to).id(notify)).is_ok();
        self.count(posted, [Some(notify)])
    }

    fn read(&mut self, conn: ConnId, into: Local, from: Remote, notify: u64) -> bool {
        let number = Some(notify);
        let posted =
            self.post_long(conn, into, from, number, |sges, from| Request::read(sges, from));
        self.count(posted, [number])
    }

    fn offer_lane(&mut self, conn: ConnId) -> Option<LaneAddress> {
        if !self.queue_pair(conn)?.is_peer_mapped() {
            return None;
        }
        self.lanes.offer(conn, &self.domain)
    }

    fn open_lane(&mut self, conn: ConnId, to: LaneAddress) -> bool {
        let link = self.links.get(conn.index() as usize).and_then(Option::as_ref);
        let qp = link.filter(|link| link.conn == conn).and_then(|link| link.qp.as_ref());
        qp.is_some_and(|qp| self.lanes.open(conn, qp, to))
    }

    fn withdraw_lane(&mut self, conn: ConnId) {
        self.lanes.withdraw(conn);
    }

    #[inline(always)]
    fn push_line(&mut self, conn: ConnId, line: &Line) -> Pushed {
        // The lanes of a forked child are those of its parent.
        if !self.device.opened.engine.is_here() {
            return Pushed::Closed;
        }
        self.lanes.push(conn, line)
    }

    fn write_now(&mut self, conn: ConnId, from: Local, to: Remote) -> bool {
        let Some(qp) = self.queue_pair(conn).filter(|_| from.len <= PIECE) else { return false };
        let from =
            Sge { addr: from.addr, len: from.len as u32, lkey: quipu_host::nic::Key(from.key) };
        let rkey = quipu_host::nic::Key(to.key);
        qp.write_now(from, &RemoteMemory { addr: to.addr, len: to.len, rkey })
    }

    #[inline(always)]
    fn peek_lanes(&mut self) -> Option<(ConnId, Line)> {
        self.lanes.peek_any()
    }

    fn rotate_lanes(&mut self) {
        self.lanes.rotate();
    }

    #[inline]
    fn peek_line(&mut self, conn: ConnId) -> Option<Line> {
        self.lanes.peek(conn)
    }

    #[inline(always)]
    fn pop_line(&mut self, conn: ConnId) {
        self.lanes.pop(conn);
    }

    fn arm_lanes(&mut self) -> Vec<ConnId> {
        self.lanes.arm()
    }

    fn take_wake(&mut self, conn: ConnId) -> bool {
        self.lanes.take_wake(conn)
    }

    #[inline]
    fn inline_limit(&self) -> usize {
        INLINE as usize
    }

    fn store(&mut self, buffer: u32, at: usize, bytes: &[u8]) {
        // The engine keeps to the size of buffers.
        let _ = self.buffers.write(buffer as usize * self.sizes.slot + at, bytes);
    }

    #[inline]
    fn load(&self, slot: u32, at: usize, out: &mut [u8]) {
        let Some(chunk) = self.chunks.get((slot / CHUNK) as usize) else { return };
        let _ = chunk.read((slot % CHUNK) as usize * self.sizes.slot + at, out);
    }

    #[inline]
    fn repost(&mut self, slots: &[u32]) {
        let Ok(mut doorbell) = self.device.opened.engine.doorbell() else { return };
        for &slot in slots {
            let Some(sge) = self.sge(slot) else { continue };
            let _ = doorbell.post_srq_recv(self.srq.inner.id, RECEIVE | u64::from(slot), &[sge]);
        }
    }

    fn provide(&mut self, slots: u32) -> bool {
        while (self.chunks.len() as u32 * CHUNK) < slots {
            let len = self.sizes.slot * CHUNK as usize;
            let Ok(chunk) = self.domain.register(len, Access::LOCAL_WRITE) else { return false };
            let first = self.chunks.len() as u32 * CHUNK;
            self.chunks.push(chunk);
            let new: Vec<u32> = (first..first + CHUNK).collect();
            self.repost(&new);
        }
        true
    }
}

impl Drop for HostFabric {
    fn drop(&mut self) {
        let conns: Vec<ConnId> = self.links.iter().flatten().map(|link| link.conn).collect();
        for conn in conns {
            self.abandon(conn);
        }
        self.dying.clear();
        let engine = &self.device.opened.engine;
        for (id, _) in self.listeners.drain(..) {
            let _ = engine.cm_destroy_id(id);
        }
        let _ = engine.cm_destroy_channel(self.channel);
    }
}
