//! Socket addresses in the form that the kernel takes, and back.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{c_int, socklen_t};

/// An address in the form that the kernel takes.
pub(crate) struct RawAddr {
    storage: libc::sockaddr_storage,
    len: socklen_t,
}

impl RawAddr {
    /// The kernel's form of `address`.
    pub(crate) fn new(address: SocketAddr) -> Self {
        // SAFETY: sockaddr_storage is plain data, for which all zeroes is a valid value.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let len = match address {
            SocketAddr::V4(v4) => {
                let raw = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: sockaddr_storage is larger than and aligned for every socket address.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                let raw = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: as above.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
                size_of::<libc::sockaddr_in6>()
            }
        };
        Self { storage, len: len as socklen_t }
    }

    /// The address and its length; valid as long as this value.
    pub(crate) fn as_parts(&self) -> (*const libc::sockaddr, socklen_t) {
        ((&raw const self.storage).cast(), self.len)
    }

    /// The structure.
    pub(crate) fn storage(&self) -> &libc::sockaddr_storage {
        &self.storage
    }

    /// How much of it the address takes.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Reads an address that the kernel filled in, `None` unless it is IPv4 or IPv6.
    ///
    /// # Safety
    ///
    /// `raw` is null or points to a socket address that is as long as its family says.
    pub(crate) unsafe fn decode(raw: *const libc::sockaddr) -> Option<SocketAddr> {
        if raw.is_null() {
            return None;
        }
        // SAFETY: by the promise of the caller there is at least a family.
        match c_int::from(unsafe { (*raw).sa_family }) {
            libc::AF_INET => {
                // SAFETY: the family says that this is a sockaddr_in.
                let v4 = unsafe { raw.cast::<libc::sockaddr_in>().read_unaligned() };
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: the family says that this is a sockaddr_in6.
                let v6 = unsafe { raw.cast::<libc::sockaddr_in6>().read_unaligned() };
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                let port = u16::from_be(v6.sin6_port);
                Some(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// An address as the peer would give it: IPv4 that came through a socket of both families is IPv4.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(ip) => SocketAddr::new(ip.into(), v6.port()),
            None => address,
        },
        SocketAddr::V4(_) => address,
    }
}
