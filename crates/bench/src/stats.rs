//! Medians and what spreads around them.

/// The value below which `part` (0 to 1) of the values lie, interpolated. NaN of nothing.
#[must_use]
pub fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    if sorted.is_empty() {
        return f64::NAN;
    }
    sorted.sort_by(f64::total_cmp);
    let at = part.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (at - low as f64)
}

/// The median. NaN of nothing.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The first and third quartile.
#[must_use]
pub fn quartiles(values: &[f64]) -> [f64; 2] {
    [quantile(values, 0.25), quantile(values, 0.75)]
}

/// The median, and the first and third quartile. `None` of nothing.
#[must_use]
pub fn median_and_quartiles(values: &[f64]) -> Option<(f64, [f64; 2])> {
    let median = median(values);
    median.is_finite().then(|| (median, quartiles(values)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_interpolate_and_ignore_what_is_no_number() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[f64::NAN, 7.0]), 7.0);
        assert!(median(&[]).is_nan());
        assert_eq!(median_and_quartiles(&[1.0, 2.0, 3.0, 4.0, 5.0]), Some((3.0, [2.0, 4.0])));
        assert_eq!(median_and_quartiles(&[f64::NAN]), None);
    }
}
