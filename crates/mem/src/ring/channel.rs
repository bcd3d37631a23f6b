//! A full duplex channel in a segment: where everything is, and the ends of its rings.

use core::sync::atomic::Ordering;

use thiserror::Error;

use super::LINE;
use super::byte::{ByteBuffer, ByteConsumer, ByteProducer};
use super::control::{CONTROL_LEN, ConsumerControl, ControlWords, ProducerControl};
use super::slot::{SLOT_LEN, SlotConsumer, SlotProducer};
use crate::segment::{Segment, SegmentError};

/// Says that a channel is there and in which layout: the last byte is its version.
const MAGIC: u64 = u64::from_be_bytes(*b"quipuch\x01");

/// Bytes of the first page, which holds the header and both control blocks.
const HEAD_LEN: usize = 4096;

/// The sizes of a channel's rings; both sides must use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelConfig {
    /// Slots for requests in each direction: a power of two from 2 to 2^16.
    pub request_slots: u32,
    /// Bytes for payloads of requests in each direction: a power of two from 64 to 2^30.
    pub request_bytes: u32,
    /// Slots for responses in each direction, as for requests.
    pub response_slots: u32,
    /// Bytes for payloads of responses in each direction, as for requests.
    pub response_bytes: u32,
}

impl Default for ChannelConfig {
    fn default() -> ChannelConfig {
        ChannelConfig {
            request_slots: 256,
            request_bytes: 64 << 10,
            response_slots: 32,
            response_bytes: 64 << 10,
        }
    }
}

/// Why a channel cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ChannelError {
    /// A ring's size is no power of two or out of range.
    #[error("the size of a ring is not a power of two in range")]
    Config,
    /// The segment is too small, not aligned to 128 bytes there, or read-only.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// There is no channel of these sizes in the segment.
    #[error("the peer has set up no such channel")]
    Mismatch,
}

/// Which end of a channel: the sides are alike, only their directions are swapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that created the channel.
    Creator,
    /// The side that attached to it.
    Attacher,
}

/// Where the parts of a direction are, in bytes from the start of the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Direction {
    control: usize,
    requests: usize,
    responses: usize,
    request_bytes: usize,
    response_bytes: usize,
}

/// Where the parts of a channel are. All that an idle channel touches is its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelLayout {
    config: ChannelConfig,
    /// From the creator, then from the attacher.
    directions: [Direction; 2],
    len: usize,
}

impl ChannelLayout {
    /// Lays out a channel. Each ring starts on a page of its own, since what is not used is not
    /// touched.
    pub fn new(config: ChannelConfig) -> Result<ChannelLayout, ChannelError> {
        for slots in [config.request_slots, config.response_slots] {
            if !slots.is_power_of_two() || !(2..=1 << 16).contains(&slots) {
                return Err(ChannelError::Config);
            }
        }
        for bytes in [config.request_bytes, config.response_bytes] {
            if !bytes.is_power_of_two() || !(64..=1 << 30).contains(&bytes) {
                return Err(ChannelError::Config);
            }
        }
        let mut len = HEAD_LEN;
        let mut place = |bytes: usize| {
            let start = len;
            len += bytes.next_multiple_of(4096);
            start
        };
        let directions = [0, 1].map(|i| Direction {
            control: LINE + i * CONTROL_LEN,
            requests: place(config.request_slots as usize * SLOT_LEN),
            responses: place(config.response_slots as usize * SLOT_LEN),
            request_bytes: place(config.request_bytes as usize),
            response_bytes: place(config.response_bytes as usize),
        });
        Ok(ChannelLayout { config, directions, len })
    }

    /// Bytes of the whole channel, a multiple of 4096.
    pub fn total_len(&self) -> usize {
        self.len
    }

    /// The sizes it was made from.
    pub fn config(&self) -> ChannelConfig {
        self.config
    }

    /// What the header says about the sizes.
    fn sizes(&self) -> [u64; 2] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let config = self.config;
        [
            pair(config.request_slots, config.response_slots),
            pair(config.request_bytes, config.response_bytes),
        ]
    }
}

/// The rings that this side fills.
#[derive(Debug)]
pub struct Outgoing {
    /// Requests to the peer.
    pub requests: SlotProducer,
    /// Their payloads.
    pub request_bytes: ByteProducer,
    /// Responses to the peer's requests.
    pub responses: SlotProducer,
    /// Their payloads.
    pub response_bytes: ByteProducer,
    /// The producer's view of the direction.
    pub control: ProducerControl,
}

/// The rings that this side drains.
#[derive(Debug)]
pub struct Incoming {
    /// Requests of the peer.
    pub requests: SlotConsumer,
    /// Their payloads.
    pub request_bytes: ByteConsumer,
    /// The peer's responses to this side's requests.
    pub responses: SlotConsumer,
    /// Their payloads.
    pub response_bytes: ByteConsumer,
    /// The consumer's view of the direction.
    pub control: ConsumerControl,
}

impl Incoming {
    /// Gives everything popped and released back to the peer; call it at the end of a batch. It
    /// costs nothing where nothing was.
    #[inline]
    pub fn publish(&mut self) {
        self.requests.publish();
        self.request_bytes.publish();
        self.responses.publish();
        self.response_bytes.publish();
    }
}

/// One end of a channel.
#[derive(Debug)]
pub struct Channel {
    /// The rings that this side fills.
    pub outgoing: Outgoing,
    /// The rings that this side drains.
    pub incoming: Incoming,
}

impl Channel {
    /// Sets up a channel at `offset` of a segment, where [`ChannelLayout::total_len`] zeroed bytes
    /// are, and gives the creator's end. Only the first page is touched.
    pub fn create(
        segment: &Segment,
        offset: usize,
        config: ChannelConfig,
    ) -> Result<Channel, ChannelError> {
        let layout = ChannelLayout::new(config)?;
        let part = Self::part(segment, offset, &layout)?;
        let channel = Self::open(&part, &layout, Side::Creator)?;
        let [slots, bytes] = layout.sizes();
        part.u64_at(8)?.store(slots, Ordering::Relaxed);
        part.u64_at(16)?.store(bytes, Ordering::Relaxed);
        part.u64_at(0)?.store(MAGIC, Ordering::Release);
        Ok(channel)
    }

    /// Sets up a channel whose two directions are one, so that what is pushed comes back at the same end:
    /// for a queue pair that is connected to itself. As [`Channel::create`] otherwise.
    pub fn loopback(
        segment: &Segment,
        offset: usize,
        config: ChannelConfig,
    ) -> Result<Channel, ChannelError> {
        let layout = ChannelLayout::new(config)?;
        let part = Self::part(segment, offset, &layout)?;
        Ok(Channel {
            outgoing: Self::outgoing(&part, &layout, 0)?,
            incoming: Self::incoming(&part, &layout, 0)?,
        })
    }

    /// Gives the attacher's end of a channel that the peer created. The sizes are those agreed with
    /// the peer; what the segment says is only compared with them. Each end is made once.
    pub fn attach(
        segment: &Segment,
        offset: usize,
        config: ChannelConfig,
    ) -> Result<Channel, ChannelError> {
        let layout = ChannelLayout::new(config)?;
        let part = Self::part(segment, offset, &layout)?;
        let magic = part.u64_at(0)?.load(Ordering::Acquire);
        let slots = part.u64_at(8)?.load(Ordering::Relaxed);
        let bytes = part.u64_at(16)?.load(Ordering::Relaxed);
        if magic != MAGIC || [slots, bytes] != layout.sizes() {
            return Err(ChannelError::Mismatch);
        }
        Self::open(&part, &layout, Side::Attacher)
    }

    fn part(
        segment: &Segment,
        offset: usize,
        layout: &ChannelLayout,
    ) -> Result<Segment, ChannelError> {
        let part = segment.slice(offset, layout.len)?;
        if part.addr() & (LINE - 1) != 0 {
            return Err(SegmentError::Misaligned.into());
        }
        Ok(part)
    }

    fn open(part: &Segment, layout: &ChannelLayout, side: Side) -> Result<Channel, ChannelError> {
        let (ours, theirs) = match side {
            Side::Creator => (0, 1),
            Side::Attacher => (1, 0),
        };
        Ok(Channel {
            outgoing: Self::outgoing(part, layout, ours)?,
            incoming: Self::incoming(part, layout, theirs)?,
        })
    }

    fn outgoing(
        part: &Segment,
        layout: &ChannelLayout,
        direction: usize,
    ) -> Result<Outgoing, ChannelError> {
        let (at, config) = (layout.directions[direction], layout.config);
        let words = ControlWords::at(part, at.control)?;
        let slots = |offset, count: u32| part.words(offset, count as usize * SLOT_LEN / 8);
        let bytes = |offset, len: u32| part.slice(offset, len as usize).map(ByteBuffer::new);
        Ok(Outgoing {
            requests: SlotProducer::new(
                slots(at.requests, config.request_slots)?,
                config.request_slots,
                words.requests_consumed.clone(),
                words.requests_started.clone(),
            ),
            request_bytes: ByteProducer::new(
                bytes(at.request_bytes, config.request_bytes)?,
                words.request_bytes.clone(),
            ),
            responses: SlotProducer::new(
                slots(at.responses, config.response_slots)?,
                config.response_slots,
                words.responses_consumed.clone(),
                words.responses_started.clone(),
            ),
            response_bytes: ByteProducer::new(
                bytes(at.response_bytes, config.response_bytes)?,
                words.response_bytes.clone(),
            ),
            control: ProducerControl::new(&words),
        })
    }

    fn incoming(
        part: &Segment,
        layout: &ChannelLayout,
        direction: usize,
    ) -> Result<Incoming, ChannelError> {
        let (at, config) = (layout.directions[direction], layout.config);
        let words = ControlWords::at(part, at.control)?;
        let slots = |offset, count: u32| part.words(offset, count as usize * SLOT_LEN / 8);
        let bytes = |offset, len: u32| part.slice(offset, len as usize).map(ByteBuffer::new);
        Ok(Incoming {
            requests: SlotConsumer::new(
                slots(at.requests, config.request_slots)?,
                config.request_slots,
                words.requests_consumed.clone(),
                words.requests_started.clone(),
            ),
            request_bytes: ByteConsumer::new(
                bytes(at.request_bytes, config.request_bytes)?,
                words.request_bytes.clone(),
            ),
            responses: SlotConsumer::new(
                slots(at.responses, config.response_slots)?,
                config.response_slots,
                words.responses_consumed.clone(),
                words.responses_started.clone(),
            ),
            response_bytes: ByteConsumer::new(
                bytes(at.response_bytes, config.response_bytes)?,
                words.response_bytes.clone(),
            ),
            control: ConsumerControl::new(&words),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::SlotHeader;

    #[test]
    fn parts_do_not_overlap_and_the_head_is_one_page() {
        let layout = ChannelLayout::new(ChannelConfig::default()).unwrap();
        let config = layout.config;
        let mut parts = vec![(0, LINE)];
        for at in layout.directions {
            assert!(at.control + CONTROL_LEN <= HEAD_LEN);
            parts.push((at.control, CONTROL_LEN));
            parts.push((at.requests, config.request_slots as usize * SLOT_LEN));
            parts.push((at.responses, config.response_slots as usize * SLOT_LEN));
            parts.push((at.request_bytes, config.request_bytes as usize));
            parts.push((at.response_bytes, config.response_bytes as usize));
        }
        parts.sort();
        for pair in parts.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0);
        }
        let last = parts.last().unwrap();
        assert_eq!(last.0 + last.1, layout.total_len());
    }

    #[test]
    fn sizes_must_be_legal_and_agreed() {
        let config = ChannelConfig { request_slots: 16, request_bytes: 4096, ..Default::default() };
        let layout = ChannelLayout::new(config).unwrap();
        let segment = Segment::heap(layout.total_len() + 4096);
        assert_eq!(
            Channel::attach(&segment, 4096, config).err(),
            Some(ChannelError::Mismatch),
            "nothing is there yet"
        );
        Channel::create(&segment, 4096, config).unwrap();
        Channel::attach(&segment, 4096, config).unwrap();
        let other = ChannelConfig { request_slots: 8, ..config };
        assert_eq!(Channel::attach(&segment, 4096, other).err(), Some(ChannelError::Mismatch));
        for bad in [
            ChannelConfig { request_slots: 3, ..config },
            ChannelConfig { response_slots: 1, ..config },
            ChannelConfig { request_bytes: 32, ..config },
            ChannelConfig { response_bytes: 100, ..config },
        ] {
            assert_eq!(Channel::create(&segment, 0, bad).err(), Some(ChannelError::Config));
        }
        let error = Channel::create(&segment, 8192, config).err();
        assert_eq!(error, Some(ChannelError::Segment(SegmentError::OutOfBounds)));
        let error = Channel::create(&segment, 64, config).err();
        assert_eq!(error, Some(ChannelError::Segment(SegmentError::Misaligned)));
    }

    #[test]
    fn what_one_side_sends_the_other_receives() {
        let config = ChannelConfig::default();
        let segment = Segment::heap(ChannelLayout::new(config).unwrap().total_len());
        let mut creator = Channel::create(&segment, 0, config).unwrap();
        let mut attacher = Channel::attach(&segment, 0, config).unwrap();
        let header = |imm| SlotHeader { imm, ..Default::default() };
        creator.outgoing.requests.push(&header(1), &[]).unwrap();
        creator.outgoing.responses.push(&header(2), &[]).unwrap();
        attacher.outgoing.requests.push(&header(3), &[]).unwrap();
        attacher.outgoing.responses.push(&header(4), &[]).unwrap();
        assert_eq!(attacher.incoming.requests.peek().unwrap().imm, 1);
        assert_eq!(attacher.incoming.responses.peek().unwrap().imm, 2);
        assert_eq!(creator.incoming.requests.peek().unwrap().imm, 3);
        assert_eq!(creator.incoming.responses.peek().unwrap().imm, 4);
        creator.outgoing.control.guard().enter();
        let wait = attacher.incoming.control.guard().sample();
        assert_eq!(
            wait.poll(attacher.incoming.control.guard(), || false),
            crate::GuardState::NotYet
        );
    }
}
