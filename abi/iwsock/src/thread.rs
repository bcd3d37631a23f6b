//! The thread that makes progress for the sockets that want it: one for the process.

use std::cell::RefCell;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use libc::c_int;
use quipu_cabi::Errno;

use crate::socket::Socket;
use crate::sys;

static SOCKETS: Mutex<Vec<Arc<Socket>>> = Mutex::new(Vec::new());
/// An eventfd that wakes the thread; -1 before it is started.
static BELL: AtomicI32 = AtomicI32::new(-1);

fn sockets() -> List {
    SOCKETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lock of the list.
type List = MutexGuard<'static, Vec<Arc<Socket>>>;

thread_local! {
    /// What the thread that forks holds meanwhile.
    static HELD: RefCell<Option<List>> = const { RefCell::new(None) };
}

/// Asks to be told of children: the thread is not there.
fn watch_forks() {
    static WATCHES: Once = Once::new();
    extern "C" fn before() {
        HELD.with(|held| *held.borrow_mut() = Some(sockets()));
    }
    extern "C" fn in_parent() {
        HELD.with(|held| held.borrow_mut().take());
    }
    extern "C" fn in_child() {
        BELL.store(-1, Ordering::SeqCst);
        if let Some(mut sockets) = HELD.with(|held| held.borrow_mut().take()) {
            // Not dropped: another thread may have had their locks.
            std::mem::take(&mut *sockets).into_iter().for_each(std::mem::forget);
        }
    }
    // SAFETY: functions of this library, which is linked with the program and never unloaded.
    WATCHES.call_once(|| unsafe {
        libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child));
    });
}

/// Has the thread look at all sockets.
pub(crate) fn wake() {
    let bell = BELL.load(Ordering::SeqCst);
    if bell >= 0 {
        let one = 1_u64;
        // SAFETY: eight bytes of this function's.
        unsafe { libc::syscall(libc::SYS_write, bell, &raw const one, 8) };
    }
}

/// Has the thread serve a socket; starts the thread for the first.
pub(crate) fn add(socket: Arc<Socket>) -> Result<(), Errno> {
    watch_forks();
    let mut list = sockets();
    if BELL.load(Ordering::SeqCst) < 0 {
        // SAFETY: takes no addresses.
        let bell = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if bell < 0 {
            return Err(Errno::last());
        }
        BELL.store(bell, Ordering::SeqCst);
        let started = std::thread::Builder::new().name("iwsock".into()).spawn(|| {
            block_signals();
            run();
        });
        if started.is_err() {
            BELL.store(-1, Ordering::SeqCst);
            return Err(Errno::EAGAIN);
        }
    }
    list.push(socket);
    drop(list);
    wake();
    Ok(())
}

/// Serves a socket no more.
pub(crate) fn remove(tcp: c_int) {
    sockets().retain(|socket| socket.tcp() != tcp);
    wake();
}

/// The program's handlers run in the program's threads.
fn block_signals() {
    // SAFETY: fills in a set, and blocks the signals in it for this thread.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
}

fn run() {
    let bell = BELL.load(Ordering::SeqCst);
    loop {
        let list = sockets().clone();
        let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut entries = vec![entry(bell, libc::POLLIN)];
        for socket in list {
            let events = socket.advance_by_thread();
            if events != 0 {
                entries.push(entry(socket.tcp(), events));
            }
        }
        sys::poll(&mut entries, None);
        let mut count = [0; 8];
        // SAFETY: eight bytes of this function's.
        unsafe { libc::syscall(libc::SYS_read, bell, count.as_mut_ptr(), 8) };
    }
}
