//! What idle connections cost: their memory, and what they add to the work for a packet of a busy one.
//!
//! Two stacks hand each other frames in memory, so nothing but the stack is measured.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use quipu_host::inet::stack::{Arrival, Config, Event, Frame, Offload, Stack, TcpId};
use quipu_host::inet::tcp::{self, MILLISECOND, SECOND, Secret};
use serde::Serialize;

use crate::stats;
use crate::sys::{self, cycles};

/// Connections that are idle, but for those that are busy.
const CONNECTIONS: u32 = 100_000;
const BUSY: u32 = 16;
/// Connections to one port of the server, each from a port of its own behind the first.
const EACH_PORT: u32 = 50_000;
const FIRST_PORT: u16 = 10_000;
/// Exchanges that are measured, and before them such that are not.
const EXCHANGES: u32 = 20_000;
const WARMUP: u32 = 1_000;
/// Packets of an exchange that the server sees: a request, the answer, and its acknowledgement.
const PACKETS: f64 = 3.0;
/// Octets of a request and of its answer, and room for them.
const OCTETS: u64 = 100;
const ROOM: u64 = 1 << 16;
/// Octets of the longest frame, and more.
const LONGEST: usize = 1_024;
/// Whatever is to happen on a connection has happened by then, in nanoseconds of the stack's time.
const QUIET: u64 = 400 * SECOND;

/// What idle connections cost.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct IdleCost {
    /// How many there are.
    pub connections: u32,
    /// Octets of memory of each by the stack's own account: what it has asked the allocator for, without what
    /// a queue pair adds.
    pub octets: f64,
    /// How many are busy, of these and where there are no others.
    pub busy: u32,
    /// Nanoseconds for a packet of a busy one, without others and among them.
    pub packet_ns: [f64; 2],
}

/// Two stacks and the connections between them.
struct Pair {
    now: u64,
    client: Stack,
    server: Stack,
    /// Of each connection, the client's and the server's.
    ids: Vec<[TcpId; 2]>,
    frame: Vec<u8>,
}

fn address(last: u16) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).into()
}

fn stack(last: u16, connections: u32) -> Stack {
    // Checksums are others' work.
    let offload = Offload { checksum: true, segment: 0 };
    let config = Config::new(address(last), 64, Secret([3, u64::from(last)]));
    Stack::new(Config { offload, max_connections: connections, ..config })
}

/// Writes the next frame of a stack; its length.
fn transmit(stack: &mut Stack, now: u64, frame: &mut [u8]) -> Option<usize> {
    stack.poll_transmit(now, frame).map(|departure| departure.len())
}

impl Pair {
    fn new(connections: u32) -> Result<Self> {
        let (client, server) = (stack(1, connections), stack(2, connections));
        let frame = vec![0; 2 * LONGEST];
        let mut pair = Self { now: SECOND, client, server, ids: Vec::new(), frame };
        let config = Arc::new(tcp::Config { ack_delay: 0, pacing: false, ..Default::default() });
        for number in 0..connections {
            let (at, port) = (number % EACH_PORT, FIRST_PORT + (number / EACH_PORT) as u16);
            if at == 0 {
                let (listener, _) = pair.server.listen(port, &config, EACH_PORT)?;
                pair.server.set_idle(listener, EACH_PORT);
            }
            let own = SocketAddr::new(address(1), FIRST_PORT + at as u16);
            pair.open(own, SocketAddr::new(address(2), port), &config)
                .with_context(|| format!("connection {number}"))?;
        }
        Ok(pair)
    }

    fn open(&mut self, from: SocketAddr, to: SocketAddr, config: &Arc<tcp::Config>) -> Result<()> {
        let here = self.client.connect_from(self.now, from, to, config)?;
        self.client.set_receive_space(here, ROOM);
        self.carry_over().context("no SYN")?;
        let Some(Event::Incoming { connection: there, .. }) = self.server.poll_event() else {
            return Err(anyhow!("nobody comes in"));
        };
        self.server.set_receive_space(there, ROOM);
        self.carry_back().context("no answer to the SYN")?;
        self.carry_over().context("the answer is not acknowledged")?;
        while self.client.poll_event().is_some() || self.server.poll_event().is_some() {}
        self.ids.push([here, there]);
        Ok(())
    }

    /// Brings the client's next frame to the server.
    fn carry_over(&mut self) -> Option<Arrival> {
        let len = transmit(&mut self.client, self.now, &mut self.frame)?;
        let frame = Frame { bytes: &self.frame[..len], checked: true };
        Some(self.server.handle_frame(self.now, &frame))
    }

    /// Brings the server's next frame to the client.
    fn carry_back(&mut self) -> Option<Arrival> {
        let len = transmit(&mut self.server, self.now, &mut self.frame)?;
        let frame = Frame { bytes: &self.frame[..len], checked: true };
        Some(self.client.handle_frame(self.now, &frame))
    }

    /// A request, its answer and the acknowledgement; the cycles that the server has worked.
    fn exchange(&mut self, which: usize) -> Result<u64> {
        self.now += MILLISECOND;
        let [here, there] = self.ids[which];
        self.client.send(here, OCTETS, true)?;
        let request = transmit(&mut self.client, self.now, &mut self.frame);
        let request = request.context("no request")?;
        let Self { now, client, server, frame, .. } = self;
        let begun = cycles();
        let bytes = &frame[..request];
        let arrival = server.handle_frame(*now, &Frame { bytes, checked: true });
        ensure!(matches!(arrival, Arrival::Segment { connection, .. } if connection == there));
        server.set_receive_space(there, ROOM);
        server.send(there, OCTETS, true)?;
        let (front, behind) = frame.split_at_mut(LONGEST);
        let answer = transmit(server, *now, front);
        // An adapter asks until there is nothing more; only then the stack notes deadlines.
        let only = transmit(server, *now, behind).is_none();
        let answered = cycles().saturating_sub(begun);
        let answer = answer.filter(|_| only).context("no answer, or more than one frame")?;
        client.handle_frame(*now, &Frame { bytes: &frame[..answer], checked: true });
        client.set_receive_space(here, ROOM);
        while client.poll_event().is_some() {}
        let ack = transmit(client, *now, frame).context("no acknowledgement")?;
        client.handle_timeout(*now);
        let begun = cycles();
        server.handle_frame(*now, &Frame { bytes: &frame[..ack], checked: true });
        let mut acked = false;
        while let Some(event) = server.poll_event() {
            acked |= matches!(event, Event::Tcp { event: tcp::Event::Acked(_), .. });
        }
        server.handle_timeout(*now);
        let more = transmit(server, *now, frame);
        let done = cycles().saturating_sub(begun);
        ensure!(acked && more.is_none(), "the answer is not acknowledged");
        Ok(answered + done)
    }

    /// Lets time pass until nothing happens any more.
    fn fall_idle(&mut self) -> Result<()> {
        while let Some(at) = self.server.poll_timeout().filter(|at| *at <= self.now + QUIET) {
            self.now = self.now.max(at);
            self.server.handle_timeout(self.now);
            ensure!(self.carry_back().is_none(), "an idle connection sends");
        }
        Ok(())
    }
}

/// Measures them on a processor.
///
/// # Errors
///
/// The stacks do not do what they should.
pub(crate) fn measure(cpu: usize) -> Result<IdleCost> {
    // A thread of its own is tied to it, and not what the caller begins later.
    let pinned = || sys::pin(cpu).context("pinning").and_then(|()| costs(CONNECTIONS, EXCHANGES));
    std::thread::scope(|scope| scope.spawn(pinned).join())
        .map_err(|_| anyhow!("a thread has panicked"))?
}

fn costs(connections: u32, exchanges: u32) -> Result<IdleCost> {
    let mut pairs = [Pair::new(BUSY)?, Pair::new(connections)?];
    for which in 0..connections as usize {
        pairs[1].exchange(which)?;
    }
    pairs[1].fall_idle()?;
    let octets = pairs[1].server.memory() as f64 / f64::from(connections);
    let mut spent = [Vec::new(), Vec::new()];
    let (begun, first) = (std::time::Instant::now(), cycles());
    for turn in 0..WARMUP + exchanges {
        let busy = turn % BUSY;
        // They are spread among the others.
        for (index, step) in [1, connections / BUSY].into_iter().enumerate() {
            let took = pairs[index].exchange((busy * step) as usize)?;
            if turn >= WARMUP {
                spent[index].push(took as f64);
            }
        }
    }
    let passed = cycles().saturating_sub(first).max(1) as f64;
    let scale = begun.elapsed().as_nanos() as f64 / passed / PACKETS;
    let packet_ns = spent.map(|spent| stats::median(&spent) * scale);
    Ok(IdleCost { connections, octets, busy: BUSY, packet_ns })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_connections_have_memory_and_leave_others_alone() {
        let IdleCost { connections, octets, packet_ns, .. } = costs(1_000, 100).unwrap();
        assert!(connections == 1_000 && octets > 0.0, "{octets}");
        assert!(packet_ns.iter().all(|ns| *ns > 0.0), "{packet_ns:?}");
    }
}
