//! A server's export as a disk.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use quipu_nbd::uri::Uri;
use quipu_nbd::{Command, CommandFlags, Errno, Export, Extent, TransmissionFlags};

use super::disk::Disk;
use super::session::{Outcome, Session, Trouble};

/// Connections at a time to a server whose connections see each other's writes.
const CONNECTIONS: usize = 4;
/// Longest payload that is asked for at a time, in bytes, though a server may take more.
const LONGEST: usize = 8 << 20;

/// How long a reply may take, unless the caller says otherwise: a flush of a slow disk takes some time.
const REPLY_PATIENCE: Duration = Duration::from_secs(30);
/// Between two attempts to connect again.
const RETRY: Duration = Duration::from_millis(100);

/// The disk. Sessions are opened as they are needed, and kept.
pub(super) struct Remote {
    uri: Uri,
    export: Export,
    has_status: bool,
    idle: Mutex<Vec<Session>>,
    /// How long a reply may take.
    patience: Duration,
    /// For how long a lost connection is made anew, and requests are repeated.
    reconnect: Option<Duration>,
}

impl Remote {
    /// Connects to the URI's export.
    pub(super) fn open(uri: &Uri) -> Result<Self, Trouble> {
        let session = Session::open(uri)?;
        let (export, has_status) = (session.export().clone(), session.has_status());
        let (idle, patience) = (Mutex::new(vec![session]), REPLY_PATIENCE);
        Ok(Self { uri: uri.clone(), export, has_status, idle, patience, reconnect: None })
    }

    /// How long a reply may take from now on: afterwards the connection counts as lost.
    pub(super) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// For how long a lost connection is made anew. Then the requests in flight are repeated.
    pub(super) fn set_reconnect(&mut self, limit: Option<Duration>) {
        self.reconnect = limit;
    }

    /// The export.
    pub(super) fn export(&self) -> &Export {
        &self.export
    }

    /// Whether the server tells what is allocated.
    pub(super) fn has_status(&self) -> bool {
        self.has_status
    }

    /// Does something with a session that nobody else uses meanwhile. A session that failed is not
    /// kept. Requests may be repeated: none of them does something else the second time.
    fn with<T>(&self, mut act: impl FnMut(&mut Session) -> Outcome<T>) -> io::Result<T> {
        let mut lost = None;
        loop {
            let trouble = match self.session().and_then(|mut session| {
                let outcome = act(&mut session)?;
                self.idle().push(session);
                Ok(outcome)
            }) {
                // The server ends: another is to come.
                Ok(Err(Errno::SHUTDOWN)) if self.reconnect.is_some() => Trouble::Closed,
                Ok(outcome) => {
                    return outcome.map_err(|errno| io::Error::from_raw_os_error(errno.0 as i32));
                }
                Err(trouble) => trouble,
            };
            // Those of before the loss are of no use either.
            self.idle().clear();
            let lost = *lost.get_or_insert_with(Instant::now);
            match self.reconnect {
                Some(limit) if lost.elapsed() < limit => thread::sleep(RETRY),
                _ => return Err(trouble.into()),
            }
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Session>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session that is idle, or a new one.
    fn session(&self) -> Result<Session, Trouble> {
        let kept = self.idle().pop();
        let mut session = match kept {
            Some(session) => session,
            None => Session::open(&self.uri)?,
        };
        if session.export().size != self.export.size {
            return Err(Trouble::Changed);
        }
        session.set_patience(self.patience)?;
        Ok(session)
    }

    fn order(&self, command: Command, flags: CommandFlags, range: (u64, u64)) -> io::Result<()> {
        self.with(|session| session.order(command, flags, range.0, range.1))
    }

    fn can(&self, flag: TransmissionFlags) -> bool {
        self.export.flags.contains(flag)
    }

    fn piece(&self) -> usize {
        LONGEST.min(self.export.blocks.maximum as usize).max(1)
    }
}

impl Disk for Remote {
    fn size(&self) -> u64 {
        self.export.size
    }

    fn is_read_only(&self) -> bool {
        self.can(TransmissionFlags::READ_ONLY)
    }

    fn parallel(&self) -> usize {
        // Readers need no promise about what other connections see.
        let safe = self.is_read_only() || self.can(TransmissionFlags::MULTI_CONN);
        if safe { CONNECTIONS } else { 1 }
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let mut at = offset;
        for piece in data.chunks_mut(self.piece()) {
            let length = piece.len() as u64;
            self.with(|session| session.read(at, piece))?;
            at += length;
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut at = offset;
        for piece in data.chunks(self.piece()) {
            self.with(|session| session.write(at, piece))?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        if !self.can(TransmissionFlags::FLUSH) {
            return Ok(());
        }
        self.order(Command::Flush, CommandFlags::empty(), (0, 0))
    }

    fn zero(&self, offset: u64, length: u64, hole: bool) -> io::Result<()> {
        const STEP: u64 = 1 << 30;
        let flags = if hole { CommandFlags::empty() } else { CommandFlags::NO_HOLE };
        let (mut at, end) = (offset, offset + length);
        while at < end {
            if self.can(TransmissionFlags::WRITE_ZEROES) {
                let count = STEP.min(end - at);
                self.order(Command::WriteZeroes, flags, (at, count))?;
                at += count;
            } else {
                let zeros = vec![0; self.piece().min((end - at) as usize)];
                self.write(at, &zeros)?;
                at += zeros.len() as u64;
            }
        }
        Ok(())
    }

    fn extents(&self, offset: u64, length: u64) -> io::Result<Vec<Extent>> {
        let length = length.min(u64::from(u32::MAX) & !4095);
        if !self.has_status {
            return Ok(vec![Extent { length, hole: false, zero: false }]);
        }
        self.with(|session| session.extents(offset, length))
    }
}
