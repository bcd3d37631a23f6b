//! Whether addresses are free before the adapter takes them: each is asked for, as RFC 5227 2.1 and RFC 4862
//! 5.4 have it, but for a shorter time, so that nobody waits. Who answers later is found by the stack.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use quipu_inet::stack::Frame;
use quipu_wire::ndp::{self, Station};
use quipu_wire::{arp, ethernet, icmpv6, ipv6};

use super::{Outgoing, PacketLink};
use crate::address::host_addresses;
use crate::sys::wait_readable_within;

/// How often each address is asked for, and how long an answer is waited for each time.
const QUESTIONS: u32 = 2;
const PATIENCE: Duration = Duration::from_millis(75);
/// Frames that are looked at in one go.
const FRAMES: usize = 64;
/// Before one looks again where the descriptor is readable and nothing was there.
const PAUSE: Duration = Duration::from_millis(1);

/// Somebody who has an address already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occupant {
    /// The kernel, on the interface of the link itself.
    Kernel,
    /// This station of the link.
    Station(Station),
}

/// The first of the addresses that is not free, and who has it. Links without stations, and those on which
/// nobody is but the kernel's end, whose addresses are part of the link's name, are not asked.
///
/// # Errors
///
/// The link is gone.
pub(crate) fn occupied(
    link: &mut dyn PacketLink,
    addresses: &[IpAddr],
) -> io::Result<Option<(IpAddr, Occupant)>> {
    let features = link.features();
    let (Some(own), true) = (features.hardware, features.enter.is_empty()) else { return Ok(None) };
    // Frames of ours do not reach the kernel of this host, where the link is beside it on an interface.
    let kernels = host_addresses().unwrap_or_default();
    let kernels = kernels.iter().filter(|it| it.interface == features.interface);
    if let Some(it) = kernels.map(|it| it.ip).find(|ip| addresses.contains(ip)) {
        return Ok(Some((it, Occupant::Kernel)));
    }
    for _ in 0..if addresses.is_empty() { 0 } else { QUESTIONS } {
        for address in addresses {
            make_room(link)?;
            ask(link, own, *address);
        }
        link.flush()?;
        let until = Instant::now() + PATIENCE;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            // Nobody hears the question.
            if link.is_down() {
                return Ok(None);
            }
            if !wait_readable_within(&link.descriptor(), left) {
                break;
            }
            let mut found = None;
            let each = &mut |frame: &Frame<'_>| {
                let claim = claim(frame.bytes, own).filter(|(it, _)| addresses.contains(it));
                found = found.or(claim);
            };
            if link.receive(FRAMES, each)? == 0 {
                link.take_failure()?;
                std::thread::sleep(PAUSE);
            }
            if let Some((address, station)) = found {
                return Ok(Some((address, Occupant::Station(station))));
            }
        }
    }
    Ok(None)
}

/// Hands what waits in a link that is full to the kernel. There may be more addresses than it has room for.
fn make_room(link: &mut dyn PacketLink) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    while link.slot().is_none() && Instant::now() < until {
        link.flush()?;
        if link.slot().is_none() {
            std::thread::sleep(PAUSE);
        }
    }
    Ok(())
}

/// Asks who has an address, without saying that one has it oneself.
fn ask(link: &mut dyn PacketLink, own: Station, address: IpAddr) {
    let Some(slot) = link.slot() else { return };
    let len = match address {
        IpAddr::V4(target) => {
            // RFC 5227 2.1.1: from nobody, so that nobody takes note of it.
            let message = arp::Repr {
                operation: arp::Operation::Request,
                sender_station: own,
                sender: [0; 4].into(),
                target_station: [0; 6],
                target,
            };
            let kind = ethernet::kind::ARP;
            let at = ethernet::Repr { destination: ethernet::BROADCAST, source: own, kind };
            let at = at.emit(slot);
            at + message.emit(&mut slot[at..])
        }
        IpAddr::V6(target) => {
            // RFC 4862 5.4.2.
            let (source, group) = (Ipv6Addr::UNSPECIFIED, ipv6::solicited_node(target));
            let message = ndp::Repr::NeighbourSolicitation { target, station: None };
            let message = icmpv6::Repr::Discovery(message);
            let header = ipv6::Repr {
                source,
                destination: group,
                next_header: icmpv6::PROTOCOL,
                traffic_class: 0,
                flow_label: 0,
                hop_limit: ndp::HOP_LIMIT,
                payload_len: message.wire_len() as u16,
            };
            let destination = ipv6::multicast_station(group);
            let kind = ethernet::kind::IPV6;
            let at = ethernet::Repr { destination, source: own, kind }.emit(slot);
            let at = at + header.emit(&mut slot[at..]);
            at + message.emit(source, group, &mut slot[at..])
        }
    };
    link.send(Outgoing { len, ..Outgoing::default() });
}

/// The address that a frame's sender says to have, or asks for as we do (RFC 5227 2.1.1, RFC 4862 5.4.3), and
/// its station.
fn claim(frame: &[u8], own: Station) -> Option<(IpAddr, Station)> {
    let (ethernet, at) = ethernet::Repr::parse(frame).ok()?;
    // Our own question may come back, from hubs and bridges.
    if ethernet.source == own {
        return None;
    }
    match ethernet.kind {
        ethernet::kind::ARP => {
            let message = arp::Repr::parse(&frame[at..]).ok()?;
            let asks = message.sender.is_unspecified();
            let whose = if asks { message.target } else { message.sender };
            (message.sender_station != own).then_some((whose.into(), message.sender_station))
        }
        ethernet::kind::IPV6 => {
            let (header, len) = ipv6::Repr::parse(&frame[at..]).ok()?;
            if header.next_header != icmpv6::PROTOCOL || header.hop_limit != ndp::HOP_LIMIT {
                return None;
            }
            let payload = frame.get(at + len..)?.get(..header.payload_len.into())?;
            let message = icmpv6::Repr::parse(header.source, header.destination, payload).ok()?;
            match message {
                icmpv6::Repr::Discovery(ndp::Repr::NeighbourAdvertisement {
                    target,
                    station,
                    ..
                }) => Some((target.into(), station.unwrap_or(ethernet.source))),
                icmpv6::Repr::Discovery(ndp::Repr::NeighbourSolicitation { target, .. })
                    if header.source.is_unspecified() =>
                {
                    Some((target.into(), ethernet.source))
                }
                _ => None,
            }
        }
        _ => None,
    }
}
