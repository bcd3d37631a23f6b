//! What no machine can be: values that are out of range or contradict each other.

use super::{Attach, CachePlan, FaultKind, FaultPlan, NicKind, Plan, Transport, WorkloadKind};
use crate::bus::pcie;
use crate::costs;
use crate::hca;

/// A key and what is wrong with its value.
pub(super) type Wrong = (String, String);

/// Refuses `key` unless `holds`.
pub(super) fn need(holds: bool, key: &str, what: impl FnOnce() -> String) -> Result<(), Wrong> {
    if holds { Ok(()) } else { Err((key.to_owned(), what())) }
}

/// Refuses a number that is not in `low..=high`.
pub(super) fn within(key: &str, value: u64, low: u64, high: u64) -> Result<(), Wrong> {
    need((low..=high).contains(&value), key, || format!("{value} is not in {low} to {high}"))
}

impl Plan {
    /// Checks what the types cannot.
    pub(super) fn check(&self) -> Result<(), Wrong> {
        self.check_run()?;
        self.check_processor()?;
        self.check_buses()?;
        self.check_nic()?;
        self.check_hca()?;
        self.check_network()?;
        self.check_programs()
    }

    fn check_run(&self) -> Result<(), Wrong> {
        const SECOND: u64 = 1_000_000_000_000;
        within("run.warmup", self.run.warmup.0, 0, 100 * SECOND)?;
        let slowdown = self.run.warmup_slowdown;
        need((1.0..=1000.0).contains(&slowdown), "run.warmup_slowdown", || {
            format!("{slowdown} is not in 1 to 1000")
        })?;
        within("run.sample", self.run.sample.0, 1_000_000, 100 * SECOND)?;
        within("run.max_events", self.run.max_events, 1, 100_000_000_000)
    }

    fn check_processor(&self) -> Result<(), Wrong> {
        within("cpu.clock", self.cpu.clock.0, 1, 100_000)?;
        within("cpu.cores", self.cpu.cores.into(), 1, 64)?;
        let positive = |key: &str, value: f64, high: f64| {
            need(value > 0.0 && value <= high, key, || format!("{value} is not in 0 to {high}"))
        };
        positive("cpu.copy_mlp", self.cpu.copy_mlp, 64.0)?;
        positive("cpu.copy_bytes_per_cycle", self.cpu.copy_bytes_per_cycle, 64.0)?;
        if let Some(l1) = &self.l1 {
            check_cache("l1", l1)?;
            within("l1.size", l1.size.0, 64, 4 << 20)?;
            need(l1.line == self.l2.line, "l1.line", || {
                format!("{} is not the line of the last-level cache, {}", l1.line, self.l2.line)
            })?;
            need(l1.size <= self.l2.size, "l1.size", || {
                format!("{} is more than the last-level cache has, {}", l1.size, self.l2.size)
            })?;
        }
        check_cache("l2", &self.l2)?;
        within("dram.latency", self.dram.latency.0, 0, 1_000_000_000)?;
        let per_cycle = self.dram.bytes_per_cycle;
        need((0.0..=1024.0).contains(&per_cycle), "dram.bytes_per_cycle", || {
            format!("{per_cycle} is not in 0 to 1024")
        })?;
        need(per_cycle > 0.0 || self.dram.rate.0 > 0, "dram.rate", || {
            "0: give dram.bytes_per_cycle or dram.rate a value".into()
        })
    }

    fn check_buses(&self) -> Result<(), Wrong> {
        const MS: u64 = 1_000_000_000;
        within("bridge.latency", self.bridge.latency.0, 0, MS)?;
        within("bridge.rate", self.bridge.rate.0, 1_000_000, 100_000_000_000_000)?;
        within("pcie.generation", self.pcie.generation.into(), 1, 5)?;
        need(matches!(self.pcie.lanes, 1 | 2 | 4 | 8 | 16 | 32), "pcie.lanes", || {
            format!("{} lanes: there are 1, 2, 4, 8, 16 and 32", self.pcie.lanes)
        })?;
        for (key, bytes) in
            [("pcie.max_payload", self.pcie.max_payload), ("pcie.max_read", self.pcie.max_read)]
        {
            let legal = bytes.0.is_power_of_two() && (128..=4096).contains(&bytes.0);
            need(legal, key, || format!("{bytes}: there are 128, 256, 512, 1024, 2048 and 4096"))?;
        }
        within("pcie.latency", self.pcie.latency.0, 0, MS)?;
        within("pcie.tags", self.pcie.tags.into(), 1, 1024)?;
        within("pcie.posted_credits", self.pcie.posted_credits.0, 4096, 1 << 20)?;
        need(matches!(self.pci.width, 32 | 64), "pci.width", || {
            format!("{} bits: there are 32 and 64", self.pci.width)
        })?;
        within("pci.clock", self.pci.clock.0, 1, 1000)?;
        within("pci.overhead", self.pci.overhead, 0, 1000)?;
        within("pci.burst", self.pci.burst.0, 8, 4096)?;
        self.check_widths()
    }

    /// A bus that is wider than the link before it cannot be filled: such a plan is a mistake.
    fn check_widths(&self) -> Result<(), Wrong> {
        let bridge = self.bridge.rate;
        let (key, rate) = match self.nic.attach {
            Attach::Pcie => ("pcie.lanes", pcie::raw_rate(self.pcie.generation, self.pcie.lanes)),
            Attach::Pci => ("pci.width", u64::from(self.pci.width) * self.pci.clock.0 * 1_000_000),
            Attach::Memory | Attach::Cache => return Ok(()),
        };
        need(rate <= bridge.0, key, || {
            let rate = super::Rate(rate);
            format!("the bus carries {rate}, more than the bridge's {bridge}: raise bridge.rate")
        })
    }

    fn check_nic(&self) -> Result<(), Wrong> {
        let nic = &self.nic;
        within("nic.register_latency", nic.register_latency.0, 0, 1_000_000_000)?;
        within("nic.interrupt_delay", nic.interrupt_delay.0, 0, 1_000_000_000_000)?;
        let frame = u64::from(self.link.mtu) + 14;
        within("nic.rx_fifo", nic.rx_fifo.0, 2 * frame, 64 << 20)?;
        within("nic.tx_fifo", nic.tx_fifo.0, 2 * frame, 64 << 20)?;
        within("nic.rx_ring", nic.rx_ring.into(), 4, 65_536)?;
        within("nic.tx_ring", nic.tx_ring.into(), 4, 65_536)?;
        within("nic.fetch", nic.fetch.into(), 1, 256)?;
        within("nic.outstanding", nic.outstanding.into(), 1, 1024)?;
        within("nic.virtual_count", nic.virtual_count.into(), 1, 256)?;
        within("nic.zero_copy_size", nic.zero_copy_size.into(), 54, 1514)?;
        within("nic.zero_copy_mark", nic.zero_copy_mark.into(), nic.zero_copy_size.into(), 65_536)?;
        need(nic.rx_low < nic.rx_high, "nic.rx_low", || {
            format!("{} is not less than nic.rx_high, {}", nic.rx_low, nic.rx_high)
        })?;
        let several = nic.kind == NicKind::Vsinic;
        need(!nic.zero_copy || several, "nic.zero_copy", || {
            "only a vsinic can defer the copy of the payload".into()
        })?;
        need(nic.virtual_count == 1 || several, "nic.virtual_count", || {
            format!("{} register banks: only a vsinic has more than 1", nic.virtual_count)
        })?;
        let offload = nic.segment_offload;
        need(!offload || nic.kind == NicKind::Descriptor, "nic.segment_offload", || {
            "only a descriptor NIC cuts segments".into()
        })?;
        need(!offload || nic.tx_fifo.0 >= 128 << 10, "nic.tx_fifo", || {
            format!("{}: with nic.segment_offload at least 128KB", nic.tx_fifo)
        })?;
        let on_die = matches!(nic.attach, Attach::Memory | Attach::Cache);
        let needs_die = matches!(nic.kind, NicKind::Sinic | NicKind::Vsinic);
        need(on_die || !needs_die, "nic.attach", || {
            "a sinic or vsinic is on the die: memory or cache".into()
        })
    }

    fn check_hca(&self) -> Result<(), Wrong> {
        let is = self.nic.kind == NicKind::Hca;
        need(is || self.hca.is_none(), "hca", || "only used with nic.kind = \"hca\"".into())?;
        let Some(hca) = self.hca.as_ref().filter(|_| is) else {
            return need(!is, "nic.kind", || "a hca needs [[hca.streams]]: see plan qos".into());
        };
        hca.check()?;
        let costs = hca::check_costs(&self.costs);
        need(costs.is_ok(), "costs", || costs.err().unwrap_or_default())?;
        need(self.faults.is_empty(), "faults", || {
            "a hca takes no faults: an InfiniBand link loses nothing, and programs poll".into()
        })
    }

    fn check_network(&self) -> Result<(), Wrong> {
        within("link.rate", self.link.rate.0, 1_000_000, 10_000_000_000_000)?;
        within("link.delay", self.link.delay.0, 0, 1_000_000_000_000)?;
        within("link.loss_ppm", self.link.loss_ppm.into(), 0, 1_000_000)?;
        within("link.drops", self.link.drops.len() as u64, 0, 1000)?;
        let hca = self.nic.kind == NicKind::Hca;
        let (least, most) = match self.nic.kind {
            NicKind::Lanai => (1280, 16_384),
            NicKind::Hca => (256, 4096),
            _ => (576, 9000),
        };
        let sockets = self.nic.kind != NicKind::Lanai && !hca;
        need(sockets || self.link.drops.is_empty(), "link.drops", || {
            "only NICs under sockets lose certain frames: use link.loss_ppm, or another nic.kind"
                .into()
        })?;
        need(!hca || self.link.mtu.is_power_of_two(), "link.mtu", || {
            format!("{}: InfiniBand has 256, 512, 1024, 2048 and 4096", self.link.mtu)
        })?;
        within("link.mtu", self.link.mtu.into(), least, most)?;
        within("link.peers", self.link.peers.into(), 1, 64)?;
        within("link.switch_buffer", self.link.switch_buffer.0, 16 << 10, 1 << 30)
    }

    fn check_programs(&self) -> Result<(), Wrong> {
        within("os.receive_buffer", self.os.receive_buffer.0, 16 << 10, 64 << 20)?;
        within("os.send_buffer", self.os.send_buffer.0, 16 << 10, 64 << 20)?;
        within("os.budget", self.os.budget.into(), 1, 10_000)?;
        within("os.rounds", self.os.rounds.into(), 1, 1000)?;
        within("os.queue", self.os.queue.into(), 1, 100_000)?;
        within("os.interrupt_core", self.os.interrupt_core.into(), 0, (self.cpu.cores - 1).into())?;
        need(costs::table(&self.os.costs).is_some(), "os.costs", || {
            format!("no table {}: there are {}", self.os.costs, costs::names().join(" and "))
        })?;
        for name in self.costs.keys().filter(|_| self.nic.kind != NicKind::Hca) {
            let known = costs::Cost::named(name).is_some();
            need(known, &format!("costs.{name}"), || {
                format!("no such cost: there are {}", costs::Cost::all_names().join(", "))
            })?;
            within(&format!("costs.{name}"), self.costs[name], 0, 100_000_000)?;
        }
        let work = &self.workload;
        within("workload.connections", work.connections.into(), 1, 1024)?;
        within("workload.message", work.message.0, 1, 1 << 20)?;
        within("workload.request", work.request.0, 1, 1 << 20)?;
        within("workload.response", work.response.0, 1, 1 << 20)?;
        within("workload.outstanding", work.outstanding.into(), 1, 1024)?;
        let simple = matches!(work.kind, WorkloadKind::Stream | WorkloadKind::Rr);
        need(simple || self.nic.kind != NicKind::Lanai, "workload.kind", || {
            "a lanai runs stream and rr".into()
        })?;
        let datagrams = work.transport == Transport::Udp;
        let lanai = self.nic.kind == NicKind::Lanai;
        need(!datagrams || (lanai && work.kind == WorkloadKind::Rr), "workload.transport", || {
            "udp: only rr on a lanai has datagrams; take tcp".into()
        })?;
        let interrupts = |fault: &FaultPlan| fault.kind == FaultKind::LostInterrupts;
        need(!lanai || !self.faults.iter().any(interrupts), "faults", || {
            "a lanai raises no interrupts, its hosts poll: take stall or link-loss".into()
        })?;
        let one = matches!(work.kind, WorkloadKind::Stream | WorkloadKind::Maerts);
        need(!one || work.connections == 1, "workload.connections", || {
            format!(
                "{}: stream and maerts have 1; take stream-multi or maerts-multi",
                work.connections
            )
        })?;
        for (index, fault) in self.faults.iter().enumerate() {
            let core = fault.core < self.cpu.cores || fault.kind != FaultKind::Stall;
            need(core, "faults", || {
                format!("fault {index}: no core {}; cpu.cores is {}", fault.core, self.cpu.cores)
            })?;
            within("faults", fault.ppm.into(), 0, 1_000_000)?;
        }
        within("faults", self.faults.len() as u64, 0, 1000)
    }
}

fn check_cache(name: &str, cache: &CachePlan) -> Result<(), Wrong> {
    let key = |field: &str| format!("{name}.{field}");
    within(&key("ways"), cache.ways.into(), 1, 64)?;
    let line = cache.line;
    let legal = line.0.is_power_of_two() && (32..=1024).contains(&line.0);
    need(legal, &key("line"), || format!("{line}: a power of two from 32 to 1024"))?;
    within(&key("size"), cache.size.0, line.0 * u64::from(cache.ways), 256 << 20)?;
    let way = line.0 * u64::from(cache.ways);
    need(cache.size.0.is_multiple_of(way), &key("size"), || {
        format!("{} is no multiple of {} ways of {line}", cache.size, cache.ways)
    })?;
    within(&key("latency"), cache.latency, 0, 10_000)?;
    within(&key("mshrs"), cache.mshrs.into(), 1, 1024)?;
    within(&key("io_ways"), cache.io_ways.into(), 0, cache.ways.into())
}
