//! Messages of connection management: the examples of `specs/quipu-cm.md`, and properties.

use proptest::prelude::*;
use quipu_wire::WireError;
use quipu_wire::cm::{
    Ece, Frame, Lookup, MAX_FRAME_LEN, Offer, REJ_DATA, REP_DATA, REQ_DATA, SIDR_REP_DATA,
    SIDR_REQ_DATA, SIDR_REQ_LEN, Setup,
};

const SPEC: &str = include_str!("../../../../specs/quipu-cm.md");

/// The bytes of the block that the specification calls `name`.
fn example(name: &str) -> Vec<u8> {
    let fence = format!("```hex {name}\n");
    let start = SPEC.find(&fence).expect("an example of this name") + fence.len();
    let block = SPEC[start..].split("```").next().expect("a closed block");
    block.split_whitespace().map(|octet| u8::from_str_radix(octet, 16).expect("hex")).collect()
}

fn gid(last: u8) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last]
}

fn offer() -> Offer {
    Offer {
        port_space: 0x0106,
        qp_type: 2,
        qpn: 0x12_3456,
        psn: 0xab_cdef,
        responder_resources: 16,
        initiator_depth: 16,
        retry_count: 7,
        rnr_retry_count: 7,
        path_mtu: 5,
        ack_timeout: 18,
        gid: gid(1),
        ..Offer::default()
    }
}

#[test]
fn the_examples_of_the_specification() {
    let request = Setup::Request(offer(), b"quipu");
    assert_eq!(request.to_bytes(), example("req"));
    assert_eq!(Setup::parse(&example("req")), Ok(request));
    let reject = Setup::Reject(28, &[]);
    assert_eq!(reject.to_bytes(), example("rej"));
    assert_eq!(Setup::parse(&example("rej")), Ok(reject));
    assert_eq!(Frame::ReadyToUse.to_bytes().to_vec(), example("rtu"));
    let reply = Lookup::Reply {
        status: 0,
        id: 0x0102_0304,
        qpn: 77,
        qkey: 0x0123_4567,
        gid: gid(2),
        data: b"hi",
    };
    assert_eq!(reply.to_bytes(), example("sidr_rep"));
    assert_eq!(Lookup::parse(&example("sidr_rep")), Ok(reply));
}

#[test]
fn options_of_a_vendor_stand_behind_the_private_data() {
    let ece = Ece { vendor_id: 0x51f0, options: 3 };
    let reply = Setup::Reply(Offer { ece, ..offer() }, b"hi");
    assert_eq!(reply.to_bytes(), example("rep"));
    assert_eq!(Setup::parse(&example("rep")), Ok(reply));
    let whole = reply.to_bytes();
    for len in 0..whole.len() {
        assert!(Setup::parse(&whole[..len]).is_err(), "{len}");
    }
    // Without the bit, what is there is as little a part of the message as anything behind it.
    let mut without = whole.clone();
    without[11] = 0;
    assert_eq!(Setup::parse(&without), Ok(Setup::Reply(offer(), b"hi")));
    // Nor are options of no vendor.
    let mut nobodys = whole;
    let at = nobodys.len() - 8;
    nobodys[at..at + 4].fill(0);
    assert_eq!(Setup::parse(&nobodys), Ok(Setup::Reply(offer(), b"hi")));
}

#[test]
fn fields_out_of_range_are_refused() {
    let whole = Setup::Request(offer(), b"quipu").to_bytes();
    let broken = |at: usize, value: u8| {
        let mut bytes = whole.clone();
        bytes[at] = value;
        Setup::parse(&bytes).map(drop)
    };
    assert_eq!(broken(4, 2), Err(WireError::HelloVersion(2)));
    assert_eq!(broken(0, b'q'), Err(WireError::NotHello));
    for (at, value) in
        [(5, 0), (5, 4), (7, 57), (10, 4), (12, 1), (16, 1), (22, 8), (23, 8), (24, 0)]
    {
        assert!(matches!(broken(at, value), Err(WireError::OutOfRange(_))), "{at}");
    }
    for (at, value) in [(24, 6), (26, 32)] {
        assert!(matches!(broken(at, value), Err(WireError::OutOfRange(_))), "{at}");
    }
    assert!(matches!(broken(7, 6), Err(WireError::Truncated { .. })), "more data than there are");
    for len in 0..whole.len() {
        assert!(Setup::parse(&whole[..len]).is_err(), "{len}");
    }
    let question = Lookup::Request { port_space: 0x0111, id: 1, gid: gid(1), data: &[] };
    let bytes = question.to_bytes();
    assert_eq!(bytes.len(), SIDR_REQ_LEN);
    assert!(Lookup::parse(&bytes[..SIDR_REQ_LEN - 1]).is_err(), "shorter than any answer");
}

#[test]
fn frames_are_read_whole_and_private_data_are_skipped() {
    let frames = [Frame::ReadyToUse, Frame::Reject(28), Frame::Disconnect, Frame::Disconnected];
    for frame in frames {
        let mut bytes = frame.to_bytes().to_vec();
        assert_eq!(Frame::parse(&bytes), Ok(Some((frame, 4))));
        bytes[3] = 255;
        bytes.resize(MAX_FRAME_LEN, 0xee);
        for len in 0..MAX_FRAME_LEN {
            assert_eq!(Frame::parse(&bytes[..len]), Ok(None));
        }
        assert_eq!(Frame::parse(&bytes), Ok(Some((frame, MAX_FRAME_LEN))));
    }
    for kind in (0..3).chain(4..6).chain(9..=255) {
        assert!(Frame::parse(&[kind]).is_err(), "at the first byte");
    }
}

fn any_ece() -> impl Strategy<Value = Ece> {
    let some = (1u32.., any::<u32>()).prop_map(|(vendor_id, options)| Ece { vendor_id, options });
    prop_oneof![Just(Ece::default()), some]
}

fn any_offer() -> impl Strategy<Value = Offer> {
    let counts = (any::<[u8; 2]>(), 0..8u8, 0..8u8, 1..6u8, any::<u8>(), 0..32u8);
    let connected = prop_oneof![Just(2u8), Just(3), Just(9), Just(10)];
    let names = (any::<u16>(), connected, any::<[bool; 2]>(), any::<[u8; 16]>(), any_ece());
    (names, 0..1u32 << 24, 0..1u32 << 24, counts).prop_map(|(names, qpn, psn, counts)| {
        let (port_space, qp_type, [srq, flow_control], gid, ece) = names;
        let ([responder_resources, initiator_depth], retry_count, rnr_retry_count, ..) = counts;
        let (.., path_mtu, traffic_class, ack_timeout) = counts;
        Offer {
            port_space,
            qp_type,
            srq,
            flow_control,
            qpn,
            psn,
            responder_resources,
            initiator_depth,
            retry_count,
            rnr_retry_count,
            path_mtu,
            traffic_class,
            ack_timeout,
            gid,
            ece,
        }
    })
}

fn data(most: usize) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..=most)
}

proptest! {
    #[test]
    fn requests_and_replies_come_back(offer in any_offer(), req in data(REQ_DATA),
                                      rep in data(REP_DATA), rej in data(REJ_DATA)) {
        for setup in [Setup::Request(offer, &req), Setup::Reply(offer, &rep),
                      Setup::Reject(3, &rej)] {
            let bytes = setup.to_bytes();
            prop_assert_eq!(Setup::parse(&bytes), Ok(setup));
        }
    }

    #[test]
    fn look_ups_come_back(port_space: u16, id: u32, qpn in 0..1u32 << 24, qkey: u32,
                          gid: [u8; 16], status: u8, req in data(SIDR_REQ_DATA),
                          rep in data(SIDR_REP_DATA)) {
        let request = Lookup::Request { port_space, id, gid, data: &req };
        let reply = Lookup::Reply { status, id, qpn, qkey, gid, data: &rep };
        for lookup in [request, reply] {
            let bytes = lookup.to_bytes();
            prop_assert!(bytes.len() <= SIDR_REQ_LEN);
            prop_assert_eq!(Lookup::parse(&bytes), Ok(lookup));
        }
    }

    #[test]
    fn nothing_panics(mut bytes in data(300), kind in 0..10u8) {
        let _ = Frame::parse(&bytes);
        let _ = (Setup::parse(&bytes).is_ok(), Lookup::parse(&bytes).is_ok());
        for (slot, byte) in bytes.iter_mut().zip([b'Q', b'U', b'C', b'M', 1, kind]) {
            *slot = byte;
        }
        if let Ok(setup) = Setup::parse(&bytes) {
            let again = setup.to_bytes();
            prop_assert_eq!(Setup::parse(&again), Ok(setup));
        }
        if let Ok(lookup) = Lookup::parse(&bytes) {
            let again = lookup.to_bytes();
            prop_assert_eq!(Lookup::parse(&again), Ok(lookup));
        }
    }
}
