//! An adapter in a process of its own, and programs that use it without any right (`specs/quipu-share.md`).
//!
//! The process that has the adapter (`server`) listens at a socket in a folder of its user (`folders`), or,
//! if programs of others are to attach (`guests`), in one that these can enter. Each program that attaches
//! gets a memory file and a bell. In the file are rings, in which requests are posted and completions come
//! back (`slots`), and the arena, from which the program registers memory. Everything else is asked for by
//! messages on the socket (`words`), one at a time, each with an answer.
//!
//! The program's end has two parts: `calls`, which asks and waits, and `attached`, which is behind the lock
//! of the program's engine and makes progress as sockets and links do: completions land in the engine's own
//! queues, so waiting for them is the same as ever. The other end keeps the books of each program
//! (`tenant`), which can name its own objects only, and whose words are copied out once and then checked.
//!
//! A bell is one byte on a socket. Descriptors go from the process that has the adapter to programs, never
//! the other way: to close one that a stranger made may take as long as the stranger likes.

mod arena;
mod attached;
mod calls;
mod claim;
mod folders;
mod guests;
mod overflow;
mod place;
mod queue;
mod server;
mod slots;
mod tenant;
#[cfg(test)]
mod tests;
mod words;

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use quipu_cabi::Hold;
use quipu_mem::ring::{ChannelConfig, ChannelLayout};

use crate::sys::{adopt_socket, check, with_more_descriptors};

pub(crate) use self::attached::{Attached, Landed};
pub(crate) use self::calls::Calls;
pub use self::guests::Guests;
pub use self::server::{ShareError, Sharer};
pub(crate) use self::words::{Call, Reader};

/// The longest name of a shared adapter.
pub(crate) const MAX_NAME: usize = 32;
/// The rings of a program: the responses of a channel have no use here.
const RINGS: ChannelConfig = ChannelConfig {
    request_slots: 4096,
    request_bytes: 1 << 20,
    response_slots: 2,
    response_bytes: 64,
};
/// Looks that find what was told before: a ring holds no more.
pub(crate) const MOST_LOOKS: u32 = RINGS.request_slots;
/// How a bell sounds.
const RING: &[u8] = &[1];

/// Bytes of the rings, which are at the beginning of a program's memory.
fn rings_len() -> usize {
    ChannelLayout::new(RINGS).expect("the sizes are legal").total_len()
}

/// Whether something can be the name of a shared adapter: what ends like the locks beside sockets is none.
pub(crate) fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=MAX_NAME).contains(&name.len())
        && name.chars().all(allowed)
        && !name.ends_with(place::LOCK)
}

fn file_name(name: &str) -> String {
    format!("share-{name}")
}

/// A socket that keeps messages apart.
fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes integers only.
    with_more_descriptors(|| adopt_socket(unsafe { libc::socket(libc::AF_UNIX, kind, 0) }))
}

/// Two such sockets that are connected with each other.
fn pair() -> io::Result<[OwnedFd; 2]> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    with_more_descriptors(|| {
        let mut raw = [-1; 2];
        // SAFETY: the kernel writes two descriptors to a live array.
        check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, raw.as_mut_ptr()) })?;
        let [first, second] = raw.map(adopt_socket);
        Ok([first?, second?])
    })
}

/// The address of a socket in the file system.
fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all zeroes is a valid sockaddr_un.
    let mut raw: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    raw.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let text = OsStr::as_bytes(path.as_os_str());
    // A zero closes it.
    if text.len() >= raw.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in raw.sun_path.iter_mut().zip(text) {
        *to = *from as libc::c_char;
    }
    Ok((raw, size_of::<libc::sockaddr_un>() as libc::socklen_t))
}

/// Connects to whoever shares an adapter at `path`. Never waits.
fn connect(path: &Path) -> io::Result<OwnedFd> {
    let (fd, (raw, len)) = (socket()?, address(path)?);
    // SAFETY: the pointer and the length describe `raw`, which outlives the call.
    check(unsafe { libc::connect(fd.as_raw_fd(), (&raw const raw).cast(), len) })?;
    Ok(fd)
}

/// Rings a bell. If there is no room for another byte, it is ringing already.
fn ring(bell: &OwnedFd) {
    let _hold = Hold::new();
    let _ = crate::sys::send(bell, RING);
}

/// Takes a byte that has come to a bell: `false` if its other end is gone. There is one for each time that
/// this end has asked for; whatever else there is is heard the next time.
fn hear(bell: &OwnedFd) -> bool {
    let mut byte = [0; 8];
    match crate::sys::receive(bell, &mut byte) {
        Ok(len) => len > 0,
        Err(error) => crate::sys::would_block(&error),
    }
}
