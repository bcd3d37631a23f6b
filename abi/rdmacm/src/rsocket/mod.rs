//! The r* calls of rsocket.h: sockets whose streams go over queue pairs. The protocol is in
//! `specs/rsocket.md`.
//!
//! | module | holds |
//! |---|---|
//! | `wire`, `stream`, `buffer` | the protocol and its books: numbers alone |
//! | `memory`, `connection` | one connection: registered memory, a queue pair, completions |
//! | `table`, `socket` | sockets by descriptor, their states |
//! | `setup` | accepting, connecting, and beginning anew |
//! | `wait`, `sleepers`, `turn`, `spin` | waiting |
//! | `calls` | from `rsocket` to `rclose` |
//! | `repoll` | sets of sockets, as epoll(7) |
//! | `transfer`, `poll`, `options`, `iomap` | the other calls |
//!
//! Sockets for datagrams are the UDP sockets of the system: that is what datagrams of this adapter
//! travel in anyway.

mod buffer;
pub mod calls;
mod connection;
pub mod iomap;
mod memory;
pub mod options;
pub mod poll;
pub mod repoll;
mod setup;
mod sleepers;
mod socket;
mod spin;
mod stream;
mod table;
pub mod transfer;
mod turn;
mod wait;
mod wire;

use libc::c_int;
use quipu_cabi::{Errno, MinusOne};

/// The longest message, so that a long transfer is under way while its rest is still copied.
const PIECE: usize = 64 << 10;

/// Sizes of a connection, which options set.
#[derive(Clone, Copy, Debug)]
struct Options {
    /// Bytes that the peer may have sent without this end's program having got them.
    ring: u32,
    /// Bytes that may be under way to the peer.
    buffer: u32,
    sends: u32,
    receives: u32,
    /// Entries of the table of mappings.
    mappings: u32,
    /// Asked for and given back; nothing depends on it.
    inline: c_int,
}

impl Default for Options {
    fn default() -> Self {
        let (ring, buffer) = (1 << 17, 1 << 17);
        Self { ring, buffer, sends: 384, receives: 384, mappings: 0, inline: 64 }
    }
}

/// Returns a number of 0 or above, or -1 with `errno` set, in a type as wide as a pointer.
pub type Wide = MinusOne<isize>;

/// The result of a call of the C library that reports failure as -1, an int or as wide as a pointer.
fn system<N: Default + PartialOrd>(result: N) -> Result<N, Errno> {
    if result < N::default() { Err(Errno::last()) } else { Ok(result) }
}

/// Makes a descriptor of this library's own non-blocking.
fn set_nonblocking(fd: c_int) {
    // SAFETY: fcntl(2) on a descriptor.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
    }
}
