//! An adapter in a process of its own, and what happens when processes die.

mod users;

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use quipu::qpip::{Adapter, QpipConfig, TcpSettings};
use quipu::{Access, Config, EngineError, Error, WcStatus};

const QUIPU: &str = env!("CARGO_BIN_EXE_quipu");
const PATIENCE: Duration = Duration::from_secs(30);
/// A link of a program's own.
const OWN: &str = "udp:127.0.0.1:0";
static NAMES: AtomicU32 = AtomicU32::new(0);

/// A command of quipu, which ends with the test.
struct Running {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Running {
    fn start(args: &[&str]) -> Self {
        Self::start_with(args, "never")
    }

    /// One that shows counters.
    fn start_counted(args: &[&str]) -> Self {
        Self::start_with(args, "auto")
    }

    fn start_with(args: &[&str], counters: &str) -> Self {
        Self::spawn(Command::new(QUIPU).args(args), counters)
    }

    fn spawn(command: &mut Command, counters: &str) -> Self {
        command.env("QUIPU_ADDRESS", "127.0.0.1").env("QUIPU_COUNTERS", counters);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Reads until a line has `word`.
    fn until(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if line.contains(word) {
                return line;
            }
            line.clear();
        }
        panic!("it ended without a word of {word}");
    }

    /// Waits until it ends by itself; its exit code.
    fn end(&mut self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < PATIENCE, "it stays");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// As an accident would.
    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An adapter in a process of its own: the process, its link, and its address.
fn shared() -> (Running, String, IpAddr) {
    shared_by(&mut Command::new(QUIPU), &[])
}

/// The same by a command that is to run quipu, with more options.
fn shared_by(command: &mut Command, more: &[&str]) -> (Running, String, IpAddr) {
    let number = NAMES.fetch_add(1, Ordering::Relaxed);
    let name = format!("process-{}-{number}", std::process::id());
    command.args(["nic", "--link", OWN, "--share", &name]).args(more);
    let mut nic = Running::spawn(command, "never");
    let line = nic.until("MTU");
    let address = line.split_whitespace().find_map(|word| word.trim_end_matches(',').parse().ok());
    nic.until(&format!("share:{name}"));
    (nic, format!("share:{name}"), address.unwrap())
}

fn open(link: &str) -> Adapter {
    let config = Config {
        address: Some([127, 0, 0, 1].into()),
        counters: false,
        qpip: Some(QpipConfig::new(link.parse().unwrap())),
        ..Config::default()
    };
    Adapter::open_with(config).unwrap()
}

/// What a client of HTTP gets there, over an adapter of its own or a shared one.
fn get(link: &str, to: SocketAddr) -> Option<String> {
    let url = format!("http://{to}/");
    let mut command = Command::new(QUIPU);
    command.args(["qpip", "get", "--link", link, &url]).env("QUIPU_COUNTERS", "never");
    let got = command.stderr(Stdio::null()).output().unwrap();
    got.status.success().then(|| String::from_utf8_lossy(&got.stdout).into_owned())
}

#[test]
fn programs_on_one_adapter_reach_each_other_by_its_address() {
    let (_nic, link, address) = shared();
    let text = "from the one to the other";
    let mut server =
        Running::start(&["qpip", "serve", "--link", &link, "--port", "87", "--text", text]);
    server.until("serving");
    assert_eq!(get(&link, SocketAddr::new(address, 87)).as_deref(), Some(text));
}

#[test]
fn an_adapter_that_ends_says_what_frames_there_were() {
    let mut nic = Running::start_counted(&["nic", "--link", "udp:127.0.0.1:0"]);
    let line = nic.until("MTU");
    let words = line.split_whitespace();
    let address = words.filter_map(|word| word.trim_end_matches(',').parse().ok()).next();
    nic.until("Ctrl-C");
    // Nobody listens there.
    assert_eq!(get(OWN, SocketAddr::new(address.unwrap(), 80)), None);
    let kill = format!("kill {}", nic.child.id());
    let killed = Command::new("sh").args(["-c", &kill]).status().unwrap();
    assert!(killed.success());
    // More than once where the machine has stopped for so long that it was asked again.
    assert!(nic.until("frames:").contains("dropped: tcp_unknown "));
}

#[test]
fn programs_that_are_killed_leave_nothing_behind_and_others_in_peace() {
    let (_nic, link, address) = shared();
    let serve = |port: &str, text: &str| {
        let mut server =
            Running::start(&["qpip", "serve", "--link", &link, "--port", port, "--text", text]);
        server.until("http");
        server
    };
    let (mut one, _two) = (serve("8001", "one"), serve("8002", "two"));
    let (first, second) = (SocketAddr::new(address, 8001), SocketAddr::new(address, 8002));
    assert_eq!(
        (get(OWN, first).as_deref(), get(OWN, second).as_deref()),
        (Some("one"), Some("two"))
    );
    one.kill();
    assert_eq!(get(OWN, second).as_deref(), Some("two"));
    // The port of the dead is free, soon.
    let begun = Instant::now();
    while get(OWN, first).is_some() {
        assert!(begun.elapsed() < PATIENCE, "the dead still answers");
    }
    let _again = serve("8001", "again");
    assert_eq!(get(OWN, first).as_deref(), Some("again"));
}

#[test]
fn a_server_ends_when_the_process_with_the_adapter_was_killed() {
    let (mut nic, link, _) = shared();
    let mut server = Running::start(&["qpip", "serve", "--link", &link, "--port", "88"]);
    server.until("Ctrl-C");
    // It is to wait by then.
    std::thread::sleep(Duration::from_millis(100));
    nic.kill();
    assert_eq!(server.end(), Some(1));
}

#[test]
fn whoever_waits_for_an_adapter_that_was_killed_hears_that_it_is_gone() {
    let (mut nic, link, _) = shared();
    let mut server = Running::start(&["qpip", "iperf3", "--link", &link, "--server"]);
    server.until("Ctrl-C");
    let adapter = open(&link);
    let cq = adapter.completion_queue(8).unwrap();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        nic.kill();
    });
    let is_lost = |error| matches!(error, Error::Engine(EngineError::AdapterLost));
    // It sleeps by then, and has nothing that would be flushed.
    assert!(adapter.wait(&cq).is_err_and(is_lost));
    killer.join().unwrap();
    let other = adapter.completion_queue(8).unwrap();
    for cq in [&cq, &other] {
        let mut out = [quipu::Completion::default()];
        assert!(adapter.wait_timeout(cq, Duration::ZERO).is_err_and(is_lost));
        assert!(cq.wait(&mut out).is_err_and(is_lost));
        assert!(cq.wait_event().is_err_and(is_lost));
    }
    assert!(adapter.wait_event().is_err_and(is_lost));
    assert!(adapter.poll_event().is_err_and(is_lost));
    assert_eq!(server.end(), Some(1));
}

/// It answers nobody, and is there.
#[test]
fn a_signal_ends_tools_whose_adapter_is_in_a_process_that_is_stopped() {
    let (nic, link, _) = shared();
    let mut server = Running::start(&["qpip", "serve", "--link", &link, "--port", "88"]);
    server.until("Ctrl-C");
    // It is to wait by then.
    std::thread::sleep(Duration::from_millis(100));
    nic.signal("STOP");
    // One that attaches, once it waits for signals.
    let mut client = Running::start(&["qpip", "get", "--link", &link, "http://10.9.0.1/"]);
    let status = format!("/proc/{}/status", client.child.id());
    let waits = |status: String| {
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        blocked.is_some_and(|set| u64::from_str_radix(set.trim(), 16).unwrap() & 2 != 0)
    };
    let begun = Instant::now();
    while !waits(std::fs::read_to_string(&status).unwrap()) {
        assert!(begun.elapsed() < PATIENCE, "it does not wait");
        std::thread::sleep(Duration::from_millis(1));
    }
    for (tool, code) in [(&mut server, 0), (&mut client, 130)] {
        tool.signal("INT");
        assert_eq!(tool.end(), Some(code));
    }
}

#[test]
fn programs_hear_that_the_process_with_the_adapter_was_killed() {
    let ((mut nic, link, _), (_elsewhere, other, to)) = (shared(), shared());
    let (adapter, peer) = (open(&link), open(&other));
    let (pd, cq) = (adapter.protection_domain().unwrap(), adapter.completion_queue(8).unwrap());
    let memory = pd.register(4096, Access::LOCAL_WRITE).unwrap();
    let qp = pd.queue_pair(&cq, &cq).build_tcp().unwrap();
    qp.post_recv(7, &[memory.sge(0, 4096).unwrap()]).unwrap();

    let (pd, there) = (peer.protection_domain().unwrap(), peer.completion_queue(8).unwrap());
    let mate = pd.queue_pair(&there, &there).build_tcp().unwrap();
    let listener = peer.listen(0, &TcpSettings::default(), 1).unwrap();
    listener.offer(&mate).unwrap();
    qp.connect(SocketAddr::new(to, listener.port()), &TcpSettings::default()).unwrap();

    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        nic.kill();
    });
    // It sleeps by then.
    let flushed = cq.next().unwrap_err();
    assert_eq!(flushed.work_status(), Some(WcStatus::WrFlushErr));
    qp.wait_closed().unwrap();
    killer.join().unwrap();
    let later = qp.post_recv(8, &[]).unwrap_err();
    assert!(matches!(later, Error::Engine(EngineError::AdapterLost)), "{later}");
    assert!(later.to_string().contains("quipu nic --share"), "{later}");
    assert!(pd.register(64, Access::LOCAL_WRITE).is_ok(), "the other adapter lives");
}

#[test]
fn an_adapter_that_cannot_be_shared_says_why_and_what_to_do() {
    let (_nic, link, _) = shared();
    let said = |args: [&str; 2]| {
        let mut command = Command::new(QUIPU);
        command.args(["nic", "--link", args[0], "--share", args[1]]);
        command.env("QUIPU_ADDRESS", "127.0.0.1").env("QUIPU_COUNTERS", "never");
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let lock = said([OWN, "lab.lock"]);
    assert!(
        lock.contains("is not a valid name") && lock.contains("give another name with --share"),
        "{lock}"
    );
    let name = link.strip_prefix("share:").unwrap();
    let taken = said([OWN, name]);
    assert!(
        taken.contains("choose another name") && !taken.contains("give another name"),
        "{taken}"
    );
    let again = said([&link, "again"]);
    assert!(again.contains(&format!("attach programs to {link}")), "{again}");
}
