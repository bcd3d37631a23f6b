//! Events: taking them from a channel, what each one means for its identifier, acknowledging them.

use std::cell::Cell;
use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use libc::{c_char, c_int};
use quipu_abi_trace::{comes_back, entry, waiting_entry};
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntMinusOne, Null, Tagged};
use quipu_facade::check;

use crate::address::{learn_port, refresh};
use crate::channel::{self, Channel};
use crate::children;
use crate::ece;
use crate::id::{self, id};
use crate::multicast::{self, Group};
use crate::names;
use crate::state::{to_error, to_rts};

/// The private part of an event.
pub(crate) struct EventState {
    /// The identifier that the engine has counted it for: in a connect request the listener.
    owner: *mut rdma_cm_id,
    /// In an event of a group, the membership, for which it counts as well; else null.
    group: *mut Group,
    private_data: [u8; CM_PRIVATE_DATA_MAX],
}

impl Tagged for EventState {
    const TAG: u64 = 0x5155_4950_434d_4556;
}

/// An event.
type Event = Handle<rdma_cm_event, EventState>;

/// Takes the next event that is for the program.
///
/// # Errors
///
/// EAGAIN where the descriptor is non-blocking and there is none, EINTR.
///
/// # Safety
///
/// `raw` is a channel.
pub(crate) unsafe fn take(raw: *mut rdma_event_channel) -> Result<*mut rdma_cm_event, Errno> {
    // SAFETY: passed on from the caller.
    let wait = unsafe { Wait::begin(raw) }?;
    loop {
        match take_from(&wait) {
            Err(Errno::ERESTART) => {}
            taken => return taken,
        }
    }
}

/// [`take`] by a [`waiting_entry!`], which does not wait for long.
///
/// A thread that waits in a channel that is destroyed, or that comes to wait a moment too late, goes on
/// waiting, as a read of a descriptor does that another thread closes. Programs that end (rping) count on it.
///
/// # Errors
///
/// As there; ERESTART if there is none yet.
///
/// # Safety
///
/// As there.
unsafe fn take_soon(raw: *mut rdma_event_channel) -> Result<*mut rdma_cm_event, Errno> {
    let wait = match WAIT.take().filter(|_| comes_back()) {
        Some(wait) => wait,
        None => {
            // SAFETY: passed on from the caller.
            let wait = unsafe { Wait::begin(raw) }?;
            if let Wait::In { api, .. } = &wait {
                // SAFETY: it takes a number.
                check(unsafe { (api.note_call)(EngineCall::GetCmEvent as u32) })?;
            }
            wait
        }
    };
    let taken = take_from(&wait);
    if taken == Err(Errno::ERESTART) {
        WAIT.set(Some(wait));
    }
    taken
}

/// What a thread waits for.
enum Wait {
    /// Events of a channel, which is looked at once: it may be gone when the call comes back.
    In {
        api: &'static EngineApi,
        channel: CmChannelHandle,
        closed: Arc<AtomicBool>,
        /// The program's name of it, which identifiers of requests are told.
        public: *mut rdma_event_channel,
    },
    /// Nothing.
    ForEver,
}

thread_local! {
    /// What this thread waits for, while its call comes back now and then.
    static WAIT: Cell<Option<Wait>> = const { Cell::new(None) };
}

impl Wait {
    /// # Safety
    ///
    /// As [`take`].
    unsafe fn begin(raw: *mut rdma_event_channel) -> Result<Self, Errno> {
        // SAFETY: passed on from the caller.
        let channel = match unsafe { Channel::get(raw) } {
            Err(_) if channel::is_destroyed_by_another(raw) => return Ok(Self::ForEver),
            channel => channel?,
        };
        let (api, closed) = (channel.api, Arc::clone(&channel.closed));
        Ok(Self::In { api, channel: channel.handle, closed, public: raw })
    }
}

/// Takes the next event that is for the program, or says ERESTART.
fn take_from(wait: &Wait) -> Result<*mut rdma_cm_event, Errno> {
    let Wait::In { api, channel, closed, public } = wait else { return Err(wait_on()) };
    match next(api.cm.get_event, *channel, *public) {
        Err(_) if closed.load(Ordering::Acquire) => Err(wait_on()),
        taken => taken,
    }
}

/// Takes the next event that is for the program and queued already. Makes no progress.
///
/// # Errors
///
/// EAGAIN if there is none.
///
/// # Safety
///
/// `raw` is a channel that no other thread destroys.
pub(crate) unsafe fn take_queued(
    raw: *mut rdma_event_channel,
) -> Result<*mut rdma_cm_event, Errno> {
    // SAFETY: passed on from the caller.
    let channel = unsafe { Channel::get(raw) }?;
    next(channel.api.cm.take_event, channel.handle, raw)
}

/// Asks the engine for events until one is for the program.
fn next(
    ask: unsafe extern "C" fn(CmChannelHandle, *mut EngineCmEvent) -> i32,
    channel: CmChannelHandle,
    public: *mut rdma_event_channel,
) -> Result<*mut rdma_cm_event, Errno> {
    loop {
        // SAFETY: the structure consists of integers.
        let mut reported: EngineCmEvent = unsafe { std::mem::zeroed() };
        // SAFETY: `reported` is valid for the call.
        check(unsafe { ask(channel, &mut reported) })?;
        // SAFETY: the cookies in it are addresses of identifiers, which live until this event is
        // acknowledged.
        if let Some(event) = unsafe { understand(&reported, public) } {
            return Ok(event);
        }
    }
}

/// Waits for nothing, for a while.
fn wait_on() -> Errno {
    std::thread::sleep(Duration::from_millis(250));
    Errno::ERESTART
}

/// Makes of the engine's event, which came from `channel`, the program's, doing what is to be done about it;
/// none if the program need not know.
///
/// # Safety
///
/// The cookies are those of identifiers that live.
unsafe fn understand(
    reported: &EngineCmEvent,
    channel: *mut rdma_event_channel,
) -> Option<*mut rdma_cm_event> {
    let owner = match (reported.event, reported.cookie) {
        (RDMA_CM_EVENT_CONNECT_REQUEST, _) => reported.listener as *mut rdma_cm_id,
        // Another thread has taken the request, and was about to name its identifier.
        (_, 0) => children::find(reported.id),
        (_, cookie) => cookie as *mut rdma_cm_id,
    };
    if owner.is_null() {
        return None;
    }
    let public = rdma_cm_event {
        id: owner,
        listen_id: ptr::null_mut(),
        event: reported.event,
        status: reported.status,
        // SAFETY: integers, and pointers that may be null.
        param: unsafe { std::mem::zeroed() },
    };
    let group = reported.multicast as *mut Group;
    let state = EventState { owner, group, private_data: reported.private_data };
    let raw = Event::create(public, state);
    // SAFETY: passed on from the caller; `raw` was just made.
    unsafe {
        if act(raw, reported, channel) {
            return Some(raw);
        }
        let _ = acknowledge(raw);
    }
    None
}

/// What the event means. False: nothing that the program should know.
///
/// # Safety
///
/// As [`understand`]; `raw` is the event made of `reported`.
unsafe fn act(
    raw: *mut rdma_cm_event,
    reported: &EngineCmEvent,
    channel: *mut rdma_event_channel,
) -> bool {
    // SAFETY: passed on from the caller; nobody else knows the event yet.
    let event = unsafe { &mut *raw };
    let id = event.id;
    // SAFETY: passed on from the caller.
    unsafe {
        match event.event {
            RDMA_CM_EVENT_ADDR_RESOLVED => {
                event.or_else(refresh(id), RDMA_CM_EVENT_ADDR_ERROR);
            }
            RDMA_CM_EVENT_ROUTE_RESOLVED => {
                event.or_else(refresh(id), RDMA_CM_EVENT_ROUTE_ERROR);
            }
            RDMA_CM_EVENT_CONNECT_REQUEST => return request(raw, reported, channel),
            RDMA_CM_EVENT_CONNECT_RESPONSE => {
                ece::learn(id, reported.ece);
                fill(raw, reported);
                return response(event);
            }
            // Unreachable with private data: a look-up of datagrams that the peer refused.
            RDMA_CM_EVENT_ESTABLISHED => {
                learn_port(id);
                fill(raw, reported);
            }
            RDMA_CM_EVENT_UNREACHABLE => fill(raw, reported),
            RDMA_CM_EVENT_REJECTED => {
                // An answer to what this library has called off by itself.
                if has_failed(id) {
                    return false;
                }
                fill(raw, reported);
                let _ = to_error(id);
            }
            RDMA_CM_EVENT_DISCONNECTED => {
                if has_failed(id) {
                    return false;
                }
                fill(raw, reported);
            }
            RDMA_CM_EVENT_MULTICAST_JOIN | RDMA_CM_EVENT_MULTICAST_ERROR => {
                fill(raw, reported);
                multicast::joined(event, reported.multicast as *mut Group);
            }
            RDMA_CM_EVENT_ADDRINFO_ERROR => names::failed(id),
            RDMA_CM_EVENT_USER => event.param.arg = reported.arg,
            _ => {}
        }
    }
    true
}

trait OrElse {
    /// Turns the event into an error if something failed.
    fn or_else(&mut self, result: Result<(), Errno>, error: u32);
}

impl OrElse for rdma_cm_event {
    fn or_else(&mut self, result: Result<(), Errno>, error: u32) {
        if let Err(errno) = result {
            self.event = error;
            self.status = -errno.0;
        }
    }
}

/// # Safety
///
/// `raw` is an identifier.
unsafe fn has_failed(raw: *mut rdma_cm_id) -> bool {
    // SAFETY: passed on from the caller.
    unsafe { id(raw) }.is_ok_and(|id| id.book().failed)
}

/// Makes the identifier of a connect request. If that fails, the peer is told by its end.
///
/// # Safety
///
/// As [`act`].
unsafe fn request(
    raw: *mut rdma_cm_event,
    reported: &EngineCmEvent,
    channel: *mut rdma_event_channel,
) -> bool {
    // SAFETY: passed on from the caller.
    unsafe {
        let listener = (*raw).id;
        let Ok(state) = id(listener) else { return false };
        let Ok(child) = id::adopt(listener, reported.id, channel) else {
            let mut ignored = 0;
            (state.api.cm.destroy_id)(reported.id, &mut ignored);
            return false;
        };
        // Programs expect it to have a device: without one it is nothing to them, and the peer is refused.
        if refresh(child).is_err() && !state.book().keeps_requests {
            let _ = id::destroy(child);
            return false;
        }
        (*raw).listen_id = listener;
        (*raw).id = child;
        if let Ok(child) = id(child) {
            let mut book = child.book();
            book.responder_resources = reported.responder_resources;
            book.initiator_depth = reported.initiator_depth;
            book.remote_ece = reported.ece;
        }
        fill(raw, reported);
        // Its listener may have moved to another one since.
        let of_one = Channel::get(channel).is_ok_and(|channel| channel.of_one);
        if of_one && id::migrate(child, ptr::null_mut()).is_err() {
            let _ = id::destroy(child);
            return false;
        }
        true
    }
}

/// The peer has accepted. With a queue pair of its own the identifier goes on to established. False: the
/// connection has ended already, and the event that says so is the next one.
///
/// # Safety
///
/// The identifier of `event` lives.
unsafe fn response(event: &mut rdma_cm_event) -> bool {
    let raw = event.id;
    // SAFETY: passed on from the caller.
    unsafe {
        if (*raw).qp.is_null() {
            return true;
        }
        event.event = RDMA_CM_EVENT_ESTABLISHED;
        let Ok(state) = id(raw) else { return true };
        let raised = to_rts(raw, None)
            .and_then(|()| check((state.api.cm.accept)(state.handle, ptr::null())));
        if raised.is_err() {
            let _ = to_error(raw);
            // The peer need not wait for its time to run out. If there is nothing to refuse, it is gone.
            let reject = state.api.cm.reject;
            if check(reject(state.handle, RDMA_CM_REJECT_CONSUMER, ptr::null(), 0)).is_err() {
                return false;
            }
            state.book().failed = true;
        }
        event.or_else(raised, RDMA_CM_EVENT_CONNECT_ERROR);
    }
    true
}

/// Copies the parameters of an event, in the form that the identifier's service has.
///
/// # Safety
///
/// As [`act`].
unsafe fn fill(raw: *mut rdma_cm_event, reported: &EngineCmEvent) {
    // SAFETY: passed on from the caller.
    let (event, state) = unsafe { (&mut *raw, Event::get(raw)) };
    let Ok(state) = state else { return };
    // A peer of plain iWARP may send more than the program can be told of.
    let length = u8::try_from(reported.private_data_len).unwrap_or(u8::MAX);
    let private_data = if length == 0 { ptr::null() } else { state.private_data.as_ptr().cast() };
    // SAFETY: as above: the identifier lives.
    let datagrams = unsafe { (*event.id).qp_type } == IBV_QPT_UD;
    event.param = if datagrams || !state.group.is_null() {
        rdma_cm_event_param {
            ud: rdma_ud_param {
                private_data,
                private_data_len: length,
                ah_attr: reported.ah_attr,
                qp_num: reported.qp_num,
                qkey: reported.qkey,
            },
        }
    } else {
        rdma_cm_event_param {
            conn: rdma_conn_param {
                private_data,
                private_data_len: length,
                responder_resources: reported.responder_resources,
                initiator_depth: reported.initiator_depth,
                flow_control: reported.flow_control,
                retry_count: reported.retry_count,
                rnr_retry_count: reported.rnr_retry_count,
                srq: reported.srq,
                qp_num: reported.qp_num,
            },
        }
    };
}

/// Frees an event and counts it as seen.
///
/// # Safety
///
/// `raw` is null or an event that is used no more.
pub(crate) unsafe fn acknowledge(raw: *mut rdma_cm_event) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    let event = unsafe { Event::take(raw) }?;
    // SAFETY: what the engine has counted the event for is not freed before it is acknowledged.
    unsafe {
        if let Some(group) = event.group.as_ref() {
            group.acks.add();
        }
        id(event.owner)?.acks.add();
    }
    Ok(())
}

/// What `rdma_event_str` says for each event.
const NAMES: [&CStr; 20] = [
    c"RDMA_CM_EVENT_ADDR_RESOLVED",
    c"RDMA_CM_EVENT_ADDR_ERROR",
    c"RDMA_CM_EVENT_ROUTE_RESOLVED",
    c"RDMA_CM_EVENT_ROUTE_ERROR",
    c"RDMA_CM_EVENT_CONNECT_REQUEST",
    c"RDMA_CM_EVENT_CONNECT_RESPONSE",
    c"RDMA_CM_EVENT_CONNECT_ERROR",
    c"RDMA_CM_EVENT_UNREACHABLE",
    c"RDMA_CM_EVENT_REJECTED",
    c"RDMA_CM_EVENT_ESTABLISHED",
    c"RDMA_CM_EVENT_DISCONNECTED",
    c"RDMA_CM_EVENT_DEVICE_REMOVAL",
    c"RDMA_CM_EVENT_MULTICAST_JOIN",
    c"RDMA_CM_EVENT_MULTICAST_ERROR",
    c"RDMA_CM_EVENT_ADDR_CHANGE",
    c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
    c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
    c"RDMA_CM_EVENT_ADDRINFO_ERROR",
    c"RDMA_CM_EVENT_USER",
    c"RDMA_CM_EVENT_INTERNAL",
];

waiting_entry! {
    /// `rdma_get_cm_event(3)`
    fn rdma_get_cm_event(
        channel: *mut rdma_event_channel,
        out: *mut *mut rdma_cm_event,
    ) -> IntMinusOne {
        // SAFETY: the program passes null or a valid pointer.
        let out = unsafe { out.as_mut() }.ok_or(Errno::EINVAL)?;
        // SAFETY: the program passes a channel.
        *out = unsafe { take_soon(channel) }?;
        Ok(0)
    }
}

entry! {
    /// `rdma_ack_cm_event(3)`
    fn rdma_ack_cm_event(raw: *mut rdma_cm_event) -> IntMinusOne {
        // SAFETY: the program passes an event that it got, and uses it no more.
        unsafe { acknowledge(raw) }?;
        Ok(0)
    }

    /// `rdma_write_cm_event(3)`
    fn rdma_write_cm_event(
        raw: *mut rdma_cm_id,
        event: u32,
        status: c_int,
        arg: u64,
    ) -> IntMinusOne {
        if event != RDMA_CM_EVENT_USER {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the program passes an identifier.
        let state = unsafe { id(raw) }?;
        // SAFETY: the handle came from the engine.
        check(unsafe { (state.api.cm.write_event)(state.handle, event, status, arg) })?;
        Ok(0)
    }

    /// `rdma_event_str(3)`
    fn rdma_event_str(event: c_int) -> Null<c_char> {
        let name = usize::try_from(event).ok().and_then(|event| NAMES.get(event));
        Ok(name.unwrap_or(&c"UNKNOWN EVENT").as_ptr().cast_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_has_its_name() {
        let name = |event: u32| {
            // SAFETY: the texts are constants.
            unsafe { CStr::from_ptr(rdma_event_str(event as c_int)) }.to_str().unwrap()
        };
        assert_eq!(name(RDMA_CM_EVENT_ADDR_RESOLVED), "RDMA_CM_EVENT_ADDR_RESOLVED");
        assert_eq!(name(RDMA_CM_EVENT_TIMEWAIT_EXIT), "RDMA_CM_EVENT_TIMEWAIT_EXIT");
        assert_eq!(name(RDMA_CM_EVENT_INTERNAL), "RDMA_CM_EVENT_INTERNAL");
        assert_eq!(name(20), "UNKNOWN EVENT");
        assert_eq!(name(u32::MAX), "UNKNOWN EVENT");
    }
}
