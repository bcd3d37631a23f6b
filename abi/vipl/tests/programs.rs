//! C programs of two processes: they compile without a warning, and end with 0, which they do if their
//! results are right.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
mod needs;
#[path = "../../types/testing/network.rs"]
mod network;

/// The folder of the library under the name that programs look for.
fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).to_path_buf();
        let library = cdylib::built(&["-p", "quipu-vipl"], "vipl");
        std::fs::copy(library, folder.join("libvipl.so.1")).unwrap();
        folder
    })
}

/// Compiles a program of this package; none where the compiler is for another machine.
fn compile(source: &str, flags: &[&str]) -> Option<PathBuf> {
    let mut compile = needs::compiler()?;
    let (here, folder) = (Path::new(env!("CARGO_MANIFEST_DIR")), library());
    let name = Path::new(source).file_stem().unwrap().to_str().unwrap();
    let program = folder.join(format!("vipl-{name}{}", flags.concat()));
    compile.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-I"]);
    compile.arg(here.join("include")).args(flags).arg(here.join(source));
    compile.arg(folder.join("libvipl.so.1")).arg("-o").arg(&program);
    assert!(compile.status().expect("cc").success(), "{source}");
    Some(program)
}

/// Runs a program with an address and more variables of the environment.
fn output(program: &Path, args: &[&str], address: &str, environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new("timeout");
    command.arg("100").arg(program).args(args);
    command.env("LD_LIBRARY_PATH", library()).env("QUIPU_ADDRESS", address);
    network::of_its_own(&mut command);
    command.envs(environment.iter().copied()).output().expect("the program starts")
}

fn succeed(source: &str, args: &[&str], address: &str, environment: &[(&str, &str)]) {
    let Some(program) = compile(source, &[]) else { return };
    let output = output(&program, args, address, environment);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{source} {args:?}: {:?}\n{said}", output.status);
}

/// Runs a program over shared memory, TCP, and IPv6.
fn succeed_everywhere(source: &str) {
    succeed(source, &[], "127.0.0.1", &[]);
    succeed(source, &[], "127.0.0.1", &[("QUIPU_SAME_HOST", "never")]);
    if has_ipv6() {
        succeed(source, &[], "::1", &[]);
    }
}

fn has_ipv6() -> bool {
    needs::met(std::net::UdpSocket::bind("[::1]:0").is_ok(), "IPv6 on the loopback")
}

#[test]
fn sends_arrive_at_each_reliability_level() {
    succeed_everywhere("tests/c/sends.c");
}

#[test]
fn the_example_measures_latency_and_bandwidth() {
    let Some(program) = compile("examples/pingpong.c", &[]) else { return };
    let output = output(&program, &["-n", "100"], "127.0.0.1", &[]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{:?} {said}", output.status);
    assert_eq!(said.lines().count(), 11, "{said}");
    assert!(said.lines().last().unwrap().starts_with("  1048576"), "{said}");
}

#[test]
fn rdma_reaches_what_it_may_and_nothing_else() {
    succeed_everywhere("tests/c/rdma.c");
}

#[test]
fn completion_queues_and_handlers_report_each_descriptor() {
    succeed_everywhere("tests/c/queues.c");
}

#[test]
fn connections_return_their_codes() {
    succeed_everywhere("tests/c/connect.c");
}

#[test]
fn peers_meet_whoever_comes_first() {
    succeed_everywhere("tests/c/peers.c");
}

#[test]
fn careless_calls_get_codes() {
    succeed_everywhere("tests/c/codes.c");
    succeed("tests/c/codes.c", &[], "127.0.0.1", &[("QUIPU_VIPL_STRICT", "1")]);
}

#[test]
fn errors_break_what_the_reliability_level_says() {
    succeed_everywhere("tests/c/errors.c");
    succeed("tests/c/errors.c", &[], "127.0.0.1", &[("QUIPU_VIPL_RNR", "0")]);
}

#[test]
fn names_are_those_of_the_resolver() {
    succeed_everywhere("tests/c/names.c");
}

#[test]
fn the_header_has_the_layout_that_programs_know() {
    for flags in [&[][..], &["-DVIPL_NAMES_1_0"]] {
        compile("tests/c/layout.c", flags);
    }
}

#[test]
fn programs_of_cxx_take_the_header() {
    let Some(mut compile) = needs::compiler() else { return };
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/vipl.h");
    compile.args(["-xc++", "-std=c++98", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]);
    assert!(compile.arg(header).status().expect("cc").success());
}
