//! Programs that use datagram queue pairs: pingpong, perftest, UCX.

use super::hosts::Family;
use super::pair::Pairing;
use super::rows::{results, run};
use super::{Hosts, Row};

/// Exchanges where the sender waits for answers.
const EXCHANGES: &str = "200";
/// Messages that are sent without waiting for anything. So many of a kilobyte fit into what the least
/// generous kernel keeps for a socket: none is lost, whoever gets a processor when.
const BURST: &str = "100";

/// Rows of `ibv_ud_pingpong`: name, options.
const PINGPONG: [(&str, &[&str]); 4] = [
    ("plain", &[]),
    ("events", &["-e"]),
    ("checked", &["-c", "-s", "1024"]),
    ("small", &["-s", "1"]),
];

/// Rows of perftest: program, name, options.
const PERFTEST: [(&str, &str, &[&str]); 8] = [
    ("ib_send_lat", "plain", &["-s", "1024", "-n", EXCHANGES]),
    ("ib_send_lat", "events", &["-s", "64", "-e", "-n", EXCHANGES]),
    ("ib_send_lat", "inline", &["-s", "64", "--inline_size=64", "-n", EXCHANGES]),
    ("ib_send_bw", "plain", &["-s", "1024", "-n", BURST]),
    ("ib_send_bw", "both-ways", &["-s", "1024", "-b", "-n", BURST]),
    ("ib_send_bw", "4-qps", &["-s", "1024", "-q", "4", "-n", "25"]),
    ("ib_send_bw", "events", &["-s", "1024", "-e", "-n", BURST]),
    ("ib_send_bw", "old-post", &["-s", "1024", "--use_old_post_send", "-n", BURST]),
];

/// Rows of perftest that meets by rdma_cm, which it does over IPv4 only.
const CM: [(&str, &str, &[&str]); 2] = [
    ("ib_send_lat", "cm", &["-R", "-s", "1024", "-n", EXCHANGES]),
    ("ib_send_bw", "cm", &["-R", "-s", "1024", "-n", BURST]),
];

/// Rows of perftest with a multicast group.
const MULTICAST: [(&str, &str, &[&str]); 2] = [
    ("ib_send_lat", "multicast", &["-s", "256", "-g", "-n", EXCHANGES]),
    ("ib_send_bw", "multicast", &["-s", "1024", "-g", "-n", BURST]),
];

/// The groups, as GIDs in perftest's own notation. Its default is one of IPv6.
const GROUP_V4: [&str; 2] = ["-M", "0:0:0:0:0:0:0:0:0:0:255:255:239:77:1:1"];
const GROUP_V6: [&str; 3] = ["--ipv6", "-M", "255:14:0:0:0:0:0:0:0:0:0:0:0:119:1:1"];

/// A way of UCX: its name here, its transport, the transports that it may use, and tests of the first
/// alone, with options. Reliable connections are wired up by datagrams; `rc` is UCX's word for both.
struct UcxWay {
    name: &'static str,
    transport: &'static str,
    allowed: &'static str,
    tests: &'static [&'static str],
}

const UCX_WAYS: [UcxWay; 3] = [
    UcxWay {
        name: "ucx-ud",
        transport: "ud_verbs",
        allowed: "ud_verbs",
        tests: &["am_lat", "am_bw"],
    },
    UcxWay {
        name: "ucx-rc",
        transport: "rc_verbs",
        allowed: "rc_verbs,ud_verbs",
        tests: &[
            "am_lat",
            "am_bw",
            "put_lat",
            "put_bw",
            // Reads are of 65 bytes at least.
            "get -D zcopy -s 4096",
            "add_lat",
            "add_mr",
            "fadd",
            "cswap",
        ],
    },
    UcxWay { name: "ucx-rc-alias", transport: "", allowed: "rc", tests: &[] },
];

/// Tests of `ucx_perftest` for the layer above the transports, which makes what they lack.
const UCX_PROTOCOLS: [&str; 15] = [
    "tag_lat",
    "tag_bw",
    "tag_sync_lat",
    "tag_sync_bw",
    "stream_lat",
    "stream_bw",
    "ucp_am_lat",
    "ucp_am_bw",
    "ucp_put_lat",
    "ucp_put_bw",
    "ucp_get",
    "ucp_add",
    "ucp_fadd",
    "ucp_swap",
    "ucp_cswap",
];

/// The rows of one place.
pub(super) fn rows<'a>(hosts: Hosts, pairing: impl Fn(Family) -> Pairing) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    for family in [Family::V4, Family::V6] {
        let place = format!("{}/{}", hosts.name(), family.name());
        for (name, options) in PINGPONG {
            let args = words(&[&["-g", "0", "-n", "300"], options].concat());
            let done = |output: &str| output.contains("iters in");
            let name = format!("{place}/ud_pingpong/{name}");
            rows.push(row(name, pairing(family), "ibv_ud_pingpong", args, done));
        }
        // Linux has no way to IPv6 groups over the loopback.
        let groups = (hosts, family) != (Hosts::One, Family::V6);
        let multicast = MULTICAST.iter().filter(|_| groups);
        let cm = CM.iter().filter(|_| family == Family::V4);
        for &(program, name, options) in PERFTEST.iter().chain(cm).chain(multicast) {
            let mut args = words(&[&["-c", "UD", "-F"], options].concat());
            args.extend(match (family, options.contains(&"-g")) {
                (Family::V4, false) => Vec::new(),
                (Family::V4, true) => words(&GROUP_V4),
                (Family::V6, false) => words(&GROUP_V6[..1]),
                (Family::V6, true) => words(&GROUP_V6),
            });
            let short = program.trim_start_matches("ib_");
            let done = |output: &str| results(output).len() == 1;
            rows.push(row(
                format!("{place}/{short}/ud-{name}"),
                pairing(family),
                program,
                args,
                done,
            ));
        }
        let all = hosts == Hosts::One && family == Family::V4;
        rows.extend(UCX_WAYS.iter().flat_map(|way| ucx(way, &place, &pairing(family), all)));
    }
    rows
}

/// Rows of UCX: `all` of its tests, or one of each kind.
fn ucx<'a>(way: &UcxWay, place: &str, pairing: &Pairing, all: bool) -> Vec<Row<'a>> {
    let few = |tests: &'static [&'static str]| tests.iter().take(if all { tests.len() } else { 1 });
    let alone = ["-d", "quipu0:1", "-x", way.transport];
    let transport = few(way.tests).map(|test| (*test, alone.as_slice()));
    let protocols = few(&UCX_PROTOCOLS).map(|test| (*test, [].as_slice()));
    let kinds = transport.chain(protocols);
    kinds
        .map(|(test, options)| {
            let test: Vec<&str> = test.split(' ').collect();
            let args = [&["-n", EXCHANGES, "-w", "20", "-t"], &test[..], options].concat();
            let (test, args) = (test[0], words(&args));
            let pairing = pairing
                .clone()
                .with_env("UCX_TLS", way.allowed)
                .with_env("UCX_NET_DEVICES", "quipu0:1");
            let done = |output: &str| output.contains("Final:");
            let name = format!("{place}/{}/{test}", way.name);
            row(name, pairing, "ucx_perftest", args, done)
        })
        .collect()
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// A row whose client says in the end what `done` looks for.
fn row<'a>(
    name: String,
    pairing: Pairing,
    program: &'static str,
    args: Vec<String>,
    done: fn(&str) -> bool,
) -> Row<'a> {
    Row {
        name,
        run: Box::new(move || {
            let pair = run(&pairing, program, &args)?;
            let wrong = pair.text().contains("invalid data");
            let fine = pair.both_succeeded() && done(&pair.client.stdout) && !wrong;
            if fine { Ok(()) } else { Err(pair.text()) }
        }),
    }
}
