//! One chart with logarithmic axes, as SVG.

use std::fmt::Write as _;

use super::{digits, size};

/// A line of a chart.
pub(super) struct Line {
    pub(super) style: Style,
    /// Bytes, and the value there.
    pub(super) points: Vec<(f64, f64)>,
}

/// How a line looks, and what the legend calls it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Style {
    pub(super) label: String,
    pub(super) color: &'static str,
    pub(super) width: f64,
    pub(super) dashes: &'static str,
}

impl Style {
    /// As attributes.
    pub(super) fn stroke(&self) -> String {
        let Self { color, width, dashes, .. } = self;
        format!(r#"stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}""#)
    }
}

/// A chart: where it is on the page, and what it shows.
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) unit: &'static str,
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) lines: Vec<Line>,
}

/// Room for labels at the left of the axes and above them.
const LEFT: f64 = 52.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 24.0;
const RIGHT: f64 = 12.0;

/// Maps the logarithm of a range to a range of coordinates.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn at(&self, value: f64) -> f64 {
        let part = (value.log2() - self.low.log2()) / (self.high.log2() - self.low.log2());
        self.from + part * (self.to - self.from)
    }
}

impl Chart {
    /// The axes, or `None` if there is nothing to show.
    fn axes(&self) -> Option<(Axis, Axis)> {
        let all = || self.lines.iter().flat_map(|line| &line.points).copied();
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, 0.0_f64), |(low, high), v| (low.min(v), high.max(v)))
        };
        let (x_low, x_high) = range(&mut all().map(|(x, _)| x));
        let (y_low, y_high) = range(&mut all().map(|(_, y)| y));
        if x_high <= 0.0 || !y_low.is_finite() || y_low <= 0.0 {
            return None;
        }
        let x = Axis {
            low: x_low,
            high: x_high.max(x_low * 2.0),
            from: self.left + LEFT,
            to: self.left + self.width - RIGHT,
        };
        // Whole steps of 1, 2, 5, 10.
        let y = Axis {
            low: steps(y_low / 10.0, y_low).pop().unwrap_or(y_low),
            high: steps(y_high, y_high * 10.0).first().copied().unwrap_or(y_high * 2.0),
            from: self.top + self.height - BOTTOM,
            to: self.top + TOP,
        };
        Some((x, y))
    }

    /// Draws the chart.
    pub(super) fn draw(&self, out: &mut String) {
        let Some((x, y)) = self.axes() else { return };
        let title_x = self.left + LEFT;
        let _ = writeln!(
            out,
            r#"<text x="{title_x:.1}" y="{:.1}" class="title">{}</text>"#,
            self.top + 15.0,
            escape(&self.title)
        );
        self.grid(out, &x, &y);
        for line in &self.lines {
            let path: Vec<_> = line
                .points
                .iter()
                .map(|&(bytes, value)| format!("{:.1},{:.1}", x.at(bytes), y.at(value)))
                .collect();
            let Style { color, width, .. } = &line.style;
            let _ = writeln!(
                out,
                r#"<polyline points="{}" class="line" {}/>"#,
                path.join(" "),
                line.style.stroke()
            );
            for &(bytes, value) in &line.points {
                let (cx, cy) = (x.at(bytes), y.at(value));
                let _ = writeln!(
                    out,
                    r#"<circle cx="{cx:.1}" cy="{cy:.1}" r="{:.1}" fill="{color}">"#,
                    width + 0.4
                );
                let _ = writeln!(
                    out,
                    "<title>{}, {}: {} {}</title></circle>",
                    escape(&line.style.label),
                    size(bytes as u64),
                    digits(value),
                    self.unit
                );
            }
        }
    }

    fn grid(&self, out: &mut String, x: &Axis, y: &Axis) {
        let decades = (y.high / y.low).log10();
        for value in steps(y.low, y.high) {
            let at = y.at(value);
            let _ = writeln!(
                out,
                r#"<line x1="{:.1}" x2="{:.1}" y1="{at:.1}" y2="{at:.1}" class="grid"/>"#,
                x.from, x.to
            );
            // With many decades only their starts have room for a label.
            if decades < 2.5 || value.log10().fract().abs() < 1e-6 {
                let _ = writeln!(
                    out,
                    r#"<text x="{:.1}" y="{:.1}" class="tick" text-anchor="end">{}</text>"#,
                    x.from - 5.0,
                    at + 3.5,
                    plain(value)
                );
            }
        }
        let mut bytes = 1.0;
        while bytes <= x.high * 1.01 {
            if bytes >= x.low * 0.99 {
                let at = x.at(bytes);
                let _ = writeln!(
                    out,
                    r#"<line x1="{at:.1}" x2="{at:.1}" y1="{:.1}" y2="{:.1}" class="grid"/>"#,
                    y.from, y.to
                );
                let _ = writeln!(
                    out,
                    r#"<text x="{at:.1}" y="{:.1}" class="tick" text-anchor="middle">{}</text>"#,
                    y.from + 14.0,
                    size(bytes as u64)
                );
            }
            bytes *= 8.0;
        }
    }
}

/// The steps 1, 2 and 5 of each decade from `low` to `high`.
fn steps(low: f64, high: f64) -> Vec<f64> {
    let first = low.log10().floor() as i32;
    let last = high.log10().ceil() as i32;
    let all = (first..=last).flat_map(|decade| {
        // Divided rather than multiplied by a fraction, so that 0.2 is 0.2.
        let scale = 10_f64.powi(decade.abs());
        [1.0, 2.0, 5.0].map(|step| if decade < 0 { step / scale } else { step * scale })
    });
    all.filter(|step| (low * 0.999..=high * 1.001).contains(step)).collect()
}

/// A step without superfluous zeros.
fn plain(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Text that is safe within SVG.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_steps() {
        assert_eq!(steps(0.2, 20.0), [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!(steps(0.2, 20.0).iter().map(|v| plain(*v)).collect::<Vec<_>>()[0], "0.2");
    }

    #[test]
    fn a_chart_without_points_is_empty() {
        let chart = Chart {
            title: "a & b".into(),
            unit: "us",
            left: 0.0,
            top: 0.0,
            width: 400.0,
            height: 300.0,
            lines: Vec::new(),
        };
        let mut out = String::new();
        chart.draw(&mut out);
        assert!(out.is_empty());
    }
}
