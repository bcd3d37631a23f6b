//! The headers of the internet protocols: what is accepted survives being written and read again.
#![no_main]

mod shares;

use std::net::Ipv6Addr;

use libfuzzer_sys::fuzz_target;
use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6_extension::{Walk, walk};
use quipu_wire::{arp, ethernet, icmpv4, icmpv6, ipv4, ipv6, tcp, udp};
use shares::Shares;

static SHARES: Shares<9> =
    Shares::new(["ipv4", "ipv6", "icmpv4", "icmpv6", "discovery", "tcp", "options", "udp", "arp"]);

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
    SHARES.reach("ipv4");
    let payload = &mut bytes[at..at + usize::from(repr.payload_len)];
    let mut out = [vec![0; ipv4::LEN], payload.to_vec()].concat();
    repr.emit(&mut out);
    assert_eq!(ipv4::Repr::parse(&out), Ok((repr, ipv4::LEN)));
    if repr.protocol == 1 {
        seal(payload, 2, Sum::default());
        if let Ok(message) = icmpv4::Repr::parse(payload) {
            SHARES.reach("icmpv4");
            let mut out = vec![0; message.wire_len()];
            message.emit(&mut out);
            assert_eq!(icmpv4::Repr::parse(&out), Ok(message));
        }
    }
    upper(repr.protocol, payload);
}

fn over_ipv6(bytes: &mut [u8]) {
    let Ok((repr, at)) = ipv6::Repr::parse(bytes) else { return };
    SHARES.reach("ipv6");
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
            let discovery = matches!(message, icmpv6::Repr::Discovery(_));
            SHARES.reach(if discovery { "discovery" } else { "icmpv6" });
            let mut out = vec![0; message.wire_len()];
            message.emit(A, A, &mut out);
            assert_eq!(icmpv6::Repr::parse(A, A, &out), Ok(message));
        }
    }
    upper(protocol, payload);
}

/// A TCP header, written and read again. No header has room for all that can be read of one that is full.
fn written(mut repr: tcp::Repr) {
    if repr.options.wire_len() > tcp::MAX_LEN - tcp::MIN_LEN {
        repr.options.sack = tcp::SackBlocks::EMPTY;
    }
    if repr.options != tcp::Options::default() {
        SHARES.reach("options");
    }
    let mut out = vec![0; repr.header_len()];
    assert_eq!(repr.emit(&mut out), out.len());
    assert_eq!(tcp::Repr::parse(&out), Ok((repr, out.len())));
}

/// Options of TCP in place of blind octets: each of a kind, with the length that it must have, mostly.
fn options(header: &mut [u8]) {
    const KINDS: [[u8; 2]; 7] = [[1, 1], [2, 4], [3, 3], [4, 2], [5, 10], [5, 18], [8, 10]];
    let mut at = tcp::MIN_LEN;
    while at < header.len() {
        let [kind, len] = KINDS[usize::from(header[at]) % 7];
        let fits = header[at] >= 0xf0 || at + usize::from(len) <= header.len();
        let [kind, len] = if fits { [kind, len] } else { [1, 1] };
        if header[at] < 0xf0 {
            header[at] = kind;
            if let Some(octet) = header.get_mut(at + 1).filter(|_| len > 1) {
                *octet = len;
            }
        }
        at += usize::from(len);
    }
}

/// Options of discovery, each of a kind, and as long as it must be.
fn options_of_discovery(mut options: &mut [u8]) {
    while options.len() >= 8 {
        let kind = [1, 2, 5, 3][usize::from(options[0]) % 4];
        let words = if kind == 3 && options.len() >= 32 { 4 } else { 1 };
        options[..2].copy_from_slice(&[kind, words]);
        options = &mut options[usize::from(words) * 8..];
    }
}

/// What a fuzzer would not find in the headers of the upper layer: kinds of ICMP, lengths.
fn steer(protocol: u8, bytes: &mut [u8]) {
    let len = bytes.len();
    match (protocol, &mut *bytes) {
        (1, [kind, ..]) => *kind = [0, 3, 5, 8, 11, 12, *kind, *kind][usize::from(*kind) % 8],
        (58, [kind, code, ..]) => {
            let kinds = [1, 2, 3, 4, 128, 129, 133, 134, 135, 136, *kind];
            *kind = kinds[usize::from(*kind) % kinds.len()];
            *code = if *kind > 130 && *code & 3 != 0 { 0 } else { *code };
            let first = if *kind == 134 { 16 } else { 24 };
            options_of_discovery(bytes.get_mut(first..).unwrap_or(&mut []));
        }
        (6, bytes) if len >= tcp::MIN_LEN => {
            let words = (len / 4).min(15).min(5 + usize::from(bytes[12] >> 4));
            bytes[12] = (words as u8) << 4;
            options(&mut bytes[..words * 4]);
        }
        (17, bytes) if len >= udp::LEN => {
            bytes[4..6].copy_from_slice(&(len as u16).to_be_bytes());
        }
        _ => {}
    }
}

fn upper(protocol: u8, bytes: &[u8]) {
    match protocol {
        6 => {
            if let Ok((repr, at)) = tcp::Repr::parse(bytes) {
                SHARES.reach("tcp");
                assert!(at <= bytes.len());
                written(repr);
            }
        }
        17 => {
            if let Ok((repr, at)) = udp::Repr::parse(bytes) {
                SHARES.reach("udp");
                assert!(at + usize::from(repr.payload_len) <= bytes.len());
                let mut out = vec![0; at + usize::from(repr.payload_len)];
                assert_eq!(repr.emit(&mut out), at);
                assert_eq!(udp::Repr::parse(&out), Ok((repr, at)));
            }
        }
        _ => {}
    }
}

fuzz_target!(|input: &[u8]| {
    SHARES.begin();
    let Some((&which, input)) = input.split_first() else { return };
    let (mut bytes, len) = (input.to_vec(), input.len() as u16);
    // Versions and lengths are made right as well, but for some.
    let steered = which < 0xc0 && input.len() >= ipv6::LEN;
    match which % 8 {
        0..=2 => {
            if steered {
                bytes[0] = 0x40 | bytes[0] % 11 + 5;
                bytes[2..4].copy_from_slice(&len.to_be_bytes());
                bytes[9] = [1, 6, 17][usize::from(which % 8)];
                let at = usize::from(bytes[0] & 15) * 4;
                steer(bytes[9], bytes.get_mut(at..).unwrap_or(&mut []));
            }
            over_ipv4(&mut bytes);
        }
        3..=5 => {
            if steered {
                bytes[0] = 0x60 | bytes[0] & 15;
                // Whole words: options of discovery are some. What is behind them is padding.
                let len = (len - ipv6::LEN as u16) & !7;
                bytes[4..6].copy_from_slice(&len.to_be_bytes());
                bytes[6] = [58, 6, 17, 58, 43, 44, 60, 0][usize::from(which / 8 % 8)];
                steer(bytes[6], &mut bytes[ipv6::LEN..][..usize::from(len)]);
            }
            over_ipv6(&mut bytes);
        }
        6 => {
            if steered {
                bytes[..7].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0]);
                bytes[7] = 1 + (bytes[7] & 1);
            }
            if let Ok(repr) = arp::Repr::parse(&bytes) {
                SHARES.reach("arp");
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
