//! A train of UDP datagrams in one frame, as kernels send them between devices of their own (UDP_SEGMENT,
//! udp(7)), or join them where they come in (GRO): their boundaries are part of the message, so they are
//! taken apart here.

use quipu_wire::checksum::sum;
use quipu_wire::{ethernet, ipv4};

use super::Frame;
use super::vnet::Header;

/// Octets of the header of IPv6, without extensions.
const IPV6: usize = quipu_wire::ipv6::LEN;
/// The protocol number (IANA).
const UDP: u8 = 17;
/// The longest headers of a train.
const MAX_HEADERS: usize = 256;
/// The most datagrams in one: what Linux puts into one itself.
const MAX_DATAGRAMS: usize = 128;

/// Hands a frame to `each`, or each datagram of a train; how many there were. A train that contradicts itself
/// is dropped: there were none. The frame's bytes are used up.
pub(super) fn hand_over(
    header: Header,
    frame: &mut [u8],
    each: &mut dyn FnMut(&Frame<'_>),
) -> usize {
    let checked = header.checked;
    let Some(size) = header.datagrams.map(usize::from) else {
        each(&Frame { bytes: frame, checked });
        return 1;
    };
    let Some((ip, udp)) = places(frame, header.start) else { return 0 };
    let headers = udp + quipu_wire::udp::LEN;
    let payload = frame.len() - headers;
    if size == 0 || payload.div_ceil(size) > MAX_DATAGRAMS {
        return 0;
    }
    let mut template = [0; MAX_HEADERS];
    let template = &mut template[..headers];
    template.copy_from_slice(&frame[..headers]);
    for start in (headers..frame.len()).step_by(size) {
        let len = size.min(frame.len() - start);
        // Over the end of the datagram before it, which nobody needs any more.
        let datagram = &mut frame[start - headers..start + len];
        datagram[..headers].copy_from_slice(template);
        adjust(datagram, ip, udp);
        each(&Frame { bytes: datagram, checked });
        next_identification(&mut template[ip..]);
    }
    payload.div_ceil(size)
}

/// Where the headers of IP and of UDP begin in a frame that has both, and payload; UDP where `said`, or else
/// right behind IP.
fn places(frame: &[u8], said: Option<usize>) -> Option<(usize, usize)> {
    let (_, ip) = ethernet::Repr::parse(frame).ok()?;
    let (protocol, len) = match *frame.get(ip..)? {
        [first, _, _, _, _, _, next, ..] if first >> 4 == 6 => (next, IPV6),
        [first, _, _, _, _, _, _, _, _, protocol, ..] => (protocol, usize::from(first & 15) * 4),
        _ => return None,
    };
    let udp = said.or_else(|| (protocol == UDP).then_some(ip + len))?;
    let headers = udp + quipu_wire::udp::LEN;
    let possible = len >= ipv4::LEN && udp >= ip + len;
    (possible && headers <= MAX_HEADERS && headers < frame.len()).then_some((ip, udp))
}

/// Corrects the lengths in the headers of IP and UDP, which begin there, of a frame with one datagram.
fn adjust(frame: &mut [u8], ip: usize, udp: usize) {
    let len = |from: usize| ((frame.len() - from) as u16).to_be_bytes();
    let ip6 = frame[ip] >> 4 == 6;
    let (at, ip_len) = if ip6 { (4, len(ip + IPV6)) } else { (2, len(ip)) };
    let udp_len = len(udp);
    frame[udp + 4..udp + 6].copy_from_slice(&udp_len);
    let ip = &mut frame[ip..udp];
    ip[at..at + 2].copy_from_slice(&ip_len);
    if ip6 {
        return;
    }
    ip[10..12].fill(0);
    let checksum = sum(ip).checksum();
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
}

/// Datagrams over IPv4 are numbered.
fn next_identification(ip: &mut [u8]) {
    if ip[0] >> 4 == 4 {
        let next = u16::from_be_bytes([ip[4], ip[5]]).wrapping_add(1);
        ip[4..6].copy_from_slice(&next.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::super::ETHERNET;
    use super::*;

    /// A train of datagrams with `payload` octets in all.
    fn train(version: u8, payload: usize) -> (Vec<u8>, usize) {
        let udp = ETHERNET + if version == 4 { 20 } else { 40 };
        let mut frame = vec![0; udp + 8];
        frame[ETHERNET] = version << 4 | 5;
        frame[ETHERNET + if version == 4 { 9 } else { 6 }] = UDP;
        frame[ETHERNET + 4..ETHERNET + 6].fill(0xff);
        frame.extend((0..payload).map(|i| (i % 251) as u8));
        (frame, udp)
    }

    fn parts(header: Header, frame: &[u8]) -> Vec<Vec<u8>> {
        let mut parts = Vec::new();
        let mut frame = frame.to_vec();
        let count = hand_over(header, &mut frame, &mut |part| {
            assert_eq!(part.checked, header.checked);
            parts.push(part.bytes.to_vec());
        });
        assert_eq!(count, parts.len());
        parts
    }

    #[test]
    fn a_train_comes_apart() {
        for version in [4, 6] {
            // Datagrams longer and shorter than their headers.
            for size in [5_u16, 300] {
                let (frame, udp) = train(version, 620);
                let header = Header { checked: true, datagrams: Some(size), start: Some(udp) };
                let parts = parts(header, &frame);
                // Those that were joined on their way in, whose sums were verified.
                let joined = Header { start: None, ..header };
                assert_eq!(self::parts(joined, &frame), parts);
                assert_eq!(parts.len(), 620_usize.div_ceil(size.into()));
                let payload: Vec<u8> =
                    parts.iter().flat_map(|part| part[udp + 8..].to_vec()).collect();
                assert_eq!(payload, frame[udp + 8..]);
                for (i, part) in parts.iter().enumerate() {
                    let word =
                        |at: usize| usize::from(u16::from_be_bytes([part[at], part[at + 1]]));
                    assert_eq!(word(udp + 4), part.len() - udp);
                    if version == 6 {
                        assert_eq!(word(ETHERNET + 4), part.len() - udp);
                        continue;
                    }
                    assert_eq!(word(ETHERNET + 2), part.len() - ETHERNET);
                    assert_eq!(word(ETHERNET + 4), (0xffff + i) & 0xffff, "identification");
                    assert!(sum(&part[ETHERNET..udp]).is_valid());
                }
            }
        }
    }

    #[test]
    fn nonsense_is_dropped_and_anything_else_left_alone() {
        let (frame, udp) = train(4, 200);
        let header = Header { checked: false, datagrams: None, start: None };
        assert_eq!(parts(header, &frame), std::slice::from_ref(&frame));
        let of = |frame: &[u8], size, start| {
            parts(Header { datagrams: Some(size), start, ..header }, frame)
        };
        let train = |size, start| of(&frame, size, Some(start));
        assert_eq!(train(200, udp).len(), 1);
        assert!(train(0, udp).is_empty());
        assert!(train(1, udp).is_empty(), "more than any kernel sends");
        assert!(train(100, 10).is_empty(), "inside the Ethernet header");
        assert!(train(100, frame.len()).is_empty());
        assert!(train(100, usize::from(u16::MAX)).is_empty());
        for (at, wrong) in [(ETHERNET, 0x44), (ETHERNET + 9, 6)] {
            let mut frame = frame.clone();
            frame[at] = wrong;
            assert!(of(&frame, 100, None).is_empty(), "no UDP behind the header of IP");
        }
        for len in 0..=udp + 8 {
            assert!(of(&frame[..len], 100, None).is_empty(), "{len}");
        }
    }
}
