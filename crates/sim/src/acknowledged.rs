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
    /// The number of the SYN, and the octets behind it that are acknowledged.
    flows: BTreeMap<Direction, (u32, u64)>,
}

impl Acknowledged {
    /// A host sends a packet.
    pub fn sent(&mut self, packet: &[u8]) {
        if let Some((from, to, header)) = parse(packet)
            && header.flags.has(Flags::SYN)
        {
            let flow = self.flows.entry((from, to)).or_default();
            if flow.0 != header.seq.0 {
                *flow = (header.seq.0, 0);
            }
        }
    }

    /// A host is given a packet.
    pub fn brought(&mut self, packet: &[u8]) {
        if let Some((from, to, header)) = parse(packet)
            && header.flags.has(Flags::ACK)
            && let Some((first, octets)) = self.flows.get_mut(&(to, from))
        {
            // The SYN has a number of its own.
            let ahead = header.ack.0.wrapping_sub(*first).wrapping_sub(1) as i32;
            *octets = (*octets).max(u64::try_from(ahead).unwrap_or(0));
        }
    }

    /// How many octets from its own end on are acknowledged.
    #[must_use]
    pub fn of(&self, flow: &Flow) -> u64 {
        self.flows.get(&(flow.local, flow.remote)).map_or(0, |&(_, octets)| octets)
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
