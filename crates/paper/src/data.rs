//! Papers, figures and facts.
//!
//! The files in `papers/` are the only place with published values. Each fact says whether it was used to
//! fit a parameter of a model or was held out; a fact is one or the other, never both.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

/// One paper.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Paper {
    /// Its name in commands, such as `qpip`.
    pub id: String,
    /// Its title.
    pub title: String,
    /// What it asks, in a sentence.
    pub question: String,
    /// How our experiments differ from the paper's, in a few sentences.
    pub method: String,
    /// Its figures and tables, in their order.
    #[serde(rename = "figure")]
    pub figures: Vec<Figure>,
    /// What it states about them.
    #[serde(default, rename = "fact")]
    pub facts: Vec<Fact>,
}

/// A figure or table of a paper.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// Its name in commands: `4` for figure 4, `table-1` for table 1.
    pub id: String,
    /// What it shows.
    pub title: String,
    /// How long our experiment takes, in seconds.
    pub seconds: u32,
}

impl Figure {
    /// "figure 4", "table 1".
    #[must_use]
    pub fn name(&self) -> String {
        match self.id.split_once('-') {
            Some((kind, number)) => format!("{kind} {number}"),
            None => format!("figure {}", self.id),
        }
    }
}

/// A statement of a paper that has a number.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Fact {
    /// Unique within the paper.
    pub id: String,
    /// The figure that it belongs to.
    pub figure: String,
    /// What the number means.
    pub says: String,
    /// Where the paper states it: section, table, or "read off the figure".
    pub source: String,
    /// The published value.
    pub value: f64,
    /// Its unit; empty for a ratio.
    #[serde(default)]
    pub unit: String,
    /// How our value is judged.
    pub judge: Judgement,
    /// Largest accepted deviation of the ratio from 1, for [`Judgement::Within`].
    #[serde(default = "fifteen_percent")]
    pub tolerance: f64,
    /// Whether a parameter was fitted to it.
    pub role: Role,
    /// Why our value misses the published one although nothing is wrong. A miss without a reason fails
    /// `quipu paper check`.
    #[serde(default)]
    pub miss: Option<String>,
    /// What a port of this machine should give, for figures that are simulated and measured.
    #[serde(default)]
    pub live: Option<Live>,
}

/// What is expected of a value that is measured on this machine next to a simulated one.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Live {
    /// What follows from the tables of the port, in the unit of the fact.
    pub expected: f64,
    /// How the measured value is judged against that.
    pub judge: Judgement,
    /// As that of the fact.
    #[serde(default = "fifteen_percent")]
    pub tolerance: f64,
}

/// M5's authors validated their models to 15 % of the real machine.
fn fifteen_percent() -> f64 {
    0.15
}

/// How our value of a fact is judged.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Judgement {
    /// Within the tolerance of the published value.
    Within,
    /// At least the published value.
    AtLeast,
    /// At most the published value.
    AtMost,
    /// Shown and not judged: the machines are not comparable.
    Shown,
}

/// What a fact was used for.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// A parameter of the model was chosen so that the model meets it.
    Fitted,
    /// The model had no knowledge of it.
    HeldOut,
    /// It is measured on a real machine; there is no model.
    Measured,
}

impl Paper {
    /// Reads a paper's file.
    ///
    /// # Errors
    ///
    /// The text is not TOML of this form, a fact names a figure that the paper does not list, or two facts or
    /// figures share an id.
    pub fn parse(text: &str) -> Result<Self> {
        let paper: Self = toml::from_str(text)?;
        let mut ids = BTreeSet::new();
        for figure in &paper.figures {
            ensure!(ids.insert(&figure.id), "figure \"{}\" is listed twice", figure.id);
        }
        let figures = std::mem::take(&mut ids);
        for fact in &paper.facts {
            ensure!(ids.insert(&fact.id), "fact \"{}\" is listed twice", fact.id);
            ensure!(
                figures.contains(&fact.figure),
                "fact \"{}\" belongs to figure \"{}\", which the paper does not list",
                fact.id,
                fact.figure
            );
            let live = fact.live.as_ref().map_or(0.0, |live| live.expected);
            ensure!(
                fact.value.is_finite() && live.is_finite(),
                "fact \"{}\" has no finite value",
                fact.id
            );
        }
        Ok(paper)
    }

    /// The figure with a name as users type it: `4`, `figure-4`, `table-1`.
    ///
    /// # Errors
    ///
    /// There is none; the error lists those that there are.
    pub fn figure(&self, name: &str) -> Result<&Figure> {
        let id = name.strip_prefix("figure-").unwrap_or(name);
        if let Some(figure) = self.figures.iter().find(|figure| figure.id == id) {
            return Ok(figure);
        }
        let known: Vec<_> = self.figures.iter().map(|figure| figure.id.as_str()).collect();
        bail!("{} has no figure \"{name}\": give one of {}", self.id, known.join(", "))
    }

    /// The facts of a figure.
    pub fn facts_of<'a>(&'a self, figure: &'a Figure) -> impl Iterator<Item = &'a Fact> {
        self.facts.iter().filter(|fact| fact.figure == figure.id)
    }
}

/// Reads an embedded file, whose name is for the error.
///
/// # Errors
///
/// As [`Paper::parse`].
pub(crate) fn embedded(name: &str, text: &str) -> Result<Paper> {
    Paper::parse(text).with_context(|| format!("papers/{name}.toml"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        id = "a"
        title = "t"
        question = "q"
        method = "m"
        [[figure]]
        id = "1"
        title = "f"
        seconds = 1
        [[fact]]
        id = "x"
        figure = "1"
        says = "s"
        source = "section 2"
        value = 2.0
        judge = "at-least"
        role = "held-out"
    "#;

    #[test]
    fn a_paper_is_read() {
        let paper = Paper::parse(TEXT).unwrap();
        assert_eq!(paper.figure("figure-1").unwrap().name(), "figure 1");
        assert_eq!(paper.facts[0].judge, Judgement::AtLeast);
        let error = paper.figure("9").unwrap_err().to_string();
        assert_eq!(error, "a has no figure \"9\": give one of 1");
    }

    #[test]
    fn a_fact_without_its_figure_is_refused() {
        let text = TEXT.replace("figure = \"1\"", "figure = \"2\"");
        assert!(Paper::parse(&text).unwrap_err().to_string().contains("does not list"));
    }

    #[test]
    fn unknown_keys_are_refused() {
        assert!(Paper::parse(&format!("{TEXT}\nfoo = 1\n")).is_err());
    }
}
