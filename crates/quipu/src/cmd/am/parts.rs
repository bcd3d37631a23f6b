//! What a request and its reply cost, part by part, in one thread that is both ends.
//!
//! The parts of the queue pair are timed on one. Those of the engine of Active Messages are timed on two
//! engines whose messages go through memory. So nothing is added to the path that programs use, and the sum
//! may be compared with the whole.

use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use quipu_am::message::{Kind, MAX_HEAD, Message};
use quipu_am::{
    Arg, Body, BundleId, Category, Config, ConnId, Core, EndpointId, Event, Fabric, Hello, Local,
    Mode, Name, Outgoing, Remote, Status, Tag, Welcome,
};

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

const TAG: Tag = Tag(7);
const SLOT: usize = 256;
/// Locks that the request and its reply take: to request, to poll, after the handler, at both ends, and to
/// reply.
const LOCKS: f64 = 6.0;
const ROUNDS: usize = 200;
const BURST: usize = 16;

/// Queue pairs that are memory: one message is under way at a time.
#[derive(Debug)]
struct Wire {
    conn: Option<ConnId>,
    hello: Option<Hello>,
    welcome: Option<Welcome>,
    sent: Vec<u8>,
    slots: Vec<[u8; SLOT]>,
    free: Vec<u32>,
}

impl Fabric for Wire {
    fn connect(&mut self, conn: ConnId, _: &Name, hello: &Hello) {
        (self.conn, self.hello) = (Some(conn), Some(*hello));
    }

    fn accept(&mut self, _: u64, conn: ConnId, welcome: &Welcome) -> bool {
        (self.conn, self.welcome) = (Some(conn), Some(*welcome));
        true
    }

    fn reject(&mut self, _: u64, _: Status) {}

    fn close(&mut self, _: ConnId) {}

    fn send(&mut self, _: ConnId, bytes: &[u8], _: Option<u64>) -> bool {
        self.sent.clear();
        self.sent.extend_from_slice(bytes);
        true
    }

    fn send_buffer(&mut self, _: ConnId, _: u32, _: usize, _: u64) -> bool {
        false
    }

    fn write(&mut self, _: ConnId, _: Local, _: Remote, _: Option<u64>) -> bool {
        false
    }

    fn read(&mut self, _: ConnId, _: Local, _: Remote, _: u64) -> bool {
        false
    }

    fn inline_limit(&self) -> usize {
        SLOT
    }

    fn store(&mut self, _: u32, _: usize, _: &[u8]) {}

    fn load(&self, slot: u32, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.slots[slot as usize][at..at + out.len()]);
    }

    fn repost(&mut self, slots: &[u32]) {
        self.free.extend_from_slice(slots);
    }

    fn provide(&mut self, slots: u32) -> bool {
        while (self.slots.len() as u32) < slots {
            self.free.push(self.slots.len() as u32);
            self.slots.push([0; SLOT]);
        }
        true
    }
}

/// An engine with one endpoint.
struct End {
    core: Core<Wire, ()>,
    bundle: BundleId,
    endpoint: EndpointId,
}

impl End {
    fn new(port: u16) -> Outcome<Self> {
        let config = Config { shared_credits: 64, max_outstanding: 64, ..Config::default() };
        let (slots, free, sent) = (Vec::new(), Vec::new(), Vec::new());
        let wire = Wire { conn: None, hello: None, welcome: None, sent, slots, free };
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut core = Core::new(wire, config, address, 1)?;
        let bundle = core.create_bundle(Mode::Sequential);
        let endpoint = core.create_endpoint(bundle)?;
        core.set_tag(endpoint, TAG)?;
        core.set_handler(endpoint, 1, Some(()))?;
        Ok(Self { core, bundle, endpoint })
    }

    /// Takes in the message that another end has sent.
    fn take(&mut self, from: &mut Self) {
        let wire = self.core.fabric_mut();
        let Some(conn) = wire.conn else { return };
        let Some(slot) = wire.free.pop() else { return };
        let bytes = &from.core.fabric().sent;
        wire.slots[slot as usize][..bytes.len()].copy_from_slice(bytes);
        let event = Event::Received { conn: Some(conn), slot, len: bytes.len() };
        self.core.handle_event(event);
    }
}

fn request<'a>(args: &'a [Arg]) -> Outgoing<'a> {
    Outgoing { handler: 1, args, body: Body::Short }
}

/// Two engines that are connected.
fn engines() -> Outcome<[End; 2]> {
    let mut ends = [End::new(1)?, End::new(2)?];
    let [here, there] = &mut ends;
    here.core.map(here.endpoint, 0, there.core.name(there.endpoint)?, TAG)?;
    if here.core.request(here.endpoint, 0, &request(&[1, 2])).is_ok() {
        return Err("a request went out without a connection".into());
    }
    let hello = here.core.fabric_mut().hello.ok_or("the engine does not connect")?;
    there.core.handle_event(Event::Incoming { incoming: 0, hello });
    let welcome = there.core.fabric_mut().welcome.ok_or("the engine does not accept")?;
    let conn = here.core.fabric().conn.ok_or("no connection")?;
    here.core.handle_event(Event::Connected { conn, welcome });
    // The first message is about segments.
    while here.core.request(here.endpoint, 0, &request(&[1, 2])).is_err() {
        there.take(here);
        here.take(there);
    }
    answer(&mut ends, &[])?;
    Ok(ends)
}

/// The reply to the request that is under way, with a payload or without, and its handler.
fn answer([here, there]: &mut [End; 2], payload: &[u8]) -> Outcome {
    there.take(here);
    let mut delivery = there.core.next_delivery(there.bundle).ok_or("no request has come")?;
    let body = if payload.is_empty() { Body::Short } else { Body::Medium(payload) };
    there.core.reply(&mut delivery, &Outgoing { handler: 1, args: &[1, 2], body })?;
    there.core.finish(&mut delivery);
    here.take(there);
    let mut delivery = here.core.next_delivery(here.bundle).ok_or("no reply has come")?;
    here.core.finish(&mut delivery);
    Ok(())
}

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
    let mut ends = engines()?;
    median(64, || {
        let [here, _] = &mut ends;
        here.core.request(here.endpoint, 0, &request(&[1, 2]))?;
        answer(&mut ends, payload)
    })
}

/// Writing and reading the bytes of both messages.
fn coding(payload: usize) -> Outcome<f64> {
    let mut sent = Message::new(Kind::Request, 3);
    (sent.nargs, sent.handler) = (2, 1);
    let mut replied = Message { kind: Kind::Reply, ..sent };
    if payload > 0 {
        replied.category = Category::Medium;
    }
    median(64, || {
        for message in [&sent, &replied] {
            let mut bytes = [0; MAX_HEAD];
            let at = black_box(message).encode(&mut bytes);
            let len = if message.category == Category::Medium { at + payload } else { at };
            black_box(Message::parse(black_box(&bytes[..at]), len)).ok_or("not a message")?;
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
        let burst = ends.burst(BURST)?;
        posts.push((burst.post - clock) / BURST as f64);
        later.push((burst.rest - clock) / (BURST - 1) as f64);
        receives.push((burst.receives - clock) / BURST as f64);
        first.push(ends.burst(1)?.first - clock);
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
    fn a_request_and_its_reply_go_through_both_engines() {
        let mut ends = engines().unwrap();
        for payload in [&[][..], &[1, 2, 3]] {
            let [here, _] = &mut ends;
            here.core.request(here.endpoint, 0, &request(&[1, 2])).unwrap();
            answer(&mut ends, payload).unwrap();
        }
        let counters = ends[1].core.counters(ends[1].endpoint).unwrap();
        assert_eq!((counters.requests_received, counters.replies_sent), (3, 3));
    }

    #[test]
    fn the_engine_costs_more_than_its_messages() {
        assert!(engine(&[]).unwrap() > 0.0 && coding(8).unwrap() > 0.0);
    }
}
