//! Neighbour Discovery (RFC 4861 4): solicitations and advertisements of neighbours and routers.
//!
//! [`crate::icmpv6`] reads and writes the messages, with their checksum. What depends on the IP header, and
//! the hop limit of 255 above all (RFC 4861 7.1), is for whoever has that header. Redirects are not read:
//! they may be ignored, and are an attacker's tool.

use std::net::Ipv6Addr;

use crate::WireError;
use crate::field::{array, need, put, u16_at, u32_at};

/// The hop limit of every message: it comes from the link itself (RFC 4861 7.1).
pub const HOP_LIMIT: u8 = 255;
/// Prefixes that are read of an advertisement; more are ignored.
pub const MAX_PREFIXES: usize = 4;

mod kind {
    pub(super) const ROUTER_SOLICITATION: u8 = 133;
    pub(super) const ROUTER_ADVERTISEMENT: u8 = 134;
    pub(super) const NEIGHBOUR_SOLICITATION: u8 = 135;
    pub(super) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
}

mod option {
    pub(super) const SOURCE_STATION: u8 = 1;
    pub(super) const TARGET_STATION: u8 = 2;
    pub(super) const PREFIX: u8 = 3;
    pub(super) const MTU: u8 = 5;
}

const STATION_OPTION: usize = 8;
const PREFIX_OPTION: usize = 32;
const MTU_OPTION: usize = 8;

const ROUTER: u8 = 1 << 7;
const SOLICITED: u8 = 1 << 6;
const OVERRIDE: u8 = 1 << 5;
const ON_LINK: u8 = 1 << 7;
const AUTONOMOUS: u8 = 1 << 6;

/// The address of an Ethernet station.
pub type Station = [u8; 6];

/// Prefix Information (RFC 4861 4.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The prefix; what is behind its length is zero.
    pub prefix: Ipv6Addr,
    /// Its length in bits, at most 128.
    pub len: u8,
    /// Addresses of it are on this link.
    pub on_link: bool,
    /// Stations may make addresses of it (RFC 4862 5.5).
    pub autonomous: bool,
    /// How long that is so, in seconds; all ones: for ever.
    pub valid: u32,
    /// How long new connections should use such addresses, in seconds; all ones: for ever.
    pub preferred: u32,
}

/// Up to [`MAX_PREFIXES`] prefixes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefixes {
    prefixes: [Option<Prefix>; MAX_PREFIXES],
}

impl Prefixes {
    /// Adds one; says whether there was room.
    pub fn push(&mut self, prefix: Prefix) -> bool {
        let free = self.prefixes.iter_mut().find(|slot| slot.is_none());
        free.map(|slot| *slot = Some(prefix)).is_some()
    }

    /// The prefixes, in the order of the message.
    pub fn iter(&self) -> impl Iterator<Item = &Prefix> {
        self.prefixes.iter().flatten()
    }
}

/// What a router says of itself and of its link (RFC 4861 4.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Advertisement {
    /// The hop limit that packets should begin with; 0: it does not say.
    pub hop_limit: u8,
    /// The M and O flags, in their bits.
    pub flags: u8,
    /// How long it is a default router, in seconds; 0: it is none.
    pub lifetime: u16,
    /// How long a neighbour counts as reachable, in milliseconds; 0: it does not say.
    pub reachable: u32,
    /// Between solicitations, in milliseconds; 0: it does not say.
    pub retransmit: u32,
    /// Its station.
    pub station: Option<Station>,
    /// The MTU of the link.
    pub mtu: Option<u32>,
    /// Prefixes of the link.
    pub prefixes: Prefixes,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "a value of the stack's edge; nothing keeps it")]
pub enum Repr {
    /// Which routers are there? (RFC 4861 4.1)
    RouterSolicitation {
        /// The asker's.
        station: Option<Station>,
    },
    /// A router (RFC 4861 4.2).
    RouterAdvertisement(Advertisement),
    /// Who has this address? (RFC 4861 4.3)
    NeighbourSolicitation {
        /// The address; no multicast.
        target: Ipv6Addr,
        /// The asker's.
        station: Option<Station>,
    },
    /// Whose it is (RFC 4861 4.4).
    NeighbourAdvertisement {
        /// The address; no multicast.
        target: Ipv6Addr,
        /// The sender is a router.
        router: bool,
        /// It answers a solicitation.
        solicited: bool,
        /// It counts more than what one knows.
        overrides: bool,
        /// The target's.
        station: Option<Station>,
    },
}

/// The options that mean something here.
#[derive(Default)]
struct Options {
    source: Option<Station>,
    target: Option<Station>,
    mtu: Option<u32>,
    prefixes: Prefixes,
}

impl Options {
    /// RFC 4861 4.6: unknown ones are skipped, one of length zero makes the message void.
    fn parse(mut bytes: &[u8]) -> Result<Self, WireError> {
        let mut options = Self::default();
        while !bytes.is_empty() {
            need(bytes, 2)?;
            let len = usize::from(bytes[1]) * 8;
            if len == 0 {
                return Err(WireError::OutOfRange("option length"));
            }
            need(bytes, len)?;
            let (option, rest) = bytes.split_at(len);
            options.take(option);
            bytes = rest;
        }
        Ok(options)
    }

    /// Takes one; one whose length is not that of its kind is skipped. Of several the first counts, of
    /// prefixes the first few.
    fn take(&mut self, option: &[u8]) {
        match (option[0], option.len()) {
            (option::SOURCE_STATION, STATION_OPTION) => {
                self.source = self.source.or(Some(array(option, 2)));
            }
            (option::TARGET_STATION, STATION_OPTION) => {
                self.target = self.target.or(Some(array(option, 2)));
            }
            (option::MTU, MTU_OPTION) => self.mtu = self.mtu.or(Some(u32_at(option, 4))),
            (option::PREFIX, PREFIX_OPTION) if option[2] <= 128 => {
                let len = option[2];
                let prefix = u128::from_be_bytes(array(option, 16));
                self.prefixes.push(Prefix {
                    // RFC 4861 4.6.2: the bits behind the prefix are ignored.
                    prefix: Ipv6Addr::from_bits(prefix & mask(len)),
                    len,
                    on_link: option[3] & ON_LINK != 0,
                    autonomous: option[3] & AUTONOMOUS != 0,
                    valid: u32_at(option, 4),
                    preferred: u32_at(option, 8),
                });
            }
            _ => {}
        }
    }
}

/// The bits of a prefix of `len` bits, at most 128.
const fn mask(len: u8) -> u128 {
    match len {
        0 => 0,
        len => u128::MAX << (128 - len),
    }
}

fn target_of(bytes: &[u8]) -> Result<Ipv6Addr, WireError> {
    need(bytes, 24)?;
    let target = Ipv6Addr::from(array::<16>(bytes, 8));
    if target.is_multicast() {
        return Err(WireError::OutOfRange("target address"));
    }
    Ok(target)
}

impl Repr {
    /// Reads a message; its checksum was checked.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        // RFC 4861 6.1, 7.1: the code is zero.
        if bytes[1] != 0 {
            return Err(WireError::UnknownIcmp(bytes[0]));
        }
        match bytes[0] {
            kind::ROUTER_SOLICITATION => {
                let options = Options::parse(&bytes[8..])?;
                Ok(Self::RouterSolicitation { station: options.source })
            }
            kind::ROUTER_ADVERTISEMENT => {
                need(bytes, 16)?;
                let options = Options::parse(&bytes[16..])?;
                Ok(Self::RouterAdvertisement(Advertisement {
                    hop_limit: bytes[4],
                    flags: bytes[5],
                    lifetime: u16_at(bytes, 6),
                    reachable: u32_at(bytes, 8),
                    retransmit: u32_at(bytes, 12),
                    station: options.source,
                    mtu: options.mtu,
                    prefixes: options.prefixes,
                }))
            }
            kind::NEIGHBOUR_SOLICITATION => {
                let target = target_of(bytes)?;
                let station = Options::parse(&bytes[24..])?.source;
                Ok(Self::NeighbourSolicitation { target, station })
            }
            kind::NEIGHBOUR_ADVERTISEMENT => {
                let target = target_of(bytes)?;
                let station = Options::parse(&bytes[24..])?.target;
                let flag = |flag: u8| bytes[4] & flag != 0;
                Ok(Self::NeighbourAdvertisement {
                    target,
                    router: flag(ROUTER),
                    solicited: flag(SOLICITED),
                    overrides: flag(OVERRIDE),
                    station,
                })
            }
            other => Err(WireError::UnknownIcmp(other)),
        }
    }

    /// Length on the wire.
    pub fn wire_len(&self) -> usize {
        let of_station = |it: &Option<Station>| if it.is_some() { STATION_OPTION } else { 0 };
        match self {
            Self::RouterSolicitation { station } => 8 + of_station(station),
            Self::RouterAdvertisement(it) => {
                let mtu = if it.mtu.is_some() { MTU_OPTION } else { 0 };
                16 + of_station(&it.station) + mtu + it.prefixes.iter().count() * PREFIX_OPTION
            }
            Self::NeighbourSolicitation { station, .. }
            | Self::NeighbourAdvertisement { station, .. } => 24 + of_station(station),
        }
    }

    /// Writes the message, save its checksum.
    pub(crate) fn emit(&self, out: &mut [u8]) {
        match *self {
            Self::RouterSolicitation { station } => {
                put(out, 0, [kind::ROUTER_SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
                put_station(out, 8, option::SOURCE_STATION, station);
            }
            Self::RouterAdvertisement(ref it) => it.emit(out),
            Self::NeighbourSolicitation { target, station } => {
                put(out, 0, [kind::NEIGHBOUR_SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
                put(out, 8, target.octets());
                put_station(out, 24, option::SOURCE_STATION, station);
            }
            Self::NeighbourAdvertisement { target, router, solicited, overrides, station } => {
                let flag = |set: bool, flag: u8| if set { flag } else { 0 };
                let flags =
                    flag(router, ROUTER) | flag(solicited, SOLICITED) | flag(overrides, OVERRIDE);
                put(out, 0, [kind::NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0]);
                put(out, 8, target.octets());
                put_station(out, 24, option::TARGET_STATION, station);
            }
        }
    }
}

impl Advertisement {
    fn emit(&self, out: &mut [u8]) {
        put(out, 0, [kind::ROUTER_ADVERTISEMENT, 0, 0, 0, self.hop_limit, self.flags]);
        put(out, 6, self.lifetime.to_be_bytes());
        put(out, 8, self.reachable.to_be_bytes());
        put(out, 12, self.retransmit.to_be_bytes());
        let mut at = put_station(out, 16, option::SOURCE_STATION, self.station);
        if let Some(mtu) = self.mtu {
            put(out, at, [option::MTU, 1, 0, 0]);
            put(out, at + 4, mtu.to_be_bytes());
            at += MTU_OPTION;
        }
        for prefix in self.prefixes.iter() {
            let on_link = if prefix.on_link { ON_LINK } else { 0 };
            let autonomous = if prefix.autonomous { AUTONOMOUS } else { 0 };
            put(out, at, [option::PREFIX, 4, prefix.len, on_link | autonomous]);
            put(out, at + 4, prefix.valid.to_be_bytes());
            put(out, at + 8, prefix.preferred.to_be_bytes());
            put(out, at + 12, [0; 4]);
            put(out, at + 16, prefix.prefix.octets());
            at += PREFIX_OPTION;
        }
    }
}

/// Writes the option, if there is one, and says where the next one begins.
fn put_station(out: &mut [u8], at: usize, kind: u8, station: Option<Station>) -> usize {
    let Some(station) = station else { return at };
    put(out, at, [kind, 1]);
    put(out, at + 2, station);
    at + STATION_OPTION
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 9);
    const STATION: Station = [2, 0, 0, 0, 0, 7];

    fn there_and_back(repr: &Repr) -> Vec<u8> {
        let mut out = vec![0; repr.wire_len()];
        repr.emit(&mut out);
        assert_eq!(Repr::parse(&out), Ok(*repr));
        out
    }

    #[test]
    fn neighbours() {
        let asked = Repr::NeighbourSolicitation { target: TARGET, station: Some(STATION) };
        let bytes = there_and_back(&asked);
        assert_eq!(bytes[..8], [135, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[24..], [1, 1, 2, 0, 0, 0, 0, 7]);
        there_and_back(&Repr::NeighbourSolicitation { target: TARGET, station: None });
        let answer = Repr::NeighbourAdvertisement {
            target: TARGET,
            router: false,
            solicited: true,
            overrides: true,
            station: Some(STATION),
        };
        assert_eq!(there_and_back(&answer)[4], 0x60);
    }

    #[test]
    fn routers() {
        there_and_back(&Repr::RouterSolicitation { station: Some(STATION) });
        let prefix = Prefix {
            prefix: "2001:db8::".parse().unwrap(),
            len: 64,
            on_link: true,
            autonomous: true,
            valid: 2_592_000,
            preferred: u32::MAX,
        };
        let mut prefixes = Prefixes::default();
        assert!(prefixes.push(prefix));
        let advertisement = Advertisement {
            hop_limit: 64,
            lifetime: 1800,
            reachable: 30_000,
            retransmit: 1000,
            station: Some(STATION),
            mtu: Some(1400),
            prefixes,
            ..Advertisement::default()
        };
        let mut bytes = there_and_back(&Repr::RouterAdvertisement(advertisement));
        assert_eq!(bytes[32..36], [3, 4, 64, 0xc0]);
        bytes[63] = 1;
        let parsed = Repr::parse(&bytes);
        assert_eq!(parsed, Ok(Repr::RouterAdvertisement(advertisement)), "behind the prefix");
        bytes[34] = 129;
        let Ok(Repr::RouterAdvertisement(parsed)) = Repr::parse(&bytes) else { panic!() };
        assert_eq!(parsed.prefixes.iter().count(), 0);
    }

    #[test]
    fn prefixes_are_few() {
        let router = Repr::RouterAdvertisement(Advertisement::default());
        let mut bytes = there_and_back(&router);
        for n in 0..40 {
            bytes.extend([3, 4, n, 0]);
            bytes.extend([0xff; 28]);
        }
        let Ok(Repr::RouterAdvertisement(parsed)) = Repr::parse(&bytes) else { panic!() };
        assert!(parsed.prefixes.iter().map(|prefix| prefix.len).eq([0, 1, 2, 3]));
        assert_eq!(parsed.prefixes.iter().next().unwrap().prefix, Ipv6Addr::UNSPECIFIED);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let asked = Repr::NeighbourSolicitation { target: TARGET, station: Some(STATION) };
        let bytes = there_and_back(&asked);
        for len in 8..bytes.len() {
            assert_eq!(Repr::parse(&bytes[..len]).is_ok(), len == 24, "{len}");
        }
        let changed = |at: usize, value: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            Repr::parse(&bytes)
        };
        assert_eq!(changed(25, 0), Err(WireError::OutOfRange("option length")));
        assert_eq!(changed(8, 0xff), Err(WireError::OutOfRange("target address")));
        assert_eq!(changed(1, 1), Err(WireError::UnknownIcmp(135)));
        assert_eq!(changed(0, 137), Err(WireError::UnknownIcmp(137)), "redirects are not read");
        let without = Ok(Repr::NeighbourSolicitation { target: TARGET, station: None });
        assert_eq!(changed(24, 14), without, "an unknown option");
        assert!(Repr::parse(&[134, 0, 0, 0, 0, 0, 0, 0]).is_err());
    }
}
