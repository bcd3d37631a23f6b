//! What a seed draws before a run begins: which features are used, and how much of each. Most runs use
//! few, so that rare combinations get their turn undisturbed ("swarm testing").

use quipu_nic::{Crc, WriteOrder};

use crate::flow::FlowConfig;
use crate::network::Profile;
use crate::options::Options;
use crate::rng::Rng;
use crate::world::Style;

/// How long the rest of a message over a stream may take to come. Hosts wait longer, for processes that are
/// stopped; here a length that was damaged is to end its connection before the run does.
pub(crate) const UNFINISHED_NS: u64 = 5_000_000_000;

/// What a send request does, for the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Send,
    SendImm,
    SendInv,
    Write,
    WriteImm,
    Read,
    CompareSwap,
    FetchAdd,
    LocalInv,
    Bind,
    SharedAdd,
    FencedSend,
    AtomicWrite,
    Flush,
}

/// All kinds, in the order of the weights.
pub const KINDS: [Kind; 14] = [
    Kind::Send,
    Kind::SendImm,
    Kind::SendInv,
    Kind::Write,
    Kind::WriteImm,
    Kind::Read,
    Kind::CompareSwap,
    Kind::FetchAdd,
    Kind::LocalInv,
    Kind::Bind,
    Kind::SharedAdd,
    Kind::FencedSend,
    Kind::AtomicWrite,
    Kind::Flush,
];

/// How a program asks for what it may not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trap {
    /// A key that names nothing.
    WrongKey,
    /// A range that leaves the region.
    OutOfBounds,
    /// An operation that the region does not grant.
    NoRight,
    /// An operation that the queue pair does not grant.
    NoQpRight,
    /// An atomic at an address that is no multiple of 8.
    Misaligned,
    /// A send longer than any receive.
    TooLong,
    /// Payload in memory that is not registered.
    BadLocalKey,
    /// A read into memory that may only be read.
    ReadOnlySink,
    /// A receive in memory that is not registered.
    BadReceive,
    /// A send that invalidates a key that names nothing.
    BadInvalidate,
    /// An invalidation of an own key that names nothing.
    BadLocalInvalidate,
    /// A window bound beyond its region.
    BadBind,
}

/// All traps.
pub const TRAPS: [Trap; 12] = [
    Trap::WrongKey,
    Trap::OutOfBounds,
    Trap::NoRight,
    Trap::NoQpRight,
    Trap::Misaligned,
    Trap::TooLong,
    Trap::BadLocalKey,
    Trap::ReadOnlySink,
    Trap::BadReceive,
    Trap::BadInvalidate,
    Trap::BadLocalInvalidate,
    Trap::BadBind,
];

/// Something that happens in the middle of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mishap {
    /// A program takes its queue pair to ERR.
    ToError { end: usize },
    /// A program takes its queue pair to RESET.
    Reset { end: usize },
    /// A program destroys its queue pair.
    Destroy { end: usize },
    /// A program stops its send queue for a while.
    Drain { end: usize },
    /// A program deregisters the region that its peer uses.
    Deregister { end: usize },
    /// Both programs reset their queue pairs and connect them anew.
    Reconnect { pair: usize },
    /// A host forbids access to the memory of an engine.
    Deny { host: usize },
    /// An engine ends, with its machine or alone.
    Kill { host: usize, silent: bool },
    /// Strangers connect and say nothing, or nonsense.
    Flood { host: usize, count: u32 },
}

/// What the seed drew.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Machine and style of each host.
    pub hosts: Vec<(u8, Style)>,
    pub profile: Profile,
    /// The hosts of the ends of each connection; two equal ones may be one queue pair.
    pub pairs: Vec<([usize; 2], bool)>,
    pub weights: [u32; KINDS.len()],
    pub ops: u32,
    /// Percent of requests that are inline where they fit, signalled, fenced, solicited.
    pub inline_percent: u64,
    pub signaled_percent: u64,
    pub fence_percent: u64,
    pub solicited_percent: u64,
    pub max_len: usize,
    /// Receives come late, so that senders must wait.
    pub late_receives: bool,
    /// Some queue pairs give up after so many refusals for lack of a receive.
    pub finite_rnr: bool,
    pub use_srq: bool,
    pub cqs_per_host: usize,
    /// One time in how many a connection has a trap, in percent.
    pub trap_percent: u64,
    pub mishaps: u32,
    pub partition_percent: u64,
    /// When everything that disturbs is over, in nanoseconds.
    pub calm_ns: u64,
    pub copy_limit: u32,
    pub max_ulpdu: u32,
    pub setup_timeout_ns: u64,
    pub tick_ns: u64,
    /// How many ends of connections have another address of their host than the first, in percent.
    pub other_address_percent: u64,
}

impl Plan {
    /// Draws a plan.
    pub fn draw(rng: &mut Rng, options: &Options) -> Self {
        let hosts = draw_hosts(rng, options);
        let most = options.max_pairs.max(1) as u64;
        let count = 1 + rng.below(most) as usize * usize::from(rng.percent(70));
        let pairs = (0..count)
            .map(|_| {
                let a = rng.index(hosts.len());
                let b = rng.index(hosts.len());
                // Distinct hosts more often than not.
                let b = if a == b && rng.percent(70) { (a + 1) % hosts.len() } else { b };
                ([a, b], a == b && rng.percent(50))
            })
            .collect();
        let mut weights = [0; KINDS.len()];
        for weight in &mut weights {
            *weight = if rng.percent(60) { rng.range(1, 10) as u32 } else { 0 };
        }
        weights[rng.index(8)] += 5;
        weights[0] += u32::from(weights[..8].iter().all(|&weight| weight == 0));
        let ops = if rng.percent(80) { options.max_ops / 2 } else { options.max_ops };
        let program = options.program_faults;
        Self {
            profile: draw_profile(rng, options),
            hosts,
            pairs,
            weights,
            ops: 4 + rng.below(u64::from(ops.max(1))) as u32,
            inline_percent: rng.pick(&[0, 30, 90]),
            signaled_percent: rng.pick(&[10, 50, 100]),
            fence_percent: rng.pick(&[0, 5, 30]),
            solicited_percent: rng.pick(&[0, 30]),
            max_len: rng.pick(&[64, 4096, 20_000, 70_000, 300_000, 1_200_000]),
            late_receives: rng.percent(30),
            finite_rnr: rng.percent(15),
            use_srq: rng.percent(25),
            cqs_per_host: rng.range(1, 4) as usize,
            trap_percent: if program && rng.percent(35) { 60 } else { 0 },
            mishaps: if (program || options.process_faults) && rng.percent(35) {
                rng.range(1, 3) as u32
            } else {
                0
            },
            partition_percent: if options.network_faults && rng.percent(25) { 70 } else { 0 },
            calm_ns: rng.pick(&[2_000_000, 20_000_000, 200_000_000]),
            copy_limit: rng.pick(&[0, 96, 1000, 16_384, 100_000]),
            max_ulpdu: rng.pick(&[1400, 1400, 8_900, 64_000]),
            setup_timeout_ns: rng.pick(&[20_000_000, 1_000_000_000]),
            tick_ns: rng.pick(&[1_000, 20_000, 500_000]),
            // The last draw: the rest of a plan is what it was for its seed.
            other_address_percent: if rng.percent(30) { 60 } else { 0 },
        }
    }

    /// Whether a host asks for CRCs, by a byte of its seed. What is damaged must be noticed.
    pub fn crc(&self, seed: u8) -> Crc {
        if self.profile.corrupt_ppm == 0 && seed & 1 == 0 { Crc::Never } else { Crc::Always }
    }
}

/// Whether a host places what peers write out of order, as in the strict mode, where none of them has access
/// to its memory: in which, and for how many nanoseconds it holds bytes back.
pub(crate) fn draw_order(rng: &mut Rng, style: &mut Style) -> Option<(WriteOrder, u64)> {
    if !rng.percent(15) {
        return None;
    }
    (style.reachable, style.directory) = (false, false);
    let shuffle = WriteOrder::Shuffle { seed: rng.next() };
    let order = rng.pick(&[WriteOrder::Reverse, shuffle]);
    Some((order, rng.pick(&[1_000, 100_000, 20_000_000])))
}

fn draw_hosts(rng: &mut Rng, options: &Options) -> Vec<(u8, Style)> {
    let count = 1 + rng.below(options.max_hosts.max(1) as u64) as usize;
    let count = if count == 1 && options.max_hosts > 1 && rng.percent(60) { 2 } else { count };
    let together = options.same_machine && rng.percent(50);
    (0..count)
        .map(|host| {
            let machine = if together { rng.below(2) as u8 } else { host as u8 };
            let style = Style {
                buffer: rng.pick(&[1500, 4096, 65_536, 65_536, 200_000]),
                gather_ns: rng.pick(&[0, 0, 2_000, 50_000]),
                ack_ns: rng.pick(&[0, 1_000, 100_000]),
                looks: rng.pick(&[0, 3, 20]),
                look_ns: rng.pick(&[100, 1_000, 20_000]),
                late_ns: rng.pick(&[0, 0, 50_000]),
                link_blocks: rng.pick(&[0, 1, 8]),
                reachable: rng.percent(60),
                directory: rng.percent(70),
            };
            (machine, style)
        })
        .collect()
}

fn draw_profile(rng: &mut Rng, options: &Options) -> Profile {
    let receive_buffer = rng.pick(&[3_000, 70_000, 1 << 20]);
    let mss = rng.pick(&[536, 1448, 8948, 65_000]);
    let flow = FlowConfig {
        mss,
        window: (mss * rng.pick(&[2, 10, 50])).max(20_000),
        send_buffer: rng.pick(&[4_000, 60_000, 1 << 20]),
        receive_buffer,
    };
    let bad = options.network_faults && rng.percent(60);
    let chance = |rng: &mut Rng, choices: &[u32]| if bad { rng.pick(choices) } else { 0 };
    Profile {
        byte_ps: rng.pick(&[80, 800, 8_000]),
        delay_ns: rng.pick(&[1_000, 20_000, 500_000]),
        jitter_ns: if bad { rng.pick(&[0, 10_000, 300_000]) } else { 0 },
        loss_ppm: chance(rng, &[0, 1_000, 10_000, 50_000]),
        duplicate_ppm: chance(rng, &[0, 5_000, 50_000]),
        reorder_ppm: chance(rng, &[0, 5_000, 50_000]),
        corrupt_ppm: if bad && rng.percent(20) { rng.pick(&[2_000, 20_000]) } else { 0 },
        flow,
        read_ns: rng.pick(&[0, 2_000, 100_000]),
        read_bytes: rng.pick(&[7, 1_000, 20_000, 1 << 20, 1 << 20]).max(receive_buffer / 40),
        connect_timeout_ns: 50_000_000,
    }
}
