//! Goodput of a connection of QPIP over loss, delay and window, in simulated time: a table, or JSON with
//! `--json`.
//!
//! `cargo run --release -p quipu-sim --example goodput`; what the kernel makes of such a path in real time is
//! `tests/goodput.py`.

use quipu_sim::{Path, goodput};

/// Packets lost in a million, round trips in milliseconds, and windows in KiB.
const LOSSES: [u32; 4] = [0, 1_000, 10_000, 50_000];
const ROUND_TRIPS: [u64; 3] = [1, 10, 100];
const WINDOWS: [usize; 2] = [256, 4_096];
/// Octets per second of the link: 100 Mbit/s.
const RATE: u64 = 12_500_000;
/// Simulated time of a run, in nanoseconds, and runs of a cell, of which the mean is shown.
const NS: u64 = 20_000_000_000;
const SEEDS: u64 = 2;

/// The mean of all runs of a cell, in octets per second.
fn mean(path: &Path) -> Result<u64, String> {
    let rates: Result<Vec<_>, _> =
        (1..=SEEDS).map(|seed| goodput(seed, path, NS).map(|it| it.rate())).collect();
    Ok(rates?.iter().sum::<u64>() / SEEDS)
}

fn main() -> Result<(), String> {
    let json = std::env::args().any(|word| word == "--json");
    let mut lines = Vec::new();
    if !json {
        println!("lost %  rtt ms  window KiB     KB/s  of the link");
    }
    for loss_ppm in LOSSES {
        for rtt_ms in ROUND_TRIPS {
            for kib in WINDOWS {
                let (rtt_ns, window) = (rtt_ms * 1_000_000, kib << 10);
                let rate = mean(&Path { loss_ppm, rtt_ns, window, rate: RATE, late_ns: 0 })?;
                let (percent, share) = (f64::from(loss_ppm) / 1e4, rate as f64 / RATE as f64);
                if json {
                    lines.push(format!(
                        "  {{\"loss_percent\": {percent}, \"rtt_ms\": {rtt_ms}, \"window\": \
                         {window}, \"octets_per_second\": {rate}}}"
                    ));
                } else {
                    let (kb, share) = (rate / 1_000, share * 100.0);
                    println!("{percent:6}  {rtt_ms:6}  {kib:10}  {kb:7}  {share:9.1} %");
                }
            }
        }
    }
    if json {
        println!("[\n{}\n]", lines.join(",\n"));
    }
    Ok(())
}
