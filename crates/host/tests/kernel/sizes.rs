//! Lengths, over every link and every MTU.

use super::adapter::{Adapter, Link};
use super::pairs::{CLIENTS, Client, ORDERS, Order, Plan, exchange};
use super::socket::{Buffers, VERSIONS};
use super::space::{Offload, inside, offload};

/// The window of a queue pair here.
const RECEIVES: (u64, u64) = (16, 65_536);

/// Every length, by both versions, from both ends, in turns in every order.
fn lengths(adapter: &Adapter, lengths: &[u64]) {
    let mut orders = ORDERS.into_iter().cycle();
    for version in VERSIONS {
        for client in CLIENTS {
            for (at, &len) in lengths.iter().enumerate() {
                let back = lengths[lengths.len() - 1 - at];
                let order = orders.next().unwrap();
                let plan = Plan { there: len, back, order };
                exchange(adapter, (version, client), RECEIVES, Buffers::default(), plan);
            }
        }
    }
}

fn over(name: &str, link: Link, mtu: u32, total: u64) {
    if !inside(&format!("sizes::{name}")) {
        return;
    }
    let Some(adapter) = Adapter::new(link, mtu) else { return };
    let mtu = u64::from(mtu);
    lengths(&adapter, &[1, mtu - 52, mtu, 100_003, 0, 65_536, total]);
}

#[test]
fn a_tap_of_1500() {
    over("a_tap_of_1500", Link::Tap, 1_500, 8 << 20);
}

#[test]
fn a_tap_of_1280() {
    over("a_tap_of_1280", Link::Tap, 1_280, 1 << 20);
}

#[test]
fn a_tap_of_9000() {
    over("a_tap_of_9000", Link::Tap, 9_000, 1 << 20);
}

#[test]
fn a_tap_of_16384() {
    over("a_tap_of_16384", Link::Tap, 16_384, 1 << 20);
}

/// The largest that the kernel gives a TAP device: 65,535 less the Ethernet header.
#[test]
fn a_tap_of_65521() {
    over("a_tap_of_65521", Link::Tap, 65_521, 8 << 20);
}

#[test]
fn a_packet_socket() {
    over("a_packet_socket", Link::Packet, 1_500, 1 << 20);
}

#[test]
fn a_packet_socket_of_65535() {
    over("a_packet_socket_of_65535", Link::Packet, 65_535, 1 << 20);
}

#[test]
fn an_xdp_socket() {
    over("an_xdp_socket", Link::Xdp, 1_500, 1 << 20);
}

#[test]
fn an_xdp_socket_of_3498() {
    over("an_xdp_socket_of_3498", Link::Xdp, 3_498, 1 << 20);
}

/// The kernel cuts segments and computes checksums itself, or leaves one or both to the link; what comes in
/// it takes one by one, or joined.
fn offloads(name: &str, link: Link) {
    if !inside(&format!("sizes::{name}")) {
        return;
    }
    let Some(adapter) = Adapter::new(link, 1_500) else { return };
    let all = [Offload::Segments, Offload::Generic, Offload::Received, Offload::Checksum];
    for off in [&all[..1], &all[1..2], &all[2..3], &all] {
        off.iter().for_each(|one| offload(adapter.interface, *one, false));
        for version in VERSIONS {
            let plan = Plan { there: 500_000, back: 500_000, order: Order::Together };
            exchange(&adapter, (version, Client::Kernel), RECEIVES, Buffers::default(), plan);
        }
        off.iter().rev().for_each(|one| offload(adapter.interface, *one, true));
    }
}

#[test]
fn offloads_of_a_tap() {
    offloads("offloads_of_a_tap", Link::Tap);
}

#[test]
fn offloads_of_a_packet_socket() {
    offloads("offloads_of_a_packet_socket", Link::Packet);
}
