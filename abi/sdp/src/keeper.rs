//! What is left of a process that becomes another program which has its connections.
//!
//! The queue pairs of a process end with its program. So the new program runs in a child, and this process
//! stays, relays the connections, and passes on signals and the status.

use std::ptr;

use libc::{c_int, itimerval, pid_t, siginfo_t, sigset_t, timeval};

use crate::process;
use crate::sys::{BlockedSignals, system};

unsafe extern "C" {
    fn setitimer(which: c_int, new: *const itimerval, old: *mut itimerval) -> c_int;
}
const ITIMER_REAL: c_int = 0;

/// `SI_KERNEL`: the kernel has sent a signal by itself, as a terminal does for all processes that it has.
const BY_KERNEL: c_int = 0x80;
/// `SI_TIMER`: a timer of the program that was here, which exec would have ended.
const BY_TIMER: c_int = -2;

/// Returns in a child, which is to become the program; this process stays without the program's descriptors
/// until that ends. Returns in this process, and the connections end, if threads of the program might go on,
/// or if there can be no child.
pub(crate) fn stay(close_all: impl FnOnce(), ends: impl FnOnce()) {
    if process::has_threads() {
        return;
    }
    let signals = BlockedSignals::new();
    let before = set_action(libc::SIGCHLD, None);
    // A program has the alarm of the one whose place it takes; a child has none.
    let alarm = set_alarm(&NO_ALARM);
    // SAFETY: this is the only thread of the program.
    let child = unsafe { libc::fork() };
    if child > 0 {
        close_all();
        let status = wait_for(child);
        ends();
        end_as(status);
    }
    set_action(libc::SIGCHLD, Some(&before));
    set_alarm(&alarm);
    if child == 0 {
        // SAFETY: prctl(2) with integers: a signal that this process cannot pass on ends the child, too.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    }
    drop(signals);
}

/// Has a signal do what it does by default, or something else; what it did before.
fn set_action(signal: c_int, action: Option<&libc::sigaction>) -> libc::sigaction {
    // SAFETY: all zeroes is the default action; the calls read and write live variables.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        let mut before = default;
        libc::sigaction(signal, action.unwrap_or(&default), &raw mut before);
        before
    }
}

const NO_ALARM: itimerval = itimerval {
    it_interval: timeval { tv_sec: 0, tv_usec: 0 },
    it_value: timeval { tv_sec: 0, tv_usec: 0 },
};

/// Sets the alarm of the process; what it was before.
fn set_alarm(alarm: &itimerval) -> itimerval {
    let mut before = NO_ALARM;
    // SAFETY: the call reads and writes live variables.
    unsafe { setitimer(ITIMER_REAL, alarm, &raw mut before) };
    before
}

fn all_signals() -> sigset_t {
    // SAFETY: all zeroes is a set, which the call fills in.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        all
    }
}

/// Waits for the end of a child, which gets all signals of this process. All are blocked.
fn wait_for(child: pid_t) -> c_int {
    let all = all_signals();
    loop {
        // SAFETY: all zeroes is an information, which the call fills in.
        let (signal, by) = unsafe {
            let mut info: siginfo_t = std::mem::zeroed();
            (libc::sigwaitinfo(&raw const all, &raw mut info), info.si_code)
        };
        match signal {
            libc::SIGCHLD => {
                if let Some(status) = ended(child) {
                    return status;
                }
            }
            1.. if by != BY_TIMER && (by != BY_KERNEL || !is_of_terminal(signal)) => {
                // SAFETY: kill(2) of the child, which was not waited for.
                unsafe { libc::kill(child, signal) };
            }
            _ => {}
        }
    }
}

/// Whether a terminal sends a signal to all processes that it has, so that the child has got it, too. The
/// leader of a session hears alone that its terminal has gone.
fn is_of_terminal(signal: c_int) -> bool {
    match signal {
        // SAFETY: system calls with integers.
        libc::SIGHUP => unsafe { libc::getsid(0) != libc::getpid() },
        libc::SIGINT | libc::SIGQUIT | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => true,
        _ => matches!(signal, libc::SIGCONT | libc::SIGWINCH),
    }
}

/// The status of a child, if it has ended. If it has stopped, so does this process.
fn ended(child: pid_t) -> Option<c_int> {
    let mut status = 0;
    // SAFETY: a live variable.
    let asked = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG | libc::WUNTRACED) };
    match system(asked) {
        Ok(0) => None,
        Ok(_) if libc::WIFSTOPPED(status) => {
            // SAFETY: signals for this process, and for the child when this one goes on.
            unsafe {
                libc::raise(libc::SIGSTOP);
                libc::kill(child, libc::SIGCONT);
            }
            None
        }
        Ok(_) => Some(status),
        // Somebody else has waited for it.
        Err(_) => Some(0),
    }
}

/// Ends this process as its child has ended.
fn end_as(status: c_int) -> ! {
    if libc::WIFSIGNALED(status) {
        let signal = libc::WTERMSIG(status);
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        set_action(signal, None);
        // SAFETY: calls with live variables. The memory is not that of the program that failed.
        unsafe {
            libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
            libc::raise(signal);
            // Not others that wait: their handlers are those of the program that was here.
            let mut one: sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut one, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const one, ptr::null_mut());
        }
    }
    // SAFETY: nothing is left to do.
    unsafe { crate::real::_exit(libc::WEXITSTATUS(status)) };
    std::process::abort()
}
