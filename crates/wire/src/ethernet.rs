//! The headers of an Ethernet frame (IEEE 802.3, 802.1Q; RFC 791, 8200, 768, 9293, 7348), as flow rules see
//! them: each layer that a frame has, as bytes in the order in which `ibv_create_flow(3)` lists its fields.
//!
//! QPIP reads and writes plain frames: [`Repr`].
//!
//! A frame is whatever a stranger sends. A layer that is cut short or makes no sense is not there, and
//! nothing behind it is.

use crate::WireError;
use crate::field::{array, need, put, u16_at};

/// Bytes of an Ethernet header without tags: the shortest frame.
pub const HEADER: usize = 14;

/// Types of what frames carry (IEEE 802 numbers).
pub mod kind {
    /// IPv4.
    pub const IPV4: u16 = 0x0800;
    /// ARP.
    pub const ARP: u16 = 0x0806;
    /// IPv6.
    pub const IPV6: u16 = 0x86dd;
}

/// The station address of all stations.
pub const BROADCAST: [u8; 6] = [0xff; 6];

const CUSTOMER_TAG: u16 = 0x8100;
const TAGS: [u16; 2] = [CUSTOMER_TAG, 0x88a8];
/// Octets of a tag.
const TAG: usize = 4;
/// The number of a VLAN in a tag; the rest is a priority.
const VLAN: u16 = 0x0fff;
const TCP: u8 = 6;
const UDP: u8 = 17;
const VXLAN_PORT: u16 = 4789;
/// The VXLAN flag that says that there is an identifier (RFC 7348 5).
const VXLAN_IDENTIFIED: u8 = 1 << 3;
/// Of the fragment word of IPv4.
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// Bytes of the fields of each layer.
pub const ETH_FIELDS: usize = 16;
/// See [`ETH_FIELDS`].
pub const IPV4_FIELDS: usize = 12;
/// See [`ETH_FIELDS`].
pub const IPV6_FIELDS: usize = 39;
/// See [`ETH_FIELDS`].
pub const PORT_FIELDS: usize = 4;
/// See [`ETH_FIELDS`].
pub const TUNNEL_FIELDS: usize = 4;

/// The header of a frame without tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// The station that it goes to.
    pub destination: [u8; 6],
    /// The station that sends it.
    pub source: [u8; 6],
    /// What it carries: [`kind`] has what this stack reads.
    pub kind: u16,
}

impl Repr {
    /// Reads the header at the front of a frame, and says how long it is. A tag that has a priority only is
    /// passed over: its frame is in no VLAN (IEEE 802.1Q 6.9).
    ///
    /// # Errors
    /// Too short.
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<(Self, usize), WireError> {
        need(frame, HEADER)?;
        let (destination, source) = (array(frame, 0), array(frame, 6));
        let (mut kind, mut len) = (u16_at(frame, 12), HEADER);
        if kind == CUSTOMER_TAG && frame.len() >= HEADER + TAG && u16_at(frame, len) & VLAN == 0 {
            (kind, len) = (u16_at(frame, len + 2), len + TAG);
        }
        Ok((Self { destination, source, kind }, len))
    }

    /// Writes the header to the front of `out`, and says how long it is.
    ///
    /// # Panics
    /// If `out` is shorter than [`HEADER`].
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        put(out, 0, self.destination);
        put(out, 6, self.source);
        put(out, 12, self.kind.to_be_bytes());
        HEADER
    }
}

/// The addresses of a frame's IP header, and what stands beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpFields {
    /// Source and destination address, protocol, type of service, time to live; and flags: 2 for "don't
    /// fragment", 4 for "more fragments" (as the kernel's verbs have them).
    V4([u8; IPV4_FIELDS]),
    /// Source and destination address, flow label (32 bits), next header, traffic class, hop limit.
    V6([u8; IPV6_FIELDS]),
}

/// The ports of a frame: destination, source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortFields {
    /// Of a TCP segment.
    Tcp([u8; PORT_FIELDS]),
    /// Of a UDP datagram.
    Udp([u8; PORT_FIELDS]),
}

/// The layers of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layers<'a> {
    /// Destination and source address, the type behind the last tag, and the last tag (0: none).
    pub eth: [u8; ETH_FIELDS],
    /// Whether it has a tag.
    pub tagged: bool,
    /// Its IP header. Behind IPv6 extension headers nothing is looked for.
    pub ip: Option<IpFields>,
    /// Its ports; a fragment but the first has none.
    pub ports: Option<PortFields>,
    /// The VXLAN network identifier (24 bits).
    pub tunnel: Option<[u8; TUNNEL_FIELDS]>,
    /// The frame behind the VXLAN header.
    pub inner: Option<&'a [u8]>,
}

/// Splits off the first `N` bytes.
fn split<const N: usize>(bytes: &[u8]) -> Option<(&[u8; N], &[u8])> {
    bytes.split_first_chunk()
}

impl<'a> Layers<'a> {
    /// Reads the headers of a frame; `None` if it has not even an Ethernet header.
    #[must_use]
    pub fn parse(frame: &'a [u8]) -> Option<Self> {
        let (addresses, rest) = split::<12>(frame)?;
        let (mut kind, mut rest) = split::<2>(rest)?;
        let mut tag = None;
        // A service tag and a customer tag at most (IEEE 802.1Q 9.5).
        for _ in 0..2 {
            if TAGS.contains(&u16::from_be_bytes(*kind)) {
                let (control, behind) = split::<2>(rest)?;
                tag = Some(*control);
                (kind, rest) = split::<2>(behind)?;
            }
        }
        let mut eth = [0; ETH_FIELDS];
        eth[..12].copy_from_slice(addresses);
        eth[12..14].copy_from_slice(kind);
        eth[14..].copy_from_slice(&tag.unwrap_or_default());
        let tagged = tag.is_some();
        let mut layers = Self { eth, tagged, ip: None, ports: None, tunnel: None, inner: None };
        let upper = match u16::from_be_bytes(*kind) {
            kind::IPV4 => ipv4(rest),
            kind::IPV6 => ipv6(rest),
            _ => None,
        };
        if let Some((ip, upper)) = upper {
            layers.ip = Some(ip);
            if let Some((protocol, rest)) = upper {
                layers.read_ports(protocol, rest);
            }
        }
        Some(layers)
    }

    fn read_ports(&mut self, protocol: u8, rest: &'a [u8]) {
        let Some((&[a, b, c, d], _)) = split::<4>(rest) else { return };
        let ports = [c, d, a, b];
        match protocol {
            TCP => self.ports = Some(PortFields::Tcp(ports)),
            UDP => {
                self.ports = Some(PortFields::Udp(ports));
                if u16::from_be_bytes([c, d]) == VXLAN_PORT {
                    self.read_tunnel(rest);
                }
            }
            _ => {}
        }
    }

    fn read_tunnel(&mut self, rest: &'a [u8]) {
        let Some((_udp, rest)) = split::<8>(rest) else { return };
        let Some((&[flags, _, _, _, a, b, c, _], inner)) = split::<8>(rest) else { return };
        if flags & VXLAN_IDENTIFIED != 0 {
            self.tunnel = Some([0, a, b, c]);
            self.inner = Some(inner);
        }
    }

    /// Whether it goes to a group of stations (IEEE 802: the lowest bit of the first octet).
    #[must_use]
    pub fn to_group(&self) -> bool {
        self.eth[0] & 1 != 0
    }

    /// The station that it goes to.
    #[must_use]
    pub fn destination(&self) -> [u8; 6] {
        array(&self.eth, 0)
    }
}

/// The protocol above IP, and what it carries.
type Upper<'a> = Option<(u8, &'a [u8])>;

fn ipv4(bytes: &[u8]) -> Option<(IpFields, Upper<'_>)> {
    let (header, _) = split::<20>(bytes)?;
    let length = usize::from(header[0] & 0x0f) * 4;
    if header[0] >> 4 != 4 || length < header.len() {
        return None;
    }
    let fragment = u16::from_be_bytes([header[6], header[7]]);
    let mut fields = [0; IPV4_FIELDS];
    fields[..8].copy_from_slice(&header[12..20]);
    fields[8] = header[9];
    fields[9] = header[1];
    fields[10] = header[8];
    // The header has the two flags the other way round: DF 0x4000, MF 0x2000.
    fields[11] = u8::from(fragment & 0x4000 != 0) << 1 | u8::from(fragment & 0x2000 != 0) << 2;
    let first = fragment & FRAGMENT_OFFSET == 0;
    let upper = bytes.get(length..).filter(|_| first).map(|rest| (header[9], rest));
    Some((IpFields::V4(fields), upper))
}

fn ipv6(bytes: &[u8]) -> Option<(IpFields, Upper<'_>)> {
    let (header, rest) = split::<40>(bytes)?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let mut fields = [0; IPV6_FIELDS];
    fields[..32].copy_from_slice(&header[8..40]);
    fields[32..36].copy_from_slice(&[0, header[1] & 0x0f, header[2], header[3]]);
    fields[36] = header[6];
    fields[37] = header[0] << 4 | header[1] >> 4;
    fields[38] = header[7];
    Some((IpFields::V6(fields), Some((header[6], rest))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESSES: [u8; 12] = [1, 0, 0x5e, 0, 0, 9, 2, 0, 0, 0, 0, 7];

    fn v4(protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = [&ADDRESSES[..], &[0x08, 0x00, 0x45, 0x10, 0, 0, 0, 0]].concat();
        bytes.extend(fragment.to_be_bytes());
        bytes.extend([64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        bytes.extend(payload);
        bytes
    }

    #[test]
    fn fields_of_ipv4_and_udp() {
        let frame = v4(UDP, 0x4000, &[0x04, 0xd2, 0x16, 0x2e, 0, 8, 0, 0]);
        let layers = Layers::parse(&frame).unwrap();
        assert!(layers.to_group() && !layers.tagged);
        assert_eq!(layers.destination(), ADDRESSES[..6]);
        assert_eq!(layers.eth[12..], [0x08, 0x00, 0, 0]);
        assert_eq!(layers.ip, Some(IpFields::V4([10, 0, 0, 1, 10, 0, 0, 2, UDP, 0x10, 64, 2])));
        assert_eq!(layers.ports, Some(PortFields::Udp([0x16, 0x2e, 0x04, 0xd2])));
        assert_eq!((layers.tunnel, layers.inner), (None, None));
    }

    #[test]
    fn a_header_there_and_back() {
        let frame = v4(UDP, 0, &[]);
        let (repr, len) = Repr::parse(&frame).unwrap();
        assert_eq!((repr.destination, repr.source), (array(&frame, 0), array(&frame, 6)));
        assert_eq!((repr.kind, len), (kind::IPV4, HEADER));
        let mut out = [0xff; HEADER];
        assert_eq!(repr.emit(&mut out), HEADER);
        assert_eq!(out, frame[..HEADER]);
        let short = WireError::Truncated { need: HEADER, have: 13 };
        assert_eq!(Repr::parse(&frame[..13]), Err(short));
    }

    #[test]
    fn a_tag_without_a_vlan_is_passed_over() {
        let tagged = |tag: [u8; 4]| [&ADDRESSES[..], &tag, &[0x08, 0x06]].concat();
        let read = |frame: &[u8]| Repr::parse(frame).map(|(repr, len)| (repr.kind, len)).unwrap();
        assert_eq!(read(&tagged([0x81, 0, 0xa0, 0])), (kind::ARP, HEADER + 4));
        assert_eq!(read(&tagged([0x81, 0, 0xa0, 0])[..17]), (0x8100, HEADER), "cut short");
        assert_eq!(read(&tagged([0x81, 0, 0xa0, 1])), (0x8100, HEADER));
        assert_eq!(read(&tagged([0x88, 0xa8, 0, 0])), (0x88a8, HEADER));
    }

    #[test]
    fn only_the_first_fragment_has_ports() {
        let ports = [0, 1, 0, 2];
        let of = |fragment| Layers::parse(&v4(TCP, fragment, &ports)).unwrap().ports;
        assert_eq!(of(0x2000), Some(PortFields::Tcp([0, 2, 0, 1])));
        assert_eq!(of(0x2001), None);
    }

    #[test]
    fn options_are_passed_over_and_a_wrong_length_ends_the_reading() {
        let mut frame = v4(TCP, 0, &[9, 9, 9, 9, 0, 1, 0, 2]);
        frame[HEADER] = 0x46;
        let ports = Some(PortFields::Tcp([0, 2, 0, 1]));
        assert_eq!(Layers::parse(&frame).unwrap().ports, ports);
        for wrong in [0x44, 0x55, 0x4f] {
            frame[HEADER] = wrong;
            assert_eq!(Layers::parse(&frame).unwrap().ports, None, "{wrong:x}");
        }
    }

    #[test]
    fn tags_and_ipv6() {
        let tags = [0x88, 0xa8, 0, 1, 0x81, 0x00, 0xac, 0x0c];
        let mut frame = [&ADDRESSES[..], &tags, &[0x86, 0xdd]].concat();
        frame.extend([0x6a, 0xb1, 0x23, 0x45, 0, 4, TCP, 33]);
        frame.extend([[0xa; 16], [0xb; 16]].concat());
        frame.extend([0x04, 0xd2, 0x16, 0x2e]);
        let layers = Layers::parse(&frame).unwrap();
        assert!(layers.tagged);
        assert_eq!(layers.eth[12..], [0x86, 0xdd, 0xac, 0x0c]);
        let Some(IpFields::V6(fields)) = layers.ip else { panic!("{layers:?}") };
        assert_eq!((&fields[..16], &fields[16..32]), (&[0xa; 16][..], &[0xb; 16][..]));
        assert_eq!(fields[32..], [0, 1, 0x23, 0x45, TCP, 0xab, 33]);
        assert_eq!(layers.ports, Some(PortFields::Tcp([0x16, 0x2e, 0x04, 0xd2])));
    }

    #[test]
    fn a_tunnel_has_a_frame_inside() {
        let vxlan = [0, 1, 0x12, 0xb5, 0, 0, 0, 0, 8, 0, 0, 0, 0x12, 0x34, 0x56, 0];
        let inner = v4(TCP, 0, &[0, 1, 0, 2]);
        let frame = v4(UDP, 0, &[&vxlan[..], &inner].concat());
        let layers = Layers::parse(&frame).unwrap();
        assert_eq!(layers.tunnel, Some([0, 0x12, 0x34, 0x56]));
        assert_eq!(layers.inner, Some(&inner[..]));
        let mut unmarked = frame.clone();
        unmarked[HEADER + 20 + 8] = 0;
        assert_eq!(Layers::parse(&unmarked).unwrap().tunnel, None);
    }

    #[test]
    fn a_frame_that_is_cut_anywhere_has_the_layers_before_the_cut() {
        let frame = v4(UDP, 0, &[0, 1, 0, 2, 0, 8, 0, 0]);
        for len in 0..frame.len() {
            let layers = Layers::parse(&frame[..len]);
            assert_eq!(layers.is_some(), len >= HEADER);
            assert_eq!(layers.is_some_and(|l| l.ip.is_some()), len >= HEADER + 20);
            assert_eq!(layers.is_some_and(|l| l.ports.is_some()), len >= HEADER + 24);
        }
        // No end of tags: the third one is taken for the type.
        let tags = [&ADDRESSES[..], &[0x81, 0, 0, 1, 0x81, 0, 0, 2, 0x81, 0, 0, 3]].concat();
        assert_eq!(Layers::parse(&tags).unwrap().eth[12..], [0x81, 0, 0, 2]);
    }
}
