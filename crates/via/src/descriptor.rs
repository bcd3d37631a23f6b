//! Descriptors: the bytes that a program writes, as a request.

use crate::attributes::Attributes;
use crate::codes::{Reliability, Status};

/// Bytes of a control segment.
pub const CONTROL_LEN: usize = 32;
/// Bytes of an address or data segment.
pub const SEGMENT_LEN: usize = 16;
/// Most segments of a descriptor, the address segment of an RDMA operation included.
pub const MAX_SEGMENTS: u16 = 64;

const OP_MASK: u16 = 3;
const IMMEDIATE: u16 = 4;
const FENCE: u16 = 8;
/// An extension of Quipu: the data are copied when the descriptor is posted.
const INLINE: u16 = 0x20;
/// Most bytes of a descriptor whose data are copied when it is posted.
pub const MAX_INLINE: u32 = 128;

/// The control segment, without what the provider writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    /// Segments that follow.
    pub segments: u16,
    /// The operation and its flags.
    pub control: u16,
    /// Immediate data.
    pub immediate: u32,
    /// What the program gives as the length of the message.
    pub length: u32,
}

impl Control {
    /// Reads a control segment. Numbers have the byte order of the machine.
    pub fn parse(bytes: &[u8; CONTROL_LEN]) -> Self {
        let half = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Self { segments: half(12), control: half(14), immediate: word(20), length: word(24) }
    }
}

/// Memory that a segment names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Address of the first byte.
    pub addr: u64,
    /// Handle of the registered memory.
    pub handle: u32,
    /// Bytes; not meaningful in an address segment.
    pub len: u32,
}

impl Segment {
    /// Reads a segment.
    pub fn parse(bytes: &[u8; SEGMENT_LEN]) -> Self {
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let mut addr = [0; 8];
        addr.copy_from_slice(&bytes[..8]);
        Self { addr: u64::from_ne_bytes(addr), handle: word(8), len: word(12) }
    }
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Takes the peer's next message.
    Receive,
    /// Sends a message.
    Send,
    /// Writes the peer's memory at this place.
    Write(Segment),
    /// Reads the peer's memory at this place.
    Read(Segment),
}

impl Operation {
    /// The operation's bits of a status word.
    pub fn status(self) -> Status {
        match self {
            Self::Receive => Status::OP_RECEIVE,
            Self::Send => Status::empty(),
            Self::Write(_) => Status::OP_RDMA_WRITE,
            Self::Read(_) => Status::OP_RDMA_READ,
        }
    }

    /// The operation that a control word names, for the status of a descriptor that is malformed.
    pub fn status_of(control: u16, is_receive: bool) -> Status {
        match control & OP_MASK {
            _ if is_receive => Status::OP_RECEIVE,
            1 => Status::OP_RDMA_WRITE,
            2 => Status::OP_RDMA_READ,
            _ => Status::empty(),
        }
    }
}

/// A descriptor that is well formed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// What it does.
    pub operation: Operation,
    /// Immediate data for the peer.
    pub immediate: Option<u32>,
    /// Whether it waits for earlier RDMA reads.
    pub fence: bool,
    /// Local memory, in the order of the message.
    pub local: Vec<Segment>,
    /// Bytes of the local segments together.
    pub len: u32,
    /// Whether the data are copied when the descriptor is posted.
    pub is_inline: bool,
    /// Those data, which stand for the local segments.
    pub inline: Vec<u8>,
}

/// What a descriptor is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Attributes of the VI.
    pub attributes: Attributes,
    /// Whether the length of the control segment must be the sum of the segments.
    pub strict: bool,
}

impl Rules {
    /// Reads the descriptor of a send queue.
    ///
    /// # Errors
    ///
    /// [`Status::FORMAT_ERROR`].
    pub fn send(&self, control: Control, segments: &[Segment]) -> Result<Request, Status> {
        let has_immediate = control.control & IMMEDIATE != 0;
        let (first, rest) = match segments.split_first() {
            Some((first, rest)) => (Some(*first), rest),
            None => (None, segments),
        };
        let (operation, local) = match (control.control & OP_MASK, first) {
            (0, _) => (Operation::Send, segments),
            (1, Some(remote)) => (Operation::Write(remote), rest),
            (2, Some(remote)) if !has_immediate && self.may_read() => {
                (Operation::Read(remote), rest)
            }
            _ => return Err(Status::FORMAT_ERROR),
        };
        let len = self.len(control, local)?;
        let is_inline = control.control & INLINE != 0;
        if is_inline && (len > MAX_INLINE || matches!(operation, Operation::Read(_))) {
            return Err(Status::FORMAT_ERROR);
        }
        Ok(Request {
            operation,
            immediate: has_immediate.then_some(control.immediate),
            fence: control.control & FENCE != 0,
            local: local.to_vec(),
            len,
            is_inline,
            inline: Vec::new(),
        })
    }

    /// Reads the descriptor of a receive queue.
    ///
    /// # Errors
    ///
    /// [`Status::FORMAT_ERROR`].
    pub fn receive(&self, control: Control, segments: &[Segment]) -> Result<Request, Status> {
        if control.control & OP_MASK != 0 {
            return Err(Status::FORMAT_ERROR);
        }
        // A receive may be larger than a transfer: only its sum must be a number of 32 bits.
        let len = sum(segments).ok_or(Status::FORMAT_ERROR)?;
        let local = segments.to_vec();
        Ok(Request {
            operation: Operation::Receive,
            immediate: None,
            fence: false,
            local,
            len,
            is_inline: false,
            inline: Vec::new(),
        })
    }

    fn may_read(&self) -> bool {
        self.attributes.reliability != Reliability::Unreliable
    }

    fn len(&self, control: Control, local: &[Segment]) -> Result<u32, Status> {
        let len = sum(local).ok_or(Status::FORMAT_ERROR)?;
        let fits = u64::from(len) <= self.attributes.max_transfer;
        let is_said = !self.strict || control.length == len;
        if fits && is_said { Ok(len) } else { Err(Status::FORMAT_ERROR) }
    }
}

/// Bytes of segments together; none if that is no number of 32 bits.
fn sum(segments: &[Segment]) -> Option<u32> {
    segments.iter().try_fold(0_u32, |sum, segment| sum.checked_add(segment.len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(reliability: Reliability, strict: bool) -> Rules {
        let attributes = Attributes {
            reliability,
            max_transfer: 1000,
            qos: 0,
            rdma_write: false,
            rdma_read: false,
        };
        Rules { attributes, strict }
    }

    fn control(control: u16, segments: u16) -> Control {
        Control { segments, control, immediate: 7, length: 0 }
    }

    const SEGMENT: Segment = Segment { addr: 0x1000, handle: 3, len: 400 };

    #[test]
    fn bytes_of_a_program_are_read_at_their_places() {
        let mut bytes = [0; CONTROL_LEN];
        bytes[12..14].copy_from_slice(&2_u16.to_ne_bytes());
        bytes[14..16].copy_from_slice(&5_u16.to_ne_bytes());
        bytes[20..24].copy_from_slice(&0xabcd_u32.to_ne_bytes());
        bytes[24..28].copy_from_slice(&99_u32.to_ne_bytes());
        let read = Control::parse(&bytes);
        assert_eq!(read, Control { segments: 2, control: 5, immediate: 0xabcd, length: 99 });
        let mut bytes = [0; SEGMENT_LEN];
        bytes[..8].copy_from_slice(&0x1000_u64.to_ne_bytes());
        bytes[8..12].copy_from_slice(&3_u32.to_ne_bytes());
        bytes[12..].copy_from_slice(&400_u32.to_ne_bytes());
        assert_eq!(Segment::parse(&bytes), SEGMENT);
    }

    #[test]
    fn operations_take_the_segments_that_they_need() {
        let rules = rules(Reliability::Delivery, false);
        let send = rules.send(control(0, 2), &[SEGMENT; 2]).unwrap();
        assert_eq!((send.len, send.operation, send.immediate), (800, Operation::Send, None));
        let empty = rules.send(control(4, 0), &[]).unwrap();
        assert_eq!((empty.len, empty.immediate), (0, Some(7)));
        let write = rules.send(control(1 | 8, 2), &[SEGMENT; 2]).unwrap();
        assert_eq!((write.len, write.operation), (400, Operation::Write(SEGMENT)));
        assert!(write.fence);
        let read = rules.send(control(2, 1), &[SEGMENT]).unwrap();
        assert_eq!((read.len, read.operation), (0, Operation::Read(SEGMENT)));
    }

    #[test]
    fn malformed_descriptors_are_format_errors() {
        let reliable = rules(Reliability::Reception, false);
        let wrong = |rules: Rules, word, segments: &[Segment]| {
            rules.send(control(word, segments.len() as u16), segments).unwrap_err()
        };
        // No such operation; RDMA without an address; a read with immediate data.
        for (word, segments) in [(3, &[SEGMENT][..]), (1, &[]), (2, &[]), (2 | 4, &[SEGMENT])] {
            assert_eq!(wrong(reliable, word, segments), Status::FORMAT_ERROR);
        }
        // Longer than a transfer; a sum beyond 32 bits.
        assert_eq!(wrong(reliable, 0, &[SEGMENT; 3]), Status::FORMAT_ERROR);
        let huge = Segment { len: u32::MAX, ..SEGMENT };
        assert_eq!(wrong(reliable, 0, &[huge, SEGMENT]), Status::FORMAT_ERROR);
        assert!(reliable.receive(control(0, 2), &[huge, SEGMENT]).is_err());
        assert!(reliable.receive(control(1, 1), &[SEGMENT]).is_err());
        assert!(reliable.receive(control(0, 3), &[SEGMENT; 3]).is_ok());
        let unreliable = rules(Reliability::Unreliable, false);
        assert_eq!(wrong(unreliable, 2, &[SEGMENT]), Status::FORMAT_ERROR);
    }

    #[test]
    fn short_sends_and_writes_may_be_inline() {
        let rules = rules(Reliability::Delivery, false);
        let short = Segment { len: MAX_INLINE / 2, ..SEGMENT };
        for (word, segments) in [(0x20, &[short; 2][..]), (0x21, &[SEGMENT, short, short])] {
            let request = rules.send(control(word, segments.len() as u16), segments).unwrap();
            assert!(request.is_inline && request.len == MAX_INLINE);
        }
        // A read has no data to send; one byte too many.
        let one = Segment { len: 1, ..SEGMENT };
        for (word, segments) in [(0x22, &[SEGMENT, short][..]), (0x20, &[short, short, one])] {
            let refused = rules.send(control(word, segments.len() as u16), segments);
            assert_eq!(refused, Err(Status::FORMAT_ERROR));
        }
        assert!(!rules.send(control(0, 1), &[short]).unwrap().is_inline);
    }

    #[test]
    fn only_the_strict_mode_compares_the_length() {
        let strict = rules(Reliability::Delivery, true);
        assert!(strict.send(control(0, 1), &[SEGMENT]).is_err());
        let right = Control { length: 400, ..control(0, 1) };
        assert!(strict.send(right, &[SEGMENT]).is_ok());
    }
}
