//! The command as users run it.

use std::io::{BufRead, BufReader, pipe};
use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;
use std::{fs, thread};

use quipu::qpip::{Adapter, Failure, Mode, QpipConfig, TcpSettings};
use quipu::{Access, Error, Request, WcStatus};

/// What a shell says of a program that SIGPIPE has ended.
const READER_GONE: i32 = 128 + 13;

fn quipu(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quipu"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// A standard output whose reader has gone.
fn closed() -> Stdio {
    pipe().unwrap().1.into()
}

fn assert_quiet(arguments: &[&str]) {
    let outcome = quipu(arguments).stdout(closed()).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8_lossy(&outcome.stderr);
    assert_eq!((outcome.status.code(), &*said), (Some(READER_GONE), ""), "{arguments:?}");
}

#[test]
fn a_closed_pipe_ends_it_quietly() {
    assert_quiet(&["top", "--once"]);
    assert_quiet(&["doctor"]);
    assert_quiet(&["sim", "--seeds", "1"]);
    assert_quiet(&["completion", "bash"]);
    assert_quiet(&["bench", "--list"]);
    let link = ["--link", "udp:127.0.0.1:0"];
    assert_quiet(&[&["nic"], &link[..]].concat());
    assert_quiet(&[&["qpip", "serve"], &link[..]].concat());
    // clap's own words.
    assert_ne!(status(quipu(&["--help"]).stdout(closed())).code(), Some(101));
}

#[test]
fn a_failure_that_nobody_reads_has_its_exit_code() {
    let mut refused = quipu(&["run", "--", "/no/such/program"]);
    assert_eq!(status(refused.stderr(closed())).code(), Some(127));
}

#[test]
fn a_program_finds_the_signals_as_quipu_did() {
    let libraries = std::env::temp_dir().join(format!("quipu-libraries-{}", std::process::id()));
    std::fs::create_dir_all(&libraries).unwrap();
    // The loader complains of them, and goes on.
    let verbs = ["libibverbs.so", "libibverbs.so.1", "librdmacm.so", "librdmacm.so.1"];
    for name in verbs.iter().chain(&["libquipu_shim.so", "libquipu_engine.so"]) {
        std::fs::write(libraries.join(name), "").unwrap();
    }
    let signals = |before: &str, quipu: &str| {
        let line = format!("{before} exec {quipu} grep -E '^Sig(Blk|Ign)' /proc/self/status");
        let mut shell = Command::new("sh");
        shell.args(["-c", &line]).env("QUIPU_LIB_DIR", &libraries).stderr(Stdio::null());
        String::from_utf8(shell.output().unwrap().stdout).unwrap()
    };
    let quipu = concat!(env!("CARGO_BIN_EXE_quipu"), " run --");
    for before in ["", "trap '' PIPE;", "trap '' PIPE HUP;"] {
        let plain = signals(before, "");
        assert!(plain.contains("SigIgn"));
        assert_eq!(signals(before, quipu), plain, "{before}");
    }
    std::fs::remove_dir_all(&libraries).unwrap();
}

#[test]
fn a_blank_variable_counts_as_not_set() {
    // All that the command reads.
    let variables = [
        "QUIPU_ADDRESS",
        "QUIPU_LOG",
        "QUIPU_FAULTS",
        "QUIPU_FAULT_LOG",
        "QUIPU_FAULT_REPLAY",
        "QUIPU_STRICT",
        "QUIPU_STRICT_LOG",
        "QUIPU_STRICT_IGNORE",
        "QUIPU_STRICT_ORDER",
        "QUIPU_QPIP_LINK",
        "QUIPU_QPIP_ADDRESS",
        "QUIPU_QPIP_GATEWAY",
    ];
    // It gets so far that there is no such program, or no link.
    let (program, nic) = (["run", "--", "/no/such/program"], ["nic"]);
    for blank in ["", " "] {
        let mut command = quipu(&program);
        let said = command.envs(variables.map(|name| (name, blank))).output().unwrap();
        assert_eq!(said.status.code(), Some(127), "{}", String::from_utf8_lossy(&said.stderr));
        let said = quipu(&nic).envs(variables.map(|name| (name, blank))).output().unwrap();
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(said.status.code() == Some(1) && text.contains("no link was given"), "{text}");
    }
    let padded = [
        ("QUIPU_ADDRESS", " 127.0.0.1 "),
        ("QUIPU_STRICT", " report"),
        ("QUIPU_QPIP_LINK", " tap:x "),
        ("QUIPU_QPIP_ADDRESS", " 10.9.0.2/24"),
        ("QUIPU_QPIP_GATEWAY", "10.9.0.1 "),
    ];
    assert_eq!(status(quipu(&program).envs(padded)).code(), Some(127));
    // What is captured may be said by the variable, and how much of it by an option.
    let bounded = ["run", "--pcap-size", "4", "--", "/no/such/program"];
    assert_eq!(status(quipu(&bounded).env("QUIPU_PCAP", "x.pcapng")).code(), Some(127));
    // The link is that of other tools: this one fails since nobody is there.
    let socket = ["qpip", "pingpong", "--socket", "--port", "1", "127.0.0.1"];
    let said = quipu(&socket).envs(padded).output().unwrap();
    let text = String::from_utf8_lossy(&said.stderr);
    assert!(said.status.code() == Some(1) && !text.contains("adapter"), "{text}");
}

/// Who talks to a tool that Ctrl-C ends hears of it.
#[test]
fn a_tool_that_a_signal_ends_tells_its_peer() {
    let receive = ["ttcp", "-r", "--port", "7000", "--mode", "stream"];
    // A server has no other end, and one that is to receive something has not.
    let tools: [(&[&str], _, _); 3] = [
        (&["pingpong", "--port", "7000"], "-INT", 0),
        (&receive, "-INT", 130),
        (&receive, "-TERM", 143),
    ];
    for (tool, signal, code) in tools {
        let link = ["--link", "udp:127.0.0.1:0"];
        let mut tool = quipu(&[&["qpip"], tool, &link[..]].concat());
        let mut tool = tool.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(tool.stdout.take().unwrap()).lines();
        let mut line = || said.next().unwrap().unwrap();
        let first = line();
        let address = first.split([' ', ',']).find_map(|word| word.parse::<Ipv6Addr>().ok());
        line();
        let config = QpipConfig::new("udp:127.0.0.1:0".parse().unwrap());
        let adapter = Adapter::open(config).unwrap();
        let (pd, cq) = (adapter.protection_domain().unwrap(), adapter.completion_queue(2).unwrap());
        let qp = pd.queue_pair(&cq, &cq).build_tcp().unwrap();
        let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
        qp.connect(SocketAddr::new(address.unwrap().into(), 7000), &settings).unwrap();
        // Once an octet is acknowledged, the connection stands there as well.
        let memory = pd.register(1, Access::LOCAL_WRITE).unwrap();
        qp.post_send(&Request::send(&[memory.sge(0, 1).unwrap()])).unwrap();
        assert_eq!(cq.next().unwrap().status, WcStatus::Success);
        let kill = status(Command::new("kill").args([signal, &tool.id().to_string()]));
        assert!(kill.success());
        assert!(matches!(qp.wait_closed(), Err(Error::Tcp(Failure::Reset))));
        assert_eq!(tool.wait().unwrap().code(), Some(code));
    }
}

/// Servers whose help says that Ctrl-C ends them have not failed then, and neither has who sends SIGTERM.
#[test]
fn a_signal_is_the_end_of_servers() {
    let link = ["--link", "udp:127.0.0.1:0"];
    let (nic, serve) = ([&["nic"], &link[..]].concat(), [&["qpip", "serve"], &link[..]].concat());
    let echo = [&["qpip", "pingpong", "--wait"], &link[..]].concat();
    let iperf3 = [&["qpip", "iperf3", "--server", "--wait"], &link[..]].concat();
    let socket = ["qpip", "pingpong", "--socket", "--wait", "--port", "0"].to_vec();
    for server in [nic, serve, echo, iperf3, socket] {
        for signal in ["-INT", "-TERM"] {
            let mut tool = quipu(&server);
            let mut tool = tool.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let mut said = BufReader::new(tool.stdout.take().unwrap()).lines().map(Result::unwrap);
            let stands = said.any(|line| line.contains("Ctrl-C"));
            let killed = status(Command::new("kill").args([signal, &tool.id().to_string()]));
            let ended = tool.wait_with_output().unwrap();
            let complaint = String::from_utf8_lossy(&ended.stderr);
            assert!(stands && killed.success(), "{server:?} {signal}: {complaint}");
            assert_eq!((ended.status.code(), &*complaint), (Some(0), ""), "{server:?} {signal}");
        }
    }
}

#[test]
fn an_address_of_the_kernels_end_is_not_the_adapters() {
    let link = ["--link", "ns:,address=10.9.0.2/24", "--address", "10.9.0.2/24"];
    let outcome = quipu(&[&["nic"], &link[..]].concat()).output().unwrap();
    let said = String::from_utf8_lossy(&outcome.stderr);
    assert_eq!(outcome.status.code(), Some(1), "{said}");
    for part in ["10.9.0.2 to the kernel's end", "another", "--address"] {
        assert!(said.contains(part), "{part} in {said}");
    }
}

/// TCP asks for minutes where nobody answers, and the user is told that it does.
#[test]
fn a_tool_that_waits_for_an_answer_says_so() {
    // Where packets are nobody's (specs/qpip-udp-link.md, section 2).
    let place = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = place.local_addr().unwrap().port();
    let address = Ipv6Addr::new(0xfd51, 0x7069, 0x7075, 0, 0x7f00, 1, port, 0);
    let (url, peer) = (format!("http://[{address}]:80/"), address.to_string());
    let tools: [&[&str]; 2] = [&["get", &url], &["iperf3", "--port", "80", "--client", &peer]];
    let start = |tool: &[&str]| {
        let mut tool = quipu(&[&["qpip"], tool, &["--link", "udp:127.0.0.1:0"]].concat());
        tool.stderr(Stdio::piped()).spawn().unwrap()
    };
    for mut tool in tools.map(start) {
        let mut said = BufReader::new(tool.stderr.take().unwrap()).lines().map(Result::unwrap);
        let line = said.next().unwrap();
        assert!(line.contains(&format!("[{address}]:80")) && line.contains("Ctrl-C"), "{line}");
        let kill = status(Command::new("kill").args(["-INT", &tool.id().to_string()]));
        assert!(kill.success());
        assert_eq!(tool.wait().unwrap().code(), Some(130));
        assert_eq!(said.next(), None);
    }
}

/// The process that answers polls all the time, and would do so for ever.
#[test]
fn who_answers_measurements_ends_with_who_measures() {
    let mut meter = quipu(&["am", "bench", "--messages", "4000000000"]);
    let mut meter = meter.stdout(Stdio::null()).spawn().unwrap();
    let id = meter.id();
    let children = format!("/proc/{id}/task/{id}/children");
    let answering = eventually(|| {
        let child = fs::read_to_string(&children).ok()?.split_whitespace().next()?.to_owned();
        let line = fs::read(format!("/proc/{child}/cmdline")).ok()?;
        line.ends_with(b"am\0answer\0").then_some(child)
    });
    meter.kill().unwrap();
    meter.wait().unwrap();
    // Without a command line it is a zombie, until its new parent has asked for its status.
    eventually(|| {
        let line = fs::read(format!("/proc/{answering}/cmdline"));
        line.map_or(true, |line| !line.ends_with(b"am\0answer\0")).then_some(())
    });
}

/// What `attempt` gives at last: for a minute.
fn eventually<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    for _ in 0..6000 {
        if let Some(value) = attempt() {
            return value;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("not within a minute");
}

fn status(command: &mut Command) -> ExitStatus {
    let status = command.status().unwrap();
    assert_eq!(status.signal(), None);
    status
}
