//! MPA start-up, both ends, byte by byte and against bytes written by hand.

use proptest::prelude::*;
use quipu_iwarp::setup::{Outcome, Request};
use quipu_iwarp::wire::WireError;
use quipu_iwarp::wire::mpa::{Enhanced, MAX_IRD_ORD};
use quipu_iwarp::{Initiator, Params, Responder, Rtr, SetupError};

fn transmitted(mut poll: impl FnMut(&mut [u8]) -> usize) -> Vec<u8> {
    let mut all = Vec::new();
    let mut out = [0; 7];
    loop {
        match poll(&mut out) {
            0 => return all,
            len => all.extend(&out[..len]),
        }
    }
}

fn requested(responder: &mut Responder, bytes: &[u8]) -> Request {
    let (used, request) = responder.handle(bytes).expect("legal");
    assert_eq!(used, bytes.len());
    request.expect("whole")
}

fn depths(ird: u16, ord: u16) -> Enhanced {
    Enhanced { ird, ord, ..Enhanced::default() }
}

#[test]
fn request_bytes() {
    let params = Params { enhanced: Some(depths(16, 8)), ..Params::default() };
    let mut initiator = Initiator::new(params, b"hi").unwrap();
    let sent = transmitted(|out| initiator.poll_transmit(out));
    assert_eq!(sent, b"MPA ID Req Frame\x50\x02\x00\x06\x00\x10\x00\x08hi");

    let params = Params { revision: 1, crc: false, ..Params::default() };
    let mut initiator = Initiator::new(params, b"").unwrap();
    let sent = transmitted(|out| initiator.poll_transmit(out));
    assert_eq!(sent, b"MPA ID Req Frame\x00\x01\x00\x00");
}

#[test]
fn handshake_of_two() {
    let ours = Params { enhanced: Some(depths(16, 200)), ..Params::default() };
    let mut initiator = Initiator::new(ours, b"question").unwrap();
    let mut responder = Responder::new();
    let bytes = transmitted(|out| initiator.poll_transmit(out));
    let request = requested(&mut responder, &bytes);
    assert_eq!(request.private_data, b"question");
    assert_eq!((request.revision, request.crc, request.markers), (2, true, false));
    assert_eq!(request.enhanced, Some(depths(16, 200)));

    let theirs = Params { crc: false, enhanced: Some(depths(64, 64)), ..Params::default() };
    let there = responder.accept(theirs, b"answer").unwrap();
    assert!(there.crc, "on if either asks");
    assert_eq!((there.peer_ird, there.peer_ord, there.ord), (Some(16), Some(200), Some(16)));
    let bytes = transmitted(|out| responder.poll_transmit(out));
    // C is repeated, and the responder's ORD is cut to the initiator's IRD.
    assert_eq!(bytes, b"MPA ID Rep Frame\x50\x02\x00\x0a\x00\x40\x00\x10answer");

    // What follows the reply is left for the receiver.
    let mut more = bytes.clone();
    more.extend([1, 2, 3]);
    let (used, outcome) = initiator.handle(&more).unwrap();
    assert_eq!(used, bytes.len());
    let Some(Outcome::Established(here)) = outcome else { panic!("{outcome:?}") };
    assert_eq!((here.crc, here.tx_markers, here.revision), (true, false, 2));
    assert_eq!((here.peer_ird, here.peer_ord, here.ord), (Some(64), Some(16), Some(64)));
    assert_eq!(here.private_data, b"answer");
    assert_eq!(initiator.handle(&[1]), Ok((0, None)));
    assert_eq!(responder.handle(&[1]), Ok((0, None)));
}

#[test]
fn crc_and_markers_follow_the_peer() {
    for (flags, crc, markers) in
        [(0x00, false, false), (0x40, true, false), (0x80, false, true), (0xc0, true, true)]
    {
        let mut bytes = b"MPA ID Req Frame\x00\x01\x00\x00".to_vec();
        bytes[16] = flags;
        let mut responder = Responder::new();
        requested(&mut responder, &bytes);
        let params = Params { crc: false, ..Params::default() };
        let negotiated = responder.accept(params, b"").unwrap();
        assert_eq!((negotiated.crc, negotiated.tx_markers), (crc, markers));
        assert_eq!((negotiated.revision, negotiated.peer_ird), (1, None));
        let reply = transmitted(|out| responder.poll_transmit(out));
        let expected = if crc { 0x40 } else { 0x00 };
        assert_eq!(reply[16..], [expected, 1, 0, 0], "we never ask for markers");
    }
}

#[test]
fn ready_to_receive_messages() {
    use Rtr::{Read, Send, Write};
    let flags = |send, write, read| Enhanced {
        peer_to_peer: true,
        rtr_send: send,
        rtr_write: write,
        rtr_read: read,
        ..depths(4, 4)
    };
    let all = flags(true, true, true);
    for (offered, agreed) in [
        (all, Ok(Some(Write))),
        (flags(true, false, true), Ok(Some(Read))),
        (flags(true, false, false), Ok(Some(Send))),
        (flags(false, false, false), Err(SetupError::NoMatchingRtr)),
        (Enhanced { peer_to_peer: false, ..all }, Ok(None)),
    ] {
        for (ours, theirs) in [(offered, all), (all, offered)] {
            let params = |enhanced| Params { enhanced: Some(enhanced), ..Params::default() };
            let mut initiator = Initiator::new(params(ours), b"").unwrap();
            let mut responder = Responder::new();
            requested(&mut responder, &transmitted(|out| initiator.poll_transmit(out)));
            let there = responder.accept(params(theirs), b"");
            assert_eq!(there.as_ref().map(|there| there.rtr), agreed.as_ref().map(|rtr| *rtr));
            if there.is_err() {
                continue;
            }
            let (_, outcome) =
                initiator.handle(&transmitted(|out| responder.poll_transmit(out))).unwrap();
            let Some(Outcome::Established(here)) = outcome else { panic!("{outcome:?}") };
            assert_eq!(Ok(here.rtr), agreed);
        }
    }
}

/// Revision 0 is that of the drafts: the frame is the same, and it is answered as it asks.
#[test]
fn revision_0_is_answered() {
    let mut responder = Responder::new();
    let request = requested(&mut responder, b"MPA ID Req Frame\x50\0\0\x02hi");
    assert_eq!((request.revision, request.enhanced), (0, None));
    let negotiated = responder.accept(Params::peer_to_peer(4, 4), b"").unwrap();
    assert_eq!((negotiated.revision, negotiated.rtr), (0, None));
    let reply = transmitted(|out| responder.poll_transmit(out));
    assert_eq!(reply, b"MPA ID Rep Frame\x40\0\0\0");
}

#[test]
fn rejection() {
    let mut initiator = Initiator::new(Params::default(), b"").unwrap();
    let mut responder = Responder::new();
    let bytes = transmitted(|out| initiator.poll_transmit(out));
    requested(&mut responder, &bytes);
    responder.reject(b"busy").unwrap();
    assert_eq!(responder.reject(b"busy"), Err(SetupError::WrongState));
    let bytes = transmitted(|out| responder.poll_transmit(out));
    let (used, outcome) = initiator.handle(&bytes).unwrap();
    assert_eq!(used, bytes.len());
    assert_eq!(outcome, Some(Outcome::Rejected { private_data: b"busy".to_vec(), revision: 2 }));
}

#[test]
fn undeclared_depths() {
    // All ones mean that the depth is not negotiated here (RFC 6581 9.1).
    let mut responder = Responder::new();
    requested(&mut responder, b"MPA ID Req Frame\x10\x02\x00\x04\x3f\xff\x3f\xff");
    let negotiated = responder.accept(Params::default(), b"").unwrap();
    assert_eq!((negotiated.peer_ird, negotiated.peer_ord), (None, None));
    assert_eq!(negotiated.ord, Some(128));

    let mut responder = Responder::new();
    requested(&mut responder, b"MPA ID Req Frame\x10\x02\x00\x04\x00\x07\x00\x08");
    let params = Params { enhanced: None, ..Params::default() };
    assert_eq!(responder.accept(params, b"").unwrap().ord, Some(7));
    let reply = transmitted(|out| responder.poll_transmit(out));
    assert_eq!(reply[20..], [0x3f, 0xff, 0x00, 0x07]);
}

#[test]
fn ready_to_receive_flags_pass_through() {
    let mut responder = Responder::new();
    let request = requested(&mut responder, b"MPA ID Req Frame\x10\x02\x00\x04\x80\x10\xc0\x10");
    let flags = request.enhanced.unwrap();
    assert!(flags.peer_to_peer && flags.rtr_write && flags.rtr_read && !flags.rtr_send);
    let chosen = Enhanced { peer_to_peer: true, rtr_write: true, ..depths(16, 16) };
    let params = Params { enhanced: Some(chosen), ..Params::default() };
    let negotiated = responder.accept(params, b"").unwrap();
    assert_eq!(negotiated.peer_enhanced, Some(flags));
    let reply = transmitted(|out| responder.poll_transmit(out));
    assert_eq!(reply[20..], [0x80, 0x10, 0x80, 0x10]);
}

#[test]
fn faults_of_an_initiator() {
    let fault = |bytes: &[u8]| Responder::new().handle(bytes).unwrap_err();
    assert_eq!(fault(b"SSH-2.0"), SetupError::Frame(WireError::BadKey));
    assert_eq!(fault(b"MPA ID Rep Frame"), SetupError::Frame(WireError::BadKey));
    assert_eq!(fault(b"MPA ID Req Frame\0\x03\0\0"), SetupError::Revision(3));
    let too_long = fault(b"MPA ID Req Frame\0\x01\x02\x01");
    assert_eq!(too_long, SetupError::Frame(WireError::PrivateDataTooLong(513)));
    let no_room = fault(b"MPA ID Req Frame\x10\x02\0\x01a");
    assert_eq!(no_room, SetupError::Frame(WireError::NoEnhancedData));

    let mut responder = Responder::new();
    let bytes = b"MPA ID Req Frame\0\x01\0\0early";
    let (used, request) = responder.handle(bytes).unwrap();
    assert!(used == 20 && request.is_some());
    assert_eq!(responder.handle(&[]), Ok((0, None)));
    assert_eq!(responder.handle(&bytes[used..]), Err(SetupError::EarlyData));
}

#[test]
fn faults_of_a_responder() {
    let params = Params { enhanced: Some(depths(16, 16)), ..Params::default() };
    let fault = |params: Params, bytes: &[u8]| {
        Initiator::new(params, b"").unwrap().handle(bytes).unwrap_err()
    };
    let old = fault(params, b"MPA ID Rep Frame\0\x01\0\0");
    assert_eq!(old, SetupError::NotEnhanced);
    assert_eq!(fault(params, b"MPA ID Rep Frame\0\0\0\0"), SetupError::Revision(0));
    assert_eq!(fault(params, b"MPA ID Rep Frame\0\x03\0\0"), SetupError::Revision(3));
    let first = Params { revision: 1, ..params };
    assert_eq!(fault(first, b"MPA ID Rep Frame\0\x02\0\0"), SetupError::Revision(2));
    let greedy = fault(params, b"MPA ID Rep Frame\x10\x02\0\x04\0\x10\0\x11");
    assert_eq!(greedy, SetupError::InsufficientIrd { peer_ord: 17, ird: 16 });
    // A responder that does not know our revision refuses in its own.
    let mut initiator = Initiator::new(params, b"").unwrap();
    let (_, outcome) = initiator.handle(b"MPA ID Rep Frame\x20\x01\0\0").unwrap();
    assert!(matches!(outcome, Some(Outcome::Rejected { .. })));
}

#[test]
fn faults_of_the_caller() {
    let long = SetupError::PrivateDataTooLong(509);
    assert_eq!(Initiator::new(Params::default(), &[0; 509]).unwrap_err(), long);
    assert!(Initiator::new(Params::default(), &[0; 508]).is_ok());
    let params = Params { revision: 3, ..Params::default() };
    assert_eq!(Initiator::new(params, b"").unwrap_err(), SetupError::Revision(3));
    let mut responder = Responder::new();
    assert_eq!(responder.accept(Params::default(), b"").unwrap_err(), SetupError::WrongState);
    requested(&mut responder, b"MPA ID Req Frame\0\x01\0\0");
    assert_eq!(responder.accept(Params::default(), &[0; 509]).unwrap_err(), long);
    assert!(responder.accept(Params::default(), b"").is_ok());
}

proptest! {
    #[test]
    fn any_split_gives_the_same(
        private_data in prop::collection::vec(any::<u8>(), 0..508),
        steps in prop::collection::vec(1usize..40, 1..20),
        ird in 0..MAX_IRD_ORD,
    ) {
        let params = Params { enhanced: Some(depths(ird, 4)), ..Params::default() };
        let mut initiator = Initiator::new(params, &private_data).unwrap();
        let bytes = transmitted(|out| initiator.poll_transmit(out));
        let mut responder = Responder::new();
        let mut steps = steps.iter().cycle();
        let mut at = 0;
        let request = loop {
            let end = bytes.len().min(at + steps.next().unwrap());
            let (used, request) = responder.handle(&bytes[at..end]).unwrap();
            prop_assert_eq!(used, end - at);
            at = end;
            if let Some(request) = request {
                break request;
            }
            prop_assert!(at < bytes.len());
        };
        prop_assert_eq!(at, bytes.len());
        prop_assert_eq!(request.private_data, private_data);
        prop_assert_eq!(request.enhanced, Some(depths(ird, 4)));
    }

    #[test]
    fn garbage_never_panics(
        prefix in 0usize..=16,
        tail in prop::collection::vec(any::<u8>(), 0..700),
    ) {
        let mut bytes = b"MPA ID Rep Frame"[..prefix].to_vec();
        bytes.extend(&tail);
        let _ = Initiator::new(Params::default(), b"").unwrap().handle(&bytes);
        bytes[..prefix].copy_from_slice(&b"MPA ID Req Frame"[..prefix]);
        let mut responder = Responder::new();
        if let Ok((_, Some(_))) = responder.handle(&bytes) {
            responder.accept(Params::default(), b"").unwrap();
        }
    }
}
