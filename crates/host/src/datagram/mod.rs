//! Datagrams of unreliable datagram queue pairs: kernel UDP sockets, one for each port of their numbers,
//! none of which ever waits.
//!
//! A socket that takes no more bytes holds up the queue pairs of its port alone. What was written by the
//! adapter and not taken by the kernel, a batch at most, is kept until it is.

mod batch;
mod groups;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use libc::c_int;
use quipu_nic::{QpNum, Time};

use self::batch::{Demand, Incoming, Outgoing};
use self::groups::Groups;
use crate::net::numbers::Numbers;
use crate::net::token::Token;
use crate::sys::{self, Epoll};
use crate::tap::Adapter;

/// Bytes that a socket may keep for us. The kernel grants less, unless its administrator allows more
/// (`net.core.rmem_max`) or is whom it asks; what does not fit is lost.
const RECEIVE_BYTES: c_int = 8 << 20;
/// Batches that one look at a socket takes.
const BATCHES_PER_TURN: usize = 4;
/// Looks in vain after which a socket is no longer tried without asking epoll.
const PATIENCE: u32 = 4096;
/// As how many of those a look in vain counts where something came otherwise, by shared memory or a stream: a
/// program whose two ends have met by datagrams goes on by that. Not so once a socket has had `STEADY` looks
/// that found something: then its program goes on by both.
const MISSES_BESIDE: u32 = 256;
const STEADY: u32 = 64;
/// So many sockets are tried without asking epoll.
const HOT_MAX: usize = 4;

const READ: c_int = libc::EPOLLIN;
const WRITE: c_int = libc::EPOLLOUT;

/// The socket of one port.
struct Socket {
    fd: OwnedFd,
    port: u16,
    /// It receives what is sent to multicast groups, and sends nothing.
    of_groups: bool,
    /// Whether trains are sent by it. They come several times as fast as single datagrams, and a receiver
    /// with a small buffer that pauses for a moment would lose some. Its buffer is taken to be as large as
    /// that of this one.
    trains: bool,
    /// What the kernel has not taken yet. While there is something, nothing more is sent.
    held: Option<Box<Outgoing>>,
    /// Looks in vain since the last datagram.
    misses: u32,
    /// Looks that found something since it was last given up.
    hits: u32,
    /// What the next look asks for.
    demand: Demand,
}

impl Socket {
    /// Behind a look, which may have been in vain, `beside` one at something else that was not.
    #[inline]
    fn lose_patience(&mut self, beside: bool) {
        if beside && self.misses > 0 && self.hits < STEADY {
            self.misses = self.misses.saturating_add(MISSES_BESIDE);
        }
        if self.misses >= PATIENCE {
            self.hits = 0;
        }
    }

    /// The socket of a port of queue pairs.
    fn open(own: SocketAddr, interface: u32, port: u16) -> io::Result<Self> {
        let fd = sys::udp_socket(own.ip())?;
        // Where that does not work, single addresses still do.
        let _ = sys::send_multicast_by(&fd, own.ip(), interface);
        let mut address = own;
        address.set_port(port);
        sys::bind(&fd, address)?;
        Self::tuned(fd, own, port, false)
    }

    fn tuned(fd: OwnedFd, own: SocketAddr, port: u16, of_groups: bool) -> io::Result<Self> {
        // Asking for more than the limit gives the limit; only the administrator may pass it.
        if sys::set_option(&fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BYTES).is_err() {
            sys::set_option(&fd, libc::SOL_SOCKET, libc::SO_RCVBUF, RECEIVE_BYTES)?;
        }
        sys::tell_of_headers(&fd, own.ip())?;
        // Where the kernel has no trains, datagrams come one by one.
        let _ = sys::set_option(&fd, libc::SOL_UDP, libc::UDP_GRO, 1);
        // The kernel says what it sets aside, for its own needs, too: twice as much.
        let trains = sys::socket_option(&fd, libc::SO_RCVBUF)? >= RECEIVE_BYTES;
        let (held, demand) = (None, Demand::default());
        Ok(Self { fd, port, of_groups, trains, held, misses: PATIENCE, hits: 0, demand })
    }

    /// The numbers of the queue pairs that send by this socket.
    fn numbers(&self) -> std::ops::RangeInclusive<QpNum> {
        QpNum::new(self.port, 0)..=QpNum::new(self.port, u8::MAX)
    }
}

/// The UDP side of an engine.
pub(crate) struct Datagrams {
    /// The engine's address; port 0.
    own: SocketAddr,
    /// The index of its interface.
    interface: u32,
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
    pub(crate) fn new(own: SocketAddr, interface: u32, epoll: Arc<Epoll>) -> Self {
        Self {
            own,
            interface,
            epoll,
            groups: Groups::default(),
            sockets: Vec::new(),
            numbers: Numbers::default(),
            incoming: None,
            outgoing: None,
        }
    }

    /// Whether a port should be opened before a number is taken.
    pub(crate) fn wants_port(&self) -> bool {
        self.numbers.wants_port()
    }

    /// Opens the socket for a port whose TCP side belongs to this engine. The numbers behind it are then
    /// numbers for datagram queue pairs.
    ///
    /// # Errors
    ///
    /// Somebody else has the port, or the kernel has no descriptors.
    pub(crate) fn open(&mut self, port: u16) -> io::Result<()> {
        let (own, interface) = (self.own, self.interface);
        let socket = sys::with_more_descriptors(|| Socket::open(own, interface, port))?;
        self.add(socket)?;
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

    /// Joins a multicast group, to which datagrams are sent at `port`.
    ///
    /// # Errors
    ///
    /// The kernel has no way to the group, or refuses it, or somebody has the port for himself.
    pub(crate) fn join(&mut self, group: IpAddr, port: u16) -> io::Result<()> {
        groups::check_route(self.own, self.interface, SocketAddr::new(group, port))?;
        let (sockets, interface) = (&self.sockets, self.interface);
        if self.groups.join(group, interface, |index| &sockets[index].fd)? {
            return Ok(());
        }
        let own = self.own;
        let fd = sys::with_more_descriptors(|| groups::open(own, port))?;
        let socket = Socket::tuned(fd, own, port, true)?;
        // One that is refused as well is not kept.
        sys::change_membership(&socket.fd, group, interface, sys::Membership::Join)?;
        let index = self.add(socket)?;
        self.groups.add(group, index);
        Ok(())
    }

    /// Leaves a multicast group.
    pub(crate) fn leave(&mut self, group: IpAddr) {
        let sockets = &self.sockets;
        self.groups.leave(group, self.interface, |index| &sockets[index].fd);
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

    /// The socket of a queue pair.
    fn position(&self, number: QpNum) -> Option<usize> {
        let port = number.port();
        self.sockets.iter().position(|socket| socket.port == port && !socket.of_groups)
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
        while let Some(number) = adapter.next_datagrams() {
            any = true;
            self.take_turn(adapter, now, number);
        }
        any
    }

    /// Sends a batch for one queue pair, unless its socket is full: it goes on when that is not any more.
    fn take_turn(&mut self, adapter: &mut Adapter, now: Time, number: QpNum) {
        let Some(index) = self.position(number) else { return };
        if self.sockets[index].held.is_some() {
            return;
        }
        let mut batch = self.outgoing.take().unwrap_or_else(|| Box::new(Outgoing::new()));
        batch.clear();
        let port = self.sockets[index].port;
        let from = SocketAddr::new(self.own.ip(), port);
        while !batch.is_full()
            && batch.add(|out| {
                let departure = adapter.transmit_datagram(now, number, out)?;
                let ends = (from, departure.to);
                adapter.probe_mut().datagram_passed(true, ends, &out[..departure.len]);
                Some(departure)
            })
        {}
        let may_have_more = batch.is_full();
        let socket = &self.sockets[index];
        if batch.send(&socket.fd, self.own, socket.trains) {
            self.outgoing = Some(batch);
            if may_have_more {
                adapter.resume_datagrams(number..=number);
            }
        } else {
            self.sockets[index].held = Some(batch);
            self.watch(index, READ | WRITE);
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
        let socket = &mut self.sockets[index];
        let Some(mut batch) = socket.held.take() else { return };
        if !batch.send(&socket.fd, self.own, socket.trains) {
            socket.held = Some(batch);
            return;
        }
        adapter.resume_datagrams(socket.numbers());
        self.outgoing = Some(batch);
        self.watch(index, READ);
    }

    /// Whether polls try sockets: any had something lately.
    #[inline]
    pub(crate) fn is_hot(&self) -> bool {
        self.sockets.iter().take(HOT_MAX).any(|socket| socket.misses < PATIENCE)
    }

    /// Tries the sockets that had something lately. True if any had. `beside`: something came by shared
    /// memory or a stream.
    #[inline]
    pub(crate) fn poll_hot(&mut self, adapter: &mut Adapter, now: Time, beside: bool) -> bool {
        let mut any = false;
        for index in 0..self.sockets.len().min(HOT_MAX) {
            if self.sockets[index].misses < PATIENCE {
                any |= self.receive(adapter, now, index);
                self.sockets[index].lose_patience(beside);
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
                for (arrival, bytes) in incoming.datagrams(self.own.ip()) {
                    datagrams += 1;
                    // The port of groups does not lead to single queue pairs.
                    if socket.of_groups && !arrival.to.is_multicast() {
                        continue;
                    }
                    let ends = (arrival.from, SocketAddr::new(arrival.to, socket.port));
                    adapter.probe_mut().datagram_passed(false, ends, bytes);
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
        let own = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut datagrams = Datagrams::new(own, 1, Arc::new(Epoll::new().unwrap()));
        // No group at all, so that the kernel refuses it.
        assert!(datagrams.join([127, 0, 0, 2].into(), 20_804).is_err());
        assert!(!datagrams.is_in_use());
    }
}
