//! Rates as people write them.

/// A rate such as `10Gbps`, `2.5Gbit/s`, `100Mbps` or `800000` (bits per second), in bits per second. `None`:
/// it is none, or not from 1 kbit/s to 1 Tbit/s.
#[must_use]
pub fn parse_rate(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = unit.trim().to_ascii_lowercase();
    let prefix = match unit.strip_suffix("bps").or_else(|| unit.strip_suffix("bit/s")) {
        Some(prefix) => prefix,
        None => unit.strip_suffix("bit").unwrap_or(&unit),
    };
    let factor = match prefix {
        "" => 1.0,
        "k" => 1e3,
        "m" => 1e6,
        "g" => 1e9,
        "t" => 1e12,
        _ => return None,
    };
    let rate = number.parse::<f64>().ok()? * factor;
    (1e3..=1e12).contains(&rate).then_some(rate.round() as u64)
}

/// A rate for people: `10 Gbit/s`.
#[must_use]
pub fn show_rate(rate: u64) -> String {
    let (factor, unit) = match rate {
        0 => return "no limit".to_owned(),
        1_000_000_000.. => (1e9, "Gbit/s"),
        1_000_000.. => (1e6, "Mbit/s"),
        _ => (1e3, "kbit/s"),
    };
    format!("{} {unit}", (rate as f64 / factor * 1000.0).round() / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_and_shown() {
        let rates = [
            ("10Gbps", Some(10_000_000_000)),
            ("2.5 Gbit/s", Some(2_500_000_000)),
            ("100mbit", Some(100_000_000)),
            ("800000", Some(800_000)),
            ("", None),
            ("fast", None),
            ("10GBq", None),
            ("0", None),
            ("2Tbps", None),
            ("-1Gbps", None),
            ("1e30Gbps", None),
        ];
        for (text, rate) in rates {
            assert_eq!(parse_rate(text), rate, "{text}");
        }
        assert_eq!(show_rate(2_500_000_000), "2.5 Gbit/s");
        assert_eq!(show_rate(0), "no limit");
    }
}
