//! Carries packets between the interface and the queue pairs, by two threads: one waits for the kernel's
//! packets, the other one for datagrams and messages. In connected mode there are a third one, which takes
//! requests, and one for each connection.
//!
//! Locks: the engine's first, then the transmitter's or that of the connections. Nobody waits while holding
//! one.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use quipu::{
    Access, Completion, CompletionQueue, DatagramQueuePair, Device, Error, Listener, MemoryRegion,
    ProtectionDomain, ROUTE_HEADER, WcStatus,
};
use quipu_host::counters::observe::Mark;
use quipu_host::nic::Marking;
use quipu_host::packet::tun::Tun;
use quipu_ipoib::{
    Arrival, Config, ConnectionId, ConnectionInfo, Counters, DEFAULT_PKEY, Destination, Engine,
    GroupChange, HEADER_LEN, Incoming, LinkAddress, Outgoing,
};

use super::connected::{self, Connected, Received};
use super::recorder::Recorder;
use super::transmitter::{SENDS, Transmitter};

/// Receives that are posted.
const RECEIVES: u32 = 512;
/// The queue pair number of groups.
const GROUP_QPN: u32 = 0x00ff_ffff;
/// Completions that are taken at once.
const BATCH: usize = 64;
/// The longest IP packet.
const LONGEST_PACKET: usize = 65535;
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
    /// Where requests for connections come, in connected mode.
    listener: Option<Listener>,
}

impl Link {
    /// Creates it, for datagrams of a Q_Key and a service level.
    pub(super) fn new(device: &Device, qkey: u32, sl: u8) -> Result<Self, Error> {
        let pd = device.protection_domain()?;
        let receives = 2 * (RECEIVES + connected::RECEIVES);
        let (sent, received) =
            (device.completion_queue(2 * SENDS)?, device.completion_queue(receives)?);
        let qp = pd
            .queue_pair(&sent, &received)
            .send_queue(SENDS, 1)
            .recv_queue(RECEIVES, 1)
            .build_datagram(qkey)?;
        let max_message = qp.max_message()?;
        let transmitter = Transmitter::new(&pd, sent, max_message, (sl, qkey))?;
        let slot = (ROUTE_HEADER + max_message).next_multiple_of(64);
        let memory = pd.register(slot * RECEIVES as usize, Access::LOCAL_WRITE)?;
        let listener = None;
        let link = Self { pd, qp, received, transmitter, memory, slot, max_message, sl, listener };
        for place in 0..RECEIVES {
            link.post(place)?;
        }
        Ok(link)
    }

    /// Takes requests for connections from now on: connected mode.
    ///
    /// # Errors
    ///
    /// Another program has the TCP port that belongs to the queue pair's number.
    pub(super) fn listen(&mut self) -> Result<(), Error> {
        self.listener = Some(connected::listen(self.pd.device(), self.qp.address().qp_num.0)?);
        Ok(())
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
        LinkAddress {
            qpn: self.qp.address().qp_num.0,
            gid: self.pd.device().gid().0,
            connects: self.listener.is_some(),
        }
    }
}

/// The interface at work.
pub(super) struct Carrier {
    link: Link,
    own: LinkAddress,
    connected: Option<Connected>,
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
        mut link: Link,
        tun: Tun,
        Settings { mtu, addresses, gateways }: Settings,
        recorder: Option<Recorder>,
    ) -> Result<Arc<Self>, Error> {
        let own = link.address();
        let datagram_mtu = link.max_message - HEADER_LEN;
        let (connection_slots, pkey) = (connected::SENDS, DEFAULT_PKEY);
        let config =
            Config { link: own, mtu, datagram_mtu, connection_slots, addresses, gateways, pkey };
        let connected = match link.listener.take() {
            Some(it) => Some(Connected::new(&link.pd, it, &link.received, mtu, link.sl)?),
            None => None,
        };
        let carrier = Arc::new(Self {
            link,
            own,
            connected,
            tun,
            engine: Mutex::new(Engine::new(config)),
            begun: Instant::now(),
            failure: Mutex::new(None),
            recorder,
        });
        carrier.with_engine(|engine, now_ns| engine.handle_timeout(now_ns));
        for work in [Self::carry_out, Self::carry_in, Self::accept] {
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

    pub(super) fn now_ns(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    /// What connected mode needs, if that is the mode.
    pub(super) fn connected(&self) -> Option<&Connected> {
        self.connected.as_ref()
    }

    /// Has the engine handle something, and does what it wants then.
    pub(super) fn with_engine<T>(
        self: &Arc<Self>,
        handle: impl FnOnce(&mut Engine, u64) -> T,
    ) -> T {
        let mut engine = self.engine();
        let outcome = handle(&mut engine, self.now_ns());
        self.change_groups(&mut engine);
        self.change_connections(&mut engine);
        self.flush(&mut engine);
        outcome
    }

    /// The interface.
    pub(super) fn tun(&self) -> &Tun {
        &self.tun
    }

    /// Its link-layer address.
    pub(super) fn address(&self) -> LinkAddress {
        self.own
    }

    /// What passed, and the connections.
    pub(super) fn counters(&self) -> (Counters, Vec<ConnectionInfo>) {
        let engine = self.engine();
        (*engine.counters(), engine.connections())
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

    /// Sends what the engine has to say, and gives the interface what is for it. What there is no room for is
    /// lost, as on a full link.
    fn flush(&self, engine: &mut Engine) {
        let mut out = Vec::new();
        while let Some(to) = engine.poll_transmit(&mut out) {
            match to {
                Destination::Connection(id) => {
                    self.record_message(engine, id, &out, true);
                    if !self.send_over(id, &out) {
                        engine.handle_sent(self.now_ns(), id, 1);
                    }
                }
                // A destination that the adapter refuses, such as one of another family, is a peer's fault.
                to => {
                    if let Ok(true) = self.link.transmitter.try_send(&self.link.qp, to, &out) {
                        self.record_sent(to, &out);
                    }
                }
            }
        }
        while let Some(packet) = engine.poll_deliver() {
            let _ = self.tun.write(&packet);
        }
    }

    fn send_over(&self, id: ConnectionId, message: &[u8]) -> bool {
        self.connected.as_ref().is_some_and(|connected| connected.send(id, message))
    }

    fn record_sent(&self, to: Destination, datagram: &[u8]) {
        let to = match to {
            Destination::Unicast(link) => link,
            Destination::Group(gid) => LinkAddress { qpn: GROUP_QPN, gid, connects: false },
            Destination::Connection(_) => return,
        };
        if let Some(recorder) = &self.recorder {
            recorder.passed(Some(self.link.mark()), self.own, to, datagram);
        }
    }

    /// Records a message that goes or came over a connection, as if it were a datagram.
    fn record_message(&self, engine: &Engine, id: ConnectionId, message: &[u8], is_sent: bool) {
        if let Some(recorder) = &self.recorder
            && let Some(peer) = engine.peer_of(id)
        {
            match is_sent {
                true => recorder.passed(Some(self.link.mark()), self.own, peer, message),
                false => recorder.passed(None, peer, self.own, message),
            }
        }
    }

    /// Takes the kernel's packets.
    fn carry_out(self: &Arc<Self>) -> Result<(), Error> {
        let mut buffer = vec![0; self.link.max_message.max(HEADER_LEN + LONGEST_PACKET)];
        loop {
            let len = match self.tun.read(&mut buffer[HEADER_LEN..]) {
                Ok(len) => len,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Error::Exchange(error)),
            };
            self.reap(true)?;
            let outgoing = self.with_engine(|engine, now_ns| {
                engine.handle_packet(now_ns, &buffer[HEADER_LEN..][..len])
            });
            let Outgoing::Send(to, kind) = outgoing else { continue };
            buffer[..HEADER_LEN].copy_from_slice(&kind.to_bytes());
            let message = &buffer[..HEADER_LEN + len];
            match to {
                Destination::Connection(id) => {
                    if self.recorder.is_some() {
                        self.record_message(&self.engine(), id, message, true);
                    }
                    if !self.send_over(id, message) {
                        self.with_engine(|engine, now_ns| engine.handle_sent(now_ns, id, 1));
                    }
                }
                to => {
                    if self.link.transmitter.send(&self.link.qp, to, message).is_ok() {
                        self.record_sent(to, message);
                    }
                }
            }
        }
    }

    /// Takes completions of messages that were sent over connections: if there are any, or only if there are
    /// many.
    fn reap(self: &Arc<Self>, many: bool) -> Result<(), Error> {
        let Some(connected) = &self.connected else { return Ok(()) };
        if !connected.has_sends(many) {
            return Ok(());
        }
        let mut ended = Vec::new();
        connected.reap(&mut ended)?;
        if !ended.is_empty() {
            self.with_engine(|engine, now_ns| {
                for sent in ended {
                    match sent.is_success {
                        true => engine.handle_sent(now_ns, sent.id, 1),
                        false => engine.handle_broken(now_ns, sent.id),
                    }
                }
            });
        }
        Ok(())
    }

    /// Takes datagrams and messages.
    fn carry_in(self: &Arc<Self>) -> Result<(), Error> {
        let mut done = [Completion::default(); BATCH];
        let mut buffer = vec![0; self.link.slot];
        loop {
            let timeout_ns = self.engine().poll_timeout();
            let wait_ns = timeout_ns.map_or(u64::MAX, |at| at.saturating_sub(self.now_ns()));
            let wait = Duration::from_nanos(wait_ns).min(LONGEST_WAIT);
            let count = self.link.received.wait_timeout(&mut done, wait)?;
            for completion in &done[..count] {
                match completion.wr_id & connected::RECEIVE_BIT {
                    0 => self.take(completion, &mut buffer)?,
                    _ => self.take_message(completion, &mut buffer)?,
                }
            }
            self.reap(false)?;
            self.with_engine(|engine, now_ns| {
                if engine.poll_timeout().is_some_and(|at| at <= now_ns) {
                    engine.handle_timeout(now_ns);
                }
            });
        }
    }

    /// Takes a message of a connection.
    fn take_message(
        self: &Arc<Self>,
        completion: &Completion,
        buffer: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let Some(connected) = &self.connected else { return Ok(()) };
        match connected.take(completion, buffer)? {
            Received::Message(id, message) => {
                let mut engine = self.engine();
                self.record_message(&engine, id, message, false);
                let incoming = engine.handle_message(self.now_ns(), id, message);
                drop(engine);
                if let Incoming::Deliver(packet) = incoming {
                    // What the kernel does not take, as while the interface is down, is lost.
                    let _ = self.tun.write(&message[packet]);
                }
            }
            Received::Broken(id) => {
                self.with_engine(|engine, now_ns| engine.handle_broken(now_ns, id));
            }
            Received::Nothing => {}
        }
        Ok(())
    }

    /// Takes a datagram.
    fn take(&self, completion: &Completion, buffer: &mut Vec<u8>) -> Result<(), Error> {
        let place = completion.wr_id as u32;
        buffer.resize(self.link.slot, 0);
        let len = (completion.byte_len as usize).min(buffer.len());
        if completion.status == WcStatus::Success {
            self.link.memory.read(place as usize * self.link.slot, &mut buffer[..len])?;
            if let Some((route, datagram)) = buffer[..len].split_first_chunk::<ROUTE_HEADER>()
                && let Some(arrival) = Arrival::of(route, completion.src_qp.0)
            {
                if let Some(recorder) = &self.recorder {
                    let group = arrival.group;
                    let group =
                        group.map(|gid| LinkAddress { qpn: GROUP_QPN, gid, connects: false });
                    recorder.passed(None, arrival.source, group.unwrap_or(self.own), datagram);
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
