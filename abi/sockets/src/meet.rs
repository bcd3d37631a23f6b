//! Meeting the process that has the other end of a connection, and agreeing on shared memory
//! (`quipu_sockets::greeting`). All descriptors here are those of the helper.

use std::mem::{size_of, zeroed};

use libc::c_int;
use quipu_sockets::greeting::{ANSWER_LEN, Answer, OFFER_LEN, Offer, Pair};

use crate::diag::Other;
use crate::map::{Map, RING};
use crate::sys;

/// A descriptor of the helper.
pub(crate) struct Fd(pub(crate) c_int);

impl Drop for Fd {
    fn drop(&mut self) {
        sys::call!(SYS_close, self.0);
    }
}

fn socket() -> Option<Fd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let fd = sys::call!(SYS_socket, libc::AF_UNIX, kind, 0) as c_int;
    (fd >= 0).then_some(Fd(fd))
}

fn address(pair: Pair) -> (libc::sockaddr_un, usize) {
    // SAFETY: all zeroes is an address without a family.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let name = pair.name();
    for (place, octet) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *place = octet as libc::c_char;
    }
    (address, size_of::<libc::sa_family_t>() + 1 + name.len())
}

/// Listens for the other process.
pub(crate) fn listen(pair: Pair) -> Option<Fd> {
    let socket = socket()?;
    let (address, len) = address(pair);
    let is_bound = sys::call!(SYS_bind, socket.0, &raw const address, len) == 0;
    (is_bound && sys::call!(SYS_listen, socket.0, 1) == 0).then_some(socket)
}

/// The other process, if it has connected.
pub(crate) fn accept(listener: &Fd) -> Option<Fd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let fd = sys::call!(SYS_accept4, listener.0, 0, 0, flags) as c_int;
    (fd >= 0).then_some(Fd(fd))
}

/// Connects to the other process, if it listens.
pub(crate) fn connect(pair: Pair) -> Option<Fd> {
    let socket = socket()?;
    let (address, len) = address(pair);
    (sys::call!(SYS_connect, socket.0, &raw const address, len) == 0).then_some(socket)
}

/// Whether the process at the other end of a UNIX connection is of the user who made the socket at the
/// other end of the TCP connection.
fn is_of_user(peer: &Fd, other: Other) -> bool {
    let credentials: Option<libc::ucred> = sys::option(peer.0, libc::SOL_SOCKET, libc::SO_PEERCRED);
    credentials.is_some_and(|credentials| credentials.uid == other.user || credentials.uid == 0)
}

/// What the listener does with a process that has connected: makes memory and offers it.
pub(crate) fn offer(peer: &Fd, pair: Pair, other: Other) -> Option<Map> {
    if !is_of_user(peer, other) {
        return None;
    }
    let file = make_file(Map::len(RING))?;
    let map = Map::new(file.0, RING, true)?;
    send(peer, &Offer { pair, ring: RING }.encode(), Some(&file))?;
    Some(map)
}

/// What came from the other process.
pub(crate) enum Message<T> {
    /// Nothing yet.
    None,
    /// What was expected.
    Expected(T),
    /// Something else, or the end of the connection.
    Wrong,
}

/// The answer to an offer.
pub(crate) fn answer(peer: &Fd) -> Message<()> {
    let mut answer = [0; ANSWER_LEN];
    match receive(peer, &mut answer) {
        None if sys::errno() == libc::EAGAIN => Message::None,
        Some((len, _)) if Answer::decode(&answer[..len]).is_some() => Message::Expected(()),
        _ => Message::Wrong,
    }
}

/// What the connecting process does: takes the memory that it is offered.
pub(crate) fn take_offer(peer: &Fd, pair: Pair, other: Other) -> Message<Map> {
    let mut octets = [0; OFFER_LEN];
    let received = receive(peer, &mut octets);
    match received {
        None if sys::errno() == libc::EAGAIN => Message::None,
        Some((len, Some(file))) if is_of_user(peer, other) => {
            accept_offer(peer, &octets[..len], &file, pair)
                .map_or(Message::Wrong, Message::Expected)
        }
        _ => Message::Wrong,
    }
}

fn accept_offer(peer: &Fd, octets: &[u8], file: &Fd, pair: Pair) -> Option<Map> {
    let offer = Offer::decode(octets, pair)?;
    if !is_sealed(file) || size(file)? != Map::len(offer.ring) {
        return None;
    }
    let map = Map::new(file.0, offer.ring, false)?;
    send(peer, &Answer::encode(), None)?;
    Some(map)
}

const SEALS: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

fn make_file(len: usize) -> Option<Fd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let fd = sys::call!(SYS_memfd_create, c"quipu-sockets".as_ptr(), flags) as c_int;
    let file = (fd >= 0).then_some(Fd(fd))?;
    let is_ready = sys::call!(SYS_ftruncate, file.0, len) == 0
        && sys::call!(SYS_fcntl, file.0, libc::F_ADD_SEALS, SEALS) == 0;
    is_ready.then_some(file)
}

/// Whether nobody can make the file shorter under a process that has it mapped.
fn is_sealed(file: &Fd) -> bool {
    let seals = sys::call!(SYS_fcntl, file.0, libc::F_GET_SEALS) as c_int;
    seals >= 0 && seals & SEALS == SEALS
}

fn size(file: &Fd) -> Option<usize> {
    usize::try_from(sys::call!(SYS_lseek, file.0, 0, libc::SEEK_END)).ok()
}

/// Room for one descriptor that goes with a message.
#[repr(C, align(8))]
struct Control([u8; 24]);

fn message(vector: &mut libc::iovec, control: Option<&mut Control>) -> libc::msghdr {
    // SAFETY: all zeroes is an empty message.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = vector;
    message.msg_iovlen = 1;
    if let Some(control) = control {
        message.msg_control = (&raw mut control.0).cast();
        message.msg_controllen = control.0.len() as _;
    }
    message
}

fn send(peer: &Fd, octets: &[u8], file: Option<&Fd>) -> Option<()> {
    let base = octets.as_ptr().cast_mut().cast();
    let mut vector = libc::iovec { iov_base: base, iov_len: octets.len() };
    let mut control = Control([0; 24]);
    if let Some(file) = file {
        // `struct cmsghdr`: length, level, type; then the descriptor.
        control.0[..8].copy_from_slice(&20_u64.to_ne_bytes());
        control.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        control.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
        control.0[16..20].copy_from_slice(&file.0.to_ne_bytes());
    }
    let message = message(&mut vector, file.map(|_| &mut control));
    let sent = sys::call!(SYS_sendmsg, peer.0, &raw const message, libc::MSG_NOSIGNAL);
    (sent == octets.len() as libc::c_long).then_some(())
}

fn receive(peer: &Fd, octets: &mut [u8]) -> Option<(usize, Option<Fd>)> {
    let base = octets.as_mut_ptr().cast();
    let mut vector = libc::iovec { iov_base: base, iov_len: octets.len() };
    let mut control = Control([0; 24]);
    let mut message = message(&mut vector, Some(&mut control));
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    let received = sys::call!(SYS_recvmsg, peer.0, &raw mut message, flags);
    let len = usize::try_from(received).ok()?;
    let number =
        |at: usize| c_int::from_ne_bytes(control.0[at..at + 4].try_into().unwrap_or_default());
    let has_files = message.msg_controllen >= 20
        && (number(8), number(12)) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
    let file = |is_there: bool, at| (has_files && is_there).then(|| Fd(number(at)));
    // There is room for a second one, which nobody honest sends: it is closed here.
    match (file(number(0) >= 20, 16), file(number(0) >= 24, 20)) {
        (file, None) => Some((len, file)),
        _ => Some((len, None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Fd, Fd) {
        let mut ends = [0; 2];
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        let made = sys::call!(SYS_socketpair, libc::AF_UNIX, kind, 0, ends.as_mut_ptr());
        assert_eq!(made, 0);
        (Fd(ends[0]), Fd(ends[1]))
    }

    /// Sends so many copies of a descriptor in one message.
    fn send_copies(peer: &Fd, file: &Fd, count: usize) {
        let mut octets = *b"!";
        let mut vector = libc::iovec { iov_base: octets.as_mut_ptr().cast(), iov_len: 1 };
        let mut control = Control([0; 24]);
        let len = 16 + 4 * count;
        control.0[..8].copy_from_slice(&len.to_ne_bytes());
        control.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        control.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
        control.0[16..len].copy_from_slice(&file.0.to_ne_bytes().repeat(count));
        let mut message = message(&mut vector, Some(&mut control));
        message.msg_controllen = len as _;
        assert_eq!(sys::call!(SYS_sendmsg, peer.0, &raw const message, 0), 1);
    }

    #[test]
    fn a_peer_that_sends_more_descriptors_than_one_leaves_none_open() {
        for (count, expected) in [(1, true), (2, false)] {
            let (own, other) = pair();
            let (reader, writer) = pair();
            send_copies(&other, &writer, count);
            drop(writer);
            let (len, file) = receive(&own, &mut [0; 8]).unwrap();
            assert_eq!((len, file.is_some()), (1, expected), "{count}");
            drop(file);
            // All copies are closed: the stream has ended.
            let flags = libc::MSG_DONTWAIT;
            let mut octet = [0_u8];
            let read = sys::call!(SYS_recvfrom, reader.0, octet.as_mut_ptr(), 1, flags, 0, 0);
            assert_eq!(read, 0, "{count}");
        }
    }
}
