//! Makes the network, hosts, queues and queue pairs.

use std::net::SocketAddr;

use quipu_nic::inet::tcp::{KeepAlive, MILLISECOND as MS, Mode, SECOND};
use quipu_nic::mem::Access;
use quipu_nic::{
    Config, QpAttr, QpAttrMask as M, QpCap, QpId, QpInit, QpNum, QpState, QpType, TcpSettings,
};

use super::model::{End, Farewell, Opening, Seat};
use super::{Mishap, Programs};
use crate::frames::{Helps, Weather, addresses};
use crate::network::Partition;
use crate::services::model::{Queue, Slot};
use crate::world::{LoadEvent, World, WorldEvent};

/// Ports of listeners begin here.
const FIRST_PORT: u16 = 5000;

impl Programs {
    /// Builds everything and schedules what happens first.
    pub(super) fn set_up(&mut self, world: &mut World, faults: bool) {
        let mtu = self.make_network(world, faults);
        self.make_hosts(world, mtu);
        for pair in 0..self.plan.pairs.len() {
            self.make_pair(world, pair);
        }
        if world.violation.is_some() {
            return;
        }
        self.share_out();
        self.draw_mishaps(world, faults);
        self.make_posts(world, mtu);
        for end in 0..self.ends.len() {
            self.schedule(world, end);
            if self.ends[end].rebirths > 0 {
                self.rebirth_later(world, end);
            }
        }
        for cq in 0..self.queues.len() {
            self.poll_later(world, cq);
        }
    }

    /// Draws what the network is and does; the MTU of its links.
    fn make_network(&mut self, world: &mut World, faults: bool) -> u32 {
        let rng = &mut self.rng;
        let bad = faults && rng.percent(80);
        let mut chance = |choices: &[u32]| if bad { rng.pick(choices) } else { 0 };
        let weather = Weather {
            loss_ppm: chance(&[0, 1_000, 10_000, 50_000]),
            duplicate_ppm: chance(&[0, 0, 10_000, 50_000]),
            reorder_ppm: chance(&[0, 0, 10_000, 100_000]),
            corrupt_ppm: chance(&[0, 0, 2_000, 20_000]),
            mark_ppm: chance(&[0, 0, 10_000]),
            lie_ppm: chance(&[0, 0, 1_000, 20_000]),
            ..Weather::default()
        };
        let delay_ns = rng.pick(&[2_000, 50_000, 5 * MS, 50 * MS]);
        let weather = Weather {
            byte_ps: rng.pick(&[80, 8_000, 80_000]),
            delay_ns,
            jitter_ns: if bad { rng.pick(&[0, delay_ns / 10]) } else { 0 },
            late_ns: delay_ns + rng.pick(&[10_000, MS]),
            queue_ns: if bad { rng.pick(&[MS, 20 * MS, SECOND]) } else { u64::MAX },
            ..weather
        };
        let mtu = rng.pick(&[1_280, 1_500, 9_000, 65_535]);
        if bad && rng.percent(40) {
            let mut at = 0;
            for _ in 0..rng.range(1, 3) {
                at += rng.below(self.calm_ns / 2);
                // The least that there is by either version.
                let v6 = rng.range(1_280, u64::from(mtu)) as u32;
                let v4 = if rng.percent(50) { v6 } else { rng.range(576, v6.into()) as u32 };
                world.frames.narrow.push((at, [v6, v4]));
            }
            world.frames.reports = rng.percent(70);
            world.frames.vague = rng.percent(20);
        }
        world.frames.weather = weather;
        world.frames.parts = rng.pick(&[0, 0, 600, 1_280]);
        world.frames.stations = rng.percent(50);
        world.net.calm_from = self.calm_ns;
        mtu
    }

    fn make_hosts(&mut self, world: &mut World, mtu: u32) {
        let mut hosts = self.plan.hosts.clone();
        if let [only] = hosts[..] {
            // An adapter does not connect to itself.
            hosts.push(only);
        }
        for (index, (_, style)) in hosts.into_iter().enumerate() {
            let mut seed = [0; 32];
            seed[..8].copy_from_slice(&self.rng.next().to_le_bytes());
            let config = Config { seed, ..Config::default() };
            let host = world.add_host(index as u8, 4000 + index as u16, config, style);
            let secret = [self.rng.next(), self.rng.next()];
            let helps = Helps {
                cuts: self.rng.pick(&[0, 0, 8_000, 60_000]),
                joins_ns: self.rng.pick(&[0, 0, 1_000, 200_000]),
            };
            world.attach(host, secret, mtu, helps);
            match world.hosts[host].adapter.alloc_pd() {
                Ok(pd) => self.pds.push(pd),
                Err(fault) => world.violate(|| format!("no protection domain: {fault}")),
            }
            for _ in 0..self.plan.cqs_per_host {
                match world.hosts[host].adapter.create_cq(8192, None, 0) {
                    Ok((id, _)) => self.queues.push(Queue {
                        host,
                        id,
                        poll_ns: self.rng.pick(&[1_000, 30_000, 500_000]),
                        batch: self.rng.pick(&[1, 16, 64]),
                        idle: 0,
                    }),
                    Err(fault) => world.violate(|| format!("no completion queue: {fault}")),
                }
            }
        }
    }

    /// Makes registered memory.
    pub(super) fn new_memory(&mut self, world: &mut World, host: usize, len: usize) -> usize {
        let addr = 0x1000_0000 + ((self.slots.len() as u64) << 24);
        let pd = self.pds[host];
        match Slot::make(world, host, pd, addr, len.max(1), Access::LOCAL_WRITE) {
            Some(slot) => {
                self.regions.push((host, slot.mr));
                self.slots.push(slot);
            }
            None => world.violate(|| "memory is refused".into()),
        }
        self.slots.len() - 1
    }

    fn make_pair(&mut self, world: &mut World, pair: usize) {
        let ([a, b], _) = self.plan.pairs[pair];
        let count = world.hosts.len();
        let hosts = [a % count, if a == b { (a + 1) % count } else { b % count }];
        let family = self.rng.index(2);
        let mode = self.rng.pick(&[Mode::Message, Mode::Stream]);
        let port = FIRST_PORT + 2 * pair as u16;
        let there = self.rng.percent(50).then(|| self.port_at(hosts[1])).flatten();
        let openings = match (there, self.rng.below(6)) {
            (Some(there), _) => [Opening::Connects, self.opening_at(there)],
            (None, 0..3) => [Opening::Connects, Opening::Offered],
            (None, 3) => [Opening::Connects, Opening::Decides { refusals: 0 }],
            (None, 4) => {
                [Opening::Connects, Opening::Decides { refusals: 1 + self.rng.below(2) as u32 }]
            }
            _ => [0, 1].map(|side| Opening::Together { port: port + side }),
        };
        let port = there.map_or(port, |there| self.ports[there].number);
        let mode = there.map_or(mode, |there| self.ports[there].settings.mode);
        for (side, opening) in openings.into_iter().enumerate() {
            let to = port + u16::from(matches!(openings[1], Opening::Together { .. }) && side == 0);
            let remote = SocketAddr::new(addresses(hosts[1 - side])[family], to);
            let peer = 2 * pair + 1 - side;
            let settings = self.draw_settings(mode);
            let made = self.new_end(world, hosts[side], peer, settings, opening, remote);
            let made = made.and_then(|()| match opening {
                Opening::Connects | Opening::Together { .. } => Ok(()),
                Opening::Offered | Opening::Decides { .. } => {
                    let here = match there {
                        Some(there) => there,
                        None => self.listen(world, hosts[side], port, settings, opening)?,
                    };
                    self.ends[2 * pair + side].port = Some(here);
                    Ok(())
                }
            });
            if let Err(fault) = made {
                return world.violate(|| format!("end {}: {fault}", 2 * pair + side));
            }
        }
        self.ends[2 * pair].rebirths = self.rng.pick(&[0, 0, 1, 3]);
    }

    pub(super) fn draw_settings(&mut self, mode: Mode) -> TcpSettings {
        let keep = KeepAlive { idle: 10 * SECOND, interval: 10 * SECOND, probes: 9 };
        TcpSettings {
            mode,
            keep_alive: self.rng.percent(20).then_some(keep),
            ecn: self.rng.percent(50),
            ..TcpSettings::default()
        }
    }

    pub(super) fn draw_farewell(&mut self) -> Farewell {
        if self.rng.percent(70) { Farewell::Closes } else { Farewell::Stays }
    }

    fn new_end(
        &mut self,
        world: &mut World,
        host: usize,
        peer: usize,
        settings: TcpSettings,
        opening: Opening,
        remote: SocketAddr,
    ) -> Result<(), quipu_nic::Fault> {
        let per_host = self.plan.cqs_per_host;
        let cqs = [0; 2].map(|_| host * per_host + self.rng.index(per_host));
        let send_depth = self.rng.pick(&[1, 3, 16, 64]);
        let inline = self.rng.pick(&[0, 64, 97]);
        let depth = self.rng.pick(&[1, 2, 8, 60]);
        let cap = QpCap {
            max_send_wr: send_depth as u32,
            max_recv_wr: 256,
            max_send_sge: 3,
            max_recv_sge: 3,
            max_inline_data: inline as u32,
        };
        let pd = self.pds[host];
        let init = QpInit {
            pd,
            send_cq: self.queues[cqs[0]].id,
            recv_cq: self.queues[cqs[1]].id,
            srq: None,
            cap,
            qp_type: QpType::Tcp,
            sq_sig_all: false,
        };
        let end = self.ends.len();
        let num = QpNum::new(world.hosts[host].address.port(), end as u8);
        let (now, adapter) = (world.time(), &mut world.hosts[host].adapter);
        let (qp, _): (QpId, _) = adapter.create_qp(&init, num)?;
        let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
        adapter.modify_qp(now, qp, &attr, M::STATE)?;
        let seat = Seat { host, num, qp, cqs, send_depth, inline, depth };
        self.by_num.insert((host, num), end);
        let end = End::new(seat, peer, settings, opening, remote);
        let farewell = self.draw_farewell();
        self.ends.push(End { exists: true, farewell, ..end });
        Ok(())
    }

    /// Shares requests and traps out.
    fn share_out(&mut self) {
        for _ in 0..self.plan.ops {
            let end = self.rng.index(self.ends.len());
            self.ends[end].ops_left += 1;
        }
        for end in 0..self.ends.len() {
            let left = self.ends[end].ops_left;
            if left > 0 && self.rng.percent(self.plan.trap_percent / 3) {
                self.ends[end].trap_at = Some(self.rng.range(1, u64::from(left)) as u32);
            }
        }
    }

    /// Has an end begin. Both ends of a connection that is opened from both sides do before either hears of
    /// the other.
    pub(super) fn schedule(&mut self, world: &mut World, end: usize) {
        let together = matches!(self.ends[end].opening, Opening::Together { .. });
        let range = if together { world.frames.weather.delay_ns } else { self.plan.tick_ns * 8 };
        let after = self.rng.below(range);
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Connect { end }));
        self.tick_later(world, end);
        let after = self.rng.below(self.plan.tick_ns * 8 + 1);
        world.kernel.after(after, WorldEvent::Load(LoadEvent::Refill { pool: end }));
    }

    fn draw_mishaps(&mut self, world: &mut World, faults: bool) {
        for _ in 0..self.plan.mishaps {
            let end = self.rng.index(self.ends.len());
            let host = self.rng.index(world.hosts.len());
            self.mishaps.push(match self.rng.below(9) {
                6.. => Mishap::Post { post: self.rng.index(4), how: self.rng.below(3) as u8 },
                0 | 1 => Mishap::Abort { end },
                2 => Mishap::ToError { end },
                3 => Mishap::Destroy { end },
                _ => Mishap::Kill { host, silent: self.rng.percent(30) },
            });
            let at = self.rng.below(self.calm_ns);
            let index = self.mishaps.len() - 1;
            world.kernel.at(at, WorldEvent::Load(LoadEvent::Fault { index }));
        }
        if !faults || !self.rng.percent(self.plan.partition_percent) {
            return;
        }
        let a = self.rng.index(world.hosts.len());
        let b = (a + 1 + self.rng.index(world.hosts.len() - 1)) % world.hosts.len();
        let from = self.rng.below(self.calm_ns);
        let forever = self.rng.percent(30);
        let to = if forever { u64::MAX } else { from + self.rng.below(self.calm_ns) };
        world.net.partitions.push(Partition { hosts: Some([a, b]), from, to });
        for end in 0..self.ends.len() {
            let hosts = [self.ends[end].host, self.ends[self.ends[end].peer].host];
            if forever && (hosts == [a, b] || hosts == [b, a]) {
                self.cause(end, "partition for ever");
            }
        }
    }
}
