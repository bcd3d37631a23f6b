//! Open MPI: a small program of our own, built with the compiler that is found; by its own transports,
//! and over Quipu through UCX.

use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};

use super::{OWN, OverQuipu, Paces, Running, ucx};
use crate::contender::{Contender, Round};
use crate::model::{Kind, Op, Path, Role, Sample, Test};
use crate::plan::{Plan, listed};
use crate::scratch::Scratch;
use crate::sys;

/// What the two ranks run.
const SOURCE: &str = include_str!("../../../../bench/peers/mpi.c");

struct Mpi {
    mpirun: PathBuf,
    /// Where the program was built.
    scratch: Rc<Scratch>,
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
    let place = "Debian has it in openmpi-bin and libopenmpi-dev";
    let mpirun = sys::find_program("mpirun").with_context(|| format!("no mpirun; {place}"))?;
    let mpicc = sys::find_program("mpicc").with_context(|| format!("no mpicc; {place}"))?;
    let scratch = Rc::new(Scratch::new("mpi")?);
    let source = scratch.write("mpi.c", SOURCE.as_bytes())?;
    let mut build = Command::new(mpicc);
    build.arg("-O2").arg("-o").arg(scratch.path().join("mpi")).arg(source);
    Running::start(&mut build, None)?.finish().context("building its program")?;
    let make = |(path, quipu): &(Path, OverQuipu)| {
        let (mpirun, scratch, quipu) = (mpirun.clone(), Rc::clone(&scratch), quipu.clone());
        let (path, paces) = (*path, Paces::default());
        Box::new(Mpi { mpirun, scratch, path, quipu, paces }) as Box<dyn Contender>
    };
    Ok(ways.iter().map(make).collect())
}

/// A line: kind, size, nanoseconds.
fn parse(line: &str) -> Option<Sample> {
    let mut words = line.split_whitespace().skip(1);
    let size = words.next()?.parse().ok()?;
    let ns: f64 = words.next()?.parse().ok()?;
    (ns > 0.0).then_some(Sample::new(size, ns))
}

impl Mpi {
    /// `mpirun` with the transports that this contender is about.
    fn command(&self) -> Command {
        let Some((through, _)) = &self.quipu else {
            let mut command = Command::new(&self.mpirun);
            command.args(["--mca", "pml", "ob1"]);
            match self.path {
                Path::SameHost => command.args(["--mca", "btl", "self,vader"]),
                _ => {
                    command.args(["--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"])
                }
            };
            return command;
        };
        let mut command = through.command(self.path, &self.mpirun);
        command.args(["--mca", "pml", "ucx", "--mca", "btl", "self"]);
        // The system's UCX; ranks of this machine inherit the environment.
        command.envs(ucx::OVER_QUIPU).env("UCX_LOG_LEVEL", "error");
        command
    }
}

impl Contender for Mpi {
    fn name(&self) -> &str {
        match (&self.quipu, self.path) {
            (None, Path::SameHost) => "Open MPI shm",
            (None, _) => "Open MPI tcp",
            (Some((through, _)), Path::SameHost) if through.shared => "Quipu shared, Open MPI",
            (Some(_), Path::SameHost) => "Quipu, Open MPI",
            (Some(_), _) => "Quipu tcp, Open MPI",
        }
    }

    fn path(&self) -> Path {
        self.path
    }

    fn role(&self) -> Role {
        if self.quipu.is_some() { Role::Quipu } else { Role::Peer }
    }

    fn sizes(&self, test: Test, sizes: &[u64]) -> Vec<u64> {
        let ours = test.op == Op::Send && matches!(test.kind, Kind::Latency | Kind::Stream);
        match &self.quipu {
            _ if !ours => Vec::new(),
            Some((_, points)) => listed(points, test, sizes),
            None => sizes.to_vec(),
        }
    }

    fn run(&mut self, round: &Round, test: Test, sizes: &[u64]) -> Result<Vec<Sample>> {
        let mut command = self.command();
        command.args(["-np", "2", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe"]);
        // Ranks that share no processor must not yield, as they would when oversubscribed.
        command.args(["--mca", "mpi_yield_when_idle", "0"]);
        command.env("BENCH_CPU0", round.cpus[0].to_string());
        command.env("BENCH_CPU1", round.cpus[1].to_string());
        command.env("BENCH_DEPTH", round.depth.to_string());
        command.arg(self.scratch.path().join("mpi"));
        for (size, count) in self.paces.counts(round, test, sizes) {
            command.arg(format!("{}:{size}:{count}", test.kind));
        }
        let output = Running::start(&mut command, None)?.finish()?;
        let samples: Vec<_> = output.lines().filter_map(parse).collect();
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
        assert_eq!(parse("latency 8 312.500"), Some(Sample::new(8, 312.5)));
        assert_eq!(parse("latency 8 0.000"), None);
        assert_eq!(parse("[host:1] mca_base_component_repository_open: unable to open"), None);
    }
}
