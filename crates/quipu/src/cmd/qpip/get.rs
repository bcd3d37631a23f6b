//! `quipu qpip get`: fetches pages by HTTP through queue pairs, from any server. A connection is kept for the
//! next page of the same server.

use std::fs::File;
use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use quipu::qpip::{Adapter, Mode, TcpChange, TcpQueuePair, TcpSettings};
use quipu::{Access, Completion, CompletionQueue, Error, MemoryRegion, Request, WcStatus};

use super::http::after_scheme;
use super::response::Response;
use super::{LinkOptions, Signal, broken, connect, failed, unless_gone, with_port};
use crate::cmd::failure::Failure;

/// What to fetch.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// URLs of the pages: http://HOST[:PORT][/PATH].
    #[arg(value_name = "URL", value_parser = url, required = true)]
    urls: Vec<Url>,
    /// Write all pages into this file, one after the other, instead of to standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  python3 -m http.server --bind 10.9.0.1 8000            any server, at the kernel's end of qp0
  sudo quipu qpip get --link tap:qp0 --address 10.9.0.2/24 http://10.9.0.1:8000/";

/// Longest address of a page (RFC 9110 4.1 wants 8000 octets at least), and a request with all around it.
const MAX_URL: usize = 8000;
const MAX_REQUEST: usize = MAX_URL + 192;

/// A page.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Url {
    host: String,
    path: String,
}

fn url(text: &str) -> Result<Url, String> {
    let rest = after_scheme(text).ok_or("only http:// is supported")?;
    // What is behind a number sign is for whoever shows the page (RFC 9110 7.1).
    let rest = rest.split('#').next().unwrap_or_default();
    let (host, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    // A port of no digits is the usual one (RFC 3986 3.2.3).
    let host = host.strip_suffix(':').unwrap_or(host);
    // What cannot be in a URL must not come into the request.
    if host.is_empty() || text.bytes().any(|byte| byte <= b' ' || byte >= 0x7f) {
        return Err("give http://HOST[:PORT][/PATH], and encode other characters as %XX".into());
    }
    if text.len() > MAX_URL {
        return Err("longer than servers accept".into());
    }
    let slash = if path.starts_with('/') { "" } else { "/" };
    Ok(Url { host: host.to_owned(), path: format!("{slash}{path}") })
}

impl Url {
    /// Where the server is: at the first of these that answers.
    fn server(&self) -> io::Result<Vec<SocketAddr>> {
        let named = if self.host.ends_with(']') || !self.host.contains(':') {
            format!("{}:80", self.host)
        } else {
            self.host.clone()
        };
        let found: Vec<_> = named.to_socket_addrs()?.collect();
        if found.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(found) }
    }

    /// What is sent there; with the last one, the connection is to end.
    fn request(&self, last: bool) -> String {
        let Self { host, path } = self;
        let end = if last { "Connection: close\r\n" } else { "" };
        format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: quipu\r\n{end}\r\n")
    }
}

/// Receives that are posted, and their length.
const RECEIVES: usize = 32;
const LEN: usize = 64 << 10;
const SEND: u64 = u64::MAX;
/// What to do if the server ends a connection before it has answered.
const NO_ANSWER: &str = "the server may know why: look at its messages";
/// How long the server may take to close when this end has.
const LINGER: Duration = Duration::from_secs(1);

/// Fetches them.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let servers: Vec<Vec<SocketAddr>> =
        options.urls.iter().map(server).collect::<Result<_, _>>()?;
    let adapter = options.link.open_until_signal(Signal::Cuts)?;
    unless_gone(&adapter, fetch_all(options, &adapter, servers))
}

fn fetch_all(
    options: &Options,
    adapter: &Adapter,
    servers: Vec<Vec<SocketAddr>>,
) -> Result<ExitCode, Failure> {
    let mut out = match &options.output {
        None => Output::Open(Box::new(io::stdout().lock())),
        Some(path) => Output::File(path.clone()),
    };
    let mut kept: Option<Connection<'_>> = None;
    for (number, (url, to)) in options.urls.iter().zip(servers).enumerate() {
        let request = url.request(number + 1 == options.urls.len());
        let mut response = Response::new(&mut out);
        let (mut connection, again) = match kept.take() {
            Some(connection) if to.contains(&connection.to) => (connection, true),
            other => {
                other.into_iter().for_each(Connection::close);
                (Connection::open_any(adapter, &to)?, false)
            }
        };
        let fetched = connection.fetch(&request, &mut response);
        // The server may have closed meanwhile: it has not seen this request (RFC 9112 9.3.1).
        if again && !response.is_whole() && response.is_untouched() {
            connection = Connection::open_any(adapter, &to)?;
            connection.fetch(&request, &mut response)?;
        } else {
            fetched?;
        }
        let persists = response.persists() && !connection.ended;
        let finished = response.finish();
        match persists && finished.is_ok() {
            true => kept = Some(connection),
            false => connection.close(),
        }
        finished?;
    }
    kept.into_iter().for_each(Connection::close);
    out.open()?;
    Ok(ExitCode::SUCCESS)
}

/// Where pages go: a file is made, and what it had lost, when there is something for it.
enum Output {
    Open(Box<dyn Write>),
    File(PathBuf),
}

impl Output {
    fn open(&mut self) -> io::Result<&mut dyn Write> {
        if let Self::File(path) = self {
            let named = |error: io::Error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            };
            *self = Self::Open(Box::new(File::create(&*path).map_err(named)?));
        }
        match self {
            Self::Open(out) => Ok(&mut **out),
            Self::File(_) => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.open()?.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Open(out) => out.flush(),
            Self::File(_) => Ok(()),
        }
    }
}

fn server(url: &Url) -> Result<Vec<SocketAddr>, Failure> {
    let servers = url.server().map_err(|error| {
        let what = format!("cannot find {}", url.host);
        Failure::new(what, error, "give the server as an IP address")
    })?;
    servers.into_iter().map(with_port).collect()
}

/// A connection to a server.
struct Connection<'a> {
    adapter: &'a Adapter,
    to: SocketAddr,
    qp: TcpQueuePair,
    cq: CompletionQueue,
    /// The receives, and behind them the request.
    memory: MemoryRegion,
    /// The peer has closed, or the connection is gone.
    ended: bool,
}

impl<'a> Connection<'a> {
    /// To the first that lets itself be connected to; those are tried first whose family the adapter has.
    fn open_any(adapter: &'a Adapter, to: &[SocketAddr]) -> Result<Self, Failure> {
        let own = adapter.info().map_err(failed)?.addresses;
        let mut to = to.to_vec();
        to.sort_by_key(|to| !own.iter().any(|own| own.is_ipv4() == to.is_ipv4()));
        let mut outcome = None;
        for to in to {
            match Self::open(adapter, to) {
                Ok(connection) => return Ok(connection),
                // The first is the one that is most likely meant.
                Err(failure) => drop(outcome.get_or_insert(failure)),
            }
        }
        let none = || Failure::new("cannot connect", "the name has no address", "");
        Err(outcome.unwrap_or_else(none))
    }

    fn open(adapter: &'a Adapter, to: SocketAddr) -> Result<Self, Failure> {
        let pd = adapter.protection_domain().map_err(failed)?;
        let cq = adapter.completion_queue(RECEIVES as u32 + 1).map_err(failed)?;
        let queues = pd.queue_pair(&cq, &cq).recv_queue(RECEIVES as u32, 1);
        let qp = queues.build_tcp().map_err(failed)?;
        let len = RECEIVES * LEN + MAX_REQUEST;
        let memory = pd.register(len, Access::LOCAL_WRITE).map_err(failed)?;
        for number in 0..RECEIVES {
            let place = memory.sge(number * LEN, LEN).map_err(failed)?;
            qp.post_recv(number as u64, &[place]).map_err(failed)?;
        }
        let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
        connect(&qp, to, &settings)?;
        Ok(Self { adapter, to, qp, cq, memory, ended: false })
    }

    /// Sends a request, and gives what comes back to the response, until that is whole or nothing more comes.
    fn fetch(&mut self, request: &str, response: &mut Response<'_>) -> Result<(), Failure> {
        self.memory.write(RECEIVES * LEN, request.as_bytes()).map_err(failed)?;
        let message = [self.memory.sge(RECEIVES * LEN, request.len()).map_err(failed)?];
        let posted = self.qp.post_send(&Request::send(&message).id(SEND));
        posted.map_err(|error| broken(&self.qp, error, NO_ANSWER))?;
        let (mut sent, mut out) = (false, [Completion::default(); RECEIVES]);
        // The memory of the request is the next one's only when it is sent.
        while !(sent && response.is_whole()) {
            let found = self.cq.poll(&mut out).map_err(failed)?;
            for completion in &out[..found] {
                match completion.status {
                    WcStatus::Success if completion.wr_id == SEND => sent = true,
                    WcStatus::Success => self.received(completion, response)?,
                    // What a reset flushes is not missed if all is there.
                    _ if response.is_whole() => {}
                    _ => return Err(broken(&self.qp, Error::Work(*completion), NO_ANSWER)),
                }
            }
            if found > 0 {
                continue;
            }
            if self.ended {
                break;
            }
            self.look(None)?;
        }
        Ok(())
    }

    fn received(
        &self,
        completion: &Completion,
        response: &mut Response<'_>,
    ) -> Result<(), Failure> {
        let (at, len) = (completion.wr_id as usize * LEN, completion.byte_len as usize);
        response.take(&self.memory.to_vec(at, len).map_err(failed)?)?;
        let again = [self.memory.sge(at, LEN).map_err(failed)?];
        // After the end of the stream it is of no use, and after a reset refused.
        let _ = self.qp.post_recv(completion.wr_id, &again);
        Ok(())
    }

    /// Takes an event, or waits until there may be something new.
    fn look(&mut self, limit: Option<Duration>) -> Result<(), Failure> {
        match self.adapter.poll_event().map_err(failed)? {
            // Others are of connections before.
            Some(event) if event.qp_num == self.qp.number() => {
                self.ended |= event.change != TcpChange::Connected;
            }
            Some(_) => {}
            None => match limit {
                None => self.adapter.wait(&self.cq),
                Some(limit) => self.adapter.wait_timeout(&self.cq, limit),
            }
            .map_err(failed)?,
        }
        Ok(())
    }

    /// Closes, and gives the server a while to do so too; after that it gets a reset.
    fn close(mut self) {
        let until = Instant::now() + LINGER;
        let mut left = LINGER;
        let mut going = self.qp.close().is_ok();
        while going && !self.ended && !left.is_zero() {
            going = self.look(Some(left)).is_ok();
            left = until.saturating_duration_since(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use quipu::qpip::TcpListener;

    use super::*;
    use crate::cmd::qpip::tests::adapter;

    /// A listener at the port of HTTP, and the queue pair that it has for the first client.
    fn served(there: &Adapter) -> (TcpListener, TcpQueuePair) {
        let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
        let listener = there.listen(80, &settings, 1).unwrap();
        let (pd, cq) = (there.protection_domain().unwrap(), there.completion_queue(4).unwrap());
        let server = pd.queue_pair(&cq, &cq).build_tcp().unwrap();
        listener.offer(&server).unwrap();
        (listener, server)
    }

    #[test]
    fn a_server_that_resets_is_told_of_as_one() {
        let (here, there) = (adapter(), adapter());
        let (listener, server) = served(&there);
        let to = SocketAddr::new(there.info().unwrap().addresses[0], listener.port());
        let mut connection = Connection::open(&here, to).unwrap();
        server.wait_connected().unwrap();
        server.abort().unwrap();
        connection.qp.wait_closed().unwrap_err();
        let mut out = Vec::new();
        let fetched = connection.fetch("GET / HTTP/1.1\r\n\r\n", &mut Response::new(&mut out));
        let said = fetched.unwrap_err().to_string();
        assert!(said.contains("reset by the peer"), "{said}");
    }

    #[test]
    fn a_server_is_where_one_of_its_addresses_answers() {
        let (here, there) = (adapter(), adapter());
        let (_listener, _server) = served(&there);
        let address = there.info().unwrap().addresses[0];
        // Where nothing leads, where nobody listens, and there.
        let dead = ["192.0.2.1:80".parse().unwrap(), SocketAddr::new(address, 81)];
        let to = [&dead[..], &[SocketAddr::new(address, 80)]].concat();
        assert_eq!(Connection::open_any(&here, &to).unwrap().to, to[2]);
        let said = Connection::open_any(&here, &dead).map(|_| ()).unwrap_err().to_string();
        assert!(said.contains("cannot connect to ["), "one that could be reached: {said}");
    }

    #[test]
    fn a_file_stays_what_it_is_until_there_is_something_for_it() {
        let path = std::env::temp_dir().join(format!("quipu-get-{}", std::process::id()));
        std::fs::write(&path, "before").unwrap();
        let mut out = Output::File(path.clone());
        out.flush().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"before");
        out.write_all(b"new").unwrap();
        out.write_all(b"er").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"newer");
        std::fs::remove_file(&path).unwrap();
        let missing = Output::File(path.join("x")).write(b"x").unwrap_err().to_string();
        assert!(missing.contains("quipu-get"), "{missing}");
    }

    #[test]
    fn a_page_has_a_server_and_a_path() {
        let page = url("http://[::1]:8000/a?b").unwrap();
        let at = |page: &str| url(page).unwrap().server().unwrap();
        assert_eq!(page.server().unwrap(), ["[::1]:8000".parse().unwrap()]);
        let begin = "GET /a?b HTTP/1.1\r\nHost: [::1]:8000\r\n";
        assert!(page.request(false).starts_with(begin) && page.request(true).starts_with(begin));
        assert!(!page.request(false).contains("close") && page.request(true).contains("close"));
        assert_eq!(at("http://[::1]"), ["[::1]:80".parse().unwrap()]);
        for page in
            ["http://10.0.0.1", "http://10.0.0.1:/x", "http://10.0.0.1?x", "http://10.0.0.1#x"]
        {
            assert_eq!(at(page), ["10.0.0.1:80".parse().unwrap()], "{page}");
        }
        let path = |page: &str| url(page).unwrap().path;
        assert_eq!(path("http://10.0.0.1:8000?x=/1#a"), "/?x=/1");
        assert_eq!(path("http://10.0.0.1/a?b#c"), "/a?b");
        assert_eq!(url("HTTP://10.0.0.1").unwrap().path, "/");
        for bad in ["https://a/", "10.0.0.1", "http:///x", "http://a/b c", "http://a/\r\nX: y"] {
            assert!(url(bad).is_err(), "{bad:?}");
        }
        let long = format!("http://a/{}", "x".repeat(MAX_URL));
        assert!(url(&long).is_err(), "longer than any server takes");
    }
}
