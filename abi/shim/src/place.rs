//! Which calls are about files of ours. A path may be absolute, or count from a folder: one of
//! ours, which is the working directory or was opened, or one of the system that holds ours.
//!
//! Nearly every path is not ours. That is told here from its first bytes, without a call to the
//! system, and the call goes on as it came.

use core::ffi::CStr;
use core::fmt::Write;

use libc::{c_char, c_int};

use crate::live::{self, Buffer};
use crate::real::quietly;
use crate::tree::{self, DEVICES, Folder, LONGEST, Node};
use crate::{descriptor, working};

/// Room for any path that the kernel takes.
const ROOM: usize = libc::PATH_MAX as usize;

/// A path that no call can succeed with: what is there is no folder.
const NO_FOLDER: &CStr = c"/dev/null/";

/// Answers a call that has a path: by `ours`, which gets the plain spelling of the path, or by
/// `real`. That gets the path as the program passed it, or another of the same file where the
/// kernel knows nothing of the folder that it counts from. `flags` says whether the path may be
/// empty (`AT_EMPTY_PATH`).
///
/// # Safety
///
/// `path` is null or zero-terminated.
#[inline]
pub(crate) unsafe fn answer<R>(
    (dir, flags): (c_int, c_int),
    path: *const c_char,
    ours: impl FnOnce(&[u8], Node) -> R,
    real: impl FnOnce(*const c_char) -> R,
) -> R {
    // SAFETY: passed on from the caller.
    if unsafe { may_be_ours(dir, path) } {
        // SAFETY: as above, and it is not null.
        return unsafe { look(dir, flags, path, ours, real) };
    }
    real(path)
}

/// Whether it is worth while to look closer.
///
/// # Safety
///
/// As for [`answer`].
#[inline]
pub(crate) unsafe fn may_be_ours(dir: c_int, path: *const c_char) -> bool {
    if path.is_null() {
        return false;
    }
    // SAFETY: "zero-terminated": no byte behind the zero is read.
    unsafe {
        if *path == b'/' as c_char {
            let second = *path.add(1) as u8;
            let begins = match second {
                b'd' => *path.add(2) == b'e' as c_char,
                b's' => *path.add(2) == b'y' as c_char,
                _ => second == b'/' || second == b'.',
            };
            return begins && is_named(path);
        }
        let from_ours = match dir {
            libc::AT_FDCWD => working::may_be_ours(),
            _ => descriptor::may_be_ours(),
        };
        let first = *path as u8;
        from_ours || matches!(first, b'.' | b'c' | b'd' | b'i' | b'q' | b's') && leads(path)
    }
}

/// Whether an absolute path has the word that is in all of ours.
///
/// # Safety
///
/// `path` is zero-terminated.
#[inline(never)]
unsafe fn is_named(path: *const c_char) -> bool {
    const WORD: &[u8] = b"infiniband";
    // SAFETY: passed on from the caller.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    path.windows(WORD.len()).any(|part| part == WORD)
}

/// Whether a path leads to a file of ours from some folder of the system.
///
/// # Safety
///
/// `path` is zero-terminated.
#[inline(never)]
unsafe fn leads(path: *const c_char) -> bool {
    // From `/`, from `/sys`, from `/sys/class` or `/dev`; and from a folder of the kernel's devices.
    const BEGINNINGS: [&[u8]; 4] =
        [b"sys/class/infiniband", b"class/infiniband", b"infiniband", b"dev/infiniband"];
    // SAFETY: passed on from the caller.
    let path = up(unsafe { CStr::from_ptr(path) }.to_bytes(), || ());
    BEGINNINGS.iter().any(|beginning| path.starts_with(beginning))
        || DEVICES.iter().any(|device| path.starts_with(device.as_bytes()))
}

/// A relative path without what it begins with of `.`, `..` and slashes. `pop` is called for each
/// `..`.
fn up(mut path: &[u8], mut pop: impl FnMut()) -> &[u8] {
    loop {
        let end = path.iter().position(|byte| *byte == b'/').unwrap_or(path.len());
        let Some((part, rest)) = path.split_at_checked(end) else { return path };
        match part {
            b".." => pop(),
            b"." => {}
            b"" if !rest.is_empty() => {}
            _ => return path,
        }
        path = rest.strip_prefix(b"/").unwrap_or(rest);
        if path.is_empty() {
            return path;
        }
    }
}

/// Looks closer. `errno` is as before for `ours` and `real`.
///
/// # Safety
///
/// `path` is zero-terminated.
#[cold]
#[inline(never)]
unsafe fn look<R>(
    dir: c_int,
    flags: c_int,
    path: *const c_char,
    ours: impl FnOnce(&[u8], Node) -> R,
    real: impl FnOnce(*const c_char) -> R,
) -> R {
    let (mut room, mut plain) = ([0; ROOM], [0; LONGEST]);
    // SAFETY: passed on from the caller.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    let sought = quietly(|| whole(dir, flags, bytes, &mut room));
    let (sought, of_kernel) = match sought {
        Whole::Same => (bytes, path),
        Whole::OfKernel(length) => (room.get(..length).unwrap_or(&[]), path),
        Whole::Ours(length) => (room.get(..length).unwrap_or(&[]), room.as_ptr().cast()),
        Whole::None => return real(path),
    };
    match quietly(|| node(sought, &mut plain)) {
        Some((_, node)) if is_of_folder(sought) && !matches!(node, Node::Folder(_)) => {
            real(NO_FOLDER.as_ptr())
        }
        Some((plain, node)) => ours(plain, node),
        None => real(of_kernel),
    }
}

/// Whether a path can be one of a folder only.
fn is_of_folder(path: &[u8]) -> bool {
    path.ends_with(b"/") || path.ends_with(b"/.")
}

/// Where the absolute form of a path is.
enum Whole {
    /// It is absolute.
    Same,
    /// In the room, of that length, and with a zero behind it: it counts from a folder of ours.
    Ours(usize),
    /// The same, from a folder that the kernel has.
    OfKernel(usize),
    /// It counts from nowhere.
    None,
}

fn whole(dir: c_int, flags: c_int, path: &[u8], room: &mut [u8; ROOM]) -> Whole {
    if path.starts_with(b"/") {
        return Whole::Same;
    }
    if path.is_empty() && flags & libc::AT_EMPTY_PATH == 0 {
        return Whole::None;
    }
    let folder = if dir == libc::AT_FDCWD { working::folder() } else { descriptor::folder(dir) };
    let base = match folder {
        Some(folder) => write_path(folder, room),
        None => path_of_kernel(dir, room),
    };
    match base.and_then(|base| join(room, base, path)) {
        Some(length) if folder.is_some() => Whole::Ours(length),
        Some(length) => Whole::OfKernel(length),
        None => Whole::None,
    }
}

/// Writes the path of a folder of ours, and a zero; its length.
pub(crate) fn write_path(folder: Folder, room: &mut [u8]) -> Option<usize> {
    let interface = match folder {
        Folder::Interface(_) => live::interface()?.to_bytes(),
        Folder::Fixed(_) | Folder::Interfaces(_) => b"",
    };
    let slash: &[u8] = if interface.is_empty() { b"" } else { b"/" };
    let mut length = 0;
    for part in [folder.path().as_bytes(), slash, interface, b"\0"] {
        room.get_mut(length..length + part.len())?.copy_from_slice(part);
        length += part.len();
    }
    Some(length - 1)
}

/// Writes the path of a folder of the system; its length.
fn path_of_kernel(dir: c_int, room: &mut [u8; ROOM]) -> Option<usize> {
    if dir == libc::AT_FDCWD {
        return working::of_kernel(room);
    }
    let mut link = Buffer::new();
    write!(link, "/proc/self/fd/{dir}\0").ok()?;
    // SAFETY: a system call that reads a zero-terminated path and writes at most so many bytes.
    let length = unsafe {
        let (link, at) = (link.as_bytes().as_ptr(), libc::AT_FDCWD);
        libc::syscall(libc::SYS_readlinkat, at, link, room.as_mut_ptr(), room.len())
    };
    usize::try_from(length).ok()
}

/// Goes on from the folder in the room, whose path has that length, by a relative path. `..` at its
/// beginning leads up; what is behind may be symbolic links, and is left to the kernel.
fn join(room: &mut [u8; ROOM], base: usize, path: &[u8]) -> Option<usize> {
    let folder = room.get(..base).filter(|folder| folder.starts_with(b"/"))?;
    let mut length = if folder == b"/" { 0 } else { base };
    let rest = up(path, || {
        let folder = folder.get(..length).unwrap_or(&[]);
        length = folder.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
    });
    if !rest.is_empty() || length == 0 {
        *room.get_mut(length)? = b'/';
        room.get_mut(length + 1..length + 1 + rest.len())?.copy_from_slice(rest);
        length += 1 + rest.len();
    }
    *room.get_mut(length)? = 0;
    Some(length)
}

/// What is ours at an absolute path, but for what the system has there too and others share, for
/// devices that are not shown, and for interfaces that are not the device's.
fn node<'a>(path: &[u8], plain: &'a mut [u8; LONGEST]) -> Option<(&'a [u8], Node)> {
    let (path, node) = tree::find(path, plain)?;
    let is_there = match node {
        Node::Folder(Folder::Interface(which)) => {
            let name = path.rsplit(|byte| *byte == b'/').next()?;
            live::has(which) && live::interface().is_some_and(|known| known.to_bytes() == name)
        }
        // SAFETY: a system call that reads a path, behind which is a zero.
        _ if node.yields() => unsafe {
            let (at, path) = (libc::AT_FDCWD, path.as_ptr());
            libc::syscall(libc::SYS_faccessat, at, path, libc::F_OK) != 0
        },
        _ => tree::owner(path).is_none_or(live::has),
    };
    is_there.then_some((path, node))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn joined(base: &[u8], path: &[u8]) -> Vec<u8> {
        let mut room = [0xff; ROOM];
        room[..base.len()].copy_from_slice(base);
        let length = join(&mut room, base.len(), path).unwrap();
        assert_eq!(room[length], 0);
        room[..length].to_vec()
    }

    #[test]
    fn a_relative_path_goes_on_from_its_folder() {
        for (base, path, whole) in [
            ("/sys/class", "infiniband", "/sys/class/infiniband"),
            ("/", "sys/class/infiniband", "/sys/class/infiniband"),
            ("/sys/class/infiniband", "", "/sys/class/infiniband"),
            ("/sys/class/infiniband", ".", "/sys/class/infiniband"),
            ("/sys/class/infiniband", "./quipu0/", "/sys/class/infiniband/quipu0/"),
            ("/sys/class/infiniband", "..//../devices/../x", "/sys/devices/../x"),
            ("/sys/class/infiniband", "../../../../..", "/"),
            ("/dev/infiniband", ".../...", "/dev/infiniband/.../..."),
        ] {
            assert_eq!(joined(base.as_bytes(), path.as_bytes()), whole.as_bytes(), "{path}");
        }
        let long = [b'a'; ROOM];
        assert_eq!(join(&mut [b'/'; ROOM], 10, &long), None);
        assert_eq!(join(&mut [b'('; ROOM], 10, b"a"), None);
    }

    #[test]
    fn most_paths_are_told_from_ours_by_a_look() {
        // SAFETY: the paths are zero-terminated.
        let may = |path: &CStr| unsafe { may_be_ours(libc::AT_FDCWD, path.as_ptr()) };
        for path in [c"", c"a", c"/", c"/dev/null", c"/sys/class/net", c".", c"../..", c"/usr/x"] {
            assert!(!may(path), "{path:?}");
        }
        for path in [c"//sys/class/infiniband", c"/./dev//infiniband", c"./../class/infiniband/x"] {
            assert!(may(path), "{path:?}");
        }
        // SAFETY: null is allowed.
        assert!(!unsafe { may_be_ours(libc::AT_FDCWD, core::ptr::null()) });
    }
}
