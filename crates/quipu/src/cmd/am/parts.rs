//! What a request and its reply cost, part by part, in one thread that is both ends.
//!
//! The parts of the queue pair are timed on one. Those of the engine of Active Messages are timed on two
//! engines whose messages go through memory. So nothing is added to the path that programs use, and the sum
//! may be compared with the whole.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use quipu_am::message::{Kind, MAX_HEAD, Message};
use quipu_am::pair::{Pair, code_short};
use quipu_am::{Category, MAX_ARGS};

use super::bench::{OneThread, Outcome, quartile};

/// The paper's groups of costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Posting and receiving.
    Base,
    /// Taking completions.
    Event,
    /// Credits, records of requests, queues, locks.
    FlowControl,
    /// Reading messages, running handlers.
    Semantics,
}

impl Group {
    /// The word in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Event => "event",
            Self::FlowControl => "flow-control",
            Self::Semantics => "semantics",
        }
    }
}

/// One part of the cost of a request and its reply, at both ends together.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its group.
    pub group: Group,
    /// What is done.
    pub what: &'static str,
    /// Nanoseconds.
    pub ns: f64,
}

/// Locks that the request and its reply take: to request, to poll, after the handler, at both ends, and to
/// reply.
const LOCKS: f64 = 6.0;
const ROUNDS: usize = 200;
const BURST: usize = 16;

/// The median time of `count` calls at once, for one.
fn median(count: usize, mut call: impl FnMut() -> Outcome) -> Outcome<f64> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let began = Instant::now();
        for _ in 0..count {
            call()?;
        }
        times.push(began.elapsed().as_nanos() as f64 / count as f64);
    }
    Ok(quartile(&times, 2))
}

/// A request and its reply through both engines.
fn engine(payload: &[u8]) -> Outcome<f64> {
    let mut pair = Pair::new()?;
    median(64, || Ok(pair.round(payload)?))
}

/// Writing and reading the bytes of both messages.
fn coding(payload: usize) -> Outcome<f64> {
    if payload == 0 {
        return median(64, || {
            black_box(code_short(black_box(&[1, 2])));
            Ok(())
        });
    }
    let mut sent = Message::new(Kind::Request, 3);
    (sent.nargs, sent.handler) = (2, 1);
    let replied = Message { kind: Kind::Reply, category: Category::Medium, ..sent };
    median(64, || {
        for message in [&sent, &replied] {
            let mut bytes = [0; MAX_HEAD];
            let at = black_box(message).encode(black_box(&[1, 2]), &mut bytes);
            let len = if message.category == Category::Medium { at + payload } else { at };
            let mut args = [0; MAX_ARGS];
            let parsed = Message::parse(black_box(&bytes), len, &mut args);
            black_box((parsed, args)).0.ok_or("not a message")?;
        }
        Ok(())
    })
}

fn handlers() -> Outcome<f64> {
    let handler: Arc<dyn Fn(&mut u64)> = Arc::new(|seen| *seen += 1);
    let mut seen = 0;
    median(64, || {
        black_box(&handler)(black_box(&mut seen));
        black_box(&handler)(black_box(&mut seen));
        Ok(())
    })
}

fn locks() -> Outcome<f64> {
    let lock = quipu_host::Lock::new(0_u64, true);
    let pair = median(64, || {
        *black_box(&lock).lock() += 1;
        Ok(())
    })?;
    Ok(LOCKS * pair)
}

/// What the queue pair costs: post a send, take in what arrives, take its completion, post a receive.
fn queue_pair() -> Outcome<[f64; 4]> {
    let mut ends = OneThread::new()?;
    ends.raw(1000)?;
    let clock = median(1, || Ok(()))?;
    let [mut posts, mut first, mut later, mut receives] = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        let (burst, one) = (ends.burst(BURST)?, ends.burst(1)?);
        posts.push(one.post - clock);
        later.push((burst.rest - clock) / (BURST - 1) as f64);
        receives.push((burst.receives - clock) / BURST as f64);
        first.push(one.first - clock);
    }
    let [posts, first, later, receives] =
        [posts, first, later, receives].map(|times| quartile(&times, 2).max(0.0));
    Ok([posts, (first - later).max(0.0), later, receives])
}

/// The parts of a short request and a reply that has so many bytes of payload.
///
/// # Errors
///
/// The adapter fails.
pub fn parts(payload: usize) -> Outcome<Vec<Part>> {
    let [post, take_in, completion, receive] = queue_pair()?;
    let payload = vec![1; payload];
    let (engine, coding) = (engine(&payload)?, coding(payload.len())?);
    let part = |group, what, ns| Part { group, what, ns };
    Ok(vec![
        part(Group::Base, "post two sends", 2.0 * post),
        part(Group::Base, "take in two messages", 2.0 * take_in),
        part(Group::Base, "post two receives", 2.0 * receive),
        part(Group::Event, "take two completions", 2.0 * completion),
        part(Group::FlowControl, "credits, records, queues", (engine - coding).max(0.0)),
        part(Group::FlowControl, "locks", locks()?),
        part(Group::Semantics, "write and read two messages", coding),
        part(Group::Semantics, "run two handlers", handlers()?),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_costs_more_than_its_messages() {
        assert!(engine(&[]).unwrap() > 0.0 && coding(8).unwrap() > 0.0);
    }
}
