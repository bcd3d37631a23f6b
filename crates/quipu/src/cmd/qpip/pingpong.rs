//! `quipu qpip pingpong`: round trips, over TCP and UDP, between queue pairs or with a socket.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use quipu::qpip::{Adapter, TcpQueuePair, UdpQueuePair};
use quipu::{
    Access, Completion, CompletionQueue, Error, MemoryRegion, ProtectionDomain, Request, WcExtra,
    WcStatus,
};
use serde_json::json;

use super::sample::{Samples, micros};
use super::{
    LinkOptions, ModeOption, NO_ROUTE, Signal, broken, connect, echo, failed, no_server,
    unreachable,
};
use crate::cmd::failure::Failure;

/// With whom, and what.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(super) link: LinkOptions,
    /// Address of the server. Without one, run as the server, which returns what it receives.
    #[arg(value_name = "SERVER", value_parser = super::peer_address)]
    server: Option<IpAddr>,
    /// TCP and UDP port. With 0, a server takes a free one.
    #[arg(long, short, default_value_t = 5002, value_name = "PORT")]
    pub(super) port: u16,
    /// Bytes of each message.
    #[arg(long, short, default_value_t = 1, value_name = "BYTES",
          value_parser = clap::value_parser!(u32).range(1..=65_000))]
    size: u32,
    /// Number of round trips.
    #[arg(long, short = 'n', default_value_t = 10_000, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    count: u32,
    /// Use UDP instead of TCP.
    #[arg(long)]
    udp: bool,
    /// Mode of the TCP connection. The default also works with a socket at the other end.
    #[arg(long, value_enum, default_value = "stream")]
    pub(super) mode: ModeOption,
    /// Sleep until something arrives, instead of polling.
    #[arg(long)]
    pub(super) wait: bool,
    /// Use a kernel socket instead of a queue pair, as a peer for the other end. Needs no link.
    #[arg(long)]
    pub(super) socket: bool,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  quipu qpip pingpong --link udp:127.0.0.1:4000            the server, which prints its address
  quipu qpip pingpong --link udp:127.0.0.1:4001 ADDRESS    and its client
  sudo quipu qpip pingpong -L tap:qp0 -a 10.9.0.2/24       a server
  quipu qpip pingpong --socket --udp 10.9.0.2              its client: a kernel socket
  nc 10.9.0.2 5002                                         or any other client

The server answers TCP and UDP. With too many TCP clients, it drops the one that has been silent
longest. It does not answer datagrams from its own port and from ports below 32768, because another
server could have sent them and would answer in turn. Ctrl-C ends it.";

/// Receives that are posted, and their least length: a window that a message fills to the last octet makes
/// senders hesitate (RFC 9293 3.8.6.2).
const PLACES: usize = 4;
const LEN: usize = 16 << 10;
/// What to look at when it does not answer.
const STILL_THERE: &str = "check whether the server still runs";
/// How long a datagram is waited for before it counts as lost.
const PATIENCE: Duration = Duration::from_secs(1);

/// Runs it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let Some(server) = options.server else { return echo::run(options) };
    let to = super::with_port(SocketAddr::new(server, options.port))?;
    let (samples, lost) = match (options.socket, options.udp) {
        (true, false) => (socket_tcp(options, to)?, 0),
        (true, true) => socket_udp(options, to)?,
        (false, udp) => {
            let adapter = options.link.open_until_signal(Signal::Cuts)?;
            let end = End::new(&adapter, options)?;
            let lossless = |samples| (samples, 0);
            let outcome = if udp { end.by_udp(to) } else { end.by_tcp(to).map(lossless) };
            super::unless_gone(&adapter, outcome)?
        }
    };
    print!("{}", report(options, &Samples::new(samples), lost));
    Ok(ExitCode::SUCCESS)
}

/// The result as text or JSON.
fn report(options: &Options, samples: &Samples, lost: u32) -> String {
    let at = |of_10000| samples.percentile(of_10000);
    let protocol = if options.udp { "UDP" } else { "TCP" };
    if options.json {
        let histogram: Vec<_> = samples
            .buckets()
            .into_iter()
            .map(|(from, count)| json!({ "from_ns": from, "count": count }))
            .collect();
        let result = json!({
            "protocol": protocol,
            "socket": options.socket,
            "bytes": options.size,
            "round_trips": samples.len(),
            "lost": lost,
            "ns": {
                "min": at(0), "mean": samples.mean(), "median": at(5000), "p90": at(9000),
                "p99": at(9900), "p99.9": at(9990), "max": at(10_000),
            },
            "histogram": histogram,
        });
        return format!("{result:#}\n");
    }
    let mut out = samples.picture();
    out += &format!(
        "{} round trips of {} bytes by {protocol}{}: least {} us, median {}, 99 % {}, 99.9 % {}, most {}\n",
        samples.len(),
        options.size,
        if lost > 0 { format!(", {lost} lost") } else { String::new() },
        micros(at(0)),
        micros(at(5000)),
        micros(at(9900)),
        micros(at(9990)),
        micros(at(10_000)),
    );
    out
}

/// What a message by UDP begins with, as far as it is long enough: its round's number, by which a late answer
/// is told from the one that is waited for.
fn mark(round: u32, size: u32) -> Vec<u8> {
    let mut mark = round.to_le_bytes().to_vec();
    mark.truncate(size as usize);
    mark
}

/// What there is to say of a server that has answered nothing.
const SILENCE: &str = "nothing comes back";

/// What has become of a round trip by UDP.
enum Round {
    /// Nanoseconds.
    Took(u64),
    Lost,
    /// Its datagram was kept for long, as for a next hop that does not say where it is, and then lost.
    Nowhere,
}

/// What a client of queue pairs needs.
struct End<'a> {
    options: &'a Options,
    adapter: Adapter,
    pd: ProtectionDomain,
    sends: CompletionQueue,
    receives: CompletionQueue,
    memory: MemoryRegion,
}

impl<'a> End<'a> {
    fn new(adapter: &Adapter, options: &'a Options) -> Result<Self, Failure> {
        let pd = adapter.protection_domain().map_err(failed)?;
        let (size, len) = (options.size as usize, LEN.max(options.size as usize));
        let memory = pd.register(size + PLACES * len, Access::LOCAL_WRITE).map_err(failed)?;
        let cq = || adapter.completion_queue(2 * PLACES as u32).map_err(failed);
        let adapter = adapter.clone();
        Ok(Self { options, adapter, sends: cq()?, receives: cq()?, memory, pd })
    }

    /// What completes, well or badly: the one thing, or nothing in time.
    fn next(
        &self,
        cq: &CompletionQueue,
        deadline: Option<Instant>,
    ) -> Result<Option<Completion>, Failure> {
        let mut out = [Completion::default()];
        let wait = self.options.wait;
        loop {
            let found =
                if wait && deadline.is_none() { cq.wait(&mut out) } else { cq.poll(&mut out) };
            if found.map_err(failed)? > 0 {
                return Ok(Some(out[0]));
            }
            let Some(deadline) = deadline else { continue };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            if wait {
                self.adapter.wait_timeout(cq, left).map_err(failed)?;
            }
        }
    }

    fn message(&self) -> Result<[quipu::Sge; 1], Failure> {
        Ok([self.memory.sge(0, self.options.size as usize).map_err(failed)?])
    }

    /// Where a receive puts what comes.
    fn room(&self, place: u64) -> Result<[quipu::Sge; 1], Failure> {
        let size = self.options.size as usize;
        let len = LEN.max(size);
        Ok([self.memory.sge(size + place as usize * len, len).map_err(failed)?])
    }

    fn by_tcp(&self, to: SocketAddr) -> Result<Vec<u64>, Failure> {
        let qp = self.pd.queue_pair(&self.sends, &self.receives).build_tcp().map_err(failed)?;
        for place in 0..PLACES as u64 {
            qp.post_recv(place, &self.room(place)?).map_err(failed)?;
        }
        let settings = self.options.mode.settings();
        connect(&qp, to, &settings)?;
        let mut samples = Vec::with_capacity(self.options.count as usize);
        for _ in 0..self.options.count {
            samples.push(self.round_by_tcp(&qp)?);
        }
        // How the connection ends is the peer's affair.
        let _ = qp.close().and_then(|()| qp.wait_closed());
        Ok(samples)
    }

    /// One round trip, in nanoseconds.
    fn round_by_tcp(&self, qp: &TcpQueuePair) -> Result<u64, Failure> {
        let begun = Instant::now();
        let over = |error| broken(qp, error, STILL_THERE);
        let good = |done: &Completion| match done.status {
            WcStatus::Success => Ok(()),
            _ => Err(over(Error::Work(*done))),
        };
        qp.post_send(&Request::send(&self.message()?)).map_err(over)?;
        let (mut got, mut took) = (0, 0);
        // A stream may come in pieces.
        while got < self.options.size
            && let Some(done) = self.next(&self.receives, None)?
        {
            took = begun.elapsed().as_nanos() as u64;
            good(&done)?;
            if done.byte_len == 0 {
                return Err(Failure::new(
                    "the round trips",
                    "the server closed the connection",
                    STILL_THERE,
                ));
            }
            got += done.byte_len;
            qp.post_recv(done.wr_id, &self.room(done.wr_id)?).map_err(over)?;
        }
        self.next(&self.sends, None)?.as_ref().map_or(Ok(()), good)?;
        Ok(took)
    }

    fn by_udp(&self, to: SocketAddr) -> Result<(Vec<u64>, u32), Failure> {
        let qp = self.pd.queue_pair(&self.sends, &self.receives).build_udp(0).map_err(failed)?;
        let (mut samples, mut lost) = (Vec::with_capacity(self.options.count as usize), 0);
        // A neighbour that was slow to answer is known by the next round.
        let mut nowhere = false;
        for place in 0..PLACES as u64 {
            qp.post_recv(place, &self.room(place)?).map_err(failed)?;
        }
        for round in 0..self.options.count {
            match self.round_by_udp(&qp, to, &mark(round, self.options.size))? {
                Round::Took(took) => samples.push(took),
                Round::Nowhere if samples.is_empty() && nowhere => {
                    return Err(unreachable(to, &NO_ROUTE));
                }
                round => {
                    nowhere = matches!(round, Round::Nowhere);
                    lost += 1;
                }
            }
            if samples.is_empty() && lost > 2 {
                break;
            }
        }
        if samples.is_empty() { Err(unreachable(to, &SILENCE)) } else { Ok((samples, lost)) }
    }

    fn round_by_udp(
        &self,
        qp: &UdpQueuePair,
        to: SocketAddr,
        mark: &[u8],
    ) -> Result<Round, Failure> {
        self.memory.write(0, mark).map_err(failed)?;
        let begun = Instant::now();
        qp.send_to(&Request::send(&self.message()?), to)
            .map_err(|error| unreachable(to, &error))?;
        match self.next(&self.sends, None)? {
            Some(sent) if sent.status == WcStatus::LocQpOpErr => {
                return Err(unreachable(to, &NO_ROUTE));
            }
            sent => sent.as_ref().map_or(Ok(()), good)?,
        }
        // Then it has waited for the next hop.
        let sent = Instant::now();
        let waited = sent - begun > PATIENCE;
        // What else comes is late, or from others.
        while let Some(done) = self.next(&self.receives, Some(sent + PATIENCE))? {
            let took = begun.elapsed();
            good(&done)?;
            let is_answer = self.is_answer(&done, to, mark)?;
            qp.post_recv(done.wr_id, &self.room(done.wr_id)?).map_err(failed)?;
            if is_answer {
                return Ok(Round::Took(took.as_nanos() as u64));
            }
            if sent.elapsed() > PATIENCE {
                break;
            }
        }
        Ok(if waited { Round::Nowhere } else { Round::Lost })
    }

    /// Whether it is the message with this mark that has come back.
    fn is_answer(&self, done: &Completion, to: SocketAddr, mark: &[u8]) -> Result<bool, Failure> {
        let WcExtra::From(from) = done.extra else { return Ok(false) };
        let from = SocketAddr::from(from);
        let mut begin = vec![0; mark.len()];
        let size = self.options.size as usize;
        let at = size + done.wr_id as usize * LEN.max(size);
        self.memory.read(at, &mut begin).map_err(failed)?;
        let peer = (from.ip().to_canonical(), from.port());
        Ok(peer == (to.ip().to_canonical(), to.port())
            && done.byte_len == self.options.size
            && begin == mark)
    }
}

/// Whether it has succeeded, of a queue pair of UDP.
fn good(done: &Completion) -> Result<(), Failure> {
    match done.status {
        WcStatus::Success => Ok(()),
        _ => Err(Failure::new("the round trips", Error::Work(*done), STILL_THERE)),
    }
}

fn socket_failed(error: std::io::Error) -> Failure {
    Failure::new("the socket", error, "")
}

/// Whether a call has found nothing yet.
fn nothing_yet(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
}

fn socket_tcp(options: &Options, to: SocketAddr) -> Result<Vec<u64>, Failure> {
    let mut stream = TcpStream::connect(to).map_err(|error| no_server(to, &error))?;
    stream.set_nodelay(true).map_err(socket_failed)?;
    stream.set_nonblocking(!options.wait).map_err(socket_failed)?;
    let mut buffer = vec![0; options.size as usize];
    let mut samples = Vec::with_capacity(options.count as usize);
    for _ in 0..options.count {
        let begun = Instant::now();
        let mut sent = 0;
        while sent < buffer.len() {
            match stream.write(&buffer[sent..]) {
                Err(error) if nothing_yet(&error) => {}
                wrote => sent += wrote.map_err(socket_failed)?,
            }
        }
        let mut got = 0;
        while got < buffer.len() {
            match stream.read(&mut buffer[got..]) {
                Err(error) if nothing_yet(&error) => {}
                Ok(0) => {
                    return Err(no_server(to, &"the server closed the connection the connection"));
                }
                read => got += read.map_err(socket_failed)?,
            }
        }
        samples.push(begun.elapsed().as_nanos() as u64);
    }
    Ok(samples)
}

fn socket_udp(options: &Options, to: SocketAddr) -> Result<(Vec<u64>, u32), Failure> {
    let any: SocketAddr = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }
        .parse()
        .map_err(|error| Failure::new("the socket", error, ""))?;
    let socket = UdpSocket::bind(any).and_then(|socket| {
        socket.connect(to)?;
        socket.set_nonblocking(!options.wait)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(socket)
    });
    let socket = socket.map_err(socket_failed)?;
    let size = options.size as usize;
    // What is longer than an answer is none.
    let (mut message, mut came) = (vec![0; size], vec![0; size + 1]);
    let (mut samples, mut lost) = (Vec::with_capacity(options.count as usize), 0);
    for round in 0..options.count {
        let mark = mark(round, options.size);
        message[..mark.len()].copy_from_slice(&mark);
        let begun = Instant::now();
        socket.send(&message).map_err(socket_failed)?;
        loop {
            match socket.recv(&mut came) {
                Ok(len) if len == size && came.starts_with(&mark) => {
                    samples.push(begun.elapsed().as_nanos() as u64);
                    break;
                }
                Err(error) if !nothing_yet(&error) => return Err(no_server(to, &error)),
                // Nothing, or what is late.
                _ if begun.elapsed() > PATIENCE => {
                    lost += 1;
                    break;
                }
                _ => {}
            }
        }
        if samples.is_empty() && lost > 2 {
            break;
        }
    }
    if samples.is_empty() { Err(no_server(to, &SILENCE)) } else { Ok((samples, lost)) }
}

#[cfg(test)]
#[path = "pingpong_tests.rs"]
mod tests;
