//! C programs over this library and the real engine: two queue pairs of one process, connected to
//! each other. Each program is a list of named tests, and runs one alone if that is its argument.

use crate::harness::{compiled, over_engine, printed};

#[test]
fn every_operation_works() {
    let Some(program) = compiled("rc_work") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn states_errors_and_events_follow_the_rules() {
    let Some(program) = compiled("rc_rules") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn regions_change_and_end_as_in_the_original() {
    let Some(program) = compiled("objects") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn devices_answer_and_are_found_by_numbers() {
    let Some(program) = compiled("queries") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn datagrams_name_who_sent_them() {
    let Some(program) = compiled("datagrams") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn messages_name_a_shared_queue() {
    let Some(program) = compiled("xrc") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn raw_packets_are_steered_counted_and_spread() {
    let Some(program) = compiled("raw") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn forks_descriptors_and_threads_are_no_surprise() {
    let Some(program) = compiled("rc_process") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn descriptors_are_out_of_the_way_and_channels_are_as_the_kernels() {
    let Some(program) = compiled("descriptors") else { return };
    printed(over_engine().run_alone(program, &[("QUIPU_SAME_HOST", "never")]));
}

#[test]
fn every_error_is_reached_through_a_plan_of_faults() {
    let Some(program) = compiled("faults") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn a_plan_of_faults_strikes_what_it_names() {
    let Some(program) = compiled("fault_targets") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn the_strict_mode_finds_what_hardware_would_punish() {
    let Some(program) = compiled("strict") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn the_strict_mode_finds_what_ends_too_early() {
    let Some(program) = compiled("strict_ends") else { return };
    printed(over_engine().run(program, &[]));
}

#[test]
fn the_strict_mode_finds_memory_that_is_changed_while_the_adapter_has_it() {
    let Some(program) = compiled("strict_targets") else { return };
    printed(over_engine().run(program, &[]));
}
