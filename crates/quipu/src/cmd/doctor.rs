//! `quipu doctor`: what works on this machine, what does not, and what to do about it.

use std::env;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use quipu_host::{Engine, doctor};
use serde::Serialize;

use super::DeviceOptions;
use super::failure::Failure;
use super::libraries::Libraries;
use super::output::table;

/// How to show it.
#[derive(clap::Args)]
#[command(after_long_help = EXIT_CODES)]
pub(crate) struct Options {
    #[command(flatten)]
    device: DeviceOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

const EXIT_CODES: &str = "\
Exit codes: 0 if RDMA programs run here, perhaps with limits; 1 if they do not.";

/// The programs of the distribution that the demo and the tests use: stage, program, package.
const PROGRAMS: &str = include_str!("../../../../tests/clients/packages.txt");
/// The same, in a tree of the sources.
const PROGRAMS_FILE: &str = "tests/clients/packages.txt";

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// As it should be.
    Ok,
    /// Something is slower, or missing for some uses.
    Warn,
    /// Nothing works.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    name: String,
    verdict: Verdict,
    found: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
}

impl Finding {
    fn ok(name: &str, found: impl Into<String>) -> Self {
        let (name, found) = (name.into(), found.into());
        Self { name, verdict: Verdict::Ok, found, remedy: String::new() }
    }

    fn bad(name: &str, verdict: Verdict, found: impl Into<String>, remedy: &str) -> Self {
        Self { name: name.into(), verdict, found: found.into(), remedy: remedy.into() }
    }
}

impl From<doctor::Check> for Finding {
    fn from(check: doctor::Check) -> Self {
        let verdict = match check.verdict {
            doctor::Verdict::Ok => Verdict::Ok,
            doctor::Verdict::Warn => Verdict::Warn,
            doctor::Verdict::Fail => Verdict::Fail,
        };
        Self::bad(check.name, verdict, check.detail, &check.remedy)
    }
}

/// Looks at everything.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let mut findings = host(&options.device);
    let libraries = Libraries::find();
    let built_here = libraries.as_ref().is_ok_and(|found| is_in_sources(found.folder()));
    findings.push(judge(libraries));
    findings.extend(programs(built_here));
    let fails = findings.iter().any(|finding| finding.verdict == Verdict::Fail);
    if options.json {
        let text = serde_json::to_string_pretty(&findings);
        println!("{}", text.map_err(|error| Failure::new("cannot print", error, ""))?);
    } else {
        print(&findings)?;
    }
    Ok(if fails { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print(findings: &[Finding]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let lines: Vec<Vec<String>> = findings
        .iter()
        .map(|finding| {
            let verdict = match finding.verdict {
                Verdict::Ok => "ok",
                Verdict::Warn => "warn",
                Verdict::Fail => "FAIL",
            };
            vec![verdict.into(), finding.name.clone(), finding.found.clone()]
        })
        .collect();
    table(&mut out, &lines)?;
    let sick: Vec<_> = findings.iter().filter(|finding| !finding.remedy.is_empty()).collect();
    if !sick.is_empty() {
        writeln!(out, "\nWhat to do:")?;
    }
    for finding in sick {
        writeln!(out, "  {}: {}", finding.name, finding.remedy)?;
    }
    let fails = findings.iter().filter(|finding| finding.verdict == Verdict::Fail).count();
    let warns = findings.iter().filter(|finding| finding.verdict == Verdict::Warn).count();
    match (fails, warns) {
        (0, 0) => writeln!(out, "\nEverything works."),
        (0, 1) => writeln!(out, "\nPrograms run; see the one warning above."),
        (0, _) => writeln!(out, "\nPrograms run; see the {warns} warnings above."),
        _ => writeln!(out, "\nPrograms do not run yet; see FAIL above."),
    }
}

/// What the engine depends on; then the device itself, opened as programs do.
fn host(options: &DeviceOptions) -> Vec<Finding> {
    let config = match options.to_look_at() {
        Ok(config) => config,
        // The text says what to do.
        Err(error) => return vec![Finding::bad("settings", Verdict::Fail, error, "")],
    };
    let mut findings: Vec<Finding> =
        doctor::examine(&config).into_iter().map(Finding::from).collect();
    findings.push(match Engine::open(config) {
        Ok(engine) => Finding::ok("device", format!("quipu0 at {}", engine.address().ip)),
        Err(error) => Finding::bad("device", Verdict::Fail, error.to_string(), ""),
    });
    findings
}

fn judge(libraries: Result<Libraries, Failure>) -> Finding {
    match libraries {
        Ok(libraries) => Finding::ok("libraries", libraries.folder().display().to_string()),
        Err(failure) => {
            let text = failure.to_string().replace("quipu: ", "");
            Finding::bad("libraries", Verdict::Fail, text.trim().replace('\n', " "), "")
        }
    }
}

/// Whether libraries lie where they were built, as `target/quipu/lib` of a tree of the sources.
fn is_in_sources(libraries: &Path) -> bool {
    let sources = libraries.ancestors().nth(3);
    sources.is_some_and(|folder| folder.join(PROGRAMS_FILE).is_file())
}

/// Whether the programs are there that people try first; where Quipu was built also those that its demo and
/// its tests run. Others need none of them.
fn programs(built_here: bool) -> Vec<Finding> {
    let first = |stage: &str, program: &str| stage == "demo" && program.starts_with("ib");
    rows()
        .filter(|(stage, program, _)| *stage != "build" && (built_here || first(stage, program)))
        .map(|(stage, program, package)| match find(program) {
            Some(file) => Finding::ok(program, file.display().to_string()),
            None => {
                let purpose = match built_here {
                    true => format!("needed by `make {stage}`"),
                    false => "to try Quipu with it".into(),
                };
                let remedy = format!("apt-get install {package} (as root), {purpose}");
                Finding::bad(program, Verdict::Warn, "is not installed", &remedy)
            }
        })
        .collect()
}

/// Stage, program and package of each row.
fn rows() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    PROGRAMS.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?, words.next()?, words.next()?))
    })
}

/// The package that a program is in, if it is known.
pub(crate) fn package_of(program: &str) -> Option<&'static str> {
    let known = rows().find(|(_, name, _)| *name == program).map(|(.., package)| package);
    known.or_else(|| match program {
        name if name.starts_with("ib_") || name.starts_with("raw_ethernet_") => Some("perftest"),
        name if name.starts_with("ibv_") => Some("ibverbs-utils"),
        "ucx_perftest" | "ucx_info" => Some("ucx-utils"),
        "fi_info" | "fi_pingpong" => Some("libfabric-bin"),
        "rping" | "ucmatose" | "udaddy" | "mckey" | "cmtime" | "udpong" | "rstream"
        | "riostream" | "rcopy" => Some("rdmacm-utils"),
        name if name.starts_with("rdma_") => Some("rdmacm-utils"),
        _ => None,
    })
}

fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(program)).find(|file| Path::is_file(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packages_of_programs_are_known() {
        assert_eq!(package_of("ib_write_bw"), Some("perftest"));
        assert_eq!(package_of("ib_read_lat"), Some("perftest"));
        assert_eq!(package_of("ibv_devinfo"), Some("ibverbs-utils"));
        assert_eq!(package_of("rdma_server"), Some("rdmacm-utils"));
        assert_eq!(package_of("vi"), None);
        assert!(rows().count() >= 8);
    }

    #[test]
    fn what_the_tests_need_is_looked_for_only_where_they_are() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        assert!(is_in_sources(&sources.join("target/quipu/lib")));
        assert!(!is_in_sources(Path::new("/opt/quipu/lib")));
        let names = |built_here| programs(built_here).into_iter().map(|finding| finding.name);
        assert!(names(true).any(|name| name == "tshark"));
        assert!(names(false).eq(["ib_write_bw", "ib_send_lat", "ibv_rc_pingpong"]));
    }
}
