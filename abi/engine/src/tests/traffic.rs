//! Every operation, between two queue pairs of the one engine.

use quipu_abi_types::*;

use super::bench::{Bench, blank, done, made, receive, send, srq_init};

const IMM: u32 = 0x0102_0304_u32.to_be();

/// Checks a successful completion.
fn expect(wc: &ibv_wc, wr_id: u64, opcode: u32) {
    assert_eq!((wc.status, wc.wr_id, wc.opcode), (IBV_WC_SUCCESS, wr_id, opcode), "{wc:?}");
}

/// The completion with a `wr_id`.
fn of(all: &[ibv_wc], wr_id: u64) -> ibv_wc {
    *all.iter().find(|wc| wc.wr_id == wr_id).unwrap_or_else(|| panic!("{wr_id} in {all:?}"))
}

#[test]
fn sends_gather_and_scatter_and_carry_what_they_carry() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    bench.write(0, b"hello, world");
    for wr_id in 1..=2 {
        let mut places = [bench.sge(1000 * wr_id as usize, 3), bench.sge(5000, 100)];
        bench.post_recv(b.qp, wr_id, &mut places).unwrap();
    }
    let mut pieces = [bench.sge(0, 5), bench.sge(5, 0), bench.sge(5, 7)];
    let mut piece = [pieces[0]];
    let mut with_imm = send(11, IBV_WR_SEND_WITH_IMM, &mut piece);
    with_imm.imm_data = IMM;
    let mut list = [send(10, IBV_WR_SEND, &mut pieces), with_imm];
    list[0].send_flags = 0;
    bench.post_send(a.qp, &mut list).unwrap();
    // The first send is not signalled.
    let all = bench.completions(bench.cq, 3);
    expect(&of(&all, 11), 11, IBV_WC_SEND);
    let (first, second) = (of(&all, 1), of(&all, 2));
    expect(&first, 1, IBV_WC_RECV);
    assert_eq!((first.byte_len, first.wc_flags, first.imm_data), (12, 0, 0));
    assert_eq!((first.qp_num, first.src_qp), (b.qp_num, a.qp_num));
    expect(&second, 2, IBV_WC_RECV);
    assert_eq!((second.byte_len, second.wc_flags), (5, IBV_WC_WITH_IMM));
    assert_eq!(second.imm_data, IMM);
    assert_eq!(&bench.read(1000), b"hel");
    // The second message put its last two bytes over the first two of the first one.
    assert_eq!(&bench.read(5000), b"lo, world");
    assert_eq!(&bench.read(2000), b"hel");
}

#[test]
fn lists_need_not_be_aligned() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    bench.write(0, b"hello, world");
    // As in a packed structure of C, behind something of four bytes.
    #[repr(C, packed)]
    struct Odd(u32, [ibv_sge; 2]);
    let place = Odd(0, [bench.sge(1000, 3), bench.sge(2000, 100)]);
    let piece = Odd(0, [bench.sge(0, 5), bench.sge(5, 7)]);
    let mut taken = receive(1, &mut []);
    (taken.sg_list, taken.num_sge) = ((&raw const place.1).cast_mut().cast(), 2);
    let mut given = send(2, IBV_WR_SEND, &mut []);
    (given.sg_list, given.num_sge) = ((&raw const piece.1).cast_mut().cast(), 2);
    let mut bad = std::ptr::null();
    done(unsafe { (bench.api.post_recv)(b.qp, &taken, &mut bad) }).unwrap();
    let mut bad = std::ptr::null();
    done(unsafe { (bench.api.post_send)(a.qp, &given, &mut bad) }).unwrap();
    bench.completions(bench.cq, 2);
    assert_eq!((&bench.read(1000), &bench.read(2000)), (b"hel", b"lo, world"));
}

/// A program that has not set `num_sge` must not make the adapter read all memory behind its list.
#[test]
fn a_list_longer_than_any_queue_takes_is_not_read() {
    let bench = Bench::new();
    let (a, _b) = bench.pair(&bench.qp_init());
    // At the end of what may be read: one element, then a page without access.
    let page = 4096;
    let (read, write, private) = (libc::PROT_READ, libc::PROT_WRITE, libc::MAP_PRIVATE);
    let map = |length, access| unsafe {
        libc::mmap(std::ptr::null_mut(), length, access, private | libc::MAP_ANONYMOUS, -1, 0)
    };
    let start = map(2 * page, libc::PROT_NONE);
    assert_ne!(start, libc::MAP_FAILED);
    assert_eq!(unsafe { libc::mprotect(start, page, read | write) }, 0);
    let end = start.wrapping_byte_add(page).cast::<ibv_sge>();
    for shift in [0, 4] {
        let element = end.wrapping_sub(1).wrapping_byte_sub(shift);
        unsafe { element.write_unaligned(bench.sge(0, 5)) };
        for num_sge in [1025, i32::MAX] {
            let mut given = send(2, IBV_WR_SEND, &mut []);
            (given.sg_list, given.num_sge) = (element, num_sge);
            let mut taken = receive(1, &mut []);
            (taken.sg_list, taken.num_sge) = (element, num_sge);
            let mut bad = std::ptr::null();
            for flags in [IBV_SEND_SIGNALED, IBV_SEND_INLINE] {
                given.send_flags = flags;
                let refused = done(unsafe { (bench.api.post_send)(a.qp, &given, &mut bad) });
                assert_eq!(refused, Err(EngineStatus::Invalid));
            }
            let mut bad = std::ptr::null();
            let refused = done(unsafe { (bench.api.post_recv)(a.qp, &taken, &mut bad) });
            assert_eq!(refused, Err(EngineStatus::Invalid));
        }
    }
    assert_eq!(unsafe { libc::munmap(start, 2 * page) }, 0);
}

#[test]
fn inline_data_needs_no_key_and_is_copied_at_once() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    bench.post_recv(b.qp, 1, &mut [bench.sge(100, 64)]).unwrap();
    let mut text = *b"inline and not registered";
    let address = (&raw mut text) as u64;
    let element = |from: u64, length| ibv_sge { addr: address + from, length, lkey: 0 };
    let mut pieces = [element(0, 10), element(10, 15)];
    let mut wr = send(2, IBV_WR_SEND, &mut pieces);
    wr.send_flags |= IBV_SEND_INLINE;
    bench.post_send(a.qp, &mut [wr]).unwrap();
    text.fill(0);
    let all = bench.completions(bench.cq, 2);
    expect(&of(&all, 1), 1, IBV_WC_RECV);
    assert_eq!(&bench.read(100), b"inline and not registered");
    // More than the queue pair's max_inline_data is refused when it is posted.
    let mut large = [ibv_sge { addr: bench.addr(0), length: 4096, lkey: 0 }];
    let mut wr = send(3, IBV_WR_SEND, &mut large);
    wr.send_flags |= IBV_SEND_INLINE;
    assert_eq!(bench.post_send(a.qp, &mut [wr]), Err((3, EngineStatus::Invalid)));
}

#[test]
fn writes_reads_and_atomics_reach_the_peers_memory() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    bench.write(0, b"written by one side");
    let mut from = [bench.sge(0, 19)];
    let mut write = send(1, IBV_WR_RDMA_WRITE, &mut from);
    write.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(4096), rkey: bench.mr.rkey };
    let mut to = [bench.sge(8192, 19)];
    let mut read = send(2, IBV_WR_RDMA_READ, &mut to);
    read.wr = write.wr;
    bench.post_send(a.qp, &mut [write, read]).unwrap();
    let all = bench.completions(bench.cq, 2);
    expect(&all[0], 1, IBV_WC_RDMA_WRITE);
    expect(&all[1], 2, IBV_WC_RDMA_READ);
    assert_eq!(&bench.read(4096), b"written by one side");
    assert_eq!(&bench.read(8192), b"written by one side");

    bench.post_recv(b.qp, 3, &mut []).unwrap();
    let mut with_imm = send(4, IBV_WR_RDMA_WRITE_WITH_IMM, &mut from);
    with_imm.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(6000), rkey: bench.mr.rkey };
    with_imm.imm_data = IMM;
    bench.post_send(a.qp, &mut [with_imm]).unwrap();
    let all = bench.completions(bench.cq, 2);
    expect(&of(&all, 4), 4, IBV_WC_RDMA_WRITE);
    let received = of(&all, 3);
    expect(&received, 3, IBV_WC_RECV_RDMA_WITH_IMM);
    assert_eq!((received.imm_data, received.byte_len), (IMM, 19));
    assert_eq!(&bench.read(6000), b"written by one side");

    bench.write(16384, &7_u64.to_ne_bytes());
    let atomic = |wr_id, opcode, result: &mut [ibv_sge], compare_add, swap| {
        let mut wr = send(wr_id, opcode, result);
        let (remote_addr, rkey) = (bench.addr(16384), bench.mr.rkey);
        wr.wr.atomic = ibv_send_wr_atomic { remote_addr, compare_add, swap, rkey };
        wr
    };
    let mut results = [[bench.sge(20000, 8)], [bench.sge(20008, 8)]];
    let [first, second] = &mut results;
    let mut list = [
        atomic(5, IBV_WR_ATOMIC_FETCH_AND_ADD, first, 5, 0),
        atomic(6, IBV_WR_ATOMIC_CMP_AND_SWP, second, 12, 100),
    ];
    bench.post_send(a.qp, &mut list).unwrap();
    let all = bench.completions(bench.cq, 2);
    expect(&all[0], 5, IBV_WC_FETCH_ADD);
    expect(&all[1], 6, IBV_WC_COMP_SWAP);
    let number = |offset| u64::from_ne_bytes(bench.read(offset));
    assert_eq!((number(20000), number(20008), number(16384)), (7, 12, 100));
}

#[test]
fn windows_are_bound_by_their_keys_and_invalidated() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    let window: EngineMw =
        made(|out| unsafe { (bench.api.alloc_mw)(bench.pd, IBV_MW_TYPE_2, out) }).unwrap();
    let rkey = window.rkey & !0xff | 0x42;
    let bind = |wr_id| {
        let mut mw = ibv_mw { rkey: window.rkey, ..null_window() };
        let mut mr = ibv_mr { lkey: bench.mr.lkey, ..null_region() };
        let mut wr = send(wr_id, IBV_WR_BIND_MW, &mut []);
        let access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        wr.ext.bind_mw = ibv_send_wr_bind_mw {
            mw: &raw mut mw,
            rkey,
            bind_info: ibv_mw_bind_info {
                mr: &raw mut mr,
                addr: bench.addr(1024),
                length: 64,
                mw_access_flags: access,
            },
        };
        bench.post_send(b.qp, &mut [wr]).unwrap();
        bench.completion()
    };
    expect(&bind(1), 1, IBV_WC_BIND_MW);
    let write = |wr_id, offset| {
        let mut from = [bench.sge(0, 8)];
        let mut wr = send(wr_id, IBV_WR_RDMA_WRITE, &mut from);
        wr.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(offset), rkey };
        bench.post_send(a.qp, &mut [wr]).unwrap();
    };
    write(2, 1024);
    expect(&bench.completion(), 2, IBV_WC_RDMA_WRITE);

    // The peer takes the key back with a message.
    bench.post_recv(b.qp, 3, &mut [bench.sge(0, 8)]).unwrap();
    let mut taking = send(4, IBV_WR_SEND_WITH_INV, &mut []);
    taking.imm_data = rkey;
    bench.post_send(a.qp, &mut [taking]).unwrap();
    let all = bench.completions(bench.cq, 2);
    let received = of(&all, 3);
    assert_eq!((received.wc_flags, received.imm_data), (IBV_WC_WITH_INV, rkey));

    expect(&bind(5), 5, IBV_WC_BIND_MW);
    let mut invalidate = send(6, IBV_WR_LOCAL_INV, &mut []);
    invalidate.imm_data = rkey;
    bench.post_send(b.qp, &mut [invalidate]).unwrap();
    expect(&bench.completion(), 6, IBV_WC_LOCAL_INV);
    write(7, 1024);
    let refused = bench.completion();
    assert_eq!((refused.wr_id, refused.status), (7, IBV_WC_REM_ACCESS_ERR));
}

#[test]
fn a_type_1_window_is_bound_again_and_unbound() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    let window: EngineMw =
        made(|out| unsafe { (bench.api.alloc_mw)(bench.pd, IBV_MW_TYPE_1, out) }).unwrap();
    let mut key = window.rkey;
    let mut bind = |wr_id, length, region: bool| {
        let mut mw = ibv_mw { rkey: key, ..null_window() };
        let mut mr = ibv_mr { lkey: bench.mr.lkey, ..null_region() };
        key = key & !0xff | key.wrapping_add(1) & 0xff;
        let mut wr = send(wr_id, IBV_WR_BIND_MW, &mut []);
        wr.ext.bind_mw = ibv_send_wr_bind_mw {
            mw: &raw mut mw,
            rkey: key,
            bind_info: ibv_mw_bind_info {
                mr: if region { &raw mut mr } else { std::ptr::null_mut() },
                addr: bench.addr(0),
                length,
                mw_access_flags: IBV_ACCESS_REMOTE_READ,
            },
        };
        bench.post_send(b.qp, &mut [wr]).unwrap();
        expect(&bench.completion(), wr_id, IBV_WC_BIND_MW);
        key
    };
    let first = bind(1, 16, true);
    // A region with a window cannot go.
    let dereg = || unsafe { (bench.api.dereg_mr)(bench.mr.mr) };
    assert_eq!(dereg(), EngineStatus::Busy.code());
    let second = bind(2, 32, true);
    assert_ne!(first, second);
    bind(3, 0, false);
    let mut to = [bench.sge(512, 8)];
    let mut read = send(4, IBV_WR_RDMA_READ, &mut to);
    read.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(0), rkey: second };
    bench.post_send(a.qp, &mut [read]).unwrap();
    assert_eq!(bench.completion().status, IBV_WC_REM_ACCESS_ERR);
    assert_eq!(dereg(), EngineStatus::Ok.code());
}

fn null_window() -> ibv_mw {
    let none = std::ptr::null_mut();
    ibv_mw { context: none, pd: std::ptr::null_mut(), rkey: 0, handle: 0, r#type: 0 }
}

fn null_region() -> ibv_mr {
    ibv_mr {
        context: std::ptr::null_mut(),
        pd: std::ptr::null_mut(),
        addr: std::ptr::null_mut(),
        length: 0,
        handle: 0,
        lkey: 0,
        rkey: 0,
    }
}

#[test]
fn a_shared_receive_queue_serves_whoever_is_sent_to() {
    let bench = Bench::new();
    let attr = ibv_srq_attr { max_wr: 8, max_sge: 2, srq_limit: 0 };
    let init = srq_init(attr, 0);
    let srq: EngineSrq =
        made(|out| unsafe { (bench.api.create_srq)(bench.pd, &init, out) }).unwrap();
    let mut qp_init = bench.qp_init();
    qp_init.srq = srq.srq;
    qp_init.sq_sig_all = 1;
    let pairs = [bench.pair(&qp_init), bench.pair(&qp_init)];
    let mut place = [bench.sge(0, 64)];
    let mut second = receive(2, &mut place);
    let mut first = receive(1, &mut place);
    first.next = &raw mut second;
    let mut bad = std::ptr::null();
    let posted = unsafe { (bench.api.post_srq_recv)(srq.srq, &first, &mut bad) };
    assert_eq!(posted, EngineStatus::Ok.code());
    assert_eq!(
        bench.post_recv(pairs[0].0.qp, 9, &mut place),
        Err(EngineStatus::Invalid),
        "a queue pair with an SRQ has no receive queue of its own"
    );
    for (index, (a, b)) in pairs.iter().enumerate() {
        let mut wr = send(10, IBV_WR_SEND, &mut []);
        wr.send_flags = 0;
        bench.post_send(a.qp, &mut [wr]).unwrap();
        let all = bench.completions(bench.cq, 2);
        expect(&of(&all, 10), 10, IBV_WC_SEND);
        let received = of(&all, index as u64 + 1);
        assert_eq!((received.qp_num, received.byte_len), (b.qp_num, 0));
    }
}

#[test]
fn batches_larger_than_the_engines_come_out_whole_and_in_order() {
    let bench = Bench::new();
    let mut init = bench.qp_init();
    init.cap.max_send_wr = 32;
    let (a, _b) = bench.pair(&init);
    let mut from = [bench.sge(0, 8)];
    let mut list: Vec<ibv_send_wr> = (0..24)
        .map(|wr_id| {
            let mut wr = send(wr_id, IBV_WR_RDMA_WRITE, &mut from);
            wr.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(64), rkey: bench.mr.rkey };
            wr
        })
        .collect();
    bench.post_send(a.qp, &mut list).unwrap();
    let mut out = [blank::<ibv_wc>(); 20];
    let mut order = Vec::new();
    while order.len() < 24 {
        let found = unsafe { (bench.api.poll_cq)(bench.cq, 20, out.as_mut_ptr()) };
        order.extend(out[..usize::try_from(found).unwrap()].iter().map(|wc| wc.wr_id));
    }
    assert!(order.into_iter().eq(0..24));
    assert_eq!(unsafe { (bench.api.poll_cq)(bench.cq, 20, out.as_mut_ptr()) }, 0);
    assert_eq!(unsafe { (bench.api.poll_cq)(bench.cq, 0, std::ptr::null_mut()) }, 0);
    assert_eq!(unsafe { (bench.api.poll_cq)(bench.cq, -3, std::ptr::null_mut()) }, 0);
}
