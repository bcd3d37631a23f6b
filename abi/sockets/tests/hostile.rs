//! A process that writes anything into the memory that it shares with this one. Calls and descriptors that
//! end while octets are in a ring.

use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
#[expect(dead_code, reason = "only the compiler is needed")]
mod needs;

fn check(name: &str, mode: &str) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("sockets-{name}-{mode}"));
    let Some(mut compiler) = needs::compiler() else { return };
    compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&program);
    assert!(compiler.arg(source).status().unwrap().success(), "the program does not compile");
    let library = cdylib::built(&["-p", "quipu-sockets-preload"], "quipu_sockets_preload");
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60"]).arg(&program).arg(mode).env("LD_PRELOAD", &library);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text, "done\n", "{name} {mode}: {errors}");
}

#[test]
fn octets_that_a_peer_takes_while_they_are_copied_keep_no_call() {
    check("hostile", "flips");
}

#[test]
fn octets_that_a_peer_announces_and_does_not_send_keep_no_call_for_long() {
    check("hostile", "early");
}

#[test]
fn a_peer_cannot_take_the_lock_to_send() {
    check("hostile", "locks");
}

#[test]
fn a_thread_that_cannot_send_can_be_cancelled() {
    check("ends", "cancel");
}

#[test]
fn a_send_with_a_time_limit_ends() {
    check("ends", "limit");
}

#[test]
fn octets_of_a_closed_descriptor_go_to_no_other_connection() {
    check("ends", "reuse");
}

#[test]
fn a_child_makes_sockets_whatever_its_parents_threads_did() {
    check("ends", "forked");
}

#[test]
fn a_socket_in_place_of_one_that_was_closed_unseen_keeps_its_options() {
    check("ends", "late");
}

#[test]
fn octets_in_the_ring_arrive_after_a_shutdown() {
    check("ends", "shut");
}

#[test]
fn octets_stay_in_order_when_the_receiver_has_nothing_to_say_any_more() {
    check("ends", "half");
}

#[test]
fn octets_stay_in_order_before_calls_that_only_the_kernel_has() {
    check("ends", "many");
}

#[test]
fn a_handler_of_a_signal_closes_sockets_of_the_set_that_its_thread_is_in() {
    check("closes", "any");
}
