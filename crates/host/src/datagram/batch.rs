//! Several datagrams for one system call (`recvmmsg(2)`, `sendmmsg(2)`), those of one length to one
//! destination as a train, for which the kernel has one message (UDP_SEGMENT and UDP_GRO, udp(7)).

mod control;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::OwnedFd;

use libc::c_void;
use quipu_nic::{Arrival, Departure, GID_ROWS, MAX_DATAGRAM};

use crate::buffer::Buffer;
use crate::own::OwnAddresses;
use crate::sys::{RawAddr, canonical, receive_messages, send_messages, send_to};
use control::{CONTROL, Control, has_control, read_control, write_control};

/// Messages of one call, and datagrams of one that sends.
pub(super) const BATCH: usize = 32;
/// The longest train: the payload of the longest packet of IPv4.
const TRAIN: usize = 65_535 - 20 - 8;
/// Room for any message that comes in, and from one to the next: few lines of a cache keep the first bytes of
/// two of them.
const ROOM: usize = 65_536;
const ROOM_STRIDE: usize = ROOM + 64;
/// From one datagram that goes out to the next: each has lines of the cache of its own.
const SLOT: usize = MAX_DATAGRAM.next_multiple_of(64);
/// What a call needs in addition to the payload. The pointers in the headers are set for each call anew.
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

    /// Points a vector at the `len` bytes of a datagram.
    fn hold(&mut self, index: usize, payload: *mut u8, len: usize) {
        self.vectors[index] = libc::iovec { iov_base: payload.cast::<c_void>(), iov_len: len };
    }

    /// How many datagrams a message has.
    fn datagrams(&self, index: usize) -> usize {
        self.headers[index].msg_hdr.msg_iovlen
    }

    /// Points the header of a message at its parts: `vectors`, `control` bytes of control messages, an
    /// address of `name` bytes.
    fn aim(&mut self, index: usize, vectors: Range<usize>, control: usize, name: usize) {
        let header = &mut self.headers[index].msg_hdr;
        header.msg_iovlen = vectors.len();
        header.msg_iov = self.vectors[vectors].as_mut_ptr();
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

/// How many messages the next look at a socket asks for. Most looks of a poller are without result, and cost
/// less the less they ask for; behind two in a row that were not, there may be many more. A train is as much
/// as a look may bring: the program has to post receives for what comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    /// Looks in a row that brought something, and no train, up to 2.
    hits: u8,
}

impl Demand {
    /// So many.
    #[inline]
    fn count(self) -> usize {
        if self.hits < 2 { 1 } else { BATCH }
    }

    /// A look brought so many messages, and so many datagrams with them.
    #[inline]
    pub(super) fn note(&mut self, messages: usize, datagrams: usize) {
        let train = datagrams > messages;
        self.hits = if messages > 0 && !train { (self.hits + 1).min(2) } else { 0 };
    }
}

impl Incoming {
    pub(super) fn new() -> Self {
        Self { call: Call::new(), bytes: Buffer::new(BATCH * ROOM_STRIDE), count: 0 }
    }

    /// Receives what there is, up to what is demanded, without waiting; how many messages.
    pub(super) fn receive(&mut self, fd: &OwnedFd, demand: Demand) -> io::Result<usize> {
        self.count = 0;
        let most = demand.count();
        for (index, slot) in self.bytes.chunks_exact_mut(ROOM_STRIDE).take(most).enumerate() {
            let name = size_of::<libc::sockaddr_storage>();
            self.call.hold(index, slot.as_mut_ptr(), ROOM);
            self.call.aim(index, index..index + 1, CONTROL, name);
        }
        // SAFETY: each header points at live memory of the lengths it names, which nobody else uses
        // during the call.
        self.count = unsafe { receive_messages(fd, self.call.headers.as_mut_ptr(), most) }?;
        Ok(self.count)
    }

    /// The datagrams received last, with their bytes; those that are too long or came from nowhere are
    /// left out. `to` is where a datagram went whose control messages do not say it.
    pub(super) fn datagrams(&self, to: IpAddr) -> impl Iterator<Item = (Arrival, &[u8])> {
        let messages = (0..self.count).filter_map(move |index| self.message(index, to));
        let datagrams = messages.flat_map(|(arrival, size, bytes)| {
            let count = bytes.len().div_ceil(size).max(1);
            let piece = move |at: usize| &bytes[at * size..bytes.len().min((at + 1) * size)];
            (0..count).map(move |at| (arrival, piece(at)))
        });
        datagrams.filter(|(_, bytes)| bytes.len() <= MAX_DATAGRAM)
    }

    /// A message of those received last: where it came from, how long its datagrams are, all but the last of
    /// them, and its bytes.
    fn message(&self, index: usize, to: IpAddr) -> Option<(Arrival, usize, &[u8])> {
        let header = &self.call.headers[index];
        if header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0 {
            return None;
        }
        // SAFETY: the kernel has filled in the address as its family has it, in a structure large enough
        // for every one.
        let from = unsafe { RawAddr::decode((&raw const self.call.addresses[index]).cast()) }?;
        let mut arrival = Arrival { from: canonical(from), to, traffic_class: 0, hop_limit: 0 };
        let size = read_control(&header.msg_hdr, &mut arrival).unwrap_or(ROOM);
        let len = (header.msg_len as usize).min(ROOM);
        Some((arrival, size, &self.bytes[index * ROOM_STRIDE..][..len]))
    }
}

/// What sends the datagrams of a port.
pub(super) struct Ways<'a> {
    /// The socket at the engine's first address.
    pub(super) first: &'a OwnedFd,
    /// The one at all others, and whether it is of both families or of IPv4 alone.
    pub(super) others: Option<(&'a OwnedFd, bool)>,
    /// Those addresses.
    pub(super) own: &'a OwnAddresses,
    /// Whether trains are sent.
    pub(super) trains: bool,
}

/// Datagrams that go out.
pub(super) struct Outgoing {
    call: Box<Call>,
    bytes: Buffer,
    departures: Vec<Departure>,
    sent: usize,
    /// The headers of messages that are prepared and not sent.
    prepared: Range<usize>,
}

impl Outgoing {
    pub(super) fn new() -> Self {
        Self {
            call: Call::new(),
            bytes: Buffer::new(BATCH * SLOT),
            departures: Vec::with_capacity(BATCH),
            sent: 0,
            prepared: 0..0,
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

    /// Whether the next datagram that is left goes from the engine's first address.
    pub(super) fn goes_from_first(&self) -> bool {
        self.departures.get(self.sent).is_none_or(is_first)
    }

    /// Sends what is left, without waiting, in trains or one by one. Datagrams that the kernel refuses for
    /// good are dropped. `false` if the socket of the next one takes no more now.
    pub(super) fn send(&mut self, ways: &Ways<'_>) -> bool {
        let simple = matches!(&self.departures[self.sent..], [only] if !has_control(only));
        let joined = if ways.trains { train } else { alone };
        self.prepared = 0..0;
        while !self.is_done() {
            if !simple && self.prepared.is_empty() {
                self.prepare(ways, joined);
            }
            let fd = match ways.others {
                _ if self.goes_from_first() => Some(ways.first),
                others => others.map(|(fd, _)| fd),
            };
            let sent = match fd {
                Some(fd) if simple => self.send_last(fd, ways.own),
                Some(fd) => self.send_rest(fd),
                None => Err(io::ErrorKind::AddrNotAvailable.into()),
            };
            match sent {
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                // Without checksums by the interface, or on a path with a smaller MTU than it has, the
                // kernel takes no trains.
                Err(_) if !simple && self.call.datagrams(self.prepared.start) > 1 => {
                    self.prepare(ways, alone);
                }
                Err(error) => {
                    let to = self.departures[self.sent].to;
                    tracing::debug!(%to, %error, "a datagram is lost");
                    self.sent += 1;
                    self.prepared.start += 1;
                }
            }
        }
        true
    }

    /// Sends the last datagram, which needs no control messages, by the call that costs least; 1.
    fn send_last(&self, fd: &OwnedFd, own: &OwnAddresses) -> io::Result<usize> {
        let departure = &self.departures[self.sent];
        let bytes = &self.bytes[self.sent * SLOT..][..departure.len];
        let to = own.with_scope(departure.to, departure.sgid_index);
        send_to(fd, bytes, &RawAddr::new(to)).map(|_| 1)
    }

    /// Sends messages that are prepared; how many datagrams.
    fn send_rest(&mut self, fd: &OwnedFd) -> io::Result<usize> {
        let headers = &mut self.call.headers[self.prepared.clone()];
        // SAFETY: each header points at live memory of the lengths it names.
        let sent = unsafe { send_messages(fd, headers.as_mut_ptr(), headers.len()) }?;
        Ok(self.prepared.by_ref().take(sent).map(|index| self.call.datagrams(index)).sum())
    }

    /// Makes messages of what is left and goes by one socket, each of as many datagrams as `joined` finds at
    /// the front.
    fn prepare(&mut self, ways: &Ways<'_>, joined: fn(&[Departure]) -> usize) {
        let own = ways.own;
        let dual = ways.others.is_some_and(|(_, dual)| dual);
        let (mut index, mut first) = (0, self.sent);
        let from_first = self.goes_from_first();
        while let Some(departure) =
            self.departures.get(first).filter(|next| is_first(next) == from_first)
        {
            let count = joined(&self.departures[first..]);
            let source = (!from_first).then(|| own.row(departure.sgid_index));
            let source = source.map(|row| (row.ip, row.index, dual));
            let control = &mut self.call.controls[index];
            let control = write_control(departure, count > 1, source, control);
            let to = own.with_scope(departure.to, departure.sgid_index);
            let name = RawAddr::new(if from_first || !dual { to } else { mapped(to) });
            self.call.addresses[index] = *name.storage();
            for at in first..first + count {
                let payload = self.bytes[at * SLOT..].as_mut_ptr();
                self.call.hold(at, payload, self.departures[at].len);
            }
            self.call.aim(index, first..first + count, control, name.len());
            (index, first) = (index + 1, first + count);
        }
        self.prepared = 0..index;
    }
}

/// One datagram is a message.
fn alone(_: &[Departure]) -> usize {
    1
}

/// How many datagrams at the front can go as one message: all of one length but for the last, which may be
/// shorter.
fn train(departures: &[Departure]) -> usize {
    let [first, rest @ ..] = departures else { return 0 };
    let alike = |next: &Departure| {
        (next.to, next.sgid_index, next.traffic_class, next.hop_limit)
            == (first.to, first.sgid_index, first.traffic_class, first.hop_limit)
    };
    let (mut count, mut len) = (1, first.len);
    for next in rest.iter().filter(|_| !first.to.ip().is_multicast()) {
        len += next.len;
        if !alike(next) || next.len > first.len || len > TRAIN {
            break;
        }
        count += 1;
        if next.len < first.len {
            break;
        }
    }
    count
}

/// Whether a datagram goes from the engine's first address.
#[inline]
fn is_first(departure: &Departure) -> bool {
    departure.sgid_index < GID_ROWS
}

/// An address in the form that a socket of both families takes.
fn mapped(to: SocketAddr) -> SocketAddr {
    match to {
        SocketAddr::V4(v4) => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        SocketAddr::V6(_) => to,
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::{Duration, Instant};

    use super::*;

    /// Waits until so many octets lie in a socket. Over the loopback they are there at once, most often.
    fn await_octets(fd: &OwnedFd, octets: usize) {
        let (socket, begun) = (UdpSocket::from(fd.try_clone().unwrap()), Instant::now());
        socket.set_nonblocking(true).unwrap();
        // Each look is at what lies behind that of the look before.
        let look_from = |at| {
            crate::sys::set_option(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, at).unwrap();
        };
        look_from(0);
        let (mut seen, mut bytes) = (0, vec![0; 1 << 16]);
        while seen < octets {
            assert!(begun.elapsed() < Duration::from_secs(20), "{seen} of {octets} octets");
            seen += socket.peek(&mut bytes).unwrap_or(0);
        }
        look_from(-1);
    }

    #[test]
    fn who_waits_asks_for_one_datagram_and_who_is_busy_for_a_batch() {
        let (from, to) =
            (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let address = to.local_addr().unwrap();
        let fd = OwnedFd::from(to);
        let send = |marks: std::ops::Range<u8>| {
            marks.clone().for_each(|i| assert_eq!(from.send_to(&[i], address).unwrap(), 1));
            await_octets(&fd, marks.len());
        };
        send(0..5);
        let (mut incoming, mut demand) = (Incoming::new(), Demand::default());
        let mut look = || {
            let received = incoming.receive(&fd, demand).unwrap_or(0);
            demand.note(received, received);
            let first = incoming.datagrams(address.ip()).map(|(_, bytes)| bytes[0]).next();
            (received, first)
        };
        assert_eq!([(); 4].map(|()| look()), [(1, Some(0)), (1, Some(1)), (3, Some(2)), (0, None)]);
        send(5..7);
        assert_eq!(look(), (1, Some(5)), "the look before was in vain");
        let mut demand = Demand { hits: 2 };
        demand.note(1, 32);
        assert_eq!(demand.count(), 1, "behind a train there may be others");
    }

    pub(super) fn departure(to: SocketAddr, len: usize) -> Departure {
        let from = quipu_nic::QpNum(0);
        Departure { from, sgid_index: 0, to, traffic_class: 0, service_level: 0, hop_limit: 0, len }
    }

    /// A socket, as the kernel makes it or one that takes trains.
    fn socket(address: &str, trains: bool) -> (OwnedFd, SocketAddr) {
        let socket = UdpSocket::bind(address).unwrap();
        socket.set_nonblocking(true).unwrap();
        let address = socket.local_addr().unwrap();
        let fd = OwnedFd::from(socket);
        if trains {
            crate::sys::set_option(&fd, libc::SOL_UDP, libc::UDP_GRO, 1).unwrap();
        }
        (fd, address)
    }

    #[test]
    fn datagrams_of_one_length_to_one_destination_are_a_train() {
        let [a, b] = ["192.0.2.1:1", "192.0.2.1:2"].map(|to| to.parse().unwrap());
        let joined = |list: &[(SocketAddr, usize)]| {
            train(&list.iter().map(|&(to, len)| departure(to, len)).collect::<Vec<_>>())
        };
        assert_eq!(joined(&[]), 0);
        assert_eq!(joined(&[(a, 9)]), 1);
        assert_eq!(joined(&[(a, 9), (a, 9), (a, 5), (a, 5)]), 3, "the last may be shorter");
        assert_eq!(joined(&[(a, 9), (a, 10)]), 1);
        assert_eq!(joined(&[(a, 9), (b, 9)]), 1);
        assert_eq!(joined(&[(a, 4160); 20]), 15, "as many as fit into a packet");
        assert_eq!(joined(&[("239.0.0.1:1".parse().unwrap(), 9); 2]), 1);
        let mut other = [departure(a, 9); 2];
        other[1].traffic_class = 8;
        assert_eq!(train(&other), 1);
    }

    #[test]
    fn trains_arrive_as_the_datagrams_that_they_are_made_of() {
        for (address, trains) in [("127.0.0.1:0", true), ("127.0.0.1:0", false), ("[::1]:0", true)]
        {
            let (from, own) = socket(address, false);
            let (fd, to) = socket(address, trains);
            let (other_fd, other) = socket(address, trains);
            let mut outgoing = Outgoing::new();
            let lengths = [1000, 1000, 1000, 300, 300, 7, 4096, 4096, 4096, 1];
            let targets = lengths.iter().map(|len| if *len == 7 { other } else { to });
            for (mark, (to, len)) in targets.zip(lengths).enumerate() {
                let added = outgoing.add(|out| {
                    out[..len].fill(mark as u8);
                    Some(Departure { traffic_class: 8, ..departure(to, len) })
                });
                assert!(added);
            }
            let addresses = OwnAddresses::at(own.ip());
            let ways = Ways { first: &from, others: None, own: &addresses, trains: true };
            assert!(outgoing.send(&ways) && outgoing.is_done());
            let messages: Vec<_> = (0..4).map(|index| outgoing.call.datagrams(index)).collect();
            assert_eq!((messages, outgoing.prepared), (vec![4, 1, 1, 4], 4..4));
            let received = |fd, octets| {
                await_octets(fd, octets);
                let (mut incoming, mut found) = (Incoming::new(), Vec::new());
                while incoming.receive(fd, Demand { hits: 2 }).is_ok_and(|count| count > 0) {
                    found.extend(incoming.datagrams(to.ip()).map(|(arrival, bytes)| {
                        assert_eq!(arrival.from, own);
                        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                        (bytes[0], bytes.len())
                    }));
                }
                found
            };
            let sent: Vec<_> = (0..).zip(lengths).filter(|(_, len)| *len != 7).collect();
            let octets = sent.iter().map(|(_, len)| len).sum();
            assert_eq!((received(&fd, octets), received(&other_fd, 7)), (sent, vec![(5, 7)]));
        }
    }

    #[test]
    fn where_the_kernel_takes_no_trains_datagrams_go_one_by_one() {
        let (from, own) = socket("127.0.0.1:0", false);
        let (fd, to) = socket("127.0.0.1:0", true);
        // Without checksums there are no trains.
        crate::sys::set_option(&from, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
        let mut outgoing = Outgoing::new();
        for mark in 0..5 {
            outgoing.add(|out| {
                out[..100].fill(mark);
                Some(departure(to, 100))
            });
        }
        let addresses = OwnAddresses::at(own.ip());
        let ways = Ways { first: &from, others: None, own: &addresses, trains: true };
        assert!(outgoing.send(&ways) && outgoing.is_done());
        let messages: Vec<_> = (0..5).map(|index| outgoing.call.datagrams(index)).collect();
        assert_eq!((messages, outgoing.prepared), (vec![1; 5], 5..5));
        await_octets(&fd, 500);
        let mut incoming = Incoming::new();
        assert_eq!(incoming.receive(&fd, Demand { hits: 2 }).unwrap(), 5);
        let marks: Vec<u8> = incoming.datagrams(to.ip()).map(|(_, bytes)| bytes[0]).collect();
        assert_eq!(marks, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_datagram_that_is_empty_or_too_long_does_no_harm() {
        let (from, _) = socket("127.0.0.1:0", false);
        let (fd, to) = socket("127.0.0.1:0", true);
        let lengths = [0, 1, MAX_DATAGRAM, MAX_DATAGRAM + 1, TRAIN];
        for len in lengths {
            send_to(&from, &vec![7; len], &RawAddr::new(to)).unwrap();
        }
        await_octets(&fd, lengths.iter().sum());
        let mut incoming = Incoming::new();
        assert_eq!(incoming.receive(&fd, Demand { hits: 2 }).unwrap(), 5);
        let lengths: Vec<usize> = incoming.datagrams(to.ip()).map(|(_, b)| b.len()).collect();
        assert_eq!(lengths, [0, 1, MAX_DATAGRAM]);
    }
}
