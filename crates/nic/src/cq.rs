//! Completion queues (IBA 11.4.2) and when they notify.

use std::collections::VecDeque;

use crate::error::Fault;
use crate::queue::NO_MEMORY;
use crate::types::{ChannelId, Completion, QpNum, Time};

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
    /// The program asked to be told, and is when more have come or so many nanoseconds have passed.
    Held(u64),
    /// There was no room.
    Overrun,
}

/// How events are held back (`ibv_modify_cq(3)`): an event comes with the `count`-th completion that was
/// asked for, or `period_ns` after the first.
#[derive(Clone, Copy, Debug)]
struct Moderation {
    count: u16,
    period_ns: u64,
    /// Completions held back so far.
    held: u16,
}

/// A completion that does not show up before its time.
struct Held {
    at: Time,
    completion: Completion,
    solicited: bool,
}

/// A completion queue.
pub(crate) struct Cq {
    queue: VecDeque<Completion>,
    capacity: usize,
    channel: Option<ChannelId>,
    context: u64,
    notify: Notify,
    /// An event has been given since completions were last taken: the program will look.
    told: bool,
    /// One of the completions since the queue was last empty answers a request for solicited notification.
    solicited: bool,
    overrun: bool,
    /// The oldest completion makes room for one too many.
    ignores_overrun: bool,
    moderation: Option<Moderation>,
    /// When the completions in the queue were made, if the program wants to know.
    stamps: Option<VecDeque<Time>>,
    /// When an event that is held back comes at the latest.
    pub(crate) alarm: Option<Time>,
    /// Completions that show up only at their times, which never fall, in the order in which they came.
    held: VecDeque<Held>,
    /// When the next completion shows up, if that is later than now.
    hold: Option<Time>,
    /// Nobody is to be told of a completion, and nothing is kept or held back: see [`settle`](Self::settle).
    plain: bool,
    /// Queue pairs that complete here.
    pub(crate) users: u32,
}

impl Cq {
    /// A queue of `capacity` entries. `context` comes back in its events.
    ///
    /// # Errors
    /// [`NO_MEMORY`].
    pub(crate) fn new(
        capacity: usize,
        channel: Option<ChannelId>,
        context: u64,
    ) -> Result<Self, Fault> {
        let mut queue = VecDeque::new();
        queue.try_reserve_exact(capacity).map_err(|_| NO_MEMORY)?;
        Ok(Self {
            queue,
            capacity,
            channel,
            context,
            notify: Notify::Nothing,
            told: false,
            solicited: false,
            overrun: false,
            ignores_overrun: false,
            moderation: None,
            stamps: None,
            alarm: None,
            held: VecDeque::new(),
            hold: None,
            plain: true,
            users: 0,
        })
    }

    /// Adds a completion made at `now`; `solicited` if it answers a request for solicited notification (a
    /// receive that the peer marked so, or any error).
    pub(crate) fn push(&mut self, completion: Completion, solicited: bool, now: Time) -> Pushed {
        if self.takes_plainly() {
            self.add_plainly(completion, solicited);
            return Pushed::Quietly;
        }
        if self.queue.len() + self.held.len() >= self.capacity && !self.make_room() {
            return Pushed::Overrun;
        }
        if let Some(at) = self.hold {
            self.held.push_back(Held { at, completion, solicited });
            return Pushed::Quietly;
        }
        self.show(completion, solicited, now)
    }

    /// Whether nobody is to be told of the next completion, and there is room, as for nearly every one.
    #[inline(always)]
    pub(crate) fn takes_plainly(&self) -> bool {
        (self.plain || self.is_held_back()) && self.queue.len() < self.capacity
    }

    /// Adds such a completion.
    #[inline(always)]
    pub(crate) fn add_plainly(&mut self, completion: Completion, solicited: bool) {
        if let Some(moderation) = &mut self.moderation
            && !self.plain
        {
            moderation.held += 1;
        }
        self.queue.push_back(completion);
        self.solicited |= solicited;
    }

    /// Whether the next completion is only one more of those whose event is held back already, for a period
    /// that has begun.
    #[inline]
    fn is_held_back(&self) -> bool {
        let more = self.moderation.as_ref().is_some_and(|it| it.held > 0 && it.held + 1 < it.count);
        more && self.notify == Notify::Any
            && self.alarm.is_some()
            && self.stamps.is_none()
            && self.hold.is_none()
            && self.held.is_empty()
    }

    /// Finds out whether a completion is no more than added, after anything has changed that may forbid it.
    #[inline]
    fn settle(&mut self) {
        self.plain = self.notify == Notify::Nothing
            && self.stamps.is_none()
            && self.hold.is_none()
            && self.held.is_empty();
    }

    fn show(&mut self, completion: Completion, solicited: bool, now: Time) -> Pushed {
        self.queue.push_back(completion);
        if let Some(stamps) = &mut self.stamps {
            stamps.push_back(now);
        }
        self.solicited |= solicited;
        self.announce(solicited, 1)
    }

    /// The event that `count` completions cause, if the program has asked for one.
    fn announce(&mut self, solicited: bool, count: usize) -> Pushed {
        let wanted = match self.notify {
            Notify::Nothing => false,
            Notify::Solicited => solicited,
            Notify::Any => true,
        };
        if !wanted {
            return Pushed::Quietly;
        }
        if let Some(moderation) = &mut self.moderation {
            moderation.held =
                moderation.held.saturating_add(u16::try_from(count).unwrap_or(u16::MAX));
            if moderation.held < moderation.count {
                return Pushed::Held(moderation.period_ns);
            }
        }
        self.notification()
    }

    /// The event that the program has asked for, once.
    fn notification(&mut self) -> Pushed {
        if let Some(moderation) = &mut self.moderation {
            moderation.held = 0;
        }
        match self.channel {
            Some(channel) if self.notify != Notify::Nothing => {
                self.notify = Notify::Nothing;
                self.told = true;
                self.settle();
                Pushed::Notify(channel, self.context)
            }
            _ => Pushed::Quietly,
        }
    }

    /// The period of an event that is held back is over.
    pub(crate) fn period_over(&mut self) -> Pushed {
        match self.moderation {
            Some(Moderation { held: 1.., .. }) => self.notification(),
            _ => Pushed::Quietly,
        }
    }

    /// Room for one more in a full queue; `false` if it overruns.
    #[cold]
    fn make_room(&mut self) -> bool {
        if !self.ignores_overrun {
            self.overrun = true;
            return false;
        }
        self.queue.pop_front();
        if let Some(stamps) = &mut self.stamps {
            stamps.pop_front();
        }
        true
    }

    /// What is pushed from now on shows up at `at`, or when what is held back already does if that is later.
    pub(crate) fn hold(&mut self, at: Time) {
        self.hold = self.hold.max(Some(at));
        self.settle();
    }

    pub(crate) fn is_holding(&self) -> bool {
        self.hold.is_some()
    }

    /// When the next completion that is held back shows up.
    pub(crate) fn held_until(&self) -> Option<Time> {
        self.held.front().map(|held| held.at).or(self.hold)
    }

    /// Lets the next completion show up that is due; `None` if none is.
    pub(crate) fn release(&mut self, now: Time) -> Option<Pushed> {
        if self.held.front().is_some_and(|held| held.at <= now) {
            let Held { at, completion, solicited } = self.held.pop_front()?;
            return Some(self.show(completion, solicited, at));
        }
        if self.held.is_empty() {
            self.hold = None;
            self.settle();
        }
        None
    }

    /// The queue fails: nothing can be added, and once what it has is taken it is in error.
    pub(crate) fn fail(&mut self) {
        self.capacity = 0;
        self.ignores_overrun = false;
        self.overrun = true;
    }

    /// Takes up to `max` completions out, oldest first, and hands each to `taker`; how many.
    #[inline]
    pub(crate) fn pop(&mut self, max: usize, mut taker: impl FnMut(&Completion)) -> usize {
        if self.queue.is_empty() {
            // What most polls find.
            self.looked();
            return 0;
        }
        let mut count = 0;
        while count < max
            && let Some(completion) = self.queue.front()
        {
            // Handed out where it lies, without a copy.
            taker(completion);
            self.queue.pop_front();
            count += 1;
        }
        if let Some(stamps) = &mut self.stamps {
            stamps.drain(..count);
        }
        if self.queue.is_empty() {
            // The next one goes where this one was, which the processor still has at hand.
            self.queue.clear();
        }
        self.looked();
        count
    }

    /// Whether the program, which looks, finds neither a completion nor that the queue has overrun.
    #[inline(always)]
    pub(crate) fn is_idle(&mut self) -> bool {
        let idle = self.queue.is_empty() && !self.overrun;
        if idle {
            self.looked();
        }
        idle
    }

    /// Whether a completion is no more than added: nobody is to be told, and nothing is kept or held back.
    #[inline(always)]
    pub(crate) fn is_plain(&self) -> bool {
        self.plain
    }

    /// Whether it matters when a completion is made.
    #[inline]
    pub(crate) fn is_timed(&self) -> bool {
        self.stamps.is_some() || self.moderation.is_some()
    }

    /// The program has looked for completions.
    #[inline(always)]
    fn looked(&mut self) {
        self.told = false;
        self.solicited &= !self.queue.is_empty();
    }

    /// Whether a completion of a queue pair waits to be taken.
    pub(crate) fn has_of(&self, qp_num: QpNum) -> bool {
        self.queue.iter().any(|completion| completion.qp_num == qp_num)
    }

    /// How many completions of requests of a queue pair wait to be taken: of receives, or of all others.
    pub(crate) fn unread(&self, qp_num: QpNum, receives: bool) -> u32 {
        // Most often none waits at all, and to walk two empty queues costs more than to look.
        if self.queue.is_empty() && self.held.is_empty() {
            return 0;
        }
        let held = self.held.iter().map(|held| &held.completion);
        let of = |it: &&Completion| it.qp_num == qp_num && it.opcode.is_receive() == receives;
        u32::try_from(self.queue.iter().chain(held).filter(of).count()).unwrap_or(u32::MAX)
    }

    /// Takes the oldest completion out, with the time at which it was made.
    pub(crate) fn pop_stamped(&mut self) -> Option<(Completion, Time)> {
        let first = self.queue.pop_front();
        self.looked();
        Some((first?, self.stamps.as_mut()?.pop_front()?))
    }

    /// From now on notes when completions are made.
    pub(crate) fn keep_stamps(&mut self) {
        let none = || VecDeque::from(vec![Time::default(); self.queue.len()]);
        self.stamps.get_or_insert_with(none);
        self.settle();
    }

    /// From now on the oldest completion makes room for one too many.
    pub(crate) fn ignore_overrun(&mut self) {
        self.ignores_overrun = true;
    }

    /// Holds events back until `count` completions have come or `period_ns` have passed; either 0: not
    /// any more. What is held back now stays so at most as long as it was to be.
    pub(crate) fn moderate(&mut self, count: u16, period_ns: u64) {
        let held = self.moderation.map_or(0, |moderation| moderation.held);
        let some = count > 0 && period_ns > 0;
        self.moderation = (some || held > 0).then_some(Moderation {
            count: if some { count } else { 1 },
            period_ns,
            held,
        });
    }

    /// How many completions more cause the event that the program has asked for, and how many nanoseconds
    /// after the first of them it comes at the latest; `None` if no event is to come.
    pub(crate) fn awaited(&self) -> Option<(u32, u64)> {
        if self.channel.is_none() || self.notify == Notify::Nothing {
            return None;
        }
        Some(self.moderation.map_or((1, 0), |it| {
            (u32::from(it.count.saturating_sub(it.held)).max(1), it.period_ns)
        }))
    }

    /// Arms the next event. An armed request for any completion is not weakened to solicited ones. What is
    /// there already, and the program was not told of, counts as if it came now: programs that look, arm and
    /// sleep take for granted that nothing is lost between the first two.
    pub(crate) fn request_notify(&mut self, solicited_only: bool) -> Pushed {
        if !solicited_only {
            self.notify = Notify::Any;
        } else if self.notify == Notify::Nothing {
            self.notify = Notify::Solicited;
        }
        self.settle();
        if self.told || self.queue.is_empty() {
            return Pushed::Quietly;
        }
        self.announce(self.solicited, self.queue.len())
    }

    /// Changes the capacity.
    ///
    /// # Errors
    /// It is below the entries held, or [`NO_MEMORY`].
    pub(crate) fn resize(&mut self, capacity: usize) -> Result<(), Fault> {
        let more = capacity
            .checked_sub(self.queue.len())
            .ok_or(Fault::Invalid("the queue holds more completions than that"))?;
        self.queue.try_reserve_exact(more).map_err(|_| NO_MEMORY)?;
        self.capacity = capacity;
        Ok(())
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn channel(&self) -> Option<ChannelId> {
        self.channel
    }

    /// Whether polling finds something: a completion, or that it has overrun.
    pub(crate) fn has_news(&self) -> bool {
        self.overrun || !self.queue.is_empty()
    }

    pub(crate) fn overran(&self) -> bool {
        self.overrun
    }

    /// Drops the completions of a queue pair, or a work queue, that is reset or destroyed, as verbs
    /// providers do.
    pub(crate) fn forget(&mut self, qp_num: QpNum) {
        if let Some(stamps) = &mut self.stamps {
            let mut kept = self.queue.iter().map(|completion| completion.qp_num != qp_num);
            stamps.retain(|_| kept.next().unwrap_or(false));
        }
        self.queue.retain(|completion| completion.qp_num != qp_num);
        self.held.retain(|held| held.completion.qp_num != qp_num);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time(5);

    fn completion(wr_id: u64) -> Completion {
        Completion { wr_id, ..Completion::default() }
    }

    #[test]
    fn notifies_once_per_request_and_only_as_asked() {
        let mut cq = Cq::new(8, Some(ChannelId(7)), 42).unwrap();
        assert_eq!(cq.push(completion(0), true, NOW), Pushed::Quietly);
        assert_eq!(cq.pop(8, |_| {}), 1);
        assert_eq!(cq.request_notify(true), Pushed::Quietly);
        assert_eq!(cq.push(completion(1), false, NOW), Pushed::Quietly);
        assert_eq!(cq.push(completion(2), true, NOW), Pushed::Notify(ChannelId(7), 42));
        assert_eq!(cq.push(completion(3), true, NOW), Pushed::Quietly);
        cq.request_notify(false);
        cq.request_notify(true);
        assert_eq!(cq.push(completion(4), false, NOW), Pushed::Notify(ChannelId(7), 42));
    }

    #[test]
    fn what_came_between_the_last_look_and_the_request_is_told_at_once() {
        let mut cq = Cq::new(8, Some(ChannelId(7)), 42).unwrap();
        let told = Pushed::Notify(ChannelId(7), 42);
        assert_eq!(cq.pop(8, |_| {}), 0);
        assert_eq!(cq.push(completion(0), false, NOW), Pushed::Quietly);
        assert_eq!(cq.request_notify(true), Pushed::Quietly, "it is not solicited");
        assert_eq!(cq.request_notify(false), told);
        // The program will look anyway.
        assert_eq!(cq.push(completion(1), true, NOW), Pushed::Quietly);
        assert_eq!(cq.request_notify(false), Pushed::Quietly);
        assert_eq!(cq.push(completion(2), false, NOW), told);
        // It took one, and leaves others.
        assert_eq!(cq.pop(1, |_| {}), 1);
        assert_eq!(cq.request_notify(true), told);
        assert_eq!(cq.pop(8, |_| {}), 2);
        assert_eq!(cq.request_notify(false), Pushed::Quietly, "there is nothing");
    }

    #[test]
    fn a_queue_is_plain_exactly_while_nothing_is_to_be_done_beside_adding() {
        let mut cq = Cq::new(4, Some(ChannelId(7)), 42).unwrap();
        assert!(cq.plain);
        cq.request_notify(true);
        assert!(!cq.plain);
        assert_eq!(cq.push(completion(0), true, NOW), Pushed::Notify(ChannelId(7), 42));
        assert!(cq.plain, "it was asked for once");
        cq.hold(Time(9));
        assert!(!cq.plain);
        assert_eq!(cq.push(completion(1), false, NOW), Pushed::Quietly);
        assert_eq!(cq.pop(4, |_| {}), 1, "the second is held back");
        assert_eq!(cq.release(Time(9)), Some(Pushed::Quietly));
        assert!(!cq.plain);
        assert_eq!(cq.release(Time(9)), None);
        assert!(cq.plain, "nothing is held back any more");
        assert_eq!(cq.pop(4, |found| assert_eq!(found.wr_id, 1)), 1);
        cq.keep_stamps();
        assert!(!cq.plain);
        cq.push(completion(2), false, Time(11));
        assert_eq!(cq.pop_stamped(), Some((completion(2), Time(11))));
        let mut failed = Cq::new(4, None, 0).unwrap();
        failed.fail();
        assert_eq!(failed.push(completion(3), false, NOW), Pushed::Overrun);
    }

    #[test]
    fn overruns_rather_than_grow() {
        let mut cq = Cq::new(1, None, 0).unwrap();
        assert_eq!(cq.push(completion(0), false, NOW), Pushed::Quietly);
        assert_eq!(cq.push(completion(1), false, NOW), Pushed::Overrun);
        assert_eq!(cq.pop(4, |_| {}), 1);
        assert!(cq.overran());
    }

    #[test]
    fn the_oldest_makes_room_where_overruns_are_ignored() {
        let mut cq = Cq::new(2, None, 0).unwrap();
        cq.ignore_overrun();
        cq.keep_stamps();
        for wr_id in 0..4 {
            assert_eq!(cq.push(completion(wr_id), false, Time(wr_id)), Pushed::Quietly);
        }
        assert!(!cq.overran());
        assert_eq!(cq.pop_stamped(), Some((completion(2), Time(2))));
        assert_eq!(cq.pop_stamped(), Some((completion(3), Time(3))));
        assert_eq!(cq.pop_stamped(), None);
    }

    #[test]
    fn stamps_stay_with_their_completions() {
        let of = |wr_id, qp| Completion { qp_num: QpNum(qp), ..completion(wr_id) };
        let mut cq = Cq::new(8, None, 0).unwrap();
        cq.push(of(0, 1), false, Time(10));
        cq.keep_stamps();
        for (wr_id, qp) in [(1, 1), (2, 2), (3, 1), (4, 2)] {
            cq.push(of(wr_id, qp), false, Time(10 + wr_id));
        }
        cq.forget(QpNum(1));
        assert_eq!(cq.pop(1, |completion| assert_eq!(completion.wr_id, 2)), 1);
        assert_eq!(cq.pop_stamped(), Some((of(4, 2), Time(14))));
    }

    #[test]
    fn events_are_held_back_until_enough_have_come_or_the_period_is_over() {
        let mut cq = Cq::new(16, Some(ChannelId(7)), 42).unwrap();
        let told = Pushed::Notify(ChannelId(7), 42);
        cq.moderate(3, 100);
        assert_eq!(cq.push(completion(0), false, NOW), Pushed::Quietly, "nobody asked");
        cq.pop(16, |_| {});
        assert_eq!(cq.awaited(), None);
        assert_eq!(cq.request_notify(false), Pushed::Quietly);
        assert_eq!(cq.awaited(), Some((3, 100)));
        assert_eq!(cq.push(completion(1), false, NOW), Pushed::Held(100));
        assert_eq!(cq.push(completion(2), false, NOW), Pushed::Held(100));
        assert_eq!(cq.awaited(), Some((1, 100)));
        assert_eq!(cq.push(completion(3), false, NOW), told);
        assert_eq!(cq.awaited(), None);
        assert_eq!(cq.period_over(), Pushed::Quietly, "nothing is held back");
        cq.pop(16, |_| {});
        assert_eq!(cq.request_notify(false), Pushed::Quietly);
        assert_eq!(cq.push(completion(4), false, NOW), Pushed::Held(100));
        assert_eq!(cq.period_over(), told);
        assert_eq!(cq.period_over(), Pushed::Quietly);
        // Switched off while an event is held back: it still comes.
        cq.pop(16, |_| {});
        assert_eq!(cq.request_notify(false), Pushed::Quietly);
        assert_eq!(cq.push(completion(5), false, NOW), Pushed::Held(100));
        cq.moderate(0, 0);
        assert_eq!(cq.period_over(), told);
        cq.pop(16, |_| {});
        assert_eq!(cq.request_notify(false), Pushed::Quietly);
        assert_eq!(cq.push(completion(6), false, NOW), told);
        // What is there already counts.
        cq.pop(16, |_| {});
        cq.moderate(3, 100);
        cq.push(completion(7), false, NOW);
        assert_eq!(cq.request_notify(false), Pushed::Held(100));
        cq.pop(16, |_| {});
        assert_eq!(cq.period_over(), told);
        cq.pop(16, |_| {});
        for wr_id in 8..11 {
            assert_eq!(cq.push(completion(wr_id), false, NOW), Pushed::Quietly);
        }
        assert_eq!(cq.request_notify(false), told);
    }
}
