//! Between VIs and the adapter: requests go down, completions come up.

use std::os::fd::{AsRawFd, RawFd};

use quipu::{
    Completion, CompletionQueue, Key, QueuePair, RemoteMemory, Request, Sge, WcExtra, WcOpcode,
    WcStatus,
};
use quipu_via::codes::{AsyncError, Reliability, Resource, State as ViState, Status};
use quipu_via::descriptor::{Operation, Request as Asked};
use quipu_via::message::{Cause, Message};
use quipu_via::queue::{Ending, Head, Next};
use quipu_via::vi::{Completed, Event, Side};

use crate::callback::Callback;
use crate::cq::Cq;
use crate::handle::{Id, Kind};
use crate::nic::{Nic, State};
use crate::touch;
use crate::vi::{Entry, Link};

/// Requests of one VI that the adapter has at once; more wait in the VI.
pub(crate) const SENDS: u32 = 128;
pub(crate) const RECEIVES: u32 = 256;
/// VIs of a ring.
const VIS: u32 = 64;

/// A completion queue of the adapter, with room for all requests of the VIs that use it.
pub(crate) struct Ring {
    pub(crate) cq: CompletionQueue,
    pub(crate) vis: u32,
}

impl Ring {
    /// Takes the event that woke somebody.
    pub(crate) fn clear(&self) {
        let _ = self.cq.take_event();
    }
}

/// The number of a work request: which VI, which of its connections, which queue.
pub(crate) fn number(vi: Id, generation: u32, side: Side) -> u64 {
    u64::from(vi) << 32 | u64::from(generation << 1) | u64::from(side == Side::Receive)
}

fn parts(number: u64) -> (Id, u32, Side) {
    let side = if number & 1 == 1 { Side::Receive } else { Side::Send };
    ((number >> 32) as Id, number as u32 >> 1, side)
}

/// How a request of the adapter ended, in the words of a descriptor.
fn ending(completion: &Completion, operation: Status) -> Ending {
    let is_rdma = operation.intersects(Status::OP_RDMA_WRITE | Status::OP_RDMA_READ);
    let status = match completion.status {
        WcStatus::Success => Status::empty(),
        WcStatus::LocLenErr => Status::LENGTH_ERROR,
        WcStatus::LocProtErr | WcStatus::LocAccessErr => Status::PROTECTION_ERROR,
        WcStatus::WrFlushErr => Status::FLUSHED,
        WcStatus::RemAccessErr => Status::RDMA_PROT_ERROR,
        WcStatus::RemInvReqErr if is_rdma => Status::RDMA_PROT_ERROR,
        WcStatus::RemInvReqErr | WcStatus::RemOpErr | WcStatus::RnrRetryExcErr => {
            Status::REMOTE_DESC_ERROR
        }
        _ => Status::TRANSPORT_ERROR,
    };
    if status.is_error() {
        return Ending::failed(status);
    }
    let remote_write = completion.opcode == WcOpcode::RecvRdmaWithImm;
    let status = if remote_write { Status::OP_REMOTE_RDMA_WRITE } else { status };
    let immediate = match completion.extra {
        WcExtra::Imm(immediate) => Some(immediate),
        _ => None,
    };
    Ending { status, len: completion.byte_len, immediate }
}

/// What the peer is told of a failure.
fn cause(status: Status, completion: &Completion) -> Option<Cause> {
    if status.contains(Status::RDMA_PROT_ERROR) {
        let is_read = status.contains(Status::OP_RDMA_READ);
        return Some(if is_read { Cause::ReadRefused } else { Cause::WriteRefused });
    }
    (completion.status == WcStatus::RnrRetryExcErr).then_some(Cause::NoReceive)
}

impl Nic {
    /// A ring with room for one more VI.
    pub(crate) fn ring(&self, state: &mut State) -> Result<usize, quipu::Error> {
        if let Some(index) = state.rings.iter().position(|ring| ring.vis < VIS) {
            return Ok(index);
        }
        let cq = self.device.completion_queue(VIS * (SENDS + RECEIVES))?;
        state.rings.push(Ring { cq, vis: 0 });
        Ok(state.rings.len() - 1)
    }

    /// Asks for events at the next completions; the descriptors that become readable then.
    pub(crate) fn arm(&self, state: &State) -> Vec<RawFd> {
        let arm = |ring: &Ring| {
            let _ = ring.cq.request_event(false);
            ring.cq.as_raw_fd()
        };
        state.rings.iter().map(arm).collect()
    }

    /// Takes completions from the adapter, and tells their VIs.
    pub(crate) fn pump(&self, state: &mut State) {
        let mut out = [Completion::default(); 32];
        for index in 0..state.rings.len() {
            loop {
                let found = state.rings[index].cq.poll(&mut out).unwrap_or(0);
                for completion in &out[..found] {
                    self.completed(state, completion);
                }
                if found < out.len() {
                    break;
                }
            }
        }
    }

    fn completed(&self, state: &mut State, completion: &Completion) {
        let (id, generation, side) = parts(completion.wr_id);
        let Some(entry) = state.vis.get_mut(&id) else { return };
        if !entry.link.as_ref().is_some_and(|link| link.live && link.generation == generation) {
            return;
        }
        let mut done = Completed::new();
        let operation = entry.vi.queue(side).operation();
        let mut ending = ending(completion, operation);
        if side == Side::Send && !ending.status.is_error() {
            ending.len = entry.vi.queue(side).asked_len();
        }
        let is_broken = entry.vi.complete(side, ending, ending.status.is_error(), &mut done);
        let cause = cause(ending.status | operation, completion);
        self.deliver(state, id, &mut done);
        if is_broken {
            self.broken(state, id, cause);
        } else {
            self.feed(state, id);
        }
    }

    /// A failure has broken the connection of a VI: tells the peer.
    fn broken(&self, state: &mut State, id: Id, cause: Option<Cause>) {
        let link = state.vis.get_mut(&id).and_then(|entry| entry.link.as_mut());
        let Some(link) = link else { return };
        // The queue pair stays until the program disconnects; what it still reports is known already.
        link.live = false;
        if let Some(stream) = &link.stream {
            if let Some(cause) = cause {
                use std::io::Write;
                let _ = (&**stream).write_all(&Message::Cause(cause).to_bytes());
            }
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
    }

    /// Gives the adapter what a VI has for it.
    pub(crate) fn feed(&self, state: &mut State, id: Id) {
        let mut done = Completed::new();
        let Some(entry) = state.vis.get_mut(&id) else { return };
        let mut is_broken = false;
        for (side, room) in [(Side::Receive, RECEIVES), (Side::Send, SENDS)] {
            is_broken = is_broken
                || entry.vi.fail_malformed(side, &mut done)
                || !hand(entry, id, side, room as usize);
        }
        if is_broken {
            // The adapter refuses: the connection cannot go on.
            let _ = entry.vi.change(Event::Break, &mut done);
        }
        self.deliver(state, id, &mut done);
        if is_broken {
            self.broken(state, id, None);
        }
    }

    /// Writes descriptors that are done, and tells completion queues and handlers.
    pub(crate) fn deliver(&self, state: &mut State, id: Id, done: &mut Completed) {
        if done.is_empty() {
            return;
        }
        for (side, done) in done.drain(..) {
            let way = state.way(done.handle, done.descriptor, 32);
            if !touch::complete(&done, way) {
                let about = Some(done.descriptor);
                self.raise(id, AsyncError::CompletionProtection, Resource::Descriptor, about);
            }
            let Some(entry) = state.vis.get(&id) else { continue };
            let Some(cq_id) = entry.cq(side) else { continue };
            if let Some(cq) = state.cqs.get_mut(&cq_id) {
                if !cq.queue.push(id, side) {
                    self.raise_cq(cq_id);
                }
                self.notify_cq(state, cq_id);
            }
        }
        for side in [Side::Send, Side::Receive] {
            self.notify_vi(state, id, side);
        }
        self.wake(state);
    }

    /// Calls handlers that wait for descriptors of a queue.
    pub(crate) fn notify_vi(&self, state: &mut State, id: Id, side: Side) {
        let Some(entry) = state.vis.get_mut(&id) else { return };
        while !entry.notifies(side).is_empty() && entry.vi.queue(side).is_done() {
            let (Head::Succeeded(descriptor) | Head::Failed(descriptor)) = entry.vi.take(side)
            else {
                return;
            };
            let Some(notify) = entry.notifies(side).pop_front() else { return };
            let vi = self.handle_of(Kind::Vi, id) as usize;
            let nic = self.handle() as usize;
            self.callbacks.push(Callback::Descriptor { notify, nic, vi, descriptor });
        }
    }

    /// Whether something of a connection may still be under way although the peer has left: sends without
    /// an outcome, and at the unreliable level whatever is `early`.
    pub(crate) fn has_last_words(
        &self,
        state: &mut State,
        id: Id,
        generation: u32,
        early: bool,
    ) -> bool {
        let Ok(entry) = state.linked(id, generation) else { return false };
        let is_unreliable = entry.vi.attributes.reliability == Reliability::Unreliable;
        entry.vi.state() == ViState::Connected
            && (entry.vi.queue(Side::Send).in_adapter() > 0 || early && is_unreliable)
    }

    /// The peer says that a request of its own was refused here.
    pub(crate) fn blamed(&self, state: &mut State, id: Id, generation: u32, cause: Cause) {
        if state.linked(id, generation).is_err() {
            return;
        }
        let error = match cause {
            Cause::WriteRefused => AsyncError::RdmaWriteProtection,
            Cause::ReadRefused => AsyncError::RdmaReadProtection,
            Cause::NoReceive => AsyncError::ReceiveQueueEmpty,
        };
        self.raise(id, error, Resource::Vi, None);
    }

    /// The peer of a VI is gone.
    pub(crate) fn lost(&self, state: &mut State, id: Id, generation: u32) {
        let Ok(entry) = state.linked(id, generation) else { return };
        let mut done = Completed::new();
        let breaks = entry.vi.change(Event::Break, &mut done).is_ok();
        self.raise(id, AsyncError::ConnectionLost, Resource::Vi, None);
        self.deliver(state, id, &mut done);
        if breaks {
            self.broken(state, id, None);
        }
        self.wake(state);
    }
}

/// Hands the adapter as many requests of a queue as it has room for. False if it refuses one.
fn hand(entry: &mut Entry, id: Id, side: Side, room: usize) -> bool {
    let Some(Link { qp, generation, .. }) = entry.link.as_ref().filter(|link| link.live) else {
        return true;
    };
    let number = number(id, *generation, side);
    while let Next::Hand(request) = entry.vi.next(side, room) {
        if post(qp, number, request).is_err() {
            return false;
        }
        entry.vi.handed(side);
    }
    true
}

fn post(qp: &QueuePair, number: u64, asked: &Asked) -> Result<(), quipu::Error> {
    let sges: Vec<Sge> = asked
        .local
        .iter()
        .filter(|segment| segment.len > 0)
        .map(|segment| Sge { addr: segment.addr, len: segment.len, lkey: Key(segment.handle) })
        .collect();
    let remote = |segment: quipu_via::descriptor::Segment| RemoteMemory {
        addr: segment.addr,
        len: u64::from(asked.len),
        rkey: Key(segment.handle),
    };
    let mut request = match asked.operation {
        Operation::Receive => return qp.post_recv(number, &sges),
        Operation::Send if asked.is_inline => Request::send_inline(&asked.inline),
        Operation::Send => Request::send(&sges),
        Operation::Write(segment) if asked.is_inline => {
            Request::write_inline(&asked.inline, remote(segment))
        }
        Operation::Write(segment) => Request::write(&sges, remote(segment)),
        Operation::Read(segment) => Request::read(&sges, remote(segment)),
    };
    if let Some(immediate) = asked.immediate {
        request = request.with_imm(immediate);
    }
    if asked.fence {
        request = request.fence();
    }
    qp.post_send(&request.id(number))
}

impl State {
    /// Whether a handler waits for a completion.
    pub(crate) fn has_notifies(&self) -> bool {
        self.vis.values().any(Entry::is_awaited) || self.cqs.values().any(Cq::is_awaited)
    }
}
