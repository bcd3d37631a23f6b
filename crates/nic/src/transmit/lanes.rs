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

use quipu_qos::{Config, Demand, LANES, LaneUse, PACKET_OVERHEAD, TokenClock};

use crate::adapter::{Adapter, Alarm, Hub};
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::types::{QpId, Time};

mod answers;
mod backlog;
mod charge;
mod port;
mod settings;
mod vl15;

pub(crate) use self::answers::{Answer, charge_answer, may_answer};
use self::backlog::{Backlog, Share, demand, packet_of, size_of};
use self::charge::charge_turn;
pub(crate) use self::charge::{charge, limit_stream, room};
pub use self::port::PortShare;
use super::marking::service_level;

/// A turn with fewer octets left is over unless that is all it needs: what is left counts for the next one.
const LEAST_TURN: i64 = 256;
/// Queue pairs of a lane that have a turn, and are asked at each exchange how much more they have.
const ASKED: usize = 16;
/// Octets of the greatest packet, headers included.
const GREATEST_PACKET: u64 = 4096 + PACKET_OVERHEAD as u64;
/// A lane says no more than this of what waits there, in octets.
const DEMAND_OCTETS: u64 = 64 << 20;
/// Between two looks at the port, in nanoseconds: each grants what has become due meanwhile.
const TICK_NS: u64 = 16_000;
/// The same while only long backlogs wait, in lanes that do not go first: a processor that wakes up for each
/// of their packets keeps others waiting, among them the programs whose packets go first.
const BACKLOG_TICK_NS: u64 = 100_000;
/// A backlog that takes so long at the port's rate is a long one, in nanoseconds.
const LONG_BACKLOG_NS: u64 = 4 * BACKLOG_TICK_NS;
/// The same while only starved lanes wait: others may give the port tables that serve them.
const STARVED_TICK_NS: u64 = 20_000_000;
/// How much of its own rate a queue pair may use at once, in nanoseconds.
const RATE_BURST_NS: u64 = 50_000;

/// What a queue pair may transmit, and where it waits for more.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    /// Octets that it may still transmit.
    left: i64,
    /// Whether it stands in a lane's queue, or waits for its own rate.
    parked: bool,
    /// The lane of its turn.
    lane: u8,
    /// Whether a lane lists it among those that have a turn.
    listed: bool,
    /// What the lane of its turn counts as waiting of it.
    share: Share,
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
    active: VecDeque<QpId>,
    backlog: Backlog,
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
    /// The lane of each service level; `LANES` for one whose packets are discarded.
    lane_of: [u8; 16],
    /// Lanes that have a weight, as a bit mask.
    served: u16,
    port: Box<dyn PortShare>,
    lanes: [Lane; LANES],
    /// Lanes with queue pairs that wait, as a bit mask.
    waiting: u16,
    /// Whether some lane has a balance.
    unsettled: bool,
    /// Queue pairs that wait for their own rate, or that of their service level.
    resting: BTreeSet<(Time, QpId)>,
    /// Queue pairs whose packets are discarded.
    discarding: Vec<QpId>,
    /// How often the configuration has changed.
    changes: u32,
    sl_clocks: [Option<Box<TokenClock>>; 16],
    /// Whether some service level has a rate.
    has_rates: bool,
    default_level: u8,
    /// Before this the port has nothing.
    not_before: Time,
    /// Lanes of the high priority table, as a bit mask, and how much earlier the port has something for
    /// them, in nanoseconds.
    high: (u16, u64),
    /// Octets of a long backlog.
    long_backlog: u64,
    alarm: Option<Time>,
}

impl Lanes {
    fn new(config: Config, port: Box<dyn PortShare>) -> Self {
        let mut new = Self {
            config: Config::default(),
            lane_of: [0; 16],
            served: 0,
            port,
            lanes: Default::default(),
            waiting: 0,
            unsettled: false,
            resting: BTreeSet::new(),
            discarding: Vec::new(),
            changes: 0,
            sl_clocks: Default::default(),
            has_rates: false,
            default_level: 0,
            not_before: Time(0),
            high: (0, 0),
            long_backlog: 0,
            alarm: None,
        };
        new.set_config(config);
        new
    }

    fn set_config(&mut self, config: Config) {
        self.sl_clocks = sl_clocks(&config);
        let high = config.high.iter().filter(|entry| entry.weight > 0);
        let clock = TokenClock::new(config.rate);
        let packet_ns = clock.time_of(GREATEST_PACKET);
        self.long_backlog = match config.rate {
            0 => u64::MAX,
            _ => clock.octets_in(LONG_BACKLOG_NS).max(8 * GREATEST_PACKET),
        };
        self.high = (high.fold(0, |lanes, entry| lanes | 1 << entry.lane), packet_ns);
        self.has_rates = self.sl_clocks.iter().any(Option::is_some);
        self.lane_of = std::array::from_fn(|sl| config.lane_of(sl as u8).unwrap_or(LANES as u8));
        self.served = !config.starved_lanes();
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

    /// The lane of a service level, 15 for one whose packets are discarded.
    pub(super) fn lane_of_level(&self, sl: u8) -> u8 {
        self.lane_of[usize::from(sl) & 15]
    }

    pub(super) fn dscp_of(&self, sl: u8) -> u8 {
        self.config.dscp_of(sl)
    }

    /// Whether [`Adapter::serve_lanes`] has something to do.
    #[inline]
    pub(crate) fn is_due(&self, now: Time) -> bool {
        !self.discarding.is_empty()
            || self.resting.first().is_some_and(|&(at, _)| at <= now)
            || now >= self.due_at() && (self.waiting != 0 || self.unsettled)
    }

    /// From when on the port may have something for what waits.
    fn due_at(&self) -> Time {
        let early_ns = if self.waiting & self.high.0 != 0 { self.high.1 } else { 0 };
        Time(self.not_before.0.saturating_sub(early_ns))
    }

    /// How long the port need not be looked at.
    fn tick_ns(&self) -> u64 {
        let waiting = self.waiting & self.served;
        let is_long = |lane: usize| {
            waiting & 1 << lane == 0 || self.lanes[lane].backlog.octets() >= self.long_backlog
        };
        match waiting & self.high.0 == 0 && (0..LANES).all(is_long) {
            true => BACKLOG_TICK_NS,
            false => TICK_NS,
        }
    }

    /// Until when a queue pair waits for its own rate, or that of its service level.
    fn rests_until(&self, qp: &Qp, sl: u8, now: Time) -> Option<Time> {
        let clocks = [qp.turn.clock.as_ref(), self.sl_clocks[usize::from(sl) & 15].as_ref()];
        let rests = clocks.into_iter().flatten().filter(|clock| !clock.is_due(now.0));
        rests.map(|clock| Time(clock.next_ns())).max()
    }

    fn lane(&mut self, lane: u8) -> &mut Lane {
        &mut self.lanes[usize::from(lane) % LANES]
    }
}

fn sl_clocks(config: &Config) -> [Option<Box<TokenClock>>; 16] {
    let clock = |rate: u64| Box::new(TokenClock::new(rate));
    config.sl_rates.map(|rate| (rate > 0).then(|| clock(rate)))
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

/// How many octets a queue pair may send at once by its own rate, and that of its service level.
fn rate_burst<P>(qp: &Qp, hub: &Hub<P>) -> i64 {
    let has_rates = hub.qos.as_ref().is_some_and(|qos| qos.has_rates);
    if !has_rates && qp.turn.clock.is_none() {
        return i64::MAX;
    }
    let sl = usize::from(service_level(qp, hub));
    let of_level = hub.qos.as_ref().and_then(|qos| qos.sl_clocks[sl & 15].as_ref());
    let clocks = [qp.turn.clock.as_ref(), of_level].into_iter().flatten();
    clocks.map(|clock| clock.octets_in(RATE_BURST_NS) as i64).min().unwrap_or(i64::MAX)
}

/// Takes back what is left of a turn, from a queue pair that cannot use it.
#[cold]
pub(crate) fn end_turn<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    let Some(qos) = &mut hub.qos else { return };
    let left = std::mem::take(&mut qp.turn.left);
    let lane = qos.lane(qp.turn.lane);
    if !qp.turn.parked {
        lane.backlog.remove(&mut qp.turn.share);
    }
    if left > 0 {
        lane.balance += left;
        qos.unsettled = true;
        qos.not_before = Time(0);
    }
}

/// A queue pair that leaves waits no more.
pub(crate) fn leave<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    qp.turn.parked = false;
    end_turn(qp, hub);
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

/// Counts what a queue pair that waits for its turn has now.
#[cold]
pub(crate) fn count_again<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    let Some(qos) = &mut hub.qos else { return };
    if qp.turn.parked && !qp.turn.share.is_empty() {
        // As long as it stands in the queue it has something: else the port would never call it.
        let (size, octets) = (size_of(qp), demand(qp).max(1));
        qos.lane(qp.turn.lane).backlog.set(&mut qp.turn.share, size, octets);
    }
}

/// Has a queue pair wait in its lane, if it has something to transmit.
#[cold]
pub(crate) fn park<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    if qp.turn.parked {
        return count_again(qp, hub);
    }
    let sl = service_level(qp, hub);
    let (now, octets) = (hub.now, demand(qp));
    let Some(qos) = &mut hub.qos else { return };
    qos.lane(qp.turn.lane).backlog.remove(&mut qp.turn.share);
    if octets == 0 {
        return;
    }
    qp.turn.parked = true;
    qp.turn.since = now;
    let lane = qos.lane_of[usize::from(sl) & 15];
    if usize::from(lane) >= LANES {
        // Not here: the caller is in the middle of a request.
        qos.discarding.push(qp.id);
        return hub.set_lanes_alarm(Some(now));
    }
    let at = match qos.rests_until(qp, sl, now) {
        Some(until) => {
            qos.resting.insert((until, qp.id));
            until
        }
        None => {
            qp.turn.lane = lane;
            let size = size_of(qp);
            let place = qos.lane(lane);
            place.backlog.set(&mut qp.turn.share, size, octets);
            place.queue.push_back(qp.id);
            qos.waiting |= 1 << lane;
            qos.due_at().max(now)
        }
    };
    let sooner = qos.alarm.is_none_or(|alarm| at < alarm);
    if sooner {
        hub.set_lanes_alarm(Some(at));
    }
}

/// Lists a queue pair that goes on with its turn when its socket takes more.
fn note_active<P>(qp: &mut Qp, hub: &mut Hub<P>) {
    let Some(qos) = &mut hub.qos else { return };
    let lane = qos.lane(qp.turn.lane);
    if qp.turn.left > 0 && (!qp.turn.share.is_empty() || matches!(qp.path, Path::Stream(_))) {
        if !std::mem::replace(&mut qp.turn.listed, true) {
            lane.active.push_back(qp.id);
        }
    } else if !qp.turn.parked {
        lane.backlog.remove(&mut qp.turn.share);
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
        if now < qos.due_at() || qos.waiting == 0 && !qos.unsettled {
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
        for index in 0..LANES {
            let Some(qos) = &self.hub.qos else { return false };
            if !qos.lanes[index].active.is_empty() {
                self.count_active(index);
            }
        }
        let Some(qos) = &mut self.hub.qos else { return false };
        qos.unsettled = false;
        let mut told = Demand::default();
        for (index, lane) in qos.lanes.iter_mut().enumerate() {
            told.unused[index] = std::mem::take(&mut lane.balance);
            if lane.sent != LaneUse::default() {
                told.sent[index] = std::mem::take(&mut lane.sent);
                lane.total = lane.total.plus(&told.sent[index]);
            }
            told.octets[index] = lane.backlog.octets().min(DEMAND_OCTETS) as u32;
            told.packet[index] = lane.backlog.packet();
        }
        let (granted, next) = qos.port.exchange(now, &told);
        qos.not_before = next;
        let mut any = false;
        for (lane, &granted) in qos.lanes.iter_mut().zip(&granted) {
            lane.balance += i64::from(granted);
            any |= granted > 0;
        }
        qos.unsettled = any;
        any
    }

    /// Counts what queue pairs that have a turn have in addition to it; some, if there are many.
    fn count_active(&mut self, index: usize) {
        let Self { qps, hub } = self;
        let Some(qos) = &mut hub.qos else { return };
        let Lane { active, backlog, .. } = &mut qos.lanes[index];
        for _ in 0..active.len().min(ASKED) {
            let Some(id) = active.pop_front() else { return };
            let Some(qp) = qps.get_mut(id) else { continue };
            qp.turn.listed = qp.turn.left > 0 && usize::from(qp.turn.lane) == index;
            if qp.turn.listed {
                let (size, octets) = (size_of(qp), demand(qp));
                let more = octets.saturating_sub(qp.turn.left.unsigned_abs());
                backlog.set(&mut qp.turn.share, size, more);
                active.push_back(id);
            } else if !qp.turn.parked && usize::from(qp.turn.lane) == index {
                backlog.remove(&mut qp.turn.share);
            }
        }
    }

    /// Gives what was granted to the queue pairs that wait. Whether something was left that they cannot use.
    fn give_turns(&mut self) -> bool {
        let Some(qos) = &mut self.hub.qos else { return false };
        qos.unsettled = false;
        for index in 0..LANES {
            // Those that wait again are the last in the queue: a whole round may be due.
            while let Some(qos) = &mut self.hub.qos
                && let lane = &mut qos.lanes[index]
                && lane.balance > 0
                && let sharers = lane.queue.len() as i64
                && let Some(id) = lane.queue.pop_front()
            {
                if self.qps.is_large()
                    && let Some(&next) = lane.queue.front()
                {
                    self.qps.prefetch(next);
                }
                if !self.give_turn(index, id, sharers) {
                    break;
                }
            }
            let Self { qps, hub } = self;
            let Some(qos) = &mut hub.qos else { return false };
            let lane = &qos.lanes[index];
            match lane.queue.front() {
                Some(&id) if qps.is_large() => qps.prefetch(id),
                Some(_) => {}
                None => qos.waiting &= !(1 << index),
            }
            qos.unsettled |= lane.balance != 0;
        }
        self.hub.qos.as_ref().is_some_and(|qos| qos.unsettled)
    }

    /// Gives a turn to a queue pair that was taken from the queue of a lane, in which `sharers` waited.
    /// Whether the lane has more to give.
    fn give_turn(&mut self, index: usize, id: QpId, sharers: i64) -> bool {
        let fetches = self.qps.is_large();
        let Some((qp, hub)) = self.qp_and_hub(id) else { return true };
        if fetches {
            qp.sq.prefetch();
        }
        let rate_burst = rate_burst(qp, hub);
        let Some(qos) = &mut hub.qos else { return false };
        let lane = &mut qos.lanes[index];
        let wanted = demand(qp).min(i64::MAX as u64) as i64;
        let packet = i64::from(packet_of(qp));
        // A part of a packet is not sent: it counts for the next one.
        if wanted > 0 && lane.balance < wanted.min(packet) {
            lane.queue.push_front(id);
            let size = size_of(qp);
            lane.backlog.set(&mut qp.turn.share, size, wanted as u64);
            return false;
        }
        qp.turn.parked = false;
        let mut turn = 0;
        if wanted > 0 {
            let fair = if sharers > 1 { lane.balance / sharers } else { lane.balance };
            turn = wanted.min(fair.max(packet)).min(lane.balance);
            turn = turn.min(rate_burst.max(packet));
            lane.balance -= turn;
            qp.turn.left += turn;
            lane.sent.waits += 1;
            lane.sent.wait_ns += hub.now.since(qp.turn.since);
        }
        let size = size_of(qp);
        lane.backlog.set(&mut qp.turn.share, size, (wanted - turn) as u64);
        answers::use_turn(qp, hub);
        note_active(qp, hub);
        true
    }

    /// Sets the alarm for the next look at the port, if anything waits for it.
    fn set_next_alarm(&mut self, now: Time) {
        let Some(qos) = &self.hub.qos else { return };
        let due = match (qos.waiting & qos.served != 0, qos.waiting != 0 && qos.port.is_shared()) {
            (true, _) => Some(qos.due_at().max(now.after(qos.tick_ns()))),
            (false, true) => Some(now.after(STARVED_TICK_NS)),
            (false, false) => None,
        };
        let rest = qos.resting.first().map(|&(at, _)| at.max(now.after(1)));
        let at = due.into_iter().chain(rest).min();
        self.hub.set_lanes_alarm(at);
    }
}
