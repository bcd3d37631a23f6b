//! `repoll_*`: epoll(7) of r* sockets and of descriptors of the system in one set.
//!
//! A set is an epoll set of the kernel, in which a thread sleeps. In it are the descriptors of the r* sockets
//! in the set, which say that something came; a second set, `plain`, of the descriptors of the system with
//! the program's own events and data, so that the kernel alone knows their rules; and a bell. What an r*
//! socket is ready for only a look at it tells: those that there is a reason to look at are queued.
//!
//! | reason to look at a socket | by |
//! |---|---|
//! | it was added or changed | `repoll_ctl` |
//! | its descriptor says that a completion or event came | the kernel |
//! | another call has seen a change of it, or taken the event of one | `Set::touch`, from the socket's `note` |
//! | it was ready, and is in the set without `EPOLLET` and `EPOLLONESHOT` | the wait that said so |
//!
//! Whoever takes a socket off the queue arms it and looks again. Whoever sleeps has seen the queue empty, and
//! whoever leaves wakes one who sleeps if it is not.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use libc::{c_int, c_long, epoll_event};
use quipu_abi_trace::entry;
use quipu_cabi::descriptors::move_up;
use quipu_cabi::{Errno, IntMinusOne};

use super::socket::{Socket, epoll_set, millis};
use super::system;
use super::table::{Entry, entry, insert};

/// What the kernel says of what is no r* socket.
const BELL: u64 = u64::MAX;
const PLAIN: u64 = u64::MAX - 1;
/// What the kernel is asked for at a time.
const BATCH: usize = 64;
/// The events of a set without which a socket in it keeps being told of.
const ONCE: u32 = (libc::EPOLLET | libc::EPOLLONESHOT) as u32;
/// What is told whether it was asked for or not.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

/// A set of r* sockets and descriptors of the system.
pub(crate) struct Set {
    fd: OwnedFd,
    plain: OwnedFd,
    bell: OwnedFd,
    /// Taken before the lock of a socket.
    items: Mutex<Items>,
    /// Taken after it.
    calls: Mutex<Calls>,
}

#[derive(Default)]
struct Items {
    known: BTreeMap<c_int, Item>,
    /// Sockets to look at, each once.
    queue: VecDeque<c_int>,
    /// Whether the descriptors of the system are asked first: they and the sockets take turns.
    plain_first: bool,
}

/// An r* socket in a set.
struct Item {
    socket: Weak<Socket>,
    events: u32,
    data: u64,
    queued: bool,
    /// The kernel says that events have come.
    heard: bool,
    /// It was told of with `EPOLLONESHOT`.
    spent: bool,
    /// Which edge of the socket was told last.
    told: Option<u64>,
}

#[derive(Default)]
struct Calls {
    /// Sockets that others have seen a change of.
    touched: BTreeSet<c_int>,
    sleepers: u32,
}

/// epoll_ctl(2), by number as in `socket`.
fn control(set: &OwnedFd, op: c_int, fd: c_int, event: *mut epoll_event) -> Result<(), Errno> {
    let set = c_long::from(set.as_raw_fd());
    // SAFETY: epoll_ctl(2); `event` is null or valid for the call.
    let done = unsafe { libc::syscall(libc::SYS_epoll_ctl, set, op, fd, event) };
    system(done as c_int).map(|_| ())
}

/// epoll_wait(2), by number as in `socket`.
fn wait(set: &OwnedFd, events: &mut [epoll_event], limit: c_int) -> Result<usize, Errno> {
    let (set, count) = (c_long::from(set.as_raw_fd()), events.len() as c_int);
    let (to, no_mask) = (events.as_mut_ptr(), ptr::null::<libc::sigset_t>());
    // SAFETY: epoll_pwait(2), with as many places as there are.
    let got = unsafe { libc::syscall(libc::SYS_epoll_pwait, set, to, count, limit, no_mask, 8) };
    system(got as c_int).map(|got| got as usize)
}

/// A descriptor out of the program's way.
fn high(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    move_up(fd).map_err(|_| Errno::EMFILE)
}

impl Set {
    fn new() -> Result<Self, Errno> {
        let (fd, plain) = (epoll_set()?, high(epoll_set()?)?);
        // SAFETY: eventfd(2) takes integers.
        let bell = system(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: the kernel just made it, for this set.
        let bell = high(unsafe { OwnedFd::from_raw_fd(bell) })?;
        let mut event = epoll_event { events: libc::EPOLLIN as u32, u64: PLAIN };
        control(&fd, libc::EPOLL_CTL_ADD, plain.as_raw_fd(), &mut event)?;
        // It is never read: each write is an edge.
        event = epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: BELL };
        control(&fd, libc::EPOLL_CTL_ADD, bell.as_raw_fd(), &mut event)?;
        Ok(Self { fd, plain, bell, items: Mutex::default(), calls: Mutex::default() })
    }

    fn items(&self) -> MutexGuard<'_, Items> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A socket of the set has changed, or lost the event that would have told.
    pub(crate) fn touch(&self, fd: c_int) {
        let mut calls = self.calls();
        calls.touched.insert(fd);
        self.ring_for(&calls);
    }

    /// Wakes a thread that sleeps in the set, if there is one.
    fn ring_for(&self, calls: &Calls) {
        if calls.sleepers > 0 {
            let one = 1u64;
            // SAFETY: write(2) of eight bytes. A bell that is full has rung.
            unsafe {
                libc::write(self.bell.as_raw_fd(), (&raw const one).cast(), size_of::<u64>())
            };
        }
    }

    /// Adds, changes or removes a socket.
    fn change(
        self: &Arc<Self>,
        op: c_int,
        socket: &Arc<Socket>,
        event: Option<epoll_event>,
    ) -> Result<(), Errno> {
        let fd = socket.fd;
        let mut items = self.items();
        let mut state = socket.lock();
        match (op, state.watchers.iter().position(|set| self.is(set)), event) {
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, _, None) => {
                return Err(Errno::EFAULT);
            }
            (libc::EPOLL_CTL_ADD, None, Some(event)) => {
                let watched = (libc::EPOLLIN | libc::EPOLLET) as u32;
                let mut said = epoll_event { events: watched, u64: fd as u64 };
                control(&self.fd, op, fd, &mut said)?;
                state.watchers.push(Arc::downgrade(self));
                items.known.insert(fd, Item::new(socket, event));
            }
            (libc::EPOLL_CTL_ADD, Some(_), _) => return Err(Errno(libc::EEXIST)),
            (libc::EPOLL_CTL_MOD, Some(_), Some(event)) => {
                let known = items.known.get(&fd);
                let (queued, heard) = known.map_or((false, false), |old| (old.queued, old.heard));
                items.known.insert(fd, Item { queued, heard, ..Item::new(socket, event) });
            }
            (libc::EPOLL_CTL_DEL, Some(at), _) => {
                state.watchers.remove(at);
                items.known.remove(&fd);
                return control(&self.fd, op, fd, ptr::null_mut());
            }
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, None, _) => return Err(Errno::ENOENT),
            _ => return Err(Errno::EINVAL),
        }
        items.queue(fd);
        self.ring_for(&self.calls());
        Ok(())
    }

    fn is(&self, other: &Weak<Self>) -> bool {
        ptr::eq(other.as_ptr(), self)
    }

    /// Waits for events, at most until `deadline`; how many there are.
    fn wait(&self, events: &mut [epoll_event], timeout: Option<Duration>) -> Result<usize, Errno> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let over = left.is_some_and(|left| left.is_zero());
            let asleep = self.lies_down();
            let plain = self.hear(asleep, left)?;
            let count = self.tell(events, plain, over)?;
            if count > 0 || over {
                return Ok(count);
            }
        }
    }

    /// Queues what others have seen a change of. True where nothing is left to be looked at: then this thread
    /// counts as one that sleeps.
    fn lies_down(&self) -> bool {
        let mut items = self.items();
        let mut calls = self.calls();
        while let Some(fd) = calls.touched.pop_first() {
            items.queue(fd);
        }
        let asleep = items.queue.is_empty();
        calls.sleepers += u32::from(asleep);
        asleep
    }

    /// Hears what the kernel says, and waits for it if the thread sleeps; whether descriptors of the system
    /// are ready.
    fn hear(&self, asleep: bool, left: Option<Duration>) -> Result<bool, Errno> {
        let mut said = [epoll_event { events: 0, u64: 0 }; BATCH];
        let heard = wait(&self.fd, &mut said, if asleep { millis(left) } else { 0 });
        self.calls().sleepers -= u32::from(asleep);
        let mut plain = false;
        let mut items = self.items();
        for said in &said[..heard?] {
            match said.u64 {
                BELL => {}
                PLAIN => plain = true,
                fd => items.heard(fd as c_int),
            }
        }
        Ok(plain)
    }

    /// Fills in what is ready now; how much. `over`: the thread leaves even if that is nothing.
    fn tell(&self, events: &mut [epoll_event], plain: bool, over: bool) -> Result<usize, Errno> {
        let mut items = self.items();
        items.plain_first ^= plain;
        let mut count = 0;
        if plain && items.plain_first {
            count = wait(&self.plain, events, 0)?;
        }
        count += self.look(&mut items, &mut events[count..]);
        if plain && !items.plain_first && count < events.len() {
            count += wait(&self.plain, &mut events[count..], 0)?;
        }
        if count > 0 || over {
            // Who sleeps here is told of what is left, as the kernel does it: what woke this thread, even if
            // it only looked in, wakes nobody else.
            let calls = self.calls();
            if !items.queue.is_empty() || !calls.touched.is_empty() {
                self.ring_for(&calls);
            }
        }
        Ok(count)
    }

    /// Looks at the sockets in the queue, once at each.
    fn look(&self, items: &mut Items, events: &mut [epoll_event]) -> usize {
        let mut count = 0;
        for _ in 0..items.queue.len() {
            if count == events.len() {
                break;
            }
            let Some(fd) = items.queue.pop_front() else { break };
            let Some(item) = items.known.get_mut(&fd) else { continue };
            item.queued = false;
            let Some((ready, again)) = item.look(self) else {
                items.known.remove(&fd);
                continue;
            };
            if ready != 0 {
                events[count] = epoll_event { events: ready, u64: item.data };
                count += 1;
            }
            if again {
                items.queue(fd);
            }
        }
        count
    }
}

impl Items {
    fn queue(&mut self, fd: c_int) {
        if let Some(item) = self.known.get_mut(&fd)
            && !std::mem::replace(&mut item.queued, true)
        {
            self.queue.push_back(fd);
        }
    }

    fn heard(&mut self, fd: c_int) {
        if let Some(item) = self.known.get_mut(&fd) {
            item.heard = true;
        }
        self.queue(fd);
    }
}

impl Item {
    fn new(socket: &Arc<Socket>, event: epoll_event) -> Self {
        let (socket, events, data) = (Arc::downgrade(socket), event.events, event.u64);
        Self { socket, events, data, queued: false, heard: false, spent: false, told: None }
    }

    /// What the socket is ready for, and whether it is to be looked at again; none: it is closed.
    fn look(&mut self, set: &Set) -> Option<(u32, bool)> {
        let socket = self.socket.upgrade()?;
        let mut state = socket.lock();
        if !state.watchers.iter().any(|watcher| set.is(watcher)) {
            return None;
        }
        if std::mem::take(&mut self.heard) {
            state.take_event();
        }
        if self.spent {
            return Some((0, false));
        }
        let (asked, edges) = (self.events | ALWAYS, self.events & libc::EPOLLET as u32 != 0);
        let fresh = |events: i16, edge, told| {
            if edges && told == Some(edge) { 0 } else { u32::from(events as u16) & asked }
        };
        let stays = self.events & ONCE == 0;
        let mut more = state.progress_for(set);
        let mut ready = fresh(state.events(), state.edge, self.told);
        if ready == 0 || !stays {
            // Armed and looked again: only now it may leave the queue.
            state.sleeps_outside();
            state.arm();
            more |= state.progress_for(set);
            ready = fresh(state.events(), state.edge, self.told);
        }
        if ready != 0 {
            self.told = Some(state.edge);
            self.spent = self.events & libc::EPOLLONESHOT as u32 != 0;
        }
        Some((ready, more || ready != 0 && stays))
    }
}

/// The set of a descriptor.
///
/// # Errors
///
/// EINVAL if it is something else of this library's, EBADF if it is nothing.
fn set_of(fd: c_int) -> Result<Arc<Set>, Errno> {
    match entry(fd) {
        Some(Entry::Set(set)) => Ok(set),
        Some(_) => Err(Errno::EINVAL),
        None => Err(Errno(libc::EBADF)),
    }
}

entry! {
    /// `repoll_create`: as epoll_create1(2). `O_NONBLOCK` is allowed, as librspreload passes it on.
    fn repoll_create(flags: c_int) -> IntMinusOne {
        if flags & !(libc::EPOLL_CLOEXEC | libc::O_NONBLOCK) != 0 {
            return Err(Errno::EINVAL);
        }
        let set = Set::new()?;
        let fd = set.fd.as_raw_fd();
        if flags & libc::EPOLL_CLOEXEC == 0 {
            // SAFETY: fcntl(2) on a descriptor of this library's.
            system(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) })?;
        }
        insert(fd, Entry::Set(Arc::new(set)));
        Ok(fd)
    }

    /// `repoll_ctl`: as epoll_ctl(2), of r* sockets and descriptors of the system.
    fn repoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> IntMinusOne {
        let this = set_of(set)?;
        if fd == set {
            return Err(Errno::EINVAL);
        }
        if let Some(Entry::Stream(socket)) = entry(fd) {
            // SAFETY: the program passes null or an event.
            let event = (!event.is_null()).then(|| unsafe { event.read_unaligned() });
            this.change(op, &socket, event)?;
        } else {
            control(&this.plain, op, fd, event)?;
        }
        Ok(0)
    }

    /// `repoll_wait`: as epoll_wait(2).
    fn repoll_wait(
        set: c_int,
        events: *mut epoll_event,
        count: c_int,
        timeout_ms: c_int,
    ) -> IntMinusOne {
        let set = set_of(set)?;
        let most = c_int::MAX / size_of::<epoll_event>() as c_int;
        if !(1..=most).contains(&count) {
            return Err(Errno::EINVAL);
        }
        if events.is_null() {
            return Err(Errno::EFAULT);
        }
        // SAFETY: the program passes so many places.
        let events = unsafe { std::slice::from_raw_parts_mut(events, count as usize) };
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        Ok(set.wait(events, timeout)? as c_int)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bell wakes one thread alone. Where that was about to leave, another that sleeps must hear it.
    #[test]
    fn who_looks_in_does_not_keep_the_bell() {
        for count in [0, 1] {
            let set = Set::new().unwrap();
            let mut events = [epoll_event { events: libc::EPOLLOUT as u32, u64: 7 }; 4];
            if count > 0 {
                let fd = set.bell.as_raw_fd();
                control(&set.plain, libc::EPOLL_CTL_ADD, fd, &mut events[0]).unwrap();
            }
            assert!(set.lies_down() && set.lies_down(), "one looks in, and one sleeps");
            set.touch(1);
            let plain = set.hear(true, Some(Duration::ZERO)).unwrap();
            assert_eq!(set.tell(&mut events, plain, count == 0), Ok(count));
            let said = wait(&set.fd, &mut events, 0).unwrap();
            assert!(events[..said].iter().any(|said| said.u64 == BELL), "{count} events");
        }
    }
}
