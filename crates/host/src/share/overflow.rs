//! Orders that wait for room in the ring, in the order in which they were given: never more requests than the
//! queues of the program hold, and that one of its queue pairs fail once for each time that it can.

use std::collections::VecDeque;
use std::net::SocketAddr;

use quipu_mem::ring::RingError;
use quipu_nic::{Payload, SendFlags, Sge};

use super::slots::{Order, Request, Tag};

/// An order with what it names.
#[derive(Debug)]
enum Waiting {
    Post { tag: Tag, flags: SendFlags, to: Option<SocketAddr>, payload: Held },
    Fail(u32),
}

#[derive(Debug)]
enum Held {
    Sges(Box<[Sge]>),
    Inline(Box<[u8]>),
}

impl Waiting {
    fn order(&self) -> Order<'_> {
        match *self {
            Self::Post { tag, flags, to, ref payload } => {
                let payload = match payload {
                    Held::Sges(sges) => Payload::Sges(sges),
                    Held::Inline(bytes) => Payload::Inline(bytes),
                };
                Order::Post(Request { tag, flags, to, payload })
            }
            Self::Fail(qp) => Order::Fail(qp),
        }
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

    /// Puts an order behind the others.
    pub(super) fn push(&mut self, order: &Order<'_>) {
        self.waiting.push_back(match *order {
            Order::Post(Request { tag, flags, to, payload }) => {
                let payload = match payload {
                    Payload::Sges(sges) => Held::Sges(sges.into()),
                    Payload::Inline(bytes) => Held::Inline(bytes.into()),
                };
                Waiting::Post { tag, flags, to, payload }
            }
            Order::Fail(qp) => Waiting::Fail(qp),
        });
    }

    /// Hands orders to `put`, the oldest first, until it has no room; whether it took any.
    ///
    /// # Errors
    ///
    /// That of `put`, if it is another.
    pub(super) fn drain(
        &mut self,
        mut put: impl FnMut(&Order<'_>) -> Result<(), RingError>,
    ) -> Result<bool, RingError> {
        let mut any = false;
        while let Some(first) = self.waiting.front() {
            match put(&first.order()) {
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
            let request = Request { tag: tag(sequence), flags, to, payload };
            overflow.push(&Order::Post(request));
        }
        let (end, mut taken, mut room) = (overflow.end(), Vec::new(), 3);
        let mut put = |order: &Order<'_>| {
            let Order::Post(request) = order else { unreachable!("nothing has failed") };
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
        assert_eq!([(); 2].map(|()| overflow.drain(&mut put)), [Ok(true), Ok(false)]);
        assert_eq!(taken, [0, 1, 2].map(tag));
        assert!(!overflow.is_empty() && !overflow.has_left(end));
        assert_eq!(overflow.drain(|_| Err(RingError::Corrupt)), Err(RingError::Corrupt));
        overflow.clear();
        assert!(overflow.is_empty() && overflow.has_left(end));
    }
}
