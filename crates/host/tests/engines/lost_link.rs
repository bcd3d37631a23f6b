//! A program of verbs hears that the packet link of its device is gone.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use quipu_host::connection::{EventKind, Param, PortSpace};
use quipu_host::{Config, Device, Engine, EngineError, QpipConfig};
use quipu_nic::{AsyncEvent, QpAttr, QpAttrMask, QpState, QpType, WcStatus};

use crate::common::Node;
use crate::space::{inside, ip};

const RC: u8 = 2;
/// Nothing here takes that long.
const PATIENCE: Duration = Duration::from_secs(20);
const OURS: &str = "10.9.0.2";

#[test]
fn a_program_hears_that_the_link_of_its_device_is_gone() {
    if !inside("lost_link::a_program_hears_that_the_link_of_its_device_is_gone") {
        return;
    }
    if std::fs::File::open("/dev/net/tun").is_err() {
        return println!("SKIPPED: no /dev/net/tun here");
    }
    ip("tuntap add dev qp0 mode tap vnet_hdr");
    ip("address add 10.9.0.1/24 dev qp0");
    ip("link set qp0 up");
    let engine = Engine::open(Config {
        address: Some("127.0.0.1".parse().unwrap()),
        devices: Device::ALL.to_vec(),
        qpip: Some(QpipConfig {
            addresses: vec![(OURS.parse().unwrap(), 24)],
            ..QpipConfig::new("tap:qp0".parse().unwrap())
        }),
        ..Config::default()
    })
    .unwrap();
    let (context, _) = engine.open_context_of(Device::QuipuQp0).unwrap();
    let (other, _) = engine.open_context_of(Device::Quipu0).unwrap();
    let (channel, _) = engine.cm_create_channel().unwrap();
    let node = Node::with_service(&engine, 4096, QpType::Tcp);
    let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
    engine.modify_qp(node.qp, &attr, QpAttrMask::STATE | QpAttrMask::PORT).unwrap();
    let listener = engine.cm_create_id(channel, PortSpace::Tcp, RC, 0).unwrap();
    engine.cm_bind_addr(listener, SocketAddr::new(OURS.parse().unwrap(), 7000)).unwrap();
    engine.cm_listen(listener, 0).unwrap();
    let _peer = TcpStream::connect((OURS, 7000)).unwrap();
    let request = engine.cm_get_event(channel).unwrap();
    assert_eq!(request.kind, EventKind::ConnectRequest);
    node.receive(1, &[node.sge(0, 64)]);
    let param = Param { qpn: node.num.0, ..Param::default() };
    engine.cm_accept(request.id, Some(&param)).unwrap();
    assert_eq!(engine.cm_get_event(channel).unwrap().kind, EventKind::Established);
    assert!(engine.port_is_up(Device::QuipuQp0));

    ip("link delete qp0");
    // It sleeps meanwhile: nobody polls.
    assert_eq!(engine.wait_async_within(context, Some(PATIENCE)).unwrap(), AsyncEvent::PortErr);
    assert!(!engine.port_is_up(Device::QuipuQp0) && engine.port_is_up(Device::Quipu0));
    let nothing = engine.wait_async_within(other, Some(Duration::ZERO));
    assert!(matches!(nothing, Err(EngineError::WaitOn)), "{nothing:?}");
    let ended = engine.cm_get_event_within(channel, Some(PATIENCE)).unwrap();
    assert_eq!((ended.kind, ended.id), (EventKind::Disconnected, request.id));
    let lost = engine.cm_get_event_within(channel, Some(PATIENCE)).unwrap();
    assert_eq!((lost.kind, lost.id), (EventKind::DeviceRemoval, listener));
    let flushed = node.poll();
    assert_eq!((flushed.wr_id, flushed.status), (1, WcStatus::WrFlushErr));
    assert_eq!(
        engine.wait_async_within(node.context, Some(PATIENCE)).unwrap(),
        AsyncEvent::QpFatal(node.qp)
    );
    // What is asked for from now on fails, and does not wait.
    let id = engine.cm_create_id(channel, PortSpace::Tcp, RC, 0).unwrap();
    let bound = engine.cm_bind_addr(id, SocketAddr::new(OURS.parse().unwrap(), 7001));
    assert!(bound.is_err(), "{bound:?}");
}
