//! Segments on a stream in orders, or with contents, that no queue pair of this adapter sends.

use crate::hostile::not_last;
use crate::pair::{Host, Way, connected, statuses};
use crate::unreliable::{assert_quiet, unreliable};
use WcStatus::{Success, WrFlushErr};
use quipu_iwarp::wire::rdmap::{Immediate, ReadRequest, TaggedOp, UntaggedOp};
use quipu_iwarp::wire::{self, Stag};
use quipu_iwarp::{Message, Negotiated, Sender};
use quipu_nic::mem::Access;
use quipu_nic::*;

const STREAM: Way = Way::Stream(usize::MAX);

/// What one end says by hand on a stream.
struct Hand {
    sender: Sender,
    out: Vec<u8>,
}

impl Hand {
    fn new() -> Self {
        Self { sender: Sender::new(&Negotiated::plain(), 1000), out: Vec::new() }
    }

    /// A segment of `len` bytes, which ends its message or does not.
    fn say(&mut self, msg: &mut Message, len: u32, last: bool) {
        let mut fpdu = vec![0; 1500];
        let staged = self.sender.segment(msg, &mut fpdu, len, |place| place.fill(b'S')).unwrap();
        fpdu.truncate(staged.bytes);
        self.out.extend(if last { fpdu } else { not_last(fpdu) });
    }

    /// A message of fixed layout.
    fn whole(&mut self, op: UntaggedOp, payload: &impl wire::Payload) {
        let mut fpdu = [0; 100];
        let mut msg = self.sender.begin_untagged(op, 0);
        let used = self.sender.whole(&mut msg, &mut fpdu, payload).unwrap();
        self.out.extend(&fpdu[..used]);
    }

    fn immediate(&mut self, write_len: u32) {
        self.whole(UntaggedOp::Immediate, &Immediate { imm: 1, write_len });
    }

    fn write(&mut self, key: u32, addr: u64, len: u32, last: bool) {
        let mut msg = self.sender.begin_tagged(TaggedOp::Write, Stag(key), addr);
        self.say(&mut msg, len, last);
    }
}

/// A stream may have a Send and a write in progress: that one of them is dropped says nothing of the other.
#[test]
fn the_end_of_a_write_is_not_that_of_a_send() {
    let (mut pair, qps) = unreliable(STREAM);
    let there = pair.buffer(1, 4096);
    let (key, addr) = (there.key(), there.addr());
    // No receive for the first part, and one for the second.
    let mut hand = Hand::new();
    let mut send = hand.sender.begin_untagged(UntaggedOp::Send, 0);
    hand.say(&mut send, 900, false);
    hand.write(0, 0, 0, true);
    let read =
        ReadRequest { sink_stag: Stag(1), sink_to: 0, size: 8, source_stag: Stag(2), source_to: 0 };
    hand.whole(UntaggedOp::ReadRequest, &read);
    pair.inject(1, &std::mem::take(&mut hand.out));
    pair.run();
    pair.recv(1, qps[1], 7, &[there.sge(0, 4096)]);
    hand.say(&mut send, 8, true);
    pair.inject(1, &std::mem::take(&mut hand.out));
    pair.run();
    assert_eq!(pair.polled(1), []);
    // A write that is dropped leaves no hole in the Send around it.
    let mut send = hand.sender.begin_untagged(UntaggedOp::Send, 0);
    hand.say(&mut send, 100, false);
    hand.write(key ^ 1, addr, 8, false);
    hand.say(&mut send, 100, false);
    hand.write(key ^ 1, addr + 8, 8, true);
    hand.say(&mut send, 100, true);
    pair.inject(1, &hand.out);
    pair.run();
    let got = pair.hosts[1].poll();
    assert_eq!((statuses(&got), got[0].byte_len), (vec![(7, Success)], 300));
    assert_eq!(there.bytes(0, 301), [[b'S'; 300].as_slice(), &[0]].concat());
    assert_quiet(&pair, qps);
}

/// The length that an immediate names is that of the write before it, of which alone it can be believed.
#[test]
fn an_immediate_names_no_bytes_that_were_not_written() {
    for (len, named, status) in [
        (Some(4), 4, Success),
        (Some(4), 0, Success),
        (None, 0, Success),
        (Some(4), 5, WrFlushErr),
        (None, 0xffff_fff0, WrFlushErr),
    ] {
        let (mut pair, qps) = connected(STREAM);
        let there = pair.buffer(1, 64);
        pair.recv(1, qps[1], 7, &[there.sge(0, 64)]);
        let mut hand = Hand::new();
        if let Some(len) = len {
            hand.write(there.key(), there.addr(), len, true);
        }
        hand.immediate(named);
        pair.inject(1, &hand.out);
        pair.run();
        let got = pair.hosts[1].poll();
        assert_eq!(statuses(&got), [(7, status)], "{len:?} {named}");
        if status == Success {
            assert_eq!(got[0].byte_len, named);
        }
    }
}

/// The same over an unreliable connection, where it is dropped.
#[test]
fn an_unreliable_immediate_that_names_other_bytes_is_dropped() {
    let (mut pair, qps) = unreliable(STREAM);
    let there = pair.buffer(1, 64);
    let (key, addr) = (there.key(), there.addr());
    pair.recv(1, qps[1], 7, &[]);
    let mut hand = Hand::new();
    hand.immediate(0xffff_fff0);
    hand.write(key, addr, 8, true);
    hand.immediate(9);
    hand.write(key, addr, 8, true);
    hand.write(key ^ 1, addr, 8, true);
    hand.immediate(8);
    hand.immediate(8);
    pair.inject(1, &std::mem::take(&mut hand.out));
    pair.run();
    assert_eq!(pair.polled(1), []);
    hand.write(key, addr, 8, false);
    hand.write(key, addr + 8, 9, true);
    hand.immediate(17);
    pair.inject(1, &hand.out);
    pair.run();
    let got = pair.hosts[1].poll();
    assert_eq!((statuses(&got), got[0].byte_len), (vec![(7, Success)], 17));
    assert_quiet(&pair, qps);
}

/// There is no such operation over an unreliable connection (IBA 9.2.1).
#[test]
fn an_unreliable_send_with_invalidate_is_dropped() {
    for op in [UntaggedOp::SendInvalidate, UntaggedOp::SendSeInvalidate] {
        let (mut pair, qps) = unreliable(STREAM);
        let there = pair.buffer(1, 64);
        let Host { adapter, pd, .. } = &mut pair.hosts[1];
        let (mw, key) = adapter.alloc_mw(*pd, WindowType::Two).unwrap();
        let rkey = key.next_tag().0;
        let (mr, addr) = (there.region.id, there.addr());
        let bind = BindMw { mw, rkey, mr, addr, len: 64, access: Access::REMOTE_WRITE };
        pair.send(1, qps[1], 1, SendOp::BindMw(bind), &[]);
        pair.recv(1, qps[1], 7, &[]);
        let mut hand = Hand::new();
        let mut msg = hand.sender.begin_untagged(op, rkey);
        hand.say(&mut msg, 0, true);
        pair.inject(1, &hand.out);
        pair.run();
        assert_eq!(pair.polled(1), [(1, Success)]);
        pair.send(1, qps[1], 2, SendOp::LocalInv { key: rkey }, &[]);
        pair.run();
        assert_eq!(pair.polled(1), [(2, Success)], "the window stands");
        assert_quiet(&pair, qps);
    }
}
