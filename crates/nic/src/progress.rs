//! Progress on channels: who looks when, and how an engine may sleep.

use std::sync::Arc;

use quipu_mem::{Directory, Segment};

use crate::adapter::{Adapter, Hub};
use crate::channel::{CHUNK, Other};
use crate::cq::Cq;
use crate::error::Fault;
use crate::linger;
use crate::link::PeerMemory;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::receive;
use crate::requester;
use crate::slab::Slab;
use crate::types::{Completion, CqId, QpId, Time};

/// Looks that find nothing after which a channel is no longer looked at unasked, if there are others.
const PATIENCE: u32 = 4096;
/// So many channels are always worth looking at.
const FEW: usize = 4;

/// What a [`glance`](Adapter::glance) has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glance {
    /// The queue is empty, and same-host peers had put nothing into shared memory, so that neither
    /// [`progress`](Adapter::progress) nor [`release_acks`](Adapter::release_acks) would do anything. The
    /// program has looked at the queue. Events may be there, of what the look before has left to be done.
    Vain,
    /// A completion, which was handed out. There may be more to do, and there is what
    /// [`settle_taken`](Adapter::settle_taken) does.
    Taken,
    /// The queue is empty, and there is something in the channel of this queue pair.
    Found(QpId),
    /// Something else, or it is not known.
    Unsure,
}

/// Has the first of these channels looked at behind the others the next time: one that always has something,
/// as that of a peer which asks again while it is answered, would keep them waiting otherwise.
#[inline(never)]
fn put_last(hot: &mut [QpId]) {
    hot.rotate_left(1);
}

/// Which of the hot channels has something, or is gone.
#[inline(always)]
fn first_filled(qps: &mut Slab<QpId, Qp>, hot: &[QpId]) -> Option<usize> {
    let mut is_quiet = |id| qps.get_mut(id).is_some_and(receive::channel::is_quiet);
    hot.iter().position(|&id| !is_quiet(id))
}

/// The same, with more looks, if a poll of `cq` waits for an answer in one of them.
#[inline]
fn await_answer<P>(qps: &mut Slab<QpId, Qp>, hub: &Hub<P>, cq: CqId) -> Option<usize> {
    let waits = |&id: &QpId| qps.get_mut(id).is_some_and(|qp| linger::take_turn(qp, cq));
    hub.hot.iter().any(waits).then_some(())?;
    let mut looks = (0..hub.config.answer_looks).step_by(hub.hot.len());
    looks.find_map(|_| first_filled(qps, &hub.hot))
}

impl<P: Probe> Adapter<P> {
    /// Publishes remotely accessible regions in `directory`, which same-host peers may read.
    ///
    /// # Errors
    /// The segment is read-only.
    pub fn publish_regions(&mut self, directory: &Segment) -> Result<(), Fault> {
        let directory =
            Directory::create(directory).map_err(|_| Fault::Invalid("directory segment"))?;
        self.hub.regions.publish_in(directory);
        Ok(())
    }

    /// Gives access to the own memory by address, for large messages between queue pairs of this adapter.
    pub fn set_own_memory(&mut self, memory: Arc<dyn PeerMemory>) {
        self.hub.own_memory = Some(memory);
    }

    /// As quick a look as there is, for a poll of `cq`: most find nothing, or the answer that they wait for,
    /// if it comes within [`Config::answer_looks`](crate::Config::answer_looks).
    #[inline(always)]
    pub fn glance(&mut self, now: Time, cq: CqId, taker: impl FnOnce(&Completion)) -> Glance {
        self.settle_taken();
        let Self { qps, hub } = self;
        let empty = hub.cqs.get_mut(cq).is_some_and(Cq::is_idle);
        if !empty || hub.hot.len() > FEW {
            return Glance::Unsure;
        }
        let mut filled = first_filled(qps, &hub.hot);
        if filled.is_none() {
            let idle = hub.ack_due.is_empty() && hub.nudged.is_empty() && hub.orphans.is_empty();
            if !idle || !hub.endings.is_empty() || hub.links.iter().any(|(_, link)| link.rung()) {
                return Glance::Unsure;
            }
            filled = await_answer(qps, hub, cq);
        }
        let Some(index) = filled else { return Glance::Vain };
        let id = hub.hot[index];
        let Some(qp) = qps.get_mut(id) else { return Glance::Unsure };
        hub.now = now;
        if index + 1 < hub.hot.len() {
            put_last(&mut hub.hot[index..]);
        }
        if receive::express::take(qp, hub, cq, taker) {
            linger::note_answer(qp);
            return Glance::Taken;
        }
        linger::note_front(qp);
        Glance::Found(id)
    }

    /// Does what a [`glance`](Self::glance) that has handed out a completion left to be done: until then
    /// requests that the peer has executed do not complete, and it is told of nothing. The next glance does
    /// so by itself, and so do posts of sends, `progress`, `release_acks`, `arm` and `modify_qp`; whatever
    /// else may come first.
    #[inline(always)]
    pub fn settle_taken(&mut self) {
        if self.hub.unsettled.is_some() {
            self.settle();
        }
    }

    #[inline(never)]
    fn settle(&mut self) {
        let Some(unsettled) = self.hub.unsettled.take() else { return };
        if let Some((qp, hub)) = self.qp_and_hub(unsettled.qp) {
            unsettled.settle(qp, hub);
        }
    }

    /// Serves what a same-host peer has put into the channel of `id`, of which a [`glance`](Self::glance) has
    /// seen something; whether there was anything.
    #[inline]
    pub fn serve(&mut self, now: Time, id: QpId) -> bool {
        self.hub.now = now;
        self.look(id, false)
    }

    /// Whether a queue has no completions, and no overrun to tell of. Then the program has looked at it.
    #[inline(always)]
    pub fn is_idle(&mut self, cq: CqId) -> bool {
        self.hub.cqs.get_mut(cq).is_some_and(Cq::is_idle)
    }

    /// Whether so many bytes were moved while requests were being posted that it is the peers' turn: what
    /// completes at once would keep their requests waiting otherwise.
    #[inline(always)]
    pub fn owes_progress(&self) -> bool {
        self.hub.moved_at_once >= u64::from(CHUNK)
    }

    /// Serves what same-host peers have put into shared memory; whether there was anything.
    #[inline]
    pub fn progress(&mut self, now: Time) -> bool {
        self.hub.now = now;
        self.settle_taken();
        let mut busy = self.answer_bells();
        let mut index = 0;
        while let Some(&id) = self.hub.hot.get(index) {
            let quiet = self.is_quiet(id);
            if quiet && self.hub.hot.len() <= FEW {
                // What nearly every look comes to.
                index += 1;
                continue;
            }
            busy |= self.look(id, quiet);
            // The list shrinks when a channel ends or cools down; its place then holds another one.
            if self.hub.hot.get(index) == Some(&id) {
                index += 1;
            }
        }
        if !(self.hub.nudged.is_empty() && self.hub.orphans.is_empty()) {
            busy |= self.serve_nudged();
        }
        if !self.hub.endings.is_empty() {
            busy |= self.finish_endings();
        }
        self.hub.moved_at_once = 0;
        busy
    }

    /// Whether a channel has nothing.
    #[inline(always)]
    fn is_quiet(&mut self, id: QpId) -> bool {
        self.qps.get_mut(id).is_some_and(receive::channel::is_quiet)
    }

    /// Looks at one channel of the hot list, which has something, or is `quiet` and may not stay in the list.
    #[inline(never)]
    fn look(&mut self, id: QpId, quiet: bool) -> bool {
        let count = self.hub.hot.len();
        let Some((qp, hub)) = self.qp_and_hub(id) else {
            self.hub.hot.retain(|&hot| hot != id);
            return false;
        };
        let busy = !quiet && receive::channel::run(qp, hub);
        let Path::Channel(path) = &mut qp.path else { return busy };
        if busy {
            path.idle = 0;
            return true;
        }
        path.idle = path.idle.saturating_add(1);
        if path.idle > PATIENCE && count > FEW {
            path.channel.incoming.control.arm();
            if receive::channel::run(qp, hub) {
                return true;
            }
            if let Path::Channel(path) = &mut qp.path {
                path.hot = false;
            }
            hub.hot.retain(|&hot| hot != id);
        }
        false
    }

    /// Puts the channels that peers rang for among the hot ones; whether there were any.
    #[inline(always)]
    fn answer_bells(&mut self) -> bool {
        self.hub.links.iter().any(|(_, link)| link.rung()) && self.heat_rung()
    }

    #[cold]
    fn heat_rung(&mut self) -> bool {
        let mut rung = Vec::new();
        for (_, link) in self.hub.links.iter_mut() {
            if link.rung() {
                link.answer_bells(&mut rung);
            }
        }
        for &id in &rung {
            self.heat(id);
        }
        !rung.is_empty()
    }

    fn heat(&mut self, id: QpId) {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return };
        let Path::Channel(path) = &mut qp.path else { return };
        path.idle = 0;
        path.channel.incoming.control.disarm();
        if !std::mem::replace(&mut path.hot, true) {
            hub.hot.push(id);
        }
    }

    /// Serves queue pairs whose other end is in this adapter too; whether there was anything.
    pub(crate) fn serve_nudged(&mut self) -> bool {
        let mut busy = false;
        loop {
            while let Some(id) = self.hub.orphans.pop() {
                if let Some((qp, hub)) = self.qp_and_hub(id)
                    && let Path::Channel(_) = &qp.path
                {
                    receive::channel::run_out(qp, hub);
                    requester::peer_lost(qp, hub);
                }
                busy = true;
            }
            let Some(id) = self.hub.nudged.pop_front() else { return busy };
            let Some((qp, hub)) = self.qp_and_hub(id) else { continue };
            if !matches!(qp.path, Path::Channel(_)) || !receive::channel::run(qp, hub) {
                continue;
            }
            busy = true;
            // One look serves a bounded number of slots: as long as there was something, there may be more,
            // and nobody will ring for it again.
            match &qp.path {
                Path::Channel(path) if matches!(path.other, Other::Own(_)) => {
                    hub.nudged.push_back(id);
                }
                _ => self.heat(id),
            }
        }
    }

    /// Asks all same-host peers to ring from now on. `false` if something came meanwhile: then do not
    /// sleep, but [`disarm`](Self::disarm) and [`progress`](Self::progress).
    pub fn arm(&mut self) -> bool {
        self.settle_taken();
        for (_, link) in self.hub.links.iter_mut() {
            link.set_parked(true);
        }
        for id in std::mem::take(&mut self.hub.hot) {
            let Some((qp, hub)) = self.qp_and_hub(id) else { continue };
            let Path::Channel(path) = &mut qp.path else { continue };
            path.channel.incoming.control.arm();
            path.hot = false;
            if receive::channel::run(qp, hub) {
                self.heat(id);
            }
        }
        self.hub.hot.is_empty()
            && self.hub.nudged.is_empty()
            && !self.hub.links.iter().any(|(_, link)| link.rung())
    }

    /// The engine is awake: peers need not ring.
    pub fn disarm(&mut self) {
        for (_, link) in self.hub.links.iter_mut() {
            link.set_parked(false);
        }
    }

    /// Queue pairs on channels that are looked at by every `progress`.
    #[must_use]
    pub fn hot_channels(&self) -> usize {
        self.hub.hot.len()
    }
}
