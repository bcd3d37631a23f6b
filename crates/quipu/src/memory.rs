//! Memory that the adapter uses.

use std::io;
use std::os::fd::AsFd;

use quipu_host::nic::mem::{Segment, SegmentError, Vouched};
use quipu_host::nic::{Access, Fault, Key, Region, Sge};

use crate::device::ProtectionDomain;
use crate::error::Error;

/// Registered memory, which it owns.
///
/// Peers that have its key, and work requests in progress, may change it at any moment; so bytes
/// are copied in and out. When it is dropped, its key is void at once: requests that still name it
/// fail, and nothing is read or written that is no longer there.
///
/// ```
/// # use quipu::{Access, Config, Device};
/// # fn main() -> Result<(), quipu::Error> {
/// # let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
/// let pd = Device::open(config)?.protection_domain()?;
/// let memory = pd.register(1 << 20, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
/// memory.write(100, b"abc")?;
/// assert_eq!(memory.to_vec(99, 5)?, b"\0abc\0");
/// // What a peer needs to read those three bytes.
/// let remote = memory.remote(100, 3)?;
/// assert_eq!(quipu::RemoteMemory::from_bytes(&remote.to_bytes()), remote);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MemoryRegion {
    segment: Segment,
    region: Region,
    /// Whether work requests count from 0, and not from where the memory is.
    zero_based: bool,
    pd: ProtectionDomain,
}

impl MemoryRegion {
    pub(crate) fn new(pd: &ProtectionDomain, len: usize, access: Access) -> Result<Self, Error> {
        Self::of(pd, pd.device().opened.engine.allocate(len)?, access)
    }

    pub(crate) fn unshared(pd: &ProtectionDomain, len: usize) -> Result<Self, Error> {
        Self::of(pd, pd.device().opened.engine.allocate_unshared(len)?, Access::LOCAL_WRITE)
    }

    fn of(pd: &ProtectionDomain, segment: Segment, access: Access) -> Result<Self, Error> {
        let engine = &pd.device().opened.engine;
        let region = engine.reg_segment(pd.inner.id, &segment, None, access)?;
        let zero_based = access.contains(Access::ZERO_BASED);
        Ok(Self { segment, region, zero_based, pd: pd.clone() })
    }

    /// Registers a part of the memory once more, under a key of its own with rights of its own: for a
    /// peer that
    /// may use `len` bytes from `offset` on until the result is dropped, which makes the key void at once.
    ///
    /// ```
    /// # use quipu::{Access, Config, Device};
    /// # fn main() -> Result<(), quipu::Error> {
    /// # let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
    /// # let pd = Device::open(config)?.protection_domain()?;
    /// let memory = pd.register(8192, Access::LOCAL_WRITE)?;
    /// let lent = memory.register_part(4096, 100, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    /// lent.write(0, b"the same bytes")?;
    /// assert_eq!(memory.to_vec(4096, 8)?, b"the same");
    /// assert!(lent.remote(0, 101).is_err());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]; and as [`ProtectionDomain::register`].
    pub fn register_part(
        &self,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<MemoryRegion, Error> {
        let engine = &self.pd.device().opened.engine;
        let part = self.segment.slice(offset, len).map_err(|it| self.fault(it, offset, len))?;
        let region = engine.reg_segment(self.pd.inner.id, &part, None, access)?;
        let zero_based = access.contains(Access::ZERO_BASED);
        Ok(Self { segment: part, region, zero_based, pd: self.pd.clone() })
    }

    /// The domain whose queue pairs may use it.
    #[must_use]
    pub fn domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Bytes in the region.
    #[must_use]
    pub fn len(&self) -> usize {
        self.segment.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segment.is_empty()
    }

    /// The key under which own work requests name it, and peers do what its rights allow.
    #[must_use]
    pub fn key(&self) -> Key {
        self.region.key
    }

    /// Copies `bytes` in, `offset` bytes from the start.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]. In a forked child memory of a shared adapter is not there.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        self.pd.device().opened.engine.check_allocated()?;
        self.segment.write(offset, bytes).map_err(|error| self.fault(error, offset, bytes.len()))
    }

    /// Fills `out` with the bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), Error> {
        self.pd.device().opened.engine.check_allocated()?;
        let len = out.len();
        self.segment.read(offset, out).map_err(|error| self.fault(error, offset, len))
    }

    /// Writes `head`, and then `len` bytes from `offset` on, to a file in one call of writev(2), without a
    /// copy in between: how many bytes were written. What peers change meanwhile is written as it happens to
    /// be.
    ///
    /// ```
    /// # use quipu::{Access, Config, Device};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
    /// # let pd = Device::open(config)?.protection_domain()?;
    /// # let (near, far) = std::os::unix::net::UnixStream::pair()?;
    /// let memory = pd.register(4096, Access::LOCAL_WRITE)?;
    /// memory.write(10, b"on a string")?;
    /// memory.write_to(&near, b"knots ", 10, 11)?;
    /// assert_eq!(memory.read_from(&far, 100, 999)?, 17);
    /// assert_eq!(memory.to_vec(100, 17)?, b"knots on a string");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// What the system reports. The range leaves the region (`InvalidInput`). In a forked child memory of a
    /// shared adapter is not there.
    pub fn write_to(
        &self,
        file: impl AsFd,
        head: &[u8],
        offset: usize,
        len: usize,
    ) -> io::Result<usize> {
        self.pd.device().opened.engine.check_allocated().map_err(io::Error::other)?;
        quipu_host::write_from_segment(file.as_fd(), head, &self.segment, offset, len)
    }

    /// Reads once from a file, at most `len` bytes to `offset`, without a copy in between: how many came.
    ///
    /// # Errors
    ///
    /// As [`write_to`](Self::write_to).
    pub fn read_from(&self, file: impl AsFd, offset: usize, len: usize) -> io::Result<usize> {
        self.pd.device().opened.engine.check_allocated().map_err(io::Error::other)?;
        quipu_host::read_to_segment(file.as_fd(), &self.segment, offset, len)
    }

    /// Fills `len` bytes from `offset` on with those of a file from `place` on, without a copy in between.
    ///
    /// ```
    /// # use quipu::{Access, Config, Device};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let config = Config { address: Some("127.0.0.1".parse().unwrap()), ..Config::default() };
    /// # let pd = Device::open(config)?.protection_domain()?;
    /// # let path = std::env::temp_dir().join(format!("quipu-fill-{}", std::process::id()));
    /// # let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path)?;
    /// # std::fs::remove_file(&path)?;
    /// let memory = pd.register(4096, Access::LOCAL_WRITE)?;
    /// memory.write(10, b"on a string")?;
    /// memory.write_at(&file, 1 << 20, 10, 11)?;
    /// memory.fill_at(&file, (1 << 20) + 5, 100, 6)?;
    /// assert_eq!(memory.to_vec(100, 6)?, b"string");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`write_to`](Self::write_to); and the file ends before (`UnexpectedEof`).
    pub fn fill_at(
        &self,
        file: impl AsFd,
        place: u64,
        offset: usize,
        len: usize,
    ) -> io::Result<()> {
        self.pd.device().opened.engine.check_allocated().map_err(io::Error::other)?;
        quipu_host::fill_segment_at(file.as_fd(), place, &self.segment, offset, len)
    }

    /// Writes `len` bytes from `offset` on to a file, from `place` on, without a copy in between.
    ///
    /// # Errors
    ///
    /// As [`write_to`](Self::write_to); and the file takes no more (`WriteZero`).
    pub fn write_at(
        &self,
        file: impl AsFd,
        place: u64,
        offset: usize,
        len: usize,
    ) -> io::Result<()> {
        self.pd.device().opened.engine.check_allocated().map_err(io::Error::other)?;
        quipu_host::write_segment_at(file.as_fd(), place, &self.segment, offset, len)
    }

    /// Copies `len` bytes from `offset` on to another region, from its `place` on.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write), for either region.
    pub fn copy_to(
        &self,
        offset: usize,
        to: &MemoryRegion,
        place: usize,
        len: usize,
    ) -> Result<(), Error> {
        self.pd.device().opened.engine.check_allocated()?;
        let from = self.segment.span(offset, len).map_err(|it| self.fault(it, offset, len))?;
        let target = to.segment.span(place, len).map_err(|it| to.fault(it, place, len))?;
        from.copy_to(&target);
        Ok(())
    }

    /// A copy of `len` bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn to_vec(&self, offset: usize, len: usize) -> Result<Vec<u8>, Error> {
        self.check(offset, len)?;
        let mut out = vec![0; len];
        self.read(offset, &mut out)?;
        Ok(out)
    }

    /// `len` bytes from `offset` on, for a work request of one's own.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]; or `len` is 2^32 or more, of which no piece can be.
    pub fn sge(&self, offset: usize, len: usize) -> Result<Sge, Error> {
        let addr = self.check(offset, len)?;
        let long = Fault::Invalid("a scatter/gather element has at most 2^32 - 1 bytes");
        let len = u32::try_from(len).map_err(|_| long)?;
        Ok(Sge { addr, len, lkey: self.region.key })
    }

    /// `len` bytes from `offset` on, for a peer: to be sent to it by any means.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn remote(&self, offset: usize, len: usize) -> Result<RemoteMemory, Error> {
        let addr = self.check(offset, len)?;
        Ok(RemoteMemory { addr, len: len as u64, rkey: self.region.key })
    }

    /// A part of the memory itself.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<Segment> {
        self.segment.slice(offset, len).ok()
    }

    /// The address of `offset` in work requests, if `len` bytes are there.
    fn check(&self, offset: usize, len: usize) -> Result<u64, Error> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len());
        let base = if self.zero_based { 0 } else { self.segment.addr() as u64 };
        inside.then(|| base + offset as u64).ok_or_else(|| self.outside(offset, len))
    }

    fn outside(&self, offset: usize, len: usize) -> Error {
        Error::OutOfBounds { offset, len, region: self.len() }
    }

    fn fault(&self, error: SegmentError, offset: usize, len: usize) -> Error {
        // Own segments are writable, and bytes need no alignment.
        debug_assert_eq!(error, SegmentError::OutOfBounds);
        self.outside(offset, len)
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // The adapter holds a share of the memory, should this fail.
        let _ = self.pd.device().opened.engine.dereg_mr(self.region.id);
    }
}

/// Registered memory that the program has got elsewhere, and vouches for.
#[derive(Debug)]
pub struct VouchedRegion {
    region: Region,
    pd: ProtectionDomain,
}

impl VouchedRegion {
    pub(crate) fn new(pd: &ProtectionDomain, memory: Vouched) -> Result<Self, Error> {
        let region = pd.device().opened.engine.reg_mr(pd.inner.id, memory)?;
        Ok(Self { region, pd: pd.clone() })
    }

    /// The key under which own work requests name it, and peers do what its rights allow.
    #[must_use]
    pub fn key(&self) -> Key {
        self.region.key
    }

    /// Changes its protection domain and its rights. Its key stays.
    ///
    /// # Errors
    ///
    /// The rights exclude each other, or allow writing to memory that is read-only; the domain is another
    /// device's. Nothing has changed then.
    pub fn change(&mut self, pd: &ProtectionDomain, access: Access) -> Result<(), Error> {
        self.pd.device().owns(pd.device())?;
        let engine = &self.pd.device().opened.engine;
        engine.rereg_mr(self.region.id, Some(pd.inner.id), None, Some(access))?;
        self.pd = pd.clone();
        Ok(())
    }
}

impl Drop for VouchedRegion {
    fn drop(&mut self) {
        let _ = self.pd.device().opened.engine.dereg_mr(self.region.id);
    }
}

/// Memory of a peer, as one's own requests name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteMemory {
    /// Address of the first byte, as the peer counts.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The peer's key.
    pub rkey: Key,
}

impl RemoteMemory {
    /// Bytes of [`to_bytes`](Self::to_bytes).
    pub const WIRE_LEN: usize = 20;

    /// `len` bytes, `offset` bytes from the start; nothing is checked here but by the peer.
    #[must_use]
    pub fn slice(self, offset: u64, len: u64) -> Self {
        Self { addr: self.addr.wrapping_add(offset), len, ..self }
    }

    /// The description as bytes, all fields in network order.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::WIRE_LEN] {
        let mut out = [0; Self::WIRE_LEN];
        out[..8].copy_from_slice(&self.addr.to_be_bytes());
        out[8..16].copy_from_slice(&self.len.to_be_bytes());
        out[16..].copy_from_slice(&self.rkey.0.to_be_bytes());
        out
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::WIRE_LEN]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_be_bytes(word)
        };
        let rkey = u32::from_be_bytes([bytes[16], bytes[17], bytes[18], bytes[19]]);
        Self { addr: word(0), len: word(8), rkey: Key(rkey) }
    }
}
