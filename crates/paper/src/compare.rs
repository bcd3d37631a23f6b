//! Published value, ours, ratio, verdict.

use serde::Serialize;

use crate::data::{Fact, Judgement};
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
}

/// Puts facts and measured values next to each other.
pub fn compare<'a>(facts: impl Iterator<Item = &'a Fact>, measured: &Measured) -> Vec<Comparison> {
    facts
        .map(|fact| {
            let ours = measured.values.get(&fact.id).copied().filter(|value| value.is_finite());
            let ratio = ours.filter(|_| fact.value != 0.0).map(|ours| ours / fact.value);
            Comparison { fact: fact.clone(), ours, ratio, verdict: judge(fact, ours) }
        })
        .collect()
}

fn judge(fact: &Fact, ours: Option<f64>) -> Verdict {
    let Some(ours) = ours else {
        return if fact.miss.is_some() { Verdict::Explained } else { Verdict::NotMeasured };
    };
    let met = match fact.judge {
        Judgement::Shown => return Verdict::Shown,
        Judgement::Within => (ours - fact.value).abs() <= fact.tolerance * fact.value.abs(),
        Judgement::AtLeast => ours >= fact.value,
        Judgement::AtMost => ours <= fact.value,
    };
    match (met, &fact.miss) {
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
}
