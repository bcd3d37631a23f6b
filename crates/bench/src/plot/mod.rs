//! Plots: pages of charts with logarithmic axes, as SVG files of their own.

mod chart;

use std::fmt::Write as _;

use chart::escape;
pub use chart::{Chart, Line, Style, Unit};

const WIDTH: f64 = 1000.0;
const CHART_HEIGHT: f64 = 300.0;
const HEAD: f64 = 34.0;
const LEGEND_LINE: f64 = 18.0;

/// A page with charts, first those of the left column, which are as many as in the right one or one more;
/// their legends below, and at the foot a sentence about what is shown.
#[must_use]
pub fn page(title: &str, foot: &str, charts: &[Chart]) -> String {
    let half = WIDTH / 2.0;
    let (left, right) = charts.split_at(charts.len().div_ceil(2));
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
        escape(foot)
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

/// The styles of some charts, each once, the widest first.
fn legend(charts: &[Chart]) -> Vec<Style> {
    let mut styles: Vec<Style> = Vec::new();
    for line in charts.iter().flat_map(Chart::lines) {
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
