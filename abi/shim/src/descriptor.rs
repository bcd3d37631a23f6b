//! Descriptors of files and folders of ours. Each is a memfd of its own: a file's has its text, a
//! folder's is empty and says by its time of modification which folder it is. So it is known
//! wherever it gets to, by dup(2), fork(2) or a socket, and nothing is to be done when it is closed.

use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, Ordering};

use core::fmt::Write;
use libc::{c_int, c_uint, timespec};

use crate::live::Buffer;
use crate::real::{fail, quietly};
use crate::tree::Folder;

/// The time that a descriptor of a folder has: this second, and the folder's number beyond this
/// nanosecond.
const SECOND: i64 = 0x5155_4950;
const NANOSECOND: i64 = 918_273_000;

/// Whether this process has opened a folder of ours, so that a descriptor may be of one.
static OPENED: AtomicBool = AtomicBool::new(false);

/// Whether a descriptor may be of a folder of ours.
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
    // SAFETY: a system call that fills in the structure if it gives 0. fstat itself may be ours.
    let stat = quietly(|| unsafe {
        match libc::syscall(libc::SYS_fstat, fd, stat.as_mut_ptr()) {
            0 => Some(stat.assume_init()),
            _ => None,
        }
    })?;
    let is_memory = stat.st_mode & libc::S_IFMT == libc::S_IFREG && stat.st_nlink == 0;
    if !is_memory || stat.st_size != 0 || stat.st_mtime != SECOND {
        return None;
    }
    Folder::of_number(usize::try_from(stat.st_mtime_nsec - NANOSECOND).ok()?)
}

/// A descriptor of a folder. Nothing can be read from it, as from any folder.
pub(crate) fn of_folder(folder: Folder, flags: c_int) -> c_int {
    let time = timespec { tv_sec: SECOND, tv_nsec: NANOSECOND + folder.number() as i64 };
    let fd = memory(flags);
    // SAFETY: futimens(3) reads two times.
    if fd >= 0 && unsafe { libc::futimens(fd, [time; 2].as_ptr()) } < 0 {
        return give_up(fd);
    }
    OPENED.store(true, Ordering::Relaxed);
    reopened(fd, libc::O_PATH | flags & libc::O_CLOEXEC)
}

/// A descriptor from which a text can be read, and nothing else.
pub(crate) fn of_text(text: &[u8], flags: c_int) -> c_int {
    if !fits(text.len()) {
        return of_pipe(text, flags);
    }
    let fd = memory(flags);
    // SAFETY: the buffer is as long as is said. pwrite leaves the position at the beginning.
    if fd >= 0 && unsafe { libc::pwrite(fd, text.as_ptr().cast(), text.len(), 0) } < 0 {
        return give_up(fd);
    }
    let passed = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_PATH;
    reopened(fd, libc::O_RDONLY | flags & passed)
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

/// The same file with other flags, and never to be changed again. Where /proc is not there, memory
/// that is for reading and writing has to do.
fn reopened(fd: c_int, flags: c_int) -> c_int {
    const SEALS: c_int =
        libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;
    if fd < 0 {
        return fd;
    }
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
