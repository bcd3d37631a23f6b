//! An engine on a packet link whose other end is the kernel's, and its queue pairs.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu_host::inet::stack::ListenerId;
use quipu_host::inet::tcp::Mode;
use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, Completion, CqId, MrId, Payload, PdId, QpCap, QpId, QpInit, QpType, Region, SendFlags,
    SendOp, SendWr, Sge, TcpChange, TcpSettings, To, WcStatus,
};
use quipu_host::packet::{self, LinkSpec};
use quipu_host::{Config, ContextId, Engine, QpipConfig};

use super::pairs::{Plan, fill, first_wrong};
use super::socket::{KERNEL, OURS};
use super::space::{Offload, ip, offload, wait_until_local};

/// Nothing here takes that long unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Sends that are posted at once, and their length.
const SENDS: u64 = 8;
const SEND: u64 = 48_000;
/// Receives that a queue pair has room for at least.
const MOST: u64 = 16;
/// In the number of a send.
const IS_SEND: u64 = 1 << 32;

/// What is between the adapter and the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    Tap,
    Packet,
    Xdp,
}

impl Link {
    /// Makes the devices: what the adapter is to open, and what the kernel has.
    fn make(self, mtu: u32) -> (&'static str, &'static str) {
        if self == Self::Tap {
            ip("tuntap add dev qp0 mode tap vnet_hdr");
            ip(&format!("link set qp0 mtu {mtu} up"));
            return ("tap:qp0", "qp0");
        }
        ip("link add ours type veth peer name theirs");
        for end in ["ours", "theirs"] {
            ip(&format!("link set {end} mtu {mtu} up"));
        }
        if self == Self::Packet {
            return ("packet:ours", "theirs");
        }
        // What a veth's other end leaves undone nobody says to an XDP socket.
        offload("theirs", Offload::Checksum, false);
        ("xdp:ours", "theirs")
    }
}

/// An adapter with the addresses [`OURS`], whose neighbour is the kernel with [`KERNEL`].
pub struct Adapter {
    pub engine: Arc<Engine>,
    /// The kernel's interface.
    pub interface: &'static str,
    own: [IpAddr; 2],
    pub listener: ListenerId,
    pub port: u16,
}

impl Adapter {
    /// None, and said, where this link cannot be had.
    pub fn new(link: Link, mtu: u32) -> Option<Self> {
        if link == Link::Tap && std::fs::File::open("/dev/net/tun").is_err() {
            println!("SKIPPED: no /dev/net/tun here");
            return None;
        }
        let (spec, interface) = link.make(mtu);
        let spec: LinkSpec = spec.parse().unwrap();
        if link == Link::Xdp
            && let Err(error) = packet::open(&spec)
        {
            println!("SKIPPED: {error}");
            return None;
        }
        let adapter = Self::on(spec, OURS, KERNEL, mtu);
        adapter.has_neighbour(interface);
        Some(Self { interface, ..adapter })
    }

    /// Two adapters, each with an XDP socket at its end of a veth pair. The second has the kernel's
    /// addresses, and the kernel none. None, and said, where there are no such sockets.
    pub fn pair(mtu: u32) -> Option<[Self; 2]> {
        let (ours, _) = Link::Xdp.make(mtu);
        let specs = [ours, "xdp:theirs"].map(|spec| spec.parse::<LinkSpec>().unwrap());
        for spec in &specs {
            if let Err(error) = packet::open(spec) {
                println!("SKIPPED: {error}");
                return None;
            }
        }
        let [ours, theirs] = specs;
        Some([Self::on(ours, OURS, KERNEL, mtu), Self::on(theirs, KERNEL, OURS, mtu)])
    }

    /// An adapter on a link, with these addresses and routers.
    pub fn on(spec: LinkSpec, own: [&str; 2], routers: [&str; 2], mtu: u32) -> Self {
        let prefixes = [24, 64];
        let address = |version: usize| (own[version].parse().unwrap(), prefixes[version]);
        let qpip = QpipConfig {
            addresses: vec![address(0), address(1)],
            gateways: routers.map(|address| address.parse().unwrap()).to_vec(),
            ..QpipConfig::new(spec)
        };
        let engine = Engine::open(Config {
            address: Some([127, 0, 0, 1].into()),
            counters: false,
            qpip: Some(qpip),
            ..Config::default()
        })
        .unwrap();
        assert_eq!(engine.qpip_info().unwrap().mtu, mtu);
        let (listener, port) = engine.tcp_listen(0, &settings(), 16).unwrap();
        Self { engine, interface: "", own: own.map(|it| it.parse().unwrap()), listener, port }
    }

    /// The kernel gets its addresses on an interface behind which the adapter is.
    pub fn has_neighbour(&self, interface: &str) {
        ip(&format!("address add {}/24 dev {interface}", KERNEL[0]));
        ip(&format!("address add {}/64 dev {interface} nodad", KERNEL[1]));
        wait_until_local(KERNEL[1]);
    }

    /// Where the adapter listens.
    pub fn address(&self, version: usize) -> SocketAddr {
        SocketAddr::new(self.own[version], self.port)
    }

    /// A queue pair with so many receives of so many octets.
    pub fn queue_pair(&self, receives: (u64, u64)) -> QueuePair {
        let mut qp = QueuePair::new(&self.engine, receives);
        qp.post_receives();
        qp
    }

    /// The queue pair is there for the next connection.
    pub fn offer(&self, qp: &QueuePair) {
        self.engine.tcp_offer(self.listener, qp.qp).unwrap();
    }
}

pub fn settings() -> TcpSettings {
    TcpSettings { mode: Mode::Stream, ..TcpSettings::default() }
}

/// A queue pair, with everything of its own, and what has become of its two streams.
pub struct QueuePair {
    engine: Arc<Engine>,
    pub context: ContextId,
    pd: PdId,
    cq: CqId,
    pub qp: QpId,
    memory: Segment,
    region: Region,
    receives: (u64, u64),
    /// Whose part it plays: the adapter's, unless both ends are adapters.
    pub adapters: bool,
    /// Octets of sends that are posted, and that are complete.
    posted: u64,
    pub sent: u64,
    sends: u64,
    done: u64,
    /// Octets that have come, and the first that was not the right one.
    pub received: u64,
    wrong: Option<u64>,
    pub connected: bool,
    pub peer_closed: bool,
    closed: bool,
    pub end: Option<TcpChange>,
}

impl QueuePair {
    fn new(engine: &Arc<Engine>, receives: (u64, u64)) -> Self {
        let most = receives.0.max(MOST);
        let (context, _) = engine.open_context().unwrap();
        engine.tcp_events(context).unwrap();
        let pd = engine.alloc_pd().unwrap();
        let (cq, _) = engine.create_cq(context, 256, None, 0).unwrap();
        let memory = Segment::heap((SENDS * SEND + most * receives.1) as usize);
        let region = engine.reg_segment(pd, &memory, None, Access::LOCAL_WRITE).unwrap();
        let cap = QpCap {
            max_send_wr: SENDS as u32,
            max_recv_wr: most as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let qp_type = QpType::Tcp;
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: false };
        let (qp, _, _) = engine.create_qp(context, &init).unwrap();
        let attr = quipu_host::nic::QpAttr {
            state: quipu_host::nic::QpState::Init,
            port_num: 1,
            ..Default::default()
        };
        type Mask = quipu_host::nic::QpAttrMask;
        engine.modify_qp(qp, &attr, Mask::STATE | Mask::PKEY_INDEX | Mask::PORT).unwrap();
        Self {
            engine: Arc::clone(engine),
            context,
            pd,
            cq,
            qp,
            memory,
            region,
            receives,
            adapters: true,
            posted: 0,
            sent: 0,
            sends: 0,
            done: 0,
            received: 0,
            wrong: None,
            connected: false,
            peer_closed: false,
            closed: false,
            end: None,
        }
    }

    /// Connects it with a port of the kernel.
    pub fn connect(&self, to: SocketAddr, from: Option<u16>) {
        self.engine.tcp_connect(self.qp, to, from, &settings()).unwrap();
    }

    fn sge(&self, at: u64, len: u64) -> [Sge; 1] {
        let addr = self.memory.addr() as u64 + at;
        [Sge { addr, len: len as u32, lkey: self.region.key }]
    }

    fn place(&self, receive: u64) -> u64 {
        SENDS * SEND + receive * self.receives.1
    }

    pub fn post_receives(&mut self) {
        (0..self.receives.0).for_each(|receive| self.post_receive(receive));
    }

    /// Posts more receives, up to so many.
    pub fn grow(&mut self, receives: u64) {
        (self.receives.0..receives).for_each(|receive| self.post_receive(receive));
        self.receives.0 = receives;
    }

    fn post_receive(&self, receive: u64) {
        let room = self.sge(self.place(receive), self.receives.1);
        // After the end it is refused.
        let _ = self.engine.post_recv(self.qp, receive, &room);
    }

    /// Posts what there is room for of the octets up to `total`.
    pub fn send_up_to(&mut self, total: u64) {
        while self.posted < total && self.sends - self.done < SENDS && self.end.is_none() {
            let at = self.sends % SENDS * SEND;
            let len = SEND.min(total - self.posted);
            self.memory.write(at as usize, &fill(self.adapters, self.posted, len)).unwrap();
            let wr = SendWr {
                wr_id: IS_SEND | len,
                to: To::Peer,
                op: SendOp::Send,
                flags: SendFlags::SIGNALED,
                payload: Payload::Sges(&self.sge(at, len)),
            };
            self.engine.post_send(self.qp, &wr).unwrap();
            self.posted += len;
            self.sends += 1;
        }
    }

    pub fn close(&mut self) {
        if !std::mem::replace(&mut self.closed, true) {
            self.engine.tcp_close(self.qp).unwrap();
        }
    }

    /// Looks what has happened.
    pub fn turn(&mut self) {
        let mut out = [Completion::default(); 32];
        loop {
            let found = self.engine.poll_cq(self.cq, &mut out).unwrap();
            out[..found].iter().for_each(|completion| self.completed(completion));
            if found == 0 {
                break;
            }
        }
        let mut end = None;
        while let Some(event) = self.engine.take_tcp_event(self.context).unwrap() {
            match event.change {
                TcpChange::Connected => self.connected = true,
                TcpChange::PeerClosed => self.peer_closed = true,
                other => end = Some(other),
            }
        }
        if end.is_some() {
            // Whatever came has completed before.
            self.turn();
            self.end = end;
        }
        std::thread::yield_now();
    }

    fn completed(&mut self, completion: &Completion) {
        let good = completion.status == WcStatus::Success;
        if completion.wr_id & IS_SEND != 0 {
            self.done += 1;
            self.sent += if good { completion.wr_id & !IS_SEND } else { 0 };
        } else if good && completion.byte_len > 0 {
            let mut came = vec![0; completion.byte_len as usize];
            self.memory.read(self.place(completion.wr_id) as usize, &mut came).unwrap();
            self.wrong = self.wrong.or(first_wrong(!self.adapters, self.received, &came));
            self.received += came.len() as u64;
            self.post_receive(completion.wr_id);
        }
    }

    /// Lives until `done`.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < deadline, "{what}: {self:?}");
            self.turn();
        }
    }

    /// Lives for some time.
    pub fn during(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.turn();
        }
    }

    /// Does its part of a plan; whether the connection has ended.
    pub fn step(&mut self, plan: &Plan) -> bool {
        if self.connected && self.end.is_none() && (self.peer_closed || !plan.waits()) {
            self.send_up_to(plan.back);
            if self.posted == plan.back {
                self.close();
            }
        }
        self.end.is_some()
    }

    /// Everything came and everything went.
    #[track_caller]
    pub fn check(&self, what: &str, plan: &Plan) {
        assert_eq!(self.end, Some(TcpChange::Closed), "{what}: {self:?}");
        assert_eq!((self.received, self.sent), (plan.there, plan.back), "{what}: {self:?}");
        assert_eq!(self.wrong, None, "{what}");
    }
}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { connected, peer_closed, end, posted, sent, received, .. } = self;
        write!(f, "connected {connected}, peer closed {peer_closed}, end {end:?}, ")?;
        write!(f, "{posted} posted, {sent} sent, {received} received")
    }
}

/// Destroys what a queue pair is made of, in the order that the adapter asks for.
pub fn destroy(engine: &Engine, (qp, cq, mr, pd, context): (QpId, CqId, MrId, PdId, ContextId)) {
    let _ = engine.destroy_qp(qp);
    let _ = engine.destroy_cq(cq);
    let _ = engine.dereg_mr(mr);
    let _ = engine.dealloc_pd(pd);
    let _ = engine.close_context(context);
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let Self { engine, qp, cq, region, pd, context, .. } = self;
        destroy(engine, (*qp, *cq, region.id, *pd, *context));
    }
}
