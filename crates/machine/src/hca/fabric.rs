//! Two hosts and the events that connect them.

use std::fmt::Write;

use quipu_events::Kernel;
use quipu_qos::{Arbiter, Config, PACKET_OVERHEAD};

use super::host::{Host, RECEIVE, SEND, Transfer, Work};
use super::protocol::Protocols;
use super::stream::{Packet, Source, Stream};
use super::{HcaReport, StreamRate};
use crate::error::RunError;
use crate::plan::{Clock, HcaPlan, Plan, Rate, StreamPlan};
use crate::rng::Rng;

/// Something that happens.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A window or the buffers of a stream can be filled.
    Fill(u16),
    /// A buffer of a stream is free again.
    Freed(u16),
    /// A transfer of a host is done.
    Transferred(usize, usize),
    /// The link of a host has sent a packet.
    Sent(usize),
    /// A packet is at a host.
    Arrive(usize, Packet),
    /// A host may send one packet more of a lane.
    Credit(usize, u8),
    /// A core of a host has done its part of a copy and needs the bus.
    Copying(usize, usize),
    /// A copy is done.
    Copied(usize, usize),
}

/// Two hosts on a link.
pub(super) struct Fabric {
    kernel: Kernel<Event>,
    hosts: [Host; 2],
    streams: Vec<Stream>,
    plan: HcaPlan,
    clock: Clock,
    link: Rate,
    delay: u64,
    mtu: u64,
    rng: Rng,
    /// When the sample began.
    begun: u64,
    hash: u64,
}

/// The tables of a plan as a configuration of a port.
pub(crate) fn tables(plan: &HcaPlan) -> Result<Config, String> {
    let list = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(",");
    let mut text = format!("strict = {}\nmax_vls = {}\n", plan.strict, plan.max_vls);
    let _ = writeln!(text, "high_limit = {}", plan.high_limit);
    for (key, value) in
        [("vlarb_high", &plan.vlarb_high), ("vlarb_low", &plan.vlarb_low), ("sl2vl", &plan.sl2vl)]
    {
        // Quotes and the like are errors of the value, which the port's own reader finds.
        let value = toml::Value::from(list(value));
        let _ = writeln!(text, "{key} = {value}");
    }
    Config::parse(&text, "hca").map(|(config, _)| config).map_err(|error| error.what)
}

/// A time that differs by up to a quarter: without that, streams fall into step with each other.
fn vary(rng: &mut Rng, ps: u64) -> u64 {
    ps - ps / 4 + rng.below(ps / 2 + 1)
}

impl Fabric {
    pub(super) fn new(plan: &Plan) -> Result<Self, RunError> {
        let hca = plan.hca.clone().unwrap_or_default();
        let config = tables(&hca).map_err(RunError::Costs)?;
        let arbiter = Arbiter::new(&config.high, &config.low, config.high_limit, !config.strict);
        let cores = plan.cpu.cores as usize;
        let host = || Host::new(arbiter.clone(), hca.dma_slots, hca.buffers, cores);
        let mut fabric = Self {
            kernel: Kernel::default(),
            hosts: [host(), host()],
            streams: Vec::new(),
            clock: plan.cpu.clock,
            link: plan.link.rate,
            delay: plan.link.delay.0,
            mtu: plan.link.mtu.into(),
            rng: Rng::new(plan.seed, 1),
            begun: 0,
            hash: 0xcbf2_9ce4_8422_2325,
            plan: hca.clone(),
        };
        let protocols = Protocols::new(&plan.costs)?;
        let mut core = 0;
        for stream in &hca.streams {
            for _ in 0..stream.count {
                let lane = config.lane_of(stream.sl).unwrap_or(0);
                fabric.add(stream, lane, core % cores, &protocols);
                core += 1;
            }
        }
        Ok(fabric)
    }

    /// Adds a stream, and its way back, on a core of each host.
    fn add(&mut self, plan: &StreamPlan, lane: u8, core: usize, protocols: &Protocols) {
        let source = match protocols.copied(plan.kind) {
            Some(costs) => Source::Buffers(costs),
            None => Source::Memory(protocols.mpi),
        };
        for from in 0..1 + usize::from(plan.both_ways) {
            let number = self.streams.len() as u16;
            self.streams.push(Stream {
                kind: plan.kind,
                sl: plan.sl,
                lane,
                from,
                source,
                partner: plan.both_ways.then_some(if from == 0 { number + 1 } else { number - 1 }),
                cores: [core, core],
                backlog: 0,
                under_way: 0,
                missing: 0,
                windows: 0,
                waits: false,
                delivered: 0,
                worked: [0; 2],
            });
            // Programs do not begin at the same time.
            self.kernel.at(core as u64 * 1_000_000, Event::Fill(number));
        }
    }

    /// Carries out all events until `end`.
    pub(super) fn run_until(&mut self, end: u64, limit: u64) -> Result<(), RunError> {
        while self.kernel.next_at().is_some_and(|at| at <= end) {
            if self.kernel.scheduled() > limit {
                return Err(RunError::TooManyEvents(limit));
            }
            let Some(event) = self.kernel.next() else { break };
            let now = self.kernel.now();
            self.hash = (self.hash ^ now).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17);
            self.handle(event);
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Fill(stream) => self.fill(stream),
            Event::Freed(stream) => {
                self.streams[usize::from(stream)].under_way -= 1;
                self.fill(stream);
            }
            Event::Transferred(host, way) => self.transferred(host, way),
            Event::Sent(host) => {
                self.hosts[host].sends = false;
                if let Some(transfer) = self.hosts[host].transfers[SEND].pop_front() {
                    self.kernel.after(self.delay, Event::Arrive(1 - host, transfer.packet));
                }
                self.send(host);
                self.use_slots(host);
            }
            Event::Arrive(host, packet) => {
                self.hosts[host].transfers[RECEIVE].push_back(Transfer::new(packet));
                self.use_slots(host);
            }
            Event::Credit(host, lane) => {
                self.hosts[host].credits[usize::from(lane)] += 1;
                self.use_slots(host);
            }
            Event::Copying(host, core) => self.copying(host, core),
            Event::Copied(host, core) => self.copied(host, core),
        }
    }

    /// The program posts its next messages, or copies into free buffers.
    fn fill(&mut self, number: u16) {
        let stream = &mut self.streams[usize::from(number)];
        let (host, core) = (stream.from, stream.cores[0]);
        match stream.source {
            Source::Memory(costs) => {
                stream.backlog += costs.window;
                stream.missing += costs.window;
                self.use_slots(host);
            }
            Source::Buffers(costs) => {
                let free = costs.buffers.saturating_sub(stream.under_way);
                stream.under_way = costs.buffers;
                for _ in 0..free {
                    self.copy(host, core, number, true, costs.buffer, true);
                }
            }
        }
    }

    /// Gives a core a packet or a buffer to copy, in pieces.
    fn copy(&mut self, host: usize, core: usize, stream: u16, sends: bool, bytes: u64, last: bool) {
        let Source::Buffers(costs) = self.streams[usize::from(stream)].source else { return };
        let mut left = bytes;
        while left > 0 {
            let bytes = left.min(costs.copy_unit);
            left -= bytes;
            let work = Work { stream, sends, bytes, last: last && left == 0 };
            self.hosts[host].cores[core].queue.push_back(work);
        }
        self.work(host, core);
    }

    /// A core begins its next piece, if it has none.
    fn work(&mut self, host: usize, core: usize) {
        let now = self.kernel.now();
        let state = &mut self.hosts[host].cores[core];
        if state.current.is_some() {
            return;
        }
        let Some(work) = state.queue.pop_front() else { return };
        state.current = Some((work, now));
        let Source::Buffers(costs) = self.streams[usize::from(work.stream)].source else { return };
        let each = if work.last { costs.cycles_per_buffer } else { 0 };
        let cycles = work.bytes * costs.cycles_per_kb / 1024 + each;
        self.kernel.after(self.clock.ps(cycles), Event::Copying(host, core));
    }

    fn copying(&mut self, host: usize, core: usize) {
        let Some((work, _)) = self.hosts[host].cores[core].current else { return };
        let Source::Buffers(costs) = self.streams[usize::from(work.stream)].source else { return };
        let ps = self.plan.bus.ps(work.bytes * costs.bus_percent / 100);
        let done = self.hosts[host].bus.take(self.kernel.now(), vary(&mut self.rng, ps));
        self.kernel.at(done, Event::Copied(host, core));
    }

    fn copied(&mut self, host: usize, core: usize) {
        let now = self.kernel.now();
        let Some((work, since)) = self.hosts[host].cores[core].current.take() else { return };
        let stream = &mut self.streams[usize::from(work.stream)];
        stream.worked[usize::from(!work.sends)] += now - since;
        if work.sends {
            if work.last {
                stream.backlog += stream.unit();
                self.use_slots(host);
            }
        } else {
            stream.delivered += work.bytes;
            if let (true, Source::Buffers(costs)) = (work.last, stream.source) {
                let delay = vary(&mut self.rng, costs.credit_ns * 1000);
                self.kernel.after(delay, Event::Freed(work.stream));
            }
        }
        self.work(host, core);
    }

    /// Uses the free slots of a host's DMA controller; what is sent and what has come take turns.
    fn use_slots(&mut self, host: usize) {
        let now = self.kernel.now();
        while self.hosts[host].slots > 0 {
            let first = 1 - self.hosts[host].latest;
            let mut ways = [first, 1 - first].into_iter();
            let Some(way) = ways.find(|way| self.has_work(host, *way)) else { return };
            let unit = self.plan.dma_unit.0;
            let state = &mut self.hosts[host];
            let Some(transfer) = state.waits_for_slot(way) else { return };
            let bytes = transfer.waiting.min(unit);
            transfer.waiting -= bytes;
            transfer.under_way += 1;
            state.slots -= 1;
            state.latest = way;
            let crossed = state.bus.take(now, self.plan.bus.ps(bytes));
            let done = crossed + vary(&mut self.rng, self.plan.dma_latency.0);
            self.kernel.at(done, Event::Transferred(host, way));
        }
    }

    /// Whether a direction has something for a slot. The arbiter is asked for the next packet only then.
    fn has_work(&mut self, host: usize, way: usize) -> bool {
        if self.hosts[host].waits_for_slot(way).is_some() {
            return true;
        }
        let fifo = self.plan.fifo as usize;
        way == SEND && self.hosts[host].transfers[SEND].len() < fifo && self.pick(host)
    }

    /// The arbiter chooses the next packet to fetch; false if there is none.
    fn pick(&mut self, host: usize) -> bool {
        let state = &mut self.hosts[host];
        let mut ready = 0u16;
        for stream in self.streams.iter().filter(|it| it.from == host && it.backlog > 0) {
            if state.credits[usize::from(stream.lane)] > 0 {
                ready |= 1 << stream.lane;
            }
        }
        let Some(pick) = state.arbiter.next(ready) else { return false };
        let lane = usize::from(pick.lane);
        // Streams of a lane take turns.
        let count = self.streams.len();
        let order = (0..count).map(|at| (state.turns[lane] + at) % count);
        let mut waiting = order.filter(|at| {
            let stream = &self.streams[*at];
            stream.from == host && stream.lane == pick.lane && stream.backlog > 0
        });
        let Some(number) = waiting.next() else { return false };
        let packet = self.streams[number].take(number as u16, self.mtu);
        state.turns[lane] = number + 1;
        state.credits[lane] -= 1;
        state.arbiter.charge(pick, packet.bytes as u32 + PACKET_OVERHEAD);
        state.picks[0] += 1;
        state.picks[1] += u64::from(ready.count_ones() > 1);
        state.transfers[SEND].push_back(Transfer::new(packet));
        true
    }

    /// A transfer is done: those of a direction end in their order.
    fn transferred(&mut self, host: usize, way: usize) {
        let state = &mut self.hosts[host];
        state.slots += 1;
        if let Some(transfer) = state.transfers[way].iter_mut().find(|it| it.under_way > 0) {
            transfer.under_way -= 1;
        }
        if way == SEND {
            self.send(host);
        } else if state.transfers[RECEIVE].front().is_some_and(Transfer::is_done) {
            let done = state.transfers[RECEIVE].pop_front();
            done.into_iter().for_each(|it| self.received(host, it.packet));
        }
        self.use_slots(host);
    }

    /// The link sends the first packet, if it is complete.
    fn send(&mut self, host: usize) {
        let state = &mut self.hosts[host];
        let Some(first) = state.transfers[SEND].front().filter(|it| it.is_done()) else { return };
        if !std::mem::replace(&mut state.sends, true) {
            let wire = self.link.ps(first.packet.bytes + u64::from(PACKET_OVERHEAD));
            self.kernel.after(wire, Event::Sent(host));
        }
    }

    /// A packet is in memory.
    fn received(&mut self, host: usize, packet: Packet) {
        self.kernel.after(self.delay, Event::Credit(1 - host, packet.lane));
        let stream = &mut self.streams[usize::from(packet.stream)];
        match stream.source {
            Source::Memory(costs) => {
                stream.delivered += packet.bytes;
                stream.missing -= packet.bytes;
                if stream.missing == 0 {
                    stream.windows += 1;
                    stream.waits = true;
                    let both = [Some(packet.stream), stream.partner];
                    let gap = vary(&mut self.rng, costs.gap_ns * 1000);
                    both.into_iter().flatten().for_each(|it| self.go_on(it, gap));
                }
            }
            Source::Buffers(_) => {
                let core = stream.cores[1];
                self.copy(host, core, packet.stream, false, packet.bytes, packet.last);
            }
        }
    }

    /// Begins the next window of a stream that waits, unless it is ahead of its other direction.
    fn go_on(&mut self, number: u16, gap: u64) {
        let stream = &self.streams[usize::from(number)];
        let other = stream.partner.map(|it| self.streams[usize::from(it)].windows);
        if stream.waits && other.is_none_or(|other| stream.windows <= other + 1) {
            self.streams[usize::from(number)].waits = false;
            self.kernel.after(gap, Event::Fill(number));
        }
    }

    /// Forgets what was counted so far.
    pub(super) fn begin_sample(&mut self, now: u64) {
        self.begun = now;
        for stream in &mut self.streams {
            stream.delivered = 0;
            stream.worked = [0; 2];
        }
        for host in &mut self.hosts {
            host.bus.busy = 0;
            host.picks = [0; 2];
        }
    }

    /// What was counted since, for so many picoseconds.
    pub(super) fn report(&self, sample: u64) -> HcaReport {
        let ps = sample.max(1) as f64;
        let percent = |part: u64| part as f64 * 100.0 / ps;
        let rate = |stream: &Stream| StreamRate {
            kind: stream.kind,
            sl: stream.sl,
            lane: stream.lane,
            from: stream.from as u8,
            gbps: stream.delivered as f64 * 8000.0 / ps,
            send_cpu: percent(stream.worked[0]),
            receive_cpu: percent(stream.worked[1]),
        };
        let host = &self.hosts[0];
        HcaReport {
            streams: self.streams.iter().map(rate).collect(),
            contested: host.picks[1] as f64 * 100.0 / host.picks[0].max(1) as f64,
            bus: percent(host.bus.busy),
            simulated_ms: (self.begun + sample) as f64 / 1e9,
            events: self.kernel.scheduled(),
            hash: self.hash,
        }
    }
}
