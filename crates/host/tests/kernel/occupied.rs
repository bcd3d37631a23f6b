//! Addresses that somebody else has.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quipu_host::{Config, Engine, OpenError, QpipConfig};

use super::socket::{KERNEL, OURS};
use super::space::{inside, ip, wait_until_local, wait_until_up};

/// An adapter with these addresses, between spaces; or why not, in words.
fn adapter(link: &str, addresses: &str) -> Result<Arc<Engine>, OpenError> {
    let with_len = |address: &str| {
        let address: IpAddr = address.parse().unwrap();
        (address, if address.is_ipv4() { 24 } else { 64 })
    };
    let addresses = addresses.split(' ').map(with_len).collect();
    let qpip = QpipConfig { addresses, ..QpipConfig::new(link.parse().unwrap()) };
    let this_host = Some([127, 0, 0, 1].into());
    Engine::open(Config {
        address: this_host,
        counters: false,
        qpip: Some(qpip),
        ..Config::default()
    })
}

/// A machine that stands still for longer than an answer is waited for takes an address for free.
fn refusal(link: &str, address: &str) -> String {
    let refused = (0..10).find_map(|_| adapter(link, address).err());
    refused.expect("it is not free").to_string()
}

/// Opens an adapter, which takes no second, if the machine does not stand still.
fn opens_soon(address: &str) {
    let took = || {
        let begun = Instant::now();
        adapter("packet:ours", address).unwrap();
        begun.elapsed()
    };
    assert!((0..10).any(|_| took() < Duration::from_secs(1)), "{address}");
}

fn pair() {
    ip("link add ours type veth peer name theirs");
    ip("link set ours up");
    ip("link set theirs address 02:00:00:00:00:03 up");
    ["ours", "theirs"].into_iter().for_each(wait_until_up);
}

#[test]
fn an_address_of_the_kernel_is_not_taken() {
    if !inside("occupied::an_address_of_the_kernel_is_not_taken") {
        return;
    }
    pair();
    for (address, len) in [(KERNEL[0], 24), (KERNEL[1], 64)] {
        ip(&format!(
            "address add {address}/{len} dev theirs{}",
            if len == 64 { " nodad" } else { "" }
        ));
    }
    wait_until_local(KERNEL[1]);
    for address in KERNEL {
        // At the other end of the cable, and beside the adapter.
        let said = refusal("packet:ours", address);
        assert!(said.contains(address) && said.contains("02:00:00:00:00:03"), "{said}");
        assert!(said.contains("--address"), "{said}");
        let said = refusal("packet:theirs", address);
        assert!(said.contains(address) && said.contains("the kernel's own"), "{said}");
    }
    // Also as the last of more than a link has room for at once.
    let many = (0..100).map(|n| format!("10.77.0.{} ", 100 + n)).collect::<String>();
    let said = refusal("packet:ours", &(many + KERNEL[0]));
    assert!(said.contains(KERNEL[0]) && said.contains("02:00:00:00:00:03"), "{said}");
    for address in OURS {
        opens_soon(address);
    }
}

#[test]
fn an_address_of_another_adapter_is_not_taken() {
    if !inside("occupied::an_address_of_another_adapter_is_not_taken") {
        return;
    }
    pair();
    for address in OURS {
        let first = adapter("packet:theirs,station=02:00:00:00:00:0a", address).unwrap();
        let said = refusal("packet:ours", address);
        assert!(said.contains(address) && said.contains("02:00:00:00:00:0a"), "{said}");
        // Once it is gone it is free.
        drop(first);
        adapter("packet:ours", address).unwrap();
    }
}

#[test]
fn a_link_that_is_down_is_not_waited_for() {
    if !inside("occupied::a_link_that_is_down_is_not_waited_for") {
        return;
    }
    ip("link add ours type veth peer name theirs");
    opens_soon(OURS[0]);
}
