//! What a queue pair keeps about its byte stream: the two halves of iWARP, and what is still to be said.

use std::collections::VecDeque;

use quipu_iwarp::wire::Stag;
use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::terminate::Terminate;
use quipu_iwarp::{Message, Receiver, Sender};

use crate::plain::{Gate, Plain};
use crate::receive::early::Early;
use crate::requester;
use crate::responder::Refusal;
use crate::types::{ConnId, SendOp, Time};

/// Acknowledge without delay once this many requests are executed but not acknowledged.
const ACK_REQUESTS: u32 = 32;
/// Acknowledge without delay once this many payload bytes are.
const ACK_BYTES: u64 = 256 * 1024;
/// So many waiting requests are worth a send of their own, though others are in flight.
pub(crate) const GATHER_REQUESTS: u32 = 32;
/// So many waiting bytes are: three messages of 64 KB, which programs like, and which cost a fifth less each
/// than alone.
pub(crate) const GATHER_BYTES: u64 = 192 * 1024;

/// The sink that the Read at `position` of the send queue names: a token, so that the peer learns no key, and
/// the answer is checked against the request that is due. Never 0, which some adapters refuse.
pub(crate) fn sink_of(position: u32) -> Stag {
    Stag(position | 1 << 31)
}

/// A request message on its way out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outgoing {
    pub(crate) msg: Message,
    /// Payload bytes left, for messages that carry the work request's bytes.
    pub(crate) remaining: u32,
    /// What it carries.
    pub(crate) body: Body,
    /// How many requests it says to be executed, until its first segment is written.
    pub(crate) executed: Option<u32>,
}

/// What a request message carries.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Body {
    /// The bytes of the work request.
    Data,
    /// The immediate behind a write.
    Immediate(u32),
    /// A read, atomic request or flush, made from the work request.
    Ask(SendOp),
}

/// An answer that the peer waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    /// The bytes of a read.
    Read {
        /// The number of its request, for a refusal.
        msn: u32,
        sink_stag: u32,
        sink_to: u64,
        size: u32,
        /// The number of the protection domain in which the memory was found.
        pd: u32,
        rkey: u32,
        addr: u64,
        /// The message, once it has begun.
        msg: Option<Message>,
    },
    /// The word before an atomic.
    Atomic { id: u32, original: u64 },
}

/// Of what the next piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Request,
    Answer,
}

/// The byte stream of a connected queue pair.
pub(crate) struct StreamPath {
    pub(crate) conn: ConnId,
    pub(crate) tx: Sender,
    pub(crate) rx: Receiver,
    pub(crate) outgoing: Option<Outgoing>,
    /// Answers owed, oldest first; never more than the reads that were granted.
    pub(crate) answers: VecDeque<Answer>,
    /// Why the queue pair ends once they are given.
    pub(crate) refusal: Option<Refusal>,
    /// Whether an answer has its turn before a request.
    pub(crate) answers_turn: bool,
    /// Whether a Send tells the peer how many requests are executed.
    pub(crate) acknowledging_sends: bool,
    /// Whether the peer takes flushes.
    pub(crate) flushes: bool,
    /// The count of executed requests that the peer was told last.
    pub(crate) acked: u32,
    /// Payload bytes of requests that came since.
    pub(crate) unacked_bytes: u64,
    /// A resumption to be said next.
    pub(crate) resume: Option<Control>,
    /// A refusal for lack of a receive, to be said next.
    pub(crate) nak: Option<Control>,
    /// The end, to be said after everything else.
    pub(crate) terminate: Option<Terminate>,
    /// What is known only of a stream of plain iWARP; `None` between two Quipus.
    pub(crate) plain: Option<Plain>,
    /// Whether this end may speak.
    pub(crate) gate: Gate,
    /// Whether the peer has said anything since the stream was agreed on.
    pub(crate) heard: bool,
    /// When bytes last came of an FPDU that is not whole, and how many of it there are.
    pub(crate) partial: Option<(Time, usize)>,
    /// Whether an alarm is set for that.
    pub(crate) watched: bool,
    /// What was placed out of order; of a stream over the adapter's own TCP that has CRCs.
    pub(crate) early: Option<Box<Early>>,
    /// Whether it stands in the adapter's list of streams that owe an acknowledgement.
    pub(crate) owes_ack: bool,
    /// Whether it stands in the adapter's list of streams with something to transmit.
    pub(crate) is_ready: bool,
}

impl StreamPath {
    pub(crate) fn new(conn: ConnId, tx: Sender, rx: Receiver) -> Self {
        Self {
            conn,
            tx,
            rx,
            outgoing: None,
            answers: VecDeque::new(),
            refusal: None,
            answers_turn: false,
            acknowledging_sends: false,
            flushes: false,
            acked: 0,
            unacked_bytes: 0,
            resume: None,
            nak: None,
            terminate: None,
            plain: None,
            gate: Gate::Open,
            heard: false,
            partial: None,
            watched: false,
            early: None,
            owes_ack: false,
            is_ready: false,
        }
    }

    /// Lists the stream among those with something to transmit.
    #[inline]
    pub(crate) fn make_ready(&mut self, ready: &mut VecDeque<ConnId>) {
        if !self.is_ready {
            self.is_ready = true;
            ready.push_back(self.conn);
        }
    }

    /// The peer is told that so many requests are executed.
    #[inline]
    pub(crate) fn note_told(&mut self, count: u32) {
        self.acked = count;
        self.unacked_bytes = 0;
    }

    /// The first segment of a message is written, which said so.
    #[inline]
    pub(crate) fn note_carried(&mut self, executed: Option<u32>) {
        if let Some(count) = executed
            && count != self.acked
            && requester::reached(count, self.acked)
        {
            self.note_told(count);
        }
    }

    /// Whether enough is executed to tell the peer without waiting for a message to tell it with.
    #[inline]
    pub(crate) fn ack_is_urgent(&self, executed: u32) -> bool {
        let requests = executed.wrapping_sub(self.acked);
        requests >= ACK_REQUESTS || (requests > 0 && self.unacked_bytes >= ACK_BYTES)
    }

    /// Plain iWARP: of what the next piece of a tagged message must be, since one is under way, which no
    /// other may cut: Linux siw ends the connection over that. Untagged ones may, and may be cut.
    pub(crate) fn must_go_on(&self) -> Option<Turn> {
        self.plain?;
        match (&self.outgoing, self.answers.front()) {
            (Some(outgoing), _) => outgoing.msg.msn().is_none().then_some(Turn::Request),
            (None, Some(Answer::Read { msg: Some(_), .. })) => Some(Turn::Answer),
            _ => None,
        }
    }

    /// Whether there is something to say in addition to requests and delayed acknowledgements.
    pub(crate) fn has_urgent(&self) -> bool {
        self.resume.is_some()
            || self.nak.is_some()
            || self.terminate.is_some()
            || !self.answers.is_empty()
    }
}
