//! Published value, ours, ratio, verdict.

use serde::Serialize;

use crate::data::{Fact, Judgement, Live};
use crate::experiment::Measured;

/// How our value of a fact stands to the published one.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It is as judged by [`Judgement`].
    Met,
    /// It is not, and the paper's file says why.
    Explained,
    /// It is not.
    Missed,
    /// It is shown for comparison only.
    Shown,
    /// The experiment gave no value.
    NotMeasured,
    /// It cannot be measured on this machine.
    Skipped,
}

impl Verdict {
    /// Whether `quipu paper check` fails because of it.
    #[must_use]
    pub fn fails(self) -> bool {
        matches!(self, Self::Missed | Self::NotMeasured)
    }

    /// One word for tables.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Explained => "missed, explained",
            Self::Missed => "MISSED",
            Self::Shown => "shown",
            Self::NotMeasured => "NOT MEASURED",
            Self::Skipped => "skipped",
        }
    }
}

/// A fact with our value.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The fact.
    #[serde(flatten)]
    pub fact: Fact,
    /// Our value.
    pub ours: Option<f64>,
    /// Ours divided by the published value.
    pub ratio: Option<f64>,
    /// The verdict.
    pub verdict: Verdict,
    /// This machine's value of a fact that is simulated, too.
    pub live: Option<LiveComparison>,
}

/// This machine's value of a fact.
#[derive(Clone, Debug, Serialize)]
pub struct LiveComparison {
    /// What follows from the tables of the port.
    pub expected: f64,
    /// What was measured.
    pub measured: Option<f64>,
    /// The verdict.
    pub verdict: Verdict,
}

impl Comparison {
    /// Whether `quipu paper check` fails because of it.
    #[must_use]
    pub fn fails(&self) -> bool {
        self.verdict.fails() || self.live.as_ref().is_some_and(|live| live.verdict.fails())
    }
}

/// Puts facts and measured values next to each other.
pub fn compare<'a>(facts: impl Iterator<Item = &'a Fact>, measured: &Measured) -> Vec<Comparison> {
    facts
        .map(|fact| {
            let ours = measured.values.get(&fact.id).copied().filter(|value| value.is_finite());
            let ratio = ours.filter(|_| fact.value != 0.0).map(|ours| ours / fact.value);
            let verdict = judge(fact, ours);
            let live = fact.live.as_ref().map(|live| judge_live(&fact.id, live, measured));
            Comparison { fact: fact.clone(), ours, ratio, verdict, live }
        })
        .collect()
}

fn judge_live(fact: &str, live: &Live, measured: &Measured) -> LiveComparison {
    let value = measured.live.get(fact).copied().filter(|value| value.is_finite());
    let verdict = match value {
        None if measured.skipped.contains(fact) => Verdict::Skipped,
        None => Verdict::NotMeasured,
        Some(_) if live.judge == Judgement::Shown => Verdict::Shown,
        Some(value) if is_met(live.judge, value, live.expected, live.tolerance) => Verdict::Met,
        Some(_) => Verdict::Missed,
    };
    LiveComparison { expected: live.expected, measured: value, verdict }
}

fn is_met(judge: Judgement, value: f64, target: f64, tolerance: f64) -> bool {
    match judge {
        Judgement::Shown => true,
        Judgement::Within => (value - target).abs() <= tolerance * target.abs(),
        Judgement::AtLeast => value >= target,
        Judgement::AtMost => value <= target,
    }
}

fn judge(fact: &Fact, ours: Option<f64>) -> Verdict {
    let Some(ours) = ours else {
        return if fact.miss.is_some() { Verdict::Explained } else { Verdict::NotMeasured };
    };
    if fact.judge == Judgement::Shown {
        return Verdict::Shown;
    }
    match (is_met(fact.judge, ours, fact.value, fact.tolerance), &fact.miss) {
        (true, _) => Verdict::Met,
        (false, Some(_)) => Verdict::Explained,
        (false, None) => Verdict::Missed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Role;

    fn verdict(judge: Judgement, ours: Option<f64>, miss: Option<&str>) -> Verdict {
        let fact = Fact {
            id: "x".into(),
            figure: "1".into(),
            says: String::new(),
            source: String::new(),
            value: 10.0,
            unit: String::new(),
            judge,
            tolerance: 0.15,
            role: Role::HeldOut,
            miss: miss.map(Into::into),
            live: None,
        };
        let mut measured = Measured::default();
        if let Some(ours) = ours {
            measured.set("x", ours);
        }
        compare([&fact].into_iter(), &measured)[0].verdict
    }

    #[test]
    fn verdicts() {
        assert_eq!(verdict(Judgement::Within, Some(11.4), None), Verdict::Met);
        assert_eq!(verdict(Judgement::Within, Some(8.4), None), Verdict::Missed);
        assert_eq!(verdict(Judgement::Within, Some(8.4), Some("why")), Verdict::Explained);
        assert_eq!(verdict(Judgement::AtLeast, Some(10.0), None), Verdict::Met);
        assert_eq!(verdict(Judgement::AtMost, Some(10.1), None), Verdict::Missed);
        assert_eq!(verdict(Judgement::Shown, Some(99.0), None), Verdict::Shown);
        assert_eq!(verdict(Judgement::Within, None, None), Verdict::NotMeasured);
        assert_eq!(verdict(Judgement::Within, Some(f64::NAN), None), Verdict::NotMeasured);
    }

    #[test]
    fn a_value_of_this_machine_has_a_verdict_of_its_own() {
        let verdict = |value: Option<f64>, is_skipped: bool| {
            let live = Live { expected: 4.0, judge: Judgement::Within, tolerance: 0.1 };
            let mut measured = Measured::default();
            if let Some(value) = value {
                measured.set_live("x", value);
            }
            if is_skipped {
                measured.skipped.insert("x".into());
            }
            judge_live("x", &live, &measured).verdict
        };
        assert_eq!(verdict(Some(4.3), false), Verdict::Met);
        assert_eq!(verdict(Some(4.5), true), Verdict::Missed);
        assert_eq!(verdict(None, true), Verdict::Skipped);
        assert_eq!(verdict(None, false), Verdict::NotMeasured);
        assert!(!Verdict::Skipped.fails());
    }
}
