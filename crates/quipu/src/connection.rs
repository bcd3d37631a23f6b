//! Connections by IP address and port: what `rdma_cm` is to C programs, which may be at the other end.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::{Mutex, PoisonError};

use quipu_host::EngineError;
use quipu_host::connection::{
    CallError, ChannelKey, Ece, Event, EventKind, IdKey, Param, PortSpace, Protocol, QpParams,
    Refusal,
};
use quipu_host::nic::{Fault, QpAttr, QpAttrMask, QpState, QpType};

use crate::device::Device;
use crate::error::Error;
use crate::qp::QueuePair;

/// A listener's: requests for queue pairs of any type, with which `accept` compares that of its own.
const ANY: u8 = 0;
/// `IBV_QPT_RC` and `IBV_QPT_UC`.
const RC: u8 = 2;
const UC: u8 = 3;
/// What a connection ends with whose peer is gone.
const ECONNRESET: i32 = 104;
/// Requests that wait to be taken.
const BACKLOG: i32 = 128;

/// An identifier of connection management with a channel of its own.
#[derive(Debug)]
struct Identifier {
    device: Device,
    channel: ChannelKey,
    id: IdKey,
}

impl Drop for Identifier {
    fn drop(&mut self) {
        let engine = &self.device.opened.engine;
        let _ = engine.cm_destroy_id(self.id);
        let _ = engine.cm_destroy_channel(self.channel);
    }
}

/// An end of a connection that did not come about.
fn failure(event: Event) -> Error {
    let Event { kind, status, private_data, .. } = event;
    match kind {
        EventKind::Rejected => Error::Rejected { reason: status, private_data },
        _ => Error::Connection { kind, status },
    }
}

/// What an answer meets whose asker is gone.
fn given_up(error: EngineError) -> Error {
    match error {
        EngineError::Connection(CallError::WrongState) => {
            Error::Connection { kind: EventKind::ConnectError, status: -ECONNRESET }
        }
        error => error.into(),
    }
}

impl Identifier {
    fn new(device: &Device, qp_type: u8) -> Result<Self, Error> {
        let engine = &device.opened.engine;
        let (channel, _) = engine.cm_create_channel()?;
        match engine.cm_create_id(channel, PortSpace::Tcp, qp_type, 0) {
            Ok(id) => Ok(Self { device: device.clone(), channel, id }),
            Err(error) => {
                let _ = engine.cm_destroy_channel(channel);
                Err(error.into())
            }
        }
    }

    /// One that a listener got, with a channel of its own from now on.
    fn adopt(device: &Device, id: IdKey) -> Result<Self, Error> {
        let engine = &device.opened.engine;
        let made = engine.cm_create_channel().and_then(|(channel, _)| {
            engine.cm_migrate_id(id, channel).map(|_| channel).inspect_err(|_| {
                let _ = engine.cm_destroy_channel(channel);
            })
        });
        match made {
            Ok(channel) => Ok(Self { device: device.clone(), channel, id }),
            Err(error) => {
                let _ = engine.cm_destroy_id(id);
                Err(error.into())
            }
        }
    }

    /// Waits for the next event.
    fn event(&self) -> Result<Event, Error> {
        loop {
            match self.device.opened.engine.cm_get_event(self.channel) {
                Err(EngineError::Interrupted) => {}
                other => return Ok(other?),
            }
        }
    }

    /// Waits for an event of that kind, which anything else comes instead of.
    fn expect(&self, kind: EventKind) -> Result<Event, Error> {
        let event = self.event()?;
        if event.kind == kind { Ok(event) } else { Err(failure(event)) }
    }

    /// Waits for the end of the connection.
    fn wait_end(&self) -> Result<(), Error> {
        loop {
            match self.event()?.kind {
                EventKind::Disconnected | EventKind::TimewaitExit => return Ok(()),
                _ => {}
            }
        }
    }
}

/// What a queue pair says of itself.
pub(crate) fn param(qp: &QueuePair, private_data: &[u8]) -> Param {
    let (retry_count, rnr_retry_count) = qp.built().retries();
    Param {
        private_data: private_data.to_vec(),
        responder_resources: qp.built().reads(),
        initiator_depth: qp.built().reads(),
        flow_control: true,
        retry_count,
        rnr_retry_count,
        srq: qp.built().srq.is_some(),
        qpn: qp.number().0,
        qkey: 0,
        ece: Ece::default(),
    }
}

fn number_of(qp_type: QpType) -> u8 {
    if qp_type == QpType::Uc { UC } else { RC }
}

/// Waits for connections at an address of this machine. A C program reaches it by `rdma_connect(3)`.
///
/// ```
/// use quipu::{Access, Config, Connection, Device, Error, Listener, Request};
///
/// # fn main() -> Result<(), Error> {
/// # let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
/// # let device = Device::open(config)?;
/// let listener = Listener::bind(&device, "127.0.0.1:0".parse().unwrap())?;
/// let to = listener.address()?;
/// std::thread::scope(|scope| {
///     let server = scope.spawn(|| -> Result<(), Error> {
///         let request = listener.next()?;
///         assert!(request.private_data().starts_with(b"a client"));
///         let (pd, cq) = (device.protection_domain()?, device.completion_queue(16)?);
///         let qp = pd.queue_pair(&cq, &cq).build()?;
///         let memory = pd.register(64, Access::LOCAL_WRITE)?;
///         qp.post_recv(1, &[memory.sge(0, 64)?])?;
///         let connection = request.accept(qp, b"welcome")?;
///         assert_eq!(cq.next()?.byte_len, 5);
///         assert_eq!(memory.to_vec(0, 5)?, b"hello");
///         connection.wait_end()
///     });
///     let (pd, cq) = (device.protection_domain()?, device.completion_queue(16)?);
///     let qp = pd.queue_pair(&cq, &cq).build()?;
///     let connection = Connection::open(qp, to, b"a client")?;
///     assert!(connection.private_data().starts_with(b"welcome"));
///     connection.post_send(&Request::send_inline(b"hello"))?;
///     cq.next()?;
///     connection.disconnect()?;
///     server.join().unwrap()
/// })
/// # }
/// ```
#[derive(Debug)]
pub struct Listener {
    identifier: Identifier,
}

impl Listener {
    /// Listens at `address`, of which a port of 0 means any that is free.
    ///
    /// # Errors
    ///
    /// The address is not of this machine, or the port is taken.
    pub fn bind(device: &Device, address: SocketAddr) -> Result<Self, Error> {
        let identifier = Identifier::new(device, ANY)?;
        let engine = &device.opened.engine;
        engine.cm_bind_addr(identifier.id, address)?;
        engine.cm_listen(identifier.id, BACKLOG)?;
        Ok(Self { identifier })
    }

    /// Where it listens.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn address(&self) -> Result<SocketAddr, Error> {
        let route = self.identifier.device.opened.engine.cm_route(self.identifier.id)?;
        route.src.ok_or(Error::PlainIwarp)
    }

    /// Waits for the next request. Those of plain iWARP adapters are refused.
    ///
    /// # Errors
    ///
    /// No descriptor is left, or the engine belongs to the parent of this process.
    pub fn next(&self) -> Result<ConnectionRequest, Error> {
        loop {
            let event = self.identifier.event()?;
            if event.kind != EventKind::ConnectRequest {
                continue;
            }
            let device = &self.identifier.device;
            let identifier = Identifier::adopt(device, event.id)?;
            let route = device.opened.engine.cm_route(event.id)?;
            match route.dst {
                Some(peer) if route.protocol == Protocol::Quipu => {
                    let private_data = event.private_data;
                    return Ok(ConnectionRequest { identifier, peer, private_data });
                }
                // Where whoever asked is gone already, nobody need be told.
                _ => {
                    let _ = device.opened.engine.cm_reject(event.id, Refusal::Consumer, &[]);
                }
            }
        }
    }
}

/// Somebody wants a connection. Dropping it refuses.
#[derive(Debug)]
pub struct ConnectionRequest {
    identifier: Identifier,
    peer: SocketAddr,
    private_data: Box<[u8]>,
}

impl ConnectionRequest {
    /// What the peer's program says, padded with zeros to 56 bytes.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Who asks.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Accepts, for a queue pair that is not connected yet: post its first receives before. Returns when the
    /// connection stands. `private_data`, of at most 196 bytes, is for the peer's program.
    ///
    /// # Errors
    ///
    /// The peer has given up ([`Error::Rejected`], [`Error::Connection`]), or the queue pair is of another
    /// device, service (the peer has chosen it) or state; the peer is refused then.
    pub fn accept(self, qp: QueuePair, private_data: &[u8]) -> Result<Connection, Error> {
        let Self { identifier, private_data: said, .. } = self;
        identifier.device.owns(qp.built().pd.device())?;
        let engine = &identifier.device.opened.engine;
        // What the reply says holds at both ends.
        let asked = engine.cm_connect_params(identifier.id).map_err(given_up)?;
        if asked.qp_type != number_of(qp.built().qp_type()) {
            return Err(
                Fault::Invalid("the peer requests a queue pair of another service type").into()
            );
        }
        let reads = qp.built().reads();
        let max_rd_atomic = asked.max_rd_atomic.min(reads);
        qp.connect_as(&QpParams { max_dest_rd_atomic: reads, max_rd_atomic, ..asked })?;
        engine.cm_accept(identifier.id, Some(&param(&qp, private_data))).map_err(given_up)?;
        identifier.expect(EventKind::Established)?;
        Ok(Connection::new(qp, identifier, said))
    }

    /// Refuses; `private_data`, of at most 148 bytes, may say why.
    ///
    /// # Errors
    ///
    /// There is too much private data, or the peer has given up.
    pub fn reject(self, private_data: &[u8]) -> Result<(), Error> {
        let engine = &self.identifier.device.opened.engine;
        Ok(engine.cm_reject(self.identifier.id, Refusal::Consumer, private_data)?)
    }
}

/// A queue pair that was connected by address. When it is dropped the connection ends.
#[derive(Debug)]
pub struct Connection {
    qp: QueuePair,
    identifier: Identifier,
    private_data: Box<[u8]>,
    /// Whether its end was heard of. Of several that wait for that one asks, and tells the others.
    ended: Mutex<bool>,
}

impl Connection {
    fn new(qp: QueuePair, identifier: Identifier, private_data: Box<[u8]>) -> Self {
        Self { qp, identifier, private_data, ended: Mutex::new(false) }
    }

    /// Connects a queue pair, which is not connected yet, with whoever listens at `to`: post its first
    /// receives before. Returns when the connection stands. `private_data`, of at most 56 bytes, is for the
    /// peer's program.
    ///
    /// # Errors
    ///
    /// [`Error::Rejected`] if nobody listens there or the program does not want it; [`Error::Connection`]
    /// if `to` cannot be reached; too much private data.
    pub fn open(qp: QueuePair, to: SocketAddr, private_data: &[u8]) -> Result<Self, Error> {
        let device = qp.built().pd.device().clone();
        let identifier = Identifier::new(&device, number_of(qp.built().qp_type()))?;
        let (engine, id) = (&device.opened.engine, identifier.id);
        engine.cm_resolve_addr(id, None, to)?;
        identifier.expect(EventKind::AddrResolved)?;
        engine.cm_resolve_route(id)?;
        identifier.expect(EventKind::RouteResolved)?;
        if engine.cm_route(id)?.protocol != Protocol::Quipu {
            return Err(Error::PlainIwarp);
        }
        engine.cm_connect(id, &param(&qp, private_data))?;
        let response = identifier.expect(EventKind::ConnectResponse)?;
        qp.connect_as(&engine.cm_connect_params(id)?)?;
        engine.cm_accept(id, None)?;
        Ok(Self::new(qp, identifier, response.private_data))
    }

    /// The queue pair; the connection is one, too.
    #[must_use]
    pub fn queue_pair(&self) -> &QueuePair {
        &self.qp
    }

    /// What the peer's program said, padded with zeros: to 196 bytes in an acceptance, to 56 in a request.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Ends the connection: the peer is told, and what is still posted at this end is flushed.
    ///
    /// # Errors
    ///
    /// It was ended by this before; or the engine belongs to the parent of this process.
    pub fn disconnect(&self) -> Result<(), Error> {
        self.flush()?;
        Ok(self.identifier.device.opened.engine.cm_disconnect(self.identifier.id)?)
    }

    /// Waits until the peer ends the connection, or its process does. What is still posted at this end is
    /// flushed then, so that another thread that waits for completions goes on.
    ///
    /// # Errors
    ///
    /// The engine belongs to the parent of this process.
    pub fn wait_end(&self) -> Result<(), Error> {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if !*ended {
            self.identifier.wait_end()?;
            *ended = true;
        }
        drop(ended);
        self.flush()
    }

    fn flush(&self) -> Result<(), Error> {
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        self.qp.modify(&attr, QpAttrMask::STATE)
    }
}

impl Deref for Connection {
    type Target = QueuePair;

    fn deref(&self) -> &QueuePair {
        &self.qp
    }
}
