//! The functions that this library stands in front of.

use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_void};

/// A function of the next library, looked up when it is first needed.
pub(crate) struct Real {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Real {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(core::ptr::null_mut()) }
    }

    /// Its address; null if no library behind this one has it (then no program can have asked for
    /// it by that name either, except by looking it up here).
    #[inline]
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: dlsym(3) wants a zero-terminated name. RTLD_NEXT is the library behind this one.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls the real function of a name and type; the value of `else` if there is none.
macro_rules! real {
    ($name:literal: fn($($ty:ty),*) -> $ret:ty, ($($arg:expr),*) else $none:expr) => {{
        static REAL: $crate::real::Real = $crate::real::Real::new($name);
        let address = REAL.address();
        if address.is_null() {
            $none
        } else {
            // SAFETY: the C library defines the function with this type; the caller's arguments are
            // handed on as they came.
            unsafe {
                core::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn($($ty),*) -> $ret>(
                    address,
                )($($arg),*)
            }
        }
    }};
}
pub(crate) use real;

/// Sets `errno` and gives -1.
#[cold]
pub(crate) fn fail(errno: c_int) -> c_int {
    // SAFETY: the address of this thread's errno is valid.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Sets `errno` and gives null.
#[cold]
pub(crate) fn fail_null<T>(errno: c_int) -> *mut T {
    fail(errno);
    core::ptr::null_mut()
}

/// Does what leaves `errno` as it was.
pub(crate) fn quietly<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: the address of this thread's errno is valid.
    let before = unsafe { *libc::__errno_location() };
    let result = work();
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = before };
    result
}
