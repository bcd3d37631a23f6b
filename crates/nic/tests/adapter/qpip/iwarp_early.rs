//! Placement out of order: segments of TCP that come behind a gap, honest ones and others.

use std::net::IpAddr;

use quipu_nic::iwarp::Params;
use quipu_nic::iwarp::wire::rdmap::TaggedOp;
use quipu_nic::iwarp::{Negotiated, Sender};
use quipu_nic::*;
use quipu_wire::tcp::Repr;

use super::iwarp::{adopt, complete, connected, request, stream};
use super::net::{Net, SECOND, Weather, pattern, segment_to_host_1, v6};
use crate::pair::Buffer;

/// Octets of the messages here: many segments.
const LEN: usize = 40_000;

/// The payload of a frame to host 1, if it is a long segment of TCP.
fn payload(frame: &[u8]) -> Option<(Repr, &[u8])> {
    let (header, at) = Repr::parse(frame.get(40..)?).ok()?;
    let payload = &frame[40 + at..];
    (frame[6] == 6 && payload.len() > 100).then_some((header, payload))
}

/// Has segments to host 1 begin and end with FPDUs for long enough.
fn warm_up(net: &mut Net, qps: [QpId; 2], there: &Buffer) {
    let here = net.buffer(0, 64);
    let (addr, rkey) = (there.addr(), there.key());
    for n in 0..8 {
        request(net, 0, qps[0], n, SendOp::Write { addr, rkey }, &[here.sge(0, 64)]);
        complete(net, 0, 1);
        net.run_for(SECOND);
    }
}

/// Posts a long write whose segment number `which` is lost once; what of it host 1 has when all others have
/// come. The lost one comes after that.
fn write_with_a_gap(net: &mut Net, qps: [QpId; 2], there: &Buffer, which: usize) -> Vec<u8> {
    let here = net.buffer(0, LEN);
    let bytes = pattern(9, LEN);
    here.fill(0, &bytes);
    there.fill(0, &[0; LEN]);
    let (mut count, mut lost) = (0, None);
    net.filter = Some(Box::new(move |to, frame| {
        let Some((header, _)) = payload(frame).filter(|_| to == 1) else { return true };
        count += 1;
        if count == which {
            lost = Some(header.seq);
        }
        // However often it is sent.
        lost != Some(header.seq)
    }));
    let (addr, rkey) = (there.addr(), there.key());
    request(net, 0, qps[0], 7, SendOp::Write { addr, rkey }, &[here.sge(0, LEN)]);
    net.run_for(5_000_000);
    let early = there.bytes(0, LEN);
    net.filter = None;
    complete(net, 0, 1);
    net.run_for(SECOND);
    assert!(there.bytes(0, LEN) == bytes, "in the end all is there");
    early
}

#[test]
fn what_comes_behind_a_gap_is_placed_before_that_is_filled() {
    let mut net = Net::new();
    let qps = connected(&mut net);
    let there = net.buffer(1, LEN);
    warm_up(&mut net, qps, &there);
    let early = write_with_a_gap(&mut net, qps, &there, 3);
    let bytes = pattern(9, LEN);
    // A segment has 1408 octets of payload; its third is missing.
    let (gap, behind) = (2 * 1408..3 * 1408, 3 * 1408..LEN / 1408 * 1408);
    assert!(early[..gap.start] == bytes[..gap.start]);
    assert!(early[gap.clone()].iter().all(|&byte| byte == 0));
    assert!(early[behind.clone()] == bytes[behind]);
    assert!(
        early[LEN / 1408 * 1408..].iter().all(|&byte| byte == 0),
        "the end of a message waits for its turn"
    );
    assert!(net.adapter(1).placed_early(qps[1]) >= 20);
    assert_eq!(net.state(1, qps[1]), QpState::Rts);
}

/// A read's answer, too.
#[test]
fn the_answer_of_a_read_is_placed_out_of_order() {
    let mut net = Net::new();
    let qps = connected(&mut net);
    let (here, there) = (net.buffer(0, LEN), net.buffer(1, LEN));
    warm_up(&mut net, qps, &there);
    let bytes = pattern(4, LEN);
    here.fill(0, &bytes);
    let mut count = 0;
    net.filter = Some(Box::new(move |to, frame| {
        count += usize::from(to == 1 && payload(frame).is_some());
        count != 3
    }));
    let (addr, rkey) = (here.addr(), here.key());
    request(&mut net, 1, qps[1], 7, SendOp::Read { addr, rkey }, &[there.sge(0, LEN)]);
    complete(&mut net, 1, 1);
    assert!(there.bytes(0, LEN) == bytes);
    assert!(net.adapter(1).placed_early(qps[1]) > 0);
}

/// Without CRCs nobody can tell an FPDU.
#[test]
fn without_crcs_nothing_is_placed_out_of_order() {
    let mut net = Net::new();
    let streams = stream(&mut net);
    let bare = || Params { crc: false, ..Params::peer_to_peer(4, 4) };
    let qps = adopt(&mut net, streams, [bare(), bare()]);
    let there = net.buffer(1, LEN);
    warm_up(&mut net, qps, &there);
    let early = write_with_a_gap(&mut net, qps, &there, 3);
    assert!(early[3 * 1408..].iter().all(|&byte| byte == 0));
    assert_eq!(net.adapter(1).placed_early(qps[1]), 0);
}

/// The later write counts, whatever comes first; and so it is with reads of what was written.
#[test]
fn overlapping_writes_leave_what_they_would_in_order() {
    let mut placed = 0;
    for seed in 1..12 {
        let mut net = Net::with(seed, |_| {});
        let qps = connected(&mut net);
        let (here, there) = (net.buffer(0, 10 * LEN), net.buffer(1, LEN));
        warm_up(&mut net, qps, &there);
        net.weather = Weather { loss: 60, doubled: 20, late: 200_000, ..Weather::default() };
        let mut model = vec![0; LEN];
        there.fill(0, &model);
        for round in 0..4 {
            for n in 0..8 {
                let len = 1 + net.draw(LEN as u64 - 1) as usize;
                let at = net.draw((LEN - len) as u64 + 1) as usize;
                let bytes = pattern(seed * 100 + round * 10 + n, len);
                let from = n as usize * LEN;
                here.fill(from, &bytes);
                model[at..at + len].copy_from_slice(&bytes);
                let (addr, rkey) = (there.addr() + at as u64, there.key());
                let sges = [here.sge(from, len)];
                request(&mut net, 0, qps[0], n, SendOp::Write { addr, rkey }, &sges);
            }
            let (addr, rkey) = (there.addr(), there.key());
            let sges = [here.sge(8 * LEN, LEN)];
            request(&mut net, 0, qps[0], 9, SendOp::Read { addr, rkey }, &sges);
            complete(&mut net, 0, 9);
            assert!(there.bytes(0, LEN) == model, "seed {seed}, round {round}");
            assert!(here.bytes(8 * LEN, LEN) == model, "seed {seed}, round {round}");
        }
        placed += net.adapter(1).placed_early(qps[1]);
    }
    assert!(placed > 100, "{placed}");
}

/// The segments of a long write, which host 1 has not got.
fn withheld(net: &mut Net, qps: [QpId; 2], there: &Buffer, bytes: &[u8]) -> Vec<(Repr, Vec<u8>)> {
    let here = net.buffer(0, bytes.len());
    here.fill(0, bytes);
    let (addr, rkey) = (there.addr(), there.key());
    (net.keep, net.sent) = (true, Default::default());
    net.filter = Some(Box::new(|to, _| to == 0));
    request(net, 0, qps[0], 7, SendOp::Write { addr, rkey }, &[here.sge(0, bytes.len())]);
    // Before anything is sent again.
    net.run_for(100_000);
    net.keep = false;
    let frames = std::mem::take(&mut net.sent[0]);
    frames.iter().filter_map(|frame| payload(frame)).map(|(h, p)| (h, p.to_vec())).collect()
}

fn inject(net: &mut Net, header: &Repr, skipped: usize, payload: &[u8]) {
    let IpAddr::V6(source) = v6(0) else { unreachable!() };
    let header = Repr { seq: header.seq + skipped as u32, ..*header };
    net.inject(1, &segment_to_host_1(source, &header, payload));
}

/// A box on the way joins what was sent, and cuts it elsewhere; TCP sends again what was placed already.
#[test]
fn other_cuts_and_repetitions_change_nothing() {
    let bytes = pattern(5, 12_000);
    for cut in [1, 700, 1399, 1428, 2000, 3000] {
        let mut net = Net::new();
        let qps = connected(&mut net);
        let there = net.buffer(1, LEN);
        warm_up(&mut net, qps, &there);
        let segments = withheld(&mut net, qps, &there, &bytes);
        assert!(segments.len() >= 8, "{}", segments.len());
        let (first, whole) = (segments[0].0, segments.iter().map(|(_, bytes)| &bytes[..]));
        let whole = whole.collect::<Vec<_>>().concat();
        // As they are, the third is missing; then all of them anew.
        for (header, payload) in &segments[3..6] {
            inject(&mut net, header, 0, payload);
        }
        assert_eq!(net.adapter(1).placed_early(qps[1]), 3);
        let mut at = whole.len().saturating_sub(cut) / cut * cut;
        while at > 0 {
            let end = (at + cut).min(whole.len());
            inject(&mut net, &first, at, &whole[at..end]);
            at -= cut;
        }
        inject(&mut net, &first, 0, &whole[..cut]);
        net.filter = None;
        complete(&mut net, 0, 1);
        net.run_for(SECOND);
        assert!(there.bytes(0, bytes.len()) == bytes, "{cut}");
        assert_eq!(net.state(1, qps[1]), QpState::Rts, "{cut}");
    }
}

/// An FPDU of a Write as a peer may make it.
fn fpdu(there: &Buffer, at: u64, last: bool, bytes: &[u8]) -> Vec<u8> {
    let mut sender = Sender::new(&Negotiated::plain(), 60_000);
    let to = there.addr() + at;
    let mut message = sender.begin_tagged(TaggedOp::Write, iwarp::wire::Stag(there.key()), to);
    let mut out = vec![0; bytes.len() + 64];
    // The rest of the message is never sent.
    let len = bytes.len() as u32 + if last { 0 } else { 4000 };
    let room = out.len() - 44;
    let room = if last { &mut out[..] } else { &mut out[..room] };
    let staged = sender.segment(&mut message, room, len, |place| {
        let len = place.len().min(bytes.len());
        place[..len].copy_from_slice(&bytes[..len]);
    });
    let staged = staged.expect("it fits");
    out.truncate(staged.bytes);
    out
}

/// What looks like an FPDU behind a gap, and is payload of another, as its turn shows: the stream is what it
/// is, and nothing is placed early after that.
#[test]
fn an_fpdu_within_an_fpdu_is_found_out() {
    let mut net = Net::new();
    let qps = connected(&mut net);
    let there = net.buffer(1, LEN);
    warm_up(&mut net, qps, &there);
    // A write to the front, whose payload has the image of a write to the back.
    let image = fpdu(&there, 30_000, false, &[0xee; 1088]);
    let mut bytes = pattern(6, 4 * 1408);
    let at = 1408 + 100;
    bytes[at..at + image.len()].copy_from_slice(&image);
    there.fill(0, &[0; LEN]);
    let segments = withheld(&mut net, qps, &there, &bytes);
    let whole = segments.iter().map(|(_, bytes)| &bytes[..]).collect::<Vec<_>>().concat();
    let found = whole.windows(image.len()).position(|window| window == image).unwrap();
    let first = segments[0].0;
    inject(&mut net, &first, found, &image);
    assert_eq!(net.adapter(1).placed_early(qps[1]), 1, "it could not be told");
    net.filter = None;
    complete(&mut net, 0, 1);
    net.run_for(5 * SECOND);
    assert!(there.bytes(0, bytes.len()) == bytes);
    assert_eq!(net.state(1, qps[1]), QpState::Rts);
    write_with_a_gap(&mut net, qps, &there, 3);
    assert_eq!(net.adapter(1).placed_early(qps[1]), 1, "not again");
}

/// Forged, cut or forbidden: nothing of it is placed, and what becomes of it is decided in its turn.
#[test]
fn what_is_not_surely_an_fpdu_waits_for_its_turn() {
    let good = |there: &Buffer| fpdu(there, 0, false, &[0xee; 1088]);
    type Make = Box<dyn Fn(&Buffer) -> Vec<u8>>;
    let cases: [(&str, Make); 6] = [
        (
            "a wrong CRC",
            Box::new(move |there| {
                let mut bytes = good(there);
                bytes[100] ^= 1;
                bytes
            }),
        ),
        ("something behind it", Box::new(move |there| [good(there), vec![0; 4]].concat())),
        ("cut short", Box::new(move |there| good(there)[..1000].to_vec())),
        ("no such memory", Box::new(|there| fpdu(there, LEN as u64, false, &[0xee; 1088]))),
        ("the end of a message", Box::new(|there| fpdu(there, 0, true, &[0xee; 1088]))),
        ("noise", Box::new(|_| pattern(1, 1200))),
    ];
    for (what, make) in cases {
        let mut net = Net::new();
        let qps = connected(&mut net);
        let there = net.buffer(1, LEN);
        warm_up(&mut net, qps, &there);
        there.fill(0, &[0; LEN]);
        let segments = withheld(&mut net, qps, &there, &pattern(7, 12_000));
        let bytes = make(&there);
        inject(&mut net, &segments[1].0, 0, &bytes);
        assert_eq!(net.adapter(1).placed_early(qps[1]), 0, "{what}");
        assert!(there.bytes(0, LEN).iter().all(|&byte| byte == 0), "{what}");
        let bytes = good(&there);
        inject(&mut net, &segments[5].0, 0, &bytes);
        assert_eq!(net.adapter(1).placed_early(qps[1]), 1, "{what}: but this is one");
    }
}

/// A peer whose segments begin and end anywhere, as those of a kernel's socket, is not trusted in this.
#[test]
fn a_stream_that_is_not_aligned_is_not_placed_out_of_order() {
    let mut net = Net::new();
    let qps = connected(&mut net);
    let there = net.buffer(1, LEN);
    warm_up(&mut net, qps, &there);
    let segments = withheld(&mut net, qps, &there, &pattern(7, 12_000));
    let whole = segments.iter().map(|(_, bytes)| &bytes[..]).collect::<Vec<_>>().concat();
    let first = segments[0].0;
    inject(&mut net, &first, 0, &whole[..1000]);
    inject(&mut net, &first, 1000, &whole[1000..segments[0].1.len()]);
    inject(&mut net, &segments[3].0, 0, &segments[3].1);
    assert_eq!(net.adapter(1).placed_early(qps[1]), 0);
    net.filter = None;
    complete(&mut net, 0, 1);
    net.run_for(5 * SECOND);
    assert!(there.bytes(0, 12_000) == pattern(7, 12_000));
}
