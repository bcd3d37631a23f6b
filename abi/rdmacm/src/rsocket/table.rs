//! Which descriptor stands for what.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use libc::c_int;
use quipu_cabi::Errno;

use super::repoll::Set;
use super::socket::Socket;

/// What a descriptor stands for.
#[derive(Clone)]
pub(crate) enum Entry {
    Stream(Arc<Socket>),
    /// A UDP socket of the system.
    Datagram,
    /// A set of sockets.
    Set(Arc<Set>),
}

impl Entry {
    /// The stream. Calls for anything else are the system's.
    pub(crate) fn stream(self) -> Option<Arc<Socket>> {
        match self {
            Self::Stream(socket) => Some(socket),
            Self::Datagram | Self::Set(_) => None,
        }
    }
}

static TABLE: RwLock<BTreeMap<c_int, Entry>> = RwLock::new(BTreeMap::new());

/// What a descriptor stands for, if it is one of this library's.
pub(crate) fn entry(fd: c_int) -> Option<Entry> {
    TABLE.read().unwrap_or_else(PoisonError::into_inner).get(&fd).cloned()
}

/// As [`entry`]; EBADF if it is none.
pub(crate) fn known(fd: c_int) -> Result<Entry, Errno> {
    entry(fd).ok_or(Errno(libc::EBADF))
}

/// The stream of a descriptor.
///
/// # Errors
///
/// EBADF if it is none of this library's, EOPNOTSUPP for datagrams.
pub(crate) fn stream(fd: c_int) -> Result<Arc<Socket>, Errno> {
    known(fd)?.stream().ok_or(Errno::EOPNOTSUPP)
}

/// Names what has been made. Where a program has closed a descriptor by close(2), an entry is left: the
/// kernel has given its number away since, so that it is not closed once more.
pub(crate) fn insert(fd: c_int, entry: Entry) {
    let left = TABLE.write().unwrap_or_else(PoisonError::into_inner).insert(fd, entry);
    match left {
        Some(Entry::Stream(socket)) => socket.lock().disown(),
        // Its other descriptors stay open with it.
        Some(Entry::Set(set)) => std::mem::forget(set),
        Some(Entry::Datagram) | None => {}
    }
}

pub(crate) fn remove(fd: c_int) -> Option<Entry> {
    TABLE.write().unwrap_or_else(PoisonError::into_inner).remove(&fd)
}
