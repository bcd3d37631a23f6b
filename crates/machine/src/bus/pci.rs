//! PCI and PCI-X: one transaction at a time (PCI Local Bus 2.3, PCI-X 1.0).

use crate::plan::{Clock, PciPlan};

/// A bus.
#[derive(Clone, Debug)]
pub struct Bus {
    clock: Clock,
    bytes_per_clock: u64,
    overhead: u64,
    burst: u64,
}

impl Bus {
    /// The bus of a plan.
    #[must_use]
    pub fn new(plan: &PciPlan) -> Self {
        Self {
            clock: plan.clock,
            bytes_per_clock: u64::from(plan.width / 8).max(1),
            overhead: plan.overhead,
            burst: plan.burst.0.max(1),
        }
    }

    /// How long `len` bytes occupy the bus, in picoseconds: the data phases, and the overhead of each
    /// transaction.
    #[must_use]
    pub fn ps(&self, len: u64) -> u64 {
        let clocks = len.div_ceil(self.bytes_per_clock) + len.div_ceil(self.burst) * self.overhead;
        self.clock.ps(clocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Bytes;

    #[test]
    fn a_burst_of_pci_64_33() {
        let plan = PciPlan { overhead: 8, burst: Bytes(512), ..PciPlan::default() };
        let bus = Bus::new(&plan);
        // 64 data phases and 8 clocks at 33 MHz.
        assert_eq!(bus.ps(512), 72 * 1_000_000 / 33);
        assert_eq!(bus.ps(1024), 144 * 1_000_000 / 33);
    }
}
