//! Calls that move several messages.

use libc::{c_int, c_uint, mmsghdr, ssize_t, timespec};

use super::data::{recvmsg, sendmsg};
use super::files::{claim, hand_over};
use crate::{real, table};
use quipu_cabi::for_passed_descriptors;

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
        for index in 0..if list.is_null() { 0 } else { count as usize } {
            // SAFETY: the program passes a list of that length.
            unsafe { for_passed_descriptors(&raw const (*list.add(index)).msg_hdr, hand_over) };
        }
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
