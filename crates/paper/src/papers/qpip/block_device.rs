//! Figure 7: a network block device over kernel sockets and over queue pairs, measured by `quipu nbd bench`.

use anyhow::{Context, Result};
use quipu_figure::{Chart, Kind, Shape, Values};
use serde_json::Value;

use crate::experiment::{Environment, Measured};

const BASE: &str = "kernel TCP";
const QPIP: &str = "QPIP queue pairs";
const RC: &str = "RC queue pairs over TCP";
const LOCAL: &str = "local file, no network";

/// Measures figure 7. A quick run has one round with a small file.
pub(super) fn measure(environment: &mut Environment<'_>) -> Result<Measured> {
    let (rounds, size) = if environment.quick { ("1", "64M") } else { ("10", "409M") };
    let line = ["nbd", "bench", "--ext2", "--json", "--rounds", rounds, "--size", size];
    facts(&environment.quipu_json(&line)?)
}

fn facts(result: &Value) -> Result<Measured> {
    let rows = result["rows"].as_array().context("the benchmark has no rows")?;
    let number = |test: &str, name: &str, key: &str| {
        let row = rows.iter().find(|row| row["test"] == test && row["name"] == name);
        row.and_then(|row| row[key].as_f64())
    };
    let mut measured = Measured::default();
    let tests = [("ext2 write", "write"), ("ext2 read", "read")];
    for (name, prefix) in [(QPIP, "qpip"), (RC, "rc")] {
        let best = |key: &str| {
            let ratios = tests.iter().filter_map(|(test, _)| number(test, name, key));
            ratios.max_by(f64::total_cmp)
        };
        for (test, word) in tests {
            if let Some(ratio) = number(test, name, "speed_ratio") {
                measured.set(&format!("{prefix}-{word}-speed"), ratio);
            }
        }
        if let Some(ratio) = best("cpu_ratio") {
            measured.set(&format!("{prefix}-cpu"), ratio);
        }
    }
    let write = tests[0].0;
    if let (Some(local), Some(speed)) =
        (number(write, LOCAL, "mb_per_cpu_s"), number(write, BASE, "mb_per_s"))
    {
        // Processor time of each megabyte, times megabytes a second.
        measured.set("filesystem-share", 100.0 * speed / local);
    }
    let mut names: Vec<&str> = Vec::new();
    for name in rows.iter().filter_map(|row| row["name"].as_str()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    anyhow::ensure!(names.contains(&BASE), "the benchmark did not measure {BASE}: see its notes");
    let titles = [
        ("Sequential transfer on ext2", "MB/s", "mb_per_s"),
        ("Sequential transfer on ext2, by the client's processor time", "MB/CPU s", "mb_per_cpu_s"),
    ];
    for (title, unit, key) in titles {
        let categories = Shape::Grouped(vec!["write".into(), "read".into()]);
        let mut chart = Chart::bars(title, unit, categories);
        for name in &names {
            let values = tests.map(|(test, _)| number(test, name, key)).to_vec();
            chart = chart.with(name, Kind::Ours, Values::PerCategory(values));
        }
        measured.charts.push(chart);
    }
    let notes = result["notes"].as_array().into_iter().flatten();
    measured.notes.extend(notes.filter_map(Value::as_str).map(str::to_owned));
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(test: &str, name: &str, ratio: f64) -> Value {
        json!({"test": test, "name": name, "mb_per_s": 100.0 * ratio, "mb_per_cpu_s": 200.0 * ratio,
            "speed_ratio": ratio, "cpu_ratio": ratio + 0.5})
    }

    #[test]
    fn ratios_become_facts() {
        let rows = [
            row("ext2 write", BASE, 1.0),
            row("ext2 read", BASE, 1.0),
            row("ext2 write", QPIP, 1.5),
            row("ext2 read", QPIP, 2.0),
            row("ext2 write", LOCAL, 4.0),
        ];
        let measured = facts(&json!({"rows": rows, "notes": ["a note"]})).unwrap();
        assert_eq!(measured.values["qpip-write-speed"], 1.5);
        assert_eq!(measured.values["qpip-cpu"], 2.5);
        assert_eq!(measured.values["filesystem-share"], 12.5);
        assert!(!measured.values.contains_key("rc-cpu"));
        assert_eq!((measured.charts.len(), measured.notes.len()), (2, 1));
    }

    #[test]
    fn without_kernel_sockets_there_is_nothing_to_compare_with() {
        assert!(facts(&json!({"rows": [], "notes": []})).is_err());
    }
}
