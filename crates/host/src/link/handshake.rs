//! How two engines of one host get to know each other.
//!
//! ```text
//! caller                                        callee
//!   Knock { engine }                   -->
//!                                      <--      Hello { .. } + arena  or  Known { engine }
//!   Hello { engine, gid, everywhere, proof_addr } + arena -->
//!   Ready { number read }              -->
//!                                      <--      Ready { number read }
//!                                      <--      Admits { whether } + directory, list of shared pages
//!   Admits { whether } + directory, list of shared pages -->
//!   Carried messages of the adapters, and bells, both ways
//! ```
//!
//! `Known` says that the two have a link already, or one in the making, that the callee accepted.
//! Each side speaks for its own GID, which must be an address of this host, or for all addresses of this
//! host. It names an address where the other finds a secret number. A side that can say the number has access
//! to that process's memory, and only then is it shown the directory of regions and the list of shared pages.

use quipu_nic::Gid;

use super::probe::Number;

/// Changes whenever anything that two engines share changes its form.
const VERSION: u32 = 8;
const MAGIC: [u8; 4] = *b"QPLK";

/// Names an engine: random, chosen when it is opened.
pub(crate) type EngineName = [u8; 16];

/// What an engine tells of itself. Its arena comes as a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The sender.
    pub(crate) engine: EngineName,
    /// Its address.
    pub(crate) gid: Gid,
    /// Whether it has all other addresses of this host, too.
    pub(crate) everywhere: bool,
    /// Where its proof is in the sender's memory (see `probe`); 0 if nobody is to look.
    pub(crate) proof_addr: u64,
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
    /// The sender has mapped the arena; the number that it read in the receiver's memory.
    Ready(Option<Number>),
    /// Whether the sender lets the receiver into its memory. If so the directory comes with it.
    Admits(bool),
    /// A message between the adapters.
    Carried(&'a [u8]),
    /// Wakes the receiver if it sleeps, and means nothing else.
    Bell,
}

const KNOCK: u8 = 1;
const KNOWN: u8 = 2;
const HELLO: u8 = 3;
const READY: u8 = 4;
/// The first byte of a carried message.
pub(crate) const CARRIED: u8 = 5;
const ADMITS: u8 = 6;
/// The one byte of a bell.
pub(crate) const BELL: u8 = 7;

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
                out.extend_from_slice(&hello.gid.0);
                out.push(u8::from(hello.everywhere));
                out.extend_from_slice(&hello.proof_addr.to_le_bytes());
            }
            Self::Ready(number) => {
                out.push(READY);
                out.extend(number.iter().flatten());
            }
            Self::Admits(whether) => out.extend_from_slice(&[ADMITS, u8::from(*whether)]),
            Self::Carried(bytes) => {
                out.push(CARRIED);
                out.extend_from_slice(bytes);
            }
            Self::Bell => out.push(BELL),
        }
        out
    }

    /// Reads a message. `None` for what no engine of this version says.
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        Some(match (kind, rest) {
            (CARRIED, rest) => Self::Carried(rest),
            (BELL, []) => Self::Bell,
            (READY, []) => Self::Ready(None),
            (READY, number) => Self::Ready(Some(number.try_into().ok()?)),
            (ADMITS, [whether @ (0 | 1)]) => Self::Admits(*whether == 1),
            (KNOCK | KNOWN | HELLO, rest) => {
                let (engine, rest) = rest
                    .strip_prefix(&MAGIC)?
                    .strip_prefix(&VERSION.to_le_bytes())?
                    .split_first_chunk()?;
                match (kind, rest) {
                    (KNOCK, []) => Self::Knock(*engine),
                    (KNOWN, []) => Self::Known(*engine),
                    (HELLO, rest) => {
                        let (gid, rest) = rest.split_first_chunk()?;
                        let (everywhere, addr) = rest.split_first()?;
                        let everywhere = match everywhere {
                            0 => false,
                            1 => true,
                            _ => return None,
                        };
                        let proof_addr = u64::from_le_bytes(addr.try_into().ok()?);
                        Self::Hello(Hello {
                            engine: *engine,
                            gid: Gid(*gid),
                            everywhere,
                            proof_addr,
                        })
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
        let (engine, gid, proof_addr) = ([1; 16], Gid([2; 16]), 0x1234_5678_9abc);
        let hello = Hello { engine, gid, everywhere: true, proof_addr };
        for message in [
            Message::Knock([3; 16]),
            Message::Known([4; 16]),
            Message::Hello(hello),
            Message::Ready(Some([5; 16])),
            Message::Ready(None),
            Message::Admits(true),
            Message::Admits(false),
            Message::Carried(b"anything"),
            Message::Bell,
        ] {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Some(message));
            if bytes[0] == CARRIED {
                continue;
            }
            for cut in 0..bytes.len() {
                // Without its number, "ready" says that there is no access.
                let ready = bytes[0] == READY && cut == 1;
                assert_eq!(Message::decode(&bytes[..cut]).is_some(), ready);
            }
            if bytes != [READY] {
                assert_eq!(Message::decode(&[&bytes[..], &[0]].concat()), None);
            }
        }
        assert_eq!(Message::decode(&[READY, 0]), None);
        assert_eq!(Message::decode(&[ADMITS, 2]), None);
        assert_eq!(Message::decode(&[9]), None);
    }
}
