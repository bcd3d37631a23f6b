//! Raw copies into shared memory, in an order that a program may poll on.

use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// Copies up to this many bytes are made of single word stores.
const SMALL: usize = 64;
/// Bytes that are copied at once where the library's copy would be slow.
const LINE: usize = 64;
/// Below this length the library's copy is never slow enough to matter.
const LONG: usize = 1024;
const PAGE: usize = 4096;

/// Has the processor fetch the cache line at an address before it is needed; with `write`, in order to write
/// to it. Nothing but a hint: no page is touched, and where there is no memory nothing happens.
#[inline(always)]
pub(crate) fn prefetch(addr: usize, write: bool) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the instructions change nothing that a program could see, whatever the address. Processors
    // without PREFETCHW do nothing.
    unsafe {
        use core::arch::asm;
        match write {
            true => asm!("prefetchw [{}]", in(reg) addr, options(nostack, preserves_flags)),
            false => asm!("prefetcht0 [{}]", in(reg) addr, options(nostack, preserves_flags)),
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (addr, write);
}

/// Has the processor fetch the cache lines of a value that is needed soon. A hint, which changes nothing.
#[inline]
pub fn prefetch_value<T: ?Sized>(value: &T) {
    const LINE: usize = 64;
    let first = std::ptr::from_ref(value).cast::<u8>().addr();
    for addr in (first & !(LINE - 1)..first + size_of_val(value)).step_by(LINE) {
        prefetch(addr, false);
    }
}

/// Copies `len` bytes from `src` to shared memory at `dst`; the ranges do not overlap.
///
/// The last aligned word that the copy touches is stored after everything else, in one store, and
/// copies of up to 64 bytes are stored in ascending order with one store for each aligned 8-byte
/// word: programs such as ib_write_lat spin on the last byte of a buffer.
///
/// # Safety
///
/// `src` is valid for reads and `dst` for writes of `len` bytes, and they do not overlap. Others
/// may read or write either range meanwhile: then the bytes are a mix of old and new.
#[inline]
pub(crate) unsafe fn store(src: *const u8, dst: *mut u8, len: usize) {
    if is_word(dst, len) {
        // SAFETY: the caller's promise, for 8 bytes and an aligned `dst`.
        unsafe { store_word(src, dst) }
    } else {
        // SAFETY: the caller's promise.
        unsafe { store_any(src, dst, len) }
    }
}

/// As [`store`], whatever the length: out of line, so that the copy of a word is not.
///
/// # Safety
///
/// As [`store`].
#[inline(never)]
unsafe fn store_any(src: *const u8, dst: *mut u8, len: usize) {
    if len <= SMALL {
        // SAFETY: the caller's promise is the one that `store_words` asks for.
        unsafe { store_words(src, dst, len) }
    } else {
        // SAFETY: the caller's promise is the one that `store_large` asks for.
        unsafe { store_large(src, dst, len) }
    }
}

/// Whether a copy is one store of one word, as that of a counter or a short message is.
#[inline]
fn is_word(dst: *const u8, len: usize) -> bool {
    len == 8 && dst.addr() & 7 == 0
}

/// Copies 8 bytes.
///
/// # Safety
///
/// As [`store_overlapping`] for 8 bytes; `dst` is aligned to 8.
#[inline]
unsafe fn store_word(src: *const u8, dst: *mut u8) {
    // SAFETY: the caller's promise. Under Miri it is a plain store, as in `store_words`.
    unsafe {
        let word = src.cast::<u64>().read_unaligned();
        if cfg!(miri) {
            dst.cast::<u64>().write(word);
        } else {
            AtomicU64::from_ptr(dst.cast()).store(word, Ordering::Release);
        }
    }
}

/// As [`store`], for ranges that may overlap (two regions of one program may share memory).
///
/// # Safety
///
/// As [`store`], except for the overlap.
#[inline]
pub(crate) unsafe fn store_overlapping(src: *const u8, dst: *mut u8, len: usize) {
    if is_word(dst, len) {
        // SAFETY: the caller's promise, for 8 bytes and an aligned `dst`; all are read before any is stored.
        unsafe { store_word(src, dst) }
    } else {
        // SAFETY: the caller's promise.
        unsafe { store_any_overlapping(src, dst, len) }
    }
}

/// As [`store_overlapping`], whatever the length: out of line, so that the copy of a word is not.
///
/// # Safety
///
/// As [`store_overlapping`].
#[inline(never)]
unsafe fn store_any_overlapping(src: *const u8, dst: *mut u8, len: usize) {
    if len > SMALL {
        // SAFETY: the caller's promise; `store_large` is right for overlapping ranges too.
        unsafe { store_large(src, dst, len) }
    } else if src.addr().abs_diff(dst.addr()) >= len {
        // SAFETY: the ranges are `len` or more apart, so they do not overlap.
        unsafe { store_words(src, dst, len) }
    } else {
        // SAFETY: the caller's promise, and `len <= SMALL`.
        unsafe { store_staged(src, dst, len) }
    }
}

/// As [`store_overlapping`], in any order: for bytes that nobody looks at before he is told of them. What is
/// short is a few large pieces, wherever the target is, some of which may have bytes in common.
///
/// # Safety
///
/// As [`store_overlapping`].
#[inline(always)]
pub(crate) unsafe fn store_unordered(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise: all pieces lie within the `len` bytes.
    unsafe {
        match len {
            8 => store_pieces::<u64, 1>(src, dst, [0]),
            9..16 => store_pieces::<u64, 2>(src, dst, [0, len - 8]),
            16 => store_pieces::<u128, 1>(src, dst, [0]),
            17..=32 => store_pieces::<u128, 2>(src, dst, [0, len - 16]),
            _ => store_longer_unordered(src, dst, len),
        }
    }
}

/// The rest of [`store_unordered`], out of line.
///
/// # Safety
///
/// As [`store_overlapping`].
#[inline(never)]
unsafe fn store_longer_unordered(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise: all pieces lie within the `len` bytes.
    unsafe {
        match len {
            33..=64 => store_pieces::<u128, 4>(src, dst, [0, 16, len - 32, len - 16]),
            65..=96 => {
                let places = [0, 16, 32, len - 48, len - 32, len - 16];
                store_pieces::<u128, 6>(src, dst, places);
            }
            _ => store_overlapping(src, dst, len),
        }
    }
}

/// Copies the pieces at `places`, all of which are read before any is stored.
///
/// # Safety
///
/// As [`store_overlapping`], for each of them.
#[inline(always)]
unsafe fn store_pieces<T: Copy, const N: usize>(src: *const u8, dst: *mut u8, places: [usize; N]) {
    // SAFETY: the caller's promise.
    unsafe {
        let pieces = places.map(|at| src.add(at).cast::<T>().read_unaligned());
        for (at, piece) in places.into_iter().zip(pieces) {
            dst.add(at).cast::<T>().write_unaligned(piece);
        }
    }
}

/// As [`store_overlapping`], by way of a copy.
///
/// # Safety
///
/// As there, with at most [`SMALL`] bytes.
#[cold]
unsafe fn store_staged(src: *const u8, dst: *mut u8, len: usize) {
    let mut staged = [0u8; SMALL];
    // SAFETY: `src` is valid for `len <= SMALL` bytes; `staged` is private and as long.
    unsafe {
        src.copy_to_nonoverlapping(staged.as_mut_ptr(), len);
        store_words(staged.as_ptr(), dst, len);
    }
}

/// Copies `len` bytes from shared memory at `src` to private memory at `dst`.
///
/// # Safety
///
/// `src` is valid for reads of `len` bytes, `dst` for writes, and nobody else uses `dst`. Others
/// may write `src` meanwhile: then the bytes are a mix of old and new.
#[inline]
pub(crate) unsafe fn load(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise; exclusive `dst` cannot overlap `src`.
    unsafe {
        if is_slow(src, dst, len) {
            copy_lines(src, dst, len)
        } else {
            src.copy_to_nonoverlapping(dst, len)
        }
    }
}

/// Whether the C library's copy, which copies much with the processor's string instruction, would be
/// slow, for ranges that do not overlap. On AMD processors (measured on Zen 3) that instruction takes fifteen
/// times as long where the target is 1 to 31 bytes further into its page than the source. A header in front
/// of a payload makes just such distances.
#[inline]
fn is_slow(src: *const u8, dst: *const u8, len: usize) -> bool {
    let further = dst.addr().wrapping_sub(src.addr()) % PAGE;
    len >= LONG && (1..32).contains(&further) && src.addr().abs_diff(dst.addr()) >= len
}

/// Copies a line after the other: slower than the library's copy at its best, and never much slower.
///
/// # Safety
///
/// As [`load`].
// Inlined, the compiler would know that the ranges do not overlap, and call the library.
#[inline(never)]
unsafe fn copy_lines(src: *const u8, dst: *mut u8, len: usize) {
    let mut done = 0;
    // SAFETY: the caller's promise, as neither part reaches beyond `len` bytes.
    unsafe {
        while len - done >= LINE {
            let line = src.add(done).cast::<[u8; LINE]>().read_unaligned();
            dst.add(done).cast::<[u8; LINE]>().write_unaligned(line);
            done += LINE;
        }
        src.add(done).copy_to_nonoverlapping(dst.add(done), len - done);
    }
}

/// Stores ascending, each piece naturally aligned, each in one store.
///
/// # Safety
///
/// As [`store`].
unsafe fn store_words(mut src: *const u8, mut dst: *mut u8, mut len: usize) {
    macro_rules! piece {
        ($word:ty, $atomic:ty) => {{
            // SAFETY: at least size_of::<$word>() bytes are left, and `dst` is aligned to that
            // size wherever this is used. Release keeps the stores in ascending order.
            unsafe {
                let word = src.cast::<$word>().read_unaligned();
                if cfg!(miri) {
                    // Miri stops at atomic stores of mixed sizes to one place; to it these bytes
                    // are plain data, which the rings' tags order.
                    dst.cast::<$word>().write(word);
                } else {
                    <$atomic>::from_ptr(dst.cast()).store(word, Ordering::Release);
                }
                src = src.add(size_of::<$word>());
                dst = dst.add(size_of::<$word>());
            }
            len -= size_of::<$word>();
        }};
    }
    let misaligned = dst.addr() & 7;
    if misaligned != 0 {
        if len >= 1 && dst.addr() & 1 != 0 {
            piece!(u8, AtomicU8);
        }
        if len >= 2 && dst.addr() & 2 != 0 {
            piece!(u16, AtomicU16);
        }
        if len >= 4 && dst.addr() & 4 != 0 {
            piece!(u32, AtomicU32);
        }
    }
    while len >= 8 {
        piece!(u64, AtomicU64);
    }
    if len >= 4 {
        piece!(u32, AtomicU32);
    }
    if len >= 2 {
        piece!(u16, AtomicU16);
    }
    if len >= 1 {
        piece!(u8, AtomicU8);
    }
    let _ = (src, dst, len);
}

/// Moves all but the last aligned word, then stores that word.
///
/// # Safety
///
/// As [`store_overlapping`], with `len > 8`.
unsafe fn store_large(src: *const u8, dst: *mut u8, len: usize) {
    let tail_len = ((dst.addr() + len - 1) & 7) + 1;
    let bulk = len - tail_len;
    let mut tail = [0u8; 8];
    // SAFETY: `tail_len` is 1 to 8 and `len` more than 8, so both parts lie within the ranges. The
    // tail is read first, as the move may overwrite it where the ranges overlap, which those that
    // `is_slow` names do not. The move may store in any order; the fence puts the tail after it.
    unsafe {
        src.add(bulk).copy_to_nonoverlapping(tail.as_mut_ptr(), tail_len);
        if is_slow(src, dst, bulk) {
            copy_lines(src, dst, bulk);
        } else {
            src.copy_to(dst, bulk);
        }
        fence(Ordering::Release);
        store_words(tail.as_ptr(), dst.add(bulk), tail_len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_copies_exactly_the_range() {
        let src: Vec<u8> = (0..200u32).map(|i| (i * 7 + 1) as u8).collect();
        #[repr(align(8))]
        struct Aligned([u8; 256]);
        let step = if cfg!(miri) { 13 } else { 1 };
        for len in (0..80).step_by(step).chain([127, 128, 129, 150]) {
            for from in [0, 1, 3, 8] {
                for to in 0..9 {
                    let mut dst = Aligned([0; 256]);
                    // SAFETY: both ranges lie inside their arrays, which are distinct.
                    unsafe { store(src[from..].as_ptr(), dst.0.as_mut_ptr().add(16 + to), len) };
                    assert_eq!(dst.0[16 + to..][..len], src[from..][..len]);
                    assert!(dst.0[..16 + to].iter().all(|b| *b == 0));
                    assert!(dst.0[16 + to + len..].iter().all(|b| *b == 0));
                }
            }
        }
    }

    #[test]
    fn overlapping_ranges_copy_as_memmove() {
        for len in [1usize, 5, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 97, 100] {
            for (from, to) in
                [(20usize, 20usize), (20, 21), (21, 20), (20, 24), (28, 24), (30, 20), (20, 84)]
            {
                let before: Vec<u8> = (0..=255).collect();
                let mut want = before.clone();
                want.copy_within(from..from + len, to);
                for copy in [store_overlapping, store_unordered] {
                    let mut bytes = before.clone();
                    let base = bytes.as_mut_ptr();
                    // SAFETY: both ranges lie inside `bytes`.
                    unsafe { copy(base.add(from), base.add(to), len) };
                    assert_eq!(bytes, want, "{from} -> {to}, {len}");
                }
            }
        }
    }
    /// Distances within a page around those at which lines are copied, lengths around those from which on.
    #[test]
    fn long_copies_are_right_at_every_distance_within_a_page() {
        let bytes: Vec<u8> = (0..3 * PAGE).map(|i| (i * 31 % 251) as u8).collect();
        let from = bytes.as_ptr().align_offset(PAGE);
        for distance in [0, 1, 16, 20, 31, 32, PAGE - 1] {
            for len in [LONG - 1, LONG, LONG + 1, LONG + 9, 2 * LONG + LINE - 1] {
                let mut out = vec![0u8; 3 * PAGE];
                let to = out.as_ptr().align_offset(PAGE) + distance;
                for stored in [true, false] {
                    out.fill(0);
                    let (src, dst) = (bytes[from..].as_ptr(), out[to..].as_mut_ptr());
                    // SAFETY: both ranges lie inside their vectors, which are distinct.
                    unsafe { if stored { store(src, dst, len) } else { load(src, dst, len) } }
                    assert_eq!(out[to..to + len], bytes[from..from + len], "{distance}, {len}");
                    assert!(out[..to].iter().chain(&out[to + len..]).all(|b| *b == 0));
                }
            }
        }
    }

    #[test]
    fn long_ranges_that_overlap_move_at_every_distance() {
        for (from, to) in [(0, 20), (20, 0), (0, PAGE + 20), (PAGE + 20, 0)] {
            let len = if from.max(to) > PAGE { PAGE + 100 } else { 2 * LONG };
            let mut bytes: Vec<u8> = (0..3 * PAGE).map(|i| (i * 31 % 251) as u8).collect();
            let want = bytes[from..from + len].to_vec();
            let base = bytes.as_mut_ptr();
            // SAFETY: both ranges lie inside `bytes`.
            unsafe { store_overlapping(base.add(from), base.add(to), len) };
            assert_eq!(bytes[to..to + len], want, "{from} -> {to}");
        }
    }
}
