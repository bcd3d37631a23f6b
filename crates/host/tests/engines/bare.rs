//! The device of QPIP by `rdma_cm`, between two engines on a packet link over loopback.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::common::Node;
use crate::common::pcapng::packets;
use quipu_host::connection::{
    CallError, ChannelKey, Event, EventKind, IdKey, Param, PortSpace, Protocol, Refusal,
};
use quipu_host::{CaptureConfig, Config, Device, Engine, EngineError, QpipConfig};
use quipu_nic::{
    Payload, QpAttr, QpAttrMask, QpState, QpType, SendFlags, SendOp, SendWr, To, WcStatus,
};

const RC: u8 = 2;

struct Program {
    engine: Arc<Engine>,
    channel: ChannelKey,
    node: Node,
}

/// A queue pair that takes receives.
fn idle(engine: &Arc<Engine>) -> Node {
    let node = Node::with_service(engine, 1 << 20, QpType::Tcp);
    let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
    engine.modify_qp(node.qp, &attr, QpAttrMask::STATE | QpAttrMask::PORT).unwrap();
    node
}

impl Program {
    fn new() -> Self {
        Self::captured(None)
    }

    fn captured(capture: Option<CaptureConfig>) -> Self {
        let engine = Engine::open(Config {
            address: Some("127.0.0.1".parse().unwrap()),
            devices: Device::ALL.to_vec(),
            capture,
            qpip: Some(QpipConfig::new("udp:127.0.0.1:0".parse().unwrap())),
            ..Config::default()
        })
        .unwrap();
        let (channel, _) = engine.cm_create_channel().unwrap();
        let node = idle(&engine);
        Self { engine, channel, node }
    }

    /// Where its packet link is.
    fn address(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.engine.qpip_info().unwrap().addresses[0], port)
    }

    fn id(&self) -> IdKey {
        self.engine.cm_create_id(self.channel, PortSpace::Tcp, RC, 0).unwrap()
    }

    #[track_caller]
    fn expect(&self, kind: EventKind) -> Event {
        let event = self.engine.cm_get_event(self.channel).unwrap();
        assert_eq!(event.kind, kind, "{event:?}");
        event
    }

    #[track_caller]
    fn expect_nothing(&self) {
        let event = self.engine.cm_get_event_within(self.channel, Some(Duration::ZERO));
        assert!(event.is_err(), "{event:?}");
    }

    /// Listens at an address, and says at which port of the link.
    fn listen(&self, at: SocketAddr) -> SocketAddr {
        let id = self.id();
        self.engine.cm_bind_addr(id, at).unwrap();
        self.engine.cm_listen(id, 0).unwrap();
        self.address(self.engine.cm_route(id).unwrap().src.unwrap().port())
    }

    fn resolve(&self, to: SocketAddr) -> IdKey {
        let id = self.id();
        self.engine.cm_resolve_addr(id, None, to).unwrap();
        self.expect(EventKind::AddrResolved);
        self.engine.cm_resolve_route(id).unwrap();
        self.expect(EventKind::RouteResolved);
        let route = self.engine.cm_route(id).unwrap();
        assert_eq!((route.protocol, route.has_device), (Protocol::Qpip, true));
        assert_eq!(route.src.unwrap().ip(), self.address(0).ip());
        id
    }

    fn connect(&self, to: SocketAddr) -> IdKey {
        let id = self.resolve(to);
        self.engine.cm_connect(id, &self.param()).unwrap();
        id
    }

    fn param(&self) -> Param {
        Param {
            responder_resources: 1,
            initiator_depth: 1,
            qpn: self.node.num.0,
            ..Param::default()
        }
    }
}

fn any() -> SocketAddr {
    "[::]:0".parse().unwrap()
}

/// Messages go to and fro, and the end comes behind what was sent.
fn talk(client: &Program, server: &Program, ids: [IdKey; 2]) {
    client.node.fill(0, b"hello");
    client.node.post(5, SendOp::Send, &[client.node.sge(0, 5)]);
    let received = server.node.poll();
    assert_eq!((received.wr_id, received.status, received.byte_len), (1, WcStatus::Success, 5));
    assert_eq!(server.node.bytes(0, 5), b"hello");
    assert_eq!(client.node.poll().wr_id, 5);
    client.node.receive(2, &[client.node.sge(1000, 300_000)]);
    let long: Vec<u8> = (0..300_000u32).map(|n| (n >> 3) as u8).collect();
    server.node.fill(1000, &long);
    server.node.post(6, SendOp::Send, &[server.node.sge(1000, 300_000)]);
    server.engine.cm_disconnect(ids[1]).unwrap();
    let received = client.node.poll();
    assert_eq!((received.wr_id, received.byte_len), (2, 300_000));
    assert_eq!(client.node.bytes(1000, 300_000), long);
    client.expect(EventKind::Disconnected);
    client.engine.cm_disconnect(ids[0]).unwrap();
    server.expect(EventKind::Disconnected);
    assert_eq!(server.node.poll().status, WcStatus::Success);
}

#[test]
fn programs_meet_over_nothing_but_tcp() {
    // At every address, and at that of the link alone.
    for alone in [false, true] {
        let (server, client) = (Program::new(), Program::new());
        let at = if alone { server.address(0) } else { any() };
        let to = server.listen(at);
        assert_ne!(to.port(), 0);
        let active = client.connect(to);
        let request = server.expect(EventKind::ConnectRequest);
        let route = server.engine.cm_route(request.id).unwrap();
        assert_eq!((route.protocol, route.src), (Protocol::Qpip, Some(to)));
        assert_eq!(route.dst.unwrap().ip(), client.address(0).ip());
        server.node.receive(1, &[server.node.sge(0, 64)]);
        server.engine.cm_accept(request.id, Some(&server.param())).unwrap();
        assert_eq!(client.expect(EventKind::Established).id, active);
        server.expect(EventKind::Established);
        let route = client.engine.cm_route(active).unwrap();
        assert_ne!(route.src.unwrap().port(), 0, "the port has become known");
        talk(&client, &server, [active, request.id]);
        client.engine.cm_destroy_id(active).unwrap();
        server.engine.cm_destroy_id(request.id).unwrap();
    }
}

#[test]
fn a_program_refuses() {
    let (server, client) = (Program::new(), Program::new());
    let to = server.listen(server.address(7471));
    assert_eq!(to.port(), 7471);
    client.connect(to);
    // It is asked once.
    let request = server.expect(EventKind::ConnectRequest);
    server.engine.cm_reject(request.id, Refusal::Consumer, &[]).unwrap();
    assert_eq!(client.expect(EventKind::Rejected).status, -libc::ECONNREFUSED);
    server.expect_nothing();
}

#[test]
fn a_request_that_was_taken_outlives_its_listener() {
    let (server, client) = (Program::new(), Program::new());
    let listener = server.id();
    server.engine.cm_bind_addr(listener, server.address(0)).unwrap();
    server.engine.cm_listen(listener, 1).unwrap();
    let to = server.engine.cm_route(listener).unwrap().src.unwrap();
    let active = client.connect(to);
    let request = server.expect(EventKind::ConnectRequest);
    server.engine.cm_destroy_id(listener).unwrap();
    server.node.receive(1, &[server.node.sge(0, 64)]);
    server.engine.cm_accept(request.id, Some(&server.param())).unwrap();
    client.expect(EventKind::Established);
    server.expect(EventKind::Established);
    talk(&client, &server, [active, request.id]);
}

#[test]
fn requests_that_nobody_has_taken_end_with_their_listener() {
    let server = Program::new();
    let clients = [Program::new(), Program::new(), Program::new()];
    let listener = server.id();
    server.engine.cm_bind_addr(listener, server.address(0)).unwrap();
    server.engine.cm_listen(listener, 1).unwrap();
    let to = server.engine.cm_route(listener).unwrap().src.unwrap();
    // One is taken, one is shown to the program, and one waits for its turn.
    clients[0].connect(to);
    let taken = server.expect(EventKind::ConnectRequest);
    clients[1..].iter().for_each(|client| _ = client.connect(to));
    server.engine.cm_destroy_id(listener).unwrap();
    for client in &clients[1..] {
        assert_eq!(client.expect(EventKind::Rejected).status, -libc::ECONNREFUSED);
    }
    server.engine.cm_reject(taken.id, Refusal::Consumer, &[]).unwrap();
    assert_eq!(clients[0].expect(EventKind::Rejected).status, -libc::ECONNREFUSED);
}

#[test]
fn a_process_connects_to_itself() {
    let program = Program::new();
    let to = program.listen(program.address(0));
    let active = program.connect(to);
    let request = program.expect(EventKind::ConnectRequest);
    let other = idle(&program.engine);
    other.receive(1, &[other.sge(0, 64)]);
    let param = Param { qpn: other.num.0, ..program.param() };
    program.engine.cm_accept(request.id, Some(&param)).unwrap();
    let mut standing = [(); 2].map(|()| program.expect(EventKind::Established).id);
    standing.sort_by_key(|id| id.index());
    assert_eq!(standing, [active, request.id]);
    program.node.fill(0, b"me");
    program.node.post(5, SendOp::Send, &[program.node.sge(0, 2)]);
    assert_eq!((program.node.poll().wr_id, other.poll().byte_len), (5, 2));
    assert_eq!(other.bytes(0, 2), b"me");
}

#[test]
fn the_port_of_an_identifier_is_known_when_it_is_bound() {
    let (server, client) = (Program::new(), Program::new());
    let listener = server.id();
    server.engine.cm_bind_addr(listener, server.address(0)).unwrap();
    let port = server.engine.cm_route(listener).unwrap().src.unwrap().port();
    assert_ne!(port, 0);
    server.engine.cm_listen(listener, 0).unwrap();
    let to = server.engine.cm_route(listener).unwrap().src.unwrap();
    assert_eq!(to, server.address(port));
    let id = client.id();
    client.engine.cm_bind_addr(id, client.address(0)).unwrap();
    let from = client.engine.cm_route(id).unwrap().src.unwrap();
    assert_ne!(from.port(), 0);
    client.engine.cm_resolve_addr(id, None, to).unwrap();
    client.expect(EventKind::AddrResolved);
    client.engine.cm_resolve_route(id).unwrap();
    client.expect(EventKind::RouteResolved);
    client.engine.cm_connect(id, &client.param()).unwrap();
    let request = server.expect(EventKind::ConnectRequest);
    assert_eq!(server.engine.cm_route(request.id).unwrap().dst, Some(from));
}

#[test]
fn a_connection_that_cannot_begin_says_why() {
    let (server, client) = (Program::new(), Program::new());
    let to = server.listen(server.address(0));
    // The queue pair is none of this device's.
    let id = client.resolve(to);
    let param = Param { qpn: 0x00ff_fff0, ..client.param() };
    client.engine.cm_connect(id, &param).unwrap();
    assert_eq!(client.expect(EventKind::ConnectError).status, -libc::EINVAL);
    // There is a connection with these ends already.
    let kinds = [EventKind::AddrResolved, EventKind::RouteResolved];
    let other = idle(&client.engine);
    for (qpn, taken) in [(client.node.num.0, false), (other.num.0, true)] {
        let id = client.id();
        client.engine.cm_bind_addr(id, client.address(5555)).unwrap();
        client.engine.cm_resolve_addr(id, None, to).unwrap();
        client.expect(kinds[0]);
        client.engine.cm_resolve_route(id).unwrap();
        client.expect(kinds[1]);
        client.engine.cm_connect(id, &Param { qpn, ..client.param() }).unwrap();
        if taken {
            assert_eq!(client.expect(EventKind::Unreachable).status, -libc::EADDRINUSE);
        }
    }
}

#[test]
fn a_port_that_was_chosen_gives_way_to_another() {
    let (server, client) = (Program::new(), Program::new());
    let to = server.listen(server.address(0));
    let chosen = client.id();
    client.engine.cm_bind_addr(chosen, client.address(0)).unwrap();
    let from = client.engine.cm_route(chosen).unwrap().src.unwrap();
    let insists = client.id();
    client.engine.cm_bind_addr(insists, from).unwrap();
    let other = idle(&client.engine);
    for (id, qpn) in [(insists, client.node.num.0), (chosen, other.num.0)] {
        client.engine.cm_resolve_addr(id, None, to).unwrap();
        client.expect(EventKind::AddrResolved);
        client.engine.cm_resolve_route(id).unwrap();
        client.expect(EventKind::RouteResolved);
        client.engine.cm_connect(id, &Param { qpn, ..client.param() }).unwrap();
    }
    client.expect_nothing();
    let ports = [(); 2].map(|()| {
        let id = server.expect(EventKind::ConnectRequest).id;
        server.engine.cm_route(id).unwrap().dst.unwrap()
    });
    assert_eq!(ports.map(|port| port == from), [true, false], "{ports:?}, {from}");
    assert_eq!(client.engine.cm_route(chosen).unwrap().src, Some(ports[1]));
}

#[test]
fn nobody_listens() {
    let (server, client) = (Program::new(), Program::new());
    client.connect(server.address(7000));
    assert_eq!(client.expect(EventKind::Rejected).status, -libc::ECONNREFUSED);
    // Nor at its own address.
    client.connect(client.address(7000));
    assert_eq!(client.expect(EventKind::Rejected).status, -libc::ECONNREFUSED);
}

#[test]
fn a_listener_of_another_family_is_none_of_the_link() {
    // The link has an address of IPv6 alone.
    let server = Program::new();
    let every = server.id();
    server.engine.cm_set_option(every, |options| options.v6_only = Some(true)).unwrap();
    server.engine.cm_bind_addr(every, "0.0.0.0:0".parse().unwrap()).unwrap();
    server.engine.cm_listen(every, 0).unwrap();
    let port = server.engine.cm_route(every).unwrap().src.unwrap().port();
    // So nobody watches its port there, and somebody else can have it.
    assert_eq!(server.listen(server.address(port)), server.address(port));
}

#[test]
fn what_tcp_cannot_carry_is_refused_at_once() {
    let (server, client) = (Program::new(), Program::new());
    let to = server.listen(any());
    let id = client.resolve(to);
    let mut param = client.param();
    param.private_data = b"who".to_vec();
    let refused = client.engine.cm_connect(id, &param);
    assert!(matches!(refused, Err(EngineError::Connection(CallError::Invalid(_)))), "{refused:?}");
    client.engine.cm_connect(id, &client.param()).unwrap();
    let request = server.expect(EventKind::ConnectRequest);
    server.node.receive(1, &[server.node.sge(0, 64)]);
    server.engine.cm_accept(request.id, Some(&server.param())).unwrap();
    client.expect(EventKind::Established);
    server.expect(EventKind::Established);
    let write = SendWr {
        wr_id: 7,
        to: To::Peer,
        op: SendOp::Write { addr: server.node.addr(0), rkey: server.node.rkey() },
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&[client.node.sge(0, 8)]),
    };
    let refused = client.engine.post_send(client.node.qp, &write);
    assert!(refused.is_err(), "{refused:?}");
}

#[test]
fn a_port_of_the_link_is_taken_once() {
    let server = Program::new();
    let to = server.listen(server.address(0));
    let id = server.id();
    server.engine.cm_bind_addr(id, to).unwrap();
    let taken = server.engine.cm_listen(id, 0);
    assert!(
        matches!(&taken, Err(EngineError::Address(error))
        if error.raw_os_error() == Some(libc::EADDRINUSE)),
        "{taken:?}"
    );
    // The device may be hidden: then the address is none of this host's.
    let hidden = Engine::open(Config {
        address: Some("127.0.0.1".parse().unwrap()),
        qpip: Some(QpipConfig::new("udp:127.0.0.1:0".parse().unwrap())),
        ..Config::default()
    })
    .unwrap();
    let (channel, _) = hidden.cm_create_channel().unwrap();
    let id = hidden.cm_create_id(channel, PortSpace::Tcp, RC, 0).unwrap();
    let own = SocketAddr::new(hidden.qpip_info().unwrap().addresses[0], 0);
    assert!(matches!(hidden.cm_bind_addr(id, own), Err(EngineError::Address(_))));
}

/// As `rdma_set_option` asks for, less the bits of ECN.
#[test]
fn each_end_of_a_connection_has_the_traffic_class_that_its_program_asked_for() {
    let path = std::env::temp_dir().join(format!("quipu-class-{}.pcapng", std::process::id()));
    let capture = CaptureConfig { path: path.clone(), file_bytes: 64 << 20, snaplen: 0 };
    let (server, client) = (Program::captured(Some(capture)), Program::new());
    let listener = server.id();
    server.engine.cm_set_option(listener, |options| options.tos = Some(0x68 | 3)).unwrap();
    server.engine.cm_bind_addr(listener, server.address(0)).unwrap();
    server.engine.cm_listen(listener, 0).unwrap();
    let port = server.engine.cm_route(listener).unwrap().src.unwrap().port();
    let id = client.resolve(server.address(port));
    client.engine.cm_set_option(id, |options| options.tos = Some(0xb8)).unwrap();
    client.engine.cm_connect(id, &client.param()).unwrap();
    let request = server.expect(EventKind::ConnectRequest);
    server.node.receive(1, &[server.node.sge(0, 100)]);
    server.engine.cm_accept(request.id, Some(&server.param())).unwrap();
    server.expect(EventKind::Established);
    client.expect(EventKind::Established);
    talk(&client, &server, [id, request.id]);
    drop((client, server));
    let captured = packets(&std::fs::read(&path).unwrap());
    std::fs::remove_file(&path).unwrap();
    let mut seen = [0; 2];
    for (packet, comment) in &captured {
        let class = packet[0] << 4 | packet[1] >> 4;
        let is_server = u16::from_be_bytes([packet[40], packet[41]]) == port;
        assert_eq!(class & !3, if is_server { 0x68 } else { 0xb8 }, "{comment}");
        seen[usize::from(is_server)] += 1;
    }
    assert!(seen.into_iter().all(|count| count > 3), "{seen:?}");
}
