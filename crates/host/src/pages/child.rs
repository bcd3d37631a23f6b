//! A child of fork has memory of its own: pages that were shared with peers become private copies there.
//!
//! The parent waits until they are, so that the child does not see what it writes afterwards. Its other
//! threads do not wait, unless they fork: a child would keep the end of another one's pipe open. In the
//! child of a process with threads nothing may be allocated or locked.

use std::cell::{Cell, UnsafeCell};
use std::fs::File;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use libc::{c_int, c_void};

use super::convert::{each_present, move_mapping};
use super::{ANY, NAME, REGISTRY};
use crate::mapped::{Mapping, page_size};
use crate::{fork, sys};

/// Bytes of the list of mappings that are read at once; longer lines are of no mapping of ours.
const TEXT: usize = 8192;
/// Ranges that are replaced between two looks at the list.
const BATCH: usize = 32;

/// How long the parent waits for a sign of progress, in ms: somebody else may hold the end of the pipe.
const PATIENCE_MS: c_int = 10_000;

thread_local! {
    /// The pipe by whose end the parent learns that the child is ready, while this thread forks.
    static PIPE: Cell<[c_int; 2]> = const { Cell::new([-1, -1]) };
    /// How often this thread is between the handlers: a signal there may have it fork once more.
    static FORKS: Cell<u32> = const { Cell::new(0) };
}

/// Bytes between two signs of progress, and what a sign is.
const SIGN_EVERY: usize = 64 << 20;
static SIGN: u8 = 0;

/// `/proc`, which the process may not find any more where it has gone since (`chroot`).
static PROC: AtomicI32 = AtomicI32::new(-1);

/// Descriptors that are given up where there can be no more: by a process that forks for the ends of a pipe,
/// which take their places afterwards, and by a child to open the list of mappings. They are ends of pipes:
/// nobody else has those open.
static SPARES: [Spare; 2] = [const { Spare::none() }; 2];

/// Used by the thread that forks.
struct Spare {
    /// -1: there is none.
    fd: AtomicI32,
    /// Of the open file ([`fork::identity`]): the program may have closed it, and have another one by its
    /// number.
    identity: AtomicU64,
}

impl Spare {
    const fn none() -> Self {
        Self { fd: AtomicI32::new(-1), identity: AtomicU64::new(0) }
    }

    /// Keeps a descriptor, if there is none.
    fn keep(&self, fd: c_int) -> bool {
        let is_free = self.fd.load(Ordering::Relaxed) < 0;
        if is_free {
            self.identity.store(fork::identity(fd).unwrap_or(0), Ordering::Relaxed);
            self.fd.store(fd, Ordering::Relaxed);
        }
        is_free
    }

    /// Closes it, if it is still there; whether it was.
    fn give_up(&self) -> bool {
        let fd = self.fd.swap(-1, Ordering::Relaxed);
        let is_ours = fork::identity(fd) == Some(self.identity.load(Ordering::Relaxed));
        // SAFETY: a descriptor of our own.
        is_ours && unsafe { libc::close(fd) == 0 }
    }
}

/// Held by the thread that forks.
static TURN: Turn = Turn(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

/// A lock that may be taken in one handler and given back in another, in either process (pthread_atfork(3)).
struct Turn(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: it is used by the functions for it only.
unsafe impl Sync for Turn {}

/// From now on looks after children.
pub(super) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY);
        if let Ok(proc) = options.open("/proc").and_then(sys::move_file_up) {
            PROC.store(proc.into_raw_fd(), Ordering::Release);
        }
        if let Ok((one, other)) = std::io::pipe() {
            // Low numbers: the pipe of a fork takes them within the program's own limit.
            for fd in [OwnedFd::from(one), OwnedFd::from(other)] {
                if let Ok(fd) = sys::above_standard(fd) {
                    keep_spare(fd.into_raw_fd());
                }
            }
        }
        // SAFETY: the handlers are functions of the required type, which live as long as the program.
        let result = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        if result != 0 {
            tracing::warn!("cannot detect fork; children share registered memory");
        }
    });
}

/// Whether a mapping of the list is one of a file whose name begins so.
pub(super) fn is_file(mapping: &[u8], name: &[u8]) -> bool {
    mapping.strip_prefix(b"/memfd:").is_some_and(|rest| rest.starts_with(name))
}

extern "C" fn before() {
    FORKS.set(FORKS.get() + 1);
    if FORKS.get() > 1 {
        return;
    }
    // SAFETY: a mutex that lives as long as the process.
    unsafe { libc::pthread_mutex_lock(TURN.0.get()) };
    let mut ends = [-1; 2];
    if ANY.load(Ordering::Relaxed) && !open_pipe(&mut ends) && give_up_spares() {
        open_pipe(&mut ends);
    }
    PIPE.set(ends);
}

fn open_pipe(ends: &mut [c_int; 2]) -> bool {
    // SAFETY: the kernel writes two descriptors.
    unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) == 0 }
}

/// Closes the spare descriptors; whether there were any.
fn give_up_spares() -> bool {
    SPARES.iter().fold(false, |any, spare| any | spare.give_up())
}

/// The spare descriptors.
#[cfg(test)]
pub(super) fn spares() -> Vec<c_int> {
    SPARES.iter().map(|spare| spare.fd.load(Ordering::Relaxed)).collect()
}

/// Keeps a descriptor as a spare one, where one is missing.
fn keep_spare(fd: c_int) {
    if !SPARES.iter().any(|spare| spare.keep(fd)) {
        close(fd);
    }
}

/// Ends what [`before`] began, after `wait` for the pipe, if this is the outermost fork of this thread.
fn after(wait: impl FnOnce([c_int; 2])) {
    if FORKS.get() == 1 {
        wait(PIPE.replace([-1, -1]));
        // SAFETY: taken by this thread, or, in a child, by the one that it is a copy of.
        unsafe { libc::pthread_mutex_unlock(TURN.0.get()) };
    }
    FORKS.set(FORKS.get().saturating_sub(1));
}

extern "C" fn in_parent() {
    after(|[read_end, write_end]| {
        if read_end < 0 {
            return;
        }
        let mut end = libc::pollfd { fd: read_end, events: libc::POLLIN, revents: 0 };
        // SAFETY: descriptors of our own; these calls are async-signal-safe. The other end is closed when the
        // child is ready, or ends.
        unsafe {
            // Its number stays taken: there may be no other one.
            libc::dup3(read_end, write_end, libc::O_CLOEXEC);
            let mut sign = 0u8;
            loop {
                let ready = libc::poll(&raw mut end, 1, PATIENCE_MS);
                let interrupted = ready < 0 && *libc::__errno_location() == libc::EINTR;
                let goes_on = ready > 0 && libc::read(read_end, (&raw mut sign).cast(), 1) > 0;
                if !interrupted && !goes_on {
                    break;
                }
            }
        }
        keep_spare(read_end);
        keep_spare(write_end);
    });
}

extern "C" fn in_child() {
    after(make_all_private);
}

fn make_all_private(ends: [c_int; 2]) {
    // What is registered there belongs to the parent; whatever the child registers begins anew.
    REGISTRY.store(ptr::null_mut(), Ordering::Release);
    if ANY.swap(false, Ordering::AcqRel) {
        // Whatever the process was allowed to open, this is one more, and so is the end that the parent
        // reads.
        give_up_spares();
        close(ends[0]);
        while make_private(ends[1]) == BATCH {}
        close(ends[1]);
    }
}

fn close(fd: c_int) {
    if fd >= 0 {
        // SAFETY: a descriptor of our own.
        unsafe { libc::close(fd) };
    }
}

/// Replaces up to [`BATCH`] ranges; how many. `sign` is where progress is told.
fn make_private(sign: c_int) -> usize {
    let mut found = [(0, 0, 0); BATCH];
    let mut count = 0;
    visit_list(|mapping| {
        if mapping.rights.ends_with(b"s") && is_file(mapping.name, NAME.as_bytes()) {
            let may = |at: usize, right: c_int| match mapping.rights.get(at) {
                None | Some(b'-') => 0,
                Some(_) => right,
            };
            let rights = may(0, libc::PROT_READ) | may(1, libc::PROT_WRITE);
            found[count] = (mapping.start, mapping.end - mapping.start, rights);
            count += 1;
        }
        count < BATCH
    });
    for &(start, len, rights) in &found[..count] {
        if !copy(start, len, rights, sign) {
            // Better none than the parent's.
            let place = ptr::without_provenance_mut(start);
            // SAFETY: a mapping of ours, which this child has no use for.
            unsafe { libc::munmap(place, len) };
        }
    }
    count
}

/// Replaces one range by a private copy with the same rights.
fn copy(start: usize, len: usize, rights: c_int, sign: c_int) -> bool {
    let place = ptr::with_exposed_provenance_mut::<c_void>(start);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice; the source is a mapping of one of our
    // files, which keeps its size, and whose bytes the copy has when it takes its place.
    unsafe {
        let own = libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0);
        if own == libc::MAP_FAILED {
            return false;
        }
        libc::mprotect(place, len, protection);
        let page = page_size();
        each_present(start, len, |at| {
            let from = ptr::with_exposed_provenance::<u8>(at);
            ptr::copy_nonoverlapping(from, own.cast::<u8>().add(at - start), page);
            if (at - start).is_multiple_of(SIGN_EVERY) {
                libc::write(sign, (&raw const SIGN).cast(), 1);
            }
        });
        libc::mprotect(own, len, rights);
        move_mapping(own, len, start)
    }
}

/// Reads the list of mappings without allocating, as long as `visit` says so.
fn visit_list(mut visit: impl FnMut(Mapping<'_>) -> bool) {
    let mut text = [0u8; TEXT];
    let mut filled = 0;
    let (proc, flags) = (PROC.load(Ordering::Acquire), libc::O_RDONLY | libc::O_CLOEXEC);
    // SAFETY: the names are zero-terminated strings.
    let list = unsafe {
        match libc::openat(proc, c"self/maps".as_ptr(), flags) {
            // A program may have closed what it does not know.
            -1 => libc::open(c"/proc/self/maps".as_ptr(), flags),
            list => list,
        }
    };
    if list < 0 {
        return;
    }
    'all: loop {
        let room = &mut text[filled..];
        // SAFETY: the kernel writes at most as many bytes as there is room for.
        let got = unsafe { libc::read(list, room.as_mut_ptr().cast(), room.len()) };
        let Ok(got @ 1..) = usize::try_from(got) else { break };
        filled += got;
        let whole = text[..filled].iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        for line in text[..whole].split(|&byte| byte == b'\n') {
            if Mapping::parse(line).is_some_and(|mapping| !visit(mapping)) {
                break 'all;
            }
        }
        text.copy_within(whole..filled, 0);
        filled -= whole;
        if filled == TEXT {
            filled = 0;
        }
    }
    // SAFETY: a descriptor of our own.
    unsafe { libc::close(list) };
}
