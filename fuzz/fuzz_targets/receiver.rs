//! Arbitrary bytes on an established connection. The first byte says what was negotiated and how
//! the rest is to be read: as a raw stream, or as ULPDUs that get a proper length, and so come
//! further.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quipu_iwarp::wire::Payload;
use quipu_iwarp::wire::mpa::{CRC_LEN, crc32c, fpdu_len};
use quipu_iwarp::wire::terminate::Terminate;
use quipu_iwarp::{Extensions, Negotiated, Receiver, Segment, terminate};

/// Cuts the input into ULPDUs, each behind a byte with its length, and frames them.
fn framed(mut input: &[u8]) -> Vec<u8> {
    let mut stream = Vec::new();
    while let Some((&len, rest)) = input.split_first() {
        let (ulpdu, rest) = rest.split_at(usize::from(len).min(rest.len()));
        let mut fpdu = vec![0; fpdu_len(ulpdu.len())];
        fpdu[..2].copy_from_slice(&(ulpdu.len() as u16).to_be_bytes());
        fpdu[2..2 + ulpdu.len()].copy_from_slice(ulpdu);
        let covered = fpdu.len() - CRC_LEN;
        let crc = crc32c(&fpdu[..covered]).to_le_bytes();
        fpdu[covered..].copy_from_slice(&crc);
        stream.extend(fpdu);
        input = rest;
    }
    stream
}

fuzz_target!(|input: &[u8]| {
    let Some((&flags, input)) = input.split_first() else {
        return;
    };
    let negotiated = Negotiated { crc: flags & 1 != 0, ..Negotiated::plain() };
    let (quipu, xrc) = (flags & 4 != 0, flags & 32 != 0);
    let (rfc7306, acknowledging_sends, flush) = (flags & 2 != 0, quipu && !xrc, flags & 64 != 0);
    let extensions = Extensions { rfc7306, quipu, acknowledging_sends, xrc, flush };
    let refuse = flags & 8 != 0;
    let stream = if flags & 16 != 0 { framed(input) } else { input.to_vec() };

    let mut receiver = Receiver::new(&negotiated, extensions);
    if flags & 64 != 0 {
        receiver.set_piecewise();
    }
    let mut rest = &stream[..];
    loop {
        let within = receiver.head().is_some();
        if let Some((most, _)) = receiver.awaits().filter(|_| flags & 128 != 0 && !rest.is_empty())
        {
            let count = most.min(rest.len()).min(5000);
            receiver.placed(count);
            rest = &rest[count..];
            continue;
        }
        match receiver.next(rest) {
            Ok(Some((used, segment))) => {
                assert!(used <= rest.len() && used > 0);
                if !within && receiver.head().is_none() {
                    assert_eq!(Receiver::needed(rest), 0);
                }
                if receiver.is_discarding() {
                    assert!(!segment.is_request());
                }
                if refuse && matches!(segment, Segment::Send { mo: 0, .. }) {
                    receiver.discard_requests(receiver.message_mark());
                }
                rest = &rest[used..];
            }
            Ok(None) => {
                assert!(within || Receiver::needed(rest) > 0);
                return;
            }
            Err(error) => {
                if let Some(answer) = terminate::for_error(&error, rest) {
                    let mut out = [0; Terminate::MAX_LEN];
                    answer.emit(&mut out);
                    assert_eq!(Terminate::parse(&out[..answer.wire_len()]), Ok(answer));
                }
                return;
            }
        }
    }
});
