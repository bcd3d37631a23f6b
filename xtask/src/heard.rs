//! What test programs say: their results, and which of their tests had to be skipped. To the harness a test
//! that skips itself has passed, so it says `SKIPPED: why`, which is only shown with `--show-output`.

use std::collections::BTreeMap;

use crate::report::{self, Tally};

/// How a test begins the line in which it says why it was skipped.
const SKIPPED: [&str; 2] = ["SKIPPED: ", "skipped: "];

/// What was heard so far.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub(crate) tally: Tally,
    /// Why tests were skipped, and how many for each reason.
    skipped: BTreeMap<String, usize>,
    /// What comes is the output of tests that have passed.
    of_passed: bool,
    /// The test whose output it is was skipped, which is known already.
    known: bool,
    /// The output of tests that have failed, where it is that which comes.
    of_failed: Option<String>,
    /// The same of the test programs that have ended.
    failures: Vec<String>,
}

impl Heard {
    /// Takes a line, and prints it if it is to be shown.
    pub(crate) fn hear(&mut self, line: &str) {
        if self.take(line) {
            println!("{line}");
        }
    }

    /// Takes a line; whether it is to be shown.
    fn take(&mut self, line: &str) -> bool {
        if let Some(result) = line.strip_prefix("test result:") {
            self.of_passed = false;
            self.tally.add(parse_result(result));
            self.failures.extend(self.of_failed.take());
            return false;
        }
        if let Some(text) = &mut self.of_failed {
            *text += &format!("\n{line}");
        }
        match line {
            "successes:" => self.of_passed = true,
            "failures:" => {
                self.of_passed = false;
                self.of_failed.get_or_insert_with(|| "FAIL  tests".into());
            }
            _ if self.of_passed => self.take_output(line),
            // A line for each of hundreds of tests that pass tells nobody anything.
            _ => {
                return !(line.is_empty()
                    || line.ends_with("... ok")
                    || line.starts_with("running "));
            }
        }
        !self.of_passed
    }

    fn take_output(&mut self, line: &str) {
        if line.starts_with("---- ") {
            self.known = false;
        }
        let why = SKIPPED.iter().find_map(|word| line.strip_prefix(word));
        if let (Some(why), false) = (why, self.known) {
            self.known = true;
            *self.skipped.entry(why.trim().to_owned()).or_default() += 1;
        }
    }

    /// How many tests passed, failed and were skipped, and the reasons of the last. What failed is noted, to
    /// be said again.
    pub(crate) fn finish(self) -> (Tally, Vec<String>) {
        self.failures.iter().for_each(|text| report::note_failure(text));
        let count: usize = self.skipped.values().sum();
        let Tally { passed, failed, skipped } = self.tally;
        let tally =
            Tally { passed: passed.saturating_sub(count), failed, skipped: skipped + count };
        let reasons = self.skipped.iter().map(|(why, count)| format!("{count} skipped: {why}"));
        (tally, reasons.collect())
    }
}

/// Reads " ok. 12 passed; 0 failed; 1 ignored; ...".
fn parse_result(text: &str) -> Tally {
    let of = |what: &str| {
        let part = text.split([';', '.']).find(|part| part.trim().ends_with(what));
        part.and_then(|part| part.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    Tally { passed: of("passed"), failed: of("failed"), skipped: of("ignored") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_test_programs_are_read() {
        let text = " FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; \
                    finished in 0.00s";
        assert_eq!(parse_result(text), Tally { passed: 12, failed: 3, skipped: 1 });
        assert_eq!(parse_result(" gibberish"), Tally::default());
    }

    #[test]
    fn tests_that_skip_themselves_have_not_passed() {
        let said = "\
running 5 tests
test a ... ok
test e ... FAILED

successes:

---- a stdout ----
SKIPPED: no network namespaces here
SKIPPED: no /dev/net/tun here
---- b stdout ----
SKIPPED: no network namespaces here
---- c stdout ----
seed 7
---- d stderr ----
skipped: cmake is not installed

successes:
    a
    b

failures:

---- e stdout ----
it broke
SKIPPED: this is no success

failures:
    e

test result: FAILED. 4 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0s
test f ... ok";
        let mut heard = Heard::default();
        let shown: Vec<_> = said.lines().filter(|line| heard.take(line)).collect();
        assert!(shown.contains(&"it broke") && !shown.contains(&"seed 7"), "{shown:?}");
        let [failure] = &heard.failures[..] else { panic!("{:?}", heard.failures) };
        assert!(failure.contains("\nit broke\n") && !failure.contains("seed 7"), "{failure}");
        let (tally, reasons) = heard.finish();
        assert_eq!(tally, Tally { passed: 1, failed: 1, skipped: 4 });
        let why = ["1 skipped: cmake is not installed", "2 skipped: no network namespaces here"];
        assert_eq!(reasons, why);
    }
}
