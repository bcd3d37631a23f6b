//! What a signal does to a call that waits.

use std::mem::MaybeUninit;
use std::ptr;

use libc::c_int;

/// What a thread's own instructions raise: no signal of these comes while it sleeps. Most programs that have
/// handlers for them (to say where they crashed) have them without `SA_RESTART`.
const OWN_FAULTS: [c_int; 7] = [
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGSYS,
];

/// Whether a call goes on that stands for a read(2), and that a signal has just interrupted: "if a blocked
/// call is interrupted by a signal handler, the call is automatically restarted if the `SA_RESTART` flag was
/// used; otherwise it fails with `EINTR`" (signal(7)). The kernel restarts none that waits for many
/// descriptors, and does not tell which handler ran. So it goes on if none that can have run is without the
/// flag; it fails, rarely for nothing, in programs that have one and have to expect it.
#[cold]
#[must_use]
pub fn interrupted_call_goes_on() -> bool {
    let mut blocked = MaybeUninit::uninit();
    // SAFETY: asks for the mask of this thread; the variable is live, and is filled in as the arguments are
    // valid.
    let blocked = unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), blocked.as_mut_ptr());
        blocked.assume_init()
    };
    // SAFETY: a set that is filled in.
    let can_run = |signal| unsafe { libc::sigismember(&raw const blocked, signal) } == 0;
    !(1..=libc::SIGRTMAX())
        .any(|signal| !OWN_FAULTS.contains(&signal) && can_run(signal) && interrupts(signal))
}

/// Whether a signal has a handler, or had one for a single time, that ends calls. The C library does not tell
/// of its own handlers, which restart calls.
fn interrupts(signal: c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: changes nothing; the variable is live, and is filled in on success.
    let action = unsafe {
        if libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) != 0 {
            return false;
        }
        action.assume_init()
    };
    // What has run for the single time that it was meant for has left its flags behind.
    let is_handled = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction)
        || action.sa_flags & libc::SA_RESETHAND != 0;
    is_handled && action.sa_flags & libc::SA_RESTART == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn handler(_: c_int) {}

    fn handle(signal: c_int, flags: c_int) {
        // SAFETY: sigaction is plain data, for which all zeroes is a valid value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = (handler as *const ()).expose_provenance();
        action.sa_flags = flags;
        // SAFETY: a handler that does nothing.
        assert_eq!(unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) }, 0);
    }

    fn ignore(signal: c_int) {
        // SAFETY: takes integers only.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }

    fn mask(how: c_int, signal: c_int) {
        // SAFETY: a set of one signal, in a live variable that is all zeroes: the empty set.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigaddset(&raw mut set, signal);
            libc::pthread_sigmask(how, &raw const set, ptr::null_mut());
        }
    }

    // One test: handlers are the process's.
    #[test]
    fn a_call_goes_on_unless_a_handler_without_the_flag_can_have_run() {
        // Rust's runtime handles these without the flag.
        handle(libc::SIGSEGV, libc::SA_SIGINFO);
        assert!(interrupted_call_goes_on());
        handle(libc::SIGUSR1, libc::SA_RESTART);
        assert!(interrupted_call_goes_on());

        handle(libc::SIGUSR2, 0);
        assert!(!interrupted_call_goes_on());
        mask(libc::SIG_BLOCK, libc::SIGUSR2);
        assert!(interrupted_call_goes_on());
        mask(libc::SIG_UNBLOCK, libc::SIGUSR2);
        ignore(libc::SIGUSR2);
        assert!(interrupted_call_goes_on());

        let last = libc::SIGRTMAX();
        handle(last, libc::SA_RESETHAND);
        // SAFETY: the signal has a handler.
        assert_eq!(unsafe { libc::raise(last) }, 0);
        assert!(!interrupted_call_goes_on(), "it ran, and is no more");
        ignore(last);
        assert!(interrupted_call_goes_on());
    }
}
