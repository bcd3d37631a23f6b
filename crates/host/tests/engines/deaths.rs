//! What happens to an engine when processes die or fork.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::actor::{Actor, PART};
use crate::common::{Node, PATIENCE, TIMEOUT, engine, pair_with};
use quipu_host::nic::{
    Completion, Fault, Payload, QpAttr, QpAttrMask, QpNum, QpState, SendFlags, SendOp, SendWr, To,
    WcStatus,
};
use quipu_host::{EngineError, SameHost};

fn listen_to_parent() -> Vec<u64> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.split_whitespace().map(|n| n.parse().unwrap()).collect()
}

fn mode(part: &str) -> SameHost {
    if part.contains("tcp") { SameHost::Never } else { SameHost::Auto }
}

/// The child's side: a target that does nothing, until its parent's end of the pipe closes.
#[test]
fn child() {
    let Ok(part) = std::env::var(PART) else { return };
    let engine = engine("127.0.0.1", mode(&part));
    let node = match part.contains("mapped") {
        true => Node::mapped(&engine, 1 << 20),
        false => Node::new(&engine, 1 << 20),
    };
    println!("QUIPU {} {} {}", node.num.0, node.addr(0), node.rkey());
    let parent = listen_to_parent();
    node.connect(engine.gid(), QpNum(parent[0] as u32));
    if part.contains("forks") {
        leave_a_child();
    }
    println!("CONNECTED");
    if !listen_to_parent().is_empty() {
        engine.shutdown_flush();
        listen_to_parent();
    }
}

/// Leaves a child that has all descriptors of this process, until the end of the pipe is closed.
fn leave_a_child() {
    // SAFETY: the child calls only what is async-signal-safe.
    if unsafe { libc::fork() } == 0 {
        let mut end = libc::pollfd { fd: 0, events: 0, revents: 0 };
        // SAFETY: asks about the one descriptor; then ends the child at once.
        unsafe {
            while libc::poll(&raw mut end, 1, -1) < 1 {}
            libc::_exit(0)
        }
    }
}

/// A node connected to a child, and where the child's memory is.
fn with_target(part: &str) -> (Node, Actor, SendOp) {
    let engine = engine("127.0.0.1", mode(part));
    let node = Node::new(&engine, 1 << 20);
    let mut actor = Actor::start(module_path!(), part, |_| {});
    let told = actor.hear("QUIPU ");
    actor.tell(&[node.num.0.into()]);
    node.connect(engine.gid(), QpNum(told[0] as u32));
    actor.hear("CONNECTED");
    (node, actor, SendOp::Write { addr: told[1], rkey: told[2] as u32 })
}

fn write(node: &Node, op: SendOp) -> WcStatus {
    node.post(1, op, &[node.sge(0, 64 * 1024)]);
    node.poll().status
}

/// How long requests are repeated with a timeout: 1 + 7 times.
const fn repeats(timeout: u8) -> Duration {
    Duration::from_nanos((4096 << timeout) * 8)
}

/// No test waits much longer.
const REPEATS: Duration = repeats(TIMEOUT);

/// How long it took to fail is the time of the queue pair, or a little more.
fn assert_repeated(since: Instant) {
    let took = since.elapsed();
    assert!(took >= REPEATS && took < REPEATS + PATIENCE / 4, "{took:?}");
}

fn killed(part: &str) {
    let (node, mut actor, op) = with_target(part);
    assert_eq!(write(&node, op), WcStatus::Success);
    // Requests are on their way when the target dies.
    for wr_id in 0..64 {
        node.post(wr_id, op, &[node.sge(0, 64 * 1024)]);
    }
    let since = Instant::now();
    actor.child.kill().unwrap();
    actor.child.wait().unwrap();
    let ends: Vec<WcStatus> = (0..64).map(|_| node.poll().status).collect();
    let mut failed = ends.into_iter().find(|&status| status != WcStatus::Success);
    let end = Instant::now() + PATIENCE;
    while failed.is_none() {
        assert!(Instant::now() < end, "the peer's death goes unnoticed");
        failed = Some(write(&node, op)).filter(|&status| status != WcStatus::Success);
    }
    assert_eq!(failed, Some(WcStatus::RetryExcErr));
    assert_repeated(since);
}

#[test]
fn a_killed_peer_is_noticed_over_tcp() {
    killed("tcp");
}

#[test]
fn a_killed_peer_is_noticed_over_a_link() {
    killed("link");
}

/// Kills a target while this thread works, since the engine would look for itself while nobody does; what
/// comes of the work, which is to come within so many times after the death.
fn kill_beside<T>(
    actor: &mut Actor,
    times: usize,
    mut work: impl FnMut() -> Option<T>,
) -> Option<T> {
    let dead = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            actor.child.kill().unwrap();
            actor.child.wait().unwrap();
            dead.store(true, Ordering::Relaxed);
        });
        while !dead.load(Ordering::Relaxed) {
            let come = work();
            if come.is_some() {
                return come;
            }
        }
        (0..times).find_map(|_| work())
    })
}

/// A program that always finds completions, as its writes are executed while it posts them, does not get on
/// with them for long, however much each of its polls stands for.
#[test]
fn a_killed_peer_is_noticed_by_who_writes_to_memory_that_is_mapped() {
    const AT_ONCE: usize = 16;
    let (node, mut actor, op) = with_target("link, mapped");
    let write = || {
        (0..AT_ONCE).for_each(|_| node.post(1, op, &[node.sge(0, 1 << 20)]));
        let (mut done, mut out) = (Vec::new(), [Completion::default(); AT_ONCE]);
        let end = Instant::now() + PATIENCE;
        while done.len() < AT_ONCE {
            assert!(Instant::now() < end, "no completions");
            let found = node.engine.poll_cq(node.cq, &mut out).unwrap();
            done.extend(out[..found].iter().map(|completion| completion.status));
        }
        done.into_iter().find(|&status| status != WcStatus::Success)
    };
    assert!((0..100).all(|_| write().is_none()));
    // The descriptors are asked behind 16 polls that find something.
    let failed = kill_beside(&mut actor, 3 * 64, write);
    assert_eq!(failed, Some(WcStatus::RetryExcErr));
}

/// Nor does one that does not even poll.
#[test]
fn a_killed_peer_is_noticed_by_who_writes_and_never_polls() {
    let (node, mut actor, op) = with_target("link, mapped");
    let list = [node.sge(0, 1 << 20)];
    let payload = Payload::Sges(&list);
    let request = SendWr { wr_id: 1, to: To::Peer, op, flags: SendFlags::empty(), payload };
    assert_eq!(write(&node, op), WcStatus::Success);
    let end = Instant::now() + PATIENCE;
    let full = kill_beside(&mut actor, usize::MAX, || {
        assert!(Instant::now() < end, "it goes on");
        node.engine.post_send(node.qp, &request).err()
    });
    assert!(matches!(full, Some(EngineError::Fault(Fault::QueueFull))), "{full:?}");
    assert_eq!(node.poll().status, WcStatus::RetryExcErr);
}

/// Peers are told of the end of an engine or a process, even where others still have its descriptors.
#[test]
fn the_end_is_noticed_though_a_child_has_the_sockets() {
    // A peer over TCP that is killed is as silent as over any socket that a child keeps.
    for (part, by_force) in [("link-forks", false), ("link-forks", true), ("tcp-forks", false)] {
        let (node, mut actor, op) = with_target(part);
        assert_eq!(write(&node, op), WcStatus::Success);
        // No receive is there, so that the peer has it when it ends.
        node.post(2, SendOp::Send, &[]);
        match by_force {
            true => actor.child.kill().unwrap(),
            false => actor.tell(&[0]),
        }
        let since = Instant::now();
        assert_eq!(node.poll().status, WcStatus::RetryExcErr, "{part} {by_force}");
        assert!(since.elapsed() < REPEATS + PATIENCE / 4);
    }
}

/// Two connected nodes: in two engines, which reach each other so, or in one.
fn two(same_host: Option<SameHost>) -> (Node, Node) {
    two_with(same_host, TIMEOUT)
}

/// The same with another timeout of requests.
fn two_with(same_host: Option<SameHost>, timeout: u8) -> (Node, Node) {
    let first = engine("127.0.0.1", same_host.unwrap_or(SameHost::Auto));
    match same_host {
        Some(same_host) => pair_with(&first, &engine("127.0.0.1", same_host), 4096, timeout),
        None => pair_with(&first, &first, 4096, timeout),
    }
}

const WAYS: [Option<SameHost>; 3] = [Some(SameHost::Auto), Some(SameHost::Never), None];

/// Also where nobody polls meanwhile: then a thread of the engine's keeps the time.
#[test]
fn a_request_to_a_queue_pair_that_has_left_is_repeated() {
    for way in WAYS {
        let (a, b) = two(way);
        for (node, wr_id) in [(&a, 1), (&b, 2)] {
            let other = if wr_id == 1 { &b } else { &a };
            other.receive(50, &[]);
            node.post(wr_id, SendOp::Send, &[]);
            assert_eq!((node.poll().status, other.poll().status), SUCCESSES, "{way:?}");
        }
        a.receive(51, &[a.sge(0, 64)]);
        b.post(3, SendOp::Send, &[b.sge(0, 8)]);
        b.poll();
        b.engine.destroy_qp(b.qp).unwrap();
        let since = Instant::now();
        a.post(4, SendOp::Send, &[]);
        let received = a.poll();
        assert_eq!((received.wr_id, received.status), (51, WcStatus::Success), "{way:?}");
        a.engine.req_notify_cq(a.cq, false).unwrap();
        a.engine.wait_channel_within(a.channel, Some(PATIENCE)).unwrap();
        let failed = a.poll();
        assert_eq!((failed.wr_id, failed.status), (4, WcStatus::RetryExcErr), "{way:?}");
        assert_repeated(since);
    }
}

/// Who waits for events does not call the engine, and hears of it all the same; so does the peer.
#[test]
fn a_request_whose_region_is_taken_back_fails_at_once() {
    let engines = [0; 2].map(|_| engine("127.0.0.1", SameHost::Auto));
    let (a, b) = pair_with(&engines[0], &engines[1], 1 << 20, TIMEOUT);
    b.receive(50, &[]);
    a.post(1, SendOp::Send, &[]);
    assert_eq!((a.poll().status, b.poll().status), SUCCESSES);
    a.engine.req_notify_cq(a.cq, false).unwrap();
    a.post(2, SendOp::Send, &[a.sge(0, 1 << 20)]);
    a.engine.dereg_mr(a.region.id).unwrap();
    let mut event = libc::pollfd { fd: a.channel_fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: asks about one descriptor.
    assert_eq!(unsafe { libc::poll(&raw mut event, 1, 0) }, 1);
    b.post(3, SendOp::Send, &[]);
    assert_eq!(b.poll().status, WcStatus::RetryExcErr);
    assert_eq!(a.poll().status, WcStatus::LocProtErr);
}

fn set_error(node: &Node) {
    let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
    node.engine.modify_qp(node.qp, &attr, QpAttrMask::STATE).unwrap();
}

const SUCCESSES: (WcStatus, WcStatus) = (WcStatus::Success, WcStatus::Success);

/// A card answers what has arrived, whatever its program does next.
#[test]
fn what_had_arrived_before_a_queue_pair_left_is_executed() {
    for way in WAYS {
        for round in 0..9 {
            let (a, b) = two(way);
            // Once the connection stands.
            b.receive(50, &[]);
            a.post(1, SendOp::Send, &[]);
            assert_eq!((a.poll().status, b.poll().status), SUCCESSES, "{way:?} {round}");
            // Nobody but this thread makes progress for an engine that is polled steadily.
            for _ in 0..1000 {
                assert_eq!(b.engine.poll_cq(b.cq, &mut [Completion::default()]).unwrap(), 0);
            }
            b.receive(51, &[]);
            a.post(2, SendOp::Send, &[]);
            match round % 3 {
                0 => drop(b.engine.destroy_qp(b.qp).unwrap()),
                1 => set_error(&b),
                // The end of the process.
                _ => b.engine.shutdown_flush(),
            };
            // The status would be another, had it been repeated without result.
            assert_eq!(a.poll().status, WcStatus::Success, "{way:?} {round}");
        }
    }
}

/// Nobody waits for a peer that has left but who wants to know.
#[test]
fn a_queue_pair_whose_peer_has_left_is_gone_at_once() {
    // Repeated for longer than any machine stops.
    const LONG: u8 = 19;
    for way in WAYS {
        let (a, b) = two_with(way, LONG);
        b.receive(50, &[]);
        a.post(1, SendOp::Send, &[]);
        assert_eq!((a.poll().status, b.poll().status), SUCCESSES, "{way:?}");
        b.engine.destroy_qp(b.qp).unwrap();
        a.post(2, SendOp::Send, &[]);
        let since = Instant::now();
        a.engine.destroy_qp(a.qp).unwrap();
        a.engine.destroy_cq(a.cq).unwrap();
        assert!(since.elapsed() < repeats(LONG), "{way:?}");
    }
}

#[test]
fn a_forked_child_is_told_that_the_engine_is_not_its_own() {
    let (node, _actor, op) = with_target("link");
    assert_eq!(write(&node, op), WcStatus::Success);
    // SAFETY: the child calls nothing but the engine (which refuses without locks or allocation)
    // and _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let refused = matches!(node.engine.alloc_pd(), Err(EngineError::EngineGone))
            && node.engine.poll_cq(node.cq, &mut []).is_err();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: waits for the child just made, and writes its status to a live variable.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0);
    assert_eq!(write(&node, op), WcStatus::Success);
}

#[test]
fn thousands_of_queue_pairs_fit_into_one_engine() {
    let engine = engine("127.0.0.1", SameHost::Auto);
    let node = Node::new(&engine, 4096);
    let init = quipu_host::nic::QpInit {
        pd: node.pd,
        send_cq: node.cq,
        recv_cq: node.cq,
        srq: None,
        cap: quipu_host::nic::QpCap { max_send_wr: 1, max_recv_wr: 1, ..Default::default() },
        qp_type: quipu_host::nic::QpType::Rc,
        sq_sig_all: false,
    };
    let mut numbers = std::collections::BTreeSet::new();
    for _ in 0..10_000 {
        let (_, number, _) = engine.create_qp(node.context, &init).unwrap();
        assert!(numbers.insert(number));
    }
}
