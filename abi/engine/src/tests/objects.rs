//! Devices and objects: what is told of them, their existence and their handles.

use std::ffi::CStr;

use quipu_abi_types::*;

use super::bench::{Bench, MEMORY, Said, api, blank, done, made, registration, srq_init};

#[test]
fn the_table_is_of_this_build_and_lists_the_devices() {
    let api = api();
    assert!(api.is_of_this_build());
    let mut devices = [blank::<EngineDevice>(); 2];
    let mut count = 0;
    done(unsafe { (api.list_devices)(devices.as_mut_ptr(), 2, &mut count) }).unwrap();
    assert_eq!(count, 2);
    // SAFETY: names end with a zero.
    let names = devices.each_ref().map(|d| unsafe { CStr::from_ptr(d.name.as_ptr()) });
    assert_eq!(names, [c"quipu0", c"quipu_iw0"], "most programs take the first");
    let rnic = (devices[1].node_type, devices[1].transport_type);
    assert_eq!(rnic, (IBV_NODE_RNIC, IBV_TRANSPORT_IWARP));
    assert!(devices[1].guid != 0 && devices[1].guid != devices[0].guid);
    assert_eq!((devices[0].node_type, devices[0].transport_type), (IBV_NODE_CA, IBV_TRANSPORT_IB));
    assert!(devices[0].guid != 0 && devices[0].num_comp_vectors >= 1);
    // Without room only the number is told.
    done(unsafe { (api.list_devices)(std::ptr::null_mut(), 0, &mut count) }).unwrap();
    assert_eq!(count, 2);
    done(unsafe { (api.list_devices)(devices.as_mut_ptr(), 1, &mut count) }).unwrap();
    assert_eq!(count, 2);
    let other = made(|out| unsafe { (api.open)(c"quipu9".as_ptr(), out) });
    assert_eq!(other.err(), Some(EngineStatus::NotFound));
}

#[test]
fn device_port_and_gid_are_those_of_a_roce_adapter() {
    let bench = Bench::new();
    let api = bench.api;
    let device: ibv_device_attr_ex =
        made(|out| unsafe { (api.query_device)(bench.context, out) }).unwrap();
    let attr = &device.orig_attr;
    assert_eq!((attr.phys_port_cnt, attr.max_pkeys, attr.atomic_cap), (1, 1, IBV_ATOMIC_HCA));
    assert!(attr.max_sge >= 30 && attr.max_qp >= 10_000 && attr.vendor_id != 0);
    let port: ibv_port_attr =
        made(|out| unsafe { (api.query_port)(bench.context, 1, out) }).unwrap();
    assert_eq!((port.state, port.link_layer), (IBV_PORT_ACTIVE, IBV_LINK_LAYER_ETHERNET));
    assert_eq!((port.gid_tbl_len, port.pkey_tbl_len, port.max_msg_sz), (4, 1, 1 << 31));
    assert_eq!(port.active_mtu, IBV_MTU_4096);
    let row: ibv_gid_entry =
        made(|out| unsafe { (api.query_gid)(bench.context, 1, 0, out) }).unwrap();
    let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
    // SAFETY: every bit pattern is a GID.
    assert_eq!(unsafe { row.gid.raw }, mapped);
    assert_eq!((row.gid_type, row.port_num), (IBV_GID_TYPE_ROCE_V2, 1));
    // Whatever row a program is told to use has the address.
    let last: ibv_gid_entry =
        made(|out| unsafe { (api.query_gid)(bench.context, 1, 3, out) }).unwrap();
    // SAFETY: as above.
    assert_eq!((unsafe { last.gid.raw }, last.gid_index, last.gid_type), (mapped, 3, row.gid_type));
    for (number, index) in [(0, 0), (2, 0), (1, 4)] {
        let row = made::<ibv_gid_entry>(|out| unsafe {
            (api.query_gid)(bench.context, number, index, out)
        });
        assert_eq!(row.err(), Some(EngineStatus::Invalid));
    }
    let port = made::<ibv_port_attr>(|out| unsafe { (api.query_port)(bench.context, 2, out) });
    assert_eq!(port.err(), Some(EngineStatus::Invalid));
}

/// It has no atomics and no datagrams, and only connection management connects its queue pairs.
#[test]
fn the_second_device_is_an_rnic() {
    let other = Bench::new();
    let bench = Bench::of(c"quipu_iw0");
    let api = bench.api;
    let device: ibv_device_attr_ex =
        made(|out| unsafe { (api.query_device)(bench.context, out) }).unwrap();
    assert_eq!((device.orig_attr.atomic_cap, device.orig_attr.max_ah), (IBV_ATOMIC_NONE, 0));
    assert!(device.orig_attr.max_srq > 0);
    let row: ibv_gid_entry =
        made(|out| unsafe { (api.query_gid)(bench.context, 1, 0, out) }).unwrap();
    assert_eq!(row.gid_type, IBV_GID_TYPE_IB);
    let other_row =
        made::<ibv_gid_entry>(|out| unsafe { (api.query_gid)(bench.context, 1, 1, out) });
    assert_eq!(other_row.err(), Some(EngineStatus::Invalid));
    let qp = bench.create_qp(&bench.qp_init()).unwrap();
    bench.to_init(qp.qp).unwrap();
    let (attr, mask) = bench.rtr(qp.qp_num);
    assert_eq!(bench.modify(qp.qp, &attr, mask), Err(EngineStatus::Invalid));
    let mut init = bench.qp_init();
    init.qp_type = IBV_QPT_UD;
    assert_eq!(bench.create_qp(&init).err(), Some(EngineStatus::NotSupported));
    init.qp_type = IBV_QPT_UC;
    assert_eq!(bench.create_qp(&init).err(), Some(EngineStatus::NotSupported));
    // Objects belong to the context, and so to the device, in which they were made.
    let mut init = bench.qp_init();
    init.recv_cq = other.cq;
    assert_eq!(bench.create_qp(&init).err(), Some(EngineStatus::Invalid));
}

/// As the kernel's verbs refuse it for a device that does not say that it has flushes.
#[test]
fn regions_grant_flushes_on_the_device_that_has_them() {
    let unsupported = Some(EngineStatus::NotSupported);
    for (device, refused) in [(c"quipu0", None), (c"quipu_iw0", unsupported)] {
        let bench = Bench::of(device);
        let api = bench.api;
        let rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_FLUSH_GLOBAL;
        let init = EngineMrInit { access: rights, ..registration(bench.addr(0), 64) };
        let made_one = made::<EngineMr>(|out| unsafe { (api.reg_mr)(bench.pd, &init, out) });
        assert_eq!(made_one.err(), refused, "{device:?}");
        let (mr, change) = (bench.mr.mr, IBV_REREG_MR_CHANGE_ACCESS);
        let changed = made::<EngineMr>(|out| unsafe {
            (api.rereg_mr)(mr, change, PdHandle::NONE, &init, out)
        });
        assert_eq!(changed.err(), refused, "{device:?}");
    }
}

/// What is to be posted call by call is asked for when a queue pair is made, and refused where its service
/// has no such operation.
#[test]
fn queue_pairs_are_asked_only_for_what_their_service_has() {
    let flushes = IBV_QP_EX_WITH_FLUSH | IBV_QP_EX_WITH_ATOMIC_WRITE;
    let sends = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let atomics = IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    let windows = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV;
    let writes = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let all = flushes | sends | atomics | windows | writes | IBV_QP_EX_WITH_RDMA_READ;
    let answered = flushes | atomics | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_SEND_WITH_INV;
    // The RFCs of plain iWARP have atomics, if both ends agree, and no immediate data.
    let imm = IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    for (device, qp_type, has) in [
        (c"quipu0", IBV_QPT_RC, all),
        (c"quipu0", IBV_QPT_UC, all & !answered),
        (c"quipu0", IBV_QPT_UD, sends),
        (c"quipu_iw0", IBV_QPT_RC, all & !(flushes | imm)),
    ] {
        let bench = Bench::of(device);
        let create = |send_ops| {
            let init = EngineQpInit { qp_type, send_ops, ..bench.qp_init() };
            bench.create_qp(&init).map(|_| ())
        };
        assert_eq!(create(has), Ok(()), "{device:?} {qp_type}");
        for flag in (0..64).map(|bit| 1 << bit).filter(|flag| has & flag == 0) {
            let refused = Err(EngineStatus::NotSupported);
            assert_eq!(create(flag), refused, "{device:?} {qp_type}: {flag:#x}");
            assert_eq!(create(has | flag), refused, "{device:?} {qp_type}: {flag:#x}");
        }
    }
}

#[test]
fn objects_in_use_are_busy_and_destroyed_ones_unknown() {
    let bench = Bench::new();
    let api = bench.api;
    let qp = bench.create_qp(&bench.qp_init()).unwrap();
    assert!(qp.qp_num > 0xff && qp.qp_num <= 0x00ff_ffff);
    let busy = Err(EngineStatus::Busy);
    let invalid = Err(EngineStatus::Invalid);
    assert_eq!(done(unsafe { (api.dealloc_pd)(bench.pd) }), busy);
    assert_eq!(done(unsafe { (api.destroy_channel)(bench.channel.channel) }), busy);
    let destroy_cq = || made(|out| unsafe { (api.destroy_cq)(bench.cq, out) });
    assert_eq!(destroy_cq(), Err(EngineStatus::Busy));
    assert_eq!(bench.destroy_qp(qp.qp), Ok(EngineEventsReported::default()));
    assert_eq!(bench.destroy_qp(qp.qp), Err(EngineStatus::Invalid));
    assert_eq!(destroy_cq(), Ok(EngineEventsReported::default()));
    assert_eq!(destroy_cq(), Err(EngineStatus::Invalid));
    assert_eq!(done(unsafe { (api.destroy_channel)(bench.channel.channel) }), Ok(()));
    assert_eq!(done(unsafe { (api.dereg_mr)(bench.mr.mr) }), Ok(()));
    assert_eq!(done(unsafe { (api.dereg_mr)(bench.mr.mr) }), invalid);

    let mut attr: ibv_ah_attr = blank();
    attr.port_num = 1;
    let create_ah = |attr: &ibv_ah_attr| {
        made::<AhHandle>(|out| unsafe { (api.create_ah)(bench.pd, attr, out) })
    };
    assert_eq!(create_ah(&attr), Err(EngineStatus::Invalid));
    attr.is_global = 1;
    assert_eq!(create_ah(&attr), Err(EngineStatus::Invalid), "of the other family");
    attr.grh.dgid = bench.gid();
    let ah = create_ah(&attr).unwrap();
    assert_eq!(done(unsafe { (api.dealloc_pd)(bench.pd) }), busy);
    assert_eq!(done(unsafe { (api.destroy_ah)(ah) }), Ok(()));
    assert_eq!(done(unsafe { (api.destroy_ah)(ah) }), invalid);
    assert_eq!(done(unsafe { (api.dealloc_pd)(bench.pd) }), Ok(()));
    assert_eq!(done(unsafe { (api.dealloc_pd)(bench.pd) }), invalid);
}

#[test]
fn objects_of_another_context_are_refused_and_go_with_their_own() {
    let (here, there) = (Bench::new(), Bench::new());
    let mut init = here.qp_init();
    init.recv_cq = there.cq;
    assert_eq!(here.create_qp(&init).err(), Some(EngineStatus::Invalid));
    assert_eq!(here.new_cq(1, there.channel.channel, 0).err(), Some(EngineStatus::Invalid));
    let qp = there.create_qp(&there.qp_init()).unwrap();
    let (api, context, cq) = (there.api, there.context, there.cq);
    drop(there);
    assert_eq!(here.query(qp.qp).err(), Some(EngineStatus::Invalid));
    let mut wc: ibv_wc = blank();
    let polled = unsafe { (api.poll_cq)(cq, 1, &mut wc) };
    assert_eq!(polled, -EngineStatus::Invalid.code());
    assert_eq!(done(unsafe { (api.close)(context) }), Err(EngineStatus::Invalid));
}

#[test]
fn registrations_are_checked_and_changed() {
    let bench = Bench::new();
    let api = bench.api;
    let register =
        |init: &EngineMrInit| made::<EngineMr>(|out| unsafe { (api.reg_mr)(bench.pd, init, out) });
    let good = registration(bench.addr(0), MEMORY as u64);
    let invalid = Some(EngineStatus::Invalid);
    let without_local = EngineMrInit { access: IBV_ACCESS_REMOTE_WRITE, ..good };
    assert_eq!(register(&without_local).err(), invalid);
    assert_eq!(register(&EngineMrInit { access: 1 << 15, ..good }).err(), invalid);
    assert_eq!(register(&EngineMrInit { length: u64::MAX - 7, ..good }).err(), invalid);
    let bad_address = Some(EngineStatus::BadAddress);
    let null = std::ptr::null_mut();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, of which the second page is unmapped again.
    let read_only = unsafe {
        let both = libc::mmap(null, 8192, libc::PROT_READ, flags, -1, 0);
        assert_eq!(libc::munmap(both.byte_add(4096), 4096), 0);
        both as u64
    };
    assert_eq!(register(&registration(read_only, 4096)).err(), bad_address, "read-only");
    let reads = IBV_ACCESS_REMOTE_READ;
    let init = EngineMrInit { access: reads, ..registration(read_only, 8192) };
    assert_eq!(register(&init).err(), bad_address, "the second page is not there");
    let readable = register(&EngineMrInit { length: 4096, ..init }).unwrap();
    let writable = registration(read_only, 4096);
    let access = IBV_REREG_MR_CHANGE_ACCESS;
    let changed: Said<EngineMr> =
        made(|out| unsafe { (api.rereg_mr)(readable.mr, access, bench.pd, &writable, out) });
    assert_eq!(changed.err(), bad_address, "it is read-only still");
    let memory = IBV_REREG_MR_CHANGE_TRANSLATION;
    let changed: Said<EngineMr> =
        made(|out| unsafe { (api.rereg_mr)(readable.mr, memory, bench.pd, &init, out) });
    assert_eq!(changed.err(), bad_address);
    done(unsafe { (api.dereg_mr)(readable.mr) }).unwrap();
    // Unknown flags of the optional range are ignored.
    let mr = register(&EngineMrInit { access: good.access | 1 << 25, ..good }).unwrap();
    let other: PdHandle = made(|out| unsafe { (api.alloc_pd)(bench.context, out) }).unwrap();
    let half = registration(bench.addr(0), MEMORY as u64 / 2);
    let flags = IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_TRANSLATION;
    let again: EngineMr =
        made(|out| unsafe { (api.rereg_mr)(mr.mr, flags, other, &half, out) }).unwrap();
    assert_eq!(again.mr, mr.mr);
    assert_eq!(done(unsafe { (api.dealloc_pd)(other) }), Err(EngineStatus::Busy));
    done(unsafe { (api.dereg_mr)(mr.mr) }).unwrap();
    done(unsafe { (api.dealloc_pd)(other) }).unwrap();
}

/// As adapters of hardware round up, and programs rely on it without knowing.
#[test]
fn completion_queues_are_larger_than_asked_for_but_not_than_possible() {
    let bench = Bench::new();
    let new = |cqe| Ok(bench.new_cq(cqe, ChannelHandle::NONE, 0)?.cqe);
    let most: u32 = 1 << 22;
    for (asked, given) in
        [(1, 16), (2, 16), (15, 16), (16, 32), (100, 128), (most / 2, most), (most, most)]
    {
        assert_eq!(new(asked), Ok(given), "{asked}");
    }
    assert_eq!(new(0), Err(EngineStatus::Invalid));
    assert_eq!(new(most + 1), Err(EngineStatus::Invalid));
    let cq = bench.new_cq(10, ChannelHandle::NONE, 0).unwrap().cq;
    let resized = |cqe| made(|out| unsafe { (bench.api.resize_cq)(cq, cqe, out) });
    assert_eq!(resized(100), Ok(128));
    assert_eq!(resized(7), Ok(8));
    assert_eq!(resized(8), Ok(8), "who asks for what there is keeps it");
    assert_eq!(resized(1), Ok(1), "who asks for less gets it");
    assert_eq!(resized(0), Err(EngineStatus::Invalid));
    assert_eq!(resized(most + 1), Err(EngineStatus::Invalid));
}

#[test]
fn queues_have_the_sizes_that_were_asked_for_or_more() {
    let bench = Bench::new();
    let api = bench.api;
    let init = bench.qp_init();
    let qp = bench.create_qp(&init).unwrap();
    assert!(qp.cap.max_send_wr >= 8 && qp.cap.max_recv_sge >= 4);
    assert!(qp.cap.max_inline_data >= 128);
    assert_eq!(bench.query(qp.qp).unwrap().cap, qp.cap);
    let mut large = init;
    large.cap.max_inline_data = 1 << 20;
    assert_eq!(bench.create_qp(&large).err(), Some(EngineStatus::Invalid));
    let mut vendor = init;
    vendor.qp_type = IBV_QPT_DRIVER;
    assert_eq!(bench.create_qp(&vendor).err(), Some(EngineStatus::NotSupported));

    let attr = ibv_srq_attr { max_wr: 5, max_sge: 2, srq_limit: 9 };
    let init = srq_init(attr, 1);
    let srq: EngineSrq = made(|out| unsafe { (api.create_srq)(bench.pd, &init, out) }).unwrap();
    assert!(srq.attr.max_wr >= 5 && srq.attr.max_sge >= 2);
    assert_eq!(srq.attr.srq_limit, 0);
    let larger = ibv_srq_attr { max_wr: 50, max_sge: 0, srq_limit: 3 };
    let modify = |mask| done(unsafe { (api.modify_srq)(srq.srq, &larger, mask) });
    assert_eq!(modify(4), Err(EngineStatus::Invalid));
    modify(IBV_SRQ_MAX_WR).unwrap();
    modify(IBV_SRQ_LIMIT).unwrap();
    let now: ibv_srq_attr = made(|out| unsafe { (api.query_srq)(srq.srq, out) }).unwrap();
    assert!(now.max_wr >= 50);
    assert_eq!(now.srq_limit, 3);

    let mut shared = bench.qp_init();
    shared.srq = srq.srq;
    let qp = bench.create_qp(&shared).unwrap();
    assert_eq!((qp.cap.max_recv_wr, qp.cap.max_recv_sge), (0, 0));
    let destroy = || made::<EngineEventsReported>(|out| unsafe { (api.destroy_srq)(srq.srq, out) });
    assert_eq!(destroy(), Err(EngineStatus::Busy));
    bench.destroy_qp(qp.qp).unwrap();
    assert_eq!(destroy(), Ok(EngineEventsReported::default()));
}
