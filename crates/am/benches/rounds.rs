//! What a request and its reply cost in the engines of both ends: `cargo bench -p quipu-am`, or
//! under callgrind with the number of rounds as argument.

use std::hint::black_box;
use std::time::Instant;

use quipu_am::pair::Pair;

const BATCHES: usize = 200;

fn main() {
    let rounds = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(200_000);
    let mut pair = Pair::new().expect("two engines connect");
    let mut times = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        let began = Instant::now();
        for _ in 0..rounds / BATCHES {
            pair.round(black_box(&[])).expect("a round");
        }
        times.push(began.elapsed().as_nanos() as f64 / (rounds / BATCHES) as f64);
    }
    times.sort_by(f64::total_cmp);
    let [low, median, high] = [1, 2, 3].map(|quarter| times[(BATCHES - 1) * quarter / 4]);
    println!("request and reply through both engines: {low:.1} / {median:.1} / {high:.1} ns");
}
