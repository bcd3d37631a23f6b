//! Devices, domains and regions found by the numbers that a program shows its other parts
//! (`ibv_import_device(3)` and its kin), within one process.
//!
//! Each opened device has a file of its own as its command descriptor. Anyone who has a copy of it finds the
//! device by asking the kernel which file it is.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use libc::c_int;
use quipu_abi_trace::entry;
use quipu_abi_types::*;
use quipu_cabi::{Errno, Null, Void};

use crate::context::{self, Context, context};
use crate::dm::MAX_DM_SIZE;
use crate::engine::check;
use crate::mr::{Backing, Mr, adopt};
use crate::object::Blank;
use crate::pd::{Pd, pd};

/// An opened device, which several contexts may share.
pub(crate) struct Opened {
    pub(crate) api: &'static EngineApi,
    pub(crate) handle: ContextHandle,
    pub(crate) device: *mut ibv_device,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
    /// Which file its command descriptor is, if it has one of its own.
    file: Option<(u64, u64)>,
    /// Contexts that share it.
    users: AtomicUsize,
    /// What the device can do, which does not change: children of fork may ask too.
    pub(crate) attributes: ibv_device_attr_ex,
    /// Memory that is this library's, to be given back when it is closed.
    left: Mutex<Vec<Weak<dyn Left>>>,
}

/// Memory that a program may leave in a device that it closes. The engine's objects end there, too.
pub(crate) trait Left: Send + Sync {
    /// Gives it back, though the program has not freed it.
    fn give_back(&self);
}

impl<T: Send> Left for Mutex<Option<T>> {
    fn give_back(&self) {
        drop(self.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

// SAFETY: the device is never freed, and its fields do not change after it was made.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

/// All that are open.
static OPEN: Mutex<Vec<Weak<Opened>>> = Mutex::new(Vec::new());

impl Opened {
    /// Notes a device that was opened, with its command descriptor.
    pub(crate) fn new(
        api: &'static EngineApi,
        device: *mut ibv_device,
        opened: &EngineOpened,
        num_comp_vectors: c_int,
        command_fd: c_int,
    ) -> Result<Arc<Self>, Errno> {
        let mut attributes = ibv_device_attr_ex::blank();
        // SAFETY: `attributes` is valid for the call.
        check(unsafe { (api.query_device)(opened.context, &mut attributes) })?;
        // Device memory is this library's.
        attributes.max_dm_size = MAX_DM_SIZE as u64;
        let opened = Arc::new(Self {
            api,
            handle: opened.context,
            device,
            async_fd: opened.async_fd,
            num_comp_vectors,
            file: file_of(command_fd),
            users: AtomicUsize::new(1),
            attributes,
            left: Mutex::default(),
        });
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|other| other.strong_count() > 0);
        open.push(Arc::downgrade(&opened));
        Ok(opened)
    }

    /// Ends a context's use of it; the last one closes it.
    ///
    /// # Errors
    ///
    /// The engine's.
    pub(crate) fn leave(&self) -> Result<(), Errno> {
        if self.users.fetch_sub(1, Ordering::AcqRel) > 1 {
            return Ok(());
        }
        // SAFETY: the handle came from the engine.
        let closed = check(unsafe { (self.api.close)(self.handle) });
        if closed.is_err() {
            self.users.fetch_add(1, Ordering::AcqRel);
        }
        closed?;
        let left = std::mem::take(&mut *self.left.lock().unwrap_or_else(PoisonError::into_inner));
        left.iter().filter_map(Weak::upgrade).for_each(|left| left.give_back());
        Ok(())
    }

    /// Has memory given back at the latest when the device is closed.
    pub(crate) fn gives_back<T: Left + 'static>(&self, memory: &Arc<T>) {
        let memory: Weak<T> = Arc::downgrade(memory);
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        if left.len() == left.capacity() {
            left.retain(|known| known.strong_count() > 0);
        }
        left.push(memory);
    }

    /// Begins another context's use of it, unless it is being closed.
    fn join(&self) -> bool {
        let more = |users| if users > 0 { Some(users + 1) } else { None };
        self.users.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }
}

const COMMAND_FILE: &CStr = c"quipu-device";

/// What stands for the descriptor of the kernel's device: programs set flags on it, copy it, and pass
/// it to other processes, so it is a real one, of which nothing can be read. -1 where there is none
/// left. Not one of the first three, which a program that closed them takes for its own.
pub(crate) fn command_fd() -> c_int {
    // SAFETY: memfd_create(2), open(2), fcntl(2) and close(2), on a descriptor that is ours.
    unsafe {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        let mut first = libc::memfd_create(COMMAND_FILE.as_ptr(), flags);
        if first >= 0 {
            let seals = libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
            libc::fcntl(first, libc::F_ADD_SEALS, seals);
        } else {
            first = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        }
        if !(0..3).contains(&first) {
            return first;
        }
        let higher = libc::fcntl(first, libc::F_DUPFD_CLOEXEC, 3);
        libc::close(first);
        higher
    }
}

/// Device and inode of a memory file. Any other file may be known to others by the same numbers.
fn file_of(fd: c_int) -> Option<(u64, u64)> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat(2) fills the structure in if it succeeds.
    let stat = unsafe {
        if libc::fstat(fd, stat.as_mut_ptr()) != 0 {
            return None;
        }
        stat.assume_init()
    };
    (stat.st_mode & libc::S_IFMT == libc::S_IFREG).then_some((stat.st_dev, stat.st_ino))
}

/// The opened device whose command descriptor `fd` is a copy of.
fn find(fd: c_int) -> Result<Arc<Opened>, Errno> {
    // SAFETY: F_GETFD takes no pointer.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(Errno::last());
    }
    let file = file_of(fd);
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut live = open.iter().filter_map(Weak::upgrade);
    let found = live.find(|opened| file.is_some() && opened.file == file);
    // One of another process, or no device at all.
    found.filter(|opened| opened.join()).ok_or(Errno::EOPNOTSUPP)
}

/// A domain of the engine, as an object of this context.
fn import_pd(raw: *mut ibv_context, context: &Context, low: u32) -> Result<*mut ibv_pd, Errno> {
    let mut handle = PdHandle::NONE;
    // SAFETY: `handle` is valid for the call.
    check(unsafe { (context.api.find_pd)(context.handle, low, &mut handle) })?;
    Ok(crate::pd::create_plain(raw, context.api, handle))
}

entry! {
    /// `ibv_import_device(3)`: of this process. The descriptor becomes the context's.
    fn ibv_import_device(fd: c_int) -> Null<ibv_context> {
        let opened = find(fd)?;
        let mut now = 0;
        // SAFETY: `now` is valid for the call. In a forked child this fails.
        let usable = check(unsafe { (opened.api.read_clock)(opened.handle, &mut now) });
        // SAFETY: F_DUPFD_CLOEXEC takes no pointer.
        let async_fd = unsafe { libc::fcntl(opened.async_fd, libc::F_DUPFD_CLOEXEC, 3) };
        if usable.is_err() || async_fd < 0 {
            let why = usable.err().unwrap_or(Errno::last());
            opened.leave()?;
            return Err(why);
        }
        Ok(context::create(opened, fd, async_fd))
    }

    /// `ibv_import_pd(3)`
    fn ibv_import_pd(raw: *mut ibv_context, handle: u32) -> Null<ibv_pd> {
        // SAFETY: the program passes a context.
        import_pd(raw, unsafe { context(raw) }?, handle)
    }

    /// `ibv_unimport_pd(3)`: the domain stays.
    fn ibv_unimport_pd(raw: *mut ibv_pd) -> Void {
        // SAFETY: the program passes a domain that it imported, and uses it no more.
        drop(unsafe { Pd::take(raw) }?);
        Ok(())
    }

    /// `ibv_import_mr(3)`: its address is not known, as the manual page has it.
    fn ibv_import_mr(raw: *mut ibv_pd, handle: u32) -> Null<ibv_mr> {
        // SAFETY: the program passes a domain, whose context is alive.
        let (pd, context) = unsafe { (pd(raw)?, context((*raw).context)?) };
        let found = EngineMr { mr: MrHandle::NONE, lkey: 0, rkey: 0 };
        let mut region = EngineFoundMr { found, length: 0 };
        // SAFETY: `region` is valid for the call.
        check(unsafe { (pd.api.find_mr)(context.handle, handle, &mut region) })?;
        let length = usize::try_from(region.length).unwrap_or(usize::MAX);
        Ok(adopt(pd, &region.found, ptr::null_mut(), length, Backing::Another))
    }

    /// `ibv_unimport_mr(3)`: the region stays.
    fn ibv_unimport_mr(raw: *mut ibv_mr) -> Void {
        // SAFETY: the program passes a region that it imported, and uses it no more.
        drop(unsafe { Mr::take(raw) }?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_descriptors_are_told_apart() {
        let (one, other) = (command_fd(), command_fd());
        // SAFETY: fcntl(2), read(2), write(2) and close(2) on descriptors of this test.
        unsafe {
            let copy = libc::fcntl(one, libc::F_DUPFD_CLOEXEC, 3);
            assert!(file_of(one).is_some());
            assert_eq!(file_of(one), file_of(copy));
            assert_ne!(file_of(one), file_of(other));
            let mut byte = [0u8];
            assert_eq!(libc::read(one, byte.as_mut_ptr().cast(), 1), 0, "there is nothing in it");
            assert!(libc::write(one, byte.as_ptr().cast(), 1) < 0);
            for fd in [one, other, copy] {
                libc::close(fd);
            }
        }
        assert_eq!(find(-1).err(), Some(Errno(libc::EBADF)));
        let plain = std::fs::File::open("/dev/null").unwrap();
        let unknown = find(std::os::fd::AsRawFd::as_raw_fd(&plain)).err();
        assert_eq!(unknown, Some(Errno::EOPNOTSUPP));
    }
}
