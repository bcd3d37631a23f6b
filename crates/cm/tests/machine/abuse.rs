//! What strangers can do: little, and not for long.

use crate::common::{Pair, SECOND};
use quipu_cm::{CallError, Config, EventKind, IdKey, Param, PortSpace};
use quipu_iwarp::{Initiator, Params};
use quipu_wire::cm::{Offer, Setup};

fn request(params: Params, data: &[u8]) -> Vec<u8> {
    let mut initiator = Initiator::new(params, data).unwrap();
    let mut out = [0; 600];
    let len = initiator.poll_transmit(&mut out);
    out[..len].to_vec()
}

const PLAIN: Params = Params { revision: 1, crc: true, enhanced: None };

fn offer() -> Offer {
    Offer { port_space: 0x0106, qp_type: 2, path_mtu: 5, ..Offer::default() }
}

fn listening(config: Config) -> (Pair, IdKey) {
    let mut pair = Pair::new(config);
    let listener = pair.listen(PortSpace::Tcp, 5000, 0);
    (pair, listener)
}

#[test]
fn the_oldest_of_the_same_address_gives_way() {
    let config = Config { half_open: 8, half_open_per_address: 3, ..Config::default() };
    let (mut pair, listener) = listening(config);
    let friend = pair.stranger(listener, "10.9.0.1:1").unwrap();
    let streams: Vec<_> =
        (1..=5).map(|port| pair.stranger(listener, &format!("10.9.0.2:{port}")).unwrap()).collect();
    let open: Vec<_> = streams.iter().map(|&stream| pair.is_open(stream)).collect();
    assert_eq!(open, [false, false, true, true, true]);
    assert!(pair.is_open(friend), "others do not suffer from it");
    // A network of IPv6 is one address.
    for host in 1..=5 {
        pair.stranger(listener, &format!("[2001:db8::{host}]:1")).unwrap();
    }
    assert_eq!(pair.nodes[1].cm.load().half_open, 7);
}

#[test]
fn the_oldest_of_all_gives_way() {
    let config = Config { half_open: 4, half_open_per_address: 3, ..Config::default() };
    let (mut pair, listener) = listening(config);
    let streams: Vec<_> =
        (1..=6).map(|host| pair.stranger(listener, &format!("10.9.0.{host}:1")).unwrap()).collect();
    let open: Vec<_> = streams.iter().map(|&stream| pair.is_open(stream)).collect();
    assert_eq!(open, [false, false, true, true, true, true]);
    // Another listener has places of its own.
    let other = pair.listen(PortSpace::Tcp, 5001, 0);
    pair.stranger(other, "10.9.0.1:1").unwrap();
    assert_eq!(pair.nodes[1].cm.load().half_open, 5);
    pair.nodes[1].cm.destroy_id(listener).unwrap();
    pair.run();
    assert_eq!(pair.nodes[1].cm.load().half_open, 1);
    assert_eq!(pair.nodes[1].cm.load().deadlines, 1);
}

#[test]
fn ten_thousand_that_say_nothing_cost_a_bounded_number_and_ten_seconds() {
    let (mut pair, listener) = listening(Config::default());
    for number in 0..10_000_u32 {
        let from = format!("10.{}.{}.1:9", number >> 8, number & 255);
        pair.stranger(listener, &from).unwrap();
    }
    let load = pair.nodes[1].cm.load();
    assert_eq!((load.half_open, load.streams, load.deadlines), (2048, 2048, 2048));
    // Somebody who means it gets through.
    pair.connect(5000, &Param::default());
    pair.expect(1, EventKind::ConnectRequest);
    pair.pass(11 * SECOND);
    assert_eq!(pair.nodes[1].cm.load().half_open, 0);
}

#[test]
fn a_slow_sender_has_ten_seconds_however_often_it_sends() {
    let (mut pair, listener) = listening(Config::default());
    let stream = pair.stranger(listener, "10.9.0.1:1").unwrap();
    let bytes = request(PLAIN, &Setup::Request(offer(), &[]).to_bytes());
    for &byte in &bytes[..19] {
        assert!(pair.is_open(stream));
        pair.say(stream, &[byte]);
        pair.pass(SECOND / 2);
    }
    assert!(pair.is_open(stream));
    pair.pass(SECOND);
    assert!(!pair.is_open(stream));
    pair.expect_nothing();
}

#[test]
fn garbage_is_cut_at_the_first_wrong_byte() {
    let (mut pair, listener) = listening(Config::default());
    for garbage in [&b"GET / HTTP/1.1\r\n"[..], b"MPA ID Rep Frame", b"\x16\x03\x01"] {
        let stream = pair.stranger(listener, "10.9.0.1:1").unwrap();
        pair.say(stream, garbage);
        assert!(!pair.is_open(stream));
    }
    // Another revision of MPA than those that exist.
    for revision in [3, 255] {
        let mut bytes = request(PLAIN, &Setup::Request(offer(), &[]).to_bytes());
        bytes[17] = revision;
        let stream = pair.stranger(listener, "10.9.0.1:1").unwrap();
        pair.say(stream, &bytes);
        assert!(!pair.is_open(stream));
    }
    // More private data than MPA has.
    let mut bytes = request(PLAIN, &[]);
    bytes[18..20].copy_from_slice(&513_u16.to_be_bytes());
    let stream = pair.stranger(listener, "10.9.0.1:1").unwrap();
    pair.say(stream, &bytes);
    assert!(!pair.is_open(stream));
    pair.expect_nothing();
    assert_eq!(pair.nodes[1].cm.load().ids, 1);
}

#[test]
fn requests_that_are_none_are_refused() {
    // Anyone who does not show the device of plain iWARP refuses requests of such adapters, too.
    let (mut pair, listener) = listening(Config { takes_plain: false, ..Config::default() });
    let good = Setup::Request(offer(), &[]).to_bytes();
    let mut other_version = good.clone();
    other_version[4] = 2;
    let mut bad_mtu = good.clone();
    bad_mtu[24] = 0;
    let other_space = Setup::Request(Offer { port_space: 0x0111, ..offer() }, &[]).to_bytes();
    let plain = b"of a plain iWARP adapter".to_vec();
    let reply = Setup::Reply(offer(), &[]).to_bytes();
    let cut = good[..40].to_vec();
    for data in [other_version, bad_mtu, other_space, plain, reply, cut, Vec::new()] {
        refused(&mut pair, listener, &data);
    }
    // Connections of datagrams, and of services that there are none of.
    for qp_type in [0, 1, 4, 8, 11, 200] {
        refused(&mut pair, listener, &Setup::Request(Offer { qp_type, ..offer() }, &[]).to_bytes());
    }
    pair.expect_nothing();
    assert_eq!(pair.nodes[1].cm.load().ids, 1);
}

/// A stranger's request, which is refused in due form.
#[track_caller]
fn refused(pair: &mut Pair, listener: IdKey, data: &[u8]) {
    let stream = pair.stranger(listener, "10.9.0.1:1").unwrap();
    pair.say(stream, &request(PLAIN, data));
    assert!(!pair.is_open(stream), "{data:x?}");
    assert_eq!(pair.closed.last(), Some(&(1, stream, false)), "the refusal gets there");
}

/// Adapters of plain iWARP connect queue pairs of RC only.
#[test]
fn plain_requests_for_other_queue_pairs_are_refused() {
    const UC: u8 = 3;
    const XRC_RECV: u8 = 10;
    let mut pair = Pair::new(Config::default());
    for kind in [UC, XRC_RECV] {
        let listener = pair.listen_as(kind, PortSpace::Tcp, 5000 + u16::from(kind), 0);
        refused(&mut pair, listener, b"of a plain iWARP adapter");
    }
    pair.expect_nothing();
    assert_eq!(pair.nodes[1].cm.load().ids, 2);
}

#[test]
fn requests_for_a_device_that_is_not_shown_are_refused() {
    let (mut pair, listener) = listening(Config { takes_quipu: false, ..Config::default() });
    refused(&mut pair, listener, &Setup::Request(offer(), &[]).to_bytes());
    let of_either = pair.listen(PortSpace::Ib, 5001, 0);
    let other_space = Offer { port_space: 0x013f, ..offer() };
    refused(&mut pair, of_either, &Setup::Request(other_space, &[]).to_bytes());
    pair.expect_nothing();
    assert_eq!(pair.nodes[1].cm.load().ids, 2);
    // Those of plain iWARP have a device there.
    let stream = pair.stranger(listener, "10.9.0.1:1").unwrap();
    pair.say(stream, &request(PLAIN, b"of a plain iWARP adapter"));
    pair.expect(1, EventKind::ConnectRequest);
}

#[test]
fn whoever_speaks_before_the_answer_loses_its_request() {
    let (mut pair, listener) = listening(Config::default());
    let mut bytes = request(PLAIN, &Setup::Request(offer(), &[]).to_bytes());
    let stream = pair.stranger(listener, "10.9.0.1:1").unwrap();
    bytes.push(7);
    pair.say(stream, &bytes);
    assert!(!pair.is_open(stream));
    let id = pair.expect(1, EventKind::ConnectRequest).id;
    pair.expect_nothing();
    let late = pair.nodes[1].cm.accept(1, id, Some(&Param::default()));
    assert_eq!(late, Err(CallError::WrongState));
}

#[test]
fn a_request_speaks_for_the_address_it_came_from() {
    let (mut pair, listener) = listening(Config::default());
    // The GID is where the queue pair is to be sought; it says nothing about who asks.
    let gid = [0xfe; 16];
    let data = Setup::Request(Offer { gid, qpn: 9, ..offer() }, &[]).to_bytes();
    let stream = pair.stranger(listener, "10.9.0.1:77").unwrap();
    pair.say(stream, &request(PLAIN, &data));
    let child = pair.expect(1, EventKind::ConnectRequest).id;
    let route = pair.nodes[1].cm.route(child).unwrap();
    assert_eq!(route.dst, Some("10.9.0.1:77".parse().unwrap()));
    assert_eq!(route.dgid, gid);
    assert!(pair.is_open(stream), "it waits for as long as the program takes");
    pair.pass(1000 * SECOND);
    assert!(pair.is_open(stream));
}

#[test]
fn words_without_end_are_not_kept() {
    let mut pair = Pair::default();
    let (_, passive) = pair.established();
    // A frame of the longest private data, one byte at a time, again and again.
    let mut frame = [0x77; 259];
    frame[..4].copy_from_slice(&[6, 0, 0, 255]);
    for stream in (0..2).map(|index| quipu_cm::StreamKey::new(index, 0)) {
        for _ in 0..50 {
            for byte in frame.chunks(1) {
                pair.nodes[1].cm.handle_bytes(1, stream, byte);
            }
        }
    }
    pair.run();
    pair.expect_nothing();
    pair.nodes[1].cm.disconnect(1, passive).unwrap();
}
