//! Servers and clients of others, with the library at both ends or at none.

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use super::Outcome;

/// How long a server may take to begin.
const PATIENCE: Duration = Duration::from_secs(10);
/// `_SC_CLK_TCK` (proc(5)).
const TICKS: f64 = 100.0;

/// Where the two ends run.
pub(super) struct Ground<'a> {
    /// This command.
    pub(super) own: &'a str,
    /// What `LD_PRELOAD` is with the library.
    pub(super) preload: &'a str,
    /// What the commands of the server and of the client begin with.
    pub(super) prefixes: [Vec<String>; 2],
    /// The server's address.
    pub(super) address: &'a str,
    /// Their processors; any if there are none.
    pub(super) pins: Option<[usize; 2]>,
}

impl<'a> Ground<'a> {
    /// This host. `own` is this command, `preload` the value of `LD_PRELOAD` that `quipu sockets` sets.
    pub(super) fn here(own: &'a str, preload: &'a str, pins: Option<[usize; 2]>) -> Self {
        Self { own, preload, prefixes: Default::default(), address: "127.0.0.1", pins }
    }

    /// A command of one end: 0 is the server's.
    pub(super) fn command(&self, end: usize, with: bool, line: &[&str]) -> Command {
        let mut words: Vec<String> = self.prefixes[end].clone();
        if let Some(pins) = self.pins {
            words.extend(["taskset", "--cpu-list", &pins[end].to_string()].map(str::to_owned));
        }
        if with {
            // As `quipu sockets`, whose own processor time would count as the program's.
            words.extend(["env".to_owned(), format!("LD_PRELOAD={}", self.preload)]);
        }
        words.extend(line.iter().map(|word| (*word).to_owned()));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env_remove("LD_PRELOAD");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

/// Finds an installed program. Servers may be where only root looks for them.
pub(super) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<_> = std::env::split_paths(&path).collect();
    folders.extend(["/usr/sbin".into(), "/sbin".into()]);
    folders.into_iter().map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Seconds of processor time that a process has used, with all its threads.
fn cpu_seconds(id: u32) -> f64 {
    let text = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    // The name, which may have spaces, ends with the last parenthesis.
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks =
        rest.split_whitespace().skip(11).take(2).filter_map(|word| word.parse::<f64>().ok());
    ticks.sum::<f64>() / TICKS
}

/// A server, which ends with its owner.
pub(super) struct Server {
    process: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    /// Starts one, and waits until it listens at the port.
    fn start(ground: &Ground<'_>, with: bool, line: &[&str], port: u16) -> Outcome<Self> {
        let process = ground.command(0, with, line).spawn()?;
        let mut server = Self { process, port };
        let begun = Instant::now();
        while !listens(server.process.id(), port) {
            if server.process.try_wait()?.is_some() || begun.elapsed() > PATIENCE {
                return Err(format!("{} does not begin", line[0]).into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }
}

/// Whether somebody listens at a port in the network namespace of a process.
fn listens(id: u32, port: u16) -> bool {
    let text = fs::read_to_string(format!("/proc/{id}/net/tcp")).unwrap_or_default();
    let end = format!(":{port:04X}");
    text.lines().skip(1).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let local = words.next().is_some_and(|local| local.ends_with(&end));
        // TCP_LISTEN.
        local && words.nth(1) == Some("0A")
    })
}

/// A port at which nobody listens.
fn free_port() -> Outcome<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A program that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    /// GET of redis-benchmark, with 50 connections and so many requests under way on each.
    Redis { pipeline: u32 },
    /// wrk, which fetches a page of so many octets over so many connections.
    Nginx { page: usize, connections: u32 },
    /// The same through haproxy.
    Haproxy { page: usize, connections: u32 },
    /// sockperf under-load, messages of 64 octets as fast as it can.
    Sockperf,
}

impl Program {
    /// The programs that it needs.
    pub(super) fn needs(self) -> &'static [&'static str] {
        match self {
            Self::Redis { .. } => &["redis-server", "redis-benchmark"],
            Self::Nginx { .. } => &["nginx", "wrk"],
            Self::Haproxy { .. } => &["haproxy", "nginx", "wrk"],
            Self::Sockperf => &["sockperf"],
        }
    }
}

/// What a client said, and what both ends have spent.
pub(super) struct Turn {
    /// Requests, or messages, in a second.
    pub(super) rate: f64,
    pub(super) p99_us: f64,
    /// Processor time of both ends for each request, in microseconds.
    pub(super) cpu_us: f64,
}

/// A program whose server runs.
pub(super) struct Running<'a> {
    ground: &'a Ground<'a>,
    program: Program,
    with: bool,
    servers: Vec<Server>,
    /// Requests of the next turn, where the client takes a number.
    requests: u64,
}

fn path(program: &str) -> Outcome<String> {
    let file = find(program).ok_or_else(|| format!("{program} is not installed"))?;
    Ok(file.to_string_lossy().into_owned())
}

impl<'a> Running<'a> {
    /// Starts the servers, whose files are in a folder.
    ///
    /// # Errors
    ///
    /// A program is missing, or does not begin.
    pub(super) fn start(
        ground: &'a Ground<'a>,
        program: Program,
        with: bool,
        folder: &Path,
    ) -> Outcome<Self> {
        let (port, address) = (free_port()?, ground.address);
        let word = port.to_string();
        let text = |file: PathBuf| file.to_string_lossy().into_owned();
        let mut servers = Vec::new();
        match program {
            Program::Redis { .. } => {
                let line = [&path("redis-server")?, "--port", &word, "--bind", address];
                let line = [&line[..], &["--protected-mode", "no"]].concat();
                let more = ["--save", "", "--appendonly", "no", "--dir", &text(folder.into())];
                servers.push(Server::start(ground, with, &[&line[..], &more].concat(), port)?);
            }
            Program::Sockperf => {
                let line = [&path("sockperf")?, "server", "--tcp", "-i", address, "-p", &word];
                servers.push(Server::start(ground, with, &line, port)?);
            }
            Program::Nginx { page, .. } | Program::Haproxy { page, .. } => {
                let own = folder.join(format!("nginx-{with}"));
                fs::create_dir_all(&own)?;
                fs::write(own.join("page"), vec![b'x'; page])?;
                let settings = own.join("nginx.conf");
                fs::write(&settings, nginx_settings(&text(own.clone()), address, port))?;
                let line = [&path("nginx")?, "-e", "stderr", "-c", &text(settings)];
                servers.push(Server::start(ground, with, &line, port)?);
            }
        }
        if matches!(program, Program::Haproxy { .. }) {
            let front = free_port()?;
            let settings = folder.join(format!("haproxy-{with}.cfg"));
            fs::write(&settings, haproxy_settings(address, front, port))?;
            let line = [&path("haproxy")?, "-db", "-q", "-f", &text(settings)];
            servers.push(Server::start(ground, with, &line, front)?);
        }
        Ok(Self { ground, program, with, servers, requests: 10_000 })
    }

    fn client(&self, seconds: f64) -> Outcome<Vec<String>> {
        let port = self.servers.last().map_or(0, |server| server.port);
        let (host, port) = (self.ground.address, port.to_string());
        let whole = seconds.ceil().max(1.0);
        let words: Vec<String> = match self.program {
            Program::Redis { pipeline } => {
                let (requests, pipeline) = (self.requests.to_string(), pipeline.to_string());
                let line = [&path("redis-benchmark")?, "-h", host, "-p", &port, "-t", "get"];
                let more = ["-c", "50", "-n", &requests, "-P", &pipeline, "--csv"];
                [&line[..], &more].concat().into_iter().map(str::to_owned).collect()
            }
            Program::Nginx { connections, .. } | Program::Haproxy { connections, .. } => {
                let url = format!("http://{host}:{port}/page");
                let (connections, time) = (format!("-c{connections}"), format!("-d{whole}s"));
                let line = [&path("wrk")?, "-t1", &connections, &time, "--latency", &url];
                line.map(str::to_owned).to_vec()
            }
            Program::Sockperf => {
                let time = whole.to_string();
                let line = [&path("sockperf")?, "under-load", "--tcp", "-i", host, "-p", &port];
                let more = ["-m", "64", "--mps", "max", "-t", &time];
                [&line[..], &more].concat().into_iter().map(str::to_owned).collect()
            }
        };
        Ok(words)
    }

    /// Runs the client once, for about so many seconds.
    ///
    /// # Errors
    ///
    /// It fails, or says nothing that is understood.
    pub(super) fn turn(&mut self, seconds: f64) -> Outcome<Turn> {
        let line = self.client(seconds)?;
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let spent = |servers: &[Server]| -> f64 {
            servers.iter().map(|server| cpu_seconds(server.process.id())).sum()
        };
        let before = spent(&self.servers);
        let (output, of_client) = run(self.ground.command(1, self.with, &line))?;
        let cpu = spent(&self.servers) - before + of_client;
        let said = || format!("{} has printed no numbers: {}", line[0], last_line(&output));
        let (rate, p99_us, count) = match self.program {
            Program::Redis { .. } => {
                let (rate, p99) = redis_numbers(&output).ok_or_else(said)?;
                let count = self.requests as f64;
                self.requests = ((rate * seconds) as u64).clamp(1000, 10_000_000);
                (rate, p99, count)
            }
            Program::Sockperf => sockperf_numbers(&output).ok_or_else(said)?,
            _ => wrk_numbers(&output).ok_or_else(said)?,
        };
        Ok(Turn { rate, p99_us, cpu_us: cpu * 1e6 / count.max(1.0) })
    }
}

/// Runs a client to its end: what it printed, and its processor time in seconds.
fn run(mut command: Command) -> Outcome<(String, f64)> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut output = String::new();
    if let Some(pipe) = &mut child.stdout {
        pipe.read_to_string(&mut output)?;
    }
    // It stays for its counters to be read.
    let id = Pid::from_child(&child);
    waitid(WaitId::Pid(id), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
    let seconds = cpu_seconds(child.id());
    if !child.wait()?.success() {
        return Err(format!("the client failed: {}", last_line(&output)).into());
    }
    Ok((output, seconds))
}

fn last_line(output: &str) -> &str {
    output.trim_end().lines().last().unwrap_or_default()
}

fn nginx_settings(folder: &str, address: &str, port: u16) -> String {
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|what| format!("{what}_temp_path {folder};"))
        .join(" ");
    format!(
        "daemon off; master_process off; pid {folder}/pid;\nevents {{ }}\n\
         http {{ access_log off; {temporary}\n\
         server {{ listen {address}:{port}; root {folder}; sendfile on; }} }}\n"
    )
}

fn haproxy_settings(address: &str, front: u16, back: u16) -> String {
    format!(
        "global\n nbthread 1\ndefaults\n mode http\n timeout connect 5s\n timeout client 30s\n \
         timeout server 30s\n http-reuse always\nfrontend front\n bind {address}:{front}\n \
         default_backend back\nbackend back\n server nginx {address}:{back}\n"
    )
}

/// Requests a second and the p99 in microseconds, from the last line of comma-separated values.
fn redis_numbers(output: &str) -> Option<(f64, f64)> {
    let line = output.lines().find(|line| line.starts_with("\"GET\""))?;
    let words: Vec<&str> = line.split(',').map(|word| word.trim_matches('"')).collect();
    Some((words.get(1)?.parse().ok()?, words.get(6)?.parse::<f64>().ok()? * 1000.0))
}

/// The number after a text.
fn number_after(output: &str, text: &str) -> Option<f64> {
    let (_, rest) = output.split_once(text)?;
    let rest = rest.trim_start();
    let end = rest.find(|digit: char| !digit.is_ascii_digit() && digit != '.');
    rest[..end.unwrap_or(rest.len())].parse().ok()
}

/// Messages a second, p99 in microseconds, and the number of messages.
fn sockperf_numbers(output: &str) -> Option<(f64, f64, f64)> {
    let (_, total) = output.split_once("[Total Run]")?;
    let messages = number_after(total, "SentMessages=")?;
    // Where the machine is busy, it may find no message of its time after the warm-up.
    let of = output.split_once("[Valid Duration]").map_or(total, |(_, valid)| valid);
    let rate = number_after(of, "SentMessages=")? / number_after(of, "RunTime=")?;
    Some((rate, number_after(output, "percentile 99.000 =").unwrap_or(f64::NAN), messages))
}

/// Requests a second, p99 in microseconds, and the number of requests.
fn wrk_numbers(output: &str) -> Option<(f64, f64, f64)> {
    let p99 = output.lines().map(str::trim).find_map(|line| line.strip_prefix("99%"))?.trim();
    let (number, unit) = p99.split_at(p99.find(|c: char| c.is_ascii_alphabetic())?);
    let scale = match unit {
        "us" => 1.0,
        "ms" => 1e3,
        "s" => 1e6,
        _ => return None,
    };
    let count = output.lines().find_map(|line| line.trim().split_once(" requests in "))?.0;
    let rate = number_after(output, "Requests/sec:")?;
    Some((rate, number.parse::<f64>().ok()? * scale, count.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_print_is_read() {
        let redis = "\"test\",\"rps\",\"avg\",\"min\",\"p50\",\"p95\",\"p99\",\"max\"\n\
                     \"GET\",\"32102.73\",\"1.006\",\"0.096\",\"0.983\",\"1.503\",\"1.679\",\"3.0\"\n";
        assert_eq!(redis_numbers(redis), Some((32102.73, 1679.0)));
        let wrk = "    50%    1.03ms\n    99%    2.50ms\n  20480 requests in 1.10s, 25MB read\n\
                   Requests/sec:  18618.18\n";
        assert_eq!(wrk_numbers(wrk), Some((18618.18, 2500.0, 20480.0)));
        let sockperf = "[Total Run] RunTime=1.014 sec; SentMessages=96691; Received=966\n\
                        [Valid Duration] RunTime=0.5 sec; SentMessages=36000; Received=368\n\
                        ---> percentile 99.000 = 33628.292\n";
        assert_eq!(sockperf_numbers(sockperf), Some((72000.0, 33628.292, 96691.0)));
        let busy = "[Total Run] RunTime=2.0 sec; SentMessages=80000; Received=790\nNo valid";
        let (rate, p99, count) = sockperf_numbers(busy).unwrap();
        assert_eq!((rate, p99.is_nan(), count), (40000.0, true, 80000.0));
        assert_eq!((redis_numbers(""), wrk_numbers(""), sockperf_numbers("")), (None, None, None));
    }

    #[test]
    fn commands_name_the_host_the_processor_and_the_library() {
        let prefixes = [vec![], vec!["nsenter".to_owned()]];
        let ground =
            Ground { prefixes, ..Ground::here("/bin/quipu", "/lib/sockets.so", Some([0, 1])) };
        let words = |command: &Command| format!("{command:?}").replace('"', "");
        let server = words(&ground.command(0, false, &["redis-server"]));
        assert!(server.ends_with("taskset --cpu-list 0 redis-server"), "{server}");
        let client = words(&ground.command(1, true, &["wrk"]));
        let expected = "nsenter taskset --cpu-list 1 env LD_PRELOAD=/lib/sockets.so wrk";
        assert!(client.ends_with(expected), "{client}");
    }

    #[test]
    fn a_port_with_a_listener_is_seen_and_processor_time_is_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listens(std::process::id(), port));
        drop(listener);
        assert!(!listens(std::process::id(), port));
        let mut command = Command::new("sh");
        command.args(["-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo done"]);
        let (output, seconds) = run(command).unwrap();
        assert_eq!(output, "done\n");
        assert!(seconds > 0.0 && seconds < 60.0, "{seconds}");
    }
}
