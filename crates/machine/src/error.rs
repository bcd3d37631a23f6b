//! Why a run stops before its end.

use std::fmt;

use thiserror::Error;

use crate::costs::CostError;

/// A driver broke a rule of its NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFault {
    /// The register, or the ring.
    pub register: &'static str,
    /// The value that was written, or the address.
    pub value: u64,
    /// The rule that was broken.
    pub rule: &'static str,
}

impl fmt::Display for DriverFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with {:#x}: {}", self.register, self.value, self.rule)
    }
}

/// Why a run stopped before its end.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RunError {
    /// A driver broke a rule of its NIC.
    #[error("the driver broke a rule of the NIC at cycle {cycle}: {fault}")]
    Driver {
        /// What it did.
        fault: DriverFault,
        /// When, in cycles of its processor.
        cycle: u64,
    },
    /// The limit of the plan.
    #[error("{0} events were not enough: raise run.max_events, or shorten run.sample")]
    TooManyEvents(u64),
    /// Nothing was ahead.
    #[error("the run came to a standstill after {0} us: no event is ahead")]
    Standstill(u64),
    /// Software ran for ever in one moment.
    #[error("more than {0} events at one time: software without cost runs in circles")]
    Circle(u64),
    /// The adapter of a LANai refused something.
    #[error("the adapter: {0}; look at workload and link.mtu in the plan")]
    Adapter(String),
    /// The plan's NIC is not under sockets.
    #[error("nic.kind lanai and hca have no sockets: choose another NIC")]
    NoSockets,
    /// The cost table cannot be used.
    #[error("cost table: {0}")]
    Costs(String),
}

impl From<CostError> for RunError {
    fn from(error: CostError) -> Self {
        Self::Costs(error.to_string())
    }
}
