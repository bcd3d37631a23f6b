//! Sleeps for many completions, where their queues are moderated.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use quipu_nic::*;

use super::{CAP, Numbers, PATIENCE, Program, Shared};
use crate::Engine;
use crate::engine::ContextId;

/// A queue pair that completes to `cq`, and can have 64 sends under way.
fn sender(program: &Program, context: ContextId, cq: CqId) -> QpId {
    let (engine, pd, qp_type) = (&program.engine, program.pd, QpType::Udp);
    let cap = QpCap { max_send_wr: 64, ..CAP };
    let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all: true };
    let (qp, _, _) = engine.create_qp(context, &init).unwrap();
    let attr = QpAttr { state: QpState::Init, port_num: 1, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
    engine.modify_qp(qp, &attr, mask).unwrap();
    engine.udp_bind(qp, 0).unwrap();
    qp
}

fn post(engine: &Engine, qp: QpId, to: To, count: u64) {
    let (op, flags, payload) = (SendOp::Send, SendFlags::INLINE, Payload::Inline(b"x"));
    let mut doorbell = engine.doorbell().unwrap();
    for wr_id in 0..count {
        doorbell.post_send(qp, &SendWr { wr_id, to, op, flags, payload }).unwrap();
    }
}

#[test]
fn an_event_that_is_asked_for_during_a_sleep_for_many_is_not_late() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let (program, peer) = (shared.attach(), elsewhere.attach());
    let engine = &program.engine;
    let (context, _) = engine.open_context().unwrap();
    let channels = [0, 1].map(|_| engine.create_channel().unwrap().0);
    let cqs = channels.map(|it| engine.create_cq(context, 256, Some(it), 0).unwrap().0);
    let qps = cqs.map(|cq| sender(&program, context, cq));
    let to = To::Address(SocketAddr::new(elsewhere.address.ip(), peer.port));
    let mut out = [Completion::default(); 64];
    // Much comes at once: then sleeps are for many.
    post(engine, qps[0], to, 64);
    let (mut left, begun) = (64, Instant::now());
    while left > 0 {
        left -= engine.poll_cq(cqs[0], &mut out).unwrap();
        assert!(begun.elapsed() < PATIENCE);
    }
    engine.moderate_cq(cqs[0], 40, 60_000_000_000).unwrap();
    engine.req_notify_cq(cqs[0], false).unwrap();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| engine.wait_channel(channels[0]).map(drop));
        std::thread::sleep(Duration::from_millis(50));
        engine.req_notify_cq(cqs[1], false).unwrap();
        let asleep = Instant::now();
        post(engine, qps[1], to, 1);
        engine.wait_channel(channels[1]).unwrap();
        let slept = asleep.elapsed();
        // One that wants its events sooner while it is slept for.
        post(engine, qps[0], to, 3);
        std::thread::sleep(Duration::from_millis(50));
        engine.moderate_cq(cqs[0], 0, 0).unwrap();
        post(engine, qps[0], to, 1);
        sleeper.join().unwrap().unwrap();
        assert!(slept < Duration::from_secs(10), "{slept:?}");
        assert!(asleep.elapsed() < Duration::from_secs(20));
    });
}

#[test]
fn sleeps_for_many_completions_end_with_them_or_with_their_period() {
    let (shared, elsewhere) = (Shared::new(), Shared::new());
    let (program, peer) = (shared.attach(), elsewhere.attach());
    let engine = &program.engine;
    let (context, _) = engine.open_context().unwrap();
    let (channel, _) = engine.create_channel().unwrap();
    let (cq, _) = engine.create_cq(context, 256, Some(channel), 0).unwrap();
    let qp = sender(&program, context, cq);
    let to = To::Address(SocketAddr::new(elsewhere.address.ip(), peer.port));
    let post = |count| post(engine, qp, to, count);
    let mut out = [Completion::default(); 64];
    let mut numbers = Numbers(0x2545_f491_4f6c_dd1d);
    for _ in 0..3000 {
        let begun = Instant::now();
        let posted = 1 + numbers.next() % 64;
        let enough = 1 + numbers.next() % posted;
        // A sleep that misses its bell takes that long.
        engine.moderate_cq(cq, enough as u16, 60_000_000_000).unwrap();
        post(posted);
        let mut left = posted;
        while left > 0 {
            left -= engine.poll_cq(cq, &mut out).unwrap() as u64;
            if left < enough {
                continue;
            }
            engine.req_notify_cq(cq, false).unwrap();
            let more = engine.poll_cq(cq, &mut out).unwrap() as u64;
            left -= more;
            // As many come as it sleeps for.
            if more == 0 && left >= enough {
                engine.wait_channel(channel).unwrap();
            }
        }
        assert!(begun.elapsed() < PATIENCE, "a bell was missed");
    }
    // Fewer than it sleeps for.
    engine.moderate_cq(cq, 50, 20_000_000).unwrap();
    for _ in 0..5 {
        engine.req_notify_cq(cq, false).unwrap();
        post(3);
        let asleep = Instant::now();
        engine.wait_channel(channel).unwrap();
        assert!(asleep.elapsed() < Duration::from_secs(5));
        let mut left = 3;
        while left > 0 {
            left -= engine.poll_cq(cq, &mut out).unwrap();
        }
    }
}
