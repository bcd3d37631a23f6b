//! Queue pairs.

use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};

use quipu_host::connection::QpParams;
use quipu_host::nic::mem::Segment;
use quipu_host::nic::{
    Access, AddressVector, Gid, QpAttr, QpAttrMask as Mask, QpCap, QpId, QpInfo, QpInit, QpNum,
    QpState, QpType, Sge,
};

use crate::cq::CompletionQueue;
use crate::device::{EngineHandle, ProtectionDomain};
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::memory::RemoteMemory;
use crate::post;
use crate::request::Request;
use crate::srq::SharedReceiveQueue;

/// What a queue pair is to be like. Made by [`ProtectionDomain::queue_pair`].
#[derive(Clone, Debug)]
#[must_use]
pub struct QueuePairBuilder {
    pub(crate) pd: ProtectionDomain,
    pub(crate) send_cq: CompletionQueue,
    pub(crate) recv_cq: CompletionQueue,
    pub(crate) srq: Option<SharedReceiveQueue>,
    pub(crate) cap: QpCap,
    qp_type: QpType,
    access: Access,
    timeout: u8,
    retries: u8,
    rnr_retries: u8,
    reads: u8,
    service_level: u8,
}

impl QueuePairBuilder {
    pub(crate) fn new(
        pd: &ProtectionDomain,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
    ) -> Self {
        Self {
            pd: pd.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            cap: QpCap {
                max_send_wr: 128,
                max_recv_wr: 128,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 64,
            },
            qp_type: QpType::Rc,
            access: Access::REMOTE,
            timeout: 14,
            retries: 7,
            rnr_retries: 7,
            reads: 16,
            service_level: 0,
        }
    }

    /// Requests the send queue holds, and pieces of memory of each. 128 and 4 by default.
    pub fn send_queue(mut self, requests: u32, pieces: u32) -> Self {
        (self.cap.max_send_wr, self.cap.max_send_sge) = (requests, pieces);
        self
    }

    /// Requests the receive queue holds, and pieces of memory of each. 128 and 4 by default.
    pub fn recv_queue(mut self, requests: u32, pieces: u32) -> Self {
        (self.cap.max_recv_wr, self.cap.max_recv_sge) = (requests, pieces);
        self
    }

    /// Bytes that an inline request may have. 64 by default.
    pub fn inline_data(mut self, bytes: u32) -> Self {
        self.cap.max_inline_data = bytes;
        self
    }

    /// Takes receives from a shared queue.
    pub fn shared_receive_queue(mut self, srq: &SharedReceiveQueue) -> Self {
        self.srq = Some(srq.clone());
        self
    }

    /// What the peer may do to memory whose keys it has; all by default, as keys say it again.
    pub fn remote_access(mut self, access: Access) -> Self {
        self.access = access & Access::REMOTE;
        self
    }

    /// When a peer that does not answer is given up: after 4 times 4.096 us times 2 to the `timeout`
    /// (0 to 31, 0 for never), for each of 1 + `retries` (0 to 7) tries. 14 and 7 by default, 2.1 s
    /// in all. Over TCP it is 3 s at least.
    pub fn retry(mut self, timeout: u8, retries: u8) -> Self {
        (self.timeout, self.retries) = (timeout, retries);
        self
    }

    /// How often a peer that has posted no receive is tried again, 7 (the default) for without end.
    pub fn rnr_retry(mut self, retries: u8) -> Self {
        self.rnr_retries = retries;
        self
    }

    /// Reads and atomics that are under way at once, each way. 16 by default.
    pub fn reads_in_flight(mut self, reads: u8) -> Self {
        self.reads = reads;
        self
    }

    /// The service level of what it sends, 0 (the default) to 15: it chooses the virtual lane
    /// (`docs/qos.md`).
    /// A rule for the service that [`Connection::open`](crate::Connection::open) connects to counts more.
    pub fn service_level(mut self, level: u8) -> Self {
        self.service_level = level & 15;
        self
    }

    /// Makes the connection unreliable (UC): what the peer cannot take, for lack of a receive or of a
    /// right, is dropped, and nobody is told. What arrives is whole and in order. There are sends and
    /// writes, and no reads, atomics, atomic writes and flushes; a peer that is away, and comes back,
    /// costs only what was sent meanwhile.
    ///
    /// ```
    /// use quipu::{Config, Device, Request};
    ///
    /// # fn main() -> Result<(), quipu::Error> {
    /// let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
    /// let device = Device::open(config)?;
    /// let (pd, cq) = (device.protection_domain()?, device.completion_queue(16)?);
    /// let (left, right) = (
    ///     pd.queue_pair(&cq, &cq).unreliable().build()?,
    ///     pd.queue_pair(&cq, &cq).unreliable().build()?,
    /// );
    /// left.connect(&right.endpoint())?;
    /// right.connect(&left.endpoint())?;
    /// // There is no receive: it is lost, and the sender does not hear of it.
    /// left.post_send(&Request::send_inline(b"lost").id(1))?;
    /// assert_eq!(cq.next()?.wr_id, 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn unreliable(mut self) -> Self {
        self.qp_type = QpType::Uc;
        self
    }

    pub(crate) fn qp_type(&self) -> QpType {
        self.qp_type
    }

    /// Reads and atomics that are under way at once.
    pub(crate) fn reads(&self) -> u8 {
        self.reads
    }

    /// How often a request is repeated, and one that met no receive.
    pub(crate) fn retries(&self) -> (u8, u8) {
        (self.retries, self.rnr_retries)
    }

    /// Has the engine create one of a type; its handle, number and sizes.
    pub(crate) fn create(&self, qp_type: QpType) -> Result<(QpId, QpNum, QpCap), Error> {
        let device = self.pd.device();
        device.owns(&self.send_cq.inner.device)?;
        device.owns(&self.recv_cq.inner.device)?;
        if let Some(srq) = &self.srq {
            device.owns(srq.inner.pd.device())?;
        }
        let opened = &device.opened;
        let init = QpInit {
            pd: self.pd.inner.id,
            send_cq: self.send_cq.inner.id,
            recv_cq: self.recv_cq.inner.id,
            srq: self.srq.as_ref().map(|srq| srq.inner.id),
            cap: self.cap,
            qp_type,
            sq_sig_all: false,
        };
        Ok(opened.engine.create_qp(opened.context, &init)?)
    }

    /// Creates the queue pair. Receives can be posted to it from now on.
    ///
    /// # Errors
    ///
    /// A size beyond the adapter's limits, a queue of another device, or the system refuses a port or a
    /// thread.
    pub fn build(self) -> Result<QueuePair, Error> {
        let (id, num, cap) = self.create(self.qp_type)?;
        // No secret: it only tells this connection from an earlier one between the same two.
        let psn = RandomState::new().hash_one(num.0) as u32 & 0xff_ffff;
        let gid = self.pd.device().gid();
        let endpoint = Endpoint { gid, qp_num: num, psn };
        let qp = QueuePair { id, endpoint, cap, built: self };
        qp.initialise()?;
        Ok(qp)
    }
}

/// One end of a connection, a reliable one unless it was built otherwise: a queue of sends and one of
/// receives.
///
/// Any thread may post. When it is dropped, the connection ends and completions that were not
/// taken vanish.
#[derive(Debug)]
pub struct QueuePair {
    id: QpId,
    endpoint: Endpoint,
    cap: QpCap,
    built: QueuePairBuilder,
}

impl QueuePair {
    fn engine(&self) -> &EngineHandle {
        &self.built.pd.device().opened.engine
    }

    fn initialise(&self) -> Result<(), Error> {
        let attr = QpAttr {
            state: QpState::Init,
            access: self.built.access,
            port_num: 1,
            ..QpAttr::default()
        };
        self.modify(&attr, Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS)
    }

    /// What the peer has to know to connect to this queue pair.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> QpNum {
        self.endpoint.qp_num
    }

    /// The sizes of its queues, at least those that were asked for.
    #[must_use]
    pub fn capacity(&self) -> QpCap {
        self.cap
    }

    /// Connects it with a peer, which has to do the same with this one's endpoint. Returns at once:
    /// sends may be posted, and go out when the connection stands. If it cannot, they complete with
    /// an error.
    ///
    /// # Errors
    ///
    /// It is connected already, or the endpoint makes no sense.
    pub fn connect(&self, peer: &Endpoint) -> Result<(), Error> {
        let built = &self.built;
        self.bring_up(&QpAttr {
            path_mtu: 5,
            dest_qp_num: peer.qp_num.0,
            rq_psn: peer.psn,
            max_dest_rd_atomic: built.reads,
            min_rnr_timer: 12,
            av: AddressVector { sl: built.service_level, ..address_of(peer.gid) },
            timeout: built.timeout,
            retry_cnt: built.retries,
            rnr_retry: built.rnr_retries,
            sq_psn: self.endpoint.psn,
            max_rd_atomic: built.reads,
            ..QpAttr::default()
        })
    }

    /// Connects it as connection management says.
    pub(crate) fn connect_as(&self, params: &QpParams) -> Result<(), Error> {
        let mut av = address_of(Gid(params.path.dgid));
        av.traffic_class = params.path.traffic_class;
        av.sgid_index = params.path.sgid_index;
        av.sl = match params.path.service_level {
            0 => self.built.service_level,
            level => level,
        };
        self.bring_up(&QpAttr {
            path_mtu: params.path_mtu,
            dest_qp_num: params.dest_qpn,
            rq_psn: params.rq_psn,
            max_dest_rd_atomic: params.max_dest_rd_atomic,
            min_rnr_timer: params.min_rnr_timer,
            av,
            timeout: params.timeout,
            retry_cnt: params.retry_count,
            rnr_retry: params.rnr_retry,
            sq_psn: params.sq_psn,
            max_rd_atomic: params.max_rd_atomic,
            ..QpAttr::default()
        })
    }

    /// Takes it to RTR and RTS.
    fn bring_up(&self, attr: &QpAttr) -> Result<(), Error> {
        let mut to_rtr = Mask::STATE | Mask::AV | Mask::PATH_MTU | Mask::DEST_QPN | Mask::RQ_PSN;
        let mut to_rts = Mask::STATE | Mask::SQ_PSN;
        if self.built.qp_type == QpType::Rc {
            to_rtr |= Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER;
            to_rts |= Mask::TIMEOUT | Mask::RETRY_CNT | Mask::RNR_RETRY | Mask::MAX_QP_RD_ATOMIC;
        }
        self.modify(&QpAttr { state: QpState::Rtr, ..*attr }, to_rtr)?;
        self.modify(&QpAttr { state: QpState::Rts, ..*attr }, to_rts)
    }

    /// What it was built as.
    pub(crate) fn built(&self) -> &QueuePairBuilder {
        &self.built
    }

    /// Exchanges endpoints with the peer over a stream, such as a TCP connection, and connects.
    ///
    /// # Errors
    ///
    /// [`Error::Exchange`], and as [`connect`](Self::connect).
    pub fn connect_over(&self, stream: &mut (impl Read + Write)) -> Result<(), Error> {
        let peer = self.endpoint.exchange(stream).map_err(Error::Exchange)?;
        self.connect(&peer)
    }

    /// Hands memory to the adapter, to be filled by one message. `wr_id` comes back in the
    /// completion.
    ///
    /// # Errors
    ///
    /// The queue is full, there are more pieces than it takes, or receives are shared.
    pub fn post_recv(&self, wr_id: u64, memory: &[Sge]) -> Result<(), Error> {
        Ok(self.engine().post_recv(self.id, wr_id, memory)?)
    }

    /// Hands several receives to the adapter, each with its number and its memory, with one doorbell: cheaper
    /// than one by one.
    ///
    /// # Errors
    ///
    /// As [`post_recv`](Self::post_recv), with the number of receives that were taken before.
    pub fn post_recvs(&self, receives: &[(u64, &[Sge])]) -> Result<(), (usize, Error)> {
        post::receives(self.engine(), self.id, receives)
    }

    /// Hands a request to the adapter, which begins at once.
    ///
    /// # Errors
    ///
    /// The queue is full, the queue pair is not connected, the request exceeds a limit, or queue pairs of its
    /// kind have no such requests.
    pub fn post_send(&self, request: &Request<'_>) -> Result<(), Error> {
        Ok(self.engine().post_send(self.id, &request.wr)?)
    }

    /// Hands several requests to the adapter, which gathers them: much cheaper than one by one.
    ///
    /// # Errors
    ///
    /// As [`post_send`](Self::post_send), with the number of requests that were taken before.
    pub fn post_sends(&self, requests: &[Request<'_>]) -> Result<(), (usize, Error)> {
        post::sends(self.engine(), self.id, requests)
    }

    /// Memory of the peer as it is mapped here: see
    /// [`Adapter::view_peer`](quipu_host::nic::Adapter::view_peer).
    pub(crate) fn view_peer(&self, memory: &RemoteMemory) -> Option<Segment> {
        let len = u32::try_from(memory.len).ok()?;
        self.engine().view_peer(self.id, memory.addr, len, memory.rkey)
    }

    /// Writes memory into that of the peer, without a request; whether that was possible:
    /// [`Adapter::write_now`](quipu_host::nic::Adapter::write_now).
    pub(crate) fn write_now(&self, from: Sge, to: &RemoteMemory) -> bool {
        self.engine().write_now(self.id, from, (to.addr, to.rkey))
    }

    /// Whether the peer is a process on this host of which some memory is mapped here: data then move by
    /// copies between the two, best from and to memory that [`ProtectionDomain::register`] gave.
    #[must_use]
    pub fn is_peer_mapped(&self) -> bool {
        self.engine().is_peer_mapped(self.id)
    }

    /// Its state and all attributes.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn query(&self) -> Result<QpInfo, Error> {
        Ok(self.engine().query_qp(self.id)?)
    }

    /// Its state.
    ///
    /// # Errors
    ///
    /// As [`query`](Self::query).
    pub fn state(&self) -> Result<QpState, Error> {
        Ok(self.query()?.attr.state)
    }

    /// Changes the attributes that `mask` names, as `ibv_modify_qp` does.
    ///
    /// # Errors
    ///
    /// An illegal transition or value; nothing has changed then.
    pub fn modify(&self, attr: &QpAttr, mask: Mask) -> Result<(), Error> {
        Ok(self.engine().modify_qp(self.id, attr, mask)?)
    }
}

/// The address of a peer.
pub(crate) fn address_of(dgid: Gid) -> AddressVector {
    AddressVector { dgid, hop_limit: 64, is_global: true, port_num: 1, ..AddressVector::default() }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let _ = self.engine().destroy_qp(self.id);
    }
}
