//! The memory system of a host: caches, main memory, and who pays for what.

mod cache;
mod dram;
mod heap;

use crate::plan::{Attach, Plan};

pub(crate) use cache::Cache;
pub(crate) use dram::Dram;
pub(crate) use heap::{Heap, LIMIT, Slab};

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryCounters {
    /// Accesses of the cores to the last-level cache.
    pub l2_accesses: u64,
    /// Those that missed.
    pub l2_misses: u64,
    /// Lines that devices read from the cache.
    pub io_hits: u64,
    /// Lines that devices read from or wrote to memory.
    pub io_misses: u64,
    /// Lines that were written back.
    pub write_backs: u64,
    /// Bytes of main memory's bus.
    pub dram_bytes: u64,
}

/// Where a device meets the memory system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// On the processor side of the last-level cache, or with cache injection: data is placed in the cache.
    Cache,
    /// On the memory side: data is placed in memory, and copies in the cache become invalid.
    Memory,
}

impl Side {
    /// Where the NIC of a plan meets it.
    pub(crate) fn of(plan: &Plan) -> Self {
        match plan.nic.attach {
            Attach::Cache => Self::Cache,
            Attach::Memory => Self::Memory,
            // Cache injection of an I/O bus (DDIO) is a matter of how many ways it may fill.
            Attach::Pcie | Attach::Pci if plan.l2.io_ways > 0 => Self::Cache,
            Attach::Pcie | Attach::Pci => Self::Memory,
        }
    }
}

/// Caches and memory of a host.
#[derive(Debug)]
pub(crate) struct Memory {
    l1: Vec<Cache>,
    l2: Cache,
    dram: Dram,
    /// Allocator and contents.
    pub(crate) heap: Heap,
    side: Side,
    line_bits: u32,
    l2_ps: u64,
    cycle_ps: u64,
    /// The most misses that a device has outstanding.
    mshrs: u64,
    /// When the cache's port for devices is free.
    port_free_at: u64,
    /// A host whose memory costs nothing.
    ideal: bool,
    /// What was counted.
    pub(crate) counters: MemoryCounters,
}

impl Memory {
    /// The memory system of a plan.
    pub(crate) fn new(plan: &Plan) -> Self {
        let line = plan.l2.line.0;
        let clock = plan.cpu.clock;
        let bytes_per_cycle = plan.dram.bytes_per_cycle;
        let ps_per_kb = if bytes_per_cycle > 0.0 {
            (clock.ps(1_000_000) as f64 / 1e6 * 1024.0 / bytes_per_cycle) as u64
        } else {
            plan.dram.rate.ps(1024)
        };
        let l1 = plan.l1.as_ref().map(|l1| Cache::new(l1.size.0 / line, l1.ways, 0));
        Self {
            l1: l1.map_or(Vec::new(), |l1| vec![l1; plan.cpu.cores as usize]),
            l2: Cache::new(plan.l2.size.0 / line, plan.l2.ways, plan.l2.io_ways),
            dram: Dram::new(plan.dram.latency.0, ps_per_kb),
            heap: Heap::new(data_size(plan)),
            side: Side::of(plan),
            line_bits: line.trailing_zeros(),
            l2_ps: clock.ps(plan.l2.latency),
            cycle_ps: clock.ps(1),
            mshrs: u64::from(plan.l2.mshrs.max(1)),
            port_free_at: 0,
            ideal: false,
            counters: MemoryCounters::default(),
        }
    }

    /// A memory that costs nothing.
    pub(crate) fn ideal(plan: &Plan) -> Self {
        let mut memory = Self::new(plan);
        memory.l1 = Vec::new();
        memory.l2 = Cache::new(1, 1, 0);
        memory.ideal = true;
        memory
    }

    /// What was counted, main memory included.
    pub(crate) fn counted(&self) -> MemoryCounters {
        MemoryCounters { dram_bytes: self.dram.bytes, ..self.counters }
    }

    fn lines(&self, at: u64, len: u64) -> std::ops::Range<u64> {
        if len == 0 {
            return 0..0;
        }
        at >> self.line_bits..((at + len - 1) >> self.line_bits) + 1
    }

    /// A core reads or writes `len` bytes; returns for how many picoseconds it stalls. `mlp` misses are
    /// under way at a time.
    pub(crate) fn access(
        &mut self,
        core: usize,
        now: u64,
        at: u64,
        len: u64,
        write: bool,
        mlp: f64,
    ) -> u64 {
        if self.ideal {
            return 0;
        }
        let mut stall = 0.0;
        for line in self.lines(at, len) {
            stall += self.access_line(core, now + stall as u64, line, write) as f64 / mlp;
        }
        stall as u64
    }

    /// One line; returns its latency beyond the first-level cache.
    fn access_line(&mut self, core: usize, now: u64, line: u64, write: bool) -> u64 {
        if write {
            // The other cores lose their copies.
            for (index, l1) in self.l1.iter_mut().enumerate() {
                if index != core {
                    l1.remove(line);
                }
            }
        }
        if self.l1.get_mut(core).is_some_and(|l1| l1.access(line, write)) {
            return 0;
        }
        self.counters.l2_accesses += 1;
        let mut latency = self.l2_ps;
        if !self.l2.access(line, write) {
            self.counters.l2_misses += 1;
            let there = self.dram.read(now + latency, 1 << self.line_bits);
            latency = there - now;
            self.fill(now, line, write, false);
        }
        if let Some(l1) = self.l1.get_mut(core)
            && let Some(victim) = l1.insert(line, write, false)
            && victim.dirty
        {
            // The last-level cache has every line of the first-level caches.
            self.l2.access(victim.line, true);
        }
        latency
    }

    /// Puts a line into the last-level cache; what leaves it leaves the first-level caches, too.
    fn fill(&mut self, now: u64, line: u64, dirty: bool, io: bool) {
        let Some(victim) = self.l2.insert(line, dirty, io) else { return };
        let mut dirty = victim.dirty;
        for l1 in &mut self.l1 {
            dirty |= l1.remove(victim.line) == Some(true);
        }
        if dirty {
            self.counters.write_backs += 1;
            self.dram.write(now, 1 << self.line_bits);
        }
    }

    /// A device writes `len` bytes at `now`; when they are in their place.
    pub(crate) fn device_write(&mut self, now: u64, at: u64, len: u64) -> u64 {
        if self.ideal {
            return now;
        }
        let lines = self.lines(at, len);
        let count = lines.end - lines.start;
        for line in lines {
            for l1 in &mut self.l1 {
                l1.remove(line);
            }
            match self.side {
                Side::Cache if self.l2.access(line, true) => self.counters.io_hits += 1,
                Side::Cache => {
                    // A whole line is written: nothing has to be fetched.
                    self.counters.io_misses += 1;
                    self.fill(now, line, true, true);
                }
                Side::Memory => {
                    self.counters.io_misses += 1;
                    self.l2.remove(line);
                }
            }
        }
        match self.side {
            Side::Cache => self.through_port(now, count),
            Side::Memory => self.dram.write(now, count << self.line_bits),
        }
    }

    /// A device reads `len` bytes at `now`; when it has them.
    pub(crate) fn device_read(&mut self, now: u64, at: u64, len: u64) -> u64 {
        if self.ideal {
            return now;
        }
        let (mut hits, mut misses) = (0, 0);
        for line in self.lines(at, len) {
            if self.l2.has(line) {
                hits += 1;
            } else {
                misses += 1;
            }
        }
        self.counters.io_hits += hits;
        self.counters.io_misses += misses;
        let mut done = self.through_port(now, hits);
        let mut left = misses;
        while left > 0 {
            // As many at a time as there are MSHRs.
            let some = left.min(self.mshrs);
            done = done.max(self.dram.read(now, some << self.line_bits));
            left -= some;
        }
        done
    }

    /// Moves `lines` through the cache's port for devices, one each cycle.
    fn through_port(&mut self, now: u64, lines: u64) -> u64 {
        if lines == 0 {
            return now;
        }
        self.port_free_at = self.port_free_at.max(now) + lines * self.cycle_ps;
        self.port_free_at + self.l2_ps
    }
}

/// Room for the payload of a packet: a power of two, as the kernel's allocator has it.
pub(crate) fn data_size(plan: &Plan) -> u64 {
    // Headers, alignment and the shared area of Linux take some 300 bytes.
    (u64::from(plan.link.mtu) + 14 + 256).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Bytes;

    fn plan(attach: Attach) -> Plan {
        let mut plan = Plan::default();
        plan.nic.attach = attach;
        plan.l2.size = Bytes(1 << 20);
        plan
    }

    #[test]
    fn a_miss_costs_memory_and_a_hit_the_cache() {
        let mut memory = Memory::new(&plan(Attach::Cache));
        // 25 cycles at 4 GHz, 64 bytes at 4 bytes a cycle, 50 ns.
        assert_eq!(memory.access(0, 0, 4096, 8, false, 1.0), 6_250 + 4_000 + 50_000);
        assert_eq!(memory.access(0, 1_000_000, 4096, 8, false, 1.0), 6_250);
        assert_eq!((memory.counters.l2_accesses, memory.counters.l2_misses), (2, 1));
    }

    #[test]
    fn parallel_misses_cost_less() {
        let mut memory = Memory::new(&plan(Attach::Cache));
        let serial = memory.access(0, 0, 0, 4096, false, 1.0);
        let parallel = memory.access(0, 1_000_000_000, 1 << 16, 4096, false, 4.0);
        assert!(parallel * 3 < serial, "{parallel} {serial}");
    }

    #[test]
    fn the_side_decides_whether_the_reader_misses() {
        for (attach, misses) in [(Attach::Cache, 0), (Attach::Memory, 24), (Attach::Pcie, 24)] {
            let mut memory = Memory::new(&plan(attach));
            memory.access(0, 0, 0, 1514, false, 1.0);
            memory.device_write(1_000_000, 0, 1514);
            let before = memory.counters.l2_misses;
            memory.access(0, 2_000_000, 0, 1514, false, 1.0);
            assert_eq!(memory.counters.l2_misses - before, misses, "{attach:?}");
        }
    }

    #[test]
    fn a_first_level_cache_hides_the_second() {
        let mut plan = plan(Attach::Cache);
        plan.l1 = Some(crate::plan::CachePlan { size: Bytes(4096), ways: 2, ..plan.l2.clone() });
        let mut memory = Memory::new(&plan);
        memory.access(0, 0, 0, 64, true, 1.0);
        assert_eq!(memory.access(0, 0, 0, 64, false, 1.0), 0);
        memory.device_write(0, 0, 64);
        assert_eq!(
            memory.access(0, 1_000_000, 0, 64, false, 1.0),
            6_250,
            "the device took the line"
        );
    }

    #[test]
    fn dirty_lines_are_written_back() {
        let mut plan = plan(Attach::Cache);
        plan.l2.size = Bytes(64 * 8);
        let mut memory = Memory::new(&plan);
        memory.access(0, 0, 0, 64 * 8, true, 1.0);
        memory.access(0, 0, 64 * 8, 64, false, 1.0);
        assert_eq!(memory.counters.write_backs, 1);
        assert_eq!(memory.counted().dram_bytes, 64 * 10);
    }
}
