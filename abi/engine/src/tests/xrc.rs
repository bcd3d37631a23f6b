//! XRC domains, and messages to the shared receive queues in them.

use std::fs::{File, Metadata};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{O_CREAT, O_EXCL, c_int};
use quipu_abi_types::*;

use super::bench::{Bench, Said, blank, done, made, receive, send};

fn open(bench: &Bench, fd: c_int, oflag: c_int) -> Said<XrcdHandle> {
    open_in(bench.api, bench.context, fd, oflag)
}

fn open_in(api: &EngineApi, context: ContextHandle, fd: c_int, oflag: c_int) -> Said<XrcdHandle> {
    made(|out| unsafe { (api.open_xrcd)(context, fd, oflag, out) })
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
    for none in [999_999, -2] {
        assert_eq!(open(&bench, none, O_CREAT), Err(EngineStatus::BadDescriptor));
    }
    let first = open(&bench, fd, O_CREAT | O_EXCL).unwrap();
    assert_eq!(open(&bench, fd, O_CREAT | O_EXCL), Err(EngineStatus::Invalid), "there is one");
    let again = open(&bench, fd, 0).unwrap();
    let different = open(&bench, other.as_raw_fd(), O_CREAT).unwrap();
    let nameless = [0, O_CREAT | O_EXCL].map(|oflag| open(&bench, -1, oflag).unwrap());
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
    let plain = Bench::of(c"quipu_iw0");
    assert_eq!(open(&plain, -1, O_CREAT), Err(EngineStatus::NotSupported), "it has no XRC");
}

#[test]
fn one_of_two_threads_that_open_at_once_is_the_first() {
    let bench = Bench::new();
    let (api, context) = (bench.api, bench.context);
    let (file, together) = (File::open("/proc/self/exe").unwrap(), Barrier::new(2));
    let open_both = |oflag| {
        let open = || {
            together.wait();
            open_in(api, context, file.as_raw_fd(), oflag)
        };
        std::thread::scope(|scope| {
            let threads = [(); 2].map(|()| scope.spawn(open));
            threads.map(|thread| thread.join().unwrap())
        })
    };
    for _ in 0..500 {
        let opened = open_both(O_CREAT | O_EXCL);
        let refused = opened.iter().filter(|one| **one == Err(EngineStatus::Invalid));
        assert_eq!(refused.count(), 1);
        opened.iter().flatten().for_each(|xrcd| close(&bench, *xrcd).unwrap());
        // One domain, which lives while one of the two has it open.
        let [one, other] = open_both(O_CREAT).map(Result::unwrap);
        let queue = xrc_srq(&bench, one);
        close(&bench, one).unwrap();
        assert_eq!(close(&bench, other), Err(EngineStatus::Busy));
        made::<EngineEventsReported>(|out| unsafe { (bench.api.destroy_srq)(queue.srq, out) })
            .unwrap();
        close(&bench, other).unwrap();
    }
}

#[test]
fn the_number_of_a_file_that_is_gone_names_no_other_file() {
    let bench = Bench::new();
    let path = std::env::temp_dir().join(format!("quipu-xrcd-{}", std::process::id()));
    let create = || {
        let file = File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    };
    // Many file systems give the number of the first to the second at once.
    let open_for = |file: &File| open(&bench, file.as_raw_fd(), O_CREAT | O_EXCL);
    let opened = [(); 2].map(|()| open_for(&create()).unwrap());
    // It is kept for as long as the domain is open, also where numbers are not given again.
    let file = create();
    let domain = open_for(&file).unwrap();
    let kept = || {
        let inode = |of: Metadata| (of.dev(), of.ino());
        let wanted = inode(file.metadata().unwrap());
        let own = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
            let at = entry.ok()?.path();
            (inode(std::fs::metadata(&at).ok()?) == wanted).then_some(at)
        });
        own.count() - 1
    };
    assert_eq!(kept(), 1);
    for xrcd in opened.into_iter().chain([domain]) {
        close(&bench, xrcd).unwrap();
    }
    assert_eq!(kept(), 0);
}

fn xrc_srq(bench: &Bench, xrcd: XrcdHandle) -> EngineSrq {
    let attr = ibv_srq_attr { max_wr: 8, max_sge: 2, srq_limit: 0 };
    let init = EngineSrqInit { attr, xrcd, cq: bench.cq, cookie: 0 };
    made(|out| unsafe { (bench.api.create_srq)(bench.pd, &init, out) }).unwrap()
}

/// What an XRC responder does not have, and a requester.
const REQUESTER: u32 = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
const RESPONDER: u32 = IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;

/// A requester, and a responder of a domain.
fn two_ends(bench: &Bench, xrcd: XrcdHandle) -> (EngineQp, EngineQp) {
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
    (from, made_to(&init).unwrap())
}

/// INIT and RTR.
fn to_rtr(bench: &Bench, qp: QpHandle, peer: u32, lacks: u32) {
    bench.to_init(qp).unwrap();
    let (attr, mask) = bench.rtr(peer);
    bench.modify(qp, &attr, mask & !lacks).unwrap();
}

#[test]
fn messages_name_a_shared_receive_queue() {
    let bench = Bench::new();
    let xrcd = open(&bench, -1, O_CREAT).unwrap();
    let queues = [xrc_srq(&bench, xrcd), xrc_srq(&bench, xrcd)];
    assert_ne!(queues[0].srq_num, queues[1].srq_num);
    let (from, to) = two_ends(&bench, xrcd);
    assert_eq!(close(&bench, xrcd), Err(EngineStatus::Busy));
    for (own, peer, lacks) in [(from, to, REQUESTER), (to, from, RESPONDER)] {
        to_rtr(&bench, own.qp, peer.qp_num, lacks);
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

/// A domain and its responder in two contexts: whoever has the responder open moves it on and hears of
/// events, and it is there until the last has closed it.
#[test]
fn a_responder_lives_until_the_last_that_has_it_open() {
    let bench = Bench::new();
    let file = File::open("/dev/zero").unwrap();
    let xrcd = open(&bench, file.as_raw_fd(), O_CREAT).unwrap();
    let queue = xrc_srq(&bench, xrcd);
    let (from, to) = two_ends(&bench, xrcd);

    let other = Bench::new();
    let there = open(&other, file.as_raw_fd(), 0).unwrap();
    let elsewhere = open(&other, -1, O_CREAT).unwrap();
    let opening = |xrcd, number, cookie| {
        let open = other.api.open_qp;
        made::<QpHandle>(|out| unsafe { open(other.context, xrcd, number, cookie, out) })
    };
    for (xrcd, number) in [(xrcd, to.qp_num), (elsewhere, to.qp_num), (there, from.qp_num)] {
        assert_eq!(opening(xrcd, number, 0), Err(EngineStatus::Invalid));
    }
    let opened = [opening(there, to.qp_num, 71).unwrap(), opening(there, to.qp_num, 72).unwrap()];

    // The one opens the way, the other sees it; the creator goes before the first message.
    to_rtr(&bench, opened[0], from.qp_num, RESPONDER);
    assert_eq!(other.query(opened[1]).unwrap().qp_state, IBV_QPS_RTR);
    bench.destroy_qp(to.qp).unwrap();
    assert_eq!(bench.query(to.qp).err(), Some(EngineStatus::Invalid));
    assert_eq!(bench.destroy_qp(to.qp).err(), Some(EngineStatus::Invalid));
    to_rtr(&bench, from.qp, to.qp_num, REQUESTER);
    bench.to_rts_without(from.qp, REQUESTER).unwrap();
    let wr = receive(100, &mut []);
    let posted = unsafe { (bench.api.post_srq_recv)(queue.srq, &wr, &mut std::ptr::null()) };
    assert_eq!(posted, EngineStatus::Ok.code());
    let mut wr = send(7, IBV_WR_SEND, &mut []);
    wr.qp_type.xrc.remote_srqn = queue.srq_num;
    bench.post_send(from.qp, &mut [wr]).unwrap();
    bench.completions(bench.cq, 2);

    let mut told = [0, 1].map(|_| {
        let event: EngineAsyncEvent =
            made(|out| unsafe { (other.api.get_async_event)(other.context, out) }).unwrap();
        (event.event_type, event.cookie)
    });
    told.sort_unstable();
    assert_eq!(told, [(IBV_EVENT_COMM_EST, 71), (IBV_EVENT_COMM_EST, 72)]);

    let one = EngineEventsReported { comp: 0, r#async: 1 };
    assert_eq!(other.destroy_qp(opened[1]), Ok(one));
    assert_eq!(other.query(opened[1]).err(), Some(EngineStatus::Invalid));
    assert_eq!(other.query(opened[0]).unwrap().qp_state, IBV_QPS_RTR);
    assert_eq!(other.destroy_qp(opened[0]), Ok(one));
    assert_eq!(opening(there, to.qp_num, 0), Err(EngineStatus::Invalid), "it is gone");
}

/// Anyone who takes an event of an opening that another thread is just making still learns whose it is: one
/// that got lost would be waited for when the opening is destroyed.
#[test]
fn no_event_of_an_opening_is_lost_while_it_is_made() {
    const OPENINGS: u64 = 20_000;
    let bench = Bench::new();
    let xrcd = open(&bench, -1, O_CREAT).unwrap();
    let (from, to) = two_ends(&bench, xrcd);
    for (own, peer, lacks) in [(from, to, REQUESTER), (to, from, RESPONDER)] {
        to_rtr(&bench, own.qp, peer.qp_num, lacks);
        bench.to_rts_without(own.qp, lacks).unwrap();
    }
    // SAFETY: fcntl(2) with integers only.
    unsafe { libc::fcntl(bench.async_fd, libc::F_SETFL, libc::O_NONBLOCK) };
    let (api, context, number) = (bench.api, bench.context, to.qp_num);
    let ends = AtomicBool::new(false);
    let modify = |state, mask| {
        let attr = ibv_qp_attr { qp_state: state, en_sqd_async_notify: 1, ..blank() };
        done(unsafe { (api.modify_qp)(to.qp, &attr, IBV_QP_STATE | mask) }).unwrap();
    };
    let drains = || {
        while !ends.load(Ordering::Relaxed) {
            modify(IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY);
            modify(IBV_QPS_RTS, 0);
        }
    };
    let listens = || {
        let mut told = vec![0; OPENINGS as usize + 1];
        loop {
            let ended = ends.load(Ordering::Relaxed);
            let event = |out| unsafe { (api.get_async_event)(context, out) };
            match made::<EngineAsyncEvent>(event) {
                Ok(event) => told[event.cookie as usize] += 1,
                Err(EngineStatus::WouldBlock) if ended => return told,
                Err(EngineStatus::WouldBlock) => std::thread::yield_now(),
                Err(status) => panic!("{status:?}"),
            }
        }
    };
    let opens = |cookie| {
        let opened: QpHandle =
            made(|out| unsafe { (api.open_qp)(context, xrcd, number, cookie, out) }).unwrap();
        made(|out: *mut EngineEventsReported| unsafe { (api.destroy_qp)(opened, out) })
            .unwrap()
            .r#async
    };
    let (told, taken) = std::thread::scope(|scope| {
        scope.spawn(drains);
        let listener = scope.spawn(listens);
        let taken: Vec<u32> = (1..=OPENINGS).map(opens).collect();
        ends.store(true, Ordering::Relaxed);
        (listener.join().unwrap(), taken)
    });
    let lost = taken.iter().zip(&told[1..]).filter(|(taken, told)| taken != told);
    assert_eq!(lost.count(), 0);
}

/// What a context has open goes with it.
#[test]
fn a_context_that_is_closed_leaves_the_responder_to_others() {
    let bench = Bench::new();
    let file = File::open("/dev/full").unwrap();
    let there = open(&bench, file.as_raw_fd(), O_CREAT).unwrap();
    let creator = Bench::new();
    let xrcd = open(&creator, file.as_raw_fd(), 0).unwrap();
    let (_, to) = two_ends(&creator, xrcd);
    let (context, number) = (bench.context, to.qp_num);
    let opened: QpHandle =
        made(|out| unsafe { (bench.api.open_qp)(context, there, number, 0, out) }).unwrap();
    drop(creator);
    assert_eq!(bench.query(opened).unwrap().qp_state, IBV_QPS_RESET);
    assert_eq!(close(&bench, there), Err(EngineStatus::Busy));
    bench.destroy_qp(opened).unwrap();
    close(&bench, there).unwrap();
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
