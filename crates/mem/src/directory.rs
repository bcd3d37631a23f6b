//! The directory of remotely accessible regions that an engine shows to peers on the same host.
//!
//! With it an initiator checks an rkey itself and then reaches the memory with process_vm_*, without
//! any work by the owner. A peer that may do that could read the owner's memory anyway, so the
//! directory tells it nothing new. It is written by its owner alone and mapped read-only by peers;
//! one that lies only leads an initiator astray inside the liar's own memory.
//!
//! An entry has 64 bytes: a sequence word (odd while the entry is written), then rkey and pd, access
//! and queue pair, iova, length, address. It is in the slot that the low bits of the key's index
//! name, as in [`Regions`](crate::Regions), but the capacity is fixed: a region whose slot is taken
//! is not published, and peers ask the owner instead.

use core::sync::atomic::{Ordering, fence};

use thiserror::Error;

use crate::access::{Access, AccessError};
use crate::key::Key;
use crate::regions::ANY_QP;
use crate::regions::table::{Entry, Role};
use crate::segment::{Segment, SegmentError, Words};

/// 8-byte words in an entry.
const ENTRY_WORDS: usize = 8;

/// Looks at an entry under change before giving up.
const ATTEMPTS: usize = 16;

/// Why a key was not found in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LookupError {
    /// The directory does not show the key: ask the owner.
    #[error("the key is not in the directory")]
    NotPublished,
    /// The entry was being changed each time it was read: ask the owner.
    #[error("the entry is being changed")]
    Busy,
    /// The key is shown and the access is refused.
    #[error(transparent)]
    Refused(#[from] AccessError),
}

/// Memory of the directory's owner, in its address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRange {
    /// The address of the first byte, valid in the owner's process only.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

/// A directory as its owner writes it.
#[derive(Debug)]
pub struct Directory {
    table: Slots,
}

/// A directory as a peer reads it.
#[derive(Clone, Debug)]
pub struct DirectoryReader {
    table: Slots,
}

#[derive(Clone)]
struct Slots {
    words: Words,
    mask: usize,
}

impl core::fmt::Debug for Slots {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Slots").field("mask", &self.mask).finish()
    }
}

/// An entry, copied out.
struct Shown {
    key: u32,
    pd: u32,
    access: u32,
    qp_num: u32,
    iova: u64,
    len: u64,
    addr: u64,
}

impl Slots {
    /// As many slots as the segment holds, rounded down to a power of two.
    fn new(segment: &Segment) -> Result<Slots, SegmentError> {
        let fit = segment.len() / (ENTRY_WORDS * 8);
        let slots = fit.checked_ilog2().map(|bits| 1usize << bits);
        let slots = slots.ok_or(SegmentError::OutOfBounds)?.min(1 << 24);
        Ok(Slots { words: segment.words(0, slots * ENTRY_WORDS)?, mask: slots - 1 })
    }

    fn word_of(&self, key: Key) -> usize {
        (key.index() as usize & self.mask) * ENTRY_WORDS
    }
}

impl Directory {
    /// A directory over the whole of a zeroed, writable segment: one slot for each 64 bytes, rounded
    /// down to a power of two.
    pub fn create(segment: &Segment) -> Result<Directory, SegmentError> {
        if !segment.is_writable() {
            return Err(SegmentError::ReadOnly);
        }
        Ok(Directory { table: Slots::new(segment)? })
    }

    /// The slots of the directory.
    pub fn capacity(&self) -> usize {
        self.table.mask + 1
    }

    /// Shows a region if peers have rights to it and its slot is free. Windows are not shown: work requests
    /// take them back, and would have to wait for peers that are in the middle of an access. Nor are regions
    /// whose pages may be absent, which the owner looks for.
    pub(crate) fn publish(&mut self, entry: &Entry) -> bool {
        let key = Key(entry.key);
        let window = matches!(entry.role, Role::Window { .. });
        if key == Key::NONE
            || window
            || entry.len != entry.true_len()
            || !entry.rights().intersects(Access::REMOTE)
        {
            return false;
        }
        let base = self.table.word_of(key);
        if self.table.words.at(base + 1).load(Ordering::Relaxed) as u32 != 0 {
            return false;
        }
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let fields = [
            pair(entry.key, entry.pd),
            pair(entry.rights().bits(), entry.qp_num),
            entry.iova,
            entry.len,
            entry.addr as u64,
        ];
        self.rewrite(base, fields);
        true
    }

    /// Takes an entry back. Peers may still be using what they found: see [`Guard`](crate::Guard).
    pub(crate) fn withdraw(&mut self, key: Key) {
        let base = self.table.word_of(key);
        if self.table.words.at(base + 1).load(Ordering::Relaxed) as u32 == key.0 {
            self.rewrite(base, [0; 5]);
            fence(Ordering::SeqCst);
        }
    }

    fn rewrite(&mut self, base: usize, fields: [u64; 5]) {
        let sequence = self.table.words.at(base);
        let odd = sequence.load(Ordering::Relaxed) | 1;
        sequence.store(odd, Ordering::Relaxed);
        // A thread that sees a new field sees the odd sequence too.
        fence(Ordering::Release);
        for (i, field) in fields.into_iter().enumerate() {
            self.table.words.at(base + 1 + i).store(field, Ordering::Relaxed);
        }
        sequence.store(odd.wrapping_add(1), Ordering::Release);
    }
}

impl DirectoryReader {
    /// Reads the directory in a segment, which may be mapped read-only. Both sides must map the
    /// same length.
    pub fn new(segment: &Segment) -> Result<DirectoryReader, SegmentError> {
        Ok(DirectoryReader { table: Slots::new(segment)? })
    }

    /// Checks an access as [`Regions::remote`](crate::Regions::remote) would, with the protection
    /// domain and queue pair number of the peer's end of the connection, and gives the place in the
    /// peer's memory. Call it between [`Guard::enter`](crate::Guard::enter) and
    /// [`Guard::leave`](crate::Guard::leave).
    #[inline]
    pub fn lookup(
        &self,
        pd: u32,
        qp_num: u32,
        rkey: Key,
        iova: u64,
        len: u64,
        need: Access,
    ) -> Result<RemoteRange, LookupError> {
        if need.contains(Access::REMOTE_ATOMIC) {
            if len != 8 || iova & 7 != 0 {
                return Err(AccessError::Misaligned.into());
            }
        } else if len == 0 {
            return Ok(RemoteRange { addr: 0, len: 0 });
        }
        let shown = self.read(rkey)?;
        if shown.key != rkey.0 || rkey == Key::NONE {
            return Err(LookupError::NotPublished);
        }
        if shown.pd != pd {
            return Err(AccessError::WrongPd.into());
        }
        if shown.qp_num != ANY_QP && shown.qp_num != qp_num {
            return Err(AccessError::WrongQp.into());
        }
        if !Access::from_bits_truncate(shown.access).contains(need & Access::REMOTE) {
            return Err(AccessError::Denied.into());
        }
        let offset = iova.wrapping_sub(shown.iova);
        if offset > shown.len || len > shown.len - offset {
            return Err(AccessError::OutOfBounds.into());
        }
        // A publisher that lies can make this wrap; it only names another place in its own memory.
        let addr = shown.addr.wrapping_add(offset);
        if need.contains(Access::REMOTE_ATOMIC) && addr & 7 != 0 {
            return Err(AccessError::Misaligned.into());
        }
        Ok(RemoteRange { addr, len })
    }

    fn read(&self, key: Key) -> Result<Shown, LookupError> {
        let base = self.table.word_of(key);
        let sequence = self.table.words.at(base);
        for _ in 0..ATTEMPTS {
            let before = sequence.load(Ordering::Acquire);
            let field = |i: usize| self.table.words.at(base + 1 + i).load(Ordering::Relaxed);
            let (names, rights) = (field(0), field(1));
            let (iova, len, addr) = (field(2), field(3), field(4));
            fence(Ordering::Acquire);
            if before & 1 == 0 && sequence.load(Ordering::Relaxed) == before {
                return Ok(Shown {
                    key: names as u32,
                    pd: (names >> 32) as u32,
                    access: rights as u32,
                    qp_num: (rights >> 32) as u32,
                    iova,
                    len,
                    addr,
                });
            }
            core::hint::spin_loop();
        }
        Err(LookupError::Busy)
    }
}
