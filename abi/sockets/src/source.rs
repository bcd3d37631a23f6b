//! Where octets that are sent come from: the program's buffers, or a file.

use libc::c_int;
use quipu_sockets::Pieces;

use crate::iov::Cursor;
use crate::map::Map;
use crate::sys;

/// A place from which octets go into a ring. A clone made before [`put`](Self::put) undoes it.
pub(crate) trait Source: Clone {
    /// Copies the next octets into the ring. How many there were: less than there is room for only where
    /// a file has no more, or cannot be read.
    fn put(&mut self, map: &Map, pieces: Pieces) -> usize;
}

impl Source for Cursor<'_> {
    #[inline]
    fn put(&mut self, map: &Map, pieces: Pieces) -> usize {
        map.fill(pieces, self);
        pieces.len
    }
}

/// A place in a file.
#[derive(Clone, Copy)]
pub(crate) struct File {
    fd: c_int,
    offset: i64,
}

impl File {
    pub(crate) fn new(fd: c_int, offset: i64) -> Self {
        Self { fd, offset }
    }
}

impl Source for File {
    fn put(&mut self, map: &Map, pieces: Pieces) -> usize {
        let (vectors, room) = map.vectors(pieces);
        let len = sys::read_at(self.fd, &vectors, self.offset).unwrap_or(0).min(room);
        self.offset += len as i64;
        len
    }
}
