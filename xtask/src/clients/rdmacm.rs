//! Programs that connect through the connection manager.

use std::time::{Duration, Instant};

use crate::process::{Ended, Running, capture, wait_until};
use crate::stage::Staged;

use super::hosts::{Family, listens, receives};
use super::pair::{Pair, Pairing, free_port};
use super::{Hosts, LIMIT, Row};

/// A program with a server's and a client's options, and what the client must print. `@` in an option
/// stands for the server's address, `*` for a wildcard of its family. perftest connects by IPv4 alone,
/// and `rdma_xserver` listens there.
struct Test {
    name: &'static str,
    program: [&'static str; 2],
    server: &'static [&'static str],
    client: &'static [&'static str],
    prints: &'static str,
}

const fn test(
    name: &'static str,
    program: &'static str,
    server: &'static [&'static str],
    client: &'static [&'static str],
    prints: &'static str,
) -> Test {
    Test { name, program: [program, program], server, client, prints }
}

static TESTS: [Test; 31] = [
    test(
        "rping/validated",
        "rping",
        &["-s", "-a", "@", "-V", "-C", "20", "-S", "4096"],
        &["-c", "-a", "@", "-V", "-C", "20", "-S", "4096"],
        "",
    ),
    test(
        "rping/wildcard",
        "rping",
        &["-s", "-a", "*", "-v", "-C", "5"],
        &["-c", "-a", "@", "-v", "-C", "5"],
        "ping data: rdma-ping-4",
    ),
    test(
        "rping/own-queue-pair",
        "rping",
        &["-s", "-a", "@", "-q", "-V", "-C", "20"],
        &["-c", "-a", "@", "-q", "-V", "-C", "20"],
        "",
    ),
    test(
        "rping/debug",
        "rping",
        &["-s", "-a", "@", "-d", "-C", "3"],
        &["-c", "-a", "@", "-d", "-v", "-C", "3"],
        "RDMA_CM_EVENT_ESTABLISHED",
    ),
    test("ucmatose/plain", "ucmatose", &["-b", "*"], &["-s", "@"], "return status 0"),
    test(
        "ucmatose/many",
        "ucmatose",
        &["-b", "*", "-c", "20", "-C", "30", "-S", "2000"],
        &["-s", "@", "-c", "20", "-C", "30", "-S", "2000"],
        "return status 0",
    ),
    test(
        "ucmatose/tos-and-timeout",
        "ucmatose",
        &["-b", "*", "-t", "96"],
        &["-s", "@", "-t", "96", "-a", "14"],
        "return status 0",
    ),
    test(
        "ucmatose/migrated",
        "ucmatose",
        &["-b", "*", "-m"],
        &["-s", "@", "-m"],
        "return status 0",
    ),
    test(
        "ucmatose/port-space-ib",
        "ucmatose",
        &["-b", "*", "-P", "ib"],
        &["-s", "@", "-P", "ib"],
        "return status 0",
    ),
    test("cmtime/plain", "cmtime", &["-b", "*", "-c", "50"], &["-s", "@", "-c", "50"], "connect"),
    Test {
        name: "rdma_client/plain",
        program: ["rdma_server", "rdma_client"],
        server: &["-s", "@"],
        client: &["-s", "@"],
        prints: "rdma_client: end 0",
    },
    test(
        "ib_send_bw/cm",
        "ib_send_bw",
        &["-R", "-F", "-n", "200"],
        &["-R", "-F", "-n", "200", "@"],
        "65536      200",
    ),
    test(
        "ib_write_lat/cm",
        "ib_write_lat",
        &["-R", "-F", "-n", "200"],
        &["-R", "-F", "-n", "200", "@"],
        " 200 ",
    ),
    test(
        "ib_read_bw/cm-for-all",
        "ib_read_bw",
        &["-R", "-z", "-F", "-n", "200"],
        &["-R", "-z", "-F", "-n", "200", "@"],
        "65536      200",
    ),
    test(
        "rstream/plain",
        "rstream",
        &["-b", "*", "-I", "10", "-C", "20"],
        &["-s", "@", "-I", "10", "-C", "20"],
        "custom",
    ),
    test(
        "rstream/async",
        "rstream",
        &["-b", "*", "-I", "10", "-C", "20", "-T", "a"],
        &["-s", "@", "-I", "10", "-C", "20", "-T", "a"],
        "custom",
    ),
    test(
        "rstream/blocking",
        "rstream",
        &["-b", "*", "-I", "10", "-C", "20", "-T", "b"],
        &["-s", "@", "-I", "10", "-C", "20", "-T", "b"],
        "custom",
    ),
    test(
        "rstream/nonblocking",
        "rstream",
        &["-b", "*", "-I", "10", "-C", "20", "-T", "n"],
        &["-s", "@", "-I", "10", "-C", "20", "-T", "n"],
        "custom",
    ),
    test(
        "rstream/verified",
        "rstream",
        &["-b", "*", "-I", "10", "-C", "20", "-T", "v"],
        &["-s", "@", "-I", "10", "-C", "20", "-T", "v"],
        "custom",
    ),
    test(
        "rstream/resolved",
        "rstream",
        &["-b", "*", "-I", "10", "-C", "20", "-T", "r"],
        &["-s", "@", "-I", "10", "-C", "20", "-T", "r"],
        "custom",
    ),
    test(
        "rstream/sockets",
        "rstream",
        &["-b", "*", "-I", "10", "-C", "20", "-T", "s"],
        &["-s", "@", "-I", "10", "-C", "20", "-T", "s"],
        "custom",
    ),
    test(
        "rstream/fork",
        "rstream",
        &["-b", "*", "-I", "10", "-C", "20", "-T", "f"],
        &["-s", "@", "-I", "10", "-C", "20", "-T", "f"],
        "custom",
    ),
    test(
        "rstream/async-nonblocking-verified",
        "rstream",
        &["-b", "*", "-I", "10", "-C", "20", "-T", "a", "-T", "n", "-T", "v"],
        &["-s", "@", "-I", "10", "-C", "20", "-T", "a", "-T", "n", "-T", "v"],
        "custom",
    ),
    test(
        "rstream/small-buffers",
        "rstream",
        &["-b", "*", "-I", "10", "-C", "20", "-T", "v", "-B", "5000", "-S", "20000"],
        &["-s", "@", "-I", "10", "-C", "20", "-T", "v", "-B", "5000", "-S", "20000"],
        "custom",
    ),
    test(
        "rstream/all-sizes",
        "rstream",
        &["-b", "*", "-I", "2", "-C", "2", "-S", "all"],
        &["-s", "@", "-I", "2", "-C", "2", "-S", "all"],
        "custom",
    ),
    test(
        "riostream/verified",
        "riostream",
        &["-b", "*", "-I", "10", "-C", "20", "-T", "v"],
        &["-s", "@", "-I", "10", "-C", "20", "-T", "v"],
        "custom",
    ),
    test("udpong/plain", "udpong", &["-b", "*", "-C", "20"], &["-s", "@", "-C", "20"], "custom"),
    test("udaddy/plain", "udaddy", &["-b", "*"], &["-s", "@"], "return status 0"),
    test(
        "udaddy/many",
        "udaddy",
        &["-b", "*", "-c", "5", "-C", "20", "-S", "900", "-t", "32"],
        &["-s", "@", "-c", "5", "-C", "20", "-S", "900", "-t", "32"],
        "return status 0",
    ),
    Test {
        name: "rdma_xclient/reliable",
        program: ["rdma_xserver", "rdma_xclient"],
        server: &["-c", "r"],
        client: &["-s", "@", "-c", "r"],
        prints: "end 0",
    },
    Test {
        name: "rdma_xclient/extended",
        program: ["rdma_xserver", "rdma_xclient"],
        server: &["-c", "x"],
        client: &["-s", "@", "-c", "x"],
        prints: "end 0",
    },
];

/// The port that `udaddy` uses, whatever one tells it.
const UDADDY_PORT: u16 = 7174;

/// The server's address as the client's side sees it.
fn address(hosts: Hosts, family: Family) -> &'static str {
    match hosts {
        Hosts::One => family.loopback(),
        Hosts::Two => family.of_host(0),
    }
}

fn wildcard(family: Family) -> &'static str {
    match family {
        Family::V4 => "0.0.0.0",
        Family::V6 => "::0",
    }
}

impl Test {
    fn is_of_ipv4(&self) -> bool {
        self.program[0].starts_with("ib_") || self.program[0] == "rdma_xserver"
    }

    fn is_udaddy(&self) -> bool {
        self.program[0] == "udaddy"
    }

    /// Whether the server goes on when its client has left.
    fn is_endless(&self) -> bool {
        ["cmtime", "udpong"].contains(&self.program[0])
    }

    /// The arguments of one side.
    fn args(&self, side: usize, port: u16, hosts: Hosts, family: Family) -> Vec<String> {
        let words = [self.server, self.client][side].iter().map(|word| match *word {
            "@" => address(hosts, family),
            "*" => wildcard(family),
            other => other,
        });
        let mut args = match self.is_udaddy() {
            true => Vec::new(),
            false => vec!["-p".to_owned(), port.to_string()],
        };
        args.extend(words.map(str::to_owned));
        args
    }

    fn run(&self, pairing: &Pairing, hosts: Hosts, family: Family) -> Result<(), String> {
        let failed = |error: anyhow::Error| format!("{error:#}");
        let port = if self.is_udaddy() { UDADDY_PORT } else { free_port().map_err(failed)? };
        let deadline = Instant::now() + LIMIT;
        let server = self.args(0, port, hosts, family);
        let server = pairing.command(&pairing.server, self.program[0], &server);
        let mut server = Running::start(server).map_err(failed)?;
        let id = server.id();
        let udp = self.program[0].starts_with("ud");
        let is_there = || if udp { receives(id, port) } else { listens(id, port) };
        wait_until(deadline, || is_there() || server.has_ended());
        let client = self.args(1, port, hosts, family);
        let client = pairing.command(&pairing.client, self.program[1], &client);
        let client = capture(client, deadline.saturating_duration_since(Instant::now()));
        let client = client.map_err(failed)?;
        let patience = if client.success() { deadline } else { soon() };
        if self.is_endless() {
            server.kill();
        }
        let pair = Pair { server: server.finish(patience), client };
        self.check(&pair).map_err(|why| format!("  {why}\n{}", pair.text()))
    }

    fn check(&self, pair: &Pair) -> Result<(), String> {
        if !pair.client.success() {
            return Err("the client failed".into());
        }
        if !pair.server.success() && !self.is_endless() {
            return Err("the server failed".into());
        }
        let printed = |ended: &Ended| (ended.stdout.clone() + &ended.stderr).contains(self.prints);
        if printed(&pair.client) {
            Ok(())
        } else {
            Err(format!("no {:?} of the client", self.prints))
        }
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(2)
}

/// Every program between two processes, IPv4 and IPv6.
pub(super) fn rows<'a>(hosts: Hosts, pairing: impl Fn(Family) -> Pairing) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    for family in [Family::V4, Family::V6] {
        let place = format!("{}/{}", hosts.name(), family.name());
        rows.extend(rows_at(&place, hosts, family, &pairing(family)));
        rows.push(persistent(&place, hosts, family, pairing(family)));
        rows.push(group(&place, hosts, family, pairing(family)));
        // It takes what is behind the first colon for the name of a file.
        if family == Family::V4 {
            rows.push(copied(&place, hosts, family, pairing(family)));
        }
    }
    rows
}

/// Every program by one way between the two processes.
pub(super) fn rows_at<'a>(
    place: &str,
    hosts: Hosts,
    family: Family,
    pairing: &Pairing,
) -> Vec<Row<'a>> {
    let row = |test: &'static Test| {
        let pairing = pairing.clone();
        let run = move || test.run(&pairing, hosts, family);
        Row { name: format!("{place}/cm/{}", test.name), run: Box::new(run) }
    };
    let fits = |test: &&'static Test| family == Family::V4 || !test.is_of_ipv4();
    TESTS.iter().filter(fits).map(row).collect()
}

/// Rows by TCP on one host.
pub(super) fn over_tcp(staged: &Staged) -> Vec<Row<'_>> {
    let pairing = Pairing::one_host(staged, Family::V4).with_env("QUIPU_SAME_HOST", "never");
    rows_at("one-host-tcp/v4", Hosts::One, Family::V4, &pairing)
}

/// A server that serves one client after the other.
fn persistent<'a>(place: &str, hosts: Hosts, family: Family, pairing: Pairing) -> Row<'a> {
    let test = test(
        "rping/persistent",
        "rping",
        &["-s", "-P", "-a", "*"],
        &["-c", "-a", "@", "-V", "-C", "10"],
        "",
    );
    let run = move || {
        let failed = |error: anyhow::Error| format!("{error:#}");
        let port = free_port().map_err(failed)?;
        let args = test.args(0, port, hosts, family);
        let server = pairing.command(&pairing.server, "rping", &args);
        let mut server = Running::start(server).map_err(failed)?;
        let id = server.id();
        wait_until(Instant::now() + LIMIT, || listens(id, port) || server.has_ended());
        for _ in 0..3 {
            let args = test.args(1, port, hosts, family);
            let client = capture(pairing.command(&pairing.client, "rping", &args), LIMIT);
            let client = client.map_err(failed)?;
            if !client.success() {
                return Err(client.text("client") + &server.finish(soon()).text("server"));
            }
        }
        let over = server.has_ended();
        server.kill();
        let server = server.finish(soon());
        if over { Err(server.text("server")) } else { Ok(()) }
    };
    Row { name: format!("{place}/cm/rping/persistent"), run: Box::new(run) }
}

/// Copies a file to a server that goes on afterwards. (Its options come last, and it has no address to listen
/// on, so it listens on all.)
fn copied<'a>(place: &str, hosts: Hosts, family: Family, pairing: Pairing) -> Row<'a> {
    let run = move || {
        let failed = |error: anyhow::Error| format!("{error:#}");
        let port = free_port().map_err(failed)?;
        let folder = crate::target_dir().join("quipu");
        let (from, to) = (folder.join("bin/quipu"), folder.join(format!("copy-{port}")));
        let options = ["-p".to_owned(), port.to_string()];
        let server = pairing.command(&pairing.server, "rcopy", &options);
        let mut server = Running::start(server).map_err(failed)?;
        let id = server.id();
        wait_until(Instant::now() + LIMIT, || listens(id, port) || server.has_ended());
        let target = format!("{}:{}", address(hosts, family), to.display());
        let args = [&[from.display().to_string(), target], &options[..]].concat();
        let client = capture(pairing.command(&pairing.client, "rcopy", &args), LIMIT);
        server.kill();
        let pair = Pair { server: server.finish(soon()), client: client.map_err(failed)? };
        let same = std::fs::read(&from).ok() == std::fs::read(&to).ok();
        let _ = std::fs::remove_file(&to);
        if pair.client.success() && same { Ok(()) } else { Err(pair.text()) }
    };
    Row { name: format!("{place}/cm/rcopy"), run: Box::new(run) }
}

/// The UDP port of datagrams to groups (`QUIPU_MULTICAST_PORT`).
const GROUP_PORT: u16 = 20804;

/// One process receives what another one sends to a group.
fn group<'a>(place: &str, hosts: Hosts, family: Family, pairing: Pairing) -> Row<'a> {
    let run = move || {
        let failed = |error: anyhow::Error| format!("{error:#}");
        let group = if family == Family::V4 { "239.77.1.2" } else { "ff05::77:1" };
        let other = match hosts {
            Hosts::One => family.loopback(),
            Hosts::Two => family.of_host(1),
        };
        let own = [address(hosts, family), other];
        let args = |own: &str| ["-m", group, "-b", own].map(str::to_owned).to_vec();
        let receiver = pairing.command(&pairing.server, "mckey", &args(own[0]));
        let mut receiver = Running::start(receiver).map_err(failed)?;
        let id = receiver.id();
        let deadline = Instant::now() + LIMIT;
        wait_until(deadline, || receives(id, GROUP_PORT) || receiver.has_ended());
        let sending = [args(own[1]), vec!["-s".into()]].concat();
        let sender = capture(pairing.command(&pairing.client, "mckey", &sending), LIMIT);
        let pair = Pair { server: receiver.finish(soon()), client: sender.map_err(failed)? };
        if pair.both_succeeded() { Ok(()) } else { Err(pair.text()) }
    };
    Row { name: format!("{place}/cm/mckey"), run: Box::new(run) }
}
