//! Messages and streams over TCP.

use super::net::{MILLISECOND, Net, SECOND, STORM, Weather, pattern};
use super::*;

#[test]
fn a_send_is_complete_when_it_is_acknowledged() {
    for v4 in [false, true] {
        for mode in MODES {
            let mut net = Net::new();
            net.v4 = v4;
            let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
            let buffers = [0, 1].map(|host| net.buffer(host, 4096));
            net.recv(1, qps[1], 7, &[buffers[1].sge(100, 30), buffers[1].sge(500, 1000)]);
            net.join(qps, mode);
            let bytes = pattern(1, 900);
            buffers[0].fill(0, &bytes);
            net.send(0, qps[0], 3, &[buffers[0].sge(0, 10), buffers[0].sge(10, 890)]);
            net.run_for(60_000);
            assert_eq!(net.poll(0), [], "the peer's word is still on its way");
            let got = only(net.poll(1));
            assert_eq!((got.wr_id, got.status, got.byte_len), (7, WcStatus::Success, 900));
            assert_eq!(got.opcode, WcOpcode::Recv);
            assert_eq!([buffers[1].bytes(100, 30), buffers[1].bytes(500, 870)].concat(), bytes);
            net.run_for(100 * MILLISECOND);
            let done = only(net.poll(0));
            assert_eq!(
                (done.wr_id, done.status, done.opcode),
                (3, WcStatus::Success, WcOpcode::Send)
            );
            let flow = net.adapter(0).tcp_flow(qps[0]).unwrap();
            let back = net.adapter(1).tcp_flow(qps[1]).unwrap();
            assert_eq!((flow.local, flow.remote), (back.remote, back.local));
        }
    }
}

/// Sends messages of many sizes both ways, and looks at every octet.
fn exchange(net: &mut Net, mode: Mode, rounds: usize) {
    let qps = net.connected(mode);
    let sizes = |round: usize| [1, 1440, 1439, 40_000, 3, 9_000, 200, 65_000][round % 8];
    let buffers = [0, 1].map(|host| net.buffer(host, 1 << 17));
    let sinks = [0, 1].map(|host| net.buffer(host, 8 << 16));
    let mut posted = [0; 2];
    let mut sent = [0; 2];
    let mut acked = [0; 2];
    let mut got: [Vec<u8>; 2] = Default::default();
    let mut lengths: [Vec<usize>; 2] = Default::default();
    let expected: Vec<u8> = (0..rounds).flat_map(|it| pattern(it as u64, sizes(it))).collect();
    net.run_while(600 * SECOND, |net| {
        for host in 0..2 {
            for done in net.poll(host) {
                assert_eq!(done.status, WcStatus::Success);
                if done.opcode == WcOpcode::Send {
                    assert_eq!(done.wr_id, acked[host]);
                    acked[host] += 1;
                } else {
                    let slot = (done.wr_id % 8) as usize;
                    got[host].extend(sinks[host].bytes(slot << 16, done.byte_len as usize));
                    lengths[host].push(done.byte_len as usize);
                    posted[host] -= 1;
                }
            }
            while posted[host] < 8 {
                let slot = (lengths[host].len() + posted[host]) % 8;
                net.recv(host, qps[host], slot as u64, &[sinks[host].sge(slot << 16, 1 << 16)]);
                posted[host] += 1;
            }
            if sent[host] < rounds && acked[host] == sent[host] as u64 {
                let len = sizes(sent[host]);
                buffers[host].fill(0, &pattern(sent[host] as u64, len));
                net.send(host, qps[host], sent[host] as u64, &[buffers[host].sge(0, len)]);
                sent[host] += 1;
            }
        }
        (0..2).any(|host| acked[host] < rounds as u64 || got[host].len() < expected.len())
    });
    for host in 0..2 {
        assert_eq!(acked[host], rounds as u64);
        assert!(got[host] == expected, "host {host} got other bytes");
        if mode == Mode::Message {
            assert_eq!(lengths[host], (0..rounds).map(sizes).collect::<Vec<_>>());
        }
    }
}

#[test]
fn every_octet_arrives_once_and_in_its_place() {
    for mode in MODES {
        for mtu in [1280, 1500, 9000, 65_535] {
            exchange(&mut Net::with(1, |config| config.mtu = mtu), mode, 24);
        }
    }
}

#[test]
fn a_link_that_cuts_segments_gets_what_several_requests_have_in_one_frame() {
    for mode in MODES {
        for weather in [Weather::default(), STORM] {
            let mut net = Net::with(2, |config| config.offload.segment = 65_000);
            net.weather = weather;
            exchange(&mut net, mode, 24);
            assert!(net.cut > 10, "{} frames", net.cut);
        }
    }
}

#[test]
fn segments_may_come_in_parts() {
    for mode in MODES {
        for v4 in [false, true] {
            let mut net = Net::with(3, |config| config.mtu = 9_000);
            (net.v4, net.parts) = (v4, 1_400);
            net.weather = Weather { loss: 5, doubled: 30, spoilt: 5, late: MILLISECOND };
            exchange(&mut net, mode, 24);
        }
    }
}

#[test]
fn every_octet_arrives_through_a_storm() {
    for mode in MODES {
        for seed in 1..=6 {
            println!("seed {seed}");
            let mut net = Net::with(seed, |config| config.mtu = 1500);
            net.weather = STORM;
            exchange(&mut net, mode, 24);
        }
    }
}

/// Messages that come before their turn, and never more than one receive.
#[test]
fn one_receive_at_a_time_is_enough() {
    for mode in MODES {
        for seed in 1..=3 {
            println!("seed {seed}");
            let mut net = Net::with(seed, |_| {});
            net.weather = STORM;
            let qps = net.connected(mode);
            let (source, sink) = (net.buffer(0, 1 << 13), net.buffer(1, 4000));
            for n in 0..40 {
                let len = 50 + n as usize * 97 % 4000;
                source.fill(0, &pattern(n, len));
                net.send(0, qps[0], n, &[source.sge(0, len)]);
                let mut got = Vec::new();
                net.recv(1, qps[1], n, &[sink.sge(0, 4000)]);
                net.run_while(300 * SECOND, |net| {
                    for done in net.poll(1) {
                        assert_eq!(done.status, WcStatus::Success);
                        got.extend(sink.bytes(0, done.byte_len as usize));
                        if got.len() < len {
                            net.recv(1, qps[1], n, &[sink.sge(0, 4000)]);
                        }
                    }
                    got.len() < len
                });
                assert!(got == pattern(n, len), "message {n}");
                net.run_while(300 * SECOND, |net| net.poll(0).is_empty());
            }
        }
    }
}

/// Many messages are on the way at once, and receives are posted late: some are kept by TCP meanwhile.
#[test]
fn messages_that_overtake_others_wait_for_their_receives() {
    for seed in 1..=6 {
        println!("seed {seed}");
        let mut net = Net::with(seed, |_| {});
        net.weather = STORM;
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let (source, sink) = (net.buffer(0, 64 << 10), net.buffer(1, 64 << 10));
        for n in 0..3 {
            net.recv(1, qps[1], n, &[sink.sge(n as usize * 1024, 60 << 10)]);
        }
        net.join(qps, Mode::Message);
        for n in 0..60 {
            source.fill(n as usize * 1024, &pattern(n, 1000));
            net.send(0, qps[0], n, &[source.sge(n as usize * 1024, 1000)]);
        }
        let mut order = Vec::new();
        let mut posted = 3;
        net.run_while(600 * SECOND, |net| {
            for done in net.poll(1) {
                assert_eq!((done.status, done.byte_len), (WcStatus::Success, 1000));
                let at = done.wr_id as usize % 4;
                let at = if done.wr_id < 3 { done.wr_id as usize * 1024 } else { at * 1024 };
                order.push(sink.bytes(at, 1000));
                if posted < 60 {
                    let slot = posted as usize % 4;
                    net.recv(1, qps[1], posted, &[sink.sge(slot * 1024, 1000)]);
                    posted += 1;
                }
            }
            order.len() < 60
        });
        let expected: Vec<_> = (0..60).map(|n| pattern(n, 1000)).collect();
        assert!(order == expected, "{} came", order.len());
    }
}

#[test]
fn a_plan_of_faults_reaches_these_queue_pairs() {
    let mut net = Net::new();
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let sink = net.buffer(1, 1000);
    let now = net.now();
    let late = Fate::Late(20 * MILLISECOND);
    net.adapter(1).post_recv_fated(now, qps[1], 1, &[sink.sge(0, 100)], late).unwrap();
    let from = Fate::From(Time::NEVER);
    net.adapter(1).post_recv_fated(now, qps[1], 2, &[sink.sge(0, 100)], from).unwrap();
    let fails = Fate::Fail(WcStatus::GeneralErr);
    net.adapter(1).post_recv_fated(now, qps[1], 3, &[sink.sge(0, 100)], fails).unwrap();
    net.join(qps, Mode::Message);
    net.send_bytes(0, qps[0], 1, &[1]);
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.poll(1), []);
    net.run_for(20 * MILLISECOND);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 1)]);
    net.send_bytes(0, qps[0], 2, &[1]);
    net.run_for(10 * MILLISECOND);
    assert_eq!(brief(&net.poll(1)), [(2, WcStatus::Success, 1)]);
    net.poll(0);
    net.send_bytes(0, qps[0], 3, &[1]);
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(3, WcStatus::GeneralErr, 0)]);
    assert_eq!(net.changes(1), [(qps[1], TcpChange::Aborted)]);
}

#[test]
fn what_was_kept_is_handed_out_as_receives_are_posted_without_another_word_of_the_peer() {
    let mut net = Net::new();
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let sink = net.buffer(1, 64 << 10);
    net.recv(1, qps[1], 0, &[sink.sge(0, 60 << 10)]);
    net.join(qps, Mode::Message);
    // The first of three messages is lost once.
    net.lose_first_message();
    for n in 0..3 {
        net.send_bytes(0, qps[0], n, &pattern(n, 100));
    }
    net.run_for(5 * SECOND);
    assert_eq!(brief(&net.poll(1)), [(0, WcStatus::Success, 100)]);
    assert_eq!(net.poll(0).len(), 3, "the others are acknowledged, since they are kept");
    for n in 1..3 {
        net.recv(1, qps[1], n, &[sink.sge(n as usize * 100, 100)]);
        assert_eq!(brief(&net.poll(1)), [(n, WcStatus::Success, 100)]);
        assert_eq!(sink.bytes(n as usize * 100, 100), pattern(n, 100));
    }
}

#[test]
fn a_completion_does_not_wait_long_for_an_acknowledgement_that_waits_for_company() {
    for mode in MODES {
        let mut net = Net::new();
        let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
        let sink = net.buffer(1, 100);
        net.recv(1, qps[1], 0, &[sink.sge(0, 100)]);
        net.join(qps, mode);
        for n in 0..50 {
            net.send_bytes(0, qps[0], n, &[1; 100]);
            net.run_for(MILLISECOND);
            assert_eq!(brief(&net.poll(0)), [(n, WcStatus::Success, 100)]);
            net.recv(1, qps[1], n, &[sink.sge(0, 100)]);
        }
    }
}

/// Longer than any timer of a connection runs, whatever it was about to do when there was no room any more.
#[test]
fn a_link_may_be_full_for_long() {
    for mode in MODES {
        for room in 0..20 {
            let mut net = Net::new();
            let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
            let (source, sink) = (net.buffer(0, 40_000), net.buffer(1, 40_000));
            net.recv(1, qps[1], 1, &[sink.sge(0, 40_000)]);
            net.join(qps, mode);
            source.fill(0, &pattern(room, 40_000));
            // What it takes before gets lost, so that no answer helps.
            net.filter = Some(Box::new(|to, _| to != 1));
            net.room[0] = room as usize;
            net.send(0, qps[0], 1, &[source.sge(0, 40_000)]);
            net.run_for(5 * SECOND);
            assert_eq!(net.poll(1), []);
            (net.room[0], net.filter) = (usize::MAX, None);
            net.run_for(5 * SECOND);
            assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 40_000)]);
            assert_eq!(brief(&net.poll(0)), [(1, WcStatus::Success, 40_000)]);
            assert!(sink.bytes(0, 40_000) == pattern(room, 40_000));
        }
    }
}
