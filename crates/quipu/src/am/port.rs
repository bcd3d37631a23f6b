//! The port of a process: an engine of Active Messages on an adapter.

use std::cell::Cell;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use quipu_am::{BundleId, Config, Core, Delivery};
use quipu_host::nic::{Completion, Fault};
use quipu_host::{Guard, Lock};

use super::datagrams::Datagrams;
use super::fabric::{HostFabric, Sizes};
use super::message::{Handler, Message};
use super::transport::{PortFabric, Transport};
use super::{Bundle, Error, Mode};
use crate::cq::CompletionQueue;
use crate::device::{Device, ProtectionDomain};

/// Completions that are taken at once.
const BATCH: usize = 16;
/// Polls between two looks at connections, where nothing is known to be going on there.
const POLLS_PER_LOOK: u32 = 256;
/// The same, between polls that find something.
const BUSY_POLLS_PER_LOOK: u32 = 1024;
/// Time between two looks at the states of all queue pairs.
const FIND_FAILED_EVERY_NS: u64 = 200_000_000;
/// Handlers that one call runs at most.
const MOST_HANDLERS: usize = 64;
/// The longest sleep while another thread sleeps, too, and takes this one's messages.
const SHARED_NAP: Duration = Duration::from_millis(1);
/// The longest sleep.
const NAP: Duration = Duration::from_millis(200);
/// How often a thread sees whether the program polls, where messages go over datagrams.
const HELP_EVERY: Duration = Duration::from_millis(20);

thread_local! {
    /// Handlers that this thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// What the lock of a port is around.
pub(super) struct State {
    pub(super) core: Core<PortFabric, Handler>,
    completions: Box<[Completion; BATCH]>,
    /// Those of the last poll that the engine has not taken in yet.
    left: Range<usize>,
    polls: u32,
    /// When to look at the states of all queue pairs, in nanoseconds since the port was opened.
    find_failed_at: u64,
}

/// A port, as its objects share it.
pub(super) struct Shared {
    state: Lock<State>,
    queue: CompletionQueue,
    domain: ProtectionDomain,
    device: Device,
    events_fd: i32,
    began: Instant,
    sleepers: AtomicU32,
}

/// The endpoints of a process, and what they share: one completion queue, one receive queue, and a
/// bounded amount of memory, however many peers there are.
///
/// Clones are the same port. It lives until the last bundle and endpoint of it is gone.
#[derive(Clone)]
pub struct Port {
    pub(super) shared: Arc<Shared>,
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Port({})", self.shared.device.address())
    }
}

impl Port {
    /// Opens a port on an adapter, at a TCP port that is free.
    ///
    /// # Errors
    ///
    /// The adapter refuses one of the sizes, or the system has no descriptor or thread left.
    pub fn open(device: &Device, config: Config) -> Result<Self, Error> {
        let mut fabric = HostFabric::new(device, Sizes::of(&config))?;
        let address = fabric.listen(SocketAddr::new(device.address(), 0), None)?;
        // No secret: it tells this life of the TCP port from others.
        Self::with(device, config, PortFabric::Reliable(Box::new(fabric)), address, random() | 1)
    }

    /// Opens a port on an adapter, over a transport.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_over(device: &Device, config: Config, transport: Transport) -> Result<Self, Error> {
        if transport == Transport::Reliable {
            return Self::open(device, config);
        }
        let datagrams = Datagrams::new(device, Sizes::of(&config), config.give_up_ns)?;
        let (address, index) = datagrams.address();
        // Peers find the queue pair by the lowest byte.
        let incarnation = random() << 8 | 1 << 63 | u64::from(index);
        let fabric = PortFabric::Datagrams(Box::new(datagrams));
        let port = Self::with(device, config, fabric, address, incarnation)?;
        port.start_helper()?;
        Ok(port)
    }

    /// Starts a thread that answers peers while the program computes: acknowledgements must not wait for it.
    fn start_helper(&self) -> Result<(), Error> {
        let shared = Arc::downgrade(&self.shared);
        let help = move || {
            let mut polls = 0;
            while let Some(shared) = shared.upgrade() {
                shared.help(&mut polls);
                drop(shared);
                std::thread::sleep(HELP_EVERY);
            }
        };
        let started = std::thread::Builder::new().name("quipu-am".into()).spawn(help);
        let failed = || crate::Error::from(Fault::Invalid("the system has no thread left"));
        Ok(started.map(drop).map_err(|_| failed())?)
    }

    fn with(
        device: &Device,
        config: Config,
        fabric: PortFabric,
        address: SocketAddr,
        incarnation: u64,
    ) -> Result<Self, Error> {
        let (queue, domain) = (fabric.queue().clone(), fabric.domain().clone());
        let events_fd = fabric.events_fd();
        let core = Core::new(fabric, config, address, incarnation)?;
        let state =
            State { core, completions: Box::default(), left: 0..0, polls: 0, find_failed_at: 0 };
        let has_processors = std::thread::available_parallelism().is_ok_and(|n| n.get() > 1);
        let shared = Shared {
            state: Lock::new(state, has_processors),
            queue,
            domain,
            device: device.clone(),
            events_fd,
            began: Instant::now(),
            sleepers: AtomicU32::new(0),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Creates a bundle.
    #[must_use]
    pub fn bundle(&self, mode: Mode) -> Bundle {
        let id = self.shared.lock().core.create_bundle(mode);
        Bundle::new(self.clone(), id)
    }

    /// The adapter.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The protection domain: memory for segments, and for bulk messages, is registered here.
    #[must_use]
    pub fn domain(&self) -> &ProtectionDomain {
        &self.shared.domain
    }
}

/// A random number.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

/// A handler that runs. Its delivery is finished when this is dropped, also if the handler panics.
struct Run<'a> {
    message: Message<'a>,
    handler: Option<Handler>,
    is_finished: bool,
}

impl<'a> Run<'a> {
    #[inline]
    fn new(shared: &'a Shared, mut delivery: Delivery<Handler>) -> Self {
        DEPTH.set(DEPTH.get() + 1);
        let handler = delivery.handler.take();
        Self { message: Message::new(shared, delivery), handler, is_finished: false }
    }

    #[inline]
    fn call(&mut self) {
        if let Some(handler) = &self.handler {
            handler(&mut self.message);
        }
    }

    /// Ends the delivery under a lock that is held.
    #[inline]
    fn finish(&mut self, state: &mut State) {
        self.is_finished = true;
        DEPTH.set(DEPTH.get() - 1);
        self.message.delivery.handler = self.handler.take();
        state.core.finish(&mut self.message.delivery);
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            let shared = self.message.shared;
            self.finish(&mut shared.lock());
        }
    }
}

impl State {
    /// Has the engine take in completions that were found, up to the first message of a bundle
    /// whose handler may run at once: that one.
    #[inline]
    fn deliver_left(&mut self, bundle: BundleId) -> Option<Delivery<Handler>> {
        for at in self.left.by_ref() {
            let event = self.core.fabric_mut().event_of(&self.completions[at]);
            if let Some(event) = event
                && let Some(delivery) = self.core.deliver_event(bundle, event)
            {
                return Some(delivery);
            }
        }
        self.take_later();
        None
    }

    /// Has the engine take in all completions that were found.
    #[inline]
    fn take_left(&mut self) {
        for at in std::mem::take(&mut self.left) {
            if let Some(event) = self.core.fabric_mut().event_of(&self.completions[at]) {
                self.core.handle_event(event);
            }
        }
        self.take_later();
    }

    #[inline]
    fn take_later(&mut self) {
        while let Some(event) = self.core.fabric_mut().take_later() {
            self.core.handle_event(event);
        }
    }
}

impl Shared {
    #[inline]
    pub(super) fn lock(&self) -> Guard<'_, State> {
        // Handlers, which may panic, run without it.
        self.state.lock()
    }

    /// Nanoseconds since the port was opened.
    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Whether this thread runs a handler.
    pub(super) fn is_in_handler() -> bool {
        DEPTH.get() > 0
    }

    /// Takes in what has happened; whether anything has.
    #[inline]
    pub(super) fn drain(&self, state: &mut State) -> Result<bool, Error> {
        let had_left = !state.left.is_empty();
        state.take_left();
        let found = self.find(state)?;
        state.take_left();
        Ok(found || had_left)
    }

    /// Polls the completion queue, when all that was found before is taken in; whether it finds
    /// anything now.
    #[inline]
    fn find(&self, state: &mut State) -> Result<bool, Error> {
        let found = self.queue.poll(&mut state.completions[..])?;
        state.left = 0..found;
        state.polls = state.polls.wrapping_add(1);
        let every = if found == 0 { POLLS_PER_LOOK } else { BUSY_POLLS_PER_LOOK };
        if state.polls.is_multiple_of(every) {
            self.look(state, found == 0);
        }
        Ok(found > 0)
    }

    /// The next message of a bundle whose handler may run, after a poll unless one has been made.
    #[inline]
    fn next(
        &self,
        state: &mut State,
        bundle: BundleId,
        has_polled: &mut bool,
    ) -> Result<Option<Delivery<Handler>>, Error> {
        // What waits has come before what is found now.
        if let Some(delivery) = state.core.next_delivery(bundle) {
            return Ok(Some(delivery));
        }
        loop {
            if let Some(delivery) = state.deliver_left(bundle) {
                return Ok(Some(delivery));
            }
            if *has_polled {
                return Ok(state.core.next_delivery(bundle));
            }
            *has_polled = true;
            self.find(state)?;
        }
    }

    /// Looks at connections and at the time. Messages that were found come first: what their
    /// connection ends with does not undo them.
    #[cold]
    fn look(&self, state: &mut State, is_empty: bool) {
        state.take_left();
        let now = self.now();
        state.core.handle_timeout(now);
        if now >= state.find_failed_at {
            state.find_failed_at = now + FIND_FAILED_EVERY_NS;
            state.core.fabric_mut().find_failed();
            state.take_later();
        }
        while state.core.fabric_mut().pump() {
            state.take_later();
        }
        if is_empty && state.core.fabric().has_dying() {
            state.core.fabric_mut().reap();
        }
    }

    /// Takes in what has come if the program has not polled since the last time.
    fn help(&self, polls: &mut u32) {
        let mut state = self.lock();
        if std::mem::replace(polls, state.polls) == state.polls {
            // A program whose adapter is gone hears of it in its own calls.
            let _ = self.drain(&mut state);
            self.look(&mut state, false);
        }
        *polls = state.polls;
    }

    /// Makes progress, and runs handlers of a bundle; how many.
    #[inline]
    pub(super) fn poll(&self, bundle: BundleId) -> Result<usize, Error> {
        let mut state = self.lock();
        let (mut ran, mut has_polled) = (0, false);
        while ran < MOST_HANDLERS {
            let Some(delivery) = self.next(&mut state, bundle, &mut has_polled)? else { break };
            drop(state);
            let mut run = Run::new(self, delivery);
            run.call();
            ran += 1;
            state = self.lock();
            run.finish(&mut state);
        }
        Ok(ran)
    }

    /// Runs a handler.
    pub(super) fn run(&self, delivery: Delivery<Handler>) {
        Run::new(self, delivery).call();
    }

    /// Sleeps until something may have happened, or `most` is over.
    pub(super) fn sleep(&self, bundle: BundleId, most: Option<Duration>) -> Result<(), Error> {
        let alone = self.sleepers.fetch_add(1, Ordering::AcqRel) == 0;
        let slept = self.sleep_as(bundle, alone, most);
        self.sleepers.fetch_sub(1, Ordering::AcqRel);
        slept
    }

    fn sleep_as(&self, bundle: BundleId, alone: bool, most: Option<Duration>) -> Result<(), Error> {
        let mut nap = most.unwrap_or(NAP).min(if alone { NAP } else { SHARED_NAP });
        let mut state = self.lock();
        self.queue.request_event(false)?;
        let now = self.now();
        self.look(&mut state, false);
        let happened = self.drain(&mut state)?;
        if happened || state.core.has_messages(bundle)? {
            return Ok(());
        }
        if let Some(at) = state.core.poll_timeout() {
            nap = nap.min(Duration::from_nanos(at.saturating_sub(now)));
        }
        if let Some(idle) = state.core.fabric().idle_time() {
            nap = nap.min(idle.max(Duration::from_millis(1)));
        }
        drop(state);
        let readable = 1;
        let entry = |fd| quipu_host::PollEntry { fd, events: readable, revents: 0 };
        let mut fds = [entry(self.queue.as_raw_fd()), entry(self.events_fd)];
        match self.device.opened.engine.poll_within(&mut fds, Some(nap)) {
            Ok(_) | Err(quipu_host::EngineError::Interrupted) => {}
            Err(error) => return Err(crate::Error::from(error).into()),
        }
        if fds[0].revents != 0 {
            self.queue.take_event()?;
        }
        Ok(())
    }
}
