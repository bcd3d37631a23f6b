//! `quipu top --listen`: a page for Prometheus, by HTTP.
//!
//! Each visitor gets a thread and a moment, and of what is asked only the first line counts. Of more visitors
//! than there may be, who has waited longest goes: that is one who says nothing.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use quipu_host::counters::observe::CONTENT_TYPE;

use super::super::failure::Failure;

/// How long a request may take to come, and its answer to be taken.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });
/// The most visitors at once.
const VISITORS: usize = 64;
/// After a visitor could not be let in, for lack of descriptors say.
const PAUSE: Duration = Duration::from_millis(20);
/// Longest request.
const REQUEST_MAX: usize = 8192;

/// Serves until the process is ended.
pub(super) fn serve(address: SocketAddr) -> Result<Infallible, Failure> {
    let refuse = |error: io::Error| {
        Failure::new(format!("cannot listen on {address}"), error, "choose another address")
    };
    let listener = TcpListener::bind(address).map_err(refuse)?;
    let address = listener.local_addr().map_err(refuse)?;
    println!("http://{address}/metrics");
    receive(&listener, super::page)
}

/// Shows the page to everybody who comes.
fn receive(listener: &TcpListener, page: fn() -> String) -> ! {
    let mut visitors: VecDeque<Weak<TcpStream>> = VecDeque::new();
    loop {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(PAUSE);
            continue;
        };
        visitors.retain(|visitor| visitor.strong_count() > 0);
        if visitors.len() >= VISITORS
            && let Some(longest) = visitors.pop_front().and_then(|visitor| visitor.upgrade())
        {
            let _ = longest.shutdown(Shutdown::Both);
        }
        let stream = Arc::new(stream);
        visitors.push_back(Arc::downgrade(&stream));
        // What is wrong with one visitor is no matter of the next.
        let _ = thread::Builder::new().spawn(move || answer(&stream, page));
    }
}

fn answer(mut stream: &TcpStream, page: impl FnOnce() -> String) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = read_request(stream)?;
    let line = request.split(|&byte| byte == b'\r' || byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (status, kind, body) = match (method, path(target)) {
        (b"GET" | b"HEAD", b"/metrics" | b"/") => ("200 OK", CONTENT_TYPE, page()),
        (b"GET" | b"HEAD", _) => (
            "404 Not Found",
            "text/plain",
            "this server has only the page \
            /metrics\n"
                .into(),
        ),
        _ => ("405 Method Not Allowed\r\nAllow: GET, HEAD", "text/plain", "GET /metrics\n".into()),
    };
    let length = body.len();
    let content = if method == b"HEAD" { "" } else { &body };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{content}"
    )?;
    stream.flush()
}

/// The path of a target without its query; that of a proxy begins with the server (RFC 9112, section 3.2.2).
fn path(target: &[u8]) -> &[u8] {
    const SCHEME: &[u8] = b"http://";
    let end = target.iter().position(|&byte| byte == b'?').unwrap_or(target.len());
    let path = &target[..end];
    match path.split_at_checked(SCHEME.len()) {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case(SCHEME) => {
            let begin = rest.iter().position(|&byte| byte == b'/');
            begin.map_or(b"/", |begin| &rest[begin..])
        }
        _ => path,
    }
}

/// Reads up to the empty line that ends a request without a body.
fn read_request(mut stream: &TcpStream) -> io::Result<Vec<u8>> {
    let end = Instant::now() + PATIENCE;
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > REQUEST_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece)? {
            0 => break,
            count => request.extend_from_slice(&piece[..count]),
        }
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a visitor gets who says this.
    fn visit(request: &[u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut visitor = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        visitor.write_all(request).unwrap();
        visitor.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = answer(&listener.accept().unwrap().0, || "quipu_info{} 1\n".into());
        let mut text = String::new();
        // One who said too much is cut off.
        let _ = visitor.read_to_string(&mut text);
        text
    }

    #[test]
    fn silent_visitors_keep_nobody_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || receive(&listener, || "quipu_info{} 1\n".into()));
        let silent: Vec<_> =
            (0..2 * VISITORS).map(|_| TcpStream::connect(address).unwrap()).collect();
        let begun = Instant::now();
        for _ in 0..3 {
            let mut visitor = TcpStream::connect(address).unwrap();
            visitor.set_read_timeout(Some(PATIENCE / 2)).unwrap();
            visitor.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
            let mut text = String::new();
            visitor.read_to_string(&mut text).unwrap();
            assert!(text.ends_with("quipu_info{} 1\n"), "{text}");
        }
        assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
        drop(silent);
    }

    #[test]
    fn the_page_is_served_and_nothing_else() {
        let page = visit(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"));
        assert!(page.ends_with("\r\n\r\nquipu_info{} 1\n"));
        assert!(visit(b"GET /etc/passwd HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        let refused = visit(b"POST /metrics HTTP/1.1\r\n\r\n");
        assert!(
            refused.starts_with("HTTP/1.1 405") && refused.contains("\r\nAllow: GET, HEAD\r\n")
        );
        let head = visit(b"HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(head.contains("200 OK") && head.contains("Content-Length: 15\r\n"), "{head}");
        assert!(head.ends_with("\r\n\r\n"), "{head}");
        for target in ["/metrics?a=b", "http://x/metrics", "HTTP://x:1", "/?"] {
            let page = visit(format!("GET {target} HTTP/1.1\r\n\r\n").as_bytes());
            assert!(page.starts_with("HTTP/1.1 200 OK"), "{target}: {page}");
        }
        assert!(visit(b"GET http://x/a HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(visit(b"\xff\xfe").starts_with("HTTP/1.1 405"));
        assert_eq!(visit(&[b'a'; 20_000]), "");
    }
}
