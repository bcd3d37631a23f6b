//! Payload that is transmitted from the memory it lies in.

use quipu_mem::Span;

use super::ROOM_BYTES;

/// Payloads of at least so many bytes are worth a place in the list: for less, the world below is quicker
/// with one buffer.
const LEAST_BYTES: usize = 8 * 1024;

/// No more is gathered behind so many pieces: lists of the world below have an end, too.
const MOST_PIECES: usize = 24;

/// Payload that belongs between bytes of the buffer that [`transmit`](crate::Adapter::transmit_from_memory)
/// filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// So many bytes of the buffer come before it; never less than in the piece before.
    pub at: usize,
    /// Where it lies in this process.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
}

/// The payload that is transmitted with a buffer, from registered memory that was checked.
///
/// Whoever transmits reads it before the next call of the adapter and before anybody else can call it: after
/// that, the memory may be taken back.
#[derive(Debug, Default)]
pub struct Gather {
    pieces: Vec<Piece>,
    bytes: usize,
    most: usize,
    /// Bytes of the buffer that are filled.
    base: usize,
}

impl Gather {
    /// A list for about `most` bytes; 0: for none, so that all payload is copied into the buffer.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, ..Self::default() }
    }

    /// Changes for about how many bytes it is.
    #[inline]
    pub fn limit(&mut self, most: usize) {
        self.most = most;
    }

    /// The pieces, in the order in which they are transmitted.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// How many bytes they are.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Forgets all pieces.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.bytes = 0;
        self.base = 0;
    }

    /// The bytes that are transmitted next are written behind `base` bytes of the buffer.
    pub(super) fn begin_at(&mut self, base: usize) {
        self.base = base;
    }

    /// Has no more than about `most` bytes gathered in addition to those that are.
    pub(super) fn cap(&mut self, most: usize) {
        self.most = self.most.min(self.bytes + most);
    }

    /// Forgets the pieces of what is written next: it is not transmitted.
    pub(super) fn undo(&mut self) {
        while let Some(piece) = self.pieces.pop_if(|piece| piece.at >= self.base) {
            self.bytes -= piece.len;
        }
    }

    /// Whether `bytes` of payload are to be left where they are.
    pub(super) fn wants(&self, bytes: u32) -> bool {
        self.most > 0 && bytes as usize >= LEAST_BYTES
    }

    /// Whether there is room for more.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.bytes < self.most && self.pieces.len() < MOST_PIECES
    }

    /// Whether what was transmitted with this list is all that there was, so that to go on would be in vain:
    /// `left` bytes of the buffer are not used, into which something would have fitted.
    #[must_use]
    #[inline]
    pub fn is_final(&self, left: usize) -> bool {
        left >= ROOM_BYTES && (self.most == 0 || self.has_room())
    }

    /// Adds what comes behind `ahead` bytes of what is written next.
    pub(super) fn push(&mut self, ahead: usize, span: &Span<'_>) {
        let (addr, len) = span.as_raw();
        self.add(Piece { at: self.base + ahead, addr, len });
    }

    /// Adds a piece.
    pub fn add(&mut self, piece: Piece) {
        if piece.len > 0 {
            self.pieces.push(piece);
            self.bytes += piece.len;
        }
    }
}
