use super::*;
use crate::plan::{FaultKind, Span};

fn plan(mtu: u32, message: u32) -> LanaiPlan {
    LanaiPlan {
        mtu,
        rate: Rate(2_000_000_000),
        loss_ppm: 0,
        seed: 1,
        message,
        depth: 8,
        bounce: false,
        datagrams: false,
        firmware_checksum: false,
        messages: 200,
        max_events: 1_000_000,
        faults: Vec::new(),
    }
}

fn round_trip(datagrams: bool) -> f64 {
    let plan = LanaiPlan {
        depth: 1,
        bounce: true,
        firmware_checksum: true,
        messages: 100,
        datagrams,
        ..plan(16_384, 1)
    };
    run_lanai(&plan).unwrap().us
}

/// Bytes of a message that is one segment, as in the paper: less IPv6, TCP and its time stamps.
fn segment(mtu: u32) -> u32 {
    mtu - 40 - 32
}

fn throughput(mtu: u32, firmware_checksum: bool) -> f64 {
    let plan = LanaiPlan { firmware_checksum, ..plan(mtu, segment(mtu)) };
    run_lanai(&plan).unwrap().mb_per_s
}

fn assert_near(ours: f64, published: f64, tolerance: f64) {
    let ratio = ours / published;
    assert!((ratio - 1.0).abs() <= tolerance, "{ours}, published {published}: {ratio}");
}

#[test]
fn a_segment_takes_between_the_stages_alone_and_everything_in_a_row() {
    for mtu in [1500, 9000, 16_384] {
        let bytes = f64::from(segment(mtu));
        let us = bytes / throughput(mtu, false);
        // 21.5 us, and an acknowledgement of 26.5 us for every second segment; a third of the bus' 264 MB/s.
        let firmware: f64 = 21.5 + 26.5 / 2.0;
        let bus = bytes / 88.0;
        assert!(us > firmware.max(21.5 + bus) * 0.99, "MTU {mtu}: {us} us");
        assert!(us < firmware + bus + f64::from(mtu + 8) / 250.0, "MTU {mtu}: {us} us");
    }
}

#[test]
fn each_stage_takes_what_the_tables_say() {
    let report = run_lanai(&plan(9000, segment(9000))).unwrap();
    let firmware = Firmware::published().unwrap();
    let published = firmware.transmit.iter().chain(&firmware.receive);
    for (ours, stage) in report.stages.iter().zip(published) {
        assert_eq!(ours.stage, stage.stage);
        let [data, ack] = [stage.data, stage.ack].map(|ns| ns as f64 / 1000.0);
        assert!((ours.data_us - data).abs() < 1e-9, "{ours:?} {stage:?}");
        assert!((ours.ack_us - ack).abs() < 1e-9, "{ours:?} {stage:?}");
    }
}

#[test]
fn throughput_is_that_of_the_paper() {
    assert_near(throughput(1500, false), 35.4, 0.15);
    assert_near(throughput(9000, false), 70.1, 0.15);
    assert_near(throughput(16_384, false), 75.6, 0.05);
    assert_near(throughput(16_384, true), 26.4, 0.05);
}

#[test]
fn round_trips_are_those_of_the_paper() {
    assert_near(round_trip(false), 113.0, 0.15);
    assert_near(round_trip(true), 73.0, 0.15);
}

#[test]
fn lost_frames_are_sent_again() {
    let plan = LanaiPlan { loss_ppm: 10_000, ..plan(1500, 4000) };
    let report = run_lanai(&plan).unwrap();
    let clean = run_lanai(&LanaiPlan { loss_ppm: 0, ..plan.clone() }).unwrap();
    assert!(report.mb_per_s < clean.mb_per_s, "{report:?}");
    assert_eq!(run_lanai(&plan).unwrap(), report, "one seed is one run");
}

#[test]
fn faults_delay_messages_and_are_seeded() {
    let clean = run_lanai(&plan(1500, 4000)).unwrap();
    let with = |kind, ppm| {
        // Messages are sent from 1 ms on.
        let (at, length) = (Span(5_000_000_000), Span(10_000_000_000));
        let faults = vec![FaultPlan { kind, at, length, core: 0, ppm }];
        let plan = LanaiPlan { faults, ..plan(1500, 4000) };
        let report = run_lanai(&plan).unwrap();
        assert_eq!(run_lanai(&plan).unwrap(), report, "one seed is one run");
        report
    };
    let stalled = with(FaultKind::Stall, 0);
    let delay = stalled.ps as i64 - clean.ps as i64;
    assert!((9_500_000_000..=40_000_000_000).contains(&delay), "{delay}");
    let lossy = with(FaultKind::LinkLoss, 200_000);
    assert!(lossy.ps > clean.ps, "{lossy:?}");
    assert_eq!(with(FaultKind::LinkLoss, 0).ps, clean.ps);
}

#[test]
fn a_link_that_loses_everything_ends_the_run() {
    let plan = LanaiPlan { loss_ppm: 1_000_000, ..plan(1500, 100) };
    let error = run_lanai(&plan).unwrap_err().to_string();
    assert!(error.contains("the connection ended"), "{error}");
}
