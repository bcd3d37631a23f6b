//! Addresses of identifiers: which are of this host, and from which one a peer is reached.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use quipu_cm::{IdKey, PortSpace};

use super::{Manager, put, udp};
use crate::cm::socket::Socket;
use crate::error::EngineError;
use crate::sys;

pub(super) use crate::sys::canonical;

/// An address in the form that a socket bound to `local` takes.
pub(super) fn for_socket(address: SocketAddr, local: SocketAddr) -> SocketAddr {
    match (address, local) {
        (SocketAddr::V4(v4), SocketAddr::V6(_)) => {
            SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
        }
        _ => address,
    }
}

/// The wildcard stands for this host.
fn to_loopback(mut dst: SocketAddr) -> SocketAddr {
    match dst.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => dst.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => dst.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    dst
}

/// The own address from which the system reaches `dst`; port 0. `from`: this address, if `dst` can be reached
/// from it.
fn source_for(dst: SocketAddr, from: Option<SocketAddr>) -> io::Result<SocketAddr> {
    let probe = udp::socket(dst.ip())?;
    if let Some(from) = from {
        sys::bind(&probe, from)?;
    }
    // A datagram socket only looks up the route. Any port will do.
    let mut to = dst;
    to.set_port(dst.port().max(1));
    sys::connect(&probe, to)?;
    let mut src = sys::local_address(&probe)?;
    src.set_port(0);
    Ok(src)
}

impl Manager {
    /// Binds an identifier to an address and port.
    ///
    /// # Errors
    ///
    /// It is bound already; the address is not of this host, or the port is taken.
    pub(crate) fn bind_addr(&mut self, key: IdKey, addr: SocketAddr) -> Result<(), EngineError> {
        self.cm.check_unbound(key)?;
        let (space, datagram) = self.cm.kind(key)?;
        // Sockets could be bound to them; an adapter's interface has no such address.
        if addr.ip().is_multicast() || addr.ip() == Ipv4Addr::BROADCAST {
            return Err(EngineError::Address(io::Error::from_raw_os_error(libc::EADDRNOTAVAIL)));
        }
        if space == PortSpace::Tcp && self.is_on_link(addr.ip()) {
            self.cm.bind(key, addr)?;
            return Ok(self.cm.use_link(key, self.bare.protocol)?);
        }
        let options = *self.cm.options(key)?;
        if !self.may_bind(addr) {
            // As the kernel's rdma_cm says of an address that no device has.
            return Err(EngineError::Address(io::Error::from_raw_os_error(libc::ENODEV)));
        }
        let socket = Socket::bind(addr, datagram, options).map_err(EngineError::Address)?;
        self.cm.bind(key, socket.local)?;
        put(&mut self.sockets, key.index(), socket);
        Ok(())
    }

    /// Finds out how `dst` is reached, and binds to `src` or to an address that reaches it. An event
    /// says what came of it.
    ///
    /// # Errors
    ///
    /// It is not the time for that, or `src` cannot be bound to.
    pub(crate) fn resolve_addr(
        &mut self,
        key: IdKey,
        src: Option<SocketAddr>,
        dst: SocketAddr,
    ) -> Result<(), EngineError> {
        self.cm.check_resolvable(key)?;
        let dst = to_loopback(dst);
        if let Some(src) = src
            && self.cm.bound(key)?.is_none()
        {
            self.bind_addr(key, src)?;
        }
        let bound = self.cm.bound(key)?.map(|src| src.ip());
        let (space, _) = self.cm.kind(key)?;
        if space == PortSpace::Tcp && self.goes_over_link(key, bound, dst.ip()) {
            return self.resolve_over_link(key, dst);
        }
        let found = match self.cm.bound(key)? {
            // Addresses of two families fail at once, wildcard or not, as with the kernel's rdma_cm.
            Some(src) if src.is_ipv4() != dst.is_ipv4() => {
                return Err(EngineError::Address(io::Error::from_raw_os_error(libc::EINVAL)));
            }
            Some(src) if !src.ip().is_unspecified() => Ok(src),
            Some(wildcard) => self.source(dst).map(|mut src| {
                src.set_port(wildcard.port());
                src
            }),
            None => self.source(dst).and_then(|src| self.bind_source(key, src)),
        };
        let found = found.map_err(|error| error.raw_os_error().unwrap_or(libc::EHOSTUNREACH));
        Ok(self.cm.resolved(key, dst, found)?)
    }

    /// As [`source_for`], among the addresses that the user lets the engine have. A group that no route leads
    /// to is reached from the device's address.
    fn source(&self, dst: SocketAddr) -> io::Result<SocketAddr> {
        let (own, found) = (self.own.source(0), source_for(dst, None));
        let same_family = own.is_ipv4() == dst.is_ipv4();
        match found {
            Err(_) if dst.ip().is_multicast() && same_family => Ok(own),
            Ok(source) if !self.may_reach(source, dst) => {
                let chosen = same_family.then(|| source_for(dst, Some(own)));
                chosen.unwrap_or_else(|| Err(io::Error::from_raw_os_error(libc::ENODEV)))
            }
            found => found,
        }
    }

    /// Whether an identifier may be bound to an address of this host: plain iWARP goes by any, and on this
    /// host everybody is reached by the loopback.
    fn may_bind(&self, addr: SocketAddr) -> bool {
        let ip = addr.ip();
        let other = self.own.is_of_host(ip) && !ip.is_loopback() && !ip.is_unspecified();
        !other || self.cm.asks_plain() || self.cm.may_use(addr)
    }

    /// Whether a peer may be reached from an address of this host.
    fn may_reach(&self, source: SocketAddr, dst: SocketAddr) -> bool {
        self.own.is_of_host(dst.ip()) || self.may_bind(source)
    }

    /// Keeps the port of an identifier, whose socket was used up, until it connects again.
    pub(super) fn hold(&mut self, key: IdKey) {
        if self.cm.is_on_link(key) {
            // The adapter keeps no port for anybody.
            return;
        }
        match self.bind_again(key) {
            Ok(socket) => put(&mut self.sockets, key.index(), socket),
            // It is tried again when it is needed.
            Err(error) => tracing::debug!(%error, "a port cannot be kept"),
        }
    }

    /// A new socket for an identifier whose first one was used up.
    pub(super) fn bind_again(&mut self, key: IdKey) -> io::Result<Socket> {
        let wrong = |_| io::Error::from(io::ErrorKind::NotConnected);
        let src = self.cm.bound(key).map_err(wrong)?.ok_or(io::ErrorKind::NotConnected)?;
        let options = *self.cm.options(key).map_err(wrong)?;
        Socket::bind(src, false, options)
    }

    fn bind_source(&mut self, key: IdKey, src: SocketAddr) -> io::Result<SocketAddr> {
        match self.bind_addr(key, src) {
            Ok(()) => Ok(self.cm.bound(key).ok().flatten().unwrap_or(src)),
            Err(EngineError::Address(error)) => Err(error),
            Err(_) => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use quipu_cm::{Config, Options, Param};

    use super::*;
    use crate::sys::Epoll;

    /// The port is the identifier's until it is destroyed, also between two tries.
    #[test]
    fn a_connection_that_is_refused_keeps_its_port() {
        const SECOND: u64 = 1_000_000_000;
        let own = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let addresses = crate::own::OwnAddresses::at(own.ip());
        let bind = |at| Socket::bind(at, false, Options::default());
        let closed = bind(own).unwrap();
        let epoll = Arc::new(Epoll::new().unwrap());
        let mut manager = Manager::new(Config::default(), addresses, epoll, false).unwrap();
        let (channel, _) = manager.create_channel().unwrap();
        let id = manager.cm.create_id(channel, PortSpace::Tcp, 2, 7).unwrap();
        manager.resolve_addr(id, None, closed.local).unwrap();
        let port = manager.cm.bound(id).unwrap().unwrap();
        manager.cm.resolve_route(id).unwrap();
        manager.cm.connect(0, id, &Param::default()).unwrap();
        // On one host it is refused at once.
        manager.settle(0);
        for now in [SECOND, 2 * SECOND] {
            let taken = bind(port).err().and_then(|error| error.raw_os_error());
            assert_eq!(taken, Some(libc::EADDRINUSE));
            manager.handle_timeout(now);
        }
        sys::listen(&closed.fd, 1).unwrap();
        manager.handle_timeout(3 * SECOND);
        assert_eq!(sys::accept(&closed.fd).unwrap().1, port);
    }
}
