//! Between which ends FPDUs carry CRCs (RFC 5044 7.1.1), as `specs/quipu-wire.md` 2 says, and what is done
//! where they do not: payload is transmitted from the memory it lies in.

use std::net::{IpAddr, Ipv4Addr};

use crate::pair::{Pair, Way};
use quipu_iwarp::wire::mpa::{FrameKind, StartFrame, crc32c};
use quipu_nic::mem::Sge;
use quipu_nic::*;

/// Connects two hosts that ask for CRCs so, has the first send six bytes, and gives the C bits of request and
/// reply, and whether the Send has a CRC.
fn crcs(ends: [(Ipv4Addr, Crc); 2]) -> ([bool; 2], bool) {
    let settings = ends.map(|(address, crc)| {
        move |config: &mut Config| {
            config.gid = Gid::from(IpAddr::V4(address));
            config.crc = crc;
        }
    });
    let mut pair = Pair::with(Way::Stream(usize::MAX), settings);
    let qps = [0, 1].map(|host| pair.hosts[host].qp());
    pair.connect(qps);
    let [from, to] = [0, 1].map(|host| pair.buffer(host, 64));
    from.fill(0, b"abcdef");
    pair.recv(1, qps[1], 2, &[to.sge(0, 64)]);
    pair.send(0, qps[0], 1, SendOp::Send, &[from.sge(0, 6)]);
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
    assert_eq!(pair.polled(1), [(2, WcStatus::Success)]);
    assert_eq!(to.bytes(0, 6), b"abcdef");

    let stream = pair.said(0);
    let bits = [(FrameKind::Request, stream), (FrameKind::Reply, pair.said(1))]
        .map(|(kind, bytes)| StartFrame::parse(kind, bytes).unwrap().crc);
    let fpdu = &stream[StartFrame::frame_len(FrameKind::Request, stream).unwrap().unwrap()..];
    // A length, an untagged header, six bytes and no padding.
    let (covered, crc) = fpdu[..2 + 18 + 6 + 2 + 4].split_at(2 + 18 + 6 + 2);
    let there = crc == crc32c(covered).to_le_bytes();
    assert!(there || crc == [0; 4], "neither a CRC nor none: {crc:?}");
    (bits, there)
}

const A: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

#[test]
fn fpdus_that_cross_a_wire_have_crcs() {
    assert_eq!(crcs([(A, Crc::BetweenHosts), (B, Crc::BetweenHosts)]), ([true; 2], true));
}

#[test]
fn fpdus_of_one_address_have_none() {
    assert_eq!(crcs([(A, Crc::BetweenHosts), (A, Crc::BetweenHosts)]), ([false; 2], false));
    let [here, there] = [1, 2].map(|last| Ipv4Addr::new(127, 0, 0, last));
    assert_eq!(crcs([(here, Crc::BetweenHosts), (there, Crc::BetweenHosts)]), ([false; 2], false));
}

#[test]
fn whoever_asks_for_crcs_gets_them() {
    assert_eq!(crcs([(A, Crc::BetweenHosts), (A, Crc::Always)]), ([false, true], true));
    assert_eq!(crcs([(A, Crc::Always), (A, Crc::BetweenHosts)]), ([true; 2], true));
    assert_eq!(crcs([(A, Crc::Never), (B, Crc::BetweenHosts)]), ([false, true], true));
    assert_eq!(crcs([(A, Crc::Never), (B, Crc::Never)]), ([false; 2], false));
}

/// Two queue pairs whose streams have no CRCs.
fn bare(way: Way) -> (Pair, [QpId; 2]) {
    let mut pair = Pair::with(way, [|config: &mut Config| config.crc = Crc::Never; 2]);
    let qps = [0, 1].map(|host| pair.hosts[host].qp());
    pair.connect(qps);
    pair.run();
    (pair, qps)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

const LARGE: usize = 200_001;

/// Large messages of every kind, in pieces that are no multiple of anything.
#[test]
fn payload_is_sent_from_where_it_lies_and_received_where_it_belongs() {
    for (way, places) in [(usize::MAX, true), (977, true), (30_011, true), (977, false)] {
        let way = Way::Stream(way);
        let (mut pair, qps) = bare(way);
        pair.places = places;
        let [from, to] = [0, 1].map(|host| pair.buffer(host, 3 * LARGE));
        from.fill(0, &pattern(LARGE));
        let list = [from.sge(0, 1), from.sge(1, 70_000), from.sge(70_001, LARGE - 70_001)];
        pair.recv(1, qps[1], 9, &[to.sge(0, 65_000), to.sge(65_000, LARGE)]);
        pair.send(0, qps[0], 1, SendOp::Send, &list);
        let (addr, rkey) = (to.addr() + LARGE as u64, to.key());
        pair.send(0, qps[0], 2, SendOp::Write { addr, rkey }, &list);
        pair.send(0, qps[0], 3, SendOp::Read { addr, rkey }, &[from.sge(LARGE, LARGE)]);
        pair.run();
        assert_eq!(pair.polled(0), [1, 2, 3].map(|id| (id, WcStatus::Success)), "{way:?}");
        assert_eq!(pair.polled(1), [(9, WcStatus::Success)]);
        assert!(to.bytes(0, LARGE) == pattern(LARGE));
        assert!(to.bytes(LARGE, LARGE) == pattern(LARGE));
        assert!(from.bytes(LARGE, LARGE) == pattern(LARGE));
        let placed = pair.placed > LARGE;
        assert_eq!(placed, places && way != Way::Stream(usize::MAX), "{way:?}: {}", pair.placed);
    }
}

/// Half of a large message has come, and the memory that it was for is taken back.
#[test]
fn nothing_is_received_into_memory_that_was_taken_back() {
    for op in ["send", "write", "read"] {
        let (mut pair, qps) = bare(Way::Stream(30_011));
        let [from, to] = [0, 1].map(|host| pair.buffer(host, LARGE));
        let (addr, rkey) = (to.addr(), to.key());
        let all = [from.sge(0, LARGE)];
        // Host 1 receives in all cases.
        let (sender, gone) = match op {
            "send" => {
                pair.recv(1, qps[1], 9, &[to.sge(0, LARGE)]);
                pair.send(0, qps[0], 1, SendOp::Send, &all);
                (0, to.region.id)
            }
            "write" => {
                pair.send(0, qps[0], 1, SendOp::Write { addr, rkey }, &all);
                (0, to.region.id)
            }
            _ => {
                let read = SendOp::Read { addr: from.addr(), rkey: from.key() };
                pair.send(1, qps[1], 1, read, &[to.sge(0, LARGE)]);
                (1, to.region.id)
            }
        };
        let conn = pair.stream_ends()[1];
        let mut places = Vec::new();
        while pair.hosts[1].adapter.place_next(conn, &mut places) == 0 {
            pair.step();
        }
        assert_eq!(places.len(), 1);
        assert!((addr as usize..addr as usize + LARGE).contains(&places[0].0));
        pair.hosts[1].adapter.dereg_mr(pair.now, gone).unwrap();
        assert_eq!(pair.hosts[1].adapter.place_next(conn, &mut places), 0);
        assert_eq!(places, []);
        let before = to.bytes(0, LARGE);
        pair.run();
        assert!(to.bytes(0, LARGE) == before, "{op}");
        let failed = match op {
            "send" => WcStatus::RemOpErr,
            "write" => WcStatus::RemAccessErr,
            _ => WcStatus::LocProtErr,
        };
        assert_eq!(pair.polled(sender), [(1, failed)], "{op}");
    }
}

/// A write that begins inside its region and ends behind it: refused, however it comes.
#[test]
fn what_has_no_place_is_refused() {
    for places in [true, false] {
        let (mut pair, qps) = bare(Way::Stream(1000));
        pair.places = places;
        let [from, to] = [0, 1].map(|host| pair.buffer(host, LARGE));
        let (addr, rkey) = (to.addr() + 1000, to.key());
        pair.send(0, qps[0], 1, SendOp::Write { addr, rkey }, &[from.sge(0, LARGE)]);
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::RemAccessErr)]);
    }
}

/// What the adapter writes into the buffer for a write of a list, and what it gathers.
fn gathered(pair: &mut Pair, qps: [QpId; 2], list: &[Sge]) -> (usize, Vec<Piece>) {
    let conn = pair.stream_ends()[0];
    pair.send(0, qps[0], 1, SendOp::Write { addr: 0, rkey: 0 }, list);
    let (mut out, mut gather) = (vec![0; 128 * 1024], Gather::new(100_000));
    let adapter = &mut pair.hosts[0].adapter;
    let used = adapter.transmit_from_memory(pair.now, conn, &mut out, &mut gather);
    (used, gather.pieces().to_vec())
}

#[test]
fn only_large_payloads_are_gathered_and_no_more_than_asked_for() {
    let (mut pair, qps) = bare(Way::Stream(usize::MAX));
    let from = pair.buffer(0, 1 << 20);
    assert_eq!(gathered(&mut pair, qps, &[from.sge(0, 1000)]).1, []);
    let (used, pieces) = gathered(&mut pair, qps, &[from.sge(0, 1 << 20)]);
    let bytes: usize = pieces.iter().map(|piece| piece.len).sum();
    assert!((100_000..100_000 + 65_536).contains(&bytes), "{bytes}");
    assert_eq!(pieces[0], Piece { at: 16, addr: from.addr() as usize, len: pieces[0].len });
    assert!(used < 1000, "the headers alone");
}

/// A key of the list that went away meanwhile: what was gathered for it is not transmitted.
#[test]
fn payload_that_may_not_be_read_is_not_gathered() {
    let (mut pair, qps) = bare(Way::Stream(usize::MAX));
    let [whole, gone] = [0, 1].map(|_| pair.buffer(0, 100_000));
    let conn = pair.stream_ends()[0];
    let list = [whole.sge(0, 100_000), gone.sge(0, 100_000)];
    pair.send(0, qps[0], 1, SendOp::Write { addr: 0, rkey: 0 }, &list);
    let (mut out, mut gather) = (vec![0; 128 * 1024], Gather::new(10_000));
    let adapter = &mut pair.hosts[0].adapter;
    assert!(adapter.transmit_from_memory(pair.now, conn, &mut out, &mut gather) > 0);
    let first = gather.bytes();
    adapter.dereg_mr(pair.now, gone.region.id).unwrap();
    let used = adapter.transmit_from_memory(pair.now, conn, &mut out, &mut gather);
    assert!(first > 0 && first < 100_000);
    assert_eq!((used, gather.bytes(), gather.pieces()), (0, 0, &[][..]));
    assert_eq!(pair.polled(0), [(1, WcStatus::LocProtErr)]);
}

/// Every byte of a large message counts, also those that were received into their place: what is executed is
/// acknowledged before the receiver is idle and releases acknowledgements.
#[test]
fn a_large_message_is_acknowledged_at_once() {
    const BYTES: usize = 300_000;
    for (places, is_send) in [(true, true), (true, false), (false, true), (false, false)] {
        let (mut pair, qps) = bare(Way::Stream(30_011));
        pair.places = places;
        let [from, to] = [0, 1].map(|host| pair.buffer(host, BYTES));
        pair.recv(1, qps[1], 9, &[to.sge(0, BYTES)]);
        let write = SendOp::Write { addr: to.addr(), rkey: to.key() };
        let op = if is_send { SendOp::Send } else { write };
        pair.send(0, qps[0], 1, op, &[from.sge(0, BYTES)]);
        // Each step ends with what came, and the next one begins with what is released.
        while !pair.hosts[1].adapter.wants_transmit() {
            assert!(pair.step(), "places {places}, send {is_send}");
        }
        pair.run();
        assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
        assert_eq!(pair.placed > 0, places);
    }
}
