//! The packet link, and connections of QPIP: the adapter makes them. Here is which of them belongs to which
//! identifier, and what the adapter is to do; `engine/bare.rs` does it.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use quipu_cm::{CallError, IdKey, Loss, Protocol, Unwanted};
use quipu_inet::stack::{ListenerId, TcpId};
use quipu_inet::tcp::{Failure, Flow};
use quipu_nic::{Fault, QpId, TcpChange};

use super::{Manager, StreamOrder};
use crate::error::EngineError;

/// What the adapter is to do.
#[derive(Clone, Debug)]
pub(crate) enum Order {
    /// Connect a queue pair, from an own address and a port, of which each may be unspecified.
    Connect { id: IdKey, qpn: u32, from: SocketAddr, to: SocketAddr },
    /// Answer a peer, for a queue pair.
    Accept { id: IdKey, connection: TcpId, qpn: u32 },
    /// Refuse a peer.
    Refuse(TcpId),
    /// Watch a port no more.
    Unlisten(ListenerId),
    /// Something for a stream of plain iWARP.
    Stream(StreamOrder),
}

/// What is known of the packet link and its connections.
#[derive(Default)]
pub(super) struct Bare {
    /// Own addresses and the lengths of their prefixes; none without a link.
    addresses: Vec<(IpAddr, u8)>,
    /// What is spoken there.
    pub(super) protocol: Protocol,
    /// Connections are made over it wherever that is possible.
    preferred: bool,
    pub(super) orders: VecDeque<Order>,
    listeners: HashMap<IdKey, ListenerId>,
    pub(super) watched: HashMap<ListenerId, IdKey>,
    /// Peers about whom programs are to decide.
    requests: HashMap<IdKey, TcpId>,
    asking: HashMap<TcpId, IdKey>,
    /// Those that wait until a program has taken others.
    waiting: VecDeque<(ListenerId, TcpId, Flow)>,
}

/// Whether the first `len` bits of two addresses are the same.
fn shares(a: IpAddr, b: IpAddr, len: u8) -> bool {
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => (u128::from(u32::from(v4)) << 96, 32),
        IpAddr::V6(v6) => (u128::from(v6), 128),
    };
    let ((a, of_a), (b, of_b)) = (bits(a), bits(b));
    of_a == of_b && (a ^ b).leading_zeros() >= u32::from(len)
}

impl Bare {
    fn is_own(&self, ip: IpAddr) -> bool {
        self.addresses.iter().any(|&(own, _)| own == ip)
    }

    /// The own address from which a peer is reached over the link: one with its prefix, or where all go over
    /// the link, any of its family. Link-local peers are the kernel's neighbours unless all do.
    fn source_for(&self, peer: IpAddr) -> Option<IpAddr> {
        let local = |ip: IpAddr| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let known = self.preferred || !local(peer);
        let near = self.addresses.iter().find(|&&(own, len)| known && shares(own, peer, len));
        let alike = |own: IpAddr| own.is_ipv4() == peer.is_ipv4() && !local(own);
        let any = || {
            let usable = self.preferred && !peer.is_loopback() && !peer.is_multicast();
            self.addresses.iter().find(|&&(own, _)| usable && alike(own))
        };
        near.or_else(any).map(|&(own, _)| own)
    }

    /// Takes the connection of a request that is to be answered.
    fn take_request(&mut self, id: IdKey) -> Option<TcpId> {
        let connection = self.requests.remove(&id)?;
        self.asking.remove(&connection);
        Some(connection)
    }
}

impl Manager {
    /// The addresses of the packet link, what is spoken there, and whether connections are made over it
    /// wherever possible.
    pub(crate) fn learn_link(
        &mut self,
        addresses: Vec<(IpAddr, u8)>,
        protocol: Protocol,
        preferred: bool,
    ) {
        self.bare.addresses = addresses;
        (self.bare.protocol, self.bare.preferred) = (protocol, preferred);
    }

    /// Whether plain iWARP is spoken on the packet link.
    pub(crate) fn link_is_plain(&self) -> bool {
        self.bare.protocol == Protocol::Iwarp
    }

    /// The packet link is gone: nobody is reached over it any more, and whatever is bound to it has lost its
    /// device.
    pub(crate) fn lose_link(&mut self, now: u64) {
        self.bare.addresses.clear();
        self.cm.handle_link_lost();
        self.settle(now);
    }

    /// Whether an identifier for connections is bound to an address of the link, or that is to be.
    pub(super) fn is_on_link(&self, ip: IpAddr) -> bool {
        self.bare.is_own(ip)
    }

    /// Whether an identifier that is bound to `bound` reaches `peer` over the link.
    pub(super) fn goes_over_link(&self, key: IdKey, bound: Option<IpAddr>, peer: IpAddr) -> bool {
        let open = bound.is_none_or(|ip| ip.is_unspecified());
        self.cm.is_on_link(key) || open && self.bare.source_for(peer).is_some()
    }

    /// Finds the way to `dst` over the link. An event says what came of it.
    pub(super) fn resolve_over_link(
        &mut self,
        key: IdKey,
        dst: SocketAddr,
    ) -> Result<(), EngineError> {
        let bound = self.cm.bound(key)?;
        let port = bound.map_or(0, |src| src.port());
        let ip = match bound.map(|src| src.ip()).filter(|ip| !ip.is_unspecified()) {
            Some(ip) => Some(ip).filter(|ip| ip.is_ipv4() == dst.is_ipv4()),
            None => self.bare.source_for(dst.ip()),
        };
        let found = ip.map(|ip| SocketAddr::new(ip, port)).ok_or(libc::ENETUNREACH);
        self.cm.use_link(key, self.bare.protocol)?;
        // The port of the kernel's that it may have is of no use.
        self.drop_socket(key);
        Ok(self.cm.resolved(key, dst, found)?)
    }

    /// The port that the adapter is to watch for a listener: it is bound to an address of the link, or to
    /// every address of a kind that the link has. `None`: it is not.
    pub(crate) fn port_on_link(&self, key: IdKey) -> Result<Option<u16>, EngineError> {
        let src = self.cm.bound(key)?.ok_or(CallError::WrongState)?;
        let (space, datagram) = self.cm.kind(key)?;
        let bound = || self.bare.addresses.iter().any(|&(own, _)| self.cm.is_bound_to(key, own));
        let wanted = space == quipu_cm::PortSpace::Tcp && !datagram;
        Ok((wanted && (self.cm.is_on_link(key) || bound())).then_some(src.port()))
    }

    /// The adapter watches a port for a listener.
    pub(crate) fn watched_on_link(&mut self, key: IdKey, listener: ListenerId, port: u16) {
        self.bare.listeners.insert(key, listener);
        self.bare.watched.insert(listener, key);
        self.cm.set_port(key, port);
    }

    /// A listener is gone.
    pub(super) fn leave_link(&mut self, key: IdKey) {
        if let Some(listener) = self.bare.listeners.remove(&key) {
            self.bare.watched.remove(&listener);
            let orders = &mut self.bare.orders;
            self.bare.waiting.retain(|(of, connection, _)| {
                if *of == listener {
                    orders.push_back(Order::Refuse(*connection));
                }
                *of != listener
            });
            // Requests that the program has taken are its own: it answers them without the listener.
            orders.push_back(Order::Unlisten(listener));
        }
    }

    /// A peer asks for a connection.
    pub(crate) fn incoming(
        &mut self,
        now: u64,
        listener: ListenerId,
        connection: TcpId,
        flow: &Flow,
    ) {
        match self.link_is_plain() {
            true => self.admit_over_link(now, listener, connection, flow),
            false => self.ask(listener, connection, flow),
        }
        self.settle(now);
    }

    fn ask(&mut self, listener: ListenerId, connection: TcpId, flow: &Flow) {
        let by = self.bare.watched.get(&listener).copied();
        let asked = by
            .ok_or(Unwanted::Refused)
            .and_then(|by| self.cm.handle_incoming(by, flow.local, flow.remote));
        match asked {
            Ok(id) => {
                self.bare.requests.insert(id, connection);
                self.bare.asking.insert(connection, id);
            }
            Err(Unwanted::Refused) => self.bare.orders.push_back(Order::Refuse(connection)),
            // The adapter has a bound for all of them.
            Err(Unwanted::Full) => self.bare.waiting.push_back((listener, connection, *flow)),
        }
    }

    /// A program has taken an event: there may be room for a peer that waits.
    pub(super) fn ask_again(&mut self) {
        for _ in 0..self.bare.waiting.len() {
            if let Some((listener, connection, flow)) = self.bare.waiting.pop_front() {
                self.ask(listener, connection, &flow);
            }
        }
    }

    /// A peer about whom the program was to decide has given up.
    pub(crate) fn withdrawn(&mut self, now: u64, connection: TcpId) {
        self.bare.waiting.retain(|(_, waiting, _)| *waiting != connection);
        if let Some(id) = self.bare.asking.remove(&connection) {
            self.bare.requests.remove(&id);
            self.cm.handle_withdrawn(id);
            self.settle(now);
        }
    }

    /// A connection was never begun: there is no way to the peer, or a call was wrong.
    pub(crate) fn not_begun(&mut self, now: u64, id: IdKey, error: &Fault) {
        match error {
            Fault::NoSuchObject | Fault::WrongState | Fault::Busy => {
                self.cm.handle_unusable(id, libc::EINVAL);
            }
            Fault::Taken(_) => self.cm.handle_unreached(now, id, Loss::Failed(libc::EADDRINUSE)),
            Fault::Exhausted(_) => {
                self.cm.handle_unreached(now, id, Loss::Failed(libc::EADDRNOTAVAIL));
            }
            _ => self.cm.handle_unreached(now, id, Loss::Failed(libc::EHOSTUNREACH)),
        }
        // One that was to be answered.
        self.cm.handle_ended(id);
        self.settle(now);
    }

    /// A connection has begun, for a queue pair.
    pub(crate) fn begun(&mut self, id: IdKey, qp: QpId, port: Option<u16>) {
        self.plain.keep(id, qp);
        if let Some(port) = port {
            self.cm.set_port(id, port);
        }
    }

    /// Something has happened to the connection of a queue pair.
    pub(crate) fn tcp_changed(&mut self, now: u64, qp: QpId, change: TcpChange) {
        let Some(id) = self.plain.owner(qp) else { return };
        match change {
            TcpChange::Connected => self.cm.handle_established(id),
            TcpChange::PeerClosed => {
                // There is no half of a connection in verbs: this end follows.
                self.plain.end(id);
                self.cm.handle_peer_closed(now, id);
            }
            TcpChange::Closed | TcpChange::Aborted => {
                self.plain.forget(qp);
                self.cm.handle_ended(id);
            }
            TcpChange::Failed(failure) => {
                self.plain.forget(qp);
                let loss = match failure {
                    Failure::Refused => Loss::Refused,
                    Failure::Declined => Loss::Declined,
                    Failure::TimedOut => Loss::TimedOut,
                    Failure::Unreachable => Loss::Failed(libc::EHOSTUNREACH),
                    Failure::Reset => Loss::Closed,
                };
                self.cm.handle_unreached(now, id, loss);
                if self.cm.is_connecting(id) {
                    // It is tried again.
                    return self.settle(now);
                }
                self.cm.handle_ended(id);
            }
        }
        self.settle(now);
    }

    /// What an action of the machine means for the adapter.
    pub(super) fn order(&mut self, action: Asked) {
        let order = match action {
            Asked::Reach { id, qpn, to } => {
                let from = self.cm.bound(id).ok().flatten().unwrap_or(quipu_cm::ANY);
                Order::Connect { id, qpn, from, to }
            }
            Asked::Answer { id, qpn } => match self.bare.take_request(id) {
                Some(connection) => Order::Accept { id, connection, qpn },
                None => return self.cm.handle_ended(id),
            },
            Asked::Refuse { id } => match self.bare.take_request(id) {
                Some(connection) => Order::Refuse(connection),
                None => return,
            },
        };
        self.bare.orders.push_back(order);
    }

    /// What was ordered for an identifier and not done is not to be done any more.
    pub(super) fn call_off(&mut self, id: IdKey) {
        self.bare.orders.retain_mut(|order| match order {
            Order::Connect { id: of, .. } => *of != id,
            Order::Accept { id: of, connection, .. } if *of == id => {
                *order = Order::Refuse(*connection);
                true
            }
            Order::Stream(order) => {
                Self::call_off_stream(order, id);
                true
            }
            _ => true,
        });
    }

    pub(super) fn has_orders(&self) -> bool {
        !self.bare.orders.is_empty()
    }

    /// The next thing that the adapter is to do.
    pub(crate) fn take_order(&mut self) -> Option<Order> {
        self.bare.orders.pop_front()
    }
}

/// The actions of the machine that are about QPIP.
pub(super) enum Asked {
    Reach { id: IdKey, qpn: u32, to: SocketAddr },
    Answer { id: IdKey, qpn: u32 },
    Refuse { id: IdKey },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(preferred: bool) -> Bare {
        let of = |text: &str| text.parse().unwrap();
        let addresses = vec![(of("fe80::1"), 64), (of("fd00::1"), 64), (of("10.9.0.2"), 24)];
        Bare { addresses, preferred, ..Bare::default() }
    }

    #[test]
    fn neighbours_are_reached_over_the_link() {
        let source = |preferred, peer: &str| {
            link(preferred).source_for(peer.parse().unwrap()).map(|ip| ip.to_string())
        };
        assert_eq!(source(false, "10.9.0.200").as_deref(), Some("10.9.0.2"));
        assert_eq!(source(false, "fd00::99").as_deref(), Some("fd00::1"));
        assert_eq!(source(true, "fe80::99").as_deref(), Some("fe80::1"));
        assert_eq!(source(false, "fe80::99"), None, "it may be on any link");
        assert_eq!((source(false, "10.9.1.200"), source(false, "fd01::99")), (None, None));
    }

    #[test]
    fn everybody_is_where_that_was_asked_for() {
        let source =
            |peer: &str| link(true).source_for(peer.parse().unwrap()).map(|ip| ip.to_string());
        assert_eq!(source("192.0.2.1").as_deref(), Some("10.9.0.2"));
        assert_eq!(source("2001:db8::1").as_deref(), Some("fd00::1"), "not from a link-local one");
        assert_eq!((source("127.0.0.1"), source("224.0.0.1")), (None, None));
    }

    #[test]
    fn prefixes_are_compared_within_a_family() {
        let of = |text: &str| text.parse().unwrap();
        assert!(shares(of("10.9.0.2"), of("10.9.0.2"), 32));
        assert!(!shares(of("10.9.0.2"), of("10.9.0.3"), 32));
        assert!(!shares(of("10.9.0.2"), of("a09::"), 8));
        assert!(shares(of("::1"), of("ffff::"), 0));
    }
}
