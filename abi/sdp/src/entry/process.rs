//! The beginning, the children and the end of the process.

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use libc::{c_int, c_void};
use quipu_cabi::{CReturn, Errno, Void, outer_wall};

use crate::fork::{self, Fork};
use crate::link::Link;
use crate::{adapter, establish, process, real, relay};

/// Between two looks whether they have it.
const LOOK: Duration = Duration::from_micros(200);
/// How long the end of the process waits until its peers have what it sent.
const MOST_FLUSH: Duration = Duration::from_secs(2);

thread_local! {
    /// How deep this thread is in this library: what it does there is not the program's.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
    /// What a fork by this thread needs. Without a destructor: functions of atexit(3), before which the
    /// destructors of this thread run, may fork.
    static FORK: RefCell<ManuallyDrop<Forking>> = RefCell::default();
}

/// What a fork needs in this module, and elsewhere.
type Forking = (Option<MutexGuard<'static, Vec<usize>>>, Fork);

/// This thread is in the library while it lives.
pub(super) struct Inside(());

impl Inside {
    pub(super) fn enter() -> Self {
        INSIDE.set(INSIDE.get() + 1);
        Self(())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(INSIDE.get() - 1);
    }
}

/// Whether a call comes from this library or its engine, and not from the program.
pub(super) fn is_inside() -> bool {
    INSIDE.get() > 0
}

/// The panic wall of an entry point that serves a socket of SDP. The thread is not cancelled meanwhile.
pub(super) fn serve<R: CReturn>(
    name: &'static str,
    body: impl FnOnce() -> Result<R::Value, Errno>,
) -> R::Raw {
    let _inside = Inside::enter();
    outer_wall::<R>(name, body)
}

/// What a thread begins with.
type Start = extern "C-unwind" fn(*mut c_void) -> *mut c_void;

/// A thread that this library starts, or the engine, is inside for good.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    if !is_inside() {
        process::note_thread();
        // SAFETY: as the caller called this.
        return unsafe { real::pthread_create(thread, attributes, start, argument) };
    }
    process::note_own_thread();
    let begun = Box::into_raw(Box::new((start, argument))).cast();
    // SAFETY: as the caller called this, with a function that calls the caller's.
    let result = unsafe { real::pthread_create(thread, attributes, begin_inside, begun) };
    if result != 0 {
        process::own_thread_ends();
        // SAFETY: no thread has it.
        drop(unsafe { Box::from_raw(begun.cast::<(Start, *mut c_void)>()) });
    }
    result
}

extern "C-unwind" fn begin_inside(begun: *mut c_void) -> *mut c_void {
    // SAFETY: made by `pthread_create` for this thread alone.
    let (start, argument) = *unsafe { Box::from_raw(begun.cast::<(Start, *mut c_void)>()) };
    std::mem::forget(Inside::enter());
    let result = start(argument);
    process::own_thread_ends();
    result
}

#[used]
#[unsafe(link_section = ".init_array")]
static INITIALIZE: extern "C" fn() = initialize;

extern "C" fn initialize() {
    real::look_up_all();
    process::begin();
    // SAFETY: functions of this library, which is never unloaded (it is preloaded).
    unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
}

extern "C" fn before() {
    let may_lock = !is_inside();
    serve::<Void>("fork", || {
        let fork = fork::before(may_lock);
        let streams = may_lock.then(super::files::streams);
        FORK.with(|forking| **forking.borrow_mut() = (streams, fork));
        Ok(())
    });
}

fn take_fork() -> Forking {
    FORK.with(|fork| std::mem::take(&mut **fork.borrow_mut()))
}

extern "C" fn in_parent() {
    serve::<Void>("fork", || {
        drop(take_fork());
        Ok(())
    });
}

extern "C" fn in_child() {
    process::begin_child();
    adapter::forget();
    serve::<Void>("fork", || {
        fork::in_child(take_fork().1);
        Ok(())
    });
}

#[used]
#[unsafe(link_section = ".fini_array")]
static ENDS: extern "C" fn() = at_end;

/// The program ends in order. The C library writes what stdio has later, when no thread copies it any more.
extern "C" fn at_end() {
    if process::is_own() {
        super::files::flush_stdio();
    }
    ends();
}

/// The process ends: what it has sent arrives, and its streams end in order.
pub(super) fn ends() {
    serve::<Void>("exit", || {
        if process::is_own() {
            flush();
        }
        Ok(())
    });
}

fn flush() {
    let Some(adapter) = adapter::known() else { return };
    let sockets = establish::all();
    relay::end_all();
    for socket in &sockets {
        let mut state = socket.lock();
        // Where a relay copies, it ends the stream after that.
        if !socket.is_relayed()
            && let Some(link) = &mut state.link
        {
            link.shut_write();
        }
        socket.settle(&mut state);
    }
    let deadline = Instant::now() + MOST_FLUSH;
    for socket in &sockets {
        while Instant::now() < deadline {
            let mut state = socket.lock();
            socket.settle(&mut state);
            let is_over =
                |link: &Link| link.broken || link.is_idle() && link.connection.has_shut_write();
            if state.link.as_ref().is_none_or(is_over) {
                break;
            }
            drop(state);
            std::thread::sleep(LOOK);
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
