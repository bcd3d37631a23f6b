//! Memory windows: rights to a part of a region that a queue pair hands out and takes back.
//!
//! A window is named by the upper 24 bits of its key, which never change; each bind chooses the
//! lower 8. A type 1 window takes part in the key that its owner's verbs library picked next
//! (`ibv_bind_mw`); a type 2 window in the tag that the consumer put in its work request. Clauses
//! are of the InfiniBand architecture specification, volume 1.

use thiserror::Error;

use super::backing::Backing;
use super::table::{ANY_QP, Entry, Role};
use super::{DeregisterError, Regions, RegisterError, Withdrawn};
use crate::access::{Access, AccessFlagsError};
use crate::key::Key;

/// The two kinds of memory windows (`ibv_mw_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowType {
    /// Bound with `ibv_bind_mw`, any number of times; each bind ends the one before.
    One,
    /// Bound by a work request, to a queue pair (type 2B); must be invalidated before the next.
    Two,
}

/// A request to bind a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bind {
    /// The protection domain of the queue pair that the request came over.
    pub pd: u32,
    /// The number of that queue pair.
    pub qp_num: u32,
    /// The key that the window is to have: its index names the window. For a type 1 window it must
    /// differ from the current one ([`Key::next_tag`]).
    pub rkey: Key,
    /// The lkey of the region. Not looked at if `len` is zero.
    pub region: Key,
    /// The address of the first byte, as the region's iova counts.
    pub addr: u64,
    /// Bytes; zero unbinds a type 1 window.
    pub len: u64,
    /// Remote rights, and [`Access::ZERO_BASED`] for a type 2 window.
    pub access: Access,
}

/// Why a window was not bound; it is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BindError {
    /// The key's index names no window.
    #[error("the key names no memory window")]
    UnknownWindow,
    /// The lkey names no region.
    #[error("the key names no region")]
    UnknownRegion,
    /// Queue pair, window and region are not all of one protection domain (C10-72).
    #[error("queue pair, window and region are of different protection domains")]
    WrongPd,
    /// The type 2 window is bound (o10-37.2.30).
    #[error("a type 2 window must be invalidated before it is bound again")]
    StillBound,
    /// The type 1 window has this key already.
    #[error("a type 1 window needs a new key for each bind")]
    SameKey,
    /// No bytes, for a type 2 window (o10-37.2.40).
    #[error("a type 2 window cannot be bound to no bytes")]
    ZeroLength,
    /// `ZERO_BASED` for a type 1 window (o10-36.2.2).
    #[error("a type 1 window cannot be zero based")]
    ZeroBasedWindow,
    /// The region is zero based.
    #[error("windows cannot be bound to a zero based region")]
    ZeroBasedRegion,
    /// The region lacks `MW_BIND` (C10-73).
    #[error("the region does not allow windows")]
    NotBindable,
    /// A window for remote writes or atomics on a region without local write (C10-74).
    #[error("the region lacks local write access")]
    NeedsLocalWrite,
    /// The window leaves the region (C10-75).
    #[error("the window leaves the region")]
    OutOfBounds,
    /// The rights do not apply to windows.
    #[error(transparent)]
    Access(#[from] AccessFlagsError),
}

/// Why a key was not invalidated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum InvalidateError {
    /// The key opens nothing now.
    #[error("the key names no valid region or window")]
    UnknownKey,
    /// It is the key of a region, or of a type 1 window (o10-37.2.26): neither can be invalidated by
    /// a work request.
    #[error("only type 2 memory windows can be invalidated")]
    NotInvalidatable,
    /// The window is of another protection domain than the queue pair.
    #[error("the window belongs to another protection domain")]
    WrongPd,
    /// The window is bound to another queue pair.
    #[error("the window is bound to another queue pair")]
    WrongQp,
}

/// What the table keeps of a window that is bound.
struct Target {
    addr: usize,
    region: Key,
    /// The length in the table, and what stands behind it.
    shape: (u64, Backing),
}

impl Regions {
    /// Makes a window that is not bound. The key's index names it from now on; the key itself opens
    /// nothing.
    pub fn allocate_window(&mut self, pd: u32, kind: WindowType) -> Result<Key, RegisterError> {
        let entry = Entry { pd, role: Role::Window { kind, region: None }, ..Entry::FREE };
        self.table.insert(entry).map_err(|_| RegisterError::Full)
    }

    /// Forgets a window, bound or not, under any of its keys.
    pub fn deallocate_window(&mut self, window: Key) -> Result<Withdrawn, DeregisterError> {
        self.table.window(window).ok_or(DeregisterError::UnknownKey)?;
        let withdrawn = self.unbind(window);
        let _ = self.table.remove(window);
        Ok(withdrawn)
    }

    /// Binds a window; a type 1 window loses the key that it had. What it gives back says whether
    /// peers may still be using that one.
    pub fn bind(&mut self, bind: &Bind) -> Result<Withdrawn, BindError> {
        let kind = self.check_window(bind)?;
        let target = if bind.len == 0 { None } else { Some(self.check_target(bind)?) };
        let withdrawn = self.unbind(bind.rkey);
        let Some(target) = target else {
            return Ok(withdrawn);
        };
        self.count_window(target.region, 1);
        if let Some(entry) = self.table.slot_mut(bind.rkey) {
            entry.key = bind.rkey.0;
            entry.access = (bind.access & Access::all()).bits();
            entry.qp_num = if kind == WindowType::Two { bind.qp_num } else { ANY_QP };
            entry.iova = if bind.access.contains(Access::ZERO_BASED) { 0 } else { bind.addr };
            (entry.len, entry.backing) = target.shape;
            entry.addr = target.addr;
            entry.role = Role::Window { kind, region: Some(target.region) };
        }
        if kind == WindowType::Two {
            self.windows.insert((bind.qp_num, bind.rkey));
        }
        self.publish(bind.rkey);
        Ok(withdrawn)
    }

    /// Takes a type 2 window's key back, as LOCAL_INV and SEND with invalidate do. `pd` and
    /// `qp_num` are those of the queue pair over which the request came.
    pub fn invalidate(
        &mut self,
        pd: u32,
        qp_num: u32,
        rkey: Key,
    ) -> Result<Withdrawn, InvalidateError> {
        let entry = self.table.at(rkey);
        if rkey == Key::NONE || entry.key != rkey.0 {
            return Err(InvalidateError::UnknownKey);
        }
        match entry.role {
            Role::Window { kind: WindowType::Two, .. } => {}
            _ => return Err(InvalidateError::NotInvalidatable),
        }
        if entry.pd != pd {
            return Err(InvalidateError::WrongPd);
        }
        if entry.qp_num != qp_num {
            return Err(InvalidateError::WrongQp);
        }
        Ok(self.unbind(rkey))
    }

    /// Unbinds all windows that are bound to a queue pair, for when it is destroyed.
    pub fn unbind_qp(&mut self, qp_num: u32) -> Withdrawn {
        let mut all = Withdrawn::default();
        while let Some(key) = self.window_of(qp_num) {
            all.published |= self.unbind(key).published;
        }
        all
    }

    /// The key of a window that is bound to a queue pair.
    fn window_of(&self, qp_num: u32) -> Option<Key> {
        let keys = (qp_num, Key(0))..=(qp_num, Key(u32::MAX));
        self.windows.range(keys).next().map(|&(_, key)| key)
    }

    fn check_window(&self, bind: &Bind) -> Result<WindowType, BindError> {
        let entry = self.table.window(bind.rkey).ok_or(BindError::UnknownWindow)?;
        let Role::Window { kind, region } = entry.role else {
            return Err(BindError::UnknownWindow);
        };
        if entry.pd != bind.pd {
            return Err(BindError::WrongPd);
        }
        bind.access.check_window()?;
        match kind {
            WindowType::One if bind.access.contains(Access::ZERO_BASED) => {
                Err(BindError::ZeroBasedWindow)
            }
            WindowType::One if entry.key == bind.rkey.0 => Err(BindError::SameKey),
            WindowType::Two if region.is_some() => Err(BindError::StillBound),
            WindowType::Two if bind.len == 0 => Err(BindError::ZeroLength),
            _ => Ok(kind),
        }
    }

    fn check_target(&self, bind: &Bind) -> Result<Target, BindError> {
        let region = self.table.region(bind.region).ok_or(BindError::UnknownRegion)?;
        let rights = region.rights();
        if region.pd != bind.pd {
            return Err(BindError::WrongPd);
        }
        if rights.contains(Access::ZERO_BASED) {
            return Err(BindError::ZeroBasedRegion);
        }
        if !rights.contains(Access::MW_BIND) {
            return Err(BindError::NotBindable);
        }
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if bind.access.intersects(writes) && !rights.contains(Access::LOCAL_WRITE) {
            return Err(BindError::NeedsLocalWrite);
        }
        let offset = bind.addr.wrapping_sub(region.iova);
        // A null region has nothing that could be bound.
        let (all, shape) = match region.backing {
            Backing::Watched { len } => (len, (0, Backing::Watched { len: bind.len })),
            Backing::OnDemand { len } => (len, (0, Backing::OnDemand { len: bind.len })),
            _ => (region.len, (bind.len, Backing::Memory)),
        };
        if offset > all || bind.len > all - offset {
            return Err(BindError::OutOfBounds);
        }
        Ok(Target { addr: region.addr + offset as usize, region: bind.region, shape })
    }

    /// Shuts a window's slot.
    fn unbind(&mut self, window: Key) -> Withdrawn {
        let published = self.withdraw(window);
        let mut was = None;
        if let Some(entry) = self.table.slot_mut(window) {
            self.windows.remove(&(entry.qp_num, Key(entry.key)));
            entry.key = 0;
            entry.access = 0;
            entry.qp_num = ANY_QP;
            (entry.len, entry.backing) = (0, Backing::Memory);
            if let Role::Window { region, .. } = &mut entry.role {
                was = region.take();
            }
        }
        if let Some(region) = was {
            self.count_window(region, -1);
        }
        Withdrawn { published, owner: None }
    }

    fn count_window(&mut self, region: Key, change: i32) {
        if let Some(entry) = self.table.slot_mut(region)
            && let Role::Region { bound } = &mut entry.role
        {
            *bound = bound.checked_add_signed(change).expect("binds and unbinds are paired");
        }
    }
}
