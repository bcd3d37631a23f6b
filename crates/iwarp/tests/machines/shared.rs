//! Messages of extended reliable connections, which name a shared receive queue (`specs/quipu-wire.md` 6).

use crate::common::{emitted, sender, untagged};
use quipu_iwarp::wire::ddp;
use quipu_iwarp::wire::rdmap::{Immediate, UntaggedOp, queue};
use quipu_iwarp::{Extensions, Negotiated, ProtocolError, Receiver, Segment};

fn receiver() -> Receiver {
    Receiver::new(
        &Negotiated::plain(),
        Extensions { acknowledging_sends: false, xrc: true, ..Extensions::ALL },
    )
}

fn header(op: UntaggedOp, qn: u32) -> ddp::Untagged {
    ddp::Untagged { last: true, rsvd_ulp: op.octet(), ulp: 0, qn, msn: 1, mo: 0 }
}

/// Messages for different queues, in one order, each with all its segments.
#[test]
fn messages_name_their_queue() {
    let (mut sender, mut receiver) = (sender(), receiver());
    let mut stream = Vec::new();
    for (op, srq, len) in [
        (UntaggedOp::Send, 5, 3000),
        (UntaggedOp::SendImm, 0x00ff_ffff, 0),
        (UntaggedOp::Send, 1, 1),
    ] {
        let msg = sender.begin_shared(op, 9, srq);
        crate::common::send(&mut sender, msg, &vec![7; len], 1500, &mut stream);
    }
    let immediate = Immediate { imm: 1, write_len: 2 };
    let msg = sender.begin_shared(UntaggedOp::Immediate, 0, 6);
    crate::common::send(&mut sender, msg, &emitted(&immediate), 1500, &mut stream);
    let mut seen = Vec::new();
    let mut rest = &stream[..];
    while let Some((used, segment)) = receiver.next(rest).unwrap() {
        match segment {
            Segment::Send { srq, msn, .. } | Segment::Immediate { srq, msn, .. } => {
                seen.push((srq, msn));
            }
            other => panic!("{other:?}"),
        }
        rest = &rest[used..];
    }
    seen.dedup();
    assert_eq!(seen, [(Some(5), 1), (Some(0x00ff_ffff), 2), (Some(1), 3), (Some(6), 4)]);
}

/// A queue must be named there, and cannot be elsewhere, nor with more than 24 bits.
#[test]
fn queue_numbers_are_checked() {
    let some = queue::shared(5);
    let mut plain = Receiver::new(&Negotiated::plain(), Extensions::ALL);
    for (qn, xrc) in [(0, true), (5, true), (some | 1 << 24, true), (!0, true), (some, false)] {
        let bytes = untagged(header(UntaggedOp::Send, qn), b"");
        let refused = if xrc { receiver().next(&bytes) } else { plain.next(&bytes) };
        let octet = UntaggedOp::Send.octet();
        assert_eq!(refused, Err(ProtocolError::InvalidQueue { octet, qn }));
    }
    // Only messages of the queue of Sends name one.
    let bytes = untagged(header(UntaggedOp::ReadRequest, some), &[0; 28]);
    let octet = UntaggedOp::ReadRequest.octet();
    let refused = Err(ProtocolError::InvalidQueue { octet, qn: some });
    assert_eq!(receiver().next(&bytes), refused);
}

/// All segments of a message name the same queue.
#[test]
fn a_message_keeps_to_its_queue() {
    let first = ddp::Untagged { last: false, ..header(UntaggedOp::Send, queue::shared(5)) };
    let second = ddp::Untagged { mo: 4, ..header(UntaggedOp::Send, queue::shared(6)) };
    let mut receiver = receiver();
    assert!(receiver.next(&untagged(first, b"four")).unwrap().is_some());
    let changed = Err(ProtocolError::OperationChanged(UntaggedOp::Send.octet()));
    assert_eq!(receiver.next(&untagged(second, b"more")), changed);
}

/// Where the peer executes requests of this side, and only there, a Send has a place for their count.
#[test]
fn the_field_of_an_acknowledgement_is_looked_at_only_between_two_quipus() {
    let none = Extensions { acknowledging_sends: false, ..Extensions::ALL };
    let shared = Extensions { xrc: true, ..none };
    for (op, extensions, qn, told) in [
        (UntaggedOp::Send, Extensions::ALL, 0, Some(77)),
        (UntaggedOp::SendSe, Extensions::ALL, 0, Some(77)),
        (UntaggedOp::SendImm, Extensions::ALL, 0, None),
        (UntaggedOp::SendInvalidate, Extensions::ALL, 0, None),
        (UntaggedOp::Send, none, 0, None),
        (UntaggedOp::Send, shared, queue::shared(5), None),
    ] {
        let bytes = untagged(ddp::Untagged { ulp: 77, ..header(op, qn) }, b"");
        for dropping in [false, true] {
            let mut receiver = Receiver::new(&Negotiated::plain(), extensions);
            if dropping {
                receiver.discard_requests(receiver.message_mark());
            }
            match receiver.next(&bytes).unwrap().unwrap().1 {
                Segment::Send { executed, .. } => assert_eq!((executed, dropping), (told, false)),
                Segment::Discarded { executed } => assert_eq!((executed, dropping), (told, true)),
                other => panic!("{other:?}"),
            }
        }
    }
}
