//! An adapter with datagram queue pairs: the input is a program that posts, and a network that delivers
//! anything, from anywhere, to anybody.
#![no_main]

#[path = "adapter/input.rs"]
mod input;
mod shares;

use std::net::{IpAddr, SocketAddr};

use input::Input;
use libfuzzer_sys::fuzz_target;
use quipu_iwarp::wire::datagram::Datagram;
use quipu_nic::mem::{Access, Segment, Sge};
use quipu_nic::*;
use shares::Shares;

static SHARES: Shares<4> =
    Shares::new(["a datagram of its own", "a frame of its own", "a send done", "a receive done"]);

const STEPS: usize = 200;
/// Bytes of the region that receives may name, with as many before and behind it that nobody may touch.
const LEN: usize = 4096;
const PATTERN: u8 = 0x5a;
const PORT: u16 = 4005;
const OWN: [u8; 4] = [10, 0, 0, 5];
const GROUP: [u8; 4] = [239, 0, 0, 5];
const QKEY: u32 = 0x1111_1111;
const QPS: u8 = 4;
/// The queue pair of raw packets.
const RAW: usize = 3;

struct World {
    adapter: Adapter,
    pd: PdId,
    cq: CqId,
    srq: SrqId,
    qps: Vec<QpId>,
    /// A work queue, which the queue pair `hashed` receives by.
    wq: SrqId,
    hashed: QpId,
    flows: Vec<FlowId>,
    ahs: [AhId; 2],
    region: Region,
    open: Segment,
    around: Segment,
    posted: u64,
    completed: u64,
}

const NOW: Time = Time(1_000_000);

impl World {
    fn new(link_layer: LinkLayer) -> Self {
        let gid = Gid::from(IpAddr::from(OWN));
        let config = Config { gid, link_layer, max_sge: 4, ..Config::default() };
        let mut adapter = Adapter::new(config);
        let pd = adapter.alloc_pd().unwrap();
        let (cq, _) = adapter.create_cq(64, None, 7).unwrap();
        let srq = adapter.create_srq(pd, 16, 4, 0).unwrap();
        let around = Segment::heap(3 * LEN);
        around.write(0, &[PATTERN; 3 * LEN]).unwrap();
        let open = around.slice(LEN, LEN).unwrap();
        let region = adapter.reg_segment(pd, &open, None, Access::LOCAL_WRITE).unwrap();
        let ahs = [OWN, GROUP].map(|to| {
            let dgid = Gid::from(IpAddr::from(to));
            let av =
                AddressVector { dgid, is_global: true, port_num: 1, ..AddressVector::default() };
            adapter.create_ah(pd, &av).unwrap()
        });
        let cap = QpCap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
        };
        let qps = (0..QPS).map(|index| {
            let init = QpInit {
                pd,
                send_cq: cq,
                recv_cq: cq,
                srq: (index == 1).then_some(srq),
                cap,
                qp_type: if usize::from(index) == RAW { QpType::RawPacket } else { QpType::Ud },
                sq_sig_all: index == 2,
            };
            adapter.create_qp(&init, QpNum::new(PORT, index)).unwrap().0
        });
        let qps: Vec<QpId> = qps.collect();
        let wq = adapter.create_wq(pd, cq, 16, 4).unwrap();
        adapter.modify_wq(NOW, wq, WqState::Ready).unwrap();
        let table = adapter.create_ind_table(&[wq; 4]).unwrap();
        let hash = RxHash::new([0x6d; RX_HASH_KEY], RxHashFields::SRC_IPV4).unwrap();
        let hashed = adapter.create_hashed_qp(pd, table, hash, QpNum::new(PORT, QPS)).unwrap();
        let flows = [qps[RAW], hashed].map(|qp| {
            let rule = FlowRule { passes_on: qp == hashed, ..FlowRule::default() };
            adapter.create_flow(qp, rule).unwrap()
        });
        let (flows, posted, completed) = (flows.to_vec(), 0, 0);
        Self {
            adapter,
            pd,
            cq,
            srq,
            qps,
            wq,
            hashed,
            flows,
            ahs,
            region,
            open,
            around,
            posted,
            completed,
        }
    }

    /// Adds a rule, of whatever kind, or ends one.
    fn steer(&mut self, input: &mut Input<'_>) {
        use FlowLayer::{Ethernet, Ipv4, Ipv6, Tcp, Tunnel, Udp};
        if self.flows.len() > 8 {
            let flow = self.flows.remove(0);
            self.adapter.destroy_flow(flow).unwrap();
        }
        let mut rule = FlowRule {
            kind: input.pick(&[FlowKind::Normal, FlowKind::AllDefault, FlowKind::GroupDefault]),
            priority: u16::from(input.byte() % 4),
            passes_on: input.flag(),
            drops: input.byte() % 8 == 0,
            specs: Vec::new(),
            counts: None,
        };
        for _ in 0..input.byte() % 4 {
            let layer = input.pick(&[Ethernet, Ipv4, Ipv6, Tcp, Udp, Tunnel]);
            let (inner, value, mask) = (input.flag(), input.bytes(), input.bytes());
            rule.specs.extend(FlowSpec::new(layer, inner, value, mask));
        }
        let qp = input.pick(&[self.qps[0], self.qps[RAW], self.hashed]);
        self.flows.extend(self.adapter.create_flow(qp, rule));
    }

    /// Names another destination, by LID or GID or in no way that leads anywhere.
    fn route(&mut self, index: usize, input: &mut Input<'_>) {
        let dgid = input.pick(&[OWN, GROUP, [0; 4]]);
        let av = AddressVector {
            dgid: Gid::from(IpAddr::from(dgid)),
            is_global: input.flag(),
            dlid: input.count() as u16,
            sgid_index: input.byte() % 8,
            traffic_class: input.byte(),
            port_num: 1,
            ..AddressVector::default()
        };
        if let Ok(ah) = self.adapter.create_ah(self.pd, &av) {
            let found = self.adapter.query_ah(ah).unwrap();
            assert!(found.is_global || found.dgid.lid() == av.dlid, "a LID is the end of a GID");
            self.adapter.destroy_ah(std::mem::replace(&mut self.ahs[index], ah)).unwrap();
        }
    }

    fn modify(&mut self, index: usize, state: QpState, extra: QpAttrMask) {
        type M = QpAttrMask;
        let attr = QpAttr { state, port_num: 1, qkey: QKEY, ..QpAttr::default() };
        let mask = match state {
            QpState::Init if index == RAW => M::PORT,
            QpState::Rtr | QpState::Rts if index == RAW => M::empty(),
            QpState::Init => M::PKEY_INDEX | M::PORT | M::QKEY,
            QpState::Rts => M::SQ_PSN,
            _ => M::empty(),
        };
        let _ = self.adapter.modify_qp(NOW, self.qps[index], &attr, mask ^ extra | M::STATE);
    }

    /// Elements in the region and beyond it, with the right key or another one.
    fn sges(&self, input: &mut Input<'_>) -> Vec<Sge> {
        let base = self.open.addr() as u64;
        let sge = |input: &mut Input<'_>| Sge {
            addr: if input.byte() == 0xfe { input.long() } else { base + u64::from(input.count()) },
            len: input.count(),
            lkey: Key(self.region.key.0 ^ u32::from(input.byte() == 0xff)),
        };
        (0..input.byte() % 5).map(|_| sge(input)).collect()
    }

    fn send(&mut self, input: &mut Input<'_>) {
        let id = self.qps[usize::from(input.byte()) % self.qps.len()];
        let ah = match input.byte() % 4 {
            0 => AhId(input.word()),
            which => self.ahs[usize::from(which) % 2],
        };
        let qpn = match input.byte() % 4 {
            0 => input.word(),
            1 => 0x00ff_ffff,
            which => QpNum::new(PORT, which).0,
        };
        let to = match input.byte() % 8 {
            0 => To::Peer,
            1..=6 if id == self.qps[RAW] => To::Peer,
            _ => To::Datagram { ah, qpn, qkey: input.pick(&[QKEY, 0, 1 << 31]) },
        };
        let op = input.pick(&[SendOp::Send, SendOp::SendImm(7), SendOp::SendInv(1)]);
        let flags = SendFlags::from_bits_truncate(input.byte().into()) - SendFlags::INLINE;
        let sges = self.sges(input);
        let inline = input.flag();
        let payload = if inline { Payload::Inline(input.bytes()) } else { Payload::Sges(&sges) };
        let wr = SendWr { wr_id: 1, to, op, flags, payload };
        let expected = self.adapter.check_send(id, &wr, 0);
        let posted = self.adapter.post_send(id, &wr);
        assert_eq!(posted, expected, "what is checked is what is refused");
        self.posted += u64::from(posted.is_ok());
        self.adapter.ring_doorbell(NOW, id);
    }

    fn receive(&mut self, input: &mut Input<'_>) {
        let index = usize::from(input.byte()) % (self.qps.len() + 1);
        let sges = self.sges(input);
        let posted = match index {
            _ if index == self.qps.len() => self.adapter.post_wq_recv(NOW, self.wq, 2, &sges),
            1 => self.adapter.post_srq_recv(NOW, self.srq, 2, &sges),
            _ => self.adapter.post_recv(NOW, self.qps[index], 2, &sges),
        };
        self.posted += u64::from(posted.is_ok());
    }

    fn deliver(&mut self, input: &mut Input<'_>) {
        let source = 4242_u16;
        let dest_qpn = match input.byte() % 8 {
            0 => input.word() & 0x00ff_ffff,
            1 | 2 => 0x00ff_ffff,
            which => QpNum::new(PORT, which % QPS).0,
        };
        let header = Datagram {
            dest_qpn,
            source_qpn: QpNum::new(source, input.byte()).0,
            qkey: input.pick(&[QKEY, QKEY, 0]),
            imm: input.flag().then_some(9),
            solicited: input.flag(),
            frame: input.byte() % 4 == 0,
        };
        let mut bytes = header.to_bytes().to_vec();
        if header.frame && input.byte() % 8 != 0 {
            bytes.extend([1, 0, 0x5e, 0, 0, 1, 2, 0, 0, 0, 0, 9, 8, 0, 0x45, 0, 0, 40, 0, 0]);
            bytes.extend([0x40, 0, 64, input.pick(&[6, 17]), 0, 0, 10, 0, 0, input.byte()]);
            bytes.extend([10, 0, 0, 2, 0, 1, 0x12, input.pick(&[0xb5, 0]), 0, 8, 0, 0]);
        }
        bytes.extend(input.bytes());
        bytes.resize(bytes.len() + usize::from(input.byte() / 64) * 1300, 0x33);
        match input.byte() % 8 {
            0 => bytes.truncate(input.byte().into()),
            1 => {
                let at = usize::from(input.byte()) % bytes.len();
                bytes[at] ^= input.byte();
            }
            _ => {}
        }
        let from = SocketAddr::from(([10, 0, 0, 9], source ^ u16::from(input.byte() == 0)));
        let to = match input.byte() % 8 {
            0 => IpAddr::from([239, 0, 0, 6]),
            1..=4 if header.frame => self.adapter.segment(),
            _ => IpAddr::from(input.pick(&[OWN, GROUP])),
        };
        let arrival = Arrival { from, to, traffic_class: input.byte(), hop_limit: input.byte() };
        self.adapter.handle_datagram(NOW, &arrival, &bytes);
    }

    fn manage(&mut self, input: &mut Input<'_>) {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd};
        let index = usize::from(input.byte()) % self.qps.len();
        let (id, group) = (self.qps[index], Gid::from(IpAddr::from(GROUP)));
        match input.byte() % 7 {
            4 => self.steer(input),
            6 => self.route(index % 2, input),
            5 => {
                let state = input.pick(&[WqState::Reset, WqState::Ready, WqState::Err]);
                let _ = self.adapter.modify_wq(NOW, self.wq, state);
            }
            0 => drop(self.adapter.attach_multicast(id, group)),
            1 => drop(self.adapter.detach_multicast(id, group)),
            2 => {
                let bit = QpAttrMask::from_bits_truncate(1 << (input.byte() % 32));
                self.modify(index, input.pick(&[Reset, Init, Rtr, Rts, Sqd, Err]), bit);
            }
            _ => self.modify(
                index,
                input.pick(&[Reset, Init, Rtr, Rts, Rts, Sqd]),
                QpAttrMask::empty(),
            ),
        }
    }

    /// Sends what is to be sent; `full` sockets take nothing.
    fn settle(&mut self, full: bool) {
        let mut out = [0; MAX_DATAGRAM];
        let mut turns = 0;
        while let Some((id, number)) = self.adapter.next_datagrams() {
            turns += 1;
            assert!(turns < 1000, "it never stops talking");
            while !full && let Some(departure) = self.adapter.transmit_datagram(NOW, id, &mut out) {
                let header = Datagram::parse(&out[..departure.len]).expect("a datagram of its own");
                assert_eq!((header.source_qpn, departure.from), (number.0, number));
                let raw = number == QpNum::new(PORT, RAW as u8);
                assert_eq!(header.frame, raw);
                SHARES.reach(if raw { "a frame of its own" } else { "a datagram of its own" });
                assert!(!raw || departure.to.ip() == self.adapter.segment());
            }
        }
        if !full {
            self.adapter.resume_datagrams(QpNum::new(PORT, 0)..=QpNum::new(PORT, 255));
        }
        while self.adapter.poll_event().is_some() {}
    }

    fn check(&mut self) {
        let mut out = [Completion::default(); 16];
        while let Ok(found @ 1..) = self.adapter.poll_cq(self.cq, &mut out) {
            self.completed += found as u64;
            for done in out[..found].iter().filter(|done| done.status == WcStatus::Success) {
                SHARES.reach(if done.wr_id == 1 { "a send done" } else { "a receive done" });
            }
        }
        assert!(self.completed <= self.posted, "more completions than requests");
        for offset in [0, 2 * LEN] {
            let mut bytes = [0; LEN];
            self.around.read(offset, &mut bytes).unwrap();
            assert!(bytes == [PATTERN; LEN], "out of bounds");
        }
    }
}

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let mut input = Input(data);
    let layer = input.pick(&[LinkLayer::Ethernet, LinkLayer::InfiniBand]);
    let mut world = World::new(layer);
    for index in 0..world.qps.len() {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            world.modify(index, state, QpAttrMask::empty());
        }
    }
    for _ in 0..STEPS {
        if input.is_over() {
            break;
        }
        match input.byte() % 8 {
            0 | 1 => world.send(&mut input),
            2 | 3 => world.receive(&mut input),
            4..=6 => world.deliver(&mut input),
            _ => world.manage(&mut input),
        }
        let full = input.byte() % 4 == 0;
        world.settle(full);
    }
    world.check();
});
