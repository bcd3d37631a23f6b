//! The plot: latency and bandwidth over sizes, same host and TCP, as an SVG file of its own.

use std::fmt::Write as _;

use super::chart::{Chart, Line, Style, escape};
use crate::model::{Kind, Op, Path, Point, Role, Series};
use crate::results::Results;
use crate::targets::{QUIPU, QUIPU_TCP, QUIPU_UD, UDP_SOCKET};

pub(super) const WIDTH: f64 = 1000.0;
pub(super) const CHART_HEIGHT: f64 = 300.0;
pub(super) const HEAD: f64 = 34.0;
const LEGEND_LINE: f64 = 18.0;

/// Draws the whole plot.
pub(crate) fn plot(results: &Results) -> String {
    let half = WIDTH / 2.0;
    let mut charts = Vec::new();
    for (column, path) in [Path::SameHost, Path::Tcp].into_iter().enumerate() {
        for (row, kind) in [Kind::Latency, Kind::Stream].into_iter().enumerate() {
            let (what, unit) = match kind {
                Kind::Stream => ("bandwidth, GB/s", "GB/s"),
                _ => ("half round trip, us", "us"),
            };
            charts.push(Chart {
                title: format!("{path}: {what}"),
                unit,
                left: half * column as f64,
                top: HEAD + CHART_HEIGHT * row as f64,
                width: half,
                height: CHART_HEIGHT,
                lines: lines(results, path, kind),
            });
        }
    }
    let title = format!("Quipu beside floors and peers: medians of {} rounds", results.rounds);
    page(results, &title, &charts)
}

/// A page with charts, first those of the left column, and their legends below.
pub(super) fn page(results: &Results, title: &str, charts: &[Chart]) -> String {
    let half = WIDTH / 2.0;
    let (left, right) = charts.split_at(charts.len() / 2);
    let legends = [legend(left), legend(right)];
    let rows = legends.iter().map(|styles| styles.len().div_ceil(2)).max().unwrap_or(0);
    let bottom = HEAD + left.len() as f64 * CHART_HEIGHT + 8.0;
    let height = bottom + rows as f64 * LEGEND_LINE + 26.0;

    let mut out = head(height);
    let _ = writeln!(out, r#"<text x="16" y="22" class="head">{}</text>"#, escape(title));
    charts.iter().for_each(|chart| chart.draw(&mut out));
    for (column, styles) in legends.iter().enumerate() {
        draw_legend(&mut out, styles, half * column as f64 + 52.0, bottom);
    }
    let _ = writeln!(
        out,
        r#"<text x="16" y="{:.0}" class="tick">{}</text>"#,
        height - 10.0,
        escape(&results.machine.sentence())
    );
    out.push_str("</svg>\n");
    out
}

fn head(height: f64) -> String {
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0} {height:.0}"
width="{WIDTH:.0}" height="{height:.0}" font-family="Helvetica, Arial, sans-serif">
<style>.head{{font-size:15px;font-weight:bold;fill:#222}}
.title{{font-size:13px;font-weight:bold;fill:#333}}
.tick{{font-size:10.5px;fill:#555}}.label{{font-size:12px;fill:#222}}
.grid{{stroke:#e3e3e3;stroke-width:1}}.line{{fill:none;stroke-linejoin:round}}</style>
<rect width="100%" height="100%" fill="#ffffff"/>
"##
    )
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
        (Role::Quipu, Op::Send) => {
            let (_, over) = name.split_once(", ").filter(|(_, over)| *over != "perftest")?;
            Some(style(format!("{over} over Quipu"), peer_color(over), 1.8, "1 3"))
        }
        (Role::Quipu, _) => None,
        (Role::Floor, _) if *name == UDP_SOCKET => Some(style(name.clone(), "#8a8a8a", 1.6, "5 3")),
        (Role::Floor, op) => {
            let label = if op == Op::Copy { "memcpy".into() } else { name.clone() };
            Some(style(label, "#8a8a8a", 1.6, ""))
        }
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

/// The styles of some charts, each once, Quipu's first.
fn legend(charts: &[Chart]) -> Vec<Style> {
    let mut styles: Vec<Style> = Vec::new();
    for line in charts.iter().flat_map(|chart| &chart.lines) {
        if !styles.contains(&line.style) {
            styles.push(line.style.clone());
        }
    }
    styles.sort_by(|a, b| b.width.total_cmp(&a.width));
    styles
}

fn draw_legend(out: &mut String, styles: &[Style], left: f64, top: f64) {
    for (index, style) in styles.iter().enumerate() {
        let x = left + 215.0 * (index % 2) as f64;
        let y = top + LEGEND_LINE * (index / 2) as f64 + 8.0;
        let _ = writeln!(
            out,
            r#"<line x1="{x:.1}" x2="{:.1}" y1="{y:.1}" y2="{y:.1}" {}/>"#,
            x + 30.0,
            style.stroke()
        );
        let _ = writeln!(
            out,
            r#"<text x="{:.1}" y="{:.1}" class="label">{}</text>"#,
            x + 37.0,
            y + 4.0,
            escape(&style.label)
        );
    }
}
