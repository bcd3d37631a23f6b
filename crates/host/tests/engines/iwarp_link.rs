//! Plain iWARP over the adapter's own TCP on a packet link: with the same at the other end, and with an
//! engine whose streams are kernel sockets.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::plain::Program;
use crate::space::{inside, ip};
use quipu_host::connection::{EventKind, IdKey, Param, Refusal};
use quipu_host::{Config, Device, Engine, QpipConfig};
use quipu_nic::{SendOp, WcStatus};

/// A length that takes many segments.
const LONG: usize = 300_000;

/// An engine that connects from `quipu_iw0`, at an address of the kernel's.
fn engine(address: &str, qpip: Option<QpipConfig>) -> Arc<Engine> {
    Engine::open(Config {
        address: Some(address.parse().unwrap()),
        cm_device: Device::QuipuIw0,
        devices: vec![Device::Quipu0, Device::QuipuIw0],
        qpip,
        ..Config::default()
    })
    .unwrap()
}

fn on_udp() -> Program {
    Program::on(engine("127.0.0.1", Some(QpipConfig::new("udp:127.0.0.1:0".parse().unwrap()))))
}

/// Listens at an address, at a port of the engine's choice.
fn listen(server: &Program, at: &str) -> u16 {
    let id = server.id();
    server.engine.cm_bind_addr(id, SocketAddr::new(at.parse().unwrap(), 0)).unwrap();
    server.engine.cm_listen(id, 0).unwrap();
    server.engine.cm_route(id).unwrap().src.unwrap().port()
}

fn link_address(program: &Program) -> String {
    program.engine.qpip_info().unwrap().addresses[0].to_string()
}

fn connect(server: &Program, client: &Program, at: &str, port: u16) -> [IdKey; 2] {
    let to = SocketAddr::new(at.parse().unwrap(), port);
    let active = client.connect(to, &client.param(b"who"));
    let request = server.expect(EventKind::ConnectRequest);
    assert_eq!(&*request.private_data, b"who");
    server.node.receive(1, &[server.node.sge(0, LONG as u32)]);
    server.engine.cm_accept(request.id, Some(&server.param(b"me"))).unwrap();
    let established = client.expect(EventKind::Established);
    assert_eq!(&*established.private_data, b"me");
    server.expect(EventKind::Established);
    [active, request.id]
}

/// Every kind of message in both directions, and the end.
fn talk(client: &Program, server: &Program, [active, passive]: [IdKey; 2]) {
    let long: Vec<u8> = (0..LONG).map(|n| (n * 7 + (n >> 9)) as u8).collect();
    client.node.fill(0, &long);
    client.node.post(5, SendOp::Send, &[client.node.sge(0, LONG as u32)]);
    assert_eq!((client.node.poll().wr_id, server.node.poll().wr_id), (5, 1));
    assert!(server.node.bytes(0, LONG) == long, "a send");
    let (addr, rkey) = (client.node.addr(400_000), client.node.rkey());
    server.node.post(6, SendOp::Write { addr, rkey }, &[server.node.sge(0, LONG as u32)]);
    assert_eq!(server.node.poll().status, WcStatus::Success);
    server.node.post(7, SendOp::Read { addr, rkey }, &[server.node.sge(700_000, LONG as u32)]);
    assert_eq!(server.node.poll().status, WcStatus::Success);
    assert!(client.node.bytes(400_000, LONG) == long, "a write");
    assert!(server.node.bytes(700_000, LONG) == long, "a read");

    server.node.receive(2, &[]);
    client.engine.cm_disconnect(active).unwrap();
    client.expect(EventKind::Disconnected);
    server.expect(EventKind::Disconnected);
    assert_eq!(server.node.poll().status, WcStatus::WrFlushErr);
    server.engine.cm_disconnect(passive).unwrap();
    client.engine.cm_destroy_id(active).unwrap();
    server.engine.cm_destroy_id(passive).unwrap();
}

#[test]
fn two_adapters_meet_over_their_own_tcp() {
    let (server, client) = (on_udp(), on_udp());
    let at = link_address(&server);
    let port = listen(&server, &at);
    let ids = connect(&server, &client, &at, port);
    talk(&client, &server, ids);
}

/// Who does not want a peer says so, with a word; and where nobody listens, TCP says it.
#[test]
fn peers_are_refused() {
    let (server, client) = (on_udp(), on_udp());
    let at = link_address(&server);
    let port = listen(&server, "::");
    let to = SocketAddr::new(at.parse().unwrap(), port);
    client.connect(to, &client.param(b""));
    let request = server.expect(EventKind::ConnectRequest);
    server.engine.cm_reject(request.id, Refusal::Consumer, b"not you").unwrap();
    let rejected = client.expect(EventKind::Rejected);
    assert_eq!(&*rejected.private_data, b"not you");
    let nowhere = SocketAddr::new(at.parse().unwrap(), 9);
    client.connect(nowhere, &Param { qpn: client.node.num.0, ..Param::default() });
    client.expect(EventKind::Rejected);
}

/// The kernel's TCP, which knows nothing of FPDUs, at the other end: an engine with sockets.
#[test]
fn a_kernel_socket_is_at_the_other_end() {
    if !inside("iwarp_link::a_kernel_socket_is_at_the_other_end") {
        return;
    }
    if std::fs::File::open("/dev/net/tun").is_err() {
        println!("SKIPPED: no /dev/net/tun here");
        return;
    }
    ip("tuntap add dev qp0 mode tap vnet_hdr");
    ip("link set qp0 up");
    ip("address add 10.9.0.1/24 dev qp0");
    let mut config = QpipConfig::new("tap:qp0".parse().unwrap());
    config.addresses.push(("10.9.0.2".parse().unwrap(), 24));
    for adapter_listens in [true, false] {
        let ours = Program::on(engine("127.0.0.1", Some(config.clone())));
        let theirs = Program::on(engine("10.9.0.1", None));
        let (server, client, at) = match adapter_listens {
            true => (&ours, &theirs, "10.9.0.2"),
            false => (&theirs, &ours, "10.9.0.1"),
        };
        let port = listen(server, at);
        let ids = connect(server, client, at, port);
        talk(client, server, ids);
    }
}
