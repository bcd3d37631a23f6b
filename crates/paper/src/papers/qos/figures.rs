//! The figures.

use anyhow::Result;
use quipu_figure::{Chart, Kind as Role, Scale, Shape, Values};
use quipu_machine::{HcaReport, StreamKind};

use super::hosts::Kind::{Eager, Ipoib, Mpi, Sdp};
use super::hosts::Tables::{Blocking, Weights};
use super::hosts::{Hosts, Kind, Run, Tables, of_level};
use crate::experiment::Measured;

/// Capacity of the DDR link, both ways, in Gbit/s.
const DDR: f64 = 32.0;
/// The same of the SDR link.
const SDR: f64 = 16.0;
const FACTORS: [u8; 7] = [1, 2, 4, 8, 16, 32, 64];
const PAIR_FACTORS: [u8; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 255];

fn bars(title: &str, y: &str, names: &[&str], values: Vec<f64>) -> Chart {
    let shape = Shape::Grouped(names.iter().map(|name| (*name).to_owned()).collect());
    let values = Values::PerCategory(values.into_iter().map(Some).collect());
    Chart::bars(title, y, shape).with("simulated", Role::Ours, values)
}

fn lines(title: &str, x: &str, y: &str) -> Chart {
    Chart::lines(title, (x, Scale::Log), (y, Scale::Linear))
}

fn points(x: &[u8], y: impl Iterator<Item = f64>) -> Values {
    Values::Points(x.iter().map(|x| f64::from(*x)).zip(y).collect())
}

/// A stream of one kind alone, as many as there are.
fn alone(kind: Kind, count: u32) -> Run {
    Run::new(&[(kind, count, 1)], Weights(1))
}

/// Figure 2: one stream.
pub(super) fn single(hosts: &mut Hosts) -> Result<Measured> {
    let reports = hosts.run(&[alone(Sdp, 1), alone(Ipoib, 1)])?;
    let mut measured = Measured::default();
    let rates: Vec<f64> = reports.iter().map(|it| it.gbps(None)).collect();
    measured.set("single-sdp", rates[0] * 1000.0);
    measured.set("single-ipoib", rates[1] * 1000.0);
    measured.set("single-ratio", rates[0] / rates[1]);
    let cost =
        |it: &HcaReport| (it.streams[0].send_cpu + it.streams[0].receive_cpu) / it.gbps(None);
    measured.set("single-processor", cost(&reports[0]) / cost(&reports[1]));
    let chart = bars("One stream", "Gbit/s", &["SDP", "IPoIB"], rates).with(
        "published",
        Role::Published,
        Values::PerCategory(vec![Some(9.828), Some(5.801)]),
    );
    measured.charts.push(chart);
    Ok(measured)
}

/// Figure 3: several streams of a kind.
pub(super) fn several(hosts: &mut Hosts) -> Result<Measured> {
    let counts = [1u8, 2, 3, 4, 5, 6, 7, 8];
    let mut rates = Vec::new();
    for kind in [Sdp, Ipoib] {
        let reports = hosts.run(&counts.map(|count| alone(kind, count.into())))?;
        rates.push(reports.iter().map(|it| it.gbps(None)).collect::<Vec<_>>());
    }
    let most = |rates: &[f64]| rates.iter().copied().fold(0.0, f64::max);
    let mut measured = Measured::default();
    measured.set("ipoib-peak-at-2", rates[1][1] / most(&rates[1]));
    measured.set("sdp-best-from-5", most(&rates[0][4..]) / most(&rates[0]).max(most(&rates[1])));
    let chart = lines("Several streams", "streams", "Gbit/s")
        .with("SDP", Role::Ours, points(&counts, rates[0].iter().copied()))
        .with("IPoIB", Role::Ours, points(&counts, rates[1].iter().copied()));
    measured.charts.push(chart);
    Ok(measured)
}

/// Half SDP and half IPoIB.
fn halves(each: u32, tables: Tables, sdp_first: bool) -> Run {
    let level = u8::from(sdp_first);
    Run::new(&[(Sdp, each, level), (Ipoib, each, 1 - level)], tables)
}

/// Figure 4: SDP and IPoIB at a time.
pub(super) fn together(hosts: &mut Hosts) -> Result<Measured> {
    let each = [1u8, 2, 3, 4];
    let reports = hosts.run(&each.map(|each| halves(each.into(), Weights(1), true)))?;
    let share = |it: &HcaReport| it.gbps(Some(StreamKind::Sdp)) / it.gbps(None);
    let mut measured = Measured::default();
    measured.set("sdp-share-2", share(&reports[0]));
    measured.set("sdp-share-4", share(&reports[1]));
    let of = |kind| reports.iter().map(move |it: &HcaReport| it.gbps(Some(kind)));
    let chart = lines("SDP and IPoIB together", "streams of each", "Gbit/s")
        .with("SDP", Role::Ours, points(&each, of(StreamKind::Sdp)))
        .with("IPoIB", Role::Ours, points(&each, of(StreamKind::Ipoib)));
    measured.charts.push(chart);
    Ok(measured)
}

fn pair(tables: Tables) -> Run {
    Run::new(&[(Mpi, 1, 1), (Mpi, 1, 0)], tables)
}

fn ratio(report: &HcaReport) -> f64 {
    of_level(report, 1) / of_level(report, 0)
}

/// Figure 5: two MPI streams.
pub(super) fn two_mpi(hosts: &mut Hosts) -> Result<Measured> {
    let weighted = hosts.run(&PAIR_FACTORS.map(|factor| pair(Weights(factor))))?;
    let blocking = hosts.run(&FACTORS.map(|factor| pair(Blocking(factor))))?;
    let mut measured = Measured::default();
    for (fact, index) in [("pair-4", 2), ("pair-16", 4), ("pair-255", 8)] {
        measured.set(fact, ratio(&weighted[index]));
    }
    measured.set("pair-blocking-4", ratio(&blocking[2]));
    measured.set("pair-blocking-flat", ratio(&blocking[6]) / ratio(&blocking[4]));
    let totals: Vec<f64> = weighted.iter().map(|it| it.gbps(None)).collect();
    let least = totals.iter().copied().fold(f64::INFINITY, f64::min);
    let most = totals.iter().copied().fold(0.0, f64::max);
    measured.set("pair-constant", least / most);
    measured.set("pair-total", totals[0] / DDR * 100.0);
    measured.set("chipset", most);
    let chart = Chart::lines(
        "Two MPI streams: ratio",
        ("QoS factor", Scale::Log),
        ("high : low", Scale::Log),
    );
    let chart = chart
        .with("weighted", Role::Ours, points(&PAIR_FACTORS, weighted.iter().map(ratio)))
        .with("blocking", Role::Ours, points(&FACTORS, blocking.iter().map(ratio)));
    let total = lines("Two MPI streams: all traffic", "QoS factor", "Gbit/s").with(
        "weighted",
        Role::Ours,
        points(&PAIR_FACTORS, totals.into_iter()),
    );
    measured.charts.extend([chart, total]);
    Ok(measured)
}

/// A figure of three streams that pass MPI traffic, and the ids of its facts.
pub(super) struct OverMpi {
    kind: Kind,
    name: &'static str,
    /// Prefix of the facts.
    facts: &'static str,
}

/// Figure 6.
pub(super) const SDP_OVER_MPI: OverMpi = OverMpi { kind: Sdp, name: "SDP", facts: "sdp" };
/// Figure 7.
pub(super) const IPOIB_OVER_MPI: OverMpi = OverMpi { kind: Ipoib, name: "IPoIB", facts: "ipoib" };

fn passing(kind: Kind, tables: Tables) -> Run {
    Run::new(&[(kind, 3, 1), (Mpi, 1, 0)], tables)
}

fn gain(report: &HcaReport, base: &HcaReport) -> f64 {
    (of_level(report, 1) / of_level(base, 1) - 1.0) * 100.0
}

fn total_gain(report: &HcaReport, base: &HcaReport) -> f64 {
    (report.gbps(None) / base.gbps(None) - 1.0) * 100.0
}

/// Figures 6 and 7.
pub(super) fn over_mpi(hosts: &mut Hosts, figure: &OverMpi) -> Result<Measured> {
    let weighted = hosts.run(&FACTORS.map(|factor| passing(figure.kind, Weights(factor))))?;
    let blocking = hosts.run(&FACTORS.map(|factor| passing(figure.kind, Blocking(factor))))?;
    let (base, name) = (&weighted[0], figure.facts);
    let mut measured = Measured::default();
    let mut set = |fact: &str, value: f64| measured.set(&format!("{name}-{fact}"), value);
    set("gain-4", gain(&weighted[2], base));
    set("total-4", total_gain(&weighted[2], base));
    set("flat", of_level(&weighted[6], 1) / of_level(&weighted[2], 1));
    set("blocking-gain", gain(&blocking[1], base));
    set("blocking-total", total_gain(&blocking[1], base));
    set("blocking-flat", of_level(&blocking[6], 1) / of_level(&blocking[1], 1));
    let chart = |title: &str, of: &dyn Fn(&HcaReport) -> f64| {
        lines(&format!("3 {} streams over MPI: {title}", figure.name), "QoS factor", "Gbit/s")
            .with("weighted", Role::Ours, points(&FACTORS, weighted.iter().map(of)))
            .with("blocking", Role::Ours, points(&FACTORS, blocking.iter().map(of)))
    };
    let own = chart(figure.name, &|it| of_level(it, 1));
    let all = chart("all traffic", &|it| it.gbps(None));
    measured.charts.extend([own, all]);
    measured.notes.push(format!(
        "At weights of 1:1 the arbiter of the sender has a choice for {:.0} % of the packets, at 64:1 for \
         {:.0} %: then the streams wait for their copies, not for their lane.",
        weighted[0].contested, weighted[6].contested
    ));
    Ok(measured)
}

/// Figures 8 and 9: SDP over IPoIB, or IPoIB over SDP.
pub(super) fn over_sockets(hosts: &mut Hosts, sdp_first: bool) -> Result<Measured> {
    let name = if sdp_first { "sdp-over-ipoib" } else { "ipoib-over-sdp" };
    let mut measured = Measured::default();
    let title = if sdp_first { "SDP over IPoIB" } else { "IPoIB over SDP" };
    let mut chart = lines(title, "weight", "Gbit/s of the prioritised streams");
    for each in [1u32, 2] {
        let runs = FACTORS.map(|factor| halves(each, Weights(factor), sdp_first));
        let reports = hosts.run(&runs)?;
        let gains = reports.iter().map(|it| gain(it, &reports[0]));
        // The change that is farthest from none.
        let most = gains.fold(0.0, |most: f64, it| if it.abs() > most.abs() { it } else { most });
        measured.set(&format!("{name}-{}", 2 * each), most);
        let last = reports.last().unwrap_or(&reports[0]);
        measured.set(&format!("{name}-total-{}", 2 * each), total_gain(last, &reports[0]));
        let own = points(&FACTORS, reports.iter().map(|it| of_level(it, 1)));
        chart = chart.with(&format!("{} streams", 2 * each), Role::Ours, own);
    }
    measured.charts.push(chart);
    Ok(measured)
}

/// Figure 10: what the processors do.
pub(super) fn processors(hosts: &mut Hosts) -> Result<Measured> {
    let names = ["SDP", "IPoIB", "3 SDP + MPI", "3 IPoIB + MPI"];
    let runs =
        [alone(Sdp, 1), alone(Ipoib, 1), passing(Sdp, Weights(1)), passing(Ipoib, Weights(1))];
    let reports = hosts.run(&runs)?;
    // Of the sender's four cores. MPI's core only polls.
    let busy = |it: &HcaReport| it.streams.iter().map(|it| it.send_cpu).sum::<f64>() / 4.0;
    let mut measured = Measured::default();
    measured.set("processor-load", busy(&reports[2]));
    let values = reports.iter().map(busy).collect();
    let title = "Time that the sender's cores copy";
    measured.charts.push(bars(title, "% of four cores", &names, values));
    measured.notes.push(
        "The model has no instructions: it counts a core as busy while it waits for the bus, where the \
         paper counts micro-operations."
            .into(),
    );
    Ok(measured)
}

/// Figure 11: with and without copies.
pub(super) fn copies(hosts: &mut Hosts) -> Result<Measured> {
    let both_ways = |kind| Run::new(&[(kind, 1, 0)], Weights(1));
    let runs = [alone(Sdp, 1), alone(Ipoib, 1), both_ways(Eager), both_ways(Mpi)];
    let rates: Vec<f64> = hosts.run(&runs)?.iter().map(|it| it.gbps(None)).collect();
    let mut measured = Measured::default();
    measured.set("eager-to-sdp", rates[2] / rates[0]);
    measured.set("sdp-to-zero-copy", rates[0] / rates[3]);
    let names = ["SDP", "IPoIB", "MPI eager", "MPI rendezvous"];
    measured.charts.push(bars("Copied and not copied", "Gbit/s", &names, rates));
    Ok(measured)
}

fn on_slow_link(run: Run) -> Run {
    Run { slow_link: true, ..run }
}

/// Figure 12: the same at half the link's rate.
pub(super) fn slower_link(hosts: &mut Hosts) -> Result<Measured> {
    let mut measured = Measured::default();
    let mut chart = lines("Over MPI on an SDR link", "weight", "% of the link, both ways");
    for (kind, name) in [(Sdp, "SDP"), (Ipoib, "IPoIB")] {
        let runs = FACTORS.map(|factor| on_slow_link(passing(kind, Weights(factor))));
        let reports = hosts.run(&runs)?;
        let share = |it: &HcaReport| of_level(it, 1) / SDR * 100.0;
        let fact = name.to_lowercase();
        measured.set(&format!("slow-{fact}"), share(&reports[6]));
        measured.set(&format!("slow-{fact}-beyond-4"), share(&reports[4]) / share(&reports[2]));
        chart = chart.with(name, Role::Ours, points(&FACTORS, reports.iter().map(share)));
    }
    let pair = hosts.run(&[on_slow_link(pair(Weights(255)))])?;
    measured.set("slow-pair-255", ratio(&pair[0]));
    measured.set("slow-pair-total", pair[0].gbps(None) / SDR * 100.0);
    measured.charts.push(chart);
    Ok(measured)
}

/// What the paper expects of a faster host.
pub(super) fn faster_host(hosts: &mut Hosts) -> Result<Measured> {
    let run = |factor, fast_host| Run { fast_host, ..passing(Sdp, Weights(factor)) };
    let mut measured = Measured::default();
    let mut chart = lines("3 SDP streams over MPI, DDR link", "weight", "Gbit/s");
    for (name, fast) in [("the paper's host", false), ("faster host", true)] {
        let reports = hosts.run(&FACTORS.map(|factor| run(factor, fast)))?;
        let own: Vec<f64> = reports.iter().map(|it| of_level(it, 1)).collect();
        if fast {
            measured.set("fast-beyond-4", own[4] / own[2]);
        }
        chart = chart.with(name, Role::Ours, points(&FACTORS, own.into_iter()));
    }
    measured.charts.push(chart);
    measured.notes.push(
        "The faster host has 32 DMA slots, eleven times the bus and twice the clock. Its streams fill the link, \
         so weights matter beyond 4:1."
            .into(),
    );
    Ok(measured)
}
