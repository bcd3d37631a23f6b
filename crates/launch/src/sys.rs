//! System calls of the launcher that the standard library does not have.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// Takes over a descriptor that the launcher left open for this process, and keeps it from children.
///
/// # Errors
/// If there is no such descriptor.
pub(crate) fn adopt(fd: RawFd) -> io::Result<File> {
    // SAFETY: fcntl with F_GETFD touches no memory; a descriptor that is not open is an error.
    if fd < 3 || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: as above.
    unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: the descriptor is open; the launcher left it for this purpose, and the caller asks once.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Lets the programs that are started from now on inherit a descriptor, or not.
pub(crate) fn set_inherited(fd: BorrowedFd<'_>, inherited: bool) -> io::Result<()> {
    let flags = if inherited { 0 } else { libc::FD_CLOEXEC };
    // SAFETY: fcntl with F_SETFD touches no memory.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, flags) }).map(drop)
}

/// Makes reads and writes return at once.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: fcntl with these commands touches no memory.
    let flags = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) }).map(drop)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A descriptor to wait for, and what it is ready for afterwards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interest {
    pub(crate) fd: RawFd,
    pub(crate) write: bool,
    pub(crate) ready: bool,
}

/// Waits until a descriptor is ready, or the time is over (without end if there is none).
pub(crate) fn wait(interests: &mut [Interest], timeout: Option<Duration>) -> io::Result<()> {
    let events = |interest: &Interest| {
        if interest.write { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN }
    };
    let mut fds: Vec<libc::pollfd> = interests
        .iter()
        .map(|interest| libc::pollfd { fd: interest.fd, events: events(interest), revents: 0 })
        .collect();
    let timeout = timeout.map_or(-1, |time| time.as_millis().min(60_000) as libc::c_int + 1);
    // SAFETY: the pointer and the length are those of the vector.
    let result = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout) };
    match check(result) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
        other => other?,
    };
    for (interest, fd) in interests.iter_mut().zip(&fds) {
        interest.ready = fd.revents != 0;
    }
    Ok(())
}

/// Signals, as something to wait for and read.
#[derive(Debug)]
pub(crate) struct Signals(File);

impl Signals {
    /// Blocks SIGINT, SIGTERM, SIGHUP and SIGCHLD for this thread, and receives them here from now on.
    pub(crate) fn open() -> io::Result<Self> {
        // SAFETY: a signal set is plain data; sigemptyset initialises it.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set is a valid object; the signals are valid.
        unsafe {
            libc::sigemptyset(&mut set);
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGCHLD] {
                libc::sigaddset(&mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        }
        // SAFETY: the set is initialised.
        let fd =
            check(unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })?;
        // SAFETY: the descriptor is new, and nobody else has it.
        Ok(Self(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }

    /// The next signal that has arrived.
    pub(crate) fn next(&self) -> Option<i32> {
        use std::io::Read;
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        match (&self.0).read(&mut info) {
            Ok(len) if len == info.len() => {
                Some(i32::from_ne_bytes(info[..4].try_into().unwrap_or_default()))
            }
            _ => None,
        }
    }
}

/// Prepares a command: it starts without blocked signals, dies with the launcher, and is the leader of a
/// process group of its own if `own_group`.
pub(crate) fn prepare(command: &mut Command, own_group: bool) {
    if own_group {
        command.process_group(0);
    }
    let parent = std::process::id();
    let before = move || {
        // SAFETY: these calls are safe between fork and exec: they allocate nothing and take no lock.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            // The launcher may have died before.
            if libc::getppid() as u32 != parent {
                libc::_exit(125);
            }
        }
        Ok(())
    };
    // SAFETY: the closure calls only functions that are safe between fork and exec.
    unsafe { command.pre_exec(before) };
}

/// Sends a signal to a process, or to the process group that it leads.
pub(crate) fn kill(pid: u32, group: bool, signal: i32) {
    let pid = pid as libc::pid_t;
    // SAFETY: kill touches no memory. The process is a child that was not waited for, so its number is
    // still its own.
    unsafe { libc::kill(if group { -pid } else { pid }, signal) };
}

/// The name of a signal.
pub(crate) fn name_of_signal(signal: i32) -> &'static str {
    const NAMES: [(i32, &str); 13] = [
        (libc::SIGHUP, "SIGHUP"),
        (libc::SIGINT, "SIGINT"),
        (libc::SIGQUIT, "SIGQUIT"),
        (libc::SIGILL, "SIGILL"),
        (libc::SIGTRAP, "SIGTRAP"),
        (libc::SIGABRT, "SIGABRT"),
        (libc::SIGBUS, "SIGBUS"),
        (libc::SIGFPE, "SIGFPE"),
        (libc::SIGKILL, "SIGKILL"),
        (libc::SIGSEGV, "SIGSEGV"),
        (libc::SIGPIPE, "SIGPIPE"),
        (libc::SIGTERM, "SIGTERM"),
        (libc::SIGXCPU, "SIGXCPU"),
    ];
    NAMES.iter().find(|(number, _)| *number == signal).map_or("unknown", |(_, name)| name)
}
