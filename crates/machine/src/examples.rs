//! Plans that come with the crate.

use crate::plan::Plan;

/// A plan that comes with the crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Example {
    /// Its name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

const EXAMPLES: &[Example] = &[
    Example { name: "sinic", text: include_str!("../plans/sinic.toml") },
    Example { name: "commodity", text: include_str!("../plans/commodity.toml") },
    Example { name: "zero-copy", text: include_str!("../plans/zero-copy.toml") },
    Example { name: "paper", text: include_str!("../plans/paper.toml") },
    Example { name: "qpip", text: include_str!("../plans/qpip.toml") },
    Example { name: "qos", text: include_str!("../plans/qos.toml") },
    Example { name: "today", text: include_str!("../plans/today.toml") },
];

/// All of them.
#[must_use]
pub fn examples() -> &'static [Example] {
    EXAMPLES
}

/// The one of a name.
#[must_use]
pub fn example(name: &str) -> Option<Example> {
    EXAMPLES.iter().find(|example| example.name == name).copied()
}

impl Example {
    /// What it shows; empty if its text is no plan, which a test excludes.
    #[must_use]
    pub fn about(&self) -> String {
        Plan::parse(self.text).map(|plan| plan.about).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_plans_and_say_what_they_show() {
        for example in examples() {
            let plan = Plan::parse(example.text);
            assert_eq!(plan.map(|plan| plan.name), Ok(example.name.to_owned()));
            assert!(!example.about().is_empty(), "{}", example.name);
        }
        assert_eq!(example("nothing"), None);
    }
}
