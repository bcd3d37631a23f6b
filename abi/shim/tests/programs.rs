//! The programs of the system look at the adapter's files through the library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
mod needs;

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    // The engine beside it is asked for what depends on the address and the settings.
    let packages = ["-p", "quipu-shim", "-p", "quipu-engine"];
    LIBRARY.get_or_init(|| cdylib::built(&packages, "quipu_shim"))
}

/// Runs a line of shell with the library preloaded.
fn shell(line: &str) -> Output {
    Command::new("sh").args(["-c", line]).env("LD_PRELOAD", library()).output().unwrap()
}

/// What a line prints; it must succeed and complain about nothing.
fn prints(line: &str) -> String {
    let output = shell(line);
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && complaint.is_empty(), "{line}: {complaint}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_device_is_a_character_device_that_can_be_read_and_written() {
    let line = "d=/dev/infiniband/quipu0; test -c $d -a -r $d -a -w $d && echo x > $d && cat $d";
    assert_eq!(prints(line), "");
    assert_eq!(prints("stat -c '%F %a' /dev/infiniband/quipu0"), "character special file 666\n");
}

#[test]
fn the_kernels_first_device_seems_to_be_there_where_it_has_none() {
    let first = "/dev/infiniband/uverbs0";
    assert_eq!(prints(&format!("test -c {first} && echo yes")), "yes\n");
    if !Path::new(first).exists() {
        assert_eq!(prints("echo /dev/infiniband/uverbs*"), "/dev/infiniband/uverbs*\n");
    }
}

#[test]
fn files_have_their_text_and_cannot_be_written() {
    let port = "/sys/class/infiniband/quipu0/ports/1";
    assert_eq!(prints(&format!("cat {port}/gid_attrs/types/0")), "RoCE v2\n");
    assert_eq!(prints(&format!("cat {port}/../../node_type")), "1: CA\n");
    assert!(!shell(&format!("echo 1 > {port}/state")).status.success());
    assert!(!shell(&format!("cat {port}/no_such_file")).status.success());
}

#[test]
fn a_port_of_infiniband_has_its_link_layer_and_a_lid() {
    let port = "/sys/class/infiniband/quipu0/ports/1";
    let files =
        format!("cd /; cat {port}/link_layer {port}/lid {port}/sm_lid {port}/gid_attrs/types/0");
    assert_eq!(prints(&files), "Ethernet\n0x0\n0x0\nRoCE v2\n");
    let infiniband = format!("export QUIPU_LINK_LAYER=infiniband QUIPU_ADDRESS=127.0.0.1; {files}");
    assert_eq!(prints(&infiniband), "InfiniBand\n0x1\n0x1\nIB/RoCE v1\n");
}

#[test]
fn folders_are_listed() {
    assert_eq!(prints("ls /sys/class/infiniband/quipu0/ports/1/gid_attrs"), "ndevs\ntypes\n");
    let deep = prints("ls -lR /sys/class/infiniband/quipu0/ports");
    assert!(deep.contains("/ports/1/gids:") && deep.contains("link_layer"), "{deep}");
    let expanded = prints("echo /sys/class/infiniband/quipu0/ports/*/pkeys/*");
    assert_eq!(expanded, "/sys/class/infiniband/quipu0/ports/1/pkeys/0\n");
}

#[test]
fn other_paths_are_as_without_the_library() {
    for line in ["ls /usr", "cat /proc/version", "stat -c %F /dev/null", "readlink -f /bin/sh"] {
        let plain = Command::new("sh").args(["-c", line]).output().unwrap();
        assert_eq!(prints(line).into_bytes(), plain.stdout, "{line}");
    }
    assert!(!shell("cat /dev/infiniband/quipu9").status.success());
}

/// Compiles and runs a program of `tests/c`, which says what is wrong.
fn run(name: &str, settings: &[(&str, &str)]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("shim-{name}"));
    let Some(mut compile) = needs::compiler() else { return };
    compile.args(["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-o"]).arg(&program).arg(source);
    assert!(compile.status().expect("cc").success());
    let mut run = Command::new(program);
    run.env("LD_PRELOAD", library()).env("QUIPU_ADDRESS", "127.0.0.1");
    let output = run.envs(settings.iter().copied()).output().expect("the program starts");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && complaint.is_empty(), "{:?}\n{complaint}", output.status);
}

#[test]
fn folders_have_descriptors() {
    run("descriptors", &[]);
}

#[test]
fn a_folder_can_be_the_working_directory() {
    run("working", &[]);
    let line = "cd /sys/class/infiniband/quipu0 && cat ports/*/state && cd ports && pwd && ls -d ?";
    assert_eq!(prints(line), "4: ACTIVE\n/sys/class/infiniband/quipu0/ports\n1\n");
}

#[test]
fn files_are_as_those_of_the_kernel() {
    run("files", &[("QUIPU_DEVICES", "quipu0")]);
}

/// NCCL and others may be told where libibverbs is.
#[test]
fn libraries_that_are_loaded_by_their_paths_are_ours() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("shim-absolute");
    let found = folder.join("found");
    fs::create_dir_all(&found).unwrap();
    let verbs = folder.join("libibverbs.so.1");
    fs::copy(cdylib::built(&["-p", "quipu-ibverbs"], "ibverbs"), &verbs).unwrap();
    let Some(mut compile) = needs::compiler() else { return };
    let source = found.join("found.c");
    fs::write(&source, "int quipu_test_found(void) { return 7; }\n").unwrap();
    compile.args(["-shared", "-fPIC", "-o"]).arg(found.join("libquipu_test_found.so")).arg(source);
    assert!(compile.status().expect("cc").success());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/absolute.c");
    let program = folder.join("absolute");
    let Some(mut compile) = needs::compiler() else { return };
    compile.args(["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-o"]).arg(&program).arg(source);
    compile.args(["-Wl,--enable-new-dtags,-rpath,$ORIGIN/found", "-ldl"]);
    assert!(compile.status().expect("cc").success());
    let preload = [verbs.as_path(), library()].map(|file| file.display().to_string());
    let mut run = Command::new(program);
    let output = run.arg(&verbs).env("LD_PRELOAD", preload.join(":")).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{complaint}", output.status);
}

#[test]
fn find_goes_through_the_folders() {
    if needs::met(Path::new("/usr/bin/find").exists(), "findutils") {
        let found = prints("find /sys/class/infiniband/quipu0 -name node_guid");
        assert_eq!(found, "/sys/class/infiniband/quipu0/node_guid\n");
    }
}

#[test]
fn folders_are_copied() {
    let to = concat!(env!("CARGO_TARGET_TMPDIR"), "/ports");
    let line = "cp -r /sys/class/infiniband/quipu0/ports";
    assert_eq!(prints(&format!("rm -rf {to}; {line} {to} && cat {to}/1/state")), "4: ACTIVE\n");
}

#[test]
fn files_are_read_under_a_limit_of_their_size() {
    assert_eq!(prints("ulimit -f 0; cat /sys/class/infiniband/quipu0/node_type"), "1: CA\n");
}
