//! What a run is asked to be, and what it says of itself afterwards.

use crate::rng::Rng;
use crate::world::Counters;

/// The transport service whose queue pairs the programs of a run use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connections.
    Rc,
    /// Unreliable connections.
    Uc,
    /// Unreliable datagrams, to one or to a multicast group.
    Ud,
    /// Extended reliable connections.
    Xrc,
    /// Plain iWARP.
    Iwarp,
    /// Plain iWARP over the adapters' own TCP, on a network of IP packets.
    IwarpTcp,
    /// QPIP: connections of TCP, with nothing in between.
    Qpip,
    /// Active Messages: everybody sends requests to everybody, over reliable connections.
    Am,
}

impl Service {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Rc,
        Self::Uc,
        Self::Ud,
        Self::Xrc,
        Self::Iwarp,
        Self::Qpip,
        Self::Am,
        Self::IwarpTcp,
    ];

    /// The service that a seed draws: more often than not reliable connections, which can do most.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        // A draw of its own, so that most seeds keep their service.
        if Rng::new(seed, 9).percent(8) {
            return Self::Am;
        }
        if Rng::new(seed, 10).percent(7) {
            return Self::IwarpTcp;
        }
        Self::ALL[Rng::new(seed, 4).weighted(&[6, 1, 1, 1, 1, 1])]
    }

    /// Its name in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rc => "rc",
            Self::Uc => "uc",
            Self::Ud => "ud",
            Self::Xrc => "xrc",
            Self::Iwarp => "iwarp",
            Self::IwarpTcp => "iwarp-tcp",
            Self::Qpip => "qpip",
            Self::Am => "am",
        }
    }
}

/// What runs are made of. The default is what `quipu sim` does: everything that the seed draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The service; `None`: the seed draws it.
    pub service: Option<Service>,
    /// Work requests that one run posts at most, receives not counted.
    pub max_ops: u32,
    /// Payload bytes that one run moves at most.
    pub max_bytes: u64,
    /// Engines at most, at least 1.
    pub max_hosts: usize,
    /// Connections at most, at least 1.
    pub max_pairs: usize,
    /// Lossy, slow and damaging links, partitions.
    pub network_faults: bool,
    /// Engines that die, floods of connections that say nothing or nonsense.
    pub process_faults: bool,
    /// Programs that use wrong keys, ranges and sizes, or that reset, destroy, stop and deregister while
    /// requests are in progress.
    pub program_faults: bool,
    /// Engines that share a machine, and so memory.
    pub same_machine: bool,
    /// The last lines of the log that a report of a failure keeps; 0: none, and runs are faster.
    pub log_lines: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            service: None,
            max_ops: 100,
            max_bytes: 1 << 20,
            max_hosts: 4,
            max_pairs: 6,
            network_faults: true,
            process_faults: true,
            program_faults: true,
            same_machine: true,
            log_lines: 0,
        }
    }
}

/// What became of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// The service that its programs used.
    pub service: Service,
    /// A hash of all that happened: the same seed and options always give the same.
    pub trace_hash: u64,
    /// Events of the simulator.
    pub events: u64,
    /// How long it took in virtual time.
    pub virtual_ns: u64,
    /// Work requests posted, receives not counted.
    pub ops: u64,
    /// Completions polled, and those of them with an error.
    pub completions: u64,
    /// Of the completions, those with an error.
    pub errors: u64,
    /// Payload bytes of the work requests.
    pub bytes: u64,
    /// Faults of programs and processes that happened.
    pub faults: u32,
    /// What links did.
    pub counters: Counters,
    /// What went wrong, if something did.
    pub failure: Option<Failure>,
}

/// What went wrong in a run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("seed {seed}: {what} (after {at_ns} ns of virtual time); replay: {}", self.replay())]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The service, if it was not the seed that drew it.
    pub service: Option<Service>,
    /// What is not as it must be.
    pub what: String,
    /// When it was noticed, in virtual time.
    pub at_ns: u64,
    /// The last lines of the log, oldest first.
    pub log: Vec<String>,
}

impl Failure {
    /// The command that shows it again, with the default options.
    #[must_use]
    pub fn replay(&self) -> String {
        let service = self.service.map(|service| format!(" --service {}", service.name()));
        format!("quipu sim --seed {}{}", self.seed, service.unwrap_or_default())
    }
}
