//! Programs that have called and are not attached yet: they say what they want, are given it, and say that
//! they have mapped it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::super::guests::{Identity, has_place};
use super::super::tenant::{Leaving, Tenant};
use super::super::words::{HELLO, NOT_FOR_YOU, Reader, Writer, is_hello};
use super::super::{pair, rings_len};
use super::{
    ARENA, CALLER, EVENTS, GREETED, MAX_CALLERS, MAX_REFUSALS, MAX_TENANTS, PATIENCE, PROCESS,
    SOCKET, Server, TENANT_BELL,
};
use crate::link::segment::{self, Writers};
use crate::link::socket::{self as unix, MAX_MESSAGE};
use crate::net::listener::Accepted;
use crate::sys::{self, EventFd};

/// A program that has called, and not yet said what it wants.
pub(super) struct Caller {
    number: u32,
    socket: OwnedFd,
    who: Identity,
    since: Instant,
}

/// A program that was given its memory, which is not closed yet: until then it may take pages out of it, so
/// that nobody else is to look there.
pub(super) struct Greeted {
    number: u32,
    tenant: Tenant,
    /// Until it says that it has mapped it.
    file: Option<OwnedFd>,
    since: Instant,
}

/// A program that was let go and has not read what it was given. As long as the descriptors lie there, the
/// kernel charges them to the user who shares, of whom it takes no more than a number: so it keeps its place.
pub(super) struct Unread {
    user: u32,
    socket: Arc<OwnedFd>,
}

/// Programs whose memory is closed by now, or cannot be.
pub(super) type Closed = Arc<Mutex<Vec<(u32, io::Result<()>)>>>;

/// Why a program cannot attach.
struct Refusal {
    why: String,
    /// Its user is none whom the adapter is shared with.
    stranger: bool,
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self { why, stranger: false }
    }
}

/// Nothing in there is left half done by a panic.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Takes a caller.
    pub(super) fn accept(&mut self) {
        let take = || unix::accept(&self.listener).map(|socket| (socket, ()));
        let Accepted::Connection(socket, ()) = self.acceptor.accept_by(take) else { return };
        // Those who say nothing keep nobody away.
        if let [oldest, ..] = &self.callers[..]
            && self.callers.len() == MAX_CALLERS
        {
            // It may have said something meanwhile.
            if sys::wait_readable_within(&oldest.socket, Duration::ZERO) {
                self.admit(oldest.number);
            } else {
                self.epoll.remove(&self.callers.remove(0).socket);
            }
        }
        let Ok(who) = self.guests.caller(&socket) else { return };
        // Where there are no guests no other user gets here, and none is told anything.
        if !who.admitted && self.guests.is_empty() {
            return;
        }
        self.next = self.next.wrapping_add(1);
        let number = self.next;
        if self.epoll.add(&socket, libc::EPOLLIN, CALLER | u64::from(number)).is_ok() {
            self.callers.push(Caller { number, socket, who, since: Instant::now() });
        }
    }

    /// A caller says what it wants, and is given it.
    pub(super) fn admit(&mut self, number: u32) {
        let Some(index) = self.callers.iter().position(|caller| caller.number == number) else {
            return;
        };
        let caller = self.callers.remove(index);
        self.epoll.remove(&caller.socket);
        let mut buffer = [0; MAX_MESSAGE];
        let hello = match sys::receive(&caller.socket, &mut buffer) {
            // It only looked whether somebody is here.
            Ok(0) | Err(_) => return,
            Ok(len) => &buffer[..len],
        };
        let (socket, who) = (Arc::new(caller.socket), caller.who);
        let given = self.wanted(hello, who).and_then(|wanted| {
            let failed = |error| format!("the adapter has no room for another program: {error}");
            Ok(self.give(number, &socket, who, wanted).map_err(failed)?)
        });
        match given {
            Ok(greeted) => self.greeted.push(greeted),
            Err(refusal) => self.refuse(&socket, refusal),
        }
    }

    /// Tells a program, and whoever shares the adapter, why it cannot attach.
    fn refuse(&mut self, socket: &OwnedFd, Refusal { why, stranger }: Refusal) {
        tracing::warn!(why, "a program cannot attach");
        let refusal = Writer::default().word(HELLO).word(0u64).text(&why);
        let refusal = if stranger { refusal.word(NOT_FOR_YOU) } else { refusal };
        // If it is gone it need not know.
        let _ = unix::send(socket, &refusal.bytes(), &[]);
        let mut refusals = lock(&self.refusals);
        if refusals.len() == MAX_REFUSALS {
            refusals.pop_front();
        }
        refusals.push_back(why);
    }

    /// How many bytes a program wants that is to attach; or why it cannot.
    fn wanted(&mut self, hello: &[u8], who: Identity) -> Result<u64, Refusal> {
        let user = who.user;
        if !who.admitted {
            let why = format!("the adapter is not shared with its user, {user}");
            return Err(Refusal { why, stranger: true });
        }
        let mut hello = Reader::new(hello);
        let wanted = match (hello.word(), hello.word()) {
            (Some(HELLO), Some(wanted)) => wanted,
            (Some(first), _) if is_hello(first) => {
                return Err("the program has another version of Quipu".to_owned().into());
            }
            _ => return Err("the program uses another protocol".to_owned().into()),
        };
        self.unread.retain(|it| unix::has_unread(&it.socket));
        let attached = || {
            let attached = self.tenants.iter().map(|(_, tenant)| tenant.user);
            attached.chain(self.greeted.iter().map(|greeted| greeted.tenant.user))
        };
        // What those who leave still have is no room for others of their kind.
        let leaving = || {
            let leaving = self.leaving.iter().filter(|_| !who.own).map(Leaving::user);
            let unread = self.unread.iter().map(|it| it.user);
            leaving.chain(unread.filter(|it| !who.own || *it == user))
        };
        let of_all = attached().count() + leaving().count();
        let of_user = attached().chain(leaving()).filter(|it| *it == user).count();
        if has_place(who.own, of_user, of_all, MAX_TENANTS) {
            return Ok(wanted);
        }
        Err(match of_all {
            MAX_TENANTS.. => {
                format!("{MAX_TENANTS} programs are attached, and that is the limit")
            }
            _ => format!(
                "user {user} has {of_user} programs attached, and one guest may have at most \
                 half of the free slots ({MAX_TENANTS} in all)"
            ),
        }
        .into())
    }

    /// Gives a program its memory and its bell.
    fn give(
        &self,
        number: u32,
        socket: &Arc<OwnedFd>,
        who: Identity,
        wanted: u64,
    ) -> io::Result<Greeted> {
        let rings = rings_len();
        let len = wanted.clamp(*ARENA.start(), *ARENA.end()) as usize + rings;
        let (file, memory) = segment::create(c"quipu-share", len, Writers::Mapped)?;
        let [bell, theirs] = pair()?;
        unix::take_no_descriptors(&bell);
        let fds: [RawFd; 2] = [file.as_raw_fd(), theirs.as_raw_fd()];
        let ends = (who.user, Arc::clone(socket), bell);
        let tenant = Tenant::new(&self.engine, &self.common, self.waker, &memory, rings, ends);
        let tenant = tenant.map_err(io::Error::other)?;
        self.epoll.add(socket, libc::EPOLLIN, GREETED | u64::from(number))?;
        unix::send(socket, &self.welcome, &fds)?;
        Ok(Greeted { number, tenant, file: Some(file), since: Instant::now() })
    }

    /// A program says that it has mapped what it was given, or it does not, and is let go. To close the
    /// memory may take as long as the program likes, which may be at work on the file: others do not wait
    /// for that.
    pub(super) fn settle(&mut self, number: u32) {
        let Some(index) = self.greeted.iter().position(|greeted| greeted.number == number) else {
            return;
        };
        let greeted = &mut self.greeted[index];
        let socket = &greeted.tenant.socket;
        self.epoll.remove(socket);
        let mut buffer = [0; MAX_MESSAGE];
        let said = sys::receive(socket, &mut buffer).unwrap_or(0);
        // What it has not read it has not mapped.
        let mapped = buffer[..said] == HELLO.to_ne_bytes() && !unix::has_unread(socket);
        let file = greeted.file.take().filter(|_| mapped);
        let closed = Arc::clone(&self.closed);
        let close = |file: OwnedFd| {
            let bell = self.bell.fd().try_clone()?;
            // If a program never lets it end, this process can be killed all the same.
            sys::spawn_apart("quipu-share-close", [file, bell], move |[file, bell]| {
                let outcome = segment::close(&file);
                lock(&closed).push((number, outcome));
                EventFd::from_fd(bell).set();
            })
        };
        if file.is_none_or(|file| close(file).is_err()) {
            self.dismiss(index);
        }
    }

    /// Lets go of a program before it is attached.
    fn dismiss(&mut self, index: usize) {
        let Greeted { tenant, .. } = self.greeted.remove(index);
        self.epoll.remove(&tenant.socket);
        if unix::has_unread(&tenant.socket) {
            unix::shut_down(&tenant.socket);
            let socket = Arc::clone(&tenant.socket);
            self.unread.push(Unread { user: tenant.user, socket });
        }
        self.leaving.push(Leaving::new(tenant));
    }

    /// Programs whose memory is closed are attached.
    pub(super) fn attach_closed(&mut self) {
        let closed = std::mem::take(&mut *lock(&self.closed));
        for (number, outcome) in closed {
            let Some(index) = self.greeted.iter().position(|it| it.number == number) else {
                continue;
            };
            match outcome.and_then(|()| self.attach(index)) {
                Ok(()) => {
                    let Greeted { tenant, .. } = self.greeted.remove(index);
                    tracing::info!(number, user = tenant.user, "a program has attached");
                    self.tenants.push((number, tenant));
                }
                Err(error) => {
                    tracing::warn!(number, %error, "a program cannot attach");
                    self.dismiss(index);
                }
            }
        }
    }

    /// Listens to a program from now on.
    fn attach(&mut self, index: usize) -> io::Result<()> {
        let Greeted { number, tenant, .. } = &mut self.greeted[index];
        let number = u64::from(*number);
        // A child that the program has forked may keep its socket open. Without this, as where a sandbox
        // forbids it, the end of the socket tells.
        tenant.process = unix::peer_credentials(&tenant.socket)
            .and_then(|peer| sys::process(peer.pid))
            .and_then(|it| self.epoll.add(&it, libc::EPOLLIN, PROCESS | number).map(|()| it))
            .ok();
        self.epoll.add(&tenant.bell, libc::EPOLLIN, TENANT_BELL | number)?;
        // Once for each: they are taken at its turn, and while its ring is full they stay.
        for (fd, kind) in [(tenant.socket.as_raw_fd(), SOCKET), (tenant.events, EVENTS)] {
            self.epoll.add(&fd, libc::EPOLLIN | libc::EPOLLET, kind | number)?;
        }
        Ok(())
    }

    /// Whether somebody has called who is not attached yet.
    pub(super) fn has_callers(&self) -> bool {
        !self.callers.is_empty() || !self.greeted.is_empty()
    }

    /// Hangs up on those who have said nothing for too long.
    pub(super) fn hang_up(&mut self) {
        self.callers.retain(|caller| {
            let waits = caller.since.elapsed() < PATIENCE;
            if !waits {
                self.epoll.remove(&caller.socket);
            }
            waits
        });
        // One for which a thread is at work keeps its place: so there are no more of these.
        let is_late = |it: &Greeted| it.file.is_some() && it.since.elapsed() >= PATIENCE;
        while let Some(index) = self.greeted.iter().position(is_late) {
            self.dismiss(index);
        }
    }
}
