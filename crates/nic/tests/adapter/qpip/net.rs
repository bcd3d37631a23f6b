//! Two adapters on a link of IP packets that loses, delays, doubles and spoils them, in simulated time.

#![allow(dead_code)]

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use quipu_nic::inet::stack::{self, Frame, ListenerId};
use quipu_nic::inet::tcp::{Mode, Secret};
use quipu_nic::*;
use quipu_wire::checksum::{Sum, sum};
use quipu_wire::{ipv6, tcp};

use crate::pair::{Buffer, Host, Pair, Way};

pub const MILLISECOND: u64 = 1_000_000;
pub const SECOND: u64 = 1_000 * MILLISECOND;

/// What the link does to packets, in thousandths of them.
#[derive(Clone, Copy, Default)]
pub struct Weather {
    pub loss: u64,
    pub doubled: u64,
    pub spoilt: u64,
    /// Some packets are as many nanoseconds late.
    pub late: u64,
}

pub const STORM: Weather = Weather { loss: 50, doubled: 30, spoilt: 20, late: 3 * MILLISECOND };

/// Says which frames to a host get through.
pub type Filter = Box<dyn FnMut(usize, &[u8]) -> bool>;

pub struct Net {
    pub pair: Pair,
    pub weather: Weather,
    /// One way.
    pub delay: u64,
    pub v4: bool,
    /// Which frames arrive at all, by host and bytes.
    pub filter: Option<Filter>,
    /// Frames that were sent by each host.
    pub sent: [Vec<Vec<u8>>; 2],
    pub keep: bool,
    /// How many frames of each host the link takes before it is full.
    pub room: [usize; 2],
    /// Frames that the link was to cut into segments. It carries them as they are.
    pub cut: usize,
    /// Packets with more octets behind their IP header come in parts of so many, a multiple of eight.
    pub parts: usize,
    flying: BTreeMap<(u64, u64), (usize, Vec<u8>)>,
    count: u64,
    random: u64,
}

impl Net {
    pub fn new() -> Self {
        Self::with(1, |_| {})
    }

    pub fn with(seed: u64, change: impl Fn(&mut stack::Config)) -> Self {
        let mut pair = Pair::new(Way::Stream(usize::MAX));
        for (n, host) in pair.hosts.iter_mut().enumerate() {
            let secret = Secret([seed, n as u64]);
            let mut config = stack::Config::new(v6(n), 64, secret);
            config.addresses.push((v4(n), 24));
            change(&mut config);
            host.adapter.attach_inet(config).unwrap();
        }
        Self {
            pair,
            weather: Weather::default(),
            delay: 50_000,
            v4: false,
            filter: None,
            sent: Default::default(),
            keep: false,
            room: [usize::MAX; 2],
            cut: 0,
            parts: usize::MAX,
            flying: BTreeMap::new(),
            count: 0,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        }
    }

    pub fn host(&mut self, host: usize) -> &mut Host {
        &mut self.pair.hosts[host]
    }

    pub fn adapter(&mut self, host: usize) -> &mut Adapter {
        &mut self.pair.hosts[host].adapter
    }

    pub fn now(&self) -> Time {
        self.pair.now
    }

    pub fn address(&self, host: usize, port: u16) -> SocketAddr {
        SocketAddr::new(if self.v4 { v4(host) } else { v6(host) }, port)
    }

    /// A random number below `limit`.
    pub fn draw(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % limit.max(1)
    }

    /// A queue pair of this type, in INIT.
    pub fn qp(&mut self, host: usize, qp_type: QpType) -> QpId {
        self.qp_with(host, qp_type, |_| {})
    }

    pub fn qp_with(
        &mut self,
        host: usize,
        qp_type: QpType,
        change: impl FnOnce(&mut QpInit),
    ) -> QpId {
        let qp = self.host(host).qp_with(|init| {
            init.qp_type = qp_type;
            change(init);
        });
        self.to(host, qp, QpState::Init).unwrap();
        qp
    }

    pub fn to(&mut self, host: usize, qp: QpId, state: QpState) -> Result<(), Fault> {
        let now = self.now();
        let attr = QpAttr { state, port_num: 1, ..QpAttr::default() };
        self.adapter(host).modify_qp(now, qp, &attr, QpAttrMask::STATE)
    }

    pub fn state(&self, host: usize, qp: QpId) -> QpState {
        self.pair.hosts[host].adapter.query_qp(qp).unwrap().attr.state
    }

    pub fn buffer(&mut self, host: usize, len: usize) -> Buffer {
        self.pair.buffer(host, len)
    }

    pub fn listen(&mut self, host: usize, port: u16, settings: &TcpSettings) -> ListenerId {
        self.adapter(host).tcp_listen(port, settings, 16).unwrap().0
    }

    pub fn offer(&mut self, host: usize, listener: ListenerId, qp: QpId) -> Result<(), Fault> {
        let now = self.now();
        self.adapter(host).tcp_offer(now, listener, qp)
    }

    pub fn connect(
        &mut self,
        host: usize,
        qp: QpId,
        remote: SocketAddr,
        settings: &TcpSettings,
    ) -> Result<(), Fault> {
        let now = self.now();
        self.adapter(host).tcp_connect(now, qp, remote, None, settings)
    }

    /// Two queue pairs that are connected: that of host 0 has connected.
    pub fn connected(&mut self, mode: Mode) -> [QpId; 2] {
        let qps = [0, 1].map(|host| self.qp(host, QpType::Tcp));
        self.join(qps, mode);
        qps
    }

    /// Connects two queue pairs, and forgets that events said so.
    pub fn join(&mut self, qps: [QpId; 2], mode: Mode) {
        let settings = TcpSettings { mode, ..TcpSettings::default() };
        let (listener, port) = self.adapter(1).tcp_listen(0, &settings, 16).unwrap();
        self.offer(1, listener, qps[1]).unwrap();
        let to = self.address(1, port);
        self.connect(0, qps[0], to, &settings).unwrap();
        self.run_while(5 * SECOND, |net| net.states(qps) != [QpState::Rts; 2]);
        assert_eq!(self.states(qps), [QpState::Rts; 2]);
        self.adapter(1).tcp_unlisten(listener);
        for (host, qp) in qps.into_iter().enumerate() {
            assert_eq!(self.changes(host), [(qp, TcpChange::Connected)]);
        }
    }

    pub fn states(&self, qps: [QpId; 2]) -> [QpState; 2] {
        [0, 1].map(|host| self.state(host, qps[host]))
    }

    /// What has happened to connections since the last call.
    pub fn changes(&mut self, host: usize) -> Vec<(QpId, TcpChange)> {
        self.collect_events(host);
        let mut changes = Vec::new();
        self.host(host).events.retain(|event| match event {
            Event::Tcp { qp, change } => {
                changes.push((*qp, *change));
                false
            }
            _ => true,
        });
        changes
    }

    fn collect_events(&mut self, host: usize) {
        while let Some(event) = self.adapter(host).poll_event() {
            self.host(host).events.push(event);
        }
    }

    pub fn post(&mut self, host: usize, qp: QpId, wr: &SendWr<'_>) -> Result<(), Fault> {
        let now = self.now();
        let adapter = self.adapter(host);
        adapter.post_send(qp, wr)?;
        adapter.ring_doorbell(now, qp);
        Ok(())
    }

    pub fn send(&mut self, host: usize, qp: QpId, wr_id: u64, sges: &[mem::Sge]) {
        let payload = Payload::Sges(sges);
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id, to: To::Peer, op: SendOp::Send, flags, payload };
        self.post(host, qp, &wr).unwrap();
    }

    pub fn send_bytes(&mut self, host: usize, qp: QpId, wr_id: u64, bytes: &[u8]) {
        let payload = Payload::Inline(bytes);
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id, to: To::Peer, op: SendOp::Send, flags, payload };
        self.post(host, qp, &wr).unwrap();
    }

    pub fn recv(&mut self, host: usize, qp: QpId, wr_id: u64, sges: &[mem::Sge]) {
        self.pair.recv(host, qp, wr_id, sges);
    }

    pub fn poll(&mut self, host: usize) -> Vec<Completion> {
        self.host(host).poll()
    }

    /// Has the link take what there is to send; whether there was anything.
    fn transmit(&mut self) -> bool {
        let mut out = vec![0; 70_000];
        let mut any = false;
        for host in 0..2 {
            let now = self.now();
            while self.room[host] > 0
                && let Some(frame) = self.pair.hosts[host].adapter.transmit_frame(now, &mut out)
            {
                any = true;
                self.room[host] -= 1;
                assert_eq!(frame.checksum, None);
                self.cut += usize::from(frame.segment.is_some());
                let bytes = out[..frame.len].to_vec();
                if self.keep {
                    self.sent[host].push(bytes.clone());
                }
                for part in self.parts_of(bytes) {
                    self.fly(1 - host, part);
                }
            }
            // It may have more for its own addresses than it takes at a time.
            any |= self.room[host] > 0 && self.adapter(host).has_frames();
            self.collect_events(host);
        }
        any
    }

    /// Cuts a packet as a router does (RFC 791 3.2), or as its sender (RFC 8200 4.5).
    fn parts_of(&mut self, packet: Vec<u8>) -> Vec<Vec<u8>> {
        let v4 = packet[0] >> 4 == 4;
        let (ip, upper) = packet.split_at(if v4 { 20 } else { 40 });
        if upper.len() <= self.parts {
            return vec![packet];
        }
        self.count += 1;
        let number = (self.count as u32).to_be_bytes();
        let last = (upper.len() - 1) / self.parts;
        let part = |(n, piece): (usize, &[u8])| {
            let (at, more) = (n * self.parts, u16::from(n < last));
            let mut part = ip.to_vec();
            if v4 {
                part[2..4].copy_from_slice(&((20 + piece.len()) as u16).to_be_bytes());
                part[4..6].copy_from_slice(&number[2..]);
                part[6..8].copy_from_slice(&((at / 8) as u16 | more << 13).to_be_bytes());
                part[10..12].fill(0);
                let checksum = quipu_wire::checksum::sum(&part).checksum();
                part[10..12].copy_from_slice(&checksum.to_be_bytes());
            } else {
                part[4..6].copy_from_slice(&((8 + piece.len()) as u16).to_be_bytes());
                let [high, low] = (at as u16 | more).to_be_bytes();
                let header = [std::mem::replace(&mut part[6], 44), 0, high, low];
                part.extend([header, number].concat());
            }
            part.extend(piece);
            part
        };
        upper.chunks(self.parts).enumerate().map(part).collect()
    }

    fn fly(&mut self, to: usize, bytes: Vec<u8>) {
        if self.filter.as_mut().is_some_and(|filter| !filter(to, &bytes)) {
            return;
        }
        let Weather { loss, doubled, spoilt, late } = self.weather;
        let copies = 1 + usize::from(self.draw(1000) < doubled);
        for _ in 0..copies {
            if self.draw(1000) < loss {
                continue;
            }
            let mut bytes = bytes.clone();
            if self.draw(1000) < spoilt {
                let at = self.draw(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.draw(8);
            }
            let more = if late > 0 && self.draw(4) == 0 { self.draw(late) } else { 0 };
            self.count += 1;
            let at = self.now().0 + self.delay + more;
            self.flying.insert((at, self.count), (to, bytes));
        }
    }

    /// Loses the first message of 100 octets or so to host 1, once.
    pub fn lose_first_message(&mut self) {
        let mut lost = false;
        self.filter = Some(Box::new(move |to, frame| {
            let first = to == 1 && frame.len() > 150 && !std::mem::replace(&mut lost, true);
            !first
        }));
    }

    /// Has a frame arrive now.
    pub fn inject(&mut self, host: usize, bytes: &[u8]) {
        let now = self.now();
        self.adapter(host).handle_frame(now, &Frame { bytes, checked: false });
    }

    fn deadline(&self) -> Option<u64> {
        let flying = self.flying.first_key_value().map(|((at, _), _)| *at);
        let timers = self.pair.hosts.iter().filter_map(|host| host.adapter.poll_timeout());
        timers.map(|time| time.0).chain(flying).min()
    }

    /// Lets `ns` pass.
    pub fn run_for(&mut self, ns: u64) {
        self.run_while(ns, |_| true);
    }

    /// Lets time pass as long as `goes_on`, at most `ns`.
    pub fn run_while(&mut self, ns: u64, mut goes_on: impl FnMut(&mut Self) -> bool) {
        let end = self.now().after(ns);
        let mut steps = 0u64;
        loop {
            while self.transmit() {}
            if !goes_on(self) {
                return;
            }
            let Some(next) = self.deadline().filter(|at| *at <= end.0) else { break };
            steps += 1;
            assert!(steps < 3_000_000, "it never comes to rest");
            self.pair.now = Time(next.max(self.now().0));
            let now = self.now();
            while let Some(first) = self.flying.first_entry() {
                if first.key().0 > now.0 {
                    break;
                }
                let (host, bytes) = first.remove();
                self.inject(host, &bytes);
            }
            for host in 0..2 {
                self.adapter(host).handle_timeout(now);
            }
            while self.transmit() {}
            for host in 0..2 {
                let next = self.adapter(host).poll_timeout();
                assert!(next.is_none_or(|next| next > now), "a stale deadline spins");
            }
        }
        self.pair.now = end;
    }
}

/// The frame of a segment to host 1.
pub fn segment_to_host_1(source: Ipv6Addr, segment: &tcp::Repr, payload: &[u8]) -> Vec<u8> {
    let IpAddr::V6(destination) = v6(1) else { unreachable!() };
    let len = segment.header_len() + payload.len();
    let mut frame = vec![0; 40 + segment.header_len()];
    let at = ipv6::Repr {
        source,
        destination,
        next_header: 6,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        payload_len: len as u16,
    }
    .emit(&mut frame);
    segment.emit(&mut frame[at..]);
    frame.extend(payload);
    let pseudo = Sum::of_pseudo_header(source.into(), destination.into(), 6, len);
    let field = at + tcp::CHECKSUM_AT;
    let checksum = pseudo.and(sum(&frame[at..])).checksum();
    frame[field..field + 2].copy_from_slice(&checksum.to_be_bytes());
    frame
}

pub fn v6(host: usize) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1 + host as u16).into()
}

pub fn v4(host: usize) -> IpAddr {
    Ipv4Addr::new(10, 9, 0, 1 + host as u8).into()
}

/// Bytes that are different everywhere.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|n| ((n * 7919 + seed * 104_729) >> 3) as u8 ^ n as u8).collect()
}
