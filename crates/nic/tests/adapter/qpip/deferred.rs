//! Listeners whose program decides about each connection, and connections that are refused.

use quipu_nic::inet::stack::{Frame, ListenerId, TcpId};
use quipu_nic::inet::tcp::{Failure, Flow};
use quipu_nic::*;

use super::net::{MILLISECOND, Net, SECOND};
use super::{brief, only};

const PORT: u16 = 7000;

type Request = (ListenerId, TcpId, Option<Flow>);

/// What peers have asked of a host since the last call.
fn requests(net: &mut Net, host: usize) -> Vec<Request> {
    net.run_for(0);
    let mut found = Vec::new();
    net.host(host).events.retain(|event| match event {
        Event::TcpRequest { listener, connection, flow } => {
            found.push((*listener, *connection, *flow));
            false
        }
        _ => true,
    });
    found
}

fn listen(net: &mut Net, backlog: u32) -> ListenerId {
    let settings = TcpSettings::default();
    let (listener, port) = net.adapter(1).tcp_listen_deferred(PORT, &settings, backlog).unwrap();
    assert_eq!(port, PORT);
    listener
}

fn connect(net: &mut Net, qp: QpId) {
    let to = net.address(1, PORT);
    net.connect(0, qp, to, &TcpSettings::default()).unwrap();
}

/// A queue pair of host 0 that connects, and its request.
fn asking(net: &mut Net) -> (QpId, TcpId, Flow) {
    let qp = net.qp(0, QpType::Tcp);
    connect(net, qp);
    net.run_for(10 * MILLISECOND);
    match requests(net, 1)[..] {
        [(_, connection, Some(flow))] => (qp, connection, flow),
        ref other => panic!("{other:?}"),
    }
}

fn accept(net: &mut Net, connection: TcpId, qp: QpId) -> Result<(), Fault> {
    let now = net.now();
    net.adapter(1).tcp_accept(now, connection, qp)
}

fn refuse(net: &mut Net, connection: TcpId) -> Result<(), Fault> {
    let now = net.now();
    net.adapter(1).tcp_refuse(now, connection)
}

#[test]
fn a_peer_waits_until_the_program_has_accepted() {
    let mut net = Net::new();
    listen(&mut net, 4);
    net.keep = true;
    let (client, connection, flow) = asking(&mut net);
    assert_eq!((flow.local, flow.remote.ip()), (net.address(1, PORT), net.address(0, 0).ip()));
    net.run_for(20 * SECOND);
    // The SYN-ACK, and nothing that would be a word of the program.
    let said = net.sent[1].iter().filter(is_tcp).count();
    assert_eq!((said, net.state(0, client)), (1, QpState::Rtr));
    assert_eq!((requests(&mut net, 1), net.changes(0)), (vec![], vec![]));
    let server = net.qp(1, QpType::Tcp);
    let buffer = net.buffer(1, 100);
    net.recv(1, server, 1, &[buffer.sge(0, 100)]);
    accept(&mut net, connection, server).unwrap();
    assert_eq!(net.state(1, server), QpState::Rts);
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.states([client, server]), [QpState::Rts; 2]);
    assert_eq!(net.changes(0), [(client, TcpChange::Connected)]);
    assert_eq!(net.changes(1), [(server, TcpChange::Connected)]);
    net.send_bytes(0, client, 5, b"hello");
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 5)]);
    assert_eq!(only(net.poll(0)).status, WcStatus::Success);
    assert_eq!(accept(&mut net, connection, server), Err(Fault::WrongState));
    assert_eq!(refuse(&mut net, connection), Err(Fault::NoSuchObject), "it is a queue pair's");
}

#[test]
fn a_peer_is_accepted_without_a_receive_and_though_the_word_of_it_is_lost() {
    let mut net = Net::new();
    listen(&mut net, 4);
    let (client, connection, _) = asking(&mut net);
    net.filter = Some(Box::new(|to, _| to != 0));
    let server = net.qp(1, QpType::Tcp);
    accept(&mut net, connection, server).unwrap();
    net.run_for(900 * MILLISECOND);
    assert_eq!(net.state(0, client), QpState::Rtr);
    net.filter = None;
    net.run_for(300 * MILLISECOND);
    assert_eq!(net.states([client, server]), [QpState::Rts; 2]);
}

#[test]
fn a_peer_that_has_closed_meanwhile() {
    let mut net = Net::new();
    listen(&mut net, 4);
    let (client, connection, _) = asking(&mut net);
    let now = net.now();
    net.adapter(0).tcp_close(now, client).unwrap();
    net.run_for(SECOND);
    let server = net.qp(1, QpType::Tcp);
    accept(&mut net, connection, server).unwrap();
    net.run_for(SECOND);
    let told = [TcpChange::Connected, TcpChange::PeerClosed].map(|change| (server, change));
    assert_eq!(net.changes(1), told);
    let now = net.now();
    net.adapter(1).tcp_close(now, server).unwrap();
    net.run_for(SECOND);
    assert_eq!(net.states([client, server]), [QpState::Err; 2]);
}

#[test]
fn a_refused_peer_hears_it_at_once_and_may_try_again() {
    let mut net = Net::new();
    listen(&mut net, 4);
    let (client, connection, _) = asking(&mut net);
    let buffer = net.buffer(0, 100);
    net.recv(0, client, 1, &[buffer.sge(0, 100)]);
    refuse(&mut net, connection).unwrap();
    assert_eq!(refuse(&mut net, connection), Err(Fault::NoSuchObject));
    let qp = net.qp(1, QpType::Tcp);
    assert_eq!(accept(&mut net, connection, qp), Err(Fault::NoSuchObject));
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.changes(0), [(client, TcpChange::Failed(Failure::Declined))]);
    // It never had a connection, so it is as it was before.
    assert_eq!((net.state(0, client), net.poll(0).len()), (QpState::Init, 0));
    connect(&mut net, client);
    net.run_for(10 * MILLISECOND);
    let [(_, connection, Some(_))] = requests(&mut net, 1)[..] else { panic!() };
    accept(&mut net, connection, qp).unwrap();
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.states([client, qp]), [QpState::Rts; 2]);
    net.send_bytes(1, qp, 5, b"again");
    net.run_for(10 * MILLISECOND);
    assert_eq!(brief(&net.poll(0)), [(1, WcStatus::Success, 5)]);
}

#[test]
fn a_peer_that_gives_up_is_told_of() {
    let mut net = Net::new();
    let listener = listen(&mut net, 4);
    let (client, connection, _) = asking(&mut net);
    let now = net.now();
    net.adapter(0).tcp_abort(now, client).unwrap();
    net.run_for(10 * MILLISECOND);
    assert_eq!(requests(&mut net, 1), [(listener, connection, None)]);
    let qp = net.qp(1, QpType::Tcp);
    assert_eq!(accept(&mut net, connection, qp), Err(Fault::NoSuchObject));
    assert_eq!(net.state(1, qp), QpState::Init);
}

#[test]
fn beyond_the_backlog_peers_wait_for_their_turn() {
    let mut net = Net::new();
    listen(&mut net, 2);
    let first = [(); 2].map(|()| asking(&mut net));
    let later = [(); 2].map(|()| net.qp(0, QpType::Tcp));
    for client in later {
        connect(&mut net, client);
    }
    net.run_for(SECOND);
    assert_eq!(requests(&mut net, 1), [], "two are to be decided about");
    for (client, connection, _) in first {
        let qp = net.qp(1, QpType::Tcp);
        accept(&mut net, connection, qp).unwrap();
        net.run_for(10 * MILLISECOND);
        assert_eq!(net.states([client, qp]), [QpState::Rts; 2]);
    }
    net.run_for(10 * SECOND);
    let found = requests(&mut net, 1);
    assert_eq!(found.len(), 2, "{found:?}");
    for (_, connection, _) in found {
        let qp = net.qp(1, QpType::Tcp);
        accept(&mut net, connection, qp).unwrap();
    }
    net.run_for(10 * MILLISECOND);
    assert_eq!(later.map(|client| net.state(0, client)), [QpState::Rts; 2]);
}

#[test]
fn peers_that_come_at_once_wait_in_line() {
    let mut net = Net::new();
    listen(&mut net, 2);
    let clients = [(); 6].map(|()| net.qp(0, QpType::Tcp));
    for client in clients {
        connect(&mut net, client);
    }
    let mut told = 0;
    for _ in 0..20 {
        net.run_for(SECOND);
        let found = requests(&mut net, 1);
        assert!(found.len() <= 2, "{found:?}");
        told += found.len();
        for (_, connection, flow) in found {
            assert!(flow.is_some());
            let qp = net.qp(1, QpType::Tcp);
            accept(&mut net, connection, qp).unwrap();
        }
    }
    net.run_for(SECOND);
    let stand = clients.iter().filter(|client| net.state(0, **client) == QpState::Rts).count();
    // Two are told of and two wait; the SYNs of the others are not answered, and come again.
    assert_eq!((told, stand), (6, 6));
}

fn is_tcp(frame: &&Vec<u8>) -> bool {
    frame[6] == 6
}

#[test]
fn a_flood_of_made_up_peers_is_heard_of_by_nobody() {
    let mut net = Net::new();
    listen(&mut net, 8);
    net.keep = true;
    let (_, first, _) = asking(&mut net);
    let mut syn = net.sent[0].iter().find(is_tcp).expect("a SYN").clone();
    let now = net.now();
    for port in 1..=5000u16 {
        syn[40..42].copy_from_slice(&port.to_be_bytes());
        net.adapter(1).handle_frame(now, &Frame { bytes: &syn, checked: true });
    }
    assert_eq!(requests(&mut net, 1), []);
    let counters = *net.adapter(1).inet().unwrap().counters();
    assert!(counters.tcp_cookies >= 4900, "{counters:?}");
    let (client, connection, _) = asking(&mut net);
    for (connection, client) in [(first, None), (connection, Some(client))] {
        let qp = net.qp(1, QpType::Tcp);
        accept(&mut net, connection, qp).unwrap();
        net.run_for(10 * MILLISECOND);
        let client = client.map(|client| net.state(0, client));
        assert!(client.is_none_or(|state| state == QpState::Rts));
    }
    // Those that were half open are gone in the end, and nobody has heard of them.
    net.run_for(200 * SECOND);
    assert_eq!(requests(&mut net, 1), []);
}

#[test]
fn who_has_just_come_is_heard_of_when_the_program_has_decided_about_another() {
    for refused in [false, true] {
        let mut net = Net::new();
        listen(&mut net, 1);
        let (_, first, _) = asking(&mut net);
        let second = net.qp(0, QpType::Tcp);
        connect(&mut net, second);
        net.run_for(100 * MILLISECOND);
        assert_eq!(requests(&mut net, 1), [], "the backlog is one");
        match refused {
            true => refuse(&mut net, first).unwrap(),
            false => {
                let server = net.qp(1, QpType::Tcp);
                accept(&mut net, first, server).unwrap();
            }
        }
        // Long before its SYN comes again.
        net.run_for(5 * MILLISECOND);
        let local = net.adapter(0).tcp_flow(second).unwrap().local;
        match requests(&mut net, 1)[..] {
            [(_, _, Some(flow))] => assert_eq!(flow.remote, local),
            ref other => panic!("{other:?}"),
        }
    }
}

#[test]
fn who_stops_listening_still_decides_about_those_of_whom_it_has_heard() {
    let mut net = Net::new();
    let listener = listen(&mut net, 3);
    let [accepted, refused, gone] = [(); 3].map(|()| asking(&mut net));
    let unheard = net.qp(0, QpType::Tcp);
    connect(&mut net, unheard);
    net.run_for(10 * MILLISECOND);
    assert_eq!(requests(&mut net, 1), [], "three are to be decided about");
    net.adapter(1).tcp_unlisten(listener);
    let qp = net.qp(1, QpType::Tcp);
    let now = net.now();
    assert_eq!(net.adapter(1).tcp_offer(now, listener, qp), Err(Fault::NoSuchObject));
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.changes(0), []);
    accept(&mut net, accepted.1, qp).unwrap();
    refuse(&mut net, refused.1).unwrap();
    let now = net.now();
    net.adapter(0).tcp_abort(now, gone.0).unwrap();
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.states([accepted.0, qp]), [QpState::Rts; 2]);
    let told = [
        (accepted.0, TcpChange::Connected),
        (refused.0, TcpChange::Failed(Failure::Declined)),
        (gone.0, TcpChange::Aborted),
    ];
    let mut changes = net.changes(0);
    changes.sort_by_key(|(qp, _)| told.iter().position(|(of, _)| of == qp));
    assert_eq!(changes, told);
    assert_eq!(requests(&mut net, 1), [(listener, gone.1, None)]);
    // Nobody listens any more, and the port is another's.
    net.run_for(SECOND);
    assert_eq!(net.changes(0), [(unheard, TcpChange::Failed(Failure::Refused))]);
    listen(&mut net, 1);
    let (client, connection, _) = asking(&mut net);
    let other = net.qp(1, QpType::Tcp);
    accept(&mut net, connection, other).unwrap();
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.states([client, other]), [QpState::Rts; 2]);
}

#[test]
fn a_peer_that_is_gone_when_it_is_accepted() {
    let mut net = Net::new();
    listen(&mut net, 4);
    let (client, connection, _) = asking(&mut net);
    let now = net.now();
    net.filter = Some(Box::new(|_, _| false));
    net.adapter(0).destroy_qp(now, client).unwrap();
    net.run_for(10 * MILLISECOND);
    net.filter = None;
    let server = net.qp(1, QpType::Tcp);
    accept(&mut net, connection, server).unwrap();
    // It is told that it is accepted, and answers by a reset.
    net.run_for(10 * MILLISECOND);
    let changes = [TcpChange::Connected, TcpChange::Failed(Failure::Reset)];
    assert_eq!(net.changes(1), changes.map(|change| (server, change)));
    assert_eq!(net.state(1, server), QpState::Err);
}
