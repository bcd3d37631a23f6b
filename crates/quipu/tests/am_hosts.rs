//! Active Messages between the processes of a job on two hosts, which are two network namespaces.
//! `quipu spmd` starts this program as its ranks.

use std::fs;
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use quipu::am::{Bundle, Endpoint, Kind, Mode, Name, Port, Status, Tag};
use quipu::{Config, Device};
use quipu_launch::Job;

const TAG: Tag = Tag(0x71_7569_7075);
const ECHO: u16 = 1;
const BACK: u16 = 2;
const DONE: u16 = 3;
const HOLD: u16 = 4;
/// Requests of each rank to each other.
const REQUESTS: u64 = 100;
const PATIENCE: Duration = Duration::from_secs(240);
/// The time after which an endpoint gives up is 10 s; the rest is for a busy machine.
const RETURNED_WITHIN: Duration = Duration::from_secs(15);

/// What a rank has seen.
#[derive(Default)]
struct Seen {
    replies: AtomicU64,
    sum: AtomicU64,
    done: AtomicU64,
    held: AtomicU64,
    returned: AtomicU64,
}

/// A rank of the job.
struct Rank {
    job: Job,
    endpoint: Endpoint,
    bundle: Bundle,
    seen: Arc<Seen>,
}

impl Rank {
    fn new() -> Self {
        let job = Job::from_env().unwrap();
        let addresses = std::env::var("AM_TEST_ADDRESSES").unwrap();
        let mut addresses = addresses.split(',').map(|address| address.parse::<IpAddr>().unwrap());
        let own = addresses.find(|address| TcpListener::bind((*address, 0)).is_ok());
        let device =
            Device::open(Config { address: own.map(Into::into), ..Config::default() }).unwrap();
        let port = Port::open(&device, quipu::am::Config::default()).unwrap();
        let bundle = port.bundle(Mode::Sequential);
        let endpoint = bundle.endpoint().unwrap();
        endpoint.set_tag(TAG).unwrap();
        let seen = Arc::new(Seen::default());
        set_handlers(&endpoint, &seen);
        let name = endpoint.name().unwrap().to_bytes();
        for (index, name) in (0..).zip(job.all_gather("am", &name).unwrap()) {
            let name = Name::from_bytes(name[..].try_into().unwrap()).unwrap();
            endpoint.map(index, name, TAG).unwrap();
        }
        Self { job, endpoint, bundle, seen }
    }

    fn others(&self) -> impl Iterator<Item = u32> {
        let own = self.job.rank();
        (0..self.job.size()).filter(move |rank| *rank != own)
    }

    #[track_caller]
    fn poll_until(&self, mut is_so: impl FnMut(&Seen) -> bool) {
        let began = Instant::now();
        while !is_so(&self.seen) {
            assert!(began.elapsed() < PATIENCE, "rank {} waits for nothing", self.job.rank());
            if self.bundle.poll().unwrap() == 0 {
                let seen = self.bundle.arrivals().unwrap();
                self.bundle.wait(seen, Some(Duration::from_millis(10))).unwrap();
            }
        }
    }

    /// Waits until every other rank is done, and knows that this one is.
    fn part(self) {
        for rank in self.others() {
            self.endpoint.request(rank, DONE, &[]).unwrap();
        }
        let others = u64::from(self.job.size() - 1);
        self.poll_until(|seen| seen.done.load(Ordering::Relaxed) == others);
        self.poll_until(|_| self.endpoint.outstanding().unwrap() == 0);
        self.job.finalize().unwrap();
    }
}

fn set_handlers(endpoint: &Endpoint, seen: &Arc<Seen>) {
    endpoint
        .set_handler(ECHO.into(), |message| {
            let args = message.args().to_vec();
            let bytes = message.to_vec().unwrap();
            message.reply_medium(BACK, &args, &bytes).unwrap();
        })
        .unwrap();
    let back = Arc::clone(seen);
    endpoint
        .set_handler(BACK.into(), move |message| {
            let bytes = message.to_vec().unwrap();
            assert!(bytes.iter().all(|byte| *byte == bytes.len() as u8));
            back.replies.fetch_add(1, Ordering::Relaxed);
            back.sum.fetch_add(message.args()[0] as u64, Ordering::Relaxed);
        })
        .unwrap();
    let done = Arc::clone(seen);
    endpoint
        .set_handler(DONE.into(), move |_| {
            done.done.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
    let held = Arc::clone(seen);
    endpoint
        .set_handler(HOLD.into(), move |_| {
            held.held.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
    let returned = Arc::clone(seen);
    endpoint
        .set_handler(0, move |message| match message.kind() {
            Kind::Returned { status: Status::Unreachable, .. } => {
                returned.returned.fetch_add(1, Ordering::Relaxed);
            }
            other => panic!("{other:?}"),
        })
        .unwrap();
}

/// Everybody asks everybody, with messages of all lengths that fit a test.
fn everybody_asks_everybody(rank: Rank) {
    for request in 0..REQUESTS {
        for other in rank.others() {
            let payload = vec![request as u8; request as usize];
            rank.endpoint.request_medium(other, ECHO, &[request as i32], &payload).unwrap();
        }
    }
    let others = u64::from(rank.job.size() - 1);
    rank.poll_until(|seen| seen.replies.load(Ordering::Relaxed) == others * REQUESTS);
    let sum = rank.seen.sum.load(Ordering::Relaxed);
    assert_eq!(sum, others * REQUESTS * (REQUESTS - 1) / 2);
    println!("rank {} has all replies", rank.job.rank());
    rank.part();
}

/// The last rank is killed while it owes replies to all others.
fn one_is_killed(rank: Rank) {
    let last = rank.job.size() - 1;
    if rank.job.rank() == last {
        rank.poll_until(|seen| seen.replies.load(Ordering::Relaxed) == u64::from(last));
        // What comes now stays unanswered.
        std::thread::sleep(Duration::from_millis(300));
        let _ = Command::new("kill").args(["-KILL", &std::process::id().to_string()]).status();
        return;
    }
    // All are connected when this is answered.
    rank.endpoint.request_medium(last, ECHO, &[1], &[]).unwrap();
    rank.poll_until(|seen| seen.replies.load(Ordering::Relaxed) == 1);
    rank.endpoint.request_medium(last, BACK, &[1], &[]).unwrap();
    let began = Instant::now();
    let is_back = |seen: &Seen| seen.returned.load(Ordering::Relaxed) > 0;
    while !is_back(&rank.seen) {
        assert!(began.elapsed() < RETURNED_WITHIN, "nothing comes back");
        // While the last rank lives it may answer this one, too.
        rank.endpoint.request(last, HOLD, &[]).unwrap();
        rank.poll_until(|seen| is_back(seen) || !is_pending(&rank));
        rank.bundle.poll().unwrap();
    }
    let before = rank.seen.returned.load(Ordering::Relaxed);
    let began = Instant::now();
    rank.endpoint.request(last, HOLD, &[]).unwrap();
    rank.poll_until(|seen| seen.returned.load(Ordering::Relaxed) > before);
    assert!(began.elapsed() < Duration::from_secs(1), "a later request returns at once");
    println!("rank {} has its messages back", rank.job.rank());
}

fn is_pending(rank: &Rank) -> bool {
    rank.endpoint.outstanding().unwrap() > 0
}

/// The link between the hosts is cut while a reply is owed, and nothing else.
fn the_link_is_cut(rank: Rank) {
    let mark = PathBuf::from(std::env::var("AM_TEST_FOLDER").unwrap()).join("over");
    if rank.job.rank() == 1 {
        rank.poll_until(|seen| seen.replies.load(Ordering::Relaxed) == 1);
        let began = Instant::now();
        while !mark.exists() && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(50));
        }
        return;
    }
    rank.endpoint.request_medium(1, ECHO, &[1], &[]).unwrap();
    rank.poll_until(|seen| seen.replies.load(Ordering::Relaxed) == 1);
    rank.endpoint.request_medium(1, BACK, &[1], &[]).unwrap();
    rank.poll_until(|_| !is_pending(&rank));
    // The peer's adapter takes this one, and its program does not look at it.
    std::thread::sleep(Duration::from_millis(100));
    rank.endpoint.request(1, HOLD, &[]).unwrap();
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(500) {
        rank.bundle.poll().unwrap();
    }
    assert!(is_pending(&rank), "the peer does not poll");
    assert!(Command::new("ip").args(["link", "set", "here", "down"]).status().unwrap().success());
    let began = Instant::now();
    rank.poll_until(|seen| seen.returned.load(Ordering::Relaxed) == 1);
    let took = began.elapsed();
    println!("rank 0 has its message back after {took:.1?}");
    fs::write(mark, "").unwrap();
    assert!(took < RETURNED_WITHIN, "{took:?}");
}

/// Everybody knows everybody, and one round of messages goes from each to the next.
fn all_are_mapped(rank: Rank) {
    let next = (rank.job.rank() + 1) % rank.job.size();
    rank.endpoint.request_medium(next, ECHO, &[1], &[]).unwrap();
    rank.poll_until(|seen| seen.replies.load(Ordering::Relaxed) == 1);
    // The one before may still wait for an answer.
    rank.endpoint.request(next, DONE, &[]).unwrap();
    rank.poll_until(|seen| seen.done.load(Ordering::Relaxed) == 1 && !is_pending(&rank));
    println!("rank {} is done", rank.job.rank());
    rank.job.finalize().unwrap();
}

#[test]
fn a_rank() {
    let Ok(task) = std::env::var("AM_TEST_TASK") else { return };
    let rank = Rank::new();
    match &task[..] {
        "sums" => everybody_asks_everybody(rank),
        "kill" => one_is_killed(rank),
        "start" => all_are_mapped(rank),
        _ => the_link_is_cut(rank),
    }
}

/// Runs a task as so many ranks on each of two hosts. None where that is not allowed.
fn two_hosts(task: &str, ranks: u32, [here, there]: [&str; 2]) -> Option<Output> {
    let may = Command::new("unshare").args(["-rn", "ip", "link"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no network namespace is allowed here, or there is no ip(8)");
        return None;
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "am-{}-{task}-{ranks}-{}",
        std::process::id(),
        here.contains(':')
    ));
    fs::create_dir_all(&folder).unwrap();
    let (own, folder) = (std::env::current_exe().unwrap(), folder.display().to_string());
    let bits = if here.contains(':') { "64 nodad" } else { "24" };
    let script = format!(
        "set -e; ip link set lo up; unshare -n sleep 290 & far=$!; trap 'kill $far' EXIT; \
         for i in $(seq 200); do \
             [ \"$(readlink /proc/$far/ns/net)\" != \"$(readlink /proc/$$/ns/net)\" ] && break; \
             sleep 0.05; \
         done; \
         ip link add here type veth peer name there netns $far; \
         ip address add {here}/{bits} dev here; ip link set here up; \
         nsenter -t $far -n sh -c 'ip link set lo up; ip address add {there}/{bits} dev there; \
             ip link set there up'; \
         printf '#!/bin/sh\\nshift\\nexec nsenter -t %s -n sh -c \"$*\"\\n' $far > {folder}/ssh; \
         chmod +x {folder}/ssh; \
         export AM_TEST_TASK={task} AM_TEST_FOLDER={folder} \
             AM_TEST_ADDRESSES={here},{there}; \
         {quipu} spmd --hosts localhost:{ranks},far:{ranks} --ssh {folder}/ssh --label never -- \
             sh -c 'trap \"\" TERM; exec \"$0\" \"$@\"' {own} --exact a_rank --nocapture",
        quipu = env!("CARGO_BIN_EXE_quipu"),
        own = own.display(),
    );
    let mut command = Command::new("timeout");
    let output = command.args(["280", "unshare", "-rn", "sh", "-c", &script]).output().unwrap();
    let _ = fs::remove_dir_all(&folder);
    Some(output)
}

const IPV4: [&str; 2] = ["10.9.0.1", "10.9.0.2"];
const IPV6: [&str; 2] = ["fd09::1", "fd09::2"];

fn count(output: &Output, what: &str) -> usize {
    String::from_utf8_lossy(&output.stdout).matches(what).count()
}

#[test]
fn ranks_on_two_hosts_ask_each_other() {
    for (ranks, addresses) in [(1, IPV4), (4, IPV4), (1, IPV6), (2, IPV6)] {
        let Some(output) = two_hosts("sums", ranks, addresses) else { return };
        assert!(output.status.success(), "{addresses:?} {output:?}");
        assert_eq!(count(&output, "has all replies"), 2 * ranks as usize, "{output:?}");
    }
}

#[test]
fn messages_to_a_killed_rank_come_back() {
    for (ranks, addresses) in [(2, IPV4), (1, IPV6)] {
        let Some(output) = two_hosts("kill", ranks, addresses) else { return };
        assert_eq!(output.status.code(), Some(128 + 9), "{output:?}");
        assert_eq!(count(&output, "has its messages back"), 2 * ranks as usize - 1, "{output:?}");
    }
}

#[test]
fn a_message_to_a_host_that_vanishes_comes_back_in_time() {
    for addresses in [IPV4, IPV6] {
        let Some(output) = two_hosts("cut", 1, addresses) else { return };
        assert_eq!(count(&output, "has its message back"), 1, "{output:?}");
    }
}

/// So many processes of this build, which is not optimised, and a machine that does other things.
#[test]
fn all_ranks_of_a_large_job_know_each_other() {
    const RANKS: usize = 64;
    let began = Instant::now();
    let mut command = Command::new("timeout");
    command.args(["280", env!("CARGO_BIN_EXE_quipu"), "spmd", "-n", &RANKS.to_string(), "--"]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", "a_rank", "--nocapture"]);
    command.env("AM_TEST_TASK", "start").env("AM_TEST_ADDRESSES", "127.0.0.1");
    let output = command.output().unwrap();
    println!("{RANKS} ranks are over after {:.1?}", began.elapsed());
    assert!(output.status.success(), "{output:?}");
    assert_eq!(count(&output, "is done"), RANKS, "{output:?}");
}
