//! Moving an identifier's queue pair through its states, with what the engine knows of the peer.

use libc::c_int;
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne};
use quipu_facade::check;

use crate::ece;
use crate::id::id;
use crate::verbs::{number, verbs};

/// What queue pairs of UC do not have.
const OF_RELIABLE: u32 = IBV_QP_MAX_DEST_RD_ATOMIC
    | IBV_QP_MIN_RNR_TIMER
    | IBV_QP_RETRY_CNT
    | IBV_QP_RNR_RETRY
    | IBV_QP_MAX_QP_RD_ATOMIC
    | IBV_QP_TIMEOUT;

/// The attributes that `ibv_modify_qp` needs for a state. They are those of the identifier's type, of which
/// its queue pair need not be; one of XRC ignores what it does not have.
///
/// # Safety
///
/// `raw` is an identifier.
unsafe fn attributes(raw: *mut rdma_cm_id, state: u32) -> Result<(ibv_qp_attr, c_int), Errno> {
    // SAFETY: passed on from the caller.
    let this = unsafe { id(raw) }?;
    // SAFETY: the structure consists of integers.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = state;
    let mut mask = 0;
    // SAFETY: both are valid for the call.
    check(unsafe { (this.api.cm.init_qp_attr)(this.handle, &mut attr, &mut mask) })?;
    // SAFETY: passed on from the caller; a queue pair of an identifier is one of libibverbs.
    if unsafe { (*raw).qp.as_ref() }.is_some_and(|qp| qp.qp_type == IBV_QPT_UC) {
        mask &= !OF_RELIABLE;
    }
    Ok((attr, mask as c_int))
}

/// # Safety
///
/// `raw` is an identifier.
unsafe fn modify(raw: *mut rdma_cm_id, attr: &mut ibv_qp_attr, mask: c_int) -> Result<(), Errno> {
    // SAFETY: passed on from the caller; a queue pair of an identifier is one of libibverbs.
    unsafe {
        let qp = (*raw).qp;
        if qp.is_null() {
            return Err(Errno::EINVAL);
        }
        number((verbs()?.modify_qp)(qp, attr, mask))
    }
}

/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn to_init(raw: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let (mut attr, mask) = attributes(raw, IBV_QPS_INIT)?;
        modify(raw, &mut attr, mask)
    }
}

/// Brings a new datagram queue pair to RTS, with the Q_Key of connection management.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn datagrams_to_rts(raw: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller; the structure consists of integers.
    unsafe {
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = (*raw).port_num;
        attr.qkey = RDMA_UDP_QKEY;
        let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
        modify(raw, &mut attr, init as c_int)?;
        attr.qp_state = IBV_QPS_RTR;
        modify(raw, &mut attr, IBV_QP_STATE as c_int)?;
        attr.qp_state = IBV_QPS_RTS;
        modify(raw, &mut attr, (IBV_QP_STATE | IBV_QP_SQ_PSN) as c_int)
    }
}

/// How many reads and atomics at a time a queue pair answers and has outstanding.
pub(crate) struct Limits {
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
}

/// Connects the queue pair: INIT (the attributes of which may have been other ones when it was made), RTR,
/// RTS. `limits` are those that the program is about to say in its reply; without them, those of the peer's
/// reply hold.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn to_rts(raw: *mut rdma_cm_id, limits: Option<Limits>) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        to_init(raw)?;
        ece::agree(raw)?;
        let (mut attr, mask) = attributes(raw, IBV_QPS_RTR)?;
        if let Some(limits) = &limits {
            attr.max_dest_rd_atomic = limits.responder_resources;
        }
        modify(raw, &mut attr, mask)?;
        let (mut attr, mask) = attributes(raw, IBV_QPS_RTS)?;
        if let Some(limits) = &limits {
            attr.max_rd_atomic = limits.initiator_depth;
        }
        modify(raw, &mut attr, mask)
    }
}

/// Flushes what is posted, if there is a queue pair that this library moves.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn to_error(raw: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe {
        let of_engine = id(raw)?.book().device.is_some_and(|device| device.is_moved);
        if (*raw).qp.is_null() || of_engine {
            return Ok(());
        }
        // SAFETY: the structure consists of integers.
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        attr.qp_state = IBV_QPS_ERR;
        modify(raw, &mut attr, IBV_QP_STATE as c_int)
    }
}

entry! {
    /// `rdma_init_qp_attr(3)`: for the state in `attr.qp_state`.
    fn rdma_init_qp_attr(
        raw: *mut rdma_cm_id,
        attr: *mut ibv_qp_attr,
        mask: *mut c_int,
    ) -> IntMinusOne {
        // SAFETY: the program passes null or valid pointers.
        let (attr, mask) = unsafe { (attr.as_mut(), mask.as_mut()) };
        let (Some(attr), Some(mask)) = (attr, mask) else { return Err(Errno::EINVAL) };
        // SAFETY: the program passes an identifier.
        (*attr, *mask) = unsafe { attributes(raw, attr.qp_state) }?;
        Ok(0)
    }
}
