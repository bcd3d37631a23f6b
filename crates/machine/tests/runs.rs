//! Whole runs: they are the same each time, and have the shapes that the paper describes.

use quipu_machine::{
    Category, NicKind, Options, Plan, Report, RunError, Setting, Span, example, examples, perfetto,
    run, run_curve, run_with,
};

/// A run of an example plan with other values, as `key=value`.
fn with(name: &str, settings: &[&str]) -> Report {
    let plan = plan(name, settings);
    run(&plan).unwrap_or_else(|error| panic!("{name} {settings:?}: {error}"))
}

fn plan(name: &str, settings: &[&str]) -> Plan {
    let set = |text: &&str| {
        let (key, value) = text.split_once('=').expect("key=value");
        Setting { key: key.into(), value: value.into() }
    };
    let short = ["run.warmup=4ms", "run.sample=6ms"];
    let settings: Vec<Setting> = short.iter().chain(settings).map(set).collect();
    let text = example(name).expect("an example").text;
    Plan::parse_with(text, &settings).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn the_same_plan_gives_the_same_report() {
    for example in examples() {
        let (first, second) = (with(example.name, &[]), with(example.name, &[]));
        assert_eq!(first, second, "{}", example.name);
        assert!(first.gbps > 0.4, "{}: {}", example.name, first.gbps);
        if ["qpip", "qos"].contains(&example.name) {
            continue;
        }
        let total: f64 = first.cpu.iter().map(|share| share.percent).sum();
        assert!((total - 100.0).abs() < 0.01, "{}: {total} % of the time", example.name);
    }
}

#[test]
fn a_seed_decides_what_is_lost() {
    let lossy = ["link.loss_ppm=100", "os.sack=true"];
    let first = with("sinic", &lossy);
    let second = with("sinic", &[&lossy[..], &["seed=2"]].concat());
    assert!(first.lost > 0 && second.lost > 0);
    assert_ne!(first.trace_hash, second.trace_hash);
}

#[test]
fn every_workload_runs_on_every_nic() {
    let kinds = [
        "stream",
        "maerts",
        "stream-multi",
        "maerts-multi",
        "rr",
        "web",
        "iscsi-target",
        "iscsi-initiator",
    ];
    let nics: [&[&str]; 5] = [
        &["nic.kind=descriptor", "nic.attach=pcie"],
        &["nic.kind=descriptor", "nic.attach=cache"],
        &["nic.kind=sinic"],
        &["nic.kind=vsinic", "nic.virtual_count=64", "nic.zero_copy=true"],
        &["nic.kind=fifo", "nic.rx_fifo=8MB", "os.rounds=1", "os.budget=8"],
    ];
    for kind in kinds {
        let kind_setting = format!("workload.kind={kind}");
        let connections = if matches!(kind, "stream" | "maerts") { 1 } else { 8 };
        let connections = format!("workload.connections={connections}");
        for nic in nics {
            let settings = [&[kind_setting.as_str(), connections.as_str()], nic].concat();
            let report = with("sinic", &settings);
            assert!(report.gbps > 0.05, "{settings:?}: {} Gbit/s", report.gbps);
            assert!(report.goodput_gbps > 0.01, "{settings:?}");
        }
    }
}

#[test]
fn a_closer_nic_carries_more_and_misses_less() {
    let descriptor = |attach: &str| with("commodity", &[&format!("nic.attach={attach}")]);
    let (pcie, memory, cache) = (descriptor("pcie"), descriptor("memory"), descriptor("cache"));
    assert!(cache.rx_gbps > 1.6 * pcie.rx_gbps, "{} {}", cache.rx_gbps, pcie.rx_gbps);
    assert!(memory.rx_gbps > pcie.rx_gbps);
    // A miss for each block of 64 bytes, or none.
    assert!((15.0..18.0).contains(&memory.misses_per_kb), "{}", memory.misses_per_kb);
    assert!(cache.misses_per_kb < 0.5, "{}", cache.misses_per_kb);
    let sinic = with("sinic", &[]);
    assert!(sinic.rx_gbps >= cache.rx_gbps * 0.99);
    assert!(sinic.percent(Category::Idle) > cache.percent(Category::Idle));
}

#[test]
fn several_cores_share_a_vsinic_without_a_lock() {
    let many =
        ["workload.kind=stream-multi", "workload.connections=8", "cpu.cores=4", "cpu.clock=1GHz"];
    let one = with("sinic", &[&many[..2], &["cpu.clock=1GHz"]].concat());
    let four = with("sinic", &many);
    let lockless =
        with("sinic", &[&many[..], &["nic.kind=vsinic", "nic.virtual_count=8"]].concat());
    assert!(four.tx_gbps > 1.5 * one.tx_gbps, "{} {}", four.tx_gbps, one.tx_gbps);
    assert!(lockless.tx_gbps > 1.5 * one.tx_gbps, "{} {}", lockless.tx_gbps, one.tx_gbps);
}

#[test]
fn a_packet_leaves_a_timeline() {
    let plan = plan("sinic", &[]);
    let (_, stages) = run_with(&plan, Options { trace: 3001, progress: None }).unwrap();
    let names: Vec<&str> = stages.iter().map(|stage| stage.name).collect();
    assert_eq!(names.first(), Some(&"link"), "{names:?}");
    assert!(names.contains(&"stack"), "{names:?}");
    assert!(stages.iter().all(|stage| stage.begin <= stage.end));
    let trace = perfetto(3001, &stages);
    assert_eq!(trace["traceEvents"].as_array().map(Vec::len), Some(stages.len()));
}

#[test]
fn a_run_that_does_not_end_is_stopped() {
    let plan = plan("sinic", &["run.max_events=1000"]);
    assert_eq!(run(&plan), Err(RunError::TooManyEvents(1000)));
}

#[test]
fn segment_offload_carries_more_and_loses_nothing() {
    for kind in ["stream", "maerts"] {
        let kind = format!("workload.kind={kind}");
        let rates = ["false", "true"].map(|on| {
            let offload = format!("nic.segment_offload={on}");
            let report = with("today", &[&kind, &offload]);
            assert_eq!(report.lost, 0, "{kind} {on}");
            report.goodput_gbps
        });
        assert!(rates[1] > 1.5 * rates[0], "{kind}: {rates:?}");
    }
    // What is lost is sent again, also if only a part of a large segment was lost.
    let lossy = ["nic.segment_offload=true", "link.loss_ppm=100", "workload.kind=stream"];
    let report = with("today", &lossy);
    assert!(report.lost > 0 && report.retransmitted > 0 && report.goodput_gbps > 0.5, "{report:?}");
}

#[test]
fn a_curve_ends_where_the_report_does_and_each_lost_frame_is_sent_again_once() {
    let path = ["link.rate=100Mbps", "link.delay=1ms", "os.timestamps=true", "os.sack=true"];
    let mut plan = plan("commodity", &path);
    plan.run.sample = Span(200_000_000_000);
    let curve = |plan: &Plan| run_curve(plan, Span(10_000_000_000)).unwrap();
    let whole = curve(&plan);
    assert_eq!((whole.received.len(), whole.lost, whole.retransmitted), (21, 0, 0));
    assert!(whole.received.is_sorted());
    plan.link.drops = vec![50, 51, 200];
    let lossy = curve(&plan);
    assert_eq!((lossy.lost, lossy.retransmitted), (3, 3));
    assert!(lossy.received.last() < whole.received.last(), "{lossy:?} {whole:?}");
    plan.nic.kind = NicKind::Lanai;
    assert_eq!(run_curve(&plan, Span(1)), Err(RunError::NoSockets));
}

#[test]
fn only_nics_under_sockets_lose_certain_frames() {
    let refused = Plan::parse("[link]\ndrops = [3]\n[nic]\nkind = \"lanai\"\n").unwrap_err();
    assert!(refused.what.contains("under sockets"), "{refused}");
    assert_eq!(refused.line, Some(2));
    assert_eq!(Plan::parse("[link]\ndrops = [3]\n").unwrap().link.drops, [3]);
}
