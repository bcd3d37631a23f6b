//! Copying octets between the program and a ring.

/// What processors compare of two addresses before they know more.
const PAGE: usize = 4096;
/// Distances in a page, from the source to the target, at which `rep movsb` is slow: see [`copy`].
const SLOW: usize = 64;
/// Most octets that memcpy(3) of the GNU C library copies without `rep movsb`, rounded down.
const PART: usize = 1024;

/// Copies `len` octets.
///
/// memcpy(3) uses `rep movsb` for long copies. Processors of AMD with fast short ones (Zen 3 and 4) do that
/// twenty times slower where the target lies up to 31 octets further in its page than the source in its own.
/// A ring begins with a page, and a long buffer of malloc(3) 16 octets after the beginning of one. Such
/// copies are made in parts, for which memcpy(3) uses vectors.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `len` octets, and they do not overlap.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    if len <= PART || !is_slow(from.addr(), to.addr()) {
        // SAFETY: passed on from the caller.
        return unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
    let mut at = 0;
    while at < len {
        let part = PART.min(len - at);
        // SAFETY: a part of what the caller vouches for.
        unsafe { std::ptr::copy_nonoverlapping(from.add(at), to.add(at), part) };
        at += part;
    }
}

fn is_slow(from: usize, to: usize) -> bool {
    (1..SLOW).contains(&(to.wrapping_sub(from) % PAGE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_any_length_and_distance_are_whole() {
        let source: Vec<u8> = (0..3 * PAGE).map(|at| (at % 251) as u8).collect();
        for len in [0, 1, PART - 1, PART, PART + 1, 2 * PART, 2 * PART + 7, 2 * PAGE] {
            for distance in [0, 1, 16, 31, 32, 63, 64, 100, PAGE - 1] {
                let mut target = vec![0; 4 * PAGE];
                let start =
                    (source.as_ptr().addr() + distance).wrapping_sub(target.as_ptr().addr());
                let start = start % PAGE;
                // SAFETY: both vectors are long enough.
                unsafe { copy(source.as_ptr(), target.as_mut_ptr().add(start), len) };
                assert_eq!(target[start..start + len], source[..len], "{len} {distance}");
                assert!(target[start + len..].iter().all(|octet| *octet == 0), "{len} {distance}");
            }
        }
    }

    #[test]
    fn only_targets_a_little_further_in_their_page_are_slow() {
        let page = 7 * PAGE;
        assert!(
            is_slow(page, page + 16) && is_slow(page + 4095, 9 * PAGE) && is_slow(100, page + 131)
        );
        assert!(!is_slow(page, page) && !is_slow(page + 16, page) && !is_slow(page, page + 64));
    }
}
