//! Completion events and asynchronous events: descriptors, cookies, counts.

use quipu_abi_types::*;

use super::bench::{Bench, CQ_COOKIE, Edges, Said, done, made, receive, send, srq_init, status};

/// Whether a descriptor is readable now.
fn readable(fd: i32) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one live structure.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 && poll.revents & libc::POLLIN != 0 }
}

fn set_non_blocking(fd: i32) {
    // SAFETY: fcntl(2) with integers only.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
}

fn comp_event(bench: &Bench) -> Said<u64> {
    made(|out| unsafe { (bench.api.get_comp_event)(bench.channel.channel, out) })
}

fn async_event(bench: &Bench) -> Said<(u32, u64)> {
    let event: EngineAsyncEvent =
        made(|out| unsafe { (bench.api.get_async_event)(bench.context, out) })?;
    Ok((event.event_type, event.cookie))
}

fn arm(bench: &Bench, solicited_only: i32) {
    done(unsafe { (bench.api.req_notify_cq)(bench.cq, solicited_only) }).unwrap();
}

#[test]
fn each_arming_gives_one_event_with_the_cookie() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    set_non_blocking(bench.channel.fd);
    assert_eq!(comp_event(&bench), Err(EngineStatus::WouldBlock));
    arm(&bench, 0);
    for wr_id in 0..3 {
        bench.post_recv(b.qp, wr_id, &mut []).unwrap();
        bench.post_send(a.qp, &mut [send(10 + wr_id, IBV_WR_SEND, &mut [])]).unwrap();
        bench.completions(bench.cq, 2);
    }
    assert!(readable(bench.channel.fd));
    assert_eq!(comp_event(&bench), Ok(CQ_COOKIE));
    assert!(!readable(bench.channel.fd));
    assert_eq!(comp_event(&bench), Err(EngineStatus::WouldBlock));

    // Only solicited messages and failures count now.
    arm(&bench, 1);
    bench.post_recv(b.qp, 3, &mut []).unwrap();
    bench.post_send(a.qp, &mut [send(13, IBV_WR_SEND, &mut [])]).unwrap();
    bench.completions(bench.cq, 2);
    assert!(!readable(bench.channel.fd));
    bench.post_recv(b.qp, 4, &mut []).unwrap();
    let mut solicited = send(14, IBV_WR_SEND, &mut []);
    solicited.send_flags |= IBV_SEND_SOLICITED;
    bench.post_send(a.qp, &mut [solicited]).unwrap();
    bench.completions(bench.cq, 2);
    assert_eq!(comp_event(&bench), Ok(CQ_COOKIE));

    for qp in [a, b] {
        bench.destroy_qp(qp.qp).unwrap();
    }
    let reported: EngineEventsReported =
        made(|out| unsafe { (bench.api.destroy_cq)(bench.cq, out) }).unwrap();
    assert_eq!(reported, EngineEventsReported { comp: 2, r#async: 0 });
}

#[test]
fn a_blocked_thread_gets_the_event_that_another_causes() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    bench.post_recv(b.qp, 1, &mut []).unwrap();
    arm(&bench, 0);
    let (api, channel) = (bench.api, bench.channel.channel);
    let waiter = std::thread::spawn(move || {
        made::<u64>(|out| unsafe { (api.get_comp_event)(channel, out) })
    });
    bench.post_send(a.qp, &mut [send(2, IBV_WR_SEND, &mut [])]).unwrap();
    assert_eq!(waiter.join().unwrap(), Ok(CQ_COOKIE));
    bench.completions(bench.cq, 2);
}

/// As programs do that leave events in the channel and poll their queues when it wakes them.
#[test]
fn each_event_is_an_edge_though_earlier_ones_were_not_taken() {
    let bench = Bench::new();
    let (a, b) = bench.pair(&bench.qp_init());
    let edges = Edges::of(bench.channel.fd);
    for wr_id in 0..3 {
        arm(&bench, 0);
        bench.post_recv(b.qp, wr_id, &mut []).unwrap();
        bench.post_send(a.qp, &mut [send(10 + wr_id, IBV_WR_SEND, &mut [])]).unwrap();
        bench.completions(bench.cq, 2);
        assert!(edges.any(), "{wr_id}");
    }
    for _ in 0..3 {
        assert_eq!(comp_event(&bench), Ok(CQ_COOKIE));
    }
    assert!(!readable(bench.channel.fd));
}

#[test]
fn an_event_that_was_not_taken_vanishes_with_its_queue() {
    let bench = Bench::new();
    set_non_blocking(bench.channel.fd);
    let cq = bench.new_cq(4, bench.channel.channel, 5).unwrap().cq;
    let mut init = bench.qp_init();
    init.recv_cq = cq;
    let (a, b) = bench.pair(&init);
    done(unsafe { (bench.api.req_notify_cq)(cq, 0) }).unwrap();
    bench.post_recv(b.qp, 1, &mut []).unwrap();
    bench.post_send(a.qp, &mut [send(2, IBV_WR_SEND, &mut [])]).unwrap();
    bench.completions(cq, 1);
    assert!(readable(bench.channel.fd));
    for qp in [a, b] {
        bench.destroy_qp(qp.qp).unwrap();
    }
    let reported: EngineEventsReported =
        made(|out| unsafe { (bench.api.destroy_cq)(cq, out) }).unwrap();
    assert_eq!(reported, EngineEventsReported::default());
    assert!(!readable(bench.channel.fd));
    assert_eq!(comp_event(&bench), Err(EngineStatus::WouldBlock));
}

#[test]
fn the_limit_of_a_shared_queue_raises_an_event_with_its_cookie() {
    let bench = Bench::new();
    set_non_blocking(bench.async_fd);
    assert_eq!(async_event(&bench), Err(EngineStatus::WouldBlock));
    let attr = ibv_srq_attr { max_wr: 8, max_sge: 1, srq_limit: 0 };
    let init = srq_init(attr, 77);
    let srq: EngineSrq =
        made(|out| unsafe { (bench.api.create_srq)(bench.pd, &init, out) }).unwrap();
    let mut qp_init = bench.qp_init();
    qp_init.srq = srq.srq;
    let (a, b) = bench.pair(&qp_init);
    for wr_id in 0..3 {
        let mut bad = std::ptr::null();
        let wr = receive(wr_id, &mut []);
        done(unsafe { (bench.api.post_srq_recv)(srq.srq, &wr, &mut bad) }).unwrap();
    }
    let limit = ibv_srq_attr { srq_limit: 3, ..attr };
    done(unsafe { (bench.api.modify_srq)(srq.srq, &limit, IBV_SRQ_LIMIT) }).unwrap();
    assert!(!readable(bench.async_fd));
    bench.post_send(a.qp, &mut [send(2, IBV_WR_SEND, &mut [])]).unwrap();
    bench.completions(bench.cq, 2);
    assert!(readable(bench.async_fd));
    assert_eq!(async_event(&bench), Ok((IBV_EVENT_SRQ_LIMIT_REACHED, 77)));
    assert!(!readable(bench.async_fd));
    for qp in [a, b] {
        bench.destroy_qp(qp.qp).unwrap();
    }
    let reported: EngineEventsReported =
        made(|out| unsafe { (bench.api.destroy_srq)(srq.srq, out) }).unwrap();
    assert_eq!(reported, EngineEventsReported { comp: 0, r#async: 1 });
}

#[test]
fn a_queue_that_overruns_says_so() {
    let bench = Bench::new();
    set_non_blocking(bench.async_fd);
    let cq = bench.new_cq(1, ChannelHandle::NONE, 88).unwrap();
    let mut init = bench.qp_init();
    init.send_cq = cq.cq;
    init.cap.max_send_wr = 2 * cq.cqe;
    init.cookie = 99;
    let (a, _b) = bench.pair(&init);
    let mut from = [bench.sge(0, 8)];
    for wr_id in 0..=u64::from(cq.cqe) {
        let mut wr = send(wr_id, IBV_WR_RDMA_WRITE, &mut from);
        wr.wr.rdma = ibv_send_wr_rdma { remote_addr: bench.addr(64), rkey: bench.mr.rkey };
        bench.post_send(a.qp, &mut [wr]).unwrap();
    }
    while !readable(bench.async_fd) {
        bench.completions(bench.cq, 0);
        let mut none = super::bench::blank();
        unsafe { (bench.api.poll_cq)(bench.cq, 1, &mut none) };
    }
    assert_eq!(async_event(&bench), Ok((IBV_EVENT_CQ_ERR, 88)));
    // The queue pair whose completion was lost has failed.
    assert_eq!(async_event(&bench), Ok((IBV_EVENT_QP_FATAL, 99)));
    assert_eq!(bench.query(a.qp).unwrap().qp_state, IBV_QPS_ERR);
    // What the queue has can be taken; then it fails.
    assert_eq!(bench.completions(cq.cq, cq.cqe as usize).len(), cq.cqe as usize);
    let mut none = super::bench::blank();
    let polled = unsafe { (bench.api.poll_cq)(cq.cq, 1, &mut none) };
    assert_eq!(status(-polled), EngineStatus::Internal);
}
