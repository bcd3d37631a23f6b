//! A sockets program over SDP: every octet arrives, in every way to wait for it.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
#[expect(dead_code, reason = "only the compiler is needed")]
mod needs;

const AF_INET: i32 = 2;
const AF_INET_SDP: i32 = 27;

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| cdylib::built(&["-p", "quipu-sdp-preload"], "quipu_sdp_preload"))
}

/// Compiles the program. None without a compiler for this machine.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let compile = || {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/stream.c");
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sdp-stream");
        let mut command = needs::compiler()?;
        command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(source);
        assert!(command.status().unwrap().success(), "the program does not compile");
        Some(program)
    };
    PROGRAM.get_or_init(compile).as_deref()
}

/// A port that is free now.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn run(family: i32, way: &str, rules: bool, capture: Option<&Path>) {
    let Some(program) = program() else { return };
    let mut command = Command::new(program);
    command.args([family.to_string(), way.into(), port().to_string()]);
    command.env("LD_PRELOAD", library()).env_remove("LIBSDP_CONFIG_FILE");
    if rules {
        command.env("SIMPLE_LIBSDP", "1");
    }
    if let Some(capture) = capture {
        command.env("QUIPU_SDP_PCAP", capture);
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "{way}: {errors}");
}

#[test]
fn a_program_that_asks_for_sdp_blocks() {
    run(AF_INET_SDP, "blocking", false, None);
}

#[test]
fn a_program_by_rule_polls() {
    run(AF_INET, "poll", true, None);
}

#[test]
fn a_program_by_rule_selects() {
    run(AF_INET, "select", true, None);
}

#[test]
fn a_program_by_rule_uses_epoll() {
    run(AF_INET, "epoll", true, None);
    run(AF_INET, "edges", true, None);
}

#[test]
fn without_a_rule_the_kernel_serves() {
    run(AF_INET, "poll", false, None);
}

#[test]
fn messages_are_captured() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let name = format!("sdp-{}", std::process::id());
    run(AF_INET_SDP, "blocking", false, Some(&folder.join(format!("{name}-%p.pcapng"))));
    let files = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path());
    let ours = |path: &PathBuf| path.to_string_lossy().contains(&name);
    let captures: Vec<PathBuf> = files.filter(ours).collect();
    // Both processes have one, and a Hello that 10 MB follow.
    let is_whole = |path: &&PathBuf| std::fs::metadata(path).is_ok_and(|file| file.len() > 1000);
    assert_eq!(captures.iter().filter(is_whole).count(), 2);
    captures.iter().for_each(|path| std::fs::remove_file(path).unwrap());
}
