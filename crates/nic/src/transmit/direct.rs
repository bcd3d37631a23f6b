//! Writes, reads, atomics and flushes that one process executes in the memory of another, which they cost
//! nothing: where nothing that the peer must execute first is outstanding, and the host allows it.

use quipu_mem::{Key, Segment, Sge};

use super::channel::{Step, has_right_of_way};
use super::lanes;
use crate::adapter::Hub;
use crate::channel::{CHUNK, ChannelPath, Other};
use crate::link::{Atomic, LinkState, PeerMemory};
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::queue::SendWqe;
use crate::requester;
use crate::slab::Slab;
use crate::types::{
    Access, Flush, LinkId, Payload, Placement, QpType, SendFlags, SendOp, SendWr, To, WcStatus,
};
use crate::watch;

/// The memory of the peer that a request is about.
#[derive(Clone, Copy)]
struct Target {
    addr: u64,
    rkey: u32,
    length: u32,
    /// What is to be done there, as the right that it takes.
    right: Access,
}

impl Target {
    /// `None` for a request that only the peer can execute.
    #[inline]
    fn of(op: &SendOp, length: u32) -> Option<Self> {
        let (addr, rkey, right) = match *op {
            SendOp::Write { addr, rkey } => (addr, rkey, Access::REMOTE_WRITE),
            SendOp::Read { addr, rkey } => (addr, rkey, Access::REMOTE_READ),
            _ => return None,
        };
        (length > 0).then_some(Self { addr, rkey, length, right })
    }

    fn is_write(self) -> bool {
        self.right == Access::REMOTE_WRITE
    }

    /// Moves `len` bytes, behind the `done` that were moved before, between `local` and the memory of the
    /// peer at the other end of `path`. The whole request is checked each time, so that a part of it is
    /// moved only where all of it may be. `None`: the peer does not let this side do it, and has to be asked.
    #[inline]
    fn move_bytes(
        self,
        path: &ChannelPath,
        state: &LinkState,
        (done, len): (u32, u32),
        local: &[(usize, usize)],
    ) -> Option<()> {
        self.reach(path, state, |memory, addr| {
            let remote = [(addr.wrapping_add(u64::from(done)), u64::from(len))];
            let moved = match self.is_write() {
                true => memory.write(local, &remote),
                false => memory.read(&remote, local),
            };
            moved.ok()
        })
    }

    /// Touches the memory at the other end of `path`, of which the address is passed on, if the peer grants
    /// it at this moment.
    #[inline]
    fn reach<T>(
        self,
        path: &ChannelPath,
        state: &LinkState,
        touch: impl FnOnce(&dyn PeerMemory, u64) -> Option<T>,
    ) -> Option<T> {
        let memory = state.link.peer_memory.as_ref()?;
        let directory = state.directory.as_ref()?;
        let (key, whole, right) = (Key(self.rkey), u64::from(self.length), self.right);
        state.guarded(|| {
            let grants = path.channel.outgoing.control.grants();
            if !Access::from_bits_truncate(grants).contains(right) {
                return None;
            }
            let range =
                directory.lookup(path.peer_pd, path.peer_qp, key, self.addr, whole, right).ok()?;
            touch(&**memory, range.addr)
        })
    }
}

/// The link over which the peer's memory is reached, if everything that was asked of the peer is executed, so
/// that order is kept.
#[inline]
pub(super) fn open_link<'a>(
    qp: &'a Qp,
    links: &'a Slab<LinkId, LinkState>,
) -> Option<(&'a ChannelPath, &'a LinkState)> {
    let (path, link) = link_of(qp)?;
    let started = qp.requester.started;
    // What an unreliable queue pair has sent counts as acknowledged, whether it is executed or not.
    let known = qp.qp_type.is_reliable() && qp.requester.acked == started;
    let executed = known || path.channel.outgoing.control.executed() == started;
    executed.then_some(())?;
    Some((path, links.get(link)?))
}

/// The channel and link of a queue pair that may reach its peer's memory.
#[inline]
fn link_of(qp: &Qp) -> Option<(&ChannelPath, LinkId)> {
    let Path::Channel(path) = &qp.path else { return None };
    let Other::Linked { link, .. } = path.other else { return None };
    // Which protection domains an XRC responder stands for is not known here.
    (!qp.qp_type.names_srq()).then_some((path, link))
}

/// Whether a long read would be executed directly as soon as the reads before it are answered, for which it
/// waits then: if the peer were asked for it, it would be for all behind it too, as long as the program has
/// some outstanding.
pub(super) fn waits_for_answers<P>(qp: &Qp, hub: &Hub<P>, wqe: &SendWqe) -> bool {
    let requester = &qp.requester;
    let outstanding = requester.started.wrapping_sub(requester.acked);
    let long = wqe.length > hub.config.copy_limit;
    if !long || requester.reads == 0 || outstanding > requester.reads {
        return false;
    }
    let Some(target) = Target::of(&wqe.op, wqe.length).filter(|it| !it.is_write()) else {
        return false;
    };
    let barred = matches!(&qp.path, Path::Channel(path) if path.barred);
    !barred && is_granted(qp, hub, target)
}

/// Memory of the peer as it is mapped here, if the peer grants to write there at this moment. What is written
/// there later is no request, and nobody checks it.
pub(crate) fn view<P: Probe>(
    qp: &Qp,
    hub: &Hub<P>,
    (addr, length): (u64, u32),
    key: Key,
) -> Option<Segment> {
    if hub.probe.watches() || hub.qos.is_some() || !matches!(qp.qp_type, QpType::Rc) {
        return None;
    }
    let target = Target { addr, rkey: key.0, length, right: Access::REMOTE_WRITE };
    let (path, link) = link_of(qp).filter(|_| length > 0)?;
    let view = |memory: &dyn PeerMemory, addr| memory.view(addr, length.into());
    target.reach(path, hub.links.get(link)?, view)
}

/// Whether some memory of the peer is mapped here.
pub(crate) fn is_peer_mapped<P>(qp: &Qp, hub: &Hub<P>) -> bool {
    let link = link_of(qp).and_then(|(_, link)| hub.links.get(link));
    link.and_then(|state| state.link.peer_memory.as_ref()).is_some_and(|memory| memory.is_mapped())
}

/// Whether the peer lets this side into its memory for a request.
fn is_granted<P>(qp: &Qp, hub: &Hub<P>, target: Target) -> bool {
    let state = |(path, link)| Some((path, hub.links.get(link)?));
    let near = link_of(qp).and_then(state);
    near.is_some_and(|(path, state)| target.reach(path, state, |_, _| Some(())).is_some())
}

/// What is to be done to which word, and the key for it. `None` for what is no atomic.
fn atomic_of(op: &SendOp) -> Option<(u64, u32, Atomic)> {
    match *op {
        SendOp::FetchAdd { addr, rkey, add } => Some((addr, rkey, Atomic::FetchAdd(add))),
        SendOp::CompareSwap { addr, rkey, compare, swap } => {
            Some((addr, rkey, Atomic::CompareSwap { compare, swap }))
        }
        _ => None,
    }
}

/// Executes an atomic, and returns the word before it.
fn execute(
    (addr, rkey, atomic): (u64, u32, Atomic),
    length: u32,
    path: &ChannelPath,
    state: &LinkState,
) -> Option<u64> {
    let target = Target { addr, rkey, length, right: Access::REMOTE_ATOMIC };
    target.reach(path, state, |memory, addr| memory.atomic(addr, atomic))
}

/// Executes a request of one piece while it is being posted, where nothing stands before it. `false` if
/// that is not possible, for this or any other reason: the caller finds out which.
#[inline]
pub(crate) fn execute_at_once<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wr: &SendWr<'_>) -> bool {
    match atomic_of(&wr.op) {
        Some(atomic) => atomic_at_once(qp, hub, wr, atomic),
        None => move_at_once(qp, hub, wr),
    }
}

fn atomic_at_once<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    wr: &SendWr<'_>,
    atomic: (u64, u32, Atomic),
) -> bool {
    let Payload::Sges([sge]) = wr.payload else { return false };
    if hub.probe.watches() || qp.requester.reads > 0 || !has_right_of_way(qp, hub, wr) {
        return false;
    }
    // Looked at before, since what was executed cannot be taken back.
    let Ok(answer) = hub.regions.local(qp.pd_number(), sge, true) else { return false };
    if answer.len() != 8 || qp.sq.max_sge() == 0 {
        return false;
    }
    let original =
        open_link(qp, &hub.links).and_then(|(path, state)| execute(atomic, sge.len, path, state));
    let Some(original) = original else { return false };
    answer.write_from(0, &original.to_ne_bytes());
    done_at_once(qp, hub, wr, sge.len, Stage::PutData);
    true
}

#[inline]
fn move_at_once<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wr: &SendWr<'_>) -> bool {
    let Some(length) = move_now(qp, hub, wr) else { return false };
    done_at_once(qp, hub, wr, length, Stage::GetData);
    true
}

/// Moves the bytes of a write or read of one piece, where nothing stands before it; how many.
#[inline]
fn move_now<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wr: &SendWr<'_>) -> Option<u32> {
    let length = wr.payload.len();
    // What is watched goes the way on which it is told of.
    if length > u64::from(CHUNK.min(hub.config.max_message)) || hub.probe.watches() {
        return None;
    }
    let length = length as u32;
    let target = Target::of(&wr.op, length)?;
    if qp.requester.reads > 0 || !has_right_of_way(qp, hub, wr) {
        return None;
    }
    let local = match wr.payload {
        Payload::Inline(bytes) if target.is_write() && bytes.len() <= qp.sq.max_inline() => {
            (bytes.as_ptr().expose_provenance(), bytes.len())
        }
        Payload::Sges([sge]) if qp.sq.max_sge() > 0 => {
            match hub.regions.local(qp.pd_number(), sge, !target.is_write()) {
                Ok(span) => span.as_raw(),
                Err(_) => return None,
            }
        }
        _ => return None,
    };
    let (path, state) = open_link(qp, &hub.links)?;
    target.move_bytes(path, state, (0, length), &[local])?;
    Some(length)
}

/// Writes memory of this side into that of the peer, where nothing that was posted before is still to be
/// executed, and the peer grants it. It is no request: it completes nothing. `false` if it is not written.
pub(crate) fn write_now<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, sge: Sge, to: (u64, Key)) -> bool {
    let (addr, rkey) = (to.0, to.1.0);
    let (op, list) = (SendOp::Write { addr, rkey }, [sge]);
    let (flags, payload) = (SendFlags::empty(), Payload::Sges(&list));
    let wr = SendWr { wr_id: 0, to: To::Peer, op, flags, payload };
    let moved = move_now(qp, hub, &wr);
    if let Some(length) = moved {
        hub.moved_at_once += u64::from(length);
        hub.probe.stage(Stage::GetData, length as usize);
    }
    moved.is_some()
}

/// Completes a request that was executed while it was being posted.
#[inline]
fn done_at_once<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    wr: &SendWr<'_>,
    length: u32,
    stage: Stage,
) {
    let done = qp.requester.started;
    qp.sq.push_transmitted(wr, length, done..done);
    hub.moved_at_once += u64::from(length);
    hub.probe.stage(stage, length as usize);
    requester::complete_done(qp, hub);
}

/// Executes the next chunk of the request at `sq.next`. `None` if that is not possible: then the peer is
/// asked.
pub(super) fn step<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wqe: &SendWqe) -> Option<Step> {
    let Some(target) = Target::of(&wqe.op, wqe.length) else {
        return match wqe.op {
            SendOp::Flush(flush) => step_flush(qp, hub, wqe, flush),
            _ => step_atomic(qp, hub, wqe),
        };
    };
    let (path, state) = open_link(qp, &hub.links)?;
    let done = path.direct_done;
    let len = (wqe.length - done).min(CHUNK).min(lanes::room(qp, hub));
    let mut local = std::mem::take(&mut hub.scratch);
    local.clear();
    let (pd, position) = (qp.pd_number(), qp.sq.next);
    let gathered = match qp.sq.inline(position) {
        Some(bytes) => {
            let part = &bytes[done as usize..(done + len) as usize];
            local.push((part.as_ptr().expose_provenance(), part.len()));
            true
        }
        None => hub
            .regions
            .pieces(pd, qp.sq.sges(position), u64::from(done), u64::from(len), !target.is_write())
            .try_for_each(|piece| piece.map(|piece| local.push(piece.as_raw())))
            .is_ok(),
    };
    let moved = match gathered {
        true => target.move_bytes(path, state, (done, len), &local),
        false => None,
    };
    hub.scratch = local;
    if !gathered {
        return Some(Step::Failed(WcStatus::LocProtErr));
    }
    let barred = moved.is_none() && is_granted(qp, hub, target);
    if let Path::Channel(path) = &mut qp.path {
        path.barred = barred;
    }
    moved?;
    hub.moved_at_once += u64::from(len);
    hub.probe.stage(Stage::GetData, len as usize);
    end(qp, hub, wqe, done + len);
    Some(Step::Moved(len))
}

/// The same for an atomic.
fn step_atomic<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wqe: &SendWqe) -> Option<Step> {
    let atomic = atomic_of(&wqe.op)?;
    let (path, state) = open_link(qp, &hub.links)?;
    let (pd, list) = (qp.pd_number(), qp.sq.sges(qp.sq.next));
    // Looked at before, since what was executed cannot be taken back.
    if !hub.regions.pieces(pd, list, 0, 8, true).all(|piece| piece.is_ok()) {
        return Some(Step::Failed(WcStatus::LocProtErr));
    }
    let original = execute(atomic, wqe.length, path, state)?;
    let placed = hub.regions.scatter(pd, list, 0, &original.to_ne_bytes());
    if placed.is_err() {
        return Some(Step::Failed(WcStatus::LocProtErr));
    }
    hub.probe.stage(Stage::PutData, 8);
    end(qp, hub, wqe, wqe.length);
    Some(Step::Moved(wqe.length))
}

/// The same for a flush: what was written before, by this side too, is where all of the host sees it. That
/// the peer grants it is all that is looked for.
fn step_flush<P: Probe>(
    qp: &mut Qp,
    hub: &mut Hub<P>,
    wqe: &SendWqe,
    flush: Flush,
) -> Option<Step> {
    let length = u32::try_from(flush.len).ok().filter(|&length| length > 0)?;
    if flush.whole || flush.placement != Placement::GLOBAL {
        return None;
    }
    let (path, state) = open_link(qp, &hub.links)?;
    let Flush { addr, rkey, .. } = flush;
    let target = Target { addr, rkey, length, right: Access::FLUSH_GLOBAL };
    target.reach(path, state, |_, _| Some(()))?;
    end(qp, hub, wqe, wqe.length);
    Some(Step::Moved(0))
}

/// Counts what was moved; the request needs no acknowledgement of its own.
fn end<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, wqe: &SendWqe, done: u32) {
    let Path::Channel(path) = &mut qp.path else { return };
    let moved = done.saturating_sub(path.direct_done);
    lanes::charge(qp, hub, moved);
    let Path::Channel(path) = &mut qp.path else { return };
    if done < wqe.length {
        path.direct_done = done;
        return;
    }
    path.direct_done = 0;
    if hub.probe.watches() {
        watch::posted(qp, hub);
        if wqe.wants_answer() {
            watch::answered(qp, hub, qp.sq.next);
        }
    }
    let state = qp.sq.wqe_mut(qp.sq.next);
    state.first_request = qp.requester.started;
    state.end_request = qp.requester.started;
    state.answered = true;
    requester::transmitted(qp);
    requester::complete_done(qp, hub);
}
