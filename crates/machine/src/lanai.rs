//! The programmable NIC of the QPIP paper: a LANai 9 that runs queue pairs and TCP in firmware.
//!
//! One slow processor runs the four state machines of the adapter (doorbell, management, transmit, receive).
//! Each segment occupies it for the sum of its stages (tables 2 and 3 of the paper, `costs/lanai.toml`), and
//! while it waits for its DMA engine and for the link: the firmware overlaps nothing. The TCP is
//! [`quipu_inet::tcp`] in message mode, as in Quipu's own adapter. The host posts and polls.

use std::collections::VecDeque;

use quipu_events::Kernel;
use quipu_inet::tcp::{Config, Connection, Flow, Listener, Mode, Opening, Secret};
use quipu_wire::tcp::Repr;
use serde::Deserialize;

use crate::bus::pci::Bus;
use crate::error::RunError;
use crate::plan::{Bytes, PciPlan, Plan, Rate, WorkloadKind};

const TABLE: &str = include_str!("../costs/lanai.toml");
/// Ethernet is not there: Myrinet's route and IPv6.
const HEADERS: u64 = 8 + 40;
/// What stands for the bytes of a payload.
static PAYLOAD: [u8; 1 << 16] = [0; 1 << 16];

/// What a stage costs for a segment with data and for one without, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Its name in the paper.
    pub stage: String,
    /// For a segment with data.
    pub data: u64,
    /// For an acknowledgement.
    pub ack: u64,
}

/// The firmware's costs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Firmware {
    /// For readers.
    pub about: String,
    /// Table 2.
    pub transmit: Vec<Stage>,
    /// Table 3.
    pub receive: Vec<Stage>,
    checksum: Checksum,
    host: HostCost,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Checksum {
    ps_per_byte: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostCost {
    ns: u64,
}

impl Firmware {
    /// The costs of the paper.
    ///
    /// # Errors
    /// The table that comes with the crate is wrong, which a test excludes.
    pub fn published() -> Result<Self, RunError> {
        toml::from_str(TABLE).map_err(|error| RunError::Costs(error.to_string()))
    }

    /// The time of all stages for one segment, in picoseconds.
    fn ps(stages: &[Stage], data: bool) -> u64 {
        stages.iter().map(|it| if data { it.data } else { it.ack }).sum::<u64>() * 1000
    }
}

/// What runs on two such adapters.
#[derive(Clone, Debug, PartialEq)]
pub struct LanaiPlan {
    /// Bytes of a packet on the network.
    pub mtu: u32,
    /// Bytes of a message.
    pub message: u32,
    /// Messages under way; 1 bounces a message between the hosts.
    pub depth: u32,
    /// Whether the message comes back (a round trip) or goes one way (throughput).
    pub bounce: bool,
    /// Whether the firmware computes checksums, or the paper's emulation of hardware does.
    pub firmware_checksum: bool,
    /// Messages that are counted.
    pub messages: u32,
}

impl LanaiPlan {
    /// What a plan of a machine means for a LANai.
    pub(crate) fn of(plan: &Plan) -> Self {
        let bounce = plan.workload.kind == WorkloadKind::Rr;
        let message = if bounce { plan.workload.request.0 } else { plan.workload.message.0 };
        Self {
            mtu: plan.link.mtu,
            message: message.clamp(1, 64 << 10) as u32,
            depth: plan.workload.outstanding,
            bounce,
            firmware_checksum: plan.nic.firmware_checksum,
            messages: 1000,
        }
    }
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LanaiReport {
    /// Payload in MB/s (10^6 bytes).
    pub mb_per_s: f64,
    /// Time of a message, or of its round trip, in microseconds.
    pub us: f64,
    /// Firmware time of one segment with data that is sent, received; of one acknowledgement that is sent,
    /// received; in microseconds.
    pub stages_us: [f64; 4],
    /// Segments that were sent, both ends.
    pub segments: u64,
    /// Events, simulated time in picoseconds.
    pub events: u64,
    /// Simulated time in picoseconds.
    pub ps: u64,
}

/// Something that happens.
enum Event {
    /// The firmware of an end is done with what it did.
    Free(usize),
    /// A packet is at an end.
    Packet(usize, Box<Repr>, u32),
    /// A deadline of an end's TCP.
    Timer(usize),
    /// The host of an end posts a message.
    Post(usize),
}

/// What the firmware of an end is doing.
enum Work {
    Send(Box<Repr>, u32),
    Receive(Box<Repr>, u32),
}

/// An adapter and its host.
struct End {
    tcp: Option<Box<Connection>>,
    listener: Listener,
    flow: Flow,
    work: Option<Work>,
    inbox: VecDeque<(Box<Repr>, u32)>,
    /// Messages that were received whole, and bytes.
    messages: u32,
    timer_at: u64,
}

/// Two adapters on a link.
struct Pair {
    kernel: Kernel<Event>,
    plan: LanaiPlan,
    firmware: Firmware,
    bus: Bus,
    link: Rate,
    ends: [End; 2],
    posted: u32,
    segments: u64,
}

/// Runs two adapters.
///
/// # Errors
/// The messages do not arrive.
pub fn run_lanai(plan: &LanaiPlan) -> Result<LanaiReport, RunError> {
    let firmware = Firmware::published()?;
    let us = |stages, data| Firmware::ps(stages, data) as f64 / 1e6;
    let stages_us = [
        us(&firmware.transmit, true),
        us(&firmware.receive, true),
        us(&firmware.transmit, false),
        us(&firmware.receive, false),
    ];
    let mut pair = Pair::new(plan, firmware);
    // The first messages open the window.
    let warmup = plan.messages / 4 + 1;
    pair.until(warmup)?;
    let begun = pair.kernel.now();
    pair.until(warmup + plan.messages.max(1))?;
    let us = (pair.kernel.now() - begun) as f64 / 1e6 / f64::from(plan.messages.max(1));
    let mb_per_s = f64::from(plan.message) / us;
    Ok(LanaiReport {
        mb_per_s,
        us,
        stages_us,
        segments: pair.segments,
        events: pair.kernel.scheduled(),
        ps: pair.kernel.now(),
    })
}

impl Pair {
    fn new(plan: &LanaiPlan, firmware: Firmware) -> Self {
        let mss = plan.mtu.saturating_sub(60).clamp(536, 65_000) as u16;
        let config = Config {
            mode: Mode::Message,
            receive_mss: mss,
            path_mss: mss,
            max_receive_space: 1 << 20,
            timestamps: false,
            sack: false,
            ecn: false,
            pacing: false,
            ..Config::default()
        };
        let end = |number: usize| {
            let address = |number: usize| ([10, 1, 0, number as u8 + 1], 7).into();
            let flow = Flow { local: address(number), remote: address(1 - number) };
            let secret = Secret([number as u64 + 1, 5]);
            let tcp =
                (number == 0).then(|| Box::new(Connection::connect(0, config, secret, &flow)));
            End {
                tcp,
                listener: Listener::new(config, secret, 1),
                flow,
                work: None,
                inbox: VecDeque::new(),
                messages: 0,
                timer_at: u64::MAX,
            }
        };
        // Two thirds of the bus' clocks carry data: 60 % of 264 MB/s, as the facts have it.
        let pci = PciPlan { overhead: 11, burst: Bytes(128), ..PciPlan::default() };
        let mut pair = Self {
            kernel: Kernel::default(),
            plan: plan.clone(),
            firmware,
            bus: Bus::new(&pci),
            link: Rate(2_000_000_000),
            ends: [end(0), end(1)],
            posted: 0,
            segments: 0,
        };
        for end in &mut pair.ends {
            if let Some(tcp) = &mut end.tcp {
                tcp.set_receive_space(1 << 20);
            }
        }
        let posts = if plan.bounce { 1 } else { plan.depth.max(1) };
        (0..posts).for_each(|_| pair.kernel.at(1_000_000_000, Event::Post(0)));
        pair.go_on(0);
        pair
    }

    /// Messages that count: those that have arrived, or have come back.
    fn done(&self) -> u32 {
        self.ends[if self.plan.bounce { 0 } else { 1 }].messages
    }

    fn until(&mut self, messages: u32) -> Result<(), RunError> {
        const LIMIT: u64 = 50_000_000;
        while self.done() < messages {
            if self.kernel.scheduled() > LIMIT {
                return Err(RunError::TooManyEvents(LIMIT));
            }
            let standstill = RunError::Standstill(self.kernel.now() / 1_000_000);
            let event = self.kernel.next().ok_or(standstill)?;
            self.handle(event);
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Free(end) => self.finish(end),
            Event::Packet(end, header, len) => {
                self.ends[end].inbox.push_back((header, len));
                self.go_on(end);
            }
            Event::Timer(end) => {
                let now = self.now_ns();
                self.ends[end].timer_at = u64::MAX;
                if let Some(tcp) = &mut self.ends[end].tcp {
                    tcp.handle_timeout(now);
                }
                self.go_on(end);
            }
            Event::Post(end) => {
                self.posted += 1;
                let message = u64::from(self.plan.message);
                if let Some(tcp) = &mut self.ends[end].tcp {
                    // An adapter that is asked for more than it can hold keeps the request.
                    if tcp.send(message, true).is_err() {
                        self.kernel.after(1_000_000, Event::Post(end));
                    }
                }
                self.go_on(end);
            }
        }
    }

    fn now_ns(&self) -> u64 {
        self.kernel.now() / 1000
    }

    fn checksum(&self, len: u32) -> u64 {
        if self.plan.firmware_checksum {
            u64::from(len) * self.firmware.checksum.ps_per_byte
        } else {
            0
        }
    }

    /// Gives an idle firmware its next work: what has come, then what is to be sent.
    fn go_on(&mut self, end: usize) {
        let now = self.now_ns();
        if self.ends[end].work.is_none() {
            let work = match self.ends[end].inbox.pop_front() {
                Some((header, len)) => Some(Work::Receive(header, len)),
                None => self.ends[end].tcp.as_mut().and_then(|tcp| {
                    let segment = tcp.poll_transmit(now)?;
                    let len = (segment.payload.end - segment.payload.start) as u32;
                    Some(Work::Send(Box::new(segment.header), len))
                }),
            };
            if let Some(work) = work {
                let takes = self.takes(&work);
                self.ends[end].work = Some(work);
                self.kernel.after(takes, Event::Free(end));
            }
        }
        let deadline = self.ends[end].tcp.as_ref().and_then(|tcp| tcp.poll_timeout());
        let at = deadline.map_or(u64::MAX, |ns| ns.saturating_mul(1000));
        if at < self.ends[end].timer_at {
            self.ends[end].timer_at = at;
            self.kernel.at(at, Event::Timer(end));
        }
    }

    /// For how long the firmware is occupied.
    fn takes(&self, work: &Work) -> u64 {
        let dma = |len: u32| if len > 0 { self.bus.ps(len.into()) } else { 0 };
        match work {
            Work::Send(header, len) => {
                let wire = HEADERS + header.header_len() as u64 + u64::from(*len);
                Firmware::ps(&self.firmware.transmit, *len > 0)
                    + dma(*len)
                    + self.link.ps(wire)
                    + self.checksum(*len)
            }
            Work::Receive(_, len) => {
                Firmware::ps(&self.firmware.receive, *len > 0) + dma(*len) + self.checksum(*len)
            }
        }
    }

    /// The firmware is done with its work.
    fn finish(&mut self, end: usize) {
        let now = self.now_ns();
        match self.ends[end].work.take() {
            Some(Work::Send(header, len)) => {
                self.segments += 1;
                // A switch of Myrinet is crossed in half a microsecond.
                self.kernel.after(500_000, Event::Packet(1 - end, header, len));
            }
            Some(Work::Receive(header, len)) => self.received(now, end, &header, len),
            None => {}
        }
        self.go_on(end);
    }

    fn received(&mut self, now: u64, end: usize, header: &Repr, len: u32) {
        let state = &mut self.ends[end];
        let payload = PAYLOAD.get(..len as usize).unwrap_or(&PAYLOAD);
        let Some(tcp) = &mut state.tcp else {
            let opening =
                state.listener.handle_segment(now, &state.flow, header, payload.len(), true);
            if let Opening::HalfOpen(mut connection) | Opening::Open(mut connection) = opening {
                connection.set_receive_space(1 << 20);
                state.tcp = Some(connection);
            }
            return;
        };
        let received = tcp.handle_segment(now, header, payload, false);
        tcp.set_receive_space(1 << 20);
        while tcp.poll_event().is_some() {}
        let host = self.firmware.host.ns * 1000;
        if received.push {
            state.messages += 1;
            if self.plan.bounce {
                self.kernel.after(host, Event::Post(end));
            } else {
                // The receiver's count also lets the sender post: the host polls its completion queue.
                self.kernel.after(host, Event::Post(1 - end));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn throughput(mtu: u32, firmware_checksum: bool) -> f64 {
        let plan = LanaiPlan {
            mtu,
            message: 16_000,
            depth: 8,
            bounce: false,
            firmware_checksum,
            messages: 200,
        };
        run_lanai(&plan).unwrap().mb_per_s
    }

    #[test]
    fn the_stages_add_up_to_the_tables() {
        let firmware = Firmware::published().unwrap();
        let sums = [
            Firmware::ps(&firmware.transmit, true),
            Firmware::ps(&firmware.transmit, false),
            Firmware::ps(&firmware.receive, true),
            Firmware::ps(&firmware.receive, false),
        ];
        assert_eq!(sums, [21_500_000, 11_500_000, 22_000_000, 26_500_000]);
    }

    #[test]
    fn throughput_is_that_of_the_closed_form() {
        for (mtu, segment) in [(1500, 1440.0), (9000, 8940.0)] {
            // 21.5 us, an acknowledgement of 26.5 us for every second segment, bus and wire, no overlap.
            let closed = 21.5 + 26.5 / 2.0 + segment / 156.4 + (segment + 68.0) / 250.0;
            let ours = throughput(mtu, false);
            let ratio = ours / (segment / closed);
            assert!((0.85..1.1).contains(&ratio), "MTU {mtu}: {ours} MB/s, {ratio}");
        }
    }

    #[test]
    fn checksums_in_firmware_cost_most_of_it() {
        let (hardware, firmware) = (throughput(16_384, false), throughput(16_384, true));
        assert!(hardware > 2.2 * firmware, "{hardware} {firmware}");
    }

    #[test]
    fn a_round_trip_is_within_a_fifth_of_the_paper() {
        let plan = LanaiPlan {
            mtu: 16_384,
            message: 1,
            depth: 1,
            bounce: true,
            firmware_checksum: true,
            messages: 100,
        };
        let us = run_lanai(&plan).unwrap().us;
        // 113 us in the paper; the tables alone give 96.
        assert!((90.0..136.0).contains(&us), "{us} us");
    }
}
