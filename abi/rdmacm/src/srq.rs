//! The shared receive queue of an identifier.

use std::ptr;

use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne, Void};

use crate::id::id;
use crate::qp::{create_cqs, destroy_cqs};
use crate::verbs::{extended, pointer, verbs};

/// # Safety
///
/// `raw` is an identifier; the objects named in `attr` are null or of libibverbs.
unsafe fn create(raw: *mut rdma_cm_id, attr: &mut ibv_srq_init_attr_ex) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        id(raw)?;
        // What is not said is not taken for a basic one, as in rdma-core.
        let typed = attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0;
        if (*raw).verbs.is_null() || !(*raw).srq.is_null() || !typed {
            return Err(Errno::EINVAL);
        }
        if attr.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || attr.pd.is_null() {
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
            attr.pd = (*raw).pd;
        } else if (*attr.pd).context != (*raw).verbs {
            return Err(Errno::EINVAL);
        }
        let xrc = attr.srq_type == IBV_SRQT_XRC;
        if xrc && (attr.comp_mask & IBV_SRQ_INIT_ATTR_XRCD == 0 || attr.xrcd.is_null()) {
            let device = id(raw)?.book().device.ok_or(Errno::EINVAL)?;
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD;
            attr.xrcd = device.xrcd()?;
        }
        let own_cq = xrc && (attr.comp_mask & IBV_SRQ_INIT_ATTR_CQ == 0 || attr.cq.is_null());
        if own_cq {
            create_cqs(raw, 0, attr.attr.max_wr)?;
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_CQ;
            attr.cq = (*raw).recv_cq;
        }
        let made = make(raw, attr, attr.srq_type != IBV_SRQT_BASIC);
        if made.is_err() && own_cq {
            destroy_cqs(raw);
        }
        (*raw).srq = made?;
        (*raw).pd = attr.pd;
    }
    Ok(())
}

/// # Safety
///
/// As [`create`]; the identifier is bound.
unsafe fn make(
    raw: *mut rdma_cm_id,
    attr: *mut ibv_srq_init_attr_ex,
    special: bool,
) -> Result<*mut ibv_srq, Errno> {
    // SAFETY: passed on from the caller; the extended attributes begin with the plain ones.
    unsafe {
        if !special {
            return pointer((verbs()?.create_srq)((*attr).pd, attr.cast()));
        }
        let context = (*raw).verbs;
        let create = extended(context).create_srq_ex.ok_or(Errno::EOPNOTSUPP)?;
        pointer(create(context, attr))
    }
}

/// `rdma_destroy_srq`.
///
/// # Safety
///
/// `raw` is an identifier; its queue is used no more.
pub(crate) unsafe fn destroy(raw: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        id(raw)?;
        let srq = (*raw).srq;
        if !srq.is_null() {
            (verbs()?.destroy_srq)(srq);
            (*raw).srq = ptr::null_mut();
        }
        if (*raw).qp.is_null() {
            destroy_cqs(raw);
        }
    }
    Ok(())
}

entry! {
    /// `rdma_create_srq(3)`: what was granted is written to `attr`.
    fn rdma_create_srq(
        raw: *mut rdma_cm_id,
        pd: *mut ibv_pd,
        attr: *mut ibv_srq_init_attr,
    ) -> IntMinusOne {
        // SAFETY: the program passes an identifier, null or valid pointers; the structure consists of
        // integers and raw pointers.
        unsafe {
            let attr = attr.as_mut().ok_or(Errno::EINVAL)?;
            let mut extended: ibv_srq_init_attr_ex = std::mem::zeroed();
            extended.srq_context = attr.srq_context;
            extended.attr = attr.attr;
            id(raw)?;
            extended.comp_mask |= IBV_SRQ_INIT_ATTR_TYPE;
            let xrc = (*raw).qp_type == IBV_QPT_XRC_RECV;
            extended.srq_type = if xrc { IBV_SRQT_XRC } else { IBV_SRQT_BASIC };
            if !pd.is_null() {
                extended.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
                extended.pd = pd;
            }
            create(raw, &mut extended)?;
            attr.attr = extended.attr;
        }
        Ok(0)
    }

    /// `rdma_create_srq_ex`: as `rdma_create_srq(3)`, with what `ibv_create_srq_ex(3)` knows.
    fn rdma_create_srq_ex(raw: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or a valid pointer.
        unsafe { create(raw, attr.as_mut().ok_or(Errno::EINVAL)?) }?;
        Ok(0)
    }

    /// `rdma_destroy_srq(3)`
    fn rdma_destroy_srq(raw: *mut rdma_cm_id) -> Void {
        // SAFETY: the program passes an identifier.
        unsafe { destroy(raw) }
    }
}
