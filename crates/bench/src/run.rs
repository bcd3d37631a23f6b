//! The whole run: contenders take turns, round by round.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::contender::Contender;
use crate::machine::Machine;
use crate::model::{Footprint, Overhead, Path, Role, Test};
use crate::pair::{Launcher, Pair};
use crate::plan::{Plan, PlannedTest};
use crate::qpip::{IdleCost, PlannedQpip, QPIP, Sender, StageCost};
use crate::report::{self, Listed};
use crate::results::{Results, ratios};
use crate::rounds::{Field, all_rounds};
use crate::targets::{
    CROWD, CROWD_TCP, QUIPU, QUIPU_SHARED, QUIPU_TCP, QUIPU_TCP_CRC, QUIPU_UD, SOCKET, UDP_SOCKET,
    judge,
};
use crate::worker::{Setup, What};
use crate::{congestion, peers, qpip, sys};

/// The processors of the two ends, and how many there are.
fn processors() -> Result<([usize; 2], usize)> {
    let processors = sys::processors().context("asking for the processors")?;
    match *processors {
        [] => bail!("there is no processor"),
        [only] => Ok(([only, only], 1)),
        [first, second, ..] => Ok(([first, second], processors.len())),
    }
}

/// Contenders, and a word about those that are not there.
type Found = (Vec<Box<dyn Contender>>, Vec<String>);

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
    ///
    /// # Errors
    ///
    /// One of `only` is in nobody's name.
    fn contenders(&self, only: &[String]) -> Result<Found> {
        let (peers, missing) = peers::installed(self.plan);
        let own = [
            (QUIPU, Role::Quipu, Path::SameHost, What::Quipu(Path::SameHost)),
            (QUIPU_SHARED, Role::Quipu, Path::SameHost, What::QuipuShared),
            (QUIPU_TCP, Role::Quipu, Path::Tcp, What::Quipu(Path::Tcp)),
            (QUIPU_TCP_CRC, Role::Quipu, Path::Tcp, What::QuipuCrc),
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
        check(only, self.plan, &contenders, &missing)?;
        contenders.retain(|contender| wanted(only, contender.name()));
        Ok((contenders, missing))
    }
}

/// Whether the name has one of `only` in it, if there are any.
fn wanted(only: &[String], name: &str) -> bool {
    let has = |part: &String| name.to_lowercase().contains(&part.to_lowercase());
    only.is_empty() || only.iter().any(has)
}

/// Refuses words that are part of no name in the plan. Who is not installed has one, too: a note says so.
fn check(
    only: &[String],
    plan: &Plan,
    contenders: &[Box<dyn Contender>],
    missing: &[String],
) -> Result<()> {
    let mut names: Vec<_> = contenders.iter().map(|contender| contender.name()).collect();
    if plan.qpip.is_some() {
        names.extend(qpip::CONTENDERS.iter().map(|contender| contender.name));
    }
    if plan.goodput.is_some() {
        names.extend(Sender::ALL.map(Sender::name));
    }
    for word in only {
        let one = std::slice::from_ref(word);
        let known = names.iter().any(|name| wanted(one, name))
            || missing.iter().any(|note| wanted(one, note));
        let names = names.join("; ");
        ensure!(known, "no contender of this plan has \"{word}\" in its name; there are: {names}");
    }
    Ok(())
}

/// Whether QPIP on packet links is to be measured: anybody who takes part.
fn wants_links(only: &[String]) -> bool {
    qpip::CONTENDERS.iter().any(|contender| wanted(only, contender.name))
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
    let (contenders, missing) = Pairs { plan, cpus: processors()?.0, launcher }.contenders(only)?;
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
    let links = plan.qpip.is_some() && wants_links(only);
    let text = if links { text + &report::qpip_list(|name| wanted(only, name)) } else { text };
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
    let uneven = congestion::level()?;
    let (cpus, count) = processors()?;
    let pairs = Pairs { plan: &plan, cpus, launcher };
    let bar = progress_bar(quiet, &plan);

    bar.set_message("looking for peers");
    let (contenders, missing) = pairs.contenders(only)?;
    let mut field = Field { contenders, failures: BTreeMap::new(), notes: missing };
    field.notes.extend(uneven);
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
    let qpip_began = Instant::now();
    let (qpip, occupancy, idle) = match &plan.qpip {
        Some(planned) if wants_links(only) => links(planned, only, &pairs, &bar, &mut field.notes),
        _ => Default::default(),
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
    for ((name, Test { kind, op }), (count, why)) in failures {
        notes.push(format!("{name}, {op} {kind}, failed {count} times, at last: {why}"));
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

/// QPIP and others on packet links, and what costs an adapter of QPIP without one.
fn links(
    planned: &PlannedQpip,
    only: &[String],
    pairs: &Pairs<'_>,
    bar: &ProgressBar,
    notes: &mut Vec<String>,
) -> (qpip::Rows, Vec<StageCost>, Option<IdleCost>) {
    let Pairs { cpus, launcher, .. } = *pairs;
    let (rows, said) = qpip::run(planned, |name| wanted(only, name), launcher, cpus, bar);
    notes.extend(said);
    if !wanted(only, QPIP) {
        return (rows, Vec::new(), None);
    }
    let mut note =
        |what: &str, error: anyhow::Error| notes.push(format!("QPIP, {what}: {error:#}"));
    let occupancy = qpip::occupancy(cpus[0]).unwrap_or_else(|error| {
        note("stages of the adapter", error);
        Vec::new()
    });
    let idle = qpip::idle(cpus[0]).map_err(|error| note("idle connections", error)).ok();
    (rows, occupancy, idle)
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
        Ok(footprint) => {
            if let Some(fault) = &footprint.fault {
                keep("many queue pairs", Path::SameHost, anyhow!("{fault}"));
            }
            memory.push(footprint);
        }
        Err(error) => keep("many queue pairs", Path::SameHost, error),
    }
    bar.inc(1);
    (overhead, memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_name_that_nobody_has_is_refused() {
        let missing = words(&["UCX is not measured: there is no ucx_perftest"]);
        let known = words(&["ucx", "SMOLTCP"]);
        let known = if cfg!(feature = "smoltcp") { &known[..] } else { &known[..1] };
        let plan = Plan::load(None, false).unwrap();
        check(known, &plan, &[], &missing).unwrap();
        check(&words(&["own process", "xdp", "lossy"]), &plan, &[], &[]).unwrap();
        let refused = |only: &[&str], plan: &Plan| {
            check(&words(only), plan, &[], &missing).unwrap_err().to_string()
        };
        let error = refused(&["kernel", "nosuch"], &plan);
        assert!(error.contains("nosuch") && error.contains("QPIP, XDP"), "{error}");
        // The quick plan has no goodput.
        let error = refused(&["lossy"], &Plan::load(None, true).unwrap());
        assert!(error.contains("QPIP, XDP") && !error.contains("QPIP, lossy"), "{error}");
        refused(&["xdp"], &Plan { qpip: None, goodput: None, ..plan });
    }

    #[test]
    fn names_of_packet_links_are_names() {
        for name in ["XDP", "own process", "QPIP to socket", "kernel, spinning"] {
            assert!(wants_links(&words(&[name])), "{name}");
        }
        assert!(!wants_links(&words(&["UCX", "lossy"])));
    }
}
