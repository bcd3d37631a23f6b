//! Counters of this process, for `quipu top`. They are in a file that is made with the first socket in the
//! mode; where that cannot be, nothing is counted.

use std::ffi::CString;
use std::mem::zeroed;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use libc::c_int;
use quipu_iwsock::counters::{COUNTERS, Counter, FILE_LEN, MAGIC, folder};
use quipu_iwsock::{Completion, Operation, Status};

static FILE: OnceLock<Option<&'static [AtomicU64; COUNTERS + 1]>> = OnceLock::new();

/// Adds to a counter; what was never begun is not counted.
fn add(counter: Counter, number: u64) {
    if let Some(Some(words)) = FILE.get() {
        words[1 + counter as usize].fetch_add(number, Relaxed);
    }
}

/// A socket is in the mode from now on.
pub(crate) fn note_switched() {
    FILE.get_or_init(open);
    add(Counter::Sockets, 1);
    add(Counter::Switched, 1);
}

/// A socket that was in the mode is closed.
pub(crate) fn note_closed() {
    add(Counter::Sockets, u64::MAX);
}

/// A work is complete.
pub(crate) fn note_complete(completion: &Completion) {
    if completion.status != Status::Success {
        return add(Counter::Failed, 1);
    }
    let (counter, bytes) = match completion.operation {
        Operation::Send => (Counter::Sends, Counter::BytesOut),
        Operation::Write { .. } => (Counter::Writes, Counter::BytesOut),
        Operation::Read { .. } => (Counter::Reads, Counter::BytesIn),
        Operation::Receive => (Counter::Receives, Counter::BytesIn),
    };
    add(counter, 1);
    add(bytes, completion.len as u64);
}

/// The name of this process's file, in a folder that only its user may enter.
fn name() -> Option<CString> {
    // SAFETY: takes nothing.
    let (user, process) = unsafe { (libc::geteuid(), libc::getpid()) };
    let folder = folder(user);
    let path = CString::new(folder.as_str()).ok()?;
    // SAFETY: all zeroes is a valid value.
    let mut data: libc::stat = unsafe { zeroed() };
    // SAFETY: a name that ends with a zero, and a place for what is known of it.
    let known = unsafe {
        libc::mkdir(path.as_ptr(), 0o700);
        libc::lstat(path.as_ptr(), &raw mut data)
    };
    let is_private = data.st_uid == user && data.st_mode & 0o077 == 0;
    let is_ours = known == 0 && is_private && data.st_mode & libc::S_IFMT == libc::S_IFDIR;
    is_ours.then(|| CString::new(format!("{folder}/{process}")).ok())?
}

fn open() -> Option<&'static [AtomicU64; COUNTERS + 1]> {
    let name = name()?;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let mode: libc::mode_t = 0o600;
    // SAFETY: a name that ends with a zero.
    let fd = unsafe { libc::open(name.as_ptr(), flags, mode) };
    if fd < 0 {
        return None;
    }
    let words = map(fd);
    // SAFETY: this function's descriptor. By number, since this library defines close(2) itself.
    unsafe { libc::syscall(libc::SYS_close, fd) };
    words
}

fn map(fd: c_int) -> Option<&'static [AtomicU64; COUNTERS + 1]> {
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: maps a file of this length anew, and touches no other memory.
    let at = unsafe {
        if libc::ftruncate(fd, FILE_LEN as libc::off_t) != 0 {
            return None;
        }
        libc::mmap(ptr::null_mut(), FILE_LEN, rights, flags, fd, 0)
    };
    if at == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping is as long, aligned to a page, and stays as long as the process.
    let words = unsafe { &*at.cast::<[AtomicU64; COUNTERS + 1]>() };
    words[0].store(MAGIC, Relaxed);
    Some(words)
}
