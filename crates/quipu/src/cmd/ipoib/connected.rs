//! Connected mode: queue pairs of connections, their memory, and a thread for each that makes it and waits
//! for its end.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use quipu::{
    Access, Completion, CompletionQueue, Connection, ConnectionRequest, Device, Error, Fault,
    Listener, MemoryRegion, ProtectionDomain, QueuePair, Request, SharedReceiveQueue, WcStatus,
};
use quipu_ipoib::{ConnectionChange, ConnectionId, Engine, HEADER_LEN, LinkAddress, service_port};

use super::carrier::Carrier;

/// Messages that may be under way over all connections.
pub(super) const SENDS: usize = 256;
/// Receives that all connections share.
pub(super) const RECEIVES: u32 = 128;
/// The bit that tells their work requests from those of the datagram queue pair.
pub(super) const RECEIVE_BIT: u64 = 1 << 32;
/// Completions that are taken at once.
const BATCH: usize = 64;
/// Before the next request is waited for when there is no descriptor, or no thread.
const PAUSE: Duration = Duration::from_millis(100);
/// Bytes of the stack of a connection's thread.
const STACK: usize = 256 << 10;

/// What connected mode needs in addition to the datagram queue pair.
pub(super) struct Connected {
    pd: ProtectionDomain,
    listener: Listener,
    sent: CompletionQueue,
    received: CompletionQueue,
    receives: SharedReceiveQueue,
    receive_memory: MemoryRegion,
    send_memory: MemoryRegion,
    slot: usize,
    sl: u8,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: Vec<u32>,
    /// The connection of each slot that is not free.
    owners: HashMap<u32, ConnectionId>,
    connections: HashMap<ConnectionId, Arc<Connection>>,
    /// By queue pair number.
    ids: HashMap<u32, ConnectionId>,
}

/// How sends over a connection ended.
pub(super) struct Sent {
    pub(super) id: ConnectionId,
    pub(super) is_success: bool,
}

/// What a completed receive has.
pub(super) enum Received<'a> {
    /// A message that came over this connection.
    Message(ConnectionId, &'a [u8]),
    /// The connection failed, as when a message is too long.
    Broken(ConnectionId),
    /// The connection has ended.
    Nothing,
}

/// Listens where the neighbours of an interface with this queue pair expect it.
///
/// # Errors
///
/// Another program has that port, or there is no such port.
pub(super) fn listen(device: &Device, qpn: u32) -> Result<Listener, Error> {
    match service_port(qpn) {
        0 => Err(Fault::Invalid("the queue pair has a number that no service belongs to").into()),
        port => Listener::bind(device, SocketAddr::new(device.address(), port)),
    }
}

impl Connected {
    /// For packets of at most `mtu` bytes, of a service level. Completions of receives go to `received`.
    pub(super) fn new(
        pd: &ProtectionDomain,
        listener: Listener,
        received: &CompletionQueue,
        mtu: usize,
        sl: u8,
    ) -> Result<Self, Error> {
        let slot = (HEADER_LEN + mtu).next_multiple_of(64);
        let register = |count: usize| pd.register(slot * count, Access::LOCAL_WRITE);
        let state = State { free: (0..SENDS as u32).collect(), ..State::default() };
        let connected = Self {
            pd: pd.clone(),
            listener,
            sent: pd.device().completion_queue(2 * SENDS as u32)?,
            received: received.clone(),
            receives: pd.shared_receive_queue(RECEIVES, 1)?,
            receive_memory: register(RECEIVES as usize)?,
            send_memory: register(SENDS)?,
            slot,
            sl,
            state: Mutex::new(state),
        };
        for place in 0..RECEIVES {
            connected.post(place)?;
        }
        Ok(connected)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A queue pair for a connection, whose first message may come before [`Connection::open`] returns.
    fn queue_pair(&self, id: ConnectionId) -> Result<QueuePair, Error> {
        let qp = self
            .pd
            .queue_pair(&self.sent, &self.received)
            .send_queue(SENDS as u32, 1)
            .shared_receive_queue(&self.receives)
            .remote_access(Access::empty())
            .service_level(self.sl)
            .build()?;
        self.state().ids.insert(qp.number().0, id);
        Ok(qp)
    }

    fn post(&self, place: u32) -> Result<(), Error> {
        let memory = [self.receive_memory.sge(place as usize * self.slot, self.slot)?];
        self.receives.post_recv(RECEIVE_BIT | u64::from(place), &memory)
    }

    /// Takes a message out of its receive, which is posted again, and writes its bytes to `buffer`.
    pub(super) fn take<'a>(
        &self,
        completion: &Completion,
        buffer: &'a mut Vec<u8>,
    ) -> Result<Received<'a>, Error> {
        let place = completion.wr_id as u32;
        let id = self.state().ids.get(&completion.qp_num.0).copied();
        let len = (completion.byte_len as usize).min(self.slot);
        let is_success = completion.status == WcStatus::Success;
        if is_success {
            buffer.resize(self.slot, 0);
            self.receive_memory.read(place as usize * self.slot, &mut buffer[..len])?;
        }
        self.post(place)?;
        Ok(match id {
            Some(id) if is_success => Received::Message(id, &buffer[..len]),
            Some(id) => Received::Broken(id),
            None => Received::Nothing,
        })
    }

    /// Sends a message over a connection; whether there was room, and that connection.
    pub(super) fn send(&self, id: ConnectionId, bytes: &[u8]) -> bool {
        let mut state = self.state();
        let Some(place) = state.free.pop() else { return false };
        let is_sent = state.connections.get(&id).is_some_and(|connection| {
            let at = place as usize * self.slot;
            let written = self.send_memory.write(at, bytes);
            let memory = written.and_then(|()| self.send_memory.sge(at, bytes.len()));
            memory.is_ok_and(|memory| {
                connection.post_send(&Request::send(&[memory]).id(place.into())).is_ok()
            })
        });
        match is_sent {
            true => drop(state.owners.insert(place, id)),
            false => state.free.push(place),
        }
        is_sent
    }

    /// Whether completions of sends should be taken: some always, or else as soon as many wait.
    pub(super) fn has_sends(&self, many: bool) -> bool {
        let least = if many { SENDS / 8 } else { 0 };
        SENDS - self.state().free.len() > least
    }

    /// Takes completions of sends, and makes their memory free.
    pub(super) fn reap(&self, ended: &mut Vec<Sent>) -> Result<(), Error> {
        let mut done = [Completion::default(); BATCH];
        loop {
            let mut state = self.state();
            let count = self.sent.poll(&mut done)?;
            for completion in &done[..count] {
                let place = completion.wr_id as u32;
                if let Some(id) = state.owners.remove(&place) {
                    state.free.push(place);
                    let is_success = completion.status == WcStatus::Success;
                    ended.push(Sent { id, is_success });
                }
            }
            if count < BATCH {
                return Ok(());
            }
        }
    }

    fn insert(&self, id: ConnectionId, connection: &Arc<Connection>) {
        self.state().connections.insert(id, Arc::clone(connection));
    }

    /// Forgets a connection, if it was made, and its queue pair ends. Takes back the memory of what it has
    /// not sent.
    fn remove(&self, id: ConnectionId, connection: Option<Arc<Connection>>) {
        let mut guard = self.state();
        let state = &mut *guard;
        state.ids.retain(|_, it| *it != id);
        state.connections.remove(&id);
        drop(connection);
        let free = &mut state.free;
        state.owners.retain(|&place, owner| {
            let keeps = *owner != id;
            if !keeps {
                free.push(place);
            }
            keeps
        });
    }

    /// Ends a connection. Its thread notices.
    fn close(&self, id: ConnectionId) {
        if let Some(connection) = self.state().connections.get(&id) {
            // It may have ended already.
            let _ = connection.disconnect();
        }
    }
}

/// The address of a port with this GID.
fn address_of(link: LinkAddress) -> SocketAddr {
    let ip = Ipv6Addr::from(link.gid);
    let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
    SocketAddr::new(ip, service_port(link.qpn))
}

fn gid_of(peer: SocketAddr) -> [u8; 16] {
    match peer.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

impl Carrier {
    /// Opens and closes connections as the engine says.
    pub(super) fn change_connections(self: &Arc<Self>, engine: &mut Engine) {
        while let Some(change) = engine.poll_connection() {
            let Some(connected) = self.connected() else { return };
            match change {
                ConnectionChange::Close(id) => connected.close(id),
                ConnectionChange::Open { id, to, private_data } => {
                    let open = move |connected: &Connected| {
                        Connection::open(connected.queue_pair(id)?, address_of(to), &private_data)
                    };
                    if !self.begin(id, open) {
                        engine.handle_ended(self.now_ns(), id);
                    }
                }
            }
        }
    }

    /// Makes a connection, and waits for its end, in a thread of its own; whether there is one.
    fn begin(
        self: &Arc<Self>,
        id: ConnectionId,
        open: impl FnOnce(&Connected) -> Result<Connection, Error> + Send + 'static,
    ) -> bool {
        let carrier = Arc::clone(self);
        let run = move || {
            let Some(connected) = carrier.connected() else { return };
            let connection = open(connected).ok().map(Arc::new);
            if let Some(connection) = &connection {
                carrier.run(connected, id, connection);
            }
            connected.remove(id, connection);
            carrier.with_engine(|engine, now_ns| engine.handle_ended(now_ns, id));
        };
        thread::Builder::new().stack_size(STACK).spawn(run).is_ok()
    }

    fn run(
        self: &Arc<Self>,
        connected: &Connected,
        id: ConnectionId,
        connection: &Arc<Connection>,
    ) {
        connected.insert(id, connection);
        let mut is_wanted = false;
        self.with_engine(|engine, now_ns| {
            is_wanted = engine.handle_established(now_ns, id, connection.private_data());
        });
        if is_wanted {
            // Fails only in a child of this process.
            let _ = connection.wait_end();
        }
    }

    /// Takes requests of peers for connections.
    pub(super) fn accept(self: &Arc<Self>) -> Result<(), Error> {
        let Some(connected) = self.connected() else { return Ok(()) };
        loop {
            match connected.listener.next() {
                Ok(request) => self.answer(request),
                // There is no descriptor now.
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }

    fn answer(self: &Arc<Self>, request: ConnectionRequest) {
        let gid = gid_of(request.peer());
        let mut asked = None;
        self.with_engine(|engine, now_ns| {
            asked = engine.handle_request(now_ns, gid, request.private_data()).ok();
        });
        let Some((id, private_data)) = asked else {
            // The peer may be gone already.
            let _ = request.reject(&[]);
            return;
        };
        let accept =
            move |connected: &Connected| request.accept(connected.queue_pair(id)?, &private_data);
        if !self.begin(id, accept) {
            self.with_engine(|engine, now_ns| engine.handle_ended(now_ns, id));
        }
    }
}
