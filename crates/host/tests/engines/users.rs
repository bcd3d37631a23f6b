//! Two users on one machine cannot reach each other's memory.
//!
//! The test becomes two users, which only root may; everywhere else it says that it was skipped.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::common::actor::{Actor, PART};
use crate::common::{Node, engine, mapped};
use quipu_host::SameHost;
use quipu_host::nic::{QpNum, SendOp, WcStatus};

/// Numbers that no account has.
const OWNER: u32 = 61_001;
const STRANGER: u32 = 61_002;
const HERE: &str = "127.0.0.1";
/// Where somebody listens in the place of an engine: greater than `HERE`, so that it is called.
const SQUATTED: &str = "127.0.0.7";
/// The first word of whoever calls an engine (specs/quipu-channel.md, 1), by the name of sixteen `x`.
const KNOCK: &[u8] = b"\x01QPLK\x08\0\0\0xxxxxxxxxxxxxxxx";
/// What an engine that lets nobody in may take to say so, in ms.
const PATIENCE_MS: i32 = 20_000;

/// Whether this process may become somebody else, who may run this file.
fn may_become_others() -> bool {
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: only root can become two users");
        return false;
    }
    let file = std::env::current_exe().unwrap();
    let closed = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 1 == 0;
    if let Some(path) = file.ancestors().find(|path| closed(path)) {
        println!("SKIPPED: other users may not pass {}", path.display());
        return false;
    }
    true
}

/// A child that is some other user, and (as std sees to) in no groups of root's.
fn actor(part: &str, user: u32) -> Actor {
    Actor::start(module_path!(), part, |command: &mut Command| {
        command.current_dir("/").gid(user).uid(user);
    })
}

fn hear() -> Vec<u64> {
    let mut line = String::new();
    io::stdin().read_line(&mut line).unwrap();
    line.split_whitespace().map(|n| n.parse().unwrap()).collect()
}

#[test]
fn child() {
    match std::env::var(PART).as_deref() {
        Ok("node") => be_node(),
        Ok("intruder") => intrude(),
        Ok("squatter") => squat(),
        _ => {}
    }
}

/// A node that another one connects to; told whom to write to, it does.
fn be_node() {
    let engine = engine(HERE, SameHost::Auto);
    let node = Node::new(&engine, 1 << 20);
    node.fill(0, b"the owner's secret");
    println!("NODE {} {} {}", node.num.0, node.addr(0), node.rkey());
    let peer = hear();
    node.connect(peer_gid(peer[0]), QpNum(peer[1] as u32));
    if let [_, _, addr, rkey] = peer[..] {
        node.post(1, SendOp::Write { addr, rkey: rkey as u32 }, &[node.sge(0, 64 * 1024)]);
        assert_eq!(node.poll().status, WcStatus::Success);
    }
    println!("DONE");
    hear();
}

/// The GID of 127.0.0.n.
fn peer_gid(last: u64) -> quipu_host::nic::Gid {
    std::net::IpAddr::from([127, 0, 0, last as u8]).into()
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A socket as engines of one host have them, and the abstract address of the engine at an IP address.
fn link_socket(ip: &str, port: u64) -> (OwnedFd, libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: takes integers; the descriptor is this function's alone. All zeroes is a valid address.
    let (fd, mut name) = unsafe {
        let fd = checked(libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0)).unwrap();
        (OwnedFd::from_raw_fd(fd), std::mem::zeroed::<libc::sockaddr_un>())
    };
    name.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let text = format!("quipu/{ip}/{port}");
    for (to, from) in name.sun_path[1..].iter_mut().zip(text.bytes()) {
        *to = from as libc::c_char;
    }
    (fd, name, (size_of::<libc::sa_family_t>() + 1 + text.len()) as libc::socklen_t)
}

/// Bytes of the next message; 0: the other end has closed, and said nothing.
fn next_message(fd: &OwnedFd) -> usize {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut bytes = [0u8; 256];
    // SAFETY: one live entry, and a live buffer of the length given.
    unsafe {
        assert_eq!(libc::poll(&raw mut poll, 1, PATIENCE_MS), 1, "neither a word nor the end");
        libc::recv(fd.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0).max(0) as usize
    }
}

/// Tries every way into the memory of an engine's process; says which of them opened.
fn intrude() {
    println!("READY");
    let told = hear();
    let (pid, number, addr) = (told[0], told[1], told[2]);
    let (fd, name, len) = link_socket(HERE, number >> 8);
    // SAFETY: a live address and a live buffer, with their lengths.
    let heard = unsafe {
        checked(libc::connect(fd.as_raw_fd(), (&raw const name).cast(), len)).unwrap();
        libc::send(fd.as_raw_fd(), KNOCK.as_ptr().cast(), KNOCK.len(), libc::MSG_NOSIGNAL);
        next_message(&fd)
    };
    let mut secret = [0u8; 18];
    let here = libc::iovec { iov_base: secret.as_mut_ptr().cast(), iov_len: secret.len() };
    let there = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: secret.len() };
    // SAFETY: `here` is a live buffer; the kernel checks the other process's address.
    let read = unsafe { libc::process_vm_readv(pid as i32, &raw const here, 1, &there, 1, 0) };
    let opened = |path: String| u64::from(fs::File::open(path).is_ok());
    let listed = |path: String| u64::from(fs::read_dir(path).is_ok());
    println!(
        "TRIED {} {} {} {} {} {}",
        u64::from(heard > 0),
        u64::from(read > 0),
        opened(format!("/proc/{pid}/mem")),
        listed(format!("/proc/{pid}/fd")),
        listed(format!("/proc/{pid}/map_files")),
        // Where counters are, if the owner has no folder under /run/user.
        listed(format!("/dev/shm/quipu-{OWNER}")),
    );
    hear();
}

/// Listens where an engine would, and says how long the first word of the caller is.
fn squat() {
    let port = hear()[0];
    let (fd, name, len) = link_socket(SQUATTED, port);
    // SAFETY: a live address with its length; null: nobody wants to know the caller's address.
    let caller = unsafe {
        checked(libc::bind(fd.as_raw_fd(), (&raw const name).cast(), len)).unwrap();
        checked(libc::listen(fd.as_raw_fd(), 8)).unwrap();
        println!("READY");
        let null = std::ptr::null_mut();
        OwnedFd::from_raw_fd(checked(libc::accept(fd.as_raw_fd(), null, null.cast())).unwrap())
    };
    println!("HEARD {}", next_message(&caller));
    hear();
}

/// The inodes of memory files of engines that a process has mapped.
fn shared_files(actor: &Actor) -> BTreeSet<String> {
    mapped(&actor.child.id().to_string(), "memfd:quipu")
}

/// Has a node of `user` write to one of the owner; the memory files that both have mapped then.
fn in_common_with(user: u32) -> usize {
    let (mut owner, mut other) = (actor("node", OWNER), actor("node", user));
    let (target, source) = (owner.hear("NODE "), other.hear("NODE "));
    owner.tell(&[1, source[0]]);
    owner.hear("DONE");
    other.tell(&[1, target[0], target[1], target[2]]);
    // Written it has, whichever way.
    other.hear("DONE");
    shared_files(&owner).intersection(&shared_files(&other)).count()
}

#[test]
fn engines_of_two_users_share_no_memory() {
    if !may_become_others() {
        return;
    }
    assert!(in_common_with(OWNER) > 0, "one user's engines do, so this is how to find out");
    assert_eq!(in_common_with(STRANGER), 0);
}

/// What an intruder of `user` has got at.
fn opened_to(user: u32) -> Vec<u64> {
    let mut owner = actor("node", OWNER);
    let node = owner.hear("NODE ");
    let mut intruder = actor("intruder", user);
    intruder.hear("READY");
    intruder.tell(&[owner.child.id().into(), node[0], node[1]]);
    intruder.hear("TRIED ")
}

#[test]
fn nobody_else_gets_into_an_engine() {
    if !may_become_others() {
        return;
    }
    let own = opened_to(OWNER);
    assert_eq!(own[0], 1, "the owner is introduced, so this is how to ask");
    assert_eq!(opened_to(STRANGER), [0; 6]);
}

/// How much whoever listens in the place of an engine hears, if he is `user`.
fn told_by_caller(user: u32) -> u64 {
    const NUMBER: u64 = 9 << 8;
    let mut squatter = actor("squatter", user);
    squatter.tell(&[NUMBER >> 8]);
    squatter.hear("READY");
    let mut owner = actor("node", OWNER);
    owner.hear("NODE ");
    owner.tell(&[7, NUMBER]);
    squatter.hear("HEARD ")[0]
}

#[test]
fn nobody_else_is_told_anything_by_a_caller() {
    if !may_become_others() {
        return;
    }
    assert!(told_by_caller(OWNER) > 0, "the owner is told, so this is how to listen");
    assert_eq!(told_by_caller(STRANGER), 0);
}
