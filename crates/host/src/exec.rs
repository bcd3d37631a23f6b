//! Becoming another program, which finds the signals as this one was started with.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
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
