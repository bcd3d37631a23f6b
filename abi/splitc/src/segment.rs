//! The symmetric memory: a memory file that lies at one address in all processes. Processes of one host map
//! each other's.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicU64;

/// Where it lies.
pub(crate) const BASE: usize = 0x2000_0000_0000;
/// Its first bytes are for the run-time library.
pub(crate) const CONTROL: usize = 64 * 1024;
/// Rounds of a barrier: of at most 65,536 processes.
const ROUNDS: usize = 16;
/// Bytes that a process shows the others at a time.
pub(crate) const SLOT: usize = 4096;

/// What processes write into each other's memory.
#[repr(C, align(64))]
pub(crate) struct Control {
    /// Bytes that were stored here. The header counts it, too.
    pub(crate) stored: AtomicU64,
    /// The last barrier in which the partner of a round has come.
    pub(crate) flags: [Line; ROUNDS],
    /// What this process shows: for two collective calls in turn.
    pub(crate) slots: [Slot; 2],
}

/// A line of the cache.
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) AtomicU64);

#[repr(C, align(64))]
pub(crate) struct Slot(pub(crate) [AtomicU64; SLOT / 8]);

const _: () = assert!(size_of::<Control>() <= CONTROL);

/// The memory of this process.
#[derive(Debug)]
pub(crate) struct Segment {
    file: File,
    pub(crate) len: usize,
}

/// How a peer is told where the memory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The host and the network that the process sees.
    host: String,
    pid: u32,
    fd: i32,
}

impl Segment {
    /// Makes it.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"quipu-splitc".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and nobody else has it.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(len as u64)?;
        let at = map(&file, len, BASE)?;
        if at as usize != BASE {
            return Err(io::Error::other("the address of the symmetric memory is in use"));
        }
        Ok(Self { file, len })
    }

    /// What peers need to map it.
    pub(crate) fn place(&self) -> io::Result<Place> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let space =
            |name: &str| fs::metadata(format!("/proc/self/ns/{name}")).map(|data| data.ino());
        // Processes of two networks count as two hosts, as they do for everybody else.
        let host = format!("{}.{}.{}", boot.trim(), space("pid")?, space("net")?);
        Ok(Place { host, pid: std::process::id(), fd: self.file.as_raw_fd() })
    }
}

impl Place {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        format!("{} {} {}", self.host, self.pid, self.fd).into_bytes()
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut words = text.split(' ');
        let (host, pid, fd) = (words.next()?, words.next()?, words.next()?);
        Some(Self { host: host.into(), pid: pid.parse().ok()?, fd: fd.parse().ok()? })
    }

    /// Maps the memory of a peer, if it is on this host and lets us.
    pub(crate) fn map(&self, own: &Self, len: usize) -> Option<*mut u8> {
        if self.host != own.host {
            return None;
        }
        let name = format!("/proc/{}/fd/{}", self.pid, self.fd);
        let file = OpenOptions::new().read(true).write(true).open(name).ok()?;
        if file.metadata().ok()?.len() != len as u64 {
            return None;
        }
        map(&file, len, 0).ok()
    }
}

/// Maps a file: at an address, or anywhere if that is 0.
fn map(file: &File, len: usize, at: usize) -> io::Result<*mut u8> {
    let fixed = if at == 0 { 0 } else { libc::MAP_FIXED_NOREPLACE };
    // SAFETY: without an address, or with NOREPLACE, no mapping that is there is touched.
    let address = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE | fixed,
            file.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(address.cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_told_as_text() {
        let place = Place { host: "boot.1.2".into(), pid: 7, fd: 9 };
        assert_eq!(Place::parse(&place.to_bytes()), Some(place.clone()));
        assert_eq!(Place::parse(b"boot 1"), None);
        let other = Place { host: "boot.1.3".into(), ..place.clone() };
        assert!(other.map(&place, 4096).is_none());
    }

    #[test]
    fn a_peer_on_this_host_sees_what_is_written() {
        let segment = Segment::new(1 << 20).unwrap();
        let place = segment.place().unwrap();
        let seen = place.map(&place, 1 << 20).unwrap();
        // SAFETY: both mappings have 1 MB and are nobody else's.
        unsafe {
            (BASE as *mut u8).add(70_000).write(42);
            assert_eq!(seen.add(70_000).read(), 42);
        }
        assert!(place.map(&place, 1 << 21).is_none());
    }
}
