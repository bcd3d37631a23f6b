//! The configuration as TOML.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Deserialize;
use toml::Spanned;

use crate::arbiter::Entry;
use crate::config::{Config, ConfigError, Note, entries, lanes, sl2vl};
use crate::policy::{Rule, Ulp};
use crate::rate::parse_rate;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    rate: Option<Spanned<String>>,
    strict: Option<bool>,
    max_vls: Option<Spanned<i64>>,
    high_limit: Option<Spanned<i64>>,
    vlarb_high: Option<Spanned<String>>,
    vlarb_low: Option<Spanned<String>>,
    sl2vl: Option<Spanned<String>>,
    #[serde(default)]
    dscp: BTreeMap<String, Spanned<i64>>,
    #[serde(default)]
    rates: BTreeMap<String, Spanned<String>>,
    #[serde(default)]
    rules: Vec<Spanned<String>>,
}

struct Reader<'a> {
    text: &'a str,
    file: &'a str,
}

impl Reader<'_> {
    fn line(&self, at: usize) -> usize {
        1 + self.text.as_bytes()[..at.min(self.text.len())].iter().filter(|b| **b == b'\n').count()
    }

    fn error(&self, at: usize, what: impl Into<String>) -> ConfigError {
        let what = what.into().replace('\n', "; ");
        ConfigError { file: self.file.to_owned(), line: self.line(at), what }
    }

    /// What `read` makes of a value.
    fn value<T, U>(
        &self,
        key: &str,
        value: &Spanned<T>,
        read: impl FnOnce(&T) -> Result<U, String>,
    ) -> Result<U, ConfigError> {
        let at = value.span().start;
        read(value.get_ref()).map_err(|what| self.error(at, format!("{key}: {what}")))
    }

    fn level(&self, key: &str, at: usize) -> Result<usize, ConfigError> {
        key.parse()
            .ok()
            .filter(|&sl| sl < 16)
            .ok_or_else(|| self.error(at, format!("`{key}` is no service level: they are 0 to 15")))
    }
}

fn within(value: i64, range: std::ops::RangeInclusive<u8>) -> Result<u8, String> {
    let inside = u8::try_from(value).ok().filter(|value| range.contains(value));
    inside.ok_or_else(|| format!("{value} is not from {} to {}", range.start(), range.end()))
}

fn rate(text: &String) -> Result<u64, String> {
    parse_rate(text).ok_or_else(|| format!("`{text}` is no rate, such as 10Gbps"))
}

pub(crate) fn parse(text: &str, file: &str) -> Result<(Config, Vec<Note>), ConfigError> {
    let reader = Reader { text, file };
    let raw: Raw = toml::from_str(text).map_err(|error| {
        reader.error(error.span().map_or(0, |span| span.start), error.message())
    })?;
    let mut config = Config::default();
    let mut notes = Vec::new();
    let mut note = |at, what| notes.push(Note { line: reader.line(at), what });
    if let Some(value) = &raw.rate {
        config.rate = reader.value("rate", value, rate)?;
    }
    config.strict = raw.strict.unwrap_or_default();
    if let Some(value) = &raw.max_vls {
        config.max_vls = reader.value("max_vls", value, |&count| within(count, 1..=15))?;
    }
    if let Some(value) = &raw.high_limit {
        config.high_limit = reader.value("high_limit", value, |&limit| within(limit, 0..=255))?;
    }
    let tables = [
        ("vlarb_high", &raw.vlarb_high, &mut config.high),
        ("vlarb_low", &raw.vlarb_low, &mut config.low),
    ];
    for (key, value, table) in tables {
        let Some(value) = value else { continue };
        let (list, dropped) = reader.value(key, value, |text| entries(text))?;
        if dropped > 0 {
            let what = format!("{dropped} entries after the 64th are not used");
            note(value.span().start, what);
        }
        *table = list;
    }
    if let Some(value) = &raw.sl2vl {
        let list = reader.value("sl2vl", value, |text| lanes(text))?;
        if let Some(what) = sl2vl(&list, &mut config.sl2vl) {
            note(value.span().start, what);
        }
    }
    for (key, value) in &raw.dscp {
        let level = reader.level(key, value.span().start)?;
        config.dscp[level] = Some(reader.value("dscp", value, |&dscp| within(dscp, 0..=63))?);
    }
    for (key, value) in &raw.rates {
        let level = reader.level(key, value.span().start)?;
        config.sl_rates[level] = reader.value("rates", value, rate)?;
    }
    for value in &raw.rules {
        let rule = reader.value("rules", value, |text| Rule::parse(text))?;
        if rule.ulp == Ulp::Nothing {
            note(value.span().start, format!("`{}` matches nothing here", rule.text));
        }
        config.rules.push(rule);
    }
    Ok((config, notes))
}

/// A configuration that [`parse`] reads.
pub(crate) fn write(config: &Config) -> String {
    let pairs = |table: &[Entry]| {
        let pairs = table.iter().map(|entry| format!("{}:{}", entry.lane, entry.weight));
        pairs.collect::<Vec<_>>().join(",")
    };
    let lanes = config.sl2vl.map(|lane| lane.to_string()).join(",");
    let mut text = String::new();
    if config.rate > 0 {
        _ = writeln!(text, "rate = \"{}\"", config.rate);
    }
    _ = writeln!(text, "strict = {}", config.strict);
    _ = writeln!(text, "max_vls = {}\nhigh_limit = {}", config.max_vls, config.high_limit);
    _ = writeln!(text, "vlarb_high = \"{}\"", pairs(&config.high));
    _ = writeln!(text, "vlarb_low = \"{}\"\nsl2vl = \"{lanes}\"", pairs(&config.low));
    if !config.rules.is_empty() {
        let rules =
            config.rules.iter().map(|rule| toml::Value::from(rule.text.as_str()).to_string());
        _ = writeln!(text, "rules = [{}]", rules.collect::<Vec<_>>().join(", "));
    }
    if config.dscp.iter().any(Option::is_some) {
        _ = writeln!(text, "[dscp]");
        for (level, dscp) in config.dscp.iter().enumerate() {
            if let Some(dscp) = dscp {
                _ = writeln!(text, "{level} = {dscp}");
            }
        }
    }
    if config.sl_rates.iter().any(|&rate| rate > 0) {
        _ = writeln!(text, "[rates]");
        for (level, &rate) in config.sl_rates.iter().enumerate().filter(|(_, rate)| **rate > 0) {
            _ = writeln!(text, "{level} = \"{rate}\"");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "rate = \"10Gbps\"\nhigh_limit = 0x10\nvlarb_high = \"1:255\"\n\
        vlarb_low = \"0:64\"\nsl2vl = \"0,1,0,0,0,0,0,0,0,0,0,0,0,0,0,15\"\n\
        rules = [\"sdp, port-num 1-9 : 1\", \"default : 0\"]\n[dscp]\n1 = 46\n[rates]\n2 = \"1Gbps\"\n";

    #[test]
    fn what_is_written_is_read() {
        let (config, notes) = Config::parse(EXAMPLE, "qos.toml").unwrap();
        assert_eq!((config.rate, config.high_limit), (10_000_000_000, 16));
        assert_eq!((config.dscp_of(1), config.dscp_of(2), config.dscp_of(9)), (46, 16, 0));
        assert_eq!(config.lane_of(15), None);
        assert_eq!(notes.len(), 1, "{notes:?}");
        let (again, _) = Config::parse(&config.to_toml(), "again").unwrap();
        assert_eq!(again, config);
        let default = Config::default();
        assert_eq!(Config::parse(&default.to_toml(), "default").unwrap().0, default);
    }

    #[test]
    fn errors_have_a_line_and_a_reason() {
        let check = |text: &str, expected: &str| {
            let error = Config::parse(text, "q.toml").unwrap_err().to_string();
            assert_eq!(error, expected);
        };
        check("rate = \"1Gbps\"\nmax_vls = 0", "q.toml:2: max_vls: 0 is not from 1 to 15");
        check("rate = \"x\"", "q.toml:1: rate: `x` is no rate, such as 10Gbps");
        check("vlarb_low = \"0\"", "q.toml:1: vlarb_low: `0` is no VL:WEIGHT, such as 0:64");
        check("[dscp]\n1 = 64", "q.toml:2: dscp: 64 is not from 0 to 63");
        check("[rates]\n\n17 = \"1Gbps\"", "q.toml:3: `17` is no service level: they are 0 to 15");
        check(
            "rules = [\n\"x : 1\"]",
            "q.toml:2: rules: `x` is no service: default, sdp, rds, iser, ipoib, srp, any, program",
        );
        let error = Config::parse("\ncolour = 1", "q.toml").unwrap_err();
        assert!(error.line == 2 && error.what.contains("unknown field `colour`"), "{error}");
    }
}
