//! Completion channels and completion queues.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicI32, Ordering};

use libc::{c_int, c_void};
use quipu_abi_trace::{entry, quick_entry};
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, IntMinusOne, Null, SpinLock, Tagged};

use crate::acks::Acks;
use crate::context::{Context, context};
use crate::engine::{check, errno_of};
use crate::object::Blank;
use crate::wall::Wall;

/// The private part of a completion channel.
pub(crate) struct ChannelState {
    pub(crate) api: &'static EngineApi,
    pub(crate) handle: ChannelHandle,
}

impl Tagged for ChannelState {
    const TAG: u64 = 0x5155_4950_0043_4843;
}

/// A completion channel.
pub(crate) type Channel = Handle<ibv_comp_channel, ChannelState>;

/// The private part of a completion queue. What polling needs comes first.
pub(crate) struct CqState {
    pub(crate) api: &'static EngineApi,
    pub(crate) handle: CqHandle,
    /// Held from `start_poll` to `end_poll`.
    pub(crate) polling: SpinLock,
    /// The completion that `read_*` tell about; guarded by `polling`.
    pub(crate) current: UnsafeCell<ibv_wc>,
    /// When it was made, by the clock of the device; guarded by `polling`. None if not asked for.
    pub(crate) stamp: Option<UnsafeCell<u64>>,
    /// How the clock on the wall goes by it; guarded by `polling`.
    pub(crate) wall: Wall,
    pub(crate) acks: Acks,
}

impl Tagged for CqState {
    const TAG: u64 = 0x5155_4950_0000_4351;
}

/// A completion queue. All have room for the extended form; programs know the beginning.
pub(crate) type Cq = Handle<ibv_cq_ex, CqState>;

/// Finds the completion queue behind a pointer of the program.
///
/// # Safety
///
/// As [`Handle::get`].
#[inline]
pub(crate) unsafe fn cq<'a>(raw: *const ibv_cq) -> Result<&'a Cq, Errno> {
    // SAFETY: passed on from the caller; `ibv_cq` is the beginning of `ibv_cq_ex`.
    unsafe { Cq::get(raw.cast()) }
}

/// Adds to the number of queues that a channel shows to serve.
///
/// # Safety
///
/// `channel` is null or a live channel.
unsafe fn count_in_channel(channel: *mut ibv_comp_channel, change: i32) {
    if !channel.is_null() {
        // SAFETY: "a live channel"; the field is an aligned int that only this function writes.
        let count = unsafe { AtomicI32::from_ptr(&raw mut (*channel).refcnt) };
        count.fetch_add(change, Ordering::AcqRel);
    }
}

/// What both ways to create a completion queue share.
pub(crate) struct Wanted {
    pub(crate) cqe: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) comp_vector: u32,
    pub(crate) flags: u32,
    pub(crate) stamps: bool,
}

/// Creates a completion queue of which the extended part is still empty.
///
/// # Safety
///
/// `wanted.channel` is null or a channel of the program.
pub(crate) unsafe fn create(
    raw: *mut ibv_context,
    context: &Context,
    wanted: &Wanted,
) -> Result<*mut ibv_cq_ex, Errno> {
    // SAFETY: the public part lives as long as the context.
    let vectors = unsafe { (*raw).num_comp_vectors };
    if wanted.cqe == 0 || wanted.comp_vector >= vectors as u32 {
        return Err(Errno::EINVAL);
    }
    let channel = if wanted.channel.is_null() {
        ChannelHandle::NONE
    } else {
        // SAFETY: the program passes a channel.
        unsafe { Channel::get(wanted.channel) }?.handle
    };
    let mut public = ibv_cq_ex::blank();
    public.cq.context = raw;
    public.cq.channel = wanted.channel;
    public.cq.cq_context = wanted.cq_context;
    let state = CqState {
        api: context.api,
        handle: CqHandle::NONE,
        polling: SpinLock::new(),
        current: UnsafeCell::new(ibv_wc::blank()),
        stamp: wanted.stamps.then(UnsafeCell::default),
        wall: Wall::default(),
        acks: Acks::default(),
    };
    // The engine is told the address of the queue as its cookie, so the queue is there first. It
    // learns its handle before the program, or an event, can know of it.
    let made = Cq::create_with(public, state, |public, state| {
        let init = EngineCqInit {
            cqe: wanted.cqe,
            comp_vector: wanted.comp_vector,
            flags: wanted.flags,
            stamps: wanted.stamps.into(),
            channel,
            cookie: public as u64,
        };
        let mut made = EngineCq { cq: CqHandle::NONE, cqe: 0 };
        // SAFETY: both structures are valid for the call.
        check(unsafe { (context.api.create_cq)(context.handle, &init, &mut made) })?;
        state.handle = made.cq;
        // SAFETY: the allocation is ours until it is returned.
        unsafe {
            (*public).cq.cqe = made.cqe as c_int;
            (*public).cq.handle = made.cq.0 as u32;
        }
        Ok(())
    })?;
    // SAFETY: looked up above.
    unsafe { count_in_channel(wanted.channel, 1) };
    Ok(made)
}

entry! {
    /// `ibv_create_comp_channel(3)`
    fn ibv_create_comp_channel(raw: *mut ibv_context) -> Null<ibv_comp_channel> {
        // SAFETY: the program passes a context.
        let context = unsafe { context(raw) }?;
        let mut made = EngineChannel { channel: ChannelHandle::NONE, fd: -1 };
        // SAFETY: `made` is valid for the call.
        check(unsafe { (context.api.create_channel)(context.handle, &mut made) })?;
        let mut public = ibv_comp_channel::blank();
        public.context = raw;
        public.fd = made.fd;
        Ok(Channel::create(public, ChannelState { api: context.api, handle: made.channel }))
    }

    /// `ibv_destroy_comp_channel(3)`
    fn ibv_destroy_comp_channel(raw: *mut ibv_comp_channel) -> IntErrno {
        // SAFETY: the program passes a channel and uses it no more.
        unsafe {
            let channel = Channel::get(raw)?;
            // The engine no longer knows a queue whose destruction waits for acknowledgements.
            if AtomicI32::from_ptr(&raw mut (*raw).refcnt).load(Ordering::Acquire) != 0 {
                return Err(Errno::EBUSY);
            }
            check((channel.api.destroy_channel)(channel.handle))?;
            drop(Channel::take(raw)?);
        }
        Ok(())
    }

    /// `ibv_create_cq(3)`
    fn ibv_create_cq(
        raw: *mut ibv_context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: c_int,
    ) -> Null<ibv_cq> {
        // SAFETY: the program passes a context.
        let context = unsafe { context(raw) }?;
        let positive = |number: c_int| u32::try_from(number).map_err(|_| Errno::EINVAL);
        let (cqe, comp_vector) = (positive(cqe)?, positive(comp_vector)?);
        let wanted = Wanted { cqe, cq_context, channel, comp_vector, flags: 0, stamps: false };
        // SAFETY: the program passes null or a channel.
        let cq = unsafe { create(raw, context, &wanted) }?;
        crate::cq_ex::fill(cq);
        Ok(cq.cast())
    }

    /// `ibv_resize_cq(3)`
    fn ibv_resize_cq(raw: *mut ibv_cq, cqe: c_int) -> IntErrno {
        // SAFETY: the program passes a completion queue.
        let cq = unsafe { cq(raw) }?;
        let wanted = u32::try_from(cqe).ok().filter(|wanted| *wanted > 0).ok_or(Errno::EINVAL)?;
        let mut actual = 0;
        // SAFETY: `actual` is valid for the call.
        check(unsafe { (cq.api.resize_cq)(cq.handle, wanted, &mut actual) })?;
        // SAFETY: the public part lives as long as the queue.
        unsafe { (*raw).cqe = actual as c_int };
        Ok(())
    }

    /// `ibv_destroy_cq(3)`: waits until all its events are acknowledged.
    fn ibv_destroy_cq(raw: *mut ibv_cq) -> IntErrno {
        // SAFETY: the program passes a completion queue and, but for acknowledging events, uses it
        // no more; its channel outlives it.
        unsafe {
            let cq = cq(raw)?;
            let mut reported = EngineEventsReported::default();
            check((cq.api.destroy_cq)(cq.handle, &mut reported))?;
            cq.acks.wait(reported);
            count_in_channel((*raw).channel, -1);
            drop(Cq::take(raw.cast())?);
        }
        Ok(())
    }

    /// `ibv_req_notify_cq(3)`
    fn req_notify_cq(raw: *mut ibv_cq, solicited_only: c_int) -> IntErrno {
        // SAFETY: the program passes a completion queue.
        let cq = unsafe { cq(raw) }?;
        // SAFETY: the handle came from the engine.
        check(unsafe { (cq.api.req_notify_cq)(cq.handle, solicited_only) })
    }

    /// `ibv_modify_cq(3)`: moderation of events.
    fn modify_cq(raw: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> IntErrno {
        // SAFETY: the program passes a completion queue, and null or a valid pointer.
        let (cq, attr) = unsafe { (cq(raw)?, attr.as_ref().ok_or(Errno::EINVAL)?) };
        if attr.attr_mask & !IBV_CQ_ATTR_MODERATE != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if attr.attr_mask & IBV_CQ_ATTR_MODERATE == 0 {
            return Ok(());
        }
        let (count, period) = (attr.moderate.cq_count.into(), attr.moderate.cq_period.into());
        // SAFETY: the handle came from the engine.
        check(unsafe { (cq.api.moderate_cq)(cq.handle, count, period) })
    }
}

quick_entry! {
    /// `ibv_poll_cq(3)`: how many completions, or -1.
    fn poll_cq(raw: *mut ibv_cq, max: c_int, wc: *mut ibv_wc) -> IntMinusOne {
        // SAFETY: the program passes a completion queue.
        let cq = unsafe { cq(raw) }?;
        // SAFETY: the program passes room for `max` completions.
        let polled = unsafe { (cq.api.poll_cq)(cq.handle, max, wc) };
        if polled >= 0 { Ok(polled) } else { Err(errno_of(-polled)) }
    }
}
