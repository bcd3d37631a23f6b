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
fn the_oldest_request_gives_way_and_comes_again() {
    let mut net = Net::new();
    let listener = listen(&mut net, 2);
    let [(oldest, first, _), others @ ..] = [(); 2].map(|()| asking(&mut net));
    let client = net.qp(0, QpType::Tcp);
    connect(&mut net, client);
    net.run_for(10 * MILLISECOND);
    let found = requests(&mut net, 1);
    let [gone, (_, newest, Some(flow))] = found[..] else { panic!("{found:?}") };
    assert_eq!(gone, (listener, first, None));
    let others = others.map(|(client, connection, _)| (client, connection));
    for (client, connection) in others.into_iter().chain([(client, newest)]) {
        let qp = net.qp(1, QpType::Tcp);
        assert_eq!(accept(&mut net, first, qp), Err(Fault::NoSuchObject));
        accept(&mut net, connection, qp).unwrap();
        net.run_for(10 * MILLISECOND);
        assert_eq!(net.states([client, qp]), [QpState::Rts; 2]);
    }
    // Nobody has refused it: it repeats its SYN.
    assert_eq!(net.state(0, oldest), QpState::Rtr);
    net.run_for(3 * SECOND);
    let found = requests(&mut net, 1);
    let [(_, connection, Some(again))] = found[..] else { panic!("{found:?}") };
    assert_ne!((connection, again), (first, flow));
    let qp = net.qp(1, QpType::Tcp);
    accept(&mut net, connection, qp).unwrap();
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.states([oldest, qp]), [QpState::Rts; 2]);
    assert_eq!(net.adapter(1).inet().unwrap().counters().tcp_forgone, 1);
}

#[test]
fn a_flood_of_made_up_peers_keeps_nobody_away() {
    let mut net = Net::new();
    listen(&mut net, 8);
    net.keep = true;
    asking(&mut net);
    let is_tcp = |frame: &&Vec<u8>| frame[6] == 6;
    let mut syn = net.sent[0].iter().rfind(is_tcp).expect("a SYN").clone();
    let now = net.now();
    for port in 1..=5000u16 {
        syn[40..42].copy_from_slice(&port.to_be_bytes());
        net.adapter(1).handle_frame(now, &Frame { bytes: &syn, checked: true });
    }
    let found = requests(&mut net, 1);
    let gone = found.iter().filter(|(.., flow)| flow.is_none()).count();
    assert_eq!((found.len(), gone), (5000 + 5000 - 7, 5000 - 7));
    let client = net.qp(0, QpType::Tcp);
    connect(&mut net, client);
    net.run_for(10 * MILLISECOND);
    let asked: Vec<_> = requests(&mut net, 1).into_iter().filter(|it| it.2.is_some()).collect();
    let [(_, connection, _)] = asked[..] else { panic!("{asked:?}") };
    let qp = net.qp(1, QpType::Tcp);
    accept(&mut net, connection, qp).unwrap();
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.states([client, qp]), [QpState::Rts; 2]);
}

#[test]
fn a_peer_that_does_not_acknowledge_is_gone_in_seconds() {
    let mut net = Net::new();
    listen(&mut net, 1);
    let (made_up, connection, _) = asking(&mut net);
    let now = net.now();
    net.adapter(0).tcp_abort(now, made_up).unwrap();
    net.filter = Some(Box::new(|to, _| to != 0));
    net.keep = true;
    let server = net.qp(1, QpType::Tcp);
    accept(&mut net, connection, server).unwrap();
    let other = net.qp(0, QpType::Tcp);
    connect(&mut net, other);
    net.run_for(5 * SECOND - 10 * MILLISECOND);
    // Those that were answered do not give way.
    assert_eq!((requests(&mut net, 1), net.changes(1)), (vec![], vec![]));
    assert_eq!(net.state(1, server), QpState::Rtr);
    let answers = net.sent[1].iter().filter(|frame| frame[6] == 6).count();
    assert_eq!(answers, 3, "it was said again, twice");
    net.run_for(20 * MILLISECOND);
    assert_eq!(net.changes(1), [(server, TcpChange::Failed(Failure::TimedOut))]);
    assert_eq!(net.state(1, server), QpState::Err);
    // There is room again.
    net.run_for(10 * SECOND);
    assert!(!requests(&mut net, 1).is_empty());
}

#[test]
fn a_peer_that_gets_no_answer_asks_again() {
    let mut net = Net::new();
    listen(&mut net, 1);
    let (client, connection, _) = asking(&mut net);
    net.keep = true;
    net.adapter(1).tcp_forgo(connection).unwrap();
    assert_eq!(net.adapter(1).tcp_forgo(connection), Err(Fault::NoSuchObject));
    let qp = net.qp(1, QpType::Tcp);
    assert_eq!(accept(&mut net, connection, qp), Err(Fault::NoSuchObject));
    net.run_for(100 * MILLISECOND);
    assert_eq!((requests(&mut net, 1), net.sent[1].len()), (vec![], 0));
    net.run_for(SECOND);
    let found = requests(&mut net, 1);
    let [(_, again, Some(_))] = found[..] else { panic!("{found:?}") };
    assert_ne!(again, connection);
    accept(&mut net, again, qp).unwrap();
    net.run_for(10 * MILLISECOND);
    assert_eq!(net.states([client, qp]), [QpState::Rts; 2]);
    assert_eq!(net.adapter(1).tcp_forgo(again), Err(Fault::NoSuchObject), "it is a queue pair's");
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
