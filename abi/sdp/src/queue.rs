//! A queue pair with its registered buffers, and how it is connected.

use std::cell::Cell;
use std::os::fd::RawFd;

use quipu_cabi::Errno;
use quipu_host::connection::{Ece, Param, QpParams};
use quipu_host::nic::{
    Access, AddressVector, ChannelId, CqId, Gid, Marking, Payload, QpAttr, QpAttrMask as Mask,
    QpCap, QpId, QpInit, QpNum, QpState, QpType, Region, SendFlags, SendOp, SendWr, Sge, To,
};
use quipu_mem::Segment;
use quipu_observe::Mark;

use crate::adapter::Adapter;
use crate::sys::errno_of;

/// Receive buffers, and bytes of each.
pub(crate) const BUFFERS: u16 = 64;
pub(crate) const BUFFER_SIZE: u32 = 32 << 10;
/// Send buffers. Small messages need none.
pub(crate) const SEND_BUFFERS: u16 = 48;
/// Send requests that may be under way.
pub(crate) const SENDS: u32 = 128;
/// Bytes of a message that are copied when it is posted.
pub(crate) const INLINE: usize = 256;
/// RDMA reads under way in each direction, as OFED asks for.
const READS: u8 = 4;
/// What the kind of a work request is, in the upper half of its number.
pub(crate) const RECEIVE: u64 = 0;
pub(crate) const SEND: u64 = 1;
pub(crate) const READ: u64 = 2;

/// A queue pair with posted receives, before and while it is connected.
pub(crate) struct Queue {
    pub(crate) adapter: &'static Adapter,
    qp: QpId,
    pub(crate) qpn: QpNum,
    pub(crate) cq: CqId,
    pub(crate) channel: ChannelId,
    /// Readable when a completion has come that was asked for.
    pub(crate) fd: RawFd,
    pub(crate) memory: Segment,
    region: Region,
    /// The service level that a rule gives it, or 0.
    by_rule: Cell<u8>,
}

impl Queue {
    pub(crate) fn new(adapter: &'static Adapter) -> Result<Self, Errno> {
        let engine = &adapter.engine;
        let failed = |error| errno_of(&error);
        let slots = usize::from(BUFFERS) + usize::from(SEND_BUFFERS);
        let memory = engine.allocate(slots * BUFFER_SIZE as usize).map_err(failed)?;
        let access = Access::LOCAL_WRITE;
        let region = engine.reg_segment(adapter.pd, &memory, None, access).map_err(failed)?;
        let undo_region = || drop(engine.dereg_mr(region.id));
        let (channel, fd) = engine.create_channel().map_err(|error| {
            undo_region();
            errno_of(&error)
        })?;
        let undo_channel = || {
            let _ = engine.destroy_channel(channel);
            undo_region();
        };
        let entries = u32::from(BUFFERS) + SENDS + 1;
        let made = engine.create_cq(adapter.context, entries, Some(channel), 0);
        let (cq, _) = made.map_err(|error| {
            undo_channel();
            errno_of(&error)
        })?;
        let cap = QpCap {
            max_send_wr: SENDS + 1,
            max_recv_wr: BUFFERS.into(),
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: INLINE as u32,
        };
        let init = QpInit {
            pd: adapter.pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            cap,
            qp_type: QpType::Rc,
            sq_sig_all: false,
        };
        let (qp, qpn, _) = engine.create_qp(adapter.context, &init).map_err(|error| {
            let _ = engine.destroy_cq(cq);
            undo_channel();
            errno_of(&error)
        })?;
        let queue =
            Self { adapter, qp, qpn, cq, channel, fd, memory, region, by_rule: Cell::new(0) };
        queue.prepare()?;
        Ok(queue)
    }

    /// Takes the queue pair to INIT and posts all receives.
    fn prepare(&self) -> Result<(), Errno> {
        let attr = QpAttr {
            state: QpState::Init,
            access: Access::REMOTE_READ,
            port_num: 1,
            ..QpAttr::default()
        };
        self.modify(&attr, Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS)?;
        (0..BUFFERS).try_for_each(|slot| self.post_receive(slot, BUFFER_SIZE))
    }

    pub(crate) fn modify(&self, attr: &QpAttr, mask: Mask) -> Result<(), Errno> {
        self.adapter.engine.modify_qp(self.qp, attr, mask).map_err(|error| errno_of(&error))
    }

    /// How what it sends is marked: for captures.
    pub(crate) fn mark(&self) -> Mark {
        let engine = &self.adapter.engine;
        let av = engine.query_qp(self.qp).map(|info| info.attr.av);
        let Ok(marking) = av.and_then(|av| engine.marking_of(&av)) else { return Mark::default() };
        let Marking { traffic_class, service_level, lane } = marking;
        Mark { traffic_class, service_level, lane }
    }

    /// Connects it as connection management says. A rule for its service ID counts more than the service
    /// level and traffic class that the program has asked for.
    pub(crate) fn connect(&self, params: &QpParams, asked: (u8, u8)) -> Result<(), Errno> {
        self.by_rule.set(params.path.service_level);
        let av = AddressVector {
            dgid: Gid(params.path.dgid),
            sgid_index: params.path.sgid_index,
            sl: self.level(asked.0),
            traffic_class: asked.1,
            hop_limit: 64,
            is_global: true,
            port_num: 1,
            ..AddressVector::default()
        };
        let attr = QpAttr {
            state: QpState::Rtr,
            path_mtu: params.path_mtu,
            dest_qp_num: params.dest_qpn,
            rq_psn: params.rq_psn,
            max_dest_rd_atomic: READS,
            min_rnr_timer: params.min_rnr_timer,
            av,
            timeout: params.timeout,
            retry_cnt: params.retry_count,
            rnr_retry: params.rnr_retry,
            sq_psn: params.sq_psn,
            max_rd_atomic: params.max_rd_atomic.min(READS),
            ..QpAttr::default()
        };
        let to_rtr = Mask::STATE | Mask::AV | Mask::PATH_MTU | Mask::DEST_QPN | Mask::RQ_PSN;
        self.modify(&attr, to_rtr | Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER)?;
        let to_rts = Mask::STATE | Mask::SQ_PSN | Mask::TIMEOUT | Mask::RETRY_CNT;
        let attr = QpAttr { state: QpState::Rts, ..attr };
        self.modify(&attr, to_rts | Mask::RNR_RETRY | Mask::MAX_QP_RD_ATOMIC)
    }

    fn level(&self, asked: u8) -> u8 {
        match self.by_rule.get() {
            0 => asked,
            level => level,
        }
    }

    /// Has what is sent from now on be of a service level and a traffic class.
    pub(crate) fn set_level(&self, (level, class): (u8, u8)) -> Result<(), Errno> {
        let set = self.adapter.engine.set_service_level(self.qp, self.level(level), class);
        set.map_err(|error| errno_of(&error))
    }

    /// What it says of itself to the peer's connection management.
    pub(crate) fn param(&self, private_data: &[u8]) -> Param {
        Param {
            private_data: private_data.to_vec(),
            responder_resources: READS,
            initiator_depth: READS,
            flow_control: true,
            retry_count: 5,
            rnr_retry_count: 7,
            srq: false,
            qpn: self.qpn.0,
            qkey: 0,
            ece: Ece::default(),
        }
    }

    pub(crate) fn sge(&self, slot: u16, len: u32) -> Sge {
        let addr = self.memory.addr() + self.offset(slot);
        Sge { addr: addr as u64, len, lkey: self.region.key }
    }

    pub(crate) fn offset(&self, slot: u16) -> usize {
        usize::from(slot) * BUFFER_SIZE as usize
    }

    pub(crate) fn post_receive(&self, slot: u16, size: u32) -> Result<(), Errno> {
        let (engine, id) = (&self.adapter.engine, RECEIVE << 32 | u64::from(slot));
        let posted = engine.post_recv(self.qp, id, &[self.sge(slot, size)]);
        posted.map_err(|error| errno_of(&error))
    }

    pub(crate) fn post(&self, id: u64, op: SendOp, payload: Payload<'_>) -> Result<(), Errno> {
        let inline = matches!(payload, Payload::Inline(_));
        let flags = if inline { SendFlags::INLINE } else { SendFlags::empty() };
        let flags = flags | SendFlags::SIGNALED;
        let wr = SendWr { wr_id: id, to: To::Peer, op, flags, payload };
        self.adapter.engine.post_send(self.qp, &wr).map_err(|error| errno_of(&error))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let engine = &self.adapter.engine;
        let _ = engine.destroy_qp(self.qp);
        let _ = engine.destroy_cq(self.cq);
        let _ = engine.destroy_channel(self.channel);
        let _ = engine.dereg_mr(self.region.id);
    }
}
