//! Simulated UDP: datagrams that the network loses, doubles and reorders. Damaged ones never arrive, since
//! the kernel compares the checksum of UDP.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use quipu_nic::iwarp::wire::datagram::{Datagram, LEN};
use quipu_nic::{Arrival, Departure, MAX_DATAGRAM, QpNum};

use crate::world::{World, WorldEvent};

/// The datagram side of a world.
#[derive(Default)]
pub struct Udp {
    /// Hosts and the multicast groups that they have joined.
    pub groups: BTreeSet<(usize, IpAddr)>,
    /// Datagrams that a socket takes before it is full for a moment; `None`: any number.
    pub burst: Option<u32>,
    /// How often a host was given the datagram with a tag.
    pub copies: BTreeMap<(usize, u64), u32>,
    /// The last datagram, for strangers to imitate.
    pub last: Option<(Arrival, Arc<[u8]>)>,
}

/// What a workload tells its datagrams apart by: the immediate data, or else the first eight bytes.
fn tag(bytes: &[u8]) -> Option<u64> {
    if let Some(imm) = Datagram::parse(bytes).ok()?.imm {
        return Some(u64::from(imm));
    }
    let first = bytes.get(LEN..LEN + 8)?;
    Some(u64::from_le_bytes(first.try_into().ok()?))
}

impl World {
    /// Takes from an adapter the datagrams that it has to send, as far as the sockets have room. Whether
    /// there were any.
    pub(crate) fn transmit_datagrams(&mut self, h: usize) -> bool {
        let mut busy = false;
        let now = self.time();
        let mut buffer = [0; MAX_DATAGRAM];
        while let Some((id, from)) = self.hosts[h].adapter.next_datagrams() {
            busy = true;
            let mut room = self.udp.burst.unwrap_or(u32::MAX);
            loop {
                if room == 0 {
                    let after = 1 + self.rng.below(100_000);
                    self.kernel.after(after, WorldEvent::SocketRoom { host: h, from });
                    break;
                }
                room -= 1;
                let adapter = &mut self.hosts[h].adapter;
                let Some(departure) = adapter.transmit_datagram(now, id, &mut buffer) else {
                    break;
                };
                self.fly(h, &departure, &buffer[..departure.len]);
            }
        }
        busy
    }

    /// A datagram leaves a host.
    fn fly(&mut self, h: usize, departure: &Departure, bytes: &[u8]) {
        self.trace.note(&[40, h as u64]);
        self.trace.note_bytes(bytes);
        let to = departure.to.ip();
        let from = SocketAddr::new(self.hosts[h].address.ip(), departure.from.port());
        let (traffic_class, hop_limit) = (departure.traffic_class, departure.hop_limit);
        let arrival = Arrival { from, to, traffic_class, hop_limit };
        let bytes: Arc<[u8]> = bytes.into();
        self.udp.last = Some((arrival, bytes.clone()));
        for target in 0..self.hosts.len() {
            let meant = if to.is_multicast() {
                self.udp.groups.contains(&(target, to))
            } else {
                self.hosts[target].address == departure.to
            };
            if meant {
                self.fly_to(h, target, arrival, &bytes);
            }
        }
    }

    fn fly_to(&mut self, h: usize, target: usize, arrival: Arrival, bytes: &Arc<[u8]>) {
        let now = self.kernel.now();
        self.counters.datagrams += 1;
        let profile = self.net.profile;
        let calm = now >= self.net.calm_from;
        let lost = !calm && (self.rng.ppm(profile.loss_ppm) || self.rng.ppm(profile.corrupt_ppm));
        if lost || self.net.cut(now, Some(h), Some(target)) {
            self.counters.lost += 1;
            return;
        }
        let on_the_way = bytes.len() as u64 * profile.byte_ps / 1000 + profile.delay_ns;
        let mut at = now + on_the_way;
        if !calm {
            at += self.rng.below(profile.jitter_ns + 1);
            if self.rng.ppm(profile.reorder_ppm) {
                self.counters.reordered += 1;
                at += self.rng.below(200_000);
            }
            if self.rng.ppm(profile.duplicate_ppm) {
                self.counters.duplicated += 1;
                let again = at + self.rng.below(100_000);
                let bytes = bytes.clone();
                self.kernel.at(again, WorldEvent::Datagram { host: target, arrival, bytes });
            }
        }
        let bytes = bytes.clone();
        self.kernel.at(at, WorldEvent::Datagram { host: target, arrival, bytes });
    }

    /// A datagram arrives at a host.
    pub(crate) fn datagram(&mut self, h: usize, arrival: &Arrival, bytes: &[u8]) {
        if !self.hosts[h].alive {
            return;
        }
        if let Some(tag) = tag(bytes) {
            *self.udp.copies.entry((h, tag)).or_default() += 1;
        }
        let now = self.time();
        self.wake(h);
        self.hosts[h].adapter.handle_datagram(now, arrival, bytes);
        self.serve(h);
    }

    /// A socket that was full has room again.
    pub(crate) fn socket_room(&mut self, h: usize, from: QpNum) {
        if self.hosts[h].alive {
            self.hosts[h].adapter.resume_datagrams(from..=from);
            self.serve(h);
        }
    }
}
