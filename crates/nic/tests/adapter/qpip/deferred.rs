//! Listeners whose program decides about each connection, and connections that are refused.

use quipu_nic::inet::stack::{ListenerId, TcpId};
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
    net.run_for(2 * SECOND);
    assert_eq!((net.sent[1].len(), net.state(0, client)), (0, QpState::Rtr));
    assert_eq!(requests(&mut net, 1), [], "it is asked once, however often the peer asks");
    let server = net.qp(1, QpType::Tcp);
    let buffer = net.buffer(1, 100);
    net.recv(1, server, 1, &[buffer.sge(0, 100)]);
    accept(&mut net, connection, server).unwrap();
    assert_eq!(net.state(1, server), QpState::Rtr);
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.states([client, server]), [QpState::Rts; 2]);
    assert_eq!(net.changes(1), [(server, TcpChange::Connected)]);
    net.send_bytes(0, client, 5, b"hello");
    net.run_for(SECOND);
    assert_eq!(brief(&net.poll(1)), [(1, WcStatus::Success, 5)]);
    assert_eq!(only(net.poll(0)).status, WcStatus::Success);
    assert_eq!(accept(&mut net, connection, server), Err(Fault::WrongState));
    assert_eq!(refuse(&mut net, connection), Err(Fault::NoSuchObject), "it is a queue pair's");
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
    assert_eq!(net.changes(0), [(client, TcpChange::Failed(Failure::Refused))]);
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
    // A SYN-SENT that is given up sends nothing: the next SYN of that port is what tells.
    net.run_for(200 * SECOND);
    assert_eq!(requests(&mut net, 1), [(listener, connection, None)]);
    let qp = net.qp(1, QpType::Tcp);
    assert_eq!(accept(&mut net, connection, qp), Err(Fault::NoSuchObject));
    assert_eq!(net.state(1, qp), QpState::Init);
}

#[test]
fn requests_are_bounded_by_the_backlog() {
    let mut net = Net::new();
    listen(&mut net, 2);
    let clients = [(); 4].map(|()| net.qp(0, QpType::Tcp));
    for client in clients {
        connect(&mut net, client);
    }
    net.run_for(10 * MILLISECOND);
    let first = requests(&mut net, 1);
    assert_eq!(first.len(), 2);
    for (_, connection, _) in first {
        let qp = net.qp(1, QpType::Tcp);
        accept(&mut net, connection, qp).unwrap();
    }
    // The others repeat their SYN.
    net.run_for(3 * SECOND);
    assert_eq!(requests(&mut net, 1).len(), 2);
}

#[test]
fn who_stops_listening_refuses_those_who_wait() {
    let mut net = Net::new();
    let listener = listen(&mut net, 4);
    let (client, connection, _) = asking(&mut net);
    net.adapter(1).tcp_unlisten(listener);
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.changes(0), [(client, TcpChange::Failed(Failure::Refused))]);
    assert_eq!(refuse(&mut net, connection), Err(Fault::NoSuchObject));
    assert_eq!(requests(&mut net, 1), []);
}

#[test]
fn a_peer_that_is_gone_when_it_is_accepted() {
    let mut net = Net::new();
    listen(&mut net, 4);
    let (client, connection, _) = asking(&mut net);
    let now = net.now();
    net.adapter(0).destroy_qp(now, client).unwrap();
    let server = net.qp(1, QpType::Tcp);
    accept(&mut net, connection, server).unwrap();
    // Its SYN-ACK is answered by a reset.
    net.run_for(10 * MILLISECOND);
    let changes = net.changes(1);
    assert!(
        matches!(changes[..], [(qp, TcpChange::Failed(_) | TcpChange::Closed)] if qp == server),
        "{changes:?}"
    );
    assert_eq!(net.state(1, server), QpState::Err);
}
