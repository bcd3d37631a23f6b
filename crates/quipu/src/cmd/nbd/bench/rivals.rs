//! One connection to each kind of server, with several requests at a time.

use std::io;
use std::path::Path;

use super::process::{Folder, Running, command, is_there, start, start_until};
use super::{Failure, Table};

/// What ratios are to.
pub(super) const BASE: &str = "kernel TCP, quipu";
const UNIX: &str = "UNIX socket, quipu";
const SHARED: &str = "queue pairs, one host";
const STREAM: &str = "queue pairs over TCP";
const NBDKIT: &str = "UNIX socket, nbdkit";
const QEMU: &str = "UNIX socket, qemu-nbd";

/// Names, and the arguments of `quipu nbd load`. Data move in one request at most as queue pairs allow.
const TESTS: [(&str, &[&str]); 3] = [
    ("read, 1 MB x 4", &["--block", "1M", "--depth", "4"]),
    ("write, 1 MB x 4", &["--block", "1M", "--depth", "4", "--write"]),
    ("random read, 4 KB x 32", &["--block", "4K", "--depth", "32", "--random"]),
];
const SIZE: &str = "256M";

/// What a ratio should be at least.
pub(super) struct Target {
    /// How the names of its tests begin; empty for all.
    pub(super) test: &'static str,
    pub(super) name: &'static str,
    pub(super) to: &'static [&'static str],
    /// Of megabytes a second of processor time, and not of time.
    pub(super) of_cpu: bool,
    pub(super) value: f64,
}

/// A target of 1 MB requests, or of other tests.
const fn target(
    test: &'static str,
    name: &'static str,
    to: &'static [&'static str],
    of_cpu: bool,
    value: f64,
) -> Target {
    Target { test, name, to, of_cpu, value }
}

/// The targets.
pub(super) const TARGETS: [Target; 7] = [
    target("read", SHARED, &[BASE], false, 1.4),
    target("write", SHARED, &[BASE], false, 1.4),
    target("read", STREAM, &[BASE], false, 1.0),
    target("write", STREAM, &[BASE], false, 1.0),
    target("read", SHARED, &[BASE], true, 1.3),
    target("write", SHARED, &[BASE], true, 1.3),
    target("random", SHARED, &[NBDKIT, QEMU], false, 1.5),
];

/// A server, its clients' URI, and what their environment is.
struct Contender {
    name: &'static str,
    uri: String,
    environment: &'static [(&'static str, &'static str)],
}

/// Measures all in turns.
pub(super) fn measure(rounds: u32, seconds: f64, table: &mut Table) -> Result<(), Failure> {
    let folder = Folder::new()?;
    let quipu = std::env::current_exe()?.to_string_lossy().into_owned();
    let (contenders, _servers) = contenders(&quipu, &folder, table)?;
    let seconds = seconds.to_string();
    for contender in &contenders {
        // The disk has its memory before anything is measured.
        let fill = ["--block", "1M", "--depth", "4", "--write", "--seconds", "1"];
        load(&quipu, contender, &fill)?;
    }
    for round in 0..rounds {
        for (test, arguments) in TESTS {
            for at in 0..contenders.len() {
                let contender = &contenders[(at + round as usize) % contenders.len()];
                let arguments = [arguments, &["--seconds", &seconds]].concat();
                table.add(test, contender.name, load(&quipu, contender, &arguments)?);
            }
        }
    }
    let order: Vec<_> = contenders.iter().map(|contender| contender.name).collect();
    let place = |row: &super::Row| {
        let test = TESTS.iter().position(|(test, _)| *test == row.test);
        (test, order.iter().position(|name| *name == row.name))
    };
    table.rows.sort_by_key(place);
    Ok(())
}

fn contenders(
    quipu: &str,
    folder: &Folder,
    table: &mut Table,
) -> io::Result<(Vec<Contender>, Vec<Running>)> {
    let (mut contenders, mut servers) = (Vec::new(), Vec::new());
    let socket = folder.path("quipu");
    let serve = [quipu, "nbd", "serve", "--memory", SIZE];
    let tcp = ["--listen", "127.0.0.1:0"];
    let rdma = ["--listen", "127.0.0.1:0", "--rdma"];
    let never: &[_] = &[("QUIPU_SAME_HOST", "never")];
    for (names, arguments) in [
        (&[(BASE, &[][..])][..], &tcp[..]),
        (&[(UNIX, &[])], &["--unix", &socket]),
        (&[(SHARED, &[]), (STREAM, never)], &rdma),
    ] {
        let (server, line) = start(command(&[&serve, arguments].concat()))?;
        let uri = line.split_whitespace().last().unwrap_or_default();
        for &(name, environment) in names {
            contenders.push(Contender { name, uri: uri.to_owned(), environment });
        }
        servers.push(server);
    }
    let (nbdkit, qemu, disk) = (folder.path("nbdkit"), folder.path("qemu"), folder.path("disk"));
    let others: [(&str, &str, Vec<&str>); 2] = [
        (NBDKIT, &nbdkit, vec!["nbdkit", "-f", "-U", &nbdkit, "memory", SIZE]),
        (QEMU, &qemu, vec!["qemu-nbd", "-t", "-e", "8", "-f", "raw", "-k", &qemu, &disk]),
    ];
    for (name, socket, line) in others {
        if !is_there(line[0]) {
            table.note(format!("{name}: {} is not installed", line[0]));
            continue;
        }
        if name == QEMU {
            std::fs::File::create(&disk)?.set_len(256 << 20)?;
        }
        servers.push(start_until(command(&line), Path::new(socket))?);
        let uri = format!("nbd+unix:///?socket={socket}");
        contenders.push(Contender { name, uri, environment: &[] });
    }
    Ok((contenders, servers))
}

/// A turn: megabytes a second, and a second of processor time.
fn load(quipu: &str, contender: &Contender, arguments: &[&str]) -> io::Result<(f64, f64)> {
    let line = [&[quipu, "nbd", "load", "--json", &contender.uri][..], arguments].concat();
    let output = command(&line).envs(contender.environment.iter().copied()).output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let failed = || io::Error::other(format!("{}: {}", contender.name, text.trim()));
    if !output.status.success() {
        return Err(failed());
    }
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).map_err(|_| failed())?;
    let number = |key: &str| value[key].as_f64().ok_or_else(failed);
    Ok((number("mb_per_s")?, number("mb_per_cpu_s")?))
}
