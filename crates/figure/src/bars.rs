//! Grouped and stacked bars.

use crate::axis::number;
use crate::canvas::{BOTTOM, Canvas, LEFT, RIGHT};
use crate::{Chart, Series, Values};

/// The value of a series in a category, if it can be drawn.
fn value(series: &Series, category: usize) -> Option<f64> {
    let Values::PerCategory(values) = &series.values else { return None };
    values.get(category).copied().flatten().filter(|value| value.is_finite() && *value >= 0.0)
}

/// Where the categories begin, and how wide each is.
fn places(categories: &[String], canvas: &mut Canvas) -> (f64, f64) {
    let width = (RIGHT - LEFT) / categories.len().max(1) as f64;
    for (index, name) in categories.iter().enumerate() {
        let middle = LEFT + width * (index as f64 + 0.5);
        // Two lines keep long names of neighbours apart.
        let lower = if categories.len() > 5 { (index % 2) as f64 * 13.0 } else { 0.0 };
        canvas.text((middle, BOTTOM + 15.0 + lower), "middle", name);
    }
    canvas.line((LEFT, BOTTOM), (RIGHT, BOTTOM), "#555");
    (LEFT, width)
}

pub(crate) fn grouped(chart: &Chart, categories: &[String], canvas: &mut Canvas) {
    let all = || (0..categories.len()).flat_map(|c| chart.series.iter().map(move |s| value(s, c)));
    let axis = chart.y_axis(0.0, all().flatten().fold(0.0, f64::max));
    canvas.y_axis(&axis, &chart.y);
    let (left, width) = places(categories, canvas);
    let bar = width * 0.8 / chart.series.len().max(1) as f64;
    for (c, category) in categories.iter().enumerate() {
        for (s, series) in chart.series.iter().enumerate() {
            let Some(value) = value(series, c) else { continue };
            let x = left + width * (c as f64 + 0.1) + bar * s as f64;
            let hint = format!("{}, {category}: {}", series.name, number(value));
            canvas.bar((x, bar * 0.92), (BOTTOM, axis.at(value)), (s, series.kind), &hint);
        }
    }
}

pub(crate) fn stacked(chart: &Chart, categories: &[String], canvas: &mut Canvas) {
    let sum = |c| chart.series.iter().filter_map(|series| value(series, c)).sum::<f64>();
    let axis = chart.y_axis(0.0, (0..categories.len()).map(sum).fold(0.0, f64::max));
    canvas.y_axis(&axis, &chart.y);
    let (left, width) = places(categories, canvas);
    for (c, category) in categories.iter().enumerate() {
        let mut base = 0.0;
        for (s, series) in chart.series.iter().enumerate() {
            let Some(value) = value(series, c) else { continue };
            let x = left + width * (c as f64 + 0.2);
            let ends = (axis.at(base), axis.at(base + value));
            let hint = format!("{}, {category}: {}", series.name, number(value));
            canvas.bar((x, width * 0.6), ends, (s, series.kind), &hint);
            base += value;
        }
    }
}
