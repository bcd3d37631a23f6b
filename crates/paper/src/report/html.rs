//! An HTML page without scripts, and with all its pictures inside.

use std::fmt::Write as _;

use super::{FigureResult, PaperResult, shown};
use crate::compare::Verdict;
use crate::data::{Paper, Role};

const HEAD: &str = "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
<meta name=\"viewport\" content=\"width=device-width\">\n<style>\n\
body{font:15px/1.5 Helvetica,Arial,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}\n\
table{border-collapse:collapse;margin:1em 0}\n\
td,th{border-bottom:1px solid #ddd;padding:.25em .7em;text-align:left}\n\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}\n\
.met{color:#00704a}.missed{color:#b00020;font-weight:bold}\n\
.explained{color:#a05a00}.muted{color:#777}svg{max-width:100%;height:auto}\n</style>\n";

/// The page of a paper.
#[must_use]
pub fn page(paper: &Paper, result: &PaperResult) -> String {
    let mut out = String::from(HEAD);
    let title = escape(&paper.title);
    let _ = writeln!(out, "<title>{title}</title>\n<h1>{title}</h1>");
    let _ = writeln!(
        out,
        "<p>{}</p>\n<p class=\"muted\">{}</p>",
        escape(&paper.question),
        escape(&paper.method)
    );
    summary(&mut out, result);
    for figure in &result.figures {
        section(&mut out, figure);
    }
    out.push_str("</html>\n");
    out
}

fn summary(out: &mut String, result: &PaperResult) {
    out.push_str("<table><tr><th>facts</th><th class=\"n\">fitted</th><th class=\"n\">held out</th><th class=\"n\">measured</th></tr>\n");
    for verdict in
        [Verdict::Met, Verdict::Explained, Verdict::Missed, Verdict::NotMeasured, Verdict::Shown]
    {
        let count = |role| {
            let facts = result.figures.iter().flat_map(|figure| &figure.facts);
            facts.filter(|row| row.verdict == verdict && row.fact.role == role).count()
        };
        let _ = writeln!(
            out,
            "<tr><td class=\"{}\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            class(verdict),
            verdict.word(),
            count(Role::Fitted),
            count(Role::HeldOut),
            count(Role::Measured)
        );
    }
    out.push_str("</table>\n");
}

fn section(out: &mut String, result: &FigureResult) {
    let name = result.figure.name();
    let _ = writeln!(
        out,
        "<h2 id=\"{}\">{}{}: {}</h2>",
        escape(&result.figure.id),
        name[..1].to_uppercase(),
        &name[1..],
        escape(&result.figure.title)
    );
    if let Some(error) = &result.error {
        let _ = writeln!(
            out,
            "<p class=\"missed\">This experiment could not run: {}</p>",
            escape(error)
        );
    }
    for chart in &result.charts {
        out.push_str(&chart.svg());
    }
    if !result.facts.is_empty() {
        let (ours, live) = match result.has_live() {
            true => (
                "simulated",
                "<th class=\"n\">on this machine</th><th class=\"n\">by the tables</th><th>verdict</th>",
            ),
            false => ("ours", ""),
        };
        let _ = writeln!(
            out,
            "<table><tr><th>fact</th><th>where</th><th class=\"n\">published</th><th class=\"n\">{ours}</th>\
             <th class=\"n\">ratio</th><th>role</th><th>verdict</th>{live}</tr>",
        );
        for row in &result.facts {
            let role = match row.fact.role {
                Role::Fitted => "fitted",
                Role::HeldOut => "held out",
                Role::Measured => "measured",
            };
            let why = match (row.verdict, &row.fact.miss) {
                (Verdict::Explained, Some(why)) => {
                    format!("<br><span class=\"muted\">{}</span>", escape(why))
                }
                _ => String::new(),
            };
            let live = row.live.as_ref().map_or_else(String::new, |live| {
                format!(
                    "<td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"{}\">{}</td>",
                    shown(live.measured),
                    shown(Some(live.expected)),
                    class(live.verdict),
                    live.verdict.word()
                )
            });
            let _ = writeln!(
                out,
                "<tr><td>{}{why}</td><td>{}</td><td class=\"n\">{} {unit}</td><td class=\"n\">{} {unit}</td>\
                 <td class=\"n\">{}</td><td>{role}</td><td class=\"{}\">{}</td>{live}</tr>",
                escape(&row.fact.says),
                escape(&row.fact.source),
                shown(Some(row.fact.value)),
                shown(row.ours),
                shown(row.ratio),
                class(row.verdict),
                row.verdict.word(),
                unit = escape(&row.fact.unit),
            );
        }
        out.push_str("</table>\n");
    }
    for note in &result.notes {
        let _ = writeln!(out, "<p>{}</p>", escape(note));
    }
}

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Met => "met",
        Verdict::Explained => "explained",
        Verdict::Missed | Verdict::NotMeasured => "missed",
        Verdict::Shown | Verdict::Skipped => "muted",
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
