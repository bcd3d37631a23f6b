//! dlopen, for programs that name the system's libibverbs or librdmacm by its whole path: they get the one
//! that is in the process already, or is found first by its name alone, which is Quipu's.
//!
//! dlopen(3) looks at its return address: from there it knows which file calls, whose search path
//! (`DT_RUNPATH`) counts. So the function here must not call the real one but jump to it, with the stack as
//! it found it.

use core::arch::naked_asm;
use core::ffi::CStr;

use libc::{c_char, c_int, c_void};

use crate::real::Real;

/// What `dlopen` jumps to, and the path for it. In two registers, as the calling conventions want it.
#[repr(C)]
struct Redirected {
    path: *const c_char,
    next: *const c_void,
}

/// Stands in front of the function of this name.
///
/// # Safety
///
/// As dlopen(3).
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    naked_asm!(
        "endbr64",
        // Keeps the flags, and makes the stack a multiple of 16 bytes, as a call wants it.
        "push rsi",
        "call {redirected}",
        "pop rsi",
        "mov rdi, rax",
        "jmp rdx",
        redirected = sym redirected,
    )
}

/// Stands in front of the function of this name.
///
/// # Safety
///
/// As dlopen(3).
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "str x1, [sp, #16]",
        "bl {redirected}",
        "mov x16, x1",
        "ldr x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x16",
        redirected = sym redirected,
    )
}

/// # Safety
///
/// `path` is null or zero-terminated.
unsafe extern "C" fn redirected(path: *const c_char) -> Redirected {
    static REAL: Real = Real::new(c"dlopen");
    #[used]
    #[unsafe(link_section = "quipu_reals")]
    static LISTED: &Real = &REAL;
    let next = REAL.address();
    let next = if next.is_null() { nothing as *const c_void } else { next.cast_const() };
    // SAFETY: passed on from the caller.
    let bytes = if path.is_null() { &[] } else { unsafe { CStr::from_ptr(path) }.to_bytes() };
    let path = in_place_of(bytes).map_or(path, CStr::as_ptr);
    Redirected { path, next }
}

/// In place of the real function, where no library has one.
extern "C" fn nothing(_path: *const c_char, _flags: c_int) -> *mut c_void {
    core::ptr::null_mut()
}

/// The name to load in place of a path, if that is one of a library that Quipu has, too.
fn in_place_of(path: &[u8]) -> Option<&'static CStr> {
    const NAMES: [&CStr; 2] = [c"libibverbs.so.1", c"librdmacm.so.1"];
    let slash = path.iter().rposition(|byte| *byte == b'/')?;
    let file = path.get(slash + 1..)?;
    NAMES.into_iter().find(|name| {
        let name = name.to_bytes();
        let plain = name.strip_suffix(b".1").unwrap_or(name);
        // With the rest of a version, as the file itself is named.
        let rest = file.strip_prefix(name);
        file == plain || rest.is_some_and(|rest| rest.is_empty() || rest.first() == Some(&b'.'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_the_two_libraries_become_their_names() {
        let name = |path: &str| in_place_of(path.as_bytes());
        let verbs = Some(c"libibverbs.so.1");
        assert_eq!(name("/usr/lib/x86_64-linux-gnu/libibverbs.so.1"), verbs);
        assert_eq!(name("/usr/lib64/libibverbs.so"), verbs);
        assert_eq!(name("./libibverbs.so.1.14.44.0"), verbs);
        assert_eq!(name("/opt/rdma/lib/librdmacm.so.1"), Some(c"librdmacm.so.1"));
        for other in [
            "libibverbs.so.1",
            "/usr/lib/libibverbs.so.10",
            "/usr/lib/libibverbs.so.2",
            "/usr/lib/libibverbs/libmlx5-rdmav34.so",
            "/usr/lib/libibverbs.so.1/",
            "",
        ] {
            assert_eq!(name(other), None, "{other}");
        }
    }
}
