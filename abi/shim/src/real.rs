//! The functions that this library stands in front of.

use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_void};

/// A function of the next library. It is looked up before the program begins, since dlsym(3) takes
/// the loader's lock, which a signal handler or a forked child may not; or when it is first needed,
/// if the constructor of another library calls it before.
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

// The linker puts all references to such functions into one section, and says where it is.
unsafe extern "C" {
    #[link_name = "__start_quipu_reals"]
    static FIRST: *const c_void;
    #[link_name = "__stop_quipu_reals"]
    static BEHIND: *const c_void;
}

/// All of them.
fn all() -> &'static [&'static Real] {
    let (first, behind) = (&raw const FIRST, &raw const BEHIND);
    let count = (behind.addr() - first.addr()) / size_of::<*const c_void>();
    // SAFETY: the section consists of so many references, which the program never writes.
    unsafe { core::slice::from_raw_parts(first.cast(), count) }
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOOK_UP: extern "C" fn() = look_up;

extern "C" fn look_up() {
    for real in all() {
        real.address();
    }
    // What an older C library lacks is no error of the program's.
    // SAFETY: dlerror(3) forgets the last error.
    unsafe { libc::dlerror() };
}

/// Calls the real function of a name and type; the value of `else` if there is none.
macro_rules! real {
    ($name:literal: fn($($ty:ty),*) -> $ret:ty, ($($arg:expr),*) else $none:expr) => {{
        static REAL: $crate::real::Real = $crate::real::Real::new($name);
        #[used]
        #[unsafe(link_section = "quipu_reals")]
        static LISTED: &$crate::real::Real = &REAL;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_functions_are_looked_up_before_main() {
        for name in [c"open", c"openat64", c"fopen", c"readlink", c"opendir", c"closedir"] {
            let real = all().iter().find(|real| real.name == name).unwrap();
            assert!(!real.address.load(Ordering::Relaxed).is_null(), "{name:?}");
        }
    }
}
