//! Captures of connection management, and of the streams that it hands over, from their first byte.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use crate::common::Node;
use crate::common::pcapng::{packets, streams};
use quipu_host::connection::{ChannelKey, Event, EventKind, IdKey, Param, PortSpace, Refusal};
use quipu_host::{CaptureConfig, Config, Device, Engine};
use quipu_iwarp::wire::mpa::{FrameKind, StartFrame};
use quipu_nic::{Access, QpAttr, QpAttrMask, QpState, QpType, SendOp};

const RC: u8 = 2;
const UD: u8 = 4;

/// A program whose packets are captured in a file, if it has one.
struct Program {
    engine: Arc<Engine>,
    channel: ChannelKey,
}

impl Program {
    fn new(cm_device: Device, file: Option<&PathBuf>) -> Self {
        let address = Some("127.0.0.1".parse().unwrap());
        let capture =
            file.map(|path| CaptureConfig { path: path.clone(), file_bytes: 1 << 20, snaplen: 0 });
        let engine =
            Engine::open(Config { address, cm_device, capture, ..Config::default() }).unwrap();
        let (channel, _) = engine.cm_create_channel().unwrap();
        Self { engine, channel }
    }

    #[track_caller]
    fn expect(&self, kind: EventKind) -> Event {
        let event = self.engine.cm_get_event(self.channel).unwrap();
        assert_eq!(event.kind, kind, "{event:?}");
        event
    }

    fn listen(&self, space: PortSpace, kind: u8) -> SocketAddr {
        let id = self.engine.cm_create_id(self.channel, space, kind, 0).unwrap();
        self.engine.cm_bind_addr(id, "127.0.0.1:0".parse().unwrap()).unwrap();
        self.engine.cm_listen(id, 0).unwrap();
        self.engine.cm_route(id).unwrap().src.unwrap()
    }

    fn connect(&self, to: SocketAddr, space: PortSpace, kind: u8, param: &Param) -> IdKey {
        let id = self.engine.cm_create_id(self.channel, space, kind, 0).unwrap();
        self.engine.cm_resolve_addr(id, None, to).unwrap();
        self.expect(EventKind::AddrResolved);
        self.engine.cm_resolve_route(id).unwrap();
        self.expect(EventKind::RouteResolved);
        self.engine.cm_connect(id, param).unwrap();
        id
    }

    /// A queue pair of plain iWARP, in INIT.
    fn node(&self) -> Node {
        let node = Node::with_service(&self.engine, 1 << 16, QpType::Iwarp);
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        let attr = QpAttr { state: QpState::Init, access, port_num: 1, ..QpAttr::default() };
        let mask = QpAttrMask::STATE | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
        self.engine.modify_qp(node.qp, &attr, mask).unwrap();
        node
    }
}

fn param(private_data: &[u8], qpn: u32) -> Param {
    Param { private_data: private_data.to_vec(), qpn, initiator_depth: 1, ..Param::default() }
}

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("quipu-cm-{name}-{}.pcapng", std::process::id()))
}

/// The packets of a file, which is removed.
fn taken(path: &PathBuf) -> Vec<(Vec<u8>, String)> {
    let packets = packets(&fs::read(path).unwrap());
    fs::remove_file(path).unwrap();
    packets
}

/// The comments of packets that have one.
fn comments(packets: &[(Vec<u8>, String)]) -> Vec<&str> {
    packets.iter().map(|(_, text)| &text[..]).filter(|text| !text.is_empty()).collect()
}

#[test]
fn a_stream_of_plain_iwarp_is_whole() {
    let files = [file("client"), file("server")];
    let client = Program::new(Device::QuipuIw0, Some(&files[0]));
    let server = Program::new(Device::Quipu0, Some(&files[1]));
    let nodes = (client.node(), server.node());
    let to = server.listen(PortSpace::Tcp, RC);
    client.connect(to, PortSpace::Tcp, RC, &param(b"who", nodes.0.num.0));
    let passive = server.expect(EventKind::ConnectRequest).id;
    nodes.1.receive(1, &[nodes.1.sge(0, 64)]);
    server.engine.cm_accept(passive, Some(&param(b"me", nodes.1.num.0))).unwrap();
    client.expect(EventKind::Established);
    server.expect(EventKind::Established);
    nodes.0.fill(0, b"hello");
    nodes.0.post(5, SendOp::Send, &[nodes.0.sge(0, 5)]);
    nodes.0.poll();
    assert_eq!(nodes.1.poll().byte_len, 5);
    drop((nodes, client, server));
    for path in &files {
        let packets = taken(path);
        let streams = streams(&packets);
        let starts = [(FrameKind::Request, &b"who"[..]), (FrameKind::Reply, b"me")];
        for ((kind, private_data), stream) in starts.iter().zip(&streams) {
            let length = StartFrame::frame_len(*kind, stream).unwrap().unwrap();
            let frame = StartFrame::parse(*kind, stream).unwrap();
            assert!(frame.private_data.ends_with(private_data), "{:?}", frame.private_data);
            // After it the client opens the stream and sends; the server says nothing.
            let rest = &stream[length..];
            assert_eq!(rest.windows(5).any(|bytes| bytes == b"hello"), *kind == FrameKind::Request);
        }
        let comments = comments(&packets);
        assert_eq!(comments[..2], ["MPA start-up", "MPA start-up"]);
        assert!(comments.iter().any(|text| text.starts_with("Send, MSN 1")), "{comments:?}");
    }
}

#[test]
fn messages_of_connections_are_named() {
    let path = file("messages");
    let client = Program::new(Device::Quipu0, Some(&path));
    let server = Program::new(Device::Quipu0, None);
    let to = server.listen(PortSpace::Tcp, RC);
    let active = client.connect(to, PortSpace::Tcp, RC, &param(b"who", 7));
    let passive = server.expect(EventKind::ConnectRequest).id;
    server.engine.cm_accept(passive, Some(&param(b"me", 8))).unwrap();
    client.expect(EventKind::ConnectResponse);
    client.engine.cm_accept(active, None).unwrap();
    server.expect(EventKind::Established);
    client.engine.cm_disconnect(active).unwrap();
    server.expect(EventKind::Disconnected);
    server.engine.cm_disconnect(passive).unwrap();
    client.expect(EventKind::Disconnected);
    drop((client, server));
    let packets = taken(&path);
    assert_eq!(streams(&packets).len(), 2);
    let wanted = ["REQ", "REP", "RTU", "DREQ", "DREP"];
    let wanted = wanted.map(|name| format!("connection management: {name}"));
    assert_eq!(comments(&packets), wanted);
}

#[test]
fn a_refused_connection_ends_with_its_refusal() {
    let path = file("refused");
    let client = Program::new(Device::Quipu0, None);
    let server = Program::new(Device::Quipu0, Some(&path));
    let to = server.listen(PortSpace::Tcp, RC);
    client.connect(to, PortSpace::Tcp, RC, &param(b"", 7));
    let passive = server.expect(EventKind::ConnectRequest).id;
    server.engine.cm_reject(passive, Refusal::Consumer, b"no").unwrap();
    client.expect(EventKind::Rejected);
    drop((client, server));
    let packets = taken(&path);
    assert_eq!(streams(&packets).len(), 2);
    assert_eq!(comments(&packets), ["connection management: REQ", "connection management: REJ"]);
}

#[test]
fn look_ups_are_datagrams() {
    let path = file("look-ups");
    let client = Program::new(Device::Quipu0, Some(&path));
    let server = Program::new(Device::Quipu0, None);
    let to = server.listen(PortSpace::Udp, UD);
    client.connect(to, PortSpace::Udp, UD, &param(b"who", 0));
    let passive = server.expect(EventKind::ConnectRequest).id;
    server.engine.cm_accept(passive, Some(&param(b"me", 8))).unwrap();
    client.expect(EventKind::Established);
    drop((client, server));
    let packets = taken(&path);
    let wanted = ["connection management: SIDR_REQ", "connection management: SIDR_REP"];
    assert_eq!(comments(&packets), wanted);
    // The server's port, in the UDP header behind the IPv4 header.
    let port = |packet: &[u8], at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
    assert_eq!((port(&packets[0].0, 22), port(&packets[1].0, 20)), (to.port(), to.port()));
}
