//! The headers of the internet protocols: what is accepted survives being written and read again.
#![no_main]

use std::net::Ipv6Addr;

use libfuzzer_sys::fuzz_target;
use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6_extension::{Walk, walk};
use quipu_wire::{arp, ethernet, icmpv4, icmpv6, ipv4, ipv6, tcp, udp};

const A: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// A right checksum, which a fuzzer would not find.
fn seal(bytes: &mut [u8], at: usize, others: Sum) {
    if bytes.len() >= at + 2 {
        bytes[at..at + 2].fill(0);
        let checksum = others.and(sum(bytes)).checksum();
        bytes[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
}

fn over_ipv4(bytes: &mut [u8]) {
    let len = bytes.first().map_or(0, |first| usize::from(first & 15) * 4).min(bytes.len());
    seal(&mut bytes[..len], 10, Sum::default());
    let Ok((repr, at)) = ipv4::Repr::parse(bytes) else { return };
    let payload = &mut bytes[at..at + usize::from(repr.payload_len)];
    let mut out = [vec![0; ipv4::LEN], payload.to_vec()].concat();
    repr.emit(&mut out);
    assert_eq!(ipv4::Repr::parse(&out), Ok((repr, ipv4::LEN)));
    if repr.protocol == 1 {
        seal(payload, 2, Sum::default());
        if let Ok(message) = icmpv4::Repr::parse(payload) {
            let mut out = vec![0; message.wire_len()];
            message.emit(&mut out);
            assert_eq!(icmpv4::Repr::parse(&out), Ok(message));
        }
    }
    upper(repr.protocol, payload);
}

fn over_ipv6(bytes: &mut [u8]) {
    let Ok((repr, at)) = ipv6::Repr::parse(bytes) else { return };
    let mut out = [0; ipv6::LEN];
    repr.emit(&mut out);
    assert_eq!(out, bytes[..at]);
    let payload = &mut bytes[at..at + usize::from(repr.payload_len)];
    let Ok(Walk::Upper { protocol, at, .. }) = walk(repr.next_header, payload, false) else {
        return;
    };
    let payload = &mut payload[at..];
    if protocol == icmpv6::PROTOCOL {
        let len = payload.len();
        seal(payload, 2, Sum::of_pseudo_header(A.into(), A.into(), protocol, len));
        if let Ok(message) = icmpv6::Repr::parse(A, A, payload) {
            let mut out = vec![0; message.wire_len()];
            message.emit(A, A, &mut out);
            assert_eq!(icmpv6::Repr::parse(A, A, &out), Ok(message));
        }
    }
    upper(protocol, payload);
}

fn upper(protocol: u8, bytes: &[u8]) {
    match protocol {
        6 => {
            if let Ok((repr, at)) = tcp::Repr::parse(bytes) {
                assert!(at <= bytes.len() && repr.header_len() <= tcp::MAX_LEN);
            }
        }
        17 => {
            if let Ok((repr, at)) = udp::Repr::parse(bytes) {
                assert!(at + usize::from(repr.payload_len) <= bytes.len());
            }
        }
        _ => {}
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((&which, input)) = input.split_first() else { return };
    let (mut bytes, len) = (input.to_vec(), input.len() as u16);
    // Versions and lengths are made right as well, but for some.
    let steered = which < 0xc0 && input.len() >= ipv6::LEN;
    match which % 8 {
        0..=2 => {
            if steered {
                bytes[0] = 0x40 | bytes[0] % 11 + 5;
                bytes[2..4].copy_from_slice(&len.to_be_bytes());
                bytes[9] = [1, 6, 17][usize::from(which % 3)];
            }
            over_ipv4(&mut bytes);
        }
        3..=5 => {
            if steered {
                bytes[0] = 0x60 | bytes[0] & 15;
                bytes[4..6].copy_from_slice(&(len - ipv6::LEN as u16).to_be_bytes());
                bytes[6] = [58, 6, 17, 0, 43, 44, 60, 59][usize::from(which / 8 % 8)];
            }
            over_ipv6(&mut bytes);
        }
        6 => {
            if let Ok(repr) = arp::Repr::parse(&bytes) {
                let mut out = [0; arp::LEN];
                repr.emit(&mut out);
                assert_eq!(arp::Repr::parse(&out), Ok(repr));
            }
        }
        _ => {
            if let Ok((repr, at)) = ethernet::Repr::parse(&bytes) {
                let mut out = [0; ethernet::HEADER];
                repr.emit(&mut out);
                // A tag is not written again.
                assert_eq!(out[..12], bytes[..12]);
                assert_eq!(out[12..], bytes[at - 2..at]);
            }
        }
    }
});
