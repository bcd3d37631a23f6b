//! `quipu sim goodput`: what a stream of QPIP gets of a lossy, long link, in simulated time.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quipu_bench::plot::{Chart, Line, Style, Unit, page};
use quipu_sim::{Path, goodput};
use serde_json::json;

use crate::cmd::failure::Failure;

/// Which paths, and for how long.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    /// Packet loss in each direction, in percent.
    #[arg(long, value_name = "PERCENT", num_args = 1.., default_values_t = [0.0, 0.1, 1.0, 5.0])]
    loss: Vec<f64>,
    /// Round-trip times, in milliseconds.
    #[arg(long, value_name = "MS", num_args = 1.., default_values_t = [1.0, 10.0, 100.0])]
    rtt: Vec<f64>,
    /// Receive windows (memory of the posted receives), in KiB. At most 4096 are offered.
    #[arg(long, value_name = "KIB", num_args = 1.., default_values_t = [256, 4096],
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    window: Vec<u32>,
    /// Rate of the link, in Mbit/s.
    #[arg(long, value_name = "MBIT/S", default_value_t = 100,
          value_parser = clap::value_parser!(u64).range(1..=100_000))]
    rate: u64,
    /// Simulated time of each run.
    #[arg(long, value_name = "SECONDS", default_value_t = 20,
          value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,
    /// Runs over each path; the table shows the mean.
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u64).range(1..=1_000))]
    seeds: u64,
    /// Print the result as JSON, without progress.
    #[arg(long)]
    json: bool,
    /// Also draw the result into this SVG file: one chart for each loss, over the round-trip time, with one
    /// line for each window.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  quipu sim goodput                              the whole table
  quipu sim goodput --loss 1 --rtt 20 50 100     one loss, with other round-trip times
  quipu sim goodput --rate 1000 --json           a faster link, for programs
  quipu sim goodput --plot goodput.svg           also as a picture

The same options give the same table on every machine.";

/// Octets per second of a run over each path.
struct Cell {
    path: Path,
    rates: Vec<u64>,
}

impl Cell {
    fn mean(&self) -> u64 {
        self.rates.iter().sum::<u64>() / self.rates.len().max(1) as u64
    }

    fn loss_percent(&self) -> f64 {
        f64::from(self.path.loss_ppm) / 1e4
    }

    fn rtt_ms(&self) -> f64 {
        self.path.rtt_ns as f64 / 1e6
    }
}

/// Runs over all paths, and prints what came of it.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let cells = measure(options, paths(options)?)?;
    if let Some(path) = &options.plot {
        std::fs::write(path, plot(options, &cells)).map_err(|error| {
            let what = format!("cannot write {}", path.display());
            Failure::new(what, error, "give a file in a folder that you may write to")
        })?;
    }
    if options.json {
        let cells: Vec<_> = cells.iter().map(as_json).collect();
        println!("{:#}", json!(cells));
    } else {
        print!("{}", table(&cells));
    }
    Ok(ExitCode::SUCCESS)
}

/// Loss by round trip by window.
fn paths(options: &Options) -> Result<Vec<Path>, Failure> {
    let senseless = |what: String, advice| Failure::new(what, "it is out of range", advice);
    let mut paths = Vec::new();
    for &percent in &options.loss {
        if !(0.0..=50.0).contains(&percent) {
            return Err(senseless(format!("wrong value --loss {percent}"), "give 0 to 50"));
        }
        for &ms in &options.rtt {
            if !(0.01..=10_000.0).contains(&ms) {
                return Err(senseless(format!("wrong value --rtt {ms}"), "give 0.01 to 10000"));
            }
            paths.extend(options.window.iter().map(|&kib| Path {
                loss_ppm: (percent * 1e4).round() as u32,
                rtt_ns: (ms * 1e6) as u64,
                window: (kib as usize) << 10,
                rate: options.rate * 125_000,
                late_ns: 0,
            }));
        }
    }
    Ok(paths)
}

/// All runs, by as many threads as there are processors.
fn measure(options: &Options, paths: Vec<Path>) -> Result<Vec<Cell>, Failure> {
    let seeds = options.seeds as usize;
    let runs = paths.len() * seeds;
    let (next, bar) = (AtomicUsize::new(0), progress(options, runs as u64));
    let done = Mutex::new(vec![Ok(0); runs]);
    let work = || {
        while let run = next.fetch_add(1, Ordering::Relaxed)
            && run < runs
        {
            let (seed, path) = ((run % seeds) as u64 + 1, &paths[run / seeds]);
            let rate = goodput(seed, path, options.seconds * 1_000_000_000).map(|it| it.rate());
            done.lock().expect("no thread panics with it")[run] = rate;
            bar.inc(1);
        }
    };
    thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    bar.finish_and_clear();
    let rates = done.into_inner().expect("no thread panics with it");
    let rates: Vec<u64> = rates.into_iter().collect::<Result<_, _>>().map_err(|what| {
        let advice = "this is a bug of Quipu: report it with the options";
        Failure::new("a run broke a rule", what, advice)
    })?;
    let cells = paths.into_iter().zip(rates.chunks(seeds));
    Ok(cells.map(|(path, rates)| Cell { path, rates: rates.to_vec() }).collect())
}

fn progress(options: &Options, runs: u64) -> ProgressBar {
    if options.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(runs), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("{wide_bar} {pos} of {len} runs, {eta} to go");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn table(cells: &[Cell]) -> String {
    let mut out = "lost %  rtt ms  window KiB     KB/s  of the link\n".to_owned();
    for cell in cells {
        let (loss, rtt, kib) = (cell.loss_percent(), cell.rtt_ms(), cell.path.window >> 10);
        let share = cell.mean() as f64 / cell.path.rate as f64 * 100.0;
        let kb = cell.mean() / 1_000;
        out += &format!("{loss:6}  {rtt:6}  {kib:10}  {kb:7}  {share:9.1} %\n");
    }
    out
}

/// A chart for each loss, two in a row.
fn plot(options: &Options, cells: &[Cell]) -> String {
    const COLORS: [&str; 6] = ["#c8102e", "#1f6fb4", "#2f8f4e", "#b07a10", "#6b4fa0", "#8a8a8a"];
    let paths = options.rtt.len() * options.window.len();
    let losses = cells.chunks(paths.max(1)).zip(&options.loss);
    let rows = options.loss.len().div_ceil(2);
    let charts: Vec<_> = losses
        .enumerate()
        .map(|(index, (cells, percent))| {
            let lines = options.window.iter().zip(COLORS.iter().cycle()).map(|(&kib, color)| {
                let label = format!("window {kib} KiB");
                let own = cells.iter().filter(|it| it.path.window == (kib as usize) << 10);
                // An axis of powers has no place for nothing.
                let points = own.map(|it| (it.rtt_ms(), it.mean().max(1) as f64 / 1e6));
                let mut points: Vec<_> = points.collect();
                points.sort_by(|one, other| one.0.total_cmp(&other.0));
                Line { style: Style { label, color, width: 2.0, dashes: "" }, points }
            });
            let title = format!("{percent} % lost: MB/s over the round trip in ms");
            let units = [Unit::Of("ms"), Unit::Of("MB/s")];
            Chart::new((index / rows, index % rows), title, units, lines.collect())
        })
        .collect();
    let foot = format!(
        "{} s of simulated time, mean of {} runs for each path",
        options.seconds, options.seeds
    );
    let title = format!("Goodput of a stream of QPIP over a link of {} Mbit/s", options.rate);
    page(&title, &foot, &charts)
}

fn as_json(cell: &Cell) -> serde_json::Value {
    json!({
        "loss_percent": cell.loss_percent(), "rtt_ms": cell.rtt_ms(), "window": cell.path.window,
        "link_octets_per_second": cell.path.rate,
        "octets_per_second": { "mean": cell.mean(), "runs": cell.rates },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            loss: vec![0.0, 2.0],
            rtt: vec![10.0],
            window: vec![256, 4096],
            rate: 100,
            seconds: 1,
            seeds: 2,
            json: false,
            plot: None,
        }
    }

    #[test]
    fn each_path_has_its_line() {
        let cells = measure(&options(), paths(&options()).unwrap()).unwrap();
        assert_eq!(cells.len(), 4);
        assert!(cells[0].mean() > 9_000_000, "a clean path is full: {}", cells[0].mean());
        assert!(cells[2].mean() < cells[0].mean() / 2, "loss costs: {}", cells[2].mean());
        let table = table(&cells);
        assert_eq!(table.lines().count(), 5);
        assert!(
            table.lines().nth(3).unwrap().starts_with("     2      10         256  "),
            "{table}"
        );
        assert_eq!(as_json(&cells[2])["octets_per_second"]["runs"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn the_plot_has_a_chart_for_each_loss_and_a_line_for_each_window() {
        let options = Options { loss: vec![0.0, 1.0, 2.0], rtt: vec![10.0, 1.0], ..options() };
        let cell = |path| Cell { path, rates: vec![2_000_000, 4_000_000] };
        let cells: Vec<_> = paths(&options).unwrap().into_iter().map(cell).collect();
        let plot = plot(&options, &cells);
        assert!(plot.starts_with("<svg ") && plot.ends_with("</svg>\n"));
        assert_eq!(plot.matches("% lost").count(), 3);
        assert_eq!(plot.matches("<polyline").count(), 6);
        assert_eq!(plot.matches("<title>window 256 KiB, 1.00 ms: 3.00 MB/s</title>").count(), 3);
    }

    #[test]
    fn impossible_paths_are_refused() {
        for (loss, rtt) in [(-1.0, 1.0), (f64::NAN, 1.0), (51.0, 1.0), (1.0, 0.0), (1.0, 1e9)] {
            let options = Options { loss: vec![loss], rtt: vec![rtt], ..options() };
            assert!(paths(&options).is_err(), "{loss} {rtt}");
        }
    }
}
