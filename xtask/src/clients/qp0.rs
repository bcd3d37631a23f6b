//! Programs of verbs on the device `quipu_qp0`, which meet over TCP segments and nothing else; and the C
//! programs of libqpip.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use crate::process::{Running, capture, wait_until};
use crate::stage::Staged;

use super::hosts::{Family, listens};
use super::pair::{free_port, run_both};
use super::qpip::{Net, check, run, start};
use super::suite::PYTHON;
use super::{LIMIT, Row, scratch_file};

pub(super) type Words = &'static [&'static str];

/// Two ends of a veth pair: the interface, and the adapter's address there. It is not the kernel's.
pub(super) const VETH: [(&str, &str); 2] = [("va", "10.79.0.1/24"), ("vb", "10.79.0.2/24")];

/// The rows for two processes on one host, which have a link without any right.
pub(super) fn one_host(staged: &Staged) -> Vec<Row<'_>> {
    let row = |name: &str, run: fn(&Staged) -> Result<(), String>| Row {
        name: format!("one-host/qp0/{name}"),
        run: Box::new(move || run(staged)),
    };
    vec![
        row("devinfo", devinfo),
        row("rdma_client", rdma_client),
        row("rping-has-no-write", rping),
        row("c-pingpong", c_pingpong),
        row("c-pingpong-shared", c_pingpong_shared),
    ]
}

/// The rows for adapters on the two ends of a veth pair, and of one that the kernel is the peer of.
pub(super) fn two_hosts(staged: &Staged) -> Vec<Row<'_>> {
    let perftest = |name: &str, program: &'static str, words: Words| Row {
        name: format!("two-hosts/v4/qp0/{name}"),
        run: Box::new(move || veth(staged, program, words)),
    };
    let mut rows = vec![
        perftest(
            "send_bw",
            "ib_send_bw",
            &["-F", "-R", "-d", "quipu_qp0", "-n", "500", "-s", "4096"],
        ),
        perftest(
            "send_lat",
            "ib_send_lat",
            &["-F", "-R", "-d", "quipu_qp0", "-n", "200", "-s", "64"],
        ),
    ];
    rows.push(Row {
        name: "two-hosts/v4/qp0/link-gone".into(),
        run: Box::new(move || link_gone(staged)),
    });
    rows.extend([Family::V4, Family::V6].map(|family| Row {
        name: format!("two-hosts/{}/qp0/curl-of-c-hello", family.name()),
        run: Box::new(move || c_hello(staged, &Net::new(family)?)),
    }));
    rows
}

pub(super) fn said(error: impl std::fmt::Display) -> String {
    format!("{error:#}")
}

/// A program over Quipu with a link of its own.
fn program(staged: &Staged, port: u16, words: &[&str]) -> Command {
    let mut command = Command::new(&staged.quipu);
    command.args(["run", "--address", "127.0.0.1", "--"]).args(words);
    command.env("QUIPU_QPIP_LINK", format!("udp:127.0.0.1:{port}"));
    command
}

/// The address that follows from such a link (`specs/qpip-udp-link.md`).
fn address(port: u16) -> String {
    format!("fd51:7069:7075:0:7f00:1:{port:x}:0")
}

/// The device is listed where there is a link, and only there.
fn devinfo(staged: &Staged) -> Result<(), String> {
    let link = free_port().map_err(said)?;
    let ended = run(program(staged, link, &["ibv_devinfo", "-v", "-d", "quipu_qp0"]))?;
    let active = ended.stdout.contains("PORT_ACTIVE (4)");
    check(active && ended.stdout.contains("fd51:7069:7075:"), &ended, "no port, or no address")?;
    let ended = run(program(staged, link, &["ibv_devices"]))?;
    check(ended.stdout.contains("quipu_qp0"), &ended, "not listed")?;
    let script = "import pyverbs.device as d; print([x.name for x in d.get_device_list()])";
    let ended = run(program(staged, link, &[PYTHON, "-c", script]))?;
    check(ended.stdout.contains("quipu_qp0"), &ended, "not listed by pyverbs")?;
    let mut without = program(staged, link, &["ibv_devices"]);
    without.env_remove("QUIPU_QPIP_LINK");
    let ended = run(without)?;
    check(!ended.stdout.contains("quipu_qp0"), &ended, "listed without a link")
}

fn rdma_client(staged: &Staged) -> Result<(), String> {
    let port = free_port().map_err(said)?;
    let (link, other) = (free_port().map_err(said)?, free_port().map_err(said)?);
    let server = program(staged, link, &["rdma_server", "-p", &port.to_string()]);
    let words = ["rdma_client", "-s", &address(link), "-p", &port.to_string()];
    let client = program(staged, other, &words);
    let pair = run_both(server, client, |id| listens(id, port), LIMIT).map_err(said)?;
    let ends = pair.client.stdout.contains("end 0") && pair.server.stdout.contains("end 0");
    if pair.both_succeeded() && ends { Ok(()) } else { Err(pair.text()) }
}

/// There are no writes and reads: what wants them is told, and does not hang.
fn rping(staged: &Staged) -> Result<(), String> {
    let port = free_port().map_err(said)?.to_string();
    let (link, other) = (free_port().map_err(said)?, free_port().map_err(said)?);
    let at = address(link);
    let words = ["rping", "-s", "-a", &at, "-p", &port, "-C", "1"];
    let mut server = Running::start(program(staged, link, &words)).map_err(said)?;
    let words = ["rping", "-c", "-a", &at, "-p", &port, "-C", "1"];
    // The server says nothing when it is there. It is asked until it is.
    let deadline = Instant::now() + LIMIT;
    let mut refused = None;
    wait_until(deadline, || {
        if server.has_ended() {
            return true;
        }
        let ended = capture(program(staged, other, &words), LIMIT);
        let away = |text: &str| text.contains("REJECTED") || text.contains("UNREACHABLE");
        refused = ended.ok().filter(|ended| !away(&ended.stderr) && !away(&ended.stdout));
        refused.is_some()
    });
    let server = server.finish(deadline);
    match refused {
        // The server is to write; what it says is errno of ibv_post_send: EINVAL.
        Some(_) => check(server.stderr.contains("post send error 22"), &server, "another reason"),
        None => Err(server.text("server")),
    }
}

/// A namespace with the veth pair, for as long as its process is there.
pub(super) fn pair_of_links() -> Result<Running, String> {
    let [(a, _), (b, _)] = VETH;
    let script = format!(
        "ip link set lo up && ip link add {a} type veth peer name {b} && ip link set {a} up && \
         ip link set {b} up && echo ready && exec sleep 3600"
    );
    let mut command = Command::new("unshare");
    command.args(["--net", "--", "sh", "-c", &script]);
    start(command, "ready")
}

/// A command in that namespace.
pub(super) fn within(keeper: &Running, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/proc/{}/ns/net", keeper.id())).arg("--").arg(program);
    command
}

/// `quipu`, with an adapter on one end of the pair.
fn quipu_at(staged: &Staged, keeper: &Running, end: usize) -> Command {
    let (interface, address) = VETH[end];
    let mut command = within(keeper, &staged.quipu);
    command.env("QUIPU_QPIP_LINK", format!("packet:{interface}"));
    command.env("QUIPU_QPIP_ADDRESS", address);
    command
}

/// Perftest between adapters that have an end of a veth pair each.
fn veth(staged: &Staged, program: &str, words: Words) -> Result<(), String> {
    let keeper = pair_of_links()?;
    let port = free_port().map_err(said)?;
    let end = |which: usize, more: &[&str]| {
        let mut command = quipu_at(staged, &keeper, which);
        command.args(["run", "--address", "127.0.0.1", "--", program]);
        command.args(["-p", &port.to_string()]).args(words).args(more);
        command
    };
    let to = VETH[0].1.split('/').next().unwrap_or_default();
    let pair = run_both(end(0, &[]), end(1, &[to]), |id| listens(id, port), LIMIT);
    let pair = pair.map_err(said)?;
    if pair.both_succeeded() { Ok(()) } else { Err(pair.text()) }
}

/// The interface is deleted: a program that waits for events is told, and a tool ends and says why.
fn link_gone(staged: &Staged) -> Result<(), String> {
    let keeper = pair_of_links()?;
    let mut watch = quipu_at(staged, &keeper, 0);
    watch.args(["run", "--address", "127.0.0.1", "--", "ibv_asyncwatch", "-d", "quipu_qp0"]);
    let mut watch = start(watch, "async event FD")?;
    let mut serve = quipu_at(staged, &keeper, 1);
    serve.args(["qpip", "serve"]).arg(crate::root().join("docs"));
    let serve = start(serve, "serving")?;
    let mut delete = within(&keeper, "ip");
    delete.args(["link", "delete", VETH[0].0]);
    run(delete)?;
    let deadline = Instant::now() + LIMIT;
    let served = serve.finish(deadline);
    check(!served.success() && served.stderr.contains("gone"), &served, "it does not say why")?;
    wait_until(deadline, || watch.has_said("IBV_EVENT_PORT_ERR") || watch.has_ended());
    let told = watch.has_said("IBV_EVENT_PORT_ERR") && !watch.has_ended();
    let watched = watch.finish(Instant::now());
    check(told, &watched, "no event")
}

/// An example of libqpip, compiled as its users would.
fn compiled(staged: &Staged, name: &str) -> Result<PathBuf, String> {
    let (program, qpip) = (scratch_file(name, "bin"), crate::root().join("abi/qpip"));
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-I"]);
    cc.arg(qpip.join("include")).arg(qpip.join("examples").join(name).with_extension("c"));
    cc.arg("-L").arg(&staged.lib).arg(format!("-Wl,-rpath,{}", staged.lib.display()));
    cc.arg("-lqpip").arg("-o").arg(&program);
    run(cc)?;
    Ok(program)
}

fn udp_link() -> Result<String, String> {
    free_port().map(|port| format!("udp:127.0.0.1:{port}")).map_err(said)
}

fn c_pingpong(staged: &Staged) -> Result<(), String> {
    c_pingpong_over(staged, &[udp_link()?, udp_link()?])
}

/// The same program on adapters that are in processes of their own.
fn c_pingpong_shared(staged: &Staged) -> Result<(), String> {
    let share = |which: &str| -> Result<(Running, String), String> {
        let name = format!("c-{which}-{}", std::process::id());
        let mut nic = Command::new(&staged.quipu);
        nic.args(["nic", "--share", &name, "--link", &udp_link()?]);
        Ok((start(nic, "share:")?, format!("share:{name}")))
    };
    let ((_one, a), (_two, b)) = (share("one")?, share("two")?);
    c_pingpong_over(staged, &[a, b])
}

fn c_pingpong_over(staged: &Staged, [waits, goes]: &[String; 2]) -> Result<(), String> {
    let program = compiled(staged, "pingpong")?;
    let begin = |words: &[&str]| {
        let mut command = Command::new(&program);
        command.args(words);
        command
    };
    let server = start(begin(&[waits, "7000"]), "waiting at ")?;
    let text = server.said();
    let at = text.split("waiting at ").nth(1).unwrap_or_default().trim();
    let client = run(begin(&[goes, "7000", at]))?;
    check(client.stdout.contains("1000 turns"), &client, "not all turns")?;
    let server = server.finish(Instant::now() + LIMIT);
    let _ = std::fs::remove_file(&program);
    check(server.success() && server.stdout.contains("1000 turns"), &server, "not all turns")
}

/// A browser's request, answered by a C program from queue pairs; more of them than it has queue pairs.
fn c_hello(staged: &Staged, net: &Net) -> Result<(), String> {
    let program = compiled(staged, "hello")?;
    let words = ["tap:qp0", net.own(), "80"];
    let server = start(net.command(&program.display().to_string(), &words), "serving")?;
    for _ in 0..40 {
        let url = net.url("");
        let got = run(net.command("curl", &["--silent", "--fail", "--max-time", "60", &url]))?;
        check(got.stdout == "Hello from queue pairs.\n", &got, "another answer")?;
    }
    drop(server);
    let _ = std::fs::remove_file(&program);
    Ok(())
}
