//! The engine: an adapter with the host's clock, sockets, shared memory and helper thread.

mod actions;
mod addresses;
#[cfg(test)]
mod answers;
mod attached;
mod bare;
mod cm;
mod core;
mod events;
mod exit;
mod faults;
mod helper;
mod memory;
mod news;
mod opening;
mod openings;
mod poll;
mod post;
mod qpip;
mod raw;
mod still;
mod strict;
mod turn;
mod verbs;
mod wait;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use quipu_mem::Nothing;
use quipu_nic::{Crc, Gid};

use self::core::{Core, Parts};
use self::faults::Faults;
use self::helper::Helper;
use self::opening::{choose_addresses, open_links, open_qpip, shared_pages, watch_port};
use self::strict::Strict;
use self::turn::Spared;
use crate::address::HostAddress;
use crate::config::{Config, Device, PeerMemoryPolicy, StrictOrder};
use crate::counters::Publisher;
use crate::datagram::Datagrams;
use crate::error::{EngineError, OpenError};
use crate::fork::Birthplace;
use crate::link::life;
use crate::link::{self};
use crate::lock::{Guard, Lock};
use crate::mapped::Mappings;
use crate::net::token::Token;
use crate::net::{Net, Tuning};
use crate::pages::{Member, SharedRegions};
use crate::port::{self};
use crate::qos;
use crate::share::Calls;
use crate::sys::{self, Epoll, EventFd};
use crate::tap::{Adapter, Tap};

pub use self::events::{CompletionEvent, ContextId, EventsReported};
#[cfg(test)]
pub(crate) use self::memory::QUIET_WAIT;
pub use self::post::Doorbell;
pub use self::qpip::{QpipInfo, TcpEvent};
pub use self::wait::poll_descriptors;
/// Looks for a request that a peer was offered, with a rest of the processor's before each: half a
/// microsecond to three, about as long as the kernel takes for it.
const OFFER_LOOKS: u32 = 64;
/// Looks of a poll for the answer that it waits for: some tenths of a microsecond, unless the peer writes to
/// what is looked at. That is longer than middleware takes from one poll to the next; twice as many gain no
/// more.
const ANSWER_LOOKS: u32 = 100;
/// How long the end of the process waits for calls that other threads are in the middle of.
const EXIT_PATIENCE: Duration = Duration::from_millis(200);

/// An RDMA adapter on this host, for any number of threads of one process.
///
/// Methods take the engine's lock for a moment; none waits but those that say so. Whoever
/// calls [`poll_cq`](Self::poll_cq) moves the engine on; a helper thread does when nobody does. In
/// a forked child every method fails with [`EngineError::EngineGone`].
pub struct Engine {
    /// Dropped first.
    _still: Member,
    inner: Arc<Inner>,
}

/// What the program's threads and the helper share.
pub(crate) struct Inner {
    birthplace: Birthplace,
    core: Lock<Core>,
    epoll: Arc<Epoll>,
    helper: Helper,
    /// What tells peers that this process lives, if there is such.
    life: Option<life::Word>,
    /// Polls so far, but for those that needed no look. The helper reads them without the lock.
    polls: AtomicU64,
    spared: Spared,
    /// See [`Core`].
    looked_at: Arc<AtomicU64>,
    /// How many polls there had been when a program asked for an event that it will hear of by a descriptor.
    asked_at: AtomicU64,
    /// The processor on which a program's thread polled, looked up now and then.
    place: AtomicU32,
    /// Since when a thread that polls in vain lets others have its processor, in nanoseconds of the kernel's
    /// clock; 0 while none does.
    yields_since: AtomicU64,
    /// Whether the helper and the program share one processor.
    alone: bool,
    /// Whether the machine has one processor.
    uniprocessor: bool,
    mappings: Arc<Mappings>,
    /// What peers may map of registered memory.
    shared: SharedRegions,
    /// Bytes of registrations whose pages were made.
    made_present: AtomicU64,
    /// What null regions read and write; made when it is first needed.
    nothing: OnceLock<Nothing>,
    address: HostAddress,
    config: Config,
    /// What is asked of the process that shares its adapter; `None` for one with an adapter of its own.
    calls: Option<Calls>,
}

impl Engine {
    /// An engine as `config` says. It has no threads, ports or connections until the first queue
    /// pair is created.
    ///
    /// # Errors
    ///
    /// The address is not usable, or the kernel refuses descriptors.
    pub fn open(mut config: Config) -> Result<Arc<Self>, OpenError> {
        let order = config.strict.and(config.strict_order);
        if config.strict.is_some() {
            // So that it is known here what is written to memory, and when.
            config.peer_memory = PeerMemoryPolicy::Never;
        }
        let birthplace = Birthplace::here();
        let (address, own) = choose_addresses(&config)?;
        let system = |what| move |error| OpenError::system(what, error);
        let epoll = Arc::new(Epoll::new().map_err(system("an epoll descriptor"))?);
        let bell = Arc::new(EventFd::new().map_err(system("an eventfd"))?);
        epoll
            .add(bell.fd(), libc::EPOLLIN, Token::Bell.bits())
            .map_err(system("an epoll entry"))?;
        let mut seed = [0; 32];
        sys::random(&mut seed).map_err(system("random keys"))?;

        let tuning = Tuning::new(config.congestion.as_deref())?;
        let net = Net::new(Arc::clone(&own), tuning, Arc::clone(&epoll));
        let datagrams = Datagrams::new(Arc::clone(&own), Arc::clone(&epoll));
        let (links, directory) =
            open_links(&config, &own, &epoll).map_err(system("an identity for peers"))?;
        let life = directory.as_ref().and_then(life::Word::of);
        // What it shows of itself has the name that programs know.
        let device = config.devices.first().map_or(Device::Quipu0.name(), |device| device.name());
        let tap = match &config.capture {
            Some(capture) => Tap::open(capture, device, &address)
                .map_err(|(path, source)| OpenError::Capture { path, source })?,
            None => Tap::default(),
        };
        let uniprocessor = sys::processors_online() < 2;
        let settings = quipu_nic::Config {
            gid: Gid::from(address.ip),
            link_layer: config.link_layer,
            seed,
            datagram_mtu: address.datagram_mtu(),
            multicast_port: config.multicast_port,
            speaks_first_after_ns: config.speak_first.map(|after| after.as_nanos() as u64),
            // A capture shows what a wire between hosts would carry.
            crc: if config.capture.is_some() { Crc::Always } else { config.crc },
            // On one processor nobody else does anything meanwhile.
            offer_looks: if uniprocessor { 0 } else { OFFER_LOOKS },
            answer_looks: if uniprocessor { 0 } else { ANSWER_LOOKS },
            ..quipu_nic::Config::default()
        };
        let mut adapter = Adapter::with_probe(settings, tap);
        adapter.set_gid_rows(&own.other_gids());
        adapter.set_host_addresses(own.host_gids());
        qos::open(config.qos.as_ref(), &address, &mut adapter)?;
        if let Some(StrictOrder { order, hold }) = order {
            adapter.place_unordered(order, hold.as_nanos() as u64);
        }
        if let Some(directory) = directory
            && let Err(error) = adapter.publish_regions(&directory)
        {
            tracing::warn!(%error, "regions are not published to peers on this host");
        }
        if config.peer_memory != PeerMemoryPolicy::Never
            && let Some(memory) = link::own_memory()
        {
            adapter.set_own_memory(memory);
        }
        let link = config.qpip.as_ref().map(|wanted| &wanted.link);
        let attach = |link| attached::attach(link, config.arena_bytes, &epoll);
        let (calls, attached) = link.map(attach).transpose()?.flatten().unzip();
        let qpip = match &config.qpip {
            Some(wanted) if calls.is_none() => Some(open_qpip(wanted, &mut adapter, &epoll)?),
            _ => None,
        };
        if let (Some(wanted), Some(qpip)) = (&mut config.qpip, &qpip) {
            wanted.link.name_interface(&qpip.link().features().interface);
        }
        let shared = SharedRegions::new(shared_pages(&config));
        let mappings = Arc::new(Mappings::default());
        adapter.set_mappings(Arc::<Mappings>::clone(&mappings));
        let alone = sys::processors() < 2;
        tracing::debug!(address = %address.ip, interface = %address.interface, "engine opened");
        let port = watch_port(&address, &epoll);
        let publisher =
            config.counters.then(|| Publisher::open(device, &address)).and_then(|opened| {
                opened.inspect_err(|error| tracing::debug!(%error, "counters are not shown")).ok()
            });
        let publisher = publisher.map(Box::new);
        let epoll_share = Arc::clone(&epoll);
        let parts = Parts {
            adapter,
            net,
            datagrams,
            links,
            qpip,
            attached,
            port,
            publisher,
            own,
            epoll: epoll_share,
            bell,
        };
        let mut core = Core::new(parts);
        core.faults = Faults::open(&config, core.now())?;
        core.watch_by(Strict::open(&config)?);
        let inner = Inner {
            birthplace,
            looked_at: Arc::clone(&core.looked_at),
            core: Lock::new(core, !uniprocessor),
            epoll,
            helper: Helper::new().map_err(system("an eventfd"))?,
            life,
            polls: AtomicU64::new(0),
            spared: Spared::new(),
            asked_at: AtomicU64::new(u64::MAX / 2),
            place: AtomicU32::new(u32::MAX),
            yields_since: AtomicU64::new(0),
            alone,
            uniprocessor,
            mappings,
            shared,
            made_present: AtomicU64::new(0),
            nothing: OnceLock::new(),
            address,
            config,
            calls,
        };
        let inner = Arc::new(inner);
        let still = still::join(&inner);
        if inner.config.qpip.is_some() && inner.calls.is_none() {
            // Neighbours ask for its addresses, and others send it echoes, though no program does anything.
            Helper::start(&inner).map_err(EngineError::at_opening)?;
        }
        Ok(Arc::new(Self { _still: still, inner }))
    }

    /// The address of the device.
    #[must_use]
    pub fn address(&self) -> &HostAddress {
        &self.inner.address
    }

    /// The devices that programs see, in the order in which they are listed.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.inner.config.devices
    }

    /// Whether the port of a device is up now: its interface is, has a carrier and still has the address; the
    /// packet link of `quipu_qp0` is there.
    #[must_use]
    pub fn port_is_up(&self, device: Device) -> bool {
        let up = match device {
            Device::QuipuQp0 => self.enter().is_ok_and(|core| !core.is_lost()),
            Device::Quipu0 | Device::QuipuIw0 => port::is_up(&self.inner.address),
        };
        up && !self.port_is_cut()
    }

    /// The addresses in the rows of the GID table of `quipu0`. Rows 0 to 3 hold the device's first address,
    /// each further row one that the host has besides, unless the user has chosen an address. Those that the
    /// host gets later are added at the end; none is taken out.
    ///
    /// # Errors
    ///
    /// [`EngineError::EngineGone`].
    pub fn gid_table(&self) -> Result<Vec<HostAddress>, EngineError> {
        let mut core = self.enter()?;
        core.hear_port();
        Ok(core.own.rows().to_vec())
    }

    /// The address in one row of that table.
    #[must_use]
    pub fn gid_row(&self, index: u8) -> Option<HostAddress> {
        let core = self.enter().ok()?;
        core.own.rows().get(usize::from(index)).cloned()
    }

    /// The GID of the device: its first address.
    #[must_use]
    pub fn gid(&self) -> Gid {
        Gid::from(self.inner.address.ip)
    }

    /// The settings that the engine was opened with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// Whether this process is the one that opened the engine, and not a forked child of it.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.inner.birthplace.is_here()
    }

    /// Transmits what peers still wait for (acknowledgements first of all) and ends the
    /// connections. For the end of the process; nothing can be transmitted afterwards. Does nothing
    /// if the engine stays occupied: a signal handler that ends the process may have interrupted
    /// the very call that occupies it.
    pub fn shutdown_flush(&self) {
        if let Some(mut core) = self.enter_at_exit() {
            core.shut_down();
        }
    }

    /// Takes the lock at the end of the process, unless it stays occupied.
    fn enter_at_exit(&self) -> Option<Guard<'_, Core>> {
        self.is_here().then(|| self.inner.core.lock_within(EXIT_PATIENCE)).flatten()
    }

    pub(crate) fn enter(&self) -> Result<Guard<'_, Core>, EngineError> {
        self.inner.enter()
    }
}

impl Inner {
    /// Takes the lock, unless this is a forked child, where it may be held by nobody for ever.
    #[inline]
    pub(crate) fn enter(&self) -> Result<Guard<'_, Core>, EngineError> {
        if !self.birthplace.is_here() {
            return Err(EngineError::EngineGone);
        }
        let core = self.lock();
        if core.blind { Err(self.give_up()) } else { Ok(core) }
    }

    /// The program has closed the engine's descriptors, and may have files of its own by their numbers:
    /// nothing is done with them from now on, as in a child of fork.
    #[cold]
    fn give_up(&self) -> EngineError {
        if self.birthplace.leave() {
            tracing::error!(
                "the program closed file descriptors of the engine, so the device no \
                longer works"
            );
        }
        EngineError::EngineGone
    }

    /// The same to post or poll, which says itself when what it does changes what polls have to look at.
    #[inline(always)]
    fn enter_quickly(&self) -> Result<Guard<'_, Core>, EngineError> {
        if !self.birthplace.is_here() {
            return Err(EngineError::EngineGone);
        }
        let core = self.core.lock();
        self.spared.clear();
        Ok(core)
    }

    /// Takes the lock to do anything.
    #[inline]
    fn lock(&self) -> Guard<'_, Core> {
        let mut core = self.core.lock();
        self.spared.clear();
        core.calm = 0;
        core.settle_taken();
        core
    }

    /// A program has asked for an event, and will sleep at the descriptor that tells of it.
    fn note_asked(&self) {
        self.asked_at.store(self.polls.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Counts a poll. A count that is lost to another thread does no harm.
    #[inline]
    fn count_poll(&self) {
        let polls = self.polls.load(Ordering::Relaxed).wrapping_add(1);
        self.polls.store(polls, Ordering::Relaxed);
        if polls.is_multiple_of(helper::POLLS_PER_PLACE) {
            self.place.store(sys::processor(), Ordering::Relaxed);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.inner.birthplace.is_here() {
            // The parent's sockets: even taking them out of the epoll set would take them out of
            // the parent's. They end with this process.
            std::mem::forget(Arc::clone(&self.inner));
            return;
        }
        self.inner.helper.stop();
        self.shutdown_flush();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use quipu_nic::{
        AddressVector, ChannelId, CqId, Payload, QpAttr, QpAttrMask, QpCap, QpId, QpInit, QpNum,
        QpState, QpType, SendFlags, SendOp, SendWr, To,
    };

    use super::*;
    use crate::SameHost;

    /// An engine that nobody uses.
    pub(super) fn idle() -> Arc<Engine> {
        Engine::open(Config { address: Some([127, 0, 0, 1].into()), ..Config::default() }).unwrap()
    }

    /// Takes a queue pair of a reliable connection to RTS, towards that of another engine.
    pub(super) fn connect(engine: &Engine, qp: QpId, gid: Gid, num: QpNum) {
        type M = QpAttrMask;
        let av = AddressVector { dgid: gid, is_global: true, port_num: 1, ..Default::default() };
        let attr = QpAttr { port_num: 1, path_mtu: 3, dest_qp_num: num.0, av, ..QpAttr::default() };
        let to_rtr = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC;
        let to_rts = M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC;
        for (state, mask) in [
            (QpState::Init, M::PORT | M::PKEY_INDEX | M::ACCESS_FLAGS),
            (QpState::Rtr, to_rtr | M::MIN_RNR_TIMER),
            (QpState::Rts, to_rts),
        ] {
            let attr = QpAttr { state, timeout: 18, ..attr };
            engine.modify_qp(qp, &attr, M::STATE | mask).unwrap();
        }
    }

    /// A message without bytes, and without a completion.
    pub(super) const EMPTY: SendWr<'static> = SendWr {
        wr_id: 0,
        to: To::Peer,
        op: SendOp::Send,
        flags: SendFlags::empty(),
        payload: Payload::Sges(&[]),
    };

    /// One of two that send each other messages without bytes, with a channel for the events of that.
    pub(super) struct End {
        pub(super) engine: Arc<Engine>,
        pub(super) channel: ChannelId,
        pub(super) cq: CqId,
        pub(super) qp: QpId,
        pub(super) num: QpNum,
    }

    impl End {
        fn new(same_host: SameHost) -> Self {
            let address = Some([127, 0, 0, 1].into());
            let config = Config { address, same_host, counters: false, ..Config::default() };
            let engine = Engine::open(config).unwrap();
            let (context, _) = engine.open_context().unwrap();
            let pd = engine.alloc_pd().unwrap();
            let (channel, _) = engine.create_channel().unwrap();
            let (cq, _) = engine.create_cq(context, 8, Some(channel), 0).unwrap();
            let cap = QpCap { max_send_wr: 4, max_recv_wr: 4, ..QpCap::default() };
            let (qp_type, sq_sig_all) = (QpType::Rc, false);
            let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, cap, qp_type, sq_sig_all };
            let (qp, num, _) = engine.create_qp(context, &init).unwrap();
            Self { engine, channel, cq, qp, num }
        }

        /// Two that are connected, each with four receives.
        pub(super) fn pair(same_host: SameHost) -> [Self; 2] {
            let ends = [Self::new(same_host), Self::new(same_host)];
            for (end, other) in [(&ends[0], &ends[1]), (&ends[1], &ends[0])] {
                connect(&end.engine, end.qp, other.engine.gid(), other.num);
                (0..4).for_each(|_| end.engine.post_recv(end.qp, 0, &[]).unwrap());
            }
            ends
        }

        pub(super) fn send(&self) {
            self.engine.post_send(self.qp, &EMPTY).unwrap();
        }

        /// Takes the completion of one.
        pub(super) fn receive(&self) {
            let end = Instant::now() + Duration::from_secs(20);
            while self.engine.poll_cq_each(self.cq, 1, |_| {}).unwrap() == 0 {
                assert!(Instant::now() < end, "nothing comes");
                std::thread::yield_now();
            }
        }
    }

    /// A handler of a signal may call `exit` in the middle of a call of this library: libpsm's does.
    #[test]
    fn the_end_of_the_process_does_not_wait_for_a_call_that_it_interrupted() {
        let engine = idle();
        let interrupted = engine.inner.core.lock();
        engine.shutdown_flush();
        assert!(!engine.strict_verdict());
        drop(interrupted);
        engine.shutdown_flush();
    }
}
