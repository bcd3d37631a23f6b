//! A simulated network of IP packets, with stations or without: adapters that have an inter-network stack of
//! their own are attached to it (QPIP).
//!
//! One router, or switch, is between all hosts. It loses, delays, doubles, reorders, damages and marks
//! packets, its queues overflow, and it may take only shorter ones from some time on, which it reports or
//! does not.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use quipu_nic::inet::stack::{self, Frame};
use quipu_nic::iwarp::wire::ethernet::{self, HEADER as ETHERNET};
use quipu_nic::iwarp::wire::{icmpv4, icmpv6, ipv4, ipv6, tcp};

use crate::world::{World, WorldEvent};

/// The station address of the router.
const ROUTER: [u8; 6] = [2, 0, 0, 0, 0, 0xff];
/// What it quotes of a packet that it reports.
const QUOTE: usize = 500;
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
    /// How long a packet waits at most for those before it; the queue drops what would wait longer.
    pub queue_ns: u64,
}

/// The network.
#[derive(Default)]
pub struct Frames {
    pub weather: Weather,
    /// Packets are in Ethernet frames.
    pub stations: bool,
    /// From when on the router takes packets of so many octets at most.
    pub narrow: Vec<(u64, u32)>,
    /// Whether it says so.
    pub reports: bool,
    /// When the links of the hosts are free again; a host that is not here is not attached.
    busy_until: Vec<u64>,
    /// Packets that were longer than the router takes.
    pub too_long: u64,
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

fn station(host: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, host as u8 + 1]
}

impl World {
    /// Attaches a host to the network; hosts are attached in order.
    pub fn attach(&mut self, h: usize, secret: [u64; 2], mtu: u32) {
        let [v6, v4] = addresses(h);
        let secret = quipu_nic::inet::tcp::Secret(secret);
        let mut config = stack::Config::new(v6, 64, secret);
        config.addresses.push((v4, 24));
        config.mtu = mtu;
        config.hardware = self.frames.stations.then(|| station(h));
        self.frames.busy_until.push(0);
        self.frames.buffer.resize(70_000, 0);
        if let Err(fault) = self.hosts[h].adapter.attach_inet(config) {
            self.violate(|| format!("host {h} cannot be attached: {fault}"));
        }
    }

    /// Takes the frames that an adapter has to send. Whether there were any.
    pub(crate) fn transmit_frames(&mut self, h: usize) -> bool {
        if h >= self.frames.busy_until.len() {
            return false;
        }
        let mut busy = false;
        let now = self.time();
        let mut buffer = std::mem::take(&mut self.frames.buffer);
        while let Some(frame) = self.hosts[h].adapter.transmit_frame(now, &mut buffer) {
            busy = true;
            self.route(h, &mut buffer[..frame.len]);
        }
        self.frames.buffer = buffer;
        busy
    }

    /// A frame leaves a host.
    fn route(&mut self, h: usize, frame: &mut [u8]) {
        self.trace.note(&[60, h as u64]);
        self.trace.note_bytes(frame);
        self.counters.frames += 1;
        let now = self.kernel.now();
        let weather = self.frames.weather;
        let waits = self.frames.busy_until[h].saturating_sub(now);
        if waits > weather.queue_ns {
            self.counters.lost += 1;
            return;
        }
        let takes = frame.len() as u64 * weather.byte_ps / 1000;
        self.frames.busy_until[h] = now + waits + takes;
        let on_the_way = waits + takes + weather.delay_ns;
        let at = if self.frames.stations { ETHERNET } else { 0 };
        self.trace.line(now, || format!("host {h} -> {}", summary(&frame[at..])));
        let mtu = self.frames.narrow.iter().rev().find(|(from, _)| *from <= now);
        if let Some(&(_, mtu)) = mtu.filter(|(_, mtu)| frame.len() - at > *mtu as usize) {
            self.frames.too_long += 1;
            self.trace.line(now, || format!("{} octets from {h} are too long", frame.len() - at));
            if self.frames.reports
                && let Some(report) = report(h, self.frames.stations, &frame[at..], mtu)
            {
                self.fly_frame(None, h, on_the_way, &report);
            }
            return;
        }
        if now < self.net.calm_from && self.rng.ppm(weather.mark_ppm) {
            mark(&mut frame[at..]);
        }
        for to in 0..self.frames.busy_until.len() {
            if to != h && self.is_for(to, frame) {
                self.fly_frame(Some(h), to, on_the_way, frame);
            }
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
    fn fly_frame(&mut self, from: Option<usize>, to: usize, on_the_way: u64, frame: &[u8]) {
        let now = self.kernel.now();
        let weather = self.frames.weather;
        let calm = now >= self.net.calm_from;
        let cut = self.net.cut(now, from.or(Some(to)), Some(to));
        if cut || (!calm && self.rng.ppm(weather.loss_ppm)) {
            self.counters.lost += 1;
            return;
        }
        let mut bytes: Arc<[u8]> = frame.into();
        let mut at = now + on_the_way;
        if !calm {
            if self.rng.ppm(weather.corrupt_ppm) && !is_arp(self.frames.stations, frame) {
                self.counters.corrupted += 1;
                let mut damaged = frame.to_vec();
                let place = self.rng.index(damaged.len());
                damaged[place] ^= 1 << self.rng.below(8);
                bytes = damaged.into();
            }
            at += self.rng.below(weather.jitter_ns + 1);
            if self.rng.ppm(weather.reorder_ppm) {
                self.counters.reordered += 1;
                at += self.rng.below(weather.late_ns + 1);
            }
            if self.rng.ppm(weather.duplicate_ppm) {
                self.counters.duplicated += 1;
                let again = at + self.rng.below(weather.late_ns + 1);
                let bytes = bytes.clone();
                self.kernel.at(again, WorldEvent::Frame { host: to, bytes });
            }
        }
        self.kernel.at(at, WorldEvent::Frame { host: to, bytes });
    }

    /// A frame arrives at a host.
    pub(crate) fn frame(&mut self, h: usize, bytes: &[u8]) {
        if self.hosts[h].alive {
            let now = self.time();
            self.wake(h);
            self.hosts[h].adapter.handle_frame(now, &Frame { bytes, checked: false });
            self.serve(h);
        }
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

/// What the router says of a packet that is too long: a frame to the host that has sent it (RFC 4443 3.2, RFC
/// 1191 4).
fn report(h: usize, stations: bool, packet: &[u8], mtu: u32) -> Option<Vec<u8>> {
    let quote = &packet[..packet.len().min(QUOTE)];
    let mut out = vec![0; ETHERNET + ipv6::LEN + icmpv6::LEN + QUOTE];
    let mut at = 0;
    let kind = if packet.first()? >> 4 == 6 { ethernet::kind::IPV6 } else { ethernet::kind::IPV4 };
    if stations {
        at = ethernet::Repr { destination: station(h), source: ROUTER, kind }.emit(&mut out);
    }
    let hop_limit = 64;
    let len = if let Ok((sent, _)) = ipv6::Repr::parse(packet) {
        let source = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0xff);
        let message = icmpv6::Repr::PacketTooBig { mtu, packet: quote };
        let payload_len = message.wire_len() as u16;
        let header = ipv6::Repr {
            source,
            destination: sent.source,
            next_header: icmpv6::PROTOCOL,
            traffic_class: 0,
            flow_label: 0,
            hop_limit,
            payload_len,
        };
        let header = header.emit(&mut out[at..]);
        header + message.emit(source, sent.source, &mut out[at + header..])
    } else {
        let (sent, _) = ipv4::Repr::parse(packet).ok()?;
        let message = icmpv4::Repr::Unreachable {
            code: icmpv4::unreachable::FRAGMENTATION_NEEDED,
            next_mtu: mtu as u16,
            packet: quote,
        };
        let header = ipv4::Repr {
            source: Ipv4Addr::new(10, 9, 0, 0xff),
            destination: sent.source,
            protocol: 1,
            traffic_class: 0,
            hop_limit,
            identification: 0,
            dont_fragment: false,
            more_fragments: false,
            fragment_offset: 0,
            payload_len: message.wire_len() as u16,
        };
        let header = header.emit(&mut out[at..]);
        header + message.emit(&mut out[at + header..])
    };
    out.truncate(at + len);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(host: usize, ect: u8) -> Vec<u8> {
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

    #[test]
    fn a_report_says_to_the_sender_what_is_taken() {
        let sent = packet(3, 0);
        let bytes = report(3, true, &sent, 1_300).unwrap();
        let (ethernet, at) = ethernet::Repr::parse(&bytes).unwrap();
        assert_eq!(ethernet.destination, station(3));
        let (header, len) = ipv6::Repr::parse(&bytes[at..]).unwrap();
        assert_eq!(IpAddr::from(header.destination), addresses(3)[0]);
        let message =
            icmpv6::Repr::parse(header.source, header.destination, &bytes[at + len..]).unwrap();
        assert_eq!(message, icmpv6::Repr::PacketTooBig { mtu: 1_300, packet: &sent });
    }
}
