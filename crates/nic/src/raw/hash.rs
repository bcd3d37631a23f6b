//! Which receive work queue a frame goes to: a Toeplitz hash over fields of its headers
//! (`ibv_create_qp_ex(3)`, RX hash; "Introduction to Receive Side Scaling", Microsoft).

use quipu_iwarp::wire::ethernet::{IpFields, Layers, PortFields};

use crate::error::Fault;

/// Bytes of a hash key.
pub const RX_HASH_KEY: usize = 40;

bitflags::bitflags! {
    /// The fields that a hash is over: the values of `ibv_rx_hash_fields`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct RxHashFields: u32 {
        /// Source address of IPv4.
        const SRC_IPV4 = 1;
        /// Destination address of IPv4.
        const DST_IPV4 = 1 << 1;
        /// Source address of IPv6.
        const SRC_IPV6 = 1 << 2;
        /// Destination address of IPv6.
        const DST_IPV6 = 1 << 3;
        /// Source port of TCP.
        const SRC_PORT_TCP = 1 << 4;
        /// Destination port of TCP.
        const DST_PORT_TCP = 1 << 5;
        /// Source port of UDP.
        const SRC_PORT_UDP = 1 << 6;
        /// Destination port of UDP.
        const DST_PORT_UDP = 1 << 7;
        /// All of the frame in a tunnel.
        const INNER = 1 << 31;
    }
}

/// How the receive work queue of a frame is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxHash {
    key: [u8; RX_HASH_KEY],
    fields: RxHashFields,
}

impl RxHash {
    /// A hash over `fields`. Without any, all frames go to the first queue.
    ///
    /// # Errors
    /// Fields of both versions of IP, or of both TCP and UDP (`ibv_create_qp_ex(3)`).
    pub fn new(key: [u8; RX_HASH_KEY], fields: RxHashFields) -> Result<Self, Fault> {
        type F = RxHashFields;
        let both = |one: F, other: F| fields.intersects(one) && fields.intersects(other);
        let tcp = F::SRC_PORT_TCP | F::DST_PORT_TCP;
        let udp = F::SRC_PORT_UDP | F::DST_PORT_UDP;
        if both(F::SRC_IPV4 | F::DST_IPV4, F::SRC_IPV6 | F::DST_IPV6) || both(tcp, udp) {
            return Err(Fault::Invalid("a hash covers one version of IP, and TCP or UDP"));
        }
        Ok(Self { key, fields })
    }

    /// The hash of a frame: 0 if it has none of the fields.
    pub(super) fn of(&self, outer: &Layers<'_>, inner: Option<&Layers<'_>>) -> u32 {
        type F = RxHashFields;
        let layers = if self.fields.contains(F::INNER) { inner } else { Some(outer) };
        let Some(layers) = layers else { return 0 };
        let mut toeplitz = Toeplitz::new(&self.key);
        let mut add = |field: F, bytes: &[u8]| {
            if self.fields.contains(field) {
                toeplitz.add(bytes);
            }
        };
        match &layers.ip {
            Some(IpFields::V4(ip)) => {
                add(F::SRC_IPV4, &ip[..4]);
                add(F::DST_IPV4, &ip[4..8]);
            }
            Some(IpFields::V6(ip)) => {
                add(F::SRC_IPV6, &ip[..16]);
                add(F::DST_IPV6, &ip[16..32]);
            }
            None => {}
        }
        match &layers.ports {
            Some(PortFields::Tcp(ports)) => {
                add(F::SRC_PORT_TCP, &ports[2..]);
                add(F::DST_PORT_TCP, &ports[..2]);
            }
            Some(PortFields::Udp(ports)) => {
                add(F::SRC_PORT_UDP, &ports[2..]);
                add(F::DST_PORT_UDP, &ports[..2]);
            }
            None => {}
        }
        toeplitz.hash
    }
}

/// For each bit of the input that is set, the 32 bits of the key that begin at its place.
struct Toeplitz<'a> {
    key: &'a [u8; RX_HASH_KEY],
    /// Bytes hashed so far.
    at: usize,
    hash: u32,
}

impl<'a> Toeplitz<'a> {
    fn new(key: &'a [u8; RX_HASH_KEY]) -> Self {
        Self { key, at: 0, hash: 0 }
    }

    /// Adds up to 36 bytes in all: two IPv6 addresses and two ports.
    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            let mut window = [0; 8];
            let rest = &self.key[self.at..];
            let len = rest.len().min(5);
            window[..len].copy_from_slice(&rest[..len]);
            let window = u64::from_be_bytes(window);
            for bit in 0..8 {
                if byte & 0x80 >> bit != 0 {
                    self.hash ^= (window << bit >> 32) as u32;
                }
            }
            self.at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u8; RX_HASH_KEY] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f,
        0xb0, 0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30,
        0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];

    fn frame(ip: &[u8], source: u16, dest: u16) -> Vec<u8> {
        let ports = [source.to_be_bytes(), dest.to_be_bytes()].concat();
        let kind = if ip[0] == 0x45 { [0x08, 0x00] } else { [0x86, 0xdd] };
        [&[0; 12][..], &kind, ip, &ports].concat()
    }

    fn hash(fields: RxHashFields, frame: &[u8]) -> u32 {
        RxHash::new(KEY, fields).unwrap().of(&Layers::parse(frame).unwrap(), None)
    }

    /// The vectors that Microsoft publishes for this key ("Verifying the RSS hash calculation").
    #[test]
    fn published_vectors() {
        type F = RxHashFields;
        let v4 = |source: [u8; 4], dest: [u8; 4]| {
            [&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0][..], &source, &dest].concat()
        };
        let (addresses, ports) = (F::SRC_IPV4 | F::DST_IPV4, F::SRC_PORT_TCP | F::DST_PORT_TCP);
        let one = frame(&v4([66, 9, 149, 187], [161, 142, 100, 80]), 2794, 1766);
        assert_eq!(hash(addresses, &one), 0x323e_8fc2);
        assert_eq!(hash(addresses | ports, &one), 0x51cc_c178);
        let two = frame(&v4([199, 92, 111, 2], [65, 69, 140, 83]), 14230, 4739);
        assert_eq!(hash(addresses, &two), 0xd718_262a);
        assert_eq!(hash(addresses | ports, &two), 0xc626_b0ea);
        let source: std::net::Ipv6Addr = "3ffe:2501:200:1fff::7".parse().unwrap();
        let dest: std::net::Ipv6Addr = "3ffe:2501:200:3::1".parse().unwrap();
        let head = [0x60, 0, 0, 0, 0, 0, 6, 64];
        let v6 = frame(&[&head[..], &source.octets(), &dest.octets()].concat(), 2794, 1766);
        let addresses = F::SRC_IPV6 | F::DST_IPV6;
        assert_eq!(hash(addresses, &v6), 0x2cc1_8cd5);
        assert_eq!(hash(addresses | ports, &v6), 0x4020_7d3d);
    }

    #[test]
    fn what_a_frame_does_not_have_is_not_hashed() {
        let udp = frame(&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8], 1, 2);
        assert_eq!(hash(RxHashFields::SRC_PORT_TCP, &udp), 0);
        assert_eq!(hash(RxHashFields::SRC_IPV6, &udp), 0);
        assert_eq!(hash(RxHashFields::SRC_IPV4 | RxHashFields::INNER, &udp), 0);
        assert_ne!(hash(RxHashFields::SRC_PORT_UDP, &udp), 0);
        assert_eq!(hash(RxHashFields::empty(), &udp), 0);
    }

    #[test]
    fn fields_that_exclude_each_other() {
        type F = RxHashFields;
        assert!(RxHash::new(KEY, F::SRC_IPV4 | F::DST_IPV6).is_err());
        assert!(RxHash::new(KEY, F::SRC_PORT_TCP | F::SRC_PORT_UDP).is_err());
        assert!(RxHash::new(KEY, F::SRC_IPV6 | F::DST_IPV6 | F::DST_PORT_UDP).is_ok());
    }
}
