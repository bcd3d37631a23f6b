//! Long data of requests, which the server moves in pieces: the books, without I/O.

use std::collections::VecDeque;

use quipu::{Error, ProtectionDomain};
use quipu_nbd::messages::{Job, MAX_MOVED};
use quipu_nbd::{Command, Errno};

use super::memory::Places;

/// Bytes that one RDMA request moves. A piece goes from the buffer to the disk, or the other way, while the
/// processor still has it in its second-level cache, and the next piece uses the same buffer. Shorter pieces
/// are no faster on one host, and slower over TCP (`docs/notes/nbd.md`).
pub(super) const PIECE: usize = 512 << 10;
/// Buffers of a connection: 16 MiB.
pub(super) const BUFFERS: usize = 16 * MAX_MOVED as usize / PIECE;
/// RDMA Reads at a time, as the adapter of the client answers. Replies that follow more of them in the send
/// queue would wait.
pub(super) const READS: usize = 16;

/// A request whose data are being moved.
struct Move {
    job: Job,
    /// Bytes of which the RDMA requests have been posted.
    begun: usize,
    /// Pieces that are read from the client and not written to the disk yet.
    reading: usize,
    result: Result<(), Errno>,
}

/// A part of a request's data.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Piece {
    /// Where the request's reply is made.
    pub(super) place: u32,
    pub(super) job: Job,
    /// Where it begins in the request's range.
    pub(super) at: usize,
    pub(super) len: usize,
}

impl Piece {
    /// Where it begins on the disk.
    pub(super) fn offset(&self) -> u64 {
        self.job.request.offset + self.at as u64
    }

    /// Whether it is the request's last.
    pub(super) fn is_last(&self) -> bool {
        self.at + self.len == self.job.request.length as usize
    }
}

/// The requests of a connection whose data are being moved, and the pieces that are under way.
#[derive(Default)]
pub(super) struct Moves {
    /// By the place of the reply.
    moves: Vec<Option<Move>>,
    /// Those with pieces to begin, by the place of the reply, oldest first.
    pending: VecDeque<u32>,
    /// Of each buffer.
    pieces: Vec<Option<Piece>>,
    reading: usize,
}

impl Moves {
    /// For replies in so many places.
    pub(super) fn new(places: u32) -> Self {
        let moves = (0..places).map(|_| None).collect();
        Self { moves, pieces: vec![None; BUFFERS], ..Self::default() }
    }

    /// The memory for the pieces.
    pub(super) fn buffers(pd: &ProtectionDomain) -> Result<Places, Error> {
        Places::new(pd, BUFFERS as u32, PIECE)
    }

    /// Adds a request whose reply will be made in `place`.
    pub(super) fn add(&mut self, job: Job, place: u32) {
        self.moves[place as usize] = Some(Move { job, begun: 0, reading: 0, result: Ok(()) });
        self.pending.push_back(place);
    }

    /// The piece that is to be begun next, if one is and its RDMA request would not wait for others.
    pub(super) fn next(&self) -> Option<Piece> {
        let place = *self.pending.front()?;
        let found = self.moves[place as usize].as_ref()?;
        if found.job.command == Command::Write && self.reading >= READS {
            return None;
        }
        let left = found.job.request.length as usize - found.begun;
        // It ends where one of a disk in registered memory may end.
        let from = (found.job.request.offset + found.begun as u64) % PIECE as u64;
        let len = left.min(PIECE - from as usize);
        Some(Piece { place, job: found.job, at: found.begun, len })
    }

    /// The RDMA request of the [`next`](Self::next) piece has been posted, with a buffer.
    pub(super) fn begun(&mut self, piece: Piece, buffer: u32) {
        self.pieces[buffer as usize] = Some(piece);
        let slot = &mut self.moves[piece.place as usize];
        let Some(found) = slot else { return };
        found.begun += piece.len;
        let is_write = piece.job.command == Command::Write;
        if is_write {
            found.reading += 1;
            self.reading += 1;
        }
        if piece.is_last() {
            self.pending.pop_front();
            if !is_write {
                *slot = None;
            }
        }
    }

    /// The disk does not have the [`next`](Self::next) piece, which is one of a read: the request is over.
    pub(super) fn give_up(&mut self) {
        if let Some(place) = self.pending.pop_front() {
            self.moves[place as usize] = None;
        }
    }

    /// The piece in a buffer, whose RDMA request is done, and whether it is still wanted: not where the disk
    /// has refused another piece of the request.
    pub(super) fn moved(&mut self, buffer: u32) -> Option<(Piece, bool)> {
        let piece = self.pieces[buffer as usize].take()?;
        let found = self.moves[piece.place as usize].as_ref();
        Some((piece, found.is_some_and(|it| it.result.is_ok())))
    }

    /// A piece of a write has been dealt with. The request and its result, if that was all of it.
    pub(super) fn written(
        &mut self,
        piece: Piece,
        result: Result<(), Errno>,
    ) -> Option<(Job, Result<(), Errno>)> {
        let slot = &mut self.moves[piece.place as usize];
        let found = slot.as_mut()?;
        found.reading -= 1;
        self.reading -= 1;
        found.result = found.result.and(result);
        let length = found.job.request.length as usize;
        if found.result.is_err() && found.begun < length {
            // What is not begun yet is not wanted any more. Requests are begun in order, so it is the first.
            found.begun = length;
            self.pending.pop_front();
        }
        if found.begun < length || found.reading > 0 {
            return None;
        }
        slot.take().map(|done| (done.job, done.result))
    }
}

#[cfg(test)]
mod tests {
    use quipu_nbd::messages::ClientMemory;
    use quipu_nbd::{CommandFlags, Request};

    use super::*;

    const OFFSET: u64 = 3 * PIECE as u64;

    fn job(command: Command, length: usize) -> Job {
        let (flags, kind) = (CommandFlags::empty(), command.number());
        let request = Request { flags, kind, cookie: 7, offset: OFFSET, length: length as u64 };
        let memory = ClientMemory { key: 1, address: 4096 };
        Job { command, request, memory, is_moved: true }
    }

    /// Begins the next piece with a buffer: where it lies in the request, and its length.
    fn begin(moves: &mut Moves, buffer: u32) -> Option<(usize, usize)> {
        let piece = moves.next()?;
        moves.begun(piece, buffer);
        Some((piece.at, piece.len))
    }

    #[test]
    fn a_write_is_done_when_all_of_its_pieces_are() {
        let mut moves = Moves::new(4);
        moves.add(job(Command::Write, 2 * PIECE + 1), 3);
        assert_eq!(moves.next().unwrap().offset(), OFFSET);
        assert_eq!(begin(&mut moves, 0), Some((0, PIECE)));
        assert_eq!(begin(&mut moves, 1), Some((PIECE, PIECE)));
        let (first, wanted) = moves.moved(0).unwrap();
        assert!(wanted && !first.is_last());
        assert_eq!(moves.moved(0), None);
        assert_eq!(moves.written(first, Ok(())), None);
        assert_eq!(begin(&mut moves, 0), Some((2 * PIECE, 1)));
        assert_eq!(begin(&mut moves, 2), None);
        for (buffer, ends) in [(0, false), (1, true)] {
            let (piece, _) = moves.moved(buffer).unwrap();
            assert_eq!(moves.written(piece, Ok(())).is_some(), ends);
        }
    }

    #[test]
    fn pieces_end_at_multiples_of_their_length() {
        let mut moves = Moves::new(1);
        let mut job = job(Command::Read, PIECE + 3);
        job.request.offset += 5;
        moves.add(job, 0);
        assert_eq!(begin(&mut moves, 0), Some((0, PIECE - 5)));
        assert_eq!(begin(&mut moves, 1), Some((PIECE - 5, 8)));
        assert_eq!(moves.next(), None);
    }

    #[test]
    fn a_write_that_fails_waits_for_the_pieces_that_are_under_way_and_begins_no_more() {
        let mut moves = Moves::new(2);
        moves.add(job(Command::Write, 8 * PIECE), 0);
        moves.add(job(Command::Write, 1), 1);
        for buffer in 0..3 {
            begin(&mut moves, buffer).unwrap();
        }
        let (piece, _) = moves.moved(1).unwrap();
        assert_eq!(moves.written(piece, Err(Errno::NOSPC)), None);
        assert_eq!(moves.next().unwrap().place, 1);
        for (buffer, end) in [(0, None), (2, Some(Err(Errno::NOSPC)))] {
            let (piece, wanted) = moves.moved(buffer).unwrap();
            assert!(!wanted);
            assert_eq!(moves.written(piece, Ok(())).map(|(_, result)| result), end);
        }
    }

    #[test]
    fn no_more_pieces_are_read_than_the_adapter_reads_at_a_time() {
        let mut moves = Moves::new(8);
        for place in 0..8 {
            moves.add(job(Command::Write, 8 * PIECE), place);
        }
        let begun = (0..BUFFERS as u32).filter(|&buffer| begin(&mut moves, buffer).is_some());
        assert_eq!(begun.count(), READS);
        let (piece, _) = moves.moved(0).unwrap();
        moves.written(piece, Ok(()));
        assert!(moves.next().is_some());
    }

    #[test]
    fn a_read_is_over_with_its_last_piece_or_the_first_that_the_disk_refuses() {
        let mut moves = Moves::new(2);
        moves.add(job(Command::Read, PIECE + 1), 0);
        moves.add(job(Command::Read, PIECE + 1), 1);
        assert_eq!(begin(&mut moves, 0), Some((0, PIECE)));
        assert!(moves.next().unwrap().is_last());
        assert_eq!(begin(&mut moves, 1), Some((PIECE, 1)));
        assert_eq!(begin(&mut moves, 2), Some((0, PIECE)));
        moves.give_up();
        assert_eq!(moves.next(), None);
        for buffer in 0..3 {
            assert!(moves.moved(buffer).is_some());
        }
    }
}
