//! Identifiers and their states.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;

use quipu_wire::cm::Offer;

use crate::addresses::Addresses;
use crate::again::Again;
use crate::keys::{ChannelKey, IdKey, StreamKey};
use crate::types::{Event, Path, PortSpace, Protocol, gid_of, qp_type};

/// Where an identifier stands.
#[derive(Debug)]
pub(crate) enum State {
    /// Created, perhaps bound.
    Idle,
    /// `rdma_resolve_addr` succeeded.
    AddressResolved,
    /// `rdma_resolve_route` succeeded.
    RouteResolved,
    /// Takes requests.
    Listening(Listener),
    /// Has sent its request, or is about to.
    Connecting,
    /// Has got its reply, and has not said that the connection stands.
    Responded,
    /// A request that was not answered.
    Requested,
    /// Has accepted, and waits for the peer to say that the connection stands.
    Accepted,
    /// The connection stands.
    Established,
    /// Has asked the peer to end it.
    Disconnecting,
    /// The peer has ended it, and this program has not.
    Disconnected,
    /// Both have.
    TimeWait,
    /// Asks where datagrams go.
    LookingUp(Search),
    /// A look-up that was not answered.
    Asked(Question),
    /// Nothing happens any more, but that it is destroyed.
    Over,
}

/// What a listener knows.
#[derive(Debug, Default)]
pub(crate) struct Listener {
    pub(crate) backlog: usize,
    /// Requests that the program has not taken.
    pub(crate) untaken: BTreeSet<IdKey>,
    /// Look-ups that wait or were answered lately: a repeated one gets the same answer.
    pub(crate) lookups: HashMap<(SocketAddr, u32), Lookup>,
    /// Those that were answered, oldest first.
    pub(crate) answered: VecDeque<(SocketAddr, u32)>,
}

/// What became of a look-up.
#[derive(Debug)]
pub(crate) enum Lookup {
    /// The program has not answered.
    Pending,
    /// It has.
    Answered(Vec<u8>),
}

/// A look-up under way.
#[derive(Debug)]
pub(crate) struct Search {
    pub(crate) number: u32,
    pub(crate) request: Vec<u8>,
    pub(crate) sent: u32,
    /// Nobody had the port when it was sent before.
    pub(crate) refused: bool,
}

/// A look-up of a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    pub(crate) listener: IdKey,
    pub(crate) number: u32,
}

/// A membership of a multicast group.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) cookie: u64,
    pub(crate) reported: u32,
}

/// Settings of `rdma_set_option(3)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// `RDMA_OPTION_ID_TOS`.
    pub tos: Option<u8>,
    /// `RDMA_OPTION_ID_REUSEADDR`.
    pub reuse: bool,
    /// `RDMA_OPTION_ID_AFONLY`; `None`: the system's default.
    pub v6_only: Option<bool>,
    /// `RDMA_OPTION_ID_ACK_TIMEOUT`: 4.096 us << code.
    pub ack_timeout: Option<u8>,
}

/// Time-out code of paths: 4.096 us << 18 is about a second.
const ACK_TIMEOUT: u8 = 18;

/// An identifier.
#[derive(Debug)]
pub(crate) struct Id {
    pub(crate) channel: ChannelKey,
    pub(crate) space: PortSpace,
    pub(crate) qp_type: u8,
    pub(crate) cookie: u64,
    pub(crate) src: Option<SocketAddr>,
    /// The program has asked for no port of its own, and another would do as well.
    pub(crate) port_chosen: bool,
    pub(crate) dst: Option<SocketAddr>,
    pub(crate) options: Options,
    pub(crate) state: State,
    /// Of a connect request that was not taken: who listens.
    pub(crate) listener: Option<IdKey>,
    pub(crate) stream: Option<StreamKey>,
    /// For connecting once more.
    pub(crate) again: Again,
    /// Whether the peer asked for the connection.
    pub(crate) asked: bool,
    /// What this side said of itself, once it has.
    pub(crate) own: Option<Offer>,
    /// What the peer did.
    pub(crate) peer: Option<Offer>,
    /// What its connection speaks.
    pub(crate) protocol: Protocol,
    /// It is bound to an address of a packet link, or its peer is there.
    pub(crate) on_link: bool,
    /// Plain iWARP: what the peer's program said in its reply.
    pub(crate) reply: Vec<u8>,
    /// The first PSN of this side, once it was drawn.
    pub(crate) psn: Option<u32>,
    pub(crate) deadline: Option<u64>,
    pub(crate) groups: Vec<Group>,
    pub(crate) events: VecDeque<Event>,
    /// It was ended before it stood: by this program, which has accepted, or by the peer, whose reply this
    /// program has not answered. That is carried out when it stands.
    pub(crate) ended_early: bool,
    /// Whether the event of its end was kept back for a moment.
    pub(crate) end_kept: bool,
    /// Changes when the identifier moves to another channel.
    pub(crate) epoch: u32,
    /// Events that were taken, but for requests of others.
    pub(crate) reported: u32,
}

impl Id {
    pub(crate) fn new(channel: ChannelKey, space: PortSpace, qp_type: u8, cookie: u64) -> Self {
        Self {
            channel,
            space,
            qp_type,
            cookie,
            src: None,
            port_chosen: false,
            dst: None,
            options: Options::default(),
            state: State::Idle,
            listener: None,
            stream: None,
            again: Again::default(),
            asked: false,
            ended_early: false,
            end_kept: false,
            own: None,
            peer: None,
            protocol: Protocol::Quipu,
            on_link: false,
            reply: Vec::new(),
            psn: None,
            deadline: None,
            groups: Vec::new(),
            events: VecDeque::new(),
            epoch: 0,
            reported: 0,
        }
    }

    /// The type of its queue pair, where it is no listener: of those that name none, RC.
    pub(crate) fn service(&self) -> u8 {
        if self.qp_type == 0 { qp_type::RC } else { self.qp_type }
    }

    /// Whether a request for a connection was sent or received: from then on the kernel's rdma_cm has a
    /// connection that `rdma_disconnect` may end, whatever has become of it.
    pub(crate) fn has_asked_or_was_asked(&self) -> bool {
        !self.is_datagram()
            && !matches!(self.state, State::Listening(_))
            && self.own.or(self.peer).is_some()
    }

    /// Whether it is for datagrams, not for connections.
    pub(crate) fn is_datagram(&self) -> bool {
        match self.space {
            PortSpace::Udp | PortSpace::IpOib => true,
            PortSpace::Ib => self.qp_type == qp_type::UD,
            PortSpace::Tcp | PortSpace::Sdp => false,
        }
    }

    /// Whether a request that names no type may be for it: connections of the adapters that have no other
    /// protocol than TCP or plain iWARP are of RC.
    pub(crate) fn takes_untyped(&self) -> bool {
        self.space == PortSpace::Tcp && matches!(self.qp_type, 0 | qp_type::RC)
    }

    /// Whether it belongs to the device with the GID `gid`: it is bound to an address of its own. One of
    /// the loopback that is not the device's leaves open which device it will be until there is a peer, as
    /// with the kernel's rdma_cm; programs that look for devices by binding to every address of the host
    /// (libfabric) would take it for one by which peers reach them.
    pub(crate) fn has_device(&self, gid: [u8; 16]) -> bool {
        let Some(ip) = self.src.map(|src| src.ip()) else { return false };
        let alone = matches!(self.state, State::Idle | State::Listening(_));
        let foreign = ip.is_loopback() && gid_of(ip) != gid && !self.on_link;
        !(ip.is_unspecified() || alone && foreign)
    }

    /// Where its queue pairs are, on an engine with these addresses: those on a packet link are at its
    /// address.
    pub(crate) fn own_gid(&self, own: &Addresses) -> [u8; 16] {
        match (self.on_link, self.src) {
            (true, Some(src)) => gid_of(src.ip()),
            (_, Some(src)) => own.gid(own.row_of(src)),
            (_, None) => own.gid(0),
        }
    }

    /// The service ID of its connection (IBA A11): the port space, and the port of the end that listens.
    pub(crate) fn service_id(&self) -> Option<u64> {
        let end = if self.asked || self.listener.is_some() { self.src } else { self.dst };
        end.map(|end| u64::from(self.space.code()) << 16 | u64::from(end.port()))
    }

    pub(crate) fn traffic_class(&self) -> u8 {
        let asked = self.peer.filter(|_| self.options.tos.is_none());
        asked.map_or(self.options.tos.unwrap_or(0), |peer| peer.traffic_class)
    }

    pub(crate) fn ack_timeout(&self) -> u8 {
        self.options.ack_timeout.map_or(ACK_TIMEOUT, |code| code.min(31))
    }

    pub(crate) fn path_to(&self, own: &Addresses, dgid: [u8; 16]) -> Path {
        let sgid_index = self.src.map_or(0, |src| own.row_of(src));
        let traffic_class = self.traffic_class();
        let service_level = match traffic_class >> 5 {
            0 => own.levels.of(self.service_id()),
            level => level,
        };
        Path { dgid, sgid_index, traffic_class, service_level }
    }
}
