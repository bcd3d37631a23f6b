//! A process that is stopped, by a debugger or SIGSTOP, is not a dead host: what its peers ask of it waits.

use std::time::{Duration, Instant};

use crate::common::actor::{Actor, PART};
use crate::common::{Node, PATIENCE, TIMEOUT, connect_with, engine};
use crate::space::{inside, ip};
use quipu_host::SameHost;
use quipu_host::nic::{Completion, QpNum, SendOp, WcStatus};

/// Over TCP the silence of a host is limited to this at least.
const LIMIT: Duration = Duration::from_secs(3);
/// Longer than that, and than queue pairs with these timeouts try to reach a peer.
const STOPPED: Duration = Duration::from_millis(4500);
/// More than sockets hold.
const BULK: u32 = 4 << 20;
const BYTES: usize = 2 * BULK as usize;

fn mode(part: &str) -> SameHost {
    if part.contains("tcp") { SameHost::Never } else { SameHost::Auto }
}

fn numbers_of_parent() -> Vec<u64> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.split_whitespace().map(|n| n.parse().unwrap()).collect()
}

/// The child's side: the peer that is stopped. Its address is the greater one, so that it is called.
#[test]
fn child() {
    let Ok(part) = std::env::var(PART) else { return };
    let engine = engine("127.0.0.2", mode(&part));
    let node = Node::new(&engine, BYTES);
    println!("QUIPU {} {} {}", node.num.0, node.addr(0), node.rkey());
    let parent = numbers_of_parent();
    node.connect("127.0.0.1".parse::<std::net::IpAddr>().unwrap().into(), QpNum(parent[0] as u32));
    for wr_id in 0..4 {
        node.receive(wr_id, &[node.sge(0, BULK)]);
    }
    println!("CONNECTED");
    numbers_of_parent();
}

/// A peer in a child process, and a node that is not connected to it yet.
struct Peer {
    node: Node,
    actor: Actor,
    num: QpNum,
    addr: u64,
    rkey: u32,
}

impl Peer {
    fn new(part: &str) -> Self {
        let engine = engine("127.0.0.1", mode(part));
        let node = Node::new(&engine, BYTES);
        let mut actor = Actor::start(module_path!(), part, |_| {});
        let told = actor.hear("QUIPU ");
        actor.tell(&[node.num.0.into()]);
        actor.hear("CONNECTED");
        Self { node, actor, num: QpNum(told[0] as u32), addr: told[1], rkey: told[2] as u32 }
    }

    fn connect(&self) {
        self.connect_with(TIMEOUT);
    }

    fn connect_with(&self, timeout: u8) {
        let gid = "127.0.0.2".parse::<std::net::IpAddr>().unwrap().into();
        connect_with(&self.node.engine, self.node.qp, gid, self.num, timeout);
    }

    fn signal(&self, signal: i32) {
        // SAFETY: takes integers only. The child has not been waited for.
        assert_eq!(unsafe { libc::kill(self.actor.child.id() as i32, signal) }, 0);
    }

    /// Stops the process, and waits until all of its threads are.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let (mut status, pid) = (0, self.actor.child.id() as i32);
        // SAFETY: the kernel writes an integer to a live variable. A child that stops is not reaped.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::WUNTRACED) }, pid);
        assert!(libc::WIFSTOPPED(status));
    }

    /// A write of `len` bytes, a read and a send.
    fn request(&self, first: u64, len: u32) {
        let (addr, rkey) = (self.addr, self.rkey);
        self.node.post(first, SendOp::Write { addr, rkey }, &[self.node.sge(0, len)]);
        self.node.post(first + 1, SendOp::Read { addr, rkey }, &[self.node.sge(0, 64)]);
        self.node.post(first + 2, SendOp::Send, &[self.node.sge(0, len)]);
    }

    /// What completes within so long.
    fn completions(&self, within: Duration) -> Vec<(u64, WcStatus)> {
        let mut out = [Completion::default()];
        let (mut done, end) = (Vec::new(), Instant::now() + within);
        while Instant::now() < end {
            match self.node.engine.poll_cq(self.node.cq, &mut out).unwrap() {
                0 => std::thread::sleep(Duration::from_millis(1)),
                _ => done.push((out[0].wr_id, out[0].status)),
            }
        }
        done
    }

    /// The next so many completions.
    fn next(&self, count: usize) -> Vec<(u64, WcStatus)> {
        let next = |_| {
            let completion = self.node.poll();
            (completion.wr_id, completion.status)
        };
        (0..count).map(next).collect()
    }
}

/// Its process is stopped for longer than all limits, then goes on.
fn outlived(part: &str, connected: bool, len: u32) {
    let peer = Peer::new(part);
    if connected {
        peer.connect();
        peer.request(0, 64);
        assert_eq!(peer.next(3), [0, 1, 2].map(|wr_id| (wr_id, WcStatus::Success)));
    }
    peer.stop();
    if !connected {
        // A peer that cannot be reached is given up after 134 ms.
        peer.connect_with(10);
    }
    peer.request(10, len);
    let early = peer.completions(STOPPED);
    // On one host writes and reads need nothing of the peer's process, once it is connected.
    let alone = connected && !part.contains("tcp");
    let expected = [10, 11].map(|wr_id| (wr_id, WcStatus::Success));
    assert_eq!(early, expected[..if alone { 2 } else { 0 }], "{part}");
    peer.signal(libc::SIGCONT);
    let done = [early.clone(), peer.next(3 - early.len())].concat();
    assert_eq!(done, [10, 11, 12].map(|wr_id| (wr_id, WcStatus::Success)), "{part}");
}

#[test]
fn requests_over_tcp_wait_for_a_process_that_is_stopped() {
    outlived("tcp", true, 64);
}

/// Its socket is full, so that its window is closed.
#[test]
fn long_requests_over_tcp_wait_for_a_process_that_is_stopped() {
    outlived("tcp", true, BULK);
}

#[test]
fn requests_over_a_link_wait_for_a_process_that_is_stopped() {
    outlived("link", true, BULK);
}

#[test]
fn requests_wait_for_a_process_that_is_stopped_before_it_is_connected() {
    std::thread::scope(|scope| {
        for part in ["tcp", "link"] {
            scope.spawn(move || outlived(part, false, 64));
        }
    });
}

/// How long requests are repeated to a peer that has left.
const REPEATS: Duration = Duration::from_nanos((4096 << TIMEOUT) * 8);

fn assert_fails_within(peer: &Peer, limit: Duration, part: &str) {
    let since = Instant::now();
    let first = peer.next(1)[0];
    assert_eq!(first.1, WcStatus::RetryExcErr, "{part}");
    assert!(since.elapsed() < limit + PATIENCE / 4, "{part}: {:?}", since.elapsed());
}

#[test]
fn requests_fail_when_the_stopped_process_is_killed() {
    for part in ["tcp", "link"] {
        for connected in [true, false] {
            let peer = Peer::new(part);
            if connected {
                peer.connect();
                peer.request(0, 64);
                peer.next(3);
            }
            peer.stop();
            if !connected {
                peer.connect();
            }
            peer.node.post(10, SendOp::Send, &[peer.node.sge(0, 64)]);
            assert_eq!(peer.completions(Duration::from_millis(300)), [], "{part}");
            peer.signal(libc::SIGKILL);
            // One that was not connected is tried again for four times as long.
            assert_fails_within(&peer, if connected { REPEATS } else { 4 * REPEATS }, part);
        }
    }
}

/// The network of both is cut while the process is stopped: nothing is answered any more.
#[test]
fn requests_fail_when_the_host_of_the_stopped_process_is_silent() {
    if !inside("stopped::requests_fail_when_the_host_of_the_stopped_process_is_silent") {
        return;
    }
    for len in [64, BULK] {
        ip("link set lo up");
        let peer = Peer::new("tcp");
        peer.connect();
        peer.request(0, 64);
        peer.next(3);
        peer.stop();
        peer.request(10, len);
        assert_eq!(peer.completions(Duration::from_millis(500)), [], "{len}");
        ip("link set lo down");
        // TCP asks a full peer again after 1.6 s and 3.2 s.
        assert_fails_within(&peer, LIMIT + Duration::from_secs(3), "cut");
    }
}
