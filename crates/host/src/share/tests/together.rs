//! Requests that one slot says are done, as the adapter tells of them and as a program hears of it, and those
//! that one slot posts.

use quipu_mem::ring::{Incoming, SlotHeader};
use quipu_nic::WcExtra;

use super::*;
use crate::share::slots::{MAX_RECEIVED, MAX_SENT, MAX_TOGETHER, Teller};

/// Both ends of the rings, the adapter's first.
fn rings() -> [Channel; 2] {
    let memory = Segment::heap(crate::share::rings_len());
    let adapter = Channel::create(&memory, 0, RINGS).unwrap();
    [adapter, Channel::attach(&memory, 0, RINGS).unwrap()]
}

fn send(qp: u32, sequence: u32) -> Tag {
    Tag { qp, receive: false, sequence }
}

fn done(tag: Tag) -> Completion {
    Completion { wr_id: tag.bits(), ..Completion::default() }
}

/// Tells of them; how many it says they are.
fn told(adapter: &mut Channel, done: &[Completion]) -> u32 {
    let mut told = u32::MAX;
    let mut teller = Teller::new(&mut adapter.outgoing.requests, &mut told);
    done.iter().for_each(|done| teller.tell(done));
    teller.finish().unwrap();
    told.wrapping_add(1)
}

fn heard(incoming: &mut Incoming) -> Vec<News> {
    let news = std::iter::from_fn(|| slots::hear(&mut incoming.requests).unwrap()).collect();
    incoming.publish();
    news
}

#[test]
fn sends_that_follow_each_other_are_told_together() {
    let [mut adapter, mut program] = rings();
    let received = done(Tag { receive: true, ..send(5, 7) });
    let failed = Completion { status: WcStatus::LocProtErr, ..done(send(5, 3)) };
    let last = |qp, sequence, count| News::Sent { last: send(qp, sequence), count };
    // The number wraps; another queue, one that was not asked for between, and a failure are for themselves.
    let sent = |qp: u32, of: [u32; 3]| of.map(|sequence| done(send(qp, sequence)));
    let mut all = sent(5, [u32::MAX, 0, 1]).to_vec();
    all.push(received);
    all.extend(sent(5, [2, 4, 5]));
    all.extend(sent(6, [6, 7, 8]));
    all.push(failed);
    assert_eq!(told(&mut adapter, &all), 11);
    let wire = |done: Completion| News::Completion(done);
    let opcode = quipu_nic::WcOpcode::Recv;
    let expected = [
        last(5, 1, 3),
        wire(Completion { opcode, ..received }),
        last(5, 2, 1),
        last(5, 5, 2),
        last(6, 8, 3),
        wire(Completion { opcode: quipu_nic::WcOpcode::Send, ..failed }),
    ];
    assert_eq!(heard(&mut program.incoming), expected);
    let many: Vec<_> = (0..MAX_SENT + 1).map(|sequence| done(send(5, sequence))).collect();
    told(&mut adapter, &many);
    assert_eq!(heard(&mut program.incoming), [last(5, 63, 64), last(5, 64, 1)]);
}

#[test]
fn receives_that_follow_each_other_are_told_together_with_their_octets() {
    let [mut adapter, mut program] = rings();
    let receive = |sequence| Tag { receive: true, ..send(5, sequence) };
    let received = |sequence: u32| Completion {
        byte_len: sequence % 1000,
        opcode: quipu_nic::WcOpcode::Recv,
        ..done(receive(sequence))
    };
    // More than a slot has room for, one alone, one from somebody, a failure.
    let many = MAX_RECEIVED as u32 + 3;
    let from: SocketAddr = "[fe80::1]:7".parse().unwrap();
    let datagram = Completion { extra: WcExtra::From(from.into()), ..received(many) };
    let status = WcStatus::LocLenErr;
    let failed = Completion { status, byte_len: 0, ..received(many + 1) };
    let mut all: Vec<_> = (0..many).map(received).collect();
    all.extend([received(200), received(202), received(203), datagram, failed]);
    assert_eq!(told(&mut adapter, &all), many + 5);
    let together = |last: u32, count: u32| {
        let mut lengths = [0; MAX_RECEIVED];
        for (at, length) in (0..count).zip(&mut lengths) {
            *length = (last + 1 - count + at) % 1000;
        }
        News::Received { last: receive(last), count, lengths }
    };
    let expected = [
        together(23, 24),
        together(26, 3),
        News::Completion(received(200)),
        together(203, 2),
        News::Completion(datagram),
        News::Completion(failed),
    ];
    assert_eq!(heard(&mut program.incoming), expected);
}

#[test]
fn more_or_other_requests_than_one_slot_tells_of_make_no_sense() {
    let [mut adapter, mut program] = rings();
    let (sent, receive) = (send(5, 0), Tag { receive: true, ..send(5, 0) });
    let (most, room) = (MAX_SENT, MAX_RECEIVED as u32);
    let sends = [(sent, 0), (sent, most + 1), (receive, 1)].map(|(tag, count)| (3, tag, count));
    let receives =
        [(receive, 0), (receive, room + 1), (sent, 1)].map(|(tag, count)| (4, tag, count));
    for (opcode, tag, count) in sends.into_iter().chain(receives) {
        let header = SlotHeader { opcode, imm: count, raddr: tag.bits(), ..Default::default() };
        adapter.outgoing.requests.push(&header, &[]).unwrap();
        let heard = slots::hear(&mut program.incoming.requests);
        assert_eq!(heard, Err(RingError::Corrupt), "{count}");
        program.incoming.requests.pop();
    }
}

/// An address makes a body longer, and not what a request carries itself.
#[test]
fn a_request_carries_no_more_itself_than_it_may() {
    let header = |len: usize, to: bool| SlotHeader {
        opcode: 1,
        flags: SendFlags::INLINE.bits() as u8,
        length: len as u32,
        rkey: to.into(),
        ..SlotHeader::default()
    };
    let most = slots::MAX_INLINE;
    for (header, fine) in [
        (header(most, false), true),
        (header(most + 1, false), false),
        (header(24 + most, true), true),
        (header(24 + most, false), false),
    ] {
        let [mut adapter, mut program] = rings();
        let position = program.outgoing.request_bytes.reserve(header.length).unwrap();
        program.outgoing.request_bytes.write(position, &vec![0; header.length as usize]);
        program.outgoing.requests.push(&header, &[]).unwrap();
        let (ring, bytes) = (&mut adapter.incoming.requests, &mut adapter.incoming.request_bytes);
        let (mut body, mut sges) = (slots::BODY, [Sge::default(); slots::MAX_SGE]);
        let taken = slots::take(ring, bytes, &mut body, &mut sges);
        assert_eq!(taken.is_ok(), fine, "{header:?}");
    }
}

#[test]
fn requests_that_share_a_slot_have_one_piece_each_and_fit() {
    let header = |count: u32, more: u32, bytes: u32| SlotHeader {
        opcode: 2,
        inline_len: bytes.min(96) as u16,
        length: bytes,
        imm: count,
        ack: more,
        ..SlotHeader::default()
    };
    let most = MAX_TOGETHER as u32;
    let fine = header(most, most - 1, 16 * most);
    let wrong = [
        header(most, most, 16 * most),
        header(most, 1, 16 * most),
        header(0, u32::MAX, 0),
        header(most + 1, most, 16 * (most + 1)),
        SlotHeader { rkey: 1, ..header(2, 1, 24 + 2 * 16) },
        SlotHeader { opcode: 1, flags: SendFlags::INLINE.bits() as u8, ..header(2, 1, 32) },
    ];
    for header in wrong.into_iter().chain([fine]) {
        let [mut adapter, mut program] = rings();
        program.outgoing.requests.push(&header, &[]).unwrap();
        // The length is of what is inline, and not of the payload that was pushed: none.
        let (ring, bytes) = (&mut adapter.incoming.requests, &mut adapter.incoming.request_bytes);
        let (mut body, mut sges) = (slots::BODY, [Sge::default(); slots::MAX_SGE]);
        let taken = slots::take(ring, bytes, &mut body, &mut sges).map(|it| it.map(|(_, of)| of));
        let expected = if header == fine { Ok(Some(6)) } else { Err(RingError::Corrupt) };
        assert_eq!(taken, expected, "{header:?}");
    }
}
