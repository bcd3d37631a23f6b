//! The port follows its interface. The interface is the loopback of a network namespace of its own, so
//! this needs the right to make one, and is skipped where there is none.

use std::process::Command;

use crate::common::{Node, engine};
use quipu_host::nic::AsyncEvent;
use quipu_host::{Device, SameHost};

/// Set for the run inside the namespace.
const INSIDE: &str = "INSIDE_A_NAMESPACE";

fn loopback(state: &str) {
    let done = Command::new("ip").args(["link", "set", "lo", state]).status().unwrap();
    assert!(done.success());
}

#[test]
fn an_interface_that_goes_down_takes_the_port_with_it() {
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
    let name = "port::an_interface_that_goes_down_takes_the_port_with_it";
    let output = namespace()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn inside() {
    loopback("up");
    let engine = engine("127.0.0.1", SameHost::Auto);
    let node = Node::new(&engine, 64);
    assert!(engine.port_is_up(Device::Quipu0));
    loopback("down");
    assert_eq!(engine.wait_async(node.context).unwrap(), AsyncEvent::PortErr);
    assert!(!engine.port_is_up(Device::Quipu0));
    loopback("up");
    assert_eq!(engine.wait_async(node.context).unwrap(), AsyncEvent::PortActive);
    assert!(engine.port_is_up(Device::Quipu0));
}
