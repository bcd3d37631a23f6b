//! Exchanges with a peer of plain iWARP, byte for byte as the RFCs have them: what stands in for an adapter
//! of another make. The scripts beside this file cite the section that each case is about; `script.rs` says
//! how they are written.
//!
//! Every case is played many times: with what the peer sends in one piece, in pieces of a few bytes, and
//! cut in two at every byte.

mod peer;
mod script;

use peer::{Pieces, Player};
use script::Case;

/// Pieces of so many bytes.
const SIZES: [usize; 5] = [1, 2, 3, 7, 64];

fn play(file: &str, text: &str) {
    let cases = script::parse(file, text);
    assert!(!cases.is_empty(), "{file} has no cases");
    for case in &cases {
        play_case(case, Pieces::Whole);
        for size in SIZES {
            play_case(case, Pieces::Of(size));
        }
        for at in 1..case.longest_arrival().min(600) {
            play_case(case, Pieces::CutAt(at));
        }
    }
}

fn play_case(case: &Case, pieces: Pieces) {
    Player::new(case, pieces).play();
}

macro_rules! scripts {
    ($($name:ident: $file:literal;)*) => {$(
        #[test]
        fn $name() {
            play($file, include_str!($file));
        }
    )*};
}

scripts! {
    rdmap: "rfc5040.txt";
    ddp: "rfc5041.txt";
    mpa: "rfc5044.txt";
    enhanced_connections: "rfc6581.txt";
    extensions: "rfc7306.txt";
    terminate_registry: "rfc6580.txt";
}
