//! Addresses of the C library.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{c_int, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};
use quipu_cabi::Errno;

use crate::error::{Outcome, fail};

/// Reads an address of `length` bytes.
///
/// # Errors
///
/// It is null, too short, or of another family than IPv4 and IPv6.
///
/// # Safety
///
/// It is null, or has `length` bytes.
pub(crate) unsafe fn read(raw: *const sockaddr, length: socklen_t) -> Outcome<SocketAddr> {
    let holds = |size: usize| !raw.is_null() && length as usize >= size;
    if !holds(size_of::<libc::sa_family_t>()) {
        return Err(fail(Errno::EINVAL, "the address is missing; give one, and its length"));
    }
    // SAFETY: it has at least a family; programs pass bytes of any alignment.
    let family = c_int::from(unsafe { (&raw const (*raw).sa_family).read_unaligned() });
    match family {
        libc::AF_INET if holds(size_of::<sockaddr_in>()) => {
            // SAFETY: it is long enough for what its family says it is.
            let v4 = unsafe { raw.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 if holds(size_of::<sockaddr_in6>()) => {
            // SAFETY: as above.
            let v6 = unsafe { raw.cast::<sockaddr_in6>().read_unaligned() };
            let (ip, port) = (Ipv6Addr::from(v6.sin6_addr.s6_addr), u16::from_be(v6.sin6_port));
            match ip.to_ipv4_mapped() {
                Some(ip) => Ok(SocketAddrV4::new(ip, port).into()),
                None => Ok(SocketAddrV6::new(ip, port, 0, v6.sin6_scope_id).into()),
            }
        }
        libc::AF_INET | libc::AF_INET6 => {
            Err(fail(Errno::EINVAL, "the address is shorter than its family says"))
        }
        _ => Err(fail(
            Errno::EAFNOSUPPORT,
            format_args!("addresses of family {family} are not supported; use IPv4 or IPv6"),
        )),
    }
}

/// An address as the C library has it.
pub(crate) fn storage(address: SocketAddr) -> sockaddr_storage {
    // SAFETY: sockaddr_storage consists of integers.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    let place = &raw mut storage;
    match address {
        SocketAddr::V4(v4) => {
            let raw = sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: sockaddr_storage is larger than and aligned for every socket address.
            unsafe { place.cast::<sockaddr_in>().write(raw) };
        }
        SocketAddr::V6(v6) => {
            let raw = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { place.cast::<sockaddr_in6>().write(raw) };
        }
    }
    storage
}
