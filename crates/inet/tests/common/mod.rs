//! Two connections in simulated time, over a link that loses, reorders, repeats and delays by a seed.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeMap;
use std::ops::Range;

use quipu_inet::tcp::{
    Config, Connection, Event, Flow, Listener, MILLISECOND, Mode, Opening, Report, Secret, Segment,
    State, reset_for,
};
use quipu_wire::tcp::{Flags, MAX_LEN, MIN_LEN, Repr, SeqNumber};
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// What the link does, for each packet; chances are of a thousand.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub lose: u64,
    pub repeat: u64,
    /// Delayed by up to [`Faults::jitter`] more, so that others overtake it.
    pub reorder: u64,
    pub jitter: u64,
    /// And by so much at least.
    pub late: u64,
    /// Marked CE, if it may be.
    pub mark: u64,
}

#[derive(Clone, Debug)]
pub struct Packet {
    pub to: usize,
    pub bytes: Vec<u8>,
    pub ect: bool,
    pub marked: bool,
    /// It is no segment but a report: the one that began with this number was too long for so many octets.
    pub report: Option<(SeqNumber, u16)>,
}

/// One end, with the application behind it.
pub struct End {
    pub connection: Option<Connection>,
    pub mode: Mode,
    pub events: Vec<Event>,
    /// What was placed, by offset.
    pub received: Vec<u8>,
    pub contiguous: u64,
    /// Ends of messages, or of pushes.
    pub pushes: Vec<u64>,
    /// Room that is posted anew after each delivery; none: the test posts itself.
    pub room: Option<u64>,
    pub acked: u64,
    /// In message mode: receives that are posted, each of so many octets. A message takes one.
    pub posted: Option<(u64, u64)>,
    /// What this end sends begins here in its pseudo-random stream.
    salt: u64,
    /// The last header that went out.
    pub last: Option<Repr>,
    /// Offsets and lengths of the segments that went out.
    pub segments: Vec<Range<u64>>,
}

pub struct Pair {
    pub now: u64,
    pub ends: [End; 2],
    pub listener: Listener,
    pub link: BTreeMap<(u64, u64), Packet>,
    /// One way.
    pub delay: u64,
    /// Octets per second; zero is no limit.
    pub rate: u64,
    /// Packets arrive together, at multiples of it: hosts are woken late.
    pub grain: u64,
    /// The most packets in the queue before the rate.
    pub queue: u64,
    pub faults: Faults,
    /// The longest payload, with options, that the link takes.
    pub mtu: usize,
    /// What is longer is reported, not only dropped.
    pub reports: bool,
    /// The most octets that the link cuts into segments itself; zero: it cuts none.
    pub join: u64,
    pub packets: u64,
    pub dropped: u64,
    /// A packet of its own fate: by its number in the run.
    pub drop_numbers: Vec<u64>,
    free_at: [u64; 2],
    rng: Pcg64Mcg,
    pub trace: bool,
}

pub fn octet(salt: u64, offset: u64) -> u8 {
    let mixed = (offset ^ salt.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

pub fn flow(end: usize) -> Flow {
    let address = |end: usize| ([10, 0, 0, end as u8 + 1], [40_000, 80][end]).into();
    Flow { local: address(end), remote: address(1 - end) }
}

pub fn secret(end: usize) -> Secret {
    Secret([7 + end as u64, 11])
}

/// What a link makes of segments that were joined for it: PSH and FIN belong to the last.
fn cut(joined: Segment, size: Option<u16>, max: u64) -> Vec<Segment> {
    let Some(size) = size else { return vec![joined] };
    let Segment { header, payload, ect } = joined;
    assert!(payload.end - payload.start <= max, "{payload:?}");
    let starts = payload.clone().step_by(usize::from(size));
    let segments = starts.map(|start| {
        let end = payload.end.min(start + u64::from(size));
        let last = end == payload.end;
        let ends = Flags::PSH | Flags::FIN;
        let bits = if last { header.flags.bits() } else { header.flags.bits() & !ends.bits() };
        let seq = header.seq + (start - payload.start) as u32;
        let header = Repr { seq, flags: Flags::from_bits(bits), ..header };
        Segment { header, payload: start..end, ect }
    });
    segments.collect()
}

impl End {
    fn new(mode: Mode, salt: u64) -> Self {
        Self {
            connection: None,
            mode,
            events: Vec::new(),
            received: Vec::new(),
            contiguous: 0,
            pushes: Vec::new(),
            room: Some(1 << 20),
            acked: 0,
            posted: None,
            salt,
            last: None,
            segments: Vec::new(),
        }
    }

    pub fn connection(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("the connection is there")
    }

    fn place(&mut self, offset: u64, payload: &[u8]) {
        let (from, to) = (offset as usize, offset as usize + payload.len());
        if self.received.len() < to {
            self.received.resize(to, 0);
        }
        self.received[from..to].copy_from_slice(payload);
    }

    /// What a segment has brought, placed as an adapter would.
    pub fn take(&mut self, now: u64, repr: &Repr, payload: &[u8], marked: bool) {
        let room = self.room;
        let received = self.connection().handle_segment(now, repr, payload, marked);
        if let Some(placement) = &received.placement {
            self.place(placement.offset, &payload[placement.payload.clone()]);
        }
        if self.mode == Mode::Message {
            if let Some(placement) = &received.placement {
                let end = placement.offset + placement.payload.len() as u64;
                if received.push {
                    self.pushes.push(end);
                }
            }
            if received.push {
                self.consume();
            }
            self.take_held();
        } else if received.push {
            self.pushes.push(received.contiguous);
        }
        assert!(received.contiguous >= self.contiguous, "a stream goes forward");
        self.contiguous = received.contiguous;
        if let Some(room) = room {
            self.connection().set_receive_space(room);
        }
        self.poll_events();
    }

    /// A message is complete: its receive is used up.
    fn consume(&mut self) {
        if let Some((count, size)) = &mut self.posted {
            *count = count.checked_sub(1).expect("a receive for each message");
            let room = *count * *size;
            self.connection().set_receive_space(room);
        }
    }

    /// What has waited for a gap to close, as far as there are receives.
    fn take_held(&mut self) {
        while self.posted.is_none_or(|(count, _)| count > 0) {
            let Some(held) = self.connection().poll_held() else { break };
            self.place(held.offset, &held.payload);
            if held.end_of_message {
                self.pushes.push(held.offset + held.payload.len() as u64);
                self.consume();
            }
        }
    }

    /// Posts receives.
    pub fn post(&mut self, more: u64) {
        let (count, size) = self.posted.expect("receives are counted");
        self.posted = Some((count + more, size));
        self.take_held();
        let (count, size) = self.posted.expect("receives are counted");
        self.connection().set_receive_space(count * size);
    }

    pub fn poll_events(&mut self) {
        while let Some(event) = self.connection().poll_event() {
            if let Event::Acked(offset) = event {
                assert!(offset > self.acked);
                self.acked = offset;
            } else {
                self.events.push(event);
            }
        }
    }
}

impl Pair {
    /// A client that has begun to connect to a listener.
    pub fn new(config: Config, seed: u64) -> Self {
        Self::with([config, config], seed)
    }

    pub fn with(configs: [Config; 2], seed: u64) -> Self {
        println!("seed {seed}");
        let now = 1_000 * MILLISECOND;
        let mut ends = [End::new(configs[0].mode, seed), End::new(configs[1].mode, !seed)];
        let mut client = Connection::connect(now, configs[0], secret(0), &flow(0));
        client.set_receive_space(1 << 20);
        ends[0].connection = Some(client);
        Self {
            now,
            ends,
            listener: Listener::new(configs[1], secret(1), 16),
            link: BTreeMap::new(),
            delay: 5 * MILLISECOND,
            rate: 0,
            grain: 1,
            queue: u64::MAX,
            faults: Faults::default(),
            mtu: usize::MAX,
            reports: false,
            join: 0,
            packets: 0,
            dropped: 0,
            drop_numbers: Vec::new(),
            free_at: [0; 2],
            rng: Pcg64Mcg::seed_from_u64(seed),
            trace: std::env::var_os("TRACE").is_some(),
        }
    }

    pub fn chance(&mut self, of_a_thousand: u64) -> bool {
        self.rng.next_u64() % 1000 < of_a_thousand
    }

    /// Everything that an end has to send goes to the link.
    pub fn flush(&mut self, from: usize) {
        while let Some(connection) = &mut self.ends[from].connection {
            let Some((joined, size)) = connection.poll_transmit_joined(self.now, self.join) else {
                break;
            };
            for segment in cut(joined, size, self.join) {
                self.transmit(from, &segment);
            }
        }
    }

    pub fn transmit(&mut self, from: usize, segment: &Segment) {
        if self.trace {
            println!("{:>12} {from}> {segment:?}", self.now / 1000);
        }
        let end = &mut self.ends[from];
        end.last = Some(segment.header);
        if !segment.payload.is_empty() {
            end.segments.push(segment.payload.clone());
        }
        let mut bytes = vec![0; MAX_LEN];
        let len = segment.header.emit(&mut bytes);
        bytes.truncate(len);
        bytes.extend(segment.payload.clone().map(|offset| octet(end.salt, offset)));
        if bytes.len() - MIN_LEN > self.mtu {
            self.dropped += 1;
            if self.reports {
                let report = Some((segment.header.seq, self.mtu as u16));
                let packet =
                    Packet { to: from, bytes: Vec::new(), ect: false, marked: false, report };
                self.carry(packet);
            }
            return;
        }
        let to = 1 - from;
        self.carry(Packet { to, bytes, ect: segment.ect, marked: false, report: None });
    }

    fn carry(&mut self, mut packet: Packet) {
        self.packets += 1;
        if self.drop_numbers.contains(&self.packets) || self.chance(self.faults.lose) {
            self.dropped += 1;
            return;
        }
        packet.marked = packet.ect && self.chance(self.faults.mark);
        let mut at = self.now;
        if let Some(takes) = (packet.bytes.len() as u64 * 1_000_000_000).checked_div(self.rate) {
            let free = &mut self.free_at[packet.to];
            if free.saturating_sub(self.now) / takes.max(1) >= self.queue {
                self.dropped += 1;
                return;
            }
            *free = (*free).max(self.now) + takes;
            at = *free;
        }
        at += self.delay;
        if self.chance(self.faults.reorder) {
            at += self.faults.late + self.rng.next_u64() % self.faults.jitter.max(1);
        }
        at = at.next_multiple_of(self.grain);
        if self.chance(self.faults.repeat) {
            let later = at + self.rng.next_u64() % self.faults.jitter.max(1);
            self.link.insert((later, self.packets << 1), packet.clone());
        }
        self.link.insert((at, self.packets << 1 | 1), packet);
    }

    fn arrive(&mut self, packet: &Packet) {
        if let Some((seq, mss)) = packet.report {
            if let Some(connection) = &mut self.ends[packet.to].connection {
                connection.handle_report(self.now, seq, Report::TooBig { mss });
            }
            return;
        }
        let (repr, len) = Repr::parse(&packet.bytes).expect("we send legal headers");
        let payload = &packet.bytes[len..];
        let end = &mut self.ends[packet.to];
        if end.connection.as_ref().is_some_and(|it| it.state() == State::Closed) {
            // What a stack does that has forgotten the connection.
            if let Some(header) = reset_for(&repr, payload.len()) {
                self.transmit(packet.to, &Segment { header, payload: 0..0, ect: false });
            }
            return;
        }
        if end.connection.is_some() {
            end.take(self.now, &repr, payload, packet.marked);
            return;
        }
        let room = end.room;
        let opening = self.listener.handle_segment(self.now, &flow(1), &repr, payload.len(), true);
        match opening {
            Opening::HalfOpen(mut connection) => {
                connection.set_receive_space(room.unwrap_or(0));
                self.ends[1].connection = Some(*connection);
            }
            Opening::Open(mut connection) => {
                connection.set_receive_space(room.unwrap_or(0));
                self.ends[1].connection = Some(*connection);
                self.ends[1].take(self.now, &repr, payload, false);
            }
            Opening::Reply(header) => {
                self.transmit(1, &Segment { header, payload: 0..0, ect: false });
            }
            Opening::Early | Opening::Ignored => {}
        }
    }

    /// When something happens next.
    pub fn next(&self) -> Option<u64> {
        let arrival = self.link.keys().next().map(|(at, _)| *at);
        let timeouts = self.ends.iter().filter_map(|end| end.connection.as_ref()?.poll_timeout());
        timeouts.chain(arrival).min()
    }

    /// One instant; false if nothing will ever happen.
    pub fn step(&mut self) -> bool {
        for end in 0..2 {
            self.flush(end);
        }
        let Some(next) = self.next() else { return false };
        assert!(
            next > self.now
                || self.link.keys().next().is_some_and(|(at, _)| *at <= next)
                || next == self.now,
            "time goes forward"
        );
        self.now = self.now.max(next);
        while let Some(entry) = self.link.first_entry() {
            if entry.key().0 > self.now {
                break;
            }
            let packet = entry.remove();
            self.arrive(&packet);
        }
        for end in 0..2 {
            if let Some(connection) = &mut self.ends[end].connection {
                connection.handle_timeout(self.now);
                self.ends[end].poll_events();
            }
            self.flush(end);
        }
        // A deadline that is over would make its caller spin.
        for end in &self.ends {
            let deadline = end.connection.as_ref().and_then(Connection::poll_timeout);
            assert!(deadline.is_none_or(|at| at > self.now), "a stale deadline");
        }
        true
    }

    /// Runs until `done`, for at most `limit` of simulated time; false if it never is.
    pub fn run_until(&mut self, limit: u64, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let end = self.now + limit;
        while !done(self) {
            if self.now > end || !self.step() {
                return done(self);
            }
        }
        true
    }

    /// Until both stand.
    pub fn connect(&mut self) {
        let both = self.run_until(400_000 * MILLISECOND, |pair| {
            pair.ends.iter().all(|end| end.events.contains(&Event::Connected))
        });
        assert!(both, "connected");
    }

    pub fn send(&mut self, from: usize, len: u64) {
        self.ends[from].connection().send(len, true).expect("open for sending");
    }

    /// What end `to` has received is what the other has sent.
    pub fn check(&self, to: usize, len: u64) {
        let end = &self.ends[to];
        assert_eq!(end.contiguous, len, "all of the stream");
        let salt = self.ends[1 - to].salt;
        for (offset, octet_here) in end.received.iter().enumerate().take(len as usize) {
            assert_eq!(*octet_here, octet(salt, offset as u64), "octet {offset}");
        }
    }
}
