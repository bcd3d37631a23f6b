//! An event descriptor that wakes a thread from `poll`.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use quipu_cabi::descriptors;

/// Readable from `ring` to `clear`.
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = descriptors::with_more_descriptors(|| {
            // SAFETY: no pointers are passed.
            let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: it was just made, and nobody else has it.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        })?;
        descriptors::move_up(fd).map(Self)
    }

    pub(crate) fn ring(&self) {
        let one = 1_u64;
        // SAFETY: 8 bytes of a live variable.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    pub(crate) fn clear(&self) {
        let mut count = 0_u64;
        // SAFETY: 8 bytes of a live variable.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
