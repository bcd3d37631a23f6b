//! What engines of one host say to each other: on the socket between them, and, carried there, between
//! their adapters. Most have the kind, the magic number and the version of a message.
#![no_main]

/// Taken as it stands, since a host's handshake is nobody's interface.
#[path = "../../crates/host/src/link/handshake.rs"]
#[allow(dead_code)]
mod handshake;
mod shares;

/// What `handshake` needs of its neighbours.
mod probe {
    pub(crate) type Number = [u8; 16];
}

use handshake::Message;
use libfuzzer_sys::fuzz_target;
use quipu_iwarp::wire::hello::{Features, Hello, Kind, LEN, Reason, Service};
use quipu_nic::LinkMessage;
use shares::Shares;

static SHARES: Shares<9> = Shares::new([
    "knock", "known", "hello", "request", "accept", "reject", "close", "fetch", "fetched",
]);

/// The same bytes behind what blind chance does not find: the beginning of an introduction, or a number of a
/// message of adapters, with a hello where there is one.
fn steered(how: u8, bytes: &[u8]) -> Vec<u8> {
    let word = u64::from(how % 6 + 1).to_ne_bytes();
    let mut out = match how % 8 {
        0..=2 => {
            let mut out = Message::Knock([0; 16]).encode();
            out.truncate(out.len() - 16);
            out[0] = how % 8 + 1;
            // As long as it must be, mostly.
            let len = if how % 8 == 2 { 16 + 16 + 1 + 8 } else { 16 };
            let mut rest = bytes.to_vec();
            rest.resize(if how & 0x80 == 0 { len } else { rest.len() }, how);
            if how % 8 == 2 && rest.len() == len {
                // Whether the engine has all addresses.
                rest[32] &= 1;
            }
            out.extend(rest);
            return out;
        }
        _ => word.to_vec(),
    };
    let (head, hello) = match how % 6 {
        0 => (24, true),
        1 | 4 => (24, false),
        2 => (8, true),
        3 => (8, false),
        _ => (16, false),
    };
    let mut rest = bytes.to_vec();
    rest.resize(rest.len().max(head), how);
    out.extend(rest.drain(..head));
    if hello {
        let kind = [Kind::Request, Kind::Accept, Kind::Reject(Reason::Other(how))];
        let made = Hello {
            kind: kind[usize::from(how >> 3) % 3],
            path_mtu: how % 6,
            features: Features(u32::from(how)),
            dest_qpn: 1,
            source_qpn: 2,
            rq_psn: 3,
            sq_psn: 4,
            service: Service::Rc,
            source_gid: [how; 16],
            dest_gid: [1; 16],
        };
        let mut made = made.to_bytes();
        // Changed a little.
        for (octet, change) in made.iter_mut().skip(5).zip(rest.iter().take(LEN)) {
            *octet = if how & 0x80 != 0 { *change } else { *octet };
        }
        out.extend(made);
    } else {
        out.extend(rest);
    }
    out
}

fuzz_target!(|input: &[u8]| {
    SHARES.begin();
    let Some((&how, bytes)) = input.split_first() else { return };
    let made = if how & 0x40 == 0 { steered(how, bytes) } else { bytes.to_vec() };
    if let Some(message) = Message::decode(&made) {
        assert_eq!(message.encode(), made, "one form for each message");
        match message {
            Message::Knock(_) => SHARES.reach("knock"),
            Message::Known(_) => SHARES.reach("known"),
            Message::Hello(_) => SHARES.reach("hello"),
            Message::Carried(bytes) => carried(bytes),
            _ => {}
        }
    }
    carried(&made);
});

fn carried(bytes: &[u8]) {
    if let Some(message) = LinkMessage::decode(bytes) {
        SHARES.reach(match message {
            LinkMessage::Request { .. } => "request",
            LinkMessage::Accept { .. } => "accept",
            LinkMessage::Reject { .. } => "reject",
            LinkMessage::Close { .. } => "close",
            LinkMessage::Fetch { .. } => "fetch",
            LinkMessage::Fetched { .. } => "fetched",
        });
        let mut again = Vec::new();
        message.encode(&mut again);
        assert_eq!(LinkMessage::decode(&again), Some(message));
    }
}
