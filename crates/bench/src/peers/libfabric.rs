//! libfabric: `fi_pingpong`, one size at a time.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::{Paces, server_and_client};
use crate::contender::{Contender, Round};
use crate::model::{Kind, Op, Path, Role, Sample, Test};
use crate::sys;

struct Libfabric {
    program: PathBuf,
    path: Path,
    paces: Paces,
}

pub(super) fn find() -> Result<Vec<Box<dyn Contender>>> {
    let program = sys::find_program("fi_pingpong")
        .context("there is no fi_pingpong; Debian has it in libfabric-bin")?;
    let make = |path| {
        Box::new(Libfabric { program: program.clone(), path, paces: Paces::default() })
            as Box<dyn Contender>
    };
    Ok(vec![make(Path::SameHost), make(Path::Tcp)])
}

/// The last line has: bytes, sent, acknowledged, total, time, MB/s, microseconds per transfer (half
/// a round trip), millions of transfers a second.
fn parse(output: &str) -> Option<f64> {
    let line = output.lines().rfind(|line| !line.trim().is_empty())?;
    let us: f64 = line.split_whitespace().nth(6)?.parse().ok()?;
    (us > 0.0).then_some(us * 1e3)
}

impl Contender for Libfabric {
    fn name(&self) -> &str {
        match self.path {
            Path::SameHost => "libfabric shm",
            _ => "libfabric tcp",
        }
    }

    fn path(&self) -> Path {
        self.path
    }

    fn role(&self) -> Role {
        Role::Peer
    }

    fn sizes(&self, test: Test, sizes: &[u64]) -> Vec<u64> {
        let ours = test == Test { kind: Kind::Latency, op: Op::Send };
        // It allocates its buffers for at most that much.
        let fits = |size: &&u64| ours && **size <= 1 << 20;
        sizes.iter().filter(fits).copied().collect()
    }

    fn run(&mut self, round: &Round, test: Test, sizes: &[u64]) -> Result<Vec<Sample>> {
        let (provider, domain) = match self.path {
            Path::SameHost => ("shm", "shm"),
            _ => ("tcp", "lo"),
        };
        let mut samples = Vec::new();
        for (size, count) in self.paces.counts(round, test, sizes) {
            let port = sys::free_port()?.to_string();
            let command = |to: &[&str]| {
                let mut command = Command::new(&self.program);
                command.args(["-p", provider, "-e", "rdm", "-d", domain]);
                command.args(["-I", &count.to_string(), "-S", &size.to_string()]).args(to);
                command
            };
            let (mut server, mut client) =
                (command(&["-B", &port]), command(&["-P", &port, "127.0.0.1"]));
            let output = server_and_client(&mut server, &mut client, port.parse()?, round.cpus)
                .with_context(|| format!("{size} bytes"))?;
            let ns = parse(&output).with_context(|| format!("{size} bytes: no result"))?;
            samples.push(Sample::new(size, ns));
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
        let text = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
64      1k      =1k      125k        0.03s      4.03      15.88       0.06\n";
        assert_eq!(parse(text), Some(15_880.0));
        assert_eq!(parse("nothing"), None);
    }
}
