//! What the network has brought of acknowledgements: a request of QPIP succeeds no sooner.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use quipu_nic::inet::tcp::Flow;
use quipu_nic::iwarp::wire::tcp::Flags;
use quipu_nic::iwarp::wire::{ipv4, ipv6, tcp};

/// One direction of a connection: who sends, and to whom.
type Direction = (SocketAddr, SocketAddr);

/// How far each host knows that what it sends has come.
#[derive(Default)]
pub struct Acknowledged {
    flows: BTreeMap<Direction, Known>,
}

/// What a host knows of one direction.
#[derive(Default)]
struct Known {
    /// The number of the SYN.
    first: u32,
    /// The octets after it that are acknowledged.
    octets: u64,
    /// The number of a later SYN. A listener answers an old SYN, too, so nothing begins before that is taken.
    offered: Option<u32>,
}

impl Acknowledged {
    /// A host sends a packet.
    pub fn sent(&mut self, packet: &[u8]) {
        if let Some((from, to, header)) = parse(packet)
            && header.flags.has(Flags::SYN)
        {
            let fresh = || Known { first: header.seq.0, ..Known::default() };
            let known = self.flows.entry((from, to)).or_insert_with(fresh);
            if known.first != header.seq.0 {
                known.offered = Some(header.seq.0);
            }
        }
    }

    /// A host is given a packet.
    pub fn brought(&mut self, packet: &[u8]) {
        if let Some((from, to, header)) = parse(packet)
            && header.flags.has(Flags::ACK)
            && let Some(known) = self.flows.get_mut(&(to, from))
        {
            if let Some(first) =
                known.offered.take_if(|first| header.ack.0 == first.wrapping_add(1))
            {
                *known = Known { first, ..Known::default() };
            }
            // The SYN has a number of its own.
            let ahead = header.ack.0.wrapping_sub(known.first).wrapping_sub(1) as i32;
            known.octets = known.octets.max(u64::try_from(ahead).unwrap_or(0));
        }
    }

    /// How many octets from its own end on are acknowledged.
    #[must_use]
    pub fn of(&self, flow: &Flow) -> u64 {
        self.flows.get(&(flow.local, flow.remote)).map_or(0, |known| known.octets)
    }
}

/// The ends of a packet of TCP, and its header.
fn parse(packet: &[u8]) -> Option<(SocketAddr, SocketAddr, tcp::Repr)> {
    let (ends, protocol, at): ([IpAddr; 2], _, _) = match ipv6::Repr::parse(packet) {
        Ok((ip, at)) => ([ip.source.into(), ip.destination.into()], ip.next_header, at),
        Err(_) => {
            let (ip, at) = ipv4::Repr::parse(packet).ok()?;
            ([ip.source.into(), ip.destination.into()], ip.protocol, at)
        }
    };
    let (header, _) = tcp::Repr::parse(packet.get(at..)?).ok().filter(|_| protocol == 6)?;
    let [from, to] = ends;
    let from = SocketAddr::new(from, header.source);
    Some((from, SocketAddr::new(to, header.destination), header))
}
