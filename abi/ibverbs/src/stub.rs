//! What stands behind symbols that must exist but do nothing here.
//!
//! Programs pull in providers of real hardware (libmlx5, libefa) that are bound when they are
//! loaded: each symbol they name must be there, though none is called without their hardware.
//! These functions take whatever arguments the C ABI passes and ignore them. They are not traced: none knows
//! by which name it was called.

use libc::{c_int, c_uint, c_void};
use quipu_cabi::{Errno, IntErrno, IntMinusOne, Null, Plain, Void, entry};

entry! {
    /// For functions that return an error number: EOPNOTSUPP.
    fn unsupported() -> IntErrno { Err(Errno::EOPNOTSUPP) }
    /// For functions that return a pointer: NULL, and EOPNOTSUPP in `errno`.
    fn null() -> Null<c_void> { Err(Errno::EOPNOTSUPP) }
    /// For functions that return -1 on failure, with EOPNOTSUPP in `errno`.
    fn minus_one() -> IntMinusOne { Err::<c_int, _>(Errno::EOPNOTSUPP) }
    /// For functions that return a number without an error.
    fn zero() -> Plain<u64> { Ok(0) }
    /// For functions that return nothing.
    fn nothing() -> Void { Ok(()) }
    /// As [`unsupported`], in the type of unknown operations in tables of functions.
    fn no_int() -> Plain<usize> { Ok(unsupported_number()) }
    /// As [`null`], in the type of unknown operations in tables of functions.
    fn no_pointer() -> Plain<usize> { Err(Errno::EOPNOTSUPP) }
}

fn unsupported_number() -> usize {
    Errno::EOPNOTSUPP.set();
    Errno::EOPNOTSUPP.0 as c_uint as usize
}
