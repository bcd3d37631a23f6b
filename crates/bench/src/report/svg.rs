//! The plot: latency and bandwidth over sizes, same host and TCP, as an SVG file of its own.

use crate::model::{Kind, Op, Path, Point, Role, Series};
use crate::plot::{Chart, Line, Style, Unit, page};
use crate::results::Results;
use crate::targets::{QUIPU, QUIPU_TCP, QUIPU_TCP_CRC, QUIPU_UD, UDP_SOCKET};

/// Draws the whole plot.
pub(crate) fn plot(results: &Results) -> String {
    let mut charts = Vec::new();
    for (column, path) in [Path::SameHost, Path::Tcp].into_iter().enumerate() {
        for (row, kind) in [Kind::Latency, Kind::Stream].into_iter().enumerate() {
            let (what, unit) = match kind {
                Kind::Stream => ("bandwidth, GB/s", "GB/s"),
                _ => ("half round trip, us", "us"),
            };
            let title = format!("{path}: {what}");
            let lines = lines(results, path, kind);
            charts.push(Chart::new((column, row), title, [Unit::Bytes, Unit::Of(unit)], lines));
        }
    }
    let title =
        format!("Quipu compared with floors and peers: medians of {} rounds", results.rounds);
    page(&title, &results.machine.sentence(), &charts)
}

fn lines(results: &Results, path: Path, kind: Kind) -> Vec<Line> {
    let value: fn(&Point) -> f64 = match kind {
        Kind::Stream => |point| point.bytes_per_s / 1e9,
        _ => |point| point.median_ns / 1e3,
    };
    let mut lines = Vec::new();
    // Datagrams are drawn beside what else crosses the loopback interface.
    let shown = |of: Path| of == path || (of == Path::Udp && path == Path::Tcp);
    for series in results.series.iter().filter(|s| shown(s.path) && s.test.kind == kind) {
        if let Some(style) = style(series) {
            let points = series.points.iter().map(|(&size, point)| (size as f64, value(point)));
            lines.push(Line { style, points: points.collect() });
        }
    }
    // Quipu is drawn last, on top.
    lines.sort_by(|a, b| a.style.width.total_cmp(&b.style.width));
    lines
}

/// How a series is drawn. Of peers only what is sent both ways is, or nobody could read the plot;
/// lines of a single point are left to the table.
fn style(series: &Series) -> Option<Style> {
    if series.points.len() < 2 {
        return None;
    }
    let name = &series.contender;
    let style = |label: String, color, width, dashes| Style { label, color, width, dashes };
    let own = *name == QUIPU || *name == QUIPU_TCP;
    match (series.role, series.test.op) {
        (Role::Quipu, op) if own => match op {
            Op::Send => Some(style("Quipu send".into(), "#c8102e", 2.6, "")),
            Op::Write => Some(style("Quipu write".into(), "#c8102e", 2.2, "7 3")),
            // Not half a round trip.
            Op::Read if series.test.kind == Kind::Stream => {
                Some(style("Quipu read".into(), "#c8102e", 2.0, "2 3"))
            }
            _ => None,
        },
        (Role::Quipu, Op::Send) if *name == QUIPU_UD => {
            Some(style("Quipu send, datagrams".into(), "#e8909f", 2.0, ""))
        }
        // What runs over Quipu, in the color of what it is beside.
        (Role::Quipu, Op::Send) if *name != QUIPU_TCP_CRC => {
            let (_, over) = name.split_once(", ").filter(|(_, over)| *over != "perftest")?;
            Some(style(format!("{over} over Quipu"), peer_color(over), 1.8, "1 3"))
        }
        (Role::Quipu, _) => None,
        (Role::Floor, _) if *name == UDP_SOCKET => Some(style(name.clone(), "#8a8a8a", 1.6, "5 3")),
        (Role::Floor, Op::Copy) => Some(style("memcpy".into(), "#8a8a8a", 1.6, "")),
        (Role::Floor, Op::Send) => Some(style(name.clone(), "#8a8a8a", 1.6, "")),
        // One system call, not half of anything.
        (Role::Floor, op @ (Op::Write | Op::Read)) if series.test.kind == Kind::Stream => {
            let dashes = if op == Op::Read { "2 3" } else { "7 3" };
            Some(style(format!("{name}, {op}"), "#8a8a8a", 1.6, dashes))
        }
        (Role::Floor, Op::Write) if name == "memory" => {
            Some(style(name.clone(), "#8a8a8a", 1.6, ""))
        }
        (Role::Floor, _) => None,
        (Role::Peer, Op::Send) => Some(style(name.clone(), peer_color(name), 1.5, "")),
        (Role::Peer, Op::Write) => {
            Some(style(format!("{name}, put"), peer_color(name), 1.3, "5 3"))
        }
        (Role::Peer, _) => None,
    }
}

fn peer_color(name: &str) -> &'static str {
    match name.split_whitespace().next() {
        Some("UCX") => "#1f6fb4",
        Some("Open") => "#2f8f4e",
        Some("libfabric") => "#b07a10",
        _ => "#6b4fa0",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Test;

    #[test]
    fn lines_of_a_chart_can_be_told_apart() {
        let series = |kind, op| Series {
            contender: "process_vm".into(),
            role: Role::Floor,
            path: Path::SameHost,
            test: Test { kind, op },
            line_ns: None,
            points: [8, 64].map(|size| (size, Point::default())).into(),
        };
        let [write, read] = [Op::Write, Op::Read].map(|op| style(&series(Kind::Stream, op)));
        assert!(write.is_some() && read.is_some() && write != read);
        // A system call, and a read from posting to completion, are no halves of round trips.
        assert_eq!([Op::Write, Op::Read].map(|op| style(&series(Kind::Latency, op))), [None, None]);
    }
}
