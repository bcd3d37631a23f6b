//! Builds for what runs most: once with counters in it, then, when a minute of the benchmark has shown how
//! often everything runs, for good. What is seldom done no longer lies between what is done all the time, and
//! that is inlined.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::stage::{self, Build, Staged};
use crate::tools;

/// Builds everything, with these features; the folder where it is then.
pub(crate) fn build(features: &[String]) -> Result<PathBuf> {
    let host = tools::host().context("rustc does not say for which machine it is")?;
    let merger = tools::llvm_profdata(&host).context(
        "there is no llvm-profdata of this rustc, which puts the counts together: \
         rustup component add llvm-tools",
    )?;
    let dir = crate::target_dir().join("profiled");
    // With a target named, what only the build runs has no counters.
    let build = |name: &str, flag: String| {
        let (target_dir, target) = (&*dir.join(name), Some(host.as_str()));
        stage::build(&Build { target_dir, target, features, flag: Some(flag) })
    };
    println!("profile: building with counters");
    let counting = build("counting", "-Cprofile-generate".to_owned())?;
    // Gone once it has counted: it is slow, and nobody is to take it for what was built.
    let counter = dir.join("counter");
    let counts = count(&stage::place(&counting, &counter)?, &dir.join("counts"))?;
    fs::remove_dir_all(&counter).with_context(|| format!("cannot remove {}", counter.display()))?;
    let profile = dir.join("profile.profdata");
    let mut merge = Command::new(merger);
    merge.arg("merge").arg("-o").arg(&profile).arg(&counts);
    ensure!(merge.status().context("llvm-profdata")?.success(), "the counts do not fit together");
    println!("profile: building for what they say");
    build("fitted", format!("-Cprofile-use={}", profile.display()))
}

/// Runs the quick part of the benchmark; the folder with the counts.
fn count(staged: &Staged, counts: &Path) -> Result<PathBuf> {
    if counts.exists() {
        fs::remove_dir_all(counts).with_context(|| format!("cannot empty {}", counts.display()))?;
    }
    let mut bench = Command::new(&staged.quipu);
    bench.args(["bench", "--quick"]).current_dir(crate::root()).stdout(Stdio::null());
    // What it measures is that of a program which counts; but it fills a few files, each with the counts of
    // many processes.
    bench.env("LLVM_PROFILE_FILE", counts.join("%4m.profraw"));
    ensure!(bench.status().context("quipu bench")?.success(), "the benchmark failed");
    Ok(counts.to_path_buf())
}
