//! Completion events and asynchronous events.

use std::cell::Cell;
use std::thread::LocalKey;
use std::time::Duration;

use libc::{c_uint, c_void};
use quipu_abi_trace::{comes_back, entry, waiting_entry};
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne, Void};

use crate::context::context;
use crate::cq::{Channel, cq};
use crate::engine::check;
use crate::qp::qp;
use crate::srq::srq;

/// What an asynchronous event is about.
enum Subject {
    Cq,
    Qp,
    Srq,
    /// A port, or the device as a whole.
    Port,
}

fn subject(event_type: u32) -> Subject {
    match event_type {
        IBV_EVENT_CQ_ERR => Subject::Cq,
        IBV_EVENT_QP_FATAL
        | IBV_EVENT_QP_REQ_ERR
        | IBV_EVENT_QP_ACCESS_ERR
        | IBV_EVENT_COMM_EST
        | IBV_EVENT_SQ_DRAINED
        | IBV_EVENT_PATH_MIG
        | IBV_EVENT_PATH_MIG_ERR
        | IBV_EVENT_QP_LAST_WQE_REACHED => Subject::Qp,
        IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => Subject::Srq,
        _ => Subject::Port,
    }
}

type Channels = (&'static EngineApi, ChannelHandle);
type Contexts = (&'static EngineApi, ContextHandle);

thread_local! {
    /// What this thread waits for, while its call comes back now and then.
    static CHANNEL: Cell<Option<Channels>> = const { Cell::new(None) };
    static CONTEXT: Cell<Option<Contexts>> = const { Cell::new(None) };
}

/// Waits for events of what `begin` finds, which is asked once: the program's object may be gone when the
/// call comes back. Anyone who waits for one that another thread has ended waits on, as in a read(2).
fn wait<T: Copy>(
    on: &'static LocalKey<Cell<Option<T>>>,
    begin: impl FnOnce() -> Result<T, Errno>,
    take: impl FnOnce(T) -> i32,
) -> Result<(), Errno> {
    let before = on.take().filter(|_| comes_back());
    let object = before.map_or_else(begin, Ok)?;
    let mut taken = check(take(object));
    let lives = [Errno::ERESTART, Errno::EAGAIN, Errno::EINTR];
    if before.is_some() && taken.is_err_and(|error| !lives.contains(&error)) {
        std::thread::sleep(Duration::from_millis(250));
        taken = Err(Errno::ERESTART);
    }
    if taken == Err(Errno::ERESTART) {
        on.set(Some(object));
    }
    taken
}

waiting_entry! {
    /// `ibv_get_cq_event(3)`
    fn ibv_get_cq_event(
        raw: *mut ibv_comp_channel,
        out: *mut *mut ibv_cq,
        cq_context: *mut *mut c_void,
    ) -> IntMinusOne {
        // SAFETY: the program passes a channel, and null or valid pointers.
        let (out, cq_context) = unsafe { (out.as_mut(), cq_context.as_mut()) };
        let (Some(out), Some(cq_context)) = (out, cq_context) else { return Err(Errno::EINVAL) };
        // SAFETY: the program passes a channel.
        let begin = || unsafe { Channel::get(raw) }.map(|channel| (channel.api, channel.handle));
        let mut cookie = 0;
        // SAFETY: `cookie` is valid for the call.
        let take = |(api, channel): Channels| unsafe { (api.get_comp_event)(channel, &mut cookie) };
        wait(&CHANNEL, begin, take)?;
        let cq = cookie as *mut ibv_cq;
        // SAFETY: the cookie is the address of a queue, which is not freed before this event is
        // acknowledged.
        *cq_context = unsafe { (*cq).cq_context };
        *out = cq;
        Ok(0)
    }

    /// `ibv_get_async_event(3)`
    fn ibv_get_async_event(raw: *mut ibv_context, out: *mut ibv_async_event) -> IntMinusOne {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let out = unsafe { out.as_mut() }.ok_or(Errno::EINVAL)?;
        // SAFETY: the program passes a context.
        let begin = || unsafe { context(raw) }.map(|context| (context.api, context.handle));
        let mut event = EngineAsyncEvent { event_type: 0, port_num: 0, cookie: 0 };
        // SAFETY: `event` is valid for the call.
        let take = |(api, context): Contexts| unsafe { (api.get_async_event)(context, &mut event) };
        wait(&CONTEXT, begin, take)?;
        let cookie = event.cookie;
        out.event_type = event.event_type;
        // The cookie is the address that the program knows the object by.
        out.element = match subject(event.event_type) {
            Subject::Cq => ibv_async_event_element { cq: cookie as *mut ibv_cq },
            Subject::Qp => ibv_async_event_element { qp: cookie as *mut ibv_qp },
            Subject::Srq => ibv_async_event_element { srq: cookie as *mut ibv_srq },
            Subject::Port => {
                // The union is larger than a port number: no byte of it stays unset.
                let mut element = ibv_async_event_element { cq: std::ptr::null_mut() };
                element.port_num = event.port_num as i32;
                element
            }
        };
        Ok(0)
    }
}

entry! {
    /// `ibv_ack_cq_events(3)`
    fn ibv_ack_cq_events(raw: *mut ibv_cq, events: c_uint) -> Void {
        // SAFETY: the program passes a completion queue.
        unsafe { cq(raw) }?.acks.comp(events);
        Ok(())
    }

    /// `ibv_ack_async_event(3)`
    fn ibv_ack_async_event(event: *mut ibv_async_event) -> Void {
        // SAFETY: the program passes an event that it got, whose object lives until it is
        // acknowledged; the field of the union is chosen by its type, as it was when written.
        unsafe {
            let event = event.as_ref().ok_or(Errno::EINVAL)?;
            match subject(event.event_type) {
                Subject::Cq => cq(event.element.cq)?.acks.asynchronous(),
                Subject::Qp => qp(event.element.qp)?.acks.asynchronous(),
                Subject::Srq => srq(event.element.srq)?.acks.asynchronous(),
                Subject::Port => {}
            }
        }
        Ok(())
    }
}
