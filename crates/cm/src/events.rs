//! Event channels.

use std::collections::{BTreeSet, VecDeque};

use crate::Cm;
use crate::id::State;
use crate::keys::{ChannelKey, IdKey};
use crate::types::{CallError, Event, EventKind, Peer};

/// An event channel. The events themselves are with their identifiers; here is only their order.
#[derive(Debug, Default)]
pub(crate) struct Channel {
    order: VecDeque<(IdKey, u32)>,
    /// How many events wait. Entries of `order` may be of identifiers that left.
    waiting: usize,
    /// Identifiers that use it.
    pub(crate) users: usize,
}

/// Entries of identifiers that left are kept up to so many more than there are events.
const SLACK: usize = 64;

impl Cm {
    /// Creates an event channel.
    pub fn create_channel(&mut self) -> ChannelKey {
        self.channels.insert(Channel::default())
    }

    /// Destroys an event channel.
    ///
    /// # Errors
    ///
    /// Identifiers use it, or there is none.
    pub fn destroy_channel(&mut self, key: ChannelKey) -> Result<(), CallError> {
        let channel = self.channels.get(key).ok_or(CallError::NoSuchObject)?;
        if channel.users > 0 {
            return Err(CallError::Busy);
        }
        self.channels.remove(key);
        Ok(())
    }

    /// How many events wait in a channel.
    pub fn waiting(&self, channel: ChannelKey) -> usize {
        self.channels.get(channel).map_or(0, |channel| channel.waiting)
    }

    /// A channel in which the number of events may have changed.
    pub fn poll_touched(&mut self) -> Option<ChannelKey> {
        self.touched.pop()
    }

    fn touch(&mut self, channel: ChannelKey) {
        // A channel that is touched again and again is most often the last one.
        if self.touched.last() != Some(&channel) {
            self.touched.push(channel);
        }
    }

    /// Whose end the next event of a channel tells, and the number of the own queue pair, if it was not kept
    /// back before ([`keep_end`](Self::keep_end)).
    pub fn next_end(&self, key: ChannelKey) -> Option<(IdKey, u32)> {
        let order = &self.channels.get(key)?.order;
        let (id, event) = order.iter().find_map(|&(key, epoch)| {
            let id = self.ids.get(key).filter(|id| id.epoch == epoch)?;
            Some((id, id.events.front()?))
        })?;
        let ends = event.kind == EventKind::Disconnected && !id.end_kept;
        ends.then_some((event.id, id.own?.qpn))
    }

    /// Notes that the end of `id` was kept back, which is done once.
    pub fn keep_end(&mut self, id: IdKey) {
        if let Some(id) = self.ids.get_mut(id) {
            id.end_kept = true;
        }
    }

    /// Takes the next event of a channel.
    ///
    /// # Errors
    ///
    /// There is no such channel.
    pub fn take_event(&mut self, key: ChannelKey) -> Result<Option<Event>, CallError> {
        let channel = self.channels.get_mut(key).ok_or(CallError::NoSuchObject)?;
        while let Some((id_key, epoch)) = channel.order.pop_front() {
            let Some(id) = self.ids.get_mut(id_key).filter(|id| id.epoch == epoch) else {
                continue;
            };
            let Some(mut event) = id.events.pop_front() else { continue };
            channel.waiting -= 1;
            event.cookie = id.cookie;
            self.touch(key);
            self.note_taken(&mut event);
            return Ok(Some(event));
        }
        Ok(None)
    }

    /// Counts an event that was taken where its acknowledgement will be waited for: a connect
    /// request with its listener, one of a group with the group, too.
    fn note_taken(&mut self, event: &mut Event) {
        let Some(id) = self.ids.get_mut(event.id) else { return };
        if event.kind.is_of_group() {
            let group = id.groups.iter_mut().find(|group| group.cookie == event.multicast);
            if let Some(group) = group {
                group.reported = group.reported.wrapping_add(1);
            }
        }
        if event.kind != EventKind::ConnectRequest {
            id.reported = id.reported.wrapping_add(1);
            return;
        }
        let listener = id.listener.take();
        let Some(listener) = listener.and_then(|key| self.ids.get_mut(key)) else { return };
        listener.reported = listener.reported.wrapping_add(1);
        event.listener = listener.cookie;
        if let State::Listening(state) = &mut listener.state {
            state.untaken.remove(&event.id);
        }
    }

    /// Queues an event.
    pub(crate) fn push(&mut self, event: Event) {
        let key = event.id;
        let Some(id) = self.ids.get_mut(key) else { return };
        let Some(channel) = self.channels.get_mut(id.channel) else { return };
        id.events.push_back(event);
        channel.order.push_back((key, id.epoch));
        channel.waiting += 1;
        let channel = id.channel;
        self.touch(channel);
    }

    /// Queues an event that says only what happened, and why.
    pub(crate) fn tell(&mut self, id: IdKey, kind: EventKind, status: i32) {
        self.tell_data(id, kind, status, Box::default(), Peer::default());
    }

    pub(crate) fn tell_data(
        &mut self,
        id: IdKey,
        kind: EventKind,
        status: i32,
        private_data: Box<[u8]>,
        peer: Peer,
    ) {
        let (cookie, listener, multicast, arg) = (0, 0, 0, 0);
        self.push(Event { kind, status, id, cookie, listener, multicast, arg, private_data, peer });
    }

    /// Queues an event that the program's own side writes, in any state of the identifier: one of its own, or
    /// what became of a question for names (`rdma_write_cm_event(3)`, `rdma_resolve_addrinfo(3)`).
    ///
    /// # Errors
    ///
    /// There is no such identifier; another event.
    pub fn write_event(
        &mut self,
        key: IdKey,
        kind: EventKind,
        status: i32,
        arg: u64,
    ) -> Result<(), CallError> {
        if !self.has_id(key) {
            return Err(CallError::NoSuchObject);
        }
        if !kind.is_written() {
            return Err(CallError::Invalid("the event"));
        }
        let (cookie, listener, multicast) = (0, 0, 0);
        let (private_data, peer) = (Box::default(), Peer::default());
        let id = key;
        self.push(Event { kind, status, id, cookie, listener, multicast, arg, private_data, peer });
        Ok(())
    }

    /// Takes back those events of an identifier that `is_void` says are void. It stays, so they have to leave
    /// the order of its channel, too: what is there of an identifier counts as its events.
    pub(crate) fn take_back(&mut self, key: IdKey, is_void: impl Fn(&Event) -> bool) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let mut void: VecDeque<bool> = id.events.iter().map(&is_void).collect();
        id.events.retain(|event| !is_void(event));
        let (lost, from, entry) = (void.len() - id.events.len(), id.channel, (key, id.epoch));
        if lost > 0
            && let Some(channel) = self.channels.get_mut(from)
        {
            let mut is_in = |&other: &_| other != entry || void.pop_front() != Some(true);
            channel.order.retain(&mut is_in);
        }
        self.forget_events(from, lost);
    }

    /// Takes `lost` events, which are no more, off the count of a channel.
    pub(crate) fn forget_events(&mut self, key: ChannelKey, lost: usize) {
        let Some(channel) = self.channels.get_mut(key) else { return };
        channel.waiting -= lost;
        if channel.waiting == 0 {
            channel.order.clear();
        } else if channel.order.len() > 2 * channel.waiting + SLACK {
            let ids = &self.ids;
            let lives = |&(id, epoch): &(_, u32)| ids.get(id).is_some_and(|id| id.epoch == epoch);
            channel.order.retain(lives);
        }
        if lost > 0 {
            self.touch(key);
        }
    }

    /// Moves an identifier and its events to another channel, a listener with the requests that nobody has
    /// taken (`rdma_migrate_id(3)`). How many events of it were taken.
    ///
    /// # Errors
    ///
    /// There is no such identifier or channel.
    pub fn migrate(&mut self, key: IdKey, to: ChannelKey) -> Result<u32, CallError> {
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        if self.channels.get(to).is_none() {
            return Err(CallError::NoSuchObject);
        }
        let (from, reported) = (id.channel, id.reported);
        let mut moving = BTreeSet::from([key]);
        if let State::Listening(listener) = &id.state {
            moving.extend(&listener.untaken);
        }
        let order = self.order_of(from, &moving);
        for &key in &moving {
            let Some(id) = self.ids.get_mut(key) else { continue };
            (id.channel, id.epoch) = (to, id.epoch.wrapping_add(1));
        }
        let ids = &self.ids;
        let renewed = order.iter().filter_map(|&key| Some((key, ids.get(key)?.epoch)));
        if let Some(channel) = self.channels.get_mut(to) {
            channel.order.extend(renewed);
            channel.waiting += order.len();
            channel.users += moving.len();
        }
        self.touch(to);
        self.forget_events(from, order.len());
        if let Some(channel) = self.channels.get_mut(from) {
            channel.users -= moving.len();
        }
        Ok(reported)
    }

    /// Whose the events of a channel are, one after the other, as far as they are those of `some`.
    fn order_of(&self, channel: ChannelKey, some: &BTreeSet<IdKey>) -> Vec<IdKey> {
        let idle = |key: &IdKey| self.ids.get(*key).is_none_or(|id| id.events.is_empty());
        let Some(channel) = self.channels.get(channel).filter(|_| !some.iter().all(idle)) else {
            return Vec::new();
        };
        let is = |&&(key, epoch): &&(IdKey, u32)| {
            some.contains(&key) && self.ids.get(key).is_some_and(|id| id.epoch == epoch)
        };
        channel.order.iter().filter(is).map(|&(key, _)| key).collect()
    }
}
