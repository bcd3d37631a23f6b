//! What the tests of whole engines share: a node with one queue pair, and how two get connected.

pub mod actor;
pub mod pcapng;

use std::collections::BTreeSet;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, AddressVector, ChannelId, Completion, CqId, Gid, Payload, PdId, QpAttr, QpAttrMask,
    QpCap, QpId, QpInit, QpNum, QpState, QpType, Region, SendFlags, SendOp, SendWr, Sge, To,
};
use quipu_host::{Config, ContextId, Engine, SameHost};

/// Nothing in these tests takes that long unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Requests are repeated after 4.096 us << this, seven times.
pub const TIMEOUT: u8 = 14;

/// An engine on a loopback address.
pub fn engine(address: &str, same_host: SameHost) -> Arc<Engine> {
    if let Ok(filter) = std::env::var("QUIPU_LOG") {
        let _ = tracing_subscriber::fmt().with_env_filter(filter).try_init();
    }
    let address = Some(address.parse().unwrap());
    Engine::open(Config { address, same_host, arena_bytes: 64 << 20, ..Config::default() }).unwrap()
}

/// The inodes of files with such names that a process has mapped.
pub fn mapped(process: &str, name: &str) -> BTreeSet<String> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let files = maps.lines().filter(|line| line.contains(name));
    files.map(|line| line.split_whitespace().nth(4).unwrap().to_owned()).collect()
}

/// A queue pair with memory and queues of its own.
pub struct Node {
    pub engine: Arc<Engine>,
    pub context: ContextId,
    pub pd: PdId,
    pub cq: CqId,
    pub channel: ChannelId,
    pub channel_fd: RawFd,
    pub qp: QpId,
    pub num: QpNum,
    pub memory: Segment,
    pub region: Region,
}

impl Node {
    pub fn new(engine: &Arc<Engine>, bytes: usize) -> Self {
        Self::with_service(engine, bytes, QpType::Rc)
    }

    pub fn with_service(engine: &Arc<Engine>, bytes: usize, qp_type: QpType) -> Self {
        Self::over(engine, Segment::heap(bytes), qp_type)
    }

    /// One of which peers on the same host map the memory.
    pub fn mapped(engine: &Arc<Engine>, bytes: usize) -> Self {
        Self::over(engine, engine.allocate(bytes).unwrap(), QpType::Rc)
    }

    fn over(engine: &Arc<Engine>, memory: Segment, qp_type: QpType) -> Self {
        let (context, _) = engine.open_context().unwrap();
        let pd = engine.alloc_pd().unwrap();
        let (channel, channel_fd) = engine.create_channel().unwrap();
        let (cq, _) = engine.create_cq(context, 1024, Some(channel), 7).unwrap();
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let region = engine.reg_segment(pd, &memory, None, access).unwrap();
        let cap = QpCap {
            max_send_wr: 256,
            max_recv_wr: 256,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
        };
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: false };
        let (qp, num, _) = engine.create_qp(context, &init).unwrap();
        let engine = Arc::clone(engine);
        Self { engine, context, pd, cq, channel, channel_fd, qp, num, memory, region }
    }

    /// Takes the queue pair to RTS, towards a peer.
    pub fn connect(&self, gid: Gid, num: QpNum) {
        connect(&self.engine, self.qp, gid, num);
    }

    pub fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { addr: self.memory.addr() as u64 + offset, len, lkey: self.region.key }
    }

    pub fn addr(&self, offset: u64) -> u64 {
        self.memory.addr() as u64 + offset
    }

    pub fn rkey(&self) -> u32 {
        self.region.key.0
    }

    pub fn post(&self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id, to: To::Peer, op, flags, payload: Payload::Sges(sges) };
        self.engine.post_send(self.qp, &wr).unwrap();
    }

    pub fn receive(&self, wr_id: u64, sges: &[Sge]) {
        self.engine.post_recv(self.qp, wr_id, sges).unwrap();
    }

    pub fn fill(&self, offset: usize, bytes: &[u8]) {
        self.memory.write(offset, bytes).unwrap();
    }

    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.memory.read(offset, &mut out).unwrap();
        out
    }

    /// Polls until there is a completion.
    pub fn poll(&self) -> Completion {
        let mut out = [Completion::default()];
        let end = Instant::now() + PATIENCE;
        while self.engine.poll_cq(self.cq, &mut out).unwrap() == 0 {
            assert!(Instant::now() < end, "no completion");
        }
        out[0]
    }
}

/// Two connected nodes.
pub fn pair(a: &Arc<Engine>, b: &Arc<Engine>, bytes: usize) -> (Node, Node) {
    pair_with(a, b, bytes, TIMEOUT)
}

/// The same with another timeout of requests.
pub fn pair_with(a: &Arc<Engine>, b: &Arc<Engine>, bytes: usize, timeout: u8) -> (Node, Node) {
    let (a, b) = (Node::new(a, bytes), Node::new(b, bytes));
    connect_with(&a.engine, a.qp, b.engine.gid(), b.num, timeout);
    connect_with(&b.engine, b.qp, a.engine.gid(), a.num, timeout);
    (a, b)
}

/// Takes a queue pair to RTS, towards a peer.
pub fn connect(engine: &Engine, qp: QpId, gid: Gid, num: QpNum) {
    connect_with(engine, qp, gid, num, TIMEOUT);
}

/// The same with another timeout of requests.
pub fn connect_with(engine: &Engine, qp: QpId, gid: Gid, num: QpNum, timeout: u8) {
    let mut attr = QpAttr {
        state: QpState::Init,
        port_num: 1,
        access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
        ..QpAttr::default()
    };
    type M = QpAttrMask;
    let mask = M::STATE | M::PORT | M::PKEY_INDEX | M::ACCESS_FLAGS;
    engine.modify_qp(qp, &attr, mask).unwrap();
    attr.state = QpState::Rtr;
    attr.path_mtu = 3;
    attr.dest_qp_num = num.0;
    attr.av = AddressVector { dgid: gid, is_global: true, port_num: 1, ..AddressVector::default() };
    attr.max_dest_rd_atomic = 4;
    attr.min_rnr_timer = 1;
    let mask = M::STATE
        | M::AV
        | M::PATH_MTU
        | M::DEST_QPN
        | M::RQ_PSN
        | M::MAX_DEST_RD_ATOMIC
        | M::MIN_RNR_TIMER;
    engine.modify_qp(qp, &attr, mask).unwrap();
    attr.state = QpState::Rts;
    attr.timeout = timeout;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = 4;
    let mask =
        M::STATE | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC;
    engine.modify_qp(qp, &attr, mask).unwrap();
}
