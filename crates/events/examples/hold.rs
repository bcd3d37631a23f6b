//! The hold model: takes the next event and schedules another, with a constant number ahead. Prints million
//! events a second: `cargo run --release -p quipu-events --example hold`.

use std::hint::black_box;
use std::time::Instant;

use quipu_events::Kernel;

fn main() {
    // Of each measurement. Few are enough to count instructions.
    let operations: u64 =
        std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(10_000_000);
    for pending in [16, 256, 4096, 65_536] {
        let mut kernel = Kernel::default();
        let mut state = 1u64;
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 44
        };
        (0..pending).for_each(|event| kernel.at(draw(), event));
        let begun = Instant::now();
        for _ in 0..operations {
            if let Some(event) = kernel.next() {
                kernel.after(draw(), black_box(event));
            }
        }
        let rate = operations as f64 / begun.elapsed().as_secs_f64() / 1e6;
        println!("{pending:>6} pending: {rate:.1} million events a second");
    }
}
