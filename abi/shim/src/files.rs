//! open and its kin, and realpath.

use core::ffi::CStr;
use core::ptr;

use libc::{FILE, c_char, c_int, mode_t, size_t};

use crate::live;
use crate::real::{fail, fail_null, real};
use crate::stats::node;
use crate::tree::{Node, Text};

/// What the program gets that opens the device: something to read from and write to.
const NOTHING: &CStr = c"/dev/null";

/// Opens a node of ours.
fn open_node(node: Node, flags: c_int) -> c_int {
    match node {
        Node::Device | Node::StandIn if flags & libc::O_DIRECTORY != 0 => fail(libc::ENOTDIR),
        // SAFETY: a system call that reads a zero-terminated path.
        Node::Device | Node::StandIn => unsafe {
            libc::syscall(libc::SYS_openat, libc::AT_FDCWD, NOTHING.as_ptr(), flags, 0) as c_int
        },
        Node::File(_) if flags & libc::O_DIRECTORY != 0 => fail(libc::ENOTDIR),
        Node::File(_) if flags & libc::O_ACCMODE != libc::O_RDONLY => fail(libc::EACCES),
        Node::File(text) => open_text(text, flags & libc::O_CLOEXEC != 0),
        // A folder is listed by opendir; a descriptor of it there is not.
        Node::Folder(_) if flags & libc::O_ACCMODE != libc::O_RDONLY => fail(libc::EISDIR),
        Node::Folder(_) => fail(libc::EACCES),
    }
}

/// A descriptor from which a text can be read, and nothing else.
fn open_text(text: Text, close_on_exec: bool) -> c_int {
    let Some(text) = live::text(text) else {
        return fail(libc::ENODEV);
    };
    let bytes = text.as_bytes();
    let flags = if close_on_exec { libc::MFD_CLOEXEC } else { 0 };
    // SAFETY: memfd_create(2) wants a zero-terminated name; the buffer is as long as is said. The
    // descriptor is ours until it is returned. pwrite leaves its position at the beginning.
    unsafe {
        let fd = libc::syscall(libc::SYS_memfd_create, c"quipu-sysfs".as_ptr(), flags) as c_int;
        if fd >= 0 && libc::pwrite(fd, bytes.as_ptr().cast(), bytes.len(), 0) < 0 {
            libc::close(fd);
            return fail(libc::EIO);
        }
        fd
    }
}

/// Defines a function of the open family. The mode is an optional argument in C; reading one that
/// was not passed, and handing it on, is what C libraries do too.
macro_rules! open_like {
    ($($name:ident($($before:ident: $ty:ty),*; $($after:ident: $ta:ty),*) $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            $($before: $ty,)* path: *const c_char, flags: c_int $(, $after: $ta)*
        ) -> c_int {
            // SAFETY: the program passes a path.
            if let Some((_, node)) = unsafe { node(path) } {
                return open_node(node, flags);
            }
            real!($real: fn($($ty,)* *const c_char, c_int $(, $ta)*) -> c_int,
                ($($before,)* path, flags $(, $after)*) else fail(libc::ENOSYS))
        }
    )*};
}

open_like! {
    open(; mode: mode_t) c"open";
    open64(; mode: mode_t) c"open64";
    openat(dir: c_int; mode: mode_t) c"openat";
    openat64(dir: c_int; mode: mode_t) c"openat64";
    __open_2(;) c"__open_2";
    __open64_2(;) c"__open64_2";
    __openat_2(dir: c_int;) c"__openat_2";
    __openat64_2(dir: c_int;) c"__openat64_2";
}

/// Defines fopen and its twin.
macro_rules! fopen_like {
    ($($name:ident $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut FILE {
            // SAFETY: the program passes a path.
            if let Some((_, node)) = unsafe { node(path) } {
                // SAFETY: the program passes a mode.
                return unsafe { fopen_node(node, mode) };
            }
            real!($real: fn(*const c_char, *const c_char) -> *mut FILE, (path, mode)
                else fail_null(libc::ENOSYS))
        }
    )*};
}

fopen_like! {
    fopen c"fopen";
    fopen64 c"fopen64";
}

/// # Safety
///
/// `mode` is zero-terminated.
unsafe fn fopen_node(node: Node, mode: *const c_char) -> *mut FILE {
    if mode.is_null() {
        return fail_null(libc::EINVAL);
    }
    // SAFETY: passed on from the caller.
    let letters = unsafe { CStr::from_ptr(mode) }.to_bytes();
    let flags = match letters.first() {
        Some(b'r') if !letters.contains(&b'+') => libc::O_RDONLY,
        _ => libc::O_RDWR,
    };
    let flags = if letters.contains(&b'e') { flags | libc::O_CLOEXEC } else { flags };
    let fd = open_node(node, flags);
    if fd < 0 {
        return ptr::null_mut();
    }
    // SAFETY: `fd` is ours, and its file's from here on; `mode` is zero-terminated.
    unsafe {
        let file = libc::fdopen(fd, mode);
        if file.is_null() {
            libc::close(fd);
        }
        file
    }
}

/// A path of ours is its own real path, but for careless spelling. Written to `out`, or to new
/// memory if that is null.
///
/// # Safety
///
/// `out` is null or has room for PATH_MAX bytes.
unsafe fn resolve(path: &[u8], out: *mut c_char) -> *mut c_char {
    let mut buffer = [0; 256];
    let Some(path) = crate::tree::simplify(path, &mut buffer) else {
        return fail_null(libc::ENOENT);
    };
    // SAFETY: a path of ours is shorter than PATH_MAX; malloc(3) is asked for room for it and a
    // zero.
    unsafe {
        let to = if out.is_null() { libc::malloc(path.len() + 1).cast() } else { out };
        if !to.is_null() {
            ptr::copy_nonoverlapping(path.as_ptr(), to.cast(), path.len());
            *to.add(path.len()) = 0;
        }
        to
    }
}

/// Stands in front of realpath(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn realpath(path: *const c_char, out: *mut c_char) -> *mut c_char {
    // SAFETY: the program passes a path, and null or room for PATH_MAX bytes.
    if let Some((bytes, _)) = unsafe { node(path) } {
        // SAFETY: as above.
        return unsafe { resolve(bytes, out) };
    }
    real!(c"realpath": fn(*const c_char, *mut c_char) -> *mut c_char, (path, out)
        else fail_null(libc::ENOSYS))
}

/// Stands in front of the checked form of realpath(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn __realpath_chk(
    path: *const c_char,
    out: *mut c_char,
    room: size_t,
) -> *mut c_char {
    // SAFETY: the program passes a path, and room for PATH_MAX bytes.
    if let Some((bytes, _)) = unsafe { node(path) } {
        // SAFETY: as above.
        return unsafe { resolve(bytes, out) };
    }
    real!(c"__realpath_chk": fn(*const c_char, *mut c_char, size_t) -> *mut c_char,
        (path, out, room) else fail_null(libc::ENOSYS))
}

/// Stands in front of canonicalize_file_name(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
    // SAFETY: the program passes a path.
    if let Some((bytes, _)) = unsafe { node(path) } {
        // SAFETY: null asks for new memory.
        return unsafe { resolve(bytes, ptr::null_mut()) };
    }
    real!(c"canonicalize_file_name": fn(*const c_char) -> *mut c_char, (path)
        else fail_null(libc::ENOSYS))
}
