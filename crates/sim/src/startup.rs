//! Streams of plain iWARP from their beginning: the start-up of MPA, which connection management goes
//! through before an adapter gets the stream.

use quipu_nic::iwarp::setup::{Initiator, Outcome, Responder, SetupError};
use quipu_nic::iwarp::wire::mpa::Enhanced;
use quipu_nic::iwarp::{Negotiated, Params};
use quipu_nic::{Adoption, Loss, QpId, Role};

use crate::network::{Packet, Phase, Stream};
use crate::world::{World, WorldEvent};

/// How long connection management waits for the start-up to be over.
pub(crate) const PATIENCE_NS: u64 = 10_000_000_000;

/// An end of a stream whose start-up is not over.
pub struct Startup {
    pub(crate) machine: Machine,
    pub(crate) params: Params,
    /// The queue pair that the stream is for.
    pub qp: QpId,
}

pub(crate) enum Machine {
    Initiator(Initiator),
    Responder(Responder),
}

impl Startup {
    /// Takes bytes: how many were used, and what was agreed on if the start-up is over.
    pub(crate) fn handle(&mut self, bytes: &[u8]) -> Result<(usize, Option<Negotiated>), Failure> {
        match &mut self.machine {
            Machine::Initiator(initiator) => match initiator.handle(bytes)? {
                (used, None) => Ok((used, None)),
                (used, Some(Outcome::Established(agreed))) => Ok((used, Some(agreed))),
                (_, Some(Outcome::Rejected { .. })) => Err(Failure),
            },
            Machine::Responder(responder) => {
                let (used, request) = responder.handle(bytes)?;
                let agreed = match request {
                    Some(_) => Some(responder.accept(self.params, b"welcome")?),
                    None => None,
                };
                Ok((used, agreed))
            }
        }
    }

    /// What is to be sent.
    pub(crate) fn transmit(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; 1024];
        let len = match &mut self.machine {
            Machine::Initiator(initiator) => initiator.poll_transmit(&mut bytes),
            Machine::Responder(responder) => responder.poll_transmit(&mut bytes),
        };
        bytes.truncate(len);
        bytes
    }

    pub(crate) fn role(&self) -> Role {
        match self.machine {
            Machine::Initiator(_) => Role::Initiator,
            Machine::Responder(_) => Role::Responder,
        }
    }
}

/// A start-up that ends in no connection.
pub(crate) struct Failure;

impl From<SetupError> for Failure {
    fn from(_: SetupError) -> Self {
        Self
    }
}

impl World {
    /// Opens a stream from the first queue pair to the second, each with its host and what it wants.
    pub(crate) fn connect_plain(&mut self, ends: [(usize, QpId); 2], params: [Params; 2]) {
        let now = self.kernel.now();
        let Ok(initiator) = Initiator::new(params[0], b"hello") else {
            return self.violate(|| format!("{:?} is refused", params[0]));
        };
        self.counters.streams += 1;
        let mut state = Stream::new(ends.map(|(host, _)| host), self.net.profile.flow, now);
        let machines =
            [Machine::Initiator(initiator), Machine::Responder(Responder::new())].into_iter();
        for (side, machine) in machines.enumerate() {
            let (params, qp) = (params[side], ends[side].1);
            state.ends[side].startup = Some(Box::new(Startup { machine, params, qp }));
        }
        let stream = self.net.streams.len();
        self.net.streams.push(state);
        for side in 0..2 {
            self.kernel.after(PATIENCE_NS, WorldEvent::StartupLate { stream, side });
        }
        self.syn_retry(stream, 0);
    }

    /// The TCP connection of an initiator stands: it speaks first. Whether there is a start-up to go through.
    pub(crate) fn begin_startup(&mut self, stream: usize) -> bool {
        let Some(startup) = &mut self.net.streams[stream].ends[0].startup else { return false };
        let bytes = startup.transmit();
        self.say(stream, 0, &bytes);
        true
    }

    fn say(&mut self, stream: usize, side: usize, bytes: &[u8]) {
        self.trace.note_bytes(bytes);
        self.net.streams[stream].flows[side].write(bytes);
        self.push_segments(stream, side);
    }

    /// Reads on if there is more, or notices the end of the stream.
    fn go_on_reading(&mut self, stream: usize, side: usize) {
        let flow = &self.net.streams[stream].flows[1 - side];
        if !flow.received.is_empty() {
            self.schedule_read(stream, side);
        } else if flow.at_end() {
            self.lose(stream, side, Loss::Closed);
        }
    }

    /// Connection management reads from a stream whose start-up is not over.
    pub(crate) fn startup_read(&mut self, stream: usize, side: usize, h: usize) {
        let Some(mut startup) = self.net.streams[stream].ends[side].startup.take() else { return };
        let flow = &mut self.net.streams[stream].flows[1 - side];
        let fresh = flow.received.len();
        let show = fresh.min(1 + self.rng.index(fresh));
        let taken = startup.handle(&flow.received.as_slice()[..show]);
        let Ok((used, agreed)) = taken else {
            self.net.streams[stream].ends[side].startup = Some(startup);
            return self.fail_startup(stream, side);
        };
        self.net.streams[stream].flows[1 - side].received.consume(used);
        let Some(negotiated) = agreed else {
            self.net.streams[stream].ends[side].startup = Some(startup);
            return self.go_on_reading(stream, side);
        };
        let reply = startup.transmit();
        self.say(stream, side, &reply);
        let Enhanced { ird, ord, .. } = startup.params.enhanced.unwrap_or_default();
        let adoption = Adoption { role: startup.role(), negotiated, ird, ord, rfc7306: false };
        let now = self.time();
        self.wake(h);
        match self.hosts[h].adapter.adopt_stream(now, startup.qp, &adoption) {
            Ok(conn) => {
                self.trace.note(&[41, h as u64, conn.0]);
                self.net.streams[stream].ends[side].given = Some(startup.qp);
                self.net.hold(stream, side, h, conn);
                self.go_on_reading(stream, side);
                self.serve(h);
            }
            // The program has destroyed the queue pair, or stopped it.
            Err(_) => {
                self.net.streams[stream].ends[side].startup = Some(startup);
                self.fail_startup(stream, side);
            }
        }
    }

    /// A start-up has taken too long.
    pub(crate) fn startup_late(&mut self, stream: usize, side: usize) {
        if self.net.streams[stream].ends[side].startup.is_some() {
            self.fail_startup(stream, side);
        }
    }

    /// Connection management gives up, and closes its end.
    fn fail_startup(&mut self, stream: usize, side: usize) {
        self.send(stream, side, Packet::Reset);
        self.lose(stream, side, Loss::TimedOut);
    }

    /// The programs no longer want the connections that are being made.
    pub(crate) fn abort_startups(&mut self) {
        for stream in 0..self.net.streams.len() {
            (0..2).for_each(|side| self.startup_late(stream, side));
        }
    }

    /// A stream was lost before its start-up was over: the program is told, and so is that of the other end
    /// if nothing of it has come there.
    pub(crate) fn startup_lost(&mut self, stream: usize, side: usize) {
        let opening = self.net.streams[stream].phase == Phase::Opening;
        for end in [side, 1 - side] {
            let state = &mut self.net.streams[stream].ends[end];
            let startup = if end == side || opening { state.startup.take() } else { None };
            if let (Some(startup), Some(h)) = (startup, state.host) {
                self.failed_startups.push((h, startup.qp));
            }
        }
        let ends = &self.net.streams[stream].ends;
        if opening && !ends.iter().any(|end| end.is_held()) {
            self.net.streams[stream].phase = Phase::Gone;
        }
    }
}
