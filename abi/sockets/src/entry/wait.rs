//! epoll, poll and select.

use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};

use crate::conn::Mode;
use crate::poll::{self, Watched};
use crate::real::real;
use crate::set::Set;
use crate::table::{self, Entry};
use crate::{life, sys};

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_create(size: c_int) -> c_int {
    let fd = real!(epoll_create(size => c_int) -> c_int);
    life::made_set(fd);
    fd
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_create1(flags: c_int) -> c_int {
    let fd = real!(epoll_create1(flags => c_int) -> c_int);
    life::made_set(fd);
    fd
}

/// Whether this library does nothing for a descriptor.
#[inline]
fn is_of_kernel(fd: c_int) -> bool {
    match table::get(fd) {
        None => true,
        Some(Entry::Conn(conn)) => conn.mode() == Mode::Plain,
        Some(Entry::Set(_)) => false,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_ctl(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let is_of_kernel = is_of_kernel(fd);
    if let Some(set) = table::set(epfd)
        && !is_of_kernel
    {
        return set.control(epfd, op, fd, event);
    }
    if let Some(inside) = table::set(fd) {
        inside.leave_to_kernel();
    }
    // A set that this library does not know: what is in it is not seen.
    if op == libc::EPOLL_CTL_ADD && !is_of_kernel {
        life::plain_fd(fd, quipu_sockets::report::Reason::Unseen);
    }
    real!(epoll_ctl(epfd => c_int, op => c_int, fd => c_int, event => *mut epoll_event) -> c_int)
}

fn waited(set: Option<&Set>, result: c_int) -> c_int {
    if let Some(set) = set {
        set.end_sleep();
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_wait(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: c_int,
) -> c_int {
    let set = table::set(epfd);
    if let Some(set) = set
        && let Some(result) = set.wait(epfd, events, max, timeout.into())
    {
        return result;
    }
    let result = real!(epoll_wait(epfd => c_int, events => *mut epoll_event, max => c_int,
        timeout => c_int) -> c_int);
    waited(set, result)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_pwait(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    let set = table::set(epfd);
    if let Some(set) = set
        && let Some(result) = set.wait(epfd, events, max, timeout.into())
    {
        return result;
    }
    let result = real!(epoll_pwait(epfd => c_int, events => *mut epoll_event, max => c_int,
        timeout => c_int, mask => *const sigset_t) -> c_int);
    waited(set, result)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_pwait2(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let set = table::set(epfd);
    // SAFETY: the program passes a time, or null for no limit.
    let time = unsafe { timeout.as_ref() };
    let is_zero = time.is_some_and(|time| time.tv_sec == 0 && time.tv_nsec == 0);
    if let Some(set) = set
        && let Some(result) = set.wait(epfd, events, max, if is_zero { 0 } else { -1 })
    {
        return result;
    }
    let result = real!(epoll_pwait2(epfd => c_int, events => *mut epoll_event, max => c_int,
        timeout => *const timespec, mask => *const sigset_t) -> c_int);
    waited(set, result)
}

/// The raised sockets of a list for poll(2).
///
/// # Safety
///
/// `list` has `count` entries, or is null.
unsafe fn watched(list: *const pollfd, count: nfds_t) -> Watched {
    let count = if list.is_null() { 0 } else { count as usize };
    // SAFETY: passed on from the caller.
    let entries = (0..count).map(|place| (place, unsafe { list.add(place).read() }));
    let is_read = |entry: &pollfd| entry.events & (libc::POLLIN | libc::POLLRDNORM) != 0;
    let descriptors = entries
        .filter(|(_, entry)| is_read(entry) || table::set(entry.fd).is_some())
        .map(|(place, entry)| (place, entry.fd));
    Watched::begin(descriptors)
}

/// Whether a list has a descriptor for which this library does something.
///
/// # Safety
///
/// `list` has `count` entries, or is null.
#[inline]
unsafe fn has_known(list: *const pollfd, count: nfds_t) -> bool {
    let count = if list.is_null() { 0 } else { count as usize };
    // SAFETY: passed on from the caller.
    (0..count).any(|place| !is_of_kernel(unsafe { (*list.add(place)).fd }))
}

/// Defines the functions of the poll family.
macro_rules! poll_like {
    ($($name:ident($list:ident, $count:ident $(, $arg:ident: $ty:ty)*), $waits:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            $list: *mut pollfd, $count: nfds_t $(, $arg: $ty)*
        ) -> c_int {
            // SAFETY: the program passes a list of that length.
            let watched = unsafe { has_known($list, $count).then(|| watched($list, $count)) };
            let watched = watched.filter(|watched| !watched.is_empty());
            if let Some(watched) = &watched {
                let errno = sys::errno();
                // SAFETY: as above.
                if let Some(result) = unsafe { poll::plan(watched, $list, $count, $waits) } {
                    if result >= 0 {
                        sys::set_errno(errno);
                    }
                    watched.end();
                    return result;
                }
                sys::set_errno(errno);
            }
            let result = real!($name($list => *mut pollfd, $count => nfds_t $(,
                $arg => $ty)*) -> c_int);
            if let Some(watched) = &watched {
                watched.end();
            }
            result
        }
    )*};
}

poll_like! {
    poll(list, count, timeout: c_int), timeout != 0;
    __poll(list, count, timeout: c_int), timeout != 0;
    __poll_chk(list, count, timeout: c_int, room: usize), timeout != 0;
    ppoll(list, count, timeout: *const timespec, mask: *const sigset_t), waits(timeout);
    __ppoll_chk(list, count, timeout: *const timespec, mask: *const sigset_t, room: usize),
        waits(timeout);
}

fn waits(timeout: *const timespec) -> bool {
    // SAFETY: the program passes a time, or null for no limit.
    unsafe { timeout.as_ref() }.is_none_or(|time| time.tv_sec != 0 || time.tv_nsec != 0)
}

/// Descriptors in a set of select(2).
const SET_SIZE: usize = 1024;

/// What one call of select(2) waits for.
struct Selection {
    count: c_int,
    sets: [*mut fd_set; 3],
    saved: [fd_set; 3],
}

impl Selection {
    /// # Safety
    ///
    /// The sets have room for `count` descriptors, or are null.
    unsafe fn new(count: c_int, sets: [*mut fd_set; 3]) -> Self {
        // SAFETY: all zeroes is an empty set.
        let mut saved: [fd_set; 3] = unsafe { std::mem::zeroed() };
        for (save, set) in saved.iter_mut().zip(sets) {
            if !set.is_null() {
                // SAFETY: passed on from the caller; only whole words up to `count` are the program's.
                unsafe {
                    let words = (count.max(0) as usize).div_ceil(64).min(SET_SIZE / 64);
                    std::ptr::copy_nonoverlapping(
                        set.cast::<u64>(),
                        (&raw mut *save).cast(),
                        words,
                    );
                }
            }
        }
        Self { count, sets, saved }
    }

    fn reads(&self) -> impl Iterator<Item = (usize, c_int)> {
        let count = if self.sets[0].is_null() { 0 } else { self.count };
        // SAFETY: a set of this size.
        (0..count)
            .filter(|fd| unsafe { libc::FD_ISSET(*fd, &raw const self.saved[0]) })
            .map(|fd| (fd as usize, fd))
    }

    /// Puts back what the program asked for.
    fn restore(&self) {
        for (save, set) in self.saved.iter().zip(self.sets) {
            if !set.is_null() {
                let words = (self.count.max(0) as usize).div_ceil(64);
                // SAFETY: as much as was read of it.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        (&raw const *save).cast::<u64>(),
                        set.cast(),
                        words,
                    );
                }
            }
        }
    }

    /// Asks the kernel without waiting.
    fn now(&self) -> c_int {
        let zero = timespec { tv_sec: 0, tv_nsec: 0 };
        let [read, write, except] = self.sets;
        sys::call!(SYS_pselect6, self.count, read, write, except, &raw const zero, 0) as c_int
    }

    /// As `poll::plan`.
    fn plan(&self, watched: &Watched, waits: bool) -> Option<c_int> {
        loop {
            let some = watched.readable().next().is_some();
            let ready = || {
                let ready = self.now();
                self.restore();
                ready != 0
            };
            if !some && waits && !watched.prepare_to_sleep(ready) {
                return None;
            }
            let mut count = self.now();
            if count < 0 {
                return Some(count);
            }
            for fd in watched.readable() {
                // SAFETY: the set was there when the descriptor was found in it.
                unsafe {
                    count += c_int::from(!libc::FD_ISSET(fd as c_int, self.sets[0]));
                    libc::FD_SET(fd as c_int, self.sets[0]);
                }
            }
            if count > 0 || !waits {
                return Some(count);
            }
            self.restore();
        }
    }
}

/// Defines the functions of the select family.
macro_rules! select_like {
    ($($name:ident($($arg:ident: $ty:ty),*), $timeout:ident, $waits:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set $(, $arg: $ty)*
        ) -> c_int {
            let mut watched = None;
            if (1..=SET_SIZE as c_int).contains(&count) {
                // SAFETY: the program passes sets.
                let selection = unsafe { Selection::new(count, [read, write, except]) };
                let some = Watched::begin(selection.reads());
                if !some.is_empty() {
                    let errno = sys::errno();
                    if let Some(result) = selection.plan(&some, $waits) {
                        if result >= 0 {
                            sys::set_errno(errno);
                        }
                        some.end();
                        return result;
                    }
                    sys::set_errno(errno);
                    watched = Some(some);
                }
            }
            let result = real!($name(count => c_int, read => *mut fd_set, write => *mut fd_set,
                except => *mut fd_set $(, $arg => $ty)*) -> c_int);
            if let Some(watched) = &watched {
                watched.end();
            }
            result
        }
    )*};
}

select_like! {
    select(timeout: *mut timeval), timeout, waits_for(timeout);
    __select(timeout: *mut timeval), timeout, waits_for(timeout);
    pselect(timeout: *const timespec, mask: *const sigset_t), timeout, waits(timeout);
}

fn waits_for(timeout: *const timeval) -> bool {
    // SAFETY: the program passes a time, or null for no limit.
    unsafe { timeout.as_ref() }.is_none_or(|time| time.tv_sec != 0 || time.tv_usec != 0)
}
