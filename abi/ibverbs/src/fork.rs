//! Fork. Nothing is pinned, so a child's copy of registered memory is harmless: no page needs to be
//! kept from it.

use libc::c_void;
use quipu_abi_trace::entry;
use quipu_abi_types::IBV_FORK_UNNEEDED;
use quipu_cabi::{IntErrno, Plain};

entry! {
    /// `ibv_fork_init(3)`: always possible.
    fn ibv_fork_init() -> IntErrno { Ok(()) }
    /// `ibv_is_fork_initialized(3)`: not needed.
    fn ibv_is_fork_initialized() -> Plain<u32> { Ok(IBV_FORK_UNNEEDED) }
    /// Would keep a range from children.
    fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> IntErrno { Ok(()) }
    /// Would give a range to children again.
    fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> IntErrno { Ok(()) }
}
