//! Receiver not ready: a request is refused, what follows is dropped, and all is sent again.

use crate::common::{Collector, Msg, drain, receiver, send, sender, some_atomic, some_read};
use proptest::prelude::*;
use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::rdmap::{AtomicResponse, Immediate, TaggedOp, UntaggedOp};
use quipu_iwarp::wire::{Payload, Stag};
use quipu_iwarp::{Message, ProtocolError, Receiver, Segment, SendKind, Sender};

/// The requester's side: all requests ever begun, with their messages for sending again.
struct Requests {
    sender: Sender,
    begun: Vec<(Message, Vec<u8>)>,
}

impl Requests {
    fn post(&mut self, msg: Message, payload: Vec<u8>, stream: &mut Vec<u8>) {
        send(&mut self.sender, msg, &payload, 1500, stream);
        self.begun.push((msg, payload));
    }

    fn post_msg(&mut self, msg: &Msg, stream: &mut Vec<u8>) {
        let emit = |payload: &dyn Payload| {
            let mut out = vec![0; payload.wire_len()];
            payload.emit(&mut out);
            out
        };
        let sender = &mut self.sender;
        let (begun, payload) = match msg {
            Msg::Write(stag, to, payload) => {
                (sender.begin_tagged(TaggedOp::Write, Stag(*stag), *to), payload.clone())
            }
            Msg::Send(_, _, payload) => {
                (sender.begin_untagged(UntaggedOp::Send, 0), payload.clone())
            }
            Msg::Immediate(immediate, _) => {
                (sender.begin_untagged(UntaggedOp::Immediate, 0), emit(immediate))
            }
            Msg::Read(request) => {
                (sender.begin_untagged(UntaggedOp::ReadRequest, 0), emit(request))
            }
            Msg::Atomic(request) => {
                (sender.begin_untagged(UntaggedOp::AtomicRequest, 0), emit(request))
            }
            other => panic!("{other:?} is no request"),
        };
        self.post(begun, payload, stream);
    }

    fn resume(&mut self, count: usize, stream: &mut Vec<u8>) {
        Msg::Control(Control::Resume { count: count as u32 }).frame(&mut self.sender, 100, stream);
        for (msg, payload) in self.begun[count..].iter().cloned() {
            send(&mut self.sender, msg, &payload, 1500, stream);
        }
    }
}

#[test]
fn refused_then_resumed() {
    let mut requests = Requests { sender: sender(), begun: Vec::new() };
    let mut stream = Vec::new();
    let long = Msg::Send(SendKind::Plain, false, vec![7; 4000]);
    let messages = [
        Msg::Read(some_read()),
        long.clone(),
        Msg::Atomic(some_atomic()),
        Msg::Write(1, 2, vec![8; 3000]),
        Msg::Immediate(Immediate { imm: 1, write_len: 3000 }, false),
    ];
    for message in &messages {
        requests.post_msg(message, &mut stream);
    }
    // A response and a control message among the dropped requests.
    let response = Msg::AtomicResponse(AtomicResponse { id: 1, original: 2 });
    response.frame(&mut requests.sender, 100, &mut stream);
    let ack = Msg::Control(Control::Ack { count: 3 });
    ack.frame(&mut requests.sender, 100, &mut stream);

    let mut receiver = receiver();
    let mut seen = Collector::default();
    let mut dropped = 0;
    drain(&mut receiver, &stream, |receiver, segment| match segment {
        Segment::Send { mo: 0, .. } => receiver.discard_requests(receiver.message_mark()),
        Segment::Discarded { .. } => dropped += 1,
        other => seen.take(other),
    })
    .unwrap();
    assert_eq!(seen.messages, [messages[0].clone(), response, ack]);
    assert_eq!(seen.requests, 1);
    // Two more of the Send, the atomic, three of the Write, the immediate.
    assert_eq!(dropped, 2 + 1 + 3 + 1);
    assert!(receiver.is_discarding());

    let mut stream = Vec::new();
    requests.resume(1, &mut stream);
    let mut seen = Collector::default();
    drain(&mut receiver, &stream, |_, segment| seen.take(segment)).unwrap();
    assert!(!receiver.is_discarding());
    assert_eq!(seen.messages[0], Msg::Control(Control::Resume { count: 1 }));
    assert_eq!(seen.messages[1..], messages[1..]);
    assert_eq!(seen.requests, 4);
}

#[test]
fn an_immediate_is_refused_behind_its_write() {
    let mut requests = Requests { sender: sender(), begun: Vec::new() };
    let mut stream = Vec::new();
    requests.post_msg(&Msg::Write(1, 2, vec![8; 3000]), &mut stream);
    let immediate = Msg::Immediate(Immediate { imm: 1, write_len: 3000 }, false);
    requests.post_msg(&immediate, &mut stream);
    let mut receiver = receiver();
    let mut executed = 0;
    drain(&mut receiver, &stream, |receiver, segment| match segment {
        Segment::Immediate { .. } => receiver.discard_requests(receiver.message_mark()),
        other => executed += u32::from(other.ends_request()),
    })
    .unwrap();
    assert_eq!(executed, 1, "the Write is done");
    let mut stream = Vec::new();
    requests.resume(1, &mut stream);
    let mut seen = Collector::default();
    drain(&mut receiver, &stream, |_, segment| seen.take(segment)).unwrap();
    assert_eq!(seen.messages[1..], [immediate]);
}

#[test]
fn a_crc_is_checked_while_dropping() {
    let mut stream = Vec::new();
    let mut sender = sender();
    let msg = sender.begin_untagged(UntaggedOp::Send, 7);
    send(&mut sender, msg, b"abc", 100, &mut stream);
    let mut receiver = receiver();
    receiver.discard_requests(receiver.message_mark());
    let dropped = Segment::Discarded { executed: Some(7) };
    assert_eq!(receiver.next(&stream), Ok(Some((28, dropped))));
    stream[22] ^= 1;
    assert!(matches!(receiver.next(&stream), Err(ProtocolError::Crc { .. })));
}

#[test]
fn after_resume_the_old_msn_is_due() {
    let mut requests = Requests { sender: sender(), begun: Vec::new() };
    let mut stream = Vec::new();
    let send = Msg::Send(SendKind::Plain, false, vec![1]);
    for _ in 0..3 {
        requests.post_msg(&send, &mut stream);
    }
    let mut receiver = receiver();
    let mut count = 0;
    drain(&mut receiver, &stream, |receiver: &mut Receiver, _| {
        count += 1;
        if count == 2 {
            receiver.discard_requests(receiver.message_mark());
        }
    })
    .unwrap();
    // The requester forgets to go back.
    let mut stream = Vec::new();
    Msg::Control(Control::Resume { count: 1 }).frame(&mut requests.sender, 100, &mut stream);
    requests.post_msg(&send, &mut stream);
    let error = drain(&mut receiver, &stream, |_, _| ()).unwrap_err();
    assert_eq!(error, ProtocolError::MsnRange { queue: 0, expected: 2, got: 4 });
}

#[test]
fn a_late_refusal_goes_back_to_the_mark() {
    // The adapter keeps the mark of the Send, and notices the missing receive only after more
    // requests have been delivered.
    let mut requests = Requests { sender: sender(), begun: Vec::new() };
    let mut stream = Vec::new();
    let messages = [
        Msg::Read(some_read()),
        Msg::Send(SendKind::Plain, false, vec![1; 3000]),
        Msg::Atomic(some_atomic()),
        Msg::Send(SendKind::Plain, false, vec![2]),
        Msg::Read(some_read()),
    ];
    for message in &messages {
        requests.post_msg(message, &mut stream);
    }
    let mut receiver = receiver();
    let mut mark = None;
    drain(&mut receiver, &stream, |receiver, segment| {
        if matches!(segment, Segment::Send { msn: 1, last: true, .. }) {
            mark = Some(receiver.message_mark());
        }
    })
    .unwrap();
    receiver.discard_requests(mark.expect("the Send has come"));
    let mut stream = Vec::new();
    requests.resume(1, &mut stream);
    let mut seen = Collector::default();
    drain(&mut receiver, &stream, |_, segment| seen.take(segment)).unwrap();
    assert_eq!(seen.messages[1..], messages[1..]);
}

#[test]
fn the_mark_of_a_message_is_that_of_its_first_segment() {
    let mut sender = sender();
    let mut out = [0; 1100];
    let mut receiver = receiver();
    let mut take = |out: &[u8]| {
        receiver.next(out).expect("legal").expect("whole");
        receiver.message_mark()
    };
    let fill = |place: &mut [u8]| place.fill(1);
    let mut msg = sender.begin_untagged(UntaggedOp::Send, 0);
    let staged = sender.segment(&mut msg, &mut out, 2000, fill).unwrap();
    let first = take(&out[..staged.bytes]);
    let mut read = sender.begin_untagged(UntaggedOp::ReadRequest, 0);
    let len = sender.whole(&mut read, &mut out, &some_read()).unwrap();
    take(&out[..len]);
    let staged = sender.segment(&mut msg, &mut out, 2000 - staged.payload, fill).unwrap();
    assert!(staged.last);
    assert_eq!(take(&out[..staged.bytes]), first);
}

fn request() -> impl Strategy<Value = Msg> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..3000);
    prop_oneof![
        bytes().prop_map(|bytes| Msg::Write(1, 2, bytes)),
        bytes().prop_map(|bytes| Msg::Send(SendKind::Plain, false, bytes)),
        any::<u32>().prop_map(|imm| Msg::Immediate(Immediate { imm, write_len: 0 }, false)),
        Just(Msg::Read(some_read())),
        Just(Msg::Atomic(some_atomic())),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is refused, and how often: each request is executed once and in order.
    #[test]
    fn every_request_once_and_in_order(
        messages in prop::collection::vec(request(), 1..15),
        refusals in prop::collection::vec(any::<bool>(), 40),
    ) {
        let mut requests = Requests { sender: sender(), begun: Vec::new() };
        let mut stream = Vec::new();
        for message in &messages {
            requests.post_msg(message, &mut stream);
        }
        let mut receiver = receiver();
        let mut seen = Collector::default();
        let mut refusals = refusals.into_iter();
        loop {
            let mut refused = None;
            drain(&mut receiver, &stream, |receiver, segment| {
                let takes_receive =
                    matches!(segment, Segment::Send { mo: 0, .. } | Segment::Immediate { .. });
                if takes_receive && refusals.next().unwrap_or(false) {
                    refused = Some(seen.requests as usize);
                    receiver.discard_requests(receiver.message_mark());
                } else if !matches!(segment, Segment::Control(_)) {
                    seen.take(segment);
                }
            })
            .expect("legal");
            let Some(count) = refused else { break };
            stream.clear();
            requests.resume(count, &mut stream);
        }
        prop_assert_eq!(seen.messages, messages);
    }
}
