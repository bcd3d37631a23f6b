//! The timeline of one packet.

use serde_json::{Value, json};

/// A stage of a packet's way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Its name.
    pub name: &'static str,
    /// When it began, in picoseconds.
    pub begin: u64,
    /// When it ended.
    pub end: u64,
}

/// Notes the stages of the packet with one number.
#[derive(Debug)]
pub(crate) struct Tracer {
    number: u64,
    stages: Vec<Stage>,
}

/// Most stages that are kept: a packet that is lost and sent again for ever must not fill the memory.
const MOST: usize = 10_000;

impl Tracer {
    /// Traces packet `number`; 0 traces none.
    pub(crate) fn new(number: u64) -> Self {
        Self { number, stages: Vec::new() }
    }

    /// Packet `number` was in stage `name` from `begin` to `end`.
    #[inline]
    pub(crate) fn span(&mut self, number: u64, name: &'static str, begin: u64, end: u64) {
        if number == self.number && number != 0 && self.stages.len() < MOST {
            self.stages.push(Stage { name, begin, end });
        }
    }

    /// What was noted.
    pub(crate) fn into_stages(self) -> Vec<Stage> {
        self.stages
    }
}

/// The stages in the trace-event format that Perfetto opens.
#[must_use]
pub fn perfetto(number: u64, stages: &[Stage]) -> Value {
    let events: Vec<Value> = stages
        .iter()
        .map(|stage| {
            json!({
                "name": stage.name,
                "cat": "packet",
                "ph": "X",
                "ts": stage.begin as f64 / 1e6,
                "dur": (stage.end - stage.begin) as f64 / 1e6,
                "pid": 1,
                "tid": lane(stage.name),
                "args": { "packet": number },
            })
        })
        .collect();
    json!({ "displayTimeUnit": "ns", "traceEvents": events })
}

/// Stages of one part of the machine are in one lane.
fn lane(name: &str) -> u32 {
    match name {
        "link" | "arrives" => 1,
        "nic queue" | "nic memory" => 2,
        "driver" => 3,
        "stack" => 4,
        _ => 5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_packet_is_traced() {
        let mut tracer = Tracer::new(7);
        tracer.span(6, "link", 0, 1);
        tracer.span(7, "link", 1_000_000, 3_000_000);
        let stages = tracer.into_stages();
        let trace = perfetto(7, &stages);
        let events = trace["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 1);
        assert_eq!((events[0]["ts"].as_f64(), events[0]["dur"].as_f64()), (Some(1.0), Some(2.0)));
    }
}
