//! What stands behind symbols that need services which do not exist here.

use quipu_abi_trace::entry;
use quipu_cabi::{Errno, IntMinusOne};

entry! {
    /// For functions that return -1 on failure, with EOPNOTSUPP in `errno`. It takes whatever
    /// arguments the C ABI passes and ignores them.
    fn minus_one() -> IntMinusOne { Err::<libc::c_int, _>(Errno::EOPNOTSUPP) }
}
