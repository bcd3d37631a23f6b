//! Regions behind which there is not simply memory: those whose pages may be absent, those of which is kept
//! in mind what is lent, and the null region.
//!
//! Their length in the table is zero, so that every access to them leaves the short way and comes here.

use std::fmt::Debug;
use std::sync::Arc;

use super::table::{Entry, LOCAL, Role};
use super::{Regions, RegisterError, Registration, refusal};
use crate::access::{Access, AccessError};
use crate::key::Key;
use crate::span::Span;

/// What a process has mapped.
pub trait Mappings: Debug + Send + Sync {
    /// Whether all of `len` bytes at `addr` may be read or, if `write` says so, written.
    fn allow(&self, addr: usize, len: u64, write: bool) -> bool;
}

/// What stands behind a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// Memory that is there for the life of the region.
    Memory,
    /// `len` bytes of address space, in which pages come and go: asked for at each access.
    OnDemand { len: u64 },
    /// `len` bytes of memory, of which is kept in mind what is lent (see [`Regions::lend`]).
    Watched { len: u64 },
    /// Reads find zeros at the entry's address, writes go to `sink`. Both have [`NULL_LEN`] bytes.
    Null { sink: usize },
}

/// The bytes that one access to a null region can name: the length of an element has 32 bits.
pub const NULL_LEN: u64 = 1 << 32;

/// Zeros to read from and a place to throw bytes away, of [`NULL_LEN`] bytes each.
#[derive(Clone, Copy, Debug)]
pub struct Nothing {
    zeros: usize,
    sink: usize,
}

impl Nothing {
    /// Vouches for both.
    ///
    /// # Safety
    ///
    /// For the life of the process, `zeros` is valid for reads and `sink` for writes of [`NULL_LEN`]
    /// bytes, and no Rust reference to them is alive.
    pub unsafe fn new(zeros: usize, sink: usize) -> Nothing {
        Nothing { zeros, sink }
    }
}

impl Entry {
    /// The bytes of the region.
    pub(crate) fn true_len(&self) -> u64 {
        match self.backing {
            Backing::Memory => self.len,
            Backing::OnDemand { len } | Backing::Watched { len } => len,
            Backing::Null { .. } => u64::MAX,
        }
    }

    /// Where a range is, if it is inside of `all` bytes.
    fn place(&self, all: u64, iova: u64, len: u64) -> Option<usize> {
        let offset = iova.wrapping_sub(self.iova);
        let inside = offset <= all && len <= all - offset && len <= isize::MAX as u64;
        inside.then(|| self.addr + offset as usize)
    }

    /// Checks a registration of address space and gives its table entry, without a key.
    pub(crate) fn on_demand(registration: Registration) -> Result<Entry, RegisterError> {
        let Registration { pd, addr, len, iova, access } = registration;
        access.check_region()?;
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        if (addr as u64).checked_add(len).is_none() || iova.checked_add(len).is_none() {
            return Err(RegisterError::Wraps);
        }
        let backing = Backing::OnDemand { len };
        let role = Role::Region { bound: 0 };
        let access = access.bits() | LOCAL;
        Ok(Entry { pd, addr, iova, access, role, backing, ..Entry::FREE })
    }
}

impl Regions {
    /// From now on asks `mappings` before accesses to regions whose pages may be absent.
    pub fn ask(&mut self, mappings: Arc<dyn Mappings>) {
        self.mappings = Some(mappings);
    }

    /// Makes a region that reads as zeros and forgets what is written to it, of any length at any
    /// address. Its key is an lkey only.
    ///
    /// # Errors
    /// The table is full.
    pub fn register_null(&mut self, pd: u32, nothing: Nothing) -> Result<Key, RegisterError> {
        let entry = Entry {
            pd,
            addr: nothing.zeros,
            access: Access::LOCAL_WRITE.bits() | LOCAL,
            role: Role::Region { bound: 0 },
            backing: Backing::Null { sink: nothing.sink },
            ..Entry::FREE
        };
        self.table.insert(entry).map_err(|_| RegisterError::Full)
    }

    /// The end of an access that does not simply lie in memory: what it may go to, or why it may not.
    #[cold]
    #[inline(never)]
    #[expect(clippy::too_many_arguments, reason = "the facts of one access, all of them scalars")]
    pub(super) fn behind(
        &self,
        entry: &Entry,
        pd: u32,
        qp_num: u32,
        key: Key,
        iova: u64,
        len: u64,
        need: u32,
        write: bool,
    ) -> Result<Span<'_>, AccessError> {
        let refused = refusal(entry, pd, qp_num, key, need);
        if refused != AccessError::OutOfBounds {
            return Err(refused);
        }
        let addr = match entry.backing {
            Backing::Memory => return Err(refused),
            Backing::Null { sink } if len <= NULL_LEN => {
                if write {
                    sink
                } else {
                    entry.addr
                }
            }
            Backing::Null { .. } => return Err(refused),
            Backing::Watched { len: all } => {
                let addr = entry.place(all, iova, len).ok_or(refused)?;
                if let Some(lent) = self.lent.as_ref().filter(|_| write) {
                    lent.borrow_mut().about_to_write(addr, len as usize);
                }
                addr
            }
            Backing::OnDemand { len: all } => {
                let addr = entry.place(all, iova, len).ok_or(refused)?;
                let there = |mappings: &Arc<dyn Mappings>| mappings.allow(addr, len, write);
                if !self.mappings.as_ref().is_some_and(there) {
                    return Err(refused);
                }
                addr
            }
        };
        let ptr = core::ptr::with_exposed_provenance_mut(addr);
        // SAFETY: for a null region whoever made the `Nothing` vouches for both places, of which the
        // access fits either. Memory of which is kept in mind what is lent is a region like any other, inside
        // of which the access is. Address space lies inside a live region, whose maker promised what
        // `register` asks for of the pages that are there, and these are, with the right to write if
        // that is asked for. As elsewhere the region cannot be removed while `self` is borrowed.
        Ok(unsafe { Span::new(ptr, len as usize, write) })
    }
}
