//! Plans: a machine, its network, what runs on it and for how long, as TOML.
//!
//! Every key has a default, so a plan names only what is special. `quipu machine show` prints a plan with
//! all keys filled in. A plan that cannot be is refused with the line and the allowed values.

mod check;
mod hca;
mod quantity;
mod text;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use hca::{HcaPlan, StreamKind, StreamPlan};
pub use quantity::{Bytes, Clock, Rate, Span};
pub use text::{PlanError, Setting};

/// A whole experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Plan {
    /// A name for tables and files.
    pub name: String,
    /// What the plan shows, in a sentence.
    pub about: String,
    /// Decides everything that is drawn: losses, faults, requests of clients.
    pub seed: u64,
    /// How long to run.
    pub run: RunPlan,
    /// The processor of the machine under test.
    pub cpu: CpuPlan,
    /// First-level data cache of each core; none unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub l1: Option<CachePlan>,
    /// Last-level cache, shared by the cores.
    pub l2: CachePlan,
    /// Main memory.
    pub dram: DramPlan,
    /// The link between processor and I/O bridge; only used by NICs on an I/O bus.
    pub bridge: BridgePlan,
    /// The I/O bus: PCI Express; only used by NICs with `attach = "pcie"`.
    pub pcie: PciePlan,
    /// The I/O bus: PCI or PCI-X; only used by NICs with `attach = "pci"`.
    pub pci: PciPlan,
    /// The network interface.
    pub nic: NicPlan,
    /// The InfiniBand adapter and its traffic; only used with `nic.kind = "hca"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hca: Option<HcaPlan>,
    /// The network.
    pub link: LinkPlan,
    /// The operating system.
    pub os: OsPlan,
    /// The programs.
    pub workload: WorkloadPlan,
    /// Costs that differ from the cost table, in cycles, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub costs: BTreeMap<String, u64>,
    /// What goes wrong on purpose.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<FaultPlan>,
}

/// How long to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunPlan {
    /// Time before anything is counted.
    pub warmup: Span,
    /// How much slower the machine's software is before anything is counted. M5 warmed up with a simpler,
    /// slower processor; queues that it left full may stay full.
    pub warmup_slowdown: f64,
    /// Time that is counted.
    pub sample: Span,
    /// The run stops with an error after so many events.
    pub max_events: u64,
}

/// The processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CpuPlan {
    /// Clock of each core.
    pub clock: Clock,
    /// Number of cores.
    pub cores: u32,
    /// Cache misses that a copy loop keeps in flight, on average.
    pub copy_mlp: f64,
    /// Bytes that a copy loop moves in a cycle when both sides are in the first-level cache.
    pub copy_bytes_per_cycle: f64,
    /// Whether a store to a device register waits for the device.
    pub posted_writes: bool,
}

/// A cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CachePlan {
    /// Capacity.
    pub size: Bytes,
    /// Ways of a set.
    pub ways: u32,
    /// Bytes of a line.
    pub line: Bytes,
    /// Cycles until a hit has its data.
    pub latency: u64,
    /// Misses that may be outstanding.
    pub mshrs: u32,
    /// Ways that devices may fill; 0 is all.
    pub io_ways: u32,
}

/// Main memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DramPlan {
    /// Time from request to data.
    pub latency: Span,
    /// Bandwidth in bytes of each processor cycle; 0 takes [`DramPlan::rate`].
    pub bytes_per_cycle: f64,
    /// Bandwidth, if it does not follow the clock.
    pub rate: Rate,
}

/// The link between processor and I/O bridge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BridgePlan {
    /// Bandwidth of each direction.
    pub rate: Rate,
    /// Time to cross link and bridge, one way.
    pub latency: Span,
}

/// PCI Express.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PciePlan {
    /// Generation, 1 to 5.
    pub generation: u32,
    /// Lanes: 1, 2, 4, 8, 16 or 32.
    pub lanes: u32,
    /// Maximum payload size.
    pub max_payload: Bytes,
    /// Maximum read request size.
    pub max_read: Bytes,
    /// Time to cross the bus and the device's core, one way, without the bytes.
    pub latency: Span,
    /// Read requests that the device may have outstanding.
    pub tags: u32,
    /// Bytes of posted writes that may be under way (flow-control credits).
    pub posted_credits: Bytes,
}

/// PCI or PCI-X: a bus that one device uses at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PciPlan {
    /// Width in bits: 32 or 64.
    pub width: u32,
    /// Clock.
    pub clock: Clock,
    /// Clocks that a transaction takes in addition to its data: arbitration, address, turnaround.
    pub overhead: u64,
    /// Most bytes of a transaction.
    pub burst: Bytes,
}

/// What kind of network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NicKind {
    /// Descriptor rings in memory.
    Descriptor,
    /// FIFOs and a copy engine under the driver's control.
    Sinic,
    /// SINIC with a register bank for each packet.
    Vsinic,
    /// Two registers, no memory access: the smallest NIC there can be.
    Fifo,
    /// The programmable NIC of the QPIP paper: queue pairs and TCP in firmware.
    Lanai,
    /// The InfiniBand adapter of the QoS paper: virtual lanes and their arbiter.
    Hca,
}

/// Where the network interface is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attach {
    /// On PCI Express, beyond the I/O bridge.
    Pcie,
    /// On PCI or PCI-X, beyond the I/O bridge.
    Pci,
    /// On the die, on the memory side of the last-level cache.
    Memory,
    /// On the die, on the processor side of the last-level cache.
    Cache,
}

/// How a descriptor driver learns that a packet is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Completion {
    /// It polls the descriptor in memory.
    Memory,
    /// It reads the head pointer from a register.
    Register,
}

/// The network interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NicPlan {
    /// The model.
    pub kind: NicKind,
    /// Where it is attached.
    pub attach: Attach,
    /// One-way time to a register of an on-die NIC.
    pub register_latency: Span,
    /// An interrupt is raised at most once in this time.
    pub interrupt_delay: Span,
    /// Receive FIFO.
    pub rx_fifo: Bytes,
    /// Transmit FIFO.
    pub tx_fifo: Bytes,
    /// Receive descriptors (descriptor NIC).
    pub rx_ring: u32,
    /// Transmit descriptors (descriptor NIC).
    pub tx_ring: u32,
    /// Descriptors that are fetched in one access (descriptor NIC).
    pub fetch: u32,
    /// Packets for which the NIC has memory accesses outstanding, each way (descriptor NIC).
    pub outstanding: u32,
    /// How the driver learns that packets were sent (descriptor NIC).
    pub completion: Completion,
    /// Message-signalled interrupts: the handler need not load the cause (descriptor NIC).
    pub msi: bool,
    /// Register banks (V-SINIC), 1 to 256.
    pub virtual_count: u32,
    /// Let the NIC split headers so that payload goes straight to the reader's buffer (V-SINIC).
    pub zero_copy: bool,
    /// Bytes of a split packet that are copied first.
    pub zero_copy_size: u32,
    /// Only longer packets are split.
    pub zero_copy_mark: u32,
    /// Splitting stops when the receive FIFO holds more than this.
    pub rx_high: Bytes,
    /// Splitting starts again when it holds less than this.
    pub rx_low: Bytes,
    /// The firmware computes checksums (LANai).
    pub firmware_checksum: bool,
    /// The NIC cuts large segments (TSO), and the kernel joins received ones (GRO) (descriptor NIC).
    pub segment_offload: bool,
}

/// How much of a link a frame takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Framing {
    /// As on real Ethernet: preamble, checksum and gap take 24 bytes.
    Ethernet,
    /// As in M5: nothing but the frame.
    M5,
}

/// The network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LinkPlan {
    /// Rate of every link.
    pub rate: Rate,
    /// Propagation of every link.
    pub delay: Span,
    /// Frames lost of a million.
    pub loss_ppm: u32,
    /// Numbers, from 1, of frames that are lost. Frames that carry an IP packet of `mtu` bytes count, those
    /// of all links together.
    pub drops: Vec<u32>,
    /// What a frame takes.
    pub framing: Framing,
    /// Bytes of an IP packet.
    pub mtu: u32,
    /// Hosts that load the machine; more than one are connected by a switch.
    pub peers: u32,
    /// Buffer of each output of the switch.
    pub switch_buffer: Bytes,
}

/// The operating system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OsPlan {
    /// Memory that received packets of a socket may take, bookkeeping included.
    pub receive_buffer: Bytes,
    /// The same for packets to be sent.
    pub send_buffer: Bytes,
    /// Packets of one poll of the NIC.
    pub budget: u32,
    /// Polls in a row before the program runs again.
    pub rounds: u32,
    /// Packets that wait for room in the NIC.
    pub queue: u32,
    /// The core that takes interrupts.
    pub interrupt_core: u32,
    /// TCP timestamps.
    pub timestamps: bool,
    /// Selective acknowledgements.
    pub sack: bool,
    /// TCP paces segments.
    pub pacing: bool,
    /// Cost table: `linux26` or `linux6`.
    pub costs: String,
}

/// What runs on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadKind {
    /// The machine sends as fast as it can, over one connection.
    Stream,
    /// The machine receives as fast as it can, over one connection.
    Maerts,
    /// As stream, over several connections in turn.
    StreamMulti,
    /// As maerts, over several connections in turn.
    MaertsMulti,
    /// A request and a response at a time.
    Rr,
    /// A web server with SPECweb99-like files and Surge-like clients.
    Web,
    /// An iSCSI target without a disk.
    IscsiTarget,
    /// An iSCSI initiator with asynchronous reads.
    IscsiInitiator,
}

/// The protocol of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Segments of a connection.
    #[default]
    Tcp,
    /// Datagrams: rr on a LANai only.
    Udp,
}

/// What runs on the machine, and how much of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkloadPlan {
    /// The program.
    pub kind: WorkloadKind,
    /// TCP or UDP.
    pub transport: Transport,
    /// Connections: of the -multi programs, of rr and of iSCSI; clients of the web server.
    pub connections: u32,
    /// Bytes of a call of send or recv.
    pub message: Bytes,
    /// Bytes of a request (rr).
    pub request: Bytes,
    /// Bytes of a response (rr), or of a read (iSCSI).
    pub response: Bytes,
    /// Reads outstanding on each connection (iSCSI).
    pub outstanding: u32,
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// A core does nothing for a while.
    Stall,
    /// Interrupts get lost for a while.
    LostInterrupts,
    /// Frames get lost for a while.
    LinkLoss,
}

/// A fault: something goes wrong at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultPlan {
    /// What goes wrong.
    pub kind: FaultKind,
    /// When, from the start of the run.
    pub at: Span,
    /// For how long.
    pub length: Span,
    /// The core (stall).
    #[serde(default)]
    pub core: u32,
    /// How many of a million are lost (lost-interrupts, link-loss).
    #[serde(default = "all")]
    pub ppm: u32,
}

fn all() -> u32 {
    1_000_000
}

const KB: u64 = 1 << 10;
const MB: u64 = 1 << 20;
const NS: u64 = 1_000;
const US: u64 = 1_000 * NS;
const MS: u64 = 1_000 * US;

impl Default for Plan {
    fn default() -> Self {
        Self {
            name: "machine".into(),
            about: String::new(),
            seed: 1,
            run: RunPlan::default(),
            cpu: CpuPlan::default(),
            l1: None,
            l2: CachePlan::default(),
            dram: DramPlan::default(),
            bridge: BridgePlan::default(),
            pcie: PciePlan::default(),
            pci: PciPlan::default(),
            nic: NicPlan::default(),
            hca: None,
            link: LinkPlan::default(),
            os: OsPlan::default(),
            workload: WorkloadPlan::default(),
            costs: BTreeMap::new(),
            faults: Vec::new(),
        }
    }
}

impl Default for RunPlan {
    fn default() -> Self {
        Self {
            warmup: Span(10 * MS),
            warmup_slowdown: 1.0,
            sample: Span(20 * MS),
            max_events: 200_000_000,
        }
    }
}

impl Default for CpuPlan {
    fn default() -> Self {
        Self {
            clock: Clock(4000),
            cores: 1,
            copy_mlp: 1.8,
            copy_bytes_per_cycle: 8.0,
            posted_writes: true,
        }
    }
}

impl Default for CachePlan {
    fn default() -> Self {
        let (size, line) = (Bytes(8 * MB), Bytes(64));
        Self { size, ways: 8, line, latency: 25, mshrs: 40, io_ways: 0 }
    }
}

impl Default for DramPlan {
    fn default() -> Self {
        Self { latency: Span(50 * NS), bytes_per_cycle: 4.0, rate: Rate(0) }
    }
}

impl Default for BridgePlan {
    fn default() -> Self {
        Self { rate: Rate(51_200_000_000), latency: Span(60 * NS) }
    }
}

impl Default for PciePlan {
    fn default() -> Self {
        Self {
            generation: 1,
            lanes: 4,
            max_payload: Bytes(128),
            max_read: Bytes(512),
            latency: Span(250 * NS),
            tags: 8,
            posted_credits: Bytes(4 * KB),
        }
    }
}

impl Default for PciPlan {
    fn default() -> Self {
        Self { width: 64, clock: Clock(33), overhead: 8, burst: Bytes(4096) }
    }
}

impl Default for NicPlan {
    fn default() -> Self {
        Self {
            kind: NicKind::Descriptor,
            attach: Attach::Pcie,
            register_latency: Span(10 * NS),
            interrupt_delay: Span(10 * US),
            rx_fifo: Bytes(512 * KB),
            tx_fifo: Bytes(512 * KB),
            rx_ring: 512,
            tx_ring: 512,
            fetch: 8,
            outstanding: 4,
            completion: Completion::Memory,
            msi: false,
            firmware_checksum: false,
            segment_offload: false,
            virtual_count: 1,
            zero_copy: false,
            zero_copy_size: 64,
            zero_copy_mark: 256,
            rx_high: Bytes(384 * KB),
            rx_low: Bytes(128 * KB),
        }
    }
}

impl Default for LinkPlan {
    fn default() -> Self {
        Self {
            rate: Rate(10_000_000_000),
            delay: Span(US),
            loss_ppm: 0,
            drops: Vec::new(),
            framing: Framing::Ethernet,
            mtu: 1500,
            peers: 1,
            switch_buffer: Bytes(MB),
        }
    }
}

impl Default for OsPlan {
    fn default() -> Self {
        Self {
            receive_buffer: Bytes(MB),
            send_buffer: Bytes(512 * KB),
            budget: 64,
            rounds: 10,
            queue: 1000,
            interrupt_core: 0,
            timestamps: false,
            sack: false,
            pacing: false,
            costs: "linux26".into(),
        }
    }
}

impl Default for WorkloadPlan {
    fn default() -> Self {
        Self {
            kind: WorkloadKind::Maerts,
            transport: Transport::Tcp,
            connections: 1,
            message: Bytes(64 * KB),
            request: Bytes(128),
            response: Bytes(8 * KB),
            outstanding: 8,
        }
    }
}
