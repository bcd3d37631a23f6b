//! Children of fork(2). The sockets of SDP stay with their parent, which relays connections to a child that
//! uses them, and accepts connections for a child.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use libc::c_int;
use quipu_cabi::Errno;

use crate::establish::{Held, all, find, hold, unpark};
use crate::helper::Helper;
use crate::relay::{self, Relayed, Relaying, relaying};
use crate::socket::{Phase, Socket};
use crate::table::{self, Entry};
use crate::{both, helper, pass, process};

/// The longest question or answer.
const LONGEST: usize = 256;
/// What follows the number of a socket in a question.
const RELAY: u8 = b'r';
const ACCEPT: u8 = b'a';
/// What an answer begins with: it is done; there is nothing; the kernel's own connection is meant; there is
/// no such socket.
const DONE: u8 = b'd';
const NOTHING: u8 = b'n';
const KERNEL: u8 = b'k';
const GONE: u8 = b'g';

/// What a child knows of a socket of its parent.
pub(crate) struct Lost {
    number: u64,
    pub(crate) names: Relayed,
    /// It is a listening socket.
    pub(crate) listens: bool,
    /// Where the child asks the parent; none of what the parent cannot relay.
    control: Option<RawFd>,
}

/// What a fork needs in both processes.
#[derive(Default)]
pub(crate) struct Fork {
    /// The child does not have the threads that may hold them.
    _helper: Option<MutexGuard<'static, Option<Helper>>>,
    sockets: Option<Held>,
    ends: Option<MutexGuard<'static, Vec<RawFd>>>,
    table: Option<table::Held>,
    /// The table as it was.
    pub(crate) known: Vec<(RawFd, Entry)>,
    /// What becomes of its sockets in the child.
    pub(crate) lost: HashMap<RawFd, Arc<Lost>>,
    /// Descriptors of this library that the child closes.
    own: Vec<RawFd>,
    /// Dropped at the end: handlers of the program run then.
    _relaying: Option<Relaying>,
}

/// A fork begins. The thread may hold locks of this library unless `may_lock`: then the child cannot use its
/// sockets.
pub(crate) fn before(may_lock: bool) -> Fork {
    let mut fork = Fork { _relaying: may_lock.then(relaying), ..Fork::default() };
    fork.known = table::all();
    for (fd, entry) in &fork.known {
        let (socket, shows) = match entry {
            Entry::Sdp(socket) => (Arc::clone(socket), true),
            Entry::Candidate(candidate) if may_lock => match candidate.own_twin() {
                Some(twin) => (twin, false),
                None => continue,
            },
            _ => continue,
        };
        let mut lost = Lost::unknown(&socket);
        if may_lock {
            lost.share(&socket);
            if lost.listens && shows {
                // Children wait for connections at the descriptor.
                let _ = socket.watch(*fd, false, false);
            }
        }
        fork.lost.insert(*fd, Arc::new(lost));
    }
    if may_lock {
        fork.own.extend(helper::asking().map(|[asked, _]| asked));
        for socket in all() {
            let state = socket.lock();
            fork.own.extend(state.ready.descriptors());
            fork.own.extend(state.parked.as_ref().map(AsRawFd::as_raw_fd));
        }
        fork.sockets = Some(hold());
        fork._helper = Some(helper::helper());
        // From now on the thread calls nothing that looks for sockets.
        fork.ends = Some(relay::ends());
        fork.table = Some(table::hold());
    }
    fork
}

impl Lost {
    /// A socket that the parent cannot help with.
    pub(crate) fn unknown(socket: &Socket) -> Self {
        Self { number: socket.number, names: Relayed::default(), listens: false, control: None }
    }

    /// Whether it is this socket.
    pub(crate) fn is_of(&self, socket: &Socket) -> bool {
        self.number == socket.number
    }

    /// The child may use a socket as far as the parent can help.
    fn share(&mut self, socket: &Socket) {
        let state = socket.lock();
        let is_whole = state.phase == Phase::Connected && !state.closed;
        self.listens = state.phase == Phase::Listening && !state.closed;
        self.names = Relayed { by: 0, local: state.local, peer: state.peer };
        if !is_whole && !self.listens {
            return;
        }
        self.control = helper::asking().map(|[_, asks]| asks);
        socket.is_shared.fetch_or(is_whole && self.control.is_some(), Ordering::SeqCst);
    }

    fn ask(&self, what: u8, text: &str) -> Result<(u8, String, Option<OwnedFd>), Errno> {
        ask(self.control, self.number, what, text)
    }
}

/// Asks the parent for something: what it says, and the descriptor that it gives. The answer comes at a
/// socket of its own, since other processes may ask at the same time.
///
/// # Errors
///
/// ENODEV if the parent is gone.
fn ask(
    control: Option<RawFd>,
    number: u64,
    what: u8,
    text: &str,
) -> Result<(u8, String, Option<OwnedFd>), Errno> {
    let control = control.ok_or(Errno::ENODEV)?;
    let [own, parents] = pass::pair()?;
    let question = [&number.to_ne_bytes(), &[what][..], text.as_bytes()].concat();
    pass::send(control, &question, Some(&parents), 0).map_err(|_| Errno::ENODEV)?;
    drop(parents);
    let mut room = [0; LONGEST];
    let (len, given) = pass::receive(own.as_raw_fd(), &mut room, 0)?;
    let (said, text) = room[..len].split_first().ok_or(Errno::ENODEV)?;
    Ok((*said, String::from_utf8_lossy(text).into_owned(), given))
}

/// In the child.
pub(crate) fn in_child(mut fork: Fork) {
    fork.own.iter().copied().for_each(crate::sys::close);
    if let Some(ends) = &mut fork.ends {
        ends.drain(..).for_each(crate::sys::close);
    }
    if let Some(sockets) = fork.sockets.take() {
        sockets.forget();
    }
    let mut table = fork.table.take().unwrap_or_else(table::hold);
    table::lose_sockets(&mut table, std::mem::take(&mut fork.known), &fork.lost);
}

/// Answers what children ask at a descriptor.
pub(crate) fn answer(control: RawFd) {
    let mut room = [0_u8; LONGEST];
    loop {
        match pass::receive(control, &mut room, libc::MSG_DONTWAIT) {
            Err(_) | Ok((0, _)) => return,
            Ok((len, Some(to))) => answer_one(&room[..len], &to),
            Ok((_, None)) => {}
        }
    }
}

fn answer_one(question: &[u8], to: &OwnedFd) {
    let say = |said: u8| {
        // A child that has gone wants no answer.
        let _ = pass::send(to.as_raw_fd(), &[said], None, libc::MSG_DONTWAIT);
    };
    let Some((number, [what, text @ ..])) = question.split_first_chunk() else { return };
    let Some(socket) = find(u64::from_ne_bytes(*number)) else { return say(GONE) };
    match *what {
        RELAY if relay::relay_socket(&socket) => say(DONE),
        RELAY => say(NOTHING),
        _ => {
            match next_of(&socket, std::str::from_utf8(text).ok().and_then(|it| it.parse().ok())) {
                both::Accepted::Kernel => say(KERNEL),
                both::Accepted::Gone => say(NOTHING),
                both::Accepted::Sdp(socket) => {
                    if give(&socket, to).is_err() {
                        socket.close();
                        say(NOTHING);
                    }
                }
            }
        }
    }
}

/// The next connection of a listening socket, or what a connection of the kernel `from` there stands for.
fn next_of(listener: &Socket, from: Option<SocketAddr>) -> both::Accepted {
    if let Some(from) = from {
        return both::accepted(listener, from);
    }
    let mut state = listener.lock();
    let next = state.backlog.pop_front();
    state.show();
    next.map_or(both::Accepted::Gone, both::Accepted::Sdp)
}

/// Relays a connection that no descriptor of this process stands for, and gives its descriptor to a child.
fn give(socket: &Arc<Socket>, to: &OwnedFd) -> Result<(), Errno> {
    let _relaying = relaying();
    let fd = unpark(socket, libc::SOCK_CLOEXEC)?;
    // SAFETY: it has just been made, and nobody else has it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let names = {
        let state = socket.lock();
        [state.local, state.peer].map(|name| name.map_or(String::new(), |name| name.to_string()))
    };
    relay::begin(socket, fd.as_raw_fd(), &[])?;
    let said = [&[DONE], names.join(" ").as_bytes()].concat();
    // If the child is gone, so is the last descriptor, and the connection ends.
    let _ = pass::send(to.as_raw_fd(), &said, Some(&fd), libc::MSG_DONTWAIT);
    Ok(())
}

/// What the parent has accepted for a child.
pub(crate) enum Accepted {
    /// Nothing waits, or what waited is gone.
    Nothing,
    /// A connection of the kernel stands for itself.
    Kernel,
    /// A stream of the kernel that is relayed, and its names.
    Relayed(OwnedFd, Relayed),
}

/// In a child: has the parent accept at a listening socket; `from`: what a connection that the kernel has
/// accepted from there stands for.
///
/// # Errors
///
/// ENODEV if the parent is gone; EINVAL if it has closed the socket.
pub(crate) fn accept(lost: &Lost, from: Option<SocketAddr>) -> Result<Accepted, Errno> {
    let from = from.map_or(String::new(), |from| from.to_string());
    match lost.ask(ACCEPT, &from)? {
        (DONE, names, Some(given)) => {
            let mut names = names.split(' ').map(|name| name.parse().ok());
            let mut next = || names.next().flatten();
            Ok(Accepted::Relayed(given, Relayed { by: 0, local: next(), peer: next() }))
        }
        (KERNEL, ..) => Ok(Accepted::Kernel),
        (GONE, ..) => Err(Errno::EINVAL),
        _ => Ok(Accepted::Nothing),
    }
}

/// In a child: waits until the parent shows a connection at its listening socket.
///
/// # Errors
///
/// EAGAIN if the descriptor does not block; EINTR.
pub(crate) fn wait_at(fd: RawFd) -> Result<(), Errno> {
    // SAFETY: fcntl(2) with integers.
    if unsafe { crate::real::fcntl(fd, libc::F_GETFL, 0) } & libc::O_NONBLOCK != 0 {
        return Err(Errno::EAGAIN);
    }
    let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one live entry.
    crate::sys::system(unsafe { crate::real::poll(&raw mut entry, 1, -1) }).map(drop)
}

/// In a child: has the parent relay the connection of a descriptor, which is a stream of the kernel then.
///
/// # Errors
///
/// ECONNRESET if it has ended, EINVAL if the socket listens, ENODEV if the parent is gone.
pub(crate) fn claim(fd: RawFd, lost: &Lost) -> Result<(), Errno> {
    if !matches!(table::get(fd), Some(Entry::Lost(_))) {
        return Ok(());
    }
    if lost.listens {
        return Err(Errno::EINVAL);
    }
    if lost.ask(RELAY, "")?.0 != DONE {
        return Err(Errno(libc::ECONNRESET));
    }
    let relayed = Arc::new(lost.names);
    for (other, entry) in table::all() {
        if matches!(entry, Entry::Lost(it) if it.number == lost.number) {
            table::put(other, Entry::Relayed(Arc::clone(&relayed)));
        }
    }
    Ok(())
}

/// Relays the connection of a descriptor, which a call is about to use that this library does not serve.
pub(crate) fn relay(fd: RawFd) {
    match table::get(fd) {
        Some(Entry::Sdp(socket)) if process::is_own() => drop(relay::relay_socket(&socket)),
        // The threads that relay have to be those of the parent. It knows the socket by the same memory.
        Some(Entry::Sdp(socket)) => {
            let asks = helper::asking().map(|[_, asks]| asks);
            drop(ask(asks, socket.number, RELAY, ""));
        }
        Some(Entry::Lost(lost)) => drop(claim(fd, &lost)),
        _ => {}
    }
}

/// The descriptor of an accepted stream, as accept4(2) with these flags gives it.
pub(crate) fn adopt(given: OwnedFd, names: Relayed, flags: c_int) -> Result<RawFd, Errno> {
    let fd = given.into_raw_fd();
    // SAFETY: fcntl(2) with integers.
    unsafe {
        if flags & libc::SOCK_CLOEXEC == 0 {
            crate::real::fcntl(fd, libc::F_SETFD, 0);
        }
        if flags & libc::SOCK_NONBLOCK != 0 {
            crate::real::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK as _);
        }
    }
    if table::put(fd, Entry::Relayed(Arc::new(names))) {
        return Ok(fd);
    }
    crate::sys::close(fd);
    Err(Errno::EMFILE)
}
