//! IP and TCP headers (RFC 791, 8200, 9293) for bytes that had others, or none.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

/// Which way a packet goes on its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the end that made the connection.
    FromClient,
    /// From the end that accepted it.
    FromServer,
}

impl Direction {
    /// The other one.
    #[must_use]
    pub fn reverse(self) -> Self {
        match self {
            Self::FromClient => Self::FromServer,
            Self::FromServer => Self::FromClient,
        }
    }

    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

/// Flags of a TCP header.
pub(crate) mod flag {
    pub(crate) const FIN: u8 = 1;
    pub(crate) const SYN: u8 = 2;
    pub(crate) const PSH: u8 = 8;
    pub(crate) const ACK: u8 = 16;
}

const TCP: u8 = 6;
const UDP: u8 = 17;
const UDP_LEN: usize = 8;
const HOP_LIMIT: u8 = 64;
const TCP_LEN: usize = 20;
/// On a SYN: largest segment, and windows in units of 2^14, so that a window never seems full.
const SYN_OPTIONS: [u8; 8] = [2, 4, 0xff, 0xd7, 1, 3, 3, 14];

/// Most bytes of payload that a packet has; what is longer becomes several.
pub(crate) const MAX_PAYLOAD: usize = 65_000;

/// How what this process sends is marked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// The traffic class of the IP header: DSCP and ECN bits.
    pub traffic_class: u8,
    /// The service level.
    pub service_level: u8,
    /// The virtual lane, if there are lanes.
    pub lane: Option<u8>,
}

impl Mark {
    /// Adds service level and lane to a comment, if they say anything.
    pub(crate) fn describe(self, comment: &mut String) {
        if self.lane.is_some() || self.service_level > 0 {
            let _ = write!(comment, ", SL {}", self.service_level);
        }
        if let Some(lane) = self.lane {
            let _ = write!(comment, ", VL {lane}");
        }
    }

    /// The comment of a message of some kind between two queue pairs.
    pub(crate) fn comment(self, [from, to]: [u32; 2], kind: &str) -> String {
        let mut comment = format!("QP {from:#08x} to {to:#08x}");
        self.describe(&mut comment);
        comment + ": " + kind
    }
}

/// A TCP segment without its payload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) flags: u8,
    pub(crate) traffic_class: u8,
}

/// A sum of 16-bit words (RFC 1071). All pieces but the last have even length.
#[derive(Clone, Copy, Debug, Default)]
struct Checksum(u64);

impl Checksum {
    fn add(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(2);
        for word in &mut words {
            self.0 += u64::from(u16::from_be_bytes([word[0], word[1]]));
        }
        if let [last] = words.remainder() {
            self.0 += u64::from(*last) << 8;
        }
    }

    fn finish(self) -> [u8; 2] {
        let mut sum = self.0;
        while sum >> 16 != 0 {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        (!(sum as u16)).to_be_bytes()
    }
}

impl Segment {
    /// The headers of the packet that carries `payload`, of at most [`MAX_PAYLOAD`] bytes.
    pub(crate) fn headers(&self, payload: &[u8]) -> Vec<u8> {
        let options: &[u8] = if self.flags & flag::SYN != 0 { &SYN_OPTIONS } else { &[] };
        let tcp_len = TCP_LEN + options.len();
        let length = tcp_len + payload.len();
        let (mut out, mut sum) =
            ip_header((self.from.ip(), self.to.ip()), TCP, length, self.traffic_class);
        let tcp = out.len();
        out.extend_from_slice(&self.from.port().to_be_bytes());
        out.extend_from_slice(&self.to.port().to_be_bytes());
        out.extend_from_slice(&self.seq.to_be_bytes());
        out.extend_from_slice(&self.ack.to_be_bytes());
        out.extend_from_slice(&[((tcp_len / 4) as u8) << 4, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        out.extend_from_slice(options);
        sum.add(&out[tcp..]);
        sum.add(payload);
        out[tcp + 16..tcp + 18].copy_from_slice(&sum.finish());
        out
    }
}

/// The IP header of a packet with `length` bytes behind it; and the beginning of their checksum, which covers
/// addresses, protocol and length as well (RFC 9293 3.1, RFC 768).
fn ip_header(
    (from, to): (IpAddr, IpAddr),
    protocol: u8,
    length: usize,
    traffic_class: u8,
) -> (Vec<u8>, Checksum) {
    let (mut out, mut sum) = (Vec::with_capacity(64), Checksum::default());
    sum.add(&[0, protocol]);
    sum.add(&(length as u32).to_be_bytes());
    if let (IpAddr::V4(from), IpAddr::V4(to)) = (from, to) {
        let total = ((20 + length) as u16).to_be_bytes();
        out.extend_from_slice(&[0x45, traffic_class, total[0], total[1]]);
        // Do not fragment.
        out.extend_from_slice(&[0, 0, 0x40, 0, HOP_LIMIT, protocol, 0, 0]);
        out.extend_from_slice(&from.octets());
        out.extend_from_slice(&to.octets());
        let mut header = Checksum::default();
        header.add(&out);
        out[10..12].copy_from_slice(&header.finish());
        sum.add(&out[12..20]);
    } else {
        out.extend_from_slice(&[0x60 | traffic_class >> 4, traffic_class << 4, 0, 0]);
        out.extend_from_slice(&(length as u16).to_be_bytes());
        out.extend_from_slice(&[protocol, HOP_LIMIT]);
        out.extend_from_slice(&as_v6(from));
        out.extend_from_slice(&as_v6(to));
        sum.add(&out[8..40]);
    }
    (out, sum)
}

/// The headers of the packet that carries `payload` as a datagram; `None` if it is too long for one.
pub(crate) fn udp_headers(
    (from, to): (SocketAddr, SocketAddr),
    payload: &[u8],
    traffic_class: u8,
) -> Option<Vec<u8>> {
    if payload.len() > MAX_PAYLOAD {
        return None;
    }
    let length = UDP_LEN + payload.len();
    let (mut out, mut sum) = ip_header((from.ip(), to.ip()), UDP, length, traffic_class);
    let udp = out.len();
    out.extend_from_slice(&from.port().to_be_bytes());
    out.extend_from_slice(&to.port().to_be_bytes());
    out.extend_from_slice(&(length as u16).to_be_bytes());
    out.extend_from_slice(&[0; 2]);
    sum.add(&out[udp..]);
    sum.add(payload);
    // 0 would mean that there is none.
    let checksum = match sum.finish() {
        [0, 0] => [0xff; 2],
        checksum => checksum,
    };
    out[udp + 6..].copy_from_slice(&checksum);
    Some(out)
}

fn as_v6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sum over something that contains its checksum is 0.
    fn verified(pieces: &[&[u8]]) -> bool {
        let mut sum = Checksum::default();
        for piece in pieces {
            sum.add(piece);
        }
        sum.finish() == [0, 0]
    }

    #[test]
    fn checksums_are_those_of_the_rfcs() {
        let segment = |from: &str, to: &str, flags| Segment {
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            seq: 7,
            ack: 9,
            flags,
            traffic_class: 0xb8,
        };
        let payload = b"odd";
        let v4 = segment("127.0.0.1:4000", "127.0.0.2:5000", flag::ACK).headers(payload);
        assert_eq!(v4.len(), 40);
        assert_eq!(v4[1], 0xb8);
        assert!(verified(&[&v4[..20]]));
        let pseudo = [0, TCP, 0, 23];
        assert!(verified(&[&v4[12..20], &pseudo, &v4[20..], payload]));
        let v6 = segment("[::1]:4000", "[::2]:5000", flag::SYN).headers(&[]);
        assert_eq!(v6.len(), 40 + 28);
        assert_eq!(v6[..2], [0x6b, 0x80]);
        let pseudo = [0, 0, 0, 28, 0, 0, 0, TCP];
        assert!(verified(&[&v6[8..40], &pseudo, &v6[40..]]));
        let (from, to) = ("[::1]:4000".parse().unwrap(), "[::2]:5000".parse().unwrap());
        let udp = udp_headers((from, to), payload, 0).unwrap();
        let pseudo = [0, 0, 0, 11, 0, 0, 0, UDP];
        assert!(verified(&[&udp[8..40], &pseudo, &udp[40..], payload]));
        assert_eq!(udp_headers((from, to), &[0; MAX_PAYLOAD + 1], 0), None);
    }
}
