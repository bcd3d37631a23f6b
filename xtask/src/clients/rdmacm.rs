//! Programs that connect through the connection manager.

use std::time::{Duration, Instant};

use crate::process::{Ended, capture};
use crate::stage::Staged;

use super::hosts::{Family, listens, receives};
use super::pair::{Pair, Pairing, free_port, start};
use super::{Hosts, LIMIT, Row};

/// What the two sides of a program say about where the server is: the server's words and the client's.
/// `@` stands for the server's address, `#` for its GID, `*` for a wildcard of its family, `~` for the
/// client's address.
type Place = [&'static [&'static str]; 2];

const RPING: Place = [&["-s", "-a", "@"], &["-c", "-a", "@"]];
const RPING_FROM: Place = [&["-s", "-a", "@"], &["-c", "-a", "@", "-I", "~"]];
const RPING_ANYWHERE: Place = [&["-s", "-a", "*"], &["-c", "-a", "@"]];
const ANYWHERE: Place = [&["-b", "*"], &["-s", "@"]];
const GIDS: Place = [&["-f", "gid", "-b", "#"], &["-f", "gid", "-s", "#"]];
const NAMED: Place = [&["-s", "@"], &["-s", "@"]];
const UNNAMED: Place = [&[], &["-s", "@"]];
const PERFTEST: Place = [&[], &["@"]];

/// A program with the options of both sides, and what the client must print.
#[derive(Clone)]
struct Test {
    name: String,
    program: [&'static str; 2],
    place: Place,
    both: Vec<&'static str>,
    prints: &'static str,
}

fn test(
    name: &str,
    program: &'static str,
    place: Place,
    both: &[&'static str],
    prints: &'static str,
) -> Test {
    pair([program, program], name, place, both, prints)
}

/// A client whose server is another program.
fn pair(
    program: [&'static str; 2],
    name: &str,
    place: Place,
    both: &[&'static str],
    prints: &'static str,
) -> Test {
    let name = format!("{}/{name}", program[1]);
    Test { name, program, place, both: both.to_vec(), prints }
}

/// The ways of `rstream`, as letters of its option `-T`.
const RSTREAM_WAYS: [(&str, &str); 9] = [
    ("plain", ""),
    ("async", "a"),
    ("blocking", "b"),
    ("nonblocking", "n"),
    ("verified", "v"),
    ("resolved", "r"),
    ("sockets", "s"),
    ("fork", "f"),
    ("async-nonblocking-verified", "anv"),
];

/// Those of them that `riostream` has beside its own, and `udpong`.
const RIOSTREAM_WAYS: [(&str, &str); 3] = [("async", "a"), ("blocking", "b"), ("nonblocking", "n")];
const UDPONG_WAYS: [(&str, &str); 5] =
    [("sockets", "s"), ("async", "a"), ("blocking", "b"), ("nonblocking", "n"), ("echo", "e")];

/// A program in one of its ways.
fn way(program: &'static str, (name, letters): (&str, &'static str)) -> Test {
    // `udpong` always takes one buffer for a turn.
    let mut both = if program == "udpong" { vec![] } else { vec!["-I", "10"] };
    both.extend(["-C", "20"]);
    both.extend((0..letters.len()).flat_map(|at| ["-T", &letters[at..=at]]));
    test(name, program, ANYWHERE, &both, "custom")
}

/// perftest connects by IPv4 alone, and `rdma_xserver` listens there.
fn tests() -> Vec<Test> {
    const FINE: &str = "return status 0";
    let xrc = ["rdma_xserver", "rdma_xclient"];
    let mut tests = vec![
        test("validated", "rping", RPING, &["-V", "-C", "20", "-S", "4096"], ""),
        test("wildcard", "rping", RPING_ANYWHERE, &["-v", "-C", "5"], "ping data: rdma-ping-4"),
        test("own-queue-pair", "rping", RPING, &["-q", "-V", "-C", "20"], ""),
        test("debug", "rping", RPING_FROM, &["-d", "-v", "-C", "3"], "RDMA_CM_EVENT_ESTABLISHED"),
        test("plain", "ucmatose", ANYWHERE, &[], FINE),
        test("many", "ucmatose", ANYWHERE, &["-c", "20", "-C", "30", "-S", "2000"], FINE),
        test("tos-and-timeout", "ucmatose", ANYWHERE, &["-t", "96", "-a", "14"], FINE),
        test("migrated", "ucmatose", ANYWHERE, &["-m"], FINE),
        test("port-space-ib", "ucmatose", ANYWHERE, &["-P", "ib"], FINE),
        test("plain", "cmtime", ANYWHERE, &["-c", "50"], "connect"),
        pair(["rdma_server", "rdma_client"], "plain", NAMED, &[], "rdma_client: end 0"),
        test("cm", "ib_send_bw", PERFTEST, &["-R", "-F", "-n", "200"], "65536      200"),
        test("cm", "ib_write_lat", PERFTEST, &["-R", "-F", "-n", "200"], " 200 "),
        test(
            "cm-for-all",
            "ib_read_bw",
            PERFTEST,
            &["-R", "-z", "-F", "-n", "200"],
            "65536      200",
        ),
        test("verified", "riostream", ANYWHERE, &["-I", "10", "-C", "20", "-T", "v"], "custom"),
        test("plain", "udpong", ANYWHERE, &["-C", "20"], "custom"),
        test("plain", "udaddy", ANYWHERE, &[], FINE),
        test("many", "udaddy", ANYWHERE, &["-c", "5", "-C", "20", "-S", "900", "-t", "32"], FINE),
        pair(xrc, "reliable", UNNAMED, &["-c", "r"], "end 0"),
        pair(xrc, "extended", UNNAMED, &["-c", "x"], "end 0"),
    ];
    tests.extend(RSTREAM_WAYS.map(|it| way("rstream", it)));
    tests.extend(RIOSTREAM_WAYS.map(|it| way("riostream", it)));
    tests.extend(UDPONG_WAYS.map(|it| way("udpong", it)));
    let small = ["-I", "10", "-C", "20", "-T", "v", "-B", "5000", "-S", "20000"];
    tests.push(test("small-buffers", "rstream", ANYWHERE, &small, "custom"));
    let all = ["-I", "2", "-C", "2", "-S", "all"];
    tests.push(test("all-sizes", "rstream", ANYWHERE, &all, "custom"));
    tests.push(test("all-sizes", "riostream", ANYWHERE, &all, "custom"));
    let kept = ["-k", "1", "-I", "10", "-C", "20", "-T", "v"];
    tests.push(test("keep-alive", "rstream", ANYWHERE, &kept, "custom"));
    let ip = ["-f", "ip", "-i", "-I", "10", "-C", "20"];
    tests.push(test("numeric-inline", "rstream", ANYWHERE, &ip, "custom"));
    tests.push(test("ipoib", "udaddy", ANYWHERE, &["-P", "ipoib"], FINE));
    tests
}

/// The port that `udaddy` uses, whatever one tells it.
const UDADDY_PORT: u16 = 7174;

/// The server's address as the client's side sees it.
fn address(hosts: Hosts, family: Family) -> &'static str {
    match hosts {
        Hosts::One => family.loopback(),
        Hosts::Two => family.of_host(0),
    }
}

/// The client's address.
fn client(hosts: Hosts, family: Family) -> &'static str {
    match hosts {
        Hosts::One => family.loopback(),
        Hosts::Two => family.of_host(1),
    }
}

/// The server's GID.
fn gid(hosts: Hosts, family: Family) -> String {
    let mapped = if family == Family::V4 { "::ffff:" } else { "" };
    format!("{mapped}{}", address(hosts, family))
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
        let words = self.place[side].iter().chain(&self.both).map(|word| match *word {
            "@" => address(hosts, family).to_owned(),
            "#" => gid(hosts, family),
            "*" => wildcard(family).to_owned(),
            "~" => client(hosts, family).to_owned(),
            other => other.to_owned(),
        });
        let mut args = match self.is_udaddy() {
            true => Vec::new(),
            false => vec!["-p".to_owned(), port.to_string()],
        };
        args.extend(words);
        args
    }

    fn run(&self, pairing: &Pairing, hosts: Hosts, family: Family) -> Result<(), String> {
        let failed = |error: anyhow::Error| format!("{error:#}");
        let port = if self.is_udaddy() { UDADDY_PORT } else { free_port().map_err(failed)? };
        let deadline = Instant::now() + LIMIT;
        let server = self.args(0, port, hosts, family);
        let server = pairing.command(&pairing.server, self.program[0], &server);
        let udp = self.program[0].starts_with("ud");
        let is_there = if udp { receives } else { listens };
        let mut server = start(server, |id| is_there(id, port), deadline).map_err(failed)?;
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
        // It was killed, unless it had ended before.
        let goes_on = self.is_endless() && pair.server.was_killed();
        if !pair.server.success() && !goes_on {
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
        // Linux has no way to IPv6 groups over the loopback.
        if (hosts, family) != (Hosts::One, Family::V6) {
            let name = if family == Family::V4 { "239.77.1.2" } else { "ff05::77:1" };
            rows.push(group(&place, (hosts, family), pairing(family), ["-m", name], &["-s"]));
        }
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
    let row = |test: Test| {
        let (name, pairing) = (format!("{place}/cm/{}", test.name), pairing.clone());
        Row { name, run: Box::new(move || test.run(&pairing, hosts, family)) }
    };
    let fits = |test: &Test| family == Family::V4 || !test.is_of_ipv4();
    tests().into_iter().filter(fits).map(row).collect()
}

/// Programs that name their peers by GID, and a group, as a port of InfiniBand lets them.
pub(super) fn of_infiniband<'a>(
    place: &str,
    hosts: Hosts,
    family: Family,
    pairing: &Pairing,
) -> Vec<Row<'a>> {
    let all = (hosts, family) == (Hosts::One, Family::V4);
    let far = (hosts, family) == (Hosts::Two, Family::V6);
    let tests = [
        (true, test("gid", "ucmatose", GIDS, &["-P", "ib"], "return status 0")),
        (all, test("gid", "udaddy", GIDS, &[], "return status 0")),
        (all, test("gid", "rstream", GIDS, &["-I", "10", "-C", "20"], "custom")),
    ];
    let row = |test: Test| {
        let (name, pairing) = (format!("{place}/{}", test.name), pairing.clone());
        Row { name, run: Box::new(move || test.run(&pairing, hosts, family)) }
    };
    let here = tests.into_iter().filter(|(here, _)| *here);
    let mut rows: Vec<Row<'a>> = here.map(|(_, test)| row(test)).collect();
    if all || far {
        let option = ["-M", "ff12:401b::77:1"];
        // Sends only, and does not hear itself.
        let of_sender = &["-s", "-o", "-l"];
        rows.push(group(place, (hosts, family), pairing.clone(), option, of_sender));
    }
    rows
}

/// Rows by TCP on one host.
pub(super) fn over_tcp(staged: &Staged) -> Vec<Row<'_>> {
    let pairing = Pairing::one_host(staged, Family::V4).with_env("QUIPU_SAME_HOST", "never");
    rows_at("one-host-tcp/v4", Hosts::One, Family::V4, &pairing)
}

/// Programs of which the strict mode has something to say: perftest's connections by `rdma_cm` touch buffers
/// before they have polled, `udaddy` destroys an address handle that is in use, and `riostream` relies on the
/// order in which writes are placed.
const FAULTY: [&str; 3] = ["/ib_", "/udaddy/", "/riostream/"];

/// Rows in the strict mode, which must find nothing to report in the others.
pub(super) fn strictly(staged: &Staged) -> Vec<Row<'_>> {
    let pairing = Pairing::one_host(staged, Family::V4).with_env("QUIPU_STRICT", "fail");
    let mut rows = rows_at("one-host-strict/v4", Hosts::One, Family::V4, &pairing);
    rows.retain(|row| FAULTY.iter().all(|program| !row.name.contains(program)));
    rows
}

/// A server that serves one client after the other.
fn persistent<'a>(place: &str, hosts: Hosts, family: Family, pairing: Pairing) -> Row<'a> {
    const PERSISTENT: Place = [&["-s", "-P", "-a", "*"], &["-c", "-a", "@", "-V", "-C", "10"]];
    let test = test("persistent", "rping", PERSISTENT, &[], "");
    let name = format!("{place}/cm/{}", test.name);
    let run = move || {
        let failed = |error: anyhow::Error| format!("{error:#}");
        let port = free_port().map_err(failed)?;
        let args = test.args(0, port, hosts, family);
        let server = pairing.command(&pairing.server, "rping", &args);
        let deadline = Instant::now() + LIMIT;
        let mut server = start(server, |id| listens(id, port), deadline).map_err(failed)?;
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
    Row { name, run: Box::new(run) }
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
        let deadline = Instant::now() + LIMIT;
        let mut server = start(server, |id| listens(id, port), deadline).map_err(failed)?;
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

/// One process receives what another one, with options of its own, sends to the group that `option` names.
fn group<'a>(
    place: &str,
    (hosts, family): (Hosts, Family),
    pairing: Pairing,
    option: [&'static str; 2],
    of_sender: &'static [&'static str],
) -> Row<'a> {
    let run = move || {
        let failed = |error: anyhow::Error| format!("{error:#}");
        let args = |own, more: &[&str]| -> Vec<String> {
            [&option, &["-b", own], more].concat().into_iter().map(str::to_owned).collect()
        };
        let receiving = args(address(hosts, family), &[]);
        let receiver = pairing.command(&pairing.server, "mckey", &receiving);
        let deadline = Instant::now() + LIMIT;
        let receiver = start(receiver, |id| receives(id, GROUP_PORT), deadline).map_err(failed)?;
        let sending = args(client(hosts, family), of_sender);
        let sender = capture(pairing.command(&pairing.client, "mckey", &sending), LIMIT);
        let pair = Pair { server: receiver.finish(soon()), client: sender.map_err(failed)? };
        if pair.both_succeeded() { Ok(()) } else { Err(pair.text()) }
    };
    Row { name: format!("{place}/cm/mckey"), run: Box::new(run) }
}
