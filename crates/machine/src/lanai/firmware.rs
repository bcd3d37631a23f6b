//! What the firmware's stages cost, and in which order a state machine goes through them.

use quipu_nic::{Completion, Probe, Stage as Heard};
use serde::{Deserialize, Serialize};

use crate::error::RunError;

const TABLE: &str = include_str!("../../costs/lanai.toml");

/// What a stage costs for a segment with data and for one without, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Its name in the paper.
    pub stage: String,
    /// For a segment with data.
    pub data: u64,
    /// For an acknowledgement.
    pub ack: u64,
}

/// The firmware's costs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Firmware {
    /// For readers.
    pub about: String,
    /// Table 2.
    pub transmit: Vec<Stage>,
    /// Table 3.
    pub receive: Vec<Stage>,
    pub(super) datagram: Datagram,
    pub(super) checksum: Checksum,
    pub(super) bus: BusCost,
    pub(super) host: HostCost,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Datagram {
    build: u64,
    parse: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Checksum {
    ps_per_byte: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BusCost {
    pub(super) overhead: u64,
    pub(super) burst: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HostCost {
    pub(super) ns: u64,
}

impl Firmware {
    /// The costs of the paper.
    ///
    /// # Errors
    /// The table that comes with the crate is wrong, which a test excludes.
    pub fn published() -> Result<Self, RunError> {
        toml::from_str(TABLE).map_err(|error| RunError::Costs(error.to_string()))
    }

    /// The published time of a stage, in nanoseconds; 0 if there is no such stage.
    fn ns(&self, way: Way, name: &str, ack: bool) -> u64 {
        let stages = match way {
            Way::Transmit => &self.transmit,
            Way::Receive => &self.receive,
        };
        let stage = stages.iter().find(|stage| stage.stage == name);
        stage.map_or(0, |stage| if ack { stage.ack } else { stage.data })
    }
}

/// Notes the stages that the adapter goes through.
#[derive(Default)]
pub(super) struct Recorder(pub(super) Vec<(Heard, usize)>);

impl Probe for Recorder {
    fn stage(&mut self, stage: Heard, bytes: usize) {
        self.0.push((stage, bytes));
    }
}

/// A state machine of the firmware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Transmit,
    Receive,
}

/// What a state machine does next.
#[derive(Debug)]
pub(super) enum Step {
    /// The processor works for so many picoseconds.
    Run(u64),
    /// A DMA engine moves so many bytes over the bus.
    Bus(u64),
    /// The send engine puts the frame on the link.
    Wire,
    /// The host sees completions.
    Show(Vec<Completion>),
}

/// What is known of a frame that decides its costs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Traits {
    /// It is a datagram, not a segment.
    pub(super) datagram: bool,
    /// It acknowledges something new.
    pub(super) acks: bool,
    /// Bytes that the firmware adds up.
    pub(super) summed: u64,
}

/// Average time that the firmware spent in a stage, for segments with data and for acknowledgements, in
/// microseconds. Segments that are both, and those that are neither, do not count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageTime {
    /// The table of the paper: 2 (transmit) or 3 (receive).
    pub table: u32,
    /// Its name in the paper.
    pub stage: String,
    /// For a segment with data.
    pub data_us: f64,
    /// For an acknowledgement.
    pub ack_us: f64,
}

/// Where the firmware's time went.
#[derive(Clone, Debug, Default)]
pub(super) struct Occupancy {
    /// By table, stage and column, in nanoseconds.
    spent: Vec<(Way, &'static str, [u64; 2])>,
    /// Passes by table and column.
    passes: [[u64; 2]; 2],
}

impl Occupancy {
    fn add(&mut self, way: Way, name: &'static str, column: Option<usize>, ns: u64) {
        let Some(column) = column else { return };
        let at = self.spent.iter().position(|it| it.0 == way && it.1 == name);
        let at = at.unwrap_or_else(|| {
            self.spent.push((way, name, [0; 2]));
            self.spent.len() - 1
        });
        self.spent[at].2[column] += ns;
    }

    fn pass(&mut self, way: Way, column: Option<usize>) {
        if let Some(column) = column {
            self.passes[way as usize][column] += 1;
        }
    }

    /// Averages, in the order of the tables.
    pub(super) fn averages(&self, firmware: &Firmware) -> Vec<StageTime> {
        let mut times = Vec::new();
        let tables = [(2, Way::Transmit, &firmware.transmit), (3, Way::Receive, &firmware.receive)];
        for (table, way, stages) in tables {
            for stage in stages {
                let name = &stage.stage;
                let spent = self.spent.iter().find(|it| it.0 == way && it.1 == name);
                let us = |column: usize| {
                    let passes = self.passes[way as usize][column].max(1) as f64;
                    spent.map_or(0.0, |it| it.2[column] as f64) / passes / 1000.0
                };
                times.push(StageTime { table, stage: name.clone(), data_us: us(0), ack_us: us(1) });
            }
        }
        times
    }
}

/// Turns what a pass of the adapter has told into steps, and books them.
pub(super) struct Pass<'a> {
    pub(super) firmware: &'a Firmware,
    pub(super) occupancy: &'a mut Occupancy,
    pub(super) traits: Traits,
}

impl Pass<'_> {
    fn run(
        &mut self,
        steps: &mut Vec<Step>,
        at: (Way, Option<usize>),
        name: &'static str,
        ns: u64,
    ) {
        self.occupancy.add(at.0, name, at.1, ns);
        steps.push(Step::Run(ns * 1000));
    }

    /// A frame is sent. Completions are of datagrams: a segment's comes with its acknowledgement.
    pub(super) fn transmit(
        mut self,
        heard: &[(Heard, usize)],
        completions: [Vec<Completion>; 2],
    ) -> Vec<Step> {
        let data = has(heard, Heard::GetData);
        let at = (Way::Transmit, (!self.traits.datagram).then_some(usize::from(!data)));
        let mut steps = Vec::new();
        self.occupancy.pass(at.0, at.1);
        let ns = |firmware: &Firmware, name| firmware.ns(Way::Transmit, name, !data);
        // The state machines look at the doorbells in each pass.
        for name in heard.iter().fold(vec!["doorbell"], |mut names, (stage, _)| {
            names.extend_from_slice(match stage {
                Heard::Schedule => &["schedule"],
                Heard::GetWr => &["get WR"],
                Heard::GetData => &["get data"],
                Heard::Headers => &["build TCP header", "build IP header"],
                Heard::Send => &["send"],
                Heard::Update => &["update"],
                _ => &[],
            });
            names
        }) {
            let ns = match name {
                "build TCP header" if self.traits.datagram => self.firmware.datagram.build,
                _ => ns(self.firmware, name),
            };
            self.run(&mut steps, at, name, ns);
            match name {
                "get data" => steps.push(Step::Bus(bytes(heard, Heard::GetData))),
                "send" => steps.push(Step::Wire),
                _ => {}
            }
        }
        steps.extend(completions.map(Step::Show));
        steps
    }

    /// A frame is received. Completions of receives are seen before those of sends that it acknowledges.
    pub(super) fn receive(
        mut self,
        heard: &[(Heard, usize)],
        [received, sent]: [Vec<Completion>; 2],
    ) -> Vec<Step> {
        let data = has(heard, Heard::PutData);
        let Traits { datagram, acks, summed } = self.traits;
        // Segments that open a connection, and those that are both, are in neither column.
        let column = (!datagram && data != acks).then_some(usize::from(acks));
        let at = (Way::Receive, column);
        let mut steps = Vec::new();
        self.occupancy.pass(at.0, at.1);
        let ns = |name, ack| self.firmware.ns(Way::Receive, name, ack);
        let mut stages = vec![("doorbell", ns("doorbell", !data)), ("media", ns("media", !data))];
        stages.push(("IP parse", ns("IP parse", !data)));
        let parse = if datagram { self.firmware.datagram.parse } else { ns("TCP parse", acks) };
        stages.push(("TCP parse", parse));
        if data {
            let requests = heard.iter().filter(|it| it.0 == Heard::GetWr).count().max(1);
            let requests = requests as u64 * ns("get WR", false);
            stages.extend([("get WR", requests), ("put data", ns("put data", false))]);
        }
        for (name, ns) in stages {
            self.run(&mut steps, at, name, ns);
            match name {
                "TCP parse" if summed > 0 => {
                    steps.push(Step::Run(summed * self.firmware.checksum.ps_per_byte));
                }
                "put data" => steps.push(Step::Bus(bytes(heard, Heard::PutData))),
                _ => {}
            }
        }
        if data || !acks {
            let ns = self.firmware.ns(Way::Receive, "update", false);
            self.run(&mut steps, at, "update", ns);
            steps.push(Step::Show(received));
        }
        if acks {
            let ns = self.firmware.ns(Way::Receive, "update", true);
            self.run(&mut steps, at, "update", ns);
            steps.push(Step::Show(sent));
        }
        steps
    }
}

fn has(heard: &[(Heard, usize)], stage: Heard) -> bool {
    heard.iter().any(|(it, bytes)| *it == stage && *bytes > 0)
}

fn bytes(heard: &[(Heard, usize)], stage: Heard) -> u64 {
    heard.iter().filter(|it| it.0 == stage).map(|it| it.1 as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stages_add_up_to_the_tables() {
        let firmware = Firmware::published().unwrap();
        let sum = |stages: &[Stage], ack: bool| -> u64 {
            stages.iter().map(|it| if ack { it.ack } else { it.data }).sum()
        };
        let sums = [
            sum(&firmware.transmit, false),
            sum(&firmware.transmit, true),
            sum(&firmware.receive, false),
            sum(&firmware.receive, true),
        ];
        assert_eq!(sums, [21_500, 11_500, 22_000, 26_500]);
    }
}
