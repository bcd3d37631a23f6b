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

use quipu_am::{BundleId, Config, Core, Delivery, EndpointId, FromLane};
use quipu_host::nic::{Completion, Fault};
use quipu_host::{Guard, Lock};

use super::datagrams::Datagrams;
use super::endpoint::{EMPTY_POLLS, NAP as SHORT_NAP};
use super::fabric::HostFabric;
use super::message::{Handler, Message};
use super::sizes::Sizes;
use super::transport::{PortFabric, Transport};
use super::turns::Turns;
use super::{Bundle, Error, Mode};
use crate::cq::CompletionQueue;
use crate::device::{Device, ProtectionDomain};

/// Completions of receives that are taken at once.
const BATCH: usize = 16;
/// Completions of sends that are taken at once: a message has two at most, and there are fewer messages
/// than receives.
const SENDS: usize = 2 * BATCH;
/// Polls between two looks at connections, where nothing is known to be going on there.
const POLLS_PER_LOOK: u32 = 256;
/// The same, between polls that find something.
const BUSY_POLLS_PER_LOOK: u32 = 1024;
/// Time between two looks at the states of all queue pairs.
const FIND_FAILED_EVERY_NS: u64 = 200_000_000;
/// Looks at lanes before a thread sleeps: some microseconds.
const LOOKS_BEFORE_SLEEP: u32 = 100;
/// The longest sleep while there are lanes, should a wake-up not come.
const LANE_NAP: Duration = Duration::from_millis(20);
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

/// The engine of a port.
pub(super) type Engine = Core<PortFabric, Handler>;

/// What the lock of a port is around.
pub(super) struct State {
    pub(super) core: Engine,
    completions: Box<[Completion]>,
    /// Those of the last poll that the engine has not taken in yet.
    left: Range<usize>,
    polls: u32,
    turns: Turns,
    /// When to look at the states of all queue pairs, in nanoseconds since the port was opened.
    find_failed_at: u64,
}

/// A port, as its objects share it.
pub(super) struct Shared {
    state: Lock<State>,
    /// Completions of receives, and of sends.
    queue: CompletionQueue,
    send_queue: CompletionQueue,
    domain: ProtectionDomain,
    device: Device,
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
        let (address, incarnation) = datagrams.address();
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
        let (queue, send_queue) = (fabric.queue().clone(), fabric.send_queue().clone());
        let domain = fabric.domain().clone();
        let core = Core::new(fabric, config, address, incarnation)?;
        let completions = vec![Completion::default(); BATCH + SENDS].into();
        let state = State {
            core,
            completions,
            left: 0..0,
            polls: 0,
            turns: Turns::default(),
            find_failed_at: 0,
        };
        let has_processors = std::thread::available_parallelism().is_ok_and(|n| n.get() > 1);
        let shared = Shared {
            state: Lock::new(state, has_processors),
            queue,
            send_queue,
            domain,
            device: device.clone(),
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
    shared: &'a Shared,
    /// None when it is finished.
    message: Option<Message<'a>>,
    handler: Option<Handler>,
}

impl<'a> Run<'a> {
    #[inline]
    fn new(shared: &'a Shared, mut delivery: Box<Delivery<Handler>>) -> Self {
        DEPTH.with(|depth| depth.set(depth.get() + 1));
        let handler = delivery.handler.take();
        Self { shared, message: Some(Message::new(shared, delivery)), handler }
    }

    #[inline]
    fn call(&mut self) {
        if let (Some(handler), Some(message)) = (&self.handler, &mut self.message) {
            handler(message);
        }
    }

    /// Ends the delivery under a lock that is held.
    #[inline]
    fn finish(&mut self, state: &mut State) {
        let Some(Message { mut delivery, .. }) = self.message.take() else { return };
        DEPTH.with(|depth| depth.set(depth.get() - 1));
        delivery.handler = self.handler.take();
        state.core.finish(&mut delivery);
        state.core.recycle(delivery);
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if self.message.is_some() {
            self.finish(&mut self.shared.lock());
        }
    }
}

impl State {
    /// Has the engine take in completions that were found, up to the first message of a bundle
    /// whose handler may run at once: that one.
    #[inline]
    fn deliver_left(&mut self, bundle: BundleId) -> Option<Box<Delivery<Handler>>> {
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
        Ok(state.core.drain_lanes() || found || had_left)
    }

    /// Polls the completion queue, when all that was found before is taken in; whether it finds
    /// anything now.
    #[inline]
    fn find(&self, state: &mut State) -> Result<bool, Error> {
        let mut found = self.queue.poll(&mut state.completions[..BATCH])?;
        if found == 0 {
            state.core.fabric_mut().end_failed();
            state.core.post_used_slots();
        }
        if state.core.fabric().awaits_sends() {
            found += self.find_sent(state, found)?;
        }
        state.left = 0..found;
        state.polls = state.polls.wrapping_add(1);
        let every = if found == 0 { POLLS_PER_LOOK } else { BUSY_POLLS_PER_LOOK };
        if state.polls.is_multiple_of(every) {
            self.look(state, found == 0);
        }
        Ok(found > 0)
    }

    /// A lane had a message.
    #[inline]
    fn note_lane(&self, state: &mut State) {
        state.turns.found_in_lane();
        self.device.opened.engine.count_look();
    }

    /// Polls the completion queue of sends; how many completions it finds, which lie from `from` on.
    fn find_sent(&self, state: &mut State, from: usize) -> Result<usize, Error> {
        state.core.fabric_mut().note_poll_of_sends();
        Ok(self.send_queue.poll(&mut state.completions[from..])?)
    }

    /// The next message of a bundle whose handler may run, after a poll unless one has been made.
    #[inline]
    fn next(
        &self,
        state: &mut State,
        bundle: BundleId,
        has_polled: &mut bool,
    ) -> Result<Option<Box<Delivery<Handler>>>, Error> {
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
            if state.turns.is_of_lanes() {
                match state.core.take_from_lane(bundle) {
                    FromLane::Run(delivery) => {
                        self.note_lane(state);
                        // Others may follow.
                        return Ok(Some(delivery));
                    }
                    FromLane::Taken => {
                        self.note_lane(state);
                        *has_polled = true;
                        return Ok(state.core.next_delivery(bundle));
                    }
                    FromLane::Nothing if state.turns.found_no_line() => {
                        self.device.opened.engine.count_look();
                        *has_polled = true;
                        return Ok(None);
                    }
                    FromLane::Nothing | FromLane::Waits => {}
                }
            }
            *has_polled = true;
            let found = self.find(state)?;
            state.turns.polled(found);
        }
    }

    /// Looks at connections and at the time. Messages that were found come first: what their
    /// connection ends with does not undo them.
    #[cold]
    fn look(&self, state: &mut State, is_empty: bool) {
        state.take_left();
        // Of sends that ask for none, failures complete all the same.
        if let Ok(found) = self.find_sent(state, 0) {
            state.left = 0..found;
            state.take_left();
        }
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
        let empty = state.turns.empty_looks();
        drop(state);
        self.device.opened.engine.let_others_run(empty);
        Ok(ran)
    }

    /// Polls, and runs handlers of the bundle of an endpoint, until something is so.
    pub(super) fn poll_until(
        &self,
        endpoint: EndpointId,
        mut is_so: impl FnMut(&mut Engine) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let mut state = self.lock();
        let mut empty = 0;
        loop {
            let bundle = state.core.bundle_of(endpoint)?;
            let seen = state.core.arrivals(bundle)?;
            if is_so(&mut state.core)? {
                return Ok(());
            }
            let delivery = self.next(&mut state, bundle, &mut false)?;
            let looks = state.turns.empty_looks();
            drop(state);
            if let Some(delivery) = delivery {
                self.run(delivery);
                empty = 0;
            } else if looks > 0 {
                self.device.opened.engine.let_others_run(looks);
            } else if empty < EMPTY_POLLS {
                empty += 1;
            } else {
                // The peer may need this processor.
                self.sleep(bundle, Some(seen), Some(SHORT_NAP))?;
            }
            state = self.lock();
        }
    }

    /// Runs a handler.
    pub(super) fn run(&self, delivery: Box<Delivery<Handler>>) {
        Run::new(self, delivery).call();
    }

    /// Sleeps until something may have happened, or `most` is over. Returns at once if more than `seen`
    /// messages, signals included, have come: another poll may have taken in the one that the caller needs.
    pub(super) fn sleep(
        &self,
        bundle: BundleId,
        seen: Option<u64>,
        most: Option<Duration>,
    ) -> Result<(), Error> {
        let alone = self.sleepers.fetch_add(1, Ordering::AcqRel) == 0;
        let nap = most.unwrap_or(NAP).min(if alone { NAP } else { SHARED_NAP });
        let slept = self.sleep_for(bundle, seen, nap);
        self.sleepers.fetch_sub(1, Ordering::AcqRel);
        slept
    }

    fn sleep_for(&self, bundle: BundleId, seen: Option<u64>, nap: Duration) -> Result<(), Error> {
        let mut nap = nap;
        let mut state = self.lock();
        let seen = seen.map_or_else(|| state.core.arrivals(bundle), Ok)?;
        self.queue.request_event(false)?;
        self.send_queue.request_event(false)?;
        let now = self.now();
        self.look(&mut state, false);
        let happened = self.drain(&mut state)?;
        let has_come = state.core.arrivals(bundle)? > seen;
        if happened || has_come || state.core.has_messages(bundle)? {
            return Ok(());
        }
        if state.core.fabric().has_lanes() {
            nap = nap.min(LANE_NAP);
            if !state.core.arm_lanes(LOOKS_BEFORE_SLEEP) {
                state.core.fabric().disarm_lanes();
                return Ok(());
            }
        }
        if let Some(at) = state.core.poll_timeout() {
            nap = nap.min(Duration::from_nanos(at.saturating_sub(now)));
        }
        if let Some(idle) = state.core.fabric().idle_time() {
            nap = nap.min(idle.max(Duration::from_millis(1)));
        }
        let events = state.core.fabric().event_fds();
        drop(state);
        let readable = 1;
        let entry = |fd| quipu_host::PollEntry { fd, events: readable, revents: 0 };
        let queues = [&self.queue, &self.send_queue];
        let queue_fds = queues.map(|queue| queue.as_raw_fd());
        let mut fds: Vec<_> = queue_fds.into_iter().chain(events).map(entry).collect();
        let slept = self.device.opened.engine.poll_within(&mut fds, Some(nap));
        self.lock().core.fabric().disarm_lanes();
        match slept {
            Ok(_) | Err(quipu_host::EngineError::Interrupted) => {}
            Err(error) => return Err(crate::Error::from(error).into()),
        }
        for (queue, entry) in queues.into_iter().zip(&fds) {
            if entry.revents != 0 {
                queue.take_event()?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::am::{Endpoint, Name, Tag};

    fn end() -> (Bundle, Endpoint, Name) {
        let address = Some("127.0.0.1".parse().unwrap());
        let device = Device::open(crate::Config { address, ..crate::Config::default() }).unwrap();
        let bundle = Port::open(&device, Config::default()).unwrap().bundle(Mode::Sequential);
        let endpoint = bundle.endpoint().unwrap();
        endpoint.set_tag(Tag(1)).unwrap();
        let name = endpoint.name().unwrap();
        (bundle, endpoint, name)
    }

    /// The poll before a sleep, or that of another thread, may take in the signal that the caller waits for.
    #[test]
    fn a_thread_does_not_sleep_on_a_signal_that_was_taken_in_before() {
        let [(near, from, _), (far, to, name)] = [(); 2].map(|()| end());
        from.map(0, name, Tag(1)).unwrap();
        let shared = &to.port().shared;
        let id = shared.lock().core.bundle_of(to.id()).unwrap();
        let mut shortest = Duration::MAX;
        for _ in 0..20 {
            let seen = far.arrivals().unwrap();
            while from.try_signal(0).is_err() {
                near.poll().unwrap();
                far.poll().unwrap();
            }
            while far.arrivals().unwrap() == seen {
                far.poll().unwrap();
            }
            let began = Instant::now();
            shared.sleep(id, Some(seen), Some(NAP)).unwrap();
            shortest = shortest.min(began.elapsed());
        }
        assert!(shortest < Duration::from_millis(5), "it slept for {shortest:?}");
    }
}
