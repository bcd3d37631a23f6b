//! What the two ends of a connection tell each other before it exists.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::str::FromStr;

use quipu_host::nic::{Gid, QpNum};

/// One end of a connection to be: where a queue pair is, and the sequence number that it begins
/// with. The ends exchange these by any means: a file, a command line, a TCP connection.
///
/// ```
/// let text = "192.0.2.7/0xc35001/0x123456";
/// let endpoint: quipu::Endpoint = text.parse().unwrap();
/// assert_eq!(endpoint.qp_num.port(), 50000);
/// assert_eq!(endpoint.to_string(), text);
/// assert_eq!(quipu::Endpoint::from_bytes(&endpoint.to_bytes()), endpoint);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// The device's GID.
    pub gid: Gid,
    /// The queue pair's number.
    pub qp_num: QpNum,
    /// The first packet sequence number it sends, 24 bits.
    pub psn: u32,
}

impl Endpoint {
    /// Bytes of [`to_bytes`](Self::to_bytes).
    pub const WIRE_LEN: usize = 24;

    /// The endpoint as bytes: GID, number and sequence number, in network order.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::WIRE_LEN] {
        let mut out = [0; Self::WIRE_LEN];
        out[..16].copy_from_slice(&self.gid.0);
        out[16..20].copy_from_slice(&self.qp_num.0.to_be_bytes());
        out[20..].copy_from_slice(&self.psn.to_be_bytes());
        out
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::WIRE_LEN]) -> Self {
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[..16]);
        let word = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let bits = 0xff_ffff;
        Self { gid: Gid(gid), qp_num: QpNum(word(16) & bits), psn: word(20) & bits }
    }

    /// Sends this endpoint over a stream, such as a TCP connection, and returns the other end's.
    ///
    /// # Errors
    ///
    /// What the stream reports.
    pub fn exchange(&self, stream: &mut (impl Read + Write)) -> io::Result<Self> {
        stream.write_all(&self.to_bytes())?;
        stream.flush()?;
        let mut theirs = [0; Self::WIRE_LEN];
        stream.read_exact(&mut theirs)?;
        Ok(Self::from_bytes(&theirs))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:#08x}/{:#08x}", IpAddr::from(self.gid), self.qp_num.0, self.psn)
    }
}

/// A text is no endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an endpoint is ADDRESS/QPN/PSN, such as 192.0.2.7/0xc35001/0x123456")]
pub struct EndpointSyntaxError;

impl FromStr for Endpoint {
    type Err = EndpointSyntaxError;

    fn from_str(text: &str) -> Result<Self, EndpointSyntaxError> {
        let mut parts = text.split('/');
        let mut next = || parts.next().ok_or(EndpointSyntaxError);
        let (address, qp_num, psn) = (next()?, next()?, next()?);
        let number = |text: &str| {
            let hex = text.strip_prefix("0x").ok_or(EndpointSyntaxError)?;
            let number = u32::from_str_radix(hex, 16).map_err(|_| EndpointSyntaxError)?;
            if number <= 0xff_ffff { Ok(number) } else { Err(EndpointSyntaxError) }
        };
        let address: IpAddr = address.parse().map_err(|_| EndpointSyntaxError)?;
        let endpoint =
            Self { gid: Gid::from(address), qp_num: QpNum(number(qp_num)?), psn: number(psn)? };
        if parts.next().is_some() { Err(EndpointSyntaxError) } else { Ok(endpoint) }
    }
}
