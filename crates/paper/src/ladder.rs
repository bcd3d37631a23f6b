//! The validation ladder of the simulated hosts: V0 to V6, each passed, failed or skipped.
//!
//! The lower rungs are checked here ([`quipu_machine::checks`]). The upper ones look at results of the papers
//! that were run; without them they are skipped. One compares with ns-3 ([`crate::ns3`]); without ns-3 it is
//! skipped.

use std::fmt::Write as _;

use quipu_machine::checks;
use serde::Serialize;

use crate::compare::{Comparison, Verdict};
use crate::data::{Judgement, Role};
use crate::ns3::{self, Ns3};
use crate::report::{FigureResult, PaperResult};

/// What came of a rung.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It holds.
    Passed,
    /// It does not.
    Failed,
    /// It was not looked at.
    Skipped,
}

/// A rung of the ladder.
#[derive(Clone, Debug, Serialize)]
pub struct Rung {
    /// V0 to V6.
    pub id: &'static str,
    /// What it is about.
    pub title: &'static str,
    /// What came of it.
    pub outcome: Outcome,
    /// What was found, or why it failed or was skipped.
    pub detail: String,
}

/// Figures of papers that are simulated.
fn is_simulated(paper: &str, figure: &str) -> bool {
    match paper {
        "sinic" => true,
        "qpip" => figure.starts_with("model-"),
        "qos" => !figure.starts_with("live-"),
        _ => false,
    }
}

/// All rungs, with the results that there are and what came of ns-3.
#[must_use]
pub fn ladder(results: &[&PaperResult], ns3: &Ns3) -> Vec<Rung> {
    let figures: Vec<&FigureResult> = results
        .iter()
        .flat_map(|result| {
            result.figures.iter().filter(|it| is_simulated(&result.paper, &it.figure.id))
        })
        .collect();
    let lower = |id, title, check: fn() -> Result<String, String>| match check() {
        Ok(detail) => Rung { id, title, outcome: Outcome::Passed, detail },
        Err(detail) => Rung { id, title, outcome: Outcome::Failed, detail },
    };
    vec![
        lower("V0", "registers, links, PCI Express", checks::registers_and_links),
        lower("V1", "latencies of registers and memory", checks::latencies),
        lower("V2", "closed forms", checks::closed_forms),
        predictions(&figures),
        cases(&figures),
        ns3::rung(ns3),
        standard(&figures),
        hidden(&figures),
    ]
}

/// Facts of figures that a test of their ids chooses.
fn facts<'a>(
    figures: &'a [&'a FigureResult],
    chosen: impl Fn(&str) -> bool,
) -> Vec<&'a Comparison> {
    let figures = figures.iter().filter(|it| chosen(&it.figure.id));
    figures.flat_map(|it| &it.facts).filter(|it| it.verdict != Verdict::Shown).collect()
}

fn not_run(id: &'static str, title: &'static str) -> Rung {
    let detail = "its experiments were not run: `quipu paper check` runs them".into();
    Rung { id, title, outcome: Outcome::Skipped, detail }
}

/// The rung of some facts: it fails with one that misses without a reason.
fn judged(id: &'static str, title: &'static str, facts: &[&Comparison], detail: String) -> Rung {
    let missed: Vec<&str> =
        facts.iter().filter(|it| it.verdict.fails()).map(|it| it.fact.id.as_str()).collect();
    if missed.is_empty() {
        return Rung { id, title, outcome: Outcome::Passed, detail };
    }
    let detail = format!("{detail}; missed: {}", missed.join(", "));
    Rung { id, title, outcome: Outcome::Failed, detail }
}

/// V3: some facts are fitted, the others follow.
fn predictions(figures: &[&FigureResult]) -> Rung {
    let (id, title) = ("V3", "facts that were held out follow from those that were fitted");
    let facts = facts(figures, |figure| !figure.starts_with("case-"));
    if facts.is_empty() {
        return not_run(id, title);
    }
    let count = |role| {
        let of_role = facts.iter().filter(|it| it.fact.role == role);
        let met = of_role.clone().filter(|it| it.verdict == Verdict::Met).count();
        format!("{met} of {}", of_role.count())
    };
    let detail =
        format!("fitted: {} met; held out: {} met", count(Role::Fitted), count(Role::HeldOut));
    judged(id, title, &facts, detail)
}

/// V4: what others have measured on other machines.
fn cases(figures: &[&FigureResult]) -> Rung {
    let (id, title) = ("V4", "independent cases: Corundum, Niagara 2");
    let facts = facts(figures, |figure| figure == "case-1" || figure == "case-2");
    if facts.is_empty() {
        return not_run(id, title);
    }
    let mut detail = String::new();
    for it in &facts {
        let comma = if detail.is_empty() { "" } else { ", " };
        let ours = it.ours.unwrap_or(f64::NAN);
        let _ = write!(detail, "{comma}{} {ours:.3} (published {})", it.fact.id, it.fact.value);
    }
    judged(id, title, &facts, detail)
}

/// V5: values that were held out, and are judged by their distance, are within 15 %.
fn standard(figures: &[&FigureResult]) -> Rung {
    let (id, title) = ("V5", "held-out values within 15 %, the standard of M5's authors");
    let mut facts = facts(figures, |_| true);
    facts.retain(|it| it.fact.role == Role::HeldOut && it.fact.judge == Judgement::Within);
    if facts.is_empty() {
        return not_run(id, title);
    }
    let distance = |it: &Comparison| it.ratio.map_or(f64::INFINITY, |ratio| (ratio - 1.0).abs());
    let within = facts.iter().filter(|it| distance(it) <= 0.15).count();
    let worst = facts.iter().max_by(|a, b| distance(a).total_cmp(&distance(b)));
    let worst = worst.map_or_else(String::new, |it| {
        format!("; farthest: {}, {:.0} %", it.fact.id, distance(it) * 100.0)
    });
    let detail = format!("{within} of {}{worst}", facts.len());
    judged(id, title, &facts, detail)
}

/// V6: how far parameters that the papers do not state move the results.
fn hidden(figures: &[&FigureResult]) -> Rung {
    let (id, title) = ("V6", "what parameters that are not stated decide");
    let Some(tornado) = figures.iter().find(|it| it.figure.id == "case-4") else {
        return not_run(id, title);
    };
    match (&tornado.error, tornado.notes.first()) {
        (Some(error), _) => Rung { id, title, outcome: Outcome::Failed, detail: error.clone() },
        (None, Some(note)) => Rung { id, title, outcome: Outcome::Passed, detail: note.clone() },
        (None, None) => not_run(id, title),
    }
}

/// The rungs as text.
#[must_use]
pub fn table(rungs: &[Rung]) -> String {
    let mut out = String::from("Validation ladder of the simulated hosts\n");
    for rung in rungs {
        let outcome = match rung.outcome {
            Outcome::Passed => "passed",
            Outcome::Failed => "FAILED",
            Outcome::Skipped => "skipped",
        };
        let _ = writeln!(out, "  {}  {outcome:8} {}: {}", rung.id, rung.title, rung.detail);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_results_the_lower_rungs_pass_and_the_others_are_skipped() {
        let rungs = ladder(&[], &Ns3::Missing("it is not installed".into()));
        let ids: Vec<&str> = rungs.iter().map(|rung| rung.id).collect();
        assert_eq!(ids, ["V0", "V1", "V2", "V3", "V4", "V4", "V5", "V6"]);
        for rung in &rungs {
            let passes = matches!(rung.id, "V0" | "V1" | "V2");
            let expected = if passes { Outcome::Passed } else { Outcome::Skipped };
            assert_eq!(rung.outcome, expected, "{rung:?}");
            assert!(!rung.detail.is_empty());
        }
        assert!(table(&rungs).contains("V6  skipped"));
    }

    #[test]
    fn a_fact_that_misses_fails_its_rungs() {
        let paper = crate::papers::find("sinic").unwrap().paper;
        let mut figures = Vec::new();
        for figure in &paper.figures {
            let mut measured = crate::experiment::Measured::default();
            for fact in paper.facts_of(figure) {
                let off = if fact.id == "misses-memory" { 2.0 } else { 1.0 };
                measured.set(&fact.id, fact.value * off);
            }
            let facts = crate::compare::compare(paper.facts_of(figure), &measured);
            let notes = vec!["a note".into()];
            let (figure, charts) = (figure.clone(), Vec::new());
            figures.push(FigureResult { figure, facts, notes, error: None, charts });
        }
        let result = PaperResult { paper: "sinic".into(), title: String::new(), figures };
        let rungs = ladder(&[&result], &Ns3::Missing("it is not installed".into()));
        let outcome = |index: usize| rungs[index].outcome;
        assert_eq!(
            [3, 4, 6, 7].map(outcome),
            [Outcome::Failed, Outcome::Passed, Outcome::Failed, Outcome::Passed]
        );
        assert!(rungs[3].detail.contains("misses-memory"), "{}", rungs[3].detail);
    }
}
