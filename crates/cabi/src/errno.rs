use std::fmt;

use libc::c_int;

/// An error number of the C library, positive.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub c_int);

#[allow(missing_docs)] // Named as errno(3) names them.
impl Errno {
    pub const EPERM: Self = Self(libc::EPERM);
    pub const ENOENT: Self = Self(libc::ENOENT);
    pub const EINTR: Self = Self(libc::EINTR);
    pub const EIO: Self = Self(libc::EIO);
    pub const EAGAIN: Self = Self(libc::EAGAIN);
    pub const ENOMEM: Self = Self(libc::ENOMEM);
    pub const EFAULT: Self = Self(libc::EFAULT);
    pub const EBUSY: Self = Self(libc::EBUSY);
    pub const ENODEV: Self = Self(libc::ENODEV);
    pub const EINVAL: Self = Self(libc::EINVAL);
    pub const EMFILE: Self = Self(libc::EMFILE);
    pub const ENOSYS: Self = Self(libc::ENOSYS);
    pub const EOPNOTSUPP: Self = Self(libc::EOPNOTSUPP);
    pub const EADDRNOTAVAIL: Self = Self(libc::EADDRNOTAVAIL);
    pub const ETIMEDOUT: Self = Self(libc::ETIMEDOUT);
    pub const ECONNREFUSED: Self = Self(libc::ECONNREFUSED);
    pub const EHOSTUNREACH: Self = Self(libc::EHOSTUNREACH);
    pub const EACCES: Self = Self(libc::EACCES);
    pub const EAFNOSUPPORT: Self = Self(libc::EAFNOSUPPORT);
    pub const EADDRINUSE: Self = Self(libc::EADDRINUSE);
    pub const EISCONN: Self = Self(libc::EISCONN);
    pub const ENOTCONN: Self = Self(libc::ENOTCONN);
    pub const ERESTART: Self = Self(libc::ERESTART);
}

impl Errno {
    /// Writes the number to the calling thread's `errno`.
    pub fn set(self) {
        // SAFETY: "__errno_location() returns the address of the errno variable for the current
        // thread" (LSB); it is valid for the life of the thread, which is running this.
        unsafe { *libc::__errno_location() = self.0 };
    }

    /// Reads the calling thread's `errno`.
    pub fn last() -> Self {
        // SAFETY: as in `set`.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({}: {})", self.0, std::io::Error::from_raw_os_error(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_read_back_by_this_thread_only() {
        Errno::EBUSY.set();
        std::thread::spawn(|| Errno::EPERM.set()).join().unwrap();
        assert_eq!(Errno::last(), Errno::EBUSY);
    }
}
