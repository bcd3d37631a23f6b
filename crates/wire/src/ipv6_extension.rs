//! The extension headers of IPv6 (RFC 8200 4): what stands between the header and the upper layer.

use crate::field::{put, u16_at, u32_at};
use crate::ipv6;

/// Protocol numbers (IANA) that mean a header of this module.
pub mod next_header {
    /// Hop-by-Hop Options (RFC 8200 4.3).
    pub const HOP_BY_HOP: u8 = 0;
    /// Routing (RFC 8200 4.4).
    pub const ROUTING: u8 = 43;
    /// Fragment (RFC 8200 4.5).
    pub const FRAGMENT: u8 = 44;
    /// There is nothing behind it (RFC 8200 4.7).
    pub const NONE: u8 = 59;
    /// Destination Options (RFC 8200 4.6).
    pub const DESTINATION: u8 = 60;
}

/// Length of a fragment header.
pub const FRAGMENT_LEN: usize = 8;
/// Extension headers of a packet, at most: nobody needs more (RFC 8504 5.3).
pub const MAX_HEADERS: usize = 8;
/// Options of a packet, padding included, at most (RFC 8504 5.3).
pub const MAX_OPTIONS: usize = 64;

/// Parameter Problem codes (RFC 4443 3.4, RFC 7112 5).
pub mod problem {
    /// A field has a value that makes no sense.
    pub const ERRONEOUS_FIELD: u8 = 0;
    /// A Next Header that this node does not know.
    pub const UNKNOWN_NEXT_HEADER: u8 = 1;
    /// An option that this node does not know.
    pub const UNKNOWN_OPTION: u8 = 2;
    /// The first fragment does not have all headers.
    pub const INCOMPLETE_HEADERS: u8 = 3;
}

/// A fragment header (RFC 8200 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// What the payload of the whole packet begins with.
    pub next_header: u8,
    /// Where this part stands in it: octets, a multiple of eight.
    pub offset: u16,
    /// It is not the last one.
    pub more: bool,
    /// Tells the fragments of one packet from those of others.
    pub identification: u32,
}

impl Fragment {
    fn parse(header: &[u8; FRAGMENT_LEN]) -> Self {
        let word = u16_at(header, 2);
        Self {
            next_header: header[0],
            offset: word & !7,
            more: word & 1 != 0,
            identification: u32_at(header, 4),
        }
    }

    /// Writes the header to the front of `out` and says how long it is.
    ///
    /// # Panics
    /// If `out` is shorter than [`FRAGMENT_LEN`].
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let word = self.offset & !7 | u16::from(self.more);
        put(out, 0, [self.next_header, 0]);
        put(out, 2, word.to_be_bytes());
        put(out, 4, self.identification.to_be_bytes());
        FRAGMENT_LEN
    }
}

/// What the extension headers lead to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walk {
    /// The upper layer.
    Upper {
        /// Its protocol: none of [`next_header`], save [`next_header::NONE`].
        protocol: u8,
        /// Where that number stands, in the place that [`Refusal::Problem`] counts from.
        field: i32,
        /// Where it begins: octets behind the first extension header's first.
        at: usize,
    },
    /// A part of a packet.
    Fragment {
        /// Its header.
        fragment: Fragment,
        /// Where its octets begin.
        at: usize,
    },
}

/// Why a packet is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It is dropped without a word.
    Discard,
    /// It is dropped, and the sender gets a Parameter Problem (RFC 4443 3.4).
    Problem {
        /// One of [`problem`].
        code: u8,
        /// Where the fault is: octets behind the first extension header's first; negative in the IPv6 header.
        at: i32,
        /// Also if the packet went to a group (RFC 8200 4.2).
        even_to_group: bool,
    },
}

impl Refusal {
    /// A Next Header that nobody knows: the field at `at`.
    fn unknown(at: i32) -> Self {
        Self::Problem { code: problem::UNKNOWN_NEXT_HEADER, at, even_to_group: false }
    }
}

/// Where the Next Header field of the IPv6 header stands, seen from the end of that header.
pub const FIRST_FIELD: i32 = 6 - ipv6::LEN as i32;

/// Goes through the headers in `bytes`, of which the first is of kind `first`, as RFC 8200 4 says for the
/// node that the packet has come to. A fragment that is the whole packet is none (RFC 6946 4).
///
/// `behind_fragment`: `bytes` are what fragments were put together to, so that no Hop-by-Hop Options and no
/// further fragment can come.
///
/// # Errors
/// Headers that are cut short, too many, in an impossible order, or that nobody knows, and options that ask
/// for it.
pub fn walk(first: u8, bytes: &[u8], behind_fragment: bool) -> Result<Walk, Refusal> {
    let (mut kind, mut field, mut at) = (first, FIRST_FIELD, 0);
    let mut options = 0;
    for number in 0..=MAX_HEADERS {
        let rest = bytes.get(at..).ok_or(Refusal::Discard)?;
        let next = match kind {
            // RFC 8200 4: it stands first or nowhere.
            next_header::HOP_BY_HOP if number > 0 || behind_fragment => {
                return Err(Refusal::unknown(field));
            }
            next_header::HOP_BY_HOP | next_header::DESTINATION => {
                let header = sized(rest)?;
                check_options(header, at, &mut options)?;
                (header[0], header.len())
            }
            next_header::ROUTING => {
                let header = sized(rest)?;
                // RFC 8200 4.4, RFC 5095 3: whoever is at its end need not know the type; nobody forwards.
                if header[3] != 0 {
                    let (code, at) = (problem::ERRONEOUS_FIELD, at as i32 + 2);
                    return Err(Refusal::Problem { code, at, even_to_group: false });
                }
                (header[0], header.len())
            }
            next_header::FRAGMENT if behind_fragment => return Err(Refusal::Discard),
            next_header::FRAGMENT => {
                let (header, _) = rest.split_first_chunk().ok_or(Refusal::Discard)?;
                let fragment = Fragment::parse(header);
                if fragment.more || fragment.offset > 0 {
                    return Ok(Walk::Fragment { fragment, at: at + FRAGMENT_LEN });
                }
                (fragment.next_header, FRAGMENT_LEN)
            }
            protocol => return Ok(Walk::Upper { protocol, field, at }),
        };
        (kind, field, at) = (next.0, at as i32, at + next.1);
    }
    Err(Refusal::Discard)
}

/// A header whose second octet is its length: in units of eight octets, the first unit not counted.
fn sized(rest: &[u8]) -> Result<&[u8], Refusal> {
    let len = rest.get(1).map_or(usize::MAX, |units| (usize::from(*units) + 1) * 8);
    rest.get(..len).ok_or(Refusal::Discard)
}

/// RFC 8200 4.2: an option that nobody knows says itself what is to be done. None is known but padding.
fn check_options(header: &[u8], start: usize, count: &mut usize) -> Result<(), Refusal> {
    const PAD1: u8 = 0;
    const PADN: u8 = 1;
    let mut at = 2;
    while at < header.len() {
        *count += 1;
        if *count > MAX_OPTIONS {
            return Err(Refusal::Discard);
        }
        let kind = header[at];
        if kind == PAD1 {
            at += 1;
            continue;
        }
        let action = kind >> 6;
        if kind != PADN && action != 0 {
            let even_to_group = action == 2;
            let (code, at) = (problem::UNKNOWN_OPTION, (start + at) as i32);
            let problem = Refusal::Problem { code, at, even_to_group };
            return Err(if action == 1 { Refusal::Discard } else { problem });
        }
        let len = *header.get(at + 1).ok_or(Refusal::Discard)?;
        at += 2 + usize::from(len);
    }
    if at == header.len() { Ok(()) } else { Err(Refusal::Discard) }
}

#[cfg(test)]
mod tests {
    use super::next_header::*;
    use super::*;

    const TCP: u8 = 6;
    const PADDED: [u8; 6] = [1, 4, 0, 0, 0, 0];

    fn options(next: u8, options: [u8; 6]) -> Vec<u8> {
        [&[next, 0][..], &options].concat()
    }

    /// Every last header here has eight octets, of which the first is the number of what follows.
    fn upper(protocol: u8, at: usize) -> Result<Walk, Refusal> {
        let field = if at == 0 { FIRST_FIELD } else { at as i32 - 8 };
        Ok(Walk::Upper { protocol, field, at })
    }

    fn problem(code: u8, at: i32, even_to_group: bool) -> Result<Walk, Refusal> {
        Err(Refusal::Problem { code, at, even_to_group })
    }

    #[test]
    fn nothing_in_between() {
        assert_eq!(walk(TCP, &[], false), upper(TCP, 0));
        assert_eq!(walk(NONE, &[1, 2], false), upper(NONE, 0));
    }

    #[test]
    fn all_kinds_in_a_row() {
        let bytes = [
            options(DESTINATION, [0; 6]),
            options(ROUTING, PADDED),
            vec![FRAGMENT, 0, 0, 0, 0, 0, 0, 0],
            vec![TCP, 0, 0, 0, 0, 0, 0, 9],
            vec![0xee],
        ]
        .concat();
        assert_eq!(walk(HOP_BY_HOP, &bytes, false), upper(TCP, 32), "RFC 6946: an atomic fragment");
        for len in 0..32 {
            assert_eq!(walk(HOP_BY_HOP, &bytes[..len], false), Err(Refusal::Discard), "{len}");
        }
    }

    #[test]
    fn a_fragment() {
        let bytes = [17, 0, 0x05, 0xa9, 1, 2, 3, 4, 0xee];
        let fragment =
            Fragment { next_header: 17, offset: 1448, more: true, identification: 0x0102_0304 };
        assert_eq!(walk(FRAGMENT, &bytes, false), Ok(Walk::Fragment { fragment, at: 8 }));
        assert_eq!(walk(FRAGMENT, &bytes, true), Err(Refusal::Discard));
    }

    #[test]
    fn a_fragment_is_what_was_written() {
        let ends = [(0, true), (8, true), (65_528, false), (1_448, false)];
        for (offset, more) in ends {
            let fragment = Fragment { next_header: 17, offset, more, identification: 0x8000_0001 };
            let mut bytes = [0xff; FRAGMENT_LEN + 1];
            assert_eq!(fragment.emit(&mut bytes), FRAGMENT_LEN);
            assert_eq!((bytes[1], bytes[3] & 6, bytes[8]), (0, 0, 0xff), "reserved bits are zero");
            let at = FRAGMENT_LEN;
            assert_eq!(walk(FRAGMENT, &bytes, false), Ok(Walk::Fragment { fragment, at }));
        }
    }

    #[test]
    fn hop_by_hop_options_come_first() {
        let bytes = [options(HOP_BY_HOP, PADDED), options(TCP, PADDED)].concat();
        assert_eq!(walk(DESTINATION, &bytes, false), problem(1, 0, false));
        assert_eq!(walk(HOP_BY_HOP, &bytes, true), problem(1, FIRST_FIELD, false));
    }

    #[test]
    fn source_routes_are_refused_and_finished_ones_are_passed_over() {
        for kind in [0, 2, 99] {
            let mut bytes = [TCP, 0, kind, 0, 0, 0, 0, 0];
            assert_eq!(walk(ROUTING, &bytes, false), upper(TCP, 8));
            bytes[3] = 1;
            assert_eq!(walk(ROUTING, &bytes, false), problem(0, 2, false));
        }
    }

    #[test]
    fn an_unknown_option_says_what_happens() {
        let with = |kind| options(TCP, [0, kind, 2, 9, 9, 0]);
        let bytes = |kind| [options(DESTINATION, PADDED), with(kind)].concat();
        let of = |kind| walk(HOP_BY_HOP, &bytes(kind), false);
        assert_eq!(of(0x05), upper(TCP, 16));
        assert_eq!(of(0x45), Err(Refusal::Discard));
        assert_eq!(of(0x85), problem(2, 11, true));
        assert_eq!(of(0xc5), problem(2, 11, false));
    }

    #[test]
    fn options_do_not_leave_their_header() {
        for wrong in [[1, 5, 0, 0, 0, 0], [0, 0, 0, 0, 0, 5]] {
            assert_eq!(walk(DESTINATION, &options(TCP, wrong), false), Err(Refusal::Discard));
        }
    }

    #[test]
    fn work_is_bounded() {
        let chain = |count| options(DESTINATION, PADDED).repeat(count);
        let mut bytes = [chain(MAX_HEADERS - 1), options(TCP, PADDED)].concat();
        assert_eq!(walk(DESTINATION, &bytes, false), upper(TCP, 8 * MAX_HEADERS));
        bytes = [chain(MAX_HEADERS), options(TCP, PADDED)].concat();
        assert_eq!(walk(DESTINATION, &bytes, false), Err(Refusal::Discard));
        let mut padding = vec![0; 8 * (1 + 255)];
        (padding[0], padding[1]) = (TCP, 255);
        assert_eq!(walk(DESTINATION, &padding, false), Err(Refusal::Discard));
    }
}
