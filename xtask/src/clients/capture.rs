//! Rows of captured packets, as Wireshark's `tshark` reads them.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::process;
use crate::stage::Staged;

use super::hosts::Family;
use super::pair::{Pairing, run_pair};
use super::{LIMIT, Row, scratch_file};

/// How many messages of each opcode (RFC 5040 4.2) a program's client exchanges.
type Messages = &'static [(u8, usize)];

/// Programs, their options, and the messages in the client's capture.
const PROGRAMS: [(&str, &[&str], Messages); 4] = [
    ("ib_send_bw", &["-n", "100", "-s", "65536"], &[(3, 100)]),
    ("ib_write_bw", &["-n", "100", "-s", "200000"], &[(0, 100)]),
    ("ib_read_lat", &["-n", "50", "-s", "8192"], &[(1, 50), (2, 50)]),
    ("ib_atomic_bw", &["-n", "50", "-A", "FETCH_AND_ADD"], &[(0xa, 50), (0xb, 50)]),
];

/// A datagram and its answer, over and over: of each as many, and all with right checksums.
fn datagrams(staged: &Staged) -> Result<(), String> {
    let options = ["-g", "0", "-n", "50"];
    let pairing = Pairing::one_host(staged, Family::V4);
    captured(&pairing, "ibv_ud_pingpong", &options, |file| {
        let complaints =
            fields(file, "_ws.malformed || !udp || udp.checksum.status == 0", &["frame.number"])?;
        if !complaints.is_empty() {
            return Err(format!("tshark complains of packets {complaints}"));
        }
        let count = fields(file, "udp", &["frame.number"])?.lines().count();
        if count == 100 { Ok(()) } else { Err(format!("{count} packets, not 100")) }
    })
}

/// Connection management: its start-up of MPA is decoded, and where it hands the stream to a queue pair of
/// plain iWARP, so is everything behind it.
fn managed(staged: &Staged, device: &'static str) -> Result<(), String> {
    let plain = device == "quipu_iw0";
    let pairing = Pairing::one_host(staged, Family::V4)
        .with_env("QUIPU_CM_DEVICE", device)
        .with_env("QUIPU_SAME_HOST", "never");
    let options = ["-F", "-R", "-d", device, "-n", "100", "-s", "65536"];
    captured(&pairing, "ib_send_bw", &options, |file| {
        let count = |filter: &str| {
            Ok::<_, String>(fields(file, filter, &["frame.number"])?.lines().count())
        };
        let complaints = count("_ws.malformed || tcp.checksum.status == 0 || tcp.analysis.flags")?;
        let streams = count("tcp.flags.syn == 1 && tcp.flags.ack == 0")?;
        let started = (complaints, count("iwarp_mpa.req")?, count("iwarp_mpa.rep")?);
        if streams == 0 || started != (0, streams, streams) {
            return Err(format!(
                "complaints, requests, replies: {started:?}, of {streams} streams"
            ));
        }
        if !plain {
            let told = |name| format!("frame.comment == \"connection management: {name}\"");
            let told = [count(&told("REQ"))?, count(&told("REP"))?, count(&told("RTU"))?];
            let connected = told[0] > 0 && told.iter().all(|count| *count == told[0]);
            return if connected { Ok(()) } else { Err(format!("REQ, REP, RTU: {told:?}")) };
        }
        checked(file)?;
        // What programs say to each other beside comes in the same way.
        let sends = count("iwarp_ddp.last_flag == 1 && iwarp_rdma.opcode == 3")?;
        if sends >= 100 { Ok(()) } else { Err(format!("{sends} sends, not 100")) }
    })
}

/// Every program over TCP and through shared memory.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let mut rows = vec![Row {
        name: "one-host/v4/pcap/datagrams".into(),
        run: Box::new(move || datagrams(staged)),
    }];
    rows.extend(["quipu0", "quipu_iw0"].map(|device| Row {
        name: format!("one-host/v4/pcap/cm/{device}"),
        run: Box::new(move || managed(staged, device)),
    }));
    for (path, same_host) in [("tcp", "never"), ("same-host", "auto")] {
        for family in [Family::V4, Family::V6] {
            for (program, options, messages) in PROGRAMS {
                rows.push(Row {
                    name: format!("one-host/{}/pcap/{path}/{program}", family.name()),
                    run: Box::new(move || {
                        let pairing = Pairing::one_host(staged, family)
                            .with_env("QUIPU_SAME_HOST", same_host);
                        let options = [&["-F"], options].concat();
                        captured(&pairing, program, &options, |file| look(file, messages))
                    }),
                });
            }
        }
    }
    rows
}

/// Runs a server and a client whose packets are captured, and has the capture looked at.
fn captured(
    pairing: &Pairing,
    program: &str,
    options: &[&str],
    look: impl Fn(&Path) -> Result<(), String>,
) -> Result<(), String> {
    let file = scratch_file("capture", "pcapng");
    let mut pairing = pairing.clone();
    let behind = pairing.client.iter().position(|word| word == "--").unwrap_or_default();
    pairing.client.splice(behind..behind, ["--pcap".into(), file.display().to_string()]);
    let args: Vec<String> = options.iter().map(|word| (*word).to_owned()).collect();
    let pair = run_pair(&pairing, program, &args, LIMIT).map_err(|error| format!("{error:#}"))?;
    if !pair.both_succeeded() {
        return Err(pair.text());
    }
    let outcome = look(&file);
    if outcome.is_ok() {
        let _ = std::fs::remove_file(&file);
    }
    outcome.map_err(|why| format!("  {}: {why}", file.display()))
}

/// Has `tshark` decode the file.
fn look(file: &Path, messages: Messages) -> Result<(), String> {
    // Complaints of more than a note. Of the start-up there are two: it is of revision 2, which this
    // decoder does not know.
    let complaints = fields(
        file,
        "_ws.malformed || tcp.checksum.status == 0 || tcp.analysis.flags || (iwarp_mpa.fpdu && _ws.expert.severity >= 0x600000)",
        &["frame.number", "_ws.expert.message"],
    )?;
    if !complaints.is_empty() {
        return Err(format!("tshark complains of packets {complaints}"));
    }
    let foreign = fields(file, "tcp.len > 0 && !iwarp_mpa", &["frame.number"])?;
    if !foreign.is_empty() {
        return Err(format!("packets that are no iWARP: {foreign}"));
    }
    checked(file)?;
    let lasts = fields(file, "iwarp_ddp.last_flag == 1", &["iwarp_rdma.opcode"])?;
    let mut counts: BTreeMap<u8, usize> = BTreeMap::new();
    for opcode in lasts.split_whitespace() {
        let digits = opcode.trim_start_matches("0x");
        let opcode = u8::from_str_radix(digits, 16).map_err(|_| format!("opcode {opcode}"))?;
        // Control messages are as many as the moment wants.
        if opcode != 0xf {
            *counts.entry(opcode).or_default() += 1;
        }
    }
    let wanted: BTreeMap<u8, usize> = messages.iter().copied().collect();
    if counts == wanted { Ok(()) } else { Err(format!("{counts:?}, not {wanted:?}")) }
}

/// Has `tshark` check the CRC of every FPDU.
fn checked(file: &Path) -> Result<(), String> {
    let details = tshark(file, "iwarp_mpa.fpdu", &["-V", "-O", "iwarp_mpa"])?;
    let count = |text: &str| details.matches(text).count();
    let (checked, good) = (count("CRC check:"), count("(Good CRC32)"));
    if checked == 0 || good != checked {
        return Err(format!("{good} of {checked} CRCs are right"));
    }
    Ok(())
}

/// What `tshark` prints of the packets that a filter lets through.
pub(super) fn fields(file: &Path, filter: &str, names: &[&str]) -> Result<String, String> {
    let columns = names.iter().flat_map(|name| ["-e", name]);
    tshark(file, filter, &["-T", "fields"].into_iter().chain(columns).collect::<Vec<_>>())
}

fn tshark(file: &Path, filter: &str, options: &[&str]) -> Result<String, String> {
    let mut command = Command::new("tshark");
    command.args(["-o", "tcp.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE"]);
    // Ports are any, and some are registered for something else.
    command.args(["-o", "tcp.try_heuristic_first:TRUE", "-o", "udp.try_heuristic_first:TRUE"]);
    // It takes any four zeros of a program for the beginning of a message of its own.
    command.args(["--disable-heuristic", "rpcrdma_iwarp"]);
    command.arg("-r").arg(file).args(["-Y", filter]).args(options);
    let ended = process::capture(command, LIMIT).map_err(|error| format!("{error:#}"))?;
    if ended.success() { Ok(ended.stdout.trim().to_owned()) } else { Err(ended.text("tshark")) }
}
