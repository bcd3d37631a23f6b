//! Bare IPv6 packets in UDP, between Quipus, without any privilege (specs/qpip-udp-link.md).
//!
//! An inner address says where its owner is ([`place`](super::place)), so there is no table of peers; those
//! whose inner address does not say it are listed by the user. A packet from anywhere else than its
//! source address says is dropped. The kernel fragments what is too long for the path.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::aligned::Aligned;
use super::inner::{DESTINATION, address_at, bare, hand_over};
use super::interface::{Name, control, mtu};
use super::messages::{BATCH, Messages, Piece};
use super::place::{own_address, place_of};
use super::queue::Queue;
use super::{ETHERNET, Features, Frame, LinkError, LinkSpec, Outgoing, PacketLink, Peer, Refusal};
use crate::address::{find_address, host_addresses};
use crate::sys;

/// The longest packet, where the interface would carry longer ones.
const MAX_MTU: u32 = 65_000;
/// The shortest that every link must carry (RFC 8200 5).
const MIN_MTU: u32 = 1_280;
/// Packets that wait for the kernel.
const SLOTS: usize = 64;
/// Messages that one system call brings.
const RECEIVED: usize = 16;
/// Room for a message: as many datagrams as the kernel puts into one.
const INBOX_SLOT: usize = 65_536;
/// The most octets of datagrams in one message.
const MAX_TRAIN: usize = 65_000;
/// What the socket's buffers are to hold, if the system allows it.
const BUFFER: libc::c_int = 4 << 20;

/// Packets that go one by one after the kernel has refused several in one message. What it minds may pass, as
/// a route that was away, or be one peer's, as a narrow path: others are not to pay for it for ever. Where it
/// refuses all, one needless call for so many is no matter.
const SINGLY: usize = 1024;

/// A link over a UDP socket.
pub(super) struct UdpLink {
    fd: OwnedFd,
    features: Features,
    waiting: Queue<Note>,
    /// The queue of the interface is full.
    congested: bool,
    /// So many packets go one by one: the kernel has refused to take several datagrams in one message.
    singly: usize,
    messages: Box<Messages>,
    inbox: Aligned,
    places: HashMap<Ipv6Addr, SocketAddr>,
    inners: HashMap<SocketAddr, Ipv6Addr>,
}

/// A packet that waits.
#[derive(Clone, Copy, Default)]
struct Note {
    len: usize,
    to: Option<SocketAddr>,
}

impl UdpLink {
    pub(super) fn open(
        spec: &LinkSpec,
        bind: SocketAddr,
        peers: &[Peer],
    ) -> Result<Self, LinkError> {
        let fd = socket(bind).map_err(LinkError::at(spec, "binding the socket"))?;
        let features = features(&fd, bind).map_err(LinkError::at(spec, "finding the interface"))?;
        Ok(Self {
            fd,
            waiting: Queue::new(SLOTS, features.mtu as usize + ETHERNET),
            congested: false,
            features,
            singly: 0,
            messages: Messages::new(),
            inbox: Aligned::new(RECEIVED * INBOX_SLOT),
            places: peers.iter().map(|peer| (peer.inner, peer.place)).collect(),
            inners: peers.iter().map(|peer| (bare(peer.place), peer.inner)).collect(),
        })
    }

    /// Where the owner of an inner address is.
    fn place(&self, inner: Ipv6Addr) -> Option<SocketAddr> {
        let listed = self.places.get(&inner).copied();
        // A socket of IPv6 has no derived address, and reaches none.
        let derived = || self.features.address.and_then(|_| place_of(inner)).map(SocketAddr::V4);
        listed.or_else(derived)
    }

    /// Sends what waits, several packets to one place in one message.
    fn drain(&mut self) -> io::Result<()> {
        self.congested = false;
        while !self.waiting.is_empty() {
            let pieces = trains(&self.waiting, self.singly);
            let (error, pieces) = match self.messages.send(&self.fd, pieces) {
                Ok(sent) => {
                    self.waiting.remove(sent);
                    self.singly = self.singly.saturating_sub(sent);
                    continue;
                }
                Err(refused) => refused,
            };
            match Refusal::of(&error) {
                Refusal::Interrupted => {}
                Refusal::Full => break,
                Refusal::Congested => {
                    self.congested = true;
                    break;
                }
                Refusal::Gone => return Err(error),
                // A path narrower than the interface, an interface that computes no checksums, an old kernel.
                Refusal::Frame if pieces > 1 => self.singly = SINGLY,
                Refusal::Frame => {
                    tracing::debug!(%error, "the UDP link lost a packet");
                    self.waiting.remove(1);
                    self.singly = self.singly.saturating_sub(1);
                }
            }
        }
        Ok(())
    }
}

impl PacketLink for UdpLink {
    fn features(&self) -> &Features {
        &self.features
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn receive(&mut self, limit: usize, each: &mut dyn FnMut(&Frame<'_>)) -> io::Result<usize> {
        let mut count = 0;
        while count < limit {
            let asked = (limit - count).min(RECEIVED);
            let outcome = self.messages.receive(&self.fd, &mut self.inbox, INBOX_SLOT, asked);
            let received = match outcome {
                Ok(received) => received,
                Err(error) => match Refusal::of(&error) {
                    Refusal::Gone => return Err(error),
                    _ => break,
                },
            };
            for index in 0..received {
                let bytes = &self.inbox[index * INBOX_SLOT..][..INBOX_SLOT];
                let message = self.messages.received(index);
                count += message.map_or(0, |m| hand_over(m, bytes, &self.inners, each)).max(1);
            }
            if received < asked {
                break;
            }
        }
        Ok(count)
    }

    fn slot(&mut self) -> Option<&mut [u8]> {
        self.waiting.free()
    }

    fn send(&mut self, frame: Outgoing) {
        let Some(bytes) = self.waiting.free() else { return };
        let Some(inner) = address_at(&bytes[..frame.len], DESTINATION) else { return };
        match self.place(inner) {
            Some(to) => self.waiting.push(Note { len: frame.len, to: Some(to) }),
            None => tracing::debug!(%inner, "no peer of the UDP link has this address"),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.drain()
    }

    fn wants_writable(&self) -> bool {
        !self.waiting.is_empty() && !self.congested
    }

    fn is_congested(&self) -> bool {
        self.congested
    }
}

/// The socket of a link at `bind`.
fn socket(bind: SocketAddr) -> io::Result<OwnedFd> {
    let fd = sys::udp_socket(bind.ip())?;
    sys::bind(&fd, bind)?;
    // Less than asked for, or one datagram after the other, will do.
    let _ = sys::set_option(&fd, libc::SOL_SOCKET, libc::SO_SNDBUF, BUFFER);
    let _ = sys::set_option(&fd, libc::SOL_SOCKET, libc::SO_RCVBUF, BUFFER);
    let _ = sys::set_option(&fd, libc::SOL_UDP, libc::UDP_GRO, 1);
    Ok(fd)
}

fn features(fd: &OwnedFd, bind: SocketAddr) -> io::Result<Features> {
    let interface = find_address(&host_addresses()?, bind.ip())
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EADDRNOTAVAIL))?
        .interface;
    let headers = if bind.is_ipv4() { 28 } else { 48 };
    let mtu = mtu(&control()?, Name::new(&interface)?)?;
    let address = match sys::local_address(fd)? {
        SocketAddr::V4(place) => Some(own_address(place)),
        SocketAddr::V6(_) => None,
    };
    Ok(Features {
        mtu: mtu.saturating_sub(headers).clamp(MIN_MTU, MAX_MTU),
        hardware: None,
        checksum: false,
        segment: 0,
        address,
        interface: String::new(),
        enter: Vec::new(),
        vlan: None,
    })
}

/// The packets that wait, for one call; behind the first `singly`, packets to one place that may share a
/// message do.
fn trains(waiting: &Queue<Note>, singly: usize) -> impl Iterator<Item = Piece<'_>> {
    // Of the message that a packet may join: where to, how long its packets are, how long it is; none that
    // ends with a shorter packet.
    let mut open: Option<(Option<SocketAddr>, usize, usize)> = None;
    (0..waiting.len().min(BATCH)).filter_map(move |index| {
        let (slot, Note { len, to }) = waiting.get(index)?;
        let joins = index >= singly
            && open.is_some_and(|(place, size, total)| {
                place == to && len <= size && total + len <= MAX_TRAIN
            });
        open = match open {
            Some((_, size, total)) if joins => (len == size).then_some((to, size, total + len)),
            _ if index < singly => None,
            _ => Some((to, len, len)),
        };
        Some(Piece { bytes: &slot[..len], to, joins })
    })
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::super::inner::HEADER;
    use super::*;

    fn queue(lens: &[(usize, u16)]) -> Queue<Note> {
        let mut queue = Queue::new(SLOTS, 2000);
        for (len, port) in lens {
            assert!(queue.free().is_some());
            let to = SocketAddr::from(([127, 0, 0, 1], *port));
            queue.push(Note { len: *len, to: Some(to) });
        }
        queue
    }

    #[test]
    fn equal_packets_to_one_place_share_a_message() {
        let lens =
            [(100, 1), (100, 1), (60, 1), (60, 1), (61, 1), (60, 1), (60, 2), (60, 2), (60, 1)];
        let queue = queue(&lens);
        let joins: Vec<_> = trains(&queue, 0).map(|piece| piece.joins).collect();
        assert_eq!(joins, [false, true, true, false, false, true, false, true, false]);
        assert!(trains(&queue, SINGLY).all(|piece| !piece.joins));
        let joins: Vec<_> = trains(&queue, 1).map(|piece| piece.joins).collect();
        assert_eq!(joins, [false, false, true, false, false, true, false, true, false]);
        let lens: Vec<_> = trains(&queue, 0).map(|piece| piece.bytes.len()).collect();
        assert_eq!(lens, [100, 100, 60, 60, 61, 60, 60, 60, 60]);
    }

    #[test]
    fn a_refusal_of_several_packets_in_one_message_is_for_a_while() {
        let bind = "127.0.0.1:0".parse().unwrap();
        let spec = LinkSpec::Udp { bind, peers: Vec::new() };
        let mut link = UdpLink::open(&spec, bind, &[]).unwrap();
        let (IpAddr::V6(own), _) = link.features.address.unwrap() else { panic!() };
        let send = |link: &mut UdpLink, count: usize| {
            for _ in 0..count {
                let slot = link.slot().unwrap();
                slot[DESTINATION..HEADER].copy_from_slice(&own.octets());
                link.send(Outgoing { len: HEADER, ..Outgoing::default() });
            }
            link.flush().unwrap();
            assert!(link.waiting.is_empty());
        };
        send(&mut link, 2);
        assert_eq!(link.singly, 0);
        // The kernel refuses trains without checksums.
        sys::set_option(&link.fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
        send(&mut link, 2);
        assert_eq!(link.singly, SINGLY - 2, "both went");
        send(&mut link, 3);
        assert_eq!(link.singly, SINGLY - 5);
        sys::set_option(&link.fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, 0).unwrap();
        while link.singly > 0 {
            send(&mut link, 2);
        }
        send(&mut link, 2);
        assert_eq!(link.singly, 0, "they share a message again");
    }

    #[test]
    fn a_message_is_no_longer_than_the_kernel_takes() {
        let mut queue = Queue::new(SLOTS, 20_000);
        for _ in 0..4 {
            queue.push(Note { len: 20_000, to: None });
        }
        let joins: Vec<_> = trains(&queue, 0).map(|piece| piece.joins).collect();
        assert_eq!(joins, [false, true, true, false]);
    }
}
