//! Goodput over a lossy, long path: table and chart.

use std::fmt::Write as _;

use super::table::aligned;
use super::{digits, size};
use crate::model::Role;
use crate::plot::{Chart, Line, Style, Unit};
use crate::qpip::{Goodput, Sender};
use crate::results::Results;

/// What the legend calls the kernel and QPIP, and their colors.
const LOOKS: [(&str, &str); 2] = [("kernel CUBIC", "#8a8a8a"), ("QPIP", "#c8102e")];
/// Dashes of lines of other round trips or windows, in turn.
const DASHES: [&str; 4] = ["", "7 3", "2 3", "9 3 2 3"];

/// A line for each sender.
pub(crate) fn list() -> String {
    let mut out = String::new();
    let line = |sender: Sender| [sender.name(), "TAP", "goodput"].map(str::to_owned).to_vec();
    aligned(&mut out, &Sender::ALL.map(line), false);
    out
}

/// A line for each path.
pub(super) fn table(out: &mut String, results: &Results) {
    let Some(plan) = results.plan.goodput.as_ref().filter(|_| !results.goodput.is_empty()) else {
        return;
    };
    let _ = writeln!(
        out,
        "Goodput over a lossy path to a socket: KB/s of a connection, of {} at once; medians of {} rounds of {} s",
        plan.connections, plan.rounds, plan.seconds
    );
    let head = [
        "lost %",
        "round trip, ms",
        "window",
        "kernel CUBIC",
        "quartiles",
        "QPIP",
        "quartiles",
        "ratio",
        "quartiles",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for Goodput { path, median, quartiles, ratio, .. } in &results.goodput {
        let window = size(path.window.into());
        let mut line = vec![path.loss_percent.to_string(), path.rtt_ms.to_string(), window];
        let spread = |[low, high]: [f64; 2]| format!("{} to {}", digits(low), digits(high));
        for (median, quartiles) in median.iter().zip(quartiles) {
            line.extend([digits(median / 1e3), spread(quartiles.map(|value| value / 1e3))]);
        }
        let [ratio, of] = ratio.map_or(["-", "-"].map(str::to_owned), |ratio| {
            [digits(ratio.speed), spread(ratio.spread)]
        });
        line.extend([ratio, of]);
        lines.push(line);
    }
    aligned(out, &lines, true);
    out.push('\n');
}

/// Goodput over loss, a line for each sender, round trip and window.
pub(super) fn chart(place: (usize, usize), results: &Results) -> Chart {
    let mut kinds: Vec<(f64, u32)> = Vec::new();
    for path in results.goodput.iter().map(|it| it.path) {
        if !kinds.contains(&(path.rtt_ms, path.window)) {
            kinds.push((path.rtt_ms, path.window));
        }
    }
    let mut lines = Vec::new();
    for (&(rtt_ms, window), dashes) in kinds.iter().zip(DASHES.into_iter().cycle()) {
        let of = |it: &&Goodput| (it.path.rtt_ms, it.path.window) == (rtt_ms, window);
        for ((which, sender), (name, color)) in Sender::ALL.into_iter().enumerate().zip(LOOKS) {
            // The axis is logarithmic: a path without loss has no place on it.
            let shown = |it: &&Goodput| it.path.loss_percent > 0.0 && it.median[which] > 0.0;
            let point = |it: &Goodput| (it.path.loss_percent, it.median[which] / 1e3);
            let of = results.goodput.iter().filter(of);
            let points: Vec<_> = of.filter(shown).map(point).collect();
            if points.is_empty() {
                continue;
            }
            let label = format!("{name}, {rtt_ms} ms, {}", size(window.into()));
            let width = if sender.role() == Role::Quipu { 2.4 } else { 1.6 };
            lines.push(Line { style: Style { label, color, width, dashes }, points });
        }
    }
    let units = [Unit::Of("%"), Unit::Of("KB/s")];
    Chart::new(place, "goodput over packets lost, %: KB/s".to_owned(), units, lines)
}
