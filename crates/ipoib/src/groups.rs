//! Multicast groups: those of the link itself, and those that the kernel's reports of IGMP (RFC 3376, 2236)
//! and MLD (RFC 3810, 2710) name.

use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use quipu_wire::ipoib::{Encapsulation, group_gid};
use quipu_wire::{icmpv6, ipv4, ipv6};

use crate::MAX_GROUPS;

const IGMP: u8 = 2;
const HOP_BY_HOP: u8 = 0;

/// What is to be done with a multicast group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupChange {
    /// Attach the queue pair to the group with this GID.
    Join([u8; 16]),
    /// Detach it.
    Leave([u8; 16]),
}

/// The groups that the queue pair is attached to.
#[derive(Debug)]
pub(crate) struct Groups {
    pkey: u16,
    /// Those that are never left.
    fixed: BTreeSet<[u8; 16]>,
    joined: BTreeSet<[u8; 16]>,
    changes: VecDeque<GroupChange>,
}

impl Groups {
    /// Those that a host with these addresses is in (RFC 4391 5, RFC 4291 2.8).
    pub(crate) fn new(pkey: u16, addresses: impl Iterator<Item = IpAddr>) -> Self {
        let mut fixed = BTreeSet::new();
        let mut add = |group: IpAddr| fixed.insert(group_gid(group, pkey));
        // Every interface is in the broadcast group, whatever addresses it has.
        add(Ipv4Addr::BROADCAST.into());
        for address in addresses {
            match address {
                IpAddr::V4(_) => {
                    add(Ipv4Addr::new(224, 0, 0, 1).into());
                }
                IpAddr::V6(address) => {
                    add(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).into());
                    add(ipv6::solicited_node(address).into());
                }
            }
        }
        let changes = fixed.iter().map(|&gid| GroupChange::Join(gid)).collect();
        Self { pkey, fixed, joined: BTreeSet::new(), changes }
    }

    /// What is to be done next.
    pub(crate) fn poll(&mut self) -> Option<GroupChange> {
        self.changes.pop_front()
    }

    /// Looks at a packet of the kernel's: if it is a report of memberships, they are followed. Whether there
    /// was room for all of them.
    pub(crate) fn observe(&mut self, kind: Encapsulation, packet: &[u8]) -> bool {
        let mut fits = true;
        let mut change = |group: IpAddr, joins: bool| {
            if group.is_multicast() {
                fits &= self.change(group_gid(group, self.pkey), joins);
            }
        };
        match kind {
            Encapsulation::Ipv4 => igmp(packet, &mut change),
            Encapsulation::Ipv6 => mld(packet, &mut change),
            Encapsulation::Arp => {}
        }
        fits
    }

    fn change(&mut self, gid: [u8; 16], joins: bool) -> bool {
        if self.fixed.contains(&gid) || self.joined.contains(&gid) == joins {
            return true;
        }
        // Changes that nobody has taken yet are bounded, too.
        let is_full = joins && self.joined.len() >= MAX_GROUPS;
        if is_full || self.changes.len() >= 4 * MAX_GROUPS {
            return false;
        }
        match joins {
            true => self.joined.insert(gid),
            false => self.joined.remove(&gid),
        };
        let change = if joins { GroupChange::Join(gid) } else { GroupChange::Leave(gid) };
        self.changes.push_back(change);
        true
    }
}

/// Whether a group record says that somebody listens (RFC 3376 4.2.12, RFC 3810 5.2.12), or that nobody
/// does any more; `None`: neither.
fn joins(kind: u8, sources: usize) -> Option<bool> {
    match (kind, sources) {
        // To include no source is to leave.
        (1 | 3, 0) => Some(false),
        (1..=5, _) => Some(true),
        _ => None,
    }
}

/// Goes through group records with addresses of `N` bytes.
fn records<const N: usize>(bytes: &[u8], change: &mut impl FnMut(IpAddr, bool))
where
    IpAddr: From<[u8; N]>,
{
    let Some(count) = bytes.get(6..8) else { return };
    let count = usize::from(u16::from_be_bytes([count[0], count[1]]));
    let mut rest = bytes.get(8..).unwrap_or_default();
    for _ in 0..count {
        let Some((head, behind)) = rest.split_at_checked(4) else { return };
        let Some((group, behind)) = behind.split_first_chunk::<N>() else { return };
        let sources = usize::from(u16::from_be_bytes([head[2], head[3]]));
        if let Some(joins) = joins(head[0], sources) {
            change(IpAddr::from(*group), joins);
        }
        let skipped = sources * N + usize::from(head[1]) * 4;
        rest = behind.get(skipped..).unwrap_or_default();
    }
}

fn igmp(packet: &[u8], change: &mut impl FnMut(IpAddr, bool)) {
    let Ok((header, at)) = ipv4::Repr::parse(packet) else { return };
    let Some(message) = packet.get(at..at + usize::from(header.payload_len)) else { return };
    if header.protocol != IGMP || header.is_fragment() {
        return;
    }
    let group = message.get(4..8).and_then(|group| <[u8; 4]>::try_from(group).ok());
    match (message.first(), group) {
        (Some(0x22), _) => records::<4>(message, change),
        (Some(0x12 | 0x16), Some(group)) => change(group.into(), true),
        (Some(0x17), Some(group)) => change(group.into(), false),
        _ => {}
    }
}

fn mld(packet: &[u8], change: &mut impl FnMut(IpAddr, bool)) {
    let Ok((header, at)) = ipv6::Repr::parse(packet) else { return };
    let payload = packet.get(at..at + usize::from(header.payload_len)).unwrap_or_default();
    // Reports have a hop-by-hop header with a router alert before them.
    let message = match (header.next_header, payload.first(), payload.get(1)) {
        (HOP_BY_HOP, Some(&icmpv6::PROTOCOL), Some(&len)) => {
            payload.get((usize::from(len) + 1) * 8..).unwrap_or_default()
        }
        (icmpv6::PROTOCOL, ..) => payload,
        _ => return,
    };
    let group = message.get(8..24).and_then(|group| <[u8; 16]>::try_from(group).ok());
    match (message.first(), group) {
        (Some(143), _) => records::<16>(message, change),
        (Some(131), Some(group)) => change(group.into(), true),
        (Some(132), Some(group)) => change(group.into(), false),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn igmp_packet(message: &[u8]) -> Vec<u8> {
        let header = ipv4::Repr {
            source: Ipv4Addr::new(10, 0, 0, 1),
            destination: Ipv4Addr::new(224, 0, 0, 22),
            protocol: IGMP,
            traffic_class: 0xc0,
            hop_limit: 1,
            identification: 0,
            dont_fragment: true,
            more_fragments: false,
            fragment_offset: 0,
            payload_len: message.len() as u16,
        };
        let mut out = vec![0; ipv4::LEN];
        header.emit(&mut out);
        out.extend_from_slice(message);
        out
    }

    fn groups() -> Groups {
        let mut groups = Groups::new(0xffff, [IpAddr::from([10, 0, 0, 1])].into_iter());
        assert_eq!(std::iter::from_fn(|| groups.poll()).count(), 2, "broadcast and all hosts");
        groups
    }

    #[test]
    fn reports_of_igmp_are_followed() {
        let mut groups = groups();
        let group = [239, 1, 2, 3];
        let gid = group_gid(group.into(), 0xffff);
        let record = |kind: u8| {
            igmp_packet(&[&[0x22, 0, 0, 0, 0, 0, 0, 1, kind, 0, 0, 0][..], &group].concat())
        };
        groups.observe(Encapsulation::Ipv4, &record(4));
        assert_eq!(groups.poll(), Some(GroupChange::Join(gid)));
        groups.observe(Encapsulation::Ipv4, &record(2));
        assert_eq!(groups.poll(), None, "it is joined already");
        groups.observe(Encapsulation::Ipv4, &record(3));
        assert_eq!(groups.poll(), Some(GroupChange::Leave(gid)));
        let old = |kind: u8| igmp_packet(&[&[kind, 0, 0, 0][..], &group].concat());
        groups.observe(Encapsulation::Ipv4, &old(0x16));
        assert_eq!(groups.poll(), Some(GroupChange::Join(gid)));
        groups.observe(Encapsulation::Ipv4, &old(0x17));
        assert_eq!(groups.poll(), Some(GroupChange::Leave(gid)));
    }

    #[test]
    fn reports_of_mld_are_followed() {
        let mut groups = groups();
        let group = Ipv6Addr::new(0xff05, 0, 0, 0, 0, 0, 0, 7);
        let report = [&[143, 0, 0, 0, 0, 0, 0, 1, 4, 0, 0, 0][..], &group.octets()].concat();
        let payload = [&[58, 0, 5, 2, 0, 0, 1, 0][..], &report].concat();
        let header = ipv6::Repr {
            source: Ipv6Addr::LOCALHOST,
            destination: Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16),
            next_header: HOP_BY_HOP,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 1,
            payload_len: payload.len() as u16,
        };
        let mut packet = vec![0; ipv6::LEN];
        header.emit(&mut packet);
        packet.extend_from_slice(&payload);
        groups.observe(Encapsulation::Ipv6, &packet);
        assert_eq!(groups.poll(), Some(GroupChange::Join(group_gid(group.into(), 0xffff))));
        for len in 0..packet.len() {
            groups.observe(Encapsulation::Ipv6, &packet[..len]);
        }
    }

    #[test]
    fn groups_are_bounded_and_those_of_the_link_stay() {
        let mut groups = groups();
        let report = |last: u8| igmp_packet(&[0x16, 0, 0, 0, 239, 0, 0, last]);
        for last in 0..=255 {
            let fits = groups.observe(Encapsulation::Ipv4, &report(last));
            assert_eq!(fits, usize::from(last) < MAX_GROUPS);
        }
        let joined = std::iter::from_fn(|| groups.poll()).count();
        assert_eq!(joined, MAX_GROUPS);
        groups.observe(Encapsulation::Ipv4, &igmp_packet(&[0x17, 0, 0, 0, 224, 0, 0, 1]));
        assert_eq!(groups.poll(), None);
    }
}
