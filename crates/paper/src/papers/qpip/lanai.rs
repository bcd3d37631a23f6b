//! The paper's adapter, simulated: its own figures in absolute times.

use anyhow::Result;
use quipu_figure::{Chart, Kind, Shape, Values};
use quipu_machine::{Firmware, LanaiPlan, Rate, StageTime, run_lanai};

use crate::experiment::Measured;

/// MTU, checksum in firmware, fact, published MB/s.
const POINTS: [(u32, bool, &str, f64); 4] = [
    (1500, false, "model-speed-1500", 35.4),
    (9000, false, "model-speed-9000", 70.1),
    (16_384, false, "model-speed-16384", 75.6),
    (16_384, true, "model-speed-firmware", 26.4),
];

/// Messages that are a segment each, as in the paper: less IPv6, TCP and its time stamps.
fn stream(mtu: u32, firmware_checksum: bool) -> LanaiPlan {
    LanaiPlan {
        mtu,
        rate: Rate(2_000_000_000),
        loss_ppm: 0,
        seed: 1,
        message: mtu - 40 - 32,
        depth: 8,
        bounce: false,
        datagrams: false,
        firmware_checksum,
        messages: 2000,
        max_events: 10_000_000,
        faults: Vec::new(),
    }
}

fn values(values: Vec<f64>) -> Values {
    Values::PerCategory(values.into_iter().map(Some).collect())
}

/// Tables 2 and 3, as they come out of a run.
pub(super) fn stages() -> Result<Measured> {
    let report = run_lanai(&stream(16_384, false))?;
    let firmware = Firmware::published()?;
    let mut measured = Measured::default();
    for (table, way, published) in
        [(2, "sent", &firmware.transmit), (3, "received", &firmware.receive)]
    {
        let rows: Vec<&StageTime> = report.stages.iter().filter(|it| it.table == table).collect();
        let data: Vec<f64> = rows.iter().map(|row| row.data_us).collect();
        let ack: Vec<f64> = rows.iter().map(|row| row.ack_us).collect();
        measured.set(&format!("model-data-{way}"), data.iter().sum());
        measured.set(&format!("model-ack-{way}"), ack.iter().sum());
        let us = |ns: u64| ns as f64 / 1000.0;
        let names: Vec<String> = rows.iter().map(|row| row.stage.clone()).collect();
        for (what, ours, published) in [
            ("data", data, published.iter().map(|it| us(it.data)).collect()),
            ("acknowledgement", ack, published.iter().map(|it| us(it.ack)).collect()),
        ] {
            let title = format!("Table {table}: stages of a segment that is {way}, {what}");
            let chart = Chart::bars(&title, "us", Shape::Grouped(names.clone()))
                .with("published", Kind::Published, values(published))
                .with("simulated", Kind::Ours, values(ours));
            measured.charts.push(chart);
        }
    }
    measured.notes.push(
        "The times of the stages are put in. What is checked is that the state machines of crates/nic go \
         through each stage exactly once for each segment."
            .into(),
    );
    Ok(measured)
}

/// A byte there and back.
pub(super) fn round_trips() -> Result<Measured> {
    let mut measured = Measured::default();
    let mut ours = Vec::new();
    for (fact, datagrams) in [("model-rtt-udp", true), ("model-rtt-tcp", false)] {
        let plan = LanaiPlan {
            message: 1,
            depth: 1,
            bounce: true,
            datagrams,
            messages: 500,
            ..stream(16_384, true)
        };
        let us = run_lanai(&plan)?.us;
        measured.set(fact, us);
        ours.push(us);
    }
    let shape = Shape::Grouped(vec!["UDP".into(), "TCP".into()]);
    let chart = Chart::bars("Round trip of 1 byte", "us", shape)
        .with("published", Kind::Published, values(vec![73.0, 113.0]))
        .with("simulated", Kind::Ours, values(ours));
    measured.charts.push(chart);
    Ok(measured)
}

/// Messages one way.
pub(super) fn throughput() -> Result<Measured> {
    let mut measured = Measured::default();
    let mut ours = Vec::new();
    for (mtu, firmware, fact, _) in POINTS {
        let rate = run_lanai(&stream(mtu, firmware))?.mb_per_s;
        measured.set(fact, rate);
        ours.push(rate);
    }
    let names = ["1500", "9000", "16384", "16384, checksum in firmware"];
    let shape = Shape::Grouped(names.map(Into::into).to_vec());
    let chart = Chart::bars("Throughput over the MTU", "MB/s", shape)
        .with("published", Kind::Published, values(POINTS.map(|it| it.3).to_vec()))
        .with("simulated", Kind::Ours, values(ours));
    measured.charts.push(chart);
    measured.notes.push(
        "Two choices were fitted: the rate of the bus, to 75.6 MB/s, and that transmit goes before \
         receive, to 35.4 MB/s. In the order of arrival 27.6 MB/s come out at MTU 1500: then \
         acknowledgements delay segments, and are not processed while transmit waits for its DMA \
         engine."
            .into(),
    );
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fact_of_the_model_is_measured() {
        let paper = crate::papers::find("qpip").unwrap().paper;
        for (id, run) in [
            ("model-1", stages as fn() -> Result<Measured>),
            ("model-2", round_trips),
            ("model-3", throughput),
        ] {
            let figure = paper.figure(id).unwrap();
            let compared = crate::compare::compare(paper.facts_of(figure), &run().unwrap());
            assert!(!compared.is_empty());
            for it in compared {
                assert_eq!(it.verdict, crate::compare::Verdict::Met, "{it:?}");
            }
        }
    }
}
