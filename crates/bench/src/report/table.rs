//! Tables for the terminal.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::{digits, size};
use crate::model::{Kind, Path, Point, Role, Series, Test};
use crate::nearness::asked;
use crate::results::{ENOUGH, Results, paths, tests};
use crate::targets::QUIPU_TCP_CRC;

/// A contender, and the tests in which it takes part.
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) path: Path,
    pub(crate) tests: Vec<String>,
}

/// Who takes part in what, and a word about those who are not there.
pub(crate) fn list(contenders: &[Listed], missing: &[String]) -> String {
    let mut out = String::new();
    let lines = contenders
        .iter()
        .filter(|listed| !listed.tests.is_empty())
        .map(|listed| vec![listed.name.clone(), listed.path.to_string(), listed.tests.join(", ")]);
    aligned(&mut out, &lines.collect::<Vec<_>>(), false);
    missing.iter().for_each(|note| {
        let _ = writeln!(out, "{note}");
    });
    out
}

/// Everything as text.
pub(crate) fn text(results: &Results) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{}", results.machine.sentence());
    head(&mut out, results);
    for test in tests(&results.series) {
        for path in paths(&results.series, test) {
            for view in views(test) {
                numbers(&mut out, results, test, path, view);
            }
            details(&mut out, results, test, path);
        }
    }
    costs(&mut out, results);
    super::qpip::tables(&mut out, results);
    super::goodput::table(&mut out, results);
    targets(&mut out, results);
    if !results.notes.is_empty() {
        let _ = writeln!(out, "Notes");
        results.notes.iter().for_each(|note| {
            let _ = writeln!(out, "  {note}");
        });
    }
    out
}

/// What the tables are of.
fn head(out: &mut String, results: &Results) {
    let Results { rounds, seconds, .. } = results;
    if results.series.is_empty() {
        let _ = writeln!(out, "{seconds:.0} s.\n");
        return;
    }
    let _ = writeln!(out, "Medians of {rounds} rounds in which all took turns; {seconds:.0} s.");
    let _ = writeln!(
        out,
        "(n): of n samples, where that is another number. Sends are drawn from samples of the state of the machine in \
         which most were taken, if there are {ENOUGH};"
    );
    let _ = writeln!(out, "~: if not, from all, and not to be compared with others.\n");
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
        Kind::Connect => {
            let rate: fn(&Point) -> f64 = |point| point.messages_per_s;
            vec![view("made and broken, so many at once: per second", 0..=u64::MAX, rate)]
        }
        Kind::Crowd => {
            let rate: fn(&Point) -> f64 = |point| point.messages_per_s / 1e6;
            vec![view("many queue pairs at once, million messages a second", 0..=u64::MAX, rate)]
        }
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
    let asked = sizes.iter().any(|&size| asked(test, size));
    let state = columns.iter().find_map(|series| series.line_ns).filter(|_| asked);
    let state = state
        .map_or(String::new(), |ns| format!("; a cache line took about {ns:.0} ns there and back"));
    let _ = writeln!(out, "{} over {path}: {}{state}", test.op, view.title);
    let counted = if test.kind == Kind::Connect { "at once" } else { "size" };
    let mut lines = vec![vec![counted.to_owned()]];
    lines[0].extend(columns.iter().map(|series| series.contender.clone()));
    for bytes in sizes {
        let mut line = vec![amount(test, bytes)];
        line.extend(columns.iter().map(|series| {
            let cell = |point| cell(digits((view.value)(point)), point, results.rounds);
            series.points.get(&bytes).map_or("-".into(), cell)
        }));
        lines.push(line);
    }
    aligned(out, &lines, true);
    if columns.iter().any(|series| series.contender == QUIPU_TCP_CRC) {
        let _ = writeln!(
            out,
            "  {QUIPU_TCP_CRC}: with CRCs, as streams between hosts have them; within one host, as elsewhere here, they \
             have none unless QUIPU_CRC=always"
        );
    }
    out.push('\n');
}

/// A number, with how many samples it is of if these are not as many as rounds, and whether they are of
/// several states of the machine.
fn cell(number: String, point: &Point, rounds: u32) -> String {
    let mixed = if point.mixed { "~" } else { "" };
    match point.counted {
        counted if counted == rounds as usize => format!("{mixed}{number}"),
        counted => format!("{mixed}{number} ({counted})"),
    }
}

/// The size of a test: bytes, or a number of connections.
fn amount(test: Test, value: u64) -> String {
    if test.kind == Kind::Connect { value.to_string() } else { size(value) }
}

/// What else was found out: a line for each contender and size. What sleeping costs and gains is
/// seen beside what spinning does.
fn details(out: &mut String, results: &Results, test: Test, path: Path) {
    let (title, tests) = match test.kind {
        // The table of the test itself says enough.
        Kind::Latency | Kind::Stream => return,
        Kind::Wake => (
            "half round trip, us, and CPU time of both ends",
            vec![(test, "asleep"), (Test { kind: Kind::Latency, ..test }, "spinning")],
        ),
        Kind::Connect => ("us of each step", vec![(test, "")]),
        Kind::Crowd => ("messages of a queue pair in a slice of time", vec![(test, "")]),
    };
    let sizes = sizes_of(results, test, path);
    let mut lines: Vec<Vec<String>> = Vec::new();
    for (test, how) in tests {
        let legal = |s: &&Series| s.test == test && s.path == path;
        for series in results.series.iter().filter(legal) {
            let points = series.points.iter();
            for (&bytes, point) in
                points.filter(|(size, p)| sizes.contains(size) && !p.also.is_empty())
            {
                let names = point.also.iter().map(|detail| detail.name.clone());
                let time = (!how.is_empty()).then(|| digits(point.median_ns / 1e3));
                if lines.is_empty() {
                    let head = ["", ""].into_iter().chain(time.as_ref().map(|_| "us"));
                    lines.push(head.map(str::to_owned).chain(names).collect());
                }
                let label = match how {
                    "" => series.contender.clone(),
                    how => format!("{}, {how}", series.contender),
                };
                let values = point.also.iter().map(|detail| digits(detail.median));
                let row = [label, amount(test, bytes)].into_iter().chain(time).chain(values);
                lines.push(row.collect());
            }
        }
    }
    if !lines.is_empty() {
        let _ = writeln!(out, "{} over {path}: {title}", test.op);
        aligned(out, &lines, true);
        out.push('\n');
    }
}

/// The sizes that anybody was measured with.
fn sizes_of(results: &Results, test: Test, path: Path) -> BTreeSet<u64> {
    let legal = |s: &&Series| s.test == test && s.path == path;
    results.series.iter().filter(legal).flat_map(|s| s.points.keys().copied()).collect()
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
        // The notes say what failed.
        for f in results.memory.iter().filter(|f| f.fault.is_none()) {
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
    let _ = writeln!(out, "Targets (x: median of the ratios within rounds, with their quartiles)");
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
pub(super) fn aligned(out: &mut String, lines: &[Vec<String>], right: bool) {
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
    fn a_list_has_a_line_for_everybody_who_takes_part() {
        let listed = |name: &str, tests: &[&str]| Listed {
            name: name.into(),
            path: Path::Udp,
            tests: tests.iter().map(|test| (*test).to_owned()).collect(),
        };
        let contenders = [listed("a", &["send latency", "send wake"]), listed("idle", &[])];
        let text = list(&contenders, &["UCX is not measured: it is away".into()]);
        let expected =
            "  a  UDP loopback  send latency, send wake\nUCX is not measured: it is away\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_cell_says_of_how_many_samples_it_is() {
        let point = |counted, mixed| Point { counted, mixed, ..Point::default() };
        let shown = |point: Point| cell("0.28".into(), &point, 7);
        assert_eq!(shown(point(7, false)), "0.28");
        assert_eq!(shown(point(3, false)), "0.28 (3)");
        assert_eq!(shown(point(7, true)), "~0.28");
        assert_eq!(shown(point(2, true)), "~0.28 (2)");
    }

    #[test]
    fn columns_line_up() {
        let mut out = String::new();
        let line = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        aligned(&mut out, &[line(["a", "bb"]), line(["ccc", "d"])], true);
        assert_eq!(out, "  a    bb\n  ccc   d\n");
    }
}
