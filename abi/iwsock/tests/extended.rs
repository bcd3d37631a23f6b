//! A C program uses the extended sockets interface, with and without the library of `quipu sockets`.

use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
#[expect(dead_code, reason = "only the compiler is needed")]
mod needs;

/// Compiles the program. None without a compiler for this machine.
fn program(library: &Path) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("iwsock-extended");
    // Under the name that programs ask for.
    let libraries = Path::new(env!("CARGO_TARGET_TMPDIR")).join("iwsock");
    std::fs::create_dir_all(&libraries).unwrap();
    for name in ["libiwsock.so.1", "libiwsock.so"] {
        let _ = std::fs::remove_file(libraries.join(name));
        std::os::unix::fs::symlink(library, libraries.join(name)).unwrap();
    }
    let mut command = needs::compiler()?;
    command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    command.arg(folder.join("tests/c/extended.c")).arg("-I").arg(folder.join("include"));
    command.arg("-L").arg(&libraries).arg("-liwsock");
    command.arg(format!("-Wl,-rpath,{}", libraries.display()));
    assert!(command.status().unwrap().success(), "the program does not compile");
    Some(program)
}

fn run(program: &Path, preload: Option<&Path>) {
    let mut command = Command::new(program);
    command.env_remove("LD_PRELOAD");
    if let Some(library) = preload {
        command.env("LD_PRELOAD", library);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text, "done\n", "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn two_processes_exchange_messages_writes_and_reads_over_a_socket() {
    let library = cdylib::built(&["-p", "quipu-libiwsock"], "iwsock");
    let Some(program) = program(&library) else { return };
    run(&program, None);
    let preload = cdylib::built(&["-p", "quipu-sockets-preload"], "quipu_sockets_preload");
    run(&program, Some(&preload));
}

/// What a tool says of the library; none where there is no such tool.
fn said(tool: &str, arguments: &[&str], library: &Path) -> Option<String> {
    let output = Command::new(tool).args(arguments).arg(library).output().ok()?;
    assert!(output.status.success(), "{tool}: {}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn the_library_has_its_name_and_the_symbols_that_are_listed() {
    let library = cdylib::built(&["-p", "quipu-libiwsock"], "iwsock");
    let list = include_str!("../symbols.txt").lines().filter(|line| !line.starts_with('#'));
    let listed: Vec<&str> = list.filter(|line| !line.is_empty()).collect();
    let Some(text) = said("nm", &["-D", "--defined-only"], &library) else {
        println!("SKIPPED: no nm here");
        return;
    };
    let mut symbols: Vec<&str> = text.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    symbols.sort_unstable();
    assert_eq!(symbols, listed, "symbols.txt");
    let Some(text) = said("readelf", &["-d"], &library) else { return };
    assert!(text.contains("Library soname: [libiwsock.so.1]"), "{text}");
}
