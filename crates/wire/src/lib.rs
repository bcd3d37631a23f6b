//! The headers that Quipu puts on the wire, as legal representations: MPA, DDP, RDMAP, Quipu's own
//! additions, and for QPIP those of the internet protocols.
//!
//! This crate reads and writes bytes and does nothing else: it keeps no connection state, holds no
//! buffer, knows no clock and contains no networking code. Raw bytes become a representation once,
//! at the edge, through a `parse` that never panics and never allocates; a value that came out of
//! `parse` is always legal. `emit` writes it back.
//!
//! | module | what | source |
//! |---|---|---|
//! | [`mpa`] | start-up frames, FPDU arithmetic, markers, CRC32C | RFC 5044, RFC 6581 |
//! | [`ddp`] | tagged and untagged headers | RFC 5041 |
//! | [`rdmap`] | control octet, opcodes, small payloads | RFC 5040, RFC 7306 |
//! | [`terminate`] | the Terminate message and its codes | RFC 5040 4.8, 5041 7, 5044 8, 6581 |
//! | [`control`] | acknowledgement, receiver-not-ready, resume | `specs/quipu-wire.md` 4 |
//! | [`cm`] | messages of connection management | `specs/quipu-cm.md` |
//! | [`sdp`] | messages of the Sockets Direct Protocol | IBA volume 1, annex A4 |
//! | [`hello`] | Quipu's private data in MPA start-up | `specs/quipu-wire.md` 2 |
//! | [`datagram`] | the header of an unreliable datagram | `specs/quipu-datagram.md` |
//! | [`ethernet`] | an Ethernet header, and the layers of a frame for flow rules | IEEE 802.3, RFC 7348 |
//! | [`grh`] | the header that a receiver of datagrams sees | IBA annex A17 |
//! | [`checksum`] | the sum of the internet protocols | RFC 1071 |
//! | [`ipv4`], [`arp`], [`icmpv4`] | IPv4 and what belongs to it | RFC 791, 826, 792, 1191 |
//! | [`ipv6`], [`ipv6_extension`] | the IPv6 header and its extensions | RFC 8200, 4291 |
//! | [`icmpv6`], [`ndp`] | ICMP for IPv6; the discovery of neighbours and routers | RFC 4443, 4861 |
//! | [`ipoib`] | IP over InfiniBand: encapsulation, ARP, neighbour discovery | RFC 4391 |
//! | [`udp`] | the UDP header | RFC 768 |
//! | [`tcp`] | the TCP header and its options | RFC 9293, 7323, 2018 |
//!
//! All integers are big-endian on the wire, except the MPA CRC (see [`mpa::crc32c`]).
#![forbid(unsafe_code)]

pub mod arp;
pub mod checksum;
pub mod cm;
pub mod control;
pub mod datagram;
pub mod ddp;
mod error;
pub mod ethernet;
mod field;
pub mod grh;
pub mod hello;
pub mod icmpv4;
pub mod icmpv6;
pub mod ipoib;
pub mod ipv4;
pub mod ipv6;
pub mod ipv6_extension;
pub mod mpa;
pub mod ndp;
pub mod rdmap;
pub mod sdp;
pub mod tcp;
pub mod terminate;
pub mod udp;

pub use error::WireError;

/// A steering tag: names a registered memory region or window on the wire (RFC 5040 2.1). For an
/// InfiniBand program it is the rkey.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stag(pub u32);

/// A message payload of fixed layout that is written in place into an outgoing FPDU.
pub trait Payload {
    /// Length on the wire in bytes.
    fn wire_len(&self) -> usize;

    /// Writes the payload to the front of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`Payload::wire_len`].
    fn emit(&self, out: &mut [u8]);
}
