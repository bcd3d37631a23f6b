//! Packets of strangers, made by hand.

use std::net::IpAddr;

use quipu_inet::stack::{Checksum, Stack};
use quipu_wire::checksum::{Sum, sum};
use quipu_wire::{ipv4, ipv6, tcp, udp};

/// An IP packet without its payload.
#[derive(Clone, Copy, Debug)]
pub struct Packet {
    pub from: IpAddr,
    pub to: IpAddr,
    pub traffic_class: u8,
}

impl Packet {
    pub fn new(from: IpAddr, to: IpAddr) -> Self {
        Self { from, to, traffic_class: 0 }
    }

    /// With this payload.
    pub fn carry(&self, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; ipv6::LEN];
        let payload_len = payload.len() as u16;
        let len = match (self.from, self.to) {
            (IpAddr::V6(source), IpAddr::V6(destination)) => ipv6::Repr {
                source,
                destination,
                next_header: protocol,
                traffic_class: self.traffic_class,
                flow_label: 0,
                hop_limit: 64,
                payload_len,
            }
            .emit(&mut bytes),
            (IpAddr::V4(source), IpAddr::V4(destination)) => ipv4::Repr {
                source,
                destination,
                protocol,
                traffic_class: self.traffic_class,
                hop_limit: 64,
                identification: 7,
                dont_fragment: true,
                more_fragments: false,
                fragment_offset: 0,
                payload_len,
            }
            .emit(&mut bytes),
            _ => panic!("of one family"),
        };
        bytes.truncate(len);
        bytes.extend(payload);
        bytes
    }

    /// With a checksum in the upper layer, at `at`.
    pub fn sealed(&self, protocol: u8, upper: &[u8], at: usize) -> Vec<u8> {
        let mut upper = upper.to_vec();
        let pseudo = Sum::of_pseudo_header(self.from, self.to, protocol, upper.len()).partial();
        upper[at..at + 2].copy_from_slice(&pseudo.to_be_bytes());
        Stack::seal(&mut upper, Checksum { start: 0, at: at as u16 });
        self.carry(protocol, &upper)
    }

    pub fn segment(&self, header: &tcp::Repr, payload: &[u8]) -> Vec<u8> {
        let mut upper = vec![0; header.header_len()];
        header.emit(&mut upper);
        upper.extend(payload);
        self.sealed(6, &upper, tcp::CHECKSUM_AT)
    }

    pub fn datagram(&self, from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
        self.sealed(17, &datagram(from, to, payload), udp::CHECKSUM_AT)
    }

    /// IPv6 fragments with `size` octets of `upper` each, a multiple of eight.
    pub fn parts(&self, upper: &[u8], protocol: u8, size: usize) -> Vec<Vec<u8>> {
        let count = upper.len().div_ceil(size);
        let part = |(n, piece): (usize, &[u8])| {
            let word = (n * size) as u16 | u16::from(n + 1 < count);
            let [a, b] = word.to_be_bytes();
            self.carry(44, &[&[protocol, 0, a, b, 1, 2, 3, 4][..], piece].concat())
        };
        upper.chunks(size).enumerate().map(part).collect()
    }
}

fn datagram(source: u16, destination: u16, payload: &[u8]) -> Vec<u8> {
    let mut upper = vec![0; udp::LEN];
    udp::Repr { source, destination, payload_len: payload.len() as u16 }.emit(&mut upper);
    upper.extend(payload);
    upper
}

/// A datagram from host 0 to host 1 without its IP header.
pub fn sealed_datagram(addresses: [&str; 2], from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
    let [a, b]: [IpAddr; 2] = addresses.map(|address| address.parse().expect("an address"));
    let frame = Packet::new(a, b).datagram(from, to, payload);
    let upper = frame[frame.len() - payload.len() - udp::LEN..].to_vec();
    assert!(Sum::of_pseudo_header(a, b, 17, upper.len()).and(sum(&upper)).is_valid());
    upper
}
