//! `fi_pingpong` over libfabric's provider `verbs`, which wants addresses that are not of the loopback: so
//! all rows run where the two hosts are.

use crate::stage::Staged;

use super::hosts::{Family, listens};
use super::pair::{Pairing, free_port, run_both};
use super::{LIMIT, Row};

/// A kind of endpoint: its name here, provider and type for `fi_pingpong`, which sizes, and how many.
type Endpoint = (&'static str, &'static str, &'static str, &'static str, usize);

/// The kind that has a domain and settings of its own.
const XRC: &str = "xrc";

/// Sizes from 0 B to 6 MB; datagrams have those that fit into one. `ofi_rxd`, reliable over datagrams, has
/// one of many datagrams: where one is lost it waits for its timer.
const ENDPOINTS: [Endpoint; 5] = [
    ("msg", "verbs", "msg", "all", 46),
    ("rdm", "verbs;ofi_rxm", "rdm", "all", 46),
    (XRC, "verbs;ofi_rxm", "rdm", "all", 46),
    ("dgram", "verbs", "dgram", "all", 21),
    ("rxd", "verbs;ofi_rxd", "rdm", "65536", 1),
];

/// Exchanges of each size.
const EXCHANGES: &str = "10";

/// Rows on one of the two hosts, by both ways, and between them.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let same = || Pairing::same_of_two(staged);
    let places = [
        ("two-hosts/same-host", Family::V4, same()),
        ("two-hosts/same-host-tcp", Family::V4, same().with_env("QUIPU_SAME_HOST", "never")),
        ("two-hosts/v4", Family::V4, Pairing::two_hosts(staged, Family::V4)),
        ("two-hosts/v6", Family::V6, Pairing::two_hosts(staged, Family::V6)),
    ];
    let mut rows = Vec::new();
    for (place, family, pairing) in places {
        for endpoint in ENDPOINTS {
            let mut pairing = pairing.clone();
            if endpoint.0 == XRC {
                pairing = pairing.with_env("FI_VERBS_PREFER_XRC", "1");
                pairing = pairing.with_env("FI_OFI_RXM_USE_SRX", "1");
            }
            rows.push(Row {
                name: format!("{place}/libfabric/{}", endpoint.0),
                run: Box::new(move || run(&pairing, family, endpoint)),
            });
        }
    }
    rows
}

/// All sizes, with data that the receivers check.
fn run(pairing: &Pairing, family: Family, endpoint: Endpoint) -> Result<(), String> {
    let failed = |error: anyhow::Error| format!("{error:#}");
    let (name, provider, kind, which, sizes) = endpoint;
    let port = free_port().map_err(failed)?;
    let number = port.to_string();
    let args = |own: &[&str]| -> Vec<String> {
        let both = ["-p", provider, "-e", kind, "-S", which, "-I", EXCHANGES, "-c"];
        let v6 = (family == Family::V6).then_some("-6");
        let domain: &[&str] = if name == XRC { &["-d", "quipu0-xrc"] } else { &[] };
        both.iter().chain(domain).chain(&v6).chain(own).map(|word| (*word).to_owned()).collect()
    };
    let server = pairing.command(&pairing.server, "fi_pingpong", &args(&["-B", &number]));
    let to = ["-P", &number, family.of_host(0)];
    let client = pairing.command(&pairing.client, "fi_pingpong", &args(&to));
    let pair = run_both(server, client, |id| listens(id, port), LIMIT).map_err(failed)?;
    let complete = [&pair.server, &pair.client].map(|side| results(&side.stdout)) == [sizes; 2];
    if pair.both_succeeded() && complete { Ok(()) } else { Err(pair.text()) }
}

/// Sizes of which all messages were sent and answered: a line has the size, the messages sent, and those
/// answered, with an equals sign if they are as many.
fn results(output: &str) -> usize {
    let answered = format!("={EXCHANGES}");
    let is_result = |line: &&str| {
        let mut words = line.split_whitespace().skip(1);
        words.next() == Some(EXCHANGES) && words.next() == Some(&answered)
    };
    output.lines().filter(is_result).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_answered_sizes_count() {
        let output = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
            64      10      =10      1.2k        0.00s     46.55       1.38       0.73\n\
            96      10      -9       1.8k        0.00s     46.55       1.38       0.73\n";
        assert_eq!(results(output), 1);
    }
}
