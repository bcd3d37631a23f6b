//! The program's buffers: a list of pieces, and how far it has been used.

use libc::{c_void, iovec};

use crate::copy::copy;

/// Most pieces that a call takes (`IOV_MAX`).
pub(crate) const MAX: usize = 1024;

/// A place in a list of buffers.
#[derive(Clone)]
pub(crate) struct Cursor<'a> {
    pieces: &'a [iovec],
    /// Octets of the first piece that are used.
    used: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(pieces: &'a [iovec]) -> Self {
        Self { pieces, used: 0 }
    }

    /// Octets that are left. None where they are more than a call may take, which the kernel is to say.
    pub(crate) fn len(&self) -> Option<usize> {
        let sum = self.pieces.iter().try_fold(0_usize, |sum, piece| sum.checked_add(piece.iov_len));
        sum.filter(|sum| *sum <= isize::MAX as usize).map(|sum| sum - self.used)
    }

    /// Calls a function for the address and length of each part of the next `len` octets.
    fn advance(&mut self, mut len: usize, mut each: impl FnMut(*mut u8, usize)) {
        while let Some((first, rest)) = self.pieces.split_first() {
            let part = len.min(first.iov_len - self.used);
            if part > 0 {
                each(first.iov_base.cast::<u8>().wrapping_add(self.used), part);
            }
            self.used += part;
            len -= part;
            if self.used < first.iov_len {
                return;
            }
            (self.pieces, self.used) = (rest, 0);
            if len == 0 {
                return;
            }
        }
    }

    /// Passes over octets.
    pub(crate) fn skip(&mut self, len: usize) {
        self.advance(len, |_, _| {});
    }

    /// Copies the next `len` octets from the program to `to`.
    ///
    /// # Safety
    ///
    /// `to` is valid for writes of `len` octets. The pieces are the program's, which vouches for them.
    pub(crate) unsafe fn copy_out(&mut self, mut to: *mut u8, len: usize) {
        // SAFETY: see above; the peer and the program may change either side, so no references are made.
        self.advance(len, |at, part| unsafe {
            copy(at.cast_const(), to, part);
            to = to.add(part);
        });
    }

    /// Copies octets from `from` to the next `len` octets of the program.
    ///
    /// # Safety
    ///
    /// `from` is valid for reads of `len` octets. The pieces are the program's, which vouches for them.
    pub(crate) unsafe fn copy_in(&mut self, mut from: *const u8, len: usize) {
        // SAFETY: as in `copy_out`.
        self.advance(len, |at, part| unsafe {
            copy(from, at, part);
            from = from.add(part);
        });
    }

    /// The pieces that are left, in a list that has room for them: as many as fit, and as many octets as
    /// `most`. The second number is that of their octets.
    pub(crate) fn rest<'b>(&self, list: &'b mut [iovec], most: usize) -> (&'b [iovec], usize) {
        let (mut count, mut total) = (0, 0);
        for (place, piece) in list.iter_mut().zip(self.pieces) {
            let used = if count == 0 { self.used } else { 0 };
            let len = (piece.iov_len - used).min(most - total);
            let at = piece.iov_base.cast::<u8>().wrapping_add(used);
            *place = iovec { iov_base: at.cast::<c_void>(), iov_len: len };
            (count, total) = (count + 1, total + len);
            if total == most {
                break;
            }
        }
        (&list[..count], total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_has_as_many_pieces_and_octets_as_are_wanted() {
        let octets = [0_u8; 100];
        let piece = |at: usize, len| iovec {
            iov_base: octets[at..].as_ptr().cast_mut().cast(),
            iov_len: len,
        };
        let pieces = [piece(0, 10), piece(10, 0), piece(20, 30), piece(60, 40)];
        let mut cursor = Cursor::new(&pieces);
        cursor.skip(4);
        let rest = |room: usize, most: usize| {
            let mut list = [piece(0, 0); 4];
            let (rest, total) = cursor.rest(&mut list[..room], most);
            let offset = |piece: &iovec| piece.iov_base.addr() - octets.as_ptr().addr();
            (rest.iter().map(|piece| (offset(piece), piece.iov_len)).collect::<Vec<_>>(), total)
        };
        assert_eq!(rest(4, usize::MAX), (vec![(4, 6), (10, 0), (20, 30), (60, 40)], 76));
        assert_eq!(rest(3, usize::MAX), (vec![(4, 6), (10, 0), (20, 30)], 36));
        assert_eq!(rest(4, 6), (vec![(4, 6)], 6));
        assert_eq!(rest(4, 17), (vec![(4, 6), (10, 0), (20, 11)], 17));
        cursor.skip(76);
        assert!(cursor.rest(&mut [piece(0, 0)], 9).0.is_empty());
    }
}
