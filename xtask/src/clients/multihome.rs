//! Hosts with several addresses: the address that a program dials or binds decides, not the one that the
//! device has chosen. Each row has two hosts of its own. Each host has a link to nobody and a link to the
//! other.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::process::{Running, capture, wait_until};
use crate::stage::Staged;

use super::Row;
use super::hosts::{listens, receives};
use super::pair::{Pair, free_port, start as start_server};
use super::qpip::start;

/// A row takes a second or two. An address that does not work is found after 34 s or less.
const LIMIT: Duration = Duration::from_secs(60);
/// The UDP port of datagrams to groups (`QUIPU_MULTICAST_PORT`).
const GROUP_PORT: u16 = 20_804;

/// Addresses of the server and of the client, and what the program dials.
struct Case {
    name: &'static str,
    /// On the link to nobody, which is the first: what the device chooses if there is any.
    alone: [&'static [&'static str]; 2],
    /// On the link between both.
    shared: [&'static str; 2],
    /// The server's address as programs name it.
    dialled: &'static str,
    /// What `quipu run --address` is to name, if it is to.
    device: [Option<&'static str>; 2],
    /// A group that the client reaches, if the programs for groups can name their own address.
    group: Option<&'static str>,
}

const CASES: [Case; 5] = [
    Case {
        name: "second-of-server",
        alone: [&["10.78.0.1/24"], &[]],
        shared: ["10.77.0.1/24", "10.77.0.2/24"],
        dialled: "10.77.0.1",
        device: [None; 2],
        group: Some("239.77.1.2"),
    },
    Case {
        name: "second-of-both",
        alone: [&["10.78.0.1/24"], &["10.79.0.2/24", "fd79::2/64"]],
        shared: ["10.77.0.1/24", "10.77.0.2/24"],
        dialled: "10.77.0.1",
        device: [None; 2],
        group: Some("239.77.1.2"),
    },
    Case {
        name: "v6-beside-v4",
        alone: [&["10.78.0.1/24"], &[]],
        shared: ["fd77::1/64", "fd77::2/64"],
        dialled: "fd77::1",
        device: [None; 2],
        group: Some("ff05::77:1"),
    },
    Case {
        name: "link-local",
        alone: [&[], &[]],
        shared: ["fe80::1/64", "fe80::2/64"],
        dialled: "fe80::1%eth0",
        device: [None; 2],
        group: None,
    },
    Case {
        name: "link-local-named",
        alone: [&["10.78.0.1/24"], &["10.79.0.2/24"]],
        shared: ["fe80::1/64", "fe80::2/64"],
        dialled: "fe80::1%eth0",
        device: [Some("fe80::1%eth0"), Some("fe80::2%eth0")],
        group: None,
    },
];

/// A program: its name, what its server and its client say, and what the client prints. `@` stands for what
/// is dialled, `*` for a wildcard of its family, `^` for the group, `~` for the client's own address.
struct Program {
    name: &'static str,
    program: &'static str,
    words: [&'static [&'static str]; 2],
    prints: &'static str,
}

const PROGRAMS: [Program; 7] = [
    Program {
        name: "rping",
        program: "rping",
        words: [&["-s", "-a", "@", "-C", "5"], &["-c", "-a", "@", "-v", "-C", "5"]],
        prints: "ping data: rdma-ping-4",
    },
    Program {
        name: "rping-wildcard",
        program: "rping",
        words: [&["-s", "-a", "*", "-C", "5"], &["-c", "-a", "@", "-v", "-C", "5"]],
        prints: "ping data: rdma-ping-4",
    },
    Program {
        name: "ucmatose",
        program: "ucmatose",
        words: [&["-b", "@"], &["-s", "@"]],
        prints: "return status 0",
    },
    Program {
        name: "udaddy",
        program: "udaddy",
        words: [&["-b", "@"], &["-s", "@"]],
        prints: "return status 0",
    },
    Program {
        name: "rstream",
        program: "rstream",
        words: [
            &["-b", "@", "-I", "10", "-C", "20", "-T", "v"],
            &["-s", "@", "-I", "10", "-C", "20", "-T", "v"],
        ],
        prints: "custom",
    },
    Program {
        name: "send_bw",
        program: "ib_send_bw",
        words: [&["-R", "-F", "-n", "200"], &["-R", "-F", "-n", "200", "@"]],
        prints: "65536      200",
    },
    Program {
        name: "mckey",
        program: "mckey",
        words: [&["-m", "^", "-b", "@"], &["-m", "^", "-b", "~", "-s"]],
        prints: "return status 0",
    },
];

/// The rows for two hosts.
pub(super) fn two_hosts(staged: &Staged) -> Vec<Row<'_>> {
    let mut rows = vec![Row {
        name: format!("two-hosts/multihome/{}/table", CASES[0].name),
        run: Box::new(move || table(staged)),
    }];
    for case in &CASES {
        for program in PROGRAMS.iter().filter(|program| program.fits(case)) {
            rows.push(Row {
                name: format!("two-hosts/multihome/{}/{}", case.name, program.name),
                run: Box::new(move || program.run(staged, case)),
            });
        }
    }
    rows
}

/// The device has chosen the address that the other rows do not use, and lists the other one.
fn table(staged: &Staged) -> Result<(), String> {
    let net = Net::new(&CASES[0])?;
    let mut command = net.command(0, &staged.quipu.display().to_string());
    command.args(["run", "--", "ibv_devinfo", "-v"]);
    let ended = capture(command, LIMIT).map_err(said)?;
    let gids: Vec<&str> = ended.stdout.lines().filter(|line| line.contains("GID[")).collect();
    let first = gids.first().is_some_and(|gid| gid.contains("::ffff:10.78.0.1"));
    let other = gids.iter().skip(1).any(|gid| gid.contains("::ffff:10.77.0.1"));
    if first && other { Ok(()) } else { Err(ended.text("ibv_devinfo")) }
}

/// The address without the length of its prefix.
fn bare(address: &str) -> &str {
    address.split('/').next().unwrap_or(address)
}

impl Case {
    fn is_v6(&self) -> bool {
        self.dialled.contains(':')
    }

    fn word(&self, word: &str) -> String {
        let word = match word {
            "@" => self.dialled,
            "*" if self.is_v6() => "::0",
            "*" => "0.0.0.0",
            "^" => self.group.unwrap_or_default(),
            "~" => bare(self.shared[1]),
            other => other,
        };
        word.to_owned()
    }
}

/// The two hosts of a row: network namespaces, which last as long as a process in each.
struct Net([Running; 2]);

impl Net {
    fn new(case: &Case) -> Result<Self, String> {
        let net = Self([namespace(case, 0)?, namespace(case, 1)?]);
        let client = net.0[1].id();
        net.script(0, &format!("ip link add eth0 type veth peer name eth0 netns {client}"))?;
        net.finish(case)?;
        Ok(net)
    }

    fn command(&self, host: usize, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.0[host].id())).arg("--").arg(program);
        command
    }

    fn script(&self, host: usize, script: &str) -> Result<(), String> {
        let mut command = self.command(host, "sh");
        command.args(["-c", script]);
        let ended = capture(command, LIMIT).map_err(said)?;
        if ended.success() { Ok(()) } else { Err(ended.text("ip")) }
    }

    /// Gives both ends of the link between the hosts their addresses.
    fn finish(&self, case: &Case) -> Result<(), String> {
        for host in 0..2 {
            let address = case.shared[host];
            let nodad = if case.is_v6() { "nodad" } else { "" };
            let script = format!(
                "ip link set eth0 addrgenmode none && ip link set eth0 up && \
                 ip address add {address} dev eth0 {nodad}"
            );
            self.script(host, &script)?;
        }
        // IPv6 is ready when the link is; nothing announces it.
        let ready = |host: usize| {
            let mut command = self.command(host, "ip");
            command.args(["route", "get", bare(case.shared[1 - host]), "oif", "eth0"]);
            capture(command, LIMIT).is_ok_and(|ended| ended.success())
        };
        match wait_until(Instant::now() + LIMIT, || ready(0) && ready(1)) {
            true => Ok(()),
            false => Err("  the hosts' addresses are not ready".into()),
        }
    }
}

/// A network namespace with the link to nobody.
fn namespace(case: &Case, host: usize) -> Result<Running, String> {
    let mut script = "ip link set lo up && ip link add alone type veth peer name nobody && \
         ip link set alone addrgenmode none && ip link set nobody addrgenmode none && \
         ip link set alone up && ip link set nobody up"
        .to_owned();
    for address in case.alone[host] {
        let nodad = if address.contains(':') { "nodad" } else { "" };
        script += &format!(" && ip address add {address} dev alone {nodad}");
    }
    let mut command = Command::new("unshare");
    command.args([
        "--net",
        "--",
        "sh",
        "-c",
        &format!("{script} && echo ready && exec sleep 3600"),
    ]);
    start(command, "ready")
}

fn said(error: impl std::fmt::Display) -> String {
    format!("{error:#}")
}

impl Program {
    fn fits(&self, case: &Case) -> bool {
        match self.program {
            // Perftest knows IPv4 only.
            "ib_send_bw" => !case.is_v6(),
            "mckey" => case.group.is_some(),
            _ => true,
        }
    }

    /// The command of one side.
    fn command(
        &self,
        staged: &Staged,
        (net, case): (&Net, &Case),
        side: usize,
        port: u16,
    ) -> Command {
        let mut command = net.command(side, &staged.quipu.display().to_string());
        command.arg("run");
        if let Some(device) = case.device[side] {
            command.args(["--address", device]);
        }
        command.args(["--", self.program]);
        if !["udaddy", "mckey"].contains(&self.program) {
            command.args(["-p", &port.to_string()]);
        }
        command.args(self.words[side].iter().map(|word| case.word(word)));
        command
    }

    fn run(&self, staged: &Staged, case: &Case) -> Result<(), String> {
        const UDADDY_PORT: u16 = 7174;
        let net = Net::new(case)?;
        let port = free_port().map_err(said)?;
        let is_there = |id| match self.program {
            "udaddy" => receives(id, UDADDY_PORT),
            "mckey" => receives(id, GROUP_PORT),
            _ => listens(id, port),
        };
        let server = self.command(staged, (&net, case), 0, port);
        let server = start_server(server, is_there, Instant::now() + LIMIT).map_err(said)?;
        let client = self.command(staged, (&net, case), 1, port);
        let client = capture(client, LIMIT).map_err(said)?;
        let pair = Pair { server: server.finish(Instant::now() + Duration::from_secs(5)), client };
        let printed = pair.client.stdout.contains(self.prints);
        if pair.both_succeeded() && printed { Ok(()) } else { Err(pair.text()) }
    }
}
