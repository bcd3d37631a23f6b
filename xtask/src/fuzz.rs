//! Runs the fuzz targets of `fuzz/` for a bounded number of inputs, on stable Rust.
//!
//! The targets are built as they are, against `xtask/fuzz-driver` in place of libfuzzer-sys, from a manifest
//! made of `fuzz/Cargo.toml`. The gate gives each target the inputs of `fuzz/seeds`, which earlier campaigns
//! have found, and random ones. A campaign (`--guided`) instruments the targets, and keeps what reaches new
//! code.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context, Result, bail, ensure};
use toml::{Table, Value};

use crate::tools;

/// How much to run.
#[derive(clap::Args, Clone)]
pub(crate) struct Options {
    /// Inputs for each target.
    #[arg(long, default_value_t = 50_000)]
    runs: u64,
    /// Keep inputs that reach new code, in fuzz/corpus, and change them further.
    #[arg(long)]
    guided: bool,
    /// End a guided target after so many seconds, if it is not done.
    #[arg(long, default_value_t = 0, requires = "guided")]
    seconds: u64,
    /// Write what guided targets have found to fuzz/seeds, as little of it as reaches the same code.
    #[arg(long, requires = "guided")]
    save: bool,
    /// Where the inputs come from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only this target.
    #[arg(long)]
    target: Option<String>,
    /// Give the target this one input instead.
    #[arg(long, requires = "target")]
    replay: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            runs: 50_000,
            guided: false,
            seconds: 0,
            save: false,
            seed: 1,
            target: None,
            replay: None,
        }
    }
}

/// LLVM's sanitizer coverage, by options that stable Rust has: a counter for each edge, and the operands of
/// comparisons.
const INSTRUMENTED: [&str; 5] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=3",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
];
/// Tells a target how many inputs there are of earlier campaigns. When it was given all, it looks whether
/// they came to the places that matter.
const CORPUS_INPUTS: &str = "FUZZ_CORPUS_INPUTS";

/// Builds and runs the targets.
pub(crate) fn run(options: &Options) -> Result<()> {
    count(options).map(drop)
}

/// As [`run`]; how many targets were run.
pub(crate) fn count(options: &Options) -> Result<usize> {
    let work = crate::target_dir().join(if options.guided { "fuzz-guided" } else { "fuzz-smoke" });
    let manifest = work.join("Cargo.toml");
    fs::create_dir_all(&work)?;
    let fuzz = crate::root().join("fuzz");
    let text = fs::read_to_string(fuzz.join("Cargo.toml")).context("fuzz/Cargo.toml")?;
    let (text, mut targets) = adapt(&text, &fuzz)?;
    fs::write(&manifest, text)?;
    // The versions that the workspace was tested with.
    fs::copy(crate::root().join("Cargo.lock"), work.join("Cargo.lock"))?;
    if let Some(only) = &options.target {
        targets.retain(|target| target == only);
        ensure!(!targets.is_empty(), "fuzz/Cargo.toml has no target {only}");
    }
    let mut build = crate::cargo();
    build.args(["build", "--quiet", "--release", "--manifest-path"]).arg(&manifest);
    build.arg("--target-dir").arg(work.join("target"));
    if let Some(only) = &options.target {
        build.args(["--bin", only]);
    }
    let mut built = work.join("target");
    if options.guided {
        // With a target named, what cargo runs itself is built without these flags.
        let host = tools::host().context("rustc does not say which machine it is for")?;
        build.args(["--target", &host]).env("RUSTFLAGS", INSTRUMENTED.join(" "));
        built.push(host);
    }
    ensure!(build.status().context("cargo")?.success(), "the fuzz targets do not build");

    let bad = run_all(options, &targets, &built.join("release"))?;
    if !bad.is_empty() {
        bail!("{}", bad.join("\n"));
    }
    Ok(targets.len())
}

/// Runs the targets in a folder, one on each processor; what to say of those that have failed.
fn run_all(options: &Options, targets: &[String], folder: &Path) -> Result<Vec<String>> {
    // Those of whole adapters and stacks stand last, and take longest.
    let next = Mutex::new(targets.iter().rev());
    let work = || {
        let mut bad = Vec::new();
        loop {
            let target = next.lock().expect("nobody panics with it").next();
            let Some(target) = target else { return Ok(bad) };
            let artifacts = crate::root().join("fuzz/artifacts").join(target);
            if !run_one(options, target, folder, &artifacts)? {
                bad.push(format!(
                    "{target}: replay with `cargo xtask fuzz --target {target} --replay FILE`, FILE \
                     being the input named above"
                ));
            }
        }
    };
    std::thread::scope(|scope| {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..count.min(targets.len())).map(|_| scope.spawn(work)).collect();
        let bad = workers.into_iter().map(|worker| worker.join().expect("it does not panic"));
        Ok(bad.collect::<Result<Vec<_>>>()?.concat())
    })
}

/// Runs a target; whether it found nothing.
fn run_one(options: &Options, target: &str, folder: &Path, artifacts: &Path) -> Result<bool> {
    let mut command = Command::new(folder.join(target));
    let seeds = crate::root().join("fuzz/seeds").join(target);
    let (seed, runs) = (options.seed.to_string(), options.runs.to_string());
    match &options.replay {
        Some(file) => drop(command.arg("--replay").arg(file)),
        None if options.guided => {
            let corpus = begin_corpus(target, &seeds)?;
            command.args(["--guided", &seed, &runs, &options.seconds.to_string()]);
            command.arg(artifacts).arg(corpus);
        }
        None => {
            command.args([seed, runs]).arg(artifacts);
            if seeds.is_file() {
                let count = corpus::read(&seeds)?.len();
                command.arg(&seeds).env(CORPUS_INPUTS, count.to_string());
            }
        }
    }
    let ended = command.status().with_context(|| format!("cannot run {target}"))?;
    if let (Some(signal), None) = (ended.signal(), &options.replay) {
        // The driver wrote it down before it gave it to the target.
        let kept = artifacts.join(format!("seed-{}-signal-{signal}", options.seed));
        fs::rename(artifacts.join(format!("seed-{}-current", options.seed)), &kept)
            .with_context(|| format!("{target}: ended by signal {signal}, without an input"))?;
        println!("{target}: ended by signal {signal}; the input is {}", kept.display());
    }
    if options.save && ended.success() {
        save(target, &seeds)?;
    }
    let verdict = if ended.success() { "no panic" } else { "FAILED" };
    println!("{target}: {verdict}");
    Ok(ended.success())
}

/// What earlier campaigns of this machine have found; at first, what the repository has.
fn begin_corpus(target: &str, seeds: &Path) -> Result<PathBuf> {
    let folder = crate::root().join("fuzz/corpus");
    fs::create_dir_all(&folder)?;
    let corpus = folder.join(target);
    if !corpus.exists() && seeds.is_file() {
        fs::copy(seeds, &corpus)?;
    }
    Ok(corpus)
}

/// Puts the few inputs that reach everything into the repository.
fn save(target: &str, seeds: &Path) -> Result<()> {
    let small = crate::root().join("fuzz/corpus").join(target).with_extension("small");
    fs::create_dir_all(crate::root().join("fuzz/seeds"))?;
    fs::copy(&small, seeds).with_context(|| format!("cannot save {}", small.display()))?;
    Ok(())
}

/// The manifest that builds the same targets with the driver, and the targets' names.
fn adapt(manifest: &str, fuzz: &Path) -> Result<(String, Vec<String>)> {
    let mut table: Table = manifest.parse().context("fuzz/Cargo.toml")?;
    let dependencies = table.get_mut("dependencies").and_then(Value::as_table_mut);
    let dependencies = dependencies.context("fuzz/Cargo.toml has no dependencies")?;
    for (name, dependency) in dependencies.iter_mut() {
        if name == "libfuzzer-sys" {
            let driver = crate::root().join("xtask/fuzz-driver");
            let driver = Value::String(driver.display().to_string());
            let features = dependency.get("features").cloned();
            let mut stand_in = Table::from_iter([("path".to_owned(), driver)]);
            stand_in.extend(features.map(|features| ("features".to_owned(), features)));
            *dependency = Value::Table(stand_in);
        } else if let Some(Value::String(path)) = dependency.get_mut("path") {
            *path = fuzz.join(&*path).display().to_string();
        }
    }
    let bins = table.get_mut("bin").and_then(Value::as_array_mut);
    let mut targets = Vec::new();
    for bin in bins.context("fuzz/Cargo.toml has no targets")? {
        if let Some(Value::String(path)) = bin.get_mut("path") {
            *path = fuzz.join(&*path).display().to_string();
        }
        targets.extend(bin.get("name").and_then(Value::as_str).map(str::to_owned));
    }
    Ok((table.to_string(), targets))
}

/// As the driver reads and writes it.
#[allow(dead_code)]
#[path = "../fuzz-driver/src/corpus.rs"]
mod corpus;
/// The driver itself, for its tests.
#[cfg(test)]
#[allow(dead_code)]
#[path = "../fuzz-driver/src/random.rs"]
mod random;
#[cfg(test)]
#[allow(dead_code)]
#[path = "../fuzz-driver/src/record.rs"]
mod record;
#[cfg(test)]
#[allow(dead_code)]
#[path = "../fuzz-driver/src/smoke.rs"]
mod smoke;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_manifest_is_adapted() {
        let manifest = "[dependencies]\nlibfuzzer-sys = \"0.4\"\nx = { path = \"../x\" }\n\
                        [[bin]]\nname = \"t\"\npath = \"fuzz_targets/t.rs\"\n";
        let (text, targets) = adapt(manifest, Path::new("/f")).unwrap();
        assert_eq!(targets, ["t"]);
        let table: Table = text.parse().unwrap();
        assert_eq!(table["bin"][0]["path"].as_str(), Some("/f/fuzz_targets/t.rs"));
        assert_eq!(table["dependencies"]["x"]["path"].as_str(), Some("/f/../x"));
        let driver = table["dependencies"]["libfuzzer-sys"]["path"].as_str().unwrap();
        assert!(driver.ends_with("xtask/fuzz-driver"));
    }

    #[test]
    fn targets_are_built_with_every_check_and_each_is_in_the_manifest() {
        let fuzz = crate::root().join("fuzz");
        let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
        let (text, mut targets) = adapt(&manifest, &fuzz).unwrap();
        let table: Table = text.parse().unwrap();
        for check in ["debug-assertions", "overflow-checks"] {
            assert_eq!(table["profile"]["release"][check].as_bool(), Some(true), "{check}");
        }
        let mut found = Vec::new();
        for entry in fs::read_dir(fuzz.join("fuzz_targets")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() && fs::read_to_string(&path).unwrap().contains("\nfuzz_target!(") {
                found.push(path.file_stem().unwrap().to_str().unwrap().to_owned());
            }
        }
        targets.sort();
        found.sort();
        assert_eq!(targets, found);
    }

    /// A folder of this test's own.
    fn folder(name: &str) -> PathBuf {
        let folder = crate::target_dir().join("tmp").join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn the_input_that_ends_a_target_by_a_signal_is_kept() {
        let folder = folder("signal");
        // As the driver does it, and then as if the target had touched what is not there.
        let script = "#!/bin/sh\nprintf bad > \"$3/seed-$1-current\"\nkill -SEGV $$\n";
        fs::write(folder.join("t"), script).unwrap();
        fs::set_permissions(folder.join("t"), fs::Permissions::from_mode(0o700)).unwrap();
        let options = Options { runs: 1, seed: 7, ..Options::default() };
        assert!(!run_one(&options, "t", &folder, &folder).unwrap());
        assert_eq!(fs::read(folder.join("seed-7-signal-11")).unwrap(), b"bad");
        assert!(!folder.join("seed-7-current").exists());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_current_input_is_in_a_file_while_the_target_runs() {
        fn target(input: &[u8]) {
            let folder = crate::target_dir().join("tmp");
            let file = folder.join(format!("current-{}/seed-3-current", std::process::id()));
            assert_eq!(fs::read(file).unwrap(), input);
        }
        let folder = folder("current");
        assert_eq!(smoke::smoke(target, 3, 200, &folder, &[]), 0);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing was found, nothing is left");
        // A corpus that is not there is said to be so.
        let none = folder.join("none").display().to_string();
        assert_eq!(smoke::smoke(target, 3, 1, &folder, &[none]), 2);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_input_that_makes_a_target_panic_is_kept() {
        fn target(input: &[u8]) {
            assert!(input.len() < 20, "too long");
        }
        let folder = folder("panic");
        assert_eq!(smoke::smoke(target, 5, 1000, &folder, &[]), 1);
        let kept: Vec<_> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
        let [kept] = &kept[..] else { panic!("{kept:?}") };
        assert!(fs::read(kept).unwrap().len() >= 20);
        fs::remove_dir_all(folder).unwrap();
    }
}
