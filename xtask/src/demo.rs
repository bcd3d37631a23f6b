//! Three programs of the distribution, each between two processes, over Quipu; then a page for `curl` from a
//! queue pair whose TCP is the adapter's own.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

use crate::clients::{Family, Pairing, run_pair, unshare};
use crate::process::capture;
use crate::stage::{self, Staged};
use crate::tools;

/// What is shown: title, program, arguments.
const SHOWS: [(&str, &str, &[&str]); 3] = [
    ("bandwidth of RDMA writes", "ib_write_bw", &["-s", "1048576", "-n", "2000"]),
    ("latency of sends", "ib_send_lat", &["-s", "8", "-n", "20000"]),
    ("ping-pong of 4 KB messages", "ibv_rc_pingpong", &["-g", "0", "-n", "10000"]),
];
const LIMIT: Duration = Duration::from_secs(60);

/// Builds, runs the three, and prints what they say.
pub(crate) fn run() -> Result<ExitCode> {
    let staged = stage::run()?;
    let mut bad = 0;
    for (title, program, args) in SHOWS {
        println!("\n=== {program}: {title}, two processes on this machine, over Quipu");
        let address = Family::V4.loopback();
        let command = format!("quipu run --address {address} -- {program} {}", args.join(" "));
        println!("    server$ {command}");
        println!("    client$ {command} {address}\n");
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let pairing = Pairing::one_host(&staged, Family::V4);
        let pair = run_pair(&pairing, program, &args, LIMIT)?;
        if pair.both_succeeded() {
            print!("{}", pair.client.stdout);
        } else {
            bad += 1;
            print!("{}", pair.text());
        }
    }
    let page = page(&staged)?;
    bad += usize::from(page == Some(false));
    if bad > 0 {
        println!(
            "\nDemo failed: {bad} of {} programs did not run. `quipu doctor` ({}) may say why.",
            SHOWS.len() + 1,
            staged.quipu.display()
        );
        return Ok(ExitCode::FAILURE);
    }
    let more =
        if page.is_some() { ", and curl fetched a page from one of its queue pairs" } else { "" };
    println!("\nDemo passed: {} unmodified RDMA programs ran over Quipu{more}.", SHOWS.len());
    println!("Yours does too: {} run -- PROGRAM", staged.quipu.display());
    Ok(ExitCode::SUCCESS)
}

/// The last show: the kernel and an adapter at the ends of a TAP device, in a namespace of their own, and
/// what the kernel's programs see of it. `{server}` stands for the server.
const PAGE: &str = "\
ip link set lo up
ip tuntap add dev qp0 mode tap vnet_hdr || exit 1
ip address add 10.9.0.1/24 dev qp0 && ip link set qp0 up || exit 1
{server} &
server=$!
for try in $(seq 100); do
    curl --silent --head --max-time 1 http://10.9.0.2/ > /dev/null && break
    sleep 0.1
done
curl --silent --show-error --fail --max-time 20 http://10.9.0.2/
outcome=$?
kill $server
exit $outcome
";

/// Has `curl` fetch a page from a queue pair; whether it came. None where that is not permitted, which it
/// says.
fn page(staged: &Staged) -> Result<Option<bool>> {
    println!("\n=== curl: a page from a queue pair over TCP, with no protocol between");
    let permitted = |root: &bool| {
        let mut probe = unshare(*root);
        probe.args(["sh", "-c", "ip tuntap add dev qp0 mode tap"]);
        capture(probe, LIMIT).is_ok_and(|ended| ended.success())
    };
    if tools::find("curl").is_none() {
        println!("skipped: there is no curl here");
        return Ok(None);
    }
    let Some(root) = [true, false].into_iter().find(permitted) else {
        println!(
            "skipped: this machine permits no network namespaces with TAP devices, neither to this user nor \
             in a user namespace; run as root, or allow kernel.unprivileged_userns_clone and /dev/net/tun"
        );
        return Ok(None);
    };
    let serve = "qpip serve --link tap:qp0 --address 10.9.0.2/24";
    println!("    server$ quipu {serve}\n    client$ curl http://10.9.0.2/\n");
    let server = format!("'{}' {serve} --quiet > /dev/null", staged.quipu.display());
    let mut command = unshare(root);
    command.args(["sh", "-c", &PAGE.replace("{server}", &server)]);
    let ended = capture(command, LIMIT)?;
    let came = ended.success() && ended.stdout.contains("A page from a queue pair");
    print!("{}", if came { ended.stdout } else { ended.text("curl") });
    Ok(Some(came))
}
