//! IP over InfiniBand (RFC 4391): the encapsulation header, the link-layer address, multicast GIDs, ARP and
//! neighbour discovery with that address. Of connected mode (RFC 4755): the flag in the address, and the
//! private data.
//!
//! A message is [`Encapsulation`] (4 bytes) and an IP packet or an ARP message. A link-layer address has 20
//! bytes: flags, a queue pair number and a GID.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::WireError;
use crate::arp::Operation;
use crate::checksum::{Sum, sum};
use crate::field::{array, need, put, u16_at, u32_at};
use crate::{icmpv6, ipv4, ipv6};

/// Length of the encapsulation header.
pub const LEN: usize = 4;
/// Length of an ARP message.
pub const ARP_LEN: usize = 56;
/// Length of a neighbour solicitation or advertisement with its link-layer address.
pub const DISCOVERY_LEN: usize = 24 + OPTION_LEN;
/// The P_Key of the default partition, of a full member.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// Type, length in units of 8 bytes, two reserved bytes and the address (RFC 4391 9.3).
const OPTION_LEN: usize = 24;
/// The hop limit of neighbour discovery (RFC 4861 7.1).
const HOP_LIMIT: u8 = 255;
/// InfiniBand (32), IPv4, and the lengths of their addresses.
const ARP_PREFIX: [u8; 6] = [0, 32, 0x08, 0, 20, 4];
const QPN_MASK: u32 = 0x00ff_ffff;
/// The flag of reliable connections, in the first byte of a link-layer address (RFC 4755 3.1).
const RC_FLAG: u32 = 1 << 31;

const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const SOURCE_ADDRESS: u8 = 1;
const TARGET_ADDRESS: u8 = 2;
const SOLICITED: u8 = 1 << 6;
const OVERRIDE: u8 = 1 << 5;

/// What the encapsulation header says that follows it (RFC 4391 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encapsulation {
    /// An IPv4 packet.
    Ipv4,
    /// An IPv6 packet.
    Ipv6,
    /// An ARP message.
    Arp,
}

impl Encapsulation {
    /// Reads the header; the reserved field is ignored.
    ///
    /// # Errors
    /// Too short, or another type.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        need(bytes, LEN)?;
        match u16_at(bytes, 0) {
            0x0800 => Ok(Self::Ipv4),
            0x86dd => Ok(Self::Ipv6),
            0x0806 => Ok(Self::Arp),
            _ => Err(WireError::OutOfRange("IPoIB type")),
        }
    }

    /// The header as bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; LEN] {
        let [high, low] = match self {
            Self::Ipv4 => 0x0800_u16,
            Self::Ipv6 => 0x86dd,
            Self::Arp => 0x0806,
        }
        .to_be_bytes();
        [high, low, 0, 0]
    }
}

/// A link-layer address (RFC 4391 9.1.1, RFC 4755 3.1). Flags other than that of reliable connections are
/// sent as zero and ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkAddress {
    /// The queue pair that takes datagrams, 24 bits.
    pub qpn: u32,
    /// The GID of its port.
    pub gid: [u8; 16],
    /// Whether its interface accepts reliable connections: the RC flag.
    pub connects: bool,
}

impl LinkAddress {
    /// Length in bytes.
    pub const LEN: usize = 20;

    /// Reads an address.
    fn at(bytes: &[u8], at: usize) -> Self {
        let word = u32_at(bytes, at);
        Self { qpn: word & QPN_MASK, gid: array(bytes, at + 4), connects: word & RC_FLAG != 0 }
    }

    /// The same queue pair, without flags.
    #[must_use]
    pub fn without_flags(self) -> Self {
        Self { connects: false, ..self }
    }

    /// Whether both are of one queue pair, whatever their flags are.
    #[must_use]
    pub fn is_same_queue_pair(self, other: Self) -> bool {
        self.without_flags() == other.without_flags()
    }

    /// The address as bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let flags = if self.connects { RC_FLAG } else { 0 };
        put(&mut out, 0, (flags | self.qpn & QPN_MASK).to_be_bytes());
        put(&mut out, 4, self.gid);
        out
    }
}

/// The private data of a connection's REQ and REP (RFC 4755 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionData {
    /// The sender's queue pair for datagrams, 24 bits.
    pub qpn: u32,
    /// The longest message in bytes that the sender wants to receive, with the encapsulation header.
    pub receive_mtu: u32,
}

impl ConnectionData {
    /// Length in bytes.
    pub const LEN: usize = 8;

    /// Reads the private data; what follows is padding, and the reserved field is ignored.
    ///
    /// # Errors
    /// Too short.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        need(bytes, Self::LEN)?;
        Ok(Self { qpn: u32_at(bytes, 0) & QPN_MASK, receive_mtu: u32_at(bytes, 4) })
    }

    /// The private data as bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        put(&mut out, 0, (self.qpn & QPN_MASK).to_be_bytes());
        put(&mut out, 4, self.receive_mtu.to_be_bytes());
        out
    }
}

/// The multicast GID of an IP multicast group, or of the IPv4 broadcast address, in a partition (RFC 4391 4).
/// All groups have the scope of the link's broadcast group: link-local.
#[must_use]
pub fn group_gid(group: IpAddr, pkey: u16) -> [u8; 16] {
    let mut gid = [0; 16];
    put(&mut gid, 0, [0xff, 0x12]);
    put(&mut gid, 4, pkey.to_be_bytes());
    match group {
        IpAddr::V4(group) => {
            put(&mut gid, 2, [0x40, 0x1b]);
            // The lower 28 bits of a multicast address.
            let bits = if group.is_broadcast() { u32::MAX } else { group.to_bits() & 0x0fff_ffff };
            put(&mut gid, 12, bits.to_be_bytes());
        }
        IpAddr::V6(group) => {
            put(&mut gid, 2, [0x60, 0x1b]);
            put::<10>(&mut gid, 6, array(&group.octets(), 6));
        }
    }
    gid
}

/// An ARP message (RFC 4391 9.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arp {
    /// What it wants.
    pub operation: Operation,
    /// The sender's link-layer address.
    pub sender_link: LinkAddress,
    /// The sender's IP address.
    pub sender: Ipv4Addr,
    /// The target's link-layer address; zeros in a request.
    pub target_link: [u8; LinkAddress::LEN],
    /// The target's IP address.
    pub target: Ipv4Addr,
}

impl Arp {
    /// Reads a message; what follows it is padding.
    ///
    /// # Errors
    /// Too short, of other kinds of addresses, or another operation.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        need(bytes, ARP_LEN)?;
        if !bytes.starts_with(&ARP_PREFIX) {
            return Err(WireError::OutOfRange("ARP address space"));
        }
        Ok(Self {
            operation: Operation::parse(bytes)?,
            sender_link: LinkAddress::at(bytes, 8),
            sender: array(bytes, 28).into(),
            target_link: array(bytes, 32),
            target: array(bytes, 52).into(),
        })
    }

    /// The message as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; ARP_LEN] {
        let mut out = [0; ARP_LEN];
        put(&mut out, 0, ARP_PREFIX);
        out[7] = self.operation.code();
        put(&mut out, 8, self.sender_link.to_bytes());
        put(&mut out, 28, self.sender.octets());
        put(&mut out, 32, self.target_link);
        put(&mut out, 52, self.target.octets());
        out
    }
}

/// A message of neighbour discovery that concerns link-layer addresses (RFC 4861 4.3, 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discovery {
    /// Who has this address?
    Solicitation {
        /// The address; no multicast.
        target: Ipv6Addr,
        /// The asker's link-layer address.
        link: Option<LinkAddress>,
    },
    /// Whose it is.
    Advertisement {
        /// The address; no multicast.
        target: Ipv6Addr,
        /// It answers a solicitation.
        solicited: bool,
        /// It replaces what is known.
        overrides: bool,
        /// The target's link-layer address.
        link: Option<LinkAddress>,
    },
}

impl Discovery {
    /// Whether an IPv6 packet is a message of neighbour or router discovery, or a redirect (types 133 to
    /// 137).
    #[must_use]
    pub fn is_discovery(packet: &[u8]) -> bool {
        packet.len() > ipv6::LEN
            && packet[6] == icmpv6::PROTOCOL
            && (133..=137).contains(&packet[ipv6::LEN])
    }

    /// Reads the message in an IPv6 packet, whose header is read by [`ipv6::Repr::parse`].
    ///
    /// # Errors
    /// Another message, a wrong checksum or hop limit, a multicast target, or options that make no sense.
    pub fn parse(packet: &[u8]) -> Result<(Self, ipv6::Repr), WireError> {
        let (header, at) = ipv6::Repr::parse(packet)?;
        let bytes = &packet[at..at + usize::from(header.payload_len)];
        need(bytes, 24)?;
        if header.next_header != icmpv6::PROTOCOL {
            return Err(WireError::UnknownIcmp(header.next_header));
        }
        if !seal(&header, bytes.len()).and(sum(bytes)).is_valid() {
            return Err(WireError::BadChecksum);
        }
        // RFC 4861 7.1: the packet has passed no router, and the code is zero.
        if header.hop_limit != HOP_LIMIT || bytes[1] != 0 {
            return Err(WireError::OutOfRange("hop limit or code of neighbour discovery"));
        }
        let target = Ipv6Addr::from(array::<16>(bytes, 8));
        if target.is_multicast() {
            return Err(WireError::OutOfRange("target address"));
        }
        let message = match bytes[0] {
            SOLICITATION => {
                Self::Solicitation { target, link: link_option(&bytes[24..], SOURCE_ADDRESS)? }
            }
            ADVERTISEMENT => Self::Advertisement {
                target,
                solicited: bytes[4] & SOLICITED != 0,
                overrides: bytes[4] & OVERRIDE != 0,
                link: link_option(&bytes[24..], TARGET_ADDRESS)?,
            },
            other => return Err(WireError::UnknownIcmp(other)),
        };
        Ok((message, header))
    }

    /// The message with its link-layer address as an IPv6 packet.
    #[must_use]
    pub fn to_packet(&self, source: Ipv6Addr, destination: Ipv6Addr) -> Vec<u8> {
        let (kind, flags, target, option, link) = match *self {
            Self::Solicitation { target, link } => (SOLICITATION, 0, target, SOURCE_ADDRESS, link),
            Self::Advertisement { target, solicited, overrides, link } => {
                let flag = |set: bool, flag: u8| if set { flag } else { 0 };
                let flags = flag(solicited, SOLICITED) | flag(overrides, OVERRIDE);
                (ADVERTISEMENT, flags, target, TARGET_ADDRESS, link)
            }
        };
        let len = if link.is_some() { DISCOVERY_LEN } else { 24 };
        let mut out = vec![0; ipv6::LEN + len];
        let header = ipv6::Repr {
            source,
            destination,
            next_header: icmpv6::PROTOCOL,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: HOP_LIMIT,
            payload_len: len as u16,
        };
        header.emit(&mut out);
        let message = &mut out[ipv6::LEN..];
        put(message, 0, [kind, 0, 0, 0, flags]);
        put(message, 8, target.octets());
        if let Some(link) = link {
            put(message, 24, [option, 3, 0, 0]);
            put(message, 28, link.to_bytes());
        }
        let checksum = seal(&header, len).and(sum(message)).checksum();
        put(message, 2, checksum.to_be_bytes());
        out
    }
}

fn seal(header: &ipv6::Repr, len: usize) -> Sum {
    let (source, destination) = (header.source.into(), header.destination.into());
    Sum::of_pseudo_header(source, destination, icmpv6::PROTOCOL, len)
}

/// The link-layer address among options (RFC 4861 4.6): unknown ones are skipped, one of length zero makes
/// the message void.
fn link_option(mut bytes: &[u8], kind: u8) -> Result<Option<LinkAddress>, WireError> {
    let mut found = None;
    while !bytes.is_empty() {
        need(bytes, 2)?;
        let len = usize::from(bytes[1]) * 8;
        if len == 0 {
            return Err(WireError::OutOfRange("option length"));
        }
        need(bytes, len)?;
        if bytes[0] == kind && len == OPTION_LEN {
            found = found.or_else(|| Some(LinkAddress::at(bytes, 4)));
        }
        bytes = &bytes[len..];
    }
    Ok(found)
}

/// Source, destination and length in bytes of the IP packet at the front of `bytes`; what follows it is
/// padding.
///
/// # Errors
/// Another version than the type says, or lengths that do not fit. Only what the header says is checked.
pub fn ends_of(kind: Encapsulation, bytes: &[u8]) -> Result<(IpAddr, IpAddr, usize), WireError> {
    match kind {
        Encapsulation::Ipv4 => {
            let (header, at) = ipv4::Repr::parse(bytes)?;
            let len = at + usize::from(header.payload_len);
            Ok((header.source.into(), header.destination.into(), len))
        }
        Encapsulation::Ipv6 => {
            let (header, at) = ipv6::Repr::parse(bytes)?;
            let len = at + usize::from(header.payload_len);
            Ok((header.source.into(), header.destination.into(), len))
        }
        Encapsulation::Arp => Err(WireError::OutOfRange("IPoIB type")),
    }
}

#[cfg(test)]
mod tests;
