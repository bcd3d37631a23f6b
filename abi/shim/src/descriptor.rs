//! Descriptors of files and folders of ours. Each is a memfd of its own: a file's has its text, a
//! folder's is empty. The time of its modification says which file or folder it is, so that it is
//! known by any number that dup(2) gives it and behind fork(2), and nothing is to be done when it is
//! closed. A program that got it by execve(2) or a socket knows it once it has opened one itself:
//! before, no descriptor is looked at, which would cost a call to the system.

use core::fmt::Write;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_uint, timespec};

use crate::live::Buffer;
use crate::real::{fail, quietly};
use crate::tree::Folder;

/// The nanosecond that a descriptor of ours has: that of a file, whose inode is the second; or,
/// beyond it, the number of a folder, for which the second is [`SECOND`].
const NANOSECOND: i64 = 918_273_000;
const SECOND: i64 = 0x5155_4950;

/// Whether this process has opened a file or folder of ours, so that a descriptor may be of one.
static OPENED: AtomicBool = AtomicBool::new(false);

/// What a descriptor of ours is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    Folder(Folder),
    /// A file, with its inode.
    Text(u64),
}

impl Mark {
    fn time(self) -> timespec {
        match self {
            Self::Folder(folder) => {
                timespec { tv_sec: SECOND, tv_nsec: NANOSECOND + 1 + folder.number() as i64 }
            }
            Self::Text(inode) => timespec { tv_sec: inode as i64, tv_nsec: NANOSECOND },
        }
    }

    /// What the kernel says of a descriptor tells whether it is one of ours.
    pub(crate) fn of(stat: &libc::stat) -> Option<Self> {
        let is_memory = stat.st_mode & libc::S_IFMT == libc::S_IFREG && stat.st_nlink == 0;
        if !is_memory {
            return None;
        }
        match stat.st_mtime_nsec - NANOSECOND {
            0 => u64::try_from(stat.st_mtime).ok().map(Self::Text),
            beyond if stat.st_mtime == SECOND && stat.st_size == 0 => {
                let number = usize::try_from(beyond - 1).ok()?;
                Folder::of_number(number).map(Self::Folder)
            }
            _ => None,
        }
    }
}

/// Whether a descriptor may be of a file or folder of ours.
#[inline]
pub(crate) fn may_be_ours() -> bool {
    OPENED.load(Ordering::Relaxed)
}

/// The folder of ours that a descriptor is of.
#[inline]
pub(crate) fn folder(fd: c_int) -> Option<Folder> {
    if may_be_ours() { marked(fd) } else { None }
}

#[cold]
fn marked(fd: c_int) -> Option<Folder> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a system call that fills in the structure if it gives 0. fstat itself is ours.
    let stat = quietly(|| unsafe {
        match libc::syscall(libc::SYS_fstat, fd, stat.as_mut_ptr()) {
            0 => Some(stat.assume_init()),
            _ => None,
        }
    })?;
    match Mark::of(&stat) {
        Some(Mark::Folder(folder)) => Some(folder),
        _ => None,
    }
}

/// A descriptor of a folder. Nothing can be read from it, as from any folder.
pub(crate) fn of_folder(folder: Folder, flags: c_int) -> c_int {
    let passed = libc::O_PATH | flags & libc::O_CLOEXEC;
    finished(memory(flags), Mark::Folder(folder), passed)
}

/// A descriptor from which a text can be read, and nothing else.
pub(crate) fn of_text(inode: u64, text: &[u8], flags: c_int) -> c_int {
    if !fits(text.len()) {
        return of_pipe(text, flags);
    }
    let fd = memory(flags);
    // SAFETY: the buffer is as long as is said. pwrite leaves the position at the beginning.
    if fd >= 0 && unsafe { libc::pwrite(fd, text.as_ptr().cast(), text.len(), 0) } < 0 {
        return give_up(fd);
    }
    let passed = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_PATH;
    finished(fd, Mark::Text(inode), libc::O_RDONLY | flags & passed)
}

/// Whether a file may be so long (`ulimit -f`): who writes beyond that is ended by a signal, in
/// memory too.
fn fits(length: usize) -> bool {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: getrlimit(2) fills in the structure.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    length as u64 <= limit.rlim_cur
}

/// The same where no file may be so long: a pipe has no such limit, but one cannot seek in it.
fn of_pipe(text: &[u8], flags: c_int) -> c_int {
    let mut ends = [-1; 2];
    let passed = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: pipe2(2) gives two descriptors, which are ours. The text is shorter than what a pipe
    // holds.
    unsafe {
        if libc::pipe2(ends.as_mut_ptr(), flags & passed) < 0 {
            return -1;
        }
        let [reader, writer] = ends;
        let written = libc::write(writer, text.as_ptr().cast(), text.len());
        libc::close(writer);
        if written < 0 { give_up(reader) } else { reader }
    }
}

/// New memory with a descriptor.
fn memory(flags: c_int) -> c_int {
    let close_on_exec = if flags & libc::O_CLOEXEC != 0 { libc::MFD_CLOEXEC } else { 0 };
    let flags: c_uint = close_on_exec | libc::MFD_ALLOW_SEALING;
    // SAFETY: memfd_create(2) wants a zero-terminated name.
    unsafe { libc::syscall(libc::SYS_memfd_create, c"quipu-sysfs".as_ptr(), flags) as c_int }
}

fn give_up(fd: c_int) -> c_int {
    // SAFETY: the descriptor is ours.
    unsafe { libc::close(fd) };
    fail(libc::EIO)
}

/// The same memory with its mark and other flags, never to be changed again. Where /proc is not
/// there, a descriptor that is for reading and writing has to do.
fn finished(fd: c_int, mark: Mark, flags: c_int) -> c_int {
    const SEALS: c_int =
        libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;
    if fd < 0 {
        return fd;
    }
    // SAFETY: futimens(3) reads two times. The descriptor is ours.
    if unsafe { libc::futimens(fd, [mark.time(); 2].as_ptr()) } < 0 {
        return give_up(fd);
    }
    OPENED.store(true, Ordering::Relaxed);
    let mut link = Buffer::new();
    // SAFETY: the descriptor is ours; openat(2) reads a zero-terminated path.
    quietly(|| unsafe {
        libc::fchmod(fd, 0o444);
        libc::fcntl(fd, libc::F_ADD_SEALS, SEALS);
        let _ = write!(link, "/proc/self/fd/{fd}\0");
        let (at, link) = (libc::AT_FDCWD, link.as_bytes().as_ptr());
        let again = libc::syscall(libc::SYS_openat, at, link, flags, 0) as c_int;
        if again < 0 {
            return fd;
        }
        // The lowest number that is free is the program's to have.
        libc::syscall(libc::SYS_dup3, again, fd, flags & libc::O_CLOEXEC);
        libc::close(again);
        fd
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(mark: Mark, size: i64) -> libc::stat {
        // SAFETY: the structure consists of integers.
        let mut stat: libc::stat = unsafe { core::mem::zeroed() };
        let time = mark.time();
        (stat.st_mode, stat.st_size) = (libc::S_IFREG | 0o444, size);
        (stat.st_mtime, stat.st_mtime_nsec) = (time.tv_sec, time.tv_nsec);
        stat
    }

    #[test]
    fn a_descriptor_says_what_it_is_of() {
        for mark in [Mark::Text(0xffff_fffe), Mark::Folder(Folder::Interface(1))] {
            assert_eq!(Mark::of(&seen(mark, 0)), Some(mark));
        }
        let folder = Mark::Folder(Folder::Fixed(0));
        assert_eq!(Mark::of(&seen(folder, 0)), Some(folder));
        assert_eq!(Mark::of(&seen(folder, 1)), None);
        let mut other = seen(folder, 0);
        other.st_nlink = 1;
        assert_eq!(Mark::of(&other), None);
        other = seen(folder, 0);
        other.st_mtime += 1;
        assert_eq!(Mark::of(&other), None);
    }
}
