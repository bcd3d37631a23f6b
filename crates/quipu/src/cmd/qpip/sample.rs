//! Many measurements of one thing: percentiles, and a picture for people.

use std::fmt::Write as _;

/// Measurements in nanoseconds, sorted.
#[derive(Debug)]
pub(super) struct Samples(Vec<u64>);

/// Widest bar of the picture.
const BAR: usize = 50;

impl Samples {
    pub(super) fn new(mut samples: Vec<u64>) -> Self {
        samples.sort_unstable();
        Self(samples)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The one below which so many of 10000 lie (nearest rank); 0 without any.
    pub(super) fn percentile(&self, of_10000: usize) -> u64 {
        let rank = (self.0.len() * of_10000).div_ceil(10_000).max(1);
        self.0.get(rank - 1).copied().unwrap_or(0)
    }

    pub(super) fn mean(&self) -> f64 {
        let sum: u128 = self.0.iter().map(|&sample| u128::from(sample)).sum();
        sum as f64 / self.0.len().max(1) as f64
    }

    /// How many lie between each two powers of two, from the first that has any to the last: the lower end,
    /// the number.
    pub(super) fn buckets(&self) -> Vec<(u64, usize)> {
        let of = |sample: u64| sample.max(1).ilog2();
        let (Some(&first), Some(&last)) = (self.0.first(), self.0.last()) else {
            return Vec::new();
        };
        let count = |power| self.0.iter().filter(|&&sample| of(sample) == power).count();
        (of(first)..=of(last)).map(|power| (1 << power, count(power))).collect()
    }

    /// The buckets as bars.
    pub(super) fn picture(&self) -> String {
        let buckets = self.buckets();
        let most = buckets.iter().map(|(_, count)| *count).max().unwrap_or(1);
        let mut out = String::new();
        for (from, count) in buckets {
            let bar = "#".repeat((count * BAR).div_ceil(most));
            // Writing into a string does not fail.
            let _ = writeln!(out, "{:>10} us  {count:>8}  {bar}", micros(from));
        }
        out
    }
}

/// Nanoseconds as microseconds.
pub(super) fn micros(ns: u64) -> String {
    format!("{:.2}", ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let samples = Samples::new((1..=1000).rev().collect());
        assert_eq!(samples.percentile(0), 1);
        assert_eq!(samples.percentile(5000), 500);
        assert_eq!(samples.percentile(9990), 999);
        assert_eq!(samples.percentile(10_000), 1000);
        assert!((samples.mean() - 500.5).abs() < 1e-9);
        let one = Samples::new(vec![7]);
        assert_eq!((one.percentile(1), one.percentile(9999)), (7, 7));
        assert_eq!(Samples::new(Vec::new()).percentile(5000), 0);
    }

    #[test]
    fn every_sample_is_in_the_picture() {
        let samples = Samples::new(vec![0, 1, 3, 1000, 1023, 1024]);
        let buckets = samples.buckets();
        assert_eq!((buckets.first(), buckets.last()), (Some(&(1, 2)), Some(&(1024, 1))));
        assert_eq!(buckets.iter().map(|(_, count)| count).sum::<usize>(), 6);
        let picture = samples.picture();
        assert_eq!(picture.lines().count(), buckets.len());
        assert!(picture.lines().next().unwrap().ends_with(&"#".repeat(BAR)));
        assert!(Samples::new(Vec::new()).picture().is_empty());
    }
}
