//! One chart with logarithmic axes, as SVG.

use std::fmt::Write as _;

use super::{CHART_HEIGHT, HEAD, WIDTH};
use crate::report::{digits, size};

/// A line of a chart.
#[derive(Clone, Debug)]
pub struct Line {
    /// How it looks.
    pub style: Style,
    /// What is at the foot of the chart, and the value there, both more than 0.
    pub points: Vec<(f64, f64)>,
}

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown with the largest unit that leaves a whole number.
    Bytes,
    /// Anything else.
    Of(&'static str),
}

impl Unit {
    fn text(self, value: f64) -> String {
        match self {
            Self::Bytes => size(value as u64),
            Self::Of(unit) => format!("{} {unit}", digits(value)),
        }
    }

    /// Where the foot of a chart is marked.
    fn marks(self, low: f64, high: f64) -> Vec<f64> {
        match self {
            Self::Bytes => {
                let all = std::iter::successors(Some(1.0), |mark: &f64| Some(mark * 8.0));
                all.skip_while(|mark| *mark < low * 0.99)
                    .take_while(|mark| *mark <= high * 1.01)
                    .collect()
            }
            Self::Of(_) => steps(low, high),
        }
    }
}

/// How a line looks, and what the legend calls it.
#[derive(Clone, Debug, PartialEq)]
pub struct Style {
    /// What the legend says.
    pub label: String,
    /// As CSS has it.
    pub color: &'static str,
    /// Of the line, in pixels.
    pub width: f64,
    /// Lengths of dashes and gaps (`stroke-dasharray`); empty for none.
    pub dashes: &'static str,
}

impl Style {
    /// As attributes.
    pub(crate) fn stroke(&self) -> String {
        let Self { color, width, dashes, .. } = self;
        format!(r#"stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}""#)
    }
}

/// A chart: where it is on the page, and what it shows.
#[derive(Clone, Debug)]
pub struct Chart {
    title: String,
    /// Of its foot, and of its values.
    units: [Unit; 2],
    left: f64,
    top: f64,
    width: f64,
    height: f64,
    lines: Vec<Line>,
}

/// Room for labels at the left of the axes and above them.
const LEFT: f64 = 52.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 24.0;
const RIGHT: f64 = 12.0;

/// So many marks have room for their labels wherever they are.
const FEW: usize = 4;

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
    /// A chart in a column (0 or 1) and a row of the page, with the units of what is at its foot and of its
    /// values.
    #[must_use]
    pub fn new(place: (usize, usize), title: String, units: [Unit; 2], lines: Vec<Line>) -> Self {
        let (width, height) = (WIDTH / 2.0, CHART_HEIGHT);
        let (left, top) = (width * place.0 as f64, HEAD + height * place.1 as f64);
        Self { title, units, left, top, width, height, lines }
    }

    /// Its lines.
    pub(crate) fn lines(&self) -> &[Line] {
        &self.lines
    }

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
    pub(crate) fn draw(&self, out: &mut String) {
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
                .map(|&(at, value)| format!("{:.1},{:.1}", x.at(at), y.at(value)))
                .collect();
            let Style { color, width, .. } = &line.style;
            let _ = writeln!(
                out,
                r#"<polyline points="{}" class="line" {}/>"#,
                path.join(" "),
                line.style.stroke()
            );
            for &(at, value) in &line.points {
                let (cx, cy) = (x.at(at), y.at(value));
                let _ = writeln!(
                    out,
                    r#"<circle cx="{cx:.1}" cy="{cy:.1}" r="{:.1}" fill="{color}">"#,
                    width + 0.4
                );
                let _ = writeln!(
                    out,
                    "<title>{}, {}: {}</title></circle>",
                    escape(&line.style.label),
                    self.units[0].text(at),
                    self.units[1].text(value),
                );
            }
        }
    }

    /// Where the foot is marked: where there are points, if that is in few places.
    fn marks(&self, x: &Axis) -> Vec<f64> {
        let mut all: Vec<_> =
            self.lines.iter().flat_map(|line| &line.points).map(|p| p.0).collect();
        all.sort_by(f64::total_cmp);
        all.dedup();
        if all.len() <= FEW { all } else { self.units[0].marks(x.low, x.high) }
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
        for mark in self.marks(x) {
            let at = x.at(mark);
            let _ = writeln!(
                out,
                r#"<line x1="{at:.1}" x2="{at:.1}" y1="{:.1}" y2="{:.1}" class="grid"/>"#,
                y.from, y.to
            );
            let label = match self.units[0] {
                Unit::Bytes => size(mark as u64),
                Unit::Of(_) => plain(mark),
            };
            let _ = writeln!(
                out,
                r#"<text x="{at:.1}" y="{:.1}" class="tick" text-anchor="middle">{label}</text>"#,
                y.from + 14.0,
            );
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
pub(crate) fn escape(text: &str) -> String {
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
    fn the_foot_is_marked_in_its_unit() {
        assert_eq!(Unit::Bytes.marks(2.0, 100.0), [8.0, 64.0]);
        assert_eq!(Unit::Of("ms").marks(1.0, 10.0), [1.0, 2.0, 5.0, 10.0]);
        assert_eq!(
            (Unit::Bytes.text(2048.0), Unit::Of("ms").text(2.5)),
            ("2 KB".into(), "2.50 ms".into())
        );
    }

    #[test]
    fn few_places_are_marked_as_they_are() {
        let chart = |places: &[f64]| {
            let style = Style { label: "a".into(), color: "#000000", width: 1.0, dashes: "" };
            let points = places.iter().map(|&at| (at, 1.0)).collect();
            let units = [Unit::Bytes, Unit::Of("MB/s")];
            let chart = Chart::new((0, 0), "t".into(), units, vec![Line { style, points }]);
            let mut out = String::new();
            chart.draw(&mut out);
            out
        };
        let mtus = chart(&[1500.0, 9000.0, 16384.0]);
        assert!(["1500 B", "9000 B", "16 KB"].iter().all(|mtu| mtus.contains(&format!(">{mtu}<"))));
        assert!(!mtus.contains(">4 KB<"), "{mtus}");
        assert!(chart(&[1500.0]).contains(">1500 B<"));
        assert!(chart(&[1.0, 16.0, 64.0, 256.0, 4096.0]).contains(">512 B<"));
    }

    #[test]
    fn a_chart_without_points_is_empty() {
        let chart = Chart::new((0, 0), "a & b".into(), [Unit::Bytes, Unit::Of("us")], Vec::new());
        let mut out = String::new();
        chart.draw(&mut out);
        assert!(out.is_empty());
    }
}
