//! MPA start-up (RFC 5044 7.1, RFC 6581): one request frame, one reply frame.
//!
//! Both machines work on bytes: `handle` takes what arrived and says how much it used,
//! `poll_transmit` gives what is to be sent. Time-outs are the caller's, as is the rule that a
//! responder holds all FPDUs back until the first FPDU of the initiator has come (RFC 5044 7.1.2);
//! an initiator accepts FPDUs right behind the reply, which `handle` leaves unconsumed.

use quipu_wire::Payload;
use quipu_wire::WireError;
use quipu_wire::hello::Features;
use quipu_wire::mpa::{
    ENHANCED_LEN, Enhanced, FrameKind, MAX_FRAME_LEN, MAX_IRD_ORD, MAX_PRIVATE_DATA, StartFrame,
};
use quipu_wire::rdmap::UntaggedOp;
use thiserror::Error;

use crate::{DEFAULT_MAX_ULPDU, Sender, terminate};

/// Longest private data of users: the 512 bytes of RFC 5044 7.1.1 without the four of RFC 6581.
pub const MAX_USER_DATA: usize = MAX_PRIVATE_DATA - ENHANCED_LEN;

/// What one end wants of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Params {
    /// 1 for RFC 5044, 2 for RFC 6581. A responder answers in the revision of the request, whatever
    /// stands here.
    pub revision: u8,
    /// Ask for CRCs. They are on if either end asks.
    pub crc: bool,
    /// Read depths and ready-to-receive flags, sent if the revision is 2. `None` negotiates none.
    pub enhanced: Option<Enhanced>,
}

impl Params {
    /// What a plain iWARP adapter asks for: as [`Params::default`], with peer-to-peer mode, since
    /// either end of a verbs program may send first, and every ready-to-receive message. `ird` and
    /// `ord`: reads that we answer and that we want to have outstanding.
    pub fn peer_to_peer(ird: u16, ord: u16) -> Self {
        let enhanced = Enhanced {
            ird,
            ord,
            peer_to_peer: true,
            rtr_send: true,
            rtr_write: true,
            rtr_read: true,
        };
        Params { enhanced: Some(enhanced), ..Params::default() }
    }
}

impl Default for Params {
    /// Revision 2, CRC on, 128 reads in each direction, no peer-to-peer mode.
    fn default() -> Self {
        let enhanced = Enhanced { ird: 128, ord: 128, ..Enhanced::default() };
        Params { revision: 2, crc: true, enhanced: Some(enhanced) }
    }
}

/// What both ends agreed on beyond RFC 5040.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    /// Immediate data and atomics of RFC 7306.
    pub rfc7306: bool,
    /// Send with immediate data and control messages of `specs/quipu-wire.md`.
    pub quipu: bool,
    /// A Send has a place for an acknowledgement, as on a reliable connection of two queue pairs
    /// (`specs/quipu-wire.md` 5). Elsewhere that field is reserved.
    pub acknowledging_sends: bool,
    /// Messages of the queue of Sends name a shared receive queue, and the connection is an extended
    /// reliable one (`specs/quipu-wire.md` 6).
    pub xrc: bool,
    /// Flush (`specs/quipu-wire.md` 3.3).
    pub flush: bool,
}

impl Extensions {
    /// None: what a plain iWARP adapter understands.
    pub const NONE: Extensions = Extensions {
        rfc7306: false,
        quipu: false,
        acknowledging_sends: false,
        xrc: false,
        flush: false,
    };
    /// All that two Quipus know on a reliable connection of one queue pair with one other.
    pub const ALL: Extensions = Extensions {
        rfc7306: true,
        quipu: true,
        acknowledging_sends: true,
        xrc: false,
        flush: true,
    };
}

impl From<Features> for Extensions {
    fn from(agreed: Features) -> Self {
        Extensions {
            rfc7306: agreed.contains(Features::RFC7306),
            quipu: agreed.contains(Features::QUIPU),
            acknowledging_sends: agreed.contains(Features::QUIPU),
            xrc: false,
            // Without the acknowledgement nobody hears that it is done.
            flush: agreed.contains(Features::FLUSH.with(Features::QUIPU)),
        }
    }
}

/// What start-up agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// CRCs are sent and checked.
    pub crc: bool,
    /// The peer wants markers in what we send. We never ask for them.
    pub tx_markers: bool,
    /// Revision of the connection, 1 or 2; 0 from peers of before RFC 5044.
    pub revision: u8,
    /// The peer's read depths and ready-to-receive flags, if the frames were enhanced.
    pub peer_enhanced: Option<Enhanced>,
    /// Reads and atomics that the peer answers at a time; `None` if it did not say.
    pub peer_ird: Option<u16>,
    /// Reads and atomics that the peer may have outstanding; `None` if it did not say.
    pub peer_ord: Option<u16>,
    /// Reads and atomics that we may have outstanding: our ORD, no more than the peer's IRD. `None`
    /// if neither end set a limit.
    pub ord: Option<u16>,
    /// How the initiator opens the stream in peer-to-peer mode; `None`: as RFC 5044 has it, with
    /// whatever its user sends first.
    pub rtr: Option<Rtr>,
    /// The peer's private data, without the fields of RFC 6581.
    pub private_data: Vec<u8>,
}

impl Negotiated {
    /// A connection that needs no start-up, as between two ends in one test: CRC on, no markers.
    pub fn plain() -> Self {
        Negotiated {
            crc: true,
            tx_markers: false,
            revision: 2,
            peer_enhanced: None,
            peer_ird: None,
            peer_ord: None,
            ord: None,
            rtr: None,
            private_data: Vec::new(),
        }
    }

    fn new(ours: &Params, revision: u8, peer: &StartFrame<'_>, rtr: Option<Rtr>) -> Self {
        let depth = |value: u16| (value != MAX_IRD_ORD).then_some(value);
        let peer_ird = peer.enhanced.and_then(|enhanced| depth(enhanced.ird));
        let peer_ord = peer.enhanced.and_then(|enhanced| depth(enhanced.ord));
        let our_ord = ours.enhanced.and_then(|enhanced| depth(enhanced.ord));
        let ord = match (our_ord, peer_ird) {
            (Some(ours), Some(peer)) => Some(ours.min(peer)),
            (ours, peer) => peer.or(ours),
        };
        Negotiated {
            crc: ours.crc || peer.crc,
            tx_markers: peer.markers,
            revision,
            peer_enhanced: peer.enhanced,
            peer_ird,
            peer_ord,
            ord,
            rtr,
            private_data: peer.private_data.to_vec(),
        }
    }
}

/// The ready-to-receive message of peer-to-peer mode: the first FPDU of the initiator, which lets the
/// responder speak (RFC 6581 9.2). It has no payload, and no user of either end sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rtr {
    /// A Send (flag B).
    Send,
    /// An RDMA Write (flag C).
    Write,
    /// An RDMA Read (flag D).
    Read,
}

impl Rtr {
    /// All, the best first: a Write needs no answer and no receive, a Read is answered, and a Send is
    /// what many adapters do not offer (Linux siw among them).
    const PREFERENCE: [Rtr; 3] = [Rtr::Write, Rtr::Read, Rtr::Send];

    fn flag(self, enhanced: &mut Enhanced) -> &mut bool {
        match self {
            Rtr::Send => &mut enhanced.rtr_send,
            Rtr::Write => &mut enhanced.rtr_write,
            Rtr::Read => &mut enhanced.rtr_read,
        }
    }

    /// What both ends offer, if both want peer-to-peer mode; `None` if one does not.
    fn agree(ours: &Enhanced, theirs: &Enhanced) -> Result<Option<Rtr>, SetupError> {
        if !ours.peer_to_peer || !theirs.peer_to_peer {
            return Ok(None);
        }
        let (mut ours, mut theirs) = (*ours, *theirs);
        let both = |rtr: &Rtr| *rtr.flag(&mut ours) && *rtr.flag(&mut theirs);
        match Self::PREFERENCE.into_iter().find(both) {
            Some(rtr) => Ok(Some(rtr)),
            None => Err(SetupError::NoMatchingRtr),
        }
    }
}

/// The reads that a responder must answer at a time if it wants `ird`: an initiator that is to open the
/// stream by a Read may send none unless one is granted, and Linux siw then gives up.
pub fn rtr_ird(rtr: Option<Rtr>, ird: u16) -> u16 {
    if rtr == Some(Rtr::Read) { ird.max(1) } else { ird }
}

/// Why start-up failed. Apart from [`SetupError::PrivateDataTooLong`] and
/// [`SetupError::WrongState`], the connection is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SetupError {
    /// The frame is malformed (RFC 5044 7.1.1, RFC 6581 9).
    #[error("malformed MPA start-up frame: {0}")]
    Frame(#[from] WireError),
    /// The peer's frame has a revision that we do not speak (RFC 5044 7.1.1).
    #[error("MPA revision {0}")]
    Revision(u8),
    /// The reply is not enhanced although the request was (RFC 6581 9).
    #[error("reply without enhanced fields to an enhanced request")]
    NotEnhanced,
    /// The responder wants more reads outstanding than we answer (RFC 6581 9.1); MPA error 6.
    #[error("peer wants {peer_ord} reads outstanding, we answer {ird}")]
    InsufficientIrd {
        /// What the peer wants.
        peer_ord: u16,
        /// What we offered.
        ird: u16,
    },
    /// Peer-to-peer mode is wanted, but with no ready-to-receive message that both ends know (RFC 6581
    /// 9.2); MPA error 7.
    #[error("no ready-to-receive message that both ends know")]
    NoMatchingRtr,
    /// The initiator sent more than its request before it had our reply (RFC 5044 7.1.2).
    #[error("initiator sent data before our reply")]
    EarlyData,
    /// Caller: private data above 512 bytes, with the four of RFC 6581.
    #[error("private data too long: {0} bytes")]
    PrivateDataTooLong(usize),
    /// Caller: answered without a request at hand, or twice.
    #[error("no request to answer")]
    WrongState,
}

/// How an initiator's start-up ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The connection stands.
    Established(Negotiated),
    /// The responder refused.
    Rejected {
        /// Its private data: may say why.
        private_data: Vec<u8>,
        /// The revision of its reply: 1 if it knows no other.
        revision: u8,
    },
}

/// A request as a responder sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Revision asked for: 1 or 2, or 0, which is answered as 1 is.
    pub revision: u8,
    /// The initiator wants CRCs.
    pub crc: bool,
    /// The initiator wants markers in what we send.
    pub markers: bool,
    /// Its read depths and ready-to-receive flags, if the frame is enhanced.
    pub enhanced: Option<Enhanced>,
    /// Its private data, without the fields of RFC 6581.
    pub private_data: Vec<u8>,
}

/// Collects one frame, never more than its bytes.
#[derive(Debug)]
struct Inbox {
    kind: FrameKind,
    bytes: Vec<u8>,
}

impl Inbox {
    /// Takes what belongs to the frame. Gives the number of bytes used, and whether the frame is
    /// whole.
    fn fill(&mut self, bytes: &[u8]) -> Result<(usize, bool), SetupError> {
        let mut used = 0;
        loop {
            // The header comes first, since only it tells how long the frame is.
            let known = StartFrame::frame_len(self.kind, &self.bytes)?;
            let want = known.unwrap_or(quipu_wire::mpa::FRAME_HEADER_LEN);
            let take = (want - self.bytes.len()).min(bytes.len() - used);
            self.bytes.extend_from_slice(&bytes[used..used + take]);
            used += take;
            if known.is_some() && self.bytes.len() == want {
                return Ok((used, true));
            }
            if take == 0 {
                return Ok((used, false));
            }
        }
    }
}

/// One frame on its way out.
#[derive(Debug, Default)]
struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
}

impl Outbox {
    fn new(frame: &StartFrame<'_>) -> Self {
        let mut bytes = vec![0; frame.wire_len()];
        frame.emit(&mut bytes);
        Outbox { bytes, sent: 0 }
    }

    fn poll(&mut self, out: &mut [u8]) -> usize {
        let rest = &self.bytes[self.sent..];
        let len = rest.len().min(out.len());
        out[..len].copy_from_slice(&rest[..len]);
        self.sent += len;
        len
    }
}

fn check_private_data(private_data: &[u8]) -> Result<(), SetupError> {
    if private_data.len() > MAX_USER_DATA {
        return Err(SetupError::PrivateDataTooLong(private_data.len()));
    }
    Ok(())
}

/// The end that opened the TCP connection. Order of calls: [`Initiator::poll_transmit`] until it
/// gives 0, then [`Initiator::handle`] with what arrives until it gives an [`Outcome`].
#[derive(Debug)]
pub struct Initiator {
    params: Params,
    outbox: Outbox,
    inbox: Inbox,
    done: bool,
}

impl Initiator {
    /// Prepares the request.
    ///
    /// # Errors
    /// [`SetupError::PrivateDataTooLong`]; [`SetupError::Revision`] if `params` ask for one other
    /// than 1 and 2.
    pub fn new(params: Params, private_data: &[u8]) -> Result<Self, SetupError> {
        check_private_data(private_data)?;
        if !(1..=2).contains(&params.revision) {
            return Err(SetupError::Revision(params.revision));
        }
        // Who offers to begin by a Read has one outstanding then, whatever its user wants.
        let least = |it: &Enhanced| u16::from(it.peer_to_peer && it.rtr_read);
        let enhanced = params.enhanced.filter(|_| params.revision >= 2);
        let enhanced = enhanced.map(|it| Enhanced { ord: it.ord.max(least(&it)), ..it });
        let outbox = Outbox::new(&StartFrame {
            kind: FrameKind::Request,
            markers: false,
            crc: params.crc,
            reject: false,
            revision: params.revision,
            enhanced,
            private_data,
        });
        let inbox = Inbox { kind: FrameKind::Reply, bytes: Vec::new() };
        Ok(Initiator { params: Params { enhanced, ..params }, outbox, inbox, done: false })
    }

    /// Copies what is to be sent to the front of `out` and gives its length; 0 when there is
    /// nothing left.
    pub fn poll_transmit(&mut self, out: &mut [u8]) -> usize {
        self.outbox.poll(out)
    }

    /// Takes bytes that arrived. Gives how many were used and, once the reply is whole, how it
    /// ended; what follows the reply is left for the [`crate::Receiver`].
    pub fn handle(&mut self, bytes: &[u8]) -> Result<(usize, Option<Outcome>), SetupError> {
        if self.done {
            return Ok((0, None));
        }
        let (used, whole) = self.inbox.fill(bytes)?;
        if !whole {
            return Ok((used, None));
        }
        let reply = StartFrame::parse(FrameKind::Reply, &self.inbox.bytes)?;
        let outcome = self.conclude(&reply)?;
        self.done = true;
        self.inbox.bytes = Vec::new();
        Ok((used, Some(outcome)))
    }

    /// Whether nothing of a reply has come.
    pub fn is_unanswered(&self) -> bool {
        !self.done && self.inbox.bytes.is_empty()
    }

    /// What is to be sent before the connection is closed over `error`, which [`Initiator::handle`]
    /// gave: a TERMINATE if the reply cannot be accepted (RFC 6581 8), else nothing.
    pub fn last_words(&self, error: &SetupError) -> Vec<u8> {
        let reply = StartFrame::parse(FrameKind::Reply, &self.inbox.bytes);
        let (Ok(reply), Some(terminate)) = (reply, terminate::for_setup_error(error)) else {
            return Vec::new();
        };
        let agreed = Negotiated::new(&self.params, reply.revision, &reply, None);
        let mut sender = Sender::new(&agreed, DEFAULT_MAX_ULPDU);
        let mut bytes = vec![0; sender.fpdu_bound(terminate.wire_len())];
        let mut message = sender.begin_untagged(UntaggedOp::Terminate, 0);
        let len = sender.whole(&mut message, &mut bytes, &terminate).unwrap_or(0);
        bytes.truncate(len);
        bytes
    }

    fn conclude(&self, reply: &StartFrame<'_>) -> Result<Outcome, SetupError> {
        // A refusal may come from a responder that does not know our revision, so it is looked at
        // first.
        if reply.reject {
            let private_data = reply.private_data.to_vec();
            return Ok(Outcome::Rejected { private_data, revision: reply.revision });
        }
        if reply.revision == 0 || reply.revision > self.params.revision {
            return Err(SetupError::Revision(reply.revision));
        }
        let mut rtr = None;
        if let Some(ours) = self.params.enhanced {
            let Some(theirs) = reply.enhanced else {
                return Err(SetupError::NotEnhanced);
            };
            rtr = Rtr::agree(&ours, &theirs)?;
            if theirs.ord != MAX_IRD_ORD && ours.ird != MAX_IRD_ORD && theirs.ord > ours.ird {
                let (peer_ord, ird) = (theirs.ord, ours.ird);
                return Err(SetupError::InsufficientIrd { peer_ord, ird });
            }
        }
        Ok(Outcome::Established(Negotiated::new(&self.params, reply.revision, reply, rtr)))
    }
}

/// Where a responder stands.
#[derive(Debug)]
enum State {
    /// The request has not come in full.
    Waiting,
    /// It has, and the user has not answered.
    Requested,
    /// The answer is on its way.
    Answered,
}

/// The end that accepted the TCP connection. Order of calls: [`Responder::handle`] with what
/// arrives until it gives a [`Request`]; [`Responder::accept`] or [`Responder::reject`];
/// [`Responder::poll_transmit`] until it gives 0.
#[derive(Debug)]
pub struct Responder {
    inbox: Inbox,
    outbox: Outbox,
    state: State,
}

impl Default for Responder {
    fn default() -> Self {
        Self::new()
    }
}

impl Responder {
    /// Waits for a request.
    pub fn new() -> Self {
        let inbox = Inbox { kind: FrameKind::Request, bytes: Vec::new() };
        Responder { inbox, outbox: Outbox::default(), state: State::Waiting }
    }

    /// Takes bytes that arrived. Gives how many were used and, once, the request. Bytes behind the
    /// request are left; handing them in before the answer is [`SetupError::EarlyData`]. After the
    /// answer they are for the [`crate::Receiver`].
    pub fn handle(&mut self, bytes: &[u8]) -> Result<(usize, Option<Request>), SetupError> {
        match self.state {
            State::Waiting => {}
            State::Requested if !bytes.is_empty() => return Err(SetupError::EarlyData),
            State::Requested | State::Answered => return Ok((0, None)),
        }
        let (used, whole) = self.inbox.fill(bytes)?;
        if !whole {
            return Ok((used, None));
        }
        let frame = StartFrame::parse(FrameKind::Request, &self.inbox.bytes)?;
        if frame.revision > 2 {
            return Err(SetupError::Revision(frame.revision));
        }
        self.state = State::Requested;
        Ok((
            used,
            Some(Request {
                revision: frame.revision,
                crc: frame.crc,
                markers: frame.markers,
                enhanced: frame.enhanced,
                private_data: frame.private_data.to_vec(),
            }),
        ))
    }

    /// Accepts the request: prepares the reply and gives what holds from now on.
    ///
    /// The reply has the request's revision and is enhanced if the request was; the ORD it states
    /// is no more than the initiator's IRD (RFC 6581 9.1), and of the ready-to-receive messages it
    /// names the one that the initiator is to send (9.2).
    ///
    /// # Errors
    /// [`SetupError::PrivateDataTooLong`], [`SetupError::WrongState`], [`SetupError::NoMatchingRtr`];
    /// the responder can be asked again.
    pub fn accept(
        &mut self,
        params: Params,
        private_data: &[u8],
    ) -> Result<Negotiated, SetupError> {
        let (negotiated, outbox) = self.answer(params, private_data, false)?;
        self.outbox = outbox;
        self.state = State::Answered;
        self.inbox.bytes = Vec::new();
        Ok(negotiated)
    }

    /// Refuses the request: prepares the reply. The connection is to be closed once it is sent.
    ///
    /// # Errors
    /// [`SetupError::PrivateDataTooLong`], [`SetupError::WrongState`].
    pub fn reject(&mut self, private_data: &[u8]) -> Result<(), SetupError> {
        let (_, outbox) = self.answer(Params::default(), private_data, true)?;
        self.outbox = outbox;
        self.state = State::Answered;
        self.inbox.bytes = Vec::new();
        Ok(())
    }

    /// Copies what is to be sent to the front of `out` and gives its length; 0 when there is
    /// nothing left.
    pub fn poll_transmit(&mut self, out: &mut [u8]) -> usize {
        self.outbox.poll(out)
    }

    fn answer(
        &self,
        params: Params,
        private_data: &[u8],
        reject: bool,
    ) -> Result<(Negotiated, Outbox), SetupError> {
        if !matches!(self.state, State::Requested) {
            return Err(SetupError::WrongState);
        }
        check_private_data(private_data)?;
        let request = StartFrame::parse(FrameKind::Request, &self.inbox.bytes)?;
        let (mut enhanced, mut rtr) = (None, None);
        if let Some(theirs) = request.enhanced {
            let open = Enhanced { ird: MAX_IRD_ORD, ord: MAX_IRD_ORD, ..Enhanced::default() };
            let ours = params.enhanced.unwrap_or(open);
            // A refusal agrees on nothing.
            rtr = if reject { None } else { Rtr::agree(&ours, &theirs)? };
            let (ird, ord) = (rtr_ird(rtr, ours.ird), ours.ord.min(theirs.ird));
            let mut reply = Enhanced { ird, ord, ..Enhanced::default() };
            if let Some(rtr) = rtr {
                reply.peer_to_peer = true;
                *rtr.flag(&mut reply) = true;
            }
            enhanced = Some(reply);
        }
        let params = Params { enhanced, ..params };
        let outbox = Outbox::new(&StartFrame {
            kind: FrameKind::Reply,
            markers: false,
            // C in the request must be repeated (RFC 5044 7.1.1).
            crc: params.crc || request.crc,
            reject,
            revision: request.revision,
            enhanced,
            private_data,
        });
        Ok((Negotiated::new(&params, request.revision, &request, rtr), outbox))
    }
}

const _: () = assert!(MAX_FRAME_LEN == 532);
