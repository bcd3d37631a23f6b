//! The one thread of this library. It takes the events of connection management, and serves sockets on
//! which the program waits by poll or epoll, or which it has closed, while no call of the program does.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use libc::{c_int, epoll_event};
use quipu_cabi::Errno;

use crate::adapter::Adapter;
use crate::establish;
use crate::sys::{BlockedSignals, own_descriptor, system};
use crate::{fork, pass, process, real};

/// The name of connection management in the set; sockets have their numbers.
const EVENTS: u64 = 0;
/// The name of where children ask for connections.
const CHILDREN: u64 = 1 << 63;
/// How often sockets are looked at, in ms, where all are attended; and where a call of the program was at
/// one since the last time. A peer that takes an advertised buffer back waits for an answer, whatever the
/// program does meanwhile.
const TICK_MS: c_int = 500;
const SHORT_TICK_MS: c_int = 10;

pub(crate) struct Helper {
    set: OwnedFd,
    /// The process it is of: children of fork(2) have none.
    process: u32,
    /// Where it hears what children ask, and where they ask.
    asking: [RawFd; 2],
}

static HELPER: Mutex<Option<Helper>> = Mutex::new(None);

/// What is known of the thread. A fork holds it: a child has no thread that may hold the lock.
pub(crate) fn helper() -> MutexGuard<'static, Option<Helper>> {
    HELPER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread, if it does not run.
pub(crate) fn start(adapter: &'static Adapter) -> Result<(), Errno> {
    let mut helper = helper();
    let process = std::process::id();
    if helper.as_ref().is_some_and(|known| known.process == process) {
        return Ok(());
    }
    // SAFETY: epoll_create1(2).
    let set = own_descriptor(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    let set_fd = set.as_raw_fd();
    add(set_fd, adapter.events_fd, EVENTS)?;
    // They are never closed: children of fork(2) may ask later.
    let asking = pass::pair()?.map(IntoRawFd::into_raw_fd);
    add(set_fd, asking[0], CHILDREN)?;
    pass::keep(asking[1]);
    let run = move || run(adapter, set_fd, asking[0]);
    // It gets none of the program's signals.
    let signals = BlockedSignals::new();
    let started = thread::Builder::new().name("quipu-sdp".into()).spawn(run);
    drop(signals);
    started.map_err(|_| Errno::EAGAIN)?;
    *helper = Some(Helper { set, process, asking });
    Ok(())
}

fn add(set: RawFd, fd: RawFd, name: u64) -> Result<(), Errno> {
    let events = (libc::EPOLLIN | libc::EPOLLET) as u32;
    let mut event = epoll_event { events, u64: name };
    // SAFETY: a live event.
    let added = system(unsafe { real::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, &raw mut event) });
    match added {
        Ok(_) | Err(Errno(libc::EEXIST)) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Serves a socket whose completions are told at a descriptor, from now on.
pub(crate) fn serve(fd: RawFd, number: u64) -> Result<(), Errno> {
    match &*helper() {
        Some(helper) => add(helper.set.as_raw_fd(), fd, number),
        None => Ok(()),
    }
}

/// Where this process hears what children ask, and where they ask; also in a child of vfork(2).
pub(crate) fn asking() -> Option<[RawFd; 2]> {
    let own = |known: &&Helper| known.process == process::own();
    helper().as_ref().filter(own).map(|known| known.asking)
}

/// Serves it no more.
pub(crate) fn leave(fd: RawFd) {
    if let Some(helper) = &*helper() {
        let (set, none) = (helper.set.as_raw_fd(), std::ptr::null_mut());
        // SAFETY: nothing is read of the event.
        unsafe { real::epoll_ctl(set, libc::EPOLL_CTL_DEL, fd, none) };
    }
}

fn run(adapter: &'static Adapter, set: RawFd, asked: RawFd) {
    let mut events = [epoll_event { events: 0, u64: 0 }; 64];
    let mut tick_ms = TICK_MS;
    let mut next = Instant::now();
    loop {
        // SAFETY: room for so many events.
        let count =
            unsafe { libc::epoll_wait(set, events.as_mut_ptr(), events.len() as c_int, tick_ms) };
        let ready = events.iter().take(count.max(0) as usize);
        let mut any_event = false;
        for event in ready {
            let name = event.u64;
            match name {
                EVENTS => any_event = true,
                CHILDREN => fork::answer(asked),
                number => serve_socket(adapter, number),
            }
        }
        if any_event {
            establish::take_events(adapter);
        }
        let now = Instant::now();
        if now >= next {
            tick_ms = if tick(adapter) { SHORT_TICK_MS } else { TICK_MS };
            next = now + Duration::from_millis(tick_ms as u64);
        }
    }
}

fn serve_socket(adapter: &'static Adapter, number: u64) {
    let Some(socket) = establish::find(number) else { return };
    let mut state = socket.lock();
    if state.led {
        // The event is for the thread that sleeps there, which would not wake without it.
        return;
    }
    if let Some(link) = &state.link {
        link.take_events();
    }
    socket.settle(&mut state);
    socket.end_if_over(&mut state, adapter);
}

/// Looks at all sockets. From now on the helper hears of what comes to those at which no call of the program
/// is. Whether a call was at any since the last time.
fn tick(adapter: &'static Adapter) -> bool {
    let mut any = false;
    for socket in establish::all() {
        let mut state = socket.lock();
        if !state.attended
            && let Some(link) = &state.link
        {
            any = true;
            state.attended = !state.led && serve(link.queue.fd, socket.number).is_ok();
        }
        socket.settle(&mut state);
        socket.end_if_over(&mut state, adapter);
    }
    any
}
