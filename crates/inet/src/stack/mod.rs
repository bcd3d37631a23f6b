//! The stack below queue pairs: IP, UDP, and the connections of [`crate::tcp`], between frames and users.
//!
//! A [`Stack`] is a value, as a [`crate::tcp::Connection`] is. Frames, calls and the time go in; frames,
//! events and the next deadline come out:
//!
//! 1. [`Stack::handle_frame`] for what arrives, [`Stack::handle_timeout`] when it is time;
//! 2. [`Stack::poll_event`] (and [`Stack::poll_held`] for a connection that was heard of) until there is
//!    nothing more;
//! 3. [`Stack::poll_transmit`] as long as the link takes frames;
//! 4. [`Stack::poll_timeout`] for the next deadline.
//!
//! It touches no application memory: an [`Arrival`] names a range of the frame, a [`Departure`] a range of
//! the stream, which the user copies behind the headers.
//!
//! What is for an address of the stack itself comes back: a [`Departure`] says so ([`Departure::loops`]), and
//! goes to [`Stack::handle_looped`].
//!
//! | module | reason to change |
//! |---|---|
//! | `config`, `api` | what goes in and comes out |
//! | `ingress`, `egress` | the way of a frame up and down, between link and transport |
//! | `link`, `groups` | frames, stations, groups of stations |
//! | `addresses` | own addresses, martians |
//! | `tcp`, `connections` | connections; where they are kept |
//! | `listeners`, `syns` | ports that are watched, and who comes to them; who comes too early |
//! | `udp`, `parts`, `identification` | datagrams; those that are longer than a packet; their numbers |
//! | `icmp` | answers, refusals, reports |
//! | `demux` | from addresses and ports to connections |
//! | `ports` | who has which port; ephemeral ports |
//! | `wheel` | deadlines |
//! | `counters` | what was seen and done |

mod addresses;
mod api;
mod config;
mod connections;
mod counters;
mod demux;
mod egress;
mod groups;
mod icmp;
mod identification;
mod ingress;
mod link;
mod listeners;
mod parts;
mod ports;
mod syns;
mod tcp;
mod udp;
mod wheel;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

pub use api::{
    Arrival, BindError, Carriage, Checksum, ConnectError, Datagram, DatagramError, Departure,
    Event, Frame, ListenError, ListenerId, Payload, TcpId, UdpId,
};
pub use config::{Config, MAX_MTU, MIN_MTU, Offload};
pub use counters::Counters;
pub use parts::Parts;

use quipu_wire::ipv6;
use quipu_wire::ndp::Station;

use crate::fragments::Fragments;
use crate::icmp::Icmp;
use crate::neighbour::{Neighbours, Settings};
use crate::pmtu::{Outstanding, Paths};
use crate::tcp::Secret;
use addresses::Addresses;
use connections::Connections;
use egress::Answer;
use groups::Groups;
use identification::Identifications;
use listeners::Listeners;
use ports::Ephemeral;
use udp::Sockets;

/// The stack of an adapter.
#[derive(Clone, Debug)]
pub struct Stack {
    secret: Secret,
    mtu: u32,
    offload: Offload,
    addresses: Addresses,
    hardware: Option<Station>,
    /// On a link with stations.
    neighbours: Option<Neighbours>,
    /// Whose next hop was confirmed last, and when.
    confirmed: Option<(IpAddr, u64)>,
    /// What the link is told of them.
    groups: Groups,
    icmp: Icmp,
    fragments: Fragments,
    /// Where in [`Fragments::whole`] the payload of the last datagram is that came in parts.
    reassembled: Range<usize>,
    paths: Paths,
    outstanding: Outstanding,
    identifications: Identifications,
    /// The last time that was told.
    now: u64,
    /// Time has come by once.
    begun: bool,
    /// Events of no connection.
    notices: VecDeque<Event>,
    /// Events of neighbours were not kept.
    notices_missed: bool,
    connections: Connections,
    listeners: Listeners,
    sockets: Sockets,
    ephemeral: Ephemeral,
    /// Configurations that connections share: what was given, and what was made of it.
    fitted: Vec<(Arc<crate::tcp::Config>, Arc<crate::tcp::Config>)>,
    answers: VecDeque<Answer>,
    /// Octets beyond their room that the user keeps for all connections.
    spare: u32,
    /// And what of it connections may not be sure of.
    spare_rest: u32,
    counters: Counters,
}

impl Stack {
    /// A stack with nothing open.
    pub fn new(config: Config) -> Self {
        let secret = config.secret;
        let mtu = config.mtu.clamp(MIN_MTU, MAX_MTU);
        let mut addresses = config.addresses;
        if let Some(station) = config.hardware {
            addresses.push((ipv6::link_local(station).into(), 64));
        }
        let neighbours = config.hardware.map(|station| {
            let gateways = &config.gateways;
            Neighbours::new(&Settings { station, addresses: &addresses, gateways, mtu }, secret)
        });
        Self {
            secret,
            mtu,
            // A joined segment is one IP packet.
            offload: Offload {
                segment: config.offload.segment.min(MAX_MTU - 100),
                ..config.offload
            },
            addresses: Addresses::new(&addresses),
            hardware: config.hardware,
            neighbours,
            confirmed: None,
            groups: Groups::default(),
            icmp: Icmp::new(secret),
            fragments: Fragments::default(),
            reassembled: 0..0,
            paths: Paths::new(mtu),
            outstanding: Outstanding::new(secret),
            identifications: Identifications::new(secret),
            now: 0,
            begun: false,
            notices: VecDeque::new(),
            notices_missed: false,
            connections: Connections::new(secret, config.max_connections),
            listeners: Listeners::default(),
            sockets: Sockets::new(secret),
            ephemeral: Ephemeral::new(secret),
            fitted: Vec::new(),
            answers: VecDeque::new(),
            spare: u32::MAX,
            spare_rest: u32::MAX,
            counters: Counters::default(),
        }
    }

    /// Takes note of the time. Afterwards [`Stack::poll_transmit`] is to be called.
    pub fn handle_timeout(&mut self, now: u64) {
        if let Some(neighbours) = &mut self.neighbours {
            if !self.begun {
                neighbours.begin(now);
                self.groups.begin(now);
            }
            neighbours.handle_timeout(now);
            self.hear_neighbours();
        }
        (self.now, self.begun) = (now, true);
        self.fragments.handle_timeout(now);
        self.groups.handle_timeout(now);
        self.expire_held(now);
        self.expire_tcp(now);
    }

    /// The link was down, and is up again: what was said at first was lost, or others are on it now
    /// (RFC 4861 6.3.7). [`Stack::handle_timeout`] says it again.
    pub fn begin_anew(&mut self) {
        self.begun = false;
    }

    /// When [`Stack::handle_timeout`] is to be called next; none if nothing runs. It may be earlier than
    /// necessary. After [`Stack::handle_timeout`] and [`Stack::poll_transmit`] it lies in the future, but for
    /// who did not transmit for so long that timers ran out: a second round brings it there.
    pub fn poll_timeout(&self) -> Option<u64> {
        if !self.begun && self.neighbours.is_some() {
            return Some(0);
        }
        let neighbours = self.neighbours.as_ref().and_then(|it| it.poll_timeout());
        let others = neighbours.into_iter().chain(self.fragments.poll_timeout());
        let others = others.chain(self.groups.poll_timeout());
        let others = others.chain(self.listeners.patience.next());
        others.chain(self.connections.wheel.next()).min()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.next_notice().or_else(|| self.poll_tcp_event())
    }

    /// The datagram of [`Payload::Reassembled`], or the segment that came in parts, until the next frame.
    pub fn reassembled(&self) -> &[u8] {
        self.fragments.whole().get(self.reassembled.clone()).unwrap_or_default()
    }

    /// The largest IP packet that the path to an address takes, as far as one knows.
    pub fn path_mtu(&self, to: IpAddr) -> u32 {
        self.paths.get(self.now, to).min(self.link_mtu())
    }

    /// The own addresses.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter()
    }

    /// Own addresses and the lengths of their prefixes: who shares one is on the link.
    pub fn prefixes(&self) -> impl Iterator<Item = (IpAddr, u8)> {
        self.addresses.prefixes()
    }

    /// TCP connections, with those that only wait for their end to be acknowledged, or for time to pass.
    pub fn connections(&self) -> usize {
        self.connections.count()
    }

    /// Octets of memory that connections take, in all.
    pub fn memory(&self) -> usize {
        self.connections.memory()
    }

    /// What was counted of ICMP.
    pub fn icmp_counters(&self) -> &crate::icmp::Counters {
        self.icmp.counters()
    }

    /// What was counted of packets that came in parts.
    pub fn fragment_counters(&self) -> &crate::fragments::Counters {
        self.fragments.counters()
    }

    /// What was counted of neighbours, on a link with stations.
    pub fn neighbour_counters(&self) -> Option<&crate::neighbour::Counters> {
        self.neighbours.as_ref().map(Neighbours::counters)
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
}
