//! Extended reliable connections (IBA annex A14): each message names the shared receive queue that it is for.

#![allow(clippy::needless_range_loop)]

use crate::pair::{Buffer, Pair, WAYS, Way, statuses};
use quipu_iwarp::wire::rdmap::UntaggedOp;
use quipu_iwarp::{Negotiated, Sender};
use quipu_nic::mem::Access;
use quipu_nic::*;

const SECOND: u64 = 1_000_000_000;

/// A requester at host 0, a responder at host 1, and two shared receive queues of one domain there.
struct Xrc {
    pair: Pair,
    qps: [QpId; 2],
    domain: XrcdId,
    srqs: [SrqId; 2],
    cqs: [CqId; 2],
    numbers: [u32; 2],
}

impl Xrc {
    fn unconnected(way: Way) -> Self {
        let mut pair = Pair::new(way);
        let (pd, there) = (pair.hosts[1].pd, &mut pair.hosts[1].adapter);
        let domain = there.alloc_xrcd().unwrap();
        let cqs = [0, 1].map(|_| there.create_cq(64, None, 0).unwrap().0);
        let made = cqs.map(|cq| there.create_xrc_srq(pd, domain, cq, 16, 4).unwrap());
        let requester = pair.hosts[0].qp_with(|init| {
            init.qp_type = QpType::XrcSend;
            init.recv_cq = CqId::NONE;
        });
        let responder = pair.hosts[1].qp_with(|init| {
            init.qp_type = QpType::XrcRecv(domain);
            (init.pd, init.send_cq, init.recv_cq) = (PdId::NONE, CqId::NONE, CqId::NONE);
        });
        let qps = [requester, responder];
        let (srqs, numbers) = (made.map(|(id, _)| id), made.map(|(_, number)| number));
        Self { pair, qps, domain, srqs, cqs, numbers }
    }

    fn new(way: Way) -> Self {
        let mut xrc = Self::unconnected(way);
        xrc.pair.connect(xrc.qps);
        xrc
    }

    fn request(&mut self, wr_id: u64, srq: u32, op: SendOp, sges: &[Sge]) -> Result<(), Fault> {
        let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(sges));
        let wr = SendWr { wr_id, to: To::Srq(srq), op, flags, payload };
        let Self { pair, qps, .. } = self;
        pair.hosts[0].adapter.post_send(qps[0], &wr)?;
        pair.hosts[0].adapter.ring_doorbell(pair.now, qps[0]);
        Ok(())
    }

    fn send(&mut self, wr_id: u64, srq: u32, op: SendOp, sges: &[Sge]) {
        self.request(wr_id, srq, op, sges).unwrap();
    }

    fn recv(&mut self, srq: usize, wr_id: u64, sges: &[Sge]) {
        self.pair.hosts[1]
            .adapter
            .post_srq_recv(self.pair.now, self.srqs[srq], wr_id, sges)
            .unwrap();
    }

    /// What has arrived for a shared receive queue.
    fn arrived(&mut self, srq: usize) -> Vec<Completion> {
        let mut out = [Completion::default(); 64];
        let count = self.pair.hosts[1].adapter.poll_cq(self.cqs[srq], &mut out).unwrap();
        out[..count].to_vec()
    }

    fn sent(&mut self) -> Vec<(u64, WcStatus)> {
        statuses(&self.pair.hosts[0].poll())
    }

    fn later(&mut self, ns: u64) {
        let until = self.pair.now.after(ns);
        self.pair.run_until(until);
    }

    fn state(&self, host: usize) -> QpState {
        self.pair.hosts[host].adapter.query_qp(self.qps[host]).unwrap().attr.state
    }

    fn responder_raised(&self, event: AsyncEvent) -> bool {
        self.pair.hosts[1].events.contains(&Event::Async(event))
    }

    fn buffers(&mut self, len: usize) -> (Buffer, Buffer) {
        (self.pair.buffer(0, len), self.pair.buffer(1, len))
    }
}

use WcStatus::{LocLenErr, LocProtErr, RemAccessErr, RemInvReqErr, RemOpErr, Success};

/// A queue that messages name is not one that a queue pair takes receives from.
#[test]
fn other_queue_pairs_cannot_have_the_queue() {
    let mut xrc = Xrc::new(Way::Link);
    let srq = Some(xrc.srqs[0]);
    let host = &mut xrc.pair.hosts[1];
    for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud] {
        let (pd, send_cq, recv_cq) = (host.pd, host.cq, host.cq);
        let cap = QpCap { max_send_wr: 1, ..QpCap::default() };
        let init = QpInit { pd, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all: false };
        let made = host.adapter.create_qp(&init, QpNum::new(5000, 77));
        assert!(matches!(made, Err(Fault::Invalid(_))), "{qp_type:?}");
    }
}

/// Each message goes to the queue that it names, and completes in the queue of that.
#[test]
fn messages_reach_the_queue_that_they_name() {
    for way in WAYS {
        let mut xrc = Xrc::new(way);
        let (from, to) = xrc.buffers(1 << 20);
        let (addr, rkey) = (to.addr(), to.key());
        let responder = xrc.pair.hosts[1].adapter.query_qp(xrc.qps[1]).unwrap().num;
        for (n, len) in [0, 1, 96, 97, 16_385, 100_000, 1 << 20].into_iter().enumerate() {
            let ops = [SendOp::Send, SendOp::SendImm(7), SendOp::WriteImm { addr, rkey, imm: 7 }];
            for (kind, op) in ops.into_iter().enumerate() {
                let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + n + kind * 7) as u8).collect();
                from.fill(0, &bytes);
                let (srq, number) = (kind & 1, xrc.numbers[kind & 1]);
                xrc.recv(0, 100, &[to.sge(0, 1 << 20)]);
                xrc.recv(1, 101, &[to.sge(0, 1 << 20)]);
                xrc.send(1, number, op, &[from.sge(0, len)]);
                xrc.pair.run();
                assert_eq!(xrc.sent(), [(1, Success)], "{way:?} {op:?} {len}");
                let got = xrc.arrived(srq);
                assert_eq!(statuses(&got), [(100 + srq as u64, Success)], "{way:?} {op:?} {len}");
                assert_eq!((got[0].qp_num, got[0].byte_len as usize), (responder, len));
                assert_eq!(got[0].extra == WcExtra::Imm(7), kind > 0);
                assert!(to.bytes(0, len) == bytes, "{way:?} {op:?} {len}");
                assert!(xrc.arrived(1 - srq).is_empty());
                // The other queue still has its receive: it is used up.
                xrc.send(2, xrc.numbers[1 - srq], SendOp::Send, &[]);
                xrc.pair.run();
                assert_eq!((xrc.arrived(1 - srq).len(), xrc.sent().len()), (1, 1));
            }
        }
    }
}

/// A program answers over another connection: there, its answer would reach the requester before an
/// acknowledgement that waits for something to travel with. `ib_send_lat -c XRC -e` takes it for granted that
/// its send has completed when the answer is there.
#[test]
fn the_acknowledgement_is_on_its_way_before_the_program_can_answer() {
    let mut xrc = Xrc::new(Way::Stream(usize::MAX));
    let ends = xrc.pair.stream_ends();
    let number = xrc.numbers[0];
    xrc.recv(0, 10, &[]);
    xrc.send(1, number, SendOp::Send, &[]);
    let now = xrc.pair.now;
    let pass = |xrc: &mut Xrc, from: usize| {
        let mut bytes = vec![0; 4096];
        assert_eq!(xrc.pair.hosts[from].adapter.next_transmit(), Some(ends[from]));
        let count = xrc.pair.hosts[from].adapter.transmit(now, ends[from], &mut bytes);
        let used =
            xrc.pair.hosts[1 - from].adapter.handle_stream(now, ends[1 - from], &bytes[..count]);
        assert_eq!((count > 0, used), (true, count));
    };
    pass(&mut xrc, 0);
    assert_eq!(statuses(&xrc.arrived(0)), [(10, Success)]);
    // Nobody has released acknowledgements.
    pass(&mut xrc, 1);
    assert_eq!(xrc.sent(), [(1, Success)]);
}

/// An empty queue is waited for, whatever the other one has.
#[test]
fn an_empty_queue_is_not_ready() {
    for way in WAYS {
        let mut xrc = Xrc::new(way);
        let (from, to) = xrc.buffers(100_000);
        from.fill(0, &[5; 100_000]);
        xrc.recv(1, 20, &[]);
        xrc.recv(1, 21, &[]);
        let numbers = xrc.numbers;
        xrc.send(1, numbers[1], SendOp::Send, &[]);
        xrc.send(2, numbers[0], SendOp::Send, &[from.sge(0, 100_000)]);
        xrc.send(3, numbers[1], SendOp::SendImm(3), &[]);
        xrc.later(SECOND / 100);
        assert_eq!(xrc.sent(), [(1, Success)], "{way:?}");
        assert_eq!(statuses(&xrc.arrived(1)), [(20, Success)], "{way:?}");
        xrc.recv(0, 10, &[to.sge(0, 100_000)]);
        xrc.later(SECOND / 100);
        assert_eq!(xrc.sent(), [(2, Success), (3, Success)], "{way:?}");
        assert_eq!(statuses(&xrc.arrived(0)), [(10, Success)], "{way:?}");
        assert_eq!(statuses(&xrc.arrived(1)), [(21, Success)], "{way:?}");
        assert!(to.bytes(0, 100_000) == [5; 100_000]);
    }
}

/// A number that names nothing, a queue of another domain and one that is no XRC queue are the same: invalid.
#[test]
fn other_queues_cannot_be_named() {
    for way in WAYS {
        for wrong in 0..3 {
            for op in [SendOp::Send, SendOp::WriteImm { addr: 0, rkey: 0, imm: 1 }] {
                let mut xrc = Xrc::new(way);
                let pd = xrc.pair.hosts[1].pd;
                let there = &mut xrc.pair.hosts[1].adapter;
                let other = there.alloc_xrcd().unwrap();
                let elsewhere = there.create_xrc_srq(pd, other, xrc.cqs[0], 4, 1).unwrap();
                let basic = there.create_srq(pd, 4, 1, 0).unwrap();
                for srq in [elsewhere.0, basic] {
                    there.post_srq_recv(xrc.pair.now, srq, 1, &[]).unwrap();
                }
                let number = [0x00ff_fffe, elsewhere.1, 0][wrong];
                xrc.send(1, number, op, &[]);
                xrc.pair.run();
                assert_eq!(xrc.sent(), [(1, RemInvReqErr)], "{way:?} {wrong}");
                assert_eq!((xrc.state(0), xrc.state(1)), (QpState::Err, QpState::Err));
                assert!(xrc.responder_raised(AsyncEvent::QpReqErr(xrc.qps[1])), "{way:?}");
                assert!(xrc.arrived(0).is_empty());
            }
        }
    }
}

/// What peers may reach is the memory in the protection domains of the XRC domain's queues.
#[test]
fn remote_operations_reach_the_memory_of_the_domain() {
    for way in WAYS {
        let mut xrc = Xrc::new(way);
        let (here, there) = xrc.buffers(100_000);
        let (addr, rkey) = (there.addr(), there.key());
        here.fill(0, &[3; 50_000]);
        xrc.send(1, 0, SendOp::Write { addr, rkey }, &[here.sge(0, 50_000)]);
        xrc.send(2, 0, SendOp::Read { addr, rkey }, &[here.sge(50_000, 50_000)]);
        let word = addr + 80_000;
        xrc.send(3, 0, SendOp::FetchAdd { addr: word, rkey, add: 1 }, &[here.sge(0, 8)]);
        for (wr_id, whole) in [(4, false), (5, true)] {
            let flush = Flush { addr, rkey, len: 50_000, whole, placement: Placement::GLOBAL };
            xrc.send(wr_id, 0, SendOp::Flush(flush), &[]);
        }
        xrc.pair.run();
        assert_eq!(xrc.sent(), [1, 2, 3, 4, 5].map(|wr_id| (wr_id, Success)), "{way:?}");
        assert!(here.bytes(50_000, 50_000) == [3; 50_000]);
        assert_eq!(
            (here.bytes(0, 8), there.bytes(80_000, 8)),
            (vec![0; 8], vec![1, 0, 0, 0, 0, 0, 0, 0])
        );
        // A domain without a queue there, and then one whose last queue goes.
        let host = &mut xrc.pair.hosts[1];
        let own = host.pd;
        host.pd = host.adapter.alloc_pd().unwrap();
        let outside = xrc.pair.buffer(1, 64);
        xrc.pair.hosts[1].pd = own;
        let (addr, rkey) = (outside.addr(), outside.key());
        xrc.send(4, 0, SendOp::Write { addr, rkey }, &[here.sge(0, 8)]);
        xrc.pair.run();
        assert_eq!(xrc.sent(), [(4, RemAccessErr)], "{way:?}");
        assert_eq!(outside.bytes(0, 64), [0; 64]);
        let mut xrc = Xrc::new(way);
        let (here, there) = xrc.buffers(64);
        let (addr, rkey) = (there.addr(), there.key());
        for srq in xrc.srqs {
            xrc.send(1, 0, SendOp::Read { addr, rkey }, &[here.sge(0, 8)]);
            xrc.pair.run();
            assert_eq!(xrc.sent(), [(1, Success)], "{way:?}");
            xrc.pair.hosts[1].adapter.destroy_srq(srq).unwrap();
        }
        xrc.send(2, 0, SendOp::Read { addr, rkey }, &[here.sge(0, 8)]);
        xrc.pair.run();
        assert_eq!(xrc.sent(), [(2, RemAccessErr)], "{way:?}");
    }
}

/// A receive is checked as that of any shared queue; the memory it names is that of its queue's domain.
#[test]
fn receives_are_checked_in_the_domain_of_their_queue() {
    for way in WAYS {
        for (len, status, remote) in [(4, LocLenErr, RemInvReqErr), (8, LocProtErr, RemOpErr)] {
            let mut xrc = Xrc::new(way);
            let (here, there) = xrc.buffers(64);
            let host = &mut xrc.pair.hosts[1];
            let own = host.pd;
            host.pd = host.adapter.alloc_pd().unwrap();
            let outside = xrc.pair.buffer(1, 64);
            xrc.pair.hosts[1].pd = own;
            let place = if len == 4 { there.sge(0, 4) } else { outside.sge(0, 8) };
            xrc.recv(0, 1, &[place]);
            xrc.send(1, xrc.numbers[0], SendOp::Send, &[here.sge(0, 8)]);
            xrc.pair.run();
            assert_eq!(xrc.sent(), [(1, remote)], "{way:?}");
            assert_eq!(statuses(&xrc.arrived(0)), [(1, status)], "{way:?}");
        }
    }
}

#[test]
fn each_end_has_one_direction() {
    let mut xrc = Xrc::new(Way::Link);
    let invalid = |posted: Result<(), Fault>| assert!(matches!(posted, Err(Fault::Invalid(_))));
    invalid(xrc.request(1, 0x0100_0000, SendOp::Send, &[]));
    let Xrc { pair, qps, .. } = &mut xrc;
    let (flags, payload) = (SendFlags::SIGNALED, Payload::Sges(&[]));
    let wr = SendWr { wr_id: 1, to: To::Peer, op: SendOp::Send, flags, payload };
    invalid(pair.hosts[0].adapter.post_send(qps[0], &wr));
    invalid(pair.hosts[1].adapter.post_send(qps[1], &SendWr { to: To::Srq(1), ..wr }));
    for host in 0..2 {
        invalid(pair.hosts[host].adapter.post_recv(pair.now, qps[host], 1, &[]));
    }
    let cap = |host: usize| pair.hosts[host].adapter.query_qp(qps[host]).unwrap().cap;
    assert_eq!((cap(0).max_recv_wr, cap(0).max_recv_sge), (0, 0));
    assert_eq!(cap(1), QpCap::default());
}

/// Attributes of the other direction are not looked at, in whichever state they come.
#[test]
fn attributes_of_the_other_direction_are_ignored() {
    type M = QpAttrMask;
    let mut xrc = Xrc::new(Way::Link);
    let attr = QpAttr { min_rnr_timer: 99, retry_cnt: 99, ..QpAttr::default() };
    for (host, foreign, own) in
        [(0, M::MIN_RNR_TIMER, M::RETRY_CNT), (1, M::RETRY_CNT, M::MIN_RNR_TIMER)]
    {
        let (qp, now) = (xrc.qps[host], xrc.pair.now);
        let adapter = &mut xrc.pair.hosts[host].adapter;
        assert_eq!(adapter.modify_qp(now, qp, &attr, foreign), Ok(()));
        assert!(adapter.modify_qp(now, qp, &attr, own).is_err());
        assert_ne!(adapter.query_qp(qp).unwrap().attr.min_rnr_timer, 99);
    }
}

/// A peer that makes requests of a requester is refused, whatever rights that grants.
#[test]
fn a_requester_executes_nothing() {
    let mut xrc = Xrc::new(Way::Stream(usize::MAX));
    let mut sender = Sender::new(&Negotiated::plain(), 1000);
    let mut out = [0; 100];
    let mut msg = sender.begin_shared(UntaggedOp::Send, 0, 1);
    let len = sender.segment(&mut msg, &mut out, 0, |_| {}).unwrap().bytes;
    xrc.pair.inject(0, &out[..len]);
    xrc.pair.run();
    assert_eq!((xrc.state(0), xrc.state(1)), (QpState::Err, QpState::Rts));
}

/// A responder whose peer does not name a queue has lost it: that is not what the connection is for.
#[test]
fn a_message_without_a_queue_is_an_error() {
    let mut xrc = Xrc::new(Way::Stream(usize::MAX));
    xrc.recv(0, 1, &[]);
    let mut sender = Sender::new(&Negotiated::plain(), 1000);
    let mut out = [0; 100];
    let mut msg = sender.begin_untagged(UntaggedOp::Send, 0);
    let len = sender.segment(&mut msg, &mut out, 0, |_| {}).unwrap().bytes;
    xrc.pair.inject(1, &out[..len]);
    xrc.pair.run();
    assert_eq!(xrc.state(1), QpState::Err);
    assert!(xrc.arrived(0).is_empty());
}

/// A queue that goes while a message waits for one of its receives, or is being placed into one.
#[test]
fn a_queue_may_go_at_any_time() {
    for way in WAYS {
        let mut xrc = Xrc::new(way);
        xrc.send(1, xrc.numbers[0], SendOp::Send, &[]);
        xrc.pair.run();
        xrc.pair.hosts[1].adapter.destroy_srq(xrc.srqs[0]).unwrap();
        xrc.later(SECOND);
        assert_eq!(xrc.sent(), [(1, RemInvReqErr)], "{way:?}");
    }
    let mut xrc = Xrc::unconnected(Way::Stream(usize::MAX));
    xrc.pair.socket_bytes = 5000;
    xrc.pair.connect(xrc.qps);
    let (from, to) = xrc.buffers(20_000);
    from.fill(0, &[1; 20_000]);
    xrc.recv(0, 1, &[to.sge(0, 20_000)]);
    xrc.send(1, xrc.numbers[0], SendOp::Send, &[from.sge(0, 20_000)]);
    let ends = xrc.pair.stream_ends();
    let mut some = [0; 5000];
    let len = xrc.pair.hosts[0].adapter.transmit(xrc.pair.now, ends[0], &mut some);
    xrc.pair.inject(1, &some[..len]);
    let now = xrc.pair.now;
    let used = xrc.pair.hosts[1].adapter.handle_stream(now, ends[1], &some[..len]);
    let placed = to.bytes(0, 20_000);
    assert!(used > 0 && placed[0] == 1 && placed[19_999] == 0);
    xrc.pair.hosts[1].adapter.destroy_srq(xrc.srqs[0]).unwrap();
    xrc.pair.run();
    assert!(to.bytes(0, 20_000) == placed, "nothing is written afterwards");
    assert_eq!(xrc.sent(), [(1, RemOpErr)]);
    assert!(xrc.responder_raised(AsyncEvent::QpFatal(xrc.qps[1])));
    assert!(xrc.arrived(0).is_empty());
}

#[test]
fn what_is_in_use_stays() {
    let Xrc { mut pair, qps, domain, srqs, cqs, .. } = Xrc::new(Way::Link);
    let (pd, now) = (pair.hosts[1].pd, pair.now);
    let there = &mut pair.hosts[1].adapter;
    assert_eq!(there.dealloc_xrcd(domain), Err(Fault::Busy));
    assert_eq!(there.destroy_cq(cqs[0]), Err(Fault::Busy));
    for srq in srqs {
        there.destroy_srq(srq).unwrap();
    }
    assert_eq!(there.dealloc_xrcd(domain), Err(Fault::Busy), "the queue pair is there");
    there.destroy_qp(now, qps[1]).unwrap();
    for cq in cqs {
        there.destroy_cq(cq).unwrap();
    }
    there.dealloc_xrcd(domain).unwrap();
    assert_eq!(there.dealloc_xrcd(domain), Err(Fault::NoSuchObject));
    assert!(there.create_xrc_srq(pd, domain, cqs[0], 4, 1).is_err());
}

/// Numbers of queues that went are not given to the next ones.
#[test]
fn numbers_are_not_used_again_soon() {
    let mut xrc = Xrc::new(Way::Link);
    let pd = xrc.pair.hosts[1].pd;
    let there = &mut xrc.pair.hosts[1].adapter;
    let mut seen = xrc.numbers.to_vec();
    for _ in 0..100 {
        let (srq, number) = there.create_xrc_srq(pd, xrc.domain, xrc.cqs[0], 1, 1).unwrap();
        assert!(number != 0 && number < 1 << 24 && !seen.contains(&number));
        seen.push(number);
        there.destroy_srq(srq).unwrap();
    }
}

/// Two connections share one queue; the limit of the queue counts for both.
#[test]
fn connections_share_a_queue() {
    for way in WAYS {
        let mut xrc = Xrc::new(way);
        let (domain, number) = (xrc.domain, xrc.numbers[0]);
        let second = [
            xrc.pair.hosts[0].qp_with(|init| init.qp_type = QpType::XrcSend),
            xrc.pair.hosts[1].qp_with(|init| init.qp_type = QpType::XrcRecv(domain)),
        ];
        xrc.pair.connect(second);
        for wr_id in 0..2 {
            xrc.recv(0, wr_id, &[]);
        }
        xrc.pair.hosts[1].adapter.modify_srq(xrc.srqs[0], None, Some(1)).unwrap();
        let first = xrc.qps;
        xrc.send(1, number, SendOp::Send, &[]);
        xrc.qps = second;
        xrc.send(2, number, SendOp::Send, &[]);
        xrc.pair.run();
        let got: Vec<QpNum> = xrc.arrived(0).iter().map(|wc| wc.qp_num).collect();
        let mut expected =
            [first, second].map(|qps| xrc.pair.hosts[1].adapter.query_qp(qps[1]).unwrap().num);
        expected.sort_unstable();
        let mut got = got;
        got.sort_unstable();
        assert_eq!(got, expected, "{way:?}");
        assert!(xrc.responder_raised(AsyncEvent::SrqLimitReached(xrc.srqs[0])));
    }
}

/// Only a requester and a responder fit, and neither fits a reliable connection.
#[test]
fn ends_that_do_not_fit_do_not_connect() {
    for way in WAYS {
        let mut xrc = Xrc::unconnected(way);
        let domain = xrc.domain;
        for (here, there) in [
            (QpType::XrcSend, QpType::XrcSend),
            (QpType::XrcSend, QpType::Rc),
            (QpType::Rc, QpType::XrcRecv(domain)),
        ] {
            let qps = [
                xrc.pair.hosts[0].qp_with(|init| init.qp_type = here),
                xrc.pair.hosts[1].qp_with(|init| init.qp_type = there),
            ];
            xrc.pair.connect(qps);
            xrc.qps = qps;
            xrc.send(1, xrc.numbers[0], SendOp::Send, &[]);
            xrc.later(10 * SECOND);
            assert_eq!(xrc.sent(), [(1, WcStatus::RetryExcErr)], "{way:?} {here:?} {there:?}");
        }
    }
}

/// Within one adapter, also with rights that a window carries.
#[test]
fn within_one_adapter() {
    let mut xrc = Xrc::unconnected(Way::Link);
    let (domain, number) = (xrc.domain, xrc.numbers[0]);
    let elsewhere = xrc.pair.hosts[0].qp();
    let host = &mut xrc.pair.hosts[1];
    let (from, to) = (
        host.qp_with(|init| init.qp_type = QpType::XrcSend),
        host.qp_with(|init| init.qp_type = QpType::XrcRecv(domain)),
    );
    let dgid = host.adapter.config().gid;
    for (qp, peer) in [(from, to), (to, from)] {
        let dest_qp_num = xrc.pair.hosts[1].adapter.query_qp(peer).unwrap().num.0;
        let change = |attr: &mut QpAttr| {
            attr.dest_qp_num = dest_qp_num;
            attr.av.dgid = dgid;
        };
        xrc.pair.to_rtr(1, [elsewhere, qp], &change);
        xrc.pair.to_rts(1, qp, &change);
    }
    let buffer = xrc.pair.buffer_with(1, 64, Access::LOCAL_WRITE);
    buffer.fill(0, b"quipu");
    xrc.recv(0, 1, &[buffer.sge(32, 32)]);
    let (flags, sges) = (SendFlags::SIGNALED, [buffer.sge(0, 5)]);
    let (op, payload) = (SendOp::Send, Payload::Sges(&sges));
    let wr = SendWr { wr_id: 1, to: To::Srq(number), op, flags, payload };
    let now = xrc.pair.now;
    xrc.pair.hosts[1].adapter.post_send(from, &wr).unwrap();
    xrc.pair.hosts[1].adapter.ring_doorbell(now, from);
    xrc.pair.run();
    assert_eq!(statuses(&xrc.arrived(0)), [(1, Success)]);
    assert_eq!(statuses(&xrc.pair.hosts[1].poll()), [(1, Success)]);
    assert_eq!(buffer.bytes(32, 5), b"quipu");
}
