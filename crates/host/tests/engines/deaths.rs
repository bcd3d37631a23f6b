//! What happens to an engine when processes die or fork.

use std::time::Instant;

use crate::common::actor::{Actor, PART};
use crate::common::{Node, PATIENCE, engine};
use quipu_host::nic::{QpNum, SendOp, WcStatus};
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
    let node = Node::new(&engine, 1 << 20);
    println!("QUIPU {} {} {}", node.num.0, node.addr(0), node.rkey());
    let parent = listen_to_parent();
    node.connect(engine.gid(), QpNum(parent[0] as u32));
    println!("CONNECTED");
    listen_to_parent();
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

fn killed(part: &str) {
    let (node, mut actor, op) = with_target(part);
    assert_eq!(write(&node, op), WcStatus::Success);
    // Requests are on their way when the target dies.
    for wr_id in 0..64 {
        node.post(wr_id, op, &[node.sge(0, 64 * 1024)]);
    }
    actor.child.kill().unwrap();
    actor.child.wait().unwrap();
    let mut last = WcStatus::Success;
    for _ in 0..64 {
        last = node.poll().status;
    }
    let end = Instant::now() + PATIENCE;
    while last == WcStatus::Success {
        assert!(Instant::now() < end, "the peer's death goes unnoticed");
        last = write(&node, op);
    }
}

#[test]
fn a_killed_peer_is_noticed_over_tcp() {
    killed("tcp");
}

#[test]
fn a_killed_peer_is_noticed_over_a_link() {
    killed("link");
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
