//! The client's side of HTTP/1.1 (RFC 9112), as far as fetching pages needs it: octets in, content out. No
//! I/O but the content.

use std::io::Write;

use crate::cmd::failure::Failure;

/// Longest head of a response, or trailer, in octets.
const MAX_HEAD: usize = 64 << 10;
/// Longest line before a chunk, in octets.
const MAX_CHUNK_LINE: usize = 4096;

/// So much of what a server says of a refusal is told.
const MAX_TOLD: usize = 200;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The first line.
    Status,
    /// A line of the head.
    Field,
    /// So many octets of content, and no more.
    Counted(u64),
    /// All that still comes is content.
    Rest,
    /// The line that says how long a chunk is.
    Size,
    /// So many octets of a chunk.
    Chunk(u64),
    /// The line that ends a chunk.
    ChunkEnd,
    /// A line behind the last chunk.
    Trailer,
    /// Nothing: it is whole.
    Nothing,
}

/// A response that comes, and where its content goes.
pub(super) struct Response<'a> {
    next: Next,
    /// The line that has begun.
    line: Vec<u8>,
    /// Octets of the head or the trailer so far.
    head: usize,
    status: String,
    /// The field that may go on in the next line.
    field: String,
    /// Where the page is instead.
    location: String,
    length: Option<u64>,
    chunked: bool,
    /// The connection stays.
    persists: bool,
    out: &'a mut dyn Write,
}

impl<'a> Response<'a> {
    /// Of which nothing has come yet.
    pub(super) fn new(out: &'a mut dyn Write) -> Self {
        Self {
            next: Next::Status,
            line: Vec::new(),
            head: 0,
            status: String::new(),
            field: String::new(),
            location: String::new(),
            length: None,
            chunked: false,
            persists: false,
            out,
        }
    }

    /// Takes what has come.
    ///
    /// # Errors
    /// It is no HTTP, too long, or cannot be written.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> Result<(), Failure> {
        while !bytes.is_empty() {
            bytes = match self.next {
                Next::Counted(left) | Next::Chunk(left) => self.content(bytes, left)?,
                Next::Rest => {
                    self.out.write_all(bytes)?;
                    &[]
                }
                Next::Nothing => {
                    // An answer that nobody has asked for.
                    self.persists = false;
                    &[]
                }
                _ => self.line(bytes)?,
            };
        }
        Ok(())
    }

    /// Writes content, of which so much is left; what stands behind it.
    fn content<'b>(&mut self, bytes: &'b [u8], left: u64) -> Result<&'b [u8], Failure> {
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
        let (content, rest) = bytes.split_at(len);
        self.out.write_all(content)?;
        let left = left - len as u64;
        self.next = match (self.next, left) {
            (Next::Counted(_), 0) => Next::Nothing,
            (Next::Counted(_), _) => Next::Counted(left),
            (_, 0) => Next::ChunkEnd,
            _ => Next::Chunk(left),
        };
        Ok(rest)
    }

    /// Takes a line, if it is here to its end; what stands behind it.
    fn line<'b>(&mut self, bytes: &'b [u8]) -> Result<&'b [u8], Failure> {
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let (piece, rest) = bytes.split_at(end.map_or(bytes.len(), |at| at + 1));
        self.line.extend_from_slice(piece);
        let most = match self.next {
            Next::Size | Next::ChunkEnd => MAX_CHUNK_LINE,
            _ => MAX_HEAD - self.head,
        };
        if self.line.len() > most {
            return Err(wrong("its header does not end"));
        }
        if end.is_some() {
            let line = std::mem::take(&mut self.line);
            self.whole_line(String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']))?;
            self.head += line.len();
        }
        Ok(rest)
    }

    fn whole_line(&mut self, line: &str) -> Result<(), Failure> {
        self.next = match self.next {
            Next::Status => {
                if !line.starts_with("HTTP/1.") {
                    return Err(wrong("the answer is not HTTP/1"));
                }
                // RFC 9112 9.3: connections stay unless somebody says otherwise; older ones do not.
                self.persists = !line.starts_with("HTTP/1.0");
                line.clone_into(&mut self.status);
                Next::Field
            }
            // RFC 9112 5.2: as old servers break lines.
            Next::Field if line.starts_with([' ', '\t']) && !self.field.is_empty() => {
                self.field += " ";
                self.field += line.trim();
                Next::Field
            }
            Next::Field => {
                let before = std::mem::replace(&mut self.field, line.to_owned());
                if !before.is_empty() {
                    self.field(&before)?;
                }
                if line.is_empty() { self.after_head()? } else { Next::Field }
            }
            Next::Size => {
                let size = line.split(';').next().unwrap_or_default().trim();
                let digits = !size.is_empty() && size.bytes().all(|byte| byte.is_ascii_hexdigit());
                let size = u64::from_str_radix(size, 16).ok().filter(|_| digits);
                self.head = 0;
                match size.ok_or_else(|| wrong("the length of a chunk is not a number"))? {
                    0 => Next::Trailer,
                    size => Next::Chunk(size),
                }
            }
            Next::ChunkEnd if line.is_empty() => Next::Size,
            Next::ChunkEnd => return Err(wrong("a chunk is longer than its length")),
            Next::Trailer if line.is_empty() => Next::Nothing,
            next => next,
        };
        Ok(())
    }

    fn field(&mut self, line: &str) -> Result<(), Failure> {
        let Some((name, value)) = line.split_once(':') else {
            return Err(wrong("a line of its header is not a field"));
        };
        let (name, value) = (name.to_ascii_lowercase(), value.trim());
        let has = |word: &str| value.split(',').any(|it| it.trim().eq_ignore_ascii_case(word));
        match name.as_str() {
            "content-length" => {
                let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
                let length = value.parse().ok().filter(|_| digits);
                // RFC 9112 6.3: who cannot agree with itself is not to be understood.
                if length.is_none() || self.length.is_some_and(|other| Some(other) != length) {
                    return Err(wrong("its Content-Length is not one number"));
                }
                self.length = length;
            }
            "transfer-encoding" if value.eq_ignore_ascii_case("chunked") => self.chunked = true,
            "transfer-encoding" => {
                return Err(wrong("it has an encoding that was not requested"));
            }
            "connection" if has("close") => self.persists = false,
            "location" => value.clone_into(&mut self.location),
            _ => {}
        }
        Ok(())
    }

    /// What the head is followed by (RFC 9112 6.3).
    fn after_head(&mut self) -> Result<Next, Failure> {
        let code = self.code();
        Ok(match code {
            // What it goes on with is another one.
            100..200 if code != 101 => {
                (self.length, self.chunked) = (None, false);
                Next::Status
            }
            204 | 304 => Next::Nothing,
            _ if self.chunked => Next::Size,
            _ => match self.length {
                Some(0) => Next::Nothing,
                Some(length) => Next::Counted(length),
                None => {
                    self.persists = false;
                    Next::Rest
                }
            },
        })
    }
}

impl Response<'_> {
    /// The status code; 0 if there is none.
    fn code(&self) -> u16 {
        self.status.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0)
    }

    /// Whether all of it is here.
    pub(super) fn is_whole(&self) -> bool {
        self.next == Next::Nothing
    }

    /// Whether nothing of it is here.
    pub(super) fn is_untouched(&self) -> bool {
        self.next == Next::Status && self.line.is_empty() && self.status.is_empty()
    }

    /// Whether the connection takes another request, once this response is whole.
    pub(super) fn persists(&self) -> bool {
        self.persists && self.is_whole()
    }

    /// Nothing more comes.
    ///
    /// # Errors
    /// It is not whole, or not what was asked for.
    pub(super) fn finish(self) -> Result<(), Failure> {
        self.out.flush()?;
        if self.is_untouched() {
            return Err(wrong("the connection ended before the answer"));
        }
        if !matches!(self.next, Next::Nothing | Next::Rest) {
            return Err(wrong("the connection ended in the middle of the answer"));
        }
        let told = |text: &str| {
            // It is the server's, for a terminal: no control characters, and not much.
            let text: String = text.chars().take(MAX_TOLD).collect();
            text.escape_debug().to_string()
        };
        match self.code() {
            200..300 => Ok(()),
            300..400 if !self.location.is_empty() => {
                let remedy = format!("ask for {}", told(&self.location));
                Err(Failure::new("the page has moved", told(&self.status), remedy))
            }
            _ => Err(Failure::new("the server refuses", told(&self.status), "")),
        }
    }
}

fn wrong(why: &str) -> Failure {
    Failure::new("the response", why, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What came of it: an error or whether the connection stays, and the content.
    fn taken(parts: &[&str]) -> (Result<bool, String>, String) {
        let mut content = Vec::new();
        let mut response = Response::new(&mut content);
        let all = parts.iter().try_for_each(|part| response.take(part.as_bytes()));
        let persists = response.persists();
        let outcome = all.and_then(|()| response.finish());
        let outcome = outcome.map(|()| persists).map_err(|failure| failure.to_string());
        (outcome, String::from_utf8(content).unwrap())
    }

    /// Whole, however it is cut: whether the connection stays.
    fn knots(text: &str) -> bool {
        let mut stays = None;
        for cut in 0..=text.len() {
            let (outcome, content) = taken(&[&text[..cut], &text[cut..]]);
            assert_eq!(content, "knots");
            let outcome = outcome.unwrap();
            assert_eq!(*stays.get_or_insert(outcome), outcome);
        }
        stays.unwrap()
    }

    #[test]
    fn the_content_comes_out_however_the_response_is_cut() {
        assert!(knots("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nknots"));
        assert!(!knots("HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nknots"));
        assert!(!knots("HTTP/1.0 200 OK\r\n\r\nknots"), "its end is that of the connection");
        assert!(!knots("HTTP/1.1 200\r\nConnection: x, Close\r\nContent-Length: 5\r\n\r\nknots"));
        assert!(knots("HTTP/1.1 203 x\r\nX: a\r\n b c\r\nContent-Length:\r\n\t5\r\n\r\nknots"));
        let hinted = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
        assert!(knots(&format!("{hinted}HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nknots")));
    }

    #[test]
    fn chunks_are_put_together() {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert!(knots(&format!("{head}3\r\nkno\r\n2;x=y\r\nts\r\n0\r\n\r\n")));
        assert!(knots(&format!("{head}05\r\nknots\r\n0\r\nExpires: never\r\n\r\n")));
        for wrong in ["3\r\nknots\r\n", "x\r\n", "+1\r\nk\r\n", "\r\n", "fffffffffffffffff\r\n"] {
            assert!(taken(&[head, wrong]).0.is_err(), "{wrong:?}");
        }
        assert!(taken(&[head, "5\r\nknots\r\n"]).0.is_err(), "the last chunk is missing");
        assert!(taken(&[head, &"0".repeat(MAX_CHUNK_LINE + 1)]).0.is_err());
    }

    #[test]
    fn what_is_not_whole_or_refused_is_an_error() {
        let whole = ["HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"];
        assert!(taken(&whole).0.unwrap_err().contains("404"));
        assert_eq!(taken(&["HTTP/1.1 204 No Content\r\n\r\n"]), (Ok(true), String::new()));
        let moved = "HTTP/1.1 301 Moved\r\nLocation: /there\x1b\r\nContent-Length: 0\r\n\r\n";
        let told = taken(&[moved]).0.unwrap_err();
        assert!(told.contains("ask for /there\\u{1b}"), "{told}");
        for part in [
            "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nknots",
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nknots",
            "HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nknots",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nknots",
            "HTTP/1.1 200 OK\r\nno field\r\n\r\n",
            "HTTP/1.1 200",
            "SSH-2.0\r\n",
            "",
        ] {
            assert!(taken(&[part]).0.is_err(), "{part:?}");
        }
        assert!(taken(&["HTTP/1.1 200 OK\r\n", &"x: y\r\n".repeat(MAX_HEAD)]).0.is_err());
    }

    #[test]
    fn what_a_server_says_of_a_refusal_does_nothing_to_a_terminal() {
        let head = format!("HTTP/1.1 404 \x1b]0;knots\x07{}\r\n", "x".repeat(1000));
        let told = taken(&[&head, "Content-Length: 0\r\n\r\n"]).0.unwrap_err();
        assert!(told.contains("404") && told.len() < 300, "{told:?}");
        assert!(!told.trim_end().contains(char::is_control), "{told:?}");
    }

    #[test]
    fn what_nobody_asked_for_is_the_last_of_a_connection() {
        let more = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nknots and more";
        assert_eq!(taken(&[more]), (Ok(false), "knots".into()));
    }
}
