//! Quipu as programs see it: perftest's programs, unmodified, through `quipu run`.

use anyhow::{Context, Result};

use super::{Paces, Through, server_and_client};
use crate::contender::{Contender, Round};
use crate::model::{Kind, Op, Path, Role, Sample, Test};
use crate::plan::{Plan, PlannedTest, listed};
use crate::sys;

/// The largest datagram.
const MTU: u64 = 4096;

struct Perftest {
    through: Through,
    path: Path,
    points: Vec<PlannedTest>,
    paces: Paces,
}

pub(super) fn find(plan: &Plan) -> Result<Vec<Box<dyn Contender>>> {
    sys::find_program("ib_send_lat").context("there is no ib_send_lat; Debian: perftest")?;
    let through = Through::find()?;
    let make = |path| {
        let (through, points) = (through.clone(), plan.perftest.clone());
        Box::new(Perftest { through, path, points, paces: Paces::default() }) as Box<dyn Contender>
    };
    Ok(vec![make(Path::SameHost), make(Path::Tcp), make(Path::Udp)])
}

fn program(test: Test) -> Option<&'static str> {
    Some(match (test.kind, test.op) {
        (Kind::Latency | Kind::Wake, Op::Send) => "ib_send_lat",
        (Kind::Latency, Op::Write) => "ib_write_lat",
        (Kind::Latency, Op::Read) => "ib_read_lat",
        (Kind::Latency, Op::FetchAdd | Op::CompareSwap) => "ib_atomic_lat",
        (Kind::Stream, Op::Send) => "ib_send_bw",
        (Kind::Stream, Op::Write) => "ib_write_bw",
        (Kind::Stream, Op::Read) => "ib_read_bw",
        (Kind::Stream, Op::FetchAdd | Op::CompareSwap) => "ib_atomic_bw",
        (Kind::Wake | Kind::Connect | Kind::Crowd, _) | (_, Op::Copy | Op::Connection) => {
            return None;
        }
    })
}

/// With `--output` the program prints one number: microseconds, or millions of messages a second.
fn parse(output: &str, kind: Kind) -> Option<f64> {
    let number = output.lines().rev().find_map(|line| line.trim().parse::<f64>().ok())?;
    if number <= 0.0 {
        return None;
    }
    Some(match kind {
        Kind::Stream => 1e3 / number,
        _ => number * 1e3,
    })
}

impl Perftest {
    fn measure(&self, round: &Round, test: Test, size: u64, count: u64) -> Result<f64> {
        let program = program(test).context("not measured")?;
        let port = sys::free_port()?;
        let command = |to: &[&str]| {
            let mut command = self.through.command(self.path, program);
            command.args(["-d", "quipu0", "-F"]);
            if self.path == Path::Udp {
                command.args(["-c", "UD"]);
            }
            if test.kind == Kind::Wake {
                command.arg("--events");
            }
            if test.kind == Kind::Stream {
                command.args(["-t", &round.depth.to_string()]);
            }
            let number = if test.kind == Kind::Stream { "message_rate" } else { "latency" };
            command.arg(format!("--output={number}"));
            command.args(["-p", &port.to_string(), "-n", &count.to_string()]);
            if !matches!(test.op, Op::FetchAdd | Op::CompareSwap) {
                command.args(["-s", &size.to_string()]);
            }
            command.args(to);
            command
        };
        let (mut server, mut client) = (command(&[]), command(&["127.0.0.1"]));
        let output = server_and_client(&mut server, &mut client, port, round.cpus)
            .with_context(|| format!("{program} with {size} bytes"))?;
        parse(&output, test.kind).with_context(|| format!("{program} printed no number"))
    }
}

impl Contender for Perftest {
    fn name(&self) -> &str {
        match self.path {
            Path::SameHost => "Quipu, perftest",
            Path::Tcp => "Quipu tcp, perftest",
            Path::Udp => "Quipu ud, perftest",
        }
    }

    fn path(&self) -> Path {
        self.path
    }

    fn role(&self) -> Role {
        Role::Quipu
    }

    fn sizes(&self, test: Test, sizes: &[u64]) -> Vec<u64> {
        let mut sizes = listed(&self.points, test, sizes);
        if self.path == Path::Udp {
            sizes.retain(|size| test.op == Op::Send && *size <= MTU);
        }
        sizes
    }

    fn run(&mut self, round: &Round, test: Test, sizes: &[u64]) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for (size, count) in self.paces.counts(round, test, sizes) {
            // Fewer than that perftest does not do.
            samples.push(Sample::new(size, self.measure(round, test, size, count.max(8))?));
        }
        self.paces.learn(test, &samples);
        Ok(samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_prints() {
        assert_eq!(parse(" WARNING: BW peak won't be measured\n1.25\n", Kind::Stream), Some(800.0));
        assert_eq!(parse("0.50\n", Kind::Latency), Some(500.0));
        assert_eq!(parse("", Kind::Latency), None);
        let ud = " WARNING: BW peak won't be measured in this run.\n0.081506\n";
        assert!(parse(ud, Kind::Stream).is_some_and(|ns| (ns - 12_269.0).abs() < 1.0));
    }
}
