//! Shared receive queues and queue pairs: creating, changing, destroying them.

use quipu_abi_types::*;
use quipu_host::Device;
use quipu_host::fault::Call;
use quipu_nic::{
    Access, BindMw, Flush, Gid, GroupMember, MrId, MwId, Placement, QpAttrMask, QpCap, QpInit,
    QpNum, QpType, SendOp, XrcdId,
};

use crate::attr;
use crate::completion::reported;
use crate::entry::{Out, entries};
use crate::instance::{Instance, current, for_destructor};
use crate::registry::{ContextNumber, Object};
use crate::status::{Failure, INVALID, Outcome, unsupported};

/// In the number of a shared receive queue that no peer can name.
const NAMELESS: u32 = 1 << 24;

/// The service that a program asks for.
fn qp_type(kind: u32, device: Device, xrcd: Option<XrcdId>) -> Outcome<QpType> {
    let all = match kind {
        IBV_QPT_RC => Ok(QpType::Rc),
        IBV_QPT_UC => Ok(QpType::Uc),
        IBV_QPT_UD => Ok(QpType::Ud),
        IBV_QPT_XRC_SEND => Ok(QpType::XrcSend),
        IBV_QPT_XRC_RECV => Ok(QpType::XrcRecv(xrcd.ok_or(INVALID)?)),
        IBV_QPT_RAW_PACKET => Ok(QpType::RawPacket),
        IBV_QPT_DRIVER => Err(EngineStatus::NotSupported.into()),
        _ => Err(INVALID),
    };
    match (device, all?) {
        (Device::Quipu0, qp_type) => Ok(qp_type),
        (Device::QuipuIw0, QpType::Rc) => Ok(QpType::Iwarp),
        // By rdma_cm alone, in messages. Datagrams over UDP are not those of verbs, which have a Q_Key.
        (Device::QuipuQp0, QpType::Rc) => Ok(QpType::Tcp),
        (Device::QuipuIw0 | Device::QuipuQp0, _) => Err(EngineStatus::NotSupported.into()),
    }
}

/// Whether a service has all operations of `IBV_QP_EX_WITH_*` flags. A program that asks for one which could
/// never be posted is told so at once, as by the providers of cards.
fn offers(service: QpType, send_ops: u64) -> bool {
    let (addr, rkey) = (0, 0);
    let flush = Flush { addr, rkey, len: 0, whole: false, placement: Placement::GLOBAL };
    let bind = BindMw { mw: MwId(0), rkey, mr: MrId(0), addr, len: 0, access: Access::empty() };
    let known = [
        (IBV_QP_EX_WITH_RDMA_WRITE, SendOp::Write { addr, rkey }),
        (IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, SendOp::WriteImm { addr, rkey, imm: 0 }),
        (IBV_QP_EX_WITH_SEND, SendOp::Send),
        (IBV_QP_EX_WITH_SEND_WITH_IMM, SendOp::SendImm(0)),
        (IBV_QP_EX_WITH_RDMA_READ, SendOp::Read { addr, rkey }),
        (
            IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP,
            SendOp::CompareSwap { addr, rkey, compare: 0, swap: 0 },
        ),
        (IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, SendOp::FetchAdd { addr, rkey, add: 0 }),
        (IBV_QP_EX_WITH_LOCAL_INV, SendOp::LocalInv { key: 0 }),
        (IBV_QP_EX_WITH_BIND_MW, SendOp::BindMw(bind)),
        (IBV_QP_EX_WITH_SEND_WITH_INV, SendOp::SendInv(0)),
        (IBV_QP_EX_WITH_FLUSH, SendOp::Flush(flush)),
        (IBV_QP_EX_WITH_ATOMIC_WRITE, SendOp::AtomicWrite { addr, rkey }),
    ];
    let mut left = send_ops;
    for (flag, _) in known.iter().filter(|(_, op)| service.offers(op)) {
        left &= !flag;
    }
    left == 0
}

/// The XRC domain that a context has open.
fn xrcd_of(instance: &Instance, handle: XrcdHandle, context: ContextNumber) -> Outcome<XrcdId> {
    let (xrcd, opener) = instance.registry().xrc.find(instance.xrcd(handle))?;
    if opener == context { Ok(xrcd) } else { Err(INVALID) }
}

entries! {
    /// [`EngineApi::create_srq`]
    fn create_srq(pd: PdHandle, init: *const EngineSrqInit, out: *mut EngineSrq) {
        // SAFETY: the table demands valid pointers.
        let (out, init) = unsafe { (Out::new(out)?, init.as_ref().ok_or(INVALID)?) };
        let instance = current()?;
        let pd = instance.pd(pd);
        let (context, id) = {
            let registry = instance.registry();
            let context = registry.context_of(Object::Pd(pd))?;
            if registry.device(context)? == Device::QuipuQp0 {
                return Err(unsupported("shared receive queues of this device"));
            }
            (context, registry.context(context)?)
        };
        let engine = &instance.engine;
        let ibv_srq_attr { max_wr, max_sge, .. } = init.attr;
        let (srq, srq_num) = if init.xrcd == XrcdHandle::NONE {
            let srq = engine.create_srq(id, pd, max_wr, max_sge)?;
            // The slot of its handle, which no two live ones share; beyond the 24 bits of those that peers
            // name.
            (srq, NAMELESS | srq.0 as u32)
        } else {
            let (xrcd, cq) = (xrcd_of(instance, init.xrcd, context)?, instance.cq(init.cq));
            instance.registry().expect(Object::Cq(cq), context)?;
            engine.create_xrc_srq(id, pd, xrcd, cq, max_wr, max_sge)?
        };
        instance.registry().add(Object::Srq(srq), context, init.cookie);
        let (max_wr, max_sge, srq_limit) = engine.query_srq(srq)?;
        out.fill(EngineSrq {
            srq: instance.srq_handle(srq),
            attr: ibv_srq_attr { max_wr, max_sge, srq_limit },
            srq_num,
        });
        Ok(())
    }

    /// [`EngineApi::modify_srq`]
    fn modify_srq(srq: SrqHandle, attr: *const ibv_srq_attr, mask: u32) {
        // SAFETY: the table demands a valid pointer.
        let attr = unsafe { attr.as_ref() }.ok_or(INVALID)?;
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(INVALID);
        }
        let instance = current()?;
        let max_wr = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
        let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
        Ok(instance.engine.modify_srq(instance.srq(srq), max_wr, limit)?)
    }

    /// [`EngineApi::query_srq`]
    fn query_srq(srq: SrqHandle, out: *mut ibv_srq_attr) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        instance.engine.note_call(Call::QuerySrq)?;
        let (max_wr, max_sge, srq_limit) = instance.engine.query_srq(instance.srq(srq))?;
        out.fill(ibv_srq_attr { max_wr, max_sge, srq_limit });
        Ok(())
    }

    /// [`EngineApi::destroy_srq`]
    fn destroy_srq(srq: SrqHandle, out: *mut EngineEventsReported) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let Some(instance) = for_destructor()? else {
            out.fill(EngineEventsReported::default());
            return Ok(());
        };
        let srq = instance.srq(srq);
        let events = instance.destroyed(instance.engine.destroy_srq(srq).map_err(Failure::from))?;
        instance.registry().remove(Object::Srq(srq), events.asynchronous);
        out.fill(reported(events));
        Ok(())
    }

    /// [`EngineApi::create_qp`]
    fn create_qp(pd: PdHandle, init: *const EngineQpInit, out: *mut EngineQp) {
        // SAFETY: the table demands valid pointers.
        let (out, init) = unsafe { (Out::new(out)?, init.as_ref().ok_or(INVALID)?) };
        let spared = init.create_flags == IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
        if init.create_flags != 0 && !(spared && init.qp_type == IBV_QPT_UD) {
            return Err(EngineStatus::NotSupported.into());
        }
        let instance = current()?;
        let pd = instance.pd(pd);
        let (send_cq, recv_cq) = (instance.cq(init.send_cq), instance.cq(init.recv_cq));
        let (sends, receives) =
            (init.qp_type != IBV_QPT_XRC_RECV, init.qp_type != IBV_QPT_XRC_SEND);
        // What has no receives of its own has no shared ones either.
        let own_receives = sends && receives;
        let srq = (own_receives && init.srq != SrqHandle::NONE).then(|| instance.srq(init.srq));
        let (qp_type, context, id) = {
            let registry = instance.registry();
            let (xrcd, context) = if sends {
                (None, registry.context_of(Object::Pd(pd))?)
            } else {
                let (xrcd, context) = registry.xrc.find(instance.xrcd(init.xrcd))?;
                (Some(xrcd), context)
            };
            if sends {
                registry.expect(Object::Cq(send_cq), context)?;
            }
            if own_receives {
                registry.expect(Object::Cq(recv_cq), context)?;
            }
            if let Some(srq) = srq {
                registry.expect(Object::Srq(srq), context)?;
            }
            let kind = qp_type(init.qp_type, registry.device(context)?, xrcd)?;
            if !offers(kind, init.send_ops) {
                return Err(unsupported("such operations of a queue pair of this service"));
            }
            (kind, context, registry.context(context)?)
        };
        let cap = QpCap {
            max_send_wr: init.cap.max_send_wr,
            max_recv_wr: if srq.is_some() { 0 } else { init.cap.max_recv_wr },
            max_send_sge: init.cap.max_send_sge,
            max_recv_sge: if srq.is_some() { 0 } else { init.cap.max_recv_sge },
            max_inline_data: init.cap.max_inline_data,
        };
        let sq_sig_all = init.sq_sig_all != 0;
        let wanted = QpInit { pd, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all };
        let (qp, number, cap) = instance.engine.create_qp(id, &wanted)?;
        if spared {
            instance.engine.spare_own_multicast(qp)?;
        }
        instance.registry().add(Object::Qp(qp), context, init.cookie);
        let cap = attr::cap_of(&cap);
        out.fill(EngineQp { qp: instance.qp_handle(qp), qp_num: number.0, cap });
        Ok(())
    }

    /// [`EngineApi::open_qp`]
    fn open_qp(
        context: ContextHandle,
        xrcd: XrcdHandle,
        qp_num: u32,
        cookie: u64,
        out: *mut QpHandle,
    ) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        let context = instance.context(context);
        let (xrcd, id) =
            (xrcd_of(instance, xrcd, context)?, instance.registry().context(context)?);
        let known = |qp| instance.registry().add(Object::Qp(qp), context, cookie);
        let qp = instance.engine.open_qp(id, xrcd, QpNum(qp_num), known)?;
        out.fill(instance.qp_handle(qp));
        Ok(())
    }

    /// [`EngineApi::modify_qp`]
    fn modify_qp(qp: QpHandle, attr: *const ibv_qp_attr, mask: u32) {
        // SAFETY: the table demands a valid pointer.
        let attr = unsafe { attr.as_ref() }.ok_or(INVALID)?;
        let mask = QpAttrMask::from_bits(mask).ok_or(INVALID)?;
        let attr = attr::from_verbs(attr, mask)?;
        let instance = current()?;
        Ok(instance.engine.modify_qp(instance.qp(qp), &attr, mask)?)
    }

    /// [`EngineApi::query_qp`]
    fn query_qp(qp: QpHandle, _mask: u32, out: *mut ibv_qp_attr) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let instance = current()?;
        out.fill(attr::to_verbs(&instance.engine.query_qp(instance.qp(qp))?));
        Ok(())
    }

    /// [`EngineApi::destroy_qp`]
    fn destroy_qp(qp: QpHandle, out: *mut EngineEventsReported) {
        // SAFETY: the table demands a valid pointer.
        let out = unsafe { Out::new(out) }?;
        let Some(instance) = for_destructor()? else {
            out.fill(EngineEventsReported::default());
            return Ok(());
        };
        let qp = instance.qp(qp);
        let events = instance.destroyed(instance.engine.destroy_qp(qp).map_err(Failure::from))?;
        instance.registry().remove(Object::Qp(qp), events.asynchronous);
        out.fill(reported(events));
        Ok(())
    }

    /// [`EngineApi::attach_mcast`]
    fn attach_mcast(qp: QpHandle, gid: *const ibv_gid, sgid_index: u8) {
        // SAFETY: the table demands a valid pointer, and every bit pattern is a GID.
        let gid = unsafe { gid.as_ref().ok_or(INVALID)?.raw };
        let instance = current()?;
        instance.engine.note_call(Call::AttachMcast)?;
        let member = GroupMember { qp: instance.qp(qp), mgid: Gid(gid), sgid_index };
        Ok(instance.engine.attach_member(member)?)
    }

    /// [`EngineApi::detach_mcast`]
    fn detach_mcast(qp: QpHandle, gid: *const ibv_gid, sgid_index: u8) {
        // SAFETY: the table demands a valid pointer, and every bit pattern is a GID.
        let gid = unsafe { gid.as_ref().ok_or(INVALID)?.raw };
        let Some(instance) = for_destructor()? else { return Ok(()) };
        instance.engine.note_call(Call::DetachMcast)?;
        let member = GroupMember { qp: instance.qp(qp), mgid: Gid(gid), sgid_index };
        instance.destroyed(instance.engine.detach_member(member).map_err(Failure::from))
    }
}
