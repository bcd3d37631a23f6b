//! Attributes of queue pairs, from and to the structures of verbs.

use quipu_abi_types::*;
use quipu_mem::Access;
use quipu_nic::{AddressVector, Gid, QpAttr, QpAttrMask as M, QpCap, QpInfo, QpState};

use crate::status::{INVALID, Outcome};

fn state(value: u32) -> Outcome<QpState> {
    Ok(match value {
        IBV_QPS_RESET => QpState::Reset,
        IBV_QPS_INIT => QpState::Init,
        IBV_QPS_RTR => QpState::Rtr,
        IBV_QPS_RTS => QpState::Rts,
        IBV_QPS_SQD => QpState::Sqd,
        IBV_QPS_SQE => QpState::Sqe,
        IBV_QPS_ERR => QpState::Err,
        _ => return Err(INVALID),
    })
}

/// The address of a peer.
pub(crate) fn address_from(attr: &ibv_ah_attr) -> Outcome<AddressVector> {
    if attr.port_num != 1 {
        return Err(INVALID);
    }
    Ok(AddressVector {
        // SAFETY: every bit pattern is a GID.
        dgid: Gid(unsafe { attr.grh.dgid.raw }),
        sgid_index: attr.grh.sgid_index,
        sl: attr.sl,
        traffic_class: attr.grh.traffic_class,
        hop_limit: attr.grh.hop_limit,
        flow_label: attr.grh.flow_label,
        dlid: attr.dlid,
        src_path_bits: attr.src_path_bits,
        static_rate: attr.static_rate,
        is_global: attr.is_global != 0,
        port_num: attr.port_num,
    })
}

fn address_to(av: &AddressVector) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: av.dgid.0 },
            flow_label: av.flow_label,
            sgid_index: av.sgid_index,
            hop_limit: av.hop_limit,
            traffic_class: av.traffic_class,
        },
        dlid: av.dlid,
        sl: av.sl,
        src_path_bits: av.src_path_bits,
        static_rate: av.static_rate,
        is_global: av.is_global.into(),
        port_num: av.port_num,
    }
}

/// The bits of a packet sequence number. Cards take no others and say nothing.
const PSN: u32 = 0x00ff_ffff;
/// The bits of an RNR timer code. Common cards take no others either; there are programs that say 32.
const RNR_TIMER: u8 = 0x1f;
/// A right that programs may name for any queue pair, since cards know of no capability to ask for: no memory
/// here is persistent (`ibv_wr_flush`).
const UNUSED: u32 = IBV_ACCESS_FLUSH_PERSISTENT;

/// Reads the attributes that `mask` names. The others may be anything, and come out as defaults.
///
/// # Errors
///
/// A value that no queue pair can have, whatever its state.
pub(crate) fn from_verbs(attr: &ibv_qp_attr, mask: M) -> Outcome<QpAttr> {
    let mut to = QpAttr {
        qkey: attr.qkey,
        rq_psn: attr.rq_psn & PSN,
        sq_psn: attr.sq_psn & PSN,
        dest_qp_num: attr.dest_qp_num,
        pkey_index: attr.pkey_index,
        alt_pkey_index: attr.alt_pkey_index,
        en_sqd_async_notify: attr.en_sqd_async_notify != 0,
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer & RNR_TIMER,
        port_num: attr.port_num,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        alt_port_num: attr.alt_port_num,
        alt_timeout: attr.alt_timeout,
        rate_limit: attr.rate_limit,
        ..QpAttr::default()
    };
    if mask.contains(M::STATE) {
        to.state = state(attr.qp_state)?;
    }
    if mask.contains(M::CUR_STATE) {
        to.cur_state = state(attr.cur_qp_state)?;
    }
    if mask.contains(M::PATH_MTU) {
        to.path_mtu = attr.path_mtu.try_into().map_err(|_| INVALID)?;
    }
    if mask.contains(M::PATH_MIG_STATE) {
        if attr.path_mig_state > IBV_MIG_ARMED {
            return Err(INVALID);
        }
        to.path_mig_state = attr.path_mig_state as u8;
    }
    if mask.contains(M::ACCESS_FLAGS) {
        to.access = Access::parse(attr.qp_access_flags & !UNUSED)?;
    }
    if mask.contains(M::AV) {
        to.av = address_from(&attr.ah_attr)?;
    }
    if mask.contains(M::ALT_PATH) {
        to.alt_av = address_from(&attr.alt_ah_attr)?;
    }
    Ok(to)
}

/// The sizes of queues.
pub(crate) fn cap_of(cap: &QpCap) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// All attributes of a queue pair.
pub(crate) fn to_verbs(info: &QpInfo) -> ibv_qp_attr {
    let attr = &info.attr;
    ibv_qp_attr {
        qp_state: attr.state as u32,
        cur_qp_state: attr.cur_state as u32,
        path_mtu: attr.path_mtu.into(),
        path_mig_state: attr.path_mig_state.into(),
        qkey: attr.qkey,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qp_num: attr.dest_qp_num,
        qp_access_flags: attr.access.bits(),
        cap: cap_of(&info.cap),
        ah_attr: address_to(&attr.av),
        alt_ah_attr: address_to(&attr.alt_av),
        pkey_index: attr.pkey_index,
        alt_pkey_index: attr.alt_pkey_index,
        en_sqd_async_notify: attr.en_sqd_async_notify.into(),
        sq_draining: attr.sq_draining.into(),
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port_num: attr.port_num,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        alt_port_num: attr.alt_port_num,
        alt_timeout: attr.alt_timeout,
        rate_limit: attr.rate_limit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blank() -> ibv_qp_attr {
        // SAFETY: the structure consists of integers.
        unsafe { std::mem::zeroed() }
    }

    #[test]
    fn only_named_attributes_are_judged() {
        let mut attr = blank();
        attr.qp_state = 99;
        attr.path_mtu = 1 << 20;
        attr.qp_access_flags = !0;
        assert!(from_verbs(&attr, M::PKEY_INDEX).is_ok());
        for mask in [M::STATE, M::PATH_MTU, M::ACCESS_FLAGS, M::AV] {
            assert_eq!(from_verbs(&attr, mask).err(), Some(INVALID), "{mask:?}");
        }
    }

    #[test]
    fn what_is_too_wide_for_a_card_is_cut_as_cards_do() {
        let mut attr = blank();
        (attr.rq_psn, attr.sq_psn) = (0x1200_0001, 0xff00_0002);
        attr.min_rnr_timer = 32 + 12;
        let read = from_verbs(&attr, M::RQ_PSN | M::SQ_PSN | M::MIN_RNR_TIMER).unwrap();
        assert_eq!((read.rq_psn, read.sq_psn, read.min_rnr_timer), (1, 2, 12));
    }

    #[test]
    fn a_right_that_no_memory_grants_is_taken_and_not_kept() {
        let mut attr = blank();
        attr.qp_access_flags =
            IBV_ACCESS_REMOTE_READ | IBV_ACCESS_FLUSH_GLOBAL | IBV_ACCESS_FLUSH_PERSISTENT;
        let kept = Access::REMOTE_READ | Access::FLUSH_GLOBAL;
        assert_eq!(from_verbs(&attr, M::ACCESS_FLAGS).unwrap().access, kept);
    }

    #[test]
    fn attributes_survive_there_and_back() {
        let mut attr = blank();
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = IBV_MTU_4096;
        attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid = ibv_gid { raw: [9; 16] };
        attr.ah_attr.grh.hop_limit = 64;
        attr.dest_qp_num = 0x00ab_cdef;
        attr.rq_psn = 7;
        let mask = M::STATE | M::PATH_MTU | M::ACCESS_FLAGS | M::AV | M::DEST_QPN | M::RQ_PSN;
        let read = from_verbs(&attr, mask).unwrap();
        let info = QpInfo {
            attr: read,
            cap: QpCap { max_send_wr: 3, ..QpCap::default() },
            sq_sig_all: false,
            qp_type: quipu_nic::QpType::Rc,
            num: quipu_nic::QpNum(1),
        };
        let back = to_verbs(&info);
        assert_eq!((back.qp_state, back.path_mtu), (IBV_QPS_RTR, IBV_MTU_4096));
        assert_eq!(back.qp_access_flags, IBV_ACCESS_REMOTE_WRITE);
        // SAFETY: every bit pattern is a GID.
        assert_eq!(unsafe { back.ah_attr.grh.dgid.raw }, [9; 16]);
        assert_eq!((back.ah_attr.is_global, back.ah_attr.grh.hop_limit), (1, 64));
        assert_eq!((back.dest_qp_num, back.rq_psn, back.cap.max_send_wr), (0x00ab_cdef, 7, 3));
    }
}
