//! The thread of a NIC that listens for requests, watches connections for their end, and takes completions
//! while handlers wait for them. It calls no function of the program.

use std::collections::HashMap;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use quipu_cabi::descriptors::with_more_descriptors;
use quipu_via::address::ports;
use quipu_via::codes::{Code, Outcome};
use quipu_via::meeting::Wait;
use quipu_via::message::{Cause, Message, first_body};

use crate::accept::Incoming;
use crate::bell::Bell;
use crate::callback::spawn;
use crate::doorstep::Doorstep;
use crate::handle::{Id, fresh};
use crate::nic::{Deadline, Nic, poll, readable, say};

/// Listeners beyond these are closed when nobody waits at them.
const MAX_IDLE_LISTENERS: usize = 64;
const STACK: usize = 256 << 10;
/// How long a VI whose peer has gone waits for what is under way: acknowledgements of its sends, which come
/// by another way than the news.
const LAST_WORDS: Duration = Duration::from_millis(250);
/// How long an unreliable one waits at least, whose peer does not wait for acknowledgements.
const STRAGGLERS: Duration = Duration::from_millis(5);
/// Messages of a peer: each is an error that the program is told of, and one breaks a connection.
const MAX_MESSAGES: u32 = 4;
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// A wait of the program.
struct Waiting {
    id: Id,
    wait: Wait,
    found: Option<Incoming>,
}

/// The connection of a VI.
pub(crate) struct Watched {
    pub(crate) stream: Arc<TcpStream>,
    pub(crate) vi: Id,
    pub(crate) generation: u32,
    /// A message that has come in part.
    bytes: Vec<u8>,
    /// Messages that have come.
    messages: u32,
}

/// A VI whose peer has gone.
struct Leaving {
    vi: Id,
    generation: u32,
    since: Instant,
}

#[derive(Default)]
struct Shared {
    waits: Vec<Waiting>,
    listeners: HashMap<u16, Arc<TcpListener>>,
    watched: Vec<Watched>,
    watches_completions: bool,
    is_running: bool,
    is_stopped: bool,
}

struct Inner {
    shared: Mutex<Shared>,
    changed: Condvar,
    bell: Bell,
}

/// What the program's threads and that thread share.
#[derive(Clone)]
pub(crate) struct Control(Arc<Inner>);

impl Control {
    pub(crate) fn new() -> io::Result<Self> {
        let (shared, changed) = (Mutex::default(), Condvar::new());
        Ok(Self(Arc::new(Inner { shared, changed, bell: Bell::new()? })))
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread unless it runs.
    pub(crate) fn start(&self, nic: &Arc<Nic>) -> Outcome {
        let mut shared = self.lock();
        if shared.is_running || shared.is_stopped {
            return Ok(());
        }
        let (own, nic) = (self.clone(), Arc::downgrade(nic));
        spawn("vipl-control", STACK, move || own.run(&nic))?;
        shared.is_running = true;
        Ok(())
    }

    /// Ends the thread, and all waits.
    pub(crate) fn stop(&self) {
        let mut shared = self.lock();
        shared.is_stopped = true;
        shared.listeners.drain().for_each(|(_, listener)| close(&listener));
        shared.watched.clear();
        drop(shared);
        self.0.changed.notify_all();
        self.0.bell.ring();
    }

    /// Watches the connection of a VI from now on.
    pub(crate) fn watch(&self, stream: Arc<TcpStream>, vi: Id, generation: u32) {
        self.lock().watched.push(Watched {
            stream,
            vi,
            generation,
            bytes: Vec::new(),
            messages: 0,
        });
        self.0.bell.ring();
    }

    /// Has the thread look at connections that were shut down.
    pub(crate) fn forget(&self) {
        self.0.bell.ring();
    }

    /// Has the thread take completions for handlers that wait.
    pub(crate) fn watch_completions(&self) {
        self.lock().watches_completions = true;
        self.0.bell.ring();
    }

    /// Announces a wait: requests for it are kept from now on.
    pub(crate) fn announce(&self, nic: &Nic, wait: Wait) -> Outcome<Id> {
        let mut shared = self.lock();
        shared.listen(nic, wait.discriminator())?;
        let id = fresh();
        shared.waits.push(Waiting { id, wait, found: None });
        drop(shared);
        self.0.bell.ring();
        Ok(id)
    }

    /// Waits for the request that meets a wait; none if the time is over.
    pub(crate) fn await_request(&self, id: Id, deadline: Deadline) -> Option<Incoming> {
        let mut shared = self.lock();
        loop {
            let waiting = shared.waits.iter_mut().find(|waiting| waiting.id == id)?;
            if let Some(found) = waiting.found.take() {
                return Some(found);
            }
            if deadline.is_over() || shared.is_stopped {
                return None;
            }
            let left = deadline.left().unwrap_or(Duration::from_secs(3600));
            let waited = self.0.changed.wait_timeout(shared, left);
            shared = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends a wait; a request that it has met meanwhile.
    pub(crate) fn withdraw(&self, id: Id) -> Option<Incoming> {
        let mut shared = self.lock();
        let at = shared.waits.iter().position(|waiting| waiting.id == id)?;
        let waiting = shared.waits.swap_remove(at);
        shared.close_idle();
        waiting.found
    }

    /// Offers a request to those who wait; gives it back if nobody waits for it.
    pub(crate) fn offer(&self, incoming: Incoming) -> Option<Incoming> {
        let mut shared = self.lock();
        let mut waits = shared.waits.iter_mut();
        let met =
            waits.find(|waiting| waiting.found.is_none() && waiting.wait.meets(&incoming.request));
        let Some(waiting) = met else { return Some(incoming) };
        waiting.found = Some(incoming);
        drop(shared);
        self.0.changed.notify_all();
        None
    }

    /// What the thread does.
    fn run(&self, nic: &Weak<Nic>) {
        let (mut doorstep, mut leaving) = (Doorstep::default(), Vec::new());
        loop {
            let Some(strong) = nic.upgrade().filter(|nic| !nic.is_closed()) else { return };
            let rings = self.completions(&strong);
            let expects = strong.address.len();
            drop(strong);
            let (listeners, watched) = self.sockets();
            let mut fds = vec![readable(self.0.bell.as_raw_fd())];
            fds.extend(rings.iter().map(|fd| readable(*fd)));
            if doorstep.has_room(Instant::now()) {
                fds.extend(listeners.iter().map(|listener| readable(listener.as_raw_fd())));
            }
            fds.extend(doorstep.fds().map(readable));
            fds.extend(watched.iter().map(|stream| readable(stream.as_raw_fd())));
            let soon = (!leaving.is_empty()).then_some(LOOK_AGAIN);
            let timeout = doorstep.timeout(Instant::now()).into_iter().chain(soon).min();
            poll(&mut fds, timeout);
            self.0.bell.clear();
            doorstep.accept(&listeners, Instant::now());
            doorstep.read(self, expects, Instant::now());
            let Some(strong) = nic.upgrade().filter(|nic| !nic.is_closed()) else { return };
            self.look_at_connections(&strong, &mut leaving);
        }
    }

    /// While handlers wait for completions: takes those that are there, and asks for events.
    fn completions(&self, nic: &Arc<Nic>) -> Vec<RawFd> {
        if !self.lock().watches_completions {
            return Vec::new();
        }
        let mut state = nic.lock();
        for ring in &state.rings {
            ring.clear();
        }
        let fds = nic.arm(&state);
        nic.pump(&mut state);
        if state.has_notifies() {
            return fds;
        }
        self.lock().watches_completions = false;
        Vec::new()
    }

    fn sockets(&self) -> (Vec<Arc<TcpListener>>, Vec<Arc<TcpStream>>) {
        let shared = self.lock();
        let watched = shared.watched.iter().map(|watched| watched.stream.clone());
        (shared.listeners.values().cloned().collect(), watched.collect())
    }

    /// Reads what peers of VIs have to say, and finds those that are gone.
    fn look_at_connections(&self, nic: &Nic, leaving: &mut Vec<Leaving>) {
        let mut news = Vec::new();
        self.lock().watched.retain_mut(|watched| watched.read(&mut news));
        // In the order of all locks: the state, then this.
        let mut state = nic.lock();
        for (vi, generation, cause) in news {
            match cause {
                Some(cause) => nic.blamed(&mut state, vi, generation, cause),
                None => leaving.push(Leaving { vi, generation, since: Instant::now() }),
            }
        }
        if leaving.is_empty() {
            return;
        }
        // What the peers sent before they left comes first.
        nic.pump(&mut state);
        leaving.retain(|Leaving { vi, generation, since }| {
            let age = since.elapsed();
            if age < LAST_WORDS
                && nic.has_last_words(&mut state, *vi, *generation, age < STRAGGLERS)
            {
                return true;
            }
            nic.lost(&mut state, *vi, *generation);
            false
        });
    }
}

impl Watched {
    /// Reads what has come. False if the connection is over.
    fn read(&mut self, news: &mut Vec<(Id, u32, Option<Cause>)>) -> bool {
        let mut bytes = [0; 256];
        let is_over = match (&*self.stream).read(&mut bytes) {
            Ok(0) => true,
            Ok(count) => {
                self.bytes.extend(&bytes[..count]);
                false
            }
            Err(error) => {
                let goes_on = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
                !goes_on.contains(&error.kind())
            }
        };
        let is_malformed = loop {
            match first_body(&self.bytes) {
                Ok(None) => break false,
                Ok(Some((body, taken))) => {
                    let Ok(Message::Cause(cause)) = Message::parse(body) else { break true };
                    self.messages += 1;
                    if self.messages > MAX_MESSAGES {
                        break true;
                    }
                    news.push((self.vi, self.generation, Some(cause)));
                    self.bytes.drain(..taken);
                }
                Err(_) => break true,
            }
        };
        if is_over || is_malformed {
            news.push((self.vi, self.generation, None));
            return false;
        }
        true
    }
}

impl Shared {
    /// Listens for a discriminator: at the first of its ports that is free, unless it does so already.
    fn listen(&mut self, nic: &Nic, discriminator: &[u8]) -> Outcome {
        let ports = ports(discriminator);
        if ports.iter().any(|port| self.listeners.contains_key(port)) {
            return Ok(());
        }
        let ip = match (nic.has_all_addresses, nic.device.address()) {
            (true, IpAddr::V4(_)) => Ipv4Addr::UNSPECIFIED.into(),
            (true, IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
            (false, ip) => ip,
        };
        let mut last = None;
        for port in ports {
            let at = SocketAddr::new(ip, port);
            match with_more_descriptors(|| TcpListener::bind(at)) {
                Ok(listener) => {
                    listener.set_nonblocking(true).map_err(|_| Code::ErrorResource)?;
                    self.listeners.insert(port, Arc::new(listener));
                    return Ok(());
                }
                Err(error) => last = Some(error),
            }
        }
        if let Some(error) = last {
            say(&format!("cannot listen at any of the TCP ports {ports:?} of {ip}: {error}"));
        }
        Err(Code::ErrorResource)
    }

    /// Closes listeners at which nobody waits, if there are many.
    fn close_idle(&mut self) {
        if self.listeners.len() <= MAX_IDLE_LISTENERS {
            return;
        }
        let wanted: Vec<u16> =
            self.waits.iter().flat_map(|waiting| ports(waiting.wait.discriminator())).collect();
        self.listeners.retain(|port, listener| {
            let is_wanted = wanted.contains(port);
            if !is_wanted {
                close(listener);
            }
            is_wanted
        });
    }
}

/// Stops listening, also for children of fork that have inherited the descriptor: nobody would answer there.
fn close(listener: &TcpListener) {
    // SAFETY: the descriptor is open, and shutting it down passes no pointer.
    unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
}
