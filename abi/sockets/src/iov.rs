//! The program's buffers: a list of pieces, and how far it has been used.

use libc::{c_void, iovec};

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
            std::ptr::copy_nonoverlapping(at.cast_const(), to, part);
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
            std::ptr::copy_nonoverlapping(from, at, part);
            from = from.add(part);
        });
    }

    /// The pieces that are left, in a list that has room for them. As many as fit.
    pub(crate) fn rest<'b>(&self, list: &'b mut [iovec]) -> &'b [iovec] {
        let count = self.pieces.len().min(list.len());
        list[..count].copy_from_slice(&self.pieces[..count]);
        if let Some(first) = list[..count].first_mut() {
            first.iov_base = first.iov_base.cast::<u8>().wrapping_add(self.used).cast::<c_void>();
            first.iov_len -= self.used;
        }
        &list[..count]
    }
}
