//! The facade as a C program uses it, over an engine without a network.

mod extended;
mod null_engine;

use std::ffi::CStr;
use std::mem::zeroed;
use std::ptr;
use std::sync::mpsc;

use libc::c_int;
use null_engine::{API, raise};
use quipu_abi_types::*;
use quipu_cabi::Errno;

use crate::{ah, context, cq, device, event, mr, pd, qp, query, srq};

/// A program with the usual objects. Fields are the pointers that a C program holds.
struct Program {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    channel: *mut ibv_comp_channel,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
}

// SAFETY: the interface may be used from any thread.
unsafe impl Send for Program {}
// SAFETY: as above.
unsafe impl Sync for Program {}

fn open() -> *mut ibv_context {
    crate::engine::use_engine(&API);
    // SAFETY: calls as a C program makes them.
    unsafe {
        let mut count = 0;
        let list = device::ibv_get_device_list(&mut count);
        assert_eq!(count, 1);
        let context = context::ibv_open_device(*list);
        device::ibv_free_device_list(list);
        assert!(!context.is_null());
        context
    }
}

fn init_attr(cq: *mut ibv_cq) -> ibv_qp_init_attr {
    // SAFETY: all bytes zero is a valid value.
    let mut init: ibv_qp_init_attr = unsafe { zeroed() };
    (init.send_cq, init.recv_cq, init.qp_type) = (cq, cq, IBV_QPT_RC);
    init.cap = ibv_qp_cap { max_send_wr: 8, max_send_sge: 1, ..ibv_qp_cap::default() };
    init
}

impl Program {
    fn new() -> Self {
        let context = open();
        // SAFETY: calls as a C program makes them.
        unsafe {
            let pd = pd::ibv_alloc_pd(context);
            let channel = cq::ibv_create_comp_channel(context);
            let cq = cq::ibv_create_cq(context, 5, 0x77 as *mut _, channel, 0);
            let qp = qp::ibv_create_qp(pd, &mut init_attr(cq));
            assert!(!qp.is_null() && (*qp).state == IBV_QPS_RESET);
            let program = Self { context, pd, channel, cq, qp };
            program.to_rts(qp);
            program
        }
    }

    fn to_rts(&self, qp: *mut ibv_qp) {
        // SAFETY: calls as a C program makes them.
        unsafe {
            let mut attr: ibv_qp_attr = zeroed();
            for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
                attr.qp_state = state;
                assert_eq!(qp::ibv_modify_qp(qp, &mut attr, IBV_QP_STATE as c_int), 0);
            }
            assert_eq!((*qp).state, IBV_QPS_RTS);
        }
    }

    /// Posts one send, by the table as the inline function does.
    fn send(&self, wr_id: u64) {
        // SAFETY: calls as a C program makes them.
        unsafe {
            let mut wr: ibv_send_wr = zeroed();
            (wr.wr_id, wr.opcode) = (wr_id, IBV_WR_SEND);
            let mut bad = ptr::null_mut();
            let post = (*self.context).ops.post_send.unwrap();
            assert_eq!(post(self.qp, &mut wr, &mut bad), 0);
        }
    }

    fn close(self) {
        // SAFETY: calls as a C program makes them, each object once.
        unsafe {
            assert_eq!(pd::ibv_dealloc_pd(self.pd), libc::EBUSY);
            assert_eq!(qp::ibv_destroy_qp(self.qp), 0);
            assert_eq!(cq::ibv_destroy_comp_channel(self.channel), libc::EBUSY);
            assert_eq!(cq::ibv_destroy_cq(self.cq), 0);
            assert_eq!((*self.channel).refcnt, 0);
            assert_eq!(cq::ibv_destroy_comp_channel(self.channel), 0);
            assert_eq!(pd::ibv_dealloc_pd(self.pd), 0);
            assert_eq!(context::ibv_close_device(self.context), 0);
        }
    }
}

#[test]
fn the_device_is_as_programs_expect() {
    let context = open();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let device = (*context).device;
        assert_eq!(CStr::from_ptr(device::ibv_get_device_name(device)), c"quipu0");
        let mut made_up = std::ptr::read(device);
        made_up.name[5] = made_up.name[0];
        assert_eq!(CStr::from_ptr(device::ibv_get_device_name(&mut made_up)), c"quipuq");
        assert!(device::ibv_get_device_name(std::ptr::null_mut()).is_null());
        let path = CStr::from_ptr((&raw const (*device).ibdev_path).cast());
        assert_eq!(path, c"/sys/class/infiniband/quipu0");
        assert_eq!(
            ((*device).node_type, (*device).transport_type),
            (IBV_NODE_CA, IBV_TRANSPORT_IB)
        );
        assert_eq!((*context).abi_compat as usize, usize::MAX);
        let mut gid = ibv_gid { raw: [0; 16] };
        assert_eq!(query::ibv_query_gid(context, 1, 0, &mut gid), 0);
        assert_eq!(gid.raw[10..], [0xff, 0xff, 192, 0, 2, 1]);
        assert_eq!(query::ibv_query_gid(context, 1, 1, &mut gid), -1);
        assert_eq!(Errno::last(), Errno::EINVAL);
        let mut kind = 9;
        assert_eq!(query::ibv_query_gid_type(context, 1, 0, &mut kind), 0);
        assert_eq!(kind, IBV_GID_TYPE_SYSFS_ROCE_V2);
        let mut table: [ibv_gid_entry; 4] = zeroed();
        let stride = size_of::<ibv_gid_entry>();
        assert_eq!(query::_ibv_query_gid_table(context, table.as_mut_ptr(), 4, 0, stride), 1);
        assert_eq!(table[0].gid_type, IBV_GID_TYPE_ROCE_V2);
        assert_eq!(query::ibv_get_pkey_index(context, 1, 0xffff), 0);
        assert_eq!(query::ibv_get_pkey_index(context, 1, 0x1234), -1);
        assert_eq!(context::ibv_close_device(context), 0);
    }
}

#[test]
fn a_port_is_cut_to_what_the_program_knows() {
    let context = open();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let mut attr: ibv_port_attr = zeroed();
        attr.port_cap_flags2 = 9;
        attr.active_speed_ex = 9;
        assert_eq!(query::ibv_query_port(context, 1, &mut attr), 0);
        assert_eq!((attr.state, attr.link_layer), (IBV_PORT_ACTIVE, IBV_LINK_LAYER_ETHERNET));
        assert_eq!((attr.port_cap_flags2, attr.active_speed_ex), (9, 9));
        assert_eq!(query::query_port(context, 1, &mut attr, 52), 0);
        assert_eq!((attr.port_cap_flags2, attr.active_speed_ex), (0x1234, 9));
        assert_eq!(query::query_port(context, 2, &mut attr, 56), libc::EINVAL);
        assert_eq!(context::ibv_close_device(context), 0);
    }
}

#[test]
fn every_entry_of_every_table_is_filled() {
    let program = Program::new();
    // SAFETY: the structures are alive, and consist of words in these ranges.
    unsafe {
        let filled = |from: *const usize, words: usize| (0..words).all(|word| *from.add(word) != 0);
        let context = program.context;
        assert!(filled((&raw const (*context).ops).cast(), 256 / 8));
        let verbs = context.byte_sub(std::mem::offset_of!(verbs_context, context));
        let verbs = verbs.cast::<verbs_context>();
        assert_eq!((*verbs).sz, size_of::<verbs_context>());
        let functions = std::mem::offset_of!(verbs_context, _ABI_placeholder3) / 8;
        let private = std::mem::offset_of!(verbs_context, r#priv) / 8;
        assert!(filled(verbs.cast(), private));
        assert!(filled(verbs.cast::<usize>().add(private + 1), functions - private - 1));
        let first = std::mem::offset_of!(ibv_cq_ex, start_poll) / 8;
        assert!(filled(program.cq.cast::<usize>().add(first), size_of::<ibv_cq_ex>() / 8 - first));
        let first = std::mem::offset_of!(ibv_qp_ex, wr_atomic_cmp_swp) / 8;
        assert!(filled(program.qp.cast::<usize>().add(first), size_of::<ibv_qp_ex>() / 8 - first));
    }
    program.close();
}

#[test]
fn work_passes_through_and_errors_name_the_bad_request() {
    let program = Program::new();
    program.send(31);
    // SAFETY: calls as a C program makes them.
    unsafe {
        let mut wcs: [ibv_wc; 4] = zeroed();
        let poll = (*program.context).ops.poll_cq.unwrap();
        assert_eq!(poll(program.cq, 4, wcs.as_mut_ptr()), 1);
        assert_eq!((wcs[0].wr_id, wcs[0].qp_num), (31, (*program.qp).qp_num));
        let mut second: ibv_send_wr = zeroed();
        second.num_sge = 99;
        let mut first: ibv_send_wr = zeroed();
        first.next = &mut second;
        let mut bad = ptr::null_mut();
        assert_eq!(qp::post_send(program.qp, &mut first, &mut bad), libc::EINVAL);
        assert_eq!(bad, &raw mut second);
        assert_eq!(poll(program.cq, 4, wcs.as_mut_ptr()), 1);
        let mut wr: ibv_recv_wr = zeroed();
        let mut bad = ptr::null_mut();
        assert_eq!(qp::post_recv(program.qp, &mut wr, &mut bad), libc::ENOMEM);
        assert_eq!(bad, &raw mut wr);
        let mut unconnected: ibv_qp_attr = zeroed();
        let mask = (IBV_QP_STATE | IBV_QP_AV) as c_int;
        assert_eq!(qp::ibv_modify_qp(program.qp, &mut unconnected, mask), libc::EINVAL);
        assert_eq!((*program.qp).state, IBV_QPS_RTS);
    }
    program.close();
}

#[test]
fn a_completion_event_leads_to_its_queue_and_holds_it_until_acknowledged() {
    let program = Program::new();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let flags = libc::fcntl((*program.channel).fd, libc::F_GETFL);
        libc::fcntl((*program.channel).fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
        let (mut found, mut with) = (ptr::null_mut(), ptr::null_mut());
        let get = event::ibv_get_cq_event;
        assert_eq!(get(program.channel, &mut found, &mut with), -1);
        assert_eq!(Errno::last(), Errno::EAGAIN);
        assert_eq!(cq::req_notify_cq(program.cq, 0), 0);
        program.send(1);
        assert_eq!(get(program.channel, &mut found, &mut with), 0);
        assert_eq!((found, with as usize), (program.cq, 0x77));
        let other = cq::ibv_create_cq(program.context, 1, ptr::null_mut(), ptr::null_mut(), 0);
        assert_eq!(qp::ibv_destroy_qp(program.qp), 0);
        let (send, receive) = mpsc::channel();
        let held = program.cq as usize;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                assert_eq!(cq::ibv_destroy_cq(held as *mut ibv_cq), 0);
                send.send(()).unwrap();
            });
            assert!(receive.try_recv().is_err());
            event::ibv_ack_cq_events(program.cq, 1);
            receive.recv().unwrap();
        });
        assert_eq!(cq::ibv_destroy_cq(other), 0);
        assert_eq!(cq::ibv_destroy_comp_channel(program.channel), 0);
        assert_eq!(pd::ibv_dealloc_pd(program.pd), 0);
        assert_eq!(context::ibv_close_device(program.context), 0);
    }
}

#[test]
fn an_asynchronous_event_leads_to_its_queue_pair() {
    let program = Program::new();
    // SAFETY: calls as a C program makes them.
    unsafe {
        raise((*program.qp).qp_num, IBV_EVENT_SQ_DRAINED);
        let mut event: ibv_async_event = zeroed();
        loop {
            assert_eq!(event::ibv_get_async_event(program.context, &mut event), 0);
            if event.element.qp == program.qp {
                break; // others are of tests that run beside this one
            }
        }
        assert_eq!(event.event_type, IBV_EVENT_SQ_DRAINED);
        event::ibv_ack_async_event(&mut event);
    }
    program.close();
}

#[test]
fn work_is_built_call_by_call_and_completions_are_read_field_by_field() {
    let program = Program::new();
    // SAFETY: calls as a C program makes them.
    unsafe {
        assert!(qp::ibv_qp_to_qp_ex(program.qp).is_null());
        let unasked = program.qp.cast::<ibv_qp_ex>();
        (*unasked).wr_start.unwrap()(unasked);
        assert_eq!((*unasked).wr_complete.unwrap()(unasked), libc::EINVAL, "not created for it");
        let mut cq_attr: ibv_cq_init_attr_ex = zeroed();
        (cq_attr.cqe, cq_attr.wc_flags) = (4, IBV_WC_STANDARD_FLAGS);
        let cq_ex = crate::cq_ex::create_cq_ex(program.context, &mut cq_attr);
        let mut attr: ibv_qp_init_attr_ex = zeroed();
        (attr.send_cq, attr.recv_cq, attr.qp_type) = (cq_ex.cast(), cq_ex.cast(), IBV_QPT_RC);
        attr.pd = program.pd;
        attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        attr.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_TSO;
        let create = crate::qp_ex::create_qp_ex;
        assert!(create(program.context, &mut attr).is_null());
        assert_eq!(Errno::last(), Errno::EOPNOTSUPP);
        attr.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
        let raw = create(program.context, &mut attr);
        assert_eq!(attr.cap.max_send_sge, 4);
        program.to_rts(raw);
        let qp = qp::ibv_qp_to_qp_ex(raw);
        let q = &*qp;
        q.wr_start.unwrap()(qp);
        ((*qp).wr_id, (*qp).wr_flags) = (1, IBV_SEND_SIGNALED);
        q.wr_send.unwrap()(qp);
        q.wr_set_sge.unwrap()(qp, 1, 2, 3);
        ((*qp).wr_id, (*qp).wr_flags) = (2, 0);
        q.wr_rdma_write_imm.unwrap()(qp, 4, 5, 6);
        q.wr_set_inline_data.unwrap()(qp, b"hello".as_ptr().cast_mut().cast(), 5);
        assert_eq!(q.wr_complete.unwrap()(qp), 0);
        // Once more, there is nothing to post.
        assert_eq!(q.wr_complete.unwrap()(qp), 0);
        q.wr_start.unwrap()(qp);
        q.wr_send_tso.unwrap()(qp, ptr::null_mut(), 0, 0);
        assert_eq!(q.wr_complete.unwrap()(qp), libc::EOPNOTSUPP);
        q.wr_start.unwrap()(qp);
        q.wr_send.unwrap()(qp);
        q.wr_abort.unwrap()(qp);
        let c = &*cq_ex;
        assert_eq!(c.start_poll.unwrap()(cq_ex, ptr::null_mut()), 0);
        assert_eq!(((*cq_ex).wr_id, (*cq_ex).status), (1, IBV_WC_SUCCESS));
        assert_eq!(c.read_byte_len.unwrap()(cq_ex), 3);
        assert_eq!(c.next_poll.unwrap()(cq_ex), 0);
        assert_eq!(((*cq_ex).wr_id, c.read_imm_data.unwrap()(cq_ex)), (2, 6));
        assert_eq!(c.read_byte_len.unwrap()(cq_ex), 5);
        assert_eq!(c.next_poll.unwrap()(cq_ex), libc::ENOENT);
        c.end_poll.unwrap()(cq_ex);
        assert_eq!(c.start_poll.unwrap()(cq_ex, ptr::null_mut()), libc::ENOENT);
        assert_eq!(c.start_poll.unwrap()(cq_ex, ptr::null_mut()), libc::ENOENT);
        assert_eq!(qp::ibv_destroy_qp(raw), 0);
        assert_eq!(cq::ibv_destroy_cq(cq_ex.cast()), 0);
    }
    program.close();
}

#[test]
fn memory_windows_and_regions_count_in_their_domain() {
    let program = Program::new();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let domain = pd::ibv_alloc_pd(program.context);
        let region = mr::ibv_reg_mr_iova(domain, 0x1000 as *mut _, 64, 0x22, 1);
        assert_eq!(((*region).addr as usize, (*region).length), (0x1000, 64));
        assert_eq!((*region).rkey, (*region).lkey ^ 0x22);
        assert_eq!(pd::ibv_dealloc_pd(domain), libc::EBUSY);
        let flags = IBV_REREG_MR_CHANGE_PD as c_int;
        let rereg = mr::ibv_rereg_mr;
        assert_eq!(rereg(region, flags, program.pd, ptr::null_mut(), 0, 0), 0);
        assert_eq!(((*region).pd, (*region).lkey), (program.pd, 5));
        assert_eq!(rereg(region, 0, program.pd, ptr::null_mut(), 0, 0), IBV_REREG_MR_ERR_INPUT);
        let window = mr::alloc_mw(program.pd, IBV_MW_TYPE_1);
        let before = (*window).rkey;
        let mut bind: ibv_mw_bind = zeroed();
        bind.wr_id = 6;
        assert_eq!(qp::bind_mw(program.qp, window, &mut bind), 0);
        assert_eq!((*window).rkey, before + 1);
        assert_eq!(mr::dealloc_mw(window), 0);
        assert_eq!(mr::ibv_dereg_mr(region), 0);
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
    }
    program.close();
}

#[test]
fn parent_domains_decorate_and_hold_their_domain() {
    let context = open();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let domain = pd::ibv_alloc_pd(context);
        let thread = pd::alloc_td(context, &mut ibv_td_init_attr { comp_mask: 0 });
        let mut attr: ibv_parent_domain_init_attr = zeroed();
        (attr.pd, attr.td) = (domain, thread);
        let parent = pd::alloc_parent_domain(context, &mut attr);
        assert_eq!(pd::ibv_dealloc_pd(domain), libc::EBUSY);
        assert_eq!(pd::dealloc_td(thread), libc::EBUSY);
        let region = mr::ibv_reg_mr(parent, 0x1000 as *mut _, 1, 0);
        assert_eq!((*region).pd, parent);
        assert_eq!(pd::ibv_dealloc_pd(parent), libc::EBUSY);
        assert_eq!(mr::ibv_dereg_mr(region), 0);
        assert_eq!(pd::ibv_dealloc_pd(parent), 0);
        assert_eq!(pd::dealloc_td(thread), 0);
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(context::ibv_close_device(context), 0);
    }
}

#[test]
fn parent_domains_are_made_of_their_own_context() {
    let (context, other) = (open(), open());
    // SAFETY: calls as a C program makes them.
    unsafe {
        let domains = [context, other].map(|context| pd::ibv_alloc_pd(context));
        let threads = [context, other]
            .map(|context| pd::alloc_td(context, &mut ibv_td_init_attr { comp_mask: 0 }));
        let mut attr: ibv_parent_domain_init_attr = zeroed();
        for (domain, thread) in [(1, 0), (0, 1), (1, 1)] {
            (attr.pd, attr.td) = (domains[domain], threads[thread]);
            assert!(pd::alloc_parent_domain(context, &mut attr).is_null());
            assert_eq!(Errno::last(), Errno::EINVAL);
        }
        // Nothing is held of what was refused.
        for (domain, thread) in domains.into_iter().zip(threads) {
            assert_eq!(pd::dealloc_td(thread), 0);
            assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        }
        assert_eq!(context::ibv_close_device(context), 0);
        assert_eq!(context::ibv_close_device(other), 0);
    }
}

#[test]
fn shared_receive_queues_and_address_handles_live_and_die() {
    let context = open();
    // SAFETY: calls as a C program makes them.
    unsafe {
        let domain = pd::ibv_alloc_pd(context);
        let attr = ibv_srq_attr { max_wr: 5, max_sge: 1, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        let queue = srq::ibv_create_srq(domain, &mut init);
        assert_eq!(init.attr.max_wr, 8);
        let mut number = 0;
        assert_eq!(srq::get_srq_num(queue, &mut number), 0);
        assert_eq!(number, 12);
        let mut address: ibv_ah_attr = zeroed();
        assert!(ah::ibv_create_ah(domain, &mut address).is_null());
        assert_eq!(Errno::last(), Errno::EINVAL);
        address.is_global = 1;
        let address = ah::ibv_create_ah(domain, &mut address);
        assert_ne!((*address).handle, 0);
        assert_eq!(pd::ibv_dealloc_pd(domain), libc::EBUSY);
        assert_eq!(ah::ibv_destroy_ah(address), 0);
        assert_eq!(srq::ibv_destroy_srq(queue), 0);
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(context::ibv_close_device(context), 0);
    }
}

#[test]
fn what_is_no_object_is_refused() {
    let context = open();
    // SAFETY: null, other objects, or memory with eight bytes of memory before it.
    unsafe {
        let mut garbage = [0xabu64; 8];
        let garbage = garbage.as_mut_ptr().wrapping_add(1);
        assert_eq!(pd::ibv_dealloc_pd(ptr::null_mut()), libc::EINVAL);
        assert_eq!(qp::ibv_destroy_qp(garbage.cast()), libc::EINVAL);
        assert!(pd::ibv_alloc_pd(ptr::null_mut()).is_null());
        assert!(qp::ibv_create_qp(ptr::null_mut(), &mut init_attr(ptr::null_mut())).is_null());
        let domain = pd::ibv_alloc_pd(context);
        assert_eq!(qp::ibv_destroy_qp(domain.cast()), libc::EINVAL, "a PD is no QP");
        assert!(qp::ibv_create_qp(domain, &mut init_attr(ptr::null_mut())).is_null());
        assert!(cq::ibv_create_cq(context, 0, ptr::null_mut(), ptr::null_mut(), 0).is_null());
        assert!(cq::ibv_create_cq(context, 1, ptr::null_mut(), ptr::null_mut(), 1).is_null());
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(context::ibv_close_device(context), 0);
    }
}
