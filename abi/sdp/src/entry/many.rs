//! Calls that move several messages, and calls that the C library or the kernel moves octets by.

use libc::{c_char, c_int, c_uint, mmsghdr, ssize_t, timespec};

use super::data::{recvmsg, sendmsg};
use super::process::serve;
use crate::table::{self, Entry};
use crate::{fork, real};
use quipu_cabi::Void;

/// Calls `one` for each message until one fails; how many did not, or -1 if the first did.
///
/// # Safety
///
/// The list has `count` entries.
unsafe fn each(
    list: *mut mmsghdr,
    count: c_uint,
    mut one: impl FnMut(&mut mmsghdr, c_int) -> ssize_t,
) -> c_int {
    for index in 0..count.min(1024) as c_int {
        // SAFETY: passed on from the caller.
        let entry = unsafe { &mut *list.add(index as usize) };
        match one(entry, index) {
            ..0 if index == 0 => return -1,
            ..0 => return index,
            len => entry.msg_len = len as c_uint,
        }
    }
    count.min(1024) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendmmsg(
    fd: c_int,
    list: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    claim(fd);
    if table::socket(fd).is_none() || list.is_null() {
        // SAFETY: as the program called this.
        return unsafe { real::sendmmsg(fd, list, count, flags) };
    }
    // SAFETY: the program passes a list of that length.
    unsafe { each(list, count, |entry, _| sendmsg(fd, &raw const entry.msg_hdr, flags)) }
}

/// The limit is looked at by the kernel only: here each message waits as recvmsg(2) does.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    list: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    limit: *mut timespec,
) -> c_int {
    claim(fd);
    if table::socket(fd).is_none() || list.is_null() {
        // SAFETY: as the program called this.
        return unsafe { real::recvmmsg(fd, list, count, flags, limit) };
    }
    let waits_for_one = flags & libc::MSG_WAITFORONE != 0;
    let one = |entry: &mut mmsghdr, index: c_int| {
        let impatient = if index > 0 && waits_for_one { libc::MSG_DONTWAIT } else { 0 };
        let flags = flags & !libc::MSG_WAITFORONE | impatient;
        // SAFETY: the entry of the program's list.
        unsafe { recvmsg(fd, &raw mut entry.msg_hdr, flags) }
    };
    // SAFETY: the program passes a list of that length.
    unsafe { each(list, count, one) }
}

/// The kernel, or the C library, is about to move octets of a descriptor by itself.
pub(super) fn hand_over(fd: c_int) {
    if matches!(table::get(fd), Some(Entry::Sdp(_) | Entry::Lost(_))) {
        serve::<Void>("relay", || {
            fork::relay(fd);
            Ok(())
        });
    }
}

/// A child is about to use a descriptor of its parent's.
pub(super) fn claim(fd: c_int) {
    if matches!(table::get(fd), Some(Entry::Lost(_))) {
        hand_over(fd);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_at: *mut i64,
    to: c_int,
    to_at: *mut i64,
    len: usize,
    flags: c_uint,
) -> ssize_t {
    hand_over(from);
    hand_over(to);
    // SAFETY: as the program called this.
    unsafe { real::splice(from, from_at, to, to_at, len, flags) }
}

/// The result is a pointer.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> isize {
    hand_over(fd);
    // SAFETY: as the program called this.
    unsafe { real::fdopen(fd, mode) }
}
