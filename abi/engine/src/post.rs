//! The data path: work requests and completions are translated on the stack, and the engine is
//! entered once for a list.

use std::borrow::Cow;
use std::mem::{MaybeUninit, offset_of};
use std::slice;

use libc::c_int;
use quipu_abi_types::*;
use quipu_cabi::{MAX_ELEMENTS, wall};
use quipu_host::Doorbell;
use quipu_mem::{Access, Sge};
use quipu_nic::{
    BindMw, Completion, Flush, MrId, Payload, QpId, QpType, SendFlags, SendOp, SendWr, To, WcExtra,
};

use crate::entry::{Count, entries};
use crate::instance::{Instance, opened};
use crate::status::{Failure, INVALID, Outcome};

// Scatter/gather lists are passed on without copying them.
const _: () = {
    assert!(size_of::<ibv_sge>() == size_of::<Sge>());
    assert!(align_of::<ibv_sge>() >= align_of::<Sge>());
    assert!(offset_of!(ibv_sge, addr) == offset_of!(Sge, addr));
    assert!(offset_of!(ibv_sge, length) == offset_of!(Sge, len));
    assert!(offset_of!(ibv_sge, lkey) == offset_of!(Sge, lkey));
};

/// Room for the inline data of a request: what the adapter allows at most.
const MAX_INLINE: usize = 1024;

/// Stands for more than that: refused as all that is too long, so that whoever watches the program sees it.
static TOO_LONG: [u8; MAX_INLINE + 1] = [0; MAX_INLINE + 1];

/// Inline bytes and elements of what is posted by the shortest way: no more than fits into a slot in memory
/// that is shared with a peer.
const SMALL_INLINE: usize = 96;
const FEW: c_int = 4;

/// The scatter/gather list of a work request.
///
/// # Safety
///
/// `list` is valid for reads of `count` elements, aligned or not, which nobody changes during the call.
#[inline]
unsafe fn sges<'a>(list: *const ibv_sge, count: c_int) -> Outcome<Cow<'a, [Sge]>> {
    if count == 0 {
        return Ok(Cow::Borrowed(&[]));
    }
    if !(1..=MAX_ELEMENTS as c_int).contains(&count) || list.is_null() {
        return Err(INVALID);
    }
    // SAFETY: passed on from the caller; the layouts are the same.
    Ok(unsafe { quipu_cabi::list(list.cast::<Sge>(), count as usize) })
}

/// What a work request is to do.
///
/// # Safety
///
/// The pointers in it are valid for its opcode.
#[inline]
unsafe fn operation(instance: &Instance, wr: &ibv_send_wr) -> Outcome<SendOp> {
    // SAFETY: every field of the union that is read here consists of integers, for which every bit
    // pattern is valid.
    let (rdma, atomic) = unsafe { (&wr.wr.rdma, &wr.wr.atomic) };
    let (addr, rkey) = (rdma.remote_addr, rdma.rkey);
    Ok(match wr.opcode {
        IBV_WR_SEND => SendOp::Send,
        IBV_WR_SEND_WITH_IMM => SendOp::SendImm(wr.imm_data),
        IBV_WR_SEND_WITH_INV => SendOp::SendInv(wr.imm_data),
        IBV_WR_RDMA_WRITE => SendOp::Write { addr, rkey },
        IBV_WR_RDMA_WRITE_WITH_IMM => SendOp::WriteImm { addr, rkey, imm: wr.imm_data },
        IBV_WR_RDMA_READ => SendOp::Read { addr, rkey },
        IBV_WR_ATOMIC_CMP_AND_SWP => SendOp::CompareSwap {
            addr: atomic.remote_addr,
            rkey: atomic.rkey,
            compare: atomic.compare_add,
            swap: atomic.swap,
        },
        IBV_WR_ATOMIC_FETCH_AND_ADD => SendOp::FetchAdd {
            addr: atomic.remote_addr,
            rkey: atomic.rkey,
            add: atomic.compare_add,
        },
        IBV_WR_ATOMIC_WRITE => SendOp::AtomicWrite { addr, rkey },
        ENGINE_WR_FLUSH => {
            let [placement, level, ..] = atomic.swap.to_le_bytes();
            let (addr, rkey, len) = (atomic.remote_addr, atomic.rkey, atomic.compare_add);
            SendOp::Flush(Flush::of(addr, rkey, len, placement, level).ok_or(INVALID)?)
        }
        IBV_WR_LOCAL_INV => SendOp::LocalInv { key: wr.imm_data },
        // SAFETY: passed on from the caller.
        IBV_WR_BIND_MW => SendOp::BindMw(unsafe { binding(instance, wr) }?),
        _ => return Err(INVALID),
    })
}

/// The binding that a work request asks for, with window and region found by their keys.
///
/// # Safety
///
/// `wr.ext.bind_mw` is set, and its pointers are null or valid.
#[cold]
unsafe fn binding(instance: &Instance, wr: &ibv_send_wr) -> Outcome<BindMw> {
    // SAFETY: passed on from the caller.
    let (bind, window, region) = unsafe {
        let bind = &wr.ext.bind_mw;
        (bind, bind.mw.as_ref(), bind.bind_info.mr.as_ref())
    };
    let info = &bind.bind_info;
    let registry = instance.registry();
    Ok(BindMw {
        mw: registry.window(window.ok_or(INVALID)?.rkey)?,
        rkey: bind.rkey,
        // To unbind needs no region; 0 names none.
        mr: region.map_or(Ok(MrId(0)), |region| registry.region(region.lkey))?,
        addr: info.addr,
        len: if region.is_some() { info.length } else { 0 },
        access: Access::parse(info.mw_access_flags)?,
    })
}

/// Whom a work request of a queue pair of `service` addresses.
///
/// # Safety
///
/// The pointers in `wr` are valid for its opcode, as `op` has it.
#[inline]
unsafe fn addressee(
    instance: &Instance,
    service: Option<QpType>,
    op: &SendOp,
    wr: &ibv_send_wr,
) -> Outcome<To> {
    match service {
        Some(QpType::Ud) if QpType::Ud.offers(op) => {}
        // SAFETY: the service says that this part of the union is in use; it consists of an integer.
        Some(QpType::XrcSend) => return Ok(To::Srq(unsafe { wr.qp_type.xrc.remote_srqn })),
        // So do operations that the service does not have, and that are refused when they are posted: what
        // lies where datagrams have an address handle is none, but an address of the peer's.
        _ => return Ok(To::Peer),
    }
    // SAFETY: service and opcode say that this part of the union is in use, and that its pointer is null or
    // valid.
    let (ud, ah) = unsafe { (&wr.wr.ud, wr.wr.ud.ah.as_ref()) };
    let ah = instance.ah(AhHandle(ah.ok_or(INVALID)?.handle));
    Ok(To::Datagram { ah, qpn: ud.remote_qpn, qkey: ud.remote_qkey })
}

/// Hands a work request to `taker`, as the adapter has it.
///
/// # Safety
///
/// The pointers in `wr` are valid for its opcode and flags.
#[inline]
unsafe fn with_request(
    instance: &Instance,
    service: Option<QpType>,
    wr: &ibv_send_wr,
    taker: impl FnOnce(&SendWr<'_>) -> Outcome,
) -> Outcome {
    let flags = SendFlags::from_bits(wr.send_flags).ok_or(INVALID)?;
    // SAFETY: passed on from the caller.
    let op = unsafe { operation(instance, wr) }?;
    // What concerns only this side has no payload, nor has a flush, and programs leave the list as it happens
    // to be.
    let local = matches!(op, SendOp::LocalInv { .. } | SendOp::BindMw(_) | SendOp::Flush(_));
    let list = if local {
        Cow::Borrowed(&[][..])
    } else {
        // SAFETY: passed on from the caller.
        unsafe { sges(wr.sg_list, wr.num_sge) }?
    };
    // SAFETY: passed on from the caller.
    let to = unsafe { addressee(instance, service, &op, wr) }?;
    let request = SendWr { wr_id: wr.wr_id, to, op, flags, payload: Payload::Sges(&list) };
    if flags.contains(SendFlags::INLINE) && !local {
        // SAFETY: passed on from the caller.
        return unsafe { with_inline(&request, &list, taker) };
    }
    taker(&request)
}

/// Hands a work request to `taker` whose payload is copied now.
///
/// # Safety
///
/// The elements of `list` name readable memory of this process.
#[inline(never)]
unsafe fn with_inline(
    request: &SendWr<'_>,
    list: &[Sge],
    taker: impl FnOnce(&SendWr<'_>) -> Outcome,
) -> Outcome {
    let mut buffer = [const { MaybeUninit::uninit() }; MAX_INLINE];
    // SAFETY: passed on from the caller; the buffer is on this stack, which no program passes.
    let bytes = unsafe { gather(list, &mut buffer) }.unwrap_or(&TOO_LONG);
    taker(&SendWr { payload: Payload::Inline(bytes), ..*request })
}

/// Copies `length` bytes, the few of a short message without a call.
///
/// # Safety
///
/// As [`copy_nonoverlapping`](std::ptr::copy_nonoverlapping).
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: passed on from the caller: two words that overlap make 8 to 16 bytes.
    unsafe {
        if (8..=16).contains(&length) {
            let behind = length - 8;
            let ends = [0, behind].map(|at| from.add(at).cast::<u64>().read_unaligned());
            to.cast::<u64>().write_unaligned(ends[0]);
            to.add(behind).cast::<u64>().write_unaligned(ends[1]);
        } else {
            std::ptr::copy_nonoverlapping(from, to, length);
        }
    }
}

/// Copies what the elements of a list name, one behind the other; `None` if there is no room for it.
///
/// # Safety
///
/// The elements name readable memory of this process, which is not that of `buffer`.
#[inline]
unsafe fn gather<'b>(list: &[Sge], buffer: &'b mut [MaybeUninit<u8>]) -> Option<&'b [u8]> {
    let mut used = 0;
    for sge in list {
        let length = sge.len as usize;
        let room = buffer.get_mut(used..).filter(|room| room.len() >= length)?;
        let from = std::ptr::with_exposed_provenance::<u8>(sge.addr as usize);
        // SAFETY: the element names readable memory, which is another, and there is room for `length`
        // bytes, as was just checked.
        unsafe { copy(from, room.as_mut_ptr().cast(), length) };
        used += length;
    }
    // SAFETY: the loop has written the first `used` bytes.
    Some(unsafe { slice::from_raw_parts(buffer.as_ptr().cast(), used) })
}

/// Posts a request by the shortest way, if it is a single send, write or read of a connection and that way
/// takes it: nothing that other requests need is looked at. `false` if not: then it was not posted.
///
/// # Safety
///
/// `wr` is null or a valid request.
#[inline(always)]
unsafe fn post_at_once(instance: &Instance, qp: QpId, wr: *const ibv_send_wr) -> bool {
    // SAFETY: "null or a valid request".
    let Some(wr) = (unsafe { wr.as_ref() }) else { return false };
    // SAFETY: the opcode says that this field of the union is in use.
    let place = || unsafe { (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) };
    let op = match wr.opcode {
        IBV_WR_SEND => SendOp::Send,
        IBV_WR_SEND_WITH_IMM => SendOp::SendImm(wr.imm_data),
        IBV_WR_RDMA_WRITE => {
            let (addr, rkey) = place();
            SendOp::Write { addr, rkey }
        }
        IBV_WR_RDMA_READ => {
            let (addr, rkey) = place();
            SendOp::Read { addr, rkey }
        }
        _ => return false,
    };
    let list = wr.sg_list.cast::<Sge>();
    let short = matches!(wr.num_sge, 1..=FEW) && !list.is_null() && list.is_aligned();
    let (true, Some(flags)) = (short && wr.next.is_null(), SendFlags::from_bits(wr.send_flags))
    else {
        return false;
    };
    // SAFETY: a valid request has a list of so many elements, which was found aligned.
    let list = unsafe { slice::from_raw_parts(list, wr.num_sge as usize) };
    let mut buffer = [const { MaybeUninit::uninit() }; SMALL_INLINE];
    let payload = if flags.contains(SendFlags::INLINE) {
        // SAFETY: the elements of a valid request name readable memory; the buffer is on this stack,
        // which no program passes.
        match unsafe { gather(list, &mut buffer) } {
            Some(bytes) => Payload::Inline(bytes),
            None => return false,
        }
    } else {
        Payload::Sges(list)
    };
    // Queue pairs whose requests address somebody are not served here.
    let request = SendWr { wr_id: wr.wr_id, to: To::Peer, op, flags, payload };
    instance.engine.post_at_once(qp, &request)
}

/// Checks every request of a list, of which none is posted yet.
///
/// # Safety
///
/// As the table demands of `post_batch`.
#[cold]
unsafe fn check_all(
    instance: &Instance,
    doorbell: &mut Doorbell<'_>,
    qp: QpId,
    wr: *const ibv_send_wr,
) -> Outcome {
    let (mut next, mut ahead, service) = (wr, 0, doorbell.service_of(qp));
    // SAFETY: passed on from the caller: a list of valid requests, ended by null.
    while let Some(wr) = unsafe { next.as_ref() } {
        // SAFETY: as above.
        unsafe {
            with_request(instance, service, wr, |request| {
                Ok(doorbell.check_send(qp, request, ahead)?)
            })?;
        }
        (next, ahead) = (wr.next, ahead + 1);
    }
    Ok(())
}

/// Says which request of a list could not be posted.
///
/// # Safety
///
/// `bad` is valid for writes.
#[cold]
unsafe fn refuse<T>(bad: *mut *const T, wr: *const T, failure: Failure) -> Outcome {
    // SAFETY: "valid for writes".
    unsafe { bad.write(wr) };
    Err(failure)
}

/// Posts a list of sends.
///
/// # Safety
///
/// As the table demands of `post_send`.
#[inline(never)]
unsafe fn post_sends(
    instance: &Instance,
    qp: QpId,
    wr: *const ibv_send_wr,
    bad: *mut *const ibv_send_wr,
) -> Outcome {
    let mut doorbell = match instance.engine.doorbell() {
        Ok(doorbell) => doorbell,
        // SAFETY: passed on from the caller.
        Err(error) => return unsafe { refuse(bad, wr, error.into()) },
    };
    let service = doorbell.service_of(qp);
    let mut next = wr;
    // SAFETY: passed on from the caller: a list of valid requests, ended by null.
    while let Some(wr) = unsafe { next.as_ref() } {
        // SAFETY: as above.
        let posted = unsafe {
            with_request(instance, service, wr, |request| Ok(doorbell.post_send(qp, request)?))
        };
        if let Err(failure) = posted {
            // SAFETY: passed on from the caller.
            return unsafe { refuse(bad, next, failure) };
        }
        next = wr.next;
    }
    Ok(())
}

/// Posts a list of receives, each by `post`.
///
/// # Safety
///
/// As the table demands of `post_recv`.
#[inline]
unsafe fn post_receives(
    wr: *const ibv_recv_wr,
    bad: *mut *const ibv_recv_wr,
    mut post: impl FnMut(&mut Doorbell<'_>, u64, &[Sge]) -> Outcome,
) -> Outcome {
    let mut doorbell = match opened().and_then(|i| Ok(i.engine.doorbell()?)) {
        Ok(doorbell) => doorbell,
        // SAFETY: passed on from the caller.
        Err(failure) => return unsafe { refuse(bad, wr, failure) },
    };
    let mut next = wr;
    // SAFETY: the list consists of valid requests and ends with null.
    while let Some(wr) = unsafe { next.as_ref() } {
        // SAFETY: the request's list is valid.
        let list = unsafe { sges(wr.sg_list, wr.num_sge) };
        if let Err(failure) = list.and_then(|list| post(&mut doorbell, wr.wr_id, &list)) {
            // SAFETY: passed on from the caller.
            return unsafe { refuse(bad, next, failure) };
        }
        next = wr.next;
    }
    Ok(())
}

entries! {
    /// [`EngineApi::post_send`]
    fn post_send(qp: QpHandle, wr: *const ibv_send_wr, bad: *mut *const ibv_send_wr) {
        let instance = match opened() {
            Ok(instance) => instance,
            // SAFETY: the table demands that `bad` is valid.
            Err(failure) => return unsafe { refuse(bad, wr, failure) },
        };
        let qp = instance.qp(qp);
        // SAFETY: the table demands a list of valid requests, and that `bad` is valid.
        unsafe {
            if post_at_once(instance, qp, wr) {
                return Ok(());
            }
            post_sends(instance, qp, wr, bad)
        }
    }

    /// [`EngineApi::post_batch`]
    fn post_batch(qp: QpHandle, wr: *const ibv_send_wr) {
        let instance = opened()?;
        let qp = instance.qp(qp);
        // SAFETY: the table demands a list of valid requests.
        if unsafe { post_at_once(instance, qp, wr) } {
            return Ok(());
        }
        let mut doorbell = instance.engine.doorbell()?;
        let service = doorbell.service_of(qp);
        // SAFETY: the table demands a list of valid requests, ended by null.
        if unsafe { wr.as_ref() }.is_some_and(|first| !first.next.is_null()) {
            // What is transmitted while it is posted cannot be taken back: all are checked first. A
            // single one need not be.
            // SAFETY: as above.
            unsafe { check_all(instance, &mut doorbell, qp, wr) }?;
        }
        let mut next = wr;
        // SAFETY: as above.
        while let Some(wr) = unsafe { next.as_ref() } {
            // SAFETY: as above.
            let posted = unsafe {
                with_request(instance, service, wr, |request| Ok(doorbell.post_send(qp, request)?))
            };
            posted?;
            next = wr.next;
        }
        Ok(())
    }

    /// [`EngineApi::post_recv`]
    fn post_recv(qp: QpHandle, wr: *const ibv_recv_wr, bad: *mut *const ibv_recv_wr) {
        let qp = opened()?.qp(qp);
        // SAFETY: the table demands what `post_receives` does.
        unsafe {
            post_receives(wr, bad, |doorbell, wr_id, list| {
                Ok(doorbell.post_recv(qp, wr_id, list)?)
            })
        }
    }

    /// [`EngineApi::post_srq_recv`]
    fn post_srq_recv(srq: SrqHandle, wr: *const ibv_recv_wr, bad: *mut *const ibv_recv_wr) {
        let srq = opened()?.srq(srq);
        // SAFETY: the table demands what `post_receives` does.
        unsafe {
            post_receives(wr, bad, |doorbell, wr_id, list| {
                Ok(doorbell.post_srq_recv(srq, wr_id, list)?)
            })
        }
    }
}

entries! {
    /// [`EngineRawApi::post_wq_recv`]
    fn post_wq_recv(wq: WqHandle, wr: *const ibv_recv_wr, bad: *mut *const ibv_recv_wr) {
        let wq = opened()?.wq(wq);
        // SAFETY: the table demands what `post_receives` does.
        unsafe {
            post_receives(wr, bad, |doorbell, wr_id, list| {
                Ok(doorbell.post_wq_recv(wq, wr_id, list)?)
            })
        }
    }
}

/// A completion as verbs has it. Only datagrams have a GRH.
#[inline]
fn wc(completion: &Completion) -> ibv_wc {
    let (imm_data, wc_flags) = match completion.extra {
        // Verbs has no place for an address.
        WcExtra::None | WcExtra::From(_) | WcExtra::Place(_) => (0, 0),
        WcExtra::Imm(imm) => (imm, IBV_WC_WITH_IMM),
        WcExtra::Invalidated(key) => (key, IBV_WC_WITH_INV),
    };
    let wc_flags = wc_flags | if completion.grh { IBV_WC_GRH } else { 0 };
    ibv_wc {
        wr_id: completion.wr_id,
        status: completion.status as u32,
        opcode: completion.opcode as u32,
        // Everything that is to be said is in the status.
        vendor_err: 0,
        byte_len: completion.byte_len,
        imm_data,
        qp_num: completion.qp_num.0,
        src_qp: completion.src_qp.0,
        wc_flags,
        pkey_index: 0,
        slid: completion.slid,
        sl: completion.sl,
        dlid_path_bits: 0,
    }
}

/// # Safety
///
/// As the table demands of `poll_cq`.
#[inline(always)]
unsafe fn poll(cq: CqHandle, max: i32, out: *mut ibv_wc) -> Outcome<usize> {
    let instance = opened()?;
    let mut next = out;
    let max = usize::try_from(max).unwrap_or(0);
    let found = instance.engine.poll_cq_each(instance.cq(cq), max, |completion| {
        // SAFETY: the engine hands out no more than `max`, for which there is room.
        unsafe {
            next.write(wc(completion));
            next = next.add(1);
        }
    })?;
    Ok(found)
}

/// [`EngineApi::poll_cq_stamped`]
///
/// # Safety
///
/// As the table demands of its arguments.
pub(crate) unsafe extern "C" fn poll_cq_stamped(
    cq: CqHandle,
    out: *mut ibv_wc,
    stamp: *mut u64,
) -> i32 {
    wall::<Count>("poll_cq_stamped", || {
        let polled =
            opened().and_then(|instance| Ok(instance.engine.poll_cq_stamped(instance.cq(cq))?));
        Ok(match polled {
            Ok(Some((completion, time))) => {
                // SAFETY: the table demands that both are valid for writes.
                unsafe {
                    out.write(wc(&completion));
                    stamp.write(time.0);
                }
                1
            }
            Ok(None) => 0,
            Err(failure) => -failure.0.code(),
        })
    })
}

/// [`EngineApi::poll_cq`]
///
/// # Safety
///
/// As the table demands of its arguments.
pub(crate) unsafe extern "C" fn poll_cq(cq: CqHandle, max: i32, out: *mut ibv_wc) -> i32 {
    if opened().is_ok_and(|instance| instance.engine.take_spared(instance.cq(cq))) {
        return 0;
    }
    // SAFETY: the table demands the same.
    unsafe { poll_and_look(cq, max, out) }
}

/// Out of line, so that a poll which need not look is over before this one's registers are saved.
///
/// # Safety
///
/// As the table demands of the arguments of `poll_cq`.
#[inline(never)]
unsafe extern "C" fn poll_and_look(cq: CqHandle, max: i32, out: *mut ibv_wc) -> i32 {
    wall::<Count>("poll_cq", || {
        // SAFETY: the table demands the same.
        Ok(match unsafe { poll(cq, max, out) } {
            Ok(count) => count as i32,
            Err(failure) => -failure.0.code(),
        })
    })
}
