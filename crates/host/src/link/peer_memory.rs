//! The memory of a peer process on this host: what it shares by windows, the rest by `process_vm_readv` and
//! `process_vm_writev`.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use libc::{c_ulong, c_void, iovec, pid_t};
use quipu_mem::{Segment, SharedPagesReader};
use quipu_nic::{Atomic, PeerMemory, PeerMemoryFault};

use super::life::Sight;
use super::windows::Windows;

/// Pieces that one system call takes; enough for most lists, and small enough for the stack.
const PIECES: usize = 32;

/// A process of this host that lets us into its memory.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    pid: pid_t,
    /// Cleared when the link to the process breaks: its number may then belong to another one.
    alive: Arc<AtomicBool>,
    /// Says the same sooner, where the peer tells by it.
    life: Option<Sight>,
    /// What of its memory it offers to be mapped.
    windows: Option<Mutex<Windows>>,
}

impl ProcessMemory {
    /// The memory of `pid`, as long as `alive` says so.
    pub(crate) fn new(pid: pid_t, alive: Arc<AtomicBool>) -> Self {
        Self { pid, alive, life: None, windows: None }
    }

    /// The same, with the word by which the peer tells that it lives.
    pub(crate) fn with_life(self, life: Option<Sight>) -> Self {
        Self { life, ..self }
    }

    #[inline]
    fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire) && !self.life.as_ref().is_some_and(Sight::is_dead)
    }

    /// The same, with the peer's list of what can be mapped.
    pub(crate) fn with_windows(self, list: SharedPagesReader) -> Self {
        let windows = Windows::new(list, self.pid, Arc::clone(&self.alive));
        Self { windows: Some(Mutex::new(windows)), ..self }
    }

    fn transfer(
        &self,
        way: Way,
        remote: &[(u64, u64)],
        local: &[(usize, usize)],
    ) -> Result<(), PeerMemoryFault> {
        if !self.is_alive() {
            return Err(PeerMemoryFault::Unreachable);
        }
        if let Some(windows) = &self.windows {
            // Whose engine's lock is held, so that nobody else is there.
            let mut windows = windows.lock().unwrap_or_else(PoisonError::into_inner);
            if windows.meet(remote) {
                return self.transfer_through(&mut windows, way, remote, local);
            }
        }
        if let (&[(at, len)], &[own]) = (remote, local) {
            let (here, there) = ([piece(own)], [piece((at as usize, len as usize))]);
            let moved = way.call(self.pid, &here, &there).map_err(|e| fault(&e))?;
            if moved == there[0].iov_len {
                return Ok(());
            }
        }
        self.transfer_pieces(way, remote, local.iter().copied())
    }

    /// The same for memory of which a part or all is mapped here.
    fn transfer_through(
        &self,
        windows: &mut Windows,
        way: Way,
        remote: &[(u64, u64)],
        local: &[(usize, usize)],
    ) -> Result<(), PeerMemoryFault> {
        let mut here = Row { rest: local, done: 0 };
        for &(addr, len) in remote {
            let mut done = 0;
            while done < len {
                // What the peer's directory says may wrap around; then it is nowhere.
                let at = addr.wrapping_add(done);
                let part = windows.part(at, len - done);
                done += part.len;
                match part.view {
                    Some((view, mut offset)) => {
                        for own in here.take(part.len as usize) {
                            way.copy(view, offset, own)?;
                            offset += own.1;
                        }
                    }
                    None => {
                        self.transfer_pieces(way, &[(at, part.len)], here.take(part.len as usize))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The same by the kernel, for lists, and for what it moves in parts.
    fn transfer_pieces(
        &self,
        way: Way,
        remote: &[(u64, u64)],
        local: impl Iterator<Item = (usize, usize)>,
    ) -> Result<(), PeerMemoryFault> {
        let mut there =
            Cursor::new(remote.iter().map(|&(addr, len)| (addr as usize, len as usize)));
        let mut here = Cursor::new(local);
        loop {
            let (there_vec, there_len) = there.gather();
            let (here_vec, here_len) = here.gather();
            if there_len == 0 || here_len == 0 {
                return Ok(());
            }
            let moved = way.call(self.pid, here_vec, there_vec).map_err(|e| fault(&e))?;
            if moved == 0 {
                return Err(PeerMemoryFault::BadAddress);
            }
            there.advance(moved);
            here.advance(moved);
        }
    }
}

impl PeerMemory for ProcessMemory {
    fn read(&self, remote: &[(u64, u64)], local: &[(usize, usize)]) -> Result<(), PeerMemoryFault> {
        self.transfer(Way::Read, remote, local)
    }

    fn write(
        &self,
        local: &[(usize, usize)],
        remote: &[(u64, u64)],
    ) -> Result<(), PeerMemoryFault> {
        self.transfer(Way::Write, remote, local)
    }

    fn is_mapped(&self) -> bool {
        // Every process lets its peers see a list, on which there mostly is nothing.
        self.windows.as_ref().is_some_and(|windows| {
            !windows.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
        })
    }

    fn view(&self, addr: u64, len: u64) -> Option<Segment> {
        let mut windows = self.windows.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_alive() || !windows.meet(&[(addr, len)]) {
            return None;
        }
        let part = windows.part(addr, len);
        let (view, offset) = part.view.filter(|_| part.len == len)?;
        view.slice(offset, usize::try_from(len).ok()?).ok()
    }

    fn atomic(&self, addr: u64, op: Atomic) -> Option<u64> {
        let mut windows = self.windows.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_alive() || !windows.meet(&[(addr, 8)]) {
            return None;
        }
        let (view, offset) = windows.part(addr, 8).view?;
        let word = view.span(offset, 8).ok()?;
        word.as_raw().0.is_multiple_of(8).then(|| op.execute(word))
    }
}

/// An address and a length as the kernel takes them.
fn piece((addr, len): (usize, usize)) -> iovec {
    iovec { iov_base: std::ptr::with_exposed_provenance_mut::<c_void>(addr), iov_len: len }
}

fn fault(error: &io::Error) -> PeerMemoryFault {
    match error.raw_os_error() {
        Some(libc::EFAULT) => PeerMemoryFault::BadAddress,
        _ => PeerMemoryFault::Unreachable,
    }
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    /// From the other process.
    Read,
    /// To the other process.
    Write,
}

impl Way {
    /// Moves bytes between a view of the other process's memory and a piece of one's own.
    #[inline]
    fn copy(
        self,
        view: &Segment,
        offset: usize,
        (own, len): (usize, usize),
    ) -> Result<(), PeerMemoryFault> {
        // SAFETY: `own` is memory that applications have registered (the contract of `PeerMemory`).
        let moved = unsafe {
            match self {
                Self::Read => view.load_to(offset, own, len),
                Self::Write => view.store_from(offset, own, len),
            }
        };
        moved.map_err(|_| PeerMemoryFault::BadAddress)
    }

    /// Moves bytes between this process and `pid`; how many, less than asked if a page further on
    /// cannot be accessed. The kernel checks every address, on both sides.
    pub(crate) fn call(self, pid: pid_t, here: &[iovec], there: &[iovec]) -> io::Result<usize> {
        let (local, local_len) = (here.as_ptr(), here.len() as c_ulong);
        let (remote, remote_len) = (there.as_ptr(), there.len() as c_ulong);
        // SAFETY: both lists are live slices. What they name is memory that applications have
        // registered (the contract of `PeerMemory`), which RDMA changes under their eyes; the
        // kernel answers EFAULT for what is not mapped.
        let moved = unsafe {
            match self {
                Self::Read => libc::process_vm_readv(pid, local, local_len, remote, remote_len, 0),
                Self::Write => {
                    libc::process_vm_writev(pid, local, local_len, remote, remote_len, 0)
                }
            }
        };
        crate::sys::check_len(moved)
    }
}

/// A list of pieces of own memory, of whose first `done` bytes are dealt with.
struct Row<'a> {
    rest: &'a [(usize, usize)],
    done: usize,
}

impl Row<'_> {
    /// The pieces of the next `len` bytes, which are taken as they are asked for.
    fn take(&mut self, mut len: usize) -> impl Iterator<Item = (usize, usize)> {
        std::iter::from_fn(move || {
            while let Some(&(at, whole)) = self.rest.first()
                && len > 0
            {
                let piece = (at + self.done, (whole - self.done).min(len));
                len -= piece.1;
                self.done += piece.1;
                if self.done == whole {
                    (self.rest, self.done) = (&self.rest[1..], 0);
                }
                if piece.1 > 0 {
                    return Some(piece);
                }
            }
            None
        })
    }
}

/// A list of pieces, and how far it has been worked off.
struct Cursor<I> {
    rest: I,
    batch: [iovec; PIECES],
    first: usize,
    filled: usize,
}

impl<I: Iterator<Item = (usize, usize)>> Cursor<I> {
    fn new(rest: I) -> Self {
        Self { rest, batch: [piece((0, 0)); PIECES], first: 0, filled: 0 }
    }

    /// The next pieces, and how many bytes they have.
    fn gather(&mut self) -> (&[iovec], usize) {
        if self.first == self.filled {
            (self.first, self.filled) = (0, 0);
            while self.filled < PIECES {
                let Some((addr, len)) = self.rest.next() else {
                    break;
                };
                if len > 0 {
                    self.batch[self.filled] = piece((addr, len));
                    self.filled += 1;
                }
            }
        }
        let batch = &self.batch[self.first..self.filled];
        (batch, batch.iter().fold(0, |sum: usize, piece| sum.saturating_add(piece.iov_len)))
    }

    fn advance(&mut self, mut moved: usize) {
        while moved > 0 && self.first < self.filled {
            let piece = &mut self.batch[self.first];
            let part = moved.min(piece.iov_len);
            piece.iov_base = piece.iov_base.wrapping_byte_add(part);
            piece.iov_len -= part;
            moved -= part;
            if piece.iov_len == 0 {
                self.first += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(alive: bool) -> ProcessMemory {
        ProcessMemory::new(std::process::id() as pid_t, Arc::new(AtomicBool::new(alive)))
    }

    #[test]
    fn moves_lists_of_different_shapes() {
        let mut source: Vec<u8> = (0..1000u32).map(|i| i as u8).collect();
        let mut target = vec![0u8; 1000];
        let (from, to) = (source.as_mut_ptr().expose_provenance(), target.as_mut_ptr());
        let to = to.expose_provenance();
        let remote: Vec<_> = (0..100).map(|i| ((from + i * 10) as u64, 10)).collect();
        let local = [(to, 3), (to + 3, 0), (to + 3, 900), (to + 903, 97)];
        own(true).read(&remote, &local).unwrap();
        assert_eq!(source, target);
        source.fill(0);
        own(true).write(&local, &remote).unwrap();
        assert_eq!(source, target);
    }

    #[test]
    fn reports_bad_addresses_and_dead_peers() {
        let mut byte = 0u8;
        let local = [((&raw mut byte).expose_provenance(), 1)];
        assert!(matches!(own(true).read(&[(8, 1)], &local), Err(PeerMemoryFault::BadAddress)));
        assert!(matches!(own(false).read(&[(8, 1)], &local), Err(PeerMemoryFault::Unreachable)));
    }
}
