//! `quipu run --fault` and `--strict`: the plan is looked at before the program starts, and named in its
//! environment.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use quipu_host::fault::{Plan, Replay};
use quipu_host::strict::Ignored;
use quipu_host::{Config, is_per_process};

use super::failure::Failure;
use super::variables::{self, OneOf};

/// What fails on purpose.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct FaultOptions {
    /// Plan of the faults to inject: what fails, where and when.
    #[arg(long = "fault", env = "QUIPU_FAULTS", value_name = "PLAN.toml")]
    plan: Option<PathBuf>,
    /// Log the injected faults into this file, as JSON lines, instead of to standard error.
    ///
    /// `%p` in the name is the process number, for programs with several processes. The option
    /// overwrites the log of an earlier run; QUIPU_FAULT_LOG appends to it.
    // Without `env`: the variable is not quite the option.
    #[arg(long, value_name = "FILE")]
    fault_log: Option<PathBuf>,
    /// Inject exactly the faults of such a log, without drawing any.
    #[arg(long, env = "QUIPU_FAULT_REPLAY", value_name = "LOG")]
    fault_replay: Option<PathBuf>,
    /// Report mistakes that hardware punishes and software tolerates.
    ///
    /// `--strict=fail` also exits with code 86 after any report. `--strict=abort` aborts at the first one.
    #[arg(
        long,
        env = "QUIPU_STRICT",
        value_name = "MODE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "report",
        value_parser = OneOf(&["report", "fail", "abort", "1", "0", ""])
    )]
    strict: Option<String>,
    /// Write these reports into this file, as JSON lines, instead of to standard error. `%p` in the name is
    /// the process number.
    #[arg(long, env = "QUIPU_STRICT_LOG", value_name = "FILE")]
    strict_log: Option<PathBuf>,
    /// With `--strict`: leave out these reports, separated by commas. `KIND` is a kind of report;
    /// `KIND@PLACE` leaves out only those with this function, library or source file in a trace.
    #[arg(long, env = "QUIPU_STRICT_IGNORE", value_name = "KIND[@PLACE]")]
    strict_ignore: Option<String>,
    /// With `--strict`: which bytes of a peer's write are placed first. `reverse`: the last ones;
    /// `shuffle` or `shuffle:SEED`: random ones; `off`: all in order.
    #[arg(long, env = "QUIPU_STRICT_ORDER", value_name = "ORDER")]
    strict_order: Option<String>,
}

impl FaultOptions {
    /// Refuses an invalid plan, log or rule, and empties the log of an earlier run.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.check_strict()?;
        let failure = |why: String, remedy: &str| {
            Failure::new("cannot inject faults", why, remedy).with_code(125)
        };
        let Some(path) = self.plan.as_deref() else {
            if let Some(log) = self.fault_replay.as_deref() {
                let why = format!(
                    "there is no plan for the log {} that is to be repeated",
                    log.display()
                );
                return Err(failure(why, "give --fault the plan of that log"));
            }
            let Some(log) = self.fault_log.as_deref() else { return Ok(()) };
            let why = format!("there is no plan, so nothing can be logged to {}", log.display());
            return Err(failure(
                why,
                "give --fault a plan; docs/faults.md explains how to write \
                one",
            ));
        };
        let kept = self.fault_replay.as_deref();
        check_plan(path, kept).map_err(|flaw| match flaw {
            Flaw::Unread(why) => failure(why, "name a file that you can read"),
            Flaw::Wrong(why) => failure(why, "correct it; docs/faults.md has every key"),
        })?;
        if let Some(log) = &self.fault_log {
            return try_log(log, "faults", "--fault-log", Some(&**log) != kept);
        }
        log_of_variable().map_or(Ok(()), |log| try_log(&log, "faults", "QUIPU_FAULT_LOG", false))
    }

    /// The same of what concerns the strict mode.
    fn check_strict(&self) -> Result<(), Failure> {
        if let Some(Err(why)) = self.strict_ignore.as_ref().map(|rules| rules.parse::<Ignored>()) {
            let remedy = "docs/strict.md lists the kinds of reports";
            return Err(Failure::new("wrong value of --strict-ignore", why, remedy).with_code(125));
        }
        let order = |name: &str| {
            self.strict_order.as_ref().filter(|_| name == "QUIPU_STRICT_ORDER").map(Into::into)
        };
        if let Err(error) = Config::from_lookup(order) {
            let remedy = format!("use {}", error.expected);
            let what = "wrong value of --strict-order";
            return Err(Failure::new(what, error.value, remedy).with_code(125));
        }
        let log = self.strict_log.as_deref();
        log.map_or(Ok(()), |log| try_log(log, "reports", "--strict-log", false))
    }

    /// The variables to set. Paths are absolute, since a program may change its folder.
    pub(crate) fn variables(&self) -> Vec<(&'static str, OsString)> {
        let fault_log = self.fault_log.clone().or_else(log_of_variable);
        let named = [
            ("QUIPU_FAULTS", &self.plan),
            ("QUIPU_FAULT_LOG", &fault_log),
            ("QUIPU_FAULT_REPLAY", &self.fault_replay),
            ("QUIPU_STRICT_LOG", &self.strict_log),
        ];
        let set = named.into_iter().filter_map(|(name, path)| Some((name, path.as_deref()?)));
        let paths = set.map(|(name, path)| (name, absolute(path).into_os_string()));
        let words = [
            ("QUIPU_STRICT", &self.strict),
            ("QUIPU_STRICT_IGNORE", &self.strict_ignore),
            ("QUIPU_STRICT_ORDER", &self.strict_order),
        ];
        let words =
            words.into_iter().filter_map(|(name, word)| Some((name, word.as_ref()?.into())));
        paths.chain(words).collect()
    }
}

/// What is wrong with a plan, or with the log that is to be repeated.
pub(super) enum Flaw {
    /// It cannot be read.
    Unread(String),
    /// It makes no sense.
    Wrong(String),
}

/// Looks whether a plan makes sense, and the log of it that is to be repeated, if there is one.
pub(super) fn check_plan(path: &Path, replay: Option<&Path>) -> Result<(), Flaw> {
    let wrong = |error: &dyn std::fmt::Display| Flaw::Wrong(error.to_string());
    let plan = Plan::parse(&read(path)?, &path.display().to_string());
    let plan = plan.map_err(|error| wrong(&error))?;
    let Some(log) = replay else { return Ok(()) };
    let replay = Replay::parse(&read(log)?, &log.display().to_string(), &plan);
    replay.map(drop).map_err(|error| wrong(&error))
}

fn read(path: &Path) -> Result<String, Flaw> {
    fs::read_to_string(path).map_err(|error| Flaw::Unread(format!("{}: {error}", path.display())))
}

/// The log of faults that the variable names.
fn log_of_variable() -> Option<PathBuf> {
    variables::value("QUIPU_FAULT_LOG").map(PathBuf::from)
}

/// Refuses a log of `what` that cannot be written, by the option or variable that names it. `anew`: it is to
/// begin with this run.
fn try_log(path: &Path, what: &str, named_by: &str, anew: bool) -> Result<(), Failure> {
    begin(&absolute(path), anew).map_err(|error| {
        let what = format!("cannot write {what} to {}", path.display());
        let remedy = format!("give {named_by} a file that you can write");
        Failure::new(what, error, remedy).with_code(125)
    })
}

/// Makes the file if it is not there, and empties a log of faults if it is to begin anew. What is not such a
/// log is somebody's: a name that was forgotten takes another file for it.
fn begin(path: &Path, anew: bool) -> io::Result<()> {
    if is_per_process(path.as_os_str()) {
        let folder = path.parent().unwrap_or(Path::new("/"));
        return fs::metadata(folder).map(drop);
    }
    // A terminal, a device, or a pipe, to open which its reader may hear.
    if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return Ok(());
    }
    let file = File::options().read(anew).append(true).create(true).open(path)?;
    if !anew {
        return Ok(());
    }
    let mut start = Vec::new();
    (&file).take(LOG_START.len() as u64).read_to_end(&mut start)?;
    if !start.is_empty() && start != LOG_START {
        return Err(io::Error::other("it exists and is no log of faults"));
    }
    file.set_len(0)
}

/// How a log of faults begins.
const LOG_START: &[u8] = b"{\"plan\":";

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use quipu_host::fault::{Header, json};

    use super::*;

    /// A file with that text.
    fn file(name: &str, text: &str) -> PathBuf {
        let name = format!("quipu-faults-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn a_plan_is_checked_before_the_program_starts() {
        let good = file("good", "[[fault]]\ninject = \"dead_peer\"\nnth = 1\n");
        let bad = file("bad", "[[fault]]\ninject = \"dead_peer\"\nnht = 1\n");
        let log = file("log", "not a log");
        let earlier = "{\"plan\":\"of an earlier run\"}\n";
        let old = file("old", earlier);
        let options = |plan: &Path, replay: Option<&Path>| FaultOptions {
            plan: Some(plan.to_owned()),
            fault_log: Some(old.clone()),
            fault_replay: replay.map(Path::to_owned),
            ..FaultOptions::default()
        };
        let error = options(&bad, None).check().unwrap_err().to_string();
        assert!(error.contains(":3: unknown field `nht`"), "{error}");
        let error = options(&good, Some(&log)).check().unwrap_err().to_string();
        assert!(error.contains(":1: this is no log"), "{error}");
        assert_eq!(fs::read_to_string(&old).unwrap(), earlier);
        options(&good, None).check().unwrap();
        assert_eq!(fs::read(&old).unwrap(), b"");
        let without = FaultOptions { plan: None, ..options(&good, Some(&log)) };
        let error = without.check().unwrap_err().to_string();
        assert!(error.contains("there is no plan"), "{error}");
        let without = FaultOptions { fault_replay: None, ..without };
        let error = without.check().unwrap_err().to_string();
        assert!(error.contains("there is no plan") && error.contains("--fault"), "{error}");
        let error = options(Path::new("/nowhere"), None).check().unwrap_err().to_string();
        assert!(error.contains("/nowhere: No such file"), "{error}");
        let variables = options(Path::new("plan.toml"), None).variables();
        assert!(variables.iter().all(|(_, path)| Path::new(path).is_absolute()));
        assert_eq!(variables.len(), 2);
        for path in [good, bad, log, old] {
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn a_log_of_faults_takes_the_place_of_nothing_else() {
        let folder = std::env::temp_dir().join(format!("quipu-fault-log-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let plan = folder.join("plan.toml");
        let text = "[[fault]]\ninject = \"dead_peer\"\nnth = 1\n";
        fs::write(&plan, text).unwrap();
        let check = |log: &Path| {
            let (plan, fault_log) = (Some(plan.clone()), Some(log.to_owned()));
            FaultOptions { plan, fault_log, ..FaultOptions::default() }.check()
        };
        // A pipe, and what a symbolic link leads to.
        let (pipe, link) = (folder.join("pipe"), folder.join("link"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        symlink("/dev/null", &link).unwrap();
        for log in [&pipe, &link] {
            let before = fs::symlink_metadata(log).unwrap();
            check(log).unwrap();
            let after = fs::symlink_metadata(log).unwrap();
            assert_eq!((after.ino(), after.file_type()), (before.ino(), before.file_type()));
        }
        // What a person wrote.
        let notes = folder.join("notes");
        for words in ["exec cargo test\n", "x", "{\"plans\":"] {
            fs::write(&notes, words).unwrap();
            let error = check(&notes).unwrap_err().to_string();
            assert!(
                error.contains("it exists and is no log of faults")
                    && error.contains("--fault-log")
            );
            assert_eq!(fs::read_to_string(&notes).unwrap(), words);
        }
        // What the engine writes.
        let header = Header::new(&Plan::parse(text, "plan.toml").unwrap(), 1, "a.out");
        fs::write(&notes, json(&header)).unwrap();
        begin(&notes, false).unwrap();
        assert!(fs::metadata(&notes).unwrap().len() > 0);
        begin(&notes, true).unwrap();
        assert_eq!(fs::metadata(&notes).unwrap().len(), 0);
        // What cannot be written.
        for name in ["", "none/log", "none/%p.jsonl"] {
            let error = check(&folder.join(name)).unwrap_err().to_string();
            assert!(error.contains("cannot write faults to") && error.contains("--fault-log"));
        }
        check(&folder.join("%p.jsonl")).unwrap();
        fs::remove_dir_all(&folder).unwrap();
    }
}
