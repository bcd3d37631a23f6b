//! Several datagrams for one system call (`recvmmsg(2)`, `sendmmsg(2)`).

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use libc::{c_int, c_void};
use quipu_nic::{Arrival, Departure, MAX_DATAGRAM};

use crate::buffer::Buffer;
use crate::sys::{RawAddr, receive_messages, send_messages, send_to};

/// Datagrams of one call.
pub(super) const BATCH: usize = 32;
/// Room for one datagram, and a byte to notice a longer one by.
const ROOM: usize = MAX_DATAGRAM + 1;
/// From one datagram to the next: each has lines of the cache of its own.
const SLOT: usize = ROOM.next_multiple_of(64);
/// Room for the control messages of one datagram, which need less than a hundred bytes.
const CONTROL: usize = 128;

/// Bytes of control messages, aligned as their headers must be.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// What a call needs beside the payload. The pointers in the headers are set for each call anew.
struct Call {
    headers: [libc::mmsghdr; BATCH],
    vectors: [libc::iovec; BATCH],
    addresses: [libc::sockaddr_storage; BATCH],
    controls: [Control; BATCH],
}

// SAFETY: the pointers in it are followed during a call only, which sets all of them first, to memory that
// belongs to it or to the batch that it is of.
unsafe impl Send for Call {}

impl Call {
    fn new() -> Box<Self> {
        // SAFETY: all members are plain data, for which all zeroes is a valid value.
        unsafe { Box::<Self>::new_zeroed().assume_init() }
    }

    /// Points the header of a datagram at its parts: `len` bytes at `payload`, `control` bytes of control
    /// messages, an address of `name` bytes.
    fn aim(&mut self, index: usize, payload: *mut u8, len: usize, control: usize, name: usize) {
        self.vectors[index] = libc::iovec { iov_base: payload.cast::<c_void>(), iov_len: len };
        let header = &mut self.headers[index].msg_hdr;
        header.msg_iov = &raw mut self.vectors[index];
        header.msg_iovlen = 1;
        header.msg_name = (&raw mut self.addresses[index]).cast();
        header.msg_namelen = name as libc::socklen_t;
        header.msg_control = (&raw mut self.controls[index]).cast();
        header.msg_controllen = control;
        header.msg_flags = 0;
    }
}

/// Datagrams that come in.
pub(super) struct Incoming {
    call: Box<Call>,
    bytes: Buffer,
    count: usize,
}

/// How many datagrams the next look at a socket asks for. Most looks of a poller are in vain, and cost
/// less the less they ask for; behind two in a row that were not, there may be many more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    /// Looks in a row that brought something, up to 2.
    hits: u8,
}

impl Demand {
    /// So many.
    #[inline]
    fn count(self) -> usize {
        if self.hits < 2 { 1 } else { BATCH }
    }

    /// A look brought so many.
    #[inline]
    pub(super) fn note(&mut self, received: usize) {
        self.hits = if received > 0 { (self.hits + 1).min(2) } else { 0 };
    }
}

impl Incoming {
    pub(super) fn new() -> Self {
        Self { call: Call::new(), bytes: Buffer::new(BATCH * SLOT), count: 0 }
    }

    /// Receives what there is, up to what is demanded, without waiting; how many.
    pub(super) fn receive(&mut self, fd: &OwnedFd, demand: Demand) -> io::Result<usize> {
        self.count = 0;
        let most = demand.count();
        for (index, slot) in self.bytes.chunks_exact_mut(SLOT).take(most).enumerate() {
            let name = size_of::<libc::sockaddr_storage>();
            self.call.aim(index, slot.as_mut_ptr(), ROOM, CONTROL, name);
        }
        // SAFETY: each header points at live memory of the lengths it names, which nobody else uses
        // during the call.
        self.count = unsafe { receive_messages(fd, self.call.headers.as_mut_ptr(), most) }?;
        Ok(self.count)
    }

    /// The datagrams received last, with their bytes; those that were too long or came from nowhere are
    /// left out. `to` is where a datagram went whose control messages do not say it.
    pub(super) fn datagrams(&self, to: IpAddr) -> impl Iterator<Item = (Arrival, &[u8])> {
        (0..self.count).filter_map(move |index| {
            let header = &self.call.headers[index];
            if header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0 {
                return None;
            }
            // SAFETY: the kernel has filled in the address as its family has it, in a structure large
            // enough for every one.
            let from = unsafe { RawAddr::decode((&raw const self.call.addresses[index]).cast()) }?;
            let mut arrival = Arrival { from, to, traffic_class: 0, hop_limit: 0 };
            read_control(&header.msg_hdr, &mut arrival);
            let len = (header.msg_len as usize).min(ROOM);
            Some((arrival, &self.bytes[index * SLOT..][..len]))
        })
    }
}

/// Reads the control messages of a datagram.
fn read_control(header: &libc::msghdr, arrival: &mut Arrival) {
    // SAFETY: the header is one that the kernel has filled in, its control buffer is alive.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    // SAFETY: the macros give pointers to whole headers inside of the buffer, or null.
    while let Some(message) = unsafe { next.as_ref() } {
        let data = {
            // SAFETY: as above.
            let start = unsafe { libc::CMSG_DATA(next) };
            let header_len = start as usize - next as usize;
            let len = message.cmsg_len.saturating_sub(header_len);
            // SAFETY: the kernel says that so many bytes of data follow the header, in the buffer.
            unsafe { std::slice::from_raw_parts(start, len) }
        };
        let int = || data.first_chunk().map(|bytes| c_int::from_ne_bytes(*bytes) as u8);
        match (message.cmsg_level, message.cmsg_type) {
            // One byte (ip(7)).
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                arrival.traffic_class = data.first().copied().unwrap_or(0);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                arrival.traffic_class = int().unwrap_or(0);
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                arrival.hop_limit = int().unwrap_or(0);
            }
            // struct in_pktinfo ends with the address in the header; struct in6_pktinfo begins with it.
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                if let Some(Some(octets)) = data.get(8..).map(|rest| rest.first_chunk::<4>()) {
                    arrival.to = IpAddr::from(*octets);
                }
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                if let Some(octets) = data.first_chunk::<16>() {
                    arrival.to = IpAddr::from(*octets);
                }
            }
            _ => {}
        }
        // SAFETY: as for the first.
        next = unsafe { libc::CMSG_NXTHDR(header, message) };
    }
}

/// Datagrams that go out.
pub(super) struct Outgoing {
    call: Box<Call>,
    bytes: Buffer,
    departures: Vec<Departure>,
    sent: usize,
}

impl Outgoing {
    pub(super) fn new() -> Self {
        Self {
            call: Call::new(),
            bytes: Buffer::new(BATCH * SLOT),
            departures: Vec::with_capacity(BATCH),
            sent: 0,
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.departures.clear();
        self.sent = 0;
    }

    /// Whether no more datagrams fit.
    pub(super) fn is_full(&self) -> bool {
        self.departures.len() == BATCH
    }

    /// Whether every datagram was sent or dropped.
    pub(super) fn is_done(&self) -> bool {
        self.sent == self.departures.len()
    }

    /// Adds what `write` puts into the room for the next datagram; `false` if there was none. Not to be
    /// called when full.
    pub(super) fn add(&mut self, write: impl FnOnce(&mut [u8]) -> Option<Departure>) -> bool {
        let room = &mut self.bytes[self.departures.len() * SLOT..][..MAX_DATAGRAM];
        let departure = write(room);
        self.departures.extend(departure);
        departure.is_some()
    }

    /// Sends what is left, without waiting. Datagrams that the kernel refuses for good are dropped.
    /// `false` if the socket takes no more now.
    pub(super) fn send(&mut self, fd: &OwnedFd, own: SocketAddr) -> bool {
        let simple = matches!(&self.departures[self.sent..], [only] if !has_control(only));
        if !simple {
            self.prepare(own);
        }
        while !self.is_done() {
            let sent = if simple { self.send_last(fd, own) } else { self.send_rest(fd) };
            match sent {
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) => {
                    let to = self.departures[self.sent].to;
                    tracing::debug!(%to, %error, "a datagram is lost");
                    self.sent += 1;
                }
            }
        }
        true
    }

    /// Sends the last datagram, which needs no control messages, by the call that costs least; 1.
    fn send_last(&self, fd: &OwnedFd, own: SocketAddr) -> io::Result<usize> {
        let departure = &self.departures[self.sent];
        let bytes = &self.bytes[self.sent * SLOT..][..departure.len];
        send_to(fd, bytes, &RawAddr::new(with_scope(departure.to, own))).map(|_| 1)
    }

    /// Sends datagrams whose headers are prepared; how many.
    fn send_rest(&mut self, fd: &OwnedFd) -> io::Result<usize> {
        let headers = &mut self.call.headers[self.sent..self.departures.len()];
        // SAFETY: each header points at live memory of the lengths it names.
        unsafe { send_messages(fd, headers.as_mut_ptr(), headers.len()) }
    }

    /// Points the headers at what is left.
    fn prepare(&mut self, own: SocketAddr) {
        for index in self.sent..self.departures.len() {
            let departure = self.departures[index];
            let control = write_control(&departure, &mut self.call.controls[index]);
            let name = RawAddr::new(with_scope(departure.to, own));
            self.call.addresses[index] = *name.storage();
            let payload = self.bytes[index * SLOT..].as_mut_ptr();
            self.call.aim(index, payload, departure.len, control, name.len());
        }
    }
}

/// A link-local address is reached over the interface of the engine's own.
fn with_scope(mut to: SocketAddr, own: SocketAddr) -> SocketAddr {
    if let (SocketAddr::V6(to), SocketAddr::V6(own)) = (&mut to, own)
        && to.ip().is_unicast_link_local()
    {
        to.set_scope_id(own.scope_id());
    }
    to
}

/// Whether a datagram needs control messages.
#[inline]
fn has_control(departure: &Departure) -> bool {
    departure.traffic_class != 0 || has_hops(departure)
}

/// The route knows better how far a single address is.
#[inline]
fn has_hops(departure: &Departure) -> bool {
    departure.hop_limit != 0 && departure.to.ip().is_multicast()
}

/// Writes the control messages for a datagram; how many bytes they take.
fn write_control(departure: &Departure, control: &mut Control) -> usize {
    let (level, class, hops) = match departure.to {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
    };
    let mut used = 0;
    if departure.traffic_class != 0 {
        used += put_int(&mut control.0[used..], level, class, departure.traffic_class);
    }
    if has_hops(departure) {
        used += put_int(&mut control.0[used..], level, hops, departure.hop_limit);
    }
    used
}

/// Writes a control message with an integer to the front of `out`, which is aligned for its header; the
/// space it takes, which keeps what follows aligned.
fn put_int(out: &mut [u8], level: c_int, kind: c_int, value: u8) -> usize {
    let value = c_int::from(value);
    let header_len = size_of::<libc::cmsghdr>();
    // SAFETY: computes from an integer.
    let space = unsafe { libc::CMSG_SPACE(size_of::<c_int>() as u32) } as usize;
    let mut header = MaybeUninit::<libc::cmsghdr>::zeroed();
    // SAFETY: plain data, for which all zeroes is a valid value.
    let header = unsafe { header.assume_init_mut() };
    header.cmsg_level = level;
    header.cmsg_type = kind;
    // SAFETY: computes from an integer.
    header.cmsg_len = unsafe { libc::CMSG_LEN(size_of::<c_int>() as u32) } as _;
    // It panics rather than write beyond the end; on 64-bit Linux the data stand right behind the header.
    let room = &mut out[..space];
    // SAFETY: there is room for the space of a message with an integer, of which the header is a part.
    unsafe { room.as_mut_ptr().cast::<libc::cmsghdr>().write_unaligned(*header) };
    room[header_len..header_len + size_of::<c_int>()].copy_from_slice(&value.to_ne_bytes());
    space
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn who_waits_asks_for_one_datagram_and_who_is_busy_for_a_batch() {
        let (from, to) =
            (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let address = to.local_addr().unwrap();
        let fd = OwnedFd::from(to);
        (0..5u8).for_each(|i| assert_eq!(from.send_to(&[i], address).unwrap(), 1));
        let (mut incoming, mut demand) = (Incoming::new(), Demand::default());
        let mut look = || {
            let received = incoming.receive(&fd, demand).unwrap_or(0);
            demand.note(received);
            let first = incoming.datagrams(address.ip()).map(|(_, bytes)| bytes[0]).next();
            (received, first)
        };
        // On loopback they are there as soon as they are sent.
        assert_eq!([(); 4].map(|()| look()), [(1, Some(0)), (1, Some(1)), (3, Some(2)), (0, None)]);
        (5..7u8).for_each(|i| assert_eq!(from.send_to(&[i], address).unwrap(), 1));
        assert_eq!(look(), (1, Some(5)), "the look before was in vain");
    }

    #[test]
    fn a_control_message_is_read_as_it_was_written() {
        let to: SocketAddr = "[::1]:1".parse().unwrap();
        let mut departure =
            Departure { from: quipu_nic::QpNum(0), to, traffic_class: 0xa8, hop_limit: 0, len: 0 };
        let mut control = Control([0; CONTROL]);
        let len = write_control(&departure, &mut control);
        // SAFETY: plain data, for which all zeroes is a valid value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = len as _;
        let mut arrival = Arrival { from: to, to: to.ip(), traffic_class: 0, hop_limit: 0 };
        read_control(&header, &mut arrival);
        assert_eq!(arrival.traffic_class, 0xa8);
        departure.traffic_class = 0;
        departure.hop_limit = 9;
        assert_eq!(write_control(&departure, &mut control), 0, "the route's own for one address");
        departure.traffic_class = 4;
        departure.to = "[ff02::1]:1".parse().unwrap();
        header.msg_controllen = write_control(&departure, &mut control) as _;
        read_control(&header, &mut arrival);
        assert_eq!((arrival.traffic_class, arrival.hop_limit), (4, 9));
    }
}
