//! open and its kin, and realpath.

use core::ffi::CStr;
use core::ptr;

use libc::{FILE, c_char, c_int, mode_t, size_t};

use crate::place::answer;
use crate::real::{fail, fail_null, real};
use crate::stats::inode;
use crate::tree::{Node, Text};
use crate::{descriptor, live};

/// What the program gets that opens the device: something to read from and write to.
const NOTHING: &CStr = c"/dev/null";

/// Where paths count from that are passed without a folder.
const FROM: (c_int, c_int) = (libc::AT_FDCWD, 0);

/// Opens a node of ours.
fn open_node(path: &[u8], node: Node, flags: c_int) -> c_int {
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
    let creates = flags & libc::O_CREAT != 0;
    match node {
        _ if creates && flags & libc::O_EXCL != 0 => fail(libc::EEXIST),
        Node::Device | Node::StandIn | Node::File(_) if flags & libc::O_DIRECTORY != 0 => {
            fail(libc::ENOTDIR)
        }
        // SAFETY: a system call that reads a zero-terminated path.
        Node::Device | Node::StandIn => unsafe {
            libc::syscall(libc::SYS_openat, libc::AT_FDCWD, NOTHING.as_ptr(), flags, 0) as c_int
        },
        Node::File(_) if writes && flags & libc::O_PATH == 0 => fail(libc::EACCES),
        Node::File(text) => open_text(inode(&[path]), text, flags),
        Node::Folder(_) if (writes || creates) && flags & libc::O_PATH == 0 => fail(libc::EISDIR),
        Node::Folder(folder) => descriptor::of_folder(folder, flags),
    }
}

fn open_text(inode: u64, text: Text, flags: c_int) -> c_int {
    match live::text(text) {
        Some(text) => descriptor::of_text(inode, text.as_bytes(), flags),
        None => fail(libc::ENODEV),
    }
}

/// Defines a function of the open family. The mode is an optional argument in C; reading one that
/// was not passed, and handing it on, is what C libraries do too.
macro_rules! open_like {
    ($($name:ident($($before:ident: $ty:ty),*; $($after:ident: $ta:ty),*)
        from $dir:expr, $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            $($before: $ty,)* path: *const c_char, flags: c_int $(, $after: $ta)*
        ) -> c_int {
            let real = |path| real!(
                $real: fn($($ty,)* *const c_char, c_int $(, $ta)*) -> c_int,
                ($($before,)* path, flags $(, $after)*) else fail(libc::ENOSYS)
            );
            // SAFETY: the program passes a path.
            unsafe { answer(($dir, 0), path, |ours, node| open_node(ours, node, flags), real) }
        }
    )*};
}

open_like! {
    open(; mode: mode_t) from libc::AT_FDCWD, c"open";
    open64(; mode: mode_t) from libc::AT_FDCWD, c"open64";
    openat(dir: c_int; mode: mode_t) from dir, c"openat";
    openat64(dir: c_int; mode: mode_t) from dir, c"openat64";
    __open_2(;) from libc::AT_FDCWD, c"__open_2";
    __open64_2(;) from libc::AT_FDCWD, c"__open64_2";
    __openat_2(dir: c_int;) from dir, c"__openat_2";
    __openat64_2(dir: c_int;) from dir, c"__openat64_2";
}

/// Defines fopen and its twin.
macro_rules! fopen_like {
    ($($name:ident $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut FILE {
            let real = |path| real!(
                $real: fn(*const c_char, *const c_char) -> *mut FILE,
                (path, mode) else fail_null(libc::ENOSYS)
            );
            // SAFETY: the program passes a path and a mode.
            unsafe { answer(FROM, path, |ours, node| fopen_node(ours, node, mode), real) }
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
unsafe fn fopen_node(path: &[u8], node: Node, mode: *const c_char) -> *mut FILE {
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
    let fd = open_node(path, node, flags);
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
/// `out` is null or has room for the path and a zero.
pub(crate) unsafe fn give_path(path: &[u8], out: *mut c_char) -> *mut c_char {
    // SAFETY: malloc(3) is asked for room for it and a zero.
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
    let real = |path| {
        real!(c"realpath": fn(*const c_char, *mut c_char) -> *mut c_char, (path, out)
            else fail_null(libc::ENOSYS))
    };
    // SAFETY: the program passes a path, and null or room for PATH_MAX bytes, more than ours have.
    unsafe { answer(FROM, path, |ours, _| give_path(ours, out), real) }
}

/// Stands in front of the checked form of realpath(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn __realpath_chk(
    path: *const c_char,
    out: *mut c_char,
    room: size_t,
) -> *mut c_char {
    let real = |path| {
        real!(c"__realpath_chk": fn(*const c_char, *mut c_char, size_t) -> *mut c_char,
            (path, out, room) else fail_null(libc::ENOSYS))
    };
    // SAFETY: as for realpath.
    unsafe { answer(FROM, path, |ours, _| give_path(ours, out), real) }
}

/// Stands in front of canonicalize_file_name(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
    let real = |path| {
        real!(c"canonicalize_file_name": fn(*const c_char) -> *mut c_char, (path)
            else fail_null(libc::ENOSYS))
    };
    // SAFETY: the program passes a path; null asks for new memory.
    unsafe { answer(FROM, path, |ours, _| give_path(ours, ptr::null_mut()), real) }
}
