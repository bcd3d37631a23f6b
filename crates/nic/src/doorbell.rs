//! The doorbell state machine: takes notice of posted work requests.
//!
//! Posting writes a ring; the doorbell then hands the queue pair to the transmit state machine, at once
//! where that costs no system call (channels), in its turn where many requests are better gathered into
//! one send (streams).

use quipu_mem::{Key, Sge};

use crate::adapter::{Adapter, Hub};
use crate::channel::Other;
use crate::datagram::{self, Destination};
use crate::error::Fault;
use crate::plain;
use crate::probe::{Probe, Stage};
use crate::qp::{Path, Qp};
use crate::qpip::{connections, udp};
use crate::receive;
use crate::requester;
use crate::transmit;
use crate::types::{
    CqId, Payload, QpId, QpState, QpType, SendOp, SendWr, SrqId, Time, TimeSource, To,
};

/// Bytes that the payload of a request has, after checking it against the limits of its queue pair.
fn payload_len(qp: &Qp, wr: &SendWr<'_>, max_message: u32) -> Result<u32, Fault> {
    let length = match wr.payload {
        Payload::Sges(sges) => {
            if sges.len() > qp.sq.max_sge() {
                return Err(Fault::Invalid("more scatter/gather elements than max_send_sge"));
            }
            sges.iter().map(|sge| u64::from(sge.len)).sum()
        }
        Payload::Inline(bytes) => {
            // The 8 bytes of an atomic write fit into any request.
            let whole = matches!(wr.op, SendOp::AtomicWrite { .. }) && bytes.len() == 8;
            if bytes.len() > qp.sq.max_inline() && !whole {
                return Err(Fault::Invalid("more inline data than max_inline_data"));
            }
            bytes.len() as u64
        }
    };
    if length > u64::from(max_message) {
        return Err(Fault::Invalid("message longer than the port's max_msg_sz"));
    }
    let inline = matches!(wr.payload, Payload::Inline(_));
    match wr.op {
        SendOp::Read { .. } if inline => Err(Fault::Invalid("a read cannot be inline")),
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if inline || length != 8 => {
            Err(Fault::Invalid("an atomic needs 8 bytes for the original value"))
        }
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if !plain::does_atomics(qp) => {
            Err(Fault::Invalid("plain iWARP has no atomics unless both ends agreed on them"))
        }
        SendOp::AtomicWrite { addr, .. } if length != 8 || addr % 8 != 0 => Err(Fault::Invalid(
            "an atomic write needs 8 bytes and a remote address that is a \
                multiple of 8",
        )),
        SendOp::Flush(flush) if flush.placement.is_empty() => {
            Err(Fault::Invalid("IBV_WR_FLUSH needs a placement type"))
        }
        SendOp::Flush(_) | SendOp::LocalInv { .. } | SendOp::BindMw(_) => Ok(0),
        _ => Ok(length as u32),
    }
}

/// Whether a request names a shared receive queue, if it needs one.
fn names_srq(wr: &SendWr<'_>) -> bool {
    use SendOp::{Send, SendImm, SendInv, WriteImm};
    let receives = matches!(wr.op, Send | SendImm(_) | SendInv(_) | WriteImm { .. });
    !receives || matches!(wr.to, To::Srq(number) if number <= 0x00ff_ffff)
}

/// What a request is checked for before it is taken; the bytes of its payload.
#[inline]
pub(crate) fn acceptable(qp: &Qp, wr: &SendWr<'_>, max_message: u32) -> Result<u32, Fault> {
    if matches!(qp.state, QpState::Reset | QpState::Init | QpState::Rtr) {
        return Err(Fault::WrongState);
    }
    if !qp.qp_type.offers(&wr.op) {
        return Err(Fault::Invalid("the queue pair's service has no such operation"));
    }
    if qp.qp_type.names_srq() && !names_srq(wr) {
        return Err(Fault::Invalid(
            "an XRC send needs the number of the peer's shared receive \
            queue",
        ));
    }
    payload_len(qp, wr, max_message)
}

/// Where a request goes, if its queue pair sends datagrams.
#[inline]
pub(crate) fn destination<P>(
    qp: &Qp,
    hub: &Hub<P>,
    wr: &SendWr<'_>,
) -> Result<Option<Destination>, Fault> {
    match (qp.qp_type, wr.to) {
        (QpType::Ud, To::Datagram { ah, qpn, qkey }) => {
            datagram::resolve(qp, hub, ah, qpn, qkey).map(Some)
        }
        (QpType::Udp, To::Address(to)) => {
            udp::check(hub, to, wr.payload.len())?;
            Ok(Some(Destination::of_address(to)))
        }
        (QpType::Ud | QpType::Udp, _) => Err(Fault::Invalid("a datagram needs an address handle")),
        (_, To::Address(_)) => Err(Fault::Invalid("only UDP queue pairs send to an address")),
        (QpType::Tcp, To::Peer) => connections::check_send(qp, wr.payload.len()).map(|()| None),
        (_, To::Datagram { .. }) => Err(Fault::Invalid(
            "a connected queue pair cannot send to an \
            address handle",
        )),
        _ => Ok(None),
    }
}

/// How many completions of a queue pair's receives, or of its other requests, wait to be taken.
fn unread<P>(cq: CqId, qp: &Qp, hub: &Hub<P>, receives: bool) -> u32 {
    hub.cqs.get(cq).map_or(0, |cq| cq.unread(qp.num, receives))
}

/// Whether the send queue has room. A request keeps its place until its completion was taken, as with the
/// adapters of hardware, so that programs which post as long as there is room overrun no completion queue;
/// who has taken what is looked up only where it seems full.
#[inline]
pub(crate) fn has_room<P>(qp: &mut Qp, hub: &Hub<P>) -> bool {
    !qp.sq.seems_full() || make_room(qp, hub)
}

/// As [`has_room`], of the receive queue.
#[inline]
pub(crate) fn has_room_for_receives<P>(qp: &mut Qp, hub: &Hub<P>) -> bool {
    !qp.rq.seems_full() || make_room_for_receives(qp, hub)
}

#[cold]
fn make_room<P>(qp: &mut Qp, hub: &Hub<P>) -> bool {
    let unread = unread(qp.send_cq, qp, hub, false);
    qp.sq.taken_but(unread)
}

#[cold]
fn make_room_for_receives<P>(qp: &mut Qp, hub: &Hub<P>) -> bool {
    let unread = unread(qp.recv_cq, qp, hub, true);
    qp.rq.taken_but(unread)
}

/// Whether what a call completes at once to a queue of this queue pair must be told the time exactly.
#[inline]
fn wants_time<P>(qp: &Qp, hub: &Hub<P>, cq: CqId) -> bool {
    // The other end may complete and wait, too, where it is in this adapter.
    let own = matches!(&qp.path, Path::Channel(path) if matches!(path.other, Other::Own(_)));
    own || hub.is_timed(cq)
}

/// Whether its peer is another engine on this host.
#[inline]
fn is_linked(qp: &Qp) -> bool {
    matches!(&qp.path, Path::Channel(path) if matches!(path.other, Other::Linked { .. }))
}

impl<P: Probe> Adapter<P> {
    /// Checks a request for everything that [`post_send`](Self::post_send) may refuse it for, as if
    /// `ahead` others had been posted before it. Requests that are all checked before the first is
    /// posted are posted all or not at all (`ibv_wr_post(3)`).
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send).
    pub fn check_send(&mut self, id: QpId, wr: &SendWr<'_>, ahead: u32) -> Result<(), Fault> {
        self.settle_taken();
        let qp = self.qps.get(id).ok_or(Fault::NoSuchObject)?;
        acceptable(qp, wr, self.hub.config.max_message)?;
        destination(qp, &self.hub, wr)?;
        let unread = unread(qp.send_cq, qp, &self.hub, false);
        if qp.sq.has_room(unread, ahead) { Ok(()) } else { Err(Fault::QueueFull) }
    }

    /// Puts a request into the send queue. It is looked at when the doorbell rings; several may be posted
    /// before that.
    ///
    /// # Errors
    /// The queue is full, the state forbids sending (RESET, INIT, RTR), or the request exceeds a limit.
    #[inline]
    pub fn post_send(&mut self, id: QpId, wr: &SendWr<'_>) -> Result<(), Fault> {
        let qp = self.qps.get_mut(id).ok_or(Fault::NoSuchObject)?;
        if transmit::channel::express(qp, &mut self.hub, wr) {
            return Ok(());
        }
        // There may be room then.
        self.settle_taken();
        let qp = self.qps.get_mut(id).ok_or(Fault::NoSuchObject)?;
        let length = acceptable(qp, wr, self.hub.config.max_message)?;
        let to = destination(qp, &self.hub, wr)?;
        if !has_room(qp, &self.hub) {
            return Err(Fault::QueueFull);
        }
        qp.sq.push(wr, length);
        if let Some(to) = to {
            qp.sq.set_destination(to);
        }
        qp.requester.waiting_bytes += u64::from(length);
        Ok(())
    }

    /// Whether the doorbell of `id` may set a timer, or completes what keeps its time, so that it must be
    /// told the time exactly; otherwise any time up to now will do.
    #[inline]
    pub fn doorbell_wants_time(&self, id: QpId) -> bool {
        self.qps.get(id).is_some_and(|qp| {
            let waits = match &qp.path {
                // What an unreliable one has no room for waits for a limited time.
                Path::Channel(_) => !qp.qp_type.is_reliable() && qp.sq.has_waiting(),
                Path::Datagrams { .. } | Path::Tcp(_) | Path::Udp(_) => false,
                _ => true,
            };
            // A port grants by the time.
            waits || self.hub.qos.is_some() || wants_time(qp, &self.hub, qp.send_cq)
        })
    }

    /// Does what [`ring_doorbell`](Self::ring_doorbell) would, if that is no more than to tell a peer on this
    /// host of what was transmitted while it was posted; `false` if there is more to it.
    #[inline]
    pub fn ring_at_once(&mut self, id: QpId) -> bool {
        let Some(qp) = self.qps.get_mut(id) else { return false };
        let ready = is_linked(qp) && !qp.sq.has_waiting() && qp.state == QpState::Rts;
        if !ready || !qp.qp_type.is_reliable() {
            return false;
        }
        self.hub.counters.doorbells += 1;
        self.hub.probe.stage(Stage::Doorbell, 0);
        transmit::channel::announce(qp, &mut self.hub);
        true
    }

    /// Posts a request and rings the doorbell, with one look for the queue pair, if it is one of a reliable
    /// connection to a peer on this host that is done at once: a small send that is transmitted, a small
    /// write that the peer has taken, or a write or read that is executed in the peer's memory. `false` if
    /// not, whatever the reason: then it is not posted, though bytes may be placed already, and
    /// [`post_send`](Self::post_send) says what is wrong, if anything is.
    #[inline(always)]
    pub fn post_at_once(&mut self, now: impl TimeSource, id: QpId, wr: &SendWr<'_>) -> bool {
        let Some(qp) = self.qps.get_mut(id) else { return false };
        let hub = &mut self.hub;
        if !matches!(qp.qp_type, QpType::Rc) || !is_linked(qp) || hub.qos.is_some() {
            return false;
        }
        if transmit::channel::send_at_once(qp, hub, wr) {
            transmit::channel::notify(qp, hub);
        } else {
            hub.now = now.time(hub.is_timed(qp.send_cq));
            // To go directly a request must be the only one.
            if let Some(taken) = hub.unsettled.take_if(|taken| taken.qp == id) {
                taken.settle(qp, hub);
            }
            if !transmit::offer::offer_at_once(qp, hub, wr)
                && !transmit::direct::execute_at_once(qp, hub, wr)
            {
                return false;
            }
        }
        hub.counters.doorbells += 1;
        hub.probe.stage(Stage::Doorbell, 0);
        true
    }

    /// Writes memory of this side into that of a queue pair's peer on this host while it is called, as a
    /// write of that queue pair would, but without a request: nothing completes, and nothing is posted.
    /// `false` if that is not possible now: what was posted before is not executed yet, the peer's
    /// memory cannot be reached or is not granted, or requests are watched. Nothing is said of why.
    pub fn write_now(&mut self, id: QpId, from: Sge, to: (u64, Key)) -> bool {
        let Some(qp) = self.qps.get_mut(id) else { return false };
        let hub = &mut self.hub;
        if !matches!(qp.qp_type, QpType::Rc) || !is_linked(qp) || hub.qos.is_some() {
            return false;
        }
        transmit::direct::write_now(qp, hub, from, to)
    }

    /// Posts a request and rings the doorbell, with one look for the queue pair, if it is one of a reliable
    /// connection over a stream, to its peer. `false` if it is not, or may not be posted: as above.
    pub fn post_to_stream(&mut self, id: QpId, wr: &SendWr<'_>) -> bool {
        let Some((qp, hub)) = self.qp_and_hub(id) else { return false };
        let suits = matches!((qp.qp_type, wr.to, qp.state), (QpType::Rc, To::Peer, QpState::Rts));
        if !suits || !matches!(qp.path, Path::Stream(_)) {
            return false;
        }
        let Ok(length) = acceptable(qp, wr, hub.config.max_message) else { return false };
        if !has_room(qp, hub) {
            return false;
        }
        qp.sq.push(wr, length);
        qp.requester.waiting_bytes += u64::from(length);
        hub.counters.doorbells += 1;
        hub.probe.stage(Stage::Doorbell, 0);
        if let Path::Stream(stream) = &mut qp.path {
            stream.make_ready(&mut hub.ready);
        }
        true
    }

    /// Tells the adapter that requests were posted to `id`.
    #[inline]
    pub fn ring_doorbell(&mut self, now: Time, id: QpId) {
        self.hub.counters.doorbells += 1;
        self.look_at_queue(now, id);
    }

    /// Looks at the send queue of `id`, of which something may be due.
    #[inline]
    pub(crate) fn look_at_queue(&mut self, now: Time, id: QpId) {
        self.hub.now = now;
        if let Some((qp, hub)) = self.qp_and_hub(id) {
            hub.probe.stage(Stage::Doorbell, 0);
            kick(qp, hub);
        }
        if self.hub.qos.as_ref().is_some_and(|qos| qos.is_due(now)) {
            self.serve_lanes();
        }
        if !self.hub.nudged.is_empty() {
            self.serve_nudged();
        }
    }

    /// Puts a receive request into the receive queue.
    ///
    /// # Errors
    /// The queue is full, the queue pair is in RESET or uses a shared queue, or there are too many elements.
    #[inline]
    pub fn post_recv(
        &mut self,
        now: impl TimeSource,
        id: QpId,
        wr_id: u64,
        sges: &[Sge],
    ) -> Result<(), Fault> {
        let qp = self.qps.get_mut(id).ok_or(Fault::NoSuchObject)?;
        if qp.state == QpState::Reset {
            return Err(Fault::WrongState);
        }
        if qp.srq.is_some() || !qp.qp_type.has_receives() {
            return Err(Fault::Invalid(
                "the queue pair uses a shared receive queue, or receives nothing",
            ));
        }
        if sges.len() > qp.rq.max_sge() {
            return Err(Fault::Invalid("more scatter/gather elements than max_recv_sge"));
        }
        if !has_room_for_receives(qp, &self.hub) {
            return Err(Fault::QueueFull);
        }
        qp.rq.push(wr_id, sges);
        if qp.state == QpState::Err {
            self.hub.now = now.time(wants_time(qp, &self.hub, qp.recv_cq));
            requester::flush(qp, &mut self.hub);
            return Ok(());
        }
        match &qp.path {
            Path::Channel(path) if path.stalled => {
                self.hub.now = now.time(wants_time(qp, &self.hub, qp.recv_cq));
                self.hub.nudged.push_back(id);
                self.serve_nudged();
            }
            Path::Tcp(_) => {
                let now = now.time(self.hub.is_timed(qp.recv_cq));
                self.posted_for_tcp(now, id);
            }
            _ => {}
        }
        Ok(())
    }

    #[cold]
    fn posted_for_tcp(&mut self, now: Time, id: QpId) {
        self.hub.now = now;
        if let Some((qp, hub)) = self.qp_and_hub(id) {
            receive::frames::posted(qp, hub);
        }
    }

    /// Puts a receive request into a shared receive queue.
    ///
    /// # Errors
    /// The queue is full or there are too many elements.
    pub fn post_srq_recv(
        &mut self,
        now: impl TimeSource,
        id: SrqId,
        wr_id: u64,
        sges: &[Sge],
    ) -> Result<(), Fault> {
        let srq = self.hub.srqs.get_mut(id).ok_or(Fault::NoSuchObject)?;
        if sges.len() > srq.queue.max_sge() {
            return Err(Fault::Invalid("more scatter/gather elements than the queue's max_sge"));
        }
        if !srq.queue.push(wr_id, sges) {
            return Err(Fault::QueueFull);
        }
        if !srq.awaited_by.is_empty() {
            self.hub.now = now.time(self.waiters_want_time(id));
            self.call_waiters(id);
        }
        Ok(())
    }

    /// Whether any of those whose peers wait for a receive of a shared queue wants the exact time for it.
    #[cold]
    fn waiters_want_time(&self, id: SrqId) -> bool {
        let Some(srq) = self.hub.srqs.get(id) else { return false };
        let mut waiting = srq.awaited_by.iter().filter_map(|&qp| self.qps.get(qp));
        waiting.any(|qp| wants_time(qp, &self.hub, srq.xrc.map_or(qp.recv_cq, |xrc| xrc.cq)))
    }

    /// Has those look again whose peers wait for a receive of a shared queue: as many as there are receives,
    /// in the order in which they came. Those for which none is left come again behind the others.
    pub(crate) fn call_waiters(&mut self, id: SrqId) {
        let mut listed = self.hub.srqs.get(id).map_or(0, |srq| srq.awaited_by.len());
        while listed > 0 {
            let Some(srq) = self.hub.srqs.get_mut(id) else { return };
            let called = listed.min(srq.queue.len() as usize);
            if called == 0 {
                return;
            }
            listed -= called;
            for id in srq.awaited_by.drain(..called) {
                if let Some(Path::Channel(path)) = self.qps.get_mut(id).map(|qp| &mut qp.path) {
                    path.awaiting = false;
                    self.hub.nudged.push_back(id);
                }
            }
            self.serve_nudged();
        }
    }
}

/// Sets a queue pair with waiting requests going, whatever its path.
#[inline]
pub(crate) fn kick<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if matches!(qp.state, QpState::Sqe | QpState::Err) {
        requester::flush(qp, hub);
        return;
    }
    match &mut qp.path {
        Path::Channel(_) => {
            transmit::channel::announce(qp, hub);
            if qp.sq.has_waiting() || !qp.qp_type.is_reliable() {
                transmit::channel::run(qp, hub);
            }
        }
        Path::Stream(stream) => stream.make_ready(&mut hub.ready),
        Path::None | Path::Pending(_) if qp.requester.away => crate::connect::drop_sends(qp, hub),
        Path::None | Path::Pending(_) => crate::connect::start_deadline(qp, hub),
        Path::Datagrams { .. } => datagram::kick(qp, hub),
        Path::Tcp(_) => transmit::frames::hand_over(qp, hub),
        Path::Udp(_) => udp::kick(qp, hub),
        Path::Lost => requester::repeat_in_vain(qp, hub),
    }
}
