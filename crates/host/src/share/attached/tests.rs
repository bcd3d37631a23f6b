//! A program's end of the rings, and one who plays the other.

use std::sync::atomic::Ordering;

use quipu_mem::ring::SlotHeader;
use quipu_nic::{Payload, SendFlags, SendOp, SendWr, Sge, To};

use super::*;
use crate::share::slots::Request;

/// All completions were taken.
const NONE: fn(CqId, QpNum) -> u32 = |_, _| 0;

/// A program's end with a connected queue pair, and the other end.
fn attached() -> (Attached, Channel, OwnedFd) {
    attached_in(&Segment::heap(crate::share::rings_len()))
}

fn attached_in(memory: &Segment) -> (Attached, Channel, OwnedFd) {
    let adapter = Channel::create(memory, 0, RINGS).unwrap();
    let [bell, theirs] = crate::share::pair().unwrap();
    let mut attached = Attached::new(memory, bell, Arc::new(Epoll::new().unwrap())).unwrap();
    let (max_send_wr, max_recv_wr, max_send_sge, max_recv_sge) = (64, 8192, 1, 1);
    let cap = QpCap { max_recv_wr, max_recv_sge, max_send_wr, max_send_sge, ..QpCap::default() };
    let cq = CqId(1);
    let (send_cq, recv_cq, qp_type) = (cq, cq, QpType::Tcp);
    let pd = quipu_nic::PdId(1);
    let init = QpInit { pd, send_cq, recv_cq, srq: None, cap, qp_type, sq_sig_all: false };
    assert!(attached.add_qp(QpId(5), QpNum(5), &init, cap));
    attached.set_state(QpId(5), QpState::Rts);
    attached.begin_connection(QpId(5), Mode::Stream);
    (attached, adapter, theirs)
}

fn hear(attached: &mut Attached, adapter: &mut Channel, news: News) -> (usize, bool) {
    slots::tell(&mut adapter.outgoing.requests, &news).unwrap();
    let mut landed = 0;
    attached.poll(|_| landed += 1);
    (landed, attached.lost)
}

#[test]
fn after_nonsense_nobody_looks_for_news_and_the_other_end_hears_of_it() {
    let (mut attached, mut adapter, bell) = attached();
    assert!(attached.arm() && crate::share::hear(&bell));
    let nonsense = SlotHeader { opcode: 99, ..SlotHeader::default() };
    adapter.outgoing.requests.push(&nonsense, &[]).unwrap();
    assert!(!attached.arm() && attached.poll(|_| {}) && attached.lost);
    // The slot is still there, and would keep every wait awake.
    assert!(!attached.has_news() && attached.arm() && !attached.poll(|_| {}));
    assert!(!crate::share::hear(&bell), "it has hung up");
    attached.posted = true;
    attached.ring();
}

#[test]
fn a_long_list_wakes_the_other_end_before_its_ring_is_full() {
    let (mut attached, adapter, bell) = attached();
    let rung = || crate::sys::receive(&bell, &mut [0; 8]).is_ok();
    let (half, id) = (RINGS.request_slots / 2, QpId(5));
    adapter.incoming.control.arm();
    for _ in 1..half {
        attached.post_recv(id, 1, &[], NONE).unwrap();
    }
    assert!(!rung());
    attached.post_recv(id, 1, &[], NONE).unwrap();
    assert!(rung());
}

/// The orders that the other end finds, up to so many: the numbers of requests, or the queue pairs to fail.
fn orders(adapter: &mut Channel, most: usize) -> Vec<Result<u32, u32>> {
    let mut found = Vec::new();
    let incoming = &mut adapter.incoming;
    for _ in 0..most {
        let (mut body, mut sges) = (slots::BODY, [Sge::default(); slots::MAX_SGE]);
        let (ring, bytes) = (&mut incoming.requests, &mut incoming.request_bytes);
        match slots::take(ring, bytes, &mut body, &mut sges).unwrap() {
            Some((Order::Post(request), count)) => {
                found.extend((0..count as u32).map(|at| Ok(request.tag.sequence.wrapping_add(at))));
            }
            Some((Order::Fail(qp), _)) => found.push(Err(qp)),
            None => break,
        }
    }
    incoming.publish();
    found
}

/// The numbers of requests, where nothing else is.
fn take(adapter: &mut Channel, most: usize) -> Vec<u32> {
    orders(adapter, most).into_iter().collect::<Result<_, _>>().unwrap()
}

/// Posts receives until some wait for room in the ring.
fn overflow(attached: &mut Attached) {
    while attached.overflow.is_empty() {
        attached.post_recv(QpId(5), 1, &[], NONE).unwrap();
    }
}

#[test]
fn what_waits_for_room_anew_asks_for_the_bell_anew() {
    let (mut attached, mut adapter, _bell) = attached();
    overflow(&mut attached);
    take(&mut adapter, 10);
    // Room is found before the bell has rung for it, and somebody sleeps for many completions.
    attached.poll(|_| ());
    assert!(attached.overflow.is_empty() && attached.arm_for(100, Time(7)));
    overflow(&mut attached);
    take(&mut adapter, usize::MAX);
    assert!(adapter.outgoing.control.must_ring_at(adapter.outgoing.requests.position()));
}

#[test]
fn that_a_queue_pair_fail_waits_for_room_behind_what_was_posted() {
    let (mut attached, mut adapter, _bell) = attached();
    let (cap, cq) = (QpCap::default(), CqId(2));
    let init = QpInit {
        pd: quipu_nic::PdId(1),
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        cap,
        qp_type: QpType::Tcp,
        sq_sig_all: false,
    };
    assert!(attached.add_qp(QpId(6), QpNum(6), &init, cap));
    for _ in 0..RINGS.request_slots {
        attached.post_recv(QpId(5), 1, &[], NONE).unwrap();
    }
    assert!(attached.overflow.is_empty());
    for _ in 0..2 {
        attached.fail_users_of(cq);
    }
    let end = attached.posted_end();
    assert!(!attached.has_taken(end));
    assert!(take(&mut adapter, usize::MAX).into_iter().eq(0..RINGS.request_slots));
    assert!(adapter.outgoing.control.must_ring_at(0));
    attached.poll(|_| ());
    assert!(attached.has_taken(end));
    assert_eq!(orders(&mut adapter, usize::MAX), [Err(6)]);
}

#[test]
fn a_queue_pair_is_made_once() {
    let (mut attached, mut adapter, _bell) = attached();
    overflow(&mut attached);
    let (cap, cq, qp_type) = (QpCap::default(), CqId(1), QpType::Tcp);
    let pd = quipu_nic::PdId(1);
    let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: false };
    // A number that is in use, and those that do not fit into a tag.
    for number in [5, 1 << 31, u64::from(u32::MAX) + 6, u64::MAX] {
        assert!(!attached.add_qp(QpId(number), QpNum(9), &init, cap), "{number}");
    }
    assert!(attached.add_qp(QpId((1 << 31) - 1), QpNum(9), &init, cap));
    // What waits is still known.
    take(&mut adapter, 10);
    attached.poll(|_| ());
    assert!(attached.overflow.is_empty());
}

#[test]
fn a_request_that_waits_for_room_cannot_be_done() {
    let (mut attached, mut adapter, _bell) = attached();
    overflow(&mut attached);
    let slots = RINGS.request_slots;
    let done = |sequence| {
        let wr_id = Tag { qp: 5, receive: true, sequence }.bits();
        News::Completion(Completion { wr_id, ..Completion::default() })
    };
    assert_eq!(hear(&mut attached, &mut adapter, done(slots - 1)), (1, false));
    take(&mut adapter, 1);
    attached.poll(|_| ());
    assert_eq!(hear(&mut attached, &mut adapter, done(slots)), (1, false));
    overflow(&mut attached);
    let (landed, lost) = hear(&mut attached, &mut adapter, done(slots + 1));
    // What is under way is flushed, and the connection is over.
    assert!(lost && landed == slots as usize + 1, "{landed}");
}

fn post_send(attached: &mut Attached, wr_id: u64, flags: SendFlags) {
    let (op, payload) = (SendOp::Send, Payload::Inline(&[]));
    attached.post_send(QpId(5), &SendWr { wr_id, to: To::Peer, op, flags, payload }, NONE).unwrap();
}

#[test]
fn what_is_posted_together_is_shown_together_and_a_long_list_in_parts() {
    let (mut attached, mut adapter, _bell) = attached();
    (0..3).for_each(|wr_id| post_send(&mut attached, wr_id, SendFlags::SIGNALED));
    assert!(take(&mut adapter, usize::MAX).is_empty());
    attached.ring();
    assert_eq!(take(&mut adapter, usize::MAX), [0, 1, 2]);
    (3..3 + SHOWN_TOGETHER).for_each(|wr_id| {
        assert!(take(&mut adapter, usize::MAX).is_empty());
        post_send(&mut attached, wr_id.into(), SendFlags::SIGNALED);
    });
    assert!(take(&mut adapter, usize::MAX).into_iter().eq(3..3 + SHOWN_TOGETHER));
}

#[test]
fn sends_that_are_done_together_complete_in_order_and_once() {
    let (mut attached, mut adapter, _bell) = attached();
    for wr_id in 10..16 {
        let asked = wr_id != 11;
        let flags = if asked { SendFlags::SIGNALED } else { SendFlags::empty() };
        post_send(&mut attached, wr_id, flags);
    }
    let mut found = Vec::new();
    let mut sent = |sequence, count| {
        let last = Tag { qp: 5, receive: false, sequence };
        slots::tell(&mut adapter.outgoing.requests, &News::Sent { last, count }).unwrap();
        found.clear();
        attached.poll(|landed| match landed {
            Landed::Completion(CqId(1), Completion { wr_id, qp_num: QpNum(5), .. }) => {
                found.push(wr_id);
            }
            other => panic!("{other:?}"),
        });
        (found.clone(), attached.lost)
    };
    assert_eq!(sent(2, 3), (vec![10, 12], false));
    // Again, and with such as were never posted.
    assert_eq!(sent(3, 4), (vec![13], false));
    assert_eq!(sent(70, 64), (vec![], false));
    assert_eq!(sent(5, 1), (vec![15], false));
    assert_eq!(sent(5, 64), (vec![14], false));
}

#[test]
fn a_send_that_waits_for_room_cannot_be_done_with_others() {
    let (mut attached, mut adapter, _bell) = attached();
    post_send(&mut attached, 1, SendFlags::SIGNALED);
    overflow(&mut attached);
    post_send(&mut attached, 2, SendFlags::SIGNALED);
    let last = Tag { qp: 5, receive: false, sequence: 1 };
    assert!(hear(&mut attached, &mut adapter, News::Sent { last, count: 2 }).1);
}

#[test]
fn nobody_sleeps_at_a_ring_that_is_broken() {
    // How many of the program's requests were taken, as the other end says.
    const CONSUMED: usize = 512;
    let memory = Segment::heap(crate::share::rings_len());
    let (mut attached, _adapter, _bell) = attached_in(&memory);
    overflow(&mut attached);
    memory.u32_at(CONSUMED).unwrap().store(RINGS.request_slots + 1, Ordering::Relaxed);
    assert!(!attached.arm() && !attached.arm_for(100, Time(7)));
    assert!(attached.poll(|_| ()) && attached.lost && attached.overflow.is_empty());
    assert!(attached.arm());
}

#[test]
fn a_queue_is_full_when_it_is_full_and_what_waits_for_the_ring_goes_on_in_order() {
    let (mut attached, mut adapter, theirs) = attached();
    let called = || crate::sys::receive(&theirs, &mut [0; 8]).is_ok();
    let (id, depth, slots) = (QpId(5), 8192, RINGS.request_slots as usize);
    for _ in 0..depth {
        attached.post_recv(id, 1, &[], NONE).unwrap();
    }
    let full = attached.post_recv(id, 1, &[], NONE).unwrap_err();
    assert!(matches!(full, EngineError::Fault(Fault::QueueFull)));
    assert!(attached.overflow.end() == 4096 && !attached.has_taken(1));
    let end = attached.posted_end();
    // Anyone who sleeps, for however many completions, is called when there is room, and calls in turn.
    adapter.incoming.control.arm();
    let mut taken = take(&mut adapter, 100);
    assert!(adapter.outgoing.control.must_ring_at(0) && !called());
    assert!(!attached.ready(|_| ()) && called());
    assert!(attached.arm_for(100, Time(7)) && attached.asleep_since.is_none());
    taken.extend(take(&mut adapter, 100));
    assert!(adapter.outgoing.control.must_ring_at(0) && attached.woken().is_none());
    // A sleep that finds room does not wait for the bell.
    adapter.incoming.control.arm();
    assert!(attached.arm() && called());
    while !attached.has_taken(end) {
        taken.extend(take(&mut adapter, slots / 4));
        attached.poll(|_| ());
    }
    taken.extend(take(&mut adapter, usize::MAX));
    assert!(taken.into_iter().eq(0..depth));
}

#[test]
fn what_waits_for_a_ring_that_is_broken_is_flushed() {
    let (mut attached, adapter, _bell) = attached();
    for _ in 0..=RINGS.request_slots {
        attached.post_recv(QpId(5), 1, &[], NONE).unwrap();
    }
    let mut flushed = 0;
    attached.lose(&mut |landed| flushed += u32::from(matches!(landed, Landed::Completion(..))));
    assert_eq!(flushed, RINGS.request_slots + 1);
    assert!(attached.has_taken(attached.posted_end()) && attached.overflow.is_empty());
    drop(adapter);
}

#[test]
fn octets_for_which_there_is_no_memory_are_not_believed() {
    let (mut attached, mut adapter, _bell) = attached();
    let received = |sequence, byte_len| {
        let wr_id = Tag { qp: 5, receive: true, sequence }.bits();
        News::Completion(Completion { wr_id, byte_len, ..Completion::default() })
    };
    for wr_id in [10, 11] {
        attached.post_recv(QpId(5), wr_id, &[Sge { len: 64, ..Sge::default() }], NONE).unwrap();
    }
    assert_eq!(hear(&mut attached, &mut adapter, received(0, 64)), (1, false));
    // The other receive and the connection are flushed.
    assert_eq!(hear(&mut attached, &mut adapter, received(1, 65)), (2, true));
}

#[test]
fn a_connection_ends_once() {
    let (mut attached, mut adapter, _bell) = attached();
    let state = QpState::Err;
    for change in [TcpChange::Connected, TcpChange::PeerClosed, TcpChange::Closed] {
        let news = News::Change { qp: 5, change, state };
        assert_eq!(hear(&mut attached, &mut adapter, news), (1, false));
    }
    let more = News::Change { qp: 5, change: TcpChange::PeerClosed, state };
    assert_eq!(hear(&mut attached, &mut adapter, more), (0, true));
}

/// An attempt may be refused, and the next made, before the program has heard of it.
#[test]
fn events_of_an_earlier_connection_are_not_those_of_the_next() {
    let (mut attached, mut adapter, _bell) = attached();
    let failed = TcpChange::Failed(quipu_inet::tcp::Failure::Refused);
    let news = News::Change { qp: 5, change: failed, state: QpState::Rtr };
    attached.begin_connection(QpId(5), Mode::Message);
    assert_eq!(hear(&mut attached, &mut adapter, news), (1, false));
    assert!(attached.qps[&5].open, "the other attempt goes on");
    for change in [TcpChange::Connected, TcpChange::PeerClosed, TcpChange::Closed] {
        let state = if change == TcpChange::Closed { QpState::Err } else { QpState::Rts };
        let news = News::Change { qp: 5, change, state };
        assert_eq!(hear(&mut attached, &mut adapter, news), (1, false), "{change:?}");
    }
    // One that is refused at once brings no event.
    let before = attached.begin_connection(QpId(5), Mode::Stream);
    attached.refuse_connection(QpId(5), before);
    assert!(!attached.qps[&5].open && attached.qps[&5].mode == Mode::Message);
    assert!((0..3).any(|_| hear(&mut attached, &mut adapter, news).1), "without end");
}

#[test]
fn what_a_service_does_not_carry_is_refused_at_once() {
    let (mut attached, _adapter, _bell) = attached();
    let empty = |attached: &mut Attached, to| {
        let (op, flags, payload) = (SendOp::Send, SendFlags::SIGNALED, Payload::Inline(&[]));
        attached.post_send(QpId(5), &SendWr { wr_id: 1, to, op, flags, payload }, NONE)
    };
    assert!(empty(&mut attached, To::Peer).is_ok(), "of a stream");
    attached.begin_connection(QpId(5), Mode::Message);
    let refused = empty(&mut attached, To::Peer).unwrap_err();
    assert!(matches!(refused, EngineError::Fault(Fault::Invalid(_))), "{refused}");
    attached.qps.get_mut(&5).unwrap().qp_type = QpType::Udp;
    let refused = empty(&mut attached, To::Address("[::1]:0".parse().unwrap())).unwrap_err();
    assert!(matches!(refused, EngineError::Fault(Fault::Invalid(_))), "{refused}");
    assert!(empty(&mut attached, To::Address("[::1]:7".parse().unwrap())).is_ok());
}

#[test]
fn whoever_has_waited_for_room_is_told_of_it() {
    let (mut attached, mut adapter, theirs) = attached();
    let tag = Tag { qp: 9, receive: true, sequence: 0 }.bits();
    let news = News::Completion(Completion { wr_id: tag, ..Completion::default() });
    let take_all = |attached: &mut Attached| while attached.poll(|_| ()) {};
    let rung = |theirs: &OwnedFd| crate::sys::receive(theirs, &mut [0; 8]).is_ok();
    // Few at a time: nobody has waited.
    for _ in 0..RINGS.request_slots {
        slots::tell(&mut adapter.outgoing.requests, &news).unwrap();
        adapter.incoming.control.arm();
        take_all(&mut attached);
        attached.ring();
    }
    assert!(!rung(&theirs));
    while slots::tell(&mut adapter.outgoing.requests, &news).is_ok() {}
    adapter.incoming.control.arm();
    take_all(&mut attached);
    attached.ring();
    assert!(rung(&theirs));
    assert_eq!(adapter.outgoing.requests.free(), Ok(RINGS.request_slots));
}

#[test]
fn a_sleep_for_a_batch_ends_with_it() {
    let (mut attached, mut adapter, _bell) = attached();
    let tag = Tag { qp: 9, receive: true, sequence: 0 }.bits();
    let news = News::Completion(Completion { wr_id: tag, ..Completion::default() });
    let tell = |adapter: &mut Channel| {
        slots::tell(&mut adapter.outgoing.requests, &news).unwrap();
        adapter.outgoing.control.must_ring_at(adapter.outgoing.requests.position())
    };
    for _ in 0..3 {
        assert!(attached.arm_for(3, Time(7)));
        assert!(!tell(&mut adapter));
        // What is there already has to be taken before a sleep.
        assert!(!attached.arm_for(3, Time(7)) && !attached.arm());
        assert!(attached.poll(|_| ()) && attached.arm_for(2, Time(8)));
        assert_eq!([(); 3].map(|()| tell(&mut adapter)), [false, true, false]);
        assert_eq!((attached.woken(), attached.is_flowing()), (Some(Time(8)), true));
        assert!(attached.poll(|_| ()) && attached.arm_for(3, Time(9)));
        // Nothing came: the next sleep is not for many.
        assert_eq!((attached.woken(), attached.is_flowing()), (Some(Time(9)), false));
        assert_eq!(attached.woken(), None);
    }
}

#[test]
fn receives_that_are_done_together_complete_in_order_and_with_their_octets() {
    let (mut attached, mut adapter, _bell) = attached();
    for wr_id in 10..16 {
        attached.post_recv(QpId(5), wr_id, &[Sge { len: 64, ..Sge::default() }], NONE).unwrap();
    }
    let mut received = |sequence, first: &[u32]| {
        let last = Tag { qp: 5, receive: true, sequence };
        let mut lengths = [0; slots::MAX_RECEIVED];
        lengths[..first.len()].copy_from_slice(first);
        let news = News::Received { last, count: first.len() as u32, lengths };
        slots::tell(&mut adapter.outgoing.requests, &news).unwrap();
        let mut found = Vec::new();
        attached.poll(|landed| {
            if let Landed::Completion(CqId(1), done) = landed {
                found.push((done.wr_id, done.byte_len));
            }
        });
        (found, attached.lost)
    };
    assert_eq!(received(2, &[64, 0, 7]), (vec![(10, 64), (11, 0), (12, 7)], false));
    // One that is done already, then more octets than there is room for.
    assert_eq!(received(3, &[8, 9]), (vec![(13, 9)], false));
    let (flushed, lost) = received(5, &[64, 65]);
    assert!(lost && flushed == [(14, 64), (15, 0)], "{flushed:?}");
}

#[test]
fn a_sleep_for_a_batch_ends_with_as_many_completions_in_however_many_slots() {
    let (mut attached, mut adapter, _bell) = attached();
    let mut told = 0;
    let mut tell = |adapter: &mut Channel, count| {
        let last = Tag { qp: 9, receive: false, sequence: 100 };
        let mut teller = slots::Teller::new(&mut adapter.outgoing.requests, &mut told);
        teller.put(&News::Sent { last, count });
        teller.finish().unwrap();
        adapter.outgoing.control.must_ring_at(told)
    };
    assert!(attached.arm_for(100, Time(7)));
    assert_eq!([60, 39].map(|count| tell(&mut adapter, count)), [false; 2]);
    assert!(tell(&mut adapter, 1) && attached.woken().is_some());
    assert!(attached.poll(|_| ()) && attached.arm_for(3, Time(8)));
    assert!(!tell(&mut adapter, 2) && tell(&mut adapter, 2));
}

#[test]
fn requests_of_one_piece_that_follow_each_other_share_slots() {
    let (mut attached, mut adapter, _bell) = attached();
    let piece = |addr| [Sge { addr, len: 8, ..Sge::default() }];
    let mut next = 0;
    let mut send = |attached: &mut Attached, flags| {
        let sges = piece(next);
        next += 1;
        let (op, payload) = (SendOp::Send, Payload::Sges(&sges));
        let wr = SendWr { wr_id: 0, to: To::Peer, op, flags, payload };
        attached.post_send(QpId(5), &wr, NONE).unwrap();
    };
    // More than a slot holds, another flag, another queue, several pieces' worth of none, another again.
    (0..8).for_each(|_| send(&mut attached, SendFlags::empty()));
    (0..2).for_each(|_| send(&mut attached, SendFlags::SIGNALED));
    (0..3).for_each(|_| attached.post_recv(QpId(5), 1, &piece(7), NONE).unwrap());
    attached.post_recv(QpId(5), 1, &[], NONE).unwrap();
    send(&mut attached, SendFlags::SIGNALED);
    attached.ring();
    let (mut found, incoming) = (Vec::new(), &mut adapter.incoming);
    let (mut body, mut sges) = (slots::BODY, [Sge::default(); slots::MAX_SGE]);
    let (ring, bytes) = (&mut incoming.requests, &mut incoming.request_bytes);
    while let Some((order, count)) = slots::take(ring, bytes, &mut body, &mut sges).unwrap() {
        let Order::Post(Request { tag, flags, payload: Payload::Sges(sges), .. }) = order else {
            panic!("an order of another kind")
        };
        let first = sges.first().map(|it| it.addr);
        found.push((tag.receive, tag.sequence, flags.bits(), count, sges.len(), first));
    }
    let signaled = SendFlags::SIGNALED.bits();
    let expected = [
        (false, 0, 0, 6, 6, Some(0)),
        (false, 6, 0, 2, 2, Some(6)),
        (false, 8, signaled, 2, 2, Some(8)),
        (true, 0, 0, 3, 3, Some(7)),
        (true, 3, 0, 1, 0, None),
        (false, 10, signaled, 1, 1, Some(10)),
    ];
    assert_eq!(found, expected);
}

#[test]
fn that_a_queue_pair_fail_is_behind_requests_whose_slot_has_room() {
    let (mut attached, mut adapter, _bell) = attached();
    (0..2).for_each(|_| attached.post_recv(QpId(5), 1, &[Sge::default()], NONE).unwrap());
    attached.fail_users_of(CqId(1));
    attached.ring();
    assert_eq!(orders(&mut adapter, usize::MAX), [Ok(0), Ok(1), Err(5)]);
}
