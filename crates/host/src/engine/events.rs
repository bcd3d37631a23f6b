//! What programs wait for: completion channels and asynchronous events, each with a descriptor that
//! is readable exactly while events are queued.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::os::fd::RawFd;

use quipu_fault::Call;
use quipu_nic::{AsyncEvent, ChannelId, CqId, QpId, SrqId};

use super::Engine;
use super::helper::Helper;
use super::openings::Openings;
use super::qpip::TcpEvent;
use crate::config::Device;
use crate::error::EngineError;
use crate::handle_map::HandleMap;
use crate::net::table::Table;
use crate::net::token::Slot;
use crate::sys::QueueFd;

/// A completion event: a queue that was armed has got something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionEvent {
    /// The queue.
    pub cq: CqId,
    /// What it was created with.
    pub context: u64,
}

/// Who opened the device: asynchronous events about an object go to whoever created it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContextId(u64);

/// How many events of an object were handed out in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventsReported {
    /// Completion events.
    pub completion: u32,
    /// Asynchronous events.
    pub asynchronous: u32,
}

/// Something that asynchronous events are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Object {
    Cq(CqId),
    Qp(QpId),
    Srq(SrqId),
}

/// The object that an event is about; `None` for the port or the device.
fn subject(event: &AsyncEvent) -> Option<Object> {
    Some(match *event {
        AsyncEvent::CqErr(cq) => Object::Cq(cq),
        AsyncEvent::QpFatal(qp)
        | AsyncEvent::QpReqErr(qp)
        | AsyncEvent::QpAccessErr(qp)
        | AsyncEvent::CommEst(qp)
        | AsyncEvent::SqDrained(qp)
        | AsyncEvent::PathMig(qp)
        | AsyncEvent::PathMigErr(qp)
        | AsyncEvent::QpLastWqeReached(qp) => Object::Qp(qp),
        AsyncEvent::SrqErr(srq) | AsyncEvent::SrqLimitReached(srq) => Object::Srq(srq),
        AsyncEvent::PortActive
        | AsyncEvent::PortErr
        | AsyncEvent::DeviceFatal
        | AsyncEvent::LidChange
        | AsyncEvent::PkeyChange
        | AsyncEvent::SmChange
        | AsyncEvent::ClientReregister
        | AsyncEvent::GidChange => return None,
    })
}

/// Events with their descriptor.
struct Queue<T> {
    fd: QueueFd,
    events: VecDeque<T>,
    /// Nothing comes any more: whoever waits is to ask, and hears why.
    over: bool,
}

impl<T> Queue<T> {
    fn new(fd: QueueFd) -> Self {
        Self { fd, events: VecDeque::new(), over: false }
    }

    /// The descriptor is readable from now on.
    fn end(&mut self) {
        self.over = true;
        self.signal();
    }

    /// Makes the descriptor say whether events are queued.
    fn signal(&mut self) {
        self.fd.show(self.events.len() + usize::from(self.over));
    }

    fn take(&mut self) -> Option<T> {
        let event = self.events.pop_front();
        self.signal();
        event
    }
}

impl Queue<TcpEvent> {
    /// Drops the events of a queue pair.
    fn forget(&mut self, qp: QpId) {
        self.events.retain(|event| event.qp != qp);
        self.signal();
    }
}

/// Somebody who has opened a device.
struct Context {
    events: Queue<AsyncEvent>,
    device: Device,
}

/// A completion channel.
struct Channel {
    queue: Queue<CompletionEvent>,
    /// Completion queues that use it.
    users: u32,
    /// Whether programs wait by calling in, so that they make the progress themselves.
    driven: bool,
}

struct ObjectState {
    context: ContextId,
    reported: EventsReported,
    channel: Option<ChannelId>,
}

/// Whom an event about a connection is kept for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum For {
    /// The program, which takes it when it likes.
    Program,
    /// A library that keeps account of connections, and hears of each event at once.
    Library,
}

/// All events of an engine.
pub(crate) struct Events {
    channels: Table<Channel>,
    /// Which channel's a descriptor is.
    by_fd: HandleMap<RawFd, ChannelId>,
    contexts: Table<Context>,
    objects: HandleMap<Object, ObjectState>,
    /// Queue pairs that several have open.
    pub(crate) openings: Openings,
    /// The channel for which a thread waits inside the engine: it needs no descriptor to wake it.
    attended: Option<ChannelId>,
    /// What happens to connections of QPIP, for contexts that have asked for it: [`For`] each a copy.
    tcp: [HandleMap<ContextId, Queue<TcpEvent>>; 2],
    /// The context for which a thread waits inside the engine, and for which copy.
    attended_tcp: Option<(ContextId, For)>,
    /// The adapter is gone, and nothing comes any more.
    over: bool,
}

/// Set in every handle, so that none is 0, which facades use for "none".
const VALID: u64 = 1 << 63;

fn slot_of(bits: u64) -> Slot {
    // Without the mark the generation is one that no slot has.
    Slot { index: bits as u32, generation: ((bits ^ VALID) >> 32) as u32 }
}

fn bits_of(slot: Slot) -> u64 {
    VALID | u64::from(slot.generation) << 32 | u64::from(slot.index)
}

impl Events {
    pub(crate) fn new() -> Self {
        Self {
            channels: Table::new(),
            by_fd: HandleMap::default(),
            contexts: Table::new(),
            objects: HandleMap::default(),
            openings: Openings::default(),
            attended: None,
            tcp: Default::default(),
            attended_tcp: None,
            over: false,
        }
    }

    /// The adapter is gone: completion channels, and descriptors for events about connections, are readable
    /// from now on, so that nobody sleeps who has nothing to wait for.
    #[cold]
    pub(crate) fn end(&mut self) {
        self.over = true;
        for slot in self.channels.slots().collect::<Vec<_>>() {
            if let Some(channel) = self.channels.get_mut(slot) {
                channel.queue.end();
            }
        }
        self.tcp.iter_mut().flat_map(HandleMap::values_mut).for_each(Queue::end);
    }

    /// Whether that is so.
    #[inline]
    pub(crate) fn are_over(&self) -> bool {
        self.over
    }

    /// Whether a program asks for events about connections.
    pub(crate) fn has_tcp_users(&self) -> bool {
        self.tcp.iter().any(|kept| !kept.is_empty())
    }

    fn channel(&mut self, id: ChannelId) -> Result<&mut Channel, EngineError> {
        self.channels.get_mut(slot_of(id.0)).ok_or(EngineError::NoSuchQueue)
    }

    fn context(&mut self, id: ContextId) -> Result<&mut Queue<AsyncEvent>, EngineError> {
        let context = self.contexts.get_mut(slot_of(id.0)).ok_or(EngineError::NoSuchQueue)?;
        Ok(&mut context.events)
    }

    pub(crate) fn create_channel(&mut self) -> Result<(ChannelId, RawFd), EngineError> {
        let fd = new_descriptor()?;
        let raw = fd.as_raw_fd();
        let mut queue = Queue::new(fd);
        if self.over {
            queue.end();
        }
        let channel = Channel { queue, users: 0, driven: false };
        let slot = self.channels.insert_with(|_| Ok::<_, EngineError>(channel))?;
        let id = ChannelId(bits_of(slot));
        self.by_fd.insert(raw, id);
        Ok((id, raw))
    }

    pub(crate) fn destroy_channel(&mut self, id: ChannelId) -> Result<(), EngineError> {
        if self.channel(id)?.users > 0 {
            return Err(quipu_nic::Fault::Busy.into());
        }
        if let Some(channel) = self.channels.remove(slot_of(id.0)) {
            self.by_fd.remove(&channel.queue.fd.as_raw_fd());
        }
        Ok(())
    }

    pub(crate) fn channel_fd(&mut self, id: ChannelId) -> Result<RawFd, EngineError> {
        Ok(self.channel(id)?.queue.fd.as_raw_fd())
    }

    pub(crate) fn open_context(
        &mut self,
        device: Device,
    ) -> Result<(ContextId, RawFd), EngineError> {
        let fd = new_descriptor()?;
        let raw = fd.as_raw_fd();
        let context = Context { events: Queue::new(fd), device };
        let slot = self.contexts.insert_with(|_| Ok::<_, EngineError>(context))?;
        Ok((ContextId(bits_of(slot)), raw))
    }

    pub(crate) fn close_context(&mut self, id: ContextId) -> Result<(), EngineError> {
        for kept in &mut self.tcp {
            kept.remove(&id);
        }
        self.contexts.remove(slot_of(id.0)).map(drop).ok_or(EngineError::NoSuchQueue)
    }

    pub(crate) fn context_fd(&mut self, id: ContextId) -> Result<RawFd, EngineError> {
        Ok(self.context(id)?.fd.as_raw_fd())
    }

    /// Notes whose an object is, and for a completion queue its channel.
    pub(crate) fn add_object(
        &mut self,
        object: Object,
        context: ContextId,
        channel: Option<ChannelId>,
    ) {
        if let Some(Ok(channel)) = channel.map(|id| self.channel(id)) {
            channel.users += 1;
        }
        let state = ObjectState { context, reported: EventsReported::default(), channel };
        self.objects.insert(object, state);
    }

    /// Forgets an object and its events that were not taken; how many were.
    pub(crate) fn remove_object(&mut self, object: Object) -> EventsReported {
        let Some(state) = self.objects.remove(&object) else {
            return EventsReported::default();
        };
        if let Ok(queue) = self.context(state.context) {
            queue.events.retain(|event| subject(event) != Some(object));
            queue.signal();
        }
        if let Object::Qp(qp) = object {
            for queue in self.tcp.iter_mut().filter_map(|kept| kept.get_mut(&state.context)) {
                queue.forget(qp);
            }
        }
        if let (Some(Ok(channel)), Object::Cq(cq)) =
            (state.channel.map(|id| self.channel(id)), object)
        {
            channel.users -= 1;
            channel.queue.events.retain(|event| event.cq != cq);
            channel.queue.signal();
        }
        state.reported
    }

    /// Queues a completion event.
    pub(crate) fn completion(&mut self, id: ChannelId, event: CompletionEvent) {
        let attended = self.attended == Some(id);
        let Ok(channel) = self.channel(id) else {
            return;
        };
        channel.queue.events.push_back(event);
        if !attended {
            channel.queue.signal();
        }
    }

    /// Queues an asynchronous event: with those who have its object open, or with everybody.
    pub(crate) fn asynchronous(&mut self, event: AsyncEvent) {
        let Self { contexts, objects, openings, .. } = self;
        if subject(&event).is_none() {
            for slot in contexts.slots().collect::<Vec<_>>() {
                queue(contexts, slot, event);
            }
        }
        for event in openings.copies(event) {
            let owner = subject(&event).and_then(|object| objects.get(&object));
            if let Some(ObjectState { context, .. }) = owner {
                queue(contexts, slot_of(context.0), event);
            }
        }
    }

    /// Queues an event about the port of some devices with those who have opened one of them.
    pub(crate) fn of_port(&mut self, event: AsyncEvent, devices: impl Fn(Device) -> bool) {
        for slot in self.contexts.slots().collect::<Vec<_>>() {
            if self.contexts.get_mut(slot).is_some_and(|context| devices(context.device)) {
                queue(&mut self.contexts, slot, event);
            }
        }
    }

    /// Takes the next event of a channel.
    pub(crate) fn take_completion(
        &mut self,
        id: ChannelId,
    ) -> Result<Option<CompletionEvent>, EngineError> {
        let event = self.channel(id)?.queue.take();
        if let Some(state) = event.and_then(|event| self.objects.get_mut(&Object::Cq(event.cq))) {
            state.reported.completion = state.reported.completion.wrapping_add(1);
        }
        Ok(event)
    }

    /// Takes the next asynchronous event of a context.
    pub(crate) fn take_asynchronous(
        &mut self,
        id: ContextId,
    ) -> Result<Option<AsyncEvent>, EngineError> {
        let event = self.context(id)?.take();
        let object = event.as_ref().and_then(subject);
        if let Some(state) = object.and_then(|object| self.objects.get_mut(&object)) {
            state.reported.asynchronous = state.reported.asynchronous.wrapping_add(1);
        }
        Ok(event)
    }

    /// Whether a channel has an event.
    pub(crate) fn has_completion(&mut self, id: ChannelId) -> Result<bool, EngineError> {
        Ok(!self.channel(id)?.queue.events.is_empty())
    }

    /// Has events about connections be kept for a context; their descriptor.
    pub(crate) fn open_tcp(&mut self, id: ContextId, whose: For) -> Result<RawFd, EngineError> {
        self.context(id)?;
        if let Entry::Vacant(place) = self.tcp[whose as usize].entry(id) {
            let queue = place.insert(Queue::new(new_descriptor()?));
            if self.over {
                queue.end();
            }
        }
        self.tcp_fd(id, whose)
    }

    fn tcp_queue(
        &mut self,
        id: ContextId,
        whose: For,
    ) -> Result<&mut Queue<TcpEvent>, EngineError> {
        self.tcp[whose as usize].get_mut(&id).ok_or(EngineError::NoSuchQueue)
    }

    pub(crate) fn tcp_fd(&mut self, id: ContextId, whose: For) -> Result<RawFd, EngineError> {
        Ok(self.tcp_queue(id, whose)?.fd.as_raw_fd())
    }

    /// Queues an event about a connection, if its owner wants to know. A connection has three at most, so
    /// there are never many.
    pub(crate) fn tcp(&mut self, event: TcpEvent) {
        let owner = self.objects.get(&Object::Qp(event.qp)).map(|state| state.context);
        let Some(owner) = owner else { return };
        for whose in [For::Program, For::Library] {
            let attended = self.attended_tcp == Some((owner, whose));
            if let Ok(queue) = self.tcp_queue(owner, whose) {
                queue.events.push_back(event);
                if !attended {
                    queue.signal();
                }
            }
        }
    }

    /// Takes the next event about a connection.
    pub(crate) fn take_tcp(
        &mut self,
        id: ContextId,
        whose: For,
    ) -> Result<Option<TcpEvent>, EngineError> {
        Ok(self.tcp_queue(id, whose)?.take())
    }

    /// Drops the events for the program about the connections of a queue pair so far.
    pub(crate) fn forget_tcp(&mut self, id: ContextId, qp: QpId) -> Result<(), EngineError> {
        self.tcp_queue(id, For::Program)?.forget(qp);
        Ok(())
    }

    pub(crate) fn has_tcp(&self, id: ContextId, whose: For) -> bool {
        self.tcp[whose as usize].get(&id).is_some_and(|queue| !queue.events.is_empty())
    }

    /// A thread begins to wait inside the engine for events about connections.
    pub(crate) fn attend_tcp(&mut self, id: ContextId, whose: For) {
        self.attended_tcp = Some((id, whose));
    }

    /// The thread no longer waits: the descriptor speaks again.
    pub(crate) fn leave_tcp(&mut self) {
        let attended = self.attended_tcp.take();
        if let Some(Ok(queue)) = attended.map(|(id, whose)| self.tcp_queue(id, whose)) {
            queue.signal();
        }
    }

    /// A thread looks for events of a channel, and takes one if there are any: until it leaves, the
    /// descriptor says nothing of new ones.
    pub(crate) fn hold(&mut self, id: ChannelId) {
        self.attended = Some(id);
    }

    /// A thread begins to wait inside the engine for a channel.
    pub(crate) fn attend(&mut self, id: ChannelId) {
        self.hold(id);
        if let Ok(channel) = self.channel(id) {
            channel.driven = true;
        }
    }

    /// The thread no longer waits: descriptors speak again.
    pub(crate) fn leave(&mut self) {
        if let Some(Ok(channel)) = self.attended.take().map(|id| self.channel(id)) {
            channel.queue.signal();
        }
    }

    /// Whether events are queued in the channel for which a thread waits inside the engine.
    pub(crate) fn attended_waits(&mut self) -> bool {
        if self.over && (self.attended.is_some() || self.attended_tcp.is_some()) {
            return true;
        }
        if self.attended_tcp.is_some_and(|(id, whose)| self.has_tcp(id, whose)) {
            return true;
        }
        let channel = self.attended.map(|id| self.channel(id));
        channel.is_some_and(|channel| channel.is_ok_and(|it| !it.queue.events.is_empty()))
    }

    /// The program waits for these descriptors by calling in: nobody else need be called when it asks for an
    /// event of a channel among them.
    pub(crate) fn drive(&mut self, fds: impl Iterator<Item = RawFd>) {
        for fd in fds {
            if let Some(Ok(channel)) = self.by_fd.get(&fd).copied().map(|id| self.channel(id)) {
                channel.driven = true;
            }
        }
    }

    /// The program waits for a channel by its descriptor: others must make the progress.
    pub(crate) fn not_driven(&mut self, id: ChannelId) {
        if let Ok(channel) = self.channel(id) {
            channel.driven = false;
        }
    }

    /// Whether the program, to hear of completions of `cq`, will wait on a descriptor.
    pub(crate) fn waits_outside(&mut self, cq: CqId) -> bool {
        let channel = self.objects.get(&Object::Cq(cq)).and_then(|state| state.channel);
        channel.is_some_and(|id| self.channel(id).is_ok_and(|channel| !channel.driven))
    }
}

impl Engine {
    /// Opens the device once more: asynchronous events about the objects that this context creates
    /// come to it. Also the descriptor that is readable while there are any.
    ///
    /// # Errors
    ///
    /// No descriptor is left.
    pub fn open_context(&self) -> Result<(ContextId, RawFd), EngineError> {
        self.open_context_of(Device::Quipu0)
    }

    /// As [`open_context`](Self::open_context), for one of [the devices that programs see](Self::devices):
    /// what is about its port comes to the context, too.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn open_context_of(&self, device: Device) -> Result<(ContextId, RawFd), EngineError> {
        let mut core = self.enter_for(Call::OpenDevice)?;
        let opened = core.events.open_context(device)?;
        let planned = core.faults.is_some();
        drop(core);
        if planned {
            // The clock may start a fault while the program does nothing.
            Helper::start(&self.inner)?;
        }
        Ok(opened)
    }

    /// Closes a context and its descriptor. Its objects are to be destroyed before.
    ///
    /// # Errors
    ///
    /// No such context.
    pub fn close_context(&self, context: ContextId) -> Result<(), EngineError> {
        self.enter()?.events.close_context(context)
    }
}

/// Queues an asynchronous event with a context.
fn queue(contexts: &mut Table<Context>, slot: Slot, event: AsyncEvent) {
    if let Some(Context { events, .. }) = contexts.get_mut(slot) {
        events.events.push_back(event);
        events.signal();
    }
}

fn new_descriptor() -> Result<QueueFd, EngineError> {
    QueueFd::new().map_err(|e| EngineError::system("a descriptor for events", e))
}

#[cfg(test)]
mod tests;
