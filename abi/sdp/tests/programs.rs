//! A sockets program over SDP: every octet arrives, in every way to wait for it.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

#[path = "../../types/testing/cdylib.rs"]
mod cdylib;
#[path = "../../types/testing/needs.rs"]
#[expect(dead_code, reason = "only the compiler is needed")]
mod needs;

const AF_INET: i32 = 2;
const AF_INET_SDP: i32 = 27;

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| cdylib::built(&["-p", "quipu-sdp-preload"], "quipu_sdp_preload"))
}

/// Compiles a program. None without a compiler for this machine.
fn compiled(name: &str) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sdp-{name}"));
    let mut command = needs::compiler()?;
    command
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .arg(source);
    assert!(command.status().unwrap().success(), "the program does not compile");
    Some(program)
}

fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    PROGRAM.get_or_init(|| compiled("stream")).as_deref()
}

/// Bytes of all captures whose names begin so, which are removed.
fn captured(begin: &str) -> u64 {
    let files = std::fs::read_dir(env!("CARGO_TARGET_TMPDIR")).unwrap().flatten();
    let ours = files.filter(|file| file.file_name().to_string_lossy().starts_with(begin));
    let ours: Vec<_> =
        ours.filter(|file| file.path().extension().is_some_and(|it| it == "pcapng")).collect();
    let bytes = ours.iter().map(|file| file.metadata().map_or(0, |it| it.len())).sum();
    ours.iter().for_each(|file| std::fs::remove_file(file.path()).unwrap());
    bytes
}

fn server() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    PROGRAM.get_or_init(|| compiled("serve")).as_deref()
}

/// Runs the server and its clients, in a way of serving, with rules.
fn serve(way: &str, rules: &str) {
    let Some(program) = server() else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let name = format!("serve-{way}-{}", std::process::id());
    let conf = folder.join(format!("{name}.conf"));
    std::fs::write(&conf, rules).unwrap();
    let output = Command::new(program)
        .args([way, &port().to_string()])
        .env("LD_PRELOAD", library())
        .env("LIBSDP_CONFIG_FILE", &conf)
        .env("QUIPU_SDP_PCAP", folder.join(format!("{name}-%p.pcapng")))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "{way}: {errors}");
    // They went over SDP.
    let captured = captured(&format!("{name}-"));
    assert!(captured > 100_000, "{way}: {captured}");
    std::fs::remove_file(conf).unwrap();
}

const ALL: &str = "use sdp server * *:*\nuse sdp client * *:*\n";

/// A port that is free now.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn run(family: i32, way: &str, rules: bool, capture: Option<&Path>) {
    let Some(program) = program() else { return };
    let mut command = Command::new(program);
    command.args([family.to_string(), way.into(), port().to_string()]);
    command.env("LD_PRELOAD", library()).env_remove("LIBSDP_CONFIG_FILE");
    if rules {
        command.env("SIMPLE_LIBSDP", "1");
    }
    if let Some(capture) = capture {
        // All messages have service level 3, and its lane.
        let rules = capture.with_extension("conf");
        std::fs::write(&rules, "qos_max_vls 4\nqos-ulps\nsdp : 3\nend-qos-ulps\n").unwrap();
        command.env("QUIPU_SDP_PCAP", capture).env("QUIPU_QOS", &rules);
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "{way}: {errors}");
}

#[test]
fn a_program_that_asks_for_sdp_blocks() {
    run(AF_INET_SDP, "blocking", false, None);
}

#[test]
fn a_program_by_rule_polls() {
    run(AF_INET, "poll", true, None);
}

#[test]
fn a_program_by_rule_selects() {
    run(AF_INET, "select", true, None);
}

#[test]
fn a_program_by_rule_uses_epoll() {
    run(AF_INET, "epoll", true, None);
    run(AF_INET, "edges", true, None);
}

#[test]
fn without_a_rule_the_kernel_serves() {
    run(AF_INET, "poll", false, None);
}

#[test]
fn messages_are_captured() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let name = format!("sdp-{}", std::process::id());
    run(AF_INET_SDP, "blocking", false, Some(&folder.join(format!("{name}-%p.pcapng"))));
    let files = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path());
    let ours = |path: &PathBuf| path.to_string_lossy().contains(&name);
    let captures: Vec<PathBuf> = files.filter(ours).collect();
    // Both processes have one, and a Hello that 10 MB follow.
    let whole: Vec<_> = captures.iter().filter_map(|path| std::fs::read(path).ok()).collect();
    let whole: Vec<_> = whole.iter().filter(|file| file.len() > 1000).collect();
    assert_eq!(whole.len(), 2);
    for file in whole {
        let comment = b", SL 3, VL 3: SDP";
        assert!(file.windows(comment.len()).any(|bytes| bytes == comment));
    }
    captures.iter().for_each(|path| std::fs::remove_file(path).unwrap());
}

#[test]
fn children_take_accepted_connections_over() {
    for way in ["fork", "keep", "late", "forks"] {
        serve(way, ALL);
    }
}

#[test]
fn children_accept_connections_of_their_parent() {
    for way in ["prefork", "prepoll"] {
        serve(way, ALL);
        serve(way, "use both server * *:*\nuse both client * *:*\n");
    }
}

#[test]
fn the_c_library_and_the_kernel_move_octets_by_themselves() {
    for way in ["stdio", "many", "splice", "dprintf"] {
        serve(way, ALL);
    }
}

#[test]
fn stdio_uses_a_connection_that_is_a_standard_descriptor() {
    for way in ["dup2", "dup3", "dup", "dupfd", "zero", "exit", "atexit"] {
        serve(way, ALL);
    }
}

/// A child of vfork has its parent's memory, and posix_spawn makes its calls inside of the C library.
#[test]
fn programs_get_connections_that_were_not_used_before() {
    for way in ["vfork", "vinherit", "inherit", "spawn", "system", "popen", "passed"] {
        serve(way, ALL);
    }
}

#[test]
fn a_program_takes_the_place_of_the_one_that_has_the_connection() {
    serve("exec", ALL);
    serve("cloexec", ALL);
}

/// A few octets, of which no capture is made.
fn serve_few(way: &str) {
    let Some(program) = server() else { return };
    let output = Command::new(program)
        .args([way, &port().to_string()])
        .env("LD_PRELOAD", library())
        .env("SIMPLE_LIBSDP", "1")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "{way}: {errors}");
}

#[test]
fn signals_reach_the_program_that_took_the_place() {
    for way in ["killed", "alarm"] {
        serve_few(way);
    }
}

#[test]
fn a_relay_begins_while_threads_use_the_connection() {
    serve_few("thread");
    serve("midway", ALL);
}

#[test]
fn a_send_without_a_reader_ends_after_its_time_and_loses_nothing() {
    let Some(program) = compiled("timeout") else { return };
    for threshold in ["1", "0", ""] {
        let mut command = Command::new(&program);
        command.arg(port().to_string()).env("LD_PRELOAD", library());
        if !threshold.is_empty() {
            // Always without a copy, or never.
            command.env("QUIPU_SDP_ZCOPY", threshold);
        }
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(errors, "", "{threshold}");
        let said = String::from_utf8_lossy(&output.stdout);
        let count = |what| said.lines().find_map(|line| line.strip_prefix(what));
        let (sent, received) = (count("sent "), count("received "));
        assert!(sent.is_some() && sent == received, "{threshold}: {said}");
    }
}

#[test]
fn a_server_of_both_serves_both() {
    serve("plain", "use both server * *:*\nuse both client * *:*\n");
    // Its clients find it whatever the server's rule is.
    serve("fork", "use sdp server * *:*\nuse both client * *:*\n");
}

/// The helper took the events of a connection at which a thread slept: that thread then slept on, for 100 ms.
#[test]
fn a_thread_is_woken_while_another_one_sleeps_at_an_idle_connection() {
    let Some(program) = compiled("idle") else { return };
    let output = Command::new(program)
        .arg(port().to_string())
        .env("LD_PRELOAD", library())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let late = String::from_utf8_lossy(&output.stdout);
    let late: u32 = late.trim().parse().unwrap_or_else(|_| panic!("{late}: {errors}"));
    assert!(late <= 100, "{late} of 1000 messages came late");
}

/// Octets that a fork server sends back to two clients at a time; the bytes of the clients' captures.
fn socat(rules: (&str, &str)) -> Option<u64> {
    if Command::new("socat").arg("-V").output().is_err() {
        println!("SKIPPED: socat is not installed");
        return None;
    }
    let (port, folder) = (port(), Path::new(env!("CARGO_TARGET_TMPDIR")));
    let file = |what: &str| folder.join(format!("socat-{port}-{what}"));
    let command = |rules: &str, what: &str| {
        // `timeout` would not pass on the signal that ends the server.
        let mut command = Command::new("socat");
        std::fs::write(file(what), rules).unwrap();
        command.args(["-T", "60"]).env("LD_PRELOAD", library());
        command.env("LIBSDP_CONFIG_FILE", file(what)).env("QUIPU_SDP_PCAP", file("%p.pcapng"));
        command
    };
    let listen = format!("TCP4-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr");
    let mut server = command(rules.0, "server").args([&listen, "EXEC:cat"]).spawn().unwrap();
    let sent: Vec<u8> = (0..1_000_000u32).map(|at| ((at * 7) >> 5) as u8).collect();
    std::fs::write(file("in"), &sent).unwrap();
    let to = format!("TCP4:127.0.0.1:{port},retry=50,interval=0.1");
    let clients: Vec<_> = (0..2)
        .map(|_| {
            let input = std::fs::File::open(file("in")).unwrap();
            let mut client = command(rules.1, "client");
            client.args(["-t", "20", "-", &to]).stdin(input).stdout(std::process::Stdio::piped());
            client.spawn().unwrap()
        })
        .collect();
    for client in clients {
        let output = client.wait_with_output().unwrap();
        assert!(output.stdout == sent, "{rules:?}: {} octets", output.stdout.len());
    }
    server.kill().unwrap();
    server.wait().unwrap();
    let captured = captured(&format!("socat-{port}-"));
    for what in ["server", "client", "in"] {
        let _ = std::fs::remove_file(file(what));
    }
    Some(captured)
}

#[test]
fn socat_serves_by_children() {
    let (sdp, both, tcp) = ("use sdp server * *:*", "use both server * *:*", "");
    let client = "use both client * *:*";
    for (server, client, is_sdp) in
        [(sdp, client, true), (both, client, true), (tcp, client, false), (both, tcp, false)]
    {
        let Some(captured) = socat((server, client)) else { return };
        assert_eq!(captured > 100_000, is_sdp, "{server}, {client}: {captured}");
    }
}
