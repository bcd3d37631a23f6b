//! Packet links: what carries the frames of the adapter's own TCP, UDP and IP.
//!
//! | module | link | carries | needs |
//! |---|---|---|---|
//! | `tap` | `tap:NAME` | Ethernet; the kernel cuts segments | a TAP device, or CAP_NET_ADMIN |
//! | `af_packet` | `packet:INTERFACE` | Ethernet; the kernel cuts segments | CAP_NET_RAW |
//! | `namespace` | `ns:NAME` | as `tap`, in a namespace of the user's own | user namespaces |
//! | `xdp` | `xdp:INTERFACE` | Ethernet | CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF |
//! | `udp` | `udp:ADDRESS:PORT` | bare IPv6 packets in UDP, between Quipus | nothing |
//!
//! [`tun`] is a device that carries bare IP packets for programs of their own, and no link.
//!
//! `spec` reads what a user writes, [`open`] makes a link of it; [`interface`] sets up the kernel's side.
//! They differ in what they do for the stack ([`Features`]), and are otherwise alike: frames that a link has
//! taken stay in it until the kernel takes them. A frame on its way out is lost only where a cable would lose
//! it: when its interface is down, and when the kernel refuses it for good, as malformed or too long, or for
//! longer than a queue is full. What comes faster than it is taken is lost as on a card
//! ([`PacketLink::lost`]).

mod af_packet;
mod aligned;
mod error;
mod inner;
pub mod interface;
mod mapping;
mod messages;
mod namespace;
mod netlink;
mod occupied;
mod patience;
mod place;
mod queue;
mod ring;
mod spec;
mod split;
pub(crate) mod tag;
mod tap;
pub mod tun;
mod udp;
mod vnet;
mod xdp;

use std::io;
use std::os::fd::BorrowedFd;

use quipu_inet::stack::MIN_MTU;

pub use error::LinkError;
pub(crate) use occupied::{Occupant, occupied};
pub use place::{PREFIX, PREFIX_LEN, address_of, place_of};
pub use quipu_inet::stack::{Checksum, Frame};
pub use spec::{EthernetEnd, LinkSpec, Peer, SpecError, Station};
pub use tap::{keep, remove};

/// The most payload octets of a frame that a link cuts into segments: the largest IP packet with the longest
/// TCP header behind an IPv6 header.
const MAX_SEGMENT: u32 = 65_535 - 40 - 60;

/// Octets of an Ethernet header.
pub(crate) const ETHERNET: usize = 14;

/// What a link is and does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Features {
    /// The largest IP packet, in octets.
    pub mtu: u32,
    /// The station address of our end; none: the link carries bare IP packets.
    pub hardware: Option<[u8; 6]>,
    /// Fills in the checksums of TCP and UDP.
    pub checksum: bool,
    /// The most octets of TCP payload in a frame that the link cuts into segments; 0: it cuts none.
    pub segment: u32,
    /// The address that the link gives our end, with the length of its prefix, if it does.
    pub address: Option<(std::net::IpAddr, u8)>,
    /// The network interface that the link is on; empty if it is on none.
    pub interface: String,
    /// The words before a command that is to run where the interface is; none: it runs as it is.
    pub enter: Vec<String>,
    /// The VLAN whose tag, with a priority, the link puts into each frame; 0: a priority only. None: frames
    /// have no tags.
    pub vlan: Option<u16>,
}

/// A frame that was written to a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outgoing {
    /// Its length in octets.
    pub len: usize,
    /// The checksum that the link is to compute, if any. Only where it does ([`Features::checksum`]).
    pub checksum: Option<Checksum>,
    /// The link is to cut the frame into TCP segments of so much payload. Only where it does, and together
    /// with `checksum`.
    pub segment: Option<u16>,
    /// The priority in the frame's tag, on a link with tags ([`Features::vlan`]). Above 7 it counts as 7.
    pub priority: u8,
}

/// Something that carries frames. Nothing here waits.
pub trait PacketLink: Send {
    /// What it is and does. It stays so.
    fn features(&self) -> &Features;

    /// Readable while frames wait, writable while there is room.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Hands at most `limit` waiting frames to `each`; how many there were. A train of datagrams that
    /// arrived as one is handed over whole, even beyond the limit.
    ///
    /// # Errors
    ///
    /// The link is gone for good: its interface was removed.
    fn receive(&mut self, limit: usize, each: &mut dyn FnMut(&Frame<'_>)) -> io::Result<usize>;

    /// Room for the next frame, or `None` while the link is full, which then
    /// [`wants_writable`](Self::wants_writable).
    fn slot(&mut self) -> Option<&mut [u8]>;

    /// Takes the frame that was written to the slot. The link keeps it until the kernel takes it, which may
    /// be as late as at the next [`flush`](Self::flush).
    fn send(&mut self, frame: Outgoing);

    /// Hands what was taken to the kernel; what it has no room for stays.
    ///
    /// # Errors
    ///
    /// The link is gone for good: its interface was removed.
    fn flush(&mut self) -> io::Result<()>;

    /// Whether frames wait for the kernel to have room: to be flushed when the descriptor is writable.
    fn wants_writable(&self) -> bool;

    /// Whether frames wait for room of which no descriptor tells, as in the queue of an interface: to be
    /// flushed after a while. The descriptor may be writable all the time.
    fn is_congested(&self) -> bool;

    /// Whether its interface was down when it was last asked, and may be up again or have been deleted since,
    /// of which no descriptor tells: [`receive`](Self::receive) is to be called now and then.
    fn is_down(&self) -> bool {
        false
    }

    /// Frames that have come since it was opened and that it had no room for, as far as it knows; a system
    /// call.
    fn lost(&mut self) -> u64 {
        0
    }

    /// Takes a failure that the descriptor reports, which it does not report any more then; whether there was
    /// one, that may pass.
    ///
    /// # Errors
    ///
    /// The link is gone for good: its interface was removed.
    fn take_failure(&mut self) -> io::Result<bool> {
        Ok(false)
    }
}

/// Opens a link.
///
/// # Errors
///
/// What failed, why, and what to do.
pub fn open(spec: &LinkSpec) -> Result<Box<dyn PacketLink>, LinkError> {
    let link = open_any(spec)?;
    // A stack would send what the interface does not take, without a word.
    match link.features().mtu {
        mtu if mtu < MIN_MTU => Err(LinkError::narrow(spec, mtu)),
        _ => Ok(link),
    }
}

fn open_any(spec: &LinkSpec) -> Result<Box<dyn PacketLink>, LinkError> {
    Ok(match spec {
        LinkSpec::Tap { name, end } => Box::new(tap::Tap::open(spec, name, *end)?),
        LinkSpec::Packet { interface, end } => {
            Box::new(af_packet::PacketSocket::open(spec, interface, *end)?)
        }
        LinkSpec::Namespace { name, addresses, mtu, end } => {
            Box::new(namespace::open(spec, name, addresses, *mtu, *end)?)
        }
        LinkSpec::Xdp { interface, queue, station } => {
            Box::new(xdp::XdpSocket::open(spec, interface, *queue, *station)?)
        }
        LinkSpec::Udp { bind, peers } => Box::new(udp::UdpLink::open(spec, *bind, peers)?),
        LinkSpec::Share { .. } => {
            // An engine attaches to it, and has no link of its own then.
            let source = io::ErrorKind::Unsupported.into();
            return Err(LinkError::new(spec, "opening a link of one's own", source));
        }
    })
}

/// Which kinds of links this process can open here, each with why not. Leaves nothing behind.
#[must_use]
pub fn kinds() -> Vec<(&'static str, Result<(), String>)> {
    let namespace = || open(&"ns:".parse().expect("it names a link")).map(drop);
    let said = |outcome: io::Result<()>| outcome.map_err(|error| error.to_string());
    vec![
        ("tap:", said(tap::probe())),
        ("packet:", said(af_packet::probe())),
        ("xdp:", said(xdp::probe())),
        ("ns:", namespace().map_err(|error| error.source.to_string())),
        ("udp:", Ok(())),
    ]
}

/// What to do about a frame that the kernel has not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// Ask again at once.
    Interrupted,
    /// Ask again when the descriptor is writable.
    Full,
    /// Ask again after a while: something behind the descriptor is full.
    Congested,
    /// Drop the frame: the kernel will never take it, or the interface is down.
    Frame,
    /// Nothing will be taken any more.
    Gone,
}

impl Refusal {
    fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EINTR) => Self::Interrupted,
            Some(libc::EAGAIN) => Self::Full,
            // Packet sockets say ENOBUFS when a queue of the interface is full, and of what a filter drops.
            Some(libc::ENOBUFS | libc::ENOMEM) => Self::Congested,
            Some(libc::EBADF | libc::EBADFD | libc::ENODEV | libc::ENXIO) => Self::Gone,
            _ => Self::Frame,
        }
    }
}

/// A station address of our own: the one asked for, or one drawn from the locally administered ones (IEEE
/// 802 8.4), so that the kernel does not take our frames for its own.
fn station(wanted: Option<Station>) -> io::Result<[u8; 6]> {
    if let Some(Station(wanted)) = wanted {
        return Ok(wanted);
    }
    let mut address = [0; 6];
    crate::sys::random(&mut address)?;
    // The bit for groups off, the one for local administration on.
    address[0] = (address[0] & !0x01) | 0x02;
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_stations_are_local_and_no_groups() {
        for _ in 0..64 {
            assert_eq!(station(None).unwrap()[0] & 3, 2);
        }
        assert_eq!(station(Some(Station([2, 0, 0, 0, 0, 9]))).unwrap(), [2, 0, 0, 0, 0, 9]);
    }

    #[test]
    fn what_the_kernel_says_of_a_frame() {
        let of = |code| Refusal::of(&io::Error::from_raw_os_error(code));
        assert_eq!(of(libc::EINTR), Refusal::Interrupted);
        assert_eq!(of(libc::ENOBUFS), Refusal::Congested);
        assert_eq!(of(libc::EAGAIN), Refusal::Full);
        // A TAP device that is down, and any other interface.
        assert_eq!(of(libc::EIO), Refusal::Frame);
        assert_eq!(of(libc::ENETDOWN), Refusal::Frame);
        assert_eq!(of(libc::EMSGSIZE), Refusal::Frame);
        assert_eq!(of(libc::EBADFD), Refusal::Gone);
        assert_eq!(of(libc::ENXIO), Refusal::Gone);
    }
}
