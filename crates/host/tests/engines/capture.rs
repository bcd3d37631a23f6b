//! Captured packets, read back: they are whole, and those of shared memory are those of TCP.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use crate::common::pcapng::{packets, streams};
use crate::common::{Node, pair};
use quipu_host::nic::{SendOp, WcStatus};
use quipu_host::qos::QosConfig;
use quipu_host::{CaptureConfig, Config, Engine, SameHost};
use quipu_iwarp::wire::mpa::{FrameKind, StartFrame, crc32c, fpdu_len};

const LARGE: u32 = 200_001;

/// A message as the capture shows it: opcode, and the payload of those that carry a program's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    opcode: u8,
    payload: Vec<u8>,
}

/// The messages of one direction, but for Quipu's control messages, of which a stream sends as many as it
/// thinks fit.
fn messages(kind: FrameKind, stream: &[u8]) -> Vec<Seen> {
    let start = StartFrame::frame_len(kind, stream).unwrap().unwrap();
    StartFrame::parse(kind, stream).unwrap();
    let (mut seen, mut rest) = (Vec::new(), &stream[start..]);
    let mut payload = Vec::new();
    while !rest.is_empty() {
        let ulpdu = usize::from(u16::from_be_bytes([rest[0], rest[1]]));
        let (fpdu, behind) = rest.split_at(fpdu_len(ulpdu));
        rest = behind;
        let (covered, crc) = fpdu.split_at(fpdu.len() - 4);
        assert_eq!(crc32c(covered).to_le_bytes(), crc);
        let (control, opcode) = (fpdu[2], fpdu[3] & 0xf);
        let header = if control & 0x80 != 0 { 14 } else { 18 };
        payload.extend_from_slice(&fpdu[2 + header..2 + ulpdu]);
        if control & 0x40 != 0 {
            let payload = std::mem::take(&mut payload);
            let bytes = matches!(opcode, 0 | 2 | 3 | 0xc);
            let payload = if bytes { payload } else { Vec::new() };
            if opcode != 0xf {
                seen.push(Seen { opcode, payload });
            }
        }
    }
    seen
}

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("quipu-{name}-{}.pcapng", std::process::id()))
}

fn engine(address: &str, same_host: SameHost, capture: Option<&PathBuf>) -> Arc<Engine> {
    let capture =
        capture.map(|path| CaptureConfig { path: path.clone(), file_bytes: 64 << 20, snaplen: 0 });
    let address = Some(address.parse().unwrap());
    Engine::open(Config { address, same_host, capture, arena_bytes: 64 << 20, ..Config::default() })
        .unwrap()
}

/// A program of all operations, small and large.
fn program(a: &Node, b: &Node) {
    let done = |node: &Node| assert_eq!(node.poll().status, WcStatus::Success);
    let pattern: Vec<u8> = (0..LARGE).map(|i| (i * 7 + i / 251) as u8).collect();
    a.fill(64, &pattern);
    for (length, wr_id) in [(5, 0x51), (3000, 0x52), (LARGE, 0x53)] {
        b.receive(1, &[b.sge(64, LARGE)]);
        a.post(wr_id, SendOp::Send, &[a.sge(64, length)]);
        done(a);
        done(b);
    }
    b.receive(1, &[b.sge(64, 64)]);
    a.post(0x54, SendOp::SendImm(0x1234), &[a.sge(64, 7)]);
    done(a);
    done(b);
    let (addr, rkey) = (b.addr(64), b.rkey());
    for length in [1, 9000, LARGE] {
        a.post(0x55, SendOp::Write { addr, rkey }, &[a.sge(64, length)]);
        done(a);
        a.post(0x56, SendOp::Read { addr, rkey }, &[a.sge(64, length)]);
        done(a);
    }
    b.receive(2, &[]);
    a.post(0x57, SendOp::WriteImm { addr, rkey, imm: 9 }, &[a.sge(64, 20_000)]);
    done(a);
    done(b);
    a.post(0x58, SendOp::FetchAdd { addr: b.addr(0), rkey, add: 2 }, &[a.sge(0, 8)]);
    done(a);
    let swap = SendOp::CompareSwap { addr: b.addr(0), rkey, compare: 2, swap: 3 };
    a.post(0x59, swap, &[a.sge(0, 8)]);
    done(a);
}

/// What the program's capture shows of both directions, and the comments in it.
fn captured(
    name: &str,
    a: &str,
    b: Option<&str>,
    same_host: SameHost,
) -> (Vec<Seen>, Vec<Seen>, String) {
    let path = file(name);
    let first = engine(a, same_host, Some(&path));
    let second = b.map(|b| engine(b, same_host, None));
    let (a, b) = pair(&first, second.as_ref().unwrap_or(&first), 1 << 20);
    program(&a, &b);
    drop((a, b, first, second));
    let packets = packets(&fs::read(&path).unwrap());
    fs::remove_file(&path).unwrap();
    let streams = streams(&packets);
    let client = messages(FrameKind::Request, &streams[0]);
    let server = messages(FrameKind::Reply, &streams[1]);
    let comments = packets.into_iter().map(|(_, comment)| comment + "\n").collect();
    (client, server, comments)
}

#[test]
fn shared_memory_shows_what_tcp_shows() {
    let tcp = captured("tcp", "127.0.0.1", Some("127.0.0.2"), SameHost::Never);
    let opcodes = |seen: &[Seen]| seen.iter().map(|seen| seen.opcode).collect::<Vec<_>>();
    // The smaller address makes the connection.
    assert_eq!(opcodes(&tcp.0), [3, 3, 3, 0xc, 0, 1, 0, 1, 0, 1, 0, 8, 0xa, 0xa]);
    assert_eq!(opcodes(&tcp.1), [2, 2, 2, 0xb, 0xb]);
    assert_eq!(tcp.1[2].payload.len(), LARGE as usize);
    for comment in
        ["RDMA Read Request, MSN 1, wr_id 0x56", "Send, MSN 2, wr_id 0x52", "MPA start-up"]
    {
        assert!(tcp.2.contains(comment), "{}", tcp.2);
    }
    let link = captured("link", "127.0.0.1", Some("127.0.0.2"), SameHost::Auto);
    assert!(
        (&tcp.0, &tcp.1) == (&link.0, &link.1),
        "{:?} {:?}",
        opcodes(&link.0),
        opcodes(&link.1)
    );
    assert!(link.2.contains("RDMA Read Request, MSN 1, wr_id 0x56"), "{}", link.2);
    let own = captured("own", "127.0.0.1", None, SameHost::Auto);
    assert!((&tcp.0, &tcp.1) == (&own.0, &own.1), "{:?} {:?}", opcodes(&own.0), opcodes(&own.1));
}

#[test]
fn the_passive_side_sees_what_it_does() {
    let path = file("passive");
    let (a, b) = (
        engine("127.0.0.1", SameHost::Auto, None),
        engine("127.0.0.2", SameHost::Auto, Some(&path)),
    );
    let nodes = pair(&a, &b, 1 << 20);
    program(&nodes.0, &nodes.1);
    drop((nodes, a, b));
    let streams = streams(&packets(&fs::read(&path).unwrap()));
    fs::remove_file(&path).unwrap();
    let client = messages(FrameKind::Request, &streams[0]);
    let sends: Vec<_> = client.iter().filter(|seen| matches!(seen.opcode, 3 | 0xc)).collect();
    assert_eq!(
        sends.iter().map(|seen| seen.payload.len()).collect::<Vec<_>>(),
        [5, 3000, LARGE as usize, 7]
    );
    let pattern: Vec<u8> = (0..LARGE).map(|i| (i * 7 + i / 251) as u8).collect();
    assert!(sends[2].payload == pattern);
    assert_eq!(client.iter().filter(|seen| seen.opcode == 0xa).count(), 2);
}

#[test]
fn the_file_ends_at_its_limit() {
    let path = file("limit");
    let capture = CaptureConfig { path: path.clone(), file_bytes: 20_000, snaplen: 0 };
    let address = Some("127.0.0.1".parse().unwrap());
    let engine =
        Engine::open(Config { address, capture: Some(capture), ..Config::default() }).unwrap();
    let (a, b) = pair(&engine, &engine, 1 << 20);
    program(&a, &b);
    drop((a, b, engine));
    let file = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    assert!(file.len() <= 20_000 && file.len() > 3_500);
    // It ends with a whole block.
    assert!(packets(&file).len() > 3);
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let path = PathBuf::from("/proc/no/such.pcapng");
    let capture = CaptureConfig { path, file_bytes: 20_000, snaplen: 0 };
    let address = Some("127.0.0.1".parse().unwrap());
    let Err(error) = Engine::open(Config { address, capture: Some(capture), ..Config::default() })
    else {
        panic!("there is no such folder");
    };
    assert!(error.to_string().contains("/proc/no/such.pcapng"), "{error}");
}

/// A capture says of each packet which service level and lane it had, for tshark's filters too.
#[test]
fn lanes_are_visible() {
    for (name, same_host) in [("lanes-tcp", SameHost::Never), ("lanes-link", SameHost::Auto)] {
        let path = file(name);
        let capture = CaptureConfig { path: path.clone(), file_bytes: 64 << 20, snaplen: 0 };
        let engines =
            [("127.0.77.1", Some(capture)), ("127.0.77.2", None)].map(|(own, capture)| {
                let qos = Some(QosConfig { file: None, rate: Some(10_000_000_000) });
                let (address, arena_bytes) = (Some(own.parse().unwrap()), 64 << 20);
                let config =
                    Config { address, same_host, capture, qos, arena_bytes, ..Config::default() };
                Engine::open(config).unwrap()
            });
        let (a, b) = pair(&engines[0], &engines[1], 1 << 20);
        for level in [1, 12] {
            a.engine.set_service_level(a.qp, level, 0).unwrap();
            program(&a, &b);
        }
        drop((a, b, engines));
        let packets = packets(&fs::read(&path).unwrap());
        let marked = |comment: &str| {
            let found = packets.iter().filter(|(_, it)| it.contains(comment));
            found.map(|(packet, _)| packet[1]).collect::<Vec<_>>()
        };
        // DSCP 8; there is none for service level 12.
        let (first, second) = (marked(", SL 1, VL 1: Send"), marked(", SL 12, VL 12: Send"));
        assert_eq!((first.len() >= 4, second.len() >= 4), (true, true), "{name}: {packets:?}");
        assert!(
            first.iter().all(|class| *class == 8 << 2) && second.iter().all(|class| *class == 0)
        );
        let shown = Command::new("tshark")
            .args(["-o", "ip.check_checksum:TRUE", "-r"])
            .arg(&path)
            .args(["-T", "fields", "-e", "ip.src", "-Y"])
            .arg("ip.dsfield.dscp == 8 && ip.checksum.status == 1 && frame.comment contains \"VL 1:\"")
            .output();
        fs::remove_file(&path).unwrap();
        let Ok(shown) = shown else {
            println!("SKIPPED: no tshark here");
            continue;
        };
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.lines().count() > first.len(), "{shown}");
        assert!(shown.lines().all(|from| from == "127.0.77.1"), "{shown}");
    }
}
