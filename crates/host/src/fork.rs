//! What happens to an engine when the program forks.
//!
//! The child inherits descriptors and memory but neither the helper thread nor the right to speak
//! for the parent. So an engine belongs to the process that opened it: in a child every call on
//! it fails, and dropping it there touches no socket.

use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

/// How many forks lie between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static INSTALLED: Once = Once::new();

/// Files whose locks say that this process lives. The lock is that of an open file, which a child shares, and
/// would keep when this process is dead.
static LOCKED: [Locked; 64] = [const { Locked::new() }; 64];

/// One of them.
#[derive(Debug)]
struct Locked {
    taken: AtomicBool,
    /// -1: none.
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl Locked {
    const fn new() -> Self {
        let (device, inode) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { taken: AtomicBool::new(false), fd: AtomicI32::new(-1), device, inode }
    }

    /// In a child: has the descriptor, if it is still that of the file, be one of another.
    fn give_up(&self, other: libc::c_int) {
        let fd = self.fd.swap(-1, Ordering::Relaxed);
        let mut data = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: there is room for an answer, which is read if there is one. Nobody uses the descriptor in a
        // child, but to close it, so it keeps its number.
        unsafe {
            if fd < 0 || libc::fstat(fd, data.as_mut_ptr()) != 0 {
                return;
            }
            let data = data.assume_init();
            let found = (data.st_dev, data.st_ino);
            if found == (self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed)) {
                libc::dup3(other, fd, libc::O_CLOEXEC);
            }
        }
    }
}

/// Has the children of this process not share the lock of a file, as long as this lives. It is to be dropped
/// before the file is.
#[derive(Debug)]
pub(crate) struct OwnLock(Option<&'static Locked>);

impl OwnLock {
    /// Of that file. Where there are very many, children share the locks of the last.
    pub(crate) fn of(file: &File) -> Self {
        let Ok(data) = file.metadata() else { return Self(None) };
        let free = LOCKED.iter().find(|it| !it.taken.swap(true, Ordering::Acquire));
        if let Some(locked) = free {
            locked.device.store(data.dev(), Ordering::Relaxed);
            locked.inode.store(data.ino(), Ordering::Relaxed);
            locked.fd.store(file.as_raw_fd(), Ordering::Release);
        }
        Self(free)
    }
}

impl Drop for OwnLock {
    fn drop(&mut self) {
        if let Some(locked) = self.0 {
            locked.fd.store(-1, Ordering::Relaxed);
            locked.taken.store(false, Ordering::Release);
        }
    }
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    if LOCKED.iter().all(|it| it.fd.load(Ordering::Acquire) < 0) {
        return;
    }
    // Some open file that has no name and needs no right.
    // SAFETY: takes integers only; so does `close`, of what is only known here.
    unsafe {
        let other = libc::eventfd(0, libc::EFD_CLOEXEC);
        if other >= 0 {
            LOCKED.iter().for_each(|it| it.give_up(other));
            libc::close(other);
        }
    }
}

/// The process that something was made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Birthplace(u32);

impl Birthplace {
    /// This process.
    pub(crate) fn here() -> Self {
        INSTALLED.call_once(|| {
            // SAFETY: the handler is a function of the required type that does nothing but atomic
            // operations and system calls, which is safe in a child of a process with threads.
            let result = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if result != 0 {
                tracing::warn!("cannot watch for fork; do not use inherited objects in a child");
            }
        });
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// False in a child of that process.
    #[inline]
    pub(crate) fn is_here(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::TryLockError;
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn a_child_does_not_keep_a_lock() {
        let path = std::env::temp_dir().join(format!("quipu-fork-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        file.try_lock().unwrap();
        Birthplace::here();
        let own = OwnLock::of(&file);
        let ((mut told, mut tell), (mut held, hold)) =
            (std::io::pipe().unwrap(), std::io::pipe().unwrap());
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop(hold);
            let _ = tell.write_all(b"x");
            // Until the parent is done.
            let _ = held.read(&mut [0]);
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(0) };
        }
        told.read_exact(&mut [0]).unwrap();
        let other = File::open(&path).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)), "the parent has it");
        drop(own);
        drop(file);
        other.try_lock().unwrap();
        drop(hold);
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
        std::fs::remove_file(&path).unwrap();
    }
}
