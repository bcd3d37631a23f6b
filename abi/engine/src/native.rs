//! Addresses of InfiniBand's own (`AF_IB`): a GID, which is an IP address here, and a service, which is
//! a port.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use quipu_abi_types::{EngineStatus, sockaddr_ib};
use quipu_host::{Config, Device, HostAddress};
use quipu_nic::{Gid, LinkLayer};

use crate::instance::current;
use crate::status::{Failure, Outcome};

/// Whose address it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// To be bound to.
    Own,
    /// To be reached.
    Peer,
}

/// Whether there is a port of InfiniBand, the only kind that such addresses are of. People who hand one to
/// another port are told.
fn is_of_infiniband(config: &Config) -> bool {
    let fine =
        config.link_layer == LinkLayer::InfiniBand && config.devices.contains(&Device::Quipu0);
    if !fine {
        tracing::error!(
            "an InfiniBand address (AF_IB) is refused: it needs an InfiniBand port; set \
             QUIPU_LINK_LAYER=infiniband"
        );
    }
    fine
}

/// The IP address and port that an address stands for.
///
/// # Errors
///
/// No port is of InfiniBand, or none of this host has the GID, as the kernel's rdma_cm says of both.
pub(crate) fn address(raw: &sockaddr_ib, whose: Whose) -> Outcome<SocketAddr> {
    let instance = current()?;
    if !is_of_infiniband(instance.engine.config()) {
        return Err(EngineStatus::NoDevice.into());
    }
    found(raw, whose, instance.engine.address()).ok_or(Failure(EngineStatus::NoDevice))
}

/// The group that an address stands for; the unspecified address if any will do.
///
/// # Errors
///
/// No port is of InfiniBand.
pub(crate) fn group(raw: &sockaddr_ib) -> Outcome<IpAddr> {
    if !is_of_infiniband(current()?.engine.config()) {
        return Err(EngineStatus::NotSupported.into());
    }
    Ok(gid_of(raw).into())
}

fn gid_of(raw: &sockaddr_ib) -> Gid {
    // SAFETY: both fields of the union are 16 bytes, of which all values are valid.
    Gid(unsafe { raw.sib_addr.raw })
}

fn found(raw: &sockaddr_ib, whose: Whose, own: &HostAddress) -> Option<SocketAddr> {
    let gid = gid_of(raw);
    let asked = Ipv6Addr::from(gid.0);
    let any = asked.is_unspecified() || asked.is_loopback();
    let ip = match (whose, own.ip) {
        (_, ip) if gid == ip.into() => ip,
        (Whose::Own, IpAddr::V4(_)) if any => Ipv4Addr::UNSPECIFIED.into(),
        (Whose::Own, IpAddr::V6(_)) if any => Ipv6Addr::UNSPECIFIED.into(),
        (Whose::Own, _) => return None,
        // Anyone who wants to reach anybody reaches this port.
        (Whose::Peer, ip) if any => ip,
        (Whose::Peer, _) => gid.into(),
    };
    // Of an own service a part may be left open.
    let mask = if whose == Whose::Own { raw.sib_sid_mask } else { u64::MAX };
    let port = u64::from_be(raw.sib_sid & mask) as u16;
    Some(match ip {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => {
            SocketAddrV6::new(v6, port, 0, own.scope_id()).into()
        }
        ip => (ip, port).into(),
    })
}

#[cfg(test)]
mod tests {
    use quipu_abi_types::{AF_IB, RDMA_PS_TCP, ibv_gid};

    use super::*;

    const PORT: u64 = 7471;

    fn at(ip: &str) -> HostAddress {
        let (ip, interface) = (ip.parse().unwrap(), "ib0".to_owned());
        HostAddress { ip, interface, index: 7, up: true, running: true, loopback: false }
    }

    fn sib(gid: &str, sid: u64, mask: u64) -> sockaddr_ib {
        sockaddr_ib {
            sib_family: AF_IB as u16,
            sib_pkey: u16::MAX,
            sib_flowinfo: 0,
            sib_addr: ibv_gid { raw: Gid::from(gid.parse::<IpAddr>().unwrap()).0 },
            sib_sid: sid.to_be(),
            sib_sid_mask: mask.to_be(),
            sib_scope_id: 0,
        }
    }

    fn of(own: &str, whose: Whose, gid: &str) -> Option<String> {
        let raw = sib(gid, u64::from(RDMA_PS_TCP) << 16 | PORT, u64::MAX);
        found(&raw, whose, &at(own)).map(|address| address.to_string())
    }

    #[test]
    fn an_own_gid_is_the_own_address_and_none_is_all() {
        let own = |own, gid| of(own, Whose::Own, gid);
        assert_eq!(own("192.0.2.7", "192.0.2.7").unwrap(), "192.0.2.7:7471");
        assert_eq!(own("192.0.2.7", "::").unwrap(), "0.0.0.0:7471");
        assert_eq!(own("192.0.2.7", "::1").unwrap(), "0.0.0.0:7471");
        assert_eq!(own("fd00::7", "::").unwrap(), "[::]:7471");
        assert_eq!(own("::1", "::1").unwrap(), "[::1]:7471");
        assert_eq!(own("fe80::7", "fe80::7").unwrap(), "[fe80::7%7]:7471");
        assert_eq!(own("192.0.2.7", "192.0.2.8"), None);
    }

    #[test]
    fn a_peer_is_where_its_gid_is() {
        let peer = |own, gid| of(own, Whose::Peer, gid);
        assert_eq!(peer("192.0.2.7", "192.0.2.8").unwrap(), "192.0.2.8:7471");
        assert_eq!(peer("192.0.2.7", "fd00::8").unwrap(), "[fd00::8]:7471");
        assert_eq!(peer("192.0.2.7", "::").unwrap(), "192.0.2.7:7471");
        assert_eq!(peer("fe80::7", "fe80::8").unwrap(), "[fe80::8%7]:7471");
    }

    #[test]
    fn a_port_that_is_left_open_is_chosen() {
        let sid = u64::from(RDMA_PS_TCP) << 16 | PORT;
        let port = |whose, mask| found(&sib("192.0.2.7", sid, mask), whose, &at("192.0.2.7"));
        assert_eq!(port(Whose::Own, !0xffff).unwrap().port(), 0);
        assert_eq!(port(Whose::Peer, !0xffff).unwrap().port(), 7471);
    }
}
