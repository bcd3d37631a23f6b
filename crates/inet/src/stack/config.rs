//! What a stack is told when it is made.

use std::net::IpAddr;

use crate::tcp::Secret;

/// The least MTU of a link (RFC 8200 5).
pub const MIN_MTU: u32 = 1_280;
/// The largest packet of both versions of IP, jumbograms aside.
pub const MAX_MTU: u32 = 65_535;

/// The parameters of a [`super::Stack`].
#[derive(Clone, Debug)]
pub struct Config {
    /// The station address. None: the link carries bare IP packets (a UDP tunnel, TUN), without Ethernet
    /// headers and without neighbour discovery.
    pub hardware: Option<[u8; 6]>,
    /// Own addresses with the lengths of their prefixes. With a station address the link-local one of RFC
    /// 4291 2.5.6 is added.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Routers for what is on no prefix.
    pub gateways: Vec<IpAddr>,
    /// The largest IP packet of the link, in octets; taken as within [`MIN_MTU`] to [`MAX_MTU`].
    pub mtu: u32,
    /// What the link does for the stack.
    pub offload: Offload,
    /// The most connections at a time; more are not opened, and peers are kept waiting.
    pub max_connections: u32,
    /// A number that nobody else knows, drawn by the host: behind initial numbers, cookies, hashes and
    /// ephemeral ports.
    pub secret: Secret,
}

impl Config {
    /// A stack with one address on a link of bare packets.
    pub fn new(address: IpAddr, prefix: u8, secret: Secret) -> Self {
        Self {
            hardware: None,
            addresses: vec![(address, prefix)],
            gateways: Vec::new(),
            mtu: 1_500,
            offload: Offload::default(),
            max_connections: 1 << 17,
            secret,
        }
    }
}

/// What the link does for the stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// It fills in the checksums of TCP and UDP.
    pub checksum: bool,
    /// The most octets of TCP payload in a frame that the link cuts into segments itself (GSO); 0: it cuts
    /// none.
    pub segment: u32,
}
