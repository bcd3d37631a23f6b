//! Axes: values to pixels, and round marks.

/// How an axis maps values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// In proportion, from 0.
    Linear,
    /// By the logarithm.
    Log,
}

/// An axis between two pixel positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// An axis that holds `low..=high` and ends at round values.
    pub(crate) fn new(scale: Scale, low: f64, high: f64, (from, to): (f64, f64)) -> Self {
        let (low, high) = match scale {
            Scale::Linear => {
                let high = if high > 0.0 { high } else { 1.0 };
                let step = step(high);
                (0.0, (high / step - 1e-9).ceil() * step)
            }
            Scale::Log => {
                let low = if low > 0.0 && low.is_finite() { low } else { 1.0 };
                let high = if high > low { high } else { low * 2.0 };
                (low, high)
            }
        };
        Self { scale, low, high, from, to }
    }

    /// Whether the axis can show `value`.
    pub(crate) fn shows(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == Scale::Linear || value > 0.0)
    }

    /// The pixel position of `value`.
    pub(crate) fn at(&self, value: f64) -> f64 {
        let part = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        self.from + part.clamp(-0.05, 1.05) * (self.to - self.from)
    }

    /// The values to mark, at most some ten.
    pub(crate) fn marks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = step(self.high);
                (0..=(self.high / step).round() as u32).map(|n| f64::from(n) * step).collect()
            }
            Scale::Log => {
                let decades = (self.high / self.low).log10();
                let steps: &[f64] = if decades < 3.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
                let (first, last) = (self.low.log10().floor(), self.high.log10().ceil());
                let all = (first as i32..=last as i32)
                    .flat_map(|decade| steps.iter().map(move |step| step * 10_f64.powi(decade)));
                all.filter(|mark| (self.low * 0.999..=self.high * 1.001).contains(mark)).collect()
            }
        }
    }
}

/// The distance between marks of a linear axis up to `high`: 1, 2 or 5 times a power of ten.
fn step(high: f64) -> f64 {
    let scale = 10_f64.powf((high / 5.0).log10().floor());
    let unit = high / 5.0 / scale;
    scale * [1.0, 2.0, 5.0].into_iter().find(|step| unit <= *step).unwrap_or(10.0)
}

/// A number without superfluous zeros.
pub(crate) fn number(value: f64) -> String {
    let text = match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_axis_ends_at_a_round_value() {
        let axis = Axis::new(Scale::Linear, 0.0, 9.3, (0.0, 100.0));
        assert_eq!(axis.marks(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert!((axis.at(5.0) - 50.0).abs() < 1e-9);
    }

    #[test]
    fn a_logarithmic_axis_marks_decades() {
        let axis = Axis::new(Scale::Log, 4.0, 1_000_000.0, (0.0, 100.0));
        assert_eq!(axis.marks(), [10.0, 100.0, 1000.0, 10_000.0, 100_000.0, 1_000_000.0]);
        assert!(!axis.shows(0.0));
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([number(2.0), number(0.125), number(1500.4)], ["2", "0.125", "1500"]);
    }
}
