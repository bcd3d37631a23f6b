//! A program that has a function of its own in the place of the C library's `munmap`, as registration caches
//! have.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use quipu_host::SameHost;
use quipu_host::nic::{SendOp, WcStatus};

use crate::common::actor::{Actor, PART};
use crate::common::{PATIENCE, engine, mapped, pair};

/// How often the helper was seen to give back memory that peers share. The rest is what threads have.
static SEEN: AtomicUsize = AtomicUsize::new(0);

/// In the place of the C library's in all of this program.
#[unsafe(no_mangle)]
extern "C" fn munmap(address: *mut libc::c_void, len: usize) -> libc::c_int {
    let mut name = [0_u8; 16];
    // SAFETY: the kernel writes a name of 16 bytes at most; and unmaps what the caller owns.
    unsafe {
        libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr());
        if name.starts_with(b"quipu\0") && len >= 1 << 20 {
            SEEN.fetch_add(1, Ordering::Relaxed);
        }
        libc::syscall(libc::SYS_munmap, address, len) as libc::c_int
    }
}

/// Two engines meet by shared memory, and one goes: the helper of the other, as nobody polls, gives back what
/// was shared.
#[test]
fn child() {
    if std::env::var(PART).is_err() {
        return;
    }
    let (stays, goes) = (engine("127.0.0.1", SameHost::Auto), engine("127.0.0.1", SameHost::Auto));
    let (near, far) = pair(&stays, &goes, 1 << 20);
    near.post(1, SendOp::Write { addr: far.addr(0), rkey: far.rkey() }, &[near.sge(0, 64)]);
    assert_eq!(near.poll().status, WcStatus::Success);
    let shared = mapped("self", "quipu-arena");
    drop((far, goes));
    let patience = Instant::now() + PATIENCE;
    while mapped("self", "quipu-arena").len() == shared.len() {
        assert!(Instant::now() < patience, "{shared:?} is still there");
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("SEEN {}", SEEN.load(Ordering::Relaxed));
}

#[test]
fn the_helper_does_not_call_functions_that_the_program_may_have_replaced() {
    let mut actor = Actor::start(module_path!(), "helper", |_| {});
    assert_eq!(actor.hear("SEEN "), [0]);
}
