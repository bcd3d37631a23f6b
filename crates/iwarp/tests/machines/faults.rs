//! Every fault of the peer, the Terminate that answers it, and what the other end makes of that.

use crate::common::{emitted, first, fpdu, receiver, some_atomic, some_read, tagged, untagged};
use proptest::prelude::*;
use quipu_iwarp::terminate::{for_error, for_fault, for_setup_error, verdict};
use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::rdmap::{AtomicResponse, TaggedOp, UntaggedOp};
use quipu_iwarp::wire::terminate::{
    Code, Mpa, Operation, Protection, TaggedBuffer, Terminate, UntaggedBuffer,
};
use quipu_iwarp::wire::{Stag, ddp};
use quipu_iwarp::{
    Extensions, Negotiated, ProtocolError, Receiver, RemoteFault, Segment, SetupError, Verdict,
};

/// Feeds the FPDUs; all but the last are legal. Gives the error and the code of its Terminate.
fn fault(extensions: Extensions, fpdus: &[Vec<u8>]) -> (ProtocolError, Option<Code>) {
    let mut receiver = Receiver::new(&Negotiated::plain(), extensions);
    let (bad, good) = fpdus.split_last().unwrap();
    for bytes in good {
        assert_eq!(receiver.next(bytes).expect("legal").expect("whole").0, bytes.len());
    }
    let error = receiver.next(bad).expect_err("illegal");
    assert_eq!(receiver.next(bad), Err(error), "stays an error");
    (error, for_error(&error, bad).map(|terminate| terminate.code))
}

fn all(fpdus: &[Vec<u8>]) -> (ProtocolError, Option<Code>) {
    fault(Extensions::ALL, fpdus)
}

fn write(to: u64) -> ddp::Tagged {
    ddp::Tagged { last: true, rsvd_ulp: TaggedOp::Write.octet(), stag: Stag(1), to }
}

const UNEXPECTED: Option<Code> = Some(Code::Operation(Operation::UnexpectedOpcode));
const UNSPECIFIED: Option<Code> = Some(Code::Operation(Operation::Unspecified));

#[test]
fn framing() {
    let length = Some(Code::Mpa(Mpa::MarkerLength));
    for len in [0u16, 13] {
        // Known from two bytes on: no waiting for the rest. A marker begins with such a length.
        let mut bytes = [0; 4];
        bytes[..2].copy_from_slice(&len.to_be_bytes());
        let error = ProtocolError::UlpduLength(len);
        assert_eq!(receiver().next(&bytes), Err(error));
        assert_eq!(for_error(&error, &bytes).map(|terminate| terminate.code), length);
    }
    // Long enough for a tagged header, but the segment is untagged.
    let short = fpdu(&[0x41; 17]);
    assert_eq!(all(&[short]), (ProtocolError::UlpduLength(17), length));
}

#[test]
fn crc() {
    let good = untagged(first(UntaggedOp::Send), b"payload");
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        match receiver().next(&bad) {
            Err(error @ ProtocolError::Crc { got, computed }) => {
                assert_ne!(got, computed);
                let terminate = for_error(&error, &bad).unwrap();
                assert_eq!(terminate, Terminate::bare(Code::Mpa(Mpa::Crc)));
            }
            // A wrong length may ask for more bytes, or be refused for itself.
            Ok(None) | Err(ProtocolError::UlpduLength(_)) => assert!(bit < 16),
            other => panic!("bit {bit}: {other:?}"),
        }
    }
}

#[test]
fn versions() {
    let mut ulpdu = [0; 18];
    ulpdu[0] = 0x40;
    ulpdu[1] = 0x43;
    let error = ProtocolError::DdpVersion { tagged: false, version: 0 };
    let code = Code::UntaggedBuffer(UntaggedBuffer::InvalidVersion);
    assert_eq!(all(&[fpdu(&ulpdu)]), (error, Some(code)));
    ulpdu[0] = 0xc3;
    let error = ProtocolError::DdpVersion { tagged: true, version: 3 };
    let code = Code::TaggedBuffer(TaggedBuffer::InvalidVersion);
    assert_eq!(all(&[fpdu(&ulpdu)]), (error, Some(code)));
    ulpdu[0] = 0x41;
    ulpdu[1] = 0x03;
    let code = Code::Operation(Operation::InvalidVersion);
    assert_eq!(all(&[fpdu(&ulpdu)]), (ProtocolError::RdmapVersion(0), Some(code)));
}

#[test]
fn opcodes() {
    let send_tagged = ddp::Tagged { rsvd_ulp: 0x43, ..write(0) };
    let error = ProtocolError::UnexpectedOpcode(0x43);
    assert_eq!(all(&[tagged(send_tagged, b"")]), (error, UNEXPECTED));

    let write_untagged = ddp::Untagged { rsvd_ulp: 0x40, ..first(UntaggedOp::Send) };
    let error = ProtocolError::UnexpectedOpcode(0x40);
    assert_eq!(all(&[untagged(write_untagged, b"")]), (error, UNEXPECTED));
}

#[test]
fn opcodes_that_were_not_negotiated() {
    let only_quipu = Extensions { quipu: true, ..Extensions::NONE };
    let only_rfc7306 = Extensions { rfc7306: true, ..Extensions::NONE };
    let cases = [
        (UntaggedOp::Immediate, vec![0; 8], only_quipu),
        (UntaggedOp::ImmediateSe, vec![0; 8], only_quipu),
        (UntaggedOp::AtomicRequest, emitted(&some_atomic()), only_quipu),
        (UntaggedOp::AtomicResponse, vec![0; 12], only_quipu),
        (UntaggedOp::SendImm, vec![], only_rfc7306),
        (UntaggedOp::SendImmSe, vec![], only_rfc7306),
        (UntaggedOp::Control, emitted(&Control::Ack { count: 1 }), only_rfc7306),
        (UntaggedOp::Flush, vec![1; 24], only_quipu),
    ];
    for (op, payload, others) in cases {
        let bytes = untagged(first(op), &payload);
        let error = ProtocolError::UnexpectedOpcode(op.octet());
        assert_eq!(fault(others, std::slice::from_ref(&bytes)), (error, UNEXPECTED));
        assert_eq!(fault(Extensions::NONE, std::slice::from_ref(&bytes)), (error, UNEXPECTED));
        assert!(receiver().next(&bytes).unwrap().is_some());
    }
}

#[test]
fn queues() {
    let code = Some(Code::UntaggedBuffer(UntaggedBuffer::InvalidQueue));
    for qn in [1, 2, 3, 4, 5, u32::MAX] {
        let header = ddp::Untagged { qn, ..first(UntaggedOp::Send) };
        let error = ProtocolError::InvalidQueue { octet: 0x43, qn };
        assert_eq!(all(&[untagged(header, b"")]), (error, code));
    }
}

#[test]
fn order_of_messages() {
    let range = Some(Code::UntaggedBuffer(UntaggedBuffer::MsnRange));
    let offset = Some(Code::UntaggedBuffer(UntaggedBuffer::InvalidMo));
    let send = first(UntaggedOp::Send);
    let open = ddp::Untagged { last: false, ..send };
    let msn = |expected, got| ProtocolError::MsnRange { queue: 0, expected, got };
    let mo = |expected, got| ProtocolError::InvalidMo { queue: 0, expected, got };

    let zero = ddp::Untagged { msn: 0, ..send };
    assert_eq!(all(&[untagged(zero, b"")]), (msn(1, 0), range));
    let second = ddp::Untagged { msn: 2, ..send };
    assert_eq!(all(&[untagged(second, b"")]), (msn(1, 2), range));
    assert_eq!(all(&[untagged(send, b""), untagged(send, b"")]), (msn(2, 1), range));
    assert_eq!(all(&[untagged(open, b"ab"), untagged(second, b"")]), (msn(1, 2), range));

    let ahead = ddp::Untagged { mo: 4, ..send };
    assert_eq!(all(&[untagged(ahead, b"")]), (mo(0, 4), offset));
    assert_eq!(all(&[untagged(open, b"ab"), untagged(ahead, b"")]), (mo(2, 4), offset));
    assert_eq!(all(&[untagged(open, b"ab"), untagged(send, b"")]), (mo(2, 0), offset));

    // The queue of requests counts for itself.
    let read = first(UntaggedOp::ReadRequest);
    let atomic = first(UntaggedOp::AtomicRequest);
    let error = ProtocolError::MsnRange { queue: 1, expected: 2, got: 1 };
    let fpdus = [
        untagged(send, b""),
        untagged(read, &emitted(&some_read())),
        untagged(atomic, &emitted(&some_atomic())),
    ];
    assert_eq!(all(&fpdus), (error, range));
}

#[test]
fn one_message_is_one_operation() {
    let open = ddp::Untagged { last: false, ..first(UntaggedOp::Send) };
    let other = ddp::Untagged { mo: 2, ..first(UntaggedOp::SendSe) };
    let error = ProtocolError::OperationChanged(0x45);
    assert_eq!(all(&[untagged(open, b"ab"), untagged(other, b"")]), (error, UNEXPECTED));

    let open = ddp::Untagged { last: false, ulp: 7, ..first(UntaggedOp::SendImm) };
    let other = ddp::Untagged { mo: 2, ulp: 8, ..first(UntaggedOp::SendImm) };
    let error = ProtocolError::OperationChanged(0x4c);
    assert_eq!(all(&[untagged(open, b"ab"), untagged(other, b"")]), (error, UNEXPECTED));

    // In a plain Send that field is reserved.
    let open = ddp::Untagged { last: false, ulp: 7, ..first(UntaggedOp::Send) };
    let other = ddp::Untagged { mo: 2, ulp: 8, ..first(UntaggedOp::Send) };
    let mut receiver = receiver();
    receiver.next(&untagged(open, b"ab")).unwrap().unwrap();
    receiver.next(&untagged(other, b"cd")).unwrap().unwrap();
}

#[test]
fn tagged_offset() {
    let code = Some(Code::TaggedBuffer(TaggedBuffer::ToWrap));
    let bytes = tagged(write(u64::MAX - 1), b"abc");
    assert_eq!(all(&[bytes]), (ProtocolError::ToWrap(TaggedOp::Write), code));
    assert!(receiver().next(&tagged(write(u64::MAX - 1), b"ab")).is_ok(), "up to the end");
    assert!(receiver().next(&tagged(write(u64::MAX), b"")).is_ok());
}

#[test]
fn message_too_long() {
    // Reached by the real way: a message of 2^32 - 1 bytes and one more, in the largest FPDUs.
    let negotiated = Negotiated { crc: false, ..Negotiated::plain() };
    let mut receiver = Receiver::new(&negotiated, Extensions::NONE);
    let payload = vec![0; 65_517];
    let mut header = ddp::Untagged { last: false, ..first(UntaggedOp::Send) };
    let mut bytes = untagged(header, &payload);
    while u64::from(header.mo) + payload.len() as u64 <= u64::from(u32::MAX) {
        header.emit(&mut bytes[2..20]);
        receiver.next(&bytes).expect("legal").expect("whole");
        header.mo += payload.len() as u32;
    }
    header.emit(&mut bytes[2..20]);
    let error = receiver.next(&bytes).unwrap_err();
    assert_eq!(error, ProtocolError::MessageTooLong);
    let code = Code::UntaggedBuffer(UntaggedBuffer::MessageTooLong);
    assert_eq!(for_error(&error, &bytes).unwrap().code, code);
}

#[test]
fn fixed_layouts() {
    let cases = [
        (UntaggedOp::ReadRequest, 28),
        (UntaggedOp::Immediate, 8),
        (UntaggedOp::ImmediateSe, 8),
        (UntaggedOp::AtomicRequest, 52),
        (UntaggedOp::AtomicResponse, 12),
        (UntaggedOp::Flush, 24),
        (UntaggedOp::Control, 16),
    ];
    for (op, len) in cases {
        for wrong in [0, len - 1, len + 1] {
            let error = ProtocolError::PayloadLength { octet: op.octet(), len: wrong };
            let bytes = untagged(first(op), &vec![1; wrong]);
            assert_eq!(all(&[bytes]), (error, UNSPECIFIED));
        }
        let error = ProtocolError::PayloadLength { octet: op.octet(), len };
        let open = ddp::Untagged { last: false, ..first(op) };
        assert_eq!(all(&[untagged(open, &vec![1; len])]), (error, UNSPECIFIED));
    }
    // A malformed Terminate is not answered.
    let error = ProtocolError::PayloadLength { octet: 0x47, len: 3 };
    assert_eq!(all(&[untagged(first(UntaggedOp::Terminate), &[0; 3])]), (error, None));
}

#[test]
fn contents() {
    let mut atomic = emitted(&some_atomic());
    atomic[3] = 1;
    let bytes = untagged(first(UntaggedOp::AtomicRequest), &atomic);
    assert_eq!(all(&[bytes]), (ProtocolError::UnknownAtomic(1), UNEXPECTED));

    let bytes = untagged(first(UntaggedOp::Control), &[9; 16]);
    assert_eq!(all(&[bytes]), (ProtocolError::MalformedControl, UNSPECIFIED));

    let bytes = untagged(first(UntaggedOp::Control), &emitted(&Control::Resume { count: 0 }));
    assert_eq!(all(&[bytes]), (ProtocolError::UnexpectedResume, UNSPECIFIED));
}

#[test]
fn a_fault_names_its_layer_by_the_segment() {
    let to_memory = tagged(write(0x1000), b"abc");
    let request = untagged(first(UntaggedOp::ReadRequest), &emitted(&some_read()));
    let send = untagged(first(UntaggedOp::Send), b"abc");
    use RemoteFault as Fault;
    let cases = [
        (Fault::InvalidStag, &to_memory, 0x11, 0x00, Verdict::RemoteAccess),
        (Fault::BaseBounds, &to_memory, 0x11, 0x01, Verdict::RemoteAccess),
        (Fault::StagNotAssociated, &to_memory, 0x11, 0x02, Verdict::RemoteAccess),
        (Fault::ToWrap, &to_memory, 0x11, 0x03, Verdict::RemoteAccess),
        (Fault::AccessRights, &to_memory, 0x01, 0x02, Verdict::RemoteAccess),
        (Fault::InvalidStag, &request, 0x01, 0x00, Verdict::RemoteAccess),
        (Fault::BaseBounds, &request, 0x01, 0x01, Verdict::RemoteAccess),
        (Fault::AccessRights, &request, 0x01, 0x02, Verdict::RemoteAccess),
        (Fault::StagNotAssociated, &request, 0x01, 0x03, Verdict::RemoteAccess),
        (Fault::ToWrap, &request, 0x01, 0x04, Verdict::RemoteAccess),
        (Fault::TooManyReads, &request, 0x02, 0x07, Verdict::RemoteOperation),
        (Fault::UnexpectedOpcode, &request, 0x02, 0x06, Verdict::InvalidRequest),
        (Fault::InvalidRequest, &request, 0x02, 0xff, Verdict::InvalidRequest),
        (Fault::CannotInvalidate, &send, 0x01, 0x09, Verdict::RemoteAccess),
        (Fault::MessageTooLong, &send, 0x12, 0x05, Verdict::InvalidRequest),
        (Fault::NoBuffer, &send, 0x12, 0x02, Verdict::NoBuffer),
        (Fault::Catastrophic, &send, 0x02, 0x07, Verdict::RemoteOperation),
    ];
    for (fault, bytes, layer_type, octet, expected) in cases {
        let terminate = for_fault(fault, bytes).expect("answered");
        assert_eq!(terminate.code.octets(), (layer_type, octet), "{fault:?}");
        let (length, header) = terminate.segment.expect("a header");
        assert_eq!(length, u16::from_be_bytes([bytes[0], bytes[1]]));
        assert_eq!(header.as_bytes(), &bytes[2..2 + header.as_bytes().len()]);
        let is_read = std::ptr::eq(bytes, &request);
        assert_eq!(terminate.read_request, is_read.then(some_read));

        // Over the wire to the other end.
        let arrived = untagged(first(UntaggedOp::Terminate), &emitted(&terminate));
        let mut peer = Receiver::new(&Negotiated::plain(), Extensions::NONE);
        let (_, segment) = peer.next(&arrived).unwrap().unwrap();
        assert_eq!(segment, Segment::Terminate(terminate));
        assert_eq!(verdict(terminate.code), expected, "{fault:?}");
    }
    let terminate = untagged(first(UntaggedOp::Terminate), &[0; 4]);
    assert_eq!(for_fault(RemoteFault::Catastrophic, &terminate), None);
}

#[test]
fn every_code_has_a_verdict() {
    let count = |wanted: Verdict| Code::all().filter(|&code| verdict(code) == wanted).count();
    assert_eq!(count(Verdict::RemoteAccess), 7 + 1 + 4);
    assert_eq!(count(Verdict::InvalidRequest), 3);
    assert_eq!(count(Verdict::NoBuffer), 1);
    assert_eq!(count(Verdict::RemoteOperation), 4);
    assert_eq!(count(Verdict::Transport), 1 + 1 + 4 + 7);
    assert_eq!(verdict(Code::Protection(Protection::Unspecified)), Verdict::RemoteAccess);
    let unknown = Code::Other { layer: 9, etype: 9, code: 9 };
    assert_eq!(verdict(unknown), Verdict::RemoteOperation);
}

#[test]
fn set_up_errors() {
    let error = SetupError::InsufficientIrd { peer_ord: 2, ird: 1 };
    let terminate = Terminate::bare(Code::Mpa(Mpa::InsufficientIrd));
    assert_eq!(for_setup_error(&error), Some(terminate));
    assert_eq!(for_setup_error(&SetupError::EarlyData), None);
}

#[test]
fn context_of_a_cut_fpdu() {
    let bytes = untagged(first(UntaggedOp::ReadRequest), &emitted(&some_read()));
    for len in 0..bytes.len() {
        let terminate = for_fault(RemoteFault::InvalidStag, &bytes[..len]).expect("answered");
        assert_eq!(terminate.segment.is_some(), len >= 20);
        assert_eq!(terminate.read_request.is_some(), len >= 48);
    }
}

proptest! {
    /// Any bytes, as they are and as the ULPDU of a proper FPDU: no panic, and progress is bounded
    /// by what was given.
    #[test]
    fn arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300), crc: bool) {
        let negotiated = Negotiated { crc, ..Negotiated::plain() };
        for bytes in [fpdu(&bytes), bytes] {
            let mut receiver = Receiver::new(&negotiated, Extensions::ALL);
            let mut rest = &bytes[..];
            loop {
                match receiver.next(rest) {
                    Ok(Some((used, _))) => {
                        prop_assert!(used >= 20 && used <= rest.len());
                        rest = &rest[used..];
                    }
                    Ok(None) => break,
                    Err(error) => {
                        let _ = for_error(&error, rest);
                        break;
                    }
                }
            }
        }
    }

    /// Headers that are almost right.
    #[test]
    fn arbitrary_headers(
        headers in prop::collection::vec((any::<bool>(), 0u8..16, 0u32..6, 0u32..3, 0usize..60), 8),
        discard: bool,
    ) {
        let mut receiver = receiver();
        if discard {
            receiver.discard_requests(receiver.message_mark());
        }
        for (last, code, qn, msn, len) in headers {
            let header = ddp::Untagged { last, rsvd_ulp: 0x40 | code, ulp: 0, qn, msn, mo: 0 };
            let bytes = untagged(header, &vec![1; len]);
            match receiver.next(&bytes) {
                Ok(segment) => prop_assert_eq!(segment.expect("whole").0, bytes.len()),
                Err(error) => {
                    let _ = for_error(&error, &bytes);
                }
            }
        }
    }
}

#[test]
fn atomic_response_is_delivered() {
    let response = AtomicResponse { id: 3, original: 4 };
    let bytes = untagged(first(UntaggedOp::AtomicResponse), &emitted(&response));
    let (_, segment) =
        receiver().next(&bytes).unwrap().map(|(n, s)| (n, format!("{s:?}"))).unwrap();
    assert_eq!(segment, format!("{:?}", Segment::AtomicResponse(response)));
}
