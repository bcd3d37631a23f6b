//! Queue pairs that are used again when their connection has ended, or when their program is done with it.

use quipu_nic::{QpAttr, QpAttrMask as M, QpState};

use super::model::{End, Opening, Stage};
use super::{Mishap, Programs};
use crate::world::{LoadEvent, World, WorldEvent};

/// The longest pause between two looks whether it is time.
const LONGEST_PAUSE_NS: u64 = 500_000_000;
/// The first port of those that connect to each other once more.
const AGAIN: u16 = 20_000;

impl Mishap {
    /// The same, of the end that has the queue pair now.
    pub(super) fn of(self, latest: impl Fn(usize) -> usize) -> Self {
        match self {
            Self::Abort { end } => Self::Abort { end: latest(end) },
            Self::ToError { end } => Self::ToError { end: latest(end) },
            Self::Destroy { end } => Self::Destroy { end: latest(end) },
            Self::Kill { .. } | Self::Post { .. } => self,
        }
    }
}

impl Programs {
    /// The end that has the queue pair of `end` now.
    pub(super) fn latest(&self, mut end: usize) -> usize {
        while let Some(after) = self.ends[end].after.filter(|&it| !self.is_unborn(it)) {
            end = after;
        }
        end
    }

    fn is_unborn(&self, e: usize) -> bool {
        self.ends[e].stage == Stage::Unborn
    }

    /// Whether an end connects to one whose queue pair is not free yet.
    pub(super) fn waits_for_unborn(&self, e: usize) -> bool {
        let end = &self.ends[e];
        let port = self.ends[end.peer].port;
        let mut all = self.ends.iter();
        port.is_some() && all.any(|end| end.stage == Stage::Unborn && end.port == port)
    }

    /// Looks again later whether an end is done, or can begin.
    pub(super) fn rebirth_later(&mut self, world: &mut World, end: usize) {
        let waited = world.kernel.now().saturating_sub(self.reborn_ns);
        let most = (self.plan.tick_ns * 8 + waited / 16).min(LONGEST_PAUSE_NS);
        let after = 1 + self.rng.below(most);
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Rebirth { end }));
    }

    /// Two that have had a connection are to have another, or one of the two begins.
    pub(super) fn rebirth(&mut self, world: &mut World, e: usize) {
        if let Some(before) = self.ends[e].before.filter(|_| self.is_unborn(e)) {
            return self.begin_again(world, e, before);
        }
        if self.ends[e].rebirths == 0 {
            return;
        }
        let peer = self.ends[e].peer;
        let there = |e: usize| self.ends[e].exists && world.hosts[self.ends[e].host].alive;
        if !there(e) || !there(peer) || self.ends[peer].after.is_some() {
            self.ends[e].rebirths = 0;
            return;
        }
        if !self.is_done(e) && !self.is_done(peer) {
            return self.rebirth_later(world, e);
        }
        let left = std::mem::take(&mut self.ends[e].rebirths);
        if !self.ends[e].mated || !self.ends[peer].mated || self.ends[peer].peer != e {
            return;
        }
        let first = self.ends.len();
        for (side, old) in [e, peer].into_iter().enumerate() {
            let next = self.next_of(old, first + 1 - side, first as u16);
            self.ends.push(next);
            self.ends[old].after = Some(first + side);
        }
        self.ends[first].rebirths = left - 1;
        if self.ends[e].causes.contains(&"partition for ever") {
            self.cause(first, "partition for ever");
        }
        self.rebirth_later(world, first);
        self.rebirth_later(world, first + 1);
    }

    /// Who has the queue pair of `old` next.
    fn next_of(&mut self, old: usize, peer: usize, turn: u16) -> End {
        let ops_left = self.rng.index(self.plan.ops as usize / 4 + 2) as u32;
        let settings = self.draw_settings(self.ends[old].settings.mode);
        let farewell = self.draw_farewell();
        let end = &self.ends[old];
        let mut remote = end.remote;
        let opening = match end.opening {
            Opening::Together { .. } => {
                let first = turn.min(peer as u16);
                let second = peer as u16 == first;
                remote.set_port(AGAIN + first + u16::from(!second));
                Opening::Together { port: AGAIN + first + u16::from(second) }
            }
            Opening::Decides { .. } => Opening::Decides { refusals: self.rng.below(2) as u32 },
            opening => opening,
        };
        End {
            port: end.port,
            farewell,
            ops_left,
            before: Some(old),
            stage: Stage::Unborn,
            ..End::new(end.seat(), peer, settings, opening, remote)
        }
    }

    /// An end takes the queue pair of another that is done with it.
    fn begin_again(&mut self, world: &mut World, e: usize, before: usize) {
        let host = self.ends[e].host;
        if !self.ends[before].exists || !world.hosts[host].alive {
            self.cause(e, "its queue pair is gone");
            self.ends[e].stage = Stage::Over;
            self.ends[e].rebirths = 0;
            return;
        }
        let together = matches!(self.ends[e].opening, Opening::Together { .. });
        // Some do not look at what has come of their requests.
        let ended = self.ends[before].over.is_some() && !self.is_done(before);
        let hasty = ended && !together && self.rng.percent(30);
        if !hasty && !self.is_free(e) {
            return self.rebirth_later(world, e);
        }
        if hasty {
            self.ends[before].causes.push("its program has not looked");
        }
        if self.ends[before].over.is_none() {
            self.cause(before, "a reset");
        }
        let (qp, now) = (self.ends[e].qp, world.time());
        world.wake(host);
        let to = |state| QpAttr { state, port_num: 1, ..QpAttr::default() };
        let adapter = &mut world.hosts[host].adapter;
        let reset = adapter.modify_qp(now, qp, &to(QpState::Reset), M::STATE);
        let done = reset.and_then(|()| adapter.modify_qp(now, qp, &to(QpState::Init), M::STATE));
        world
            .trace
            .line(world.kernel.now(), || format!("end {e} takes that of {before}: {done:?}"));
        if let Err(fault) = done {
            return world.violate(|| format!("end {e} cannot begin: {fault}"));
        }
        // What the reset has to say is said to the old one.
        world.serve(host);
        self.take_events(world);
        for posted in std::mem::take(&mut self.ends[before].posted) {
            self.slots[posted.slot].freeze();
        }
        self.ends[before].sent.clear();
        self.ends[before].exists = false;
        self.ends[before].stage = Stage::Over;
        self.ends[e].exists = true;
        self.ends[e].stage = Stage::Idle;
        self.by_num.retain(|_, end| *end != before);
        self.by_num.insert((host, self.ends[e].num), e);
        self.reborn_ns = world.kernel.now();
        world.counters.reborn += 1;
        self.schedule(world, e);
        if self.ends[e].rebirths > 0 {
            self.rebirth_later(world, e);
        }
        world.trace.note(&[66, e as u64]);
        let peer = self.ends[e].peer;
        if let Some(before) = self.ends[peer].before.filter(|_| together && self.is_unborn(peer)) {
            self.begin_again(world, peer, before);
        }
    }

    /// Whether the queue pair of an end is free; of those that connect to each other, both.
    fn is_free(&self, e: usize) -> bool {
        let done = |e: usize| self.ends[e].before.is_none_or(|before| self.is_done(before));
        let together = matches!(self.ends[e].opening, Opening::Together { .. });
        done(e) && (!together || done(self.ends[e].peer))
    }
}
