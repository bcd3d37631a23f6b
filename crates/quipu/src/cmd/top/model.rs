//! What is shown: the last samples, and how fast things went since those before.

use std::fmt::Write as _;

use quipu_host::counters::interval_ns;
use quipu_host::counters::observe::{
    DROP_REASONS, ENGINE_METRICS, LANE_METRICS, PATHS, QueuePair, STATES, STATUSES, Sample, WORK,
    WORK_METRICS,
};
use serde_json::{Map, Value, json};

use super::super::sockets::Process;
use super::sockets;

/// Rows for a table.
pub(super) struct Model {
    /// What they were made of.
    pub(super) samples: Vec<Sample>,
    /// One for each engine, the busiest first.
    pub(super) engines: Vec<Row>,
    /// One for each queue pair, the busiest first.
    pub(super) queue_pairs: Vec<Row>,
    /// One for each process whose sockets go through memory.
    pub(super) sockets: Vec<Row>,
}

/// The headings of engines.
const ENGINE_COLUMNS: [&str; 11] = [
    "PROCESS", "PROGRAM", "ADDRESS", "QPS", "MSG/S", "OUT/S", "IN/S", "ERRORS", "RNR", "DROPS",
    "LANES",
];
/// The headings of queue pairs.
pub(super) const QP_COLUMNS: [&str; 10] =
    ["PROCESS", "QP", "STATE", "PATH", "PEER", "MSG/S", "OUT/S", "IN/S", "SQ", "RQ"];

/// A line of a table.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) cells: Vec<String>,
    /// Whether it needs attention.
    pub(super) alarming: bool,
    /// By which rows are sorted.
    weight: f64,
}

impl Row {
    /// A row that needs no attention and keeps its place.
    pub(super) fn calm(cells: Vec<String>) -> Self {
        Self { cells, alarming: false, weight: 0.0 }
    }
}

/// What moved, each second or since the beginning.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    messages: f64,
    out: f64,
    into: f64,
}

fn value(work: &[u64; WORK], names: &[&str]) -> u64 {
    let named = WORK_METRICS.iter().zip(work).filter(|(metric, _)| names.contains(&metric.name));
    named.map(|(_, value)| value).sum()
}

/// What moved between two samples, `before` at the latest by the other's beginning. Bytes of reads come in
/// to whoever asked, though they are among the requested ones: they are told apart nowhere, so all that was
/// requested counts as going out unless nothing but reads was asked for.
fn flow(now: &[u64; WORK], before: &[u64; WORK], seconds: f64) -> Flow {
    let names: &[&str] = &[
        "sends",
        "writes",
        "reads",
        "atomics",
        "receives",
        "served_writes",
        "served_reads",
        "served_atomics",
    ];
    let rate = |names: &[&str]| {
        value(now, names).saturating_sub(value(before, names)) as f64 / seconds.max(1e-3)
    };
    let (asked, reads) = (rate(&["requested_bytes"]), rate(&["reads"]));
    let only_reads = reads > 0.0 && rate(&["sends", "writes"]) == 0.0;
    let (out, into) = if only_reads { (0.0, asked) } else { (asked, 0.0) };
    Flow {
        messages: rate(names),
        out: out + rate(&["read_bytes"]),
        into: into + rate(&["received_bytes"]),
    }
}

impl Model {
    /// From the last samples and those before, which were looked at at that time; engines that were not there
    /// before, or did nothing new, are at rest.
    pub(super) fn new(samples: Vec<Sample>, before: &[Sample], looked: u64) -> Self {
        let (mut engines, mut queue_pairs) = (Vec::new(), Vec::new());
        for sample in &samples {
            let same = |old: &&Sample| {
                (old.process, old.started, old.address)
                    == (sample.process, sample.started, sample.address)
            };
            let old = before.iter().find(same).unwrap_or(sample);
            // One that was at rest has written no samples, and what is new came after the last look.
            let begin = old.taken.max(looked.saturating_sub(interval_ns(old)));
            let seconds = sample.taken.saturating_sub(begin) as f64 / 1e9;
            engines.push(engine(sample, old, seconds));
            for qp in &sample.queue_pairs {
                let old = old.queue_pairs.iter().find(|old| old.number == qp.number).unwrap_or(qp);
                queue_pairs.push(queue_pair(sample, qp, old, seconds));
            }
        }
        // Stable, so that what is equally busy keeps the order of processes.
        let by_weight = |a: &Row, b: &Row| b.weight.total_cmp(&a.weight);
        engines.sort_by(by_weight);
        queue_pairs.sort_by(by_weight);
        Self { samples, engines, queue_pairs, sockets: Vec::new() }
    }

    /// With the processes whose sockets go through memory.
    pub(super) fn with_sockets(self, processes: &[Process]) -> Self {
        Self { sockets: sockets::rows(processes), ..self }
    }

    /// The headings of engines: lanes where there are any.
    pub(super) fn engine_columns(&self) -> &'static [&'static str] {
        let has_lanes = self.samples.iter().any(|it| it.lanes.iter().any(|lane| lane[0] > 0));
        if has_lanes { &ENGINE_COLUMNS } else { &ENGINE_COLUMNS[..10] }
    }

    /// As plain text.
    pub(super) fn text(&self) -> String {
        let mut out = table(self.engine_columns(), &self.engines);
        if !self.queue_pairs.is_empty() {
            out.push('\n');
            out.push_str(&table(&QP_COLUMNS, &self.queue_pairs));
        }
        if !self.sockets.is_empty() {
            out.push('\n');
            out.push_str(&table(&sockets::COLUMNS, &self.sockets));
        }
        out
    }
}

fn engine(sample: &Sample, old: &Sample, seconds: f64) -> Row {
    let flow = flow(&sample.work, &old.work, seconds);
    let count = sample.queue_pairs.len() + sample.omitted as usize;
    let errors: u64 = sample.statuses.iter().skip(1).sum();
    let rnr = value(&sample.work, &["rnr_received", "rnr_sent"]);
    let cells = vec![
        sample.process.to_string(),
        sample.program.clone(),
        sample.address.to_string(),
        count.to_string(),
        short(flow.messages),
        short(flow.out),
        short(flow.into),
        errors.to_string(),
        rnr.to_string(),
        sample.drops.iter().sum::<u64>().to_string(),
        lane_shares(sample, old),
    ];
    Row { cells, alarming: errors > 0, weight: flow.messages }
}

/// What each virtual lane has sent of all octets since the sample before, in percent, such as `0:20 1:80`.
fn lane_shares(sample: &Sample, old: &Sample) -> String {
    let sent = |lane: usize| sample.lanes[lane][0].saturating_sub(old.lanes[lane][0]);
    let all: u64 = (0..sample.lanes.len()).map(sent).sum();
    let shares = (0..sample.lanes.len()).filter(|&lane| sent(lane) > 0);
    let shares = shares.map(|lane| {
        let percent = sent(lane) as f64 * 100.0 / all as f64;
        format!("{lane}:{percent:.0}")
    });
    shares.collect::<Vec<_>>().join(" ")
}

fn queue_pair(sample: &Sample, qp: &QueuePair, old: &QueuePair, seconds: f64) -> Row {
    let flow = flow(&qp.work, &old.work, seconds);
    let peer = match qp.peer_address.is_unspecified() {
        true => "-".to_owned(),
        false => format!("{} {:06x}", qp.peer_address, qp.peer),
    };
    let (state, path) = (STATES[usize::from(qp.state)], PATHS[usize::from(qp.path)]);
    let cells = vec![
        sample.process.to_string(),
        format!("{:06x}", qp.number),
        state.to_owned(),
        path.to_owned(),
        peer,
        short(flow.messages),
        short(flow.out),
        short(flow.into),
        qp.send_queue.to_string(),
        qp.recv_queue.to_string(),
    ];
    let alarming = matches!(state, "ERR" | "SQE") || path == "lost";
    Row { cells, alarming, weight: flow.messages }
}

/// A number with a decimal prefix.
pub(super) fn short(number: f64) -> String {
    let mut number = number;
    for prefix in ["", "k", "M", "G", "T"] {
        if number < 1000.0 || prefix == "T" {
            let digits = if prefix.is_empty() || number >= 100.0 { 0 } else { 1 };
            return format!("{number:.digits$}{prefix}");
        }
        number /= 1000.0;
    }
    String::new()
}

/// How wide each column must be.
pub(super) fn widths(headings: &[&str], rows: &[Row]) -> Vec<usize> {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.cells.get(column)).map(|cell| cell.chars());
        cells.map(Iterator::count).max().unwrap_or_default()
    };
    headings.iter().enumerate().map(|(at, heading)| width(at).max(heading.len())).collect()
}

fn table(headings: &[&str], rows: &[Row]) -> String {
    let widths = widths(headings, rows);
    let mut out = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<_> =
            cells.zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(out, "{}", padded.join("  ").trim_end());
    };
    line(&mut headings.iter().copied());
    for row in rows {
        line(&mut row.cells.iter().map(String::as_str));
    }
    out
}

/// Everything, for scripts.
pub(super) fn json(samples: &[Sample]) -> Value {
    let work = |values: &[u64; WORK]| -> Map<String, Value> {
        WORK_METRICS.iter().zip(values).map(|(m, &value)| (m.name.into(), value.into())).collect()
    };
    let queue_pair = |qp: &QueuePair| {
        json!({
            "number": qp.number,
            "service": qp.service,
            "state": STATES[usize::from(qp.state)],
            "path": PATHS[usize::from(qp.path)],
            "peer": qp.peer,
            "peer_address": qp.peer_address.to_string(),
            "send_queue": qp.send_queue,
            "recv_queue": qp.recv_queue,
            "counters": work(&qp.work),
        })
    };
    let engine = |sample: &Sample| {
        let mut counters = work(&sample.work);
        let of_engine = ENGINE_METRICS.iter().zip(sample.engine);
        counters.extend(of_engine.map(|(metric, value)| (metric.name.into(), value.into())));
        let statuses: Map<String, Value> = STATUSES
            .iter()
            .zip(sample.statuses)
            .map(|(&name, count)| (name.into(), count.into()))
            .collect();
        let drops: Map<String, Value> = DROP_REASONS
            .iter()
            .zip(sample.drops)
            .map(|(reason, count)| (reason.name.into(), count.into()))
            .collect();
        json!({
            "process": sample.process,
            "program": sample.program,
            "device": sample.device,
            "address": sample.address.to_string(),
            "started_ns": sample.started,
            "taken_ns": sample.taken,
            "counters": counters,
            "completions_by_status": statuses,
            "frames_dropped_by_reason": drops,
            "lanes": lanes(sample),
            "queue_pairs": sample.queue_pairs.iter().map(queue_pair).collect::<Vec<_>>(),
            "queue_pairs_omitted": sample.omitted,
        })
    };
    samples.iter().map(engine).collect()
}

/// The virtual lanes that have sent something.
fn lanes(sample: &Sample) -> Vec<Value> {
    let used = sample.lanes.iter().enumerate().filter(|(_, values)| values[1] > 0);
    used.map(|(lane, values)| {
        let mut shown = Map::from_iter([("lane".to_owned(), lane.into())]);
        let values = LANE_METRICS.iter().zip(values);
        shown.extend(values.map(|(metric, &value)| (metric.name.into(), value.into())));
        shown.into()
    })
    .collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn work(sends: u64, bytes: u64) -> [u64; WORK] {
        let mut work = [0; WORK];
        (work[0], work[4]) = (sends, bytes);
        work
    }

    /// An engine that did so much, with a queue pair that did all of it and one in error.
    pub(in super::super) fn sample(process: u32, seconds: u64, sends: u64) -> Sample {
        let queue_pair = |number, state, path, sends| QueuePair {
            number,
            service: 2,
            state,
            path,
            peer: 0x00c4_0001,
            peer_address: "192.0.2.7".parse().unwrap(),
            send_queue: 5,
            recv_queue: 6,
            work: work(sends, sends * 1000),
        };
        let mut statuses = [0; STATUSES.len()];
        statuses[5] = u64::from(process == 8);
        let mut drops = [0; DROP_REASONS.len()];
        (drops[2], drops[5]) = if process == 8 { (2, 1) } else { (0, 0) };
        Sample {
            lanes: Default::default(),
            process,
            started: 1,
            taken: seconds * 1_000_000_000,
            program: "ib_send_bw".into(),
            device: "quipu0".into(),
            address: "192.0.2.1".parse().unwrap(),
            engine: [0; ENGINE_METRICS.len()],
            drops,
            statuses,
            work: work(sends, sends * 1000),
            queue_pairs: vec![
                queue_pair(0x00c3_5001, 3, 2, sends),
                queue_pair(0x00c3_5002, 6, 5, 0),
            ],
            omitted: 0,
        }
    }

    #[test]
    fn the_busiest_come_first() {
        let before = [sample(7, 10, 100), sample(8, 10, 100)];
        let model = Model::new(vec![sample(7, 12, 300), sample(8, 12, 5_000_100)], &before, 0);
        let cells: Vec<_> = model.engines.iter().map(|row| row.cells.join(" ")).collect();
        assert_eq!(
            cells,
            [
                "8 ib_send_bw 192.0.2.1 2 2.5M 2.5G 0 1 0 3 ",
                "7 ib_send_bw 192.0.2.1 2 100 100k 0 0 0 0 ",
            ]
        );
        assert_eq!(model.engines.iter().map(|row| row.alarming).collect::<Vec<_>>(), [true, false]);
        assert_eq!(
            model.queue_pairs[0].cells.join(" "),
            "8 c35001 RTS tcp 192.0.2.7 c40001 2.5M 2.5G 0 5 6"
        );
        assert_eq!(model.queue_pairs.iter().filter(|row| row.alarming).count(), 2);
    }

    #[test]
    fn lanes_have_a_column_where_there_are_any() {
        let (old, mut new) = (sample(7, 10, 100), sample(7, 12, 300));
        assert_eq!(
            Model::new(vec![new.clone()], std::slice::from_ref(&old), 0).engine_columns().len(),
            10
        );
        (new.lanes[0][0], new.lanes[3][0]) = (2_000, 8_000);
        let model = Model::new(vec![new], &[old], 0);
        assert_eq!(model.engine_columns().last(), Some(&"LANES"));
        assert_eq!(model.engines[0].cells[10], "0:20 3:80");
    }

    #[test]
    fn after_a_pause_only_the_time_since_the_last_look_counts() {
        let before = [sample(7, 10, 100)];
        let look = |ns| Model::new(vec![sample(7, 100, 1900)], &before, ns);
        // Looked at a second before, and as long before that as a sample may be late.
        assert_eq!(look(99_200_000_000).engines[0].cells[4], "1.8k");
        assert_eq!(look(9_000_000_000).engines[0].cells[4], "20");
    }

    #[test]
    fn numbers_are_short() {
        let numbers = [0.0, 999.4, 1000.0, 123_456.0, 2.5e9, 7e15].map(short);
        assert_eq!(numbers, ["0", "999", "1.0k", "123k", "2.5G", "7000T"]);
    }

    #[test]
    fn scripts_get_everything() {
        let all = json(&[sample(7, 10, 100)]);
        assert_eq!(all[0]["counters"]["sends"], 100);
        assert_eq!(all[0]["queue_pairs"][1]["state"], "ERR");
        assert_eq!(all[0]["completions_by_status"]["wr_flush_err"], 0);
    }
}
