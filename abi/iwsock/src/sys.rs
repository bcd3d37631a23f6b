//! System calls on the sockets that are in the mode, and the application's memory.

use std::mem::zeroed;
use std::time::{Duration, Instant};

use libc::{c_int, c_short, c_void, iovec};
use quipu_iwsock::{Memory, Piece};

/// Most parts that one call sends (`IOV_MAX`).
const MAX_PARTS: usize = 1024;

/// The memory of this process, as the program has posted or registered it.
pub(crate) struct Process;

impl Memory for Process {
    fn read(&self, address: u64, into: &mut [u8]) {
        let from = std::ptr::with_exposed_provenance::<u8>(address as usize);
        // SAFETY: the program vouches for what it posts and registers until the work is complete, or the
        // registration ends.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }
    fn write(&mut self, address: u64, from: &[u8]) {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }
}

/// `errno`.
pub(crate) fn errno() -> c_int {
    quipu_cabi::Errno::last().0
}

/// How a call on a stream ended.
pub(crate) enum Moved {
    /// So many bytes were.
    Bytes(usize),
    /// None can be for now.
    Later,
    /// The stream has ended, or failed.
    Over,
}

fn moved(result: libc::c_long) -> Moved {
    match usize::try_from(result) {
        Ok(0) => Moved::Over,
        Ok(len) => Moved::Bytes(len),
        Err(_) if [libc::EAGAIN, libc::EINTR].contains(&errno()) => Moved::Later,
        Err(_) => Moved::Over,
    }
}

/// Receives without waiting.
pub(crate) fn receive(fd: c_int, into: &mut [u8]) -> Moved {
    let (at, len) = (into.as_mut_ptr(), into.len());
    // SAFETY: the buffer is this function's. By number, since this library defines recv(2) itself.
    moved(unsafe { libc::syscall(libc::SYS_recvfrom, fd, at, len, libc::MSG_DONTWAIT, 0, 0) })
}

fn part(piece: &Piece, used: usize) -> iovec {
    let (at, len) = match piece {
        Piece::Bytes(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
        Piece::Memory(span) => {
            (std::ptr::with_exposed_provenance_mut(span.address as usize), span.len)
        }
    };
    iovec { iov_base: at.wrapping_add(used).cast(), iov_len: len - used }
}

/// Sends pieces without waiting, of the first of which `used` bytes were sent: in one call, or one call for
/// each.
pub(crate) fn send<'a>(
    fd: c_int,
    pieces: impl Iterator<Item = &'a Piece>,
    used: usize,
    at_once: bool,
) -> Moved {
    let limit = if at_once { MAX_PARTS } else { 1 };
    let used = std::iter::once(used).chain(std::iter::repeat(0));
    let parts: Vec<iovec> =
        pieces.zip(used).map(|(piece, used)| part(piece, used)).take(limit).collect();
    // SAFETY: all zeroes is an empty message.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut();
    message.msg_iovlen = parts.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the message lives on; its parts are the endpoint's, or the program's, who vouches for them.
    moved(unsafe { libc::syscall(libc::SYS_sendmsg, fd, &raw const message, flags) })
}

/// Sets an option that is a number.
pub(crate) fn set_option(fd: c_int, level: c_int, name: c_int, value: c_int) {
    let len = size_of::<c_int>();
    // SAFETY: a number of this length.
    unsafe { libc::syscall(libc::SYS_setsockopt, fd, level, name, &raw const value, len) };
}

/// An option that is a number.
pub(crate) fn option(fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    let (mut value, mut len): (c_int, libc::socklen_t) = (0, 4);
    let (at, len) = (&raw mut value, &raw mut len);
    // SAFETY: places for a number and its length.
    let result = unsafe { libc::syscall(libc::SYS_getsockopt, fd, level, name, at, len) };
    (result == 0).then_some(value)
}

/// Waits for events of one descriptor. False if the time is over, or for a signal.
pub(crate) fn wait(fd: c_int, events: c_short, time: Option<Duration>) -> bool {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    poll(std::slice::from_mut(&mut entry), time) > 0
}

/// poll(2) with a time limit, or none.
pub(crate) fn poll(entries: &mut [libc::pollfd], time: Option<Duration>) -> c_int {
    let time = time.map(|time| libc::timespec {
        tv_sec: time.as_secs() as libc::time_t,
        tv_nsec: time.subsec_nanos().into(),
    });
    let time = time.as_ref().map_or(std::ptr::null(), |time| &raw const *time);
    let (list, count) = (entries.as_mut_ptr(), entries.len());
    // SAFETY: a list of this length, and a time or null.
    unsafe { libc::syscall(libc::SYS_ppoll, list, count, time, 0, 8) as c_int }
}

/// When a wait of so many milliseconds ends; none if it has no limit.
pub(crate) fn deadline(timeout_ms: c_int) -> Option<Instant> {
    let time = u64::try_from(timeout_ms).ok()?;
    Some(Instant::now() + Duration::from_millis(time))
}

/// What is left until a deadline.
pub(crate) fn left(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
}

/// The next definition of a function, after this library's.
pub(crate) fn next(name: &std::ffi::CStr) -> *mut c_void {
    // SAFETY: dlsym(3) wants a zero-terminated name.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// A number that a peer does not know.
pub(crate) fn random() -> u32 {
    let mut number = 0_u32;
    // SAFETY: four bytes of this function's. Without random numbers it is a time.
    let got = unsafe { libc::syscall(libc::SYS_getrandom, &raw mut number, 4, 0) };
    if got == 4 { number } else { std::process::id() ^ 0x5151_0101 }
}
