//! Streams whose receives are complete before they are full, and peers that end towards a queue pair without
//! any.

use std::cell::RefCell;
use std::rc::Rc;

use quipu_wire::tcp::{Flags, Repr};

use super::net::{Net, SECOND, pattern};
use super::*;

/// An IPv6 header.
const IP: usize = 40;
/// The unit of windows of up to 4 MB.
const UNIT: u64 = 128;

/// The TCP segment in a frame, and how many octets it carries.
fn segment(frame: &[u8]) -> (Repr, usize) {
    let (repr, header) = Repr::parse(&frame[IP..]).unwrap();
    (repr, frame.len() - IP - header)
}

/// Two connected queue pairs, of which that of host 1 has posted receives of these sizes, and its memory.
fn receiving(net: &mut Net, sizes: &[usize]) -> ([QpId; 2], crate::pair::Buffer) {
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let sink = net.buffer(1, 1 << 23);
    let mut at = 0;
    for (n, &size) in sizes.iter().enumerate() {
        net.recv(1, qps[1], n as u64, &[sink.sge(at, size)]);
        at += size;
    }
    net.join(qps, Mode::Stream);
    (qps, sink)
}

/// What is watched on the way: nothing is sent twice, and no window shrinks.
fn watch(net: &mut Net) -> Rc<RefCell<u64>> {
    let carried = Rc::new(RefCell::new(0));
    let (sum, mut edge) = (Rc::clone(&carried), 0);
    net.filter = Some(Box::new(move |to, frame| {
        let (segment, len) = segment(frame);
        if to == 1 {
            *sum.borrow_mut() += len as u64;
        } else if !segment.flags.has(Flags::SYN) {
            let offered = u64::from(segment.ack.0) + u64::from(segment.window) * UNIT;
            // A unit of the scale is a matter of rounding (RFC 7323 2.4).
            assert!(offered + UNIT > edge, "{offered} octets, and before {edge}");
            edge = edge.max(offered);
        }
        true
    }));
    carried
}

/// Each octet is a segment with PSH and takes a receive, more of which are in the window than there are.
#[test]
fn a_stream_of_single_octets_goes_through() {
    let mut net = Net::new();
    let (qps, sink) = receiving(&mut net, &[1000; 4]);
    let carried = watch(&mut net);
    let (total, mut sent, mut got) = (2_000, 0, Vec::new());
    let bytes = pattern(1, total);
    net.run_while(60 * SECOND, |net| {
        net.poll(0);
        // Faster than anybody reads.
        for _ in 0..3 {
            if sent < total && sent < got.len() + 200 {
                net.send_bytes(0, qps[0], 0, &bytes[sent..=sent]);
                sent += 1;
            }
        }
        if let Some(&done) = net.poll(1).first() {
            assert_eq!(done.status, WcStatus::Success);
            let at = done.wr_id as usize * 1000;
            got.extend(sink.bytes(at, done.byte_len as usize));
            net.recv(1, qps[1], done.wr_id, &[sink.sge(at, 1000)]);
        }
        got.len() < total
    });
    assert_eq!(got.len(), total);
    assert!(got == bytes);
    assert_eq!(*carried.borrow(), total as u64, "nothing went twice");
}

#[test]
fn what_no_receive_is_there_for_any_more_is_kept_and_waits_for_one() {
    let mut net = Net::new();
    let (qps, sink) = receiving(&mut net, &[1000]);
    let carried = watch(&mut net);
    net.send_bytes(0, qps[0], 1, &pattern(1, 30));
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(0, WcStatus::Success, 30)]);
    // The window was of 1000 octets.
    net.send_bytes(0, qps[0], 2, &pattern(2, 200));
    net.send_bytes(0, qps[0], 3, &pattern(3, 200));
    net.run_for(SECOND);
    let done = brief(&net.poll(0));
    assert_eq!(done, [1, 2, 3].map(|n| (n, WcStatus::Success, [30, 200, 200][n as usize - 1])));
    assert_eq!(net.poll(1), []);
    let expected = [pattern(2, 200), pattern(3, 200)].concat();
    net.recv(1, qps[1], 5, &[sink.sge(0, 150)]);
    net.recv(1, qps[1], 6, &[sink.sge(150, 1000)]);
    assert_eq!(
        brief(&net.poll(1)),
        [(5, WcStatus::Success, 150), (6, WcStatus::Success, 250)],
        "at once"
    );
    assert_eq!(sink.bytes(0, 400), expected);
    // And on it goes.
    net.recv(1, qps[1], 7, &[sink.sge(0, 1000)]);
    net.send_bytes(0, qps[0], 4, &pattern(4, 100));
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(7, WcStatus::Success, 100)]);
    assert_eq!(sink.bytes(0, 100), pattern(4, 100));
    assert_eq!(*carried.borrow(), 530);
}

#[test]
fn what_is_kept_is_bounded_and_the_rest_comes_again() {
    let mut net = Net::new();
    let (qps, sink) = receiving(&mut net, &[4 << 20]);
    net.send_bytes(0, qps[0], 1, &[7; 10]);
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(0, WcStatus::Success, 10)]);
    let (source, total) = (net.buffer(0, 1 << 20), 1 << 20);
    source.fill(0, &pattern(2, total));
    net.send(0, qps[0], 2, &[source.sge(0, total)]);
    net.run_for(5 * SECOND);
    assert_eq!((net.poll(0).len(), net.poll(1)), (1, vec![]));
    assert!(net.adapter(1).inet().unwrap().counters().tcp_no_room > 0, "each of them is counted");
    let kept = 256 << 10;
    net.recv(1, qps[1], 1, &[sink.sge(0, total)]);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, kept as u32)]);
    net.recv(1, qps[1], 2, &[sink.sge(kept, total)]);
    net.run_for(300 * SECOND);
    assert_eq!(brief(&net.poll(1)), [(2, WcStatus::Success, (total - kept) as u32)]);
    assert!(sink.bytes(0, total) == pattern(2, total));
    assert_eq!(only(net.poll(0)).wr_id, 2);
}

/// Connections without receives, for each of which more is on the way than all of them may keep.
fn crowd(net: &mut Net, each: usize) -> Vec<([QpId; 2], crate::pair::Buffer)> {
    let ends: Vec<_> = (0..70).map(|_| receiving(net, &[4 << 20])).collect();
    let source = net.buffer(0, each);
    source.fill(0, &pattern(2, each));
    for (qps, _) in &ends {
        net.send_bytes(0, qps[0], 1, &[7; 10]);
    }
    net.run_for(SECOND);
    assert_eq!(net.poll(1).len(), ends.len());
    for (qps, _) in &ends {
        net.send(0, qps[0], 2, &[source.sge(0, each)]);
    }
    net.run_for(5 * SECOND);
    assert_eq!(net.poll(1), []);
    ends
}

#[test]
fn what_all_connections_keep_is_bounded_too() {
    let (each, all) = (256 << 10, 16 << 20);
    let mut net = Net::new();
    for (qps, _) in crowd(&mut net, each) {
        let now = net.now();
        net.adapter(1).tcp_abort(now, qps[1]).unwrap();
    }
    net.run_for(SECOND);
    for host in 0..2 {
        net.poll(host);
        net.changes(host);
    }
    // What was kept for those is forgotten: there is room for these.
    let ends = crowd(&mut net, each);
    let (mut sum, all_of_it) = (0, ends.len() * each);
    for (turn, wait) in [(0, 0), (1, 300 * SECOND)] {
        for (n, (qps, sink)) in ends.iter().enumerate() {
            net.recv(1, qps[1], n as u64, &[sink.sge(turn << 20, each)]);
        }
        net.run_for(wait);
        let done = net.poll(1);
        assert!(done.iter().all(|it| it.status == WcStatus::Success));
        sum += done.iter().map(|it| it.byte_len as usize).sum::<usize>();
        // Each keeps a little in any case.
        let expected =
            if turn == 0 { all..=all + (ends.len() << 14) } else { all_of_it..=all_of_it };
        assert!(expected.contains(&sum), "{sum}");
    }
}

/// Programs may share an adapter, and one of them may not receive: others do not wait for it.
#[test]
fn a_connection_keeps_a_little_whatever_others_keep() {
    let mut net = Net::new();
    let _others = crowd(&mut net, 256 << 10);
    let (qps, sink) = receiving(&mut net, &[16 << 10]);
    net.poll(0);
    let len = 12_000;
    net.send_bytes(0, qps[0], 1, &[7; 10]);
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(0, WcStatus::Success, 10)]);
    let source = net.buffer(0, len);
    source.fill(0, &pattern(3, len));
    net.send(0, qps[0], 2, &[source.sge(0, len)]);
    net.run_for(SECOND);
    net.recv(1, qps[1], 3, &[sink.sge(0, len)]);
    assert_eq!(brief(&net.poll(1)), [(3, WcStatus::Success, len as u32)], "at once");
    assert!(sink.bytes(0, len) == pattern(3, len));
}

/// The end is behind what is kept, for the program as for the peer; whichever end closes first.
#[test]
fn the_end_comes_behind_what_is_kept() {
    for first in 0..2 {
        let mut net = Net::new();
        let (qps, sink) = receiving(&mut net, &[1000]);
        net.send_bytes(0, qps[0], 1, &pattern(1, 30));
        net.run_for(SECOND);
        assert_eq!(net.poll(1).len(), 1);
        let source = net.buffer(0, 500);
        source.fill(0, &pattern(2, 500));
        net.send(0, qps[0], 2, &[source.sge(0, 500)]);
        for host in [first, 1 - first] {
            let now = net.now();
            net.adapter(host).tcp_close(now, qps[host]).unwrap();
            net.run_for(SECOND);
        }
        // Longer than TIME-WAIT.
        net.run_for(300 * SECOND);
        assert_eq!(net.changes(0).last(), Some(&(qps[0], TcpChange::Closed)));
        assert_eq!((net.changes(1), net.poll(1)), (vec![], vec![]));
        net.recv(1, qps[1], 1, &[sink.sge(0, 400)]);
        assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 400)]);
        assert_eq!(net.changes(1), []);
        net.recv(1, qps[1], 2, &[sink.sge(400, 400)]);
        assert_eq!(brief(&net.poll(1)), [(2, WcStatus::Success, 100)]);
        assert_eq!(sink.bytes(0, 500), pattern(2, 500));
        let ends = [TcpChange::PeerClosed, TcpChange::Closed].map(|change| (qps[1], change));
        assert_eq!(net.changes(1), ends);
        assert_eq!(net.state(1, qps[1]), QpState::Err);
    }
}

/// A reset takes what is kept with it, as it takes what is under way.
#[test]
fn what_is_kept_goes_with_its_connection() {
    let mut net = Net::new();
    let (qps, _) = receiving(&mut net, &[1000]);
    for n in 0..2 {
        net.send_bytes(0, qps[0], n, &pattern(n, 100));
        net.run_for(SECOND);
    }
    assert_eq!(net.poll(1).len(), 1);
    let now = net.now();
    net.adapter(0).tcp_abort(now, qps[0]).unwrap();
    net.run_for(SECOND);
    let failed = TcpChange::Failed(quipu_nic::inet::tcp::Failure::Reset);
    assert_eq!(net.changes(1), [(qps[1], failed)]);
    for state in [QpState::Reset, QpState::Init] {
        net.to(1, qps[1], state).unwrap();
    }
    let sink = net.buffer(1, 1000);
    net.recv(1, qps[1], 9, &[sink.sge(0, 1000)]);
    assert_eq!(net.poll(1), []);
}

/// There are peers that send no FIN into a closed window: it is never closed entirely while nothing is kept.
#[test]
fn a_window_without_receives_has_room_for_an_end() {
    let mut net = Net::new();
    net.keep = true;
    let (qps, sink) = receiving(&mut net, &[100]);
    net.send_bytes(0, qps[0], 1, &pattern(1, 100));
    net.run_for(SECOND);
    assert_eq!(net.poll(1).len(), 1);
    let window = |net: &Net| segment(net.sent[1].last().unwrap()).0.window;
    assert_eq!(window(&net), 1, "one unit");
    // A peer may use it. After that, there is nothing more.
    let source = net.buffer(0, 5000);
    source.fill(0, &pattern(2, 5000));
    net.send(0, qps[0], 2, &[source.sge(0, 5000)]);
    net.run_for(60 * SECOND);
    assert_eq!(window(&net), 0);
    net.recv(1, qps[1], 2, &[sink.sge(0, 5000)]);
    net.recv(1, qps[1], 3, &[sink.sge(5000, 5000)]);
    net.run_for(120 * SECOND);
    assert_eq!(brief(&net.poll(1)), [(2, WcStatus::Success, 128), (3, WcStatus::Success, 4872)]);
    assert_eq!(sink.bytes(0, 128), pattern(2, 5000)[..128]);
    assert_eq!(sink.bytes(5000, 4872), pattern(2, 5000)[128..]);
}
