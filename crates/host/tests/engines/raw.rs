//! Ethernet frames between engines over the kernel's UDP, on the loopback.

use crate::common::{Node, engine};
use quipu_host::SameHost;
use quipu_host::nic::{
    Completion, FlowLayer, FlowRule, FlowSpec, Key, QpAttr, QpAttrMask, QpNum, QpState, QpType,
    RX_HASH_KEY, RxHash, RxHashFields, SendOp, Sge, WcStatus, WqState, station_address,
};

/// A group of stations for one test of this process: all adapters of the host share the segment.
fn group(test: u8) -> [u8; 6] {
    let [.., high, low] = std::process::id().to_be_bytes();
    [1, 0, 0x5e, high, low, test]
}

fn node(address: &str) -> Node {
    let engine = engine(address, SameHost::Auto);
    let node = Node::with_service(&engine, 1 << 16, QpType::RawPacket);
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        let attr = QpAttr { state, port_num: 1, ..QpAttr::default() };
        let port = if state == QpState::Init { QpAttrMask::PORT } else { QpAttrMask::empty() };
        engine.modify_qp(node.qp, &attr, QpAttrMask::STATE | port).unwrap();
    }
    node
}

fn to(station: [u8; 6]) -> FlowRule {
    let spec = FlowSpec::new(FlowLayer::Ethernet, false, &station, &[0xff; 6]).unwrap();
    FlowRule { specs: vec![spec], ..FlowRule::default() }
}

fn send(from: &Node, station: [u8; 6], len: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
    frame[..6].copy_from_slice(&station);
    from.fill(0, &frame);
    from.post(1, SendOp::Send, &[from.sge(0, len as u32)]);
    assert_eq!(from.poll().wr_id, 1);
    frame
}

#[test]
fn frames_find_the_stations_that_they_are_for() {
    // An address, and so a station, that no other process has.
    let [.., high, low] = std::process::id().to_be_bytes();
    let (a, b) = (node("127.0.0.1"), node(&format!("127.{high}.{low}.2")));
    let own = station_address(b.engine.gid());
    let flows = [to(own), to(group(1))].map(|rule| b.engine.create_flow(b.qp, rule).unwrap());
    for (wr_id, (station, len)) in [(own, 60), (group(1), 14), (own, 1514)].into_iter().enumerate()
    {
        b.receive(wr_id as u64, &[b.sge(4096, 2048)]);
        let frame = send(&a, station, len);
        let got = b.poll();
        assert_eq!((got.wr_id, got.byte_len as usize), (wr_id as u64, len));
        assert_eq!(b.bytes(4096, len), frame);
    }
    assert!(b.engine.destroy_qp(b.qp).is_err(), "it has rules");
    for flow in flows {
        b.engine.destroy_flow(flow).unwrap();
        assert!(b.engine.destroy_flow(flow).is_err());
    }
    b.engine.destroy_qp(b.qp).unwrap();
}

#[test]
fn work_queues_of_an_engine() {
    let (a, b) = (node("127.0.0.1"), node("127.0.0.1"));
    let (wq, max_wr, max_sge) = b.engine.create_wq(b.pd, b.cq, 4, 1).unwrap();
    assert_eq!((max_wr, max_sge), (4, 1));
    b.engine.modify_wq(wq, None, WqState::Ready).unwrap();
    let table = b.engine.create_ind_table(&[wq]).unwrap();
    let hash = RxHash::new([1; RX_HASH_KEY], RxHashFields::empty()).unwrap();
    let (qp, number) = b.engine.create_hashed_qp(b.context, b.pd, table, hash).unwrap();
    assert_ne!(number, QpNum(0));
    let flow = b.engine.create_flow(qp, to(group(2))).unwrap();
    b.engine.doorbell().unwrap().post_wq_recv(wq, 5, &[b.sge(4096, 100)]).unwrap();
    let frame = send(&a, group(2), 64);
    let got = b.poll();
    assert_eq!((got.wr_id, got.byte_len), (5, 64));
    assert_eq!(b.bytes(4096, 64), frame);
    assert!(b.engine.destroy_wq(wq).is_err() && b.engine.destroy_ind_table(table).is_err());
    // A receive into no memory moves it to ERR by itself, whatever the program was told last.
    let nowhere = Sge { addr: 0, len: 100, lkey: Key(7) };
    b.engine.doorbell().unwrap().post_wq_recv(wq, 6, &[nowhere]).unwrap();
    send(&a, group(2), 64);
    assert_eq!(b.poll().status, WcStatus::LocProtErr);
    let (ready, err) = (Some(WqState::Ready), Some(WqState::Err));
    assert!(b.engine.modify_wq(wq, ready, WqState::Reset).is_err());
    b.engine.modify_wq(wq, err, WqState::Reset).unwrap();
    b.engine.destroy_flow(flow).unwrap();
    b.engine.destroy_qp(qp).unwrap();
    b.engine.destroy_ind_table(table).unwrap();
    b.engine.destroy_wq(wq).unwrap();
    assert_eq!(b.engine.poll_cq(b.cq, &mut [Completion::default()]).unwrap(), 0);
}
