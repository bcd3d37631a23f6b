//! The place where an adapter is shared: a socket in a folder of the user, and a lock beside it. Only who
//! holds the lock puts a socket there, or takes one away. Others than the user can put nothing there.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::guests::Guests;
use super::{address, connect, socket};
use crate::fork::Birthplace;
use crate::link::socket::take_no_descriptors;
use crate::sys::{self, check};

/// How the name of a lock ends.
pub(super) const LOCK: &str = ".lock";
/// Callers that the kernel keeps while nobody looks.
const BACKLOG: libc::c_int = 64;
/// How often a lock that is held is tried again, and after what time: those who look for locks of dead
/// processes hold each for a moment.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(1);

/// What tells a file from another one of its name.
type Identity = (u64, u64);

fn identity(data: &Metadata) -> Identity {
    (data.dev(), data.ino())
}

/// What is there now.
fn found(path: &Path) -> Option<Identity> {
    fs::symlink_metadata(path).ok().as_ref().map(identity)
}

/// A place that this process holds. Dropped, it is free, and nothing is left of it.
#[derive(Debug)]
pub(super) struct Place {
    path: PathBuf,
    lock_path: PathBuf,
    lock: File,
    /// The socket that this process has put there.
    socket: Option<Identity>,
    birthplace: Birthplace,
}

impl Place {
    /// Takes a place; `None` if another process holds it, or a child of one.
    ///
    /// # Errors
    ///
    /// The file system refuses a file.
    pub(super) fn take(path: PathBuf) -> io::Result<Option<Self>> {
        let mut lock_path = OsString::from(&path);
        lock_path.push(LOCK);
        let lock_path = PathBuf::from(lock_path);
        let mut options = OpenOptions::new();
        options.write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        for _ in 0..ATTEMPTS {
            let lock = sys::move_file_up(options.open(&lock_path)?)?;
            match lock.try_lock() {
                // Its last holder may have removed it since it was opened.
                Ok(()) if found(&lock_path) == Some(identity(&lock.metadata()?)) => {
                    let birthplace = Birthplace::here();
                    return Ok(Some(Self { path, lock_path, lock, socket: None, birthplace }));
                }
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Listens there, for programs of this user and of guests.
    ///
    /// # Errors
    ///
    /// The system refuses a socket, or one with this name.
    pub(super) fn listen(&mut self, guests: &Guests) -> io::Result<OwnedFd> {
        // A dead process may have left its own.
        let _ = fs::remove_file(&self.path);
        let (listener, (raw, len)) = (socket()?, address(&self.path)?);
        // SAFETY: the pointer and the length describe `raw`, which outlives the call.
        check(unsafe { libc::bind(listener.as_raw_fd(), (&raw const raw).cast(), len) })?;
        self.socket = found(&self.path);
        fs::set_permissions(&self.path, fs::Permissions::from_mode(0o600))?;
        if !guests.is_empty() {
            guests.admit_to(&self.path)?;
        }
        // Before anybody can send one: accepted sockets inherit it when they are connected.
        take_no_descriptors(&listener);
        sys::listen(&listener, BACKLOG)?;
        Ok(listener)
    }

    /// Takes away the sockets of a folder where nobody listens any more: dead processes have left them.
    pub(super) fn remove_dead(folder: &Path) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            let is_socket =
                fs::symlink_metadata(&path).is_ok_and(|data| data.file_type().is_socket());
            let refuses = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
            // Anyone who is about to listen there holds the place.
            if is_socket
                && connect(&path).is_err_and(refuses)
                && let Ok(Some(_place)) = Self::take(path.clone())
            {
                let _ = fs::remove_file(&path);
            }
        }
    }

    /// False in a child of the process that holds it.
    pub(super) fn is_here(&self) -> bool {
        self.birthplace.is_here()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.is_here() {
            return;
        }
        let lock = self.lock.metadata().ok().as_ref().map(identity);
        // The lock goes last: it is what keeps others from the socket.
        for (path, own) in [(&self.path, self.socket), (&self.lock_path, lock)] {
            if own.is_some() && found(path) == own {
                let _ = fs::remove_file(path);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("quipu-place-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_place_is_one_processs_and_leaves_nothing() {
        let path = path("one");
        let mut first = Place::take(path.clone()).unwrap().unwrap();
        let _listener = first.listen(&Guests::default()).unwrap();
        let socket = found(&path);
        // Who comes second neither gets it nor takes the socket away.
        assert!(Place::take(path.clone()).unwrap().is_none());
        assert!(found(&path) == socket && connect(&path).is_ok());
        let lock = first.lock_path.clone();
        drop(first);
        assert_eq!((found(&path), found(&lock)), (None, None));
        // Left by a dead process.
        fs::write(&path, b"").unwrap();
        fs::write(&lock, b"").unwrap();
        let mut next = Place::take(path.clone()).unwrap().unwrap();
        let _listener = next.listen(&Guests::default()).unwrap();
        // Somebody has put another one there meanwhile, by hand.
        let other = lock.with_extension("other");
        fs::write(&other, b"").unwrap();
        fs::rename(&other, &path).unwrap();
        drop(next);
        assert!(found(&path).is_some() && found(&lock).is_none());
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_dead_processes_have_left_is_taken_away() {
        let folder = path("dead");
        fs::create_dir(&folder).unwrap();
        let [dead, live, other] =
            ["share-dead", "share-live", "share-other.lock"].map(|name| folder.join(name));
        let mut first = Place::take(dead.clone()).unwrap().unwrap();
        drop(first.listen(&Guests::default()).unwrap());
        // Its process is killed: nobody holds the place, and the socket stays.
        first.socket = None;
        drop(first);
        let mut second = Place::take(live.clone()).unwrap().unwrap();
        let _listener = second.listen(&Guests::default()).unwrap();
        fs::write(&other, b"").unwrap();
        assert!(found(&dead).is_some());
        Place::remove_dead(&folder);
        assert_eq!(found(&dead), None);
        assert!(found(&other).is_some() && connect(&live).is_ok());
        drop(second);
        fs::remove_file(&other).unwrap();
        fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_start_that_fails_leaves_nothing() {
        let path = path("failed");
        let mut place = Place::take(path.clone()).unwrap().unwrap();
        fs::create_dir(&path).unwrap();
        assert!(place.listen(&Guests::default()).is_err());
        let lock = place.lock_path.clone();
        drop(place);
        assert!(found(&path).is_some() && found(&lock).is_none());
        fs::remove_dir(&path).unwrap();
    }
}
