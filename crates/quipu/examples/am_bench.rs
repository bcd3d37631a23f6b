//! Measures Active Messages.
#[path = "../src/cmd/am/bench.rs"]
mod bench;
fn main() -> Result<(), Box<dyn std::error::Error>> {
    if std::env::args().nth(1).as_deref() == Some("--answer") {
        return bench::answer();
    }
    let n = std::env::args().nth(1).map_or(20000, |t| t.parse().unwrap());
    let mut peer = std::process::Command::new(std::env::current_exe()?);
    peer.arg("--answer");
    for line in bench::measure(peer, bench::Extent { rounds: 15, messages: n })? {
        let q = |v: &[f64]| {
            format!(
                "{:8.1} {:8.1} {:8.1}",
                bench::quartile(v, 1),
                bench::quartile(v, 2),
                bench::quartile(v, 3)
            )
        };
        let ratio: Vec<f64> = line.raw.iter().zip(&line.am).map(|(r, a)| a / r).collect();
        let delta: Vec<f64> = line.raw.iter().zip(&line.am).map(|(r, a)| a - r).collect();
        println!(
            "{:36} raw {} am {} ratio {:.3} delta {:.1}",
            line.what,
            q(&line.raw),
            q(&line.am),
            bench::quartile(&ratio, 2),
            bench::quartile(&delta, 2)
        );
    }
    Ok(())
}
