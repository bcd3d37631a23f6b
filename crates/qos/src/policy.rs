//! Rules that give a service level to a service: the `qos-ulps` section of OpenSM's policy file.

use std::ops::RangeInclusive;

use crate::config::number;

/// A service that wants a service level.
#[derive(Clone, Copy, Debug, Default)]
pub struct Service<'a> {
    /// Its service ID, if connection management knows it (IBA A11; rdma_cm: port space and port).
    pub id: Option<u64>,
    /// The name of the program.
    pub program: &'a str,
    /// Whether it is IP over InfiniBand.
    pub is_ipoib: bool,
}

/// What a rule matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ulp {
    /// Everything that no other rule matches.
    Default,
    /// Service IDs in this range.
    Ids(RangeInclusive<u64>),
    /// Everything: of a partition that every port here is in.
    All,
    /// A program of this name. This is Quipu's own; OpenSM does not have it.
    Program(String),
    /// IP over InfiniBand, of a partition that every port here is in.
    Ipoib,
    /// A port GUID, a partition, or SRP: known, and matched by nothing here.
    Nothing,
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// What it matches.
    pub ulp: Ulp,
    /// The service level, 0 to 15.
    pub sl: u8,
    /// How it is written.
    pub text: String,
}

/// Service IDs of SDP: the port space, and a port in the last 16 bits.
const SDP: u64 = 0x0001_0000;
/// Service IDs of RDMA connection management over TCP ports.
const TCP: u64 = 0x0106_0000;
/// RDS's port in that space.
const RDS: u64 = TCP | 0x48ca;
/// iSER's.
const ISER: u64 = TCP | 0x0cbc;

impl Rule {
    /// Reads a rule such as `sdp, port-num 5000-6000 : 2`, and whether nothing here matches it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let Some((service, sl)) = text.rsplit_once(':') else {
            return Err(format!("`{text}` is no rule: a rule is SERVICE : SERVICE_LEVEL"));
        };
        let sl = match number(sl) {
            Some(sl @ 0..=15) => sl as u8,
            _ => return Err(format!("`{}` is no service level: they are 0 to 15", sl.trim())),
        };
        let (name, rest) = service.split_once(',').unwrap_or((service, ""));
        let (name, rest) = (name.trim().to_ascii_lowercase(), rest.trim());
        let (key, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let value = value.trim();
        let ulp = match (name.as_str(), key) {
            ("default", "") => Ulp::Default,
            ("sdp", "") => Ulp::Ids(SDP..=SDP | 0xffff),
            ("sdp", "port-num") => ports(SDP, value)?,
            ("rds", "") => Ulp::Ids(RDS..=RDS),
            ("rds" | "iser", "port-num") => ports(TCP, value)?,
            ("iser", "") => Ulp::Ids(ISER..=ISER),
            ("any", "service-id") => Ulp::Ids(range(value)?),
            ("any", "pkey") if holds_default(value)? => Ulp::All,
            ("ipoib", "pkey") if holds_default(value)? => Ulp::Ipoib,
            ("any" | "ipoib", "pkey") => Ulp::Nothing,
            ("ipoib", "") => Ulp::Ipoib,
            (
                "any" | "srp",
                "target-port-guid" | "source-port-guid" | "source-target-port-guid",
            ) => {
                range(value)?;
                Ulp::Nothing
            }
            ("program", program) if !program.is_empty() && value.is_empty() => {
                Ulp::Program(program.to_owned())
            }
            _ => {
                return Err(format!(
                    "`{}` is no service: default, sdp, rds, iser, ipoib, srp, any, program",
                    service.trim()
                ));
            }
        };
        Ok(Self { ulp, sl, text: text.trim().to_owned() })
    }
}

fn range(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (number(first), number(last)) {
        (Some(first), Some(last)) if first <= last => Ok(first..=last),
        _ => Err(format!("`{text}` is no number or range, such as 5000-6000")),
    }
}

fn ports(space: u64, text: &str) -> Result<Ulp, String> {
    let ports = range(text)?;
    if *ports.end() > 0xffff {
        return Err(format!("`{text}` has a port above 65535"));
    }
    Ok(Ulp::Ids(space | ports.start()..=space | ports.end()))
}

/// Whether partition keys hold that of the default partition, in which every port here is.
fn holds_default(text: &str) -> Result<bool, String> {
    const DEFAULT: u64 = 0x7fff;
    let keys = range(text)?;
    Ok((0..=1).any(|member| keys.contains(&(DEFAULT | member << 15))))
}

/// The service levels of service IDs: of a program, whose name rules may name before.
pub(crate) fn levels_of_ids(rules: &[Rule], program: &str) -> Vec<(RangeInclusive<u64>, u8)> {
    let all = || 0..=u64::MAX;
    let ids = rules.iter().filter_map(|rule| match &rule.ulp {
        Ulp::Ids(ids) => Some((ids.clone(), rule.sl)),
        Ulp::All => Some((all(), rule.sl)),
        Ulp::Program(name) if name == program => Some((all(), rule.sl)),
        _ => None,
    });
    ids.collect()
}

/// The service level that the first matching rule gives, or else the default rule.
pub(crate) fn service_level(rules: &[Rule], service: &Service<'_>) -> Option<u8> {
    let matches = |rule: &&Rule| match &rule.ulp {
        Ulp::Ids(ids) => service.id.is_some_and(|id| ids.contains(&id)),
        Ulp::All => true,
        Ulp::Program(name) => name == service.program,
        Ulp::Ipoib => service.is_ipoib,
        Ulp::Default | Ulp::Nothing => false,
    };
    let default = || rules.iter().find(|rule| rule.ulp == Ulp::Default);
    rules.iter().find(matches).or_else(default).map(|rule| rule.sl)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(rules: &[&str], id: Option<u64>, program: &str) -> Option<u8> {
        let rules: Vec<_> = rules.iter().map(|rule| Rule::parse(rule).unwrap()).collect();
        service_level(&rules, &Service { id, program, is_ipoib: false })
    }

    #[test]
    fn rules_for_ipoib_match_nothing_else() {
        for (rule, matches) in [
            ("ipoib : 3", true),
            ("ipoib, pkey 0xffff : 3", true),
            ("ipoib, pkey 0x1 : 3", false),
            ("any, pkey 0x7fff-0x8000 : 3", true),
        ] {
            let rules = [Rule::parse(rule).unwrap()];
            let ipoib = Service { is_ipoib: true, ..Service::default() };
            assert_eq!(service_level(&rules, &ipoib), matches.then_some(3), "{rule}");
        }
        assert_eq!(level(&["ipoib, pkey 0xffff : 3"], Some(7), "x"), None);
    }

    #[test]
    fn the_first_rule_that_matches_counts() {
        let rules = [
            "default : 1",
            "sdp, port-num 5000-6000 : 2",
            "sdp : 3",
            "rds : 4",
            "iser, port-num 900 : 5",
            "iser : 6",
            "any, service-id 0x1234-0x1240 : 7",
            "program, : 0",
        ];
        let rules = &rules[..7];
        assert_eq!(level(rules, None, "x"), Some(1));
        assert_eq!(level(rules, Some(0x10000 + 5500), "x"), Some(2));
        assert_eq!(level(rules, Some(0x10000 + 1), "x"), Some(3));
        assert_eq!(level(rules, Some(0x0106_48ca), "x"), Some(4));
        assert_eq!(level(rules, Some(0x0106_0000 + 900), "x"), Some(5));
        assert_eq!(level(rules, Some(0x0106_0cbc), "x"), Some(6));
        assert_eq!(level(rules, Some(0x1240), "x"), Some(7));
        assert_eq!(level(&["any, pkey 0x7FFF : 9"], None, ""), Some(9));
        assert_eq!(level(&["any, pkey 0x1 : 9"], None, ""), None);
        assert_eq!(level(&["program, perf : 8"], None, "perf"), Some(8));
    }

    #[test]
    fn service_ids_have_levels_in_the_order_of_the_rules() {
        let rules = ["program, a : 1", "sdp, port-num 5 : 2", "default : 3", "sdp : 4"];
        let rules: Vec<_> = rules.iter().map(|rule| Rule::parse(rule).unwrap()).collect();
        let levels = levels_of_ids(&rules, "b");
        assert_eq!(levels, [(0x1_0005..=0x1_0005, 2), (0x1_0000..=0x1_ffff, 4)]);
        assert_eq!(levels_of_ids(&rules, "a")[0], (0..=u64::MAX, 1));
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in [
            "sdp",
            "sdp : 16",
            "tcp : 1",
            "sdp, port-num 9-5 : 1",
            "sdp, port-num 70000 : 1",
            "any : 1",
            "default, x : 1",
            "any, service-id : 1",
            "program : 1",
            ":",
            "",
        ] {
            assert!(Rule::parse(text).is_err(), "{text}");
        }
    }
}
