//! What engines of one host show each other: a name, an arena, a directory, a bell, and a number by
//! which the other tests its access to memory.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use quipu_mem::Segment;

use super::handshake::{EngineName, Hello, Message};
use super::segment::Writers;
use super::{probe, segment, socket};
use crate::config::PeerMemoryPolicy;
use crate::sys::{self, EventFd};

/// What the other engine has given.
pub(super) struct Offer {
    pub(super) arena: Segment,
    pub(super) directory: Option<Segment>,
    /// Whether its memory can be reached.
    pub(super) access: bool,
}

/// What this engine shows to all others.
pub(crate) struct Identity {
    pub(super) engine: EngineName,
    /// At a fixed address, for peers to read.
    nonce: Box<[u8; probe::NONCE_BYTES]>,
    bell: OwnedFd,
    directory: Option<OwnedFd>,
    arena_bytes: usize,
    policy: PeerMemoryPolicy,
}

impl Identity {
    /// A new identity; `bell` is the engine's, `directory` the segment of its regions.
    pub(crate) fn new(
        bell: &EventFd,
        directory: Option<OwnedFd>,
        arena_bytes: usize,
        policy: PeerMemoryPolicy,
    ) -> io::Result<Self> {
        let mut engine = [0; 16];
        let mut nonce = Box::new([0; probe::NONCE_BYTES]);
        sys::random(&mut engine)?;
        sys::random(&mut *nonce)?;
        if policy == PeerMemoryPolicy::Allow {
            probe::allow_everyone();
        }
        let bell = sys::duplicate(bell.fd())?;
        Ok(Self { engine, nonce, bell, directory, arena_bytes, policy })
    }

    fn hello(&self) -> Hello {
        Hello {
            engine: self.engine,
            nonce: *self.nonce,
            nonce_addr: self.nonce.as_ptr().expose_provenance() as u64,
        }
    }

    /// Sends the introduction with a new arena, which it returns.
    pub(super) fn introduce(&self, fd: &OwnedFd) -> io::Result<Segment> {
        let (arena_fd, arena) = segment::create(c"quipu-arena", self.arena_bytes, Writers::Both)?;
        let mut fds = vec![self.bell.as_raw_fd(), arena_fd.as_raw_fd()];
        fds.extend(self.directory.as_ref().map(AsRawFd::as_raw_fd));
        socket::send(fd, &Message::Hello(self.hello()).encode(), &fds)?;
        Ok(arena)
    }

    /// Maps what a peer has given, and tries its memory.
    pub(super) fn accept_offer(
        &self,
        hello: &Hello,
        pid: libc::pid_t,
        fds: Vec<OwnedFd>,
    ) -> io::Result<(Offer, EventFd)> {
        let mut fds = fds.into_iter();
        let (Some(bell), Some(arena)) = (fds.next(), fds.next()) else {
            return Err(io::Error::other("the peer gave no memory"));
        };
        if !socket::is_eventfd(&bell) {
            return Err(io::Error::other("the peer's bell is none"));
        }
        let arena = segment::attach(&arena, Writers::Both)?;
        let directory = match fds.next() {
            Some(fd) => Some(segment::attach(&fd, Writers::Creator)?),
            None => None,
        };
        let access = self.policy != PeerMemoryPolicy::Never
            && probe::on_peer(pid, hello.nonce_addr, &hello.nonce)
                .inspect_err(|reason| tracing::debug!(%reason, "no access to a peer's memory"))
                .is_ok();
        Ok((Offer { arena, directory, access }, EventFd::from_fd(bell)))
    }
}
