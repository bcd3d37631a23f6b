//! Runs seeds, each a whole world. A failure prints the command that replays it; `QUIPU_SIM_SEEDS`
//! runs more of them (`quipu sim` is made for many).

use quipu_sim::{Options, Report, Service, run, run_many};

/// Runs a range of seeds and panics at the first failure, with the end of its log.
fn sweep(seeds: std::ops::Range<u64>, options: &Options) -> Vec<Report> {
    let mut reports = Vec::new();
    run_many(seeds, options, |report| {
        if let Some(failure) = &report.failure {
            let verbose = Options { log_lines: 60, ..*options };
            let log = run(report.seed, &verbose).failure.map(|failure| failure.log.join("\n"));
            panic!("{failure}\n{}", log.unwrap_or_default());
        }
        reports.push(report.clone());
        true
    });
    reports
}

#[test]
fn hundreds_of_worlds_keep_all_promises() {
    let count = std::env::var("QUIPU_SIM_SEEDS").ok().and_then(|count| count.parse().ok());
    let reports = sweep(0..count.unwrap_or(400), &Options::default());
    // The sweep is worth something only if it reaches what it is for.
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    assert!(sum(|report| report.ops) > 5_000, "too few requests");
    assert!(sum(|report| report.errors) > 1_000, "too few errors");
    assert!(sum(|report| u64::from(report.faults)) > 100, "too few faults");
    assert!(sum(|report| report.counters.lost) > 1_000, "too few losses");
    assert!(sum(|report| report.counters.corrupted) > 10, "too few flipped bits");
    assert!(sum(|report| report.counters.links) > 50, "too few same-host links");
    assert!(sum(|report| report.counters.bells) > 100, "too few sleepers woken");
    assert!(sum(|report| report.counters.killed) > 3, "too few deaths");
    assert!(sum(|report| report.counters.datagrams) > 500, "too few datagrams");
    assert!(sum(|report| report.counters.atomic_writes) > 300, "too few atomic writes");
    assert!(sum(|report| report.counters.flushes) > 300, "too few flushes");
    for service in Service::ALL {
        let runs = reports.iter().filter(|report| report.service == service);
        let (count, ops) = runs.fold((0, 0), |(n, ops), report| (n + 1, ops + report.ops));
        assert!(count > 20 && ops > 500, "too little of {service:?}: {count} runs, {ops} requests");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let options = Options::default();
    for seed in 10_000..10_060 {
        let (first, second) = (run(seed, &options), run(seed, &options));
        assert_eq!(first, second, "seed {seed} is not the same twice");
    }
    let hashes: std::collections::BTreeSet<u64> =
        (0..50).map(|seed| run(seed, &options).trace_hash).collect();
    assert_eq!(hashes.len(), 50, "different seeds are different runs");
}

/// A log costs time and changes nothing.
#[test]
fn keeping_a_log_does_not_change_a_run() {
    for seed in 20_000..20_010 {
        let plain = run(seed, &Options::default());
        let logged = run(seed, &Options { log_lines: 100, ..Options::default() });
        assert_eq!(plain.trace_hash, logged.trace_hash);
    }
}

/// Without faults nothing fails: every request of every program succeeds.
#[test]
fn calm_worlds_know_no_errors() {
    let options = Options {
        network_faults: false,
        process_faults: false,
        program_faults: false,
        ..Options::default()
    };
    for report in sweep(30_000..30_100, &options) {
        assert_eq!((report.faults, report.counters.lost), (0, 0));
    }
}

/// One engine alone: queue pairs that are connected to themselves or to another one beside them.
#[test]
fn a_single_host_talks_to_itself() {
    let options = Options { max_hosts: 1, ..Options::default() };
    for report in sweep(40_000..40_060, &options) {
        let counters = report.counters;
        // Connection management opens a stream, whoever is at the other end.
        let is_plain = matches!(report.service, Service::Iwarp | Service::IwarpTcp);
        assert!(is_plain || counters.streams == 0);
        assert_eq!(counters.links, 0);
    }
}

/// Long runs with large messages.
#[test]
fn long_runs() {
    let options = Options { max_ops: 2_000, max_bytes: 8 << 20, ..Options::default() };
    sweep(50_000..50_020, &options);
}

/// Seeds that once failed.
#[test]
fn seeds_that_found_something() {
    let options = Options { service: Some(Service::Rc), ..Options::default() };
    for seed in [30, 91, 136, 179, 743, 1465, 2807, 6738, 9725, 11_440, 22_345, 9_115_758] {
        assert_eq!(run(seed, &options).failure, None);
    }
    // Requests waited for ever for a peer that asked for a stream and never got the reply.
    for seed in [770_011_183, 770_015_924, 770_036_664, 500_038_217, 500_089_550, 880_048_905] {
        assert_eq!(run(seed, &options).failure, None);
    }
    // The alarm of a write that is placed out of order was due at once.
    assert_eq!(run(500_082_108, &options).failure, None);
    // Receives come late to a requester that tries again every 10 us, in segments of a few octets.
    assert_eq!(run(815_225_924_599, &Options::default()).failure, None);
    // The only receive of a message has no room: its window was closed, and the message waited for ever.
    assert_eq!(run(815_225_949_560, &Options::default()).failure, None);
    // A queue pair drained in the same instant in which its program took it to RESET for its next connection.
    assert_eq!(run(918_134_662, &Options::default()).failure, None);
    // A SYN came twice, the second time after the end of its connection, and a listener answered it.
    assert_eq!(run(929_062_092, &Options::default()).failure, None);
    // A write with immediate data was refused in its middle, and took a receive with it.
    assert_eq!(run(915_066_582, &Options::default()).failure, None);
    let others = [(Service::Uc, 588), (Service::Uc, 712), (Service::Xrc, 178), (Service::Ud, 40)];
    let others = others.into_iter().chain([3_502_536, 7_309_721].map(|seed| (Service::Xrc, seed)));
    let others = others.chain([7_101_233, 7_205_557].map(|seed| (Service::Iwarp, seed)));
    // A reply whose connection had failed ended another request.
    let others = others.chain([(Service::Am, 71_277)]);
    let qpip = [0, 14, 88, 679, 2342, 7_005_856, 7_009_845, 7_305_163, 7_301_765]
        .map(|seed| (Service::Qpip, seed));
    for (service, seed) in others.chain(qpip) {
        let options = Options { service: Some(service), ..Options::default() };
        assert_eq!(run(seed, &options).failure, None);
    }
}

/// Requests of Active Messages end once, whatever happens to the network and to processes.
#[test]
fn active_messages_end_once() {
    let options = Options { service: Some(Service::Am), ..Options::default() };
    let reports = sweep(70_000..70_300, &options);
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    assert!(sum(|report| report.ops) > 10_000, "too few messages");
    assert!(sum(|report| report.counters.killed) > 30, "too few deaths");
    assert!(sum(|report| report.counters.lost) > 100, "too few losses");
    assert!(sum(|report| report.counters.links) > 50, "too few same-host links");
    assert!(sum(|report| report.counters.datagrams) > 10_000, "too few datagrams");
    // The reply to a connection request was damaged, so that its rest never came.
    assert_eq!(run(81_950, &options).failure, None);
}

/// Every service by itself, with everything that disturbs and with nothing.
#[test]
fn each_service_keeps_its_promises() {
    for service in Service::ALL {
        let options = Options { service: Some(service), ..Options::default() };
        let reports = sweep(60_000..60_060, &options);
        let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
        assert!(sum(|report| report.ops) > 1_000, "{service:?}: too few requests");
        assert!(sum(|report| u64::from(report.faults)) > 10, "{service:?}: too few faults");
        assert!(sum(|report| report.counters.lost) > 10, "{service:?}: too few losses");
        let qpip = service == Service::Qpip;
        assert!(!qpip || sum(|report| report.counters.cut) > 100, "too little for links to cut");
        assert!(!qpip || sum(|report| report.counters.joined) > 100, "too little for them to join");
        assert!(!qpip || sum(|report| report.counters.lies) > 10, "too few lies");
        assert!(!qpip || sum(|report| report.counters.reborn) > 100, "too few used again");
        assert!(!qpip || sum(|report| report.counters.swapped) > 10, "too few share a port");
        let calm = Options {
            network_faults: false,
            process_faults: false,
            program_faults: false,
            ..options
        };
        for report in sweep(70_000..70_040, &calm) {
            assert_eq!((report.faults, report.counters.lost), (0, 0));
        }
    }
}
