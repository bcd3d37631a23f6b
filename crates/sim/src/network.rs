//! Simulated TCP connections between hosts, on links that lose, delay, double, reorder and damage
//! packets.

mod flow;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use quipu_nic::{ConnId, Loss, QpId};

use crate::flow::{Flow, FlowConfig, Segment};
use crate::startup::Startup;
use crate::world::{World, WorldEvent};

/// What a link does to packets, in each direction.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// Picoseconds that a byte takes.
    pub byte_ps: u64,
    /// Nanoseconds on the way, and how many more at most.
    pub delay_ns: u64,
    pub jitter_ns: u64,
    /// Packets lost, doubled, held back and damaged, in a million.
    pub loss_ppm: u32,
    pub duplicate_ppm: u32,
    pub reorder_ppm: u32,
    pub corrupt_ppm: u32,
    /// The sizes of TCP.
    pub flow: FlowConfig,
    /// How long a program takes to read what has arrived, at most, and bytes that it reads at once.
    pub read_ns: u64,
    pub read_bytes: usize,
    /// Gives up connecting after this.
    pub connect_timeout_ns: u64,
}

/// What travels.
#[derive(Clone, Debug)]
pub enum Packet {
    /// Asks for a connection.
    Syn,
    /// Grants it.
    SynAck,
    /// Bytes.
    Data(Segment),
    /// Everything before the first number has arrived; there is room up to the second.
    Ack(u64, u64),
    /// The connection does not exist.
    Reset,
    /// Nobody takes the connection that a SYN asked for.
    Refuse,
    /// Is somebody there?
    Probe,
}

/// How far a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The connection is asked for.
    Opening,
    /// It stands.
    Open,
    /// Neither end has it any more.
    Gone,
}

/// One end of a stream. `flows[side]` of the stream is what it sends.
pub struct End {
    /// The host, or none for an address where nothing is.
    pub host: Option<usize>,
    /// The adapter's name for the stream while the adapter has it.
    pub conn: Option<ConnId>,
    /// Connection management has the end until its start-up is over (plain iWARP).
    pub startup: Option<Box<Startup>>,
    /// The queue pair that the end was given to then.
    pub given: Option<QpId>,
    /// The adapter has asked for the end; what it still transmits is sent before.
    pub closing: bool,
    /// The adapter may have more to transmit than the socket took.
    blocked: bool,
    read_scheduled: bool,
    user_timeout: Option<u64>,
    /// A sign of life of the peer is due at some time.
    watched: bool,
    last_heard: u64,
    /// The end was reset: its socket exists no more.
    dead: bool,
    /// It ended without a reset, or with one that was lost.
    unheard: bool,
}

/// A TCP connection.
pub struct Stream {
    /// The end that connected, then the one that accepted.
    pub ends: [End; 2],
    pub phase: Phase,
    pub flows: [Flow; 2],
    /// When the link is free again, in each direction.
    busy_until: [u64; 2],
    opened_at: u64,
}

impl End {
    /// Whether somebody has this end.
    pub fn is_held(&self) -> bool {
        self.conn.is_some() || self.startup.is_some()
    }
}

impl Stream {
    /// A stream that the first host opens to the second.
    pub fn new(hosts: [usize; 2], config: FlowConfig, now: u64) -> Self {
        Self::between([end(Some(hosts[0]), None, now), end(Some(hosts[1]), None, now)], config, now)
    }

    fn between(ends: [End; 2], config: FlowConfig, now: u64) -> Self {
        Self {
            ends,
            phase: Phase::Opening,
            flows: [Flow::new(config), Flow::new(config)],
            busy_until: [0; 2],
            opened_at: now,
        }
    }
}

/// A time in which two hosts cannot reach each other.
#[derive(Clone, Copy, Debug)]
pub struct Partition {
    /// The hosts; `None`: everybody.
    pub hosts: Option<[usize; 2]>,
    /// From and to, in nanoseconds; to the end of time if for ever.
    pub from: u64,
    pub to: u64,
}

/// All streams of a world.
pub struct Network {
    pub profile: Profile,
    pub partitions: Vec<Partition>,
    pub streams: Vec<Stream>,
    by_conn: BTreeMap<(usize, ConnId), (usize, usize)>,
    /// Machines that vanished without a word.
    silent: Vec<usize>,
    /// Queue pairs, with their hosts, of whose streams a bit was flipped.
    pub damaged: BTreeSet<(usize, QpId)>,
    /// From this time on links only delay, so that what can end does.
    pub calm_from: u64,
    next_port: u16,
}

impl Network {
    /// A network without streams.
    pub fn new(profile: Profile) -> Self {
        Self {
            profile,
            partitions: Vec::new(),
            streams: Vec::new(),
            by_conn: BTreeMap::new(),
            silent: Vec::new(),
            damaged: BTreeSet::new(),
            calm_from: u64::MAX,
            next_port: 32_768,
        }
    }

    /// The stream and side that an adapter knows as `conn`.
    #[must_use]
    pub fn find(&self, host: usize, conn: ConnId) -> Option<(usize, usize)> {
        self.by_conn.get(&(host, conn)).copied()
    }

    /// Whether a queue pair of plain iWARP cannot know that its peer is gone: nobody has told it, and nothing
    /// is on the way to the peer that would bring an answer.
    #[must_use]
    pub fn is_alone(&self, host: usize, qp: QpId) -> bool {
        self.streams.iter().any(|stream| {
            (0..2).any(|side| {
                let (end, peer) = (&stream.ends[side], &stream.ends[1 - side]);
                let has = end.host == Some(host) && end.given == Some(qp) && end.conn.is_some();
                has && peer.dead && peer.unheard && !stream.flows[side].is_waiting()
            })
        })
    }

    /// Streams that an adapter still has.
    #[must_use]
    pub fn held(&self, host: usize) -> usize {
        self.by_conn.keys().filter(|&&(of, _)| of == host).count()
    }

    /// Partitions are over, and machines that vanished are back, without the processes that ran there.
    pub fn heal(&mut self) {
        self.partitions.clear();
        self.silent.clear();
    }

    pub(crate) fn cut(&self, now: u64, a: Option<usize>, b: Option<usize>) -> bool {
        let silent = |h: Option<usize>| h.is_none_or(|h| self.silent.contains(&h));
        if silent(a) || silent(b) {
            return true;
        }
        // What a host sends to itself does not leave it.
        if a == b {
            return false;
        }
        self.partitions.iter().any(|partition| {
            let concerned = partition.hosts.is_none_or(|hosts| {
                a.is_some_and(|a| hosts.contains(&a)) && b.is_some_and(|b| hosts.contains(&b))
            });
            concerned && (partition.from..partition.to).contains(&now)
        })
    }

    /// From now on an adapter has this end of a stream.
    pub fn hold(&mut self, stream: usize, side: usize, h: usize, conn: ConnId) {
        self.streams[stream].ends[side].conn = Some(conn);
        self.by_conn.insert((h, conn), (stream, side));
    }

    fn retransmit_ns(&self, backoff: u32) -> u64 {
        let profile = &self.profile;
        let round_trip = 2 * (profile.delay_ns + profile.jitter_ns)
            + profile.byte_ps * 2 * profile.flow.window as u64 / 1000;
        ((round_trip * 2 + 50_000) << backoff.min(6)).min(200_000_000)
    }
}

fn end(host: Option<usize>, conn: Option<ConnId>, now: u64) -> End {
    End {
        host,
        conn,
        startup: None,
        given: None,
        closing: false,
        blocked: false,
        read_scheduled: false,
        user_timeout: None,
        watched: false,
        last_heard: now,
        dead: false,
        unheard: false,
    }
}

impl World {
    /// Opens a stream for an adapter. `target`: the host at the address, if there is one.
    pub(crate) fn open(&mut self, h: usize, conn: ConnId, target: Option<usize>) {
        let now = self.kernel.now();
        self.counters.streams += 1;
        let config = self.net.profile.flow;
        let stream = self.net.streams.len();
        let ends = [end(Some(h), Some(conn), now), end(target, None, now)];
        self.net.streams.push(Stream::between(ends, config, now));
        self.net.by_conn.insert((h, conn), (stream, 0));
        self.syn_retry(stream, 0);
    }

    pub(crate) fn syn_retry(&mut self, stream: usize, attempt: u32) {
        let now = self.kernel.now();
        let state = &self.net.streams[stream];
        if state.phase != Phase::Opening || !state.ends[0].is_held() {
            return;
        }
        // Connection management has patience of its own.
        let late = now.saturating_sub(state.opened_at) >= self.net.profile.connect_timeout_ns;
        if late && state.ends[0].startup.is_none() {
            return self.lose(stream, 0, Loss::TimedOut);
        }
        self.send(stream, 0, Packet::Syn);
        let after = self.net.retransmit_ns(attempt);
        self.kernel.after(after, WorldEvent::SynRetry { stream, attempt: attempt + 1 });
    }

    /// Puts a packet on the link from `side`.
    pub(crate) fn send(&mut self, stream: usize, side: usize, mut packet: Packet) {
        let now = self.kernel.now();
        let hosts = [0, 1].map(|side| self.net.streams[stream].ends[side].host);
        let profile = self.net.profile;
        let calm = now >= self.net.calm_from;
        let bytes = match &packet {
            Packet::Data(segment) => segment.bytes.len() as u64,
            _ => 0,
        };
        self.counters.segments += u64::from(bytes > 0);
        let (from, to) = (hosts[side], hosts[1 - side]);
        if self.net.cut(now, from, to) || (!calm && self.rng.ppm(profile.loss_ppm)) {
            self.counters.lost += 1;
            self.net.streams[stream].ends[side].unheard |= matches!(packet, Packet::Reset);
            return;
        }
        if !calm
            && self.rng.ppm(profile.corrupt_ppm)
            && let Packet::Data(segment) = &mut packet
            && !segment.bytes.is_empty()
        {
            let at = self.rng.index(segment.bytes.len());
            segment.bytes[at] ^= 1 << self.rng.below(8);
            self.counters.corrupted += 1;
            self.note_damage(stream);
            self.trace.line(now, || format!("stream {stream}: a bit is flipped"));
        }
        let busy = &mut self.net.streams[stream].busy_until[side];
        *busy = (*busy).max(now) + (bytes + 60) * profile.byte_ps / 1000;
        let mut at = *busy + profile.delay_ns;
        if !calm {
            at += self.rng.below(profile.jitter_ns + 1);
            if self.rng.ppm(profile.reorder_ppm) {
                self.counters.reordered += 1;
                at += profile.delay_ns + self.rng.below(200_000);
            }
            if self.rng.ppm(profile.duplicate_ppm) {
                self.counters.duplicated += 1;
                let again = at + self.rng.below(100_000);
                let packet = packet.clone();
                self.kernel.at(again, WorldEvent::Packet { stream, side: 1 - side, packet });
            }
        }
        self.kernel.at(at, WorldEvent::Packet { stream, side: 1 - side, packet });
    }

    /// Whose stream it is that was damaged. At its beginning only who connects is known.
    fn note_damage(&mut self, stream: usize) {
        for end in &self.net.streams[stream].ends {
            let Some(host) = end.host else { continue };
            let startup = end.startup.as_ref().map(|startup| startup.qp);
            let user = end.conn.and_then(|conn| self.hosts[host].adapter.user_of(conn));
            if let Some(qp) = startup.or(end.given).or(user) {
                self.net.damaged.insert((host, qp));
            }
        }
    }

    /// A packet arrives at `side`.
    pub(crate) fn packet(&mut self, stream: usize, side: usize, packet: Packet) {
        let now = self.kernel.now();
        let Some(h) = self.net.streams[stream].ends[side].host else { return };
        if self.net.silent.contains(&h) {
            return;
        }
        self.net.streams[stream].ends[side].last_heard = now;
        if let Packet::Syn = packet {
            return self.accept(stream, h);
        }
        let end = &self.net.streams[stream].ends[side];
        if end.dead || !self.hosts[h].alive {
            if !matches!(packet, Packet::Reset | Packet::Refuse) {
                self.send(stream, side, Packet::Reset);
            }
            return;
        }
        match packet {
            Packet::Syn => {}
            Packet::SynAck => self.connected(stream, h),
            Packet::Data(segment) => {
                if self.net.streams[stream].flows[1 - side].arrive(segment) {
                    self.schedule_read(stream, side);
                }
                self.acknowledge(stream, side);
            }
            Packet::Ack(ack, limit) => {
                let again = self.net.streams[stream].flows[side].acknowledge(now, ack, limit);
                self.counters.retransmitted += u64::from(again);
                self.push_segments(stream, side);
                self.unblock(stream, side);
            }
            // One that was long on its way answers a try before the one that succeeded.
            Packet::Refuse if self.net.streams[stream].phase != Phase::Opening => {}
            Packet::Refuse => self.lose(stream, side, Loss::Refused),
            Packet::Reset => {
                let opening = self.net.streams[stream].phase == Phase::Opening;
                self.lose(stream, side, if opening { Loss::Refused } else { Loss::Closed });
            }
            Packet::Probe => self.acknowledge(stream, side),
        }
    }

    fn acknowledge(&mut self, stream: usize, side: usize) {
        let (ack, limit) = self.net.streams[stream].flows[1 - side].ack();
        self.send(stream, side, Packet::Ack(ack, limit));
    }

    /// Somebody asks host `h` for a connection.
    fn accept(&mut self, stream: usize, h: usize) {
        let state = &self.net.streams[stream];
        if state.phase == Phase::Gone || state.ends[1].dead {
            return self.send(stream, 1, Packet::Refuse);
        }
        if state.ends[1].is_held() || state.ends[1].closing || state.phase == Phase::Open {
            return self.send(stream, 1, Packet::SynAck);
        }
        if !self.hosts[h].alive || !self.hosts[h].listening {
            return self.send(stream, 1, Packet::Refuse);
        }
        let Some(peer) = state.ends[0].host else { return };
        let ip = self.hosts[peer].source_of(state.ends[0].conn);
        self.net.next_port = self.net.next_port.wrapping_add(1).max(32_768);
        let address = SocketAddr::new(ip, self.net.next_port);
        let now = self.time();
        match self.hosts[h].adapter.handle_accepted(now, address) {
            Ok(conn) => {
                self.trace.note(&[6, h as u64, conn.0]);
                self.net.streams[stream].ends[1].conn = Some(conn);
                self.net.by_conn.insert((h, conn), (stream, 1));
                self.send(stream, 1, Packet::SynAck);
            }
            Err(_) => self.send(stream, 1, Packet::Refuse),
        }
        self.serve(h);
    }

    /// The connection that host `h` asked for stands.
    fn connected(&mut self, stream: usize, h: usize) {
        let state = &mut self.net.streams[stream];
        if state.phase != Phase::Opening {
            return;
        }
        state.phase = Phase::Open;
        if self.begin_startup(stream) {
            return;
        }
        let Some(conn) = self.net.streams[stream].ends[0].conn else {
            return self.send(stream, 0, Packet::Reset);
        };
        if self.answer_connect(h, conn) {
            let now = self.time();
            self.hosts[h].adapter.handle_reached_stream(now, conn);
            self.serve(h);
        }
    }

    /// From now on the peer may be silent for `timeout`.
    pub(crate) fn limit_silence(&mut self, h: usize, conn: ConnId, timeout: Option<u64>) {
        let Some((stream, side)) = self.net.find(h, conn) else { return };
        let end = &mut self.net.streams[stream].ends[side];
        end.user_timeout = timeout;
        if let Some(timeout) = timeout
            && !std::mem::replace(&mut end.watched, true)
        {
            end.last_heard = self.kernel.now();
            self.kernel.after(timeout / 3, WorldEvent::KeepAlive { stream, side });
        }
    }

    pub(crate) fn keep_alive(&mut self, stream: usize, side: usize) {
        let now = self.kernel.now();
        let end = &mut self.net.streams[stream].ends[side];
        if end.conn.is_none() || end.dead {
            return;
        }
        let Some(timeout) = end.user_timeout else {
            end.watched = false;
            return;
        };
        let silent = now.saturating_sub(end.last_heard) >= timeout;
        let unacked = self.net.streams[stream].flows[side].waiting_since;
        if silent || unacked.is_some_and(|since| now.saturating_sub(since) >= timeout) {
            self.counters.timed_out += 1;
            return self.lose(stream, side, Loss::TimedOut);
        }
        self.send(stream, side, Packet::Probe);
        self.kernel.after((timeout / 3).max(1000), WorldEvent::KeepAlive { stream, side });
    }

    /// The streams that stand, for people.
    pub fn describe_streams(&self) -> String {
        let mut text = String::new();
        for (index, stream) in self.net.streams.iter().enumerate() {
            if stream.phase == Phase::Gone || !stream.ends.iter().any(End::is_held) {
                continue;
            }
            text += &format!("\n  stream {index} {:?}", stream.phase);
            for (end, flow) in stream.ends.iter().zip(&stream.flows) {
                let End { host, conn, closing, blocked, dead, .. } = end;
                text += &format!(
                    " [host {host:?} {conn:?} closing {closing} blocked {blocked} dead {dead}: {flow:?}]"
                );
            }
        }
        text
    }

    /// An adapter asks for the end of a stream.
    pub(crate) fn close(&mut self, h: usize, conn: ConnId) {
        let Some((stream, side)) = self.net.find(h, conn) else { return };
        self.net.streams[stream].ends[side].closing = true;
        if self.net.streams[stream].phase == Phase::Opening && side == 0 {
            self.net.streams[stream].phase = Phase::Gone;
            return self.lose(stream, 0, Loss::Closed);
        }
        self.pump(h, conn);
    }

    /// Ends this side of a stream once everything that its adapter had to say is in the socket. The
    /// socket stays until the peer has it all, as a host must see to for last words to be heard.
    fn finish_closing(&mut self, stream: usize, side: usize) {
        let end = &self.net.streams[stream].ends[side];
        if !end.closing || end.blocked {
            return;
        }
        let (Some(h), Some(conn)) = (end.host, end.conn) else { return };
        self.net.streams[stream].flows[side].finish();
        self.push_segments(stream, side);
        self.release(stream, side);
        self.schedule_read(stream, side);
        let now = self.time();
        self.hosts[h].adapter.handle_lost(now, conn, Loss::Closed);
    }

    /// The adapter no longer has this end.
    fn release(&mut self, stream: usize, side: usize) {
        let end = &mut self.net.streams[stream].ends[side];
        if let (Some(h), Some(conn)) = (end.host, end.conn.take()) {
            self.net.by_conn.remove(&(h, conn));
        }
        let ends = &self.net.streams[stream].ends;
        if !ends[0].is_held() && !ends[1].is_held() && self.net.streams[stream].phase == Phase::Open
        {
            self.net.streams[stream].phase = Phase::Gone;
        }
    }

    /// An end of a stream is lost: its adapter is told, and its socket exists no more, except that what
    /// it has still to say after the peer's end is said.
    pub(crate) fn lose(&mut self, stream: usize, side: usize, loss: Loss) {
        let now = self.kernel.now();
        self.trace.line(now, || format!("stream {stream} side {side}: {loss}"));
        let graceful = loss == Loss::Closed && self.net.streams[stream].flows[1 - side].at_end();
        let end = &mut self.net.streams[stream].ends[side];
        if graceful {
            self.net.streams[stream].flows[side].finish();
        } else {
            end.dead = true;
        }
        self.startup_lost(stream, side);
        let end = &self.net.streams[stream].ends[side];
        let Some((h, conn)) = end.host.zip(end.conn) else { return };
        self.release(stream, side);
        if graceful {
            self.push_segments(stream, side);
        }
        if !self.hosts[h].alive {
            return;
        }
        self.answer_connect(h, conn);
        let now = self.time();
        self.trace.note(&[9, h as u64, conn.0, loss as u64]);
        self.hosts[h].adapter.handle_lost(now, conn, loss);
        self.serve(h);
    }

    /// The streams of a host that died.
    pub(crate) fn net_host_died(&mut self, h: usize, silent: bool) {
        if silent {
            self.net.silent.push(h);
        }
        for stream in 0..self.net.streams.len() {
            for side in 0..2 {
                let end = &mut self.net.streams[stream].ends[side];
                if end.host != Some(h) || end.dead {
                    continue;
                }
                end.dead = true;
                let had = end.is_held();
                end.startup = None;
                end.unheard = silent || !had;
                self.release(stream, side);
                if had && !silent {
                    self.send(stream, side, Packet::Reset);
                }
            }
        }
    }
}

/// An address where nobody is.
#[must_use]
pub fn nowhere() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 99, 99, 99)), 9)
}
