//! The kinds of objects, and how their C structures begin.

use quipu_abi_types::*;

/// A C structure for which all bytes zero is a valid value.
///
/// # Safety
///
/// Every field must allow it: integers, raw pointers, `Option` of function pointers, and the
/// pthread objects, whose initialiser is all zero on Linux (PTHREAD_MUTEX_INITIALIZER,
/// PTHREAD_COND_INITIALIZER).
pub(crate) unsafe trait Blank: Sized {
    /// The structure with every field zero, null or none.
    fn blank() -> Self {
        // SAFETY: the implementor promises that all bytes zero is a valid value.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! blank {
    ($($name:ty),* $(,)?) => {$(
        // SAFETY: the structure consists of integers, raw pointers, optional function pointers,
        // pthread objects and structures of those.
        unsafe impl Blank for $name {}
    )*};
}

blank!(
    verbs_device,
    verbs_context,
    ibv_pd,
    ibv_td,
    ibv_xrcd,
    ibv_mr,
    ibv_mw,
    ibv_ah,
    ibv_dm,
    ibv_buf,
    ibv_comp_channel,
    ibv_cq_ex,
    ibv_srq,
    ibv_flow,
    EngineCounters,
    ibv_wq,
    ibv_rwq_ind_table,
    ibv_qp_ex,
    ibv_wc,
    ibv_send_wr,
    ibv_device_attr_ex,
    ibv_port_attr,
    ibv_gid_entry,
    ibv_qp_attr,
    ibv_ah_attr,
    ibv_global_route,
    ibv_qp_init_attr,
);
