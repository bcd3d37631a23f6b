//! The table for a terminal.

use std::fmt::Write as _;

use super::{FigureResult, PaperResult, shown};
use crate::compare::Verdict;
use crate::data::Role;

/// The widest statement that is not cut.
const WIDEST: usize = 58;

/// All figures of a result as a table for a terminal.
#[must_use]
pub fn table(result: &PaperResult) -> String {
    let mut out = format!("{}: {}\n", result.paper, result.title);
    for figure in &result.figures {
        one(&mut out, figure);
    }
    let counts = [Verdict::Met, Verdict::Explained, Verdict::Missed, Verdict::NotMeasured];
    let counts = counts.map(|verdict| result.count(verdict));
    let _ = writeln!(
        out,
        "\n{} facts met, {} missed and explained, {} missed, {} not measured, {} shown",
        counts[0],
        counts[1],
        counts[2],
        counts[3],
        result.count(Verdict::Shown)
    );
    out
}

fn one(out: &mut String, result: &FigureResult) {
    let name = result.figure.name();
    let _ = writeln!(out, "\n{}{}: {}", name[..1].to_uppercase(), &name[1..], result.figure.title);
    if let Some(error) = &result.error {
        let _ = writeln!(out, "  could not run: {error}");
    }
    if !result.facts.is_empty() {
        let _ = writeln!(
            out,
            "  {:WIDEST$} {:>10} {:>10} {:>6}  {:8}  verdict",
            "", "published", "ours", "ratio", "role"
        );
    }
    for row in &result.facts {
        let unit =
            if row.fact.unit.is_empty() { String::new() } else { format!(", {}", row.fact.unit) };
        let mut says = format!("{}{unit}", row.fact.says);
        if says.chars().count() > WIDEST {
            says = says.chars().take(WIDEST - 3).collect::<String>() + "...";
        }
        let role = match row.fact.role {
            Role::Fitted => "fitted",
            Role::HeldOut => "held out",
            Role::Measured => "measured",
        };
        let _ = writeln!(
            out,
            "  {says:WIDEST$} {:>10} {:>10} {:>6}  {role:8}  {}",
            shown(Some(row.fact.value)),
            shown(row.ours),
            shown(row.ratio),
            row.verdict.word()
        );
        if let (Verdict::Explained, Some(why)) = (row.verdict, &row.fact.miss) {
            let _ = writeln!(out, "    why: {why}");
        }
    }
    for note in &result.notes {
        let _ = writeln!(out, "  note: {note}");
    }
}
