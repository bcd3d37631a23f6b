//! Becoming another program, which finds the signals as this one was started with; and what is to be known
//! of a program before.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether SIGPIPE was ignored when this process began, as it is under systemd. Rust's runtime ignores it
/// anyway, and so nobody can tell later.
static IGNORES_SIGPIPE: AtomicBool = AtomicBool::new(false);

/// Runs before that runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: asks for an action, which is written where there is room for one, and read only if it was.
    let handler = unsafe {
        match libc::sigaction(libc::SIGPIPE, std::ptr::null(), action.as_mut_ptr()) {
            0 => action.assume_init().sa_sigaction,
            _ => return,
        }
    };
    IGNORES_SIGPIPE.store(handler == libc::SIG_IGN, Ordering::Relaxed);
}

/// Becomes the program; returns only if that fails. SIGPIPE does what it did when this process was started,
/// and the signals are blocked that this thread has blocked: [`Command`] would reset both.
pub fn become_program(command: &mut Command) -> io::Error {
    let mut mask = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: asks for the mask, which is written where there is room for one.
    let mask = match unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr())
    } {
        // SAFETY: it was written.
        0 => unsafe { mask.assume_init() },
        error => return io::Error::from_raw_os_error(error),
    };
    let ignores = IGNORES_SIGPIPE.load(Ordering::Relaxed);
    let restore = move || {
        let action = if ignores { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: both calls are async-signal-safe, no handler of ours is installed, and the mask is a live
        // variable.
        unsafe {
            libc::signal(libc::SIGPIPE, action);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, null_mut());
        }
        Ok(())
    };
    // SAFETY: `restore` only makes calls that are allowed between fork and exec.
    unsafe { command.pre_exec(restore) }.exec()
}

/// Whether this user may execute a file.
#[must_use]
pub fn may_execute(file: &Path) -> bool {
    let Ok(name) = CString::new(file.as_os_str().as_bytes()) else { return false };
    let asked = |flags| {
        // SAFETY: a string that ends with a zero.
        unsafe { libc::faccessat(libc::AT_FDCWD, name.as_ptr(), libc::X_OK, flags) == 0 }
    };
    // Container runtimes that do not know faccessat2(2) refuse it with EPERM, which the kernel's own never
    // gives for this question. The older call, without flags, asks for the real user, who is the same one
    // unless this program gains rights, and it does not.
    asked(libc::AT_EACCESS)
        || io::Error::last_os_error().raw_os_error() == Some(libc::EPERM) && asked(0)
}

/// The file that this process runs: as the kernel knows it or, where there is no `/proc`, by the path with
/// which it was started.
///
/// # Errors
///
/// Neither is known.
pub fn own_file() -> io::Result<PathBuf> {
    std::env::current_exe().or_else(|error| {
        // SAFETY: takes an integer.
        let path = unsafe { libc::getauxval(libc::AT_EXECFN) } as *const libc::c_char;
        if path.is_null() {
            return Err(error);
        }
        // SAFETY: the kernel has put a string there that ends with a zero and stays (getauxval(3)).
        let path = unsafe { CStr::from_ptr(path) };
        Ok(PathBuf::from(OsStr::from_bytes(path.to_bytes())))
    })
}

/// Effective user and group of this process.
#[must_use]
pub fn effective_user_and_group() -> (u32, u32) {
    // SAFETY: neither has arguments, nor fails.
    unsafe { (libc::geteuid(), libc::getegid()) }
}

/// Whether programs that this process starts get no more rights than it has, whatever their files say
/// (`PR_SET_NO_NEW_PRIVS` of prctl(2)).
#[must_use]
pub fn may_gain_no_privileges() -> bool {
    // SAFETY: takes integers only.
    unsafe { libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 }
}

/// Whether a file has capabilities (capabilities(7)), which the kernel gives to the program in it.
#[must_use]
pub fn has_capabilities(file: &Path) -> bool {
    let Ok(name) = CString::new(file.as_os_str().as_bytes()) else { return false };
    // SAFETY: strings that end with zeros; of the attribute only the length is asked for.
    unsafe { libc::getxattr(name.as_ptr(), CAPABILITIES.as_ptr(), std::ptr::null_mut(), 0) > 0 }
}

const CAPABILITIES: &CStr = c"security.capability";

/// Whether programs in the file system of a file get no more rights than who runs them (the option `nosuid`
/// of mount(8)).
#[must_use]
pub fn gives_no_rights(file: &Path) -> bool {
    let Ok(name) = CString::new(file.as_os_str().as_bytes()) else { return false };
    let mut system = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: a string that ends with a zero, and room, which is read if it was filled in.
    unsafe {
        libc::statvfs(name.as_ptr(), system.as_mut_ptr()) == 0
            && system.assume_init().f_flag & libc::ST_NOSUID != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_of_files_are_known() {
        let name = format!("quipu-rights-{}", std::process::id());
        let file = std::env::temp_dir().join(name);
        std::fs::write(&file, b"x").unwrap();
        assert!(!may_execute(&file) && !has_capabilities(&file));
        assert!(may_execute(Path::new("/bin/sh")) && !may_execute(Path::new("/no/such/file")));
        assert!(!gives_no_rights(Path::new("/no/such/file")));
        let name = CString::new(file.as_os_str().as_bytes()).unwrap();
        // CAP_IPC_LOCK, permitted and effective (struct vfs_cap_data of linux/capability.h).
        let capabilities: [u32; 5] = [0x0200_0001, 1 << 14, 0, 0, 0].map(u32::to_le);
        // SAFETY: strings that end with zeros, and so many bytes.
        let set = unsafe {
            let (value, size) = (capabilities.as_ptr().cast(), size_of_val(&capabilities));
            libc::setxattr(name.as_ptr(), CAPABILITIES.as_ptr(), value, size, 0)
        };
        // Not everybody may, nor on every file system.
        assert_eq!(has_capabilities(&file), set == 0);
        std::fs::remove_file(&file).unwrap();
    }
}
