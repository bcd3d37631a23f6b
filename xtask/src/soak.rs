//! Long runs beyond the gate: seeds of the simulator that nobody has tried yet.
//!
//! The first seed follows from the commit, so that each commit tries others. It is printed with the command
//! that repeats the run. A soak goes on where it was interrupted as long as the commit is the same.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};

/// How much to run.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seeds of the simulator.
    #[arg(long, default_value_t = 1_000_000)]
    seeds: u64,
    /// The first seed, in place of the one that follows from the commit.
    #[arg(long)]
    from: Option<u64>,
    /// Threads; as many as there are processors by default.
    #[arg(long)]
    threads: Option<usize>,
    /// Begin anew, in place of going on where the last run of the same seeds ended.
    #[arg(long)]
    anew: bool,
}

/// Seeds between two lines of progress. What is interrupted repeats so many at most.
const CHUNK: u64 = 10_000;

/// Where seeds begin, and why there.
pub(crate) struct Base {
    pub(crate) seed: u64,
    pub(crate) of: String,
}

/// The first seed for the commit that is checked out: the first 40 bits of its name.
pub(crate) fn base() -> Base {
    let git = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(crate::root()).output();
    let name = git.ok().filter(|git| git.status.success());
    let name = name.and_then(|git| String::from_utf8(git.stdout).ok()).unwrap_or_default();
    match seed_of(&name) {
        Some(seed) => Base { seed, of: format!("of commit {}", &name[..10]) },
        None => Base { seed: 1, of: "since git knows no commit here".into() },
    }
}

fn seed_of(commit: &str) -> Option<u64> {
    u64::from_str_radix(commit.get(..10)?, 16).ok()
}

/// Builds the command and runs the seeds.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut build = crate::cargo();
    build.args(["build", "--release", "--package", "quipu", "--bin", "quipu"]);
    build.current_dir(crate::root());
    ensure!(build.status().context("cargo")?.success(), "the quipu command does not build");
    let quipu =
        crate::target_dir().join("release").join(format!("quipu{}", env::consts::EXE_SUFFIX));
    let base = match options.from {
        Some(seed) => Base { seed, of: "as asked".into() },
        None => base(),
    };
    let state = State::of(&crate::target_dir().join("soak"), base.seed)?;
    if options.anew {
        state.forget()?;
    }
    let begun = state.done()?.min(options.seeds);
    let total = options.seeds;
    println!("seeds {} to {} ({})", base.seed, base.seed.saturating_add(total), base.of);
    if begun > 0 {
        println!("going on after {begun} seeds that passed before");
    }
    let (mut done, start) = (begun, Instant::now());
    while done < total {
        let count = CHUNK.min(total - done);
        chunk(&quipu, base.seed.saturating_add(done), count, options.threads)?;
        done += count;
        state.write(done)?;
        let seconds = start.elapsed().as_secs_f64();
        let (rate, left) = rate(done - begun, total - done, seconds);
        println!("{done} of {total} seeds passed, {rate:.0} a second, {left:.0} minutes to go");
    }
    println!("{total} seeds passed; repeat with `cargo xtask soak --from {} --anew`", base.seed);
    Ok(())
}

/// Seeds in a second, and the minutes that what is left takes.
fn rate(done: u64, left: u64, seconds: f64) -> (f64, f64) {
    let rate = done as f64 / seconds.max(0.001);
    (rate, left as f64 / rate.max(0.001) / 60.0)
}

fn chunk(quipu: &Path, from: u64, count: u64, threads: Option<usize>) -> Result<()> {
    let mut command = Command::new(quipu);
    command.args(["sim", "--from", &from.to_string(), "--seeds", &count.to_string()]);
    command.args(threads.map(|threads| format!("--threads={threads}")));
    let output = command.output().with_context(|| format!("cannot run {}", quipu.display()))?;
    if !output.status.success() {
        print!("{}", String::from_utf8_lossy(&output.stdout));
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        bail!("a seed from {from} on failed; each line above says how to replay it");
    }
    Ok(())
}

/// How far a soak has come, in a file of its own for each first seed.
struct State(PathBuf);

impl State {
    fn of(folder: &Path, base: u64) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        Ok(Self(folder.join(format!("from-{base}"))))
    }

    /// Seeds that have passed.
    fn done(&self) -> Result<u64> {
        if !self.0.exists() {
            return Ok(0);
        }
        let text = fs::read_to_string(&self.0)?;
        let name = self.0.display();
        text.trim().parse().with_context(|| format!("{name} holds {text:?}, not a number of seeds"))
    }

    fn write(&self, done: u64) -> Result<()> {
        fs::write(&self.0, format!("{done}\n")).with_context(|| self.0.display().to_string())
    }

    fn forget(&self) -> Result<()> {
        if self.0.exists() {
            fs::remove_file(&self.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_gives_a_seed_of_its_own() {
        let name = "00000000ff3b9b1c2d3e4f5061728394a5b6c7d8\n";
        assert_eq!(seed_of(name), Some(0xff));
        assert_ne!(seed_of("10000000ff"), seed_of("20000000ff"));
        assert_eq!((seed_of(""), seed_of("no commit")), (None, None));
    }

    #[test]
    fn a_soak_goes_on_where_it_was_interrupted() {
        let folder = crate::target_dir().join("tmp").join(format!("soak-{}", std::process::id()));
        let state = State::of(&folder, 77).unwrap();
        assert_eq!(state.done().unwrap(), 0);
        state.write(20_000).unwrap();
        assert_eq!(State::of(&folder, 77).unwrap().done().unwrap(), 20_000);
        assert_eq!(State::of(&folder, 78).unwrap().done().unwrap(), 0, "other seeds");
        fs::write(folder.join("from-77"), "nonsense").unwrap();
        assert!(state.done().unwrap_err().to_string().contains("nonsense"));
        state.forget().unwrap();
        assert_eq!(state.done().unwrap(), 0);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn progress_is_a_rate_and_what_is_left() {
        assert_eq!(rate(10_000, 60_000, 10.0), (1000.0, 1.0));
        assert!(rate(0, 10, 0.0).1 > 0.0);
    }
}
