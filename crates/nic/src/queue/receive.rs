//! The receive queue of a queue pair, or a shared one.

use std::collections::VecDeque;

use quipu_mem::{Key, Sge};

use super::{copies, names};
use crate::error::Fault;
use crate::fate::Fate;
use crate::types::Time;

/// Receives between the one that is taken and the one whose memory is fetched for it: at the least time
/// between two messages, longer than memory takes to answer.
const FETCHED_AHEAD: u32 = 16;

/// A receive work request.
#[derive(Clone, Copy, Debug, Default)]
struct RecvWqe {
    wr_id: u64,
    num_sge: u32,
}

/// The receive queue of a queue pair, or a shared one.
pub(crate) struct RecvQueue {
    wqes: Box<[RecvWqe]>,
    sges: Box<[Sge]>,
    max_sge: usize,
    capacity: u32,
    head: u32,
    /// The end of what is taken without a look at `fates`: the place of the first of those, or `tail`.
    plain: u32,
    tail: u32,
    /// Where the requests begin whose completions may not have been taken yet; of no use in a shared queue.
    taken: u32,
    /// What is to become of single requests, by place.
    fates: VecDeque<(u32, Fate)>,
}

impl RecvQueue {
    /// A queue of `capacity` requests of at most `max_sge` elements each.
    ///
    /// # Errors
    /// [`NO_MEMORY`].
    pub(crate) fn new(capacity: u32, max_sge: u32) -> Result<Self, Fault> {
        let slots = capacity.max(1).next_power_of_two() as usize;
        Ok(Self {
            wqes: copies(RecvWqe::default(), slots)?,
            sges: copies(Sge::default(), slots * max_sge as usize)?,
            max_sge: max_sge as usize,
            capacity,
            head: 0,
            plain: 0,
            tail: 0,
            taken: 0,
            fates: VecDeque::new(),
        })
    }

    pub(crate) fn len(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Whether there may be no room, for all that is known of completions: [`taken_but`](Self::taken_but).
    #[inline]
    pub(crate) fn seems_full(&self) -> bool {
        self.tail.wrapping_sub(self.taken) >= self.capacity
    }

    /// The program has taken all completions but `unread`, each of which keeps its request's place; whether
    /// there is room.
    pub(crate) fn taken_but(&mut self, unread: u32) -> bool {
        self.taken = self.head.wrapping_sub(unread);
        !self.seems_full()
    }

    /// The place of the oldest request.
    pub(crate) fn head(&self) -> u32 {
        self.head
    }

    /// The place after the latest one.
    pub(crate) fn tail(&self) -> u32 {
        self.tail
    }

    /// The scatter list of the request at `position`.
    #[inline]
    pub(crate) fn sges(&self, position: u32) -> &[Sge] {
        let slot = position as usize & (self.wqes.len() - 1);
        let first = slot * self.max_sge;
        &self.sges[first..first + self.wqes[slot].num_sge as usize]
    }

    pub(crate) fn max_sge(&self) -> usize {
        self.max_sge
    }

    /// The oldest request with an element of a region that is not empty.
    pub(crate) fn naming(&self, key: Key) -> Option<u64> {
        let mut places = (0..self.len()).map(|offset| self.head.wrapping_add(offset));
        let place = places.find(|&place| names(self.sges(place), key))?;
        Some(self.wqes[place as usize & (self.wqes.len() - 1)].wr_id)
    }

    /// Adds a request; `false` if the queue is full. The caller has checked the number of elements.
    #[inline]
    pub(crate) fn push(&mut self, wr_id: u64, sges: &[Sge]) -> bool {
        if self.len() >= self.capacity {
            return false;
        }
        let slot = self.tail as usize & (self.wqes.len() - 1);
        self.wqes[slot] = RecvWqe { wr_id, num_sge: sges.len() as u32 };
        let first = slot * self.max_sge;
        self.sges[first..first + sges.len()].copy_from_slice(sges);
        self.tail = self.tail.wrapping_add(1);
        if self.fates.is_empty() {
            self.plain = self.tail;
        }
        true
    }

    /// Settles what is to become of the request that was added last.
    pub(crate) fn doom_last(&mut self, fate: Fate) {
        let position = self.tail.wrapping_sub(1);
        self.fates.push_back((position, fate));
        self.find_plain();
    }

    fn find_plain(&mut self) {
        self.plain = self.fates.front().map_or(self.tail, |&(position, _)| position);
    }

    /// When the first request that is held back is to be there; `None` if none is.
    pub(crate) fn opens_at(&self) -> Option<Time> {
        self.fates.iter().find_map(|(_, fate)| match fate {
            Fate::From(at) => Some(*at),
            _ => None,
        })
    }

    /// The requests that were held back until `now` are there.
    pub(crate) fn open(&mut self, now: Time) {
        self.fates.retain(|(_, fate)| !matches!(fate, Fate::From(at) if *at <= now));
        self.find_plain();
    }

    /// The oldest request that nothing particular is to become of, if it is the oldest of all.
    #[inline(always)]
    pub(crate) fn front(&self) -> Option<(u64, &[Sge])> {
        if self.head == self.plain { None } else { Some(self.oldest()) }
    }

    /// The request that is taken next, if there is one.
    pub(crate) fn next(&self) -> Option<(u64, &[Sge])> {
        let held = matches!(self.fates.front(), None | Some((_, Fate::From(_))));
        if self.head == self.plain && held { None } else { Some(self.oldest()) }
    }

    #[inline(always)]
    fn oldest(&self) -> (u64, &[Sge]) {
        let slot = self.head as usize & (self.wqes.len() - 1);
        let wqe = &self.wqes[slot];
        let first = slot * self.max_sge;
        (wqe.wr_id, &self.sges[first..first + wqe.num_sge as usize])
    }

    /// Drops the oldest request.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.head = self.head.wrapping_add(1);
    }

    /// Has the processor fetch where a later message will be put: the receives of a long queue are more than
    /// its caches hold.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        if self.len() <= FETCHED_AHEAD || self.max_sge == 0 {
            return;
        }
        let slot = self.head.wrapping_add(FETCHED_AHEAD) as usize & (self.wqes.len() - 1);
        if let Some(sge) = self.sges.get(slot * self.max_sge) {
            sge.prefetch();
        }
    }

    /// Takes the oldest request out into `receive`; `false` if there is none.
    #[inline]
    pub(crate) fn take(&mut self, receive: &mut Receive) -> bool {
        if self.head == self.plain {
            return self.take_fated(receive);
        }
        let (wr_id, sges) = self.oldest();
        receive.wr_id = wr_id;
        receive.sges.clear();
        receive.sges.extend_from_slice(sges);
        receive.placed = 0;
        self.advance();
        true
    }

    /// As [`take`](Self::take), where something particular is to become of the oldest request, or there is
    /// none.
    #[cold]
    fn take_fated(&mut self, receive: &mut Receive) -> bool {
        let fate = match self.fates.front() {
            None | Some((_, Fate::From(_))) => return false,
            Some(&(_, fate)) => fate,
        };
        self.fates.pop_front();
        self.find_plain();
        let taken = self.take(receive);
        receive.fate = Some(fate);
        taken
    }

    /// Nothing particular is to become of any request.
    pub(crate) fn spare(&mut self) {
        self.fates.clear();
        self.plain = self.tail;
    }

    /// Forgets everything posted.
    pub(crate) fn clear(&mut self) {
        self.head = self.tail;
        self.taken = self.tail;
        self.spare();
    }

    /// A larger or smaller copy with the same contents.
    ///
    /// # Errors
    /// They do not fit, or [`NO_MEMORY`].
    pub(crate) fn resized(&self, capacity: u32) -> Result<Self, Fault> {
        if capacity < self.len() {
            return Err(Fault::Invalid("the queue holds more requests than that"));
        }
        let mut new = Self::new(capacity, self.max_sge as u32)?;
        let mut position = self.head;
        while position != self.tail {
            let slot = position as usize & (self.wqes.len() - 1);
            let first = slot * self.max_sge;
            let wqe = self.wqes[slot];
            new.push(wqe.wr_id, &self.sges[first..first + wqe.num_sge as usize]);
            if let Some(&(_, fate)) = self.fates.iter().find(|&&(place, _)| place == position) {
                new.doom_last(fate);
            }
            position = position.wrapping_add(1);
        }
        Ok(new)
    }
}

/// A receive request that a message is being placed into.
#[derive(Clone, Debug, Default)]
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    pub(crate) sges: Vec<Sge>,
    /// Bytes placed so far.
    pub(crate) placed: u64,
    /// What is to become of it, if that is settled.
    pub(crate) fate: Option<Fate>,
}

impl Receive {
    /// Bytes it has room for.
    pub(crate) fn capacity(&self) -> u64 {
        self.sges.iter().map(|sge| u64::from(sge.len)).sum()
    }
}
