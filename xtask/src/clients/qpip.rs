//! Rows of QPIP: programs with sockets, unmodified, and queue pairs whose TCP is the adapter's own. Each row
//! has a network namespace, in which the kernel has one end of a TAP device and the adapter the other.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::process::{Ended, Running, capture, wait_until};
use crate::stage::Staged;

use super::capture::fields;
use super::hosts::{Family, on_host};
use super::{LIMIT, Row, SKIPPED, scratch_file};

/// What `nc` does, where there is no `nc`: sends a text, ends its direction, and prints what comes back.
const NC: &str = "import socket, sys\n\
    stream = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)\n\
    stream.sendall(sys.argv[3].encode())\n\
    stream.shutdown(socket.SHUT_WR)\n\
    while part := stream.recv(65536): sys.stdout.write(part.decode())\n";
/// What makes TAP devices: not every container has it.
const TUN: &str = "/dev/net/tun";
/// Sizes of files that are fetched.
pub(super) const SIZES: [usize; 3] = [0, 1000, 16 << 20];

/// All of them.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    for family in [Family::V4, Family::V6] {
        let row = |what: &str, run: fn(&Staged, &Net) -> Result<(), String>| Row {
            name: format!("two-hosts/{}/qpip/{what}", family.name()),
            run: Box::new(move || run(staged, &Net::new(family)?)),
        };
        rows.push(row("curl-of-serve", curl));
        rows.push(row("curl-many", curl_many));
        rows.push(row("get-of-http.server", get));
        rows.push(row("nc-of-pingpong", nc));
        rows.push(row("shared", shared));
        rows.push(row("nic-captured", nic_captured));
        rows.push(Row {
            name: format!("two-hosts/{}/qpip/bridge", family.name()),
            run: Box::new(move || bridge(staged, &Net::bridged(family)?)),
        });
        rows.push(row("pingpong/queue-pair-of-socket", |staged, net| pingpong(staged, net, true)));
        rows.push(row("pingpong/socket-of-queue-pair", |staged, net| pingpong(staged, net, false)));
        rows.push(row("ttcp/queue-pair-to-socket", |staged, net| ttcp(staged, net, true)));
        rows.push(row("ttcp/socket-to-queue-pair", |staged, net| ttcp(staged, net, false)));
    }
    let row = |name: &str, run: fn(&Staged) -> Result<(), String>| Row {
        name: format!("two-hosts/v4/qpip/{name}"),
        run: Box::new(move || run(staged)),
    };
    rows.push(row("pingpong/nobody", |staged| pingpong_nobody(staged, &Net::new(Family::V4)?)));
    rows.push(row("udp-link/pingpong", udp_link));
    rows.push(row("no-right", no_right));
    rows
}

/// A network namespace with a TAP device, which ends with its keeper.
pub(super) struct Net {
    family: Family,
    keeper: Running,
}

impl Net {
    pub(super) fn new(family: Family) -> Result<Self, String> {
        Self::with_devices(family, "ip tuntap add dev qp0 mode tap vnet_hdr", "qp0")
    }

    /// The same, whose TAP device is a port of a bridge, as is a second one for another adapter.
    fn bridged(family: Family) -> Result<Self, String> {
        let port = |name| {
            format!(
                "ip tuntap add dev {name} mode tap vnet_hdr && \
                 ip link set {name} master br0 && ip link set {name} up"
            )
        };
        let devices = format!("ip link add br0 type bridge && {} && {}", port("qp0"), port("qp1"));
        Self::with_devices(family, &devices, "br0")
    }

    /// A namespace with `devices`, which a script makes; the kernel has its address on the one called `own`.
    fn with_devices(family: Family, devices: &str, own: &str) -> Result<Self, String> {
        if let Err(error) = fs::OpenOptions::new().read(true).write(true).open(TUN) {
            return Err(format!("{SKIPPED}{TUN}: {error}"));
        }
        let [kernel, _] = addresses(family);
        let script = format!(
            "ip link set lo up && {devices} && ip address add {kernel} dev {own} {} && \
             ip link set {own} up && echo ready && exec sleep 3600",
            if family == Family::V6 { "nodad" } else { "" },
        );
        let mut command = Command::new("unshare");
        command.args(["--net", "--", "sh", "-c", &script]);
        let keeper = start(command, "ready")?;
        Ok(Self { family, keeper })
    }

    /// A command in it.
    pub(super) fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.keeper.id()));
        command.args(["--", program]).args(args);
        command
    }

    /// A tool of QPIP in it, on the adapter's end of the device.
    pub(super) fn tool(&self, staged: &Staged, args: &[&str]) -> Command {
        let [_, adapter] = addresses(self.family);
        let mut command = self.command(&staged.quipu.display().to_string(), &["qpip"]);
        command.args(args).args(["--link", "tap:qp0", "--address", adapter]);
        command
    }

    /// The same with a socket of the kernel.
    fn socket_tool(&self, staged: &Staged, args: &[&str]) -> Command {
        let mut command = self.command(&staged.quipu.display().to_string(), &["qpip"]);
        command.args(args).arg("--socket");
        command
    }

    pub(super) fn family(&self) -> Family {
        self.family
    }

    pub(super) fn kernel(&self) -> &'static str {
        bare(addresses(self.family)[0])
    }

    /// The adapter's address, with the length of its prefix.
    pub(super) fn own(&self) -> &'static str {
        addresses(self.family)[1]
    }

    pub(super) fn adapter(&self) -> &'static str {
        bare(addresses(self.family)[1])
    }

    /// The URL of something that the adapter serves.
    pub(super) fn url(&self, path: &str) -> String {
        match self.family {
            Family::V4 => format!("http://{}/{path}", self.adapter()),
            Family::V6 => format!("http://[{}]/{path}", self.adapter()),
        }
    }
}

/// The addresses of the kernel's end and of the adapter's, each with the length of the prefix.
fn addresses(family: Family) -> [&'static str; 2] {
    match family {
        Family::V4 => ["10.78.0.1/24", "10.78.0.2/24"],
        Family::V6 => ["fd78::1/64", "fd78::2/64"],
    }
}

fn bare(address: &str) -> &str {
    address.split('/').next().unwrap_or(address)
}

/// Starts a server, and waits until it says that it is there.
pub(super) fn start(command: Command, ready: &str) -> Result<Running, String> {
    let mut running = Running::start(command).map_err(|error| format!("{error:#}"))?;
    let deadline = Instant::now() + LIMIT;
    wait_until(deadline, || running.has_said(ready) || running.has_ended());
    if running.has_said(ready) && !running.has_ended() {
        return Ok(running);
    }
    Err(running.finish(Instant::now()).text("server"))
}

pub(super) fn run(command: Command) -> Result<Ended, String> {
    let ended = capture(command, LIMIT).map_err(|error| format!("{error:#}"))?;
    if ended.success() { Ok(ended) } else { Err(ended.text("client")) }
}

pub(super) fn check(holds: bool, ended: &Ended, what: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("  {what}\n{}", ended.text("client"))) }
}

/// Octets without a pattern that a lost or doubled piece would fit into.
pub(super) fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

/// A folder with files of all sizes, which goes when it is dropped.
pub(super) struct Folder(std::path::PathBuf);

impl Folder {
    pub(super) fn new() -> Result<Self, String> {
        let folder = Self(scratch_file("qpip", "d"));
        fs::create_dir(&folder.0).map_err(|error| error.to_string())?;
        for size in SIZES {
            let written = fs::write(folder.0.join(size.to_string()), noise(size));
            written.map_err(|error| error.to_string())?;
        }
        Ok(folder)
    }

    pub(super) fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// An adapter at whose ports is nobody, whose packets `tshark` reads while it is there.
fn nic_captured(staged: &Staged, net: &Net) -> Result<(), String> {
    let file = scratch_file("nic", "pcapng");
    let name = file.display().to_string();
    let link = ["nic", "--link", "tap:qp0", "--address", net.own(), "--pcap", &name];
    let _nic = start(net.command(&staged.quipu.display().to_string(), &link), "Ctrl-C")?;
    let curl = net.command("curl", &["--silent", "--max-time", "20", &net.url("")]);
    let asked = capture(curl, LIMIT).map_err(|error| format!("{error:#}"))?;
    let count = |filter| Ok::<_, String>(fields(&file, filter, &["frame.number"])?.lines().count());
    let syns = count("tcp.flags.syn == 1 && tcp.dstport == 80")?;
    let resets = count("tcp.flags.reset == 1 && tcp.srcport == 80")?;
    let complaints = count("_ws.malformed")?;
    let what = format!("{syns} questions, {resets} answers, {complaints} complaints");
    check(syns > 0 && resets == syns && complaints == 0, &asked, &what)?;
    let mode = fs::metadata(&file).map_err(|error| error.to_string())?.permissions().mode();
    check(mode & 0o777 == 0o600, &asked, &format!("others can read it: {mode:o}"))?;
    fs::remove_file(&file).map_err(|error| error.to_string())
}

/// Fetches a URL into a file of the folder, with further options; what came.
fn fetch(net: &Net, folder: &Folder, url: &str, options: &[&str]) -> Result<Vec<u8>, String> {
    let to = folder.0.join("fetched");
    let name = to.display().to_string();
    let mut args =
        vec!["--silent", "--show-error", "--fail", "--max-time", "60", "--output", &name];
    args.extend(options);
    args.push(url);
    run(net.command("curl", &args))?;
    fs::read(to).map_err(|error| error.to_string())
}

/// Every file comes as it is, a part of one, and the word for what there is not.
fn curl(staged: &Staged, net: &Net) -> Result<(), String> {
    let folder = Folder::new()?;
    let path = folder.0.display().to_string();
    let _server = start(net.tool(staged, &["serve", &path]), "serving")?;
    for size in SIZES {
        let got = fetch(net, &folder, &net.url(&size.to_string()), &[])?;
        if got != noise(size) {
            return Err(format!("  {} of {size} octets came, or others", got.len()));
        }
    }
    let part = fetch(net, &folder, &net.url("1000"), &["--range", "10-19"])?;
    if part != noise(1000)[10..20] {
        return Err("  the part is another".into());
    }
    let code = ["--silent", "--output", "/dev/null", "--write-out", "%{http_code}"];
    for (path, options, status) in [
        ("none", &[] as &[&str], "404"),
        ("1000", &["--head"], "200"),
        ("", &["--data", "x"], "405"),
    ] {
        let url = net.url(path);
        let args = [&code[..], options, &[url.as_str()]].concat();
        let ended = run(net.command("curl", &args))?;
        check(ended.stdout == status, &ended, &format!("not {status}"))?;
    }
    Ok(())
}

/// A switch between two adapters and the kernel: each reaches each. Segments of 64 KB cross it uncut.
fn bridge(staged: &Staged, net: &Net) -> Result<(), String> {
    let folder = Folder::new()?;
    let path = folder.0.display().to_string();
    let _server = start(net.tool(staged, &["serve", &path]), "serving")?;
    let to = folder.0.join("fetched");
    let other = match net.family {
        Family::V4 => "10.78.0.3/24",
        Family::V6 => "fd78::3/64",
    };
    for size in SIZES {
        let url = net.url(&size.to_string());
        if fetch(net, &folder, &url, &[])? != noise(size) {
            return Err(format!("  the kernel got others than these {size} octets"));
        }
        let quipu = staged.quipu.display().to_string();
        let link = ["--link", "tap:qp1", "--address", other];
        let get = ["qpip", "get", &url, "--output", &to.display().to_string()];
        run(net.command(&quipu, &[&get[..], &link[..]].concat()))?;
        if fs::read(&to).map_err(|error| error.to_string())? != noise(size) {
            return Err(format!("  the other adapter got others than these {size} octets"));
        }
    }
    Ok(())
}

/// More connections than queue pairs, one after another and beside each other, and one that is kept.
fn curl_many(staged: &Staged, net: &Net) -> Result<(), String> {
    let folder = Folder::new()?;
    let path = folder.0.display().to_string();
    let server = net.tool(staged, &["serve", &path, "--connections", "4", "--quiet"]);
    let _server = start(server, "serving")?;
    let url = net.url("1000");
    let beside = [
        "--silent",
        "--show-error",
        "--fail",
        "--parallel",
        "--parallel-immediate",
        "--parallel-max",
        "3",
        "--retry",
        "20",
        "--retry-all-errors",
        "--retry-delay",
        "1",
        "--max-time",
        "60",
        "--write-out",
        "%{size_download}\n",
    ];
    let outputs = "-o /dev/null ".repeat(20);
    let mut args: Vec<&str> = beside.into();
    args.extend(outputs.split_whitespace());
    args.extend(std::iter::repeat_n(url.as_str(), 20));
    let ended = run(net.command("curl", &args))?;
    check(ended.stdout.matches("1000\n").count() == 20, &ended, "not 20 files of 1000 octets")?;
    // Over one connection, three after each other.
    let kept = ["--silent", "--fail", "--max-time", "60", "--write-out", "%{num_connects} "];
    let mut args: Vec<&str> = kept.into();
    args.extend(["-o", "/dev/null", "-o", "/dev/null", "-o", "/dev/null"]);
    args.extend(std::iter::repeat_n(url.as_str(), 3));
    let ended = run(net.command("curl", &args))?;
    check(ended.stdout == "1 0 0 ", &ended, "not one connection")
}

/// A queue pair fetches from a server with sockets.
fn get(staged: &Staged, net: &Net) -> Result<(), String> {
    let folder = Folder::new()?;
    let path = folder.0.display().to_string();
    let args = ["-u", "-m", "http.server", "--bind", net.kernel(), "--directory", &path, "8000"];
    let _server = start(net.command("python3", &args), "Serving HTTP")?;
    let host =
        if net.family == Family::V6 { format!("[{}]", net.kernel()) } else { net.kernel().into() };
    let to = folder.0.join("fetched");
    for size in SIZES {
        let url = format!("http://{host}:8000/{size}");
        run(net.tool(staged, &["get", &url, "--output", &to.display().to_string()]))?;
        let got = fs::read(&to).map_err(|error| error.to_string())?;
        if got != noise(size) {
            return Err(format!("  {} of {size} octets came, or others", got.len()));
        }
    }
    let url = format!("http://{host}:8000/none");
    let ended =
        capture(net.tool(staged, &["get", &url]), LIMIT).map_err(|error| error.to_string())?;
    check(!ended.success() && ended.stderr.contains("404"), &ended, "no word about 404")
}

/// Everything comes back, and then the end.
fn nc(staged: &Staged, net: &Net) -> Result<(), String> {
    let _server = start(net.tool(staged, &["pingpong", "--wait"]), "returning everything")?;
    let text = "knots on a string\n".repeat(500);
    for _ in 0..3 {
        let ended = run(net.command("python3", &["-c", NC, net.adapter(), "5002", &text]))?;
        check(ended.stdout == text, &ended, "other text came back")?;
    }
    Ok(())
}

/// An adapter in a process with the right to the device, and two programs without any; one is killed.
fn shared(staged: &Staged, net: &Net) -> Result<(), String> {
    let folder = Folder::new()?;
    let name = format!("clients-{}-{}", net.family.name(), std::process::id());
    let quipu = staged.quipu.display().to_string();
    let nic = ["nic", "--share", &name, "--link", "tap:qp0", "--address", net.own()];
    let mut nic = start(net.command(&quipu, &nic), "share:")?;
    // Not even the network namespace is theirs.
    let program = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-all", "--inh-caps", "-all", "--", &quipu, "qpip"]);
        command.args(args).arg("--link").arg(format!("share:{name}"));
        command
    };
    let path = folder.0.display().to_string();
    let server = start(program(&["serve", &path]), "serving")?;
    let _echo = start(program(&["pingpong", "--wait"]), "returning everything")?;
    for size in SIZES {
        if fetch(net, &folder, &net.url(&size.to_string()), &[])? != noise(size) {
            return Err(format!("  others than these {size} octets came"));
        }
    }
    drop(server);
    let text = "knots on a string\n".repeat(500);
    let ended = run(net.command("python3", &["-c", NC, net.adapter(), "5002", &text]))?;
    check(ended.stdout == text, &ended, "other text came back")?;
    let _server = start(program(&["serve", &path]), "serving")?;
    if fetch(net, &folder, &net.url("1000"), &[])? != noise(1000) {
        return Err("  others than these 1000 octets came".into());
    }
    if nic.has_ended() { Err("  the adapter has ended".into()) } else { Ok(()) }
}

/// The first number of that name in a report in JSON.
pub(super) fn number_of(report: &str, name: &str) -> Option<u64> {
    let (_, rest) = report.split_once(&format!("\"{name}\":"))?;
    rest.trim_start().split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

/// Whether a client reports that all `count` round trips were made. Of datagrams a few may be given up, where
/// the machine stood still for a second.
fn has_round_trips(ended: &Ended, count: u64, protocol: &str) -> bool {
    let made = number_of(&ended.stdout, "round_trips");
    let fewest = if protocol == "--udp" { count - 3 } else { count };
    made.is_some_and(|made| (fewest..=count).contains(&made))
}

/// Round trips between a socket and a queue pair, of which one is the client.
fn pingpong(staged: &Staged, net: &Net, queue_pair_asks: bool) -> Result<(), String> {
    let serve = ["pingpong", "--wait"];
    let _server = if queue_pair_asks {
        start(net.socket_tool(staged, &serve), "returning everything")?
    } else {
        start(net.tool(staged, &serve), "returning everything")?
    };
    for (size, protocol) in
        [("1", "--wait"), ("20000", "--wait"), ("1", "--udp"), ("1400", "--udp")]
    {
        let server = if queue_pair_asks { net.kernel() } else { net.adapter() };
        let args = ["pingpong", server, "-n", "200", "-s", size, "--json", protocol];
        let client =
            if queue_pair_asks { net.tool(staged, &args) } else { net.socket_tool(staged, &args) };
        let ended = run(client)?;
        check(has_round_trips(&ended, 200, protocol), &ended, "not 200 round trips")?;
    }
    Ok(())
}

/// At an address of the network that nobody has, which TCP and UDP find out.
fn pingpong_nobody(staged: &Staged, net: &Net) -> Result<(), String> {
    for protocol in ["--wait", "--udp"] {
        let client = net.tool(staged, &["pingpong", "10.78.0.99", protocol]);
        let ended = capture(client, LIMIT).map_err(|error| format!("{error:#}"))?;
        let is_told = !ended.success() && ended.stderr.contains("no route to the peer");
        check(is_told, &ended, "it is not said that nobody is there")?;
    }
    Ok(())
}

/// Bulk transfer between a socket and a queue pair, of which one sends.
fn ttcp(staged: &Staged, net: &Net, queue_pair_sends: bool) -> Result<(), String> {
    let sizes = ["-n", "300", "-l", "50000", "--json"];
    let receive = [&["ttcp", "-r", "--wait"], &sizes[..]].concat();
    let receiver = if queue_pair_sends {
        Running::start(net.socket_tool(staged, &receive)).map_err(|error| format!("{error:#}"))?
    } else {
        Running::start(net.tool(staged, &[&receive[..], &["--mode", "stream"]].concat()))
            .map_err(|error| format!("{error:#}"))?
    };
    let to = if queue_pair_sends { net.kernel() } else { net.adapter() };
    let send = [&["ttcp", "-t", to, "--wait"], &sizes[..]].concat();
    // The receiver says nothing that is no result: it is there when it takes a connection.
    let deadline = Instant::now() + LIMIT;
    let mut ended = None;
    let sent = wait_until(deadline, || {
        let sender = if queue_pair_sends {
            net.tool(staged, &[&send[..], &["--mode", "stream"]].concat())
        } else {
            net.socket_tool(staged, &send)
        };
        let outcome = capture(sender, LIMIT).ok();
        let refused = outcome.as_ref().is_some_and(|it| it.stderr.contains("cannot connect"));
        ended = outcome;
        !refused
    });
    let ended = ended.ok_or("  no sender")?;
    check(sent && ended.success(), &ended, "not sent")?;
    let received = receiver.finish(Instant::now() + Duration::from_secs(30));
    check(received.stdout.contains("\"bytes\": 15000000,"), &received, "not all received")
}

/// Two adapters without any right.
fn udp_link(staged: &Staged) -> Result<(), String> {
    let quipu = |args: &[&str]| {
        let mut words = on_host(0);
        words.extend([staged.quipu.display().to_string(), "qpip".into(), "pingpong".into()]);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(args);
        command
    };
    let mut server =
        start(quipu(&["--link", "udp:127.0.0.1:4790", "--wait"]), "returning everything")?;
    let said = server.said();
    // LINK: ADDRESS, MTU ...
    let address = said.split_once(": ").and_then(|(_, rest)| rest.split_once(','));
    let address = address.ok_or_else(|| said.clone())?.0.to_owned();
    for protocol in ["--wait", "--udp"] {
        let ended = run(quipu(&[
            &address,
            "--link",
            "udp:127.0.0.1:4791",
            "-n",
            "100",
            "--json",
            protocol,
        ]))?;
        check(has_round_trips(&ended, 100, protocol), &ended, "not 100 round trips")?;
    }
    if server.has_ended() { Err("  the server has ended".into()) } else { Ok(()) }
}

/// Who may not have a TAP device is told why, and what to do.
fn no_right(staged: &Staged) -> Result<(), String> {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-all", "--inh-caps", "-all", "--"]).arg(&staged.quipu);
    command.args(["nic", "--link", "tap:quipu-none", "--address", "10.78.1.2/24"]);
    let ended = capture(command, LIMIT).map_err(|error| format!("{error:#}"))?;
    let told = ended.stderr.contains("tap:quipu-none") && ended.stderr.lines().count() >= 1;
    check(told && !ended.success(), &ended, "no word about the right")
}
