//! Device memory, imports, files, time stamps, moderation and what else goes through the extended table.

use std::mem::zeroed;
use std::ptr;

use libc::c_int;
use quipu_abi_types::*;
use quipu_cabi::Errno;

use super::{Program, open};
use crate::{buf, context, dm, import, mr, pd};

/// The extended table of a context, as inline functions find it.
///
/// # Safety
///
/// The context is alive.
unsafe fn table<'a>(context: *mut ibv_context) -> &'a verbs_context {
    let offset = std::mem::offset_of!(verbs_context, context);
    // SAFETY: every context of this library ends a verbs_context.
    unsafe { &*context.byte_sub(offset).cast::<verbs_context>() }
}

#[test]
fn device_memory_is_copied_registered_and_kept() {
    let context = open();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let table = table(context);
        let mut attr = ibv_alloc_dm_attr { length: 64, log_align_req: 3, comp_mask: 0 };
        let memory = table.alloc_dm.unwrap()(context, &mut attr);
        let (to, from) = ((*memory).memcpy_to_dm.unwrap(), (*memory).memcpy_from_dm.unwrap());
        let mut out = [0u8; 8];
        assert_eq!(to(memory, 8, b"12345678".as_ptr().cast(), 8), 0);
        assert_eq!(from(out.as_mut_ptr().cast(), memory, 8, 8), 0);
        assert_eq!(&out, b"12345678");
        assert_eq!(to(memory, 60, out.as_ptr().cast(), 8), libc::EINVAL);
        assert_eq!(from(out.as_mut_ptr().cast(), memory, 2, 4), libc::EINVAL);

        let domain = pd::ibv_alloc_pd(context);
        let register = table.reg_dm_mr.unwrap();
        let rights = IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE;
        assert!(register(domain, memory, 0, 64, IBV_ACCESS_LOCAL_WRITE).is_null(), "zero based");
        assert!(register(domain, memory, 4, 64, rights).is_null(), "out of bounds");
        let region = register(domain, memory, 4, 60, rights);
        assert_eq!((*region).length, 60);
        let free = table.free_dm.unwrap();
        assert_eq!(free(memory), libc::EBUSY);

        let same = dm::ibv_import_dm(context, (*memory).handle);
        assert_eq!(from(out.as_mut_ptr().cast(), same, 8, 8), 0);
        assert_eq!(&out, b"12345678");
        dm::ibv_unimport_dm(same);
        assert!(dm::ibv_import_dm(context, !0).is_null());
        assert_eq!(mr::ibv_dereg_mr(region), 0);
        let handle = (*memory).handle;
        assert_eq!(free(memory), 0);
        assert!(dm::ibv_import_dm(context, handle).is_null(), "it is gone");
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(context::ibv_close_device(context), 0);
    }
}

#[test]
fn a_device_is_imported_by_a_copy_of_its_descriptor() {
    let first = open();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let copy = libc::fcntl((*first).cmd_fd, libc::F_DUPFD_CLOEXEC, 3);
        let second = import::ibv_import_device(copy);
        assert!(!second.is_null() && second != first);
        assert_eq!(((*second).cmd_fd, (*second).device), (copy, (*first).device));
        assert_ne!((*second).async_fd, (*first).async_fd);

        let domain = pd::ibv_alloc_pd(first);
        let mut buffer = [0u64; 8];
        let addr = buffer.as_mut_ptr().cast();
        let region = mr::ibv_reg_mr(domain, addr, 64, IBV_ACCESS_LOCAL_WRITE as c_int);
        let same_domain = import::ibv_import_pd(second, (*domain).handle);
        assert_eq!((*same_domain).context, second);
        let same_region = import::ibv_import_mr(same_domain, (*region).handle);
        assert!((*same_region).addr.is_null() && (*same_region).lkey != 0);
        assert_eq!((*same_region).length, 64);
        assert_eq!(pd::ibv_dealloc_pd(same_domain), libc::EBUSY);
        import::ibv_unimport_mr(same_region);
        // A queue pair outlives the structure by which its domain was known.
        let queue = crate::cq::ibv_create_cq(second, 4, ptr::null_mut(), ptr::null_mut(), 0);
        let qp = crate::qp::ibv_create_qp(same_domain, &mut super::init_attr(queue));
        import::ibv_unimport_pd(same_domain);
        assert_eq!(crate::qp::ibv_destroy_qp(qp), 0);
        assert_eq!(crate::cq::ibv_destroy_cq(queue), 0);
        assert!(import::ibv_import_pd(second, !0).is_null());
        assert_eq!(Errno::last(), Errno::EINVAL);

        // The device stays open as long as either context does.
        assert_eq!(mr::ibv_dereg_mr(region), 0);
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(context::ibv_close_device(first), 0);
        let domain = pd::ibv_alloc_pd(second);
        assert!(!domain.is_null());
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(context::ibv_close_device(second), 0);
        assert!(libc::fcntl(copy, libc::F_GETFD) < 0, "it was the context's");
        assert!(import::ibv_import_device(-1).is_null());
        assert_eq!(Errno::last(), Errno(libc::EBADF));
    }
}

#[test]
fn files_are_registered_as_far_as_they_go() {
    let context = open();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let fd = libc::memfd_create(c"buffer".as_ptr(), libc::MFD_CLOEXEC);
        libc::ftruncate(fd, 8192);
        let domain = pd::ibv_alloc_pd(context);
        let write = IBV_ACCESS_LOCAL_WRITE as c_int;
        let register = |offset, length, iova, access| {
            mr::ibv_reg_dmabuf_mr(domain, offset, length, iova, fd, access)
        };
        let region = register(4100, 100, 0x1_0004, write);
        assert_eq!(((*region).addr as u64, (*region).length), (4100, 100));
        assert_eq!(mr::ibv_dereg_mr(region), 0);
        for (offset, length, iova, access) in [
            (4100, 100, 0x1_0005, write), // another place in its page
            (4100, 5000, 4100, write),    // beyond the end
            (0, 100, 0, IBV_ACCESS_ON_DEMAND as c_int | write), // not for files
        ] {
            assert!(register(offset, length, iova, access).is_null());
            assert_eq!(Errno::last(), Errno::EINVAL);
        }
        let mut attr: ibv_mr_init_attr = zeroed();
        (attr.fd, attr.fd_offset, attr.length, attr.access) = (fd, 4096, 4096, write);
        attr.comp_mask = IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET;
        let region = mr::ibv_reg_mr_ex(domain, &mut attr);
        assert!(!region.is_null());
        assert_eq!(mr::ibv_dereg_mr(region), 0);
        attr.comp_mask |= IBV_REG_MR_MASK_ADDR;
        assert!(mr::ibv_reg_mr_ex(domain, &mut attr).is_null(), "both");
        libc::close(fd);
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(context::ibv_close_device(context), 0);
    }
}

#[test]
fn buffers_are_registered_as_far_as_they_go() {
    const SIZE: usize = 5000;
    let context = open();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let domain = pd::ibv_alloc_pd(context);
        let other = pd::ibv_alloc_pd(context);
        let write = IBV_ACCESS_LOCAL_WRITE as c_int;
        let mut buffer: *mut ibv_buf = ptr::null_mut();
        let base = table(context).alloc_buf.unwrap()(domain, SIZE, &mut buffer);
        assert_eq!(base.addr() % 4096, 0);
        let bytes = std::slice::from_raw_parts_mut(base.cast::<u8>(), SIZE);
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes.fill(7);

        let register = |domain, offset: isize, length| {
            buf::ibv_reg_buf_mr(domain, buffer, base.wrapping_byte_offset(offset), length, write)
        };
        for (domain, offset, length) in [
            (other, 0, 8),
            (domain, 0, SIZE + 1),
            (domain, 4096, SIZE - 4095),
            (domain, -1, 8),
            (domain, 1, usize::MAX),
        ] {
            assert!(register(domain, offset, length).is_null(), "{length} at {offset}");
            assert_eq!(Errno::last(), Errno::EINVAL);
        }
        let region = register(domain, 4096, SIZE - 4096);
        assert_eq!((*region).addr, base.wrapping_byte_add(4096));
        assert_eq!(mr::ibv_dereg_mr(region), 0);

        let mut attr: ibv_mr_init_attr = zeroed();
        (attr.buf, attr.addr, attr.length, attr.access) = (buffer, base, SIZE, write);
        attr.comp_mask = IBV_REG_MR_MASK_BUF | IBV_REG_MR_MASK_ADDR;
        let region = mr::ibv_reg_mr_ex(domain, &mut attr);
        assert!(!region.is_null());
        assert_eq!(mr::ibv_dereg_mr(region), 0);
        for mask in [
            IBV_REG_MR_MASK_BUF,
            attr.comp_mask | IBV_REG_MR_MASK_FD,
            attr.comp_mask | IBV_REG_MR_MASK_FD_OFFSET,
        ] {
            let mut attr = ibv_mr_init_attr { comp_mask: mask, ..attr };
            assert!(mr::ibv_reg_mr_ex(domain, &mut attr).is_null(), "{mask:#x}");
            assert_eq!(Errno::last(), Errno::EINVAL);
        }
        attr.length += 1;
        assert!(mr::ibv_reg_mr_ex(domain, &mut attr).is_null(), "too long");

        assert_eq!(buf::ibv_export_buf_dmabuf_fd(buffer), -1);
        assert_eq!(Errno::last(), Errno(libc::ENODATA));
        // A peer may still reach what is registered: it stays what it was, until the region is gone.
        let region = register(domain, 0, SIZE);
        buf::ibv_free_buf(buffer);
        assert_eq!(libc::msync(base, SIZE, libc::MS_ASYNC), 0, "{}", Errno::last().0);
        assert!(std::slice::from_raw_parts(base.cast::<u8>(), SIZE).iter().all(|byte| *byte == 7));
        assert_eq!(mr::ibv_dereg_mr(region), 0);
        assert!(!buf::ibv_alloc_buf(domain, 1, &mut buffer).is_null());
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        buf::ibv_free_buf(buffer);
        assert!(buf::ibv_alloc_buf(other, usize::MAX, &mut buffer).is_null());
        assert_eq!(Errno::last(), Errno::ENOMEM);
        assert!(buf::ibv_alloc_buf(other, 0, ptr::null_mut()).is_null());
        assert_eq!(pd::ibv_dealloc_pd(other), 0);
        assert_eq!(context::ibv_close_device(context), 0);
    }
}

#[test]
fn stamps_are_read_in_ticks_and_by_the_clock_on_the_wall() {
    let program = Program::new();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let table = table(program.context);
        let mut values: ibv_values_ex = zeroed();
        values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
        assert_eq!(table.query_rt_values.unwrap()(program.context, &mut values), 0);
        assert_eq!((values.raw_clock.tv_sec, values.raw_clock.tv_nsec), (0, 3_000));
        let mut attr: ibv_cq_init_attr_ex = zeroed();
        attr.cqe = 4;
        attr.wc_flags = IBV_WC_STANDARD_FLAGS
            | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
            | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
        let queue = table.create_cq_ex.unwrap()(program.context, &mut attr);
        assert!(!queue.is_null());
        let mut init = super::init_attr(queue.cast());
        let qp = crate::qp::ibv_create_qp(program.pd, &mut init);
        program.to_rts(qp);
        let mut wr: ibv_send_wr = zeroed();
        (wr.wr_id, wr.opcode) = (4, IBV_WR_SEND);
        let post = (*program.context).ops.post_send.unwrap();
        for _ in 0..3 {
            assert_eq!(post(qp, &mut wr, &mut ptr::null_mut()), 0);
        }
        let now = || {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            now.as_nanos() as u64
        };
        let mut poll = ibv_poll_cq_attr { comp_mask: 0 };
        assert_eq!((*queue).start_poll.unwrap()(queue, &mut poll), 0);
        assert_eq!((*queue).wr_id, 4);
        assert_eq!((*queue).read_completion_ts.unwrap()(queue), 1_000);
        // By a clock that is 2000 ns later now.
        let read = (*queue).read_completion_wallclock_ns.unwrap();
        let (before, wall, after) = (now(), read(queue), now());
        assert!((before..=after).contains(&(wall + 2_000)), "{before} {wall} {after}");
        assert_eq!(read(queue), wall, "of one completion");
        // Completions that were made together, in this poll and the next one.
        assert_eq!((*queue).next_poll.unwrap()(queue), 0);
        assert_eq!(read(queue), wall);
        (*queue).end_poll.unwrap()(queue);
        assert_eq!((*queue).start_poll.unwrap()(queue, &mut poll), 0);
        assert_eq!(read(queue), wall);
        (*queue).end_poll.unwrap()(queue);
        // A queue that was not asked to has no stamps to tell.
        let plain = program.cq.cast::<ibv_cq_ex>();
        assert_eq!((*plain).read_completion_ts.unwrap()(plain), 0);

        let mut change = ibv_modify_cq_attr {
            attr_mask: IBV_CQ_ATTR_MODERATE,
            moderate: ibv_moderate_cq { cq_count: 7, cq_period: 9 },
        };
        let modify = table.modify_cq.unwrap();
        assert_eq!(modify(queue.cast(), &mut change), 0);
        change.attr_mask = 2;
        assert_eq!(modify(queue.cast(), &mut change), libc::EOPNOTSUPP);
        assert_eq!(crate::qp::ibv_destroy_qp(qp), 0);
        assert_eq!(crate::cq::ibv_destroy_cq(queue.cast()), 0);
    }
    program.close();
}

#[test]
fn null_regions_advice_and_allocators_pass() {
    let context = open();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let table = table(context);
        let domain = pd::ibv_alloc_pd(context);
        let null = table.alloc_null_mr.unwrap()(domain);
        assert_eq!(((*null).length, (*null).rkey), (usize::MAX, 0));
        let advise = table.advise_mr.unwrap();
        let mut sge = ibv_sge { addr: 0, length: 1, lkey: 5 };
        assert_eq!(advise(domain, 0, 0, &mut sge, 1), 0);
        assert_eq!(advise(domain, 0, 0, &mut sge, 2), libc::ENOENT);
        assert_eq!(mr::ibv_dereg_mr(null), 0);

        let mut attr: ibv_parent_domain_init_attr = zeroed();
        attr.pd = domain;
        attr.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
        let make = table.alloc_parent_domain.unwrap();
        assert!(make(context, &mut attr).is_null(), "no allocators");
        unsafe extern "C" fn allocate(
            _: *mut ibv_pd,
            _: *mut libc::c_void,
            _: usize,
            _: usize,
            _: u64,
        ) -> *mut libc::c_void {
            ptr::null_mut()
        }
        unsafe extern "C" fn free(
            _: *mut ibv_pd,
            _: *mut libc::c_void,
            _: *mut libc::c_void,
            _: u64,
        ) {
        }
        attr.alloc = Some(allocate);
        attr.free = Some(free);
        let parent = make(context, &mut attr);
        assert!(!parent.is_null());
        assert_eq!(pd::ibv_dealloc_pd(parent), 0);
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(context::ibv_close_device(context), 0);
    }
}

#[test]
fn a_responder_is_opened_by_its_number() {
    let context = open();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let table = table(context);
        let mut init = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: -1,
            oflags: libc::O_CREAT,
        };
        let xrcd = table.open_xrcd.unwrap()(context, &mut init);
        let needed = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
        let whole = ibv_qp_open_attr {
            comp_mask: needed | IBV_QP_OPEN_ATTR_CONTEXT,
            qp_num: 0x4201,
            xrcd,
            qp_context: ptr::without_provenance_mut(9),
            qp_type: IBV_QPT_XRC_RECV,
        };
        let open = |mut attr: ibv_qp_open_attr| table.open_qp.unwrap()(context, &mut attr);
        for (attr, why) in [
            (ibv_qp_open_attr { comp_mask: 1 << 4 | whole.comp_mask, ..whole }, Errno::EOPNOTSUPP),
            (ibv_qp_open_attr { comp_mask: IBV_QP_OPEN_ATTR_NUM, ..whole }, Errno::EINVAL),
            (ibv_qp_open_attr { qp_type: IBV_QPT_RC, ..whole }, Errno::EINVAL),
            (ibv_qp_open_attr { xrcd: ptr::null_mut(), ..whole }, Errno::EINVAL),
        ] {
            assert!(open(attr).is_null());
            assert_eq!(Errno::last(), why);
        }
        let qp = open(whole);
        assert_eq!(((*qp).qp_num, (*qp).qp_type), (0x4201, IBV_QPT_XRC_RECV));
        assert_eq!(((*qp).state, (*qp).qp_context.addr()), (IBV_QPS_UNKNOWN, 9));
        let plain = open(ibv_qp_open_attr { comp_mask: needed, ..whole });
        assert!((*plain).qp_context.is_null() && (*plain).pd.is_null());
        for opened in [qp, plain] {
            assert_eq!(crate::qp::ibv_destroy_qp(opened), 0);
        }
        assert_eq!(table.close_xrcd.unwrap()(xrcd), 0);
        assert_eq!(context::ibv_close_device(context), 0);
    }
}

#[test]
fn raw_packets_ask_for_what_they_need() {
    let program = Program::new();
    // SAFETY: calls as a C program makes them, some with pointers that are null or of other objects.
    unsafe {
        let table = table(program.context);
        let create_flow = table.ibv_create_flow.unwrap();
        assert!(create_flow(program.qp, ptr::null_mut()).is_null());
        assert_eq!(Errno::last(), Errno::EINVAL);
        let mut rule: ibv_flow_attr = zeroed();
        assert!(create_flow(program.qp, &mut rule).is_null());
        assert_eq!(Errno::last(), Errno::EOPNOTSUPP, "the engine says so");

        let create_counters = table.create_counters.unwrap();
        let mut unknown = ibv_counters_init_attr { comp_mask: 1 };
        assert!(create_counters(program.context, ptr::null_mut()).is_null());
        assert_eq!(Errno::last(), Errno::EINVAL);
        assert!(create_counters(program.context, &mut unknown).is_null());
        assert_eq!(Errno::last(), Errno::EOPNOTSUPP);
        let read = table.read_counters.unwrap();
        assert_eq!(read(ptr::null_mut(), ptr::null_mut(), 0, 0), libc::EINVAL);

        let create_wq = table.create_wq.unwrap();
        let mut wanted: ibv_wq_init_attr = zeroed();
        (wanted.pd, wanted.cq, wanted.max_wr) = (program.pd, program.cq, 4);
        let refused = |change: &dyn Fn(&mut ibv_wq_init_attr)| {
            let mut wanted = wanted;
            change(&mut wanted);
            assert!(create_wq(program.context, &mut wanted).is_null());
            Errno::last()
        };
        assert_eq!(refused(&|wanted| wanted.wq_type = 1), Errno::EINVAL);
        assert_eq!(refused(&|wanted| wanted.pd = ptr::null_mut()), Errno::EINVAL);
        assert_eq!(refused(&|wanted| wanted.cq = ptr::null_mut()), Errno::EINVAL);
        assert_eq!(refused(&|wanted| wanted.comp_mask = 2), Errno::EOPNOTSUPP);
        let flags = |wanted: &mut ibv_wq_init_attr| {
            (wanted.comp_mask, wanted.create_flags) = (IBV_WQ_INIT_ATTR_FLAGS, 1);
        };
        assert_eq!(refused(&flags), Errno::EOPNOTSUPP);

        let create_table = table.create_rwq_ind_table.unwrap();
        let mut none: *mut ibv_wq = ptr::null_mut();
        for (log_ind_tbl_size, ind_tbl) in
            [(0, ptr::null_mut()), (12, &raw mut none), (0, &raw mut none)]
        {
            let mut init = ibv_rwq_ind_table_init_attr { log_ind_tbl_size, ind_tbl, comp_mask: 0 };
            assert!(create_table(program.context, &mut init).is_null());
            assert_eq!(Errno::last(), Errno::EINVAL);
        }

        let create_qp = table.create_qp_ex.unwrap();
        let mut init: ibv_qp_init_attr_ex = zeroed();
        (init.qp_type, init.pd) = (IBV_QPT_RAW_PACKET, program.pd);
        let both = IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH;
        for parts in [IBV_QP_INIT_ATTR_IND_TABLE, IBV_QP_INIT_ATTR_RX_HASH, both] {
            init.comp_mask = IBV_QP_INIT_ATTR_PD | parts;
            assert!(create_qp(program.context, &mut init).is_null(), "no table");
            assert_eq!(Errno::last(), Errno::EINVAL);
        }
        for destroyed in [
            table.ibv_destroy_flow.unwrap()(ptr::null_mut()),
            table.destroy_wq.unwrap()(ptr::null_mut()),
            table.destroy_counters.unwrap()(ptr::null_mut()),
            table.destroy_rwq_ind_table.unwrap()(ptr::null_mut()),
        ] {
            assert_eq!(destroyed, libc::EINVAL);
        }
    }
    program.close();
}
