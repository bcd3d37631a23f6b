//! Charts as SVG: grouped and stacked bars, lines with linear or logarithmic axes.
//!
//! A [`Chart`] is a value; [`Chart::svg`] draws it as a picture of its own that needs no script, no font
//! file and no network. The same chart always gives the same text, so pictures can be compared.
//!
//! This crate knows no measurement: the caller brings names, units and numbers.

#![forbid(unsafe_code)]

mod axis;
mod bars;
mod canvas;
mod lines;

pub use axis::Scale;

use axis::Axis;
use canvas::Canvas;

/// Width of a chart, in pixels.
pub const WIDTH: f64 = 760.0;
/// Height of a chart without its legend, in pixels.
pub const HEIGHT: f64 = 340.0;

/// What a series is: the papers' published values are drawn paler than measured ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Measured or simulated here.
    Ours,
    /// Published by others.
    Published,
}

/// One series: a colour and an entry of the legend.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Whether it was measured here or published.
    pub kind: Kind,
    /// Its values; see [`Shape`].
    pub values: Values,
}

/// The values of a series.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// One value for each category of the chart; `None` draws nothing.
    PerCategory(Vec<Option<f64>>),
    /// Points (x, y), in ascending order of x.
    Points(Vec<(f64, f64)>),
}

/// How series are drawn.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// For each category, the bars of all series next to each other.
    Grouped(Vec<String>),
    /// For each category, the bars of all series on top of each other.
    Stacked(Vec<String>),
    /// Lines over an x axis with a title and a scale.
    Lines {
        /// Title and unit of the x axis.
        x: String,
        /// Its scale.
        scale: Scale,
    },
}

/// A chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// Its title.
    pub title: String,
    /// Title and unit of the y axis.
    pub y: String,
    /// Scale of the y axis. Bars always use [`Scale::Linear`].
    pub scale: Scale,
    /// How series are drawn.
    pub shape: Shape,
    /// The series, in the order of the legend.
    pub series: Vec<Series>,
}

impl Chart {
    /// A chart of bars with a linear y axis.
    #[must_use]
    pub fn bars(title: &str, y: &str, shape: Shape) -> Self {
        let (title, y) = (title.to_owned(), y.to_owned());
        Self { title, y, scale: Scale::Linear, shape, series: Vec::new() }
    }

    /// A chart of lines.
    #[must_use]
    pub fn lines(title: &str, (x, x_scale): (&str, Scale), (y, y_scale): (&str, Scale)) -> Self {
        let shape = Shape::Lines { x: x.to_owned(), scale: x_scale };
        let (title, y) = (title.to_owned(), y.to_owned());
        Self { title, y, scale: y_scale, shape, series: Vec::new() }
    }

    /// Adds a series.
    #[must_use]
    pub fn with(mut self, name: &str, kind: Kind, values: Values) -> Self {
        self.series.push(Series { name: name.to_owned(), kind, values });
        self
    }

    /// The chart as an SVG document. It leaves out values that are not finite, and on a logarithmic axis
    /// values that are not positive.
    #[must_use]
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new(&self.title, self.series.len());
        match &self.shape {
            Shape::Grouped(categories) => bars::grouped(self, categories, &mut canvas),
            Shape::Stacked(categories) => bars::stacked(self, categories, &mut canvas),
            Shape::Lines { x, scale } => lines::draw(self, x, *scale, &mut canvas),
        }
        canvas.legend(self.series.iter().map(|series| (series.name.as_str(), series.kind)));
        canvas.finish()
    }

    /// The value axis for values up to `high`, from 0 if it is linear.
    fn y_axis(&self, low: f64, high: f64) -> Axis {
        Axis::new(self.scale, low, high, (canvas::BOTTOM, canvas::TOP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_bars(shape: fn(Vec<String>) -> Shape) -> Chart {
        Chart::bars("a < b", "Gbit/s", shape(vec!["x".into(), "y".into()]))
            .with("ours", Kind::Ours, Values::PerCategory(vec![Some(2.0), Some(4.0)]))
            .with("paper", Kind::Published, Values::PerCategory(vec![Some(1.0), None]))
    }

    #[test]
    fn grouped_bars_have_one_rectangle_per_value() {
        let svg = two_bars(Shape::Grouped).svg();
        assert_eq!(svg.matches("<title>").count(), 3, "{svg}");
        assert!(svg.contains("a &lt; b") && svg.contains("ours, y: 4"));
    }

    #[test]
    fn stacked_bars_reach_the_sum() {
        let grouped = two_bars(Shape::Grouped).svg();
        let stacked = two_bars(Shape::Stacked).svg();
        assert_ne!(grouped, stacked);
        assert_eq!(stacked.matches("<title>").count(), 3);
    }

    #[test]
    fn lines_leave_out_what_cannot_be_drawn() {
        let points = vec![(1.0, 1.0), (2.0, f64::NAN), (4.0, -1.0), (8.0, 10.0)];
        let svg = Chart::lines("t", ("bytes", Scale::Log), ("us", Scale::Log))
            .with("a", Kind::Ours, Values::Points(points))
            .svg();
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
    }

    #[test]
    fn an_empty_chart_is_a_legal_picture() {
        let svg = Chart::lines("t", ("x", Scale::Linear), ("y", Scale::Log)).svg();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    }
}
