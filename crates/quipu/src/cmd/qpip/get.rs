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
use super::{LinkOptions, broken, connect, failed, unless_gone, with_port};
use crate::cmd::failure::Failure;

/// What to fetch.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// The addresses of the pages: http://HOST[:PORT][/PATH].
    #[arg(value_name = "URL", value_parser = url, required = true)]
    urls: Vec<Url>,
    /// The file that they go to, one behind the other, instead of standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  python3 -m http.server --bind 10.9.0.1 8000            any server, behind the kernel's end of qp0
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
    let rest = after_scheme(text).ok_or("only http:// is spoken here")?;
    let (host, path) = rest.find('/').map_or((rest, "/"), |slash| rest.split_at(slash));
    // What cannot be in a URL must not come into the request.
    if host.is_empty() || text.bytes().any(|byte| byte <= b' ' || byte >= 0x7f) {
        return Err("give http://HOST[:PORT][/PATH], with other characters encoded".into());
    }
    if text.len() > MAX_URL {
        return Err("longer than servers take".into());
    }
    Ok(Url { host: host.to_owned(), path: path.to_owned() })
}

impl Url {
    /// Where the server is.
    fn server(&self) -> io::Result<SocketAddr> {
        let named = if self.host.ends_with(']') || !self.host.contains(':') {
            format!("{}:80", self.host)
        } else {
            self.host.clone()
        };
        named.to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound.into())
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
const NO_ANSWER: &str = "does the server say why?";
/// How long the server may take to close when this end has.
const LINGER: Duration = Duration::from_secs(1);

/// Fetches them.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let servers: Vec<SocketAddr> = options.urls.iter().map(server).collect::<Result<_, _>>()?;
    let adapter = options.link.open_until_signal()?;
    unless_gone(&adapter, fetch_all(options, &adapter, servers))
}

fn fetch_all(
    options: &Options,
    adapter: &Adapter,
    servers: Vec<SocketAddr>,
) -> Result<ExitCode, Failure> {
    let mut out: Box<dyn Write> = match &options.output {
        None => Box::new(io::stdout().lock()),
        Some(path) => Box::new(File::create(path).map_err(|error| {
            let what = format!("cannot write {}", path.display());
            Failure::new(what, error, "choose another file with --output")
        })?),
    };
    let mut kept: Option<Connection<'_>> = None;
    for (number, (url, to)) in options.urls.iter().zip(servers).enumerate() {
        let request = url.request(number + 1 == options.urls.len());
        let mut response = Response::new(&mut *out);
        let reused = kept.take().filter(|it| it.to == to);
        let again = reused.is_some();
        let mut connection = match reused {
            Some(connection) => connection,
            None => Connection::open(adapter, to)?,
        };
        let fetched = connection.fetch(&request, &mut response);
        // The server may have closed meanwhile: it has not seen this request (RFC 9112 9.3.1).
        if again && !response.is_whole() && response.is_untouched() {
            connection = Connection::open(adapter, to)?;
            connection.fetch(&request, &mut response)?;
        } else {
            fetched?;
        }
        let persists = response.persists() && !connection.ended;
        response.finish()?;
        match persists {
            true => kept = Some(connection),
            false => connection.close(),
        }
    }
    if let Some(connection) = kept {
        connection.close();
    }
    Ok(ExitCode::SUCCESS)
}

fn server(url: &Url) -> Result<SocketAddr, Failure> {
    let server = url.server().map_err(|error| {
        let what = format!("cannot find {}", url.host);
        Failure::new(what, error, "give the address as numbers")
    })?;
    with_port(server)
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
    use super::*;
    use crate::cmd::qpip::tests::adapter;

    #[test]
    fn a_server_that_resets_is_told_of_as_one() {
        let (here, there) = (adapter(), adapter());
        let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
        let listener = there.listen(80, &settings, 1).unwrap();
        let (pd, cq) = (there.protection_domain().unwrap(), there.completion_queue(4).unwrap());
        let server = pd.queue_pair(&cq, &cq).build_tcp().unwrap();
        listener.offer(&server).unwrap();
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
    fn a_page_has_a_server_and_a_path() {
        let page = url("http://[::1]:8000/a?b").unwrap();
        assert_eq!(page.server().unwrap(), "[::1]:8000".parse().unwrap());
        let begin = "GET /a?b HTTP/1.1\r\nHost: [::1]:8000\r\n";
        assert!(page.request(false).starts_with(begin) && page.request(true).starts_with(begin));
        assert!(!page.request(false).contains("close") && page.request(true).contains("close"));
        assert_eq!(url("http://[::1]").unwrap().server().unwrap(), "[::1]:80".parse().unwrap());
        assert_eq!(url("http://10.0.0.1").unwrap().server().unwrap().port(), 80);
        assert_eq!(url("HTTP://10.0.0.1").unwrap().path, "/");
        for bad in ["https://a/", "10.0.0.1", "http:///x", "http://a/b c", "http://a/\r\nX: y"] {
            assert!(url(bad).is_err(), "{bad:?}");
        }
        let long = format!("http://a/{}", "x".repeat(MAX_URL));
        assert!(url(&long).is_err(), "longer than any server takes");
    }
}
