//! The results as text, JSON and an HTML page.

mod html;
mod text;

use std::path::Path;

use anyhow::{Context, Result};
use quipu_figure::Chart;
use serde::Serialize;

use crate::compare::{Comparison, Verdict};
use crate::data::{Figure, Paper};

pub use html::page;
pub use text::table;

/// The result of one figure.
#[derive(Clone, Debug, Serialize)]
pub struct FigureResult {
    /// The figure.
    pub figure: Figure,
    /// Its facts with our values.
    pub facts: Vec<Comparison>,
    /// Sentences for the reader.
    pub notes: Vec<String>,
    /// Why the experiment could not run, if it could not.
    pub error: Option<String>,
    /// Pictures.
    #[serde(skip)]
    pub charts: Vec<Chart>,
}

/// The result of a paper.
#[derive(Clone, Debug, Serialize)]
pub struct PaperResult {
    /// The paper's id.
    pub paper: String,
    /// Its title.
    pub title: String,
    /// Results of the figures that were asked for.
    pub figures: Vec<FigureResult>,
}

impl FigureResult {
    /// Whether values of this machine stand next to simulated ones.
    fn has_live(&self) -> bool {
        self.facts.iter().any(|fact| fact.live.is_some())
    }
}

impl PaperResult {
    /// How many facts have a verdict.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        let facts = self.figures.iter().flat_map(|figure| &figure.facts);
        facts.filter(|fact| fact.verdict == verdict).count()
    }

    /// The same of the values of this machine that stand next to simulated ones.
    #[must_use]
    pub fn count_live(&self, verdict: Verdict) -> usize {
        let facts = self.figures.iter().flat_map(|figure| &figure.facts);
        facts.filter(|fact| fact.live.as_ref().is_some_and(|live| live.verdict == verdict)).count()
    }

    /// Whether a fact fails `quipu paper check`, or an experiment could not run.
    #[must_use]
    pub fn fails(&self) -> bool {
        self.figures
            .iter()
            .any(|figure| figure.error.is_some() || figure.facts.iter().any(Comparison::fails))
    }
}

/// Writes `PAPER.html`, `PAPER.json` and a picture for each chart into a folder.
///
/// # Errors
///
/// A file cannot be written.
pub fn write(folder: &Path, paper: &Paper, result: &PaperResult) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let put = |name: String, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    put(format!("{}.html", paper.id), &page(paper, result))?;
    put(format!("{}.json", paper.id), &(serde_json::to_string_pretty(result)? + "\n"))?;
    for figure in &result.figures {
        for (index, chart) in figure.charts.iter().enumerate() {
            let number = if index == 0 { String::new() } else { format!("-{}", index + 1) };
            put(format!("{}-{}{number}.svg", paper.id, figure.figure.id), &chart.svg())?;
        }
    }
    Ok(())
}

/// A value with three digits, or a dash.
fn shown(value: Option<f64>) -> String {
    match value {
        None => "-".into(),
        Some(value) if value != 0.0 && (value.abs() >= 100_000.0 || value.abs() < 0.001) => {
            format!("{value:.2e}")
        }
        Some(value) if value.abs() >= 100.0 => format!("{value:.0}"),
        Some(value) if value.abs() >= 10.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.2}"),
    }
}
