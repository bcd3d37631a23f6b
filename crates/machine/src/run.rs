//! Running a plan.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::task::{Context, Waker};

use crate::costs::{self, Costs};
use crate::cpu::Cpu;
use crate::error::RunError;
use crate::hca::run_hca;
use crate::lanai::{LanaiPlan, run_lanai};
use crate::ledger::{Category, Ledger};
use crate::memory::MemoryCounters;
use crate::nic;
use crate::plan::{NicKind, Plan, Span};
use crate::report::Report;
use crate::trace::Stage;
use crate::workload::{self, Program};
use crate::world::{CoreId, Host, MACHINE, Traffic, World};

/// Most events at one time: more is software that runs in circles.
const MOST_AT_ONCE: u64 = 1_000_000;
/// Events between two reports of progress.
const PROGRESS: u64 = 1 << 16;

/// How to run.
#[derive(Default)]
pub struct Options<'a> {
    /// The number of a packet to be traced, from 1; 0 for none.
    pub trace: u64,
    /// Is told which part of the run is over, from 0 to 1.
    pub progress: Option<&'a mut dyn FnMut(f64)>,
}

/// What was counted of the machine at a time.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) at: u64,
    pub(crate) ledgers: Vec<Ledger>,
    pub(crate) traffic: Traffic,
    pub(crate) memory: MemoryCounters,
    pub(crate) goodput: [u64; 2],
    pub(crate) requests: u64,
}

impl Snapshot {
    fn of(world: &World) -> Self {
        let host = &world.hosts[MACHINE];
        let now = world.kernel.now();
        let ledgers = host.cores.iter().map(|core| {
            let mut ledger = core.ledger;
            // A core that is idle has not noted it yet.
            if core.idle {
                ledger.add(Category::Idle, now.saturating_sub(core.local));
            }
            ledger
        });
        Self {
            at: now,
            ledgers: ledgers.collect(),
            traffic: host.traffic,
            memory: host.memory.counted(),
            goodput: world.goodput,
            requests: world.requests,
        }
    }
}

/// Runs a plan to its end.
///
/// # Errors
/// A driver broke a rule of its NIC, or the run would not end.
pub fn run(plan: &Plan) -> Result<Report, RunError> {
    run_with(plan, Options::default()).map(|(report, _)| report)
}

/// Runs a plan to its end; also returns the stages of the packet that was to be traced.
///
/// # Errors
/// As [`run`].
pub fn run_with(plan: &Plan, mut options: Options<'_>) -> Result<(Report, Vec<Stage>), RunError> {
    if plan.nic.kind == NicKind::Lanai {
        return Ok((Report::of_lanai(plan, &run_lanai(&LanaiPlan::of(plan))?), Vec::new()));
    }
    if plan.nic.kind == NicKind::Hca {
        return Ok((Report::of_hca(plan, run_hca(plan)?), Vec::new()));
    }
    let world = Rc::new(RefCell::new(build(plan, options.trace)?));
    let mut programs = start(&world, plan);
    let begin = plan.run.warmup.0;
    let end = begin + plan.run.sample.0;
    let limit = plan.run.max_events;
    advance(&world, &mut programs, begin, limit, end, &mut options)?;
    world.borrow_mut().slowdown = 1024;
    let before = Snapshot::of(&world.borrow());
    advance(&world, &mut programs, end, limit, end, &mut options)?;
    let after = Snapshot::of(&world.borrow());
    // The programs hold the world.
    drop(programs);
    let Ok(world) = Rc::try_unwrap(world) else {
        return Err(RunError::Standstill(end / 1_000_000));
    };
    let world = world.into_inner();
    let report = Report::new(plan, &world, &before, &after);
    Ok((report, world.tracer.into_stages()))
}

/// What the machine's programs have received, over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Curve {
    /// Bytes that they have received by the end of each step.
    pub received: Vec<u64>,
    /// Segments that the TCP of the other hosts sent again.
    pub retransmitted: u64,
    /// Frames that were lost.
    pub lost: u64,
}

/// Runs a plan, warm-up and sample, and notes after each `step` what the machine's programs have received.
/// The last step may be cut off.
///
/// # Errors
/// As [`run`]; and for a plan whose NIC runs no sockets.
pub fn run_curve(plan: &Plan, step: Span) -> Result<Curve, RunError> {
    if matches!(plan.nic.kind, NicKind::Lanai | NicKind::Hca) {
        return Err(RunError::NoSockets);
    }
    let world = Rc::new(RefCell::new(build(plan, 0)?));
    let mut programs = start(&world, plan);
    let end = plan.run.warmup.0 + plan.run.sample.0;
    let mut received = Vec::new();
    let mut at = 0;
    while at < end {
        at = (at + step.0.max(1)).min(end);
        let options = &mut Options::default();
        advance(&world, &mut programs, at, plan.run.max_events, end, options)?;
        received.push(world.borrow().goodput[0]);
    }
    let world = world.borrow();
    let others = world.hosts.iter().skip(1);
    let retransmitted = others.map(|host| host.os.retransmitted()).sum();
    Ok(Curve { received, retransmitted, lost: world.network.lost })
}

/// The world of a plan before its first event.
fn build(plan: &Plan, traced: u64) -> Result<World, RunError> {
    let text = costs::table(&plan.os.costs).unwrap_or_default();
    let machine_costs = Costs::parse(text, &plan.costs)?;
    let (hardware, driver) = nic::make(plan);
    let mut hosts = vec![Host::new(plan, false, machine_costs, hardware, driver)];
    for _ in 0..plan.link.peers {
        let (hardware, driver) = nic::ideal(plan);
        hosts.push(Host::new(plan, true, Costs::free(), hardware, driver));
    }
    let mut world = World::new(plan, hosts, traced);
    workload::connect(&mut world);
    Ok(world)
}

/// Programs by host and core.
type Programs = BTreeMap<(u16, u16), Program>;

fn start(world: &Rc<RefCell<World>>, plan: &Plan) -> Programs {
    let mut programs = BTreeMap::new();
    let hosts = world.borrow().hosts.len();
    for host in 0..hosts {
        let cores = world.borrow().hosts[host].cores.len();
        for core in 0..cores {
            let id = CoreId { host: host as u16, core: core as u16 };
            let cpu = Cpu::new(Rc::clone(world), id);
            programs.insert((id.host, id.core), workload::program(cpu, plan.clone()));
            // Peers come up after the machine, so that no SYN is lost.
            let at = if host == MACHINE { 0 } else { 100_000_000 };
            world.borrow_mut().kernel.at(at, crate::world::Event::Resume(id));
        }
    }
    programs
}

/// Carries out events until `until`.
fn advance(
    world: &Rc<RefCell<World>>,
    programs: &mut Programs,
    until: u64,
    limit: u64,
    end: u64,
    options: &mut Options<'_>,
) -> Result<(), RunError> {
    let mut context = Context::from_waker(Waker::noop());
    let (mut last, mut at_once) = (u64::MAX, 0);
    loop {
        let resumed = {
            let mut world = world.borrow_mut();
            let Some(at) = world.kernel.next_at() else {
                return Err(RunError::Standstill(world.kernel.now() / 1_000_000));
            };
            if at > until {
                return Ok(());
            }
            at_once = if at == last { at_once + 1 } else { 0 };
            last = at;
            let events = world.kernel.scheduled();
            if at_once > MOST_AT_ONCE {
                return Err(RunError::Circle(MOST_AT_ONCE));
            }
            if events > limit {
                return Err(RunError::TooManyEvents(limit));
            }
            if at_once == 0
                && events.is_multiple_of(PROGRESS)
                && let Some(progress) = &mut options.progress
            {
                progress(at as f64 / end.max(1) as f64);
            }
            let Some(event) = world.kernel.next() else { continue };
            world.handle(event)
        };
        if let Some(id) = resumed
            && let Some(program) = programs.get_mut(&(id.host, id.core))
        {
            // Programs run for ever: nothing is returned.
            let _ = program.as_mut().poll(&mut context);
        }
        if let Some(failure) = world.borrow_mut().failure.take() {
            return Err(failure);
        }
    }
}
