//! The engine: everything but queue pairs, handlers and time.

mod connect;
mod credits;
mod deliver;
mod delivery;
mod express;
mod lanes;
mod receive;
mod request;
mod signals;

use std::collections::VecDeque;
use std::net::SocketAddr;

pub use deliver::{Replied, ReplyTicket};
pub use delivery::{Delivery, DeliveryKind, Payload};
pub use express::code_short;
pub use lanes::FromLane;
pub use request::{Body, Outgoing, Sent, Ticket};

use crate::conn::{Conn, ConnId, PeerSegment, Role};
use crate::endpoint::{Bundle, BundleId, Counters, Endpoint, EndpointId, Link, Translation};
use crate::fabric::{Fabric, Remote};
use crate::name::Name;
use crate::records::Records;
use crate::slab::Slab;
use crate::types::{CallError, Config, MAX_HANDLERS, MAX_TRANSLATIONS, Mode, Tag};

use credits::{Buffers, Pool};

/// Handlers and translations of a new endpoint.
const TABLE: usize = 256;

/// A port: the endpoints of a process, their connections, and the memory that these share.
///
/// `H` is what a handler is to the program; the engine keeps it and gives it out with each message.
/// The caller runs handlers, outside of the engine:
///
/// 1. whatever the queue pairs and the connection manager report goes in by
///    [`handle_event`](Self::handle_event), the time by [`handle_timeout`](Self::handle_timeout);
/// 2. [`next_delivery`](Self::next_delivery) says which handler is to run;
/// 3. the handler may call [`reply`](Self::reply) once, if the message is a request;
/// 4. [`finish`](Self::finish) ends the delivery.
#[derive(Debug)]
pub struct Core<F, H> {
    pub(crate) fabric: F,
    config: Config,
    port: SocketAddr,
    incarnation: u64,
    bundles: Slab<Bundle>,
    endpoints: Slab<Endpoint>,
    /// Handlers and counters of endpoints, by their place.
    handlers: Vec<Vec<Option<H>>>,
    counters: Vec<Counters>,
    conns: Slab<Conn>,
    records: Records,
    buffers: Buffers,
    pool: Pool,
    /// Receive slots to be posted again.
    reposts: Vec<u32>,
    /// The time of the last call that brought it, in nanoseconds.
    now: u64,
    /// Connections that wait to try again.
    retrying: u32,
    /// When to ask peers that owe answers for a sign of life, and the serial number of the youngest
    /// record at the last time.
    probe_at: u64,
    probed_up_to: u32,
    /// Writes of replies under way: their numbers and connections.
    reply_writes: Vec<(u32, ConnId)>,
    next_ticket: u32,
    /// When the credits of signals go back at the latest, while any stay away.
    signals_due: Option<u64>,
    /// Deliveries that are finished, for the next messages.
    spare: Vec<Box<Delivery<H>>>,
}

impl<F: Fabric, H: Clone> Core<F, H> {
    /// An engine without endpoints, which peers reach at `port`. No two lives of a port have the
    /// same `incarnation`, which is not 0.
    ///
    /// # Errors
    ///
    /// The fabric has no room for the receive slots.
    pub fn new(
        mut fabric: F,
        config: Config,
        port: SocketAddr,
        incarnation: u64,
    ) -> Result<Self, CallError> {
        let pool = Pool::new(&config);
        if !fabric.provide(pool.slots()) {
            return Err(CallError::TableFull);
        }
        Ok(Self {
            fabric,
            port,
            incarnation,
            bundles: Slab::default(),
            endpoints: Slab::default(),
            handlers: Vec::new(),
            counters: Vec::new(),
            conns: Slab::default(),
            records: Records::new(config.max_outstanding),
            buffers: Buffers::new(config.send_buffers),
            pool,
            reposts: Vec::new(),
            now: 0,
            retrying: 0,
            probe_at: 0,
            probed_up_to: 0,
            reply_writes: Vec::new(),
            next_ticket: 0,
            signals_due: None,
            spare: Vec::new(),
            config,
        })
    }

    /// The fabric.
    pub fn fabric(&self) -> &F {
        &self.fabric
    }

    /// The fabric, to be driven.
    pub fn fabric_mut(&mut self) -> &mut F {
        &mut self.fabric
    }

    /// The sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Creates a bundle.
    pub fn create_bundle(&mut self, mode: Mode) -> BundleId {
        self.bundles.insert(Bundle { mode, queue: VecDeque::new(), running: 0, arrivals: 0 })
    }

    /// Frees a bundle and its endpoints.
    ///
    /// # Errors
    ///
    /// There is none, or a handler of it runs.
    pub fn free_bundle(&mut self, bundle: BundleId) -> Result<(), CallError> {
        if self.bundle(bundle)?.running > 0 {
            return Err(CallError::InHandler);
        }
        for endpoint in self.endpoints.ids() {
            if self.endpoint(endpoint)?.bundle == bundle {
                self.free_endpoint(endpoint)?;
            }
        }
        self.bundles.remove(bundle);
        Ok(())
    }

    /// Creates an endpoint, whose tag is [`Tag::NONE`].
    ///
    /// # Errors
    ///
    /// There is no such bundle.
    pub fn create_endpoint(&mut self, bundle: BundleId) -> Result<EndpointId, CallError> {
        self.bundle(bundle)?;
        let id = self.endpoints.insert(Endpoint {
            bundle,
            tag: Tag::NONE,
            translations: vec![None; TABLE],
            segment: None,
            public: None,
            has_twins: false,
            is_running: false,
            lent: None,
        });
        let at = id.index() as usize;
        if at >= self.handlers.len() {
            self.handlers.push(Vec::new());
            self.counters.push(Counters::default());
        }
        self.handlers[at] = vec![None; TABLE];
        self.counters[at] = Counters::default();
        Ok(id)
    }

    /// Frees an endpoint. Its connections end: requests of peers come back to them, and what was
    /// sent and is not answered yet is forgotten.
    ///
    /// # Errors
    ///
    /// There is none, or a handler of it runs.
    pub fn free_endpoint(&mut self, id: EndpointId) -> Result<(), CallError> {
        let endpoint = self.endpoint(id)?;
        if endpoint.is_running {
            return Err(CallError::InHandler);
        }
        let bundle = endpoint.bundle;
        for conn in self.conns.ids() {
            if self.conns.get(conn).is_some_and(|conn| conn.endpoint == id) {
                self.drop_conn(conn);
            }
        }
        if let Some(bundle) = self.bundles.get_mut(bundle) {
            let slots = bundle.queue.iter().filter(|arrived| arrived.endpoint == id);
            self.reposts.extend(slots.filter_map(|arrived| arrived.slot.map(|(slot, _)| slot)));
            bundle.queue.retain(|arrived| arrived.endpoint != id);
        }
        self.flush_reposts();
        self.endpoints.remove(id);
        self.handlers[id.index() as usize] = Vec::new();
        Ok(())
    }

    /// Moves an endpoint into another bundle, with all that it has and all that waits for it.
    ///
    /// # Errors
    ///
    /// There is no such endpoint or bundle, or a handler of it runs.
    pub fn move_endpoint(&mut self, id: EndpointId, to: BundleId) -> Result<(), CallError> {
        let endpoint = self.endpoint(id)?;
        let from = endpoint.bundle;
        if endpoint.is_running {
            return Err(CallError::InHandler);
        }
        self.bundle(to)?;
        let mut moved = VecDeque::new();
        if let Some(bundle) = self.bundles.get_mut(from) {
            let all = std::mem::take(&mut bundle.queue).into_iter();
            (moved, bundle.queue) = all.partition(|arrived| arrived.endpoint == id);
        }
        if let Some(bundle) = self.bundles.get_mut(to) {
            bundle.arrivals += moved.len() as u64;
            bundle.queue.append(&mut moved);
        }
        self.endpoint_mut(id)?.bundle = to;
        Ok(())
    }

    /// The name by which peers map an endpoint.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn name(&self, id: EndpointId) -> Result<Name, CallError> {
        let place = Name { port: self.port, endpoint: id.index(), incarnation: self.incarnation };
        Ok(self.endpoint(id)?.public.unwrap_or(place))
    }

    /// Gives an endpoint another name: that of an address at which it alone takes connections.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn set_name(&mut self, id: EndpointId, name: Name) -> Result<(), CallError> {
        self.endpoint_mut(id)?.public = Some(name);
        Ok(())
    }

    /// The tag that messages to an endpoint must have.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn tag(&self, id: EndpointId) -> Result<Tag, CallError> {
        Ok(self.endpoint(id)?.tag)
    }

    /// Changes that tag.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn set_tag(&mut self, id: EndpointId, tag: Tag) -> Result<(), CallError> {
        self.endpoint_mut(id)?.tag = tag;
        Ok(())
    }

    /// The segment of an endpoint, into which bulk messages are written.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn segment(&self, id: EndpointId) -> Result<Option<Remote>, CallError> {
        Ok(self.endpoint(id)?.segment)
    }

    /// Changes the segment. Peers learn of it with the next messages; what they write before goes
    /// to the old one, which stays registered for as long as its owner keeps it so.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn set_segment(
        &mut self,
        id: EndpointId,
        segment: Option<Remote>,
    ) -> Result<(), CallError> {
        self.endpoint_mut(id)?.segment = segment;
        for conn in self.conns.ids() {
            let Some(known) = self.conns.get_mut(conn).filter(|conn| conn.endpoint == id) else {
                continue;
            };
            match &mut known.role {
                Role::Initiator(initiator) => initiator.tell_segment = true,
                Role::Acceptor(_) => self.announce_segment(conn),
            }
        }
        Ok(())
    }

    /// Sets or clears a handler. 0 is that of returned messages.
    ///
    /// # Errors
    ///
    /// There is no such endpoint, or the table is shorter.
    pub fn set_handler(
        &mut self,
        id: EndpointId,
        index: u32,
        handler: Option<H>,
    ) -> Result<(), CallError> {
        let endpoint = self.endpoints.get_mut(id).ok_or(CallError::NoSuchObject)?;
        let table = &mut self.handlers[id.index() as usize];
        let most = table.len() as u64;
        let slot = table.get_mut(index as usize).ok_or(CallError::TooMuch {
            what: "the index of a handler",
            value: index.into(),
            most,
        })?;
        *slot = handler;
        // The one that runs does not come back to a place that has another.
        endpoint.lent = endpoint.lent.filter(|lent| u32::from(*lent) != index);
        Ok(())
    }

    /// Sets the first handler from 1 on that is not set; its index.
    ///
    /// # Errors
    ///
    /// There is no such endpoint, or the table is full.
    pub fn set_any_handler(&mut self, id: EndpointId, handler: H) -> Result<u32, CallError> {
        let lent = self.endpoint(id)?.lent.map(usize::from);
        let table = &mut self.handlers[id.index() as usize];
        let is_free = |index: &usize| table[*index].is_none() && lent != Some(*index);
        let free = (1..table.len()).find(is_free).ok_or(CallError::TableFull)?;
        table[free] = Some(handler);
        Ok(free as u32)
    }

    /// Whether a handler is set.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn has_handler(&self, id: EndpointId, index: u32) -> Result<bool, CallError> {
        let lent = self.endpoint(id)?.lent.map(u32::from);
        let place = self.handlers[id.index() as usize].get(index as usize);
        Ok(place.is_some_and(Option::is_some) || lent == Some(index))
    }

    /// The size of the handler table.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn handler_count(&self, id: EndpointId) -> Result<u32, CallError> {
        self.endpoint(id)?;
        Ok(self.handlers[id.index() as usize].len() as u32)
    }

    /// Changes the size of the handler table, to 256 at least.
    ///
    /// # Errors
    ///
    /// Too many, or a handler is set that would be cut off.
    pub fn set_handler_count(&mut self, id: EndpointId, count: u32) -> Result<(), CallError> {
        let lent = self.endpoint(id)?.lent;
        if lent.is_some_and(|lent| u32::from(lent) >= count.max(TABLE as u32)) {
            return Err(CallError::InUse);
        }
        resize(&mut self.handlers[id.index() as usize], count, MAX_HANDLERS, "handlers")
    }

    /// What an endpoint has done.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn counters(&self, id: EndpointId) -> Result<Counters, CallError> {
        self.endpoint(id)?;
        Ok(self.counters[id.index() as usize])
    }

    /// How many messages of an endpoint have neither been answered nor come back. Signals are among them
    /// until the peer has given their credits back.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn outstanding(&self, id: EndpointId) -> Result<usize, CallError> {
        self.endpoint(id)?;
        let is_of = |conn: &ConnId| self.conns.get(*conn).is_some_and(|conn| conn.endpoint == id);
        let of = self.conns.iter().filter(|(_, conn)| conn.endpoint == id);
        let signals = of.map(|(_, conn)| match &conn.role {
            Role::Initiator(initiator) => usize::from(initiator.signals),
            Role::Acceptor(_) => 0,
        });
        Ok(self.records.conns().filter(is_of).count() + signals.sum::<usize>())
    }

    /// Maps an index of the translation table to a peer. Nothing is sent before the first request.
    ///
    /// # Errors
    ///
    /// The index is mapped already, or outside of the table.
    pub fn map(
        &mut self,
        id: EndpointId,
        index: u32,
        name: Name,
        tag: Tag,
    ) -> Result<(), CallError> {
        let table = &mut self.endpoint_mut(id)?.translations;
        let most = table.len() as u64;
        let entry = table.get_mut(index as usize).ok_or(CallError::TooMuch {
            what: "the index of a translation",
            value: index.into(),
            most,
        })?;
        if entry.is_some() {
            return Err(CallError::Mapped(index));
        }
        *entry = Some(Translation { name, tag, link: Link::Idle, heard: None, signals: 0 });
        Ok(())
    }

    /// Maps the lowest index that is free; which.
    ///
    /// # Errors
    ///
    /// The table is full.
    pub fn map_any(&mut self, id: EndpointId, name: Name, tag: Tag) -> Result<u32, CallError> {
        let table = &self.endpoint(id)?.translations;
        let free = table.iter().position(Option::is_none).ok_or(CallError::TableFull)? as u32;
        self.map(id, free, name, tag)?;
        Ok(free)
    }

    /// Frees an index. Requests that are under way end as they would have.
    ///
    /// # Errors
    ///
    /// It is not mapped.
    pub fn unmap(&mut self, id: EndpointId, index: u32) -> Result<(), CallError> {
        let entry = self.endpoint_mut(id)?.translations.get_mut(index as usize);
        let translation = entry.and_then(Option::take).ok_or(CallError::NotMapped(index))?;
        if let Link::Conn(conn) = translation.link {
            if let Some(initiator) = self.conns.get_mut(conn).and_then(Conn::initiator) {
                initiator.index = None;
            }
            self.close_if_idle(conn);
        }
        Ok(())
    }

    /// The name and the tag that an index is mapped to.
    ///
    /// # Errors
    ///
    /// It is not mapped.
    pub fn translation(&self, id: EndpointId, index: u32) -> Result<(Name, Tag), CallError> {
        let entry = self.endpoint(id)?.translations.get(index as usize);
        let translation = entry.and_then(Option::as_ref).ok_or(CallError::NotMapped(index))?;
        Ok((translation.name, translation.tag))
    }

    /// Changes the tag that messages to a peer bear.
    ///
    /// # Errors
    ///
    /// It is not mapped.
    pub fn set_translation_tag(
        &mut self,
        id: EndpointId,
        index: u32,
        tag: Tag,
    ) -> Result<(), CallError> {
        let entry = self.endpoint_mut(id)?.translations.get_mut(index as usize);
        entry.and_then(Option::as_mut).ok_or(CallError::NotMapped(index))?.tag = tag;
        Ok(())
    }

    /// The lowest index that is mapped to a peer, if there is one.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn index_of(&self, id: EndpointId, name: &Name) -> Result<Option<u32>, CallError> {
        let table = &self.endpoint(id)?.translations;
        let is_it = |entry: &Option<Translation>| entry.is_some_and(|entry| entry.name == *name);
        Ok(table.iter().position(is_it).map(|index| index as u32))
    }

    /// The size of the translation table.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    pub fn translation_count(&self, id: EndpointId) -> Result<u32, CallError> {
        Ok(self.endpoint(id)?.translations.len() as u32)
    }

    /// Changes the size of the translation table, to 256 at least.
    ///
    /// # Errors
    ///
    /// Too many, or an index is mapped that would be cut off.
    pub fn set_translation_count(&mut self, id: EndpointId, count: u32) -> Result<(), CallError> {
        let table = &mut self.endpoint_mut(id)?.translations;
        resize(table, count, MAX_TRANSLATIONS, "translations")
    }

    /// Messages that have come for a bundle so far, whether their handlers have run or not.
    ///
    /// # Errors
    ///
    /// There is no such bundle.
    pub fn arrivals(&self, bundle: BundleId) -> Result<u64, CallError> {
        Ok(self.bundle(bundle)?.arrivals)
    }

    /// Whether a message waits whose handler could run now.
    ///
    /// # Errors
    ///
    /// There is no such bundle.
    pub fn has_messages(&self, bundle: BundleId) -> Result<bool, CallError> {
        Ok(!self.bundle(bundle)?.queue.is_empty())
    }

    #[inline]
    fn bundle(&self, id: BundleId) -> Result<&Bundle, CallError> {
        self.bundles.get(id).ok_or(CallError::NoSuchObject)
    }

    #[inline]
    fn endpoint(&self, id: EndpointId) -> Result<&Endpoint, CallError> {
        self.endpoints.get(id).ok_or(CallError::NoSuchObject)
    }

    #[inline]
    fn endpoint_mut(&mut self, id: EndpointId) -> Result<&mut Endpoint, CallError> {
        self.endpoints.get_mut(id).ok_or(CallError::NoSuchObject)
    }

    /// The bundle of an endpoint.
    ///
    /// # Errors
    ///
    /// There is no such endpoint.
    #[inline]
    pub fn bundle_of(&self, id: EndpointId) -> Result<BundleId, CallError> {
        Ok(self.endpoint(id)?.bundle)
    }

    /// Has a message wait for its handler.
    #[inline]
    fn enqueue(&mut self, arrived: crate::endpoint::Arrived) {
        let bundle = self.endpoints.get(arrived.endpoint).map(|endpoint| endpoint.bundle);
        match bundle.and_then(|bundle| self.bundles.get_mut(bundle)) {
            Some(bundle) => {
                bundle.arrivals += 1;
                bundle.queue.push_back(arrived);
            }
            None => self.reposts.extend(arrived.slot.map(|(slot, _)| slot)),
        }
    }
}

/// What a new connection knows of the peer's segment.
const UNKNOWN: PeerSegment = PeerSegment::Unknown;

/// Changes the size of a table of optional entries.
fn resize<T: Clone>(
    table: &mut Vec<Option<T>>,
    count: u32,
    most: usize,
    what: &'static str,
) -> Result<(), CallError> {
    let count = (count as usize).max(TABLE);
    if count > most {
        return Err(CallError::TooMuch { what, value: count as u64, most: most as u64 });
    }
    if table.iter().skip(count).any(Option::is_some) {
        return Err(CallError::InUse);
    }
    table.resize(count, None);
    Ok(())
}
