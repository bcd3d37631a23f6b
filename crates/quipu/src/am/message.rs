//! What a handler gets.

use std::fmt;
use std::sync::Arc;

use quipu_am::{Body, CallError, Delivery, DeliveryKind, Outgoing, Payload, Replied};

use super::endpoint::Source;
use super::port::Shared;
use super::{Arg, Category, Error, Name, Tag};

/// What runs when a message arrives.
pub type Handler = Arc<dyn Fn(&mut Message<'_>) + Send + Sync>;

/// A message, for as long as its handler runs.
pub struct Message<'a> {
    pub(super) shared: &'a Shared,
    pub(super) delivery: Box<Delivery<Handler>>,
}

impl fmt::Debug for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("kind", &self.kind())
            .field("handler", &self.handler())
            .field("args", &self.args())
            .field("payload_len", &self.payload_len())
            .finish()
    }
}

impl<'a> Message<'a> {
    pub(super) fn new(shared: &'a Shared, delivery: Box<Delivery<Handler>>) -> Self {
        Self { shared, delivery }
    }

    /// Whether it is a request, a reply, or a message that came back.
    #[must_use]
    #[inline]
    pub fn kind(&self) -> DeliveryKind {
        self.delivery.kind()
    }

    /// The arguments.
    #[must_use]
    #[inline]
    pub fn args(&self) -> &[Arg] {
        self.delivery.args()
    }

    /// The index of the handler that runs; of a message that came back, of the one it was for.
    #[must_use]
    #[inline]
    pub fn handler(&self) -> u16 {
        self.delivery.handler_index()
    }

    /// Where the payload is.
    #[must_use]
    #[inline]
    pub fn category(&self) -> Category {
        self.delivery.category()
    }

    /// The number of the endpoint whose handler runs, as its name has it.
    #[must_use]
    #[inline]
    pub fn endpoint(&self) -> u32 {
        self.delivery.endpoint.index()
    }

    /// Bytes of the payload; of a message that came back, those it had.
    #[must_use]
    #[inline]
    pub fn payload_len(&self) -> u64 {
        self.delivery.payload_len()
    }

    /// Of a bulk message, where in the segment its payload is.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.delivery.offset()
    }

    /// The tag of a request.
    #[must_use]
    pub fn tag(&self) -> Option<Tag> {
        match self.delivery.kind() {
            DeliveryKind::Request(tag) => Some(tag),
            _ => None,
        }
    }

    /// The endpoint that has sent it, or for which a message that came back was; none if that is
    /// gone.
    #[must_use]
    pub fn source(&self) -> Option<Name> {
        self.shared.lock().core.source(&self.delivery)
    }

    /// The lowest index of the own translation table that is mapped to the sender.
    #[must_use]
    pub fn source_index(&self) -> Option<u32> {
        let state = self.shared.lock();
        let source = state.core.source(&self.delivery)?;
        state.core.index_of(self.delivery.endpoint, &source).ok().flatten()
    }

    /// Copies the payload of a medium message, from `offset` on.
    ///
    /// # Errors
    ///
    /// It has not so many bytes, or is in the segment.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), Error> {
        let (value, most) = ((offset + out.len()) as u64, self.payload_len());
        let beyond = CallError::TooMuch { what: "the end of what is read", value, most };
        if value > most {
            return Err(beyond.into());
        }
        match &self.delivery.payload {
            Payload::Slot { slot, at, .. } => {
                let state = self.shared.lock();
                quipu_am::Fabric::load(state.core.fabric(), *slot, *at as usize + offset, out);
                Ok(())
            }
            Payload::Copy(bytes) => {
                out.copy_from_slice(&bytes[offset..offset + out.len()]);
                Ok(())
            }
            Payload::None | Payload::Segment(_) if out.is_empty() => Ok(()),
            Payload::None | Payload::Segment(_) => Err(beyond.into()),
        }
    }

    /// A copy of the payload of a medium message.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn to_vec(&self) -> Result<Vec<u8>, Error> {
        let mut out = vec![0; self.payload_len() as usize];
        self.read(0, &mut out)?;
        Ok(out)
    }

    /// Where the payload is in memory, until the handler ends; 0 if there is none. For C programs.
    #[must_use]
    pub fn payload_address(&self) -> u64 {
        match &self.delivery.payload {
            Payload::None => 0,
            Payload::Slot { slot, at, .. } => {
                self.shared.lock().core.fabric().address_of(*slot, *at)
            }
            Payload::Segment(part) => part.addr,
            Payload::Copy(bytes) => bytes.as_ptr().addr() as u64,
        }
    }

    /// Whether it was replied to.
    #[must_use]
    pub fn has_replied(&self) -> bool {
        self.delivery.has_replied()
    }

    /// Replies to a request. Never waits.
    ///
    /// # Errors
    ///
    /// [`CallError::NoReply`] if the message is no request, or was replied to.
    #[inline]
    pub fn reply(&mut self, handler: u16, args: &[Arg]) -> Result<(), Error> {
        self.reply_with(handler, args, Body::Short)
    }

    /// Replies with bytes, which are copied. Never waits.
    ///
    /// # Errors
    ///
    /// As [`reply`](Self::reply); there are more bytes than a medium message has.
    pub fn reply_medium(
        &mut self,
        handler: u16,
        args: &[Arg],
        payload: &[u8],
    ) -> Result<(), Error> {
        self.reply_with(handler, args, Body::Medium(payload))
    }

    /// Replies with memory, which is written to an offset of the requester's segment. Returns when
    /// the memory may change.
    ///
    /// # Errors
    ///
    /// As [`reply`](Self::reply).
    pub fn reply_bulk(
        &mut self,
        handler: u16,
        args: &[Arg],
        source: impl Into<Source>,
        offset: u64,
    ) -> Result<(), Error> {
        let from = source.into().0;
        self.reply_with(handler, args, Body::Bulk { from, offset })
    }

    #[inline]
    fn reply_with(&mut self, handler: u16, args: &[Arg], body: Body<'_>) -> Result<(), Error> {
        let out = Outgoing { handler, args, body };
        let mut state = self.shared.lock();
        match state.core.reply(&mut self.delivery, &out)? {
            Replied::Done => Ok(()),
            Replied::Pending(ticket) => {
                while state.core.holds_reply(ticket) {
                    self.shared.drain(&mut state)?;
                }
                Ok(())
            }
            Replied::Own(delivery) => {
                drop(state);
                self.shared.run(delivery);
                Ok(())
            }
        }
    }
}
