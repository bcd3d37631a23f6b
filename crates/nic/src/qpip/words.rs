//! What users of QPIP's queue pairs say and are told.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use quipu_inet::stack::{Carriage, Checksum, Departure, TcpId};
use quipu_inet::tcp;

use crate::error::Fault;
use crate::types::QpId;

/// How the connection of a TCP queue pair is to be. Nothing is ever held back to be gathered (no Nagle).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSettings {
    /// What segments mean: messages if the peer is a queue pair, a stream if it may be any socket.
    pub mode: tcp::Mode,
    /// Probing of an idle peer; off unless asked for (RFC 9293 3.8.4, MUST-25).
    pub keep_alive: Option<tcp::KeepAlive>,
    /// Whether congestion may be marked instead of being told by loss (RFC 3168).
    pub ecn: bool,
    /// Nanoseconds for which what was sent may go unacknowledged before the peer is given up (RFC 9293
    /// 3.8.3). This and all other times are taken as within a millisecond to 36 years.
    pub user_timeout_ns: u64,
    /// The same for the SYN.
    pub connect_timeout_ns: u64,
    /// Differentiated Services of what is sent (RFC 9293 3.9.2, MUST-48): the upper six bits. The lower two
    /// are those of ECN, which are TCP's own, and must be 0.
    pub traffic_class: u8,
    /// Time to live, or hop limit, of what is sent (RFC 9293 3.9.2, MUST-49), at least 1; none: what the
    /// link's routers recommend, or 64.
    pub hop_limit: Option<u8>,
}

impl Default for TcpSettings {
    fn default() -> Self {
        let tcp::Config { keep_alive, ecn, user_timeout, connect_timeout, .. } =
            tcp::Config::default();
        Self {
            mode: tcp::Mode::Message,
            keep_alive,
            ecn,
            user_timeout_ns: user_timeout,
            connect_timeout_ns: connect_timeout,
            traffic_class: 0,
            hop_limit: None,
        }
    }
}

/// How long an acknowledgement waits for something that it could travel with. At the other end a send waits
/// for it: as long as an answer takes that is made at once, and no longer.
const ACK_DELAY_NS: u64 = 200_000;

/// What programs may ask for: sums with the time stay within 64 bits, and no timer is always over.
fn patience(ns: u64) -> u64 {
    ns.clamp(tcp::MILLISECOND, 1 << 60)
}

/// The bits of ECN in a traffic class.
const ECN: u8 = 3;

impl TcpSettings {
    /// Whether a connection can be like this.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), Fault> {
        let &Self { traffic_class, hop_limit, .. } = self;
        check_carriage(Carriage { traffic_class, hop_limit })
    }

    pub(super) fn to_config(self) -> tcp::Config {
        let keep_alive = self.keep_alive.map(|keep| tcp::KeepAlive {
            idle: patience(keep.idle),
            interval: patience(keep.interval),
            ..keep
        });
        tcp::Config {
            mode: self.mode,
            keep_alive,
            ecn: self.ecn,
            user_timeout: patience(self.user_timeout_ns),
            connect_timeout: patience(self.connect_timeout_ns),
            traffic_class: self.traffic_class,
            hop_limit: self.hop_limit,
            ack_delay: ACK_DELAY_NS,
            // The stack takes the lesser of these and what the link and the path allow.
            receive_mss: u16::MAX,
            path_mss: u16::MAX,
            ..tcp::Config::default()
        }
    }
}

/// Whether packets can be carried like this.
///
/// # Errors
/// What is wrong.
pub(super) fn check_carriage(carriage: Carriage) -> Result<(), Fault> {
    if carriage.traffic_class & ECN != 0 {
        return Err(Fault::Invalid(
            "the lower two bits of the traffic class belong to ECN, and programs cannot set them",
        ));
    }
    if carriage.hop_limit == Some(0) {
        return Err(Fault::Invalid("the hop limit must be at least 1"));
    }
    Ok(())
}

/// What happens to the connection of a TCP queue pair. Of `Closed`, `Failed` and `Aborted` one comes, as the
/// last, for every connection that was asked for or stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpChange {
    /// It stands: the queue pair is in RTS.
    Connected,
    /// The peer sends nothing more; what it has sent is received. This end may go on.
    PeerClosed,
    /// Both ends have closed, and everything sent is acknowledged: the queue pair is in ERR.
    Closed,
    /// The peer or the network has ended it: the queue pair is in ERR; or in INIT, with all that is posted,
    /// if nobody listened there or the peer did not want it, so that it may be tried again.
    Failed(tcp::Failure),
    /// This end has ended it: the program wanted that, or one of its requests was wrong, whose completion
    /// says so. The queue pair is in ERR, in RESET, or gone.
    Aborted,
}

/// A frame that stands in the caller's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameOut {
    /// Octets.
    pub len: usize,
    /// A checksum that the link computes; `None` where the link does not do that.
    pub checksum: Option<Checksum>,
    /// The link cuts the payload into segments of so many octets.
    pub segment: Option<u16>,
    /// What it is of.
    pub(crate) of: Sender,
}

/// What a frame is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sender {
    /// The stack itself.
    Stack,
    /// A connection.
    Connection(TcpId),
    /// The datagrams of a queue pair.
    Datagrams(QpId),
}

impl From<&Departure> for FrameOut {
    fn from(departure: &Departure) -> Self {
        let &Departure { checksum, segment, .. } = departure;
        let of = departure.of.map_or(Sender::Stack, Sender::Connection);
        Self { len: departure.len(), checksum, segment, of }
    }
}

/// Who sent a datagram; small, since it travels in completions. A [`SocketAddr`] otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    port: u16,
    /// An IPv6 address, or an IPv4 address mapped into it.
    address: [u8; 16],
}

impl From<SocketAddr> for Source {
    fn from(from: SocketAddr) -> Self {
        let address = match from.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        Self { port: from.port(), address: address.octets() }
    }
}

impl From<Source> for SocketAddr {
    fn from(source: Source) -> Self {
        Self::new(Ipv6Addr::from(source.address).to_canonical(), source.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Completion;

    #[test]
    fn a_source_is_the_address_that_it_was_made_of() {
        for text in ["10.1.2.3:4", "[fd00::5]:65535", "[::1]:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(SocketAddr::from(Source::from(address)), address);
        }
    }

    #[test]
    fn times_are_such_that_clocks_reach_them() {
        for (given, taken) in [(0, 1_000_000), (5_000_000, 5_000_000), (u64::MAX, 1 << 60)] {
            let keep = tcp::KeepAlive { idle: given, interval: given, probes: 1 };
            let settings = TcpSettings {
                keep_alive: Some(keep),
                user_timeout_ns: given,
                connect_timeout_ns: given,
                ..TcpSettings::default()
            };
            let config = settings.to_config();
            assert_eq!([config.user_timeout, config.connect_timeout], [taken; 2]);
            let keep = config.keep_alive.unwrap();
            assert_eq!([keep.idle, keep.interval], [taken; 2]);
        }
    }

    #[test]
    fn a_completion_stays_within_a_cache_line() {
        assert_eq!(size_of::<Completion>(), 48);
    }
}
