//! What is refused when it is posted or asked, and what becomes a completion.

use quipu_abi_types::*;

use super::bench::{Bench, MEMORY, api, blank, done, made, send};

#[test]
fn transitions_need_exactly_their_attributes() {
    let bench = Bench::new();
    let (a, b) =
        (bench.create_qp(&bench.qp_init()).unwrap(), bench.create_qp(&bench.qp_init()).unwrap());
    let invalid = Err(EngineStatus::Invalid);
    let (attr, mask) = bench.rtr(b.qp_num);
    assert_eq!(bench.modify(a.qp, &attr, mask), invalid, "RESET to RTR");
    bench.to_init(a.qp).unwrap();
    assert_eq!(bench.to_rts(a.qp), invalid, "INIT to RTS");
    assert_eq!(bench.modify(a.qp, &attr, mask & !IBV_QP_DEST_QPN), invalid);
    assert_eq!(bench.modify(a.qp, &attr, mask | IBV_QP_QKEY), invalid);
    assert_eq!(bench.modify(a.qp, &attr, mask | 1 << 30), invalid);
    let wrong = |change: fn(&mut ibv_qp_attr)| {
        let mut attr = attr;
        change(&mut attr);
        bench.modify(a.qp, &attr, mask)
    };
    assert_eq!(wrong(|attr| attr.ah_attr.is_global = 0), invalid);
    assert_eq!(wrong(|attr| attr.ah_attr.port_num = 2), invalid);
    assert_eq!(wrong(|attr| attr.ah_attr.grh.sgid_index = 4), invalid);
    assert_eq!(wrong(|attr| attr.path_mtu = 6), invalid);
    assert_eq!(wrong(|attr| attr.qp_state = 17), invalid);
    assert_eq!(bench.query(a.qp).unwrap().qp_state, IBV_QPS_INIT, "nothing has changed");
    bench.modify(a.qp, &attr, mask).unwrap();
    bench.to_rts(a.qp).unwrap();
    let now = bench.query(a.qp).unwrap();
    assert_eq!((now.qp_state, now.dest_qp_num, now.timeout), (IBV_QPS_RTS, b.qp_num, 14));
    assert_eq!((now.path_mtu, now.max_dest_rd_atomic), (IBV_MTU_1024, 4));
    let mut attr: ibv_qp_attr = blank();
    attr.qp_state = IBV_QPS_RESET;
    bench.modify(a.qp, &attr, IBV_QP_STATE).unwrap();
    assert_eq!(bench.query(a.qp).unwrap().qp_state, IBV_QPS_RESET);
}

#[test]
fn posts_are_refused_by_state_size_and_meaning() {
    let bench = Bench::new();
    let fresh = bench.create_qp(&bench.qp_init()).unwrap();
    let invalid = EngineStatus::Invalid;
    let none = &mut [];
    assert_eq!(bench.post_recv(fresh.qp, 1, none), Err(invalid), "a receive in RESET");
    let wr = send(1, IBV_WR_SEND, none);
    assert_eq!(bench.post_send(fresh.qp, &mut [wr]), Err((1, invalid)), "a send in RESET");
    bench.to_init(fresh.qp).unwrap();
    assert_eq!(bench.post_recv(fresh.qp, 1, none), Ok(()));
    assert_eq!(bench.post_send(fresh.qp, &mut [wr]), Err((1, invalid)), "a send in INIT");
    assert_eq!(bench.post_recv(fresh.qp, 2, &mut [bench.sge(0, 1); 5]), Err(invalid));
    for wr_id in 2..9 {
        bench.post_recv(fresh.qp, wr_id, none).unwrap();
    }
    assert_eq!(bench.post_recv(fresh.qp, 9, none), Err(EngineStatus::QueueFull));

    let (a, _b) = bench.pair(&bench.qp_init());
    let refused = |change: fn(&mut ibv_send_wr)| {
        let mut list = [bench.sge(0, 8); 5];
        let mut wr = send(3, IBV_WR_SEND, &mut list);
        wr.num_sge = 1;
        change(&mut wr);
        bench.post_send(a.qp, &mut [wr])
    };
    assert_eq!(refused(|wr| wr.opcode = 77), Err((3, invalid)));
    assert_eq!(refused(|wr| wr.opcode = IBV_WR_TSO), Err((3, invalid)));
    assert_eq!(refused(|wr| wr.send_flags |= 1 << 9), Err((3, invalid)));
    assert_eq!(refused(|wr| wr.num_sge = 5), Err((3, invalid)));
    assert_eq!(refused(|wr| wr.num_sge = -1), Err((3, invalid)));
    assert_eq!(refused(|wr| wr.sg_list = std::ptr::null_mut()), Err((3, invalid)));
    assert_eq!(
        done(unsafe { (bench.api.post_send)(a.qp, std::ptr::null(), &mut std::ptr::null()) }),
        Ok(())
    );
}

/// A queue pair in RTS whose peers are named by each request.
fn datagrams(bench: &Bench) -> QpHandle {
    let init = EngineQpInit { qp_type: IBV_QPT_UD, ..bench.qp_init() };
    let qp = bench.create_qp(&init).unwrap().qp;
    let mut attr: ibv_qp_attr = super::bench::blank();
    (attr.qp_state, attr.port_num) = (IBV_QPS_INIT, 1);
    let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    for (state, mask) in [
        (IBV_QPS_INIT, init),
        (IBV_QPS_RTR, IBV_QP_STATE),
        (IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN),
    ] {
        attr.qp_state = state;
        bench.modify(qp, &attr, mask).unwrap();
    }
    qp
}

/// Where a datagram names its address handle, other operations have an address of the peer's memory.
#[test]
fn operations_that_datagrams_do_not_have_are_refused_and_nothing_is_followed() {
    let bench = Bench::new();
    let qp = datagrams(&bench);
    for opcode in [
        IBV_WR_RDMA_WRITE,
        IBV_WR_RDMA_WRITE_WITH_IMM,
        IBV_WR_RDMA_READ,
        IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_ATOMIC_FETCH_AND_ADD,
        IBV_WR_ATOMIC_WRITE,
        IBV_WR_LOCAL_INV,
        IBV_WR_BIND_MW,
        IBV_WR_SEND_WITH_INV,
        IBV_WR_TSO,
    ] {
        let mut wr = send(5, opcode, &mut []);
        wr.wr.rdma = ibv_send_wr_rdma { remote_addr: 0x1001, rkey: 5 };
        let refused = Err((5, EngineStatus::Invalid));
        assert_eq!(bench.post_send(qp, &mut [wr]), refused, "{opcode}");
        let batch = done(unsafe { (bench.api.post_batch)(qp, &wr) });
        assert_eq!(batch, Err(EngineStatus::Invalid), "{opcode}");
        let list = [send(1, IBV_WR_SEND, &mut []), wr];
        let (mut list, mut bad) = (list, std::ptr::null());
        // The first has no address handle at all.
        list[0].next = &raw mut list[1];
        let posted = done(unsafe { (bench.api.post_send)(qp, list.as_ptr(), &mut bad) });
        assert_eq!((posted, bad), (Err(EngineStatus::Invalid), list.as_ptr()));
    }
}

#[test]
fn requests_before_the_first_bad_one_are_posted() {
    let bench = Bench::new();
    let (a, _b) = bench.pair(&bench.qp_init());
    let mut from = [bench.sge(0, 8)];
    let write = |wr_id, list: &mut [ibv_sge]| {
        let mut wr = send(wr_id, IBV_WR_RDMA_WRITE, list);
        wr.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(64), rkey: bench.mr.rkey };
        wr
    };
    let mut list = [1, 2, 3].map(|wr_id| write(wr_id, &mut from));
    list[1].opcode = 99;
    assert_eq!(bench.post_send(a.qp, &mut list), Err((2, EngineStatus::Invalid)));
    assert_eq!(bench.completions(bench.cq, 1)[0].wr_id, 1);
    // A queue for 8, of which none is served meanwhile: the ninth does not fit.
    let mut list: Vec<_> = (0..9).map(|wr_id| write(wr_id, &mut from)).collect();
    assert_eq!(bench.post_send(a.qp, &mut list), Err((8, EngineStatus::QueueFull)));
    assert_eq!(bench.completions(bench.cq, 8).len(), 8);
}

/// `ibv_wr_complete` posts all or nothing (`ibv_wr_post(3)`).
#[test]
fn a_batch_is_posted_whole_or_not_at_all() {
    let bench = Bench::new();
    let (a, _b) = bench.pair(&bench.qp_init());
    let mut from = [bench.sge(0, 8)];
    let mut list: Vec<_> = (0..9)
        .map(|wr_id| {
            let mut wr = send(wr_id, IBV_WR_RDMA_WRITE, &mut from);
            wr.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(64), rkey: bench.mr.rkey };
            wr
        })
        .collect();
    let post = |list: &mut [ibv_send_wr]| {
        for index in 1..list.len() {
            list[index - 1].next = &raw mut list[index];
        }
        let first = list.first().map_or(std::ptr::null(), std::ptr::from_ref);
        done(unsafe { (bench.api.post_batch)(a.qp, first) })
    };
    assert_eq!(post(&mut list), Err(EngineStatus::QueueFull), "a queue for 8");
    type Spoil = fn(&mut ibv_send_wr);
    let spoil: [Spoil; 4] = [
        |wr| wr.num_sge = 5,
        |wr| wr.opcode = 99,
        |wr| wr.send_flags |= 1 << 9,
        |wr| {
            wr.send_flags |= IBV_SEND_INLINE;
            // SAFETY: its list has one element, alive in the test.
            unsafe { (*wr.sg_list).length = 129 };
        },
    ];
    for spoil in spoil {
        let mut three = [list[0], list[1], list[2]];
        let mut other = [bench.sge(0, 8)];
        three[2].sg_list = other.as_mut_ptr();
        three[2].next = std::ptr::null_mut();
        spoil(&mut three[2]);
        assert_eq!(post(&mut three), Err(EngineStatus::Invalid));
        let mut one = [three[2]];
        assert_eq!(post(&mut one), Err(EngineStatus::Invalid), "a batch of one");
    }
    assert_eq!(post(&mut []), Ok(()));
    // Nothing of all that was posted: there is room for eight, and these alone complete.
    list[7].next = std::ptr::null_mut();
    list[0].wr_id = 77;
    assert_eq!(post(&mut list[..8]), Ok(()));
    let ids: Vec<_> = bench.completions(bench.cq, 8).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, [77, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn what_only_the_transport_finds_out_becomes_a_completion() {
    type Spoil = fn(&Bench, &mut ibv_send_wr);
    let cases: [(Spoil, u32); 4] = [
        // SAFETY: the requests use the part of the union for writes.
        (|_, wr| unsafe { wr.wr.rdma.rkey ^= 0x100 }, IBV_WC_REM_ACCESS_ERR),
        (
            |bench, wr| {
                let remote_addr = bench.addr(MEMORY - 4);
                wr.wr.rdma = ibv_send_wr_rdma { remote_addr, rkey: bench.mr.rkey };
            },
            IBV_WC_REM_ACCESS_ERR,
        ),
        // SAFETY: the list has one element, alive in the test.
        (|_, wr| unsafe { (*wr.sg_list).lkey ^= 0x100 }, IBV_WC_LOC_PROT_ERR),
        // rnr_retry is 0 and no receive is posted.
        (|_, wr| wr.opcode = IBV_WR_SEND, IBV_WC_RNR_RETRY_EXC_ERR),
    ];
    for (spoil, status) in cases {
        let bench = Bench::new();
        let (a, b) = bench.pair(&bench.qp_init());
        let mut from = [bench.sge(0, 8)];
        let mut good = send(2, IBV_WR_RDMA_WRITE, &mut []);
        good.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(64), rkey: bench.mr.rkey };
        let mut bad = good;
        bad.wr_id = 1;
        (bad.sg_list, bad.num_sge) = (from.as_mut_ptr(), 1);
        spoil(&bench, &mut bad);
        let mut behind = [bench.sge(0, 8)];
        (good.sg_list, good.num_sge) = (behind.as_mut_ptr(), 1);
        bench.post_recv(a.qp, 3, &mut []).unwrap();
        bench.post_send(a.qp, &mut [bad, good]).unwrap();
        let all = bench.completions(bench.cq, 3);
        let told: Vec<(u64, u32)> = all.iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(told[0], (1, status));
        assert!(
            told.contains(&(2, IBV_WC_WR_FLUSH_ERR)) && told.contains(&(3, IBV_WC_WR_FLUSH_ERR))
        );
        assert_eq!(bench.query(a.qp).unwrap().qp_state, IBV_QPS_ERR);
        // In ERR everything is taken and flushed.
        bench.post_send(a.qp, &mut [good]).unwrap();
        assert_eq!(bench.completion().status, IBV_WC_WR_FLUSH_ERR);
        bench.post_recv(a.qp, 4, &mut []).unwrap();
        assert_eq!(bench.completion().status, IBV_WC_WR_FLUSH_ERR);
        bench.destroy_qp(b.qp).unwrap();
    }
}

#[test]
fn null_and_unknown_handles_are_invalid() {
    let bench = Bench::new();
    let api = api();
    let invalid = Err(EngineStatus::Invalid);
    for bits in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
        let events = |code: i32| done(code);
        let mut reported = EngineEventsReported::default();
        assert_eq!(done(unsafe { (api.dealloc_pd)(PdHandle(bits)) }), invalid);
        assert_eq!(done(unsafe { (api.dereg_mr)(MrHandle(bits)) }), invalid);
        assert_eq!(done(unsafe { (api.dealloc_mw)(MwHandle(bits)) }), invalid);
        assert_eq!(done(unsafe { (api.destroy_channel)(ChannelHandle(bits)) }), invalid);
        assert_eq!(events(unsafe { (api.destroy_cq)(CqHandle(bits), &mut reported) }), invalid);
        assert_eq!(events(unsafe { (api.destroy_srq)(SrqHandle(bits), &mut reported) }), invalid);
        assert_eq!(events(unsafe { (api.destroy_qp)(QpHandle(bits), &mut reported) }), invalid);
        assert_eq!(bench.query(QpHandle(bits)).err(), Some(EngineStatus::Invalid));
        assert_eq!(done(unsafe { (api.close)(ContextHandle(bits | 1 << 50)) }), invalid);
        let pd =
            made::<PdHandle>(|out| unsafe { (api.alloc_pd)(ContextHandle(bits | 1 << 50), out) });
        assert_eq!(pd.err(), Some(EngineStatus::Invalid));
        let mr = made::<EngineMr>(|out| unsafe {
            (api.reg_mr)(PdHandle(bits), &super::bench::registration(bench.addr(0), 8), out)
        });
        assert_eq!(mr.err(), Some(EngineStatus::Invalid));
    }
    let nowhere = unsafe { (api.alloc_pd)(bench.context, std::ptr::null_mut()) };
    assert_eq!(done(nowhere), invalid);
}
