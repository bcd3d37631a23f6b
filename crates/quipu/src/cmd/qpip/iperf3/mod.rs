//! `quipu qpip iperf3`: a client and a server of iperf3's tests over TCP and UDP, whose streams are queue
//! pairs. The other end is an unmodified iperf3, or one of these.

mod datagrams;
mod network;
mod report;
mod streams;
mod test;
mod words;

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use self::network::Network;
use self::report::Report;
use self::words::{DATAGRAM, MAX_BLOCK, MAX_STREAMS, MAX_TIME, Params};
use super::{LinkOptions, Signal, describe, failed};
use crate::cmd::failure::Failure;

/// Who does what.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("role").required(true))]
pub(crate) struct Options {
    #[command(flatten)]
    link: LinkOptions,
    /// Run as the server: one test after another.
    #[arg(long, short, group = "role")]
    server: bool,
    /// Run as a client of the server at this address.
    #[arg(long, short, group = "role", value_name = "ADDRESS", value_parser = super::peer_address)]
    client: Option<IpAddr>,
    /// The TCP port.
    #[arg(long, short, default_value_t = 5201, value_name = "PORT")]
    port: u16,
    /// As a server: exit after one test.
    #[arg(long, short = '1', conflicts_with = "client")]
    one_off: bool,
    /// Duration of the test in seconds.
    #[arg(long, short, default_value_t = 10, value_name = "SECONDS",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_TIME)))]
    time: u32,
    /// Bytes after which the test ends, instead of a time. K, M and G are powers of 1024.
    #[arg(long, short = 'n', value_name = "BYTES", value_parser = bytes, conflicts_with = "time")]
    bytes: Option<u64>,
    /// Bits per second of each stream. K, M and G are powers of 1000. 0, the default for TCP, is no limit;
    /// the default for UDP is 1M.
    #[arg(long, short, value_name = "BITS", value_parser = bits)]
    bitrate: Option<u64>,
    /// Send UDP datagrams, and measure loss and jitter.
    #[arg(long, short, conflicts_with = "server")]
    udp: bool,
    /// Number of parallel streams.
    #[arg(long, short = 'P', default_value_t = 1, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_STREAMS)))]
    parallel: u32,
    /// Send from the server to the client.
    #[arg(long, short = 'R', conflicts_with = "bidir")]
    reverse: bool,
    /// Send in both directions.
    #[arg(long)]
    bidir: bool,
    /// Bytes of each send. Default: 128K; for UDP, 1448 or what the link takes.
    #[arg(long, short, value_name = "BYTES", value_parser = bytes)]
    length: Option<u64>,
    /// Leave out this many seconds at the beginning.
    #[arg(long, short = 'O', default_value_t = 0, value_name = "SECONDS",
          value_parser = clap::value_parser!(u32).range(..=60))]
    omit: u32,
    /// Seconds between two reports; 0: no reports.
    #[arg(long, short, default_value_t = 1.0, value_name = "SECONDS", value_parser = seconds)]
    interval: f64,
    /// Sleep until something completes, instead of polling.
    #[arg(long)]
    wait: bool,
    /// Print the result as JSON, with iperf3's names.
    #[arg(long, short = 'J')]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  sudo quipu qpip iperf3 -L tap:qp0 -a 10.9.0.2/24 --server
  iperf3 -c 10.9.0.2                                     unmodified iperf3; also -R, --bidir, -P 4
  iperf3 -s                                              and the other way round
  sudo quipu qpip iperf3 -L tap:qp0 -a 10.9.0.2/24 --client 10.9.0.1
  iperf3 -c 10.9.0.2 -u -b 100M                          datagrams, in either role

The sender counts TCP data when it is acknowledged, and datagrams when they are sent.";

fn amount(text: &str, thousand: u64) -> Result<u64, String> {
    let (number, power) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 1),
        Some((at, 'm' | 'M')) => (&text[..at], 2),
        Some((at, 'g' | 'G')) => (&text[..at], 3),
        _ => (text, 0),
    };
    let number = number.parse::<u64>().ok();
    number
        .and_then(|number| number.checked_mul(thousand.pow(power)))
        .ok_or_else(|| "give a number, optionally followed by K, M or G".into())
}

fn bytes(text: &str) -> Result<u64, String> {
    amount(text, 1024)
}

fn bits(text: &str) -> Result<u64, String> {
    amount(text, 1000)
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|it| *it == 0.0 || (0.1..=60.0).contains(it));
    seconds.ok_or_else(|| "give 0, or 0.1 to 60".into())
}

/// Octets of the headers of a datagram: IPv6 and UDP.
const HEADERS: u64 = 48;

impl Options {
    /// What is asked for on a link of this MTU.
    fn params(&self, mtu: u32) -> Params {
        let datagram = u64::from(mtu).saturating_sub(HEADERS).clamp(*DATAGRAM.start(), 1448);
        let (bandwidth, len) = if self.udp { (1_000_000, datagram) } else { (0, 128 << 10) };
        Params {
            tcp: !self.udp,
            udp: self.udp,
            omit: self.omit,
            time: if self.bytes.is_some() { 0 } else { self.time },
            num: self.bytes.unwrap_or(0),
            parallel: self.parallel,
            reverse: self.reverse,
            bidirectional: self.bidir,
            len: self.length.unwrap_or(len),
            bandwidth: self.bitrate.unwrap_or(bandwidth),
            client_version: "3.12".into(),
            ..Params::default()
        }
    }
}

/// Runs it.
pub(super) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let lengths = if options.udp { DATAGRAM } else { 1..=MAX_BLOCK };
    if options.length.is_some_and(|it| !lengths.contains(&it)) || options.bytes == Some(0) {
        let (least, most) = (lengths.start(), lengths.end());
        let why = format!("a send has {least} to {most} bytes, and a test at least 1 byte");
        return Err(Failure::new("cannot run the test", why, "change --length or --bytes"));
    }
    let lasts = options.client.is_none() && !options.one_off;
    let signal = if lasts { Signal::Ends } else { Signal::Cuts };
    let (adapter, leave) = options.link.open_with_leave(signal)?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut network = Network::new(&adapter, Arc::clone(&stop))?;
    network.wait = options.wait;
    // Kept here: what a queue pair has completed goes with it.
    let bell = Arc::new(network.bell().map_err(failed)?);
    let rings = Arc::clone(&bell);
    leave.is(move || {
        stop.store(true, Ordering::Release);
        // What it has posted completes, which wakes whoever waits.
        let _ = rings.flush();
    });
    let mut report = Report::new(options.json);
    let interval = Duration::from_secs_f64(options.interval);
    if let Some(server) = options.client {
        let to = super::with_port(SocketAddr::new(server, options.port))?;
        let params = options.params(adapter.info().map_err(failed)?.mtu);
        let outcome = test::ask(&mut network, to, params, &mut report, interval);
        return super::unless_gone(&adapter, outcome.map(|()| ExitCode::SUCCESS));
    }
    let port = network.listen(options.port)?;
    if !options.json {
        println!("{}", describe(&adapter)?);
        println!("waiting on port {port}; Ctrl-C ends it");
    }
    loop {
        let outcome = test::serve(&mut network, &mut report, interval);
        if options.one_off {
            return super::unless_gone(&adapter, outcome.map(|()| ExitCode::SUCCESS));
        }
        if let Err(failure) = outcome {
            // An adapter that is gone, or a signal, is the end; clients come and go.
            network.turn(Some(Instant::now()))?;
            eprint!("{failure}");
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cmd::qpip::tests::adapter;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn line(words: &[&str]) -> Result<Options, clap::Error> {
        Line::try_parse_from([&["iperf3"], words].concat()).map(|line| line.options)
    }

    #[test]
    fn the_words_are_those_of_iperf3() {
        let words = ["-c", "10.9.0.1", "-n", "100M", "-b", "1G", "-P", "4", "-R", "-l", "8K", "-J"];
        let params = line(&words).unwrap().params(1500);
        assert_eq!((params.num, params.time), (100 << 20, 0));
        assert_eq!((params.bandwidth, params.len), (1_000_000_000, 8192));
        assert!(params.reverse && params.are_possible());
        let params = line(&["-c", "::1", "-u"]).unwrap().params(1280);
        assert!(params.are_possible());
        assert_eq!((params.tcp, params.udp), (false, true));
        assert_eq!((params.len, params.bandwidth), (1232, 1_000_000));
        for bad in
            [&[] as &[&str], &["-s", "-u"], &["-s", "-c", "::1"], &["-s", "-i", "-1"], &["-c", "x"]]
        {
            assert!(line(bad).is_err(), "{bad:?}");
        }
    }

    /// Makes tests one after the other; what each says was sent, and received.
    fn measure(tests: &[&[&str]]) -> Vec<(Options, (u64, u64))> {
        let (here, there) = (adapter(), adapter());
        let none = || Arc::new(AtomicBool::new(false));
        let mut server = Network::new(&there, none()).unwrap();
        server.listen(5201).unwrap();
        let to = SocketAddr::new(there.info().unwrap().addresses[0], 5201);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in tests {
                    let mut report = Report::new(true);
                    test::serve(&mut server, &mut report, Duration::ZERO).unwrap();
                }
            });
            let ask = |words: &&[&str]| {
                let options = line(&[&["-c", "::1"], *words].concat()).unwrap();
                let mut report = Report::new(true);
                let mut client = Network::new(&here, none()).unwrap();
                let params = options.params(here.info().unwrap().mtu);
                test::ask(&mut client, to, params, &mut report, Duration::ZERO).unwrap();
                (options, report.totals)
            };
            tests.iter().map(ask).collect()
        })
    }

    #[test]
    fn a_client_and_a_server_agree_about_what_was_moved() {
        let tests = [
            &["-n", "3M"] as &[&str],
            &["-n", "1M", "-R", "-l", "1000"],
            &["-n", "2M", "-P", "3", "-b", "800M"],
            &["-n", "1M", "--bidir"],
        ];
        for (index, (options, (sent, received))) in measure(&tests).into_iter().enumerate() {
            let (words, wanted) = (tests[index], options.bytes.unwrap());
            assert!(sent >= wanted && received >= wanted, "{words:?}: {sent}, {received}");
            if !options.bidir {
                assert_eq!((sent, received), (wanted, wanted), "{words:?}");
            }
        }
    }

    #[test]
    fn datagrams_are_counted_at_both_ends() {
        let tests = [
            &["-u", "-n", "300K", "-b", "50M"] as &[&str],
            &["-u", "-n", "300K", "-b", "50M", "-R", "-l", "1000"],
            &["-u", "-n", "300K", "-b", "20M", "-P", "3"],
            &["-u", "-n", "300K", "-b", "20M", "-P", "2", "--bidir"],
        ];
        for (index, (options, (sent, received))) in measure(&tests).into_iter().enumerate() {
            let (words, wanted) = (tests[index], options.bytes.unwrap());
            // Some may be lost, and some under way when the client has enough.
            assert!(sent >= wanted && sent >= received, "{words:?}: {sent}, {received}");
            assert!(received > wanted / 2, "{words:?}: {sent}, {received}");
        }
    }
}
