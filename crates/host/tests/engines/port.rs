//! The port follows its interface. The interface is the loopback of a network namespace of its own, so
//! this needs the right to make one, and is skipped where there is none.

use std::net::IpAddr;
use std::process::Command;

use crate::common::{Node, engine};
use quipu_host::nic::AsyncEvent;
use quipu_host::{Device, SameHost};

/// Set for the run inside the namespace.
const INSIDE: &str = "INSIDE_A_NAMESPACE";

fn ip(arguments: &str) {
    let done = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(done.success(), "{arguments}");
}

/// Runs a test, `name` being its whole name, in a namespace.
fn in_a_namespace(name: &str, inside: fn()) {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    let namespace = || {
        let mut command = Command::new("unshare");
        command.arg("-rn");
        command
    };
    let possible = namespace().args(["ip", "link", "set", "lo", "up"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: no network namespaces here");
        return;
    }
    let output = namespace()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_interface_that_goes_down_takes_the_port_with_it() {
    in_a_namespace("port::an_interface_that_goes_down_takes_the_port_with_it", follows);
}

fn follows() {
    ip("link set lo up");
    let engine = engine("127.0.0.1", SameHost::Auto);
    let node = Node::new(&engine, 64);
    assert!(engine.port_is_up(Device::Quipu0));
    ip("link set lo down");
    assert_eq!(engine.wait_async(node.context).unwrap(), AsyncEvent::PortErr);
    assert!(!engine.port_is_up(Device::Quipu0));
    ip("link set lo up");
    assert_eq!(engine.wait_async(node.context).unwrap(), AsyncEvent::PortActive);
    assert!(engine.port_is_up(Device::Quipu0));
}

#[test]
fn an_address_may_come_back_on_another_interface() {
    in_a_namespace("port::an_address_may_come_back_on_another_interface", comes_back);
}

fn comes_back() {
    let make = |number: u32| {
        ip(&format!("link add d{number} mtu 9000 type veth peer name e{number}"));
        ip(&format!("link set d{number} up"));
        ip(&format!("link set e{number} up"));
        ip(&format!("addr add 10.77.0.1/24 dev d{number} label d{number}:1"));
    };
    make(0);
    let address = || {
        let all = quipu_host::host_addresses().unwrap();
        all.into_iter().find(|address| address.ip == IpAddr::from([10, 77, 0, 1])).unwrap()
    };
    // The name is that of the interface, not of the address; `/sys` is that of another namespace.
    assert_eq!((address().interface.as_str(), address().active_mtu()), ("d0", 5));
    // It has a carrier once both ends are up.
    while !address().running {
        std::thread::yield_now();
    }
    let engine = engine("10.77.0.1", SameHost::Auto);
    let node = Node::new(&engine, 64);
    for number in 1..3 {
        ip(&format!("link del d{}", number - 1));
        assert_eq!(engine.wait_async(node.context).unwrap(), AsyncEvent::PortErr);
        make(number);
        assert_eq!(engine.wait_async(node.context).unwrap(), AsyncEvent::PortActive);
    }
}
