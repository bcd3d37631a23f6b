//! Sockets between engines of one host: abstract UNIX addresses, message by message.
//!
//! An abstract name lives in the network namespace, like the IP address and port that it is made
//! from, leaves nothing behind, and needs no directory.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use libc::{c_int, c_uint, c_void, socklen_t};
use quipu_cabi::descriptors::with_raised_limit;

use crate::sys::{adopt, adopt_socket, check, check_len, with_more_descriptors};

/// Most descriptors that one message brings.
pub(crate) const MAX_FDS: usize = 2;
/// Longest message.
pub(crate) const MAX_MESSAGE: usize = 4096;
/// Room for the control message that carries [`MAX_FDS`] descriptors, in words.
const CONTROL_WORDS: usize = 4;
const BACKLOG: c_int = 128;

/// Where an engine listens.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Name {
    /// At one address.
    At(SocketAddr),
    /// At this port of every address of the host.
    Everywhere(u16),
}

/// The abstract address of the engine that listens there.
fn name(name: Name) -> (libc::sockaddr_un, socklen_t) {
    // SAFETY: all zeroes is a valid sockaddr_un.
    let mut raw: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    raw.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let text = match name {
        Name::At(address) => format!("quipu/{}/{}", address.ip(), address.port()),
        Name::Everywhere(port) => format!("quipu/*/{port}"),
    };
    // The first byte stays 0: that makes the name abstract (unix(7)).
    for (to, from) in raw.sun_path[1..].iter_mut().zip(text.bytes()) {
        *to = from as libc::c_char;
    }
    let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + text.len();
    (raw, len as socklen_t)
}

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: takes integers only.
    with_more_descriptors(|| adopt_socket(unsafe { libc::socket(libc::AF_UNIX, kind, 0) }))
}

/// Listens for engines of this host that want to reach `at`.
pub(crate) fn listen(at: Name) -> io::Result<OwnedFd> {
    let fd = socket()?;
    let (raw, len) = name(at);
    // SAFETY: the pointer and the length describe `raw`, which outlives the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const raw).cast(), len) })?;
    crate::sys::listen(&fd, BACKLOG)?;
    Ok(fd)
}

/// Connects to the engine of this host that listens at `at`. Never waits.
pub(crate) fn connect(at: Name) -> io::Result<OwnedFd> {
    let fd = socket()?;
    let (raw, len) = name(at);
    // SAFETY: the pointer and the length describe `raw`, which outlives the call.
    check(unsafe { libc::connect(fd.as_raw_fd(), (&raw const raw).cast(), len) })?;
    Ok(fd)
}

/// Takes a connection.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: null pointers mean that the address is not wanted.
    adopt_socket(unsafe {
        libc::accept4(
            listener.as_raw_fd(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
        )
    })
}

/// Process, user and group at the other end, as the kernel saw them at connect or listen; the process
/// number is 0 if it has none in this PID namespace.
pub(crate) fn peer_credentials(fd: &OwnedFd) -> io::Result<libc::ucred> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `cred`.
    check(unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    })?;
    Ok(cred)
}

/// The other groups of whoever is at the other end, as the kernel saw them then.
pub(crate) fn peer_groups(fd: &OwnedFd) -> io::Result<Vec<libc::gid_t>> {
    // In asm-generic/socket.h; the libc crate has no name for it.
    const SO_PEERGROUPS: c_int = 59;
    let mut groups: Vec<libc::gid_t> = vec![0; 32];
    loop {
        let mut len = size_of_val(&groups[..]) as socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `groups`.
        let outcome = check(unsafe {
            libc::getsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        });
        match outcome {
            // It has said how many there are.
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) => {
                groups.resize(len as usize / size_of::<libc::gid_t>(), 0);
            }
            outcome => {
                outcome?;
                groups.truncate(len as usize / size_of::<libc::gid_t>());
                return Ok(groups);
            }
        }
    }
}

/// Whether something that was sent lies there unread. Who closes its end has nothing unread, but who shuts it
/// down has.
pub(crate) fn has_unread(fd: &OwnedFd) -> bool {
    let mut len: c_int = 0;
    // Also called SIOCOUTQ.
    // SAFETY: the kernel writes an integer to a live variable.
    let asked = check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut len) });
    asked.is_ok() && len > 0
}

/// Lets the other end know that nothing more comes and nothing more is read. What lies there it can read.
pub(crate) fn shut_down(fd: &OwnedFd) {
    // SAFETY: takes integers only.
    unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Sends one message with descriptors. Never waits; a message is sent whole or not at all.
pub(crate) fn send(fd: &OwnedFd, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    assert!(fds.len() <= MAX_FDS, "a message carries few descriptors");
    let mut control = [0u64; CONTROL_WORDS];
    let mut piece = libc::iovec { iov_base: bytes.as_ptr() as *mut c_void, iov_len: bytes.len() };
    // SAFETY: all zeroes is a valid msghdr.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut piece;
    header.msg_iovlen = 1;
    if !fds.is_empty() {
        let payload = size_of_val(fds) as c_uint;
        header.msg_control = control.as_mut_ptr().cast();
        // SAFETY: CMSG_SPACE and CMSG_LEN only compute.
        header.msg_controllen = unsafe { libc::CMSG_SPACE(payload) } as _;
        // SAFETY: `control` is aligned as a cmsghdr must be and long enough for MAX_FDS
        // descriptors, so the first header and its data lie within it.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(payload) as _;
            let data = libc::CMSG_DATA(first);
            std::ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), data, size_of_val(fds));
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header describes live buffers, which the kernel only reads.
    let put = || check_len(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const header, flags) });
    // As many descriptors of a user as the limit says may be under way.
    if fds.is_empty() { put() } else { with_raised_limit(put) }.map(drop)
}

/// A message as it was received.
pub(crate) struct Received {
    /// Its length; 0 is the end.
    pub(crate) len: usize,
    /// The descriptors that came with it.
    pub(crate) fds: Vec<OwnedFd>,
}

/// Receives one message. Never waits. A message or list of descriptors that is too long is an error.
pub(crate) fn receive(fd: &OwnedFd, into: &mut [u8; MAX_MESSAGE]) -> io::Result<Received> {
    let mut control = [0u64; CONTROL_WORDS];
    let mut piece = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: all zeroes is a valid msghdr.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut piece;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control) as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header describes live buffers of the lengths given.
    let mut take = || check_len(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, flags) });
    // Descriptors for which the program's limit leaves no room would be lost with the message.
    let len = with_raised_limit(&mut take)?;
    let fds = take_fds(&header)?;
    // Descriptors are also left out where this process may not open so many.
    if header.msg_flags & libc::MSG_CTRUNC != 0 && fds.len() < MAX_FDS {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    if header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        return Err(io::Error::other("the message is too long"));
    }
    Ok(Received { len, fds })
}

/// Takes ownership of every descriptor that came, so that none leaks whatever the peer sent.
fn take_fds(header: &libc::msghdr) -> io::Result<Vec<OwnedFd>> {
    let mut raw_fds = Vec::new();
    // SAFETY: the kernel filled in the control buffer and its length; the macros walk within it.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !next.is_null() {
        // SAFETY: a header that the macros return lies within the buffer.
        let control = unsafe { &*next };
        if control.cmsg_level == libc::SOL_SOCKET && control.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: CMSG_LEN only computes.
            let overhead = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (control.cmsg_len as usize - overhead) / size_of::<c_int>();
            // SAFETY: the data behind the header holds `count` descriptors; they may be unaligned.
            let data = unsafe { libc::CMSG_DATA(next) }.cast::<c_int>();
            for index in 0..count {
                // SAFETY: as above.
                raw_fds.push(unsafe { data.add(index).read_unaligned() });
            }
        }
        // SAFETY: as for the first header.
        next = unsafe { libc::CMSG_NXTHDR(header, next) };
    }
    // Adopt all before an error of one can end this, or the others would leak.
    let adopted: Vec<_> = raw_fds.into_iter().map(adopt).collect();
    adopted.into_iter().collect()
}

/// Lets the peer attach no descriptors to its messages any more (Linux 6.16; else they are dropped when
/// a message is read): to close some kinds of file takes as long as their owner likes.
pub(crate) fn take_no_descriptors(fd: &OwnedFd) {
    // In asm-generic/socket.h; the libc crate has no name for it yet.
    const SO_PASSRIGHTS: c_int = 83;
    let _ = crate::sys::set_option(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_can_be_declined() {
        let address = Name::At("127.0.0.9:65003".parse().unwrap());
        let listener = listen(address).unwrap();
        let caller = connect(address).unwrap();
        let callee = accept(&listener).unwrap();
        take_no_descriptors(&callee);
        // An older kernel carries them, and drops them in the receiver's plain recv.
        let late = send(&caller, b"x", &[listener.as_raw_fd()]);
        send(&caller, b"y", &[]).unwrap();
        // By a listener even before it accepts.
        take_no_descriptors(&listener);
        let early = connect(address).unwrap();
        let early = send(&early, b"x", &[listener.as_raw_fd()]);
        assert_eq!(early.is_err(), late.is_err());
        let mut byte = [0; 8];
        let len = crate::sys::receive(&callee, &mut byte).unwrap();
        assert!(matches!(&byte[..len], b"x" | b"y"));
    }

    #[test]
    fn messages_keep_their_bounds_and_bring_descriptors() {
        let address = Name::At("127.0.0.9:65001".parse().unwrap());
        let listener = listen(address).unwrap();
        assert!(connect(Name::At("127.0.0.9:65002".parse().unwrap())).is_err());
        let caller = connect(address).unwrap();
        let callee = accept(&listener).unwrap();
        let peer = peer_credentials(&callee).unwrap();
        assert_eq!((peer.pid as u32, peer.uid), (std::process::id(), crate::accounts::own_user()));
        // SAFETY: with a size of 0 nothing is written; then at most as many as there is room for.
        let own = unsafe {
            let count = libc::getgroups(0, std::ptr::null_mut());
            let mut own = vec![0; count as usize];
            assert_eq!(libc::getgroups(count, own.as_mut_ptr()), count);
            own
        };
        assert_eq!(peer_groups(&callee).unwrap(), own);

        send(&caller, b"one", &[listener.as_raw_fd()]).unwrap();
        send(&caller, b"two", &[]).unwrap();
        let mut buffer = [0; MAX_MESSAGE];
        let got = receive(&callee, &mut buffer).unwrap();
        assert_eq!(&buffer[..got.len], b"one");
        assert_eq!(got.fds.len(), 1);
        let got = receive(&callee, &mut buffer).unwrap();
        assert_eq!((&buffer[..got.len], got.fds.len()), (&b"two"[..], 0));
        drop(caller);
        assert_eq!(receive(&callee, &mut buffer).unwrap().len, 0);
    }
}
