//! Single-producer single-consumer rings inside a [`Segment`](crate::Segment), between two engines of
//! which the other may be hostile.
//!
//! Everything in the segment is position independent, and everything read from it is copied out once
//! and then validated; indexes are masked. A hostile peer can give wrong data and nothing else: no
//! access outside the segment, no endless loop, no panic. Numbers in the segment are in native byte
//! order, as both engines run on one machine.
//!
//! A [`Channel`] is full duplex. Each direction has a control block ([`ProducerControl`],
//! [`ConsumerControl`]), a [slot ring](SlotProducer) with a [byte ring](ByteProducer) beside it for
//! requests, and another such pair for responses.
//!
//! # Sleeping
//!
//! The consumer of a direction sleeps, and the producer wakes it, by this rule, which loses no
//! wake-up because each side has a sequentially consistent fence between its write and its read:
//!
//! - producer: push; then [`ProducerControl::must_ring`] (fence, read `armed`), and ring the bell if
//!   it says so;
//! - consumer: [`ConsumerControl::arm`] (write `armed`, fence); look into the rings again; if they
//!   are empty, park; when awake, [`ConsumerControl::disarm`].
//!
//! The producer may ask once for a batch of pushes, since the last push is what the fence covers. A
//! consumer that would rather sleep for a batch says how many requests are enough
//! ([`ConsumerControl::arm_at`]); a producer that knows of that ([`ProducerControl::must_ring_at`])
//! leaves it alone before. It must not sleep without a limit then: whether so many come, nobody promises.

mod byte;
mod channel;
mod control;
mod lane;
mod slot;

use thiserror::Error;

pub use byte::{ByteConsumer, ByteProducer};
pub use channel::{Channel, ChannelConfig, ChannelError, ChannelLayout, Incoming, Outgoing, Side};
pub use control::{ConsumerControl, ProducerControl, Stall};
pub use lane::{
    LANE_BYTES, LINE_WORDS, LaneConsumer, LaneProducer, Line, Pushed, SLOTS as LANE_SLOTS,
};
pub use slot::{INLINE_MAX, Offer, SlotConsumer, SlotHeader, SlotProducer, SlotWriter};

/// Why a ring did not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RingError {
    /// There is no room now.
    #[error("the ring is full")]
    Full,
    /// There would be no room in an empty ring either.
    #[error("the payload is larger than the ring takes")]
    TooLong,
    /// The peer wrote something impossible into the shared memory.
    #[error("the peer corrupted the ring")]
    Corrupt,
}

/// The bytes that fields of different owners keep apart: two cache lines, as adjacent lines are
/// fetched in pairs.
pub(crate) const LINE: usize = 128;
