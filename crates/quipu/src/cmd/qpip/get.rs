//! `quipu qpip get`: fetches a page by HTTP through a queue pair, from any server.

use std::fs::File;
use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;

use quipu::qpip::{Adapter, Mode, TcpChange, TcpSettings};
use quipu::{Access, Completion, Error, Request, WcStatus};

use super::{LinkOptions, failed, unreachable};
use crate::cmd::failure::Failure;

/// What to fetch.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// The address of the page: http://HOST[:PORT][/PATH].
    #[arg(value_name = "URL", value_parser = url)]
    url: Url,
    /// The file that it goes to, instead of standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  python3 -m http.server --bind 10.9.0.1 8000            any server, behind the kernel's end of qp0
  sudo quipu qpip get --link tap:qp0 --address 10.9.0.2/24 http://10.9.0.1:8000/";

/// A page.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Url {
    host: String,
    path: String,
}

fn url(text: &str) -> Result<Url, String> {
    let rest = text.strip_prefix("http://").ok_or("only http:// is spoken here")?;
    let (host, path) = rest.find('/').map_or((rest, "/"), |slash| rest.split_at(slash));
    // What cannot be in a URL must not come into the request.
    if host.is_empty() || text.bytes().any(|byte| byte <= b' ' || byte >= 0x7f) {
        return Err("give http://HOST[:PORT][/PATH], with other characters encoded".into());
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

    /// What is sent there. By HTTP/1.0, so that the content is the rest of the stream.
    fn request(&self) -> String {
        format!("GET {} HTTP/1.0\r\nHost: {}\r\nUser-Agent: quipu\r\n\r\n", self.path, self.host)
    }
}

/// Receives that are posted, and their length.
const RECEIVES: usize = 32;
const LEN: usize = 64 << 10;
/// Longest head of a response.
const MAX_HEAD: usize = 64 << 10;
const SEND: u64 = u64::MAX;

/// Fetches it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let to = options.url.server().map_err(|error| {
        let what = format!("cannot find {}", options.url.host);
        Failure::new(what, error, "give the address as numbers")
    })?;
    let adapter = options.link.open()?;
    let out: Box<dyn Write> = match &options.output {
        None => Box::new(io::stdout().lock()),
        Some(path) => Box::new(File::create(path).map_err(|error| {
            let what = format!("cannot write {}", path.display());
            Failure::new(what, error, "choose another file with --output")
        })?),
    };
    let mut response = Response { head: Vec::new(), status: None, expected: None, got: 0, out };
    fetch(&adapter, to, &options.url.request(), &mut response)?;
    response.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Sends a request, and gives everything that comes back to the response.
fn fetch(
    adapter: &Adapter,
    to: SocketAddr,
    request: &str,
    response: &mut Response<'_>,
) -> Result<(), Failure> {
    let pd = adapter.protection_domain().map_err(failed)?;
    let cq = adapter.completion_queue(RECEIVES as u32 + 1).map_err(failed)?;
    let queues = pd.queue_pair(&cq, &cq).recv_queue(RECEIVES as u32, 1);
    let qp = queues.build_tcp().map_err(failed)?;
    let memory =
        pd.register(RECEIVES * LEN + request.len(), Access::LOCAL_WRITE).map_err(failed)?;
    let place = |number: u64| memory.sge(number as usize * LEN, LEN);
    for number in 0..RECEIVES as u64 {
        qp.post_recv(number, &[place(number).map_err(failed)?]).map_err(failed)?;
    }
    let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
    qp.connect(to, &settings).map_err(|error| unreachable(to, &error))?;
    memory.write(RECEIVES * LEN, request.as_bytes()).map_err(failed)?;
    let message = [memory.sge(RECEIVES * LEN, request.len()).map_err(failed)?];
    qp.post_send(&Request::send(&message).id(SEND)).map_err(failed)?;
    let (mut ended, mut out) = (false, [Completion::default(); RECEIVES]);
    loop {
        let found = cq.poll(&mut out).map_err(failed)?;
        for completion in &out[..found] {
            let len = completion.byte_len as usize;
            match completion.status {
                WcStatus::Success if completion.wr_id == SEND => {}
                WcStatus::Success => {
                    let at = completion.wr_id as usize * LEN;
                    response.take(&memory.to_vec(at, len).map_err(failed)?)?;
                    let again = [place(completion.wr_id).map_err(failed)?];
                    // After the end of the stream it is of no use, and after a reset refused.
                    let _ = qp.post_recv(completion.wr_id, &again);
                }
                // What a reset flushes is not missed if all is there.
                _ if response.is_whole() => {}
                _ => return Err(Failure::new("the transfer", Error::Work(*completion), "")),
            }
        }
        if found > 0 {
            continue;
        }
        if ended {
            break;
        }
        match adapter.poll_event().map_err(failed)? {
            Some(event) => ended = event.change != TcpChange::Connected,
            None => adapter.wait(&cq).map_err(failed)?,
        }
    }
    let _ = qp.close().and_then(|()| qp.wait_closed());
    Ok(())
}

/// What comes back.
struct Response<'a> {
    /// The head, while it is not complete.
    head: Vec<u8>,
    /// The first line, from when it is.
    status: Option<String>,
    expected: Option<u64>,
    /// Octets of the content.
    got: u64,
    out: Box<dyn Write + 'a>,
}

impl Response<'_> {
    fn take(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if self.status.is_some() {
            return self.content(bytes);
        }
        self.head.extend_from_slice(bytes);
        let Some(end) = self.head.windows(4).position(|four| four == b"\r\n\r\n") else {
            let why = "the head of the response has no end";
            let long = self.head.len() > MAX_HEAD;
            return if long { Err(Failure::new("the response", why, "")) } else { Ok(()) };
        };
        let head = String::from_utf8_lossy(&self.head[..end]).into_owned();
        let mut lines = head.split("\r\n");
        self.status = Some(lines.next().unwrap_or_default().to_owned());
        let field = |line: &str| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
        };
        self.expected = lines.find_map(field);
        let rest = std::mem::take(&mut self.head).split_off(end + 4);
        self.content(&rest)
    }

    fn content(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.got += bytes.len() as u64;
        Ok(self.out.write_all(bytes)?)
    }

    fn is_whole(&self) -> bool {
        self.expected == Some(self.got)
    }

    /// Whether it was what was asked for, and came whole.
    fn finish(mut self) -> Result<(), Failure> {
        self.out.flush()?;
        let Some(status) = &self.status else {
            return Err(Failure::new("the response", "the connection ended before it", ""));
        };
        if self.expected.is_some_and(|expected| expected != self.got) {
            return Err(Failure::new(
                "the response",
                "the connection ended in the middle of it",
                "",
            ));
        }
        let good = status.split(' ').nth(1) == Some("200");
        if good { Ok(()) } else { Err(Failure::new("the server refuses", status, "")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(parts: &[&str]) -> (Result<(), Failure>, String) {
        let mut content = Vec::new();
        let out = Box::new(&mut content);
        let mut response = Response { head: Vec::new(), status: None, expected: None, got: 0, out };
        for part in parts {
            response.take(part.as_bytes()).unwrap();
        }
        let outcome = response.finish();
        (outcome, String::from_utf8(content).unwrap())
    }

    #[test]
    fn a_page_has_a_server_and_a_path() {
        let page = url("http://[::1]:8000/a?b").unwrap();
        assert_eq!(page.server().unwrap(), "[::1]:8000".parse().unwrap());
        assert!(page.request().starts_with("GET /a?b HTTP/1.0\r\nHost: [::1]:8000\r\n"));
        assert_eq!(url("http://[::1]").unwrap().server().unwrap(), "[::1]:80".parse().unwrap());
        assert_eq!(url("http://10.0.0.1").unwrap().server().unwrap().port(), 80);
        assert_eq!(url("http://10.0.0.1").unwrap().path, "/");
        for bad in ["https://a/", "10.0.0.1", "http:///x", "http://a/b c", "http://a/\r\nX: y"] {
            assert!(url(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_content_comes_out_however_the_response_is_cut() {
        let text = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nknots";
        for cut in 0..text.len() {
            let (outcome, content) = taken(&[&text[..cut], &text[cut..]]);
            outcome.unwrap();
            assert_eq!(content, "knots");
        }
        assert!(taken(&["HTTP/1.0 200 OK\r\n\r\nuntil the end"]).0.is_ok());
    }

    #[test]
    fn what_is_not_whole_or_refused_is_an_error() {
        assert!(taken(&["HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nknots"]).0.is_err());
        assert!(taken(&["HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"]).0.is_err());
        assert!(taken(&["HTTP/1.1 200"]).0.is_err());
        assert!(taken(&[]).0.is_err());
    }
}
