//! Packets that come in parts (RFC 8200 4.5, RFC 791 3.2, RFC 5722).
//!
//! Nobody has to send parts to this end, as it has a path MTU and says what it takes; datagrams may come so
//! nevertheless. What strangers can make it keep is bounded in packets, parts, octets and time, and where
//! it is too much the oldest packet gives way. Parts that overlap make their packet void.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use quipu_wire::ipv4;
use quipu_wire::ipv6;
use quipu_wire::ipv6_extension::{FIRST_FIELD, Fragment, Refusal, Walk, problem, walk};

/// Packets of which parts are kept.
pub const MAX_PACKETS: usize = 64;
/// Parts of one packet.
pub const MAX_PARTS: usize = 128;
/// Octets that are kept, each part counting [`PART_COST`] more.
pub const MAX_OCTETS: usize = 1 << 20;
/// What a part costs in addition to its octets.
pub const PART_COST: usize = 64;
/// RFC 8200 4.5: how long the parts of a packet may take, from the first one that comes.
pub const PATIENCE: u64 = 60_000_000_000;

/// The longest payload of an IP packet.
const MAX_PAYLOAD: usize = ipv6::MAX_PAYLOAD;
/// The codepoints of ECN (RFC 3168 5) that are not ECT(0) or ECT(1).
const NOT_ECT: u8 = 0;
const CE: u8 = 3;

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets that came whole.
    pub whole: u64,
    /// Packets whose parts took too long.
    pub expired: u64,
    /// Packets that had to give way to younger ones.
    pub evicted: u64,
    /// Packets with parts that overlap or contradict each other, also in what they say of congestion.
    pub void: u64,
    /// Parts that break a rule on their own.
    pub malformed: u64,
}

/// Which packet a part is of (RFC 8200 4.5; RFC 791 3.2, which has the protocol as well).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    source: IpAddr,
    destination: IpAddr,
    identification: u32,
    protocol: Option<u8>,
}

/// A part.
#[derive(Clone, Copy, Debug)]
struct Part<'a> {
    offset: usize,
    more: bool,
    /// What the whole begins with, as this part has it: the first part's counts.
    next_header: u8,
    /// The codepoint of ECN.
    ecn: u8,
    payload: &'a [u8],
}

#[derive(Clone, Debug)]
struct Packet {
    key: Key,
    since: u64,
    parts: BTreeMap<usize, Vec<u8>>,
    next_header: u8,
    /// That of the first part.
    ecn: u8,
    /// Which there are at all, a bit for each.
    codepoints: u8,
    /// Octets kept.
    held: usize,
    /// Octets of the whole, once the last part is here.
    total: Option<usize>,
    /// RFC 5722 4: what else comes of it is dropped as well.
    void: bool,
}

/// The packets of which only parts have come.
#[derive(Clone, Debug, Default)]
pub struct Fragments {
    /// The oldest first.
    packets: VecDeque<Packet>,
    octets: usize,
    whole: Vec<u8>,
    /// The codepoint of ECN of that.
    ecn: u8,
    counters: Counters,
}

impl Packet {
    /// Takes a part that fits the others; false: it contradicts them.
    fn take(&mut self, part: &Part<'_>) -> bool {
        let (from, to) = (part.offset, part.offset + part.payload.len());
        // RFC 8200 4.5: a part that comes twice is not an overlap.
        if self.parts.get(&from).is_some_and(|known| known == part.payload) {
            return part.more || self.total == Some(to);
        }
        let before = self.parts.range(..to).next_back().map_or(0, |(at, it)| at + it.len());
        let end = self.parts.last_key_value().map_or(0, |(at, it)| at + it.len());
        let beyond = self.total.is_some_and(|total| to > total || (!part.more && to != total));
        if before > from || beyond || (!part.more && end > to) || self.parts.len() >= MAX_PARTS {
            return false;
        }
        if !part.more {
            self.total = Some(to);
        }
        if from == 0 {
            (self.next_header, self.ecn) = (part.next_header, part.ecn);
        }
        self.codepoints |= 1 << part.ecn;
        self.parts.insert(from, part.payload.to_vec());
        self.held += part.payload.len();
        true
    }

    fn is_whole(&self) -> bool {
        self.total == Some(self.held)
    }

    /// The codepoint of the whole; none: there is none that the whole may have (RFC 3168 5.3).
    fn ecn(&self) -> Option<u8> {
        let has = |codepoint: u8| self.codepoints & 1 << codepoint != 0;
        match (has(CE), has(NOT_ECT)) {
            // A sender that would not hear of the mark has no other way to learn of it than by a loss.
            (true, true) => None,
            (true, false) => Some(CE),
            (false, _) => Some(self.ecn),
        }
    }

    fn cost(&self) -> usize {
        self.held + self.parts.len() * PART_COST
    }
}

impl Fragments {
    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Octets that are kept, with what the parts cost beside them.
    pub fn octets(&self) -> usize {
        self.octets
    }

    /// The payload of the packet that has last come whole, until the next part comes.
    pub fn whole(&self) -> &[u8] {
        &self.whole
    }

    /// The codepoint of ECN that this packet has (RFC 3168 5.3): CE, if a part of it had.
    pub fn ecn(&self) -> u8 {
        self.ecn
    }

    /// A part of an IPv4 packet has come: says whether the packet is whole now, and read with
    /// [`Fragments::whole`].
    pub fn handle_ipv4(&mut self, now: u64, header: &ipv4::Repr, payload: &[u8]) -> bool {
        let key = Key {
            source: header.source.into(),
            destination: header.destination.into(),
            identification: header.identification.into(),
            protocol: Some(header.protocol),
        };
        let part = Part {
            offset: header.fragment_offset.into(),
            more: header.more_fragments,
            next_header: header.protocol,
            ecn: header.traffic_class & 3,
            payload,
        };
        let (uneven, too_long) = (part.is_uneven(), part.is_too_long(ipv4::LEN));
        if uneven || too_long || payload.is_empty() {
            self.counters.malformed += 1;
            return false;
        }
        self.handle(now, &key, &part).is_some()
    }

    /// A part of an IPv6 packet has come: says with which header the payload begins if the packet is whole
    /// now, and read with [`Fragments::whole`].
    ///
    /// # Errors
    /// The part is not legal; places are counted from the end of the IPv6 header.
    pub fn handle_ipv6(
        &mut self,
        now: u64,
        header: &ipv6::Repr,
        fragment: &Fragment,
        payload: &[u8],
    ) -> Result<Option<u8>, Refusal> {
        let key = Key {
            source: header.source.into(),
            destination: header.destination.into(),
            identification: fragment.identification,
            protocol: None,
        };
        let part = Part {
            offset: fragment.offset.into(),
            more: fragment.more,
            next_header: fragment.next_header,
            ecn: header.traffic_class & 3,
            payload,
        };
        self.check(header, &part).inspect_err(|_| self.counters.malformed += 1)?;
        Ok(self.handle(now, &key, &part))
    }

    /// RFC 8200 4.5, RFC 7112 5.
    fn check(&self, header: &ipv6::Repr, part: &Part<'_>) -> Result<(), Refusal> {
        let problem = |code, at| Err(Refusal::Problem { code, at, even_to_group: false });
        // The Payload Length of the header, and the Fragment Offset behind all that is in front of the part.
        const PAYLOAD_LEN: i32 = FIRST_FIELD - 2;
        let offset_at = i32::from(header.payload_len) - part.payload.len() as i32 - 6;
        if part.is_uneven() {
            return problem(problem::ERRONEOUS_FIELD, PAYLOAD_LEN);
        }
        if part.is_too_long(0) {
            return problem(problem::ERRONEOUS_FIELD, offset_at);
        }
        if part.payload.is_empty() {
            return Err(Refusal::Discard);
        }
        if part.offset == 0 {
            let upper = walk(part.next_header, part.payload, true);
            let complete = matches!(upper, Ok(Walk::Upper { at, .. }) if at < part.payload.len());
            if !complete {
                return problem(problem::INCOMPLETE_HEADERS, -(ipv6::LEN as i32));
            }
        }
        Ok(())
    }

    fn handle(&mut self, now: u64, key: &Key, part: &Part<'_>) -> Option<u8> {
        self.handle_timeout(now);
        let index = self.packets.iter().position(|packet| packet.key == *key);
        let index = index.unwrap_or_else(|| self.begin(now, key));
        let packet = &mut self.packets[index];
        if packet.void {
            return None;
        }
        self.octets -= packet.cost();
        if !packet.take(part) {
            // RFC 5722 4: all of it, what has come and what is still to come.
            packet.void = true;
            packet.parts = BTreeMap::new();
            packet.held = 0;
            self.counters.void += 1;
            return None;
        }
        self.octets += packet.cost();
        if packet.is_whole() {
            let packet = self.remove(index)?;
            let Some(ecn) = packet.ecn() else {
                self.counters.void += 1;
                return None;
            };
            self.ecn = ecn;
            self.whole.clear();
            self.whole.extend(packet.parts.values().flatten());
            self.counters.whole += 1;
            return Some(packet.next_header);
        }
        while self.octets > MAX_OCTETS {
            self.evict();
        }
        None
    }

    fn begin(&mut self, now: u64, key: &Key) -> usize {
        if self.packets.len() >= MAX_PACKETS {
            self.evict();
        }
        self.packets.push_back(Packet {
            key: *key,
            since: now,
            parts: BTreeMap::new(),
            next_header: 0,
            ecn: 0,
            codepoints: 0,
            held: 0,
            total: None,
            void: false,
        });
        self.packets.len() - 1
    }

    fn evict(&mut self) {
        if self.remove(0).is_some_and(|packet| !packet.void) {
            self.counters.evicted += 1;
        }
    }

    fn remove(&mut self, index: usize) -> Option<Packet> {
        let packet = self.packets.remove(index)?;
        self.octets -= packet.cost();
        Some(packet)
    }

    /// Takes note of the time: packets that take too long are dropped.
    pub fn handle_timeout(&mut self, now: u64) {
        while self.packets.front().is_some_and(|oldest| oldest.since + PATIENCE <= now) {
            if self.remove(0).is_some_and(|packet| !packet.void) {
                self.counters.expired += 1;
            }
        }
    }

    /// When [`Fragments::handle_timeout`] is to be called; none if nothing is kept.
    pub fn poll_timeout(&self) -> Option<u64> {
        self.packets.front().map(|oldest| oldest.since + PATIENCE)
    }
}

impl Part<'_> {
    /// All parts but the last are of whole units (RFC 8200 4.5).
    fn is_uneven(&self) -> bool {
        self.more && !self.payload.len().is_multiple_of(8)
    }

    /// The whole would be longer than a packet can be, with `header` octets in front.
    fn is_too_long(&self, header: usize) -> bool {
        self.offset + self.payload.len() + header > MAX_PAYLOAD
    }
}
