//! What a device tells about itself that follows from its address and interface.

use std::fs;
use std::net::IpAddr;
use std::sync::OnceLock;

use quipu_abi_types::*;
use quipu_host::{Config, Device, HostAddress, OpenError, device_addresses};
use quipu_nic::{GID_ROWS, Gid, LinkLayer};

use crate::instance::current;

/// The devices that an engine would have if it were opened now; none if it could not be.
pub(crate) fn prospective_devices() -> Vec<Device> {
    Config::from_env().map(|config| config.devices).unwrap_or_default()
}

/// Node type and transport of a device.
pub(crate) const fn kind(device: Device) -> (i32, i32) {
    match device {
        Device::Quipu0 => (IBV_NODE_CA, IBV_TRANSPORT_IB),
        Device::QuipuIw0 => (IBV_NODE_RNIC, IBV_TRANSPORT_IWARP),
        // What QPIP is has no number. Taken for iWARP, perftest would write credits into its peer's memory.
        Device::QuipuQp0 => (IBV_NODE_UNSPECIFIED, IBV_TRANSPORT_UNSPECIFIED),
    }
}

/// The address that an engine would have if it were opened now, without opening one.
///
/// # Errors
///
/// As [`quipu_host::Engine::open`], as far as they concern the address.
pub(crate) fn prospective_address() -> Result<HostAddress, OpenError> {
    Ok(prospective_addresses()?.swap_remove(0))
}

/// All addresses that it would have, of which that is the first.
fn prospective_addresses() -> Result<Vec<HostAddress>, OpenError> {
    device_addresses(Config::from_env()?.address.as_ref())
}

/// The address of QPIP's packet link by which peers reach it, if one is known: that of the engine, or what
/// the environment gives it.
fn link_address() -> Option<IpAddr> {
    let addresses: Vec<IpAddr> = match current() {
        Ok(instance) => instance.engine.qpip_info().ok()?.addresses,
        Err(_) => Config::from_env().ok()?.qpip?.addresses.iter().map(|&(ip, _)| ip).collect(),
    };
    let is_local = |ip: &IpAddr| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    addresses.iter().find(|ip| !is_local(ip)).or(addresses.first()).copied()
}

/// The kind of port of a device.
pub(crate) fn link_layer(device: Device) -> LinkLayer {
    if device != Device::Quipu0 {
        return LinkLayer::Ethernet;
    }
    match current() {
        Ok(instance) => instance.engine.config().link_layer,
        Err(_) => Config::from_env().map(|config| config.link_layer).unwrap_or_default(),
    }
}

/// The most rows of a GID table that programs see. Those beyond are there for connection management.
const MOST_ROWS: usize = 32;

/// Rows of the GID table of a device, of which `quipu0` has `all`.
pub(crate) fn gid_rows(device: Device, all: usize) -> i32 {
    if device == Device::Quipu0 { all.min(MOST_ROWS) as i32 } else { 1 }
}

/// The address in a row of the GID table of `quipu0`: of the engine, or of one that would be opened now.
pub(crate) fn row_address(index: u32) -> Option<HostAddress> {
    let Ok(index) = u8::try_from(index) else { return None };
    if let Ok(instance) = current() {
        return instance.engine.gid_row(index);
    }
    let mut addresses = prospective_addresses().ok()?;
    let place = usize::from(index.saturating_sub(GID_ROWS - 1));
    (place < addresses.len()).then(|| addresses.swap_remove(place))
}

/// A row of the GID table of a device, which holds this address. That of an RNIC holds a hardware address,
/// which nobody
/// connects to: Linux shows the MAC address of the interface, and its type as that of InfiniBand. That of
/// QPIP is of the same type and holds the address of its link, which is what a peer's program is to be told.
pub(crate) fn gid_entry(device: Device, address: &HostAddress, index: u32) -> ibv_gid_entry {
    let of_hardware = || {
        let mut raw = [0; 16];
        raw[..6].copy_from_slice(&guid(device, address.ip).to_ne_bytes()[..6]);
        raw
    };
    let (raw, gid_type) = match device {
        Device::Quipu0 => {
            let gid_type = match link_layer(device) {
                LinkLayer::InfiniBand => IBV_GID_TYPE_IB,
                LinkLayer::Ethernet => IBV_GID_TYPE_ROCE_V2,
            };
            (Gid::from(address.ip).0, gid_type)
        }
        Device::QuipuIw0 => (of_hardware(), IBV_GID_TYPE_IB),
        Device::QuipuQp0 => {
            (link_address().map_or_else(of_hardware, |ip| Gid::from(ip).0), IBV_GID_TYPE_IB)
        }
    };
    ibv_gid_entry {
        gid: ibv_gid { raw },
        gid_index: index,
        port_num: 1,
        gid_type,
        ndev_ifindex: address.index,
    }
}

/// The node GUID of an address, big endian: the same in every process of this machine that has it,
/// and another one on other machines, also for addresses that each machine has (127.0.0.1).
pub(crate) fn guid(device: Device, ip: IpAddr) -> u64 {
    let name = if device == Device::Quipu0 { "" } else { device.name() };
    let gid = Gid::from(ip).0;
    // FNV-1a, 64 bits.
    let bytes = machine_id().iter().chain(name.as_bytes()).chain(&gid);
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // EUI-64: the bit of "locally administered" set, that of a group clear.
    ((hash & !(1 << 56)) | 1 << 57).to_be()
}

/// What tells this machine from others. It is read once: librdmacm asks for devices with every event.
fn machine_id() -> &'static [u8] {
    static ID: OnceLock<Vec<u8>> = OnceLock::new();
    ID.get_or_init(|| fs::read("/etc/machine-id").unwrap_or_default())
}

/// A number that the kernel tells about an interface.
fn of_interface(name: &str, what: &str) -> Option<u32> {
    let text = fs::read_to_string(format!("/sys/class/net/{name}/{what}")).ok()?;
    text.trim().parse().ok()
}

/// The MTU that the port shows as active. It limits the messages of datagram queue pairs, and nothing else
/// that Quipu sends.
pub(crate) fn active_mtu(address: &HostAddress) -> u32 {
    address.active_mtu().into()
}

/// Width and lane speed (PortInfo LinkWidthActive, LinkSpeedActive) for a rate in Mb/s: the
/// slowest combination that is at least as fast.
fn width_and_speed(mbps: u32) -> (u8, u8) {
    const TABLE: [(u32, u8, u8); 8] = [
        (2_500, 1, 1),
        (5_000, 1, 2),
        (10_000, 1, 4),
        (25_000, 1, 32),
        (40_000, 2, 4),
        (50_000, 1, 64),
        (100_000, 2, 32),
        (200_000, 2, 64),
    ];
    let fits = TABLE.iter().find(|(rate, ..)| mbps <= *rate);
    fits.map_or((2, 128), |&(_, width, speed)| (width, speed))
}

/// What is shown for interfaces that have no rate of their own (loopback, virtual ones), in Mb/s.
const RATE_OF_MEMORY: u32 = 100_000;

/// Width and lane speed of the port.
pub(crate) fn link_speed(address: &HostAddress) -> (u8, u8) {
    let known = of_interface(&address.interface, "speed").filter(|&rate| rate > 0);
    width_and_speed(known.filter(|_| !address.loopback).unwrap_or(RATE_OF_MEMORY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_tell_addresses_apart_and_are_local() {
        let of = |device, ip: &str| guid(device, ip.parse().unwrap());
        let [a, b] = ["10.0.0.1", "10.0.0.2"].map(|ip| of(Device::Quipu0, ip));
        assert_ne!(a, b);
        assert_eq!(a, of(Device::Quipu0, "10.0.0.1"));
        assert_ne!(a, of(Device::QuipuIw0, "10.0.0.1"));
        assert_eq!(u64::from_be(a) >> 56 & 3, 2);
    }

    #[test]
    fn speeds_are_those_of_roce() {
        assert_eq!(width_and_speed(1000), (1, 1));
        assert_eq!(width_and_speed(100_000), (2, 32));
        assert_eq!(width_and_speed(400_000), (2, 128));
    }
}
