//! The descriptor of a socket: one end of a pair of UNIX sockets, whose other end this library has. A byte
//! there makes the program's end readable; an urgent one shows as POLLPRI; bytes that the program's end has
//! sent, and nobody has read, make it not writable; closing this end hangs it up. So the kernel's poll and
//! epoll say what the socket is ready for.
//!
//! An urgent byte makes the program's end readable, too, which one of TCP does not. So it is sent only where
//! somebody waits for POLLPRI, and poll and select correct what the kernel says then (`entry/waiting.rs`).

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use libc::c_int;
use quipu_cabi::Errno;

use crate::real;
use crate::sys::own_descriptor;

/// `F_GETOWN_EX`, `F_SETOWN_EX`, and two of the kinds of owners that it knows (fcntl(2)).
const GET_OWNER: c_int = 16;
const SET_OWNER: c_int = 15;
const OWNER_THREAD: c_int = 0;
const OWNER_GROUP: c_int = 2;

/// What a socket is ready for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Readiness {
    pub(crate) readable: bool,
    /// An urgent byte waits outside of the stream.
    pub(crate) urgent: bool,
    pub(crate) writable: bool,
    /// The peer sends no more.
    pub(crate) ended: bool,
    /// Nothing goes either way any more.
    pub(crate) hung_up: bool,
}

/// This library's end of the pair.
pub(crate) struct Ready {
    ours: Option<OwnedFd>,
    /// The program's end, by a descriptor of this library's.
    theirs: Option<OwnedFd>,
    shown: Readiness,
    /// Readiness is shown all the time: by epoll, or to other processes.
    pub(crate) always: bool,
    /// Threads that are in poll or select for it.
    pub(crate) pollers: u32,
    /// Every arrival is shown anew: somebody waits for edges.
    pub(crate) edges: bool,
    /// The program has said who gets SIGURG.
    pub(crate) has_owner: bool,
    /// Somebody waits for urgent bytes, or has done so.
    pub(crate) wants_urgent: bool,
}

impl Ready {
    /// A pair: this end, and the program's descriptor.
    pub(crate) fn new(flags: c_int) -> Result<(Self, RawFd), Errno> {
        let mut pair = [-1; 2];
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        // SAFETY: room for two descriptors.
        crate::sys::system(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) })?;
        let [ours, theirs] = pair;
        let ours = own_descriptor(ours).inspect_err(|_| crate::sys::close(theirs))?;
        if flags & libc::SOCK_CLOEXEC == 0 {
            // SAFETY: fcntl(2) with an integer.
            unsafe { real::fcntl(theirs, libc::F_SETFD, 0) };
        }
        if flags & libc::SOCK_NONBLOCK != 0 {
            // SAFETY: as above.
            unsafe { real::fcntl(theirs, libc::F_SETFL, libc::O_NONBLOCK as _) };
        }
        let shown = Readiness { writable: true, ..Readiness::default() };
        Ok((
            Self {
                ours: Some(ours),
                theirs: None,
                shown,
                always: false,
                pollers: 0,
                edges: false,
                has_owner: false,
                wants_urgent: false,
            },
            theirs,
        ))
    }

    /// From now on readiness is shown at the program's descriptor `fd`.
    pub(crate) fn watch(&mut self, fd: RawFd) -> Result<(), Errno> {
        if self.theirs.is_some() {
            return Ok(());
        }
        // SAFETY: fcntl(2) with an integer.
        let copy = unsafe { real::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
        let copy = own_descriptor(copy)?;
        let size: c_int = 1;
        // SAFETY: an option that is a number.
        unsafe {
            real::setsockopt(
                copy.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_SNDBUF,
                (&raw const size).cast(),
                size_of::<c_int>() as libc::socklen_t,
            )
        };
        self.theirs = Some(copy);
        Ok(())
    }

    /// Whether somebody waits for readiness now, or may wait without a call of this library.
    pub(crate) fn is_watched(&self) -> bool {
        self.theirs.is_some() && (self.always || self.pollers > 0)
    }

    /// Whether what comes is of interest although no call of the program is at the socket.
    pub(crate) fn is_attended(&self) -> bool {
        self.is_watched() || self.has_owner
    }

    /// The owner of the program's descriptor who gets SIGURG: of which kind it is, and its number.
    fn owner(&self) -> Option<[c_int; 2]> {
        let theirs = self.theirs.as_ref().filter(|_| self.has_owner)?;
        let mut owner: [c_int; 2] = [0; 2];
        let at = (&raw mut owner).expose_provenance();
        // SAFETY: fcntl(2) writes a struct f_owner_ex to a live variable of its size.
        let found = unsafe { real::fcntl(theirs.as_raw_fd(), GET_OWNER, at as _) };
        (found >= 0 && owner[1] > 0).then_some(owner)
    }

    /// Sends SIGURG to the owner of the program's descriptor, if it has one.
    pub(crate) fn signal_owner(&self) {
        let Some(owner) = self.owner() else { return };
        // SAFETY: system calls with integers.
        unsafe {
            let _ = match owner {
                [OWNER_THREAD, thread] => {
                    libc::syscall(libc::SYS_tkill, thread, libc::SIGURG) as c_int
                }
                [OWNER_GROUP, group] => libc::kill(-group, libc::SIGURG),
                [_, process] => libc::kill(process, libc::SIGURG),
            };
        }
    }

    /// Sends an urgent byte to the program's end. The kernel would signal the owner, who has had the signal
    /// of the byte that this one stands for: meanwhile there is none.
    fn put_urgent(&self, ours: RawFd, theirs: RawFd) {
        let owner = self.owner();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_OOB;
        // SAFETY: fcntl(2) with integers, and with a live struct f_owner_ex; one byte of a live variable.
        // Where the kernel has no urgent bytes for these sockets, nothing is sent.
        unsafe {
            if owner.is_some() {
                real::fcntl(theirs, libc::F_SETOWN, 0);
            }
            real::send(ours, [1_u8].as_ptr().cast(), 1, flags);
            if let Some(owner) = &owner {
                let at = std::ptr::from_ref(owner).expose_provenance();
                real::fcntl(theirs, SET_OWNER, at as _);
            }
        }
    }

    /// Whether somebody has ever waited for readiness.
    pub(crate) fn was_watched(&self) -> bool {
        self.theirs.is_some()
    }

    /// Shows what the socket is ready for. `arrived`: something has come since the last time.
    pub(crate) fn show(&mut self, mut now: Readiness, arrived: bool) {
        now.urgent &= self.wants_urgent;
        let (Some(ours), Some(theirs)) = (&self.ours, &self.theirs) else { return };
        let (ours, theirs) = (ours.as_raw_fd(), theirs.as_raw_fd());
        let before = self.shown;
        self.shown = now;
        if now.readable && (!before.readable || arrived && self.edges) {
            put(ours, 1);
        }
        match (before.urgent, now.urgent) {
            (false, true) => self.put_urgent(ours, theirs),
            (true, false) => {
                take_urgent(theirs);
                drain(theirs);
                if now.readable {
                    put(ours, 1);
                }
            }
            // With an urgent byte, bytes that no longer count stay: it makes the end readable anyway.
            _ if before.readable && !now.readable && !now.urgent => drain(theirs),
            _ => {}
        }
        if now.writable != before.writable {
            if now.writable { drain(ours) } else { put(theirs, usize::MAX) }
        }
        if now.ended && !before.ended {
            // SAFETY: shutdown(2).
            unsafe { real::shutdown(ours, libc::SHUT_WR) };
        }
        if now.hung_up {
            self.ours = None;
        }
    }

    /// Ends the showing of readiness: the pair carries octets from now on. Gives this end of it, unless
    /// the socket has hung up. `fd` is the program's end.
    pub(crate) fn hand_over(&mut self, fd: RawFd) -> Option<OwnedFd> {
        let ours = self.ours.take()?;
        drain(fd);
        drain(ours.as_raw_fd());
        let size: c_int = 256 << 10;
        let len = size_of::<c_int>() as libc::socklen_t;
        // SAFETY: an option that is a number.
        unsafe {
            real::setsockopt(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, (&raw const size).cast(), len)
        };
        self.theirs = None;
        Some(ours)
    }

    /// The descriptors of this library.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.ours.iter().chain(&self.theirs).map(AsRawFd::as_raw_fd)
    }

    /// The program has no descriptor of it any more.
    pub(crate) fn close(&mut self) {
        (self.ours, self.theirs) = (None, None);
    }
}

/// Sends at most so many messages of one byte, until there is no room.
fn put(fd: RawFd, count: usize) {
    let byte = [1_u8];
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: one byte of a live variable.
    (0..count.min(64))
        .take_while(|_| unsafe { real::send(fd, byte.as_ptr().cast(), 1, flags) } == 1)
        .for_each(drop);
}

/// Takes the urgent byte that has come.
fn take_urgent(fd: RawFd) {
    let mut byte = [0_u8];
    let flags = libc::MSG_DONTWAIT | libc::MSG_OOB;
    // SAFETY: room for one byte.
    unsafe { real::recv(fd, byte.as_mut_ptr().cast(), 1, flags) };
}

/// Takes everything that has come.
fn drain(fd: RawFd) {
    let mut bytes = [0_u8; 64];
    let flags = libc::MSG_DONTWAIT;
    // SAFETY: room for so many bytes.
    while unsafe { real::recv(fd, bytes.as_mut_ptr().cast(), bytes.len(), flags) } > 0 {}
}
