//! What was measured, as a table, JSON and a picture.

use std::io::{self, Write};

use quipu_figure::{Chart, Kind, Shape, Values};
use serde_json::{Value, json};

use super::super::super::output;

/// What a row should be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    AtLeast(f64),
    AtMost(f64),
}

impl Target {
    fn is_reached(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }

    fn words(self) -> String {
        match self {
            Self::AtLeast(least) => format!(">= {least}"),
            Self::AtMost(most) => format!("<= {most}"),
        }
    }

    /// The better of two quartiles.
    fn better(self, [low, _, high]: [f64; 3]) -> f64 {
        match self {
            Self::AtLeast(_) => high,
            Self::AtMost(_) => low,
        }
    }

    /// What is said of a row with these quartiles: a median that misses the target by less than rounds
    /// differ has neither reached nor missed it.
    fn verdict(self, quartiles: [f64; 3]) -> &'static str {
        if self.is_reached(quartiles[1]) {
            "reached"
        } else if self.is_reached(self.better(quartiles)) {
            "within the noise"
        } else {
            "missed"
        }
    }
}

/// How the two values of a round are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Ratio,
    Difference,
}

/// One number of a test.
#[derive(Clone, Copy, Debug)]
pub(super) struct What {
    /// The number and its unit.
    pub(super) name: &'static str,
    pub(super) by: By,
    pub(super) target: Option<Target>,
}

impl What {
    pub(super) const fn ratio(name: &'static str, target: Option<Target>) -> Self {
        Self { name, by: By::Ratio, target }
    }
}

/// A number of a test, from several rounds.
pub(super) struct Row {
    pub(super) test: &'static str,
    pub(super) what: What,
    /// What the second value of a round is compared with.
    pub(super) base: &'static str,
    /// Without and with the library, for each round.
    pub(super) rounds: Vec<[f64; 2]>,
}

/// Lower quartile, median and upper quartile; not a number if there is no value.
pub(super) fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|which| {
        let at = values.len().saturating_sub(1) as f64 * f64::from(which) / 4.0;
        let (low, high) = (at.floor() as usize, at.ceil() as usize);
        match (values.get(low), values.get(high)) {
            (Some(low), Some(high)) => low + (high - low) * at.fract(),
            _ => f64::NAN,
        }
    })
}

impl Row {
    /// Quartiles of the ratios, or of the differences, within rounds.
    pub(super) fn compared(&self) -> [f64; 3] {
        let pairs = self.rounds.iter().map(|[without, with]| match self.what.by {
            By::Ratio => with / without,
            By::Difference => with - without,
        });
        quartiles(pairs.collect())
    }

    fn median(&self, way: usize) -> f64 {
        quartiles(self.rounds.iter().map(|round| round[way]).collect())[1]
    }

    fn cells(&self) -> Vec<String> {
        let compared = self.compared();
        let places = if self.what.by == By::Ratio { 2 } else { 1 };
        let shown = compared.map(|value| format!("{value:.places$}")).join(" / ");
        vec![
            self.test.to_owned(),
            self.what.name.to_owned(),
            figure(self.median(0)),
            figure(self.median(1)),
            if self.what.by == By::Ratio { shown } else { format!("+ {shown}") },
            self.what.target.map_or_else(String::new, Target::words),
            self.what.target.map_or("", |target| target.verdict(compared)).to_owned(),
        ]
    }

    fn json(&self) -> Value {
        let compared = self.compared();
        let (of_ratio, of_difference) = match self.what.by {
            By::Ratio => (Some(compared), None),
            By::Difference => (None, Some(compared)),
        };
        json!({
            "test": self.test,
            "what": self.what.name,
            "base": self.base,
            "rounds": self.rounds,
            "medians": [self.median(0), self.median(1)],
            "ratio_quartiles": of_ratio,
            "difference_quartiles": of_difference,
            "target": self.what.target.map(Target::words),
            "verdict": self.what.target.map(|target| target.verdict(compared)),
        })
    }
}

/// A number with three digits, or all that are left of the point.
fn figure(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// All rows, and why some are missing.
#[derive(Default)]
pub(super) struct Table {
    pub(super) rows: Vec<Row>,
    pub(super) notes: Vec<String>,
    /// Load of the machine before and after.
    pub(super) loads: [String; 2],
}

impl Table {
    /// Writes it for people.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let heading = ["test", "what", "without", "with", "ratio", "target", "verdict"];
        let mut lines = vec![heading.map(str::to_owned).to_vec()];
        lines.extend(self.rows.iter().map(Row::cells));
        output::table(out, &lines)?;
        writeln!(
            out,
            "\nratio: quartiles of with to without, within rounds; +: of the difference"
        )?;
        writeln!(out, "load of the machine: {} before, {} after", self.loads[0], self.loads[1])?;
        for note in &self.notes {
            writeln!(out, "note: {note}")?;
        }
        Ok(())
    }

    /// It as JSON.
    pub(super) fn json(&self) -> Value {
        let rows: Vec<_> = self.rows.iter().map(Row::json).collect();
        json!({ "schema": 1, "rows": rows, "loads": self.loads, "notes": self.notes })
    }

    /// The median ratios next to their targets.
    pub(super) fn plot(&self) -> Chart {
        let rows = || self.rows.iter().filter(|row| row.what.by == By::Ratio);
        let names = rows().map(|row| format!("{}: {}", row.test, row.what.name)).collect();
        let ratios = rows().map(|row| Some(row.compared()[1]).filter(|ratio| ratio.is_finite()));
        let targets = rows().map(|row| {
            row.what.target.map(|target| match target {
                Target::AtLeast(value) | Target::AtMost(value) => value,
            })
        });
        Chart::bars("Sockets programs: with to without", "ratio", Shape::Grouped(names))
            .with("quipu sockets", Kind::Ours, Values::PerCategory(ratios.collect()))
            .with("target", Kind::Published, Values::PerCategory(targets.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(by: By, target: Target, rounds: &[[f64; 2]]) -> Row {
        let what = What { name: "requests/s", by, target: Some(target) };
        Row { test: "a test", what, base: "kernel TCP", rounds: rounds.to_vec() }
    }

    #[test]
    fn ratios_are_those_within_rounds() {
        let rounds = [[10.0, 20.0], [100.0, 100.0], [5.0, 20.0], [4.0, 12.0], [8.0, 40.0]];
        let of_ratio = row(By::Ratio, Target::AtLeast(2.5), &rounds);
        assert_eq!(of_ratio.compared(), [2.0, 3.0, 4.0]);
        let of_difference = row(By::Difference, Target::AtMost(8.0), &rounds);
        assert_eq!(of_difference.compared(), [8.0, 10.0, 15.0]);
        assert!(quartiles(vec![f64::NAN])[1].is_nan());
    }

    #[test]
    fn a_median_that_misses_by_less_than_rounds_differ_is_within_the_noise() {
        for (target, verdict) in [
            (Target::AtLeast(3.0), "reached"),
            (Target::AtLeast(3.5), "within the noise"),
            (Target::AtLeast(4.5), "missed"),
            (Target::AtMost(3.0), "reached"),
            (Target::AtMost(2.0), "within the noise"),
            (Target::AtMost(1.0), "missed"),
        ] {
            assert_eq!(target.verdict([2.0, 3.0, 4.0]), verdict, "{target:?}");
        }
    }

    #[test]
    fn tables_json_and_pictures_name_the_rows() {
        let rows = vec![row(By::Ratio, Target::AtLeast(2.0), &[[1000.0, 2500.0]])];
        let table = Table { rows, notes: vec!["wrk is not installed".into()], ..Table::default() };
        let mut text = Vec::new();
        table.write(&mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("2.50 / 2.50 / 2.50  >= 2    reached"), "{text}");
        assert!(text.ends_with("note: wrk is not installed\n"), "{text}");
        let json = table.json();
        assert_eq!(json["rows"][0]["ratio_quartiles"], json!([2.5, 2.5, 2.5]));
        assert!(table.plot().svg().contains("a test: requests/s"));
    }
}
