//! Plain iWARP over loopback: connection management, the hand-over of the stream, and the end; with a Quipu
//! at the other end, and with a peer of another make that the test plays itself.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::Node;
use quipu_host::connection::{
    ChannelKey, Event, EventKind, IdKey, Param, PortSpace, Protocol, Refusal,
};
use quipu_host::{Config, Device, Engine};
use quipu_nic::{Access, QpAttr, QpAttrMask, QpState, QpType, SendOp, WcStatus};

const RC: u8 = 2;
/// A Send with MSN 1 of "hello" (RFC 5040 4, RFC 5044 4), with its CRC.
pub(crate) const HELLO: [u8; 32] = [
    0x00, 0x17, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, b'h', b'e', b'l', b'l',
    b'o', 0, 0, 0, 0, 0, 0, 0,
];
/// A Write of no bytes, which opens a stream in peer-to-peer mode.
pub(crate) const READY: [u8; 20] =
    [0x00, 0x0e, 0xc1, 0x40, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn engine(cm_device: Device) -> Arc<Engine> {
    let address = Some("127.0.0.1".parse().unwrap());
    Engine::open(Config { address, cm_device, ..Config::default() }).unwrap()
}

pub(crate) struct Program {
    pub(crate) engine: Arc<Engine>,
    pub(crate) channel: ChannelKey,
    pub(crate) node: Node,
}

impl Program {
    pub(crate) fn new(cm_device: Device) -> Self {
        Self::on(engine(cm_device))
    }

    /// A program with a queue pair on `engine`.
    pub(crate) fn on(engine: Arc<Engine>) -> Self {
        let (channel, _) = engine.cm_create_channel().unwrap();
        let node = Node::with_service(&engine, 1 << 20, QpType::Iwarp);
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        let attr = QpAttr { state: QpState::Init, access, port_num: 1, ..QpAttr::default() };
        let mask = QpAttrMask::STATE | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
        engine.modify_qp(node.qp, &attr, mask).unwrap();
        Self { engine, channel, node }
    }

    pub(crate) fn id(&self) -> IdKey {
        self.engine.cm_create_id(self.channel, PortSpace::Tcp, RC, 0).unwrap()
    }

    #[track_caller]
    pub(crate) fn expect(&self, kind: EventKind) -> Event {
        let event = self.engine.cm_get_event(self.channel).unwrap();
        assert_eq!(event.kind, kind, "{event:?}");
        event
    }

    pub(crate) fn listen(&self) -> SocketAddr {
        let id = self.id();
        self.engine.cm_bind_addr(id, "127.0.0.1:0".parse().unwrap()).unwrap();
        self.engine.cm_listen(id, 0).unwrap();
        self.engine.cm_route(id).unwrap().src.unwrap()
    }

    pub(crate) fn connect(&self, to: SocketAddr, param: &Param) -> IdKey {
        let id = self.id();
        self.engine.cm_resolve_addr(id, None, to).unwrap();
        self.expect(EventKind::AddrResolved);
        self.engine.cm_resolve_route(id).unwrap();
        self.expect(EventKind::RouteResolved);
        assert_eq!(self.engine.cm_route(id).unwrap().protocol, Protocol::Iwarp);
        self.engine.cm_connect(id, param).unwrap();
        id
    }

    pub(crate) fn param(&self, private_data: &[u8]) -> Param {
        Param {
            private_data: private_data.to_vec(),
            responder_resources: 4,
            initiator_depth: 3,
            qpn: self.node.num.0,
            ..Param::default()
        }
    }
}

#[test]
fn two_quipus_speak_plain_iwarp() {
    let server = Program::new(Device::Quipu0);
    let client = Program::new(Device::QuipuIw0);
    let to = server.listen();
    let active = client.connect(to, &client.param(b"who"));
    let request = server.expect(EventKind::ConnectRequest);
    assert_eq!(&*request.private_data, b"who", "exactly");
    assert_eq!((request.peer.responder_resources, request.peer.initiator_depth), (3, 4));
    let passive = request.id;
    assert_eq!(server.engine.cm_route(passive).unwrap().protocol, Protocol::Iwarp);
    server.node.receive(1, &[server.node.sge(0, 64)]);
    server.engine.cm_accept(passive, Some(&server.param(b"me"))).unwrap();
    let established = client.expect(EventKind::Established);
    assert_eq!((established.id, &*established.private_data), (active, &b"me"[..]));
    server.expect(EventKind::Established);

    client.node.fill(0, b"hello");
    client.node.post(5, SendOp::Send, &[client.node.sge(0, 5)]);
    let sent = client.node.poll();
    assert_eq!((sent.wr_id, sent.status), (5, WcStatus::Success));
    let received = server.node.poll();
    assert_eq!((received.wr_id, received.status, received.byte_len), (1, WcStatus::Success, 5));
    assert_eq!(server.node.bytes(0, 5), b"hello");
    let (addr, rkey) = (client.node.addr(0), client.node.rkey());
    server.node.post(6, SendOp::Read { addr, rkey }, &[server.node.sge(100, 5)]);
    assert_eq!(server.node.poll().status, WcStatus::Success);
    assert_eq!(server.node.bytes(100, 5), b"hello");

    server.node.receive(2, &[]);
    client.engine.cm_disconnect(active).unwrap();
    client.expect(EventKind::Disconnected);
    server.expect(EventKind::Disconnected);
    assert_eq!(server.node.poll().status, WcStatus::WrFlushErr);
    server.engine.cm_disconnect(passive).unwrap();
    client.engine.cm_destroy_id(active).unwrap();
    server.engine.cm_destroy_id(passive).unwrap();
}

/// A peer without CRCs and peer-to-peer mode would be satisfied with less: this one asks for nothing.
#[test]
fn a_peer_of_another_make_connects() {
    let server = Program::new(Device::Quipu0);
    let to = server.listen();
    let mut peer = TcpStream::connect(to).unwrap();
    peer.write_all(b"MPA ID Req Frame\x10\x02\0\x07\x80\x02\x80\x01abc").unwrap();
    let request = server.expect(EventKind::ConnectRequest);
    assert_eq!(&*request.private_data, b"abc");
    assert_eq!((request.peer.responder_resources, request.peer.initiator_depth), (1, 2));
    server.node.receive(1, &[server.node.sge(0, 64)]);
    let mut param = server.param(b"ok");
    param.responder_resources = 1;
    param.initiator_depth = 2;
    server.engine.cm_accept(request.id, Some(&param)).unwrap();
    let mut reply = [0; 26];
    peer.read_exact(&mut reply).unwrap();
    // Quipu wants CRCs, so they are on.
    assert_eq!(&reply[..], b"MPA ID Rep Frame\x50\x02\0\x06\x80\x01\x80\x02ok");
    peer.write_all(&with_crc(&READY)).unwrap();
    server.expect(EventKind::Established);
    peer.write_all(&with_crc(&HELLO)).unwrap();
    assert_eq!(server.node.poll().status, WcStatus::Success);
    assert_eq!(server.node.bytes(0, 5), b"hello");
    drop(peer);
    server.expect(EventKind::Disconnected);
}

/// What follows the reply at once belongs to the queue pair.
#[test]
fn a_peer_of_another_make_is_connected_to() {
    let client = Program::new(Device::QuipuIw0);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    client.node.receive(1, &[client.node.sge(0, 64)]);
    let id = client.connect(listener.local_addr().unwrap(), &client.param(b"who"));
    let (mut peer, _) = listener.accept().unwrap();
    let mut request = [0; 27];
    peer.read_exact(&mut request).unwrap();
    assert_eq!(&request[..], b"MPA ID Req Frame\x50\x02\0\x07\xc0\x04\xc0\x03who");
    let mut reply = b"MPA ID Rep Frame\x50\x02\0\x06\x80\x03\x80\x04me".to_vec();
    reply.extend(with_crc(&HELLO));
    peer.write_all(&reply).unwrap();
    let established = client.expect(EventKind::Established);
    assert_eq!((established.id, &*established.private_data), (id, &b"me"[..]));
    assert_eq!(client.node.poll().status, WcStatus::Success);
    let mut ready = [0; 20];
    peer.read_exact(&mut ready).unwrap();
    assert_eq!(ready[..], with_crc(&READY)[..]);
    client.engine.cm_disconnect(id).unwrap();
    client.expect(EventKind::Disconnected);
    assert_eq!(peer.read(&mut ready).unwrap(), 0);
}

#[test]
fn refusals_and_replies_that_cannot_be_accepted() {
    let client = Program::new(Device::QuipuIw0);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let answer = |reply: &[u8]| {
        client.connect(to, &client.param(b""));
        let (mut peer, _) = listener.accept().unwrap();
        peer.read_exact(&mut [0; 24]).unwrap();
        peer.write_all(reply).unwrap();
        peer
    };
    let peer = answer(b"MPA ID Rep Frame\x60\x02\0\x02no");
    let rejected = client.expect(EventKind::Rejected);
    assert_eq!((rejected.status, &*rejected.private_data), (-111, &b"no"[..]));
    drop(peer);
    // More Reads than this end answers: it says why (RFC 6581 9.1).
    let mut peer = answer(b"MPA ID Rep Frame\x50\x02\0\x04\0\x03\0\x09");
    assert_eq!(client.expect(EventKind::ConnectError).status, -71);
    let mut terminate = [0; 28];
    peer.read_exact(&mut terminate).unwrap();
    assert_eq!(terminate[..4], [0, 0x16, 0x41, 0x47]);
    assert_eq!(terminate[20..24], [0x20, 0x06, 0, 0]);

    // A program that names no queue pair of its own.
    let mut param = client.param(b"");
    param.qpn = 0xdead;
    client.connect(to, &param);
    let (mut peer, _) = listener.accept().unwrap();
    peer.read_exact(&mut [0; 24]).unwrap();
    peer.write_all(b"MPA ID Rep Frame\x50\x02\0\x04\0\x03\0\x04").unwrap();
    client.expect(EventKind::ConnectError);

    // And this end refuses, in the words of the program.
    let server = Program::new(Device::Quipu0);
    let mut peer = TcpStream::connect(server.listen()).unwrap();
    peer.write_all(b"MPA ID Req Frame\0\x01\0\0").unwrap();
    let request = server.expect(EventKind::ConnectRequest);
    server.engine.cm_reject(request.id, Refusal::Consumer, b"busy").unwrap();
    let mut all = Vec::new();
    peer.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"MPA ID Rep Frame\x60\x01\0\x04busy");
}

#[test]
fn without_the_device_plain_requests_are_refused() {
    let address = Some("127.0.0.1".parse().unwrap());
    let devices = vec![Device::Quipu0];
    let engine = Engine::open(Config { address, devices, ..Config::default() }).unwrap();
    let (channel, _) = engine.cm_create_channel().unwrap();
    let id = engine.cm_create_id(channel, PortSpace::Tcp, RC, 0).unwrap();
    engine.cm_bind_addr(id, "127.0.0.1:0".parse().unwrap()).unwrap();
    engine.cm_listen(id, 0).unwrap();
    let mut peer = TcpStream::connect(engine.cm_route(id).unwrap().src.unwrap()).unwrap();
    peer.write_all(b"MPA ID Req Frame\0\x01\0\0").unwrap();
    let mut all = Vec::new();
    peer.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"MPA ID Rep Frame\x60\x01\0\0");
}

/// An FPDU with its last four bytes set to the CRC of the others.
pub(crate) fn with_crc(fpdu: &[u8]) -> Vec<u8> {
    let covered = if fpdu.len() == READY.len() { 16 } else { fpdu.len() - 4 };
    let mut out = fpdu[..covered].to_vec();
    let crc = quipu_nic::iwarp::wire::mpa::crc32c(&out);
    out.extend(crc.to_le_bytes());
    out
}

/// An adapter that knows MPA revision 1 only closes the connection over a request of revision 2: it is
/// asked once more, from the same address, and the connection stands.
#[test]
fn a_peer_that_knows_revision_1_only_connects() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let peer = std::thread::spawn(move || {
        let asked = |revision: u8| {
            let (mut stream, from) = listener.accept().unwrap();
            let mut request = [0; 20];
            stream.read_exact(&mut request).unwrap();
            assert_eq!((&request[..16], request[17]), (&b"MPA ID Req Frame"[..], revision));
            let mut data = vec![0; usize::from(request[19])];
            stream.read_exact(&mut data).unwrap();
            (stream, from, data)
        };
        let (first, from, _) = asked(2);
        drop(first);
        let (mut stream, again, data) = asked(1);
        assert_eq!((again, &data[..]), (from, &b"who"[..]));
        stream.write_all(b"MPA ID Rep Frame\x40\x01\0\x02me").unwrap();
        stream.write_all(&[]).unwrap();
        let mut hello = [0; HELLO.len()];
        stream.read_exact(&mut hello).unwrap();
        assert_eq!(hello[..28], HELLO[..28]);
    });
    let client = Program::new(Device::QuipuIw0);
    let id = client.connect(to, &client.param(b"who"));
    let established = client.expect(EventKind::Established);
    assert_eq!((established.id, &*established.private_data), (id, &b"me"[..]));
    client.node.fill(0, b"hello");
    client.node.post(5, SendOp::Send, &[client.node.sge(0, 5)]);
    assert_eq!(client.node.poll().status, WcStatus::Success);
    peer.join().unwrap();
    client.expect(EventKind::Disconnected);
    client.engine.cm_destroy_id(id).unwrap();
}

/// The bytes of Sends in a stream of whole FPDUs. Repetitions of the ready-to-receive message may be among
/// them.
fn sent_bytes(stream: &[u8]) -> usize {
    const HEADER: usize = 18;
    let (mut at, mut total) = (0, 0);
    while at < stream.len() {
        let len = usize::from(u16::from_be_bytes([stream[at], stream[at + 1]]));
        total += len.saturating_sub(HEADER);
        at += (2 + len).next_multiple_of(4) + 4;
    }
    assert_eq!(at, stream.len(), "the last FPDU is whole");
    total
}

/// A program that is connected to a peer which the test plays, and the identifier of the connection.
pub(crate) fn connected_to_a_peer() -> (Program, IdKey, TcpStream) {
    let client = Program::new(Device::QuipuIw0);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = client.connect(listener.local_addr().unwrap(), &client.param(b""));
    let (mut peer, _) = listener.accept().unwrap();
    peer.read_exact(&mut [0; 24]).unwrap();
    peer.write_all(b"MPA ID Rep Frame\x50\x02\0\x04\x80\x03\x80\x04").unwrap();
    client.expect(EventKind::Established);
    peer.read_exact(&mut [0; READY.len()]).unwrap();
    (client, id, peer)
}

/// Connection management asks a silent peer for signs of life, and the queue pair goes on to: a peer that
/// vanishes would never be noticed.
#[test]
fn a_silent_peer_is_asked_for_a_sign_of_life() {
    let (_client, _, peer) = connected_to_a_peer();
    let port = |address: SocketAddr| format!("{:04X}", address.port());
    let ends = [peer.peer_addr().unwrap(), peer.local_addr().unwrap()].map(port);
    let asks = || {
        let all = std::fs::read_to_string("/proc/net/tcp").unwrap();
        // Local and remote address, state, queues, and the timer, of which 02 is that of keep-alive.
        all.lines().any(|line| {
            let field: Vec<&str> = line.split_whitespace().collect();
            field[1].ends_with(&ends[0])
                && field[2].ends_with(&ends[1])
                && field[5].starts_with("02:")
        })
    };
    let end = Instant::now() + Duration::from_secs(5);
    while !asks() {
        assert!(Instant::now() < end, "nobody would notice that the peer has vanished");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A request of plain iWARP is complete when its bytes are handed over: also those that the socket had no
/// room for get to a peer that begins to read late.
#[test]
fn all_that_is_complete_arrives_although_the_process_ends() {
    const MESSAGES: usize = 40;
    const LEN: usize = 1 << 20;
    let (client, _, mut peer) = connected_to_a_peer();
    for n in 0..MESSAGES {
        client.node.post(n as u64, SendOp::Send, &[client.node.sge(0, LEN as u32)]);
    }
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        peer.read_to_end(&mut all).unwrap();
        sent_bytes(&all)
    });
    client.engine.shutdown_flush();
    drop(client);
    assert_eq!(reader.join().unwrap(), MESSAGES * LEN);
}

/// Also where the program ends the connection, and goes on.
#[test]
fn all_that_is_complete_arrives_although_the_program_disconnects() {
    const LEN: usize = 1 << 14;
    let (client, id, mut peer) = connected_to_a_peer();
    let (mut posted, mut complete) = (0, 0);
    let mut out = [quipu_nic::Completion::default(); 64];
    let mut idle = Instant::now();
    // Until both sockets and what the engine keeps are full.
    while idle.elapsed() < Duration::from_millis(300) {
        while posted - complete < 100 {
            client.node.post(posted as u64, SendOp::Send, &[client.node.sge(0, LEN as u32)]);
            posted += 1;
        }
        let found = client.engine.poll_cq(client.node.cq, &mut out).unwrap();
        if found > 0 {
            idle = Instant::now();
        }
        assert!(out[..found].iter().all(|wc| wc.status == WcStatus::Success));
        complete += found;
    }
    client.engine.cm_disconnect(id).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    let mut all = Vec::new();
    peer.read_to_end(&mut all).unwrap();
    let whole = sent_bytes(&all) / LEN;
    assert!(whole >= complete, "{whole} have arrived, {complete} are complete");
}

/// A peer that takes nothing does not keep a process from its end.
#[test]
fn a_peer_that_never_reads_is_left_behind() {
    let client = Program::new(Device::QuipuIw0);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    client.connect(listener.local_addr().unwrap(), &client.param(b""));
    let (mut peer, _) = listener.accept().unwrap();
    peer.read_exact(&mut [0; 24]).unwrap();
    peer.write_all(b"MPA ID Rep Frame\x50\x02\0\x04\x80\x03\x80\x04").unwrap();
    client.expect(EventKind::Established);
    for n in 0..40 {
        client.node.post(n, SendOp::Send, &[client.node.sge(0, 1 << 20)]);
    }
    client.engine.shutdown_flush();
    drop(peer);
}
