//! Multicast groups (IBA 10.5): which datagram queue pairs are attached to which, by IP multicast.
//!
//! The world below joins and leaves the groups; datagrams to one come to a port of their own
//! (`specs/quipu-datagram.md`, section 5).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use quipu_iwarp::wire::datagram::Datagram;

use crate::adapter::{Adapter, Hub};
use crate::datagram::{Arrival, deliver};
use crate::error::Fault;
use crate::probe::Probe;
use crate::types::{Gid, QpId, QpNum, QpType};

/// The first octet of the IPv4 groups that stand for IPv6 ones: of administrative scope (RFC 2365).
const ADMINISTRATIVE: u8 = 239;
/// Scopes of IPv6 groups (RFC 4291 2.7).
const INTERFACE_LOCAL: u8 = 1;
const LINK_LOCAL: u8 = 2;

/// The IP multicast group of a multicast GID, as an adapter whose own address is `own` uses it; `None` if the
/// GID is no multicast address. IPv4 groups come as `::ffff:a.b.c.d` or `ff0e::ffff:a.b.c.d`, since RDMA
/// connection managers write both. Groups of the other family are mapped, to the second form, or to
/// 239.0.0.0/8 by a hash.
#[must_use]
pub fn multicast_group(own: Gid, mgid: Gid) -> Option<IpAddr> {
    let octets = mgid.0;
    let embedded = octets[10..12] == [0xff, 0xff] && octets[2..10] == [0; 8];
    let v4 = Ipv4Addr::new(octets[12], octets[13], octets[14], octets[15]);
    let prefix = [octets[0], octets[1]];
    let v4 = Some(v4)
        .filter(|v4| embedded && v4.is_multicast() && (prefix == [0, 0] || prefix == [0xff, 0x0e]));
    match (IpAddr::from(own), v4) {
        (IpAddr::V4(_), Some(v4)) => Some(v4.into()),
        (IpAddr::V6(_), Some(v4)) => {
            let [a, b, c, d] = v4.octets();
            let mut octets = [0; 16];
            octets[..2].copy_from_slice(&[0xff, 0x0e]);
            octets[10..].copy_from_slice(&[0xff, 0xff, a, b, c, d]);
            Some(Ipv6Addr::from(octets).into())
        }
        (_, None) if octets[0] != 0xff => None,
        (IpAddr::V6(_), None) => {
            // What is of the scope of one interface would not leave this host: the next wider scope.
            let mut octets = octets;
            if octets[1] & 0x0f == INTERFACE_LOCAL {
                octets[1] = octets[1] & 0xf0 | LINK_LOCAL;
            }
            Some(Ipv6Addr::from(octets).into())
        }
        (IpAddr::V4(_), None) => {
            // FNV-1a, 32 bits.
            let hash = octets.iter().fold(0x811c_9dc5_u32, |hash, &octet| {
                (hash ^ u32::from(octet)).wrapping_mul(0x0100_0193)
            });
            let [_, b, c, d] = hash.to_be_bytes();
            Some(Ipv4Addr::new(ADMINISTRATIVE, b, c, d).into())
        }
    }
}

/// How a queue pair is attached to a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupMember {
    /// The queue pair.
    pub qp: QpId,
    /// The multicast GID by which it was attached.
    pub mgid: Gid,
    /// The row of the GID table with the address on whose network the group is joined.
    pub sgid_index: u8,
}

impl<P> Hub<P> {
    /// The group that a multicast GID stands for on the network of a row of the GID table.
    fn group_of(&self, mgid: Gid, sgid_index: u8) -> Result<IpAddr, Fault> {
        let row = self.gids.row(sgid_index);
        let own = row.ok_or(Fault::Invalid("the GID table has no row with this index"))?;
        multicast_group(own, mgid).ok_or(Fault::Invalid("the GID is not a multicast address"))
    }
}

impl<P: Probe> Adapter<P> {
    /// The group that a multicast GID stands for, on the network of the adapter's first address.
    ///
    /// # Errors
    /// It is no multicast address.
    pub fn group_of(&self, mgid: Gid) -> Result<IpAddr, Fault> {
        self.hub.group_of(mgid, 0)
    }

    /// As [`group_of`](Self::group_of) on the network of another address: that of a row of the GID table.
    ///
    /// # Errors
    /// It is no multicast address, or there is no such row.
    pub fn group_from(&self, mgid: Gid, sgid_index: u8) -> Result<IpAddr, Fault> {
        self.hub.group_of(mgid, sgid_index)
    }

    /// Attaches a datagram queue pair to the group that a multicast GID stands for, which the world below has
    /// joined. To do so twice by one GID changes nothing (`ibv_attach_mcast(3)`); by another GID of the same
    /// group it is attached once more, and gets each message once.
    ///
    /// # Errors
    /// No such queue pair, one of another service, no multicast GID, or a limit is reached.
    pub fn attach_multicast(&mut self, id: QpId, mgid: Gid) -> Result<(), Fault> {
        self.attach_member(GroupMember { qp: id, mgid, sgid_index: 0 })
    }

    /// As [`attach_multicast`](Self::attach_multicast), on the network of any row of the GID table.
    ///
    /// # Errors
    /// As there; or there is no such row.
    pub fn attach_member(&mut self, member: GroupMember) -> Result<(), Fault> {
        let id = member.qp;
        let qp = self.qps.get(id).ok_or(Fault::NoSuchObject)?;
        if qp.qp_type != QpType::Ud {
            return Err(Fault::Invalid("only datagram queue pairs may be attached to a group"));
        }
        let group = self.hub.group_of(member.mgid, member.sgid_index)?;
        let (groups, config) = (&mut self.hub.groups, &self.hub.config);
        if !groups.contains_key(&group) && groups.len() >= config.max_multicast_groups as usize {
            return Err(Fault::Exhausted("multicast groups"));
        }
        let members = groups.entry(group).or_default();
        if members.contains(&member) {
            return Ok(());
        }
        if members.len() >= config.max_multicast_members as usize {
            return Err(Fault::Exhausted("places in this multicast group"));
        }
        let same = members.iter().position(|known| known.qp == id);
        members.insert(same.unwrap_or(members.len()), member);
        Ok(())
    }

    /// Detaches a queue pair from a group by a multicast GID by which it was attached. Whether nobody is
    /// attached any more, so that the group is to be left.
    ///
    /// # Errors
    /// It is not attached by this GID.
    pub fn detach_multicast(&mut self, id: QpId, mgid: Gid) -> Result<bool, Fault> {
        self.detach_member(GroupMember { qp: id, mgid, sgid_index: 0 })
    }

    /// As [`detach_multicast`](Self::detach_multicast), on the network of any row of the GID table. Whether
    /// nobody is attached there any more, so that the group is to be left on that network.
    ///
    /// # Errors
    /// It is not attached in this way.
    pub fn detach_member(&mut self, member: GroupMember) -> Result<bool, Fault> {
        // Raw packet queue pairs are in the group of their segment by their flow rules.
        if self.service_of(member.qp).is_some_and(|service| service != QpType::Ud) {
            return Err(Fault::Invalid("only datagram queue pairs are attached to groups"));
        }
        self.leave_group(self.hub.group_of(member.mgid, member.sgid_index)?, member)
    }

    /// As [`detach_member`](Self::detach_member), whatever the service.
    pub(crate) fn leave_group(
        &mut self,
        group: IpAddr,
        member: GroupMember,
    ) -> Result<bool, Fault> {
        let refusal = Fault::Invalid("the queue pair is not attached to this group");
        let members = self.hub.groups.get_mut(&group).ok_or(refusal)?;
        let place = members.iter().position(|known| *known == member).ok_or(refusal)?;
        members.remove(place);
        let last = members.iter().all(|left| left.sgid_index != member.sgid_index);
        if members.is_empty() {
            self.hub.groups.remove(&group);
        }
        Ok(last)
    }

    /// Whether any queue pair is attached to a group.
    #[must_use]
    pub fn has_group(&self, group: IpAddr) -> bool {
        self.hub.groups.contains_key(&group)
    }

    /// Whether any queue pair is attached to a group on the network of a row of the GID table.
    #[must_use]
    pub fn has_group_on(&self, group: IpAddr, sgid_index: u8) -> bool {
        let members = self.hub.groups.get(&group);
        members.is_some_and(|all| all.iter().any(|member| member.sgid_index == sgid_index))
    }

    /// The multicast GIDs by which a queue pair is attached to groups.
    #[must_use]
    pub fn groups_of(&self, id: QpId) -> Vec<Gid> {
        self.memberships_of(id).into_iter().map(|member| member.mgid).collect()
    }

    /// How a queue pair is attached to groups.
    #[must_use]
    pub fn memberships_of(&self, id: QpId) -> Vec<GroupMember> {
        let members = self.hub.groups.values().flatten();
        members.filter(|member| member.qp == id).copied().collect()
    }

    /// Has a queue pair not hear from groups what it has sent to them (`IBV_QP_CREATE_BLOCK_SELF_MCAST_LB`).
    ///
    /// # Errors
    /// No such queue pair, or one of another service.
    pub fn spare_own_multicast(&mut self, id: QpId) -> Result<(), Fault> {
        let qp = self.qps.get_mut(id).ok_or(Fault::NoSuchObject)?;
        if qp.qp_type != QpType::Ud {
            return Err(Fault::Unsupported(
                "blocking own multicast messages, except for datagrams",
            ));
        }
        qp.is_spared_own = true;
        Ok(())
    }

    /// Gives a datagram to every queue pair that is attached to its group.
    pub(crate) fn deliver_to_group(
        &mut self,
        header: &Datagram,
        arrival: &Arrival,
        message: &[u8],
    ) {
        if header.frame {
            return match arrival.to == self.segment() {
                true => self.deliver_frame(message),
                false => self.hub.datagram_drops.malformed += 1,
            };
        }
        let (mut index, mut last) = (0, None);
        let is_own = self.hub.gids.has(Gid::from(arrival.from.ip()));
        let sender = is_own.then_some(QpNum(header.source_qpn));
        while let Some(&GroupMember { qp: id, .. }) =
            self.hub.groups.get(&arrival.to).and_then(|group| group.get(index))
        {
            // One that is attached by several names stands there as often, in a row.
            if let Some((qp, hub)) = self.qp_and_hub(id).filter(|_| last != Some(id))
                && !(qp.is_spared_own && sender == Some(qp.num))
            {
                deliver(qp, hub, header, arrival, message);
            }
            (index, last) = (index + 1, Some(id));
        }
        if index == 0 {
            self.hub.datagram_drops.no_queue_pair += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(text: &str) -> Gid {
        Gid(text.parse::<Ipv6Addr>().unwrap().octets())
    }

    fn group(own: &str, mgid: &str) -> Option<String> {
        multicast_group(gid(own), gid(mgid)).map(|group| group.to_string())
    }

    #[test]
    fn groups_of_all_kinds_of_names() {
        let (v4, v6) = ("::ffff:10.0.0.1", "fe80::1");
        assert_eq!(group(v4, "::ffff:239.1.2.3").as_deref(), Some("239.1.2.3"));
        assert_eq!(group(v4, "ff0e::ffff:239.1.2.3").as_deref(), Some("239.1.2.3"));
        assert_eq!(group(v6, "::ffff:239.1.2.3").as_deref(), Some("ff0e::ffff:ef01:203"));
        assert_eq!(group(v6, "ff0e::ffff:239.1.2.3").as_deref(), Some("ff0e::ffff:ef01:203"));
        assert_eq!(group(v6, "ff02::77").as_deref(), Some("ff02::77"));
        assert_eq!(group(v6, "ff01::77").as_deref(), Some("ff02::77"));
        let mapped = group(v4, "ff02::77").unwrap();
        assert!(mapped.starts_with("239.") && mapped != group(v4, "ff02::78").unwrap());
        for own in [v4, v6] {
            for none in ["::ffff:10.0.0.2", "fe80::1", "::", "::1"] {
                assert_eq!(group(own, none), None, "{none}");
            }
        }
    }
}
