//! Quality of service for SDP and IPoIB: figures 2 to 12, on the simulated hosts of the paper and at a port
//! of this machine.
//!
//! | module | is |
//! |---|---|
//! | `hosts` | the runs: streams, tables of the arbiter, link |
//! | `figures` | figures 2 to 4, 10 and 11: what streams get without service levels; figures 5 to 9, and 12: what weights and limits change |
//! | `live` | what a port of this machine gives the same mixes of streams |

mod figures;
mod hosts;
mod live;

use anyhow::{Result, bail};

use crate::data::Figure;
use crate::experiment::{Environment, Experiment, Measured};
use hosts::Hosts;
use live::Live;

/// Figures with values of this machine. Figure 3 needs a processor for each stream, and figure 10 counters of
/// the processor.
const LIVE: [&str; 9] = ["2", "4", "5", "6", "7", "8", "9", "11", "12"];

/// The experiments. A run that several figures need is made once.
#[derive(Default)]
pub(crate) struct Qos {
    hosts: Hosts,
    /// What was measured, or why nothing could be.
    live: Option<Result<Live, String>>,
}

impl Experiment for Qos {
    fn run(&mut self, figure: &Figure, environment: &mut Environment<'_>) -> Result<Measured> {
        let mut measured = self.simulate(figure, environment)?;
        if LIVE.contains(&figure.id.as_str()) {
            let live = self.live.get_or_insert_with(|| {
                Live::measure(environment).map_err(|error| format!("{error:#}"))
            });
            match live {
                Ok(live) => live.add(&figure.id, &mut measured),
                Err(why) => measured.notes.push(format!("Not measured on this machine: {why}")),
            }
        }
        Ok(measured)
    }
}

impl Qos {
    fn simulate(&mut self, figure: &Figure, environment: &mut Environment<'_>) -> Result<Measured> {
        let hosts = &mut self.hosts;
        hosts.quick = environment.quick;
        (environment.progress)(&format!("simulated hosts: {}", figure.title));
        match figure.id.as_str() {
            "2" => figures::single(hosts),
            "3" => figures::several(hosts),
            "4" => figures::together(hosts),
            "5" => figures::two_mpi(hosts),
            "6" => figures::over_mpi(hosts, &figures::SDP_OVER_MPI),
            "7" => figures::over_mpi(hosts, &figures::IPOIB_OVER_MPI),
            "8" => figures::over_sockets(hosts, true),
            "9" => figures::over_sockets(hosts, false),
            "10" => figures::processors(hosts),
            "11" => figures::copies(hosts),
            "12" => figures::slower_link(hosts),
            "model-1" => figures::faster_host(hosts),
            other => bail!("there is no experiment for {other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Verdict, compare};

    #[test]
    fn no_fact_is_missed_without_a_reason_and_none_has_a_reason_that_is_met() {
        let paper = crate::papers::find("qos").unwrap().paper;
        let mut progress = |_: &str| {};
        let mut environment = Environment {
            quipu: "quipu".into(),
            scratch: ".".into(),
            quick: true,
            progress: &mut progress,
        };
        let mut experiment = Qos::default();
        let mut wrong = Vec::new();
        for figure in &paper.figures {
            let measured = experiment.simulate(figure, &mut environment).unwrap();
            for it in compare(paper.facts_of(figure), &measured) {
                println!("{}: {:?} of {}, {:?}", it.fact.id, it.ours, it.fact.value, it.verdict);
                // A reason why a fact is missed that is met is as wrong.
                let needless = it.verdict == Verdict::Met && it.fact.miss.is_some();
                if it.verdict.fails() || needless {
                    wrong.push(format!("{}: {:?} {:?}", it.fact.id, it.ours, it.verdict));
                }
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}
