//! Tests of what polls give back that look at memory only: what they find there, and what they hand out past
//! the completion queue, is a completion like any other to the program, and progress to the engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu_mem::{Access, Segment, Sge};
use quipu_nic::{
    Completion, CqId, Gid, Payload, PdId, QpAttr, QpAttrMask, QpCap, QpId, QpInit, QpNum, QpType,
    SendFlags, SendOp, SendWr, To,
};

use crate::counters::Calls;
use crate::engine::tests::connect;
use crate::engine::{Core, Engine};
use crate::lock::Guard;

/// Nothing here takes that long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// One of two that talk through shared memory. Its receives are numbered from 1 on.
struct End {
    engine: Arc<Engine>,
    sends: CqId,
    receives: CqId,
    pd: PdId,
    qp: QpId,
    num: QpNum,
}

impl End {
    fn new() -> Self {
        let engine = crate::engine::tests::idle();
        let (context, _) = engine.open_context().unwrap();
        let pd = engine.alloc_pd().unwrap();
        let [sends, receives] = [0; 2].map(|_| engine.create_cq(context, 64, None, 0).unwrap().0);
        let cap = QpCap { max_send_wr: 16, max_recv_wr: 16, ..QpCap::default() };
        let (qp_type, sq_sig_all, srq) = (QpType::Rc, true, None);
        let init = QpInit { pd, send_cq: sends, recv_cq: receives, srq, cap, qp_type, sq_sig_all };
        let (qp, num, _) = engine.create_qp(context, &init).unwrap();
        Self { engine, sends, receives, pd, qp, num }
    }

    fn connect(&self, gid: Gid, num: QpNum) {
        connect(&self.engine, self.qp, gid, num);
        (1..=12).for_each(|wr_id| self.engine.post_recv(self.qp, wr_id, &[]).unwrap());
    }

    fn send(&self) -> SendWr<'static> {
        let (flags, payload) = (SendFlags::empty(), Payload::Sges(&[]));
        SendWr { wr_id: 77, to: To::Peer, op: SendOp::Send, flags, payload }
    }

    /// Polls by calls of the library until something is there.
    fn poll(&self, cq: CqId) -> u64 {
        let end = Instant::now() + PATIENCE;
        let mut found = None;
        while self.engine.poll_cq_each(cq, 1, |wc| found = Some(wc.wr_id)).unwrap() == 0 {
            assert!(Instant::now() < end, "nothing comes");
        }
        found.expect("one was counted")
    }
}

/// An end whose engine nobody else moves on.
struct Held<'a> {
    end: &'a End,
    core: Guard<'a, Core>,
}

impl<'a> Held<'a> {
    fn new(end: &'a End) -> Self {
        let mut core = end.engine.inner.core.lock();
        core.stop_waiting();
        Self { end, core }
    }

    fn post(&mut self) {
        let now = self.core.now();
        self.core.adapter.post_send(self.end.qp, &self.end.send()).unwrap();
        self.core.adapter.ring_doorbell(now, self.end.qp);
    }

    /// Takes what has completed, until nothing is left to be done and polls are known to need no more than a
    /// look at memory.
    fn rest(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            let idle = self.core.poll() > 0;
            for cq in [self.end.receives, self.end.sends] {
                self.queued(cq);
            }
            let vain = self.glance(self.end.receives, 1) == (Some(0), vec![]);
            if idle && vain && self.core.calm > 8 {
                return;
            }
            assert!(Instant::now() < end, "there is always something");
        }
    }

    /// What a poll by a glance says and hands out.
    fn glance(&mut self, cq: CqId, max: usize) -> (Option<usize>, Vec<u64>) {
        let mut taken = Vec::new();
        let spared = &self.end.engine.inner.spared;
        (self.core.glance(cq, max, spared, |wc| taken.push(wc.wr_id)), taken)
    }

    /// What is in a queue, without a look for more.
    fn queued(&mut self, cq: CqId) -> Vec<u64> {
        let mut queued = Vec::new();
        self.core.adapter.poll_cq_each(cq, 64, |wc| queued.push(wc.wr_id)).unwrap();
        queued
    }

    /// How many polls there were, how many of them without result, and how many made progress.
    fn counted(&self) -> [u64; 3] {
        let Calls { polls, empty_polls, rounds, .. } = self.core.calls;
        [polls, empty_polls, rounds]
    }

    /// The same, since there were `before`.
    fn counted_since(&self, before: [u64; 3]) -> [u64; 3] {
        let now = self.counted();
        [0, 1, 2].map(|index| now[index] - before[index])
    }
}

/// Two that have met, by the first receive of each.
fn met() -> (End, End) {
    let (a, b) = (End::new(), End::new());
    a.connect(b.engine.gid(), b.num);
    b.connect(a.engine.gid(), a.num);
    for (from, to) in [(&a, &b), (&b, &a)] {
        from.engine.post_send(from.qp, &from.send()).unwrap();
        assert_eq!((to.poll(to.receives), from.poll(from.sends)), (1, 77));
    }
    (a, b)
}

#[test]
fn what_is_found_and_what_is_handed_out_are_polls_that_made_progress() {
    let (a, b) = met();
    let (mut a, mut b) = (Held::new(&a), Held::new(&b));
    a.post();
    b.rest();
    a.rest();
    // Both have been polled since the last message, which went through the queue, and are watched closely.
    a.post();
    let (before, calm) = (b.counted(), b.core.calm);
    assert_eq!(b.glance(b.end.receives, 1), (Some(1), vec![3]), "it is no answer, but it is there");
    assert_eq!(b.counted_since(before), [1, 0, 1]);
    assert_eq!((b.core.calm, b.core.empty_polls), (calm - 1, 0));

    b.post();
    let completions = |held: &Held<'_>| held.core.adapter.counters().completions;
    let (before, calm, done) = (a.counted(), a.core.calm, completions(&a));
    assert_eq!(a.glance(a.end.receives, 0), (None, vec![]), "nothing is taken where nothing fits");
    assert_eq!(a.counted_since(before), [0; 3]);
    assert_eq!(a.glance(a.end.receives, 5), (Some(1), vec![2]));
    assert_eq!(a.counted_since(before), [1, 0, 1]);
    assert_eq!((a.core.calm, a.core.empty_polls), (calm - 1, 0));
    assert_eq!(a.queued(a.end.receives), [0; 0], "it is in no queue");
    a.core.adapter.settle_taken();
    assert_eq!(a.queued(a.end.sends), [77], "what it answers is done");
    assert_eq!(completions(&a) - done, 2);

    let before = a.counted();
    assert_eq!(a.glance(a.end.sends, 1).1, [0; 0]);
    a.rest();
    let [polls, vain, rounds] = a.counted_since(before);
    assert_eq!((polls, rounds), (vain, 0), "nothing came meanwhile");
}

/// What was served for the poll of another queue has come to its own, where a poll takes it.
#[test]
fn a_poll_of_another_queue_finds_nothing_and_made_progress() {
    let (a, b) = met();
    let (mut a, mut b) = (Held::new(&a), Held::new(&b));
    a.post();
    b.rest();
    a.rest();
    a.post();
    let before = b.counted();
    assert_eq!(b.glance(b.end.sends, 1), (Some(0), vec![]));
    assert_eq!((b.counted_since(before), b.core.empty_polls), ([1, 0, 1], 0));
    assert_eq!(b.glance(b.end.receives, 1), (None, vec![]), "one looks into the queue");
    assert_eq!(b.queued(b.end.receives), [3]);
}

/// Through the calls of the library every message of a conversation comes once, in order, and every poll is
/// counted, whoever serves it: a poll or the helper, past the queue or out of it.
#[test]
fn a_conversation_loses_and_doubles_nothing() {
    const ROUNDS: u64 = 2000;
    let (a, b) = met();
    let polls = || a.engine.polls() + b.engine.polls();
    let (before, mut polled) = (polls(), 0);
    let mut next = [2, 2];
    for round in 0..ROUNDS {
        for (side, from, to) in [(1, &a, &b), (0, &b, &a)] {
            from.engine.post_send(from.qp, &from.send()).unwrap();
            let end = Instant::now() + PATIENCE;
            let mut found = Vec::new();
            while found.is_empty() {
                let taker = |wc: &Completion| found.push(wc.wr_id);
                let (count, moved) = to.engine.poll_cq_and_move(to.receives, 2, taker).unwrap();
                polled += 1;
                assert_eq!(count, found.len(), "round {round}");
                assert!(moved || count == 0, "a completion is progress");
                assert!(Instant::now() < end, "nothing comes");
            }
            assert_eq!(found, [next[side]], "round {round}");
            next[side] += 1;
            to.engine.post_recv(to.qp, next[side] + 10, &[]).unwrap();
            // What it answers is done.
            let answered = usize::from(side == 0 || round > 0);
            let done = to.engine.poll_cq_each(to.sends, 4, |_| {}).unwrap();
            assert_eq!(done, answered, "round {round}");
            polled += 1;
        }
    }
    assert_eq!(polls() - before, polled);
}

/// A program that looks is offered small writes before the kernel executes them, though its process lists
/// what it shares. It shows by the bell, which nothing rings that goes directly.
#[test]
fn small_writes_are_offered_to_a_program_that_looks() {
    let (a, b) = met();
    let (from, to) = (Segment::heap(128), Segment::heap(128));
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let grants = QpAttr { access, ..QpAttr::default() };
    b.engine.modify_qp(b.qp, &grants, QpAttrMask::ACCESS_FLAGS).unwrap();
    let here = a.engine.reg_segment(a.pd, &from, None, access).unwrap();
    let there = b.engine.reg_segment(b.pd, &to, None, access).unwrap();
    let write = |len| {
        let list = [Sge { addr: from.addr() as u64, len, lkey: here.key }];
        let op = SendOp::Write { addr: to.addr() as u64, rkey: there.key.0 };
        let payload = Payload::Sges(&list);
        let wr = SendWr { wr_id: 5, to: To::Peer, op, flags: SendFlags::empty(), payload };
        a.engine.post_send(a.qp, &wr).unwrap();
        assert_eq!(a.poll(a.sends), 5);
    };
    let mut b = Held::new(&b);
    let end = Instant::now() + PATIENCE;
    // To wait is to look at nothing that does not ring.
    while b.core.run() || b.core.prepare_wait().is_none() {
        assert!(Instant::now() < end, "there is always something");
    }
    b.core.stop_waiting();
    for (len, rung) in [(128, 0), (8, usize::from(crate::sys::processors_online() > 1))] {
        write(len);
        b.core.poll();
        assert_eq!(b.core.adapter.hot_channels(), rung, "{len} octets");
    }
    let writes: u64 = b.core.adapter.queue_pairs().map(|qp| qp.counters.responder.writes).sum();
    assert_eq!(writes, 0, "what is not taken goes directly");
}
