//! Receive buffers: which hold what was not consumed yet, and which are to be posted again.

use std::collections::VecDeque;

use quipu_wire::Stag;

/// Payload in a receive buffer of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The buffer.
    pub slot: u16,
    /// Where in it.
    pub at: u32,
    /// Bytes.
    pub len: u32,
}

/// Memory of the peer that may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Address of the first byte, as the peer counts.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// The key for it.
    pub rkey: Stag,
}

/// What a reader finds first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readable {
    /// Payload in a receive buffer.
    Buffered(Segment),
    /// Memory of the peer: read it, or refuse it.
    Remote(RemoteMemory),
    /// Nothing yet.
    Nothing,
    /// The peer sends no more.
    End,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    segment: Segment,
    /// Whether the buffer is free when this is consumed.
    frees: bool,
    /// The mark of an urgent byte lies before this.
    is_marked: bool,
}

/// The receive buffers of a connection.
#[derive(Debug)]
pub(crate) struct Buffers {
    pieces: VecDeque<Piece>,
    free: VecDeque<u16>,
    size: u32,
    /// A change of the size: receives of the old one that are still posted.
    old_posted: Option<u16>,
    urgent: Option<u8>,
    /// The mark follows all pieces.
    mark_at_end: bool,
    unread: u64,
}

impl Buffers {
    pub(crate) fn new(size: u32) -> Self {
        Self {
            pieces: VecDeque::new(),
            free: VecDeque::new(),
            size,
            old_posted: None,
            urgent: None,
            mark_at_end: false,
            unread: 0,
        }
    }

    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// A message has come into a buffer, with payload there.
    pub(crate) fn fill(&mut self, segment: Segment, urgent: Option<(u8, bool)>) {
        let mut parts = [(segment.len, false), (0, false)];
        if let Some((byte, inline)) = urgent {
            self.urgent = (!inline).then_some(byte);
            parts = [(segment.len - 1, false), (u32::from(inline), true)];
        }
        let mut at = segment.at;
        for (len, is_marked) in parts {
            if len > 0 {
                let is_marked = is_marked || std::mem::take(&mut self.mark_at_end);
                let segment = Segment { at, len, ..segment };
                self.pieces.push_back(Piece { segment, frees: false, is_marked });
                self.unread += u64::from(len);
                at += len;
            }
        }
        self.mark_at_end |= urgent.is_some_and(|(_, inline)| !inline);
        match self.pieces.back_mut() {
            Some(last) if last.segment.slot == segment.slot && at > segment.at => last.frees = true,
            _ => self.free.push_back(segment.slot),
        }
    }

    /// A message without payload has come into a buffer.
    pub(crate) fn free(&mut self, slot: u16) {
        self.free.push_back(slot);
    }

    pub(crate) fn first(&self) -> Option<Segment> {
        self.pieces.front().map(|piece| piece.segment)
    }

    /// The piece of that index.
    pub(crate) fn piece(&self, index: usize) -> Option<(Segment, bool)> {
        self.pieces.get(index).map(|piece| (piece.segment, piece.is_marked))
    }

    /// Bytes that lie in buffers.
    pub(crate) fn unread(&self) -> u64 {
        self.unread
    }

    /// Consumes so many bytes of the first piece, or all of it.
    pub(crate) fn consume(&mut self, len: u32) {
        let Some(piece) = self.pieces.front_mut() else { return };
        let len = len.min(piece.segment.len);
        piece.segment.at += len;
        piece.segment.len -= len;
        piece.is_marked &= len == 0;
        self.unread -= u64::from(len);
        if piece.segment.len == 0 {
            let (slot, frees) = (piece.segment.slot, piece.frees);
            self.pieces.pop_front();
            if frees {
                self.free.push_back(slot);
            }
        }
    }

    pub(crate) fn next_free(&mut self) -> Option<u16> {
        self.free.pop_front()
    }

    /// Whether the next byte is the one after the mark.
    pub(crate) fn is_at_mark(&self) -> bool {
        self.pieces.front().map_or(self.mark_at_end, |piece| piece.is_marked)
    }

    pub(crate) fn urgent(&mut self, peek: bool) -> Option<u8> {
        if peek { self.urgent } else { self.urgent.take() }
    }

    /// Whether an urgent byte is there.
    pub(crate) fn has_urgent(&self) -> bool {
        self.urgent.is_some()
    }

    /// From now on buffers are posted with this size; whether the change is still to be confirmed.
    pub(crate) fn resize(&mut self, size: u32, posted: u16) {
        self.size = size;
        self.old_posted = Some(posted);
    }

    pub(crate) fn is_resizing(&self) -> bool {
        self.old_posted.is_some()
    }

    /// A receive was used: whether it was the last one of the old size.
    pub(crate) fn used(&mut self) {
        if let Some(old) = &mut self.old_posted {
            *old = old.saturating_sub(1);
        }
    }

    /// The size to confirm, once all receives of the old one are used up.
    pub(crate) fn resized(&self) -> Option<u32> {
        (self.old_posted == Some(0)).then_some(self.size)
    }

    pub(crate) fn confirm(&mut self) {
        self.old_posted = None;
    }
}
