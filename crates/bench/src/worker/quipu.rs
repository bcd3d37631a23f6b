//! Quipu itself: an engine with one queue pair, of the service RC or UD, as a program has it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, AddressVector, ChannelId, Completion, CqId, Crc, Gid, PdId, QpAttr, QpAttrMask, QpCap,
    QpId, QpInit, QpNum, QpState, QpType, Region, Sge, To, WcStatus,
};
use quipu_host::{Config, ContextId, Engine, SameHost, SharedPages};
use serde::{Deserialize, Serialize};

use super::{End, Setup, Slice, What, datagrams, overhead, quipu_slices};
use crate::model::{Kind, Overhead, Path};

/// Completions taken by one poll.
pub(super) const BATCH: usize = 16;
/// Receives that are posted at most.
pub(super) const RECEIVES: u64 = 512;
/// Sends that are posted at most.
const SENDS: u32 = 256;

/// Where an end is, and what the other may access.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Address {
    gid: [u8; 16],
    qp: u32,
    /// The start of the memory that the other end writes and reads.
    pub(super) memory: u64,
    pub(super) rkey: u32,
}

/// An engine with one queue pair and two buffers: what goes out and what comes in.
pub(super) struct Node {
    pub(super) engine: Arc<Engine>,
    pub(super) cq: CqId,
    pub(super) channel: ChannelId,
    pub(super) qp: QpId,
    pub(super) memory: Segment,
    pub(super) region: Region,
    pub(super) first: bool,
    pub(super) path: Path,
    pub(super) depth: u64,
    pub(super) signal_every: u64,
    /// Bytes of each buffer; the second starts there.
    pub(super) half: u64,
    pub(super) peer: Option<Address>,
    /// Whom messages go to.
    pub(super) to: To,
    pd: PdId,
    number: QpNum,
}

/// An engine on the loopback address, with the settings that are measured.
pub(super) fn open_engine(path: Path, what: What) -> Result<Arc<Engine>> {
    let shared_pages = match what {
        What::QuipuShared => SharedPages::Registered,
        _ => SharedPages::Never,
    };
    let same_host = match path {
        Path::SameHost | Path::Udp => SameHost::Auto,
        Path::Tcp => SameHost::Never,
    };
    let from_env = Config::from_env().context("the environment")?;
    let loopback = Some(std::net::Ipv4Addr::LOCALHOST.into());
    let address = from_env.address.or(loopback);
    let crc = if what == What::QuipuCrc { Crc::Always } else { from_env.crc };
    Engine::open(Config { address, same_host, shared_pages, crc, ..from_env })
        .context("opening the engine")
}

/// A queue pair with room for so much.
pub(super) fn create_qp(
    engine: &Engine,
    qp_type: QpType,
    (context, pd, cq): (ContextId, PdId, CqId),
    (sends, receives): (u32, u32),
) -> Result<(QpId, QpNum)> {
    let cap = QpCap {
        max_send_wr: sends,
        max_recv_wr: receives,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: false };
    let (qp, number, _) = engine.create_qp(context, &init).context("creating a queue pair")?;
    Ok((qp, number))
}

/// Takes a queue pair from RESET to RTS, towards a peer.
pub(super) fn connect_qp(engine: &Engine, qp: QpId, gid: Gid, number: QpNum) -> Result<()> {
    type M = QpAttrMask;
    let reads = engine.limits()?.max_rd_atomic;
    let mut attr = QpAttr {
        state: QpState::Init,
        port_num: 1,
        access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
        ..QpAttr::default()
    };
    let mask = M::STATE | M::PORT | M::PKEY_INDEX | M::ACCESS_FLAGS;
    engine.modify_qp(qp, &attr, mask).context("to INIT")?;
    attr.state = QpState::Rtr;
    attr.path_mtu = 5;
    attr.dest_qp_num = number.0;
    attr.av = AddressVector { dgid: gid, is_global: true, port_num: 1, ..AddressVector::default() };
    attr.max_dest_rd_atomic = reads;
    attr.min_rnr_timer = 1;
    let mask = M::STATE
        | M::AV
        | M::PATH_MTU
        | M::DEST_QPN
        | M::RQ_PSN
        | M::MAX_DEST_RD_ATOMIC
        | M::MIN_RNR_TIMER;
    engine.modify_qp(qp, &attr, mask).context("to RTR")?;
    attr.state = QpState::Rts;
    attr.timeout = 18;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = reads;
    let mask =
        M::STATE | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC;
    engine.modify_qp(qp, &attr, mask).context("to RTS")
}

impl Node {
    pub(super) fn new(setup: &Setup, path: Path) -> Result<Self> {
        let engine = open_engine(path, setup.what)?;
        let (context, _) = engine.open_context()?;
        let pd = engine.alloc_pd()?;
        let (channel, _) = engine.create_channel()?;
        let (cq, _) = engine.create_cq(context, 2048, Some(channel), 0)?;
        // A datagram has its route header in front of it.
        let half = (setup.max_size + datagrams::GRH).next_multiple_of(4096);
        let memory = Segment::heap(usize::try_from(2 * half)?);
        // Programs that measure have touched their memory before.
        memory.zero()?;
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let region = engine.reg_segment(pd, &memory, None, access)?;
        let receives = u32::try_from(RECEIVES)?;
        let service = if path == Path::Udp { QpType::Ud } else { QpType::Rc };
        let (qp, number) = create_qp(&engine, service, (context, pd, cq), (SENDS, receives))?;
        Ok(Self {
            engine,
            cq,
            channel,
            qp,
            memory,
            region,
            first: setup.first,
            path,
            depth: u64::from(setup.depth),
            signal_every: u64::from(setup.signal_every),
            half,
            peer: None,
            to: To::Peer,
            pd,
            number,
        })
    }

    /// Bytes that go out.
    pub(super) fn outgoing(&self, size: u64) -> Result<Sge> {
        let len = u32::try_from(size.min(self.half))?;
        Ok(Sge { addr: self.memory.addr() as u64, len, lkey: self.region.key })
    }

    /// Where bytes come in: a datagram with its route header.
    pub(super) fn incoming(&self, size: u64) -> Result<Sge> {
        let header = if self.path == Path::Udp { datagrams::GRH } else { 0 };
        let sge = self.outgoing(size + header)?;
        Ok(Sge { addr: sge.addr + self.half, ..sge })
    }

    /// The other end.
    pub(super) fn peer(&self) -> Result<Address> {
        self.peer.context("not connected")
    }

    /// Takes completions that there are; an error if one failed.
    #[inline]
    pub(super) fn poll<'a>(&self, out: &'a mut [Completion; BATCH]) -> Result<&'a [Completion]> {
        let found = self.engine.poll_cq(self.cq, out)?;
        let out = &out[..found];
        match out.iter().find(|completion| completion.status != WcStatus::Success) {
            None => Ok(out),
            Some(bad) => bail!("a request failed: {:?}", bad.status),
        }
    }
}

impl End for Node {
    fn address(&self) -> String {
        let address = Address {
            gid: self.engine.gid().0,
            qp: self.number.0,
            memory: self.memory.addr() as u64 + self.half,
            rkey: self.region.key.0,
        };
        serde_json::to_string(&address).unwrap_or_default()
    }

    fn connect(&mut self, address: &str) -> Result<()> {
        ensure!(self.peer.is_none(), "connected already");
        let peer: Address = serde_json::from_str(address).context("the other end's address")?;
        let (gid, number) = (Gid(peer.gid), QpNum(peer.qp));
        match self.path {
            Path::Udp => self.to = datagrams::address(&self.engine, self.pd, self.qp, gid, number)?,
            _ => connect_qp(&self.engine, self.qp, gid, number)?,
        }
        self.peer = Some(peer);
        Ok(())
    }

    fn run(&mut self, slice: &Slice, armed: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        ensure!(slice.size <= self.half, "a message larger than the buffers");
        match (self.path, slice.test.kind) {
            (Path::Udp, Kind::Stream) => datagrams::stream(self, slice, armed),
            _ => quipu_slices::run(self, slice, armed),
        }
    }

    fn overhead(
        &mut self,
        (size, burst, rounds): (u64, u64, u64),
        armed: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Overhead> {
        overhead::measure(self, (size, burst, rounds), armed)
    }
}
