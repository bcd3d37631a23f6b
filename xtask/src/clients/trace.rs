//! Rows of traced calls (`quipu run --trace`).

use std::fs;

use crate::stage::Staged;

use super::hosts::Family;
use super::pair::{Pairing, run_pair};
use super::{LIMIT, Row, scratch_file};

/// A program with its options, and what lines of its client's trace must contain: parts, and how many
/// lines have all of them.
type Traced = (&'static str, &'static [&'static str], &'static [(&'static [&'static str], usize)]);

static PROGRAMS: [Traced; 3] = [
    (
        "ibv_rc_pingpong",
        &["-g", "0", "-n", "50"],
        &[
            (&["ibv_open_device(", " = 0x"], 1),
            (&["ibv_modify_qp(", "qp_state=IBV_QPS_RTR", "dest_qp_num=0x", " = 0 <"], 1),
            (&["ibv_post_send(", "opcode=IBV_WR_SEND,", "length=4096", " = 0 <"], 50),
            (&["ibv_close_device(", " = 0 <"], 1),
        ],
    ),
    // Each post is a list of calls, and each poll too.
    (
        "ibv_rc_pingpong",
        &["-g", "0", "-n", "50", "-N", "-t"],
        &[
            (&["ibv_wr_send(", "wr_flags=IBV_SEND_SIGNALED"], 50),
            (&["ibv_wr_complete(", " = 0 <"], 50),
            (&["ibv_start_poll(", "status=IBV_WC_SUCCESS", " = 0 <"], 1),
        ],
    ),
    // Calls of the connection manager, and those that it makes for the program.
    (
        "ib_send_bw",
        &["-R", "-F", "-n", "100"],
        &[
            (&["rdma_resolve_addr(", "127.0.0.1:"], 1),
            (&["rdma_get_cm_event(", "event=RDMA_CM_EVENT_ADDR_RESOLVED", " = 0 <"], 1),
            (&["rdma_get_cm_event(", "event=RDMA_CM_EVENT_ESTABLISHED", " = 0 <"], 1),
            (&["rdma_connect(", "retry_count=", " = 0 <"], 1),
            (&["ibv_create_qp", "qp_type=IBV_QPT_RC", " = {address=0x"], 1),
        ],
    ),
];

pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let row = |traced: &'static Traced| Row {
        name: format!("one-host/v4/trace/{}", [&[traced.0], traced.1].concat().join("")),
        run: Box::new(move || trace(staged, traced)),
    };
    PROGRAMS.iter().map(row).collect()
}

/// Runs a server, and a client whose calls are traced.
fn trace(staged: &Staged, (program, options, wanted): &Traced) -> Result<(), String> {
    let file = scratch_file("trace", "txt");
    let mut pairing = Pairing::one_host(staged, Family::V4);
    let behind = pairing.client.iter().position(|word| word == "--").unwrap_or_default();
    pairing.client.splice(behind..behind, ["--trace".into(), file.display().to_string()]);
    let args: Vec<String> = options.iter().map(|word| (*word).to_owned()).collect();
    let pair = run_pair(&pairing, program, &args, LIMIT).map_err(|error| format!("{error:#}"))?;
    if !pair.both_succeeded() {
        return Err(pair.text());
    }
    let text = fs::read_to_string(&file).map_err(|error| error.to_string())?;
    for (parts, count) in *wanted {
        let lines = text.lines().filter(|line| parts.iter().all(|part| line.contains(part)));
        let found = lines.count();
        // Programs poll as often as it takes.
        if found < *count {
            return Err(format!("  {}: {found} lines with {parts:?}, not {count}", file.display()));
        }
    }
    let _ = fs::remove_file(&file);
    Ok(())
}
