//! The endpoint: its life, what is posted, and completions.

use std::collections::VecDeque;
use std::fmt;

use quipu_iwarp::setup::{Outcome, rtr_ird};
use quipu_iwarp::terminate::Verdict;
use quipu_iwarp::wire::Stag;
use quipu_iwarp::wire::rdmap::{ReadRequest, TaggedOp, UntaggedOp};
use quipu_iwarp::{
    DEFAULT_MAX_ULPDU, Extensions, Initiator, Negotiated, Params, Receiver, Responder, Rtr, Sender,
};

use crate::incoming::{Inbox, Target, Unclaimed};
use crate::outgoing::{Answer, Current, Outbox, Piece};
use crate::regions::Regions;
use crate::{Access, MAX_POSTED, MAX_SPANS, Memory, READ_DEPTH};

/// STag of ready-to-receive messages, which touch no memory.
const OPENING_STAG: Stag = Stag(1);

/// Which end of the TCP connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It called connect(2), and asks for iWARP.
    Initiator,
    /// It called accept(2), and answers.
    Responder,
}

/// What an endpoint is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// This end.
    pub role: Role,
    /// Ask for CRCs. They are on if either end asks.
    pub crc: bool,
    /// Long payload is sent from where it lies ([`Piece::Memory`]), and not copied first.
    pub names_payload: bool,
    /// Where STags begin. Any number; a random one makes them hard to guess.
    pub first_stag: u32,
}

/// A part of the application's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its address.
    pub address: u64,
    /// Its length in bytes.
    pub len: usize,
}

/// What a work does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Sends a message, which consumes a receive of the peer.
    Send,
    /// Writes to a region of the peer.
    Write {
        /// The region.
        stag: u32,
        /// Address of the first byte, at the peer.
        to: u64,
    },
    /// Reads from a region of the peer, to one registered span of this end.
    Read {
        /// The region.
        stag: u32,
        /// Address of the first byte, at the peer.
        to: u64,
    },
    /// Receives a message.
    Receive,
}

/// How a work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It was done.
    Success,
    /// The connection ended before.
    Flushed,
    /// The peer does not allow the access.
    RemoteAccess,
    /// The peer does not take such a request.
    RemoteInvalid,
    /// The peer failed.
    RemoteOperation,
}

/// A work that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The number that the program gave it.
    pub id: u64,
    /// What it did.
    pub operation: Operation,
    /// Bytes sent, read or received.
    pub len: usize,
    /// How it ended.
    pub status: Status,
}

/// Why a work is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostError {
    /// As many as fit are posted.
    Full,
    /// More spans or bytes than a work may have, or a read to more than one span.
    TooLarge,
    /// A read to memory that is not registered.
    NotRegistered,
    /// The connection is over.
    Over,
}

/// Why the connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The peer closed it.
    Ended,
    /// The peer refused iWARP, or does not speak it.
    Refused,
    /// The peer broke the protocol, or wanted what it may not have.
    Protocol,
    /// The peer says that this end did.
    Terminated(Status),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ended => "the peer has closed the connection",
            Self::Refused => "the peer does not speak iWARP on this connection",
            Self::Protocol => "the peer broke the protocol",
            Self::Terminated(_) => "the peer has ended the connection by a Terminate",
        })
    }
}

/// A posted work.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) id: u64,
    pub(crate) operation: Operation,
    pub(crate) spans: Vec<Span>,
    pub(crate) len: usize,
    /// Region of a read's span.
    pub(crate) sink: u32,
}

/// A work whose bytes are framed.
#[derive(Debug)]
pub(crate) struct Issued {
    pub(crate) work: Work,
    /// Position in the stream after its last byte; none for a read, which ends with its response.
    pub(crate) end: Option<u64>,
    pub(crate) status: Option<Status>,
}

/// How far the connection has come.
#[derive(Debug)]
pub(crate) enum Stage {
    Asks(Initiator),
    Answers(Responder),
    Open,
    Over(Failure),
}

/// One end of an iWARP connection.
#[derive(Debug)]
pub struct Endpoint {
    pub(crate) config: Config,
    pub(crate) stage: Stage,
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
    pub(crate) has_crc: bool,
    pub(crate) has_markers: bool,
    /// A responder may send nothing before it has heard the initiator (RFC 5044 7.1.2).
    pub(crate) may_speak: bool,
    /// Ready-to-receive message that is due from the initiator.
    pub(crate) awaited: Option<Rtr>,
    /// The response to this end's ready-to-receive read is due.
    pub(crate) answer_due: bool,
    pub(crate) regions: Regions,
    pub(crate) inbox: Inbox,
    pub(crate) outbox: Outbox,
    pub(crate) posted: VecDeque<Work>,
    pub(crate) current: Option<Current>,
    pub(crate) issued: VecDeque<Issued>,
    /// Outstanding reads: region, next address and bytes to come.
    pub(crate) reads: VecDeque<(u32, u64, u64)>,
    pub(crate) max_reads: usize,
    pub(crate) answers: VecDeque<Answer>,
    pub(crate) receives: VecDeque<Work>,
    pub(crate) target: Target,
    /// Bytes of the first receive that are placed.
    pub(crate) placed: usize,
    pub(crate) unclaimed: Unclaimed,
    sent: VecDeque<Completion>,
    received: VecDeque<Completion>,
}

impl Endpoint {
    /// An endpoint whose TCP connection stands. An initiator has its request to send at once.
    ///
    /// # Panics
    /// Never: the request has no private data.
    pub fn new(config: Config) -> Self {
        let agreed = Negotiated { crc: config.crc, ..Negotiated::plain() };
        let mut outbox = Outbox::default();
        let stage = match config.role {
            Role::Responder => Stage::Answers(Responder::new()),
            Role::Initiator => match Initiator::new(params(config.crc), &[]) {
                Ok(mut initiator) => {
                    push_all(&mut outbox, |bytes| initiator.poll_transmit(bytes));
                    Stage::Asks(initiator)
                }
                Err(_) => Stage::Over(Failure::Refused),
            },
        };
        Self {
            config,
            stage,
            sender: Sender::new(&agreed, DEFAULT_MAX_ULPDU),
            receiver: Receiver::new(&agreed, Extensions::NONE),
            has_crc: true,
            has_markers: false,
            may_speak: config.role == Role::Initiator,
            awaited: None,
            answer_due: false,
            regions: Regions::new(config.first_stag),
            inbox: Inbox::default(),
            outbox,
            posted: VecDeque::new(),
            current: None,
            issued: VecDeque::new(),
            reads: VecDeque::new(),
            max_reads: usize::from(READ_DEPTH),
            answers: VecDeque::new(),
            receives: VecDeque::new(),
            target: Target::None,
            placed: 0,
            unclaimed: Unclaimed::default(),
            sent: VecDeque::new(),
            received: VecDeque::new(),
        }
    }

    /// Whether start-up is over and this end may post; a failure if it never will be.
    ///
    /// # Errors
    /// Why the connection is over.
    pub fn is_open(&self) -> Result<bool, Failure> {
        match self.stage {
            Stage::Asks(_) | Stage::Answers(_) => Ok(false),
            Stage::Open => Ok(true),
            Stage::Over(failure) => Err(failure),
        }
    }

    /// Takes bytes of the start-up frames from the front of `bytes`. How many it used.
    pub(crate) fn start_up(&mut self, bytes: &[u8]) -> usize {
        let done = match &mut self.stage {
            Stage::Asks(initiator) => match initiator.handle(bytes) {
                Ok((used, None)) => return used,
                Ok((used, Some(Outcome::Established(agreed)))) => Some((used, agreed)),
                Ok((_, Some(Outcome::Rejected { .. }))) | Err(_) => None,
            },
            Stage::Answers(responder) => match responder.handle(bytes) {
                Ok((used, None)) => return used,
                Ok((used, Some(_))) => {
                    let agreed = responder.accept(params(self.config.crc), &[]);
                    push_all(&mut self.outbox, |bytes| responder.poll_transmit(bytes));
                    agreed.ok().map(|agreed| (used, agreed))
                }
                Err(_) => None,
            },
            Stage::Open | Stage::Over(_) => return 0,
        };
        let Some((used, agreed)) = done else {
            self.fail(Failure::Refused);
            return bytes.len();
        };
        self.open(&agreed);
        used
    }

    fn open(&mut self, agreed: &Negotiated) {
        self.sender = Sender::new(agreed, DEFAULT_MAX_ULPDU);
        self.receiver = Receiver::new(agreed, Extensions::NONE);
        (self.has_crc, self.has_markers) = (agreed.crc, agreed.tx_markers);
        self.max_reads = usize::from(agreed.ord.unwrap_or(READ_DEPTH).min(READ_DEPTH));
        self.stage = Stage::Open;
        match (self.config.role, agreed.rtr) {
            (Role::Responder, rtr) => self.awaited = rtr,
            (Role::Initiator, Some(rtr)) => self.open_stream(rtr),
            (Role::Initiator, None) => {}
        }
    }

    /// Says that this end is ready to receive, as both have agreed (RFC 6581 9.2).
    fn open_stream(&mut self, rtr: Rtr) {
        let mut message = match rtr {
            Rtr::Send => self.sender.begin_untagged(UntaggedOp::Send, 0),
            Rtr::Write => self.sender.begin_tagged(TaggedOp::Write, OPENING_STAG, 0),
            Rtr::Read => {
                self.answer_due = true;
                let request = ReadRequest {
                    sink_stag: OPENING_STAG,
                    sink_to: 0,
                    size: 0,
                    source_stag: OPENING_STAG,
                    source_to: 0,
                };
                return self.send_whole(UntaggedOp::ReadRequest, &request);
            }
        };
        let mut bytes = vec![0; self.sender.fpdu_bound(0)];
        if let Some(staged) = self.sender.segment(&mut message, &mut bytes, 0, |_| {}) {
            bytes.truncate(staged.bytes);
            self.outbox.push(Piece::Bytes(bytes));
        }
    }

    /// Registers memory. The STag, or none if there are too many regions.
    pub fn register(&mut self, span: Span, access: Access) -> Option<u32> {
        self.regions.register(span, access)
    }

    /// Ends a registration: the memory is not touched any more by works of the peer. Whether there was one.
    pub fn deregister(&mut self, stag: u32) -> bool {
        self.regions.remove(stag)
    }

    /// Posts a send, a write or a read.
    ///
    /// # Errors
    /// Why it is not taken.
    pub fn post(&mut self, id: u64, operation: Operation, spans: &[Span]) -> Result<(), PostError> {
        if matches!(self.stage, Stage::Over(_)) {
            return Err(PostError::Over);
        }
        let len = total(spans)?;
        let sink = match (operation, spans) {
            (Operation::Read { .. }, [span]) => {
                self.regions.containing(*span).ok_or(PostError::NotRegistered)?
            }
            (Operation::Read { .. }, _) => return Err(PostError::TooLarge),
            _ => 0,
        };
        if self.posted.len() + self.issued.len() + self.sent.len() >= MAX_POSTED {
            return Err(PostError::Full);
        }
        self.posted.push_back(Work { id, operation, spans: spans.to_vec(), len, sink });
        Ok(())
    }

    /// Posts a receive. It takes the oldest message that came without one.
    ///
    /// # Errors
    /// Why it is not taken.
    pub fn post_receive(
        &mut self,
        memory: &mut impl Memory,
        id: u64,
        spans: &[Span],
    ) -> Result<(), PostError> {
        let len = total(spans)?;
        if self.receives.len() + self.received.len() >= MAX_POSTED {
            return Err(PostError::Full);
        }
        if matches!(self.stage, Stage::Over(_)) && self.unclaimed.is_empty() {
            return Err(PostError::Over);
        }
        let operation = Operation::Receive;
        self.receives.push_back(Work { id, operation, spans: spans.to_vec(), len, sink: 0 });
        self.claim(memory);
        self.take_in(memory);
        Ok(())
    }

    /// The next send, write or read that is over, in the order in which they were posted.
    pub fn poll_send(&mut self) -> Option<Completion> {
        self.sent.pop_front()
    }

    /// The next receive that is over.
    pub fn poll_receive(&mut self) -> Option<Completion> {
        self.received.pop_front()
    }

    /// Whether something is to be reported to the program.
    pub fn has_news(&self) -> bool {
        !self.sent.is_empty()
            || !self.received.is_empty()
            || self.unclaimed.has_bytes()
            || matches!(self.stage, Stage::Over(_))
    }

    pub(crate) fn complete_receive(&mut self, work: Work, len: usize, status: Status) {
        let Work { id, operation, .. } = work;
        self.received.push_back(Completion { id, operation, len, status });
    }

    /// Reports works of the send queue that are over, up to the first that is not.
    pub(crate) fn complete_in_order(&mut self) {
        while let Some(status) = self.issued.front().and_then(|issued| issued.status) {
            if let Some(Issued { work: Work { id, operation, len, .. }, .. }) =
                self.issued.pop_front()
            {
                self.sent.push_back(Completion { id, operation, len, status });
            }
        }
    }

    /// The connection is over. All that is posted ends with [`Status::Flushed`]; the oldest request of the
    /// send queue with what the peer says of it.
    pub(crate) fn fail(&mut self, failure: Failure) {
        if matches!(self.stage, Stage::Over(_)) {
            return;
        }
        self.stage = Stage::Over(failure);
        self.current = None;
        self.reads.clear();
        self.answers.clear();
        let posted = std::mem::take(&mut self.posted);
        posted.into_iter().for_each(|work| self.issue(work, None));
        let mut blame = match failure {
            Failure::Terminated(status) => status,
            _ => Status::Flushed,
        };
        for issued in &mut self.issued {
            if issued.status.is_none() {
                issued.status = Some(std::mem::replace(&mut blame, Status::Flushed));
            }
        }
        self.complete_in_order();
        for work in std::mem::take(&mut self.receives) {
            self.complete_receive(work, 0, Status::Flushed);
        }
    }
}

/// What an endpoint asks for at start-up.
fn params(crc: bool) -> Params {
    let ird = rtr_ird(Some(Rtr::Read), READ_DEPTH);
    Params { crc, ..Params::peer_to_peer(ird, READ_DEPTH) }
}

fn push_all(outbox: &mut Outbox, mut poll: impl FnMut(&mut [u8]) -> usize) {
    let mut bytes = [0; 1024];
    loop {
        match poll(&mut bytes) {
            0 => return,
            len => outbox.push(Piece::Bytes(bytes[..len].to_vec())),
        }
    }
}

fn total(spans: &[Span]) -> Result<usize, PostError> {
    let sum = spans.iter().try_fold(0_usize, |sum, span| sum.checked_add(span.len));
    let sum = sum.filter(|sum| u32::try_from(*sum).is_ok()).ok_or(PostError::TooLarge)?;
    (spans.len() <= MAX_SPANS).then_some(sum).ok_or(PostError::TooLarge)
}

/// What a Terminate means for the request that it is about.
pub(crate) fn status_of(verdict: Verdict) -> Status {
    match verdict {
        Verdict::RemoteAccess => Status::RemoteAccess,
        Verdict::InvalidRequest | Verdict::NoBuffer => Status::RemoteInvalid,
        Verdict::RemoteOperation | Verdict::Transport => Status::RemoteOperation,
    }
}
