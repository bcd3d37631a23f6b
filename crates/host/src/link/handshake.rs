//! How two engines of one host get to know each other.
//!
//! ```text
//! caller                                   callee
//!   Knock { engine }              -->
//!                                 <--      Hello + arena, directory, bell     or  Known
//!   Hello + arena, directory, bell -->
//!   Ready { access }              -->
//!                                 <--      Ready { access }
//!   Carried messages of the adapters, both ways
//! ```
//!
//! `Known` says that the two have a link already, or one in the making, that the callee accepted.
//! `access` says whether the sender can reach into the memory of the receiver.

use super::probe::NONCE_BYTES;

/// Changes whenever anything that two engines share changes its form.
const VERSION: u32 = 1;
const MAGIC: [u8; 4] = *b"QPLK";

/// Names an engine: random, chosen when it is opened.
pub(crate) type EngineName = [u8; 16];

/// What an engine tells of itself. Its memory and bell come as descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The sender.
    pub(crate) engine: EngineName,
    /// A number in the sender's memory, by which the receiver tests its access.
    pub(crate) nonce: [u8; NONCE_BYTES],
    /// Where the number is.
    pub(crate) nonce_addr: u64,
}

/// A message on the socket of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message<'a> {
    /// The first word of the caller.
    Knock(EngineName),
    /// There is a link already.
    Known(EngineName),
    /// Who the sender is.
    Hello(Hello),
    /// The sender has mapped everything; whether it can access the receiver's memory.
    Ready(bool),
    /// A message between the adapters.
    Carried(&'a [u8]),
}

const KNOCK: u8 = 1;
const KNOWN: u8 = 2;
const HELLO: u8 = 3;
const READY: u8 = 4;
/// The first byte of a carried message.
pub(crate) const CARRIED: u8 = 5;

impl<'a> Message<'a> {
    /// The bytes of a message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        let introduce = |out: &mut Vec<u8>, kind, engine: &EngineName| {
            out.push(kind);
            out.extend_from_slice(&MAGIC);
            out.extend_from_slice(&VERSION.to_le_bytes());
            out.extend_from_slice(engine);
        };
        match self {
            Self::Knock(engine) => introduce(&mut out, KNOCK, engine),
            Self::Known(engine) => introduce(&mut out, KNOWN, engine),
            Self::Hello(hello) => {
                introduce(&mut out, HELLO, &hello.engine);
                out.extend_from_slice(&hello.nonce);
                out.extend_from_slice(&hello.nonce_addr.to_le_bytes());
            }
            Self::Ready(access) => out.extend_from_slice(&[READY, u8::from(*access)]),
            Self::Carried(bytes) => {
                out.push(CARRIED);
                out.extend_from_slice(bytes);
            }
        }
        out
    }

    /// Reads a message. `None` for what no engine of this version says.
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        Some(match (kind, rest) {
            (CARRIED, rest) => Self::Carried(rest),
            (READY, [access @ (0 | 1)]) => Self::Ready(*access == 1),
            (KNOCK | KNOWN | HELLO, rest) => {
                let (engine, rest) = rest
                    .strip_prefix(&MAGIC)?
                    .strip_prefix(&VERSION.to_le_bytes())?
                    .split_first_chunk()?;
                match (kind, rest) {
                    (KNOCK, []) => Self::Knock(*engine),
                    (KNOWN, []) => Self::Known(*engine),
                    (HELLO, rest) => {
                        let (nonce, rest) = rest.split_first_chunk()?;
                        let nonce_addr = u64::from_le_bytes(rest.try_into().ok()?);
                        Self::Hello(Hello { engine: *engine, nonce: *nonce, nonce_addr })
                    }
                    _ => return None,
                }
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_and_nonsense_is_refused() {
        let hello = Hello { engine: [1; 16], nonce: [2; 16], nonce_addr: 0x1234_5678_9abc };
        for message in [
            Message::Knock([3; 16]),
            Message::Known([4; 16]),
            Message::Hello(hello),
            Message::Ready(true),
            Message::Ready(false),
            Message::Carried(b"anything"),
        ] {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Some(message));
            if bytes[0] != CARRIED {
                for cut in 0..bytes.len() {
                    assert_eq!(Message::decode(&bytes[..cut]), None);
                }
                let longer = [&bytes[..], &[0]].concat();
                assert_eq!(Message::decode(&longer), None);
            }
        }
        assert_eq!(Message::decode(&[READY, 2]), None);
        assert_eq!(Message::decode(&[9]), None);
    }
}
