//! An engine whose queue pairs are those of an adapter that another process shares: what is asked of that
//! process, and what it brings. Completion queues, channels and contexts are the engine's own.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use quipu_inet::stack::{Carriage, ListenerId};
use quipu_inet::tcp::{Counters, Flow, Mode};
use quipu_mem::{Access, Segment};
use quipu_nic::{
    CqId, Fault, Key, MrId, PdId, QpAttr, QpAttrMask, QpCap, QpId, QpInit, QpNum, QpState, QpType,
    Region, SendWr, Sge, TcpSettings, Time,
};

use super::core::Core;
use super::events::{Events, Object};
use super::qpip::TcpEvent;
use super::{ContextId, Engine, Inner};
use crate::error::EngineError;
use crate::packet::{LinkError, LinkSpec};
use crate::share::{Attached, Call, Calls, Landed, MOST_LOOKS, Reader};
use crate::sys::Epoll;
use crate::tap::Adapter;

/// Attaches to the adapter that a link names, if it names one that another process shares.
pub(super) fn attach(
    link: &LinkSpec,
    arena_bytes: usize,
    epoll: &Arc<Epoll>,
) -> Result<Option<(Calls, Box<Attached>)>, LinkError> {
    if !link.is_shared() {
        return Ok(None);
    }
    let attached = Calls::attach(link, arena_bytes).and_then(|welcome| {
        let attached = Attached::new(&welcome.memory, welcome.bell, Arc::clone(epoll))?;
        Ok((welcome.calls, Box::new(attached)))
    });
    let failed = |source: io::Error| LinkError::new(link, "attaching to a shared adapter", source);
    attached.map(Some).map_err(failed)
}

/// Puts what has come where programs find it.
fn land(adapter: &mut Adapter, events: &mut Events, now: Time, landed: Landed) -> bool {
    match landed {
        Landed::Completion(cq, completion) => adapter.complete(now, cq, completion),
        Landed::Change(qp, change) => {
            events.tcp(TcpEvent { qp, change });
            true
        }
    }
}

impl Core {
    /// Takes what has come from the process that shares the adapter. True if there was anything.
    #[inline]
    pub(super) fn poll_attached(&mut self, now: Time) -> bool {
        self.attached.is_some() && self.receive_attached(now, false)
    }

    /// The same where it is all that a poll has to do, since the work is done elsewhere. Now and then it is
    /// left to a poll of everything, which reads the clock.
    #[inline]
    pub(super) fn take_news(&mut self) -> bool {
        let Some(attached) = &mut self.attached else { return false };
        if !attached.has_news() || self.is_reading_due() {
            return false;
        }
        let now = self.recent();
        self.poll_attached(now);
        self.poll_hit();
        self.finish_call();
        true
    }

    /// The same when the bell has rung, or that process has ended.
    pub(super) fn attached_ready(&mut self, now: Time) -> bool {
        self.receive_attached(now, true)
    }

    fn receive_attached(&mut self, now: Time, rung: bool) -> bool {
        let Self { attached: Some(attached), adapter, events, .. } = self else { return false };
        let mut overrun = Vec::new();
        let mut take = |landed| {
            let queue = if let Landed::Completion(cq, _) = &landed { Some(*cq) } else { None };
            if !land(adapter, events, now, landed) {
                // The slots of one look come one after the other: once is enough.
                overrun.extend(queue.filter(|cq| overrun.last() != Some(cq)));
            }
        };
        let any = if rung { attached.ready(&mut take) } else { attached.poll(&mut take) };
        for cq in overrun {
            attached.fail_users_of(cq);
        }
        any
    }

    /// Asks for the bell at the next news; `false` if something has come meanwhile.
    pub(super) fn arm_attached(&mut self) -> bool {
        self.attached.as_mut().is_none_or(|attached| attached.arm())
    }

    /// The same for a sleep: where all queues that owe the program an event hold it back until more have
    /// come, as it wanted, the bell may wait for as many. By when the sleep is to be over then; `None` if
    /// something has come meanwhile.
    pub(super) fn arm_for_sleep(&mut self, now: Time) -> Option<Option<Time>> {
        let Some(attached) = &mut self.attached else { return Some(None) };
        let awaited = attached.queues().filter_map(|cq| self.adapter.awaited(cq));
        let least = |one: (u32, u64), other: (u32, u64)| (one.0.min(other.0), one.1.min(other.1));
        match awaited.reduce(least) {
            Some((count @ 2.., period_ns)) if attached.is_flowing() => {
                attached.arm_for(count, now).then(|| Some(now.after(period_ns)))
            }
            _ => attached.arm().then_some(None),
        }
    }

    /// A queue owes the program an event earlier than a sleep was armed for that somebody else is in.
    pub(super) fn hasten_sleep(&mut self, cq: CqId) {
        if self.wakes_at.is_none() {
            return;
        }
        let Some(attached) = &mut self.attached else { return };
        let alone = attached.queues().nth(1).is_none();
        let held_back = self.adapter.awaited(cq).is_some_and(|(count, _)| count > 1);
        if alone && held_back {
            return;
        }
        if !attached.arm() {
            self.call_sleeper();
        }
    }

    /// After a sleep. What has come in it may have come at its beginning: the period for which events are
    /// held back has begun then.
    pub(super) fn wake_attached(&mut self) -> bool {
        let since = self.attached.as_mut().and_then(|attached| attached.woken());
        since.is_some_and(|since| self.receive_attached(since, false))
    }
}

/// What an engine asks the process that shares its adapter.
pub(super) struct Elsewhere<'a> {
    inner: &'a Arc<Inner>,
    calls: &'a Calls,
}

impl Engine {
    /// Where queue pairs are, if not in this process.
    ///
    /// # Errors
    ///
    /// [`EngineError::EngineGone`].
    #[inline]
    pub(super) fn elsewhere(&self) -> Result<Option<Elsewhere<'_>>, EngineError> {
        match &self.inner.calls {
            None => Ok(None),
            Some(_) if !self.is_here() => Err(EngineError::EngineGone),
            Some(calls) => Ok(Some(Elsewhere { inner: &self.inner, calls })),
        }
    }

    /// From now on the program takes the connection of messages that a queue pair has for a stream.
    #[cfg(test)]
    pub(crate) fn take_for_stream(&self, qp: QpId) {
        let elsewhere = self.elsewhere().unwrap().unwrap();
        elsewhere.attached(|attached, _| attached.begin_connection(qp, Mode::Stream)).unwrap();
    }

    /// Memory that can be registered with this engine, all zero: of a shared adapter it is what both
    /// processes have, of others it is what peers may map ([`SharedPages`](crate::SharedPages)), or the
    /// heap's.
    ///
    /// # Errors
    ///
    /// [`EngineError::ArenaFull`]; there is not so much memory.
    pub fn allocate(&self, len: usize) -> Result<Segment, EngineError> {
        match self.elsewhere()? {
            None => self.inner.shared.allocate(len).or_else(|| Segment::try_heap(len)).ok_or_else(
                || EngineError::system("memory", io::Error::from_raw_os_error(libc::ENOMEM)),
            ),
            Some(elsewhere) => elsewhere.calls.allocate(len),
        }
    }

    /// The same, of the heap where that is possible: peers on this host do not map it, and it takes no
    /// descriptor. For much memory in many regions that only this process's own requests name.
    ///
    /// # Errors
    ///
    /// As [`allocate`](Self::allocate).
    pub fn allocate_unshared(&self, len: usize) -> Result<Segment, EngineError> {
        match self.elsewhere()? {
            None => Segment::try_heap(len).ok_or_else(|| {
                EngineError::system("memory", io::Error::from_raw_os_error(libc::ENOMEM))
            }),
            Some(elsewhere) => elsewhere.calls.allocate(len),
        }
    }

    /// That [allocated](Self::allocate) memory is there: what is shared with the process that has the adapter
    /// a forked child does not have.
    ///
    /// # Errors
    ///
    /// [`EngineError::EngineGone`].
    pub fn check_allocated(&self) -> Result<(), EngineError> {
        self.elsewhere().map(drop)
    }
}

impl Elsewhere<'_> {
    fn ask<T>(
        &self,
        call: &Call,
        read: impl FnOnce(&mut Reader<'_>) -> Option<T>,
    ) -> Result<T, EngineError> {
        let end = self.attached(|attached, _| attached.posted_end())?;
        // The other end may wait for room in the rings, of which nobody else may take care now.
        let glance = || {
            let Ok(mut core) = self.inner.enter() else { return true };
            core.run();
            core.attached.as_ref().is_none_or(|attached| attached.has_taken(end))
        };
        self.calls.ask(call, &glance, read)
    }

    /// Takes what the other process has told so far.
    fn hear(&self) -> Result<(), EngineError> {
        let mut core = self.inner.enter()?;
        for _ in 0..MOST_LOOKS {
            core.run();
            if core.attached.as_mut().is_none_or(|attached| !attached.has_news()) {
                break;
            }
        }
        Ok(())
    }

    fn order(&self, call: &Call) -> Result<(), EngineError> {
        self.ask(call, |_| Some(()))
    }

    /// Orders that an object be no more: with the other process all of them are gone. With one that only does
    /// not answer none is.
    fn order_end(&self, call: &Call) -> Result<(), EngineError> {
        match self.order(call) {
            Err(EngineError::AdapterLost) => Ok(()),
            done => done,
        }
    }

    /// Does something with the rings, which are there as long as the engine is.
    fn attached<T>(
        &self,
        act: impl FnOnce(&mut Attached, &mut Core) -> T,
    ) -> Result<T, EngineError> {
        let mut core = self.inner.enter()?;
        let mut attached = core.attached.take().ok_or(EngineError::AdapterLost)?;
        let done = act(&mut attached, &mut core);
        core.attached = Some(attached);
        Ok(done)
    }

    pub(super) fn info(&self) -> super::QpipInfo {
        self.calls.info().clone()
    }

    pub(super) fn alloc_pd(&self) -> Result<PdId, EngineError> {
        self.ask(&Call::AllocPd, |answer| answer.word().map(PdId))
    }

    pub(super) fn dealloc_pd(&self, pd: PdId) -> Result<(), EngineError> {
        self.order_end(&Call::DeallocPd { pd: pd.0 })
    }

    pub(super) fn register(
        &self,
        pd: PdId,
        (addr, len): (usize, u64),
        iova: u64,
        access: Access,
    ) -> Result<Region, EngineError> {
        let offset = self.calls.offset_of(addr, len)?;
        let call = Call::Register { pd: pd.0, offset, len, iova, access: access.bits() };
        self.ask(&call, |answer| {
            Some(Region { id: MrId(answer.word()?), key: Key(answer.short()?) })
        })
    }

    pub(super) fn register_segment(
        &self,
        pd: PdId,
        memory: &Segment,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Region, EngineError> {
        let place = (memory.addr(), memory.len() as u64);
        self.register(pd, place, iova.unwrap_or(place.0 as u64), access)
    }

    pub(super) fn deregister(&self, mr: MrId) -> Result<(), EngineError> {
        self.order_end(&Call::Deregister { region: mr.0 })
    }

    pub(super) fn create_qp(
        &self,
        context: ContextId,
        init: &QpInit,
    ) -> Result<(QpId, QpNum, QpCap), EngineError> {
        let udp = match init.qp_type {
            QpType::Tcp => false,
            QpType::Udp => true,
            _ => return Err(Fault::Unsupported("other services than TCP and UDP, shared").into()),
        };
        if init.srq.is_some() {
            return Err(Fault::Unsupported("shared receive queues of a shared adapter").into());
        }
        {
            let adapter = &mut self.inner.enter()?.adapter;
            adapter.add_cq_user(init.send_cq)?;
            adapter
                .add_cq_user(init.recv_cq)
                .inspect_err(|_| adapter.remove_cq_user(init.send_cq))?;
        }
        let call = Call::CreateQp { pd: init.pd.0, udp, cap: init.cap };
        let made = self.ask(&call, |answer| {
            let (qp, number) = (QpId(answer.word()?), QpNum(answer.short()?));
            let cap = QpCap {
                max_send_wr: answer.short()?,
                max_recv_wr: answer.short()?,
                max_send_sge: answer.short()?,
                max_recv_sge: answer.short()?,
                max_inline_data: answer.short()?,
            };
            let added = self.attached(|attached, core| {
                let added = attached.add_qp(qp, number, init, cap);
                if added {
                    core.events.add_object(Object::Qp(qp), context, None);
                }
                added
            });
            added.is_ok_and(|added| added).then_some((qp, number, cap))
        });
        if made.is_err() {
            let mut core = self.inner.enter()?;
            core.adapter.remove_cq_user(init.send_cq);
            core.adapter.remove_cq_user(init.recv_cq);
        }
        made
    }

    pub(super) fn modify_qp(
        &self,
        qp: QpId,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Result<(), EngineError> {
        if !mask.contains(QpAttrMask::STATE) {
            return Err(Fault::Unsupported("attributes of a shared adapter's queue pairs").into());
        }
        self.order(&Call::ModifyQp { qp: qp.0, state: attr.state as u8 })?;
        // Events that it has told before have the state of that time.
        self.hear()?;
        self.attached(|attached, core| {
            attached.set_state(qp, attr.state);
            if attr.state == QpState::Reset {
                core.forget_completions(attached, qp);
            }
        })
    }

    pub(super) fn destroy_qp(&self, qp: QpId) -> Result<super::EventsReported, EngineError> {
        self.order_end(&Call::DestroyQp { qp: qp.0 })?;
        self.attached(|attached, core| {
            core.forget_completions(attached, qp);
            for cq in attached.remove_qp(qp).into_iter().flatten() {
                core.adapter.remove_cq_user(cq);
            }
            core.events.remove_object(Object::Qp(qp))
        })
    }

    pub(super) fn listen(
        &self,
        port: u16,
        settings: &TcpSettings,
        backlog: u32,
    ) -> Result<(ListenerId, u16), EngineError> {
        settings.check()?;
        let call = Call::Listen { port, backlog, settings: *settings };
        let made = self.ask(&call, |it| Some((ListenerId::from_bits(it.word()?), it.short()?)))?;
        self.attached(|attached, _| attached.set_listener(made.0, Some(settings.mode)))?;
        Ok(made)
    }

    pub(super) fn unlisten(&self, listener: ListenerId) -> Result<(), EngineError> {
        self.order_end(&Call::Unlisten { listener: listener.bits() })?;
        self.attached(|attached, _| attached.set_listener(listener, None))
    }

    pub(super) fn offer(&self, listener: ListenerId, qp: QpId) -> Result<(), EngineError> {
        let mode = self.attached(|attached, _| attached.mode_of(listener))?;
        self.open(qp, mode, &Call::Offer { listener: listener.bits(), qp: qp.0 })
    }

    pub(super) fn connect(
        &self,
        qp: QpId,
        to: SocketAddr,
        from: Option<u16>,
        settings: &TcpSettings,
    ) -> Result<(), EngineError> {
        settings.check()?;
        let from = from.unwrap_or(0);
        let call = Call::Connect { qp: qp.0, from, to, settings: *settings };
        self.open(qp, settings.mode, &call)
    }

    /// A call that gives a queue pair a connection, sooner or later. What comes of that may be heard before
    /// the answer.
    fn open(&self, qp: QpId, mode: Mode, call: &Call) -> Result<(), EngineError> {
        // Of one that it had before all has been told.
        self.hear()?;
        let before = self.attached(|attached, _| attached.begin_connection(qp, mode))?;
        let begun = self.order(call);
        self.attached(|attached, _| match begun {
            Ok(()) => drop(attached.set_closed(qp, false)),
            Err(_) => attached.refuse_connection(qp, before),
        })?;
        begun
    }

    pub(super) fn close(&self, qp: QpId) -> Result<(), EngineError> {
        // What is posted from now on is not before the call, and the adapter would refuse it.
        let was = self.attached(|attached, _| attached.set_closed(qp, true))?;
        let done = self.order(&Call::Close { qp: qp.0 });
        if done.is_err() {
            self.attached(|attached, _| attached.set_closed(qp, was))?;
        }
        done
    }

    pub(super) fn abort(&self, qp: QpId) -> Result<(), EngineError> {
        self.order(&Call::Abort { qp: qp.0 })
    }

    pub(super) fn flow(&self, qp: QpId) -> Result<Option<Flow>, EngineError> {
        self.ask(&Call::Flow { qp: qp.0 }, |answer| {
            Some(match answer.word()? {
                0 => None,
                _ => Some(Flow { local: answer.address()?, remote: answer.address()? }),
            })
        })
    }

    pub(super) fn counters(&self, qp: QpId) -> Result<Option<Counters>, EngineError> {
        self.ask(&Call::Counters { qp: qp.0 }, |answer| {
            Some(match answer.word()? {
                0 => None,
                _ => Some(answer.counters()?),
            })
        })
    }

    pub(super) fn bind(&self, qp: QpId, port: u16) -> Result<u16, EngineError> {
        let port = self.ask(&Call::Bind { qp: qp.0, port }, |answer| answer.short())?;
        self.attached(|attached, _| attached.set_state(qp, QpState::Rts))?;
        Ok(port)
    }

    pub(super) fn set_carriage(&self, qp: QpId, carriage: Carriage) -> Result<(), EngineError> {
        let Carriage { traffic_class, hop_limit } = carriage;
        if hop_limit == Some(0) {
            // The other end would take it for the usual one.
            return Err(Fault::Invalid("the hop limit must be at least 1").into());
        }
        let hop_limit = hop_limit.unwrap_or(0);
        self.order(&Call::Carry { qp: qp.0, traffic_class, hop_limit })
    }
}

impl Core {
    /// Drops what has completed of a queue pair that is destroyed or reset.
    fn forget_completions(&mut self, attached: &Attached, qp: QpId) {
        for (cq, number) in attached.queues_of(qp) {
            self.adapter.forget_completions(cq, number);
        }
    }

    /// Posts a send to a queue pair that is elsewhere; `None` if there is no such place.
    #[inline]
    pub(super) fn post_send_elsewhere(
        &mut self,
        qp: QpId,
        wr: &SendWr<'_>,
    ) -> Option<Result<(), EngineError>> {
        let Self { attached, adapter, .. } = self;
        let unread = |cq, number| adapter.unread(cq, number, false);
        attached.as_mut().map(|attached| attached.post_send(qp, wr, unread))
    }

    /// Posts a receive to a queue pair that is elsewhere; `None` if there is no such place.
    #[inline]
    pub(super) fn post_recv_elsewhere(
        &mut self,
        qp: QpId,
        wr_id: u64,
        sges: &[Sge],
    ) -> Option<Result<(), EngineError>> {
        let Self { attached, adapter, .. } = self;
        let unread = |cq, number| adapter.unread(cq, number, true);
        attached.as_mut().map(|attached| attached.post_recv(qp, wr_id, sges, unread))
    }
}
