//! Active Messages between two processes of one host, which share memory.

use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use quipu::am::{Bundle, CallError, Config, Endpoint, Error, Mode, Name, Port, Tag};
use quipu::{Access, Device, MemoryRegion, Sge};
use quipu_launch::Job;

const TAG: Tag = Tag(0x6c61_6e65);
const PATIENCE: Duration = Duration::from_secs(60);
const LARGE: usize = 2 << 20;
const SMALL: usize = 4096;
/// Handlers of a request, of its answer, and of the request after which a process may end.
const ASK: u16 = 1;
const ANSWER: u16 = 2;
const DONE: u16 = 3;

/// One of the two processes.
struct Rank {
    job: Job,
    memory: MemoryRegion,
    bundle: Bundle,
    endpoint: Endpoint,
    /// The first arguments that each handler has seen.
    seen: [Arc<Mutex<Vec<i32>>>; 4],
}

impl Rank {
    fn new() -> Self {
        let job = Job::from_env().unwrap();
        let device = Device::from_env().unwrap();
        let port = Port::open(&device, Config::default()).unwrap();
        let bundle = port.bundle(Mode::Sequential);
        let endpoint = bundle.endpoint().unwrap();
        endpoint.set_tag(TAG).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let memory = port.domain().register(3 * LARGE, access).unwrap();
        endpoint.set_segment(Some(memory.remote(0, LARGE).unwrap())).unwrap();
        let seen: [Arc<Mutex<Vec<i32>>>; 4] = Default::default();
        for handler in [ASK, ANSWER, DONE] {
            let noted = Arc::clone(&seen[usize::from(handler)]);
            let whole = memory.sge(0, LARGE).unwrap();
            let run = move |message: &mut quipu::am::Message<'_>| {
                let args = message.args().to_vec();
                noted.lock().unwrap().push(args[0]);
                if handler == ASK {
                    let payload = Sge { len: message.payload_len() as u32, ..whole };
                    message.reply_bulk(ANSWER, &args, payload, 0).unwrap();
                }
            };
            endpoint.set_handler(handler.into(), run).unwrap();
        }
        let name = endpoint.name().unwrap().to_bytes();
        let names = job.all_gather("am", &name).unwrap();
        let peer = &names[1 - job.rank() as usize];
        endpoint.map(0, Name::from_bytes(peer[..].try_into().unwrap()).unwrap(), TAG).unwrap();
        Self { job, memory, bundle, endpoint, seen }
    }

    #[track_caller]
    fn until(&self, mut is_so: impl FnMut() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < PATIENCE, "it does not come about");
            self.bundle.poll().unwrap();
        }
    }

    /// Sends a bulk request from a place of the own memory to the beginning of the peer's.
    fn ask(&self, (at, len): (usize, usize), args: &[i32]) {
        let source = self.memory.sge(at, len).unwrap();
        self.until(|| match self.endpoint.try_request_bulk(0, ASK, args, source, 0) {
            Err(Error::Call(CallError::WouldBlock)) => false,
            sent => sent.is_ok(),
        });
    }

    fn byte(&self, at: usize) -> i32 {
        self.memory.to_vec(at, 1).unwrap()[0].into()
    }

    /// Sends short and long payloads to the same place, several at once. The answers carry back what lies
    /// there.
    fn overwrite(&self) {
        let mut number = 0;
        for round in 0..80 {
            for (len, at) in [(SMALL, LARGE), (LARGE - round, 2 * LARGE), (SMALL, LARGE + SMALL)] {
                self.memory.write(at, &vec![number as u8; len]).unwrap();
                // The arguments of some do not fit into a lane.
                self.ask((at, len), &vec![number; 1 + round % 10]);
                number += 1;
            }
            self.until(|| self.endpoint.outstanding().unwrap() == 0);
            let last = [0, SMALL - 1, SMALL, LARGE - round - 1].map(|at| self.byte(at));
            let [small, large] = [number - 1, number - 2].map(|value| value % 256);
            assert_eq!(last, [small, small, large, large], "after {number} messages");
        }
        let all: Vec<i32> = (0..number).collect();
        assert_eq!(*self.seen[usize::from(ANSWER)].lock().unwrap(), all);
        println!("payloads keep their order");
    }
}

#[test]
fn a_rank() {
    if std::env::var("AM_TEST_LANES").is_err() {
        return;
    }
    let rank = Rank::new();
    if rank.job.rank() == 0 {
        rank.overwrite();
    }
    rank.endpoint.request(0, DONE, &[0]).unwrap();
    rank.until(|| !rank.seen[usize::from(DONE)].lock().unwrap().is_empty());
    rank.until(|| rank.endpoint.outstanding().unwrap() == 0);
    let asked = rank.seen[usize::from(ASK)].lock().unwrap();
    assert!(asked.iter().enumerate().all(|(at, number)| at as i32 == *number), "{asked:?}");
    rank.job.finalize().unwrap();
}

/// Short payloads are written past the queue pair, long ones take it, and no payload overtakes an earlier
/// one.
#[test]
fn payloads_of_one_peer_keep_their_order_whichever_way_they_take() {
    for pages in ["own", "never"] {
        let mut command = Command::new("timeout");
        command.args(["100", env!("CARGO_BIN_EXE_quipu"), "spmd", "-n", "2", "--"]);
        command.arg(std::env::current_exe().unwrap());
        command.args(["--exact", "a_rank", "--nocapture"]);
        command.env("AM_TEST_LANES", "1").env("QUIPU_SHARED_PAGES", pages);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{pages}: {output:?}");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("payloads keep their order"), "{pages}: {said}");
    }
}
