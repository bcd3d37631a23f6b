//! What the benchmark asks of the kernel and the processor directly. All unsafe code of this crate
//! is here.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

/// Processors that this process may run on.
///
/// # Errors
///
/// What the kernel says.
pub fn processors() -> io::Result<Vec<usize>> {
    // SAFETY: an all-zero `cpu_set_t` is a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `size_of_val(&set)` bytes to `set`.
    let rc = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: every index is below CPU_SETSIZE.
    Ok((0..libc::CPU_SETSIZE as usize)
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .collect())
}

/// Pins the calling thread, and the threads and processes that it creates, to a processor.
///
/// # Errors
///
/// What the kernel says.
pub(crate) fn pin(cpu: usize) -> io::Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: an all-zero `cpu_set_t` is a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `cpu` is below CPU_SETSIZE.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the kernel reads `size_of_val(&set)` bytes of `set`.
    let rc = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Copies bytes between this process and memory of process `pid` at `addr`: out of it into `bytes`, or
/// with `write` from `bytes` into it.
///
/// # Errors
///
/// What the kernel says; it did not copy everything.
pub(crate) fn copy_peer(pid: u32, addr: u64, bytes: &mut [u8], write: bool) -> io::Result<()> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: the kernel reads or writes the local bytes, a live and exclusive slice; the remote address
    // means something in the other process only.
    let copied = unsafe {
        match write {
            true => libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0),
            false => libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0),
        }
    };
    if usize::try_from(copied).is_ok_and(|copied| copied == bytes.len()) {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// Starts `command` pinned to a processor, such that it does not outlive this process: the kernel
/// kills it with `SIGTERM`, on which MPI's launcher ends its ranks too.
///
/// # Errors
///
/// The program cannot be started.
pub(crate) fn spawn(command: &mut Command, cpu: Option<usize>) -> io::Result<Child> {
    let setup = move || {
        // SAFETY: prctl with PR_SET_PDEATHSIG takes a signal number and touches no memory.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
        cpu.map_or(Ok(()), pin)
    };
    // SAFETY: between fork and exec `setup` makes system calls only: it neither allocates nor
    // takes locks, as `pre_exec` demands.
    unsafe { command.pre_exec(setup) };
    command.spawn()
}

/// Ends a child: asks with `SIGTERM`, and insists after `patience_ms`.
pub(crate) fn end(child: &mut Child, patience_ms: u64) {
    if let Ok(pid) = libc::pid_t::try_from(child.id())
        && matches!(child.try_wait(), Ok(None))
    {
        // SAFETY: kill touches no memory; the child was not waited for, so the number is still its.
        unsafe { libc::kill(pid, libc::SIGTERM) };
    }
    for _ in 0..patience_ms / 5 {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // It may have ended meanwhile, and then there is nothing to kill.
    let _ = child.kill();
    let _ = child.wait();
}

/// How much the time-stamp counter advances in a nanosecond; 1 where there is none.
#[must_use]
pub fn cycles_per_ns() -> f64 {
    let (began, first) = (std::time::Instant::now(), cycles());
    std::thread::sleep(Duration::from_millis(20));
    let passed = cycles().saturating_sub(first);
    passed as f64 / began.elapsed().as_nanos().max(1) as f64
}

/// The processor's time-stamp counter; nanoseconds where there is none.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn cycles() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and Linux does not forbid it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// The processor's time-stamp counter; nanoseconds where there is none.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn cycles() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Processor time that all threads of this process have used.
///
/// # Errors
///
/// What the kernel says.
pub(crate) fn cpu_time() -> io::Result<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = u64::try_from(time.tv_sec).map_err(io::Error::other)?;
    let nanos = u32::try_from(time.tv_nsec).map_err(io::Error::other)?;
    Ok(Duration::new(seconds, nanos))
}

/// The number of the calling thread.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    let id = unsafe { libc::gettid() };
    id.unsigned_abs()
}

/// Whose processor time is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worker {
    /// A thread of this process.
    Thread(u32),
    /// All threads of a process.
    Process(u32),
}

/// Processor time that somebody has used, in nanoseconds; of one that is gone none.
///
/// # Errors
///
/// What the kernel says.
pub(crate) fn cpu_ns(of: Worker) -> io::Result<u64> {
    // CPUCLOCK_SCHED, and CPUCLOCK_PERTHREAD_MASK, of linux/posix-timers.h, behind the number's complement.
    let (number, kind) = match of {
        Worker::Thread(number) => (number, 6),
        Worker::Process(number) => (number, 2),
    };
    let clock = (!(number as libc::clockid_t) << 3) | kind;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } == 0 {
        return Ok(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64);
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::EINVAL) => Ok(0),
        error => Err(error),
    }
}

/// How often a thread of this process has gone to sleep (`voluntary_ctxt_switches`); of others, and of one
/// that is gone, 0.
pub(crate) fn sleeps(of: Worker) -> u64 {
    let Worker::Thread(number) = of else { return 0 };
    let status = std::fs::read_to_string(format!("/proc/self/task/{number}/status"));
    let status = status.unwrap_or_default();
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Takes the calling thread into a new network namespace.
///
/// # Errors
///
/// The right to that is missing (CAP_SYS_ADMIN).
pub(crate) fn new_network_namespace() -> io::Result<()> {
    // SAFETY: takes an integer.
    let rc = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes this process, which has one thread, into a network namespace of its own; as root there if not here.
///
/// # Errors
///
/// What the kernel says, and nothing has changed. The inner one: it is there, and this is not root in it, and
/// has no network.
pub(crate) fn own_network_namespace() -> io::Result<io::Result<()>> {
    // SAFETY: takes nothing and cannot fail.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    if user == 0 {
        return new_network_namespace().map(Ok);
    }
    // SAFETY: takes an integer.
    if unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let write = |file: &str, text: &str| std::fs::write(format!("/proc/self/{file}"), text);
    Ok(write("setgroups", "deny")
        .and_then(|()| write("uid_map", &format!("0 {user} 1")))
        .and_then(|()| write("gid_map", &format!("0 {group} 1"))))
}

/// Takes the calling thread into the network namespace that the file stands for.
///
/// # Errors
///
/// The right to that is missing (CAP_SYS_ADMIN).
pub(crate) fn enter_network_namespace(namespace: &std::fs::File) -> io::Result<()> {
    // SAFETY: takes integers.
    let rc = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sets a socket's congestion control.
///
/// # Errors
///
/// The kernel does not know it or does not allow it.
pub(crate) fn set_congestion(socket: &impl AsRawFd, name: &str) -> io::Result<()> {
    let len = libc::socklen_t::try_from(name.len()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads `len` bytes at `name`'s start.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            name.as_ptr().cast(),
            len,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A socket's congestion control.
#[cfg(test)]
pub(crate) fn congestion(socket: &impl AsRawFd) -> io::Result<String> {
    let mut name = [0_u8; 16];
    let mut len = name.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `name`, and how many.
    let rc = unsafe {
        let (fd, at) = (socket.as_raw_fd(), name.as_mut_ptr().cast());
        libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, at, &raw mut len)
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Connects a socket to which something is done before.
///
/// # Errors
///
/// What the kernel says.
pub(crate) fn connect(
    to: SocketAddrV4,
    before: impl FnOnce(&OwnedFd) -> io::Result<()>,
) -> io::Result<TcpStream> {
    // SAFETY: takes integers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    before(&socket)?;
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: to.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(to.ip().octets()) },
        sin_zero: [0; 8],
    };
    let len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of the address, a live variable.
    let rc = unsafe { libc::connect(fd, (&raw const address).cast(), len) };
    if rc == 0 { Ok(socket.into()) } else { Err(io::Error::last_os_error()) }
}

/// Has a packet socket not see what goes out at its interface, and gives it so many octets for what waits in
/// either direction, or as many as the system allows where the right to more is missing (CAP_NET_ADMIN).
///
/// # Errors
///
/// It is no packet socket.
#[cfg(feature = "smoltcp")]
pub(crate) fn set_up_packet_socket(
    socket: std::os::fd::RawFd,
    room: libc::c_int,
) -> io::Result<()> {
    let set = |level, option, value: libc::c_int| {
        let (at, len) = ((&raw const value).cast(), size_of_val(&value) as libc::socklen_t);
        // SAFETY: the kernel reads an integer that is on this stack.
        let rc = unsafe { libc::setsockopt(socket, level, option, at, len) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    set(libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
    for (at_any_rate, allowed) in
        [(libc::SO_SNDBUFFORCE, libc::SO_SNDBUF), (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF)]
    {
        let given = set(libc::SOL_SOCKET, at_any_rate, room);
        given.or_else(|_| set(libc::SOL_SOCKET, allowed, room))?;
    }
    Ok(())
}

/// Makes a TAP device in the network namespace of this thread, without offloads: every frame is complete, and
/// no longer than the MTU. Reads do not wait. It is gone when the file is closed.
///
/// # Errors
///
/// The right to that is missing (CAP_NET_ADMIN), or the name is too long or taken.
pub(crate) fn open_tap(name: &str) -> io::Result<File> {
    let mut open = File::options();
    let device = open.read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: an all-zero `ifreq` is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: TUNSETIFF takes one ifreq, a live variable, with a name and flags.
    let rc = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if rc == 0 { Ok(device) } else { Err(io::Error::last_os_error()) }
}

/// Waits until one of the files can be read, or for so long.
///
/// # Errors
///
/// What the kernel says.
pub(crate) fn wait_readable(files: &[File; 2], most: Duration) -> io::Result<()> {
    let wait =
        |file: &File| libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut all = files.each_ref().map(wait);
    let seconds = libc::time_t::try_from(most.as_secs()).map_err(io::Error::other)?;
    let most = libc::timespec { tv_sec: seconds, tv_nsec: most.subsec_nanos().into() };
    // SAFETY: the kernel reads and writes the descriptions, of which there are so many, and reads a timespec.
    let rc = unsafe { libc::ppoll(all.as_mut_ptr(), 2, &raw const most, std::ptr::null()) };
    match rc {
        0.. => Ok(()),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            error => Err(error),
        },
    }
}

/// Has the connections of a socket offer a window of about so many octets.
///
/// # Errors
///
/// The system does not allow that much.
pub(crate) fn set_receive_room(socket: &TcpListener, octets: u32) -> io::Result<()> {
    let asked = libc::c_int::try_from(octets).map_err(io::Error::other)?;
    let (mut given, mut len): (libc::c_int, _) = (0, size_of_val(&asked) as libc::socklen_t);
    // SAFETY: the kernel reads an integer on this stack, and writes another and its length.
    let rc = unsafe {
        let (fd, at) = (socket.as_raw_fd(), libc::SO_RCVBUF);
        match libc::setsockopt(fd, libc::SOL_SOCKET, at, (&raw const asked).cast(), len) {
            0 => libc::getsockopt(fd, libc::SOL_SOCKET, at, (&raw mut given).cast(), &raw mut len),
            rc => rc,
        }
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    // The kernel counts its own records too, and doubles what is asked for.
    if given / 2 >= asked {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "sockets have {} octets at most here; an administrator can change that: \
         sysctl net.core.rmem_max={asked}",
        given / 2
    )))
}

/// Bytes of memory that this process has resident: its own and those it shares.
///
/// # Errors
///
/// `/proc` cannot be read.
pub(crate) fn resident_bytes() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes =
        line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kilobytes.map(|kb| kb * 1024).ok_or_else(|| io::Error::other("no VmRSS in /proc/self/status"))
}

/// Where a program of that name is in PATH.
pub(crate) fn find_program(name: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| OsStr::new("/usr/bin:/bin").to_owned());
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// A TCP port that is free at the moment.
///
/// # Errors
///
/// What the kernel says.
pub(crate) fn free_port() -> io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
