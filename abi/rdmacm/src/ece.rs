//! Enhanced connection establishment: options of vendors that both ends of a connection may use. This
//! adapter has none. What a program sets is checked and goes nowhere; of the peer there are none.

use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, IntMinusOne};

use crate::id::id;

entry! {
    /// `rdma_set_local_ece(3)`
    fn rdma_set_local_ece(raw: *mut rdma_cm_id, ece: *mut ibv_ece) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or a valid pointer.
        unsafe {
            id(raw)?;
            let ece = ece.as_ref().ok_or(Errno::EINVAL)?;
            if !(*raw).qp.is_null() || ece.vendor_id == 0 || ece.comp_mask != 0 {
                return Err(Errno::EINVAL);
            }
        }
        Ok(0)
    }

    /// `rdma_get_remote_ece(3)`: vendor 0, which is none.
    fn rdma_get_remote_ece(raw: *mut rdma_cm_id, ece: *mut ibv_ece) -> IntMinusOne {
        // SAFETY: the program passes an identifier, and null or a valid pointer.
        unsafe {
            id(raw)?;
            let ece = ece.as_mut().ok_or(Errno::EINVAL)?;
            if !(*raw).qp.is_null() {
                return Err(Errno::EINVAL);
            }
            *ece = ibv_ece { vendor_id: 0, options: 0, comp_mask: 0 };
        }
        Ok(0)
    }
}
