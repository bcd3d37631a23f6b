//! MPA start-up frames: as bytes, and through both start-up machines in pieces. Most have a key and a length
//! that are right; what a responder answers is given to an initiator.
#![no_main]

mod shares;

use libfuzzer_sys::fuzz_target;
use quipu_iwarp::setup::{Outcome, Request};
use quipu_iwarp::wire::mpa::{
    Enhanced, FRAME_HEADER_LEN, FrameKind, KEY_LEN, MAX_FRAME_LEN, MAX_PRIVATE_DATA, Marker,
    StartFrame,
};
use quipu_iwarp::{Initiator, Params, Responder};
use shares::Shares;

static SHARES: Shares<5> = Shares::new(["a frame", "a request", "an end", "a refusal", "a match"]);

/// A frame of these bytes: flags, revision and private data.
fn frame(kind: FrameKind, how: u8, bytes: &[u8]) -> Vec<u8> {
    let empty = StartFrame {
        kind,
        markers: false,
        crc: false,
        reject: false,
        revision: 1 + (how >> 3 & 1),
        enhanced: None,
        private_data: b"",
    };
    let mut frame = vec![0; FRAME_HEADER_LEN];
    empty.emit(&mut frame);
    let Some((&flags, bytes)) = bytes.split_first() else { return frame };
    frame[KEY_LEN] = flags;
    frame.extend_from_slice(bytes);
    // With bytes behind the frame, or too few.
    let len = match how >> 4 & 3 {
        0 => bytes.len() / 2,
        1 if how & 0x80 != 0 => bytes.len() + 1,
        _ => bytes.len(),
    };
    let len = len.min(MAX_PRIVATE_DATA + usize::from(how & 0x80 != 0)) as u16;
    frame[KEY_LEN + 2..FRAME_HEADER_LEN].copy_from_slice(&len.to_be_bytes());
    frame
}

/// What an end wants.
fn params(how: u8) -> Params {
    let deep = Params::peer_to_peer(u16::from(how), 0x3fff);
    match how & 3 {
        0 => Params::default(),
        1 => Params { revision: 1, crc: false, enhanced: None },
        2 => deep,
        _ => Params {
            enhanced: Some(Enhanced {
                rtr_write: false,
                peer_to_peer: true,
                ..Enhanced::default()
            }),
            ..deep
        },
    }
}

/// How what arrives in pieces ends for an initiator.
fn initiate(params: Params, bytes: &[u8], step: usize) -> Option<Outcome> {
    let mut initiator = Initiator::new(params, b"").expect("legal parameters");
    for piece in bytes.chunks(step) {
        match initiator.handle(piece) {
            Ok((used, None)) => assert_eq!(used, piece.len()),
            Ok((used, outcome)) => {
                assert!(used <= piece.len());
                return outcome;
            }
            Err(error) => {
                initiator.last_words(&error);
                return None;
            }
        }
    }
    None
}

/// What arrives in pieces as a responder sees it.
fn respond(bytes: &[u8], step: usize) -> Option<(Responder, Request)> {
    let mut responder = Responder::new();
    for piece in bytes.chunks(step) {
        match responder.handle(piece) {
            Ok((used, None)) => assert_eq!(used, piece.len()),
            Ok((_, Some(request))) => return Some((responder, request)),
            Err(_) => return None,
        }
    }
    None
}

fuzz_target!(|input: &[u8]| {
    SHARES.begin();
    let [step, how, wish, bytes @ ..] = input else { return };
    let kind = if how & 1 == 0 { FrameKind::Request } else { FrameKind::Reply };
    let bytes = if how & 6 == 0 { bytes.to_vec() } else { frame(kind, *how, bytes) };
    let step = usize::from(*step).max(1);
    let _ = Marker::parse(&bytes);
    for kind in [FrameKind::Request, FrameKind::Reply] {
        if let Ok(frame) = StartFrame::parse(kind, &bytes) {
            SHARES.reach("a frame");
            let mut out = [0; MAX_FRAME_LEN];
            frame.emit(&mut out);
            assert_eq!(StartFrame::parse(kind, &out), Ok(frame));
        }
    }
    match initiate(params(*wish), &bytes, step) {
        Some(Outcome::Established(_)) => SHARES.reach("an end"),
        Some(Outcome::Rejected { .. }) => SHARES.reach("a refusal"),
        None => {}
    }
    let Some((mut responder, request)) = respond(&bytes, step) else { return };
    SHARES.reach("a request");
    if wish & 0x10 != 0 || responder.accept(params(wish >> 2), b"yes").is_err() {
        responder.reject(b"no").expect("a request is there");
    }
    let mut out = [0; MAX_FRAME_LEN];
    let len = responder.poll_transmit(&mut out);
    // Whoever has asked for that understands the answer; only that they may not fit each other.
    let asked = Params { revision: request.revision, crc: request.crc, enhanced: request.enhanced };
    if (1..=2).contains(&asked.revision) && initiate(asked, &out[..len], step).is_some() {
        SHARES.reach("a match");
    }
});
