//! Control messages of datagrams (`cmsg(3)`): traffic class, hop limit, source address, length of a train.

use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};

use libc::c_int;
use quipu_nic::{Arrival, Departure};

use super::is_first;

/// Room for the control messages of one datagram, which need less than a hundred bytes.
pub(super) const CONTROL: usize = 128;

/// Bytes of control messages, aligned as their headers must be.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Control([u8; CONTROL]);

/// Reads the control messages of a message; how long its datagrams are, if it is a train.
pub(super) fn read_control(header: &libc::msghdr, arrival: &mut Arrival) -> Option<usize> {
    let mut size = None;
    // SAFETY: the header is one that the kernel has filled in, its control buffer is alive.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    // SAFETY: the macros give pointers to whole headers inside of the buffer, or null.
    while let Some(message) = unsafe { next.as_ref() } {
        let data = {
            // SAFETY: as above.
            let start = unsafe { libc::CMSG_DATA(next) };
            let header_len = start as usize - next as usize;
            let len = message.cmsg_len.saturating_sub(header_len);
            // SAFETY: the kernel says that so many bytes of data follow the header, in the buffer.
            unsafe { std::slice::from_raw_parts(start, len) }
        };
        let int = || data.first_chunk().map(|bytes| c_int::from_ne_bytes(*bytes));
        match (message.cmsg_level, message.cmsg_type) {
            // One byte (ip(7)).
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                arrival.traffic_class = data.first().copied().unwrap_or(0);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                arrival.traffic_class = int().unwrap_or(0) as u8;
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                arrival.hop_limit = int().unwrap_or(0) as u8;
            }
            // struct in_pktinfo ends with the address in the header; struct in6_pktinfo begins with it.
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                if let Some(Some(octets)) = data.get(8..).map(|rest| rest.first_chunk::<4>()) {
                    arrival.to = IpAddr::from(*octets);
                }
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                if let Some(octets) = data.first_chunk::<16>() {
                    // Of IPv4, if it came through a socket of both families.
                    arrival.to = IpAddr::from(*octets).to_canonical();
                }
            }
            (libc::SOL_UDP, libc::UDP_GRO) => {
                size = int().and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0);
            }
            _ => {}
        }
        // SAFETY: as for the first.
        next = unsafe { libc::CMSG_NXTHDR(header, message) };
    }
    size
}

/// Whether a datagram needs control messages.
#[inline]
pub(super) fn has_control(departure: &Departure) -> bool {
    departure.traffic_class != 0 || !is_first(departure) || has_hops(departure)
}

/// The route knows better how far a single address is.
#[inline]
fn has_hops(departure: &Departure) -> bool {
    departure.hop_limit != 0 && departure.to.ip().is_multicast()
}

/// Writes the control messages for a datagram, or for a `train` that begins with it; how many bytes they
/// take. `source`: the address to send it from, its interface, and whether the socket is of both families.
pub(super) fn write_control(
    departure: &Departure,
    train: bool,
    source: Option<(IpAddr, u32, bool)>,
    control: &mut Control,
) -> usize {
    let (level, class, hops) = match departure.to {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
    };
    let int = |value: u8| c_int::from(value).to_ne_bytes();
    let mut used = 0;
    if departure.traffic_class != 0 {
        used += put(&mut control.0[used..], level, class, int(departure.traffic_class));
    }
    if has_hops(departure) {
        used += put(&mut control.0[used..], level, hops, int(departure.hop_limit));
    }
    if let Some((ip, interface, dual)) = source {
        used += put_source(&mut control.0[used..], departure.to.ip(), ip, interface, dual);
    }
    if train {
        let size = (departure.len as u16).to_ne_bytes();
        used += put(&mut control.0[used..], libc::SOL_UDP, libc::UDP_SEGMENT, size);
    }
    used
}

/// Writes the control message that chooses the source of a datagram.
fn put_source(out: &mut [u8], to: IpAddr, ip: IpAddr, interface: u32, dual: bool) -> usize {
    // For all but groups and what is on one link alone the route knows the interface.
    let local = |link: bool| if link || to.is_multicast() { interface } else { 0 }.to_ne_bytes();
    match ip {
        IpAddr::V4(v4) if !dual => {
            // struct in_pktinfo: interface, source address, and one that counts for what is received.
            let mut info = [0; 12];
            info[..4].copy_from_slice(&local(false));
            info[4..8].copy_from_slice(&v4.octets());
            put(out, libc::IPPROTO_IP, libc::IP_PKTINFO, info)
        }
        _ => {
            let v6 = match ip {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            // struct in6_pktinfo: source address, interface.
            let mut info = [0; 20];
            info[..16].copy_from_slice(&v6.octets());
            info[16..].copy_from_slice(&local(v6.is_unicast_link_local()));
            put(out, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info)
        }
    }
}

/// Writes a control message to the front of `out`, which is aligned for its header; the space it takes, which
/// keeps what follows aligned.
fn put<const N: usize>(out: &mut [u8], level: c_int, kind: c_int, data: [u8; N]) -> usize {
    let header_len = size_of::<libc::cmsghdr>();
    // SAFETY: computes from an integer.
    let space = unsafe { libc::CMSG_SPACE(N as u32) } as usize;
    let mut header = MaybeUninit::<libc::cmsghdr>::zeroed();
    // SAFETY: plain data, for which all zeroes is a valid value.
    let header = unsafe { header.assume_init_mut() };
    header.cmsg_level = level;
    header.cmsg_type = kind;
    // SAFETY: computes from an integer.
    header.cmsg_len = unsafe { libc::CMSG_LEN(N as u32) } as _;
    // It panics rather than write beyond the end; on 64-bit Linux the data stand directly after the header.
    let room = &mut out[..space];
    // SAFETY: there is room for the space of a message with such data, of which the header is a part.
    unsafe { room.as_mut_ptr().cast::<libc::cmsghdr>().write_unaligned(*header) };
    room[header_len..header_len + N].copy_from_slice(&data);
    space
}

#[cfg(test)]
mod tests {
    use super::super::tests::departure;
    use super::*;

    #[test]
    fn a_control_message_is_read_as_it_was_written() {
        let to: SocketAddr = "[::1]:1".parse().unwrap();
        let mut departure = Departure { traffic_class: 0xa8, ..departure(to, 0) };
        let mut control = Control([0; CONTROL]);
        let len = write_control(&departure, false, None, &mut control);
        // SAFETY: plain data, for which all zeroes is a valid value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = len as _;
        let mut arrival = Arrival { from: to, to: to.ip(), traffic_class: 0, hop_limit: 0 };
        read_control(&header, &mut arrival);
        assert_eq!(arrival.traffic_class, 0xa8);
        departure.traffic_class = 0;
        departure.hop_limit = 9;
        assert_eq!(
            write_control(&departure, false, None, &mut control),
            0,
            "the route's own for one address"
        );
        departure.traffic_class = 4;
        departure.to = "[ff02::1]:1".parse().unwrap();
        header.msg_controllen = write_control(&departure, false, None, &mut control) as _;
        read_control(&header, &mut arrival);
        assert_eq!((arrival.traffic_class, arrival.hop_limit), (4, 9));
    }
}
