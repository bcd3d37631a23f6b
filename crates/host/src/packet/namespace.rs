//! A TAP or TUN device in a network namespace of the user's own (user_namespaces(7)): without any privilege,
//! the kernel of this host becomes the peer.
//!
//! A process with threads cannot enter a user namespace, so a child makes it, sets the device up inside,
//! hands the descriptors over and ends. The descriptors keep the namespaces; programs enter them through
//! ours, and are root there.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use libc::c_int;

use super::interface::{self, Name};
use super::tap::{self, Tap};
use super::{EthernetEnd, LinkError, LinkSpec};
use crate::sys::{adopt, check, check_len};

/// What the child hands over: the device, the user namespace, the network namespace.
const DESCRIPTORS: usize = 3;
const DESCRIPTOR_BYTES: usize = DESCRIPTORS * size_of::<RawFd>();

/// What the child does, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Step {
    Unshare,
    MapUser,
    Device,
    SetUp,
    Done,
}

impl Step {
    const ALL: [Self; 5] = [Self::Unshare, Self::MapUser, Self::Device, Self::SetUp, Self::Done];

    /// What failed if the child came no further.
    fn what(self) -> &'static str {
        match self {
            Self::Unshare => "creating a user namespace",
            Self::MapUser => "becoming root in a user namespace",
            Self::Device => "creating a network device in a user namespace",
            Self::SetUp | Self::Done => "setting up the network device in the user namespace",
        }
    }
}

/// The child's report.
#[derive(Clone, Copy)]
#[repr(C)]
struct Report {
    step: u8,
    errno: c_int,
    mtu: u32,
    name: Name,
}

/// What the child needs, prepared by the parent, as it must not allocate.
struct Order<'a> {
    wanted: &'a Wanted<'a>,
    user_map: String,
    group_map: String,
}

/// The device that is to be made.
pub(super) struct Wanted<'a> {
    /// Its name; empty: the kernel chooses one.
    pub(super) name: Name,
    /// Its largest IP packet; none: as it is.
    pub(super) mtu: Option<u32>,
    /// The kernel's addresses on it.
    pub(super) addresses: &'a [(IpAddr, u8)],
    /// Makes it. Allocates nothing.
    pub(super) attach: fn(Name) -> io::Result<(OwnedFd, Name)>,
}

/// A device in namespaces of its own.
pub(super) struct Made {
    pub(super) device: OwnedFd,
    pub(super) name: Name,
    /// Its largest IP packet, in octets.
    pub(super) mtu: u32,
    pub(super) user: OwnedFd,
    pub(super) net: OwnedFd,
}

/// Makes the namespaces and the link.
pub(super) fn open(
    spec: &LinkSpec,
    name: &str,
    addresses: &[(IpAddr, u8)],
    mtu: Option<u32>,
    end: EthernetEnd,
) -> Result<Tap, LinkError> {
    let at = |what| LinkError::at(spec, what);
    let name = Name::new(name).map_err(at("the name of the interface"))?;
    let device = Wanted { name, mtu, addresses, attach: tap::attach };
    let made = make(&device).map_err(|(what, source)| LinkError::new(spec, what, source))?;
    let tap = Tap::new(made.device, made.name, made.mtu, end);
    Ok(tap.map_err(at("setting up the TAP device"))?.in_namespace(made.user, made.net))
}

/// Makes the namespaces and the device.
///
/// # Errors
/// What failed, and how.
pub(super) fn make(wanted: &Wanted<'_>) -> Result<Made, (&'static str, io::Error)> {
    // SAFETY: these take nothing and cannot fail.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let order =
        Order { wanted, user_map: format!("0 {user} 1\n"), group_map: format!("0 {group} 1\n") };
    let at = |what| move |error| (what, error);
    let (ours, childs) = pair().map_err(at("creating a pair of sockets"))?;
    let child = start(&order, &childs).map_err(at("starting a process"))?;
    drop(childs);
    let answer = receive(&ours);
    reap(child);
    let (report, fds) = answer.map_err(at("receiving from the process in the user namespace"))?;
    let step = Step::ALL.get(usize::from(report.step)).copied().unwrap_or(Step::Unshare);
    if step != Step::Done || report.errno != 0 {
        return Err((step.what(), io::Error::from_raw_os_error(report.errno)));
    }
    let [device, user, net] = fds.ok_or((step.what(), io::ErrorKind::UnexpectedEof.into()))?;
    Ok(Made { device, name: report.name, mtu: report.mtu, user, net })
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel writes two descriptors to a live array.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) })?;
    // Both are adopted before either error is looked at.
    let (first, second) = (adopt(fds[0]), adopt(fds[1]));
    Ok((first?, second?))
}

/// Starts the child, which ends as soon as it has reported. No signal comes when it does: the program
/// does not know of it.
fn start(order: &Order<'_>, to: &OwnedFd) -> io::Result<libc::pid_t> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are live; the first is filled in before it is read. With all signals blocked, no
    // handler of the program runs in the child.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    // SAFETY: without flags and a stack this is a fork, after which the child is on its own: it calls the
    // kernel, allocates nothing, takes no lock, and ends with `_exit`.
    let child = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
    if child == 0 {
        report(order, to);
        // SAFETY: ends the child without running anything of the program's.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: the set was filled in above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    check(child as c_int)
}

/// Waits for the end of the child.
fn reap(child: libc::pid_t) {
    loop {
        // SAFETY: a null status is allowed. The flag is for children that end without a signal.
        let outcome = check(unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::__WALL) });
        // The program may have waited for all children, and so for ours.
        if !outcome.is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
            return;
        }
    }
}

/// In the child: does everything, and tells the parent how it went.
fn report(order: &Order<'_>, to: &OwnedFd) {
    let mut report = Report { step: 0, errno: 0, mtu: 0, name: order.wanted.name };
    match work(order, &mut report) {
        Ok(fds) => send(to, &report, Some(&fds)),
        Err(error) => {
            report.errno = error.raw_os_error().unwrap_or(libc::EIO);
            send(to, &report, None);
        }
    }
}

/// In the child: makes the namespaces and the device; the report says how far it came.
fn work(order: &Order<'_>, report: &mut Report) -> io::Result<[OwnedFd; DESCRIPTORS]> {
    // SAFETY: takes an integer.
    check(unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET) })?;
    report.step = Step::MapUser as u8;
    write(c"/proc/self/uid_map", order.user_map.as_bytes())?;
    // Without a right to groups, they have to be given up before one can be mapped (Linux 3.19).
    write(c"/proc/self/setgroups", b"deny")?;
    write(c"/proc/self/gid_map", order.group_map.as_bytes())?;
    report.step = Step::Device as u8;
    let Wanted { name, mtu, addresses, attach } = *order.wanted;
    let (device, name) = attach(name)?;
    report.name = name;
    report.step = Step::SetUp as u8;
    interface::bring_up(Name::LOOPBACK, None, &[])?;
    interface::bring_up(name, mtu, addresses)?;
    report.mtu = interface::mtu(&interface::control()?, name)?;
    let user = open_path(c"/proc/self/ns/user", libc::O_RDONLY)?;
    let net = open_path(c"/proc/self/ns/net", libc::O_RDONLY)?;
    report.step = Step::Done as u8;
    Ok([device, user, net])
}

fn open_path(path: &CStr, flags: c_int) -> io::Result<OwnedFd> {
    // SAFETY: the path is a zero-terminated string.
    adopt(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) })
}

/// Writes to a file of `/proc`. Allocates nothing.
pub(super) fn write(path: &CStr, text: &[u8]) -> io::Result<()> {
    let fd = open_path(path, libc::O_WRONLY)?;
    // SAFETY: the kernel reads `text.len()` bytes from a live slice.
    check_len(unsafe { libc::write(fd.as_raw_fd(), text.as_ptr().cast(), text.len()) })?;
    Ok(())
}

/// Room for a control message with the descriptors, aligned as its header must be.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Calls `with` with a message header for a report and room for descriptors.
fn with_header<T>(
    report: *mut Report,
    control: &mut Control,
    with: impl FnOnce(&mut libc::msghdr) -> T,
) -> T {
    let mut vector = libc::iovec { iov_base: report.cast(), iov_len: size_of::<Report>() };
    // SAFETY: plain data, for which all zeroes is a valid value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut vector;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut *control).cast();
    // SAFETY: computes from an integer.
    header.msg_controllen = unsafe { libc::CMSG_SPACE(DESCRIPTOR_BYTES as u32) } as _;
    with(&mut header)
}

/// In the child: sends the report, and the descriptors unless something failed. If it cannot be sent, the
/// parent sees the end of the stream.
fn send(to: &OwnedFd, report: &Report, fds: Option<&[OwnedFd; DESCRIPTORS]>) {
    let mut control = Control([0; 64]);
    with_header(std::ptr::from_ref(report).cast_mut(), &mut control, |header| {
        match fds {
            Some(fds) => put_descriptors(header, fds),
            None => header.msg_controllen = 0,
        }
        // SAFETY: the header points at live memory of the lengths that it names, which the kernel reads.
        unsafe { libc::sendmsg(to.as_raw_fd(), header, libc::MSG_NOSIGNAL) };
    });
}

fn put_descriptors(header: &mut libc::msghdr, fds: &[OwnedFd; DESCRIPTORS]) {
    let numbers = [fds[0].as_raw_fd(), fds[1].as_raw_fd(), fds[2].as_raw_fd()];
    // SAFETY: the control buffer is live, aligned, and large enough for one message with the descriptors.
    unsafe {
        let message = libc::CMSG_FIRSTHDR(header);
        (*message).cmsg_level = libc::SOL_SOCKET;
        (*message).cmsg_type = libc::SCM_RIGHTS;
        (*message).cmsg_len = libc::CMSG_LEN(DESCRIPTOR_BYTES as u32) as _;
        libc::CMSG_DATA(message).cast::<[RawFd; DESCRIPTORS]>().write_unaligned(numbers);
    }
}

/// Waits for the report, and the descriptors if there are any.
fn receive(from: &OwnedFd) -> io::Result<(Report, Option<[OwnedFd; DESCRIPTORS]>)> {
    let mut report = Report { step: 0, errno: 0, mtu: 0, name: Name::LOOPBACK };
    let mut control = Control([0; 64]);
    with_header(&raw mut report, &mut control, |header| {
        loop {
            // SAFETY: the header points at live memory of the lengths that it names. Any bytes are a report.
            let outcome = check_len(unsafe {
                libc::recvmsg(from.as_raw_fd(), header, libc::MSG_CMSG_CLOEXEC)
            });
            match outcome {
                Ok(len) if len == size_of::<Report>() => return take_descriptors(header),
                Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    })
    .map(|fds| (report, fds))
}

fn take_descriptors(header: &libc::msghdr) -> io::Result<Option<[OwnedFd; DESCRIPTORS]>> {
    // SAFETY: the header is one that the kernel has filled in, its control buffer is alive.
    let message = unsafe { libc::CMSG_FIRSTHDR(header).as_ref() };
    // SAFETY: computes from an integer.
    let len = unsafe { libc::CMSG_LEN(DESCRIPTOR_BYTES as u32) } as usize;
    let Some(message) = message.filter(|message| message.cmsg_len == len) else {
        return Ok(None);
    };
    // SAFETY: a control message of this length has three numbers: only a child of ours sends on this socket.
    let numbers =
        unsafe { libc::CMSG_DATA(message).cast::<[RawFd; DESCRIPTORS]>().read_unaligned() };
    // SAFETY: the kernel has just put these descriptors into this process; nobody else knows them.
    let fds = numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) });
    let [device, user, net] = fds.map(crate::sys::move_up);
    Ok(Some([device?, user?, net?]))
}
