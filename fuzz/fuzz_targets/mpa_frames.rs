//! MPA start-up frames: as bytes, and through both start-up machines in pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quipu_iwarp::wire::mpa::{FrameKind, MAX_FRAME_LEN, Marker, StartFrame};
use quipu_iwarp::{Initiator, Params, Responder};

fuzz_target!(|input: &[u8]| {
    let Some((&step, bytes)) = input.split_first() else {
        return;
    };
    let _ = Marker::parse(bytes);
    for kind in [FrameKind::Request, FrameKind::Reply] {
        if let Ok(frame) = StartFrame::parse(kind, bytes) {
            let mut out = [0; MAX_FRAME_LEN];
            frame.emit(&mut out);
            assert_eq!(StartFrame::parse(kind, &out), Ok(frame));
        }
    }
    let pieces = || bytes.chunks(usize::from(step).max(1));

    let mut initiator = Initiator::new(Params::default(), b"").expect("legal parameters");
    for piece in pieces() {
        match initiator.handle(piece) {
            Ok((used, None)) => assert_eq!(used, piece.len()),
            Ok((used, Some(_))) => {
                assert!(used <= piece.len());
                break;
            }
            Err(_) => break,
        }
    }

    let mut responder = Responder::new();
    for piece in pieces() {
        match responder.handle(piece) {
            Ok((used, None)) => assert_eq!(used, piece.len()),
            Ok((_, Some(_))) => {
                responder.accept(Params::default(), b"yes").expect("a request is there");
                let mut out = [0; MAX_FRAME_LEN];
                assert!(responder.poll_transmit(&mut out) > 0);
                break;
            }
            Err(_) => break,
        }
    }
});
