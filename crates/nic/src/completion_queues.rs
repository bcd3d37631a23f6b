//! Completion queues as programs manage them: creating, polling, arming and moderating them.

use crate::adapter::{Adapter, Alarm, Hub};
use crate::cq::{Cq, Pushed};
use crate::error::Fault;
use crate::event::Event;
use crate::probe::Probe;
use crate::types::{ChannelId, Completion, CqId, QpNum, Time, TimeSource};

impl<P> Hub<P> {
    /// Whether it matters when a completion of a queue is made.
    #[inline]
    pub(crate) fn is_timed(&self, id: CqId) -> bool {
        self.cqs.get(id).is_some_and(Cq::is_timed)
    }

    /// An event of a queue is held back for a while, if it is not already.
    #[cold]
    pub(crate) fn hold_back(&mut self, id: CqId, period_ns: u64) {
        let until = self.now.after(period_ns);
        let Some(cq) = self.cqs.get_mut(id).filter(|cq| cq.alarm.is_none()) else { return };
        cq.alarm = Some(until);
        self.alarms.insert((until, Alarm::Cq(id)));
    }

    /// An event was held back for as long as it may be.
    pub(crate) fn period_over(&mut self, id: CqId) {
        let Some(cq) = self.cqs.get_mut(id) else { return };
        cq.alarm = None;
        let pushed = cq.period_over();
        self.tell(id, pushed);
    }

    /// Raises the event that a queue gives, or holds it back.
    pub(crate) fn tell(&mut self, id: CqId, pushed: Pushed) {
        match pushed {
            Pushed::Notify(channel, context) => {
                if let Some(at) = self.cqs.get_mut(id).and_then(|cq| cq.alarm.take()) {
                    self.alarms.remove(&(at, Alarm::Cq(id)));
                }
                self.events.push_back(Event::Completion { channel, cq: id, context });
            }
            Pushed::Held(period_ns) => self.hold_back(id, period_ns),
            Pushed::Quietly | Pushed::Overrun => {}
        }
    }
}

/// A taker for [`Adapter::poll_cq_each`] that fills a list from its front.
#[inline]
pub fn into_list(out: &mut [Completion]) -> impl FnMut(&Completion) {
    let mut free = out.iter_mut();
    move |completion| {
        if let Some(slot) = free.next() {
            *slot = *completion;
        }
    }
}

impl<P: Probe> Adapter<P> {
    /// Creates a completion queue of at least `cqe` entries; its handle and its size.
    ///
    /// # Errors
    /// A size of 0 or above the limit, or no room.
    pub fn create_cq(
        &mut self,
        cqe: u32,
        channel: Option<ChannelId>,
        context: u64,
    ) -> Result<(CqId, u32), Fault> {
        if cqe == 0 || cqe > self.hub.config.max_cqe {
            return Err(Fault::Invalid("number of entries is 0 or above max_cqe"));
        }
        let cq = Cq::new(cqe as usize, channel, context)?;
        let id = self.hub.cqs.insert(cq).ok_or(Fault::Exhausted("completion queues"))?;
        Ok((id, cqe))
    }

    pub(crate) fn cq(&mut self, id: CqId) -> Result<&mut Cq, Fault> {
        self.hub.cqs.get_mut(id).ok_or(Fault::NoSuchObject)
    }

    /// Changes the size of a completion queue.
    ///
    /// # Errors
    /// The size is out of range, or below the entries held.
    pub fn resize_cq(&mut self, id: CqId, cqe: u32) -> Result<u32, Fault> {
        if cqe == 0 || cqe > self.hub.config.max_cqe {
            return Err(Fault::Invalid("number of entries is 0 or above max_cqe"));
        }
        let cq = self.cq(id)?;
        cq.resize(cqe as usize)?;
        Ok(cq.capacity() as u32)
    }

    /// Destroys a completion queue.
    ///
    /// # Errors
    /// [`Fault::Busy`] while queue pairs complete there.
    pub fn destroy_cq(&mut self, id: CqId) -> Result<(), Fault> {
        if self.cq(id)?.users > 0 {
            return Err(Fault::Busy);
        }
        let mut alarm = self.cq(id)?.alarm;
        self.hub.set_alarm(&mut alarm, Alarm::Cq(id), None);
        self.hub.forget_held(id);
        self.hub.cqs.remove(id);
        Ok(())
    }

    /// Whether completions of a queue pair wait to be taken.
    #[must_use]
    pub fn has_unread(&self, num: QpNum) -> bool {
        let qp = self.hub.numbers.get(num).and_then(|id| self.qps.get(id));
        qp.is_some_and(|qp| {
            let queues = [qp.send_cq, qp.recv_cq].map(|id| self.hub.cqs.get(id));
            queues.into_iter().flatten().any(|cq| cq.has_of(num))
        })
    }

    /// From now on notes when completions are made, for [`poll_cq_stamped`](Self::poll_cq_stamped).
    ///
    /// # Errors
    /// No such queue.
    pub fn keep_stamps(&mut self, id: CqId) -> Result<(), Fault> {
        self.cq(id)?.keep_stamps();
        Ok(())
    }

    /// From now on the oldest completion is lost when there is one too many, and the queue goes on
    /// (`IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN`).
    ///
    /// # Errors
    /// No such queue.
    pub fn ignore_overrun(&mut self, id: CqId) -> Result<(), Fault> {
        self.cq(id)?.ignore_overrun();
        Ok(())
    }

    /// Holds events back until `count` completions have come, or `period_ns` nanoseconds have passed since
    /// the first (`ibv_modify_cq`); not any more if either is 0.
    ///
    /// # Errors
    /// No such queue.
    pub fn moderate_cq(&mut self, id: CqId, count: u16, period_ns: u64) -> Result<(), Fault> {
        self.cq(id)?.moderate(count, period_ns);
        Ok(())
    }

    /// How many completions more cause the event that a queue was asked for, and how many nanoseconds after
    /// the first of them it comes at the latest (0: at once); `None` if no event is to come.
    #[must_use]
    pub fn awaited(&self, id: CqId) -> Option<(u32, u64)> {
        self.hub.cqs.get(id)?.awaited()
    }

    /// Adds a completion of a queue pair that is not this adapter's, but completes to a queue of it; `false`
    /// if the queue overran.
    pub fn complete(&mut self, now: Time, id: CqId, completion: Completion) -> bool {
        self.hub.now = now;
        self.hub.complete(id, completion, true)
    }

    /// Notes that such a queue pair completes to a queue, which cannot be destroyed meanwhile.
    ///
    /// # Errors
    /// No such queue.
    pub fn add_cq_user(&mut self, id: CqId) -> Result<(), Fault> {
        self.cq(id)?.users += 1;
        Ok(())
    }

    /// Such a queue pair is gone.
    pub fn remove_cq_user(&mut self, id: CqId) {
        if let Some(cq) = self.hub.cqs.get_mut(id) {
            cq.users = cq.users.saturating_sub(1);
        }
    }

    /// How many completions of such a queue pair wait to be taken: of receives, or of its other requests.
    #[must_use]
    pub fn unread(&self, id: CqId, num: QpNum, receives: bool) -> u32 {
        self.hub.cqs.get(id).map_or(0, |cq| cq.unread(num, receives))
    }

    /// Drops the completions of such a queue pair, which is destroyed or reset.
    pub fn forget_completions(&mut self, id: CqId, num: QpNum) {
        if let Some(cq) = self.hub.cqs.get_mut(id) {
            cq.forget(num);
        }
    }

    /// Asks for an event at the next completion (or the next solicited one); at once if there are some that
    /// no event has told of since completions were last taken.
    ///
    /// # Errors
    /// No such queue.
    pub fn req_notify_cq(
        &mut self,
        now: impl TimeSource,
        id: CqId,
        solicited_only: bool,
    ) -> Result<(), Fault> {
        let pushed = self.cq(id)?.request_notify(solicited_only);
        if let Pushed::Held(_) = pushed {
            self.hub.now = now.time(true);
        }
        self.hub.tell(id, pushed);
        Ok(())
    }

    /// Whether [`poll_cq`](Self::poll_cq) would find a completion, or an error.
    ///
    /// # Errors
    /// No such queue.
    pub fn has_completions(&self, id: CqId) -> Result<bool, Fault> {
        Ok(self.hub.cqs.get(id).ok_or(Fault::NoSuchObject)?.has_news())
    }

    /// Takes up to `max` completions out of a queue, oldest first, and hands each to `taker`; how many. It
    /// does not look for new ones: call [`progress`](Self::progress) for that.
    ///
    /// # Errors
    /// No such queue; or it is empty and has overrun (IBA 11.6.3.1: it is in error from then on).
    #[inline]
    pub fn poll_cq_each(
        &mut self,
        id: CqId,
        max: usize,
        taker: impl FnMut(&Completion),
    ) -> Result<usize, Fault> {
        let cq = self.hub.cqs.get_mut(id).ok_or(Fault::NoSuchObject)?;
        match cq.pop(max, taker) {
            0 if cq.overran() && max > 0 => Err(Fault::Overrun),
            count => Ok(count),
        }
    }

    /// As [`poll_cq_each`](Self::poll_cq_each), into a list.
    ///
    /// # Errors
    /// As there.
    pub fn poll_cq(&mut self, id: CqId, out: &mut [Completion]) -> Result<usize, Fault> {
        self.poll_cq_each(id, out.len(), into_list(out))
    }

    /// Takes the oldest completion out of a queue that keeps stamps, with the time at which it was made.
    ///
    /// # Errors
    /// As [`poll_cq`](Self::poll_cq).
    pub fn poll_cq_stamped(&mut self, id: CqId) -> Result<Option<(Completion, Time)>, Fault> {
        let cq = self.hub.cqs.get_mut(id).ok_or(Fault::NoSuchObject)?;
        match cq.pop_stamped() {
            None if cq.overran() => Err(Fault::Overrun),
            taken => Ok(taken),
        }
    }
}
