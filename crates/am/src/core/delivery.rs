//! A handler that is to run, and what it gets.

use crate::endpoint::{EndpointId, Returned, What};
use crate::fabric::Remote;
use crate::message::{Kind, Message};
use crate::name::Name;
use crate::types::{Arg, Category, MAX_ARGS, Operation, Status, Tag};

/// Why a handler runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryKind {
    /// A request with that tag: its handler may reply.
    Request(Tag),
    /// A reply.
    Reply,
    /// A get is done.
    Got,
    /// A message of this endpoint has come back.
    Returned {
        /// Why.
        status: Status,
        /// How it was sent.
        operation: Operation,
        /// The endpoint that it was sent to.
        to: Name,
    },
}

/// The payload of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// There is none.
    None,
    /// In a receive slot, until the delivery is finished.
    Slot {
        /// Which.
        slot: u32,
        /// Its first byte there.
        at: u32,
        /// Bytes.
        len: u32,
    },
    /// In the segment of the endpoint.
    Segment(Remote),
    /// A copy: of messages of an endpoint to itself.
    Copy(Box<[u8]>),
}

/// A handler that is to run. It goes to [`Core::finish`](crate::Core::finish) afterwards.
#[derive(Debug)]
pub struct Delivery<H> {
    /// The handler; none for a message that came back where the program has set none. The caller
    /// may take it, and puts it back before it calls `finish`: otherwise the program has to set it
    /// anew.
    pub handler: Option<H>,
    /// Whose handler it is.
    pub endpoint: EndpointId,
    /// The payload.
    pub payload: Payload,
    pub(super) what: What,
    pub(super) message: Message,
    pub(super) args: [Arg; MAX_ARGS],
    pub(super) has_replied: bool,
    /// The endpoint counts as running.
    pub(super) is_marked: bool,
}

impl<H> Delivery<H> {
    /// Why it runs.
    #[must_use]
    pub fn kind(&self) -> DeliveryKind {
        match &self.what {
            What::Request { tag, .. } | What::OwnRequest { tag } => DeliveryKind::Request(*tag),
            What::Reply { .. } | What::OwnReply => DeliveryKind::Reply,
            What::Got => DeliveryKind::Got,
            What::Returned(why) => {
                let Returned { status, operation, to } = **why;
                DeliveryKind::Returned { status, operation, to }
            }
        }
    }

    /// One that is not begun yet.
    pub(super) fn empty(endpoint: EndpointId) -> Self {
        Self {
            handler: None,
            endpoint,
            payload: Payload::None,
            what: What::Got,
            message: Message::new(Kind::Request, 0),
            args: [0; MAX_ARGS],
            has_replied: false,
            is_marked: false,
        }
    }

    /// Makes it that of a message without a payload, for which the endpoint counts as running.
    #[inline(always)]
    pub(super) fn begin(
        &mut self,
        handler: Option<H>,
        endpoint: EndpointId,
        what: What,
        message: Message,
    ) {
        (self.handler, self.endpoint, self.payload) = (handler, endpoint, Payload::None);
        (self.what, self.message) = (what, message);
        (self.has_replied, self.is_marked) = (false, true);
    }

    /// Takes as many arguments as the message has.
    #[inline(always)]
    pub(super) fn put_args(&mut self, arg: impl Fn(usize) -> Arg) {
        for n in 0..usize::from(self.message.nargs).min(MAX_ARGS) {
            self.args[n] = arg(n);
        }
    }

    #[inline]
    pub(super) fn is_request(&self) -> bool {
        matches!(self.what, What::Request { .. } | What::OwnRequest { .. })
    }

    #[inline]
    pub(super) fn is_own(&self) -> bool {
        matches!(self.what, What::OwnRequest { .. } | What::OwnReply)
    }

    /// The arguments.
    #[must_use]
    #[inline]
    pub fn args(&self) -> &[Arg] {
        self.args.get(..usize::from(self.message.nargs)).unwrap_or_default()
    }

    /// Where the payload is.
    #[must_use]
    pub fn category(&self) -> Category {
        self.message.category
    }

    /// The index of the handler; of a message that came back, that of the handler it was for.
    #[must_use]
    pub fn handler_index(&self) -> u16 {
        self.message.handler
    }

    /// Of a bulk message, where in the segment its payload is.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.message.offset
    }

    /// Bytes of the payload; of a message that came back, those it had.
    #[must_use]
    pub fn payload_len(&self) -> u64 {
        self.message.len
    }

    /// Whether it was replied to.
    #[must_use]
    pub fn has_replied(&self) -> bool {
        self.has_replied
    }
}
