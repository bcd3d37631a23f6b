//! Quantities of a plan: sizes, times, clocks and rates, written as numbers with a unit.

use std::fmt;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// One unit of a quantity: its name and how many base units it has.
type Unit = (&'static str, f64);

const SIZES: &[Unit] =
    &[("KB", 1024.0), ("MB", 1_048_576.0), ("GB", 1_073_741_824.0), ("B", 1.0), ("", 1.0)];
const TIMES: &[Unit] = &[("ps", 1.0), ("ns", 1e3), ("us", 1e6), ("ms", 1e9), ("s", 1e12)];
const CLOCKS: &[Unit] = &[("GHz", 1e3), ("MHz", 1.0)];
const RATES: &[Unit] = &[("Gbps", 1e9), ("Mbps", 1e6), ("GB/s", 8e9), ("MB/s", 8e6), ("bps", 1.0)];

/// Reads `text` as a number and one of `units`.
fn parse(text: &str, units: &[Unit]) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().ok()?;
    let (_, factor) = units.iter().find(|(name, _)| *name == unit.trim())?;
    let value = number * factor;
    // Nothing in a machine is larger than this, and sums of such values do not overflow.
    (value.is_finite() && value <= 1e16).then_some(value.round() as u64)
}

/// The shortest text that [`parse`] reads as `value`.
fn show(value: u64, units: &[Unit], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut best: Option<String> = None;
    for (name, factor) in units {
        let number = value as f64 / factor;
        let text = format!("{number}{name}");
        let exact = parse(&text, units) == Some(value);
        if exact && best.as_ref().is_none_or(|known| text.len() < known.len()) {
            best = Some(text);
        }
    }
    f.write_str(&best.unwrap_or_else(|| value.to_string()))
}

macro_rules! quantity {
    ($name:ident, $units:expr, $what:literal, $doc:literal) => {
        #[doc = $doc]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                show(self.0, $units, f)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Reader;
                impl Visitor<'_> for Reader {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($what)
                    }
                    fn visit_str<E: Error>(self, text: &str) -> Result<$name, E> {
                        let value = parse(text, $units);
                        let wrong = || E::invalid_value(Unexpected::Str(text), &self);
                        value.map($name).ok_or_else(wrong)
                    }
                    fn visit_i64<E: Error>(self, value: i64) -> Result<$name, E> {
                        self.visit_str(&value.to_string())
                    }
                }
                deserializer.deserialize_any(Reader)
            }
        }
    };
}

quantity!(Bytes, SIZES, "a size such as \"64KB\", \"8MB\" or 1514", "A size in bytes.");
quantity!(Span, TIMES, "a time such as \"50ns\", \"10us\" or \"20ms\"", "A time in picoseconds.");
quantity!(Clock, CLOCKS, "a clock such as \"4GHz\" or \"550MHz\"", "A clock in megahertz.");
quantity!(
    Rate,
    RATES,
    "a rate such as \"10Gbps\" or \"6.4GB/s\"",
    "A rate in bits per second. GB/s is 10^9 bytes per second."
);

impl Clock {
    /// The time of `cycles` in picoseconds.
    #[must_use]
    pub fn ps(self, cycles: u64) -> u64 {
        match self.0 {
            0 => 0,
            mhz => {
                (u128::from(cycles) * 1_000_000 / u128::from(mhz)).min(u128::from(u64::MAX)) as u64
            }
        }
    }

    /// How many cycles `ps` picoseconds are.
    #[must_use]
    pub fn cycles(self, ps: u64) -> u64 {
        (u128::from(ps) * u128::from(self.0) / 1_000_000).min(u128::from(u64::MAX)) as u64
    }
}

impl Rate {
    /// How long `bytes` take, in picoseconds; 0 if the rate is 0, which stands for no limit.
    #[must_use]
    pub fn ps(self, bytes: u64) -> u64 {
        let bits = u128::from(bytes) * 8 * 1_000_000_000_000;
        bits.checked_div(u128::from(self.0)).map_or(0, |ps| ps.min(u128::from(u64::MAX)) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_read_back() {
        for (text, value) in [("8MB", 8 << 20), ("1514B", 1514), ("64KB", 65_536)] {
            assert_eq!(parse(text, SIZES), Some(value));
            assert_eq!(parse(&Bytes(value).to_string(), SIZES), Some(value));
        }
        assert_eq!(Span(10_000_000).to_string(), "10us");
        assert_eq!(Clock(4000).to_string(), "4GHz");
        assert_eq!(parse("6.4GB/s", RATES), Some(51_200_000_000));
    }

    #[test]
    fn nonsense_is_no_quantity() {
        for text in ["", "MB", "1 furlong", "-1MB", "1e99GB", "99999999999999999GB", "1.2.3MB"] {
            assert_eq!(parse(text, SIZES), None, "{text}");
        }
    }

    #[test]
    fn times_of_cycles_and_bytes() {
        assert_eq!(Clock(4000).ps(4), 1000);
        assert_eq!(Clock(4000).cycles(1000), 4);
        assert_eq!(Rate(10_000_000_000).ps(1514), 1_211_200);
        assert_eq!(Rate(0).ps(1514), 0, "no limit");
    }
}
