//! The picture: frame, text, legend.

use std::fmt::Write as _;

use crate::axis::{Axis, number};
use crate::{HEIGHT, Kind, WIDTH};

pub(crate) const LEFT: f64 = 64.0;
pub(crate) const RIGHT: f64 = WIDTH - 16.0;
pub(crate) const TOP: f64 = 40.0;
pub(crate) const BOTTOM: f64 = HEIGHT - 56.0;
const LEGEND_LINE: f64 = 18.0;
const LEGEND_COLUMNS: usize = 3;

/// Colours that can be told apart also by readers who see few colours.
const COLORS: [&str; 9] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#555555",
    "#9467bd",
];

/// Fill and outline of the series with this index.
pub(crate) fn colors(index: usize, kind: Kind) -> (&'static str, &'static str, &'static str) {
    let color = COLORS[index % COLORS.len()];
    match kind {
        Kind::Ours => (color, "1", "none"),
        Kind::Published => (color, "0.35", color),
    }
}

/// Text that is safe within SVG and HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A picture that is being drawn.
pub(crate) struct Canvas {
    out: String,
}

impl Canvas {
    pub(crate) fn new(title: &str, series: usize) -> Self {
        let height = HEIGHT + series.div_ceil(LEGEND_COLUMNS) as f64 * LEGEND_LINE;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" \
             width=\"{WIDTH:.0}\" height=\"{height:.0}\" font-family=\"Helvetica, Arial, sans-serif\" \
             font-size=\"11\" fill=\"#333\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
        );
        let _ = writeln!(
            out,
            "<text x=\"{LEFT}\" y=\"20\" font-size=\"14\" font-weight=\"bold\">{}</text>",
            escape(title)
        );
        Self { out }
    }

    /// The y axis with its marks and title.
    pub(crate) fn y_axis(&mut self, axis: &Axis, title: &str) {
        for mark in axis.marks() {
            let y = axis.at(mark);
            self.line((LEFT, y), (RIGHT, y), "#e3e3e3");
            self.text((LEFT - 6.0, y + 4.0), "end", &number(mark));
        }
        self.text((LEFT - 50.0, TOP - 8.0), "start", title);
    }

    /// The x axis of a chart of lines.
    pub(crate) fn x_axis(&mut self, axis: &Axis, title: &str) {
        for mark in axis.marks() {
            let x = axis.at(mark);
            self.line((x, BOTTOM), (x, TOP), "#e3e3e3");
            self.text((x, BOTTOM + 15.0), "middle", &number(mark));
        }
        self.text(((LEFT + RIGHT) / 2.0, BOTTOM + 32.0), "middle", title);
    }

    pub(crate) fn text(&mut self, (x, y): (f64, f64), anchor: &str, text: &str) {
        let _ = writeln!(
            self.out,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
            escape(text)
        );
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), color: &str) {
        let _ = writeln!(
            self.out,
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{color}\"/>",
            from.0, from.1, to.0, to.1
        );
    }

    /// A bar from `base` up to `top`, with a text that appears on hovering.
    pub(crate) fn bar(
        &mut self,
        (x, width): (f64, f64),
        (base, top): (f64, f64),
        (index, kind): (usize, Kind),
        hint: &str,
    ) {
        let (fill, opacity, stroke) = colors(index, kind);
        let _ = writeln!(
            self.out,
            "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{fill}\" \
             fill-opacity=\"{opacity}\" stroke=\"{stroke}\"><title>{}</title></rect>",
            (base - top).max(0.0),
            escape(hint)
        );
    }

    /// A line through points, each with a text that appears on hovering.
    pub(crate) fn polyline(
        &mut self,
        points: &[((f64, f64), String)],
        (index, kind): (usize, Kind),
    ) {
        let (color, _, _) = colors(index, kind);
        let dashes = if kind == Kind::Published { "5 4" } else { "none" };
        let path: Vec<_> = points.iter().map(|((x, y), _)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            self.out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" \
             stroke-dasharray=\"{dashes}\"/>",
            path.join(" ")
        );
        for ((x, y), hint) in points {
            let _ = writeln!(
                self.out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"><title>{}</title></circle>",
                escape(hint)
            );
        }
    }

    pub(crate) fn legend<'a>(&mut self, series: impl Iterator<Item = (&'a str, Kind)>) {
        let column = (RIGHT - LEFT) / LEGEND_COLUMNS as f64;
        for (index, (name, kind)) in series.enumerate() {
            let x = LEFT + column * (index % LEGEND_COLUMNS) as f64;
            let y = HEIGHT + LEGEND_LINE * (index / LEGEND_COLUMNS) as f64 - 8.0;
            let (fill, opacity, stroke) = colors(index, kind);
            let _ = writeln!(
                self.out,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"12\" height=\"10\" fill=\"{fill}\" \
                 fill-opacity=\"{opacity}\" stroke=\"{stroke}\"/>",
                y - 9.0
            );
            self.text((x + 18.0, y), "start", name);
        }
    }

    pub(crate) fn finish(mut self) -> String {
        self.out.push_str("</svg>\n");
        self.out
    }
}
