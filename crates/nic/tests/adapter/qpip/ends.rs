//! How connections end: by closing, by aborting, by failing; and what that means to what is posted.

use quipu_nic::inet::tcp::{Failure, KeepAlive};

use super::net::{MILLISECOND, Net, SECOND, pattern};
use super::*;

#[test]
fn each_end_closes_its_own_direction() {
    for mode in MODES {
        let mut net = Net::new();
        let qps = net.connected(mode);
        let sinks = [0, 1].map(|host| net.buffer(host, 1 << 16));
        for host in 0..2 {
            net.recv(host, qps[host], 1, &[sinks[host].sge(0, 300)]);
            net.recv(host, qps[host], 2, &[sinks[host].sge(300, 300)]);
        }
        net.send_bytes(0, qps[0], 5, &pattern(1, 200));
        let now = net.now();
        net.adapter(0).tcp_close(now, qps[0]).unwrap();
        net.adapter(0).tcp_close(now, qps[0]).unwrap();
        net.run_for(SECOND);
        assert_eq!(brief(&net.poll(0)), [(5, WcStatus::Success, 200)], "what was posted went out");
        assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 200)]);
        assert_eq!(net.changes(1), [(qps[1], TcpChange::PeerClosed)]);
        assert_eq!(net.changes(0), []);
        // The other direction goes on.
        net.send_bytes(1, qps[1], 6, &pattern(2, 100));
        net.run_for(SECOND);
        assert_eq!(brief(&net.poll(1)), [(6, WcStatus::Success, 100)]);
        assert_eq!(brief(&net.poll(0)), [(1, WcStatus::Success, 100)]);
        assert_eq!(sinks[0].bytes(0, 100), pattern(2, 100));
        let now = net.now();
        net.adapter(1).tcp_close(now, qps[1]).unwrap();
        net.run_for(SECOND);
        assert_eq!(net.changes(0), [(qps[0], TcpChange::PeerClosed), (qps[0], TcpChange::Closed)]);
        assert_eq!(net.changes(1), [(qps[1], TcpChange::Closed)]);
        assert_eq!(net.states(qps), [QpState::Err; 2]);
        for (host, qp) in qps.into_iter().enumerate() {
            assert_eq!(brief(&net.poll(host)), [(2, WcStatus::WrFlushErr, 0)]);
            assert_eq!(net.adapter(host).tcp_flow(qp), None);
        }
    }
}

/// The last acknowledgement ends the connection, which is no reason to forget what it acknowledges.
#[test]
fn what_is_acknowledged_with_the_end_is_sent() {
    for (mode, lens) in
        MODES.into_iter().flat_map(|mode| [(mode, [1, 90_000]), (mode, [90_000; 2])])
    {
        let mut net = Net::new();
        let qps = net.connected(mode);
        let sinks = [0, 1].map(|host| net.buffer(host, 1 << 17));
        let sources = [0, 1].map(|host| net.buffer(host, 1 << 17));
        for host in 0..2 {
            net.recv(host, qps[host], 1, &[sinks[host].sge(0, 1 << 17)]);
        }
        // Both ends close while the longer stream is on its way.
        for host in 0..2 {
            sources[host].fill(0, &pattern(host as u64, lens[host]));
            net.send(host, qps[host], 2, &[sources[host].sge(0, lens[host])]);
            let now = net.now();
            net.adapter(host).tcp_close(now, qps[host]).unwrap();
        }
        net.run_for(5 * SECOND);
        for host in 0..2 {
            let mut done = brief(&net.poll(host));
            done.sort_by_key(|it| it.0);
            let (len, came) = (lens[host] as u32, lens[1 - host] as u32);
            assert_eq!(done, [(1, WcStatus::Success, came), (2, WcStatus::Success, len)]);
            assert_eq!(net.changes(host).last(), Some(&(qps[host], TcpChange::Closed)));
        }
    }
}

/// A message that is acknowledged is received, though it waits for a receive when everything else is over.
#[test]
fn what_is_kept_for_want_of_receives_is_received_before_the_end() {
    for peer_closes_first in [false, true] {
        let mut net = Net::new();
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let sink = net.buffer(1, 64 << 10);
        net.recv(1, qps[1], 0, &[sink.sge(0, 60 << 10)]);
        net.join(qps, Mode::Message);
        // The first of three messages is lost once, so that the others are kept.
        net.lose_first_message();
        for n in 0..3 {
            net.send_bytes(0, qps[0], n, &pattern(n, 100));
        }
        let order = if peer_closes_first { [0, 1] } else { [1, 0] };
        for host in order {
            let now = net.now();
            net.adapter(host).tcp_close(now, qps[host]).unwrap();
            net.run_for(SECOND);
        }
        // TIME-WAIT is over, too.
        net.run_for(100 * SECOND);
        assert_eq!(net.poll(0).len(), 3, "all are acknowledged");
        assert_eq!(brief(&net.poll(1)), [(0, WcStatus::Success, 100)]);
        assert_eq!(net.changes(1), []);
        for n in 1..3 {
            net.recv(1, qps[1], n, &[sink.sge(n as usize * 100, 100)]);
            assert_eq!(brief(&net.poll(1)), [(n, WcStatus::Success, 100)]);
            assert_eq!(sink.bytes(n as usize * 100, 100), pattern(n, 100));
        }
        let ends = [TcpChange::PeerClosed, TcpChange::Closed].map(|change| (qps[1], change));
        assert_eq!(net.changes(1), ends);
        assert_eq!(net.states(qps), [QpState::Err; 2]);
    }
}

#[test]
fn the_end_of_a_stream_completes_what_is_in_a_receive() {
    let mut net = Net::new();
    let qps = net.connected(Mode::Stream);
    let sink = net.buffer(1, 1 << 16);
    // The segment with the push is lost at first, the one before it is not.
    net.recv(1, qps[1], 1, &[sink.sge(0, 60_000)]);
    let source = net.buffer(0, 60_000);
    source.fill(0, &pattern(9, 5_000));
    net.send(0, qps[0], 1, &[source.sge(0, 5_000)]);
    let now = net.now();
    net.adapter(0).tcp_close(now, qps[0]).unwrap();
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 5_000)]);
    assert_eq!(sink.bytes(0, 5_000), pattern(9, 5_000));
}

#[test]
fn an_abort_flushes_both_ends() {
    for mode in MODES {
        let mut net = Net::new();
        let qps = net.connected(mode);
        let sinks = [0, 1].map(|host| net.buffer(host, 1000));
        // Host 0 has posted no receive.
        net.send_bytes(1, qps[1], 2, &pattern(1, 200));
        net.send_bytes(1, qps[1], 3, &pattern(1, 200));
        net.run_for(100_000);
        let now = net.now();
        net.adapter(0).tcp_abort(now, qps[0]).unwrap();
        assert_eq!(net.changes(0), [(qps[0], TcpChange::Aborted)]);
        assert_eq!(net.states(qps), [QpState::Err, QpState::Rts]);
        net.poll(0);
        net.run_for(SECOND);
        assert_eq!(net.changes(1), [(qps[1], TcpChange::Failed(Failure::Reset))]);
        assert_eq!(brief(&net.poll(1)), [(2, WcStatus::RemOpErr, 0), (3, WcStatus::WrFlushErr, 0)]);
        assert_eq!(net.states(qps), [QpState::Err; 2]);
        // What is posted now is flushed.
        net.recv(1, qps[1], 4, &[sinks[1].sge(0, 10)]);
        assert_eq!(brief(&net.poll(1)), [(4, WcStatus::WrFlushErr, 0)]);
    }
}

#[test]
fn a_peer_that_vanishes_is_given_up() {
    for mode in MODES {
        let mut net = Net::new();
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let sink = net.buffer(1, 1000);
        net.recv(1, qps[1], 1, &[sink.sge(0, 1000)]);
        net.join(qps, mode);
        net.filter = Some(Box::new(|_, _| false));
        net.send_bytes(0, qps[0], 2, &[1, 2, 3]);
        net.send_bytes(0, qps[0], 3, &[4]);
        net.run_for(100 * SECOND);
        assert_eq!(net.poll(0), []);
        net.run_for(60 * SECOND);
        assert_eq!(net.changes(0), [(qps[0], TcpChange::Failed(Failure::TimedOut))]);
        assert_eq!(
            brief(&net.poll(0)),
            [(2, WcStatus::RetryExcErr, 0), (3, WcStatus::WrFlushErr, 0)]
        );
    }
}

#[test]
fn a_silent_peer_is_asked_for_a_sign_of_life_if_the_program_wants_that() {
    let mut net = Net::new();
    let keep_alive = inet::tcp::KeepAlive { idle: 10 * SECOND, interval: SECOND, probes: 5 };
    let settings = TcpSettings { keep_alive: Some(keep_alive), ..TcpSettings::default() };
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let listener = net.listen(1, 9000, &TcpSettings::default());
    net.offer(1, listener, qps[1]).unwrap();
    let to = net.address(1, 9000);
    net.connect(0, qps[0], to, &settings).unwrap();
    net.run_for(60 * SECOND);
    assert_eq!(net.changes(0), [(qps[0], TcpChange::Connected)]);
    net.filter = Some(Box::new(|_, _| false));
    net.run_for(60 * SECOND);
    assert_eq!(net.changes(0), [(qps[0], TcpChange::Failed(Failure::TimedOut))]);
    assert_eq!(net.changes(1)[1..], []);
}

#[test]
fn sends_wait_while_the_peer_has_no_receive() {
    for mode in MODES {
        let mut net = Net::new();
        let qps = net.connected(mode);
        let sink = net.buffer(1, 1000);
        for n in 0..5 {
            net.send_bytes(0, qps[0], n, &pattern(n, 100));
        }
        net.run_for(30 * SECOND);
        assert_eq!(net.poll(1), []);
        if mode == Mode::Stream {
            // All but a unit of the window, which is kept.
            assert_eq!(brief(&net.poll(0)), [(0, WcStatus::Success, 100)]);
            for (n, at) in [(0, 0), (1, 128)] {
                net.recv(1, qps[1], n, &[sink.sge(at, 500)]);
            }
            net.run_for(5 * SECOND);
            let done = [(0, WcStatus::Success, 128), (1, WcStatus::Success, 372)];
            assert_eq!(brief(&net.poll(1)), done);
            let all: Vec<u8> = (0..5).flat_map(|n| pattern(n, 100)).collect();
            assert_eq!(sink.bytes(0, 500), all);
            assert_eq!(net.poll(0).len(), 4);
            continue;
        }
        assert_eq!(net.poll(0), []);
        for n in 0..5 {
            net.recv(1, qps[1], n, &[sink.sge(n as usize * 100, 100)]);
            net.run_for(5 * SECOND);
            assert_eq!(brief(&net.poll(1)), [(n, WcStatus::Success, 100)]);
            assert_eq!(sink.bytes(n as usize * 100, 100), pattern(n, 100));
            assert_eq!(brief(&net.poll(0)), [(n, WcStatus::Success, 100)]);
        }
        assert_eq!(net.changes(0), []);
    }
}

#[test]
fn a_message_longer_than_its_receive_ends_the_connection() {
    // The receive; the message: one segment, one that fills the receive and goes on, many segments.
    for (room, len) in [(199, 200), (1_000, 1_441), (1440, 3_000), (10_000, 20_000)] {
        let mut net = Net::new();
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let (source, sink) = (net.buffer(0, 1 << 16), net.buffer(1, 1 << 16));
        net.recv(1, qps[1], 1, &[sink.sge(0, room)]);
        net.recv(1, qps[1], 2, &[sink.sge(room, 40_000)]);
        net.join(qps, Mode::Message);
        source.fill(0, &pattern(4, len));
        net.send(0, qps[0], 1, &[source.sge(0, len)]);
        net.run_for(SECOND);
        let got = brief(&net.poll(1));
        assert_eq!(got, [(1, WcStatus::LocLenErr, 0), (2, WcStatus::WrFlushErr, 0)]);
        assert_eq!(net.changes(1), [(qps[1], TcpChange::Aborted)]);
        assert_eq!(brief(&net.poll(0)), [(1, WcStatus::RemOpErr, 0)]);
        assert_eq!(net.changes(0), [(qps[0], TcpChange::Failed(Failure::Reset))]);
        assert_eq!(sink.bytes(room, 100), vec![0; 100], "nothing beside the receive");
    }
}

/// The same where it is the only receive: the sender keeps to the window, which is of whole units.
#[test]
fn a_message_longer_than_all_receives_ends_the_connection() {
    for (room, len) in [(1_500, 2_000), (199, 200), (1_430, 1_441), (10_000, 20_000), (0, 45)] {
        let mut net = Net::new();
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let (source, sink) = (net.buffer(0, 1 << 16), net.buffer(1, 1 << 16));
        net.recv(1, qps[1], 1, &[sink.sge(0, room)]);
        net.join(qps, Mode::Message);
        net.send(0, qps[0], 1, &[source.sge(0, len)]);
        net.run_for(5 * SECOND);
        assert_eq!(brief(&net.poll(1)), [(1, WcStatus::LocLenErr, 0)], "{len} to {room}");
        assert_eq!(brief(&net.poll(0)), [(1, WcStatus::RemOpErr, 0)]);
    }
}

#[test]
fn a_drain_waits_for_what_is_under_way_and_holds_back_the_rest() {
    let mut net = Net::new();
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let sink = net.buffer(1, 1000);
    for n in 0..2 {
        net.recv(1, qps[1], n, &[sink.sge(0, 100)]);
    }
    net.join(qps, Mode::Message);
    net.send_bytes(0, qps[0], 1, &[1]);
    net.to(0, qps[0], QpState::Sqd).unwrap();
    net.send_bytes(0, qps[0], 2, &[2]);
    assert!(net.adapter(0).query_qp(qps[0]).unwrap().attr.sq_draining);
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(0)), [(1, WcStatus::Success, 1)]);
    assert!(!net.adapter(0).query_qp(qps[0]).unwrap().attr.sq_draining);
    net.to(0, qps[0], QpState::Rts).unwrap();
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(0)), [(2, WcStatus::Success, 1)]);
}

#[test]
fn a_queue_pair_may_be_destroyed_in_the_middle_of_anything() {
    for mode in MODES {
        for instant in 0..60 {
            for host in 0..2 {
                for how in 0..3 {
                    destroy_after(mode, instant * 20_000, host, how);
                }
            }
        }
    }
}

fn destroy_after(mode: Mode, ns: u64, host: usize, how: u8) {
    let mut net = Net::new();
    let settings = TcpSettings { mode, ..TcpSettings::default() };
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let buffers = [0, 1].map(|host| net.buffer(host, 1 << 16));
    let (listener, port) = net.adapter(1).tcp_listen(0, &settings, 4).unwrap();
    for host in 0..2 {
        for n in 0..4 {
            net.recv(host, qps[host], n, &[buffers[host].sge(0, 1 << 14)]);
        }
    }
    net.offer(1, listener, qps[1]).unwrap();
    let to = net.address(1, port);
    net.connect(0, qps[0], to, &settings).unwrap();
    let mut sent = false;
    net.run_while(ns, |net| {
        if !sent && net.states(qps) == [QpState::Rts; 2] {
            sent = true;
            for host in 0..2 {
                net.send(host, qps[host], 9, &[buffers[host].sge(1 << 15, 1 << 14)]);
            }
        }
        true
    });
    let now = net.now();
    match how {
        0 => net.adapter(host).destroy_qp(now, qps[host]).unwrap(),
        1 => net.to(host, qps[host], QpState::Reset).unwrap(),
        _ => net.to(host, qps[host], QpState::Err).unwrap(),
    }
    // Otherwise the peer would wait for another one to be offered.
    net.adapter(1).tcp_unlisten(listener);
    net.run_for(300 * SECOND);
    let other = 1 - host;
    let stranded = net.state(other, qps[other]);
    // Nobody ever came; or nobody listened any more.
    let [refused, idle] = [0, 1].map(|host| other == host && stranded == QpState::Init);
    assert!(stranded == QpState::Err || idle || refused, "{ns} {host} {how}: {stranded:?}");
    for host in 0..2 {
        let adapter = net.adapter(host);
        assert!(!adapter.has_frames());
        assert!(adapter.poll_timeout().is_none(), "nothing is left of it");
    }
    let ends = net.changes(other).into_iter().filter(|(_, change)| {
        matches!(change, TcpChange::Closed | TcpChange::Failed(_) | TcpChange::Aborted)
    });
    assert_eq!(ends.count(), usize::from(!idle));
    net.run_for(MILLISECOND);
}

#[test]
fn a_completion_too_many_ends_the_connection() {
    for mode in MODES {
        for receives in [false, true] {
            let mut net = Net::new();
            let host = usize::from(receives);
            let (small, _) = net.adapter(host).create_cq(1, None, 0).unwrap();
            let make = |net: &mut Net, end: usize| {
                net.qp_with(end, QpType::Tcp, |init| {
                    if end == host && receives {
                        init.recv_cq = small;
                    } else if end == host {
                        init.send_cq = small;
                    }
                })
            };
            let qps = [make(&mut net, 0), make(&mut net, 1)];
            let sink = net.buffer(1, 1000);
            for n in 0..4 {
                net.recv(1, qps[1], n, &[sink.sge(n as usize * 100, 100)]);
            }
            net.join(qps, mode);
            for n in 0..3 {
                net.send_bytes(0, qps[0], n, &pattern(n, 100));
            }
            net.run_for(SECOND);
            assert_eq!(net.state(host, qps[host]), QpState::Err);
            assert_eq!(net.changes(host), [(qps[host], TcpChange::Aborted)]);
            let fatal = Event::Async(AsyncEvent::QpFatal(qps[host]));
            assert!(net.host(host).events.contains(&fatal));
            let other = 1 - host;
            assert_eq!(net.changes(other), [(qps[other], TcpChange::Failed(Failure::Reset))]);
        }
    }
}

#[test]
fn patience_may_be_without_end() {
    for mode in MODES {
        let settings = TcpSettings {
            mode,
            keep_alive: Some(KeepAlive { idle: u64::MAX, interval: u64::MAX, probes: 3 }),
            user_timeout_ns: u64::MAX,
            connect_timeout_ns: u64::MAX,
            ..TcpSettings::default()
        };
        let mut net = Net::new();
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let sink = net.buffer(1, 1000);
        net.recv(1, qps[1], 1, &[sink.sge(0, 1000)]);
        let listener = net.listen(1, 700, &settings);
        net.offer(1, listener, qps[1]).unwrap();
        let to = net.address(1, 700);
        net.connect(0, qps[0], to, &settings).unwrap();
        net.run_for(SECOND);
        net.send_bytes(0, qps[0], 2, &[1, 2, 3]);
        net.run_for(1_000 * SECOND);
        assert_eq!(brief(&net.poll(0)), [(2, WcStatus::Success, 3)]);
        net.filter = Some(Box::new(|_, _| false));
        net.send_bytes(0, qps[0], 3, &[4]);
        net.run_for(10_000 * SECOND);
        assert_eq!(net.states(qps), [QpState::Rts; 2]);
    }
}

/// An interface that is deleted takes everybody on it along.
#[test]
fn with_the_link_everything_on_it_is_gone() {
    let mut net = Net::new();
    let [qp, _] = net.connected(Mode::Stream);
    let datagrams = net.qp(0, QpType::Udp);
    net.adapter(0).udp_bind(datagrams, 7).unwrap();
    let idle = net.qp(0, QpType::Tcp);
    let listener = net.listen(0, 80, &TcpSettings::default());
    net.offer(0, listener, idle).unwrap();
    let sink = net.buffer(0, 64);
    for (id, qp) in [(1, qp), (2, datagrams), (3, idle)] {
        net.recv(0, qp, id, &[sink.sge(0, 64)]);
    }
    let now = net.now();
    net.adapter(0).lose_link(now);
    assert_eq!(net.changes(0), [(qp, TcpChange::Aborted)]);
    let mut flushed = brief(&net.poll(0));
    flushed.sort_unstable_by_key(|it| it.0);
    assert_eq!(flushed, [1, 2, 3].map(|id| (id, WcStatus::WrFlushErr, 0)));
    for qp in [qp, datagrams, idle] {
        assert_eq!(net.state(0, qp), QpState::Err);
    }
}
