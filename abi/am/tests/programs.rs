//! C programs: they compile without a warning, and end with 0, which they do if their results are
//! right.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
mod needs;

/// The folder of the library under the name that programs look for.
fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).to_path_buf();
        let library = cdylib::built(&["-p", "quipu-libam"], "am");
        std::fs::copy(library, folder.join("libam.so.1")).unwrap();
        folder
    })
}

/// Compiles a program of this package; none where the compiler is for another machine.
fn compile(source: &str) -> Option<PathBuf> {
    let mut compile = needs::compiler()?;
    let (here, folder) = (Path::new(env!("CARGO_MANIFEST_DIR")), library());
    let name = Path::new(source).file_stem().unwrap();
    let program = folder.join(format!("am-{}", name.to_str().unwrap()));
    compile.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-I"]);
    compile.arg(here.join("include")).arg(here.join(source));
    compile.arg(folder.join("libam.so.1")).arg("-o").arg(&program);
    assert!(compile.status().expect("cc").success(), "{source}");
    Some(program)
}

fn run(source: &str, args: &[&str]) {
    run_over("rc", source, args);
}

/// Runs a program over a transport, as `QUIPU_AM_TRANSPORT` names it.
fn run_over(transport: &str, source: &str, args: &[&str]) {
    let Some(program) = compile(source) else { return };
    let mut command = Command::new("timeout");
    command.arg("100").arg(program).args(args).env("QUIPU_AM_TRANSPORT", transport);
    let output =
        command.env("LD_LIBRARY_PATH", library()).env("QUIPU_ADDRESS", "127.0.0.1").output();
    let output = output.expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{source} {args:?}: {:?}\n{said}", output.status);
}

#[test]
fn two_processes_play_ping_pong() {
    run("examples/pingpong.c", &["200"]);
}

/// Runs an example as 1, 2, 4 and 8 processes, which it starts itself.
fn run_as_many(source: &str, size: &str) {
    for processes in ["1", "2", "4", "8"] {
        run(source, &[processes, "L", size]);
    }
}

#[test]
fn remote_counters_add_up() {
    run_as_many("examples/counters.c", "200");
}

#[test]
fn a_distributed_table_finds_all_keys() {
    run_as_many("examples/table.c", "200");
}

#[test]
fn a_parallel_search_finds_the_known_number() {
    run_as_many("examples/search.c", "8");
}

#[test]
fn stolen_work_is_done_once() {
    run_as_many("examples/stealing.c", "7");
}

#[test]
fn messages_to_a_killed_peer_come_back() {
    run("tests/c/death.c", &["kill"]);
}

#[test]
fn a_peer_that_computes_is_waited_for() {
    run("tests/c/death.c", &["slow"]);
}

#[test]
fn calls_return_the_codes_of_the_dialect() {
    run("tests/c/codes.c", &[]);
}

#[test]
fn the_older_dialect_reaches_a_known_port_of_a_peer_that_starts_late() {
    run("tests/c/udpam.c", &[]);
}

#[test]
fn the_older_dialect_does_so_over_datagrams() {
    run_over("udp", "tests/c/udpam.c", &[]);
}

#[test]
fn endpoints_at_known_ports_reach_each_other_between_two_hosts() {
    let Some(program) = compile("tests/c/udpam_hosts.c") else { return };
    let mut probe = Command::new("unshare");
    probe.args(["-rn", "sh", "-c", "ip link add q0 type veth peer name q1 && unshare -n true"]);
    let can = probe.output().is_ok_and(|output| output.status.success());
    if !needs::met(can, "iproute2 (and user namespaces)") {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../types/testing/hosts.sh");
    for transport in ["rc", "udp"] {
        let mut command = Command::new("timeout");
        command.args(["60", "unshare", "-rn", "sh"]).arg(&script).arg(&program);
        command.arg("10.77.0.1,10.77.0.2").env("QUIPU_AM_TRANSPORT", transport);
        let output = command.env("LD_LIBRARY_PATH", library()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{transport}: {:?}\n{said}", output.status);
    }
}
