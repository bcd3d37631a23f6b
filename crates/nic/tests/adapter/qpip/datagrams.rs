//! UDP queue pairs.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;

use quipu_nic::inet::stack::Carriage;
use quipu_wire::{ipv4, ipv6};

use super::net::{MILLISECOND, Net, SECOND, pattern};
use super::*;

fn post(net: &mut Net, qp: QpId, to: SocketAddr, bytes: &[u8]) -> Result<(), Fault> {
    let flags = SendFlags::SIGNALED;
    let payload = Payload::Inline(bytes);
    net.post(0, qp, &SendWr { wr_id: 5, to: To::Address(to), op: SendOp::Send, flags, payload })
}

#[test]
fn a_datagram_takes_a_receive_which_says_who_sent_it() {
    for v4 in [false, true] {
        let mut net = Net::new();
        net.v4 = v4;
        let qps = [0, 1].map(|host| net.qp(host, QpType::Udp));
        assert_eq!(net.adapter(0).udp_bind(qps[0], 700), Ok(700));
        let port = net.adapter(1).udp_bind(qps[1], 0).unwrap();
        assert_eq!(net.states(qps), [QpState::Rts; 2]);
        let sink = net.buffer(1, 2000);
        net.recv(1, qps[1], 9, &[sink.sge(0, 100), sink.sge(1000, 200)]);
        let to = net.address(1, port);
        let bytes = pattern(3, 250);
        post(&mut net, qps[0], to, &bytes).unwrap();
        assert_eq!(net.poll(0), [], "it is not sent yet");
        net.run_for(200_000);
        assert_eq!(brief(&net.poll(0)), [(5, WcStatus::Success, 250)]);
        let got = only(net.poll(1));
        assert_eq!((got.wr_id, got.byte_len, got.grh), (9, 250, false));
        let WcExtra::From(source) = got.extra else { panic!("nobody sent it") };
        assert_eq!(SocketAddr::from(source), net.address(0, 700));
        assert_eq!([sink.bytes(0, 100), sink.bytes(1000, 150)].concat(), bytes);
    }
}

/// Two bound queue pairs; the port of host 1.
fn bound(net: &mut Net) -> ([QpId; 2], SocketAddr) {
    let qps = [0, 1].map(|host| net.qp(host, QpType::Udp));
    net.adapter(0).udp_bind(qps[0], 0).unwrap();
    let port = net.adapter(1).udp_bind(qps[1], 0).unwrap();
    let to = net.address(1, port);
    (qps, to)
}

#[test]
fn datagrams_and_their_parts_have_the_class_and_hop_limit_of_their_queue_pair() {
    for v4 in [false, true] {
        let mut net = Net::new();
        net.v4 = v4;
        let (qps, to) = bound(&mut net);
        let seen = Rc::new(RefCell::new(Vec::new()));
        let sight = Rc::clone(&seen);
        net.filter = Some(Box::new(move |_, frame| {
            sight.borrow_mut().push(match ipv6::Repr::parse(frame) {
                Ok((it, _)) => (it.traffic_class, it.hop_limit),
                Err(_) => {
                    let (it, _) = ipv4::Repr::parse(frame).unwrap();
                    (it.traffic_class, it.hop_limit)
                }
            });
            true
        }));
        let source = net.buffer(0, 4_000);
        let carriage = Carriage { traffic_class: 0xb8, hop_limit: Some(9) };
        net.adapter(0).set_carriage(qps[0], carriage).unwrap();
        for len in [10, 4_000] {
            let list = [source.sge(0, len)];
            let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&list));
            let wr = SendWr { wr_id: 5, to: To::Address(to), op: SendOp::Send, flags, payload };
            net.post(0, qps[0], &wr).unwrap();
            net.run_for(SECOND);
        }
        let seen = seen.borrow();
        assert!(seen.len() > 3 && seen.iter().all(|&it| it == (0xb8, 9)), "{seen:?}");
    }
}

#[test]
fn what_finds_no_receive_or_a_short_one_is_dropped() {
    let mut net = Net::new();
    let (qps, to) = bound(&mut net);
    let sink = net.buffer(1, 100);
    post(&mut net, qps[0], to, &[1; 10]).unwrap();
    net.run_for(200_000);
    net.recv(1, qps[1], 1, &[sink.sge(0, 9)]);
    post(&mut net, qps[0], to, &[2; 10]).unwrap();
    net.run_for(200_000);
    post(&mut net, qps[0], to, &[3; 9]).unwrap();
    net.run_for(200_000);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 9)]);
    assert_eq!(sink.bytes(0, 9), [3; 9]);
    assert_eq!(net.adapter(1).datagram_drops().no_receive, 2);
    assert_eq!(net.poll(0).len(), 3, "sends are complete all the same");
}

#[test]
fn an_empty_datagram_is_one() {
    let mut net = Net::new();
    let (qps, to) = bound(&mut net);
    net.recv(1, qps[1], 1, &[]);
    post(&mut net, qps[0], to, &[]).unwrap();
    net.run_for(200_000);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 0)]);
}

#[test]
fn what_cannot_be_a_datagram_is_refused_when_it_is_posted() {
    let mut net = Net::new();
    let (qps, to) = bound(&mut net);
    let source = net.buffer(0, 70_000);
    let sges = |len| [source.sge(0, len)];
    let wr = |to, payload| SendWr {
        wr_id: 1,
        to,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload,
    };
    let (long, fits) = (sges(65_528), sges(65_527));
    let refused = |result| assert!(matches!(result, Err(Fault::Invalid(_))), "{result:?}");
    refused(net.post(0, qps[0], &wr(To::Address(to), Payload::Sges(&long))));
    refused(net.post(0, qps[0], &wr(To::Peer, Payload::Sges(&fits))));
    let nowhere = SocketAddr::new(to.ip(), 0);
    refused(net.post(0, qps[0], &wr(To::Address(nowhere), Payload::Sges(&fits))));
    let imm = SendWr { op: SendOp::SendImm(1), ..wr(To::Address(to), Payload::Sges(&fits)) };
    refused(net.post(0, qps[0], &imm));
    net.post(0, qps[0], &wr(To::Address(to), Payload::Sges(&fits))).unwrap();
    let to_v4 = To::Address(SocketAddr::new(net::v4(1), 9));
    let (long, fits) = (sges(65_508), sges(65_507));
    refused(net.post(0, qps[0], &wr(to_v4, Payload::Sges(&long))));
    net.post(0, qps[0], &wr(to_v4, Payload::Sges(&fits))).unwrap();
    net.run_for(200_000);
    assert_eq!(net.poll(0).len(), 2);
    // Bound once, and to a port of its own.
    assert_eq!(net.adapter(0).udp_bind(qps[0], 0), Err(Fault::WrongState));
    let other = net.qp(1, QpType::Udp);
    assert!(matches!(net.adapter(1).udp_bind(other, to.port()), Err(Fault::Taken(_))));
    let tcp = net.qp(1, QpType::Tcp);
    refused(net.adapter(1).udp_bind(tcp, 0).map(drop));
    // A port is free again when its queue pair is not bound any more.
    net.to(1, qps[1], QpState::Err).unwrap();
    assert_eq!(net.adapter(1).udp_bind(other, to.port()), Ok(to.port()));
}

#[test]
fn memory_that_is_not_there_stops_the_send_queue_until_the_program_goes_on() {
    let mut net = Net::new();
    let (qps, to) = bound(&mut net);
    let (source, sink) = (net.buffer(0, 10), net.buffer(1, 10));
    net.recv(1, qps[1], 1, &[sink.sge(0, 10)]);
    let beyond = [mem::Sge { len: 11, ..source.sge(0, 10) }];
    let wr = SendWr {
        wr_id: 1,
        to: To::Address(to),
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&beyond),
    };
    net.post(0, qps[0], &wr).unwrap();
    post(&mut net, qps[0], to, &[1]).unwrap();
    net.run_for(200_000);
    assert_eq!(brief(&net.poll(0)), [(1, WcStatus::LocProtErr, 0), (5, WcStatus::WrFlushErr, 0)]);
    assert_eq!(net.state(0, qps[0]), QpState::Sqe);
    net.to(0, qps[0], QpState::Rts).unwrap();
    post(&mut net, qps[0], to, &[2]).unwrap();
    net.run_for(200_000);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 1)]);
}

#[test]
fn a_receive_into_memory_that_is_not_there_fails() {
    let mut net = Net::new();
    let (qps, to) = bound(&mut net);
    let sink = net.buffer(1, 10);
    net.recv(1, qps[1], 1, &[mem::Sge { len: 11, ..sink.sge(0, 10) }]);
    post(&mut net, qps[0], to, &[1; 11]).unwrap();
    net.run_for(200_000);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::LocProtErr, 0)]);
    assert_eq!(sink.bytes(0, 10), [0; 10], "all or nothing");
    assert_eq!(net.state(1, qps[1]), QpState::Err);
}

#[test]
fn datagrams_and_connections_take_turns() {
    let mut net = Net::with(1, |_| {});
    let tcp = [0, 1].map(|host| net.qp(host, QpType::Tcp));
    let (source, sink) = (net.buffer(0, 1 << 16), net.buffer(1, 1 << 16));
    net.recv(1, tcp[1], 1, &[sink.sge(0, 1 << 16)]);
    net.join(tcp, inet::tcp::Mode::Message);
    let (udp, to) = bound(&mut net);
    net.keep = true;
    net.sent = Default::default();
    net.send(0, tcp[0], 1, &[source.sge(0, 60_000)]);
    for _ in 0..8 {
        post(&mut net, udp[0], to, &[1; 100]).unwrap();
    }
    net.run_for(1);
    // The next header of an IPv6 packet.
    let kinds: Vec<u8> = net.sent[0].iter().map(|frame| frame[6]).collect();
    assert!(kinds.len() >= 12, "{kinds:?}");
    assert_eq!(kinds.iter().filter(|kind| **kind == 17).count(), 8);
    assert!(kinds[..8].windows(2).all(|pair| pair[0] != pair[1]), "{kinds:?}");
}

/// A link with stations, whose addresses must be found out.
fn stations() -> Net {
    Net::with(1, |config| {
        let std::net::IpAddr::V6(own) = config.addresses[0].0 else { unreachable!() };
        config.hardware = Some([2, 0, 0, 0, 0, own.octets()[15]]);
    })
}

#[test]
fn a_datagram_waits_for_its_neighbour_and_holds_up_nobody() {
    for v4 in [false, true] {
        let mut net = stations();
        net.v4 = v4;
        let tcp = net.connected(inet::tcp::Mode::Message);
        let (udp, to) = bound(&mut net);
        let other = net.qp(0, QpType::Udp);
        net.adapter(0).udp_bind(other, 0).unwrap();
        let sink = net.buffer(1, 100);
        for n in 0..3 {
            net.recv(1, udp[1], n, &[sink.sge(n as usize * 10, 10)]);
        }
        net.recv(1, tcp[1], 7, &[sink.sge(50, 10)]);
        net.run_for(100 * MILLISECOND);
        net.poll(0);
        let nobody = match v4 {
            true => "10.9.0.77:9".parse().unwrap(),
            false => "[fd00::77]:9".parse().unwrap(),
        };
        post(&mut net, udp[0], nobody, &[1]).unwrap();
        post(&mut net, udp[0], nobody, &[2]).unwrap();
        post(&mut net, udp[0], to, &[3]).unwrap();
        post(&mut net, other, to, &[4]).unwrap();
        net.send_bytes(0, tcp[0], 8, &[5]);
        net.run_for(10 * MILLISECOND);
        assert_eq!(net.poll(1).len(), 3);
        assert_eq!(sink.bytes(50, 1), [5]);
        let mut got = [sink.bytes(0, 1), sink.bytes(10, 1)].concat();
        got.sort_unstable();
        assert_eq!(got, [3, 4]);
        let done: Vec<u64> = net.poll(0).iter().map(|done| done.wr_id).collect();
        assert_eq!(done, [5, 8], "not those that wait, nor the one behind them");
        // Nobody answers: what waited is lost, and what was behind it is complete.
        net.run_for(5 * SECOND);
        assert_eq!(net.poll(1), []);
        let done = net.poll(0);
        assert_eq!(done.len(), 3);
        assert!(done.iter().all(|done| done.status == WcStatus::Success));
    }
}

/// Two queue pairs whose hosts know each other; the port of host 1, and the number of nobody's addresses.
fn acquainted() -> (Net, [QpId; 2], SocketAddr, impl Fn(u16) -> SocketAddr) {
    let mut net = stations();
    let (udp, to) = bound(&mut net);
    post(&mut net, udp[0], to, &[0]).unwrap();
    net.run_for(100 * MILLISECOND);
    net.poll(0);
    (net, udp, to, |n| format!("[fd00::7:{n:x}]:9").parse().unwrap())
}

#[test]
fn whoever_is_nobody_silences_no_queue_pair() {
    let (mut net, udp, to, nobody) = acquainted();
    let sink = net.buffer(1, 10);
    // As of a program that answers to addresses that were made up: as many as its queue has room for come
    // back when the neighbours have not answered, all at once.
    let mut first = 0;
    while post(&mut net, udp[0], nobody(200 + first), &[1]).is_ok() {
        first += 1;
    }
    net.run_for(2900 * MILLISECOND);
    assert_eq!(net.poll(0), [], "a neighbour may still answer");
    net.run_for(200 * MILLISECOND);
    assert_eq!(net.poll(0).len(), usize::from(first));
    // After that none is believed in for long.
    let mut posted = 0;
    for n in 0..100 {
        while post(&mut net, udp[0], nobody(n % 40), &[1]).is_err() {
            net.run_for(100_000);
            assert!(!net.poll(0).is_empty(), "{n}: no request comes back");
        }
        posted += 1;
    }
    assert_eq!(posted, 100);
    // Somebody who is there is answered at once.
    net.run_for(100_000);
    net.poll(0);
    net.recv(1, udp[1], 7, &[sink.sge(0, 10)]);
    post(&mut net, udp[0], to, &[2]).unwrap();
    net.run_for(200_000);
    assert_eq!(brief(&net.poll(1)), [(7, WcStatus::Success, 1)]);
    // What waits no longer than a neighbour may take: all at once, not one after the other.
    net.run_for(4 * SECOND);
    let rest = net.poll(0);
    assert!((1..=9).contains(&rest.len()), "{}", rest.len());
    assert!(rest.iter().all(|done| done.status == WcStatus::Success));
}

#[test]
fn all_neighbours_are_looked_for_at_once_and_each_gets_what_waited_for_it() {
    let mut net = stations();
    let (udp, to) = bound(&mut net);
    let sink = net.buffer(1, 100);
    for n in 0..3 {
        net.recv(1, udp[1], n, &[sink.sge(n as usize * 10, 10)]);
    }
    let nobody: SocketAddr = "[fd00::77]:9".parse().unwrap();
    for (n, to) in [nobody, to, nobody, to, to].into_iter().enumerate() {
        post(&mut net, udp[0], to, &[n as u8]).unwrap();
    }
    net.run_for(100 * MILLISECOND);
    assert_eq!(net.poll(1).len(), 3);
    assert_eq!([0, 10, 20].map(|at| sink.bytes(at, 1)[0]), [1, 3, 4]);
    assert_eq!(net.poll(0), [], "the oldest waits");
    net.run_for(4 * SECOND);
    assert_eq!(net.poll(0).len(), 5);
}

#[test]
fn a_request_that_fails_does_so_in_its_turn() {
    let (mut net, udp, to, nobody) = acquainted();
    post(&mut net, udp[0], nobody(1), &[1]).unwrap();
    // Nothing leads there.
    post(&mut net, udp[0], "[2001:db8::1]:9".parse().unwrap(), &[2]).unwrap();
    post(&mut net, udp[0], nobody(1), &[3]).unwrap();
    net.run_for(MILLISECOND);
    assert_eq!(net.poll(0), []);
    net.run_for(4 * SECOND);
    let statuses: Vec<_> = net.poll(0).iter().map(|done| done.status).collect();
    assert_eq!(statuses, [WcStatus::Success, WcStatus::LocQpOpErr, WcStatus::Success]);
    assert_eq!(net.state(0, udp[0]), QpState::Rts);
    // What stops the queue does not wait, what waits before it is lost, and what has failed says so.
    let beyond = [mem::Sge { len: 11, ..net.buffer(0, 10).sge(0, 10) }];
    post(&mut net, udp[0], nobody(2), &[4]).unwrap();
    post(&mut net, udp[0], "[2001:db8::1]:9".parse().unwrap(), &[4]).unwrap();
    let (to, flags, payload) = (To::Address(to), SendFlags::SIGNALED, Payload::Sges(&beyond));
    net.post(0, udp[0], &SendWr { wr_id: 6, to, op: SendOp::Send, flags, payload }).unwrap();
    post(&mut net, udp[0], nobody(2), &[5]).unwrap();
    net.run_for(MILLISECOND);
    let statuses: Vec<_> = net.poll(0).iter().map(|done| (done.wr_id, done.status)).collect();
    let failed = [(5, WcStatus::LocQpOpErr), (6, WcStatus::LocProtErr), (5, WcStatus::WrFlushErr)];
    assert_eq!(statuses, [&[(5, WcStatus::Success)], &failed[..]].concat());
    // Nothing is left of them when the queue goes on.
    net.to(0, udp[0], QpState::Rts).unwrap();
    post(&mut net, udp[0], nobody(2), &[6]).unwrap();
    net.run_for(4 * SECOND);
    assert_eq!(brief(&net.poll(0)), [(5, WcStatus::Success, 1)]);
}

#[test]
fn a_queue_pair_that_waits_for_a_neighbour_may_go() {
    for how in 0..3 {
        let mut net = stations();
        let (udp, _) = bound(&mut net);
        let nobody = "[fd00::77]:9".parse().unwrap();
        post(&mut net, udp[0], nobody, &[1]).unwrap();
        net.run_for(MILLISECOND);
        let now = net.now();
        match how {
            0 => net.adapter(0).destroy_qp(now, udp[0]).unwrap(),
            1 => net.to(0, udp[0], QpState::Err).unwrap(),
            _ => net.to(0, udp[0], QpState::Reset).unwrap(),
        }
        net.run_for(10 * SECOND);
        let expected: &[_] = if how == 1 { &[(5, WcStatus::WrFlushErr, 0)] } else { &[] };
        assert_eq!(brief(&net.poll(0)), expected);
    }
}
