//! Memory for requests and their data. For queue pairs it is registered: so the kernel's requests are read to
//! where the server takes their data from, and its replies come from where the server has put them.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::sync::Arc;

use quipu::{Access, MemoryRegion, ProtectionDomain};
use quipu_nbd::uri::{Place, Uri};

use super::super::rdma;
use super::super::session::Trouble;

/// Bytes of a request that are looked at. Names that are longer are not those of the file.
const HEAD: usize = 512;
/// Data of a write lie at the beginning of a page, where copies are fast.
const PAGE: usize = 4096;

/// What buffers are made of.
#[derive(Clone)]
pub(in crate::cmd::nbd) struct Memory {
    pub(super) domain: Option<ProtectionDomain>,
}

impl Memory {
    /// For the transport of a URI.
    pub(in crate::cmd::nbd) fn new(uri: &Uri) -> Result<Self, Trouble> {
        let is_rdma = matches!(uri.place, Place::Rdma { .. });
        Ok(Self { domain: is_rdma.then(rdma::domain).transpose()? })
    }

    /// A buffer for a request of up to `len` bytes, of which a write's data begin at `data`.
    pub(in crate::cmd::nbd) fn buffer(&self, len: usize, data: usize) -> io::Result<Buffer> {
        let Some(domain) = &self.domain else { return Ok(Buffer::Heap(vec![0; len])) };
        let start = PAGE - data;
        let region = domain.register(start + len, Access::LOCAL_WRITE);
        Ok(Buffer::Registered { region: region.map_err(io::Error::other)?, start })
    }
}

/// The memory of a request.
#[derive(Debug)]
pub(in crate::cmd::nbd) enum Buffer {
    Heap(Vec<u8>),
    Registered {
        region: MemoryRegion,
        /// Where requests begin.
        start: usize,
    },
}

impl Buffer {
    /// Reads a request, and returns its length.
    pub(in crate::cmd::nbd) fn receive(&mut self, mut file: &File) -> io::Result<usize> {
        match self {
            Self::Heap(bytes) => file.read(bytes),
            Self::Registered { region, start } => {
                region.read_from(file, *start, region.len() - *start)
            }
        }
    }

    /// Where requests begin.
    pub(in crate::cmd::nbd) fn start(&self) -> usize {
        match self {
            Self::Heap(_) => 0,
            Self::Registered { start, .. } => *start,
        }
    }

    /// Copies the beginning of a request of `len` bytes out.
    pub(in crate::cmd::nbd) fn head(&self, len: usize, out: &mut Vec<u8>) -> io::Result<()> {
        out.resize(len.min(HEAD), 0);
        self.read(self.start(), out)
    }

    /// Fills `out` with bytes from `at` on.
    pub(super) fn read(&self, at: usize, out: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Heap(bytes) => {
                let found = bytes.get(at..at + out.len()).ok_or(io::ErrorKind::InvalidInput)?;
                out.copy_from_slice(found);
                Ok(())
            }
            Self::Registered { region, .. } => region.read(at, out).map_err(io::Error::other),
        }
    }

    /// Writes `head` and the first `len` bytes to a file, in one call. How many bytes were written.
    pub(in crate::cmd::nbd) fn send(
        &self,
        mut file: &File,
        head: &[u8],
        len: usize,
    ) -> io::Result<usize> {
        match self {
            Self::Heap(bytes) => {
                let data = bytes.get(..len).ok_or(io::ErrorKind::InvalidInput)?;
                file.write_vectored(&[IoSlice::new(head), IoSlice::new(data)])
            }
            Self::Registered { region, .. } => region.write_to(file, head, 0, len),
        }
    }

    /// Its bytes, if it is not registered.
    pub(super) fn heap(&self) -> Option<&[u8]> {
        match self {
            Self::Heap(bytes) => Some(bytes),
            Self::Registered { .. } => None,
        }
    }

    /// The same, to be changed.
    pub(super) fn heap_mut(&mut self) -> Option<&mut [u8]> {
        match self {
            Self::Heap(bytes) => Some(bytes),
            Self::Registered { .. } => None,
        }
    }

    /// Its memory, if it is registered.
    pub(super) fn region(&self) -> Option<&MemoryRegion> {
        match self {
            Self::Heap(_) => None,
            Self::Registered { region, .. } => Some(region),
        }
    }
}

/// A request's buffer, once nothing else uses it.
pub(in crate::cmd::nbd) fn unshare(buffer: Arc<Buffer>) -> Option<Buffer> {
    Arc::try_unwrap(buffer).ok()
}
