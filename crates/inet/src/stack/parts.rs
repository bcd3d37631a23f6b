//! Datagrams that are longer than a packet of their path: in parts (RFC 8200 4.5, RFC 791 3.2).
//!
//! Only the source cuts, for the path as it is known when each part is written, and no part is a packet of
//! its own (RFC 8021). The parts of a datagram are written one by one, as the link has room; the payload of
//! each is copied when it is written, so nothing is kept here but where the datagram has got to.
//!
//! Over IPv4 parts may be cut again: a datagram that does not fit is sent without "don't fragment", as Linux
//! sends it, since then it arrives where nobody says how narrow the path is.

use std::net::SocketAddr;

use quipu_wire::checksum::{Sum, sum};
use quipu_wire::ipv6_extension::FRAGMENT_LEN;
use quipu_wire::udp;

use super::egress::{Envelope, Part, ip_header};
use super::ingress::UDP;
use super::udp::Ends;
use super::{Carriage, Checksum, DatagramError, Departure, Stack, UdpId};

/// A datagram that is on its way in parts.
#[derive(Clone, Debug)]
pub struct Parts {
    source: u16,
    local: u16,
    to: SocketAddr,
    carriage: Carriage,
    identification: u32,
    /// Octets of the datagram, and how many of them have been written, its header included.
    len: usize,
    at: usize,
    /// The UDP header.
    header: [u8; udp::LEN],
}

impl Parts {
    /// Whether all of it has been written.
    pub fn is_done(&self) -> bool {
        self.at == self.len
    }

    /// What goes into a packet with so much room behind the IP header: which part it is, and its octets.
    fn next(&self, room: usize) -> (Option<Part>, usize) {
        let rest = self.len - self.at;
        let extra = if self.to.is_ipv6() { FRAGMENT_LEN } else { 0 };
        if self.at == 0 && rest <= room {
            // The path has become wider.
            return (None, rest);
        }
        let room = room - extra;
        let more = rest > room;
        // RFC 8200 4.5: all but the last are of whole units.
        let len = if more { room & !7 } else { rest };
        let (identification, offset) = (self.identification, self.at as u16);
        (Some(Part { identification, offset, more }), len)
    }
}

impl Stack {
    /// Begins a datagram of `len` octets, whose payload has this sum, that did not fit a packet
    /// ([`DatagramError::Long`]): [`Stack::compose_part`] writes its parts.
    ///
    /// # Errors
    /// See [`DatagramError`].
    pub fn cut_datagram(
        &mut self,
        now: u64,
        socket: UdpId,
        to: SocketAddr,
        carriage: Carriage,
        len: usize,
        payload: Sum,
    ) -> Result<Parts, DatagramError> {
        self.now = now;
        let Ends { source, local, to } = self.ends(socket, to, len)?;
        let own = self.addresses.get(local);
        let repr = udp::Repr { source, destination: to.port(), payload_len: len as u16 };
        let mut header = [0; udp::LEN];
        repr.emit(&mut header);
        // No link can do this: it sees no more than one part of what the sum is of.
        let len = udp::LEN + len;
        let pseudo = Sum::of_pseudo_header(own, to.ip(), UDP, len);
        let rest = pseudo.and(sum(&header)).and(payload);
        header[udp::CHECKSUM_AT..].copy_from_slice(&rest.partial().to_be_bytes());
        let field = Checksum { start: udp::CHECKSUM_AT as u16, at: udp::CHECKSUM_AT as u16 };
        Self::seal(&mut header, field);
        let identification = self.identifications.next(own, to.ip());
        Ok(Parts { source, local, to, carriage, identification, len, at: 0, header })
    }

    /// Writes the headers of the next part into `out`, which has room for the MTU and 14 octets. The user
    /// copies its payload, a range of the datagram's, behind them. To be called until the parts are done.
    ///
    /// # Errors
    /// [`DatagramError::Unresolved`]: to be called again. [`DatagramError::NoRoute`]: the rest is lost.
    pub fn compose_part(
        &mut self,
        now: u64,
        parts: &mut Parts,
        out: &mut [u8],
    ) -> Result<Departure, DatagramError> {
        self.now = now;
        let to = parts.to;
        let station = self.station(now, to.ip())?;
        let ip_header = ip_header(to.ip());
        let (part, len) = parts.next((self.path_mtu(to.ip()) - ip_header) as usize);
        let plain = Envelope::plain(parts.local, to.ip(), station, UDP);
        let envelope = Envelope { part, ..plain.carried(parts.carriage) };
        let start = self.write_ip(&envelope, len, out);
        let mut headers = start;
        if parts.at == 0 {
            headers += udp::LEN;
            out[start..headers].copy_from_slice(&parts.header);
            // A report quotes the ports, which only this one has.
            let own = SocketAddr::new(self.addresses.get(parts.local), parts.source);
            let extra = if part.is_some() && to.is_ipv6() { FRAGMENT_LEN } else { 0 };
            self.outstanding.sent(now, own, to, ip_header + (extra + len) as u32);
        }
        self.counters.sent += u64::from(station.is_some());
        let from = (parts.at.max(udp::LEN) - udp::LEN) as u64;
        parts.at += len;
        let payload = from..(parts.at - udp::LEN) as u64;
        Ok(Departure { payload, loops: station.is_none(), ..Departure::bare(headers) })
    }
}
