//! Arbitrary bytes on an established connection. The first byte says what was negotiated, the second how
//! the rest is to be read: as a raw stream, or as ULPDUs that get a proper length, and so come further; by
//! whole FPDUs, or piecewise.
#![no_main]

mod shares;

use libfuzzer_sys::fuzz_target;
use quipu_iwarp::wire::ddp::{Header, Tagged, Untagged};
use quipu_iwarp::wire::mpa::{CRC_LEN, crc32c, fpdu_len};
use quipu_iwarp::wire::rdmap::{FlushRequest, ReadRequest, TaggedOp, UntaggedOp};
use quipu_iwarp::wire::terminate::Terminate;
use quipu_iwarp::wire::{Payload, Stag};
use quipu_iwarp::{Extensions, Negotiated, Receiver, Segment, terminate};
use shares::Shares;

static SHARES: Shares<5> =
    Shares::new(["a segment", "a flush", "a piece", "an error", "a request in a whole FPDU"]);

/// A legal DDP header, with the next number of its queue, in place of what blind chance puts there.
fn headed(ulpdu: &mut Vec<u8>, numbers: &mut [u32; 4]) {
    use TaggedOp::{ReadResponse, Write};
    use UntaggedOp as Op;
    let [choice, number, ..] = ulpdu[..] else { return };
    let last = choice & 0x40 == 0;
    let ops = [Op::Send, Op::SendImm, Op::Flush, Op::Flush, Op::ReadRequest, Op::SendInvalidate];
    let header = match choice % 8 {
        which @ 0..=1 => {
            let op = if which == 0 { Write } else { ReadResponse };
            Header::Tagged(Tagged { last, rsvd_ulp: op.octet(), stag: Stag(1), to: number.into() })
        }
        which => {
            let op = ops[usize::from(which - 2)];
            let queue = &mut numbers[op.queue() as usize % 4];
            *queue += u32::from(last);
            let (ulp, msn) = (number.into(), *queue + u32::from(!last));
            let qn = op.queue();
            Header::Untagged(Untagged { last, rsvd_ulp: op.octet(), ulp, qn, msn, mo: 0 })
        }
    };
    let mut bytes = vec![0; header.wire_len()];
    header.emit(&mut bytes);
    ulpdu.splice(..2, bytes);
    let fixed = match choice % 8 {
        4 | 5 => FlushRequest::LEN,
        6 => ReadRequest::LEN,
        _ => return,
    };
    ulpdu.resize(header.wire_len() + fixed, 0);
}

/// Cuts the input into ULPDUs, each behind a byte with its length, and frames them.
fn framed(mut input: &[u8], steered: bool) -> Vec<u8> {
    let (mut stream, mut numbers) = (Vec::new(), [0; 4]);
    while let Some((&len, rest)) = input.split_first() {
        let (ulpdu, rest) = rest.split_at(usize::from(len).min(rest.len()));
        let mut ulpdu = ulpdu.to_vec();
        if steered && len % 16 != 0 {
            headed(&mut ulpdu, &mut numbers);
            if len % 8 > 4 {
                ulpdu.resize(ulpdu.len() + 9000, len);
            }
        }
        let mut fpdu = vec![0; fpdu_len(ulpdu.len())];
        fpdu[..2].copy_from_slice(&(ulpdu.len() as u16).to_be_bytes());
        fpdu[2..2 + ulpdu.len()].copy_from_slice(&ulpdu);
        let covered = fpdu.len() - CRC_LEN;
        let crc = crc32c(&fpdu[..covered]).to_le_bytes();
        fpdu[covered..].copy_from_slice(&crc);
        stream.extend(fpdu);
        input = rest;
    }
    stream
}

fuzz_target!(|input: &[u8]| {
    SHARES.begin();
    let [flags, how, input @ ..] = input else { return };
    let negotiated = Negotiated { crc: flags & 1 != 0, ..Negotiated::plain() };
    let (quipu, xrc) = (flags & 4 != 0, flags & 32 != 0);
    let (rfc7306, acknowledging_sends, flush) = (flags & 2 != 0, quipu && !xrc, flags & 64 != 0);
    let extensions = Extensions { rfc7306, quipu, acknowledging_sends, xrc, flush };
    let refuse = how & 32 != 0;
    let stream = if how % 8 != 7 { framed(input, how % 8 != 6) } else { input.to_vec() };

    let mut receiver = Receiver::new(&negotiated, extensions);
    let piecewise = how & 8 == 0;
    if piecewise {
        receiver.set_piecewise();
    }
    // As much as one call brings; more where that is too little.
    const FIRST: usize = 100;
    let mut some = if how & 64 == 0 { FIRST } else { usize::MAX };
    let mut left = &stream[..];
    loop {
        let rest = &left[..some.min(left.len())];
        let within = receiver.head().is_some();
        if let Some((most, _)) = receiver.awaits().filter(|_| how & 16 == 0 && !left.is_empty()) {
            SHARES.reach("a piece");
            let count = most.min(left.len()).min(5000);
            receiver.placed(count);
            left = &left[count..];
            continue;
        }
        match receiver.next(rest) {
            Ok(Some((used, segment))) => {
                assert!(used <= rest.len() && used > 0);
                SHARES.reach("a segment");
                match segment {
                    Segment::Flush { .. } => SHARES.reach("a flush"),
                    _ if segment.is_request() && (!piecewise || negotiated.crc) => {
                        SHARES.reach("a request in a whole FPDU");
                    }
                    _ => {}
                }
                if !within && receiver.head().is_none() {
                    assert_eq!(Receiver::needed(rest), 0);
                }
                if receiver.is_discarding() {
                    assert!(!segment.is_request());
                }
                if refuse && matches!(segment, Segment::Send { mo: 0, .. }) {
                    receiver.discard_requests(receiver.message_mark());
                }
                left = &left[used..];
                some = if how & 64 == 0 { FIRST } else { usize::MAX };
            }
            Ok(None) => {
                assert!(within || Receiver::needed(rest) > 0);
                if rest.len() == left.len() {
                    return;
                }
                some += 700;
            }
            Err(error) => {
                SHARES.reach("an error");
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
