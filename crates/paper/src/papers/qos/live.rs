//! The figures on this machine: `quipu qos streams` measures one port by which SDP, IP over the adapter and
//! bulk data (in place of MPI) leave.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use quipu_figure::{Chart, Kind as Role, Scale, Values};
use serde_json::Value;

use crate::experiment::{Environment, Measured};

/// What two senders, or one alone, moved in Mbit/s.
#[derive(Clone, Copy, Debug)]
struct Share {
    first: f64,
    other: f64,
    /// The port's rate in Mbit/s.
    rate: f64,
}

/// First sender, other sender (empty for one alone), rule, value.
type Key = (String, String, String, u64);

/// What was measured.
pub(super) struct Live {
    shares: BTreeMap<Key, Share>,
    /// Why senders are missing.
    skipped: Vec<String>,
}

/// The rules.
const WEIGHTS: &str = "weights";
const LIMIT: &str = "high_limit";

impl Live {
    /// Measures.
    pub(super) fn measure(environment: &mut Environment<'_>) -> Result<Self> {
        let mut arguments = vec!["qos", "streams", "--json"];
        if environment.quick {
            arguments.push("--quick");
        }
        Self::parse(&environment.quipu_json(&arguments)?)
    }

    fn parse(all: &Value) -> Result<Self> {
        let mut shares = BTreeMap::new();
        for row in all["shares"].as_array().context("there are no shares")? {
            let word = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            let value = row["value"].as_u64().context("a share has no value")?;
            let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
            let share = Share {
                first: number("first_mbps"),
                other: number("other_mbps"),
                rate: number("rate") / 1e6,
            };
            ensure!(share.first.is_finite(), "a share has no rate");
            shares.insert((word("first"), word("other"), word("rule"), value), share);
        }
        let skipped = all["skipped"].as_array().map(Vec::as_slice).unwrap_or_default();
        let skipped = skipped.iter().map(|it| {
            let word = |key: &str| it[key].as_str().unwrap_or_default();
            format!("On this machine {} is not measured: {}", word("kind"), word("why"))
        });
        Ok(Self { shares, skipped: skipped.collect() })
    }

    fn share(&self, first: &str, other: &str, rule: &str, value: u64) -> Option<Share> {
        let key = (first.to_owned(), other.to_owned(), rule.to_owned(), value);
        self.shares.get(&key).copied()
    }

    fn alone(&self, sender: &str) -> Option<f64> {
        self.share(sender, "", "alone", 0).map(|share| share.first)
    }

    /// Adds this machine's values to a figure.
    pub(super) fn add(&self, figure: &str, measured: &mut Measured) {
        let mut values = Vec::new();
        match figure {
            "2" => self.single(&mut values),
            "4" => {
                let share = self.share("sdp", "ipoib", WEIGHTS, 1);
                values
                    .push(("sdp-share-2".into(), share.map(|it| it.first / (it.first + it.other))));
            }
            "5" => self.two_mpi(&mut values),
            "6" => self.over_mpi("sdp", &mut values),
            "7" => self.over_mpi("ipoib", &mut values),
            "8" => values.push(("sdp-over-ipoib-2".into(), self.gain("sdp", "ipoib", WEIGHTS, 64))),
            "9" => values.push(("ipoib-over-sdp-2".into(), self.gain("ipoib", "sdp", WEIGHTS, 64))),
            "11" => {
                let pair = self.alone("sdp").zip(self.alone("bulk"));
                values.push(("sdp-to-zero-copy".into(), pair.map(|(sdp, bulk)| sdp / bulk)));
            }
            "12" => {
                self.slower_link("sdp", &mut values);
                self.slower_link("ipoib", &mut values);
            }
            _ => return,
        }
        for (fact, value) in values {
            match value {
                Some(value) => measured.set_live(&fact, value),
                None => drop(measured.skipped.insert(fact)),
            }
        }
        if !measured.skipped.is_empty() {
            measured.notes.extend(self.skipped.iter().cloned());
        }
        measured.charts.extend(self.chart(figure));
    }

    fn single(&self, values: &mut Vec<(String, Option<f64>)>) {
        let (sdp, ipoib) = (self.alone("sdp"), self.alone("ipoib"));
        values.push(("single-sdp".into(), sdp));
        values.push(("single-ipoib".into(), ipoib));
        values.push(("single-ratio".into(), sdp.zip(ipoib).map(|(sdp, ipoib)| sdp / ipoib)));
    }

    fn two_mpi(&self, values: &mut Vec<(String, Option<f64>)>) {
        let share = |rule, value| self.share("bulk", "bulk", rule, value);
        let ratio = |rule, value| share(rule, value).map(|it| it.first / it.other);
        for factor in [4, 16, 255] {
            values.push((format!("pair-{factor}"), ratio(WEIGHTS, factor)));
        }
        values.push(("pair-blocking-4".into(), ratio(LIMIT, 4)));
        let totals = [1, 4, 16, 255].map(|factor| share(WEIGHTS, factor));
        let totals: Vec<f64> =
            totals.iter().flatten().map(|it| (it.first + it.other) / it.rate).collect();
        let least = totals.iter().copied().reduce(f64::min);
        let most = totals.iter().copied().reduce(f64::max);
        values.push(("pair-constant".into(), least.zip(most).map(|(least, most)| least / most)));
        values.push(("pair-total".into(), totals.first().map(|it| it * 100.0)));
    }

    /// What a sender gains over one that has the same weight, in percent.
    fn gain(&self, first: &str, other: &str, rule: &str, value: u64) -> Option<f64> {
        let base = self.share(first, other, WEIGHTS, 1)?;
        let share = self.share(first, other, rule, value)?;
        Some((share.first / base.first - 1.0) * 100.0)
    }

    fn over_mpi(&self, sender: &str, values: &mut Vec<(String, Option<f64>)>) {
        let share = |rule, value| self.share(sender, "bulk", rule, value);
        let ratio = |above: Option<Share>, below: Option<Share>| {
            above.zip(below).map(|(above, below)| above.first / below.first)
        };
        let total = |rule, value| {
            let (base, share) = (share(WEIGHTS, 1)?, share(rule, value)?);
            Some(((share.first + share.other) / (base.first + base.other) - 1.0) * 100.0)
        };
        let mut set = |fact: &str, value| values.push((format!("{sender}-{fact}"), value));
        set("gain-4", self.gain(sender, "bulk", WEIGHTS, 4));
        set("total-4", total(WEIGHTS, 4));
        set("flat", ratio(share(WEIGHTS, 64), share(WEIGHTS, 4)));
        set("blocking-gain", self.gain(sender, "bulk", LIMIT, 2));
        set("blocking-total", total(LIMIT, 2));
        set("blocking-flat", ratio(share(LIMIT, 64), share(LIMIT, 2)));
    }

    fn slower_link(&self, sender: &str, values: &mut Vec<(String, Option<f64>)>) {
        let share = |factor| self.share(sender, "bulk", WEIGHTS, factor);
        let of_rate = share(64).map(|it| it.first / it.rate * 100.0);
        values.push((format!("slow-{sender}"), of_rate));
        let beyond = share(16).zip(share(4)).map(|(above, below)| above.first / below.first);
        values.push((format!("slow-{sender}-beyond-4"), beyond));
    }

    /// Ratios over weights, next to those that follow from the tables.
    fn chart(&self, figure: &str) -> Option<Chart> {
        let (first, other) = match figure {
            "5" => ("bulk", "bulk"),
            "6" => ("sdp", "bulk"),
            "7" => ("ipoib", "bulk"),
            "8" => ("sdp", "ipoib"),
            "9" => ("ipoib", "sdp"),
            _ => return None,
        };
        let of_mix = self.shares.iter().filter(|((one, two, rule, _), _)| {
            (one.as_str(), two.as_str(), rule.as_str()) == (first, other, WEIGHTS)
        });
        let points: Vec<(f64, f64)> =
            of_mix.map(|(key, share)| (key.3 as f64, share.first / share.other)).collect();
        let rule: Vec<(f64, f64)> = points.iter().map(|&(factor, _)| (factor, factor)).collect();
        let title = format!("On this machine: {first} over {other}, at a port with a rate");
        let chart = Chart::lines(&title, ("weight", Scale::Log), ("ratio", Scale::Log))
            .with("measured", Role::Ours, Values::Points(points.clone()))
            .with("by the tables", Role::Published, Values::Points(rule));
        (!points.is_empty()).then_some(chart)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::compare::{Verdict, compare};

    /// What a port gives that follows its tables exactly.
    fn exact(with_ipoib: bool) -> Live {
        let alone = |first: &str, mbps: f64| json!({"first": first, "other": null, "rule": "alone", "value": 0, "first_mbps": mbps});
        let mut shares = vec![alone("sdp", 9000.0), alone("ipoib", 2000.0), alone("bulk", 30000.0)];
        let mixes = [
            ("bulk", "bulk"),
            ("sdp", "bulk"),
            ("ipoib", "bulk"),
            ("sdp", "ipoib"),
            ("ipoib", "sdp"),
        ];
        for (first, other) in mixes {
            for (rule, values) in [(WEIGHTS, &[1, 4, 16, 64, 255][..]), (LIMIT, &[2, 4, 64])] {
                for &value in values {
                    let part = f64::from(value) / (f64::from(value) + 1.0);
                    shares.push(json!({
                        "first": first, "other": other, "rule": rule, "value": value, "rate": 4e8,
                        "first_mbps": 400.0 * part, "other_mbps": 400.0 * (1.0 - part),
                    }));
                }
            }
        }
        if !with_ipoib {
            shares.retain(|it| it["first"] != "ipoib" && it["other"] != "ipoib");
        }
        let skipped = json!([{"kind": "ipoib", "why": "no /dev/net/tun"}]);
        let skipped = if with_ipoib { json!([]) } else { skipped };
        Live::parse(&json!({"shares": shares, "skipped": skipped})).unwrap()
    }

    #[test]
    fn a_port_that_follows_its_tables_meets_every_fact() {
        let paper = crate::papers::find("qos").unwrap().paper;
        let live = exact(true);
        let mut judged = 0;
        for figure in &paper.figures {
            let mut measured = Measured::default();
            live.add(&figure.id, &mut measured);
            for it in compare(paper.facts_of(figure), &measured) {
                let Some(live) = it.live else { continue };
                assert!(matches!(live.verdict, Verdict::Met | Verdict::Shown), "{}", it.fact.id);
                judged += u32::from(live.verdict == Verdict::Met);
            }
            let known =
                |id: &String| paper.facts.iter().any(|it| it.id == *id && it.live.is_some());
            assert!(measured.live.keys().all(known), "{:?}", measured.live);
        }
        assert!(judged >= 20, "{judged}");
    }

    #[test]
    fn without_an_interface_its_facts_are_skipped_with_the_reason() {
        let paper = crate::papers::find("qos").unwrap().paper;
        let live = exact(false);
        for id in ["7", "8"] {
            let figure = paper.figure(id).unwrap();
            let mut measured = Measured::default();
            live.add(id, &mut measured);
            let mut all =
                compare(paper.facts_of(figure), &measured).into_iter().filter_map(|it| it.live);
            assert!(all.all(|live| live.verdict == Verdict::Skipped));
            assert!(measured.notes[0].contains("no /dev/net/tun"), "{:?}", measured.notes);
        }
    }
}
