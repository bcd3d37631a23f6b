//! A simple integrated NIC: figures 1 to 6 and independent cases, on simulated hosts.

mod cases;
mod runs;

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use quipu_figure::{Chart, Kind, Scale, Shape, Values};
use quipu_machine::{Category, Report};

use crate::data::Figure;
use crate::experiment::{Environment, Experiment, Measured};
use runs::{Job, run_all};

/// The experiments. A run that several figures need is made once.
#[derive(Default)]
pub(crate) struct Sinic {
    known: BTreeMap<Vec<String>, Report>,
}

/// A NIC at a place, and its settings.
type Configuration = (&'static str, &'static [&'static str]);

const PCIE: Configuration = ("descriptor, PCIe", &["nic.kind=descriptor", "nic.attach=pcie"]);
const MEMORY: Configuration =
    ("descriptor, memory side", &["nic.kind=descriptor", "nic.attach=memory"]);
const CACHE: Configuration =
    ("descriptor, cache side", &["nic.kind=descriptor", "nic.attach=cache"]);
const SINIC: Configuration = ("SINIC", &["nic.kind=sinic"]);
const VSINIC: Configuration = ("V-SINIC", &["nic.kind=vsinic", "nic.virtual_count=256"]);
const ZERO_COPY: Configuration =
    ("V-SINIC, zero copy", &["nic.kind=vsinic", "nic.virtual_count=256", "nic.zero_copy=true"]);
const PLACES: [Configuration; 4] = [PCIE, MEMORY, CACHE, SINIC];
const SMALL_CACHES: [Configuration; 3] = [SINIC, VSINIC, ZERO_COPY];

/// A program, and its settings. Times are those of table 2 at 4 GHz.
type Program = (&'static str, &'static [&'static str]);

const MICRO: [Program; 4] = [
    ("stream", &["workload.kind=stream"]),
    ("maerts", &["workload.kind=maerts"]),
    (
        "stream-multi",
        &[
            "workload.kind=stream-multi",
            "workload.connections=8",
            "os.receive_buffer=128KB",
            "run.warmup=125ms",
            "run.sample=25ms",
        ],
    ),
    (
        "maerts-multi",
        &[
            "workload.kind=maerts-multi",
            "workload.connections=8",
            "os.receive_buffer=128KB",
            "run.warmup=125ms",
            "run.sample=25ms",
        ],
    ),
];
const MACRO: [Program; 3] = [
    (
        "web",
        &["workload.kind=web", "workload.connections=100", "run.warmup=250ms", "run.sample=100ms"],
    ),
    (
        "iscsi-target",
        &[
            "workload.kind=iscsi-target",
            "workload.outstanding=50",
            "run.warmup=250ms",
            "run.sample=25ms",
        ],
    ),
    (
        "iscsi-initiator",
        &[
            "workload.kind=iscsi-initiator",
            "workload.outstanding=50",
            "run.warmup=250ms",
            "run.sample=25ms",
        ],
    ),
];
const SIZES: [u64; 4] = [1, 2, 4, 8];

/// Categories from the bottom of a bar.
const STACK: [Category; 10] = [
    Category::Driver,
    Category::Interrupt,
    Category::Stack,
    Category::Buffer,
    Category::Copy,
    Category::Syscall,
    Category::User,
    Category::Fs,
    Category::Other,
    Category::Idle,
];

impl Experiment for Sinic {
    fn run(&mut self, figure: &Figure, environment: &mut Environment<'_>) -> Result<Measured> {
        match figure.id.as_str() {
            "1" => self.micro_bandwidth(environment),
            "2" => self.micro_time(environment),
            "3" => self.macro_bandwidth(environment),
            "4" => self.small_caches(environment, "4"),
            "5" => self.small_caches(environment, "5"),
            "6" => self.small_caches(environment, "6"),
            "case-1" => cases::latency(self, environment),
            "case-2" => cases::niagara(self, environment),
            "case-3" => cases::stall(self, environment),
            "case-4" => cases::tornado(self, environment),
            other => bail!("there is no experiment for {other}"),
        }
    }
}

/// The settings of a configuration and a program together.
fn settings(parts: &[&[&str]]) -> Vec<String> {
    parts.iter().flat_map(|part| part.iter().map(|text| (*text).to_owned())).collect()
}

fn values(values: Vec<f64>) -> Values {
    Values::PerCategory(values.into_iter().map(Some).collect())
}

impl Sinic {
    /// The reports of some settings of the plan of the paper's machine.
    fn reports(
        &mut self,
        environment: &mut Environment<'_>,
        wanted: &[Vec<String>],
    ) -> Result<Vec<Report>> {
        let quick = environment.quick;
        let missing: Vec<Job> = wanted
            .iter()
            .filter(|settings| !self.known.contains_key(*settings))
            .map(|settings| Job { settings: settings.clone(), quick })
            .collect();
        for (settings, report) in run_all("paper", &missing, environment)? {
            self.known.insert(settings, report);
        }
        Ok(wanted.iter().filter_map(|settings| self.known.get(settings).cloned()).collect())
    }

    /// Reports by program and configuration.
    fn grid(
        &mut self,
        environment: &mut Environment<'_>,
        programs: &[Program],
        configurations: &[Configuration],
    ) -> Result<Vec<Vec<Report>>> {
        let wanted: Vec<Vec<String>> = programs
            .iter()
            .flat_map(|(_, program)| {
                configurations.iter().map(|(_, configuration)| settings(&[program, configuration]))
            })
            .collect();
        let reports = self.reports(environment, &wanted)?;
        Ok(reports.chunks(configurations.len()).map(<[Report]>::to_vec).collect())
    }

    fn micro_bandwidth(&mut self, environment: &mut Environment<'_>) -> Result<Measured> {
        let grid = self.grid(environment, &MICRO, &PLACES)?;
        let mut measured = Measured::default();
        for ((name, _), row) in MICRO.iter().zip(&grid) {
            measured.set(&format!("cnic-gain-{name}"), row[2].gbps / row[0].gbps);
            measured.set(&format!("sinic-to-cnic-{name}"), row[3].gbps / row[2].gbps);
        }
        let title = "Bandwidth of the micro-benchmarks, 4 GHz";
        measured.charts.push(bandwidth(title, &MICRO, &PLACES, &grid));
        Ok(measured)
    }

    fn micro_time(&mut self, environment: &mut Environment<'_>) -> Result<Measured> {
        let grid = self.grid(environment, &MICRO, &PLACES)?;
        let mut measured = Measured::default();
        let mut bars = Vec::new();
        for ((name, _), row) in MICRO.iter().zip(&grid) {
            let driver = |report: &Report| report.percent(Category::Driver) / report.gbps;
            measured.set(&format!("driver-time-{name}"), driver(&row[2]) / driver(&row[0]));
            for ((place, _), report) in PLACES.iter().zip(row) {
                bars.push((format!("{name}: {place}"), report.clone()));
            }
        }
        measured.charts.push(stacked("Processor time of the micro-benchmarks", &bars));
        Ok(measured)
    }

    fn macro_bandwidth(&mut self, environment: &mut Environment<'_>) -> Result<Measured> {
        let grid = self.grid(environment, &MACRO, &PLACES)?;
        let mut measured = Measured::default();
        for ((name, _), row) in MACRO.iter().zip(&grid) {
            measured.set(&format!("macro-{name}"), row[3].gbps / row[2].gbps);
        }
        let title = "Bandwidth of the macro-benchmarks, 4 GHz";
        measured.charts.push(bandwidth(title, &MACRO, &PLACES, &grid));
        Ok(measured)
    }

    /// Figures 4 to 6: maerts over the size of the cache.
    fn small_caches(
        &mut self,
        environment: &mut Environment<'_>,
        figure: &str,
    ) -> Result<Measured> {
        let mut wanted = Vec::new();
        for (_, configuration) in SMALL_CACHES {
            for size in SIZES {
                let size = format!("l2.size={size}MB");
                wanted.push(settings(&[&["workload.kind=maerts"], configuration, &[&size]]));
            }
        }
        wanted.push(settings(&[&["workload.kind=maerts"], MEMORY.1]));
        let reports = self.reports(environment, &wanted)?;
        let rows: Vec<&[Report]> = reports.chunks(SIZES.len()).take(3).collect();
        Ok(match figure {
            "4" => zero_copy_bandwidth(&rows),
            "5" => zero_copy_misses(&rows, &reports[12]),
            _ => zero_copy_time(&rows),
        })
    }
}

/// Grouped bars: programs in groups, a bar for each configuration.
fn bandwidth(
    title: &str,
    programs: &[Program],
    configurations: &[Configuration],
    grid: &[Vec<Report>],
) -> Chart {
    let categories = programs.iter().map(|(name, _)| (*name).to_owned()).collect();
    let mut chart = Chart::bars(title, "Gbit/s", Shape::Grouped(categories));
    for (index, (name, _)) in configurations.iter().enumerate() {
        let bars = grid.iter().map(|row| row[index].gbps).collect();
        chart = chart.with(name, Kind::Ours, values(bars));
    }
    chart
}

/// Stacked bars of the processor's time.
fn stacked(title: &str, bars: &[(String, Report)]) -> Chart {
    let categories = bars.iter().map(|(name, _)| name.clone()).collect();
    let mut chart = Chart::bars(title, "% of the processor", Shape::Stacked(categories));
    for category in STACK {
        let parts = bars.iter().map(|(_, report)| report.percent(category)).collect();
        chart = chart.with(category.name(), Kind::Ours, values(parts));
    }
    chart
}

/// Lines over the size of the cache.
fn over_size(title: &str, y: &str, rows: &[&[Report]], of: fn(&Report) -> f64) -> Chart {
    let mut chart = Chart::lines(title, ("cache (MB)", Scale::Log), (y, Scale::Linear));
    for ((name, _), row) in SMALL_CACHES.iter().zip(rows) {
        let points = SIZES.iter().zip(*row).map(|(size, report)| (*size as f64, of(report)));
        chart = chart.with(name, Kind::Ours, Values::Points(points.collect()));
    }
    chart
}

fn zero_copy_bandwidth(rows: &[&[Report]]) -> Measured {
    let mut measured = Measured::default();
    let (sinic, vsinic, zero_copy) = (rows[0], rows[1], rows[2]);
    measured.set("sinic-1mb", sinic[0].rx_gbps);
    measured.set("sinic-4mb", sinic[2].rx_gbps);
    measured.set("sinic-8mb", sinic[3].rx_gbps);
    let ratio = vsinic[0].rx_gbps / sinic[0].rx_gbps;
    measured.set("vsinic-1mb", ratio);
    measured.set("vsinic-1mb-least", ratio);
    for (size, report) in SIZES.iter().zip(zero_copy) {
        measured.set(&format!("zero-copy-{size}mb"), report.rx_gbps);
    }
    measured.set("zero-copy-gain", zero_copy[0].rx_gbps / sinic[0].rx_gbps);
    let title = "Bandwidth of maerts over the size of the cache";
    measured.charts.push(over_size(title, "Gbit/s", rows, |report| report.rx_gbps));
    measured
}

fn zero_copy_misses(rows: &[&[Report]], memory: &Report) -> Measured {
    let mut measured = Measured::default();
    measured.set("misses-memory", memory.misses_per_kb);
    measured.set("misses-cache", rows[0][3].misses_per_kb);
    measured.set("misses-zero-copy-1mb", rows[2][0].misses_per_kb);
    measured.set("misses-zero-copy-8mb", rows[2][3].misses_per_kb);
    let all: Vec<&Report> = rows.iter().flat_map(|row| row.iter()).collect();
    let misses: Vec<f64> = all.iter().map(|report| report.misses_per_kb).collect();
    let rates: Vec<f64> = all.iter().map(|report| report.rx_gbps).collect();
    measured.set("misses-correlation", correlation(&misses, &rates));
    let title = "Cache misses of maerts over the size of the cache";
    measured.charts.push(over_size(title, "misses/KB", rows, |report| report.misses_per_kb));
    measured
}

fn zero_copy_time(rows: &[&[Report]]) -> Measured {
    let mut measured = Measured::default();
    let (sinic, zero_copy) = (&rows[0][0], &rows[2][0]);
    let share = |report: &Report, category| report.percent(category);
    let stack = share(zero_copy, Category::Stack) / share(sinic, Category::Stack);
    measured.set("stack-zero-copy", stack);
    let copy = |report: &Report| share(report, Category::Copy) / report.rx_gbps;
    measured.set("copy-zero-copy", copy(zero_copy) / copy(sinic));
    measured.set("fifo-bytes", 256.0 * 1514.0);
    let mut bars = Vec::new();
    for ((name, _), row) in SMALL_CACHES.iter().zip(rows) {
        for (size, report) in SIZES.iter().zip(*row) {
            bars.push((format!("{name}, {size} MB"), report.clone()));
        }
    }
    measured.charts.push(stacked("Processor time of maerts over the size of the cache", &bars));
    measured.notes.push(
        "copy includes setting up and waiting for the copy engine; M5's own scripts counted that as idle"
            .into(),
    );
    measured
}

/// Pearson's coefficient; 0 where one side does not vary.
fn correlation(x: &[f64], y: &[f64]) -> f64 {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let (mx, my) = (mean(x), mean(y));
    let sum = |of: &dyn Fn(f64, f64) -> f64| {
        x.iter().zip(y).map(|(a, b)| of(a - mx, b - my)).sum::<f64>()
    };
    let spread = (sum(&|a, _| a * a) * sum(&|_, b| b * b)).sqrt();
    if spread > 0.0 { sum(&|a, b| a * b) / spread } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn correlation_of_a_line() {
        assert!((correlation(&[1.0, 2.0, 3.0], &[6.0, 4.0, 2.0]) + 1.0).abs() < 1e-12);
        assert_eq!(correlation(&[1.0, 1.0], &[1.0, 2.0]), 0.0);
    }

    #[test]
    fn every_setting_is_one_of_a_plan() {
        let all = MICRO.iter().chain(&MACRO);
        for (_, program) in all {
            for (_, configuration) in PLACES.iter().chain(&SMALL_CACHES) {
                let job = Job { settings: settings(&[program, configuration]), quick: true };
                assert!(job.plan("paper").is_ok(), "{:?}", job.settings);
            }
        }
    }
}
