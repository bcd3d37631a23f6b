//! What the software costs: cycles of each step of the kernel, the drivers and the programs.
//!
//! The numbers are data, `costs/*.toml`, each with its source. They are the cycles that a step takes when all
//! its data is in the first-level cache; what the caches and buses add is simulated.

use std::collections::BTreeMap;

use serde::Deserialize;
use thiserror::Error;

/// A table that cannot be used.
#[derive(Debug, Error)]
pub(crate) enum CostError {
    /// No TOML, or of another shape.
    #[error("{0}")]
    Syntax(#[from] toml::de::Error),
    /// A step has no cost, or a cost no step.
    #[error("{name}: {what}")]
    Name {
        /// The cost.
        name: String,
        /// Missing or unknown.
        what: &'static str,
    },
}

macro_rules! costs {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A step that costs cycles.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Cost {
            $($(#[$doc])* $variant,)*
        }

        const NAMES: &[(&str, Cost)] = &[$(($name, Cost::$variant),)*];
    };
}

costs! {
    /// From the interrupt to the driver's handler.
    IrqEntry = "irq_entry",
    /// Looking whether a received packet goes on where the one before it ended (GRO).
    Gro = "gro",
    /// From the handler back.
    IrqExit = "irq_exit",
    /// A run of the softirq.
    Softirq = "softirq",
    /// A timer that has expired.
    Timer = "timer",
    /// Driver of the descriptor NIC: a received packet.
    DescriptorRx = "descriptor_rx",
    /// The same: a fresh receive descriptor.
    DescriptorRefill = "descriptor_refill",
    /// The same: a packet to be sent.
    DescriptorTx = "descriptor_tx",
    /// The same: a packet that was sent.
    DescriptorReclaim = "descriptor_reclaim",
    /// Driver of SINIC: a received packet.
    SinicRx = "sinic_rx",
    /// The same: a packet to be sent.
    SinicTx = "sinic_tx",
    /// Driver of V-SINIC: a received packet.
    VsinicRx = "vsinic_rx",
    /// The same: a packet to be sent.
    VsinicTx = "vsinic_tx",
    /// The same: a copy that was deferred is started.
    VsinicCopy = "vsinic_copy",
    /// Driver of the FIFO NIC: a packet, either way.
    Fifo = "fifo",
    /// Waiting for a lock: one more look.
    Spin = "spin",
    /// A socket buffer is allocated.
    BufferAlloc = "buffer_alloc",
    /// A socket buffer is freed.
    BufferFree = "buffer_free",
    /// A packet goes from the driver through IP.
    IpRx = "ip_rx",
    /// TCP receives a segment with payload.
    TcpRxData = "tcp_rx_data",
    /// TCP receives a segment without payload.
    TcpRxAck = "tcp_rx_ack",
    /// TCP sends a segment with payload.
    TcpTxData = "tcp_tx_data",
    /// TCP sends a segment without payload.
    TcpTxAck = "tcp_tx_ack",
    /// A packet goes through IP and the queue to the driver.
    IpTx = "ip_tx",
    /// A sleeping program is made ready.
    Wakeup = "wakeup",
    /// The scheduler switches to a program.
    Switch = "switch",
    /// A system call, there and back.
    Syscall = "syscall",
    /// The receive call takes a packet from the socket.
    RecvPacket = "recv_packet",
    /// The send call makes a packet.
    SendPacket = "send_packet",
    /// The program, for each call.
    UserCall = "user_call",
    /// The web server, for each request.
    WebRequest = "web_request",
    /// File system and page cache, for each page of a file.
    FilePage = "file_page",
    /// The iSCSI layer, for each command.
    IscsiCommand = "iscsi_command",
    /// Block layer and asynchronous I/O, for each request.
    BlockRequest = "block_request",
    /// Issuing a load or a store to a device.
    RegisterIssue = "register_issue",
}

impl Cost {
    /// The cost of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, cost)| *cost)
    }

    /// All names.
    #[must_use]
    pub fn all_names() -> Vec<&'static str> {
        NAMES.iter().map(|(name, _)| *name).collect()
    }
}

/// The cycles of every step.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    cycles: Vec<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[allow(dead_code, reason = "for readers")]
    about: String,
    cost: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    cycles: u64,
    source: String,
}

const TABLES: [(&str, &str); 2] = [
    ("linux26", include_str!("../costs/linux26.toml")),
    ("linux6", include_str!("../costs/linux6.toml")),
];

/// The text of a cost table.
#[must_use]
pub fn table(name: &str) -> Option<&'static str> {
    TABLES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// The names of all cost tables.
#[must_use]
pub fn names() -> Vec<&'static str> {
    TABLES.iter().map(|(name, _)| *name).collect()
}

impl Costs {
    /// Reads a table and replaces what `other` names.
    pub(crate) fn parse(text: &str, other: &BTreeMap<String, u64>) -> Result<Self, CostError> {
        let file: File = toml::from_str(text)?;
        let wrong = |name: &str, what| CostError::Name { name: name.to_owned(), what };
        for (name, entry) in &file.cost {
            Cost::named(name).ok_or_else(|| wrong(name, "no step has this cost"))?;
            if entry.source.is_empty() {
                return Err(wrong(name, "has no source"));
            }
        }
        let mut cycles = Vec::with_capacity(NAMES.len());
        for (name, _) in NAMES {
            let given = file.cost.get(*name).ok_or_else(|| wrong(name, "is missing"))?;
            cycles.push(other.get(*name).copied().unwrap_or(given.cycles));
        }
        Ok(Self { cycles })
    }

    /// Software that costs nothing.
    pub(crate) fn free() -> Self {
        Self { cycles: vec![0; NAMES.len()] }
    }

    /// The cycles of a step.
    pub(crate) fn cycles(&self, cost: Cost) -> u64 {
        self.cycles[cost as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_has_every_cost_and_a_source() {
        for (name, text) in TABLES {
            let costs = Costs::parse(text, &BTreeMap::new());
            assert!(costs.is_ok(), "{name}: {costs:?}");
        }
    }

    #[test]
    fn a_plan_replaces_a_cost() {
        let other = BTreeMap::from([("syscall".to_owned(), 7)]);
        let costs = Costs::parse(TABLES[0].1, &other).unwrap();
        assert_eq!(costs.cycles(Cost::Syscall), 7);
        assert_eq!(Costs::free().cycles(Cost::Syscall), 0);
    }

    #[test]
    fn a_cost_without_a_step_is_refused() {
        let text = "about = \"\"\n[cost.nothing]\ncycles = 1\nsource = \"none\"\n";
        assert!(matches!(Costs::parse(text, &BTreeMap::new()), Err(CostError::Name { .. })));
    }
}
