//! Results as a figure: bandwidth, stacked cycles and misses of each run.

use std::fmt::Write;

use super::Report;
use crate::ledger::Category;

const BAR: f64 = 44.0;
const GAP: f64 = 28.0;
const LEFT: f64 = 64.0;
const PANEL: f64 = 220.0;
const TOP: f64 = 34.0;
/// Room for the names of the runs.
const NAMES: f64 = 130.0;

/// Colours that people with colour blindness can tell apart (Okabe and Ito), and greys.
fn colour(category: Category) -> &'static str {
    match category {
        Category::Idle => "#eeeeee",
        Category::User => "#009e73",
        Category::Syscall => "#56b4e9",
        Category::Copy => "#d55e00",
        Category::Buffer => "#f0e442",
        Category::Stack => "#0072b2",
        Category::Driver => "#e69f00",
        Category::Interrupt => "#cc79a7",
        Category::Fs => "#999999",
        Category::Other => "#555555",
    }
}

/// The parts of a bar, from below: heights and colours.
type Parts = Vec<(f64, &'static str)>;

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// One panel: axis, title, and the bars that `parts` gives for each run as heights with colours.
fn panel(text: &mut String, top: f64, width: f64, title: &str, most: f64, bars: &[Parts]) {
    let _ = writeln!(
        text,
        "<text x=\"{LEFT}\" y=\"{}\" font-weight=\"bold\">{title}</text>",
        top - 10.0
    );
    for step in 0..=4 {
        let value = most * f64::from(step) / 4.0;
        let y = top + PANEL - PANEL * f64::from(step) / 4.0;
        let _ = writeln!(
            text,
            "<line x1=\"{LEFT}\" x2=\"{width}\" y1=\"{y}\" y2=\"{y}\" stroke=\"#ddd\"/>"
        );
        let _ = writeln!(
            text,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{value:.1}</text>",
            LEFT - 6.0,
            y + 4.0
        );
    }
    for (index, parts) in bars.iter().enumerate() {
        let x = LEFT + GAP / 2.0 + index as f64 * (BAR + GAP);
        let mut y = top + PANEL;
        for (value, colour) in parts {
            let height = PANEL * value / most.max(1e-9);
            y -= height;
            let _ = writeln!(
                text,
                "<rect x=\"{x}\" y=\"{y:.1}\" width=\"{BAR}\" height=\"{height:.1}\" \
                 fill=\"{colour}\" stroke=\"#333\" stroke-width=\"0.5\"/>"
            );
        }
        let sum: f64 = parts.iter().map(|(value, _)| value).sum();
        let _ = writeln!(
            text,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"middle\">{sum:.1}</text>",
            x + BAR / 2.0,
            y - 3.0
        );
    }
}

/// A figure of several runs. It needs nothing but itself.
#[must_use]
pub fn figure(title: &str, rows: &[(String, Report)]) -> String {
    let width = LEFT + rows.len().max(4) as f64 * (BAR + GAP) + 10.0;
    let tops = [TOP + 30.0, TOP + 30.0 + PANEL + 60.0, TOP + 30.0 + 2.0 * (PANEL + 60.0)];
    let height = tops[2] + PANEL + NAMES + 50.0;
    let mut text = String::new();
    let _ = writeln!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    );
    let _ = writeln!(text, "<text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{}</text>", escape(title));
    let bars = |parts: &dyn Fn(&Report) -> Parts| -> Vec<Parts> {
        rows.iter().map(|(_, report)| parts(report)).collect()
    };
    let most = |of: &dyn Fn(&Report) -> f64| {
        rows.iter().map(|(_, report)| of(report)).fold(0.0, f64::max).max(0.1).ceil()
    };
    let rates = bars(&|report| vec![(report.rx_gbps, "#0072b2"), (report.tx_gbps, "#56b4e9")]);
    panel(&mut text, tops[0], width, "Gbit/s (received, sent)", most(&|it| it.gbps), &rates);
    let cycles = bars(&|report| {
        // Idle time on top.
        let order = report.cpu.iter().rev();
        order.map(|share| (share.percent, colour(share.category))).collect()
    });
    panel(&mut text, tops[1], width, "cycles (%)", 100.0, &cycles);
    let misses = bars(&|report| vec![(report.misses_per_kb, "#d55e00")]);
    panel(&mut text, tops[2], width, "misses/KB", most(&|it| it.misses_per_kb), &misses);
    for (index, (name, _)) in rows.iter().enumerate() {
        let x = LEFT + GAP / 2.0 + index as f64 * (BAR + GAP) + BAR / 2.0;
        let y = tops[2] + PANEL + 14.0;
        let name = escape(name);
        let _ = writeln!(
            text,
            "<text x=\"{x}\" y=\"{y}\" transform=\"rotate(40 {x} {y})\">{name}</text>"
        );
    }
    for (index, category) in Category::ALL.iter().enumerate() {
        let x = LEFT + (index % 5) as f64 * 90.0;
        let y = height - 34.0 + (index / 5) as f64 * 16.0;
        let _ = writeln!(
            text,
            "<rect x=\"{x}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{}\" stroke=\"#333\"/>\
             <text x=\"{}\" y=\"{y}\">{}</text>",
            y - 9.0,
            colour(*category),
            x + 14.0,
            category.name()
        );
    }
    text.push_str("</svg>\n");
    text
}
