//! stat and its kin, access and its kin, readlink.

use libc::{c_char, c_int, c_uint, c_void, mode_t, size_t, ssize_t};

use crate::descriptor::{self, Mark};
use crate::place::{answer, write_path};
use crate::real::{fail, real};
use crate::tree::{Folder, LONGEST, Node};

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

/// A number of its own for each path, of which the parts are passed: its FNV-1a hash, in 32 bits.
pub(crate) fn inode(path: &[&[u8]]) -> u64 {
    let hash =
        path.iter().copied().flatten().fold(0x811c_9dc5, |hash: u32, byte| {
            (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
        });
    u64::from(hash)
}

/// Fills in a `struct stat`.
///
/// # Safety
///
/// `out` is valid for writing.
unsafe fn fill(inode: u64, node: Node, out: *mut libc::stat) -> c_int {
    if out.is_null() {
        return fail(libc::EFAULT);
    }
    // SAFETY: the structure consists of integers.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    stat.st_ino = inode;
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
            let real = |path| {
                let result = real!(
                    $real: fn($($ty,)* *const c_char, *mut libc::stat $(, $ta)*) -> c_int,
                    ($($before,)* path, out $(, $after)*) else fail(libc::ENOSYS)
                );
                if result == 0 && descriptor::may_be_ours() {
                    // SAFETY: the structure was just filled in.
                    unsafe { correct(out) };
                }
                result
            };
            // SAFETY: the program passes a path, and room for the structure.
            unsafe { answer($from, path, |ours, node| fill(inode(&[ours]), node, out), real) }
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

/// Defines a function of the fstat family: a file or folder of ours is one by its descriptor, too.
macro_rules! fstat_like {
    ($($name:ident($($before:ident: $ty:ty),*) $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($before: $ty,)* fd: c_int, out: *mut libc::stat) -> c_int {
            let result = real!(
                $real: fn($($ty,)* c_int, *mut libc::stat) -> c_int,
                ($($before,)* fd, out) else fail(libc::ENOSYS)
            );
            if result == 0 && descriptor::may_be_ours() {
                // SAFETY: the structure was just filled in.
                unsafe { correct(out) };
            }
            result
        }
    )*};
}

/// What the kernel says of a descriptor is made what it should say, if it is one of ours; so also where
/// a path is empty (`AT_EMPTY_PATH`) or leads to it by /proc. Of a file the size stays that of its text:
/// who copies it takes what goes beyond for a hole.
///
/// # Safety
///
/// `out` is valid for reading and writing.
unsafe fn correct(out: *mut libc::stat) {
    // SAFETY: passed on from the caller.
    let stat = unsafe { &mut *out };
    match Mark::of(stat) {
        Some(Mark::Text(inode)) => {
            (stat.st_dev, stat.st_ino, stat.st_nlink) = (0, inode, 1);
            (stat.st_atime, stat.st_mtime, stat.st_ctime) = (0, 0, 0);
            (stat.st_atime_nsec, stat.st_mtime_nsec, stat.st_ctime_nsec) = (0, 0, 0);
        }
        Some(Mark::Folder(folder)) => {
            let inode = with_path(folder, |path| inode(&[path]));
            // SAFETY: passed on from the caller.
            unsafe { fill(inode, Node::Folder(folder), out) };
        }
        None => {}
    }
}

/// As [`correct`], of what statx(2) says.
///
/// # Safety
///
/// `out` is valid for reading and writing.
unsafe fn correct_x(out: *mut libc::statx) {
    // SAFETY: passed on from the caller; a `struct stat` consists of integers.
    let (x, mut stat) = unsafe { (&mut *out, core::mem::zeroed::<libc::stat>()) };
    (stat.st_mode, stat.st_nlink) = (x.stx_mode.into(), x.stx_nlink as _);
    stat.st_size = x.stx_size as i64;
    (stat.st_mtime, stat.st_mtime_nsec) = (x.stx_mtime.tv_sec, x.stx_mtime.tv_nsec.into());
    match Mark::of(&stat) {
        Some(Mark::Text(inode)) => {
            (x.stx_dev_major, x.stx_dev_minor, x.stx_ino, x.stx_nlink) = (0, 0, inode, 1);
            for time in [&mut x.stx_atime, &mut x.stx_mtime, &mut x.stx_ctime, &mut x.stx_btime] {
                (time.tv_sec, time.tv_nsec) = (0, 0);
            }
        }
        Some(Mark::Folder(folder)) => {
            // SAFETY: passed on from the caller.
            with_path(folder, |path| unsafe { fill_x(path, Node::Folder(folder), out) });
        }
        None => {}
    }
}

fn with_path<R>(folder: Folder, work: impl FnOnce(&[u8]) -> R) -> R {
    let mut path = [0; LONGEST];
    let length = write_path(folder, &mut path).unwrap_or(0);
    work(path.get(..length).unwrap_or(&[]))
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
        let result = real!(
            c"statx": fn(c_int, *const c_char, c_int, c_uint, *mut libc::statx) -> c_int,
            (dir, path, flags, mask, out) else fail(libc::ENOSYS)
        );
        if result == 0 && descriptor::may_be_ours() {
            // SAFETY: the structure was just filled in.
            unsafe { correct_x(out) };
        }
        result
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

/// Defines a function that asks for extended attributes. Ours have none, and say so as a file system
/// does that knows of no such thing.
macro_rules! attributes_like {
    ($($name:ident($($attribute:ident: $ty:ty)?) $real:literal;)*) => {$(
        /// Stands in front of the function of this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            path: *const c_char, $($attribute: $ty,)? out: *mut c_void, room: size_t
        ) -> ssize_t {
            let real = |path| real!(
                $real: fn(*const c_char, $($ty,)? *mut c_void, size_t) -> ssize_t,
                (path, $($attribute,)? out, room) else fail(libc::ENOSYS) as ssize_t
            );
            // SAFETY: the program passes a path.
            unsafe { answer(FROM, path, |_, _| fail(libc::ENOTSUP) as ssize_t, real) }
        }
    )*};
}

attributes_like! {
    listxattr() c"listxattr";
    llistxattr() c"llistxattr";
    getxattr(name: *const c_char) c"getxattr";
    lgetxattr(name: *const c_char) c"lgetxattr";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::FOLDERS;
    use std::collections::BTreeSet;

    #[test]
    fn no_two_files_have_one_inode() {
        let mut seen = BTreeSet::new();
        for folder in &FOLDERS {
            for entry in folder.entries {
                assert!(seen.insert(inode(&[folder.path.as_bytes(), b"/", entry.name.as_bytes()])));
            }
        }
    }
}
