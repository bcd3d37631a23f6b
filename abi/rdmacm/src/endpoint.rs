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
            if !pd.is_null() {
                (*raw).pd = pd;
            }
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

/// The next request of a synchronous listener.
///
/// # Safety
///
/// `channel` is the listener's.
unsafe fn request(channel: *mut rdma_event_channel) -> Result<*mut rdma_cm_event, Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let taken = event::take(channel)?;
        let (kind, status) = ((*taken).event, (*taken).status);
        if kind == RDMA_CM_EVENT_CONNECT_REQUEST {
            return Ok(taken);
        }
        let _ = event::acknowledge(taken);
        Err(Errno(if status == 0 { libc::EINVAL } else { status.saturating_abs() }))
    }
}

/// Whether a request is of another device than what its queue pair is to be made of.
///
/// # Safety
///
/// `child` is an identifier; the others are null or valid.
unsafe fn is_foreign(child: *mut rdma_cm_id, pd: *mut ibv_pd, init: &ibv_qp_init_attr) -> bool {
    // SAFETY: passed on from the caller.
    unsafe {
        let cq = |cq: *mut ibv_cq| cq.as_ref().map(|cq| cq.context);
        let contexts = [
            pd.as_ref().map(|pd| pd.context),
            cq(init.send_cq),
            cq(init.recv_cq),
            init.srq.as_ref().map(|srq| srq.context),
        ];
        // Objects of another context of the same device are the program's mistake, which it is to hear of.
        let own = (*(*child).verbs).device;
        contexts.into_iter().flatten().any(|context| (*context).device != own)
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
            check((state.api.note_call)(EngineCall::GetRequest as u32))?;
            id::drop_event(listener);
            let endpoint = state.book().endpoint;
            let (taken, child) = loop {
                let taken = request((*listener).channel)?;
                let child = (*taken).id;
                let Some((pd, mut init)) = endpoint else { break (taken, child) };
                // Its peer is refused: the program's objects are of another device.
                let foreign = is_foreign(child, pd, &init);
                let made = if foreign { Ok(()) } else { qp::create_plain(child, pd, &mut init) };
                if made.is_ok() && !foreign {
                    break (taken, child);
                }
                let _ = event::acknowledge(taken);
                let _ = id::destroy(child);
                made?;
            };
            (*child).event = taken;
            *out = child;
        }
        Ok(0)
    }
}
