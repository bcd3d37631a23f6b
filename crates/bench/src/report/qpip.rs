//! QPIP on packet links: tables and plot after figures 3 and 4 and tables 1 to 3 of its paper.

use std::fmt::Write as _;

use super::table::aligned;
use super::{digits, size};
use crate::plot::{Chart, Line, Style, Unit, page};
use crate::qpip::{
    COLUMNS, CONTENDERS, Figure, IdleCost, KERNEL, Load, OWN_PROCESS, Row, program_time,
};
use crate::results::Results;

/// A line for each contender that is wanted.
pub(crate) fn list(wanted: impl Fn(&str) -> bool) -> String {
    let mut out = String::new();
    let line =
        |name: &str, link: String| vec![name.to_owned(), link, "round trip, ttcp".to_owned()];
    let those = CONTENDERS.iter().filter(|c| wanted(c.name));
    let lines: Vec<_> = those.map(|c| line(c.name, c.link.to_string())).collect();
    aligned(&mut out, &lines, false);
    out
}

/// Both figures as tables, and the tables.
pub(super) fn tables(out: &mut String, results: &Results) {
    if let Some(rounds) = results.qpip.0.iter().map(|row| row.rounds.len()).max() {
        let _ = writeln!(
            out,
            "QPIP on packet links: medians of {rounds} rounds, as far as the processors were equally near to each other\n"
        );
    }
    round_trips(out, results);
    bulk(out, results);
    sizes(out, results);
    overhead(out, results);
    occupancy(out, results);
    idle(out, results);
}

fn text(head: &[&str]) -> Vec<String> {
    head.iter().map(|cell| (*cell).to_owned()).collect()
}

/// Who was measured, in the order of the contenders.
fn measured(results: &Results, figure: Figure) -> Vec<&'static str> {
    let any = |name: &str| {
        results.qpip.0.iter().any(|row| row.contender.name == name && row.figure == figure)
    };
    CONTENDERS.iter().map(|contender| contender.name).filter(|name| any(name)).collect()
}

fn round_trips(out: &mut String, results: &Results) {
    let names = measured(results, Figure::RoundTripTcp);
    let Some(&mtu) = results.qpip.points(Figure::RoundTripTcp).first() else { return };
    let _ = writeln!(
        out,
        "QPIP, figure 3: round trip of 1 B, us; both ends spin but in {OWN_PROCESS}, MTU {mtu}"
    );
    let mut lines = vec![text(&["", "link", "UDP", "quartiles", "TCP", "quartiles"])];
    for name in names {
        let row = |figure| results.qpip.row(name, figure, mtu);
        let Some(link) = row(Figure::RoundTripTcp).map(|row| row.contender.link) else { continue };
        let mut line = vec![name.to_owned(), link.to_string()];
        for figure in [Figure::RoundTripUdp, Figure::RoundTripTcp] {
            line.push(row(figure).map_or("-".into(), |row| digits(row.median.value)));
            line.push(row(figure).map_or("-".into(), quartiles));
        }
        lines.push(line);
    }
    aligned(out, &lines, true);
    out.push('\n');
}

fn quartiles(row: &Row) -> String {
    row.quartiles.map(digits).join(" to ")
}

/// Microseconds of processor time for a megabyte, and as part of a processor.
fn spent(part: f64, mb_per_s: f64) -> String {
    format!("{} ({:.0} %)", digits(part * 1e6 / mb_per_s), part * 100.0)
}

fn bulk(out: &mut String, results: &Results) {
    let mtus = results.qpip.points(Figure::Bulk);
    if mtus.is_empty() {
        return;
    }
    let message = results.plan.qpip.as_ref().map_or(0, |plan| u64::from(plan.message));
    let _ = writeln!(
        out,
        "QPIP, figure 4: ttcp with messages of {}; processor time of programs and adapters in us a MB (of one processor), and how often programs sleep",
        size(message)
    );
    let head = [
        "MTU",
        "",
        "link",
        "MB/s",
        "quartiles",
        "sender",
        "sleeps a MB",
        "its adapter",
        "receiver",
        "sleeps a MB",
        "its adapter",
    ];
    let mut lines = vec![text(&head)];
    for mtu in mtus {
        for row in CONTENDERS.iter().filter_map(|c| results.qpip.row(c.name, Figure::Bulk, mtu)) {
            let rate = row.median.value;
            let mut line = vec![mtu.to_string(), row.contender.name.to_owned()];
            line.extend([row.contender.link.to_string(), digits(rate), quartiles(row)]);
            for Load { program, adapter, sleeps } in row.median.load {
                line.extend([spent(program, rate), digits(sleeps / rate), spent(adapter, rate)]);
            }
            lines.push(line);
        }
    }
    aligned(out, &lines, true);
    out.push('\n');
}

/// What programs spend on messages of several sizes, in the streams of two contenders.
fn sizes(out: &mut String, results: &Results) {
    let sizes = results.qpip.points(Figure::Sizes);
    let Some(of) = results.qpip.0.iter().find(|row| row.figure == Figure::Sizes) else { return };
    let title =
        "QPIP, processor time of the programs of both ends together, us a MB, by size of messages";
    let _ = writeln!(out, "{title}; ttcp, MTU {}", of.mtu);
    let names = measured(results, Figure::Sizes);
    let mut head = text(&["size"]);
    head.extend(names.iter().flat_map(|name| [(*name).to_owned(), "MB/s".to_owned()]));
    head.extend(text(&["ratio", "quartiles"]));
    let mut lines = vec![head];
    for at in sizes {
        let mut line = vec![size(u64::from(at))];
        for name in &names {
            let median = results.qpip.row(name, Figure::Sizes, at).map(|row| row.median);
            let numbers = median.map(|it| [1e6 * program_time(&it), it.value].map(digits));
            line.extend(numbers.unwrap_or_else(|| ["-", "-"].map(str::to_owned)));
        }
        let pair = (OWN_PROCESS, KERNEL);
        let ratio = results.qpip.ratio(pair, Figure::Sizes, at, program_time);
        let ratio = ratio.map(|it| (it.speed, it.spread));
        let (ratio, spread) = ratio.unwrap_or((f64::NAN, [f64::NAN; 2]));
        line.extend([digits(ratio), spread.map(digits).join(" to ")]);
        lines.push(line);
    }
    aligned(out, &lines, true);
    out.push('\n');
}

fn overhead(out: &mut String, results: &Results) {
    let Some(&mtu) = results.qpip.points(Figure::HostOverhead).first() else { return };
    let title = "QPIP, table 1: calls of the program that send 1 B by TCP and receive the answer, without waiting";
    let _ = writeln!(out, "{title}");
    let mut lines = vec![text(&["", "link", "ns", "quartiles", "cycles"])];
    for name in measured(results, Figure::HostOverhead) {
        let Some(row) = results.qpip.row(name, Figure::HostOverhead, mtu) else { continue };
        let (value, cycles) = (row.median.value, row.median.cycles);
        let mut line = vec![name.to_owned(), row.contender.link.to_string(), digits(value)];
        line.extend([quartiles(row), digits(cycles)]);
        lines.push(line);
    }
    aligned(out, &lines, true);
    out.push('\n');
}

fn occupancy(out: &mut String, results: &Results) {
    if results.occupancy.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "QPIP, tables 2 and 3: the adapter's stages for a segment of 1 KB, ns (us in the paper)"
    );
    let mut lines = vec![[&[""], &COLUMNS[..]].concat().into_iter().map(str::to_owned).collect()];
    let number = |value: Option<f64>| value.map_or("-".into(), digits);
    let cells = |ns: [Option<f64>; 4], paper: [Option<f64>; 4]| {
        ns.into_iter().zip(paper).map(move |(ns, us)| format!("{} ({})", number(ns), number(us)))
    };
    let (mut sum, mut paper) = ([Some(0.0); 4], [Some(0.0); 4]);
    for row in &results.occupancy {
        lines.push([row.stage.to_owned()].into_iter().chain(cells(row.ns, row.paper_us)).collect());
        for column in 0..4 {
            sum[column] = sum[column].map(|sum| sum + row.ns[column].unwrap_or(0.0));
            paper[column] = paper[column].map(|sum| sum + row.paper_us[column].unwrap_or(0.0));
        }
    }
    lines.push(["together".to_owned()].into_iter().chain(cells(sum, paper)).collect());
    aligned(out, &lines, true);
    out.push('\n');
}

fn idle(out: &mut String, results: &Results) {
    let Some(cost) = &results.idle else { return };
    let [alone, among] = cost.packet_ns.map(digits);
    let IdleCost { connections, octets, busy, .. } = cost;
    let _ = writeln!(
        out,
        "QPIP, {connections} idle connections of one stack: {octets:.0} octets each by its own account; a packet of one of {busy} busy \
         ones takes {among} ns among them, {alone} ns without\n"
    );
}

/// Throughput and processor time over the MTU, and goodput over loss.
pub(crate) fn plot(results: &Results) -> String {
    let rate = |row: &Row| row.median.value;
    let cost = |row: &Row| {
        let sum: f64 = row.median.load.iter().map(|load| load.program + load.adapter).sum();
        sum * 1e6 / row.median.value
    };
    let chart = |column: usize, title: &str, unit, value: &dyn Fn(&Row) -> f64| {
        let units = [Unit::Bytes, Unit::Of(unit)];
        Chart::new((column, 0), title.to_owned(), units, lines(results, value))
    };
    let mut charts = vec![
        chart(0, "ttcp over the MTU: MB/s", "MB/s", &rate),
        chart(1, "processor time of both ends, us a MB", "us a MB", &cost),
    ];
    if !results.goodput.is_empty() {
        // Below the first.
        charts.insert(1, super::goodput::chart((0, 1), results));
    }
    let title = "QPIP compared with the kernel's sockets on packet links";
    page(title, &results.machine.sentence(), &charts)
}

fn lines(results: &Results, value: &dyn Fn(&Row) -> f64) -> Vec<Line> {
    const COLORS: [&str; 11] = [
        "#8a8a8a", "#444444", "#c8102e", "#e8909f", "#d07020", "#e0a060", "#6b4fa0", "#b07a10",
        "#5a8f00", "#1f6fb4", "#2f8f4e",
    ];
    let mut lines = Vec::new();
    for (contender, color) in CONTENDERS.iter().zip(COLORS) {
        let mtus = results.qpip.points(Figure::Bulk);
        let row = |mtu: &u32| results.qpip.row(contender.name, Figure::Bulk, *mtu);
        let points: Vec<_> =
            mtus.iter().filter_map(row).map(|row| (f64::from(row.mtu), value(row))).collect();
        if !points.is_empty() {
            let label = format!("{} ({})", contender.name, contender.link);
            let width = if contender.role == crate::model::Role::Quipu { 2.4 } else { 1.6 };
            lines.push(Line { style: Style { label, color, width, dashes: "" }, points });
        }
    }
    lines
}
