//! What goes into a stack and what comes out of it.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use thiserror::Error;

use crate::tcp;

/// A connection. An identifier of one that is gone does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TcpId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl TcpId {
    /// A small number that no other connection has at the same time; used again when this one is gone.
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// A port that is watched for connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListenerId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl ListenerId {
    /// As a number.
    #[must_use]
    pub fn bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// From its number.
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

/// A UDP port that is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UdpId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl UdpId {
    /// A small number that no other socket has at the same time; used again when this one is gone.
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// How packets are carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carriage {
    /// Differentiated Services: the upper six bits; the lower two are those of ECN.
    pub traffic_class: u8,
    /// Time to live, or hop limit; none: what the link's routers recommend, or 64.
    pub hop_limit: Option<u8>,
}

impl Carriage {
    /// Without the bits of ECN.
    pub(super) fn without_ecn(self) -> Self {
        Self { traffic_class: self.traffic_class & !ECN, ..self }
    }
}

impl From<&tcp::Config> for Carriage {
    fn from(config: &tcp::Config) -> Self {
        let &tcp::Config { traffic_class, hop_limit, .. } = config;
        Self { traffic_class, hop_limit }.without_ecn()
    }
}

/// The bits of ECN in a traffic class (RFC 3168 5).
const ECN: u8 = 3;

/// A frame from the link.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Its octets, from the Ethernet header on, or on a link of bare packets from the IP header on.
    pub bytes: &'a [u8],
    /// The link vouches for the checksums of TCP and UDP.
    pub checked: bool,
}

/// What came of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It was for the stack itself, or was dropped (and counted).
    Nothing,
    /// A segment of a connection.
    Segment {
        /// Whose.
        connection: TcpId,
        /// What it brought; the range of its placement is one of [`Frame::bytes`],
        received: tcp::Received,
        /// or, of a segment that has come in parts, of [`super::Stack::reassembled`].
        reassembled: bool,
    },
    /// A segment has completed the handshake of a connection that came to a watched port, and brings more:
    /// somebody is to be found for that, so events are to be polled; then the frame is to be handled once
    /// more.
    Again,
    /// A datagram.
    Datagram(Datagram),
}

impl Arrival {
    /// Whether the frame has had its turn, and counts.
    pub(super) fn is_last(&self) -> bool {
        !matches!(self, Self::Again)
    }
}

/// A datagram that has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The socket that it is for.
    pub socket: UdpId,
    /// Who sent it.
    pub from: SocketAddr,
    /// To which address.
    pub to: IpAddr,
    /// Traffic class, or type of service.
    pub traffic_class: u8,
    /// Hop limit, or time to live, as it arrived.
    pub hop_limit: u8,
    /// What it carries.
    pub payload: Payload,
}

/// Where the payload of a datagram is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// In [`Frame::bytes`].
    Frame(Range<usize>),
    /// In [`super::Stack::reassembled`], until the next frame.
    Reassembled,
}

/// Something that the user wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody connects to a watched port: the connection is half open, or stands already if a cookie made
    /// it. It wants room ([`super::Stack::set_receive_space`]) or to be released.
    Incoming {
        /// The port.
        listener: ListenerId,
        /// The connection.
        connection: TcpId,
    },
    /// Of a connection.
    Tcp {
        /// Which.
        connection: TcpId,
        /// What.
        event: tcp::Event,
    },
    /// A next hop has become known, or could not be found: datagrams that waited for it may be composed
    /// again, or fail.
    Neighbour {
        /// The address that [`DatagramError::Unresolved`] named.
        next_hop: IpAddr,
        /// Whether it is known now.
        found: bool,
    },
    /// There were more of [`Event::Neighbour`] than could be kept: whatever waits is to be composed again.
    Neighbours,
    /// The destination of datagrams does not want them (ICMP).
    Refused {
        /// Who sent them.
        socket: UdpId,
        /// Where to.
        to: SocketAddr,
    },
}

/// A frame to be sent, of which the stack has written the headers. The user copies the payload behind them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departure {
    /// Octets written to the front of the buffer.
    pub headers: usize,
    /// The payload: offsets of the stream, or of the datagram from 0.
    pub payload: Range<u64>,
    /// Whose stream it is.
    pub of: Option<TcpId>,
    /// A checksum that is still to be computed: by the link, or by [`super::Stack::seal`].
    pub checksum: Option<Checksum>,
    /// The link is to cut the payload into TCP segments of so many octets.
    pub segment: Option<u16>,
    /// It is for an address of the stack itself: it goes to [`super::Stack::handle_looped`] as it is, without
    /// its checksum and uncut, and not to the link.
    pub loops: bool,
}

impl Departure {
    /// A frame for the link that is all headers.
    pub(super) fn bare(headers: usize) -> Self {
        Self { headers, payload: 0..0, of: None, checksum: None, segment: None, loops: false }
    }

    /// Octets of the payload.
    #[expect(clippy::len_without_is_empty, reason = "a frame is never empty")]
    pub fn len(&self) -> usize {
        self.headers + (self.payload.end - self.payload.start) as usize
    }
}

/// A checksum from `start` to the end of the frame, whose field has the sum of the pseudo-header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// The first octet that it covers.
    pub start: u16,
    /// Where the field is, from the beginning of the frame.
    pub at: u16,
}

/// Why a connection cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConnectError {
    /// Nothing leads there: no own address of its family, or neither a prefix nor a gateway.
    #[error("no route to the peer")]
    NoRoute,
    /// A group, or none, or the very end that is to connect: nobody there can be connected to.
    #[error("the address is not one that can be connected to")]
    BadAddress,
    /// The connection exists already.
    #[error("there is a connection between these ports already")]
    InUse,
    /// All ephemeral ports to this peer are in use.
    #[error("no port is free")]
    NoPort,
    /// As many connections as the stack may have.
    #[error("too many connections")]
    TooMany,
}

/// Why a port cannot be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ListenError {
    /// Somebody watches it already.
    #[error("the port is in use")]
    InUse,
    /// All ports are in use.
    #[error("no port is free")]
    NoPort,
}

/// Why a port cannot be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BindError {
    /// Somebody has bound it already.
    #[error("the port is in use")]
    InUse,
    /// All ports are in use.
    #[error("no port is free")]
    NoPort,
}

/// Why a datagram cannot be sent (now).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DatagramError {
    /// The station of the next hop is being looked for: [`Event::Neighbour`] says when to try again.
    #[error("the next hop {next_hop} is not known yet")]
    Unresolved {
        /// What is waited for.
        next_hop: IpAddr,
    },
    /// It does not fit a packet of the path: [`super::Stack::cut_datagram`] sends it in parts.
    #[error("longer than the {fits} octets that a packet of the path takes")]
    Long {
        /// The longest payload of one packet.
        fits: usize,
    },
    /// There is no datagram of that length.
    #[error("longer than the {most} octets that a datagram can have")]
    TooLong {
        /// The longest payload of a datagram.
        most: usize,
    },
    /// Nothing leads there.
    #[error("no route to the peer")]
    NoRoute,
    /// A group, or none.
    #[error("the address is not one that datagrams can be sent to")]
    BadAddress,
    /// The socket is gone.
    #[error("the socket is closed")]
    Closed,
}
