//! Neighbours on an Ethernet link: who has which address (Neighbour Discovery, RFC 4861; ARP, RFC 826),
//! whether they are still there, and which router leads elsewhere.
//!
//! Messages and the time go in; frames, events and the next deadline come out. Nothing waits here for a
//! neighbour to be found: whoever has something to send asks [`Neighbours::lookup`] again after
//! [`Event::Found`].
//!
//! **What a stranger can do.** The table has three parts of bounded size, which do not push each other
//! out: those being looked for, those heard of, and those known because they have answered. A flood of
//! solicitations fills the second; a flood of packets whose answers go to nobody fills the first; a
//! neighbour that talks with this end stays, as from the third the one that was used longest ago goes.
//! Somebody on the link can still say that he is another (RFC 3756): neither protocol knows better.
//!
//! An end that begins tells all others where its addresses are ([`Neighbours::begin`]), as they may know them
//! from before, at another station.
//!
//! Not done: asking whether an address is free before it is taken (RFC 4862 5.4, RFC 5227 2.1), which is the
//! host's part, as it need not begin otherwise; making addresses of prefixes (RFC 4862: addresses are given),
//! redirects, proxies.

mod announce;
mod entry;
mod router;
mod transmit;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};

use quipu_wire::ndp::{self, Station};
use quipu_wire::{arp, ipv6};

use crate::tcp::Secret;
use announce::Announcements;
use entry::{Claim, Due, Entry};
use router::Routes;
pub use router::share_prefix;
pub use transmit::MAX_FRAME;
use transmit::{Message, group_station};

const SECOND: u64 = 1_000_000_000;
const NEVER: u64 = u64::MAX;

// RFC 4861 10.
const MAX_MULTICAST_SOLICIT: u8 = 3;
const MAX_UNICAST_SOLICIT: u8 = 3;
const MAX_ROUTER_SOLICITATIONS: u8 = 3;
const ROUTER_SOLICITATION_INTERVAL: u64 = 4 * SECOND;
const REACHABLE: u64 = 30 * SECOND;
const RETRANSMIT: u64 = SECOND;
const DELAY: u64 = 5 * SECOND;

/// Neighbours that are looked for at once.
pub const MAX_SOUGHT: usize = 128;
/// Neighbours that have only been heard of.
pub const MAX_HEARD: usize = 128;
/// Neighbours that have answered.
pub const MAX_KNOWN: usize = 1024;
/// Events that wait: as many as time can bring at once.
const MAX_EVENTS: usize = MAX_SOUGHT + MAX_HEARD + MAX_KNOWN;

const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

/// What is known of this end.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// Its station.
    pub station: Station,
    /// Its addresses, each with the length of its prefix.
    pub addresses: &'a [(IpAddr, u8)],
    /// Routers that were given; those that are heard of come behind them.
    pub gateways: &'a [IpAddr],
    /// The longest IP packet of the link.
    pub mtu: u32,
}

/// Where frames to a next hop go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// To this station.
    Station(Station),
    /// It is being looked for: [`Event`] says what comes of it.
    Resolving,
}

/// What has come of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Its station is known.
    Found(IpAddr),
    /// It does not answer, or no longer.
    Lost(IpAddr),
    /// It was looked for, and has had to give way to others before that was over.
    Displaced(IpAddr),
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages that break a rule of their protocol.
    pub invalid: u64,
    /// Neighbours pushed out of a full table.
    pub evicted: u64,
    /// Answers that were not given, as too many were waiting.
    pub unanswered: u64,
    /// Somebody else says that he has an address of this end.
    pub conflicts: u64,
    /// The first of these addresses, and his station.
    pub first_conflict: Option<(IpAddr, Station)>,
    /// Events that nobody has fetched.
    pub untold: u64,
}

/// A neighbour that is being looked for: INCOMPLETE.
#[derive(Clone, Debug)]
struct Sought {
    since: u64,
    at: u64,
    asked: u8,
}

/// The neighbours of one link.
#[derive(Clone, Debug)]
pub struct Neighbours {
    station: Station,
    routes: Routes,
    sought: BTreeMap<IpAddr, Sought>,
    heard: BTreeMap<IpAddr, Entry>,
    known: BTreeMap<IpAddr, Entry>,
    /// No deadline is before.
    next: u64,
    /// When routers are asked for again, and how often they were.
    routers: (u64, u8),
    announcements: Announcements,
    waiting: VecDeque<(Station, Message)>,
    events: VecDeque<Event>,
    random: u64,
    counters: Counters,
}

impl Neighbours {
    /// Of a link on which nobody is known. The secret only spreads times.
    pub fn new(settings: &Settings<'_>, secret: Secret) -> Self {
        Self {
            station: settings.station,
            routes: Routes::new(settings.addresses, settings.gateways, settings.mtu),
            sought: BTreeMap::new(),
            heard: BTreeMap::new(),
            known: BTreeMap::new(),
            next: NEVER,
            routers: (NEVER, 0),
            announcements: Announcements::NONE,
            waiting: VecDeque::new(),
            events: VecDeque::new(),
            random: secret.0[0] ^ secret.0[1].rotate_left(32),
            counters: Counters::default(),
        }
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The longest IP packet of the link, as a router may have said (RFC 4861 6.3.4).
    pub fn mtu(&self) -> u32 {
        self.routes.mtu
    }

    /// The hop limit that a router has recommended.
    pub fn hop_limit(&self) -> Option<u8> {
        self.routes.hop_limit
    }

    /// This end begins: its neighbours are told where its addresses are, and routers are asked for.
    pub fn begin(&mut self, now: u64) {
        self.announcements = Announcements::begin(now);
        self.solicit_routers(now);
    }

    /// Routers are to be asked for (RFC 4861 6.3.7). Advertisements are heard without that as well.
    pub fn solicit_routers(&mut self, now: u64) {
        self.routers = (now, 0);
        self.next = self.next.min(now);
        self.handle_timeout(now);
    }

    /// The neighbour through which packets to a destination go; none if no router is known that leads there.
    pub fn next_hop(&self, now: u64, destination: IpAddr) -> Option<IpAddr> {
        self.routes.next_hop(now, destination, |router| self.works(router))
    }

    /// Whether nothing leads to a destination, now that this neighbour is [lost](Event::Lost): it was the
    /// last of the routers that could be asked, or the destination itself.
    pub fn is_cut_off(&self, now: u64, destination: IpAddr, lost: IpAddr) -> bool {
        self.routes.is_cut_off(now, destination, lost, |router| self.works(router))
    }

    /// RFC 4861 6.3.6: a router whose entry exists in any state but INCOMPLETE may be there.
    fn works(&self, router: IpAddr) -> bool {
        self.known.contains_key(&router) || self.heard.contains_key(&router)
    }

    /// Where frames to a next hop go. If it is not known it is looked for.
    pub fn lookup(&mut self, now: u64, next_hop: IpAddr) -> Lookup {
        if let Some(entry) = self.known.get_mut(&next_hop).or_else(|| self.heard.get_mut(&next_hop))
        {
            entry.put_to_use(now);
            self.next = self.next.min(entry.deadline());
            return Lookup::Station(entry.station);
        }
        if let Some(station) = group_station(next_hop) {
            return Lookup::Station(station);
        }
        if !self.sought.contains_key(&next_hop) {
            if self.sought.len() >= MAX_SOUGHT {
                self.evict_sought();
            }
            let at = now + RETRANSMIT;
            self.sought.insert(next_hop, Sought { since: now, at, asked: 1 });
            self.next = self.next.min(at);
            self.ask(next_hop, None);
        }
        Lookup::Resolving
    }

    /// The upper layer knows that the next hop has passed something on: new data was acknowledged, say
    /// (RFC 4861 7.3.1).
    pub fn confirm(&mut self, now: u64, next_hop: IpAddr) {
        // Acknowledgements are many: most say what was said a moment ago.
        if self.known.get(&next_hop).is_some_and(|entry| entry.is_reachable(now + REACHABLE / 4)) {
            return;
        }
        let entry = self.known.remove(&next_hop).or_else(|| self.heard.remove(&next_hop));
        if let Some(mut entry) = entry {
            entry.confirm(self.reachable_until(now));
            self.make_known(next_hop, entry);
        }
    }

    /// The upper layer has reason to doubt that the next hop passes on what is sent to it: it is asked at
    /// once whether it is there (RFC 1122 3.3.1.4).
    pub fn doubt(&mut self, now: u64, next_hop: IpAddr) {
        let known = self.known.get_mut(&next_hop).or_else(|| self.heard.get_mut(&next_hop));
        let Some(entry) = known else { return };
        if entry.doubt(now) == Due::Ask {
            let station = entry.station;
            self.next = self.next.min(entry.deadline());
            self.ask(next_hop, Some(station));
        }
    }

    /// A message of Neighbour Discovery has come, in a packet with this header.
    pub fn handle_discovery(&mut self, now: u64, header: &ipv6::Repr, message: &ndp::Repr) {
        let valid = header.hop_limit == ndp::HOP_LIMIT && self.is_valid(header, message);
        if !valid {
            self.counters.invalid += 1;
            return;
        }
        match *message {
            ndp::Repr::NeighbourSolicitation { target, station } => {
                self.handle_solicitation(now, header.source, target, station);
            }
            ndp::Repr::NeighbourAdvertisement { target, router, solicited, overrides, station } => {
                let claim = Claim { station, solicited, overrides };
                if self.handle_claim(now, target.into(), &claim) && !router {
                    self.routes.forget_router(target);
                }
            }
            ndp::Repr::RouterAdvertisement(ref advertisement) => {
                // RFC 4861 6.3.7: of a default router, and not of one that only says so much.
                if advertisement.lifetime > 0 {
                    self.routers.0 = NEVER;
                }
                self.routes.advertise(now, header.source, advertisement);
                if let Some(station) = advertisement.station {
                    self.hear(now, header.source.into(), station);
                }
            }
            // Only routers answer it.
            ndp::Repr::RouterSolicitation { .. } => {}
        }
    }

    /// RFC 4861 6.1, 7.1, beyond what can be seen in the message alone.
    fn is_valid(&self, header: &ipv6::Repr, message: &ndp::Repr) -> bool {
        let station = match message {
            ndp::Repr::NeighbourSolicitation { target, station } => {
                // RFC 4861 7.1.1: from nobody only to the target's group, and without a station.
                let group = header.destination == ipv6::solicited_node(*target);
                if header.source.is_unspecified() && (station.is_some() || !group) {
                    return false;
                }
                *station
            }
            ndp::Repr::NeighbourAdvertisement { solicited, station, .. } => {
                // RFC 4861 7.1.2.
                if header.destination.is_multicast() && *solicited {
                    return false;
                }
                *station
            }
            ndp::Repr::RouterAdvertisement(it) => {
                // RFC 4861 6.1.2.
                if !header.source.is_unicast_link_local() {
                    return false;
                }
                it.station
            }
            ndp::Repr::RouterSolicitation { station } => *station,
        };
        !header.source.is_multicast() && station.is_none_or(|station| !is_group(station))
    }

    /// RFC 4861 7.2.3, 7.2.4.
    fn handle_solicitation(
        &mut self,
        now: u64,
        source: Ipv6Addr,
        target: Ipv6Addr,
        station: Option<Station>,
    ) {
        if !self.routes.is_own(target.into()) {
            return;
        }
        let nobody = source.is_unspecified();
        if let Some(station) = station {
            self.hear(now, source.into(), station);
        }
        let destination = if nobody { ALL_NODES } else { source };
        // An answer is not what the neighbour would have to be asked for later.
        let to = station.map_or_else(|| self.lookup(now, destination.into()), Lookup::Station);
        let Lookup::Station(to) = to else { return };
        let message = ndp::Repr::NeighbourAdvertisement {
            target,
            router: false,
            solicited: !nobody,
            overrides: true,
            station: Some(self.station),
        };
        self.answer(to, Message::Discovery { source: target, destination, message });
    }

    /// A message of ARP has come.
    pub fn handle_arp(&mut self, now: u64, message: &arp::Repr) {
        let sender = message.sender;
        let strange = is_group(message.sender_station) || sender.is_multicast();
        if strange || sender.is_broadcast() {
            self.counters.invalid += 1;
            return;
        }
        if self.routes.is_own(sender.into()) {
            self.note_claim(sender.into(), Some(message.sender_station));
            return;
        }
        let for_us = self.routes.is_own(message.target.into());
        match message.operation {
            arp::Operation::Request => {
                // RFC 826: who is known is updated, and who asks for this end will soon be spoken to.
                let known = self.known.contains_key(&sender.into());
                if !sender.is_unspecified() && (for_us || known) {
                    self.hear(now, sender.into(), message.sender_station);
                }
            }
            arp::Operation::Reply => {
                // There is no flag for an answer; one that names this end's station is one.
                let solicited = for_us && message.target_station == self.station;
                let station = Some(message.sender_station);
                let claim = Claim { station, solicited, overrides: true };
                self.handle_claim(now, sender.into(), &claim);
            }
        }
        if for_us && message.operation == arp::Operation::Request {
            let reply = arp::Repr {
                operation: arp::Operation::Reply,
                sender_station: self.station,
                sender: message.target,
                target_station: message.sender_station,
                target: sender,
            };
            self.answer(message.sender_station, Message::Arp(reply));
        }
    }

    /// Somebody says where an address is, asked or not; says whether that is believed of an address that this
    /// end knows (RFC 4861 7.2.5): what else the message says may be, too.
    fn handle_claim(&mut self, now: u64, address: IpAddr, claim: &Claim) -> bool {
        let until = self.reachable_until(now);
        if self.routes.is_own(address) {
            self.note_claim(address, claim.station);
            return false;
        } else if self.sought.contains_key(&address) {
            // RFC 4861 7.2.5: without a station it is no answer.
            let Some(station) = claim.station else { return false };
            self.sought.remove(&address);
            let mut entry = Entry::heard(station, now);
            if claim.solicited {
                entry.confirm(until);
            }
            self.make_known(address, entry);
            self.tell(Event::Found(address));
        } else if let Some(entry) = self.known.get_mut(&address) {
            return entry.advertise(now, claim, until);
        } else if let Some(mut entry) = self.heard.remove(&address) {
            let taken = entry.advertise(now, claim, until);
            if claim.solicited {
                self.make_known(address, entry);
            } else {
                self.heard.insert(address, entry);
            }
            return taken;
        } else {
            // RFC 4861 7.2.5: of nobody else is an advertisement taken.
            return false;
        }
        true
    }

    /// An own address is said to be at a station (RFC 5227 2.4, RFC 4862 5.4.4).
    fn note_claim(&mut self, address: IpAddr, station: Option<Station>) {
        if station != Some(self.station) {
            self.counters.conflicts += 1;
            let first = &mut self.counters.first_conflict;
            *first = first.or(station.map(|station| (address, station)));
        }
    }

    /// A station was named in passing.
    fn hear(&mut self, now: u64, address: IpAddr, station: Station) {
        if self.routes.is_own(address) {
            self.note_claim(address, Some(station));
        } else if let Some(entry) =
            self.known.get_mut(&address).or_else(|| self.heard.get_mut(&address))
        {
            entry.hear(station);
        } else if self.sought.remove(&address).is_some() {
            // It was wanted: it does not share the fate of those that only make themselves known.
            self.make_known(address, Entry::heard(station, now));
            self.tell(Event::Found(address));
        } else {
            self.counters.evicted += evict_oldest(&mut self.heard, MAX_HEARD);
            self.heard.insert(address, Entry::heard(station, now));
        }
    }

    fn make_known(&mut self, address: IpAddr, entry: Entry) {
        self.counters.evicted += evict_oldest(&mut self.known, MAX_KNOWN);
        self.next = self.next.min(entry.deadline());
        self.known.insert(address, entry);
    }

    fn evict_sought(&mut self) {
        let oldest = self.sought.iter().min_by_key(|(_, it)| it.since).map(|(address, _)| *address);
        if let Some(address) = oldest {
            self.sought.remove(&address);
            self.counters.evicted += 1;
            self.tell(Event::Displaced(address));
        }
    }

    /// Takes note of the time.
    pub fn handle_timeout(&mut self, now: u64) {
        if self.next > now {
            return;
        }
        let mut lost = Vec::new();
        let mut ask = Vec::new();
        for (address, it) in &mut self.sought {
            if it.at <= now {
                // RFC 4861 7.2.2.
                if it.asked >= MAX_MULTICAST_SOLICIT {
                    lost.push(*address);
                } else {
                    (it.at, it.asked) = (now + RETRANSMIT, it.asked + 1);
                    ask.push((*address, None));
                }
            }
        }
        for (address, entry) in self.known.iter_mut().chain(&mut self.heard) {
            match entry.pass(now) {
                Due::Nothing => {}
                Due::Ask => ask.push((*address, Some(entry.station))),
                Due::Gone => lost.push(*address),
            }
        }
        for (address, station) in ask {
            self.ask(address, station);
        }
        for address in lost {
            let worked = self.sought.remove(&address).is_none();
            self.routes.fell_silent(now, address, worked);
            self.known.remove(&address);
            self.heard.remove(&address);
            self.tell(Event::Lost(address));
        }
        self.announce(now);
        self.ask_for_routers(now);
        let sought = self.sought.values().map(|it| it.at);
        let entries = self.known.values().chain(self.heard.values()).map(Entry::deadline);
        let begun = self.routers.0.min(self.announcements.at);
        self.next = sought.chain(entries).fold(begun, u64::min);
    }

    /// When [`Neighbours::handle_timeout`] is to be called; none if nothing runs.
    pub fn poll_timeout(&self) -> Option<u64> {
        (self.next != NEVER).then_some(self.next)
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn tell(&mut self, event: Event) {
        if self.events.len() >= MAX_EVENTS {
            // Only of a user that does not look after each call.
            self.events.pop_front();
            self.counters.untold += 1;
        }
        self.events.push_back(event);
    }

    /// RFC 4861 6.3.2: between half and one and a half of the base, so that ends do not fall into step.
    fn reachable_until(&mut self, now: u64) -> u64 {
        // Marsaglia's xorshift; zero would stay zero.
        self.random = self.random.max(1);
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        now + REACHABLE / 2 + self.random % REACHABLE
    }
}

/// Makes room for one more; says how many had to go.
fn evict_oldest(entries: &mut BTreeMap<IpAddr, Entry>, max: usize) -> u64 {
    if entries.len() < max {
        return 0;
    }
    let oldest = entries.iter().min_by_key(|(_, entry)| entry.used).map(|(address, _)| *address);
    oldest.and_then(|address| entries.remove(&address)).map_or(0, |_| 1)
}

/// The lowest bit of the first octet (IEEE 802).
fn is_group(station: Station) -> bool {
    station[0] & 1 != 0
}
