//! The control path: one method per verb, each under the lock for a moment.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use quipu_fault::Call;
use quipu_mem::{Segment, Sge};
use quipu_nic::{
    AddressVector, AhId, ChannelId, CqId, DatagramDrops, Gid, GroupMember, Key, Marking, PdId,
    QpAttr, QpAttrMask, QpCap, QpId, QpInfo, QpInit, QpNum, QpState, QpType, SrqId, Time, XrcdId,
};

use super::core::Core;
use super::events::Object;
use super::helper::Helper;
use super::{ContextId, Engine, EventsReported};
use crate::error::EngineError;

/// What a completion queue has from its beginning at least. Not when its size is changed: who does that means
/// that size, and finds out what does not fit.
const LEAST_ENTRIES: u32 = 16;

/// How many entries a new completion queue gets of which `cqe` are asked for: more, as adapters of hardware
/// round up, and programs that ask for too few have never heard of it. What is out of range stays so.
fn entries(cqe: u32, most: u32) -> u32 {
    if cqe == 0 || cqe >= most {
        return cqe;
    }
    rounded(cqe + 1, most).max(LEAST_ENTRIES).min(most)
}

/// The same where its size is changed: who asks for the size that it has keeps it.
fn rounded(cqe: u32, most: u32) -> u32 {
    if cqe == 0 || cqe >= most { cqe } else { cqe.next_power_of_two().min(most) }
}

impl Engine {
    /// Sizes and limits of the adapter.
    ///
    /// # Errors
    ///
    /// [`EngineError::EngineGone`].
    pub fn limits(&self) -> Result<quipu_nic::Config, EngineError> {
        Ok(self.enter()?.adapter.config().clone())
    }

    /// Creates a completion channel; also its descriptor, which is readable while events are
    /// queued.
    ///
    /// # Errors
    ///
    /// No descriptor is left.
    pub fn create_channel(&self) -> Result<(ChannelId, RawFd), EngineError> {
        self.enter_for(Call::CreateCompChannel)?.events.create_channel()
    }

    /// Destroys a completion channel and closes its descriptor.
    ///
    /// # Errors
    ///
    /// Completion queues use it, or there is none.
    pub fn destroy_channel(&self, channel: ChannelId) -> Result<(), EngineError> {
        self.enter_for(Call::DestroyCompChannel)?.events.destroy_channel(channel)
    }

    /// Creates a completion queue of at least `cqe` entries; its handle and its size. `cookie`
    /// comes back in its events.
    ///
    /// # Errors
    ///
    /// A size out of range, or no room.
    pub fn create_cq(
        &self,
        context: ContextId,
        cqe: u32,
        channel: Option<ChannelId>,
        cookie: u64,
    ) -> Result<(CqId, u32), EngineError> {
        let mut core = self.enter_for(Call::CreateCq)?;
        if let Some(channel) = channel {
            core.events.channel_fd(channel)?;
        }
        let granted = entries(cqe, core.adapter.config().max_cqe);
        let (cq, size) = core.adapter.create_cq(granted, channel, cookie)?;
        core.events.add_object(Object::Cq(cq), context, channel);
        if let Some(strict) = &mut core.strict {
            // Other adapters may grant no more than was asked for.
            strict.checker.cq_sized(cq, cqe);
        }
        if let Some(faults) = &mut core.faults {
            faults.add_cq(cq);
        }
        Ok((cq, size))
    }

    /// Changes the size of a completion queue; what it is afterwards.
    ///
    /// # Errors
    ///
    /// A size out of range, or below what the queue holds.
    pub fn resize_cq(&self, cq: CqId, cqe: u32) -> Result<u32, EngineError> {
        let mut core = self.enter_for_cq(Call::ResizeCq, cq)?;
        let granted = rounded(cqe, core.adapter.config().max_cqe);
        let size = core.adapter.resize_cq(cq, granted)?;
        if let Some(strict) = &mut core.strict {
            strict.checker.cq_sized(cq, cqe);
        }
        Ok(size)
    }

    /// Has a completion queue note when completions are made, or lose the oldest rather than overrun.
    ///
    /// # Errors
    ///
    /// No such queue.
    pub fn set_cq_traits(
        &self,
        cq: CqId,
        stamps: bool,
        ignores_overrun: bool,
    ) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        if stamps {
            core.adapter.keep_stamps(cq)?;
        }
        if ignores_overrun {
            core.adapter.ignore_overrun(cq)?;
        }
        Ok(())
    }

    /// Holds events of a completion queue back until `count` completions have come or a period in
    /// nanoseconds is over; not any more if either is 0.
    ///
    /// # Errors
    ///
    /// No such queue.
    pub fn moderate_cq(&self, cq: CqId, count: u16, period_ns: u64) -> Result<(), EngineError> {
        let mut core = self.enter_for_cq(Call::ModifyCq, cq)?;
        core.adapter.moderate_cq(cq, count, period_ns)?;
        core.hasten_sleep(cq);
        Ok(())
    }

    /// Destroys a completion queue. Events of it that were not taken vanish.
    ///
    /// # Errors
    ///
    /// Queue pairs use it, or there is none.
    pub fn destroy_cq(&self, cq: CqId) -> Result<EventsReported, EngineError> {
        let mut core = self.enter_for_cq(Call::DestroyCq, cq)?;
        core.adapter.destroy_cq(cq)?;
        if let Some(strict) = &mut core.strict {
            strict.checker.cq_destroyed(cq);
        }
        core.collect_events();
        Ok(core.events.remove_object(Object::Cq(cq)))
    }

    /// Creates a shared receive queue.
    ///
    /// # Errors
    ///
    /// A size out of range, or no room.
    pub fn create_srq(
        &self,
        context: ContextId,
        pd: PdId,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SrqId, EngineError> {
        let mut core = self.enter_for(Call::CreateSrq)?;
        let srq = core.adapter.create_srq(pd, max_wr, max_sge, 0)?;
        if let Some(faults) = &mut core.faults {
            faults.add_srq(srq);
        }
        core.events.add_object(Object::Srq(srq), context, None);
        Ok(srq)
    }

    /// Creates an XRC domain.
    ///
    /// # Errors
    ///
    /// No room.
    pub fn alloc_xrcd(&self) -> Result<XrcdId, EngineError> {
        Ok(self.enter()?.adapter.alloc_xrcd()?)
    }

    /// Destroys an XRC domain.
    ///
    /// # Errors
    ///
    /// It is in use, or there is none.
    pub fn dealloc_xrcd(&self, xrcd: XrcdId) -> Result<(), EngineError> {
        Ok(self.enter()?.adapter.dealloc_xrcd(xrcd)?)
    }

    /// Creates a shared receive queue that peers name over the queue pairs of an XRC domain, and whose
    /// receives complete in `cq`; its handle and number. Its events come to `context`.
    ///
    /// # Errors
    ///
    /// A size out of range, an object that does not exist, or no room.
    pub fn create_xrc_srq(
        &self,
        context: ContextId,
        pd: PdId,
        xrcd: XrcdId,
        cq: CqId,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<(SrqId, u32), EngineError> {
        let mut core = self.enter_for(Call::CreateSrq)?;
        let (srq, number) = core.adapter.create_xrc_srq(pd, xrcd, cq, max_wr, max_sge)?;
        if let Some(faults) = &mut core.faults {
            faults.add_srq(srq);
        }
        core.events.add_object(Object::Srq(srq), context, None);
        Ok((srq, number))
    }

    /// Resizes a shared receive queue, or sets the limit below which it raises an event.
    ///
    /// # Errors
    ///
    /// A size or limit out of range.
    pub fn modify_srq(
        &self,
        srq: SrqId,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), EngineError> {
        let mut core = self.enter_for(Call::ModifySrq)?;
        core.adapter.modify_srq(srq, max_wr, limit)?;
        core.collect_events();
        Ok(())
    }

    /// Size, elements per request and limit of a shared receive queue.
    ///
    /// # Errors
    ///
    /// No such queue.
    pub fn query_srq(&self, srq: SrqId) -> Result<(u32, u32, u32), EngineError> {
        Ok(self.enter()?.adapter.query_srq(srq)?)
    }

    /// Destroys a shared receive queue. Events of it that were not taken vanish.
    ///
    /// # Errors
    ///
    /// Queue pairs use it, or there is none.
    pub fn destroy_srq(&self, srq: SrqId) -> Result<EventsReported, EngineError> {
        let mut core = self.enter_for(Call::DestroySrq)?;
        core.adapter.destroy_srq(srq)?;
        core.watch_destroy_srq(srq);
        if let Some(faults) = &mut core.faults {
            faults.remove_srq(srq);
        }
        // Peers whose messages were in the making are refused, and told.
        let now = core.now();
        core.settle(now);
        Ok(core.events.remove_object(Object::Srq(srq)))
    }

    /// Creates a queue pair: its handle, its number, and its sizes. The first one starts the
    /// helper thread; each 256th or so opens a port.
    ///
    /// # Errors
    ///
    /// Sizes out of range, objects that do not exist, no room; or the kernel refuses a port or
    /// thread.
    pub fn create_qp(
        &self,
        context: ContextId,
        init: &QpInit,
    ) -> Result<(QpId, QpNum, QpCap), EngineError> {
        if !self.is_here() {
            return Err(EngineError::EngineGone);
        }
        Helper::start(&self.inner)?;
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.create_qp(context, init);
        }
        let mut core = self.enter_for(Call::CreateQp)?;
        let number = if matches!(init.qp_type, QpType::Tcp | QpType::Udp) {
            let qpip = core.qpip.as_mut().ok_or(EngineError::NoLink)?;
            qpip.take_number().ok_or(quipu_nic::Fault::Exhausted("queue pair numbers"))?
        } else if matches!(init.qp_type, QpType::Ud | QpType::RawPacket) {
            core.take_datagram_number().map_err(|e| EngineError::system("a UDP port", e))?
        } else {
            let (number, port) =
                core.net.take_number().map_err(|e| EngineError::system("a listening port", e))?;
            if let Some(port) = port {
                core.links.listen(port);
            }
            number
        };
        match core.adapter.create_qp(init, number) {
            Ok((qp, cap)) => {
                core.events.add_object(Object::Qp(qp), context, None);
                if let Some(strict) = &mut core.strict {
                    strict.checker.qp_created(qp, number, init, cap);
                }
                if let Some(faults) = &mut core.faults {
                    faults.add_qp(qp, number, init);
                }
                core.finish_call();
                Ok((qp, number, cap))
            }
            Err(fault) => {
                core.give_back_number(number);
                Err(fault.into())
            }
        }
    }

    /// Changes attributes and the state of a queue pair. Does not wait for its peer.
    ///
    /// # Errors
    ///
    /// An illegal transition or value; the queue pair is then unchanged.
    pub fn modify_qp(&self, qp: QpId, attr: &QpAttr, mask: QpAttrMask) -> Result<(), EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.modify_qp(qp, attr, mask);
        }
        let state = mask.contains(QpAttrMask::STATE).then_some(attr.state);
        let mut core = self.enter_for_qp(Call::ModifyQp, qp, state)?;
        let (qp, now) = (core.events.openings.find(qp)?, core.now());
        if matches!(state, Some(QpState::Reset | QpState::Err)) {
            core.take_arrived(now, qp);
        }
        let outcome = core.watch_modify(now, qp, attr, mask);
        outcome?;
        core.settle(now);
        self.wait_quiet(core)
    }

    /// How what goes to an address is marked: for captures.
    ///
    /// # Errors
    ///
    /// The engine is gone.
    pub fn marking_of(&self, av: &AddressVector) -> Result<Marking, EngineError> {
        Ok(self.enter()?.adapter.marking_of(av))
    }

    /// Gives a connected queue pair another service level and traffic class, as a program of sockets may for
    /// its connection.
    ///
    /// # Errors
    ///
    /// No such queue pair.
    pub fn set_service_level(
        &self,
        qp: QpId,
        service_level: u8,
        traffic_class: u8,
    ) -> Result<(), EngineError> {
        let mut core = self.enter_for_qp(Call::ModifyQp, qp, None)?;
        let qp = core.events.openings.find(qp)?;
        let conn = core.adapter.set_service_level(qp, service_level, traffic_class)?;
        if let Some(conn) = conn
            && let Some(marking) = core.adapter.marking(conn)
        {
            core.net.mark(conn, marking);
        }
        Ok(())
    }

    /// What a queue pair is.
    ///
    /// # Errors
    ///
    /// No such queue pair.
    pub fn query_qp(&self, qp: QpId) -> Result<QpInfo, EngineError> {
        let core = self.enter_for_qp(Call::QueryQp, qp, None)?;
        Ok(core.adapter.query_qp(core.events.openings.find(qp)?)?)
    }

    /// Memory of a queue pair's peer as it is mapped here, if it is: see
    /// [`Adapter::view_peer`](quipu_nic::Adapter::view_peer). `None` also where requests are watched.
    #[must_use]
    pub fn view_peer(&self, qp: QpId, addr: u64, len: u32, key: Key) -> Option<Segment> {
        let core = self.inner.enter_quickly().ok()?;
        if core.watched || core.attached.is_some() {
            return None;
        }
        core.adapter.view_peer(qp, addr, len, key)
    }

    /// Writes memory into that of a queue pair's peer on this host, without a request: see
    /// [`Adapter::write_now`](quipu_nic::Adapter::write_now). `false` if it is not written, also where
    /// requests are watched.
    #[must_use]
    pub fn write_now(&self, qp: QpId, from: Sge, to: (u64, Key)) -> bool {
        let Ok(mut core) = self.inner.enter_quickly() else { return false };
        if core.watched || core.attached.is_some() {
            return false;
        }
        let written = core.adapter.write_now(qp, from, to);
        core.settle_rung();
        written
    }

    /// Whether memory of a queue pair's peer may be mapped here.
    #[must_use]
    pub fn is_peer_mapped(&self, qp: QpId) -> bool {
        self.inner.enter_quickly().is_ok_and(|core| core.adapter.is_peer_mapped(qp))
    }

    /// Destroys a queue pair, or this handle of it while [others have it open](Self::open_qp). Events and
    /// completions of it that were not taken vanish. Waits as
    /// [`dereg_mr`](Self::dereg_mr) does: no peer moves bytes for it any more.
    ///
    /// # Errors
    ///
    /// No such queue pair.
    pub fn destroy_qp(&self, qp: QpId) -> Result<EventsReported, EngineError> {
        if let Some(elsewhere) = self.elsewhere()? {
            return elsewhere.destroy_qp(qp);
        }
        let mut core = self.enter_for_qp(Call::DestroyQp, qp, None)?;
        let (handle, now) = (qp, core.now());
        let qp = core.events.openings.find(handle)?;
        if core.events.openings.close(handle)? {
            return Ok(core.events.remove_object(Object::Qp(handle)));
        }
        let number = core.adapter.query_qp(qp)?.num;
        // What the peer still waits for, acknowledgements above all, goes out first.
        core.take_arrived(now, qp);
        core.adapter.release_acks();
        core.settle(now);
        let state = core.adapter.query_qp(qp)?.attr.state;
        core.adapter.destroy_qp(now, qp)?;
        core.watch_destroy(qp, state);
        core.settle(now);
        core.give_back_number(number);
        if let Some(faults) = &mut core.faults {
            faults.remove_qp(qp);
        }
        core.events.openings.forget(qp);
        let reported = core.events.remove_object(Object::Qp(handle));
        self.wait_quiet(core)?;
        Ok(reported)
    }

    /// Creates an address handle.
    ///
    /// # Errors
    ///
    /// An address without a global route, or no room.
    pub fn create_ah(&self, pd: PdId, av: &AddressVector) -> Result<AhId, EngineError> {
        Ok(self.enter()?.adapter.create_ah(pd, av)?)
    }

    /// Destroys an address handle. What was posted with it is not concerned.
    ///
    /// # Errors
    ///
    /// No such handle.
    pub fn destroy_ah(&self, ah: AhId) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        core.adapter.destroy_ah(ah)?;
        core.watch_destroy_ah(ah);
        Ok(())
    }

    /// Attaches a datagram queue pair to the multicast group that a GID stands for, which the device's
    /// interface then joins.
    ///
    /// # Errors
    ///
    /// No multicast GID, a queue pair of another service, a limit, or the kernel refuses the group.
    pub fn attach_multicast(&self, qp: QpId, mgid: Gid) -> Result<(), EngineError> {
        self.attach_member(GroupMember { qp, mgid, sgid_index: 0 })
    }

    /// As [`attach_multicast`](Self::attach_multicast), on the network of the address in any row of the GID
    /// table.
    ///
    /// # Errors
    ///
    /// As there; or there is no such row.
    pub fn attach_member(&self, member: GroupMember) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        let row = member.sgid_index;
        let group = core.adapter.group_from(member.mgid, row)?;
        let known = core.adapter.has_group_on(group, row);
        core.adapter.attach_member(member)?;
        if !known {
            let port = core.adapter.config().multicast_port;
            if let Err(error) = core.datagrams.join(group, port, row) {
                core.adapter.detach_member(member)?;
                return Err(EngineError::system("a multicast group", error));
            }
        }
        Ok(())
    }

    /// Has a datagram queue pair not hear from groups what it has sent to them.
    ///
    /// # Errors
    ///
    /// No such queue pair, or one of another service.
    pub fn spare_own_multicast(&self, qp: QpId) -> Result<(), EngineError> {
        Ok(self.enter()?.adapter.spare_own_multicast(qp)?)
    }

    /// Detaches a queue pair from the multicast group that a GID stands for.
    ///
    /// # Errors
    ///
    /// It is not attached to it.
    pub fn detach_multicast(&self, qp: QpId, mgid: Gid) -> Result<(), EngineError> {
        self.detach_member(GroupMember { qp, mgid, sgid_index: 0 })
    }

    /// As [`detach_multicast`](Self::detach_multicast), on the network of the address in any row of the GID
    /// table.
    ///
    /// # Errors
    ///
    /// It is not attached in this way.
    pub fn detach_member(&self, member: GroupMember) -> Result<(), EngineError> {
        self.enter()?.leave_group(member)
    }

    /// Detaches a queue pair from every multicast group.
    ///
    /// # Errors
    ///
    /// [`EngineError::EngineGone`].
    pub fn detach_all(&self, qp: QpId) -> Result<(), EngineError> {
        let mut core = self.enter()?;
        let mut members = core.adapter.memberships_of(qp).into_iter();
        members.try_for_each(|member| core.leave_group(member))
    }

    /// Datagrams that were dropped so far.
    ///
    /// # Errors
    ///
    /// [`EngineError::EngineGone`].
    pub fn datagram_drops(&self) -> Result<DatagramDrops, EngineError> {
        Ok(self.enter()?.adapter.datagram_drops())
    }

    /// Makes all the progress that can be made without waiting; whether there was any. Programs
    /// need not call it.
    ///
    /// # Errors
    ///
    /// [`EngineError::EngineGone`].
    pub fn progress(&self) -> Result<bool, EngineError> {
        let mut core = self.enter()?;
        self.inner.polls.fetch_add(1, Ordering::Relaxed);
        Ok(core.run())
    }
}

impl Core {
    fn leave_group(&mut self, member: GroupMember) -> Result<(), EngineError> {
        let group = self.adapter.group_from(member.mgid, member.sgid_index)?;
        if self.adapter.detach_member(member)? {
            self.datagrams.leave(group, member.sgid_index);
        }
        Ok(())
    }

    /// Executes what has arrived on the stream of a queue pair that is about to leave.
    fn take_arrived(&mut self, now: Time, qp: QpId) {
        if let Some(conn) = self.adapter.receiving_stream(qp) {
            self.net.take_arrived(&mut self.adapter, now, conn);
        }
    }
}
