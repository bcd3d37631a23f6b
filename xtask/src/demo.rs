//! Three programs of the distribution, each between two processes, over Quipu.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

use crate::clients::{Family, Pairing, run_pair};
use crate::stage;

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
    if bad > 0 {
        println!(
            "\nDemo failed: {bad} of {} programs did not run. `quipu doctor` ({}) may say why.",
            SHOWS.len(),
            staged.quipu.display()
        );
        return Ok(ExitCode::FAILURE);
    }
    println!("\nDemo passed: {} unmodified RDMA programs ran over Quipu.", SHOWS.len());
    println!("Yours does too: {} run -- PROGRAM", staged.quipu.display());
    Ok(ExitCode::SUCCESS)
}
