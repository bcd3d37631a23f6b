//! Which reports are not wanted: those of libraries between a program and its adapter, say.

use std::str::FromStr;

use crate::report::{Kind, Report};

/// Reports of a kind; or of these only the ones where a function, a library or a source file is named so.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    kind: Kind,
    place: Option<String>,
}

/// What is not reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ignored(Vec<Rule>);

impl Ignored {
    /// Whether a report is not wanted. Names of functions are looked up only if that depends on them.
    pub(crate) fn covers(&self, report: &Report) -> bool {
        let mut rules = self.0.iter().filter(|rule| rule.kind == report.kind).peekable();
        if rules.peek().is_none() {
            return false;
        }
        let traces = std::iter::once(&report.here).chain(report.related.iter().map(|(_, it)| it));
        let mut frames = None;
        rules.any(|rule| {
            rule.place.as_ref().is_none_or(|place| {
                let frames = frames.get_or_insert_with(|| {
                    traces.clone().flat_map(|trace| trace.all_frames()).collect::<Vec<_>>()
                });
                frames.iter().any(|frame| frame.contains(place.as_str()))
            })
        })
    }
}

impl FromStr for Ignored {
    type Err = String;

    /// Reads `KIND` or `KIND@PLACE`, several with commas between them.
    fn from_str(text: &str) -> Result<Self, String> {
        let rules = text.split(',').map(str::trim).filter(|rule| !rule.is_empty()).map(|rule| {
            let (name, place) = match rule.split_once('@') {
                Some((name, place)) => (name.trim_end(), Some(place.trim_start())),
                None => (rule, None),
            };
            if place.is_some_and(str::is_empty) {
                return Err(format!("{rule}: no function or library after the @"));
            }
            let kind = Kind::ALL.iter().copied().find(|kind| kind.name() == name);
            let kind = kind.ok_or_else(|| {
                let known: Vec<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
                format!("{name} is not a kind of report; the kinds are {}", known.join(", "))
            })?;
            Ok(Rule { kind, place: place.map(str::to_owned) })
        });
        rules.collect::<Result<_, _>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Trace;

    fn report(kind: Kind) -> Report {
        let related = vec![("the request was posted here", Trace::here())];
        Report { number: 1, kind, what: String::new(), here: Trace::here(), related }
    }

    #[test]
    fn reports_are_ignored_by_kind_and_by_place() {
        let ignores = |rules: &str, kind| rules.parse::<Ignored>().unwrap().covers(&report(kind));
        let kind = Kind::BufferChanged;
        assert!(!ignores("", kind) && !ignores("wrong-key, ah-in-use", kind));
        assert!(ignores("wrong-key, buffer-changed", kind));
        // What runs a test is below it in every build.
        assert!(ignores("buffer-changed@libc.so", kind));
        assert!(ignores("buffer-changed @ libnone, buffer-changed@libc.so", kind));
        assert!(!ignores("buffer-changed@libnone.so", kind));
        assert!(!ignores("buffer-changed@libc.so", Kind::WrongKey));
    }

    #[test]
    fn what_is_no_rule_is_refused_with_what_there_is() {
        let refused = |rules: &str| rules.parse::<Ignored>().unwrap_err();
        assert!(refused("wrong-kez").contains("buffer-changed"));
        assert!(refused("wrong-key@").contains("after the @"));
    }
}
