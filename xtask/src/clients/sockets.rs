//! Rows of QPIP whose other end is a program that many people have: netcat, nginx and iperf3. Each works in
//! the network namespace of a `Net`.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::process::wait_until;
use crate::stage::Staged;

use super::hosts::Family;
use super::qpip::{Folder, Net, SIZES, check, noise, number_of, run, start};
use super::{LIMIT, Row};

/// How long nginx may take to write its log.
const LOGGED: Duration = Duration::from_secs(20);

/// All of them.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    for family in [Family::V4, Family::V6] {
        let row = |what: &str, run: fn(&Staged, &Net) -> Result<(), String>| Row {
            name: format!("two-hosts/{}/qpip/{what}", family.name()),
            run: Box::new(move || run(staged, &Net::new(family)?)),
        };
        rows.push(row("get-of-nginx", get_of_nginx));
        rows.push(row("nc/socket-of-queue-pair", nc_of_queue_pair));
        rows.push(row("nc/queue-pair-of-socket", queue_pair_of_nc));
        rows.push(row("iperf3/socket-of-queue-pair", iperf3_of_queue_pair));
        rows.push(row("iperf3/queue-pair-of-socket", queue_pair_of_iperf3));
    }
    rows
}

/// Octets that go one way: more than any window.
const LEN: usize = 16 << 20;
const PORT: &str = "5003";

/// A command whose input and output are files, and whose words to people are what is captured.
fn fed(command: &Command, from: &str, to: &str) -> Command {
    let script = "from=$1 to=$2; shift 2; exec \"$@\" 2>&1 <\"$from\" >\"$to\"";
    let mut fed = Command::new("sh");
    fed.args(["-c", script, "sh", from, to]).arg(command.get_program()).args(command.get_args());
    fed
}

/// What each of two ends reads and writes.
struct Files {
    folder: Folder,
    noise: Vec<u8>,
}

impl Files {
    fn new() -> Result<Self, String> {
        let files = Self { folder: Folder::new()?, noise: noise(LEN) };
        fs::write(files.path("noise"), &files.noise).map_err(|error| error.to_string())?;
        Ok(files)
    }

    fn path(&self, name: &str) -> String {
        self.folder.path(name).display().to_string()
    }

    /// Runs a server that says `ready`, and its client; each reads its input, and writes what must be the
    /// other's.
    fn exchange(
        &self,
        (server, server_reads, ready): (&Command, &str, &str),
        (client, client_reads): (&Command, &str),
    ) -> Result<(), String> {
        let [at_server, at_client] = ["at-server", "at-client"].map(|name| self.path(name));
        let server = start(fed(server, server_reads, &at_server), ready)?;
        let ended = run(fed(client, client_reads, &at_client))?;
        let server = server.finish(Instant::now() + LIMIT);
        check(server.success(), &server, "the server")?;
        for (from, to) in [(client_reads, at_server), (server_reads, at_client)] {
            let read = |name: &str| fs::read(name).map_err(|error| error.to_string());
            let (sent, came) = (read(from)?, read(&to)?);
            let what = format!("{} of {} octets came, or others", came.len(), sent.len());
            check(came == sent, &ended, &what)?;
        }
        Ok(())
    }
}

const NOTHING: &str = "/dev/null";

/// A client with a socket and a queue pair that listens give each other everything at the same time.
fn nc_of_queue_pair(staged: &Staged, net: &Net) -> Result<(), String> {
    let files = Files::new()?;
    let server = net.tool(staged, &["nc", "--listen", PORT]);
    let client = net.command("nc", &["-N", net.adapter(), PORT]);
    let noise = files.path("noise");
    for (client_reads, server_reads) in
        [(&*noise, &*noise), (&*noise, NOTHING), (NOTHING, &*noise), (NOTHING, NOTHING)]
    {
        files.exchange((&server, server_reads, "waiting"), (&client, client_reads))?;
    }
    Ok(())
}

/// A client with a queue pair and a socket that listens. This server ends when it hears the end of what
/// comes, whatever it has still to send: so one direction at a time.
fn queue_pair_of_nc(staged: &Staged, net: &Net) -> Result<(), String> {
    let files = Files::new()?;
    let server = net.command("nc", &["-n", "-v", "-N", "-l", net.kernel(), PORT]);
    let noise = files.path("noise");
    let sends = net.tool(staged, &["nc", net.kernel(), PORT]);
    files.exchange((&server, NOTHING, "istening"), (&sends, &noise))?;
    let receives = net.tool(staged, &["nc", "--no-input", net.kernel(), PORT]);
    files.exchange((&server, &noise, "istening"), (&receives, NOTHING))
}

/// What nginx needs to know in order to serve a folder as whoever started it.
fn nginx_settings(folder: &str, address: &str) -> String {
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|what| format!("{what}_temp_path {folder};"))
        .join(" ");
    format!(
        "daemon off; master_process off; pid {folder}/pid; error_log stderr notice;\n\
         events {{ }}\n\
         http {{ log_format request '$connection_requests'; access_log {folder}/log request;\n\
         {temporary}\n\
         server {{ listen {address}; root {folder}; sendfile on; autoindex on; }} }}\n"
    )
}

/// A queue pair fetches files from nginx, one by one; and a listing, which comes in chunks, and all files
/// over one connection.
fn get_of_nginx(staged: &Staged, net: &Net) -> Result<(), String> {
    let folder = Folder::new()?;
    let [settings, to] = ["nginx.conf", "fetched"].map(|name| folder.path(name));
    let address = match net.family() {
        Family::V4 => format!("{}:8080", net.kernel()),
        Family::V6 => format!("[{}]:8080", net.kernel()),
    };
    let text = nginx_settings(&folder.path("").display().to_string(), &address);
    fs::write(&settings, text).map_err(|error| error.to_string())?;
    let settings = settings.display().to_string();
    let script = "PATH=$PATH:/usr/sbin:/sbin; exec nginx -e stderr -c \"$1\" 2>&1";
    let _server = start(net.command("sh", &["-c", script, "sh", &settings]), "event method")?;
    for size in SIZES {
        let url = format!("http://{address}/{size}");
        let fetched = to.display().to_string();
        let ended = run(net.tool(staged, &["get", &url, "--output", &fetched]))?;
        let got = fs::read(&to).map_err(|error| error.to_string())?;
        let what = format!("{} of {size} octets came, or others", got.len());
        check(got == noise(size), &ended, &what)?;
    }
    let urls = std::iter::once("".into()).chain(SIZES.iter().map(usize::to_string));
    let urls: Vec<String> = urls.map(|name: String| format!("http://{address}/{name}")).collect();
    let fetched = to.display().to_string();
    let mut words = vec!["get", "--output", &fetched];
    words.extend(urls.iter().map(String::as_str));
    let ended = run(net.tool(staged, &words))?;
    let got = fs::read(&to).map_err(|error| error.to_string())?;
    let files: Vec<u8> = SIZES.into_iter().flat_map(noise).collect();
    let listing = got.strip_suffix(&files[..]).ok_or("  not all files came, or others")?;
    check(listing.trim_ascii_end().ends_with(b"</html>"), &ended, "no listing")?;
    // The number of each request on its connection.
    let log = || fs::read_to_string(folder.path("log")).unwrap_or_default();
    let requests = (1..=urls.len()).map(|number| format!("{number}\n")).collect::<String>();
    // The last line is written when its answer is on its way already.
    let logged = wait_until(Instant::now() + LOGGED, || log().ends_with(&requests));
    check(logged, &ended, &format!("not one connection: {:?}", log()))
}

/// Tests of iperf3, and how many octets each sends at least.
const TESTS: [(&[&str], u64); 9] = [
    (&["-n", "16M"], 16 << 20),
    (&["-n", "16M", "-R"], 16 << 20),
    (&["-n", "8M", "-P", "4", "-l", "10K"], 8 << 20),
    // Over when one of the two directions is.
    (&["-n", "8M", "--bidir"], 8 << 20),
    (&["-n", "4M", "-b", "40M", "-R"], 4 << 20),
    // How much a machine that stands still at times sends in a second nobody knows.
    (&["-u", "-t", "1", "-b", "20M"], 1),
    (&["-u", "-n", "1M", "-b", "20M", "-R"], 1 << 20),
    (&["-u", "-n", "1M", "-b", "20M", "-P", "3", "-l", "1000"], 1 << 20),
    (&["-u", "-t", "1", "-b", "20M", "--bidir"], 1),
];

/// One in so many octets that were sent has come at least, in each direction. Some datagrams may be lost, and
/// more where they come in a burst behind a moment in which the machine stood still; and iperf3 counts what
/// it has given to its sockets, and does not wait for the last octets.
const SHARE: u64 = 32;
/// How often a test is run of which less has come: such a moment may be at its very end.
const TRIES: u32 = 3;

/// Octets of all streams in each direction that a report tells apart: those that were sent, and those that
/// the receiver has counted.
fn moved(report: &str) -> Option<Vec<(u64, u64)>> {
    let bytes = |sum: &str| -> Option<u64> {
        let (_, sum) = report.split_once(&format!("\"{sum}\""))?;
        number_of(sum, "bytes")
    };
    let way =
        |of: &str| Some((bytes(&format!("sum_sent{of}"))?, bytes(&format!("sum_received{of}"))?));
    let back = way("_bidir_reverse");
    Some(std::iter::once(way("")?).chain(back).collect())
}

/// What is wrong with what has moved.
#[derive(Debug, PartialEq)]
enum Wrong {
    /// In any case.
    Always(&'static str),
    /// If it is so again and again.
    Again(&'static str),
}

/// Judges a report by how much is sent at least, and whether all of it has come when the test ends.
fn judge(report: &str, least: u64, all: bool) -> Result<(), Wrong> {
    let ways = moved(report).ok_or(Wrong::Always("no report"))?;
    if ways.iter().map(|(sent, _)| sent).sum::<u64>() < least {
        return Err(Wrong::Always("not all was sent"));
    }
    if all && ways.iter().any(|(_, came)| *came < least) {
        return Err(Wrong::Always("not all has come"));
    }
    match ways.iter().all(|(sent, came)| *came > 0 && *came >= sent / SHARE) {
        true => Ok(()),
        false => Err(Wrong::Again("nearly nothing has come")),
    }
}

/// Runs each test with a server that is there. A queue pair that receives a stream receives all of it.
fn measure(queue_pair_asks: bool, client: impl Fn(&[&str]) -> Command) -> Result<(), String> {
    for (words, least) in TESTS {
        let has = |word| words.contains(&word);
        let queue_pair_sends = has("-R") != queue_pair_asks;
        let all = !queue_pair_sends && !has("-u") && !has("--bidir");
        let mut tries = 0..TRIES;
        loop {
            tries.next();
            let ended = run(client(&[words, &["-J"]].concat()))?;
            match judge(&ended.stdout, least, all) {
                Ok(()) => break,
                Err(Wrong::Again(_)) if !tries.is_empty() => {}
                Err(Wrong::Always(what) | Wrong::Again(what)) => check(false, &ended, what)?,
            }
        }
    }
    Ok(())
}

/// The distribution's iperf3 is the client of a server with queue pairs.
fn iperf3_of_queue_pair(staged: &Staged, net: &Net) -> Result<(), String> {
    let _server = start(net.tool(staged, &["iperf3", "--server", "--wait"]), "waiting")?;
    measure(false, |words| net.command("iperf3", &[&["-c", net.adapter()], words].concat()))
}

/// A client with queue pairs, of the distribution's iperf3.
fn queue_pair_of_iperf3(staged: &Staged, net: &Net) -> Result<(), String> {
    let _server = start(net.command("iperf3", &["-s", "--forceflush"]), "listening")?;
    let ask = ["iperf3", "-c", net.kernel(), "--wait"];
    measure(true, |words| net.tool(staged, &[&ask[..], words].concat()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As iperf3 and as the queue pairs' program write it.
    const ONE_WAY: &str = "{\n\t\"end\":\t{\n\t\t\"sum_sent\":\t{\n\t\t\t\"start\":\t0,\n\
        \t\t\t\"bytes\":\t16777216,\n\t\t\t\"sender\":\ttrue\n\t\t},\n\t\t\"sum_received\":\t{\n\
        \t\t\t\"bytes\":\t14417920\n\t\t}\n\t}\n}";

    fn both(sent: [u64; 2], came: [u64; 2]) -> String {
        format!(
            "{{\"sum_received\": {{\"bits_per_second\": 1.5, \"bytes\": {}}},
              \"sum_sent\": {{\"bytes\": {}, \"retransmits\": 0}},
              \"sum_sent_bidir_reverse\": {{\"bytes\": {}}},
              \"sum_received_bidir_reverse\": {{\"bytes\": {}}}}}",
            came[0], sent[0], sent[1], came[1]
        )
    }

    #[test]
    fn reports_are_read() {
        assert_eq!(moved(ONE_WAY), Some(vec![(16_777_216, 14_417_920)]));
        assert_eq!(moved(&both([1, 3], [2, 4])), Some(vec![(1, 2), (3, 4)]));
        assert_eq!(moved("{ \"error\": \"unable to connect\" }"), None);
    }

    #[test]
    fn what_is_sent_comes_in_each_direction() {
        assert_eq!(judge(ONE_WAY, 16 << 20, false), Ok(()));
        assert_eq!(judge(ONE_WAY, 16 << 20, true), Err(Wrong::Always("not all has come")));
        assert_eq!(judge(ONE_WAY, 17 << 20, false), Err(Wrong::Always("not all was sent")));
        assert_eq!(judge(&both([3200, 6400], [100, 200]), 9600, false), Ok(()));
        for (sent, came) in [([3200, 6400], [100, 199]), ([3200, 1], [3200, 0]), ([0, 0], [0, 0])] {
            assert!(matches!(judge(&both(sent, came), 0, false), Err(Wrong::Again(_))));
        }
    }
}
