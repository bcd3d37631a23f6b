//! Drivers that do anything: a NIC stops with the rule that was broken; it never panics, and never runs for
//! ever. Faults of plans. `fuzz/fuzz_targets/machine_registers.rs` does the first for longer.

use quipu_machine::{
    Attach, Bench, FaultKind, FaultPlan, NicKind, Plan, RunError, Span, example, run,
};

/// Chance that is the same each time.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 ^ self.0 >> 33
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Memory that the driver uses: small, so that words meet.
const MEMORY: u64 = 1 << 14;

/// One thing that a driver or the network does.
fn step(bench: &mut Bench, draw: &mut Draw, kind: NicKind) {
    let register = (draw.below(4) << 8 | draw.below(0x80) & !3) as u32;
    match draw.below(14) {
        0 => bench.store(register, draw.next()),
        1 | 2 => bench.store(register, draw.below(256)),
        3 | 4 => bench.store(register, draw.below(2000) << 40 | draw.below(MEMORY)),
        5 => {
            let _ = bench.load(register, 10_000_000);
        }
        6 | 7 => {
            let word = match draw.below(4) {
                // A NIC that cuts: the length is bounded, the number of parts is not.
                3 => bench.make_cut_frame(draw.below(1 << 16) as u32, draw.below(3) as u16),
                0 => bench.make_frame(draw.below(2000) as u32, false),
                1 => draw.below(MEMORY),
                _ => draw.next(),
            };
            bench.set_word(draw.below(MEMORY) & !7, word);
        }
        8 => bench.receive(draw.below(2000) as u32),
        // As a driver should: the headers are in memory, or the register takes the frame's name.
        9..=12 => {
            let frame = bench.make_frame(draw.below(1400) as u32, false);
            let at = draw.below(MEMORY) & !63;
            bench.set_word(at, frame);
            match kind {
                NicKind::Fifo => bench.store(0x08, frame),
                NicKind::Descriptor => bench.set_word(8192, at),
                _ => bench.store((draw.below(4) << 8 | 0x58) as u32, 200 << 40 | at),
            }
        }
        _ => bench.advance(draw.below(50_000_000)),
    }
}

#[test]
fn a_nic_survives_any_driver() {
    let (mut rules, mut frames) = (0, 0);
    for kind in [NicKind::Descriptor, NicKind::Sinic, NicKind::Vsinic, NicKind::Fifo] {
        for attach in [Attach::Cache, Attach::Memory, Attach::Pcie, Attach::Pci] {
            for seed in 0..150 {
                let mut plan = Plan::default();
                plan.nic.kind = kind;
                plan.nic.attach = attach;
                plan.nic.virtual_count = if kind == NicKind::Vsinic { 4 } else { 1 };
                plan.l2.size = quipu_machine::Bytes(64 << 10);
                let mut bench = Bench::new(&plan);
                let mut draw = Draw(seed * 77 + 1);
                // Switched on, as far as the NIC has such a register.
                if matches!(kind, NicKind::Sinic | NicKind::Vsinic) {
                    bench.store(0, 0b111);
                }
                if kind == NicKind::Descriptor {
                    for (register, value) in [(0x20, 4096), (0x28, 16), (0x40, 8192), (0x48, 16)] {
                        bench.store(register, value);
                    }
                }
                for _ in 0..60 {
                    step(&mut bench, &mut draw, kind);
                    assert!(bench.pending() < 10_000, "{kind:?} {attach:?} {seed}: events pile up");
                }
                bench.advance(1_000_000_000);
                rules += u32::from(bench.failure().is_some());
                frames += bench.counted().0;
                assert!(!matches!(bench.failure(), Some(RunError::Circle(_))));
            }
        }
    }
    assert!(rules > 1000, "rules were broken {rules} times");
    assert!(frames > 10, "{frames} frames were sent");
}

/// Bandwidth of SINIC with a fault.
fn with_fault(kind: FaultKind, ppm: u32) -> f64 {
    let text = example("sinic").expect("an example").text;
    let mut plan = Plan::parse(text).expect("a plan");
    plan.os.sack = true;
    plan.run.warmup = Span(4_000_000_000);
    plan.run.sample = Span(6_000_000_000);
    let (at, length) = (Span(5_000_000_000), Span(1_000_000_000));
    plan.faults = vec![FaultPlan { kind, at, length, core: 0, ppm }];
    let report = run(&plan).expect("it runs");
    assert_eq!(Ok(&report), run(&plan).as_ref(), "faults are seeded");
    report.rx_gbps
}

#[test]
fn faults_cost_bandwidth() {
    let none = with_fault(FaultKind::LinkLoss, 0);
    assert!(none > 9.5, "{none}");
    let stalled = with_fault(FaultKind::Stall, 0);
    assert!(stalled < none, "{stalled}");
    assert!(with_fault(FaultKind::LinkLoss, 1_000_000) < 0.95 * none);
    let lost = with_fault(FaultKind::LostInterrupts, 1_000_000);
    assert!(lost < none, "{lost}");
}
