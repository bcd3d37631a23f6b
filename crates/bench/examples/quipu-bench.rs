//! `quipu bench` without the rest of the command: `quipu-bench bench --quick`.

use clap::Parser;

/// Measures Quipu compared with floors and peers.
#[derive(Parser)]
enum Command {
    /// As `quipu bench`.
    Bench(quipu_bench::Options),
}

fn main() -> anyhow::Result<()> {
    let Command::Bench(options) = Command::parse();
    quipu_bench::run(&options, |text| print!("{text}"))
}
