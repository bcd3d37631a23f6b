//! The sizes and the identity of an adapter.

use crate::port::LinkLayer;
use crate::types::Gid;

/// When a stream's start-up asks for CRC32C in FPDUs. If either end asks, both send and check them (RFC 5044
/// 7.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crc {
    /// Always.
    Always,
    /// Unless the peer's address is the adapter's own or a loopback address: then no wire carries the bytes,
    /// nor does the kernel compute a checksum of theirs.
    BetweenHosts,
    /// Only if the peer asks.
    Never,
}

/// Sizes and identity of an adapter.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its first address: rows 0 to 3 of its GID table.
    pub gid: Gid,
    /// The kind of port that it shows.
    pub link_layer: LinkLayer,
    /// Seed of its keys; from the system's random source in production, from the run's seed in simulation.
    pub seed: [u8; 32],
    /// Protection domains.
    pub max_pd: u32,
    /// Memory regions, and as many windows.
    pub max_mr: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests of a queue.
    pub max_qp_wr: u32,
    /// Scatter/gather elements of a work request.
    pub max_sge: u32,
    /// Inline bytes of a send.
    pub max_inline: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Work requests of a shared receive queue.
    pub max_srq_wr: u32,
    /// Address handles; at most 65 536.
    pub max_ah: u32,
    /// Longest message of a datagram queue pair, an MTU of InfiniBand from 256 to 4096.
    pub datagram_mtu: u32,
    /// XRC domains.
    pub max_xrcd: u32,
    /// Multicast groups that queue pairs may be attached to.
    pub max_multicast_groups: u32,
    /// Queue pairs that may be attached to one of them.
    pub max_multicast_members: u32,
    /// The UDP port of datagrams to multicast groups.
    pub multicast_port: u16,
    /// Reads and atomics in flight, each way.
    pub max_rd_atomic: u8,
    /// Largest message in bytes.
    pub max_message: u32,
    /// Connections whose peer has not said yet which queue pair it wants, and those that wait for a
    /// queue pair to become ready. A quarter of them may be of one address, three of
    /// one network of IPv6. Beyond that the oldest gives way.
    pub max_half_open: u32,
    /// How long such a connection may take.
    pub setup_timeout_ns: u64,
    /// Over streams: how long a peer that has sent a part of an FPDU may take at least to go on. Its process
    /// may be stopped. If it is not, the length of the FPDU was damaged on the way.
    pub unfinished_ns: u64,
    /// After which silence of its initiator a responder of plain iWARP may speak, where the initiator did not
    /// ask for peer-to-peer mode. `None`: it never does, as RFC 5044 7.1.2 has it.
    pub speaks_first_after_ns: Option<u64>,
    /// Longest FPDU payload sent (ULPDU); at most 65 532.
    pub max_ulpdu: u32,
    /// When FPDUs between two Quipus carry a CRC32C that is checked.
    pub crc: Crc,
    /// Same host: payloads up to this many bytes are copied through the ring, larger ones are passed by
    /// reference where the host allows it. Two copies on two processors take less time than one by a system
    /// call up to about this length; fragments of middleware (UCX: 8 KB and its header) are below it.
    pub copy_limit: u32,
    /// Same host: how often it is looked whether a peer has executed a small write or read that it was
    /// offered, before the kernel is asked to move the bytes. 0: none is offered.
    pub offer_looks: u32,
    /// Same host: how many more times a poll that waits for an answer looks for it before it finds nothing.
    /// 0: none waits.
    pub answer_looks: u32,
}

/// Most octets of a message, where the configuration does not say less.
pub const MAX_MESSAGE: u32 = 1 << 31;

impl Default for Config {
    fn default() -> Self {
        Self {
            gid: Gid::from(std::net::IpAddr::from([127, 0, 0, 1])),
            link_layer: LinkLayer::Ethernet,
            seed: [0; 32],
            max_pd: 1 << 16,
            max_mr: 1 << 20,
            max_cq: 1 << 16,
            max_cqe: 1 << 22,
            max_qp: 1 << 18,
            max_qp_wr: 1 << 15,
            max_sge: 64,
            max_inline: 1024,
            max_srq: 1 << 16,
            max_srq_wr: 1 << 16,
            max_ah: 1 << 16,
            datagram_mtu: 4096,
            max_xrcd: 1 << 16,
            max_multicast_groups: 1024,
            max_multicast_members: 1024,
            multicast_port: 20_804,
            max_rd_atomic: 128,
            max_message: MAX_MESSAGE,
            max_half_open: 1024,
            setup_timeout_ns: 10_000_000_000,
            unfinished_ns: 600_000_000_000,
            speaks_first_after_ns: None,
            max_ulpdu: 64_000,
            crc: Crc::Always,
            copy_limit: 16384,
            offer_looks: 0,
            answer_looks: 0,
        }
    }
}
