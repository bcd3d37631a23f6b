//! The functions that this library stands in front of.

use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_char, c_int, c_void};

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

/// The bytes of a path that a program passes; none for null. Not a `CStr` at once, since most paths
/// are not ours and need not be measured.
///
/// # Safety
///
/// `path` is null or zero-terminated.
#[inline]
pub(crate) unsafe fn ours<'a>(path: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: passed on; `/dev/` and `/sys/` are compared byte by byte up to the zero.
    unsafe {
        if path.is_null() || *path != b'/' as c_char {
            return None;
        }
        let second = *path.add(1);
        if second != b'd' as c_char && second != b's' as c_char {
            return None;
        }
        let bytes = CStr::from_ptr(path).to_bytes();
        let prefix =
            |prefix: &[u8]| bytes.len() >= prefix.len() && &bytes[..prefix.len()] == prefix;
        (prefix(b"/dev/infiniband") || prefix(b"/sys/class/infiniband")).then_some(bytes)
    }
}
