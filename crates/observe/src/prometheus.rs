//! Samples in the text format of Prometheus, version 0.0.4.

use std::fmt::Write as _;

use crate::sample::{
    DROP_REASONS, ENGINE_METRICS, LANE_METRICS, PATHS, QueuePair, STATES, STATUSES, Sample,
    WORK_METRICS,
};

/// The type of the text, for HTTP.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// All samples as one page.
#[must_use]
pub fn prometheus(samples: &[Sample]) -> String {
    let mut out = String::new();
    family(&mut out, "quipu_info", "gauge", "A process with a Quipu device.");
    for sample in samples {
        line(
            &mut out,
            "quipu_info",
            &format!("{},address=\"{}\"", labels(sample), sample.address),
            1,
        );
    }
    for (index, metric) in ENGINE_METRICS.iter().enumerate() {
        let name = format!("quipu_{}_total", metric.name);
        family(&mut out, &name, "counter", metric.help);
        for sample in samples {
            line(&mut out, &name, &labels(sample), sample.engine[index]);
        }
    }
    let name = "quipu_frames_dropped_by_reason_total";
    family(&mut out, name, "counter", "Frames from the packet link that were dropped, by reason.");
    for sample in samples {
        for (reason, count) in DROP_REASONS.iter().zip(sample.drops) {
            let labels = format!("{},reason=\"{}\"", labels(sample), reason.name);
            line(&mut out, name, &labels, count);
        }
    }
    let name = "quipu_completion_errors_total";
    family(&mut out, name, "counter", "Completions in error, by status.");
    for sample in samples {
        for (status, count) in STATUSES.iter().zip(sample.statuses).skip(1) {
            line(&mut out, name, &format!("{},status=\"{status}\"", labels(sample)), count);
        }
    }
    let name = "quipu_queue_pairs";
    family(&mut out, name, "gauge", "Queue pairs that there are.");
    for sample in samples {
        let count = sample.queue_pairs.len() as u64 + u64::from(sample.omitted);
        line(&mut out, name, &labels(sample), count);
    }
    for (index, metric) in WORK_METRICS.iter().enumerate() {
        let name = format!("quipu_{}_total", metric.name);
        family(&mut out, &name, "counter", metric.help);
        for sample in samples {
            line(&mut out, &name, &labels(sample), sample.work[index]);
        }
    }
    for (index, metric) in LANE_METRICS.iter().enumerate() {
        let name = format!("quipu_{}_total", metric.name);
        family(&mut out, &name, "counter", metric.help);
        for sample in samples {
            // Lanes that have sent something.
            for (lane, values) in sample.lanes.iter().enumerate().filter(|(_, lane)| lane[1] > 0) {
                let labels = format!("{},lane=\"{lane}\"", labels(sample));
                line(&mut out, &name, &labels, values[index]);
            }
        }
    }
    queue_pairs(&mut out, samples);
    out
}

fn queue_pairs(out: &mut String, samples: &[Sample]) {
    let all =
        || samples.iter().flat_map(|sample| sample.queue_pairs.iter().map(move |qp| (sample, qp)));
    let name = "quipu_qp_info";
    family(out, name, "gauge", "A queue pair, its state and its peer.");
    for (sample, qp) in all() {
        let (state, path) = (STATES[usize::from(qp.state)], PATHS[usize::from(qp.path)]);
        let labels = format!(
            "{},state=\"{state}\",path=\"{path}\",peer=\"{}\",peer_qp=\"{:#08x}\"",
            qp_labels(sample, qp),
            qp.peer_address,
            qp.peer
        );
        line(out, name, &labels, 1);
    }
    for (index, metric) in WORK_METRICS.iter().enumerate() {
        let name = format!("quipu_qp_{}_total", metric.name);
        family(out, &name, "counter", metric.help);
        for (sample, qp) in all() {
            line(out, &name, &qp_labels(sample, qp), qp.work[index]);
        }
    }
}

fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn line(out: &mut String, name: &str, labels: &str, value: u64) {
    let _ = writeln!(out, "{name}{{{labels}}} {value}");
}

/// What tells an engine from all others. Several may have one process number, in spaces of their own, or in
/// one process.
fn labels(sample: &Sample) -> String {
    let Sample { process, program, device, started, .. } = sample;
    let (program, device) = (escape(program), escape(device));
    format!("process=\"{process}\",program=\"{program}\",device=\"{device}\",started=\"{started}\"")
}

fn qp_labels(sample: &Sample, qp: &QueuePair) -> String {
    format!("{},qp=\"{:#08x}\"", labels(sample), qp.number)
}

/// A label's value: three characters are not what they are.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::sample::tests::example;

    #[test]
    fn the_page_follows_the_format() {
        let mut other = example();
        (other.process, other.program) = (4712, "a \"b\" \\ c\n".into());
        // Of another container, say.
        let mut again = example();
        again.started += 1;
        let page = prometheus(&[example(), other, again]);
        let (mut families, mut series) = (BTreeSet::new(), BTreeSet::new());
        let mut current = String::new();
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert!(families.insert(name.to_owned()), "{name} twice");
                assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
                current = name.to_owned();
            } else if !line.starts_with('#') {
                let (key, value) = line.rsplit_once(' ').unwrap();
                assert!(value.parse::<u64>().is_ok());
                assert!(key.starts_with(&format!("{current}{{")) && key.ends_with('}'), "{key}");
                assert!(series.insert(key.to_owned()), "{key} twice");
            }
        }
        let wanted = [
            "quipu_sends_total{process=\"4711\",program=\"ib_write_bw\",device=\"quipu0\",{STARTED}} 33",
            "quipu_completion_errors_total{process=\"4711\",program=\"ib_write_bw\",\
             device=\"quipu0\",{STARTED},status=\"wr_flush_err\"} 9",
            "quipu_frames_dropped_by_reason_total{process=\"4711\",program=\"ib_write_bw\",\
             device=\"quipu0\",{STARTED},reason=\"ip_malformed\"} 201",
            "quipu_queue_pairs{process=\"4711\",program=\"ib_write_bw\",device=\"quipu0\",{STARTED}} 5",
            "quipu_qp_sends_total{process=\"4711\",program=\"ib_write_bw\",device=\"quipu0\",\
             {STARTED},qp=\"0xc35002\"} 17",
            "program=\"a \\\"b\\\" \\\\ c\\n\"",
        ];
        let started = format!("started=\"{}\"", example().started);
        for text in wanted {
            let text = text.replace("{STARTED}", &started);
            assert!(page.contains(&text), "no {text} in\n{page}");
        }
    }
}
