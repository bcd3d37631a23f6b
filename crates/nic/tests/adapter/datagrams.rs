//! Datagram queue pairs: every rule of `specs/quipu-datagram.md`, in simulated time.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::pair::{Buffer, Pair, QKEY, Way};
use quipu_iwarp::wire::datagram::{self, Datagram};
use quipu_nic::*;

/// Bytes of route header in front of each message.
const GRH: usize = 40;

/// A datagram queue pair and a buffer at each host, and host 0's address of host 1.
struct Bench {
    pair: Pair,
    qps: [QpId; 2],
    here: Buffer,
    there: Buffer,
    to: To,
}

impl Bench {
    fn new() -> Self {
        let mut pair = Pair::new(Way::Stream(usize::MAX));
        let qps = [pair.datagram_qp(0), pair.datagram_qp(1)];
        let (here, there) = (pair.buffer(0, 16384), pair.buffer(1, 16384));
        let to = To::Datagram { ah: pair.ah(0), qpn: pair.number(1, qps[1]).0, qkey: QKEY };
        Self { pair, qps, here, there, to }
    }

    /// Posts a receive for messages of up to `len` bytes at `offset` of the buffer of host 1.
    fn recv(&mut self, wr_id: u64, offset: usize, len: usize) {
        let sge = self.there.sge(offset, GRH + len);
        self.pair.recv(1, self.qps[1], wr_id, &[sge]);
    }

    fn post(&mut self, wr_id: u64, op: SendOp, len: usize) -> Result<(), Fault> {
        let sges = [self.here.sge(0, len)];
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id, to: self.to, op, flags, payload: Payload::Sges(&sges) };
        self.pair.send_datagram(0, self.qps[0], &wr)
    }

    /// Posts a send of host 0, lets it travel, and says how it completed.
    fn send(&mut self, wr_id: u64, op: SendOp, len: usize) -> WcStatus {
        self.post(wr_id, op, len).unwrap();
        self.pair.run();
        let completions = self.pair.hosts[0].poll();
        assert_eq!(completions.len(), 1, "{completions:?}");
        assert_eq!(completions[0].wr_id, wr_id);
        completions[0].status
    }

    /// What host 1 received.
    fn received(&mut self) -> Vec<Completion> {
        self.pair.hosts[1].poll()
    }

    fn drops(&self) -> DatagramDrops {
        self.pair.hosts[1].adapter.datagram_drops()
    }

    fn state(&self, host: usize) -> QpState {
        self.pair.hosts[host].adapter.query_qp(self.qps[host]).unwrap().attr.state
    }
}

#[test]
fn a_message_arrives_behind_its_route_header() {
    let mut bench = Bench::new();
    bench.here.fill(0, b"a datagram");
    bench.recv(7, 0, 100);
    assert_eq!(bench.send(1, SendOp::SendImm(0xabcd), 10), WcStatus::Success);
    let received = bench.received();
    let source = bench.pair.number(0, bench.qps[0]);
    let expected = Completion {
        wr_id: 7,
        status: WcStatus::Success,
        opcode: WcOpcode::Recv,
        extra: WcExtra::Imm(0xabcd),
        byte_len: 50,
        qp_num: bench.pair.number(1, bench.qps[1]),
        src_qp: source,
        grh: true,
        sl: 10,
        slid: 0,
    };
    assert_eq!(received, [expected]);
    assert_eq!(bench.there.bytes(GRH, 10), b"a datagram");
    let grh = bench.there.bytes(0, GRH);
    assert_eq!(grh[..20], [0; 20]);
    assert_eq!((grh[20], grh[28], grh[29]), (0x45, 64, 17));
    assert_eq!(grh[32..], [10, 0, 0, 1, 10, 0, 0, 2]);
    assert_eq!(grh[22..24], (20 + 8 + 20 + 10_u16).to_be_bytes());
}

#[test]
fn messages_of_every_length_up_to_the_mtu_and_no_longer() {
    let mut bench = Bench::new();
    for len in [0, 1, 4095, 4096] {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
        bench.here.fill(0, &bytes);
        bench.recv(1, 0, 4096);
        assert_eq!(bench.send(1, SendOp::Send, len), WcStatus::Success);
        let received = bench.received();
        assert_eq!(received.len(), 1);
        assert_eq!(received[0].byte_len as usize, GRH + len);
        assert_eq!(bench.there.bytes(GRH, len), bytes);
    }
    // C10-93.1.1: not sent, and no error.
    bench.recv(1, 0, 8192);
    assert_eq!(bench.send(1, SendOp::Send, 4097), WcStatus::Success);
    assert_eq!((bench.received().len(), bench.state(0)), (0, QpState::Rts));
    assert_eq!(bench.drops(), DatagramDrops::default(), "nothing was on its way");
}

#[test]
fn inline_payload_and_scattered_receives() {
    let mut bench = Bench::new();
    let lists: Vec<_> = [(0, 13), (100, 30), (200, 500)]
        .iter()
        .map(|&(offset, len)| bench.there.sge(offset, len))
        .collect();
    bench.pair.recv(1, bench.qps[1], 3, &lists);
    let wr = SendWr {
        wr_id: 1,
        to: bench.to,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED | SendFlags::SOLICITED,
        payload: Payload::Inline(b"inline"),
    };
    let cq = bench.pair.hosts[1].cq;
    bench.pair.hosts[1].adapter.req_notify_cq(bench.pair.now, cq, true).unwrap();
    bench.pair.send_datagram(0, bench.qps[0], &wr).unwrap();
    bench.pair.run();
    assert_eq!(bench.received()[0].byte_len, 46);
    assert_eq!(bench.there.bytes(127, 3), b"inl");
    assert_eq!(bench.there.bytes(200, 3), b"ine");
    assert_eq!(bench.pair.hosts[1].events.len(), 1, "the solicited event");
}

#[test]
fn what_meets_no_receive_is_dropped_and_nobody_is_told() {
    let mut bench = Bench::new();
    assert_eq!(bench.send(1, SendOp::Send, 10), WcStatus::Success);
    assert_eq!(bench.drops().no_receive, 1);
    // Too small: it stays posted, for one that fits.
    bench.recv(5, 0, 9);
    assert_eq!(bench.send(2, SendOp::Send, 10), WcStatus::Success);
    assert_eq!((bench.drops().no_receive, bench.received().len()), (2, 0));
    assert_eq!(bench.send(3, SendOp::Send, 9), WcStatus::Success);
    assert_eq!(bench.received()[0].wr_id, 5);
    assert_eq!((bench.state(0), bench.state(1)), (QpState::Rts, QpState::Rts));
}

#[test]
fn a_wrong_qkey_is_dropped_and_counted() {
    let mut bench = Bench::new();
    bench.recv(5, 0, 100);
    let To::Datagram { ah, qpn, .. } = bench.to else { unreachable!() };
    bench.to = To::Datagram { ah, qpn, qkey: QKEY ^ 1 };
    assert_eq!(bench.send(1, SendOp::Send, 10), WcStatus::Success);
    assert_eq!((bench.drops().qkey_violation, bench.received().len()), (1, 0));
    // The uppermost bit stands for the own Q_Key.
    bench.to = To::Datagram { ah, qpn, qkey: 0x8000_0000 };
    assert_eq!(bench.send(2, SendOp::Send, 10), WcStatus::Success);
    assert_eq!(bench.received()[0].wr_id, 5);
}

#[test]
fn unknown_and_unready_queue_pairs_get_nothing() {
    let mut bench = Bench::new();
    let To::Datagram { ah, qpn, .. } = bench.to else { unreachable!() };
    bench.to = To::Datagram { ah, qpn: qpn + 77, qkey: QKEY };
    bench.send(1, SendOp::Send, 10);
    assert_eq!(bench.drops().no_queue_pair, 1);
    // One of another kind.
    let other = bench.pair.hosts[1].qp();
    bench.to = To::Datagram { ah, qpn: bench.pair.number(1, other).0, qkey: 0 };
    bench.send(2, SendOp::Send, 10);
    assert_eq!(bench.drops().no_queue_pair, 2);
    let unready = bench.pair.hosts[1].qp_with(|init| init.qp_type = QpType::Ud);
    bench.to = To::Datagram { ah, qpn: bench.pair.number(1, unready).0, qkey: QKEY };
    bench.pair.advance(1, unready, QpState::Init);
    let sge = bench.there.sge(0, 100);
    bench.pair.recv(1, unready, 9, &[sge]);
    bench.send(3, SendOp::Send, 10);
    assert_eq!((bench.drops().no_queue_pair, bench.received().len()), (3, 0));
    bench.pair.advance(1, unready, QpState::Rtr);
    bench.send(4, SendOp::Send, 10);
    assert_eq!(bench.received()[0].wr_id, 9);
}

#[test]
fn only_whole_and_genuine_datagrams_are_taken() {
    let mut bench = Bench::new();
    bench.recv(5, 0, 100);
    bench.pair.hold = true;
    bench.send(1, SendOp::Send, 10);
    let (_, arrival, bytes) = bench.pair.flying.pop_front().unwrap();
    let now = bench.pair.now;
    let adapter = &mut bench.pair.hosts[1].adapter;
    for len in 0..datagram::LEN {
        adapter.handle_datagram(now, &arrival, &bytes[..len]);
    }
    for at in 0..4 {
        let mut bad = bytes.clone();
        bad[at] ^= 0x80;
        adapter.handle_datagram(now, &arrival, &bad);
    }
    // From another port than the one that its source has.
    let mut from = arrival.from;
    from.set_port(from.port() + 1);
    adapter.handle_datagram(now, &Arrival { from, ..arrival }, &bytes);
    // To a group, and yet for one queue pair: it came by another port than that one's.
    let to = IpAddr::V4(GROUP);
    adapter.handle_datagram(now, &Arrival { to, ..arrival }, &bytes);
    assert_eq!(adapter.datagram_drops().malformed, datagram::LEN as u64 + 6);
    assert_eq!(bench.received().len(), 0);
    bench.pair.hosts[1].adapter.handle_datagram(now, &arrival, &bytes);
    assert_eq!(bench.received().len(), 1);
}

#[test]
fn nothing_else_can_be_posted() {
    let mut bench = Bench::new();
    let (addr, rkey) = (bench.there.addr(), bench.there.key());
    for op in [
        SendOp::SendInv(rkey),
        SendOp::Write { addr, rkey },
        SendOp::WriteImm { addr, rkey, imm: 1 },
        SendOp::Read { addr, rkey },
        SendOp::FetchAdd { addr, rkey, add: 1 },
        SendOp::LocalInv { key: rkey },
    ] {
        assert!(matches!(bench.post(1, op, 8), Err(Fault::Invalid(_))), "{op:?}");
    }
    let To::Datagram { qpn, qkey, .. } = bench.to else { unreachable!() };
    bench.to = To::Peer;
    assert!(matches!(bench.post(1, SendOp::Send, 8), Err(Fault::Invalid(_))));
    bench.to = To::Datagram { ah: AhId(99), qpn, qkey };
    assert!(matches!(bench.post(1, SendOp::Send, 8), Err(Fault::Invalid(_))));
    // Address handles belong to protection domains.
    let host = &mut bench.pair.hosts[0];
    let pd = host.adapter.alloc_pd().unwrap();
    let dgid = host.adapter.config().gid;
    let av = AddressVector { dgid, is_global: true, port_num: 1, ..AddressVector::default() };
    let stranger = host.adapter.create_ah(pd, &av).unwrap();
    bench.to = To::Datagram { ah: stranger, qpn, qkey };
    assert!(matches!(bench.post(1, SendOp::Send, 8), Err(Fault::Invalid(_))));
    // And connected queue pairs send none.
    let mut qps = [bench.pair.hosts[0].qp(), bench.pair.hosts[1].qp()];
    bench.pair.connect(qps);
    std::mem::swap(&mut bench.qps, &mut qps);
    bench.to = To::Datagram { ah: bench.pair.ah(0), qpn, qkey };
    assert!(matches!(bench.post(1, SendOp::Send, 8), Err(Fault::Invalid(_))));
}

#[test]
fn address_handles_are_checked_counted_and_not_needed_once_posted() {
    let mut bench = Bench::new();
    let host = &mut bench.pair.hosts[0];
    let pd = host.adapter.alloc_pd().unwrap();
    let good = AddressVector {
        dgid: Gid::from(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2))),
        is_global: true,
        port_num: 1,
        ..AddressVector::default()
    };
    let to = |ip: &str| AddressVector { dgid: Gid::from(ip.parse::<IpAddr>().unwrap()), ..good };
    let bad = [AddressVector { port_num: 2, ..good }, AddressVector { sgid_index: 4, ..good }];
    // Nothing can be sent from an address of IPv4 to one of IPv6, but groups are known by both.
    for bad in bad.into_iter().chain([to("fe80::1"), to("::")]) {
        assert!(matches!(host.adapter.create_ah(pd, &bad), Err(Fault::Invalid(_))));
    }
    let group = host.adapter.create_ah(pd, &to("ff02::77")).unwrap();
    host.adapter.destroy_ah(group).unwrap();
    let ah = host.adapter.create_ah(pd, &good).unwrap();
    assert_eq!(host.adapter.query_ah(ah), Ok(good));
    assert_eq!(host.adapter.dealloc_pd(pd), Err(Fault::Busy));
    host.adapter.destroy_ah(ah).unwrap();
    assert_eq!(host.adapter.destroy_ah(ah), Err(Fault::NoSuchObject));
    assert_eq!(host.adapter.dealloc_pd(pd), Ok(()));
    // Generations of 16 bits wrap around without giving a handle twice in a row.
    let mut last = AhId(0);
    let pd = host.pd;
    for _ in 0..70_000 {
        let ah = host.adapter.create_ah(pd, &good).unwrap();
        assert_ne!(ah, last);
        assert_ne!(ah.0, 0);
        host.adapter.destroy_ah(ah).unwrap();
        last = ah;
    }
    bench.recv(5, 0, 10);
    let sges = [bench.here.sge(0, 10)];
    let (to, flags) = (bench.to, SendFlags::SIGNALED);
    let wr = SendWr { wr_id: 1, to, op: SendOp::Send, flags, payload: Payload::Sges(&sges) };
    let To::Datagram { ah, .. } = to else { unreachable!() };
    let adapter = &mut bench.pair.hosts[0].adapter;
    adapter.post_send(bench.qps[0], &wr).unwrap();
    adapter.destroy_ah(ah).unwrap();
    adapter.ring_doorbell(bench.pair.now, bench.qps[0]);
    bench.pair.run();
    assert_eq!(bench.received().len(), 1);
}

#[test]
fn a_fault_of_the_sender_stops_its_send_queue_alone() {
    let mut bench = Bench::new();
    let back = To::Datagram {
        ah: bench.pair.ah(1),
        qpn: bench.pair.number(0, bench.qps[0]).0,
        qkey: QKEY,
    };
    let mut bad = bench.here.sge(0, 10);
    bad.lkey = Key(bad.lkey.0 ^ 1);
    let good = bench.here.sge(0, 10);
    let flags = SendFlags::SIGNALED;
    let (op, to) = (SendOp::Send, bench.to);
    for (wr_id, sge) in [(1, good), (2, bad), (3, good)] {
        let wr = SendWr { wr_id, to, op, flags, payload: Payload::Sges(&[sge]) };
        bench.pair.hosts[0].adapter.post_send(bench.qps[0], &wr).unwrap();
    }
    bench.pair.hosts[0].adapter.ring_doorbell(bench.pair.now, bench.qps[0]);
    bench.pair.run();
    let statuses = |completions: Vec<Completion>| -> Vec<(u64, WcStatus)> {
        completions.iter().map(|c| (c.wr_id, c.status)).collect()
    };
    let expected = [(1, WcStatus::Success), (2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)];
    assert_eq!(statuses(bench.pair.hosts[0].poll()), expected);
    assert_eq!(bench.state(0), QpState::Sqe);
    // What is posted now is flushed; what comes is received.
    assert_eq!(bench.send(4, SendOp::Send, 10), WcStatus::WrFlushErr);
    let sge = bench.here.sge(100, 100);
    bench.pair.recv(0, bench.qps[0], 9, &[sge]);
    let payload = Payload::Inline(b"still there");
    let wr = SendWr { wr_id: 1, to: back, op, flags, payload };
    bench.pair.send_datagram(1, bench.qps[1], &wr).unwrap();
    bench.pair.run();
    assert_eq!(statuses(bench.pair.hosts[0].poll()), [(9, WcStatus::Success)]);
    // And it recovers.
    let attr = QpAttr { state: QpState::Rts, cur_state: QpState::Sqe, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::CUR_STATE;
    bench.pair.hosts[0].adapter.modify_qp(bench.pair.now, bench.qps[0], &attr, mask).unwrap();
    assert_eq!(bench.send(5, SendOp::Send, 10), WcStatus::Success);
}

#[test]
fn a_fault_of_the_receiver_is_its_own() {
    let mut bench = Bench::new();
    let mut bad = bench.there.sge(60, 100);
    bad.lkey = Key(bad.lkey.0 ^ 1);
    bench.there.fill(0, &[0xee; 60]);
    let good = bench.there.sge(0, 60);
    bench.pair.recv(1, bench.qps[1], 5, &[good, bad]);
    assert_eq!(bench.send(1, SendOp::Send, 100), WcStatus::Success);
    let received = bench.received();
    assert_eq!((received.len(), received[0].status), (1, WcStatus::LocProtErr));
    assert_eq!(bench.state(1), QpState::Err);
    assert_eq!(bench.there.bytes(0, 60), [0xee; 60], "nothing was placed in part");
    assert_eq!(bench.send(2, SendOp::Send, 100), WcStatus::Success);
}

#[test]
fn a_full_socket_makes_sends_wait() {
    let mut bench = Bench::new();
    for wr_id in 0..5 {
        bench.recv(wr_id, 200 * wr_id as usize, 100);
    }
    bench.pair.full[0] = true;
    for wr_id in 0..5 {
        bench.post(wr_id, SendOp::SendImm(wr_id as u32), 10).unwrap();
    }
    bench.pair.run();
    assert_eq!((bench.pair.hosts[0].poll().len(), bench.pair.flying.len()), (0, 0));
    bench.pair.full[0] = false;
    let port = bench.pair.number(0, bench.qps[0]).port();
    let numbers = QpNum::new(port, 0)..=QpNum::new(port, 255);
    bench.pair.hosts[0].adapter.resume_datagrams(numbers);
    assert!(bench.pair.hosts[0].adapter.has_output());
    bench.pair.run();
    assert_eq!(bench.pair.hosts[0].poll().len(), 5);
    let order: Vec<WcExtra> = bench.received().iter().map(|c| c.extra).collect();
    assert_eq!(order, (0..5).map(WcExtra::Imm).collect::<Vec<_>>());
}

#[test]
fn many_senders_take_turns_into_one_shared_receive_queue() {
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    let (pd, there) = (pair.hosts[1].pd, pair.buffer(1, 8192));
    let srq = pair.hosts[1].adapter.create_srq(pd, 64, 1, 0).unwrap();
    let receiver = pair.datagram_qp_with(1, |init| init.srq = Some(srq));
    for wr_id in 0..12 {
        let sge = there.sge(100 * wr_id as usize, 60);
        pair.hosts[1].adapter.post_srq_recv(pair.now, srq, wr_id, &[sge]).unwrap();
    }
    let to = To::Datagram { ah: pair.ah(0), qpn: pair.number(1, receiver).0, qkey: QKEY };
    let senders: Vec<QpId> = (0..3).map(|_| pair.datagram_qp(0)).collect();
    pair.full[0] = true;
    for round in 0..4 {
        for (index, &qp) in senders.iter().enumerate() {
            let payload = Payload::Inline(b"one of many");
            let op = SendOp::SendImm(round * 10 + index as u32);
            let wr = SendWr { wr_id: 0, to, op, flags: SendFlags::empty(), payload };
            pair.send_datagram(0, qp, &wr).unwrap();
        }
    }
    // One at a time, as if each turn were that short.
    let mut out = [0; MAX_DATAGRAM];
    let mut order = Vec::new();
    while let Some((id, _)) = pair.hosts[0].adapter.next_datagrams() {
        let adapter = &mut pair.hosts[0].adapter;
        let Some(departure) = adapter.transmit_datagram(pair.now, id, &mut out) else {
            continue;
        };
        let header = Datagram::parse(&out[..departure.len]).unwrap();
        order.push(header.imm.unwrap());
        adapter.resume_sender(id);
        let from = SocketAddr::new(IpAddr::V4(pair.hosts[0].address), departure.from.port());
        let arrival = Arrival { from, to: departure.to.ip(), traffic_class: 0, hop_limit: 1 };
        pair.hosts[1].adapter.handle_datagram(pair.now, &arrival, &out[..departure.len]);
    }
    assert_eq!(order, [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]);
    let received = pair.hosts[1].poll();
    let imms: Vec<WcExtra> = received.iter().map(|c| c.extra).collect();
    assert_eq!(imms, order.into_iter().map(WcExtra::Imm).collect::<Vec<_>>());
    assert!(received.iter().all(|c| c.byte_len == 51));
}

#[test]
fn resetting_and_destroying_forget_what_waits() {
    let mut bench = Bench::new();
    bench.pair.full[0] = true;
    for wr_id in 0..3 {
        bench.post(wr_id, SendOp::Send, 10).unwrap();
    }
    for state in [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts] {
        bench.pair.advance(0, bench.qps[0], state);
    }
    bench.pair.full[0] = false;
    bench.recv(5, 0, 10);
    assert_eq!(bench.send(9, SendOp::Send, 10), WcStatus::Success);
    assert_eq!(bench.received().len(), 1);
    bench.pair.full[0] = true;
    bench.post(1, SendOp::Send, 10).unwrap();
    let (now, adapter) = (bench.pair.now, &mut bench.pair.hosts[0].adapter);
    adapter.destroy_qp(now, bench.qps[0]).unwrap();
    assert_eq!(adapter.next_datagrams(), None);
    assert!(bench.pair.hosts[0].poll().is_empty());
}

#[test]
fn draining_and_errors_are_as_with_connections() {
    let mut bench = Bench::new();
    let attr = QpAttr { state: QpState::Sqd, en_sqd_async_notify: true, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
    let (now, qp) = (bench.pair.now, bench.qps[0]);
    bench.pair.hosts[0].adapter.modify_qp(now, qp, &attr, mask).unwrap();
    bench.post(1, SendOp::Send, 10).unwrap();
    bench.pair.run();
    assert_eq!(bench.pair.hosts[0].events, [Event::Async(AsyncEvent::SqDrained(qp))]);
    assert!(bench.pair.hosts[0].poll().is_empty(), "nothing begins in SQD");
    let attr = QpAttr { state: QpState::Err, ..attr };
    bench.pair.hosts[0].adapter.modify_qp(now, qp, &attr, QpAttrMask::STATE).unwrap();
    let flushed = bench.pair.hosts[0].poll();
    assert_eq!((flushed.len(), flushed[0].status), (1, WcStatus::WrFlushErr));
    assert_eq!(bench.send(2, SendOp::Send, 10), WcStatus::WrFlushErr);
}

#[test]
fn the_route_header_of_ipv6_is_the_packets_own() {
    let mut bench = Bench::new();
    bench.recv(5, 0, 100);
    bench.pair.hold = true;
    bench.send(1, SendOp::Send, 10);
    let (_, arrival, bytes) = bench.pair.flying.pop_front().unwrap();
    let address = |last| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last);
    let arrival = Arrival {
        from: SocketAddr::new(address(1).into(), arrival.from.port()),
        to: address(2).into(),
        traffic_class: 0x2e,
        hop_limit: 3,
    };
    bench.pair.hosts[1].adapter.handle_datagram(bench.pair.now, &arrival, &bytes);
    assert_eq!(bench.received().len(), 1);
    let grh = bench.there.bytes(0, GRH);
    assert_eq!(grh[..8], [0x62, 0xe0, 0, 0, 0, 38, 17, 3]);
    assert_eq!((&grh[8..24], &grh[24..]), (&address(1).octets()[..], &address(2).octets()[..]));
}

#[test]
fn the_traffic_class_and_hop_limit_are_those_of_the_address() {
    let mut bench = Bench::new();
    let dgid = Gid::from(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)));
    let ah = bench.pair.ah_with(0, dgid, |av| (av.traffic_class, av.hop_limit) = (0x68, 9));
    let To::Datagram { qpn, qkey, .. } = bench.to else { unreachable!() };
    bench.to = To::Datagram { ah, qpn, qkey };
    bench.pair.full[0] = true;
    bench.post(1, SendOp::Send, 0).unwrap();
    let mut out = [0; MAX_DATAGRAM];
    let adapter = &mut bench.pair.hosts[0].adapter;
    let (id, number) = adapter.next_datagrams().unwrap();
    let departure = adapter.transmit_datagram(bench.pair.now, id, &mut out).unwrap();
    let expected = Departure {
        sgid_index: 0,
        from: number,
        to: SocketAddr::new(Ipv4Addr::new(10, 0, 0, 2).into(), QpNum(qpn).port()),
        traffic_class: 0x68,
        service_level: 3,
        hop_limit: 9,
        len: datagram::LEN,
    };
    assert_eq!(departure, expected);
    assert_eq!(adapter.transmit_datagram(bench.pair.now, id, &mut out), None);
}

/// A group, and what host 0 sends to it.
const GROUP: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);

#[test]
fn a_message_to_a_group_reaches_all_who_are_attached() {
    let mut bench = Bench::new();
    let others: Vec<QpId> = (0..3).map(|_| bench.pair.datagram_qp(1)).collect();
    let group = IpAddr::V4(GROUP);
    let mgid = Gid::from(group);
    for &qp in &others[..2] {
        bench.pair.hosts[1].adapter.attach_multicast(qp, mgid).unwrap();
        bench.pair.hosts[1].adapter.attach_multicast(qp, mgid).unwrap();
    }
    for (wr_id, &qp) in others.iter().enumerate() {
        for twice in 0..2 {
            let sge = bench.there.sge(1000 * wr_id + 500 * twice, 200);
            bench.pair.recv(1, qp, wr_id as u64, &[sge]);
        }
    }
    let ah = bench.pair.ah_with(0, mgid, |av| av.hop_limit = 3);
    bench.to = To::Datagram { ah, qpn: 0x00ff_ffff, qkey: QKEY };
    bench.here.fill(0, b"to all");
    bench.pair.full[0] = true;
    bench.post(1, SendOp::Send, 6).unwrap();
    let mut out = [0; MAX_DATAGRAM];
    let host = &mut bench.pair.hosts[0];
    let (id, number) = host.adapter.next_datagrams().unwrap();
    let departure = host.adapter.transmit_datagram(bench.pair.now, id, &mut out).unwrap();
    let port = host.adapter.config().multicast_port;
    assert_eq!((departure.to, departure.hop_limit), (SocketAddr::new(group, port), 3));
    let from = SocketAddr::new(IpAddr::V4(host.address), number.port());
    let arrival = Arrival { from, to: group, traffic_class: 0, hop_limit: 3 };
    let (now, there) = (bench.pair.now, &mut bench.pair.hosts[1].adapter);
    there.handle_datagram(now, &arrival, &out[..departure.len]);
    let mut received: Vec<u64> = bench.received().iter().map(|c| c.wr_id).collect();
    received.sort_unstable();
    assert_eq!(received, [0, 1]);
    assert_eq!(bench.there.bytes(GRH + 1000, 6), b"to all");
    assert_eq!(bench.there.bytes(36, 4), GROUP.octets(), "the destination is the group");
    // A group that nobody is in, and one address with the number of a group.
    let there = &mut bench.pair.hosts[1].adapter;
    let strange = Ipv4Addr::new(239, 1, 2, 4).into();
    there.handle_datagram(now, &Arrival { to: strange, ..arrival }, &out[..departure.len]);
    let single = Ipv4Addr::new(10, 0, 0, 2).into();
    there.handle_datagram(now, &Arrival { to: single, ..arrival }, &out[..departure.len]);
    assert_eq!((there.datagram_drops().no_queue_pair, bench.received().len()), (2, 0));
    // Those who left get nothing, and only they may go.
    let there = &mut bench.pair.hosts[1].adapter;
    assert_eq!(there.destroy_qp(now, others[0]), Err(Fault::Busy));
    assert_eq!(there.detach_multicast(others[0], mgid), Ok(false));
    assert!(there.detach_multicast(others[0], mgid).is_err());
    assert_eq!(there.destroy_qp(now, others[0]), Ok(()));
    there.handle_datagram(now, &arrival, &out[..departure.len]);
    assert_eq!(bench.received().iter().map(|c| c.wr_id).collect::<Vec<_>>(), [1]);
    let there = &mut bench.pair.hosts[1].adapter;
    assert_eq!(there.groups_of(others[1]), [mgid]);
    assert_eq!(there.detach_multicast(others[1], mgid), Ok(true));
    assert!(!there.has_group(group));
}

#[test]
fn groups_are_for_datagrams_and_limited() {
    let mut pair = Pair::new(Way::Stream(usize::MAX));
    let connected = pair.hosts[0].qp();
    let datagrams = pair.datagram_qp(0);
    let adapter = &mut pair.hosts[0].adapter;
    let group = |number: u32| Gid::from(IpAddr::from((0xef00_0000 + number).to_be_bytes()));
    assert!(matches!(adapter.attach_multicast(connected, group(0)), Err(Fault::Invalid(_))));
    let limit = adapter.config().max_multicast_groups;
    for number in 0..limit {
        adapter.attach_multicast(datagrams, group(number)).unwrap();
    }
    let refused = adapter.attach_multicast(datagrams, group(limit));
    assert!(matches!(refused, Err(Fault::Exhausted(_))));
    assert!(adapter.group_of(Gid::from(IpAddr::from([10, 0, 0, 2]))).is_err());
}
