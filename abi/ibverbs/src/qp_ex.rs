//! Posting work call by call (`ibv_wr_post(3)`): `wr_start`, an operation and its setters for each
//! work request, then `wr_complete` or `wr_abort`.
//!
//! The calls build the work requests that `ibv_post_send` takes, in memory that the queue pair
//! keeps, and `wr_complete` posts them as one list, all or none.

mod batch;

use std::borrow::Cow;
use std::cell::UnsafeCell;
use std::{ptr, slice};

use libc::c_void;
use quipu_abi_trace::{entry, quick_entry};
use quipu_abi_types::*;
use quipu_cabi::{Errno, ErrorNumber, MAX_ELEMENTS, Null, SpinLock, Void};

use crate::context::context;
use crate::engine::check;
use crate::qp::{Extras, Hashed, Home, Qp, create};
use crate::wq::Table;
use batch::Batch;

/// The operations that `send_ops_flags` may ask for.
const KNOWN_OPERATIONS: u64 = IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_BIND_MW
    | IBV_QP_EX_WITH_SEND_WITH_INV
    | IBV_QP_EX_WITH_ATOMIC_WRITE
    | IBV_QP_EX_WITH_FLUSH;

/// What `wr_flags` may say: whether a payload is inline is up to its setter.
const FLAGS: u32 = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_IP_CSUM;

/// The payload of an atomic write.
const ATOMIC_WRITE_BYTES: usize = 8;

/// Where a queue pair's work is built.
#[derive(Default)]
pub(crate) struct Builder {
    /// Held from `wr_start` to `wr_complete` or `wr_abort`.
    building: SpinLock,
    /// Guarded by `building`.
    batch: UnsafeCell<Batch>,
}

// SAFETY: the batch, with the raw pointers in its work requests, is only touched by the thread that
// holds `building`.
unsafe impl Send for Builder {}
// SAFETY: as above.
unsafe impl Sync for Builder {}

/// Fills the table of a queue pair: every entry, so that a program that calls one it did not ask for
/// gets an error rather than a jump to nowhere.
///
/// # Safety
///
/// `qp` was just made, and no other thread knows it.
pub(crate) unsafe fn fill(qp: *mut ibv_qp_ex) {
    // SAFETY: passed on from the caller.
    let qp = unsafe { &mut *qp };
    quipu_abi_trace::fill!(qp, crate::qp_ex:
        wr_atomic_cmp_swp wr_atomic_fetch_add wr_bind_mw wr_local_inv wr_rdma_read wr_rdma_write
        wr_rdma_write_imm wr_send wr_send_imm wr_send_inv wr_send_tso wr_set_ud_addr
        wr_set_xrc_srqn wr_set_inline_data wr_set_inline_data_list wr_set_sge wr_set_sge_list
        wr_start wr_complete wr_abort wr_atomic_write wr_flush
    );
}

/// A list of the program; `None` if its length makes no sense.
///
/// # Safety
///
/// As [`quipu_cabi::list`], unless there are more than [`MAX_ELEMENTS`].
unsafe fn elements<'a, T: Copy>(list: *const T, count: usize) -> Option<Cow<'a, [T]>> {
    // SAFETY: passed on from the caller.
    (count <= MAX_ELEMENTS).then(|| unsafe { quipu_cabi::list(list, count) })
}

/// The builder of a queue pair.
///
/// # Safety
///
/// `raw` is a queue pair of the program.
#[inline]
unsafe fn builder<'a>(raw: *mut ibv_qp_ex) -> Result<(&'a Qp, &'a Builder), Errno> {
    // SAFETY: passed on from the caller.
    let qp = unsafe { Qp::get(raw) }?;
    Ok((qp, qp.builder.as_ref().ok_or(Errno::EINVAL)?))
}

/// Changes the batch of a queue pair that this thread is building.
///
/// # Safety
///
/// `raw` is a queue pair of the program, for which this thread has called `wr_start`.
#[inline]
unsafe fn build(raw: *mut ibv_qp_ex, change: impl FnOnce(&mut Batch)) -> Result<(), Errno> {
    // SAFETY: `wr_start` took the lock that guards the batch, on this thread.
    unsafe { change(&mut *builder(raw)?.1.batch.get()) };
    Ok(())
}

/// Begins a work request with the id and flags that the program has left in the queue pair.
///
/// # Safety
///
/// As [`build`].
#[inline]
unsafe fn operation(
    raw: *mut ibv_qp_ex,
    opcode: u32,
    complete: impl FnOnce(&mut ibv_send_wr),
) -> Result<(), Errno> {
    // SAFETY: passed on from the caller; the public part lives as long as the queue pair.
    unsafe {
        let (wr_id, flags) = ((*raw).wr_id, (*raw).wr_flags & FLAGS);
        build(raw, |batch| complete(batch.begin(opcode, wr_id, flags)))
    }
}

/// An operation that this adapter does not have: the batch fails.
///
/// # Safety
///
/// As [`build`].
unsafe fn unsupported(raw: *mut ibv_qp_ex) -> Result<(), Errno> {
    // SAFETY: passed on from the caller.
    unsafe { build(raw, |batch| batch.fail(Errno::EOPNOTSUPP)) }
}

fn remote(remote_addr: u64, rkey: u32) -> ibv_send_wr_wr {
    ibv_send_wr_wr { rdma: ibv_send_wr_rdma { remote_addr, rkey } }
}

/// The bytes of a buffer of the program.
///
/// # Safety
///
/// `addr` is readable for `length` bytes, unless that is 0, and does not change meanwhile.
unsafe fn bytes<'a>(addr: *const c_void, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: passed on from the caller.
    unsafe { slice::from_raw_parts(addr.cast(), length) }
}

// SAFETY (of every `unsafe` below): the program passes a queue pair, calls operations and setters
// between `wr_start` and `wr_complete` or `wr_abort`, on one thread, and passes pointers that are
// valid for the call. That is what the manual page demands, and what `build` needs.
entry! {
    /// `ibv_create_qp_ex(3)`
    fn create_qp_ex(raw: *mut ibv_context, init: *mut ibv_qp_init_attr_ex) -> Null<ibv_qp> {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let init = unsafe {
            context(raw)?;
            init.as_mut().ok_or(Errno::EINVAL)?
        };
        let has = |bit: u32| init.comp_mask & bit != 0;
        let known = IBV_QP_INIT_ATTR_PD
            | IBV_QP_INIT_ATTR_XRCD
            | IBV_QP_INIT_ATTR_CREATE_FLAGS
            | IBV_QP_INIT_ATTR_IND_TABLE
            | IBV_QP_INIT_ATTR_RX_HASH
            | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        if init.comp_mask & !known != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let home = match init.qp_type {
            IBV_QPT_XRC_RECV if has(IBV_QP_INIT_ATTR_XRCD) => Home::Xrcd(init.xrcd),
            IBV_QPT_XRC_RECV => return Err(Errno::EINVAL),
            _ if has(IBV_QP_INIT_ATTR_PD) => Home::Pd(init.pd),
            _ => return Err(Errno::EINVAL),
        };
        let builds = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS);
        let send_ops = if builds { init.send_ops_flags } else { 0 };
        if send_ops & !KNOWN_OPERATIONS != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let create_flags =
            if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) { init.create_flags } else { 0 };
        let builder = builds.then(Box::<Builder>::default);
        let hashed = match (has(IBV_QP_INIT_ATTR_IND_TABLE), has(IBV_QP_INIT_ATTR_RX_HASH)) {
            (false, false) => None,
            (true, true) if init.qp_type == IBV_QPT_RAW_PACKET && !builds && create_flags == 0 => {
                // SAFETY: the program passes a table.
                let table = unsafe { Table::get(init.rwq_ind_tbl) }?.handle;
                Some(Hashed { table, hash: init.rx_hash_conf })
            }
            _ => return Err(Errno::EINVAL),
        };
        // SAFETY: the extended structure begins as the plain one does; the program passes a domain,
        // and null or objects of its own.
        unsafe {
            let plain = &mut *ptr::from_mut(init).cast::<ibv_qp_init_attr>();
            let qp = create(home, plain, Extras { create_flags, send_ops, builder, hashed })?;
            fill(qp);
            Ok(qp.cast())
        }
    }
}

// SAFETY (of every `unsafe` below): as above.
quick_entry! {
    /// `ibv_wr_start`: begins a batch, and takes the send queue for this thread.
    fn wr_start(raw: *mut ibv_qp_ex) -> Void {
        // SAFETY: see above.
        let (_, builder) = unsafe { builder(raw) }?;
        builder.building.lock();
        Ok(())
    }

    /// `ibv_wr_complete`: posts the whole batch or, with an error number, nothing.
    fn wr_complete(raw: *mut ibv_qp_ex) -> ErrorNumber {
        // SAFETY: see above.
        let (qp, builder) = unsafe { builder(raw) }?;
        // SAFETY: this thread holds the lock since `wr_start`.
        let batch = unsafe { &mut *builder.batch.get() };
        let result = match batch.error {
            Some(errno) => Err(errno),
            // SAFETY: `link` gives a list of valid work requests, or null.
            None => check(unsafe { (qp.api.post_batch)(qp.handle, batch.link()) }),
        };
        // A program that completes it twice posts nothing the second time.
        batch.clear();
        builder.building.unlock();
        result
    }

    /// `ibv_wr_abort`: forgets the batch.
    fn wr_abort(raw: *mut ibv_qp_ex) -> Void {
        // SAFETY: see above.
        let (_, builder) = unsafe { builder(raw) }?;
        // SAFETY: this thread holds the lock since `wr_start`.
        unsafe { (*builder.batch.get()).clear() };
        builder.building.unlock();
        Ok(())
    }

    /// `ibv_wr_send`
    fn wr_send(qp: *mut ibv_qp_ex) -> Void {
        // SAFETY: see above.
        unsafe { operation(qp, IBV_WR_SEND, |_| ()) }
    }

    /// `ibv_wr_send_imm`: big endian.
    fn wr_send_imm(qp: *mut ibv_qp_ex, imm_data: u32) -> Void {
        // SAFETY: see above.
        unsafe { operation(qp, IBV_WR_SEND_WITH_IMM, |wr| wr.imm_data = imm_data) }
    }

    /// `ibv_wr_send_inv`
    fn wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32) -> Void {
        // SAFETY: see above.
        unsafe { operation(qp, IBV_WR_SEND_WITH_INV, |wr| wr.imm_data = rkey) }
    }

    /// `ibv_wr_rdma_write`
    fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) -> Void {
        // SAFETY: see above.
        unsafe { operation(qp, IBV_WR_RDMA_WRITE, |wr| wr.wr = remote(remote_addr, rkey)) }
    }

    /// `ibv_wr_rdma_write_imm`: big endian.
    fn wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm_data: u32) -> Void {
        // SAFETY: see above.
        unsafe {
            operation(qp, IBV_WR_RDMA_WRITE_WITH_IMM, |wr| {
                wr.imm_data = imm_data;
                wr.wr = remote(remote_addr, rkey);
            })
        }
    }

    /// `ibv_wr_rdma_read`
    fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) -> Void {
        // SAFETY: see above.
        unsafe { operation(qp, IBV_WR_RDMA_READ, |wr| wr.wr = remote(remote_addr, rkey)) }
    }

    /// `ibv_wr_atomic_cmp_swp`
    fn wr_atomic_cmp_swp(
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        compare: u64,
        swap: u64,
    ) -> Void {
        let atomic = ibv_send_wr_atomic { remote_addr, compare_add: compare, swap, rkey };
        // SAFETY: see above.
        unsafe { operation(qp, IBV_WR_ATOMIC_CMP_AND_SWP, |wr| wr.wr.atomic = atomic) }
    }

    /// `ibv_wr_atomic_fetch_add`
    fn wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, add: u64) -> Void {
        let atomic = ibv_send_wr_atomic { remote_addr, compare_add: add, swap: 0, rkey };
        // SAFETY: see above.
        unsafe { operation(qp, IBV_WR_ATOMIC_FETCH_AND_ADD, |wr| wr.wr.atomic = atomic) }
    }

    /// `ibv_wr_local_inv`
    fn wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32) -> Void {
        // SAFETY: see above.
        unsafe { operation(qp, IBV_WR_LOCAL_INV, |wr| wr.imm_data = rkey) }
    }

    /// `ibv_wr_bind_mw`
    fn wr_bind_mw(
        qp: *mut ibv_qp_ex,
        mw: *mut ibv_mw,
        rkey: u32,
        info: *const ibv_mw_bind_info,
    ) -> Void {
        // SAFETY: see above.
        unsafe {
            let Some(info) = info.as_ref() else {
                return build(qp, |batch| batch.fail(Errno::EINVAL));
            };
            let bind_mw = ibv_send_wr_bind_mw { mw, rkey, bind_info: *info };
            operation(qp, IBV_WR_BIND_MW, |wr| wr.ext.bind_mw = bind_mw)
        }
    }

    /// `ibv_wr_send_tso`: not supported.
    fn wr_send_tso(qp: *mut ibv_qp_ex, _hdr: *mut c_void, _hdr_sz: u16, _mss: u16) -> Void {
        // SAFETY: see above.
        unsafe { unsupported(qp) }
    }

    /// `ibv_wr_atomic_write`: the 8 bytes are copied now.
    fn wr_atomic_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, value: *const c_void) -> Void {
        // SAFETY: see above.
        unsafe {
            let value = bytes(value, ATOMIC_WRITE_BYTES);
            operation(qp, IBV_WR_ATOMIC_WRITE, |wr| wr.wr = remote(addr, rkey))?;
            build(qp, |batch| batch.set_inline(std::iter::once(value)))
        }
    }

    /// `ibv_wr_flush`
    fn wr_flush(
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        length: usize,
        kind: u8,
        level: u8,
    ) -> Void {
        let (compare_add, swap) = (length as u64, u64::from(u16::from_le_bytes([kind, level])));
        let atomic = ibv_send_wr_atomic { remote_addr, compare_add, swap, rkey };
        // SAFETY: see above.
        unsafe { operation(qp, ENGINE_WR_FLUSH, |wr| wr.wr.atomic = atomic) }
    }

    /// `ibv_wr_set_ud_addr`
    fn wr_set_ud_addr(
        qp: *mut ibv_qp_ex,
        ah: *mut ibv_ah,
        remote_qpn: u32,
        remote_qkey: u32,
    ) -> Void {
        let ud = ibv_send_wr_ud { ah, remote_qpn, remote_qkey };
        // SAFETY: see above.
        unsafe { build(qp, |batch| batch.last(|wr| wr.wr.ud = ud)) }
    }

    /// `ibv_wr_set_xrc_srqn`
    fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, remote_srqn: u32) -> Void {
        // SAFETY: see above.
        unsafe { build(qp, |batch| batch.last(|wr| wr.qp_type.xrc.remote_srqn = remote_srqn)) }
    }

    /// `ibv_wr_set_sge`
    fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) -> Void {
        // SAFETY: see above.
        unsafe { build(qp, |batch| batch.set_sges(&[ibv_sge { addr, length, lkey }])) }
    }

    /// `ibv_wr_set_sge_list`
    fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) -> Void {
        // SAFETY: see above.
        unsafe {
            build(qp, |batch| match elements(list, count) {
                Some(list) => batch.set_sges(&list),
                None => batch.fail(Errno::EINVAL),
            })
        }
    }

    /// `ibv_wr_set_inline_data`: the payload is copied now.
    fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) -> Void {
        // SAFETY: see above.
        unsafe {
            let payload = bytes(addr, length);
            build(qp, |batch| batch.set_inline(std::iter::once(payload)))
        }
    }

    /// `ibv_wr_set_inline_data_list`: the payload is copied now.
    fn wr_set_inline_data_list(
        qp: *mut ibv_qp_ex,
        count: usize,
        list: *const ibv_data_buf,
    ) -> Void {
        // SAFETY: see above.
        unsafe {
            build(qp, |batch| match elements(list, count) {
                Some(list) => {
                    batch.set_inline(list.iter().map(|part| bytes(part.addr, part.length)));
                }
                None => batch.fail(Errno::EINVAL),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sge(addr: u64) -> ibv_sge {
        ibv_sge { addr, length: 8, lkey: 1 }
    }

    #[test]
    fn a_list_longer_than_any_queue_takes_is_not_read() {
        let list = [sge(100); 2];
        // SAFETY: of the longer ones nothing is read.
        unsafe {
            assert_eq!(elements(list.as_ptr(), 2).as_deref(), Some(&list[..]));
            assert_eq!(elements(list.as_ptr(), 0).as_deref(), Some(&[][..]));
            for count in [MAX_ELEMENTS + 1, usize::MAX] {
                assert_eq!(elements(list.as_ptr(), count), None);
            }
        }
    }
}
