//! The test programs of the workspace, several at a time: most of them wait longer than they compute.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::heard::Heard;
use crate::report::{self, Tally};

/// A program that cargo has built for tests.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    name: String,
    executable: PathBuf,
    /// The folder of its package, where cargo runs it.
    folder: PathBuf,
}

/// Builds the test programs and runs them, one for each processor at a time. What they printed comes when
/// they end, in one piece. The sum of their results, and why tests were skipped.
pub(crate) fn run() -> Result<(Tally, Vec<String>)> {
    let programs = build()?;
    ensure!(!programs.is_empty(), "cargo has built no test program");
    let next = Mutex::new(programs.iter());
    let heard = Mutex::new(Heard::default());
    let work = || {
        loop {
            let program = next.lock().expect("nobody panics with it").next();
            let Some(program) = program else { return Ok(()) };
            let begun = Instant::now();
            let (said, is_good) = say(program)?;
            let mut heard = heard.lock().expect("nobody panics with it");
            println!("--- {} ({:.1} s)", program.name, begun.elapsed().as_secs_f64());
            take(&mut heard, &program.name, &said, is_good);
        }
    };
    std::thread::scope(|scope| {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..count).map(|_| scope.spawn(work)).collect();
        let ends = workers.into_iter().map(|worker| worker.join().expect("it does not panic"));
        ends.collect::<Result<Vec<()>>>()
    })?;
    Ok(heard.into_inner().expect("nobody panics with it").finish())
}

/// Takes what a program has said. One that died has failed, although none of its tests says so.
fn take(heard: &mut Heard, name: &str, said: &str, is_good: bool) {
    let failed_before = heard.tally.failed;
    said.lines().for_each(|line| heard.hear(line));
    if !is_good && heard.tally.failed == failed_before {
        heard.tally.failed += 1;
        report::note_failure(&format!("FAIL  {name}: it died; what it said last:\n{said}"));
    }
}

fn build() -> Result<Vec<Program>> {
    let mut command = crate::cargo();
    command.args(["test", "--workspace", "--all-targets", "--no-run"]);
    command.arg("--message-format=json-render-diagnostics").current_dir(crate::root());
    let mut child = command.stdout(Stdio::piped()).spawn().context("cargo")?;
    let output = child.stdout.take().context("no standard output")?;
    let mut programs = Vec::new();
    for line in BufReader::new(output).lines() {
        programs.extend(program(&serde_json::from_str(&line?)?));
    }
    ensure!(child.wait()?.success(), "the tests do not build; see above");
    // Tests have cargo build libraries of C. Nothing is linked any more while others use it.
    let mut command = crate::cargo();
    command.args(["build", "-q", "--workspace", "--all-targets"]).current_dir(crate::root());
    ensure!(command.status().context("cargo")?.success(), "the libraries do not build; see above");
    Ok(programs)
}

/// The test program in a message of cargo's, if it is about one.
fn program(message: &Value) -> Option<Program> {
    let is_test = message["profile"]["test"].as_bool()?;
    let executable = PathBuf::from(message["executable"].as_str()?);
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let package = folder.file_name()?.to_string_lossy();
    let name = format!("{package}: {}", message["target"]["name"].as_str()?);
    is_test.then_some(Program { name, executable, folder })
}

/// Runs a program to its end. What it printed, and whether it ended well.
fn say(program: &Program) -> Result<(String, bool)> {
    let (mut reader, writer) = std::io::pipe()?;
    let mut command = Command::new(&program.executable);
    command.arg("--show-output").current_dir(&program.folder);
    // The packages that tests need are installed: none may do without.
    command.env("QUIPU_TEST_ALL", "1");
    crate::forget_package(&mut command);
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", program.name))?;
    // It has this process's ends of the pipe.
    drop(command);
    let mut said = Vec::new();
    reader.read_to_end(&mut said)?;
    Ok((String::from_utf8_lossy(&said).into_owned(), child.wait()?.success()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn test_programs_are_found_among_what_cargo_builds() {
        let of = |test: bool, executable: &str| {
            let text = format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/crates/mem/Cargo.toml",
                "target":{{"name":"rings"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            );
            program(&serde_json::from_str(&text).unwrap())
        };
        let found = of(true, "\"/t/rings-1\"").unwrap();
        assert_eq!(found.name, "mem: rings");
        assert_eq!(found.executable, Path::new("/t/rings-1"));
        assert_eq!(found.folder, Path::new("/w/crates/mem"));
        assert_eq!(of(false, "\"/t/rings-1\""), None);
        assert_eq!(of(true, "null"), None);
        assert_eq!(program(&serde_json::json!({"reason": "build-finished"})), None);
    }

    fn shell(script: &str) -> Program {
        let folder = std::env::temp_dir();
        let executable =
            folder.join(format!("quipu-program-{}-{}", std::process::id(), script.len()));
        std::fs::write(&executable, format!("#!/bin/sh\n{script}\n")).unwrap();
        let may_run = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&executable, may_run).unwrap();
        Program { name: "a program".into(), executable, folder }
    }

    #[test]
    fn a_program_that_dies_has_failed() {
        let program = shell("echo running 3 tests; echo to err >&2; kill -9 $$");
        let (said, is_good) = say(&program).unwrap();
        std::fs::remove_file(&program.executable).unwrap();
        assert_eq!((said.as_str(), is_good), ("running 3 tests\nto err\n", false));
        let mut heard = Heard::default();
        take(&mut heard, "a program", &said, is_good);
        assert_eq!(heard.tally.failed, 1);
        take(&mut heard, "another", "test result: FAILED. 1 passed; 2 failed; 0 ignored", false);
        assert_eq!(heard.tally, Tally { passed: 1, failed: 3, skipped: 0 });
    }
}
