//! `quipu nbd bench`: queue pairs next to sockets and to the servers of others, in turns.

mod cpu;
mod ext2;
mod process;
mod rivals;

use std::process::ExitCode;

use serde_json::json;

use super::{Failure, size};

/// What to measure.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    /// Rounds, in each of which every contender has its turn.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Seconds of each turn.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5)]
    seconds: f64,
    /// Measure sequential writes and reads of a file on ext2 instead, as figure 7 of the QPIP
    /// paper: needs root, FUSE and loop devices.
    #[arg(long)]
    ext2: bool,
    /// With --ext2: the file's size.
    #[arg(long, value_name = "SIZE", default_value = "409M", value_parser = size)]
    size: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Be the part within its own namespaces: for this command's own use.
    #[arg(long, hide = true)]
    inside: bool,
}

const EXAMPLES: &str = "\
Examples:
  quipu nbd bench                     1 MB sequential and 4 KB random, by all transports and servers
  sudo quipu nbd bench --ext2         a file of 409 MB on ext2, by all transports

Ratios are medians of the ratios within rounds. Measure on a machine that does nothing else.";

/// A number of a contender in a test, for each round.
struct Row {
    test: &'static str,
    name: &'static str,
    /// Megabytes a second, and megabytes a second of processor time of the client.
    samples: Vec<(f64, f64)>,
}

/// What came of a run.
#[derive(Default)]
struct Table {
    rows: Vec<Row>,
    /// Who did not take part, and why.
    notes: Vec<String>,
}

impl Table {
    fn add(&mut self, test: &'static str, name: &'static str, sample: (f64, f64)) {
        match self.rows.iter_mut().find(|row| row.test == test && row.name == name) {
            Some(row) => row.samples.push(sample),
            None => self.rows.push(Row { test, name, samples: vec![sample] }),
        }
    }

    fn note(&mut self, text: String) {
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Ratios of a row's samples to those of another row in the same test.
    fn ratio(&self, row: &Row, to: &str) -> Option<(f64, f64)> {
        let other = self.rows.iter().find(|other| other.test == row.test && other.name == to)?;
        let pairs = || row.samples.iter().zip(&other.samples);
        let speed = median(pairs().map(|(ours, theirs)| ours.0 / theirs.0).collect())?;
        Some((speed, median(pairs().map(|(ours, theirs)| ours.1 / theirs.1).collect())?))
    }

    /// The targets of a run: what is compared, ours, the target.
    fn targets(&self) -> Vec<(String, f64, f64)> {
        let rows = |name: &'static str| self.rows.iter().filter(move |row| row.name == name);
        let mut found = Vec::new();
        for target in rivals::TARGETS {
            for row in rows(target.name).filter(|row| row.test.starts_with(target.test)) {
                let ratios = target.to.iter().filter_map(|to| self.ratio(row, to));
                let ratios = ratios.map(|ratio| if target.of_cpu { ratio.1 } else { ratio.0 });
                // The best rival counts.
                if let Some(ratio) = ratios.min_by(f64::total_cmp) {
                    let what = if target.of_cpu { "MB per CPU second" } else { "MB/s" };
                    let to = target.to.join(", ");
                    let text = format!("{}: {what}, {} to {to}", row.test, row.name);
                    found.push((text, ratio, target.value));
                }
            }
        }
        found
    }

    fn print(&self, base: &str, json: bool) {
        let rows = self.rows.iter().filter_map(|row| {
            let speed = median(row.samples.iter().map(|sample| sample.0).collect())?;
            let per_cpu = median(row.samples.iter().map(|sample| sample.1).collect())?;
            Some((row, speed, per_cpu, self.ratio(row, base)))
        });
        if json {
            let rows: Vec<_> = rows
                .map(|(row, speed, per_cpu, ratio)| {
                    json!({"test": row.test, "name": row.name, "rounds": row.samples.len(),
                        "mb_per_s": speed, "mb_per_cpu_s": per_cpu,
                        "speed_ratio": ratio.map(|r| r.0), "cpu_ratio": ratio.map(|r| r.1)})
                })
                .collect();
            let targets = self.targets().into_iter();
            let targets: Vec<_> = targets
                .map(|(what, ours, target)| json!({"what": what, "ours": ours, "target": target}))
                .collect();
            let table =
                json!({"base": base, "rows": rows, "targets": targets, "notes": self.notes});
            println!("{table}");
            return;
        }
        println!(
            "{:22} {:34} {:>8} {:>6} {:>10} {:>6}",
            "test", "contender", "MB/s", "ratio", "MB/CPU s", "ratio"
        );
        for (row, speed, per_cpu, ratio) in rows {
            let show = |ratio: Option<f64>| ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"));
            let (faster, cheaper) = (show(ratio.map(|r| r.0)), show(ratio.map(|r| r.1)));
            println!(
                "{:22} {:34} {speed:>8.0} {faster:>6} {per_cpu:>10.0} {cheaper:>6}",
                row.test, row.name
            );
        }
        println!("\nratios: to {base}");
        for (what, ours, target) in self.targets() {
            let verdict = if ours >= target { "reached" } else { "missed" };
            println!("target {verdict}: {what}: {ours:.2}, target {target:.2}");
        }
        for note in &self.notes {
            println!("note: {note}");
        }
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some(f64::midpoint(values[low], values[high]))
}

/// Measures as `quipu nbd bench` does, for `quipu bench --nbd`.
pub(crate) fn transports(quick: bool, json: bool) -> Result<ExitCode, Failure> {
    let (rounds, seconds) = if quick { (3, 0.2) } else { (7, 0.5) };
    let mut table = Table::default();
    rivals::measure(rounds, seconds, &mut table)?;
    table.print(rivals::BASE, json);
    Ok(ExitCode::SUCCESS)
}

/// Runs it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    if options.ext2 && !options.inside {
        return ext2::enter();
    }
    let mut table = Table::default();
    let base = if options.ext2 {
        ext2::measure(options.rounds, options.size, &mut table)?;
        ext2::BASE
    } else {
        rivals::measure(options.rounds, options.seconds, &mut table)?;
        rivals::BASE
    };
    table.print(base, options.json);
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_medians_of_those_within_rounds() {
        let mut table = Table::default();
        for (ours, theirs) in
            [((10.0, 4.0), (5.0, 4.0)), ((9.0, 6.0), (3.0, 2.0)), ((8.0, 1.0), (2.0, 1.0))]
        {
            table.add("a test", "ours", ours);
            table.add("a test", "theirs", theirs);
        }
        assert_eq!(table.ratio(&table.rows[0], "theirs"), Some((3.0, 1.0)));
        assert_eq!(table.ratio(&table.rows[0], "nobody"), None);
        assert_eq!(median(vec![1.0, 4.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(vec![f64::INFINITY]), None);
    }
}
