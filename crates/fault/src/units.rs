//! Times and sizes as people write them.

use std::ops::RangeInclusive;

/// A time such as `250us`, `1.5ms`, `10s` or `2min`, in nanoseconds.
pub(crate) fn time(text: &str) -> Option<u64> {
    const UNITS: [(&str, f64); 5] =
        [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("min", 60e9), ("s", 1e9)];
    let text = text.trim();
    let (number, factor) =
        UNITS.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)))?;
    let number: f64 = number.trim().parse().ok()?;
    let ns = number * factor;
    // Times beyond a century are slips of the pen.
    (0.0..3e18).contains(&ns).then_some(ns as u64)
}

/// A size such as `512`, `4K` or `1M`, in bytes.
fn size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 10),
        b'm' | b'M' => (&text[..text.len() - 1], 20),
        b'g' | b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 = digits.trim().parse().ok()?;
    number.checked_mul(1 << shift)
}

/// A range of sizes: `4K..64K` with both ends in it, `4K..`, `..64K`, or one size.
pub(crate) fn sizes(text: &str) -> Option<RangeInclusive<u64>> {
    let Some((low, high)) = text.split_once("..") else {
        return size(text).map(|size| size..=size);
    };
    let low = if low.trim().is_empty() { 0 } else { size(low)? };
    let high = if high.trim().is_empty() { u64::MAX } else { size(high)? };
    (low <= high).then_some(low..=high)
}

/// A time for people.
pub(crate) fn shown(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns}ns"),
        10_000..10_000_000 => format!("{}us", ns / 1000),
        10_000_000..10_000_000_000 => format!("{}ms", ns / 1_000_000),
        _ => format!("{}s", ns / 1_000_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(time("250us"), Some(250_000));
        assert_eq!(time("1.5 ms"), Some(1_500_000));
        assert_eq!(time("2min"), Some(120_000_000_000));
        assert_eq!(time("0s"), Some(0));
        for bad in ["", "5", "ms", "-1s", "1h", "1e40s", "NaNs"] {
            assert_eq!(time(bad), None, "{bad}");
        }
    }

    #[test]
    fn sizes_are_ranges() {
        assert_eq!(sizes("4K..64k"), Some(4096..=65536));
        assert_eq!(sizes("1M.."), Some(1 << 20..=u64::MAX));
        assert_eq!(sizes("..8"), Some(0..=8));
        assert_eq!(sizes("8"), Some(8..=8));
        for bad in ["", "x", "9..8", "1..2..3", "99999999999G"] {
            assert_eq!(sizes(bad), None, "{bad}");
        }
    }
}
