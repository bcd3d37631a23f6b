//! Where the requests of a TCP queue pair lie in its two streams.
//!
//! A send request is a range of the stream that goes out, and is found by its end. A receive is a piece of
//! room; it begins in the stream where the one before it was complete, which is known only then: a receive
//! may be complete before it is full. So receives are found by what all receives together have room for,
//! counted from the one in front.
//!
//! A receive that is complete early takes its room out of a window that was offered already, and that must
//! not shrink (RFC 9293 3.8.6). In stream mode, what comes for that room is kept here until there are
//! receives again; and while nothing is, a window without receives has one octet, since there are peers that
//! send no FIN into a closed one.

use std::collections::VecDeque;

use quipu_inet::stack::{ListenerId, TcpId};
use quipu_inet::tcp::Mode;

/// Octets that a connection keeps for want of receives.
const MOST_KEPT: u32 = 256 << 10;
/// Octets that all connections of an adapter keep.
pub(crate) const MOST_KEPT_IN_ALL: usize = 16 << 20;
/// Octets that a connection keeps in any case, whatever others do.
const SURELY_KEPT: u32 = 16 << 10;
/// The rest, of which there may be nothing left.
pub(crate) const MAYBE_KEPT: u32 = MOST_KEPT - SURELY_KEPT;

/// How far the end of sending is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Closing {
    /// The program may send.
    #[default]
    Not,
    /// What is posted still goes out.
    Wanted,
    /// TCP knows it.
    Told,
}

/// Ends that wait for what is kept until there are receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Late {
    /// The peer has closed its direction.
    pub(crate) peer_closed: bool,
    /// Both have.
    pub(crate) closed: bool,
}

/// What a queue pair of type TCP has in addition to its queues.
pub(crate) struct TcpPath {
    pub(crate) connection: Option<TcpId>,
    /// The listener whose next connection it waits for.
    pub(crate) listener: Option<ListenerId>,
    pub(crate) mode: Mode,
    pub(crate) closing: Closing,
    /// Octets of the request before `sq.next` that TCP does not know of yet: they wait for a turn.
    pub(crate) unhanded: u32,
    /// Where the send queue ended when the program closed.
    pub(crate) end: u32,
    /// What is posted behind the end is taken, and flushed.
    pub(crate) takes_more: bool,
    /// Whether the peer has closed its direction.
    pub(crate) peer_closed: bool,
    /// Stream mode: octets in order that no receive was there for.
    kept: VecDeque<u8>,
    /// What has become of the connection, of which the program hears when it has what came before.
    pub(crate) late: Late,
    pub(crate) sends: Sends,
    pub(crate) receives: Receives,
}

impl TcpPath {
    /// That of a queue pair with queues of these sizes.
    pub(crate) fn new(max_send_wr: u32, max_recv_wr: u32) -> Self {
        let slots = |count: u32| vec![0; count.max(1).next_power_of_two() as usize];
        Self {
            connection: None,
            listener: None,
            mode: Mode::Stream,
            closing: Closing::Not,
            unhanded: 0,
            end: 0,
            takes_more: false,
            peer_closed: false,
            kept: VecDeque::new(),
            late: Late::default(),
            sends: Sends { ends: slots(max_send_wr).into(), written: 0, acked: 0, hint: 0 },
            receives: Receives {
                ends: slots(max_recv_wr).into(),
                waiting: 0,
                posted: 0,
                front: 0,
                front_at: 0,
                delivered: 0,
                contiguous: 0,
                placed: 0,
                push_due: false,
                told: 0,
                keeps: false,
            },
        }
    }

    /// A connection is taken on.
    pub(crate) fn begin(&mut self, connection: TcpId, mode: Mode) {
        self.connection = Some(connection);
        self.listener = None;
        self.mode = mode;
        self.unhanded = 0;
        self.receives.keeps = mode == Mode::Stream;
        // An attempt before may have been closed, and refused.
        (self.closing, self.takes_more) = (Closing::Not, false);
    }

    /// There is no connection any more, and nothing of it to be handed out: which it was.
    pub(crate) fn let_go(&mut self) -> Option<TcpId> {
        (self.kept, self.late) = (VecDeque::new(), Late::default());
        self.connection.take()
    }

    /// How many octets are kept.
    pub(crate) fn kept(&self) -> u64 {
        self.kept.len() as u64
    }

    /// How many more would be.
    pub(crate) fn spare(&self) -> u32 {
        let most = if self.receives.keeps { MOST_KEPT } else { 0 };
        most.saturating_sub(self.kept() as u32)
    }

    /// Keeps octets, which come behind everything that is here.
    pub(crate) fn keep(&mut self, bytes: &[u8]) {
        self.kept.extend(bytes);
    }

    /// Takes out what is kept first, up to `most` octets; empty if nothing is.
    pub(crate) fn take_kept(&mut self, most: u64) -> Vec<u8> {
        let most = self.kept.len().min(usize::try_from(most).unwrap_or(usize::MAX));
        let taken = self.kept.drain(..most).collect();
        if self.kept.is_empty() {
            self.kept = VecDeque::new();
        }
        taken
    }

    /// Forgets everything, with queues that are empty.
    pub(crate) fn clear(&mut self) {
        let slots = |ends: &[u64]| ends.len() as u32;
        *self = Self::new(slots(&self.sends.ends), slots(&self.receives.ends));
    }
}

/// The offset at `position` of a ring.
#[inline]
fn at(ends: &[u64], position: u32) -> u64 {
    ends[position as usize & (ends.len() - 1)]
}

/// The first position of `head..tail` whose end lies behind `offset`.
fn first_behind(ends: &[u64], head: u32, tail: u32, offset: u64) -> Option<u32> {
    let count = tail.wrapping_sub(head);
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        if at(ends, head.wrapping_add(middle)) > offset {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    (low < count).then(|| head.wrapping_add(low))
}

/// The stream that goes out.
pub(crate) struct Sends {
    /// The offset behind each request that TCP knows of, by place in the queue.
    ends: Box<[u64]>,
    /// Behind the last of them.
    written: u64,
    /// Everything before it is acknowledged.
    pub(crate) acked: u64,
    /// The request of the last segment: most segments are of the same one or of the next.
    hint: u32,
}

impl Sends {
    /// Whether everything that TCP knows of is acknowledged.
    pub(crate) fn are_acked(&self) -> bool {
        self.acked == self.written
    }

    /// TCP knows of the request at `position`, of `len` octets.
    pub(crate) fn push(&mut self, position: u32, len: u32) {
        self.written += u64::from(len);
        let slot = position as usize & (self.ends.len() - 1);
        self.ends[slot] = self.written;
    }

    /// The offset behind a request.
    #[inline]
    pub(crate) fn end(&self, position: u32) -> u64 {
        at(&self.ends, position)
    }

    /// The request of `head..next` that has the octet at `offset`.
    pub(crate) fn find(&mut self, head: u32, next: u32, offset: u64) -> Option<u32> {
        let behind = self.hint.wrapping_sub(head);
        let known = behind < next.wrapping_sub(head)
            && self.end(self.hint) > offset
            && (behind == 0 || self.end(self.hint.wrapping_sub(1)) <= offset);
        if !known {
            self.hint = first_behind(&self.ends, head, next, offset)?;
        }
        Some(self.hint)
    }
}

/// A place in the posted receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Which receive.
    pub(crate) position: u32,
    /// Octets of it that lie before.
    pub(crate) offset: u64,
    /// Octets of it from there on.
    pub(crate) room: u64,
}

/// The stream that comes in.
pub(crate) struct Receives {
    /// What all receives ever posted have room for, up to each of those that are posted now.
    ends: Box<[u64]>,
    /// How many of them there are.
    waiting: u32,
    /// The same up to the last one.
    posted: u64,
    /// The same before the one in front.
    front: u64,
    /// The stream offset at which the one in front begins.
    front_at: u64,
    /// The stream is in the receives up to this offset.
    delivered: u64,
    /// TCP has acknowledged it up to this offset; in message mode it may keep what is between.
    contiguous: u64,
    /// Behind the last octet that is in a receive, maybe behind a gap.
    placed: u64,
    /// The front one is to be completed as soon as there is no gap.
    push_due: bool,
    /// Behind the last octet for which TCP believes there is room.
    told: u64,
    /// Whether what comes without a receive is kept.
    keeps: bool,
}

impl Receives {
    /// A receive with room for `len` octets was posted at `position`.
    #[inline]
    pub(crate) fn push(&mut self, position: u32, len: u64) {
        self.waiting += 1;
        // The length in a completion has 32 bits.
        self.posted += len.min(u64::from(u32::MAX));
        let slot = position as usize & (self.ends.len() - 1);
        self.ends[slot] = self.posted;
    }

    /// Octets that the receive in front, at `head`, has room for.
    pub(crate) fn capacity(&self, head: u32) -> u64 {
        at(&self.ends, head) - self.front
    }

    /// Octets in the receive in front.
    pub(crate) fn filled(&self) -> u64 {
        self.delivered - self.front_at
    }

    /// Where among the receives `head..tail` the octet at `offset` of the stream belongs.
    pub(crate) fn find(&self, head: u32, tail: u32, offset: u64) -> Option<Place> {
        let room = offset.checked_sub(self.front_at)? + self.front;
        let position = if head != tail && at(&self.ends, head) > room {
            head
        } else {
            first_behind(&self.ends, head, tail, room)?
        };
        let begin =
            if position == head { self.front } else { at(&self.ends, position.wrapping_sub(1)) };
        let end = at(&self.ends, position);
        Some(Place { position, offset: room - begin, room: end - room })
    }

    /// `start..end` of the stream is in the receives.
    pub(crate) fn place(&mut self, end: u64) {
        self.placed = self.placed.max(end);
    }

    /// The stream is in the receives up to `offset`.
    pub(crate) fn deliver(&mut self, offset: u64) {
        self.delivered = self.delivered.max(offset);
        self.place(offset);
    }

    /// Where the stream is in the receives up to.
    pub(crate) fn delivered(&self) -> u64 {
        self.delivered
    }

    /// TCP has it up to `offset`.
    pub(crate) fn note_contiguous(&mut self, offset: u64) {
        self.contiguous = self.contiguous.max(offset);
    }

    /// Stream mode: octets of the receive at `head` if it is complete; `push` says that it is to be so soon.
    pub(crate) fn complete(&mut self, head: u32, push: bool) -> Option<u32> {
        let (filled, capacity) = (self.filled(), self.capacity(head));
        if self.delivered == self.front_at {
            // Everything up to here has been handed out, so whatever was pushed is.
            self.push_due = false;
            return None;
        }
        if filled >= capacity {
            self.push_due |= push;
            return Some(capacity as u32);
        }
        self.push_due |= push;
        // What lies behind a gap stands in its place already.
        let whole = self.placed <= self.delivered;
        (whole && std::mem::take(&mut self.push_due)).then_some(filled as u32)
    }

    /// The receive at `head` is complete with `len` octets: it is in front no more.
    pub(crate) fn pop(&mut self, head: u32, len: u64) {
        self.waiting = self.waiting.saturating_sub(1);
        self.front_at += len;
        self.front = at(&self.ends, head);
    }

    /// Whether TCP has something that is not in a receive.
    pub(crate) fn is_owed(&self) -> bool {
        self.contiguous > self.delivered
    }

    /// The room after what TCP has; no more than `most`. It is one octet at least, unless TCP has
    /// something that is not in a receive. In stream mode the octet would be kept. In message mode a receive
    /// without room takes it, and fails; were the window closed, the message would wait for ever.
    pub(crate) fn room(&self, most: u64) -> u64 {
        let taken = self.front + (self.contiguous - self.front_at);
        let least = u64::from((self.keeps || self.waiting > 0) && !self.is_owed());
        self.posted.saturating_sub(taken).clamp(least, most)
    }

    /// The same, if TCP is to be told of it. While requests are posted it need not be told
    /// of each: the peer does not use up what it knows of at once, and when something comes TCP is told
    /// anyway.
    pub(crate) fn news(&mut self, posting: bool, most: u64) -> Option<u64> {
        let room = self.room(most);
        let edge = self.contiguous + room;
        let left = self.told.saturating_sub(self.contiguous);
        let enough = posting && edge >= self.told && edge - self.told < left / 2;
        if edge == self.told || enough {
            return None;
        }
        self.told = edge;
        Some(room)
    }

    /// As [`news`](Self::news), for a connection that TCP knows no room of.
    pub(crate) fn first_news(&mut self, most: u64) -> u64 {
        self.told = u64::MAX;
        self.news(false, most).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receives(sizes: &[u64]) -> Receives {
        let mut path = TcpPath::new(1, 8);
        for (position, &size) in sizes.iter().enumerate() {
            path.receives.push(position as u32, size);
        }
        path.receives
    }

    #[test]
    fn a_send_is_found_by_any_of_its_octets() {
        let mut sends = TcpPath::new(4, 1).sends;
        let first = u32::MAX - 1;
        for (n, len) in [10, 0, 5, 7].into_iter().enumerate() {
            sends.push(first.wrapping_add(n as u32), len);
        }
        let next = first.wrapping_add(4);
        for (offset, expected) in
            [(0, Some(0)), (9, Some(0)), (10, Some(2)), (14, Some(2)), (15, Some(3)), (22, None)]
        {
            for hint in 0..4 {
                sends.hint = first.wrapping_add(hint);
                let found = sends.find(first, next, offset);
                assert_eq!(found, expected.map(|n| first.wrapping_add(n)), "{offset}");
            }
        }
        assert_eq!(sends.find(first.wrapping_add(3), next, 15), Some(first.wrapping_add(3)));
        assert_eq!(sends.find(next, next, 15), None);
    }

    #[test]
    fn a_place_is_found_across_receives_without_room() {
        let receives = receives(&[10, 0, 5]);
        let place = |position, offset, room| Some(Place { position, offset, room });
        assert_eq!(receives.find(0, 3, 0), place(0, 0, 10));
        assert_eq!(receives.find(0, 3, 9), place(0, 9, 1));
        assert_eq!(receives.find(0, 3, 10), place(2, 0, 5));
        assert_eq!(receives.find(0, 3, 15), None);
        assert_eq!(receives.find(0, 0, 0), None);
    }

    #[test]
    fn a_push_moves_what_follows_to_the_next_receive_unless_it_stands_there_already() {
        let mut it = receives(&[10, 10, 10]);
        it.deliver(4);
        assert_eq!(it.complete(0, true), Some(4));
        it.pop(0, 4);
        assert_eq!(it.find(1, 3, 4), Some(Place { position: 1, offset: 0, room: 10 }));
        // Three octets behind a gap of two, and a push before the gap.
        it.place(11);
        it.deliver(6);
        assert_eq!(it.complete(1, true), None);
        it.deliver(11);
        assert_eq!(it.complete(1, false), Some(7), "the push is not forgotten");
        it.pop(1, 7);
        assert_eq!(it.complete(2, true), None, "nothing to complete");
        it.deliver(12);
        assert_eq!(it.complete(2, false), None, "an old push does not count for new octets");
    }

    #[test]
    fn full_receives_complete_one_after_the_other() {
        let mut it = receives(&[10, 0, 10]);
        it.deliver(15);
        assert_eq!(it.complete(0, false), Some(10));
        it.pop(0, 10);
        assert_eq!(it.complete(1, false), Some(0));
        it.pop(1, 0);
        assert_eq!(it.complete(2, false), None);
        assert_eq!(it.filled(), 5);
    }

    #[test]
    fn room_is_told_seldom_while_it_grows_and_always_when_it_shrinks() {
        let mut it = receives(&[]);
        let mut told = Vec::new();
        for position in 0..8 {
            it.push(position, 100);
            told.extend(it.news(true, 10_000));
        }
        assert_eq!(told, [100, 200, 300, 500, 800]);
        assert_eq!(it.news(false, 10_000), None);
        it.deliver(40);
        it.note_contiguous(40);
        assert_eq!(it.news(false, 10_000), None, "it stands where it stood");
        assert_eq!(it.complete(0, true), Some(40));
        it.pop(0, 40);
        assert_eq!(it.news(false, 10_000), Some(700));
        assert_eq!(it.first_news(650), 650, "no more than TCP can offer");
    }
}
