//! `quipu devices`: what programs see.

use std::io;
use std::net::IpAddr;
use std::process::ExitCode;

use quipu_host::nic::LinkLayer;
use quipu_host::{Device, Engine};
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
    let config = options.device.to_look_at().map_err(|error| refused(&error))?;
    let link_layer = config.link_layer;
    // Opened as programs do, so what would refuse them is found here.
    let engine = Engine::open(config).map_err(|error| refused(&error))?;
    let lines: Vec<Line> = engine.devices().iter().map(|&device| line(device, &engine)).collect();
    if options.json {
        let devices: Vec<_> = lines.iter().map(|line| as_json(line, link_layer)).collect();
        println!("{:#}", json!(devices));
    } else {
        let heading = ["device", "transport", "state", "gid", "address", "interface"];
        let mut rows = vec![heading.map(str::to_owned).into()];
        rows.extend(lines.into_iter().map(|line| line.into()));
        table(&mut io::stdout().lock(), &rows)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Name, transport, state, GID, address and interface.
type Line = [String; 6];

fn line(device: Device, engine: &Engine) -> Line {
    if device == Device::QuipuQp0 {
        return on_link(device, engine);
    }
    let address = engine.address();
    // An RNIC is reached by addresses only.
    let (transport, gid) = match (device, address.ip) {
        (Device::Quipu0, IpAddr::V4(v4)) => ("InfiniBand", v4.to_ipv6_mapped().to_string()),
        (Device::Quipu0, IpAddr::V6(v6)) => ("InfiniBand", v6.to_string()),
        (Device::QuipuIw0 | Device::QuipuQp0, _) => ("iWARP", "-".to_owned()),
    };
    let state = if address.up { "active" } else { "down" };
    let (ip, interface) = (address.ip.to_string(), address.interface.clone());
    [device.name().into(), transport.into(), state.into(), gid, ip, interface]
}

/// The device of QPIP, which has a link of its own.
fn on_link(device: Device, engine: &Engine) -> Line {
    let (address, link) = match engine.qpip_info() {
        Ok(info) => {
            let all: Vec<_> = info.addresses.iter().map(ToString::to_string).collect();
            (all.join(","), info.link.to_string())
        }
        Err(_) => ("-".to_owned(), "-".to_owned()),
    };
    [device.name().into(), "TCP".into(), "active".into(), "-".into(), address, link]
}

fn as_json(line: &Line, link_layer: LinkLayer) -> serde_json::Value {
    let [device, transport, state, gid, address, interface] = line;
    // Of the others it is always Ethernet's.
    let infiniband = device == Device::Quipu0.name() && link_layer == LinkLayer::InfiniBand;
    json!({
        "device": device,
        "transport": transport,
        "link_layer": if infiniband { "InfiniBand" } else { "Ethernet" },
        "state": state,
        "gid": if gid == "-" { None } else { Some(gid) },
        "address": address,
        "interface": interface,
    })
}
