//! The parameters of LogP (Culler et al.), and bandwidth by size.

use std::hint::black_box;
use std::process::Command;
use std::time::Instant;

use serde_json::{Value, json};

use super::bench::{Meter, OneThread, Outcome, quartile};
use super::parts::{Part, parts};

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Rounds of each value, alternating.
    pub rounds: u32,
    /// Short messages of a round.
    pub messages: u32,
    /// Bytes that one round moves at one size.
    pub bytes: usize,
}

/// Requests of an isolated burst: fewer than the credits of a new connection.
const ISOLATED: u32 = 4;
/// The longest payload that goes into a message; longer ones are written.
const MEDIUM: usize = 4096;

/// Sizes from 4 bytes to 1 MB, by powers of two.
fn sizes() -> impl Iterator<Item = usize> {
    (2..=20).map(|power| 1 << power)
}

/// A loop that takes some time and does nothing.
fn compute(turns: u64) {
    for turn in 0..turns {
        black_box(turn);
    }
}

/// Turns of that loop that take so long.
fn turns_of(ns: f64) -> u64 {
    let turns = 1_000_000;
    let times: Vec<f64> = (0..9)
        .map(|_| {
            let began = Instant::now();
            compute(turns);
            began.elapsed().as_nanos() as f64
        })
        .collect();
    (ns * turns as f64 / quartile(&times, 1)) as u64
}

/// LogP of Active Messages, and the queue pair's half round trip: medians over rounds.
fn logp(meter: &mut Meter, extent: Extent) -> Outcome<Value> {
    let Extent { rounds, messages, .. } = extent;
    meter.raw_half(messages)?;
    meter.am_half(messages)?;
    let [mut raw, mut half, mut gap, mut send, mut receive] = [const { Vec::new() }; 5];
    for _ in 0..rounds {
        raw.push(meter.raw_half(messages)?);
        half.push(meter.am_half(messages)?);
        gap.push(meter.gap(messages)?);
        send.push(meter.isolated(messages / 4 / ISOLATED, ISOLATED)?);
    }
    let [gap_ns, send_ns] = [&gap, &send].map(|times| quartile(times, 2));
    // Long enough that every reply has come when the computation ends.
    let delay = 2.0 * (gap_ns + quartile(&half, 2));
    let turns = turns_of(delay);
    for _ in 0..rounds {
        let alone = turns_alone(turns, messages / 8);
        let both = meter.spaced(messages / 8, || compute(turns))?;
        receive.push((both - alone - send_ns).max(0.0));
    }
    let differences: Vec<f64> = raw.iter().zip(&half).map(|(raw, am)| am - raw).collect();
    let (half_ns, receive_ns) = (quartile(&half, 2), quartile(&receive, 2));
    let delta = quartile(&differences, 2);
    Ok(json!({
        "raw_half_ns": quartile(&raw, 2),
        "half_ns": half_ns,
        "delta_ns": delta,
        "delta_cycles": delta * quipu_bench::cycles_per_ns(),
        "send_ns": send_ns,
        "receive_ns": receive_ns,
        "latency_ns": half_ns - send_ns - receive_ns,
        "gap_ns": gap_ns,
    }))
}

fn turns_alone(turns: u64, messages: u32) -> f64 {
    let began = Instant::now();
    for _ in 0..messages {
        compute(turns);
    }
    began.elapsed().as_nanos() as f64 / f64::from(messages)
}

/// Bytes in a nanosecond by size, of sends of the queue pair and of Active Messages.
fn bandwidth(meter: &mut Meter, extent: Extent) -> Outcome<Vec<Value>> {
    let mut rows = Vec::new();
    for len in sizes() {
        let count = (extent.bytes / len).clamp(24, 2000) as u64;
        let (mut raw, mut am) = (Vec::new(), Vec::new());
        for _ in 0..extent.rounds.clamp(3, 7) {
            raw.push(meter.raw_bulk(len, count)?);
            am.push(match len {
                ..=MEDIUM => meter.am_medium(len, count)?,
                _ => meter.am_bulk(len, count)?,
            });
        }
        let [raw, am] = [raw, am].map(|rates| 1000.0 * quartile(&rates, 2));
        rows.push(json!({ "bytes": len, "raw": raw, "am": am }));
    }
    Ok(rows)
}

/// What is different about a message of 1 KB, in nanoseconds: the times between two, a copy of it, and the
/// time that a short message takes the queue pair.
fn kilobyte(meter: &mut Meter, extent: Extent) -> Outcome<Value> {
    let count = u64::from(extent.messages / 10).max(100);
    let (mut raw, mut am, mut short) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..extent.rounds {
        raw.push(1024.0 / meter.raw_bulk(1024, count)?);
        am.push(1024.0 / meter.am_medium(1024, count)?);
        short.push(32.0 / meter.raw_bulk(32, count)?);
    }
    let (from, mut to) = ([1_u8; 1024], [0; 1024]);
    let began = Instant::now();
    for _ in 0..10_000 {
        black_box(&mut to).copy_from_slice(black_box(&from));
    }
    let copy = began.elapsed().as_nanos() as f64 / 10_000.0;
    let [raw, am, short] = [raw, am, short].map(|times| quartile(&times, 2));
    Ok(json!({ "raw_ns": raw, "am_ns": am, "copy_ns": copy, "short_ns": short }))
}

fn list(parts: &[Part]) -> Value {
    let row = |part: &Part| json!({ "group": part.group.name(), "what": part.what, "ns": part.ns });
    parts.iter().map(row).collect()
}

/// Prints what [`measure`] has returned.
pub fn print(costs: &Value) {
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    for (key, what) in [
        ("raw_half_ns", "half round trip of 16 bytes, queue pair"),
        ("half_ns", "half round trip of 16 bytes, Active Messages"),
        ("delta_ns", "mapping cost"),
        ("send_ns", "o_s, overhead of the sender"),
        ("receive_ns", "o_r, overhead of the receiver"),
        ("latency_ns", "L, latency"),
        ("gap_ns", "g, gap between messages"),
    ] {
        println!("{what:48} {:10.1} ns", number(&costs["logp"][key]));
    }
    for (key, what) in [("request", "a request and its reply"), ("read", "with 8 bytes of payload")]
    {
        let parts = costs[key].as_array().map_or(&[][..], Vec::as_slice);
        let sum: f64 = parts.iter().map(|part| number(&part["ns"])).sum();
        println!("\n{:48} {sum:10.1} ns", format!("parts of {what}"));
        for part in parts {
            let ns = number(&part["ns"]);
            let name = format!(
                "  {}: {}",
                part["group"].as_str().unwrap_or(""),
                part["what"].as_str().unwrap_or("")
            );
            println!("{name:48} {ns:10.1} ns {:5.1} %", 100.0 * ns / sum);
        }
    }
    println!("\n{:>10} {:>20} {:>24}", "bytes", "queue pair, MB/s", "Active Messages, MB/s");
    for row in costs["bandwidth"].as_array().map_or(&[][..], Vec::as_slice) {
        println!("{:>10} {:20.1} {:24.1}", row["bytes"], number(&row["raw"]), number(&row["am"]));
    }
}

/// Measures everything; `peer` is the command that answers.
///
/// # Errors
///
/// The adapter or the other process fails.
pub fn measure(peer: Command, extent: Extent) -> Outcome<Value> {
    let mut meter = Meter::new(peer)?;
    let logp = logp(&mut meter, extent)?;
    let bandwidth = bandwidth(&mut meter, extent)?;
    let kilobyte = kilobyte(&mut meter, extent)?;
    meter.quit()?;
    drop(meter);
    let mut ends = OneThread::new()?;
    let messages = (extent.messages / 10).max(2);
    let (mut raw, mut am) = (Vec::new(), Vec::new());
    for _ in 0..5 * extent.rounds {
        raw.push(2.0 * ends.raw(messages)?);
        am.push(2.0 * ends.am(messages)?);
    }
    drop(ends);
    Ok(json!({
        "logp": logp,
        "bandwidth": bandwidth,
        "kilobyte": kilobyte,
        "one_thread": { "raw_ns": quartile(&raw, 2), "am_ns": quartile(&am, 2) },
        "request": list(&parts(0)?),
        "read": list(&parts(8)?),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_computation_takes_about_as_long_as_asked() {
        let turns = turns_of(100_000.0);
        let times: Vec<f64> = (0..9).map(|_| turns_alone(turns, 10)).collect();
        let shortest = quartile(&times, 0);
        assert!(shortest > 10_000.0 && shortest < 1_000_000.0, "{shortest} ns");
    }

    #[test]
    fn sizes_go_to_a_megabyte() {
        assert_eq!((sizes().next(), sizes().last()), (Some(4), Some(1 << 20)));
    }
}
