//! Frames of QPIP in a VLAN, between two engines on the ends of a veth pair: what the kernel and Wireshark
//! see of their tags.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use crate::common::{Node, PATIENCE};
use crate::space::{inside, ip, wait_until_up};
use quipu_host::nic::{QpAttr, QpAttrMask, QpState, QpType, SendOp, TcpSettings, WcStatus};
use quipu_host::{CaptureConfig, Config, Engine, QpipConfig, parse_address};

const LEN: u32 = 20_000;

/// An engine in VLAN 7, whose frames are captured.
fn engine(interface: &str, address: &str) -> (Arc<Engine>, Node, PathBuf) {
    let name = format!("quipu-vlan-{interface}-{}.pcapng", std::process::id());
    let path = std::env::temp_dir().join(name);
    let capture = CaptureConfig { path: path.clone(), file_bytes: 64 << 20, snaplen: 0 };
    let mut config = QpipConfig::new(format!("packet:{interface},vlan=7").parse().unwrap());
    config.addresses.push(parse_address(address).unwrap());
    let engine = Engine::open(Config {
        address: Some("127.0.0.1".parse().unwrap()),
        capture: Some(capture),
        qpip: Some(config),
        ..Config::default()
    })
    .unwrap();
    let node = Node::with_service(&engine, 1 << 17, QpType::Tcp);
    engine.tcp_events(node.context).unwrap();
    let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
    engine.modify_qp(node.qp, &attr, QpAttrMask::STATE | QpAttrMask::PORT).unwrap();
    (engine, node, path)
}

/// The values of fields of the frames that a filter lets through, each once.
fn seen(path: &Path, filter: &str, fields: &[&str]) -> Option<Vec<String>> {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(path).args(["-Y", filter, "-T", "fields"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let output = command.output().ok()?;
    let mut lines: Vec<_> =
        String::from_utf8(output.stdout).unwrap().lines().map(String::from).collect();
    lines.sort();
    lines.dedup();
    Some(lines)
}

#[test]
fn frames_carry_their_service_level_in_the_tag_of_the_vlan() {
    if !inside("vlan::frames_carry_their_service_level_in_the_tag_of_the_vlan") {
        return;
    }
    ip("link add ours type veth peer name theirs");
    ["ours", "theirs"].into_iter().for_each(|name| ip(&format!("link set {name} up")));
    ["ours", "theirs"].into_iter().for_each(wait_until_up);
    let (server, there, arrived) = engine("theirs", "fd09::2/64");
    let (client, here, sent) = engine("ours", "fd09::1/64");
    let (listener, port) = server.tcp_listen(0, &TcpSettings::default(), 4).unwrap();
    there.receive(1, &[there.sge(0, LEN)]);
    here.receive(2, &[here.sge(1 << 16, LEN)]);
    server.tcp_offer(listener, there.qp).unwrap();
    // Service level 5.
    let settings = TcpSettings { traffic_class: 0xa0, ..TcpSettings::default() };
    client
        .tcp_connect(
            here.qp,
            ("fd09::2".parse::<std::net::IpAddr>().unwrap(), port).into(),
            None,
            &settings,
        )
        .unwrap();
    let deadline = Instant::now() + PATIENCE;
    while client.query_qp(here.qp).unwrap().attr.state != QpState::Rts {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    here.post(3, SendOp::Send, &[here.sge(0, LEN)]);
    assert_eq!(there.poll().status, WcStatus::Success);
    there.post(4, SendOp::Send, &[there.sge(0, 1_000)]);
    assert_eq!([here.poll(), here.poll()].map(|done| done.status), [WcStatus::Success; 2]);
    drop((here, there, client, server));
    for path in [&sent, &arrived] {
        // One end names a service level, the other has none.
        let fields = ["vlan.id", "vlan.priority", "ipv6.tclass.dscp"];
        let Some(from_client) = seen(path, &format!("tcp.dstport == {port}"), &fields) else {
            println!("SKIPPED: no tshark here");
            break;
        };
        assert_eq!(from_client, ["7\t5\t40"], "{}", path.display());
        let from_server = seen(path, &format!("tcp.srcport == {port}"), &fields).unwrap();
        assert_eq!(from_server, ["7\t0\t0"], "{}", path.display());
        assert_eq!(seen(path, "!vlan || _ws.malformed", &["frame.number"]).unwrap(), [""; 0]);
    }
    [sent, arrived].into_iter().for_each(|path| fs::remove_file(path).unwrap());
}
