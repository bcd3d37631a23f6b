//! The signals that ask a command to end, waited for instead of handled.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::ptr::null_mut;
use std::time::Duration;

/// SIGINT and SIGTERM, and others if they are asked for, which wait to be [waited for](Self::wait).
pub struct Interrupts {
    set: libc::sigset_t,
}

impl Interrupts {
    /// Blocks them for this thread, and for those that it starts from now on: to be called before there
    /// are others.
    ///
    /// # Errors
    ///
    /// What the system reports.
    pub fn block() -> io::Result<Self> {
        Self::of(&[libc::SIGINT, libc::SIGTERM])
    }

    /// As [`block`](Self::block), and SIGHUP, for who uses the terminal.
    ///
    /// # Errors
    ///
    /// What the system reports.
    pub fn block_with_hangup() -> io::Result<Self> {
        Self::of(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])
    }

    fn of(signals: &[libc::c_int]) -> io::Result<Self> {
        // SAFETY: sigset_t is plain data, which sigemptyset fills in before it is used.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set is a live variable, and the numbers are those of signals.
        unsafe {
            libc::sigemptyset(&raw mut set);
            for signal in signals {
                libc::sigaddset(&raw mut set, *signal);
            }
        }
        let interrupts = Self { set };
        interrupts.mask(libc::SIG_BLOCK)?;
        Ok(interrupts)
    }

    /// Waits until one comes, but no longer than `most`; whether one has. If so, as [`wait`](Self::wait).
    #[must_use]
    pub fn wait_at_most(&self, most: Duration) -> bool {
        self.within(most).is_some()
    }

    /// One that has come.
    #[must_use]
    pub fn pending(&self) -> Option<i32> {
        self.within(Duration::ZERO)
    }

    /// Has a command begin with these signals unblocked, so that they end it.
    pub fn spare(&self, command: &mut Command) {
        let set = self.set;
        let unblock = move || {
            // SAFETY: the set is filled in; the call is allowed between fork and exec.
            match unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, null_mut()) } {
                0 => Ok(()),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        };
        // SAFETY: the closure only makes a system call that is allowed there.
        unsafe { command.pre_exec(unblock) };
    }

    fn within(&self, most: Duration) -> Option<i32> {
        let most = libc::timespec {
            tv_sec: most.as_secs() as libc::time_t,
            tv_nsec: most.subsec_nanos().into(),
        };
        // SAFETY: the set is filled in, the time is a live variable, and nothing is asked about the signal.
        let came = unsafe {
            libc::sigtimedwait(&raw const self.set, std::ptr::null_mut(), &raw const most)
        };
        (came > 0).then(|| {
            let _ = self.mask(libc::SIG_UNBLOCK);
            came
        })
    }

    fn mask(&self, how: libc::c_int) -> io::Result<()> {
        // SAFETY: the set is filled in; the old mask is not asked for.
        match unsafe { libc::pthread_sigmask(how, &raw const self.set, std::ptr::null_mut()) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Waits until one comes; which. The next one ends the process, should what follows take too long.
    pub fn wait(&self) -> i32 {
        let mut signal = 0;
        // SAFETY: the set is filled in, and the number goes to a live variable.
        unsafe { libc::sigwait(&raw const self.set, &raw mut signal) };
        // It was blocked, so it can be unblocked.
        let _ = self.mask(libc::SIG_UNBLOCK);
        signal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_ended_by_them_if_it_is_spared() {
        let ended = std::thread::spawn(|| {
            let interrupts = Interrupts::block().unwrap();
            let mut command = Command::new("sh");
            command.args(["-c", "kill -TERM $$; exit 3"]);
            let blocked = command.status().unwrap().code();
            interrupts.spare(&mut command);
            (blocked, command.status().unwrap().code())
        });
        assert_eq!(ended.join().unwrap(), (Some(3), None));
    }

    #[test]
    fn a_signal_that_came_before_is_not_missed() {
        // In a thread of its own, whose mask nobody else sees.
        let thread = std::thread::spawn(|| {
            let interrupts = Interrupts::block().unwrap();
            // SAFETY: sends a signal to the calling thread, which has blocked it.
            assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGTERM) }, 0);
            interrupts.wait()
        });
        assert_eq!(thread.join().unwrap(), libc::SIGTERM);
    }
}
