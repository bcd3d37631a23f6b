//! Receive work queues and their indirection tables.

use std::slice;

use libc::c_int;
use quipu_abi_trace::{entry, fill, quick_entry};
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntErrno, Null, Tagged};

use crate::context::context;
use crate::cq::cq;
use crate::engine::check;
use crate::object::Blank;
use crate::pd::{Member, pd};
use crate::qp::posted;

/// Tables have 2048 entries at most.
const MAX_LOG_TABLE: u32 = 11;

/// The private part of a work queue.
pub(crate) struct WqState {
    api: &'static EngineApi,
    handle: WqHandle,
    _member: Member,
}

impl Tagged for WqState {
    const TAG: u64 = 0x5155_4950_0000_5751;
}

type Wq = Handle<ibv_wq, WqState>;

/// The private part of a table.
pub(crate) struct TableState {
    api: &'static EngineApi,
    pub(crate) handle: TableHandle,
}

impl Tagged for TableState {
    const TAG: u64 = 0x5155_4950_5442_4c45;
}

/// An indirection table.
pub(crate) type Table = Handle<ibv_rwq_ind_table, TableState>;

entry! {
    /// `ibv_create_wq(3)`
    fn create_wq(raw: *mut ibv_context, init: *mut ibv_wq_init_attr) -> Null<ibv_wq> {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let init = unsafe {
            context(raw)?;
            init.as_mut().ok_or(Errno::EINVAL)?
        };
        if init.wq_type != IBV_WQT_RQ {
            return Err(Errno::EINVAL);
        }
        let has_flags = init.comp_mask & IBV_WQ_INIT_ATTR_FLAGS != 0 && init.create_flags != 0;
        if init.comp_mask & !IBV_WQ_INIT_ATTR_FLAGS != 0 || has_flags {
            return Err(Errno::EOPNOTSUPP);
        }
        // SAFETY: the program passes a domain and a completion queue.
        let (pd, cq) = unsafe { (pd(init.pd)?, cq(init.cq)?.handle) };
        let mut public = ibv_wq::blank();
        public.context = raw;
        public.wq_context = init.wq_context;
        public.pd = init.pd;
        public.cq = init.cq;
        public.wq_type = init.wq_type;
        public.state = IBV_WQS_RESET;
        fill!(public, crate::wq: post_recv);
        let wanted = EngineWqInit { cq, max_wr: init.max_wr, max_sge: init.max_sge };
        let mut made = EngineWq { wq: WqHandle::NONE, wq_num: 0, max_wr: 0, max_sge: 0 };
        // SAFETY: both structures are valid for the call.
        check(unsafe { (pd.api.raw.create_wq)(pd.handle, &wanted, &mut made) })?;
        (init.max_wr, init.max_sge) = (made.max_wr, made.max_sge);
        (public.wq_num, public.handle) = (made.wq_num, made.wq.0 as u32);
        let state = WqState { api: pd.api, handle: made.wq, _member: pd.enter() };
        Ok(Wq::create(public, state))
    }

    /// `ibv_modify_wq(3)`
    fn modify_wq(raw: *mut ibv_wq, attr: *mut ibv_wq_attr) -> IntErrno {
        // SAFETY: the program passes a work queue, and null or a valid pointer.
        let (wq, attr) = unsafe { (Wq::get(raw)?, attr.as_ref().ok_or(Errno::EINVAL)?) };
        let has = |bit: u32| attr.attr_mask & bit != 0;
        if attr.attr_mask & !(IBV_WQ_ATTR_STATE | IBV_WQ_ATTR_CURR_STATE) != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let (curr, state) = match (has(IBV_WQ_ATTR_CURR_STATE), has(IBV_WQ_ATTR_STATE)) {
            (false, false) => return Ok(()),
            (true, _) if attr.curr_wq_state == IBV_WQS_UNKNOWN => return Err(Errno::EINVAL),
            (true, true) => (attr.curr_wq_state, attr.wq_state),
            // To the state that it is in: nothing but a question.
            (true, false) => (attr.curr_wq_state, attr.curr_wq_state),
            (false, true) => (IBV_WQS_UNKNOWN, attr.wq_state),
        };
        // SAFETY: the engine takes numbers.
        check(unsafe { (wq.api.raw.modify_wq)(wq.handle, curr, state) })?;
        // SAFETY: the public part lives as long as the work queue.
        unsafe { (*raw).state = state };
        Ok(())
    }

    /// `ibv_destroy_wq(3)`
    fn destroy_wq(raw: *mut ibv_wq) -> IntErrno {
        // SAFETY: the program passes a work queue and uses it no more; its domain outlives it.
        unsafe {
            let wq = Wq::get(raw)?;
            check((wq.api.raw.destroy_wq)(wq.handle))?;
            drop(Wq::take(raw)?);
        }
        Ok(())
    }

    /// `ibv_create_rwq_ind_table(3)`
    fn create_rwq_ind_table(
        raw: *mut ibv_context,
        init: *mut ibv_rwq_ind_table_init_attr,
    ) -> Null<ibv_rwq_ind_table> {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, init) = unsafe { (context(raw)?, init.as_ref().ok_or(Errno::EINVAL)?) };
        if init.comp_mask != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if init.log_ind_tbl_size > MAX_LOG_TABLE || init.ind_tbl.is_null() {
            return Err(Errno::EINVAL);
        }
        let count = 1 << init.log_ind_tbl_size;
        // SAFETY: the program passes as many work queues as it says.
        let queues = unsafe { slice::from_raw_parts(init.ind_tbl, count) };
        let handles: Result<Vec<_>, Errno> =
            // SAFETY: as above.
            queues.iter().map(|&wq| Ok(unsafe { Wq::get(wq) }?.handle)).collect();
        let (api, handles, mut handle) = (context.api, handles?, TableHandle::NONE);
        // SAFETY: the handles and `handle` are valid for the call.
        check(unsafe {
            let (list, count) = (handles.as_ptr(), handles.len() as u32);
            (api.raw.create_ind_table)(context.handle, list, count, &mut handle)
        })?;
        let mut public = ibv_rwq_ind_table::blank();
        public.context = raw;
        public.ind_tbl_handle = handle.0 as c_int;
        public.ind_tbl_num = handle.0 as c_int;
        Ok(Table::create(public, TableState { api, handle }))
    }

    /// `ibv_destroy_rwq_ind_table(3)`
    fn destroy_rwq_ind_table(raw: *mut ibv_rwq_ind_table) -> IntErrno {
        // SAFETY: the program passes a table and uses it no more.
        unsafe {
            let table = Table::get(raw)?;
            check((table.api.raw.destroy_ind_table)(table.handle))?;
            drop(Table::take(raw)?);
        }
        Ok(())
    }
}

quick_entry! {
    /// `ibv_post_wq_recv`
    fn post_recv(raw: *mut ibv_wq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> IntErrno {
        // SAFETY: the program passes a work queue, and a list of valid work requests.
        unsafe {
            let post = |first_bad: &mut _| {
                let wq = Wq::get(raw)?;
                check((wq.api.raw.post_wq_recv)(wq.handle, wr, first_bad))
            };
            posted(wr, bad, post)
        }
    }
}
