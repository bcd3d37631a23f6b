//! Raw packet queue pairs, flow rules and receive work queues: `specs/quipu-datagram.md`, section 6, in
//! simulated time.

mod work_queues;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::pair::{Buffer, Pair, Way};
use quipu_iwarp::wire::datagram::{Datagram, MULTICAST_QPN};
use quipu_nic::*;

const GROUP: [u8; 6] = [1, 0x50, 0x56, 0x19, 0x20, 0xa7];
const EVERYBODY: [u8; 6] = [0xff; 6];
const SENDER: [u8; 6] = [0x24, 0x8a, 7, 0xa5, 0x28, 0xc8];

/// A UDP datagram from 10.9.0.`last` port 1234 to 2.2.2.2 port 5678, in a frame to `to`.
fn frame(to: [u8; 6], last: u8) -> Vec<u8> {
    let mut frame =
        [&to[..], &SENDER, &[8, 0, 0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 17, 0, 0]].concat();
    frame.extend([10, 9, 0, last, 2, 2, 2, 2, 0x04, 0xd2, 0x16, 0x2e, 0, 20, 0, 0]);
    frame.extend(b"twelve bytes");
    frame
}

fn spec(layer: FlowLayer, value: &[u8], mask: &[u8]) -> FlowSpec {
    FlowSpec::new(layer, false, value, mask).unwrap()
}

fn to_station(address: [u8; 6]) -> FlowRule {
    let specs = vec![spec(FlowLayer::Ethernet, &address, &[0xff; 6])];
    FlowRule { specs, ..FlowRule::default() }
}

/// A sender at host 0, two receivers at host 1, and their buffers.
struct Bench {
    pair: Pair,
    sender: QpId,
    receivers: [QpId; 2],
    here: Buffer,
    there: Buffer,
}

impl Bench {
    fn new() -> Self {
        let mut pair = Pair::new(Way::Stream(usize::MAX));
        let sender = raw(&mut pair, 0);
        let receivers = [raw(&mut pair, 1), raw(&mut pair, 1)];
        let (here, there) = (pair.buffer(0, 16384), pair.buffer(1, 16384));
        Self { pair, sender, receivers, here, there }
    }

    fn flow(&mut self, receiver: usize, rule: FlowRule) -> FlowId {
        self.pair.hosts[1].adapter.create_flow(self.receivers[receiver], rule).unwrap()
    }

    fn recv(&mut self, receiver: usize, wr_id: u64, len: usize) {
        let sge = self.there.sge(receiver * 8192, len);
        self.pair.recv(1, self.receivers[receiver], wr_id, &[sge]);
    }

    /// Sends a frame; how that completed.
    fn send(&mut self, frame: &[u8]) -> WcStatus {
        self.here.fill(0, frame);
        let sge = self.here.sge(0, frame.len());
        self.pair.send(0, self.sender, 1, SendOp::Send, &[sge]);
        self.pair.run();
        let completions = self.pair.hosts[0].poll();
        assert_eq!(completions.len(), 1, "{completions:?}");
        completions[0].status
    }

    /// Sends a frame that is to be taken; by whose receives it was.
    fn taken(&mut self, frame: &[u8]) -> Vec<u64> {
        assert_eq!(self.send(frame), WcStatus::Success);
        self.pair.hosts[1].poll().iter().map(|completion| completion.wr_id).collect()
    }

    fn drops(&self) -> DatagramDrops {
        self.pair.hosts[1].adapter.datagram_drops()
    }

    fn own_address(&self) -> [u8; 6] {
        station_address(self.pair.hosts[1].adapter.config().gid)
    }
}

/// A raw packet queue pair in RTS.
fn raw(pair: &mut Pair, host: usize) -> QpId {
    let qp = pair.hosts[host].qp_with(|init| init.qp_type = QpType::RawPacket);
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        to_state(pair, host, qp, state).unwrap();
    }
    qp
}

fn to_state(pair: &mut Pair, host: usize, qp: QpId, state: QpState) -> Result<(), Fault> {
    let attr = QpAttr { state, port_num: 1, ..QpAttr::default() };
    let port = if state == QpState::Init { QpAttrMask::PORT } else { QpAttrMask::empty() };
    pair.hosts[host].adapter.modify_qp(pair.now, qp, &attr, QpAttrMask::STATE | port)
}

#[test]
fn a_frame_goes_where_a_rule_says_and_nowhere_else() {
    let mut bench = Bench::new();
    bench.recv(0, 7, 100);
    bench.recv(1, 8, 100);
    let frame = frame(GROUP, 1);
    assert_eq!(bench.taken(&frame), [], "no rule, no frame: not even the network brings it here");
    let flow = bench.flow(0, to_station(GROUP));
    assert_eq!(bench.send(&frame), WcStatus::Success);
    let received = bench.pair.hosts[1].poll();
    let expected = Completion {
        wr_id: 7,
        opcode: WcOpcode::Recv,
        byte_len: frame.len() as u32,
        qp_num: bench.pair.number(1, bench.receivers[0]),
        ..Completion::default()
    };
    assert_eq!(received, [expected]);
    assert_eq!(bench.there.bytes(0, frame.len()), frame);
    assert_eq!(bench.taken(&self::frame(EVERYBODY, 1)), [], "another group");
    assert_eq!(bench.drops().no_queue_pair, 1);
    assert_eq!(bench.pair.hosts[1].adapter.destroy_flow(flow), Ok(true));
    assert!(!bench.pair.hosts[1].adapter.has_group(bench.pair.hosts[1].adapter.segment()));
    assert_eq!(bench.pair.hosts[1].adapter.destroy_flow(flow), Err(Fault::NoSuchObject));
    assert_eq!(bench.taken(&frame), []);
}

#[test]
fn frames_to_other_stations_are_not_seen() {
    let mut bench = Bench::new();
    bench.flow(0, FlowRule::default());
    bench.flow(0, FlowRule { kind: FlowKind::AllDefault, ..FlowRule::default() });
    bench.recv(0, 1, 100);
    assert_eq!(bench.taken(&frame([2, 0x51, 10, 0, 0, 99], 1)), []);
    assert_eq!(bench.drops().no_queue_pair, 1);
    let own = bench.own_address();
    assert_eq!(bench.taken(&frame(own, 1)), [1]);
}

#[test]
fn every_layer_is_compared() {
    let frame = frame(GROUP, 5);
    let ipv4 = [10, 9, 0, 5, 2, 2, 2, 2, 17, 0, 64, 2];
    let all = [0xff; 12];
    let eth = [&GROUP[..], &SENDER, &[8, 0, 0, 0]].concat();
    let cases: &[(FlowLayer, &[u8], &[u8], bool)] = &[
        (FlowLayer::Ethernet, &eth, &[0xff; 14], true),
        (FlowLayer::Ethernet, &eth, &[0xff; 16], false),
        (FlowLayer::Ethernet, &[1, 0, 0], &[1, 0, 0], true),
        (FlowLayer::Ipv4, &ipv4, &all, true),
        (FlowLayer::Ipv4, &ipv4[..8], &all[..8], true),
        (FlowLayer::Ipv4, &[10, 9, 0, 6], &[0xff; 4], false),
        (FlowLayer::Ipv4, &[10, 9, 0, 6], &[0xff, 0xff, 0xff, 0], true),
        (FlowLayer::Ipv6, &[], &[], false),
        (FlowLayer::Udp, &[0x16, 0x2e, 0x04, 0xd2], &[0xff; 4], true),
        (FlowLayer::Udp, &[0x16, 0x2e, 0x04, 0xd3], &[0xff; 4], false),
        (FlowLayer::Tcp, &[], &[], false),
        (FlowLayer::Tunnel, &[], &[], false),
    ];
    for &(layer, value, mask, matches) in cases {
        let mut bench = Bench::new();
        bench.recv(0, 1, 100);
        let specs = vec![spec(layer, value, mask)];
        bench.flow(0, FlowRule { specs, ..FlowRule::default() });
        let taken = bench.taken(&frame);
        assert_eq!(!taken.is_empty(), matches, "{layer:?} {value:?} {mask:?}");
    }
}

#[test]
fn the_frame_in_a_tunnel_has_rules_of_its_own() {
    let mut inner = frame(GROUP, 5);
    let mut outer = frame(GROUP, 1);
    outer.truncate(14 + 20);
    outer.extend([0, 1, 0x12, 0xb5, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 42, 0]);
    let whole = [&outer[..], &inner].concat();
    let rule = |id: u8, last: u8| FlowRule {
        specs: vec![
            spec(FlowLayer::Tunnel, &[0, 0, 0, id], &[0xff; 4]),
            FlowSpec::new(FlowLayer::Ipv4, true, &[10, 9, 0, last], &[0xff; 4]).unwrap(),
        ],
        ..FlowRule::default()
    };
    for (id, last, matches) in [(42, 5, true), (41, 5, false), (42, 1, false)] {
        let mut bench = Bench::new();
        bench.recv(0, 1, 200);
        bench.flow(0, rule(id, last));
        assert_eq!(!bench.taken(&whole).is_empty(), matches, "{id} {last}");
    }
    let mut bench = Bench::new();
    bench.recv(0, 1, 200);
    bench.flow(0, rule(42, 5));
    inner.truncate(13);
    assert_eq!(bench.taken(&[&outer[..], &inner].concat()), [], "no frame inside");
}

#[test]
fn rules_are_tried_by_priority() {
    let mut bench = Bench::new();
    let own = bench.own_address();
    let with = |rule: FlowRule, priority| FlowRule { priority, ..rule };
    for wr_id in [10, 11, 12, 13, 14] {
        bench.recv(0, wr_id, 100);
        bench.recv(1, wr_id + 10, 100);
    }
    bench.flow(0, with(to_station(own), 5));
    let first = bench.flow(1, with(to_station(own), 3));
    assert_eq!(bench.taken(&frame(own, 1)), [20], "the lower number");
    bench.pair.hosts[1].adapter.destroy_flow(first).unwrap();
    let passing = FlowRule { passes_on: true, ..with(to_station(own), 3) };
    let passing = bench.flow(1, passing);
    assert_eq!(bench.taken(&frame(own, 1)), [21, 10], "what is passed on goes to both");
    bench.pair.hosts[1].adapter.destroy_flow(passing).unwrap();
    let drop = bench.flow(1, FlowRule { drops: true, ..with(to_station(own), 3) });
    assert_eq!(bench.taken(&frame(own, 1)), []);
    bench.pair.hosts[1].adapter.destroy_flow(drop).unwrap();
    // To one station: the older one. To a group: every queue pair, once.
    bench.flow(1, with(to_station(own), 5));
    assert_eq!(bench.taken(&frame(own, 1)), [11]);
    for receiver in [0, 1, 1] {
        bench.flow(receiver, with(to_station(GROUP), 5));
    }
    bench.flow(0, with(to_station(GROUP), 6));
    assert_eq!(bench.taken(&frame(GROUP, 1)), [12, 22]);
}

#[test]
fn rules_count_what_they_match() {
    let mut bench = Bench::new();
    let adapter = &mut bench.pair.hosts[1].adapter;
    let counters = adapter.create_counters().unwrap();
    adapter.attach_counter(counters, CounterKind::Packets, 0).unwrap();
    adapter.attach_counter(counters, CounterKind::Bytes, 2).unwrap();
    adapter.attach_counter(counters, CounterKind::Packets, 3).unwrap();
    adapter.attach_counter(counters, CounterKind::Bytes, 3).unwrap();
    assert!(adapter.attach_counter(counters, CounterKind::Packets, MAX_COUNTERS).is_err());
    let counting = |rule: FlowRule| FlowRule { counts: Some(counters), ..rule };
    let own = bench.own_address();
    let flows = [
        bench.flow(0, counting(to_station(GROUP))),
        bench.flow(1, counting(FlowRule { drops: true, ..to_station(own) })),
    ];
    let len = frame(GROUP, 1).len() as u64;
    // Whether or not there is a receive.
    bench.recv(0, 1, 100);
    for to in [GROUP, GROUP, own, EVERYBODY] {
        bench.send(&frame(to, 1));
    }
    let adapter = &mut bench.pair.hosts[1].adapter;
    let mut values = [9; 5];
    adapter.read_counters(counters, &mut values).unwrap();
    assert_eq!(values, [3, 0, 3 * len, 3 + 3 * len, 0]);
    // They hold each other.
    assert_eq!(adapter.attach_counter(counters, CounterKind::Bytes, 1), Err(Fault::Busy));
    assert_eq!(adapter.destroy_counters(counters), Err(Fault::Busy));
    let gone = FlowRule { counts: Some(CountersId(7)), ..FlowRule::default() };
    let raw = bench.receivers[0];
    assert_eq!(adapter.create_flow(raw, gone), Err(Fault::NoSuchObject));
    let kind = FlowKind::AllDefault;
    let specs = to_station(GROUP).specs;
    let wrong = FlowRule { kind, specs, ..counting(FlowRule::default()) };
    assert!(adapter.create_flow(raw, wrong).is_err(), "and leaves no user behind");
    for flow in flows {
        adapter.destroy_flow(flow).unwrap();
    }
    adapter.destroy_counters(counters).unwrap();
    assert_eq!(adapter.destroy_counters(counters), Err(Fault::NoSuchObject));
    assert_eq!(adapter.read_counters(counters, &mut values), Err(Fault::NoSuchObject));
    assert!(adapter.attach_counter(counters, CounterKind::Bytes, 0).is_err());
    let full = adapter.create_counters().unwrap();
    for _ in 0..MAX_COUNTERS {
        adapter.attach_counter(full, CounterKind::Bytes, 0).unwrap();
    }
    assert!(adapter.attach_counter(full, CounterKind::Bytes, 0).is_err());
}

#[test]
fn defaults_take_what_is_left() {
    let mut bench = Bench::new();
    let own = bench.own_address();
    for wr_id in [10, 11, 12] {
        bench.recv(0, wr_id, 100);
        bench.recv(1, wr_id + 10, 100);
    }
    let default = |kind| FlowRule { kind, ..FlowRule::default() };
    bench.flow(0, default(FlowKind::GroupDefault));
    assert_eq!(bench.taken(&frame(own, 1)), []);
    assert_eq!(bench.taken(&frame(GROUP, 1)), [10]);
    bench.flow(1, default(FlowKind::AllDefault));
    assert_eq!(bench.taken(&frame(own, 1)), [20]);
    let rule = FlowRule { priority: u16::MAX, ..to_station(GROUP) };
    bench.flow(1, rule);
    assert_eq!(bench.taken(&frame(GROUP, 1)), [21], "a rule comes before any default");
}

#[test]
fn rules_that_make_no_sense() {
    let mut bench = Bench::new();
    let connected = bench.pair.hosts[1].qp();
    let (raw, adapter) = (bench.receivers[0], &mut bench.pair.hosts[1].adapter);
    let invalid = |outcome: Result<FlowId, Fault>| matches!(outcome, Err(Fault::Invalid(_)));
    assert!(invalid(adapter.create_flow(connected, FlowRule::default())));
    let specs = to_station(GROUP).specs;
    let kind = FlowKind::AllDefault;
    assert!(invalid(adapter.create_flow(raw, FlowRule { kind, specs, ..FlowRule::default() })));
    let specs = to_station(GROUP).specs.repeat(17);
    assert!(invalid(adapter.create_flow(raw, FlowRule { specs, ..FlowRule::default() })));
    assert!(FlowSpec::new(FlowLayer::Tcp, false, &[0; 5], &[]).is_err());
    assert!(FlowSpec::new(FlowLayer::Ethernet, false, &[], &[0; 17]).is_err());
    assert_eq!(adapter.create_flow(QpId::NONE, FlowRule::default()), Err(Fault::NoSuchObject));
    let segment = adapter.segment();
    assert!(!adapter.has_group(segment), "none of them left a trace");
    for _ in 0..MAX_FLOWS {
        adapter.create_flow(raw, FlowRule::default()).unwrap();
    }
    let full = adapter.create_flow(raw, FlowRule::default());
    assert_eq!(full, Err(Fault::Exhausted("flow rules")));
    assert_eq!(adapter.destroy_qp(Time(0), raw), Err(Fault::Busy));
}

#[test]
fn frames_of_every_length_that_there_is() {
    let mut bench = Bench::new();
    bench.flow(0, FlowRule::default());
    for len in [14, 15, 1522, 4096] {
        bench.recv(0, 1, 4096);
        let mut frame = vec![0x11; len];
        frame[..6].copy_from_slice(&EVERYBODY);
        assert_eq!(bench.send(&frame), WcStatus::Success);
        assert_eq!(bench.pair.hosts[1].poll()[0].byte_len as usize, len);
        assert_eq!(bench.there.bytes(0, len), frame);
    }
    for len in [0, 13, 4097] {
        let mut bench = Bench::new();
        assert_eq!(bench.send(&vec![0xff; len]), WcStatus::LocLenErr, "{len}");
        let info = bench.pair.hosts[0].adapter.query_qp(bench.sender).unwrap();
        assert_eq!(info.attr.state, QpState::Sqe);
        to_state(&mut bench.pair, 0, bench.sender, QpState::Rts).unwrap();
        assert_eq!(bench.send(&frame(GROUP, 1)), WcStatus::Success);
    }
}

#[test]
fn what_does_not_fit_is_dropped_and_the_receive_stays() {
    let mut bench = Bench::new();
    bench.flow(0, to_station(GROUP));
    let long = frame(GROUP, 1);
    assert_eq!(bench.taken(&long), []);
    bench.recv(0, 3, long.len() - 1);
    assert_eq!(bench.taken(&long), []);
    assert_eq!(bench.drops().no_receive, 2);
    let short = &long[..long.len() - 1];
    assert_eq!(bench.taken(short), [3]);
    // A receive into memory that is not there any more fails, and the queue pair with it.
    let key = bench.there.region.id;
    bench.recv(0, 4, 100);
    bench.pair.hosts[1].adapter.dereg_mr(bench.pair.now, key).unwrap();
    assert_eq!(bench.send(&long), WcStatus::Success);
    let failed = bench.pair.hosts[1].poll();
    assert_eq!((failed[0].wr_id, failed[0].status), (4, WcStatus::LocProtErr));
    let info = bench.pair.hosts[1].adapter.query_qp(bench.receivers[0]).unwrap();
    assert_eq!(info.attr.state, QpState::Err);
    assert_eq!(bench.taken(&long), []);
    assert_eq!(bench.drops().no_queue_pair, 1);
}

#[test]
fn strangers_get_nowhere() {
    let mut bench = Bench::new();
    bench.flow(0, FlowRule::default());
    bench.recv(0, 1, 4096);
    let datagrams = bench.pair.datagram_qp(1);
    let address = bench.pair.hosts[1].address;
    let own = bench.pair.number(1, bench.receivers[0]).0;
    let segment = bench.pair.hosts[1].adapter.segment();
    let deliver = |bench: &mut Bench, to: IpAddr, header: Datagram, message: &[u8]| {
        let from = SocketAddr::from((Ipv4Addr::new(10, 0, 0, 66), 77));
        let arrival = Arrival { from, to, traffic_class: 0, hop_limit: 1 };
        let bytes = [&header.to_bytes()[..], message].concat();
        bench.pair.hosts[1].adapter.handle_datagram(Time(1), &arrival, &bytes);
        bench.pair.hosts[1].poll().len()
    };
    let source_qpn = QpNum::new(77, 1).0;
    let good = Datagram { dest_qpn: MULTICAST_QPN, source_qpn, frame: true, ..Datagram::default() };
    let frame = frame(EVERYBODY, 1);
    // Not to the group: to this host alone, to the queue pair itself, or to another group.
    let host = IpAddr::V4(address);
    assert_eq!(deliver(&mut bench, host, good, &frame), 0);
    assert_eq!(deliver(&mut bench, host, Datagram { dest_qpn: own, ..good }, &frame), 0);
    assert_eq!(deliver(&mut bench, IpAddr::from([239, 1, 2, 3]), good, &frame), 0);
    // Not from the port that it says; no frame; a message of datagrams to a raw packet queue pair.
    let other = Datagram { source_qpn: QpNum::new(78, 1).0, ..good };
    assert_eq!(deliver(&mut bench, segment, other, &frame), 0);
    assert_eq!(deliver(&mut bench, segment, good, &frame[..13]), 0);
    assert_eq!(bench.drops().malformed, 5);
    let message = Datagram { frame: false, ..good };
    assert_eq!(deliver(&mut bench, host, Datagram { dest_qpn: own, ..message }, &frame), 0);
    assert_eq!(deliver(&mut bench, segment, message, &frame), 0);
    // A frame to a queue pair of datagrams that is attached to the segment's group.
    let adapter = &mut bench.pair.hosts[1].adapter;
    adapter.attach_multicast(datagrams, Gid::from(segment)).unwrap();
    assert_eq!(bench.drops().no_queue_pair, 2);
    assert_eq!(deliver(&mut bench, segment, good, &frame), 1, "the raw packet queue pair");
}

#[test]
fn a_raw_packet_queue_pair_sends_frames_to_nobody_in_particular() {
    let mut bench = Bench::new();
    let ah = bench.pair.ah(0);
    let sge = [bench.here.sge(0, 60)];
    let adapter = &mut bench.pair.hosts[0].adapter;
    let post = |adapter: &mut Adapter, op, to| {
        let flags = SendFlags::SIGNALED;
        adapter.post_send(
            bench.sender,
            &SendWr { wr_id: 1, to, op, flags, payload: Payload::Sges(&sge) },
        )
    };
    let somebody = To::Datagram { ah, qpn: 1, qkey: 1 };
    assert!(matches!(post(adapter, SendOp::Send, somebody), Err(Fault::Invalid(_))));
    assert!(matches!(post(adapter, SendOp::SendImm(1), To::Peer), Err(Fault::Invalid(_))));
    let write = SendOp::Write { addr: 0, rkey: 0 };
    assert!(matches!(post(adapter, write, To::Peer), Err(Fault::Invalid(_))));
    let group = Gid::from(IpAddr::from([239, 1, 2, 3]));
    assert!(adapter.attach_multicast(bench.sender, group).is_err());
    // The group of the segment is its own by its rules, and by them alone.
    let (flow, segment) =
        (adapter.create_flow(bench.sender, FlowRule::default()).unwrap(), adapter.segment());
    assert!(adapter.detach_multicast(bench.sender, Gid::from(segment)).is_err());
    assert_eq!(adapter.destroy_flow(flow), Ok(true));
    assert!(post(adapter, SendOp::Send, To::Peer).is_ok());
}
