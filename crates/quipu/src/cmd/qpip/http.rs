//! The server's side of HTTP/1.1 (RFC 9112), as far as a page and its files need it: octets in, requests out;
//! a request and what there is of its target in, the head of a response out. No I/O.

use std::fmt::Write as _;
use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::conditions::{Conditions, Version};

/// Longest head of a request.
const MAX_HEAD: usize = 16 * 1024;
/// Longest body of a request that is read, and thrown away, in order to go on with the next one.
const MAX_BODY: u64 = 1 << 20;

/// How a response begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Ok,
    PartialContent,
    NotModified,
    MovedPermanently,
    BadRequest,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    PreconditionFailed,
    ContentTooLarge,
    RangeNotSatisfiable,
    UriTooLong,
    HeadTooLarge,
    InternalError,
    NotImplemented,
    Unavailable,
    VersionNotSupported,
}

impl Status {
    /// Number and reason phrase (RFC 9110 section 15; RFC 6585 section 5).
    pub(crate) const fn line(self) -> &'static str {
        match self {
            Self::Ok => "200 OK",
            Self::PartialContent => "206 Partial Content",
            Self::MovedPermanently => "301 Moved Permanently",
            Self::NotModified => "304 Not Modified",
            Self::BadRequest => "400 Bad Request",
            Self::Forbidden => "403 Forbidden",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed",
            Self::PreconditionFailed => "412 Precondition Failed",
            Self::ContentTooLarge => "413 Content Too Large",
            Self::UriTooLong => "414 URI Too Long",
            Self::RangeNotSatisfiable => "416 Range Not Satisfiable",
            Self::HeadTooLarge => "431 Request Header Fields Too Large",
            Self::InternalError => "500 Internal Server Error",
            Self::NotImplemented => "501 Not Implemented",
            Self::Unavailable => "503 Service Unavailable",
            Self::VersionNotSupported => "505 HTTP Version Not Supported",
        }
    }
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Without the content (HEAD).
    pub(crate) head_only: bool,
    /// The path, decoded; it begins with a slash and has no part that is `.` or `..`.
    pub(crate) path: String,
    /// What followed it as it came, from the question mark on; or nothing.
    pub(crate) query: String,
    /// Whether the client may ask for more on this connection.
    pub(crate) keep_alive: bool,
    /// Which part is asked for.
    pub(crate) part: Option<Part>,
    /// Of which version.
    pub(crate) conditions: Conditions,
}

/// One range of octets (RFC 9110 section 14.1.2). Several at once are not served: then all is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// From one octet to another, that one included, or to the end.
    From(u64, Option<u64>),
    /// So many at the end.
    Last(u64),
}

impl Part {
    /// The octets of a file of `len` octets; `None` if there are none.
    pub(crate) fn of(self, len: u64) -> Option<Range<u64>> {
        let range = match self {
            Self::From(first, last) => {
                first..last.map_or(len, |last| last.saturating_add(1)).min(len)
            }
            Self::Last(count) => len.saturating_sub(count)..len,
        };
        (range.start < range.end).then_some(range)
    }
}

/// Why there is no request: what to answer before the connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: Status,
    /// Without content: it answers HEAD (RFC 9110 section 9.3.2).
    pub(crate) head_only: bool,
}

/// Takes requests out of a stream.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    buffer: Vec<u8>,
    /// Octets of a body that are still to be thrown away.
    body: u64,
}

impl Parser {
    /// Adds octets of the stream. More than a head and what came along with it is never kept: nothing is to
    /// be added before [`next`](Self::next) has returned `None`.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let skipped = self.body.min(bytes.len() as u64) as usize;
        self.body -= skipped as u64;
        self.buffer.extend_from_slice(&bytes[skipped..]);
    }

    /// The next request, if it is whole.
    pub(crate) fn next(&mut self) -> Option<Result<Request, Refusal>> {
        // An empty line in front of a request is not held against old clients (RFC 9112 section 2.2).
        let blank = self.buffer.iter().take_while(|&&byte| byte == b'\r' || byte == b'\n').count();
        self.buffer.drain(..blank);
        let head_only = self.buffer.starts_with(b"HEAD ");
        let refusal = |status| Refusal { status, head_only };
        let end = end_of_head(&self.buffer);
        if end.unwrap_or(self.buffer.len()) > MAX_HEAD {
            let line_ends = self.buffer[..MAX_HEAD].contains(&b'\n');
            let status = if line_ends { Status::HeadTooLarge } else { Status::UriTooLong };
            return Some(Err(refusal(status)));
        }
        let end = end?;
        let parsed = parse(&self.buffer[..end]);
        self.buffer.drain(..end);
        let taken = parsed.map(|(mut request, body, awaits_word)| {
            let here = body.min(self.buffer.len() as u64);
            self.buffer.drain(..here as usize);
            self.body = body - here;
            // Who waits for a word before it sends the rest gets an answer instead, and may then send the
            // rest or not (RFC 9110 section 10.1.1): what comes next cannot be told from it.
            request.keep_alive &= !awaits_word || self.body == 0;
            request
        });
        Some(taken.map_err(refusal))
    }
}

/// Where the head ends: behind the first empty line.
fn end_of_head(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    while let Some(newline) = bytes[at..].iter().position(|&byte| byte == b'\n') {
        let line = &bytes[at..at + newline];
        at += newline + 1;
        if line.is_empty() || line == b"\r" {
            return Some(at);
        }
    }
    None
}

/// What the fields of a head say.
#[derive(Default)]
struct Fields {
    close: bool,
    keep: bool,
    hosts: u32,
    body: Option<u64>,
    /// There is a body, of which only its end says how long it is.
    encoded: bool,
    awaits_word: bool,
    part: Option<Part>,
    conditions: Conditions,
}

/// Reads a head; the request, the length of its body, and whether the client waits for a word before it sends
/// that.
fn parse(head: &[u8]) -> Result<(Request, u64, bool), Status> {
    let line = head.iter().position(|&byte| byte == b'\n').ok_or(Status::BadRequest)?;
    let (first, rest) = head.split_at(line + 1);
    let first = std::str::from_utf8(first).map_err(|_| Status::BadRequest)?.trim_end_matches('\n');
    let first = first.strip_suffix('\r').unwrap_or(first);
    // Values need not be text (RFC 9110 section 5.5), and those that mean something here are.
    let rest = String::from_utf8_lossy(rest);
    let lines = rest.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line));
    if !is_plain(first) || first.contains('\t') {
        return Err(Status::BadRequest);
    }
    let mut words = first.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Status::BadRequest);
    };
    let newer = match version.strip_prefix("HTTP/").map(str::as_bytes) {
        Some(b"1.0") => false,
        // Later ones of this major version are to be taken as the latest known (RFC 9110 section 2.5).
        Some([b'1', b'.', b'1'..=b'9']) => true,
        Some([b'0'..=b'9', b'.', b'0'..=b'9']) => return Err(Status::VersionNotSupported),
        _ => return Err(Status::BadRequest),
    };
    let fields = fields(lines)?;
    // RFC 9112 section 3.2: without this, and with two, it is to be refused.
    if fields.hosts > 1 || (newer && fields.hosts == 0) {
        return Err(Status::BadRequest);
    }
    let head_only = match method {
        "GET" => false,
        "HEAD" => true,
        "POST" | "PUT" | "DELETE" | "CONNECT" | "OPTIONS" | "TRACE" | "PATCH" => {
            return Err(Status::MethodNotAllowed);
        }
        other if is_token(other) => return Err(Status::NotImplemented),
        _ => return Err(Status::BadRequest),
    };
    // RFC 9112 section 6.1 allows that of whoever does not understand an encoding.
    if fields.encoded {
        return Err(Status::NotImplemented);
    }
    let body = fields.body.unwrap_or(0);
    if body > MAX_BODY {
        return Err(Status::ContentTooLarge);
    }
    let keep_alive = !fields.close && (newer || fields.keep);
    let awaits_word = newer && fields.awaits_word;
    let Fields { part, conditions, .. } = fields;
    let (path, query) = (path(target)?, query(target).into());
    let request = Request { head_only, path, query, keep_alive, part, conditions };
    Ok((request, body, awaits_word))
}

fn fields<'a>(lines: impl Iterator<Item = &'a str>) -> Result<Fields, Status> {
    let mut out = Fields::default();
    for line in lines.take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').ok_or(Status::BadRequest)?;
        if !is_token(name) || !is_plain(value) {
            return Err(Status::BadRequest);
        }
        let value = value.trim_matches([' ', '\t']);
        match name.to_ascii_lowercase().as_str() {
            "host" if is_authority(value) => out.hosts += 1,
            "host" => return Err(Status::BadRequest),
            "connection" => {
                let says = |word| value.split(',').any(|it| it.trim().eq_ignore_ascii_case(word));
                out.close |= says("close");
                out.keep |= says("keep-alive");
            }
            "content-length" => {
                let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
                let length = value.parse().ok().filter(|_| digits).ok_or(Status::BadRequest)?;
                if out.body.replace(length).is_some_and(|other| other != length) {
                    return Err(Status::BadRequest);
                }
            }
            "transfer-encoding" => out.encoded = true,
            "expect" => out.awaits_word |= value.eq_ignore_ascii_case("100-continue"),
            "range" => out.part = part(value),
            // Others mean nothing here.
            name => drop(out.conditions.take(name, value)),
        }
    }
    Ok(out)
}

/// Whether it has none of the octets that control something: no zero, and no carriage return alone, which
/// another reader may take for the end of the line (RFC 9112 section 2.2, RFC 9110 section 5.5).
fn is_plain(text: &str) -> bool {
    !text.bytes().any(|byte| byte.is_ascii_control() && byte != b'\t')
}

/// Whether it is a token (RFC 9110 section 5.6.2).
fn is_token(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(good)
}

/// Whether it has only what a host and a port are made of (RFC 3986 section 3.2).
fn is_authority(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=%:[]".contains(&byte);
    text.bytes().all(good)
}

/// A range that can be served. Others are ignored, as they may be (RFC 9110 section 14.2).
fn part(value: &str) -> Option<Part> {
    let (unit, ranges) = value.split_once('=')?;
    // A list may have empty elements (RFC 9110 section 5.6.1.2).
    let blank = [' ', '\t'];
    let mut ranges = ranges.split(',').map(|it| it.trim_matches(blank)).filter(|it| !it.is_empty());
    let (Some(range), None) = (ranges.next(), ranges.next()) else { return None };
    let (first, last) = range.split_once('-').filter(|_| unit.eq_ignore_ascii_case("bytes"))?;
    match (first, last) {
        ("", count) => Some(Part::Last(number(count)?)),
        (first, "") => Some(Part::From(number(first)?, None)),
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(Part::From(first, Some(last)))
        }
    }
}

/// A number of decimal digits; one that is larger than any file is as good as the largest (RFC 9110 section
/// 14.1.2).
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

/// The path of a target (RFC 9112 section 3.2), decoded and made plain.
fn path(target: &str) -> Result<String, Status> {
    let target = target.split(['?', '#']).next().unwrap_or_default();
    let encoded = match after_scheme(target) {
        Some(rest) => rest.find('/').map_or("/", |slash| &rest[slash..]),
        None => target,
    };
    if !encoded.starts_with('/') {
        return Err(Status::BadRequest);
    }
    let decoded = decode(encoded).ok_or(Status::BadRequest)?;
    // A name with a zero is no name of a file, and one that leads upwards is not answered at all.
    if decoded.contains('\0') || decoded.split('/').any(|part| part == "..") {
        return Err(Status::BadRequest);
    }
    let folder = decoded.ends_with('/') || decoded.ends_with("/.");
    let parts: Vec<_> = decoded.split('/').filter(|it| !it.is_empty() && *it != ".").collect();
    let mut plain = format!("/{}", parts.join("/"));
    if folder && !parts.is_empty() {
        plain.push('/');
    }
    Ok(plain)
}

/// The query of a target with its question mark, if it can be said again.
fn query(target: &str) -> &str {
    let target = target.split('#').next().unwrap_or_default();
    let query = target.find('?').map_or("", |at| &target[at..]);
    if query.is_ascii() { query } else { "" }
}

/// What follows "http://", in whatever case (RFC 3986 section 3.1).
pub(super) fn after_scheme(url: &str) -> Option<&str> {
    const SCHEME: &str = "http://";
    let begins = url.get(..SCHEME.len())?.eq_ignore_ascii_case(SCHEME);
    begins.then(|| &url[SCHEME.len()..])
}

/// Undoes percent-encoding.
fn decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    let digit = |bytes: &mut std::str::Bytes<'_>| (bytes.next()? as char).to_digit(16);
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => (digit(&mut bytes)? << 4 | digit(&mut bytes)?) as u8,
            byte => byte,
        });
    }
    String::from_utf8(out).ok()
}

/// What there is to say about a response, beside its content.
#[derive(Clone, Debug, Default)]
pub(crate) struct Head<'a> {
    /// Media type of the content.
    pub(crate) media_type: &'a str,
    /// Octets of the content, though they may not be sent.
    pub(crate) length: u64,
    /// Of a part: which, and of how many octets.
    pub(crate) part: Option<(Range<u64>, u64)>,
    /// When the file was changed, and the tag of this version.
    pub(crate) version: Version<'a>,
    /// Where it has moved to.
    pub(crate) location: Option<&'a str>,
    /// Whether the connection stays.
    pub(crate) keep_alive: bool,
}

impl Head<'_> {
    /// The head of the response, as octets of the stream; `now` is for its date.
    pub(crate) fn write(&self, status: Status, now: SystemTime) -> Vec<u8> {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
        let mut out =
            format!("HTTP/1.1 {}\r\nDate: {}\r\nServer: quipu\r\n", status.line(), date(now));
        // Writing into a string does not fail.
        let mut field = |name: &str, value: &dyn std::fmt::Display| {
            let _ = write!(out, "{name}: {value}\r\n");
        };
        if status != Status::NotModified {
            field("Content-Length", &self.length);
            field("Content-Type", &self.media_type);
            field("Accept-Ranges", &"bytes");
        }
        match (&self.part, status) {
            (Some((range, whole)), Status::PartialContent) => field(
                "Content-Range",
                &format_args!("bytes {}-{}/{whole}", range.start, range.end.saturating_sub(1)),
            ),
            (Some((_, whole)), Status::RangeNotSatisfiable) => {
                field("Content-Range", &format_args!("bytes */{whole}"));
            }
            _ => {}
        }
        if let Some(changed) = self.version.date() {
            field("Last-Modified", &date(changed));
        }
        if let Some(tag) = self.version.tag {
            field("ETag", &tag);
        }
        if let Some(location) = self.location {
            field("Location", &location);
        }
        if status == Status::MethodNotAllowed {
            field("Allow", &"GET, HEAD");
        }
        field("Connection", &if self.keep_alive { "keep-alive" } else { "close" });
        out.push_str("\r\n");
        out.into_bytes()
    }
}

const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DAY: u64 = 86_400;

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_of(year: u64, month: usize) -> u64 {
    match month {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

/// A date as HTTP writes it (RFC 9110 section 5.6.7), of seconds since 1970.
fn date(seconds: u64) -> String {
    let (mut day, clock) = (seconds / DAY, seconds % DAY);
    let weekday = DAYS[(day % 7) as usize];
    let mut year = 1970;
    loop {
        let days = if is_leap(year) { 366 } else { 365 };
        if day < days {
            break;
        }
        (day, year) = (day - days, year + 1);
    }
    let mut month = 0;
    while day >= days_of(year, month) {
        day -= days_of(year, month);
        month += 1;
    }
    let (hours, minutes, seconds) = (clock / 3600, clock / 60 % 60, clock % 60);
    let month = MONTHS[month];
    format!("{weekday}, {:02} {month} {year} {hours:02}:{minutes:02}:{seconds:02} GMT", day + 1)
}

/// Reads a date in any of the three formats of HTTP (RFC 9110 section 5.6.7), of which [`date`] writes one:
/// "Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT" and "Sun Nov  6 08:49:37 1994".
pub(super) fn parse_date(text: &str) -> Option<u64> {
    let words: Vec<_> = text.split([' ', ',', '-']).filter(|word| !word.is_empty()).collect();
    let (day, name, year, clock) = match words[..] {
        [_, day, month, year, clock, "GMT"] => (day, month, year, clock),
        [_, month, day, clock, year] => (day, month, year, clock),
        _ => return None,
    };
    let month = MONTHS.iter().position(|month| *month == name)?;
    let day: u64 = day.parse().ok()?;
    // Of a year of two digits: no file is older than 1970.
    let year = match (year.len(), year.parse::<u64>().ok()?) {
        (2, year) => year + if year < 70 { 2000 } else { 1900 },
        (_, year) => year,
    };
    let mut clock = clock.split(':').map(|part| part.parse::<u64>().ok());
    let (hours, minutes, seconds) = (clock.next()??, clock.next()??, clock.next()??);
    let fits = (1970..=9999).contains(&year) && (1..=days_of(year, month)).contains(&day);
    if !fits || hours > 23 || minutes > 59 || seconds > 60 || clock.next().is_some() {
        return None;
    }
    let years: u64 = (1970..year).map(|year| if is_leap(year) { 366 } else { 365 }).sum();
    let months: u64 = (0..month).map(|month| days_of(year, month)).sum();
    Some((years + months + day - 1) * DAY + hours * 3600 + minutes * 60 + seconds)
}

/// The media type that goes with the end of a name.
pub(crate) fn media_type(name: &str) -> &'static str {
    let end = name.rsplit_once('.').map(|(_, end)| end.to_ascii_lowercase()).unwrap_or_default();
    match end.as_str() {
        "html" | "htm" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "txt" | "md" | "rs" | "c" | "h" | "toml" | "log" => "text/plain; charset=utf-8",
        "json" => "application/json",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "ico" => "image/x-icon",
        "pdf" => "application/pdf",
        "wasm" => "application/wasm",
        _ => "application/octet-stream",
    }
}

/// Text as HTML shows it.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A path as a link names it.
pub(crate) fn encode(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte) {
            out.push(byte as char);
        } else {
            // Writing into a string does not fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
