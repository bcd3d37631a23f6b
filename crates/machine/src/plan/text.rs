//! Plans as text: reading, settings of the command line, and where an error is.

use std::fmt;

use thiserror::Error;
use toml::de::{DeTable, DeValue};

use super::Plan;

/// A plan that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct PlanError {
    /// The line of the file, from 1; none if the error is in no line.
    pub line: Option<usize>,
    /// What is wrong, with the value and what is allowed.
    pub what: String,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}: {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

/// A key of a plan and the value that replaces the file's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Dotted, as `l2.size`.
    pub key: String,
    /// As in the file; quotes may be left out.
    pub value: String,
}

impl Plan {
    /// Reads a plan.
    ///
    /// # Errors
    /// No TOML, an unknown key, a value that is not allowed, or values that contradict each other.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        Self::parse_with(text, &[])
    }

    /// Reads a plan and replaces what `settings` name.
    ///
    /// # Errors
    /// As [`Plan::parse`]; an error in a setting names it and no line.
    pub fn parse_with(text: &str, settings: &[Setting]) -> Result<Self, PlanError> {
        // The file is checked by itself first, so that its errors have lines.
        let plan: Self = toml::from_str(text).map_err(|error| of_toml(text, &error))?;
        if settings.is_empty() {
            plan.check().map_err(|(key, what)| at_key(text, &key, what))?;
            return Ok(plan);
        }
        let mut table: toml::Table = toml::from_str(text).map_err(|error| of_toml(text, &error))?;
        for setting in settings {
            set(&mut table, setting)?;
            Self::deserialize_table(&table).map_err(|what| PlanError {
                line: None,
                what: format!("--set {}={}: {what}", setting.key, setting.value),
            })?;
        }
        let plan =
            Self::deserialize_table(&table).map_err(|what| PlanError { line: None, what })?;
        plan.check().map_err(|(key, what)| {
            let named = settings.iter().any(|setting| setting.key == key);
            let error = at_key(text, &key, what);
            if named {
                PlanError { line: None, what: format!("--set {key}: {}", error.what) }
            } else {
                error
            }
        })?;
        Ok(plan)
    }

    fn deserialize_table(table: &toml::Table) -> Result<Self, String> {
        let text = toml::to_string(table).map_err(|error| error.to_string())?;
        toml::from_str(&text).map_err(|error| error.message().to_owned())
    }

    /// The plan as TOML, with all keys.
    #[must_use]
    pub fn to_toml(&self) -> String {
        // Every field is a number, a string, a list or a table: nothing that TOML does not have.
        toml::to_string(self).unwrap_or_default()
    }
}

/// Puts a setting into the table.
fn set(table: &mut toml::Table, setting: &Setting) -> Result<(), PlanError> {
    let wrong = |what: String| PlanError { line: None, what };
    let mut at = table;
    let mut parts: Vec<&str> = setting.key.split('.').collect();
    let last = parts.pop().unwrap_or_default();
    if last.is_empty() || parts.len() > 4 {
        return Err(wrong(format!("--set {}: write it as l2.size=1MB", setting.key)));
    }
    for part in parts {
        let entry = at.entry(part.to_owned());
        let next = entry.or_insert_with(|| toml::Value::Table(toml::Table::new()));
        let toml::Value::Table(next) = next else {
            return Err(wrong(format!("--set {}: {part} is a value, not a section", setting.key)));
        };
        at = next;
    }
    let value = match setting.value.parse::<i64>() {
        Ok(number) => toml::Value::Integer(number),
        Err(_) => match setting.value.as_str() {
            "true" => toml::Value::Boolean(true),
            "false" => toml::Value::Boolean(false),
            text => match text.parse::<f64>() {
                Ok(number) if number.is_finite() => toml::Value::Float(number),
                _ => toml::Value::String(text.trim_matches('"').to_owned()),
            },
        },
    };
    at.insert(last.to_owned(), value);
    Ok(())
}

fn of_toml(text: &str, error: &toml::de::Error) -> PlanError {
    let line = error.span().map(|span| line_at(text, span.start));
    PlanError { line, what: error.message().trim().to_owned() }
}

fn line_at(text: &str, offset: usize) -> usize {
    let before = text.as_bytes().get(..offset).unwrap_or(text.as_bytes());
    1 + before.iter().filter(|byte| **byte == b'\n').count()
}

/// An error about the value of `key`, with its line, or that of the section it belongs to.
fn at_key(text: &str, key: &str, what: String) -> PlanError {
    PlanError { line: line_of(text, key), what: format!("{key}: {what}") }
}

fn line_of(text: &str, key: &str) -> Option<usize> {
    let root = DeTable::parse(text).ok()?;
    let mut table = root.get_ref();
    let mut found = None;
    for part in key.split('.') {
        let Some((name, value)) = table.iter().find(|(name, _)| name.get_ref() == part) else {
            break;
        };
        found = Some(line_at(text, name.span().start));
        match value.get_ref() {
            DeValue::Table(inner) => table = inner,
            _ => break,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Bytes, NicKind};

    #[test]
    fn an_empty_plan_is_all_defaults() {
        assert_eq!(Plan::parse(""), Ok(Plan::default()));
        let shown = Plan::default().to_toml();
        assert_eq!(Plan::parse(&shown), Ok(Plan::default()), "{shown}");
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_what_there_is() {
        let error = Plan::parse("[l2]\nsize = \"1MB\"\ncolour = 3\n").unwrap_err();
        assert_eq!(error.line, Some(3));
        assert!(error.what.contains("colour") && error.what.contains("ways"), "{error}");
        let error = Plan::parse("[nic]\n\nkind = \"toe\"\n").unwrap_err();
        assert_eq!(error.line, Some(3));
        assert!(error.what.contains("toe") && error.what.contains("vsinic"), "{error}");
        let error = Plan::parse("[l2]\nsize = \"1 furlong\"\n").unwrap_err();
        assert_eq!(error.line, Some(2), "{error}");
    }

    #[test]
    fn settings_replace_values_and_are_named_in_errors() {
        let set = |key: &str, value: &str| [Setting { key: key.into(), value: value.into() }];
        let plan = Plan::parse_with("[l2]\nsize = \"1MB\"\n", &set("l2.size", "4MB")).unwrap();
        assert_eq!(plan.l2.size, Bytes(4 << 20));
        let plan = Plan::parse_with("", &set("nic.kind", "fifo")).unwrap();
        assert_eq!(plan.nic.kind, NicKind::Fifo);
        for (key, value) in [("l2.colour", "1"), ("l2.size", "x"), ("seed.x", "1"), ("", "1")] {
            let error = Plan::parse_with("seed = 1", &set(key, value)).unwrap_err();
            assert!(error.what.starts_with("--set"), "{error}");
        }
    }

    #[test]
    fn a_contradiction_has_the_line_of_its_key() {
        let error = Plan::parse("seed = 2\n[l2]\nways = 0\n").unwrap_err();
        assert_eq!(error.line, Some(3), "{error}");
    }
}
