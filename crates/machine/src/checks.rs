//! The lower rungs of the validation ladder: what must hold before any result of a paper means something.
//!
//! Each check returns a sentence: what was compared, and the largest deviation.

use crate::bench::Bench;
use crate::bus::{Path, pcie};
use crate::error::RunError;
use crate::lanai::{Firmware, LanaiPlan, Stage, run_lanai};
use crate::memory::Memory;
use crate::network::Network;
use crate::plan::{Attach, Bytes, Framing, LinkPlan, NicKind, PciePlan, Plan, Rate};
use crate::rng::Rng;

/// Why a check failed.
pub type Failure = String;

/// pcie-bench's model, effective Gb/s of frames of 1514 bytes: generation, lanes, payload, written, read.
const PCIE: [(u32, u32, u64, f64, f64); 5] = [
    (1, 4, 128, 5.23, 5.37),
    (1, 8, 128, 10.2, 10.48),
    (2, 8, 256, 26.19, 26.57),
    (3, 8, 256, 52.86, 53.63),
    (4, 16, 256, 207.65, 210.7),
];

/// Registers of gem5's SINIC after a reset, by its parameters.
const REGISTERS: [(u32, u64); 11] = [
    (0x10, 1514),
    (0x14, 16 << 10),
    (0x18, 64),
    (0x1c, 256),
    (0x20, 1),
    (0x24, 10),
    (0x28, 512 << 10),
    (0x2c, 512 << 10),
    (0x30, 128 << 10),
    (0x38, 384 << 10),
    (0x3c, 384 << 10),
];

/// How far `ours` is from `published`, as a part of it.
fn deviation(ours: f64, published: f64) -> f64 {
    (ours / published - 1.0).abs()
}

fn require(holds: bool, why: impl FnOnce() -> String) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(why()) }
}

/// V0: registers after a reset, the time of a frame on a link, and PCI Express against pcie-bench's model.
///
/// # Errors
/// A value is another.
pub fn registers_and_links() -> Result<String, Failure> {
    let mut plan = Plan::default();
    plan.nic.kind = NicKind::Sinic;
    plan.nic.attach = Attach::Cache;
    for (register, published) in REGISTERS {
        let ours = Bench::new(&plan).load(register, 1_000_000_000);
        require(ours == Some(published), || {
            format!("register {register:#x} of a sinic holds {ours:?}, published {published}")
        })?;
    }
    for (framing, published) in [(Framing::M5, 1_211_200), (Framing::Ethernet, 1_230_400)] {
        let link = LinkPlan { framing, ..LinkPlan::default() };
        let ours = Network::new(&link, 2, Rng::new(1, 1)).occupancy(1514);
        require(ours == published, || {
            format!("a frame of 1514 bytes takes {ours} ps of 10 Gbit/s, published {published}")
        })?;
    }
    let mut worst: f64 = 0.0;
    for (generation, lanes, max_payload, written, read) in PCIE {
        let plan =
            PciePlan { generation, lanes, max_payload: Bytes(max_payload), ..PciePlan::default() };
        let link = pcie::Link::new(&plan);
        let rate = pcie::packet_rate(generation, lanes, max_payload) / 1e9;
        for (bytes, published) in
            [(link.write_bytes(1514), written), (link.completion_bytes(1514), read)]
        {
            worst = worst.max(deviation(rate * 1514.0 / bytes as f64, published));
        }
    }
    require(worst < 0.003, || format!("PCI Express deviates by {:.2} %", worst * 100.0))?;
    Ok(format!(
        "{} registers, 2 framings; PCI Express within {:.2} % of pcie-bench at 10 points",
        REGISTERS.len(),
        worst * 100.0
    ))
}

/// V1: what a load of a register and a cache miss take.
///
/// # Errors
/// They take another time.
pub fn latencies() -> Result<String, Failure> {
    // A NIC of 2005 beyond a bridge: 708 ns for an e1000's control register (herjulf/mmio_test).
    let mut path = Path::new(&Plan::default());
    let there = path.reach_device(0);
    let register = path.reach_processor(there);
    require(deviation(register as f64, 708_000.0) < 0.15, || {
        format!("a load of a register takes {register} ps, published 708000")
    })?;
    // 25 cycles at 4 GHz, a line at 4 bytes a cycle, 50 ns (SINIC paper, table 1).
    let mut memory = Memory::new(&Plan::default());
    let miss = memory.access(0, 0, 4096, 8, false, 1.0);
    let hit = memory.access(0, 1_000_000, 4096, 8, false, 1.0);
    require((miss, hit) == (60_250, 6_250), || {
        format!("a miss takes {miss} ps and a hit {hit} ps, by table 1 60250 and 6250")
    })?;
    Ok(format!(
        "a register beyond PCI Express {} ns (published 708), a miss 60.25 ns, a hit 6.25 ns",
        register / 1000
    ))
}

/// V2: the closed forms of the QPIP paper: sums of stages, and throughput between its bounds.
///
/// # Errors
/// A run is outside.
pub fn closed_forms() -> Result<String, Failure> {
    let firmware = Firmware::published().map_err(|error| error.to_string())?;
    let sum = |stages: &[Stage], ack: bool| -> f64 {
        stages.iter().map(|it| if ack { it.ack } else { it.data } as f64 / 1000.0).sum()
    };
    let [send, ack_received] = [sum(&firmware.transmit, false), sum(&firmware.receive, true)];
    let sums = [send, sum(&firmware.transmit, true), sum(&firmware.receive, false), ack_received];
    require(sums == [21.5, 11.5, 22.0, 26.5], || format!("tables 2 and 3 add up to {sums:?} us"))?;
    let mut said = Vec::new();
    for mtu in [1500, 9000, 16_384] {
        let us = segment_us(mtu).map_err(|error| error.to_string())?;
        let bytes = f64::from(mtu - 72);
        // A third of 264 MB/s; 250 MB/s; an acknowledgement for every second segment.
        let (bus, wire) = (bytes / 88.0, f64::from(mtu + 8) / 250.0);
        let least = (send + ack_received / 2.0).max(send + bus);
        let most = send + ack_received / 2.0 + bus + wire;
        require((least * 0.99..most).contains(&us), || {
            format!("a segment at MTU {mtu} takes {us:.1} us, not {least:.1} to {most:.1}")
        })?;
        said.push(format!("{us:.1} of {least:.1} to {most:.1}"));
    }
    Ok(format!("QPIP's stages add up; us of a segment at 3 MTUs: {}", said.join(", ")))
}

fn segment_us(mtu: u32) -> Result<f64, RunError> {
    let plan = LanaiPlan {
        mtu,
        rate: Rate(2_000_000_000),
        loss_ppm: 0,
        seed: 1,
        message: mtu - 72,
        depth: 8,
        bounce: false,
        datagrams: false,
        firmware_checksum: false,
        messages: 500,
        max_events: 1_000_000,
        faults: Vec::new(),
    };
    run_lanai(&plan).map(|report| report.us)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_rungs_hold() {
        for check in [registers_and_links, latencies, closed_forms] {
            assert_eq!(check().as_ref().err(), None);
        }
    }
}
