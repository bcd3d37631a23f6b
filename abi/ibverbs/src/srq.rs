//! Shared receive queues.

use libc::{c_int, c_void};
use quipu_abi_trace::{entry, quick_entry};
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, Null, Tagged};

use crate::acks::Acks;
use crate::context::context;
use crate::cq::cq;
use crate::engine::check;
use crate::object::Blank;
use crate::pd::{Member, pd};
use crate::qp::posted;
use crate::xrcd::xrcd;

/// The private part of a shared receive queue.
pub(crate) struct SrqState {
    api: &'static EngineApi,
    pub(crate) handle: SrqHandle,
    number: u32,
    pub(crate) acks: Acks,
    _member: Member,
}

impl Tagged for SrqState {
    const TAG: u64 = 0x5155_4950_0053_5251;
}

type Srq = Handle<ibv_srq, SrqState>;

/// Finds the shared receive queue behind a pointer of the program.
///
/// # Safety
///
/// As [`Handle::get`].
#[inline]
pub(crate) unsafe fn srq<'a>(raw: *const ibv_srq) -> Result<&'a Srq, Errno> {
    // SAFETY: passed on from the caller.
    unsafe { Srq::get(raw) }
}

/// Creates a queue, and writes to `attr` what it really has.
///
/// # Safety
///
/// `raw` is a domain of the program.
unsafe fn create(
    raw: *mut ibv_pd,
    srq_context: *mut c_void,
    attr: &mut ibv_srq_attr,
    (xrcd, cq): (XrcdHandle, CqHandle),
) -> Result<*mut ibv_srq, Errno> {
    // SAFETY: passed on from the caller.
    let pd = unsafe { pd(raw) }?;
    let mut public = ibv_srq::blank();
    // SAFETY: a live object of the program.
    public.context = unsafe { (*raw).context };
    public.srq_context = srq_context;
    public.pd = raw;
    let (handle, number) = (SrqHandle::NONE, 0);
    let acks = Acks::default();
    let state = SrqState { api: pd.api, handle, number, acks, _member: pd.enter() };
    let made = Srq::create_with(public, state, |public, state| {
        let init = EngineSrqInit { attr: *attr, xrcd, cq, cookie: public as u64 };
        let mut made = EngineSrq { srq: SrqHandle::NONE, attr: *attr, srq_num: 0 };
        // SAFETY: both structures are valid for the call.
        check(unsafe { (pd.api.create_srq)(pd.handle, &init, &mut made) })?;
        (state.handle, state.number) = (made.srq, made.srq_num);
        *attr = made.attr;
        // SAFETY: the allocation is ours until it is returned.
        unsafe { (*public).handle = made.srq.0 as u32 };
        Ok(())
    })?;
    Ok(made)
}

/// XRC domain and completion queue of a basic queue.
const BASIC: (XrcdHandle, CqHandle) = (XrcdHandle::NONE, CqHandle::NONE);

entry! {
    /// `ibv_create_srq(3)`
    fn ibv_create_srq(raw: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> Null<ibv_srq> {
        // SAFETY: the program passes a domain, and null or a valid pointer.
        unsafe {
            let init = init.as_mut().ok_or(Errno::EINVAL)?;
            create(raw, init.srq_context, &mut init.attr, BASIC)
        }
    }

    /// `ibv_create_srq_ex(3)`: basic ones and those of XRC; tag matching is not supported.
    fn create_srq_ex(raw: *mut ibv_context, init: *mut ibv_srq_init_attr_ex) -> Null<ibv_srq> {
        // SAFETY: the program passes a context, and null or a valid pointer; a domain if the mask
        // says so.
        unsafe {
            context(raw)?;
            let init = init.as_mut().ok_or(Errno::EINVAL)?;
            let has = |bit: u32| init.comp_mask & bit != 0;
            if !has(IBV_SRQ_INIT_ATTR_PD) {
                return Err(Errno::EINVAL);
            }
            let known = IBV_SRQ_INIT_ATTR_PD
                | IBV_SRQ_INIT_ATTR_TYPE
                | IBV_SRQ_INIT_ATTR_XRCD
                | IBV_SRQ_INIT_ATTR_CQ;
            let kind = if has(IBV_SRQ_INIT_ATTR_TYPE) { init.srq_type } else { IBV_SRQT_BASIC };
            if init.comp_mask & !known != 0 {
                return Err(Errno::EOPNOTSUPP);
            }
            let belongings = match kind {
                IBV_SRQT_BASIC => BASIC,
                IBV_SRQT_XRC if has(IBV_SRQ_INIT_ATTR_XRCD) && has(IBV_SRQ_INIT_ATTR_CQ) => {
                    (xrcd(init.xrcd)?.handle, cq(init.cq)?.handle)
                }
                IBV_SRQT_XRC => return Err(Errno::EINVAL),
                _ => return Err(Errno::EOPNOTSUPP),
            };
            create(init.pd, init.srq_context, &mut init.attr, belongings)
        }
    }

    /// `ibv_modify_srq(3)`
    fn ibv_modify_srq(raw: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> IntErrno {
        // SAFETY: the program passes a queue, and null or a valid pointer.
        let srq = unsafe { srq(raw) }?;
        if attr.is_null() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: not null, so valid.
        check(unsafe { (srq.api.modify_srq)(srq.handle, attr, mask as u32) })
    }

    /// `ibv_query_srq(3)`
    fn ibv_query_srq(raw: *mut ibv_srq, attr: *mut ibv_srq_attr) -> IntErrno {
        // SAFETY: the program passes a queue, and null or a valid pointer.
        let srq = unsafe { srq(raw) }?;
        if attr.is_null() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: not null, so valid.
        check(unsafe { (srq.api.query_srq)(srq.handle, attr) })
    }

    /// `ibv_get_srq_num(3)`
    fn get_srq_num(raw: *mut ibv_srq, number: *mut u32) -> IntErrno {
        // SAFETY: the program passes a queue, and null or a valid pointer.
        unsafe { *number.as_mut().ok_or(Errno::EINVAL)? = srq(raw)?.number };
        Ok(())
    }

    /// `ibv_destroy_srq(3)`: waits until all its events are acknowledged.
    fn ibv_destroy_srq(raw: *mut ibv_srq) -> IntErrno {
        // SAFETY: the program passes a queue and, but for acknowledging events, uses it no more;
        // its domain outlives it.
        unsafe {
            let srq = srq(raw)?;
            let mut reported = EngineEventsReported::default();
            check((srq.api.destroy_srq)(srq.handle, &mut reported))?;
            srq.acks.wait(reported);
            drop(Srq::take(raw)?);
        }
        Ok(())
    }
}

quick_entry! {
    /// `ibv_post_srq_recv(3)`
    fn post_srq_recv(
        raw: *mut ibv_srq,
        wr: *mut ibv_recv_wr,
        bad: *mut *mut ibv_recv_wr,
    ) -> IntErrno {
        // SAFETY: the program passes a queue, and a list of valid work requests.
        unsafe {
            let post = |first_bad: &mut _| {
                let srq = srq(raw)?;
                check((srq.api.post_srq_recv)(srq.handle, wr, first_bad))
            };
            posted(wr, bad, post)
        }
    }
}
