//! Memory that an end maps for the other to write to (`riomap(3)`, `riowrite(3)`).

use libc::c_int;
use quipu_abi_types::*;
use quipu_cabi::Errno;

use super::Connection;
use crate::rsocket::PIECE;
use crate::rsocket::wire::Mapping;
use crate::verbs::{pointer, verbs};

impl Connection {
    /// Writes an entry of the peer's table; false: not now.
    pub(crate) fn write_mapping(&mut self, index: usize, mapping: &Mapping) -> Result<bool, Errno> {
        let Some((peer, _)) = &self.peer else { return Err(Errno::ENOTCONN) };
        let remote = peer.addr + u64::from(peer.table()) + (index * Mapping::LEN) as u64;
        let rkey = peer.rkey;
        let Some((at, _)) = self.room(Mapping::LEN) else { return Ok(false) };
        let bytes = mapping.encode();
        // SAFETY: the array has that many bytes.
        unsafe { self.memory.write(self.buffer_at + at, bytes.as_ptr(), bytes.len()) };
        self.post(None, at, bytes.len(), remote, rkey)?;
        Ok(true)
    }

    /// Writes to memory that the peer has mapped, as much as fits now; how much.
    ///
    /// # Safety
    ///
    /// `from` has `len` bytes.
    pub(crate) unsafe fn write_mapped(
        &mut self,
        from: *const u8,
        len: usize,
        offset: u64,
    ) -> Result<usize, Errno> {
        let table = self.own.table() as usize;
        let entries = (0..self.own.mappings as usize).map(|at| self.memory.mapping(table, at));
        let mut found =
            entries.filter_map(|entry| Some((entry.rkey, entry.reach(offset, len as u64)?)));
        let (rkey, (remote, len)) = found.next().ok_or(Errno::EINVAL)?;
        drop(found);
        let Some((at, room)) = self.room(1) else { return Ok(0) };
        let piece = (len as usize).min(room).min(PIECE);
        // SAFETY: passed on from the caller.
        unsafe { self.memory.write(self.buffer_at + at, from, piece) };
        self.post(None, at, piece, remote, rkey)?;
        Ok(piece)
    }

    /// Registers the program's memory, with `remote` for the peer to write to.
    ///
    /// # Safety
    ///
    /// `addr` has `len` bytes until they are unmapped.
    pub(crate) unsafe fn register(
        &self,
        addr: *mut u8,
        len: usize,
        remote: bool,
    ) -> Result<*mut ibv_mr, Errno> {
        let remote = if remote { IBV_ACCESS_REMOTE_WRITE } else { 0 };
        let access = (IBV_ACCESS_LOCAL_WRITE | remote) as c_int;
        // SAFETY: passed on from the caller; the domain is that of the device.
        pointer(unsafe { (verbs()?.reg_mr)((*self.id).pd, addr.cast(), len, access) })
    }
}
