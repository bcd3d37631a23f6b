//! Loading: programs of the system, and C programs of our own, find this library in place of
//! rdma-core's, with an engine without a network behind it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::{env, fs};

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;

/// A folder with the libraries under the names that programs look for.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        // Hard files, not links: the facade looks for the engine where it was itself loaded from.
        let facade = cdylib::built(&["-p", "quipu-ibverbs"], "ibverbs");
        fs::copy(facade, folder.join("libibverbs.so.1")).unwrap();
        symlink("libibverbs.so.1", folder.join("libibverbs.so")).unwrap();
        let example = ["-p", "quipu-ibverbs", "--example", "null_engine"];
        let engine = cdylib::built(&example, "null_engine");
        fs::copy(engine, folder.join("libquipu_engine.so")).unwrap();
        folder
    })
}

/// Compiles `c/<name>.c`; none where the headers are not installed.
fn compiled(name: &str) -> Option<PathBuf> {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        eprintln!("skipped: the headers of libibverbs are not installed");
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let arguments = ["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-o"];
    let mut compile = Command::new("cc");
    compile.args(arguments).arg(&program).arg(source).args(["-libverbs", "-lpthread"]);
    assert!(compile.status().expect("cc").success());
    Some(program)
}

/// Runs a program with our library in place of the system's.
fn run(program: impl AsRef<Path>, arguments: &[&str]) -> Output {
    let preload = folder().join("libibverbs.so.1");
    let mut command = Command::new(program.as_ref());
    command.args(arguments).env("LD_LIBRARY_PATH", folder()).env("LD_PRELOAD", preload);
    command.output().expect("the program starts")
}

/// What a run printed; it must have succeeded.
fn printed(output: Output) -> String {
    let complaint = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{complaint}");
    text.into_owned()
}

fn installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).exists())
}

#[test]
fn symbols_are_found_in_every_way_that_programs_look() {
    let Some(program) = compiled("look_up") else { return };
    let text = printed(run(program, &[]));
    // A provider that is not installed is named; one that is must not miss a symbol.
    assert!(!text.contains("undefined") && !text.contains("version"), "{text}");
}

#[test]
fn names_and_rates_are_those_of_the_original() {
    let Some(program) = compiled("text") else { return };
    let original = printed(Command::new(&program).output().unwrap());
    assert_eq!(printed(run(program, &[])), original);
}

#[test]
fn ibv_devices_lists_the_device() {
    if !installed("ibv_devices") {
        eprintln!("skipped: ibv_devices is not installed");
        return;
    }
    let text = printed(run("ibv_devices", &[]));
    assert!(text.contains("quipu0"), "{text}");
}

#[test]
fn ibv_devinfo_shows_the_port_and_its_address() {
    if !installed("ibv_devinfo") {
        eprintln!("skipped: ibv_devinfo is not installed");
        return;
    }
    let text = printed(run("ibv_devinfo", &["-v", "-d", "quipu0"]));
    for part in ["PORT_ACTIVE (4)", "Ethernet", "::ffff:192.0.2.1, RoCE v2"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn without_an_engine_the_reason_is_told() {
    if !installed("ibv_devices") {
        eprintln!("skipped: ibv_devices is not installed");
        return;
    }
    let alone = folder().join("alone");
    fs::create_dir_all(&alone).unwrap();
    fs::copy(folder().join("libibverbs.so.1"), alone.join("libibverbs.so.1")).unwrap();
    let output = Command::new("ibv_devices").env("LD_LIBRARY_PATH", &alone).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(complaint.contains("libquipu_engine.so"), "{complaint}");
}
