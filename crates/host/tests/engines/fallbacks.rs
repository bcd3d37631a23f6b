//! Engines in processes that may do little: what the kernel forbids, or what there is too little of, makes
//! something slower and nothing fail.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::net::IpAddr;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use crate::common::Node;
use crate::common::actor::{Actor, PART};
use crate::common::mapped;
use quipu_host::nic::{Gid, QpNum, SendOp, WcStatus};
use quipu_host::{Config, Engine, PeerMemoryPolicy, SameHost, SharedPages};

/// The child is called and never calls: its address is the greater one.
const PARENT: &str = "127.0.0.1";
const CHILD: &str = "127.0.0.2";
/// Queue pairs of the child.
const PAIRS: usize = 2;

fn config(address: &str, part: &str) -> Config {
    let policy = if part.contains("never") {
        PeerMemoryPolicy::Never
    } else {
        Config::default().peer_memory
    };
    Config {
        address: Some(address.parse().unwrap()),
        same_host: if part.contains("tcp") { SameHost::Never } else { SameHost::Auto },
        peer_memory: policy,
        shared_pages: match part.contains("shared") {
            true => SharedPages::Registered,
            false => SharedPages::Never,
        },
        arena_bytes: 64 << 20,
        ..Config::default()
    }
}

fn gid(address: &str) -> Gid {
    Gid::from(address.parse::<IpAddr>().unwrap())
}

/// How the child speaks with its parent, whatever becomes of its standard descriptors.
struct Talk {
    from_parent: BufReader<File>,
    to_parent: File,
}

impl Talk {
    fn new() -> Self {
        let copy = |fd| {
            // SAFETY: F_DUPFD_CLOEXEC takes an integer; the descriptor that it makes is ours alone.
            unsafe { File::from_raw_fd(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 10)) }
        };
        Self { from_parent: BufReader::new(copy(0)), to_parent: copy(1) }
    }

    fn say(&mut self, text: &str) {
        writeln!(self.to_parent, "{text}").unwrap();
    }

    /// The numbers that the parent says; none when it is gone.
    fn hear(&mut self) -> Vec<u64> {
        let mut line = String::new();
        self.from_parent.read_line(&mut line).unwrap();
        line.split_whitespace().map(|n| n.parse().unwrap()).collect()
    }
}

fn is_open(fd: i32) -> bool {
    // SAFETY: F_GETFD takes no pointer.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

fn limit_descriptors(soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: reads one live struct. It is also async-signal-safe.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes every descriptor that there is.
fn take_all_descriptors() -> Vec<OwnedFd> {
    // Those of the engine are among them.
    limit_descriptors(1100, 1100).unwrap();
    let null = OwnedFd::from(File::open("/dev/null").unwrap());
    let mut all = vec![null];
    while let Ok(more) = all[0].try_clone() {
        all.push(more);
    }
    all
}

/// The child's side: queue pairs whose program does nothing.
#[test]
fn child() {
    let Ok(part) = std::env::var(PART) else { return };
    let mut talk = Talk::new();
    if part.contains("closed") {
        // Not sooner: the start of a Rust program opens those that are closed.
        for fd in 0..3 {
            // SAFETY: nobody in this process uses them from here on.
            unsafe { libc::close(fd) };
        }
    }
    let engine = Engine::open(config(CHILD, &part)).unwrap();
    let nodes: Vec<_> = (0..PAIRS).map(|_| Node::new(&engine, 1 << 20)).collect();
    for node in &nodes {
        talk.say(&format!("NODE {} {} {}", node.num.0, node.addr(0), node.rkey()));
    }
    let numbers = talk.hear();
    if part.contains("low") {
        // No new ones within this limit. (With one of 0 poll(2) would take no descriptor.)
        limit_descriptors(3, 256).unwrap();
    }
    for (node, &number) in nodes.iter().zip(&numbers) {
        node.connect(gid(PARENT), QpNum(number as u32));
        node.receive(1, &[node.sge(0, 4096)]);
    }
    let all = if part.contains("full") { take_all_descriptors() } else { Vec::new() };
    talk.say("READY");
    talk.hear();
    drop(all);
    talk.say(&format!("OPEN {}", (0..3).filter(|&fd| is_open(fd)).count()));
    talk.hear();
}

/// A child with its queue pairs, and the parent's.
struct Scene {
    actor: Actor,
    /// The child's number, address and key for each.
    nodes: Vec<(Node, Vec<u64>)>,
}

impl Scene {
    fn new(part: &str, prepare: fn() -> io::Result<()>) -> Self {
        let engine = Engine::open(config(PARENT, part)).unwrap();
        let mut actor = Actor::start(module_path!(), part, |command: &mut Command| {
            // SAFETY: what the tests do here are system calls.
            unsafe { command.pre_exec(prepare) };
        });
        let node = |actor: &mut Actor| (Node::new(&engine, 1 << 20), actor.hear("NODE "));
        let nodes: Vec<_> = (0..PAIRS).map(|_| node(&mut actor)).collect();
        let numbers: Vec<_> = nodes.iter().map(|(node, _)| node.num.0.into()).collect();
        actor.tell(&numbers);
        actor.hear("READY");
        Self { actor, nodes }
    }

    fn connect(&self, index: usize) {
        let (node, told) = &self.nodes[index];
        node.connect(gid(CHILD), QpNum(told[0] as u32));
    }

    /// Every kind of operation, with a target that does nothing.
    fn exercise(&self, index: usize) {
        let (node, told) = &self.nodes[index];
        let (addr, rkey) = (told[1] + 4096, told[2] as u32);
        const LEN: u32 = 300_001;
        let pattern: Vec<u8> = (0..LEN).map(|i| (i * 7 + i / 251) as u8).collect();
        let done = |op, sge| {
            node.post(1, op, &[sge]);
            assert_eq!(node.poll().status, WcStatus::Success, "{op:?}");
        };
        node.fill(4096, &pattern);
        done(SendOp::Write { addr, rkey }, node.sge(4096, LEN));
        node.fill(4096, &vec![0; LEN as usize]);
        done(SendOp::Read { addr, rkey }, node.sge(4096, LEN));
        assert!(node.bytes(4096, LEN as usize) == pattern);
        done(SendOp::FetchAdd { addr, rkey, add: 1 }, node.sge(0, 8));
        assert_eq!(node.bytes(0, 8), pattern[..8]);
        done(SendOp::Send, node.sge(0, 1000));
    }

    /// Links that the child has been called for (proc_pid_net(5): state 3 is "connected").
    fn links(&self) -> usize {
        let port = self.nodes[0].1[0] >> 8;
        let name = format!("@quipu/{CHILD}/{port}");
        let sockets = std::fs::read_to_string("/proc/self/net/unix").unwrap();
        let linked = |line: &&str| {
            let fields: Vec<_> = line.split_whitespace().collect();
            fields.last() == Some(&name.as_str()) && fields[5] == "03"
        };
        sockets.lines().filter(linked).count()
    }

    /// Whether child or parent shows its directory to the other: then both have it mapped.
    fn shows_directory(&self) -> bool {
        self.both_map("memfd:quipu-directory")
    }

    /// Whether child or parent has pages of the other mapped.
    fn shares_pages(&self) -> bool {
        self.both_map("memfd:quipu-pages")
    }

    fn both_map(&self, name: &str) -> bool {
        let child = self.actor.child.id();
        !mapped(&child.to_string(), name).is_disjoint(&mapped("self", name))
    }
}

/// All that matters of a scene whose part is the whole difference.
fn works(part: &str, prepare: fn() -> io::Result<()>, links: usize) -> Scene {
    let mut scene = Scene::new(part, prepare);
    scene.connect(0);
    scene.exercise(0);
    assert_eq!(scene.links(), links);
    scene.actor.tell(&[]);
    let open = scene.actor.hear("OPEN ");
    assert_eq!(open, [if part.contains("closed") { 0 } else { 3 }]);
    scene
}

/// Has the kernel answer system calls with an error, as sandboxes do.
fn forbid(calls: &[libc::c_long], error: i32) -> io::Result<()> {
    let code = |parts: &[u32]| parts.iter().sum::<u32>() as u16;
    let act = |k| libc::sock_filter { code: code(&[libc::BPF_RET, libc::BPF_K]), jt: 0, jf: 0, k };
    let load = code(&[libc::BPF_LD, libc::BPF_W, libc::BPF_ABS]);
    let equal = code(&[libc::BPF_JMP, libc::BPF_JEQ, libc::BPF_K]);
    // No allocation: this runs between fork and exec.
    let mut filter = [act(libc::SECCOMP_RET_ALLOW); 8];
    filter[0] = libc::sock_filter { code: load, jt: 0, jf: 0, k: 0 };
    for (index, &call) in calls.iter().enumerate() {
        let at = 1 + 2 * index;
        filter[at] = libc::sock_filter { code: equal, jt: 0, jf: 1, k: call as u32 };
        filter[at + 1] = act(libc::SECCOMP_RET_ERRNO | error as u32);
    }
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel reads a program of live instructions, which it checks.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[test]
fn with_everything() {
    assert!(works("link", || Ok(()), 1).shows_directory());
}

#[test]
fn shared_pages() {
    let scene = works("shared link", || Ok(()), 1);
    assert!(scene.shows_directory() && scene.shares_pages());
    assert!(!works("link", || Ok(()), 1).shares_pages(), "where nobody asks for it");
    assert!(
        !works("never shared link", || Ok(()), 1).shares_pages(),
        "nor where memory is private"
    );
}

#[test]
fn shared_pages_that_a_sandbox_keeps_apart() {
    let scene = works("shared link", || forbid(&[libc::SYS_memfd_create], libc::ENOSYS), 0);
    assert!(!scene.shares_pages());
}

#[test]
fn peer_memory_switched_off() {
    assert!(!works("never", || Ok(()), 1).shows_directory());
}

#[test]
fn peer_memory_forbidden_by_a_sandbox() {
    let calls = || forbid(&[libc::SYS_process_vm_readv, libc::SYS_process_vm_writev], libc::EPERM);
    works("link", calls, 1);
}

#[test]
fn a_process_that_nobody_may_look_into() {
    // Set by programs that keep secrets; without CAP_SYS_PTRACE the peer is refused (ptrace(2)).
    works(
        "undumpable link",
        || {
            // SAFETY: takes integers only.
            unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
            Ok(())
        },
        1,
    );
}

#[test]
fn shared_memory_forbidden_by_a_sandbox() {
    works("link", || forbid(&[libc::SYS_memfd_create], libc::ENOSYS), 0);
}

#[test]
fn standard_descriptors_closed() {
    works("closed link", || Ok(()), 1);
    works("closed tcp", || Ok(()), 0);
}

#[test]
fn few_descriptors_until_more_are_asked_for() {
    works("low link", || Ok(()), 1);
    works("low tcp", || Ok(()), 0);
}

#[test]
fn no_descriptor_left_for_a_while() {
    let mut scene = Scene::new("full link", || Ok(()));
    scene.connect(0);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(scene.links(), 0);
    scene.actor.tell(&[]);
    scene.actor.hear("OPEN ");
    // Anyone who comes later is not refused for what happened before.
    scene.connect(1);
    scene.exercise(1);
    assert_eq!(scene.links(), 1);
    scene.exercise(0);
}
