//! Sweeps: one plan with many values, in parts that several machines can run.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::plan::Setting;
use crate::report::Report;

/// Most points of a sweep.
const MOST: usize = 100_000;

/// A sweep that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SweepError {
    /// A setting without a key or a value.
    #[error("{0:?} is no setting: write it as l2.size=1MB,2MB")]
    Setting(String),
    /// Too many points.
    #[error("{0} points are more than {MOST}: take fewer values")]
    Size(usize),
    /// A shard that is no part of a whole.
    #[error("{0:?} is no shard: write it as 3/16, from 1/16 to 16/16")]
    Shard(String),
    /// Parts that are not of one sweep.
    #[error("part {0} is of another sweep: {1}")]
    Other(usize, &'static str),
    /// Points that are in no part, or in two.
    #[error("point {0} is in {1} parts: each is to be in one")]
    Point(usize, usize),
}

/// Reads settings of the command line (`l2.size=1MB,2MB`) and makes all combinations.
///
/// # Errors
/// A setting without a key or a value, or too many combinations.
pub fn expand(settings: &[String]) -> Result<Vec<Vec<Setting>>, SweepError> {
    let mut points: Vec<Vec<Setting>> = vec![Vec::new()];
    for setting in settings {
        let wrong = || SweepError::Setting(setting.clone());
        let (key, values) = setting.split_once('=').ok_or_else(wrong)?;
        let values: Vec<&str> = values.split(',').map(str::trim).collect();
        if key.trim().is_empty() || values.iter().any(|value| value.is_empty()) {
            return Err(wrong());
        }
        let count = points.len().saturating_mul(values.len());
        if count > MOST {
            return Err(SweepError::Size(count));
        }
        let with = |point: &Vec<Setting>, value: &&str| {
            let mut point = point.clone();
            point.push(Setting { key: key.trim().into(), value: (*value).to_owned() });
            point
        };
        points =
            points.iter().flat_map(|point| values.iter().map(|value| with(point, value))).collect();
    }
    Ok(points)
}

/// A part of a sweep: number `number` of `of`, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Which part.
    pub number: usize,
    /// How many there are.
    pub of: usize,
}

impl Shard {
    /// The whole.
    pub const ALL: Self = Self { number: 1, of: 1 };

    /// Reads `3/16`.
    ///
    /// # Errors
    /// No two numbers, or a part beyond the last.
    pub fn parse(text: &str) -> Result<Self, SweepError> {
        let wrong = || SweepError::Shard(text.to_owned());
        let (number, of) = text.split_once('/').ok_or_else(wrong)?;
        let shard = Self {
            number: number.trim().parse().map_err(|_| wrong())?,
            of: of.trim().parse().map_err(|_| wrong())?,
        };
        if (1..=shard.of).contains(&shard.number) { Ok(shard) } else { Err(wrong()) }
    }

    /// Whether point `index` is in this part.
    #[must_use]
    pub fn has(self, index: usize) -> bool {
        index % self.of == self.number - 1
    }
}

/// A point of a sweep and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Its place in the sweep, from 0.
    pub index: usize,
    /// What is special about it, for people.
    pub label: String,
    /// Its results.
    pub report: Report,
}

/// The results of a sweep, or of a part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// The plan's name.
    pub plan: String,
    /// The settings as they were given.
    pub settings: Vec<String>,
    /// Points of the whole sweep.
    pub points: usize,
    /// Those that are here, in order.
    pub results: Vec<Point>,
}

/// What is special about a point, for people.
#[must_use]
pub fn label(plan: &str, point: &[Setting]) -> String {
    if point.is_empty() {
        return plan.to_owned();
    }
    let parts: Vec<String> =
        point.iter().map(|setting| format!("{}={}", setting.key, setting.value)).collect();
    parts.join(" ")
}

/// Joins the parts of a sweep.
///
/// # Errors
/// Parts of different sweeps, or points that are missing or there twice.
pub fn merge(parts: Vec<Results>) -> Result<Results, SweepError> {
    let mut parts = parts.into_iter().enumerate();
    let Some((_, mut whole)) = parts.next() else { return Err(SweepError::Point(0, 0)) };
    for (number, part) in parts {
        if part.plan != whole.plan {
            return Err(SweepError::Other(number + 1, "its plan has another name"));
        }
        if part.settings != whole.settings || part.points != whole.points {
            return Err(SweepError::Other(number + 1, "its settings differ"));
        }
        whole.results.extend(part.results);
    }
    whole.results.sort_by_key(|point| point.index);
    for index in 0..whole.points.max(whole.results.len()) {
        let there = whole.results.iter().filter(|point| point.index == index).count();
        if there != 1 {
            return Err(SweepError::Point(index, there));
        }
    }
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_combinations_in_order() {
        let points = expand(&["a.b=1,2".into(), "c=x,y,z".into()]).unwrap();
        assert_eq!(points.len(), 6);
        assert_eq!(label("", &points[5]), "a.b=2 c=z");
        assert_eq!(expand(&[]).unwrap(), [Vec::new()]);
        for wrong in ["a", "=1", "a=", "a=1,,2"] {
            assert!(matches!(expand(&[wrong.into()]), Err(SweepError::Setting(_))), "{wrong}");
        }
        let many = vec!["a=1,2,3,4,5,6,7,8,9,10".to_owned(); 6];
        assert_eq!(expand(&many), Err(SweepError::Size(1_000_000)));
    }

    #[test]
    fn shards_are_a_partition() {
        for index in 0..100 {
            let parts = (1..=7).filter(|number| Shard { number: *number, of: 7 }.has(index));
            assert_eq!(parts.count(), 1);
        }
        assert_eq!(Shard::parse("3/16"), Ok(Shard { number: 3, of: 16 }));
        for wrong in ["", "0/4", "5/4", "1", "a/b", "1/0"] {
            assert!(Shard::parse(wrong).is_err(), "{wrong}");
        }
    }
}
