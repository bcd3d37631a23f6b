//! The packets within the messages of a UDP link: whose they are, and which are believed
//! (specs/qpip-udp-link.md, 3).

use std::collections::HashMap;
use std::net::{Ipv6Addr, SocketAddr};

use super::Frame;
use super::messages::Message;
use super::place::address_of;

/// The fixed header of IPv6, and where in it the addresses are.
pub(super) const HEADER: usize = 40;
const SOURCE: usize = 8;
pub(super) const DESTINATION: usize = 24;

/// Hands the packets of a message to `each`, those that come from where they say; how many.
pub(super) fn hand_over(
    message: Message,
    bytes: &[u8],
    inners: &HashMap<SocketAddr, Ipv6Addr>,
    each: &mut dyn FnMut(&Frame<'_>),
) -> usize {
    let Some(from) = message.from else { return 0 };
    let derived = || match from {
        SocketAddr::V4(place) => Some(address_of(place)),
        SocketAddr::V6(_) => None,
    };
    let Some(inner) = inners.get(&bare(from)).copied().or_else(derived) else { return 0 };
    let mut count = 0;
    for packet in bytes[..message.len].chunks(message.datagrams.unwrap_or(bytes.len())) {
        if packet.first().is_some_and(|version| version >> 4 == 6)
            && address_at(packet, SOURCE) == Some(inner)
        {
            each(&Frame { bytes: packet, checked: false });
            count += 1;
        }
    }
    count
}

/// A place without scope and flow label, which the kernel's word may have and the user's not.
pub(super) fn bare(place: SocketAddr) -> SocketAddr {
    SocketAddr::new(place.ip(), place.port())
}

/// An address in the header of a packet, if there is a whole header.
pub(super) fn address_at(packet: &[u8], at: usize) -> Option<Ipv6Addr> {
    let octets: [u8; 16] = *packet.get(..HEADER)?[at..].first_chunk()?;
    Some(octets.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What of a message with packets of these sources is handed over: the last octets of their payload.
    fn handed(from: &str, datagrams: Option<usize>, packets: &[(&str, u8)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (source, mark) in packets {
            let mut packet = [0; HEADER + 1];
            packet[0] = 0x60;
            packet[SOURCE..DESTINATION]
                .copy_from_slice(&source.parse::<Ipv6Addr>().unwrap().octets());
            packet[HEADER] = *mark;
            bytes.extend(packet);
        }
        let message = Message { len: bytes.len(), from: Some(from.parse().unwrap()), datagrams };
        let listed = ("192.0.2.2:7".parse().unwrap(), "fd00::7".parse().unwrap());
        let mut marks = Vec::new();
        let count = hand_over(message, &bytes, &HashMap::from([listed]), &mut |frame| {
            assert!(!frame.checked);
            marks.extend(frame.bytes.last());
        });
        assert_eq!(count, marks.len());
        marks
    }

    #[test]
    fn who_says_who_he_is_not_is_not_heard() {
        let own = address_of("192.0.2.1:4000".parse().unwrap()).to_string();
        let other = address_of("192.0.2.1:4001".parse().unwrap()).to_string();
        let packets = [(own.as_str(), 1), (other.as_str(), 2), ("fd00::7", 3), (own.as_str(), 4)];
        let size = Some(HEADER + 1);
        assert_eq!(handed("192.0.2.1:4000", size, &packets), [1, 4]);
        assert_eq!(handed("192.0.2.2:7", size, &packets), [3], "a listed one has only that");
        assert!(handed("[2001:db8::1]:4000", size, &packets).is_empty());
        assert_eq!(handed("192.0.2.1:4000", None, &packets[..1]), [1]);
    }

    #[test]
    fn short_packets_and_other_versions_are_dropped() {
        let from: SocketAddr = "192.0.2.1:4000".parse().unwrap();
        let mut bytes = [0; HEADER];
        bytes[SOURCE..DESTINATION]
            .copy_from_slice(&address_of("192.0.2.1:4000".parse().unwrap()).octets());
        let count = |bytes: &[u8]| {
            let message = Message { len: bytes.len(), from: Some(from), datagrams: None };
            hand_over(message, bytes, &HashMap::new(), &mut |_| {})
        };
        bytes[0] = 0x60;
        assert_eq!(count(&bytes), 1);
        assert_eq!(count(&bytes[..HEADER - 1]), 0);
        bytes[0] = 0x45;
        assert_eq!(count(&bytes), 0);
    }
}
