//! The internet protocols: for any bytes, parsing does not panic and stays within them, and what it accepts
//! it writes back as it was understood.

use std::net::Ipv6Addr;

use proptest::collection::vec;
use proptest::prelude::*;
use quipu_wire::checksum::{Sum, sum};
use quipu_wire::{arp, ethernet, icmpv4, icmpv6, ipv4, ipv6, ipv6_extension, udp};

const A: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
const B: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Puts a right checksum where a message has one, so that the rest is looked at as well.
fn seal(bytes: &mut [u8], at: usize, others: Sum) {
    if let Some(field) = bytes.get_mut(at..at + 2) {
        field.fill(0);
        let checksum = others.and(sum(bytes)).checksum();
        bytes[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
}

fn naive(octets: &[u8]) -> u64 {
    let word = |pair: &[u8]| u64::from(pair[0]) << 8 | pair.get(1).map_or(0, |&low| low.into());
    octets.chunks(2).map(word).sum()
}

proptest! {
    #[test]
    fn sums(octets in vec(any::<u8>(), 0..3000), cut: prop::sample::Index) {
        let whole = sum(&octets);
        // One's complement: equal modulo 65535.
        prop_assert_eq!(u64::from(whole.partial()) % 0xffff, naive(&octets) % 0xffff);
        prop_assert_eq!(whole.partial() == 0, octets.iter().all(|octet| *octet == 0));
        let at = cut.index(octets.len() + 1);
        let (front, behind) = (sum(&octets[..at]), sum(&octets[at..]));
        prop_assert_eq!(front.and(if at % 2 == 1 { behind.at_odd() } else { behind }), whole);
    }

    #[test]
    fn ipv4_headers(mut bytes in vec(any::<u8>(), 0..90), words in 4u8..8, total in 0u16..100) {
        if bytes.len() >= ipv4::LEN {
            bytes[0] = 0x40 | words;
            bytes[2..4].copy_from_slice(&total.to_be_bytes());
            let len = bytes.len().min(usize::from(words) * 4);
            seal(&mut bytes[..len], 10, Sum::default());
        }
        if let Ok((repr, len)) = ipv4::Repr::parse(&bytes) {
            let mut payload = bytes[len..len + usize::from(repr.payload_len)].to_vec();
            let mut out = vec![0xff; ipv4::LEN];
            prop_assert_eq!(repr.emit(&mut out), ipv4::LEN);
            out.append(&mut payload);
            prop_assert_eq!(ipv4::Repr::parse(&out), Ok((repr, ipv4::LEN)));
        }
    }

    #[test]
    fn ipv6_headers(mut bytes in vec(any::<u8>(), 0..60), version in 5u8..7, payload in 0u8..20) {
        if bytes.len() >= ipv6::LEN {
            (bytes[0], bytes[4], bytes[5]) = (version << 4 | bytes[0] & 15, 0, payload);
        }
        if let Ok((repr, len)) = ipv6::Repr::parse(&bytes) {
            prop_assert!(len + usize::from(repr.payload_len) <= bytes.len());
            let mut out = [0xff; ipv6::LEN];
            repr.emit(&mut out);
            prop_assert_eq!(&out[..], &bytes[..len]);
        }
    }

    #[test]
    fn ipv6_extensions(kinds in vec(0usize..6, 0..12), mut bytes in vec(any::<u8>(), 0..100)) {
        const KINDS: [u8; 6] = [0, 43, 44, 60, 6, 59];
        // A chain of short headers over random octets.
        for (n, kind) in kinds.iter().enumerate().skip(1) {
            for (at, octet) in [(8 * n - 8, KINDS[*kind]), (8 * n - 7, 0), (8 * n - 6, 1)] {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = octet;
                }
            }
        }
        let first = kinds.first().map_or(60, |kind| KINDS[*kind]);
        for behind_fragment in [false, true] {
            match ipv6_extension::walk(first, &bytes, behind_fragment) {
                Ok(ipv6_extension::Walk::Upper { at, protocol, .. }) => {
                    prop_assert!(at <= bytes.len() && ![0, 43, 44, 60].contains(&protocol));
                }
                Ok(ipv6_extension::Walk::Fragment { at, .. }) => {
                    prop_assert!(at <= bytes.len() && !behind_fragment);
                }
                Err(ipv6_extension::Refusal::Problem { at, .. }) => {
                    prop_assert!(at >= -34 && at < bytes.len() as i32);
                }
                Err(ipv6_extension::Refusal::Discard) => {}
            }
        }
    }

    #[test]
    fn udp_headers(mut bytes in vec(any::<u8>(), 0..30), len in 0u8..32) {
        if bytes.len() >= udp::LEN {
            (bytes[4], bytes[5]) = (0, len);
        }
        if let Ok((repr, at)) = udp::Repr::parse(&bytes) {
            prop_assert!(at + usize::from(repr.payload_len) <= bytes.len());
            let mut out = bytes.clone();
            prop_assert_eq!(repr.emit(&mut out), at);
            prop_assert_eq!(udp::Repr::parse(&out), Ok((repr, at)));
        }
    }

    #[test]
    fn messages_of_icmpv4(kind in 0usize..6, mut bytes in vec(any::<u8>(), 0..60)) {
        if let Some(byte) = bytes.first_mut() {
            *byte = [0, 3, 8, 11, 12, *byte][kind];
        }
        if kind % 2 == 0 && bytes.len() > 1 {
            bytes[1] = 0;
        }
        seal(&mut bytes, 2, Sum::default());
        if let Ok(repr) = icmpv4::Repr::parse(&bytes) {
            let mut out = vec![0xff; repr.wire_len()];
            prop_assert_eq!(repr.emit(&mut out), bytes.len());
            prop_assert_eq!(icmpv4::Repr::parse(&out), Ok(repr));
        }
    }

    #[test]
    fn messages_of_icmpv6(
        kind in 0usize..11,
        mut bytes in vec(any::<u8>(), 0..100),
        options in vec((0usize..5, 0u8..5), 0..8),
    ) {
        if let Some(byte) = bytes.first_mut() {
            *byte = [1, 2, 3, 4, 128, 129, 133, 134, 135, 136, *byte][kind];
        }
        if kind >= 6 && bytes.len() > 1 {
            bytes[1] = 0;
        }
        // Likely options where such a message has them.
        let mut at = [8, 16, 24, 24][kind.clamp(6, 9) - 6];
        for (kind, len) in options {
            for octet in [[1, 2, 3, 5, 14][kind], [1, 1, 4, 1, len][kind]] {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = octet;
                }
                at += 1;
            }
            at += [6, 6, 30, 6, 6][kind];
        }
        let len = bytes.len();
        seal(&mut bytes, 2, Sum::of_pseudo_header(A.into(), B.into(), 58, len));
        if let Ok(repr) = icmpv6::Repr::parse(A, B, &bytes) {
            let mut out = vec![0xff; repr.wire_len()];
            let written = repr.emit(A, B, &mut out);
            prop_assert_eq!(icmpv6::Repr::parse(A, B, &out[..written]), Ok(repr));
        }
    }

    #[test]
    fn arp_messages(mut bytes in vec(any::<u8>(), 0..40), operation in 0u8..4) {
        for (at, octet) in [0, 1, 8, 0, 6, 4, 0, operation].into_iter().enumerate() {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = octet;
            }
        }
        if let Ok(repr) = arp::Repr::parse(&bytes) {
            let mut out = [0xff; arp::LEN];
            repr.emit(&mut out);
            prop_assert_eq!(&out[..], &bytes[..arp::LEN]);
        }
    }

    #[test]
    fn ethernet_headers(bytes in vec(any::<u8>(), 0..20)) {
        if let Ok((repr, len)) = ethernet::Repr::parse(&bytes) {
            let mut out = [0xff; ethernet::HEADER];
            repr.emit(&mut out);
            // A tag is not written again.
            prop_assert_eq!(&out[..12], &bytes[..12]);
            prop_assert_eq!(&out[12..], &bytes[len - 2..len]);
        }
    }

    #[test]
    fn any_bytes_do_no_harm(bytes in vec(any::<u8>(), 0..200)) {
        let _ = (ipv4::Repr::parse(&bytes), ipv4::Repr::parse_quoted(&bytes));
        let _ = (ipv6::Repr::parse(&bytes), ipv6::Repr::parse_quoted(&bytes));
        let _ = (udp::Repr::parse(&bytes), udp::Repr::parse_quoted(&bytes));
        let _ = (icmpv4::Repr::parse(&bytes), icmpv6::Repr::parse(A, B, &bytes));
        let _ = arp::Repr::parse(&bytes);
    }
}
