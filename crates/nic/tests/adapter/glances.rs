//! The quickest look of a poll: when it is known to be in vain, and when it hands out what has come without a
//! stay in the completion queue.

use std::cell::Cell;

use crate::pair::{Buffer, Host, Pair, Way, connected, statuses};
use quipu_nic::*;

/// Two connected sides that have met, each with receives from 10 on, whose sends complete in a queue of their
/// own.
pub(crate) struct Met {
    pub(crate) pair: Pair,
    pub(crate) qps: [QpId; 2],
    buffers: [Buffer; 2],
    /// Where receives complete.
    pub(crate) cqs: [CqId; 2],
    /// Where host 0 has them from, if not from its queue pair.
    srq: Option<SrqId>,
}

impl Met {
    fn new() -> Self {
        Self::with(Way::Link, false)
    }

    fn with(way: Way, shares: bool) -> Self {
        Self::of(Pair::new(way), shares)
    }

    pub(crate) fn of(mut pair: Pair, shares: bool) -> Self {
        let Host { adapter, pd, .. } = &mut pair.hosts[0];
        let srq = shares.then(|| adapter.create_srq(*pd, 16, 1, 0).unwrap());
        let cqs = [0, 1].map(|host| {
            let adapter = &mut pair.hosts[host].adapter;
            adapter.create_cq(64, Some(ChannelId(2)), 0).unwrap().0
        });
        let srqs = [srq, None];
        let qps = [0, 1].map(|host| {
            let change = |init: &mut QpInit| (init.recv_cq, init.srq) = (cqs[host], srqs[host]);
            pair.hosts[host].qp_with(change)
        });
        pair.connect(qps);
        let buffers = [pair.buffer(0, 64), pair.buffer(1, 64)];
        let mut met = Self { pair, qps, buffers, cqs, srq };
        for host in 0..2 {
            met.receives(host, 0..1);
        }
        for host in 0..2 {
            met.send(host, 0, b"meeting!");
            met.pair.run();
        }
        for host in 0..2 {
            assert_eq!(met.received(host), [0]);
            assert_eq!(met.pair.polled(host), [(0, WcStatus::Success)]);
            met.receives(host, 10..18);
        }
        met
    }

    /// The same, where host 1 was asked something by request 1, and has answered it by request 2.
    fn answered() -> Self {
        let mut met = Self::new();
        met.asked();
        met.send(1, 2, b"answered");
        met
    }

    /// Host 1 is asked something by request 1, and has not answered yet.
    pub(crate) fn asked(&mut self) {
        self.send(0, 1, b"question");
        let answers_nothing = Glance::Found(self.qps[1]);
        assert_eq!(self.glance(1), (answers_nothing, None));
        let now = self.pair.now;
        assert!(self.pair.hosts[1].adapter.serve(now, self.qps[1]));
        assert_eq!(self.received(1), [10]);
    }

    /// Host 0 asks, and waits without result before host 1 has looked.
    fn asks_again(&mut self) {
        self.send(0, 1, b"question");
        assert_eq!(self.glance(0).1, None);
        self.look(1);
    }

    fn receives(&mut self, host: usize, wr_ids: std::ops::Range<u64>) {
        for wr_id in wr_ids {
            let sges = [self.buffers[host].sge(32, 8)];
            match self.srq.filter(|_| host == 0) {
                Some(srq) => self.pair.hosts[0]
                    .adapter
                    .post_srq_recv(self.pair.now, srq, wr_id, &sges)
                    .unwrap(),
                None => self.pair.recv(host, self.qps[host], wr_id, &sges),
            }
        }
    }

    pub(crate) fn send(&mut self, host: usize, wr_id: u64, bytes: &[u8; 8]) {
        self.send_as(host, wr_id, SendOp::Send, SendFlags::empty(), bytes);
    }

    fn send_as(&mut self, host: usize, wr_id: u64, op: SendOp, flags: SendFlags, bytes: &[u8; 8]) {
        let flags = flags | SendFlags::SIGNALED;
        self.pair.send_with(host, self.qps[host], wr_id, op, flags, Payload::Inline(bytes));
    }

    /// The events of host 0 that were not asked for yet.
    fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.pair.hosts[0].adapter.poll_event()).collect()
    }

    fn look(&mut self, host: usize) {
        self.pair.hosts[host].adapter.progress(self.pair.now);
    }

    /// Has `host` do all that is to be done now.
    pub(crate) fn rest(&mut self, host: usize) {
        self.look(host);
        self.pair.hosts[host].adapter.release_acks();
    }

    /// What completes among the receives of `host`, without a look for more.
    pub(crate) fn received(&mut self, host: usize) -> Vec<u64> {
        let mut out = [Completion::default(); 16];
        let adapter = &mut self.pair.hosts[host].adapter;
        let count = adapter.poll_cq(self.cqs[host], &mut out).unwrap();
        out[..count].iter().map(|wc| wc.wr_id).collect()
    }

    pub(crate) fn glance(&mut self, host: usize) -> (Glance, Option<Completion>) {
        let found = Cell::new(None);
        let adapter = &mut self.pair.hosts[host].adapter;
        let glance = adapter.glance(self.pair.now, self.cqs[host], |wc| found.set(Some(*wc)));
        (glance, found.take())
    }

    /// Whether an event tells of completions among the receives of host 0.
    fn tells_of_completions(&mut self) -> bool {
        let cq = self.cqs[0];
        self.events().iter().any(|it| matches!(it, Event::Completion { cq: of, .. } if *of == cq))
    }

    fn is_vain(&mut self, host: usize) -> bool {
        let (glance, found) = self.glance(host);
        assert_eq!(found, None);
        glance == Glance::Vain
    }
}

#[test]
fn a_poll_is_in_vain_only_while_there_is_nothing_to_do() {
    let mut met = Met::new();
    for host in 0..2 {
        met.rest(host);
        assert!(met.is_vain(host));
    }
    met.send(0, 1, b"question");
    assert!(met.is_vain(0), "the peer has not looked");
    assert!(!met.is_vain(1), "a message came");
    met.look(1);
    assert!(!met.is_vain(1), "a completion is there");
    assert_eq!(met.received(1), [10]);
    assert!(!met.is_vain(1), "an acknowledgement is owed");
    assert!(met.is_vain(0));
    met.pair.hosts[1].adapter.release_acks();
    assert!(met.is_vain(1));
    assert!(!met.is_vain(0), "it is acknowledged");
    met.look(0);
    assert_eq!(met.pair.polled(0), [(1, WcStatus::Success)]);
    assert!(met.is_vain(0));
}

#[test]
fn a_poll_of_no_queue_is_not_in_vain() {
    let mut met = Met::new();
    for host in 0..2 {
        met.rest(host);
    }
    let (cq, _) = met.pair.hosts[0].adapter.create_cq(1, None, 0).unwrap();
    met.cqs[0] = cq;
    assert!(met.is_vain(0));
    met.pair.hosts[0].adapter.destroy_cq(cq).unwrap();
    assert!(!met.is_vain(0));
}

#[test]
fn an_answer_is_handed_out() {
    let mut met = Met::answered();
    let (glance, found) = met.glance(0);
    assert_eq!(glance, Glance::Taken);
    let number = |host: usize| met.pair.hosts[host].adapter.query_qp(met.qps[host]).unwrap().num;
    let (qp_num, src_qp) = (number(0), number(1));
    let expected = Completion {
        wr_id: 10,
        status: WcStatus::Success,
        opcode: WcOpcode::Recv,
        byte_len: 8,
        qp_num,
        src_qp,
        ..Completion::default()
    };
    assert_eq!(found, Some(expected));
    assert_eq!(met.buffers[0].bytes(32, 8), b"answered");
    assert_eq!(met.received(0), [0; 0], "it is in no queue");
    // It is owed an acknowledgement like any other.
    assert!(met.pair.hosts[0].adapter.owes_acks());
    assert_eq!(met.pair.polled(0), [], "the program has its answer first");
    met.pair.hosts[0].adapter.settle_taken();
    assert_eq!(met.pair.polled(0), [(1, WcStatus::Success)], "what it answers is done");
    assert!(met.pair.hosts[0].adapter.owes_acks());
    met.pair.hosts[0].adapter.release_acks();
    met.look(1);
    assert_eq!(met.pair.polled(1), [(2, WcStatus::Success)]);
}

#[test]
fn what_an_answer_says_is_heeded_behind_the_next_message_or_look() {
    for posts in [true, false] {
        let mut met = Met::answered();
        assert_eq!(met.glance(0).0, Glance::Taken);
        if posts {
            met.send(0, 2, b"question");
        } else {
            assert_eq!(met.glance(0), (Glance::Unsure, None), "an acknowledgement is owed");
        }
        assert_eq!(met.pair.polled(0), [(1, WcStatus::Success)]);
        assert_eq!(met.pair.hosts[0].adapter.owes_acks(), !posts, "it went with the message");
    }
}

#[test]
fn what_an_answer_completes_makes_room() {
    let mut met = Met::answered();
    assert_eq!(met.glance(0).0, Glance::Taken);
    met.rest(0);
    assert_eq!(met.pair.polled(0).len(), 1);
    // Without completions, whose requests would keep their places until they are taken.
    let wr = |wr_id| SendWr {
        wr_id,
        to: To::Peer,
        op: SendOp::Send,
        flags: SendFlags::empty(),
        payload: Payload::Inline(b"answered"),
    };
    let adapter = &mut met.pair.hosts[0].adapter;
    let posted =
        (2..).take_while(|&wr_id| adapter.post_send(met.qps[0], &wr(wr_id)).is_ok()).count();
    assert!(posted > 0);
    adapter.ring_doorbell(met.pair.now, met.qps[0]);
    met.look(1);
    met.send(1, 3, b"and more");
    assert_eq!(met.glance(0).0, Glance::Taken);
    met.pair.hosts[0].adapter.post_send(met.qps[0], &wr(99)).unwrap();
}

#[test]
fn conversations_go_on_by_glances_alone() {
    let mut met = Met::answered();
    for round in 0..7 {
        let asked = round % 2;
        assert_eq!(met.glance(asked).0, Glance::Taken, "round {round}");
        met.send(asked, 3, b"and now?");
        assert_eq!(met.glance(asked).1, None, "it waits");
    }
    for host in 0..2 {
        met.pair.run();
        assert!(met.pair.polled(host).iter().all(|&(_, status)| status == WcStatus::Success));
    }
}

#[test]
fn nothing_is_handed_out_past_what_stands_in_the_queue() {
    let mut met = Met::answered();
    met.send(1, 3, b"and more");
    met.look(0);
    assert_eq!(met.glance(0), (Glance::Unsure, None));
    met.look(0);
    assert_eq!(met.received(0), [10, 11]);
}

#[test]
fn nor_from_a_queue_that_is_to_raise_an_event() {
    let mut met = Met::answered();
    met.pair.hosts[0].adapter.req_notify_cq(met.pair.now, met.cqs[0], false).unwrap();
    assert_eq!(met.glance(0), (Glance::Found(met.qps[0]), None));
    met.look(0);
    assert!(met.tells_of_completions());
    assert_eq!(met.received(0), [10]);
}

/// Of a queue that is to tell of solicited completions only, too: others go into it quietly.
#[test]
fn nor_from_one_that_is_to_raise_an_event_for_solicited_completions() {
    for solicited in [false, true] {
        let mut met = Met::new();
        met.asked();
        met.pair.hosts[0].adapter.req_notify_cq(met.pair.now, met.cqs[0], true).unwrap();
        let flags = if solicited { SendFlags::SOLICITED } else { SendFlags::empty() };
        met.send_as(1, 2, SendOp::Send, flags, b"answered");
        assert_eq!(met.glance(0), (Glance::Found(met.qps[0]), None));
        met.look(0);
        assert_eq!(met.tells_of_completions(), solicited);
        assert_eq!(met.received(0), [10]);
    }
}

/// What was handed out is no completion that a program was not told of: an event that it asks for afterwards
/// comes with the next.
#[test]
fn a_solicited_answer_that_is_handed_out_raises_no_event_later() {
    let mut met = Met::new();
    met.asked();
    met.send_as(1, 2, SendOp::Send, SendFlags::SOLICITED, b"answered");
    assert_eq!(met.glance(0).0, Glance::Taken);
    met.pair.hosts[0].adapter.req_notify_cq(met.pair.now, met.cqs[0], true).unwrap();
    assert!(!met.tells_of_completions());
    for (flags, tells) in [(SendFlags::empty(), false), (SendFlags::SOLICITED, true)] {
        met.send_as(1, 3, SendOp::Send, flags, b"and more");
        met.look(0);
        assert_eq!(met.tells_of_completions(), tells);
    }
    assert_eq!(met.received(0), [11, 12]);
}

#[test]
fn immediate_data_is_handed_out_with_its_answer() {
    let mut met = Met::new();
    met.asked();
    met.send_as(1, 2, SendOp::SendImm(0xabcd_1234), SendFlags::empty(), b"answered");
    let (Glance::Taken, Some(completion)) = met.glance(0) else { panic!("it is an answer") };
    assert_eq!((completion.wr_id, completion.byte_len), (10, 8));
    assert_eq!(completion.extra, WcExtra::Imm(0xabcd_1234));
    assert_eq!(met.buffers[0].bytes(32, 8), b"answered");
}

/// A Write with immediate data takes a receive, too, whose bytes are elsewhere.
#[test]
fn nothing_but_sends_is_handed_out() {
    let there = |met: &Met| (met.buffers[0].addr(), met.buffers[0].key());
    let ops: [fn((u64, u32)) -> SendOp; 2] =
        [|(addr, rkey)| SendOp::WriteImm { addr, rkey, imm: 5 }, |(_, rkey)| SendOp::SendInv(rkey)];
    for op in ops {
        let mut met = Met::with(Way::LinkCopying, false);
        met.asked();
        let op = op(there(&met));
        met.send_as(1, 2, op, SendFlags::empty(), b"answered");
        assert_eq!(met.glance(0), (Glance::Found(met.qps[0]), None), "{op:?}");
    }
}

/// The event comes once, with the answer that leaves too few.
#[test]
fn an_answer_from_a_shared_queue_raises_the_event_of_its_limit() {
    let mut met = Met::with(Way::Link, true);
    let srq = met.srq.expect("it has one");
    met.asked();
    // Eight are posted.
    met.pair.hosts[0].adapter.modify_srq(srq, None, Some(7)).unwrap();
    met.events();
    for round in 0..3 {
        met.send(1, 2, b"answered");
        let (Glance::Taken, Some(completion)) = met.glance(0) else { panic!("it is an answer") };
        assert_eq!((completion.wr_id, completion.byte_len), (10 + round, 8));
        assert_eq!(met.buffers[0].bytes(32, 8), b"answered");
        let limit = Event::Async(AsyncEvent::SrqLimitReached(srq));
        let told = met.events().into_iter().filter(|&event| event == limit).count();
        assert_eq!(told, usize::from(round == 1), "round {round}");
        met.asks_again();
        met.buffers[0].fill(32, &[0; 8]);
    }
}

/// The write has to be placed first.
#[test]
fn an_answer_behind_a_write_that_is_held_waits_for_it() {
    let mut met = Met::with(Way::LinkCopying, false);
    met.asked();
    met.pair.hosts[0].adapter.place_unordered(WriteOrder::Reverse, 1_000_000_000);
    let (addr, rkey) = (met.buffers[0].addr(), met.buffers[0].key());
    let write = SendOp::Write { addr, rkey };
    met.buffers[1].fill(0, b"the end comes first");
    met.pair.send(1, met.qps[1], 2, write, &[met.buffers[1].sge(0, 19)]);
    met.look(0);
    assert_eq!(met.buffers[0].bytes(0, 8), [0; 8]);
    met.send(1, 3, b"answered");
    assert_eq!(met.glance(0), (Glance::Found(met.qps[0]), None));
    met.look(0);
    assert_eq!(met.buffers[0].bytes(0, 19), b"the end comes first");
    assert_eq!(met.received(0), [10]);
}

/// A plan has the receive fail, or show up late.
#[test]
fn a_receive_with_a_fate_is_not_handed_out() {
    const LATE_NS: u64 = 1_000_000;
    for fate in [Fate::Fail(WcStatus::LocLenErr), Fate::Late(LATE_NS)] {
        let mut met = Met::new();
        let (qp, sges) = (met.qps[0], [met.buffers[0].sge(32, 8)]);
        met.asked();
        for round in 0..8 {
            if round == 7 {
                let now = met.pair.now;
                let adapter = &mut met.pair.hosts[0].adapter;
                adapter.post_recv_fated(now, qp, 18, &sges, fate).unwrap();
                met.receives(1, 18..19);
            }
            met.send(1, 2, b"answered");
            assert_eq!(met.glance(0).0, Glance::Taken, "round {round}");
            met.asks_again();
        }
        met.send(1, 2, b"answered");
        assert_eq!(met.glance(0), (Glance::Found(qp), None), "{fate:?}");
        met.look(0);
        let fails = matches!(fate, Fate::Fail(_));
        assert_eq!(met.received(0), if fails { vec![18] } else { vec![] });
        met.pair.later(LATE_NS);
        assert_eq!(met.received(0), if fails { vec![] } else { vec![18] });
    }
}

#[test]
fn nor_where_somebody_waits_for_what_it_completes() {
    let mut met = Met::answered();
    let sends = met.pair.hosts[0].cq;
    met.pair.hosts[0].adapter.req_notify_cq(met.pair.now, sends, false).unwrap();
    assert_eq!(met.glance(0), (Glance::Found(met.qps[0]), None));
    met.look(0);
    let told = |event: &Event| matches!(event, Event::Completion { cq, .. } if *cq == sends);
    assert!(met.events().iter().any(told));

    let mut met = Met::answered();
    let attr = QpAttr { state: QpState::Sqd, ..QpAttr::default() };
    let now = met.pair.now;
    met.pair.hosts[0].adapter.modify_qp(now, met.qps[0], &attr, QpAttrMask::STATE).unwrap();
    assert_eq!(met.glance(0), (Glance::Found(met.qps[0]), None), "it drains");
}

#[test]
fn a_write_behind_an_answer_goes_directly() {
    let mut met = Met::with(Way::LinkMapped, false);
    met.asked();
    met.send(1, 2, b"answered");
    assert_eq!(met.glance(0).0, Glance::Taken);
    met.buffers[0].fill(0, b"directly");
    let list = [met.buffers[0].sge(0, 8)];
    let op = SendOp::Write { addr: met.buffers[1].addr(), rkey: met.buffers[1].key() };
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&list));
    let wr = SendWr { wr_id: 3, to: To::Peer, op, flags, payload };
    let now = met.pair.now;
    assert!(met.pair.hosts[0].adapter.post_at_once(now, met.qps[0], &wr));
    assert_eq!(met.buffers[1].bytes(0, 8), b"directly", "the peer does nothing");
    assert_eq!(met.pair.polled(0), [1, 3].map(|wr_id| (wr_id, WcStatus::Success)));
}

#[test]
fn nor_to_whoever_polls_another_queue() {
    let mut met = Met::answered();
    met.cqs.swap(0, 1);
    met.cqs[0] = met.pair.hosts[0].cq;
    assert_eq!(met.glance(0), (Glance::Found(met.qps[0]), None));
}

#[test]
fn nor_where_sends_complete_in_the_same_queue() {
    let (mut pair, qps) = connected(Way::Link);
    for (host, &qp) in qps.iter().enumerate() {
        pair.recv(host, qp, 10, &[]);
        pair.recv(host, qp, 11, &[]);
    }
    for (host, &qp) in qps.iter().enumerate() {
        pair.send(host, qp, 1, SendOp::Send, &[]);
        pair.run();
    }
    pair.send(0, qps[0], 2, SendOp::Send, &[]);
    let now = pair.now;
    pair.hosts[1].adapter.progress(now);
    pair.send(1, qps[1], 2, SendOp::Send, &[]);
    assert_eq!(pair.polled(0).len(), 2);
    let cq = pair.hosts[0].cq;
    let glance = pair.hosts[0].adapter.glance(now, cq, |_| panic!("the send comes first"));
    assert_eq!(glance, Glance::Found(qps[0]));
    pair.hosts[0].adapter.progress(now);
    assert_eq!(statuses(&pair.hosts[0].poll()), [(2, WcStatus::Success), (11, WcStatus::Success)]);
}

#[test]
fn an_answer_without_a_receive_waits() {
    let mut met = Met::answered();
    for host in 0..2 {
        met.pair.run();
        met.received(host);
    }
    for wr_id in 11..18 {
        met.send(1, 3, b"and more");
        met.pair.run();
        assert_eq!(met.received(0), [wr_id]);
    }
    met.send(0, 4, b"question");
    met.look(1);
    met.send(1, 5, b"answered");
    assert_eq!(met.glance(0), (Glance::Found(met.qps[0]), None));
    met.receives(0, 18..19);
    met.look(0);
    assert_eq!(met.received(0), [18]);
}

/// The peers ask again as soon as they are answered.
#[test]
fn glances_find_channels_that_always_have_something_in_turn() {
    let mut met = Met::new();
    let [other, asking] = [0, 1].map(|host| {
        let cq = met.cqs[host];
        met.pair.hosts[host].qp_with(|init| init.recv_cq = cq)
    });
    met.pair.connect([other, asking]);
    let channels = [[met.qps[0], met.qps[1]], [other, asking]];
    for [from, to] in channels {
        (20..26).for_each(|wr_id| met.pair.recv(1, to, wr_id, &[]));
        met.pair.send(0, from, 1, SendOp::Send, &[]);
    }
    met.pair.hosts[1].adapter.progress(met.pair.now);
    assert_eq!(met.received(1).len(), 2);
    for [from, _] in channels {
        met.pair.send(0, from, 1, SendOp::Send, &[]);
    }
    let mut order = Vec::new();
    for _ in 0..6 {
        let (Glance::Found(found), None) = met.glance(1) else { panic!("both have something") };
        assert!(met.pair.hosts[1].adapter.serve(met.pair.now, found));
        assert_eq!(met.received(1).len(), 1, "the other waits");
        let [from, _] = channels[usize::from(found == asking)];
        met.pair.send(0, from, 1, SendOp::Send, &[]);
        order.push(found);
    }
    assert!(order.windows(2).all(|two| two[0] != two[1]), "{order:?}");
}
