//! `quipu bench --am`: Active Messages and Split-C in numbers, each with its target.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use super::bench::{Extent, Meter, Outcome, quartile};
use super::peers;

/// The program that measures accesses of Split-C; `quipu paper via` uses it, too.
const ACCESSES: &str = include_str!("../../../../paper/papers/via.sc");
/// A program that ends as soon as all its processes have met.
const MEETING: &str = "splitc_main() { barrier(); }\n";
/// Processes that are started at once, and how often.
const PROCESSES: u32 = 64;
const STARTS: u32 = 3;
/// Sizes of bulk messages, and bytes that one round moves at each.
const SIZES: [(&str, usize); 3] = [("4 KB", 4096), ("64 KB", 65_536), ("1 MB", 1 << 20)];
const BYTES: usize = 32 << 20;

/// What a value must not exceed, or must reach.
#[derive(Clone, Copy, Debug)]
enum Target {
    AtMost(f64),
    AtLeast(f64),
}

impl Target {
    fn is_reached(self, value: f64) -> bool {
        match self {
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        }
    }

    fn words(self) -> String {
        match self {
            Self::AtMost(most) => format!("<= {most}"),
            Self::AtLeast(least) => format!(">= {least}"),
        }
    }
}

/// One value, from several rounds.
#[derive(Debug)]
struct Row {
    what: String,
    unit: &'static str,
    rounds: Vec<f64>,
    target: Option<Target>,
}

/// The rows, and why some are missing.
#[derive(Debug, Default)]
struct Table {
    rows: Vec<Row>,
    notes: Vec<String>,
}

impl Table {
    fn add(&mut self, what: &str, unit: &'static str, rounds: Vec<f64>, target: Option<Target>) {
        self.rows.push(Row { what: what.into(), unit, rounds, target });
    }

    fn print(&self) {
        println!("{:52} {:>28}  {:12} verdict", "", "quartiles", "target");
        for row in &self.rows {
            let [low, median, high] = [1, 2, 3].map(|which| quartile(&row.rounds, which));
            let shown = format!("{low:.3} / {median:.3} / {high:.3} {}", row.unit);
            let target = row.target.map_or(String::new(), Target::words);
            let verdict = row.target.map_or("", |target| verdict(target, median));
            println!("{:52} {shown:>28}  {target:12} {verdict}", row.what);
        }
        for note in &self.notes {
            println!("note: {note}");
        }
    }

    fn json(&self) -> Value {
        let row = |row: &Row| {
            let quartiles = [1, 2, 3].map(|which| quartile(&row.rounds, which));
            json!({ "what": row.what, "unit": row.unit, "quartiles": quartiles,
                    "target": row.target.map(Target::words),
                    "reached": row.target.map(|target| target.is_reached(quartiles[1])) })
        };
        json!({ "rows": self.rows.iter().map(row).collect::<Vec<_>>(), "notes": self.notes })
    }
}

fn verdict(target: Target, value: f64) -> &'static str {
    if target.is_reached(value) { "reached" } else { "missed" }
}

/// A folder that goes with its owner.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Outcome<Self> {
        let path = std::env::temp_dir().join(format!("quipu-bench-am-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs this command with other arguments; its output.
fn quipu(arguments: &[&str]) -> Outcome<Vec<u8>> {
    let mut command = Command::new(std::env::current_exe()?);
    let output = command.args(arguments).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("`quipu {}` failed: {}", arguments.join(" "), said.trim()).into())
}

/// The command that answers measurements.
fn answering() -> Outcome<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["am", "answer"]);
    Ok(command)
}

/// Compiles a Split-C program.
fn compile(folder: &Path, name: &str, source: &str) -> Outcome<String> {
    let (file, program) = (folder.join(format!("{name}.sc")), folder.join(name));
    fs::write(&file, source)?;
    let text = |path: &Path| path.to_str().map(str::to_owned).ok_or("the folder's name is no text");
    let program = text(&program)?;
    quipu(&["splitc", "cc", "-O2", &text(&file)?, "-o", &program])?;
    Ok(program)
}

/// Rows of Active Messages between two processes, next to the queue pair below.
fn active_messages(answer: Command, extent: Extent, table: &mut Table) -> Outcome {
    let mut meter = Meter::new(answer)?;
    let messages = extent.messages;
    meter.raw_half(messages)?;
    meter.am_half(messages)?;
    let [mut half, mut cost, mut gap, mut barrier] = [const { Vec::new() }; 4];
    let mut ratios = SIZES.map(|_| Vec::new());
    for _ in 0..extent.rounds {
        let raw = meter.raw_half(messages)?;
        let am = meter.am_half(messages)?;
        half.push(am / 1000.0);
        cost.push(am - raw);
        gap.push(meter.gap(messages)?);
        barrier.push(meter.barrier(messages)? / 1000.0);
        for (ratios, (_, len)) in ratios.iter_mut().zip(SIZES) {
            let count = (BYTES / len).clamp(24, 2000) as u64;
            let raw = meter.raw_bulk(len, count)?;
            ratios.push(meter.am_bulk(len, count)? / raw);
        }
    }
    meter.quit()?;
    table.add("short message, half round trip of 16 B", "us", half, None);
    table.add("  more than a send of the queue pair", "ns", cost, Some(Target::AtMost(60.0)));
    table.add("gap between messages", "ns", gap, Some(Target::AtMost(90.0)));
    for (ratios, (name, _)) in ratios.into_iter().zip(SIZES) {
        let what = format!("bulk of {name}, in the queue pair's rate");
        table.add(&what, "x", ratios, Some(Target::AtLeast(0.97)));
    }
    table.add("barrier of 2 processes", "us", barrier, None);
    Ok(())
}

/// Rows next to UCX and Open MPI.
fn others(answer: Command, extent: Extent, table: &mut Table) -> Outcome {
    let compared = peers::compare(answer, extent, false)?;
    for peer in &compared.peers {
        let within = peer.ours.iter().zip(&peer.theirs);
        let most = if peer.what.starts_with("barrier") { 1.2 } else { 1.0 };
        let what = format!("{}, in that of {}", peer.what.trim_end_matches(", ns"), peer.name);
        let ratios = within.map(|(ours, theirs)| ours / theirs).collect();
        table.add(&what, "x", ratios, Some(Target::AtMost(most)));
    }
    table.notes.extend(compared.skipped);
    Ok(())
}

/// Rows of Split-C between two processes.
fn split_c(folder: &Path, extent: Extent, table: &mut Table) -> Outcome {
    let program = compile(folder, "accesses", ACCESSES)?;
    let (mut put, mut get) = (Vec::new(), Vec::new());
    let count = extent.messages.to_string();
    for _ in 0..extent.rounds {
        let arguments = ["spmd", "-n", "2", "--label", "never", "--", &program, &count];
        let times: Value = serde_json::from_slice(&quipu(&arguments)?)?;
        for (list, name) in [(&mut put, "put"), (&mut get, "get")] {
            let ns = times[name].as_f64().ok_or("the program has measured nothing")?;
            list.push(ns / 1000.0);
        }
    }
    for (what, list) in [("put", put), ("get", get)] {
        let what = format!("Split-C {what} of 8 B into run-time memory");
        table.add(&what, "us", list, Some(Target::AtMost(0.10)));
    }
    Ok(())
}

/// The row of a start of many processes.
fn start(folder: &Path, table: &mut Table) -> Outcome {
    let program = compile(folder, "meeting", MEETING)?;
    let ranks = PROCESSES.to_string();
    let mut times = Vec::new();
    for _ in 0..STARTS {
        let began = Instant::now();
        quipu(&["spmd", "-n", &ranks, "--label", "never", "--", &program])?;
        times.push(began.elapsed().as_secs_f64());
    }
    let what = format!("start, barrier and end of {PROCESSES} processes");
    table.add(&what, "s", times, Some(Target::AtMost(1.0)));
    Ok(())
}

/// Measures all rows and prints them.
///
/// # Errors
///
/// The adapter, or the other process of a measurement, fails. What needs a C compiler or another program is
/// left out where that is missing, with a note.
pub(super) fn run(extent: Extent, is_json: bool) -> Outcome {
    let mut table = Table::default();
    active_messages(answering()?, extent, &mut table)?;
    others(answering()?, extent, &mut table)?;
    let folder = Folder::new()?;
    if let Err(error) = split_c(&folder.0, extent, &mut table) {
        table.notes.push(format!("Split-C is not measured: {error}"));
    }
    if let Err(error) = start(&folder.0, &mut table) {
        table.notes.push(format!("the start of processes is not measured: {error}"));
    }
    if is_json {
        println!("{}", table.json())
    } else {
        table.print()
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_judged() {
        let mut table = Table::default();
        table.add("fast", "ns", vec![50.0, 100.0, 60.0], Some(Target::AtMost(60.0)));
        table.add("slow", "x", vec![0.9, 1.0, 0.9], Some(Target::AtLeast(0.97)));
        table.add("shown", "us", vec![1.0], None);
        let json = table.json();
        let reached = |row: usize| json["rows"][row]["reached"].clone();
        assert_eq!((reached(0), reached(1), reached(2)), (json!(true), json!(false), Value::Null));
        assert_eq!(json["rows"][1]["target"], ">= 0.97");
    }
}
