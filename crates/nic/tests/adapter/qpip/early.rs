//! Peers that come a moment too early: while no queue pair is idle.

use super::net::{MILLISECOND, Net, pattern};
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
