//! Addresses of InfiniBand's own (`AF_IB`). The engine takes them; what it tells are IP addresses, which GIDs
//! are here. What programs see of an identifier with such an address is made of these and of what they gave.

use libc::{c_int, sa_family_t, sockaddr, sockaddr_storage};
use quipu_abi_types::*;
use quipu_cabi::Errno;

use crate::address::{DEFAULT_PKEY, port};

/// The part of a service that is a port; the others name a port space.
const PORT: u64 = 0xffff;

/// Whose address it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    Own,
    Peer,
}

/// Reads an address, if it is of this family.
///
/// # Errors
///
/// EPROTONOSUPPORT: its service is of another port space than `ps`. (Of a peer's the kernel says so when it
/// is connected to.)
///
/// # Safety
///
/// `addr` is null or an address.
pub(crate) unsafe fn read(
    addr: *const sockaddr,
    ps: u32,
    whose: Whose,
) -> Result<Option<sockaddr_ib>, Errno> {
    // SAFETY: passed on from the caller; programs pass bytes of any alignment.
    let this = unsafe {
        if addr.is_null() || !is_native((&raw const (*addr).sa_family).read_unaligned()) {
            return Ok(None);
        }
        addr.cast::<sockaddr_ib>().read_unaligned()
    };
    let (sid, space) = (u64::from_be(this.sib_sid), u64::from(ps) << 16);
    let differs = (sid ^ space) & !PORT;
    let wrong = match whose {
        Whose::Own => differs & u64::from_be(this.sib_sid_mask) != 0,
        Whose::Peer => differs != 0 && sid != 0,
    };
    if wrong { Err(Errno(libc::EPROTONOSUPPORT)) } else { Ok(Some(this)) }
}

/// Whether a family is this one.
pub(crate) fn is_native(family: sa_family_t) -> bool {
    c_int::from(family) == AF_IB
}

/// Any port of any GID, of the partition of a peer.
pub(crate) fn any(peer: &sockaddr_ib) -> sockaddr_ib {
    let gid = ibv_gid { raw: [0; 16] };
    sockaddr_ib { sib_pkey: peer.sib_pkey, ..at(gid) }
}

/// What programs see of an identifier's own address: what they gave, with what became of it.
pub(crate) fn own(given: &sockaddr_ib, ps: u32, bound: &sockaddr_storage) -> sockaddr_storage {
    let Some(gid) = gid_of(bound) else { return nowhere() };
    let port = u16::from_be(port(bound));
    store(sockaddr_ib {
        sib_addr: gid,
        sib_sid: service(ps, port),
        sib_sid_mask: u64::MAX,
        ..*given
    })
}

/// What they see of the peer that a request came from: its services are not known.
pub(crate) fn peer(address: &sockaddr_storage) -> sockaddr_storage {
    gid_of(address).map_or_else(nowhere, |gid| store(at(gid)))
}

/// An IP address and port as an address of this family.
pub(crate) fn of_ip(address: &sockaddr_storage, ps: u32) -> Option<sockaddr_ib> {
    let port = u16::from_be(port(address));
    let mask = if port == 0 { !PORT } else { u64::MAX };
    let sid = (service(ps, port), mask.to_be());
    Some(sockaddr_ib { sib_sid: sid.0, sib_sid_mask: sid.1, ..at(gid_of(address)?) })
}

/// A service, big endian.
fn service(ps: u32, port: u16) -> u64 {
    (u64::from(ps) << 16 | u64::from(port)).to_be()
}

fn at(gid: ibv_gid) -> sockaddr_ib {
    sockaddr_ib {
        sib_family: AF_IB as sa_family_t,
        sib_pkey: DEFAULT_PKEY,
        sib_flowinfo: 0,
        sib_addr: gid,
        sib_sid: 0,
        sib_sid_mask: 0,
        sib_scope_id: 0,
    }
}

/// The GID of an IP address, all zero for any; none if it is none.
fn gid_of(address: &sockaddr_storage) -> Option<ibv_gid> {
    let place: *const sockaddr_storage = address;
    let raw = match c_int::from(address.ss_family) {
        libc::AF_INET => {
            // SAFETY: a sockaddr_storage holds and is aligned for the address that its family names.
            let ip = unsafe { (*place.cast::<libc::sockaddr_in>()).sin_addr.s_addr };
            let mapped = std::net::Ipv4Addr::from(u32::from_be(ip)).to_ipv6_mapped().octets();
            if ip == libc::INADDR_ANY { [0; 16] } else { mapped }
        }
        // SAFETY: as above.
        libc::AF_INET6 => unsafe { (*place.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr },
        _ => return None,
    };
    Some(ibv_gid { raw })
}

fn store(address: sockaddr_ib) -> sockaddr_storage {
    let mut place = nowhere();
    // SAFETY: sockaddr_storage is larger than and aligned for every socket address.
    unsafe { (&raw mut place).cast::<sockaddr_ib>().write(address) };
    place
}

fn nowhere() -> sockaddr_storage {
    // SAFETY: sockaddr_storage consists of integers.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_of(sid: u64, mask: u64, ps: u32, whose: Whose) -> Result<bool, Errno> {
        let gid = ibv_gid { raw: [0; 16] };
        let this = sockaddr_ib { sib_sid: sid.to_be(), sib_sid_mask: mask.to_be(), ..at(gid) };
        // SAFETY: it is an address of the family that it names.
        unsafe { read((&raw const this).cast(), ps, whose) }.map(|read| read.is_some())
    }

    #[test]
    fn a_service_is_of_the_port_space_as_far_as_it_is_said() {
        const WRONG: Result<bool, Errno> = Err(Errno(libc::EPROTONOSUPPORT));
        let tcp = u64::from(RDMA_PS_TCP) << 16 | 7471;
        let own = |sid, mask, ps| read_of(sid, mask, ps, Whose::Own);
        assert_eq!(own(tcp, u64::MAX, RDMA_PS_TCP), Ok(true));
        assert_eq!(own(tcp, u64::MAX, RDMA_PS_UDP), WRONG);
        assert_eq!(own(0, u64::MAX, RDMA_PS_TCP), WRONG);
        assert_eq!(own(0, PORT, RDMA_PS_TCP), Ok(true));
        let peer = |sid, ps| read_of(sid, 0, ps, Whose::Peer);
        assert_eq!(peer(tcp, RDMA_PS_TCP), Ok(true));
        assert_eq!(peer(tcp, RDMA_PS_IB), WRONG);
        assert_eq!(peer(7471, RDMA_PS_TCP), WRONG);
        assert_eq!(peer(0, RDMA_PS_TCP), Ok(true));
    }
}
