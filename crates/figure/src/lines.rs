//! Lines over an x axis.

use crate::axis::{Axis, Scale, number};
use crate::canvas::{BOTTOM, Canvas, LEFT, RIGHT};
use crate::{Chart, Series, Values};

fn points(series: &Series) -> &[(f64, f64)] {
    match &series.values {
        Values::Points(points) => points,
        Values::PerCategory(_) => &[],
    }
}

/// The smallest and the largest of some values that are finite and, on a logarithmic axis, positive.
fn range(values: impl Iterator<Item = f64>, scale: Scale) -> (f64, f64) {
    values
        .filter(|value| value.is_finite() && (scale == Scale::Linear || *value > 0.0))
        .fold((f64::INFINITY, 0.0), |(low, high), value| (low.min(value), high.max(value)))
}

pub(crate) fn draw(chart: &Chart, title: &str, scale: Scale, canvas: &mut Canvas) {
    let all = || chart.series.iter().flat_map(points).copied();
    let (low, high) = range(all().map(|(x, _)| x), scale);
    let x_axis = Axis::new(scale, low, high, (LEFT, RIGHT));
    let (low, high) = range(all().map(|(_, y)| y), chart.scale);
    let y_axis = chart.y_axis(low, high);
    canvas.y_axis(&y_axis, &chart.y);
    canvas.x_axis(&x_axis, title);
    canvas.line((LEFT, BOTTOM), (RIGHT, BOTTOM), "#555");
    for (index, series) in chart.series.iter().enumerate() {
        let drawn: Vec<_> = points(series)
            .iter()
            .filter(|(x, y)| x_axis.shows(*x) && y_axis.shows(*y))
            .map(|&(x, y)| {
                let hint = format!("{}, {}: {}", series.name, number(x), number(y));
                ((x_axis.at(x), y_axis.at(y)), hint)
            })
            .collect();
        canvas.polyline(&drawn, (index, series.kind));
    }
}
