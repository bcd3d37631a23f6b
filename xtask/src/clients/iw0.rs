//! The device `quipu_iw0` on a packet link, with kernel sockets at the other end.

use std::process::Command;

use crate::process::Running;
use crate::stage::Staged;

use super::hosts::listens;
use super::pair::{free_port, run_both};
use super::qp0::{VETH, Words, pair_of_links, said, within};
use super::{LIMIT, Row};

/// The address of the kernel, at the other end of the adapter's link.
const KERNEL: &str = "10.79.0.1";

/// The words of perftest's programs.
const PERFTEST: Words = &["-F", "-R", "-d", "quipu_iw0", "-n", "500"];

/// Each program once with the adapter's own TCP as the server, once as the client.
pub(super) fn rows(staged: &Staged) -> Vec<Row<'_>> {
    let programs: [(&str, Words); 4] = [
        ("ib_write_bw", &["-s", "65536"]),
        ("ib_send_lat", &["-s", "64"]),
        ("ib_read_bw", &["-s", "65536"]),
        ("rping", &["-C", "20", "-V", "-S", "4000"]),
    ];
    let mut rows = Vec::new();
    for (program, words) in programs {
        for link_serves in [true, false] {
            let role = if link_serves { "server" } else { "client" };
            let more: Words = if program == "rping" { &[] } else { PERFTEST };
            rows.push(Row {
                name: format!("two-hosts/v4/iw0-link/{program}/{role}"),
                run: Box::new(move || mixed(staged, program, &[more, words].concat(), link_serves)),
            });
        }
    }
    rows
}

/// `quipu run`, with its TCP on the link or in the kernel.
fn quipu(staged: &Staged, keeper: &Running, on_link: bool) -> Command {
    let mut command = within(keeper, &staged.quipu);
    command.env("QUIPU_CM_DEVICE", "quipu_iw0");
    let address = if on_link { "127.0.0.1" } else { KERNEL };
    if on_link {
        let (interface, address) = VETH[1];
        command.env("QUIPU_QPIP_LINK", format!("packet:{interface}"));
        command.env("QUIPU_QPIP_ADDRESS", address);
    }
    command.args(["run", "--address", address, "--"]);
    command
}

fn mixed(staged: &Staged, program: &str, words: &[&str], link_serves: bool) -> Result<(), String> {
    let keeper = pair_of_links()?;
    let mut address = within(&keeper, "ip");
    address.args(["address", "add", &format!("{KERNEL}/24"), "dev", VETH[0].0]);
    let added = address.status().map_err(said)?;
    if !added.success() {
        return Err("the kernel gets no address".into());
    }
    let port = free_port().map_err(said)?;
    let rping = program == "rping";
    let end = |on_link: bool, more: &[&str]| {
        let mut command = quipu(staged, &keeper, on_link);
        command.arg(program).args(["-p", &port.to_string()]).args(words).args(more);
        command
    };
    let link = VETH[1].1.split('/').next().unwrap_or_default();
    let to = if link_serves { link } else { KERNEL };
    let server: &[&str] = if rping { &["-s"] } else { &[] };
    let client: &[&str] = if rping { &["-c", "-a", to] } else { &[to] };
    let (server, client) = (end(link_serves, server), end(!link_serves, client));
    let pair = run_both(server, client, |id| listens(id, port), LIMIT).map_err(said)?;
    if pair.both_succeeded() { Ok(()) } else { Err(pair.text()) }
}
