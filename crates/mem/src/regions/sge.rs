//! Scatter/gather lists.

use super::Regions;
use crate::access::AccessError;
use crate::copy;
use crate::key::Key;
use crate::span::Span;

/// A scatter/gather element, laid out as `ibv_sge`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Sge {
    /// Address of the first byte, as the region's iova counts.
    pub addr: u64,
    /// Bytes; zero means none.
    pub len: u32,
    /// The lkey of a region.
    pub lkey: Key,
}

impl Sge {
    /// Has the processor fetch where the element begins, in order to write there soon. A hint, which goes
    /// astray where a region does not count by its addresses, and never does harm.
    #[inline(always)]
    pub fn prefetch(&self) {
        copy::prefetch(self.addr as usize, true);
    }
}

/// The bytes in a list.
pub fn list_len(list: &[Sge]) -> u64 {
    list.iter().map(|sge| u64::from(sge.len)).sum()
}

/// The checked pieces of a byte range of a scatter/gather list; made by [`Regions::pieces`].
///
/// Each element is checked, only as far as it is used, when its piece is asked for. After an error
/// there are no more pieces.
#[derive(Clone, Debug)]
pub struct Pieces<'a, 'l> {
    regions: &'a Regions,
    pd: u32,
    list: &'l [Sge],
    skip: u64,
    left: u64,
    need_write: bool,
}

impl<'a> Iterator for Pieces<'a, '_> {
    type Item = Result<Span<'a>, AccessError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        // The end of a list, most often after one piece, costs no call.
        if self.left == 0 { None } else { self.find() }
    }
}

impl<'a> Pieces<'a, '_> {
    /// The next piece, of which there is one unless the list is too short.
    fn find(&mut self) -> Option<Result<Span<'a>, AccessError>> {
        while self.left > 0 {
            let Some((sge, rest)) = self.list.split_first() else {
                self.left = 0;
                return Some(Err(AccessError::BeyondList));
            };
            self.list = rest;
            let len = u64::from(sge.len);
            if self.skip >= len {
                self.skip -= len;
                continue;
            }
            let take = (len - self.skip).min(self.left);
            let Some(addr) = sge.addr.checked_add(self.skip) else {
                self.left = 0;
                return Some(Err(AccessError::OutOfBounds));
            };
            let part = Sge { addr, len: take as u32, lkey: sge.lkey };
            let span = self.regions.local(self.pd, &part, self.need_write);
            self.skip = 0;
            self.left = if span.is_ok() { self.left - take } else { 0 };
            return Some(span);
        }
        None
    }
}

impl Regions {
    /// The checked pieces of `len` bytes from `offset` of a list, for reading, or for writing. Ends
    /// with [`AccessError::BeyondList`] if the list is too short.
    #[inline]
    pub fn pieces<'a, 'l>(
        &'a self,
        pd: u32,
        list: &'l [Sge],
        offset: u64,
        len: u64,
        need_write: bool,
    ) -> Pieces<'a, 'l> {
        Pieces { regions: self, pd, list, skip: offset, left: len, need_write }
    }

    /// The span of `len` bytes from `offset` of a list, if they are all in its first element, as those of
    /// small messages are; else [`pieces`](Self::pieces) finds them.
    #[inline(always)]
    pub fn in_first(
        &self,
        pd: u32,
        list: &[Sge],
        offset: u64,
        len: usize,
        need_write: bool,
    ) -> Option<Result<Span<'_>, AccessError>> {
        let sge = list.first()?;
        if len == 0 || offset.checked_add(len as u64)? > u64::from(sge.len) {
            return None;
        }
        let part = Sge { addr: sge.addr.checked_add(offset)?, len: len as u32, lkey: sge.lkey };
        Some(self.local(pd, &part, need_write))
    }

    /// Checks `len` bytes from `offset` of a list without moving any.
    pub fn check_list(
        &self,
        pd: u32,
        list: &[Sge],
        offset: u64,
        len: u64,
        need_write: bool,
    ) -> Result<(), AccessError> {
        self.pieces(pd, list, offset, len, need_write).try_for_each(|piece| piece.map(drop))
    }

    /// Copies `out.len()` bytes out of a list, from `offset`. On an error, `out` may be half full.
    #[inline]
    pub fn gather(
        &self,
        pd: u32,
        list: &[Sge],
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        if let Some(span) = self.in_first(pd, list, offset, out.len(), false) {
            span?.read_into(0, out);
            return Ok(());
        }
        let mut done = 0;
        for piece in self.pieces(pd, list, offset, out.len() as u64, false) {
            let piece = piece?;
            piece.read_into(0, &mut out[done..done + piece.len()]);
            done += piece.len();
        }
        Ok(())
    }

    /// Copies `bytes` into a list, from `offset`. On an error, what came before the fault in the
    /// list has been written.
    #[inline]
    pub fn scatter(
        &self,
        pd: u32,
        list: &[Sge],
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), AccessError> {
        if let Some(span) = self.in_first(pd, list, offset, bytes.len(), true) {
            span?.write_from(0, bytes);
            return Ok(());
        }
        let mut done = 0;
        for piece in self.pieces(pd, list, offset, bytes.len() as u64, true) {
            let piece = piece?;
            piece.write_from(0, &bytes[done..done + piece.len()]);
            done += piece.len();
        }
        Ok(())
    }

    /// Copies a list, from `offset`, to the whole of `to`. Panics if `to` is not writable.
    pub fn gather_to(
        &self,
        pd: u32,
        list: &[Sge],
        offset: u64,
        to: &Span<'_>,
    ) -> Result<(), AccessError> {
        let mut done = 0;
        for piece in self.pieces(pd, list, offset, to.len() as u64, false) {
            let piece = piece?;
            piece.copy_to(&to.sub(done, piece.len()));
            done += piece.len();
        }
        Ok(())
    }

    /// Copies the whole of `from` into a list, from `offset`.
    pub fn scatter_from(
        &self,
        pd: u32,
        list: &[Sge],
        offset: u64,
        from: &Span<'_>,
    ) -> Result<(), AccessError> {
        let mut done = 0;
        for piece in self.pieces(pd, list, offset, from.len() as u64, true) {
            let piece = piece?;
            from.sub(done, piece.len()).copy_to(&piece);
            done += piece.len();
        }
        Ok(())
    }
}
