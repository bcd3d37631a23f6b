//! Queue pairs of one adapter that reach each other by its own addresses.

use super::net::{MILLISECOND, Net, SECOND, pattern};
use super::*;

const LEN: usize = 200_000;

/// Two queue pairs of adapter 0, connected; how often it sent anything to its link is kept.
fn connected(net: &mut Net, mode: Mode) -> [QpId; 2] {
    net.keep = true;
    let qps = [0; 2].map(|host| net.qp(host, QpType::Tcp));
    let settings = TcpSettings { mode, ..TcpSettings::default() };
    let listener = net.listen(0, 7, &settings);
    net.offer(0, listener, qps[1]).unwrap();
    let to = net.address(0, 7);
    net.connect(0, qps[0], to, &settings).unwrap();
    net.run_for(MILLISECOND);
    let mut changes = net.changes(0);
    changes.sort_by_key(|(qp, _)| qps.iter().position(|it| it == qp));
    assert_eq!(changes, qps.map(|qp| (qp, TcpChange::Connected)));
    qps
}

#[test]
fn messages_and_streams_arrive_whole_and_no_frame_leaves() {
    for (mode, v4) in [(Mode::Message, false), (Mode::Stream, true)] {
        let mut net = Net::new();
        net.v4 = v4;
        let qps = connected(&mut net, mode);
        let (source, sinks) = (net.buffer(0, LEN), [0; 2].map(|host| net.buffer(host, LEN)));
        source.fill(0, &pattern(1, LEN));
        for (to, sink) in [1, 0].into_iter().zip(&sinks) {
            net.recv(0, qps[to], 10 + to as u64, &[sink.sge(0, LEN)]);
            net.send(0, qps[1 - to], to as u64, &[source.sge(0, LEN)]);
        }
        net.run_for(SECOND);
        let mut done = brief(&net.poll(0));
        done.sort_by_key(|(wr_id, ..)| *wr_id);
        let whole = |wr_id| (wr_id, WcStatus::Success, LEN as u32);
        assert_eq!(done, [0, 1, 10, 11].map(whole));
        for sink in &sinks {
            assert!(sink.bytes(0, LEN) == pattern(1, LEN));
        }
        assert_eq!(net.sent[0].len(), 0, "the link has nothing of it");
        let now = net.now();
        for qp in qps {
            net.adapter(0).tcp_close(now, qp).unwrap();
        }
        net.run_for(SECOND);
        let closed = net.changes(0);
        assert_eq!(
            closed.iter().filter(|(_, it)| *it == TcpChange::Closed).count(),
            2,
            "{closed:?}"
        );
    }
}

#[test]
fn a_call_takes_a_bounded_number_of_them_and_others_have_their_turn() {
    let mut net = Net::new();
    let qps = connected(&mut net, Mode::Stream);
    let (source, sink) = (net.buffer(0, LEN), net.buffer(0, LEN));
    net.recv(0, qps[1], 1, &[sink.sge(0, LEN)]);
    net.send(0, qps[0], 2, &[source.sge(0, LEN)]);
    let (now, mut out) = (net.now(), vec![0; 2_000]);
    let looped = |net: &mut Net| net.adapter(0).inet().unwrap().counters().looped;
    let before = looped(&mut net);
    assert_eq!(net.adapter(0).transmit_frame(now, &mut out), None);
    let taken = looped(&mut net) - before;
    assert!((1..=64).contains(&taken), "{taken}");
    assert!(net.adapter(0).has_frames(), "there is more");
    // A datagram for somebody else does not wait for all of it.
    let udp = net.qp(0, QpType::Udp);
    net.adapter(0).udp_bind(udp, 0).unwrap();
    let to = To::Address(net.address(1, 9));
    let (op, flags, payload) = (SendOp::Send, SendFlags::SIGNALED, Payload::Inline(b"hello"));
    net.post(0, udp, &SendWr { wr_id: 3, to, op, flags, payload }).unwrap();
    assert!(net.adapter(0).transmit_frame(now, &mut out).is_some());
    net.run_for(SECOND);
    assert_eq!(net.poll(0).len(), 3);
}

#[test]
fn a_datagram_to_an_own_address_takes_a_receive() {
    for v4 in [false, true] {
        let mut net = Net::new();
        (net.v4, net.keep) = (v4, true);
        let qps = [0; 2].map(|host| net.qp(host, QpType::Udp));
        net.adapter(0).udp_bind(qps[0], 700).unwrap();
        let port = net.adapter(0).udp_bind(qps[1], 0).unwrap();
        let sink = net.buffer(0, 100);
        net.recv(0, qps[1], 9, &[sink.sge(0, 100)]);
        let to = To::Address(net.address(0, port));
        let (op, flags, payload) = (SendOp::Send, SendFlags::SIGNALED, Payload::Inline(b"me"));
        net.post(0, qps[0], &SendWr { wr_id: 5, to, op, flags, payload }).unwrap();
        net.run_for(1);
        let done = net.poll(0);
        assert_eq!(brief(&done), [(5, WcStatus::Success, 2), (9, WcStatus::Success, 2)]);
        let WcExtra::From(source) = done[1].extra else { panic!("nobody sent it") };
        assert_eq!(std::net::SocketAddr::from(source), net.address(0, 700));
        assert_eq!(sink.bytes(0, 2), b"me");
        assert_eq!(net.sent[0].len(), 0);
    }
}

#[test]
fn nobody_there_is_a_refusal() {
    let mut net = Net::new();
    let qp = net.qp(0, QpType::Tcp);
    let to = net.address(0, 7);
    net.connect(0, qp, to, &TcpSettings::default()).unwrap();
    net.run_for(1);
    let refused = TcpChange::Failed(quipu_nic::inet::tcp::Failure::Refused);
    assert_eq!(net.changes(0), [(qp, refused)]);
}
