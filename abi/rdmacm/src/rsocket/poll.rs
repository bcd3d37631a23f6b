//! `rpoll` and `rselect`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::{c_int, c_short, fd_set, nfds_t, pollfd, timeval};
use quipu_abi_trace::entry;
use quipu_cabi::{Errno, IntMinusOne};

use super::socket::Socket;
use super::spin::Spin;
use super::system;
use super::table::entry;
use super::wait::{readable, sleep};

/// So many descriptors may be polled whatever the limit of open ones: no program has fewer.
const FEW: usize = 32;
/// What is told of, asked for or not.
const ALWAYS: c_short = libc::POLLERR | libc::POLLHUP;

/// Whether poll(2) takes so many entries (`RLIMIT_NOFILE`).
fn is_within_limit(count: usize) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit(2); `limit` is valid for the call.
    count <= FEW
        || unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0
        || count as u64 <= limit.rlim_cur
}

/// The sockets among polled descriptors, by their place.
struct Watched {
    sockets: Vec<(usize, Arc<Socket>)>,
    /// There is nothing else.
    all: bool,
    /// Not everything was looked at.
    more: bool,
    /// A look at all that is polled makes no system call.
    quick: bool,
}

impl Watched {
    fn new(fds: &[pollfd]) -> Self {
        let stream = |(at, fd): (usize, &pollfd)| Some((at, entry(fd.fd)?.stream()?));
        let sockets: Vec<_> = fds.iter().enumerate().filter_map(stream).collect();
        let all = sockets.len() == fds.len();
        Self { sockets, all, more: false, quick: false }
    }

    /// Looks at each socket, before a sleep with `arm`; how many have something to say.
    ///
    /// # Errors
    ///
    /// EINTR; ENODEV in a forked child.
    fn look(&mut self, fds: &mut [pollfd], arm: bool) -> Result<usize, Errno> {
        let mut ready = 0;
        self.more = false;
        self.quick = self.all;
        for (at, socket) in &self.sockets {
            let mut state = if arm { socket.lock_to_sleep()? } else { socket.lock() };
            let asked = fds[*at].events;
            if arm {
                state.arm();
            }
            // What is asked for is mostly there for a call that comes next, and a look would send
            // acknowledgements before it. Who does nothing but ask is told of the peer's end all the same.
            let known = asked != 0 && state.events() & asked == asked;
            if !known || !state.may_skip() {
                self.more |= state.progress();
            }
            self.quick &= state.is_polled();
            fds[*at].revents = state.events() & (asked | ALWAYS);
            ready += usize::from(fds[*at].revents != 0);
        }
        Ok(ready)
    }

    /// Sleeps until one of all, in which the sockets have their places, has something to say.
    fn sleep(&self, all: &mut Vec<pollfd>, mut timeout: Option<Duration>) -> Result<(), Errno> {
        let places = all.len();
        // A socket has two descriptors: one in its place, and one behind all places. The engine has one, too.
        // Where these are too many the socket's own tells of both, and the engine's helper wakes this thread.
        let inside = is_within_limit(places + self.sockets.len() + 1);
        for (at, socket) in &self.sockets {
            let mut state = socket.lock();
            if !inside {
                state.sleeps_outside();
            }
            let [events, completions] = socket.lies_down(&mut state);
            // Since the last look others may have taken what it was to wake for: from now on they leave it.
            state.arm();
            if state.events() & (all[*at].events | ALWAYS) != 0 {
                timeout = Some(Duration::ZERO);
            }
            drop(state);
            all[*at] = readable(if inside { events } else { socket.fd });
            if inside {
                all.push(readable(completions));
            }
        }
        let slept = if inside { sleep(all, timeout) } else { ask(all, timeout) };
        for (index, (at, socket)) in self.sockets.iter().enumerate() {
            let behind = all.get(places + index).map_or(0, |completions| completions.revents);
            let said = std::mem::take(&mut all[*at].revents) | behind;
            socket.gets_up(&mut socket.lock(), said != 0);
        }
        slept.map(|_| ())
    }
}

/// Asks the system about the descriptors that are not sockets of this library, and sleeps until one of
/// all has something to say; how many of the system's have.
fn system_poll(
    fds: &mut [pollfd],
    watched: &Watched,
    timeout: Option<Duration>,
) -> Result<usize, Errno> {
    let mut all = fds.to_vec();
    if watched.sockets.is_empty() || timeout == Some(Duration::ZERO) {
        // What the sockets have to say is known.
        watched.sockets.iter().for_each(|(at, _)| all[*at].fd = -1);
        ask(&mut all, timeout)?;
    } else {
        watched.sleep(&mut all, timeout)?;
    }
    let mut ready = 0;
    for (fd, seen) in fds.iter_mut().zip(&all) {
        if seen.revents != 0 {
            fd.revents = seen.revents;
            ready += 1;
        }
    }
    Ok(ready)
}

/// poll(2)
fn ask(fds: &mut [pollfd], timeout: Option<Duration>) -> Result<usize, Errno> {
    let limit = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), |limit| limit as *const libc::timespec);
    // SAFETY: ppoll(2) with as many entries as there are.
    let ready =
        unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as nfds_t, limit, std::ptr::null()) };
    system(ready).map(|ready| ready as usize)
}

fn poll(fds: &mut [pollfd], timeout: Option<Duration>) -> Result<usize, Errno> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    fds.iter_mut().for_each(|fd| fd.revents = 0);
    let mut watched = Watched::new(fds);
    let (mut arm, mut spin) = (false, Spin::default());
    loop {
        let ready = watched.look(fds, arm)?;
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let over = left.is_some_and(|left| left.is_zero());
        // Armed and looked again: only now it is safe to sleep.
        let pause =
            if ready > 0 || over || !arm || watched.more { Some(Duration::ZERO) } else { left };
        let others = match (pause, watched.all) {
            // The system has nothing to say.
            (Some(Duration::ZERO), true) => 0,
            _ => system_poll(fds, &watched, pause)?,
        };
        if ready + others > 0 || over {
            return Ok(ready + others);
        }
        arm = arm || !watched.quick || !spin.goes_on();
    }
}

/// Whether a descriptor is in a set that may be null.
///
/// # Safety
///
/// `set` is null or a set, `fd` below `FD_SETSIZE`.
unsafe fn has(set: *mut fd_set, fd: c_int) -> bool {
    // SAFETY: passed on from the caller.
    !set.is_null() && unsafe { libc::FD_ISSET(fd, set) }
}

/// Which sets select(2) tells of a descriptor, as what was asked for them.
fn told(fd: &pollfd) -> c_short {
    let mut told = 0;
    for (asked, by) in [
        (libc::POLLIN, libc::POLLIN | ALWAYS),
        (libc::POLLOUT, libc::POLLOUT | libc::POLLERR),
        (libc::POLLPRI, libc::POLLPRI),
    ] {
        told |= if fd.revents & by != 0 { fd.events & asked } else { 0 };
    }
    told
}

entry! {
    /// `rpoll`: as poll(2), also of descriptors that are not of this library.
    fn rpoll(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> IntMinusOne {
        let count = usize::try_from(count).map_err(|_| Errno::EINVAL)?;
        if !is_within_limit(count) {
            return Err(Errno::EINVAL);
        }
        if fds.is_null() && count > 0 {
            return Err(Errno::EFAULT);
        }
        let mut none = [];
        let fds: &mut [pollfd] = if count == 0 {
            &mut none
        } else {
            // SAFETY: the program passes so many entries.
            unsafe { std::slice::from_raw_parts_mut(fds, count) }
        };
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        Ok(poll(fds, timeout)? as c_int)
    }

    /// `rselect`: as select(2), also of descriptors that are not of this library.
    fn rselect(
        count: c_int,
        read: *mut fd_set,
        write: *mut fd_set,
        except: *mut fd_set,
        timeout: *mut timeval,
    ) -> IntMinusOne {
        if !(0..=libc::FD_SETSIZE as c_int).contains(&count) {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the program passes null or sets, and null or a time.
        unsafe {
            let timeout = match timeout.as_ref() {
                Some(time) if time.tv_sec < 0 || time.tv_usec < 0 => return Err(Errno::EINVAL),
                Some(timeout) => Some(
                    Duration::from_secs(timeout.tv_sec as u64)
                        .saturating_add(Duration::from_micros(timeout.tv_usec as u64)),
                ),
                None => None,
            };
            let mut fds = Vec::new();
            for fd in 0..count {
                let mut events = 0;
                let all =
                    [(read, libc::POLLIN), (write, libc::POLLOUT), (except, libc::POLLPRI)];
                for (set, event) in all {
                    events |= if has(set, fd) { event } else { 0 };
                }
                if events != 0 {
                    fds.push(pollfd { fd, events, revents: 0 });
                }
            }
            let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
            loop {
                let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                poll(&mut fds, left)?;
                if fds.iter().any(|fd| fd.revents & libc::POLLNVAL != 0) {
                    return Err(Errno(libc::EBADF));
                }
                if left.is_some_and(|left| left.is_zero()) || fds.iter().any(|fd| told(fd) != 0) {
                    break;
                }
                // Those of which no set tells what is new, that they have hung up for instance, are left
                // out from now on: poll(2) passes negative numbers over.
                fds.iter_mut().filter(|fd| fd.revents != 0).for_each(|fd| fd.fd = !fd.fd);
            }
            let mut ready = 0;
            for (set, asked) in
                [(read, libc::POLLIN), (write, libc::POLLOUT), (except, libc::POLLPRI)]
            {
                for fd in fds.iter().filter(|fd| fd.events & asked != 0) {
                    if told(fd) & asked != 0 {
                        ready += 1;
                    } else {
                        libc::FD_CLR(if fd.fd < 0 { !fd.fd } else { fd.fd }, set);
                    }
                }
            }
            Ok(ready)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_of_the_system_are_polled_too() {
        let mut pipe = [0; 2];
        // SAFETY: pipe(2), write(2), close(2) on descriptors made here.
        unsafe {
            assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
            let mut fds = [pollfd { fd: pipe[0], events: libc::POLLIN, revents: 9 }];
            assert_eq!(rpoll(fds.as_mut_ptr(), 1, 0), 0);
            assert_eq!(fds[0].revents, 0);
            assert_eq!(libc::write(pipe[1], [1u8].as_ptr().cast(), 1), 1);
            assert_eq!(rpoll(fds.as_mut_ptr(), 1, -1), 1);
            assert_eq!(fds[0].revents, libc::POLLIN);
            let mut set: fd_set = std::mem::zeroed();
            libc::FD_SET(pipe[0], &mut set);
            libc::FD_SET(pipe[1], &mut set);
            let null = std::ptr::null_mut();
            let mut soon = timeval { tv_sec: 0, tv_usec: 1 };
            assert_eq!(rselect(pipe[1] + 1, &mut set, null, null, &mut soon), 1);
            assert!(libc::FD_ISSET(pipe[0], &set) && !libc::FD_ISSET(pipe[1], &set));
            assert_eq!(rselect(-1, null, null, null, &mut soon), -1);
            libc::close(pipe[0]);
            libc::close(pipe[1]);
            assert_eq!(rpoll(std::ptr::null_mut(), 1, 0), -1);
        }
    }
}
