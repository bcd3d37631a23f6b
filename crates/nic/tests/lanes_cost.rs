//! What quality of service costs each packet.
//!
//! `cargo test --release -p quipu-nic --test lanes_cost -- --ignored --nocapture` prints nanoseconds.
//! [`the_load_for_a_count_of_instructions`] is for `callgrind`.

use std::net::IpAddr;
use std::time::Instant;

use quipu_nic::qos::{Arbiter, Config as Qos, Entry};
use quipu_nic::*;

const QKEY: u32 = 7;
const LANES: u8 = 15;
const MESSAGE: usize = 200;
/// Octets of a packet with its headers.
const PACKET: u64 = 226;
/// Packets that a tick of the port's clock grants.
const EACH_TICK: u64 = 20;
const TICK_NS: u64 = 16_000;

/// Datagram queue pairs of all lanes, each of which always has two messages waiting.
struct Many {
    adapter: Adapter,
    qps: Vec<QpId>,
    ahs: Vec<AhId>,
    first: u32,
    now: u64,
    /// Sent by each lane.
    sent: [u64; LANES as usize],
}

fn tables(rate: u64) -> Qos {
    let low = (0..LANES).map(|lane| Entry { lane, weight: 1 + lane }).collect();
    Qos { rate, high: Vec::new(), low, ..Qos::default() }
}

impl Many {
    fn new(count: u32, with_lanes: bool) -> Self {
        let gid = Gid::from(IpAddr::from([10, 0, 0, 1]));
        let mut adapter = Adapter::new(Config { gid, ..Config::default() });
        if with_lanes {
            adapter.set_qos(tables(EACH_TICK * PACKET * 8 * 1_000_000_000 / TICK_NS), None);
        }
        let pd = adapter.alloc_pd().unwrap();
        let (cq, _) = adapter.create_cq(1024, None, 0).unwrap();
        let ahs = (0..LANES).map(|sl| {
            let dgid = Gid::from(IpAddr::from([10, 0, 0, 2]));
            let (is_global, port_num) = (true, 1);
            let av = AddressVector { dgid, is_global, port_num, sl, ..AddressVector::default() };
            adapter.create_ah(pd, &av).unwrap()
        });
        let ahs: Vec<_> = ahs.collect();
        let cap = QpCap {
            max_send_wr: 4,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: MESSAGE as u32,
        };
        let first = QpNum::new(4000, 0).0;
        let qps = (0..count).map(|index| {
            let (qp_type, sq_sig_all) = (QpType::Ud, false);
            let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all };
            let (qp, _) = adapter.create_qp(&init, QpNum(first + index)).unwrap();
            for (state, mask) in [
                (QpState::Init, QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::QKEY),
                (QpState::Rtr, QpAttrMask::empty()),
                (QpState::Rts, QpAttrMask::SQ_PSN),
            ] {
                let attr = QpAttr { state, port_num: 1, qkey: QKEY, ..QpAttr::default() };
                adapter.modify_qp(Time(0), qp, &attr, QpAttrMask::STATE | mask).unwrap();
            }
            qp
        });
        let qps = qps.collect();
        let mut many = Self { adapter, qps, ahs, first, now: 1 << 40, sent: [0; LANES as usize] };
        for index in 0..2 * count {
            many.post((index % count) as usize);
        }
        many
    }

    fn post(&mut self, index: usize) {
        let to = To::Datagram { ah: self.ahs[index % usize::from(LANES)], qpn: 9, qkey: QKEY };
        let payload = Payload::Inline(&[7; MESSAGE]);
        let wr = SendWr { wr_id: 0, to, op: SendOp::Send, flags: SendFlags::INLINE, payload };
        self.adapter.post_send(self.qps[index], &wr).unwrap();
        self.adapter.ring_doorbell(Time(self.now), self.qps[index]);
    }

    /// Sends so many packets. For each, the queue pair gets another message.
    #[inline(never)]
    fn measured(&mut self, packets: u64) {
        let mut out = [0; MAX_DATAGRAM];
        let mut sent = 0;
        while sent < packets {
            self.now += TICK_NS;
            self.adapter.handle_timeout(Time(self.now));
            while sent < packets
                && let Some((id, number)) = self.adapter.next_datagrams()
            {
                let index = (number.0 - self.first) as usize;
                let now = Time(self.now);
                while let Some(departure) = self.adapter.transmit_datagram(now, id, &mut out) {
                    assert!(departure.len > MESSAGE);
                    self.sent[index % usize::from(LANES)] += 1;
                    sent += 1;
                    self.post(index);
                    if self.adapter.qos().is_none() {
                        // The next one has its turn.
                        self.adapter.resume_sender(id);
                        break;
                    }
                }
            }
        }
    }
}

/// `QPS=15` and `QPS=10000`, with `LANES=off` and `LANES=on`, under `valgrind --tool=callgrind
/// --toggle-collect='*measured*'` give the instructions of 30 000 packets.
#[test]
#[ignore = "to be run under callgrind"]
fn the_load_for_a_count_of_instructions() {
    let count = std::env::var("QPS").map_or(15, |count| count.parse().expect("a number"));
    let with_lanes = std::env::var("LANES").is_ok_and(|lanes| lanes == "on");
    Many::new(count, with_lanes).measured(30_000);
}

/// Nanoseconds, the best of some runs.
#[test]
#[ignore = "a measurement"]
fn nanoseconds_of_each_packet() {
    let best = |run: &mut dyn FnMut() -> f64| (0..7).map(|_| run()).fold(f64::MAX, f64::min);
    for (count, with_lanes) in [(15, false), (15, true), (10_000, false), (10_000, true)] {
        let mut many = Many::new(count, with_lanes);
        let ns = best(&mut || {
            let begun = Instant::now();
            many.measured(30_000);
            begun.elapsed().as_nanos() as f64 / 30_000.0
        });
        println!("{count} queue pairs, lanes {with_lanes}: {ns:.0} ns for each packet");
    }
    let qos = tables(0);
    let mut arbiter = Arbiter::new(&qos.high, &qos.low, 0, true);
    let ns = best(&mut || {
        let begun = Instant::now();
        for _ in 0..1_000_000 {
            let pick = arbiter.next(0x7fff).unwrap();
            arbiter.charge(pick, 4122);
        }
        begun.elapsed().as_nanos() as f64 / 1e6
    });
    println!("the arbiter's choice among 15 lanes: {ns:.1} ns for each packet");
}

/// Every queue pair of the lanes has its share, however many there are.
#[test]
fn lanes_share_by_weight_with_many_queue_pairs() {
    let mut many = Many::new(600, true);
    many.measured(12_000);
    let before = many.sent;
    many.measured(24_000);
    for (lane, (after, before)) in many.sent.iter().zip(before).enumerate() {
        let share = (after - before) as f64 / 24_000.0 * 120.0 / (1.0 + lane as f64);
        assert!((share - 1.0).abs() < 0.1, "lane {lane}: {share}");
    }
}
