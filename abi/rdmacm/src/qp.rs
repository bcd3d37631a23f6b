//! The queue pair of an identifier, and the queues made for it.

use std::ptr;

use libc::c_int;
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne, Void};

use crate::id::id;
use crate::state::{datagrams_to_rts, to_init};
use crate::verbs::{extended, pointer, verbs};

/// The inline data that every queue pair is granted, in bytes.
const LEAST_INLINE: u32 = 64;

/// Makes completion queues of the identifier's own, each with a channel, where a size is not 0. Their
/// context is the identifier, as rdma_verbs.h expects.
///
/// # Safety
///
/// `raw` is an identifier that is bound to a device.
pub(crate) unsafe fn create_cqs(raw: *mut rdma_cm_id, send: u32, recv: u32) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let made = (|| {
            if recv > 0 {
                ((*raw).recv_cq_channel, (*raw).recv_cq) = create_cq(raw, recv)?;
            }
            if send > 0 {
                ((*raw).send_cq_channel, (*raw).send_cq) = create_cq(raw, send)?;
            }
            Ok(())
        })();
        if made.is_err() {
            destroy_cqs(raw);
        }
        made
    }
}

/// # Safety
///
/// As [`create_cqs`].
pub(crate) unsafe fn create_cq(
    raw: *mut rdma_cm_id,
    size: u32,
) -> Result<(*mut ibv_comp_channel, *mut ibv_cq), Errno> {
    let verbs = verbs()?;
    let size = c_int::try_from(size).map_err(|_| Errno::EINVAL)?;
    // SAFETY: passed on from the caller: the context is that of an opened device.
    unsafe {
        let context = (*raw).verbs;
        let channel = pointer((verbs.create_comp_channel)(context))?;
        match pointer((verbs.create_cq)(context, size, raw.cast(), channel, 0)) {
            Ok(cq) => Ok((channel, cq)),
            Err(errno) => {
                (verbs.destroy_comp_channel)(channel);
                Err(errno)
            }
        }
    }
}

/// Destroys what [`create_cqs`] has made. Events of theirs that the program has not acknowledged are
/// waited for, as `ibv_destroy_cq(3)` says.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn destroy_cqs(raw: *mut rdma_cm_id) {
    let Ok(verbs) = verbs() else { return };
    // SAFETY: passed on from the caller; the queues came from `create_cqs`.
    unsafe {
        let (send, recv) = ((*raw).send_cq, (*raw).recv_cq);
        if !recv.is_null() {
            (verbs.destroy_cq)(recv);
        }
        if !send.is_null() && send != recv {
            (verbs.destroy_cq)(send);
        }
        let (of_send, of_recv) = ((*raw).send_cq_channel, (*raw).recv_cq_channel);
        if !of_recv.is_null() {
            (verbs.destroy_comp_channel)(of_recv);
        }
        if !of_send.is_null() && of_send != of_recv {
            (verbs.destroy_comp_channel)(of_send);
        }
        ((*raw).send_cq, (*raw).recv_cq) = (ptr::null_mut(), ptr::null_mut());
        ((*raw).send_cq_channel, (*raw).recv_cq_channel) = (ptr::null_mut(), ptr::null_mut());
    }
}

/// The sizes of the completion queues that are missing: for sends and for receives.
fn missing(public: &rdma_cm_id, attr: &ibv_qp_init_attr_ex) -> (u32, u32) {
    let xrc = |kind| attr.qp_type == kind;
    let send = attr.send_cq.is_null() && public.send_cq.is_null() && !xrc(IBV_QPT_XRC_RECV);
    let recv = attr.recv_cq.is_null()
        && public.recv_cq.is_null()
        && !xrc(IBV_QPT_XRC_SEND)
        && !xrc(IBV_QPT_XRC_RECV);
    // Receives from a shared queue complete too, and a queue that is never used needs a place all
    // the same.
    // SAFETY: null or a shared receive queue of libibverbs.
    let size = |wanted: bool, size: u32| if wanted { size.max(1) } else { 0 };
    (size(send, attr.cap.max_send_wr), size(recv, attr.cap.max_recv_wr))
}

/// `rdma_create_qp_ex`.
///
/// # Safety
///
/// `raw` is an identifier; the objects named in `attr` are null or of libibverbs.
pub(crate) unsafe fn create(
    raw: *mut rdma_cm_id,
    attr: &mut ibv_qp_init_attr_ex,
) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        id(raw)?;
        let public = &mut *raw;
        if public.verbs.is_null() || !public.qp.is_null() {
            return Err(Errno::EINVAL);
        }
        // What the identifier exchanges, and its events, are those of its own service.
        if (attr.qp_type == IBV_QPT_UD) != (public.qp_type == IBV_QPT_UD) {
            return Err(Errno::EINVAL);
        }
        if attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || attr.pd.is_null() {
            attr.comp_mask |= IBV_QP_INIT_ATTR_PD;
            attr.pd = public.pd;
        } else if (*attr.pd).context != public.verbs {
            return Err(Errno::EINVAL);
        }
        // Queues of its own would never be used.
        let differ = |own: *mut ibv_cq, other: *mut ibv_cq| {
            !own.is_null() && !other.is_null() && own != other
        };
        if differ(public.send_cq, attr.send_cq) || differ(public.recv_cq, attr.recv_cq) {
            return Err(Errno::EINVAL);
        }
        let has_domain = attr.comp_mask & IBV_QP_INIT_ATTR_XRCD != 0 && !attr.xrcd.is_null();
        if attr.qp_type == IBV_QPT_XRC_RECV && !has_domain {
            let device = id(raw)?.book().device.ok_or(Errno::EINVAL)?;
            attr.comp_mask |= IBV_QP_INIT_ATTR_XRCD;
            attr.xrcd = device.xrcd()?;
        }
        // Adapters grant more than they are asked for, and programs (rdma_xclient) make use of it.
        attr.cap.max_inline_data = attr.cap.max_inline_data.max(LEAST_INLINE);
        let (send, recv) = missing(public, attr);
        create_cqs(raw, send, recv)?;
        let public = &mut *raw;
        if attr.send_cq.is_null() {
            attr.send_cq = public.send_cq;
        }
        if attr.recv_cq.is_null() {
            attr.recv_cq = public.recv_cq;
        }
        if attr.srq.is_null() {
            attr.srq = public.srq;
        }
        let made = make(raw, attr);
        if made.is_err() && (send > 0 || recv > 0) {
            destroy_cqs(raw);
        }
        made
    }
}

/// # Safety
///
/// As [`create`]; the identifier is bound and `attr` complete.
unsafe fn make(raw: *mut rdma_cm_id, attr: &mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    let verbs = verbs()?;
    // SAFETY: passed on from the caller; the extended attributes begin with the plain ones.
    unsafe {
        let context = (*raw).verbs;
        let attr: *mut ibv_qp_init_attr_ex = attr;
        let qp = pointer(if (*attr).comp_mask == IBV_QP_INIT_ATTR_PD {
            (verbs.create_qp)((*attr).pd, attr.cast())
        } else {
            let create = extended(context).create_qp_ex.ok_or(Errno::EOPNOTSUPP)?;
            create(context, attr)
        })?;
        (*raw).qp = qp;
        let qp_type = (*attr).qp_type;
        let ready = if qp_type == IBV_QPT_UD { datagrams_to_rts(raw) } else { to_init(raw) };
        if let Err(errno) = ready {
            (verbs.destroy_qp)(qp);
            (*raw).qp = ptr::null_mut();
            return Err(errno);
        }
        (*raw).qp_type = qp_type;
        (*raw).pd = (*attr).pd;
    }
    Ok(())
}

/// `rdma_create_qp`: what was granted is written to `attr`.
///
/// # Safety
///
/// As [`create`]; `pd` is null or a protection domain.
pub(crate) unsafe fn create_plain(
    raw: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: &mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    // SAFETY: the structure consists of integers and raw pointers; it begins as the plain one does.
    unsafe {
        let mut extended: ibv_qp_init_attr_ex = std::mem::zeroed();
        let begin: *mut ibv_qp_init_attr = (&raw mut extended).cast();
        begin.write(*attr);
        // Where the plain attributes end in padding, of whatever value, the extended ones go on.
        extended.comp_mask = if pd.is_null() { 0 } else { IBV_QP_INIT_ATTR_PD };
        extended.pd = pd;
        create(raw, &mut extended)?;
        *attr = (&raw const extended).cast::<ibv_qp_init_attr>().read();
    }
    Ok(())
}

/// `rdma_destroy_qp`.
///
/// # Safety
///
/// `raw` is an identifier; its queue pair is used no more.
pub(crate) unsafe fn destroy(raw: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        id(raw)?;
        let qp = (*raw).qp;
        if !qp.is_null() {
            (verbs()?.destroy_qp)(qp);
            (*raw).qp = ptr::null_mut();
        }
        // The queues of a shared receive queue go with that one.
        if (*raw).srq.is_null() || (*raw).qp_type != IBV_QPT_XRC_RECV {
            destroy_cqs(raw);
        }
    }
    Ok(())
}

entry! {
    /// `rdma_create_qp(3)`
    fn rdma_create_qp(
        raw: *mut rdma_cm_id,
        pd: *mut ibv_pd,
        attr: *mut ibv_qp_init_attr,
    ) -> IntMinusOne {
        // SAFETY: the program passes an identifier, null or valid pointers.
        unsafe { create_plain(raw, pd, attr.as_mut().ok_or(Errno::EINVAL)?) }?;
        Ok(0)
    }

    /// `rdma_create_qp_ex`: as `rdma_create_qp(3)`, with what `ibv_create_qp_ex(3)` knows.
    fn rdma_create_qp_ex(raw: *mut rdma_cm_id, attr: *mut ibv_qp_init_attr_ex) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or a valid pointer.
        unsafe { create(raw, attr.as_mut().ok_or(Errno::EINVAL)?) }?;
        Ok(0)
    }

    /// `rdma_destroy_qp(3)`
    fn rdma_destroy_qp(raw: *mut rdma_cm_id) -> Void {
        // SAFETY: the program passes an identifier.
        unsafe { destroy(raw) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_made_where_neither_program_nor_identifier_has_one() {
        // SAFETY: the structures consist of integers and raw pointers.
        let (mut public, mut attr): (rdma_cm_id, ibv_qp_init_attr_ex) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        attr.qp_type = IBV_QPT_RC;
        attr.cap = ibv_qp_cap { max_send_wr: 4, max_recv_wr: 0, ..Default::default() };
        assert_eq!(missing(&public, &attr), (4, 1));
        public.recv_cq = ptr::dangling_mut();
        assert_eq!(missing(&public, &attr), (4, 0));
        attr.send_cq = ptr::dangling_mut();
        assert_eq!(missing(&public, &attr), (0, 0));
    }

    #[test]
    fn queue_pairs_that_only_receive_or_only_send_need_no_other_queue() {
        // SAFETY: as above.
        let (public, mut attr): (rdma_cm_id, ibv_qp_init_attr_ex) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        attr.cap = ibv_qp_cap { max_send_wr: 4, max_recv_wr: 4, ..Default::default() };
        attr.qp_type = IBV_QPT_XRC_RECV;
        assert_eq!(missing(&public, &attr), (0, 0));
        attr.qp_type = IBV_QPT_XRC_SEND;
        assert_eq!(missing(&public, &attr), (4, 0));
    }
}
