//! Registers, memory and frames of every simulated NIC, in any order: a broken rule stops the NIC with a
//! reason; nothing panics, and events do not pile up. A LANai has no registers that a host writes: its posts
//! and frames are those of the adapter (target `qpip`), and `machine_plans` runs it.
#![no_main]

#[allow(dead_code)]
#[path = "adapter/input.rs"]
mod input;
mod shares;

use input::Input;
use libfuzzer_sys::fuzz_target;
use quipu_machine::{Attach, Bench, NicKind, Plan};
use shares::Shares;

static SHARES: Shares<3> = Shares::new(["a rule", "a frame", "an interrupt"]);

/// Memory that the fuzzer uses: small, so that it finds its own words again.
const MEMORY: u64 = 1 << 14;

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let mut input = Input(data);
    let mut plan = Plan::default();
    plan.nic.kind = [NicKind::Descriptor, NicKind::Sinic, NicKind::Vsinic, NicKind::Fifo]
        [usize::from(input.byte() % 4)];
    plan.nic.attach =
        [Attach::Cache, Attach::Memory, Attach::Pcie, Attach::Pci][usize::from(input.byte() % 4)];
    plan.nic.virtual_count = if plan.nic.kind == NicKind::Vsinic { 4 } else { 1 };
    // Frames that the NIC cuts are longer than others.
    let longest = if plan.nic.kind == NicKind::Descriptor && input.flag() { 1 << 16 } else { 2000 };
    plan.nic.segment_offload = longest > 2000;
    plan.l2.size = quipu_machine::Bytes(64 << 10);
    let mut bench = Bench::new(&plan);
    while !input.is_over() && bench.failure().is_none() {
        // Mostly registers that exist.
        let register = u32::from(input.byte() % 4) << 8 | u32::from(input.byte() & 0x7c);
        match input.byte() % 8 {
            0 | 1 => bench.store(register, input.long()),
            2 => bench.store(register, u64::from(input.byte())),
            3 => {
                // A copy from or to the fuzzer's memory.
                let (at, len) = (u64::from(input.word()) % MEMORY, u64::from(input.word()));
                bench.store(register, len << 40 | at);
            }
            4 => {
                let _ = bench.load(register, 10_000_000);
            }
            5 => {
                let word = match input.byte() % 3 {
                    0 => {
                        let len = input.word() % longest;
                        bench.make_cut_frame(len, input.word() as u16)
                    }
                    1 => u64::from(input.word()),
                    _ => input.long(),
                };
                bench.set_word(u64::from(input.word()) % MEMORY & !7, word);
            }
            6 => bench.receive(u32::from(input.word()) % 2000),
            _ => bench.advance(u64::from(input.word()) * 1000),
        }
        bench.advance(0);
        assert!(bench.pending() < 100_000, "events pile up");
    }
    bench.advance(100_000_000_000);
    let (frames, interrupts) = bench.counted();
    if bench.failure().is_some() {
        SHARES.reach("a rule");
    }
    if frames > 0 {
        SHARES.reach("a frame");
    }
    if interrupts > 0 {
        SHARES.reach("an interrupt");
    }
});
