//! Endpoints at UDP ports of their own: a name that is an address ([`Name::of_address`]) does not say
//! which queue pair the endpoint has. A UDP socket at that address answers this question, and no other.
//! The messages themselves go from queue pair to queue pair.
//!
//! A question has the number of the attempt to connect, which the answer repeats. An answer counts if it
//! comes from the address that was asked; it names a queue pair at the same IP address. So neither end
//! sends more bytes than it gets, or to another host.

use std::net::{IpAddr, SocketAddr};

use super::link::{FIRST_PAUSE_NS, Phase};
use super::packet::{HEAD, Head, Kind};
use super::{DatagramFabric, LinkId, Memory, Place};
use crate::name::Name;

/// Bytes of a question, and of an answer.
pub const LOOKUP_LEN: usize = HEAD + Name::WIRE_LEN;
/// In the number of a place: it is a UDP socket, not a queue pair.
const SOCKET: u32 = 1 << 31;

impl Place {
    /// The place of a UDP socket that is no queue pair's.
    #[must_use]
    pub fn of_socket(at: SocketAddr) -> Self {
        Self { ip: at.ip(), number: SOCKET | u32::from(at.port()) }
    }

    /// The address of the socket, if the place is one.
    #[must_use]
    pub fn socket(&self) -> Option<SocketAddr> {
        let is_socket = self.number & SOCKET != 0;
        is_socket.then(|| SocketAddr::new(self.ip, self.number as u16))
    }
}

/// The answer to a question, of an endpoint whose own name is `own`. None if the bytes are no question.
#[must_use]
pub fn answer_lookup(question: &[u8], own: &Name) -> Option<[u8; LOOKUP_LEN]> {
    let (head, rest) = Head::parse(question)?;
    if head.kind != Kind::Where || head.from == 0 || rest.len() != Name::WIRE_LEN {
        return None;
    }
    let mut out = [0; LOOKUP_LEN];
    let head = Head { kind: Kind::Here, seq: 0, to: head.from, from: 0, ack: 0, later: 0 };
    head.encode(&mut out);
    out[HEAD..].copy_from_slice(&own.to_bytes());
    Some(out)
}

/// Writes a question.
pub(super) fn ask(number: u64, out: &mut [u8]) -> usize {
    let head = Head { kind: Kind::Where, seq: 0, to: 0, from: number, ack: 0, later: 0 };
    head.encode(out);
    // As long as the answer: a forged question makes nobody send more than was sent.
    out[HEAD..LOOKUP_LEN].fill(0);
    LOOKUP_LEN
}

/// Which queue pair and which endpoint an answer names.
fn parse_answer(ip: IpAddr, rest: &[u8]) -> Option<Name> {
    let bytes: &[u8; Name::WIRE_LEN] = rest.try_into().ok()?;
    let Name { port, endpoint, incarnation } = Name::from_bytes(bytes)?;
    let is_known = incarnation != 0 && endpoint != Name::OF_ADDRESS;
    is_known.then(|| Name { port: SocketAddr::new(ip, port.port()), endpoint, incarnation })
}

impl<M: Memory> DatagramFabric<M> {
    /// An endpoint at an address of its own has said where it is: the connection to it begins.
    pub(super) fn handle_found(&mut self, id: LinkId, rest: &[u8]) -> bool {
        let now = self.now;
        let Some(link) = self.links.get_mut(id) else { return false };
        let Some(found) = parse_answer(link.peer.ip, rest) else { return false };
        let Phase::Connecting { hello, again_at, pause, is_due, .. } = &mut link.phase else {
            return false;
        };
        (hello.endpoint, hello.incarnation) = (found.endpoint, found.incarnation);
        (*again_at, *pause, *is_due) = (now, FIRST_PAUSE_NS, true);
        link.peer = Place::of(&found);
        self.wake(id);
        true
    }
}
