//! The world below the adapters: hosts that serve them, and the events that connect the hosts.
//!
//! It does what the `host` world does with kernel sockets, shared memory and threads: carries out
//! actions, moves bytes, keeps deadlines, sleeps and is woken. All of it happens at points in virtual
//! time that the seed decides.

mod links;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use quipu_events::Kernel;
use quipu_nic::mem::Segment;
use quipu_nic::{
    Action, Adapter, Arrival, Config, ConnId, Event as NicEvent, Gid, LinkId, LinkMessage, Loss,
    QpId, QpNum, SendOp, Time,
};

use crate::datagrams::Udp;
use crate::frames::Frames;
use crate::memory::{Reach, SharedSpace};
use crate::network::{Network, Packet, Profile};
use crate::rng::Rng;
use crate::startup_link::LinkStart;
use crate::trace::Trace;

/// How a host serves its adapter.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Bytes of the buffer that is given to `transmit`.
    pub buffer: usize,
    /// Whether what is not urgent waits a little, so that more gathers.
    pub gather_ns: u64,
    /// How long acknowledgements wait for something to travel with.
    pub ack_ns: u64,
    /// How often it looks at its channels before it sleeps, and how long between two looks.
    pub looks: u32,
    pub look_ns: u64,
    /// Whether it calls timeouts late, and how late at most.
    pub late_ns: u64,
    /// Channels that fit into the segment of a link.
    pub link_blocks: usize,
    /// Whether same-host peers may reach its memory, and whether it shows them a directory.
    pub reachable: bool,
    pub directory: bool,
}

impl Style {
    /// Whether peers that reach its memory map it, and so execute atomics there. No draw of its own, so that
    /// the seeds of old stay what they were.
    fn is_mapped(&self) -> bool {
        self.looks > 0
    }
}

/// A host: one process with one adapter.
pub struct Host {
    pub adapter: Adapter,
    pub address: SocketAddr,
    pub alive: bool,
    /// Accepts connections.
    pub listening: bool,
    pub style: Style,
    pub space: SharedSpace,
    /// Events for programs that were not looked at yet.
    pub events: VecDeque<NicEvent>,
    /// Links by the peer's index, and the other way round.
    links: BTreeMap<usize, LinkId>,
    link_peers: BTreeMap<LinkId, usize>,
    directory: Option<Segment>,
    timer: Option<u64>,
    parked: bool,
    looks_left: u32,
    look_scheduled: bool,
    ack_scheduled: bool,
    /// Connections for which `Connect` was asked and not answered.
    reaching: BTreeSet<ConnId>,
    /// When the last control message to each peer arrives, since they stay in order.
    link_clock: BTreeMap<usize, u64>,
    /// Addresses of its machine besides the first, which are rows of its GID table.
    pub(crate) others: Vec<IpAddr>,
    /// From which address connections are made, if there are several.
    pub(crate) sources: BTreeMap<ConnId, IpAddr>,
}

/// What happens in the world.
#[derive(Debug)]
pub enum WorldEvent {
    /// A packet arrives at an end of a stream.
    Packet { stream: usize, side: usize, packet: Packet },
    /// A retransmission timer of what an end sends fires.
    Retransmit { stream: usize, side: usize, timer: u64 },
    /// A connection request is repeated.
    SynRetry { stream: usize, attempt: u32 },
    /// An end asks whether the other still lives.
    KeepAlive { stream: usize, side: usize },
    /// A program reads from its socket.
    Read { stream: usize, side: usize },
    /// What was left to gather is sent.
    Pump { host: usize, conn: ConnId },
    /// A deadline of an adapter has come.
    Timer { host: usize },
    /// Acknowledgements have waited long enough.
    Acks { host: usize },
    /// A host looks at its channels.
    Look { host: usize },
    /// The peer asked for is this very process.
    ReachedSelf { host: usize, conn: ConnId },
    /// The peer asked for is on this host.
    ReachedLink { host: usize, conn: ConnId, peer: usize },
    /// A control message arrives.
    Linked { host: usize, from: usize, message: LinkMessage },
    /// The start-up of a stream of plain iWARP has taken too long.
    StartupLate { stream: usize, side: usize },
    /// The same of one over the adapters' own TCP.
    LinkLate { link: usize, side: usize },
    /// A datagram arrives.
    Datagram { host: usize, arrival: Arrival, bytes: Arc<[u8]> },
    /// A frame arrives.
    Frame { host: usize, bytes: Arc<[u8]> },
    /// The link of a host hands over what it has joined.
    Frames { host: usize },
    /// The socket of a datagram queue pair is full no more.
    SocketRoom { host: usize, from: QpNum },
    /// A sleeping host is woken.
    Bell { host: usize },
    /// A host begins to accept connections.
    Listen { host: usize },
    /// A host learns that a same-host peer is gone.
    LinkDown { host: usize, peer: usize },
    /// Something of the workload.
    Load(LoadEvent),
}

/// What happens in the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadEvent {
    /// A program does something with an end of a connection.
    Tick { end: usize },
    /// A program polls a completion queue.
    Poll { cq: usize },
    /// A step of making a connection.
    Connect { end: usize },
    /// An end takes the queue pair of the one before it, for another connection.
    Rebirth { end: usize },
    /// A fault of the plan happens.
    Fault { index: usize },
    /// A program does something with a UDP queue pair of QPIP.
    Post { post: usize },
    /// A program posts receives.
    Refill { pool: usize },
}

/// How a run goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

/// Counts of what the world did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Segments sent over streams.
    pub segments: u64,
    /// Datagrams sent, one for each host that it is for.
    pub datagrams: u64,
    /// Frames sent by adapters with a stack of their own.
    pub frames: u64,
    /// Of all these, lost to chance, partition or a full queue.
    pub lost: u64,
    /// Delivered twice.
    pub duplicated: u64,
    /// Held back so that later ones came first.
    pub reordered: u64,
    /// Delivered with a flipped bit.
    pub corrupted: u64,
    /// Sent again.
    pub retransmitted: u64,
    /// Streams opened.
    pub streams: u64,
    /// Streams that ended because the peer gave no sign of life.
    pub timed_out: u64,
    /// Engines that were ended.
    pub killed: u64,
    /// Atomic writes that programs posted.
    pub atomic_writes: u64,
    /// Flushes that programs posted.
    pub flushes: u64,
    /// Same-host links made.
    pub links: u64,
    /// Times that a sleeping engine was woken.
    pub bells: u64,
    /// Frames of many segments that links have cut.
    pub cut: u64,
    /// Segments that links have joined to those before them.
    pub joined: u64,
    /// What routers have said that was not true.
    pub lies: u64,
    /// Queue pairs of QPIP that were used again.
    pub reborn: u64,
    /// Of those who share a port, how many got another's peer.
    pub swapped: u64,
}

/// The world.
pub struct World {
    pub kernel: Kernel<WorldEvent>,
    pub hosts: Vec<Host>,
    pub net: Network,
    pub udp: Udp,
    pub frames: Frames,
    pub rng: Rng,
    pub trace: Trace,
    pub counters: Counters,
    pub violation: Option<Violation>,
    /// Connections of strangers, by host.
    pub strangers: BTreeSet<(usize, ConnId)>,
    /// Queue pairs, by host, whose streams were lost before the adapter had them.
    pub failed_startups: Vec<(usize, QpId)>,
    /// Start-ups of plain iWARP over the adapters' own TCP.
    pub(crate) starts: Vec<LinkStart>,
    pub(crate) scratch: Vec<u8>,
}

impl Counters {
    /// Counts a request that was posted.
    pub(crate) fn count(&mut self, op: &SendOp) {
        match op {
            SendOp::AtomicWrite { .. } => self.atomic_writes += 1,
            SendOp::Flush(_) => self.flushes += 1,
            _ => {}
        }
    }
}

impl World {
    /// A world without hosts.
    pub fn new(rng: Rng, profile: Profile, trace: Trace) -> Self {
        Self {
            kernel: Kernel::default(),
            hosts: Vec::new(),
            net: Network::new(profile),
            udp: Udp::default(),
            frames: Frames::default(),
            rng,
            trace,
            counters: Counters::default(),
            violation: None,
            strangers: BTreeSet::new(),
            failed_startups: Vec::new(),
            starts: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// The time as adapters take it. It begins late enough that nothing mistakes 0 for "never".
    pub fn time(&self) -> Time {
        Time(1_000_000_000 + self.kernel.now())
    }

    /// Stops the run: something is not as it must be. The first violation counts.
    pub fn violate(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            let what = what();
            let now = self.kernel.now();
            self.trace.line(now, || format!("VIOLATION {what}"));
            self.violation = Some(Violation(what));
        }
    }

    /// Adds a host on machine `machine` that listens at `port`.
    pub fn add_host(&mut self, machine: u8, port: u16, mut config: Config, style: Style) -> usize {
        let ip = IpAddr::V4(Ipv4Addr::new(10, 0, 0, machine + 1));
        config.gid = Gid::from(ip);
        let mut adapter = Adapter::new(config);
        let space = SharedSpace::default();
        let directory = style.directory.then(|| Segment::heap(64 << 8));
        if let Some(directory) = &directory {
            // A fresh writable segment is always accepted.
            let _ = adapter.publish_regions(directory);
        }
        if style.reachable {
            adapter.set_own_memory(Arc::new(Reach::new(space.clone(), space.clone(), false)));
        }
        self.hosts.push(Host {
            adapter,
            address: SocketAddr::new(ip, port),
            alive: true,
            listening: true,
            style,
            space,
            events: VecDeque::new(),
            links: BTreeMap::new(),
            link_peers: BTreeMap::new(),
            directory,
            timer: None,
            parked: false,
            looks_left: 0,
            look_scheduled: false,
            ack_scheduled: false,
            reaching: BTreeSet::new(),
            link_clock: BTreeMap::new(),
            others: Vec::new(),
            sources: BTreeMap::new(),
        });
        self.hosts.len() - 1
    }

    /// Takes an engine out of its sleep, as a call of its program does.
    pub fn wake(&mut self, h: usize) {
        let host = &mut self.hosts[h];
        host.looks_left = host.style.looks;
        if std::mem::take(&mut host.parked) {
            host.adapter.disarm();
        }
    }

    /// Handles an event that is not of the workload.
    pub fn handle(&mut self, event: WorldEvent) {
        match event {
            WorldEvent::Packet { stream, side, packet } => self.packet(stream, side, packet),
            WorldEvent::Retransmit { stream, side, timer } => {
                self.retransmit(stream, side, timer);
            }
            WorldEvent::SynRetry { stream, attempt } => self.syn_retry(stream, attempt),
            WorldEvent::KeepAlive { stream, side } => self.keep_alive(stream, side),
            WorldEvent::Read { stream, side } => self.read(stream, side),
            WorldEvent::Pump { host, conn } => {
                if self.hosts[host].alive {
                    self.pump(host, conn);
                    self.serve(host);
                }
            }
            WorldEvent::Timer { host } => self.timer(host),
            WorldEvent::Acks { host } => {
                self.hosts[host].ack_scheduled = false;
                if self.hosts[host].alive {
                    self.hosts[host].adapter.release_acks();
                    self.serve(host);
                }
            }
            WorldEvent::Look { host } => {
                self.hosts[host].look_scheduled = false;
                self.serve(host);
            }
            WorldEvent::ReachedSelf { host, conn } => {
                if self.hosts[host].alive && self.hosts[host].reaching.remove(&conn) {
                    let now = self.time();
                    self.hosts[host].adapter.handle_reached_self(now, conn);
                    self.serve(host);
                }
            }
            WorldEvent::ReachedLink { host, conn, peer } => self.reached_link(host, conn, peer),
            WorldEvent::Linked { host, from, message } => self.linked(host, from, message),
            WorldEvent::StartupLate { stream, side } => self.startup_late(stream, side),
            WorldEvent::LinkLate { link, side } => self.link_late(link, side),
            WorldEvent::Datagram { host, arrival, bytes } => self.datagram(host, &arrival, &bytes),
            WorldEvent::Frame { host, bytes } => self.frame(host, &bytes),
            WorldEvent::Frames { host } => self.joined_frames(host),
            WorldEvent::SocketRoom { host, from } => self.socket_room(host, from),
            WorldEvent::Bell { host } => {
                self.counters.bells += 1;
                self.wake(host);
                self.serve(host);
            }
            WorldEvent::Listen { host } => self.hosts[host].listening = self.hosts[host].alive,
            WorldEvent::LinkDown { host, peer } => self.link_down(host, peer),
            WorldEvent::Load(_) => {}
        }
    }

    /// Serves an adapter until it has nothing more to do now, as an engine's loop does.
    pub fn serve(&mut self, h: usize) {
        if !self.hosts[h].alive {
            return;
        }
        if self.hosts[h].parked {
            self.wake(h);
        }
        for round in 0.. {
            let mut busy = false;
            while let Some(action) = self.hosts[h].adapter.poll_action() {
                busy = true;
                self.act(h, action);
            }
            while let Some(conn) = self.hosts[h].adapter.next_transmit() {
                busy = true;
                self.transmit(h, conn);
            }
            busy |= self.transmit_datagrams(h);
            busy |= self.transmit_frames(h);
            let now = self.time();
            let host = &mut self.hosts[h];
            busy |= host.adapter.progress(now);
            while let Some(event) = host.adapter.poll_event() {
                host.events.push_back(event);
            }
            if !busy && self.rest(h) {
                break;
            }
            if round == 100_000 {
                self.violate(|| format!("host {h} is never done at one point in time"));
                break;
            }
        }
        if self.hosts[h].adapter.owes_acks() {
            self.schedule_acks(h);
        }
        self.schedule_timer(h);
    }

    /// Nothing is to be done now: has the host look again later, or sleep. `false`: there is more.
    fn rest(&mut self, h: usize) -> bool {
        let host = &mut self.hosts[h];
        if host.links.is_empty() {
            return true;
        }
        if host.looks_left > 0 {
            if !host.look_scheduled {
                host.looks_left -= 1;
                host.look_scheduled = true;
                let after = host.style.look_ns;
                self.kernel.after(after, WorldEvent::Look { host: h });
            }
            return true;
        }
        if host.adapter.arm() {
            host.parked = true;
            return true;
        }
        host.adapter.disarm();
        false
    }

    fn schedule_timer(&mut self, h: usize) {
        let Some(Time(at)) = self.hosts[h].adapter.poll_timeout() else { return };
        let at = at.saturating_sub(1_000_000_000);
        let late = self.rng.below(self.hosts[h].style.late_ns + 1);
        let host = &mut self.hosts[h];
        if host.timer.is_none_or(|set| set > at + late) {
            host.timer = Some(at + late);
            self.kernel.at(at + late, WorldEvent::Timer { host: h });
        }
    }

    fn timer(&mut self, h: usize) {
        let now = self.time();
        let host = &mut self.hosts[h];
        if host.timer.is_some_and(|at| at <= now.0 - 1_000_000_000) {
            host.timer = None;
        }
        if !host.alive {
            return;
        }
        if host.adapter.poll_timeout().is_some_and(|at| at <= now) {
            host.adapter.handle_timeout(now);
            self.check_deadline(h);
            self.serve(h);
            self.check_deadline(h);
        } else {
            self.schedule_timer(h);
        }
    }

    /// After the timeouts are handled the next deadline lies ahead, or the engine would spin.
    fn check_deadline(&mut self, h: usize) {
        let (now, next) = (self.time(), self.hosts[h].adapter.poll_timeout());
        if next.is_some_and(|next| next <= now) {
            self.violate(|| {
                format!("host {h}: the next deadline {next:?} is not after {now:?}: it would spin")
            });
        }
    }

    /// Has acknowledgements released a little later.
    pub fn schedule_acks(&mut self, h: usize) {
        let host = &mut self.hosts[h];
        if !std::mem::replace(&mut host.ack_scheduled, true) {
            let after = host.style.ack_ns;
            self.kernel.after(after, WorldEvent::Acks { host: h });
        }
    }

    fn transmit(&mut self, h: usize, conn: ConnId) {
        let gather = self.hosts[h].style.gather_ns;
        if gather > 0 && !self.hosts[h].adapter.is_urgent(conn) {
            self.kernel.after(gather, WorldEvent::Pump { host: h, conn });
        } else {
            self.pump(h, conn);
        }
    }

    fn act(&mut self, h: usize, action: Action) {
        let now = self.kernel.now();
        self.trace.line(now, || format!("host {h}: {action:?}"));
        match action {
            Action::Connect { conn, peer, sgid_index } => {
                self.trace.note(&[1, h as u64, conn.0]);
                self.hosts[h].note_source(conn, sgid_index);
                self.connect(h, conn, peer);
            }
            Action::LimitSilence { conn, user_timeout_ns } => {
                self.trace.note(&[8, h as u64, conn.0, user_timeout_ns.unwrap_or(0)]);
                self.limit_silence(h, conn, user_timeout_ns);
            }
            Action::Close { conn } => {
                self.trace.note(&[2, h as u64, conn.0]);
                let stranger = self.strangers.remove(&(h, conn));
                let reaching = self.hosts[h].reaching.remove(&conn);
                if stranger || (reaching && self.net.find(h, conn).is_none()) {
                    let now = self.time();
                    self.hosts[h].adapter.handle_lost(now, conn, Loss::Closed);
                } else {
                    self.close(h, conn);
                }
            }
            Action::LinkSend { link, message } => {
                let Some(&peer) = self.hosts[h].link_peers.get(&link) else { return };
                let delay = 500 + self.rng.below(20_000);
                let clock = self.hosts[h].link_clock.entry(peer).or_default();
                *clock = (*clock).max(now + delay);
                let at = *clock;
                let mut bytes = Vec::new();
                message.encode(&mut bytes);
                self.trace.note(&[3, h as u64, bytes.len() as u64]);
                let Some(message) = LinkMessage::decode(&bytes) else {
                    return self.violate(|| format!("{message:?} cannot be decoded"));
                };
                self.kernel.at(at, WorldEvent::Linked { host: peer, from: h, message });
            }
            // Nobody here stops in the middle of an access.
            Action::Cut { .. } => self.violate(|| format!("host {h} cuts a link")),
            Action::RingBell { link } => {
                let Some(&peer) = self.hosts[h].link_peers.get(&link) else { return };
                self.trace.note(&[4, h as u64]);
                let delay = 200 + self.rng.below(5_000);
                self.kernel.after(delay, WorldEvent::Bell { host: peer });
            }
        }
    }

    fn connect(&mut self, h: usize, conn: ConnId, peer: SocketAddr) {
        self.hosts[h].reaching.insert(conn);
        let own = self.hosts[h].address;
        let target = self.host_at(peer);
        if target == Some(h) {
            let delay = self.rng.below(2_000);
            return self.kernel.after(delay, WorldEvent::ReachedSelf { host: h, conn });
        }
        if let Some(peer) = target
            && own.ip() == self.hosts[peer].address.ip()
            && self.hosts[peer].alive
            && self.hosts[peer].listening
        {
            self.ensure_link(h, peer);
            let delay = 1_000 + self.rng.below(50_000);
            return self.kernel.after(delay, WorldEvent::ReachedLink { host: h, conn, peer });
        }
        self.open(h, conn, target);
    }

    /// Whether the adapter still waits for the answer to `Connect`; from now on it does not.
    pub(crate) fn answer_connect(&mut self, h: usize, conn: ConnId) -> bool {
        self.hosts[h].reaching.remove(&conn)
    }

    /// Ends an engine: with `silent` the whole machine goes and says nothing, otherwise the kernel that
    /// outlives the process resets its streams.
    pub fn kill(&mut self, h: usize, silent: bool) {
        self.trace.note(&[5, h as u64, u64::from(silent)]);
        self.trace.line(self.kernel.now(), || format!("host {h} dies, silent: {silent}"));
        self.counters.killed += 1;
        self.hosts[h].alive = false;
        self.hosts[h].listening = false;
        self.hosts[h].space.lock().unwrap_or_else(std::sync::PoisonError::into_inner).end();
        let peers: Vec<usize> = self.hosts[h].links.keys().copied().collect();
        for peer in peers {
            let delay = 1_000 + self.rng.below(2_000_000);
            self.kernel.after(delay, WorldEvent::LinkDown { host: peer, peer: h });
        }
        self.net_host_died(h, silent);
    }
}
