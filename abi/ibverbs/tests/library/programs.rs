//! Loading: programs of the system, and C programs of our own, find this library in place of
//! rdma-core's, with an engine without a network behind it.

use std::os::unix::fs::symlink;
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

use crate::harness::{Folder, compiled, needs, printed};

/// The facade over the engine without a network.
fn folder() -> &'static Folder {
    static FOLDER: OnceLock<Folder> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let example = ["-p", "quipu-ibverbs", "--example", "null_engine"];
        Folder::new("programs", &example, "null_engine")
    })
}

fn installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).exists())
}

#[test]
fn symbols_are_found_in_every_way_that_programs_look() {
    let Some(program) = compiled("look_up") else { return };
    let text = printed(folder().run(program, &[]));
    // A provider that is not installed is named; one that is must not miss a symbol.
    assert!(!text.contains("undefined") && !text.contains("version"), "{text}");
}

#[test]
fn names_and_rates_are_those_of_the_original() {
    let Some(program) = compiled("text") else { return };
    let original = printed(Command::new(&program).output().unwrap());
    assert_eq!(printed(folder().run(program, &[])), original);
}

#[test]
fn ibv_devices_lists_the_device() {
    if !needs::met(installed("ibv_devices"), "ibverbs-utils") {
        return;
    }
    let text = printed(folder().run("ibv_devices", &[]));
    assert!(text.contains("quipu0"), "{text}");
}

#[test]
fn ibv_devinfo_shows_the_port_and_its_address() {
    if !needs::met(installed("ibv_devinfo"), "ibverbs-utils") {
        return;
    }
    let text = printed(folder().run("ibv_devinfo", &["-v", "-d", "quipu0"]));
    for part in ["PORT_ACTIVE (4)", "Ethernet", "::ffff:192.0.2.1, RoCE v2"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn the_engine_is_found_where_the_library_is() {
    let Some(program) = compiled("elsewhere") else { return };
    // By a path that means something else by then, and by a link.
    let links = folder().path().join("links");
    fs::create_dir_all(&links).unwrap();
    let link = links.join("libibverbs.so.1");
    let _ = fs::remove_file(&link);
    symlink("../libibverbs.so.1", link).unwrap();
    for place in [".", "links"] {
        let mut command = Command::new(&program);
        command.current_dir(folder().path()).env("LD_LIBRARY_PATH", place);
        assert_eq!(printed(command.output().unwrap()), "quipu0\n", "{place}");
    }
    let absolute = Command::new(&program).env("LD_LIBRARY_PATH", &links).output().unwrap();
    assert_eq!(printed(absolute), "quipu0\n");
}

#[test]
fn without_an_engine_the_reason_is_told() {
    if !needs::met(installed("ibv_devices"), "ibverbs-utils") {
        return;
    }
    let alone = folder().path().join("alone");
    fs::create_dir_all(&alone).unwrap();
    fs::copy(folder().path().join("libibverbs.so.1"), alone.join("libibverbs.so.1")).unwrap();
    let output = Command::new("ibv_devices").env("LD_LIBRARY_PATH", &alone).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(complaint.contains("libquipu_engine.so"), "{complaint}");
}
