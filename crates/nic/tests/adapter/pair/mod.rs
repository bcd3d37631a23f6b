//! Two adapters stepped in simulated time: the first test of any behaviour is written with this.

#![allow(dead_code, clippy::wrong_self_convention, clippy::needless_range_loop)]

mod datagrams;
mod memory;
mod streams;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use quipu_nic::mem::{Access, Segment, Sge};
use quipu_nic::*;

pub use self::datagrams::QKEY;
use self::memory::Mapped;
pub use self::memory::Memory;
use self::streams::Wire;

/// How the two adapters reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Byte streams, delivered in pieces of at most so many bytes.
    Stream(usize),
    /// A link with access to the peer's memory.
    Link,
    /// The same, where that memory is mapped here.
    LinkMapped,
    /// A link without it.
    LinkCopying,
}

pub const WAYS: [Way; 4] = [Way::Stream(usize::MAX), Way::Stream(97), Way::Link, Way::LinkCopying];

/// One adapter with the objects that most tests need.
pub struct Host {
    pub adapter: Adapter,
    pub address: Ipv4Addr,
    port: u16,
    pub pd: PdId,
    pub cq: CqId,
    pub events: Vec<Event>,
    /// What the adapter said last of how long its stream's peer may be silent.
    pub silence: Option<u64>,
    next_index: u8,
}

/// A registered buffer.
pub struct Buffer {
    pub segment: Segment,
    pub region: Region,
}

impl Buffer {
    pub fn addr(&self) -> u64 {
        self.segment.addr() as u64
    }

    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: self.addr() + offset as u64, len: len as u32, lkey: self.region.key }
    }

    pub fn key(&self) -> u32 {
        self.region.key.0
    }

    pub fn fill(&self, offset: usize, bytes: &[u8]) {
        self.segment.write(offset, bytes).unwrap();
    }

    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.segment.read(offset, &mut bytes).unwrap();
        bytes
    }
}

impl Host {
    fn new(last: u8, change: impl FnOnce(&mut Config)) -> Self {
        let address = Ipv4Addr::new(10, 0, 0, last);
        let gid = Gid::from(IpAddr::V4(address));
        let mut config = Config { gid, seed: [last; 32], ..Config::default() };
        change(&mut config);
        let IpAddr::V4(address) = IpAddr::from(config.gid) else { panic!("pairs are of IPv4") };
        let mut adapter = Adapter::new(config);
        let pd = adapter.alloc_pd().unwrap();
        let (cq, _) = adapter.create_cq(1024, Some(ChannelId(1)), 7).unwrap();
        let port = 4000 + u16::from(last);
        Self { adapter, address, port, pd, cq, events: Vec::new(), silence: None, next_index: 0 }
    }

    /// The address in a row of the GID table.
    pub fn row(&self, index: u8) -> IpAddr {
        self.adapter.gid_row(index).expect("a row of the GID table").into()
    }

    /// Whether the adapter has this address.
    pub fn has(&self, ip: IpAddr) -> bool {
        (0..self.adapter.gid_rows()).any(|index| self.row(index as u8) == ip)
    }

    pub fn qp(&mut self) -> QpId {
        self.qp_with(|_| {})
    }

    pub fn qp_with(&mut self, change: impl FnOnce(&mut QpInit)) -> QpId {
        let mut init = QpInit {
            pd: self.pd,
            send_cq: self.cq,
            recv_cq: self.cq,
            srq: None,
            cap: QpCap {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 32,
                max_recv_sge: 32,
                max_inline_data: 256,
            },
            qp_type: QpType::Rc,
            sq_sig_all: false,
        };
        change(&mut init);
        let num = QpNum::new(self.port, self.next_index);
        self.next_index += 1;
        self.adapter.create_qp(&init, num).unwrap().0
    }

    pub fn poll(&mut self) -> Vec<Completion> {
        let mut out = [Completion::default(); 256];
        let count = self.adapter.poll_cq(self.cq, &mut out).unwrap();
        out[..count].to_vec()
    }
}

/// Two adapters and what joins them.
pub struct Pair {
    pub hosts: [Host; 2],
    pub now: Time,
    pub way: Way,
    pub memory: Arc<Memory>,
    wires: Vec<Wire>,
    links: Option<[LinkId; 2]>,
    /// Whether both engines of the link have all addresses of their host.
    pub everywhere: bool,
    /// What each host owns of the link: guard words and rings.
    pub segments: Vec<Segment>,
    /// Ends of the connection that are cut: nothing arrives any more.
    pub cut: bool,
    /// The host whose process does not run for now (SIGSTOP): what links and streams bring it waits.
    pub stopped: Option<usize>,
    /// Bytes that a socket takes at once; then the other host reads before it takes more.
    pub socket_bytes: usize,
    /// Datagrams on their way: the host they go to, where from, bytes.
    pub flying: VecDeque<(usize, Arrival, Vec<u8>)>,
    /// Whether datagrams stay on their way until the test has had a look.
    pub hold: bool,
    /// Hosts whose UDP sockets take nothing.
    pub full: [bool; 2],
    /// Whether what comes of long FPDUs is received into its place, where adapters allow it.
    pub places: bool,
    /// How many bytes were.
    pub placed: usize,
    /// Connections with more to transmit than their sockets took.
    blocked: Vec<(usize, ConnId)>,
    /// Messages of links on their way, and the hosts they go to: they arrive with the next step.
    messages: Vec<(usize, LinkMessage)>,
}

pub const ALL_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::FLUSH_GLOBAL);

/// What a connected queue pair is told when it goes from INIT to RTR.
pub const TO_RTR: QpAttrMask = QpAttrMask::STATE
    .union(QpAttrMask::AV)
    .union(QpAttrMask::PATH_MTU)
    .union(QpAttrMask::DEST_QPN)
    .union(QpAttrMask::RQ_PSN)
    .union(QpAttrMask::MAX_DEST_RD_ATOMIC)
    .union(QpAttrMask::MIN_RNR_TIMER);

impl Pair {
    pub fn new(way: Way) -> Self {
        Self::with(way, [|_: &mut Config| {}; 2])
    }

    /// Two adapters with other settings than usual.
    pub fn with(way: Way, [first, second]: [impl FnOnce(&mut Config); 2]) -> Self {
        Self {
            hosts: [Host::new(1, first), Host::new(2, second)],
            now: Time(1_000_000),
            way,
            memory: Arc::default(),
            wires: Vec::new(),
            links: None,
            everywhere: false,
            segments: Vec::new(),
            cut: false,
            stopped: None,
            socket_bytes: usize::MAX,
            flying: VecDeque::new(),
            hold: false,
            full: [false; 2],
            places: true,
            placed: 0,
            blocked: Vec::new(),
            messages: Vec::new(),
        }
    }

    pub fn buffer(&mut self, host: usize, len: usize) -> Buffer {
        self.buffer_with(host, len, ALL_ACCESS | Access::MW_BIND)
    }

    pub fn buffer_with(&mut self, host: usize, len: usize, access: Access) -> Buffer {
        let segment = Segment::heap(len);
        self.memory.0.lock().unwrap().push(segment.clone());
        let host = &mut self.hosts[host];
        let region = host.adapter.reg_segment(host.pd, &segment, None, access).unwrap();
        Buffer { segment, region }
    }

    /// The completions of a host that were not polled yet: requests, and how they ended.
    pub fn polled(&mut self, host: usize) -> Vec<(u64, WcStatus)> {
        statuses(&self.hosts[host].poll())
    }

    pub fn state(&self, host: usize, qp: QpId) -> QpState {
        self.hosts[host].adapter.query_qp(qp).unwrap().attr.state
    }

    /// Runs for so many nanoseconds.
    pub fn later(&mut self, ns: u64) {
        self.run_until(self.now.after(ns));
    }

    /// Takes both queue pairs to RTS, towards each other.
    pub fn connect(&mut self, qps: [QpId; 2]) {
        self.connect_with(qps, |_| {});
    }

    pub fn connect_with(&mut self, qps: [QpId; 2], change: impl Fn(&mut QpAttr)) {
        for host in 0..2 {
            self.to_rtr(host, qps, &change);
        }
        for host in 0..2 {
            self.to_rts(host, qps[host], &change);
        }
        self.run();
    }

    pub fn to_init(&mut self, host: usize, qp: QpId) {
        let attr = QpAttr {
            state: QpState::Init,
            port_num: 1,
            access: ALL_ACCESS - Access::LOCAL_WRITE,
            ..QpAttr::default()
        };
        let mask = QpAttrMask::STATE
            | QpAttrMask::PKEY_INDEX
            | QpAttrMask::PORT
            | QpAttrMask::ACCESS_FLAGS;
        self.hosts[host].adapter.modify_qp(self.now, qp, &attr, mask).unwrap();
    }

    pub fn to_rtr(&mut self, host: usize, qps: [QpId; 2], change: &impl Fn(&mut QpAttr)) {
        let other = 1 - host;
        let dest = self.hosts[other].adapter.query_qp(qps[other]).unwrap().num;
        let dgid = self.hosts[other].adapter.config().gid;
        self.to_init(host, qps[host]);
        let mut attr = QpAttr {
            state: QpState::Rtr,
            path_mtu: 5,
            dest_qp_num: dest.0,
            rq_psn: 7,
            max_dest_rd_atomic: 16,
            min_rnr_timer: 12,
            av: AddressVector { dgid, is_global: true, port_num: 1, ..AddressVector::default() },
            ..QpAttr::default()
        };
        change(&mut attr);
        let mask = TO_RTR - self.foreign_attributes(host, qps[host]);
        self.hosts[host].adapter.modify_qp(self.now, qps[host], &attr, mask).unwrap();
    }

    pub fn reset(&mut self, host: usize, qp: QpId) {
        let attr = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        self.hosts[host].adapter.modify_qp(self.now, qp, &attr, QpAttrMask::STATE).unwrap();
    }

    pub fn to_rts(&mut self, host: usize, qp: QpId, change: &impl Fn(&mut QpAttr)) {
        let mut attr = QpAttr {
            state: QpState::Rts,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            sq_psn: 7,
            max_rd_atomic: 4,
            ..QpAttr::default()
        };
        change(&mut attr);
        attr.state = QpState::Rts;
        let mask = QpAttrMask::STATE
            | QpAttrMask::TIMEOUT
            | QpAttrMask::RETRY_CNT
            | QpAttrMask::RNR_RETRY
            | QpAttrMask::SQ_PSN
            | QpAttrMask::MAX_QP_RD_ATOMIC;
        let mask = mask - self.foreign_attributes(host, qp);
        self.hosts[host].adapter.modify_qp(self.now, qp, &attr, mask).unwrap();
    }

    /// Attributes of a reliable connection that the queue pair's service does not have.
    fn foreign_attributes(&self, host: usize, qp: QpId) -> QpAttrMask {
        type M = QpAttrMask;
        let asking = M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
        let serving = M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        match self.hosts[host].adapter.query_qp(qp).unwrap().qp_type {
            QpType::Rc | QpType::Iwarp | QpType::Tcp | QpType::Udp => M::empty(),
            QpType::Ud | QpType::RawPacket | QpType::Hashed(_) => M::empty(),
            QpType::Uc => asking | serving | M::TIMEOUT,
            QpType::XrcSend => serving,
            QpType::XrcRecv(_) => asking,
        }
    }

    pub fn send(&mut self, host: usize, qp: QpId, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.send_with(host, qp, wr_id, op, SendFlags::SIGNALED, Payload::Sges(sges));
    }

    pub fn send_with(
        &mut self,
        host: usize,
        qp: QpId,
        wr_id: u64,
        op: SendOp,
        flags: SendFlags,
        payload: Payload<'_>,
    ) {
        let adapter = &mut self.hosts[host].adapter;
        adapter.post_send(qp, &SendWr { wr_id, to: To::Peer, op, flags, payload }).unwrap();
        adapter.ring_doorbell(self.now, qp);
    }

    pub fn recv(&mut self, host: usize, qp: QpId, wr_id: u64, sges: &[Sge]) {
        self.hosts[host].adapter.post_recv(self.now, qp, wr_id, sges).unwrap();
    }

    /// Steps both adapters until nothing happens any more, without letting time pass.
    pub fn run(&mut self) {
        for _ in 0..100_000 {
            if !self.step() {
                return;
            }
        }
        panic!("the adapters never come to rest");
    }

    /// Lets time pass up to `until`, stopping at every deadline.
    pub fn run_until(&mut self, until: Time) {
        loop {
            self.run();
            let running = [0, 1].into_iter().filter(|&host| self.stopped != Some(host));
            let next =
                running.clone().filter_map(|host| self.hosts[host].adapter.poll_timeout()).min();
            match next {
                Some(at) if at <= until => self.now = at.max(self.now),
                _ => break,
            }
            for host in running {
                self.hosts[host].adapter.handle_timeout(self.now);
                let next = self.hosts[host].adapter.poll_timeout();
                assert!(next.is_none_or(|next| next > self.now), "a stale deadline spins");
            }
        }
        self.now = until;
    }

    pub fn step(&mut self) -> bool {
        let mut busy = false;
        for (host, conn) in std::mem::take(&mut self.blocked) {
            busy = true;
            self.transmit(host, conn);
        }
        for (to, message) in std::mem::take(&mut self.messages) {
            if self.stopped == Some(to) {
                self.messages.push((to, message));
                continue;
            }
            busy = true;
            if !self.cut {
                let link = self.link()[to];
                self.hosts[to].adapter.handle_link_message(self.now, link, message);
            }
        }
        for host in 0..2 {
            if self.stopped == Some(host) {
                continue;
            }
            busy |= self.hosts[host].adapter.progress(self.now);
            while let Some(action) = self.hosts[host].adapter.poll_action() {
                busy = true;
                self.act(host, action);
            }
            while let Some(event) = self.hosts[host].adapter.poll_event() {
                self.hosts[host].events.push(event);
            }
            self.hosts[host].adapter.release_acks();
            while let Some(conn) = self.hosts[host].adapter.next_transmit() {
                busy = true;
                self.transmit(host, conn);
            }
            busy |= self.transmit_datagrams(host);
        }
        busy | self.deliver() | self.deliver_datagrams()
    }

    fn transmit(&mut self, host: usize, conn: ConnId) {
        let mut buf = vec![0; 8192.min(self.socket_bytes)];
        let mut taken = 0;
        // Nothing is gathered where there are CRCs, as in most tests.
        let mut gather = Gather::new(100_000);
        let mut ended = false;
        loop {
            if taken >= self.socket_bytes {
                self.blocked.push((host, conn));
                return;
            }
            let Host { adapter, .. } = &mut self.hosts[host];
            let used = adapter.transmit_from_memory(self.now, conn, &mut buf, &mut gather);
            if used == 0 {
                return;
            }
            assert!(!ended, "there is more behind what was to be all");
            ended = gather.is_final(buf.len() - used) && !adapter.has_output();
            let bytes = self.memory.between(&buf[..used], &gather);
            taken += bytes.len();
            if let Some(wire) = self.wires.iter_mut().find(|w| w.ends[host] == Some(conn)) {
                wire.said[host].extend(&bytes);
                wire.towards[1 - host].extend(bytes);
            }
        }
    }

    fn act(&mut self, host: usize, action: Action) {
        let other = 1 - host;
        match action {
            Action::Connect { conn, peer, sgid_index } => {
                if self.cut || !self.hosts[other].has(peer.ip()) {
                    if self.hosts[host].has(peer.ip()) {
                        self.hosts[host].adapter.handle_reached_self(self.now, conn);
                    } else {
                        self.hosts[host].adapter.handle_lost(self.now, conn, Loss::Refused);
                    }
                    return;
                }
                match self.way {
                    Way::Stream(_) => self.open_stream(host, conn, sgid_index),
                    Way::Link | Way::LinkMapped | Way::LinkCopying => {
                        let link = self.link()[host];
                        if !self.hosts[host].adapter.handle_reached_link(self.now, conn, link) {
                            self.open_stream(host, conn, sgid_index);
                        }
                    }
                }
            }
            Action::LimitSilence { user_timeout_ns, .. } => {
                self.hosts[host].silence = user_timeout_ns;
            }
            Action::Close { conn } => {
                self.transmit(host, conn);
                if let Some(wire) = self.wires.iter_mut().find(|w| w.ends[host] == Some(conn)) {
                    wire.closed = true;
                    wire.ends[host] = None;
                }
                self.hosts[host].adapter.handle_lost(self.now, conn, Loss::Closed);
            }
            Action::LinkSend { message, .. } => {
                let mut bytes = Vec::new();
                message.encode(&mut bytes);
                let message = LinkMessage::decode(&bytes).expect("a message survives the way");
                self.messages.push((other, message));
            }
            Action::RingBell { .. } => {}
            Action::Cut { .. } => {
                for host in 0..2 {
                    let link = self.link()[host];
                    self.hosts[host].adapter.handle_link_down(self.now, link);
                }
            }
        }
    }

    pub fn link(&mut self) -> [LinkId; 2] {
        if let Some(links) = self.links {
            return links;
        }
        let segments = [Segment::heap(4 << 20), Segment::heap(4 << 20)];
        let mut directories = BTreeMap::new();
        let access = self.way != Way::LinkCopying;
        let gids = self.hosts.each_ref().map(|host| host.adapter.config().gid);
        for host in 0..2 {
            let directory = Segment::heap(64 << 10);
            self.hosts[host].adapter.publish_regions(&directory).unwrap();
            directories.insert(host, directory);
        }
        let links = [0, 1].map(|host| {
            let memory: Arc<dyn PeerMemory> = match self.way {
                Way::LinkMapped => Arc::new(Mapped(Arc::clone(&self.memory))),
                _ => Arc::clone(&self.memory) as _,
            };
            self.hosts[host]
                .adapter
                .handle_link_up(Link {
                    own: segments[host].clone(),
                    peer: segments[1 - host].clone(),
                    peer_gid: (!self.everywhere).then_some(gids[1 - host]),
                    peer_memory: access.then_some(memory),
                    peer_directory: access.then(|| directories[&(1 - host)].clone()),
                })
                .unwrap()
        });
        self.links = Some(links);
        self.segments = segments.into();
        links
    }
}

/// Requests, and how they ended.
pub fn statuses(completions: &[Completion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|wc| (wc.wr_id, wc.status)).collect()
}

/// Two reliable queue pairs, one at each host, that are connected.
pub fn connected(way: Way) -> (Pair, [QpId; 2]) {
    connected_with(way, |_| {})
}

/// The same, with changed attributes.
pub fn connected_with(way: Way, change: impl Fn(&mut QpAttr)) -> (Pair, [QpId; 2]) {
    let mut pair = Pair::new(way);
    let qps = [pair.hosts[0].qp(), pair.hosts[1].qp()];
    pair.connect_with(qps, change);
    (pair, qps)
}
