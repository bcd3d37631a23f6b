//! A simulated network of IP packets, with stations or without: adapters that have an inter-network stack of
//! their own are attached to it (QPIP).
//!
//! One router, or switch, is between all hosts. It loses, delays, doubles, reorders, damages and marks
//! packets, its queues overflow, and it may take only shorter ones from some time on, which it reports or
//! does not.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use quipu_nic::FrameOut;
use quipu_nic::inet::stack::{self, Frame, Offload, Stack};
use quipu_nic::iwarp::wire::ethernet::{self, HEADER as ETHERNET};
use quipu_nic::iwarp::wire::{ipv4, ipv6, tcp};

use crate::acknowledged::Acknowledged;
use crate::offload::{self, Held};
use crate::router::{self, Said};
use crate::world::{World, WorldEvent};

/// ECN: not capable, congestion experienced (RFC 3168 5).
const NOT_ECT: u8 = 0;
const CE: u8 = 3;

/// What the network does to packets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weather {
    /// Picoseconds that an octet takes on the link of a host.
    pub byte_ps: u64,
    /// Nanoseconds on the way, and how many more at most.
    pub delay_ns: u64,
    pub jitter_ns: u64,
    /// How late a packet is at most that others overtake.
    pub late_ns: u64,
    /// Packets that are lost, doubled, overtaken, damaged and marked, in a million.
    pub loss_ppm: u32,
    pub duplicate_ppm: u32,
    pub reorder_ppm: u32,
    pub corrupt_ppm: u32,
    pub mark_ppm: u32,
    /// Packets about which the router tells their sender a lie, in a million.
    pub lie_ppm: u32,
    /// How long a packet waits at most for those before it; the queue drops what would wait longer.
    pub queue_ns: u64,
}

impl Weather {
    /// Whether every packet gets there once and as it was, if somewhere its length is taken.
    pub fn is_fair(&self) -> bool {
        self.loss_ppm + self.duplicate_ppm + self.corrupt_ppm == 0 && self.queue_ns == u64::MAX
    }
}

/// What the link of a host does for it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Helps {
    /// It cuts segments of so many octets of payload at most, and completes checksums; 0: neither.
    pub cuts: u32,
    /// It waits for so many nanoseconds, and joins the segments that have come by then; 0: it does not.
    pub joins_ns: u64,
}

/// A host on the network.
struct Port {
    helps: Helps,
    /// When its link is free again.
    busy_until: u64,
    /// What has come and was not handed over yet.
    held: Vec<Held>,
}

/// The network.
#[derive(Default)]
pub struct Frames {
    pub weather: Weather,
    /// Packets are in Ethernet frames.
    pub stations: bool,
    /// From when on the router takes packets of so many octets at most: of IPv6, and of IPv4.
    pub narrow: Vec<(u64, [u32; 2])>,
    /// Whether it says so.
    pub reports: bool,
    /// Of IPv4 it does not say how many, as routers did not before RFC 1191.
    pub vague: bool,
    /// Datagrams longer than this leave hosts in parts; 0: none do.
    pub parts: usize,
    /// How often each datagram was doubled, by the number that it begins with; of one in parts, each of them.
    pub doubled: BTreeMap<u64, u32>,
    /// The datagrams in parts, by sender, receiver and the number of the packet.
    in_parts: BTreeMap<([IpAddr; 2], u32), u64>,
    /// Those that were damaged.
    damaged: BTreeSet<u64>,
    /// The hosts; one that is not here is not attached.
    ports: Vec<Port>,
    /// The hosts of whose frames, or of those to whom, one was lost or damaged.
    pub harmed: BTreeSet<usize>,
    /// What was acknowledged.
    pub acknowledged: Acknowledged,
    /// Packets that were longer than the router takes.
    pub too_long: u64,
    /// Tells datagrams in parts from each other.
    identification: u32,
    buffer: Vec<u8>,
}

/// The addresses of a host.
pub fn addresses(host: usize) -> [IpAddr; 2] {
    let last = host as u8 + 1;
    [
        Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last.into()).into(),
        Ipv4Addr::new(10, 9, 0, last).into(),
    ]
}

/// The station address of a host.
pub(crate) fn station(host: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, host as u8 + 1]
}

impl World {
    /// Attaches a host to the network; hosts are attached in order.
    pub fn attach(&mut self, h: usize, secret: [u64; 2], mtu: u32, helps: Helps) {
        let [v6, v4] = addresses(h);
        let secret = quipu_nic::inet::tcp::Secret(secret);
        let mut config = stack::Config::new(v6, 64, secret);
        config.addresses.push((v4, 24));
        config.mtu = mtu;
        config.hardware = self.frames.stations.then(|| station(h));
        config.offload = Offload { checksum: helps.cuts > 0, segment: helps.cuts };
        self.frames.ports.push(Port { helps, busy_until: 0, held: Vec::new() });
        self.frames.buffer.resize(70_000, 0);
        if let Err(fault) = self.hosts[h].adapter.attach_inet(config) {
            self.violate(|| format!("host {h} cannot be attached: {fault}"));
        }
    }

    /// Takes the frames that an adapter has to send. Whether there were any.
    pub(crate) fn transmit_frames(&mut self, h: usize) -> bool {
        if h >= self.frames.ports.len() {
            return false;
        }
        let mut busy = false;
        let now = self.time();
        let mut buffer = std::mem::take(&mut self.frames.buffer);
        while let Some(frame) = self.hosts[h].adapter.transmit_frame(now, &mut buffer) {
            busy = true;
            self.leave(h, &frame, &mut buffer[..frame.len]);
        }
        self.frames.buffer = buffer;
        // It may have more for its own addresses than it takes at a time.
        busy || self.hosts[h].adapter.has_frames()
    }

    /// A frame leaves a host: its link does what it was told to.
    fn leave(&mut self, h: usize, out: &FrameOut, frame: &mut [u8]) {
        let at = if self.frames.stations { ETHERNET } else { 0 };
        if let Some(size) = out.segment {
            self.counters.cut += 1;
            for mut piece in offload::cut(frame, at, size.into()) {
                self.route(h, &mut piece, None);
            }
            return;
        }
        if let Some(checksum) = out.checksum {
            Stack::seal(frame, checksum);
        }
        let number = self.number_of(&frame[at..]);
        let (size, identification) = (self.frames.parts, self.frames.identification);
        let parts = (size > 0).then(|| offload::parts(frame, at, size, identification)).flatten();
        let Some(parts) = parts else { return self.route(h, frame, number) };
        self.frames.identification += 1;
        for mut part in parts {
            self.route(h, &mut part, number);
        }
    }

    /// The number that the datagram begins with that a packet has, or has a part of.
    fn number_of(&mut self, packet: &[u8]) -> Option<u64> {
        let number = |octets: &[u8]| octets.first_chunk().map(|it| u64::from_be_bytes(*it));
        let Some((offset, identification, octets)) = offload::part(packet) else {
            return number(offload::datagram(packet)?);
        };
        let key = (offload::Ip::parse(packet)?.0.ends(), identification);
        if offset == 0 {
            // Behind the header of UDP.
            self.frames.in_parts.insert(key, number(octets.get(8..)?)?);
        }
        self.frames.in_parts.get(&key).copied()
    }

    /// A frame is on the link of a host. `number`: that of the datagram of which it is, or is a part.
    fn route(&mut self, h: usize, frame: &mut [u8], number: Option<u64>) {
        self.trace.note(&[60, h as u64]);
        self.trace.note_bytes(frame);
        self.counters.frames += 1;
        let now = self.kernel.now();
        let weather = self.frames.weather;
        let waits = self.frames.ports[h].busy_until.saturating_sub(now);
        if waits > weather.queue_ns {
            self.counters.lost += 1;
            self.frames.harmed.insert(h);
            return;
        }
        let takes = frame.len() as u64 * weather.byte_ps / 1000;
        self.frames.ports[h].busy_until = now + waits + takes;
        let on_the_way = waits + takes + weather.delay_ns;
        let at = if self.frames.stations { ETHERNET } else { 0 };
        self.trace.line(now, || format!("host {h} -> {}", summary(&frame[at..])));
        self.frames.acknowledged.sent(&frame[at..]);
        let v4 = frame.get(at).is_some_and(|first| first >> 4 == 4);
        let narrow = self.frames.narrow.iter().rev().find(|(from, _)| *from <= now);
        let mtu = narrow.map(|(_, mtus)| mtus[usize::from(v4)]);
        if let Some(mtu) = mtu.filter(|&mtu| frame.len() - at > mtu as usize) {
            self.frames.too_long += 1;
            if let Some(pieces) = offload::cut_on_the_way(frame, at, mtu as usize) {
                for mut piece in pieces {
                    self.cross(h, on_the_way, &mut piece, number);
                }
                return;
            }
            self.trace.line(now, || format!("{} octets from {h} are too long", frame.len() - at));
            if self.frames.reports {
                let said = if v4 && self.frames.vague { 0 } else { mtu };
                self.tell(h, on_the_way, &frame[at..], Said::TooBig(said));
            }
            return;
        }
        self.cross(h, on_the_way, frame, number);
    }

    /// A frame crosses the network.
    fn cross(&mut self, h: usize, on_the_way: u64, frame: &mut [u8], number: Option<u64>) {
        let now = self.kernel.now();
        let weather = self.frames.weather;
        let at = if self.frames.stations { ETHERNET } else { 0 };
        if now < self.net.calm_from
            && self.rng.ppm(weather.lie_ppm)
            && let Some((said, quoted)) = router::lie(&mut self.rng, &frame[at..])
        {
            self.counters.lies += 1;
            self.tell(h, on_the_way, &quoted, said);
        }
        if now < self.net.calm_from && self.rng.ppm(weather.mark_ppm) {
            mark(&mut frame[at..]);
        }
        for to in 0..self.frames.ports.len() {
            if to != h && self.is_for(to, frame) {
                self.fly_frame(Some(h), to, on_the_way, frame, number);
            }
        }
    }

    /// The router says something about a packet to the host that has sent it.
    fn tell(&mut self, h: usize, on_the_way: u64, packet: &[u8], said: Said) {
        self.trace.line(self.kernel.now(), || format!("the router to host {h}: {said:?}"));
        if let Some(report) = router::report(h, self.frames.stations, packet, said) {
            self.fly_frame(None, h, on_the_way, &report, None);
        }
    }

    fn is_for(&self, host: usize, frame: &[u8]) -> bool {
        if self.frames.stations {
            let to = ethernet::Repr::parse(frame).map(|(header, _)| header.destination);
            return to.is_ok_and(|to| to[0] & 1 != 0 || to == station(host));
        }
        let to: Option<IpAddr> = match ipv6::Repr::parse(frame) {
            Ok((header, _)) => Some(header.destination.into()),
            Err(_) => ipv4::Repr::parse(frame).ok().map(|(header, _)| header.destination.into()),
        };
        to.is_some_and(|to| to.is_multicast() || addresses(host).contains(&to))
    }

    /// A frame is on its way to a host, from another or from the router.
    fn fly_frame(
        &mut self,
        from: Option<usize>,
        to: usize,
        on_the_way: u64,
        frame: &[u8],
        number: Option<u64>,
    ) {
        let now = self.kernel.now();
        let weather = self.frames.weather;
        let calm = now >= self.net.calm_from;
        let cut = self.net.cut(now, from.or(Some(to)), Some(to));
        if cut || (!calm && self.rng.ppm(weather.loss_ppm)) {
            self.counters.lost += 1;
            self.frames.harmed.extend(from.into_iter().chain([to]));
            return;
        }
        let mut bytes: Arc<[u8]> = frame.into();
        let mut at = now + on_the_way;
        if !calm {
            if self.rng.ppm(weather.corrupt_ppm) && !is_arp(self.frames.stations, frame) {
                self.counters.corrupted += 1;
                self.frames.harmed.extend(from.into_iter().chain([to]));
                let mut damaged = frame.to_vec();
                let place = self.rng.index(damaged.len());
                damaged[place] ^= 1 << self.rng.below(8);
                // Two bits of one datagram may cancel out in its checksum.
                if number.is_none_or(|number| self.frames.damaged.insert(number)) {
                    bytes = damaged.into();
                }
            }
            at += self.rng.below(weather.jitter_ns + 1);
            if self.rng.ppm(weather.reorder_ppm) {
                self.counters.reordered += 1;
                at += self.rng.below(weather.late_ns + 1);
            }
            if self.rng.ppm(weather.duplicate_ppm) {
                self.counters.duplicated += 1;
                if let Some(number) = number {
                    *self.frames.doubled.entry(number).or_default() += 1;
                }
                let again = at + self.rng.below(weather.late_ns + 1);
                let bytes = bytes.clone();
                self.kernel.at(again, WorldEvent::Frame { host: to, bytes });
            }
        }
        self.kernel.at(at, WorldEvent::Frame { host: to, bytes });
    }

    /// A frame arrives at a host.
    pub(crate) fn frame(&mut self, h: usize, bytes: &[u8]) {
        if !self.hosts[h].alive {
            return;
        }
        let joins_ns = self.frames.ports[h].helps.joins_ns;
        if joins_ns == 0 {
            self.hand_over(h, bytes, false);
            return self.serve(h);
        }
        let next = Held::new(bytes, if self.frames.stations { ETHERNET } else { 0 });
        let held = &mut self.frames.ports[h].held;
        if held.is_empty() {
            self.kernel.after(joins_ns, WorldEvent::Frames { host: h });
        }
        let last = held.iter_mut().rev().find(|last| last.is_of_flow(&next));
        if last.is_some_and(|last| last.join(&next)) {
            self.counters.joined += 1;
        } else {
            held.push(next);
        }
    }

    /// A host takes what its link has joined.
    pub(crate) fn joined_frames(&mut self, h: usize) {
        let held = std::mem::take(&mut self.frames.ports[h].held);
        if self.hosts[h].alive {
            for Held { bytes, checked, .. } in &held {
                self.hand_over(h, bytes, *checked);
            }
            self.serve(h);
        }
    }

    fn hand_over(&mut self, h: usize, bytes: &[u8], checked: bool) {
        let now = self.time();
        self.wake(h);
        let at = if self.frames.stations { ETHERNET } else { 0 };
        self.frames.acknowledged.brought(bytes.get(at..).unwrap_or_default());
        self.hosts[h].adapter.handle_frame(now, &Frame { bytes, checked });
    }
}

/// A packet in a line of the log.
fn summary(packet: &[u8]) -> String {
    let (protocol, at, len) = if let Ok((ip, at)) = ipv6::Repr::parse(packet) {
        (ip.next_header, at, ip.payload_len)
    } else if let Ok((ip, at)) = ipv4::Repr::parse(packet) {
        (ip.protocol, at, ip.payload_len)
    } else {
        return format!("{} octets", packet.len());
    };
    match tcp::Repr::parse(&packet[at..]) {
        Ok((tcp, header)) if protocol == 6 => {
            let tcp::Repr { source, destination, flags, seq, ack, window, .. } = tcp;
            let payload = usize::from(len) - header;
            format!("{source}>{destination} {flags:?} {seq:?}+{payload} ack {ack:?} win {window}")
        }
        _ => format!("protocol {protocol}, {len} octets"),
    }
}

/// The checksums of IP find every flipped bit; ARP has none, and leaves that to the link.
fn is_arp(stations: bool, frame: &[u8]) -> bool {
    stations
        && ethernet::Repr::parse(frame).is_ok_and(|(header, _)| header.kind == ethernet::kind::ARP)
}

/// Marks a packet as one that has met with congestion, if it may be.
fn mark(packet: &mut [u8]) {
    if let Ok((header, _)) = ipv6::Repr::parse(packet) {
        if header.traffic_class & CE != NOT_ECT {
            let traffic_class = header.traffic_class | CE;
            ipv6::Repr { traffic_class, ..header }.emit(packet);
        }
    } else if let Ok((header, ipv4::LEN)) = ipv4::Repr::parse(packet)
        && header.traffic_class & CE != NOT_ECT
    {
        let traffic_class = header.traffic_class | CE;
        ipv4::Repr { traffic_class, ..header }.emit(packet);
    }
}

/// A packet of a host.
#[cfg(test)]
pub(crate) fn packet(host: usize, ect: u8) -> Vec<u8> {
    let [IpAddr::V6(source), _] = addresses(host) else { unreachable!() };
    let mut out = vec![0; ipv6::LEN + 100];
    let header = ipv6::Repr {
        source,
        destination: source,
        next_header: 6,
        traffic_class: ect,
        flow_label: 0x12345,
        hop_limit: 64,
        payload_len: 100,
    };
    header.emit(&mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_be_marked_is_marked() {
        for (ect, marked) in [(0, 0), (1, 3), (2, 3), (3, 3)] {
            let mut bytes = packet(0, ect);
            mark(&mut bytes);
            let (header, _) = ipv6::Repr::parse(&bytes).unwrap();
            assert_eq!((header.traffic_class, header.flow_label), (marked, 0x12345));
        }
        let header = ipv4::Repr {
            source: Ipv4Addr::new(10, 9, 0, 1),
            destination: Ipv4Addr::new(10, 9, 0, 2),
            protocol: 6,
            traffic_class: 2,
            hop_limit: 64,
            identification: 0,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            payload_len: 0,
        };
        let mut bytes = [0; ipv4::LEN];
        header.emit(&mut bytes);
        mark(&mut bytes);
        let (marked, _) = ipv4::Repr::parse(&bytes).unwrap();
        assert_eq!(marked, ipv4::Repr { traffic_class: 3, ..header });
    }
}
