//! Datagrams that are longer than a packet of their path: in parts, made of the request's memory.

use std::net::SocketAddr;

use super::net::{MILLISECOND, Net, SECOND, STORM, Weather, pattern};
use super::*;
use crate::pair::Buffer;

/// Two bound queue pairs; the address of that of host 1.
fn bound(net: &mut Net) -> ([QpId; 2], SocketAddr) {
    let qps = [0, 1].map(|host| net.qp(host, QpType::Udp));
    net.adapter(0).udp_bind(qps[0], 700).unwrap();
    let port = net.adapter(1).udp_bind(qps[1], 0).unwrap();
    let to = net.address(1, port);
    (qps, to)
}

fn post(net: &mut Net, qp: QpId, wr_id: u64, to: SocketAddr, list: &[mem::Sge]) {
    let (to, flags, payload) = (To::Address(to), SendFlags::SIGNALED, Payload::Sges(list));
    net.post(0, qp, &SendWr { wr_id, to, op: SendOp::Send, flags, payload }).unwrap();
}

/// A list of two pieces, the first of an odd length.
fn pieces(buffer: &Buffer, len: usize) -> [mem::Sge; 2] {
    let first = (len / 3) | 1;
    [buffer.sge(0, first), buffer.sge(70_001, len - first)]
}

fn fill(buffer: &Buffer, bytes: &[u8]) {
    let first = (bytes.len() / 3) | 1;
    buffer.fill(0, &bytes[..first]);
    buffer.fill(70_001, &bytes[first..]);
}

fn bytes(buffer: &Buffer, len: usize) -> Vec<u8> {
    let first = (len / 3) | 1;
    [buffer.bytes(0, first), buffer.bytes(70_001, len - first)].concat()
}

fn buffers(net: &mut Net) -> [Buffer; 2] {
    [0, 1].map(|host| net.buffer(host, 140_000))
}

/// Whether a frame of bare IP is a part of a datagram.
fn is_part(frame: &[u8]) -> bool {
    match frame[0] >> 4 {
        6 => frame[6] == 44,
        _ => frame[6] & 0x20 != 0 || frame[7] != 0 || frame[6] & 0x1f != 0,
    }
}

#[test]
fn all_lengths_arrive_whole_over_links_of_all_sizes() {
    for mtu in [1_280, 1_500, 9_000, 65_535] {
        for v4 in [false, true] {
            let mut net = Net::with(1, |config| config.mtu = mtu);
            (net.v4, net.keep) = (v4, true);
            let (qps, to) = bound(&mut net);
            let [source, sink] = buffers(&mut net);
            let most = if v4 { 65_507 } else { 65_527 };
            let fits = mtu as usize - if v4 { 28 } else { 48 };
            for len in [fits - 1, fits, fits + 1, 2 * fits + 3, 30_001, most - 1, most] {
                if len > most {
                    continue;
                }
                let content = pattern(len as u64, len);
                fill(&source, &content);
                net.sent = Default::default();
                net.recv(1, qps[1], 9, &pieces(&sink, len));
                post(&mut net, qps[0], 5, to, &pieces(&source, len));
                net.run_for(MILLISECOND);
                assert_eq!(brief(&net.poll(0)), [(5, WcStatus::Success, len as u32)]);
                let got = only(net.poll(1));
                assert_eq!((got.wr_id, got.status), (9, WcStatus::Success));
                assert_eq!(got.byte_len as usize, len);
                let WcExtra::From(from) = got.extra else { panic!("nobody sent it") };
                assert_eq!(SocketAddr::from(from), net.address(0, 700));
                assert!(bytes(&sink, len) == content, "{len} octets, MTU {mtu}");
                let parts = net.sent[0].iter().filter(|frame| is_part(frame)).count();
                let packet = len + mtu as usize - fits;
                assert_eq!(parts == 0, packet <= mtu as usize, "{packet}");
                assert!(net.sent[0].iter().all(|frame| frame.len() <= mtu as usize));
            }
        }
    }
}

#[test]
fn a_link_that_is_full_in_between_takes_the_rest_later() {
    let mut net = Net::new();
    let (qps, to) = bound(&mut net);
    let [source, sink] = buffers(&mut net);
    let content = pattern(1, 20_000);
    fill(&source, &content);
    net.recv(1, qps[1], 9, &pieces(&sink, 20_000));
    net.room[0] = 3;
    post(&mut net, qps[0], 5, to, &pieces(&source, 20_000));
    net.run_for(MILLISECOND);
    assert_eq!(net.poll(0), [], "three of fourteen parts are on their way");
    net.room[0] = 10;
    net.run_for(SECOND);
    assert_eq!((net.poll(0), net.poll(1)), (vec![], vec![]));
    net.room[0] = 1;
    net.run_for(MILLISECOND);
    assert_eq!(brief(&net.poll(0)), [(5, WcStatus::Success, 20_000)]);
    assert_eq!(brief(&net.poll(1)), [(9, WcStatus::Success, 20_000)]);
    assert!(bytes(&sink, 20_000) == content);
}

#[test]
fn no_other_datagram_begins_in_between_but_connections_take_turns() {
    let mut net = Net::new();
    let tcp = net.connected(inet::tcp::Mode::Message);
    let (udp, to) = bound(&mut net);
    let other = net.qp(0, QpType::Udp);
    net.adapter(0).udp_bind(other, 0).unwrap();
    let [source, sink] = buffers(&mut net);
    net.recv(1, tcp[1], 1, &[sink.sge(0, 1 << 16)]);
    net.run_for(MILLISECOND);
    (net.keep, net.sent) = (true, Default::default());
    net.send(0, tcp[0], 1, &[source.sge(0, 12_000)]);
    for qp in [udp[0], other, udp[0]] {
        post(&mut net, qp, 5, to, &[source.sge(0, 10_000)]);
    }
    net.run_for(1);
    let frames = &net.sent[0];
    let numbers: Vec<_> =
        frames.iter().filter(|it| is_part(it)).map(|it| it[44..48].to_vec()).collect();
    assert_eq!(numbers.len(), 21);
    assert_eq!(numbers.chunk_by(|a, b| a == b).count(), 3, "one after the other");
    let kinds: Vec<bool> = frames.iter().map(|frame| is_part(frame)).collect();
    assert!(kinds[..16].windows(2).all(|pair| pair[0] != pair[1]), "{kinds:?}");
}

#[test]
fn what_is_lost_is_the_datagram_of_the_part() {
    let mut net = Net::new();
    let (qps, to) = bound(&mut net);
    let [source, sink] = buffers(&mut net);
    let content = pattern(1, 5_000);
    fill(&source, &content);
    for n in 0..4 {
        net.recv(1, qps[1], n, &pieces(&sink, 5_000));
    }
    let mut count = 0;
    net.filter = Some(Box::new(move |_, frame| {
        count += usize::from(is_part(frame));
        count != 6
    }));
    for n in 0..3 {
        post(&mut net, qps[0], n, to, &pieces(&source, 5_000));
    }
    net.run_for(SECOND);
    assert_eq!(net.poll(0).len(), 3, "nobody knows");
    let expected = [0, 1].map(|n| (n, WcStatus::Success, 5_000));
    assert_eq!(brief(&net.poll(1)), expected);
    assert!(bytes(&sink, 5_000) == content);
}

#[test]
fn in_a_storm_what_arrives_is_right() {
    for v4 in [false, true] {
        let mut net = Net::new();
        net.v4 = v4;
        let (qps, to) = bound(&mut net);
        let [source, sink] = buffers(&mut net);
        net.weather = Weather { spoilt: 5, loss: 20, ..STORM };
        net.recv(1, qps[1], 9, &[sink.sge(0, 70_000)]);
        let mut came = 0;
        for n in 0..300u64 {
            let len = 1_400 + n as usize * 17;
            let content = pattern(n, len);
            fill(&source, &content);
            post(&mut net, qps[0], n, to, &pieces(&source, len));
            net.run_for(20 * MILLISECOND);
            assert_eq!(brief(&net.poll(0)), [(n, WcStatus::Success, len as u32)]);
            if let Some(done) = net.poll(1).first() {
                assert_eq!((done.status, done.byte_len as usize), (WcStatus::Success, len));
                assert!(sink.bytes(0, len) == content);
                net.recv(1, qps[1], 9, &[sink.sge(0, 70_000)]);
                came += 1;
            }
        }
        assert!(came > 150, "{came}");
    }
}

#[test]
fn memory_that_goes_away_in_between_ends_it() {
    let mut net = Net::new();
    let (qps, to) = bound(&mut net);
    let [source, sink] = buffers(&mut net);
    for n in 0..2 {
        net.recv(1, qps[1], n, &[sink.sge(0, 70_000)]);
    }
    net.room[0] = 3;
    post(&mut net, qps[0], 5, to, &[source.sge(0, 20_000)]);
    post(&mut net, qps[0], 6, to, &[source.sge(0, 20_000)]);
    net.run_for(MILLISECOND);
    let key = source.region.id;
    let now = net.now();
    net.adapter(0).dereg_mr(now, key).unwrap();
    net.room[0] = usize::MAX;
    net.run_for(MILLISECOND);
    assert_eq!(brief(&net.poll(0)), [(5, WcStatus::LocProtErr, 0), (6, WcStatus::WrFlushErr, 0)]);
    // It goes on with another one, of which nothing is mistaken for the rest of the former.
    net.to(0, qps[0], QpState::Rts).unwrap();
    let [source, _] = buffers(&mut net);
    let content = pattern(7, 30_000);
    fill(&source, &content);
    post(&mut net, qps[0], 7, to, &pieces(&source, 30_000));
    net.run_for(MILLISECOND);
    assert_eq!(brief(&net.poll(0)), [(7, WcStatus::Success, 30_000)]);
    assert_eq!(brief(&net.poll(1)), [(0, WcStatus::Success, 30_000)]);
    assert!(sink.bytes(0, 30_000) == content);
    // Before anything is sent, nothing is.
    (net.keep, net.sent) = (true, Default::default());
    let beyond = [mem::Sge { len: 60_000, ..source.sge(100_000, 1) }];
    post(&mut net, qps[0], 8, to, &beyond);
    net.run_for(MILLISECOND);
    assert_eq!(brief(&net.poll(0)), [(8, WcStatus::LocProtErr, 0)]);
    assert!(net.sent[0].is_empty());
}

#[test]
fn a_queue_pair_may_stop_and_go_in_between() {
    for how in 0..4 {
        let mut net = Net::new();
        let (qps, to) = bound(&mut net);
        let [source, sink] = buffers(&mut net);
        for n in 0..3 {
            net.recv(1, qps[1], n, &[sink.sge(0, 70_000)]);
        }
        net.room[0] = 3;
        for wr_id in [5, 6] {
            post(&mut net, qps[0], wr_id, to, &[source.sge(0, 20_000)]);
        }
        net.run_for(MILLISECOND);
        let now = net.now();
        match how {
            0 => net.adapter(0).destroy_qp(now, qps[0]).unwrap(),
            1 => net.to(0, qps[0], QpState::Err).unwrap(),
            2 => net.to(0, qps[0], QpState::Reset).unwrap(),
            _ => net.to(0, qps[0], QpState::Sqd).unwrap(),
        }
        net.room[0] = usize::MAX;
        net.run_for(MILLISECOND);
        let (flushed, done) = (WcStatus::WrFlushErr, (5, WcStatus::Success, 20_000));
        match how {
            0 | 2 => assert_eq!(brief(&net.poll(0)), []),
            1 => assert_eq!(brief(&net.poll(0)), [(5, flushed, 0), (6, flushed, 0)]),
            // What has begun is finished, and nothing else begins.
            _ => assert_eq!(brief(&net.poll(0)), [done]),
        }
        if how == 2 {
            net.adapter(0).udp_bind(qps[0], 0).unwrap();
            post(&mut net, qps[0], 7, to, &[source.sge(0, 20_000)]);
        } else if how == 3 {
            net.to(0, qps[0], QpState::Rts).unwrap();
        }
        net.run_for(MILLISECOND);
        let came = [0, 0, 1, 2][how];
        assert_eq!(net.poll(1).len(), came, "{how}");
    }
}

#[test]
fn parts_wait_for_their_neighbour_and_hold_up_nobody() {
    let mut net = Net::with(1, |config| {
        let std::net::IpAddr::V6(own) = config.addresses[0].0 else { unreachable!() };
        config.hardware = Some([2, 0, 0, 0, 0, own.octets()[15]]);
    });
    let (udp, to) = bound(&mut net);
    let other = net.qp(0, QpType::Udp);
    net.adapter(0).udp_bind(other, 0).unwrap();
    let [source, sink] = buffers(&mut net);
    for n in 0..2 {
        net.recv(1, udp[1], n, &[sink.sge(n as usize * 70_000, 70_000)]);
    }
    let nobody = "[fd00::77]:9".parse().unwrap();
    post(&mut net, udp[0], 1, nobody, &[source.sge(0, 20_000)]);
    post(&mut net, udp[0], 2, to, &[source.sge(0, 40_000)]);
    post(&mut net, other, 3, to, &[source.sge(0, 30_000)]);
    net.run_for(10 * MILLISECOND);
    assert_eq!(brief(&net.poll(0)), [(3, WcStatus::Success, 30_000)]);
    let came = [(0, WcStatus::Success, 40_000), (1, WcStatus::Success, 30_000)];
    assert_eq!(brief(&net.poll(1)), came);
    net.run_for(5 * SECOND);
    let lengths = [(1, WcStatus::Success, 20_000), (2, WcStatus::Success, 40_000)];
    assert_eq!(brief(&net.poll(0)), lengths, "the first is lost, and they complete in order");
    assert_eq!(brief(&net.poll(1)), []);
}

#[test]
fn a_long_datagram_to_an_own_address_does_not_leave() {
    for v4 in [false, true] {
        let mut net = Net::new();
        (net.v4, net.keep) = (v4, true);
        let qps = [0; 2].map(|host| net.qp(host, QpType::Udp));
        let ports = qps.map(|qp| net.adapter(0).udp_bind(qp, 0).unwrap());
        let to = net.address(0, ports[1]);
        let [source, sink] = [0; 2].map(|host| net.buffer(host, 140_000));
        let content = pattern(1, 65_000);
        fill(&source, &content);
        net.recv(0, qps[1], 9, &pieces(&sink, 65_000));
        post(&mut net, qps[0], 5, to, &pieces(&source, 65_000));
        net.run_for(MILLISECOND);
        let mut done = brief(&net.poll(0));
        done.sort_by_key(|done| done.0);
        assert_eq!(done, [5, 9].map(|id| (id, WcStatus::Success, 65_000)));
        assert!(bytes(&sink, 65_000) == content);
        assert!(net.sent[0].is_empty());
    }
}
