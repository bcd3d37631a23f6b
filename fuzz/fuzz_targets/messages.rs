//! Payloads of fixed layout, of RDMA and of rsockets: what is accepted survives being written and read again.
#![no_main]

/// Taken as it stands, since what rsockets say is nobody's interface.
#[path = "../../abi/rdmacm/src/rsocket/wire.rs"]
#[allow(dead_code)]
mod rsocket;
mod shares;

use libfuzzer_sys::fuzz_target;
use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::ddp::Header;
use quipu_iwarp::wire::hello::Hello;
use quipu_iwarp::wire::rdmap::{
    AtomicRequest, AtomicResponse, FlushRequest, Immediate, Opcode, ReadRequest,
};
use quipu_iwarp::wire::terminate::Terminate;
use quipu_iwarp::wire::{Payload, WireError};
use rsocket::{Greeting, Mapping, Message, ahead};
use shares::Shares;

static SHARES: Shares<12> = Shares::new([
    "control",
    "terminate",
    "read request",
    "atomic request",
    "atomic response",
    "immediate",
    "hello",
    "header",
    "flush request",
    "greeting",
    "mapping",
    "room in a mapping",
]);

/// A payload that must be of so many octets, and is, mostly.
fn stable<P: Payload + PartialEq + std::fmt::Debug>(
    name: &str,
    len: usize,
    parse: impl Fn(&[u8]) -> Result<P, WireError>,
    bytes: &[u8],
) {
    let mut bytes = bytes.to_vec();
    if bytes.last().is_none_or(|last| last % 8 != 0) {
        bytes.resize(len, 0);
    }
    if let Ok(value) = parse(&bytes) {
        SHARES.reach(name);
        let mut out = vec![0; value.wire_len()];
        value.emit(&mut out);
        assert_eq!(parse(&out), Ok(value));
    }
}

fuzz_target!(|input: &[u8]| {
    SHARES.begin();
    let Some((&which, bytes)) = input.split_first() else {
        return;
    };
    match which % 11 {
        0 => {
            let mut bytes = bytes.to_vec();
            bytes.iter_mut().take(1).for_each(|kind| *kind %= 5);
            stable("control", Control::LEN, Control::parse, &bytes);
        }
        1 => stable("terminate", bytes.len(), Terminate::parse, bytes),
        2 => stable("read request", ReadRequest::LEN, ReadRequest::parse, bytes),
        3 => stable("atomic request", AtomicRequest::LEN, AtomicRequest::parse, bytes),
        4 => stable("atomic response", AtomicResponse::LEN, AtomicResponse::parse, bytes),
        5 => stable("immediate", Immediate::LEN, Immediate::parse, bytes),
        8 => stable("flush request", FlushRequest::LEN, FlushRequest::parse, bytes),
        6 => hello(which, bytes),
        9 => greeting(which, bytes),
        10 => mapping(bytes),
        _ => {
            if let Ok(header) = Header::parse(bytes) {
                SHARES.reach("header");
                let mut out = vec![0; header.wire_len()];
                header.emit(&mut out);
                assert_eq!(Header::parse(&out), Ok(header));
            }
            let _ = bytes.first().map(|&octet| Opcode::parse(octet));
        }
    }
});

/// A hello, mostly behind its magic number and version, with numbers of 24 bits.
fn hello(which: u8, bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    if which < 200 {
        bytes.resize(bytes.len().max(64), which);
        bytes[..5].copy_from_slice(b"QUIP\x01");
        (bytes[5], bytes[7]) = (bytes[5] % 4, bytes[7] % 7);
        [12, 16, 20, 24].into_iter().for_each(|at| bytes[at] &= bytes[6] & 1);
    }
    if let Ok(hello) = Hello::parse(&bytes) {
        SHARES.reach("hello");
        assert_eq!(Hello::parse(&hello.to_bytes()), Ok(hello));
    }
}

/// The private data of an rsocket: where the peer may write.
fn greeting(which: u8, bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    if which < 200 {
        bytes.resize(bytes.len().max(Greeting::LEN), which);
        bytes[..8].copy_from_slice(b"RSK1\x00\x01\x00\x00");
        // Counts that may be.
        for (at, octets) in [(20, 1), (24, 2), (28, 2)] {
            bytes[at..at + octets].fill(0);
        }
        bytes[30] &= 7;
    }
    if let Some(greeting) = Greeting::decode(&bytes) {
        SHARES.reach("greeting");
        assert_eq!(Greeting::decode(&greeting.encode()), Some(greeting));
        assert!(greeting.table() >= greeting.ring);
        let end = u64::from(greeting.table()) + greeting.table_len();
        assert!(greeting.addr.checked_add(end).is_some());
    }
}

/// An entry of a peer's table, and what is said by immediate data, in memory that it writes.
fn mapping(bytes: &[u8]) {
    let Some((entry, rest)) = bytes.split_first_chunk() else { return };
    SHARES.reach("mapping");
    let mapping = Mapping::decode(entry);
    assert_eq!(Mapping::decode(&mapping.encode()), mapping);
    let mut word = [0; 8];
    rest.iter().zip(&mut word).for_each(|(from, to)| *to = *from);
    let near = u64::from(word[0]);
    for offset in [u64::from_le_bytes(word), mapping.offset.wrapping_add(near)] {
        let length = u64::from(word[1]);
        let Some((addr, room)) = mapping.reach(offset, length) else { continue };
        SHARES.reach("room in a mapping");
        let within = offset - mapping.offset;
        assert_eq!(addr, mapping.addr.wrapping_add(within));
        assert!(
            room <= length && within.checked_add(room).is_some_and(|end| end <= mapping.length)
        );
    }
    let told = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    let message = Message::decode(told);
    assert_eq!(Message::decode(message.encode()), message);
    assert!(ahead(told, mapping.length) < 1 << 30);
}
