//! The program's end of the socket: it asks, and waits for the answer. Not under the lock of its engine.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use quipu_mem::Segment;

use super::arena::Arena;
use super::words::{Call, HELLO, Reader, Writer, outcome};
use super::{connect, place};
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

/// What a program knows of the adapter that it is attached to.
#[derive(Debug)]
pub(crate) struct Calls {
    /// `None` once the other end is gone.
    socket: Mutex<Option<OwnedFd>>,
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

fn nonsense() -> io::Error {
    io::Error::other("the process that shares the adapter speaks another language")
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
    let message = message.word(info.segment).word(info.addresses.len() as u64);
    let with = |message: Writer, ip: &IpAddr| message.address((*ip, 0).into());
    info.addresses.iter().fold(message, with).text(&info.enter.join(" "))
}

impl Calls {
    /// Attaches to the adapter that a process of this user shares as `name`, with so much memory of one's
    /// own if the other end agrees.
    ///
    /// # Errors
    ///
    /// Nobody shares one under this name, or somebody else's process does; no memory or descriptors.
    pub(crate) fn attach(link: &LinkSpec, name: &str, arena_bytes: usize) -> io::Result<Welcome> {
        let socket = reach(&place(name)?)?;
        let (_, user) = socket::peer_credentials(&socket)?;
        if !socket::is_own_user(user) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let hello = Writer::default().word(HELLO).word(arena_bytes as u64);
        socket::send(&socket, &hello.bytes(), &[])?;
        if !sys::wait_readable_within(&socket, PATIENCE) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut buffer = [0; MAX_MESSAGE];
        let mut received = socket::receive(&socket, &mut buffer)?;
        if received.len == 0 {
            return Err(io::Error::other("it takes no more programs"));
        }
        let mut answer = Reader::new(&buffer[..received.len]);
        let (Some(HELLO), Some(rings)) = (answer.word(), answer.short::<usize>()) else {
            return Err(nonsense());
        };
        let info = read_info(link, &mut answer).ok_or_else(nonsense)?;
        let (Some(bell), Some(file)) = (received.fds.pop(), received.fds.pop()) else {
            return Err(nonsense());
        };
        let memory = segment::attach(&file, Writers::Both, segment::MAX_BYTES)?;
        let arena = memory.len().checked_sub(rings).and_then(|len| memory.slice(rings, len).ok());
        let arena = Arena::new(arena.ok_or_else(nonsense)?);
        let calls = Self { socket: Mutex::new(Some(socket)), arena, info };
        Ok(Welcome { calls, memory, bell })
    }

    /// What the adapter stands on.
    pub(crate) fn info(&self) -> &QpipInfo {
        &self.info
    }

    /// Memory that can be registered.
    ///
    /// # Errors
    ///
    /// There is no room for it.
    pub(crate) fn allocate(&self, len: usize) -> Result<Segment, EngineError> {
        self.arena.take(len).ok_or(EngineError::ArenaFull { len })
    }

    /// Asks, and reads the answer. Meanwhile `glance` is called now and then.
    ///
    /// # Errors
    ///
    /// The adapter refuses the call; [`EngineError::AdapterLost`].
    pub(crate) fn ask<T>(
        &self,
        call: &Call,
        glance: &dyn Fn(),
        read: impl FnOnce(&mut Reader<'_>) -> Option<T>,
    ) -> Result<T, EngineError> {
        let mut held = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(socket) = held.as_ref() else { return Err(EngineError::AdapterLost) };
        let mut buffer = [0; MAX_MESSAGE];
        let answered = exchange(socket, &call.encode(), glance, &mut buffer);
        let read = answered.ok().and_then(|len| match outcome(&buffer[..len])? {
            Ok(mut yields) => read(&mut yields).map(Ok),
            Err(error) => Some(Err(error)),
        });
        read.unwrap_or_else(|| {
            // What would come now would be taken for the answer to something else.
            *held = None;
            Err(EngineError::AdapterLost)
        })
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

/// Connects to whoever shares an adapter, also where many do at this moment.
fn reach(path: &Path) -> io::Result<OwnedFd> {
    let begun = Instant::now();
    loop {
        match connect(path) {
            Err(error) if sys::would_block(&error) && begun.elapsed() < PATIENCE => {
                std::thread::sleep(GLANCE);
            }
            outcome => return outcome,
        }
    }
}

/// Sends a question and waits for the answer; its length.
fn exchange(
    socket: &OwnedFd,
    question: &[u8],
    glance: &dyn Fn(),
    buffer: &mut [u8; MAX_MESSAGE],
) -> io::Result<usize> {
    socket::send(socket, question, &[])?;
    let begun = Instant::now();
    while !sys::wait_readable_within(socket, GLANCE) {
        if begun.elapsed() > PATIENCE {
            return Err(io::ErrorKind::TimedOut.into());
        }
        glance();
    }
    sys::receive(socket, buffer)
}
