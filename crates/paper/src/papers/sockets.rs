//! Extended sockets: figures 5 and 6, measured by `quipu sockets --measure`.

use anyhow::{Context, Result, bail};
use quipu_figure::{Chart, Kind, Scale, Values};
use serde_json::Value;

use crate::data::Figure;
use crate::experiment::{Environment, Experiment, Measured};

/// The experiments. One run of the measurement serves both figures.
#[derive(Default)]
pub(crate) struct Sockets {
    measurement: Option<Value>,
}

const LATENCY: &str = "latency_us";
const BANDWIDTH: &str = "bandwidth_mbps";

impl Experiment for Sockets {
    fn run(&mut self, figure: &Figure, environment: &mut Environment<'_>) -> Result<Measured> {
        if self.measurement.is_none() {
            let mut arguments = vec!["sockets", "--measure"];
            if environment.quick {
                arguments.push("--quick");
            }
            self.measurement = Some(environment.quipu_json(&arguments)?);
        }
        let all = self.measurement.as_ref().expect("set above");
        match figure.id.as_str() {
            "5" => standard(all),
            "6" => extended(all),
            other => bail!("there is no experiment for {other}"),
        }
    }
}

/// The values of a way, by message size.
fn series(all: &Value, way: &str, what: &str) -> Result<Vec<(f64, f64)>> {
    let missing = || format!("the measurement has no {what} of {way}");
    let ways = all["ways"].as_array().with_context(missing)?;
    let row = ways.iter().find(|row| row["name"] == way).with_context(missing)?;
    let (sizes, values) = (all["sizes"].as_array(), row[what].as_array());
    let (sizes, values) = sizes.zip(values).with_context(missing)?;
    let pair = |(size, value): (&Value, &Value)| size.as_f64().zip(value.as_f64());
    sizes.iter().zip(values).map(|both| pair(both).with_context(missing)).collect()
}

fn at(series: &[(f64, f64)], size: f64) -> Result<f64> {
    let found = series.iter().find(|(own, _)| *own == size);
    found.map(|(_, value)| *value).with_context(|| format!("{size} bytes were not measured"))
}

fn charts(all: &Value, ways: &[(&str, &str)]) -> Result<Vec<Chart>> {
    let mut charts = Vec::new();
    for (what, title, unit) in
        [(LATENCY, "One-way latency", "us"), (BANDWIDTH, "Unidirectional bandwidth", "Mbit/s")]
    {
        let mut chart = Chart::lines(title, ("bytes", Scale::Log), (unit, Scale::Log));
        for (way, name) in ways {
            chart = chart.with(name, Kind::Ours, Values::Points(series(all, way, what)?));
        }
        charts.push(chart);
    }
    Ok(charts)
}

fn standard(all: &Value) -> Result<Measured> {
    let mut measured = Measured::default();
    for (what, fact) in [(LATENCY, "library-latency"), (BANDWIDTH, "library-bandwidth")] {
        let (without, with) = (series(all, "tcp", what)?, series(all, "library", what)?);
        let ratios = without.iter().zip(&with).map(|((_, without), (_, with))| with / without);
        // The mean of ratios is the geometric one.
        let mean = ratios.map(f64::ln).sum::<f64>() / without.len() as f64;
        measured.set(fact, mean.exp());
    }
    measured.charts = charts(all, &[("tcp", "sockets"), ("library", "sockets with the library")])?;
    Ok(measured)
}

fn extended(all: &Value) -> Result<Measured> {
    let mut measured = Measured::default();
    let tcp = series(all, "tcp", LATENCY)?;
    for (way, fact) in [("copy-thread", "user-latency"), ("copy", "caller-latency")] {
        let latency = series(all, way, LATENCY)?;
        measured.set(fact, at(&latency, 1.0)? - at(&tcp, 1.0)?);
    }
    let mut peak: f64 = 0.0;
    for way in ["copy", "writev", "cork", "copy-thread"] {
        let bandwidth = series(all, way, BANDWIDTH)?;
        peak = bandwidth.iter().fold(peak, |peak, (_, value)| peak.max(*value));
    }
    measured.set("user-peak", peak);
    let stack = series(all, "stack-tcp", LATENCY)?;
    let kernel = series(all, "stack-iwarp", LATENCY)?;
    measured.set("kernel-latency", at(&kernel, 1.0)? - at(&stack, 1.0)?);
    let kernel = series(all, "stack-iwarp", BANDWIDTH)?;
    measured.set("kernel-peak", kernel.iter().fold(0.0, |peak: f64, (_, value)| peak.max(*value)));
    let bandwidth = |way, size| at(&series(all, way, BANDWIDTH)?, size);
    measured.set("small-bandwidth", bandwidth("copy", 1024.0)? / bandwidth("tcp", 1024.0)?);
    measured.set("crc-cost", bandwidth("copy", 65_536.0)? / bandwidth("copy-no-crc", 65_536.0)?);
    let ways = [
        ("tcp", "TCP"),
        ("copy", "iWARP, copied"),
        ("writev", "iWARP, writev"),
        ("cork", "iWARP, TCP_CORK"),
        ("copy-no-crc", "iWARP, copied, no CRC"),
        ("copy-thread", "iWARP, copied, by the thread"),
        ("stack-tcp", "Quipu's TCP"),
        ("stack-iwarp", "iWARP in Quipu's TCP"),
    ];
    measured.charts = charts(all, &ways)?;
    measured.notes.push(
        "The kernel level is quipu_iw0 on Quipu's own TCP, next to that TCP alone (QPIP): both on a UDP link \
         over loopback, whose user-space packets cost more than the kernel's loopback. Compare it with that TCP only."
            .into(),
    );
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn facts_come_from_the_measurement() {
        let way = |name: &str, latency: f64, bandwidth: f64| {
            let (latency, bandwidth) = ([latency; 3], [bandwidth; 3]);
            json!({"name": name, "latency_us": latency, "bandwidth_mbps": bandwidth})
        };
        let ways = [
            way("tcp", 10.0, 1000.0),
            way("library", 10.5, 990.0),
            way("copy", 14.0, 400.0),
            way("writev", 15.0, 500.0),
            way("cork", 20.0, 300.0),
            way("copy-no-crc", 13.0, 800.0),
            way("copy-thread", 40.0, 350.0),
            way("stack-tcp", 8.0, 700.0),
            way("stack-iwarp", 9.0, 600.0),
        ];
        let all = json!({"sizes": [1, 1024, 65536], "ways": ways});
        let five = standard(&all).unwrap();
        assert!((five.values["library-latency"] - 1.05).abs() < 1e-9);
        assert!((five.values["library-bandwidth"] - 0.99).abs() < 1e-9);
        let six = extended(&all).unwrap();
        let expected = [
            ("user-latency", 30.0),
            ("caller-latency", 4.0),
            ("user-peak", 500.0),
            ("small-bandwidth", 0.4),
            ("crc-cost", 0.5),
            ("kernel-latency", 1.0),
            ("kernel-peak", 600.0),
        ];
        for (fact, value) in expected {
            assert!((six.values[fact] - value).abs() < 1e-9, "{fact}");
        }
        assert_eq!(six.charts.len(), 2);
    }
}
