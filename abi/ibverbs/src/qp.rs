//! Queue pairs, and posting to them.

use std::ptr;

use libc::c_int;
use quipu_abi_trace::{entry, quick_entry};
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, Null, Plain, Tagged};

use crate::acks::Acks;
use crate::context::context;
use crate::cq::cq;
use crate::engine::check;
use crate::mr::Mw;
use crate::object::Blank;
use crate::pd::{Member, pd};
use crate::qp_ex::Builder;
use crate::srq::srq;
use crate::xrcd::xrcd;

/// The private part of a queue pair. What posting needs comes first.
pub(crate) struct QpState {
    pub(crate) api: &'static EngineApi,
    pub(crate) handle: QpHandle,
    /// Where work is built call by call; none if the program did not ask for that.
    pub(crate) builder: Option<Box<Builder>>,
    sq_sig_all: c_int,
    pub(crate) acks: Acks,
    _member: Option<Member>,
}

impl Tagged for QpState {
    const TAG: u64 = 0x5155_4950_0000_5150;
}

/// A queue pair. All have room for the extended form; programs know the beginning.
pub(crate) type Qp = Handle<ibv_qp_ex, QpState>;

/// Finds the queue pair behind a pointer of the program.
///
/// # Safety
///
/// As [`Handle::get`].
#[inline]
pub(crate) unsafe fn qp<'a>(raw: *const ibv_qp) -> Result<&'a Qp, Errno> {
    // SAFETY: passed on from the caller; `ibv_qp` is the beginning of `ibv_qp_ex`.
    unsafe { Qp::get(raw.cast()) }
}

/// What a queue pair can agree on with another one.
const NO_OPTIONS: ibv_ece = ibv_ece { vendor_id: QUIPU_VENDOR_ID, options: 0, comp_mask: 0 };

/// The handles of the queues that a new queue pair names. Those that its service does not have are not
/// looked at.
///
/// # Safety
///
/// The pointers of `init` are null or objects of the program.
unsafe fn queues(
    init: &ibv_qp_init_attr,
    is_hashed: bool,
) -> Result<(CqHandle, CqHandle, SrqHandle), Errno> {
    let none = (CqHandle::NONE, CqHandle::NONE, SrqHandle::NONE);
    // SAFETY: passed on from the caller.
    unsafe {
        if init.qp_type == IBV_QPT_XRC_RECV || is_hashed {
            return Ok(none);
        }
        let sends = cq(init.send_cq)?.handle;
        if init.qp_type == IBV_QPT_XRC_SEND {
            return Ok((sends, none.1, none.2));
        }
        let shared = if init.srq.is_null() { SrqHandle::NONE } else { srq(init.srq)?.handle };
        Ok((sends, cq(init.recv_cq)?.handle, shared))
    }
}

/// The domain in which a queue pair is made: a protection domain, or that of an XRC responder.
pub(crate) enum Home {
    Pd(*mut ibv_pd),
    Xrcd(*mut ibv_xrcd),
}

/// How a queue pair receives by an indirection table.
#[derive(Clone, Copy)]
pub(crate) struct Hashed {
    pub(crate) table: TableHandle,
    pub(crate) hash: ibv_rx_hash_conf,
}

/// What `ibv_create_qp_ex` may ask for beyond `ibv_create_qp`.
#[derive(Default)]
pub(crate) struct Extras {
    pub(crate) create_flags: u32,
    /// The operations for which there is a `builder`.
    pub(crate) send_ops: u64,
    pub(crate) builder: Option<Box<Builder>>,
    pub(crate) hashed: Option<Hashed>,
}

/// What a queue pair has of its home.
struct Lodging {
    api: &'static EngineApi,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    pd_handle: PdHandle,
    xrcd: XrcdHandle,
    member: Option<Member>,
}

impl Home {
    /// # Safety
    ///
    /// The pointer is null or a domain of the program.
    unsafe fn enter(self) -> Result<Lodging, Errno> {
        match self {
            Self::Pd(raw) => {
                // SAFETY: passed on from the caller; a domain that is found is live.
                let (pd, context) = unsafe { (pd(raw)?, (*raw).context) };
                let (api, pd_handle, member) = (pd.api, pd.handle, Some(pd.enter()));
                Ok(Lodging { api, context, pd: raw, pd_handle, xrcd: XrcdHandle::NONE, member })
            }
            Self::Xrcd(raw) => {
                // SAFETY: as above.
                let (xrcd, context) = unsafe { (xrcd(raw)?, (*raw).context) };
                let (api, pd, pd_handle) = (xrcd.api, ptr::null_mut(), PdHandle::NONE);
                Ok(Lodging { api, context, pd, pd_handle, xrcd: xrcd.handle, member: None })
            }
        }
    }
}

/// Creates a queue pair, and writes to `init.cap` what it really has.
///
/// # Safety
///
/// The pointers of `home` and `init` are null or objects of the program.
pub(crate) unsafe fn create(
    home: Home,
    init: &mut ibv_qp_init_attr,
    extras: Extras,
) -> Result<*mut ibv_qp_ex, Errno> {
    let Extras { create_flags, send_ops, builder, hashed } = extras;
    // SAFETY: passed on from the caller.
    let (home, queues) = unsafe { (home.enter()?, queues(init, hashed.is_some())?) };
    let (send_cq, recv_cq, shared) = queues;
    let mut public = ibv_qp_ex::blank();
    let base = &mut public.qp_base;
    base.context = home.context;
    base.qp_context = init.qp_context;
    base.pd = home.pd;
    base.send_cq = init.send_cq;
    base.recv_cq = init.recv_cq;
    base.srq = init.srq;
    base.qp_type = init.qp_type;
    base.state = if hashed.is_some() { IBV_QPS_RTR } else { IBV_QPS_RESET };
    let sq_sig_all = init.sq_sig_all;
    let (api, handle, acks) = (home.api, QpHandle::NONE, Acks::default());
    let state = QpState { api, handle, builder, sq_sig_all, acks, _member: home.member };
    let made = Qp::create_with(public, state, |public, state| {
        let wanted = EngineQpInit {
            send_cq,
            recv_cq,
            xrcd: home.xrcd,
            srq: shared,
            cap: init.cap,
            qp_type: init.qp_type,
            sq_sig_all: u32::from(sq_sig_all != 0),
            create_flags,
            send_ops,
            cookie: public as u64,
        };
        let mut made = EngineQp { qp: QpHandle::NONE, qp_num: 0, cap: init.cap };
        // SAFETY: the structures are valid for the call.
        check(unsafe {
            match hashed {
                Some(Hashed { table, hash }) => {
                    let wanted = EngineHashedQpInit { table, hash, cookie: wanted.cookie };
                    (api.raw.create_hashed_qp)(home.pd_handle, &wanted, &mut made)
                }
                None => (api.create_qp)(home.pd_handle, &wanted, &mut made),
            }
        })?;
        state.handle = made.qp;
        init.cap = made.cap;
        // SAFETY: the allocation is ours until it is returned.
        unsafe {
            (*public).qp_base.qp_num = made.qp_num;
            (*public).qp_base.handle = made.qp.0 as u32;
        }
        Ok(())
    })?;
    Ok(made)
}

/// The row of the GID table that the LID of a group stands for; those of groups on InfiniBand begin at
/// 0xc000 and stand for row 0.
fn row_of(lid: u16) -> u8 {
    u8::try_from(lid).unwrap_or(0)
}

entry! {
    /// `ibv_create_qp(3)`
    fn ibv_create_qp(raw: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> Null<ibv_qp> {
        // SAFETY: the program passes a domain, and null or a valid pointer.
        unsafe {
            let init = init.as_mut().ok_or(Errno::EINVAL)?;
            let qp = create(Home::Pd(raw), init, Extras::default())?;
            crate::qp_ex::fill(qp);
            Ok(qp.cast())
        }
    }

    /// `ibv_open_qp(3)`: a responder of an XRC domain that is open in this process.
    fn open_qp(raw: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> Null<ibv_qp> {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, attr) = unsafe { (context(raw)?, attr.as_ref().ok_or(Errno::EINVAL)?) };
        let needed = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
        if attr.comp_mask & !(needed | IBV_QP_OPEN_ATTR_CONTEXT) != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if attr.comp_mask & needed != needed || attr.qp_type != IBV_QPT_XRC_RECV {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the program passes a domain.
        let xrcd = unsafe { xrcd(attr.xrcd) }?.handle;
        let mut public = ibv_qp_ex::blank();
        let base = &mut public.qp_base;
        (base.context, base.qp_num, base.qp_type) = (raw, attr.qp_num, attr.qp_type);
        base.state = IBV_QPS_UNKNOWN;
        if attr.comp_mask & IBV_QP_OPEN_ATTR_CONTEXT != 0 {
            base.qp_context = attr.qp_context;
        }
        let api = context.api;
        let (handle, acks) = (QpHandle::NONE, Acks::default());
        let state = QpState { api, handle, builder: None, sq_sig_all: 0, acks, _member: None };
        let opened = Qp::create_with(public, state, |public, state| {
            let (number, cookie, out) = (attr.qp_num, public as u64, &mut state.handle);
            // SAFETY: `out` is valid for the call.
            check(unsafe { (api.open_qp)(context.handle, xrcd, number, cookie, out) })?;
            // SAFETY: the allocation is ours until it is returned.
            unsafe { (*public).qp_base.handle = state.handle.0 as u32 };
            Ok(())
        })?;
        Ok(opened.cast())
    }

    /// `ibv_modify_qp(3)`
    fn ibv_modify_qp(raw: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> IntErrno {
        let mask = mask as u32;
        // SAFETY: the program passes a queue pair, and null or a valid pointer.
        let (qp, attr) = unsafe { (qp(raw)?, attr.as_ref().ok_or(Errno::EINVAL)?) };
        // SAFETY: `attr` is valid for the call.
        check(unsafe { (qp.api.modify_qp)(qp.handle, attr, mask) })?;
        if mask & IBV_QP_STATE != 0 {
            // SAFETY: the public part lives as long as the queue pair.
            unsafe { (*raw).state = attr.qp_state };
        }
        Ok(())
    }

    /// `ibv_query_qp(3)`
    fn ibv_query_qp(
        raw: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        mask: c_int,
        init: *mut ibv_qp_init_attr,
    ) -> IntErrno {
        // SAFETY: the program passes a queue pair, and null or valid pointers.
        let (qp, attr, init) = unsafe { (qp(raw)?, attr.as_mut(), init.as_mut()) };
        let (Some(attr), Some(init)) = (attr, init) else { return Err(Errno::EINVAL) };
        // SAFETY: `attr` is valid for the call.
        check(unsafe { (qp.api.query_qp)(qp.handle, mask as u32, attr) })?;
        // SAFETY: the public part lives as long as the queue pair.
        unsafe {
            *init = ibv_qp_init_attr {
                qp_context: (*raw).qp_context,
                send_cq: (*raw).send_cq,
                recv_cq: (*raw).recv_cq,
                srq: (*raw).srq,
                cap: attr.cap,
                qp_type: (*raw).qp_type,
                sq_sig_all: qp.sq_sig_all,
            };
            (*raw).state = attr.qp_state;
        }
        Ok(())
    }

    /// `ibv_destroy_qp(3)`: waits until all its events are acknowledged.
    fn ibv_destroy_qp(raw: *mut ibv_qp) -> IntErrno {
        // SAFETY: the program passes a queue pair and, but for acknowledging events, uses it no
        // more; its domain outlives it.
        unsafe {
            let qp = qp(raw)?;
            let mut reported = EngineEventsReported::default();
            check((qp.api.destroy_qp)(qp.handle, &mut reported))?;
            qp.acks.wait(reported);
            drop(Qp::take(raw.cast())?);
        }
        Ok(())
    }

    /// `ibv_attach_mcast(3)`. On Ethernet, where groups have no LID, that may be the number of a row of the
    /// GID table: the group is joined on the network of its address.
    fn ibv_attach_mcast(raw: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> IntErrno {
        // SAFETY: the program passes a queue pair, and null or a valid pointer.
        unsafe {
            let qp = qp(raw)?;
            check((qp.api.attach_mcast)(qp.handle, gid, row_of(lid)))?;
        }
        Ok(())
    }

    /// `ibv_detach_mcast(3)`
    fn ibv_detach_mcast(raw: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> IntErrno {
        // SAFETY: as for `ibv_attach_mcast`.
        unsafe {
            let qp = qp(raw)?;
            check((qp.api.detach_mcast)(qp.handle, gid, row_of(lid)))?;
        }
        Ok(())
    }

    /// `ibv_bind_mw(3)`: of a window of type 1, for which the library chooses the new key.
    fn bind_mw(raw: *mut ibv_qp, window: *mut ibv_mw, bind: *mut ibv_mw_bind) -> IntErrno {
        // SAFETY: the program passes a queue pair and a window, and null or a valid pointer.
        let (qp, bind) = unsafe {
            Mw::get(window)?;
            (qp(raw)?, bind.as_ref().ok_or(Errno::EINVAL)?)
        };
        // SAFETY: the public part lives as long as the window.
        let rkey = next_key(unsafe { (*window).rkey });
        let mut wr = ibv_send_wr::blank();
        wr.wr_id = bind.wr_id;
        wr.opcode = IBV_WR_BIND_MW;
        wr.send_flags = bind.send_flags;
        wr.ext.bind_mw = ibv_send_wr_bind_mw { mw: window, rkey, bind_info: bind.bind_info };
        let mut first_bad = ptr::null();
        // SAFETY: `wr` is a list of one, valid for the call.
        check(unsafe { (qp.api.post_send)(qp.handle, &wr, &mut first_bad) })?;
        // SAFETY: the public part lives as long as the window.
        unsafe { (*window).rkey = rkey };
        Ok(())
    }

    /// `ibv_qp_to_qp_ex(3)`: NULL if the queue pair was not created for `ibv_wr_*`.
    fn ibv_qp_to_qp_ex(raw: *mut ibv_qp) -> Null<ibv_qp_ex> {
        // SAFETY: the program passes a queue pair.
        let qp = unsafe { qp(raw) }?;
        if qp.builder.is_some() { Ok(qp.public()) } else { Err(Errno::EOPNOTSUPP) }
    }

    /// `ibv_query_qp_data_in_order(3)`: no order within a message is promised.
    fn ibv_query_qp_data_in_order(raw: *mut ibv_qp, _op: u32, _flags: u32) -> Plain<c_int> {
        // SAFETY: the program passes a queue pair.
        unsafe { qp(raw) }?;
        Ok(0)
    }

    /// `ibv_query_ece(3)`: this adapter has no options, so that none were ever agreed on.
    fn ibv_query_ece(raw: *mut ibv_qp, ece: *mut ibv_ece) -> IntErrno {
        // SAFETY: the program passes a queue pair, and null or a valid pointer.
        unsafe {
            qp(raw)?;
            *ece.as_mut().ok_or(Errno::EINVAL)? = NO_OPTIONS;
        }
        Ok(())
    }

    /// `ibv_set_ece(3)`: of the options of this vendor, none are accepted; those of others are invalid.
    fn ibv_set_ece(raw: *mut ibv_qp, ece: *mut ibv_ece) -> IntErrno {
        // SAFETY: the program passes a queue pair, and null or a valid pointer.
        let (qp, ece) = unsafe { (qp(raw)?, ece.as_mut().ok_or(Errno::EINVAL)?) };
        // SAFETY: it takes a number.
        check(unsafe { (qp.api.note_call)(EngineCall::SetEce as u32) })?;
        match (ece.vendor_id, ece.comp_mask) {
            // What a peer without extensions has said.
            (0, _) => Err(Errno::EOPNOTSUPP),
            (QUIPU_VENDOR_ID, 0) => {
                *ece = NO_OPTIONS;
                Ok(())
            }
            _ => Err(Errno::EINVAL),
        }
    }
}

quick_entry! {
    /// `ibv_post_send(3)`
    fn post_send(raw: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> IntErrno {
        // SAFETY: the program passes a queue pair, and a list of valid work requests.
        unsafe {
            let post = |first_bad: &mut _| {
                let qp = qp(raw)?;
                check((qp.api.post_send)(qp.handle, wr, first_bad))
            };
            posted(wr, bad, post)
        }
    }

    /// `ibv_post_recv(3)`
    fn post_recv(raw: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> IntErrno {
        // SAFETY: the program passes a queue pair, and a list of valid work requests.
        unsafe {
            let post = |first_bad: &mut _| {
                let qp = qp(raw)?;
                check((qp.api.post_recv)(qp.handle, wr, first_bad))
            };
            posted(wr, bad, post)
        }
    }
}

/// Posts a list, and tells the program the first request that was not posted: that of the list, if none
/// was.
///
/// # Safety
///
/// `bad` is null or valid for writes.
#[inline]
pub(crate) unsafe fn posted<T>(
    wr: *mut T,
    bad: *mut *mut T,
    post: impl FnOnce(&mut *const T) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let mut first_bad = wr.cast_const();
    let outcome = post(&mut first_bad);
    if outcome.is_err() && !bad.is_null() {
        // SAFETY: passed on from the caller.
        unsafe { *bad = first_bad.cast_mut() };
    }
    outcome
}

/// The next key of a window: its low byte counts, as `ibv_inc_rkey(3)` does.
fn next_key(rkey: u32) -> u32 {
    (rkey & !0xff) | (rkey.wrapping_add(1) & 0xff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_keeps_its_index_when_its_key_changes() {
        assert_eq!(next_key(0x1234_5601), 0x1234_5602);
        assert_eq!(next_key(0x1234_56ff), 0x1234_5600);
    }
}
