//! Queue pairs over IP: figures 3 and 4 and tables 1 to 3, measured by `quipu bench` on packet
//! links, figure 7 by `quipu nbd bench`, and a simulated LANai.

mod block_device;
mod lanai;

use anyhow::{Context, Result, bail};
use quipu_figure::{Chart, Kind, Shape, Values};
use serde_json::Value;

use crate::data::Figure;
use crate::experiment::{Environment, Experiment, Measured};

/// The experiments. One run of the benchmark serves all figures.
#[derive(Default)]
pub(crate) struct Qpip {
    bench: Option<Value>,
}

/// The plan of the benchmark: packet links, and one short test because a plan without any is refused. A plan
/// has two parts, of which `--quick` chooses the second.
fn plan() -> String {
    let part = |name: &str, rounds: u32, slice_ms: u32| {
        format!(
            "[{name}]\nrounds = {rounds}\nslice_ms = 12\nbudget_s = 300\ndepth = 128\n\
             signal_every = 32\nqueue_pairs = 100\nidle_queue_pairs = 100\n\
             crowd_queue_pairs = 100\n\n\
             [[{name}.test]]\nkind = \"stream\"\nop = \"copy\"\nsizes = [4096]\n\n\
             [{name}.qpip]\nrounds = {rounds}\nslice_ms = {slice_ms}\n\
             mtus = [1500, 9000, 16384]\nmessage = 16384\nsizes = [16384]\n\n"
        )
    };
    part("full", 7, 400) + &part("quick", 3, 60)
}

const KERNEL: &str = "kernel";
const QPIP: &str = "QPIP";
const OWN: &str = "QPIP, own process";
const OWN_SPINNING: &str = "QPIP, own process, spinning";
const MTUS: [u64; 3] = [1500, 9000, 16_384];

impl Experiment for Qpip {
    fn run(&mut self, figure: &Figure, environment: &mut Environment<'_>) -> Result<Measured> {
        match figure.id.as_str() {
            "7" => return block_device::measure(environment),
            "model-1" => return lanai::stages(),
            "model-2" => return lanai::round_trips(),
            "model-3" => return lanai::throughput(),
            _ => {}
        }
        if self.bench.is_none() {
            let path = environment.file("qpip-plan.toml", &plan())?;
            let path = path.to_str().context("the temporary folder's name is no text")?;
            let mut arguments = vec!["bench", "--plan", path, "--json"];
            if environment.quick {
                arguments.push("--quick");
            }
            self.bench = Some(environment.quipu_json(&arguments)?);
        }
        let bench = self.bench.as_ref().expect("set above");
        match figure.id.as_str() {
            "3" => round_trips(bench),
            "4" => throughput(bench),
            "table-1" => overhead(bench),
            "table-2" => stages(bench, ["data sent", "ack sent"], 0),
            "table-3" => stages(bench, ["data received", "ack received"], 2),
            other => bail!("there is no experiment for {other}"),
        }
    }
}

/// The median entry of a contender in a figure of the benchmark.
fn median<'a>(bench: &'a Value, figure: &str, name: &str, mtu: u64) -> Result<&'a Value> {
    let rows = bench["qpip"].as_array().context("the benchmark has no results of packet links")?;
    let row = rows
        .iter()
        .find(|row| row["figure"] == figure && row["name"] == name && row["mtu"] == mtu)
        .with_context(|| {
            format!("the benchmark did not measure {name} ({figure}, MTU {mtu}): see its notes")
        })?;
    Ok(&row["median"])
}

fn number(value: &Value, key: &str) -> Result<f64> {
    value[key].as_f64().with_context(|| format!("the benchmark gave no number \"{key}\""))
}

fn round_trips(bench: &Value) -> Result<Measured> {
    let mut measured = Measured::default();
    let names = [KERNEL, QPIP, OWN_SPINNING];
    let mut chart = Chart::bars(
        "Round trip of 1 byte (our virtual network, not the paper's machines)",
        "us",
        Shape::Grouped(names.map(Into::into).to_vec()),
    );
    for (protocol, figure) in [("UDP", "round-trip-udp"), ("TCP", "round-trip-tcp")] {
        let mut values = Vec::new();
        for name in names {
            values.push(number(median(bench, figure, name, 1500)?, "value")?);
        }
        let word = protocol.to_lowercase();
        measured.set(&format!("rtt-{word}"), values[1]);
        measured.set(&format!("rtt-{word}-to-kernel"), values[1] / values[0]);
        let values = Values::PerCategory(values.into_iter().map(Some).collect());
        chart = chart.with(protocol, Kind::Ours, values);
    }
    measured.charts.push(chart);
    Ok(measured)
}

/// Processor time of the program at the sender, as a share of one processor.
fn program_share(median: &Value) -> Result<f64> {
    median["load"][0]["program"].as_f64().context("the benchmark gave no processor load")
}

fn throughput(bench: &Value) -> Result<Measured> {
    let mut measured = Measured::default();
    let names = [KERNEL, QPIP, OWN];
    let categories = MTUS.map(|mtu| format!("MTU {mtu}")).to_vec();
    let mut speed =
        Chart::bars("ttcp with messages of 16 KB", "MB/s", Shape::Grouped(categories.clone()));
    let mut load = Chart::bars(
        "Processor time of the sending program",
        "% of one processor",
        Shape::Grouped(categories),
    );
    let mut rows = Vec::new();
    for name in names {
        let (mut speeds, mut loads) = (Vec::new(), Vec::new());
        for mtu in MTUS {
            let median = median(bench, "bulk", name, mtu)?;
            speeds.push(number(median, "value")?);
            loads.push(program_share(median)? * 100.0);
        }
        let values =
            |values: &[f64]| Values::PerCategory(values.iter().copied().map(Some).collect());
        speed = speed.with(name, Kind::Ours, values(&speeds));
        load = load.with(name, Kind::Ours, values(&loads));
        rows.push((speeds, loads));
    }
    for (index, mtu) in MTUS.iter().enumerate() {
        measured.set(&format!("speed-{mtu}-to-kernel"), rows[1].0[index] / rows[0].0[index]);
    }
    measured.set("host-cpu", rows[2].1[2]);
    measured.set("kernel-cpu", rows[0].1[0]);
    measured.charts.extend([speed, load]);
    Ok(measured)
}

fn overhead(bench: &Value) -> Result<Measured> {
    let mut measured = Measured::default();
    let kernel = median(bench, "host-overhead", KERNEL, 1500)?;
    let own = median(bench, "host-overhead", OWN, 1500)?;
    measured.set("kernel-cycles", number(kernel, "cycles")?);
    measured.set("qpip-cycles", number(own, "cycles")?);
    measured.set("cycles-ratio", number(kernel, "cycles")? / number(own, "cycles")?);
    let names = vec!["host-based IP".to_owned(), "QPIP".to_owned()];
    let ours = [number(kernel, "cycles")?, number(own, "cycles")?].map(Some).to_vec();
    measured.charts.push(
        Chart::bars("Host overhead of a 1-byte message", "cycles", Shape::Grouped(names))
            .with(
                "published",
                Kind::Published,
                Values::PerCategory(vec![Some(16_445.0), Some(1386.0)]),
            )
            .with("ours", Kind::Ours, Values::PerCategory(ours)),
    );
    Ok(measured)
}

/// Tables 2 and 3: two columns of the benchmark's stages, from `first`.
fn stages(bench: &Value, names: [&str; 2], first: usize) -> Result<Measured> {
    let rows = bench["occupancy"].as_array().context("the benchmark has no stages")?;
    let mut measured = Measured::default();
    let mut categories = Vec::new();
    let (mut ours, mut published) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for row in rows {
        let cell = |key: &str, column: usize| row[key][first + column].as_f64();
        if cell("ns", 0).or(cell("ns", 1)).is_none() {
            continue;
        }
        categories.push(row["stage"].as_str().unwrap_or("?").to_owned());
        for column in 0..2 {
            ours[column].push(cell("ns", column).map(|ns| ns / 1000.0));
            published[column].push(cell("paper_us", column));
        }
    }
    for (column, name) in names.iter().enumerate() {
        let sum: f64 = ours[column].iter().flatten().sum();
        measured.set(&format!("sum-{}", name.replace(' ', "-")), sum);
        // Two orders of magnitude lie between the LANai and today's processors, so each column shows shares.
        let share = |values: &[Option<f64>]| {
            let sum: f64 = values.iter().flatten().sum();
            Values::PerCategory(values.iter().map(|v| v.map(|v| 100.0 * v / sum)).collect())
        };
        measured.charts.push(
            Chart::bars(
                &format!("Stages of the adapter, {name}: share of the sum"),
                "%",
                Shape::Grouped(categories.clone()),
            )
            .with("published (LANai 9)", Kind::Published, share(&published[column]))
            .with("ours (this processor)", Kind::Ours, share(&ours[column])),
        );
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn bench() -> Value {
        let row = |figure: &str, name: &str, mtu: u64, value: f64, program: f64| {
            json!({"figure": figure, "name": name, "mtu": mtu, "median":
                {"value": value, "cycles": value, "load": [{"program": program}]}})
        };
        let mut rows = Vec::new();
        for (name, value) in [(KERNEL, 8.0), (QPIP, 6.0), (OWN, 2.0), (OWN_SPINNING, 7.0)] {
            for figure in ["round-trip-udp", "round-trip-tcp", "bulk", "host-overhead"] {
                for mtu in MTUS {
                    rows.push(row(figure, name, mtu, value, value / 10.0));
                }
            }
        }
        json!({"qpip": rows, "occupancy": [
            {"stage": "doorbell", "ns": [10.0, null, null, null], "paper_us": [1.0, 1.0, 1.0, 1.0]},
            {"stage": "update", "ns": [30.0, 10.0, 20.0, 40.0], "paper_us": [1.5, 1.5, 1.5, 9.0]}]})
    }

    #[test]
    fn facts_come_from_the_benchmark() {
        let bench = bench();
        assert_eq!(round_trips(&bench).unwrap().values["rtt-udp-to-kernel"], 0.75);
        assert_eq!(throughput(&bench).unwrap().values["host-cpu"], 20.0);
        assert_eq!(overhead(&bench).unwrap().values["cycles-ratio"], 4.0);
        let sent = stages(&bench, ["data sent", "ack sent"], 0).unwrap();
        assert!((sent.values["sum-data-sent"] - 0.04).abs() < 1e-12);
        assert_eq!(sent.charts.len(), 2);
    }

    #[test]
    fn a_missing_contender_is_named() {
        let error = round_trips(&json!({"qpip": []})).unwrap_err().to_string();
        assert!(error.contains("kernel"), "{error}");
    }
}
