//! Raw packet queue pairs: Ethernet frames between the adapters of a network.
//!
//! There is no Ethernet under an adapter made of software. Its frames travel as datagrams to one multicast
//! group, which stands for the segment that all adapters are attached to (`specs/quipu-datagram.md`, 6). A
//! frame that arrives is a stranger's bytes: it reaches a queue pair by a flow rule that the program made,
//! and no other way.

mod counters;
mod hash;
mod queues;
mod rules;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use quipu_iwarp::wire::datagram::{Datagram, MULTICAST_QPN};
use quipu_iwarp::wire::ethernet::{HEADER, Layers};
use quipu_mem::{AccessError, Sge};

pub use self::counters::{CounterKind, MAX_COUNTERS};
pub(crate) use self::counters::{Counters, table as counters};
pub use self::hash::{RX_HASH_KEY, RxHash, RxHashFields};
pub use self::queues::{MAX_TABLE_SIZE, MAX_TABLES};
pub(crate) use self::queues::{Table, WorkQueue};
pub(crate) use self::rules::Rules;
pub use self::rules::{FlowKind, FlowLayer, FlowRule, FlowSpec};
use crate::adapter::{Adapter, Config, Hub};
use crate::error::Fault;
use crate::multicast::{GroupMember, multicast_group};
use crate::probe::{Probe, Stage};
use crate::qp::Qp;
use crate::responder::{self, Finish, Refusal};
use crate::types::{FlowId, Gid, QpId, QpType, WcExtra, WcOpcode, WcStatus};

/// Rules that an adapter has at most: each frame is compared with all of them.
pub const MAX_FLOWS: usize = 1024;
/// The longest frame, whatever the MTU: 1500 bytes of payload, a header and two tags. IP divides it where
/// it must.
const MAX_FRAME: u32 = 1522;
/// The group that stands for the segment: ff12::5155:4950:5345:4721.
const SEGMENT: Gid =
    Gid([0xff, 0x12, 0, 0, 0, 0, 0, 0, 0x51, 0x55, 0x49, 0x50, 0x53, 0x45, 0x47, 0x21]);

/// The station address (MAC) of the adapter with this GID: 02:51 and the four octets of its IPv4 address, or
/// 06 and five of a hash of its IPv6 address; both are locally administered.
#[must_use]
pub fn station_address(gid: Gid) -> [u8; 6] {
    match IpAddr::from(gid) {
        IpAddr::V4(ip) => {
            let [a, b, c, d] = ip.octets();
            [0x02, 0x51, a, b, c, d]
        }
        IpAddr::V6(_) => {
            // FNV-1a, 64 bits.
            let hash = gid.0.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &octet| {
                (hash ^ u64::from(octet)).wrapping_mul(0x0100_0000_01b3)
            });
            let [_, _, _, a, b, c, d, e] = hash.to_be_bytes();
            [0x06, a, b, c, d, e]
        }
    }
}

/// The group that frames of an adapter go to and come from.
fn segment(config: &Config) -> IpAddr {
    // It names one in either family.
    multicast_group(config.gid, SEGMENT).unwrap_or(Ipv6Addr::UNSPECIFIED.into())
}

impl<P: Probe> Adapter<P> {
    /// The group that stands for the Ethernet segment. The world below joins it while
    /// [`has_group`](Self::has_group) says so.
    #[must_use]
    pub fn segment(&self) -> IpAddr {
        segment(&self.hub.config)
    }

    /// Has frames that a rule matches go to a raw packet queue pair. Nothing else has any go there.
    ///
    /// # Errors
    /// No such queue pair, one of another service, a rule that makes no sense, or no room.
    pub fn create_flow(&mut self, id: QpId, rule: FlowRule) -> Result<FlowId, Fault> {
        let qp = self.qps.get(id).ok_or(Fault::NoSuchObject)?;
        if !matches!(qp.qp_type, QpType::RawPacket | QpType::Hashed(_)) {
            return Err(Fault::Invalid("only raw packet queue pairs have flow rules"));
        }
        let counts = rule.counts;
        if let Some(counters) = counts {
            self.use_counters(counters, 1)?;
        }
        let added = self.hub.rules.add(id, rule);
        if let (Err(_), Some(counters)) = (&added, counts) {
            self.use_counters(counters, -1)?;
        }
        let flow = added?;
        let segment = self.segment();
        let members = self.hub.groups.entry(segment).or_default();
        let member = GroupMember { qp: id, mgid: Gid::from(segment), sgid_index: 0 };
        if !members.contains(&member) {
            members.push(member);
        }
        Ok(flow)
    }

    /// Ends a rule. Whether it was the last of all, so that the segment's group is to be left.
    ///
    /// # Errors
    /// No such rule.
    pub fn destroy_flow(&mut self, id: FlowId) -> Result<bool, Fault> {
        let (qp, counts) = self.hub.rules.remove(id).ok_or(Fault::NoSuchObject)?;
        if let Some(counters) = counts {
            self.use_counters(counters, -1)?;
        }
        if self.hub.rules.concern(qp) {
            return Ok(false);
        }
        let segment = self.segment();
        let member = GroupMember { qp, mgid: Gid::from(segment), sgid_index: 0 };
        self.leave_group(segment, member)
    }

    /// Gives a frame to the queue pairs that rules steer it to.
    pub(crate) fn deliver_frame(&mut self, frame: &[u8]) {
        let Some(outer) = Layers::parse(frame) else {
            self.hub.datagram_drops.malformed += 1;
            return;
        };
        let own = station_address(self.hub.config.gid);
        let inner = outer.inner.and_then(Layers::parse);
        let mut takers = std::mem::take(&mut self.hub.takers);
        takers.clear();
        if outer.to_group() || outer.destination() == own {
            let hub = &mut self.hub;
            hub.rules.steer(&outer, inner.as_ref(), &mut takers, |counters| {
                if let Some(counters) = hub.flow_counters.get_mut(counters) {
                    counters.count(frame.len());
                }
            });
        }
        if takers.is_empty() {
            self.hub.datagram_drops.no_queue_pair += 1;
        }
        for &id in &takers {
            let Some((qp, hub)) = self.qp_and_hub(id) else { continue };
            match qp.qp_type {
                _ if !qp.may_receive() => hub.datagram_drops.no_queue_pair += 1,
                QpType::Hashed(_) => queues::deliver(qp, hub, frame, &outer, inner.as_ref()),
                _ => deliver(qp, hub, frame),
            }
        }
        self.hub.takers = takers;
    }
}

/// The header and the destination of a frame of `length` bytes.
///
/// # Errors
/// The status that its request fails with: it is no frame, or too long.
pub(crate) fn address<P>(
    qp: &Qp,
    hub: &Hub<P>,
    length: u32,
) -> Result<(Datagram, SocketAddr), WcStatus> {
    let most = hub.config.datagram_mtu.max(MAX_FRAME);
    if (length as usize) < HEADER || length > most {
        return Err(WcStatus::LocLenErr);
    }
    let header = Datagram {
        dest_qpn: MULTICAST_QPN,
        source_qpn: qp.num.0,
        frame: true,
        ..Datagram::default()
    };
    Ok((header, SocketAddr::new(segment(&hub.config), hub.config.multicast_port)))
}

/// Copies a frame into the memory of a receive, all of it or nothing.
fn place<P: Probe>(
    hub: &mut Hub<P>,
    pd: u32,
    list: &[Sge],
    frame: &[u8],
) -> Result<(), AccessError> {
    hub.regions.check_list(pd, list, 0, frame.len() as u64, true)?;
    hub.regions.scatter(pd, list, 0, frame)?;
    hub.probe.stage(Stage::PutData, frame.len());
    Ok(())
}

/// Puts a frame into the next receive of a queue pair, if it fits.
fn deliver<P: Probe>(qp: &mut Qp, hub: &mut Hub<P>, frame: &[u8]) {
    let len = frame.len() as u64;
    if responder::next_capacity(qp, hub).is_none_or(|capacity| capacity < len)
        || !responder::begin_receive(qp, hub)
    {
        hub.datagram_drops.no_receive += 1;
        return;
    }
    let placed = responder::spared(qp).and_then(|()| {
        let (pd, list) = (qp.recv_pd_number(), qp.responder.receive.sges.as_slice());
        place(hub, pd, list, frame).map_err(|_| Refusal::Local)?;
        let byte_len = frame.len() as u32;
        let (opcode, extra) = (WcOpcode::Recv, WcExtra::None);
        let finish = Finish { opcode, byte_len, extra, solicited: false };
        responder::finish_receive(qp, hub, finish)
    });
    if let Err(refusal) = placed {
        responder::refuse(qp, hub, refusal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stations_have_addresses_of_their_own() {
        let of = |ip: &str| station_address(Gid::from(ip.parse::<IpAddr>().unwrap()));
        assert_eq!(of("10.0.0.7"), [0x02, 0x51, 10, 0, 0, 7]);
        assert_ne!(of("fe80::1"), of("fe80::2"));
        for address in [of("10.0.0.7"), of("fe80::1")] {
            assert_eq!(address[0] & 3, 2, "of one station, and locally administered");
        }
    }

    #[test]
    fn the_segment_is_a_group_of_either_family() {
        let of = |ip: &str| {
            let gid = Gid::from(ip.parse::<IpAddr>().unwrap());
            segment(&Config { gid, ..Config::default() }).to_string()
        };
        assert_eq!(of("10.0.0.1"), "239.157.208.103");
        assert_eq!(of("fe80::1"), "ff12::5155:4950:5345:4721");
    }
}
