//! All hosts of a job together: PMI, output, the end and the exit code.

use std::env;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use super::frame::{Message, Start, Stream};
use super::node::{self, Node};
use super::output::Output;
use super::remote::Remote;
use super::{Options, SpmdError, THIS_HOST, hosts};
use crate::pmi::{Effect, Server};
use crate::sys::{self, Interest, Signals, name_of_signal};

/// From SIGTERM to SIGKILL.
const PATIENCE: Duration = Duration::from_secs(2);
/// From SIGKILL to the end of the launcher, for hosts that do not answer any more.
const LAST: Duration = Duration::from_secs(3);

/// That the job is to end, and since when.
#[derive(Clone, Copy, Debug)]
struct Ending {
    code: u8,
    since: Instant,
    killed: bool,
}

struct Job {
    size: u32,
    server: Server,
    output: Output,
    local: Vec<Node>,
    remotes: Vec<Remote>,
    signals: Signals,
    host_of: Vec<String>,
    ended: Vec<bool>,
    ending: Option<Ending>,
}

/// Starts the job and waits for its end; the exit code: 0, that of the first rank that failed, or 128 + the
/// number of the signal that killed it.
///
/// # Errors
/// If the job cannot be started.
pub fn run(options: &Options) -> Result<u8, SpmdError> {
    let placed = hosts::place(options.ranks, &options.hosts)?;
    let system = |what: &str| {
        let what = what.to_owned();
        move |source| SpmdError::System { what, source }
    };
    let signals = Signals::open().map_err(system("cannot receive signals"))?;
    let counts: Vec<u32> = placed.iter().map(|(_, count)| *count).collect();
    let size: u32 = counts.iter().sum();
    let name = format!("quipu-{}", std::process::id());
    let host_of = placed.iter().flat_map(|(host, count)| vec![host.clone(); *count as usize]);
    let mut job = Job {
        size,
        server: Server::new(&name, &counts),
        output: Output::new(options.label),
        local: Vec::new(),
        remotes: Vec::new(),
        signals,
        host_of: host_of.collect(),
        ended: vec![false; size as usize],
        ending: None,
    };
    let directory = node::directory().map_err(system("cannot find the working directory"))?;
    let program: Vec<Vec<u8>> = options.program.iter().map(|word| word.as_bytes().into()).collect();
    let mut first = 0;
    let mut events = Vec::new();
    for (host, count) in placed {
        let (directory, program) = (directory.clone(), program.clone());
        let mut start = Start { first, count, size, directory, program, variables: Vec::new() };
        first += count;
        if host == THIS_HOST {
            job.local.push(Node::start(&start, true, &mut events));
            continue;
        }
        start.variables = variables(&options.variables);
        let remote = Remote::start(&host, &start, &options.ssh, &options.quipu);
        let what = format!("cannot run \"{}\" to reach {host}", options.ssh.join(" "));
        job.remotes.push(remote.map_err(system(&what))?);
    }
    job.handle(events);
    Ok(job.wait())
}

/// The variables that ranks on other hosts get.
fn variables(wanted: &[String]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let ours = env::vars_os().filter(|(name, _)| name.as_bytes().starts_with(b"QUIPU_"));
    let ours = ours.map(|(name, value)| (name.into_vec(), value.into_vec()));
    let named = wanted.iter().filter_map(|word| match word.split_once('=') {
        Some((name, value)) => Some((name.into(), value.into())),
        None => Some((word.as_bytes().into(), env::var_os(word)?.into_vec())),
    });
    ours.chain(named).collect()
}

impl Job {
    /// Waits until all ranks have ended. The exit code.
    fn wait(&mut self) -> u8 {
        loop {
            let mut events = Vec::new();
            let mut interests =
                vec![Interest { fd: self.signals.fd(), write: false, ready: false }];
            self.local.iter().for_each(|node| node.interests(&mut interests));
            self.remotes.iter().for_each(|remote| remote.interests(&mut interests));
            if let Err(error) = sys::wait(&mut interests, self.timeout()) {
                self.end(125, &format!("cannot wait for the ranks: {error}"));
            }
            self.handle_signals();
            for node in &mut self.local {
                node.progress(&interests, &mut events);
                node.reap(&mut events);
            }
            let lost = self.progress_remotes(&mut events);
            self.handle(events);
            for (host, why) in lost {
                self.lose(&host, &why);
            }
            self.handle_time();
            if self.is_over() {
                let _ = self.output.finish();
                return self.ending.map_or(0, |ending| ending.code);
            }
        }
    }

    /// Whether nothing more can come.
    fn is_over(&mut self) -> bool {
        let late = self.ending.is_some_and(|e| e.killed && e.since.elapsed() > PATIENCE + LAST);
        // After a failure to start, some ranks never were.
        let running = self.local.iter().any(Node::is_running)
            || self.remotes.iter().any(|remote| !remote.is_read());
        let all_ended = self.ended.iter().all(|ended| *ended);
        late || (!running && (all_ended || self.ending.is_some()))
    }

    fn timeout(&self) -> Option<Duration> {
        let ending = self.ending?;
        let until = if ending.killed { PATIENCE + LAST } else { PATIENCE };
        Some(until.saturating_sub(ending.since.elapsed()))
    }

    fn handle_time(&mut self) {
        if self.ending.is_some_and(|ending| !ending.killed && ending.since.elapsed() >= PATIENCE) {
            self.kill();
        }
    }

    fn handle_signals(&mut self) {
        while let Some(signal) = self.signals.next() {
            if signal == libc::SIGCHLD {
                continue;
            }
            if self.ending.is_some() {
                self.kill();
            } else {
                let name = name_of_signal(signal);
                self.end(128 + signal as u8, &format!("{name}: ending all {} ranks", self.size));
            }
        }
    }

    /// Moves the bytes of other hosts; those that are lost, and why.
    fn progress_remotes(&mut self, events: &mut Vec<Message>) -> Vec<(String, String)> {
        let mut lost = Vec::new();
        for remote in &mut self.remotes {
            if remote.is_read() {
                continue;
            }
            if let Err(why) = remote.progress(events) {
                lost.push((remote.host.clone(), why));
            } else if remote.is_read() {
                let why = match remote.ended() {
                    Some(status) => format!("ssh has ended: {status}"),
                    None => "ssh has closed its output".into(),
                };
                lost.push((remote.host.clone(), why));
            }
        }
        lost
    }

    /// A host that sends no more: its ranks are lost if they have not ended.
    fn lose(&mut self, host: &str, why: &str) {
        let Some(remote) = self.remotes.iter().find(|remote| remote.host == host) else { return };
        let ranks = remote.first..remote.first + remote.count;
        let running: Vec<u32> = ranks.filter(|rank| !self.ended[*rank as usize]).collect();
        if let (Some(first), Some(last)) = (running.first(), running.last()) {
            self.end(1, &format!("ranks {first} to {last} on host {host} are lost: {why}"));
            running.iter().for_each(|rank| self.ended[*rank as usize] = true);
        }
    }

    fn handle(&mut self, events: Vec<Message>) {
        for event in events {
            let mut effects = Vec::new();
            match event {
                Message::Pmi { rank, bytes } => self.server.handle(rank, &bytes, &mut effects),
                Message::Output { rank, stream, bytes } => self.show(rank, stream, &bytes),
                Message::Exit { rank, status } => {
                    self.handle_exit(rank, ExitStatus::from_raw(status));
                    self.server.handle_exit(rank, &mut effects);
                }
                Message::NotStarted { rank, code, why } => {
                    self.ended[rank as usize] = true;
                    self.end(code, &format!("{}: {why}", self.name(rank)));
                }
                Message::Start(_) | Message::Signal(_) => {}
            }
            effects.into_iter().for_each(|effect| self.apply(effect));
        }
    }

    fn apply(&mut self, effect: Effect) {
        match effect {
            Effect::Send { rank, bytes } => {
                let remote = self.remotes.iter_mut().find(|remote| remote.has(rank));
                match remote {
                    Some(remote) => remote.send(&Message::Pmi { rank, bytes }),
                    None => self.local.iter_mut().for_each(|node| node.send(rank, &bytes)),
                }
            }
            Effect::Abort { rank, code, message } => {
                let text = format!("{} ends the job: {message}", self.name(rank));
                self.end(code as u8, &text);
            }
        }
    }

    fn show(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        if self.output.write(rank, stream, bytes).is_err() && self.ending.is_none() {
            // As a program that nobody listens to any more.
            self.end(128 + libc::SIGPIPE as u8, "nobody reads the output any more");
        }
    }

    fn handle_exit(&mut self, rank: u32, status: ExitStatus) {
        self.ended[rank as usize] = true;
        let left = self.ended.iter().filter(|ended| !**ended).count();
        let (code, how) = match (status.code(), status.signal()) {
            (Some(0), _) => return,
            (Some(code), _) => (code as u8, format!("ended with exit code {code}")),
            (None, Some(signal)) => {
                let dumped = if status.core_dumped() { ", core dumped" } else { "" };
                let name = name_of_signal(signal);
                (128 + signal as u8, format!("was killed by signal {signal} ({name}){dumped}"))
            }
            (None, None) => (1, format!("ended: {status}")),
        };
        let rest = if left == 0 { String::new() } else { format!("; ending the other {left}") };
        self.end(code, &format!("{} {how}{rest}", self.name(rank)));
    }

    /// A rank, for messages.
    fn name(&self, rank: u32) -> String {
        let host = &self.host_of[rank as usize];
        let place = if host == THIS_HOST { String::new() } else { format!(" on host {host}") };
        format!("rank {rank} of {}{place}", self.size)
    }

    /// Ends the job, for a reason that is shown, unless it is ending already.
    fn end(&mut self, code: u8, why: &str) {
        if self.ending.is_some() {
            return;
        }
        let _ = self.output.finish();
        eprintln!("quipu spmd: {why}");
        self.ending = Some(Ending { code, since: Instant::now(), killed: false });
        self.signal(libc::SIGTERM);
    }

    fn kill(&mut self) {
        if let Some(ending) = &mut self.ending {
            ending.killed = true;
        }
        self.signal(libc::SIGKILL);
    }

    fn signal(&mut self, signal: i32) {
        self.local.iter_mut().for_each(|node| node.signal(signal));
        self.remotes.iter_mut().for_each(|remote| remote.send(&Message::Signal(signal)));
    }
}
