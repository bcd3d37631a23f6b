//! Frames of strangers and of peers that lie.

use std::net::{IpAddr, Ipv6Addr};

use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6;
use quipu_wire::tcp::{Flags, Options, Repr};

use super::net::{Net, SECOND, pattern, segment_to_host_1, v6};
use super::*;

/// Plays a conversation with every frame spoilt in some way as well: what was said arrives, and nothing else
/// happens.
#[test]
fn frames_that_are_wrong_change_nothing() {
    for mode in MODES {
        for seed in 1..=4 {
            println!("seed {seed}");
            let mut net = Net::with(seed, |_| {});
            let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
            let (source, sink) = (net.buffer(0, 1 << 16), net.buffer(1, 1 << 16));
            net.recv(1, qps[1], 1, &[sink.sge(0, 20_000)]);
            net.join(qps, mode);
            net.keep = true;
            source.fill(0, &pattern(seed, 20_000));
            net.send(0, qps[0], 1, &[source.sge(0, 20_000)]);
            for _ in 0..200 {
                net.run_for(20_000);
                for host in 0..2 {
                    let Some(frame) = net.sent[host].last().cloned() else { continue };
                    let spoilt = spoil(&mut net, frame);
                    net.inject(1 - host, &spoilt);
                }
            }
            net.run_for(SECOND);
            assert_eq!(brief(&net.poll(0)), [(1, WcStatus::Success, 20_000)]);
            assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 20_000)]);
            assert_eq!(sink.bytes(0, 20_000), pattern(seed, 20_000));
            assert_eq!((net.changes(0), net.changes(1)), (vec![], vec![]));
        }
    }
}

fn spoil(net: &mut Net, mut frame: Vec<u8>) -> Vec<u8> {
    match net.draw(4) {
        0 => frame.truncate(net.draw(frame.len() as u64) as usize),
        1 => {
            let at = net.draw(frame.len() as u64) as usize;
            frame[at] ^= 1 << net.draw(8);
        }
        2 => {
            let more = net.draw(64);
            frame.extend((0..more).map(|n| n as u8));
        }
        _ => frame = (0..net.draw(200)).map(|_| net.draw(256) as u8).collect(),
    }
    frame
}

/// A FIN that comes before its turn, and data that spans it: the end of the stream is where the FIN is, and
/// no receive is complete with what did not come (RFC 9293 3.10.7.4).
#[test]
fn data_behind_a_fin_completes_nothing() {
    let mut net = Net::new();
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let sink = net.buffer(1, 4000);
    sink.fill(0, &[7; 4000]);
    for n in 0..2 {
        net.recv(1, qps[1], n, &[sink.sge(n as usize * 1000, 1000)]);
    }
    net.keep = true;
    net.join(qps, Mode::Stream);
    let (last, _) = Repr::parse(&net.sent[0].last().unwrap()[40..]).unwrap();
    let IpAddr::V6(source) = v6(0) else { unreachable!() };
    let say = |net: &mut Net, flags, from: u32, len| {
        let options = Options { timestamps: last.options.timestamps, ..Options::default() };
        let flags = flags | Flags::ACK;
        let segment = Repr { seq: last.seq + from, flags, options, ..last };
        net.inject(1, &segment_to_host_1(source, &segment, &pattern(from.into(), len)));
        net.poll(1)
    };
    let done = say(&mut net, Flags::PSH, 0, 1);
    assert_eq!(brief(&done), [(0, WcStatus::Success, 1)]);
    assert_eq!(say(&mut net, Flags::FIN, 2, 1), []);
    let done = say(&mut net, Flags::NONE, 1, 1460);
    assert_eq!(brief(&done), [(1, WcStatus::Success, 2)], "what is before the FIN");
    assert_eq!(net.changes(1).last(), Some(&(qps[1], TcpChange::PeerClosed)));
    // What is posted from now on is told of the end, and not of octets.
    net.recv(1, qps[1], 2, &[sink.sge(2000, 1000)]);
    say(&mut net, Flags::NONE, 1461, 100);
    assert!(net.poll(1).iter().all(|done| done.byte_len == 0), "nothing else came");
    assert_eq!(sink.bytes(2000, 1000), [7; 1000]);
}

/// A peer that acknowledges what was never sent, and in the middle of requests.
#[test]
fn acknowledgements_may_lie_anywhere() {
    let mut net = Net::new();
    let qps = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let sink = net.buffer(1, 4000);
    // A stream whose receives are not of the size of the sends.
    for n in 0..20 {
        net.recv(1, qps[1], n, &[sink.sge(n as usize * 170, 170)]);
    }
    net.join(qps, Mode::Stream);
    for n in 0..10 {
        net.send_bytes(0, qps[0], n, &pattern(n, 250));
    }
    net.run_for(SECOND);
    let expected: Vec<_> = (0..10).map(|n| (n, WcStatus::Success, 250)).collect();
    assert_eq!(brief(&net.poll(0)), expected);
    let all: Vec<u8> = (0..10).flat_map(|n| pattern(n, 250)).collect();
    let lengths: Vec<usize> = net.poll(1).iter().map(|done| done.byte_len as usize).collect();
    assert_eq!(lengths.iter().sum::<usize>(), 2500);
    let got: Vec<u8> = (0..).zip(&lengths).flat_map(|(n, &len)| sink.bytes(n * 170, len)).collect();
    assert_eq!(got, all);
}

#[test]
fn many_queue_pairs_get_the_same_share() {
    let mut net = Net::new();
    let count = 8;
    let qps: Vec<[QpId; 2]> = (0..count).map(|_| net.connected(Mode::Message)).collect();
    let (source, sink) = (net.buffer(0, 1 << 16), net.buffer(1, 1 << 16));
    let mut done = vec![0; count];
    for (n, pair) in qps.iter().enumerate() {
        for _ in 0..32 {
            net.recv(1, pair[1], n as u64, &[sink.sge(0, 1 << 12)]);
        }
    }
    for pair in &qps {
        for _ in 0..32 {
            net.send(0, pair[0], 0, &[source.sge(0, 1 << 12)]);
        }
    }
    net.run_while(SECOND, |net| {
        for got in net.poll(1) {
            done[got.wr_id as usize] += 1;
        }
        let (least, most) = (done.iter().min().unwrap(), done.iter().max().unwrap());
        assert!(most - least <= 16, "{done:?}");
        done.iter().sum::<u32>() < 32 * count as u32
    });
    assert_eq!(done, vec![32; count]);
}

/// A question that only makes sense where there are stations (RFC 3810).
#[test]
fn a_query_for_groups_on_a_link_of_packets_is_ignored() {
    let mut net = Net::new();
    let source: Ipv6Addr = "fe80::99".parse().unwrap();
    let destination: Ipv6Addr = "ff02::1".parse().unwrap();
    let mut query = [0; 28];
    query[0] = 130;
    let pseudo = Sum::of_pseudo_header(source.into(), destination.into(), 58, query.len());
    let checksum = pseudo.and(sum(&query)).checksum();
    query[2..4].copy_from_slice(&checksum.to_be_bytes());
    let mut packet = vec![0; 40];
    ipv6::Repr {
        source,
        destination,
        next_header: 58,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 1,
        payload_len: query.len() as u16,
    }
    .emit(&mut packet);
    packet.extend(query);
    net.inject(0, &packet);
    let now = net.now().after(SECOND);
    net.adapter(0).handle_timeout(now);
    // Otherwise the next call would not come back.
    assert!(!net.adapter(0).has_frames());
    assert_eq!(net.adapter(0).transmit_frame(now, &mut [0; 2000]), None);
    assert_eq!(net.adapter(0).poll_timeout(), None);
}
