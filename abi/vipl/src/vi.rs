//! VIs: creation, attributes, state, and the connection that one has.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::Arc;

use quipu::{Access, QueuePair};
use quipu_cabi::entry;
use quipu_via::attributes::Attributes;
use quipu_via::codes::{Code, Outcome, Reliability, State as ViState};
use quipu_via::descriptor::{MAX_INLINE, MAX_SEGMENTS, Rules};
use quipu_via::vi::{Completed, Event, Side, Vi};

use crate::callback::Notify;
use crate::handle::{self, Id, Kind};
use crate::nic::{MAX_VIS, Nic, State, report};
use crate::peer::PeerRequest;
use crate::ring::{RECEIVES, SENDS};
use crate::touch::{give, take};
use crate::types::{VIP_PVOID, VIP_VI_ATTRIBUTES, VipReturn, code};

/// A VI of a program.
pub(crate) struct Entry {
    pub(crate) vi: Vi,
    pub(crate) tag: Option<Id>,
    send_cq: Option<Id>,
    receive_cq: Option<Id>,
    send_notifies: VecDeque<Notify>,
    receive_notifies: VecDeque<Notify>,
    pub(crate) link: Option<Link>,
    pub(crate) peer: Option<Arc<PeerRequest>>,
}

/// A connection of a VI, or one that is being made.
pub(crate) struct Link {
    pub(crate) qp: QueuePair,
    /// Which of the adapter's completion queues it uses.
    ring: usize,
    /// Tells it from earlier connections of the VI.
    pub(crate) generation: u32,
    /// Whether its completions count.
    pub(crate) live: bool,
    /// The connection over which it was set up. Its end is the end of this one.
    pub(crate) stream: Option<Arc<TcpStream>>,
}

impl Entry {
    /// The completion queue of a work queue.
    pub(crate) fn cq(&self, side: Side) -> Option<Id> {
        match side {
            Side::Send => self.send_cq,
            Side::Receive => self.receive_cq,
        }
    }

    /// Handlers that wait for a work queue.
    pub(crate) fn notifies(&mut self, side: Side) -> &mut VecDeque<Notify> {
        match side {
            Side::Send => &mut self.send_notifies,
            Side::Receive => &mut self.receive_notifies,
        }
    }

    /// Whether a handler waits for a descriptor.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.send_notifies.is_empty() || !self.receive_notifies.is_empty()
    }

    pub(crate) fn rules(&self, strict: bool) -> Rules {
        Rules { attributes: self.vi.attributes, strict }
    }
}

impl State {
    /// A VI.
    pub(crate) fn vi(&mut self, id: Id) -> Outcome<&mut Entry> {
        self.vis.get_mut(&id).ok_or(Code::InvalidParameter)
    }

    /// The VI, if it still has this connection.
    pub(crate) fn linked(&mut self, id: Id, generation: u32) -> Outcome<&mut Entry> {
        let entry = self.vis.get_mut(&id).ok_or(Code::InvalidParameter)?;
        let is_same = entry.link.as_ref().is_some_and(|link| link.generation == generation);
        if is_same { Ok(entry) } else { Err(Code::InvalidState) }
    }

    /// Gives up the connection of a VI.
    pub(crate) fn unlink(&mut self, id: Id) {
        let Some(link) = self.vis.get_mut(&id).and_then(|entry| entry.link.take()) else { return };
        if let Some(ring) = self.rings.get_mut(link.ring) {
            ring.vis -= 1;
        }
        if let Some(stream) = &link.stream {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Nic {
    /// Takes a VI from IDLE to CONNECT_PENDING, and makes a queue pair for it; the generation of its link,
    /// and the queue pair as the peer has to know it.
    pub(crate) fn begin(&self, id: Id) -> Outcome<(u32, [u8; 24])> {
        let mut state = self.lock();
        let state = &mut *state;
        let entry = state.vi(id)?;
        if entry.vi.state() != ViState::Idle {
            return Err(Code::InvalidState);
        }
        let (attributes, tag) = (entry.vi.attributes, entry.tag);
        let domain = state.domain(self, tag).ok_or(Code::InvalidPtag)?;
        let ring = self.ring(state).map_err(report)?;
        let cq = &state.rings[ring].cq;
        let mut access = Access::empty();
        access.set(Access::REMOTE_WRITE, attributes.rdma_write);
        access.set(Access::REMOTE_READ, attributes.rdma_read);
        let pieces = u32::from(MAX_SEGMENTS);
        let mut builder = domain
            .queue_pair(cq, cq)
            .send_queue(SENDS, pieces)
            .recv_queue(RECEIVES, pieces)
            .inline_data(MAX_INLINE)
            .remote_access(access)
            .rnr_retry(if self.holds_back { 7 } else { 0 });
        if attributes.reliability == Reliability::Unreliable {
            builder = builder.unreliable();
        }
        let qp = builder.build().map_err(report)?;
        state.rings[ring].vis += 1;
        let endpoint = qp.endpoint().to_bytes();
        let generation = handle::fresh() & 0x7fff_ffff;
        let entry = state.vi(id)?;
        entry.vi.change(Event::Request, &mut Completed::new())?;
        entry.link = Some(Link { qp, ring, generation, live: false, stream: None });
        Ok((generation, endpoint))
    }

    /// A request for a connection has come to nothing.
    pub(crate) fn give_up(&self, id: Id, generation: u32) {
        let mut state = self.lock();
        if let Ok(entry) = state.linked(id, generation) {
            let _ = entry.vi.change(Event::GiveUp, &mut Completed::new());
            state.unlink(id);
            self.wake(&state);
        }
    }

    /// Takes a VI to IDLE from any state, and flushes its queues.
    pub(crate) fn disconnect(&self, state: &mut State, id: Id) {
        self.pump(state);
        let Some(entry) = state.vis.get_mut(&id) else { return };
        if let Some(peer) = entry.peer.take() {
            peer.cancel();
        }
        let mut done = Completed::new();
        // Receives that an IDLE VI holds are flushed, too: the program has no other way to get them back.
        let _ = entry.vi.change(Event::Disconnect, &mut done);
        // First the queue pair, so that nothing touches the memory of what is flushed.
        state.unlink(id);
        self.deliver(state, id, &mut done);
        self.control.forget();
    }
}

/// Attributes of a program, checked.
fn checked(
    nic: &Nic,
    state: &State,
    raw: *const VIP_VI_ATTRIBUTES,
) -> Outcome<(Attributes, Option<Id>)> {
    let raw = take(raw)?;
    let rest = Attributes {
        reliability: Reliability::Delivery,
        max_transfer: raw.max_transfer_size,
        qos: raw.qos as u64,
        rdma_write: raw.enable_rdma_write != 0,
        rdma_read: raw.enable_rdma_read != 0,
    };
    let attributes = Attributes::checked(raw.reliability_level, rest)?;
    Ok((attributes, state.tag(nic, raw.ptag)?))
}

/// Attributes as a program sees them.
pub(crate) fn shown(attributes: &Attributes, ptag: VIP_PVOID) -> VIP_VI_ATTRIBUTES {
    VIP_VI_ATTRIBUTES {
        reliability_level: attributes.reliability as u16,
        max_transfer_size: attributes.max_transfer,
        qos: attributes.qos as VIP_PVOID,
        ptag,
        enable_rdma_write: i32::from(attributes.rdma_write),
        enable_rdma_read: i32::from(attributes.rdma_read),
    }
}

fn create(
    raw: VIP_PVOID,
    attributes: *const VIP_VI_ATTRIBUTES,
    cqs: [VIP_PVOID; 2],
    out: *mut VIP_PVOID,
) -> Outcome {
    let nic = handle::nic(raw)?.here()?;
    if out.is_null() {
        return Err(Code::InvalidParameter);
    }
    let mut state = nic.lock();
    let (attributes, tag) = checked(&nic, &state, attributes)?;
    let [send_cq, receive_cq] = cqs.map(|raw| {
        if raw.is_null() {
            return Ok(None);
        }
        let (of, id) = handle::object(Kind::Cq, raw)?;
        let is_ours = of.number == nic.number && state.cqs.contains_key(&id);
        if is_ours { Ok(Some(id)) } else { Err(Code::InvalidParameter) }
    });
    let (send_cq, receive_cq) = (send_cq?, receive_cq?);
    if state.vis.len() >= MAX_VIS {
        return Err(Code::ErrorResource);
    }
    let id = handle::fresh();
    let entry = Entry {
        vi: Vi::new(attributes),
        tag,
        send_cq,
        receive_cq,
        send_notifies: VecDeque::new(),
        receive_notifies: VecDeque::new(),
        link: None,
        peer: None,
    };
    state.vis.insert(id, entry);
    give(out, nic.handle_of(Kind::Vi, id))
}

fn destroy(raw: VIP_PVOID) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    let mut state = nic.lock();
    let entry = state.vi(id)?;
    if entry.vi.state() != ViState::Idle {
        return Err(Code::InvalidState);
    }
    if !entry.vi.is_drained() {
        return Err(Code::ErrorResource);
    }
    state.vis.remove(&id);
    for cq in state.cqs.values_mut() {
        cq.queue.forget(id);
    }
    Ok(())
}

fn set_attributes(raw: VIP_PVOID, attributes: *const VIP_VI_ATTRIBUTES) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    let mut state = nic.lock();
    state.vi(id)?;
    let (attributes, tag) = checked(&nic, &state, attributes)?;
    let entry = state.vi(id)?;
    if entry.vi.state() != ViState::Idle {
        return Err(Code::InvalidState);
    }
    (entry.vi.attributes, entry.tag) = (attributes, tag);
    Ok(())
}

fn query(
    raw: VIP_PVOID,
    out_state: *mut u32,
    out: *mut VIP_VI_ATTRIBUTES,
    empty: [*mut i32; 2],
) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    if out_state.is_null() || out.is_null() || empty.iter().any(|out| out.is_null()) {
        return Err(Code::InvalidParameter);
    }
    let mut state = nic.lock();
    nic.pump(&mut state);
    let entry = state.vi(id)?;
    let null = std::ptr::null_mut();
    let ptag = entry.tag.map_or(null, |tag| nic.handle_of(Kind::Ptag, tag));
    give(out_state, entry.vi.state() as u32)?;
    give(out, shown(&entry.vi.attributes, ptag))?;
    give(empty[0], i32::from(entry.vi.queue(Side::Send).is_empty()))?;
    give(empty[1], i32::from(entry.vi.queue(Side::Receive).is_empty()))
}

fn disconnect(raw: VIP_PVOID) -> Outcome {
    let (nic, id) = handle::object(Kind::Vi, raw)?;
    let mut state = nic.lock();
    state.vi(id)?;
    nic.disconnect(&mut state, id);
    Ok(())
}

entry! {
    /// `VipCreateVi`
    fn VipCreateVi(
        nic: VIP_PVOID,
        attributes: *const VIP_VI_ATTRIBUTES,
        send_cq: VIP_PVOID,
        receive_cq: VIP_PVOID,
        out: *mut VIP_PVOID,
    ) -> VipReturn {
        code(create(nic, attributes, [send_cq, receive_cq], out))
    }

    /// `VipDestroyVi`
    fn VipDestroyVi(vi: VIP_PVOID) -> VipReturn {
        code(destroy(vi))
    }

    /// `VipSetViAttributes`
    fn VipSetViAttributes(vi: VIP_PVOID, attributes: *const VIP_VI_ATTRIBUTES) -> VipReturn {
        code(set_attributes(vi, attributes))
    }

    /// `VipQueryVi`
    fn VipQueryVi(
        vi: VIP_PVOID,
        state: *mut u32,
        attributes: *mut VIP_VI_ATTRIBUTES,
        send_empty: *mut i32,
        receive_empty: *mut i32,
    ) -> VipReturn {
        code(query(vi, state, attributes, [send_empty, receive_empty]))
    }

    /// `VipDisconnect`
    fn VipDisconnect(vi: VIP_PVOID) -> VipReturn {
        code(disconnect(vi))
    }
}
