//! A server's export as a disk.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quipu_nbd::uri::Uri;
use quipu_nbd::{Command, CommandFlags, Export, Extent, TransmissionFlags};

use super::disk::Disk;
use super::session::{Outcome, PATIENCE, Session, Trouble};

/// Connections at a time to a server whose connections see each other's writes.
const CONNECTIONS: usize = 4;
/// Longest payload that is asked for at a time, in bytes, though a server may take more.
const LONGEST: usize = 8 << 20;

/// How long a reply may take, unless the caller says otherwise: a flush of a slow disk takes some time.
const REPLY_PATIENCE: Duration = Duration::from_secs(30);
/// How long a server may take for each step of the negotiation of a further connection, before the first
/// one has to do: some servers take one connection only, and leave others waiting.
const FURTHER_PATIENCE: Duration = Duration::from_secs(1);

/// The connections.
struct Sessions {
    idle: Vec<Session>,
    /// How many there are or are being made.
    count: usize,
    /// The server takes no more than there are.
    is_alone: bool,
}

/// The disk. Sessions are opened as they are needed, and kept.
pub(super) struct Remote {
    uri: Uri,
    export: Export,
    has_status: bool,
    sessions: Mutex<Sessions>,
    /// A session has become idle or has ended.
    changed: Condvar,
    /// How long a reply may take.
    patience: Duration,
}

impl Remote {
    /// Connects to the URI's export.
    pub(super) fn open(uri: &Uri) -> Result<Self, Trouble> {
        let session = Session::open(uri, PATIENCE)?;
        let (export, has_status) = (session.export().clone(), session.has_status());
        let sessions = Sessions { idle: vec![session], count: 1, is_alone: false };
        let (sessions, changed) = (Mutex::new(sessions), Condvar::new());
        let patience = REPLY_PATIENCE;
        Ok(Self { uri: uri.clone(), export, has_status, sessions, changed, patience })
    }

    /// How long a reply may take from now on: afterwards the connection counts as lost.
    pub(super) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// The export.
    pub(super) fn export(&self) -> &Export {
        &self.export
    }

    /// Whether the server tells what is allocated.
    pub(super) fn has_status(&self) -> bool {
        self.has_status
    }

    /// Does something with a session that nobody else uses meanwhile. A session that failed is not kept.
    fn with<T>(&self, act: impl FnOnce(&mut Session) -> Outcome<T>) -> io::Result<T> {
        let mut session = self.session()?;
        let outcome = act(&mut session);
        let mut sessions = self.sessions();
        match &outcome {
            Ok(_) => sessions.idle.push(session),
            Err(_) => sessions.count -= 1,
        }
        drop(sessions);
        self.changed.notify_one();
        outcome?.map_err(|errno| io::Error::from_raw_os_error(errno.0 as i32))
    }

    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session that is idle, or a new one. If the server takes no further connection, it waits for one
    /// of those that there are.
    fn session(&self) -> Result<Session, Trouble> {
        let mut sessions = self.sessions();
        loop {
            if let Some(mut session) = sessions.idle.pop() {
                match session.set_patience(self.patience) {
                    Ok(()) => return Ok(session),
                    Err(error) => {
                        sessions.count -= 1;
                        return Err(error.into());
                    }
                }
            }
            if !sessions.is_alone || sessions.count == 0 {
                sessions.count += 1;
                let patience = if sessions.count > 1 { FURTHER_PATIENCE } else { PATIENCE };
                drop(sessions);
                let opened = self.open_further(patience);
                sessions = self.sessions();
                let trouble = match opened {
                    Ok(session) => return Ok(session),
                    Err(trouble) => trouble,
                };
                sessions.count -= 1;
                if sessions.count == 0 {
                    return Err(trouble);
                }
                sessions.is_alone = true;
                continue;
            }
            sessions = self.changed.wait(sessions).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn open_further(&self, patience: Duration) -> Result<Session, Trouble> {
        let mut session = Session::open(&self.uri, patience)?;
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
