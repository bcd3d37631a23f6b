//! Quality of service for SDP and IPoIB: figures 2 to 12, on the simulated hosts of the paper.
//!
//! | module | is |
//! |---|---|
//! | `hosts` | the runs: streams, tables of the arbiter, link |
//! | `figures` | figures 2 to 4, 10 and 11: what streams get without service levels; figures 5 to 9, and 12: what weights and limits change |
//!
//! Live experiments with a rated port belong into a module `live`, whose figures begin with `live-`.

mod figures;
mod hosts;

use anyhow::{Result, bail};

use crate::data::Figure;
use crate::experiment::{Environment, Experiment, Measured};
use hosts::Hosts;

/// The experiments. A run that several figures need is made once.
#[derive(Default)]
pub(crate) struct Qos {
    hosts: Hosts,
}

impl Experiment for Qos {
    fn run(&mut self, figure: &Figure, environment: &mut Environment<'_>) -> Result<Measured> {
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
            let measured = experiment.run(figure, &mut environment).unwrap();
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
