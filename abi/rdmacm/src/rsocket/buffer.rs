//! The order in which bytes under way are laid out and given back: a ring of which each piece is in one
//! part. Numbers alone, like `stream`.

use std::collections::VecDeque;

/// A ring of bytes in use. Completions come in the order of sends, so the oldest piece ends first.
#[derive(Debug)]
pub(crate) struct Buffer {
    size: usize,
    /// Where the next piece begins.
    head: usize,
    used: usize,
    /// What each piece takes, with what was skipped before it.
    pieces: VecDeque<usize>,
}

impl Buffer {
    pub(crate) fn new(size: usize) -> Self {
        Self { size, head: 0, used: 0, pieces: VecDeque::new() }
    }

    /// Where the next piece may begin, and how long it may be: where there is a choice between the end of
    /// the ring and its beginning, the end, unless fewer than `least` bytes are left there.
    pub(crate) fn room(&self, least: usize) -> (usize, usize) {
        let free = self.size - self.used;
        let to_end = (self.size - self.head).min(free);
        if to_end >= least || free == to_end {
            return if to_end >= least { (self.head, to_end) } else { (self.head, 0) };
        }
        let at_begin = free - to_end;
        if at_begin >= least { (0, at_begin) } else { (self.head, 0) }
    }

    /// Takes a piece that [`Buffer::room`] has offered; one of no bytes for what needs none.
    pub(crate) fn take(&mut self, at: usize, len: usize) {
        let skipped = if len > 0 && at != self.head { self.size - self.head } else { 0 };
        if len > 0 {
            self.head = (at + len) % self.size;
        }
        self.used += skipped + len;
        self.pieces.push_back(skipped + len);
    }

    /// The oldest piece is needed no more.
    pub(crate) fn free(&mut self) {
        self.used -= self.pieces.pop_front().unwrap_or(0);
    }

    /// How many pieces are under way.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_piece_that_does_not_fit_at_the_end_goes_to_the_beginning() {
        let mut buffer = Buffer::new(10);
        buffer.take(0, 4);
        buffer.take(4, 4);
        assert_eq!(buffer.room(1), (8, 2));
        assert_eq!(buffer.room(3), (8, 0));
        buffer.free();
        assert_eq!(buffer.room(3), (0, 4));
        buffer.take(0, 3);
        assert_eq!(buffer.room(1), (3, 1));
        buffer.take(0, 0);
        buffer.free();
        buffer.free();
        buffer.free();
        assert_eq!((buffer.used, buffer.pieces()), (0, 0));
        assert_eq!(buffer.room(7), (3, 7));
    }

    proptest! {
        #[test]
        fn pieces_never_overlap(steps in prop::collection::vec((0usize..3, 1usize..40), 1..200)) {
            let mut buffer = Buffer::new(50);
            let mut live: VecDeque<std::ops::Range<usize>> = VecDeque::new();
            for (step, len) in steps {
                if step == 0 {
                    buffer.free();
                    live.pop_front();
                    continue;
                }
                let least = if step == 1 { 1 } else { len };
                let (at, room) = buffer.room(least);
                let len = len.min(room);
                if len < least {
                    continue;
                }
                let fresh = at..at + len;
                prop_assert!(fresh.end <= 50);
                for piece in &live {
                    prop_assert!(fresh.end <= piece.start || piece.end <= fresh.start);
                }
                buffer.take(at, len);
                live.push_back(fresh);
            }
            while buffer.pieces() > 0 {
                buffer.free();
            }
            prop_assert_eq!(buffer.used, 0);
        }
    }
}
