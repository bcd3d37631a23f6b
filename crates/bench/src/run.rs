//! The whole run: contenders take turns, round by round.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::contender::{Contender, Round};
use crate::machine::Machine;
use crate::model::{Footprint, Overhead, Path, Role};
use crate::pair::{Launcher, Pair};
use crate::plan::Plan;
use crate::results::{Collector, Results, ratios};
use crate::targets::{QUIPU, QUIPU_TCP, SOCKET, judge};
use crate::worker::{Setup, What};
use crate::{peers, sys};

/// A contender that fails so often takes part no longer.
const FAILURES: u32 = 3;

/// A round that was begun within the budget may overdraw it so far; then it is cut short.
const OVERTIME: f64 = 1.2;

/// Contenders and what became of them.
struct Field {
    contenders: Vec<Box<dyn Contender>>,
    failures: BTreeMap<String, (u32, String)>,
    /// What did not work, for people.
    notes: Vec<String>,
}

/// Runs a plan with the contenders whose names have one of `only` in them, or all of them. `quiet`:
/// no progress on the terminal.
///
/// # Errors
///
/// The machine cannot be measured at all. A contender that fails is noted in the results.
pub(crate) fn run(
    plan: Plan,
    only: &[String],
    launcher: &Launcher,
    quiet: bool,
) -> Result<Results> {
    let began = Instant::now();
    let processors = sys::processors().context("asking for the processors")?;
    let (cpus, alone) = match *processors {
        [] => bail!("there is no processor"),
        [only] => ([only, only], true),
        [first, second, ..] => ([first, second], false),
    };
    let setup = |what| Setup {
        what,
        first: true,
        cpu: cpus[0],
        other_cpu: cpus[1],
        max_size: plan.max_size(),
        depth: plan.depth,
        signal_every: plan.signal_every,
    };
    let pair = |name, role, path, what| Pair::new(name, role, path, launcher, setup(what));
    let bar = progress_bar(quiet, &plan);

    bar.set_message("looking for peers");
    let (peers, missing) = peers::installed(&plan);
    let mut contenders: Vec<Box<dyn Contender>> = vec![
        Box::new(pair(QUIPU, Role::Quipu, Path::SameHost, What::Quipu(Path::SameHost))),
        Box::new(pair(QUIPU_TCP, Role::Quipu, Path::Tcp, What::Quipu(Path::Tcp))),
        Box::new(pair(SOCKET, Role::Floor, Path::Tcp, What::Socket)),
        Box::new(pair("memory", Role::Floor, Path::SameHost, What::Memory)),
        Box::new(pair("process_vm", Role::Floor, Path::SameHost, What::KernelCopy)),
    ];
    contenders.extend(peers);
    if !only.is_empty() {
        let wanted = |name: &str| only.iter().any(|part| name.contains(part.as_str()));
        contenders.retain(|contender| wanted(contender.name()));
    }
    let mut field = Field { contenders, failures: BTreeMap::new(), notes: missing };
    if alone {
        field.notes.push("There is one processor only: both ends share it.".into());
    }

    let mut machine = Machine::describe(processors.len(), cpus);
    if !machine.optimized {
        field.notes.push("Quipu was built without optimization: the numbers mean nothing.".into());
    }
    machine.peers.sort();

    let mut extra = |path| pair("extra", Role::Quipu, path, What::Quipu(path));
    let (overhead, memory) = costs(&plan, &mut extra, &bar, &mut field.notes);
    let (collector, rounds) = all_rounds(&plan, cpus, &mut field, &bar, began);
    bar.finish_and_clear();

    let Field { failures, mut notes, .. } = field;
    for (name, (count, why)) in failures {
        notes.push(format!("{name} failed {count} times, at last: {why}"));
    }
    let series = collector.finish();
    let verdicts = judge(&series, &overhead, &memory, plan.queue_pairs);
    Ok(Results {
        schema: 1,
        machine,
        rounds,
        seconds: began.elapsed().as_secs_f64(),
        targets: verdicts,
        overhead,
        memory,
        ratios: ratios(&series),
        series,
        notes,
        plan,
    })
}

/// One step per test and round, and a few for the rest.
fn progress_bar(quiet: bool, plan: &Plan) -> ProgressBar {
    let steps = u64::from(plan.rounds) * plan.test.len() as u64 + 5;
    let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} {msg}");
    let bar = ProgressBar::with_draw_target(Some(steps), target);
    // Nothing ticks on its own: a thread that draws would disturb what is measured.
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn all_rounds(
    plan: &Plan,
    cpus: [usize; 2],
    field: &mut Field,
    bar: &ProgressBar,
    began: Instant,
) -> (Collector, u32) {
    let mut collector = Collector::default();
    let settings = Round { slice_ns: plan.slice_ms * 1e6, cpus, depth: plan.depth };
    let budget = Duration::from_secs(plan.budget_s);
    let (mut done, mut longest) = (0, Duration::ZERO);
    for round in 0..plan.rounds {
        let round_began = Instant::now();
        // A round that would end too late does not begin; one is run in any case.
        if round > 0 && began.elapsed() + longest > budget {
            field.notes.push(format!(
                "{round} of {} rounds were run: more would have taken longer than {} s.",
                plan.rounds, plan.budget_s
            ));
            break;
        }
        for planned in &plan.test {
            let test = planned.test();
            // Whoever comes first in one round comes later in the next.
            let count = field.contenders.len();
            for turn in 0..count {
                let index = (turn + round as usize) % count;
                let contender = field.contenders[index].as_mut();
                let name = contender.name().to_owned();
                let sizes = contender.sizes(test, &planned.sizes);
                let failed = field.failures.get(&name).map_or(0, |(count, _)| *count);
                let late = began.elapsed() > budget.mul_f64(OVERTIME);
                if sizes.is_empty() || failed >= FAILURES || late {
                    continue;
                }
                let (kind, op) = (test.kind, test.op);
                bar.set_message(format!("round {}: {op} {kind}, {name}", round + 1));
                let samples = contender.run(&settings, test, &sizes).unwrap_or_else(|error| {
                    let why = format!("{op} {kind}: {error:#}");
                    field.failures.insert(name, (failed + 1, why));
                    Vec::new()
                });
                collector.add(contender, test, &sizes, &samples, round);
            }
            bar.inc(1);
        }
        done = round + 1;
        longest = longest.max(round_began.elapsed());
    }
    (collector, done)
}

/// What a message and what an idle connection cost.
fn costs(
    plan: &Plan,
    pair: &mut dyn FnMut(Path) -> Pair,
    bar: &ProgressBar,
    notes: &mut Vec<String>,
) -> (Vec<Overhead>, Vec<Footprint>) {
    let (mut overhead, mut memory) = (Vec::new(), Vec::new());
    let mut keep = |what: &str, path: Path, failed: anyhow::Error| {
        notes.push(format!("{what}, {path}: {failed:#}"));
    };
    for path in [Path::SameHost, Path::Tcp] {
        bar.set_message(format!("cost of a message, {path}"));
        match pair(path).overhead(64, 32, 1000) {
            Ok(cost) => overhead.push(cost),
            Err(error) => keep("cost of a message", path, error),
        }
        bar.inc(1);
        bar.set_message(format!("idle queue pairs, {path}"));
        match pair(path).idle_footprint(plan.idle_queue_pairs) {
            Ok(footprint) => memory.push(footprint),
            Err(error) => keep("idle queue pairs", path, error),
        }
        bar.inc(1);
    }
    bar.set_message("many queue pairs");
    match pair(Path::SameHost).self_footprint(plan.queue_pairs) {
        Ok(footprint) => memory.push(footprint),
        Err(error) => keep("many queue pairs", Path::SameHost, error),
    }
    bar.inc(1);
    (overhead, memory)
}
