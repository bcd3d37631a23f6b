//! What programs see of completion queues beside completions: time stamps, events that are held back,
//! queues that overrun. And atomic writes, which complete in a way of their own.

use std::cell::Cell;

use crate::pair::{Pair, WAYS, Way, connected};
use quipu_nic::*;

const CHANNEL: ChannelId = ChannelId(77);

/// A pair whose first side sends into a queue with a channel, of `cqe` entries.
fn watched(cqe: u32) -> (Pair, [QpId; 2], CqId) {
    let mut pair = Pair::new(Way::Link);
    let (cq, _) = pair.hosts[0].adapter.create_cq(cqe, Some(CHANNEL), 5).unwrap();
    let qps = [pair.hosts[0].qp_with(|init| init.send_cq = cq), pair.hosts[1].qp()];
    pair.connect(qps);
    (pair, qps, cq)
}

/// Has the first side make one completion.
fn write(pair: &mut Pair, qps: [QpId; 2], wr_id: u64) {
    pair.send(0, qps[0], wr_id, SendOp::Write { addr: 0, rkey: 0 }, &[]);
    pair.run();
}

fn told(pair: &mut Pair) -> usize {
    let events = std::mem::take(&mut pair.hosts[0].events);
    let of_queue = |event: &&Event| matches!(event, Event::Completion { channel: CHANNEL, .. });
    events.iter().filter(of_queue).count()
}

#[test]
fn completions_carry_the_time_at_which_they_were_made() {
    let (mut pair, qps, cq) = watched(8);
    let adapter = &mut pair.hosts[0].adapter;
    assert_eq!(adapter.poll_cq_stamped(cq), Ok(None));
    adapter.keep_stamps(cq).unwrap();
    let mut made = Vec::new();
    for wr_id in 0..3 {
        pair.now = pair.now.after(1_000_000);
        made.push((wr_id, pair.now));
        write(&mut pair, qps, wr_id);
        // Nobody looks at once.
        pair.now = pair.now.after(5_000_000);
    }
    for (wr_id, at) in made {
        let (completion, stamp) = pair.hosts[0].adapter.poll_cq_stamped(cq).unwrap().unwrap();
        assert_eq!(completion.wr_id, wr_id);
        assert!(stamp >= at && stamp.since(at) < 1_000_000, "{stamp:?} for {at:?}");
    }
    assert_eq!(pair.hosts[0].adapter.poll_cq_stamped(cq), Ok(None));
}

/// A clock that knows whether it was read.
struct Watch {
    now: Time,
    read: Cell<bool>,
}

impl TimeSource for &Watch {
    fn time(self, exact: bool) -> Time {
        self.read.set(self.read.get() || exact);
        self.now
    }
}

/// To read the clock is a good part of what a small request takes.
#[test]
fn posts_read_the_clock_where_a_queue_keeps_the_time_and_nowhere_else() {
    for kept in ["nothing", "stamps", "events"] {
        let mut pair = Pair::new(Way::LinkMapped);
        let (pd, cq) = (pair.hosts[0].pd, pair.hosts[0].cq);
        let adapter = &mut pair.hosts[0].adapter;
        match kept {
            "stamps" => adapter.keep_stamps(cq).unwrap(),
            "events" => adapter.moderate_cq(cq, 9, 1_000_000).unwrap(),
            _ => {}
        }
        let srq = adapter.create_srq(pd, 8, 1, 0).unwrap();
        let wq = adapter.create_wq(pd, cq, 8, 1).unwrap();
        let shared = pair.hosts[0].qp_with(|init| init.srq = Some(srq));
        let [mine, theirs, other] = [0, 1, 1].map(|host| pair.hosts[host].qp());
        pair.connect([mine, theirs]);
        pair.connect([shared, other]);
        let (here, there) = (pair.buffer(0, 8), pair.buffer(1, 8));
        let datagrams = pair.datagram_qp(0);
        for qp in [theirs, other] {
            pair.send(1, qp, 1, SendOp::Send, &[]);
        }
        pair.run();

        let watch = Watch { now: pair.now, read: Cell::default() };
        let read = |post: &str| assert_eq!(watch.read.take(), kept != "nothing", "{kept}, {post}");
        let adapter = &mut pair.hosts[0].adapter;
        adapter.post_recv(&watch, mine, 1, &[]).unwrap();
        read("a receive that somebody waits for");
        adapter.post_srq_recv(&watch, srq, 2, &[]).unwrap();
        read("one of a shared queue");
        let op = SendOp::Write { addr: there.addr(), rkey: there.key() };
        let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&[here.sge(0, 8)]));
        let wr = SendWr { wr_id: 3, to: To::Peer, op, flags, payload };
        assert!(adapter.post_at_once(&watch, mine, &wr));
        read("a write");
        assert_eq!(adapter.doorbell_wants_time(mine), kept != "nothing");
        assert_eq!(adapter.doorbell_wants_time(datagrams), kept != "nothing");
        adapter.modify_wq(watch.now, wq, WqState::Err).unwrap();
        adapter.post_wq_recv(&watch, wq, 4, &[]).unwrap();
        read("a receive that is flushed by a work queue");
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        adapter.modify_qp(watch.now, mine, &attr, QpAttrMask::STATE).unwrap();
        adapter.post_recv(&watch, mine, 5, &[]).unwrap();
        read("one that is flushed by a queue pair");
        let done = pair.hosts[0].poll().iter().map(|wc| wc.wr_id).collect::<Vec<_>>();
        assert_eq!(done, [1, 2, 3, 4, 5], "{kept}");

        // Where nothing completes there is no time to keep.
        let adapter = &mut pair.hosts[0].adapter;
        adapter.post_srq_recv(&watch, srq, 6, &[]).unwrap();
        adapter.post_recv(&watch, datagrams, 7, &[]).unwrap();
        assert!(!watch.read.get());
    }
}

/// A program looks, finds nothing, asks for an event and sleeps: what has come in between wakes it.
#[test]
fn an_event_tells_of_what_came_before_it_was_asked_for() {
    let (mut pair, qps, cq) = watched(32);
    let asked = |pair: &mut Pair| {
        pair.hosts[0].adapter.req_notify_cq(pair.now, cq, false).unwrap();
        pair.run();
        told(pair)
    };
    let taken = |pair: &mut Pair| {
        pair.hosts[0].adapter.poll_cq(cq, &mut [Completion::default(); 4]).unwrap()
    };
    assert_eq!(taken(&mut pair), 0);
    write(&mut pair, qps, 0);
    assert_eq!(asked(&mut pair), 1);
    assert_eq!(asked(&mut pair), 0, "once");
    assert_eq!(taken(&mut pair), 1);
    assert_eq!(asked(&mut pair), 0, "there is nothing");
}

#[test]
fn events_come_with_the_last_of_so_many_or_when_the_period_is_over() {
    let (mut pair, qps, cq) = watched(32);
    pair.hosts[0].adapter.moderate_cq(cq, 4, 2_000_000).unwrap();
    pair.hosts[0].adapter.req_notify_cq(pair.now, cq, false).unwrap();
    for wr_id in 0..3 {
        write(&mut pair, qps, wr_id);
    }
    assert_eq!(told(&mut pair), 0);
    write(&mut pair, qps, 3);
    assert_eq!(told(&mut pair), 1, "the fourth");
    // The period of those is no business of the next.
    let until = pair.now.after(1_500_000);
    pair.run_until(until);
    pair.hosts[0].adapter.req_notify_cq(pair.now, cq, false).unwrap();
    write(&mut pair, qps, 4);
    let until = pair.now.after(1_000_000);
    pair.run_until(until);
    assert_eq!(told(&mut pair), 0);
    let until = pair.now.after(2_000_000);
    pair.run_until(until);
    assert_eq!(told(&mut pair), 1, "the period is over");
    // It begins when the event is asked for, of what came long before, too.
    let mut taken = [Completion::default(); 8];
    assert_eq!(pair.hosts[0].adapter.poll_cq(cq, &mut taken), Ok(5));
    write(&mut pair, qps, 6);
    pair.now = pair.now.after(10_000_000);
    pair.hosts[0].adapter.req_notify_cq(pair.now, cq, false).unwrap();
    for (ns, events) in [(1_000_000, 0), (2_000_000, 1)] {
        let until = pair.now.after(ns);
        pair.run_until(until);
        assert_eq!(told(&mut pair), events);
    }
    assert_eq!(pair.hosts[0].adapter.poll_cq(cq, &mut taken), Ok(1));
    // Nothing is held back by a queue that is gone.
    pair.hosts[0].adapter.req_notify_cq(pair.now, cq, false).unwrap();
    write(&mut pair, qps, 5);
    let now = pair.now;
    pair.hosts[0].adapter.destroy_qp(now, qps[0]).unwrap();
    pair.hosts[0].adapter.destroy_cq(cq).unwrap();
    let until = pair.now.after(10_000_000);
    pair.run_until(until);
    assert_eq!(told(&mut pair), 0);
}

#[test]
fn a_queue_that_ignores_overruns_keeps_the_newest() {
    let (mut pair, qps, cq) = watched(2);
    pair.hosts[0].adapter.ignore_overrun(cq).unwrap();
    for wr_id in 0..5 {
        write(&mut pair, qps, wr_id);
    }
    let mut out = [Completion::default(); 8];
    assert_eq!(pair.hosts[0].adapter.poll_cq(cq, &mut out), Ok(2));
    assert_eq!([out[0].wr_id, out[1].wr_id], [3, 4]);
    assert_eq!(pair.hosts[0].adapter.poll_cq(cq, &mut out), Ok(0));
    assert_eq!(pair.hosts[0].adapter.query_qp(qps[0]).unwrap().attr.state, QpState::Rts);
}

#[test]
fn atomic_writes_store_eight_bytes_and_nothing_else() {
    for way in WAYS {
        let (mut pair, qps) = connected(way);
        let (here, there) = (pair.buffer(0, 64), pair.buffer(1, 64));
        here.fill(0, &[7; 8]);
        let (addr, rkey) = (there.addr() + 16, there.key());
        let op = SendOp::AtomicWrite { addr, rkey };
        pair.send(0, qps[0], 1, op, &[here.sge(0, 8)]);
        // Its bytes fit into the request though the queue pair has room for no inline data.
        let bytes = Payload::Inline(&[9; 8]);
        let op = SendOp::AtomicWrite { addr: addr + 8, rkey };
        pair.send_with(0, qps[0], 2, op, SendFlags::SIGNALED, bytes);
        pair.run();
        let done: Vec<_> =
            pair.hosts[0].poll().iter().map(|wc| (wc.wr_id, wc.status, wc.opcode)).collect();
        let good = |wr_id| (wr_id, WcStatus::Success, WcOpcode::AtomicWrite);
        assert_eq!(done, [good(1), good(2)], "{way:?}");
        assert_eq!(there.bytes(16, 16), [[7; 8], [9; 8]].concat(), "{way:?}");
        assert_eq!(there.bytes(32, 8), [0; 8]);
        assert!(pair.hosts[1].poll().is_empty());
    }
}

#[test]
fn atomic_writes_of_other_sizes_and_places_are_refused() {
    let (mut pair, qps) = connected(Way::Link);
    let here = pair.buffer(0, 64);
    let mut post = |addr, len| {
        let sges = [here.sge(0, len)];
        let payload = Payload::Sges(&sges);
        let op = SendOp::AtomicWrite { addr, rkey: 1 };
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: 1, op, flags, to: To::Peer, payload };
        pair.hosts[0].adapter.post_send(qps[0], &wr)
    };
    assert!(matches!(post(16, 7), Err(Fault::Invalid(_))));
    assert!(matches!(post(16, 16), Err(Fault::Invalid(_))));
    assert!(matches!(post(20, 8), Err(Fault::Invalid(_))));
    assert_eq!(post(16, 8), Ok(()));
    let now = pair.now;
    pair.hosts[0].adapter.ring_doorbell(now, qps[0]);
    pair.run();
    let done = pair.hosts[0].poll();
    assert_eq!(done[0].status, WcStatus::RemAccessErr, "the key is judged by the peer");
}

/// A program may post as long as there is room, and look for completions when there is none: the queue that
/// they come to, with room for all that can be posted, does not overrun.
#[test]
fn requests_keep_their_places_until_their_completions_are_taken() {
    for way in WAYS {
        let mut pair = Pair::new(way);
        let cqs = [0, 1].map(|host| pair.hosts[host].adapter.create_cq(4, None, 0).unwrap().0);
        let qps = [0, 1].map(|host| {
            pair.hosts[host].qp_with(|init| {
                (init.send_cq, init.recv_cq) = (cqs[host], cqs[host]);
                (init.cap.max_send_wr, init.cap.max_recv_wr) = (4, 4);
            })
        });
        pair.connect(qps);
        let wr = SendWr {
            wr_id: 1,
            to: To::Peer,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Inline(b"x"),
        };
        let to = pair.buffer(1, 8);
        let mut room = 4;
        for taken in [1, 3, 2, 4, 4] {
            let receives = (0..)
                .take_while(|_| {
                    let adapter = &mut pair.hosts[1].adapter;
                    adapter.post_recv(pair.now, qps[1], 1, &[to.sge(0, 8)]).is_ok()
                })
                .count();
            let mut sends = 0;
            while pair.hosts[0].adapter.check_send(qps[0], &wr, 0).is_ok() {
                assert_eq!(pair.hosts[0].adapter.post_send(qps[0], &wr), Ok(()), "{way:?}");
                pair.hosts[0].adapter.ring_doorbell(pair.now, qps[0]);
                pair.run();
                sends += 1;
            }
            assert_eq!((sends, receives), (room, room), "{way:?}");
            let more = pair.hosts[0].adapter.post_send(qps[0], &wr);
            assert_eq!(more, Err(Fault::QueueFull), "{way:?}");
            for (host, cq) in pair.hosts.iter_mut().zip(cqs) {
                let mut wcs = [Completion::default(); 4];
                assert_eq!(host.adapter.poll_cq(cq, &mut wcs[..taken]), Ok(taken), "{way:?}");
                assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{way:?}");
            }
            room = taken;
        }
    }
}
