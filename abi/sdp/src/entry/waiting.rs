//! poll, select and epoll: the kernel waits; this library only sees to it that the descriptors of its
//! sockets show what they are ready for.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::sync::Arc;

use libc::{c_int, c_short, epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use quipu_cabi::{Errno, Void};

use super::files::claim;
use super::process::serve;
use crate::real;
use crate::socket::Socket;
use crate::table::{self, Entry};

/// The events of poll that say that there is something to read.
const READ: c_short = libc::POLLIN | libc::POLLRDNORM;

thread_local! {
    /// Sockets at which this thread waits by poll or select. They are not on its stack, since it may be
    /// cancelled while it waits: then they are shown for good.
    static POLLED: RefCell<Vec<Arc<Socket>>> = const { RefCell::new(Vec::new()) };
}

/// The program waits at a descriptor by epoll from now on.
fn watch(fd: RawFd, edges: bool, urgent: bool) {
    claim(fd);
    if let Some(socket) = table::socket(fd) {
        // Without a descriptor left, nothing shows what the socket is ready for.
        serve::<Void>("epoll_ctl", || socket.watch(fd, edges, urgent));
    }
}

/// The program is about to wait at a descriptor by poll or select; `urgent`: for urgent bytes, too.
fn begin_poll(fd: RawFd, urgent: bool) {
    claim(fd);
    let Some(socket) = table::socket(fd) else { return };
    serve::<Void>("poll", || {
        let begun = POLLED.try_with(|polled| {
            let mut polled = polled.try_borrow_mut().ok()?;
            let begun = socket.begin_poll(fd, urgent);
            if begun.is_ok() {
                polled.push(Arc::clone(&socket));
            }
            Some(begun)
        });
        // A signal handler polls in the middle of this, or the thread is about to end.
        begun.ok().flatten().unwrap_or_else(|| socket.watch(fd, false, urgent))
    });
}

/// How many sockets this thread polls already, by a call that a signal handler has interrupted.
fn polled() -> usize {
    POLLED.try_with(|polled| polled.try_borrow().map_or(0, |polled| polled.len())).unwrap_or(0)
}

/// The wait is over at all sockets but so many. `errno` stays.
fn end_polls(before: usize) {
    if polled() <= before {
        return;
    }
    let errno = Errno::last();
    let ended = POLLED.try_with(|polled| match polled.try_borrow_mut() {
        Ok(mut polled) => {
            let before = before.min(polled.len());
            polled.split_off(before)
        }
        Err(_) => Vec::new(),
    });
    let ended = ended.unwrap_or_default();
    ended.iter().for_each(|socket| socket.end_poll());
    drop(ended);
    errno.set();
}

/// # Safety
///
/// `list` has `count` entries, or is null.
unsafe fn watch_list(list: *const pollfd, count: nfds_t) {
    let count = if list.is_null() { 0 } else { count as usize };
    for index in 0..count {
        // SAFETY: passed on from the caller.
        let entry = unsafe { list.add(index).read() };
        begin_poll(entry.fd, entry.events & libc::POLLPRI != 0);
    }
}

/// Whether an urgent byte is all that a descriptor has to read. The kernel calls it readable then.
fn has_urgent_only(fd: RawFd) -> bool {
    let errno = Errno::last();
    let only = table::socket(fd).is_some_and(|socket| socket.has_urgent_only());
    errno.set();
    only
}

/// Takes back POLLIN where the kernel has said it because of an urgent byte.
///
/// # Safety
///
/// As for [`watch_list`]; the kernel has just written the list.
unsafe fn correct_list(list: *mut pollfd, count: nfds_t, ready: c_int) {
    let count = if list.is_null() || ready <= 0 { 0 } else { count as usize };
    for index in 0..count {
        // SAFETY: passed on from the caller.
        let entry = unsafe { &mut *list.add(index) };
        let is_urgent = entry.revents & libc::POLLPRI != 0;
        if is_urgent && entry.revents & READ != 0 && has_urgent_only(entry.fd) {
            entry.revents &= !READ;
        }
    }
}

/// Defines the functions of the poll family.
macro_rules! poll_like {
    ($($name:ident $real:ident($list:ident, $count:ident $(, $arg:ident: $ty:ty)*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            $list: *mut pollfd, $count: nfds_t $(, $arg: $ty)*
        ) -> c_int {
            // SAFETY: the program passes a list of that length.
            unsafe {
                let before = polled();
                watch_list($list, $count);
                let ready = real::$real($list, $count $(, $arg)*);
                correct_list($list, $count, ready);
                end_polls(before);
                ready
            }
        }
    )*};
}

poll_like! {
    poll poll(list, count, timeout: c_int);
    __poll poll(list, count, timeout: c_int);
    __poll_chk __poll_chk(list, count, timeout: c_int, room: usize);
    ppoll ppoll(list, count, timeout: *const timespec, mask: *const sigset_t);
    __ppoll_chk __ppoll_chk(list, count, timeout: *const timespec, mask: *const sigset_t,
        room: usize);
}

/// # Safety
///
/// The sets have room for `count` descriptors, or are null.
unsafe fn watch_sets(count: c_int, sets: [*const fd_set; 3]) {
    for fd in table::range(0, count.clamp(0, 1024) as u32) {
        let is_in = |set: &*const fd_set| {
            // SAFETY: passed on from the caller; the descriptor is below the count.
            fd < count && !set.is_null() && unsafe { libc::FD_ISSET(fd, *set) }
        };
        if sets.iter().any(is_in) {
            begin_poll(fd, is_in(&sets[2]));
        }
    }
}

/// As [`correct_list`], for select: takes those out of the set `read`, and gives how many are ready then.
///
/// # Safety
///
/// As for [`watch_sets`]; the kernel has just written the sets.
unsafe fn correct_sets(
    count: c_int,
    read: *mut fd_set,
    except: *const fd_set,
    ready: c_int,
) -> c_int {
    if ready <= 0 || read.is_null() || except.is_null() {
        return ready;
    }
    let mut wrong = 0;
    for fd in table::range(0, count.clamp(0, 1024) as u32) {
        // SAFETY: passed on from the caller; the descriptor is below the count.
        unsafe {
            let is_both = fd < count && libc::FD_ISSET(fd, except) && libc::FD_ISSET(fd, read);
            if is_both && has_urgent_only(fd) {
                libc::FD_CLR(fd, read);
                wrong += 1;
            }
        }
    }
    ready - wrong
}

/// Defines the functions of the select family.
macro_rules! select_like {
    ($($name:ident $real:ident($($arg:ident: $ty:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set $(, $arg: $ty)*
        ) -> c_int {
            // SAFETY: the program passes sets of that size, or null.
            unsafe {
                let before = polled();
                watch_sets(count, [read, write, except]);
                let ready = real::$real(count, read, write, except $(, $arg)*);
                let ready = correct_sets(count, read, except, ready);
                end_polls(before);
                ready
            }
        }
    )*};
}

select_like! {
    select select(timeout: *mut timeval);
    __select select(timeout: *mut timeval);
    pselect pselect(timeout: *const timespec, mask: *const sigset_t);
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_ctl(
    set: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the program passes an event, or null.
    let wanted = unsafe { event.as_ref() }.copied();
    let wants = |bit: c_int| wanted.is_some_and(|event| event.events & bit as u32 != 0);
    let (edges, urgent) = (wants(libc::EPOLLET), wants(libc::EPOLLPRI));
    match table::get(fd) {
        Some(Entry::Sdp(_) | Entry::Lost(_)) if op != libc::EPOLL_CTL_DEL => {
            watch(fd, edges, urgent)
        }
        Some(Entry::Candidate(candidate)) => {
            let mut sets = candidate.sets.lock().unwrap_or_else(|error| error.into_inner());
            sets.retain(|(known, _)| *known != set);
            if op != libc::EPOLL_CTL_DEL {
                sets.extend(wanted.map(|event| (set, event)));
            }
        }
        _ => {}
    }
    // SAFETY: as the program called this.
    unsafe { real::epoll_ctl(set, op, fd, event) }
}
