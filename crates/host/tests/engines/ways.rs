//! Whole engines in one process, over every way there is between them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Node, PATIENCE, engine, pair};
use quipu_host::nic::{SendOp, WcExtra, WcOpcode, WcStatus, WriteOrder};
use quipu_host::{Config, Engine, EngineError, SameHost, StrictMode, StrictOrder};

const LARGE: u32 = 3_000_001;

/// Every kind of operation, small and large.
fn exercise(a: &Node, b: &Node) {
    b.receive(1, &[b.sge(0, 64)]);
    a.fill(0, b"hello, peer");
    a.post(2, SendOp::SendImm(0xabcd), &[a.sge(0, 11)]);
    let done = a.poll();
    assert_eq!((done.wr_id, done.status, done.opcode), (2, WcStatus::Success, WcOpcode::Send));
    let got = b.poll();
    assert_eq!((got.wr_id, got.status, got.byte_len), (1, WcStatus::Success, 11));
    assert_eq!(got.extra, WcExtra::Imm(0xabcd));
    assert_eq!(b.bytes(0, 11), b"hello, peer");

    let pattern: Vec<u8> = (0..LARGE).map(|i| (i * 7 + i / 251) as u8).collect();
    a.fill(64, &pattern);
    let remote = SendOp::Write { addr: b.addr(64), rkey: b.rkey() };
    a.post(3, remote, &[a.sge(64, LARGE)]);
    assert_eq!(a.poll().status, WcStatus::Success);
    assert!(b.bytes(64, LARGE as usize) == pattern);

    a.fill(64, &vec![0; LARGE as usize]);
    let remote = SendOp::Read { addr: b.addr(64), rkey: b.rkey() };
    a.post(4, remote, &[a.sge(64, LARGE)]);
    assert_eq!(a.poll().status, WcStatus::Success);
    assert!(a.bytes(64, LARGE as usize) == pattern);

    b.fill(64, &vec![0; LARGE as usize]);
    b.receive(5, &[b.sge(64, LARGE)]);
    a.post(6, SendOp::Send, &[a.sge(64, LARGE)]);
    assert_eq!(b.poll().byte_len, LARGE);
    assert_eq!(a.poll().status, WcStatus::Success);
    assert!(b.bytes(64, LARGE as usize) == pattern);

    b.fill(0, &40u64.to_ne_bytes());
    a.post(7, SendOp::FetchAdd { addr: b.addr(0), rkey: b.rkey(), add: 2 }, &[a.sge(0, 8)]);
    assert_eq!(a.poll().opcode, WcOpcode::FetchAdd);
    assert_eq!(a.bytes(0, 8), 40u64.to_ne_bytes());
    assert_eq!(b.bytes(0, 8), 42u64.to_ne_bytes());
}

/// Many small messages both ways, more than the queues hold at once.
fn flood(a: &Node, b: &Node) {
    const COUNT: u64 = 5_000;
    let (mut posted, mut sent, mut received, mut offered) = (0, 0, 0u64, 0);
    let end = Instant::now() + PATIENCE;
    let mut out = [quipu_host::nic::Completion::default(); 16];
    while received < COUNT || sent < COUNT {
        assert!(Instant::now() < end, "{posted} posted, {sent} sent, {received} received");
        while offered < COUNT && offered - received < 200 {
            b.receive(offered, &[b.sge(64 * (offered % 256), 64)]);
            offered += 1;
        }
        while posted < COUNT && posted - sent < 200 {
            a.post(posted, SendOp::Send, &[a.sge(0, 64)]);
            posted += 1;
        }
        let count = a.engine.poll_cq(a.cq, &mut out).unwrap();
        for done in &out[..count] {
            assert_eq!((done.wr_id, done.status), (sent, WcStatus::Success));
            sent += 1;
        }
        let count = b.engine.poll_cq(b.cq, &mut out).unwrap();
        for done in &out[..count] {
            assert_eq!((done.wr_id, done.status), (received, WcStatus::Success));
            received += 1;
        }
    }
}

fn both_ways(address_a: &str, address_b: &str, same_host: SameHost) {
    let (a, b) = (engine(address_a, same_host), engine(address_b, same_host));
    let (a, b) = pair(&a, &b, 4 << 20);
    exercise(&a, &b);
    exercise(&b, &a);
    flood(&a, &b);
}

#[test]
fn over_tcp_ipv4() {
    both_ways("127.0.0.1", "127.0.0.1", SameHost::Never);
}

#[test]
fn over_tcp_ipv6() {
    both_ways("::1", "::1", SameHost::Never);
}

#[test]
fn over_a_link() {
    both_ways("127.0.0.1", "127.0.0.2", SameHost::Auto);
}

#[test]
fn within_one_engine() {
    let engine = engine("127.0.0.1", SameHost::Auto);
    let (a, b) = pair(&engine, &engine, 4 << 20);
    exercise(&a, &b);
    flood(&b, &a);
}

#[test]
fn one_side_without_links_means_tcp() {
    let (a, b) = (engine("127.0.0.1", SameHost::Auto), engine("127.0.0.1", SameHost::Never));
    let (a, b) = pair(&a, &b, 4 << 20);
    exercise(&a, &b);
}

/// The target's program does nothing at all: its helper thread serves the peer.
fn served_by_the_helper(same_host: SameHost) {
    let (a, b) = (engine("127.0.0.1", same_host), engine("127.0.0.1", same_host));
    let (a, b) = pair(&a, &b, 1 << 20);
    a.fill(0, b"one-sided");
    for _ in 0..20 {
        a.post(1, SendOp::Write { addr: b.addr(0), rkey: b.rkey() }, &[a.sge(0, 9)]);
        assert_eq!(a.poll().status, WcStatus::Success);
    }
    assert_eq!(b.bytes(0, 9), b"one-sided");
}

#[test]
fn the_helper_serves_tcp() {
    served_by_the_helper(SameHost::Never);
}

#[test]
fn the_helper_serves_links() {
    served_by_the_helper(SameHost::Auto);
}

/// A program that posts receives late and does not poll: its helper serves what waited, and what comes next.
fn served_after_a_late_receive(same_host: SameHost) {
    let (a, b) = (engine("127.0.0.1", same_host), engine("127.0.0.1", same_host));
    let (a, b) = pair(&a, &b, 1 << 20);
    for turn in 0..5 {
        a.post(turn, SendOp::Send, &[a.sge(0, 8)]);
        std::thread::sleep(std::time::Duration::from_millis(20));
        b.receive(0, &[b.sge(0, 64)]);
        b.receive(0, &[b.sge(0, 64)]);
        assert_eq!(a.poll().status, WcStatus::Success);
        let began = Instant::now();
        a.post(turn, SendOp::Send, &[a.sge(0, 8)]);
        assert_eq!(a.poll().status, WcStatus::Success);
        assert!(began.elapsed() < PATIENCE / 4, "served after {:?}", began.elapsed());
    }
}

#[test]
fn the_helper_serves_late_receives_over_tcp() {
    served_after_a_late_receive(SameHost::Never);
}

#[test]
fn the_helper_serves_late_receives_over_links() {
    served_after_a_late_receive(SameHost::Auto);
}

/// Ping-pong in which both sides sleep in `wait_channel`.
fn sleeping_ping_pong(same_host: SameHost) {
    let (a, b) = (engine("127.0.0.1", same_host), engine("127.0.0.1", same_host));
    let (a, b) = pair(&a, &b, 1 << 20);
    const ROUNDS: u64 = 200;
    let play = |node: &Node, begins: bool| {
        let mut turn = begins;
        let mut out = [quipu_host::nic::Completion::default(); 8];
        let (mut sent, mut received) = (0, 0);
        while sent < ROUNDS || received < ROUNDS {
            if turn && sent < ROUNDS {
                node.post(sent, SendOp::Send, &[node.sge(0, 8)]);
                turn = false;
            }
            node.engine.req_notify_cq(node.cq, false).unwrap();
            let mut count = node.engine.poll_cq(node.cq, &mut out).unwrap();
            if count == 0 {
                let event = node.engine.wait_channel(node.channel).unwrap();
                assert_eq!((event.cq, event.context), (node.cq, 7));
                count = node.engine.poll_cq(node.cq, &mut out).unwrap();
            }
            for done in &out[..count] {
                assert_eq!(done.status, WcStatus::Success);
                if done.opcode == WcOpcode::Recv {
                    received += 1;
                    turn = true;
                    node.receive(0, &[node.sge(64, 64)]);
                } else {
                    sent += 1;
                }
            }
        }
    };
    for node in [&a, &b] {
        for _ in 0..16 {
            node.receive(0, &[node.sge(64, 64)]);
        }
    }
    std::thread::scope(|scope| {
        scope.spawn(|| play(&a, true));
        scope.spawn(|| play(&b, false));
    });
}

#[test]
fn sleepers_wake_over_tcp() {
    sleeping_ping_pong(SameHost::Never);
}

#[test]
fn sleepers_wake_over_links() {
    sleeping_ping_pong(SameHost::Auto);
}

#[test]
fn a_sleeper_wakes_when_another_thread_finds_what_it_waits_for() {
    let engine = engine("127.0.0.1", SameHost::Auto);
    let (a, b) = pair(&engine, &engine, 4096);
    let channel = b.channel;
    let (tell, woken) = std::sync::mpsc::channel();
    let sleeper = Arc::clone(&engine);
    std::thread::spawn(move || while tell.send(sleeper.wait_channel(channel).is_ok()).is_ok() {});
    for round in 0..20 {
        b.receive(round, &[b.sge(0, 8)]);
        engine.req_notify_cq(b.cq, false).unwrap();
        // Long enough to be asleep, most often; it must wake in any case.
        std::thread::sleep(std::time::Duration::from_millis(3));
        a.post(round, SendOp::Send, &[a.sge(0, 8)]);
        assert_eq!(woken.recv_timeout(PATIENCE), Ok(true), "round {round}");
        assert_eq!(b.poll().wr_id, round);
        a.poll();
    }
}

#[test]
fn a_non_blocking_channel_never_waits() {
    let engine = engine("127.0.0.1", SameHost::Auto);
    let (_, fd) = engine.open_context().unwrap();
    let (channel, channel_fd) = engine.create_channel().unwrap();
    assert!(fd > 2 && channel_fd > 2);
    // SAFETY: sets a flag of a descriptor; no memory is involved.
    unsafe { libc::fcntl(channel_fd, libc::F_SETFL, libc::O_NONBLOCK) };
    assert!(matches!(engine.wait_channel(channel), Err(EngineError::WouldBlock)));
}

#[test]
fn a_destroyed_peer_is_noticed() {
    for same_host in [SameHost::Never, SameHost::Auto] {
        let (a, b) = (engine("127.0.0.1", same_host), engine("127.0.0.1", same_host));
        let (a, b) = pair(&a, &b, 1 << 20);
        exercise_once(&a, &b);
        b.engine.destroy_qp(b.qp).unwrap();
        // Until word of it arrives, the target's memory may still be written directly.
        let end = Instant::now() + PATIENCE;
        loop {
            a.post(9, SendOp::Write { addr: b.addr(0), rkey: b.rkey() }, &[a.sge(0, 8)]);
            if a.poll().status != WcStatus::Success {
                break;
            }
            assert!(Instant::now() < end, "still connected");
        }
    }
}

fn exercise_once(a: &Node, b: &Node) {
    a.post(1, SendOp::Write { addr: b.addr(0), rkey: b.rkey() }, &[a.sge(0, 8)]);
    assert_eq!(a.poll().status, WcStatus::Success);
}

/// An engine in the strict mode, which holds writes back for so long.
fn strict_engine(address: &str, same_host: SameHost, hold: Duration) -> Arc<Engine> {
    let strict_order = Some(StrictOrder { order: WriteOrder::Reverse, hold });
    let address = Some(address.parse().unwrap());
    let strict = Some(StrictMode::Fail);
    let (strict_log, arena_bytes) = (Some("/dev/null".into()), 64 << 20);
    let config = Config { address, same_host, arena_bytes, strict, ..Config::default() };
    Engine::open(Config { strict_log, strict_order, ..config }).unwrap()
}

/// The last byte of a write is there, and the first ones are not until something orders them; nobody but the
/// helper of the target does anything. Then a program that has the writer's completion finds all of them.
fn placed_out_of_order(same_host: SameHost) {
    let (ms, minute) = (Duration::from_millis(1), Duration::from_secs(60));
    let (a, b) = (engine("127.0.0.1", same_host), strict_engine("127.0.0.1", same_host, minute));
    let (a, b) = pair(&a, &b, 1 << 20);
    let pattern: Vec<u8> = (0..100_000u32).map(|i| (i * 7) as u8 | 1).collect();
    a.fill(0, &pattern);
    let write = SendOp::Write { addr: b.addr(0), rkey: b.rkey() };
    a.post(1, write, &[a.sge(0, 100_000)]);
    let end = Instant::now() + PATIENCE;
    while b.bytes(99_999, 1) == [0] {
        assert!(Instant::now() < end, "the last byte never came");
    }
    assert_eq!(b.bytes(0, 8), [0; 8]);
    b.receive(7, &[]);
    a.post(2, SendOp::Send, &[]);
    assert_eq!((a.poll().wr_id, a.poll().wr_id, b.poll().wr_id), (1, 2, 7));
    assert!(b.bytes(0, 100_000) == pattern);
    assert!(!b.engine.strict_verdict(), "the program has done nothing wrong");

    b.fill(0, &[0; 100_000]);
    a.post(1, write, &[a.sge(0, 100_000)]);
    while b.bytes(99_999, 1) == [0] {
        assert!(Instant::now() < end, "the last byte never came");
    }
    b.fill(99_999, &[0]);
    b.receive(7, &[]);
    a.post(2, SendOp::Send, &[]);
    assert_eq!((a.poll().wr_id, a.poll().wr_id, b.poll().wr_id), (1, 2, 7));
    assert!(b.engine.strict_verdict(), "it took the last byte for the end");

    let (a, b) = (engine("127.0.0.1", same_host), strict_engine("127.0.0.1", same_host, ms));
    let (a, b) = pair(&a, &b, 4 << 20);
    exercise(&a, &b);
    exercise(&b, &a);
    flood(&a, &b);
    assert!(!b.engine.strict_verdict(), "nor have those that wait for completions");
}

#[test]
fn writes_are_placed_out_of_order_over_tcp() {
    placed_out_of_order(SameHost::Never);
}

#[test]
fn writes_are_placed_out_of_order_over_links() {
    placed_out_of_order(SameHost::Auto);
}
