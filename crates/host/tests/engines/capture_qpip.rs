//! Frames of QPIP in a capture: they are there as they went over the link, in both directions.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use crate::common::pcapng::packets;
use crate::common::{Node, PATIENCE};
use quipu_host::nic::{QpAttr, QpAttrMask, QpState, QpType, SendOp, TcpSettings, WcStatus};
use quipu_host::{CaptureConfig, Config, Engine, QpipConfig};
use quipu_iwarp::wire::mpa::crc32c;

/// Octets of an IPv6 header.
const IP: usize = 40;
const LEN: u32 = 50_000;

fn engine(capture: Option<CaptureConfig>) -> (Arc<Engine>, Node) {
    let engine = Engine::open(Config {
        address: Some("127.0.0.1".parse().unwrap()),
        capture,
        qpip: Some(QpipConfig::new("udp:127.0.0.1:0".parse().unwrap())),
        ..Config::default()
    })
    .unwrap();
    let node = Node::with_service(&engine, 1 << 17, QpType::Tcp);
    engine.tcp_events(node.context).unwrap();
    let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
    engine.modify_qp(node.qp, &attr, QpAttrMask::STATE | QpAttrMask::PORT).unwrap();
    (engine, node)
}

#[test]
fn frames_are_captured_as_they_pass() {
    let path = std::env::temp_dir().join(format!("quipu-frames-{}.pcapng", std::process::id()));
    let capture = CaptureConfig { path: path.clone(), file_bytes: 64 << 20, snaplen: 0 };
    let (server, there) = engine(None);
    let (client, here) = engine(Some(capture));
    let settings = TcpSettings::default();
    let (listener, port) = server.tcp_listen(0, &settings, 4).unwrap();
    there.receive(1, &[there.sge(0, LEN)]);
    here.receive(2, &[here.sge(1 << 16, LEN)]);
    server.tcp_offer(listener, there.qp).unwrap();
    let to = (server.qpip_info().unwrap().addresses[0], port).into();
    client.tcp_connect(here.qp, to, None, &settings).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while client.query_qp(here.qp).unwrap().attr.state != QpState::Rts {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    let bytes: Vec<u8> = (0..LEN).map(|n| (n * 7 + n / 251) as u8).collect();
    here.fill(0, &bytes);
    here.post(3, SendOp::Send, &[here.sge(0, LEN)]);
    assert_eq!(there.poll().status, WcStatus::Success);
    there.post(4, SendOp::Send, &[there.sge(0, 1_000)]);
    let mut done = [here.poll(), here.poll()];
    done.sort_by_key(|done| done.wr_id);
    assert_eq!(done.map(|done| (done.wr_id, done.status)), [2, 3].map(|n| (n, WcStatus::Success)));
    drop((here, there, client, server));

    let captured = packets(&fs::read(&path).unwrap());
    decode(&path);
    fs::remove_file(&path).unwrap();
    // What each direction has carried, maybe more than once.
    let mut streams = [Stream::default(), Stream::default()];
    for (packet, comment) in &captured {
        assert_eq!(packet[0] >> 4, 6, "{comment}");
        assert_eq!(packet.len(), IP + usize::from(u16::from_be_bytes([packet[4], packet[5]])));
        let tcp = &packet[IP..];
        let source = u16::from_be_bytes([tcp[0], tcp[1]]);
        streams[usize::from(source == port)].take(tcp);
    }
    let [sent, received] = streams.map(|stream| stream.bytes);
    assert_eq!((sent.len(), crc32c(&sent)), (bytes.len(), crc32c(&bytes)));
    assert_eq!(received, bytes[..1_000]);
}

/// Wireshark sees TCP with right checksums on an interface with the name of the link.
fn decode(path: &Path) {
    let tshark = |filter: &str, field: &str| {
        let mut command = Command::new("tshark");
        command.args(["-o", "tcp.check_checksum:TRUE", "-r"]).arg(path);
        command.args(["-Y", filter, "-T", "fields", "-e", field]).output()
    };
    let Ok(complaints) =
        tshark("_ws.malformed || !tcp || tcp.checksum.status == 0", "frame.number")
    else {
        println!("SKIPPED: no tshark here");
        return;
    };
    assert!(complaints.status.success() && complaints.stdout.is_empty(), "{complaints:?}");
    let names = String::from_utf8(tshark("tcp", "frame.interface_name").unwrap().stdout).unwrap();
    assert!(names.lines().count() > 4);
    assert!(names.lines().all(|name| name == "udp:127.0.0.1:0"), "{names}");
}

/// One direction of a connection.
#[derive(Default)]
struct Stream {
    /// The number of its first octet, once its SYN was there.
    first: Option<u32>,
    bytes: Vec<u8>,
}

impl Stream {
    fn take(&mut self, tcp: &[u8]) {
        let seq = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
        if tcp[13] & 2 != 0 {
            self.first = Some(seq.wrapping_add(1));
            return;
        }
        let payload = &tcp[usize::from(tcp[12] >> 4) * 4..];
        if payload.is_empty() {
            return;
        }
        let at = seq.wrapping_sub(self.first.expect("a SYN before")) as usize;
        let end = self.bytes.len().max(at + payload.len());
        self.bytes.resize(end, 0);
        self.bytes[at..at + payload.len()].copy_from_slice(payload);
    }
}
