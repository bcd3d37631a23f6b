//! What was measured, as a table, JSON and a picture.

use std::io;

use quipu_figure::{Chart, Kind, Scale, Values};
use quipu_host::nic::qos::show_rate;
use serde_json::{Value, json};

use super::super::super::output::table;
use super::super::Measured;

/// How two bulk senders share a port under a rule.
pub(super) struct Share {
    /// Which rule.
    pub(super) rule: &'static str,
    /// Its value: the weight against 1, or the limit.
    pub(super) value: u8,
    /// The ratio that follows from it.
    pub(super) expected: f64,
    /// The ratio of the octets.
    pub(super) ratio: f64,
    /// What both have sent together, of the rate.
    pub(super) of_rate: f64,
}

/// Pings there and back, in microseconds.
pub(super) struct Pings {
    name: &'static str,
    what: &'static str,
    p50_us: f64,
    p99_us: f64,
    count: usize,
}

impl Pings {
    /// From nanoseconds.
    pub(super) fn of(name: &'static str, what: &'static str, mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        let at = |percent: usize| {
            let index = (times.len() * percent / 100).min(times.len().saturating_sub(1));
            times.get(index).map_or(f64::NAN, |&ns| ns as f64 / 1000.0)
        };
        Self { name, what, p50_us: at(50), p99_us: at(99), count: times.len() }
    }
}

/// All of it.
pub(super) struct Report {
    pub(super) rate: u64,
    /// Octets of a packet.
    pub(super) packet: u32,
    pub(super) shares: Vec<Share>,
    pub(super) pings: Vec<Pings>,
}

impl Report {
    /// How long a packet takes at the port's rate, in microseconds.
    fn packet_us(&self) -> f64 {
        f64::from(self.packet) * 8e6 / self.rate as f64
    }

    /// Ratios over the values of their rules, with what follows from the rules.
    pub(super) fn plot(&self) -> Chart {
        let title = format!("Two lanes of a port at {}", show_rate(self.rate));
        let scale = Scale::Log;
        let mut chart = Chart::lines(&title, ("weight, or high_limit", scale), ("ratio", scale));
        for rule in ["weights", "strict", "high_limit"] {
            let of = |value: fn(&Share) -> f64| {
                let shares = self.shares.iter().filter(|it| it.rule == rule && it.value > 0);
                Values::Points(shares.map(|it| (f64::from(it.value), value(it))).collect())
            };
            chart = chart.with(rule, Kind::Ours, of(|it| it.ratio)).with(
                &format!("{rule}, by the rule"),
                Kind::Published,
                of(|it| it.expected),
            );
        }
        chart
    }
}

impl Measured for Report {
    fn print(&self) -> io::Result<()> {
        println!("port at {}, packets of {} bytes", show_rate(self.rate), self.packet);
        let heading = ["rule", "value", "ratio", "expected", "off", "of the rate"];
        let mut rows: Vec<Vec<String>> = vec![heading.map(str::to_owned).into()];
        rows.extend(self.shares.iter().map(|share| {
            vec![
                share.rule.to_owned(),
                share.value.to_string(),
                format!("{:.2}", share.ratio),
                format!("{:.0}", share.expected),
                format!("{:+.1} %", (share.ratio / share.expected - 1.0) * 100.0),
                format!("{:.1} %", share.of_rate * 100.0),
            ]
        }));
        table(&mut io::stdout().lock(), &rows)?;
        println!("");
        let heading = ["pings of 8 bytes", "p50 us", "p99 us", "count"];
        let mut rows: Vec<Vec<String>> = vec![heading.map(str::to_owned).into()];
        rows.extend(self.pings.iter().map(|pings| {
            vec![
                pings.what.to_owned(),
                format!("{:.1}", pings.p50_us),
                format!("{:.1}", pings.p99_us),
                pings.count.to_string(),
            ]
        }));
        table(&mut io::stdout().lock(), &rows)?;
        println!("A packet takes {:.1} us at this rate.", self.packet_us());
        Ok(())
    }

    fn as_json(&self) -> Value {
        let share = |share: &Share| {
            json!({
                "rule": share.rule,
                "value": share.value,
                "ratio": share.ratio,
                "expected": share.expected,
                "of_rate": share.of_rate,
            })
        };
        let pings = |pings: &Pings| {
            json!({
                "name": pings.name,
                "p50_us": pings.p50_us,
                "p99_us": pings.p99_us,
                "count": pings.count,
            })
        };
        json!({
            "rate": self.rate,
            "packet_octets": self.packet,
            "packet_us": self.packet_us(),
            "shares": self.shares.iter().map(share).collect::<Vec<_>>(),
            "pings": self.pings.iter().map(pings).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_pictures() {
        let pings = Pings::of("idle", "x", (1..=100).rev().map(|us| us * 1000).collect());
        assert_eq!((pings.p50_us, pings.p99_us, pings.count), (51.0, 100.0, 100));
        assert!(Pings::of("idle", "x", Vec::new()).p50_us.is_nan());
        let share = Share { rule: "weights", value: 4, expected: 4.0, ratio: 3.9, of_rate: 1.0 };
        let report =
            Report { rate: 1_000_000_000, packet: 4122, shares: vec![share], pings: vec![pings] };
        assert!(report.plot().svg().contains("weights"));
        assert_eq!(report.as_json()["pings"][0]["p99_us"], 100.0);
        assert!((report.packet_us() - 32.976).abs() < 0.001);
    }
}
