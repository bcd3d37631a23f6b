//! `quipu bench --sockets`: the same programs with and without `quipu sockets`, in turns.

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use self::ends::{Pair, QUEUE_PAIR, SOCKET};
use self::hosts::Hosts;
use self::programs::{Ground, Program, Running, Turn, find};
use self::table::{By, Row, Table, Target, What};
use super::super::failure::Failure;
use super::super::output::make_folder;

mod ends;
mod hosts;
mod programs;
mod table;

pub(super) use self::ends::serve;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const TCP: &str = "kernel TCP";

/// How much is measured.
struct Extent {
    /// Turns of what this command measures itself, and of programs.
    rounds: [u32; 2],
    /// Seconds of a program's turn.
    seconds: f64,
    /// Only tests with one of these in their names, unless there are none.
    only: Vec<String>,
}

const fn at_least(value: f64) -> Option<Target> {
    Some(Target::AtLeast(value))
}

const fn at_most(value: f64) -> Option<Target> {
    Some(Target::AtMost(value))
}

/// A measurement of this command's own: its name, what the asking process is to do, by what the first way is
/// carried, and the number.
type OwnTest = (&'static str, &'static str, &'static str, What);

const TRIP: &str = "round trip, us";
const STREAM: &str = "MB/s";

const OWN_TESTS: [OwnTest; 5] = [
    ("1-byte ping-pong, blocking", "trip 1", SOCKET, What::ratio(TRIP, at_most(0.25))),
    ("the same to a queue pair", "trip 1", QUEUE_PAIR, What::ratio(TRIP, at_most(1.5))),
    ("stream of 64 KB", "stream 65536", SOCKET, What::ratio(STREAM, at_least(2.0))),
    ("stream of 1 MB", "stream 1048576", SOCKET, What::ratio(STREAM, at_least(2.0))),
    (
        "call that is not carried",
        "call",
        SOCKET,
        What { name: "ns", by: By::Difference, target: at_most(20.0) },
    ),
];

/// Two hosts: the kernel's TCP carries everything.
const OWN_TESTS_OF_HOSTS: [OwnTest; 3] = [
    ("two hosts: 1-byte ping-pong", "trip 1", SOCKET, What::ratio(TRIP, at_most(1.0))),
    ("two hosts: stream of 64 KB", "stream 65536", SOCKET, What::ratio(STREAM, at_least(1.0))),
    ("two hosts: stream of 1 MB", "stream 1048576", SOCKET, What::ratio(STREAM, at_least(1.0))),
];

/// A number of a turn.
type Number = (What, fn(&Turn) -> f64);

/// A measurement of programs of others: its name, whether each end has a processor, and the numbers.
struct ProgramTest {
    name: &'static str,
    program: Program,
    is_pinned: bool,
    numbers: &'static [Number],
}

const fn rate(target: f64) -> Number {
    (What::ratio("requests/s", at_least(target)), |turn| turn.rate)
}

const P99: Number = (What::ratio("p99, us", at_most(1.0)), |turn| turn.p99_us);
const CPU: Number = (What::ratio("CPU us/request", at_most(1.0)), |turn| turn.cpu_us);
const ANY_RATE: Number = (What::ratio("requests/s", None), |turn| turn.rate);

const SMALL: Program = Program::Nginx { page: 1024, connections: 50 };
const LARGE: Program = Program::Nginx { page: 1 << 20, connections: 8 };

const fn test(
    name: &'static str,
    program: Program,
    is_pinned: bool,
    numbers: &'static [Number],
) -> ProgramTest {
    ProgramTest { name, program, is_pinned, numbers }
}

const PROGRAM_TESTS: [ProgramTest; 8] = [
    test("redis GET, pipeline 1", Program::Redis { pipeline: 1 }, false, &[rate(1.5)]),
    test("redis GET, pipeline 16", Program::Redis { pipeline: 16 }, false, &[rate(1.2)]),
    test("nginx and wrk, 1 KB", SMALL, false, &[rate(1.2), P99]),
    test("nginx and wrk, 1 KB, a processor each", SMALL, true, &[rate(1.2), P99]),
    test("nginx and wrk, 1 MB", LARGE, false, &[rate(1.2), P99]),
    test("nginx and wrk, 1 MB, a processor each", LARGE, true, &[rate(1.2), P99]),
    test("sockperf under load, 64 B", Program::Sockperf, false, &[rate(1.2), P99]),
    test(
        "haproxy in front of nginx, 1 KB",
        Program::Haproxy { page: 1024, connections: 50 },
        false,
        &[ANY_RATE],
    ),
];

const PROGRAM_TESTS_OF_HOSTS: [ProgramTest; 5] = [
    test(
        "two hosts: redis GET, pipeline 1",
        Program::Redis { pipeline: 1 },
        false,
        &[rate(1.0), CPU],
    ),
    test(
        "two hosts: redis GET, pipeline 16",
        Program::Redis { pipeline: 16 },
        false,
        &[rate(1.0), CPU],
    ),
    test("two hosts: nginx and wrk, 1 KB", SMALL, false, &[rate(1.0), CPU]),
    test("two hosts: nginx and wrk, 1 MB", LARGE, false, &[rate(1.0), CPU]),
    test("two hosts: sockperf under load, 64 B", Program::Sockperf, false, &[rate(1.0), CPU]),
];

/// A folder that goes with its owner.
struct Folder(PathBuf);

impl Folder {
    fn new() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("quipu-bench-sockets-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// One run.
struct Run<'a> {
    extent: Extent,
    folder: &'a Path,
    table: Table,
    quiet: bool,
}

impl Run<'_> {
    fn wants(&self, test: &str) -> bool {
        let has = |part: &String| test.to_lowercase().contains(&part.to_lowercase());
        self.extent.only.is_empty() || self.extent.only.iter().any(has)
    }

    fn say(&self, test: &str) {
        if !self.quiet {
            eprintln!("{test}");
        }
    }

    /// Takes turns: in every other round the library comes first. The turns before the first round do not
    /// count: connections are raised in them.
    fn alternate(
        rounds: u32,
        mut turn: impl FnMut(usize) -> Outcome<Vec<f64>>,
    ) -> Outcome<Vec<[Vec<f64>; 2]>> {
        turn(0)?;
        turn(1)?;
        let mut all = Vec::new();
        for round in 0..rounds {
            let mut values = [Vec::new(), Vec::new()];
            for place in 0..2 {
                let way = (place + round as usize) % 2;
                values[way] = turn(way)?;
            }
            all.push(values);
        }
        Ok(all)
    }

    fn own_test(&mut self, ground: &Ground<'_>, (test, what, first, number): OwnTest) -> Outcome {
        if !self.wants(test) {
            return Ok(());
        }
        self.say(test);
        let mut pairs = [Pair::start(ground, false, first)?, Pair::start(ground, true, SOCKET)?];
        let rounds =
            Self::alternate(self.extent.rounds[0], |way| Ok(vec![pairs[way].measure(what)?]))?;
        let rounds = rounds.iter().map(|[without, with]| [without[0], with[0]]).collect();
        let base = if first == SOCKET { TCP } else { "queue pair" };
        self.table.rows.push(Row { test, what: number, base, rounds });
        Ok(())
    }

    fn program_test(&mut self, ground: &Ground<'_>, test: &ProgramTest) -> Outcome {
        if !self.wants(test.name) {
            return Ok(());
        }
        if let Some(missing) = test.program.needs().iter().find(|name| find(name).is_none()) {
            self.table.notes.push(format!("{}: {missing} is not installed", test.name));
            return Ok(());
        }
        self.say(test.name);
        let start = |with| Running::start(ground, test.program, with, self.folder);
        let mut both = [start(false)?, start(true)?];
        let seconds = self.extent.seconds;
        let rounds = Self::alternate(self.extent.rounds[1], |way| {
            let turn = both[way].turn(seconds)?;
            Ok(test.numbers.iter().map(|(_, number)| number(&turn)).collect())
        })?;
        for (at, (what, _)) in test.numbers.iter().enumerate() {
            let rounds = rounds.iter().map(|[without, with]| [without[at], with[at]]).collect();
            self.table.rows.push(Row { test: test.name, what: *what, base: TCP, rounds });
        }
        Ok(())
    }

    /// Notes what failed, and goes on.
    fn keep(&mut self, test: &str, outcome: Outcome) {
        if let Err(error) = outcome {
            self.table.notes.push(format!("{test}: {error}"));
        }
    }

    fn one_host(&mut self, own: &str, preload: &str, pins: Option<[usize; 2]>) {
        let [free, pinned] = [None, pins].map(|pins| Ground::here(own, preload, pins));
        for test in OWN_TESTS {
            let outcome = self.own_test(&pinned, test);
            self.keep(test.0, outcome);
        }
        for test in &PROGRAM_TESTS {
            let outcome = self.program_test(if test.is_pinned { &pinned } else { &free }, test);
            self.keep(test.name, outcome);
        }
    }

    fn two_hosts(&mut self, own: &str, preload: &str, pins: Option<[usize; 2]>) {
        let names = OWN_TESTS_OF_HOSTS.iter().map(|test| test.0);
        if !names
            .chain(PROGRAM_TESTS_OF_HOSTS.iter().map(|test| test.name))
            .any(|it| self.wants(it))
        {
            return;
        }
        let hosts = match Hosts::new() {
            Ok(hosts) => hosts,
            Err(error) => return self.table.notes.push(error.to_string()),
        };
        let on_hosts = |pins| {
            let prefixes = [hosts.prefix(0), hosts.prefix(1)];
            Ground { prefixes, address: Hosts::address(), ..Ground::here(own, preload, pins) }
        };
        let [free, pinned] = [None, pins].map(on_hosts);
        for test in OWN_TESTS_OF_HOSTS {
            let outcome = self.own_test(&pinned, test);
            self.keep(test.0, outcome);
        }
        for test in &PROGRAM_TESTS_OF_HOSTS {
            let outcome = self.program_test(&free, test);
            self.keep(test.name, outcome);
        }
    }
}

/// The names that `--only` chooses from.
fn row_names() -> Vec<&'static str> {
    let own = OWN_TESTS.iter().chain(&OWN_TESTS_OF_HOSTS).map(|test| test.0);
    let programs = PROGRAM_TESTS.iter().chain(&PROGRAM_TESTS_OF_HOSTS).map(|test| test.name);
    own.chain(programs).collect()
}

/// The three figures of proc_loadavg(5).
fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

/// Measures, prints, and writes `sockets.txt`, `sockets.json` and `sockets.svg` into a folder, for
/// `quipu bench --sockets`.
///
/// # Errors
///
/// The library is missing, nothing could be measured, or a file cannot be written.
pub(crate) fn rows(options: &quipu_bench::Options) -> Result<ExitCode, Failure> {
    let preload = super::preload()?.to_string_lossy().into_owned();
    make_folder(options.out.as_deref())?;
    let own = std::env::current_exe()?.to_string_lossy().into_owned();
    let pins = match *quipu_bench::processors()? {
        [first, second, ..] => Some([first, second]),
        _ => None,
    };
    let folder = Folder::new()?;
    let (rounds, seconds) = if options.quick { ([5, 3], 0.5) } else { ([25, 7], 1.0) };
    let extent = Extent { rounds, seconds, only: options.only.clone() };
    let quiet = options.json;
    let mut run = Run { extent, folder: &folder.0, table: Table::default(), quiet };
    let before = load();
    run.one_host(&own, &preload, pins);
    run.two_hosts(&own, &preload, pins);
    let mut table = run.table;
    table.loads = [before, load()];
    if table.rows.is_empty() {
        let why = match table.notes.is_empty() {
            true => "--only is part of the name of no row".to_owned(),
            false => table.notes.join("; "),
        };
        let remedy = format!("the rows are: {}", row_names().join("; "));
        return Err(Failure::new("nothing was measured", why, remedy));
    }
    let mut text = Vec::new();
    table.write(&mut text)?;
    let json = format!("{:#}\n", table.json());
    if let Some(out) = &options.out {
        fs::write(out.join("sockets.txt"), &text)?;
        fs::write(out.join("sockets.json"), &json)?;
        fs::write(out.join("sockets.svg"), table.plot().svg())?;
    }
    match options.json {
        true => print!("{json}"),
        false => print!("{}", String::from_utf8_lossy(&text)),
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_take_turns_after_one_turn_each_that_does_not_count() {
        let mut order = Vec::new();
        let rounds = Run::alternate(2, |way| {
            order.push(way);
            Ok(vec![order.len() as f64])
        });
        assert_eq!(rounds.unwrap(), [[vec![3.0], vec![4.0]], [vec![6.0], vec![5.0]]]);
        assert_eq!(order, [0, 1, 0, 1, 1, 0]);
    }
}
