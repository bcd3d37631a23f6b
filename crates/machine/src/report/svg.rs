//! Results as a figure: bandwidth, stacked cycles and misses of each run.

use quipu_figure::{Chart, HEIGHT, Kind, Shape, Values, WIDTH};

use super::Report;
use crate::ledger::Category;

/// Height of a chart with its legend.
const STEP: f64 = HEIGHT + 120.0;

/// A figure of several runs. It needs no script, no font file and no network.
#[must_use]
pub fn figure(title: &str, rows: &[(String, Report)]) -> String {
    let names: Vec<String> = rows.iter().map(|(name, _)| name.clone()).collect();
    let values = |of: &dyn Fn(&Report) -> f64| {
        Values::PerCategory(rows.iter().map(|(_, report)| Some(of(report))).collect())
    };
    let stacked = || Shape::Stacked(names.clone());
    let rates = Chart::bars(&format!("{title}: bandwidth"), "Gbit/s", stacked())
        .with("received", Kind::Ours, values(&|report| report.rx_gbps))
        .with("sent", Kind::Ours, values(&|report| report.tx_gbps));
    // Idle time on top.
    let mut cycles = Chart::bars(&format!("{title}: cycles"), "%", stacked());
    for category in Category::ALL.into_iter().rev() {
        let share = values(&|report| report.percent(category));
        cycles = cycles.with(category.name(), Kind::Ours, share);
    }
    let misses = Chart::bars(&format!("{title}: cache misses"), "misses/KB", stacked()).with(
        "cores",
        Kind::Ours,
        values(&|report| report.misses_per_kb),
    );
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{}\">\n",
        3.0 * STEP
    );
    for (index, chart) in [rates, cycles, misses].iter().enumerate() {
        let y = index as f64 * STEP;
        text.push_str(&format!("<g transform=\"translate(0 {y})\">\n{}</g>\n", chart.svg()));
    }
    text.push_str("</svg>\n");
    text
}
