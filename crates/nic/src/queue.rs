//! Work queues: rings of fixed size, allocated when the queue pair is created and never after.

mod receive;

use std::ops::Range;

use quipu_mem::{Key, Sge};

use crate::datagram::Destination;
use crate::error::Fault;
use crate::types::{Payload, SendFlags, SendOp, SendWr, To};

pub(crate) use self::receive::{Receive, RecvQueue};

/// Requests that are fetched ahead.
const FETCHED_REQUESTS: u32 = 2;
/// Inline bytes of a request that are fetched ahead.
const FETCHED_INLINE: usize = 256;

/// There is no memory for a queue of the size that the program wants.
pub(crate) const NO_MEMORY: Fault = Fault::Exhausted("memory");

/// So many copies of a value, unless there is no memory for them: the program asks for what it wants, and an
/// allocation that fails otherwise ends the process.
fn copies<T: Clone>(value: T, count: usize) -> Result<Box<[T]>, Fault> {
    let mut made = Vec::new();
    made.try_reserve_exact(count).map_err(|_| NO_MEMORY)?;
    made.resize(count, value);
    Ok(made.into_boxed_slice())
}

/// So many octets, all zero, likewise. Pages that nobody writes to take no memory, so they are not written to
/// here; whether there is room is tried out before.
fn zeros(count: usize) -> Result<Box<[u8]>, Fault> {
    Vec::<u8>::new().try_reserve_exact(count).map_err(|_| NO_MEMORY)?;
    Ok(vec![0; count].into_boxed_slice())
}

/// Whether a list has an element of a region that is not empty.
pub(crate) fn names(sges: &[Sge], key: Key) -> bool {
    sges.iter().any(|sge| sge.lkey == key && sge.len > 0)
}

/// A send work request in its queue, with what became of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendWqe {
    pub(crate) wr_id: u64,
    /// The shared receive queue that it names, on a connection where requests name one.
    pub(crate) srq: u32,
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    num_sge: u32,
    /// Bytes of payload.
    pub(crate) length: u32,
    /// The count of requests before its first one, once transmission began.
    pub(crate) first_request: u32,
    /// The count of requests with its last one; it is acknowledged when this many are executed.
    pub(crate) end_request: u32,
    /// Message sequence numbers of queues 0 and 1 before it (streams only).
    pub(crate) msn: [u32; 2],
    /// A read or atomic whose answer is in; any other request: always true once transmitted.
    pub(crate) answered: bool,
    /// Bytes of the answer placed so far.
    pub(crate) placed: u32,
}

impl SendWqe {
    /// Whether it asks for data back.
    pub(crate) fn wants_answer(&self) -> bool {
        matches!(
            self.op,
            SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }
        )
    }
}

/// The shared receive queue that a request names; 0 if it names none.
#[inline]
fn srq_of(wr: &SendWr<'_>) -> u32 {
    match wr.to {
        To::Srq(number) => number,
        _ => 0,
    }
}

/// The send queue of a queue pair: `head..next` are in progress, `next..tail` wait.
pub(crate) struct SendQueue {
    wqes: Box<[SendWqe]>,
    sges: Box<[Sge]>,
    inline: Box<[u8]>,
    /// Where each request goes; empty unless the requests are datagrams.
    destinations: Box<[Destination]>,
    max_sge: usize,
    max_inline: usize,
    /// Inline bytes for which each request has room: those of an atomic write always fit.
    stride: usize,
    capacity: u32,
    /// Where the requests begin whose completions may not have been taken yet.
    taken: u32,
    pub(crate) head: u32,
    pub(crate) next: u32,
    pub(crate) tail: u32,
}

impl SendQueue {
    /// A queue of `capacity` requests of at most `max_sge` elements or `max_inline` inline bytes each.
    ///
    /// # Errors
    /// [`NO_MEMORY`].
    pub(crate) fn new(capacity: u32, max_sge: u32, max_inline: u32) -> Result<Self, Fault> {
        let slots = capacity.max(1).next_power_of_two() as usize;
        let stride = max_inline.max(8) as usize;
        let empty = SendWqe {
            wr_id: 0,
            srq: 0,
            op: SendOp::Send,
            flags: SendFlags::empty(),
            num_sge: 0,
            length: 0,
            first_request: 0,
            end_request: 0,
            msn: [0; 2],
            answered: false,
            placed: 0,
        };
        Ok(Self {
            wqes: copies(empty, slots)?,
            sges: copies(Sge::default(), slots * max_sge as usize)?,
            inline: zeros(slots * stride)?,
            destinations: Box::default(),
            max_sge: max_sge as usize,
            max_inline: max_inline as usize,
            stride,
            capacity,
            taken: 0,
            head: 0,
            next: 0,
            tail: 0,
        })
    }

    /// Makes it a queue whose requests each name where they go.
    ///
    /// # Errors
    /// [`NO_MEMORY`].
    pub(crate) fn with_destinations(mut self) -> Result<Self, Fault> {
        self.destinations = copies(Destination::default(), self.wqes.len())?;
        Ok(self)
    }

    /// Notes where the request goes that was added last.
    pub(crate) fn set_destination(&mut self, to: Destination) {
        let slot = self.slot(self.tail.wrapping_sub(1));
        if let Some(destination) = self.destinations.get_mut(slot) {
            *destination = to;
        }
    }

    /// Where a request goes, in a queue of datagrams.
    #[inline]
    pub(crate) fn destination(&self, position: u32) -> Option<&Destination> {
        self.destinations.get(self.slot(position))
    }

    /// Notes a request that was transmitted while it was being posted, as those of these numbers. Nothing may
    /// wait in the queue, which has room.
    #[inline(always)]
    pub(crate) fn push_transmitted(&mut self, wr: &SendWr<'_>, length: u32, numbers: Range<u32>) {
        debug_assert!(!self.seems_full() && !self.has_waiting(), "the caller has looked");
        let slot = self.slot(self.tail);
        let wqe = &mut self.wqes[slot];
        wqe.wr_id = wr.wr_id;
        wqe.op = wr.op;
        wqe.flags = wr.flags;
        wqe.num_sge = 0;
        wqe.length = length;
        wqe.first_request = numbers.start;
        wqe.end_request = numbers.end;
        wqe.answered = true;
        self.tail = self.tail.wrapping_add(1);
        self.next = self.tail;
    }

    /// Whether there is room behind `ahead` requests that are still to be added, where `unread` completions
    /// were not taken yet.
    pub(crate) fn has_room(&self, unread: u32, ahead: u32) -> bool {
        self.len().saturating_add(unread).saturating_add(ahead) < self.capacity
    }

    /// Whether there may be no room, for all that is known of completions: [`taken_but`](Self::taken_but).
    #[inline]
    pub(crate) fn seems_full(&self) -> bool {
        self.tail.wrapping_sub(self.taken) >= self.capacity
    }

    /// The program has taken all completions but `unread`, each of which keeps its request's place; whether
    /// there is room.
    pub(crate) fn taken_but(&mut self, unread: u32) -> bool {
        self.taken = self.head.wrapping_sub(unread);
        !self.seems_full()
    }

    #[inline]
    fn slot(&self, position: u32) -> usize {
        position as usize & (self.wqes.len() - 1)
    }

    /// Requests that it has room for.
    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(crate) fn len(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Whether a request waits to be transmitted.
    pub(crate) fn has_waiting(&self) -> bool {
        self.next != self.tail
    }

    pub(crate) fn max_sge(&self) -> usize {
        self.max_sge
    }

    pub(crate) fn max_inline(&self) -> usize {
        self.max_inline
    }

    /// Adds a request of `length` bytes; `false` if the queue seems full. The caller has checked the limits.
    #[inline]
    pub(crate) fn push(&mut self, wr: &SendWr<'_>, length: u32) -> bool {
        if self.seems_full() {
            return false;
        }
        let slot = self.slot(self.tail);
        let mut flags = wr.flags;
        let num_sge = match wr.payload {
            Payload::Sges(sges) => {
                flags.remove(SendFlags::INLINE);
                let first = slot * self.max_sge;
                self.sges[first..first + sges.len()].copy_from_slice(sges);
                sges.len() as u32
            }
            Payload::Inline(bytes) => {
                flags.insert(SendFlags::INLINE);
                let first = slot * self.stride;
                self.inline[first..first + bytes.len()].copy_from_slice(bytes);
                0
            }
        };
        self.wqes[slot] = SendWqe {
            wr_id: wr.wr_id,
            srq: srq_of(wr),
            op: wr.op,
            flags,
            num_sge,
            length,
            first_request: 0,
            end_request: 0,
            msn: [0; 2],
            answered: false,
            placed: 0,
        };
        self.tail = self.tail.wrapping_add(1);
        true
    }

    /// Has the processor fetch the requests that are next, with their destinations and inline bytes.
    #[inline]
    pub(crate) fn prefetch(&self) {
        for ahead in 0..FETCHED_REQUESTS.min(self.tail.wrapping_sub(self.next)) {
            let slot = self.slot(self.next.wrapping_add(ahead));
            quipu_mem::prefetch(&self.wqes[slot]);
            if let Some(destination) = self.destinations.get(slot) {
                quipu_mem::prefetch(destination);
            }
            let first = slot * self.stride;
            quipu_mem::prefetch(&self.inline[first..first + self.stride.min(FETCHED_INLINE)]);
        }
    }

    /// Forgets everything posted.
    pub(crate) fn clear(&mut self) {
        self.head = self.tail;
        self.next = self.tail;
        self.taken = self.tail;
    }

    #[inline]
    pub(crate) fn wqe(&self, position: u32) -> &SendWqe {
        &self.wqes[self.slot(position)]
    }

    #[inline]
    pub(crate) fn wqe_mut(&mut self, position: u32) -> &mut SendWqe {
        let slot = self.slot(position);
        &mut self.wqes[slot]
    }

    /// The scatter/gather list of a request.
    #[inline]
    pub(crate) fn sges(&self, position: u32) -> &[Sge] {
        let slot = self.slot(position);
        let first = slot * self.max_sge;
        &self.sges[first..first + self.wqes[slot].num_sge as usize]
    }

    /// The inline bytes of a request, if it carries its payload so.
    #[inline]
    pub(crate) fn inline(&self, position: u32) -> Option<&[u8]> {
        let slot = self.slot(position);
        let wqe = &self.wqes[slot];
        let first = slot * self.stride;
        wqe.flags
            .contains(SendFlags::INLINE)
            .then(|| &self.inline[first..first + wqe.length as usize])
    }

    /// Positions in progress, oldest first.
    pub(crate) fn in_progress(&self) -> impl Iterator<Item = u32> + use<> {
        let (head, count) = (self.head, self.next.wrapping_sub(self.head));
        (0..count).map(move |offset| head.wrapping_add(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sge(addr: u64) -> Sge {
        Sge { addr, len: 8, lkey: quipu_mem::Key(1) }
    }

    #[test]
    fn receives_come_out_in_order_and_capacity_is_exact() {
        let mut queue = RecvQueue::new(3, 2).unwrap();
        for wr_id in 0..3 {
            assert!(queue.push(wr_id, &[sge(wr_id), sge(wr_id + 100)]));
        }
        assert!(!queue.push(9, &[]));
        let mut receive = Receive::default();
        for wr_id in 0..3 {
            assert!(queue.take(&mut receive));
            assert_eq!((receive.wr_id, receive.sges[1].addr), (wr_id, wr_id + 100));
        }
        assert!(!queue.take(&mut receive));
    }

    #[test]
    fn what_there_is_no_memory_for_is_refused() {
        assert_eq!(copies(0u64, usize::MAX / 16).err(), Some(NO_MEMORY));
        assert_eq!(copies(7, 3).unwrap()[..], [7; 3]);
        assert_eq!(zeros(usize::MAX / 2).err(), Some(NO_MEMORY));
        assert_eq!(zeros(3).unwrap()[..], [0; 3]);
    }

    #[test]
    fn resizing_keeps_what_is_queued() {
        let mut queue = RecvQueue::new(4, 1).unwrap();
        let mut receive = Receive::default();
        for wr_id in 0..6 {
            assert!(queue.push(wr_id, &[sge(wr_id)]));
            if wr_id < 2 {
                queue.take(&mut receive);
            }
        }
        assert!(queue.resized(3).is_err());
        let mut queue = queue.resized(16).unwrap();
        for wr_id in 2..6 {
            assert!(queue.take(&mut receive));
            assert_eq!(receive.wr_id, wr_id);
        }
    }

    #[test]
    fn inline_bytes_are_copied_at_posting() {
        let mut queue = SendQueue::new(2, 1, 16).unwrap();
        let mut bytes = *b"hello";
        let wr = SendWr {
            wr_id: 1,
            to: To::Peer,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Inline(&bytes),
        };
        assert!(queue.push(&wr, 5));
        bytes.fill(0);
        assert_eq!(queue.inline(0), Some(&b"hello"[..]));
        assert_eq!(queue.sges(0), &[]);
        let wr = SendWr {
            wr_id: 2,
            to: To::Peer,
            op: SendOp::Send,
            flags: SendFlags::empty(),
            payload: Payload::Sges(&[sge(5)]),
        };
        assert!(queue.push(&wr, 8));
        assert!(!queue.push(&wr, 8));
        assert_eq!((queue.inline(1), queue.sges(1).len()), (None, 1));
    }
}
