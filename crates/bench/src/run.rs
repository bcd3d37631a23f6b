//! The whole run: contenders take turns, round by round.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::contender::{Contender, Round};
use crate::machine::Machine;
use crate::model::{Footprint, Overhead, Path, Role};
use crate::nearness::Nearness;
use crate::pair::{Launcher, Pair};
use crate::plan::{Plan, PlannedTest};
use crate::qpip::{QPIP, Sender};
use crate::report::{self, Listed};
use crate::results::{Collector, Results, ratios};
use crate::targets::{
    CROWD, CROWD_TCP, QUIPU, QUIPU_SHARED, QUIPU_TCP, QUIPU_UD, SOCKET, UDP_SOCKET, judge,
};
use crate::worker::{Setup, What};
use crate::{peers, qpip, sys};

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

/// The processors of the two ends, and how many there are.
fn processors() -> Result<([usize; 2], usize)> {
    let processors = sys::processors().context("asking for the processors")?;
    match *processors {
        [] => bail!("there is no processor"),
        [only] => Ok(([only, only], 1)),
        [first, second, ..] => Ok(([first, second], processors.len())),
    }
}

/// Makes contenders of pairs of workers.
struct Pairs<'a> {
    plan: &'a Plan,
    cpus: [usize; 2],
    launcher: &'a Launcher,
}

impl Pairs<'_> {
    fn make(&self, name: &str, role: Role, path: Path, what: What) -> Pair {
        let plan = self.plan;
        let setup = Setup {
            what,
            first: true,
            cpu: self.cpus[0],
            other_cpu: self.cpus[1],
            max_size: plan.max_size(),
            depth: plan.depth,
            signal_every: plan.signal_every,
            crowd: plan.crowd_queue_pairs,
        };
        Pair::new(name, role, path, self.launcher, setup)
    }

    /// All contenders with one of `only` in their names, or all, and a word about those that are
    /// not there.
    fn contenders(&self, only: &[String]) -> (Vec<Box<dyn Contender>>, Vec<String>) {
        let (peers, missing) = peers::installed(self.plan);
        let own = [
            (QUIPU, Role::Quipu, Path::SameHost, What::Quipu(Path::SameHost)),
            (QUIPU_SHARED, Role::Quipu, Path::SameHost, What::QuipuShared),
            (QUIPU_TCP, Role::Quipu, Path::Tcp, What::Quipu(Path::Tcp)),
            (QUIPU_UD, Role::Quipu, Path::Udp, What::Quipu(Path::Udp)),
            (CROWD, Role::Quipu, Path::SameHost, What::Crowd(Path::SameHost)),
            (CROWD_TCP, Role::Quipu, Path::Tcp, What::Crowd(Path::Tcp)),
            (SOCKET, Role::Floor, Path::Tcp, What::Socket),
            (UDP_SOCKET, Role::Floor, Path::Udp, What::UdpSocket),
            ("memory", Role::Floor, Path::SameHost, What::Memory),
            ("process_vm", Role::Floor, Path::SameHost, What::KernelCopy),
        ];
        let pair = |(name, role, path, what)| {
            Box::new(self.make(name, role, path, what)) as Box<dyn Contender>
        };
        let mut contenders: Vec<_> = own.into_iter().map(pair).collect();
        contenders.extend(peers);
        contenders.retain(|contender| wanted(only, contender.name()));
        (contenders, missing)
    }
}

/// Whether the name has one of `only` in it, if there are any.
fn wanted(only: &[String], name: &str) -> bool {
    let has = |part: &String| name.to_lowercase().contains(&part.to_lowercase());
    only.is_empty() || only.iter().any(has)
}

/// Whether goodput is to be measured: both senders, or neither.
fn wants_goodput(only: &[String]) -> bool {
    Sender::ALL.iter().any(|sender| wanted(only, sender.name()))
}

/// Who would take part in what.
///
/// # Errors
///
/// The machine cannot be measured at all.
pub(crate) fn list(plan: &Plan, only: &[String], launcher: &Launcher) -> Result<String> {
    let (contenders, missing) = Pairs { plan, cpus: processors()?.0, launcher }.contenders(only);
    let part = |contender: &dyn Contender, planned: &PlannedTest| {
        let sizes = contender.sizes(planned.test(), &planned.sizes);
        (!sizes.is_empty()).then(|| format!("{} {}", planned.op, planned.kind))
    };
    let lines = contenders.iter().map(|contender| Listed {
        name: contender.name().to_owned(),
        path: contender.path(),
        tests: plan.test.iter().filter_map(|test| part(contender.as_ref(), test)).collect(),
    });
    let text = report::list(&lines.collect::<Vec<_>>(), &missing);
    let links = plan.qpip.is_some() && wanted(only, QPIP);
    let text = if links { text + &report::qpip_list() } else { text };
    let lossy = plan.goodput.is_some() && wants_goodput(only);
    Ok(if lossy { text + &report::goodput_list() } else { text })
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
    let (cpus, count) = processors()?;
    let pairs = Pairs { plan: &plan, cpus, launcher };
    let bar = progress_bar(quiet, &plan);

    bar.set_message("looking for peers");
    let (contenders, missing) = pairs.contenders(only);
    let mut field = Field { contenders, failures: BTreeMap::new(), notes: missing };
    if count == 1 {
        field.notes.push("There is one processor only: both ends share it.".into());
    }

    let mut machine = Machine::describe(count, cpus);
    if !machine.optimized {
        field.notes.push("Quipu was built without optimization: the numbers mean nothing.".into());
    }
    machine.peers.sort();

    let mut extra = |path| pairs.make("extra", Role::Quipu, path, What::Quipu(path));
    let (overhead, memory) = match [QUIPU, QUIPU_TCP].iter().any(|name| wanted(only, name)) {
        true => costs(&plan, &mut extra, &bar, &mut field.notes),
        false => (Vec::new(), Vec::new()),
    };
    let (mut occupancy, mut idle) = (Vec::new(), None);
    let qpip_began = Instant::now();
    let qpip = match &plan.qpip {
        Some(planned) if wanted(only, QPIP) => {
            let (rows, notes) = qpip::run(planned, launcher, cpus, &bar);
            field.notes.extend(notes);
            match qpip::occupancy(cpus[0]) {
                Ok(stages) => occupancy = stages,
                Err(error) => field.notes.push(format!("QPIP, stages of the adapter: {error:#}")),
            }
            match qpip::idle(cpus[0]) {
                Ok(cost) => idle = Some(cost),
                Err(error) => field.notes.push(format!("QPIP, idle connections: {error:#}")),
            }
            rows
        }
        _ => qpip::Rows::default(),
    };
    let goodput = match &plan.goodput {
        Some(planned) if wants_goodput(only) => {
            let (goodput, notes) = qpip::run_goodput(planned, launcher, cpus, &bar);
            field.notes.extend(notes);
            goodput
        }
        _ => Vec::new(),
    };
    // The budget is that of the other parts.
    let qpip_took = qpip_began.elapsed();
    let (collector, rounds) = all_rounds(&plan, cpus, &mut field, &bar, began + qpip_took);
    bar.finish_and_clear();

    let Field { failures, mut notes, .. } = field;
    for (name, (count, why)) in failures {
        notes.push(format!("{name} failed {count} times, at last: {why}"));
    }
    let series = collector.finish();
    let mut verdicts = judge(&series, &overhead, &memory, plan.queue_pairs);
    if plan.qpip.is_some() {
        verdicts.extend(qpip::judge(&qpip, idle.as_ref()));
    }
    if plan.goodput.is_some() {
        verdicts.extend(qpip::judge_goodput(&goodput));
    }
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
        qpip,
        occupancy,
        goodput,
        idle,
        notes,
        plan,
    })
}

/// One step per test and round, and a few for the rest.
fn progress_bar(quiet: bool, plan: &Plan) -> ProgressBar {
    let qpip = plan.qpip.as_ref().map_or(0, |qpip| u64::from(qpip.rounds));
    let goodput = plan.goodput.as_ref().map_or(0, |goodput| u64::from(goodput.rounds));
    let steps = u64::from(plan.rounds) * plan.test.len() as u64 + 5 + qpip + goodput;
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
    // Found out only where it matters.
    let mut nearness = None;
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
            if Nearness::matters(test, &planned.sizes) {
                nearness.get_or_insert_with(|| Nearness::new(cpus, budget)).begin();
            }
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
                let mut run = || contender.run(&settings, test, &sizes);
                let (samples, line_ns) = match &mut nearness {
                    Some(nearness) if Nearness::matters(test, &sizes) => nearness.measure(run),
                    _ => (run(), None),
                };
                let samples = samples.unwrap_or_else(|error| {
                    let why = format!("{op} {kind}: {error:#}");
                    field.failures.insert(name, (failed + 1, why));
                    Vec::new()
                });
                collector.add(contender, test, &sizes, &samples, (round, line_ns));
            }
            bar.inc(1);
        }
        done = round + 1;
        longest = longest.max(round_began.elapsed());
    }
    field.notes.extend(nearness.as_ref().and_then(Nearness::note));
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
