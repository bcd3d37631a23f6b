//! Samples of counters in files that other processes write: read by `quipu top` and others. Most have the
//! magic number, the version, the length and the CRC of one.
#![no_main]

mod shares;

use libfuzzer_sys::fuzz_target;
use quipu_iwarp::wire::mpa::crc32c;
use quipu_observe::{ENGINE, LANE, LANES, MAX_BYTES, QueuePair, REASONS, STATUSES, Sample, WORK};
use shares::Shares;

static SHARES: Shares<2> = Shares::new(["a sample", "queue pairs"]);

/// Octets before the body.
const HEADER: usize = 20;

/// A sample with so many queue pairs.
fn whole(how: u8, text: &[u8]) -> Vec<u8> {
    let pair = QueuePair {
        number: 1,
        service: how,
        state: how % 8,
        path: how % 7,
        peer: 2,
        peer_address: [10, 0, 0, how].into(),
        send_queue: 3,
        recv_queue: 4,
        work: [5; WORK],
    };
    let sample = Sample {
        process: how.into(),
        started: 1,
        taken: 2,
        program: String::from_utf8_lossy(text).into_owned(),
        device: "quipu0".into(),
        address: [10, 0, 0, 1].into(),
        engine: [1; ENGINE],
        drops: [2; REASONS],
        statuses: [3; STATUSES.len()],
        work: [4; WORK],
        lanes: [[5; LANE]; LANES],
        queue_pairs: vec![pair; usize::from(how % 4)],
        omitted: 0,
    };
    let mut out = Vec::new();
    sample.encode(&mut out);
    assert!(Sample::decode(&out).is_ok(), "what is written is read");
    out
}

fuzz_target!(|input: &[u8]| {
    SHARES.begin();
    let [how, bytes @ ..] = input else { return };
    let mut made = match how >> 6 {
        0 => bytes.to_vec(),
        1 => [&whole(0, b"")[..HEADER], bytes].concat(),
        _ => whole(*how, &bytes[..bytes.len() / 2]),
    };
    if how >> 6 > 1 {
        // A few octets are others, anywhere.
        for change in bytes[bytes.len() / 2..].chunks_exact(3).take(4) {
            let at = usize::from(change[0]) << 8 | usize::from(change[1]);
            let at = HEADER + at % (made.len() - HEADER);
            made[at] = change[2];
        }
    }
    if how >> 6 > 0 {
        let len = (made.len() - HEADER) as u32;
        let crc = crc32c(&made[HEADER..]);
        made[12..16].copy_from_slice(&len.to_le_bytes());
        made[16..HEADER].copy_from_slice(&crc.to_le_bytes());
    }
    if let Ok(sample) = Sample::decode(&made) {
        SHARES.reach("a sample");
        if !sample.queue_pairs.is_empty() {
            SHARES.reach("queue pairs");
        }
        let mut out = Vec::new();
        sample.encode(&mut out);
        assert!(out.len() <= MAX_BYTES);
        assert_eq!(Sample::decode(&out), Ok(sample));
    }
});
