//! Programs for which RDMA is one way among others: fio, qperf, MPICH; and UCX where it sleeps.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Instant;

use anyhow::{Result, bail, ensure};

use crate::process::capture;
use crate::stage::Staged;

use super::hosts::{Family, listens};
use super::pair::{Pairing, client_args, free_port, run_both, start, with_port};
use super::{LIMIT, Row, openmpi};

/// How fio's client moves its blocks.
const FIO_VERBS: [&str; 3] = ["write", "read", "send"];

/// Tests of qperf that connect by rdma_cm, a second each. Others name their peers by LID, which Ethernet has
/// none of.
const QPERF: [&str; 5] =
    ["rc_bi_bw", "rc_lat", "rc_rdma_read_bw", "rc_rdma_write_lat", "ver_rc_fetch_add"];

/// What `tests/clients/mpi.c` does under MPICH, with how many ranks, and what its first rank says.
const MPICH: [(&str, &str, &str); 3] = [
    ("pingpong", "2", "messages of 1 to"),
    ("allreduce", "4", "sums over 4 ranks are right"),
    ("onesided", "2", "windows of 2 to"),
];

/// What a row does with the place that it runs at.
type Run = Box<dyn Fn(&Pairing) -> Result<()> + Send + Sync>;

/// The rows for processes on one host.
pub(super) fn one_host(staged: &Staged) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    for (place, same_host) in [("one-host", "auto"), ("one-host-tcp", "never")] {
        let pairing = Pairing::one_host(staged, Family::V4).with_env("QUIPU_SAME_HOST", same_host);
        let row = |name: String, run: Run| {
            let pairing = pairing.clone();
            let run = move || run(&pairing).map_err(|error| format!("{error:#}"));
            Row { name: format!("{place}/{name}"), run: Box::new(run) }
        };
        for verb in FIO_VERBS {
            rows.push(row(format!("fio/{verb}"), Box::new(move |pairing| fio(pairing, verb))));
        }
        rows.push(row("qperf".into(), Box::new(qperf)));
        for transport in ["rc", "ud"] {
            let name = format!("ucx-{transport}/sleeping");
            rows.push(row(name, Box::new(move |pairing| sleeping(pairing, transport))));
        }
        rows.push(row("ucx-rc/io_demo".into(), Box::new(io_demo)));
        for test in MPICH {
            rows.push(row(
                format!("mpich/{}", test.0),
                Box::new(move |pairing| mpich(pairing, test)),
            ));
        }
    }
    rows
}

/// The server takes what the client brings or fetches, and ends with it.
fn fio(pairing: &Pairing, verb: &str) -> Result<()> {
    let port = free_port()?;
    let job = |words: &[&str]| -> Vec<String> {
        let common = ["--name=job", "--ioengine=rdma", "--bs=64k", "--size=4m", "--thread"];
        let words = common.iter().chain(words).map(|word| (*word).to_owned());
        words.chain([format!("--port={port}")]).collect()
    };
    // A receive for each of the 64 sends: the client tries no send again for which there is none.
    let server = job(&["--rw=read", "--iodepth=80"]);
    let (host, verb) = (format!("--hostname={}", pairing.address), format!("--verb={verb}"));
    let client = job(&["--rw=write", "--iodepth=8", "--iodepth_batch_complete=1", &host, &verb]);
    let server = pairing.command(&pairing.server, "fio", &server);
    let client = pairing.command(&pairing.client, "fio", &client);
    let pair = run_both(server, client, |id| listens(id, port), LIMIT)?;
    let all = pair.client.stdout.contains("issued rwts: total=0,64,0,0");
    if pair.both_succeeded() && all { Ok(()) } else { bail!("{}", pair.text()) }
}

/// All tests with one server, which the last call ends.
fn qperf(pairing: &Pairing) -> Result<()> {
    let port = free_port()?;
    let common = ["-lp".to_owned(), port.to_string()];
    let server = pairing.command(&pairing.server, "qperf", &common);
    let deadline = Instant::now() + LIMIT;
    let server = start(server, |id| listens(id, port), deadline)?;
    let run = |words: &[&str]| {
        let mut args = common.to_vec();
        args.push(pairing.address.to_owned());
        args.extend(words.iter().map(|word| (*word).to_owned()));
        capture(pairing.command(&pairing.client, "qperf", &args), LIMIT)
    };
    for test in QPERF {
        let ended = run(&["-cm", "1", "-t", "1", test])?;
        let told = ended.stdout.contains(test) && ended.stdout.contains('=');
        ensure!(ended.success() && told, "{}", ended.text(test));
    }
    ensure!(run(&["quit"])?.success(), "it cannot be asked to end");
    let server = server.finish(deadline);
    if server.success() { Ok(()) } else { bail!("{}", server.text("server")) }
}

/// UCX looks for completions, asks for an event and sleeps, and does not look again in between.
fn sleeping(pairing: &Pairing, transport: &'static str) -> Result<()> {
    let pairing =
        pairing.clone().with_env("UCX_TLS", transport).with_env("UCX_NET_DEVICES", "quipu0:1");
    let args = ["-t", "tag_lat", "-n", "200", "-w", "20", "-s", "8", "-E", "sleep"];
    let (args, port) = (args.map(str::to_owned), free_port()?);
    let server = pairing.command(&pairing.server, "ucx_perftest", &with_port(&args, port));
    let client = client_args(&args, port, pairing.address);
    let client = pairing.command(&pairing.client, "ucx_perftest", &client);
    let pair = run_both(server, client, |id| listens(id, port), LIMIT)?;
    let done = pair.client.stdout.contains("Final:");
    if pair.both_succeeded() && done { Ok(()) } else { bail!("{}", pair.text()) }
}

/// Connects by UCX's own calls, which use rdma_cm. The server goes on when its client has left.
fn io_demo(pairing: &Pairing) -> Result<()> {
    let pairing = pairing
        .clone()
        .with_env("UCX_TLS", "rc,ud,self")
        .with_env("UCX_NET_DEVICES", "quipu0:1")
        .with_env("UCX_SOCKADDR_TLS_PRIORITY", "rdmacm");
    let (args, port) = (["-i", "50"].map(str::to_owned), free_port()?);
    let server = pairing.command(&pairing.server, "io_demo", &with_port(&args, port));
    let deadline = Instant::now() + LIMIT;
    let mut server = start(server, |id| listens(id, port), deadline)?;
    let args = client_args(&args, port, pairing.address);
    let client = capture(pairing.command(&pairing.client, "io_demo", &args), LIMIT)?;
    let over = server.has_ended();
    server.kill();
    let server = server.finish(Instant::now());
    let fine = client.success() && !over;
    if fine { Ok(()) } else { bail!("{}{}", server.text("server"), client.text("client")) }
}

/// MPICH speaks UCX.
fn mpich(pairing: &Pairing, (test, ranks, says): (&str, &str, &str)) -> Result<()> {
    let pairing =
        pairing.clone().with_env("UCX_TLS", "rc,self").with_env("UCX_NET_DEVICES", "quipu0:1");
    let program = mpich_program().as_ref().map_err(|why| anyhow::anyhow!("{why}"))?;
    let args = ["-n", ranks, &program.display().to_string(), test].map(str::to_owned);
    let ended = capture(pairing.command(&pairing.client, "mpiexec.mpich", &args), LIMIT)?;
    let told = ended.stdout.contains(says);
    if ended.success() && told { Ok(()) } else { bail!("{}", ended.text("mpiexec")) }
}

/// The program of the tests, built when it is first asked for.
fn mpich_program() -> &'static Result<PathBuf, String> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PROGRAM.get_or_init(|| openmpi::build(["mpicc.mpich", "mpiexec.mpich"], "mpi-mpich"))
}
