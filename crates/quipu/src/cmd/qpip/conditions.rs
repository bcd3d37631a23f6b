//! The conditions of a request (RFC 9110 section 13): the client says which version of a file it has, or
//! means, and a server answers accordingly. No I/O.

use super::http::{Status, parse_date};

/// What the fields of a request say about versions. Dates are seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Conditions {
    /// It is to be one of these (section 13.1.1).
    is_one_of: Option<String>,
    /// It is to be none of these (section 13.1.2).
    is_none_of: Option<String>,
    /// It is to have been changed since then (section 13.1.3).
    changed_since: Option<u64>,
    /// It is not to have been changed since then (section 13.1.4).
    unchanged_since: Option<u64>,
    /// A part is wanted of this version only, else all (section 13.1.5).
    part_of: Option<String>,
}

/// What tells a version of a file from others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Version<'a> {
    /// A strong entity tag (section 8.8.3), with its quotes.
    pub(crate) tag: Option<&'a str>,
    /// When it was changed, in seconds since 1970.
    pub(crate) changed: Option<u64>,
    /// That second is not over: it may change again, so that the date does not tell it from others (section
    /// 8.8.2.2).
    pub(crate) may_change: bool,
}

impl Version<'_> {
    /// The date that tells it from others.
    pub(crate) fn date(&self) -> Option<u64> {
        self.changed.filter(|_| !self.may_change)
    }
}

impl Conditions {
    /// Takes a field, whose name is in small letters; whether it is one of these. A list may come in several
    /// fields. A date that cannot be read is no condition.
    pub(super) fn take(&mut self, name: &str, value: &str) -> bool {
        let list = match name {
            "if-match" => &mut self.is_one_of,
            "if-none-match" => &mut self.is_none_of,
            "if-modified-since" => {
                self.changed_since = parse_date(value);
                return true;
            }
            "if-unmodified-since" => {
                self.unchanged_since = parse_date(value);
                return true;
            }
            "if-range" => {
                self.part_of = Some(value.into());
                return true;
            }
            _ => return false,
        };
        let list = list.get_or_insert_default();
        if !list.is_empty() {
            list.push(',');
        }
        list.push_str(value);
        true
    }

    /// How a version is to be answered other than by itself; in the order of section 13.2.2, for GET and
    /// HEAD.
    pub(crate) fn judge(&self, version: Version<'_>) -> Option<Status> {
        let Version { tag, changed, .. } = version;
        let since = |date: Option<u64>| changed.zip(date).map(|(changed, date)| changed > date);
        let is_other = match &self.is_one_of {
            Some(list) => !names(list, tag, false),
            None => since(self.unchanged_since) == Some(true),
        };
        if is_other {
            return Some(Status::PreconditionFailed);
        }
        let is_known = match &self.is_none_of {
            Some(list) => names(list, tag, true),
            None => since(self.changed_since) == Some(false) && !version.may_change,
        };
        is_known.then_some(Status::NotModified)
    }

    /// Whether a part that is asked for may be a part of this version.
    pub(crate) fn allows_part(&self, version: Version<'_>) -> bool {
        self.part_of.as_deref().is_none_or(|wanted| {
            // A date that is later was not told of this version, nor was one that is earlier.
            let date = || parse_date(wanted).is_some_and(|date| version.date() == Some(date));
            version.tag == Some(wanted) || date()
        })
    }
}

/// Whether a list has a tag in it, or any; by the weak comparison of section 8.8.3.2, or the strong one, in
/// which what a client calls weak is equal to nothing.
fn names(list: &str, tag: Option<&str>, weak: bool) -> bool {
    let plain = |it: &str| Some(it.strip_prefix("W/").filter(|_| weak).unwrap_or(it)) == tag;
    list.trim() == "*" || list.split(',').any(|it| plain(it.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "Sun, 06 Nov 1994 08:49:36 GMT";
    const NOW: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
    const NEW: &str = "Sun, 06 Nov 1994 08:49:38 GMT";
    const VERSION: Version<'_> =
        Version { tag: Some("\"a\""), changed: Some(784_111_777), may_change: false };

    fn conditions(fields: &[(&str, &str)]) -> Conditions {
        let mut out = Conditions::default();
        assert!(fields.iter().all(|(name, value)| out.take(name, value)));
        out
    }

    #[test]
    fn each_is_judged_as_it_is_meant() {
        let (failed, known) = (Some(Status::PreconditionFailed), Some(Status::NotModified));
        for (name, value, judged) in [
            ("if-match", "\"a\"", None),
            ("if-match", "\"b\", \"a\"", None),
            ("if-match", "*", None),
            ("if-match", "\"b\"", failed),
            // What is weak is not known to be the same.
            ("if-match", "W/\"a\"", failed),
            ("if-match", "a", failed),
            ("if-unmodified-since", NOW, None),
            ("if-unmodified-since", NEW, None),
            ("if-unmodified-since", OLD, failed),
            ("if-unmodified-since", "yesterday", None),
            ("if-none-match", "\"b\"", None),
            ("if-none-match", "\"b\",\"a\"", known),
            ("if-none-match", "W/\"a\"", known),
            ("if-none-match", "*", known),
            ("if-modified-since", OLD, None),
            ("if-modified-since", NOW, known),
            ("if-modified-since", NEW, known),
            ("if-modified-since", "yesterday", None),
        ] {
            assert_eq!(conditions(&[(name, value)]).judge(VERSION), judged, "{name}: {value}");
        }
        assert!(!Conditions::default().take("range", "bytes=0-"));
    }

    #[test]
    fn what_may_change_again_is_not_known_by_its_date() {
        let version = Version { may_change: true, ..VERSION };
        let judge = |name, value| conditions(&[(name, value)]).judge(version);
        assert_eq!(judge("if-unmodified-since", OLD), Some(Status::PreconditionFailed));
        assert_eq!(judge("if-unmodified-since", NOW), None);
        assert_eq!(judge("if-modified-since", NOW), None);
        assert!(!conditions(&[("if-range", NOW)]).allows_part(version));
        assert!(conditions(&[("if-range", "\"a\"")]).allows_part(version));
        assert_eq!(version.date(), None, "nor is it told");
    }

    #[test]
    fn tags_come_before_dates_and_what_must_be_before_what_is_known() {
        let (failed, known) = (Some(Status::PreconditionFailed), Some(Status::NotModified));
        for (fields, judged) in [
            ([("if-match", "\"a\""), ("if-unmodified-since", OLD)], None),
            ([("if-none-match", "\"b\""), ("if-modified-since", NEW)], None),
            ([("if-none-match", "\"a\""), ("if-modified-since", OLD)], known),
            ([("if-match", "\"b\""), ("if-none-match", "\"a\"")], failed),
            ([("if-match", "\"a\""), ("if-none-match", "\"a\"")], known),
            ([("if-unmodified-since", OLD), ("if-modified-since", NEW)], failed),
            // A list in two fields is one list.
            ([("if-match", "\"b\""), ("if-match", "\"a\"")], None),
        ] {
            assert_eq!(conditions(&fields).judge(VERSION), judged, "{fields:?}");
        }
    }

    #[test]
    fn what_has_no_version_is_there_all_the_same() {
        let judge = |name, value| conditions(&[(name, value)]).judge(Version::default());
        assert_eq!(judge("if-match", "*"), None);
        assert_eq!(judge("if-match", "\"a\""), Some(Status::PreconditionFailed));
        assert_eq!(judge("if-none-match", "\"a\""), None);
        assert_eq!(judge("if-unmodified-since", OLD), None);
        assert_eq!(judge("if-modified-since", NEW), None);
    }

    #[test]
    fn a_part_is_one_of_exactly_that_version() {
        let allowed = |value| conditions(&[("if-range", value)]).allows_part(VERSION);
        assert!(allowed("\"a\"") && allowed(NOW));
        assert!(Conditions::default().allows_part(VERSION));
        for other in ["\"b\"", "W/\"a\"", OLD, NEW, "yesterday", "", "*"] {
            assert!(!allowed(other), "{other}");
        }
        assert!(!conditions(&[("if-range", NOW)]).allows_part(Version::default()));
    }
}
