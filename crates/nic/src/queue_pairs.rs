//! The management of queue pairs: creating them, changing their attributes and state, destroying them.

use crate::adapter::{Adapter, Hub};
use crate::connect;
use crate::error::Fault;
use crate::number_table::NumberTable;
use crate::port::check_source;
use crate::probe::Probe;
use crate::qp::{Ending, Path, Qp, Requester, Responder};
use crate::qp_state;
use crate::receive;
use crate::requester;
use crate::transmit::{direct, lanes};
use crate::types::{ConnId, QpAttr, QpAttrMask, QpCap, QpId, QpInit, QpNum, QpState, QpType, Time};
use crate::unordered;
use quipu_mem::{Key, Segment};

/// A queue pair as `query_qp` shows it.
#[derive(Clone, Copy, Debug)]
pub struct QpInfo {
    /// Its attributes, with the current state.
    pub attr: QpAttr,
    /// Its queue sizes.
    pub cap: QpCap,
    /// Whether every send is signalled.
    pub sq_sig_all: bool,
    /// Its number.
    pub num: QpNum,
    /// Its service.
    pub qp_type: QpType,
}

impl<P: Probe> Adapter<P> {
    /// Creates a queue pair with the given number, which must be unique on the host; its handle and its
    /// sizes.
    ///
    /// # Errors
    /// Sizes above the limits, objects that do not exist, a number in use, or no room.
    pub fn create_qp(&mut self, init: &QpInit, num: QpNum) -> Result<(QpId, QpCap), Fault> {
        let init = &self.with_domain(init)?;
        let cap = self.granted(init)?;
        if !NumberTable::is_valid(num) {
            return Err(Fault::Invalid("queue pair numbers have 24 bits"));
        }
        if self.hub.numbers.get(num).is_some() {
            return Err(Fault::Invalid("the queue pair number is in use"));
        }
        self.hub.pd(init.pd)?;
        for cq in init.qp_type.own_cqs(init.send_cq, init.recv_cq) {
            self.cq(cq)?;
        }
        if init.qp_type == QpType::Tcp && init.srq.is_some() {
            return Err(Fault::Unsupported(
                "a TCP queue pair with a shared receive queue: its receives are its window",
            ));
        }
        let queues = Qp::queues(init, cap)?;
        let mut recv_pd = init.pd;
        if let Some(srq) = init.srq {
            let srq = self.hub.srqs.get_mut(srq).ok_or(Fault::NoSuchObject)?;
            if srq.wq.is_some() {
                return Err(Fault::Invalid(
                    "a work queue is received from by an indirection table",
                ));
            }
            if srq.xrc.is_some() {
                return Err(Fault::Invalid("messages name a shared receive queue of type XRC"));
            }
            srq.users += 1;
            recv_pd = srq.pd;
        }
        let made = self.qps.insert_with(|id| Qp::new(id, num, init, recv_pd, cap, queues));
        let Some(id) = made else {
            if let Some(srq) = init.srq.and_then(|srq| self.hub.srqs.get_mut(srq)) {
                srq.users -= 1;
            }
            return Err(Fault::Exhausted("queue pairs"));
        };
        self.hub.pd(init.pd)?.users += 1;
        for cq in init.qp_type.own_cqs(init.send_cq, init.recv_cq) {
            self.cq(cq)?.users += 1;
        }
        self.use_domain(init.qp_type);
        self.hub.numbers.insert(num, id);
        self.hub.counters.queue_pairs += 1;
        Ok((id, cap))
    }

    /// The sizes that a queue pair gets.
    fn granted(&self, init: &QpInit) -> Result<QpCap, Fault> {
        let (cap, config) = (init.cap, &self.hub.config);
        if cap.max_send_wr > config.max_qp_wr || cap.max_recv_wr > config.max_qp_wr {
            return Err(Fault::Invalid("more work requests than max_qp_wr"));
        }
        if cap.max_send_sge > config.max_sge || cap.max_recv_sge > config.max_sge {
            return Err(Fault::Invalid("more scatter/gather elements than max_sge"));
        }
        if cap.max_inline_data > config.max_inline {
            return Err(Fault::Invalid("more inline data than the adapter supports"));
        }
        let sends = if init.qp_type.requests() {
            QpCap { max_send_sge: cap.max_send_sge.max(1), ..cap }
        } else {
            QpCap::default()
        };
        let receives = init.srq.is_none() && init.qp_type.has_receives();
        Ok(QpCap {
            max_recv_sge: if receives { cap.max_recv_sge.max(1) } else { 0 },
            max_recv_wr: if receives { cap.max_recv_wr } else { 0 },
            ..sends
        })
    }

    /// Changes attributes and the state of a queue pair.
    ///
    /// # Errors
    /// [`Fault::Transition`] or [`Fault::Invalid`]; the queue pair is then unchanged.
    pub fn modify_qp(
        &mut self,
        now: Time,
        id: QpId,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Result<(), Fault> {
        self.hub.now = now;
        self.settle_taken();
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        let mask = mask - qp.qp_type.ignores();
        let from = qp.state;
        let to = if mask.contains(QpAttrMask::STATE) { attr.state } else { from };
        if mask.contains(QpAttrMask::CUR_STATE) && attr.cur_state != from {
            return Err(Fault::Transition("the queue pair is not in cur_qp_state"));
        }
        qp_state::check(qp.qp_type, from, to, mask)?;
        check_values(attr, mask, &hub.config)?;
        let mut attr = *attr;
        if mask.contains(QpAttrMask::AV) {
            attr.av = hub.config.link_layer.resolve(&hub.gids, &attr.av)?;
            check_source(&hub.gids, &attr.av)?;
        }
        if matches!(to, QpState::Reset | QpState::Err) {
            take_arrived(qp, hub);
        }
        if qp.responder.holding {
            unordered::settle_unasked(qp, hub);
        }
        apply(&mut qp.attr, &attr, mask);
        hub.counters.changes += 1;
        if mask.contains(QpAttrMask::RATE_LIMIT) {
            lanes::limit_rate(qp, attr.rate_limit);
            if attr.rate_limit > 0 && hub.qos.is_none() {
                self.set_qos(quipu_qos::Config::default(), None);
            }
        }
        let Some((qp, hub)) = self.qp_and_hub(id) else { return Err(Fault::NoSuchObject) };
        match to {
            QpState::Reset => reset(qp, hub),
            QpState::Err => requester::to_error(qp, hub, None),
            // What is handed to the stream is sent, and then it is closed: the end of a plain iWARP.
            QpState::Sqd if qp.qp_type.is_plain() => requester::to_error(qp, hub, None),
            _ => qp.state = to,
        }
        // What is owed to a stay in SQD ends with it.
        qp.drain_owed &= to == QpState::Sqd;
        if mask.intersects(QpAttrMask::ACCESS_FLAGS | QpAttrMask::MAX_DEST_RD_ATOMIC) {
            connect::show_grants(qp, hub);
        }
        if mask.intersects(QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT) {
            connect::limit_silence(qp, hub);
        }
        match (from, to) {
            (QpState::Init, QpState::Rtr) => self.begin_connection(id),
            (QpState::Rtr, QpState::Rts) => {
                connect::compare_psn(qp, hub);
                self.look_at_queue(now, id);
            }
            (QpState::Sqd | QpState::Sqe, QpState::Rts) => self.look_at_queue(now, id),
            (QpState::Rts, QpState::Sqd) if !qp.qp_type.is_plain() => {
                qp.drain_owed =
                    mask.contains(QpAttrMask::EN_SQD_ASYNC_NOTIFY) && attr.en_sqd_async_notify;
                requester::complete_done(qp, hub);
            }
            _ => {}
        }
        Ok(())
    }

    /// The service of a queue pair.
    #[inline]
    #[must_use]
    pub fn service_of(&self, id: QpId) -> Option<QpType> {
        self.qps.get(id).map(|qp| qp.qp_type)
    }

    /// `len` bytes of the memory of a queue pair's peer, as they are mapped here. There are some where the
    /// peer is another process of this host, shows this memory to be mapped, and now grants writes under
    /// `key`. What is stored there is no request: it has the processor's order, completes
    /// nothing, and is counted nowhere. The memory stays mapped when the peer deregisters it. So this is for
    /// memory that the peer keeps for that purpose.
    #[must_use]
    pub fn view_peer(&self, id: QpId, addr: u64, len: u32, key: Key) -> Option<Segment> {
        direct::view(self.qps.get(id)?, &self.hub, (addr, len), key)
    }

    /// Whether [`view_peer`](Self::view_peer) may show some memory of a queue pair's peer.
    #[must_use]
    pub fn is_peer_mapped(&self, id: QpId) -> bool {
        self.qps.get(id).is_some_and(|qp| direct::is_peer_mapped(qp, &self.hub))
    }

    /// The queue pair of that number.
    #[must_use]
    pub fn find_qp(&self, num: QpNum) -> Option<QpId> {
        self.hub.numbers.get(num)
    }

    /// The stream on which requests of a queue pair's peer arrive. What has arrived is to be shown before
    /// the queue pair leaves: a card has answered it, and who asked would repeat it in vain. A peer of plain
    /// iWARP waits for no answer.
    #[must_use]
    pub fn receiving_stream(&self, id: QpId) -> Option<ConnId> {
        self.qps.get(id).and_then(receiving_stream)
    }

    /// Those of all queue pairs.
    #[must_use]
    pub fn receiving_streams(&self) -> Vec<ConnId> {
        self.qps.iter().filter_map(|(_, qp)| receiving_stream(qp)).collect()
    }

    /// What a queue pair is.
    ///
    /// # Errors
    /// No such queue pair.
    pub fn query_qp(&self, id: QpId) -> Result<QpInfo, Fault> {
        let qp = self.qps.get(id).ok_or(Fault::NoSuchObject)?;
        let draining = qp.state == QpState::Sqd && requester::is_draining(qp);
        let attr = QpAttr {
            state: qp.state,
            cur_state: qp.state,
            sq_draining: draining,
            port_num: 1,
            ..qp.attr
        };
        let &Qp { cap, sq_sig_all, num, qp_type, .. } = qp;
        Ok(QpInfo { attr, cap, sq_sig_all, num, qp_type })
    }

    /// Destroys a queue pair; what is posted to it is forgotten without completions, and its completions
    /// that were not polled are dropped.
    ///
    /// # Errors
    /// No such queue pair, or [`Fault::Busy`] while it is attached to a multicast group or has
    /// flow rules.
    pub fn destroy_qp(&mut self, now: Time, id: QpId) -> Result<(), Fault> {
        self.hub.now = now;
        if self.hub.groups.values().flatten().any(|member| member.qp == id) {
            return Err(Fault::Busy);
        }
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        take_arrived(qp, hub);
        qp.state = QpState::Err;
        connect::detach(qp, hub);
        lanes::leave(qp, hub);
        hub.counters.gone.add(&qp.counters());
        hub.counters.changes += 1;
        let (num, pd, qp_type) = (qp.num, qp.pd, qp.qp_type);
        let own_cqs = qp_type.own_cqs(qp.send_cq, qp.recv_cq);
        let srq = if qp_type.has_receives() { qp.srq } else { None };
        let mut timer = qp.timer;
        hub.set_alarm(&mut timer, crate::adapter::Alarm::Qp(id), None);
        hub.numbers.remove(num);
        if !hub.mws.is_empty() {
            let withdrawn = hub.regions.unbind_qp(num.0);
            hub.begin_quiet_wait(withdrawn);
        }
        self.qps.remove(id);
        for cq in own_cqs {
            let cq = self.cq(cq)?;
            cq.users -= 1;
            cq.forget(num);
        }
        if let Some(srq) = srq.and_then(|srq| self.hub.srqs.get_mut(srq)) {
            srq.users -= 1;
        }
        self.hub.pd(pd)?.users -= 1;
        self.leave_domain(qp_type);
        self.leave_table(id, qp_type);
        Ok(())
    }
}

fn receiving_stream(qp: &Qp) -> Option<ConnId> {
    match &qp.path {
        Path::Stream(stream) if stream.plain.is_none() => Some(stream.conn),
        _ => None,
    }
}

/// Executes what a peer on this host has put into the rings, before a queue pair leaves: a card has answered
/// what has arrived, and who asked is not to repeat it in vain.
fn take_arrived<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    if qp.may_receive() {
        receive::channel::run_out(qp, hub);
    }
}

/// Returns a queue pair to RESET: nothing is posted, nothing completes.
fn reset<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>) {
    connect::detach(qp, hub);
    // The end of the connection that it had does not concern the next one.
    hub.orphans.retain(|&orphan| orphan != qp.id);
    let mut timer = qp.timer;
    hub.set_alarm(&mut timer, crate::adapter::Alarm::Qp(qp.id), None);
    qp.timer = None;
    qp.sq.clear();
    qp.rq.clear();
    hub.counters.gone.add(&qp.counters());
    qp.requester = Requester::default();
    qp.responder = Responder::default();
    qp.attr = QpAttr::default();
    match &mut qp.path {
        path @ Path::Lost => *path = Path::None,
        Path::Tcp(path) => path.clear(),
        _ => {}
    }
    qp.ending = Ending::default();
    qp.fates.clear();
    qp.peer_rq_psn = None;
    qp.drain_owed = false;
    qp.state = QpState::Reset;
    crate::xrc::forget_choice(qp);
    for cq in qp.qp_type.own_cqs(qp.send_cq, qp.recv_cq) {
        if let Some(cq) = hub.cqs.get_mut(cq) {
            cq.forget(qp.num);
        }
    }
}

/// Checks the values of the attributes that the mask names.
fn check_values(
    attr: &QpAttr,
    mask: QpAttrMask,
    config: &crate::adapter::Config,
) -> Result<(), Fault> {
    type M = QpAttrMask;
    let wrong = |set: M, bad: bool| mask.contains(set) && bad;
    if wrong(M::PORT, attr.port_num != 1) || wrong(M::ALT_PATH, attr.alt_port_num != 1) {
        return Err(Fault::Invalid("the adapter has one port, number 1"));
    }
    if wrong(M::PKEY_INDEX, attr.pkey_index != 0) || wrong(M::ALT_PATH, attr.alt_pkey_index != 0) {
        return Err(Fault::Invalid("the P_Key table has one entry, index 0"));
    }
    if wrong(M::PATH_MTU, !(1..=5).contains(&attr.path_mtu)) {
        return Err(Fault::Invalid("path_mtu is not one of the MTU codes 1 to 5"));
    }
    if wrong(M::DEST_QPN, attr.dest_qp_num > 0x00ff_ffff)
        || wrong(M::RQ_PSN, attr.rq_psn > 0x00ff_ffff)
        || wrong(M::SQ_PSN, attr.sq_psn > 0x00ff_ffff)
    {
        return Err(Fault::Invalid("queue pair numbers and PSNs have 24 bits"));
    }
    if wrong(M::MAX_QP_RD_ATOMIC, attr.max_rd_atomic > config.max_rd_atomic)
        || wrong(M::MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic > config.max_rd_atomic)
    {
        return Err(Fault::Invalid("more reads and atomics in flight than max_qp_rd_atom"));
    }
    if wrong(M::TIMEOUT, attr.timeout > 31)
        || wrong(M::ALT_PATH, attr.alt_timeout > 31)
        || wrong(M::MIN_RNR_TIMER, attr.min_rnr_timer > 31)
        || wrong(M::RETRY_CNT, attr.retry_cnt > 7)
        || wrong(M::RNR_RETRY, attr.rnr_retry > 7)
    {
        return Err(Fault::Invalid("timer code above 31 or retry count above 7"));
    }
    Ok(())
}

/// Copies the attributes that the mask names.
fn apply(to: &mut QpAttr, from: &QpAttr, mask: QpAttrMask) {
    macro_rules! copy {
        ($($flag:ident: $($field:ident),+;)*) => {$(
            if mask.contains(QpAttrMask::$flag) { $(to.$field = from.$field;)+ }
        )*};
    }
    copy! {
        EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify;
        ACCESS_FLAGS: access;
        PKEY_INDEX: pkey_index;
        PORT: port_num;
        QKEY: qkey;
        AV: av;
        PATH_MTU: path_mtu;
        TIMEOUT: timeout;
        RETRY_CNT: retry_cnt;
        RNR_RETRY: rnr_retry;
        RQ_PSN: rq_psn;
        MAX_QP_RD_ATOMIC: max_rd_atomic;
        ALT_PATH: alt_av, alt_pkey_index, alt_port_num, alt_timeout;
        MIN_RNR_TIMER: min_rnr_timer;
        SQ_PSN: sq_psn;
        MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        PATH_MIG_STATE: path_mig_state;
        DEST_QPN: dest_qp_num;
        RATE_LIMIT: rate_limit;
    }
}
