//! Identifiers made of the results of `rdma_getaddrinfo`.

use libc::c_int;
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne, Void};
use quipu_facade::check;

use crate::address::{bind_addr, resolve, resolve_route};
use crate::id::{self, id};
use crate::{event, qp, srq};

/// How long addresses and routes may take to be resolved, in ms.
const RESOLVE_MS: c_int = 2000;

/// Brings a fresh identifier as far as `res` says.
///
/// # Safety
///
/// `raw` is an identifier; the others as of the program.
unsafe fn prepare(
    raw: *mut rdma_cm_id,
    res: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: Option<&mut ibv_qp_init_attr>,
) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let state = id(raw)?;
        let qp_type = res.ai_qp_type as u32;
        if res.ai_flags & RAI_PASSIVE != 0 {
            bind_addr(raw, res.ai_src_addr)?;
            state.book().endpoint = init.map(|init| {
                init.qp_type = qp_type;
                (pd, *init)
            });
            return Ok(());
        }
        resolve(raw, res.ai_src_addr, res.ai_dst_addr, RESOLVE_MS)?;
        if res.ai_route_len > 0 {
            let (level, name) = (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH);
            let set = state.api.cm.set_option;
            check(set(state.handle, level, name, res.ai_route, res.ai_route_len))?;
            id::complete(raw)?;
        } else {
            resolve_route(raw, RESOLVE_MS)?;
        }
        if let Some(init) = init {
            init.qp_type = qp_type;
            qp::create_plain(raw, pd, init)?;
        }
        if res.ai_connect_len > 0 && !res.ai_connect.is_null() {
            let data = std::slice::from_raw_parts(res.ai_connect.cast(), res.ai_connect_len);
            state.book().connect_data = data.to_vec();
        }
    }
    Ok(())
}

/// # Safety
///
/// `raw` is an identifier that is used no more.
unsafe fn destroy(raw: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        qp::destroy(raw)?;
        srq::destroy(raw)?;
        id::destroy(raw)
    }
}

entry! {
    /// `rdma_create_ep(3)`
    fn rdma_create_ep(
        out: *mut *mut rdma_cm_id,
        res: *mut rdma_addrinfo,
        pd: *mut ibv_pd,
        init: *mut ibv_qp_init_attr,
    ) -> IntMinusOne {
        // SAFETY: the program passes null or valid pointers.
        unsafe {
            let (out, res) = (out.as_mut(), res.as_ref());
            let (Some(out), Some(res)) = (out, res) else { return Err(Errno::EINVAL) };
            let (none, ps) = (std::ptr::null_mut(), res.ai_port_space as u32);
            let raw = id::create(none, none.cast(), ps, Some(res.ai_qp_type as u32))?;
            if let Err(errno) = prepare(raw, res, pd, init.as_mut()) {
                let _ = destroy(raw);
                return Err(errno);
            }
            *out = raw;
        }
        Ok(0)
    }

    /// `rdma_destroy_ep(3)`
    fn rdma_destroy_ep(raw: *mut rdma_cm_id) -> Void {
        // SAFETY: the program passes an identifier and uses it no more.
        unsafe { destroy(raw) }
    }

    /// `rdma_get_request(3)`
    fn rdma_get_request(listener: *mut rdma_cm_id, out: *mut *mut rdma_cm_id) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or a valid pointer.
        unsafe {
            let (state, out) = (id(listener)?, out.as_mut().ok_or(Errno::EINVAL)?);
            if !state.book().synchronous {
                return Err(Errno::EINVAL);
            }
            id::drop_event(listener);
            let taken = event::take((*listener).channel)?;
            let (kind, status, child) = ((*taken).event, (*taken).status, (*taken).id);
            if kind != RDMA_CM_EVENT_CONNECT_REQUEST {
                let _ = event::acknowledge(taken);
                let errno = if status == 0 { libc::EINVAL } else { status.saturating_abs() };
                return Err(Errno(errno));
            }
            let endpoint = state.book().endpoint;
            if let Some((pd, mut init)) = endpoint
                && let Err(errno) = qp::create_plain(child, pd, &mut init)
            {
                let _ = event::acknowledge(taken);
                let _ = id::destroy(child);
                return Err(errno);
            }
            (*child).event = taken;
            *out = child;
        }
        Ok(0)
    }
}
