//! Peers that mean harm: what they put on a stream or into shared memory costs them their connection, and
//! nobody else anything.

mod link_peer;

use std::net::IpAddr;

use crate::pair::{Buffer, Pair, TO_RTR, Way, connected, statuses};
use quipu_iwarp::wire::Stag;
use quipu_iwarp::wire::hello::{Features, Hello, Kind, Reason, Service};
use quipu_iwarp::wire::rdmap::{TaggedOp, UntaggedOp};
use quipu_iwarp::{Negotiated, Sender};
use quipu_nic::mem::Segment;
use quipu_nic::mem::ring::{Channel, SlotHeader};
use quipu_nic::*;

pub use link_peer::LinkPeer;

const STREAM: Way = Way::Stream(usize::MAX);

/// The sender of a peer that has said nothing yet.
fn sender() -> Sender {
    Sender::new(&Negotiated::plain(), 1000)
}

/// An FPDU whose control octet says that its message goes on, with the CRC put right.
pub fn not_last(mut fpdu: Vec<u8>) -> Vec<u8> {
    const LAST: u8 = 0x40;
    fpdu[2] &= !LAST;
    let end = fpdu.len() - 4;
    let crc = quipu_iwarp::wire::mpa::crc32c(&fpdu[..end]);
    fpdu[end..].copy_from_slice(&crc.to_le_bytes());
    fpdu
}

/// One segment of a message.
fn segment(
    sender: &mut Sender,
    msg: &mut quipu_iwarp::Message,
    remaining: u32,
    bytes: &[u8],
) -> Vec<u8> {
    let mut out = vec![0; 1500];
    let staged = sender
        .segment(msg, &mut out, remaining, |place| place.copy_from_slice(&bytes[..place.len()]))
        .expect("room for a segment");
    out.truncate(staged.bytes);
    out
}

#[test]
fn empty_segments_of_a_send_take_one_receive() {
    let (mut pair, qps) = connected(STREAM);
    let there = pair.buffer(1, 64);
    for wr_id in 1..=3 {
        pair.recv(1, qps[1], wr_id, &[there.sge(0, 64)]);
    }
    let mut sender = sender();
    let mut msg = sender.begin_untagged(UntaggedOp::Send, 0);
    let empty = not_last(segment(&mut sender.clone(), &mut msg.clone(), 0, &[]));
    for _ in 0..5 {
        pair.inject(1, &empty);
    }
    let last = segment(&mut sender, &mut msg, 5, b"quipu");
    pair.inject(1, &last);
    pair.run();
    assert_eq!(pair.polled(1), [(1, WcStatus::Success)]);
    assert_eq!(there.bytes(0, 5), b"quipu");
    let now = pair.now;
    pair.hosts[1].adapter.destroy_qp(now, qps[1]).unwrap();
    assert!(pair.hosts[1].poll().is_empty(), "the others are still posted");
}

/// The answer of a read acknowledges what came before it. If that overruns the completion queue, the read is
/// flushed, and its memory is the program's again.
#[test]
fn an_answer_that_overruns_the_queue_places_nothing() {
    let mut pair = Pair::new(STREAM);
    let (cq, _) = pair.hosts[0].adapter.create_cq(1, None, 0).unwrap();
    let qps = [pair.hosts[0].qp_with(|init| init.send_cq = cq), pair.hosts[1].qp()];
    pair.connect(qps);
    let (here, now) = (pair.buffer(0, 64), pair.now);
    let conn = pair.stream_ends()[0];
    for wr_id in 1..=2 {
        pair.send(0, qps[0], wr_id, SendOp::Send, &[]);
    }
    pair.send(0, qps[0], 3, SendOp::Read { addr: 0, rkey: 5 }, &[here.sge(0, 8)]);
    let adapter = &mut pair.hosts[0].adapter;
    while adapter.transmit(now, conn, &mut [0; 4096]) > 0 {}
    let mut sender = sender();
    // The sink of the read, whose position in the queue is 2.
    let sink = Stag(0x8000_0002);
    let mut msg = sender.begin_tagged(TaggedOp::ReadResponse, sink, 0);
    let answer = segment(&mut sender, &mut msg, 8, b"too late");
    adapter.handle_stream(now, conn, &answer);
    assert_eq!(pair.state(0, qps[0]), QpState::Err);
    assert_eq!(here.bytes(0, 8), [0; 8]);
}

/// A length that was damaged, or a peer that stops in the middle, makes nobody wait for ever; one that is
/// slow is waited for.
#[test]
fn an_fpdu_without_an_end_ends_the_connection() {
    const SECOND: u64 = 1_000_000_000;
    let (mut pair, qps) = connected(STREAM);
    pair.recv(1, qps[1], 5, &[]);
    let start = [0xfd, 0xe8, 0x41, 0x43];
    pair.inject(1, &start);
    pair.run();
    pair.send(0, qps[0], 1, SendOp::Send, &[]);
    for _ in 0..10 {
        let next = pair.now.after(590 * SECOND);
        pair.run_until(next);
        pair.inject(1, &[0]);
    }
    assert!(pair.hosts[0].poll().is_empty() && pair.hosts[1].poll().is_empty());
    let end = pair.now.after(601 * SECOND);
    pair.run_until(end);
    assert_eq!(pair.polled(1), [(5, WcStatus::WrFlushErr)]);
    assert_eq!(pair.polled(0), [(1, WcStatus::BadRespErr)]);
    assert_eq!(pair.hosts.each_ref().map(|host| host.adapter.poll_timeout()), [None, None]);
}

/// Whatever the initiator says before it is answered ends the connection (specs/deviations.md).
#[test]
fn early_data_ends_the_connection() {
    for behind in [true, false] {
        let mut pair = Pair::new(STREAM);
        let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
        let keep = |_: &mut QpAttr| {};
        pair.to_rtr(0, qps, &keep);
        pair.to_init(1, qps[1]);
        let request = request_of(&mut pair);
        let adapter = &mut pair.hosts[1].adapter;
        let peer = "10.0.0.1:5".parse().unwrap();
        let conn = adapter.handle_accepted(pair.now, peer).unwrap();
        let early = [7; 100];
        if behind {
            let both = [&request[..], &early].concat();
            assert_eq!(adapter.handle_stream(pair.now, conn, &both), both.len());
        } else {
            assert_eq!(adapter.handle_stream(pair.now, conn, &request), request.len());
            assert_eq!(adapter.poll_action(), None, "it waits");
            assert_eq!(adapter.handle_stream(pair.now, conn, &early), early.len());
        }
        assert_eq!(adapter.poll_action(), Some(Action::Close { conn }));
    }
}

/// What host 0 says to begin its connection.
fn request_of(pair: &mut Pair) -> Vec<u8> {
    let now = pair.now;
    let adapter = &mut pair.hosts[0].adapter;
    let Some(Action::Connect { conn, .. }) = adapter.poll_action() else {
        panic!("nothing to connect");
    };
    adapter.handle_reached_stream(now, conn);
    let mut request = vec![0; 1000];
    let used = adapter.transmit(now, conn, &mut request);
    request.truncate(used);
    request
}

const SEND: u8 = 1;
const READ_DATA: u8 = 1;
const WRITE: u8 = 4;
const MORE: u8 = 2;
const REFERENCE: u8 = 8;

/// A queue pair that has asked a peer of its link for something, twice, and polls a queue of its own for what
/// answers it: with receives from 10 on.
struct Asked {
    pair: Pair,
    channel: Channel,
    qp: QpId,
    cq: CqId,
    here: Buffer,
}

impl Asked {
    fn twice(op: SendOp) -> Self {
        let mut pair = Pair::new(Way::LinkCopying);
        let (cq, _) = pair.hosts[0].adapter.create_cq(64, None, 0).unwrap();
        let qp = pair.hosts[0].qp_with(|init| init.recv_cq = cq);
        let peer = LinkPeer::asked_by(&mut pair, qp, None);
        let channel = peer.accept(&mut pair);
        let here = pair.buffer(0, 64);
        for wr_id in 10..13 {
            pair.recv(0, qp, wr_id, &[here.sge(0, 8)]);
        }
        for wr_id in 1..=2 {
            pair.send(0, qp, wr_id, op, &[here.sge(8, 8)]);
        }
        peer.ring(&mut pair);
        // What comes first in a connection is never handed out.
        let mut asked = Self { pair, channel, qp, cq, here };
        assert_eq!(asked.answered(0), (Glance::Found(qp), None));
        assert_eq!(asked.served(), [(10, WcStatus::Success)]);
        asked
    }

    /// The peer answers, and says that it has executed `ack` requests: what a poll makes of it.
    fn answered(&mut self, ack: u32) -> (Glance, Option<u64>) {
        self.here.fill(0, &[0; 8]);
        let header = SlotHeader { opcode: SEND, length: 8, ack, ..SlotHeader::default() };
        self.channel.outgoing.requests.push(&header, b"believe!").unwrap();
        let mut found = None;
        let adapter = &mut self.pair.hosts[0].adapter;
        let glance = adapter.glance(self.pair.now, self.cq, |wc| found = Some(wc.wr_id));
        adapter.settle_taken();
        (glance, found)
    }

    /// What has come to the queue, once the channel was served.
    fn served(&mut self) -> Vec<(u64, WcStatus)> {
        let adapter = &mut self.pair.hosts[0].adapter;
        assert!(adapter.serve(self.pair.now, self.qp));
        let mut out = [Completion::default(); 16];
        let count = adapter.poll_cq(self.cq, &mut out).unwrap();
        statuses(&out[..count])
    }
}

/// Nobody can have executed what it was not asked for. What such a peer says is not handed out.
#[test]
fn answers_to_more_than_was_asked_end_the_channel() {
    const HALF: u32 = 1 << 31;
    for ack in [3, 4, 258, HALF, HALF + 1, HALF + 2] {
        let mut asked = Asked::twice(SendOp::Send);
        assert_eq!(asked.answered(ack), (Glance::Found(asked.qp), None), "{ack}");
        let flushed = WcStatus::WrFlushErr;
        assert_eq!(asked.served(), [(11, flushed), (12, flushed)], "{ack}");
        assert_eq!(asked.here.bytes(0, 8), [0; 8], "{ack}");
        let failed = [(1, WcStatus::BadRespErr), (2, flushed)];
        assert_eq!(asked.pair.polled(0), failed, "{ack}");
        assert_eq!(asked.pair.state(0, asked.qp), QpState::Err);
        // It may go on as it likes.
        assert_eq!(asked.answered(1), (Glance::Vain, None), "{ack}");
    }
}

/// A count that goes backwards, or stays, is old news: its message is received as any other, and nothing
/// completes, neither again nor early.
#[test]
fn counts_that_go_backwards_complete_nothing() {
    const HALF: u32 = 1 << 31;
    let ok = WcStatus::Success;
    for ack in [0, u32::MAX, u32::MAX - 5, HALF + 3] {
        let mut asked = Asked::twice(SendOp::Send);
        assert_eq!(asked.answered(ack), (Glance::Found(asked.qp), None), "{ack}");
        assert_eq!(asked.served(), [(11, ok)], "{ack}");
        assert_eq!(asked.here.bytes(0, 8), b"believe!");
        assert_eq!(asked.pair.polled(0), [], "{ack}");
        assert_eq!(asked.answered(2), (Glance::Taken, Some(12)), "{ack}");
        assert_eq!(asked.pair.polled(0), [(1, ok), (2, ok)], "{ack}");
    }
    for ack in [0, 1, 2] {
        let mut asked = Asked::twice(SendOp::Send);
        assert_eq!(asked.answered(2), (Glance::Taken, Some(11)));
        assert_eq!(asked.here.bytes(0, 8), b"believe!");
        assert_eq!(asked.pair.polled(0), [(1, ok), (2, ok)]);
        asked.pair.send(0, asked.qp, 3, SendOp::Send, &[]);
        assert_eq!(asked.answered(ack), (Glance::Found(asked.qp), None), "{ack}");
        assert_eq!(asked.served(), [(12, ok)], "{ack}");
        assert_eq!(asked.pair.polled(0), [], "{ack}");
    }
}

/// A read is done when its bytes are there, whatever an answer that is handed out says of it.
#[test]
fn an_acknowledgement_is_no_answer_to_a_read() {
    let mut asked = Asked::twice(SendOp::Read { addr: 0, rkey: 5 });
    assert_eq!(asked.answered(2), (Glance::Taken, Some(11)));
    assert_eq!(asked.pair.polled(0), []);
    let data = SlotHeader { opcode: READ_DATA, length: 8, ack: 2, ..SlotHeader::default() };
    for bytes in [b"first...", b"second.."] {
        asked.channel.outgoing.responses.push(&data, bytes).unwrap();
        assert_eq!(asked.answered(2), (Glance::Found(asked.qp), None), "it comes first");
        asked.served();
        assert_eq!(asked.here.bytes(8, 8), bytes);
    }
    assert_eq!(asked.pair.polled(0), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

/// Answers without bytes never end: whoever gives them is not listened to.
#[test]
fn empty_answers_end_the_channel() {
    let mut pair = Pair::new(Way::LinkCopying);
    let (peer, qp) = LinkPeer::asked(&mut pair, None);
    let mut channel = peer.accept(&mut pair);
    let here = pair.buffer(0, 64);
    pair.send(0, qp, 1, SendOp::Read { addr: 0, rkey: 5 }, &[here.sge(0, 8)]);
    let empty = SlotHeader { opcode: READ_DATA, flags: MORE, ..SlotHeader::default() };
    channel.outgoing.responses.push(&empty, &[]).unwrap();
    let close = LinkMessage::Close { tag: peer.conn };
    pair.hosts[0].adapter.handle_link_message(pair.now, peer.link, close);
    assert_eq!(pair.polled(0), [(1, WcStatus::BadRespErr)]);
}

/// A peer that lets go of its link, or of a channel, and goes on filling the ring, which it still has.
#[test]
fn a_peer_that_left_cannot_go_on_for_ever() {
    for close in [true, false] {
        let mut pair = Pair::new(Way::Link);
        let (peer, _) = LinkPeer::asked(&mut pair, Some(Segment::heap(4096)));
        let mut channel = peer.accept(&mut pair);
        let here = pair.buffer(0, 64);
        let header = SlotHeader {
            opcode: WRITE,
            flags: REFERENCE,
            length: 8,
            inline_len: 16,
            raddr: here.addr(),
            rkey: here.key(),
            ..SlotHeader::default()
        };
        let list = [&1000u64.to_ne_bytes()[..], &8u64.to_ne_bytes()].concat();
        channel.outgoing.requests.push(&header, &list).unwrap();
        *peer.memory.push.lock().unwrap() = Some((channel, header, 10_000));
        let (now, adapter) = (pair.now, &mut pair.hosts[0].adapter);
        if close {
            let close = LinkMessage::Close { tag: peer.conn };
            adapter.handle_link_message(now, peer.link, close);
        } else {
            adapter.handle_link_down(now, peer.link);
        }
        let left = peer.memory.push.lock().unwrap().as_ref().map(|(_, _, left)| *left);
        assert!(left > Some(9_000), "{left:?} of 10000 not served");
    }
}

/// The directory is the peer's word: an address that wraps only misleads it.
#[test]
fn addresses_in_the_directory_may_wrap() {
    let mut pair = Pair::new(Way::Link);
    let directory = Segment::heap(64 * 16);
    let key = 0x0000_0305u32;
    let slot = 64 * (key >> 8) as usize;
    let (pd, any_qp, len) = (1u64, u64::from(u32::MAX), 4u64 << 20);
    let entry = [0, u64::from(key) | pd << 32, 0xff | any_qp << 32, 0, len, u64::MAX - 100];
    for (word, value) in entry.into_iter().enumerate() {
        directory.write(slot + word * 8, &value.to_ne_bytes()).unwrap();
    }
    let (peer, qp) = LinkPeer::asked(&mut pair, Some(directory));
    let channel = peer.accept(&mut pair);
    channel.incoming.control.set_grants(u32::MAX);
    let here = pair.buffer(0, 3 << 20);
    pair.send(0, qp, 1, SendOp::Write { addr: 0, rkey: key }, &[here.sge(0, 3 << 20)]);
    pair.run();
    assert_eq!(pair.polled(0), [(1, WcStatus::Success)]);
}

/// A peer that lets go of a channel before it has answered is asked again. So is one that has not answered
/// when the queue pair starts anew.
#[test]
fn a_request_over_a_link_that_comes_to_nothing_is_made_again() {
    for close in [true, false] {
        let mut pair = Pair::new(Way::LinkCopying);
        let (peer, qp) = LinkPeer::asked(&mut pair, None);
        let first = peer.conn;
        if !close {
            let before = pair.hosts[0].adapter.query_qp(qp).unwrap().attr;
            pair.reset(0, qp);
            pair.to_init(0, qp);
            let rtr = QpAttr { state: QpState::Rtr, ..before };
            let now = pair.now;
            pair.hosts[0].adapter.modify_qp(now, qp, &rtr, TO_RTR).unwrap();
            pair.to_rts(0, qp, &|_| {});
        }
        let adapter = &mut pair.hosts[0].adapter;
        if close {
            let close = LinkMessage::Close { tag: first };
            adapter.handle_link_message(pair.now, peer.link, close);
        }
        let mut asked = None;
        for _ in 0..3 {
            if let Some(Action::Connect { conn, .. }) = adapter.poll_action() {
                asked = Some(conn);
                break;
            }
            let Some(next) = adapter.poll_timeout() else { break };
            pair.now = next;
            adapter.handle_timeout(next);
        }
        let conn = asked.expect("it asks again");
        assert!(adapter.handle_reached_link(pair.now, conn, peer.link));
        let (conn, offset) = LinkPeer::request(adapter);
        let again = LinkPeer { conn, offset, ..peer };
        // The answer to the first request comes late, and is answered.
        if !close {
            let end = LinkEnd { bell: 0, pd: 1 };
            let late = LinkMessage::Accept { tag: first, own_tag: 5, end };
            adapter.handle_link_message(pair.now, again.link, late);
            let message = LinkMessage::Close { tag: 5 };
            let action = Action::LinkSend { link: again.link, message };
            assert_eq!(adapter.poll_action(), Some(action));
        }
        let channel = again.accept(&mut pair);
        pair.send(0, qp, 1, SendOp::Send, &[]);
        let mut channel = channel;
        assert!(channel.incoming.requests.peek().is_some());
    }
}

/// Nothing gets the memory of a region that was changed, or of a window that is gone, while a peer is in the
/// middle of an access to it.
#[test]
fn a_region_that_was_changed_is_waited_for() {
    let mut pair = Pair::new(Way::Link);
    let (peer, _) = LinkPeer::asked(&mut pair, Some(Segment::heap(4096)));
    pair.hosts[0].adapter.publish_regions(&Segment::heap(64 << 10)).unwrap();
    let region = pair.buffer(0, 64).region;
    const GUARD_AT: usize = 128;
    peer.own_page.write(GUARD_AT, &1u32.to_ne_bytes()).unwrap();
    let adapter = &mut pair.hosts[0].adapter;
    assert!(adapter.memory_is_quiet());
    adapter.rereg_mr(pair.now, region.id, None, None, Some(Access::LOCAL_WRITE)).unwrap();
    assert!(!adapter.memory_is_quiet(), "the peer is in the middle of an access");
    peer.own_page.write(GUARD_AT, &2u32.to_ne_bytes()).unwrap();
    assert!(adapter.memory_is_quiet());
}

/// A link speaks for the address of its engine only.
#[test]
fn a_link_cannot_speak_for_another_host() {
    for (address, expected) in [([10, 0, 0, 2], None), ([10, 0, 0, 3], Some(Reason::Mismatch))] {
        let mut pair = Pair::new(Way::LinkCopying);
        let (peer, _) = LinkPeer::asked(&mut pair, None);
        let num = QpNum::new(4001, 9);
        let adapter = &mut pair.hosts[0].adapter;
        let hello = Hello {
            kind: Kind::Request,
            path_mtu: 5,
            features: Features::ALL,
            dest_qpn: num.0,
            source_qpn: 0xfff00,
            rq_psn: 0,
            sq_psn: 0,
            service: Service::Rc,
            source_gid: Gid::from(IpAddr::from(address)).0,
            dest_gid: adapter.config().gid.0,
        };
        let end = LinkEnd { bell: 0, pd: 1 };
        let request = LinkMessage::Request { tag: 5, hello, offset: 4096, end };
        adapter.handle_link_message(pair.now, peer.link, request);
        let Some(Action::LinkSend { message: LinkMessage::Reject { tag: 5, hello }, .. }) =
            adapter.poll_action()
        else {
            panic!("no answer");
        };
        let reason = expected.unwrap_or(Reason::NoSuchQp);
        assert_eq!(hello.kind, Kind::Reject(reason));
    }
}

/// Anyone who answers in the place of an engine of this host gets none of its queue pairs.
#[test]
fn a_link_to_another_engine_is_not_used() {
    let mut pair = Pair::new(Way::LinkCopying);
    let (peer, _) = LinkPeer::asked(&mut pair, None);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.to_rtr(0, qps, &|attr| attr.av.dgid = Gid::from(IpAddr::from([10, 0, 0, 3])));
    let adapter = &mut pair.hosts[0].adapter;
    let Some(Action::Connect { conn, .. }) = adapter.poll_action() else {
        panic!("nothing to connect");
    };
    assert!(adapter.handle_reached_link(pair.now, conn, peer.link));
    assert_eq!(adapter.poll_action(), None);
    let again = adapter.poll_timeout().expect("it tries again");
    adapter.handle_timeout(again);
    assert!(matches!(adapter.poll_action(), Some(Action::Connect { .. })));
}
