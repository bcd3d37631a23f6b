//! `quipu qpip serve`: HTTP from queue pairs. A pool of idle queue pairs waits for connections; what is sent
//! is sent from registered memory by work requests.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use quipu::qpip::{Adapter, Event, Mode, TcpChange, TcpListener, TcpQueuePair, TcpSettings};
use quipu::{
    Access, Completion, CompletionQueue, Error, MemoryRegion, ProtectionDomain, QpNum,
    Request as Work, WcStatus,
};

use super::answer::{Response, answer};
use super::conditions::Version;
use super::files::{Data, Source};
use super::http::{Head, Parser, Refusal, Request};
use super::memory::{Held, Memory, PIECE, SMALL_PIECE};
use super::{LinkOptions, Signal, describe, failed, unless_gone};
use crate::cmd::failure::Failure;

/// What to serve.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// Folder to serve. Without one, serve a page that shows where a request came from.
    #[arg(value_name = "FOLDER", conflicts_with = "text")]
    folder: Option<PathBuf>,
    /// Serve this text, or HTML, as the only page.
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,
    /// The TCP port.
    #[arg(long, short, default_value_t = 80, value_name = "PORT")]
    port: u16,
    /// Queue pairs that wait for connections or have one.
    // At least two: one that is silent keeps nobody waiting then.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=16384))]
    connections: u32,
    /// Do not print every request. Files that cannot be read are always reported.
    #[arg(long, short)]
    quiet: bool,
}

const EXAMPLES: &str = "\
Examples:
  sudo quipu qpip serve --link tap:qp0 --address 10.9.0.2/24 /usr/share/doc
  sudo ip address add 10.9.0.1/24 dev qp0        (this and the rest in another terminal)
  sudo ip link set qp0 up
  curl http://10.9.0.2/
  curl --range 0-99 http://10.9.0.2/README

The server answers GET and HEAD, one range at a time, and lists folders. Ctrl-C ends it.";

/// Memory of a connection: places for requests, then one for the head of a response.
const RECEIVES: usize = 4;
const RECEIVE_LEN: usize = 4096;
const HEAD_LEN: usize = 4096;
/// Sends that a connection has under way at once.
const SENDS: usize = 8;
/// Characters of a path that are told.
const TOLD: usize = 200;
/// How long clients keep their places while nobody is left for the next; and how often that is looked at.
const PATIENCE: Patience = Patience { silent: Duration::from_secs(2), rate: 8 << 10 };
/// The longest piece while nobody is left: one that is not read is noticed the sooner.
const CROWDED_PIECE: u64 = 64 << 10;
const LOOK: Duration = Duration::from_millis(20);
/// The number of every send.
const SEND: u64 = u64::MAX;

/// Serves until a signal comes.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let (adapter, leave) = options.link.open_with_leave(Signal::Ends)?;
    let mut server = Server::new(&adapter, options)?;
    println!("{}", describe(&adapter)?);
    for address in adapter.info().map_err(failed)?.addresses {
        println!("serving http://{}/", SocketAddr::new(address, server.listener.port()));
    }
    println!("Ctrl-C ends it.");
    // Kept here: what a queue pair has completed goes with it.
    let bell = Arc::new(server.bell().map_err(failed)?);
    let stop = Arc::new(AtomicBool::new(false));
    let (rings, stops) = (Arc::clone(&bell), Arc::clone(&stop));
    leave.is(move || {
        stops.store(true, Ordering::Release);
        // What it has posted completes, which wakes the server.
        let _ = rings.flush();
    });
    unless_gone(&adapter, server.run(&stop).map_err(failed))?;
    println!("{} requests on {} connections", server.requests, server.accepted);
    Ok(ExitCode::SUCCESS)
}

/// Why an answer ends too early.
enum Trouble {
    /// There is nothing to send: a file cannot be read, or there is no memory.
    Content(io::Error),
    /// Nothing more can be sent: the connection is gone, of which an event tells.
    Gone,
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Content(error)
    }
}

impl From<Error> for Trouble {
    fn from(_: Error) -> Self {
        Self::Gone
    }
}

/// Octets that are being sent.
struct Body {
    data: Data,
    at: u64,
    end: u64,
}

/// A queue pair and what it is doing.
struct Connection {
    qp: TcpQueuePair,
    memory: MemoryRegion,
    parser: Parser,
    /// Receives whose octets are with the parser; they are posted again when it has read them.
    taken: Vec<usize>,
    /// What the sends under way send, in order, so that it stays, and how many octets each has.
    sending: VecDeque<(u64, Option<Arc<Held>>)>,
    /// The longest piece that is sent now. Who reads gets longer ones: it is when a piece has been
    /// acknowledged that one knows.
    piece: u64,
    body: Option<Body>,
    peer: Option<SocketAddr>,
    peer_closed: bool,
    /// The response under way is the last one.
    last: bool,
    /// Nothing more is answered.
    closing: bool,
    /// It has a connection, whose client has done nothing that keeps its place since then.
    since: Option<Instant>,
}

/// How long clients keep their places while others wait for one.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// How long a request may take to come, the client to leave when it is asked to, and an answer to be
    /// acknowledged at all.
    silent: Duration,
    /// Octets of an answer that are to be acknowledged in a second, beyond that.
    rate: u64,
}

impl Patience {
    /// How long the client of a connection may do nothing that keeps its place. Of an answer whole pieces
    /// are seen to be acknowledged: the longer they are, the longer it may take.
    fn with(self, connection: &Connection) -> Duration {
        let awaited = connection.sending.front().map_or(0, |(len, _)| *len);
        self.silent + Duration::from_millis(awaited * 1000 / self.rate)
    }
}

/// The server: everything is done by one thread.
struct Server {
    adapter: Adapter,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    listener: TcpListener,
    source: Source,
    connections: HashMap<QpNum, Connection>,
    /// Queue pairs without a connection.
    idle: u32,
    patience: Patience,
    /// When it is looked next who is to make room.
    look_at: Instant,
    /// Where every request is told of, if it is.
    log: Option<Box<dyn Write>>,
    requests: u64,
    accepted: u64,
}

/// The page without a folder.
fn greeting(adapter: &Adapter) -> Result<String, Failure> {
    Ok(format!(
        "<!DOCTYPE html>\n<title>Quipu</title>\n<h1>A page from a queue pair</h1>\n<p>Its bytes \
         went from registered memory into segments of the adapter's own TCP: {}.\n",
        super::http::escape(&describe(adapter)?)
    ))
}

impl Server {
    fn new(adapter: &Adapter, options: &Options) -> Result<Self, Failure> {
        let pd = adapter.protection_domain().map_err(failed)?;
        let memory = Memory::new(&pd);
        let source = match (&options.folder, &options.text) {
            (Some(folder), _) => Source::folder(memory, folder).map_err(|error| {
                let what = format!("cannot serve {}", folder.display());
                Failure::new(what, error, "give a folder that you may read")
            })?,
            (None, Some(text)) => Source::page(memory, text.clone()),
            (None, None) => Source::page(memory, greeting(adapter)?),
        };
        // Each of a queue pair's requests may be in the queue, and the bell's.
        let entries = options.connections * (RECEIVES + SENDS) as u32 + 1;
        let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
        let listener = adapter.listen(options.port, &settings, 128).map_err(|error| {
            let what = format!("cannot listen on port {}", options.port);
            Failure::new(what, error, "choose another port with --port")
        })?;
        let too_many = |error| {
            let what = format!("cannot wait for {} connections", options.connections);
            Failure::new(what, error, "choose fewer with --connections")
        };
        let mut server = Self {
            cq: adapter.completion_queue(entries).map_err(too_many)?,
            adapter: adapter.clone(),
            pd,
            listener,
            source,
            connections: HashMap::new(),
            idle: 0,
            patience: PATIENCE,
            look_at: Instant::now(),
            log: (!options.quiet).then(|| Box::new(io::stdout()) as _),
            requests: 0,
            accepted: 0,
        };
        for _ in 0..options.connections {
            server.add().map_err(too_many)?;
        }
        Ok(server)
    }

    /// A queue pair that is never connected, whose only receive wakes the server when it is flushed.
    fn bell(&self) -> Result<TcpQueuePair, Error> {
        let qp = self.pd.queue_pair(&self.cq, &self.cq).build_tcp()?;
        qp.post_recv(0, &[])?;
        Ok(qp)
    }

    /// Adds an idle queue pair to the pool.
    fn add(&mut self) -> Result<(), Error> {
        let memory = self.pd.register(RECEIVES * RECEIVE_LEN + HEAD_LEN, Access::LOCAL_WRITE)?;
        let queues = self.pd.queue_pair(&self.cq, &self.cq);
        let qp = queues.send_queue(SENDS as u32, 1).recv_queue(RECEIVES as u32, 1).build_tcp()?;
        let connection = Connection {
            qp,
            memory,
            parser: Parser::default(),
            taken: Vec::new(),
            sending: VecDeque::new(),
            piece: SMALL_PIECE,
            body: None,
            peer: None,
            peer_closed: false,
            last: false,
            closing: false,
            since: None,
        };
        (0..RECEIVES).try_for_each(|place| connection.post(place))?;
        self.listener.offer(&connection.qp)?;
        self.connections.insert(connection.qp.number(), connection);
        self.idle += 1;
        Ok(())
    }

    fn run(&mut self, stop: &AtomicBool) -> Result<(), Error> {
        let mut out = [Completion::default(); 64];
        let mut events = Vec::new();
        while !stop.load(Ordering::Acquire) {
            while let Some(event) = self.adapter.poll_event()? {
                events.push(event);
            }
            // What a peer sent before it closed completes before the event that says so.
            let mut any = !events.is_empty();
            loop {
                let found = self.cq.poll(&mut out)?;
                if found == 0 {
                    break;
                }
                any = true;
                out[..found].iter().for_each(|completion| self.completed(completion));
            }
            for event in events.drain(..) {
                self.happened(event)?;
            }
            self.make_room();
            match any {
                true => {}
                false if self.idle == 0 => self.adapter.wait_timeout(&self.cq, LOOK)?,
                false => self.adapter.wait(&self.cq)?,
            }
        }
        Ok(())
    }

    fn happened(&mut self, event: Event) -> Result<(), Error> {
        let Some(connection) = self.connections.get_mut(&event.qp_num) else { return Ok(()) };
        match event.change {
            TcpChange::Connected => {
                connection.since = Some(Instant::now());
                self.accepted += 1;
                self.idle -= 1;
            }
            TcpChange::PeerClosed => {
                connection.peer_closed = true;
                self.go_on(event.qp_num);
            }
            TcpChange::Closed | TcpChange::Failed(_) | TcpChange::Aborted => {
                let mated = connection.since.is_some();
                self.idle -= u32::from(!mated);
                self.connections.remove(&event.qp_num);
                self.add()?;
            }
        }
        Ok(())
    }

    /// While no queue pair is left for the next client, whose SYN is not answered then, ends the connection
    /// whose client has done nothing for longest, if that is too long. Who has just connected, and who reads
    /// its answer, is left alone however many there are. One that is silent is asked to leave first.
    fn make_room(&mut self) {
        let now = Instant::now();
        if self.idle > 0 || now < self.look_at {
            return;
        }
        self.look_at = now + LOOK;
        let patience = self.patience;
        let over =
            |it: &&mut Connection| it.since.is_some_and(|since| since + patience.with(it) <= now);
        // Those that owe their clients nothing come first.
        let oldest = self.connections.values_mut().filter(over);
        let Some(connection) = oldest.min_by_key(|it| (it.is_busy(), it.since)) else { return };
        let asked = !connection.is_busy() && !connection.closing;
        connection.since = Some(now);
        // Its end is an event.
        if !asked || connection.finish().is_err() {
            let _ = connection.qp.abort();
        }
    }

    fn completed(&mut self, completion: &Completion) {
        let Some(connection) = self.connections.get_mut(&completion.qp_num) else { return };
        if completion.wr_id == SEND {
            connection.sending.pop_front();
            connection.piece = (2 * connection.piece).min(PIECE);
            connection.keep();
        }
        // What fails ends with an event.
        if completion.status != WcStatus::Success {
            return;
        }
        if connection.peer.is_none() {
            // A request may be here before the event that tells of its connection.
            connection.peer = connection.qp.flow().ok().flatten().map(|flow| flow.remote);
        }
        if completion.wr_id != SEND
            && connection.received(completion.wr_id as usize, completion.byte_len as usize).is_err()
        {
            let _ = connection.qp.abort();
            return;
        }
        self.go_on(completion.qp_num);
    }

    /// Sends what can be sent now, and answers what can be answered.
    fn go_on(&mut self, number: QpNum) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        // Others may be waiting, so this client is to come back as one of them.
        let crowded = self.idle == 0;
        if crowded {
            connection.piece = connection.piece.min(CROWDED_PIECE);
        }
        let outcome = connection.go_on(&mut self.source, |source, request, connection| {
            self.requests += 1;
            let mut response = answer(source, request);
            response.keep_alive &= !crowded;
            if let Some(log) = &mut self.log
                && let Err(error) = connection.tell(log, request, &response)
            {
                eprintln!("quipu: requests are no longer printed: {error}");
                self.log = None;
            }
            response
        });
        if let Err(trouble) = outcome {
            if let Trouble::Content(error) = trouble {
                eprintln!("{}: {error}", connection.name());
            }
            connection.give_up();
        }
    }
}

/// A path as it is told of.
fn shortened(path: &str) -> String {
    let mut shown: String = path.chars().take(TOLD).collect();
    shown = shown.escape_debug().to_string();
    if path.chars().nth(TOLD).is_some() {
        shown += "...";
    }
    shown
}

impl Connection {
    fn name(&self) -> String {
        self.peer.map_or_else(|| "?".into(), |peer| peer.to_string())
    }

    fn tell(
        &self,
        log: &mut dyn Write,
        request: &Result<Request, Refusal>,
        response: &Response,
    ) -> io::Result<()> {
        let what = match request {
            Ok(request) => {
                let method = if request.head_only { "HEAD" } else { "GET" };
                format!("{method} {}", shortened(&request.path))
            }
            Err(_) => "?".into(),
        };
        let status = &response.status.line()[..3];
        let len = response.range.end - response.range.start;
        writeln!(log, "{} {what} {status} {len}", self.name())?;
        log.flush()
    }

    /// Its client has done something that keeps its place.
    fn keep(&mut self) {
        self.since = self.since.map(|_| Instant::now());
    }

    /// Whether a response is under way.
    fn is_busy(&self) -> bool {
        self.body.is_some() || !self.sending.is_empty()
    }

    /// Posts the receive of a place.
    fn post(&self, place: usize) -> Result<(), Error> {
        self.qp.post_recv(place as u64, &[self.memory.sge(place * RECEIVE_LEN, RECEIVE_LEN)?])
    }

    /// Takes what has come into a place.
    fn received(&mut self, place: usize, len: usize) -> Result<(), Error> {
        // Nothing is read any more: what comes is let in and forgotten, so that the peer reads to the end.
        if self.closing {
            return self.post(place);
        }
        self.parser.add(&self.memory.to_vec(place * RECEIVE_LEN, len)?);
        self.taken.push(place);
        Ok(())
    }

    /// Sends what can be sent now; answers the next request when the last response is out.
    fn go_on(
        &mut self,
        source: &mut Source,
        mut answer: impl FnMut(&mut Source, &Result<Request, Refusal>, &Self) -> Response,
    ) -> Result<(), Trouble> {
        loop {
            self.send_body(&mut source.memory)?;
            if self.last && self.body.is_none() && !self.closing {
                return Ok(self.finish()?);
            }
            if self.closing || self.is_busy() {
                return Ok(());
            }
            let Some(request) = self.parser.next() else { break };
            let response = answer(source, &request, self);
            self.respond(&mut source.memory, response)?;
        }
        for place in std::mem::take(&mut self.taken) {
            self.post(place)?;
        }
        if self.peer_closed {
            self.finish()?;
        }
        Ok(())
    }

    /// Sends nothing more, and lets in what still comes.
    fn finish(&mut self) -> Result<(), Error> {
        self.closing = true;
        for place in std::mem::take(&mut self.taken) {
            self.post(place)?;
        }
        self.qp.close()
    }

    /// Sends nothing more, and tells the peer so by a reset, as what it has got is not all.
    fn give_up(&mut self) {
        self.closing = true;
        self.body = None;
        // If it is gone already, that is an event too.
        let _ = self.qp.abort();
    }

    fn respond(&mut self, memory: &mut Memory, response: Response) -> Result<(), Trouble> {
        self.keep();
        let keep_alive = response.keep_alive;
        let head = Head {
            media_type: response.media_type,
            length: response.len,
            part: response.part,
            version: Version { tag: response.tag.as_deref(), ..response.version },
            location: response.location.as_deref(),
            keep_alive,
        };
        let head = head.write(response.status, SystemTime::now());
        if head.len() <= HEAD_LEN {
            self.memory.write(RECEIVES * RECEIVE_LEN, &head)?;
            let piece = [self.memory.sge(RECEIVES * RECEIVE_LEN, head.len())?];
            self.qp.post_send(&Work::send(&piece).id(SEND))?;
            self.sending.push_back((head.len() as u64, None));
        } else {
            let held = memory.hold(&head).map_err(io::Error::other)?;
            self.qp.post_send(&Work::send(&[held.sge(0, head.len())?]).id(SEND))?;
            self.sending.push_back((head.len() as u64, Some(Arc::new(held))));
        }
        let std::ops::Range { start: at, end } = response.range;
        self.body = (at < end).then_some(Body { data: response.data, at, end });
        self.last = !keep_alive;
        Ok(())
    }

    /// Posts pieces of the response as long as there is room: one at a time while memory is scarce. The first
    /// goes with the head, for whose acknowledgement the peer may take its time.
    fn send_body(&mut self, memory: &mut Memory) -> Result<(), Trouble> {
        while let Some(body) = &mut self.body
            && self.sending.len() < SENDS
        {
            let pieces = self.sending.iter().filter(|(_, region)| region.is_some()).count();
            if pieces > 0 && pieces >= body.data.sends(memory, SENDS) {
                break;
            }
            let most = (body.end - body.at).min(self.piece);
            let (region, at, len) = match body.data.piece(memory, body.at, most) {
                // When what is under way has been acknowledged, there may be some.
                Err(error)
                    if error.kind() == io::ErrorKind::OutOfMemory && !self.sending.is_empty() =>
                {
                    break;
                }
                piece => piece?,
            };
            self.qp.post_send(&Work::send(&[region.sge(at, len)?]).id(SEND))?;
            self.sending.push_back((len as u64, Some(region)));
            body.at += len as u64;
            if body.at == body.end {
                self.body = None;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
