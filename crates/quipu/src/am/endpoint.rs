//! Endpoints.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use quipu_am::{Body, CallError, EndpointId, Local, Outgoing, Remote, Sent, Ticket};

use super::message::{Handler, Message};
use super::port::{Port, Shared};
use super::{Arg, Bundle, Counters, Error, Name, Tag};
use crate::memory::RemoteMemory;
use quipu_host::nic::{Key, Sge};

/// Polls that find nothing before a call that waits goes to sleep, and for how long.
pub(super) const EMPTY_POLLS: u32 = 2000;
pub(super) const NAP: Duration = Duration::from_millis(1);

/// Memory that a bulk message sends: registered in the domain of the port, in one piece of any
/// length.
#[derive(Clone, Copy, Debug)]
pub struct Source(pub(super) Local);

impl Source {
    /// Memory of a region, by its address and its key.
    #[must_use]
    pub fn new(addr: u64, len: u64, key: Key) -> Self {
        Self(Local { addr, len, key: key.0 })
    }
}

impl From<Sge> for Source {
    fn from(sge: Sge) -> Self {
        Self::new(sge.addr, sge.len.into(), sge.lkey)
    }
}

/// An end of messages. When it is dropped, it is freed.
#[derive(Debug)]
pub struct Endpoint {
    port: Port,
    id: EndpointId,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let core = &mut self.shared().lock().core;
        core.fabric_mut().unlisten(self.id.index());
        let _ = core.free_endpoint(self.id);
    }
}

impl Endpoint {
    pub(super) fn new(port: Port, id: EndpointId) -> Self {
        Self { port, id }
    }

    #[cfg(test)]
    pub(super) fn id(&self) -> EndpointId {
        self.id
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.port.shared
    }

    /// The port it belongs to.
    #[must_use]
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// The name by which peers map it.
    ///
    /// # Errors
    ///
    /// It was freed, with its bundle.
    pub fn name(&self) -> Result<Name, Error> {
        Ok(self.shared().lock().core.name(self.id)?)
    }

    /// Takes connections at a TCP port of its own, over datagrams a UDP port, 0 for any. It becomes its
    /// name: peers need to know the address only ([`Name::of_address`]).
    ///
    /// # Errors
    ///
    /// The port is taken.
    pub fn listen(&self, port: u16) -> Result<Name, Error> {
        let at = SocketAddr::new(self.port.device().address(), port);
        let core = &mut self.shared().lock().core;
        let name = Name::of_address(core.fabric_mut().listen(at, Some(self.id.index()))?);
        core.set_name(self.id, name)?;
        Ok(name)
    }

    /// The tag that messages must have.
    ///
    /// # Errors
    ///
    /// As [`name`](Self::name).
    pub fn tag(&self) -> Result<Tag, Error> {
        Ok(self.shared().lock().core.tag(self.id)?)
    }

    /// Sets that tag.
    ///
    /// # Errors
    ///
    /// As [`name`](Self::name).
    pub fn set_tag(&self, tag: Tag) -> Result<(), Error> {
        Ok(self.shared().lock().core.set_tag(self.id, tag)?)
    }

    /// Sets a handler; 0 is that of messages that come back.
    ///
    /// # Errors
    ///
    /// The table is shorter.
    pub fn set_handler(
        &self,
        index: u32,
        handler: impl Fn(&mut Message<'_>) + Send + Sync + 'static,
    ) -> Result<(), Error> {
        let handler: Handler = Arc::new(handler);
        Ok(self.shared().lock().core.set_handler(self.id, index, Some(handler))?)
    }

    /// Sets the first handler from 1 on that is not set; its index.
    ///
    /// # Errors
    ///
    /// The table is full.
    pub fn set_any_handler(
        &self,
        handler: impl Fn(&mut Message<'_>) + Send + Sync + 'static,
    ) -> Result<u32, Error> {
        Ok(self.shared().lock().core.set_any_handler(self.id, Arc::new(handler))?)
    }

    /// Whether a handler is set.
    ///
    /// # Errors
    ///
    /// As [`name`](Self::name).
    pub fn has_handler(&self, index: u32) -> Result<bool, Error> {
        Ok(self.shared().lock().core.has_handler(self.id, index)?)
    }

    /// The size of the handler table: 256 at first.
    ///
    /// # Errors
    ///
    /// As [`name`](Self::name).
    pub fn handler_count(&self) -> Result<u32, Error> {
        Ok(self.shared().lock().core.handler_count(self.id)?)
    }

    /// Changes the size of the handler table.
    ///
    /// # Errors
    ///
    /// Too many, or a handler is set that would be cut off.
    pub fn set_handler_count(&self, count: u32) -> Result<(), Error> {
        Ok(self.shared().lock().core.set_handler_count(self.id, count)?)
    }

    /// Maps an index to a peer, whose endpoint must have the tag. Sends nothing: the peer need not
    /// exist yet.
    ///
    /// # Errors
    ///
    /// The index is mapped, or outside of the table.
    pub fn map(&self, index: u32, name: Name, tag: Tag) -> Result<(), Error> {
        Ok(self.shared().lock().core.map(self.id, index, name, tag)?)
    }

    /// Maps the lowest index that is free; which.
    ///
    /// # Errors
    ///
    /// The table is full.
    pub fn map_any(&self, name: Name, tag: Tag) -> Result<u32, Error> {
        Ok(self.shared().lock().core.map_any(self.id, name, tag)?)
    }

    /// Frees an index. Requests under way end as they would have.
    ///
    /// # Errors
    ///
    /// It is not mapped.
    pub fn unmap(&self, index: u32) -> Result<(), Error> {
        Ok(self.shared().lock().core.unmap(self.id, index)?)
    }

    /// What an index is mapped to.
    ///
    /// # Errors
    ///
    /// It is not mapped.
    pub fn translation(&self, index: u32) -> Result<(Name, Tag), Error> {
        Ok(self.shared().lock().core.translation(self.id, index)?)
    }

    /// Changes the tag that messages to an index bear.
    ///
    /// # Errors
    ///
    /// It is not mapped.
    pub fn set_translation_tag(&self, index: u32, tag: Tag) -> Result<(), Error> {
        Ok(self.shared().lock().core.set_translation_tag(self.id, index, tag)?)
    }

    /// The size of the translation table: 256 at first.
    ///
    /// # Errors
    ///
    /// As [`name`](Self::name).
    pub fn translation_count(&self) -> Result<u32, Error> {
        Ok(self.shared().lock().core.translation_count(self.id)?)
    }

    /// Changes the size of the translation table.
    ///
    /// # Errors
    ///
    /// Too many, or an index is mapped that would be cut off.
    pub fn set_translation_count(&self, count: u32) -> Result<(), Error> {
        Ok(self.shared().lock().core.set_translation_count(self.id, count)?)
    }

    /// Sets the segment, into which bulk messages to this endpoint are written. The memory is
    /// registered in the domain of the port, with remote writes for messages and remote reads for
    /// gets, and stays so until the segment is another.
    ///
    /// # Errors
    ///
    /// As [`name`](Self::name).
    pub fn set_segment(&self, segment: Option<RemoteMemory>) -> Result<(), Error> {
        let segment =
            segment.map(|RemoteMemory { addr, len, rkey }| Remote { addr, len, key: rkey.0 });
        Ok(self.shared().lock().core.set_segment(self.id, segment)?)
    }

    /// The segment.
    ///
    /// # Errors
    ///
    /// As [`name`](Self::name).
    pub fn segment(&self) -> Result<Option<RemoteMemory>, Error> {
        let segment = self.shared().lock().core.segment(self.id)?;
        Ok(segment.map(|Remote { addr, len, key }| RemoteMemory { addr, len, rkey: Key(key) }))
    }

    /// What it has done so far.
    ///
    /// # Errors
    ///
    /// As [`name`](Self::name).
    pub fn counters(&self) -> Result<Counters, Error> {
        Ok(self.shared().lock().core.counters(self.id)?)
    }

    /// How many of its requests have neither been answered nor come back. A process that exits while this is
    /// more than 0 may take requests with it.
    ///
    /// # Errors
    ///
    /// As [`name`](Self::name).
    pub fn outstanding(&self) -> Result<usize, Error> {
        Ok(self.shared().lock().core.outstanding(self.id)?)
    }

    /// Moves it to another bundle of the port, with all that it has.
    ///
    /// # Errors
    ///
    /// A handler of it runs, or the bundle is of another port.
    pub fn move_to(&self, bundle: &Bundle) -> Result<(), Error> {
        if !Arc::ptr_eq(self.shared(), bundle.shared()) {
            return Err(CallError::NoSuchObject.into());
        }
        Ok(self.shared().lock().core.move_endpoint(self.id, bundle.id())?)
    }

    /// Sends a request: runs a handler at the peer that an index is mapped to. Waits for a credit,
    /// running handlers meanwhile.
    ///
    /// # Errors
    ///
    /// The index is not mapped; too many arguments; the caller is a handler.
    #[inline]
    pub fn request(&self, index: u32, handler: u16, args: &[Arg]) -> Result<(), Error> {
        self.send(index, &Outgoing { handler, args, body: Body::Short }).map(drop)
    }

    /// As [`request`](Self::request), but does not wait.
    ///
    /// # Errors
    ///
    /// As there; [`CallError::WouldBlock`] if there is no credit, or no connection yet.
    pub fn try_request(&self, index: u32, handler: u16, args: &[Arg]) -> Result<(), Error> {
        self.try_send(index, &Outgoing { handler, args, body: Body::Short }).map(drop)
    }

    /// Sends a request with bytes, which are copied before it returns.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request); there are more bytes than a medium message has.
    pub fn request_medium(
        &self,
        index: u32,
        handler: u16,
        args: &[Arg],
        payload: &[u8],
    ) -> Result<(), Error> {
        self.send(index, &Outgoing { handler, args, body: Body::Medium(payload) }).map(drop)
    }

    /// As [`request_medium`](Self::request_medium), but does not wait.
    ///
    /// # Errors
    ///
    /// As there; [`CallError::WouldBlock`].
    pub fn try_request_medium(
        &self,
        index: u32,
        handler: u16,
        args: &[Arg],
        payload: &[u8],
    ) -> Result<(), Error> {
        self.try_send(index, &Outgoing { handler, args, body: Body::Medium(payload) }).map(drop)
    }

    /// Writes memory to an offset of the peer's segment, then runs a handler there. Returns when
    /// the memory may change.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request).
    pub fn request_bulk(
        &self,
        index: u32,
        handler: u16,
        args: &[Arg],
        source: impl Into<Source>,
        offset: u64,
    ) -> Result<(), Error> {
        let body = Body::Bulk { from: source.into().0, offset };
        let Some(ticket) = self.send(index, &Outgoing { handler, args, body })? else {
            return Ok(());
        };
        let mut state = self.shared().lock();
        while state.core.holds_source(ticket) {
            self.shared().drain(&mut state)?;
        }
        Ok(())
    }

    /// As [`request_bulk`](Self::request_bulk), but does not wait. The memory must not change
    /// before the reply has come, or the message has come back.
    ///
    /// # Errors
    ///
    /// As there; [`CallError::WouldBlock`].
    pub fn try_request_bulk(
        &self,
        index: u32,
        handler: u16,
        args: &[Arg],
        source: impl Into<Source>,
        offset: u64,
    ) -> Result<(), Error> {
        let body = Body::Bulk { from: source.into().0, offset };
        self.try_send(index, &Outgoing { handler, args, body }).map(drop)
    }

    /// Reads `len` bytes from an offset of the peer's segment to an offset of the own one, then
    /// runs a handler here. The peer's program does nothing.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request).
    pub fn get(
        &self,
        index: u32,
        from: u64,
        (to, len): (u64, u64),
        (handler, args): (u16, &[Arg]),
    ) -> Result<(), Error> {
        let attempt = || self.try_get(index, from, (to, len), (handler, args));
        match attempt() {
            Err(Error::Call(CallError::WouldBlock)) => self.retry(attempt),
            outcome => outcome,
        }
    }

    /// As [`get`](Self::get), but does not wait.
    ///
    /// # Errors
    ///
    /// As there; [`CallError::WouldBlock`].
    pub fn try_get(
        &self,
        index: u32,
        from: u64,
        (to, len): (u64, u64),
        (handler, args): (u16, &[Arg]),
    ) -> Result<(), Error> {
        let core = &mut self.shared().lock().core;
        Ok(core.get(self.id, index, from, (to, len), (handler, args))?)
    }

    /// Adds one to the signals that the peer at an index has of this endpoint: a barrier, and whatever else
    /// needs no handler, is made of them. Waits for a credit, running handlers meanwhile. Nothing comes back,
    /// whether the peer takes it or not.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request); [`CallError::Unreachable`] if the peer is gone.
    #[inline]
    pub fn signal(&self, index: u32) -> Result<(), Error> {
        match self.try_signal(index) {
            Err(Error::Call(CallError::WouldBlock)) => self.retry(|| self.try_signal(index)),
            sent => sent,
        }
    }

    /// As [`signal`](Self::signal), but does not wait.
    ///
    /// # Errors
    ///
    /// As there; [`CallError::WouldBlock`] if there is no credit, or no connection yet.
    #[inline]
    pub fn try_signal(&self, index: u32) -> Result<(), Error> {
        if Shared::is_in_handler() {
            return Err(CallError::InHandler.into());
        }
        Ok(self.shared().lock().core.signal(self.id, index)?)
    }

    /// Takes one of the signals that the peer at an index has sent to this endpoint; whether there was one.
    /// Makes no progress.
    ///
    /// # Errors
    ///
    /// [`CallError::Unreachable`] if there is none, and the peer is gone; the index is not mapped.
    pub fn take_signal(&self, index: u32) -> Result<bool, Error> {
        Ok(self.shared().lock().core.take_signal(self.id, index)?)
    }

    /// As [`take_signal`](Self::take_signal), but waits for one, running handlers meanwhile.
    ///
    /// # Errors
    ///
    /// As there; the caller is a handler.
    pub fn wait_signal(&self, index: u32) -> Result<(), Error> {
        if Shared::is_in_handler() {
            return Err(CallError::InHandler.into());
        }
        self.shared().poll_until(self.id, |core| Ok(core.take_signal(self.id, index)?))
    }

    /// Makes progress and runs handlers of the bundle that the endpoint is in.
    ///
    /// # Errors
    ///
    /// As [`Bundle::poll`].
    pub fn poll(&self) -> Result<usize, Error> {
        let bundle = self.shared().lock().core.bundle_of(self.id)?;
        self.shared().poll(bundle)
    }

    /// Polls and tries again what was not possible, until it is.
    fn retry<T>(&self, mut attempt: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
        if Shared::is_in_handler() {
            return attempt();
        }
        let mut empty = 0;
        loop {
            empty = if self.poll()? == 0 { empty + 1 } else { 0 };
            match attempt() {
                Err(Error::Call(CallError::WouldBlock)) => {}
                outcome => return outcome,
            }
            if empty >= EMPTY_POLLS {
                // The peer may need this processor. What the last poll took in did not help.
                let bundle = self.shared().lock().core.bundle_of(self.id)?;
                self.shared().sleep(bundle, None, Some(NAP))?;
            }
        }
    }

    #[inline]
    fn send(&self, index: u32, out: &Outgoing<'_>) -> Result<Option<Ticket>, Error> {
        match self.try_send(index, out) {
            Err(Error::Call(CallError::WouldBlock)) => self.retry(|| self.try_send(index, out)),
            sent => sent,
        }
    }

    #[inline]
    fn try_send(&self, index: u32, out: &Outgoing<'_>) -> Result<Option<Ticket>, Error> {
        if Shared::is_in_handler() {
            return Err(CallError::InHandler.into());
        }
        let sent = self.shared().lock().core.request(self.id, index, out)?;
        match sent {
            Sent::Done => Ok(None),
            Sent::Pending(ticket) => Ok(Some(ticket)),
            Sent::Own(delivery) => {
                self.shared().run(delivery);
                Ok(None)
            }
        }
    }
}
