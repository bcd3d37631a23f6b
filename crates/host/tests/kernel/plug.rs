//! Holds up what the kernel sends, so that packets cross each other for certain and not by luck.

use std::net::UdpSocket;
use std::process::{Command, Output};

use super::space::ip;

/// The kernel's interface, from which nothing goes out until [`Plug::pull`].
pub struct Plug {
    interface: &'static str,
}

/// Runs `tc`, which may fail.
pub fn try_tc(arguments: &str) -> Output {
    Command::new("tc").args(arguments.split_whitespace()).output().unwrap()
}

/// Runs `tc`; what it says.
pub fn tc(arguments: &str) -> String {
    let output = try_tc(arguments);
    assert!(output.status.success(), "tc {arguments}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

impl Plug {
    /// The interface sends a little more, and then an octet each second. None, and said, where the kernel
    /// cannot shape what it sends.
    pub fn new(interface: &'static str) -> Option<Self> {
        let shape = "root tbf rate 8bit burst 1600 limit 1000000";
        let output = try_tc(&format!("qdisc add dev {interface} {shape}"));
        if !output.status.success() {
            println!(
                "SKIPPED: this kernel has no tbf: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            return None;
        }
        let this = Self { interface };
        while this.is_open() {
            this.datagram();
        }
        Some(this)
    }

    fn is_open(&self) -> bool {
        tc(&format!("-s qdisc show dev {} root", self.interface)).contains("backlog 0b 0p")
    }

    /// Something that the interface has to send.
    fn datagram(&self) {
        let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
        socket.send_to(&[0; 400], "10.9.0.2:9").unwrap();
    }

    /// All that was held up goes out, in order.
    pub fn pull(self) {
        let interface = self.interface;
        tc(&format!("qdisc change dev {interface} root tbf rate 1gbit burst 100000 limit 1000000"));
        // It is looked at again when there is something to send.
        while !self.is_open() {
            self.datagram();
        }
        tc(&format!("qdisc del dev {interface} root"));
    }
}

/// The kernel knows where the adapter is without asking.
pub fn know_the_adapter(interface: &str, station: [u8; 6]) {
    let pairs: Vec<_> = station.iter().map(|octet| format!("{octet:02x}")).collect();
    for address in super::socket::OURS {
        let station = pairs.join(":");
        ip(&format!("neigh replace {address} lladdr {station} dev {interface} nud permanent"));
    }
}
