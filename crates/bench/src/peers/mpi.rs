//! Open MPI: a small program of our own, built with the compiler that is found.

use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};

use super::{Paces, Running};
use crate::contender::{Contender, Round};
use crate::model::{Kind, Op, Path, Role, Sample, Test};
use crate::scratch::Scratch;
use crate::sys;

/// What the two ranks run.
const SOURCE: &str = include_str!("../../../../bench/peers/mpi.c");

struct Mpi {
    mpirun: PathBuf,
    /// Where the program was built.
    scratch: Rc<Scratch>,
    path: Path,
    paces: Paces,
}

pub(super) fn find() -> Result<Vec<Box<dyn Contender>>> {
    let place = "Debian has it in openmpi-bin and libopenmpi-dev";
    let mpirun = sys::find_program("mpirun").with_context(|| format!("no mpirun; {place}"))?;
    let mpicc = sys::find_program("mpicc").with_context(|| format!("no mpicc; {place}"))?;
    let scratch = Rc::new(Scratch::new("mpi")?);
    let source = scratch.write("mpi.c", SOURCE.as_bytes())?;
    let mut build = Command::new(mpicc);
    build.arg("-O2").arg("-o").arg(scratch.path().join("mpi")).arg(source);
    Running::start(&mut build, None)?.finish().context("building its program")?;
    let make = |path| {
        let (mpirun, scratch) = (mpirun.clone(), Rc::clone(&scratch));
        Box::new(Mpi { mpirun, scratch, path, paces: Paces::default() }) as Box<dyn Contender>
    };
    Ok(vec![make(Path::SameHost), make(Path::Tcp)])
}

/// A line: kind, size, nanoseconds.
fn parse(line: &str) -> Option<Sample> {
    let mut words = line.split_whitespace().skip(1);
    let size = words.next()?.parse().ok()?;
    let ns: f64 = words.next()?.parse().ok()?;
    (ns > 0.0).then_some((size, ns))
}

impl Contender for Mpi {
    fn name(&self) -> &str {
        match self.path {
            Path::SameHost => "Open MPI shm",
            Path::Tcp => "Open MPI tcp",
        }
    }

    fn path(&self) -> Path {
        self.path
    }

    fn role(&self) -> Role {
        Role::Peer
    }

    fn sizes(&self, test: Test, sizes: &[u64]) -> Vec<u64> {
        let ours = test.op == Op::Send && test.kind != Kind::Wake;
        if ours { sizes.to_vec() } else { Vec::new() }
    }

    fn run(&mut self, round: &Round, test: Test, sizes: &[u64]) -> Result<Vec<Sample>> {
        let mut command = Command::new(&self.mpirun);
        let transports = match self.path {
            Path::SameHost => "self,vader",
            Path::Tcp => "self,tcp",
        };
        command.args(["-np", "2", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe"]);
        // Ranks that share no processor must not yield, as they would when oversubscribed.
        command.args(["--mca", "pml", "ob1", "--mca", "mpi_yield_when_idle", "0"]);
        command.args(["--mca", "btl", transports]);
        if self.path == Path::Tcp {
            command.args(["--mca", "btl_tcp_if_include", "lo"]);
        }
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
