//! What was measured, as a table and as JSON.

use std::io;

use quipu_host::nic::qos::show_rate;
use serde_json::{Value, json};

use super::super::super::output::table;
use super::super::Measured;
use super::{Kind, Tables};

/// What two lanes have sent under tables.
pub(super) struct Share {
    pub(super) kinds: (Kind, Kind),
    pub(super) tables: Tables,
    /// The port's.
    pub(super) rate: u64,
    /// Of each, with headers.
    pub(super) mbps: (f64, f64),
}

/// What could not be measured here.
pub(super) struct Skipped {
    pub(super) kind: &'static str,
    pub(super) why: String,
}

/// All of it.
pub(super) struct Report {
    pub(super) shares: Vec<Share>,
    pub(super) skipped: Vec<Skipped>,
}

impl Tables {
    /// The name of the rule, and its value.
    fn words(self) -> (&'static str, u8) {
        match self {
            Self::Alone => ("alone", 0),
            Self::Weights(weight) => ("weights", weight),
            Self::Limit(limit) => ("high_limit", limit),
        }
    }
}

impl Report {
    /// The rate of a port that two senders keep full: a quarter of what each moves alone, at most this one.
    pub(super) fn rate_of(&self, kinds: (Kind, Kind), most: u64) -> u64 {
        let sends = |kind: Kind| kind.name() == kinds.0.name() || kind.name() == kinds.1.name();
        let alone = self.shares.iter().filter(|it| it.tables == Tables::Alone && sends(it.kinds.0));
        let quarters = alone.map(|it| (it.mbps.0 * 250_000.0) as u64);
        quarters.fold(most, u64::min).max(1_000_000)
    }
}

impl Measured for Report {
    fn print(&self) -> io::Result<()> {
        let heading = [
            "first lane",
            "other",
            "rule",
            "value",
            "rate",
            "Mbit/s",
            "other",
            "ratio",
            "expected",
        ];
        let mut rows: Vec<Vec<String>> = vec![heading.map(str::to_owned).into()];
        rows.extend(self.shares.iter().map(|share| {
            let (rule, value) = share.tables.words();
            let (first, other) = share.mbps;
            let is_alone = share.tables == Tables::Alone;
            let unless_alone = |text: String| if is_alone { "-".to_owned() } else { text };
            vec![
                share.kinds.0.name().to_owned(),
                unless_alone(share.kinds.1.name().to_owned()),
                rule.to_owned(),
                unless_alone(value.to_string()),
                unless_alone(show_rate(share.rate)),
                format!("{first:.1}"),
                unless_alone(format!("{other:.1}")),
                unless_alone(format!("{:.2}", first / other)),
                unless_alone(format!("{:.0}", share.tables.expected())),
            ]
        }));
        table(&mut io::stdout().lock(), &rows)?;
        for Skipped { kind, why } in &self.skipped {
            println!("{kind} is not measured: {why}");
        }
        Ok(())
    }

    fn as_json(&self) -> Value {
        let share = |share: &Share| {
            let (rule, value) = share.tables.words();
            let is_alone = share.tables == Tables::Alone;
            json!({
                "first": share.kinds.0.name(),
                "other": (!is_alone).then(|| share.kinds.1.name()),
                "rule": rule,
                "value": value,
                "rate": (!is_alone).then_some(share.rate),
                "first_mbps": share.mbps.0,
                "other_mbps": (!is_alone).then_some(share.mbps.1),
                "expected": (!is_alone).then(|| share.tables.expected()),
            })
        };
        let skipped = self.skipped.iter().map(|it| json!({"kind": it.kind, "why": it.why}));
        json!({
            "shares": self.shares.iter().map(share).collect::<Vec<_>>(),
            "skipped": skipped.collect::<Vec<_>>(),
        })
    }
}
