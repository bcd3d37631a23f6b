//! A server's export as a disk.

use std::io;
use std::sync::{Mutex, PoisonError};

use quipu_nbd::uri::Uri;
use quipu_nbd::{Command, CommandFlags, Errno, Export, Extent, TransmissionFlags};

use super::disk::Disk;
use super::session::{Session, Trouble};

/// Connections at a time to a server whose connections see each other's writes.
const CONNECTIONS: usize = 4;
/// Longest payload that is asked for at a time, in bytes, though a server may take more.
const LONGEST: usize = 8 << 20;

/// The disk. Sessions are opened as they are needed, and kept.
pub(super) struct Remote {
    uri: Uri,
    export: Export,
    has_status: bool,
    idle: Mutex<Vec<Session>>,
}

impl Remote {
    /// Connects to the URI's export.
    pub(super) fn open(uri: &Uri) -> Result<Self, Trouble> {
        let session = Session::open(uri)?;
        let (export, has_status) = (session.export().clone(), session.has_status());
        Ok(Self { uri: uri.clone(), export, has_status, idle: Mutex::new(vec![session]) })
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
    fn with<T>(
        &self,
        act: impl FnOnce(&mut Session) -> Result<Result<T, Errno>, Trouble>,
    ) -> io::Result<T> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle().pop();
        let mut session = match kept {
            Some(session) => session,
            None => Session::open(&self.uri)?,
        };
        let outcome = act(&mut session)?;
        idle().push(session);
        outcome.map_err(|errno| io::Error::from_raw_os_error(errno.0 as i32))
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
