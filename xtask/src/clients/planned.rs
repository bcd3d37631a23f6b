//! Rows in which the client runs under a plan of faults (`docs/faults.md`): it must end, as the plan
//! lets it, and say what it met. Programs of the distribution find every fault through the same calls
//! as on hardware.

use std::fs;
use std::path::PathBuf;

use crate::stage::Staged;

use super::hosts::Family;
use super::pair::{Pairing, run_pair};
use super::{LIMIT, Row, scratch_file};

/// What is to become of the client: its exit code is 0 or not, and its output has a text.
struct Planned {
    name: &'static str,
    plan: &'static str,
    program: &'static str,
    args: &'static [&'static str],
    succeeds: bool,
    says: &'static str,
}

const fn fails(
    name: &'static str,
    plan: &'static str,
    program: &'static str,
    says: &'static str,
) -> Planned {
    Planned { name, plan, program, args: &["-F", "-n", "100"], succeeds: false, says }
}

const fn survives(name: &'static str, plan: &'static str, program: &'static str) -> Planned {
    Planned { name, plan, program, args: &["-F", "-n", "100"], succeeds: true, says: "100" }
}

const PLANNED: [Planned; 19] = [
    fails(
        "reg_mr-refused",
        "inject = 'refuse'\ncall = 'reg_mr'\nerrno = 'ENOMEM'",
        "ib_write_bw",
        "Couldn't allocate MR",
    ),
    fails(
        "create_cq-refused",
        "inject = 'refuse'\ncall = 'create_cq'\nerrno = 'ENOMEM'",
        "ib_write_bw",
        "Couldn't create CQ",
    ),
    fails(
        "create_qp-refused",
        "inject = 'refuse'\ncall = 'create_qp'\nerrno = 'ENOMEM'",
        "ib_write_bw",
        "Unable to create QP",
    ),
    fails(
        "open_device-refused",
        "inject = 'refuse'\ncall = 'open_device'\nerrno = 'EIO'",
        "ib_write_bw",
        "Couldn't get context for the device",
    ),
    fails(
        "modify_qp-to-rtr-refused",
        "inject = 'refuse'\ncall = 'modify_qp'\nstate = 'rtr'\nerrno = 'ETIMEDOUT'",
        "ib_write_bw",
        "to RTR",
    ),
    fails(
        "post_send-refused",
        "inject = 'refuse'\ncall = 'post_send'\nnth = 50\nerrno = 'ENOMEM'",
        "ib_write_bw",
        "Couldn't post send",
    ),
    fails(
        "poll_cq-refused",
        "inject = 'refuse'\ncall = 'poll_cq'\nnth = 1\nerrno = 'EIO'",
        "ib_send_bw",
        "poll CQ failed",
    ),
    fails(
        "access-error",
        "inject = 'completion'\nstatus = 'rem_access_err'\nnth = 50",
        "ib_write_bw",
        "Failed status 10",
    ),
    fails(
        "protection-error",
        "inject = 'completion'\nstatus = 'loc_prot_err'\nnth = 50",
        "ib_read_bw",
        "Failed status 4",
    ),
    fails(
        "retries-exceeded",
        "inject = 'completion'\nstatus = 'retry_exc_err'\nnth = 50",
        "ib_send_bw",
        "Failed status 12",
    ),
    fails("dead-peer", "inject = 'dead_peer'\nnth = 50", "ib_read_bw", "Failed status 12"),
    fails("port-down", "inject = 'port_down'\nnth = 50", "ib_send_bw", "Failed status 12"),
    fails("device-removed", "inject = 'device_removal'\nnth = 50", "ib_send_bw", "post send"),
    fails(
        "queue-pair-fatal",
        "inject = 'event'\nevent = 'qp_fatal'\nnth = 50",
        "ib_send_bw",
        "Failed status 5",
    ),
    survives("port-blinks", "inject = 'port_down'\nnth = 50\ntime = '200ms'", "ib_send_bw"),
    survives("not-ready", "inject = 'rnr'\ntimes = 3\ntime = '1ms'\nevery = 10", "ib_send_bw"),
    survives("slow-peer", "inject = 'slow_peer'\ntime = '1ms'\njitter = '1ms'", "ib_write_lat"),
    survives(
        "late-completions",
        "inject = 'delay'\ntime = '1ms'\njitter = '3ms'\nprobability = 0.1",
        "ib_read_bw",
    ),
    survives("gid-changes", "inject = 'event'\nevent = 'gid_change'\nnth = 50", "ib_send_bw"),
];

/// A plan that makes no sense.
const NONSENSE: Planned =
    fails("nonsense", "inject = 'crash'", "ib_send_bw", "\"crash\" is none of: completion");

/// Through shared memory and over TCP; and a plan that makes no sense.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    for (way, same_host) in [("one-host", "auto"), ("one-host-tcp", "never")] {
        for planned in &PLANNED {
            rows.push(Row {
                name: format!("{way}/planned/{}", planned.name),
                run: Box::new(move || meets(staged, planned, same_host)),
            });
        }
    }
    rows.push(Row {
        name: "one-host/planned/nonsense-is-refused".into(),
        run: Box::new(move || refused(staged, &NONSENSE)),
    });
    rows
}

/// A file of the target folder with a plan, removed when it is dropped.
struct PlanFile(PathBuf);

impl PlanFile {
    fn new(planned: &Planned) -> Result<Self, String> {
        let file = Self(scratch_file("plan", "toml"));
        let written = fs::write(&file.0, format!("[[fault]]\n{}\n", planned.plan));
        written.map(|()| file).map_err(|error| error.to_string())
    }
}

impl Drop for PlanFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The pairing whose client runs under the plan.
fn under(staged: &Staged, plan: &PlanFile) -> Pairing {
    let mut pairing = Pairing::one_host(staged, Family::V4);
    let end = pairing.client.iter().position(|word| word == "--").unwrap_or(pairing.client.len());
    pairing.client.splice(end..end, ["--fault".to_owned(), plan.0.display().to_string()]);
    pairing
}

fn meets(staged: &Staged, planned: &Planned, same_host: &'static str) -> Result<(), String> {
    let plan = PlanFile::new(planned)?;
    let pairing = under(staged, &plan).with_env("QUIPU_SAME_HOST", same_host);
    let args: Vec<String> = planned.args.iter().map(|word| (*word).to_owned()).collect();
    let pair = run_pair(&pairing, planned.program, &args, LIMIT);
    let pair = pair.map_err(|error| format!("{error:#}"))?;
    let code = pair.client.status.and_then(|status| status.code());
    let ended = if planned.succeeds { code == Some(0) } else { code.is_some_and(|code| code > 0) };
    let text = pair.client.text("client");
    let struck = text.contains("injected by") && !text.contains("injected nothing");
    let told = struck && text.contains(planned.says);
    // The misfortune of its peer may end the server, or have it wait, but not crash.
    let server = if planned.succeeds { pair.server.success() } else { !pair.server.crashed() };
    if ended && told && server { Ok(()) } else { Err(pair.text()) }
}

fn refused(staged: &Staged, planned: &Planned) -> Result<(), String> {
    let plan = PlanFile::new(planned)?;
    let pairing = under(staged, &plan);
    let command = pairing.command(&pairing.client, planned.program, &[]);
    let ended = crate::process::capture(command, LIMIT).map_err(|error| format!("{error:#}"))?;
    let code = ended.status.and_then(|status| status.code());
    let text = ended.text("");
    if code == Some(125) && text.contains(planned.says) { Ok(()) } else { Err(text) }
}
