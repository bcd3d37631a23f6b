//! Completion queues that are polled field by field (`ibv_create_cq_ex(3)`).
//!
//! One completion is taken from the engine at a time and kept in the queue's private part while the
//! program reads its fields. The program may poll the same queue by `ibv_poll_cq` too.

use libc::c_uint;
use quipu_abi_trace::{entry, quick_entry};
use quipu_abi_types::*;
use quipu_cabi::{Errno, ErrorNumber, Null, Plain, Void};

use crate::context::context;
use crate::cq::{Cq, Wanted, create};
use crate::engine::errno_of;
use crate::pd::pd;
use crate::query::clock;

/// What asks for the time at which a completion was made.
const STAMPS: u64 =
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
/// What `wc_flags` may ask for: all that [`ibv_wc`] has, and the time.
const KNOWN_FIELDS: u64 = IBV_WC_STANDARD_FLAGS | STAMPS;

/// Fills the table of a queue: every entry, whatever was asked for, since a program that calls one
/// without asking would otherwise jump to nowhere.
pub(crate) fn fill(cq: *mut ibv_cq_ex) {
    // SAFETY: called with a queue that was just made and that no other thread knows.
    let cq = unsafe { &mut *cq };
    quipu_abi_trace::fill!(cq, crate::cq_ex:
        start_poll next_poll end_poll read_opcode read_vendor_err read_byte_len read_imm_data
        read_qp_num read_src_qp read_wc_flags read_slid read_sl read_dlid_path_bits
        read_completion_ts read_cvlan read_flow_tag read_tm_info read_completion_wallclock_ns
    );
}

/// Takes the next completion into the queue's private part; ENOENT if there is none.
///
/// # Safety
///
/// The caller holds `cq.polling`.
unsafe fn take(cq: &Cq) -> Result<(), Errno> {
    let current = cq.current.get();
    // SAFETY: `current` is room for one completion, and `stamp` for one stamp, guarded by the lock that
    // the caller holds.
    let polled = unsafe {
        match &cq.stamp {
            None => (cq.api.poll_cq)(cq.handle, 1, current),
            Some(stamp) => (cq.api.poll_cq_stamped)(cq.handle, current, stamp.get()),
        }
    };
    match polled {
        1.. => {
            let public = cq.public();
            // SAFETY: the public part lives as long as the queue.
            unsafe {
                (*public).status = (*current).status;
                (*public).wr_id = (*current).wr_id;
            }
            Ok(())
        }
        0 => Err(Errno::ENOENT),
        negative => Err(errno_of(-negative)),
    }
}

/// The completion that the program reads, a copy.
fn current(raw: *mut ibv_cq_ex) -> Result<ibv_wc, Errno> {
    // SAFETY: the program passes a queue, between `start_poll` and `end_poll` of its own, so this
    // thread holds the lock that guards `current`.
    unsafe {
        let cq = Cq::get(raw)?;
        Ok(*cq.current.get())
    }
}

/// When the completion that the program reads was made, by the clock of the device.
fn stamp(raw: *mut ibv_cq_ex) -> Result<u64, Errno> {
    // SAFETY: as in `current`.
    unsafe { Ok(*Cq::get(raw)?.stamp.as_ref().ok_or(Errno::EOPNOTSUPP)?.get()) }
}

/// The same by the clock on the wall, in nanoseconds since 1970.
fn wallclock(raw: *mut ibv_cq_ex) -> Result<u64, Errno> {
    let made = stamp(raw)?;
    // SAFETY: as in `current`; the context of a live queue is alive.
    let (wall, context) = unsafe { (&Cq::get(raw)?.wall, context((*raw).cq.context)?) };
    wall.at(made, || clock(context))
}

entry! {
    /// `ibv_create_cq_ex(3)`: VLANs, flow tags and tag matching are not supported.
    fn create_cq_ex(raw: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> Null<ibv_cq_ex> {
        // SAFETY: the program passes a context, and null or a valid pointer.
        let (context, attr) = unsafe { (context(raw)?, attr.as_ref().ok_or(Errno::EINVAL)?) };
        let known = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
        if attr.comp_mask & !known != 0 || attr.wc_flags & !KNOWN_FIELDS != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let has_flags = attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0;
        let flags = if has_flags { attr.flags } else { 0 };
        if flags & !(IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN) != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let wanted = Wanted {
            cqe: attr.cqe,
            cq_context: attr.cq_context,
            channel: attr.channel,
            comp_vector: attr.comp_vector,
            flags,
            stamps: attr.wc_flags & STAMPS != 0,
        };
        if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
            // SAFETY: the program passes a domain.
            unsafe { pd(attr.parent_domain) }?;
        }
        // SAFETY: the program passes null or a channel.
        let cq = unsafe { create(raw, context, &wanted) }?;
        fill(cq);
        Ok(cq)
    }
}

quick_entry! {
    /// `ibv_start_poll`: takes the first completion, and the queue for this thread; ENOENT if there
    /// is none.
    fn start_poll(raw: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> ErrorNumber {
        // SAFETY: the program passes a queue, and null or a valid pointer.
        let (cq, attr) = unsafe { (Cq::get(raw)?, attr.as_ref()) };
        if attr.is_some_and(|attr| attr.comp_mask != 0) {
            return Err(Errno::EINVAL);
        }
        cq.polling.lock();
        // SAFETY: the lock was just taken.
        let taken = unsafe { take(cq) };
        if taken.is_err() {
            // Only a successful start is followed by an end.
            cq.polling.unlock();
        } else if cq.stamp.is_some() {
            cq.wall.renew();
        }
        taken
    }

    /// `ibv_next_poll`
    fn next_poll(raw: *mut ibv_cq_ex) -> ErrorNumber {
        // SAFETY: the program passes a queue that this thread is polling.
        unsafe { take(Cq::get(raw)?) }
    }

    /// `ibv_end_poll`
    fn end_poll(raw: *mut ibv_cq_ex) -> Void {
        // SAFETY: the program passes a queue that this thread is polling.
        unsafe { Cq::get(raw)? }.polling.unlock();
        Ok(())
    }

    /// `ibv_wc_read_opcode`
    fn read_opcode(cq: *mut ibv_cq_ex) -> Plain<u32> { Ok(current(cq)?.opcode) }
    /// `ibv_wc_read_vendor_err`
    fn read_vendor_err(cq: *mut ibv_cq_ex) -> Plain<u32> { Ok(current(cq)?.vendor_err) }
    /// `ibv_wc_read_byte_len`
    fn read_byte_len(cq: *mut ibv_cq_ex) -> Plain<u32> { Ok(current(cq)?.byte_len) }
    /// `ibv_wc_read_imm_data` and `ibv_wc_read_invalidated_rkey`
    fn read_imm_data(cq: *mut ibv_cq_ex) -> Plain<u32> { Ok(current(cq)?.imm_data) }
    /// `ibv_wc_read_qp_num`
    fn read_qp_num(cq: *mut ibv_cq_ex) -> Plain<u32> { Ok(current(cq)?.qp_num) }
    /// `ibv_wc_read_src_qp`
    fn read_src_qp(cq: *mut ibv_cq_ex) -> Plain<u32> { Ok(current(cq)?.src_qp) }
    /// `ibv_wc_read_wc_flags`
    fn read_wc_flags(cq: *mut ibv_cq_ex) -> Plain<c_uint> { Ok(current(cq)?.wc_flags) }
    /// `ibv_wc_read_slid`
    fn read_slid(cq: *mut ibv_cq_ex) -> Plain<u32> { Ok(current(cq)?.slid.into()) }
    /// `ibv_wc_read_sl`
    fn read_sl(cq: *mut ibv_cq_ex) -> Plain<u8> { Ok(current(cq)?.sl) }
    /// `ibv_wc_read_dlid_path_bits`
    fn read_dlid_path_bits(cq: *mut ibv_cq_ex) -> Plain<u8> { Ok(current(cq)?.dlid_path_bits) }
    /// `ibv_wc_read_completion_ts`: in ticks of the device's clock.
    fn read_completion_ts(cq: *mut ibv_cq_ex) -> Plain<u64> { stamp(cq) }
    /// `ibv_wc_read_cvlan`: not supported.
    fn read_cvlan(_cq: *mut ibv_cq_ex) -> Plain<u16> { Err(Errno::EOPNOTSUPP) }
    /// `ibv_wc_read_flow_tag`: not supported.
    fn read_flow_tag(_cq: *mut ibv_cq_ex) -> Plain<u32> { Err(Errno::EOPNOTSUPP) }
    /// `ibv_wc_read_tm_info`: not supported.
    fn read_tm_info(_cq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) -> Void {
        // SAFETY: the program passes null or a valid pointer.
        if let Some(info) = unsafe { info.as_mut() } {
            *info = ibv_wc_tm_info { tag: 0, r#priv: 0 };
        }
        Ok(())
    }
    /// `ibv_wc_read_completion_wallclock_ns`
    fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> Plain<u64> { wallclock(cq) }
}
