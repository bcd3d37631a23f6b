//! Connected mode.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{ROLE, end, host, key, possible};

const PATIENCE: Duration = Duration::from_secs(20);
const SERVER: [&str; 4] = ["--address", "10.7.0.1/24", "--address", "fd07::1/64"];
const CLIENT: [&str; 4] = ["--address", "10.7.0.2/24", "--address", "fd07::2/64"];

fn connected<'a>(options: &[&'a str]) -> Vec<&'a str> {
    [&["--mode", "connected"], options].concat()
}

#[test]
fn two_hosts_in_connected_mode_use_packets_of_65520_bytes() {
    if !possible() {
        return;
    }
    let server = host(key(5), &connected(&SERVER), "serve 2");
    let role = "ask-large mtu=65520 10.7.0.1 fd07::1";
    let client = end(host(key(5), &connected(&CLIENT), role));
    let server = end(server);
    assert!(
        client.contains("10.7.0.1 answered") && client.contains("fd07::1 answered"),
        "{client}"
    );
    assert!(server.contains("2 streams"), "{server}");
    for said in [&client, &server] {
        assert!(said.contains("1 connections opened, 1 accepted, 0 refused, 0 failed"), "{said}");
        assert!(said.contains("ipoib: connection to queue pair 0x"), "{said}");
    }
}

#[test]
fn iperf3_runs_over_ipv6_with_large_packets() {
    if !possible() {
        return;
    }
    if Command::new("iperf3").arg("--version").output().is_err() {
        return println!("SKIPPED: no iperf3 here");
    }
    let server = host(key(10), &connected(&SERVER), "iperf -s");
    let client = end(host(key(10), &connected(&CLIENT), "iperf fd07::1"));
    end(server);
    assert!(client.contains("Mbits/sec") || client.contains("Gbits/sec"), "{client}");
    let sent = client.lines().find(|line| line.starts_with("ipoib: connection to")).unwrap();
    let number = |unit: &str| -> u64 {
        let before = sent.split(unit).next().unwrap();
        before.rsplit(' ').find(|word| !word.is_empty()).unwrap().parse().unwrap()
    };
    assert!(number("bytes") / number("packets") > 10_000, "packets are large: {sent}");
}

#[test]
fn one_host_in_connected_mode_and_one_in_datagram_mode_understand_each_other() {
    if !possible() {
        return;
    }
    let pairs = [(connected(&SERVER), CLIENT.to_vec()), (SERVER.to_vec(), connected(&CLIENT))];
    for (number, (server, client)) in pairs.into_iter().enumerate() {
        let key = key(6 + number as u32);
        let server = host(key, &server, "serve 2");
        let client = end(host(key, &client, "ask-large 10.7.0.1 fd07::1"));
        let server = end(server);
        assert!(
            client.contains("10.7.0.1 answered") && client.contains("fd07::1 answered"),
            "{client}"
        );
        // The one in connected mode answers echo requests, or sends them: of more than the other receives.
        let large = [&client, &server].into_iter().find(|said| said.contains("connections opened"));
        let large = large.expect("there was a packet too long");
        assert!(large.contains("; dropped:") && large.contains("too_long"), "{large}");
        assert!(large.contains("0 connections opened, 0 accepted"), "{large}");
    }
}

#[test]
fn two_machines_with_a_network_of_1500_bytes_have_ipv6() {
    if !possible() {
        return;
    }
    let quipu = env!("CARGO_BIN_EXE_quipu");
    let own = std::env::current_exe().unwrap();
    let role = format!("{} --exact the_role_of_a_command --nocapture", own.display());
    let ipoib = format!("{quipu} ipoib --verbose --mode connected");
    let script = format!(
        "set -e; ip link set lo up; unshare -n sleep 60 & far=$!; \
         trap 'kill $far $server 2>/dev/null || true' EXIT; \
         for i in $(seq 100); do \
             [ \"$(readlink /proc/$far/ns/net)\" != \"$(readlink /proc/$$/ns/net)\" ] && break; \
             sleep 0.05; \
         done; \
         ip link add here mtu 1500 type veth peer name there mtu 1500 netns $far; \
         ip address add 10.9.0.1/24 dev here; ip link set here up; \
         nsenter -t $far -n sh -c 'ip link set lo up; ip address add 10.9.0.2/24 dev there; \
             ip link set there up; {ROLE}=\"serve 2\" exec {ipoib} --device 10.9.0.2 \
             --address 10.7.0.1/24 --address fd07::1/64 -- {role}' & server=$!; \
         {ROLE}='ask-large mtu=65520 10.7.0.1 fd07::1' {ipoib} --device 10.9.0.1 \
             --address 10.7.0.2/24 --address fd07::2/64 -- {role}; \
         wait $server"
    );
    let output = Command::new("timeout")
        .args(["60", "unshare", "-rn", "sh", "-c", &script])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
    assert!(output.status.success(), "{said:?}");
    assert!(said[0].contains("fd07::1 answered") && said[0].contains("2 streams"), "{said:?}");
    assert!(said[1].contains("1 connections opened"), "{said:?}");
}

/// Waits until `happened`.
fn wait_for(what: &str, happened: impl Fn() -> bool) {
    let begun = Instant::now();
    while !happened() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends a signal to the command in a host, which `timeout` started.
fn signal(host: &Child, signal: Signal) {
    let children = format!("/proc/{0}/task/{0}/children", host.id());
    let children = std::fs::read_to_string(children).unwrap();
    let quipu: i32 = children.trim().parse().unwrap();
    kill_process(Pid::from_raw(quipu).unwrap(), signal).unwrap();
}

fn kill(mut host: Child) {
    signal(&host, Signal::KILL);
    assert!(!host.wait().unwrap().success());
}

fn flag(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("quipu-ipoib-{}-{name}", std::process::id()))
}

#[test]
fn a_neighbour_that_is_killed_and_started_again_is_reached_again() {
    if !possible() {
        return;
    }
    let file = flag("killed");
    let server = || host(key(8), &connected(&SERVER), "stay 30");
    let first = server();
    let role = format!("ask-twice fd07::1 {}", file.display());
    let client = host(key(8), &connected(&CLIENT), &role);
    wait_for("no answer", || file.exists());
    kill(first);
    let second = server();
    std::fs::remove_file(&file).unwrap();
    let said = end(client);
    assert!(said.contains("fd07::1 answered twice"), "{said}");
    assert!(said.contains("2 connections opened, 2 accepted"), "{said}");
    kill(second);
}

#[test]
fn a_neighbour_that_does_not_read_does_not_hold_up_others() {
    if !possible() {
        return;
    }
    let file = flag("stopped");
    let key = key(9);
    let stopped = host(key, &connected(&SERVER), "stay 40");
    let other = host(key, &connected(&["--address", "10.7.0.3/24"]), "stay 40");
    let role = format!("ask-around 10.7.0.1 {} 10.7.0.3", file.display());
    let client = host(key, &connected(&CLIENT), &role);
    wait_for("no answer", || file.exists());
    signal(&stopped, Signal::STOP);
    std::fs::remove_file(&file).unwrap();
    wait_for("no answer of the other one", || file.exists());
    signal(&stopped, Signal::CONT);
    std::fs::remove_file(&file).unwrap();
    let said = end(client);
    assert!(said.contains("10.7.0.1 answered again"), "{said}");
    assert!(said.contains("congested"), "{said}");
    [stopped, other].into_iter().for_each(kill);
}
