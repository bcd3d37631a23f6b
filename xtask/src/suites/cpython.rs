//! CPython's own tests of sockets, waiting and processes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs, process};

use anyhow::{Context, Result};

use super::results::{Outcome, Results};
use super::{Prefix, Suite};
use crate::process::capture;

/// Modules of the package `test`.
const MODULES: [&str; 15] = [
    "test_socket",
    "test_ssl",
    "test_selectors",
    "test_epoll",
    "test_poll",
    "test_select",
    "test_socketserver",
    "test_httpservers",
    "test_ftplib",
    "test_subprocess",
    "test_asyncio",
    "test_multiprocessing_main_handling",
    "test_multiprocessing_fork",
    "test_multiprocessing_forkserver",
    "test_multiprocessing_spawn",
];
/// A module that runs only where tests may use the network, although it uses only this host.
const LOCAL: &str = "test_socketserver";
/// Tests that hang on some machines without Quipu too.
const IGNORED: [&str; 1] = ["*VSOCK*"];

/// Prints those of its arguments that are modules or folders of the package `test`.
const PRESENT: &str = "
import os, sys, test.support
folder = os.path.dirname(test.__file__)
is_there = lambda name: any(os.path.exists(os.path.join(folder, name + end)) for end in ('', '.py'))
print(*filter(is_there, sys.argv[1:]))
";

fn present(python: &Path) -> Vec<&'static str> {
    let mut ask = Command::new(python);
    ask.args(["-c", PRESENT]).args(MODULES);
    let said = capture(ask, Duration::from_secs(60)).map(|ended| ended.stdout).unwrap_or_default();
    let said: Vec<&str> = said.split_whitespace().collect();
    MODULES.into_iter().filter(|module| said.contains(module)).collect()
}

/// The modules that this Python has.
pub(crate) fn suites(python: &Path) -> Vec<Suite> {
    let suite = |module: &'static str| {
        let python = python.to_path_buf();
        Suite {
            name: format!("cpython/{module}"),
            run: Box::new(move |prefix, limit| run(&python, module, prefix, limit)),
        }
    };
    present(python).into_iter().map(suite).collect()
}

/// What to do if there are modules that this Python has not.
pub(crate) fn missing(python: &Path) -> Option<String> {
    let present = present(python);
    let missing: Vec<&str> =
        MODULES.into_iter().filter(|module| !present.contains(module)).collect();
    let how = "install libpython3-testsuite, or name another Python by --python";
    (!missing.is_empty()).then(|| {
        format!("cpython: {} does not have {}: {how}", python.display(), missing.join(", "))
    })
}

/// A folder for one run, removed afterwards.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn run(python: &Path, module: &str, prefix: &Prefix, limit: Duration) -> Result<Results> {
    let folder = Folder(env::temp_dir().join(format!("quipu-suite-{}-{module}", process::id())));
    fs::create_dir_all(&folder.0).with_context(|| folder.0.display().to_string())?;
    let report = folder.0.join("report.xml");
    let mut words: Vec<String> = prefix.clone();
    words.push(python.display().to_string());
    words.extend(["-m", "test", "--timeout", "300", "--junit-xml"].map(str::to_owned));
    words.push(report.display().to_string());
    words.extend(IGNORED.into_iter().flat_map(|pattern| ["-i".to_owned(), pattern.to_owned()]));
    words.extend((module == LOCAL).then(|| "-unetwork".to_owned()));
    words.push(module.to_owned());
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).current_dir(&folder.0);
    let ended = capture(command, limit)?;
    let mut results = read(&fs::read_to_string(&report).unwrap_or_default());
    if !ended.success() && !results.has_failed() {
        results.add(&format!("the module {}", ended.verdict()), Outcome::Failed);
    }
    Ok(results)
}

/// The results in a report: elements `testcase`, which have others inside where they did not pass.
fn read(report: &str) -> Results {
    let mut results = Results::default();
    for case in report.split("<testcase ").skip(1) {
        let Some((_, name)) = case.split_once("name=\"") else { continue };
        let Some((name, _)) = name.split_once('"') else { continue };
        let case = case.split_once("</testcase>").map_or(case, |(inside, _)| inside);
        let has = |element: &str| case.contains(&format!("<{element}"));
        let outcome = match () {
            () if has("failure") || has("error") => Outcome::Failed,
            () if has("skipped") => Outcome::Skipped,
            () => Outcome::Passed,
        };
        results.add(name, outcome);
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"<testsuites><testsuite name="t">
        <testcase name="test.t.A.test_one" status="run" result="completed" time="0.1" />
        <testcase name="test.t.A.test_two" status="run" result="completed"><error>text</error></testcase>
        <testcase name="test.t.A.test_three" status="run" result="completed"><skipped>no</skipped></testcase>
        <testcase name="test.t.A.test_four" status="run" result="completed"><system-out>a</system-out></testcase>
        </testsuite></testsuites>"#;

    #[test]
    fn a_report_is_read() {
        let tally = read(REPORT).tally().to_string();
        assert_eq!(tally, "2 passed, 1 failed, 1 skipped");
        assert_eq!(read("").tally().to_string(), "0 passed, 0 failed, 0 skipped");
    }
}
