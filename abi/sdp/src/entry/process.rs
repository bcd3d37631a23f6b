//! The beginning, the children and the end of the process.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libc::c_int;

use crate::table::Entry;
use crate::{adapter, establish, real, table};

/// How long the end of the process waits until its peers have what it sent.
const MOST_FLUSH: Duration = Duration::from_secs(2);

/// The process whose sockets these are.
static OWN: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// What a thread that forks knows of the table.
    static FORKING: RefCell<Vec<(RawFd, Entry)>> = const { RefCell::new(Vec::new()) };
}

#[used]
#[unsafe(link_section = ".init_array")]
static INITIALIZE: extern "C" fn() = initialize;

extern "C" fn initialize() {
    real::look_up_all();
    OWN.store(std::process::id(), Ordering::Relaxed);
    // SAFETY: functions of this library, which is never unloaded (it is preloaded).
    unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
}

extern "C" fn before() {
    FORKING.with(|known| *known.borrow_mut() = table::all());
}

extern "C" fn in_parent() {
    FORKING.with(|known| known.borrow_mut().clear());
}

extern "C" fn in_child() {
    OWN.store(std::process::id(), Ordering::Relaxed);
    adapter::forget();
    let known = FORKING.with(|known| std::mem::take(&mut *known.borrow_mut()));
    table::lose_sockets(known);
}

#[used]
#[unsafe(link_section = ".fini_array")]
static ENDS: extern "C" fn() = ends;

/// The process ends: what it has sent arrives, and its streams end in order.
extern "C" fn ends() {
    let Some(adapter) = adapter::known() else { return };
    if OWN.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let sockets = establish::all();
    for socket in &sockets {
        let mut state = socket.lock();
        if let Some(link) = &mut state.link {
            link.connection.shut_write();
        }
        socket.settle(&mut state);
    }
    let deadline = Instant::now() + MOST_FLUSH;
    for socket in &sockets {
        while Instant::now() < deadline {
            let mut state = socket.lock();
            socket.settle(&mut state);
            if state.link.as_ref().is_none_or(|link| link.is_idle()) {
                break;
            }
            drop(state);
            std::thread::yield_now();
        }
    }
    adapter.engine.shutdown_flush();
}

/// Defines functions that end the process at once.
macro_rules! exit_like {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(status: c_int) -> ! {
            ends();
            // SAFETY: as the program called this.
            unsafe { real::_exit(status) };
            std::process::abort()
        }
    )*};
}
exit_like! { _exit _Exit }
