//! What goes out: posted works and answers to reads become FPDUs.

use std::collections::VecDeque;

use quipu_iwarp::wire::mpa::CRC_LEN;
use quipu_iwarp::wire::rdmap::{ReadRequest, TaggedOp, UntaggedOp};
use quipu_iwarp::wire::terminate::Terminate;
use quipu_iwarp::wire::{Payload, Stag};
use quipu_iwarp::{Message, Sender};

use crate::endpoint::{Endpoint, Operation, Span, Stage, Work};
use crate::regions::Wants;
use crate::{Memory, Status};

/// Bytes that are framed ahead.
const AHEAD: usize = 256 * 1024;
/// Room for one FPDU with copied payload.
const FPDU_ROOM: usize = 66 * 1024;
/// Payload from which on it is sent from where it lies, if the program wants that.
const WORTH_NAMING: usize = 1024;

/// A part of what is to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// These bytes.
    Bytes(Vec<u8>),
    /// The application's memory.
    Memory(Span),
}

impl Piece {
    /// Its length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Memory(span) => span.len,
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What is framed and not sent.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) pieces: VecDeque<Piece>,
    /// Bytes of the first piece that are sent.
    pub(crate) used: usize,
    waiting: usize,
    /// Bytes of the stream that are framed.
    framed: u64,
}

impl Outbox {
    pub(crate) fn push(&mut self, piece: Piece) {
        let len = piece.len();
        if len == 0 {
            return;
        }
        self.waiting += len;
        self.framed += len as u64;
        if let (Some(Piece::Bytes(last)), Piece::Bytes(bytes)) = (self.pieces.back_mut(), &piece)
            && last.len() + bytes.len() <= AHEAD
        {
            return last.extend_from_slice(bytes);
        }
        self.pieces.push_back(piece);
    }

    /// Drops bytes that were sent.
    pub(crate) fn sent(&mut self, mut len: usize) {
        self.waiting = self.waiting.saturating_sub(len);
        while let Some(first) = self.pieces.front() {
            let rest = first.len() - self.used;
            if len < rest {
                self.used += len;
                return;
            }
            len -= rest;
            self.used = 0;
            self.pieces.pop_front();
        }
    }

    /// Position in the stream up to which everything is sent.
    pub(crate) fn position(&self) -> u64 {
        self.framed - self.waiting as u64
    }
}

/// A message of which a part is framed.
#[derive(Clone, Debug)]
pub(crate) struct Current {
    message: Message,
    spans: Vec<Span>,
    len: usize,
    done: usize,
    /// Whether it is the work at the front of those that are posted.
    is_work: bool,
}

/// A read of the peer that is to be answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    pub(crate) request: ReadRequest,
}

/// Copies bytes of a list of spans, from an offset on.
fn gather(memory: &impl Memory, spans: &[Span], mut skip: usize, mut into: &mut [u8]) {
    for span in spans {
        if skip >= span.len {
            skip -= span.len;
            continue;
        }
        let len = (span.len - skip).min(into.len());
        let (now, later) = into.split_at_mut(len);
        memory.read(span.address + skip as u64, now);
        (into, skip) = (later, 0);
        if into.is_empty() {
            return;
        }
    }
}

/// The parts of spans that make up `len` bytes from an offset on.
fn parts(spans: &[Span], mut skip: usize, mut len: usize) -> Vec<Span> {
    let mut parts = Vec::new();
    for span in spans {
        if skip >= span.len {
            skip -= span.len;
            continue;
        }
        let part = (span.len - skip).min(len);
        if part > 0 {
            parts.push(Span { address: span.address + skip as u64, len: part });
        }
        len -= part;
        skip = 0;
    }
    parts
}

impl Endpoint {
    /// Frames what is posted, and answers to reads of the peer, as long as little is waiting to be sent.
    pub fn prepare(&mut self, memory: &impl Memory) {
        if !matches!(self.stage, Stage::Open) || !self.may_speak {
            return;
        }
        while self.outbox.waiting < AHEAD && self.begin_message() {
            self.frame(memory);
        }
        self.complete_sent();
    }

    /// Takes up the next message, unless one is under way. False if there is none.
    fn begin_message(&mut self) -> bool {
        if self.current.is_some() {
            return true;
        }
        if let Some(answer) = self.answers.pop_front() {
            let request = answer.request;
            let (stag, to) = (request.source_stag.0, request.source_to);
            if let Err(fault) = self.regions.check(stag, to, request.size.into(), Wants::Read) {
                // It was deregistered since the request came.
                self.fault(fault, &[]);
                return false;
            }
            let op = TaggedOp::ReadResponse;
            let message = self.sender.begin_tagged(op, request.sink_stag, request.sink_to);
            let span = Span { address: to, len: request.size as usize };
            let len = span.len;
            let current = Current { message, spans: vec![span], len, done: 0, is_work: false };
            self.current = Some(current);
            return true;
        }
        let Some(work) = self.posted.front() else { return false };
        match work.operation {
            Operation::Read { .. } if self.reads.len() >= self.max_reads => false,
            Operation::Read { stag, to } => {
                self.request_read(stag, to);
                // Nothing is left to be framed of it; the loop goes on.
                self.begin_message()
            }
            Operation::Send | Operation::Write { .. } => {
                let message = match work.operation {
                    Operation::Write { stag, to } => {
                        self.sender.begin_tagged(TaggedOp::Write, Stag(stag), to)
                    }
                    _ => self.sender.begin_untagged(UntaggedOp::Send, 0),
                };
                let (spans, len) = (work.spans.clone(), work.len);
                self.current = Some(Current { message, spans, len, done: 0, is_work: true });
                true
            }
            Operation::Receive => false,
        }
    }

    fn request_read(&mut self, stag: u32, to: u64) {
        let Some(work) = self.posted.pop_front() else { return };
        let sink_to = work.spans[0].address;
        let request = ReadRequest {
            sink_stag: Stag(work.sink),
            sink_to,
            size: work.len as u32,
            source_stag: Stag(stag),
            source_to: to,
        };
        self.send_whole(UntaggedOp::ReadRequest, &request);
        self.reads.push_back((work.sink, sink_to, work.len as u64));
        self.issue(work, None);
    }

    /// Frames a message of fixed layout.
    pub(crate) fn send_whole(&mut self, op: UntaggedOp, payload: &impl Payload) {
        let mut bytes = vec![0; self.sender.fpdu_bound(payload.wire_len())];
        let mut message = self.sender.begin_untagged(op, 0);
        let len = self.sender.whole(&mut message, &mut bytes, payload).unwrap_or(0);
        bytes.truncate(len);
        self.outbox.push(Piece::Bytes(bytes));
    }

    /// Frames a Terminate, after which nothing else goes out.
    pub(crate) fn send_terminate(&mut self, terminate: &Terminate) {
        if matches!(self.stage, Stage::Open) && self.may_speak {
            self.send_whole(UntaggedOp::Terminate, terminate);
        }
    }

    /// Frames one FPDU of the message under way.
    fn frame(&mut self, memory: &impl Memory) {
        let Some(mut current) = self.current.take() else { return };
        let rest = current.len - current.done;
        let is_named = self.config.names_payload
            && current.is_work
            && rest >= WORTH_NAMING
            && !self.has_markers;
        let (payload, last) = if is_named {
            self.frame_named(memory, &mut current)
        } else {
            self.frame_copied(memory, &mut current)
        };
        current.done += payload;
        if !last {
            self.current = Some(current);
        } else if current.is_work
            && let Some(work) = self.posted.pop_front()
        {
            let end = self.outbox.framed;
            self.issue(work, Some(end));
        }
    }

    fn frame_copied(&mut self, memory: &impl Memory, current: &mut Current) -> (usize, bool) {
        let rest = current.len - current.done;
        let room = self.sender.fpdu_bound(rest).min(FPDU_ROOM);
        let mut bytes = vec![0; room];
        let (spans, done) = (&current.spans, current.done);
        let fill = |place: &mut [u8]| gather(memory, spans, done, place);
        let staged = self.sender.segment(&mut current.message, &mut bytes, rest as u32, fill);
        let Some(staged) = staged else { return (0, false) };
        bytes.truncate(staged.bytes);
        self.outbox.push(Piece::Bytes(bytes));
        (staged.payload as usize, staged.last)
    }

    /// The same with the payload sent from where it lies. It is read for the CRC only.
    fn frame_named(&mut self, memory: &impl Memory, current: &mut Current) -> (usize, bool) {
        let rest = current.len - current.done;
        let mut around = [0; 64];
        let sender: &mut Sender = &mut self.sender;
        let frame = sender.frame_before_crc(&mut current.message, &mut around, rest as u32);
        let Some(frame) = frame else { return (0, false) };
        let payload = frame.staged.payload as usize;
        let spans = parts(&current.spans, current.done, payload);
        let (head, tail) = around[..frame.staged.bytes].split_at_mut(frame.head);
        if self.has_crc {
            let mut digest = quipu_crc::Digest::new();
            digest.update(head);
            let mut chunk = [0; 4096];
            for span in &spans {
                for at in (0..span.len).step_by(chunk.len()) {
                    let part = &mut chunk[..(span.len - at).min(4096)];
                    memory.read(span.address + at as u64, part);
                    digest.update(part);
                }
            }
            let (padding, crc) = tail.split_at_mut(tail.len() - CRC_LEN);
            digest.update(padding);
            crc.copy_from_slice(&digest.finish().to_le_bytes());
        }
        self.outbox.push(Piece::Bytes(head.to_vec()));
        spans.into_iter().for_each(|span| self.outbox.push(Piece::Memory(span)));
        self.outbox.push(Piece::Bytes(tail.to_vec()));
        (payload, frame.staged.last)
    }

    /// What is to be sent, in order, and how many bytes of the first piece were sent before.
    pub fn outgoing(&self) -> (impl Iterator<Item = &Piece>, usize) {
        (self.outbox.pieces.iter(), self.outbox.used)
    }

    /// Whether anything is to be sent.
    pub fn has_outgoing(&self) -> bool {
        !self.outbox.pieces.is_empty()
    }

    /// Tells how many bytes of [`outgoing`](Self::outgoing) were sent. Sends and Writes whose bytes are all
    /// sent are complete.
    pub fn sent(&mut self, len: usize) {
        self.outbox.sent(len);
        self.complete_sent();
    }

    fn complete_sent(&mut self) {
        let position = self.outbox.position();
        for issued in &mut self.issued {
            if issued.end.is_some_and(|end| end <= position) {
                issued.status = Some(Status::Success);
            }
        }
        self.complete_in_order();
    }

    pub(crate) fn issue(&mut self, work: Work, end: Option<u64>) {
        self.issued.push_back(crate::endpoint::Issued { work, end, status: None });
    }
}
