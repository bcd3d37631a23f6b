//! The process that has the adapter: a thread that serves the programs that attach.

mod callers;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use quipu_mem::Segment;
use quipu_nic::ChannelId;

use self::callers::{Caller, Closed, Greeted, Unread};
use super::calls::write_info;
use super::claim::Common;
use super::folders::{own_place, own_places};
use super::guests::Guests;
use super::place::Place;
use super::tenant::{Ending, Leaving, Tenant};
use super::words::{HELLO, Writer};
use super::{connect, hear, is_name, rings_len};
use crate::accounts::own_user;
use crate::engine::Engine;
use crate::net::listener::Acceptor;
use crate::packet::LinkSpec;
use crate::sys::{self, Epoll, EventFd, ReadyList};

/// How long the thread looks for work before it sleeps: one that is woken is late by some 20 to 50 us.
const SPIN: Duration = Duration::from_micros(50);
/// Turns between two looks at the sockets, while there is work.
const TURNS_PER_LOOK: u32 = 64;
/// Turns without result between two times that the thread lets others have its processor.
const TURNS_PER_YIELD: u32 = 16;
/// The most programs at a time, and the most that may be about to attach.
const MAX_TENANTS: usize = 64;
const MAX_CALLERS: usize = 16;
/// How many reasons are kept for which programs could not attach.
const MAX_REFUSALS: usize = 16;
/// Descriptors that are enough for all programs, and for what else the process has.
const DESCRIPTORS: u64 = 8 * MAX_TENANTS as u64 + 256;
/// How long one may take to say what it wants, and that it has mapped it.
pub(super) const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });
/// A program that leaves its completions lying rings when it has taken them. To be sure, it is looked at
/// once in such a time.
const BEHIND: Duration = Duration::from_millis(100);
/// The least and the most memory of a program.
const ARENA: std::ops::RangeInclusive<u64> = 1 << 20..=8 << 30;

/// Why an adapter cannot be shared.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// That is no name.
    #[error(
        "{0:?} is not a valid name for an adapter: use 1 to 32 letters, digits, dots, - or _, \
         without .lock at the end"
    )]
    Name(String),
    /// The adapter is itself one that another process shares.
    #[error("another process shares this adapter; attach programs to {0}")]
    Elsewhere(LinkSpec),
    /// There is no folder for the socket.
    #[error("cannot create the socket of a shared adapter: {0}")]
    Folder(#[source] io::Error),
    /// A process is there already.
    #[error("another process shares an adapter with the name {0}; end it, or choose another name")]
    Taken(String),
    /// The system refuses.
    #[error("cannot share the adapter at {}: {source}", path.display())]
    System {
        /// The socket.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The engine.
    #[error(transparent)]
    Engine(#[from] crate::EngineError),
}

/// An adapter that programs of this user, and of its guests, can attach to, by its name. They are let go when
/// this is dropped.
pub struct Sharer {
    stop: Arc<AtomicBool>,
    bell: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
    place: Place,
    refusals: Refusals,
    /// For guests, if there are any.
    link: Option<LinkSpec>,
}

/// Why programs could not attach: the last of them.
type Refusals = Arc<Mutex<VecDeque<String>>>;

impl Sharer {
    /// Shares the adapter of an engine that has a packet link, with programs of this user and of guests.
    ///
    /// # Errors
    ///
    /// No name, or one that is taken; no descriptors, threads or place for the socket.
    pub fn start(engine: &Arc<Engine>, name: &str, guests: &Guests) -> Result<Self, ShareError> {
        if !is_name(name) {
            return Err(ShareError::Name(name.to_owned()));
        }
        let info = engine.qpip_info()?;
        if let link @ LinkSpec::Share { .. } = info.link {
            return Err(ShareError::Elsewhere(link));
        }
        let path = own_place(name, !guests.is_empty()).map_err(ShareError::Folder)?;
        let failed = |source| ShareError::System { path: path.clone(), source };
        let taken = || ShareError::Taken(name.to_owned());
        // Elsewhere somebody may be, too: also one whose queue of callers is full.
        if own_places(name).filter(|other| *other != path).any(|other| is_taken(&other)) {
            return Err(taken());
        }
        if let Some(folder) = path.parent() {
            Place::remove_dead(folder);
        }
        let mut place = Place::take(path.clone()).map_err(failed)?.ok_or_else(taken)?;
        let (listener, epoll, bell) = open(engine, &mut place, guests).map_err(failed)?;
        let (stop, bell) = (Arc::new(AtomicBool::new(false)), Arc::new(bell));
        let added = epoll.add(bell.fd(), libc::EPOLLIN, BELL);
        added.and_then(|()| epoll.add(&listener, libc::EPOLLIN, LISTENER)).map_err(failed)?;
        // What programs are told about events by is made within the soft limit.
        let _ = sys::raise_descriptor_limit(DESCRIPTORS);
        let (waker, _) = engine.create_channel()?;
        let acceptor = Acceptor::new().map_err(failed)?;
        let welcome = write_info(greeting(), &info).bytes();
        let refusals = Arc::new(Mutex::new(VecDeque::new()));
        let server = Server {
            engine: Arc::clone(engine),
            stop: Arc::clone(&stop),
            bell: Arc::clone(&bell),
            listener,
            epoll,
            waker,
            welcome,
            guests: guests.clone(),
            common: Common::default(),
            tenants: Vec::new(),
            leaving: Vec::new(),
            callers: Vec::new(),
            greeted: Vec::new(),
            unread: Vec::new(),
            closed: Closed::default(),
            acceptor,
            next: 0,
            refusals: Arc::clone(&refusals),
        };
        let thread = std::thread::Builder::new().name("quipu-share".into());
        let thread = Some(thread.spawn(move || server.run()).map_err(failed)?);
        let link = (!guests.is_empty()).then(|| guest_link(name, own_user()));
        Ok(Self { stop, bell, thread, place, refusals, link })
    }

    /// The link by which guests attach, if there are any: of root's adapter the same as for this user.
    #[must_use]
    pub fn guest_link(&self) -> Option<&LinkSpec> {
        self.link.as_ref()
    }

    /// Why a program could not attach, if there is one of which this has not told yet. It was told itself.
    #[must_use]
    pub fn take_refusal(&self) -> Option<String> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

#[cfg(test)]
impl Sharer {
    /// The thread that serves programs.
    pub(super) fn thread(&self) -> libc::pthread_t {
        use std::os::unix::thread::JoinHandleExt;
        self.thread.as_ref().expect("it runs until this is dropped").as_pthread_t()
    }
}

impl Drop for Sharer {
    fn drop(&mut self) {
        if !self.place.is_here() {
            // The thread is its parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        self.stop.store(true, Ordering::Release);
        self.bell.set();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that shares the adapter panicked");
        }
    }
}

/// Frees the memory of a program that is gone. That takes the kernel a second for some gigabytes, in which
/// others do not wait.
fn free(memory: Segment) {
    let thread = std::thread::Builder::new().name("quipu-share-free".into());
    // Where there can be no thread it is freed here.
    let _ = thread.spawn(move || drop(memory));
}

/// The link to an adapter that a user shares with others.
fn guest_link(name: &str, owner: u32) -> LinkSpec {
    let user = (owner != 0).then(|| owner.to_string());
    LinkSpec::Share { name: name.to_owned(), user }
}

/// Whether somebody listens there.
fn is_taken(path: &Path) -> bool {
    connect(path).map_or_else(|error| sys::would_block(&error), |_| true)
}

/// The socket at which programs call, and what else is waited for.
fn open(
    engine: &Arc<Engine>,
    place: &mut Place,
    guests: &Guests,
) -> io::Result<(OwnedFd, Epoll, EventFd)> {
    if !engine.is_here() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok((place.listen(guests)?, Epoll::new()?, EventFd::new()?))
}

/// How the answer to a program that attaches begins.
fn greeting() -> Writer {
    Writer::default().word(HELLO).word(rings_len() as u64)
}

const BELL: u64 = 0;
const LISTENER: u64 = 1;
/// Tokens of programs: what of them, and which.
const CALLER: u64 = 1 << 32;
const SOCKET: u64 = 2 << 32;
const TENANT_BELL: u64 = 3 << 32;
const EVENTS: u64 = 4 << 32;
const PROCESS: u64 = 5 << 32;
const GREETED: u64 = 6 << 32;
const KIND: u64 = !(u32::MAX as u64);

struct Server {
    engine: Arc<Engine>,
    stop: Arc<AtomicBool>,
    bell: Arc<EventFd>,
    listener: OwnedFd,
    epoll: Epoll,
    /// Where the thread sleeps until a completion comes that was asked for.
    waker: ChannelId,
    welcome: Vec<u8>,
    guests: Guests,
    common: Common,
    tenants: Vec<(u32, Tenant)>,
    /// Programs that have ended, or were let go, whose objects are not all destroyed yet.
    leaving: Vec<Leaving>,
    /// The oldest first.
    callers: Vec<Caller>,
    greeted: Vec<Greeted>,
    unread: Vec<Unread>,
    closed: Closed,
    acceptor: Acceptor,
    /// The number of the next caller.
    next: u32,
    refusals: Refusals,
}

impl Server {
    fn run(mut self) {
        let mut ready = ReadyList::new();
        let mut since = Instant::now();
        let mut turns = 0u32;
        while !self.stop.load(Ordering::Acquire) {
            turns = turns.wrapping_add(1);
            let mut any = self.serve();
            if turns.is_multiple_of(TURNS_PER_LOOK) {
                any |= self.look(&mut ready, Some(Duration::ZERO));
            }
            if any {
                since = Instant::now();
            } else if self.tenants.is_empty() || since.elapsed() >= SPIN {
                // Where nothing has come there is nothing to look for.
                if self.sleep(&mut ready) {
                    since = Instant::now();
                }
            } else if turns.is_multiple_of(TURNS_PER_YIELD) {
                // A program may need this processor to go on.
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        self.greeted.clear();
        self.tenants.clear();
        self.leaving.clear();
        let _ = self.engine.destroy_channel(self.waker);
    }

    /// One turn of each program; whether any had something to do.
    fn serve(&mut self) -> bool {
        let mut any = !self.leaving.is_empty();
        let mut index = 0;
        while let Some((_, tenant)) = self.tenants.get_mut(index) {
            match tenant.turn() {
                Ok(worked) => {
                    any |= worked;
                    index += 1;
                }
                Err(ending) => self.let_go(index, &ending),
            }
        }
        let mut index = 0;
        while let Some(leaving) = self.leaving.get_mut(index) {
            if leaving.turn() {
                index += 1;
            } else {
                free(self.leaving.swap_remove(index).into_memory());
            }
        }
        any
    }

    /// Says why a program is detached, and listens to it no more.
    fn let_go(&mut self, index: usize, ending: &Ending) {
        let (number, tenant) = self.tenants.swap_remove(index);
        match ending {
            Ending::Gone => tracing::info!(number, "a program has ended"),
            _ => tracing::warn!(number, %ending, "a program is detached"),
        }
        for fd in [tenant.socket.as_raw_fd(), tenant.bell.as_raw_fd(), tenant.events] {
            self.epoll.remove(&fd);
        }
        if let Some(process) = &tenant.process {
            self.epoll.remove(process);
        }
        self.leaving.push(Leaving::new(tenant));
    }

    /// Waits for work; whether there may be some.
    fn sleep(&mut self, ready: &mut ReadyList) -> bool {
        let idle = self.tenants.iter_mut().fold(true, |idle, (_, tenant)| tenant.arm() && idle);
        let mut any = !idle || self.serve();
        if !any {
            let behind = self.tenants.iter_mut().any(|(_, tenant)| tenant.is_behind());
            let limit = match (behind, self.has_callers()) {
                (true, _) => Some(BEHIND),
                (false, false) => None,
                (false, true) => Some(PATIENCE),
            };
            any = self.rest(limit);
            any |= self.look(ready, Some(Duration::ZERO));
        }
        self.tenants.iter_mut().for_each(|(_, tenant)| tenant.disarm());
        self.hang_up();
        any
    }

    /// Looks at the sockets; whether there was anything.
    fn look(&mut self, ready: &mut ReadyList, limit: Option<Duration>) -> bool {
        // The set and the list are valid, so this cannot fail.
        let _ = self.epoll.wait(ready, limit);
        let mut any = false;
        for item in ready.iter() {
            any = true;
            let number = item.token as u32;
            match item.token {
                BELL => {
                    self.bell.clear();
                    self.attach_closed();
                }
                LISTENER => self.accept(),
                token => match token & KIND {
                    CALLER => self.admit(number),
                    GREETED => self.settle(number),
                    // Calls are read at its turn.
                    SOCKET => self.with(number, |tenant| {
                        tenant.called = true;
                        Ok(())
                    }),
                    TENANT_BELL => self.with(number, |tenant| {
                        if hear(&tenant.bell) { Ok(()) } else { Err(Ending::Gone) }
                    }),
                    PROCESS => self.with(number, |_| Err(Ending::Gone)),
                    // Events are taken at its turn.
                    _ => {}
                },
            }
        }
        any
    }

    /// Sleeps until there may be work, and makes the engine's progress meanwhile; whether there is some. An
    /// adapter whose link is gone has nothing to share.
    fn rest(&mut self, limit: Option<Duration>) -> bool {
        match self.engine.wait_channel_beside(self.waker, self.epoll.fd(), limit) {
            Ok(event) => event.is_some(),
            Err(_) => {
                self.stop.store(true, Ordering::Release);
                true
            }
        }
    }

    /// Does something with a program, which may be gone already.
    fn with(&mut self, number: u32, act: impl FnOnce(&mut Tenant) -> Result<(), Ending>) {
        let Some(index) = self.tenants.iter().position(|(other, _)| *other == number) else {
            return;
        };
        if let Err(ending) = act(&mut self.tenants[index].1) {
            self.let_go(index, &ending);
        }
    }
}
