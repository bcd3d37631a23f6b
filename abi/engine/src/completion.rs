//! Completion channels, completion queues, and events of both kinds.

use std::slice;
use std::time::Duration;

use libc::pollfd;
use quipu_abi_types::*;
use quipu_host::EventsReported;
use quipu_nic::AsyncEvent;

use crate::entry::{Out, WAIT, entries};
use crate::instance::{current, for_destructor, opened};
use crate::registry::Object;
use crate::status::{Failure, INVALID};

/// The flags of creation. That one thread uses a queue changes nothing: one lock orders everything.
const KNOWN_FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;

/// How many events of an object were handed out, as the table has it.
pub(crate) fn reported(events: EventsReported) -> EngineEventsReported {
    EngineEventsReported { comp: events.completion, r#async: events.asynchronous }
}

/// The type of an asynchronous event, and what it is about; `None` for the port.
fn describe(event: &AsyncEvent) -> (u32, Option<Object>) {
    match *event {
        AsyncEvent::CqErr(cq) => (IBV_EVENT_CQ_ERR, Some(Object::Cq(cq))),
        AsyncEvent::QpFatal(qp) => (IBV_EVENT_QP_FATAL, Some(Object::Qp(qp))),
        AsyncEvent::QpReqErr(qp) => (IBV_EVENT_QP_REQ_ERR, Some(Object::Qp(qp))),
        AsyncEvent::QpAccessErr(qp) => (IBV_EVENT_QP_ACCESS_ERR, Some(Object::Qp(qp))),
        AsyncEvent::CommEst(qp) => (IBV_EVENT_COMM_EST, Some(Object::Qp(qp))),
        AsyncEvent::SqDrained(qp) => (IBV_EVENT_SQ_DRAINED, Some(Object::Qp(qp))),
        AsyncEvent::QpLastWqeReached(qp) => (IBV_EVENT_QP_LAST_WQE_REACHED, Some(Object::Qp(qp))),
        AsyncEvent::SrqErr(srq) => (IBV_EVENT_SRQ_ERR, Some(Object::Srq(srq))),
        AsyncEvent::SrqLimitReached(srq) => (IBV_EVENT_SRQ_LIMIT_REACHED, Some(Object::Srq(srq))),
        AsyncEvent::PortActive => (IBV_EVENT_PORT_ACTIVE, None),
        AsyncEvent::PortErr => (IBV_EVENT_PORT_ERR, None),
        AsyncEvent::PathMig(qp) => (IBV_EVENT_PATH_MIG, Some(Object::Qp(qp))),
        AsyncEvent::PathMigErr(qp) => (IBV_EVENT_PATH_MIG_ERR, Some(Object::Qp(qp))),
        AsyncEvent::DeviceFatal => (IBV_EVENT_DEVICE_FATAL, None),
        AsyncEvent::LidChange => (IBV_EVENT_LID_CHANGE, None),
        AsyncEvent::PkeyChange => (IBV_EVENT_PKEY_CHANGE, None),
        AsyncEvent::SmChange => (IBV_EVENT_SM_CHANGE, None),
        AsyncEvent::ClientReregister => (IBV_EVENT_CLIENT_REREGISTER, None),
        AsyncEvent::GidChange => (IBV_EVENT_GID_CHANGE, None),
    }
}

entries! {
    /// [`EngineApi::get_async_event`]
    fn get_async_event(context: ContextHandle, out: *mut EngineAsyncEvent) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        let id = instance.registry().context(instance.context(context))?;
        loop {
            let event = instance.engine.wait_async_within(id, WAIT)?;
            let (event_type, about) = describe(&event);
            let told = match about {
                Some(object) => instance.registry().tell(object).map(|cookie| (0, cookie)),
                None => Some((1, 0)),
            };
            if let Some((port_num, cookie)) = told {
                out.fill(EngineAsyncEvent { event_type, port_num, cookie });
                return Ok(());
            }
        }
    }

    /// [`EngineApi::create_channel`]
    fn create_channel(context: ContextHandle, out: *mut EngineChannel) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        let context = instance.context(context);
        instance.registry().context(context)?;
        let (channel, fd) = instance.engine.create_channel()?;
        instance.registry().add(Object::Channel(channel), context, 0);
        out.fill(EngineChannel { channel: instance.channel_handle(channel), fd });
        Ok(())
    }

    /// [`EngineApi::destroy_channel`]
    fn destroy_channel(channel: ChannelHandle) {
        let Some(instance) = for_destructor()? else { return Ok(()) };
        let channel = instance.channel(channel);
        instance.destroyed(instance.engine.destroy_channel(channel).map_err(Failure::from))?;
        instance.registry().remove(Object::Channel(channel), 0);
        Ok(())
    }

    /// [`EngineApi::get_comp_event`]
    fn get_comp_event(channel: ChannelHandle, cookie: *mut u64) {
        // SAFETY: the table demands a valid pointer.
        let cookie = unsafe { Out::new(cookie) }?;
        let instance = opened()?;
        let channel = instance.channel(channel);
        cookie.fill(instance.engine.wait_channel_within(channel, WAIT)?.context);
        Ok(())
    }

    /// [`EngineApi::poll`]
    fn poll(fds: *mut pollfd, count: usize, timeout_ns: i64, ready: *mut usize) {
        // SAFETY: the table demands a valid pointer.
        let ready = unsafe { Out::new(ready) }?;
        if fds.is_null() || count > isize::MAX as usize / size_of::<pollfd>() {
            return Err(INVALID);
        }
        // SAFETY: the table demands so many descriptors, which nobody else uses during the call.
        let fds = unsafe { slice::from_raw_parts_mut(fds, count) };
        let most = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
        ready.fill(opened()?.engine.poll_within(fds, most)?);
        Ok(())
    }

    /// [`EngineApi::create_cq`]
    fn create_cq(context: ContextHandle, init: *const EngineCqInit, out: *mut EngineCq) {
        // SAFETY: the table demands valid pointers.
        let (out, init) = unsafe { (Out::new(out)?, init.as_ref().ok_or(INVALID)?) };
        if init.comp_vector != 0 {
            return Err(INVALID);
        }
        if init.flags & !KNOWN_FLAGS != 0 {
            return Err(EngineStatus::NotSupported.into());
        }
        let instance = current()?;
        let context = instance.context(context);
        let channel =
            (init.channel != ChannelHandle::NONE).then(|| instance.channel(init.channel));
        let id = {
            let registry = instance.registry();
            if let Some(channel) = channel {
                registry.expect(Object::Channel(channel), context)?;
            }
            registry.context(context)?
        };
        let (cq, cqe) = instance.engine.create_cq(id, init.cqe, channel, init.cookie)?;
        let ignores_overrun = init.flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0;
        instance.engine.set_cq_traits(cq, init.stamps != 0, ignores_overrun)?;
        instance.registry().add(Object::Cq(cq), context, init.cookie);
        out.fill(EngineCq { cq: instance.cq_handle(cq), cqe });
        Ok(())
    }

    /// [`EngineApi::resize_cq`]
    fn resize_cq(cq: CqHandle, cqe: u32, actual: *mut u32) {
        // SAFETY: the table demands a valid pointer.
        let actual = unsafe { Out::new(actual) }?;
        let instance = current()?;
        actual.fill(instance.engine.resize_cq(instance.cq(cq), cqe)?);
        Ok(())
    }

    /// [`EngineApi::moderate_cq`]
    fn moderate_cq(cq: CqHandle, count: u32, period: u32) {
        let count = u16::try_from(count).map_err(|_| INVALID)?;
        let period = u16::try_from(period).map_err(|_| INVALID)?;
        let instance = current()?;
        Ok(instance.engine.moderate_cq(instance.cq(cq), count, u64::from(period) * 1000)?)
    }

    /// [`EngineApi::destroy_cq`]
    fn destroy_cq(cq: CqHandle, out: *mut EngineEventsReported) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let Some(instance) = for_destructor()? else {
            out.fill(EngineEventsReported::default());
            return Ok(());
        };
        let cq = instance.cq(cq);
        let events = instance.destroyed(instance.engine.destroy_cq(cq).map_err(Failure::from))?;
        instance.registry().remove(Object::Cq(cq), events.asynchronous);
        out.fill(reported(events));
        Ok(())
    }

    /// [`EngineApi::req_notify_cq`]
    fn req_notify_cq(cq: CqHandle, solicited_only: i32) {
        let instance = opened()?;
        Ok(instance.engine.req_notify_cq(instance.cq(cq), solicited_only != 0)?)
    }
}
