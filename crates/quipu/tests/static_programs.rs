//! Statically linked programs and Go programs behave the same with `quipu sockets --static` at both ends, at
//! one and at none.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

#[path = "../../../abi/types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../../abi/types/testing/needs.rs"]
#[expect(dead_code, reason = "only the compiler is needed")]
mod needs;

/// How a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Plain,
    Static,
    /// Linked dynamically, with the library of `quipu sockets`.
    Library,
}

const PAIRS: [(Way, Way); 5] = [
    (Way::Static, Way::Static),
    (Way::Static, Way::Plain),
    (Way::Plain, Way::Static),
    (Way::Static, Way::Library),
    (Way::Library, Way::Static),
];

/// A process that is ended if the test fails.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/static").join(name)
}

fn compiled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("static-{name}"))
}

/// The C program, linked statically or dynamically. None without a compiler for this machine.
fn bulk(name: &str, way: Way) -> Option<PathBuf> {
    let program = compiled(&format!("{name}-{way:?}"));
    let mut command = needs::compiler()?;
    command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    if way != Way::Library {
        command.arg("-static");
    }
    command.arg(source("bulk.c"));
    assert!(command.status().unwrap().success(), "the program does not compile");
    Some(program)
}

fn command(program: &Path, way: Way) -> Command {
    let mut command = Command::new(program);
    match way {
        Way::Plain => {}
        Way::Static => {
            command = Command::new(env!("CARGO_BIN_EXE_quipu"));
            command.args(["sockets", "--static", "--"]).arg(program);
        }
        Way::Library => {
            let library = cdylib::built(&["-p", "quipu-sockets-preload"], "quipu_sockets_preload");
            command.env("LD_PRELOAD", library);
        }
    }
    command.env_remove("QUIPU_SOCKETS");
    command
}

fn start(command: &mut Command) -> (Process, BufReader<ChildStdout>, String) {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut process = Process(command.spawn().unwrap());
    let mut output = BufReader::new(process.0.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    (process, output, line.trim_end().to_owned())
}

fn assert_done(command: &mut Command, what: &str) {
    let (mut process, _, line) = start(command);
    assert!(line.starts_with("done"), "{what}: {line}");
    assert!(process.0.wait().unwrap().success(), "{what}");
}

/// What the report says of a process, after it has said something that a test waits for.
fn report(process: &Process, wanted: impl Fn(&str) -> bool) -> String {
    let begin = Instant::now();
    loop {
        let output = Command::new(env!("CARGO_BIN_EXE_quipu"))
            .args(["sockets", "--report"])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let lines =
            text.lines().skip_while(|line| !line.starts_with(&format!("{} ", process.0.id())));
        let mut of_process: Vec<&str> = lines.collect();
        let next = of_process.iter().skip(1).position(|line| !line.starts_with(' '));
        of_process.truncate(next.map_or(of_process.len(), |at| at + 1));
        let text = of_process.join("\n");
        if wanted(&text) {
            return text;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "the report says only: {text}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// A stream from one process to another. False without a compiler.
fn transfer((receiver, sender): (Way, Way), flags: &str, seed: u32, octets: u64) -> bool {
    let [Some(receives), Some(sends)] = [receiver, sender].map(|way| bulk("bulk", way)) else {
        return false;
    };
    let what = format!("flags {flags}, seed {seed}, receiver {receiver:?}, sender {sender:?}");
    let numbers = [seed.to_string(), octets.to_string(), "0".to_owned()];
    let mut receive = command(&receives, receiver);
    receive.args(["receive", flags]).args(&numbers).arg("0");
    let (mut process, mut output, port) = start(&mut receive);
    let mut send = command(&sends, sender);
    send.args(["send", flags]).args(&numbers).arg(&port);
    assert_done(&mut send, &what);
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(rest.starts_with("done"), "{what}: {rest}");
    assert!(process.0.wait().unwrap().success(), "{what}");
    true
}

/// Blocking or not, with send(2) or write(2), interrupted by signals, shared with a child.
#[test]
fn every_octet_of_a_stream_arrives_in_its_place() {
    for (seed, flags) in (1..).zip(["-", "n", "st", "ft"]) {
        for pair in PAIRS {
            if !transfer(pair, flags, seed, 12_000_000) {
                return;
            }
        }
    }
}

#[test]
fn the_report_shows_the_connections_of_a_static_program() {
    let Some(program) = bulk("report", Way::Static) else { return };
    let numbers = ["1", "1000000000000", "1048576"];
    let mut receive = command(&program, Way::Static);
    let (receiver, _output, port) = start(receive.args(["receive", "-"]).args(numbers).arg("0"));
    let mut send = command(&program, Way::Static);
    let send = send.args(["send", "-"]).args(numbers).arg(&port);
    let sender = Process(send.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap());
    let is_shown = |text: &str| text.contains("0 of 1 connections raised (static)\n");
    let text = report(&receiver, is_shown);
    assert!(text.contains(&format!("127.0.0.1:{port} - 127.0.0.1:")), "{text}");
    assert!(text.ends_with("plain: the program uses calls that Quipu does not see"), "{text}");
    report(&sender, is_shown);
}

#[test]
fn a_go_server_and_its_client_see_the_same() {
    if Command::new("go").arg("version").output().is_err() {
        eprintln!("skipped: Go is not installed");
        return;
    }
    let program = compiled("web");
    let mut build = Command::new("go");
    build.env("CGO_ENABLED", "0").args(["build", "-o"]).arg(&program).arg(source("web.go"));
    assert!(build.status().unwrap().success(), "the program does not compile");
    for (server, client) in &PAIRS[..3] {
        let (_server, _output, ports) = start(command(&program, *server).arg("serve"));
        let mut fetch = command(&program, *client);
        assert_done(fetch.arg("fetch").args(ports.split(' ')), &format!("{server:?}, {client:?}"));
    }
}
