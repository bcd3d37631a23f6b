use super::*;
use crate::plan::{Clock, Rate, Setting, Span, StreamPlan};
use StreamKind::{Ipoib, Mpi, Sdp};

const DDR: u64 = 16_000_000_000;
const SDR: u64 = 8_000_000_000;

fn stream(kind: StreamKind, count: u32, sl: u8) -> StreamPlan {
    StreamPlan { kind, count, sl, both_ways: kind == Mpi }
}

fn plan(streams: &[StreamPlan], low: &str) -> Plan {
    let text = crate::example("qos").expect("an example").text;
    let setting = Setting { key: "hca.vlarb_low".into(), value: low.into() };
    let mut plan = Plan::parse_with(text, &[setting]).expect("a plan");
    plan.run.warmup = Span(5_000_000_000);
    plan.run.sample = Span(20_000_000_000);
    plan.hca.as_mut().expect("an HCA").streams = streams.to_vec();
    plan
}

/// Gbit/s of three streams of a kind that pass MPI by a weight, and of all.
fn passing(kind: StreamKind, weight: u32, change: impl Fn(&mut Plan)) -> (f64, f64) {
    let mut plan = plan(&[stream(kind, 3, 1), stream(Mpi, 1, 0)], &format!("0:1 1:{weight}"));
    change(&mut plan);
    let report = run_hca(&plan).expect("it runs");
    (report.gbps(Some(kind)), report.gbps(None))
}

fn link(rate: u64) -> impl Fn(&mut Plan) {
    move |plan| plan.link.rate = Rate(rate)
}

/// A host of some years later.
fn fast(plan: &mut Plan) {
    let hca = plan.hca.as_mut().expect("an HCA");
    hca.dma_slots = 32;
    hca.bus = Rate(400_000_000_000);
    plan.cpu.clock = Clock(5600);
}

#[test]
fn weights_stop_to_matter_at_4_to_1_on_the_papers_host() {
    for kind in [Sdp, Ipoib] {
        let [one, four, many] = [1, 4, 64].map(|weight| passing(kind, weight, link(DDR)));
        assert!(four.0 > 1.2 * one.0 && four.1 < 0.95 * one.1, "{kind:?}: {one:?} {four:?}");
        assert!(many.0 < 1.1 * four.0, "{kind:?}: {four:?} {many:?}");
    }
}

#[test]
fn weights_matter_beyond_on_a_slower_link_and_on_a_faster_host() {
    let slower = |weight| passing(Sdp, weight, link(SDR)).0;
    let faster = |weight| passing(Sdp, weight, fast).0;
    assert!(slower(16) > 1.15 * slower(4));
    assert!(faster(16) > 1.15 * faster(4), "{} {}", faster(16), faster(4));
}

#[test]
fn lanes_that_are_always_full_have_the_ratio_of_their_weights() {
    for weight in [1, 4, 8] {
        let mut plan = plan(&[stream(Mpi, 1, 1), stream(Mpi, 1, 0)], &format!("0:1 1:{weight}"));
        plan.link.rate = Rate(SDR);
        plan.costs.insert("mpi_window".into(), 64 << 20);
        let report = run_hca(&plan).expect("it runs");
        let of = |sl| report.streams.iter().filter(|it| it.sl == sl).map(|it| it.gbps).sum::<f64>();
        let ratio = of(1) / of(0);
        assert!((ratio / f64::from(weight) - 1.0).abs() < 0.03, "{weight}: {ratio}");
        let carried = report.gbps(None) / 16.0;
        assert!(carried > 0.97, "{carried} of the link");
    }
}

#[test]
fn a_lane_without_a_weight_gets_nothing_and_a_link_without_traffic_ends() {
    let report = run_hca(&plan(&[stream(Mpi, 1, 1), stream(Mpi, 1, 0)], "0:1")).expect("it runs");
    assert!(report.streams.iter().all(|it| (it.sl == 1) == (it.gbps == 0.0)), "{report:?}");
    let report = run_hca(&plan(&[stream(Mpi, 1, 1)], "0:1")).expect("it runs");
    assert!(report.gbps(None).abs() < f64::EPSILON);
}

#[test]
fn a_plan_that_cannot_be_is_refused() {
    let refused = |key: &str, value: &str| {
        let text = crate::example("qos").expect("an example").text;
        let setting = Setting { key: key.into(), value: value.into() };
        Plan::parse_with(text, &[setting]).expect_err("refused").to_string()
    };
    for (key, value, why) in [
        ("hca.vlarb_low", "0:1 x", "no VL:WEIGHT"),
        ("hca.vlarb_low", "15:1", "no data lane"),
        ("hca.sl2vl", "0 15", "drops service level 1"),
        ("hca.dma_slots", "0", "0 is not in 1 to 1024"),
        ("hca.colour", "red", "unknown field"),
        ("link.mtu", "1500", "InfiniBand has"),
        ("costs.sdp_colour", "1", "there is no `sdp_colour`"),
        ("costs.sdp_buffer", "0", "sdp_buffer: 0"),
        ("nic.kind", "fifo", "only used with nic.kind"),
    ] {
        let error = refused(key, value);
        assert!(error.contains(why), "{key}={value}: {error}");
    }
}

#[test]
fn one_seed_is_one_run() {
    let plan = plan(&[stream(Sdp, 3, 1), stream(Mpi, 1, 0)], "0:1 1:2");
    let other = Plan { seed: 2, ..plan.clone() };
    let report = run_hca(&plan).expect("it runs");
    assert_eq!(run_hca(&plan).as_ref(), Ok(&report));
    assert_ne!(run_hca(&other).expect("it runs").hash, report.hash);
}
