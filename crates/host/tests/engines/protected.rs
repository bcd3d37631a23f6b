//! Registered memory that the program protects, and opens when it is touched, as collectors of garbage and
//! those who track what was written do: the kernel refuses it, a copy finds it open.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::actor::{Actor, PART};
use crate::common::{Node, engine, pair};
use quipu_host::SameHost;
use quipu_host::nic::{SendOp, WcStatus};

const BYTES: usize = 1 << 20;
const PAGE: usize = 4096;

/// The page that is closed.
static CLOSED: AtomicUsize = AtomicUsize::new(0);
/// How often it was opened.
static OPENED: AtomicUsize = AtomicUsize::new(0);

fn protect(page: usize, rights: i32) {
    // SAFETY: the page is in the middle of a node's memory, which lives as long as the process.
    let done = unsafe { libc::mprotect(std::ptr::with_exposed_provenance_mut(page), PAGE, rights) };
    assert_eq!(done, 0);
}

extern "C" fn touched(signal: i32, info: *const libc::siginfo_t, _: *const libc::c_void) {
    // SAFETY: the kernel passes what it knows of the fault, which has an address.
    let addr = unsafe { (*info).si_addr() }.addr();
    let page = CLOSED.load(Ordering::SeqCst);
    if (page..page + PAGE).contains(&addr) {
        OPENED.fetch_add(1, Ordering::SeqCst);
        protect(page, libc::PROT_READ | libc::PROT_WRITE);
    } else {
        // SAFETY: takes integers only. The access is repeated, and ends the process.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

fn open_what_is_touched() {
    // SAFETY: sigaction is plain data, for which all zeroes is a valid value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    action.sa_sigaction = (touched as *const ()).expose_provenance();
    // SAFETY: the handler has the signature that SA_SIGINFO wants, and calls only what handlers may.
    let set = unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0);
}

/// Does something while a page in the middle of a node's memory is closed, which opens it.
fn closed(node: &Node, act: impl FnOnce()) {
    let page = (node.memory.addr() + BYTES / 2) & !(PAGE - 1);
    let before = OPENED.load(Ordering::SeqCst);
    CLOSED.store(page, Ordering::SeqCst);
    protect(page, libc::PROT_NONE);
    act();
    assert_eq!(OPENED.load(Ordering::SeqCst), before + 1);
}

/// The child's side: handlers are the whole process's.
#[test]
fn child() {
    if std::env::var(PART).is_err() {
        return;
    }
    open_what_is_touched();
    for same_host in [SameHost::Never, SameHost::Auto] {
        moves_all(same_host);
    }
    println!("QUIPU");
}

fn moves_all(same_host: SameHost) {
    let [one, two] = ["127.0.0.1", "127.0.0.2"].map(|at| engine(at, same_host));
    let (a, b) = pair(&one, &two, BYTES);
    let pattern: Vec<u8> = (0..BYTES as u32).map(|i| (i * 7 + i / 251) as u8).collect();
    a.fill(0, &pattern);
    let all = BYTES as u32;
    let done = |node: &Node| assert_eq!(node.poll().status, WcStatus::Success);

    closed(&b, || {
        a.post(1, SendOp::Write { addr: b.addr(0), rkey: b.rkey() }, &[a.sge(0, all)]);
        done(&a);
    });
    assert!(b.bytes(0, BYTES) == pattern);

    b.fill(0, &vec![0; BYTES]);
    b.receive(2, &[b.sge(0, all)]);
    closed(&a, || {
        a.post(3, SendOp::Send, &[a.sge(0, all)]);
        done(&a);
        done(&b);
    });
    assert!(b.bytes(0, BYTES) == pattern);

    a.fill(0, &vec![0; BYTES]);
    closed(&a, || {
        a.post(4, SendOp::Read { addr: b.addr(0), rkey: b.rkey() }, &[a.sge(0, all)]);
        done(&a);
    });
    assert!(a.bytes(0, BYTES) == pattern);
}

#[test]
fn memory_that_opens_when_it_is_touched_is_sent_and_received() {
    Actor::start(module_path!(), "target", |_| {}).hear("QUIPU");
}
