//! Which descriptors are in the mode.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libc::c_int;

use crate::counters;
use crate::socket::Socket;

/// Descriptors from this number on cannot be in the mode.
pub(crate) const LIMIT: usize = 1 << 16;
/// The socket has called connect(2).
const CONNECTED: u8 = 1;
/// It is in the mode.
const MODE: u8 = 2;

static FLAGS: [AtomicU8; LIMIT] = [const { AtomicU8::new(0) }; LIMIT];
static SOCKETS: Mutex<Option<HashMap<c_int, Arc<Socket>>>> = Mutex::new(None);

fn sockets() -> MutexGuard<'static, Option<HashMap<c_int, Arc<Socket>>>> {
    SOCKETS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn flags(fd: c_int) -> Option<&'static AtomicU8> {
    usize::try_from(fd).ok().and_then(|fd| FLAGS.get(fd))
}

/// The socket of a descriptor, if it is in the mode.
#[inline]
pub(crate) fn get(fd: c_int) -> Option<Arc<Socket>> {
    if flags(fd)?.load(Ordering::Acquire) & MODE == 0 {
        return None;
    }
    sockets().as_ref()?.get(&fd).cloned()
}

/// Whether a descriptor is below [`LIMIT`].
pub(crate) fn has_room_for(fd: c_int) -> bool {
    flags(fd).is_some()
}

/// A descriptor is in the mode from now on. False if it is already.
pub(crate) fn put(fd: c_int, socket: Arc<Socket>) -> bool {
    let (Some(flags), mut sockets) = (flags(fd), sockets()) else { return false };
    let sockets = sockets.get_or_insert_default();
    if sockets.contains_key(&fd) {
        return false;
    }
    sockets.insert(fd, socket);
    flags.fetch_or(MODE, Ordering::Release);
    true
}

/// A descriptor is closed, or is another one from now on. Its socket, if it was in the mode.
pub(crate) fn take(fd: c_int) -> Option<Arc<Socket>> {
    let flags = flags(fd)?;
    if flags.load(Ordering::Acquire) == 0 || flags.swap(0, Ordering::AcqRel) & MODE == 0 {
        return None;
    }
    let socket = sockets().as_mut()?.remove(&fd);
    if socket.is_some() {
        counters::note_closed();
    }
    socket
}

/// A socket calls connect(2).
pub(crate) fn note_connect(fd: c_int) {
    if let Some(flags) = flags(fd) {
        flags.fetch_or(CONNECTED, Ordering::Relaxed);
    }
}

/// Whether a socket has called connect(2).
pub(crate) fn has_connected(fd: c_int) -> bool {
    flags(fd).is_some_and(|flags| flags.load(Ordering::Relaxed) & CONNECTED != 0)
}
