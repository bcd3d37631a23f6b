//! Completion queues (IBA 11.4.2) and when they notify.

use std::collections::VecDeque;

use crate::types::{ChannelId, Completion};

/// What a program asked to be told of (IBA 11.4.2.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Notify {
    #[default]
    Nothing,
    Solicited,
    Any,
}

/// What became of a completion that was pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    Quietly,
    /// The program asked to be told: its channel gets an event.
    Notify(ChannelId, u64),
    /// There was no room.
    Overrun,
}

/// A completion queue.
pub(crate) struct Cq {
    queue: VecDeque<Completion>,
    capacity: usize,
    channel: Option<ChannelId>,
    context: u64,
    notify: Notify,
    overrun: bool,
    /// Queue pairs that complete here.
    pub(crate) users: u32,
}

impl Cq {
    /// A queue of `capacity` entries. `context` comes back in its events.
    pub(crate) fn new(capacity: usize, channel: Option<ChannelId>, context: u64) -> Self {
        Self {
            queue: VecDeque::with_capacity(capacity),
            capacity,
            channel,
            context,
            notify: Notify::Nothing,
            overrun: false,
            users: 0,
        }
    }

    /// Adds a completion; `solicited` if it answers a request for solicited notification (a receive that
    /// the peer marked so, or any error).
    #[inline]
    pub(crate) fn push(&mut self, completion: Completion, solicited: bool) -> Pushed {
        if self.queue.len() >= self.capacity {
            self.overrun = true;
            return Pushed::Overrun;
        }
        self.queue.push_back(completion);
        let wanted = match self.notify {
            Notify::Nothing => false,
            Notify::Solicited => solicited,
            Notify::Any => true,
        };
        match self.channel {
            Some(channel) if wanted => {
                self.notify = Notify::Nothing;
                Pushed::Notify(channel, self.context)
            }
            _ => Pushed::Quietly,
        }
    }

    /// Takes completions out, oldest first; how many.
    #[inline]
    pub(crate) fn pop(&mut self, out: &mut [Completion]) -> usize {
        let count = out.len().min(self.queue.len());
        for (slot, completion) in out.iter_mut().zip(self.queue.drain(..count)) {
            *slot = completion;
        }
        count
    }

    /// Arms the next event. An armed request for any completion is not weakened to solicited ones.
    pub(crate) fn request_notify(&mut self, solicited_only: bool) {
        if !solicited_only {
            self.notify = Notify::Any;
        } else if self.notify == Notify::Nothing {
            self.notify = Notify::Solicited;
        }
    }

    /// Changes the capacity; refused (`false`) below the entries held.
    pub(crate) fn resize(&mut self, capacity: usize) -> bool {
        if capacity < self.queue.len() {
            return false;
        }
        self.capacity = capacity;
        true
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn channel(&self) -> Option<ChannelId> {
        self.channel
    }

    pub(crate) fn overran(&self) -> bool {
        self.overrun
    }

    /// Drops the completions of a queue pair that is being destroyed, as verbs providers do.
    pub(crate) fn forget(&mut self, qp_num: crate::types::QpNum) {
        self.queue.retain(|completion| completion.qp_num != qp_num);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(wr_id: u64) -> Completion {
        Completion { wr_id, ..Completion::default() }
    }

    #[test]
    fn notifies_once_per_request_and_only_as_asked() {
        let mut cq = Cq::new(8, Some(ChannelId(7)), 42);
        assert_eq!(cq.push(completion(0), true), Pushed::Quietly);
        cq.request_notify(true);
        assert_eq!(cq.push(completion(1), false), Pushed::Quietly);
        assert_eq!(cq.push(completion(2), true), Pushed::Notify(ChannelId(7), 42));
        assert_eq!(cq.push(completion(3), true), Pushed::Quietly);
        cq.request_notify(false);
        cq.request_notify(true);
        assert_eq!(cq.push(completion(4), false), Pushed::Notify(ChannelId(7), 42));
    }

    #[test]
    fn overruns_rather_than_grow() {
        let mut cq = Cq::new(1, None, 0);
        assert_eq!(cq.push(completion(0), false), Pushed::Quietly);
        assert_eq!(cq.push(completion(1), false), Pushed::Overrun);
        let mut out = [Completion::default(); 4];
        assert_eq!(cq.pop(&mut out), 1);
        assert!(cq.overran());
    }
}
