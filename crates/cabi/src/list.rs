//! Arrays of a program.

use std::borrow::Cow;
use std::slice;

/// Elements of the longest scatter/gather list that is read: far more than a work request may have.
/// A program that gives a larger number has given a wrong one.
pub const MAX_ELEMENTS: usize = 1024;

/// An array of a program, copied if it is not where a slice may be: some programs keep their lists in packed
/// structures, which the libraries of hardware read wherever they are.
///
/// # Safety
///
/// `list` is valid for reads of `count` elements, aligned or not, which nobody changes while the result is
/// used; with no elements it may be anything.
#[inline]
pub unsafe fn list<'a, T: Copy>(list: *const T, count: usize) -> Cow<'a, [T]> {
    if count == 0 {
        Cow::Borrowed(&[])
    } else if list.is_aligned() {
        // SAFETY: "valid for reads of count elements, which nobody changes", and aligned.
        Cow::Borrowed(unsafe { slice::from_raw_parts(list, count) })
    } else {
        // SAFETY: passed on from the caller.
        Cow::Owned(unsafe { copied(list, count) })
    }
}

/// # Safety
///
/// As [`list`].
#[cold]
unsafe fn copied<T: Copy>(list: *const T, count: usize) -> Vec<T> {
    // SAFETY: each is one of the elements, which need not be aligned.
    (0..count).map(|at| unsafe { list.add(at).read_unaligned() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_where_it_is_or_copied() {
        let bytes: Vec<u8> = (0..32).collect();
        for shift in 0..8 {
            let at = bytes[shift..].as_ptr().cast::<u64>();
            // SAFETY: three elements, of 24 octets, lie within the 32 less the shift.
            let read = unsafe { list(at, 3) };
            let first = u64::from_ne_bytes(bytes[shift..shift + 8].try_into().unwrap());
            assert_eq!((read[0], read.len()), (first, 3));
            assert_eq!(matches!(read, Cow::Borrowed(_)), at.is_aligned());
        }
        // SAFETY: no element.
        assert!(unsafe { list(std::ptr::null::<u64>(), 0) }.is_empty());
    }
}
