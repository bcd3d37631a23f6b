//! What the peers of a C program hear when it ends.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
#[expect(dead_code, reason = "all headers are this package's own")]
mod needs;

/// The program; none where the compiler is for another machine.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = || {
        let mut compile = needs::compiler()?;
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let library = cdylib::built(&["-p", "quipu-qpip"], "qpip");
        let program = folder.join("qpip-exit");
        // A file of the name that programs look for.
        std::fs::copy(library, folder.join("libqpip.so.1")).unwrap();
        compile.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-I"]);
        compile.arg(here.join("include")).arg(here.join("tests/c/exit.c"));
        compile.arg(folder.join("libqpip.so.1")).arg("-o").arg(&program);
        assert!(compile.status().expect("cc").success());
        Some(program)
    };
    PROGRAM.get_or_init(made).as_deref()
}

fn run(how: &str) {
    let Some(program) = program() else { return };
    let mut command = Command::new(program);
    let output = command.arg(how).env("LD_LIBRARY_PATH", program.parent().unwrap()).output();
    let output = output.expect("the program starts");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{how}: {:?}\n{complaint}", output.status);
}

#[test]
fn a_peer_hears_that_a_program_has_returned_from_main() {
    run("return");
}

#[test]
fn a_peer_hears_that_a_program_has_called_exit() {
    run("exit");
}

#[test]
fn handlers_of_the_program_come_first() {
    run("handler");
}

#[test]
fn a_program_may_exit_in_a_handler_of_a_signal() {
    run("signal");
}

#[test]
fn a_thread_that_waits_can_be_cancelled() {
    run("cancel");
}

#[test]
fn the_child_of_a_program_ends_without_a_word() {
    run("fork");
}
