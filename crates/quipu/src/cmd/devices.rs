//! `quipu devices`: what programs see.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::process::ExitCode;

use quipu_host::{Config, Engine};
use serde_json::json;

use super::DeviceOptions;
use super::failure::Failure;
use super::output::table;

/// How to show them.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    device: DeviceOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Lists the devices.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let refused = |why: &dyn std::fmt::Display| Failure::new("no RDMA device", why, "");
    let mut config = Config::from_env().map_err(|error| refused(&error))?;
    config.address = options.device.address.or(config.address);
    // Opened as programs do, so what would refuse them is found here.
    let engine = Engine::open(config).map_err(|error| refused(&error))?;
    let address = engine.address();
    let gid = match address.ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let state = if address.up { "active" } else { "down" };
    if options.json {
        print_json(address, gid, state);
    } else {
        let heading = ["device", "state", "gid", "address", "interface"].map(str::to_owned);
        let line = [
            "quipu0".into(),
            state.to_owned(),
            gid.to_string(),
            address.ip.to_string(),
            address.interface.clone(),
        ];
        table(&mut io::stdout().lock(), &[heading.into(), line.into()])?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print_json(address: &quipu_host::HostAddress, gid: Ipv6Addr, state: &str) {
    let devices = json!([{
        "device": "quipu0",
        "link_layer": "Ethernet",
        "state": state,
        "gid": gid.to_string(),
        "address": address.ip.to_string(),
        "interface": address.interface,
    }]);
    println!("{devices:#}");
}
