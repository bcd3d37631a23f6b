//! Cases that others have measured, and what the model's own parameters decide.

use anyhow::Result;
use quipu_figure::{Chart, Kind, Shape};
use quipu_machine::{Category, FaultKind, FaultPlan, Report, Span, run};

use super::runs::Job;
use super::{CACHE, PCIE, SINIC, Sinic, ZERO_COPY, settings, values};
use crate::experiment::{Environment, Measured};

/// A fast bus, so that its latency and not its rate counts.
const FAST_BUS: [&str; 13] = [
    "nic.msi=true",
    "pcie.generation=3",
    "pcie.lanes=8",
    "pcie.max_payload=256",
    "pcie.tags=64",
    "pcie.posted_credits=64KB",
    "bridge.rate=16GB/s",
    "nic.outstanding=32",
    "nic.fetch=32",
    "workload.kind=maerts",
    "run.warmup_slowdown=1",
    "l2.io_ways=4",
    "nic.kind=descriptor",
];

/// Doubling the latency of the bus: what it costs a driver that reads head pointers, and one that does not.
pub(super) fn latency(sinic: &mut Sinic, environment: &mut Environment<'_>) -> Result<Measured> {
    let mut wanted = Vec::new();
    for completion in ["register", "memory"] {
        for latency in ["440ns", "940ns"] {
            let completion = format!("nic.completion={completion}");
            // 60 ns of bridge are part of the way.
            let latency = format!("pcie.latency={latency}");
            let more = [completion.as_str(), latency.as_str(), "nic.attach=pcie"];
            // Linux polls 64 packets at a time. The link is faster than the processor.
            wanted.push(settings(&[&FAST_BUS, &more, &["os.budget=64", "link.rate=25Gbps"]]));
        }
    }
    let reports = sinic.reports(environment, &wanted)?;
    let rates: Vec<f64> = reports.iter().map(|report| report.gbps).collect();
    let mut measured = Measured::default();
    measured.set("latency-register", 1.0 - rates[1] / rates[0]);
    measured.set("latency-memory", 1.0 - rates[3] / rates[2]);
    let categories = vec!["0.5 us".into(), "1 us".into()];
    let chart = Chart::bars("PCI Express latency", "Gbit/s", Shape::Grouped(categories))
        .with("reads head pointers", Kind::Ours, values(rates[..2].to_vec()))
        .with("polls descriptors", Kind::Ours, values(rates[2..].to_vec()));
    measured.charts.push(chart);
    Ok(measured)
}

/// Integration on a machine whose cores are slow: eight simple cores at 1.4 GHz, of which one sends or
/// receives, as fast as it can and at 1 Gbit/s.
pub(super) fn niagara(sinic: &mut Sinic, environment: &mut Environment<'_>) -> Result<Measured> {
    let slow = [
        "cpu.clock=1400MHz",
        // An in-order core has one miss in flight.
        "cpu.copy_mlp=1",
        "cpu.copy_bytes_per_cycle=4",
        "l2.size=4MB",
        "l2.ways=16",
        "l2.latency=26",
        "dram.latency=90ns",
        "nic.kind=descriptor",
        "nic.outstanding=16",
        "run.warmup_slowdown=1",
    ];
    // Niagara 2's NIC is on the die, and writes to memory, not to the cache.
    let discrete: &[&str] =
        &["nic.attach=pcie", "pcie.lanes=8", "pcie.tags=32", "pcie.posted_credits=16KB"];
    let integrated: &[&str] = &["nic.attach=memory"];
    let mut wanted = Vec::new();
    for rate in ["link.rate=10Gbps", "link.rate=1Gbps"] {
        for program in ["workload.kind=stream", "workload.kind=maerts"] {
            for place in [discrete, integrated] {
                wanted.push(settings(&[&slow, place, &[rate, program]]));
            }
        }
    }
    let reports = sinic.reports(environment, &wanted)?;
    let mut measured = Measured::default();
    let gain = |at: usize| reports[at + 1].gbps / reports[at].gbps;
    let busy = |report: &Report| (100.0 - report.percent(Category::Idle)) / report.gbps;
    let time = |at: usize| busy(&reports[at + 1]) / busy(&reports[at]);
    measured.set("niagara-gain", gain(0));
    measured.set("niagara-gain-receive", gain(2));
    measured.set("niagara-time", time(4));
    measured.set("niagara-time-receive", time(6));
    let chart = Chart::bars(
        "One slow core",
        "Gbit/s",
        Shape::Grouped(vec!["sends".into(), "receives".into()]),
    );
    let rates = |at: usize| values(vec![reports[at].gbps, reports[at + 2].gbps]);
    measured.charts.push(chart.with("discrete", Kind::Ours, rates(0)).with(
        "integrated",
        Kind::Ours,
        rates(1),
    ));
    measured.notes.push(
        "Slow cores spend their time on instructions and on misses of the copy, and the NIC of \
         Niagara 2 does not fill the cache: what the paper gains comes from cache placement, which \
         is missing there. What is left are register accesses: a sender makes one or more for each \
         packet, a receiver under load one for some twenty."
            .into(),
    );
    Ok(measured)
}

/// A queue that once was full stays full: its packets evict each other from the cache, so each costs more.
pub(super) fn stall(_: &mut Sinic, environment: &mut Environment<'_>) -> Result<Measured> {
    (environment.progress)("three runs with a stalled processor");
    let small = ["l2.size=512KB", "os.receive_buffer=1MB", "run.warmup_slowdown=1"];
    let once = |configuration: &[&str], stalls: bool| -> Result<f64> {
        let settings = settings(&[&small, configuration, &["run.warmup=5ms", "run.sample=20ms"]]);
        let mut plan = Job { settings, quick: false }.plan("paper")?;
        if stalls {
            let (at, length) = (Span(2_000_000_000), Span(1_000_000_000));
            plan.faults = vec![FaultPlan { kind: FaultKind::Stall, at, length, core: 0, ppm: 0 }];
        }
        Ok(run(&plan)?.rx_gbps)
    };
    let rates = [once(SINIC.1, false)?, once(SINIC.1, true)?, once(ZERO_COPY.1, true)?];
    let mut measured = Measured::default();
    for (fact, rate) in ["stall-before", "stall-after", "stall-zero-copy"].iter().zip(rates) {
        measured.set(fact, rate);
    }
    let names = ["SINIC", "SINIC after a stall", "zero copy after a stall"];
    let shape = Shape::Grouped(names.map(Into::into).to_vec());
    let chart = Chart::bars("A stall of 1 ms, and the 20 ms from 2 ms after it", "Gbit/s", shape);
    measured.charts.push(chart.with("bandwidth", Kind::Ours, values(rates.to_vec())));
    Ok(measured)
}

/// Parameters that the paper does not state: key, low, high.
const HIDDEN: [(&str, &str, &str); 8] = [
    ("cpu.copy_mlp", "1.2", "3"),
    ("os.receive_buffer", "512KB", "4MB"),
    ("run.warmup_slowdown", "1", "2"),
    ("pcie.lanes", "1", "8"),
    ("pcie.latency", "100ns", "600ns"),
    ("nic.register_latency", "2ns", "50ns"),
    ("nic.outstanding", "1", "32"),
    ("link.delay", "0us", "20us"),
];

/// How far two results move when one parameter does.
pub(super) fn tornado(sinic: &mut Sinic, environment: &mut Environment<'_>) -> Result<Measured> {
    let subjects: [(&str, &[&str]); 3] = [
        ("SINIC, 1 MB", &["nic.kind=sinic", "l2.size=1MB"]),
        ("descriptor, PCIe", PCIE.1),
        ("descriptor, cache side", CACHE.1),
    ];
    let mut wanted = Vec::new();
    for (_, subject) in subjects {
        for (key, low, high) in HIDDEN {
            for value in [low, high] {
                wanted.push(settings(&[subject, &[&format!("{key}={value}")]]));
            }
        }
    }
    let reports = sinic.reports(environment, &wanted)?;
    let mut measured = Measured::default();
    let categories: Vec<String> =
        HIDDEN.iter().map(|(key, low, high)| format!("{key} {low}..{high}")).collect();
    let mut widest = Vec::new();
    for ((name, _), reports) in subjects.iter().zip(reports.chunks(2 * HIDDEN.len())) {
        let spans = HIDDEN.iter().zip(reports.chunks(2)).map(|((key, low, high), ends)| {
            (format!("{key} from {low} to {high}"), ends[0].gbps, ends[1].gbps)
        });
        if let Some((what, low, high)) =
            spans.max_by(|a, b| (a.1 - a.2).abs().total_cmp(&(b.1 - b.2).abs()))
        {
            widest.push(format!("{name}: {what}, {low:.1} to {high:.1} Gbit/s"));
        }
        let end = |index: usize| reports.iter().skip(index).step_by(2).map(|it| it.gbps).collect();
        let title = format!("{name}: low and high value of each parameter");
        let chart = Chart::bars(&title, "Gbit/s", Shape::Grouped(categories.clone()))
            .with("low", Kind::Ours, values(end(0)))
            .with("high", Kind::Ours, values(end(1)));
        measured.charts.push(chart);
    }
    measured.notes.push(format!("what moves each most: {}", widest.join("; ")));
    Ok(measured)
}
