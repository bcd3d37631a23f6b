//! Links: how engines of one host find each other, share memory and ring each other's bell.
//!
//! A bell is one byte on the socket of the link: sending it never waits, and what a peer does with its
//! end concerns no other link.
//!
//! An engine that listens at a TCP port also listens at an abstract UNIX address made from the same
//! IP address and port, or from the port alone if it listens at all addresses of the host. An engine that
//! wants to connect finds out by trying whether its peer is on this host. Only processes of the same user are
//! let in; all others go by TCP. One link serves all
//! queue pairs of two engines (two links if both called at the same moment, which does no harm).
//! A link ends when its socket does, which the kernel sees to however a process dies; or when the process
//! does, whose socket a child of fork may have inherited.

mod handshake;
mod identity;
pub(crate) mod life;
mod listeners;
mod peer_memory;
pub(crate) mod probe;
pub(crate) mod segment;
mod setup;
pub(crate) mod socket;
#[cfg(test)]
mod tests;
mod windows;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::c_int;
use quipu_mem::Segment;
use quipu_nic::{ConnId, Fault, Gid, LINK_MESSAGE_MAX, LinkId, LinkMessage, PeerMemory, Time};

use self::handshake::{BELL, CARRIED, EngineName, Message};
use self::peer_memory::ProcessMemory;
use crate::accounts;
use crate::handle_map::HandleMap;
use crate::net::listener::{Acceptor, Resting};
use crate::net::table::Table;
use crate::net::token::{Slot, Token};
use crate::own::OwnAddresses;
use crate::sys::{self, Epoll};
use crate::tap::Adapter;

pub(crate) use self::identity::Identity;

/// How long two engines may take to agree; longer, and the peer is reached by TCP.
const SETUP_NS: u64 = 2_000_000_000;
/// Callers that may be in the middle of that at once.
const SETUP_MAX: usize = 256;
/// Messages, of 4 KB at most, that wait while a peer reads none; a peer that lets more pile up is cut off.
const OUTBOX_MAX: usize = 65_536;
/// Messages taken from one link before others get their turn.
const MESSAGES_PER_TURN: usize = 64;
/// Address space that the arenas of all peers may take together.
const MAPPED_MAX: usize = 8 << 40;

/// A message of the adapter's has one byte in front.
const _: () = assert!(LINK_MESSAGE_MAX < socket::MAX_MESSAGE);

const READ: c_int = libc::EPOLLIN | libc::EPOLLRDHUP;

/// A connection that waits for a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    /// The adapter's name for it.
    pub(crate) conn: ConnId,
    /// Whom it wants to reach.
    pub(crate) peer: SocketAddr,
    /// The row of the GID table with the address from which it does.
    pub(crate) sgid_index: u8,
}

/// What became of the wish to reach a peer by a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// There is a link.
    Linked(LinkId),
    /// One is being made; the adapter or the list of the given-up hears of its outcome.
    Pending,
    /// No engine of this host and user is there.
    Elsewhere,
}

/// How far a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The callee waits for the caller's first word.
    AwaitKnock,
    /// Waiting for the other's introduction.
    AwaitHello,
    /// Waiting for the other to have mapped the arena and tried its access.
    AwaitReady,
    /// Waiting to hear whether the access may be used.
    AwaitAdmission,
    /// It stands.
    Up(LinkId),
}

/// A link, or one in the making.
struct Peer {
    fd: OwnedFd,
    interest: c_int,
    state: State,
    /// Whom it was called for; `None` on the side that was called.
    target: Option<SocketAddr>,
    engine: Option<EngineName>,
    /// What it says its address is, which was found to be one of this host; `None` for all of this host.
    gid: Option<Gid>,
    pid: libc::pid_t,
    /// Its process, which the epoll set has too, once the link stands and if the kernel lets one watch it.
    process: Option<OwnedFd>,
    deadline: Time,
    own_arena: Option<Segment>,
    /// What the other has given, until the adapter gets it.
    peer_arena: Option<Segment>,
    /// Bytes of that, also afterwards.
    mapped: usize,
    /// Whether the other has proved that it has access to this process's memory.
    admitted: bool,
    alive: Arc<AtomicBool>,
    waiting: Vec<Waiting>,
    outbox: VecDeque<Vec<u8>>,
}

/// Why a link ends.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("the peer is gone")]
    Gone,
    #[error("the peer sent a message that no engine of this version sends")]
    Nonsense,
    #[error("the handshake took too long")]
    TimedOut,
    #[error("the peer does not read its messages")]
    Deaf,
    #[error("the peer did not finish an access to memory that is no longer registered")]
    Restless,
    #[error("cannot create shared memory: {0}")]
    NoMemory(io::Error),
    #[error(transparent)]
    Adapter(#[from] Fault),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The process at the other end of a socket, if it is of the same user.
fn check_user(fd: &OwnedFd) -> io::Result<libc::pid_t> {
    let peer = socket::peer_credentials(fd)?;
    if !accounts::is_own_user(peer.uid) {
        return Err(io::Error::other("the peer belongs, or may belong, to another user"));
    }
    Ok(peer.pid)
}

/// Access to this process's own memory, if the kernel allows even that.
pub(crate) fn own_memory() -> Option<Arc<dyn PeerMemory>> {
    probe::on_oneself().ok()?;
    let alive = Arc::new(AtomicBool::new(true));
    Some(Arc::new(ProcessMemory::new(std::process::id() as libc::pid_t, alive)))
}

/// The links of an engine.
pub(crate) struct Links {
    identity: Identity,
    own: Arc<OwnAddresses>,
    epoll: Arc<Epoll>,
    /// By index; `None` where one had to be given up.
    listeners: Vec<Option<OwnedFd>>,
    /// Of these, those that nobody looks at now.
    resting: Resting<u32>,
    acceptor: Option<Acceptor>,
    peers: Table<Peer>,
    by_link: HandleMap<LinkId, Slot>,
    by_target: HashMap<SocketAddr, Slot>,
    in_setup: Vec<Slot>,
    /// Connections that must go by TCP after all.
    given_up: Vec<Waiting>,
    /// Cleared for good when shared memory turns out not to work here.
    usable: bool,
    buffer: Box<[u8; socket::MAX_MESSAGE]>,
}

impl Links {
    /// Without links yet. `usable`: whether shared memory is wanted and works.
    pub(crate) fn new(
        identity: Identity,
        own: Arc<OwnAddresses>,
        epoll: Arc<Epoll>,
        usable: bool,
    ) -> Self {
        Self {
            identity,
            own,
            epoll,
            listeners: Vec::new(),
            resting: Resting::default(),
            acceptor: None,
            peers: Table::new(),
            by_link: HandleMap::default(),
            by_target: HashMap::new(),
            in_setup: Vec::new(),
            given_up: Vec::new(),
            usable,
            buffer: Box::new([0; socket::MAX_MESSAGE]),
        }
    }

    /// The engine has other addresses from now on.
    pub(crate) fn set_addresses(&mut self, own: Arc<OwnAddresses>) {
        self.own = own;
    }

    /// Tries to reach a peer by a link.
    pub(crate) fn reach(&mut self, now: Time, waiting: Waiting) -> Reach {
        if !self.usable {
            return Reach::Elsewhere;
        }
        let known = self.by_target.get(&waiting.peer).copied();
        let slot = match known.filter(|&slot| self.peers.get(slot).is_some()) {
            Some(slot) => slot,
            None => match self.call(now, waiting.peer) {
                Ok(slot) => slot,
                Err(error) => {
                    tracing::trace!(peer = %waiting.peer, %error, "not on this host");
                    return Reach::Elsewhere;
                }
            },
        };
        let Some(peer) = self.peers.get_mut(slot) else {
            return Reach::Elsewhere;
        };
        if let State::Up(link) = peer.state {
            return Reach::Linked(link);
        }
        peer.waiting.push(waiting);
        Reach::Pending
    }

    /// Calls the engine that listens at `target`. Anybody may listen there, so nothing is said before it is
    /// known who does.
    fn call(&mut self, now: Time, target: SocketAddr) -> io::Result<Slot> {
        // Only on this host is a port enough of a name.
        let everywhere = socket::Name::Everywhere(target.port());
        let own = self.own.is_of_host(target.ip()).then(|| socket::connect(everywhere).ok());
        let fd = match own.flatten() {
            Some(fd) => fd,
            None => socket::connect(socket::Name::At(target))?,
        };
        check_user(&fd)?;
        socket::send(&fd, &Message::Knock(self.identity.engine).encode(), &[])?;
        let slot = self.add(now, fd, State::AwaitHello, Some(target))?;
        self.by_target.insert(target, slot);
        Ok(slot)
    }

    fn add(
        &mut self,
        now: Time,
        fd: OwnedFd,
        state: State,
        target: Option<SocketAddr>,
    ) -> io::Result<Slot> {
        let pid = check_user(&fd)?;
        let epoll = &self.epoll;
        let slot = self.peers.insert_with(|slot| {
            epoll.add(&fd, READ, Token::Link(slot).bits())?;
            Ok::<_, io::Error>(Peer {
                fd,
                interest: READ,
                state,
                target,
                engine: None,
                gid: None,
                pid,
                process: None,
                deadline: now.after(SETUP_NS),
                own_arena: None,
                peer_arena: None,
                mapped: 0,
                admitted: false,
                alive: Arc::new(AtomicBool::new(true)),
                waiting: Vec::new(),
                outbox: VecDeque::new(),
            })
        })?;
        self.in_setup.push(slot);
        Ok(slot)
    }

    /// Looks at the socket of a link. True if there was more than a bell.
    pub(crate) fn ready(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        slot: Slot,
        events: u32,
    ) -> bool {
        self.serve(adapter, now, slot, events).unwrap_or_else(|reason| {
            self.end(adapter, now, slot, &reason);
            true
        })
    }

    fn serve(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        slot: Slot,
        events: u32,
    ) -> Result<bool, Broken> {
        if events & libc::EPOLLOUT as u32 != 0 {
            self.flush(slot)?;
        }
        for turn in 0..MESSAGES_PER_TURN {
            let Some(peer) = self.peers.get_mut(slot) else {
                return Ok(true);
            };
            let State::Up(link) = peer.state else {
                if !self.take_step(adapter, now, slot)? {
                    break;
                }
                continue;
            };
            let len = match sys::receive(&peer.fd, &mut self.buffer[..]) {
                Ok(len) => len,
                Err(error) if sys::would_block(&error) => break,
                Err(error) => return Err(error.into()),
            };
            match self.buffer[..len].split_first() {
                None => return Err(Broken::Gone),
                // Mostly nothing is behind it; if something is, epoll says so again.
                Some((&BELL, [])) => return Ok(turn > 0),
                Some((&CARRIED, carried)) => {
                    let message = LinkMessage::decode(carried).ok_or(Broken::Nonsense)?;
                    tracing::trace!(?link, ?message, "from a link");
                    adapter.handle_link_message(now, link, message);
                }
                Some(_) => return Err(Broken::Nonsense),
            }
        }
        Ok(true)
    }

    /// Carries a message to the other adapter.
    pub(crate) fn send(
        &mut self,
        adapter: &mut Adapter,
        now: Time,
        link: LinkId,
        message: &LinkMessage,
    ) {
        let Some(&slot) = self.by_link.get(&link) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(slot) else {
            return;
        };
        let mut bytes = vec![CARRIED];
        message.encode(&mut bytes);
        peer.outbox.push_back(bytes);
        let outcome =
            if peer.outbox.len() > OUTBOX_MAX { Err(Broken::Deaf) } else { self.flush(slot) };
        if let Err(reason) = outcome {
            self.end(adapter, now, slot, &reason);
        }
    }

    fn flush(&mut self, slot: Slot) -> Result<(), Broken> {
        let Some(peer) = self.peers.get_mut(slot) else {
            return Ok(());
        };
        while let Some(first) = peer.outbox.front() {
            match socket::send(&peer.fd, first, &[]) {
                Ok(()) => drop(peer.outbox.pop_front()),
                Err(error) if sys::would_block(&error) => break,
                Err(error) => return Err(error.into()),
            }
        }
        let interest = if peer.outbox.is_empty() { READ } else { READ | libc::EPOLLOUT };
        if interest != peer.interest {
            self.epoll.modify(&peer.fd, interest, Token::Link(slot).bits())?;
            peer.interest = interest;
        }
        Ok(())
    }

    /// From now on hears when the process at the other end of a link ends. Without that, as where a sandbox
    /// forbids it, the end of the socket tells.
    fn watch_process(&mut self, slot: Slot) {
        let Some(peer) = self.peers.get_mut(slot) else {
            return;
        };
        let watched = sys::process(peer.pid).and_then(|process| {
            self.epoll.add(&process, libc::EPOLLIN, Token::LinkProcess(slot).bits())?;
            Ok(process)
        });
        match watched {
            Ok(process) => peer.process = Some(process),
            Err(error) => tracing::debug!(pid = peer.pid, %error, "a peer cannot be watched"),
        }
    }

    /// The process at the other end of a link has ended, whoever else has its socket.
    pub(crate) fn process_ended(&mut self, adapter: &mut Adapter, now: Time, slot: Slot) {
        // What is on the socket may say why.
        let reason = self.serve(adapter, now, slot, 0).err().unwrap_or(Broken::Gone);
        self.end(adapter, now, slot, &reason);
    }

    /// Has all peers see the end, also where a child of fork keeps the sockets: the process is about to exit.
    pub(crate) fn shut_down(&mut self) {
        let slots: Vec<Slot> = self.peers.slots().collect();
        for slot in slots {
            // A peer that takes nothing any more learns by the end of the socket what it has to know.
            let _ = self.flush(slot);
            if let Some(peer) = self.peers.get(slot) {
                let _ = sys::shutdown_write(&peer.fd);
            }
        }
    }

    /// Rings the other engine's bell.
    pub(crate) fn ring(&self, link: LinkId) {
        if let Some(peer) = self.by_link.get(&link).and_then(|&slot| self.peers.get(slot)) {
            // Never waits. Where there is no room the other has messages to read, which wake it just
            // as well; a peer that is gone is noticed when its end of the socket is.
            let _ = sys::send(&peer.fd, &[BELL]);
        }
    }

    /// Ends a link whose peer breaks the rules.
    pub(crate) fn cut(&mut self, adapter: &mut Adapter, now: Time, link: LinkId) {
        if let Some(&slot) = self.by_link.get(&link) {
            self.end(adapter, now, slot, &Broken::Restless);
        }
    }

    /// Ends a link, or one in the making, whose connections then go by TCP.
    fn end(&mut self, adapter: &mut Adapter, now: Time, slot: Slot, reason: &Broken) {
        let Some(peer) = self.peers.get_mut(slot) else {
            return;
        };
        peer.alive.store(false, Ordering::Release);
        match peer.state {
            State::Up(link) => {
                tracing::debug!(pid = peer.pid, %reason, "a shared-memory link ended");
                adapter.handle_link_down(now, link);
            }
            _ => {
                tracing::debug!(pid = peer.pid, %reason, "no link");
                self.given_up.append(&mut peer.waiting);
            }
        }
        // Of its own: what a peer gives says nothing about others.
        if let Broken::NoMemory(error) = reason
            && matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EACCES))
            && std::mem::take(&mut self.usable)
        {
            tracing::warn!(
                %error,
                "shared memory is forbidden here; peers on this host are reached by TCP"
            );
        }
        self.forget(slot);
    }

    fn forget(&mut self, slot: Slot) {
        let Some(peer) = self.peers.remove(slot) else {
            return;
        };
        self.epoll.remove(&peer.fd);
        if let Some(process) = &peer.process {
            self.epoll.remove(process);
        }
        self.by_target.retain(|_, &mut other| other != slot);
        self.by_link.retain(|_, &mut other| other != slot);
        self.in_setup.retain(|&other| other != slot);
    }

    /// Whether there are connections that must go by TCP after all.
    #[inline]
    pub(crate) fn has_given_up(&self) -> bool {
        !self.given_up.is_empty()
    }

    /// The next of them.
    pub(crate) fn take_given_up(&mut self) -> Option<Waiting> {
        self.given_up.pop()
    }

    /// When [`handle_timeout`](Self::handle_timeout) has something to do.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let setup = self.in_setup.iter().filter_map(|&slot| Some(self.peers.get(slot)?.deadline));
        setup.chain(self.resting.over().map(Time)).min()
    }

    /// Gives up those that took too long to agree.
    pub(crate) fn handle_timeout(&mut self, adapter: &mut Adapter, now: Time) {
        if self.resting.over().is_some() {
            self.listen_again(now);
        }
        let over = |slot: &Slot| self.peers.get(*slot).is_none_or(|peer| peer.deadline <= now);
        let late: Vec<Slot> = self.in_setup.iter().copied().filter(over).collect();
        for slot in late {
            self.end(adapter, now, slot, &Broken::TimedOut);
        }
    }
}

impl Peer {
    fn is_up(&self) -> bool {
        matches!(self.state, State::Up(_))
    }
}
