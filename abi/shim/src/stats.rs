//! stat and its kin, access and its kin, readlink.

use libc::{c_char, c_int, c_uint, mode_t, size_t, ssize_t};

use crate::descriptor;
use crate::place::{answer, write_path};
use crate::real::{fail, real};
use crate::tree::{LONGEST, Node};

/// The numbers of the first uverbs device, which this one would be.
const DEVICE: (c_uint, c_uint) = (231, 192);

/// The type and permissions of a node.
pub(crate) fn mode(node: Node) -> mode_t {
    match node {
        Node::Folder(_) => libc::S_IFDIR | 0o755,
        Node::File(_) => libc::S_IFREG | 0o444,
        Node::Device | Node::StandIn => libc::S_IFCHR | 0o666,
    }
}

/// A file of /sys says that it has a page, whatever it holds.
fn size(node: Node) -> u64 {
    if matches!(node, Node::File(_)) { 4096 } else { 0 }
}

/// A number of its own for each path, of which the parts are passed: its FNV-1a hash.
pub(crate) fn inode(path: &[&[u8]]) -> u64 {
    path.iter().copied().flatten().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Fills in a `struct stat`.
///
/// # Safety
///
/// `out` is valid for writing.
unsafe fn fill(path: &[u8], node: Node, out: *mut libc::stat) -> c_int {
    if out.is_null() {
        return fail(libc::EFAULT);
    }
    // SAFETY: the structure consists of integers.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    stat.st_ino = inode(&[path]);
    stat.st_mode = mode(node);
    stat.st_nlink = 1;
    stat.st_size = size(node) as i64;
    stat.st_blksize = 4096;
    stat.st_rdev = if node.is_device() { libc::makedev(DEVICE.0, DEVICE.1) } else { 0 };
    // SAFETY: "valid for writing".
    unsafe { out.write(stat) };
    0
}

/// Defines a function of the stat family. All take the path before the structure, and are answered
/// alike, since none of ours is a symbolic link.
macro_rules! stat_like {
    ($($name:ident($($before:ident: $ty:ty),*; $($after:ident: $ta:ty),*)
        from $from:expr, $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            $($before: $ty,)* path: *const c_char, out: *mut libc::stat $(, $after: $ta)*
        ) -> c_int {
            let real = |path| real!(
                $real: fn($($ty,)* *const c_char, *mut libc::stat $(, $ta)*) -> c_int,
                ($($before,)* path, out $(, $after)*) else fail(libc::ENOSYS)
            );
            // SAFETY: the program passes a path, and room for the structure.
            unsafe { answer($from, path, |ours, node| fill(ours, node, out), real) }
        }
    )*};
}

/// Where paths count from that are passed without a folder.
const FROM: (c_int, c_int) = (libc::AT_FDCWD, 0);

stat_like! {
    stat(;) from FROM, c"stat";
    stat64(;) from FROM, c"stat64";
    lstat(;) from FROM, c"lstat";
    lstat64(;) from FROM, c"lstat64";
    fstatat(dir: c_int; flags: c_int) from (dir, flags), c"fstatat";
    fstatat64(dir: c_int; flags: c_int) from (dir, flags), c"fstatat64";
    __xstat(version: c_int;) from FROM, c"__xstat";
    __xstat64(version: c_int;) from FROM, c"__xstat64";
    __lxstat(version: c_int;) from FROM, c"__lxstat";
    __lxstat64(version: c_int;) from FROM, c"__lxstat64";
    __fxstatat(version: c_int, dir: c_int; flags: c_int) from (dir, flags), c"__fxstatat";
    __fxstatat64(version: c_int, dir: c_int; flags: c_int) from (dir, flags), c"__fxstatat64";
}

/// Defines a function of the fstat family: a folder of ours is one by its descriptor, too.
macro_rules! fstat_like {
    ($($name:ident($($before:ident: $ty:ty),*) $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($before: $ty,)* fd: c_int, out: *mut libc::stat) -> c_int {
            if let Some(folder) = descriptor::folder(fd) {
                let mut path = [0; LONGEST];
                let length = write_path(folder, &mut path).unwrap_or(0);
                let path = path.get(..length).unwrap_or(&[]);
                // SAFETY: the program passes room for the structure.
                return unsafe { fill(path, Node::Folder(folder), out) };
            }
            real!($real: fn($($ty,)* c_int, *mut libc::stat) -> c_int, ($($before,)* fd, out)
                else fail(libc::ENOSYS))
        }
    )*};
}

fstat_like! {
    fstat() c"fstat";
    fstat64() c"fstat64";
    __fxstat(version: c_int) c"__fxstat";
    __fxstat64(version: c_int) c"__fxstat64";
}

/// Stands in front of statx(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn statx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    out: *mut libc::statx,
) -> c_int {
    let real = |path| {
        real!(
            c"statx": fn(c_int, *const c_char, c_int, c_uint, *mut libc::statx) -> c_int,
            (dir, path, flags, mask, out) else fail(libc::ENOSYS)
        )
    };
    // SAFETY: the program passes a path, and room for the structure.
    unsafe { answer((dir, flags), path, |ours, node| fill_x(ours, node, out), real) }
}

/// Fills in a `struct statx`.
///
/// # Safety
///
/// `out` is null or valid for writing.
unsafe fn fill_x(path: &[u8], node: Node, out: *mut libc::statx) -> c_int {
    if out.is_null() {
        return fail(libc::EFAULT);
    }
    // SAFETY: the structure consists of integers.
    let mut stat: libc::statx = unsafe { core::mem::zeroed() };
    stat.stx_mask = libc::STATX_TYPE
        | libc::STATX_MODE
        | libc::STATX_INO
        | libc::STATX_NLINK
        | libc::STATX_SIZE;
    stat.stx_ino = inode(&[path]);
    stat.stx_mode = mode(node) as u16;
    stat.stx_nlink = 1;
    stat.stx_size = size(node);
    stat.stx_blksize = 4096;
    if node.is_device() {
        (stat.stx_rdev_major, stat.stx_rdev_minor) = DEVICE;
    }
    // SAFETY: "valid for writing".
    unsafe { out.write(stat) };
    0
}

/// Whether everybody may do what is asked (`R_OK`, `W_OK`, `X_OK`); root is no exception, as on
/// read-only files of /sys.
fn allowed(node: Node, asked: c_int) -> c_int {
    let denied = match node {
        Node::Folder(_) => libc::W_OK,
        Node::File(_) => libc::W_OK | libc::X_OK,
        Node::Device | Node::StandIn => libc::X_OK,
    };
    if asked & denied == 0 { 0 } else { fail(libc::EACCES) }
}

/// Defines a function of the access family.
macro_rules! access_like {
    ($($name:ident($($before:ident: $ty:ty),*; $($after:ident: $ta:ty),*)
        from $from:expr, $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            $($before: $ty,)* path: *const c_char, asked: c_int $(, $after: $ta)*
        ) -> c_int {
            let real = |path| real!(
                $real: fn($($ty,)* *const c_char, c_int $(, $ta)*) -> c_int,
                ($($before,)* path, asked $(, $after)*) else fail(libc::ENOSYS)
            );
            // SAFETY: the program passes a path.
            unsafe { answer($from, path, |_, node| allowed(node, asked), real) }
        }
    )*};
}

access_like! {
    access(;) from FROM, c"access";
    eaccess(;) from FROM, c"eaccess";
    euidaccess(;) from FROM, c"euidaccess";
    faccessat(dir: c_int; flags: c_int) from (dir, flags), c"faccessat";
}

/// Defines a function of the readlink family: none of ours is a symbolic link.
macro_rules! readlink_like {
    ($($name:ident($($before:ident: $ty:ty),*; $($after:ident: $ta:ty),*)
        from $from:expr, $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            $($before: $ty,)* path: *const c_char, out: *mut c_char, room: size_t $(, $after: $ta)*
        ) -> ssize_t {
            let real = |path| real!(
                $real: fn($($ty,)* *const c_char, *mut c_char, size_t $(, $ta)*) -> ssize_t,
                ($($before,)* path, out, room $(, $after)*) else fail(libc::ENOSYS) as ssize_t
            );
            // SAFETY: the program passes a path.
            unsafe { answer($from, path, |_, _| fail(libc::EINVAL) as ssize_t, real) }
        }
    )*};
}

readlink_like! {
    readlink(;) from FROM, c"readlink";
    readlinkat(dir: c_int;) from (dir, 0), c"readlinkat";
    __readlink_chk(; known: size_t) from FROM, c"__readlink_chk";
    __readlinkat_chk(dir: c_int; known: size_t) from (dir, 0), c"__readlinkat_chk";
}
