//! The messages that set a connection up, and what is said over it later. They travel over a TCP
//! connection, each as two bytes of length (big endian) and a body.
//!
//! ```text
//! requester                                 acceptor
//!    Request (addresses, attributes, queue pair) -->
//!                                   <-- Heard
//!                          <-- NoMatch | Reject | Accept (attributes, queue pair)
//!    Joined -->
//!         (the connection stays open: its end is the end of the VI's connection)
//!    Cause -->  or  <-- Cause
//! ```

use std::net::{IpAddr, Ipv6Addr};

use crate::address::{MAX_DISCRIMINATOR, NetAddress};
use crate::attributes::Attributes;

/// Longest body.
pub const MAX_LEN: usize = 512;
/// Bytes by which a queue pair is known to its peer.
pub const ENDPOINT_LEN: usize = 24;

const MAGIC: [u8; 4] = *b"QVIA";
const VERSION: u8 = 1;

/// A request for a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Whether both ends request (`VipConnectPeerRequest`).
    pub is_peer: bool,
    /// Tells this request from all others.
    pub nonce: u64,
    /// For how many milliseconds the requester waits; `u64::MAX` for ever.
    pub timeout_ms: u64,
    /// Who asks.
    pub local: NetAddress,
    /// Whom.
    pub remote: NetAddress,
    /// Its end of the connection.
    pub end: End,
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Attributes of the VI.
    pub attributes: Attributes,
    /// The queue pair.
    pub endpoint: [u8; ENDPOINT_LEN],
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The peer's RDMA write was refused here.
    WriteRefused,
    /// The peer's RDMA read was refused here.
    ReadRefused,
    /// A message met no receive.
    NoReceive,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Asks for a connection.
    Request(Box<Request>),
    /// Nobody waits here for that.
    NoMatch,
    /// The program does not want it.
    Reject,
    /// The program wants it.
    Accept(End),
    /// The requester has connected its queue pair.
    Joined,
    /// The request has come; the answer follows when the program has one.
    Heard,
    /// Why the connection ends, in the eyes of the end that had a request refused.
    Cause(Cause),
}

/// A message that cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl Message {
    /// The message with its length in front.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![0, 0];
        match self {
            Self::Request(request) => {
                out.push(1);
                request.write(&mut out);
            }
            Self::NoMatch => out.push(2),
            Self::Reject => out.push(3),
            Self::Accept(end) => {
                out.push(4);
                end.write(&mut out);
            }
            Self::Joined => out.push(5),
            Self::Cause(cause) => out.extend([6, *cause as u8]),
            Self::Heard => out.push(7),
        }
        // All fields are bounded: see MAX_LEN.
        let len = (out.len() - 2) as u16;
        out[..2].copy_from_slice(&len.to_be_bytes());
        out
    }

    /// Reads the body of a message.
    ///
    /// # Errors
    ///
    /// [`Malformed`] for what is not exactly one message of this version.
    pub fn parse(body: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader { bytes: body };
        let message = match reader.byte()? {
            1 => Self::Request(Box::new(Request::read(&mut reader)?)),
            2 => Self::NoMatch,
            3 => Self::Reject,
            4 => Self::Accept(End::read(&mut reader)?),
            5 => Self::Joined,
            6 => Self::Cause(match reader.byte()? {
                0 => Cause::WriteRefused,
                1 => Cause::ReadRefused,
                2 => Cause::NoReceive,
                _ => return Err(Malformed),
            }),
            7 => Self::Heard,
            _ => return Err(Malformed),
        };
        if reader.bytes.is_empty() { Ok(message) } else { Err(Malformed) }
    }
}

/// The body of the first message of a stream, and how many bytes it took.
///
/// # Errors
///
/// [`Malformed`] if its length is not legal. `Ok(None)` if it is not complete.
pub fn first_body(stream: &[u8]) -> Result<Option<(&[u8], usize)>, Malformed> {
    let [high, low, rest @ ..] = stream else { return Ok(None) };
    let len = usize::from(u16::from_be_bytes([*high, *low]));
    if len == 0 || len > MAX_LEN {
        return Err(Malformed);
    }
    Ok(rest.get(..len).map(|body| (body, 2 + len)))
}

impl Request {
    fn write(&self, out: &mut Vec<u8>) {
        out.extend(MAGIC);
        out.extend([VERSION, u8::from(self.is_peer)]);
        out.extend(self.nonce.to_be_bytes());
        out.extend(self.timeout_ms.to_be_bytes());
        for address in [&self.local, &self.remote] {
            let host = match address.host {
                IpAddr::V4(host) => host.to_ipv6_mapped(),
                IpAddr::V6(host) => host,
            };
            out.extend(host.octets());
            let discriminator = &address.discriminator;
            let len = discriminator.len().min(MAX_DISCRIMINATOR);
            out.push(len as u8);
            out.extend(&discriminator[..len]);
        }
        self.end.write(out);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        if reader.array()? != MAGIC || reader.byte()? != VERSION {
            return Err(Malformed);
        }
        let is_peer = reader.boolean()?;
        let (nonce, timeout_ms) = (reader.long()?, reader.long()?);
        let mut address = || {
            let host = Ipv6Addr::from(reader.array::<16>()?).to_canonical();
            let len = usize::from(reader.byte()?);
            if len > MAX_DISCRIMINATOR {
                return Err(Malformed);
            }
            Ok(NetAddress { host, discriminator: reader.take(len)?.to_vec() })
        };
        let (local, remote) = (address()?, address()?);
        let end = End::read(reader)?;
        Ok(Self { is_peer, nonce, timeout_ms, local, remote, end })
    }
}

impl End {
    fn write(&self, out: &mut Vec<u8>) {
        let Attributes { reliability, max_transfer, qos, rdma_write, rdma_read } = self.attributes;
        out.extend((reliability as u16).to_be_bytes());
        out.extend(max_transfer.to_be_bytes());
        out.extend(qos.to_be_bytes());
        out.extend([u8::from(rdma_write), u8::from(rdma_read)]);
        out.extend(self.endpoint);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let reliability = u16::from_be_bytes(reader.array()?);
        let max_transfer = reader.long()?;
        let qos = reader.long()?;
        let (rdma_write, rdma_read) = (reader.boolean()?, reader.boolean()?);
        // The level is set by the check.
        let rest = Attributes {
            reliability: crate::codes::Reliability::Delivery,
            max_transfer,
            qos,
            rdma_write,
            rdma_read,
        };
        let attributes = Attributes::checked(reliability, rest).map_err(|_| Malformed)?;
        Ok(Self { attributes, endpoint: reader.array()? })
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.bytes.split_at_checked(len).ok_or(Malformed)?;
        self.bytes = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.bytes.split_first_chunk().ok_or(Malformed)?;
        self.bytes = rest;
        Ok(*taken)
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn boolean(&mut self) -> Result<bool, Malformed> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed),
        }
    }

    fn long(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codes::Reliability;

    fn end() -> End {
        let attributes = Attributes {
            reliability: Reliability::Reception,
            max_transfer: 65_536,
            qos: 3,
            rdma_write: true,
            rdma_read: false,
        };
        End { attributes, endpoint: [7; ENDPOINT_LEN] }
    }

    fn messages() -> Vec<Message> {
        let request = Request {
            is_peer: true,
            nonce: 0x1234,
            timeout_ms: u64::MAX,
            local: NetAddress {
                host: "10.0.0.1".parse().unwrap(),
                discriminator: vec![1; MAX_DISCRIMINATOR],
            },
            remote: NetAddress {
                host: "fd00::1".parse().unwrap(),
                discriminator: vec![2; MAX_DISCRIMINATOR],
            },
            end: end(),
        };
        let mut all = vec![
            Message::Request(Box::new(request)),
            Message::NoMatch,
            Message::Reject,
            Message::Accept(end()),
            Message::Joined,
            Message::Heard,
        ];
        let causes = [Cause::WriteRefused, Cause::ReadRefused, Cause::NoReceive];
        all.extend(causes.map(Message::Cause));
        all
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        for message in messages() {
            let bytes = message.to_bytes();
            let (body, taken) = first_body(&bytes).unwrap().unwrap();
            assert_eq!(taken, bytes.len());
            assert_eq!(Message::parse(body), Ok(message));
        }
    }

    #[test]
    fn a_message_that_is_cut_or_has_bytes_to_spare_is_malformed() {
        for message in messages() {
            let bytes = message.to_bytes();
            for len in 0..bytes.len() {
                assert_eq!(first_body(&bytes[..len]), Ok(None));
            }
            for len in 2..bytes.len() {
                assert_eq!(Message::parse(&bytes[2..len]), Err(Malformed));
            }
            let longer = [&bytes[2..], &[0]].concat();
            assert_eq!(Message::parse(&longer), Err(Malformed));
        }
    }

    #[test]
    fn any_changed_byte_is_parsed_without_harm() {
        for message in messages() {
            let bytes = message.to_bytes();
            for at in 2..bytes.len() {
                for value in [0, 1, 0x7f, 0xff] {
                    let mut changed = bytes.clone();
                    changed[at] = value;
                    if let Ok(message) = Message::parse(&changed[2..]) {
                        assert_eq!(message.to_bytes(), changed, "what is taken is canonical");
                    }
                }
            }
        }
    }

    #[test]
    fn lengths_are_bounded() {
        assert_eq!(first_body(&[0, 0]), Err(Malformed));
        assert_eq!(first_body(&[2, 1]), Err(Malformed));
        assert_eq!(first_body(&[2, 0]), Ok(None));
    }
}
