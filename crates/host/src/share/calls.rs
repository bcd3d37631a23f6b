//! The program's end of the socket: it asks, and waits for the answer. Not under the lock of its engine.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use quipu_mem::Segment;

use super::arena::Arena;
use super::connect;
use super::folders::{Spot, places};
use super::words::{Call, HELLO, NOT_FOR_YOU, Reader, Writer, is_hello, outcome};
use crate::accounts::Account;
use crate::engine::QpipInfo;
use crate::error::EngineError;
use crate::link::segment::{self, Writers};
use crate::link::socket::{self, MAX_MESSAGE};
use crate::packet::LinkSpec;
use crate::sys;

/// How long an answer may take. Then the other end is taken for dead.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long one waits before one looks after the rings: the other end may wait for room there.
const GLANCE: Duration = Duration::from_millis(10);
/// How long one tries again who was hung up on before it was answered.
const AGAIN: Duration = Duration::from_secs(1);
/// And between two looks, while there is no room for what was posted before a call.
const PAUSE: Duration = Duration::from_micros(100);

/// The most addresses that a program is told of.
const MOST_ADDRESSES: usize = 128;

/// What there is to ask.
#[derive(Debug)]
enum Line {
    Open(OwnedFd),
    /// The other end did not answer, and is asked nothing more: an answer would be taken for that to
    /// something else. It hears that this program has left, and hangs up when it has let go of everything.
    Left(OwnedFd),
    Gone,
}

/// What a program knows of the adapter that it is attached to.
#[derive(Debug)]
pub(crate) struct Calls {
    line: Mutex<Line>,
    /// The other end was left, and may still write to what it once was given.
    left: AtomicBool,
    /// How long an answer may take.
    patience: Duration,
    arena: Arena,
    info: QpipInfo,
}

/// What one gets who attaches.
pub(crate) struct Welcome {
    pub(crate) calls: Calls,
    /// Memory with the rings at its beginning.
    pub(crate) memory: Segment,
    pub(crate) bell: OwnedFd,
}

/// The process that shares the adapter has not answered in time.
fn silent(process: libc::pid_t) -> io::Error {
    let number = if process > 0 { format!(" ({process})") } else { String::new() };
    let why = format!("the process that shares the adapter{number} does not answer");
    io::Error::new(io::ErrorKind::TimedOut, why)
}

fn nonsense() -> io::Error {
    io::Error::other("the process that shares the adapter uses another protocol")
}

fn other_version() -> io::Error {
    let why = "the process that shares the adapter has another version of Quipu";
    io::Error::new(io::ErrorKind::Unsupported, why)
}

/// Waits for an answer, through signals that come meanwhile; `false` if there is none for so long.
fn has_answer_within(socket: &OwnedFd, patience: Duration) -> bool {
    let begun = Instant::now();
    loop {
        let left = patience.saturating_sub(begun.elapsed());
        if sys::wait_readable_within(socket, left) {
            return true;
        }
        if left.is_zero() {
            return false;
        }
    }
}

/// What the other end says of its adapter.
fn read_info(link: &LinkSpec, answer: &mut Reader<'_>) -> Option<QpipInfo> {
    let hardware = answer.word()?;
    let (mtu, checksum, segment) = (answer.short()?, answer.word()? != 0, answer.short()?);
    let count: usize = answer.short()?;
    let addresses: Option<Vec<IpAddr>> =
        (0..count).map(|_| answer.address().map(|address| address.ip())).collect();
    let enter = answer.text()?;
    let octets = hardware.to_be_bytes();
    Some(QpipInfo {
        link: link.clone(),
        hardware: (octets[1] != 0).then(|| std::array::from_fn(|at| octets[at + 2])),
        addresses: addresses?,
        mtu,
        checksum,
        segment,
        enter: enter.split_whitespace().map(str::to_owned).collect(),
    })
}

/// What [`read_info`] reads.
pub(super) fn write_info(message: Writer, info: &QpipInfo) -> Writer {
    let mut octets = [0; 8];
    if let Some(hardware) = info.hardware {
        octets[1] = 1;
        octets[2..].copy_from_slice(&hardware);
    }
    let message = message.word(u64::from_be_bytes(octets)).word(info.mtu).word(info.checksum);
    // More do not fit into a message.
    let addresses = &info.addresses[..info.addresses.len().min(MOST_ADDRESSES)];
    let message = message.word(info.segment).word(addresses.len() as u64);
    let with = |message: Writer, ip: &IpAddr| message.address((*ip, 0).into());
    addresses.iter().fold(message, with).text(&info.enter.join(" "))
}

impl Calls {
    fn new(socket: OwnedFd, arena: Arena, info: QpipInfo, patience: Duration) -> Self {
        let (line, left) = (Mutex::new(Line::Open(socket)), AtomicBool::new(false));
        Self { line, left, patience, arena, info }
    }

    /// Attaches to the adapter that a link names, which another process shares, with so much memory of one's
    /// own if the other end agrees.
    ///
    /// # Errors
    ///
    /// Nobody who is trusted shares one under this name ([`io::ErrorKind::NotFound`]), or not with this user
    /// ([`io::ErrorKind::PermissionDenied`]); it has no room ([`io::ErrorKind::ResourceBusy`]), does not
    /// answer ([`io::ErrorKind::TimedOut`]), or ends; no memory or descriptors.
    pub(crate) fn attach(link: &LinkSpec, arena_bytes: usize) -> io::Result<Welcome> {
        let LinkSpec::Share { name, user } = link else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let unknown = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        let begun = Instant::now();
        loop {
            let spots = places(name, user.as_deref()).map_err(unknown)?;
            match Self::call(link, &spots, arena_bytes) {
                // Where many call at once the oldest are hung up on, some of them before they were heard.
                Err(error) if is_end(&error) && begun.elapsed() < AGAIN => {
                    std::thread::sleep(GLANCE)
                }
                outcome => return outcome,
            }
        }
    }

    fn call(link: &LinkSpec, spots: &[Spot], arena_bytes: usize) -> io::Result<Welcome> {
        let (socket, owner) = reach(spots)?;
        let peer = socket::peer_credentials(&socket)?;
        if peer.uid != owner || !Account::User.is_one(peer.uid) {
            let why = format!(
                "a process of user {} has the socket that only user {owner} may \
                have",
                peer.uid
            );
            return Err(io::Error::other(why));
        }
        let hello = Writer::default().word(HELLO).word(arena_bytes as u64);
        socket::send(&socket, &hello.bytes(), &[])?;
        if !has_answer_within(&socket, PATIENCE) {
            return Err(silent(peer.pid));
        }
        Self::read_welcome(link, socket)
    }

    fn read_welcome(link: &LinkSpec, socket: OwnedFd) -> io::Result<Welcome> {
        let mut buffer = [0; MAX_MESSAGE];
        let mut received = socket::receive(&socket, &mut buffer)?;
        if received.len == 0 {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let mut answer = Reader::new(&buffer[..received.len]);
        let (Some(hello), Some(rings)) = (answer.word(), answer.short::<usize>()) else {
            return Err(nonsense());
        };
        if hello != HELLO {
            return Err(if is_hello(hello) { other_version() } else { nonsense() });
        }
        if rings == 0 {
            let why = answer.text().ok_or_else(nonsense)?;
            let kind = match answer.word() {
                Some(NOT_FOR_YOU) => io::ErrorKind::PermissionDenied,
                _ => io::ErrorKind::ResourceBusy,
            };
            return Err(io::Error::new(kind, why));
        }
        let info = read_info(link, &mut answer).ok_or_else(nonsense)?;
        let (Some(bell), Some(file)) = (received.fds.pop(), received.fds.pop()) else {
            return Err(nonsense());
        };
        let memory = segment::attach(&file, Writers::Mapped, segment::MAX_BYTES)?;
        // From now on the memory cannot be mapped again, and the other end looks there.
        socket::send(&socket, &HELLO.to_ne_bytes(), &[])?;
        let arena = memory.len().checked_sub(rings).and_then(|len| memory.slice(rings, len).ok());
        let arena = Arena::new(arena.ok_or_else(nonsense)?);
        Ok(Welcome { calls: Self::new(socket, arena, info, PATIENCE), memory, bell })
    }

    /// What the adapter stands on.
    pub(crate) fn info(&self) -> &QpipInfo {
        &self.info
    }

    /// Memory that can be registered.
    ///
    /// # Errors
    ///
    /// There is no room for it; what was free may still be written to by an adapter that was left.
    pub(crate) fn allocate(&self, len: usize) -> Result<Segment, EngineError> {
        if self.left.load(Ordering::Acquire) {
            return Err(EngineError::AdapterSilent);
        }
        self.arena.take(len).ok_or(EngineError::ArenaFull { len })
    }

    /// Asks, and reads the answer. Before, and meanwhile, `glance` is called now and then: it says whether
    /// all that the call is to be behind is in the ring.
    ///
    /// # Errors
    ///
    /// The adapter refuses the call; [`EngineError::AdapterLost`], [`EngineError::AdapterSilent`].
    pub(crate) fn ask<T>(
        &self,
        call: &Call,
        glance: &dyn Fn() -> bool,
        read: impl FnOnce(&mut Reader<'_>) -> Option<T>,
    ) -> Result<T, EngineError> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let mut buffer = [0; MAX_MESSAGE];
        let answered = match &*line {
            Line::Open(socket) => self.exchange(socket, &call.encode(), glance, &mut buffer),
            Line::Left(socket) => has_hung_up(socket).map_or(Ok(0), Err),
            Line::Gone => Err(Over),
        };
        let answered = answered.map(|len| match outcome(&buffer[..len])? {
            Ok(mut yields) => read(&mut yields).map(Ok),
            Err(error) => Some(Err(error)),
        });
        match answered {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                self.leave(&mut line);
                Err(EngineError::AdapterSilent)
            }
            Err(Over) => {
                *line = Line::Gone;
                Err(EngineError::AdapterLost)
            }
        }
    }

    /// Asks nothing more, and says so.
    #[cold]
    fn leave(&self, line: &mut Line) {
        *line = match std::mem::replace(line, Line::Gone) {
            Line::Open(socket) => {
                self.left.store(true, Ordering::Release);
                // Should it have hung up meanwhile, that is seen the next time.
                let _ = sys::shutdown_write(&socket);
                Line::Left(socket)
            }
            left => left,
        };
    }

    /// Sends a question and waits for the answer; its length, 0 if there is none.
    fn exchange(
        &self,
        socket: &OwnedFd,
        question: &[u8],
        glance: &dyn Fn() -> bool,
        buffer: &mut [u8; MAX_MESSAGE],
    ) -> Result<usize, Over> {
        let begun = Instant::now();
        while !glance() {
            if begun.elapsed() > self.patience {
                return Ok(0);
            }
            std::thread::sleep(PAUSE);
        }
        if let Err(error) = socket::send(socket, question, &[]) {
            return if is_end(&error) { Err(Over) } else { Ok(0) };
        }
        let begun = Instant::now();
        while !sys::wait_readable_within(socket, GLANCE) {
            if begun.elapsed() > self.patience {
                return Ok(0);
            }
            glance();
        }
        match sys::receive(socket, buffer) {
            Ok(0) => Err(Over),
            Err(error) if is_end(&error) => Err(Over),
            received => Ok(received.unwrap_or(0)),
        }
    }

    /// Where in the arena memory is that a program wants to register.
    ///
    /// # Errors
    ///
    /// It is not in there.
    pub(crate) fn offset_of(&self, addr: usize, len: u64) -> Result<u64, EngineError> {
        self.arena.offset_of(addr, len).ok_or(EngineError::NotInArena)
    }
}

/// Connects to whoever shares an adapter, in the first place where somebody does; whose that is.
fn reach(spots: &[Spot]) -> io::Result<(OwnedFd, u32)> {
    let none = "neither this user nor root shares an adapter with this name";
    let mut refusal = io::Error::new(io::ErrorKind::NotFound, none);
    for Spot { path, owner } in spots {
        match reach_at(path) {
            Ok(socket) => return Ok((socket, *owner)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                let whose = if *owner == 0 { "root".into() } else { format!("user {owner}") };
                let why = format!("{whose} shares the adapter, but not with this user");
                refusal = io::Error::new(io::ErrorKind::PermissionDenied, why);
            }
            Err(error) => refusal = error,
        }
    }
    Err(refusal)
}

/// Connects to whoever shares an adapter there, also where many do at this moment.
fn reach_at(path: &Path) -> io::Result<OwnedFd> {
    let begun = Instant::now();
    loop {
        match connect(path) {
            Err(error) if !sys::would_block(&error) => return Err(error),
            Err(_) if begun.elapsed() > PATIENCE => return Err(silent(0)),
            Err(_) => std::thread::sleep(GLANCE),
            reached => return reached,
        }
    }
}

/// The other end has hung up: the kernel does so when its process ends.
struct Over;

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// Whether the other end of a socket has hung up, of which nothing else is wanted any more: late answers are
/// thrown away, some at a time.
fn has_hung_up(socket: &OwnedFd) -> Option<Over> {
    let mut buffer = [0; MAX_MESSAGE];
    for _ in 0..16 {
        match sys::receive(socket, &mut buffer) {
            Ok(0) => return Some(Over),
            Ok(_) => {}
            Err(error) => return is_end(&error).then_some(Over),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::guests::Guests;
    use super::super::place::Place;
    use super::*;
    use crate::accounts::own_user;
    use crate::testing::is_alone;

    #[test]
    fn whoever_shares_is_found_wherever_that_is() {
        let folder = std::env::temp_dir();
        let [none, stale, there] = ["none", "stale", "there"]
            .map(|it| folder.join(format!("quipu-{it}-{}", std::process::id())));
        let listen = |path: &PathBuf| {
            let mut place = Place::take(path.clone()).unwrap().unwrap();
            let listener = place.listen(&Guests::default()).unwrap();
            (place, listener)
        };
        let (_stale, closed) = listen(&stale);
        drop(closed);
        let (_there, _listener) = listen(&there);
        let reach = |paths: &[&PathBuf]| {
            let spot = |path: &&PathBuf| Spot { path: (*path).clone(), owner: own_user() };
            super::reach(&paths.iter().map(spot).collect::<Vec<_>>())
        };
        assert!(reach(&[&none, &stale, &there]).is_ok());
        let kind = |paths: &[&PathBuf]| reach(paths).unwrap_err().kind();
        assert_eq!(kind(&[&stale, &none]), io::ErrorKind::ConnectionRefused);
        assert_eq!(kind(&[&none]), io::ErrorKind::NotFound);
    }

    #[test]
    fn an_answer_is_waited_for_though_signals_come() {
        if !is_alone("share::calls::tests::an_answer_is_waited_for_though_signals_come") {
            return;
        }
        extern "C" fn nothing(_: libc::c_int) {}
        let handler: extern "C" fn(libc::c_int) = nothing;
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
        let [socket, adapter] = crate::share::pair().unwrap();
        // SAFETY: takes and gives integers.
        let waiter = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..50 {
                    // SAFETY: the thread waits for this one.
                    unsafe { libc::pthread_kill(waiter, libc::SIGUSR1) };
                    std::thread::sleep(Duration::from_millis(1));
                }
                socket::send(&adapter, &[0; 8], &[]).unwrap();
            });
            assert!(has_answer_within(&socket, PATIENCE));
        });
        assert!(sys::receive(&socket, &mut [0; 8]).is_ok());
        assert!(!has_answer_within(&socket, Duration::from_millis(5)));
    }

    #[test]
    fn a_program_is_told_of_as_many_addresses_as_fit_and_why_there_is_no_more() {
        let link: LinkSpec = "share:x".parse().unwrap();
        let own = |at: u16| std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, at).into();
        let info = QpipInfo {
            link: link.clone(),
            hardware: None,
            addresses: (0..300).map(own).collect(),
            mtu: 1500,
            checksum: true,
            segment: 0,
            enter: vec!["ip".into(), "netns".into()],
        };
        let said = write_info(Writer::default().word(HELLO).word(1u64), &info).bytes();
        assert!(said.len() <= MAX_MESSAGE);
        let heard = read_info(&link, &mut Reader::new(&said[16..])).unwrap();
        assert_eq!((&heard.addresses[..], heard.enter), (&info.addresses[..128], info.enter));
        // A welcome of another version, and one that is none.
        let welcome = |first: u64| {
            let [socket, adapter] = crate::share::pair().unwrap();
            let message = Writer::default().word(first).word(0u64).text("full");
            socket::send(&adapter, &message.bytes(), &[]).unwrap();
            let refused = Calls::read_welcome(&link, socket).err().unwrap();
            (refused.kind(), refused.to_string())
        };
        assert_eq!(welcome(HELLO), (io::ErrorKind::ResourceBusy, "full".into()));
        assert!(welcome(HELLO + 1).1.contains("another version"));
        assert!(welcome(HELLO << 8).1.contains("another protocol"));
    }

    #[test]
    fn who_does_not_answer_is_named() {
        let said = silent(4711);
        assert_eq!(said.kind(), io::ErrorKind::TimedOut);
        assert!(said.to_string().contains("(4711) does not answer"), "{said}");
        assert!(!silent(0).to_string().contains('('));
    }

    #[test]
    fn one_who_does_not_answer_keeps_what_it_has_until_it_hangs_up() {
        let [socket, adapter] = crate::share::pair().unwrap();
        let info = QpipInfo {
            link: "share:x".parse().unwrap(),
            hardware: None,
            addresses: Vec::new(),
            mtu: 1500,
            checksum: true,
            segment: 0,
            enter: Vec::new(),
        };
        let arena = Arena::new(Segment::heap(1 << 16));
        let calls = Calls::new(socket, arena, info, Duration::from_millis(20));
        let order =
            || calls.ask(&Call::Deregister { region: 1 }, &|| true, |_| Some(())).unwrap_err();
        let piece = calls.allocate(64).unwrap();
        assert!(matches!(order(), EngineError::AdapterSilent));
        // What it may still write to is nobody else's.
        drop(piece);
        assert!(matches!(calls.allocate(64), Err(EngineError::AdapterSilent)));
        // It hears one question, and that the program has left; what it answers then is to nothing.
        let mut buffer = [0; MAX_MESSAGE];
        assert_eq!(sys::receive(&adapter, &mut buffer).unwrap(), 16);
        assert_eq!(sys::receive(&adapter, &mut buffer).unwrap(), 0);
        socket::send(&adapter, &[0; 8], &[]).unwrap();
        assert!(matches!(order(), EngineError::AdapterSilent));
        assert!(matches!(order(), EngineError::AdapterSilent));
        drop(adapter);
        assert!(matches!(order(), EngineError::AdapterLost));
    }
}
