//! The translation and protection table: from a key and an address to checked memory.

mod backing;
mod lent;
mod sge;
pub(crate) mod table;
mod vouched;
mod windows;

use core::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use rand_chacha::ChaCha20Rng;
use rand_core::SeedableRng;
use thiserror::Error;

use crate::access::{Access, AccessError, AccessFlagsError};
use crate::directory::Directory;
use crate::key::Key;
use crate::segment::Segment;
use crate::span::Span;

use backing::Backing;
pub use backing::{Mappings, NULL_LEN, Nothing};
use lent::Ledger;
pub use lent::Loan;
pub use sge::{Pieces, Sge, list_len};
pub use table::ANY_QP;
use table::{Entry, LOCAL, Role, Table};
pub use vouched::Vouched;
pub use windows::{Bind, BindError, InvalidateError, WindowType};

/// How a table of regions is set up.
#[derive(Clone, Copy, Debug)]
pub struct RegionsConfig {
    /// The most regions and windows together; at most 2^23, so that half of the 2^24 slots stay
    /// free for the next draw.
    pub max_entries: u32,
    /// The seed that all keys are drawn from. It must be unguessable where peers are not trusted.
    pub seed: [u8; 32],
}

impl RegionsConfig {
    /// Room for 2^20 regions and windows.
    pub fn new(seed: [u8; 32]) -> RegionsConfig {
        RegionsConfig { max_entries: 1 << 20, seed }
    }
}

/// What [`Regions::register`] is to make known.
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    /// The protection domain.
    pub pd: u32,
    /// Where the memory is in this process.
    pub addr: usize,
    /// Bytes. Zero makes a key through which nothing can be reached.
    pub len: u64,
    /// The address that work requests and peers use for the first byte (`ibv_reg_mr_iova`);
    /// `addr` for plain `ibv_reg_mr`. Ignored, and zero, with [`Access::ZERO_BASED`].
    pub iova: u64,
    /// Rights.
    pub access: Access,
}

/// What [`Regions::reregister`] is to change; `None` stays as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reregistration {
    /// The new protection domain (`IBV_REREG_MR_CHANGE_PD`).
    pub pd: Option<u32>,
    /// The new address, length in bytes, and iova (`IBV_REREG_MR_CHANGE_TRANSLATION`).
    pub memory: Option<(usize, u64, u64)>,
    /// The new rights (`IBV_REREG_MR_CHANGE_ACCESS`).
    pub access: Option<Access>,
}

/// Why memory was not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RegisterError {
    /// The rights are not legal together.
    #[error(transparent)]
    Access(#[from] AccessFlagsError),
    /// The address plus the length, or the iova plus the length, wraps around, or the length is
    /// more than a process can have.
    #[error("the range wraps around")]
    Wraps,
    /// Memory at address zero.
    #[error("the address is null")]
    Null,
    /// Write access to a segment that is mapped for reading only.
    #[error("the memory is read-only")]
    ReadOnly,
    /// The table holds as many regions and windows as it may.
    #[error("the table of regions is full")]
    Full,
}

/// Why a region was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReregisterError {
    /// The key names no region.
    #[error("the key names no region")]
    UnknownKey,
    /// Memory windows are bound to the region.
    #[error("memory windows are bound to the region")]
    Busy,
    /// The new shape is not legal; the region is as it was.
    #[error(transparent)]
    Register(#[from] RegisterError),
}

/// Why a region or window was not removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DeregisterError {
    /// The key names no such region or window.
    #[error("the key names no region or window of this kind")]
    UnknownKey,
    /// Memory windows are bound to the region.
    #[error("memory windows are bound to the region")]
    Busy,
}

/// What is left of a region or window that was removed.
///
/// If it was published, a peer may be in the middle of an access of its own: wait for the
/// [`Guard`](crate::Guard) of every link before the memory gets another use and before `owner` is
/// dropped.
#[derive(Debug, Default)]
#[must_use = "a published region may still be in use by a peer"]
pub struct Withdrawn {
    /// Peers could find the memory in the directory.
    pub published: bool,
    /// The table's share of the memory, for regions made by [`Regions::register_owned`].
    pub owner: Option<Segment>,
}

/// A region or window as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// The current key.
    pub key: Key,
    /// The protection domain.
    pub pd: u32,
    /// Where the memory is in this process.
    pub addr: usize,
    /// Bytes.
    pub len: u64,
    /// The address of the first byte in work requests.
    pub iova: u64,
    /// Rights.
    pub access: Access,
    /// `None` for a region.
    pub window: Option<WindowType>,
    /// Windows bound to the region.
    pub bound_windows: u32,
    /// Whether its pages may be absent, so that each access looks for them.
    pub on_demand: bool,
}

/// The translation and protection table of an adapter.
///
/// Keys are 32 bits from ChaCha20 and index the table directly: the check of an access is one
/// cache line and a few compares. Nothing is pinned, mapped or touched by a registration.
#[derive(Debug)]
pub struct Regions {
    table: Table,
    directory: Option<Directory>,
    /// The keys of windows that are bound to a queue pair, behind its number.
    windows: BTreeSet<(u32, Key)>,
    mappings: Option<Arc<dyn Mappings>>,
    /// What requests have lent to the adapter, if that is kept in mind.
    lent: Option<Box<RefCell<Ledger>>>,
}

impl Regions {
    /// An empty table.
    pub fn new(config: RegionsConfig) -> Regions {
        let rng = ChaCha20Rng::from_seed(config.seed);
        let table = Table::new(rng, config.max_entries);
        Regions { table, directory: None, windows: BTreeSet::new(), mappings: None, lent: None }
    }

    /// From now on publishes remotely accessible regions in `directory`. Those
    /// that exist already are published too.
    pub fn publish_in(&mut self, mut directory: Directory) {
        for entry in self.table.entries_mut() {
            let published = directory.publish(entry);
            entry.published = published;
        }
        self.directory = Some(directory);
    }

    /// Regions and windows in the table.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// True if there is neither region nor window.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes memory known under a new key, which is both lkey and rkey. O(1) in its length.
    ///
    /// # Safety
    ///
    /// Until the region is deregistered (or reregistered elsewhere), the memory is valid for reads,
    /// and for writes if `access` has [`Access::LOCAL_WRITE`]; other threads, programs and peers
    /// may change it at any time, so no Rust reference to it is alive while the table is used,
    /// other than to atomics or `UnsafeCell`s.
    pub unsafe fn register(&mut self, registration: Registration) -> Result<Key, RegisterError> {
        self.insert_region(registration, None)
    }

    /// Makes a segment known under a new key; the table holds a share of it, so that this is safe.
    /// `iova` is the address used in work requests, by default the address in this process.
    pub fn register_owned(
        &mut self,
        pd: u32,
        memory: &Segment,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Key, RegisterError> {
        if access.contains(Access::LOCAL_WRITE) && !memory.is_writable() {
            return Err(RegisterError::ReadOnly);
        }
        let addr = memory.addr();
        let iova = iova.unwrap_or(addr as u64);
        let registration = Registration { pd, addr, len: memory.len() as u64, iova, access };
        self.insert_region(registration, Some(memory.clone()))
    }

    /// Changes protection domain, memory or rights of a region, as `ibv_rereg_mr` does. The key
    /// stays, unless the memory changes: then a new key is drawn, so that a peer cannot reach the
    /// new memory with what it was given for the old. A region with windows bound is busy. On an
    /// error nothing has changed.
    ///
    /// # Safety
    ///
    /// The promise of [`register`](Regions::register) holds for the region's new shape.
    pub unsafe fn reregister(
        &mut self,
        key: Key,
        change: Reregistration,
    ) -> Result<(Key, Withdrawn), ReregisterError> {
        let entry = self.table.region(key).ok_or(ReregisterError::UnknownKey)?;
        if entry.bound_windows() > 0 {
            return Err(ReregisterError::Busy);
        }
        if let Backing::Null { .. } = entry.backing {
            return Err(ReregisterError::UnknownKey);
        }
        let stays = change.memory.is_none();
        let was_on_demand = matches!(entry.backing, Backing::OnDemand { .. });
        let (addr, len, iova) = change.memory.unwrap_or((entry.addr, entry.true_len(), entry.iova));
        let access = change.access.unwrap_or_else(|| entry.rights());
        let on_demand = access.contains(Access::ON_DEMAND) || stays && was_on_demand;
        let pd = change.pd.unwrap_or(entry.pd);
        let read_only = entry.owner.as_ref().is_some_and(|owner| !owner.is_writable());
        if read_only && stays && access.contains(Access::LOCAL_WRITE) {
            return Err(RegisterError::ReadOnly.into());
        }
        let registration = Registration { pd, addr, len, iova, access };
        let shape =
            if on_demand { Entry::on_demand(registration)? } else { Self::shape(registration)? };
        let shape = self.watched(shape);
        let mut withdrawn = self.remove(key);
        let key = if stays {
            self.table.put_back(key, Entry { owner: withdrawn.owner.take(), ..shape })
        } else {
            // A slot was just given back, so the table cannot be full.
            self.table.insert(shape).map_err(|_| RegisterError::Full)?
        };
        self.publish(key);
        Ok((key, withdrawn))
    }

    /// Forgets a region. It is refused while memory windows are bound to it.
    pub fn deregister(&mut self, key: Key) -> Result<Withdrawn, DeregisterError> {
        let entry = self.table.region(key).ok_or(DeregisterError::UnknownKey)?;
        if entry.bound_windows() > 0 {
            return Err(DeregisterError::Busy);
        }
        Ok(self.remove(key))
    }

    /// The region or window that `key` names now; for a window, the tag does not matter.
    pub fn info(&self, key: Key) -> Option<RegionInfo> {
        let entry = self.table.region(key).or_else(|| self.table.window(key))?;
        Some(RegionInfo {
            key: Key(entry.key),
            pd: entry.pd,
            addr: entry.addr,
            len: entry.true_len(),
            iova: entry.iova,
            access: entry.rights(),
            window: entry.window_type(),
            bound_windows: entry.bound_windows(),
            on_demand: matches!(entry.backing, Backing::OnDemand { .. }),
        })
    }

    /// Checks one scatter/gather element of protection domain `pd` for reading, or for writing.
    ///
    /// The key of an element of no bytes is not looked at.
    #[inline(always)]
    pub fn local(&self, pd: u32, sge: &Sge, need_write: bool) -> Result<Span<'_>, AccessError> {
        if sge.len == 0 {
            return Ok(Span::EMPTY);
        }
        let need = if need_write { LOCAL | Access::LOCAL_WRITE.bits() } else { LOCAL };
        self.check(pd, ANY_QP, sge.lkey, sge.addr, u64::from(sge.len), need, need_write)
    }

    /// Checks an access by a peer that came over queue pair `qp_num` of protection domain `pd`:
    /// `len` bytes at `iova` through `rkey`, with all the rights in `need` ([`Access::REMOTE_READ`],
    /// [`Access::REMOTE_WRITE`] or [`Access::REMOTE_ATOMIC`]; the latter takes 8 aligned bytes).
    ///
    /// The key of an access of no bytes is not looked at (IBA volume 1, C9-88).
    #[inline]
    pub fn remote(
        &self,
        pd: u32,
        qp_num: u32,
        rkey: Key,
        iova: u64,
        len: u64,
        need: Access,
    ) -> Result<Span<'_>, AccessError> {
        let atomic = need.contains(Access::REMOTE_ATOMIC);
        if atomic {
            if len != 8 || iova & 7 != 0 {
                return Err(AccessError::Misaligned);
            }
        } else if len == 0 {
            return Ok(Span::EMPTY);
        }
        let write = need.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let need = (need & Access::REMOTE).bits();
        let span = self.check(pd, qp_num, rkey, iova, len, need, write)?;
        if atomic && span.as_raw().0 & 7 != 0 {
            return Err(AccessError::Misaligned);
        }
        Ok(span)
    }

    /// Checks a flush by a peer that came over queue pair `qp_num` of protection domain `pd`: of the `len`
    /// bytes at `iova` of the region that `rkey` names, or of all of it. Nothing is touched, so pages of the
    /// range may be absent.
    pub fn flush(
        &self,
        pd: u32,
        qp_num: u32,
        rkey: Key,
        range: Option<(u64, u64)>,
    ) -> Result<(), AccessError> {
        let entry = self.table.at(rkey);
        let refused = refusal(entry, pd, qp_num, rkey, Access::FLUSH_GLOBAL.bits());
        if refused != AccessError::OutOfBounds {
            return Err(refused);
        }
        let Some((iova, len)) = range else { return Ok(()) };
        let (offset, all) = (iova.wrapping_sub(entry.iova), entry.true_len());
        if offset > all || len > all - offset { Err(refused) } else { Ok(()) }
    }

    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "the facts of one access, all of them scalars")]
    fn check(
        &self,
        pd: u32,
        qp_num: u32,
        key: Key,
        iova: u64,
        len: u64,
        need: u32,
        write: bool,
    ) -> Result<Span<'_>, AccessError> {
        let entry = self.table.at(key);
        let offset = iova.wrapping_sub(entry.iova);
        let fits = offset <= entry.len && len <= entry.len - offset;
        let right = entry.access & need == need;
        let qp_fits = entry.qp_num == ANY_QP || entry.qp_num == qp_num;
        if entry.key != key.0 || entry.pd != pd || !fits || !right || !qp_fits || key.0 == 0 {
            return self.behind(entry, pd, qp_num, key, iova, len, need, write);
        }
        let ptr = core::ptr::with_exposed_provenance_mut(entry.addr + offset as usize);
        // SAFETY: the range lies inside the memory of a live region, which the caller of `register`
        // promised to be valid, and writable if LOCAL_WRITE was asked for, which every right to
        // write requires; a region cannot be removed while `self` is borrowed, nor while the window
        // that was asked for is bound to it.
        Ok(unsafe { Span::new(ptr, len as usize, write) })
    }

    /// Checks a registration and gives its table entry, without a key.
    fn shape(registration: Registration) -> Result<Entry, RegisterError> {
        let Registration { pd, addr, len, iova, access } = registration;
        access.check_region()?;
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        let too_long = len > isize::MAX as u64 || (addr as u64).checked_add(len).is_none();
        if too_long || iova.checked_add(len).is_none() {
            return Err(RegisterError::Wraps);
        }
        if addr == 0 && len > 0 {
            return Err(RegisterError::Null);
        }
        Ok(Entry {
            pd,
            addr,
            len,
            iova,
            access: access.bits() | LOCAL,
            role: Role::Region { bound: 0 },
            ..Entry::FREE
        })
    }

    fn insert_region(
        &mut self,
        registration: Registration,
        owner: Option<Segment>,
    ) -> Result<Key, RegisterError> {
        self.insert_entry(Entry { owner, ..Self::shape(registration)? })
    }

    fn insert_entry(&mut self, entry: Entry) -> Result<Key, RegisterError> {
        let entry = self.watched(entry);
        let key = self.table.insert(entry).map_err(|_| RegisterError::Full)?;
        self.publish(key);
        Ok(key)
    }

    /// Shows the entry to peers if it can be reached by them and there is room in the directory.
    fn publish(&mut self, key: Key) {
        if let (Some(directory), Some(entry)) = (&mut self.directory, self.table.slot_mut(key)) {
            let published = directory.publish(entry);
            entry.published = published;
        }
    }

    /// Hides the entry from peers, and says whether they could see it.
    fn withdraw(&mut self, key: Key) -> bool {
        let Some(entry) = self.table.slot_mut(key) else {
            return false;
        };
        let was = core::mem::take(&mut entry.published);
        if let (true, Some(directory)) = (was, &mut self.directory) {
            directory.withdraw(Key(entry.key));
        }
        was
    }

    fn remove(&mut self, key: Key) -> Withdrawn {
        if let Some(lent) = &mut self.lent {
            lent.get_mut().forget(key);
        }
        let published = self.withdraw(key);
        let entry = self.table.remove(key);
        Withdrawn { published, owner: entry.owner }
    }
}

/// Names the fault of an access that did not pass.
#[cold]
fn refusal(entry: &Entry, pd: u32, qp_num: u32, key: Key, need: u32) -> AccessError {
    if entry.key != key.0 || key.0 == 0 {
        AccessError::UnknownKey
    } else if entry.pd != pd {
        AccessError::WrongPd
    } else if entry.qp_num != ANY_QP && entry.qp_num != qp_num {
        AccessError::WrongQp
    } else if entry.access & need != need {
        AccessError::Denied
    } else {
        AccessError::OutOfBounds
    }
}

#[cfg(test)]
mod tests;
