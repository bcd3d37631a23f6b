//! Connection management: what the kernel's `rdma_cm` does behind librdmacm, as a state machine.
//!
//! A [`Cm`] is a value, like the adapter of `quipu-nic`: calls of programs, bytes of streams,
//! datagrams and the time go in; events, actions and the next deadline come out. It has no clock, no
//! sockets and no threads, and calls nobody back. `specs/quipu-cm.md` says what goes over the wire.
//!
//! | module | is |
//! |---|---|
//! | `id` | identifiers and their states |
//! | `connect` | connections: REQ, REP, REJ, RTU, DREQ, DREP over a TCP stream |
//! | `plain` | connections with plain iWARP adapters |
//! | `bare` | packet links; connections of QPIP: TCP and nothing else |
//! | `stream` | MPA start-up and frames in one stream |
//! | `again` | connections that are refused |
//! | `admission` | bounds for streams of strangers |
//! | `lookup` | datagrams: SIDR_REQ and SIDR_REP over UDP |
//! | `group` | multicast groups |
//! | `attr` | what queue pairs are told of a connection |
//! | `events` | event channels |
//!
//! Time is in nanoseconds since any fixed moment.
#![forbid(unsafe_code)]

mod addresses;
mod admission;
mod again;
mod attr;
mod bare;
mod connect;
mod events;
mod faults;
mod group;
mod id;
mod keys;
mod levels;
mod lookup;
mod plain;
mod stream;
mod types;

use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use rand_chacha::ChaCha20Rng;
use rand_core::{RngCore, SeedableRng};

use addresses::Addresses;
use admission::Admission;
use events::Channel;
use id::{Id, Listener, State};
use keys::Slab;
use stream::Stream;

pub use attr::{QpParams, Route};
pub use bare::Unwanted;
pub use id::Options;
pub use keys::{ChannelKey, IdKey, StreamKey};
pub use lookup::UDP_QKEY;
pub use types::{
    Action, CallError, Config, Ece, Event, EventKind, HandOver, Loss, Param, Path, Peer, PortSpace,
    Protocol, Refusal, gid_of,
};

/// Linux's error numbers, as events report them.
mod errno {
    pub(crate) const PROTO: i32 = 71;
    pub(crate) const CONNRESET: i32 = 104;
    pub(crate) const CONNREFUSED: i32 = 111;
    pub(crate) const TIMEDOUT: i32 = 110;
}

/// Requests of one listener that may wait for the program, at most.
const MAX_BACKLOG: usize = 1024;

/// What runs out of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Clocked {
    Id(IdKey),
    Stream(StreamKey),
}

/// The connection management of one engine.
pub struct Cm {
    config: Config,
    own: Addresses,
    rng: ChaCha20Rng,
    channels: Slab<ChannelKey, Channel>,
    ids: Slab<IdKey, Id>,
    streams: Slab<StreamKey, Stream>,
    admission: Admission,
    deadlines: BTreeSet<(u64, Clocked)>,
    actions: VecDeque<Action>,
    touched: Vec<ChannelKey>,
    /// The plain iWARP ports that have accepted a connection of this side last, and when.
    accepted_at: VecDeque<(SocketAddr, u64)>,
    /// The device is gone.
    removed: bool,
}

impl Cm {
    /// Without channels and identifiers yet.
    pub fn new(config: Config) -> Self {
        Self {
            rng: ChaCha20Rng::from_seed(config.seed),
            own: Addresses::of(config.gid),
            config,
            channels: Slab::new(),
            ids: Slab::new(),
            streams: Slab::new(),
            admission: Admission::default(),
            deadlines: BTreeSet::new(),
            actions: VecDeque::new(),
            touched: Vec::new(),
            accepted_at: VecDeque::new(),
            removed: false,
        }
    }

    /// Creates an identifier whose events come to `channel`, with `cookie`. `qp_type` is `IBV_QPT_*`: that of
    /// its queue pair, or of those that a listener's requests are for; 0: any.
    ///
    /// # Errors
    ///
    /// There is no such channel.
    pub fn create_id(
        &mut self,
        channel: ChannelKey,
        space: PortSpace,
        qp_type: u8,
        cookie: u64,
    ) -> Result<IdKey, CallError> {
        self.channels.get_mut(channel).ok_or(CallError::NoSuchObject)?.users += 1;
        Ok(self.ids.insert(Id::new(channel, space, qp_type, cookie)))
    }

    /// Names an identifier in events to come.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn set_cookie(&mut self, key: IdKey, cookie: u64) -> Result<(), CallError> {
        self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?.cookie = cookie;
        Ok(())
    }

    /// Destroys an identifier in any state; its peer is told. Its events that were not taken vanish;
    /// how many were taken.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn destroy_id(&mut self, key: IdKey) -> Result<u32, CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        if let State::Listening(listener) = &mut id.state {
            let listener = std::mem::take(listener);
            id.state = State::Over;
            self.end_listener(key, &listener);
        } else {
            self.part(key);
        }
        self.remove_id(key).map(|id| id.reported).ok_or(CallError::NoSuchObject)
    }

    fn end_listener(&mut self, key: IdKey, listener: &Listener) {
        while let Some(stream) = self.admission.any(key) {
            self.close(stream, true);
        }
        for &child in &listener.untaken {
            self.part(child);
            self.remove_id(child);
        }
    }

    fn remove_id(&mut self, key: IdKey) -> Option<Id> {
        self.set_deadline(key, None);
        let id = self.ids.remove(key)?;
        if let Some(channel) = self.channels.get_mut(id.channel) {
            channel.users -= 1;
        }
        self.forget_events(id.channel, id.events.len());
        Some(id)
    }

    /// Whether an identifier can be bound now: not bound, and not in use.
    ///
    /// # Errors
    ///
    /// It cannot, or there is none.
    pub fn check_unbound(&self, key: IdKey) -> Result<(), CallError> {
        let id = self.ids.get(key).ok_or(CallError::NoSuchObject)?;
        if matches!(id.state, State::Idle) && id.src.is_none() {
            Ok(())
        } else {
            Err(CallError::WrongState)
        }
    }

    /// The own address of an identifier, if it is bound.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn bound(&self, key: IdKey) -> Result<Option<SocketAddr>, CallError> {
        Ok(self.ids.get(key).ok_or(CallError::NoSuchObject)?.src)
    }

    /// The world has bound an identifier to `src`.
    ///
    /// # Errors
    ///
    /// As [`check_unbound`](Self::check_unbound).
    pub fn bind(&mut self, key: IdKey, src: SocketAddr) -> Result<(), CallError> {
        self.check_unbound(key)?;
        self.set_source(key, src);
        Ok(())
    }

    /// An identifier gets its address, and with it its device.
    fn set_source(&mut self, key: IdKey, src: SocketAddr) {
        let asks_plain = self.config.asks_plain;
        if let Some(id) = self.ids.get_mut(key) {
            id.src = Some(src);
            if !id.on_link {
                let plain = asks_plain && id.space == PortSpace::Tcp;
                id.protocol = if plain { Protocol::Iwarp } else { Protocol::Quipu };
            }
        }
    }

    /// Whether the way to a peer may be asked for.
    ///
    /// # Errors
    ///
    /// It may not in this state, or there is no such identifier.
    pub fn check_resolvable(&self, key: IdKey) -> Result<(), CallError> {
        match self.ids.get(key).ok_or(CallError::NoSuchObject)?.state {
            State::Idle => Ok(()),
            _ => Err(CallError::WrongState),
        }
    }

    /// The world has found the way to `dst`, from `src`, to which the identifier is bound; or none,
    /// with an errno. An event says so.
    ///
    /// # Errors
    ///
    /// As [`check_resolvable`](Self::check_resolvable).
    pub fn resolved(
        &mut self,
        key: IdKey,
        dst: SocketAddr,
        src: Result<SocketAddr, i32>,
    ) -> Result<(), CallError> {
        self.check_resolvable(key)?;
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        id.dst = Some(dst);
        match src {
            Ok(src) => {
                id.state = State::AddressResolved;
                self.set_source(key, src);
                self.tell(key, EventKind::AddrResolved, 0);
            }
            Err(errno) => self.tell(key, EventKind::AddrError, -errno),
        }
        Ok(())
    }

    /// Finds the route, which is known as soon as the address is. An event says so. A path that the
    /// program gives (`RDMA_OPTION_IB_PATH`) is the same one.
    ///
    /// # Errors
    ///
    /// The address is not resolved.
    pub fn resolve_route(&mut self, key: IdKey) -> Result<(), CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        if !matches!(id.state, State::AddressResolved) {
            return Err(CallError::WrongState);
        }
        id.state = State::RouteResolved;
        self.tell(key, EventKind::RouteResolved, 0);
        Ok(())
    }

    /// Begins to take requests: `backlog` of them may wait for the program, 0 or less for as many
    /// as possible. The world has bound the identifier before, and listens.
    ///
    /// # Errors
    ///
    /// It is not bound, or in use.
    pub fn listen(&mut self, key: IdKey, backlog: i32) -> Result<(), CallError> {
        let id = self.ids.get_mut(key).ok_or(CallError::NoSuchObject)?;
        if !matches!(id.state, State::Idle) || id.src.is_none() {
            return Err(CallError::WrongState);
        }
        let wanted = usize::try_from(backlog).ok().filter(|&backlog| backlog > 0);
        let backlog = wanted.map_or(MAX_BACKLOG, |backlog| backlog.min(MAX_BACKLOG));
        id.state = State::Listening(Listener { backlog, ..Listener::default() });
        Ok(())
    }

    /// Whether an identifier takes requests.
    pub fn is_listening(&self, key: IdKey) -> bool {
        self.ids.get(key).is_some_and(|id| matches!(id.state, State::Listening(_)))
    }

    /// The world cannot listen after all.
    pub fn cancel_listen(&mut self, key: IdKey) {
        if let Some(id) = self.ids.get_mut(key)
            && let State::Listening(_) = id.state
        {
            id.state = State::Idle;
        }
    }

    /// Whether there is such a channel.
    pub fn has_channel(&self, key: ChannelKey) -> bool {
        self.channels.get(key).is_some()
    }

    /// Whether there is such an identifier.
    pub fn has_id(&self, key: IdKey) -> bool {
        self.ids.get(key).is_some()
    }

    /// What the world is to do next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) has something to do.
    pub fn poll_timeout(&self) -> Option<u64> {
        self.deadlines.first().map(|&(at, _)| at)
    }

    /// Does what is due at `now`.
    pub fn handle_timeout(&mut self, now: u64) {
        while let Some(&(at, what)) = self.deadlines.first()
            && at <= now
        {
            self.deadlines.pop_first();
            match what {
                // Its request did not come in time.
                Clocked::Stream(stream) => self.close(stream, true),
                Clocked::Id(key) => {
                    if let Some(id) = self.ids.get_mut(key) {
                        id.deadline = None;
                        self.time_out(now, key);
                    }
                }
            }
        }
    }

    fn set_deadline(&mut self, key: IdKey, at: Option<u64>) {
        let Some(id) = self.ids.get_mut(key) else { return };
        let before = std::mem::replace(&mut id.deadline, at);
        if let Some(before) = before {
            self.deadlines.remove(&(before, Clocked::Id(key)));
        }
        if let Some(at) = at {
            self.deadlines.insert((at, Clocked::Id(key)));
        }
    }

    fn draw_psn(&mut self) -> u32 {
        self.rng.next_u32() >> 8
    }

    /// How many streams and identifiers there are, and how many streams have not sent their request.
    pub fn load(&self) -> Load {
        Load {
            ids: self.ids.len(),
            streams: self.streams.len(),
            half_open: self.admission.len(),
            deadlines: self.deadlines.len(),
        }
    }
}

/// How much there is, for tests and for people who look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Identifiers.
    pub ids: usize,
    /// Streams.
    pub streams: usize,
    /// Those that have not sent their request.
    pub half_open: usize,
    /// Deadlines.
    pub deadlines: usize,
}

/// The wildcard address with a port that the system chooses: what `rdma_listen` binds to if the
/// program has not.
pub const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
