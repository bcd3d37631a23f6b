//! Names of endpoints: what processes exchange before they map each other.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Where an endpoint is: the address of its port, and which endpoint of that port it is.
///
/// Processes exchange names as opaque bytes, by any means.
///
/// ```
/// use quipu_am::Name;
/// let name = Name { port: "192.0.2.7:4791".parse().unwrap(), endpoint: 3, incarnation: 99 };
/// assert_eq!(Name::from_bytes(&name.to_bytes()), Some(name));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// Where the port takes connections.
    pub port: SocketAddr,
    /// The number of the endpoint among those of the port.
    pub endpoint: u32,
    /// Which life of the port: a process that takes the place of a dead one has another. 0 stands
    /// for any.
    pub incarnation: u64,
}

impl Name {
    /// Bytes of [`to_bytes`](Self::to_bytes).
    pub const WIRE_LEN: usize = 32;
    /// In place of the number of an endpoint: the one that takes connections at that address.
    pub const OF_ADDRESS: u32 = u32::MAX;

    /// The endpoint that takes connections at an address, in whichever life of its process.
    #[must_use]
    pub const fn of_address(port: SocketAddr) -> Self {
        Self { port, endpoint: Self::OF_ADDRESS, incarnation: 0 }
    }

    /// Whether it is a name of [`of_address`](Self::of_address).
    #[must_use]
    pub const fn is_of_address(&self) -> bool {
        self.endpoint == Self::OF_ADDRESS && self.incarnation == 0
    }

    /// Address (16 bytes, IPv4 mapped), port, family (4 or 6), endpoint and incarnation,
    /// little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::WIRE_LEN] {
        let mut out = [0; Self::WIRE_LEN];
        let (ip, family) = match self.port.ip() {
            IpAddr::V4(v4) => (v4.to_ipv6_mapped(), 4u16),
            IpAddr::V6(v6) => (v6, 6),
        };
        out[..16].copy_from_slice(&ip.octets());
        out[16..18].copy_from_slice(&self.port.port().to_le_bytes());
        out[18..20].copy_from_slice(&family.to_le_bytes());
        out[20..24].copy_from_slice(&self.endpoint.to_le_bytes());
        out[24..].copy_from_slice(&self.incarnation.to_le_bytes());
        out
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; none if the bytes are no name.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::WIRE_LEN]) -> Option<Self> {
        let mut octets = [0; 16];
        octets.copy_from_slice(&bytes[..16]);
        let v6 = Ipv6Addr::from(octets);
        let ip = match u16::from_le_bytes([bytes[18], bytes[19]]) {
            4 => IpAddr::V4(v6.to_ipv4_mapped()?),
            6 => IpAddr::V6(v6),
            _ => return None,
        };
        let mut incarnation = [0; 8];
        incarnation.copy_from_slice(&bytes[24..]);
        Some(Self {
            port: SocketAddr::new(ip, u16::from_le_bytes([bytes[16], bytes[17]])),
            endpoint: u32::from_le_bytes([bytes[20], bytes[21], bytes[22], bytes[23]]),
            incarnation: u64::from_le_bytes(incarnation),
        })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.port, self.endpoint)
    }
}
