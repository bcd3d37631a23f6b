//! Quality of service: queue pairs wait in their virtual lane until a port grants them a turn.
//!
//! Without a configuration there is nothing of this ([`Hub::qos`](crate::adapter::Hub) is `None`), and the
//! transmit machine asks that one question. With one, a queue pair transmits only as many octets as its
//! *turn* has. One without a turn parks in its lane's queue. [`Adapter::serve_lanes`] tells the port what
//! waits, and gives what the port grants to a lane to the queue pairs of that lane, round robin.
//!
//! What a queue pair transmits is counted in packets of its path MTU, whatever carries it: 26 octets are
//! added for each. What the peer must hear of at once (acknowledgements, refusals) needs no turn.

use std::collections::{BTreeSet, VecDeque};

use quipu_qos::{Config, Demand, LANES, LaneUse, PACKET_OVERHEAD, Port, TokenClock};

use crate::adapter::{Adapter, Alarm, Hub};
use crate::doorbell;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::types::{QpId, Time};

mod vl15;

use super::Gather;
use super::marking::service_level;

/// A turn with fewer octets left is over: what is left counts for the next one.
const LEAST_TURN: i64 = 256;
/// Queue pairs of a lane that are asked how much they have: those that follow have their turn later anyway.
const ASKED: usize = 16;
/// A lane says no more than this of what waits there, in octets.
const DEMAND_OCTETS: u64 = 64 << 20;
/// Between two looks at the port, in nanoseconds: each grants what has become due meanwhile.
const TICK_NS: u64 = 16_000;
/// The same while only starved lanes wait: others may give the port tables that serve them.
const STARVED_TICK_NS: u64 = 20_000_000;
/// How much of its own rate a queue pair may use at once, in nanoseconds.
const RATE_BURST_NS: u64 = 50_000;

/// The port that lanes send by: one of this adapter alone, or one that several processes share.
pub trait PortShare: Send {
    /// What may be sent now of each lane, in octets, of what waits there; and from when on it is worth asking
    /// again.
    fn exchange(&mut self, now: Time, demand: &Demand) -> ([u32; LANES], Time);

    /// Takes another configuration.
    fn configure(&mut self, config: &Config);

    /// Another configuration that the port has been given by others, once.
    fn changed(&mut self) -> Option<Config> {
        None
    }

    /// Whether others may give the port another configuration at any time. Then the adapter looks at it every
    /// 20 ms even if its tables starve all lanes in which something waits.
    fn is_shared(&self) -> bool {
        false
    }
}

/// A port of this adapter alone.
struct OwnPort(Port);

impl PortShare for OwnPort {
    fn exchange(&mut self, now: Time, demand: &Demand) -> ([u32; LANES], Time) {
        let granted = self.0.exchange(0, now.0, demand);
        (granted, Time(self.0.next_ns()))
    }

    fn configure(&mut self, config: &Config) {
        self.0.configure(config);
    }
}

/// What a queue pair may transmit, and where it waits for more.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    /// Octets that it may still transmit.
    left: i64,
    /// Whether it stands in a lane's queue, or waits for its own rate.
    parked: bool,
    /// The lane of its turn.
    lane: u8,
    /// Since when it waits.
    since: Time,
    /// Its own rate, if it has one.
    clock: Option<Box<TokenClock>>,
}

/// A virtual lane.
#[derive(Debug, Default)]
struct Lane {
    queue: VecDeque<QpId>,
    /// Queue pairs that have a turn which they have not used up: their sockets take it when they are asked.
    active: Vec<QpId>,
    /// Octets that were granted and not given to a queue pair; below 0: that were sent and not granted.
    balance: i64,
    /// What was sent since the port was told.
    sent: LaneUse,
    /// What was sent in all.
    total: LaneUse,
}

/// The lanes of an adapter.
pub(crate) struct Lanes {
    config: Config,
    port: Box<dyn PortShare>,
    lanes: [Lane; LANES],
    /// Lanes with queue pairs that wait, as a bit mask.
    waiting: u16,
    /// Queue pairs that wait for their own rate, or that of their service level.
    resting: BTreeSet<(Time, QpId)>,
    /// Queue pairs whose packets are discarded.
    discarding: Vec<QpId>,
    /// How often the configuration has changed.
    changes: u32,
    sl_clocks: [Option<Box<TokenClock>>; 16],
    default_level: u8,
    /// Before this the port has nothing.
    not_before: Time,
    alarm: Option<Time>,
}

impl Lanes {
    fn new(config: Config, port: Box<dyn PortShare>) -> Self {
        let sl_clocks = sl_clocks(&config);
        Self {
            config,
            port,
            lanes: Default::default(),
            waiting: 0,
            resting: BTreeSet::new(),
            discarding: Vec::new(),
            changes: 1,
            sl_clocks,
            default_level: 0,
            not_before: Time(0),
            alarm: None,
        }
    }

    fn set_config(&mut self, config: Config) {
        self.sl_clocks = sl_clocks(&config);
        self.config = config;
        self.changes = self.changes.wrapping_add(1);
    }

    /// The service level of queue pairs that name none.
    pub(super) fn default_level(&self) -> u8 {
        self.default_level
    }

    pub(super) fn set_default_level(&mut self, sl: u8) {
        self.default_level = sl & 15;
    }

    pub(super) fn dscp_of(&self, sl: u8) -> u8 {
        self.config.dscp_of(sl)
    }

    fn lane(&mut self, lane: u8) -> &mut Lane {
        &mut self.lanes[usize::from(lane) % LANES]
    }
}

fn sl_clocks(config: &Config) -> [Option<Box<TokenClock>>; 16] {
    let clock = |rate: u64| Box::new(TokenClock::new(rate));
    config.sl_rates.map(|rate| (rate > 0).then(|| clock(rate)))
}

/// Octets of the greatest packet of a queue pair.
fn packet_of(qp: &Qp) -> u32 {
    mtu_of(qp) + PACKET_OVERHEAD
}

fn mtu_of(qp: &Qp) -> u32 {
    match qp.attr.path_mtu {
        code @ 1..=5 => 128 << code,
        _ => 4096,
    }
}

/// Octets that so much payload takes, in packets.
fn octets(qp: &Qp, payload: u64) -> u64 {
    payload + payload.div_ceil(mtu_of(qp).into()).max(1) * u64::from(PACKET_OVERHEAD)
}

/// Octets that a queue pair could transmit now, in packets.
fn demand(qp: &Qp) -> u64 {
    use crate::stream::Answer;
    let answers: u64 = match &qp.path {
        Path::Stream(stream) => {
            let size = |answer: &Answer| match answer {
                Answer::Read { size, msg, .. } => size - msg.as_ref().map_or(0, |msg| msg.offset()),
                Answer::Atomic { .. } => 8,
            };
            stream.answers.iter().map(|answer| octets(qp, size(answer).into())).sum()
        }
        _ => 0,
    };
    let handing = match &qp.path {
        Path::Tcp(path) if path.unhanded > 0 => octets(qp, path.unhanded.into()),
        _ => 0,
    };
    let begun = qp.requester.offset > 0 && qp.requester.failing.is_none();
    if !begun && !crate::requester::may_begin(qp) {
        return answers + handing;
    }
    let direct = match &qp.path {
        Path::Channel(path) => path.direct_done,
        _ => 0,
    };
    let done = u64::from(direct.max(qp.requester.offset.saturating_sub(1)));
    let payload = qp.requester.waiting_bytes.saturating_sub(done);
    let requests = u64::from(qp.sq.tail.wrapping_sub(qp.sq.next));
    // Each begins a packet of its own.
    let packets = requests.max(1) * u64::from(PACKET_OVERHEAD);
    answers + handing + octets(qp, payload) + packets - u64::from(PACKET_OVERHEAD)
}

/// Whether a queue pair has a turn. One without it waits by [`park`].
#[inline]
pub(crate) fn has_turn<P>(qp: &Qp, hub: &Hub<P>) -> bool {
    hub.qos.is_none() || qp.turn.left > 0
}

/// Whether a queue pair waits for its turn.
#[inline]
pub(crate) fn is_parked(qp: &Qp) -> bool {
    qp.turn.parked
}

/// Bytes of payload that a queue pair may transmit in one piece.
#[inline]
pub(crate) fn room<P>(qp: &Qp, hub: &Hub<P>) -> u32 {
    if hub.qos.is_none() { u32::MAX } else { payload_room(qp) }
}

#[cold]
fn payload_room(qp: &Qp) -> u32 {
    let (left, packet) = (qp.turn.left.max(LEAST_TURN) as u64, u64::from(packet_of(qp)));
    let overhead = u64::from(PACKET_OVERHEAD);
    let rest = (left % packet).saturating_sub(overhead);
    let payload = left / packet * (packet - overhead) + rest;
    payload.min(u32::MAX.into()) as u32
}

/// How many bytes a stream may write into a buffer in one piece. What is gathered elsewhere is limited, too:
/// pieces of it are as long as an FPDU.
pub(crate) fn limit_stream(qp: &Qp, gather: &mut Gather) -> usize {
    const LONGEST_FPDU: i64 = 1 << 16;
    gather.cap((qp.turn.left - LONGEST_FPDU).max(0) as usize);
    // Short pieces of long messages are not written (`iwarp::Sender::segment`).
    (qp.turn.left.max(0) as usize).max(super::ROOM_BYTES)
}

/// Charges a queue pair for so much payload that it has just transmitted.
#[inline]
pub(crate) fn charge<P>(qp: &mut Qp, hub: &mut Hub<P>, payload: u32) {
    if hub.qos.is_some() {
        charge_turn(qp, hub, payload);
    }
}

#[cold]
fn charge_turn<P>(qp: &mut Qp, hub: &mut Hub<P>, payload: u32) {
    let sl = service_level(qp, hub);
    let Some(qos) = &mut hub.qos else { return };
    let octets = octets(qp, payload.into());
    let lane = qos.lane(qp.turn.lane);
    lane.sent.octets += octets;
    lane.sent.packets += u64::from(payload.div_ceil(mtu_of(qp)).max(1));
    qp.turn.left -= octets as i64;
    if qp.turn.left < LEAST_TURN {
        lane.balance += std::mem::take(&mut qp.turn.left);
    }
    let clocks = [qp.turn.clock.as_mut(), qos.sl_clocks[usize::from(sl)].as_mut()];
    for clock in clocks.into_iter().flatten() {
        clock.limit_lag(hub.now.0, TokenClock::IDLE_NS);
        clock.take(hub.now.0, octets);
    }
}

/// Takes back what is left of a turn, from a queue pair that cannot use it.
#[cold]
pub(crate) fn end_turn<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    let Some(qos) = &mut hub.qos else { return };
    let left = std::mem::take(&mut qp.turn.left);
    if left > 0 {
        qos.lane(qp.turn.lane).balance += left;
        qos.not_before = Time(0);
    }
}

/// Ends the turn of a queue pair that has more to transmit, which it does in its next one.
#[cold]
pub(crate) fn wait_again<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    end_turn(qp, hub);
    park(qp, hub);
}

/// As [`end_turn`], for a stream that goes on when its socket has room: only if it has nothing to transmit.
#[cold]
pub(crate) fn end_idle_turn<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if qp.turn.left > 0 && demand(qp) == 0 {
        end_turn(qp, hub);
    }
}

/// Has a queue pair wait in its lane, if it has something to transmit.
#[cold]
pub(crate) fn park<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if qp.turn.parked || demand(qp) == 0 {
        return;
    }
    let sl = service_level(qp, hub);
    let now = hub.now;
    let Some(qos) = &mut hub.qos else { return };
    qp.turn.parked = true;
    qp.turn.since = now;
    let Some(lane) = qos.config.lane_of(sl) else {
        // Not here: the caller is in the middle of a request.
        qos.discarding.push(qp.id);
        return hub.set_lanes_alarm(Some(now));
    };
    let clocks = [qp.turn.clock.as_ref(), qos.sl_clocks[usize::from(sl)].as_ref()];
    let rests = clocks.into_iter().flatten().filter(|clock| !clock.is_due(now.0));
    let at = match rests.map(|clock| Time(clock.next_ns())).max() {
        Some(until) => {
            qos.resting.insert((until, qp.id));
            until
        }
        None => {
            qp.turn.lane = lane;
            qos.lane(lane).queue.push_back(qp.id);
            qos.waiting |= 1 << lane;
            qos.not_before.max(now)
        }
    };
    let sooner = qos.alarm.is_none_or(|alarm| at < alarm);
    if sooner {
        hub.set_lanes_alarm(Some(at));
    }
}

/// Gives a queue pair a rate of its own, in kbit/s; 0: none.
pub(crate) fn limit_rate(qp: &mut Qp, kilobits: u32) {
    let rate = u64::from(kilobits) * 1000;
    let clock = || Box::new(TokenClock::new(rate));
    qp.turn.clock = (rate > 0).then(clock);
}

impl<P> Hub<P> {
    fn set_lanes_alarm(&mut self, at: Option<Time>) {
        let Some(qos) = &mut self.qos else { return };
        let mut slot = qos.alarm;
        self.set_alarm(&mut slot, Alarm::Lanes, at);
        if let Some(qos) = &mut self.qos {
            qos.alarm = slot;
        }
    }
}

impl<P: Probe> Adapter<P> {
    /// Has queue pairs send as `config` says, by a port of this adapter alone, or by `shared`. Queue pairs
    /// that wait go on waiting: nothing is lost or sent twice.
    pub fn set_qos(&mut self, config: Config, shared: Option<Box<dyn PortShare>>) {
        match &mut self.hub.qos {
            Some(qos) => {
                match shared {
                    Some(port) => qos.port = port,
                    None => qos.port.configure(&config),
                }
                qos.set_config(config);
                self.sort_again();
            }
            None => {
                let own = || Box::new(OwnPort(Port::new(&config, 1))) as Box<dyn PortShare>;
                let port = shared.unwrap_or_else(own);
                self.hub.qos = Some(Box::new(Lanes::new(config, port)));
            }
        }
    }

    /// The configuration of quality of service, if there is one.
    #[must_use]
    pub fn qos(&self) -> Option<&Config> {
        self.hub.qos.as_ref().map(|qos| &qos.config)
    }

    /// How often quality of service was configured, also by other processes; 0: never.
    #[must_use]
    pub fn qos_changes(&self) -> u32 {
        self.hub.qos.as_ref().map_or(0, |qos| qos.changes)
    }

    /// What each lane has sent, if there is a configuration.
    #[must_use]
    pub fn lane_use(&self) -> Option<[LaneUse; LANES]> {
        let qos = self.hub.qos.as_ref()?;
        Some(std::array::from_fn(|lane| qos.lanes[lane].total.plus(&qos.lanes[lane].sent)))
    }

    /// Puts the queue pairs that wait into the lanes that their service levels have now.
    fn sort_again(&mut self) {
        let Some(qos) = &mut self.hub.qos else { return };
        let mut all: Vec<QpId> =
            std::mem::take(&mut qos.resting).into_iter().map(|(_, id)| id).collect();
        all.append(&mut qos.discarding);
        for lane in &mut qos.lanes {
            all.extend(lane.queue.drain(..));
        }
        qos.waiting = 0;
        qos.not_before = Time(0);
        self.hub.set_lanes_alarm(None);
        for id in all {
            if let Some((qp, hub)) = self.qp_and_hub(id) {
                let since = qp.turn.since;
                qp.turn.parked = false;
                park(qp, hub);
                qp.turn.since = since;
            }
        }
    }

    /// The alarm of the lanes has gone off.
    pub(crate) fn lanes_alarm(&mut self) {
        if let Some(qos) = &mut self.hub.qos {
            qos.alarm = None;
        }
        self.serve_lanes();
    }

    /// Gives turns to queue pairs that wait, as far as the port allows.
    #[cold]
    pub(crate) fn serve_lanes(&mut self) {
        let now = self.hub.now;
        let Some(qos) = &mut self.hub.qos else { return };
        if !qos.resting.is_empty() {
            self.end_rests(now);
        }
        self.discard_requests();
        let Some(qos) = &mut self.hub.qos else { return };
        if qos.waiting == 0 && qos.lanes.iter().all(|lane| lane.balance == 0) {
            return self.set_next_alarm(now);
        }
        if now < qos.not_before {
            return self.set_next_alarm(now);
        }
        // What one lane does not use another may: twice is enough, as every demand is known.
        for _ in 0..2 {
            let granted = self.exchange(now);
            let changed = self.hub.qos.as_mut().and_then(|qos| Some((qos.port.changed()?, qos)));
            if let Some((config, qos)) = changed {
                qos.set_config(config);
                self.sort_again();
            }
            if !granted || !self.give_turns() {
                break;
            }
        }
        if !self.hub.nudged.is_empty() {
            self.serve_nudged();
        }
        self.set_next_alarm(now);
    }

    /// Queue pairs whose own rate lets them go on wait in their lanes from now on.
    fn end_rests(&mut self, now: Time) {
        while let Some(qos) = &mut self.hub.qos
            && let Some(&(at, id)) = qos.resting.first()
            && at <= now
        {
            qos.resting.pop_first();
            if let Some((qp, hub)) = self.qp_and_hub(id) {
                let since = qp.turn.since;
                qp.turn.parked = false;
                park(qp, hub);
                qp.turn.since = since;
            }
        }
    }

    /// Tells the port what waits, and takes what it grants; whether that is anything.
    fn exchange(&mut self, now: Time) -> bool {
        let Self { qps, hub } = self;
        let Some(qos) = &mut hub.qos else { return false };
        let mut told = Demand::default();
        for (index, lane) in qos.lanes.iter_mut().enumerate() {
            told.unused[index] = std::mem::take(&mut lane.balance);
            told.sent[index] = std::mem::take(&mut lane.sent);
            lane.total = lane.total.plus(&told.sent[index]);
            let mut octets = 0;
            lane.active.retain(|&id| qps.get(id).is_some_and(|qp| qp.turn.left > 0));
            let all = lane.queue.iter().chain(&lane.active);
            for &id in all.take(ASKED) {
                if let Some(qp) = qps.get(id) {
                    octets += demand(qp).saturating_sub(qp.turn.left.unsigned_abs());
                    told.packet[index] = told.packet[index].max(packet_of(qp));
                }
                if octets >= DEMAND_OCTETS {
                    break;
                }
            }
            told.octets[index] = octets.min(DEMAND_OCTETS) as u32;
        }
        let (granted, next) = qos.port.exchange(now, &told);
        qos.not_before = next;
        for (lane, &granted) in qos.lanes.iter_mut().zip(&granted) {
            lane.balance += i64::from(granted);
        }
        granted.iter().any(|&granted| granted > 0)
    }

    /// Gives what was granted to the queue pairs that wait. Whether something was left that they cannot use.
    fn give_turns(&mut self) -> bool {
        let mut left = false;
        for index in 0..LANES {
            let Some(qos) = &mut self.hub.qos else { return false };
            let mut waiting = qos.lanes[index].queue.len();
            while let Some(qos) = &mut self.hub.qos
                && qos.lanes[index].balance > 0
                && waiting > 0
                && let Some(id) = qos.lanes[index].queue.pop_front()
            {
                if !self.give_turn(index, id, waiting as i64) {
                    break;
                }
                // Those that wait again are the last in the queue: a whole round may be due.
                let Some(qos) = &mut self.hub.qos else { return false };
                waiting = qos.lanes[index].queue.len();
            }
            let Some(qos) = &mut self.hub.qos else { return false };
            let lane = &qos.lanes[index];
            if lane.queue.is_empty() {
                qos.waiting &= !(1 << index);
            }
            left |= lane.balance != 0;
        }
        left
    }

    /// Gives a turn to a queue pair that was taken from the queue of a lane, in which `sharers` waited.
    /// Whether the lane has more to give.
    fn give_turn(&mut self, lane: usize, id: QpId, sharers: i64) -> bool {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return true };
        let Some(qos) = &mut hub.qos else { return false };
        qp.turn.parked = false;
        let wanted = demand(qp).min(i64::MAX as u64) as i64;
        if wanted > 0 {
            let lane = &mut qos.lanes[lane];
            // A part of a packet is not sent: it counts for the next one.
            if lane.balance < wanted.min(packet_of(qp).into()) {
                qp.turn.parked = true;
                lane.queue.push_front(id);
                return false;
            }
            let fair = (lane.balance / sharers).max(packet_of(qp).into());
            let mut turn = wanted.min(fair).min(lane.balance);
            if let Some(clock) = &qp.turn.clock {
                turn = turn.min(clock.octets_in(RATE_BURST_NS).max(packet_of(qp).into()) as i64);
            }
            lane.balance -= turn;
            qp.turn.left += turn;
            lane.sent.waits += 1;
            lane.sent.wait_ns += hub.now.since(qp.turn.since);
        }
        doorbell::kick(qp, hub);
        if qp.turn.left > 0
            && let Some(qos) = &mut hub.qos
        {
            qos.lanes[lane].active.push(id);
        }
        true
    }

    /// Sets the alarm for the next look at the port, if anything waits for it.
    fn set_next_alarm(&mut self, now: Time) {
        let Some(qos) = &self.hub.qos else { return };
        let served = self.hub.qos.as_ref().map_or(0, |qos| !qos.config.starved_lanes());
        let due = match (qos.waiting & served != 0, qos.waiting != 0 && qos.port.is_shared()) {
            (true, _) => Some(qos.not_before.max(now.after(TICK_NS))),
            (false, true) => Some(now.after(STARVED_TICK_NS)),
            (false, false) => None,
        };
        let rest = qos.resting.first().map(|&(at, _)| at.max(now.after(1)));
        let at = due.into_iter().chain(rest).min();
        self.hub.set_lanes_alarm(at);
    }
}
