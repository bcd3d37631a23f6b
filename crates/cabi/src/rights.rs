//! Descriptors that one process sends to another.

use libc::{c_int, msghdr};

/// Calls `each` for the descriptors that a message carries (SCM_RIGHTS of unix(7)).
///
/// # Safety
///
/// The message is null, or one that sendmsg(2) takes.
pub unsafe fn for_passed_descriptors(message: *const msghdr, mut each: impl FnMut(c_int)) {
    // SAFETY: passed on from the caller.
    let Some(header) = (unsafe { message.as_ref() }) else { return };
    if header.msg_control.is_null() || header.msg_controllen == 0 {
        return;
    }
    // SAFETY: the macros of cmsg(3) walk the control data of a message, within its length.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = at.as_ref() {
            if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let data = libc::CMSG_DATA(at);
                let end = header.msg_control.addr().saturating_add(header.msg_controllen);
                let len = control.cmsg_len.min(end.saturating_sub(at.addr()));
                let len = len.saturating_sub(data.addr() - at.addr());
                for index in 0..len / size_of::<c_int>() {
                    each(data.cast::<c_int>().add(index).read_unaligned());
                }
            }
            at = libc::CMSG_NXTHDR(message, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(control: &mut [u64], len: usize) -> Vec<c_int> {
        // SAFETY: all zeroes is a message of this plain type.
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = len as _;
        let mut found = Vec::new();
        // SAFETY: a live message.
        unsafe { for_passed_descriptors(&raw const message, |fd| found.push(fd)) };
        found
    }

    #[test]
    fn all_descriptors_of_a_message_are_found_and_none_beyond_it() {
        let kind = (libc::SCM_RIGHTS as u64) << 32 | libc::SOL_SOCKET as u64;
        // The length of the head and three descriptors.
        let mut control = [28, kind, 5 << 32 | 4, 6, 20, kind, 7];
        assert_eq!(passed(&mut control, 52), [4, 5, 6, 7]);
        assert_eq!(passed(&mut control, 24), [4, 5]);
        assert_eq!(passed(&mut control, 0), []);
        control[1] = (libc::SCM_CREDENTIALS as u64) << 32 | libc::SOL_SOCKET as u64;
        assert_eq!(passed(&mut control, 52), [7]);
        // SAFETY: null is allowed.
        unsafe { for_passed_descriptors(std::ptr::null(), |_| panic!("there is none")) };
    }
}
