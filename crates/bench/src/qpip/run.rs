//! The rounds, in which all contenders take turns, and the stage that they are on.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use indicatif::ProgressBar;

use super::model::{CONTENDERS, EndKind, Figure, Link, Measured, PlannedQpip, Row, Rows, Slice};
use super::stage::{Order, Reply};
use crate::pair::Launcher;
use crate::sys;

/// A stage that says nothing for so long, beyond the time of its slice, is given up.
const PATIENCE: Duration = Duration::from_secs(30);
/// A contender that fails so often in a figure takes part in it no longer.
const FAILURES: usize = 3;
/// The largest packet that the kernel brings to an XDP socket on a veth interface, a page with its headroom.
const XDP_MTU: u32 = 3498;

/// The process with the links.
pub(super) struct Stage {
    child: Child,
    input: ChildStdin,
    replies: Receiver<String>,
}

impl Stage {
    /// Starts it in a network namespace of its own: as root there if not here.
    ///
    /// # Errors
    ///
    /// There are no namespaces here.
    pub(super) fn start(launcher: &Launcher, cpus: [usize; 2]) -> Result<Self> {
        let root = std::fs::metadata("/proc/self").is_ok_and(|it| is_root(&it));
        let mut program = Command::new("unshare");
        program.arg(if root { "-n" } else { "-rn" }).arg(&launcher.program);
        program.args(["bench", "--stage"]);
        program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = sys::spawn(&mut program, None).context("starting `unshare`")?;
        let input = child.stdin.take().context("no standard input")?;
        let output = child.stdout.take().context("no standard output")?;
        let (sender, replies) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines.take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
        });
        let mut stage = Self { child, input, replies };
        stage.tell(&serde_json::to_string(&cpus)?)?;
        match stage.hear(Duration::ZERO)? {
            Reply::Ready => Ok(stage),
            Reply::Failed(why) => Err(anyhow!(why)),
            Reply::Measured(_) => bail!("an answer to another question"),
        }
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        let written = self.input.write_all(line.as_bytes());
        written.and_then(|()| self.input.write_all(b"\n")).context("there is no network namespace")
    }

    fn hear(&mut self, beyond: Duration) -> Result<Reply> {
        let line = self.replies.recv_timeout(PATIENCE + beyond);
        let line = line.map_err(|_| anyhow!("the process in the network namespace is gone"))?;
        serde_json::from_str(&line).context("its answer")
    }

    /// Has it measure something, which takes so long.
    ///
    /// # Errors
    ///
    /// That failed, or the process is gone.
    pub(super) fn run(&mut self, order: &Order, takes: Duration) -> Result<Measured> {
        self.tell(&serde_json::to_string(order)?)?;
        match self.hear(takes)? {
            Reply::Measured(measured) => Ok(measured),
            Reply::Failed(why) => Err(anyhow!(why)),
            Reply::Ready => bail!("an answer to another question"),
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        sys::end(&mut self.child, 200);
    }
}

fn is_root(of: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    of.uid() == 0
}

/// Runs the part of the plan about QPIP: what came out, and a word about what did not.
pub(crate) fn run(
    plan: &PlannedQpip,
    launcher: &Launcher,
    cpus: [usize; 2],
    bar: &ProgressBar,
) -> (Rows, Vec<String>) {
    let mut rows = empty(plan);
    let mut stage = match Stage::start(launcher, cpus) {
        Ok(stage) => stage,
        Err(error) => return (Rows::default(), vec![format!("QPIP is not measured: {error:#}")]),
    };
    let (mut failures, mut notes) = (BTreeMap::new(), Vec::new());
    for round in 0..plan.rounds as usize {
        let count = rows.len();
        for turn in 0..count {
            // Whoever comes first in one round comes later in the next.
            let row = &mut rows[(turn + round) % count];
            let key = (row.contender.name, row.figure);
            let failed: &mut (usize, String) = failures.entry(key).or_default();
            if failed.0 >= FAILURES {
                continue;
            }
            bar.set_message(format!("round {}: QPIP, {}, MTU {}", round + 1, key.0, row.mtu));
            let takes = Duration::from_millis(2 * plan.slice_ms);
            let outcome = stage.run(&Order::Slice(slice(plan, row)), takes);
            row.rounds.resize(round, None);
            match outcome {
                Ok(measured) => row.rounds.push(Some(measured)),
                Err(error) => *failed = (failed.0 + 1, format!("{error:#}")),
            }
        }
        bar.inc(1);
    }
    for ((name, figure), (count, why)) in failures.iter().filter(|(_, failed)| failed.0 > 0) {
        notes.push(format!("{name}, {figure:?}, failed {count} times, at last: {why}"));
    }
    rows.retain(|row| row.rounds.iter().any(Option::is_some));
    rows.iter_mut().for_each(Row::finish);
    (Rows(rows), notes)
}

/// What is to be measured. Only streams of the usual size are of all MTUs: one octet fills none, and what a
/// program spends on a message depends on none.
fn empty(plan: &PlannedQpip) -> Vec<Row> {
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
            let all = CONTENDERS.iter().filter(|contender| takes_part(&contender.ends));
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
