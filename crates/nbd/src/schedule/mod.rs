//! Requests of a client that outlives its connections: which one may be sent now, and which ones are
//! repeated after a connection is lost.
//!
//! The rules, in the order in which requests were added:
//!
//! 1. A flush is sent when every earlier write has its reply, and not before.
//! 2. A write is sent when every earlier flush has its reply.
//! 3. Requests that touch the same bytes go one after the other, unless all of them read.
//! 4. A request whose connection is lost before its reply goes back to its place in the order. So a repeated
//!    request obeys the same rules: no write passes a flush.
//!
//! Everything else goes at once, over any connection. Every request ends: with its reply, or with a failure
//! when its reply is late or no connection comes back in time.
//!
//! The caller keeps the clock and the connections. Times are durations since a moment of its choice. For each
//! request it calls [`Schedule::add`], then [`Schedule::next`] and [`Schedule::send`] when a connection
//! has room, then [`Schedule::replied`], or [`Schedule::lost`] for all requests of a connection. After
//! each of these, and at [`Schedule::timeout`], it asks [`Schedule::late`] and [`Schedule::expire`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A request may take so many times the limit of a reply while others on its connection get theirs.
const SLOWEST: u32 = 10;

/// What a request does, as far as the order is concerned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Class {
    /// Changes nothing.
    Read,
    /// Changes bytes.
    Write,
    /// Makes earlier writes durable.
    Flush,
}

/// How long things may take.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// A reply, while nothing else comes over its connection.
    pub reply: Duration,
    /// How long a request waits for a new connection after its own is lost. `None`: it fails at once.
    pub reconnect: Option<Duration>,
}

#[derive(Debug)]
enum State<T> {
    Waiting(T),
    Sent { line: u32, at: Duration },
}

#[derive(Debug)]
struct Entry<T> {
    class: Class,
    start: u64,
    end: u64,
    state: State<T>,
    /// Since when it has had no connection.
    lost: Option<Duration>,
}

impl<T> Entry<T> {
    fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// The requests that have no reply yet, in their order. `T` is what the caller needs to send one.
#[derive(Debug)]
pub struct Schedule<T> {
    limits: Limits,
    entries: BTreeMap<u64, Entry<T>>,
    serial: u64,
    /// When something has come last over each connection.
    lines: BTreeMap<u32, Duration>,
}

impl<T> Schedule<T> {
    /// Without requests and connections.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, entries: BTreeMap::new(), serial: 0, lines: BTreeMap::new() }
    }

    /// How many requests have no reply yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether every request has its reply.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether there is a connection.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        !self.lines.is_empty()
    }

    /// Adds a request at the end of the order, which touches `length` bytes from `start` on; its number.
    pub fn add(&mut self, now: Duration, class: Class, (start, length): (u64, u64), job: T) -> u64 {
        let lost = if self.is_connected() { None } else { Some(now) };
        let (end, state) = (start.saturating_add(length), State::Waiting(job));
        self.serial += 1;
        self.entries.insert(self.serial, Entry { class, start, end, state, lost });
        self.serial
    }

    /// The first request that may be sent now, and what it takes.
    #[must_use]
    pub fn next(&self) -> Option<(u64, &T)> {
        let mut earlier: Vec<&Entry<T>> = Vec::new();
        let (mut writes, mut flushes) = (false, false);
        for (id, entry) in &self.entries {
            if let State::Waiting(job) = &entry.state {
                let may = match entry.class {
                    Class::Flush => !writes && !flushes,
                    Class::Write => {
                        !flushes && !earlier.iter().any(|earlier| earlier.overlaps(entry))
                    }
                    Class::Read => {
                        let writes = earlier.iter().filter(|it| it.class == Class::Write);
                        !writes.into_iter().any(|earlier| earlier.overlaps(entry))
                    }
                };
                if may {
                    return Some((*id, job));
                }
            }
            writes |= entry.class == Class::Write;
            flushes |= entry.class == Class::Flush;
            if entry.class != Class::Flush {
                earlier.push(entry);
            }
        }
        None
    }

    /// A request goes out over a connection.
    ///
    /// # Panics
    ///
    /// It does not wait to be sent.
    pub fn send(&mut self, id: u64, line: u32, now: Duration) -> T {
        let entry = self.entries.get_mut(&id).expect("the request is not known");
        match std::mem::replace(&mut entry.state, State::Sent { line, at: now }) {
            State::Waiting(job) => job,
            State::Sent { .. } => panic!("the request was sent before"),
        }
    }

    /// A request has its reply.
    pub fn replied(&mut self, id: u64, now: Duration) {
        if let Some(Entry { state: State::Sent { line, .. }, .. }) = self.entries.remove(&id)
            && let Some(last) = self.lines.get_mut(&line)
        {
            *last = now;
        }
    }

    /// There is a connection, which the caller gives a number that no other had.
    pub fn connected(&mut self, line: u32, now: Duration) {
        self.lines.insert(line, now);
    }

    /// A connection is lost. `jobs` are the requests that were sent over it and have no reply. Those
    /// that fail with it come back.
    pub fn lost(
        &mut self,
        line: u32,
        jobs: impl IntoIterator<Item = (u64, T)>,
        now: Duration,
    ) -> Vec<(u64, T)> {
        self.lines.remove(&line);
        let mut failed = Vec::new();
        for (id, job) in jobs {
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            let lost = *entry.lost.get_or_insert(now);
            if self.limits.reconnect.is_some_and(|limit| now < lost + limit) {
                entry.state = State::Waiting(job);
            } else {
                self.entries.remove(&id);
                failed.push((id, job));
            }
        }
        if !self.is_connected() {
            self.mark_waiting(now);
        }
        failed
    }

    /// An attempt to connect has failed. The requests that fail with it come back.
    pub fn unreachable(&mut self, now: Duration) -> Vec<(u64, T)> {
        if self.is_connected() {
            return Vec::new();
        }
        self.mark_waiting(now);
        if self.limits.reconnect.is_none() { self.take_waiting(|_| true) } else { self.expire(now) }
    }

    /// Waiting requests have no connection from now on, if they had one until now.
    fn mark_waiting(&mut self, now: Duration) {
        for entry in self.entries.values_mut() {
            entry.lost.get_or_insert(now);
        }
    }

    fn take_waiting(&mut self, fails: impl Fn(&Entry<T>) -> bool) -> Vec<(u64, T)> {
        let waits = |entry: &Entry<T>| matches!(entry.state, State::Waiting(_));
        let ids = self.entries.iter().filter(|(_, entry)| waits(entry) && fails(entry));
        let ids: Vec<u64> = ids.map(|(id, _)| *id).collect();
        let take = |id| match self.entries.remove(&id)?.state {
            State::Waiting(job) => Some((id, job)),
            State::Sent { .. } => None,
        };
        ids.into_iter().filter_map(take).collect()
    }

    /// How long a request waits for a connection.
    fn wait(&self) -> Duration {
        self.limits.reconnect.unwrap_or(self.limits.reply)
    }

    /// Takes the requests that have waited too long for a connection. They fail.
    pub fn expire(&mut self, now: Duration) -> Vec<(u64, T)> {
        if self.is_connected() {
            return Vec::new();
        }
        let wait = self.wait();
        self.take_waiting(|entry| entry.lost.is_some_and(|lost| now >= lost + wait))
    }

    /// When the reply to a request that was sent is late.
    fn deadline(&self, line: u32, at: Duration) -> Duration {
        let last = self.lines.get(&line).copied().unwrap_or(at);
        (last.max(at) + self.limits.reply).min(at + self.limits.reply * SLOWEST)
    }

    /// The connections whose replies are late: they count as lost.
    #[must_use]
    pub fn late(&self, now: Duration) -> BTreeSet<u32> {
        let sent = self.entries.values().filter_map(|entry| match entry.state {
            State::Sent { line, at } => Some((line, at)),
            State::Waiting(_) => None,
        });
        sent.filter(|(line, at)| now >= self.deadline(*line, *at)).map(|(line, _)| line).collect()
    }

    /// When [`late`](Self::late) or [`expire`](Self::expire) has something to say, unless something
    /// comes before.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        let connected = self.is_connected();
        let times = self.entries.values().filter_map(|entry| match entry.state {
            State::Sent { line, at } => Some(self.deadline(line, at)),
            State::Waiting(_) if connected => None,
            State::Waiting(_) => entry.lost.map(|lost| lost + self.wait()),
        });
        times.min()
    }
}

#[cfg(test)]
mod tests;
