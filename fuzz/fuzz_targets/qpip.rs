//! Two adapters with TCP and UDP queue pairs, programs that do what they like, and somebody on the link who
//! loses, keeps back, repeats, changes and makes up frames.
#![no_main]

#[allow(dead_code)]
#[path = "adapter/input.rs"]
mod input;
mod shares;
mod stranger;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use input::Input;
use libfuzzer_sys::fuzz_target;
use quipu_nic::inet::stack::{self, Frame, ListenerId, TcpId};
use quipu_nic::inet::tcp::{Mode, Secret};
use quipu_nic::mem::{Access, Segment, Sge};
use quipu_nic::*;
use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6;
use quipu_wire::ipv6_extension::next_header;
use shares::Shares;
use stranger::Place;

static SHARES: Shares<4> =
    Shares::new(["a connection", "a send done", "a receive done", "made up"]);

const STEPS: usize = 300;
/// Bytes of the region that requests may name, with as many before and behind it that nobody may touch.
const LEN: usize = 1 << 14;
const PATTERN: u8 = 0x5a;
/// Queue pairs of an adapter: TCP, and the last one UDP.
const QPS: usize = 5;
const MTU: u32 = 1500;

struct Host {
    adapter: Adapter,
    cq: CqId,
    qps: Vec<QpId>,
    listener: Option<ListenerId>,
    requests: Vec<TcpId>,
    key: Key,
    around: Segment,
    addr: u64,
    /// Receives and signalled sends that are posted.
    posted: u64,
    completed: u64,
}

fn address(host: usize) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host as u16 + 1).into()
}

impl Host {
    fn new(host: usize) -> Self {
        let mut adapter = Adapter::new(Config { seed: [host as u8; 32], ..Config::default() });
        let secret = Secret([host as u64, 5]);
        let config = stack::Config { mtu: MTU, ..stack::Config::new(address(host), 64, secret) };
        adapter.attach_inet(config).unwrap();
        let pd = adapter.alloc_pd().unwrap();
        let (cq, _) = adapter.create_cq(1 << 12, None, 0).unwrap();
        let around = Segment::heap(3 * LEN);
        around.write(0, &[PATTERN; 3 * LEN]).unwrap();
        let open = around.slice(LEN, LEN).unwrap();
        let key = adapter.reg_segment(pd, &open, None, Access::LOCAL_WRITE).unwrap().key;
        let cap = QpCap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 32,
        };
        let qps = (0..QPS).map(|index| {
            let qp_type = if index + 1 == QPS { QpType::Udp } else { QpType::Tcp };
            let init =
                QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: true };
            adapter.create_qp(&init, QpNum::new(4000, index as u8)).unwrap().0
        });
        let qps = qps.collect();
        let addr = open.addr() as u64;
        Self {
            adapter,
            cq,
            qps,
            listener: None,
            requests: Vec::new(),
            key,
            around,
            addr,
            posted: 0,
            completed: 0,
        }
    }

    fn modify(&mut self, now: Time, qp: QpId, state: QpState) {
        let attr = QpAttr { state, ..QpAttr::default() };
        let was = self.adapter.query_qp(qp).unwrap().attr.state;
        let done = self.adapter.modify_qp(now, qp, &attr, QpAttrMask::STATE);
        if done.is_ok() && state == QpState::Reset && was != QpState::Reset {
            // What was posted is forgotten, and what was complete is dropped: nobody counts any more.
            self.posted = u64::MAX / 2;
        }
    }

    /// A scatter list, mostly of the region.
    fn sges(&self, input: &mut Input<'_>) -> Vec<Sge> {
        let count = usize::from(input.byte() % 3);
        let piece = |input: &mut Input<'_>| {
            let (offset, len) = (input.count() as usize % LEN, input.count() as usize % 6000);
            let wild = input.byte();
            let len = if wild == 0 { len } else { len.min(LEN - offset) };
            let lkey = if wild == 1 { Key(0x77) } else { self.key };
            Sge { addr: self.addr + offset as u64, len: len as u32, lkey }
        };
        (0..count).map(|_| piece(input)).collect()
    }

    fn call(&mut self, now: Time, peer: IpAddr, input: &mut Input<'_>) {
        let (what, which) = (input.byte(), input.byte());
        let qp = self.qps[usize::from(which) % QPS];
        let mode = if which & 64 == 0 { Mode::Message } else { Mode::Stream };
        let settings = TcpSettings { mode, ..TcpSettings::default() };
        let port = 80 + u16::from(which >> 7);
        match what % 16 {
            0 => {
                let to = SocketAddr::new(peer, port);
                let _ = self.adapter.tcp_connect(now, qp, to, None, &settings);
            }
            1 => {
                let made = match what & 16 {
                    0 => self.adapter.tcp_listen(port, &settings, 2),
                    _ => self.adapter.tcp_listen_deferred(port, &settings, 2),
                };
                self.listener = made.ok().map(|(listener, _)| listener).or(self.listener);
            }
            2 => {
                if let Some(listener) = self.listener {
                    let _ = self.adapter.tcp_offer(now, listener, qp);
                }
            }
            3 => {
                if let Some(listener) = self.listener.take_if(|_| which & 32 != 0) {
                    self.adapter.tcp_unlisten(listener);
                }
            }
            4 => drop(self.adapter.tcp_close(now, qp)),
            5 => drop(self.adapter.tcp_abort(now, qp)),
            6 => drop(self.adapter.udp_bind(qp, u16::from(which & 64))),
            7 => {
                let states = [QpState::Init, QpState::Rts, QpState::Sqd, QpState::Err];
                self.modify(now, qp, states[usize::from(which >> 5) % 4]);
            }
            8 if which > 250 => self.modify(now, qp, QpState::Reset),
            9 => {
                if let Some(request) = self.requests.pop() {
                    let _ = match which & 8 {
                        0 => self.adapter.tcp_accept(now, request, qp),
                        _ => self.adapter.tcp_refuse(now, request),
                    };
                }
            }
            10..=12 => {
                let sges = self.sges(input);
                self.posted += u64::from(self.adapter.post_recv(now, qp, 1, &sges).is_ok());
            }
            _ => {
                let sges = self.sges(input);
                let bytes = [7; 32];
                let payload = match what & 16 {
                    0 => Payload::Sges(&sges),
                    _ => Payload::Inline(&bytes[..usize::from(which % 33)]),
                };
                let udp = usize::from(which) % QPS + 1 == QPS;
                let to = SocketAddr::new(peer, u16::from(which & 64));
                let to = if udp { To::Address(to) } else { To::Peer };
                let flags = SendFlags::empty();
                let wr = SendWr { wr_id: 2, to, op: SendOp::Send, flags, payload };
                self.posted += u64::from(self.adapter.post_send(qp, &wr).is_ok());
                self.adapter.ring_doorbell(now, qp);
            }
        }
    }

    /// Takes what is complete and what has happened, and looks at the memory around the region.
    fn look(&mut self) {
        let mut out = [Completion::default(); 64];
        loop {
            let count = self.adapter.poll_cq(self.cq, &mut out).unwrap();
            self.completed += count as u64;
            if count == 0 {
                break;
            }
            for done in out[..count].iter().filter(|done| done.status == WcStatus::Success) {
                SHARES.reach(if done.wr_id == 1 { "a receive done" } else { "a send done" });
            }
        }
        assert!(self.completed <= self.posted, "more is complete than was posted");
        while let Some(event) = self.adapter.poll_event() {
            match event {
                Event::TcpRequest { connection, flow: Some(_), .. } => {
                    self.requests.push(connection);
                }
                Event::Tcp { change: TcpChange::Connected, .. } => SHARES.reach("a connection"),
                _ => {}
            }
        }
    }

    /// What is not registered is as it was.
    fn check_outside(&self) {
        for at in [0, 2 * LEN] {
            let mut bytes = [0; LEN];
            self.around.read(at, &mut bytes).unwrap();
            assert!(bytes == [PATTERN; LEN], "memory next to the region");
        }
    }
}

struct World {
    now: Time,
    hosts: [Host; 2],
    link: Vec<(usize, Vec<u8>)>,
    /// The last frame that each has sent.
    sent: [Vec<u8>; 2],
}

impl World {
    fn flush(&mut self) {
        let mut out = vec![0; MTU as usize + 14];
        for host in 0..2 {
            for frames in 0.. {
                assert!(frames < 20_000, "no end");
                let adapter = &mut self.hosts[host].adapter;
                let Some(frame) = adapter.transmit_frame(self.now, &mut out) else {
                    // It may have more for its own address than it takes at a time.
                    if adapter.has_frames() {
                        continue;
                    }
                    break;
                };
                let bytes = &out[..frame.len];
                let (packet, _) = ipv6::Repr::parse(bytes).expect("a packet");
                let (from, to) = (packet.source.into(), packet.destination.into());
                let len = bytes.len() - ipv6::LEN;
                let others = Sum::of_pseudo_header(from, to, bytes[6], len);
                let in_parts = bytes[6] == next_header::FRAGMENT;
                let valid = in_parts || others.and(sum(&bytes[ipv6::LEN..])).is_valid();
                assert!(valid, "a wrong checksum");
                if self.link.len() < 64 {
                    self.sent[host] = bytes.to_vec();
                    self.link.push((1 - host, bytes.to_vec()));
                }
            }
            assert!(!self.hosts[host].adapter.has_frames());
        }
    }

    fn deliver(&mut self, input: &mut Input<'_>) {
        if self.link.is_empty() {
            return;
        }
        let (how, at) = (input.byte(), usize::from(input.byte()) % self.link.len());
        let (to, mut frame) = match how % 8 {
            7 => self.link[at].clone(),
            0..=4 => self.link.remove(0),
            _ => self.link.remove(at),
        };
        if how & 8 != 0 {
            // The header of TCP, mostly, with a checksum that is right.
            let at = ipv6::LEN + usize::from(input.byte()) % 60;
            if let Some(octet) = frame.get_mut(at) {
                *octet = input.byte();
            }
            let field = ipv6::LEN + if frame[6] == 6 { 16 } else { 6 };
            if field + 2 <= frame.len() {
                frame[field..field + 2].fill(0);
                let len = frame.len() - ipv6::LEN;
                let others = Sum::of_pseudo_header(address(1 - to), address(to), frame[6], len);
                let value = others.and(sum(&frame[ipv6::LEN..])).checksum();
                frame[field..field + 2].copy_from_slice(&value.to_be_bytes());
            }
        }
        if how & 32 != 0 {
            frame.truncate(usize::from(input.byte()));
        }
        let frame = Frame { bytes: &frame, checked: how & 64 != 0 };
        self.hosts[to].adapter.handle_frame(self.now, &frame);
    }

    /// A frame of a third party for a host.
    fn make_up(&mut self, to: usize, input: &mut Input<'_>) {
        SHARES.reach("made up");
        let checked = input.flag();
        let (own, other) = (address(to), address(1 - to));
        let place = Place { own, other, station: None, sent: &self.sent[to] };
        let frame = place.frame(input);
        let frame = Frame { bytes: &frame, checked };
        self.hosts[to].adapter.handle_frame(self.now, &frame);
    }

    /// Time goes on, to the next deadline or beyond.
    fn pass(&mut self, more: u64) {
        let deadlines = self.hosts.iter().filter_map(|host| host.adapter.poll_timeout());
        let next = deadlines.min().map_or(0, |at| at.0);
        self.now = Time(self.now.0.max(next.min(self.now.0 + 400_000_000_000)) + more);
        // Frames that were kept back meanwhile may have set timers that ran out: a second round is enough.
        let stale = (0..2).all(|_| {
            self.hosts.iter_mut().for_each(|host| host.adapter.handle_timeout(self.now));
            self.flush();
            let over = |host: &Host| host.adapter.poll_timeout().is_some_and(|at| at <= self.now);
            self.hosts.iter().any(over)
        });
        assert!(!stale, "a stale deadline");
    }
}

fuzz_target!(|bytes: &[u8]| {
    SHARES.begin();
    let mut input = Input(bytes);
    let mut world = World {
        now: Time(1_000_000_000),
        hosts: [Host::new(0), Host::new(1)],
        link: Vec::new(),
        sent: [Vec::new(), Vec::new()],
    };
    for host in &mut world.hosts {
        for index in 0..QPS {
            host.modify(world.now, host.qps[index], QpState::Init);
        }
    }
    // Something to begin with, unless they do without.
    let kind = input.byte();
    if kind & 1 == 0 {
        let mode = if kind & 2 == 0 { Mode::Message } else { Mode::Stream };
        let settings = TcpSettings { mode, ..TcpSettings::default() };
        let (now, [one, other]) = (world.now, &mut world.hosts);
        let (listener, _) = other.adapter.tcp_listen(80, &settings, 4).unwrap();
        other.adapter.tcp_offer(now, listener, other.qps[0]).unwrap();
        other.listener = Some(listener);
        let to = SocketAddr::new(address(1), 80);
        one.adapter.tcp_connect(now, one.qps[0], to, None, &settings).unwrap();
        for _ in 0..8 {
            world.flush();
            world.deliver(&mut Input(&[]));
        }
    }
    for _ in 0..STEPS {
        if input.is_over() {
            break;
        }
        let what = input.byte();
        let host = usize::from(what >> 7);
        match what % 8 {
            3 if what & 16 != 0 => world.make_up(host, &mut input),
            0..=3 => world.deliver(&mut input),
            4..=6 => {
                // Somebody else, or itself.
                let peer = if what & 32 == 0 { 1 - host } else { host };
                world.hosts[host].call(world.now, address(peer), &mut input);
            }
            _ => {
                let more = u64::from(input.count()) * 10_000;
                world.pass(more);
            }
        }
        world.flush();
        world.hosts.iter_mut().for_each(Host::look);
    }
    // In error everything that was posted completes, once; and nothing is left to do.
    for host in &mut world.hosts {
        for index in 0..QPS {
            host.modify(world.now, host.qps[index], QpState::Err);
        }
        host.look();
        host.check_outside();
        assert!(
            host.posted > u64::MAX / 4 || host.completed == host.posted,
            "something is missing"
        );
    }
    for _ in 0..10_000 {
        world.pass(0);
        world.link.clear();
        let end = Time(world.now.0 + 1_000_000_000_000);
        if world.hosts.iter().all(|host| host.adapter.poll_timeout().is_none_or(|at| at > end)) {
            return;
        }
    }
    panic!("it does not come to rest");
});
