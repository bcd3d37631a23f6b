//! The rounds, in which all contenders take turns, and the stage that they are on.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use indicatif::ProgressBar;
use serde::Serialize;

use super::model::{CONTENDERS, EndKind, Figure, Link, Measured, PlannedQpip, Row, Rows, Slice};
use super::stage::{LONGEST_WARM_UP, Order, Reply};
use crate::nearness::Nearness;
use crate::pair::{Launcher, lines_of};
use crate::sys;

/// A stage that says nothing for so long, beyond the time of its slice, is given up.
const PATIENCE: Duration = Duration::from_secs(30);
/// A contender that fails so often in a figure takes part in it no longer.
const FAILURES: usize = 3;
/// The largest packet that the kernel brings to an XDP socket on a veth interface, a page with its headroom.
const XDP_MTU: u32 = 3498;

/// The process with the links. One that is gone, or did not answer in time, is replaced by another: a late
/// answer would be taken for that to the next question.
pub(super) struct Stage {
    program: PathBuf,
    arguments: Vec<String>,
    cpus: [usize; 2],
    patience: Duration,
    process: Option<Process>,
}

impl Stage {
    /// Starts it in a network namespace of its own: as root there if not here.
    ///
    /// # Errors
    ///
    /// There are no namespaces here.
    pub(super) fn start(launcher: &Launcher, cpus: [usize; 2]) -> Result<Self> {
        let root = std::fs::metadata("/proc/self").is_ok_and(|it| is_root(&it));
        let mut arguments = vec![if root { "-n" } else { "-rn" }.to_owned()];
        arguments.push(launcher.program.to_str().context("this program's name")?.to_owned());
        arguments.extend(["bench", "--stage"].map(str::to_owned));
        Self::of("unshare".into(), arguments, cpus)
    }

    fn of(program: PathBuf, arguments: Vec<String>, cpus: [usize; 2]) -> Result<Self> {
        let mut stage = Self { program, arguments, cpus, patience: PATIENCE, process: None };
        stage.process()?;
        Ok(stage)
    }

    fn process(&mut self) -> Result<&mut Process> {
        if self.process.is_none() {
            let mut program = Command::new(&self.program);
            program.args(&self.arguments);
            self.process = Some(Process::start(&mut program, self.cpus)?);
        }
        self.process.as_mut().context("there is no process")
    }

    /// Has it measure something, which takes so long.
    ///
    /// # Errors
    ///
    /// That failed, or the process is gone.
    pub(super) fn run(&mut self, order: &Order, takes: Duration) -> Result<Measured> {
        let patience = self.patience + takes;
        match self.process().and_then(|process| process.ask(order, patience)) {
            Ok(Reply::Measured(measured)) => Ok(measured),
            Ok(Reply::Failed(why)) => Err(anyhow!(why)),
            other => {
                self.process = None;
                other.and_then(|_| bail!("an answer to another question"))
            }
        }
    }
}

/// A process that measures.
struct Process {
    child: Child,
    input: ChildStdin,
    replies: Receiver<String>,
    complaints: Receiver<String>,
}

impl Process {
    fn start(program: &mut Command, cpus: [usize; 2]) -> Result<Self> {
        program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let name = program.get_program().to_string_lossy().into_owned();
        let mut child = sys::spawn(program, None).with_context(|| format!("starting `{name}`"))?;
        let input = child.stdin.take().context("no standard input")?;
        let (replies, complaints) = (lines_of(child.stdout.take()), lines_of(child.stderr.take()));
        let mut process = Self { child, input, replies, complaints };
        match process.ask(&cpus, PATIENCE).context("there is no network namespace")? {
            Reply::Ready => Ok(process),
            Reply::Failed(why) => Err(anyhow!(why)),
            Reply::Measured(_) => bail!("an answer to another question"),
        }
    }

    fn ask(&mut self, what: &impl Serialize, patience: Duration) -> Result<Reply> {
        let line = serde_json::to_string(what)? + "\n";
        // Who is gone cannot be told, and says nothing.
        let told = self.input.write_all(line.as_bytes());
        let reply = self.replies.recv_timeout(if told.is_ok() { patience } else { Duration::ZERO });
        match reply {
            Ok(line) => serde_json::from_str(&line).context("its answer"),
            Err(RecvTimeoutError::Timeout) if told.is_ok() => bail!("it does not answer"),
            Err(_) => {
                let next = || self.complaints.recv_timeout(Duration::from_millis(200)).ok();
                let said: Vec<_> = std::iter::from_fn(next).take(4).collect();
                bail!("the process in the network namespace is gone: {}", said.join("; "))
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        sys::end(&mut self.child, 200);
    }
}

fn is_root(of: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    of.uid() == 0
}

/// Runs the part of the plan about QPIP with those that are wanted: what came out, and a word about what did
/// not. All contenders of a figure and a point are a race, run while the processors are equally near to each
/// other: programs and adapters hand each octet from one to the other.
pub(crate) fn run(
    plan: &PlannedQpip,
    wanted: impl Fn(&str) -> bool,
    launcher: &Launcher,
    cpus: [usize; 2],
    bar: &ProgressBar,
) -> (Rows, Vec<String>) {
    let mut rows = empty(plan, wanted);
    let mut stage = match Stage::start(launcher, cpus) {
        Ok(stage) => stage,
        Err(error) => return (Rows::default(), vec![format!("QPIP is not measured: {error:#}")]),
    };
    let (mut failures, mut notes) = (BTreeMap::new(), Vec::new());
    let mut nearness = Nearness::new(cpus, time_of(plan, rows.len()));
    for round in 0..plan.rounds as usize {
        let count = rows.len();
        let mut race = None;
        for turn in 0..count {
            // The one that comes first in one round comes later in the next.
            let row = &mut rows[(turn + round) % count];
            let key = (row.contender.name, row.figure);
            let failed: &mut (usize, String) = failures.entry(key).or_default();
            if failed.0 >= FAILURES {
                continue;
            }
            bar.set_message(format!("round {}: QPIP, {}, MTU {}", round + 1, key.0, row.mtu));
            if race.replace((row.figure, row.at())) != Some((row.figure, row.at())) {
                nearness.begin();
            }
            let takes = (LONGEST_WARM_UP + 2) * Duration::from_millis(plan.slice_ms);
            let order = Order::Slice(slice(plan, row));
            let (outcome, line_ns) = nearness.measure(|| stage.run(&order, takes));
            row.rounds.resize(round, None);
            row.lines_ns.resize(round, None);
            match outcome {
                Ok(measured) => {
                    row.rounds.push(Some(measured));
                    row.lines_ns.push(line_ns);
                }
                Err(error) => *failed = (failed.0 + 1, format!("{error:#}")),
            }
        }
        bar.inc(1);
    }
    for ((name, figure), (count, why)) in failures.iter().filter(|(_, failed)| failed.0 > 0) {
        notes.push(format!("{name}, {figure:?}, failed {count} times, at last: {why}"));
    }
    notes.extend(nearness.note("QPIP is"));
    rows.retain(|row| row.rounds.iter().any(Option::is_some));
    (Rows::finish(rows), notes)
}

/// About how long all of it takes.
fn time_of(plan: &PlannedQpip, rows: usize) -> Duration {
    Duration::from_millis(2 * plan.slice_ms) * plan.rounds * rows as u32
}

/// What is to be measured. Only streams of the usual size are of all MTUs: one octet fills none, and what a
/// program spends on a message depends on none.
fn empty(plan: &PlannedQpip, wanted: impl Fn(&str) -> bool) -> Vec<Row> {
    let mut rows = Vec::new();
    for figure in Figure::ALL {
        let mtus = if figure == Figure::Bulk { &plan.mtus[..] } else { &plan.mtus[..1] };
        let sizes = if figure == Figure::Sizes { &plan.sizes[..] } else { &[plan.message] };
        let points = mtus.iter().flat_map(|&mtu| sizes.iter().map(move |&message| (mtu, message)));
        for point in points {
            let takes_part = |ends: &[EndKind; 2]| {
                (point.0 <= XDP_MTU || !ends.contains(&EndKind::XdpQueuePair))
                    && (figure != Figure::Sizes || ends.iter().all(|end| end.sleeps()))
            };
            let all = CONTENDERS.iter().filter(|it| takes_part(&it.ends) && wanted(it.name));
            rows.extend(all.map(|contender| Row::new(*contender, figure, point)));
        }
    }
    rows
}

fn slice(plan: &PlannedQpip, row: &Row) -> Slice {
    let link: Link = row.contender.link;
    Slice {
        link,
        ends: row.contender.ends,
        figure: row.figure,
        mtu: row.mtu,
        message: row.message,
        slice_ms: plan.slice_ms,
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::QPIP_XDP;
    use super::*;

    /// A stage that says it is ready, and then does what the script says.
    fn stage(script: &str) -> Result<Stage> {
        let script = format!("read cpus; echo '\"Ready\"'; {script}");
        Stage::of("sh".into(), vec!["-c".into(), script], [0, 0])
    }

    fn answer(value: f64) -> String {
        let measured = Measured { value, ..Measured::default() };
        serde_json::to_string(&Reply::Measured(measured)).unwrap()
    }

    fn order() -> Order {
        let (link, ends, figure) = (Link::Veth, [EndKind::Socket; 2], Figure::Bulk);
        Order::Slice(Slice { link, ends, figure, mtu: 1500, message: 1, slice_ms: 1 })
    }

    #[test]
    fn a_late_answer_is_not_that_to_the_next_question() {
        let scratch = crate::scratch::Scratch::new("stage").unwrap();
        let seen = scratch.path().join("seen");
        // The first process answers the first order when it hears the second; another one answers at once.
        let (late, own, first) = (answer(1.0), answer(2.0), seen.display());
        let mut stage = stage(&format!(
            "if [ -e {first} ]; then while read order; do echo '{own}'; done; fi
             touch {first}; read order; read next; echo '{late}'; echo '{own}'; read end"
        ))
        .unwrap();
        stage.patience = Duration::ZERO;
        let error = stage.run(&order(), Duration::ZERO).unwrap_err();
        assert_eq!(error.to_string(), "it does not answer");
        stage.patience = PATIENCE;
        std::fs::write(&seen, "").unwrap();
        assert_eq!(stage.run(&order(), Duration::ZERO).unwrap().value, 2.0);
    }

    #[test]
    fn a_stage_that_is_gone_is_quoted_and_replaced() {
        let mut stage = stage("read order; echo it broke >&2; exit 3").unwrap();
        for _ in 0..2 {
            let error = stage.run(&order(), Duration::ZERO).unwrap_err().to_string();
            assert!(error.ends_with("is gone: it broke"), "{error}");
        }
        let complains = vec!["-c".into(), "echo not permitted >&2; exit 1".into()];
        let error = Stage::of("sh".into(), complains, [0, 0]).map(drop).unwrap_err();
        assert!(format!("{error:#}").ends_with("is gone: not permitted"), "{error:#}");
    }

    #[test]
    fn only_who_is_wanted_is_measured() {
        let plan = PlannedQpip {
            rounds: 1,
            slice_ms: 10,
            mtus: vec![1500],
            message: 1024,
            sizes: vec![1024],
        };
        let rows = empty(&plan, |name| name == QPIP_XDP);
        assert!(!rows.is_empty() && rows.iter().all(|row| row.contender.name == QPIP_XDP));
        assert!(empty(&plan, |_| true).len() > rows.len());
    }
}
