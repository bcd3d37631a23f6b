//! Messages of SDP against bytes written by hand, and against all that can be drawn.

use std::net::{IpAddr, Ipv6Addr};

use proptest::prelude::*;
use quipu_wire::sdp::{
    Body, Flags, HELLO_ACK_LEN, HELLO_LEN, Header, Hello, HelloAck, MAX_HEADERS_LEN, Memory,
    Message, Mode, VERSION, emit_headers,
};
use quipu_wire::{Stag, WireError};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(&pair.iter().collect::<String>(), 16).expect("hex"))
        .collect()
}

fn header(bufs: u16, mseq: u32, mseq_ack: u32) -> Header {
    Header { flags: Flags::default(), bufs, mseq, mseq_ack }
}

fn whole(header: &Header, body: &Body, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; MAX_HEADERS_LEN];
    let len = emit_headers(header, body, payload.len() as u32, &mut out);
    out.truncate(len);
    out.extend_from_slice(payload);
    out
}

fn hello() -> Hello {
    Hello {
        bufs: 64,
        version: VERSION,
        can_invalidate: false,
        max_adverts: 1,
        wanted_peer_size: 0x8000,
        local_size: 0x8000,
        port: 50000,
        source: "10.0.0.1".parse().unwrap(),
        destination: "10.0.0.2".parse().unwrap(),
    }
}

#[test]
fn a_hello_of_ofed() {
    let mut bytes = hex("00000040 0000005c 00000000 00000000 22400001 00008000 00008000 c3500000
         00000000 00000000 00000000 0a000001 00000000 00000000 00000000 0a000002");
    bytes.resize(HELLO_LEN, 0);
    assert_eq!(hello().to_bytes().to_vec(), bytes);
    assert_eq!(Hello::parse(&bytes), Ok(hello()));

    let mut ack = hex("01000040 000000c4 00000000 00000000 22000001 00008000");
    ack.resize(HELLO_ACK_LEN, 0);
    let parsed = HelloAck { bufs: 64, version: VERSION, size: 0x8000 };
    assert_eq!(HelloAck::parse(&ack), Ok(parsed));
    // The advertisements of the byte before the size are a peer's business.
    ack[19] = 0;
    assert_eq!(parsed.to_bytes().to_vec(), ack);
}

#[test]
fn hellos_that_no_connection_can_follow_are_refused() {
    let good = hello().to_bytes();
    let with = |at: usize, value: u8| {
        let mut bytes = good;
        bytes[at] = value;
        Hello::parse(&bytes)
    };
    assert_eq!(with(0, 1), Err(WireError::OutOfRange("MID")));
    assert_eq!(with(7, 91), Err(WireError::OutOfRange("Len")));
    assert_eq!(with(16, 0x11), Err(WireError::HelloVersion(0x11)));
    assert_eq!(with(17, 0x50), Err(WireError::IpVersion(5)));
    assert_eq!(with(19, 0), Err(WireError::OutOfRange("MaxAdverts")));
    assert_eq!(with(26, 0), Err(WireError::OutOfRange("LocalRcvSz")));
    assert_eq!(Hello::parse(&good[..56]), Err(WireError::BadLength { need: HELLO_LEN, have: 56 }));
    let mut ack = HelloAck { bufs: 1, version: VERSION, size: 0x8000 }.to_bytes();
    ack[22] = 0;
    assert_eq!(HelloAck::parse(&ack), Err(WireError::OutOfRange("ActRcvSz")));
}

#[test]
fn messages_written_by_hand() {
    let one_mb = Memory { len: 1 << 20, rkey: Stag(0x1122_3344), addr: 0x7f00_1234_5000 };
    let cases: [(&str, Header, Body, &[u8]); 5] = [
        ("ff00003f 00000015 00000001 00000000 68656c6c6f", header(63, 1, 0), Body::Data, b"hello"),
        ("ff000040 00000010 00000002 00000007", header(64, 2, 7), Body::Data, b""),
        (
            "fe000040 00000021 00000002 00000005 00100000 11223344 00007f0012345000 78",
            header(64, 2, 5),
            Body::SrcAvail(one_mb),
            b"x",
        ),
        (
            "0600003e 00000014 00000006 00000002 000fffff",
            header(62, 6, 2),
            Body::ReadComplete(1_048_575),
            b"",
        ),
        ("0200003c 00000010 00000009 0000000c", header(60, 9, 12), Body::Disconnect, b""),
    ];
    for (text, header, body, payload) in cases {
        assert_eq!(whole(&header, &body, payload), hex(text));
        assert_eq!(Message::parse(&hex(text)), Ok(Message { header, body, payload }));
    }
}

#[test]
fn messages_that_contradict_themselves_are_refused() {
    let refused = |text: &str| Message::parse(&hex(text)).unwrap_err();
    let short = refused("ff00003f 00000014 00000001 00000000 68656c6c6f");
    assert_eq!(short, WireError::BadLength { need: 20, have: 21 });
    let unknown = refused("0f00003f 00000010 00000001 00000000");
    assert_eq!(unknown, WireError::OutOfRange("MID"));
    let tail = refused("0200003f 00000011 00000001 00000000 00");
    assert_eq!(tail, WireError::OutOfRange("Len"));
    let no_byte = refused("ff01003f 00000010 00000001 00000000");
    assert_eq!(no_byte, WireError::OutOfRange("OOB_PRES"));
    let mode = refused("0700003f 00000014 00000001 00000000 70000000");
    assert_eq!(mode, WireError::OutOfRange("mode"));
    let cut = refused("fe000040 00000018 00000002 00000005 00100000 11223344");
    assert_eq!(cut, WireError::Truncated { need: 16, have: 8 });
}

fn memory() -> impl Strategy<Value = Memory> {
    any::<(u32, u32, u64)>().prop_map(|(len, rkey, addr)| Memory { len, rkey: Stag(rkey), addr })
}

fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Buffered), Just(Mode::Combined), Just(Mode::Pipelined)]
}

fn body() -> impl Strategy<Value = Body> {
    prop_oneof![
        Just(Body::Disconnect),
        Just(Body::Abort),
        Just(Body::SendSm),
        any::<u32>().prop_map(Body::WriteComplete),
        any::<u32>().prop_map(Body::ReadComplete),
        (any::<bool>(), mode())
            .prop_map(|(of_receiver, mode)| Body::ModeChange { of_receiver, mode }),
        Just(Body::SourceCancel),
        Just(Body::SinkCancel),
        Just(Body::SinkCancelAck),
        any::<u32>().prop_map(Body::ChangeReceiveBuffers),
        any::<u32>().prop_map(Body::ChangeReceiveBuffersAck),
        any::<u64>().prop_map(Body::Suspend),
        Just(Body::SuspendAck),
        (memory(), any::<u32>())
            .prop_map(|(memory, non_discards)| Body::SinkAvail { memory, non_discards }),
        memory().prop_map(Body::SrcAvail),
        Just(Body::Data),
    ]
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        body in body(),
        fields in any::<(u16, u32, u32)>(),
        flags in any::<(bool, bool, bool)>(),
        payload in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        let payload = if body.takes_payload() { payload } else { Vec::new() };
        let flags = Flags {
            urgent_present: flags.0 && body == Body::Data && !payload.is_empty(),
            urgent_pending: flags.1,
            wants_pipelined: flags.2,
        };
        let (bufs, mseq, mseq_ack) = fields;
        let header = Header { flags, bufs, mseq, mseq_ack };
        let bytes = whole(&header, &body, &payload);
        prop_assert_eq!(bytes.len(), body.headers_len() + payload.len());
        prop_assert_eq!(Message::parse(&bytes), Ok(Message { header, body, payload: &payload }));
    }

    #[test]
    fn hellos_are_read_as_written(
        fields in any::<(u16, bool, u32, u16)>(),
        (max_adverts, local_size) in (1..=u8::MAX, 37u32..),
        (source, destination) in any::<(u128, u128)>(),
    ) {
        let (bufs, can_invalidate, wanted_peer_size, port) = fields;
        let v6 = |bits: u128| IpAddr::V6(Ipv6Addr::from(bits));
        let hello = Hello {
            bufs, version: VERSION, can_invalidate, max_adverts, wanted_peer_size, local_size, port,
            source: v6(source), destination: v6(destination),
        };
        prop_assert_eq!(Hello::parse(&hello.to_bytes()), Ok(hello));
        let ack = HelloAck { bufs, version: VERSION, size: local_size };
        prop_assert_eq!(HelloAck::parse(&ack.to_bytes()), Ok(ack));
    }

    /// Whatever comes, nothing panics, and what is legal is written back as it came, but for reserved bits.
    #[test]
    fn any_bytes_are_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        let len = bytes.len();
        if len >= 16 {
            bytes[4..8].copy_from_slice(&(len as u32).to_be_bytes());
        }
        if let Ok(message) = Message::parse(&bytes) {
            let again = whole(&message.header, &message.body, message.payload);
            prop_assert_eq!(Message::parse(&again), Ok(message));
        }
        let _ = (Hello::parse(&bytes), HelloAck::parse(&bytes));
        bytes.resize(HELLO_ACK_LEN, 0);
        let _ = (Hello::parse(&bytes[..HELLO_LEN]), HelloAck::parse(&bytes));
    }
}
