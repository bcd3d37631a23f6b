//! The table for a terminal.

use std::fmt::Write as _;

use super::{FigureResult, PaperResult, shown};
use crate::compare::{LiveComparison, Verdict};
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
    let live = [Verdict::Met, Verdict::Missed, Verdict::NotMeasured, Verdict::Skipped];
    let live = live.map(|verdict| result.count_live(verdict));
    if live != [0; 4] {
        let _ = writeln!(
            out,
            "on this machine: {} met, {} missed, {} not measured, {} skipped, {} shown",
            live[0],
            live[1],
            live[2],
            live[3],
            result.count_live(Verdict::Shown)
        );
    }
    out
}

fn one(out: &mut String, result: &FigureResult) {
    let name = result.figure.name();
    let _ = writeln!(out, "\n{}{}: {}", name[..1].to_uppercase(), &name[1..], result.figure.title);
    if let Some(error) = &result.error {
        let _ = writeln!(out, "  could not run: {error}");
    }
    let has_live = result.has_live();
    if !result.facts.is_empty() {
        let (ours, live) = match has_live {
            true => ("simulated", format!(" {:>10} {:>10}", "live", "by tables")),
            false => ("ours", String::new()),
        };
        let _ = writeln!(
            out,
            "  {:WIDEST$} {:>10} {ours:>10} {:>6}{live}  {:8}  verdict",
            "", "published", "ratio", "role"
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
        let (live, live_verdict) = live_columns(row.live.as_ref(), has_live);
        let _ = writeln!(
            out,
            "  {says:WIDEST$} {:>10} {:>10} {:>6}{live}  {role:8}  {}{live_verdict}",
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

/// The columns of a value of this machine, and what follows the verdict.
fn live_columns(live: Option<&LiveComparison>, has_live: bool) -> (String, String) {
    match live {
        None if has_live => (format!(" {:>10} {:>10}", "", ""), String::new()),
        None => (String::new(), String::new()),
        Some(live) => (
            format!(" {:>10} {:>10}", shown(live.measured), shown(Some(live.expected))),
            format!("; live: {}", live.verdict.word()),
        ),
    }
}
