//! Datagrams that are longer than a packet of their path.

use std::net::{IpAddr, SocketAddr};

use quipu_inet::stack::{Carriage, Config, DatagramError, Offload, Stack, UdpId};
use quipu_inet::tcp::{SECOND, Secret};
use quipu_wire::ipv6_extension::{Fragment, Walk, next_header, walk};
use quipu_wire::{ethernet, ipv4, ipv6};

use crate::net::{Faults, Net, V4, V6, station};
use crate::paths::{MTU, too_big};
use crate::streams::stream;

const FAMILIES: [[&str; 2]; 2] = [V6, V4];

fn octets(salt: usize, len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 31 + n / 251 + salt) as u8).collect()
}

/// A part as it is on the wire: where it stands, whether more follow, its number, its octets.
#[derive(Debug)]
struct Seen {
    offset: usize,
    more: bool,
    number: u32,
    len: usize,
}

fn seen(frame: &[u8]) -> Seen {
    if frame[0] >> 4 == 6 {
        let (header, at) = ipv6::Repr::parse(frame).unwrap();
        assert_eq!(at + usize::from(header.payload_len), frame.len());
        let Ok(Walk::Fragment { fragment, at: behind }) =
            walk(header.next_header, &frame[at..], false)
        else {
            panic!("an atomic fragment, or none (RFC 8021)");
        };
        let Fragment { next_header, offset, more, identification } = fragment;
        assert_eq!((header.next_header, next_header), (next_header::FRAGMENT, 17));
        let len = frame.len() - at - behind;
        return Seen { offset: offset.into(), more, number: identification, len };
    }
    let (header, at) = ipv4::Repr::parse(frame).unwrap();
    assert!(header.is_fragment() && !header.dont_fragment);
    assert_eq!(at + usize::from(header.payload_len), frame.len());
    Seen {
        offset: header.fragment_offset.into(),
        more: header.more_fragments,
        number: header.identification.into(),
        len: frame.len() - at,
    }
}

/// Whether frames are the parts of one datagram of `len` octets, in order, none longer than `mtu`.
fn check(frames: &[Vec<u8>], len: usize, mtu: usize) -> u32 {
    let mut at = 0;
    let mut number = None;
    for (n, frame) in frames.iter().enumerate() {
        let part = seen(frame);
        assert!(frame.len() <= mtu, "{} octets on a path of {mtu}", frame.len());
        assert_eq!((part.offset, part.more), (at, n + 1 < frames.len()));
        assert_eq!(*number.get_or_insert(part.number), part.number);
        if part.more {
            assert!(frame.len() + 8 > mtu, "no part is shorter than need be");
            assert!(part.len.is_multiple_of(8));
        }
        at += part.len;
    }
    assert!(frames.len() > 1, "no packet is cut that fits (RFC 8021)");
    assert_eq!(at, len + 8);
    number.unwrap()
}

/// Two stacks and their sockets.
fn sockets(net: &mut Net) -> (UdpId, SocketAddr) {
    let (here, _) = net.hosts[0].stack.bind(0).unwrap();
    let (_, port) = net.hosts[1].stack.bind(53).unwrap();
    (here, SocketAddr::new(net.hosts[1].address, port))
}

#[test]
fn every_length_at_a_boundary_arrives_whole() {
    for addresses in FAMILIES {
        for mtu in [1_280, 1_283, 1_500, 9_000, 65_535] {
            let mut net = Net::new(addresses, mtu, stream(), 1);
            let (here, to) = sockets(&mut net);
            let most = Stack::max_datagram(to.ip());
            assert_eq!(most, if to.is_ipv6() { 65_527 } else { 65_507 });
            let ip = if to.is_ipv6() { ipv6::LEN } else { ipv4::LEN };
            let (mtu, extra) = (mtu as usize, if to.is_ipv6() { 8 } else { 0 });
            let (fits, unit) = (mtu - ip - 8, (mtu - ip - extra) & !7);
            let around = |edge: usize| [edge - 9, edge - 8, edge - 7, edge - 1, edge, edge + 1];
            let edges = [fits + 1, 2 * unit, 3 * unit, 7 * unit, most];
            let lens = edges.into_iter().flat_map(around).chain([most - 20, 40_000]);
            for len in lens.filter(|len| *len > fits && *len <= most) {
                let payload = octets(len, len);
                let short = net.send_datagram(0, here, to, &payload);
                assert_eq!(short, Err(DatagramError::Long { fits }));
                let frames = net.send_long(0, here, to, &payload);
                check(&frames, len, mtu);
                net.run(SECOND);
                let (datagram, came) = net.hosts[1].datagrams.pop().expect("it has come");
                assert!(came == payload, "{len} octets over {mtu}");
                assert_eq!(datagram.from.ip(), net.hosts[0].address);
                assert!(net.hosts[1].datagrams.is_empty());
            }
            let long = net.cut(0, here, to, &octets(0, most + 1)).unwrap_err();
            assert_eq!(long, DatagramError::TooLong { most });
            let long = net.send_datagram(0, here, to, &octets(0, most + 1));
            assert_eq!(long, Err(DatagramError::TooLong { most }));
        }
    }
}

#[test]
fn one_part_that_is_lost_is_the_whole_datagram_and_no_other() {
    for addresses in FAMILIES {
        let mut net = Net::new(addresses, 1_500, stream(), 1);
        let (here, to) = sockets(&mut net);
        let mut numbers = Vec::new();
        for lost in 0..4 {
            let payload = octets(lost, 5_000);
            let mut parts = net.cut(0, here, to, &payload).unwrap();
            let mut frames = Vec::new();
            while !parts.is_done() {
                net.faults.lose = if frames.len() == lost { 1_000 } else { 0 };
                frames.push(net.send_part(0, &mut parts, &payload).unwrap());
            }
            numbers.push(check(&frames, 5_000, 1_500));
            net.faults.lose = 0;
        }
        let last = octets(9, 4_000);
        numbers.push(check(&net.send_long(0, here, to, &last), 4_000, 1_500));
        net.run(SECOND);
        assert_eq!(net.hosts[1].datagrams.len(), 1);
        assert_eq!(net.hosts[1].datagrams[0].1, last);
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 5, "each has a number of its own");
        // What has come of the others is forgotten in time.
        net.run(100 * SECOND);
        assert_eq!(net.hosts[1].stack.fragment_counters().expired, 4);
    }
}

#[test]
fn parts_follow_a_path_that_becomes_narrower_between_them() {
    for addresses in FAMILIES {
        let mut net = Net::new(addresses, 9_000, stream(), 1);
        let (here, to) = sockets(&mut net);
        let from = net.hosts[0].address;
        let payload = octets(1, 60_000);
        let mut parts = net.cut(0, here, to, &payload).unwrap();
        let first = net.send_part(0, &mut parts, &payload).unwrap();
        let second = net.send_part(0, &mut parts, &payload).unwrap();
        assert!(first.len() > 8_900 && second.len() > 8_900);
        // A stranger's, who has not seen what was sent: only the first part says between which ports it is.
        net.arrive(0, &too_big(&second, from), false);
        let mut guess = first.clone();
        let port = if from.is_ipv6() { ipv6::LEN + 8 } else { ipv4::LEN };
        guess[port] ^= 1;
        net.arrive(0, &too_big(&guess, from), false);
        assert_eq!(net.hosts[0].stack.path_mtu(to.ip()), 9_000);
        net.arrive(0, &too_big(&first, from), false);
        assert_eq!(net.hosts[0].stack.path_mtu(to.ip()), MTU as u32);
        let mut at = 0;
        while !parts.is_done() {
            let frame = net.send_part(0, &mut parts, &payload).unwrap();
            assert!(frame.len() <= MTU, "{}", frame.len());
            at += 1;
        }
        assert!(at > 30);
        // Those that were sent before have come through all the same.
        net.run(SECOND);
        assert!(net.hosts[1].datagrams.pop().is_some_and(|(_, came)| came == payload));
        // The next is cut for the path from the beginning.
        let frames = net.send_long(0, here, to, &payload);
        check(&frames, 60_000, MTU);
        net.run(SECOND);
        assert!(net.hosts[1].datagrams.pop().is_some_and(|(_, came)| came == payload));
    }
}

/// A router says so of the first part; the next datagram gets through.
#[test]
fn a_narrow_path_costs_one_datagram() {
    let mut net = Net::new(V6, 9_000, stream(), 1);
    let (here, to) = sockets(&mut net);
    net.narrow = Some(MTU);
    let (from, payload) = (net.hosts[0].address, octets(1, 20_000));
    net.send_long(0, here, to, &payload);
    net.run(SECOND);
    assert!(net.hosts[1].datagrams.is_empty());
    for frame in std::mem::take(&mut net.too_long) {
        net.arrive(0, &too_big(&frame, from), false);
    }
    check(&net.send_long(0, here, to, &payload), 20_000, MTU);
    net.run(SECOND);
    assert!(net.hosts[1].datagrams.pop().is_some_and(|(_, came)| came == payload));
}

#[test]
fn a_path_that_has_become_wider_needs_no_parts() {
    for addresses in FAMILIES {
        let mut net = Net::new(addresses, 9_000, stream(), 1);
        let (here, to) = sockets(&mut net);
        let (from, payload) = (net.hosts[0].address, octets(1, 5_000));
        let mut frame = vec![0; 9_000];
        let stack = &mut net.hosts[0].stack;
        let whole = stack
            .compose_datagram(net.now, here, to, Carriage::default(), 5_000, &mut frame)
            .unwrap();
        frame.truncate(whole.len());
        net.arrive(0, &too_big(&frame, from), false);
        let mut parts = net.cut(0, here, to, &payload).unwrap();
        // After ten minutes the path is tried anew (RFC 8201 4).
        net.run(700 * SECOND);
        let frame = net.send_part(0, &mut parts, &payload).unwrap();
        assert!(parts.is_done());
        let fragment = match from.is_ipv6() {
            true => ipv6::Repr::parse(&frame).unwrap().0.next_header == next_header::FRAGMENT,
            false => ipv4::Repr::parse(&frame).unwrap().0.is_fragment(),
        };
        assert!(!fragment, "RFC 8021");
        net.run(SECOND);
        assert!(net.hosts[1].datagrams.pop().is_some_and(|(_, came)| came == payload));
    }
}

#[test]
fn whatever_the_network_does_what_arrives_is_what_was_sent() {
    for addresses in FAMILIES {
        let mut net = Net::new(addresses, 1_500, stream(), 7);
        net.faults =
            Faults { lose: 10, repeat: 50, reorder: 300, corrupt: 10, jitter: SECOND / 20 };
        let (here, to) = sockets(&mut net);
        for n in 0..200 {
            let payload = octets(n, 1_473 + n * 61);
            net.send_long(0, here, to, &payload);
            net.run(SECOND / 100);
        }
        net.run(SECOND);
        let came = &net.hosts[1].datagrams;
        assert!(came.len() > 100, "{}", came.len());
        for (_, payload) in came {
            let n = (payload.len() - 1_473) / 61;
            assert!(*payload == octets(n, 1_473 + n * 61), "{n}");
        }
    }
}

#[test]
fn parts_wait_for_their_neighbour() {
    for addresses in FAMILIES {
        let mut net = Net::ethernet(addresses, stream(), 1);
        let (here, to) = sockets(&mut net);
        let payload = octets(3, 4_000);
        let mut parts = net.cut(0, here, to, &payload).unwrap();
        let waits = net.send_part(0, &mut parts, &payload);
        assert_eq!(waits, Err(DatagramError::Unresolved { next_hop: to.ip() }));
        net.run(SECOND);
        let mut count = 0;
        while !parts.is_done() {
            let frame = net.send_part(0, &mut parts, &payload).unwrap();
            assert!(frame.len() <= 1_500 + ethernet::HEADER);
            count += 1;
        }
        assert_eq!(count, 3);
        net.run(SECOND);
        assert!(net.hosts[1].datagrams.pop().is_some_and(|(_, came)| came == payload));
    }
}

#[test]
fn a_long_datagram_to_oneself_does_not_leave() {
    for addresses in FAMILIES {
        let offload = Offload { checksum: true, segment: 60_000 };
        let mut net = Net::with(1_500, stream(), 1, |host| {
            let address: IpAddr = addresses[host].parse().unwrap();
            let config = Config::new(address, 24, Secret([1, host as u64]));
            Config { hardware: Some(station(host)), offload, ..config }
        });
        let (here, port) = net.hosts[0].stack.bind(0).unwrap();
        let to = SocketAddr::new(net.hosts[0].address, port);
        let payload = octets(3, 65_000);
        let carried = net.carried;
        net.send_long(0, here, to, &payload);
        assert!(net.hosts[0].datagrams.pop().is_some_and(|(_, came)| came == payload));
        assert_eq!(net.carried, carried);
    }
}
