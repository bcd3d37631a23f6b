//! A program that is attached, as the process that has the adapter sees it: its objects, by serial numbers of
//! its own, and its ends of the rings. Nothing that it says is believed.

mod leaving;

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use quipu_inet::stack::{Carriage, ListenerId};
use quipu_mem::ring::{Channel, RingError};
use quipu_mem::{Access, Segment};
use quipu_nic::{
    ChannelId, Completion, CqId, Fault, MrId, Payload, PdId, QpAttr, QpAttrMask, QpCap, QpId,
    QpInit, QpState, QpType, SendOp, SendWr, Sge, To, WcStatus,
};

pub(super) use self::leaving::Leaving;
use super::RINGS;
use super::claim::{self, Claim, Common};
use super::slots::{
    self, BODY, MAX_INLINE, MAX_SERIAL, MAX_SGE, MAX_TOGETHER, News, Order, Teller,
};
use super::words::{Call, Writer, answer};
use crate::TcpEvent;
use crate::engine::{ContextId, Engine};
use crate::error::EngineError;
use crate::handle_map::HandleMap;
use crate::link::socket::{self, MAX_MESSAGE};

/// What one turn takes from a ring before others get theirs.
const PER_TURN: usize = 64;
/// The most objects of a kind that a program may have. As many programs as may be attached do not use up what
/// the adapter has (2^16 domains, 2^20 regions, 2^18 queue pairs, 2^17 connections, 2^14 ports that are given
/// out for nothing): there is something left for each, and for the process that has the adapter.
const MAX_DOMAINS: (usize, &str) = (512, "protection domains for this program");
const MAX_REGIONS: (usize, &str) = (16_000, "regions for this program");
const MAX_LISTENERS: (usize, &str) = (128, "listeners for this program");
const MAX_PAIRS: (usize, &str) = (claim::MAX as usize, "queue pairs for this program");
const MAX_UDP_PAIRS: usize = 128;
/// The most connections that wait at all listeners of a program, and those that may at each in any case.
const MAX_BACKLOG: u32 = 512;
const MIN_BACKLOG: u32 = 2;
/// Behind which serial number the first one comes: in tests they begin anew in the midst of what happens.
const BEFORE_FIRST: u32 = if cfg!(test) { MAX_SERIAL - 2 } else { 0 };
/// The most requests that its queues may hold together: there is a place for the completion of each.
const MAX_REQUESTS: u32 = 1 << 16;
/// The most bytes that its queues may take, and those of one queue pair, which are cleared at once while
/// others wait.
const MAX_QUEUE_BYTES: u64 = 64 << 20;
const MAX_QP_BYTES: u64 = 8 << 20;

/// A queue pair of a program.
#[derive(Clone, Copy, Debug)]
struct Owned {
    id: QpId,
    udp: bool,
    requests: u32,
    bytes: u64,
}

/// A listener of a program, and how many connections wait there at most.
#[derive(Clone, Copy, Debug)]
struct Listening {
    id: ListenerId,
    backlog: u32,
}

/// Why a program is let go.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ending {
    #[error("the program ended")]
    Gone,
    #[error("the program wrote an invalid value: {0}")]
    Nonsense(RingError),
    #[error("the program asked for an object that does not exist")]
    BadCall,
    #[error("the program's socket failed: {0}")]
    Socket(#[from] io::Error),
}

impl From<RingError> for Ending {
    fn from(error: RingError) -> Self {
        Self::Nonsense(error)
    }
}

/// An attached program.
pub(super) struct Tenant {
    engine: Arc<Engine>,
    /// Whose it is.
    pub(super) user: u32,
    pub(super) socket: Arc<OwnedFd>,
    pub(super) bell: OwnedFd,
    /// Readable when the program has ended.
    pub(super) process: Option<OwnedFd>,
    channel: Channel,
    arena: Segment,
    context: ContextId,
    cq: CqId,
    /// Readable while there are events about connections.
    pub(super) events: RawFd,
    /// The last serial number that was given. They begin anew with 1.
    serial: u32,
    pds: HashMap<u64, PdId>,
    regions: HashMap<u64, MrId>,
    listeners: HashMap<u64, Listening>,
    qps: HandleMap<u64, Owned>,
    serials: HandleMap<QpId, u32>,
    /// How many of them are for UDP.
    udp_pairs: usize,
    claim: Claim,
    requests: u32,
    queue_bytes: u64,
    /// Everything that was asked of the last look at the completion queue has come.
    drained: bool,
    /// Completions and events that the program was told of since the beginning, wrapping.
    told: u32,
    /// Events that were taken and wait for completions before them to be told.
    changes: VecDeque<TcpEvent>,
    /// No more events were there then.
    heard_all: bool,
    /// A request that the adapter has refused, and those behind it in its slot: they wait for the completions
    /// of the requests before them to be told, and whatever else was posted waits for them.
    refused: VecDeque<Completion>,
    /// A connection has changed, for which the program is not to sleep until there is more.
    urgent: bool,
    /// There may be something to be read from the socket.
    pub(super) called: bool,
    /// A call that waits for the requests before it, which end at this position of their ring or sooner.
    call: Option<(Call, u32)>,
}

/// A number for one more object of a kind, of which there may be so many: the next one that none of them has.
fn next_serial<T, S: BuildHasher>(
    last: &mut u32,
    objects: &HashMap<u64, T, S>,
    (most, what): (usize, &'static str),
) -> Result<u32, Fault> {
    if objects.len() >= most {
        return Err(Fault::Exhausted(what));
    }
    loop {
        *last = *last % MAX_SERIAL + 1;
        if !objects.contains_key(&u64::from(*last)) {
            return Ok(*last);
        }
    }
}

/// Bytes that the queues of a queue pair take: rings have a power of two of slots.
fn queue_bytes(cap: &QpCap) -> u64 {
    let slots = |requests: u32| u64::from(requests).next_power_of_two();
    let sges = |sges: u32| 32 + 16 * u64::from(sges.max(1));
    slots(cap.max_send_wr) * (sges(cap.max_send_sge) + u64::from(cap.max_inline_data))
        + slots(cap.max_recv_wr) * sges(cap.max_recv_sge)
}

impl Tenant {
    /// A program, with its rings at the beginning of `memory` and its arena behind them. What it waits for
    /// is told by `waker`.
    ///
    /// # Errors
    ///
    /// The adapter has no room.
    pub(super) fn new(
        engine: &Arc<Engine>,
        common: &Common,
        waker: ChannelId,
        memory: &Segment,
        rings: usize,
        ends: (u32, Arc<OwnedFd>, OwnedFd),
    ) -> Result<Self, EngineError> {
        let channel = Channel::create(memory, 0, RINGS);
        let arena = memory.slice(rings, memory.len().saturating_sub(rings));
        let (Ok(channel), Ok(arena)) = (channel, arena) else {
            return Err(Fault::Invalid("memory without room for rings").into());
        };
        let (user, socket, bell) = ends;
        let (context, _) = engine.open_context()?;
        let made = engine.tcp_events(context).and_then(|events| {
            let (cq, _) = engine.create_cq(context, 2 * MAX_REQUESTS, Some(waker), 0)?;
            Ok((events, cq))
        });
        let (events, cq) = made.inspect_err(|_| drop(engine.close_context(context)))?;
        Ok(Self {
            engine: Arc::clone(engine),
            user,
            socket,
            bell,
            process: None,
            channel,
            arena,
            context,
            cq,
            events,
            serial: BEFORE_FIRST,
            pds: HashMap::new(),
            regions: HashMap::new(),
            listeners: HashMap::new(),
            qps: HandleMap::default(),
            serials: HandleMap::default(),
            udp_pairs: 0,
            claim: Claim::new(common),
            requests: 0,
            queue_bytes: 0,
            drained: true,
            told: 0,
            changes: VecDeque::new(),
            heard_all: true,
            refused: VecDeque::new(),
            urgent: false,
            called: true,
            call: None,
        })
    }

    /// Does what the rings ask for, and fills them; whether there was anything, or the link has moved: what
    /// the program has posted is under way then, and it goes on soon.
    ///
    /// # Errors
    ///
    /// The program is to be let go.
    pub(super) fn turn(&mut self) -> Result<bool, Ending> {
        let (mut any, moved) = self.tell()?;
        // While completions wait for room, nothing new is begun: so there are never more than requests.
        if !self.is_behind() && self.refused.is_empty() {
            any |= self.begin()?;
            // Events about connections have all been told when a call is carried out: none is of a connection
            // that the queue pair had before.
            if self.heard_all {
                any |= self.attend()?;
            }
        }
        if any {
            self.channel.incoming.requests.publish();
            self.channel.incoming.request_bytes.publish();
            self.ring();
        }
        Ok(any || moved)
    }

    /// Wakes the program if it sleeps and what was told is worth it.
    fn ring(&mut self) {
        let control = &self.channel.outgoing.control;
        let called = if std::mem::take(&mut self.urgent) {
            control.must_ring()
        } else {
            control.must_ring_at(self.told)
        };
        if called {
            super::ring(&self.bell);
        }
    }

    /// Tells what has happened; whether anything has, and whether the engine made progress. An event is taken
    /// before the completion queue is looked at, and told when that is empty: what a peer sent before it
    /// closed is told before that it has.
    fn tell(&mut self) -> Result<(bool, bool), Ending> {
        self.heard_all = false;
        while !self.heard_all && self.changes.len() < PER_TURN {
            match self.engine.take_tcp_event(self.context) {
                Ok(Some(event)) => self.changes.push_back(event),
                _ => self.heard_all = true,
            }
        }
        let requests = &mut self.channel.outgoing.requests;
        let room = (requests.free()? as usize).min(PER_TURN);
        let mut teller = Teller::new(requests, &mut self.told);
        let found = self.engine.poll_cq_and_move(self.cq, room, |done| teller.tell(done));
        teller.finish()?;
        // It cannot overrun, and it is there.
        let (found, moved) = found.unwrap_or_default();
        self.drained = found < room;
        let mut any = found > 0;
        while self.drained
            && self.channel.outgoing.requests.free()? > 0
            && let Some(refused) = self.refused.pop_front()
        {
            any = true;
            self.put(&News::Completion(refused))?;
        }
        while self.drained
            && self.channel.outgoing.requests.free()? > 0
            && let Some(event) = self.changes.pop_front()
        {
            (any, self.urgent) = (true, true);
            let Some(&qp) = self.serials.get(&event.qp) else { continue };
            let state = self.engine.query_qp(event.qp).map_or(QpState::Err, |info| info.attr.state);
            let news = News::Change { qp, change: event.change, state };
            self.put(&news)?;
        }
        Ok((any, moved))
    }

    /// Tells something, for which there is room.
    fn put(&mut self, news: &News) -> Result<(), RingError> {
        let mut teller = Teller::new(&mut self.channel.outgoing.requests, &mut self.told);
        teller.put(news);
        teller.finish()
    }

    /// Hands requests to the adapter.
    fn begin(&mut self) -> Result<bool, Ending> {
        let incoming = &mut self.channel.incoming;
        if !incoming.requests.is_filled() {
            return Ok(false);
        }
        let (mut body, mut sges) = (BODY, [Sge::default(); MAX_SGE]);
        let mut failed = Vec::new();
        let Ok(mut doorbell) = self.engine.doorbell() else { return Err(Ending::Gone) };
        let mut begun = 0;
        while begun + MAX_TOGETHER <= PER_TURN && self.refused.is_empty() {
            let (ring, bytes) = (&mut incoming.requests, &mut incoming.request_bytes);
            let Some((order, count)) = slots::take(ring, bytes, &mut body, &mut sges)? else {
                break;
            };
            begun += count;
            let request = match order {
                Order::Post(request) => request,
                Order::Fail(qp) => {
                    failed.extend(self.qps.get(&qp.into()).map(|qp| qp.id));
                    continue;
                }
            };
            // Of one that is destroyed there is nobody to be told.
            let Some(qp) = self.qps.get(&request.tag.qp.into()) else { continue };
            let (id, mut tag) = (qp.id, request.tag);
            for at in 0..count {
                let payload = match request.payload {
                    Payload::Sges(sges) if count > 1 => Payload::Sges(&sges[at..=at]),
                    payload => payload,
                };
                let wr_id = tag.bits();
                tag = tag.next();
                if !self.refused.is_empty() {
                    let status = WcStatus::WrFlushErr;
                    self.refused.push_back(Completion { wr_id, status, ..Completion::default() });
                    continue;
                }
                let posted = match (request.tag.receive, payload) {
                    (true, Payload::Sges(sges)) => doorbell.post_recv(id, wr_id, sges),
                    (true, Payload::Inline(_)) => return Err(RingError::Corrupt.into()),
                    (false, payload) => {
                        let to = request.to.map_or(To::Peer, To::Address);
                        let (op, flags) = (SendOp::Send, request.flags);
                        doorbell.post_send(id, &SendWr { wr_id, to, op, flags, payload })
                    }
                };
                if posted.is_err() {
                    // A request that could not even be posted fails its queue pair, too.
                    let status = WcStatus::LocQpOpErr;
                    self.refused.push_back(Completion { wr_id, status, ..Completion::default() });
                    failed.push(id);
                }
            }
        }
        drop(doorbell);
        for id in failed {
            let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
            // One that is in error already stays there.
            let _ = self.engine.modify_qp(id, &attr, QpAttrMask::STATE);
        }
        Ok(true)
    }

    /// Asks for the bell; `false` if there is something to do first.
    pub(super) fn arm(&mut self) -> bool {
        self.channel.incoming.control.arm();
        // Who is behind has something there already: that would be told at once, again and again.
        if self.drained {
            // It is there.
            let _ = self.engine.req_notify_cq(self.cq, false);
        }
        self.is_behind() || !self.channel.incoming.requests.is_filled()
    }

    /// Whether nothing is begun until the program takes what waits for it, and rings.
    pub(super) fn is_behind(&mut self) -> bool {
        !self.drained || self.channel.outgoing.requests.free().unwrap_or(0) as usize <= PER_TURN
    }

    /// Needs no bell any more.
    pub(super) fn disarm(&mut self) {
        self.channel.incoming.control.disarm();
    }

    /// Looks after the socket: carries out a call when everything is begun that was posted before it, and
    /// answers it.
    fn attend(&mut self) -> Result<bool, Ending> {
        let Some((call, end)) =
            self.call.take().map_or_else(|| self.read_call(), |it| Ok(Some(it)))?
        else {
            return Ok(false);
        };
        let requests = &mut self.channel.incoming.requests;
        // Whether the position is before the end, where both wrap.
        let before = end.wrapping_sub(requests.position()) as i32 > 0;
        if before && requests.is_filled() {
            self.call = Some((call, end));
        } else {
            // Anyone who has the answer has the room, too.
            self.channel.incoming.publish();
            let done = self.carry_out(&call);
            socket::send(&self.socket, &answer(done).bytes(), &[])?;
        }
        Ok(true)
    }

    /// Reads a call from the socket, if there is one. What was posted before it is in the ring: that is a
    /// whole ring of requests at most.
    fn read_call(&mut self) -> Result<Option<(Call, u32)>, Ending> {
        if !self.called {
            return Ok(None);
        }
        let mut buffer = [0; MAX_MESSAGE];
        let len = match crate::sys::receive(&self.socket, &mut buffer) {
            Ok(0) => return Err(Ending::Gone),
            Err(error) if crate::sys::would_block(&error) => {
                self.called = false;
                return Ok(None);
            }
            received => received?,
        };
        let call = Call::decode(&buffer[..len]).ok_or(Ending::BadCall)?;
        let position = self.channel.incoming.requests.position();
        Ok(Some((call, position.wrapping_add(RINGS.request_slots))))
    }

    fn qp(&self, serial: u64) -> Result<QpId, Fault> {
        self.qps.get(&serial).map(|qp| qp.id).ok_or(Fault::NoSuchObject)
    }

    fn carry_out(&mut self, call: &Call) -> Result<Writer, EngineError> {
        let engine = Arc::clone(&self.engine);
        let nothing = Writer::default();
        let pd =
            |pds: &HashMap<u64, PdId>, serial| pds.get(&serial).copied().ok_or(Fault::NoSuchObject);
        match *call {
            Call::AllocPd => {
                let serial = next_serial(&mut self.serial, &self.pds, MAX_DOMAINS)?;
                self.pds.insert(serial.into(), engine.alloc_pd()?);
                return Ok(nothing.word(serial));
            }
            Call::DeallocPd { pd: serial } => {
                engine.dealloc_pd(pd(&self.pds, serial)?)?;
                self.pds.remove(&serial);
            }
            Call::Register { pd: serial, offset, len, iova, access } => {
                let (offset, len) = (usize::try_from(offset), usize::try_from(len));
                let (Ok(offset), Ok(len)) = (offset, len) else {
                    return Err(Fault::Invalid("range").into());
                };
                let memory = self.arena.slice(offset, len);
                let memory = memory.map_err(|_| Fault::Invalid("a range outside of the arena"))?;
                let pd = pd(&self.pds, serial)?;
                let serial = next_serial(&mut self.serial, &self.regions, MAX_REGIONS)?;
                // Nobody but the program itself reaches its memory: QPIP has no remote access.
                let access = Access::from_bits_truncate(access) & Access::LOCAL_WRITE;
                let region = engine.reg_segment(pd, &memory, Some(iova), access)?;
                self.regions.insert(serial.into(), region.id);
                return Ok(nothing.word(serial).word(region.key.0));
            }
            Call::Deregister { region } => {
                let id = self.regions.get(&region).ok_or(Fault::NoSuchObject)?;
                engine.dereg_mr(*id)?;
                self.regions.remove(&region);
            }
            Call::CreateQp { pd: serial, udp, cap } => {
                return self.create_qp(pd(&self.pds, serial)?, udp, cap);
            }
            Call::ModifyQp { qp, state } => {
                let state = slots::state(state).ok_or(Fault::Invalid("no such state"))?;
                let attr = QpAttr { state, port_num: 1, ..QpAttr::default() };
                let mut mask = QpAttrMask::STATE;
                if state == QpState::Init {
                    mask |= QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
                }
                engine.modify_qp(self.qp(qp)?, &attr, mask)?;
            }
            Call::DestroyQp { qp } => {
                let owned = *self.qps.get(&qp).ok_or(Fault::NoSuchObject)?;
                engine.destroy_qp(owned.id)?;
                self.qps.remove(&qp);
                self.serials.remove(&owned.id);
                self.give_back(&owned);
            }
            Call::Listen { port, backlog, settings } => {
                let serial = next_serial(&mut self.serial, &self.listeners, MAX_LISTENERS)?;
                let taken = self.listeners.values().map(|listening| listening.backlog).sum();
                let room = MAX_BACKLOG.saturating_sub(taken).max(MIN_BACKLOG);
                let backlog = backlog.min(room);
                let (id, port) = engine.tcp_listen(port, &settings, backlog)?;
                self.listeners.insert(serial.into(), Listening { id, backlog });
                return Ok(nothing.word(serial).word(port));
            }
            Call::Unlisten { listener } => {
                let listening = self.listeners.remove(&listener).ok_or(Fault::NoSuchObject)?;
                engine.tcp_unlisten(listening.id)?;
            }
            Call::Offer { listener, qp } => {
                let listening = self.listeners.get(&listener).ok_or(Fault::NoSuchObject)?;
                engine.tcp_offer(listening.id, self.qp(qp)?)?;
            }
            Call::Connect { qp, from, to, settings } => {
                let from = (from != 0).then_some(from);
                engine.tcp_connect(self.qp(qp)?, to, from, &settings)?;
            }
            Call::Close { qp } => engine.tcp_close(self.qp(qp)?)?,
            Call::Abort { qp } => engine.tcp_abort(self.qp(qp)?)?,
            Call::Flow { qp } => {
                let flow = engine.tcp_flow(self.qp(qp)?)?;
                return Ok(flow.map_or(nothing.word(0u64), |flow| {
                    Writer::default().word(1u64).address(flow.local).address(flow.remote)
                }));
            }
            Call::Counters { qp } => {
                let counters = engine.tcp_counters(self.qp(qp)?)?;
                return Ok(counters.map_or(nothing.word(0u64), |counters| {
                    Writer::default().word(1u64).counters(&counters)
                }));
            }
            Call::Bind { qp, port } => {
                return Ok(nothing.word(engine.udp_bind(self.qp(qp)?, port)?));
            }
            Call::Carry { qp, traffic_class, hop_limit } => {
                let hop_limit = (hop_limit != 0).then_some(hop_limit);
                engine.set_carriage(self.qp(qp)?, Carriage { traffic_class, hop_limit })?;
            }
        }
        Ok(nothing)
    }

    /// A queue pair is gone.
    fn give_back(&mut self, owned: &Owned) {
        self.udp_pairs -= usize::from(owned.udp);
        self.requests -= owned.requests;
        self.queue_bytes -= owned.bytes;
        self.claim.give_back();
    }

    fn create_qp(&mut self, pd: PdId, udp: bool, cap: QpCap) -> Result<Writer, EngineError> {
        let limits = [(cap.max_send_sge, MAX_SGE), (cap.max_recv_sge, MAX_SGE)];
        let inline = (cap.max_inline_data, MAX_INLINE);
        if limits.into_iter().chain([inline]).any(|(wanted, most)| wanted as usize > most) {
            return Err(Fault::Invalid("requests larger than a shared adapter takes").into());
        }
        let (requests, bytes) =
            (cap.max_send_wr.saturating_add(cap.max_recv_wr), queue_bytes(&cap));
        let room = (MAX_QUEUE_BYTES - self.queue_bytes).min(MAX_QP_BYTES);
        if requests > MAX_REQUESTS - self.requests || bytes > room {
            return Err(Fault::Exhausted("the queues of this program are too large").into());
        }
        if udp && self.udp_pairs >= MAX_UDP_PAIRS {
            return Err(Fault::Exhausted("queue pairs with UDP for this program").into());
        }
        let serial = next_serial(&mut self.serial, &self.qps, MAX_PAIRS)?;
        if !self.claim.take() {
            return Err(Fault::Exhausted("queue pairs that no other program is sure of").into());
        }
        let qp_type = if udp { QpType::Udp } else { QpType::Tcp };
        let (send_cq, recv_cq) = (self.cq, self.cq);
        let init = QpInit { pd, send_cq, recv_cq, srq: None, cap, qp_type, sq_sig_all: false };
        let made = self.engine.create_qp(self.context, &init);
        let (id, number, cap) = made.inspect_err(|_| self.claim.give_back())?;
        self.qps.insert(serial.into(), Owned { id, udp, requests, bytes });
        self.serials.insert(id, serial);
        self.udp_pairs += usize::from(udp);
        self.requests += requests;
        self.queue_bytes += bytes;
        let message = Writer::default().word(serial).word(number.0);
        let message = message.word(cap.max_send_wr).word(cap.max_recv_wr).word(cap.max_send_sge);
        Ok(message.word(cap.max_recv_sge).word(cap.max_inline_data))
    }
}

impl std::fmt::Debug for Tenant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tenant").field("socket", &self.socket.as_raw_fd()).finish_non_exhaustive()
    }
}
