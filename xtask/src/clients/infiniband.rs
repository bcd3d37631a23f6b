//! The port of `quipu0` as one of InfiniBand: programs that name their peers by LID, or by GID where others
//! give IP addresses.

use super::hosts::Family;
use super::pair::Pairing;
use super::rows::{pingpong, results, run};
use super::{Hosts, Row, rdmacm};

/// Without a GID.
const PINGPONG: [&str; 5] = [
    "ibv_rc_pingpong",
    "ibv_uc_pingpong",
    "ibv_ud_pingpong",
    "ibv_srq_pingpong",
    "ibv_xsrq_pingpong",
];

/// Rows of perftest, which asks for the link layer: program, name, options.
const PERFTEST: [(&str, &str, &[&str]); 4] = [
    ("ib_send_lat", "rc", &["-s", "64"]),
    ("ib_send_lat", "ud", &["-s", "64", "-c", "UD"]),
    ("ib_write_bw", "xrc", &["-s", "65536", "-c", "XRC"]),
    ("ib_read_lat", "cm", &["-s", "4096", "-R"]),
];

/// The rows of one place.
pub(super) fn rows<'a>(hosts: Hosts, pairing: impl Fn(Family) -> Pairing) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    for family in [Family::V4, Family::V6] {
        let pairing = pairing(family).with_env("QUIPU_LINK_LAYER", "infiniband");
        let place = format!("{}/{}/infiniband", hosts.name(), family.name());
        rows.extend(rdmacm::of_infiniband(&place, hosts, family, &pairing));
        for program in PINGPONG {
            let name = format!("{place}/{}", program.trim_start_matches("ibv_"));
            let options: &[&str] = if program == "ibv_srq_pingpong" { &["-q", "1"] } else { &[] };
            rows.push(pingpong(name, pairing.clone(), program, options));
        }
        // With -R perftest knows IPv4 only, and the device of these rows has one address, of IPv6.
        let fits = |service| family == Family::V4 || service != "cm";
        for (program, service, options) in PERFTEST.into_iter().filter(|row| fits(row.1)) {
            let name = format!("{place}/{}/{service}", program.trim_start_matches("ib_"));
            let mut args: Vec<String> = options.iter().map(|word| (*word).to_owned()).collect();
            args.extend(["-F", "-n", "200"].map(str::to_owned));
            args.extend((family == Family::V6).then(|| "--ipv6".to_owned()));
            let pairing = pairing.clone();
            rows.push(Row {
                name,
                run: Box::new(move || {
                    let pair = run(&pairing, program, &args)?;
                    let measured = results(&pair.client.stdout).len() == 1;
                    // A port of Ethernet has none.
                    let by_lid = pair.client.stdout.contains("Link type       : IB");
                    let fine = pair.both_succeeded() && measured && by_lid;
                    if fine { Ok(()) } else { Err(pair.text()) }
                }),
            });
        }
    }
    rows
}
