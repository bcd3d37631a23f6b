//! Programs that meet by rdma_cm on the device of plain iWARP, `quipu_iw0`.

use anyhow::{Result, bail};

use super::hosts::{Family, listens};
use super::pair::{Pairing, free_port, run_both, with_port};
use super::{LIMIT, Row};
use crate::stage::Staged;

type Words = &'static [&'static str];
/// Name, program, what both get; what the server gets before it, and the client before the address.
type Case = (&'static str, &'static str, Words, Words, Words);

const CASES: [Case; 11] = [
    ("rping", "rping", &["-C", "10", "-V"], &["-s"], &["-c", "-a"]),
    ("rping-large", "rping", &["-C", "3", "-V", "-S", "65000"], &["-s"], &["-c", "-a"]),
    (
        "send_bw",
        "ib_send_bw",
        &["-F", "-R", "-d", "quipu_iw0", "-n", "200", "-s", "4096"],
        &[],
        &[],
    ),
    (
        "write_bw",
        "ib_write_bw",
        &["-F", "-R", "-d", "quipu_iw0", "-n", "200", "-s", "65536"],
        &[],
        &[],
    ),
    (
        "read_bw",
        "ib_read_bw",
        &["-F", "-R", "-d", "quipu_iw0", "-n", "200", "-s", "65536"],
        &[],
        &[],
    ),
    (
        "send_lat",
        "ib_send_lat",
        &["-F", "-R", "-d", "quipu_iw0", "-n", "200", "-s", "64"],
        &[],
        &[],
    ),
    ("ucmatose", "ucmatose", &["-c", "5", "-C", "20"], &[], &["-s"]),
    ("rstream", "rstream", &["-I", "100", "-C", "20", "-S", "64", "-T", "v"], &[], &["-s"]),
    ("rstream-blocking", "rstream", &["-I", "10", "-C", "20", "-T", "b"], &[], &["-s"]),
    ("rstream-nonblocking", "rstream", &["-I", "10", "-C", "20", "-T", "n"], &[], &["-s"]),
    ("riostream", "riostream", &["-I", "10", "-C", "20", "-T", "v"], &[], &["-s"]),
];

/// The rows for two processes on one host.
pub(super) fn one_host(staged: &Staged) -> Vec<Row<'_>> {
    rows("one-host/iwarp", &Pairing::one_host(staged, Family::V4))
}

/// The rows for two hosts.
pub(super) fn two_hosts(staged: &Staged) -> Vec<Row<'_>> {
    rows("two-hosts/iwarp", &Pairing::two_hosts(staged, Family::V4))
}

fn rows<'a>(place: &str, pairing: &Pairing) -> Vec<Row<'a>> {
    let pairing = pairing.clone().with_env("QUIPU_CM_DEVICE", "quipu_iw0");
    let row = |case: &'static Case| {
        let pairing = pairing.clone();
        Row {
            name: format!("{place}/{}", case.0),
            run: Box::new(move || run(&pairing, case).map_err(|error| format!("{error:#}"))),
        }
    };
    CASES.iter().map(row).collect()
}

fn run(pairing: &Pairing, &(_, program, both, server, client): &Case) -> Result<()> {
    let words = |front: &[&str]| -> Vec<String> {
        front.iter().chain(both).map(|word| (*word).to_owned()).collect()
    };
    let port = free_port()?;
    let server = pairing.command(&pairing.server, program, &with_port(&words(server), port));
    let mut args = with_port(&words(&[]), port);
    args.extend(client.iter().map(|word| (*word).to_owned()));
    args.push(pairing.address.to_owned());
    let client = pairing.command(&pairing.client, program, &args);
    let pair = run_both(server, client, |id| listens(id, port), LIMIT)?;
    if pair.both_succeeded() { Ok(()) } else { bail!("{}", pair.text()) }
}
