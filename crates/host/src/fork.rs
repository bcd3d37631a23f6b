//! What happens to an engine when the program forks.
//!
//! The child inherits descriptors and memory but neither the helper thread nor the right to speak for the
//! parent. So an engine belongs to the process that opened it: in a child every call on it fails, and
//! dropping it there touches no socket. Nor does it have the sockets: as long as it lived, peers would not
//! hear that the parent is dead. A child of a bare `clone` has them.

use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use libc::c_int;
use quipu_cabi::descriptors::{restore_limit_in_child, with_raised_limit};

/// How many forks lie between the first process and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static INSTALLED: Once = Once::new();

/// Descriptors in a part of the table of what children do not get, and how many parts there are.
const PART: usize = 1024;
const PARTS: usize = 1024;

/// By number: the open file that a child does not get ([`identity`]), 0 for none. Nobody says when a
/// descriptor is closed: what has its number by then is another file, and is left alone. Parts are never
/// freed.
static WITHHELD: [AtomicPtr<Part>; PARTS] = [const { AtomicPtr::new(ptr::null_mut()) }; PARTS];

type Part = [AtomicU64; PART];

/// Has the children of this process not get a descriptor, but one of nothing by the same number: of sockets,
/// whose peers are to hear when this process dies, and of files whose locks say that it lives. The open file
/// must be one of its own kind by number (a socket or a file on a disk, not a counter or a set of epoll).
/// Descriptors beyond the first million, and one that another thread has just opened when the process forks,
/// are kept.
pub(crate) fn withhold(fd: &impl AsRawFd) {
    let fd = fd.as_raw_fd();
    let at = usize::try_from(fd).unwrap_or(usize::MAX);
    let (Some(part), Some(identity)) = (WITHHELD.get(at / PART), identity(fd)) else { return };
    let mut found = part.load(Ordering::Acquire);
    if found.is_null() {
        let new: *mut Part = Box::into_raw(Box::new([const { AtomicU64::new(0) }; PART]));
        let put = part.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire);
        found = put.map_or_else(
            |other| {
                // SAFETY: another thread was faster, so nobody has seen this one.
                drop(unsafe { Box::from_raw(new) });
                other
            },
            |_| new,
        );
    }
    // SAFETY: a part lives for ever once it is in the table.
    let found = unsafe { &*found };
    found[at % PART].store(identity, Ordering::Release);
}

/// What tells an open file from others: its device and inode, which sockets have, too. Async-signal-safe.
pub(crate) fn identity(fd: c_int) -> Option<u64> {
    let mut data = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: there is room for an answer, which is read if there is one.
    let data = unsafe {
        if libc::fstat(fd, data.as_mut_ptr()) != 0 {
            return None;
        }
        data.assume_init()
    };
    Some((data.st_ino ^ data.st_dev.rotate_right(16)).max(1))
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    restore_limit_in_child();
    // Numbers beyond the program's limit can be taken only if that is higher.
    with_raised_limit(withdraw);
}

/// Takes from this child what its parent has withheld.
fn withdraw() {
    let mut nothing = Nothing { fd: -1, is_extra: false };
    for (part_at, part) in WITHHELD.iter().enumerate() {
        // SAFETY: null, or a part, which lives for ever.
        let Some(part) = (unsafe { part.load(Ordering::Acquire).as_ref() }) else { continue };
        for (at, withheld) in part.iter().enumerate() {
            let fd = (part_at * PART + at) as c_int;
            let expected = withheld.swap(0, Ordering::Relaxed);
            if expected != 0 && identity(fd) == Some(expected) {
                nothing.take_the_place_of(fd);
            }
        }
    }
    if nothing.is_extra {
        // SAFETY: takes an integer: a descriptor of what is only known here.
        unsafe { libc::close(nothing.fd) };
    }
}

/// Some open file that has no name, needs no right, and is good for nothing; -1 until it is there.
struct Nothing {
    fd: c_int,
    /// Whether its number is not one that it was to take.
    is_extra: bool,
}

impl Nothing {
    /// In a child, which has one thread. The number stays taken, as its owner may close it yet.
    fn take_the_place_of(&mut self, fd: c_int) {
        // SAFETY: these take integers only. Nobody uses the descriptor in a child, but to close it.
        unsafe {
            // First, as there may be no more descriptors than there are.
            libc::close(fd);
            if self.fd < 0 {
                self.fd = libc::eventfd(0, libc::EFD_CLOEXEC);
                self.is_extra = self.fd >= 0 && self.fd != fd;
            }
            if self.fd >= 0 && self.fd != fd {
                libc::dup3(self.fd, fd, libc::O_CLOEXEC);
            }
        }
    }
}

/// The process that something was made in.
#[derive(Debug)]
pub(crate) struct Birthplace(AtomicU32);

/// Nobody forks so often.
const NOWHERE: u32 = u32::MAX;

impl Birthplace {
    /// This process.
    pub(crate) fn here() -> Self {
        INSTALLED.call_once(|| {
            // SAFETY: the handler is a function of the required type that does nothing but atomic
            // operations and system calls, which is safe in a child of a process with threads.
            let result = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if result != 0 {
                tracing::warn!("cannot detect fork; do not use inherited objects in a child");
            }
        });
        Self(AtomicU32::new(GENERATION.load(Ordering::Relaxed)))
    }

    /// From now on it is of no process: what is there is dead. Whether it was of this one.
    pub(crate) fn leave(&self) -> bool {
        self.0.swap(NOWHERE, Ordering::Relaxed) == GENERATION.load(Ordering::Relaxed)
    }

    /// False in a child of that process.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.0.load(Ordering::Relaxed) == GENERATION.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, TryLockError};
    use std::io::{PipeReader, PipeWriter, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    /// A child that lives until this is dropped.
    struct Child {
        number: libc::pid_t,
        hold: Option<PipeWriter>,
    }

    impl Child {
        /// One that has told what `look` says there.
        fn new(look: impl FnOnce() -> bool) -> (Self, bool) {
            let ((mut told, mut tell), (mut held, hold)): (_, (PipeReader, _)) =
                (std::io::pipe().unwrap(), std::io::pipe().unwrap());
            // SAFETY: the child makes system calls only, and ends.
            let number = unsafe { libc::fork() };
            if number == 0 {
                drop(hold);
                let _ = tell.write_all(&[u8::from(look())]);
                // Until the parent is done.
                let _ = held.read(&mut [0]);
                // SAFETY: ends this process at once.
                unsafe { libc::_exit(0) };
            }
            let mut answer = [0];
            told.read_exact(&mut answer).unwrap();
            (Self { number, hold: Some(hold) }, answer == [1])
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            self.hold = None;
            // SAFETY: waits for our own child.
            unsafe { libc::waitpid(self.number, ptr::null_mut(), 0) };
        }
    }

    fn is_alone(test: &str) -> bool {
        crate::testing::is_alone(&format!("fork::tests::{test}"))
    }

    #[test]
    fn a_child_does_not_keep_a_lock() {
        if !is_alone("a_child_does_not_keep_a_lock") {
            return;
        }
        let path = std::env::temp_dir().join(format!("quipu-fork-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        file.try_lock().unwrap();
        Birthplace::here();
        withhold(&file);
        let (child, _) = Child::new(|| true);
        let other = File::open(&path).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)), "the parent has it");
        drop(file);
        other.try_lock().unwrap();
        drop(child);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn the_end_of_a_stream_is_heard_while_a_child_lives() {
        if !is_alone("the_end_of_a_stream_is_heard_while_a_child_lives") {
            return;
        }
        Birthplace::here();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        theirs.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        withhold(&ours);
        let number = ours.as_raw_fd();
        // The number is still taken.
        // SAFETY: takes an integer.
        let (child, taken) = Child::new(|| unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 });
        assert!(taken);
        // As the kernel does for a process that is killed.
        drop(ours);
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
        drop(child);
    }

    #[test]
    fn what_has_a_number_that_was_withheld_is_left_alone() {
        if !is_alone("what_has_a_number_that_was_withheld_is_left_alone") {
            return;
        }
        Birthplace::here();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let old = TcpStream::connect(address).unwrap();
        let number = old.as_raw_fd();
        withhold(&old);
        let new = TcpStream::connect(address).unwrap();
        // SAFETY: one of our own takes the place of another.
        assert_eq!(unsafe { libc::dup2(new.as_raw_fd(), number) }, number);
        let expected = identity(number);
        let (_child, same) = Child::new(|| identity(number) == expected);
        assert!(same);
    }

    /// Where the limit is reached, too.
    #[test]
    fn a_child_that_may_have_no_descriptor_gives_up_what_it_has() {
        if !is_alone("a_child_that_may_have_no_descriptor_gives_up_what_it_has") {
            return;
        }
        crate::testing::limit_descriptors(256);
        Birthplace::here();
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        withhold(&theirs);
        let mut fill: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        // But for the pipes to the child.
        fill.truncate(fill.len() - 4);
        let (child, _) = Child::new(|| true);
        drop(theirs);
        ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(ours.read(&mut [0]).unwrap(), 0);
        drop(child);
    }
}
