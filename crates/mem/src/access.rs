//! Access rights of regions and windows, and the ways in which an access can be refused.

use bitflags::bitflags;
use thiserror::Error;

bitflags! {
    /// What may be done to a region or through a window; the values are those of
    /// `ibv_access_flags`. Reading through the lkey is always allowed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// The owner may write through the lkey (receives, read responses, atomic results).
        const LOCAL_WRITE = 0x1;
        /// A peer may write through the rkey. Needs `LOCAL_WRITE`.
        const REMOTE_WRITE = 0x2;
        /// A peer may read through the rkey.
        const REMOTE_READ = 0x4;
        /// A peer may run atomic operations through the rkey. Needs `LOCAL_WRITE`.
        const REMOTE_ATOMIC = 0x8;
        /// Memory windows may be bound to the region.
        const MW_BIND = 0x10;
        /// Addresses count from zero at the start of the region instead of being pointers.
        const ZERO_BASED = 0x20;
        /// Pages may be absent until they are used; always true here, since nothing is pinned.
        const ON_DEMAND = 0x40;
        /// The memory is backed by huge pages; a hint, ignored.
        const HUGETLB = 0x80;
        /// A peer may have what was written made visible to all (`ibv_wr_flush`).
        const FLUSH_GLOBAL = 0x100;
        /// Writes may be ordered loosely; a hint, ignored.
        const RELAXED_ORDERING = 1 << 20;
    }
}

/// Flags that an adapter may ignore when it does not know them (`IBV_ACCESS_OPTIONAL_RANGE`).
const OPTIONAL_RANGE: u32 = 0x3ff0_0000;

/// Why a set of access flags is not legal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AccessFlagsError {
    /// Bits outside the optional range that mean nothing here.
    #[error("unknown access flags {0:#x}")]
    Unknown(u32),
    /// Remote write or remote atomic without local write (IBA volume 1, 10.6.3.1).
    #[error("remote write and remote atomic access require local write access")]
    NeedsLocalWrite,
    /// A flag that has no meaning for a memory window.
    #[error("access flags {0:?} do not apply to a memory window")]
    NotForWindow(Access),
}

impl Access {
    /// The rights that let a peer in.
    pub const REMOTE: Access = Access::REMOTE_WRITE
        .union(Access::REMOTE_READ)
        .union(Access::REMOTE_ATOMIC)
        .union(Access::FLUSH_GLOBAL);

    /// Reads flags as a program passes them. Unknown bits of the optional range are dropped, as
    /// rdma-core asks; other unknown bits are refused.
    pub fn parse(bits: u32) -> Result<Access, AccessFlagsError> {
        let unknown = bits & !Access::all().bits() & !OPTIONAL_RANGE;
        if unknown != 0 {
            return Err(AccessFlagsError::Unknown(unknown));
        }
        Ok(Access::from_bits_truncate(bits))
    }

    /// Checks the rules for a region: remote write and atomic need local write.
    pub fn check_region(self) -> Result<(), AccessFlagsError> {
        if self.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            && !self.contains(Access::LOCAL_WRITE)
        {
            return Err(AccessFlagsError::NeedsLocalWrite);
        }
        Ok(())
    }

    /// Checks the rules for a window: remote rights and `ZERO_BASED` only.
    pub fn check_window(self) -> Result<(), AccessFlagsError> {
        let others = self - (Access::REMOTE | Access::ZERO_BASED);
        if !others.is_empty() {
            return Err(AccessFlagsError::NotForWindow(others));
        }
        Ok(())
    }
}

/// Why an access to memory was refused, one variant per fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AccessError {
    /// The key names nothing: never given out, deregistered, invalidated, or not bound.
    #[error("the key names no valid region or window")]
    UnknownKey,
    /// The key belongs to another protection domain.
    #[error("the key belongs to another protection domain")]
    WrongPd,
    /// The window is bound to another queue pair.
    #[error("the window is bound to another queue pair")]
    WrongQp,
    /// The range leaves the region or window.
    #[error("the range leaves the region")]
    OutOfBounds,
    /// The region or window does not grant the right.
    #[error("the right is not granted")]
    Denied,
    /// An atomic operation on an address that is no multiple of 8, or not on 8 bytes.
    #[error("atomic access must be to 8 aligned bytes")]
    Misaligned,
    /// The scatter/gather list is shorter than the range asked of it.
    #[error("the scatter/gather list is too short")]
    BeyondList,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_bits_are_dropped_and_others_refused() {
        assert_eq!(Access::parse(0x2000_0001), Ok(Access::LOCAL_WRITE));
        assert_eq!(Access::parse(0x201), Err(AccessFlagsError::Unknown(0x200)));
        assert_eq!(Access::parse(0x100), Ok(Access::FLUSH_GLOBAL));
        assert_eq!(Access::parse(0x4000_0000), Err(AccessFlagsError::Unknown(0x4000_0000)));
        assert_eq!(Access::parse(1 << 20), Ok(Access::RELAXED_ORDERING));
    }

    #[test]
    fn remote_write_and_atomic_need_local_write() {
        for right in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
            assert_eq!(right.check_region(), Err(AccessFlagsError::NeedsLocalWrite));
            assert_eq!((right | Access::LOCAL_WRITE).check_region(), Ok(()));
        }
        assert_eq!(Access::REMOTE_READ.check_region(), Ok(()));
        assert_eq!(Access::empty().check_region(), Ok(()));
    }

    #[test]
    fn windows_take_remote_rights_only() {
        assert_eq!((Access::REMOTE | Access::ZERO_BASED).check_window(), Ok(()));
        assert_eq!(
            Access::LOCAL_WRITE.check_window(),
            Err(AccessFlagsError::NotForWindow(Access::LOCAL_WRITE))
        );
    }
}
