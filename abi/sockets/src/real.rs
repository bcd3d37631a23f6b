//! The functions that this library stands in front of.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::c_void;

/// A function of the next library. It is looked up before the program begins, since dlsym(3) takes
/// the loader's lock, which a signal handler or a forked child may not; or when it is first needed.
pub(crate) struct Real {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Real {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Its address; null if the C library does not have it.
    #[inline]
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if known.is_null() { self.look_up() } else { known }
    }

    #[cold]
    fn look_up(&self) -> *mut c_void {
        // SAFETY: dlsym(3) wants a zero-terminated name. RTLD_NEXT is the library after this one.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

// The linker puts all references to such functions into one section, and says where it is.
unsafe extern "C" {
    #[link_name = "__start_quipu_sk_reals"]
    static FIRST: *const c_void;
    #[link_name = "__stop_quipu_sk_reals"]
    static END: *const c_void;
}

/// Looks up all of them.
pub(crate) fn look_up_all() {
    let (first, end) = (&raw const FIRST, &raw const END);
    let count = (end.addr() - first.addr()) / size_of::<*const c_void>();
    // SAFETY: the section consists of so many references, which nobody ever writes.
    let all: &[&Real] = unsafe { std::slice::from_raw_parts(first.cast(), count) };
    for real in all {
        real.address();
    }
    // What an older C library lacks is no error of the program's.
    // SAFETY: dlerror(3) forgets the last error.
    unsafe { libc::dlerror() };
}

/// The address of the real function of a name; null if there is none.
macro_rules! real_address {
    ($name:ident) => {{
        static REAL: $crate::real::Real = $crate::real::Real::new(
            match ::std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes())
            {
                Ok(name) => name,
                Err(_) => panic!("a name has no zero inside"),
            },
        );
        #[used]
        #[unsafe(link_section = "quipu_sk_reals")]
        static LISTED: &$crate::real::Real = &REAL;
        REAL.address()
    }};
}
pub(crate) use real_address;

/// Calls the real function of a name and type; ENOSYS and -1 if there is none.
macro_rules! real {
    ($name:ident($($arg:expr => $ty:ty),*) -> $ret:ty) => {{
        let address = $crate::real::real_address!($name);
        if address.is_null() {
            $crate::sys::set_errno(libc::ENOSYS);
            -1 as $ret
        } else {
            // SAFETY: the C library defines the function with this type; the caller's arguments are
            // handed on as they came.
            unsafe {
                ::std::mem::transmute::<
                    *mut libc::c_void,
                    unsafe extern "C-unwind" fn($($ty),*) -> $ret,
                >(address)($($arg),*)
            }
        }
    }};
}
pub(crate) use real;
