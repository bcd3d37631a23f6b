//! Active Messages and Split-C on queue pairs: tables 1 to 5 and figures 2 to 5, measured by `quipu am costs`
//! and by a Split-C program.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use quipu_figure::{Chart, Kind, Scale, Shape, Values};
use serde_json::Value;

use crate::data::Figure;
use crate::experiment::{Environment, Experiment, Measured};

/// The program that measures Split-C.
const PROGRAM: &str = include_str!("../../papers/via.sc");
/// Paths between the two processes: the word in names of facts, the name, and the value of QUIPU_SAME_HOST.
const PATHS: [(&str, &str, &str); 2] = [("shm", "same host", "auto"), ("tcp", "TCP", "never")];
const GROUPS: [(&str, &str); 4] =
    [("base", "base"), ("event", "event"), ("flow-control", "flow"), ("semantics", "semantics")];
const UDP: &str = "Over UDP, Active Messages and Split-C use UD queue pairs, with acknowledgements of their own. What is \
                   compared with a queue pair is compared with a reliable one, so UDP is not in those values.";

/// What was measured over one path.
struct Costs {
    active_messages: Value,
    /// None without a C compiler; the reason is a note.
    split_c: Result<Value, String>,
}

/// The experiments. One run over each path serves all figures.
#[derive(Default)]
pub(crate) struct Via {
    costs: Option<([Costs; 2], Costs)>,
}

impl Experiment for Via {
    fn run(&mut self, figure: &Figure, environment: &mut Environment<'_>) -> Result<Measured> {
        if self.costs.is_none() {
            self.costs = Some(measure(environment)?);
        }
        let (costs, udp) = self.costs.as_ref().expect("set above");
        let mut measured = match figure.id.as_str() {
            "table-1" => base(costs),
            "table-2" => logp(costs),
            "table-3" => breakdown(costs, "request"),
            "table-4" => breakdown(costs, "read"),
            "table-5" => kilobyte(costs),
            "2" => accesses(costs),
            "3" => groups(costs, "request", [32.5, 44.2, 14.4, 8.9]),
            "4" => groups(costs, "read", [36.1, 46.9, 11.6, 5.4]),
            "5" => bandwidth(costs),
            other => bail!("there is no experiment for {other}"),
        }?;
        match figure.id.as_str() {
            "table-2" => logp_udp(udp, &mut measured)?,
            "2" => accesses_udp(udp, &mut measured)?,
            "5" => bandwidth_udp(udp, &mut measured)?,
            _ => {}
        }
        if matches!(figure.id.as_str(), "table-1" | "table-2" | "2" | "5") {
            measured.notes.push(UDP.into());
        }
        Ok(measured)
    }
}

/// Measures over shared memory and TCP, and over UDP.
fn measure(environment: &mut Environment<'_>) -> Result<([Costs; 2], Costs)> {
    let program = compile(environment);
    let mut over = |same_host: &str, transport: &str| -> Result<Costs> {
        let variables = &[("QUIPU_SAME_HOST", same_host), ("QUIPU_AM_TRANSPORT", transport)];
        let mut arguments = vec!["am", "costs", "--json"];
        if environment.quick {
            arguments.push("--quick");
        }
        let active_messages = parsed(&environment.quipu(variables, &arguments)?)?;
        let accesses = if environment.quick { "200" } else { "2000" };
        let split_c = match &program {
            Ok(program) => {
                let program = program.to_str().context("the temporary folder's name is no text")?;
                let arguments = ["spmd", "-n", "2", "--label", "never", "--", program, accesses];
                let outcome = environment.quipu(variables, &arguments);
                outcome.and_then(|output| parsed(&output)).map_err(|error| format!("{error:#}"))
            }
            Err(why) => Err(why.clone()),
        };
        Ok(Costs { active_messages, split_c })
    };
    Ok(([over(PATHS[0].2, "rc")?, over(PATHS[1].2, "rc")?], over("never", "udp")?))
}

fn parsed(output: &[u8]) -> Result<Value> {
    serde_json::from_slice(output).context("the measurement printed no JSON")
}

/// The Split-C program, compiled.
fn compile(environment: &mut Environment<'_>) -> Result<PathBuf, String> {
    let source = environment.file("via.sc", PROGRAM).map_err(|error| error.to_string())?;
    let program = environment.scratch.join("via");
    let [from, to] = [&source, &program].map(|path| path.to_string_lossy().into_owned());
    let compiled = environment.quipu(&[], &["splitc", "cc", "-O2", &from, "-o", &to]);
    compiled.map(|_| program).map_err(|error| format!("Split-C was not measured: {error:#}"))
}

fn number(value: &Value, what: &str) -> Result<f64> {
    value.as_f64().with_context(|| format!("the measurement gave no number \"{what}\""))
}

/// A value of LogP over a path, in microseconds.
fn logp_us(costs: &Costs, key: &str) -> Result<f64> {
    Ok(number(&costs.active_messages["logp"][key], key)? / 1000.0)
}

fn rows<'a>(value: &'a Value, what: &str) -> Result<&'a [Value]> {
    let rows = value.as_array().with_context(|| format!("the measurement has no {what}"))?;
    Ok(rows)
}

fn bars(title: &str, unit: &str, categories: &[&str]) -> Chart {
    let categories = categories.iter().map(|&word| word.to_owned()).collect();
    Chart::bars(title, unit, Shape::Grouped(categories))
}

fn values(values: &[f64]) -> Values {
    Values::PerCategory(values.iter().map(|&value| Some(value)).collect())
}

/// Table 1: the queue pair alone.
fn base(costs: &[Costs; 2]) -> Result<Measured> {
    let mut measured = Measured::default();
    let mut halves = Vec::new();
    for ((path, ..), costs) in PATHS.iter().zip(costs) {
        let half = logp_us(costs, "raw_half_ns")?;
        let mut throughput = 0.0_f64;
        for row in rows(&costs.active_messages["bandwidth"], "bandwidth")? {
            throughput = throughput.max(number(&row["raw"], "raw")?);
        }
        measured.set(&format!("half-{path}"), half);
        measured.set(&format!("throughput-{path}"), throughput);
        if *path == "shm" {
            measured.set("half-servernet", half);
            measured.set("throughput-servernet", throughput);
        }
        halves.push(half);
    }
    let names = ["Quipu, same host", "Quipu, TCP", "LANai 4", "LANai 7", "cLAN", "ServerNet II"];
    let published = [None, None, Some(33.1), Some(30.2), Some(24.0), Some(7.4)];
    let mut ours: Vec<Option<f64>> = halves.into_iter().map(Some).collect();
    ours.resize(names.len(), None);
    let chart = bars("Half round trip of a queue pair", "us", &names)
        .with("published", Kind::Published, Values::PerCategory(published.to_vec()))
        .with("ours", Kind::Ours, Values::PerCategory(ours));
    measured.charts.push(chart);
    Ok(measured)
}

/// Table 2.
fn logp(costs: &[Costs; 2]) -> Result<Measured> {
    let keys = [
        ("am-half", "half_ns"),
        ("delta", "delta_ns"),
        ("latency", "latency_ns"),
        ("send", "send_ns"),
        ("receive", "receive_ns"),
        ("gap", "gap_ns"),
    ];
    let mut measured = Measured::default();
    let names = ["RTT/2", "delta", "L", "o_s", "o_r", "g"];
    let mut chart = bars("LogP parameters in shares of RTT/2", "", &names);
    let shares = |all: &[f64]| values(&all.iter().map(|value| value / all[0]).collect::<Vec<_>>());
    let published = shares(&[35.6, 5.4, 29.6, 3.1, 2.9, 30.0]);
    chart = chart.with("published (AMVIA v3, LANai 7)", Kind::Published, published);
    for ((path, name, _), costs) in PATHS.iter().zip(costs) {
        let mut all = Vec::new();
        for (fact, key) in keys {
            let value = logp_us(costs, key)?;
            measured.set(&format!("{fact}-{path}"), value);
            all.push(value);
        }
        chart = chart.with(&format!("ours, {name}"), Kind::Ours, shares(&all));
        if *path == "shm" {
            let cycles = &costs.active_messages["logp"]["delta_cycles"];
            measured.set("delta-cycles", number(cycles, "delta_cycles")?);
            measured.set("gap-to-half", all[5] / all[0]);
        }
    }
    measured.charts.push(chart);
    Ok(measured)
}

/// Table 2 over UDP.
fn logp_udp(costs: &Costs, measured: &mut Measured) -> Result<()> {
    for (fact, key) in [
        ("am-half-udp", "half_ns"),
        ("latency-udp", "latency_ns"),
        ("send-udp", "send_ns"),
        ("receive-udp", "receive_ns"),
        ("gap-udp", "gap_ns"),
    ] {
        measured.set(fact, logp_us(costs, key)?);
    }
    Ok(())
}

/// Figure 2 over UDP.
fn accesses_udp(costs: &Costs, measured: &mut Measured) -> Result<()> {
    match &costs.split_c {
        Ok(times) => {
            let [read, get] = [number(&times["read"], "read")?, number(&times["get"], "get")?];
            let round_trip = 2000.0 * logp_us(costs, "half_ns")?;
            measured.set("read-to-round-trip-udp", read / round_trip);
            measured.set("get-to-read-udp", get / read);
        }
        Err(why) => measured.notes.push(why.clone()),
    }
    Ok(())
}

/// Figure 5 over UDP.
fn bandwidth_udp(costs: &Costs, measured: &mut Measured) -> Result<()> {
    let mut am = Vec::new();
    for row in rows(&costs.active_messages["bandwidth"], "bandwidth")? {
        am.push((number(&row["bytes"], "bytes")?, number(&row["am"], "am")?));
    }
    measured.set("rate-am-udp", at(&am, 32_768.0)?);
    let mut chart = Chart::lines(
        "Bandwidth by size, UDP",
        ("bytes", Scale::Log),
        ("MB/s", Scale::Log),
    )
    .with("Active Messages", Kind::Ours, Values::Points(am));
    if let Ok(times) = &costs.split_c {
        let mut split_c = Vec::new();
        for row in rows(&times["bandwidth"], "bandwidth")? {
            split_c.push((number(&row[0], "bytes")?, number(&row[1], "MB/s")?));
        }
        measured.set("rate-split-c-udp", at(&split_c, 32_768.0)?);
        chart = chart.with("Split-C", Kind::Ours, Values::Points(split_c));
    }
    measured.charts.push(chart);
    Ok(())
}

/// The time of each group of parts, and of all.
fn group_times(costs: &[Costs; 2], key: &str) -> Result<([f64; 4], f64)> {
    let mut times = [0.0; 4];
    for part in rows(&costs[0].active_messages[key], "parts")? {
        let place = GROUPS.iter().position(|(group, _)| part["group"] == *group);
        times[place.context("a part of no group")?] += number(&part["ns"], "ns")?;
    }
    Ok((times, times.iter().sum()))
}

/// Tables 3 and 4.
fn breakdown(costs: &[Costs; 2], key: &str) -> Result<Measured> {
    let mut measured = Measured::default();
    let (times, sum) = group_times(costs, key)?;
    for ((_, fact), time) in GROUPS.iter().zip(times) {
        measured.set(&format!("{key}-{fact}"), 100.0 * time / sum);
    }
    if key == "request" {
        let whole = number(&costs[0].active_messages["one_thread"]["am_ns"], "am_ns")?;
        measured.set("parts-sum", sum / whole);
    }
    let parts = rows(&costs[0].active_messages[key], "parts")?;
    let names: Vec<&str> = parts.iter().filter_map(|part| part["what"].as_str()).collect();
    let times: Vec<f64> = parts.iter().filter_map(|part| part["ns"].as_f64()).collect();
    let chart = bars("Parts of a request and its reply", "ns", &names);
    measured.charts.push(chart.with("ours, same host", Kind::Ours, values(&times)));
    Ok(measured)
}

/// Figures 3 and 4: the groups, with the published shares.
fn groups(costs: &[Costs; 2], key: &str, published: [f64; 4]) -> Result<Measured> {
    let mut measured = Measured::default();
    let (times, sum) = group_times(costs, key)?;
    let fact = if key == "request" { "event-to-base" } else { "read-event-to-base" };
    measured.set(fact, times[1] / times[0]);
    let names = ["base queue pair", "event notification", "flow control", "semantics"];
    let chart = bars("Shares of the host's time", "%", &names)
        .with("published (LANai 7)", Kind::Published, values(&published))
        .with("ours, same host", Kind::Ours, values(&times.map(|time| 100.0 * time / sum)));
    measured.charts.push(chart);
    Ok(measured)
}

/// Table 5.
fn kilobyte(costs: &[Costs; 2]) -> Result<Measured> {
    let mut measured = Measured::default();
    let of = |key: &str| number(&costs[0].active_messages["kilobyte"][key], key);
    let us = [of("copy_ns")?, of("short_ns")?, of("am_ns")? - of("raw_ns")?].map(|ns| ns / 1000.0);
    for (fact, value) in ["copy", "short", "total"].iter().zip(us) {
        measured.set(&format!("kilobyte-{fact}"), value);
    }
    let names = ["memory copy", "short receive", "total"];
    let chart = bars("A message of 1 KB, beyond the queue pair's", "us", &names)
        .with("published", Kind::Published, values(&[4.0, 14.5, 18.5]))
        .with("ours, same host", Kind::Ours, values(&us));
    measured.charts.push(chart);
    Ok(measured)
}

/// Figure 2.
fn accesses(costs: &[Costs; 2]) -> Result<Measured> {
    let mut measured = Measured::default();
    let names = ["read", "write", "get", "put", "store"];
    let mut chart = bars("Split-C accesses of 8 bytes", "ns", &names);
    for ((path, name, _), costs) in PATHS.iter().zip(costs) {
        let times = match &costs.split_c {
            Ok(times) => times,
            Err(why) => {
                measured.notes.push(why.clone());
                continue;
            }
        };
        let mut all = [0.0; 5];
        for (time, name) in all.iter_mut().zip(names) {
            *time = number(&times[name], name)?;
        }
        let [read, write, get, put, store] = all;
        if *path == "shm" {
            measured.set("read-shm", read / 1000.0);
        } else {
            measured.set("read-to-round-trip", read / 2000.0 / logp_us(costs, "half_ns")?);
            measured.set("get-to-read-tcp", get / read);
            measured.set("put-to-write-tcp", put / write);
            measured.set("store-to-put-tcp", store / put);
        }
        chart = chart.with(&format!("ours, {name}"), Kind::Ours, values(&all));
    }
    measured.charts.push(chart);
    Ok(measured)
}

/// A point of a curve.
fn at(points: &[(f64, f64)], bytes: f64) -> Result<f64> {
    let found = points.iter().find(|(size, _)| (size - bytes).abs() < 0.5);
    found.map(|&(_, rate)| rate).with_context(|| format!("nothing was measured at {bytes} bytes"))
}

/// Figure 5.
fn bandwidth(costs: &[Costs; 2]) -> Result<Measured> {
    let mut measured = Measured::default();
    for ((path, name, _), costs) in PATHS.iter().zip(costs) {
        let mut curves = [Vec::new(), Vec::new()];
        for row in rows(&costs.active_messages["bandwidth"], "bandwidth")? {
            for (curve, key) in curves.iter_mut().zip(["raw", "am"]) {
                curve.push((number(&row["bytes"], "bytes")?, number(&row[key], key)?));
            }
        }
        let [raw, am] = curves;
        let plateau = at(&raw, 32_768.0)?;
        measured.set(&format!("plateau-am-{path}"), at(&am, 32_768.0)? / plateau);
        measured.set(&format!("knee-{path}"), at(&am, 8192.0)? / at(&am, 4096.0)?);
        let mut split_c = Vec::new();
        match &costs.split_c {
            Ok(times) => {
                for row in rows(&times["bandwidth"], "bandwidth")? {
                    split_c.push((number(&row[0], "bytes")?, number(&row[1], "MB/s")?));
                }
                let share = at(&split_c, 32_768.0)? / plateau;
                measured.set(&format!("plateau-split-c-{path}"), share);
            }
            Err(why) => measured.notes.push(why.clone()),
        }
        let title = format!("Bandwidth by size, {name}");
        let mut chart = Chart::lines(&title, ("bytes", Scale::Log), ("MB/s", Scale::Log))
            .with("queue pair", Kind::Ours, Values::Points(raw))
            .with("Active Messages", Kind::Ours, Values::Points(am));
        if !split_c.is_empty() {
            chart = chart.with("Split-C", Kind::Ours, Values::Points(split_c));
        }
        measured.charts.push(chart);
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn costs(split_c: Result<Value, String>) -> Costs {
        let sizes = [4096, 8192, 32_768];
        let row = |bytes: &i32| json!({"bytes": bytes, "raw": 200.0, "am": 150.0});
        let part = |group: &str, ns: f64| json!({"group": group, "what": group, "ns": ns});
        let parts = [
            part("base", 50.0),
            part("event", 10.0),
            part("flow-control", 30.0),
            part("semantics", 10.0),
        ];
        let active_messages = json!({
            "logp": {"raw_half_ns": 400.0, "half_ns": 500.0, "delta_ns": 100.0, "delta_cycles": 300.0,
                "send_ns": 60.0, "receive_ns": 40.0, "latency_ns": 400.0, "gap_ns": 100.0},
            "bandwidth": sizes.iter().map(row).collect::<Vec<_>>(),
            "kilobyte": {"raw_ns": 100.0, "am_ns": 150.0, "copy_ns": 20.0, "short_ns": 70.0},
            "one_thread": {"raw_ns": 300.0, "am_ns": 200.0},
            "request": parts, "read": parts,
        });
        Costs { active_messages, split_c }
    }

    fn both() -> [Costs; 2] {
        let split_c = json!({"read": 900.0, "write": 800.0, "get": 90.0, "put": 80.0, "store": 40.0,
            "bandwidth": [[4096, 100.0], [32_768, 180.0]]});
        [costs(Ok(split_c.clone())), costs(Ok(split_c))]
    }

    #[test]
    fn facts_come_from_the_measurements() {
        let both = both();
        assert_eq!(base(&both).unwrap().values["half-tcp"], 0.4);
        assert_eq!(logp(&both).unwrap().values["gap-to-half"], 0.2);
        let table = breakdown(&both, "request").unwrap();
        assert_eq!((table.values["request-event"], table.values["parts-sum"]), (10.0, 0.5));
        assert_eq!(kilobyte(&both).unwrap().values["kilobyte-total"], 0.05);
        assert_eq!(accesses(&both).unwrap().values["store-to-put-tcp"], 0.5);
        assert_eq!(groups(&both, "read", [25.0; 4]).unwrap().values["read-event-to-base"], 0.2);
        let curves = bandwidth(&both).unwrap();
        assert_eq!(curves.values["plateau-split-c-shm"], 0.9);
        assert_eq!((curves.values["knee-tcp"], curves.charts.len()), (1.0, 2));
    }

    #[test]
    fn values_over_udp_have_facts_of_their_own() {
        let [costs, _] = both();
        let mut measured = Measured::default();
        logp_udp(&costs, &mut measured).unwrap();
        accesses_udp(&costs, &mut measured).unwrap();
        bandwidth_udp(&costs, &mut measured).unwrap();
        assert_eq!(measured.values["am-half-udp"], 0.5);
        assert_eq!(measured.values["read-to-round-trip-udp"], 0.9);
        assert_eq!(measured.values["rate-split-c-udp"], 180.0);
        assert_eq!(measured.charts.len(), 1);
    }

    #[test]
    fn without_a_compiler_the_rest_is_measured() {
        let both = [costs(Err("no cc".into())), costs(Err("no cc".into()))];
        let figure = accesses(&both).unwrap();
        assert_eq!((figure.values.len(), figure.notes.len()), (0, 2));
        assert_eq!(bandwidth(&both).unwrap().values["plateau-am-shm"], 0.75);
    }
}
