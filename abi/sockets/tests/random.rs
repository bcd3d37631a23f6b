//! A seeded program of socket calls gives the same results without the library and with it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
#[expect(dead_code, reason = "only the compiler is needed")]
mod needs;

/// Seeds, and steps of each of the four connections of one.
const SEEDS: u32 = 8;
const STEPS: &str = "150";
/// Seeds that have found something: options of a closed socket that a later one saw; that what this program
/// drew depended on how many octets each call of TCP gave (104, 124, 341).
const FOUND: [u32; 6] = [104, 124, 129, 305, 338, 341];

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| cdylib::built(&["-p", "quipu-sockets-preload"], "quipu_sockets_preload"))
}

/// Seeds of two processes that send each other a stream.
const DUPLEX_SEEDS: u32 = 10;
const DUPLEX_OCTETS: &str = "1000000";

/// Compiles a program. None without a compiler for this machine.
fn program(name: &str) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sockets-{name}"));
    let mut command = needs::compiler()?;
    command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(source);
    assert!(command.status().unwrap().success(), "the program does not compile");
    Some(program)
}

fn run(program: &Path, seed: u32, preloaded: bool) -> Output {
    let mut command = Command::new(program);
    command.args([&seed.to_string(), STEPS]).env_remove("LD_PRELOAD");
    if preloaded {
        command.arg("report").env("LD_PRELOAD", library());
    }
    command.output().unwrap()
}

/// Octets that a program says went through memory, by all of its processes.
fn octets_by_memory(text: &str) -> u64 {
    let octets = text.lines().filter_map(|line| line.strip_prefix("by memory "));
    octets.filter_map(|octets| octets.parse::<u64>().ok()).sum()
}

#[test]
fn a_random_program_sees_the_same_with_and_without_the_library() {
    let Some(program) = program("random") else { return };
    let mut by_memory = 0_u64;
    for seed in (1..=SEEDS).chain(FOUND) {
        let (plain, quipu) = (run(&program, seed, false), run(&program, seed, true));
        let text = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text(&plain).ends_with("done\n"), "seed {seed} without: {}", text(&plain));
        for (number, (a, b)) in text(&plain).lines().zip(text(&quipu).lines()).enumerate() {
            assert_eq!(a, b, "seed {seed}, line {}", number + 1);
        }
        assert_eq!(text(&plain).len(), text(&quipu).len(), "seed {seed}");
        let errors = String::from_utf8_lossy(&quipu.stderr).into_owned();
        by_memory += octets_by_memory(&errors);
    }
    assert!(by_memory > 10_000, "{by_memory} octets went through memory");
}

#[test]
fn what_poll_select_and_epoll_report_is_true_while_octets_move_between_ring_and_tcp() {
    let Some(program) = program("duplex") else { return };
    let mut by_memory = 0_u64;
    for seed in 1..=DUPLEX_SEEDS {
        let mut command = Command::new(&program);
        let output = command
            .args([&seed.to_string(), DUPLEX_OCTETS])
            .env("LD_PRELOAD", library())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.ends_with("done\n"), "seed {seed}: {text}{errors}");
        by_memory += octets_by_memory(&text);
    }
    assert!(by_memory > 1000, "{by_memory} octets went through memory");
}

/// Lengths of messages, and their numbers.
const STREAMS: [(&str, &str); 3] = [("20000", "6000"), ("65536", "3000"), ("1048576", "300")];

#[test]
fn a_stream_that_nobody_answers_goes_through_memory_too() {
    let Some(program) = program("stream") else { return };
    let from_files = STREAMS.iter().map(|stream| (stream, Some("file")));
    for ((len, messages), how) in STREAMS.iter().map(|stream| (stream, None)).chain(from_files) {
        let mut command = Command::new(&program);
        command.args([len, messages]).args(how).env("LD_PRELOAD", library());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("\ndone"), "{len} {how:?}: {text}{errors}");
        let octets = octets_by_memory(&text);
        assert!(octets > 100_000, "{len} {how:?}: {octets} octets went through memory");
    }
}

#[test]
fn a_long_message_that_begins_over_tcp_goes_on_through_memory() {
    let Some(program) = program("long") else { return };
    for preloaded in [false, true] {
        let mut command = Command::new(&program);
        command.env_remove("LD_PRELOAD");
        if preloaded {
            command.env("LD_PRELOAD", library());
        }
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.ends_with("done\n"), "{preloaded}: {text}{errors}");
        let octets = octets_by_memory(&text);
        assert!(octets >= 16_384 || !preloaded, "{octets} octets went through memory");
    }
}

/// Round trips, and how often they are tried: other programs may keep a receiver from looking.
const TRIPS: u64 = 20_000;
const TRIES: u32 = 5;

/// Where other programs have the processor for more of the time, in percent, a receiver rightly leaves the
/// octets to TCP.
const FEW_OTHERS: i64 = 20;

#[test]
fn processes_that_share_a_processor_take_turns_without_tcp() {
    let Some(program) = program("neighbors") else { return };
    let mut was_alone = false;
    for _ in 0..TRIES {
        let mut command = Command::new(&program);
        let output = command.arg(TRIPS.to_string()).env("LD_PRELOAD", library()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.ends_with("done\n"), "{text}{errors}");
        if octets_by_memory(&text) > TRIPS / 2 {
            return;
        }
        let others = text.lines().find_map(|line| line.strip_prefix("others ")?.parse().ok());
        was_alone |= others.unwrap_or(0) <= FEW_OTHERS;
    }
    assert!(!was_alone, "less than half of {TRIPS} octets went through memory");
    println!("SKIPPED: other programs had the processor each time");
}

#[test]
fn a_connection_that_returns_to_tcp_has_the_options_of_the_program() {
    let Some(program) = program("handler") else { return };
    let output = Command::new(&program).env("LD_PRELOAD", library()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text, "left\ndone\n");
}

/// More than any program takes.
const NO_LIMIT: u64 = i64::MAX as u64;
/// Connections.
const CONNECTIONS: u64 = 300;
/// Short messages of each connection in both directions, long ones after it was raised, and their length:
/// never raised; with short messages; with messages that fill rings.
const IDLE: [[u64; 3]; 3] = [[0, 0, 1], [10, 5, 1], [10, 5, 60_000]];
/// Of connections with messages, so many are raised.
const RAISED: u64 = 270;
/// Octets that an idle connection may take, of both ends and of what they share.
const IDLE_OCTETS: u64 = 8192;
/// Octets that the library takes for itself, in both processes.
const OWN_OCTETS: u64 = 600_000;

#[test]
fn idle_connections_take_little_memory() {
    let Some(program) = program("idle") else { return };
    for messages in IDLE {
        // Raised connections, and octets of memory: the program waits until they are no more than `most`.
        let memory = |raised: u64, most: u64| {
            let mut command = Command::new(&program);
            let arguments = [CONNECTIONS].into_iter().chain(messages).chain([raised, most]);
            command.args(arguments.map(|number| number.to_string())).env_remove("LD_PRELOAD");
            if most != NO_LIMIT {
                command.env("LD_PRELOAD", library());
            }
            let output = command.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{messages:?}: {text}");
            let number = |name: &str| {
                let line = text.lines().find_map(|line| line.strip_prefix(name));
                line.and_then(|number| number.parse::<u64>().ok()).expect("a number")
            };
            (number("raised "), number("memory "))
        };
        let (_, plain) = memory(0, NO_LIMIT);
        let needed = if messages[0] == 0 { 0 } else { RAISED };
        let (raised, with) = memory(needed, plain + OWN_OCTETS + CONNECTIONS * IDLE_OCTETS);
        assert!(raised >= needed, "{messages:?}: {raised} were raised");
        let each = with.saturating_sub(plain + OWN_OCTETS) / CONNECTIONS;
        assert!(each <= IDLE_OCTETS, "{messages:?}: {each} octets for a connection");
    }
}
