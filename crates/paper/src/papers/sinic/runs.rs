//! Runs of simulated hosts, on all cores.

use anyhow::{Context, Result};
use quipu_machine::{Plan, Report, Setting, Span, example, run};

use crate::experiment::Environment;
use crate::papers::pool::map_all;

/// A run that is to be made.
pub(super) struct Job {
    /// `key=value`.
    pub(super) settings: Vec<String>,
    /// Take a tenth of the time.
    pub(super) quick: bool,
}

impl Job {
    /// The plan: an example with the settings.
    pub(super) fn plan(&self, name: &str) -> Result<Plan> {
        let text = example(name).with_context(|| format!("there is no plan {name}"))?.text;
        let settings: Vec<Setting> = self
            .settings
            .iter()
            .filter_map(|text| text.split_once('='))
            .map(|(key, value)| Setting { key: key.into(), value: value.into() })
            .collect();
        let mut plan = Plan::parse_with(text, &settings)?;
        if self.quick {
            plan.run.warmup = Span(plan.run.warmup.0.min(10_000_000_000));
            plan.run.sample = Span(plan.run.sample.0.min(5_000_000_000));
        }
        Ok(plan)
    }
}

/// Runs all, and returns settings and reports in the order of the jobs.
pub(super) fn run_all(
    name: &str,
    jobs: &[Job],
    environment: &mut Environment<'_>,
) -> Result<Vec<(Vec<String>, Report)>> {
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    (environment.progress)(&format!("{} runs of simulated hosts", jobs.len()));
    let reports = map_all(jobs, |job| {
        let plan = job.plan(name)?;
        run(&plan).with_context(|| format!("the run of {:?}", job.settings))
    })?;
    Ok(jobs.iter().map(|job| job.settings.clone()).zip(reports).collect())
}
