//! The sockets that identifiers are bound to.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use quipu_cm::{IdKey, Options};

use super::{Manager, address, udp};
use crate::sys;

/// Datagrams taken from a socket before other work gets its turn.
const DATAGRAMS_PER_TURN: usize = 64;
/// Longer than any look-up and answer.
const DATAGRAM_BYTES: usize = 512;

/// A TCP socket that is bound, and perhaps listens; or a UDP socket.
pub(super) struct Socket {
    pub(super) fd: OwnedFd,
    pub(super) datagram: bool,
    /// What it is bound to.
    pub(super) local: SocketAddr,
    /// Whether epoll reports on it.
    pub(super) watched: bool,
}

impl Socket {
    /// A socket that is bound to an address of this host.
    pub(super) fn bind(addr: SocketAddr, datagram: bool, options: Options) -> io::Result<Self> {
        let fd = sys::with_more_descriptors(|| {
            if datagram { udp::socket(addr.ip()) } else { sys::tcp_socket(addr.ip()) }
        })?;
        if addr.is_ipv6()
            && let Some(only) = options.v6_only
        {
            sys::set_option(&fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, only.into())?;
        }
        if datagram {
            udp::report_destination(&fd, addr.ip())?;
        }
        let reuse = || sys::set_option(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
        // Of UDP sockets it would make one that several share, of which the last would get everything.
        if options.reuse && !datagram {
            reuse()?;
        }
        match sys::bind(&fd, addr) {
            // Where all that is left of the last user of a TCP port is connections that have their
            // end behind them, the port can be had by asking for it in this way; where somebody
            // listens there, it cannot.
            Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE) && !datagram => {
                reuse()?;
                sys::bind(&fd, addr)?;
            }
            bound => bound?,
        }
        let local = sys::local_address(&fd)?;
        Ok(Self { fd, datagram, local, watched: false })
    }
}

impl Manager {
    /// Sends a look-up, or an answer to one. What is lost is sent again.
    pub(super) fn send_datagram(
        &mut self,
        via: IdKey,
        from: Option<SocketAddr>,
        to: SocketAddr,
        bytes: &[u8],
    ) {
        let index = via.index() as usize;
        let known = self.cm.has_id(via);
        let socket = self.sockets.get(index).and_then(Option::as_ref).filter(|_| known);
        if socket.is_none()
            && let Some(from) = from
        {
            // The listener is gone, and with it its socket: the port is free.
            let sent = Socket::bind(from, true, Options::default())
                .and_then(|socket| udp::send(&socket.fd, None, to, bytes));
            if let Err(error) = sent {
                tracing::debug!(%error, "cannot send a reply");
            }
            return;
        }
        if from.is_none() && socket.is_some_and(|socket| !socket.watched) {
            // The first look-up: from now on answers are waited for, from that peer alone, and
            // the system tells if nobody has the port.
            let connected = socket.map(|socket| sys::connect(&socket.fd, to));
            if let Some(Err(error)) = connected {
                tracing::debug!(%error, "cannot send a service ID request");
            }
            if let Err(error) = self.watch_socket(via) {
                tracing::warn!(%error, "cannot receive replies");
            }
        }
        let Some(socket) = self.sockets.get(index).and_then(Option::as_ref) else { return };
        let wildcard = socket.local.ip().is_unspecified();
        let sent = match from {
            None => sys::send(&socket.fd, bytes).map(drop),
            Some(from) => {
                let source = wildcard.then_some(from.ip());
                udp::send(&socket.fd, source, address::for_socket(to, socket.local), bytes)
            }
        };
        match sent {
            Ok(()) => self.sights.sent(&socket.fd, from, to, bytes),
            Err(error) => tracing::debug!(%error, "cannot send a datagram"),
        }
    }

    /// Takes datagrams that wait at the socket of an identifier.
    pub(super) fn receive_datagrams(&mut self, key: IdKey) -> bool {
        let mut buffer = [0; DATAGRAM_BYTES];
        for turn in 0..DATAGRAMS_PER_TURN {
            let Some(socket) = self.sockets.get(key.index() as usize).and_then(Option::as_ref)
            else {
                return turn > 0;
            };
            match udp::receive(&socket.fd, &mut buffer) {
                Ok((len, from, to)) => {
                    let mut local = socket.local;
                    if let Some(to) = to {
                        local.set_ip(to);
                    }
                    // What is on one link alone came by the link of its sender.
                    if let (SocketAddr::V6(local), SocketAddr::V6(from)) = (&mut local, from)
                        && local.ip().is_unicast_link_local()
                        && local.scope_id() == 0
                    {
                        local.set_scope_id(from.scope_id());
                    }
                    let (local, from) = (address::canonical(local), address::canonical(from));
                    self.sights.received(from, local, &buffer[..len]);
                    self.cm.handle_datagram(key, local, from, &buffer[..len]);
                }
                Err(error) if error.raw_os_error() == Some(libc::ECONNREFUSED) => {
                    self.cm.handle_refused(key);
                }
                Err(_) => return turn > 0,
            }
        }
        true
    }
}
