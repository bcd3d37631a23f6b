//! `quipu nbd load`: how fast a server is, with several requests at a time over one connection.

use std::fs;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use quipu::{Access, MemoryRegion};
use quipu_nbd::messages::ClientMemory;
use quipu_nbd::uri::{Place, Uri};
use quipu_nbd::{Command, CommandFlags, Export, Handshake};
use serde_json::json;

use super::info::{failed, prepare};
use super::rdma::{Data, Link, domain};
use super::session::{PATIENCE, Trouble};
use super::{Failure, size, socket};
use crate::cmd::qpip::LinkOptions;

/// What to request.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// The server's disk.
    #[arg(value_name = "URI")]
    uri: Uri,
    /// Bytes of a request.
    #[arg(long, short, value_name = "SIZE", default_value = "4K", value_parser = size)]
    block: u64,
    /// Requests at a time.
    #[arg(long, short, default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=256))]
    depth: u32,
    /// How long.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    seconds: f64,
    /// Write, which overwrites the disk. By default it is read.
    #[arg(long, short)]
    write: bool,
    /// At random places instead of one after the other.
    #[arg(long, short)]
    random: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  quipu nbd load --random nbd://127.0.0.1                 4 KB random reads, 32 at a time
  quipu nbd load -b 1M -d 4 --write nbd+rdma://127.0.0.1  sequential writes; the disk is overwritten";

/// A connection that carries several requests, each of which has a place with a number for its data.
pub(super) trait Pipeline {
    fn export(&self) -> &Export;
    /// Makes a request with the data of a place.
    fn submit(&mut self, write: bool, offset: u64, place: usize) -> Result<(), Trouble>;
    /// Waits for a request to be done; its place.
    fn complete(&mut self) -> Result<usize, Trouble>;
}

/// What came of it.
struct Measured {
    requests: u64,
    seconds: f64,
    cpu_seconds: f64,
}

/// Runs it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    prepare(&options.uri, &options.link)?;
    let measured = measure(options).map_err(|trouble| failed(&options.uri, &trouble))?;
    let bytes = (measured.requests * options.block) as f64;
    let (speed, rate) =
        (bytes / measured.seconds / 1e6, measured.requests as f64 / measured.seconds);
    let per_cpu = bytes / measured.cpu_seconds.max(1e-6) / 1e6;
    if options.json {
        let text = json!({"mb_per_s": speed, "requests_per_s": rate, "mb_per_cpu_s": per_cpu,
            "seconds": measured.seconds, "cpu_seconds": measured.cpu_seconds});
        println!("{text}");
    } else {
        println!(
            "{speed:.0} MB/s, {rate:.0} requests/s, {per_cpu:.0} MB per CPU second of this client"
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn connect(options: &Options) -> Result<Box<dyn Pipeline>, Trouble> {
    let wanted = Handshake::new(&options.uri.export);
    let (places, block) = (options.depth as usize, options.block as usize);
    Ok(match &options.uri.place {
        Place::Rdma { host, port } => {
            let mut link = Link::open(domain()?, (host, *port), wanted, PATIENCE)?;
            link.spins = block < 64 << 10;
            let memory = link.pd.register(places * block, Access::LOCAL_WRITE)?;
            let lent = (0..places).map(|_| None).collect();
            Box::new(OverQueuePair { link, memory, block, lent, cookies: vec![0; places] })
        }
        _ => {
            let session = socket::Session::open(&options.uri, wanted, PATIENCE)?;
            let places = vec![(0, vec![0x5a; block]); places];
            Box::new(OverSocket { session, places })
        }
    })
}

fn measure(options: &Options) -> Result<Measured, Trouble> {
    let mut pipeline = connect(options)?;
    let blocks = pipeline.export().size / options.block.max(1);
    if blocks == 0 || options.block == 0 || options.block > pipeline.export().blocks.maximum.into()
    {
        return Err(Trouble::Unsupported("a block of this size on this disk"));
    }
    let (mut state, mut at) = (1_u64, 0);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        at = if options.random { (state >> 33) % blocks } else { (at + 1) % blocks };
        at * options.block
    };
    for place in 0..options.depth as usize {
        pipeline.submit(options.write, next(), place)?;
    }
    // What is made once, at the first requests, does not count.
    for _ in 0..options.depth {
        let place = pipeline.complete()?;
        pipeline.submit(options.write, next(), place)?;
    }
    let (begun, used) = (Instant::now(), cpu());
    let limit = Duration::from_secs_f64(options.seconds.clamp(0.01, 3600.0));
    let mut requests = 0;
    while begun.elapsed() < limit {
        let place = pipeline.complete()?;
        pipeline.submit(options.write, next(), place)?;
        requests += 1;
    }
    let (seconds, cpu_seconds) = (begun.elapsed().as_secs_f64(), (cpu() - used).as_secs_f64());
    for _ in 0..options.depth {
        pipeline.complete()?;
    }
    Ok(Measured { requests, seconds, cpu_seconds })
}

/// Processor time of this process so far.
fn cpu() -> Duration {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanoseconds = threads.filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanoseconds.sum())
}

struct OverSocket {
    session: socket::Session,
    /// The cookie and the data of each place.
    places: Vec<(u64, Vec<u8>)>,
}

impl Pipeline for OverSocket {
    fn export(&self) -> &Export {
        self.session.export()
    }

    fn submit(&mut self, write: bool, offset: u64, place: usize) -> Result<(), Trouble> {
        let (cookie, data) = &mut self.places[place];
        let length = data.len() as u64;
        let (command, sent) =
            if write { (Command::Write, &data[..]) } else { (Command::Read, &[][..]) };
        *cookie = self.session.submit(command, (offset, length), sent)?;
        Ok(())
    }

    fn complete(&mut self) -> Result<usize, Trouble> {
        let places = &mut self.places;
        let find = |places: &[(u64, Vec<u8>)], cookie| {
            places.iter().position(|(of, _)| *of == cookie).ok_or(Trouble::Closed)
        };
        let cookie = self.session.complete(&mut |cookie, take| {
            let place = find(places, cookie)?;
            take(&mut places[place].1)
        })?;
        find(&self.places, cookie)
    }
}

struct OverQueuePair {
    link: Link,
    memory: MemoryRegion,
    block: usize,
    /// What the server may use for the request of a place.
    lent: Vec<Option<MemoryRegion>>,
    cookies: Vec<u64>,
}

impl Pipeline for OverQueuePair {
    fn export(&self) -> &Export {
        self.link.engine.export()
    }

    fn submit(&mut self, write: bool, offset: u64, place: usize) -> Result<(), Trouble> {
        let (command, access) = match write {
            true => (Command::Write, Access::REMOTE_READ),
            false => (Command::Read, Access::LOCAL_WRITE | Access::REMOTE_WRITE),
        };
        let range = (offset, self.block as u64);
        let mut short = Vec::new();
        let data = if self.link.engine.is_moved(command, range.1) {
            let lent = self.memory.register_part(place * self.block, self.block, access)?;
            let remote = lent.remote(0, self.block)?;
            self.lent[place] = Some(lent);
            Data::Memory(ClientMemory { key: remote.rkey.0, address: remote.addr })
        } else if write {
            short = self.memory.to_vec(place * self.block, self.block)?;
            Data::Short(&short)
        } else {
            Data::None
        };
        let flags = CommandFlags::empty();
        let cookie = self.link.submit(command, flags, range, data)?;
        drop(short);
        self.cookies[place] = cookie.ok_or(Trouble::Unsupported("more requests than credits"))?;
        Ok(())
    }

    fn complete(&mut self) -> Result<usize, Trouble> {
        let done = self.link.next_reply()?;
        let place = self.cookies.iter().position(|cookie| *cookie == done.cookie);
        let place = place.ok_or(Trouble::Closed)?;
        self.lent[place] = None;
        if let Err(errno) = done.result {
            return Err(std::io::Error::from_raw_os_error(errno.0 as i32).into());
        }
        if !done.data.is_empty() {
            self.memory.write(place * self.block, &self.link.message[done.data])?;
        }
        Ok(place)
    }
}
