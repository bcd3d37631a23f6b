//! Posting: requests go into the ring, or wait for room there, and the other end gets to see them.

use quipu_mem::ring::{Channel, RingError};
use quipu_nic::{
    CqId, Fault, Payload, QpId, QpNum, QpState, QpType, SendFlags, SendOp, SendWr, Sge, To,
    check_datagram, check_message,
};

use super::{Attached, SHOWN_TOGETHER, half};
use crate::error::EngineError;
use crate::share::overflow::Overflow;
use crate::share::slots::{self, Filling, Order, Request, Tag};
use crate::share::{RINGS, ring};

impl Attached {
    /// Posts a send. The adapter looks at it soon; what it has against it a completion says. `unread` says
    /// how many completions of such requests wait to be taken.
    ///
    /// # Errors
    ///
    /// What can be seen from here: the queue is full, the state forbids it, or it is no send, or one that the
    /// service does not carry, or larger than the queue pair was made for.
    #[inline]
    pub(crate) fn post_send(
        &mut self,
        id: QpId,
        wr: &SendWr<'_>,
        unread: impl FnOnce(CqId, QpNum) -> u32,
    ) -> Result<(), EngineError> {
        let half = half(&mut self.qps, id, self.lost)?;
        if matches!(half.state, QpState::Reset | QpState::Init) || half.closed {
            return Err(Fault::WrongState.into());
        }
        let (datagram, len) = (half.qp_type == QpType::Udp, octets(&wr.payload));
        let to = match (wr.op, wr.to) {
            (SendOp::Send, To::Peer) if !datagram => {
                check_message(half.mode, len)?;
                None
            }
            (SendOp::Send, To::Address(to)) if datagram => {
                check_datagram(to, len)?;
                Some(to)
            }
            _ => {
                return Err(Fault::Invalid("the queue pair's service has no such operation").into());
            }
        };
        let fits = match wr.payload {
            Payload::Sges(sges) => sges.len() <= half.cap.max_send_sge as usize,
            Payload::Inline(bytes) => bytes.len() <= half.cap.max_inline_data as usize,
        };
        if !fits {
            return Err(Fault::Invalid("more than the queue pair's sends hold").into());
        }
        if !half.sends.has_room(|| unread(half.send_cq, half.number)) {
            return Err(Fault::QueueFull.into());
        }
        let signaled = half.all_signaled || wr.flags.contains(SendFlags::SIGNALED);
        let sequence = half.sends.next;
        let mut flags = wr.flags & SendFlags::SOLICITED;
        flags.set(SendFlags::INLINE, matches!(wr.payload, Payload::Inline(_)));
        flags.set(SendFlags::SIGNALED, half.sends.must_tell(signaled));
        let tag = Tag { qp: id.0 as u32, receive: false, sequence };
        let waits = match wr.payload {
            Payload::Sges([sge])
                if !datagram && self.overflow.is_empty() && {
                    let requests = &mut self.channel.outgoing.requests;
                    self.filling.add(requests, tag, flags.bits() as u8, sge).is_ok()
                } =>
            {
                false
            }
            payload => {
                let end = (&mut self.channel, &mut self.filling, &mut self.overflow);
                push(end, &Order::Post(Request { tag, flags, to, payload }))?
            }
        };
        half.sends.push(wr.wr_id, len, signaled);
        half.sends.waiting += u32::from(waits);
        self.note_posted();
        Ok(())
    }

    /// Posts a receive, as [`post_send`](Self::post_send).
    ///
    /// # Errors
    ///
    /// As there.
    #[inline]
    pub(crate) fn post_recv(
        &mut self,
        id: QpId,
        wr_id: u64,
        sges: &[Sge],
        unread: impl FnOnce(CqId, QpNum) -> u32,
    ) -> Result<(), EngineError> {
        let half = half(&mut self.qps, id, self.lost)?;
        if half.state == QpState::Reset {
            return Err(Fault::WrongState.into());
        }
        if sges.len() > half.cap.max_recv_sge as usize {
            let words = "more scatter/gather elements than max_recv_sge";
            return Err(Fault::Invalid(words).into());
        }
        if !half.receives.has_room(|| unread(half.recv_cq, half.number)) {
            return Err(Fault::QueueFull.into());
        }
        let tag = Tag { qp: id.0 as u32, receive: true, sequence: half.receives.next };
        let waits = match sges {
            [sge]
                if self.overflow.is_empty() && {
                    let requests = &mut self.channel.outgoing.requests;
                    self.filling.add(requests, tag, 0, sge).is_ok()
                } =>
            {
                false
            }
            _ => {
                let (flags, payload) = (SendFlags::empty(), Payload::Sges(sges));
                let end = (&mut self.channel, &mut self.filling, &mut self.overflow);
                push(end, &Order::Post(Request { tag, flags, to: None, payload }))?
            }
        };
        let len = octets(&Payload::Sges(sges));
        half.receives.push(wr_id, len, true);
        half.receives.waiting += u32::from(waits);
        self.note_posted();
        Ok(())
    }

    /// What is posted together is shown together, but of a long list one part after the other, so that both
    /// ends work at the same time; and another end that sleeps is not left to sleep until its ring is full.
    #[inline]
    fn note_posted(&mut self) {
        self.posted = true;
        self.unrung += 1;
        if self.unrung.is_multiple_of(SHOWN_TOGETHER) {
            self.show();
        }
        if self.unrung >= RINGS.request_slots / 2 {
            self.ring();
        }
        if !self.overflow.is_empty() {
            // What is wrong with the ring is found by the next look.
            let _ = self.refill();
        }
    }

    /// Puts what waits into the ring as far as there is room, and sees to it that the bell rings when there
    /// is more.
    #[cold]
    pub(super) fn refill(&mut self) -> Result<(), RingError> {
        let outgoing = &mut self.channel.outgoing;
        let mut put = |order: &Order<'_>| {
            let (ring, bytes) = (&mut outgoing.requests, &mut outgoing.request_bytes);
            self.filling.put(ring, bytes, order)?;
            if let Order::Post(Request { tag, .. }) = order
                && let Some(half) = self.qps.get_mut(&tag.qp.into())
            {
                half.queue(tag.receive).waiting -= 1;
            }
            Ok(())
        };
        self.posted |= self.overflow.drain(&mut put)?;
        if !self.overflow.is_empty() && !std::mem::replace(&mut self.awaits_room, true) {
            self.channel.incoming.control.arm();
            // It may have been made before that.
            self.posted |= self.overflow.drain(&mut put)?;
        }
        // Anyone who sleeps then may ask for the bell otherwise, and what waits next has to ask for it anew.
        self.awaits_room &= !self.overflow.is_empty();
        self.ring();
        Ok(())
    }

    /// How far the requests that were posted so far reach, of those that have waited for room.
    pub(crate) fn posted_end(&self) -> u64 {
        self.overflow.end()
    }

    /// Whether all of those are in the ring.
    pub(crate) fn has_taken(&self, end: u64) -> bool {
        self.overflow.has_left(end)
    }

    /// Shows the other end what was posted.
    #[inline]
    fn show(&mut self) {
        let requests = &mut self.channel.outgoing.requests;
        self.filling.close(requests);
        requests.show();
    }

    /// Shows the other end what was posted, and wakes it if it sleeps.
    #[inline]
    pub(crate) fn ring(&mut self) {
        self.unrung = 0;
        if !std::mem::take(&mut self.posted) {
            return;
        }
        self.show();
        if self.channel.outgoing.control.must_ring() {
            ring(&self.bell);
        }
    }
}

fn octets(payload: &Payload<'_>) -> u64 {
    match payload {
        Payload::Sges(sges) => sges.iter().map(|sge| u64::from(sge.len)).sum(),
        Payload::Inline(bytes) => bytes.len() as u64,
    }
}

/// Puts an order into the ring, or behind those that wait for room there; whether it waits.
#[inline(never)]
pub(super) fn push(
    (channel, filling, overflow): (&mut Channel, &mut Filling, &mut Overflow),
    order: &Order<'_>,
) -> Result<bool, EngineError> {
    let outgoing = &mut channel.outgoing;
    let put = match order {
        _ if overflow.is_empty() => {
            filling.put(&mut outgoing.requests, &mut outgoing.request_bytes, order)
        }
        Order::Post(request) => slots::check(request).and(Err(RingError::Full)),
        Order::Fail(_) => Err(RingError::Full),
    };
    match put {
        Ok(()) => Ok(false),
        Err(RingError::Full) => {
            overflow.push(order);
            Ok(true)
        }
        Err(RingError::TooLong) => {
            Err(Fault::Invalid("a request longer than a shared adapter takes").into())
        }
        Err(RingError::Corrupt) => Err(EngineError::AdapterLost),
    }
}
