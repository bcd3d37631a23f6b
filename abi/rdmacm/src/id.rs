//! Identifiers: their life, and the channel that they belong to.

use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{c_int, c_void};
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntMinusOne, Tagged};
use quipu_facade::{check, engine};

use crate::acks::Acks;
use crate::channel::{self, Channel};
use crate::device::Device;
use crate::multicast::{self, Groups};
use crate::names::Names;
use crate::{children, event};

/// The private part of an identifier.
pub(crate) struct IdState {
    pub(crate) api: &'static EngineApi,
    pub(crate) handle: CmIdHandle,
    pub(crate) acks: Acks,
    book: Mutex<Book>,
}

/// What changes in the life of an identifier, in addition to its public part.
pub(crate) struct Book {
    /// Whether calls wait for their event; the channel is the identifier's own then.
    pub(crate) synchronous: bool,
    /// The device it is bound to, whose default protection domain it uses.
    pub(crate) device: Option<&'static Device>,
    /// What `public.route.path_rec` points to, once there is a path.
    pub(crate) path: Option<Box<ibv_sa_path_rec>>,
    /// The limits that `connect`, or the peer's request, has brought.
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    /// `ai_connect` of `rdma_create_ep`, which goes in front of the program's private data.
    pub(crate) connect_data: Vec<u8>,
    /// What queue pairs of requests are to be made with, of `rdma_create_ep`.
    pub(crate) endpoint: Option<(*mut ibv_pd, ibv_qp_init_attr)>,
    /// A listener's requests stay though their device cannot be had yet: those of r* sockets wait in the
    /// backlog.
    pub(crate) keeps_requests: bool,
    /// The program has ended the connection: a synchronous identifier waits for the event of that once.
    pub(crate) ended: bool,
    /// The queue pair could not be brought up, and the program knows.
    pub(crate) failed: bool,
    /// Vendors' options, of a queue pair that the program moves by itself, and those of the peer.
    pub(crate) local_ece: ibv_ece,
    pub(crate) remote_ece: ibv_ece,
    pub(crate) groups: Groups,
    /// `rdma_resolve_addrinfo` and its answer.
    pub(crate) names: Names,
    /// Its own address as the program gave it, where that is one of InfiniBand.
    pub(crate) native: Option<sockaddr_ib>,
}

// SAFETY: the pointers are to objects of libibverbs, which may be used from any thread.
unsafe impl Send for Book {}

impl Tagged for IdState {
    const TAG: u64 = 0x5155_4950_434d_4944;
}

/// An identifier.
pub(crate) type Id = Handle<rdma_cm_id, IdState>;

/// Finds the identifier behind a pointer of the program.
///
/// # Safety
///
/// As [`Handle::get`].
pub(crate) unsafe fn id<'a>(raw: *mut rdma_cm_id) -> Result<&'a Id, Errno> {
    // SAFETY: passed on from the caller.
    unsafe { Id::get(raw) }
}

impl IdState {
    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        // Each change is one assignment, so a panic leaves no half of one.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new(api: &'static EngineApi, handle: CmIdHandle, synchronous: bool) -> Self {
        let book = Book {
            synchronous,
            device: None,
            path: None,
            responder_resources: 0,
            initiator_depth: 0,
            connect_data: Vec::new(),
            endpoint: None,
            keeps_requests: false,
            ended: false,
            failed: false,
            local_ece: ibv_ece::default(),
            remote_ece: ibv_ece::default(),
            groups: Groups::default(),
            names: Names::default(),
            native: None,
        };
        Self { api, handle, acks: Acks::default(), book: Mutex::new(book) }
    }
}

/// An identifier without device, addresses and queues.
fn blank(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: u32,
    qp_type: u32,
) -> rdma_cm_id {
    // SAFETY: the structure consists of integers and raw pointers.
    let mut public: rdma_cm_id = unsafe { std::mem::zeroed() };
    public.channel = channel;
    public.context = context;
    public.ps = ps;
    public.qp_type = qp_type;
    public
}

/// The service that a port space is for, where the program does not say.
fn service_of(ps: u32) -> u32 {
    if ps == RDMA_PS_UDP || ps == RDMA_PS_IPOIB { IBV_QPT_UD } else { IBV_QPT_RC }
}

/// Makes an identifier; without a channel, a synchronous one.
///
/// # Safety
///
/// `channel` is null or a channel.
pub(crate) unsafe fn create(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: u32,
    qp_type: Option<u32>,
) -> Result<*mut rdma_cm_id, Errno> {
    let api = engine()?;
    let synchronous = channel.is_null();
    let channel = if synchronous { channel::create(true)? } else { channel };
    // SAFETY: of the program, or just made.
    let init_channel = unsafe { Channel::get(channel) }?.handle;
    let qp_type = qp_type.unwrap_or(service_of(ps));
    let public = blank(channel, context, ps, qp_type);
    let state = IdState::new(api, CmIdHandle::NONE, synchronous);
    let made = Id::create_with(public, state, |raw, state| {
        let init =
            EngineCmIdInit { channel: init_channel, port_space: ps, qp_type, cookie: raw as u64 };
        // SAFETY: both are valid for the call.
        check(unsafe { (api.cm.create_id)(&init, &mut state.handle) })
    });
    if made.is_err() && synchronous {
        // SAFETY: it was just made, for this identifier alone.
        let _ = unsafe { channel::destroy(channel) };
    }
    made
}

/// The identifier of a connect request, on the channel that it was taken from: that of its listener may be
/// changing.
///
/// # Safety
///
/// `listener` is an identifier.
pub(crate) unsafe fn adopt(
    listener: *mut rdma_cm_id,
    handle: CmIdHandle,
    channel: *mut rdma_event_channel,
) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: passed on from the caller; a listener's public part is the program's to read.
    let (state, public) = unsafe { (id(listener)?, &*listener) };
    let (api, native) = (state.api, state.book().native);
    let public = blank(channel, public.context, public.ps, public.qp_type);
    let adopted = Id::create_with(public, IdState::new(api, handle, false), |raw, state| {
        // Addresses of a request are of the family that is listened at.
        state.book().native = native;
        // SAFETY: the handle came with the request.
        check(unsafe { (api.cm.set_cookie)(handle, raw as u64) })?;
        for _ in 0..children::add(handle, raw) {
            state.acks.add();
        }
        Ok(())
    });
    if adopted.is_err() {
        children::remove(handle);
    }
    adopted
}

/// Ends an identifier, waiting until its events are acknowledged.
///
/// # Safety
///
/// `raw` is an identifier that is used no more.
pub(crate) unsafe fn destroy(raw: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    let state = unsafe { id(raw) }?;
    // SAFETY: as above.
    unsafe {
        drop_event(raw);
        multicast::leave_all(raw);
    }
    let mut reported = 0;
    // SAFETY: `reported` is valid for the call.
    check(unsafe { (state.api.cm.destroy_id)(state.handle, &mut reported) })?;
    state.acks.wait(reported);
    // Not before: a thread that has taken an event of it finds it by this.
    children::remove(state.handle);
    // SAFETY: passed on from the caller; the events that named it are acknowledged.
    let this = unsafe { Id::take(raw) }?;
    // SAFETY: it is this function's alone now.
    let channel = unsafe { (*this.public()).channel };
    let book = this.book();
    if let Some(device) = book.device {
        device.leave_domain();
    }
    if book.synchronous {
        // SAFETY: the channel is this identifier's own.
        let _ = unsafe { channel::destroy(channel) };
    }
    drop(book);
    Ok(())
}

/// Acknowledges the event that a synchronous call has left in the identifier.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn drop_event(raw: *mut rdma_cm_id) {
    // SAFETY: passed on from the caller; the event came from `event::take`.
    unsafe {
        let old = ptr::replace(&raw mut (*raw).event, ptr::null_mut());
        if !old.is_null() {
            let _ = event::acknowledge(old);
        }
    }
}

/// The end of a call that an event answers: a synchronous identifier waits for the event and keeps
/// it. The value is 0.
///
/// # Errors
///
/// What the event says: ECONNREFUSED for a rejection.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn complete(raw: *mut rdma_cm_id) -> Result<c_int, Errno> {
    // SAFETY: passed on from the caller; its channel is its own if it is synchronous.
    unsafe {
        if !id(raw)?.book().synchronous {
            return Ok(0);
        }
        drop_event(raw);
        let event = event::take((*raw).channel)?;
        (*raw).event = event;
        match ((*event).event, (*event).status) {
            (RDMA_CM_EVENT_REJECTED, _) => Err(Errno::ECONNREFUSED),
            (_, 0) => Ok(0),
            (_, status) => Err(Errno(status.saturating_abs())),
        }
    }
}

/// Moves an identifier to another channel; to none: makes it synchronous, which it was not before (EINVAL).
///
/// # Safety
///
/// `raw` is an identifier, `channel` null or a channel.
pub(crate) unsafe fn migrate(
    raw: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    let state = unsafe { id(raw) }?;
    let synchronous = channel.is_null();
    if synchronous && state.book().synchronous {
        return Err(Errno::EINVAL);
    }
    let to = if synchronous { channel::create(true)? } else { channel };
    // SAFETY: passed on from the caller.
    let moved = unsafe { switch(raw, state, to, synchronous) };
    let (reported, old, was) = moved.inspect_err(|_| {
        if synchronous {
            // SAFETY: it was just made, for this identifier alone.
            let _ = unsafe { channel::destroy(to) };
        }
    })?;
    // SAFETY: passed on from the caller.
    unsafe { drop_event(raw) };
    state.acks.wait(reported);
    if was {
        // SAFETY: the old channel was this identifier's own.
        let _ = unsafe { channel::destroy(old) };
    }
    Ok(())
}

/// The part of [`migrate`] that is done at once: a request that comes to the new channel already belongs
/// there. How many events are to be acknowledged, the old channel, and whether that was the identifier's own.
///
/// # Safety
///
/// `raw` is an identifier, that of `state`; `to` is null or a channel.
unsafe fn switch(
    raw: *mut rdma_cm_id,
    state: &IdState,
    to: *mut rdma_event_channel,
    synchronous: bool,
) -> Result<(u32, *mut rdma_event_channel, bool), Errno> {
    let mut reported = 0;
    let mut book = state.book();
    // SAFETY: passed on from the caller; `reported` is valid for the call.
    unsafe {
        let handle = Channel::get(to)?.handle;
        check((state.api.cm.migrate_id)(state.handle, handle, &mut reported))?;
        let old = ptr::replace(&raw mut (*raw).channel, to);
        Ok((reported, old, std::mem::replace(&mut book.synchronous, synchronous)))
    }
}

entry! {
    /// `rdma_create_id(3)`
    fn rdma_create_id(
        channel: *mut rdma_event_channel,
        out: *mut *mut rdma_cm_id,
        context: *mut c_void,
        ps: u32,
    ) -> IntMinusOne {
        // SAFETY: the program passes null or a valid pointer.
        let out = unsafe { out.as_mut() }.ok_or(Errno::EINVAL)?;
        // SAFETY: the program passes null or a channel.
        *out = unsafe { create(channel, context, ps, None) }?;
        Ok(0)
    }

    /// `rdma_destroy_id(3)`
    fn rdma_destroy_id(raw: *mut rdma_cm_id) -> IntMinusOne {
        // SAFETY: the program passes an identifier and uses it no more.
        unsafe { destroy(raw) }?;
        Ok(0)
    }

    /// `rdma_migrate_id(3)`
    fn rdma_migrate_id(raw: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or a channel.
        unsafe { migrate(raw, channel) }?;
        Ok(0)
    }
}
