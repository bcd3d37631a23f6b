//! Messages through a sender and a receiver, over any split of the stream.

use crate::common::{
    Collector, Msg, drain, first, receiver, remove_markers, send, sender, tagged, untagged,
};
use proptest::prelude::*;
use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Immediate, ReadRequest, TaggedOp, UntaggedOp,
};
use quipu_iwarp::wire::{Stag, ddp, mpa};
use quipu_iwarp::{
    Belonging, Extensions, Frame, Negotiated, ProtocolError, Receiver, Segment, SendKind, Sender,
};

#[test]
fn write_bytes() {
    let mut stream = Vec::new();
    let mut sender = sender();
    let msg = sender.begin_tagged(TaggedOp::Write, Stag(0x0102_0304), 0x1000);
    assert_eq!(msg.msn(), None);
    send(&mut sender, msg, b"abcdef", 100, &mut stream);
    let expected = b"\x00\x14\xc1\x40\x01\x02\x03\x04\0\0\0\0\0\0\x10\0abcdef\0\0\xbb\xeb\xec\xf5";
    assert_eq!(stream, expected);
}

#[test]
fn requests_and_responses_bytes() {
    let mut sender = sender();
    let mut out = [0xee; 128];
    let mut msg = sender.begin_untagged(UntaggedOp::ReadRequest, 0);
    let request = ReadRequest {
        sink_stag: Stag(0xaabb_ccdd),
        sink_to: 0x10,
        size: 4096,
        source_stag: Stag(0x0102_0304),
        source_to: 0x2000,
    };
    let len = sender.whole(&mut msg, &mut out, &request).unwrap();
    assert_eq!(len, 52);
    assert_eq!(out[..20], *b"\x00\x2e\x41\x41\0\0\0\0\0\0\0\x01\0\0\0\x01\0\0\0\0");
    assert_eq!(out[48..52], [0xd3, 0x01, 0x1b, 0x66]);

    let mut msg = sender.begin_untagged(UntaggedOp::AtomicRequest, 0);
    let op = AtomicOp::CmpSwap { swap: 1, swap_mask: !0, compare: 5, compare_mask: !0 };
    let request = AtomicRequest { id: 9, stag: Stag(0x0102_0304), to: 0x3000, op };
    assert_eq!(sender.whole(&mut msg, &mut out[..75], &request), None);
    assert_eq!(msg.offset(), 0);
    let len = sender.whole(&mut msg, &mut out[..76], &request).unwrap();
    assert_eq!(len, 76);
    assert_eq!(msg.msn(), Some(2), "reads and atomics share a queue");
    assert_eq!(out[72..76], [0xc1, 0x07, 0x78, 0x51]);

    let mut msg = sender.begin_untagged(UntaggedOp::AtomicResponse, 0);
    let response = AtomicResponse { id: 9, original: 5 };
    let len = sender.whole(&mut msg, &mut out, &response).unwrap();
    assert_eq!(len, 36);
    assert_eq!(out[32..36], [0x72, 0x40, 0x7c, 0x0e]);
}

#[test]
fn crc_field_is_zero_where_crcs_are_off() {
    let negotiated = Negotiated { crc: false, ..Negotiated::plain() };
    let mut sender = Sender::new(&negotiated, 1500);
    let mut stream = Vec::new();
    let msg = sender.begin_untagged(UntaggedOp::Send, 0);
    send(&mut sender, msg, b"abc", 100, &mut stream);
    assert_eq!(stream[stream.len() - 5..], [0; 5]);
    stream[27] = 0x55; // Last byte of the CRC field.
    let mut receiver = Receiver::new(&negotiated, Extensions::NONE);
    assert!(receiver.next(&stream).unwrap().is_some(), "not looked at");
}

#[test]
fn segment_sizes() {
    let mut sender = sender();
    let msg = sender.begin_tagged(TaggedOp::Write, Stag(1), 0);
    let segment = |room: usize, remaining: u32| {
        let mut out = vec![0; room];
        let staged = sender.clone().segment(&mut msg.clone(), &mut out, remaining, |_| ())?;
        Some((staged.bytes, staged.payload, staged.last))
    };
    assert_eq!(segment(20, 0), Some((20, 0, true)));
    assert_eq!(segment(19, 0), None);
    assert_eq!(segment(28, 8), Some((28, 8, true)));
    assert_eq!(segment(27, 8), None, "a small message is not divided");
    assert_eq!(segment(1044, 1_000_000), Some((1044, 1024, false)));
    assert_eq!(segment(1043, 1_000_000), None);
    assert_eq!(segment(1107, 1_000_000), Some((1044, 1024, false)));
    assert_eq!(segment(1 << 20, 1_000_000), Some((20 + 65_472, 65_472, false)));
    assert_eq!(segment(1 << 20, 65_472), Some((20 + 65_472, 65_472, true)));
}

#[test]
fn refusing_room_changes_nothing() {
    let mut sender = sender();
    let mut msg = sender.begin_untagged(UntaggedOp::Send, 0);
    let before = msg;
    let fill = |_: &mut [u8]| panic!("nothing to fill");
    assert_eq!(sender.segment(&mut msg, &mut [0; 40], 4096, fill), None);
    assert_eq!(msg, before);
}

#[test]
fn maximum_fpdu() {
    // A MULPDU of 65535 does not overflow the length field.
    let mut sender = Sender::new(&Negotiated::plain(), u16::MAX);
    let payload = vec![7; 65_535 - 14];
    let mut stream = Vec::new();
    let msg = sender.begin_tagged(TaggedOp::Write, Stag(1), 0);
    send(&mut sender, msg, &payload, 70_000, &mut stream);
    assert_eq!(stream.len(), mpa::fpdu_len(65_535));
    let mut collector = Collector::default();
    drain(&mut receiver(), &stream, |_, segment| collector.take(segment)).unwrap();
    assert_eq!(collector.messages, [Msg::Write(1, 0, payload)]);
}

#[test]
fn interleaved_queues() {
    // Tagged segments and other queues may come between the segments of a message (RFC 5041 5.3).
    let mut sender = Sender::new(&Negotiated::plain(), 128);
    let mut out = [0; 200];
    let mut stream = Vec::new();
    let mut msg = sender.begin_untagged(UntaggedOp::Send, 0);
    let staged = sender.segment(&mut msg, &mut out, 150, |place| place.fill(1)).unwrap();
    stream.extend(&out[..staged.bytes]);
    let mut write = sender.begin_tagged(TaggedOp::Write, Stag(9), 0);
    let wrote = sender.segment(&mut write, &mut out, 4, |place| place.fill(2)).unwrap();
    stream.extend(&out[..wrote.bytes]);
    let mut control = sender.begin_untagged(UntaggedOp::Control, 0);
    let len = sender.whole(&mut control, &mut out, &Control::Ack { count: 1 }).unwrap();
    stream.extend(&out[..len]);
    let left = 150 - staged.payload;
    let rest = sender.segment(&mut msg, &mut out, left, |place| place.fill(3)).unwrap();
    assert!(rest.last);
    stream.extend(&out[..rest.bytes]);

    let mut seen = Vec::new();
    drain(&mut receiver(), &stream, |_, segment| {
        seen.push(match segment {
            Segment::Send { mo, last, .. } => (mo, last),
            _ => (u32::MAX, segment.ends_request()),
        });
    })
    .unwrap();
    let expected = [(0, false), (u32::MAX, true), (u32::MAX, false), (staged.payload, true)];
    assert_eq!(seen, expected);
}

#[test]
fn needed_bytes() {
    let mut stream = Vec::new();
    let mut sender = sender();
    let msg = sender.begin_untagged(UntaggedOp::Send, 0);
    send(&mut sender, msg, &[1; 100], 200, &mut stream);
    assert_eq!(stream.len(), 124);
    assert_eq!(Receiver::needed(&[]), 20);
    assert_eq!(Receiver::needed(&stream[..1]), 19);
    for have in 2..=stream.len() {
        assert_eq!(Receiver::needed(&stream[..have]), stream.len() - have);
        assert_eq!(receiver().next(&stream[..have]).unwrap().is_some(), have == stream.len());
    }
}

#[test]
fn a_message_sent_again_keeps_its_msn() {
    let mut sender = sender();
    let mut out = [0; 100];
    let mut msg = sender.begin_untagged(UntaggedOp::Send, 0);
    let fill = |place: &mut [u8]| place.fill(1);
    let staged = sender.segment(&mut msg, &mut out, 8, fill).unwrap();
    let once = out[..staged.bytes].to_vec();
    msg.restart();
    sender.begin_untagged(UntaggedOp::Send, 0);
    let staged = sender.segment(&mut msg, &mut out, 8, fill).unwrap();
    assert_eq!(out[..staged.bytes], once);
}

fn message() -> impl Strategy<Value = Msg> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..6000);
    let kind = prop_oneof![
        Just(SendKind::Plain),
        any::<u32>().prop_map(|stag| SendKind::Invalidate(Stag(stag))),
        any::<u32>().prop_map(SendKind::Immediate),
    ];
    let to = any::<u32>().prop_map(u64::from);
    prop_oneof![
        (any::<u32>(), to.clone(), bytes()).prop_map(|(stag, to, b)| Msg::Write(stag, to, b)),
        (any::<u32>(), to, bytes()).prop_map(|(stag, to, b)| Msg::ReadResponse(stag, to, b)),
        (kind, any::<bool>(), bytes()).prop_map(|(kind, se, b)| Msg::Send(kind, se, b)),
        (any::<[u32; 2]>(), any::<bool>()).prop_map(|([imm, write_len], se)| {
            Msg::Immediate(Immediate { imm, write_len }, se)
        }),
        Just(Msg::Read(crate::common::some_read())),
        Just(Msg::Atomic(crate::common::some_atomic())),
        any::<u32>().prop_map(|id| Msg::AtomicResponse(AtomicResponse { id, original: 1 })),
        any::<u32>().prop_map(|count| Msg::Control(Control::Ack { count })),
    ]
}

/// A Send of 40,000 bytes and whatever header, of which so many bytes have come.
fn part_of_send(header: ddp::Untagged, count: usize) -> Vec<u8> {
    untagged(header, &[7; 40_000])[..count].to_vec()
}

fn piecewise() -> Receiver {
    let negotiated = Negotiated { crc: false, ..Negotiated::plain() };
    let mut receiver = Receiver::new(&negotiated, Extensions::ALL);
    receiver.set_piecewise();
    receiver
}

#[test]
fn what_is_refused_is_refused_as_soon_as_its_header_is_there() {
    let wrong = ddp::Untagged { msn: 2, ..first(UntaggedOp::Send) };
    let bytes = part_of_send(wrong, 20);
    let error = ProtocolError::MsnRange { queue: 0, expected: 1, got: 2 };
    assert_eq!(piecewise().next(&bytes), Err(error));
    assert_eq!(
        receiver().next(&bytes),
        Ok(None),
        "with a CRC nothing is believed before it is whole"
    );
    // What is refused for its length is judged when it is whole.
    let wraps = tagged(
        ddp::Tagged {
            last: true,
            rsvd_ulp: TaggedOp::Write.octet(),
            stag: Stag(1),
            to: u64::MAX - 9,
        },
        &[7; 40_000],
    );
    assert_eq!(piecewise().next(&wraps[..wraps.len() - 1]), Ok(None));
    assert_eq!(piecewise().next(&wraps), Err(ProtocolError::ToWrap(TaggedOp::Write)));
    let mut lenient = piecewise();
    lenient.let_wrap();
    let delivered = lenient.next(&wraps).unwrap().map(|(used, _)| used);
    assert_eq!(delivered, Some(wraps.len()));
}

#[test]
fn requests_that_are_dropped_have_no_place() {
    let mut receiver = piecewise();
    let whole = part_of_send(first(UntaggedOp::Send), 40_024);
    let (used, segment) = receiver.next(&whole[..1000]).unwrap().unwrap();
    assert_eq!(used, 1000);
    assert!(matches!(segment, Segment::Send { msn: 1, mo: 0, last: false, .. }));
    assert_eq!(receiver.awaits(), Some((40_000 - 980 - 64, Belonging::Send { mo: 980 })));
    assert_eq!(receiver.head().unwrap(), whole[..20]);
    receiver.discard_requests(receiver.message_mark());
    assert_eq!(receiver.awaits(), None);
    assert_eq!(
        receiver.next(&whole[1000..]).unwrap(),
        Some((39_024, Segment::Discarded { executed: Some(0) }))
    );
    assert_eq!(receiver.head(), None);
    // Its place in the order is still to be taken.
    let mut sender = sender();
    let mut stream = Vec::new();
    Msg::Control(Control::Resume { count: 0 }).frame(&mut sender, 100, &mut stream);
    stream.extend(&whole);
    let mut collector = Collector::default();
    drain(&mut receiver, &stream, |_, segment| collector.take(segment)).unwrap();
    assert_eq!(
        collector.messages.last(),
        Some(&Msg::Send(SendKind::Plain, false, vec![7; 40_000]))
    );
}

fn is_request(msg: &Msg) -> bool {
    !matches!(msg, Msg::ReadResponse(..) | Msg::AtomicResponse(_) | Msg::Control(_))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_messages_over_any_split(
        messages in prop::collection::vec(message(), 1..12),
        max_ulpdu in prop_oneof![Just(1448u16), Just(65_486), 128u16..9000],
        room in 1100usize..10_000,
        markers: bool,
        steps in prop::collection::vec(1usize..3000, 1..20),
    ) {
        let negotiated = Negotiated { tx_markers: markers, ..Negotiated::plain() };
        let mut sender = Sender::new(&negotiated, max_ulpdu);
        let mut stream = Vec::new();
        for message in &messages {
            message.frame(&mut sender, room, &mut stream);
        }
        prop_assert_eq!(stream.len() % 4, 0);
        if markers {
            stream = remove_markers(&stream);
        }
        let mut receiver = receiver();
        let mut collector = Collector::default();
        let mut steps = steps.iter().cycle();
        let (mut begin, mut end) = (0, 0);
        while begin < stream.len() {
            match receiver.next(&stream[begin..end]).expect("legal") {
                Some((used, segment)) => {
                    collector.take(segment);
                    begin += used;
                }
                None => {
                    prop_assert!(Receiver::needed(&stream[begin..end]) > 0);
                    end = stream.len().min(end + steps.next().unwrap());
                }
            }
        }
        let requests = messages.iter().filter(|msg| is_request(msg)).count();
        prop_assert_eq!(collector.requests as usize, requests);
        prop_assert_eq!(collector.messages, messages);
    }

    /// Long FPDUs that are delivered as they come, by segments or into their places, give the same messages.
    #[test]
    fn long_messages_in_any_pieces(
        kinds in prop::collection::vec((0u8..5, 0usize..90_000), 1..6),
        max_ulpdu in prop_oneof![Just(65_486u16), Just(9000)],
        steps in prop::collection::vec(1usize..40_000, 1..20),
        places: bool,
    ) {
        let negotiated = Negotiated { crc: false, ..Negotiated::plain() };
        let mut sender = Sender::new(&negotiated, max_ulpdu);
        let mut stream = Vec::new();
        let messages: Vec<Msg> = kinds.iter().map(|&(kind, len)| {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
            match kind {
                0 => Msg::Write(7, u64::MAX - 90_000, bytes),
                1 => Msg::ReadResponse(9, 5, bytes),
                2 => Msg::Send(SendKind::Immediate(0x1122), true, bytes),
                3 => Msg::Send(SendKind::Plain, false, bytes),
                _ => Msg::Control(Control::Ack { count: 3 }),
            }
        }).collect();
        for message in &messages {
            message.frame(&mut sender, 70_000, &mut stream);
        }
        let mut receiver = Receiver::new(&negotiated, Extensions::ALL);
        receiver.set_piecewise();
        let mut collector = Collector::default();
        let mut steps = steps.iter().cycle();
        let (mut begin, mut end) = (0, 0);
        while begin < stream.len() {
            if let Some((most, belonging)) = receiver.awaits().filter(|_| places && begin == end) {
                let count = most.min(*steps.next().unwrap());
                collector.place(belonging, &stream[begin..begin + count]);
                receiver.placed(count);
                begin += count;
                end = begin;
                continue;
            }
            match receiver.next(&stream[begin..end]).expect("legal") {
                Some((used, segment)) => {
                    prop_assert!(used > 0);
                    collector.take(segment);
                    begin += used;
                }
                None => end = stream.len().min(end + steps.next().unwrap()),
            }
        }
        prop_assert_eq!(receiver.head(), None);
        let requests = messages.iter().filter(|msg| is_request(msg)).count();
        prop_assert_eq!(collector.requests as usize, requests);
        prop_assert!(collector.messages == messages);
    }

    /// An FPDU around payload that stays where it is has the bytes of one that holds it.
    #[test]
    fn frames_are_segments_without_their_payload(
        max_ulpdu in prop_oneof![Just(1448u16), Just(65_486), 128u16..9000],
        lengths in prop::collection::vec(0usize..200_000, 1..4),
        tagged: bool,
    ) {
        let negotiated = Negotiated { crc: false, ..Negotiated::plain() };
        let mut senders = [0, 1].map(|_| Sender::new(&negotiated, max_ulpdu));
        prop_assert!(senders[0].is_bare());
        for len in lengths {
            let payload: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
            let [mut one, mut other] = senders.each_mut().map(|sender| match tagged {
                true => sender.begin_tagged(TaggedOp::Write, Stag(5), 77),
                false => sender.begin_untagged(UntaggedOp::Send, 0),
            });
            loop {
                let done = one.offset() as usize;
                let left = (len - done) as u32;
                let (mut out, mut around) = (vec![0xee; 70_000], vec![0xee; 32]);
                let staged = senders[0]
                    .segment(&mut one, &mut out, left, |to| {
                        to.copy_from_slice(&payload[done..done + to.len()]);
                    })
                    .unwrap();
                let frame = senders[1].frame(&mut other, &mut around, left).unwrap();
                let mut whole = around[..frame.head].to_vec();
                whole.extend(&payload[done..][..frame.staged.payload as usize]);
                whole.extend(&around[frame.head..frame.staged.bytes]);
                prop_assert!(whole == out[..staged.bytes]);
                let Frame { staged: framed, .. } = frame;
                prop_assert_eq!((staged.payload, staged.last), (framed.payload, framed.last));
                prop_assert_eq!(one, other);
                if staged.last {
                    break;
                }
            }
        }
    }

    /// With markers or without, a segment never exceeds its buffer, and the bound holds.
    #[test]
    fn segments_fit(
        phase_filler in prop::collection::vec(0usize..600, 0..4),
        room in 0usize..5000,
        remaining in 0u32..8000,
        markers: bool,
    ) {
        let negotiated = Negotiated { tx_markers: markers, ..Negotiated::plain() };
        let mut sender = Sender::new(&negotiated, 65_486);
        let mut stream = Vec::new();
        for len in phase_filler {
            let msg = sender.begin_untagged(UntaggedOp::Send, 0);
            send(&mut sender, msg, &vec![1; len], 2000, &mut stream);
        }
        let mut msg = sender.begin_untagged(UntaggedOp::Send, 0);
        let mut out = vec![0xee; room];
        match sender.segment(&mut msg, &mut out, remaining, |place| place.fill(2)) {
            Some(staged) => {
                prop_assert!(staged.bytes <= sender.fpdu_bound(staged.payload as usize));
                prop_assert!(out[staged.bytes..].iter().all(|&byte| byte == 0xee));
                stream.extend(&out[..staged.bytes]);
                if markers {
                    remove_markers(&stream);
                }
            }
            None => {
                let least = sender.fpdu_bound(remaining.min(1024) as usize);
                prop_assert!(room < least + 16, "{room} bytes should do for {least}");
            }
        }
    }
}
