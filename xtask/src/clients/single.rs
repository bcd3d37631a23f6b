//! Rows of one process: what programs see of the device, what the launcher does, and odd
//! circumstances.

use std::process::Command;
use std::time::Instant;

use crate::process::{Ended, capture};
use crate::stage::Staged;

use super::hosts::Family;
use super::pair::{Pairing, Server, run_pair};
use super::{LIMIT, Row};

/// A check of one program: name, address, words behind `quipu run --address A --`, what its output
/// must contain.
type Check = (&'static str, Family, &'static [&'static str], &'static [&'static str]);

const LOAD: &str = "import ctypes, sys\n\
    n = ctypes.c_int()\n\
    for name in ('libibverbs.so', 'libibverbs.so.1'):\n\
    \x20   lib = ctypes.CDLL(name)\n\
    \x20   lib.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)\n\
    \x20   lib.ibv_get_device_name.restype = ctypes.c_char_p\n\
    \x20   lib.ibv_get_device_name.argtypes = [ctypes.c_void_p]\n\
    \x20   devices = lib.ibv_get_device_list(ctypes.byref(n))\n\
    \x20   print(name, lib.ibv_get_device_name(devices[0]).decode())\n\
    mapped = {l.split()[-1] for l in open('/proc/self/maps') if 'libibverbs' in l}\n\
    print('copies', len(mapped))\n";

const CHECKS: [Check; 6] = [
    ("ibv_devices", Family::V4, &["ibv_devices"], &["quipu0"]),
    (
        "ibv_devinfo-v/v4",
        Family::V4,
        &["ibv_devinfo", "-v"],
        &["hca_id:\tquipu0", "PORT_ACTIVE", "Ethernet", "::ffff:127.0.0.1", "RoCE v2"],
    ),
    (
        "ibv_devinfo-v/v6",
        Family::V6,
        &["ibv_devinfo", "-v"],
        &["hca_id:\tquipu0", "PORT_ACTIVE", "::1", "RoCE v2"],
    ),
    (
        "ibv_devinfo-list",
        Family::V4,
        &["ibv_devinfo", "-l"],
        &["2 HCAs found", "quipu0", "quipu_iw0"],
    ),
    (
        "python-loads-one-copy",
        Family::V4,
        &["python3", "-c", LOAD],
        &["libibverbs.so quipu0", "libibverbs.so.1 quipu0", "copies 1"],
    ),
    (
        "character-device",
        Family::V4,
        &["sh", "-c", "test -c /dev/infiniband/quipu0 && echo yes"],
        &["yes"],
    ),
];

/// Everything about one process.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = CHECKS.iter().map(|check| program(staged, check)).collect();
    rows.push(row("launcher/nested", move || {
        let quipu = staged.quipu.display().to_string();
        let words = [quipu.as_str(), "run", "--address", "::1", "--", "ibv_devinfo", "-v"];
        contains(&launch(staged, Family::V4, &words)?, &["quipu0", "::1"])
    }));
    rows.push(row("launcher/exit-code", move || {
        let ended = launch(staged, Family::V4, &["sh", "-c", "exit 7"])?;
        let code = ended.status.and_then(|status| status.code());
        if code == Some(7) { Ok(()) } else { Err(ended.text("")) }
    }));
    rows.push(row("launcher/unknown-program", move || {
        let ended = launch(staged, Family::V4, &["no-such-program"])?;
        let told = ended.stderr.contains("no-such-program");
        let code = ended.status.and_then(|status| status.code());
        if told && code == Some(127) { Ok(()) } else { Err(ended.text("")) }
    }));
    rows.push(row("launcher/env", move || {
        let script = format!("eval \"$({} env)\" && ibv_devices", staged.quipu.display());
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        contains(&run(command)?, &["quipu0"])
    }));
    rows.push(row("command/devices", move || {
        let mut command = Command::new(&staged.quipu);
        command.args(["devices", "--json", "--address", "127.0.0.1"]);
        contains(&run(command)?, &["\"quipu0\"", "::ffff:127.0.0.1"])
    }));
    rows.push(row("command/top", move || top(staged)));
    rows.push(row("command/doctor", move || {
        let mut command = Command::new(&staged.quipu);
        command.args(["doctor"]);
        contains(&run(command)?, &["ib_write_bw"])
    }));
    rows
}

/// `quipu top` sees a program that has opened the device, and does not any more once it was killed.
fn top(staged: &Staged) -> Result<(), String> {
    let deadline = Instant::now() + LIMIT;
    let ask = |how: &str| {
        let mut command = Command::new(&staged.quipu);
        command.args(["top", how]);
        run(command)
    };
    let pairing = Pairing::one_host(staged, Family::V4);
    let server = Server::start(&pairing, "ib_send_bw", &[], deadline)
        .map_err(|error| format!("{error:#}"))?;
    let process = server.running.id();
    let named = format!("quipu_info{{process=\"{process}\",program=\"ib_send_bw\"");
    let mut seen = ask("--prometheus")?;
    while !seen.stdout.contains(&named) && Instant::now() < deadline {
        seen = ask("--prometheus")?;
    }
    let outcome = contains(&seen, &[&named])
        .and_then(|()| contains(&ask("--json")?, &[&format!("\"process\":{process}")]))
        .and_then(|()| contains(&ask("--once")?, &["PROGRAM", "ib_send_bw", "127.0.0.1"]));
    server.running.finish(Instant::now());
    outcome?;
    let after = ask("--prometheus")?;
    if after.stdout.contains(&named) { Err(after.text("after the end")) } else { Ok(()) }
}

/// Pairs in circumstances that programs meet: what a shell does first, and whether output is left.
const LIMITS: [(&str, &str); 3] = [
    ("closed-stdin", "exec \"$@\" <&-"),
    ("few-descriptors", "ulimit -n 32; exec \"$@\""),
    ("little-locked-memory", "ulimit -l 0; exec \"$@\""),
];

/// Rows in odd circumstances.
pub(super) fn limits(staged: &Staged) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    for (name, script) in LIMITS {
        rows.push(row(&format!("limits/{name}"), move || {
            let shell = ["sh", "-c", script, "sh"].map(str::to_owned);
            let mut pairing = Pairing::one_host(staged, Family::V4);
            pairing.server = [&shell[..], &pairing.server].concat();
            pairing.client = [&shell[..], &pairing.client].concat();
            let args = ["-F", "-n", "200"].map(str::to_owned);
            let pair = run_pair(&pairing, "ib_send_bw", &args, LIMIT);
            let pair = pair.map_err(|error| format!("{error:#}"))?;
            if pair.both_succeeded() { Ok(()) } else { Err(pair.text()) }
        }));
    }
    rows.push(row("limits/all-descriptors-closed", move || {
        let script = "exec \"$@\" <&- >&- 2>&-";
        let shell = ["sh", "-c", script, "sh"].map(str::to_owned);
        let mut pairing = Pairing::one_host(staged, Family::V4);
        pairing.client = [&shell[..], &pairing.client].concat();
        let args = ["-g", "0", "-n", "200"].map(str::to_owned);
        let pair = run_pair(&pairing, "ibv_rc_pingpong", &args, LIMIT);
        let pair = pair.map_err(|error| format!("{error:#}"))?;
        if pair.both_succeeded() { Ok(()) } else { Err(pair.text()) }
    }));
    rows
}

fn row<'a>(name: &str, run: impl Fn() -> Result<(), String> + Send + Sync + 'a) -> Row<'a> {
    Row { name: format!("one-host/{name}"), run: Box::new(run) }
}

fn program<'a>(staged: &'a Staged, check: &'static Check) -> Row<'a> {
    let (name, family, words, wanted) = check;
    row(name, move || contains(&launch(staged, *family, words)?, wanted))
}

fn launch(staged: &Staged, family: Family, words: &[&str]) -> Result<Ended, String> {
    let front = staged.run(family.loopback());
    let mut command = Command::new(&front[0]);
    command.args(&front[1..]).args(words);
    run(command)
}

fn run(command: Command) -> Result<Ended, String> {
    capture(command, LIMIT).map_err(|error| format!("{error:#}"))
}

fn contains(ended: &Ended, wanted: &[&str]) -> Result<(), String> {
    let missing = wanted.iter().find(|text| !ended.stdout.contains(**text));
    match missing {
        _ if !ended.success() => Err(ended.text("")),
        Some(text) => Err(format!("  no {text:?} in its output\n{}", ended.text(""))),
        None => Ok(()),
    }
}
