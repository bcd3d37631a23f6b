//! QPIP: queue pairs whose messages are TCP segments and UDP datagrams, with nothing in between.
//!
//! The inter-network stack ([`quipu_inet::stack`]) is a value inside the adapter: it writes and reads
//! headers, and names ranges of streams. This module says whose they are. Payload goes from registered memory
//! into the frame and from the frame into posted receives; nothing is kept in between (`specs/qpip.md`).
//!
//! | state machine | here |
//! |---|---|
//! | doorbell | `transmit::frames`: TCP learns that the stream goes on; payload stays where it is |
//! | management | `connections`: listening, connecting, mating, closing, failing |
//! | transmit | `transmit::frames`: whose turn it is, headers by the stack, payload by the scatter list |
//! | receive | `receive::frames`: placement, completion, the window offered |
//!
//! `streams` and `buffers` are for plain iWARP, whose byte streams may go over the same TCP.

mod buffers;
pub(crate) mod connections;
pub(crate) mod path;
pub(crate) mod streams;
pub(crate) mod udp;
mod words;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use quipu_inet::stack::{self, Carriage, ListenerId, Stack, TcpId, UdpId};
use quipu_inet::tcp;

use crate::adapter::{Adapter, Hub};
use crate::error::Fault;
use crate::probe::Probe;
use crate::qp::{Path, Qp};
use crate::requester;
use crate::transmit::marking;
use crate::types::{AsyncEvent, QpId, Time};

pub use connections::check_message;
pub use streams::TcpStreamChange;
pub use udp::check_datagram;
pub(crate) use words::Sender;
pub use words::{FrameOut, Source, TcpChange, TcpSettings};

/// Whose a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// It has come to this listener, and is not mated yet.
    Listener(ListenerId),
    /// The program is to decide about it, which has come to this listener.
    Request(ListenerId),
    /// This queue pair is its end.
    Qp(QpId),
    /// A byte stream.
    Stream,
}

/// A port that is watched.
pub(crate) struct Watch {
    settings: TcpSettings,
    /// Queue pairs for the next connections, in order.
    idle: VecDeque<QpId>,
    /// Connections that stand and wait for one, or for the program to hear of them.
    waiting: VecDeque<TcpId>,
    backlog: usize,
    /// The program decides about each connection.
    deferred: bool,
    /// How many it has heard of, and not decided about.
    requests: usize,
    /// It is watched no more, and here only until the program has decided about those.
    closed: bool,
}

/// What an adapter has that is attached to a network of IP.
pub(crate) struct Inet {
    pub(crate) stack: Stack,
    /// By [`TcpId::index`].
    owners: Vec<Option<(TcpId, Owner)>>,
    /// By [`UdpId::index`].
    bound: Vec<Option<(UdpId, QpId)>>,
    /// Byte streams, by [`TcpId::index`].
    streams: Vec<Option<streams::TcpStream>>,
    watches: BTreeMap<ListenerId, Watch>,
    /// Queue pairs with datagrams to send, each once, in the order of service.
    pub(crate) datagrams: VecDeque<QpId>,
    /// Those with datagrams that wait for the station of their next hop.
    unresolved: Vec<QpId>,
    /// Whether datagrams were served last.
    pub(crate) datagrams_turn: bool,
    /// Octets that queue pairs keep for want of receives.
    kept: usize,
    /// Checksums are computed here, not by the link.
    pub(crate) seals: bool,
    /// That of the latest connection: most share it.
    latest: Option<(TcpSettings, Arc<tcp::Config>)>,
}

impl Inet {
    fn new(config: stack::Config) -> Self {
        Self {
            seals: !config.offload.checksum,
            stack: Stack::new(config),
            owners: Vec::new(),
            bound: Vec::new(),
            streams: Vec::new(),
            watches: BTreeMap::new(),
            datagrams: VecDeque::new(),
            unresolved: Vec::new(),
            datagrams_turn: false,
            kept: 0,
            latest: None,
        }
    }

    /// What is kept for want of receives has become more, or less: the stack learns how much more may come.
    pub(crate) fn note_kept(&mut self, before: u64, after: u64) {
        self.kept = self.kept + after as usize - before as usize;
        let left = path::MOST_KEPT_IN_ALL.saturating_sub(self.kept) as u32;
        self.stack.limit_spare(left, path::MAYBE_KEPT);
    }

    pub(crate) fn owner(&self, connection: TcpId) -> Option<Owner> {
        let (id, owner) = (*self.owners.get(connection.index())?)?;
        (id == connection).then_some(owner)
    }

    fn set_owner(&mut self, connection: TcpId, owner: Option<Owner>) {
        set(&mut self.owners, connection.index(), owner.map(|owner| (connection, owner)));
    }

    /// The queue pair that is bound to a UDP port.
    pub(crate) fn bound(&self, socket: UdpId) -> Option<QpId> {
        let (id, qp) = (*self.bound.get(socket.index())?)?;
        (id == socket).then_some(qp)
    }

    /// What TCP is told; one for all connections that are alike.
    ///
    /// # Errors
    /// The settings are not valid.
    fn tcp_config(&mut self, settings: &TcpSettings) -> Result<Arc<tcp::Config>, Fault> {
        settings.check()?;
        Ok(match &self.latest {
            Some((latest, config)) if latest == settings => Arc::clone(config),
            _ => {
                let config = Arc::new(settings.to_config());
                self.latest = Some((*settings, Arc::clone(&config)));
                config
            }
        })
    }

    /// The next event of the stack that is one for queue pairs.
    fn next_event(&mut self) -> Option<stack::Event> {
        self.stack.poll_event()
    }
}

/// Puts a value into a table that grows as needed.
fn set<T>(table: &mut Vec<Option<T>>, index: usize, value: Option<T>) {
    if value.is_some() && table.len() <= index {
        table.resize_with(index + 1, || None);
    }
    if let Some(slot) = table.get_mut(index) {
        *slot = value;
    }
}

impl<P> Hub<P> {
    /// The stack, of an adapter that has one.
    ///
    /// # Errors
    /// It has none.
    pub(crate) fn attached(&mut self) -> Result<&mut Inet, Fault> {
        self.inet
            .as_deref_mut()
            .ok_or(Fault::Unsupported("the adapter has no packet link; set QUIPU_QPIP_LINK"))
    }

    /// The settings with a traffic class: if they name none, that of the service level of the rules.
    fn marked(&self, settings: &TcpSettings) -> TcpSettings {
        let traffic_class = marking::class_or_default(settings.traffic_class, self);
        TcpSettings { traffic_class, ..*settings }
    }
}

impl<P: Probe> Adapter<P> {
    /// Attaches the adapter to a network of IP: from now on it has an inter-network stack, exchanges frames
    /// ([`handle_frame`](Self::handle_frame), [`transmit_frame`](Self::transmit_frame)), and queue pairs of
    /// type [`Tcp`](crate::QpType::Tcp) and [`Udp`](crate::QpType::Udp) can communicate.
    ///
    /// # Errors
    /// [`Fault::Busy`]: it is attached already.
    pub fn attach_inet(&mut self, config: stack::Config) -> Result<(), Fault> {
        if self.hub.inet.is_some() {
            return Err(Fault::Busy);
        }
        self.hub.inet = Some(Box::new(Inet::new(config)));
        Ok(())
    }

    /// How what a queue pair sends is carried from now on: the datagrams of one of type UDP, the segments of
    /// a connection (RFC 9293 3.9.2, SHLD-21).
    ///
    /// # Errors
    /// No such queue pair, one of another type, or without a connection; or nothing can be carried like that.
    pub fn set_carriage(&mut self, id: QpId, carriage: Carriage) -> Result<(), Fault> {
        words::check_carriage(carriage)?;
        let (qp, hub) = self.qp_and_hub(id).ok_or(Fault::NoSuchObject)?;
        // Its lane follows from it.
        qp.attr.av.traffic_class = carriage.traffic_class;
        let traffic_class = marking::class_or_default(carriage.traffic_class, hub);
        let carriage = Carriage { traffic_class, ..carriage };
        match &mut qp.path {
            Path::Udp(path) => path.carriage = carriage,
            Path::Tcp(path) => {
                let connection = path.connection.ok_or(Fault::WrongState)?;
                hub.attached()?.stack.set_carriage(connection, carriage);
            }
            _ => return Err(Fault::Invalid("the queue pair is not a QPIP queue pair")),
        }
        Ok(())
    }

    /// The stack: its counters, connections and what it knows of its network.
    #[must_use]
    pub fn inet(&self) -> Option<&Stack> {
        self.hub.inet.as_ref().map(|inet| &inet.stack)
    }

    /// The program goes away with its memory: peers of connections that are not closed are to be told, by the
    /// frames that [`transmit_frame`](Self::transmit_frame) still gives.
    pub fn abort_connections(&mut self, now: Time) {
        self.hub.now = now;
        if let Some(inet) = &mut self.hub.inet {
            inet.stack.abort_all();
        }
    }

    /// The link was down, and is up again: others may be on it now, and are told what was told at first.
    pub fn link_came_up(&mut self) {
        if let Some(inet) = &mut self.hub.inet {
            inet.stack.begin_anew();
        }
    }

    /// The link is gone, and with it everybody on it: queue pairs over it are in ERR
    /// ([`QpFatal`](AsyncEvent::QpFatal)), what was posted to them is flushed, and their connections are
    /// aborted.
    pub fn lose_link(&mut self, now: Time) {
        self.hub.now = now;
        let over = |qp: &Qp| matches!(qp.path, Path::Tcp(_) | Path::Udp(_));
        let lost = self.qps.iter().filter(|(_, qp)| over(qp)).map(|(id, _)| id);
        for id in lost.collect::<Vec<_>>() {
            if let Some((qp, hub)) = self.qp_and_hub(id) {
                requester::to_error(qp, hub, Some(AsyncEvent::QpFatal(id)));
            }
        }
        self.lose_streams();
    }

    /// Does what the stack has to tell.
    pub(crate) fn take_inet_events(&mut self) {
        while let Some(event) = self.hub.inet.as_mut().and_then(|inet| inet.next_event()) {
            match event {
                stack::Event::Incoming { listener, connection } => {
                    self.hub.incoming(listener, connection, &self.qps);
                }
                stack::Event::Tcp { connection, event } => self.tcp_event(connection, event),
                stack::Event::Neighbour { next_hop, found } => self.neighbour(next_hop, found),
                stack::Event::Neighbours => self.neighbours(),
                // Anyone who sends datagrams learns of their fate from answers, or not at all.
                stack::Event::Refused { .. } => {}
            }
        }
    }
}
