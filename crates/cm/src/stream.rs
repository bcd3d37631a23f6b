//! One TCP stream: MPA start-up, then frames.

use std::net::SocketAddr;

use quipu_iwarp::setup::{Outcome, Request};
use quipu_iwarp::{Initiator, Negotiated, Params, Responder, SetupError};
use quipu_wire::WireError;
use quipu_wire::cm::Frame;

use crate::keys::IdKey;

/// The MPA parameters of both ends between two Quipus: no FPDU will follow, so nothing needs to be
/// negotiated. And of a request to an adapter that knows no later revision.
pub(crate) const MPA: Params = Params { revision: 1, crc: true, enhanced: None };

/// Longer than any start-up frame.
const OUT_LEN: usize = 600;

/// Whose stream it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owner {
    /// Not known yet: its request has not come in full.
    Nobody {
        /// Who listens.
        listener: IdKey,
        /// Where it is among the others of that kind.
        number: u64,
        /// When it is closed.
        deadline: u64,
    },
    /// An identifier.
    Id(IdKey),
}

#[derive(Debug)]
enum Phase {
    Initiator(Initiator),
    Responder(Responder),
    Frames,
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) owner: Owner,
    pub(crate) local: SocketAddr,
    pub(crate) peer: SocketAddr,
    phase: Phase,
    /// A frame that is not whole.
    partial: Vec<u8>,
    /// What is said before the stream is closed over a reply that cannot be accepted.
    pub(crate) last_words: Vec<u8>,
    /// The peer has answered a request of revision 2 as one of revision 1.
    pub(crate) is_older: bool,
    /// It has come over a packet link.
    pub(crate) on_link: bool,
}

/// What has come in a stream.
#[derive(Debug)]
pub(crate) enum Incoming {
    Request(Request),
    Outcome(Outcome),
    Frame(Frame),
}

/// The peer does not speak the protocol.
#[derive(Debug)]
pub(crate) struct Broken;

impl From<SetupError> for Broken {
    fn from(_: SetupError) -> Self {
        Broken
    }
}

impl From<WireError> for Broken {
    fn from(_: WireError) -> Self {
        Broken
    }
}

fn drain(mut poll: impl FnMut(&mut [u8]) -> usize) -> Vec<u8> {
    let mut out = vec![0; OUT_LEN];
    let len = poll(&mut out);
    out.truncate(len);
    out
}

impl Stream {
    /// A stream that this side opens, and what to send first.
    pub(crate) fn initiator(
        id: IdKey,
        local: SocketAddr,
        peer: SocketAddr,
        params: Params,
        request: &[u8],
    ) -> Result<(Self, Vec<u8>), SetupError> {
        let mut initiator = Initiator::new(params, request)?;
        let first = drain(|out| initiator.poll_transmit(out));
        let (owner, phase) = (Owner::Id(id), Phase::Initiator(initiator));
        let stream = Self::new(owner, (local, peer), phase);
        Ok((stream, first))
    }

    /// A stream that the peer has opened.
    pub(crate) fn responder(owner: Owner, local: SocketAddr, peer: SocketAddr) -> Self {
        Self::new(owner, (local, peer), Phase::Responder(Responder::new()))
    }

    fn new(owner: Owner, (local, peer): (SocketAddr, SocketAddr), phase: Phase) -> Self {
        let (partial, last_words) = (Vec::new(), Vec::new());
        Self { owner, local, peer, phase, partial, last_words, is_older: false, on_link: false }
    }

    /// Whether it was opened by this side, and the peer has said nothing.
    pub(crate) fn is_unanswered(&self) -> bool {
        matches!(&self.phase, Phase::Initiator(initiator) if initiator.is_unanswered())
    }

    /// Takes from the front of `bytes` what belongs to the next message; that message, if it is
    /// whole.
    pub(crate) fn next(&mut self, bytes: &mut &[u8]) -> Result<Option<Incoming>, Broken> {
        match &mut self.phase {
            Phase::Initiator(initiator) => {
                let (used, outcome) = initiator.handle(bytes).inspect_err(|error| {
                    self.last_words = initiator.last_words(error);
                    self.is_older = *error == SetupError::NotEnhanced;
                })?;
                *bytes = &bytes[used..];
                if outcome.is_some() {
                    self.phase = Phase::Frames;
                }
                Ok(outcome.map(Incoming::Outcome))
            }
            Phase::Responder(responder) => {
                let (used, request) = responder.handle(bytes)?;
                *bytes = &bytes[used..];
                Ok(request.map(Incoming::Request))
            }
            Phase::Frames => self.next_frame(bytes),
        }
    }

    fn next_frame(&mut self, bytes: &mut &[u8]) -> Result<Option<Incoming>, Broken> {
        // Frames are tiny: most often one comes alone, and is whole.
        if self.partial.is_empty()
            && let Some((frame, len)) = Frame::parse(bytes)?
        {
            *bytes = &bytes[len..];
            return Ok(Some(Incoming::Frame(frame)));
        }
        while let Some((&byte, rest)) = bytes.split_first() {
            self.partial.push(byte);
            *bytes = rest;
            if let Some((frame, _)) = Frame::parse(&self.partial)? {
                self.partial.clear();
                return Ok(Some(Incoming::Frame(frame)));
            }
        }
        Ok(None)
    }

    /// The reply that accepts the peer's request, and what holds from now on.
    pub(crate) fn accept(
        &mut self,
        params: Params,
        reply: &[u8],
    ) -> Result<(Negotiated, Vec<u8>), Broken> {
        let Phase::Responder(responder) = &mut self.phase else { return Err(Broken) };
        let negotiated = responder.accept(params, reply)?;
        let bytes = drain(|out| responder.poll_transmit(out));
        self.phase = Phase::Frames;
        Ok((negotiated, bytes))
    }

    /// The reply that refuses the peer's request.
    pub(crate) fn reject(&mut self, reply: &[u8]) -> Result<Vec<u8>, Broken> {
        let Phase::Responder(responder) = &mut self.phase else { return Err(Broken) };
        responder.reject(reply)?;
        Ok(drain(|out| responder.poll_transmit(out)))
    }
}
