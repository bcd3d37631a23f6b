//! `quipu sockets`: becomes the program, whose TCP connections on this machine go through memory.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use quipu_sdp::rules::Rules;
use quipu_sockets::report::Reason;

use super::failure::Failure;
use super::{elf, libraries, run, variables};

mod bench;
mod measure;
mod processes;
mod stack;
mod unseen;

pub(super) use self::bench::rows as bench;
pub(super) use self::processes::{Process, processes};

/// What to run, or to show.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    /// Show the connections of your programs: those through shared memory, and why others are not.
    #[arg(long, conflicts_with = "program")]
    report: bool,
    /// The program makes its own system calls: it is linked statically, or is in Go. It uses the kernel's TCP
    /// only, exactly as without Quipu; --report shows its connections. Programs that it starts are carried.
    #[arg(long = "static", conflicts_with_all = ["report", "measure", "sdp"])]
    is_static: bool,
    /// Measure what the library of the extended sockets interface costs a program that does not use it, and
    /// iWARP on a socket next to plain TCP. Prints JSON.
    #[arg(long, conflicts_with_all = ["program", "report"])]
    measure: bool,
    /// With --measure: take fewer samples.
    #[arg(long, requires = "measure")]
    quick: bool,
    /// One process of a measurement.
    #[arg(long, hide = true, value_name = "WAY", conflicts_with_all = ["program", "report", "measure"])]
    measure_end: Option<String>,
    /// One process of `quipu bench --sockets`.
    #[arg(long, hide = true, value_name = "WAY", conflicts_with_all = ["program", "report", "measure"])]
    bench_end: Option<String>,
    /// Carry sockets over SDP instead: those of programs that ask for it (address family 27), and those that
    /// a rule in FILE names, in the grammar of libsdp.conf. FILE may also be in LIBSDP_CONFIG_FILE.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true,
          conflicts_with = "report")]
    sdp: Option<Option<PathBuf>>,
    /// The program and its arguments.
    #[arg(
        required_unless_present_any = ["report", "measure", "measure_end", "bench_end"],
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    program: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  quipu sockets -- redis-server
  quipu sockets -- redis-benchmark -t get      in another terminal
  quipu sockets --report                       in a third one
  quipu sockets --static -- ./server           a statically linked program, or one in Go
  quipu sockets --sdp -- qperf                 a program that asks for SDP
  quipu sockets --sdp=libsdp.conf -- iperf3 -s a program whose rules ask for it

The program runs unmodified and behaves as without Quipu. If both ends of a TCP connection run under
`quipu sockets` on this machine, it moves to shared memory after a few messages: while both programs
are awake, their bytes go through memory. Everything else stays with the kernel's TCP: connections
to other programs and machines, statically linked programs, and features that memory cannot carry.
docs/sockets.md has details and the list of programs that were tried.

Exit codes of quipu itself: 2 wrong options, 125 quipu failed, 126 the program cannot be run, 127
there is no such program.

Environment variables:
  QUIPU_SOCKETS        never: the program uses the kernel's TCP only
  LIBSDP_CONFIG_FILE   with --sdp: the rules, if the option names no file
  QUIPU_SDP_ZCOPY      with --sdp: bytes from which a send goes without a copy; 0: none does;
                       unset: 65536, where that is faster
  QUIPU_SDP_PCAP       with --sdp: file for the messages, which tshark shows as SDP
  QUIPU_LIB_DIR        folder of Quipu's libraries, if not near the command";

/// Replaces this process by the program, or shows the report.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    if options.report {
        return show();
    }
    if options.measure {
        return measure::run(options.quick);
    }
    if let Some(way) = &options.measure_end {
        return measure::end(way);
    }
    if let Some(way) = &options.bench_end {
        let failed = |error| Failure::new("a measurement of sockets failed", error, "");
        return bench::serve(way).map(|()| ExitCode::SUCCESS).map_err(failed);
    }
    check_variables(options.sdp.is_some())?;
    let (name, args) = options.program.split_first().expect("clap requires a program");
    let file = run::find(name)?;
    let is_static = matches!(elf::inspect(&file), elf::Kind::Static | elf::Kind::OtherLoader(_));
    if is_static && !options.is_static {
        eprintln!(
            "quipu: {} does not load Quipu's library: it uses the kernel's TCP only. --static silences \
             this message",
            file.display()
        );
    }
    let mut command = Command::new(&file);
    command.arg0_of(name).args(args);
    match &options.sdp {
        // Only programs that it starts may load the library.
        None if options.is_static => match preload() {
            Ok(value) => command.env("LD_PRELOAD", value),
            Err(_) => &mut command,
        },
        None => command.env("LD_PRELOAD", preload()?),
        Some(rules) => {
            if let Some(file) = rules_in(rules.as_deref())? {
                command.env(RULES, file);
            }
            command.env("LD_PRELOAD", preload_of(libraries::SDP)?)
        }
    };
    if (is_static || options.is_static) && options.sdp.is_none() {
        // Without a mark, the report does not know the program; it runs all the same.
        let _ = unseen::mark();
    }
    // It returns only if it fails.
    Err(run::not_run(&file, quipu_host::become_program(&mut command)))
}

/// `Command::arg0`, by a name that says whose.
trait Arg0 {
    fn arg0_of(&mut self, name: &OsStr) -> &mut Self;
}

impl Arg0 for Command {
    fn arg0_of(&mut self, name: &OsStr) -> &mut Self {
        std::os::unix::process::CommandExt::arg0(self, name)
    }
}

/// The variable that names the file of rules.
const RULES: &str = "LIBSDP_CONFIG_FILE";

/// Refuses values of variables that the libraries would ignore.
fn check_variables(is_sdp: bool) -> Result<(), Failure> {
    type IsValid = fn(&str) -> bool;
    let checks: [(&str, bool, IsValid, &str); 2] = [
        ("QUIPU_SOCKETS", !is_sdp, |text| text == "never", "set it to never, or unset it"),
        (
            "QUIPU_SDP_ZCOPY",
            is_sdp,
            |text| text.parse::<usize>().is_ok(),
            "set it to a number of bytes, such as 65536, to 0, or unset it",
        ),
    ];
    for (name, is_read, is_valid, remedy) in checks {
        let Some(value) = variables::value(name).filter(|_| is_read) else { continue };
        if !value.to_str().is_some_and(is_valid) {
            let what = format!("cannot use {name}={}", value.display());
            return Err(Failure::new(what, "the value is not allowed", remedy).with_code(2));
        }
    }
    Ok(())
}

/// Checks the rules of a program, and gives their file.
fn rules_in(file: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    let variable = variables::value(RULES).map(PathBuf::from);
    let Some(file) = file.map(Path::to_owned).or(variable) else { return Ok(None) };
    let what = || format!("cannot read rules for SDP from {}", file.display());
    let failed = |why: String, remedy: &str| Failure::new(what(), why, remedy).with_code(2);
    let text = fs::read_to_string(&file)
        .map_err(|error| failed(error.to_string(), "give --sdp a file that you can read"))?;
    Rules::parse(&text)
        .map_err(|error| failed(error.to_string(), "correct that line (docs/sdp.md)"))?;
    let file = std::path::absolute(&file)
        .map_err(|error| failed(error.to_string(), "give --sdp an absolute path"))?;
    Ok(Some(file))
}

/// `LD_PRELOAD` with the library of raised connections in front of what is there.
pub(crate) fn preload() -> Result<OsString, Failure> {
    preload_of(libraries::SOCKETS)
}

/// `LD_PRELOAD` with a library in front of what is there.
fn preload_of(name: &str) -> Result<OsString, Failure> {
    let library = libraries::find_one(name)?;
    let old = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    let is_ours = |part: &[u8]| {
        [libraries::SOCKETS, libraries::SDP]
            .map(|name| Some(OsStr::new(name)))
            .contains(&Path::new(OsStr::from_bytes(part)).file_name())
    };
    let parts = old.as_bytes().split(|octet| [b':', b' '].contains(octet));
    let kept = parts.filter(|part| !part.is_empty() && !is_ours(part));
    let all: Vec<&[u8]> = [library.as_os_str().as_bytes()].into_iter().chain(kept).collect();
    Ok(OsString::from_vec(all.join(&b':')))
}

/// Prints what the processes of this user show.
fn show() -> Result<ExitCode, Failure> {
    let processes = processes();
    if processes.iter().all(|process| process.rows.is_empty() && !process.is_unseen) {
        println!("none of your programs has opened a connection yet");
        return Ok(ExitCode::SUCCESS);
    }
    for process in &processes {
        for line in lines(process) {
            println!("{line}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The part of the report that is about one process.
fn lines(process: &Process) -> Vec<String> {
    let Process { number, program, totals, is_unseen, rows } = process;
    if *is_unseen {
        let connections = rows.iter().map(|row| {
            let (local, remote) = &row.addresses;
            format!("  fd {:<4} {local} - {remote}  {}", row.fd, row.reason)
        });
        let first = format!("{number} {program}: 0 of {} connections raised (static)", rows.len());
        return std::iter::once(first).chain(connections).collect();
    }
    let raised = rows.iter().filter(|row| row.reason == Reason::None).count();
    let mut lines =
        vec![format!("{number} {program}: {raised} of {} connections raised", rows.len())];
    if let Some(totals) = totals {
        lines.push(format!(
            "  in all: {} raised, {} lowered; sent {} by memory, {} by TCP; received {} by memory, {} by \
             TCP; {} withdrawals, {} wake-ups",
            totals.raises,
            totals.lowers,
            totals.sent.0,
            totals.sent.1,
            totals.received.0,
            totals.received.1,
            totals.withdrawals,
            totals.wake_ups
        ));
    }
    lines.extend(rows.iter().map(|row| {
        let (local, remote) = &row.addresses;
        format!(
            "  fd {:<4} {local} - {remote}  {}; sent {} by memory, {} by TCP; received {} by memory, \
             {} by TCP; {} withdrawals",
            row.fd,
            row.reason,
            row.sent.0,
            row.sent.1,
            row.received.0,
            row.received.1,
            row.withdrawals
        )
    }));
    lines
}

#[cfg(test)]
mod tests {
    use quipu_sockets::report::{Row, Totals};

    use super::*;

    #[test]
    fn the_report_says_why_a_connection_is_plain() {
        let row = Row {
            fd: 5,
            addresses: ("127.0.0.1:1".into(), "127.0.0.1:2".into()),
            reason: Reason::NoPeer,
            sent: (0, 10),
            received: (0, 20),
            withdrawals: 0,
        };
        let raised = Row { reason: Reason::None, ..row.clone() };
        let totals = Totals { raises: 3, wake_ups: 9, ..Totals::default() };
        let process = Process {
            number: 7,
            program: "redis-server".into(),
            totals: Some(totals),
            is_unseen: false,
            rows: vec![row, raised],
        };
        let lines = lines(&process);
        assert_eq!(lines[0], "7 redis-server: 1 of 2 connections raised");
        assert!(lines[1].starts_with("  in all: 3 raised, 0 lowered;"), "{}", lines[1]);
        assert!(lines[2].contains("the other end does not run Quipu"), "{}", lines[2]);
        assert!(lines[3].contains("raised;"), "{}", lines[3]);
    }

    #[test]
    fn the_report_says_that_a_static_program_is_not_seen() {
        let row = Row {
            fd: 5,
            addresses: ("127.0.0.1:1".into(), "127.0.0.1:2".into()),
            reason: Reason::Unseen,
            sent: (0, 0),
            received: (0, 0),
            withdrawals: 0,
        };
        let process = Process {
            number: 7,
            program: "server".into(),
            totals: None,
            is_unseen: true,
            rows: vec![row],
        };
        let lines = lines(&process);
        assert_eq!(lines[0], "7 server: 0 of 1 connections raised (static)");
        assert!(lines[1].ends_with("plain: the program uses calls that Quipu does not see"));
    }
}
