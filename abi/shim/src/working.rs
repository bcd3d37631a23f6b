//! The working directory, where it is a folder of ours. For the kernel that is then [`STAND_IN`].

use core::sync::atomic::{AtomicUsize, Ordering};

use crate::tree::Folder;

static FOLDER: AtomicUsize = AtomicUsize::new(0);

#[inline]
pub(crate) fn may_be_ours() -> bool {
    FOLDER.load(Ordering::Relaxed) != 0
}

pub(crate) fn folder() -> Option<Folder> {
    Folder::of_number(FOLDER.load(Ordering::Relaxed).checked_sub(1)?)
}

/// Writes the kernel's path of it; its length.
pub(crate) fn of_kernel(room: &mut [u8]) -> Option<usize> {
    // SAFETY: a system call that writes at most so many bytes.
    let length = unsafe { libc::syscall(libc::SYS_getcwd, room.as_mut_ptr(), room.len()) };
    usize::try_from(length).ok()?.checked_sub(1)
}
