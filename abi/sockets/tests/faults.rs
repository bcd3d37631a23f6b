//! Processes that are killed or stopped, that fork, that have no descriptors left or have closed the first
//! ones, and a proxy between two ends: each runs without the library and with it.

use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
#[expect(dead_code, reason = "only the compiler is needed")]
mod needs;

fn check(mode: &str) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/faults.c");
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("sockets-faults-{mode}"));
    let Some(mut compiler) = needs::compiler() else { return };
    compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(source);
    assert!(compiler.status().unwrap().success(), "the program does not compile");
    let library = cdylib::built(&["-p", "quipu-sockets-preload"], "quipu_sockets_preload");
    for preloaded in [false, true] {
        let mut command = Command::new(&program);
        command.arg(mode).env_remove("LD_PRELOAD");
        if preloaded {
            command.env("LD_PRELOAD", &library);
        }
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(text, "done\n", "{mode}, with the library: {preloaded}: {errors}");
    }
}

#[test]
fn what_a_killed_sender_has_sent_arrives() {
    check("killed");
}

#[test]
fn a_sender_that_is_stopped_for_a_while_goes_on() {
    check("stopped");
}

#[test]
fn a_receiver_that_is_killed_about_when_the_connection_is_raised_ends_it_as_tcp_does() {
    check("receiver-killed");
}

#[test]
fn a_receiver_that_is_stopped_about_when_the_connection_is_raised_gets_everything() {
    check("receiver-stopped");
}

#[test]
fn a_process_of_another_user_cannot_take_a_connection_over() {
    let output = Command::new("id").arg("-u").output().unwrap();
    let is_root = String::from_utf8_lossy(&output.stdout).trim() == "0";
    if !is_root {
        eprintln!("skipped: only root can be another user");
        return;
    }
    check("stranger");
}

#[test]
fn a_thousand_children_take_connections_over() {
    check("children");
}

#[test]
fn a_process_without_free_descriptors_keeps_its_connection() {
    check("descriptors");
}

#[test]
fn a_program_that_closes_all_descriptors_at_its_start_is_carried() {
    check("closed");
}

#[test]
fn a_program_whose_sockets_have_the_numbers_0_to_2_is_carried() {
    check("low");
}

#[test]
fn a_proxy_between_the_ends_passes_all_octets_on() {
    check("proxy");
}

#[test]
fn text_that_the_c_library_prints_comes_in_order() {
    check("printed");
}
