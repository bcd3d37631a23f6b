//! Plans of simulated hosts: whatever the text is, it is refused with a reason, or it is a plan that can be
//! printed, read again and run.
#![no_main]

#[allow(dead_code)]
#[path = "adapter/input.rs"]
mod input;
mod shares;

use input::Input;
use libfuzzer_sys::fuzz_target;
use quipu_machine::{
    Bytes, FaultKind, FaultPlan, HcaPlan, NicKind, Plan, RunError, Setting, Span, StreamKind,
    StreamPlan, run,
};
use shares::Shares;

static SHARES: Shares<2> = Shares::new(["a plan", "a run"]);

const KEYS: [&str; 27] = [
    "nic.kind",
    "nic.attach",
    "nic.virtual_count",
    "nic.zero_copy",
    "nic.rx_ring",
    "nic.tx_ring",
    "nic.fetch",
    "nic.outstanding",
    "nic.completion",
    "nic.rx_fifo",
    "nic.interrupt_delay",
    "nic.segment_offload",
    "nic.firmware_checksum",
    "workload.kind",
    "workload.transport",
    "workload.connections",
    "workload.message",
    "cpu.cores",
    "cpu.clock",
    "l2.size",
    "l2.io_ways",
    "link.mtu",
    "link.peers",
    "link.loss_ppm",
    "os.receive_buffer",
    "os.budget",
    "pcie.lanes",
];

const VALUES: [&str; 27] = [
    "descriptor",
    "sinic",
    "vsinic",
    "fifo",
    "lanai",
    "pcie",
    "pci",
    "memory",
    "cache",
    "register",
    "stream",
    "maerts",
    "rr",
    "udp",
    "web",
    "iscsi-target",
    "iscsi-initiator",
    "true",
    "0",
    "1",
    "2",
    "4",
    "16",
    "1000",
    "64KB",
    "128KB",
    "1us",
];

/// The plan with an InfiniBand adapter.
fn with_hca(plan: &Plan, input: &mut Input) -> Plan {
    let kinds = [StreamKind::Mpi, StreamKind::Eager, StreamKind::Sdp, StreamKind::Ipoib];
    let stream = |input: &mut Input| StreamPlan {
        kind: input.pick(&kinds),
        count: u32::from(input.byte() % 20),
        sl: input.byte() % 17,
        both_ways: input.flag(),
    };
    let streams = (0..input.byte() % 4).map(|_| stream(input)).collect();
    let text = |input: &mut Input| String::from_utf8_lossy(input.bytes()).into_owned();
    let mut hca = HcaPlan { streams, ..HcaPlan::default() };
    hca.dma_slots = input.count();
    hca.dma_unit = Bytes(input.count().into());
    hca.fifo = input.count();
    hca.buffers = input.count();
    hca.high_limit = input.byte();
    hca.strict = input.flag();
    if input.flag() {
        hca.vlarb_low = text(input);
        hca.sl2vl = text(input);
    }
    let mut plan = Plan { hca: Some(hca), ..plan.clone() };
    plan.nic.kind = NicKind::Hca;
    plan.link.mtu = 1 << (input.byte() % 14);
    plan
}

/// A plan with the settings that the input names. Each that can be is kept, so that most inputs end in a plan
/// that can be run.
fn settings(input: &mut Input) -> Plan {
    // Runs with a large cache begin with many page faults.
    let small = Setting { key: "l2.size".to_owned(), value: "256KB".to_owned() };
    let mut kept = vec![small];
    let mut plan = Plan::parse_with("", &kept).unwrap_or_default();
    for _ in 0..input.byte() % 5 {
        let key = input.pick(&KEYS).to_owned();
        let value = match input.byte() % 4 {
            0 => input.word().to_string(),
            _ => input.pick(&VALUES).to_owned(),
        };
        kept.push(Setting { key, value });
        match Plan::parse_with("", &kept) {
            Ok(with) => plan = with,
            Err(_) => drop(kept.pop()),
        }
    }
    plan
}

/// Adds faults, if the plan is still one with them.
fn with_faults(plan: Plan, input: &mut Input) -> Plan {
    let kinds = [FaultKind::Stall, FaultKind::LostInterrupts, FaultKind::LinkLoss];
    let fault = |input: &mut Input| {
        let (at, length) = (Span(input.word().into()), Span(input.word().into()));
        let (core, ppm) = (u32::from(input.byte() % 4), input.word() % 1_000_001);
        FaultPlan { kind: input.pick(&kinds), at, length, core, ppm }
    };
    let faults: Vec<_> = (0..input.byte() % 3).map(|_| fault(input)).collect();
    let with = Plan { faults, ..plan.clone() };
    if with.faults.is_empty() || Plan::parse(&with.to_toml()).is_err() { plan } else { with }
}

fuzz_target!(|data: &[u8]| {
    SHARES.begin();
    let mut input = Input(data);
    // Reading text as it is takes little, plans made of settings more, and running them most.
    let kind = input.byte() % 8;
    if kind < 3 {
        if let Ok(text) = std::str::from_utf8(input.0) {
            let _ = Plan::parse(text);
        }
        return;
    }
    let mut plan = settings(&mut input);
    if input.byte() % 4 == 1 {
        let with = with_hca(&plan, &mut input);
        if Plan::parse(&with.to_toml()).is_ok() {
            plan = with;
        }
    }
    let mut plan = with_faults(plan, &mut input);
    SHARES.reach("a plan");
    if kind < 7 {
        let again = Plan::parse(&plan.to_toml());
        assert_eq!(again.as_ref(), Ok(&plan), "what is printed is read back");
        return;
    }
    if plan.l2.size.0 > 16 << 20 || plan.cpu.cores > 4 || plan.workload.connections > 64 {
        return;
    }
    plan.run.warmup = Span(100_000_000);
    plan.run.sample = Span(200_000_000);
    plan.run.max_events = 3_000;
    match run(&plan) {
        Ok(report) => {
            SHARES.reach("a run");
            assert!(report.gbps.is_finite());
        }
        Err(RunError::Driver { fault, .. }) => panic!("our own driver broke a rule: {fault}"),
        Err(_) => {}
    }
});
