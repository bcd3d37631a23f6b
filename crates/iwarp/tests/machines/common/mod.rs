//! What the tests share: messages to send, a collector of what arrives, a reference remover of
//! markers.

use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, FlushRequest, Immediate, ReadRequest, TaggedOp,
    UntaggedOp,
};
use quipu_iwarp::wire::{Payload, Stag, ddp, mpa};
use quipu_iwarp::{
    Belonging, Extensions, Message, Negotiated, ProtocolError, Receiver, Segment, SendKind, Sender,
};

pub fn receiver() -> Receiver {
    Receiver::new(&Negotiated::plain(), Extensions::ALL)
}

pub fn sender() -> Sender {
    Sender::new(&Negotiated::plain(), quipu_iwarp::DEFAULT_MAX_ULPDU)
}

/// Frames all of `payload` with buffers of `room` bytes, and appends it to `stream`.
pub fn send(
    sender: &mut Sender,
    mut msg: Message,
    payload: &[u8],
    room: usize,
    stream: &mut Vec<u8>,
) {
    let mut out = vec![0xee; room];
    let mut sent = 0;
    loop {
        let staged = sender
            .segment(&mut msg, &mut out, (payload.len() - sent) as u32, |place| {
                place.copy_from_slice(&payload[sent..sent + place.len()]);
            })
            .expect("room for a segment");
        sent += staged.payload as usize;
        stream.extend(&out[..staged.bytes]);
        out.fill(0xee);
        if staged.last {
            assert_eq!(sent, payload.len());
            return;
        }
    }
}

pub fn emitted(payload: &impl Payload) -> Vec<u8> {
    let mut out = vec![0; payload.wire_len()];
    payload.emit(&mut out);
    out
}

/// One FPDU with any header, legal or not.
pub fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut out = vec![0; mpa::fpdu_len(ulpdu.len())];
    out[..2].copy_from_slice(&(ulpdu.len() as u16).to_be_bytes());
    out[2..2 + ulpdu.len()].copy_from_slice(ulpdu);
    let covered = out.len() - 4;
    let crc = mpa::crc32c(&out[..covered]).to_le_bytes();
    out[covered..].copy_from_slice(&crc);
    out
}

pub fn untagged(header: ddp::Untagged, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![0; 18];
    header.emit(&mut ulpdu);
    ulpdu.extend(payload);
    fpdu(&ulpdu)
}

pub fn tagged(header: ddp::Tagged, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![0; 14];
    header.emit(&mut ulpdu);
    ulpdu.extend(payload);
    fpdu(&ulpdu)
}

pub fn first(op: UntaggedOp) -> ddp::Untagged {
    ddp::Untagged { last: true, rsvd_ulp: op.octet(), ulp: 0, qn: op.queue(), msn: 1, mo: 0 }
}

/// A message as a user of the protocol sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Msg {
    Write(u32, u64, Vec<u8>),
    ReadResponse(u32, u64, Vec<u8>),
    Send(SendKind, bool, Vec<u8>),
    Immediate(Immediate, bool),
    Read(ReadRequest),
    Atomic(AtomicRequest),
    AtomicResponse(AtomicResponse),
    Flush(FlushRequest),
    Control(Control),
}

impl Msg {
    pub fn frame(&self, sender: &mut Sender, room: usize, stream: &mut Vec<u8>) {
        let (msg, payload) = match self {
            Msg::Write(stag, to, payload) => {
                (sender.begin_tagged(TaggedOp::Write, Stag(*stag), *to), payload.clone())
            }
            Msg::ReadResponse(stag, to, payload) => {
                (sender.begin_tagged(TaggedOp::ReadResponse, Stag(*stag), *to), payload.clone())
            }
            Msg::Send(kind, solicited, payload) => {
                let (op, ulp) = match (*kind, *solicited) {
                    (SendKind::Plain, false) => (UntaggedOp::Send, 0),
                    (SendKind::Plain, true) => (UntaggedOp::SendSe, 0),
                    (SendKind::Invalidate(stag), false) => (UntaggedOp::SendInvalidate, stag.0),
                    (SendKind::Invalidate(stag), true) => (UntaggedOp::SendSeInvalidate, stag.0),
                    (SendKind::Immediate(imm), false) => (UntaggedOp::SendImm, imm),
                    (SendKind::Immediate(imm), true) => (UntaggedOp::SendImmSe, imm),
                };
                (sender.begin_untagged(op, ulp), payload.clone())
            }
            Msg::Immediate(immediate, solicited) => {
                let op = if *solicited { UntaggedOp::ImmediateSe } else { UntaggedOp::Immediate };
                (sender.begin_untagged(op, 0), emitted(immediate))
            }
            Msg::Read(request) => {
                (sender.begin_untagged(UntaggedOp::ReadRequest, 0), emitted(request))
            }
            Msg::Atomic(request) => {
                (sender.begin_untagged(UntaggedOp::AtomicRequest, 0), emitted(request))
            }
            Msg::Flush(request) => (sender.begin_untagged(UntaggedOp::Flush, 0), emitted(request)),
            Msg::AtomicResponse(response) => {
                (sender.begin_untagged(UntaggedOp::AtomicResponse, 0), emitted(response))
            }
            Msg::Control(control) => {
                (sender.begin_untagged(UntaggedOp::Control, 0), emitted(control))
            }
        };
        send(sender, msg, &payload, room, stream);
    }
}

/// Puts segments together again.
#[derive(Default)]
pub struct Collector {
    pub messages: Vec<Msg>,
    pub requests: u32,
    open: Option<Msg>,
}

impl Collector {
    pub fn take(&mut self, segment: Segment<'_>) {
        self.requests += u32::from(segment.ends_request());
        let (begun, last) = match segment {
            Segment::Write { stag, to, last, payload } => {
                (Msg::Write(stag.0, to, payload.to_vec()), last)
            }
            Segment::ReadResponse { stag, to, last, payload } => {
                (Msg::ReadResponse(stag.0, to, payload.to_vec()), last)
            }
            Segment::Send { kind, solicited, mo, last, payload, .. } => {
                let so_far = match &self.open {
                    Some(Msg::Send(_, _, bytes)) => bytes.len(),
                    _ => 0,
                };
                assert_eq!(mo as usize, so_far);
                (Msg::Send(kind, solicited, payload.to_vec()), last)
            }
            Segment::Immediate { solicited, immediate, .. } => {
                (Msg::Immediate(immediate, solicited), true)
            }
            Segment::ReadRequest { request, .. } => (Msg::Read(request), true),
            Segment::AtomicRequest { request, .. } => (Msg::Atomic(request), true),
            Segment::Flush { request, .. } => (Msg::Flush(request), true),
            Segment::AtomicResponse(response) => (Msg::AtomicResponse(response), true),
            Segment::Control(control) => (Msg::Control(control), true),
            Segment::Terminate(_) | Segment::Discarded { .. } => return,
        };
        let whole = match (self.open.take(), begun) {
            (None, begun) => begun,
            (Some(Msg::Write(s, to, mut bytes)), Msg::Write(stag, at, more)) => {
                assert_eq!((stag, at), (s, to.wrapping_add(bytes.len() as u64)));
                bytes.extend(more);
                Msg::Write(s, to, bytes)
            }
            (Some(Msg::ReadResponse(s, to, mut bytes)), Msg::ReadResponse(stag, at, more)) => {
                assert_eq!((stag, at), (s, to.wrapping_add(bytes.len() as u64)));
                bytes.extend(more);
                Msg::ReadResponse(s, to, bytes)
            }
            (Some(Msg::Send(kind, se, mut bytes)), Msg::Send(k, s, more)) => {
                assert_eq!((k, s), (kind, se));
                bytes.extend(more);
                Msg::Send(kind, se, bytes)
            }
            (Some(open), begun) => panic!("{begun:?} inside {open:?}"),
        };
        if last {
            self.messages.push(whole);
        } else {
            self.open = Some(whole);
        }
    }
}

impl Collector {
    /// Bytes that were put where they belong.
    pub fn place(&mut self, belonging: Belonging, more: &[u8]) {
        let (begun, bytes) = match (self.open.as_mut().expect("a message"), belonging) {
            (Msg::Write(s, begin, bytes), Belonging::Write { stag, to })
            | (Msg::ReadResponse(s, begin, bytes), Belonging::ReadResponse { stag, to }) => {
                assert_eq!(*s, stag.0);
                (to.wrapping_sub(*begin), bytes)
            }
            (Msg::Send(_, _, bytes), Belonging::Send { mo }) => (u64::from(mo), bytes),
            (open, belonging) => panic!("{belonging:?} inside {open:?}"),
        };
        assert_eq!(begun, bytes.len() as u64);
        bytes.extend(more);
    }
}

/// Gives all of `stream` to the receiver at once.
pub fn drain(
    receiver: &mut Receiver,
    mut stream: &[u8],
    mut each: impl FnMut(&mut Receiver, Segment<'_>),
) -> Result<(), ProtocolError> {
    while let Some((used, segment)) = receiver.next(stream)? {
        each(receiver, segment);
        stream = &stream[used..];
    }
    assert!(stream.is_empty(), "bytes left over");
    Ok(())
}

/// The reference for RFC 5044 4.3, written the other way round than the sender: looks at a whole
/// stream, checks each marker and CRC, and gives the same FPDUs without markers.
pub fn remove_markers(stream: &[u8]) -> Vec<u8> {
    // Stream positions of the bytes that are not in a marker.
    let data: Vec<usize> = (0..stream.len()).filter(|at| at % 512 >= 4).collect();
    let mut plain = Vec::new();
    let mut next = 0;
    while next < data.len() {
        let byte = |i: usize| stream[data[next + i]];
        let header_at = data[next];
        let ulpdu = usize::from(u16::from_be_bytes([byte(0), byte(1)]));
        let len = mpa::fpdu_len(ulpdu);
        let end = data[next + len - 1] + 1;
        let begin = if header_at % 512 == 4 { header_at - 4 } else { header_at };
        for marker in (begin..end).filter(|at| at % 512 == 0) {
            let pointer = marker.saturating_sub(header_at) as u16;
            let parsed = mpa::Marker::parse(&stream[marker..marker + 4]).expect("a marker");
            assert_eq!(parsed.fpdu_ptr, pointer);
            assert_eq!(stream[marker..marker + 2], [0, 0]);
        }
        let crc = mpa::crc32c(&stream[begin..end - 4]).to_le_bytes();
        assert_eq!(stream[end - 4..end], crc, "markers are under the CRC");
        let ulpdu: Vec<u8> = (2..2 + ulpdu).map(byte).collect();
        plain.extend(fpdu(&ulpdu));
        next += len;
    }
    plain
}

pub fn some_read() -> ReadRequest {
    ReadRequest { sink_stag: Stag(1), sink_to: 2, size: 3, source_stag: Stag(4), source_to: 5 }
}

pub fn some_atomic() -> AtomicRequest {
    AtomicRequest { id: 1, stag: Stag(2), to: 8, op: AtomicOp::FetchAdd { add: 1, mask: 0 } }
}
