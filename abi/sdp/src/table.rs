//! What a descriptor stands for.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError, RwLock, RwLockWriteGuard};

use crate::establish::{add_descriptor, remove_descriptor};
use crate::fork::Lost;
use crate::relay::{Relayed, leave_to_children, relaying};
use crate::socket::Socket;

/// Descriptors that can be known. Sockets with larger numbers stay the kernel's.
const MOST: usize = 1 << 16;

/// A TCP socket of the kernel that a rule may carry over SDP when it connects or listens.
#[derive(Default)]
pub(crate) struct Candidate {
    /// Epoll sets that it is in, with what they wait for.
    pub(crate) sets: Mutex<Vec<(RawFd, libc::epoll_event)>>,
    /// Where it was bound.
    pub(crate) bound: Mutex<Option<SocketAddr>>,
    /// What listens for SDP next to it, by a rule `both`.
    pub(crate) twin: Mutex<Option<Arc<Socket>>>,
    /// That of the parent, in a child of fork(2).
    pub(crate) parents_twin: OnceLock<Arc<Lost>>,
}

impl Candidate {
    /// What listens for SDP next to it in this process.
    pub(crate) fn own_twin(&self) -> Option<Arc<Socket>> {
        self.twin.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        if let Some(twin) = self.twin.lock().unwrap_or_else(PoisonError::into_inner).take() {
            twin.close();
        }
    }
}

/// What a descriptor stands for.
#[derive(Clone)]
pub(crate) enum Entry {
    /// A socket of SDP.
    Sdp(Arc<Socket>),
    /// A socket of the kernel, so far.
    Candidate(Arc<Candidate>),
    /// A connection of SDP that this process, or its parent, relays: the descriptor is a stream of the
    /// kernel.
    Relayed(Arc<Relayed>),
    /// A socket of SDP that belongs to the parent of this process.
    Lost(Arc<Lost>),
}

/// One bit for each descriptor that is in the table: most calls are for others, and need no lock.
static KNOWN: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];
static TABLE: LazyLock<RwLock<HashMap<RawFd, Entry>>> = LazyLock::new(RwLock::default);

fn bit(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((KNOWN.get(fd / 64)?, 1 << (fd % 64)))
}

/// What a descriptor stands for; none if it is none of ours.
#[inline]
pub(crate) fn get(fd: RawFd) -> Option<Entry> {
    let (word, mask) = bit(fd)?;
    if word.load(Ordering::Acquire) & mask == 0 {
        return None;
    }
    TABLE.read().unwrap_or_else(PoisonError::into_inner).get(&fd).cloned()
}

/// The socket of SDP of a descriptor.
#[inline]
pub(crate) fn socket(fd: RawFd) -> Option<Arc<Socket>> {
    match get(fd)? {
        Entry::Sdp(socket) => Some(socket),
        _ => None,
    }
}

/// The names of a connection that the kernel moves, or that is the parent's.
pub(crate) fn relayed(fd: RawFd) -> Option<Arc<Relayed>> {
    match get(fd)? {
        Entry::Relayed(relayed) => Some(relayed),
        Entry::Lost(lost) => Some(Arc::new(lost.names)),
        _ => None,
    }
}

/// Has a descriptor stand for something. False if its number is too large.
pub(crate) fn put(fd: RawFd, entry: Entry) -> bool {
    let Some((word, mask)) = bit(fd) else { return false };
    if let Entry::Sdp(socket) = &entry {
        add_descriptor(socket);
    }
    let before = TABLE.write().unwrap_or_else(PoisonError::into_inner).insert(fd, entry);
    word.fetch_or(mask, Ordering::AcqRel);
    // It was closed by a call that this library did not see.
    dropped(before);
    true
}

/// Has a descriptor stand for nothing: it is about to be closed.
pub(crate) fn forget(fd: RawFd) {
    let Some((word, mask)) = bit(fd) else { return };
    if word.load(Ordering::Acquire) & mask == 0 {
        return;
    }
    // A relay that another thread begins may use the descriptor.
    let relaying = socket(fd).map(|_| relaying());
    word.fetch_and(!mask, Ordering::AcqRel);
    let before = TABLE.write().unwrap_or_else(PoisonError::into_inner).remove(&fd);
    if let Some(Entry::Sdp(socket)) = &before
        && socket.descriptors.load(Ordering::Acquire) == 1
        && socket.is_shared.load(Ordering::SeqCst)
    {
        leave_to_children(socket, fd);
    }
    drop(relaying);
    dropped(before);
}

fn dropped(entry: Option<Entry>) {
    if let Some(Entry::Sdp(socket)) = entry {
        remove_descriptor(&socket);
    }
}

/// A descriptor was duplicated.
pub(crate) fn duplicated(from: RawFd, to: RawFd) {
    if from != to
        && to >= 0
        && let Some(entry) = get(from)
    {
        put(to, entry);
    }
}

/// Descriptors in a range that stand for something.
pub(crate) fn range(first: u32, last: u32) -> Vec<RawFd> {
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    let inside = |fd: &&RawFd| (first..=last).contains(&(**fd as u32));
    table.keys().filter(inside).copied().collect()
}

/// The table, locked while the process forks: a child has no thread that may hold the lock.
pub(crate) type Held = RwLockWriteGuard<'static, HashMap<RawFd, Entry>>;

/// Keeps the table as it is.
pub(crate) fn hold() -> Held {
    TABLE.write().unwrap_or_else(PoisonError::into_inner)
}

/// In a child of fork(2): the sockets of SDP are the parent's. Their locks may be held by threads that this
/// process does not have: they are never touched.
pub(crate) fn lose_sockets(
    table: &mut HashMap<RawFd, Entry>,
    known: Vec<(RawFd, Entry)>,
    lost: &HashMap<RawFd, Arc<Lost>>,
) {
    for (fd, entry) in known {
        match entry {
            Entry::Candidate(candidate) => {
                if let Ok(mut twin) = candidate.twin.try_lock() {
                    std::mem::forget(twin.take());
                }
                if let Some(lost) = lost.get(&fd) {
                    let _ = candidate.parents_twin.set(Arc::clone(lost));
                }
            }
            entry => std::mem::forget(entry),
        }
    }
    for (fd, entry) in table {
        if let Entry::Sdp(socket) = entry {
            // Another thread may have made it a moment ago.
            let known = lost.get(fd).filter(|lost| lost.is_of(socket)).cloned();
            let lost = known.unwrap_or_else(|| Arc::new(Lost::unknown(socket)));
            std::mem::forget(std::mem::replace(entry, Entry::Lost(lost)));
        }
    }
}

/// The whole table, for a fork.
pub(crate) fn all() -> Vec<(RawFd, Entry)> {
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    table.iter().map(|(fd, entry)| (*fd, entry.clone())).collect()
}
