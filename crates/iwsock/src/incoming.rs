//! What comes in: FPDUs are placed where they belong.

use std::collections::VecDeque;

use quipu_iwarp::terminate::{self, verdict};
use quipu_iwarp::wire::rdmap::ReadRequest;
use quipu_iwarp::{ProtocolError, RemoteFault, Rtr, Segment};

use crate::endpoint::{Endpoint, Failure, Span, Stage, status_of};
use crate::outgoing::Answer;
use crate::regions::Wants;
use crate::{MAX_UNCLAIMED, Memory, READ_DEPTH, Status};

/// Room for bytes of the stream: two FPDUs of any length.
const ROOM: usize = 160 * 1024;
/// Messages without a receive that are kept, however short.
const MAX_MESSAGES: usize = 1024;

/// Bytes of the stream that are not used yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    bytes: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Inbox {
    fn space(&mut self) -> &mut [u8] {
        if self.bytes.is_empty() {
            self.bytes = vec![0; ROOM];
        }
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        } else if self.begin > ROOM / 2 {
            self.bytes.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        &mut self.bytes[self.end..]
    }
}

/// Where the payload of the Send goes that has begun.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// None has begun.
    None,
    /// To the first receive.
    Receive,
    /// To the last message without a receive.
    Unclaimed,
}

/// Messages that came without a receive.
#[derive(Debug, Default)]
pub(crate) struct Unclaimed {
    messages: VecDeque<Message>,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Message {
    bytes: Vec<u8>,
    /// Bytes that the program has read.
    used: usize,
    is_whole: bool,
}

impl Unclaimed {
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Whether read(2) has something to give.
    pub(crate) fn has_bytes(&self) -> bool {
        self.bytes > 0
    }

    fn is_full(&self) -> bool {
        self.bytes >= MAX_UNCLAIMED || self.messages.len() >= MAX_MESSAGES
    }

    fn add(&mut self, is_first: bool, payload: &[u8], last: bool) {
        if is_first {
            self.messages.push_back(Message::default());
        }
        if let Some(message) = self.messages.back_mut() {
            message.bytes.extend_from_slice(payload);
            message.is_whole = last;
            self.bytes += payload.len();
        }
    }
}

/// Copies bytes to a list of spans, from an offset on.
fn scatter(memory: &mut impl Memory, spans: &[Span], mut skip: usize, mut from: &[u8]) {
    for span in spans {
        if skip >= span.len {
            skip -= span.len;
            continue;
        }
        let (now, later) = from.split_at((span.len - skip).min(from.len()));
        memory.write(span.address + skip as u64, now);
        (from, skip) = (later, 0);
        if from.is_empty() {
            return;
        }
    }
}

impl Endpoint {
    /// Where bytes that arrive belong. Empty if nothing is to be taken from the stream for now: the program
    /// has to post a receive, or to read.
    pub fn space(&mut self) -> &mut [u8] {
        match self.stage {
            Stage::Over(_) => &mut [],
            _ => self.inbox.space(),
        }
    }

    /// Takes bytes that were put into [`space`](Self::space).
    pub fn received(&mut self, memory: &mut impl Memory, len: usize) {
        self.inbox.end = (self.inbox.end + len).min(self.inbox.bytes.len());
        self.take_in(memory);
    }

    /// The stream has ended, or failed.
    pub fn ended(&mut self) {
        let failure = match self.stage {
            Stage::Asks(_) | Stage::Answers(_) => Failure::Refused,
            _ => Failure::Ended,
        };
        self.fail(failure);
    }

    /// Uses what is in the inbox.
    pub(crate) fn take_in(&mut self, memory: &mut impl Memory) {
        let bytes = std::mem::take(&mut self.inbox.bytes);
        while self.inbox.begin < self.inbox.end {
            let rest = &bytes[self.inbox.begin..self.inbox.end];
            let used = match self.stage {
                Stage::Over(_) => rest.len(),
                Stage::Asks(_) | Stage::Answers(_) => self.start_up(rest),
                Stage::Open if self.unclaimed.is_full() => 0,
                Stage::Open => self.next_fpdu(memory, rest),
            };
            if used == 0 {
                break;
            }
            self.inbox.begin += used;
        }
        self.inbox.bytes = bytes;
    }

    /// Executes the FPDU at the front, if it is whole. How many bytes it has.
    fn next_fpdu(&mut self, memory: &mut impl Memory, bytes: &[u8]) -> usize {
        match self.receiver.next(bytes) {
            Ok(None) => 0,
            Ok(Some((used, segment))) => {
                if let Err(fault) = self.execute(memory, segment) {
                    self.fault(fault, bytes);
                }
                used
            }
            Err(error) => {
                self.protocol_error(&error, bytes);
                bytes.len()
            }
        }
    }

    fn protocol_error(&mut self, error: &ProtocolError, fpdu: &[u8]) {
        if let Some(terminate) = terminate::for_error(error, fpdu) {
            self.send_terminate(&terminate);
        }
        self.fail(Failure::Protocol);
    }

    /// The peer wanted what it may not have.
    pub(crate) fn fault(&mut self, fault: RemoteFault, fpdu: &[u8]) {
        if let Some(terminate) = terminate::for_fault(fault, fpdu) {
            self.send_terminate(&terminate);
        }
        self.fail(Failure::Protocol);
    }

    fn execute(
        &mut self,
        memory: &mut impl Memory,
        segment: Segment<'_>,
    ) -> Result<(), RemoteFault> {
        self.may_speak = true;
        if let Some(rtr) = self.awaited.take()
            && self.is_opening(rtr, &segment)
        {
            return Ok(());
        }
        match segment {
            Segment::Write { stag, to, payload, .. } => {
                self.regions.check(stag.0, to, payload.len() as u64, Wants::Write)?;
                // Without data the address is anything that the peer likes.
                if !payload.is_empty() {
                    memory.write(to, payload);
                }
                Ok(())
            }
            Segment::Send { mo, last, payload, .. } => {
                self.take_send(memory, mo == 0, last, payload)
            }
            Segment::ReadRequest { request, .. } => self.owe(request),
            Segment::ReadResponse { stag, to, last, payload } => {
                self.take_response(memory, stag.0, to, last, payload)
            }
            Segment::Terminate(message) => {
                self.fail(Failure::Terminated(status_of(verdict(message.code))));
                Ok(())
            }
            _ => Err(RemoteFault::UnexpectedOpcode),
        }
    }

    /// Whether a segment is the ready-to-receive message that was agreed on.
    fn is_opening(&mut self, rtr: Rtr, segment: &Segment<'_>) -> bool {
        match (rtr, segment) {
            (Rtr::Send, Segment::Send { last: true, payload: [], .. })
            | (Rtr::Write, Segment::Write { last: true, payload: [], .. }) => true,
            (Rtr::Read, Segment::ReadRequest { request, .. }) if request.size == 0 => {
                self.answers.push_back(Answer { request: *request });
                true
            }
            _ => false,
        }
    }

    fn owe(&mut self, request: ReadRequest) -> Result<(), RemoteFault> {
        if self.answers.len() >= usize::from(READ_DEPTH) {
            return Err(RemoteFault::TooManyReads);
        }
        let (stag, to) = (request.source_stag.0, request.source_to);
        self.regions.check(stag, to, request.size.into(), Wants::Read)?;
        self.answers.push_back(Answer { request });
        Ok(())
    }

    fn take_send(
        &mut self,
        memory: &mut impl Memory,
        is_first: bool,
        last: bool,
        payload: &[u8],
    ) -> Result<(), RemoteFault> {
        if is_first {
            let is_claimed = self.unclaimed.is_empty() && !self.receives.is_empty();
            self.target = if is_claimed { Target::Receive } else { Target::Unclaimed };
            self.placed = 0;
        }
        if self.target != Target::Receive {
            self.unclaimed.add(is_first, payload, last);
            self.claim(memory);
            return Ok(());
        }
        let done = self.placed;
        let Some(work) = self.receives.front() else { return Err(RemoteFault::Catastrophic) };
        if work.len - done < payload.len() {
            return Err(RemoteFault::MessageTooLong);
        }
        scatter(memory, &work.spans, done, payload);
        self.placed = done + payload.len();
        if last {
            self.target = Target::None;
            let len = done + payload.len();
            if let Some(work) = self.receives.pop_front() {
                self.complete_receive(work, len, Status::Success);
            }
        }
        Ok(())
    }

    /// Gives messages that came without a receive to receives.
    pub(crate) fn claim(&mut self, memory: &mut impl Memory) {
        while let (Some(message), Some(work)) =
            (self.unclaimed.messages.front(), self.receives.front())
        {
            if !message.is_whole {
                return;
            }
            let bytes = &message.bytes[message.used..];
            if work.len < bytes.len() {
                return self.fault(RemoteFault::MessageTooLong, &[]);
            }
            scatter(memory, &work.spans, 0, bytes);
            let len = bytes.len();
            self.unclaimed.bytes -= len;
            self.unclaimed.messages.pop_front();
            if let Some(work) = self.receives.pop_front() {
                self.complete_receive(work, len, Status::Success);
            }
        }
    }

    /// Reads Sends for which no receive was posted, as a stream: what read(2) gives. None if nothing is
    /// there; 0 at the end of the stream.
    pub fn read(&mut self, memory: &mut impl Memory, into: &mut [u8]) -> Option<usize> {
        let mut done = 0;
        while let Some(message) = self.unclaimed.messages.front_mut() {
            let rest = &message.bytes[message.used..];
            let len = rest.len().min(into.len() - done);
            into[done..done + len].copy_from_slice(&rest[..len]);
            message.used += len;
            done += len;
            self.unclaimed.bytes -= len;
            if message.used < message.bytes.len() || !message.is_whole {
                break;
            }
            self.unclaimed.messages.pop_front();
        }
        self.take_in(memory);
        match self.stage {
            _ if done > 0 => Some(done),
            Stage::Over(_) => Some(0),
            _ => None,
        }
    }

    fn take_response(
        &mut self,
        memory: &mut impl Memory,
        stag: u32,
        to: u64,
        last: bool,
        payload: &[u8],
    ) -> Result<(), RemoteFault> {
        if self.answer_due && payload.is_empty() && last {
            self.answer_due = false;
            return Ok(());
        }
        let Some((sink, next, rest)) = self.reads.front_mut() else {
            return Err(RemoteFault::UnexpectedOpcode);
        };
        let len = payload.len() as u64;
        if (stag, to) != (*sink, *next) || len > *rest || last != (len == *rest) {
            return Err(RemoteFault::InvalidRequest);
        }
        (*next, *rest) = (*next + len, *rest - len);
        memory.write(to, payload);
        if last {
            self.reads.pop_front();
            let oldest = self.issued.iter_mut().find(|it| it.end.is_none() && it.status.is_none());
            if let Some(issued) = oldest {
                issued.status = Some(Status::Success);
            }
            self.complete_in_order();
        }
        Ok(())
    }
}
