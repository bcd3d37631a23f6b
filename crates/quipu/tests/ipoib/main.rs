//! `quipu ipoib`: hosts that are network namespaces, and the kernel's protocols between them.
//!
//! The commands that run in them are this file again, in a role that an environment variable names.

mod connected;
mod hostile;
mod roles;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// The role of this process, if it is one of those commands.
const ROLE: &str = "TEST_ROLE_IN_A_HOST";

/// Whether a user may make namespaces and TUN devices here.
fn possible() -> bool {
    let may = Command::new("unshare").args(["-rn", "true"]).status();
    let possible = may.is_ok_and(|it| it.success()) && Path::new("/dev/net/tun").exists();
    if !possible {
        println!("SKIPPED: no network namespace or no TUN device is allowed here");
    }
    possible
}

/// A Q_Key that no other test has: all are on one link otherwise.
fn key(test: u32) -> u32 {
    std::process::id() % (1 << 24) * 16 + test
}

/// A host: `quipu ipoib` with these options, at an address of this machine, and a role in it.
fn host(key: u32, options: &[&str], role: &str) -> Child {
    Command::new("timeout")
        .args(["60", env!("CARGO_BIN_EXE_quipu"), "ipoib", "--verbose"])
        .args(["--qkey", &key.to_string()])
        .args(options)
        .arg("--")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "the_role_of_a_command", "--nocapture"])
        .env(ROLE, role)
        .env("QUIPU_ADDRESS", "127.0.0.1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What it printed; it must have ended well.
fn end(host: Child) -> String {
    let Output { status, stdout, stderr } = host.wait_with_output().unwrap();
    let said = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(status.success(), "{status}: {said}");
    said
}

#[test]
fn the_role_of_a_command() {
    if let Some(role) = std::env::var_os(ROLE) {
        roles::play(role.to_str().unwrap());
    }
}

#[test]
fn two_hosts_ping_and_move_data_over_ipv4_and_ipv6() {
    if !possible() {
        return;
    }
    let pcap = std::env::temp_dir().join(format!("quipu-ipoib-{}.pcapng", std::process::id()));
    let server = host(key(1), &["--address", "10.7.0.1/24", "--address", "fd07::1/64"], "serve 2");
    let capture = pcap.to_str().unwrap();
    let options =
        ["--address", "10.7.0.2/24", "--address", "fd07::2/64", "--sl", "1", "--pcap", capture];
    let client = end(host(key(1), &options, "ask 10.7.0.1 fd07::1"));
    let server = end(server);
    assert!(
        client.contains("10.7.0.1 answered") && client.contains("fd07::1 answered"),
        "{client}"
    );
    assert!(server.contains("2 streams"), "{server}");
    // IPv6's own neighbour discovery, too.
    assert!(client.contains("2 addresses asked for"), "{client}");
    show(&pcap);
    std::fs::remove_file(&pcap).unwrap();
}

/// What tshark, where there is one, says of a capture.
fn show(pcap: &Path) {
    let fields = ["-T", "fields", "-e", "_ws.col.Protocol"];
    let Ok(shown) = Command::new("tshark").arg("-r").arg(pcap).args(fields).output() else {
        return println!("SKIPPED: no tshark here");
    };
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    for protocol in ["ARP", "ICMP", "ICMPv6", "TCP"] {
        assert!(shown.lines().any(|line| line == protocol), "{protocol}: {shown}");
    }
    // What was sent says its service level.
    let level =
        ["-Y", "frame.comment contains \", SL 1: IPoIB\"", "-T", "fields", "-e", "frame.number"];
    let sent = Command::new("tshark").arg("-r").arg(pcap).args(level).output().unwrap();
    let sent = String::from_utf8_lossy(&sent.stdout).lines().count();
    assert!((1..shown.lines().count()).contains(&sent), "{sent} of {shown}");
}

#[test]
fn two_machines_with_a_network_of_2_kb_packets() {
    if !possible() {
        return;
    }
    // A veth pair whose MTU holds InfiniBand's 2048, and an interface on each end of it.
    let quipu = env!("CARGO_BIN_EXE_quipu");
    let own = std::env::current_exe().unwrap();
    let role = format!("{} --exact the_role_of_a_command --nocapture", own.display());
    let script = format!(
        "set -e; ip link set lo up; unshare -n sleep 60 & far=$!; \
         trap 'kill $far $server 2>/dev/null || true' EXIT; \
         for i in $(seq 100); do \
             [ \"$(readlink /proc/$far/ns/net)\" != \"$(readlink /proc/$$/ns/net)\" ] && break; \
             sleep 0.05; \
         done; \
         ip link add here mtu 2200 type veth peer name there mtu 2200 netns $far; \
         ip address add 10.9.0.1/24 dev here; ip link set here up; \
         nsenter -t $far -n sh -c 'ip link set lo up; ip address add 10.9.0.2/24 dev there; \
             ip link set there up; {ROLE}=\"serve 1\" exec {quipu} ipoib --device 10.9.0.2 \
             --address 10.7.0.1/24 -- {role}' & server=$!; \
         {ROLE}='ask 10.7.0.1 mtu=2044' {quipu} ipoib --device 10.9.0.1 --address 10.7.0.2/24 \
             -- {role}; \
         wait $server"
    );
    let output = Command::new("timeout")
        .args(["60", "unshare", "-rn", "sh", "-c", &script])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
    assert!(output.status.success(), "{said:?}");
    assert!(said[0].contains("10.7.0.1 answered") && said[0].contains("1 streams"), "{said:?}");
}

#[test]
fn the_code_of_the_command_is_ours_and_a_signal_reaches_it() {
    if !possible() {
        return;
    }
    let key = key(2).to_string();
    let run = |command: &[&str]| {
        let mut quipu = Command::new(env!("CARGO_BIN_EXE_quipu"));
        quipu.args([
            "ipoib",
            "--device",
            "127.0.0.1",
            "--address",
            "10.7.0.1/24",
            "--qkey",
            &key,
            "--",
        ]);
        quipu.args(command).spawn().unwrap()
    };
    assert_eq!(run(&["sh", "-c", "exit 7"]).wait().unwrap().code(), Some(7));
    assert_eq!(run(&["/no/such/program"]).wait().unwrap().code(), Some(127));
    let mut sleeping = run(&["sleep", "60"]);
    std::thread::sleep(std::time::Duration::from_millis(500));
    let pid = rustix::process::Pid::from_child(&sleeping);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    // 128 + SIGTERM, of the command; or the signal itself if it came before there was one.
    let status = sleeping.wait().unwrap();
    assert!(matches!(status.code(), Some(143) | None), "{status}");
}
