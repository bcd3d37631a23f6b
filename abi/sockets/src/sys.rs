//! System calls that the library makes on its own account, and what the kernel knows of a socket.

use std::mem::{MaybeUninit, size_of};
use std::time::Duration;

use libc::{c_int, c_long, c_void};

use crate::real::real;

/// Sets `errno`.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: the address of this thread's errno is valid.
    unsafe { *libc::__errno_location() = errno };
}

/// `errno`.
pub(crate) fn errno() -> c_int {
    // SAFETY: the address of this thread's errno is valid.
    unsafe { *libc::__errno_location() }
}

/// Does what leaves `errno` as it was.
pub(crate) fn quietly<R>(work: impl FnOnce() -> R) -> R {
    let before = errno();
    let result = work();
    set_errno(before);
    result
}

/// Nanoseconds of the monotonic clock.
#[inline]
pub(crate) fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel, or the vDSO, fills in one struct.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// An argument of a system call.
pub(crate) trait Argument {
    /// What goes into the register.
    fn word(self) -> usize;
}

macro_rules! arguments {
    ($($ty:ty),*) => {$(
        impl Argument for $ty {
            #[inline(always)]
            fn word(self) -> usize {
                self as usize
            }
        }
    )*};
}
arguments!(i32, u32, i64, u64, usize);

impl<T> Argument for *const T {
    #[inline(always)]
    fn word(self) -> usize {
        self.expose_provenance()
    }
}

impl<T> Argument for *mut T {
    #[inline(always)]
    fn word(self) -> usize {
        self.expose_provenance()
    }
}

/// A system call past every library: this one defines `syscall` too.
///
/// # Safety
///
/// The arguments are what the manual page of the call demands.
#[inline(always)]
pub(crate) unsafe fn raw(number: c_long, args: [usize; 6]) -> c_long {
    let result: c_long;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the calling convention of the kernel; the caller vouches for the arguments.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number, inlateout("x0") args[0] => result,
            in("x1") args[1], in("x2") args[2], in("x3") args[3], in("x4") args[4],
                in("x5") args[5],
            options(nostack)
        );
    }
    if (-4095..0).contains(&result) {
        set_errno(-result as c_int);
        return -1;
    }
    result
}

/// A system call that takes integers and addresses, past every library. `errno` has the error.
macro_rules! call {
    ($number:ident $(, $arg:expr)*) => {{
        #[allow(unused_imports)]
        use $crate::sys::Argument as _;
        let given = [$($arg.word()),*];
        let mut args = [0_usize; 6];
        args[..given.len()].copy_from_slice(&given);
        // SAFETY: the caller of the macro passes what the manual page of the call demands.
        unsafe { $crate::sys::raw(libc::$number, args) }
    }};
}
pub(crate) use call;

/// This thread's number.
pub(crate) fn thread() -> u32 {
    thread_local!(static NUMBER: std::cell::Cell<(u32, u32)> = const { std::cell::Cell::new((0,
        0)) });
    let generation = crate::process::generation();
    NUMBER.with(|known| {
        let (number, of) = known.get();
        if number != 0 && of == generation {
            return number;
        }
        let number = call!(SYS_gettid, 0) as u32;
        known.set((number, generation));
        number
    })
}

/// The processor on which this thread runs.
#[inline]
pub(crate) fn processor() -> i32 {
    // SAFETY: asks for a number.
    unsafe { libc::sched_getcpu() }
}

/// This process's number, as the kernel says now: in a child of vfork(2) it differs from the
/// parent's, whose memory it uses.
pub(crate) fn process() -> u32 {
    call!(SYS_getpid, 0) as u32
}

/// Reads a socket option of fixed size.
pub(crate) fn option<T: Copy>(fd: c_int, level: c_int, name: c_int) -> Option<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    let result = call!(SYS_getsockopt, fd, level, name, value.as_mut_ptr(), &raw mut len);
    // SAFETY: all zeroes, and so much as the kernel has written, is a value of these plain types.
    (result == 0).then(|| unsafe { value.assume_init() })
}

/// Sets a socket option that is a number.
pub(crate) fn set_option(fd: c_int, level: c_int, name: c_int, value: c_int) {
    let len = size_of::<c_int>();
    quietly(|| call!(SYS_setsockopt, fd, level, name, &raw const value, len));
}

/// Whether a descriptor is a TCP socket.
pub(crate) fn is_tcp(fd: c_int) -> bool {
    quietly(|| option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP))
}

/// The number that the kernel gives this socket and no other until it boots again.
pub(crate) fn cookie(fd: c_int) -> Option<u64> {
    option(fd, libc::SOL_SOCKET, libc::SO_COOKIE)
}

/// The first fields of the kernel's `struct tcp_info`, up to those that are used here.
#[derive(Clone, Copy)]
#[repr(C)]
struct TcpInfo {
    state: u8,
    bytes: [u8; 7],
    words: [u32; 24],
    pacing: [u64; 2],
    bytes_acked: u64,
    bytes_received: u64,
}

const _: () = assert!(std::mem::offset_of!(TcpInfo, bytes_acked) == 120);

/// `TCP_ESTABLISHED`
const ESTABLISHED: u8 = 1;

fn queue(fd: c_int, request: libc::Ioctl) -> Option<u64> {
    let mut len: c_int = 0;
    (call!(SYS_ioctl, fd, request, &raw mut len) == 0).then_some(len as u64)
}

/// How many octets the program has sent on an established connection. The SYN of an end that
/// connected counts as one that was acknowledged.
pub(crate) fn sent(fd: c_int, initiator: bool) -> Option<u64> {
    steady(fd, |info| {
        let waiting = queue(fd, libc::TIOCOUTQ)?;
        (info.bytes_acked + waiting).checked_sub(u64::from(initiator))
    })
}

/// How many octets the program has read.
pub(crate) fn received(fd: c_int) -> Option<u64> {
    steady(fd, |info| info.bytes_received.checked_sub(queue(fd, libc::FIONREAD)?))
}

/// What is true of a connection that does not change meanwhile.
fn steady(fd: c_int, work: impl Fn(&TcpInfo) -> Option<u64>) -> Option<u64> {
    quietly(|| {
        for _ in 0..8 {
            let before: TcpInfo = option(fd, libc::IPPROTO_TCP, libc::TCP_INFO)?;
            if before.state != ESTABLISHED {
                return None;
            }
            let result = work(&before)?;
            let after: TcpInfo = option(fd, libc::IPPROTO_TCP, libc::TCP_INFO)?;
            let counts = |info: &TcpInfo| (info.bytes_acked, info.bytes_received);
            if counts(&before) == counts(&after) {
                return Some(result);
            }
        }
        None
    })
}

/// Whether the kernel says that the peer has closed, or that the connection has failed.
pub(crate) fn is_ending(fd: c_int) -> bool {
    let mut entry = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
    let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    quietly(|| call!(SYS_ppoll, &raw mut entry, 1, &raw const zero, 0, 8) != 0)
}

/// Whether a read of the kernel's socket would return at once.
pub(crate) fn is_readable(fd: c_int) -> bool {
    let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    quietly(|| call!(SYS_ppoll, &raw mut entry, 1, &raw const zero, 0, 8) != 0)
}

/// Waits until poll(2) reports one of `events`, or an error, for a descriptor. Whether it does within the
/// time; none if a signal came.
pub(crate) fn wait_for(fd: c_int, events: libc::c_short, time: Duration) -> Option<bool> {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    let time = libc::timespec {
        tv_sec: time.as_secs() as libc::time_t,
        tv_nsec: time.subsec_nanos() as c_long,
    };
    let count = call!(SYS_ppoll, &raw mut entry, 1, &raw const time, 0, 8);
    (count >= 0).then_some(count > 0)
}

/// The same in a call of the program in which its thread may be cancelled: then it ends here. The caller has
/// nothing to drop.
pub(crate) fn wait_in_call(fd: c_int, events: libc::c_short, time: Duration) -> Option<bool> {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    let time = time.as_millis() as c_int;
    let count = real!(poll(&raw mut entry => *mut libc::pollfd, 1 => libc::nfds_t,
        time => c_int) -> c_int);
    (count >= 0).then_some(count > 0)
}

/// When a send that begins now is to end at the latest, by its `SO_SNDTIMEO`. None without a limit.
pub(crate) fn send_limit(fd: c_int) -> Option<u64> {
    let time: libc::timeval = quietly(|| option(fd, libc::SOL_SOCKET, libc::SO_SNDTIMEO))?;
    let length = time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1000;
    (length > 0).then(|| now_ns() + length)
}

/// Sends octets without waiting. An error number if none are taken.
pub(crate) fn send_now(fd: c_int, pieces: &[libc::iovec]) -> Result<usize, c_int> {
    // SAFETY: all zeroes is a message without an address and without anything else.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    quietly(|| match call!(SYS_sendmsg, fd, &raw const message, flags) {
        sent @ 1.. => Ok(sent as usize),
        0 => Err(libc::EAGAIN),
        _ => Err(errno()),
    })
}

/// Reads a file at an offset. None at its end, or for an error.
pub(crate) fn read_at(fd: c_int, pieces: &[libc::iovec], offset: i64) -> Option<usize> {
    let read = quietly(|| call!(SYS_preadv, fd, pieces.as_ptr(), pieces.len(), offset, 0));
    usize::try_from(read).ok().filter(|read| *read > 0)
}

/// Receives octets without waiting: 0 at the end of the stream. None if there are none, or for an error.
pub(crate) fn receive_now(fd: c_int, pieces: &[libc::iovec], flags: c_int) -> Option<usize> {
    // SAFETY: all zeroes is a message without an address and without anything else.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len() as _;
    let received = quietly(|| call!(SYS_recvmsg, fd, &raw mut message, flags));
    usize::try_from(received).ok()
}

/// Sleeps while a word has a value, for so long at most; without a limit if that is `None`.
pub(crate) fn futex_wait(word: *const u32, value: u32, time: Option<Duration>) {
    let time = time.map(|time| libc::timespec {
        tv_sec: time.as_secs() as libc::time_t,
        tv_nsec: time.subsec_nanos() as c_long,
    });
    let time = time.as_ref().map_or(std::ptr::null(), |time| &raw const *time);
    let wait = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    call!(SYS_futex, word, wait, value, time, 0, 0);
}

/// Wakes every thread that sleeps at a word.
pub(crate) fn futex_wake(word: *const u32) {
    let wake = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    quietly(|| call!(SYS_futex, word, wake, c_int::MAX, 0, 0, 0));
}

/// All signals are blocked while it lives.
pub(crate) struct NoSignals(libc::sigset_t);

impl NoSignals {
    pub(crate) fn new() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::zeroed());
        // SAFETY: fills in a set, which is then read; the old mask is written.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Self(before.assume_init())
        }
    }
}

impl Drop for NoSignals {
    fn drop(&mut self) {
        // SAFETY: the mask that was there before.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
        };
    }
}

/// Maps memory that is shared: of a file, or with children of this process.
pub(crate) fn map_shared(len: usize, file: Option<c_int>) -> Option<*mut u8> {
    let anonymous = if file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
    let flags = libc::MAP_SHARED | anonymous;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, file.unwrap_or(-1), 0) };
    (at != libc::MAP_FAILED).then_some(at.cast())
}

/// Has shared memory become zeros that take no memory.
pub(crate) fn forget(at: *mut u8, len: usize) {
    quietly(|| call!(SYS_madvise, at, len, libc::MADV_REMOVE));
}

/// Removes a mapping that nobody uses any more.
pub(crate) fn unmap(at: *mut u8, len: usize) {
    // SAFETY: the caller's mapping, of this length.
    unsafe { libc::munmap(at.cast::<c_void>(), len) };
}
