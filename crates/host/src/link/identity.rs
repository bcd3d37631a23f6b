//! What engines of one host show each other: a name, an arena, a proof by which the other tests its
//! access to memory, and, to those who have that, the directory of regions and the list of shared pages.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use quipu_mem::{Segment, SharedPagesReader};
use quipu_nic::Gid;

use super::handshake::{EngineName, Hello, Message};
use super::probe::{Number, Proof};
use super::segment::{DIRECTORY_BYTES, LIFE_BYTES, LIST_BYTES, MAX_BYTES, Writers};
use super::{Broken, probe, segment, socket};
use crate::config::PeerMemoryPolicy;
use crate::{pages, sys};

/// What this engine shows to others.
pub(crate) struct Identity {
    pub(super) engine: EngineName,
    gid: Gid,
    /// Whether the engine has all other addresses of this host, too.
    everywhere: bool,
    proof: Proof,
    /// `None` where no peer is let into the memory anyway.
    directory: Option<OwnedFd>,
    /// Whether peers are shown the list of what they may map.
    shares: bool,
    arena_bytes: usize,
    policy: PeerMemoryPolicy,
}

/// What a peer shows to whoever is admitted to its memory.
#[derive(Debug, Default)]
pub(super) struct Shown {
    pub(super) directory: Option<Segment>,
    pub(super) pages: Option<SharedPagesReader>,
}

impl Identity {
    /// A new identity; `directory` is the segment of the engine's regions, and `shares` says whether there is
    /// a list of what can be mapped next to it. The engine has the address `gid`, and if `everywhere` all
    /// others of this host.
    pub(crate) fn new(
        (gid, everywhere): (Gid, bool),
        directory: Option<OwnedFd>,
        shares: bool,
        arena_bytes: usize,
        policy: PeerMemoryPolicy,
    ) -> io::Result<Self> {
        let mut engine = EngineName::default();
        let mut number = Number::default();
        sys::random(&mut engine)?;
        sys::random(&mut number)?;
        if policy == PeerMemoryPolicy::Allow {
            probe::allow_everyone();
        }
        let proof = Proof::new(&engine, number);
        Ok(Self { engine, gid, everywhere, proof, directory, shares, arena_bytes, policy })
    }

    fn admits_anybody(&self) -> bool {
        self.policy != PeerMemoryPolicy::Never
    }

    /// Sends the introduction with a new arena, which it returns.
    pub(super) fn introduce(&self, fd: &OwnedFd) -> Result<Segment, Broken> {
        let made = segment::create(c"quipu-arena", self.arena_bytes, Writers::Both);
        let (arena_fd, arena) = made.map_err(Broken::NoMemory)?;
        let proof_addr = if self.admits_anybody() { self.proof.addr() } else { 0 };
        let Self { engine, gid, everywhere, .. } = *self;
        let hello = Hello { engine, gid, everywhere, proof_addr };
        socket::send(fd, &Message::Hello(hello).encode(), &[arena_fd.as_raw_fd()])?;
        Ok(arena)
    }

    /// Maps the arena that a peer has given, unless it has more than `room` bytes.
    pub(super) fn accept_arena(&self, fds: Vec<OwnedFd>, room: usize) -> io::Result<Segment> {
        let given = fds.first().ok_or_else(|| io::Error::other("the peer gave no memory"))?;
        segment::attach(given, Writers::Both, room.min(MAX_BYTES))
    }

    /// Reads the number in a peer's memory, if this engine wants to and can.
    pub(super) fn read_number(&self, hello: &Hello, pid: libc::pid_t) -> Option<Number> {
        if !self.admits_anybody() {
            return None;
        }
        probe::on_peer(pid, hello.proof_addr, &hello.engine)
            .inspect_err(|reason| tracing::debug!(%reason, "no access to a peer's memory"))
            .ok()
    }

    /// Tells a peer whether it may use its access to this process's memory: it must have proved
    /// it by the number. Only then is it shown the directory, and behind it the list.
    pub(super) fn admit(&self, fd: &OwnedFd, number: Option<Number>) -> io::Result<bool> {
        let admits = self.admits_anybody() && number.is_some_and(|number| self.proof.is(&number));
        // Made when the first peer is to see it.
        let pages = (admits && self.shares).then(pages::list).and_then(|list| {
            let unwilling = |error: &_| tracing::debug!(%error, "pages are not shared with peers");
            list.inspect_err(unwilling).ok()
        });
        let shown = self.directory.iter().chain(&pages).filter(|_| admits);
        let fds: Vec<_> = shown.map(AsRawFd::as_raw_fd).collect();
        socket::send(fd, &Message::Admits(admits).encode(), &fds)?;
        Ok(admits)
    }

    /// Maps the directory that a peer has given, and the list, if it has one.
    pub(super) fn accept_shown(&self, fds: &[OwnedFd]) -> io::Result<Shown> {
        let attach = |fd, most| segment::attach(fd, Writers::Creator, most);
        let mut fds = fds.iter();
        let directory =
            fds.next().map(|fd| attach(fd, DIRECTORY_BYTES + LIFE_BYTES)).transpose()?;
        let pages = fds.next().map(|fd| attach(fd, LIST_BYTES)).transpose()?;
        let pages = pages.map(|pages| SharedPagesReader::new(&pages)).transpose();
        Ok(Shown { directory, pages: pages.map_err(io::Error::other)? })
    }
}
