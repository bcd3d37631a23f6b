//! Opening a device: the context with its two tables of functions.

use std::mem::offset_of;
use std::ptr;
use std::sync::Arc;

use libc::c_int;
use quipu_abi_trace::{entry, fill};
use quipu_abi_types::*;
use quipu_cabi::{Errno, Handle, IntMinusOne, Null, Tagged};

use crate::device::device;
use crate::engine::check;
use crate::import::{Opened, command_fd};
use crate::object::Blank;
use crate::stub::{no_int, no_pointer, null};
use crate::{buf, counters, cq, cq_ex, dm, flow, mr, pd, qp, qp_ex, query, srq, wq, xrcd};

/// The private part of a context.
pub(crate) struct ContextState {
    pub(crate) api: &'static EngineApi,
    pub(crate) handle: ContextHandle,
    /// What it may share with contexts that were imported.
    pub(crate) opened: Arc<Opened>,
}

impl Tagged for ContextState {
    const TAG: u64 = 0x5155_4950_0043_5458;
}

/// A context. Programs hold a pointer to the `ibv_context` at the end of the public part.
pub(crate) type Context = Handle<verbs_context, ContextState>;

const OFFSET: usize = offset_of!(verbs_context, context);

/// Finds the context behind a pointer of the program.
///
/// # Safety
///
/// As [`Handle::get`], for the whole that `raw` is in the middle of.
pub(crate) unsafe fn context<'a>(raw: *const ibv_context) -> Result<&'a Context, Errno> {
    if raw.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: passed on from the caller; every context of this library ends a verbs_context.
    unsafe { Context::get(raw.wrapping_byte_sub(OFFSET).cast()) }
}

/// The address by which the program knows a context.
fn known_as(verbs: *mut verbs_context) -> *mut ibv_context {
    verbs.wrapping_byte_add(OFFSET).cast()
}

/// Fills the tables. No entry is left empty, since inline functions of verbs.h call some without
/// looking.
fn tables(verbs: &mut verbs_context) {
    let ops = &mut verbs.context.ops;
    let compat: compat_fn = Some(null);
    *ops = ibv_context_ops {
        _compat_query_device: compat,
        _compat_query_port: compat,
        _compat_alloc_pd: compat,
        _compat_dealloc_pd: compat,
        _compat_reg_mr: compat,
        _compat_rereg_mr: compat,
        _compat_dereg_mr: compat,
        alloc_mw: Some(mr::alloc_mw),
        bind_mw: Some(qp::bind_mw),
        dealloc_mw: Some(mr::dealloc_mw),
        _compat_create_cq: compat,
        poll_cq: None,
        req_notify_cq: Some(cq::req_notify_cq),
        _compat_cq_event: compat,
        _compat_resize_cq: compat,
        _compat_destroy_cq: compat,
        _compat_create_srq: compat,
        _compat_modify_srq: compat,
        _compat_query_srq: compat,
        _compat_destroy_srq: compat,
        post_srq_recv: None,
        _compat_create_qp: compat,
        _compat_query_qp: compat,
        _compat_modify_qp: compat,
        _compat_destroy_qp: compat,
        post_send: None,
        post_recv: None,
        _compat_create_ah: compat,
        _compat_destroy_ah: compat,
        _compat_attach_mcast: compat,
        _compat_detach_mcast: compat,
        _compat_async_event: compat,
    };
    fill!(ops, crate::cq: poll_cq);
    fill!(ops, crate::srq: post_srq_recv);
    fill!(ops, crate::qp: post_send post_recv);
    verbs.alloc_buf = Some(buf::ibv_alloc_buf);
    verbs.free_buf = Some(buf::ibv_free_buf);
    verbs.reg_mr_ex = Some(mr::ibv_reg_mr_ex);
    verbs.query_port = Some(query::query_port);
    verbs.advise_mr = Some(mr::advise_mr);
    verbs.alloc_null_mr = Some(mr::alloc_null_mr);
    verbs.reg_dm_mr = Some(mr::reg_dm_mr);
    verbs.alloc_dm = Some(dm::alloc_dm);
    verbs.free_dm = Some(dm::free_dm);
    verbs.alloc_parent_domain = Some(pd::alloc_parent_domain);
    verbs.alloc_td = Some(pd::alloc_td);
    verbs.dealloc_td = Some(pd::dealloc_td);
    verbs.modify_cq = Some(cq::modify_cq);
    verbs.query_rt_values = Some(query::query_rt_values);
    verbs.create_cq_ex = Some(cq_ex::create_cq_ex);
    verbs.query_device_ex = Some(query::query_device_ex);
    verbs.create_qp_ex = Some(qp_ex::create_qp_ex);
    verbs.open_qp = Some(qp::open_qp);
    verbs.get_srq_num = Some(srq::get_srq_num);
    verbs.create_srq_ex = Some(srq::create_srq_ex);
    verbs.open_xrcd = Some(xrcd::open_xrcd);
    verbs.close_xrcd = Some(xrcd::close_xrcd);
    verbs.ibv_create_flow = Some(flow::create_flow);
    verbs.ibv_destroy_flow = Some(flow::destroy_flow);
    verbs.create_counters = Some(counters::create_counters);
    verbs.destroy_counters = Some(counters::destroy_counters);
    verbs.attach_counters_point_flow = Some(counters::attach_counters_point_flow);
    verbs.read_counters = Some(counters::ibv_read_counters);
    verbs.create_wq = Some(wq::create_wq);
    verbs.modify_wq = Some(wq::modify_wq);
    verbs.destroy_wq = Some(wq::destroy_wq);
    verbs.create_rwq_ind_table = Some(wq::create_rwq_ind_table);
    verbs.destroy_rwq_ind_table = Some(wq::destroy_rwq_ind_table);
    unsupported(verbs);
}

/// The operations that this adapter does not have: they answer EOPNOTSUPP.
fn unsupported(verbs: &mut verbs_context) {
    let int: opaque_fn = Some(no_int);
    let pointer: opaque_fn = Some(no_pointer);
    verbs.dm_export_dmabuf_fd = int;
    verbs.dealloc_dmah = int;
    verbs.alloc_dmah = pointer;
    verbs.modify_flow_action_esp = int;
    verbs.destroy_flow_action = int;
    verbs.create_flow_action_esp = pointer;
    verbs.modify_qp_rate_limit = int;
    verbs.post_srq_ops = int;
    verbs.ABI_placeholder2 = int;
    verbs.ABI_placeholder1 = int;
}

/// Makes a context of an opened device, with descriptors of its own.
pub(crate) fn create(opened: Arc<Opened>, command_fd: c_int, async_fd: c_int) -> *mut ibv_context {
    let mut verbs = verbs_context::blank();
    tables(&mut verbs);
    verbs.sz = size_of::<verbs_context>();
    verbs.context.device = opened.device;
    verbs.context.cmd_fd = command_fd;
    verbs.context.async_fd = async_fd;
    verbs.context.num_comp_vectors = opened.num_comp_vectors;
    // Says that a verbs_context surrounds it (__VERBS_ABI_IS_EXTENDED).
    verbs.context.abi_compat = ptr::without_provenance_mut(usize::MAX);
    let state = ContextState { api: opened.api, handle: opened.handle, opened };
    known_as(Context::create(verbs, state))
}

entry! {
    /// `ibv_open_device(3)`
    fn ibv_open_device(raw: *mut ibv_device) -> Null<ibv_context> {
        // SAFETY: the program passes a device.
        let device = unsafe { device(raw) }?;
        let mut opened = EngineOpened { context: ContextHandle::NONE, async_fd: -1 };
        // SAFETY: the name is zero-terminated; `opened` is valid for the call.
        check(unsafe { (device.api.open)(device.info.name.as_ptr(), &mut opened) })?;
        let (fd, vectors) = (command_fd(), device.info.num_comp_vectors);
        let async_fd = opened.async_fd;
        Ok(create(Opened::new(device.api, raw, &opened, vectors, fd)?, fd, async_fd))
    }

    /// `ibv_close_device(3)`: -1 on failure.
    fn ibv_close_device(raw: *mut ibv_context) -> IntMinusOne {
        // SAFETY: the program passes a context and uses it no more.
        unsafe {
            let context = context(raw)?;
            let (command_fd, async_fd) = ((*raw).cmd_fd, (*raw).async_fd);
            // The last of those that share a device closes it, and the engine its own descriptor.
            let imported = (async_fd != context.opened.async_fd).then_some(async_fd);
            context.opened.leave()?;
            drop(Context::take(context.public())?);
            for fd in imported.into_iter().chain([command_fd]).filter(|fd| *fd >= 0) {
                libc::close(fd);
            }
        }
        Ok(0)
    }
}
