//! C programs of two processes: they compile without a warning, and end with 0, which they do if their
//! results are right.

use std::collections::BTreeSet;
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
    command.env("VIPL_TEST_LOG", log_of(program));
    network::of_its_own(&mut command);
    command.envs(environment.iter().copied()).output().expect("the program starts")
}

fn succeed(source: &str, args: &[&str], address: &str, environment: &[(&str, &str)]) {
    let Some(program) = compile(source, &[]) else { return };
    let output = output(&program, args, address, environment);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{source} {args:?}: {:?}\n{said}", output.status);
}

/// Where a program notes which codes its calls returned.
fn log_of(program: &Path) -> PathBuf {
    program.with_extension("log")
}

/// Runs a program over shared memory, TCP, and IPv6, and once more with variables of the environment. Then
/// looks whether the matrix in the documentation has the program's letter exactly where it was.
fn succeed_everywhere(source: &str, more: &[(&str, &str)]) {
    let Some(program) = compile(source, &[]) else { return };
    let _ = std::fs::remove_file(log_of(&program));
    succeed(source, &[], "127.0.0.1", &[]);
    succeed(source, &[], "127.0.0.1", &[("QUIPU_SAME_HOST", "never")]);
    if !more.is_empty() {
        succeed(source, &[], "127.0.0.1", more);
    }
    if has_ipv6() {
        succeed(source, &[], "::1", &[]);
    }
    check_matrix(source, &program);
}

/// The calls of the matrix in the documentation, each with the codes that have a program's letter.
fn documented(document: &str, letter: char) -> BTreeSet<(String, u32)> {
    let lines = document.lines().filter(|line| line.starts_with("| `Vip"));
    let cells = lines.flat_map(|line| {
        let mut cells = line.split('|').map(str::trim).skip(1);
        let call = cells.next().unwrap_or_default().trim_matches('`').to_owned();
        cells.enumerate().map(move |(code, cell)| (call.clone(), code as u32, cell))
    });
    let reached = cells.filter(|(_, _, cell)| cell.contains(letter));
    reached.map(|(call, code, _)| (call, code)).collect()
}

fn check_matrix(source: &str, program: &Path) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/vipl.md");
    let document = std::fs::read_to_string(page).unwrap();
    let key = format!("| `{source}` | ");
    let letter = document.lines().find_map(|line| line.strip_prefix(&key)?.chars().next());
    let documented = documented(&document, letter.expect("docs/vipl.md lists the program"));
    let log = std::fs::read_to_string(log_of(program)).unwrap();
    let reached: BTreeSet<(String, u32)> = log
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(call, code)| (call.to_owned(), code.parse().unwrap()))
        .collect();
    let missing: Vec<_> = reached.difference(&documented).collect();
    let wrong: Vec<_> = documented.difference(&reached).collect();
    assert!(
        missing.is_empty() && wrong.is_empty(),
        "docs/vipl.md, {source}: cells without its letter {missing:?}, cells that it does not reach {wrong:?}"
    );
}

fn has_ipv6() -> bool {
    needs::met(std::net::UdpSocket::bind("[::1]:0").is_ok(), "IPv6 on the loopback")
}

#[test]
fn sends_arrive_at_each_reliability_level() {
    succeed_everywhere("tests/c/sends.c", &[]);
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
    succeed_everywhere("tests/c/rdma.c", &[]);
}

#[test]
fn completion_queues_and_handlers_report_each_descriptor() {
    succeed_everywhere("tests/c/queues.c", &[]);
}

#[test]
fn connections_return_their_codes() {
    succeed_everywhere("tests/c/connect.c", &[]);
}

#[test]
fn peers_meet_whoever_comes_first() {
    succeed_everywhere("tests/c/peers.c", &[]);
}

#[test]
fn careless_calls_get_codes() {
    succeed_everywhere("tests/c/codes.c", &[("QUIPU_VIPL_STRICT", "1")]);
}

#[test]
fn errors_break_what_the_reliability_level_says() {
    succeed_everywhere("tests/c/errors.c", &[("QUIPU_VIPL_RNR", "0")]);
}

#[test]
fn names_are_those_of_the_resolver() {
    succeed_everywhere("tests/c/names.c", &[]);
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

#[test]
fn two_hosts_connect_over_ipv4_and_ipv6() {
    let Some(program) = compile("tests/c/hosts.c", &[]) else { return };
    let can = Command::new("unshare").args(["-rn", "ip", "link"]).output();
    let can = can.is_ok_and(|output| output.status.success());
    if !needs::met(can, "iproute2 (and user namespaces)") {
        return;
    }
    let _ = std::fs::remove_file(log_of(&program));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../types/testing/hosts.sh");
    let mut command = Command::new("timeout");
    command.args(["60", "unshare", "-rn", "sh"]).arg(script).arg(&program);
    command.args(["10.77.0.1,10.77.0.2", "fd77::1,fd77::2"]);
    command.env("LD_LIBRARY_PATH", library()).env("VIPL_TEST_LOG", log_of(&program));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{said}", output.status);
    check_matrix("tests/c/hosts.c", &program);
}

#[test]
fn strangers_do_not_keep_others_from_connecting() {
    succeed_everywhere("tests/c/stranger.c", &[]);
}
