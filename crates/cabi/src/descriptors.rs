//! Numbers of the descriptors that the libraries open for themselves.
//!
//! A program counts on low numbers: `select` takes none from [`FLOOR`] on, and a shell or a daemon gives the
//! lowest free ones a meaning. So [`move_up`] moves each descriptor of ours to [`FLOOR`] or above. The soft
//! limit of the program is often just [`FLOOR`]; the kernel looks at it only when it gives out a number. So
//! it is raised for that moment alone ([`with_raised_limit`]): the program never sees a higher limit, and
//! its children inherit the one that the program has.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libc::{RLIMIT_NOFILE, c_int, rlim_t, rlimit};

/// The lowest number that a descriptor of ours takes where the hard limit has room for it.
pub const FLOOR: c_int = libc::FD_SETSIZE as c_int;

/// The lowest number that any descriptor of ours takes: below are standard input, output and error, which a
/// program may have closed.
const LOWEST: c_int = 3;

/// How often a step is repeated that failed because another thread restored the limit meanwhile.
const ATTEMPTS: usize = 4;

/// The program waits at no descriptor of ours.
static HIDDEN: AtomicBool = AtomicBool::new(false);

/// From now on [`above_standard`] does as [`move_up`], for a library whose program waits at none of its
/// descriptors.
pub fn hide() {
    HIDDEN.store(true, Ordering::Relaxed);
}

/// Whether [`hide`] was called.
pub fn are_hidden() -> bool {
    HIDDEN.load(Ordering::Relaxed)
}

/// The soft limit that is to be restored while [`with_raised_limit`] runs; 0 at other times.
static RAISED_FROM: AtomicU64 = AtomicU64::new(0);

/// The same open file by a descriptor numbered [`FLOOR`] or above, which is closed on exec. Where the hard
/// limit leaves no room there, the number is at least the soft limit; where there is no room either, it is
/// the lowest free one from 3 on.
///
/// # Errors
///
/// The descriptor is one of the three standard ones, and there is no other number (EMFILE).
pub fn move_up(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() >= FLOOR {
        return Ok(fd);
    }
    if let Ok(moved) = duplicate(&fd, FLOOR) {
        return Ok(moved);
    }
    for _ in 0..ATTEMPTS {
        let Ok(limit) = limit() else { break };
        let raised_from = RAISED_FROM.load(Ordering::Acquire);
        let soft = if raised_from > 0 { raised_from } else { limit.rlim_cur };
        let soft = c_int::try_from(soft).unwrap_or(FLOOR).clamp(LOWEST, FLOOR);
        // Where room is short, the numbers that the program cannot get are the next best.
        let floors = [FLOOR, soft].into_iter().filter(|floor| limit.rlim_max > *floor as rlim_t);
        let mut floors = floors.filter(|floor| *floor > fd.as_raw_fd()).peekable();
        if floors.peek().is_none() {
            break;
        }
        if let Some(moved) = with_raised_limit(|| floors.find_map(|low| duplicate(&fd, low).ok())) {
            return Ok(moved);
        }
    }
    stay_above_standard(fd)
}

/// As [`move_up`], of a file. Its locks stay.
///
/// # Errors
///
/// Those of [`move_up`].
pub fn move_file_up(file: File) -> io::Result<File> {
    move_up(file.into()).map(File::from)
}

/// The same open file by a descriptor that is none of the three standard ones: for descriptors that the
/// program waits for, which must have low numbers.
///
/// # Errors
///
/// There is no other number (EMFILE).
pub fn above_standard(fd: OwnedFd) -> io::Result<OwnedFd> {
    if are_hidden() {
        return move_up(fd);
    }
    stay_above_standard(fd)
}

fn stay_above_standard(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() >= LOWEST { Ok(fd) } else { duplicate(&fd, LOWEST) }
}

/// Another descriptor for the same open file, numbered `lowest` or above.
fn duplicate(fd: &OwnedFd, lowest: c_int) -> io::Result<OwnedFd> {
    // SAFETY: F_DUPFD_CLOEXEC takes an integer and touches no memory.
    let raw = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, lowest) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Runs `make`; if the program's limit leaves it no descriptor, once more under the hard limit.
///
/// # Errors
///
/// Those of `make`.
pub fn with_more_descriptors<T>(mut make: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let is_full = |outcome: &io::Result<T>| {
        outcome.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EMFILE))
    };
    let mut outcome = make();
    for _ in 0..2 {
        if !is_full(&outcome) {
            break;
        }
        outcome = with_raised_limit(&mut make);
    }
    outcome
}

/// Runs `work` while the soft limit of descriptors is the hard one, and restores it. Another thread that does
/// the same may restore the limit before `work` ends: a call that fails for it is to be repeated.
pub fn with_raised_limit<T>(work: impl FnOnce() -> T) -> T {
    let Some(before) = limit().ok().filter(|limit| limit.rlim_cur < limit.rlim_max) else {
        return work();
    };
    RAISED_FROM.store(before.rlim_cur.max(1), Ordering::Release);
    let raised = set(rlimit { rlim_cur: before.rlim_max, ..before });
    let result = work();
    if raised {
        restore(before.rlim_cur, before.rlim_max);
    }
    RAISED_FROM.store(0, Ordering::Release);
    result
}

/// Restores the limit of a child of fork whose parent was in [`with_raised_limit`]. Async-signal-safe.
pub fn restore_limit_in_child() {
    let soft = RAISED_FROM.swap(0, Ordering::AcqRel);
    if soft > 0
        && let Ok(limit) = limit()
    {
        restore(soft, limit.rlim_max);
    }
}

/// Sets the soft limit to `soft`, unless the program has changed it from `raised` meanwhile.
fn restore(soft: rlim_t, raised: rlim_t) {
    if let Ok(limit) = limit()
        && limit.rlim_cur == raised
    {
        set(rlimit { rlim_cur: soft.min(limit.rlim_max), ..limit });
    }
}

/// Soft and hard limit of open descriptors.
///
/// # Errors
///
/// Those of getrlimit(2).
pub fn limit() -> io::Result<rlimit> {
    let mut limit = rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills in one rlimit, a live variable.
    let asked = unsafe { libc::getrlimit(RLIMIT_NOFILE, &raw mut limit) };
    if asked == 0 { Ok(limit) } else { Err(io::Error::last_os_error()) }
}

fn set(limit: rlimit) -> bool {
    // SAFETY: the kernel reads one rlimit from a live variable.
    unsafe { libc::setrlimit(RLIMIT_NOFILE, &raw const limit) == 0 }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn null() -> File {
        File::open("/dev/null").unwrap()
    }

    /// Runs the test `name` again in a process of its own, where this returns true: limits are those of a
    /// process.
    fn is_alone(name: &str) -> bool {
        const ALONE: &str = "QUIPU_TEST_ALONE";
        if std::env::var_os(ALONE).is_some() {
            return true;
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = format!("descriptors::tests::{name}");
        let output = command.args(["--exact", &name, "--nocapture"]).env(ALONE, "1").output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
        false
    }

    #[test]
    fn descriptors_move_above_those_of_select_and_the_limit_stays() {
        if !is_alone("descriptors_move_above_those_of_select_and_the_limit_stays") {
            return;
        }
        assert!(set(rlimit { rlim_cur: 64, rlim_max: 2048 }));
        let files: Vec<File> = (0..100).map(|_| move_file_up(null()).unwrap()).collect();
        assert!(files.iter().all(|file| file.as_raw_fd() >= FLOOR));
        assert_eq!(limit().unwrap().rlim_cur, 64);
        assert!(null().as_raw_fd() < 8, "the low numbers are free");
        // The program has all that it may have.
        let fill: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        let more = with_more_descriptors(|| File::open("/dev/null")).unwrap();
        assert!(move_file_up(more).unwrap().as_raw_fd() >= FLOOR);
        assert!(File::open("/dev/null").is_err() && limit().unwrap().rlim_cur == 64);
        drop(fill);
    }

    #[test]
    fn hidden_descriptors_are_no_low_ones() {
        if !is_alone("hidden_descriptors_are_no_low_ones") {
            return;
        }
        assert!(above_standard(null().into()).unwrap().as_raw_fd() < FLOOR);
        hide();
        assert!(above_standard(null().into()).unwrap().as_raw_fd() >= FLOOR);
    }

    #[test]
    fn where_room_is_short_they_are_above_the_soft_limit_or_where_they_can_be() {
        if !is_alone("where_room_is_short_they_are_above_the_soft_limit_or_where_they_can_be") {
            return;
        }
        assert!(set(rlimit { rlim_cur: 64, rlim_max: 80 }));
        let files: Vec<File> = (0..16).map(|_| move_file_up(null()).unwrap()).collect();
        assert!(files.iter().all(|file| (64..80).contains(&file.as_raw_fd())));
        assert!((3..64).contains(&move_file_up(null()).unwrap().as_raw_fd()));
        assert_eq!(limit().unwrap().rlim_cur, 64);
        assert!(set(rlimit { rlim_cur: 80, rlim_max: 80 }));
        assert!((3..64).contains(&move_file_up(null()).unwrap().as_raw_fd()));
    }

    #[test]
    fn threads_that_raise_the_limit_together_all_get_numbers_and_leave_it_as_it_was() {
        if !is_alone("threads_that_raise_the_limit_together_all_get_numbers_and_leave_it_as_it_was")
        {
            return;
        }
        assert!(set(rlimit { rlim_cur: 128, rlim_max: 4096 }));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let files: Vec<_> = (0..100).map(|_| move_file_up(null()).unwrap()).collect();
                    let high = files.iter().filter(|file| file.as_raw_fd() >= FLOOR).count();
                    assert!(high >= 95, "{high}");
                });
            }
        });
        assert_eq!(limit().unwrap().rlim_cur, 128);
    }
}
