//! C programs over this library, libibverbs and the engine, in one process each.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
mod needs;
#[path = "../../types/testing/network.rs"]
mod network;

/// A folder with the libraries under the names that programs look for.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rdmacm");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        for (package, name, file) in [
            ("quipu-rdmacm", "rdmacm", "librdmacm.so.1"),
            ("quipu-ibverbs", "ibverbs", "libibverbs.so.1"),
            ("quipu-engine", "quipu_engine", "libquipu_engine.so"),
        ] {
            // Files, not links: the libraries look for each other where they were loaded from.
            fs::copy(cdylib::built(&["-p", package], name), folder.join(file)).unwrap();
        }
        symlink("librdmacm.so.1", folder.join("librdmacm.so")).unwrap();
        folder
    })
}

/// What programs see but where a test says otherwise.
const DEVICES: &str = "quipu0,quipu_iw0";

/// Compiles `c/<name>.c` and runs it; it says itself what is wrong.
fn run(name: &str) {
    run_behind(name, None, DEVICES);
}

/// The same with a library in front of all, and other devices.
fn run_behind(name: &str, front: Option<&Path>, devices: &str) {
    run_with(name, front, devices, None);
}

/// The same with a variable of its own.
fn run_with(name: &str, front: Option<&Path>, devices: &str, variable: Option<(&str, &str)>) {
    if !needs::met(Path::new("/usr/include/rdma/rdma_verbs.h").exists(), "librdmacm-dev") {
        return;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    // Another package has programs of the same names.
    let program = folder().join(format!("{name}-{devices}"));
    let arguments = ["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-o"];
    let Some(mut compile) = needs::compiler() else { return };
    compile.args(arguments).arg(&program).arg(source).args(["-lrdmacm", "-libverbs", "-lpthread"]);
    assert!(compile.status().expect("cc").success());
    let preload = ["libibverbs.so.1", "librdmacm.so.1"].map(|file| folder().join(file));
    let preload = front.map(Path::to_owned).into_iter().chain(preload);
    let preload: Vec<String> = preload.map(|file| file.display().to_string()).collect();
    let mut command = Command::new(program);
    network::of_its_own(&mut command);
    let output = command
        .env("LD_LIBRARY_PATH", folder())
        .env("LD_PRELOAD", preload.join(":"))
        .env("QUIPU_ADDRESS", "127.0.0.1")
        .env("QUIPU_DEVICES", devices)
        .envs(variable)
        .envs(devices.contains("quipu_qp0").then_some(("QUIPU_QPIP_LINK", "udp:127.0.0.1:0")))
        .output()
        .expect("the program starts");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{complaint}", output.status);
}

#[test]
fn calls_fail_as_their_manual_pages_say() {
    run("errors");
}

#[test]
fn connections_are_made_refused_and_ended() {
    run("connections");
}

#[test]
fn synchronous_identifiers_wait_for_their_events() {
    run("synchronous");
}

#[test]
fn queues_are_shared_and_named() {
    run("queues");
}

#[test]
fn names_are_resolved_by_events_and_programs_write_their_own() {
    run("names");
}

#[test]
fn addresses_of_infiniband_are_for_its_ports() {
    run_with("native", None, DEVICES, Some(("QUIPU_LINK_LAYER", "infiniband")));
}

#[test]
fn streams_over_queue_pairs_behave_as_sockets() {
    run("sockets");
}

#[test]
fn programs_for_tcp_find_in_streams_what_they_count_on() {
    run("likeness");
    run_behind("likeness", None, "quipu_iw0");
}

#[test]
fn streams_go_over_an_rnic_which_has_no_immediate_data() {
    run_behind("sockets", None, "quipu_iw0");
    run_behind("epoll", None, "quipu_iw0");
}

#[test]
fn the_device_of_qpip_has_ports_and_no_streams() {
    run_behind("bare", None, "quipu0,quipu_qp0");
}

#[test]
fn sets_of_sockets_and_descriptors_tell_levels_and_edges() {
    run("epoll");
}

#[test]
fn waits_of_sockets_end_by_signals_times_and_ends() {
    run("waits");
    run_behind("waits", None, "quipu_iw0");
}

#[test]
fn whoever_waits_for_a_socket_is_woken_beside_others_who_do() {
    run("shared");
    run_behind("shared", None, "quipu_iw0");
}

#[test]
fn sockets_become_streams_over_queue_pairs() {
    let library = format!("/usr/lib/{}-linux-gnu/rsocket/librspreload.so", env::consts::ARCH);
    let library = Path::new(&library);
    if needs::met(library.exists(), "librdmacm1") {
        run_behind("preloaded", Some(library), DEVICES);
    }
}

#[test]
fn peers_that_break_the_rules_harm_nobody() {
    run("hostile");
    run_behind("hostile", None, "quipu_iw0");
}

#[test]
fn requests_without_a_device_are_refused_unseen() {
    run("strangers");
    run_behind("strangers", None, "quipu_iw0");
}

#[test]
fn every_error_is_reached_through_a_plan_of_faults() {
    run("faults");
}

#[test]
fn the_strict_mode_looks_at_private_data() {
    run("strict");
}

#[test]
fn threads_that_wait_can_be_cancelled() {
    run("cancelled");
}

#[test]
fn threads_that_wait_go_on_after_signals_that_restart_calls() {
    run("interrupted");
}
