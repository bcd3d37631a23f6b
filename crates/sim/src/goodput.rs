//! Goodput of a connection of QPIP over loss, delay and window, in virtual time: two adapters on a link that
//! loses packets in both directions, one stream of bytes, each of which is compared.

use std::sync::Arc;

use quipu_nic::inet::tcp::Mode;
use quipu_nic::mem::Access;
use quipu_nic::{
    Completion, Config, CqId, Event, Fault, Payload, QpAttr, QpAttrMask, QpCap, QpId, QpInit,
    QpNum, QpState, QpType, SendFlags, SendOp, SendWr, TcpChange, TcpSettings, To, WcStatus,
};

use crate::frames::{Helps, Weather, addresses};
use crate::plan::Plan;
use crate::qpip::stream;
use crate::rng::Rng;
use crate::services::model::Slot;
use crate::trace::Trace;
use crate::world::{Style, World};

/// Octets of a request.
const LEN: usize = 16_384;
/// Octets that are posted to be sent and not acknowledged, so that there is always something.
const BACKLOG: usize = 16 << 20;
/// The largest window: what TCP offers at most.
const MAX_WINDOW: usize = 4 << 20;
const PORT: u16 = 7;

/// A path, and what a receiver offers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Path {
    /// Packets lost, in a million, in each direction.
    pub loss_ppm: u32,
    /// There and back, in nanoseconds.
    pub rtt_ns: u64,
    /// Octets that the receiver has posted; 4 MiB of them are offered at most.
    pub window: usize,
    /// Octets per second of the link. Before it is room for what it carries in a round trip, and for 50
    /// packets at least.
    pub rate: u64,
    /// How late the hosts take notice of timers at most, in nanoseconds: machines are busy.
    pub late_ns: u64,
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Goodput {
    /// Octets that the receiver was given, in order.
    pub octets: u64,
    /// Nanoseconds that it took, from the first.
    pub ns: u64,
    /// Packets that both ends have sent, and those of them that were lost.
    pub packets: u64,
    /// See `packets`.
    pub lost: u64,
}

impl Goodput {
    /// Octets per second.
    #[must_use]
    pub fn rate(&self) -> u64 {
        (u128::from(self.octets) * 1_000_000_000 / u128::from(self.ns.max(1))) as u64
    }
}

/// One end.
struct End {
    host: usize,
    cq: CqId,
    qp: QpId,
    slots: Vec<Slot>,
    /// Requests that were posted, and those that are complete.
    posted: usize,
    done: usize,
}

/// Sends for so many nanoseconds of virtual time over a path. The same seed always gives the same.
///
/// # Errors
/// Something that must not be: a refusal, a failure, a byte that is not the right one.
pub fn goodput(seed: u64, path: &Path, ns: u64) -> Result<Goodput, String> {
    let plan = Plan::draw(&mut Rng::new(seed, 1), &crate::Options::default());
    let mut world = World::new(Rng::new(seed, 2), plan.profile, Trace::new(0));
    let queued = (path.rate * path.rtt_ns / 1_000_000_000).max(50 * 1_500);
    world.frames.weather = Weather {
        byte_ps: 1_000_000_000_000 / path.rate.max(1),
        delay_ns: path.rtt_ns / 2,
        loss_ppm: path.loss_ppm,
        queue_ns: queued * 1_000_000_000 / path.rate.max(1),
        ..Weather::default()
    };
    let style = Style { late_ns: path.late_ns, ..plan.hosts[0].1 };
    for host in 0..2 {
        world.add_host(host, 4000, Config::default(), style);
        world.attach(host.into(), [seed, u64::from(host)], 1_500, Helps::default());
    }
    let mut ends = Vec::new();
    for (host, len) in [(0, BACKLOG), (1, path.window.min(MAX_WINDOW))] {
        let end = End::new(&mut world, host, (len / LEN).max(1), path.window.min(LEN));
        ends.push(end.map_err(|fault| format!("host {host}: {fault}"))?);
    }
    let made = connect(&mut world, &mut ends);
    made.map_err(|fault| format!("no connection: {fault}"))?;
    let [sender, receiver] = &mut ends[..] else { return Err("two ends".into()) };
    let mut run = Run { came: 0, begun: None, polled: vec![Completion::default(); 64] };
    while run.begun.is_none_or(|begun| world.kernel.now() < begun + ns) {
        let event = world.kernel.next().ok_or("nothing happens any more")?;
        world.handle(event);
        run.look(&mut world, sender, receiver)?;
        if let Some(violation) = &world.violation {
            return Err(violation.0.clone());
        }
    }
    let (packets, lost) = (world.counters.frames, world.counters.lost);
    Ok(Goodput { octets: run.came, ns, packets, lost })
}

impl End {
    fn new(world: &mut World, host: usize, count: usize, len: usize) -> Result<Self, Fault> {
        let adapter = &mut world.hosts[host].adapter;
        let pd = adapter.alloc_pd()?;
        let (cq, _) = adapter.create_cq(2 * count as u32, None, 0)?;
        let cap = QpCap {
            max_send_wr: count as u32,
            max_recv_wr: count as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let qp_type = QpType::Tcp;
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: true };
        let (qp, _) = adapter.create_qp(&init, QpNum::new(4000, host as u8))?;
        let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
        let now = world.time();
        world.hosts[host].adapter.modify_qp(now, qp, &attr, QpAttrMask::STATE)?;
        let slots = (0..count).map(|slot| {
            let addr = 0x1000_0000 + ((slot as u64) << 20);
            Slot::make(world, host, pd, addr, len, Access::LOCAL_WRITE).ok_or(Fault::NoSuchObject)
        });
        let slots = slots.collect::<Result<_, _>>()?;
        Ok(Self { host, cq, qp, slots, posted: 0, done: 0 })
    }

    /// Posts requests as long as there is memory.
    fn post(&mut self, world: &mut World) -> Result<(), Fault> {
        let (count, now) = (self.slots.len(), world.time());
        let adapter = &mut world.hosts[self.host].adapter;
        let before = self.posted;
        while self.posted < self.done + count {
            let slot = &mut self.slots[self.posted % count];
            let wr_id = self.posted as u64;
            let list = slot.list(slot.len(), &[]);
            if self.host == 0 {
                slot.fill(&Arc::from(stream(0, wr_id * LEN as u64, LEN)));
                let payload = Payload::Sges(&list);
                let flags = SendFlags::SIGNALED;
                let wr = SendWr { wr_id, to: To::Peer, op: SendOp::Send, flags, payload };
                adapter.post_send(self.qp, &wr)?;
            } else {
                adapter.post_recv(now, self.qp, wr_id, &list)?;
            }
            self.posted += 1;
        }
        if self.posted > before && self.host == 0 {
            adapter.ring_doorbell(now, self.qp);
        }
        Ok(())
    }
}

fn connect(world: &mut World, ends: &mut [End]) -> Result<(), Fault> {
    let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
    let now = world.time();
    ends[1].post(world)?;
    let adapter = &mut world.hosts[1].adapter;
    let (listener, _) = adapter.tcp_listen(PORT, &settings, 1)?;
    adapter.tcp_offer(now, listener, ends[1].qp)?;
    let remote = (addresses(1)[0], PORT).into();
    world.hosts[0].adapter.tcp_connect(now, ends[0].qp, remote, None, &settings)?;
    world.serve(0);
    Ok(())
}

struct Run {
    /// Octets that have come.
    came: u64,
    /// When the connection stood.
    begun: Option<u64>,
    polled: Vec<Completion>,
}

impl Run {
    /// The programs look at what has happened, and post anew.
    fn look(
        &mut self,
        world: &mut World,
        sender: &mut End,
        receiver: &mut End,
    ) -> Result<(), String> {
        for end in [sender, receiver] {
            let host = end.host;
            while let Some(event) = world.hosts[host].events.pop_front() {
                match event {
                    Event::Tcp { change: TcpChange::Connected, .. } if host == 0 => {
                        self.begun = Some(world.kernel.now());
                    }
                    Event::Tcp { change: TcpChange::Connected, .. } => {}
                    other => return Err(format!("host {host}: {other:?}")),
                }
            }
            let mut busy = host == 0 && end.posted == 0 && self.begun.is_some();
            loop {
                let adapter = &mut world.hosts[host].adapter;
                let count = adapter.poll_cq(end.cq, &mut self.polled).unwrap_or(0);
                for done in &self.polled[..count] {
                    if done.status != WcStatus::Success || done.wr_id != end.done as u64 {
                        return Err(format!("host {host}: {done:?}"));
                    }
                    if host == 1 {
                        let slot = &end.slots[end.done % end.slots.len()];
                        let len = done.byte_len as usize;
                        if slot.bytes(len) != stream(0, self.came, len) {
                            return Err(format!("wrong bytes from {} on", self.came));
                        }
                        self.came += len as u64;
                    }
                    end.done += 1;
                }
                busy |= count > 0;
                if count < self.polled.len() {
                    break;
                }
            }
            if busy {
                end.post(world).map_err(|fault| format!("host {host}: {fault}"))?;
                world.serve(host);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Reno would have at that loss and round trip: 1.2 segments over the root of the loss, each round
    /// trip. CUBIC is never below it (RFC 9438 4.3).
    #[test]
    fn one_percent_over_a_tenth_of_a_second_though_timers_are_late() {
        for late_ns in [0, 20_000_000] {
            let path = Path {
                loss_ppm: 10_000,
                rtt_ns: 100_000_000,
                window: 1 << 20,
                rate: 12_500_000,
                late_ns,
            };
            let runs = (1..=4).map(|seed| goodput(seed, &path, 60_000_000_000).unwrap().rate());
            let mean = runs.sum::<u64>() / 4;
            assert!(mean > 170_000, "{mean} octets per second");
        }
    }
}
