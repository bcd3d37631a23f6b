//! Peers that come a moment too early: while no queue pair is idle.

use std::net::{IpAddr, SocketAddr};

use quipu_wire::tcp::{Flags, Repr, SeqNumber};

use super::net::{MILLISECOND, Net, pattern, segment_to_host_1, v6};
use super::*;

fn settings(mode: Mode) -> TcpSettings {
    TcpSettings { mode, ..TcpSettings::default() }
}

/// Less than a SYN takes to come again, or a segment.
const SOON: u64 = 5 * MILLISECOND;

/// Queue pairs of host 0 that connect one behind the other, and as many of host 1, each with a receive.
fn pairs(net: &mut Net, count: usize, mode: Mode) -> (Vec<QpId>, Vec<QpId>) {
    let to = net.address(1, 9000);
    let clients: Vec<QpId> = (0..count).map(|_| net.qp(0, QpType::Tcp)).collect();
    for &client in &clients {
        net.connect(0, client, to, &settings(mode)).unwrap();
        net.run_for(MILLISECOND);
    }
    let sink = net.buffer(1, 64);
    let server = |net: &mut Net| {
        let qp = net.qp(1, QpType::Tcp);
        net.recv(1, qp, 1, &[sink.sge(0, 64)]);
        qp
    };
    let servers = (0..count).map(|_| server(net)).collect();
    (clients, servers)
}

#[test]
fn a_queue_pair_that_is_offered_meets_who_has_just_come() {
    for mode in MODES {
        let mut net = Net::new();
        let listener = net.listen(1, 9000, &settings(mode));
        let (clients, servers) = pairs(&mut net, 3, mode);
        net.run_for(100 * MILLISECOND);
        assert_eq!((net.changes(0), net.changes(1)), (vec![], vec![]));
        for (&client, &server) in clients.iter().zip(&servers) {
            net.offer(1, listener, server).unwrap();
            net.run_for(SOON);
            assert_eq!(net.changes(1), [(server, TcpChange::Connected)]);
            // In the order in which they came.
            let local = net.adapter(0).tcp_flow(client).unwrap().local;
            assert_eq!(net.adapter(1).tcp_flow(server).unwrap().remote, local);
            net.send_bytes(0, client, 7, &pattern(1, 64));
            net.run_for(SOON);
            assert_eq!(brief(&net.poll(0)), [(7, WcStatus::Success, 64)]);
            assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 64)]);
        }
        let counted = *net.adapter(1).inet().unwrap().counters();
        assert_eq!((counted.tcp_held, counted.tcp_late), (3, 3));
    }
}

/// Where more are answered than queue pairs are idle, those beyond have a closed window: what they sent
/// would be dropped, and come again when a timer runs out.
#[test]
fn who_is_not_the_next_sends_when_its_turn_has_come() {
    for mode in MODES {
        let mut net = Net::new();
        let listener = net.listen(1, 9000, &settings(mode));
        let (mut clients, servers) = pairs(&mut net, 4, mode);
        for (n, &server) in servers.iter().enumerate() {
            net.offer(1, listener, server).unwrap();
            // All are answered when the first is offered. Each sends as soon as it may.
            for _ in 0..SOON / net.delay {
                let may = |client: &QpId| net.state(0, *client) == QpState::Rts;
                for client in clients.extract_if(.., |client| may(client)).collect::<Vec<_>>() {
                    net.send_bytes(0, client, n as u64, &pattern(n as u64, 64));
                }
                net.run_for(net.delay);
            }
            assert_eq!(brief(&net.poll(0)), [(n as u64, WcStatus::Success, 64)]);
            assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 64)]);
        }
        assert_eq!(net.adapter(1).inet().unwrap().counters().tcp_late, 4);
    }
}

/// Not so the one for whom the queue pair is: it may send with its first acknowledgement.
#[test]
fn who_is_the_next_has_room_from_the_first_word_on() {
    let mut net = Net::new();
    let listener = net.listen(1, 9000, &settings(Mode::Message));
    let (clients, servers) = pairs(&mut net, 5, Mode::Message);
    net.offer(1, listener, servers[0]).unwrap();
    // Less than there and back: who has a closed window has to ask, or to be told.
    net.run_for(net.delay + net.delay / 2);
    let stands = |client: &&QpId| net.state(0, **client) == QpState::Rts;
    assert_eq!(clients.iter().filter(stands).collect::<Vec<_>>(), [&clients[0]]);
}

/// What a peer says to host 1 that is played by hand, its SYN answered: the first segment, that answers ours.
fn half_open(net: &mut Net) -> Repr {
    let SocketAddr::V6(from) = net.address(0, 4000) else { unreachable!() };
    net.keep = true;
    net.filter = Some(Box::new(|to, _| to != 0));
    let syn = Repr {
        source: from.port(),
        destination: 9000,
        seq: SeqNumber(1000),
        flags: Flags::SYN,
        window: u16::MAX,
        ..Repr::default()
    };
    net.inject(1, &segment_to_host_1(*from.ip(), &syn, &[]));
    net.run_for(0);
    let (answer, _) = Repr::parse(&net.sent[1].last().unwrap()[40..]).unwrap();
    assert_eq!(answer.flags, Flags::SYN | Flags::ACK);
    Repr { seq: syn.seq + 1, ack: answer.seq + 1, flags: Flags::ACK, ..syn }
}

/// A queue pair of host 1, offered, whose receives have 64 octets and as many again.
fn offered(net: &mut Net, mode: Mode) -> QpId {
    let listener = net.listen(1, 9000, &settings(mode));
    let (server, sink) = (net.qp(1, QpType::Tcp), net.buffer(1, 128));
    net.recv(1, server, 1, &[sink.sge(0, 64)]);
    net.recv(1, server, 2, &[sink.sge(64, 64)]);
    net.offer(1, listener, server).unwrap();
    server
}

fn say(net: &mut Net, segment: &Repr, payload: &[u8]) {
    let IpAddr::V6(from) = v6(0) else { unreachable!() };
    net.inject(1, &segment_to_host_1(from, segment, payload));
    net.run_for(0);
}

/// RFC 9293 3.10.7.4: what acknowledges the SYN may have data with it, and the end of them. It has if a peer
/// delays its first acknowledgement, or if that was lost.
#[test]
fn what_comes_with_the_acknowledgement_of_the_syn_is_taken() {
    for mode in MODES {
        for fin in [Flags::NONE, Flags::FIN] {
            let mut net = Net::new();
            let server = offered(&mut net, mode);
            let ack = half_open(&mut net);
            let said = Repr { flags: ack.flags | Flags::PSH | fin, ..ack };
            say(&mut net, &said, &pattern(1, 64));
            assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 64)]);
            let ended = fin != Flags::NONE;
            let changes = [TcpChange::Connected, TcpChange::PeerClosed].map(|it| (server, it));
            assert_eq!(net.changes(1), changes[..1 + usize::from(ended)]);
            let (answer, _) = Repr::parse(&net.sent[1].last().unwrap()[40..]).unwrap();
            assert_eq!(answer.ack, ack.seq + 64 + u32::from(ended));
            let counters = *net.adapter(1).inet().unwrap().counters();
            assert_eq!((counters.received, counters.tcp_no_room), (2, 0), "each counts once");
            assert_eq!(net.adapter(1).tcp_counters(server).unwrap().received, 1);
        }
    }
}

/// What completes the handshake need not be the next: what is before it was lost, or is late.
#[test]
fn what_comes_behind_a_gap_may_acknowledge_the_syn() {
    for mode in MODES {
        let mut net = Net::new();
        offered(&mut net, mode);
        let ack = half_open(&mut net);
        let said = Repr { flags: ack.flags | Flags::PSH, ..ack };
        say(&mut net, &Repr { seq: ack.seq + 64, ..said }, &pattern(2, 64));
        assert_eq!(brief(&net.poll(1)), []);
        say(&mut net, &said, &pattern(1, 64));
        let done = [(1, WcStatus::Success, 64), (2, WcStatus::Success, 64)];
        assert_eq!(brief(&net.poll(1)), done);
    }
}

/// A queue pair that is gone leaves nobody who could take it: it comes again.
#[test]
fn what_comes_with_the_acknowledgement_waits_if_the_queue_pair_is_gone() {
    for mode in MODES {
        let mut net = Net::new();
        let server = offered(&mut net, mode);
        let ack = half_open(&mut net);
        net.to(1, server, QpState::Reset).unwrap();
        let said = Repr { flags: ack.flags | Flags::PSH, ..ack };
        say(&mut net, &said, &pattern(1, 64));
        let (answer, _) = Repr::parse(&net.sent[1].last().unwrap()[40..]).unwrap();
        assert_eq!((answer.flags, answer.ack), (Flags::ACK, ack.seq));
        assert_eq!(net.changes(1), []);
    }
}
