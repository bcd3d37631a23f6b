//! Runs of simulated hosts, on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow};
use quipu_machine::{Plan, Report, Setting, Span, example, run};

use crate::experiment::Environment;

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
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(jobs.len()));
    let threads = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    thread::scope(|scope| {
        for _ in 0..threads.min(jobs.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(index) else { return };
                    let result = job.plan(name).and_then(|plan| {
                        run(&plan).with_context(|| format!("the run of {:?}", job.settings))
                    });
                    if let Ok(mut done) = done.lock() {
                        done.push((index, result));
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().map_err(|_| anyhow!("a run of a simulated host panicked"))?;
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(index, report)| Ok((jobs[index].settings.clone(), report?))).collect()
}
