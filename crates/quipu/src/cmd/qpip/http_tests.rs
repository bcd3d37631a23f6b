//! Requests as clients send them, well and badly, and the heads of responses.

use super::*;

fn one(text: &str) -> Result<Request, Status> {
    one_of_octets(text.as_bytes())
}

fn one_of_octets(text: &[u8]) -> Result<Request, Status> {
    let mut parser = Parser::default();
    parser.add(text);
    let found = parser.next().expect("a whole request");
    assert!(parser.next().is_none());
    found.map_err(|refusal| {
        assert_eq!(refusal.head_only, text.starts_with(b"HEAD "));
        refusal.status
    })
}

fn get(target: &str) -> Result<String, Status> {
    one(&format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")).map(|request| request.path)
}

#[test]
fn a_request_is_read_however_it_is_cut() {
    let text =
        b"GET /a%20b?x=1 HTTP/1.1\r\nHost: q\r\nUser-Agent: curl/8\r\nRange: bytes=2-5\r\n\r\n";
    for cut in 0..text.len() {
        let mut parser = Parser::default();
        parser.add(&text[..cut]);
        assert_eq!(parser.next(), None);
        parser.add(&text[cut..]);
        let request = parser.next().unwrap().unwrap();
        assert_eq!((request.path.as_str(), request.head_only), ("/a b", false));
        assert_eq!(request.part, Some(Part::From(2, Some(5))));
        assert!(request.keep_alive);
        assert_eq!(parser.next(), None);
    }
}

#[test]
fn requests_in_a_row_come_one_by_one() {
    let mut parser = Parser::default();
    parser.add(b"\r\nGET /1 HTTP/1.1\nHost: a\n\nHEAD /2 HTTP/1.0\r\n\r\nGET /3 HT");
    assert_eq!(parser.next().unwrap().unwrap().path, "/1");
    let second = parser.next().unwrap().unwrap();
    assert_eq!((second.path.as_str(), second.head_only, second.keep_alive), ("/2", true, false));
    assert_eq!(parser.next(), None);
    parser.add(b"TP/1.1\r\nHost: a\r\nConnection: foo, Close\r\n\r\n");
    assert!(!parser.next().unwrap().unwrap().keep_alive);
}

#[test]
fn a_body_is_thrown_away() {
    let mut parser = Parser::default();
    parser.add(b"GET /1 HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\nabc");
    assert_eq!(parser.next().unwrap().unwrap().path, "/1");
    assert_eq!(parser.next(), None);
    parser.add(b"defGET /2 HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(parser.next().unwrap().unwrap().path, "/2");
    let long = "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n";
    assert_eq!(one(long), Err(Status::ContentTooLarge));
}

#[test]
fn old_clients_may_keep_the_connection() {
    assert!(!one("GET / HTTP/1.0\r\n\r\n").unwrap().keep_alive);
    assert!(one("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").unwrap().keep_alive);
}

#[test]
fn what_is_wrong_is_refused_with_the_word_for_it() {
    let refused = [
        ("GET / HTTP/1.1\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", Status::BadRequest),
        ("GET /\r\n\r\n", Status::BadRequest),
        ("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", Status::VersionNotSupported),
        ("GET / FTP/1.0\r\nHost: a\r\n\r\n", Status::BadRequest),
        ("POST / HTTP/1.1\r\nHost: a\r\n\r\n", Status::MethodNotAllowed),
        ("BREW / HTTP/1.1\r\nHost: a\r\n\r\n", Status::NotImplemented),
        ("G(T / HTTP/1.1\r\nHost: a\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.1\r\nHost: a\r\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: \x7f\r\n\r\n", Status::BadRequest),
        ("GET /a\rb HTTP/1.1\r\nHost: a\r\n\r\n", Status::BadRequest),
        ("GET /a\tb HTTP/1.1\r\nHost: a\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n", Status::BadRequest),
        (
            "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            Status::BadRequest,
        ),
        ("GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", Status::NotImplemented),
        (
            "PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
            Status::MethodNotAllowed,
        ),
        (
            "HEAD / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
            Status::NotImplemented,
        ),
        ("HEAD /../x HTTP/1.1\r\nHost: a\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/0.9\r\nHost: a\r\n\r\n", Status::VersionNotSupported),
        ("GET / HTTP/x\r\nHost: a\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.10\r\nHost: a\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n", Status::BadRequest),
        ("GET / HTTP/1.1\r\nHost: a<>\r\n\r\n", Status::BadRequest),
    ];
    for (text, status) in refused {
        assert_eq!(one(text), Err(status), "{text:?}");
    }
    assert!(one("GET / HTTP/1.1\r\nHost: a\r\nX: a\tb\r\n\r\n").is_ok());
    let octets = b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_eq!(one_of_octets(octets), Err(Status::BadRequest));
}

#[test]
fn a_head_without_end_is_not_kept() {
    let mut parser = Parser::default();
    parser.add(b"GET / HTTP/1.1\r\n");
    let mut steps = 0;
    while parser.next().is_none() {
        parser.add(&[b'a'; 1000]);
        steps += 1;
        assert!(steps < 20);
    }
    let status = |mut parser: Parser| parser.next().unwrap().unwrap_err().status;
    assert_eq!(status(parser), Status::HeadTooLarge);
    let whole = |text: String| {
        let mut parser = Parser::default();
        parser.add(text.as_bytes());
        status(parser)
    };
    let long = "a".repeat(MAX_HEAD);
    assert_eq!(whole(format!("GET / HTTP/1.1\r\nHost: {long}\r\n\r\n")), Status::HeadTooLarge);
    assert_eq!(whole(format!("GET /{long} HTTP/1.1\r\nHost: a\r\n\r\n")), Status::UriTooLong);
    assert_eq!(whole(format!("GET /{long}")), Status::UriTooLong);
}

#[test]
fn who_is_answered_before_it_has_sent_all_is_not_understood_any_more() {
    let ask = |body: &str| {
        let fields = "Host: a\r\nContent-Length: 3\r\nExpect: 100-Continue\r\n\r\n";
        one(&format!("GET / HTTP/1.1\r\n{fields}{body}")).unwrap().keep_alive
    };
    assert!(!ask("") && !ask("ab") && ask("abc"));
    assert!(one("GET / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n\r\n").unwrap().keep_alive);
}

#[test]
fn what_means_nothing_here_is_let_in() {
    let name = b"GET / HTTP/1.1\r\nHost: a\r\nX-Name: caf\xe9\r\n\r\n";
    assert!(one_of_octets(name).is_ok());
    assert!(one("GET / HTTP/1.2\r\nHost: a\r\n\r\n").unwrap().keep_alive);
    for host in ["", "[::1]:80", "a-b.example:8000", "%41"] {
        assert!(one(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")).is_ok(), "{host}");
    }
    assert_eq!(one("GET /a?x=%20 HTTP/1.0\r\n\r\n").unwrap().query, "?x=%20");
    assert_eq!(one("GET /a#?x HTTP/1.0\r\n\r\n").unwrap().query, "");
}

#[test]
fn no_path_leads_out_of_the_folder() {
    assert_eq!(get("/").unwrap(), "/");
    assert_eq!(get("//a/./b//").unwrap(), "/a/b/");
    assert_eq!(get("http://host:80/a").unwrap(), "/a");
    assert_eq!(get("http://host").unwrap(), "/");
    assert_eq!(get("HTTP://host?a=/b").unwrap(), "/");
    assert_eq!(get("/%E2%82%AC?q#f").unwrap(), "/€");
    for bad in [
        "a",
        "*",
        "/..",
        "/a/../b",
        "/%2e%2e/etc",
        "/%2E./x",
        "/a%00b",
        "/%",
        "/%4",
        "/%zz",
        "/%ff",
    ] {
        assert_eq!(get(bad), Err(Status::BadRequest), "{bad}");
    }
}

#[test]
fn a_part_is_what_there_is_of_it() {
    assert_eq!(part("bytes=0-0").unwrap().of(10), Some(0..1));
    assert_eq!(part("bytes=5-").unwrap().of(10), Some(5..10));
    assert_eq!(part("bytes=5-99").unwrap().of(10), Some(5..10));
    assert_eq!(part("bytes=-3").unwrap().of(10), Some(7..10));
    assert_eq!(part("bytes=-30").unwrap().of(10), Some(0..10));
    assert_eq!(part("bytes=-0").unwrap().of(10), None);
    assert_eq!(part("bytes=10-").unwrap().of(10), None);
    assert_eq!(part("bytes=0-18446744073709551615").unwrap().of(10), Some(0..10));
    // However the unit is written, whatever blanks and empty elements the list has, and however large.
    for same in ["Bytes=5-7", "BYTES=5-7", "bytes= 5-7", "bytes=5-7 ,", "bytes=, \t,5-7\t, "] {
        assert_eq!(part(same), Some(Part::From(5, Some(7))), "{same}");
    }
    let huge = "99999999999999999999999";
    assert_eq!(part(&format!("bytes=0-{huge}")).unwrap().of(10), Some(0..10));
    assert_eq!(part(&format!("bytes=-{huge}")).unwrap().of(10), Some(0..10));
    assert_eq!(part(&format!("bytes={huge}-")).unwrap().of(10), None);
    assert_eq!(part(&format!("bytes={huge}-{huge}")).unwrap().of(10), None);
    for ignored in [
        "bytes=5-4",
        "bytes=1-2,4-5",
        "lines=1-2",
        "bytes=a-",
        "bytes=-",
        "bytes=",
        "bytes=,",
        "bytes=+1-2",
        "bytes=1 - 2",
        "bytes =1-2",
        "bytes",
    ] {
        assert_eq!(part(ignored), None, "{ignored}");
    }
}

#[test]
fn dates_are_those_of_the_calendar() {
    // RFC 9110 section 5.6.7 has this one as its example.
    let example = "Sun, 06 Nov 1994 08:49:37 GMT";
    assert_eq!(date(784_111_777), example);
    assert_eq!(parse_date(example), Some(784_111_777));
    assert_eq!(date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
    assert_eq!(date(951_782_400), "Tue, 29 Feb 2000 00:00:00 GMT");
    for seconds in (0..5_000_000_000).step_by(86_399 * 37) {
        assert_eq!(parse_date(&date(seconds)), Some(seconds));
    }
    // The old ones, too, and years of two digits.
    for old in ["Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"] {
        assert_eq!(parse_date(old), Some(784_111_777), "{old}");
    }
    assert_eq!(
        parse_date("Friday, 06-Nov-26 08:49:37 GMT").map(date).unwrap(),
        date(1_793_954_977)
    );
    for bad in [
        "",
        "Sun, 31 Feb 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994 08:49:37",
        "Sun, 06 Nov 1994 08:49:37:00 GMT",
        "Sun Nov 1994",
        "x, 1 Jan",
    ] {
        assert_eq!(parse_date(bad), None, "{bad}");
    }
}

#[test]
fn a_head_says_what_follows() {
    let head = Head {
        media_type: "text/plain",
        length: 5,
        part: Some((3..8, 10)),
        keep_alive: true,
        ..Head::default()
    };
    let at = UNIX_EPOCH + Duration::from_secs(784_111_777);
    let text = |head: &Head<'_>, status| String::from_utf8(head.write(status, at)).unwrap();
    assert_eq!(
        text(&head, Status::PartialContent),
        "HTTP/1.1 206 Partial Content\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nServer: quipu\r\n\
         Content-Length: 5\r\nContent-Type: text/plain\r\nAccept-Ranges: bytes\r\n\
         Content-Range: bytes 3-7/10\r\nConnection: keep-alive\r\n\r\n"
    );
    let unmet = text(&head, Status::RangeNotSatisfiable);
    assert!(unmet.contains("\r\nContent-Range: bytes */10\r\n"));
    let version = Version { tag: Some("\"a\""), changed: Some(784_111_777), may_change: false };
    let known = text(&Head { version, ..head.clone() }, Status::NotModified);
    let tagged = "\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\nETag: \"a\"\r\n";
    assert!(known.contains(tagged), "{known}");
    let closing = Head { keep_alive: false, ..head };
    let refused = text(&closing, Status::MethodNotAllowed);
    assert!(refused.contains("\r\nAllow: GET, HEAD\r\nConnection: close\r\n\r\n"));
    assert!(!text(&closing, Status::NotModified).contains("Content-Length"));
}

#[test]
fn names_survive_html_and_links() {
    assert_eq!(escape("<a href=\"x\">&'"), "&lt;a href=&quot;x&quot;&gt;&amp;&#39;");
    assert_eq!(encode("/a b/€"), "/a%20b/%E2%82%AC");
    assert_eq!(decode(&encode("/a b%/€?")).unwrap(), "/a b%/€?");
    assert_eq!(
        (media_type("a.HTML"), media_type("b")),
        ("text/html; charset=utf-8", "application/octet-stream")
    );
}
