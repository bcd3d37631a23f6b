//! Enhanced connection establishment: options of vendors that both ends of a connection may use. The
//! identifier of a queue pair that the program moves itself carries what the program says; that of another
//! carries what the queue pair can do, and the queue pair learns what the peer's can.

use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne};

use crate::id::{Book, id};
use crate::verbs::verbs;

/// What the peer is told.
///
/// # Safety
///
/// `raw` is an identifier, whose `book` it is.
pub(crate) unsafe fn own(raw: *mut rdma_cm_id, book: &Book) -> ibv_ece {
    // SAFETY: passed on from the caller.
    let qp = unsafe { (*raw).qp };
    let mut ece = book.local_ece;
    if let Ok(verbs) = verbs()
        && !qp.is_null()
        // SAFETY: the queue pair of an identifier is one of libibverbs; `ece` is valid for the call.
        && unsafe { (verbs.query_ece)(qp, &mut ece) } != 0
    {
        return ibv_ece::default();
    }
    ece
}

/// Notes what the peer has said.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn learn(raw: *mut rdma_cm_id, ece: ibv_ece) {
    // SAFETY: passed on from the caller.
    if let Ok(id) = unsafe { id(raw) } {
        id.book().remote_ece = ece;
    }
}

/// Tells the queue pair of an identifier what the peer can do. Options that it does not know are not used;
/// they are no reason not to connect.
///
/// # Safety
///
/// `raw` is an identifier.
pub(crate) unsafe fn agree(raw: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: passed on from the caller; the queue pair of an identifier is one of libibverbs.
    unsafe {
        let mut remote = id(raw)?.book().remote_ece;
        if remote.vendor_id != 0 {
            let _ = (verbs()?.set_ece)((*raw).qp, &mut remote);
        }
    }
    Ok(())
}

entry! {
    /// `rdma_set_local_ece(3)`: of identifiers without a queue pair of this library.
    fn rdma_set_local_ece(raw: *mut rdma_cm_id, ece: *mut ibv_ece) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or a valid pointer.
        unsafe {
            let id = id(raw)?;
            let ece = ece.as_ref().ok_or(Errno::EINVAL)?;
            if !(*raw).qp.is_null() || ece.vendor_id == 0 || ece.comp_mask != 0 {
                return Err(Errno::EINVAL);
            }
            id.book().local_ece = *ece;
        }
        Ok(0)
    }

    /// `rdma_get_remote_ece(3)`: of identifiers without a queue pair of this library. Vendor 0 is none.
    fn rdma_get_remote_ece(raw: *mut rdma_cm_id, ece: *mut ibv_ece) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or a valid pointer.
        unsafe {
            let id = id(raw)?;
            let ece = ece.as_mut().ok_or(Errno::EINVAL)?;
            if !(*raw).qp.is_null() {
                return Err(Errno::EINVAL);
            }
            *ece = id.book().remote_ece;
        }
        Ok(0)
    }
}
