//! Tables for the terminal.

use std::fmt::Write as _;

use super::{digits, size};
use crate::model::{Kind, Path, Point, Role, Series, Test};
use crate::results::{Results, paths, tests};

/// Everything as text.
pub(crate) fn text(results: &Results) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{}", results.machine.sentence());
    let _ = writeln!(
        out,
        "Medians of {} rounds in which all took turns; {:.0} s.\n",
        results.rounds, results.seconds
    );
    for test in tests(&results.series) {
        for path in paths(&results.series, test) {
            for view in views(test) {
                numbers(&mut out, results, test, path, view);
            }
        }
    }
    costs(&mut out, results);
    targets(&mut out, results);
    if !results.notes.is_empty() {
        let _ = writeln!(out, "Notes");
        results.notes.iter().for_each(|note| {
            let _ = writeln!(out, "  {note}");
        });
    }
    out
}

/// A way to look at a test's points.
struct View {
    title: &'static str,
    sizes: std::ops::RangeInclusive<u64>,
    value: fn(&Point) -> f64,
}

fn views(test: Test) -> Vec<View> {
    let view = |title, sizes, value| View { title, sizes, value };
    let us: fn(&Point) -> f64 = |point| point.median_ns / 1e3;
    match test.kind {
        Kind::Latency if matches!(test.op, crate::model::Op::Send | crate::model::Op::Write) => {
            vec![view("half round trip, us", 0..=u64::MAX, us)]
        }
        Kind::Latency => vec![view("from posting to completion, us", 0..=u64::MAX, us)],
        Kind::Wake => vec![view("half round trip with both ends asleep, us", 0..=u64::MAX, us)],
        Kind::Stream => vec![
            view("million messages a second", 0..=1023, |point| point.messages_per_s / 1e6),
            view("GB a second", 1024..=u64::MAX, |point| point.bytes_per_s / 1e9),
        ],
    }
}

fn rank(role: Role) -> u8 {
    match role {
        Role::Quipu => 0,
        Role::Floor => 1,
        Role::Peer => 2,
    }
}

fn numbers(out: &mut String, results: &Results, test: Test, path: Path, view: View) {
    let legal = |size: &u64| view.sizes.contains(size);
    let in_table = |s: &&Series| s.test == test && s.path == path && s.points.keys().any(legal);
    let mut columns: Vec<_> = results.series.iter().filter(in_table).collect();
    columns.sort_by_key(|series| rank(series.role));
    let mut sizes: Vec<_> =
        columns.iter().flat_map(|s| s.points.keys().copied().filter(legal)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if sizes.is_empty() {
        return;
    }
    let _ = writeln!(out, "{} over {path}: {}", test.op, view.title);
    let mut lines = vec![vec!["size".to_owned()]];
    lines[0].extend(columns.iter().map(|series| series.contender.clone()));
    for bytes in sizes {
        let mut line = vec![size(bytes)];
        line.extend(columns.iter().map(|series| {
            series.points.get(&bytes).map_or("-".into(), |point| digits((view.value)(point)))
        }));
        lines.push(line);
    }
    aligned(out, &lines, true);
    out.push('\n');
}

fn costs(out: &mut String, results: &Results) {
    if !results.overhead.is_empty() {
        let _ = writeln!(out, "Cost of a message to the program: ns (cycles)");
        let head = ["", "size", "post send", "poll it", "post receive", "poll it", "send in all"];
        let mut lines = vec![head.map(str::to_owned).to_vec()];
        for o in &results.overhead {
            let cost = |cost: crate::model::Cost| format!("{:.0} ({:.0})", cost.ns, cost.cycles);
            let all = crate::model::Cost {
                ns: o.post_send.ns + o.poll_send.ns,
                cycles: o.post_send.cycles + o.poll_send.cycles,
            };
            let mut line = vec![o.path.to_string(), size(o.size)];
            line.extend([o.post_send, o.poll_send, o.post_recv, o.poll_recv, all].map(cost));
            lines.push(line);
        }
        aligned(out, &lines, true);
        out.push('\n');
    }
    if !results.memory.is_empty() {
        let _ = writeln!(out, "Idle connected queue pairs, with queues of one entry");
        let head = ["", "QPs in a process", "KB each", "seconds to set up"];
        let mut lines = vec![head.map(str::to_owned).to_vec()];
        for f in &results.memory {
            lines.push(vec![
                f.between.clone(),
                f.queue_pairs.to_string(),
                digits(f.bytes_per_qp / 1024.0),
                digits(f.setup_s),
            ]);
        }
        aligned(out, &lines, true);
        out.push('\n');
    }
}

fn targets(out: &mut String, results: &Results) {
    let _ = writeln!(out, "Targets (x: ratio of medians, with quartiles over the rounds)");
    let head = ["", "to reach", "measured", "reached"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for verdict in &results.targets {
        let reached = match verdict.reached {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "-",
        };
        lines.push(vec![
            verdict.metric.clone(),
            verdict.target.clone(),
            verdict.shown.clone(),
            reached.to_owned(),
        ]);
    }
    aligned(out, &lines, false);
    out.push('\n');
}

/// Lines whose columns are as wide as their widest cell; numbers to the right.
fn aligned(out: &mut String, lines: &[Vec<String>], right: bool) {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    for line in lines {
        let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if right && column > 0 { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        let text = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(out, "  {}", text.trim_end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut out = String::new();
        let line = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        aligned(&mut out, &[line(["a", "bb"]), line(["ccc", "d"])], true);
        assert_eq!(out, "  a    bb\n  ccc   d\n");
    }
}
