//! Datagrams of unreliable datagram queue pairs: kernel UDP sockets for each port of their numbers, none of
//! which ever waits. One has the engine's first address and, if the engine has others, one has all of them:
//! it says with control messages from which address it sends, which costs more.
//!
//! A socket that takes no more bytes holds up the queue pairs of its port alone. What was written by the
//! adapter and not taken by the kernel, a batch at most, is kept until it is.

mod batch;
mod groups;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use libc::c_int;
use quipu_nic::{Departure, Probe, QpId, QpNum, Time};
use quipu_observe::Mark;

use self::batch::{Demand, Incoming, Outgoing, Ways};
use self::groups::Groups;
use crate::net::numbers::Numbers;
use crate::net::token::Token;
use crate::own::OwnAddresses;
use crate::sys::{self, Epoll};
use crate::tap::Adapter;

/// Bytes that a socket may keep for us. The kernel grants less, unless its administrator allows more
/// (`net.core.rmem_max`) or is whom it asks; what does not fit is lost.
const RECEIVE_BYTES: c_int = 8 << 20;
/// Batches that one look at a socket takes.
const BATCHES_PER_TURN: usize = 4;
/// Looks that find nothing after which a socket is no longer tried without asking epoll.
const PATIENCE: u32 = 4096;
/// As how many of those a look in vain counts where something came otherwise, by shared memory or a stream: a
/// program whose two ends have met by datagrams goes on by that. Not so once a socket has had `STEADY` looks
/// that found something: then its program goes on by both.
const MISSES_IF_ELSEWHERE: u32 = 256;
const STEADY: u32 = 64;
/// So many sockets are tried without asking epoll.
const HOT_MAX: usize = 8;

const READ: c_int = libc::EPOLLIN;
const WRITE: c_int = libc::EPOLLOUT;

/// What a socket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The queue pairs of a port, by the engine's first address.
    First,
    /// The same, by all its other addresses. The one for the first address stands before it.
    Others,
    /// It receives what is sent to multicast groups, and sends nothing.
    Groups,
}

/// A socket of one port.
struct Socket {
    fd: OwnedFd,
    port: u16,
    role: Role,
    /// Whether it takes IPv6: one for other addresses than the first takes IPv4 as well then.
    v6: bool,
    /// Whether trains are sent by it. They come several times as fast as single datagrams, and a receiver
    /// with a small buffer that pauses for a moment would lose some. Its buffer is taken to be as large as
    /// that of this one.
    trains: bool,
    /// What the kernel has not taken yet. While there is something, nothing more is sent.
    held: Option<Box<Outgoing>>,
    /// Looks that find nothing since the last datagram.
    misses: u32,
    /// Looks that found something since it was last given up.
    hits: u32,
    /// What the next look asks for.
    demand: Demand,
}

impl Socket {
    /// Counts after a look, which may have found nothing. `elsewhere`: something came by another way.
    #[inline]
    fn lose_patience(&mut self, elsewhere: bool) {
        if elsewhere && self.misses > 0 && self.hits < STEADY {
            self.misses = self.misses.saturating_add(MISSES_IF_ELSEWHERE);
        }
        if self.misses >= PATIENCE {
            self.hits = 0;
        }
    }

    /// The socket of a port of queue pairs at the first address.
    fn open(own: &OwnAddresses, port: u16) -> io::Result<Self> {
        let mut address = own.source(0);
        let fd = sys::udp_socket(address.ip())?;
        // Where that does not work, single addresses still do.
        let _ = sys::send_multicast_by(&fd, address.ip(), own.row(0).index);
        address.set_port(port);
        if !own.is_restricted() {
            // Next to the one for all others, which this user alone may have.
            sys::set_option(&fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
        }
        sys::bind(&fd, address)?;
        Self::tuned(fd, address.ip(), port, Role::First)
    }

    /// The socket of the same port at all other addresses.
    fn open_others(at: SocketAddr) -> io::Result<Self> {
        let (fd, port) = (sys::udp_socket(at.ip())?, at.port());
        sys::take_both_families(&fd, at.ip())?;
        sys::set_option(&fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
        sys::bind(&fd, at)?;
        groups::name_destinations(&fd, at.ip())?;
        let socket = Self::tuned(fd, at.ip(), port, Role::Others)?;
        if at.is_ipv6() {
            // Those of IPv4, which come through this socket as well.
            sys::tell_of_headers(&socket.fd, Ipv4Addr::UNSPECIFIED.into())?;
        }
        Ok(socket)
    }

    fn tuned(fd: OwnedFd, ip: IpAddr, port: u16, role: Role) -> io::Result<Self> {
        // Asking for more than the limit gives the limit; only the administrator may pass it.
        if sys::set_option(&fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BYTES).is_err() {
            sys::set_option(&fd, libc::SOL_SOCKET, libc::SO_RCVBUF, RECEIVE_BYTES)?;
        }
        sys::tell_of_headers(&fd, ip)?;
        // Where the kernel has no trains, datagrams come one by one.
        let _ = sys::set_option(&fd, libc::SOL_UDP, libc::UDP_GRO, 1);
        // The kernel says what it sets aside, for its own needs, too: twice as much.
        let trains = sys::socket_option(&fd, libc::SO_RCVBUF)? >= RECEIVE_BYTES;
        let (held, demand) = (None, Demand::default());
        let v6 = ip.is_ipv6();
        Ok(Self { fd, port, role, v6, trains, held, misses: PATIENCE, hits: 0, demand })
    }

    /// The numbers of the queue pairs that send by this socket.
    fn numbers(&self) -> std::ops::RangeInclusive<QpNum> {
        QpNum::new(self.port, 0)..=QpNum::new(self.port, u8::MAX)
    }
}

/// The UDP side of an engine.
pub(crate) struct Datagrams {
    own: Arc<OwnAddresses>,
    epoll: Arc<Epoll>,
    groups: Groups,
    sockets: Vec<Socket>,
    numbers: Numbers,
    /// Made with the first socket.
    incoming: Option<Incoming>,
    /// The batch that is filled next.
    outgoing: Option<Box<Outgoing>>,
}

impl Datagrams {
    /// Without sockets yet.
    pub(crate) fn new(own: Arc<OwnAddresses>, epoll: Arc<Epoll>) -> Self {
        Self {
            own,
            epoll,
            groups: Groups::default(),
            sockets: Vec::new(),
            numbers: Numbers::default(),
            incoming: None,
            outgoing: None,
        }
    }

    /// The engine has other addresses from now on.
    pub(crate) fn set_addresses(&mut self, own: Arc<OwnAddresses>) {
        self.own = own;
    }

    /// Whether a port should be opened before a number is taken.
    pub(crate) fn wants_port(&self) -> bool {
        self.numbers.wants_port()
    }

    /// Opens the sockets for a port whose TCP side belongs to this engine. Its queue pair numbers are then
    /// free for datagram queue pairs.
    ///
    /// # Errors
    ///
    /// Somebody else has the port, or the kernel has no descriptors.
    pub(crate) fn open(&mut self, port: u16) -> io::Result<()> {
        let own = Arc::clone(&self.own);
        let first = sys::with_more_descriptors(|| Socket::open(&own, port))?;
        let others = (!own.is_restricted()).then(|| {
            let open = || sys::at_first_that_works(&own.listening(port), Socket::open_others);
            sys::with_more_descriptors(open)
        });
        let others = others.transpose()?;
        self.add(first)?;
        if let Some(others) = others {
            self.add(others)?;
        }
        self.numbers.add_port(port);
        Ok(())
    }

    /// Adds a socket; its position.
    fn add(&mut self, socket: Socket) -> io::Result<usize> {
        let index = self.sockets.len();
        self.epoll.add(&socket.fd, READ, Token::Datagrams(index as u32).bits())?;
        self.sockets.push(socket);
        self.incoming.get_or_insert_with(Incoming::new);
        Ok(index)
    }

    /// Joins a multicast group, to which datagrams are sent at `port`, on the network of the address in the
    /// row `sgid_index` of the GID table. A group that is joined for several rows is left as often.
    ///
    /// # Errors
    ///
    /// The kernel has no way to the group, or refuses it, or somebody has the port for himself.
    pub(crate) fn join(&mut self, group: IpAddr, port: u16, sgid_index: u8) -> io::Result<()> {
        let (own, interface) = (self.own.source(sgid_index), self.own.row(sgid_index).index);
        groups::check_route(own, interface, SocketAddr::new(group, port))?;
        let sockets = &self.sockets;
        if self.groups.join(group, interface, |index| &sockets[index].fd)? {
            return Ok(());
        }
        let fd = sys::with_more_descriptors(|| groups::open(own, port))?;
        let socket = Socket::tuned(fd, own.ip(), port, Role::Groups)?;
        // One that is refused as well is not kept.
        sys::change_membership(&socket.fd, group, interface, sys::Membership::Join)?;
        let index = self.add(socket)?;
        self.groups.add(group, interface, index);
        Ok(())
    }

    /// Leaves a multicast group on the network of a row of the GID table.
    pub(crate) fn leave(&mut self, group: IpAddr, sgid_index: u8) {
        let (sockets, interface) = (&self.sockets, self.own.row(sgid_index).index);
        self.groups.leave(group, interface, |index| &sockets[index].fd);
    }

    /// A number for a new queue pair.
    pub(crate) fn take_number(&mut self) -> Option<QpNum> {
        self.numbers.take()
    }

    /// Gives a number back; `false` if it is not one of these.
    pub(crate) fn give_back_number(&mut self, number: QpNum) -> bool {
        let ours = self.position(number).is_some();
        if ours {
            self.numbers.give_back(number);
        }
        ours
    }

    /// The socket of a queue pair at the first address. The socket for all other addresses follows
    /// it, if there is one.
    fn position(&self, number: QpNum) -> Option<usize> {
        let port = number.port();
        self.sockets.iter().position(|socket| socket.port == port && socket.role == Role::First)
    }

    /// The socket for other addresses than the first, of the port of the one for the first.
    fn others(&self, first: usize) -> Option<&Socket> {
        self.sockets.get(first + 1).filter(|socket| socket.role == Role::Others)
    }

    /// Sends what is left of a batch for the queue pairs of a port. `None` once it is sent, or the position
    /// of the socket that takes no more now.
    fn send(&self, first: usize, batch: &mut Outgoing) -> Option<usize> {
        let (socket, others) = (&self.sockets[first], self.others(first));
        let others = others.map(|others| (&others.fd, others.v6));
        let ways = Ways { first: &socket.fd, others, own: &self.own, trains: socket.trains };
        (!batch.send(&ways)).then(|| if batch.goes_from_first() { first } else { first + 1 })
    }

    /// Whether there are sockets.
    #[inline]
    pub(crate) fn is_in_use(&self) -> bool {
        !self.sockets.is_empty()
    }

    /// Sends what the adapter has to send. True if it had something.
    #[inline]
    pub(crate) fn transmit(&mut self, adapter: &mut Adapter, now: Time) -> bool {
        let mut any = false;
        while let Some(sender) = adapter.next_datagrams() {
            any = true;
            self.take_turn(adapter, now, sender);
        }
        any
    }

    /// Sends a batch for one queue pair, unless its socket is full: it goes on when that is not any more.
    fn take_turn(&mut self, adapter: &mut Adapter, now: Time, (id, number): (QpId, QpNum)) {
        let Some(index) = self.position(number) else { return };
        if self.sockets[index].held.is_some() {
            return;
        }
        let own = Arc::clone(&self.own);
        let mut batch = self.outgoing.take().unwrap_or_else(|| Box::new(Outgoing::new()));
        batch.clear();
        let port = self.sockets[index].port;
        while !batch.is_full()
            && batch.add(|out| {
                let departure = adapter.transmit_datagram(now, id, out)?;
                let from = SocketAddr::new(own.row(departure.sgid_index).ip, port);
                if adapter.probe_mut().watches() {
                    let Departure { traffic_class, service_level, .. } = departure;
                    let lane = adapter.lane_of(service_level);
                    let mark = Mark { traffic_class, service_level, lane };
                    let ends = (from, departure.to);
                    let bytes = &out[..departure.len];
                    adapter.probe_mut().datagram_passed(true, ends, bytes, mark);
                }
                Some(departure)
            })
        {}
        let may_have_more = batch.is_full();
        match self.send(index, &mut batch) {
            None => {
                self.outgoing = Some(batch);
                if may_have_more {
                    adapter.resume_sender(id);
                }
            }
            Some(full) => {
                self.sockets[index].held = Some(batch);
                self.watch(full, READ | WRITE);
            }
        }
    }

    /// Changes what epoll reports for a socket.
    fn watch(&self, index: usize, interest: c_int) {
        let token = Token::Datagrams(index as u32).bits();
        // The descriptor is in the set as long as the engine lives, so this cannot fail but for lack of
        // kernel memory.
        let _ = self.epoll.modify(&self.sockets[index].fd, interest, token);
    }

    /// Looks at a socket that epoll named. True if it had something.
    pub(crate) fn ready(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        index: u32,
        events: u32,
    ) -> bool {
        let index = index as usize;
        if index >= self.sockets.len() {
            return false;
        }
        if events & libc::EPOLLERR as u32 != 0 {
            // A datagram that went astray; it is not known which.
            let _ = sys::socket_error(&self.sockets[index].fd);
        }
        if events & WRITE as u32 != 0 {
            self.flush(adapter, index);
        }
        let mut any = false;
        for _ in 0..BATCHES_PER_TURN {
            if !self.receive(adapter, now, index) {
                break;
            }
            any = true;
        }
        any
    }

    /// Goes on with a socket that takes bytes again.
    fn flush(&mut self, adapter: &mut Adapter, index: usize) {
        self.watch(index, READ);
        let of_others = usize::from(self.sockets[index].role == Role::Others);
        let first = index - of_others;
        let Some(mut batch) = self.sockets[first].held.take() else { return };
        if let Some(full) = self.send(first, &mut batch) {
            self.sockets[first].held = Some(batch);
            return self.watch(full, READ | WRITE);
        }
        adapter.resume_datagrams(self.sockets[first].numbers());
        self.outgoing = Some(batch);
    }

    /// Whether polls try sockets: any had something lately.
    #[inline]
    pub(crate) fn is_hot(&self) -> bool {
        self.sockets.iter().take(HOT_MAX).any(|socket| socket.misses < PATIENCE)
    }

    /// Tries the sockets that had something lately. True if any had. `elsewhere`: something came by shared
    /// memory or a stream.
    #[inline]
    pub(crate) fn poll_hot(&mut self, adapter: &mut Adapter, now: Time, elsewhere: bool) -> bool {
        let mut any = false;
        for index in 0..self.sockets.len().min(HOT_MAX) {
            if self.sockets[index].misses < PATIENCE {
                any |= self.receive(adapter, now, index);
                self.sockets[index].lose_patience(elsewhere);
            }
        }
        any
    }

    /// As if something had come, for so many looks.
    #[cfg(test)]
    pub(crate) fn heat(&mut self, hits: u32) {
        self.sockets.iter_mut().for_each(|socket| (socket.misses, socket.hits) = (0, hits));
    }

    /// Receives a batch. True if there was anything.
    fn receive(&mut self, adapter: &mut Adapter, now: Time, index: usize) -> bool {
        let (Some(incoming), socket) = (&mut self.incoming, &mut self.sockets[index]) else {
            return false;
        };
        match incoming.receive(&socket.fd, socket.demand) {
            Ok(messages) if messages > 0 => {
                socket.misses = 0;
                socket.hits = socket.hits.saturating_add(1);
                let mut datagrams = 0;
                for (arrival, bytes) in incoming.datagrams(self.own.row(0).ip) {
                    datagrams += 1;
                    // The port of groups does not lead to single queue pairs.
                    if socket.role == Role::Groups && !arrival.to.is_multicast() {
                        continue;
                    }
                    let ends = (arrival.from, SocketAddr::new(arrival.to, socket.port));
                    let traffic_class = arrival.traffic_class;
                    let mark = Mark { traffic_class, ..Mark::default() };
                    adapter.probe_mut().datagram_passed(false, ends, bytes, mark);
                    adapter.handle_datagram(now, &arrival, bytes);
                }
                socket.demand.note(messages, datagrams);
                true
            }
            // An error is about a datagram that went astray.
            _ => {
                socket.demand.note(0, 0);
                socket.misses = socket.misses.saturating_add(1);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_is_refused_leaves_no_socket_behind() {
        let own = OwnAddresses::at([127, 0, 0, 1].into());
        let mut datagrams = Datagrams::new(own, Arc::new(Epoll::new().unwrap()));
        // No group at all, so that the kernel refuses it.
        assert!(datagrams.join([127, 0, 0, 2].into(), 20_804, 0).is_err());
        assert!(!datagrams.is_in_use());
    }
}
