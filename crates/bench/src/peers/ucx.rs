//! UCX: `ucx_perftest`, which runs a list of tests from a file; by its own transports, and over Quipu
//! as the verbs adapter that it takes Quipu for.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{OWN, OverQuipu, Paces, server_and_client};
use crate::contender::{Contender, Round};
use crate::model::{Kind, Op, Path, Role, Sample, Test};
use crate::plan::{Plan, listed};
use crate::scratch::Scratch;
use crate::sys;

struct Ucx {
    program: PathBuf,
    path: Path,
    /// Nothing if its own transports carry it.
    quipu: OverQuipu,
    paces: Paces,
}

/// By its own transports.
pub(super) fn find() -> Result<Vec<Box<dyn Contender>>> {
    all(&OWN)
}

/// Over Quipu.
pub(super) fn over_quipu(plan: &Plan) -> Result<Vec<Box<dyn Contender>>> {
    all(&super::over_quipu(plan)?)
}

fn all(ways: &[(Path, OverQuipu)]) -> Result<Vec<Box<dyn Contender>>> {
    let program = sys::find_program("ucx_perftest")
        .context("there is no ucx_perftest; Debian has it in ucx-utils")?;
    let make = |(path, quipu): &(Path, OverQuipu)| {
        let (program, path, quipu) = (program.clone(), *path, quipu.clone());
        Box::new(Ucx { program, path, quipu, paces: Paces::default() }) as Box<dyn Contender>
    };
    Ok(ways.iter().map(make).collect())
}

/// The transports that are Quipu's, and the device.
pub(super) const OVER_QUIPU: [(&str, &str); 2] =
    [("UCX_TLS", "rc_verbs,ud_verbs,self"), ("UCX_NET_DEVICES", "quipu0:1")];

/// The name of the test, and what goes with it.
fn test_name(test: Test) -> Option<&'static str> {
    Some(match (test.kind, test.op) {
        (Kind::Latency, Op::Send) => "tag_lat",
        (Kind::Latency, Op::Write) => "ucp_put_lat",
        // One at a time, whatever the program would do by itself.
        (Kind::Latency, Op::Read) => "ucp_get -O 1",
        (Kind::Latency, Op::FetchAdd) => "ucp_fadd -O 1",
        (Kind::Latency, Op::CompareSwap) => "ucp_cswap -O 1",
        (Kind::Stream, Op::Send) => "tag_bw",
        (Kind::Stream, Op::Write) => "ucp_put_bw",
        (Kind::Stream, Op::Read) => "ucp_get",
        (Kind::Stream, Op::FetchAdd) => "ucp_fadd",
        (Kind::Stream, Op::CompareSwap) => "ucp_cswap",
        (Kind::Wake | Kind::Connect | Kind::Crowd, _) | (_, Op::Copy | Op::Connection) => {
            return None;
        }
    })
}

/// The tests as a file, one a line; each is called by its size. Streams of every kind get the depth of all
/// streams: without `-O` a test has one of its own, which is 32 for sends and puts, and 1 for the rest.
fn batch(name: &str, kind: Kind, depth: u32, counts: &[(u64, u64)]) -> String {
    let depth = if kind == Kind::Stream { format!(" -O {depth}") } else { String::new() };
    counts.iter().fold(String::new(), |mut text, (size, count)| {
        let warmup = count / 10 + 1;
        let _ = writeln!(text, "s{size} -t {name} -s {size} -n {count} -w {warmup}{depth}");
        text
    })
}

/// A line of the output in CSV: name, iterations, percentile, average and overall latency (us),
/// average and overall bandwidth (MiB/s), average and overall message rate (1/s).
fn parse(line: &str, kind: Kind) -> Option<Sample> {
    let fields: Vec<_> = line.split(',').map(str::trim).collect();
    let size = fields.first()?.strip_prefix('s')?.parse().ok()?;
    let number = |index: usize| fields.get(index)?.parse::<f64>().ok().filter(|n| *n > 0.0);
    match kind {
        Kind::Stream => number(8).map(|rate| Sample::new(size, 1e9 / rate)),
        _ => number(4).map(|us| Sample::new(size, us * 1e3)),
    }
}

impl Ucx {
    /// `ucx_perftest` with the transports that this contender is about.
    fn command(&self) -> Command {
        let mut command = match &self.quipu {
            Some((through, _)) => {
                let mut command = through.command(self.path, &self.program);
                command.envs(OVER_QUIPU);
                command
            }
            None => Command::new(&self.program),
        };
        match (&self.quipu, self.path) {
            (Some(_), _) => &mut command,
            (None, Path::SameHost) => command.env("UCX_TLS", "posix,cma"),
            (None, _) => command.env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", "lo"),
        };
        command.env("UCX_LOG_LEVEL", "error");
        command
    }
}

impl Contender for Ucx {
    fn name(&self) -> &str {
        match (&self.quipu, self.path) {
            (None, Path::SameHost) => "UCX posix+cma",
            (None, _) => "UCX tcp",
            (Some((through, _)), Path::SameHost) if through.shared => "Quipu shared, UCX",
            (Some(_), Path::SameHost) => "Quipu, UCX",
            (Some(_), _) => "Quipu tcp, UCX",
        }
    }

    fn path(&self) -> Path {
        self.path
    }

    fn role(&self) -> Role {
        if self.quipu.is_some() { Role::Quipu } else { Role::Peer }
    }

    fn sizes(&self, test: Test, sizes: &[u64]) -> Vec<u64> {
        match (test_name(test), &self.quipu) {
            (None, _) => Vec::new(),
            (Some(_), Some((_, points))) => listed(points, test, sizes),
            (Some(_), None) => sizes.to_vec(),
        }
    }

    fn run(&mut self, round: &Round, test: Test, sizes: &[u64]) -> Result<Vec<Sample>> {
        let name = test_name(test).context("not measured")?;
        let counts = self.paces.counts(round, test, sizes);
        let scratch = Scratch::new("ucx")?;
        let file =
            scratch.write("tests", batch(name, test.kind, round.depth, &counts).as_bytes())?;
        let port = sys::free_port()?;
        let command = |to: &[&str]| {
            let mut command = self.command();
            command.args(to).args(["-p", &port.to_string()]);
            command.arg("-b").arg(&file).args(["-v", "-f"]);
            command
        };
        let (mut server, mut client) = (command(&[]), command(&["127.0.0.1"]));
        let output = server_and_client(&mut server, &mut client, port, round.cpus)?;
        let samples: Vec<_> = output.lines().filter_map(|line| parse(line, test.kind)).collect();
        ensure!(samples.len() == sizes.len(), "{} of {} results", samples.len(), sizes.len());
        self.paces.learn(test, &samples);
        Ok(samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_prints() {
        let line = "s8, 1000,0.569,7.473,7.475,1.02,1.02,133815,133000";
        assert_eq!(parse(line, Kind::Latency), Some(Sample::new(8, 7475.0)));
        assert_eq!(parse(line, Kind::Stream), Some(Sample::new(8, 1e9 / 133_000.0)));
        assert_eq!(parse("tests,iterations,50.0_percentile_lat", Kind::Latency), None);
        let over_quipu = "s1048576,  100,124.768,137.925,137.925,7250.31,7250.31,7250,7250";
        assert_eq!(parse(over_quipu, Kind::Latency), Some(Sample::new(1 << 20, 137_925.0)));
    }

    #[test]
    fn writes_what_it_reads() {
        let text = batch("tag_lat", Kind::Latency, 128, &[(8, 100), (64, 10)]);
        assert_eq!(text, "s8 -t tag_lat -s 8 -n 100 -w 11\ns64 -t tag_lat -s 64 -n 10 -w 2\n");
    }

    #[test]
    fn streams_of_every_kind_have_the_depth_of_all_streams() {
        for op in [Op::Send, Op::Write, Op::Read, Op::FetchAdd, Op::CompareSwap] {
            let test = Test { kind: Kind::Stream, op };
            let text = batch(test_name(test).unwrap(), test.kind, 128, &[(8, 10)]);
            assert_eq!(text.matches("-O").count(), 1, "{text}");
            assert!(text.ends_with(" -O 128\n"), "{text}");
            let alone = Test { kind: Kind::Latency, op };
            let text = batch(test_name(alone).unwrap(), alone.kind, 128, &[(8, 10)]);
            assert!(!text.contains("-O 128"), "{text}");
        }
    }
}
