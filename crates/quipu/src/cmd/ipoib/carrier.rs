//! Carries packets between the interface and the queue pair, by two threads: one waits for the kernel's
//! packets, the other one for datagrams.
//!
//! Locks: the engine's first, then the transmitter's. Nobody waits while holding either.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use quipu::{
    Access, Completion, CompletionQueue, DatagramQueuePair, Device, Error, MemoryRegion,
    ProtectionDomain, ROUTE_HEADER, WcStatus,
};
use quipu_host::counters::observe::Mark;
use quipu_host::nic::Marking;
use quipu_host::packet::tun::Tun;
use quipu_ipoib::{
    Arrival, Config, Counters, DEFAULT_PKEY, Destination, Engine, GroupChange, HEADER_LEN,
    Incoming, LinkAddress, Outgoing,
};

use super::recorder::Recorder;
use super::transmitter::{SENDS, Transmitter};

/// Receives that are posted.
const RECEIVES: u32 = 512;
/// The queue pair number of groups.
const GROUP_QPN: u32 = 0x00ff_ffff;
/// Completions that are taken at once.
const BATCH: usize = 64;
/// The longest wait for datagrams: the other thread may have set a timer meanwhile.
const LONGEST_WAIT: Duration = Duration::from_millis(250);

/// The queue pair of the interface.
pub(super) struct Link {
    pd: ProtectionDomain,
    qp: DatagramQueuePair,
    received: CompletionQueue,
    transmitter: Transmitter,
    memory: MemoryRegion,
    slot: usize,
    max_message: usize,
    sl: u8,
}

impl Link {
    /// Creates it, for datagrams of a Q_Key and a service level.
    pub(super) fn new(device: &Device, qkey: u32, sl: u8) -> Result<Self, Error> {
        let pd = device.protection_domain()?;
        let (sent, received) =
            (device.completion_queue(2 * SENDS)?, device.completion_queue(2 * RECEIVES)?);
        let qp = pd
            .queue_pair(&sent, &received)
            .send_queue(SENDS, 1)
            .recv_queue(RECEIVES, 1)
            .build_datagram(qkey)?;
        let max_message = qp.max_message()?;
        let transmitter = Transmitter::new(&pd, sent, max_message, (sl, qkey))?;
        let slot = (ROUTE_HEADER + max_message).next_multiple_of(64);
        let memory = pd.register(slot * RECEIVES as usize, Access::LOCAL_WRITE)?;
        let link = Self { pd, qp, received, transmitter, memory, slot, max_message, sl };
        for place in 0..RECEIVES {
            link.post(place)?;
        }
        Ok(link)
    }

    fn post(&self, place: u32) -> Result<(), Error> {
        let memory = [self.memory.sge(place as usize * self.slot, self.slot)?];
        self.qp.post_recv(place.into(), &memory)
    }

    /// The longest datagram in bytes.
    pub(super) fn max_message(&self) -> usize {
        self.max_message
    }

    /// How what it sends is marked.
    fn mark(&self) -> Mark {
        let Some(marking) = self.pd.device().marking_of_level(self.sl) else {
            return Mark::default();
        };
        let Marking { traffic_class, service_level, lane } = marking;
        Mark { traffic_class, service_level, lane }
    }

    /// Its link-layer address.
    pub(super) fn address(&self) -> LinkAddress {
        LinkAddress { qpn: self.qp.address().qp_num.0, gid: self.pd.device().gid().0 }
    }
}

/// The interface at work.
pub(super) struct Carrier {
    link: Link,
    tun: Tun,
    engine: Mutex<Engine>,
    begun: Instant,
    failure: Mutex<Option<String>>,
    recorder: Option<Recorder>,
}

/// What the interface is like.
pub(super) struct Settings {
    /// The longest IP packet in bytes.
    pub(super) mtu: usize,
    /// Its addresses with the lengths of their prefixes.
    pub(super) addresses: Vec<(IpAddr, u8)>,
    /// Neighbours that take packets for other networks.
    pub(super) gateways: Vec<IpAddr>,
}

impl Carrier {
    /// Starts carrying packets. The threads end with the process, or when the interface is gone.
    pub(super) fn start(
        link: Link,
        tun: Tun,
        Settings { mtu, addresses, gateways }: Settings,
        recorder: Option<Recorder>,
    ) -> Result<Arc<Self>, Error> {
        let config = Config { link: link.address(), mtu, addresses, gateways, pkey: DEFAULT_PKEY };
        let carrier = Arc::new(Self {
            link,
            tun,
            engine: Mutex::new(Engine::new(config)),
            begun: Instant::now(),
            failure: Mutex::new(None),
            recorder,
        });
        let mut engine = carrier.engine();
        carrier.change_groups(&mut engine);
        engine.handle_timeout(carrier.now_ns());
        carrier.flush(&mut engine)?;
        drop(engine);
        for work in [Self::carry_out, Self::carry_in] {
            let carrier = Arc::clone(&carrier);
            thread::spawn(move || {
                if let Err(error) = work(&carrier) {
                    let mut failure =
                        carrier.failure.lock().unwrap_or_else(PoisonError::into_inner);
                    failure.get_or_insert_with(|| error.to_string());
                }
            });
        }
        Ok(carrier)
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ns(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    /// The interface.
    pub(super) fn tun(&self) -> &Tun {
        &self.tun
    }

    /// Its link-layer address.
    pub(super) fn address(&self) -> LinkAddress {
        self.link.address()
    }

    /// What passed.
    pub(super) fn counters(&self) -> Counters {
        *self.engine().counters()
    }

    /// Why nothing is carried any more, if so.
    pub(super) fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Joins and leaves groups. One that cannot be joined is not heard, and the others are.
    fn change_groups(&self, engine: &mut Engine) {
        while let Some(change) = engine.poll_group() {
            let (GroupChange::Join(gid) | GroupChange::Leave(gid)) = change;
            let group = std::net::Ipv6Addr::from(gid).into();
            let changed = match change {
                GroupChange::Join(_) => self.link.qp.join(group),
                GroupChange::Leave(_) => self.link.qp.leave(group),
            };
            if let Err(error) = changed {
                eprintln!("quipu: the multicast group {group} is not followed: {error}");
            }
        }
    }

    /// Sends what the engine has to say. What there is no room for is lost, as on a full link.
    fn flush(&self, engine: &mut Engine) -> Result<(), Error> {
        let mut out = Vec::new();
        while let Some(to) = engine.poll_transmit(&mut out) {
            // A destination that the adapter refuses, such as one of another family, is a peer's fault.
            if let Ok(true) = self.link.transmitter.try_send(&self.link.qp, to, &out) {
                self.record_sent(to, &out);
            }
        }
        Ok(())
    }

    fn record_sent(&self, to: Destination, datagram: &[u8]) {
        if let Some(recorder) = &self.recorder {
            let to = match to {
                Destination::Unicast(link) => link,
                Destination::Group(gid) => LinkAddress { qpn: GROUP_QPN, gid },
            };
            recorder.passed(Some(self.link.mark()), self.link.address(), to, datagram);
        }
    }

    /// Takes the kernel's packets.
    fn carry_out(&self) -> Result<(), Error> {
        let mut buffer = vec![0; self.link.max_message];
        loop {
            let len = match self.tun.read(&mut buffer[HEADER_LEN..]) {
                Ok(len) => len,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Error::Exchange(error)),
            };
            let mut engine = self.engine();
            let outgoing = engine.handle_packet(self.now_ns(), &buffer[HEADER_LEN..][..len]);
            self.change_groups(&mut engine);
            self.flush(&mut engine)?;
            drop(engine);
            if let Outgoing::Send(to, kind) = outgoing {
                buffer[..HEADER_LEN].copy_from_slice(&kind.to_bytes());
                let datagram = &buffer[..HEADER_LEN + len];
                if self.link.transmitter.send(&self.link.qp, to, datagram).is_ok() {
                    self.record_sent(to, datagram);
                }
            }
        }
    }

    /// Takes datagrams.
    fn carry_in(&self) -> Result<(), Error> {
        let mut done = [Completion::default(); BATCH];
        let mut buffer = vec![0; self.link.slot];
        loop {
            let timeout_ns = self.engine().poll_timeout();
            let wait_ns = timeout_ns.map_or(u64::MAX, |at| at.saturating_sub(self.now_ns()));
            let wait = Duration::from_nanos(wait_ns).min(LONGEST_WAIT);
            let count = self.link.received.wait_timeout(&mut done, wait)?;
            for completion in &done[..count] {
                self.take(completion, &mut buffer)?;
            }
            let mut engine = self.engine();
            let now_ns = self.now_ns();
            if engine.poll_timeout().is_some_and(|at| at <= now_ns) {
                engine.handle_timeout(now_ns);
            }
            self.change_groups(&mut engine);
            self.flush(&mut engine)?;
        }
    }

    /// Takes a datagram.
    fn take(&self, completion: &Completion, buffer: &mut [u8]) -> Result<(), Error> {
        let place = completion.wr_id as u32;
        let len = (completion.byte_len as usize).min(buffer.len());
        if completion.status == WcStatus::Success {
            self.link.memory.read(place as usize * self.link.slot, &mut buffer[..len])?;
            if let Some((route, datagram)) = buffer[..len].split_first_chunk::<ROUTE_HEADER>()
                && let Some(arrival) = Arrival::of(route, completion.src_qp.0)
            {
                if let Some(recorder) = &self.recorder {
                    let group = arrival.group.map(|gid| LinkAddress { qpn: GROUP_QPN, gid });
                    let to = group.unwrap_or_else(|| self.link.address());
                    recorder.passed(None, arrival.source, to, datagram);
                }
                let incoming = self.engine().handle_datagram(self.now_ns(), &arrival, datagram);
                if let Incoming::Deliver(packet) = incoming {
                    // What the kernel does not take, as while the interface is down, is lost.
                    let _ = self.tun.write(&datagram[packet]);
                }
            }
        }
        self.link.post(place)
    }
}
