//! Requests that wait for room in the ring, in the order in which they were posted. There are never more of
//! them than the queues of the program hold.

use std::collections::VecDeque;
use std::net::SocketAddr;

use quipu_mem::ring::RingError;
use quipu_nic::{Payload, SendFlags, Sge};

use super::slots::{Request, Tag};

/// A request with what it names.
#[derive(Debug)]
struct Waiting {
    tag: Tag,
    flags: SendFlags,
    to: Option<SocketAddr>,
    payload: Held,
}

#[derive(Debug)]
enum Held {
    Sges(Box<[Sge]>),
    Inline(Box<[u8]>),
}

impl Waiting {
    fn request(&self) -> Request<'_> {
        let payload = match &self.payload {
            Held::Sges(sges) => Payload::Sges(sges),
            Held::Inline(bytes) => Payload::Inline(bytes),
        };
        Request { tag: self.tag, flags: self.flags, to: self.to, payload }
    }
}

/// The queue behind the ring.
#[derive(Debug, Default)]
pub(super) struct Overflow {
    waiting: VecDeque<Waiting>,
    /// How many have left it.
    left: u64,
}

impl Overflow {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Puts a request behind the others.
    pub(super) fn push(&mut self, request: &Request<'_>) {
        let payload = match request.payload {
            Payload::Sges(sges) => Held::Sges(sges.into()),
            Payload::Inline(bytes) => Held::Inline(bytes.into()),
        };
        let Request { tag, flags, to, .. } = *request;
        self.waiting.push_back(Waiting { tag, flags, to, payload });
    }

    /// Hands requests to `post`, the oldest first, until it has no room; whether it took any.
    ///
    /// # Errors
    ///
    /// That of `post`, if it is another.
    pub(super) fn drain(
        &mut self,
        mut post: impl FnMut(&Request<'_>) -> Result<(), RingError>,
    ) -> Result<bool, RingError> {
        let mut any = false;
        while let Some(first) = self.waiting.front() {
            match post(&first.request()) {
                Ok(()) => drop(self.waiting.pop_front()),
                Err(RingError::Full) => break,
                Err(error) => return Err(error),
            }
            (any, self.left) = (true, self.left + 1);
        }
        Ok(any)
    }

    /// Where the last that waits now will have left.
    pub(super) fn end(&self) -> u64 {
        self.left + self.waiting.len() as u64
    }

    /// Whether everything before such an end has left.
    pub(super) fn has_left(&self, end: u64) -> bool {
        self.left >= end
    }

    /// Forgets everything that waits.
    pub(super) fn clear(&mut self) {
        self.left = self.end();
        self.waiting = VecDeque::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(sequence: u32) -> Tag {
        Tag { qp: 5, receive: false, sequence }
    }

    #[test]
    fn what_waits_leaves_in_order_and_whole() {
        let mut overflow = Overflow::default();
        let sges = [Sge { addr: 4096, len: 8, ..Sge::default() }];
        let to = Some(SocketAddr::from(([10, 0, 0, 1], 7)));
        for sequence in 0..4 {
            let payload = match sequence % 2 {
                0 => Payload::Inline(b"knot"),
                _ => Payload::Sges(&sges),
            };
            let flags = SendFlags::INLINE;
            overflow.push(&Request { tag: tag(sequence), flags, to, payload });
        }
        let (end, mut taken, mut room) = (overflow.end(), Vec::new(), 3);
        let mut post = |request: &Request<'_>| {
            if room == 0 {
                return Err(RingError::Full);
            }
            room -= 1;
            let whole = match request.payload {
                Payload::Inline(bytes) => bytes == b"knot",
                Payload::Sges(list) => list == sges,
            };
            assert!(whole && request.to == to && request.flags == SendFlags::INLINE);
            taken.push(request.tag);
            Ok(())
        };
        assert_eq!([(); 2].map(|()| overflow.drain(&mut post)), [Ok(true), Ok(false)]);
        assert_eq!(taken, [0, 1, 2].map(tag));
        assert!(!overflow.is_empty() && !overflow.has_left(end));
        assert_eq!(overflow.drain(|_| Err(RingError::Corrupt)), Err(RingError::Corrupt));
        overflow.clear();
        assert!(overflow.is_empty() && overflow.has_left(end));
    }
}
