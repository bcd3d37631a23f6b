//! What Linux siw does as a peer, played over loopback: it reads late, does not ask for peer-to-peer mode,
//! and leaves early.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::plain::{HELLO, Program, READY, connected_to_a_peer, with_crc};
use quipu_host::connection::EventKind;
use quipu_host::{Config, Device, Engine};
use quipu_nic::{SendOp, WcStatus};

/// The request of a stock siw: revision 2, no CRC, no peer-to-peer mode.
const REQUEST: &[u8] = b"MPA ID Req Frame\x10\x02\0\x04\0\x04\0\x04";

/// siw sets the callback of its socket after it has sent the reply, and reads what arrives in between when
/// the next segment arrives.
#[test]
fn a_client_repeats_its_ready_to_receive_message_to_a_silent_server() {
    let (_client, _, mut peer) = connected_to_a_peer();
    let mut ready = [0; 20];
    for _ in 0..3 {
        peer.read_exact(&mut ready).unwrap();
        assert_eq!(ready[..], with_crc(&READY)[..]);
    }
}

/// A program that listens, and a client of another make that has its reply.
fn served(server: &Program) -> TcpStream {
    let mut peer = TcpStream::connect(server.listen()).unwrap();
    peer.write_all(REQUEST).unwrap();
    let request = server.expect(EventKind::ConnectRequest);
    server.engine.cm_accept(request.id, Some(&server.param(b""))).unwrap();
    peer.read_exact(&mut [0; 24]).unwrap();
    peer
}

#[test]
fn a_server_whose_program_speaks_first_is_heard() {
    let server = Program::new(Device::Quipu0);
    let mut peer = served(&server);
    server.expect(EventKind::Established);
    server.node.fill(0, b"hello");
    server.node.post(1, SendOp::Send, &[server.node.sge(0, 5)]);
    let mut hello = [0; HELLO.len()];
    peer.read_exact(&mut hello).unwrap();
    assert_eq!(hello[..], with_crc(&HELLO)[..]);
    assert_eq!(server.node.poll().status, WcStatus::Success);
}

#[test]
fn a_strict_server_waits_for_its_client() {
    let address = Some("127.0.0.1".parse().unwrap());
    let engine = Engine::open(Config { address, speak_first: None, ..Config::default() }).unwrap();
    let server = Program::on(engine);
    let mut peer = served(&server);
    server.expect(EventKind::Established);
    server.node.fill(0, b"hello");
    server.node.post(1, SendOp::Send, &[server.node.sge(0, 5)]);
    peer.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
    let silent = peer.read(&mut [0; 1]).unwrap_err();
    assert!(matches!(silent.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{silent}");
    peer.set_read_timeout(None).unwrap();
    server.node.receive(2, &[server.node.sge(64, 64)]);
    peer.write_all(&with_crc(&HELLO)).unwrap();
    peer.read_exact(&mut [0; HELLO.len()]).unwrap();
}

/// `rping -s -P` ends at a connect error: a client that leaves would end it for all others.
#[test]
fn a_client_that_closes_instead_of_its_ready_to_receive_message_was_connected() {
    let server = Program::new(Device::Quipu0);
    let mut peer = TcpStream::connect(server.listen()).unwrap();
    peer.write_all(b"MPA ID Req Frame\x10\x02\0\x04\x80\x04\x80\x04").unwrap();
    let request = server.expect(EventKind::ConnectRequest);
    server.engine.cm_accept(request.id, Some(&server.param(b""))).unwrap();
    peer.read_exact(&mut [0; 24]).unwrap();
    drop(peer);
    assert_eq!(server.expect(EventKind::Established).id, request.id);
    assert_eq!(server.expect(EventKind::Disconnected).id, request.id);
    server.engine.cm_disconnect(request.id).unwrap();
    server.engine.cm_destroy_id(request.id).unwrap();
}

/// It took half a second, during which the port was tried again and again.
#[test]
fn a_refused_connection_is_reported_at_once() {
    let client = Program::new(Device::QuipuIw0);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused = |_| {
        let asked = Instant::now();
        client.connect(closed, &client.param(b""));
        assert_eq!(client.expect(EventKind::Rejected).status, -111);
        asked.elapsed()
    };
    let shortest = (0..5).map(refused).min();
    assert!(shortest < Some(Duration::from_millis(400)), "{shortest:?}");
}
