//! A server and its clients, which are queue pairs too, on UDP links: no right is needed.

use std::sync::atomic::AtomicBool;
use std::thread::scope;

use clap::Parser;
use quipu::qpip::QpipConfig;
use quipu::{Completion, Config};

use super::super::http::Status;
use super::super::stamp::Stamp;
use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: Options,
}

fn adapter() -> Adapter {
    let qpip = QpipConfig::new("udp:127.0.0.1:0".parse().unwrap());
    let address = Some([127, 0, 0, 1].into());
    let config = Config { address, counters: false, qpip: Some(qpip), ..Config::default() };
    Adapter::open_with(config).unwrap()
}

/// A client with one connection.
struct Client {
    qp: TcpQueuePair,
    cq: CompletionQueue,
    memory: MemoryRegion,
    got: Vec<u8>,
}

const LEN: usize = 64 << 10;
/// Receives that it has posted.
const PLACES: usize = 4;

impl Client {
    fn connect(adapter: &Adapter, to: SocketAddr) -> Self {
        let (pd, cq) =
            (adapter.protection_domain().unwrap(), adapter.completion_queue(64).unwrap());
        let qp = pd.queue_pair(&cq, &cq).build_tcp().unwrap();
        let memory = pd.register((PLACES + 1) * LEN, Access::LOCAL_WRITE).unwrap();
        let client = Self { qp, cq, memory, got: Vec::new() };
        (0..PLACES).for_each(|place| client.post(place));
        let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
        client.qp.connect(to, &settings).unwrap();
        client
    }

    fn post(&self, place: usize) {
        let room = [self.memory.sge(place * LEN, LEN).unwrap()];
        self.qp.post_recv(place as u64, &room).unwrap();
    }

    /// Waits for what completes next; what has come, if it was a receive.
    fn next(&self) -> Vec<u8> {
        let mut out = [Completion::default()];
        self.cq.wait(&mut out).unwrap();
        assert_eq!(out[0].status, WcStatus::Success);
        if out[0].wr_id == SEND {
            return Vec::new();
        }
        let place = out[0].wr_id as usize;
        let came = self.memory.to_vec(place * LEN, out[0].byte_len as usize).unwrap();
        self.post(place);
        came
    }

    fn send(&self, text: &str) {
        self.memory.write(PLACES * LEN, text.as_bytes()).unwrap();
        let memory = [self.memory.sge(PLACES * LEN, text.len()).unwrap()];
        self.qp.post_send(&Work::send(&memory).id(SEND)).unwrap();
    }

    /// Receives until what has come is enough; then that, to be looked at.
    fn receive(&mut self, enough: impl Fn(&[u8]) -> bool) -> String {
        while !enough(&self.got) {
            let came = self.next();
            self.got.extend(came);
        }
        String::from_utf8_lossy(&std::mem::take(&mut self.got)).into_owned()
    }

    /// A request, and its response as far as the end of `end`.
    fn ask(&mut self, text: &str, end: &str) -> String {
        self.send(text);
        self.receive(|got| got.ends_with(end.as_bytes()))
    }
}

/// How long clients of these servers may be silent while others wait: longer than a loaded machine keeps one
/// from asking.
const SILENT: Duration = Duration::from_secs(1);

/// Runs a server with these words on its command line while `clients` does what it does.
fn served(words: &[&str], clients: impl FnOnce(&Adapter, SocketAddr) + Send) {
    served_patiently(SILENT, words, clients);
}

/// The same with another patience.
fn served_patiently(
    silent: Duration,
    words: &[&str],
    clients: impl FnOnce(&Adapter, SocketAddr) + Send,
) {
    let change = |server: &mut Server| server.patience = Patience { silent, ..PATIENCE };
    served_by(change, words, clients);
}

/// The same by a server of which something is changed before.
fn served_by(
    change: impl FnOnce(&mut Server),
    words: &[&str],
    clients: impl FnOnce(&Adapter, SocketAddr) + Send,
) {
    let words = [&["serve", "--quiet", "--port", "80"], words].concat();
    let options = Line::try_parse_from(words).unwrap().options;
    let (here, there) = (adapter(), adapter());
    let mut server = Server::new(&there, &options).unwrap();
    change(&mut server);
    let (bell, stop) = (server.bell().unwrap(), AtomicBool::new(false));
    let to = SocketAddr::new(there.info().unwrap().addresses[0], 80);
    scope(|scope| {
        let client = scope.spawn(move || clients(&here, to));
        scope.spawn(|| {
            let outcome = client.join();
            stop.store(true, Ordering::Release);
            bell.flush().unwrap();
            outcome.unwrap();
        });
        server.run(&stop).unwrap();
    });
}

const GET: &str = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";

#[test]
fn requests_on_one_connection_are_answered_in_order() {
    served(&["--text", "knots"], |adapter, to| {
        let mut client = Client::connect(adapter, to);
        let first = client.ask(GET, "knots");
        assert!(first.starts_with("HTTP/1.1 200 OK\r\n"), "{first}");
        // Several at once, the last cut in the middle.
        client.send(&format!("{GET}GET /x HTTP/1.1\r\nHost: a\r\n\r\nHEAD / HT"));
        let both = client.receive(|got| {
            let text = String::from_utf8_lossy(got);
            text.contains("knots") && text.contains(" 404 ") && text.ends_with("</h1>\n")
        });
        assert!(both.find("knots").unwrap() < both.find(" 404 ").unwrap());
        let last = client.ask("TP/1.0\r\n\r\n", "\r\n\r\n");
        assert!(last.contains("Content-Length: 5\r\n") && last.contains("Connection: close"));
        // It was asked not to stay.
        client.qp.wait_peer_closed().unwrap();
        client.qp.close().unwrap();
        client.qp.wait_closed().unwrap();
    });
}

#[test]
fn what_is_no_request_is_refused_and_the_connection_closed() {
    served(&[], |adapter, to| {
        for (text, status) in [
            ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx", "405"),
            ("nonsense\r\n\r\n", "400"),
            ("GET /%2e%2e/etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", "400"),
        ] {
            let mut client = Client::connect(adapter, to);
            let answer = client.ask(text, "</h1>\n");
            assert_eq!(&answer[9..12], status, "{text:?}");
            // People are told too.
            assert!(answer.contains(&format!("<h1>{status} ")), "{answer}");
            // What is still sent does not disturb the end.
            client.send("and more");
            client.qp.wait_peer_closed().unwrap();
            client.qp.close().unwrap();
            client.qp.wait_closed().unwrap();
        }
    });
}

#[test]
fn a_client_that_has_closed_its_direction_gets_everything() {
    let name = std::env::temp_dir().join(format!("quipu-serve-{}", std::process::id()));
    std::fs::create_dir(&name).unwrap();
    // Longer than what is under way at once.
    let content: Vec<u8> =
        (0..SENDS * PIECE as usize + 12_345).map(|at| (at % 251) as u8).collect();
    std::fs::write(name.join("long"), &content).unwrap();
    served(&[name.to_str().unwrap()], |adapter, to| {
        let client = Client::connect(adapter, to);
        client.send("GET /long HTTP/1.1\r\nHost: a\r\n\r\n");
        client.qp.close().unwrap();
        let mut got = Vec::new();
        while got.len() < content.len() || !got.ends_with(&content[content.len() - 1000..]) {
            got.extend(client.next());
        }
        let head = got.len() - content.len();
        assert!(got[..head].ends_with(b"\r\n\r\n") && got[head..] == content);
        client.qp.wait_closed().unwrap();
    });
    std::fs::remove_dir_all(&name).unwrap();
}

#[test]
fn a_new_client_takes_the_place_of_the_one_that_is_quiet_for_longest() {
    served(&["--text", "knots", "--connections", "2"], |adapter, to| {
        let mut clients = Vec::new();
        for _ in 0..3 {
            let mut client = Client::connect(adapter, to);
            client.ask(GET, "knots");
            clients.push(client);
        }
        // It was asked to leave before.
        clients[0].qp.wait_peer_closed().unwrap();
        assert!(clients[0].qp.wait_closed().is_err());
    });
}

#[test]
fn a_burst_of_clients_is_served_one_after_the_other_and_none_is_reset() {
    // Nobody has to leave for being slow.
    let words = ["--text", "knots", "--connections", "4"];
    served_patiently(Duration::from_secs(60), &words, |adapter, to| {
        scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    let mut client = Client::connect(adapter, to);
                    // All are there before anybody has asked for anything.
                    std::thread::sleep(Duration::from_millis(60));
                    client.ask(GET, "knots");
                    client.qp.close().unwrap();
                    client.qp.wait_closed().unwrap();
                });
            }
        });
    });
}

#[test]
fn a_silent_client_does_not_keep_the_others_out() {
    assert!(Line::try_parse_from(["serve", "--connections", "1"]).is_err());
    served(&["--text", "knots", "--connections", "2"], |adapter, to| {
        let silent = [(); 2].map(|()| Client::connect(adapter, to));
        Client::connect(adapter, to).ask(GET, "knots");
        let [first, _] = silent;
        assert!(first.qp.wait_closed().is_err());
    });
}

#[test]
fn clients_that_do_not_read_do_not_keep_the_others_out() {
    // More than there are receives for.
    let text = "x".repeat(4 * PLACES * LEN) + "knots";
    served(&["--text", &text, "--connections", "2"], |adapter, to| {
        let unread = [(); 2].map(|()| {
            let unread = Client::connect(adapter, to);
            unread.send(GET);
            while unread.next().is_empty() {}
            unread
        });
        // They have all places, and one has to leave it.
        Client::connect(adapter, to).ask(GET, "knots");
        drop(unread);
    });
}

#[test]
fn who_reads_keeps_its_place_however_slowly() {
    // At twice the least rate, for longer than anybody may do nothing.
    let text = "x".repeat(4 * PLACES * LEN) + "knots";
    served(&["--text", &text, "--connections", "2"], |adapter, to| {
        let mut reader = Client::connect(adapter, to);
        reader.send(GET);
        let silent = Client::connect(adapter, to);
        // It waits for the place of the silent one, who is there for as long as nobody may be.
        let (begun, mut got) = (Instant::now(), 0);
        scope(|scope| {
            scope.spawn(|| Client::connect(adapter, to).ask(GET, "knots"));
            while begun.elapsed() < 6 * SILENT {
                got += reader.next().len();
                let due = Duration::from_millis(got as u64 * 1000 / (2 * PATIENCE.rate));
                std::thread::sleep(due.saturating_sub(begun.elapsed()).min(SILENT));
            }
        });
        assert!(silent.qp.wait_closed().is_err());
        reader.receive(|got| got.ends_with(b"knots"));
    });
}

#[test]
fn what_is_not_all_of_a_file_ends_with_a_reset() {
    let name = std::env::temp_dir().join(format!("quipu-serve-short-{}", std::process::id()));
    std::fs::create_dir(&name).unwrap();
    let file = std::fs::File::create(name.join("file")).unwrap();
    file.set_len(8 << 20).unwrap();
    served(&[name.to_str().unwrap()], |adapter, to| {
        let client = Client::connect(adapter, to);
        client.send("GET /file HTTP/1.1\r\nHost: a\r\n\r\n");
        while client.next().is_empty() {}
        file.set_len(1).unwrap();
        let mut out = [Completion::default()];
        loop {
            client.cq.wait(&mut out).unwrap();
            if out[0].status != WcStatus::Success {
                break;
            }
            client.post(out[0].wr_id as usize);
        }
        assert!(client.qp.wait_closed().is_err(), "it was not all");
    });
    std::fs::remove_dir_all(&name).unwrap();
}

#[test]
fn a_long_path_is_told_in_part() {
    assert_eq!(shortened("/a\nb"), "/a\\nb");
    assert_eq!(shortened(&"x".repeat(TOLD)).len(), TOLD);
    assert_eq!(shortened(&"x".repeat(8000)), "x".repeat(TOLD) + "...");
}

#[test]
fn a_file_is_read_only_for_those_who_want_all_of_it() {
    let name = std::env::temp_dir().join(format!("quipu-serve-lazy-{}", std::process::id()));
    std::fs::create_dir(&name).unwrap();
    std::fs::write(name.join("file"), vec![b'x'; 100_000]).unwrap();
    let file = std::fs::File::options().write(true).open(name.join("file")).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(10)).unwrap();
    // What has just changed is not kept.
    std::thread::sleep(Duration::from_millis(2100));
    let adapter = adapter();
    let memory = Memory::new(&adapter.protection_domain().unwrap());
    let mut source = Source::folder(memory, &name).unwrap();
    let mut ask = |line: &str, fields: &str| {
        let mut parser = super::Parser::default();
        parser.add(format!("{line} /file HTTP/1.1\r\nHost: a\r\n{fields}\r\n").as_bytes());
        let response = answer(&mut source, &parser.next().unwrap());
        (response.status, response.len, source.memory.held())
    };
    assert_eq!(ask("HEAD", ""), (Status::Ok, 100_000, 0));
    assert_eq!(ask("GET", "Range: bytes=0-0\r\n"), (Status::PartialContent, 1, 0));
    let late = "If-Modified-Since: Fri, 31 Dec 9999 23:59:59 GMT\r\n";
    assert_eq!(ask("GET", late).0, Status::NotModified);
    // A part is one of the version that is meant, or there is all, or nothing.
    let part = |condition: &str| format!("Range: bytes=1-2\r\n{condition}\r\n");
    let tag = Stamp::of(&std::fs::metadata(name.join("file")).unwrap()).tag();
    assert_eq!(ask("GET", &part(&format!("If-Range: {tag}"))), (Status::PartialContent, 2, 0));
    assert_eq!(ask("HEAD", &part(&format!("If-Range: {tag}"))), (Status::Ok, 100_000, 0));
    assert_eq!(ask("GET", &part(&format!("If-Match: {tag}"))), (Status::PartialContent, 2, 0));
    assert_eq!(ask("GET", &part("If-Match: \"x\"")).0, Status::PreconditionFailed);
    let early = "If-Unmodified-Since: Thu, 01 Jan 1970 00:00:00 GMT";
    assert_eq!(ask("GET", &part(early)).0, Status::PreconditionFailed);
    assert_eq!(ask("GET", &part(&format!("If-None-Match: {tag}"))).0, Status::NotModified);
    assert_eq!(ask("HEAD", "If-Range: \"x\"\r\nRange: bytes=1-2\r\n"), (Status::Ok, 100_000, 0));
    assert_eq!(ask("GET", &part("If-Range: \"x\"")).1, 100_000);
    let (status, len, held) = ask("GET", "");
    assert!(status == Status::Ok && len == 100_000 && held >= 100_000);
    std::fs::remove_dir_all(&name).unwrap();
}

/// Where nobody reads what is told any more.
struct Full;

impl Write for Full {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::StorageFull.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn who_cannot_tell_of_requests_answers_them_all_the_same() {
    let change = |server: &mut Server| server.log = Some(Box::new(Full));
    served_by(change, &["--text", "knots"], |adapter, to| {
        let mut client = Client::connect(adapter, to);
        for _ in 0..2 {
            client.ask(GET, "knots");
        }
    });
}

#[test]
fn the_head_of_an_answer_takes_its_first_piece_along() {
    let text = "x".repeat(4 * SMALL_PIECE as usize);
    let options = Line::try_parse_from(["serve", "--quiet", "--text", &text]).unwrap().options;
    let (here, there) = (adapter(), adapter());
    let mut server = Server::new(&there, &options).unwrap();
    // As sparing as can be.
    server.source.memory = Memory::with_plenty(&server.pd, 0);
    let to = SocketAddr::new(there.info().unwrap().addresses[0], 80);
    let client = Client::connect(&here, to);
    client.send(GET);
    let mut out = [Completion::default()];
    server.cq.wait(&mut out).unwrap();
    server.completed(&out[0]);
    let sending = &server.connections[&out[0].qp_num].sending;
    assert_eq!(sending[1].0, SMALL_PIECE);
    assert_eq!(sending.len(), 2, "and then one at a time");
}
