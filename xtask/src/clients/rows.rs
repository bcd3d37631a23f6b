//! The table: which programs run with which options, and what they must print.

use crate::stage::Staged;

use super::hosts::Family;
use super::pair::{Pair, Pairing, run_pair};
use super::{
    Hosts, LIMIT, Row, capture, checked, datagrams, faults, infiniband, iw0, iwarp, libfabric,
    multihome, openmpi, others, planned, preloaded, qp0, qpip, rdmacm, single, sockets, suite,
    trace,
};

/// Exchanges of a row with one size.
const ITERS: u64 = 200;
/// Exchanges of each size where a row has all sizes.
const ITERS_EACH: u64 = 10;
/// Sizes from 2 to 2^23.
const ALL_SIZES: usize = 23;

/// perftest's options under test: name, words.
type Variant = (&'static str, &'static [&'static str]);

const PLAIN: Variant = ("plain", &["-s", "4096"]);
const ALL: Variant = ("all-sizes", &["-a"]);
const BOTH: Variant = ("both-ways", &["-s", "4096", "-b"]);
const QPS: Variant = ("16-qps", &["-s", "4096", "-q", "16"]);
const EVENTS: Variant = ("events", &["-s", "4096", "-e"]);
const INLINE: Variant = ("inline", &["-s", "64", "--inline_size=64"]);
const MTU: Variant = ("mtu-1024", &["-s", "16384", "-m", "1024"]);
const ODP: Variant = ("on-demand", &["-s", "65536", "--odp"]);
const LARGE: Variant = ("large", &["-s", "1048576"]);
const UC: Variant = ("uc", &["-s", "16384", "-c", "UC"]);
const UC_QPS: Variant = ("uc-16-qps", &["-s", "4096", "-c", "UC", "-q", "16"]);
const XRC: Variant = ("xrc", &["-s", "16384", "-c", "XRC"]);
const XRC_EVENTS: Variant = ("xrc-events", &["-s", "4096", "-c", "XRC", "-e"]);
const XRC_QPS: Variant = ("xrc-4-qps", &["-s", "4096", "-c", "XRC", "-q", "4"]);

/// Each program with the variants that it has. The atomic ones know one size, and no `-a`; only
/// sends and writes can be inline; writes take no events, since nobody is told of one.
const PERFTEST: [(&str, &[Variant]); 8] = [
    ("ib_write_bw", &[PLAIN, ALL, BOTH, QPS, INLINE, MTU, ODP, UC, UC_QPS, XRC]),
    ("ib_read_bw", &[PLAIN, ALL, BOTH, QPS, EVENTS, MTU, ODP, XRC]),
    ("ib_send_bw", &[PLAIN, ALL, BOTH, QPS, EVENTS, INLINE, MTU, ODP, UC, UC_QPS, XRC, XRC_QPS]),
    ("ib_atomic_bw", &[PLAIN, BOTH, QPS, EVENTS, MTU, XRC]),
    ("ib_write_lat", &[PLAIN, ALL, INLINE, MTU, UC, XRC]),
    ("ib_read_lat", &[PLAIN, ALL, EVENTS, MTU, XRC]),
    ("ib_send_lat", &[PLAIN, ALL, EVENTS, INLINE, MTU, UC, XRC, XRC_EVENTS]),
    ("ib_atomic_lat", &[PLAIN, EVENTS, MTU, XRC]),
];

/// Options that are tried with one program, in one place.
const ONCE: [(&str, Variant); 3] = [
    ("ib_send_bw", ("post-lists", &["-s", "4096", "-l", "8", "--recv_post_list=8"])),
    ("ib_send_bw", ("srq-8-qps", &["-s", "4096", "--use-srq", "-q", "8"])),
    ("ib_write_bw", ("cm-4-qps-tos", &["-s", "4096", "-R", "-q", "4", "-T", "96"])),
];

/// `ibv_rc_pingpong` and its relatives: name, program, options. The one of shared receive queues has one
/// queue pair: with more, a side that has counted enough messages leaves while others are still under way
/// to it.
const PINGPONG: [(&str, &str, &[&str]); 16] = [
    ("rc_pingpong/plain", "ibv_rc_pingpong", &["-g", "0"]),
    ("rc_pingpong/events", "ibv_rc_pingpong", &["-g", "0", "-e"]),
    ("rc_pingpong/checked", "ibv_rc_pingpong", &["-g", "0", "-c", "-s", "65536"]),
    ("rc_pingpong/new-send", "ibv_rc_pingpong", &["-g", "0", "-N"]),
    ("rc_pingpong/on-demand", "ibv_rc_pingpong", &["-g", "0", "-c", "-o", "-P"]),
    ("rc_pingpong/whole-address-space", "ibv_rc_pingpong", &["-g", "0", "-c", "-O", "-P"]),
    ("rc_pingpong/time-stamps", "ibv_rc_pingpong", &["-g", "0", "-t"]),
    ("rc_pingpong/device-memory", "ibv_rc_pingpong", &["-g", "0", "-c", "-j"]),
    ("rc_pingpong/device-memory-new-send", "ibv_rc_pingpong", &["-g", "0", "-c", "-j", "-N"]),
    ("srq_pingpong/plain", "ibv_srq_pingpong", &["-g", "0", "-q", "1"]),
    ("srq_pingpong/events", "ibv_srq_pingpong", &["-g", "0", "-q", "1", "-e"]),
    ("uc_pingpong/plain", "ibv_uc_pingpong", &["-g", "0"]),
    ("uc_pingpong/events", "ibv_uc_pingpong", &["-g", "0", "-e"]),
    ("uc_pingpong/checked", "ibv_uc_pingpong", &["-g", "0", "-c", "-s", "65536"]),
    ("xsrq_pingpong/plain", "ibv_xsrq_pingpong", &["-g", "0"]),
    ("xsrq_pingpong/events", "ibv_xsrq_pingpong", &["-g", "0", "-e", "-s", "65536"]),
];

/// Rows for two processes on one host.
pub(super) fn one_host(staged: &Staged, full: bool) -> Vec<Row<'_>> {
    let mut rows = single::rows(staged);
    rows.extend(programs(Hosts::One, full, |family| Pairing::one_host(staged, family)));
    rows.extend(datagrams::rows(Hosts::One, |family| Pairing::one_host(staged, family)));
    rows.extend(infiniband::rows(Hosts::One, |family| Pairing::one_host(staged, family)));
    // The two ways that same-host peers fall back to, and the one that programs have to ask for.
    for (name, variable, value) in [
        ("one-host-tcp", "QUIPU_SAME_HOST", "never"),
        ("one-host-copy", "QUIPU_PEER_MEMORY", "never"),
        ("one-host-shared", "QUIPU_SHARED_PAGES", "registered"),
    ] {
        let pairing = Pairing::one_host(staged, Family::V4).with_env(variable, value);
        rows.extend(few(name, &pairing));
    }
    rows.extend(rdmacm::rows(Hosts::One, |family| Pairing::one_host(staged, family)));
    rows.extend(rdmacm::over_tcp(staged));
    rows.extend(rdmacm::strictly(staged));
    rows.extend(single::limits(staged));
    rows.extend(checked::rows(staged));
    rows.extend(capture::rows(staged));
    rows.extend(trace::rows(staged));
    rows.extend(suite::rows(staged));
    rows.extend(planned::rows(staged));
    rows.extend(iwarp::one_host(staged));
    rows.extend(qp0::one_host(staged));
    rows.extend(others::one_host(staged));
    rows.extend(faults::one_host(staged));
    rows.extend(preloaded::rows(staged));
    rows
}

/// Rows for two hosts; to be run where they exist.
pub(super) fn two_hosts(staged: &Staged, full: bool) -> Vec<Row<'_>> {
    let mut rows = programs(Hosts::Two, full, |family| Pairing::two_hosts(staged, family));
    rows.extend(rdmacm::rows(Hosts::Two, |family| Pairing::two_hosts(staged, family)));
    rows.extend(datagrams::rows(Hosts::Two, |family| Pairing::two_hosts(staged, family)));
    rows.extend(infiniband::rows(Hosts::Two, |family| Pairing::two_hosts(staged, family)));
    rows.extend(iwarp::two_hosts(staged));
    rows.extend(libfabric::rows(staged));
    rows.extend(openmpi::rows(staged));
    rows.extend(faults::two_hosts(staged));
    rows.extend(multihome::two_hosts(staged));
    rows.extend(qpip::rows(staged));
    rows.extend(sockets::rows(staged));
    rows.extend(qp0::two_hosts(staged));
    rows.extend(iw0::rows(staged));
    rows
}

/// Every program with every variant, IPv4 and IPv6. Both ways to post are tried on one host by IPv4;
/// elsewhere they take turns, unless `full` asks for all combinations. perftest's programs for bandwidth
/// measure the processor's clock for a quarter of a second for each size, so a row of all sizes takes five
/// seconds.
fn programs<'a>(hosts: Hosts, full: bool, pairing: impl Fn(Family) -> Pairing) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    for family in [Family::V4, Family::V6] {
        let (pairing, place) = (pairing(family), format!("{}/{}", hosts.name(), family.name()));
        for (name, program, options) in PINGPONG {
            rows.push(pingpong(format!("{place}/{name}"), pairing.clone(), program, options));
        }
        rows.push(no_gid(format!("{place}/rc_pingpong/no-gid-is-refused"), pairing.clone()));
        let once = ONCE.iter().filter(|_| (hosts, family) == (Hosts::One, Family::V4));
        rows.extend(once.map(|&(program, variant)| {
            Perftest { program, variant, old: true, family }.row(&place, pairing.clone())
        }));
        let mut turn = (hosts == Hosts::Two) ^ (family == Family::V6);
        for (program, variants) in PERFTEST {
            for variant in variants {
                turn = !turn;
                let all_sizes = *variant == ALL;
                let here = (hosts, family) == (Hosts::One, Family::V4) && !all_sizes;
                // A size is carried by IPv6 as it is by IPv4.
                let needless = all_sizes && family == Family::V6;
                for old in [false, true] {
                    if full || here || (old == turn && !needless) {
                        let test = Perftest { program, variant: *variant, old, family };
                        rows.push(test.row(&place, pairing.clone()));
                    }
                }
            }
        }
    }
    rows
}

/// One row of each program.
fn few<'a>(place: &'a str, pairing: &Pairing) -> Vec<Row<'a>> {
    let row = |program, variant| {
        let test = Perftest { program, variant, old: false, family: Family::V4 };
        test.row(place, pairing.clone())
    };
    let mut rows = Vec::new();
    for (program, variants) in PERFTEST {
        let basic = if program.starts_with("ib_atomic") { PLAIN } else { LARGE };
        let services =
            variants.iter().copied().filter(|variant| [UC, XRC, XRC_EVENTS].contains(variant));
        rows.extend([basic].into_iter().chain(services).map(|variant| row(program, variant)));
    }
    rows
}

/// One run of a program of perftest.
#[derive(Clone, Copy)]
struct Perftest {
    program: &'static str,
    variant: Variant,
    /// Whether it posts by `ibv_post_send`.
    old: bool,
    family: Family,
}

impl Perftest {
    fn args(&self) -> Vec<String> {
        let (atomic, all) = (self.program.starts_with("ib_atomic"), self.variant == ALL);
        let mut words = self.variant.1;
        if let (true, ["-s", _, rest @ ..]) = (atomic, words) {
            words = rest;
        }
        let iters = if all { ITERS_EACH } else { ITERS };
        let mut args: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        args.extend(["-F".into(), "-n".into(), iters.to_string()]);
        // Not to measure the processor's clock, for a quarter of a second for each size.
        args.extend(self.program.ends_with("_lat").then(|| "--report-cycles".to_owned()));
        args.extend(self.old.then(|| "--use_old_post_send".to_owned()));
        args.extend((self.family == Family::V6).then(|| "--ipv6".to_owned()));
        args
    }

    fn row<'a>(self, place: &str, pairing: Pairing) -> Row<'a> {
        let short = self.program.trim_start_matches("ib_");
        let post = if self.old { "old-post" } else { "new-post" };
        Row {
            name: format!("{place}/{short}/{}/{post}", self.variant.0),
            run: Box::new(move || {
                let pair = run(&pairing, self.program, &self.args())?;
                if !pair.both_succeeded() {
                    return Err(pair.text());
                }
                self.check(&pair.client.stdout).map_err(|why| format!("  {why}\n{}", pair.text()))
            }),
        }
    }

    /// Checks that the client printed a result for each size.
    fn check(&self, output: &str) -> Result<(), String> {
        let results = results(output);
        let wanted = if self.variant == ALL { ALL_SIZES } else { 1 };
        if results.len() != wanted {
            return Err(format!("{} results where {wanted} were expected", results.len()));
        }
        let least = if self.variant == ALL { ITERS_EACH } else { ITERS };
        match results.iter().find(|(_, iters)| *iters < least) {
            Some((size, iters)) => Err(format!("{iters} exchanges of {size} bytes, not {least}")),
            None => Ok(()),
        }
    }
}

/// The lines of perftest that hold a result: size, number of exchanges.
pub(super) fn results(output: &str) -> Vec<(u64, u64)> {
    let numbers = |line: &str| {
        let mut words = line.split_whitespace();
        let (size, iters) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        words.next()?.parse::<f64>().ok()?;
        Some((size, iters))
    };
    output.lines().filter_map(numbers).collect()
}

/// A row of `ibv_rc_pingpong` or one of its relatives.
pub(super) fn pingpong<'a>(
    name: String,
    pairing: Pairing,
    program: &'static str,
    options: &'static [&'static str],
) -> Row<'a> {
    let args: Vec<String> =
        options.iter().chain(&["-n", "300"]).map(|word| (*word).to_owned()).collect();
    Row {
        name,
        run: Box::new(move || {
            let pair = run(&pairing, program, &args)?;
            // The one of extended reliable connections does not count.
            let counted =
                ["iters in", "success"].iter().any(|end| pair.client.stdout.contains(end));
            // With -c it says so, and goes on, where a byte is wrong.
            let wrong = pair.text().contains("invalid data");
            if pair.both_succeeded() && counted && !wrong { Ok(()) } else { Err(pair.text()) }
        }),
    }
}

/// RoCE needs a global route; a program that names no GID is refused, and its user told what to do.
fn no_gid<'a>(name: String, pairing: Pairing) -> Row<'a> {
    Row {
        name,
        run: Box::new(move || {
            let pair = run(&pairing, "ibv_rc_pingpong", &["-n".into(), "10".into()])?;
            let text = pair.text();
            let refused = ["modify QP to RTR", "QUIPU_LINK_LAYER=infiniband"];
            let told = refused.iter().all(|words| text.contains(words));
            if told && !pair.client.success() { Ok(()) } else { Err(text) }
        }),
    }
}

pub(super) fn run(pairing: &Pairing, program: &str, args: &[String]) -> Result<Pair, String> {
    run_pair(pairing, program, args, LIMIT).map_err(|error| format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_told_from_everything_else() {
        let output = "                    RDMA_Write BW Test\n Dual-port       : OFF\n\
            #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
            65536      5000             10.00              9.00               0.100000\n \
            2 20 1.5 1.6\n---\n";
        assert_eq!(results(output), [(65536, 5000), (2, 20)]);
    }

    #[test]
    fn the_options_are_what_each_program_takes() {
        let test = |program, variant| Perftest { program, variant, old: true, family: Family::V6 };
        let args = test("ib_atomic_bw", QPS).args().join(" ");
        assert_eq!(args, "-q 16 -F -n 200 --use_old_post_send --ipv6");
        let args = test("ib_write_bw", ALL).args().join(" ");
        assert_eq!(args, "-a -F -n 10 --use_old_post_send --ipv6");
        let args = test("ib_send_lat", UC).args().join(" ");
        assert_eq!(args, "-s 16384 -c UC -F -n 200 --report-cycles --use_old_post_send --ipv6");
    }
}
