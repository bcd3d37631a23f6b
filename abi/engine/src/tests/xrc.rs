//! XRC domains, and messages to the shared receive queues in them.

use std::fs::File;
use std::os::fd::AsRawFd;

use libc::{O_CREAT, O_EXCL, c_int};
use quipu_abi_types::*;

use super::bench::{Bench, Said, done, made, receive, send};

fn open(bench: &Bench, fd: c_int, oflag: c_int) -> Said<XrcdHandle> {
    made(|out| unsafe { (bench.api.open_xrcd)(bench.context, fd, oflag, out) })
}

fn close(bench: &Bench, xrcd: XrcdHandle) -> Said {
    done(unsafe { (bench.api.close_xrcd)(xrcd) })
}

#[test]
fn domains_belong_to_inodes() {
    let bench = Bench::new();
    let (one, other) = (File::open("/proc/self/exe").unwrap(), File::open("/dev/null").unwrap());
    let fd = one.as_raw_fd();
    assert_eq!(open(&bench, fd, 0), Err(EngineStatus::WouldBlock), "there is none yet");
    assert_eq!(open(&bench, 999_999, O_CREAT), Err(EngineStatus::Invalid));
    let first = open(&bench, fd, O_CREAT | O_EXCL).unwrap();
    assert_eq!(open(&bench, fd, O_CREAT | O_EXCL), Err(EngineStatus::Invalid), "there is one");
    let again = open(&bench, fd, 0).unwrap();
    let different = open(&bench, other.as_raw_fd(), O_CREAT).unwrap();
    let nameless = [open(&bench, -1, O_CREAT).unwrap(), open(&bench, -1, O_CREAT).unwrap()];
    // The two of one inode are one domain, which lives until both are closed.
    let queue = xrc_srq(&bench, first);
    close(&bench, first).unwrap();
    assert_eq!(close(&bench, first), Err(EngineStatus::Invalid));
    assert_eq!(close(&bench, again), Err(EngineStatus::Busy));
    made::<EngineEventsReported>(|out| unsafe { (bench.api.destroy_srq)(queue.srq, out) }).unwrap();
    close(&bench, again).unwrap();
    assert_eq!(open(&bench, fd, 0), Err(EngineStatus::WouldBlock), "it is gone");
    for xrcd in [different, nameless[0], nameless[1]] {
        close(&bench, xrcd).unwrap();
    }
}

fn xrc_srq(bench: &Bench, xrcd: XrcdHandle) -> EngineSrq {
    let attr = ibv_srq_attr { max_wr: 8, max_sge: 2, srq_limit: 0 };
    let init = EngineSrqInit { attr, xrcd, cq: bench.cq, cookie: 0 };
    made(|out| unsafe { (bench.api.create_srq)(bench.pd, &init, out) }).unwrap()
}

#[test]
fn messages_name_a_shared_receive_queue() {
    let bench = Bench::new();
    let xrcd = open(&bench, -1, O_CREAT).unwrap();
    let queues = [xrc_srq(&bench, xrcd), xrc_srq(&bench, xrcd)];
    assert_ne!(queues[0].srq_num, queues[1].srq_num);
    let mut init = bench.qp_init();
    (init.qp_type, init.recv_cq) = (IBV_QPT_XRC_SEND, CqHandle::NONE);
    let from = bench.create_qp(&init).unwrap();
    let none = CqHandle::NONE;
    (init.qp_type, init.send_cq, init.xrcd) = (IBV_QPT_XRC_RECV, none, xrcd);
    let made_to = |init: &EngineQpInit| {
        made::<EngineQp>(|out| unsafe { (bench.api.create_qp)(PdHandle::NONE, init, out) })
    };
    let without = EngineQpInit { xrcd: XrcdHandle::NONE, ..init };
    assert_eq!(made_to(&without).err(), Some(EngineStatus::Invalid));
    let to = made_to(&init).unwrap();
    assert_eq!(close(&bench, xrcd), Err(EngineStatus::Busy));
    let (requester, responder) = (
        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
        IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
    );
    for (own, peer, lacks) in [(from, to, requester), (to, from, responder)] {
        bench.to_init(own.qp).unwrap();
        let (attr, mask) = bench.rtr(peer.qp_num);
        bench.modify(own.qp, &attr, mask & !lacks).unwrap();
        bench.to_rts_without(own.qp, lacks).unwrap();
    }
    for (index, queue) in queues.iter().enumerate() {
        let wr_id = 100 + index as u64;
        let mut place = [bench.sge(64 * (index + 1), 64)];
        let wr = receive(wr_id, &mut place);
        let posted = unsafe { (bench.api.post_srq_recv)(queue.srq, &wr, &mut std::ptr::null()) };
        assert_eq!(posted, EngineStatus::Ok.code());
    }
    bench.write(0, b"quipu");
    for (index, queue) in queues.iter().enumerate().rev() {
        let mut list = [bench.sge(0, 5)];
        let mut wr = send(7, IBV_WR_SEND, &mut list);
        wr.qp_type.xrc.remote_srqn = queue.srq_num;
        bench.post_send(from.qp, &mut [wr]).unwrap();
        let mut all = bench.completions(bench.cq, 2);
        all.sort_by_key(|wc| wc.wr_id);
        assert_eq!((all[0].wr_id, all[0].status), (7, IBV_WC_SUCCESS));
        assert_eq!((all[1].wr_id, all[1].qp_num), (100 + index as u64, to.qp_num));
        assert_eq!(bench.read::<5>(64 * (index + 1)), *b"quipu");
    }
    let mut wr = send(8, IBV_WR_SEND, &mut []);
    wr.qp_type.xrc.remote_srqn = 1 << 24;
    assert_eq!(bench.post_send(from.qp, &mut [wr]), Err((8, EngineStatus::Invalid)));
}

/// Unreliable connections over the same table.
#[test]
fn unreliable_connections_tell_nobody_of_what_they_drop() {
    let bench = Bench::new();
    let mut init = bench.qp_init();
    init.qp_type = IBV_QPT_UC;
    let pair = [bench.create_qp(&init).unwrap(), bench.create_qp(&init).unwrap()];
    let lacks = IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_MAX_QP_RD_ATOMIC
        | IBV_QP_TIMEOUT;
    for (own, peer) in [(pair[0], pair[1]), (pair[1], pair[0])] {
        bench.to_init(own.qp).unwrap();
        let (attr, mask) = bench.rtr(peer.qp_num);
        assert_eq!(bench.modify(own.qp, &attr, mask), Err(EngineStatus::Invalid));
        bench.modify(own.qp, &attr, mask & !lacks).unwrap();
        bench.to_rts_without(own.qp, lacks).unwrap();
    }
    bench.post_send(pair[0].qp, &mut [send(1, IBV_WR_SEND, &mut [])]).unwrap();
    assert_eq!(bench.completion().wr_id, 1);
    bench.post_recv(pair[1].qp, 9, &mut []).unwrap();
    let mut read = send(2, IBV_WR_RDMA_READ, &mut []);
    read.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(0), rkey: bench.mr.rkey };
    assert_eq!(bench.post_send(pair[0].qp, &mut [read]), Err((2, EngineStatus::Invalid)));
    bench.post_send(pair[0].qp, &mut [send(3, IBV_WR_SEND, &mut [])]).unwrap();
    let mut all: Vec<u64> = bench.completions(bench.cq, 2).iter().map(|wc| wc.wr_id).collect();
    all.sort_unstable();
    assert_eq!(all, [3, 9]);
}
